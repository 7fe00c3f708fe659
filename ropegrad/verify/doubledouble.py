"""Sums of products to about 106 bits in NumPy: error-free transformations and compensated dot products.

A value is an unevaluated sum hi + lo of two float64 arrays. `np.longdouble` is no help here: on some
platforms it is plain double.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_SPLITTER = 2.0**27 + 1


def two_sum(a: Floats, b: Floats) -> tuple[Floats, Floats]:
    """s, e with s = fl(a + b) and a + b = s + e exactly, unless s overflows (Knuth; Higham 2002 §4.3)."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def two_product(a: Floats, b: Floats) -> tuple[Floats, Floats]:
    """p, e with a * b = p + e: Dekker's product of the significands, the exponents added afterwards.

    Splitting significands instead of the numbers themselves cannot overflow, and neither can it lose
    bits to underflow: p + e is exact as long as the product's last bit is at least 2^-1074; below that
    each of p and e is off by at most 2^-1075. p is Inf where |a * b| exceeds float64's range.
    """
    a, a_exponent = np.frexp(a)
    b, b_exponent = np.frexp(b)
    product = a * b
    a_high, a_low = _split(a)
    b_high, b_low = _split(b)
    error = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    exponent = a_exponent + b_exponent
    return np.ldexp(product, exponent), np.ldexp(error, exponent)


def _split(a: Floats) -> tuple[Floats, Floats]:
    """a = high + low, both of at most 26 bits (Veltkamp); |a| <= 1 here."""
    scaled = a * _SPLITTER
    high = scaled - (scaled - a)
    return high, a - high


def dot(pairs: Iterable[tuple[Any, Any]], shape: tuple[int, ...]) -> tuple[Floats, Floats]:
    """Sum of a * b over the pairs of float64 arrays, each broadcasting to `shape`, as hi + lo.

    Algorithm Dot2 of Ogita, Rump & Oishi, *Accurate sum and dot product* (2005), with the correction
    kept apart: for n pairs |hi + lo - exact| <= 4 n^2 2^-106 sum|a * b| + n 2^-1074. Both are NaN
    or Inf where a partial sum overflows.
    """
    high, low = np.zeros(shape), np.zeros(shape)
    with np.errstate(over="ignore", invalid="ignore"):
        for a, b in pairs:
            product, product_error = two_product(a, b)
            high, sum_error = two_sum(high, product)
            low = low + (sum_error + product_error)
        total = high + low
        return total, low - (total - high)
