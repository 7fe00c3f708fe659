"""The CPU shim sees what it is there to see: each fault is planted in a kernel that passes without it."""

import re

import ml_dtypes
import numpy as np
import pytest
import shim
from conftest import skip

if shim.why_not() is not None:
    skip(shim.why_not())

TEXT = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>

template <class T> __global__ void scale(const T* x, T* y, long long n) {
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n + OFF) y[i] = x[i] * T(2);
}

// A tile turned round through shared memory, then summed: block, warp, block.
__global__ void reversed_sum(const float* x, float* y, float* sum, int n) {
    extern __shared__ __align__(16) float tile[];
    __shared__ float parts[32];
    tile[threadIdx.x] = threadIdx.x < n ? x[threadIdx.x] : 0.0f;
    FIRST_BARRIER;
    float v = tile[blockDim.x - 1 - threadIdx.x];
    if (threadIdx.x < n) y[threadIdx.x] = v;
    for (int flip = 16; flip; flip >>= 1) v += __shfl_xor_sync(~0u, v, flip);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
    __syncthreads();
    if (threadIdx.x == 0) {
        float total = 0;
        for (int i = 0; i < blockDim.x / 32; ++i) total += parts[i];
        *sum = total;
    }
}

__global__ void unwritten(float* y) {
    __shared__ float one[1];
    extern __shared__ float two[];
    y[blockIdx.x] = one[0] + two[0];
    one[0] = two[0] = 1.0f;
}
__global__ void neighbours(float* y, unsigned mask, int wait) {
    __shared__ float tile[64];
    tile[threadIdx.x] = threadIdx.x;
    if (wait) __syncwarp(mask);
    y[threadIdx.x] = tile[threadIdx.x ^ 1];
}

__global__ void copy4(const float4* x, float4* y) { y[threadIdx.x] = x[threadIdx.x]; }

__global__ void apart(int* y) {
    if (threadIdx.x < 7)
        __syncthreads();
    else
        __syncthreads();
    y[threadIdx.x] = 1;
}
__global__ void early(int* y, int n) {
    if (threadIdx.x >= n) return;
    __syncthreads();
    y[threadIdx.x] = 1;
}
__global__ void lonely(int* y) {
    if (threadIdx.x % 2) __syncwarp(); else __syncthreads();
    y[threadIdx.x] = 1;
}

__global__ void last_wins(int* y) { *y = threadIdx.x + blockIdx.x * blockDim.x; }
__global__ void count(int* y, unsigned* votes) {
    __shared__ unsigned here;
    if (threadIdx.x == 0) here = 0;
    __syncthreads();
    atomicAdd(&here, 1);
    __syncthreads();
    if (threadIdx.x == 0) atomicAdd(y, here);
    const unsigned odd = __ballot_sync(~0u, threadIdx.x % 2);
    const int up = __shfl_up_sync(~0u, int(threadIdx.x), 1, 8);
    const int down = __shfl_down_sync(~0u, int(threadIdx.x), 1);
    if (threadIdx.x == 8) votes[0] = odd, votes[1] = up, votes[2] = down;
}
__global__ void wait_for(volatile int* flag) { while (*flag == 0) continue; }
__global__ void square(int* y, int n) { y[0] = n * n; }
__global__ void shape(unsigned* y) {
    const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    const unsigned i = block * blockDim.x * blockDim.y * blockDim.z + thread;
    y[i] = i;
}
__global__ void fused(float* y, float a, float b) {
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(y[0]) : "f"(a), "f"(b));
    asm volatile("fma.rn.f32 %0, %1, %2, %3;" : "=f"(y[1]) : "f"(a), "f"(b), "f"(-y[0]));
}
struct View { float* data; long long n; };
__global__ void through(View view, const float* x) { for (int i = 0; i <= view.n; ++i) view.data[i] = x[0]; }
template <class T> __global__ void widen(const T* x, float* y) { y[threadIdx.x] = x[threadIdx.x]; }
template <class T> __global__ void narrow(const double* x, T* y) { y[threadIdx.x] = T(x[threadIdx.x]); }
"""
NAMES = (
    "scale<float>", "scale<double>", "reversed_sum", "unwritten", "neighbours", "copy4", "apart", "early",
    "lonely", "last_wins", "count", "wait_for", "square", "shape", "fused", "through", "widen<__half>",
    "widen<__nv_bfloat16>", "narrow<__half>", "narrow<__nv_bfloat16>",
)  # fmt: skip
ORDERS = range(4)


@pytest.fixture(scope="module")
def sound():
    return planted("__syncthreads()", 0)


def line(text):
    """Where it stands first."""
    return TEXT[: TEXT.index(text)].count("\n") + 1


def planted(barrier, off):
    options = (f"-DFIRST_BARRIER={barrier}", f"-DOFF={off}")
    return shim.RawModule(code=TEXT, options=options, name_expressions=NAMES)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_kernel_without_faults(sound, dtype):
    x, y = np.arange(100, dtype=dtype), np.zeros(100, dtype)
    name = {"float32": "scale<float>", "float64": "scale<double>"}[dtype]
    sound.get_function(name)((2,), (64,), (x, y, 100))
    assert np.array_equal(y, 2 * x)


def test_an_index_one_too_far():
    x, y = np.arange(100, dtype=np.float32), np.zeros(100, np.float32)
    with pytest.raises(
        shim.Fault, match=f"reads 4 bytes at byte 400 of array 0, .* at kernels.cu:{line('y[i] = x[i]')}"
    ):
        planted("__syncthreads()", 1).get_function("scale<float>")((2,), (64,), (x, y, 100))


def test_a_view_ends_where_its_last_element_ends(sound):
    x, y = np.arange(100, dtype=np.float32), np.zeros(100, np.float32)
    sound.get_function("scale<float>")((2,), (64,), (x[10:], y[10:], 90))
    with pytest.raises(shim.Fault, match="writes 4 bytes at byte 360 of array 1"):
        sound.get_function("scale<float>")((2,), (64,), (x, y[10:], 100))


def test_a_write_to_what_is_read_only(sound):
    x, y = np.arange(100, dtype=np.float32), np.zeros(100, np.float32)
    y.flags.writeable = False
    with pytest.raises(shim.Fault, match=r"writes 4 bytes at byte 0 of array 1, .* read-only"):
        sound.get_function("scale<float>")((2,), (64,), (x, y, 100))


def reversed_sum(module, threads=128, shared=512, order=0):
    x, y, total = np.arange(100, dtype=np.float32), np.zeros(100, np.float32), np.zeros(1, np.float32)
    arguments = (x, y, total, np.int32(100))
    module.get_function("reversed_sum")((1,), (threads,), arguments, shared_mem=shared, order=order)
    return total, y


def test_barriers_shuffles_and_shared_memory(sound):
    for order in ORDERS:
        total, y = reversed_sum(sound, order=order)
        assert total == 99 * 50
        assert np.array_equal(y[28:], np.arange(99, 27, -1))


def test_a_removed_barrier():
    module = planted("", 0)
    place = f"kernels.cu:({line('tile[threadIdx.x] =')}|{line('= tile[')})"
    message = rf"race: thread \d+ (reads|writes) what thread \d+ (wrote|read), .* at {place} .* at {place}"
    for order in ORDERS:
        with pytest.raises(shim.Fault, match=message):
            reversed_sum(module, order=order)


def test_shared_memory_that_nobody_has_written_is_nan(sound):
    y = np.zeros(2, np.float32)
    sound.get_function("unwritten")((2,), (1,), (y,), shared_mem=4)
    assert np.isnan(y).all()


@pytest.mark.parametrize("wait", [0, 1])
def test_lanes_that_do_not_wait_for_one_another(sound, wait):
    """A barrier of the warp is enough for its own lanes; half the lanes' is for that half."""
    y = np.zeros(64, np.float32)
    for mask in (0xFFFFFFFF, 0x0000FFFF):
        turn = sound.get_function("neighbours")
        arguments = (y, np.uint32(mask), np.int32(wait))
        if wait and mask == 0xFFFFFFFF:
            turn((1,), (64,), arguments)
            assert np.array_equal(y, np.arange(64) ^ 1)
        else:
            with pytest.raises(shim.Fault, match=r"race|leave it out"):
                turn((1,), (64,), arguments)


def test_too_little_dynamic_shared_memory(sound):
    with pytest.raises(shim.Fault, match="writes 4 bytes at byte 508 of dynamic shared memory"):
        reversed_sum(sound, shared=508)


def test_a_misaligned_float4(sound):
    x, y = np.arange(104, dtype=np.float32), np.zeros(100, np.float32)
    first = -x.ctypes.data % 16 // 4  # of the elements, the first on a multiple of 16 bytes
    start = x[first : first + 100]
    out = np.zeros(104, np.float32)
    out = out[-out.ctypes.data % 16 // 4 :][:100]
    sound.get_function("copy4")((1,), (25,), (start, out))
    assert np.array_equal(out, start)
    with pytest.raises(shim.Fault, match=r"kernels.cu:\d+: misaligned address .* float4.* needs 16"):
        sound.get_function("copy4")((1,), (24,), (x[first + 1 :], y))


@pytest.mark.parametrize(
    ("name", "rest", "message"),
    [
        ("apart", (), r"divergent barrier: thread 0 waits at line \d+, thread 7 at line \d+"),
        ("early", (np.int32(5),), r"divergent barrier: thread 0 waits at line \d+, thread 5 has returned"),
        ("lonely", (), "divergent: thread 1 waits for lanes 0xffffffff"),
    ],
)
def test_a_divergent_barrier(sound, name, rest, message):
    y = np.zeros(33, np.int32)
    if name == "early":
        sound.get_function(name)((1,), (32,), (y, np.int32(32)))
        assert y.sum() == 32
    with pytest.raises(shim.Fault, match=message):
        sound.get_function(name)((1,), (y.size,), (y, *rest))


def test_a_race_depends_on_the_order(sound):
    seen = set()
    for order in ORDERS:
        y = np.zeros(1, np.int32)
        sound.get_function("last_wins")((3,), (33,), (y,), order=order)
        seen.add(int(y[0]))
    assert len(seen) > 2


def test_votes_and_atomics(sound):
    for order in ORDERS:
        y, votes = np.zeros(1, np.int32), np.zeros(3, np.uint32)
        sound.get_function("count")((4,), (40,), (y, votes), order=order)
        assert y[0] == 160
        assert list(votes) == [0xAAAAAAAA, 8, 9]


def test_a_thread_that_waits_for_ever(sound):
    flag = np.ones(1, np.int32)
    sound.get_function("wait_for")((1,), (1,), (flag,), most=1000)
    flag[0] = 0
    with pytest.raises(shim.Fault, match="endless loop"):
        sound.get_function("wait_for")((1,), (1,), (flag,), most=1000)


def test_an_overflow_of_int(sound):
    y = np.zeros(1, np.int32)
    sound.get_function("square")((1,), (1,), (y, np.int32(46340)))
    with pytest.raises(shim.Fault, match="'int' overflows"):
        sound.get_function("square")((1,), (1,), (y, np.int32(46341)))


def test_grids_and_blocks_of_three_axes(sound):
    y = np.zeros(2 * 3 * 4 * 5 * 6 * 7, np.uint32)
    sound.get_function("shape")((2, 3, 4), (5, 6, 7), (y,))
    assert np.array_equal(y, np.arange(y.size))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((1,), "1 arguments, the kernel takes 3"), ((1, 2, np.int32(3)), "argument 2 has 4 bytes")],
)
def test_arguments_of_another_number_or_size(sound, arguments, message):
    with pytest.raises(shim.Fault, match=message):
        sound.get_function("scale<float>")((1,), (1,), arguments)


def test_ptx_is_the_instruction_that_it_names(sound):
    y, a = np.zeros(2, np.float32), np.float32(1 + 2**-12)
    sound.get_function("fused")((1,), (1,), (y, a, a))
    assert y[0] == a * a
    assert y[1] == np.float64(a) ** 2 - np.float64(y[0]) != 0


def test_kernels_with_c_names_need_no_list(tmp_path):
    path = tmp_path / "one.cu"
    path.write_text(
        'extern "C" __global__ void __launch_bounds__(64, 1)\none(float* y) { y[threadIdx.x + 1] = 1; }',
        encoding="utf-8",
    )
    module, y = shim.RawModule(path=path), np.zeros(3, np.float32)
    module.get_function("one")((1,), (2,), (y,))
    assert list(y) == [0, 1, 1]
    with pytest.raises(shim.Fault, match=r"byte 12 of array 0, .* at one.cu:2"):
        module.get_function("one")((1,), (3,), (y,))


def test_a_changed_header_is_compiled_anew(tmp_path):
    text = '#include "value.h"\nextern "C" __global__ void one(float* y) { *y = VALUE; }'
    for value in (1, 2, 1):
        (tmp_path / "value.h").write_text(f"#define VALUE {value}", encoding="utf-8")
        y = np.zeros(1, np.float32)
        shim.RawModule(code=text, options=[f"-I{tmp_path}"]).get_function("one")((1,), (1,), (y,))
        assert y[0] == value


def test_what_does_not_compile_says_why():
    with pytest.raises(RuntimeError, match=r"kernels.cu:1:.* error: .*nowhere"):
        shim.RawModule(code="__global__ void wrong() { nowhere(); }", name_expressions=["wrong"])


WAYS = r"""
struct Row { int x[40]; };
extern "C" __global__ void store(char* y, const char* x, int n) { y[n] = x[0]; }
extern "C" __global__ void store_vector(float4* y, const float4* x, int n) { y[n / 16] = x[0]; }
extern "C" __global__ void store_row(char* y, const char* x, int n) { *(Row*)(y + n - 156) = *(const Row*)x; }
extern "C" __global__ void copy_bytes(char* y, const char* x, int n) { memcpy(y, x, n + 1); }
extern "C" __global__ void move_bytes(char* y, const char* x, int n) { memmove(y + n, x, n / 160); }
extern "C" __global__ void fill_bytes(char* y, const char* x, int n) { memset(y, 0, n + 1); }
extern "C" __global__ void copy_vector(char* y, const char* x, int n) { memcpy(y + n - 12, x, 16); }
extern "C" __global__ void store_streaming(float4* y, const float4* x, int n) { __stcs(y + n / 16, x[0]); }
extern "C" __global__ void add(int* y, const int* x, int n) { atomicAdd(y + n / 4, x[0]); }
"""


@pytest.mark.parametrize("way", re.findall(r"void (\w+)", WAYS))
def test_every_way_to_write(way):
    """Up to an array's last byte, and one element past it."""
    kernel = shim.RawModule(code=WAYS).get_function(way)
    x, y = shim.empty(160, np.uint8), shim.empty(160, np.uint8)
    kernel((1,), (1,), (y, x, np.int32(144 if "vector" in way or "stream" in way else 156)))
    with pytest.raises(shim.Fault, match=r"of array [01]"):
        kernel((1,), (1,), (y, x, np.int32(160)))


def test_pointers_in_structs(sound):
    x, y = np.ones(1, np.float32), np.zeros(10, np.float32)
    view = np.array((y.ctypes.data, 9), [("data", "u8"), ("n", "i8")])[()]
    with pytest.raises(shim.Fault, match="writes 4 bytes at byte"):
        sound.get_function("through")((1,), (1,), (view, x))
    sound.get_function("through")((1,), (1,), (view, x), arrays=[y])
    assert y.sum() == 10


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("__half", np.float16), ("__nv_bfloat16", ml_dtypes.bfloat16)],
    ids=["half", "bfloat16"],
)
def test_narrow_floats(sound, name, dtype):
    """Every bit pattern to float; from double to the nearest: at each middle, ties to even, and beside it."""
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    wide = in_blocks(sound.get_function(f"widen<{name}>"), every, np.float32)
    assert np.array_equal(wide, every.astype(np.float32), equal_nan=True)

    finite = np.unique(wide[np.isfinite(wide)]).astype(np.float64)
    step = finite[-1] - finite[-2]
    ends = np.array([-np.inf, *finite, np.inf])  # what is beyond the last middle is infinite
    middles = np.concatenate(
        [[finite[0] - step / 2], (finite[1:] + finite[:-1]) / 2, [finite[-1] + step / 2]]
    )
    even = ends.astype(dtype).view(np.uint16) % 2 == 0
    narrow = sound.get_function(f"narrow<{name}>")
    for values, expected in (
        (middles, np.where(even[:-1], ends[:-1], ends[1:])),
        (np.nextafter(middles, -np.inf), ends[:-1]),
        (np.nextafter(middles, np.inf), ends[1:]),
        (finite, finite),
        (np.array([-1e300, 1e300, -1e-300]), np.array([-np.inf, np.inf, -0.0])),
    ):
        got = in_blocks(narrow, values, dtype).astype(np.float64)
        assert np.array_equal(got, expected)
        zero = got == 0
        assert np.array_equal(np.signbit(got[zero]), np.signbit(values[zero]))
    assert np.isnan(in_blocks(narrow, np.array([np.nan]), dtype).astype(np.float64))


def in_blocks(kernel, x, dtype):
    y = np.zeros(x.size, dtype)
    for start in range(0, x.size, 1024):
        part = slice(start, start + 1024)
        kernel((1,), (y[part].size,), (x[part], y[part]))
    return y
