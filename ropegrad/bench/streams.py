"""Calls that only move bytes: the copy, and the stream kernel with RoPE's mix of reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any

from ropegrad.bench.timing import Call

THREADS = 256

# c = a + b, float4. A block owns runs of UNROLL·256 float4, `gridDim` runs apart; all UNROLL pairs are loaded
# before the first store. 32 bytes in and 16 out per element, as rope_backward's two reads a write. (Threads
# that own every gridDim·256-th element instead were 1-2 % slower above 200 MB on an H200, no faster below.)
SOURCE = r"""
template <bool STREAMING> __device__ void put(float4* to, float4 x) {
    if (STREAMING) __stcs(to, x); else *to = x;
}

template <int UNROLL, bool STREAMING> __global__ void __launch_bounds__(256)
stream(const float4* __restrict__ a, const float4* __restrict__ b, float4* __restrict__ c, long long n) {
    const long long run = UNROLL * 256LL;
    for (long long start = blockIdx.x * run + threadIdx.x; start < n; start += gridDim.x * run) {
        float4 x[UNROLL], y[UNROLL];
        #pragma unroll
        for (int u = 0; u < UNROLL; ++u)
            if (start + u * 256 < n) { x[u] = a[start + u * 256]; y[u] = b[start + u * 256]; }
        #pragma unroll
        for (int u = 0; u < UNROLL; ++u)
            if (start + u * 256 < n) {
                float4 z = {x[u].x + y[u].x, x[u].y + y[u].y, x[u].z + y[u].z, x[u].w + y[u].w};
                put<STREAMING>(c + start + u * 256, z);
            }
    }
}
"""


@dataclass(frozen=True)
class Config:
    """How the stream kernel is launched."""

    blocks_per_sm: int
    unroll: int
    streaming: bool

    @property
    def name(self) -> str:
        """For a table."""
        return f"{self.blocks_per_sm}x{self.unroll} {'streaming' if self.streaming else 'plain'}"


CONFIGS = tuple(Config(*values) for values in product((4, 8, 16, 32), (1, 2, 4), (False, True)))


def elements(moved: int) -> int:
    """float4 elements of each of the three arrays: at least `moved` bytes in all, less than 48 more."""
    return -(-moved // 48)


def grid(config: Config, n: int, multiprocessors: int) -> int:
    """Blocks: as many as asked for, but none without an element."""
    return max(1, min(config.blocks_per_sm * multiprocessors, -(-n // (THREADS * config.unroll))))


@cache
def module() -> Any:
    """The compiled kernels, by name expression."""
    import cupy

    return cupy.RawModule(code=SOURCE, name_expressions=sorted({_expression(config) for config in CONFIGS}))


def _expression(config: Config) -> str:
    return f"stream<{config.unroll}, {str(config.streaming).lower()}>"


def stream_calls(config: Config, sets: Sequence[Sequence[Any]], multiprocessors: int) -> list[Call]:
    """A launch on each set (a, b, c)."""
    kernel = module().get_function(_expression(config))
    n = sets[0][0].size // 4
    shape = (grid(config, n, multiprocessors),), (THREADS,)
    return [partial(kernel, *shape, (a, b, c, n)) for a, b, c in sets]


def copy_calls(sets: Sequence[Sequence[Any]], nbytes: int) -> list[Call]:
    """A device-to-device copy of `nbytes` from the first to the last array of each set."""
    return [partial(_copy, group[-1], group[0], nbytes) for group in sets]


def _copy(to: Any, source: Any, nbytes: int) -> None:
    import cupy

    kind = cupy.cuda.runtime.memcpyDeviceToDevice
    cupy.cuda.runtime.memcpyAsync(
        to.data.ptr, source.data.ptr, nbytes, kind, cupy.cuda.get_current_stream().ptr
    )


def arrays(count: int, sizes: Sequence[int]) -> list[list[Any]]:
    """`count` sets of float32 arrays of these many elements, random normal (zeros can run faster)."""
    import cupy

    random = cupy.random.default_rng(2026)
    return [[random.standard_normal(size, dtype=cupy.float32) for size in sizes] for _ in range(count)]
