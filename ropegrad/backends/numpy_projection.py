"""The QKV projections on NumPy: what the CPU backends share, each with its own way to rotate.

A `Rotate` writes x, rotated forward or back, into y; both are in the caller's layout, and
their dtypes may differ.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ropegrad.arrays import numpy_dtype
from ropegrad.backends.base import Inputs, Outputs, quiet
from ropegrad.backends.numpy_products import Blocks, Product, gradients, matrix, multiply, settle
from ropegrad.backends.numpy_tile import NumpyArray
from ropegrad.maths import layout as axes
from ropegrad.spec import QkvSpec

Rotate = Callable[[NumpyArray, NumpyArray], None]
_GRADS = {"q": "grad_query", "k": "grad_key", "v": "grad_value"}


@quiet
def backward(spec: QkvSpec, inputs: Inputs, out: Outputs, rotate: Rotate, threads: int) -> Outputs:
    """Every gradient that is wanted, by name; rotate turns back."""
    blocks = pack(spec, inputs, rotate)
    products = gradients(spec, inputs, blocks, out)
    multiply(list(products.values()), threads)
    results = {name: product.c for name, product in products.items()}
    for part in "qkv":
        if f"{part}_bias" in spec.needs:
            results[f"grad_{part}_bias"] = blocks[part].sum(axis=0)
    return {name: settle(spec, name, value, out.get(name)) for name, value in results.items()}


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


@quiet
def forward(spec: QkvSpec, inputs: Inputs, rotate: Rotate, threads: int) -> Outputs:
    """Query and key after RoPE, and value."""
    geometry, compute = spec.rope, numpy_dtype(spec.rope.compute)
    hidden = matrix(inputs["hidden_states"], compute)
    results = {}
    for part, name in (("q", "query"), ("k", "key"), ("v", "value")):
        weight = matrix(inputs[f"{part}_weight"], compute).T
        product = np.empty((hidden.shape[0], weight.shape[1]), compute)
        multiply([Product(hidden, weight, product)], threads)
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
