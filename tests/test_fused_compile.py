"""The one-pass RoPE kernel compiles for every GPU generation, as the rule has it, and stays in registers."""

import itertools
from dataclasses import replace

import pytest
from conftest import need, skip

need("cupy", "compile")

import offline_compile as offline  # noqa: E402

from ropegrad.arrays import DTYPES  # noqa: E402
from ropegrad.backends import rope_launch  # noqa: E402
from ropegrad.backends.rope_config import MOST_SHARED  # noqa: E402
from ropegrad.backends.rope_instance import kernel_text  # noqa: E402
from ropegrad.backends.rope_launch import prepare, wanted  # noqa: E402
from ropegrad.backends.rope_memory import NAMES, Memory, array_of, dense_memory  # noqa: E402
from ropegrad.spec import RopeSpec  # noqa: E402

TARGETS = [(cuda, arch) for cuda in (12, 13) for arch in offline.ARCHES]
NEEDS = (("q", "k", "cos", "sin"), ("q", "k"), ("cos", "sin"))
L2 = 60 << 20

# (heads, kv_heads, head_dim, rotary_dim) of models, and some that nobody has.
SHAPES = [
    (32, 8, 128, 128), (64, 8, 128, 128), (32, 32, 128, 128), (28, 4, 128, 128), (14, 2, 64, 64),
    (71, 1, 64, 64), (8, 1, 256, 256), (40, 40, 128, 128), (12, 12, 64, 64), (16, 16, 256, 64),
    (96, 8, 128, 128), (128, 8, 192, 192), (128, 128, 192, 64), (20, 20, 80, 80), (24, 24, 96, 96),
    (48, 8, 128, 64), (1, 1, 64, 64), (7, 7, 2, 2), (3, 1, 10, 6), (256, 256, 64, 64), (1024, 1, 128, 128),
    (8, 8, 512, 512), (4, 4, 4096, 4096), (16, 2, 72, 72), (25, 5, 112, 112),
]  # fmt: skip


def rope(heads, kv_heads, head_dim, rotary_dim, **words):
    return RopeSpec(
        batch=1, heads=heads, kv_heads=kv_heads, seq=2048, head_dim=head_dim, rotary_dim=rotary_dim,
        table_batch=1, **words,
    )  # fmt: skip


def launch_of(spec, offset=0):
    """For contiguous arrays that start `offset` bytes past a multiple of 16."""
    layout = [
        dense_memory(*array_of(spec, name))._replace(offset=offset) if name in wanted(spec) else None
        for name in NAMES
    ]
    return prepare(spec, tuple(layout), L2)


def few():
    """All dtypes, each with some of the rest."""
    words = itertools.cycle(
        itertools.product(
            ("half", "interleaved"), ("full", "half"), NEEDS, ("exact", "paired"), (False, True)
        )
    )
    for dtype, table_dtype in itertools.product(DTYPES, DTYPES):
        for _ in range(5):  # not a divisor of how many words there are
            pairing, table, needs, adjoint, accumulate = next(words)
        yield rope(
            32, 8, 128, 128, dtype=dtype, table_dtype=table_dtype, pairing=pairing, table=table, needs=needs,
            adjoint=adjoint, accumulate=accumulate,
        )  # fmt: skip


def many():
    """Everything that is compiled for these shapes, but for `paired`, which compiles as `exact` does."""
    for shape in SHAPES[:3]:
        for dtype, table_dtype in itertools.product(DTYPES, DTYPES):
            for pairing, table, needs, accumulate in itertools.product(
                ("half", "interleaved"), ("full", "half"), NEEDS, (False, True)
            ):
                yield rope(
                    *shape, dtype=dtype, table_dtype=table_dtype, pairing=pairing, table=table, needs=needs,
                    accumulate=accumulate,
                )  # fmt: skip


def judge(cuda, arch, specs, offset=0):
    """Compile what the rule picks, as one program. A spill, a stack frame or a flush is a fault."""
    if offline.load(cuda) is None:
        skip(f"needs extra 'compile': {' and '.join(offline.WHEELS[cuda])}", required=True)
    instances = {launch_of(spec, offset).instance: spec for spec in specs}
    text = kernel_text() + "".join(one.definition(f"kernel_{i}") for i, one in enumerate(instances))
    compiled = {one.kernel: one for one in offline.compile_program(cuda, arch, text)}
    assert len(compiled) == len(instances)
    wrong = []
    for i, (instance, spec) in enumerate(instances.items()):
        one = compiled[f"kernel_{i}"]
        faults = [fault for fault in one.faults() if not fault.startswith("fma.rn")]  # joined on purpose
        print(f"CUDA {cuda} {arch:8} {one.registers:3} registers {instance.threads:4} threads  {spec}")
        wrong += [f"{spec}: {fault}" for fault in faults]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("cuda", "arch"), TARGETS)
def test_every_dtype(cuda, arch):
    judge(cuda, arch, few())


@pytest.mark.parametrize("offset", [0, 2])
def test_shapes_of_models(offset):
    """Aligned, and element by element."""
    dtype = "float32" if offset == 0 else "bfloat16"
    judge(13, "sm_90a", [rope(*shape, dtype=dtype, table_dtype=dtype) for shape in SHAPES], offset)


@pytest.mark.long
@pytest.mark.parametrize(("cuda", "arch"), TARGETS)
def test_everything(cuda, arch):
    judge(cuda, arch, many())


def test_a_planted_spill_is_found(monkeypatch):
    """So many blocks on a multiprocessor that each thread has 32 registers."""
    choose = rope_launch.choose
    monkeypatch.setattr(rope_launch, "choose", lambda work: replace(choose(work), blocks=6))
    with pytest.raises(AssertionError, match="bytes of spills"):
        judge(13, "sm_90a", [rope(*SHAPES[0])])


# ---- the rule ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("needs", NEEDS, ids=",".join)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_rule_s_launches_can_be_made_and_reach_everything(shape, dtype, needs):
    spec = rope(*shape, dtype=dtype, table_dtype=dtype, needs=needs)
    made = launch_of(spec)
    instance, (threads, _, _) = made.instance, made.block
    assert threads == made.config.threads <= 1024
    assert made.shared <= MOST_SHARED
    assert made.grid[0] * made.config.tokens >= spec.seq * instance.parts
    assert instance.parts * made.config.lanes * 2 * instance.vector >= spec.rotary_dim
    for heads, groups in ((spec.heads, made.config.groups_q), (spec.kv_heads, made.config.groups_k)):
        assert groups * made.config.rows <= 2 * max(heads, made.config.rows), "threads without work"
    if "cos" in needs:
        assert made.grid[1] == 1, "heads are summed in one block"


def test_arguments_lie_as_the_kernel_reads_them():
    spec = rope(4, 2, 8, 8)
    layout = tuple(
        Memory(0, tuple(100 * (i + 1) + 4 * (axis + 1) for axis in range(len(array_of(spec, name)[0]))))
        for i, name in enumerate(NAMES)
    )
    layout = tuple(memory._replace(strides=(*memory.strides[:-1], 4)) for memory in layout)
    made = prepare(spec, layout, L2)
    values = made.filled(tuple(range(1, 11)))
    heads = [1, 0, 108, 112, 4, 2, 0, 208, 212, 4]  # address, batch (one), head, token, channel
    assert values.tolist()[:10] == heads
    assert values.tolist()[30:34] == [7, 0, 708, 4]
    assert values.tolist()[46:] == [4, 2, 1, 2048, 1, 0]
