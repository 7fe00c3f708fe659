"""Between a caller's layout and the [B, H, S, D] that the formulas are written in; views, no arithmetic."""

from __future__ import annotations

from types import ModuleType

from ropegrad.arrays import Array

_TO_BHSD = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (1, 2, 0, 3)}
_FROM_BHSD = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3)}


def reshape(xp: ModuleType, array: Array, shape: tuple[int, ...]) -> Array:
    """xp.reshape, of empty arrays too."""
    try:
        return xp.reshape(array, shape)
    except Exception:
        if 0 not in shape:
            raise
        return xp.zeros(shape, dtype=array.dtype)  # Dask cannot reshape what is empty, and raises anything


def to_bhsd(xp: ModuleType, array: Array, layout: str) -> Array:
    """[B, H, S, D] from the caller's layout."""
    return array if layout == "bhsd" else xp.permute_dims(array, _TO_BHSD[layout])


def from_bhsd(xp: ModuleType, array: Array, layout: str) -> Array:
    """The caller's layout from [B, H, S, D]."""
    return array if layout == "bhsd" else xp.permute_dims(array, _FROM_BHSD[layout])


def to_rows(xp: ModuleType, array: Array, layout: str) -> Array:
    """Heads laid side by side, a token a row: [B·S, H·D] in the order of `hidden_rows`."""
    by_token = array
    if layout == "bhsd":
        by_token = xp.permute_dims(array, (0, 2, 1, 3))
    first, second, heads, dim = by_token.shape
    return reshape(xp, by_token, (first * second, heads * dim))


def from_rows(xp: ModuleType, rows: Array, axes: tuple[int, int, int, int], layout: str) -> Array:
    """The inverse of `to_rows`; axes are (B, H, S, D)."""
    batch, heads, seq, dim = axes
    if layout == "sbhd":
        return reshape(xp, rows, (seq, batch, heads, dim))
    by_token = reshape(xp, rows, (batch, seq, heads, dim))
    return by_token if layout == "bshd" else xp.permute_dims(by_token, (0, 2, 1, 3))


def hidden_rows(xp: ModuleType, hidden: Array) -> Array:
    """Hidden states [B, S, C] (or [S, B, C]) as a matrix of tokens."""
    first, second, size = hidden.shape
    return reshape(xp, hidden, (first * second, size))
