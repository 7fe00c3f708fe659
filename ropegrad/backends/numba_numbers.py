"""Numbers for the compiled loop: rows of any of the four dtypes, widened when read and rounded when written.

A stored dtype is known by its `zero`: bfloat16 travels as uint16, float16 as
int16. Conversions are integer arithmetic, so that they need no instruction that a CPU may lack.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.core.extending import intrinsic, overload

from ropegrad.backends.numba_memory import read, write

FLOAT32, FLOAT64, BFLOAT16, FLOAT16 = range(4)  # what is stored at an address
_F32, _F64, BF16, F16 = np.float32(0), np.float64(0), np.uint16(0), np.int16(0)  # as it is stored
_U32 = np.uint32(0)
_STEP, _HALF = np.float32(2.0**-24), np.float32(0.5)  # float16's smallest number; a float32 with steps of it


# ---- bits and roundings ------------------------------------------------------------------------------------


@intrinsic
def bits(context: Any, value: Any, zero: Any) -> Any:
    """The same bits as the zero's type, which has the same size."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(signature.return_type))

    return zero(value, zero), build


@intrinsic
def cast(context: Any, value: Any, zero: Any) -> Any:
    """The value in the zero's type."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.cast(builder, args[0], signature.args[0], signature.return_type)

    return zero(value, zero), build


@njit
def widen_bfloat16(h):
    """float32 from the bits of a bfloat16."""
    return bits(np.uint32(np.uint32(h) << np.uint32(16)), _F32)


@njit
def widen_float16(h):
    """float32 from the bits of a float16, subnormals included."""
    exponent, magnitude = h & np.uint16(0x7C00), np.uint32(h & np.uint16(0x7FFF))
    sign = np.uint32(h & np.uint16(0x8000)) << np.uint32(16)
    subnormal = bits(np.float32(np.int32(magnitude)) * _STEP, _U32)
    shifted = np.uint32(magnitude << np.uint32(13))
    normal = np.uint32(shifted + np.uint32(0x38000000))
    special = np.uint32(shifted | np.uint32(0x7F800000))
    result = subnormal if exponent == 0 else normal
    result = special if exponent == np.uint16(0x7C00) else result
    return bits(np.uint32(result | sign), _F32)


@njit
def to_float32(x):
    """float32, inexact results with an odd last bit: rounding them once more is as rounding x once."""
    f = np.float32(x)
    u = bits(f, _U32)
    if np.float64(f) != np.float64(x) and x == x and u & np.uint32(1) == 0:
        u = np.uint32(u + np.uint32(1)) if abs(x) > abs(np.float64(f)) else np.uint32(u - np.uint32(1))
    return bits(u, _F32)


@njit
def narrow_bfloat16(x):
    """The bits of the bfloat16 nearest to a float32, ties to even; NaN stays NaN."""
    u = bits(x, _U32)
    even = np.uint32(u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1)))
    quiet = np.uint32(u | np.uint32(0x400000))
    return np.uint16((quiet if x != x else even) >> np.uint32(16))


@njit
def narrow_float16(x):
    """The bits of the float16 nearest to a float32, ties to even; NaN stays NaN."""
    u = bits(x, _U32)
    sign, a = (u >> np.uint32(16)) & np.uint32(0x8000), np.uint32(u & np.uint32(0x7FFFFFFF))
    odd = (a >> np.uint32(13)) & np.uint32(1)
    normal = np.uint32(np.uint32(a - np.uint32(0x37FFF001) + odd) >> np.uint32(13))
    subnormal = np.uint32(bits(bits(a, _F32) + _HALF, _U32) - np.uint32(0x3F000000))  # the sum rounds
    result = subnormal if a < np.uint32(0x38800000) else normal
    result = np.uint32(0x7C00) if a >= np.uint32(0x47800000) else result
    result = np.uint32(0x7E00) if a > np.uint32(0x7F800000) else result
    return np.uint16(sign | result)


# ---- 16 bits, and rows of any dtype ------------------------------------------------------------------------


def widen(x, zero):
    """A stored number in the compute dtype."""


def narrow(value, stored):
    """A number of the compute dtype as it is stored, rounded once."""


@overload(widen)
def _widen(x, zero):
    if x == types.uint16:
        return lambda x, zero: cast(widen_bfloat16(x), zero)
    if x == types.int16:
        return lambda x, zero: cast(widen_float16(np.uint16(x)), zero)
    return lambda x, zero: cast(x, zero)


@overload(narrow)
def _narrow(value, stored):
    if stored == types.uint16:
        return lambda value, stored: narrow_bfloat16(to_float32(value))
    if stored == types.int16:
        return lambda value, stored: np.int16(narrow_float16(to_float32(value)))
    return lambda value, stored: cast(value, stored)


@njit
def _load(stored, size, address, step, n, to, zero):
    if step == size:
        for i in range(n):
            write(to, i, widen(read(address, i, stored), zero))
    else:
        for i in range(n):
            write(to, i, widen(read(address + i * step, 0, stored), zero))


@njit
def load(kind, address, step, n, to, zero):
    """n elements `step` bytes apart, side by side in the compute dtype."""
    if kind == FLOAT32:
        _load(_F32, 4, address, step, n, to, zero)
    elif kind == FLOAT64:
        _load(_F64, 8, address, step, n, to, zero)
    elif kind == BFLOAT16:
        _load(BF16, 2, address, step, n, to, zero)
    else:
        _load(F16, 2, address, step, n, to, zero)


@njit
def _store(stored, size, source, address, step, n, zero):
    if step == size:
        for i in range(n):
            write(address, i, narrow(read(source, i, zero), stored))
    else:
        for i in range(n):
            write(address + i * step, 0, narrow(read(source, i, zero), stored))


@njit
def store(kind, source, address, step, n, zero):
    """n elements of the compute dtype, rounded once, to elements `step` bytes apart."""
    if kind == FLOAT32:
        _store(_F32, 4, source, address, step, n, zero)
    elif kind == FLOAT64:
        _store(_F64, 8, source, address, step, n, zero)
    elif kind == BFLOAT16:
        _store(BF16, 2, source, address, step, n, zero)
    else:
        _store(F16, 2, source, address, step, n, zero)


@njit
def store_sum(kind, source, address, step, n, spare, zero):
    """The same, added to what is there; the sum is made in `spare`."""
    load(kind, address, step, n, spare, zero)
    for i in range(n):
        write(spare, i, read(spare, i, zero) + read(source, i, zero))
    store(kind, spare, address, step, n, zero)
