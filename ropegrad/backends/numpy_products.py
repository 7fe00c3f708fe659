"""The matrix products of the projections' backward in NumPy, on gradients that stand packed in one matrix."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ropegrad.arrays import numpy_dtype
from ropegrad.backends.base import Inputs, Outputs
from ropegrad.backends.numpy_tile import NumpyArray, cast, store
from ropegrad.spec import QkvSpec

Blocks = dict[str, NumpyArray]  # dQ, dK, dV as 'q', 'k', 'v': column blocks of the matrix 'packed'


def products(spec: QkvSpec, inputs: Inputs, blocks: Blocks, out: Outputs) -> Outputs:
    """Two products, dX = [dQ dK dV]·[Wq; Wk; Wv] and [dWq; dWk; dWv] = [dQ dK dV]ᵀ·X, and sums for biases.

    Each lands in `out` where that is given, rounded once; weights' gradients are then made one by one.
    """
    compute = numpy_dtype(spec.rope.compute)
    results = {}
    if "hidden_states" in spec.needs:
        weights = np.concatenate([cast(inputs[f"{part}_weight"], compute) for part in "qkv"])
        target = out.get("grad_hidden_states")
        results["grad_hidden_states"] = _product(spec, blocks["packed"], weights, target, spec.hidden_shape)
    parts = [part for part in "qkv" if f"{part}_weight" in spec.needs]
    if parts:
        hidden = matrix(inputs["hidden_states"], compute)
        results |= _weights(spec, blocks, parts, hidden, out)
    for part in "qkv":
        name = f"grad_{part}_bias"
        if name[5:] in spec.needs:
            results[name] = _settle(spec, blocks[part].sum(axis=0), out.get(name))
    return results


def _weights(spec: QkvSpec, blocks: Blocks, parts: list[str], hidden: NumpyArray, out: Outputs) -> Outputs:
    if out or len(parts) == 1:
        return {
            name: _product(spec, blocks[part].T, hidden, out.get(name), spec.output(f"{part}_weight")[0])
            for part in parts
            for name in [f"grad_{part}_weight"]
        }
    whole = [part for part in blocks if part != "packed"] == parts
    packed = blocks["packed"] if whole else np.concatenate([blocks[part] for part in parts], axis=1)
    product = cast(packed.T @ hidden, numpy_dtype(spec.rope.dtype))
    results, start = {}, 0
    for part in parts:
        results[f"grad_{part}_weight"] = product[start : start + spec.rows(part)]
        start += spec.rows(part)
    return results


def _product(
    spec: QkvSpec, a: NumpyArray, b: NumpyArray, out: NumpyArray | None, shape: tuple[int, ...]
) -> NumpyArray:
    """A·B in `shape`; straight into `out` where BLAS can write there."""
    if out is not None and out.dtype == a.dtype and out.flags.c_contiguous and not spec.accumulate:
        np.matmul(a, b, out=out.reshape(a.shape[0], b.shape[1]))
        return out
    return _settle(spec, (a @ b).reshape(shape), out)


def _settle(spec: QkvSpec, value: NumpyArray, out: NumpyArray | None) -> NumpyArray:
    """Round once to the output's dtype, into `out` where given."""
    if out is None:
        return cast(value, numpy_dtype(spec.rope.dtype))
    store(value, out, accumulate=spec.accumulate)
    return out


def matrix(x: NumpyArray, dtype: np.dtype[Any]) -> NumpyArray:
    """Rows of the last axis as a dense matrix; a view wherever one exists."""
    return np.ascontiguousarray(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), dtype)


def copies(spec: QkvSpec, inputs: Inputs) -> list[str]:
    """What the products copy, for `explain`."""
    lines = []
    if "hidden_states" in spec.needs:
        height = sum(map(spec.rows, "qkv"))
        lines.append(f"copies the three weights into one matrix {height} x {spec.hidden_size}")
    if any(f"{part}_weight" in spec.needs for part in "qkv"):
        hidden, compute = inputs["hidden_states"], numpy_dtype(spec.rope.compute)
        if not (hidden.flags.c_contiguous and hidden.dtype == compute):
            lines.append(f"copies hidden_states into a dense {compute} matrix")
    return lines
