"""Positions to tables, on the array API."""

from __future__ import annotations

import math
from types import ModuleType

from ropegrad.arrays import Array
from ropegrad.maths.pairs import join_pairs


def angles(xp: ModuleType, positions: Array, rotary_dim: int, base: float) -> Array:
    """θ[..., i] = position · base^(−2i/R), i = 0 … R/2−1, in float64 (Su et al. 2021, §3.2.2)."""
    frequencies = [math.pow(base, -2.0 * i / rotary_dim) for i in range(rotary_dim // 2)]
    return positions[..., None] * xp.asarray(frequencies, dtype=xp.float64, **_device(positions))


def _device(positions: Array) -> dict[str, object]:
    device = getattr(positions, "device", None)
    return {} if device is None else {"device": device}


def cos_sin(xp: ModuleType, theta: Array, *, pairing: str, table: str) -> tuple[Array, Array]:
    """cos θ and sin θ as a `half` table (..., R/2), or repeated for both members as a `full` one (..., R)."""
    cos, sin = xp.cos(theta), xp.sin(theta)
    if table == "half":
        return cos, sin
    return join_pairs(xp, cos, cos, pairing), join_pairs(xp, sin, sin, pairing)
