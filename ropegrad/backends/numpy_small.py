"""RoPE's gradients of a problem so small that the number of NumPy calls is its cost. Used by `numpy_tiled`.

q's heads and k's are stacked and done at once, and pairs are looked up in lists of channels that are kept
between calls. With w = g at the partner's channel, dx = g·c + w·(−σ·s of the partner), Σ g·x is grad_cos,
and −σ·Σ w·x of the partner is grad_sin. Sums run in the order of the tiled ones: the bits are the same.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from ropegrad.arrays import numpy_dtype
from ropegrad.backends.base import Inputs, Outputs
from ropegrad.backends.numpy_tile import NumpyArray, store
from ropegrad.maths import layout as axes
from ropegrad.spec import RopeSpec

NEEDED = {"grad_q_embed", "grad_k_embed", "q", "k", "cos", "sin"}


class _Pairs(NamedTuple):
    """By channel of the rotary width, but for the last two, which hold the channels of each pair."""

    partner: NumpyArray
    column: NumpyArray  # of the table
    sine: NumpyArray  # column that dx multiplies w by
    sign: NumpyArray  # −σ of the partner: +1 for first members, −1 for second ones
    first: NumpyArray
    second: NumpyArray


@functools.lru_cache(maxsize=256)
def _pairs(width: int, pairing: str, table: str, adjoint: str, dtype: str) -> _Pairs:
    channels = np.arange(width).reshape((2, -1) if pairing == "half" else (-1, 2))
    if pairing == "interleaved":
        channels = channels.T
    first, second = channels
    partner, column = np.empty(width, np.intp), np.arange(width)
    partner[first], partner[second] = second, first
    if table == "half":
        column[first] = column[second] = np.arange(width // 2)
    sign = np.ones(width, numpy_dtype(dtype))
    sign[second] = -1
    sine = column[partner] if adjoint == "exact" else column
    return _Pairs(partner, column, sine, sign, first, second)


def small_rope_backward(spec: RopeSpec, inputs: Inputs, out: Outputs) -> None:
    """The gradients, from all six inputs, into `out`."""
    dtype, width, heads, needs = spec.compute, spec.rotary_dim, spec.heads or 0, spec.needs
    pairs, compute = _pairs(width, spec.pairing, spec.table, spec.adjoint, dtype), numpy_dtype(dtype)
    grad = _stacked(spec, inputs["grad_q_embed"], inputs["grad_k_embed"], compute)
    g = grad if width == spec.head_dim else grad[..., :width]
    w = g.take(pairs.partner, -1)
    if "cos" in needs or "sin" in needs:
        x = _stacked(spec, inputs["q"], inputs["k"], compute)[..., :width]
        if "cos" in needs:
            _store_table(spec, pairs, _sum(spec, g * x, heads), out["grad_cos"])
        if "sin" in needs:
            total = _sum(spec, w * x, heads).take(pairs.partner, -1)
            total *= -pairs.sign
            _store_table(spec, pairs, total, out["grad_sin"])
    if "q" in needs or "k" in needs:
        _rotate(spec, pairs, (g, w, grad), inputs, out)


def _stacked(spec: RopeSpec, of_q: NumpyArray, of_k: NumpyArray, compute: np.dtype[np.generic]) -> NumpyArray:
    """Both sides' heads in one array [B, H + Hkv, S, D] in C order: its strides decide the order of sums."""
    sides = [axes.to_bhsd(np, of_q, spec.layout), axes.to_bhsd(np, of_k, spec.layout)]
    shape = (spec.batch, sides[0].shape[1] + sides[1].shape[1], spec.seq, spec.head_dim)
    return np.concatenate(sides, 1, np.empty(shape, compute))


def _sum(spec: RopeSpec, product: NumpyArray, heads: int) -> NumpyArray:
    """Over q's heads, then k's, then the batches that share table rows."""
    total: NumpyArray = np.add.reduce(product[:, :heads], 1)
    total += np.add.reduce(product[:, heads:], 1)
    if spec.table_batch != spec.batch:
        total = np.add.reduce(total, 0, keepdims=True)
    return total


def _store_table(spec: RopeSpec, pairs: _Pairs, total: NumpyArray, target: NumpyArray) -> None:
    """[B or 1, S, R] folded to the table's columns and rounded once."""
    if spec.table == "half":
        total = total.take(pairs.first, -1) + total.take(pairs.second, -1)
    store(total if target.ndim == 3 else total[0], target, accumulate=spec.accumulate)


def _rotate(
    spec: RopeSpec,
    pairs: _Pairs,
    gradients: tuple[NumpyArray, NumpyArray, NumpyArray],
    inputs: Inputs,
    out: Outputs,
) -> None:
    """dx of q and k from g, w (spoilt) and all channels of g."""
    g, w, whole = gradients
    cos = inputs["cos"].take(pairs.column, -1)
    sin = inputs["sin"].take(pairs.sine, -1) * pairs.sign
    if cos.ndim == 3:
        cos, sin = cos[:, None], sin[:, None]
    dx = np.multiply(g, cos)
    w *= sin
    dx += w
    heads = spec.heads or 0
    for side, of_side in (("q", slice(None, heads)), ("k", slice(heads, None))):
        if side in spec.needs:
            target = axes.to_bhsd(np, out[f"grad_{side}"], spec.layout)
            if dx.shape[-1] == spec.head_dim:
                store(dx[:, of_side], target, accumulate=spec.accumulate)
                continue
            width = dx.shape[-1]
            store(dx[:, of_side], target[..., :width], accumulate=spec.accumulate)
            store(whole[:, of_side, :, width:], target[..., width:], accumulate=spec.accumulate)
