"""Every CuPy kernel compiles for every GPU generation, stays in registers, and flushes nothing to zero."""

import functools

import pytest
from conftest import need, skip

need("cupy", "compile")

import offline_compile as offline  # noqa: E402

from ropegrad.backends import cupy_plain  # noqa: E402
from ropegrad.bench import streams  # noqa: E402

TARGETS = pytest.mark.parametrize("arch", offline.ARCHES)
CUDAS = pytest.mark.parametrize("cuda", [12, 13])
MOST_REGISTERS = 64  # 1024 threads then fit on a multiprocessor; no kernel here needs as many


def need_nvrtc(cuda):
    if offline.load(cuda) is None:
        skip(f"needs extra 'compile': {' and '.join(offline.WHEELS[cuda])}", required=True)


@functools.cache
def every_kernel():
    """The kernels, each with the layout of its arrays, and all of them as one program.

    Strided arrays have every kernel in every mixture of dtypes, the other layouts one mixture of each.
    """
    wanted = offline.wanted()
    mixed = sorted(wanted, key=lambda kernel: len(set(kernel.dtypes)))
    one_each = {(kernel.maker, kernel.arguments): kernel for kernel in mixed}.values()
    made = [(kernel, "strided") for kernel in wanted]
    made += [(kernel, layout) for layout in ("contiguous", "strided64") for kernel in one_each]
    return made, offline.program(offline.source(*one) for one in made)


@TARGETS
@CUDAS
def test_every_kernel(cuda, arch, tmp_path):
    need_nvrtc(cuda)
    made, text = every_kernel()
    compiled = {one.kernel: one for one in offline.compile_program(cuda, arch, text)}
    assert len(compiled) == len(made)
    rows, wrong = [], []
    for i, (kernel, layout) in enumerate(made):
        one = compiled[f"kernel_{i}"]
        memory = f"{one.registers:3} registers {one.shared:5} B shared"
        row = f"CUDA {cuda} {arch:8} {memory}  {layout:10} {kernel}"
        rows.append(row)
        faults = one.faults()
        if kernel.maker in ("rotation", "table_sums"):
            mul = f"mul.rn.f{kernel.arguments[0][-2:]}"
            faults += [] if mul in one.ptx else [f"no {mul}"]
        if one.registers > MOST_REGISTERS:
            faults.append(f"more than {MOST_REGISTERS} registers")
        wrong += [f"{row}: {', '.join(faults)}"] if faults else []
    table = tmp_path / "kernels.txt"
    table.write_text("\n".join(rows) + "\n")
    print("", *rows, f"in {table}", sep="\n")
    assert not wrong, "\n".join(wrong)


@TARGETS
@CUDAS
def test_the_stream_kernel(cuda, arch):
    """In registers too; that it flushes sums of its random normal numbers to zero is no fault."""
    need_nvrtc(cuda)
    names = {streams._expression(config) for config in streams.CONFIGS}
    types = "const float4*, const float4*, float4*, long long"
    instances = "".join(f"template __global__ void {name}({types});\n" for name in sorted(names))
    compiled = offline.compile_program(cuda, arch, streams.SOURCE + instances)
    assert len(compiled) == len(names)
    for one in compiled:
        assert one.faults() == ["add.ftz.f32"]
        assert one.registers <= MOST_REGISTERS


SPILL = """
extern "C" __global__ void spill(float* x, const int* at) {
    float a[500];
    for (int i = 0; i < 500; i++) a[i] = x[i * at[0]];
    for (int i = 0; i < 500; i++) a[at[i]] = a[i];
    x[threadIdx.x] = a[at[threadIdx.x]];
}
extern "C" __global__ void __launch_bounds__(1024, 2) crowd(double* x) {
    double a[64];
    for (int i = 0; i < 64; i++) a[i] = x[i * 1024];
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < 64; i++) for (int j = 0; j < i; j++) a[i] = __dadd_rn(a[i], a[j]);
    for (int i = 0; i < 64; i++) x[i * 1024] = a[i];
}
extern "C" __global__ void flush(float* x) { x[0] = x[1] * x[2]; }
extern "C" __global__ void narrow(float* x, double y) { x[0] = float(y); }
extern "C" __global__ void fused(double* x) { x[0] = x[1] * x[2] + x[3]; }
extern "C" __global__ void sound(float* x) {
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(x[0]) : "f"(x[1]), "f"(x[2]));
}
"""


@TARGETS
@CUDAS
def test_planted_faults_are_found(cuda, arch):
    need_nvrtc(cuda)
    found = {one.kernel: " ".join(one.faults()) for one in offline.compile_program(cuda, arch, SPILL)}
    assert "stack frame" in found.pop("spill")
    assert "spills" in found.pop("crowd")
    assert found.pop("flush") == "mul.ftz.f32"
    assert found.pop("narrow") == "cvt.rn.ftz.f32.f64"
    assert found.pop("fused") == "fma.rn.f64"
    assert found == {"sound": ""}


@CUDAS
def test_a_fault_in_a_kernel_of_the_backend_is_found(cuda, monkeypatch):
    """`mul` written in C++ is flushed to zero."""
    need_nvrtc(cuda)
    plain = 'asm("mul.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));'
    assert plain in cupy_plain.ARITHMETIC
    monkeypatch.setattr(cupy_plain, "ARITHMETIC", cupy_plain.ARITHMETIC.replace(plain, "r = a * b;"))
    monkeypatch.setattr(cupy_plain, "rotation", cupy_plain.rotation.__wrapped__)
    kernel = next(one for one in offline.wanted() if one.maker == "rotation")
    text = offline.program([offline.source(kernel, "strided")])
    (compiled,) = offline.compile_program(cuda, "sm_90a", text)
    assert any(".ftz" in fault for fault in compiled.faults())


def test_what_is_compiled_is_what_runs():
    import cupy

    if cupy_plain.no_gpu() is not None:
        skip(cupy_plain.no_gpu(), required=False)
    strided = cupy.zeros((4, 4, 4, 4), "float32")[::2, ::2, ::2, ::2]
    float32 = strided.dtype
    copy = cupy_plain.combined.__wrapped__("float32", (1,))
    copy(strided, strided)
    wanted = offline.Wanted("combined", ("float32", (1,)), (float32,) * 2)
    assert copy.cached_code == offline.source(wanted, "strided")
    total = cupy_plain.table_sums.__wrapped__("float32")
    total(*[strided] * 4, *[cupy.zeros((4, 4, 4), "float32")[::2, ::2, ::2]] * 4, axis=1)
    wanted = offline.Wanted("table_sums", ("float32",), (float32,) * 8)
    assert total.cached_code == offline.source(wanted, "strided")
