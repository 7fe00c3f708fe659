"""The products around RoPE in attention's Q, K, V projections, on the array API. Forward beside backward.

X [tokens, C] are the hidden states, W [rows, C] a weight, Y [tokens, rows] what it projects to.
`matmul` is the namespace's product at the accuracy that was promised.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from ropegrad.arrays import Array

Matmul = Callable[[Array, Array], Array]


def project(xp: ModuleType, hidden: Array, weight: Array, bias: Array | None, *, matmul: Matmul) -> Array:
    """Y = X·Wᵀ + b."""
    projected = matmul(hidden, weight.T)
    return projected if bias is None else projected + bias


def hidden_backward(xp: ModuleType, grad: Array, weight: Array, *, matmul: Matmul) -> Array:
    """dX = dY·W. With dY = [dQ dK dV] and W = [Wq; Wk; Wv] packed, one product sums all three."""
    return matmul(grad, weight)


def weight_backward(xp: ModuleType, grad: Array, hidden: Array, *, matmul: Matmul) -> Array:
    """dW = dYᵀ·X, packed or not."""
    return matmul(grad.T, hidden)


def bias_backward(xp: ModuleType, grad: Array) -> Array:
    """db = Σ over tokens of dY."""
    return xp.sum(grad, axis=0)
