"""What the CPU backends' projections share: each brings its own way to rotate.

A `Rotate` writes x, rotated forward or back, into y; both are in the caller's layout, and
their dtypes may differ.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ropegrad.arrays import numpy_dtype
from ropegrad.backends.base import Inputs, Outputs
from ropegrad.backends.numpy_products import Blocks, matrix
from ropegrad.backends.numpy_tile import NumpyArray
from ropegrad.maths import layout as axes
from ropegrad.spec import QkvSpec

Rotate = Callable[[NumpyArray, NumpyArray], None]
_GRADS = {"q": "grad_query", "k": "grad_key", "v": "grad_value"}


def pack(spec: QkvSpec, inputs: Inputs, rotate: Rotate) -> Blocks:
    """dQ, dK, dV as column blocks of one matrix [tokens, ·], each also under its own name."""
    geometry, compute = spec.rope, numpy_dtype(spec.rope.compute)
    parts = [p for p in "qkv" if {"hidden_states", f"{p}_weight", f"{p}_bias"} & set(spec.needs)]
    packed = np.empty((spec.tokens, sum(map(spec.rows, parts))), compute)
    blocks, start = {"packed": packed}, 0
    for part in parts:
        block = blocks[part] = packed[:, start : start + spec.rows(part)]
        start += spec.rows(part)
        view = axes.from_rows(np, block, _head_axes(spec, part), geometry.layout)
        _place(part, inputs[_GRADS[part]], view, rotate)
    return blocks


def project(spec: QkvSpec, inputs: Inputs, rotate: Rotate) -> Outputs:
    """Query and key after RoPE, and value."""
    geometry, compute = spec.rope, numpy_dtype(spec.rope.compute)
    hidden = matrix(inputs["hidden_states"], compute)
    results = {}
    for part, name in (("q", "query"), ("k", "key"), ("v", "value")):
        product = hidden @ matrix(inputs[f"{part}_weight"], compute).T
        if f"{part}_bias" in inputs:
            product += inputs[f"{part}_bias"].astype(compute)
        shape = _head_axes(spec, part)
        results[name] = np.empty(geometry.head_shape(shape[1]), numpy_dtype(geometry.dtype))
        _place(part, axes.from_rows(np, product, shape, geometry.layout), results[name], rotate)
    return results


def _place(part: str, x: NumpyArray, y: NumpyArray, rotate: Rotate) -> None:
    if part == "v":
        np.copyto(y, x, casting="same_kind")
    else:
        rotate(x, y)


def _head_axes(spec: QkvSpec, part: str) -> tuple[int, int, int, int]:
    geometry = spec.rope
    heads = (geometry.heads if part == "q" else geometry.kv_heads) or 0
    return geometry.batch, heads, geometry.seq, geometry.head_dim
