"""What the gradients of QKV projections followed by RoPE are: products of the rotated gradients D."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropegrad.spec import QkvSpec
from ropegrad.verify.case import Case
from ropegrad.verify.doubledouble import dot
from ropegrad.verify.exact import Bilinear, Bools, Expected, Product, accumulated, finite, indicators, known
from ropegrad.verify.sums import Change, Floats, Inputs, bilinear, precise, same

_UPSTREAM = {"q": "grad_query", "k": "grad_key", "v": "grad_value"}


@dataclass(frozen=True)
class _Rotated:
    """The rotated gradients of the parts (q, k, v) wanted, a row a token: D = high + low, [tokens, K].

    spread: S; touched: a NaN or Inf enters; lost: S overflows float64 (None: nowhere);
    columns: where each part stands; sums(f, g): S with other terms.
    """

    high: Floats
    low: Floats | None
    spread: Floats
    touched: Bools | None
    lost: Bools | None
    columns: dict[str, slice]
    sums: Bilinear


@dataclass(frozen=True)
class _Right:
    """The right side of a product, its magnitudes, and the columns with a NaN or Inf."""

    values: Floats
    size: Floats
    touched: Bools


def expected_products(case: Case, spec: QkvSpec) -> dict[str, Expected]:
    """The exact gradients of a qkv case (`oracle.expected` says what of)."""
    inputs, found = finite(case.inputs)
    d = _rotate(case, spec, inputs, found)
    hidden: _Right | None = None
    results = {}
    for name in case.outputs:
        part = name.removeprefix("grad_")[0]
        if name == "grad_hidden_states":
            weights = _right(case, inputs, ("q_weight", "k_weight", "v_weight"), found)
            result = _reshaped(_product(d, weights, slice(None), False), spec.hidden_shape)
        elif name.endswith("_bias"):
            result = _bias(d, d.columns[part])
        else:
            hidden = hidden or _right(case, inputs, ("hidden_states",), found)
            result = _product(d, hidden, d.columns[part], True)
        results[name] = accumulated(result, case.prior[name]) if spec.accumulate else result
    return results


def _heads(spec: QkvSpec) -> dict[str, int]:
    """Heads of the parts that a wanted gradient reads, in the order in which D holds them."""
    return {
        part: (spec.rope.heads if part == "q" else spec.rope.kv_heads) or 0
        for part in _UPSTREAM
        if {"hidden_states", f"{part}_weight", f"{part}_bias"} & set(spec.needs)
    }


def _room(spec: QkvSpec) -> tuple[Floats, dict[str, Floats]]:
    """Zeros for D, [tokens, K], and views of its parts in the layout of the upstream gradients."""
    heads, rope = _heads(spec), spec.rope
    rows = (rope.seq, rope.batch) if rope.layout == "sbhd" else (rope.batch, rope.seq)
    room = np.zeros((*rows, sum(heads.values()), rope.head_dim))
    views, start = {}, 0
    for part, count in heads.items():
        view = room[:, :, start : start + count]
        views[part] = view.transpose(0, 2, 1, 3) if rope.layout == "bhsd" else view
        start += count
    return room.reshape(spec.tokens, start * rope.head_dim), views


def _fill(spec: QkvSpec, inputs: Inputs, f: Change, g: Change, *, sign: int = 1, one: float = 1.0) -> Floats:
    """Σ f(a)·g(b) over the terms of D (see `bilinear`)."""
    matrix, views = _room(spec)
    rope = replace(spec.rope, adjoint="exact", accumulate=False)
    for part, view in views.items():
        side = replace(rope, rotary_dim=0) if part == "v" else rope
        arrays = {"grad_k_embed" if part != "q" else "grad_q_embed": inputs[_UPSTREAM[part]]}
        arrays |= {"cos": inputs["cos"], "sin": inputs["sin"]}
        bilinear(side, arrays, {"grad_q" if part == "q" else "grad_k": view}, f, g, sign=sign, one=one)
    return matrix


def _fill_precisely(spec: QkvSpec, inputs: Inputs) -> tuple[Floats, Floats]:
    (high, highs), (low, lows) = _room(spec), _room(spec)
    rope = replace(spec.rope, adjoint="exact", accumulate=False)
    for part in highs:
        side = replace(rope, rotary_dim=0) if part == "v" else rope
        arrays = {"grad_k_embed": inputs[_UPSTREAM[part]], "cos": inputs["cos"], "sin": inputs["sin"]}
        highs[part][...], lows[part][...] = precise(side, arrays, ("grad_k",))["grad_k"]
    return high, low


def _rotate(case: Case, spec: QkvSpec, inputs: Inputs, found: bool) -> _Rotated:
    low = touched = lost = None
    if spec.rope.compute == "float64":
        high, low = _fill_precisely(spec, inputs)
    else:
        high = _fill(spec, inputs, same, same, sign=-1)
    spread = _fill(spec, inputs, np.abs, np.abs)
    if found:
        bad = indicators(case.inputs)
        touched = _fill(spec, bad, np.abs, np.ones_like) > 0
        touched |= _fill(spec, bad, np.ones_like, np.abs, one=0.0) > 0
    if low is not None and not spread.max(initial=0.0) < 2.0**1023:
        lost = ~(spread < 2.0**1023)
        high[lost] = low[lost] = spread[lost] = 0
    columns, start = {}, 0
    for part, count in _heads(spec).items():
        columns[part] = slice(start, start := start + count * spec.rope.head_dim)
    sums = lambda f, g: _fill(spec, inputs, f, g)  # noqa: E731
    return _Rotated(high, low, spread, touched, lost, columns, sums)


def _right(case: Case, inputs: Inputs, names: tuple[str, ...], found: bool) -> _Right:
    """The named inputs as matrices, one below the other."""
    values = np.concatenate([_matrix(inputs[name]).astype(np.float64) for name in names])
    touched = np.zeros(values.shape[1], np.bool_)
    for name in names if found else ():
        touched |= ~np.isfinite(_matrix(case.inputs[name])).all(axis=0)
    return _Right(values, np.abs(values), touched)


def _matrix(array: NDArray[Any] | None) -> NDArray[Any]:
    assert array is not None
    return array.reshape(math.prod(array.shape[:-1]), array.shape[-1])


def _multiply(left: Floats, low: Floats | None, right: Floats) -> tuple[Floats, Floats | None]:
    if low is None:
        return left @ right, None
    pairs = ((side[:, k, None], right[k]) for k in range(left.shape[1]) for side in (left, low))
    return dot(pairs, (left.shape[0], right.shape[1]))


def _product(d: _Rotated, right: _Right, where: slice, of_weight: bool) -> Expected:
    """D·B, or for the columns of one part Dᵀ·B, as a matrix."""

    def turn(array: Any) -> Any:
        return array[:, where].T if of_weight else array

    def rows(mask: Bools | None) -> Bools | None:
        found = None if mask is None else turn(mask).any(axis=1)
        return found if found is not None and found.any() else None

    left, low, spread = turn(d.high), None if d.low is None else turn(d.low), turn(d.spread)
    value, tail = _multiply(left, low, right.values)
    product = Product(left, spread, right.values, right.size, lambda f, g: turn(d.sums(f, g)))
    lost, touched = rows(d.lost), rows(d.touched)
    if lost is not None:
        value[lost] = np.nan
    reached: Bools | None = None
    if touched is not None or right.touched.any():
        rows_touched = np.zeros(len(value), np.bool_) if touched is None else touched
        reached = rows_touched[:, None] | right.touched
    result = Expected(value, tail, None, left.shape[1], product, reached)
    return result if d.low is None else known(result, product.P)


def _bias(d: _Rotated, where: slice) -> Expected:
    """D summed over the tokens."""
    high, low = d.high[:, where], None if d.low is None else d.low[:, where]
    value, tail = high.sum(axis=0), None
    if low is not None:
        value, tail = dot(((side[row], 1.0) for row in range(len(high)) for side in (high, low)), value.shape)
    lost, touched = (_columns(mask, where) for mask in (d.lost, d.touched))
    if lost is not None:
        value[lost] = np.nan
    magnitude = d.spread[:, where].sum(axis=0)
    sums: Bilinear = lambda f, g: d.sums(f, g)[:, where].sum(axis=0)  # noqa: E731
    result = Expected(value, tail, magnitude, len(high), None, touched, bilinear=sums)
    return known(result, magnitude)


def _columns(mask: Bools | None, where: slice) -> Bools | None:
    return None if mask is None else np.asarray(mask[:, where].any(axis=0))


def _reshaped(result: Expected, shape: tuple[int, ...]) -> Expected:
    low = None if result.low is None else result.low.reshape(shape)
    touched = None if result.touched is None else result.touched.reshape(shape)
    return replace(result, value=result.value.reshape(shape), low=low, touched=touched)
