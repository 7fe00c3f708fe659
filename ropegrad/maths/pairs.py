"""How channels pair up: the only place that knows `half` from `interleaved`."""

from __future__ import annotations

from types import ModuleType

from ropegrad.arrays import Array
from ropegrad.maths.layout import reshape


def split_pairs(xp: ModuleType, x: Array, pairing: str) -> tuple[Array, Array]:
    """First and second members of the pairs on the last axis: x (..., R) → two of (..., R/2).

    `half` pairs channel j with j + R/2 (GPT-NeoX, Llama), `interleaved` 2j with 2j + 1 (GPT-J).
    """
    if pairing == "half":
        middle = x.shape[-1] // 2
        return x[..., :middle], x[..., middle:]
    return x[..., 0::2], x[..., min(1, x.shape[-1]) :: 2]


def join_pairs(xp: ModuleType, first: Array, second: Array, pairing: str) -> Array:
    """The inverse of `split_pairs`: two of (..., R/2) → (..., R)."""
    if pairing == "half":
        return xp.concat([first, second], axis=-1)
    return reshape(xp, xp.stack([first, second], axis=-1), (*first.shape[:-1], 2 * first.shape[-1]))


def split_table(xp: ModuleType, table: Array, pairing: str, form: str) -> tuple[Array, Array]:
    """What a table holds for the two members of each pair.

    A `full` table (..., R) has a column a channel, and the two of a pair may differ;
    a `half` table (..., R/2) has one column for both.
    """
    return split_pairs(xp, table, pairing) if form == "full" else (table, table)


def join_table(xp: ModuleType, first: Array, second: Array, pairing: str, form: str) -> Array:
    """The adjoint of `split_table`: a column that served both members collects both gradients."""
    return join_pairs(xp, first, second, pairing) if form == "full" else first + second
