"""CUDA kernels of RoPE's backward, right ones and wrong ones, for `--arrays cupy --strides contiguous`.

The faults are those that a GPU is needed for: threads that do not wait for one another, blocks that add
into one element at the same time, a last tile that no block has, an index that wraps in 32 bits. The same
text runs on NumPy arrays through the shim of tests/shim, where a race is not left to chance.
"""

import functools
import importlib

import numpy as np

SOURCE = r"""
// One thread, one element of grad_q or grad_k: dx_j = g_j c_j - sigma_j g_p s_p. 16 bytes in, 4 out.
extern "C" __global__ void rotate_back(const float* g, const float* cos, const float* sin, float* out,
                                       int heads, int seq, int dim, long long n) {
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i >= n) return;
#ifdef WRAPS  // division by multiplication: the product has 32 bits, so that it is right for rows below 4,096
    const unsigned magic = (1u << 20) / dim + 1;
    const long long row = dim == 1 ? i : ((unsigned)i * magic) >> 20;
#else
    const long long row = i / dim;
#endif
    const int d = (int)(i % dim), half = dim / 2, p = d < half ? d + half : d - half;
    const long long at = (row / ((long long)heads * seq) * seq + row % seq) * dim;
    const float other = g[i - d + p] * sin[at + p];
    out[i] = g[i] * cos[at + d] + (d < half ? other : -other);
}

// One block, one token: thread h adds up its heads for one channel, then the first adds up the threads.
extern "C" __global__ void sum_heads(const float* gq, const float* q, const float* gk, const float* k,
                                     float* grad_cos, float* grad_sin, int hq, int hk, int seq, int dim) {
    __shared__ float parts[2][256];
    const long long b = blockIdx.x / seq, t = blockIdx.x % seq;
    for (int d = 0; d < dim; ++d) {
        const int p = d < dim / 2 ? d + dim / 2 : d - dim / 2;
        float c = 0, s = 0;
        for (int h = threadIdx.x; h < hq + hk; h += blockDim.x) {
            const bool of_q = h < hq;
            const long long at = of_q ? ((b * hq + h) * seq + t) * dim : ((b * hk + h - hq) * seq + t) * dim;
            const float g = (of_q ? gq : gk)[at + d];
            c += g * (of_q ? q : k)[at + d];
            s += g * (of_q ? q : k)[at + p];
        }
        parts[0][threadIdx.x] = c;
        parts[1][threadIdx.x] = d < dim / 2 ? -s : s;
#ifndef NO_BARRIER
        __syncthreads();
#endif
        if (threadIdx.x == 0) {
            for (int i = 1; i < blockDim.x; ++i) { c += parts[0][i]; parts[1][0] += parts[1][i]; }
            grad_cos[blockIdx.x * (long long)dim + d] = c;
            grad_sin[blockIdx.x * (long long)dim + d] = parts[1][0];
        }
#ifndef NO_BARRIER
        __syncthreads();
#endif
    }
}

// One thread, one element of g: adds its products into the tables' gradients, which are zero before.
extern "C" __global__ void add_products(const float* g, const float* x, float* grad_cos, float* grad_sin,
                                        int heads, int seq, int dim, long long n) {
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i >= n) return;
    const long long row = i / dim;
    const int d = (int)(i % dim), half = dim / 2, p = d < half ? d + half : d - half;
    const long long at = (row / ((long long)heads * seq) * seq + row % seq) * dim + d;
    const float c = g[i] * x[i], s = d < half ? -g[i] * x[i - d + p] : g[i] * x[i - d + p];
#ifdef NOT_ATOMIC
    grad_cos[at] = grad_cos[at] + c;
    grad_sin[at] = grad_sin[at] + s;
#else
    atomicAdd(grad_cos + at, c);
    atomicAdd(grad_sin + at, s);
#endif
}
"""
THREADS = 256


@functools.cache
def _module(on_cpu, options):
    """The kernels, compiled for the GPU or for the shim."""
    return importlib.import_module("shim" if on_cpu else "cupy").RawModule(code=SOURCE, options=options)


def _launch(options, name, blocks, *arguments):
    kernel = _module(isinstance(arguments[0], np.ndarray), tuple(options)).get_function(name)
    if blocks:
        kernel((blocks,), (THREADS,), arguments)


def _blocks(n, whole_tiles_only):
    return n // THREADS if whole_tiles_only else -(-n // THREADS)


def _backward(out, arrays, *options, atomic=False, whole_tiles_only=False):
    """Write the four gradients."""
    gq, gk, q, k, cos, sin = arrays
    batch, _, seq, dim = gq.shape
    sizes = [np.int32(x) for x in (gq.shape[1], gk.shape[1], seq, dim)]
    for g, grad, heads in ((gq, out[0], sizes[0]), (gk, out[1], sizes[1])):
        blocks = _blocks(g.size, whole_tiles_only)
        _launch(options, "rotate_back", blocks, g, cos, sin, grad, heads, *sizes[2:], np.int64(g.size))
    if not atomic:
        _launch(options, "sum_heads", batch * seq if dim else 0, gq, q, gk, k, *out[2:], *sizes)
        return
    out[2][...] = out[3][...] = 0
    for g, x, heads in ((gq, q, sizes[0]), (gk, k, sizes[1])):
        blocks = _blocks(g.size, False)
        _launch(options, "add_products", blocks, g, x, *out[2:], heads, *sizes[2:], np.int64(g.size))


def _fresh(arrays):
    """Outputs as a caller without --dps gets them."""
    library = np if isinstance(arrays[0], np.ndarray) else importlib.import_module("cupy")
    return [library.empty(x.shape, x.dtype) for x in (arrays[0], arrays[1], *arrays[4:])]


def right(*arrays):
    out = _fresh(arrays)
    _backward(out, arrays)
    return out


def right_atomic(*arrays):
    out = _fresh(arrays)
    _backward(out, arrays, atomic=True)
    return out


def right_into(*arrays):
    _backward(arrays[6:], arrays[:6])


def no_barrier(*arrays):
    """The first thread adds up what the others may not have written yet."""
    out = _fresh(arrays)
    _backward(out, arrays, "-DNO_BARRIER")
    return out


def not_atomic(*arrays):
    """Threads of different heads read a sum, add to it and write it back, all at the same time."""
    out = _fresh(arrays)
    _backward(out, arrays, "-DNOT_ATOMIC", atomic=True)
    return out


def tail_without_a_block(*arrays):
    """As many blocks as there are whole tiles."""
    _backward(arrays[6:], arrays[:6], whole_tiles_only=True)


def index_wraps(*arrays):
    """A product of 32 bits in place of a division: wrong from row 4,096 on."""
    out = _fresh(arrays)
    _backward(out, arrays, "-DWRAPS")
    return out


# name: options of `ropegrad verify`, the rules of which at least one must be broken ((): it is right).
TARGETS = {
    "right": ((), ()),
    "right_atomic": ((), ()),
    "right_into": (("--dps",), ()),
    "no_barrier": ((), ("wrong value", "stale output", "below the promised precision")),
    "not_atomic": ((), ("wrong value", "below the promised precision")),
    "tail_without_a_block": (("--dps",), ("output not (fully) written",)),
    "index_wraps": ((), ("wrong value", "raised")),
}
