"""cuBLAS products with float32 sums, scaled by numbers on the device; by address."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from ropegrad.arrays import nbytes
from ropegrad.backends import cublas

_KINDS = {"float16": 2, "bfloat16": 14, "float32": 0}  # cudaDataType_t
_COMPUTE = {"float16": cublas.F32, "bfloat16": cublas.F32, "float32": cublas.PEDANTIC_32F}


class Narrow(NamedTuple):
    """out[m, n] = alpha·left·right + beta·out at addresses: float32 sums and result.

    left is [m, k], or, where transposed, its transpose lies in memory; right is [k, n]. All are row-major;
    pitches are in bytes, `out` is dense. alpha and beta are float32 numbers on the device.
    """

    left: int
    left_pitch: int
    transposed: bool
    right: int
    right_pitch: int
    out: int
    m: int
    n: int
    k: int
    alpha: int
    beta: int


def multiply_narrow(product: Narrow, operand: str, workspace: int, size: int) -> None:
    """One product on the current stream, none of it empty; cuBLAS takes `size` bytes at `workspace`.

    Raises RuntimeError with cuBLAS's status.
    """
    import cupy
    from cupy.cuda import device

    p, library, pointer = product, cublas._library(), ctypes.c_void_p
    item = nbytes((1,), operand)
    handle = pointer(device.get_cublas_handle())
    stream = pointer(cupy.cuda.get_current_stream().ptr)
    statuses = [
        library.cublasSetStream_v2(handle, stream),
        library.cublasSetWorkspace_v2(handle, pointer(workspace), ctypes.c_size_t(size)),
        library.cublasSetPointerMode_v2(handle, 1),  # alpha and beta on the device
        library.cublasGemmEx_64(  # column-major: Cᵀ = Bᵀ·Aᵀ
            handle, 0, int(p.transposed), *map(ctypes.c_int64, (p.n, p.m, p.k)), pointer(p.alpha),
            pointer(p.right), _KINDS[operand], ctypes.c_int64(p.right_pitch // item),
            pointer(p.left), _KINDS[operand], ctypes.c_int64(p.left_pitch // item), pointer(p.beta),
            pointer(p.out), _KINDS["float32"], ctypes.c_int64(p.n), _COMPUTE[operand], -1,
        ),
        library.cublasSetPointerMode_v2(handle, 0),  # as CuPy expects it
        library.cublasSetStream_v2(handle, stream),  # takes the workspace back
    ]  # fmt: skip
    if any(statuses):
        raise RuntimeError(f"cuBLAS refused a product {p.m} x {p.k} x {p.n}: statuses {statuses}")
