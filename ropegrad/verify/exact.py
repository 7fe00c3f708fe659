"""What an oracle says about one output: its exact value, and what rounding bounds are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropegrad.verify.doubledouble import two_sum
from ropegrad.verify.sums import Change, Floats, Inputs

Bools = NDArray[np.bool_]
Bilinear = Callable[[Change, Change], Floats]
_ROWS = 512  # of a product whose operand is made in passing


@dataclass(frozen=True)
class Product:
    """A matrix product D·B of qkv: D holds rotated gradients, `[rows, K]`; B is `[K, columns]`.

    left    D (in double-double its high part)
    spread  S: |g·c| + |g_p·s_p| for rotated channels, |g| for the others
    right   B
    size    |B|
    sums    sums(f, g): as S, with the terms f(a)·g(b) in place of |a·b|
    """

    left: Floats
    spread: Floats
    right: Floats
    size: Floats
    sums: Bilinear | None

    @property
    def depth(self) -> int:
        """K."""
        return int(self.left.shape[1])

    @cached_property
    def gaps(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Rows of D with a term that is zero, and columns of B: elsewhere n = K."""
        return np.flatnonzero(~self.spread.all(axis=1)), np.flatnonzero(~self.right.all(axis=0))

    @property
    def terms(self) -> Floats:
        """n: the products that are not zero. One whose D cancels to zero counts: it need not in float32."""
        kind = np.float32 if self.depth < 1 << 24 else np.float64  # sums of ones are exact in it
        counts = (self.spread != 0).astype(kind) @ (self.right != 0).astype(kind)
        return np.asarray(counts, np.float64)

    @property
    def P(self) -> Floats:
        """S·|B|, at least the sum of the terms' magnitudes."""
        total: Floats = self.spread @ self.size
        return total

    @property
    def Q(self) -> Floats:
        """|D|·|B|, the sum of the terms' magnitudes."""
        return np.abs(self.left) @ self.size

    def weighted(self, of_spread: float, of_left: float) -> Floats:
        """of_spread·P + of_left·Q in one matrix product."""
        total = np.empty((self.left.shape[0], self.size.shape[1]))
        for start in range(0, len(total), _ROWS):
            rows = slice(start, start + _ROWS)
            weights = np.abs(self.left[rows])
            weights *= of_left
            weights += of_spread * self.spread[rows]
            np.matmul(weights, self.size, out=total[rows])
        return total

    def part(self, rows: Any, columns: Any) -> Product:
        """The product for some rows and columns (without `sums`)."""
        left, spread = self.left[rows], self.spread[rows]
        return Product(left, spread, self.right[:, columns], self.size[:, columns], None)

    def squares(self, rows: NDArray[np.intp]) -> Floats:
        """Σt² of some rows of the result."""
        return np.square(self.left[rows]) @ np.square(self.right)


@dataclass(frozen=True)
class Expected:
    """One output as it should be; arrays have its shape, in the caller's layout, and are float64.

    value, low  the exact result is value + low (low None: zero), up to the oracle's own error, which
                `bounds` counts in. NaN: Σ|t| overflows float64 and nothing is known
    magnitude   Σ|t| over the exact terms, |prior| included where results accumulate; None with `product`
    depth       products added, those that are zero included; the prior is not counted
    product     the factors, for grad_hidden_states and the weights' gradients
    touched     where a NaN or Inf input enters the sum; None: nowhere
    copied      the first of the channels that must be the input's, bit for bit; None: no such channels
    bilinear    bilinear(f, g) is Σ f(a)·g(b) over the terms a·b; None with `product`
    """

    value: Floats
    low: Floats | None
    magnitude: Floats | None
    depth: int
    product: Product | None = None
    touched: Bools | None = None
    copied: int | None = None
    bilinear: Bilinear | None = None

    @property
    def terms(self) -> int | Floats:
        """n, the products added: for matrix products those that are not zero, an array where it differs."""
        if self.product is None or not any(gap.size for gap in self.product.gaps):
            return self.depth
        return self.product.terms.reshape(self.value.shape)


def finite(arrays: Inputs) -> tuple[Inputs, bool]:
    """The arrays with 0 for NaN and Inf (themselves where there is none), and whether there was any."""
    clean, found = {}, False
    for name, array in arrays.items():
        mask = None if array is None else np.isfinite(array)
        if array is None or mask is None or mask.all():
            clean[name] = array
        else:
            clean[name], found = np.where(mask, array, np.zeros((), array.dtype)), True
    return clean, found


def indicators(arrays: Inputs) -> Inputs:
    """1 where an array is NaN or Inf, 0 elsewhere."""
    return {
        name: None if array is None else (~np.isfinite(array)).astype(np.float32)
        for name, array in arrays.items()
    }


def accumulated(result: Expected, prior: NDArray[Any]) -> Expected:
    """The prior content of the output is one more term."""
    finite = np.isfinite(prior)
    before = np.where(finite, prior, np.zeros((), prior.dtype)).astype(np.float64)
    value, low, touched, magnitude = result.value + before, result.low, result.touched, result.magnitude
    if low is not None:
        value, error = two_sum(result.value, before)
        low = low + error
    if not finite.all():
        touched = ~finite if touched is None else touched | ~finite
    if magnitude is not None:
        magnitude = magnitude + np.abs(before)
    return replace(result, value=value, low=low, touched=touched, magnitude=magnitude)


def known(result: Expected, magnitude: Floats | None) -> Expected:
    """NaN for the values whose terms overflow float64: nothing is known about them."""
    if magnitude is not None and not (magnitude.max(initial=0.0) < 2.0**1023):
        result.value[~(magnitude < 2.0**1023)] = np.nan
    return result
