"""Arrays far from one another, so that an index that is far off hits nothing that a kernel may touch."""

import ctypes
import math
import mmap
from typing import Any

import numpy as np

GUARD = 64 << 20  # bytes on either side; never touched, so they cost address space only
_LAZY = 0x4000  # Linux's MAP_NORESERVE, which Python has from 3.12 on


def empty(shape: tuple[int, ...] | int, dtype: Any) -> np.ndarray:
    """As np.empty, filled with NaN (and -1), aligned as GPUs align."""
    shape = (shape,) if isinstance(shape, int) else shape
    dtype = np.dtype(dtype)
    raw = _bytes(math.prod(shape) * dtype.itemsize)
    raw[:] = 0xFF
    return raw.view(dtype).reshape(shape)


def apart(x: np.ndarray) -> np.ndarray:
    """A copy of x with its strides, gaps and overlaps, read-only if x is; its lowest address is aligned.

    What lies in the gaps is copied too, unless the array is so far apart itself that they are guard enough.
    """
    if not x.size:
        return np.empty(x.shape, x.dtype)
    low, high = np.lib.array_utils.byte_bounds(x)
    raw = _bytes(high - low)
    copy = np.ndarray(x.shape, x.dtype, raw.data, x.__array_interface__["data"][0] - low, x.strides)
    if raw.size <= GUARD:
        raw[:] = (ctypes.c_uint8 * raw.size).from_address(low)
    else:
        copy[...] = x
    copy.flags.writeable = x.flags.writeable
    return copy


def reserve(size: int) -> mmap.mmap:
    """Zeros; a page takes memory once it is touched."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _LAZY)


def _bytes(size: int) -> np.ndarray:
    return np.frombuffer(reserve(2 * GUARD + max(size, 1)), np.uint8, size, GUARD)
