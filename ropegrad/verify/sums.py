"""The sums of products that RoPE's gradients are, as complex numbers: in float64 and in double-double.

A rotated pair is one complex number: with z = x1 + i·x2, w1 = c1 + i·s1, w2 = c2 + i·s2 the forward is
y1 = Re(z·w1), y2 = Im(z·w2), so that its adjoint for upstream gradients g1, g2 is

    dz = g1·conj(w1) + i·g2·conj(w2),    dw1 = Σ g1·conj(z),    dw2 = i·Σ g2·conj(z).

Every gradient is bilinear: a sum of products a·b of a *left* input (an upstream gradient) and a *right*
one (q, k or a table). Σ|a·b|, Σ(a·b)² and "does a NaN enter" are the same sums of changed inputs.
Written apart from the library's own formulas, so that no mistake can be in both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropegrad.spec import RopeSpec
from ropegrad.verify.doubledouble import dot

Floats = NDArray[np.float64]
Inputs = dict[str, NDArray[Any] | None]
Change = Callable[[Floats], Floats]

_TO_BHSD = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (1, 2, 0, 3)}
_BLOCK = 1 << 14  # rotated pairs a pass works on: its temporaries stay in a core's cache


def bhsd(array: NDArray[Any], layout: str) -> NDArray[Any]:
    """A view with axes [batch, heads, seq, dim] of an array in the caller's layout."""
    return array.transpose(_TO_BHSD[layout])


def members(array: NDArray[Any], spec: RopeSpec) -> tuple[NDArray[Any], NDArray[Any]]:
    """Views of the first and the second members of all pairs, along the last axis."""
    width = spec.rotary_dim
    if spec.pairing == "half":
        return array[..., : width // 2], array[..., width // 2 : width]
    return array[..., 0:width:2], array[..., 1:width:2]


def same(array: Floats) -> Floats:
    """The change that is none."""
    return array


def nonzero(array: Floats) -> Floats:
    """1 where there is something, 0 elsewhere: of both factors, the sums count products that are not zero."""
    there: Floats = (array != 0).astype(np.float64)
    return there


def bilinear(
    spec: RopeSpec,
    inputs: Inputs,
    out: dict[str, Floats],
    f: Change = same,
    g: Change = same,
    *,
    sign: int = 1,
    one: float = 1.0,
) -> None:
    """Fill the float64 arrays `out` ('grad_q', 'grad_k', 'grad_cos', 'grad_sin', in the caller's layout).

    sign -1: with the gradients themselves. sign +1: with Σ f(a)·g(b) over their terms ±a·b; f is applied
    to upstream gradients, g to q, k and tables, after they became float64. A channel that passes through
    is the term a·one. inputs: by the problem's names, finite. Each result is within γ_n Σ|t| (u = 2⁻⁵³).
    """
    turns = None
    for side in ("q", "k"):
        upstream = inputs.get(f"grad_{side}_embed")
        if f"grad_{side}" not in out or upstream is None:
            continue
        if spec.rotary_dim < spec.head_dim:
            through = upstream[..., spec.rotary_dim :].astype(np.float64)
            out[f"grad_{side}"][..., spec.rotary_dim :] = f(through) * g(np.full((), one))
        if spec.rotary_dim:
            turns = turns or _turns(spec, inputs, g, sign)
            _fill_heads(spec, upstream, turns, out[f"grad_{side}"], f)
    if "grad_cos" in out or "grad_sin" in out:
        _fill_tables(spec, inputs, out, f, g, sign)


def precise(spec: RopeSpec, inputs: Inputs, names: tuple[str, ...]) -> dict[str, tuple[Floats, Floats]]:
    """The gradients `names` themselves as hi + lo (see `doubledouble.dot` for how precise)."""
    results = {}
    for side in ("q", "k"):
        upstream = inputs.get(f"grad_{side}_embed")
        if f"grad_{side}" in names and upstream is not None:
            results[f"grad_{side}"] = _precise_heads(spec, upstream.astype(np.float64), inputs)
    if "grad_cos" in names or "grad_sin" in names:
        results |= _precise_tables(spec, inputs)
    return {name: results[name] for name in names}


def _blocks(spec: RopeSpec, heads: int) -> Iterator[tuple[slice, slice]]:
    """Runs of batches and tokens with about _BLOCK pairs each."""
    tokens = max(1, _BLOCK // max(heads * spec.rotary_dim // 2, 1))
    batches = max(1, tokens // max(spec.seq, 1))
    for b in range(0, spec.batch, batches):
        for s in range(0, spec.seq, tokens):
            yield slice(b, b + batches), slice(s, s + tokens)


def _complex(real: Any, imaginary: Any) -> NDArray[np.complex128]:
    both = np.empty(real.shape, np.complex128)
    both.real, both.imag = real, imaginary
    return both


def _table_axes(table: NDArray[Any]) -> NDArray[Any]:
    return table if table.ndim == 3 else table[None]


Turns = tuple[NDArray[np.complex128], NDArray[np.complex128]]


def _turns(spec: RopeSpec, inputs: Inputs, g: Change, sign: int) -> Turns:
    """conj(w1) and i·conj(w2), axes [batch or 1, 1, seq, pairs]."""
    parts = []
    for name in ("cos", "sin"):
        table = inputs[name]
        assert table is not None, f"{name} is read by the gradient wanted"
        wide = g(_table_axes(table).astype(np.float64))[:, None]
        parts.append((wide, wide) if spec.table == "half" else members(wide, spec))
    (c1, c2), (s1, s2) = parts
    if spec.adjoint == "paired":  # not the adjoint: each channel's own sine instead of its partner's
        s1, s2 = s2, s1
    return _complex(c1, sign * s1), _complex(s2, c2)


def _fill_heads(spec: RopeSpec, upstream: NDArray[Any], turns: Turns, out: Floats, f: Change) -> None:
    """dz = g1·conj(w1) + i·g2·conj(w2)."""
    upstream, out = bhsd(upstream, spec.layout), bhsd(out, spec.layout)
    turn1, turn2 = turns
    first, second = members(out, spec)
    for batch, tokens in _blocks(spec, upstream.shape[1]):
        row = (batch if turn1.shape[0] == spec.batch else slice(None), slice(None), tokens)
        block = members(upstream[batch, :, tokens], spec)
        g1, g2 = (f(member.astype(np.float64)) for member in block)
        dz = g1 * turn1[row]
        dz += g2 * turn2[row]
        first[batch, :, tokens], second[batch, :, tokens] = dz.real, dz.imag


def _sides(spec: RopeSpec, inputs: Inputs) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Upstream gradient and input of the sides that are there, axes [batch, heads, seq, dim]."""
    for side in ("q", "k"):
        upstream, x = inputs.get(f"grad_{side}_embed"), inputs.get(side)
        if upstream is not None and x is not None:
            yield bhsd(upstream, spec.layout), bhsd(x, spec.layout)


def _fill_tables(
    spec: RopeSpec, inputs: Inputs, out: dict[str, Floats], f: Change, g: Change, sign: int
) -> None:
    """dw1 = Σ g1·conj(z), dw2 = i·Σ g2·conj(z), over heads and over the batches that share a table row."""
    rows = spec.batch if spec.table_batch == spec.batch else 1
    dw1, dw2 = np.zeros((2, rows, spec.seq, spec.rotary_dim // 2), np.complex128)
    for upstream, x in _sides(spec, inputs):
        for batch, tokens in _blocks(spec, upstream.shape[1]):
            x1, x2 = (g(part.astype(np.float64)) for part in members(x[batch, :, tokens], spec))
            conjugate = _complex(x1, sign * x2)
            row = (batch if rows == spec.batch else slice(None), tokens)
            for dw, member in zip((dw1, dw2), members(upstream[batch, :, tokens], spec), strict=True):
                products = (f(member.astype(np.float64)) * conjugate).sum(axis=1)
                dw[row] += products if rows == spec.batch else products.sum(axis=0)
    dw2 = _complex(sign * dw2.imag, dw2.real)
    for name in out.keys() & {"grad_cos", "grad_sin"}:
        first, second = (dw.real if name == "grad_cos" else dw.imag for dw in (dw1, dw2))
        _write_table(spec, _table_axes(out[name]), first, second)


def _write_table(spec: RopeSpec, table: Floats, first: Floats, second: Floats) -> None:
    if spec.table == "half":
        table[...] = first + second
    else:
        for member, part in zip(members(table, spec), (first, second), strict=True):
            member[...] = part


def _reals(array: NDArray[np.complex128]) -> Floats:
    return np.stack([array.real, array.imag], axis=-1)


def _precise_heads(spec: RopeSpec, upstream: Floats, inputs: Inputs) -> tuple[Floats, Floats]:
    """The same dz; a complex number is a last axis (real, imaginary), so that real factors act on both."""
    high, low = upstream.copy(), np.zeros(upstream.shape)
    if not spec.rotary_dim:
        return high, low
    turns = [_reals(turn) for turn in _turns(spec, inputs, same, -1)]
    gs = [member[..., None] for member in members(bhsd(upstream, spec.layout), spec)]
    for out, dz in zip((high, low), dot(zip(gs, turns, strict=True), (*gs[0].shape[:-1], 2)), strict=True):
        for part, member in enumerate(members(bhsd(out, spec.layout), spec)):
            member[...] = dz[..., part]
    return high, low


def _precise_tables(spec: RopeSpec, inputs: Inputs) -> dict[str, tuple[Floats, Floats]]:
    """The same dw1 and dw2; for half tables both are one sum."""
    rows = spec.batch if spec.table_batch == spec.batch else 1
    pairs: list[list[tuple[Floats, Floats]]] = [[], []]
    for upstream, x in _sides(spec, inputs):
        x1, x2 = (part.astype(np.float64) for part in members(x, spec))
        g1, g2 = (part.astype(np.float64)[..., None] for part in members(upstream, spec))
        z1, z2 = np.stack([x1, -x2], axis=-1), np.stack([x2, x1], axis=-1)  # conj(z), i·conj(z)
        for head in range(upstream.shape[1]):
            for b in [slice(None)] if rows == spec.batch else [slice(b, b + 1) for b in range(spec.batch)]:
                pairs[0].append((g1[b, head], z1[b, head]))
                pairs[1].append((g2[b, head], z2[b, head]))
    shape = (rows, spec.seq, spec.rotary_dim // 2, 2)
    if spec.table == "half":
        sums = [dot(pairs[0] + pairs[1], shape)]
    else:
        sums = [dot(pairs[0], shape), dot(pairs[1], shape)]
    results = {}
    for part, name in enumerate(("grad_cos", "grad_sin")):
        both = (np.zeros(spec.table_shape), np.zeros(spec.table_shape))
        for half, out in enumerate(both):
            dws = [dw[half][..., part] for dw in sums]
            second = np.zeros(()) if spec.table == "half" else dws[1]
            _write_table(spec, _table_axes(out), dws[0], second)
        results[name] = both
    return results
