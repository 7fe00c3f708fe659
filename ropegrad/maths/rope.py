"""RoPE and its adjoint, on the array API. Forward beside backward, member by member of each pair.

Shapes are [batch, heads, seq, R] for what is rotated and [batch or 1, seq, columns] for tables; R is the
rotary width. Dtypes: everything arrives in the compute dtype and leaves in it. Nothing is written in place.
Formulas: Su et al., "RoFormer" (2021), eq. 34, with one cosine and one sine *a channel*.
"""

from __future__ import annotations

from types import ModuleType
from typing import Protocol

from ropegrad.arrays import Array
from ropegrad.maths.pairs import join_pairs, join_table, split_pairs, split_table


class TableFormula(Protocol):
    """`cos_backward` or `sin_backward`."""

    def __call__(self, xp: ModuleType, grad: Array, x: Array, *, pairing: str, table: str) -> Array:
        """The table's gradient, heads summed."""
        ...


def rope(xp: ModuleType, x: Array, cos: Array, sin: Array, *, pairing: str, table: str) -> Array:
    """Rotate: y1 = x1·c1 − x2·s1,  y2 = x2·c2 + x1·s2."""
    x1, x2 = split_pairs(xp, x, pairing)
    c1, c2 = split_table(xp, cos[:, None, ...], pairing, table)
    s1, s2 = split_table(xp, sin[:, None, ...], pairing, table)
    return join_pairs(xp, x1 * c1 - x2 * s1, x2 * c2 + x1 * s2, pairing)


def rope_backward(
    xp: ModuleType, grad: Array, cos: Array, sin: Array, *, pairing: str, table: str, adjoint: str = "exact"
) -> Array:
    """Send the gradient of each rotated pair back to the pair.

    `exact` is the adjoint of `rope`: dx1 = g1·c1 + g2·s2,  dx2 = g2·c2 − g1·s1. It is the transpose, not the
    inverse, so scaled tables are right, and the partner's sine, so unequal columns of a pair are.
    `paired` swaps the sines (dx1 = g1·c1 + g2·s1, dx2 = g2·c2 − g1·s2), which is what benchmark problem 068
    computes; it is the adjoint only where the two sines of a pair are equal.
    """
    g1, g2 = split_pairs(xp, grad, pairing)
    c1, c2 = split_table(xp, cos[:, None, ...], pairing, table)
    s1, s2 = split_table(xp, sin[:, None, ...], pairing, table)
    if adjoint == "paired":
        s1, s2 = s2, s1
    return join_pairs(xp, g1 * c1 + g2 * s2, g2 * c2 - g1 * s1, pairing)


def cos_backward(xp: ModuleType, grad: Array, x: Array, *, pairing: str, table: str) -> Array:
    """Gradient of cos, heads summed: dc1 = Σ g1·x1,  dc2 = Σ g2·x2. Result [batch, seq, columns]."""
    g1, g2 = split_pairs(xp, grad, pairing)
    x1, x2 = split_pairs(xp, x, pairing)
    return join_table(xp, xp.sum(g1 * x1, axis=1), xp.sum(g2 * x2, axis=1), pairing, table)


def sin_backward(xp: ModuleType, grad: Array, x: Array, *, pairing: str, table: str) -> Array:
    """Gradient of sin, heads summed: ds1 = −Σ g1·x2,  ds2 = Σ g2·x1. Result [batch, seq, columns]."""
    g1, g2 = split_pairs(xp, grad, pairing)
    x1, x2 = split_pairs(xp, x, pairing)
    return join_table(xp, -xp.sum(g1 * x2, axis=1), xp.sum(g2 * x1, axis=1), pairing, table)
