"""How the QKV memory pass reads: widths of its accesses, and what cannot be written at once.

Nothing here needs a GPU: addresses, strides and sizes go in, numbers come out.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ropegrad.arrays import nbytes
from ropegrad.backends.qkv_workspace import Standing, parts_of, products_of, terms
from ropegrad.spec import QkvSpec

ALIGNED = 16  # bytes of the widest access
GRADIENTS = {"q": "grad_query", "k": "grad_key", "v": "grad_value"}


class Placed(NamedTuple):
    """An array on the device: address and strides in bytes."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def vectors(spec: QkvSpec, arrays: dict[str, Placed]) -> tuple[int, int]:
    """Channels an access, of the gradients and of the matrices: the widest that widths and memory allow."""
    rope, size = spec.rope, nbytes((1,), spec.rope.dtype)
    grads = [arrays[name] for name in GRADIENTS.values() if name in arrays]
    tables = [arrays[name] for name in ("cos", "sin") if name in arrays]
    matrices = [arrays[n] for n in ("hidden_states", *(f"{p}_weight" for p in "qkv")) if n in arrays]
    interleaved = rope.pairing == "interleaved"
    turned = rope.rotary_dim if interleaved else rope.rotary_dim // 2

    def head(vector: int) -> bool:
        run = vector // 2 if interleaved and rope.table == "half" else vector
        whole = rope.head_dim % vector == 0 and turned % vector == 0
        fits = all(_aligned(x, size, vector) for x in grads)
        return whole and fits and all(_aligned(x, nbytes((1,), rope.table_dtype), run) for x in tables)

    def matrix(vector: int) -> bool:
        return (spec.hidden_size or 0) % vector == 0 and all(_aligned(x, size, vector) for x in matrices)

    widest = 4 if terms(spec) == 2 else 8  # as registers allow
    widths = [width for width in (8, 4, 2) if width <= widest and width * size <= ALIGNED]
    return next(filter(head, widths), 1), next(filter(matrix, widths), 1)


def _aligned(one: Placed, itemsize: int, vector: int) -> bool:
    """Whether `vector` neighbours on the last axis are one access, or several of 16 bytes."""
    if not one.shape or 0 in one.shape:
        return True
    unit = min(vector * itemsize, ALIGNED)
    if one.shape[-1] > 1 and one.strides[-1] != itemsize:
        return False
    others = zip(one.shape[:-1], one.strides[:-1], strict=True)
    return one.address % unit == 0 and all(step % unit == 0 for size, step in others if size > 1)


def dense(one: Placed, itemsize: int, aligned: int) -> bool:
    """Whether an array is contiguous, at a multiple of `aligned`."""
    step = itemsize
    for size, stride in zip(reversed(one.shape), reversed(one.strides), strict=True):
        if size > 1 and stride != step:
            return False
        step *= size
    return one.address % aligned == 0


def standing_of(spec: QkvSpec, arrays: dict[str, Placed]) -> Standing:
    """Which outputs cannot take their product at once, and which inputs the products read as they are."""
    float32 = spec.rope.dtype == "float32"
    aside = [
        need
        for need in spec.needs
        if not need.endswith("_bias")
        and (not float32 or spec.accumulate or not dense(arrays[f"grad_{need}"], 4, ALIGNED))
    ]
    in_place = []
    if float32 and not terms(spec):
        hidden, weights = products_of(spec)
        if weights and dense(arrays["hidden_states"], 4, 4):
            in_place.append("hidden_states")
        if hidden and _neighbours([arrays[f"{part}_weight"] for part in parts_of(spec)]):
            in_place.append("weights")
    return Standing(tuple(aside), tuple(in_place))


def _neighbours(matrices: list[Placed]) -> bool:
    """Whether contiguous float32 matrices stand one behind the other: views of one packed weight."""
    ends = [one.address + 4 * math.prod(one.shape) for one in matrices]
    starts = [one.address for one in matrices[1:]]
    return all(dense(one, 4, 4) for one in matrices) and ends[:-1] == starts
