"""The QKV memory pass compiles for every GPU generation, stays in registers, and flushes nothing to zero."""

import pytest
from conftest import need

need("cupy", "compile")

import offline_compile as offline  # noqa: E402
from test_compile import CUDAS, TARGETS, need_nvrtc  # noqa: E402

from ropegrad.backends import hopper  # noqa: E402
from ropegrad.backends.qkv_instance import ENTRIES, Instance, kernel_text  # noqa: E402

MOST_REGISTERS = {"qkv_convert": 128, "qkv_mend": 128}  # blocks of 512 and twice 256; those of 1024 have 64
MEANT = "fma.rn.f32"  # written as such, in the rotation


def instance(storage, table, operand, vector, matrix_vector, *options):
    words = "interleaved", "half", "add", "two"
    interleaved, half_table, add, two = (word in options for word in words)
    return Instance(
        storage=storage, table=table, operand=operand, vector=vector, matrix_vector=matrix_vector,
        interleaved=interleaved, half_table=half_table, add=add, two=two,
    )  # fmt: skip


GATE = [
    instance("float32", "float32", "float16", 4, 4),
    instance("bfloat16", "float32", "bfloat16", 8, 8, "interleaved", "half", "add"),
    instance("float32", "float32", "float32", 4, 4),
    instance("float32", "float32", "float16", 4, 4, "two"),
]
MORE = [
    instance(storage, table, operand, vector, vector, *options)
    for storage in ("float32", "float16", "bfloat16") for table in ("float32", "bfloat16")
    for operand in ("float32", "float16", "bfloat16") for vector in (1, 2, 4, 8)
    for options in ((), ("interleaved", "half", "add"), *[("two",)][: operand == "float16"])
    if vector < 8 or (storage != "float32" and options != ("two",))
]  # fmt: skip


def compiled(cuda, arch, instances):
    need_nvrtc(cuda)
    text = kernel_text() + "".join(one.definition(f"_{i}") for i, one in enumerate(instances))
    made = offline.compile_program(cuda, arch, text)
    assert len(made) == len(instances) * len(ENTRIES)
    for one in made:
        faults = [fault for fault in one.faults() if fault != MEANT]
        most = MOST_REGISTERS.get(one.kernel.rpartition("_")[0], 64)
        assert not faults, f"{one.kernel}: {faults}, {instances[int(one.kernel.rpartition('_')[2])]}"
        assert one.registers <= most, f"{one.kernel}: {one.registers} registers"


@TARGETS
@CUDAS
def test_the_usual_instances(cuda, arch):
    compiled(cuda, arch, GATE)


@pytest.mark.long
@TARGETS
@CUDAS
def test_every_kind_of_instance(cuda, arch):
    for start in range(0, len(MORE), 8):
        compiled(cuda, arch, MORE[start : start + 8])


@CUDAS
def test_products_on_hopper(cuda):
    """Two warpgroups take 232 registers a thread, one 40: what all start with is 168 for 384 threads."""
    need_nvrtc(cuda)
    made = offline.compile_program(cuda, "sm_90a", hopper.text())
    assert {one.kernel for one in made} == {"qkv_multiply", "qkv_multiply_add"}
    for one in made:
        assert [fault for fault in one.faults() if fault != MEANT] == []
        assert one.registers == 168
        assert one.shared + hopper.SHARED <= 227 << 10
        assert one.ptx.count("wgmma.mma_async") == 2 * 3 * hopper.BOX // 16
