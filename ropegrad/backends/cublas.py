"""cuBLAS products of CuPy arrays, called directly: CuPy refuses them while a CUDA graph is captured."""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

from ropegrad.arrays import Array

# cublasComputeType_t. Pedantic: IEEE arithmetic, whatever NVIDIA_TF32_OVERRIDE or emulation switches say.
PEDANTIC_32F, PEDANTIC_64F, TF32_32F, F32 = 69, 71, 77, 68
_KINDS = {"float16": 2, "float32": 0, "float64": 1}  # cudaDataType_t


def multiply(a: Array, b: Array, out: Array, mode: int) -> None:
    """Out = A·B on the current stream; matrices of any strides, `out` row-major. Sums in float32, or float64.

    Raises RuntimeError with cuBLAS's status.
    """
    import cupy
    from cupy.cuda import device

    (m, k), n = a.shape, b.shape[1]
    if not (m and n and k):
        out.fill(0)
        return
    scalar = ctypes.c_double if mode == PEDANTIC_64F else ctypes.c_float
    (b, transpose_b, ldb), (a, transpose_a, lda) = _operand(b), _operand(a)
    library, handle = _library(), ctypes.c_void_p(device.get_cublas_handle())
    statuses = (
        library.cublasSetStream_v2(handle, ctypes.c_void_p(cupy.cuda.get_current_stream().ptr)),
        library.cublasGemmEx_64(  # column-major: Cᵀ = Bᵀ·Aᵀ
            handle, transpose_b, transpose_a, *map(ctypes.c_int64, (n, m, k)), ctypes.byref(scalar(1)),
            *_array(b, ldb), *_array(a, lda), ctypes.byref(scalar(0)), *_array(out, n), mode, -1,
        ),
    )  # fmt: skip
    if any(statuses):
        raise RuntimeError(f"cuBLAS refused a product {m} x {k} x {n}: status {max(statuses)}")


def _array(x: Array, leading: int) -> tuple[Any, ...]:
    return ctypes.c_void_p(x.data.ptr), _KINDS[str(x.dtype)], ctypes.c_int64(leading)


def _operand(x: Array) -> tuple[Array, int, int]:
    """A matrix that BLAS can read, whether it is transposed to row-major, and its leading dimension."""
    import cupy

    (rows, columns), (down, across) = x.shape, (step // x.itemsize for step in x.strides)
    if across == 1 and down >= columns:
        return x, 0, down
    if down == 1 and across >= rows:
        return x, 1, across
    return cupy.ascontiguousarray(x), 0, columns


@functools.cache
def _library() -> ctypes.CDLL:
    """The library that CuPy has loaded."""
    import cupy

    major = cupy.cuda.runtime.runtimeGetVersion() // 1000
    return ctypes.CDLL(f"cublas64_{major}.dll" if sys.platform == "win32" else f"libcublas.so.{major}")
