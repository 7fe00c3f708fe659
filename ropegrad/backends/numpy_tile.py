"""What happens to one tile in NumPy: swap, rotate, sum over heads, store. Used by `numpy_tiled`.

One copy with the members of each pair swapped lets every other pass run over whole rows:
with w = g swapped, dx = g·c + w·(−σ·s of the partner), Σ g·x is grad_cos, and Σ w·x is grad_sin swapped.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ropegrad.arrays import numpy_dtype
from ropegrad.backends.base import Inputs, Outputs
from ropegrad.maths import layout as axes
from ropegrad.spec import RopeSpec
from ropegrad.tiles import Task, Tile

NumpyArray = np.ndarray[Any, Any]


class Scratch:
    """One worker's buffers, kept from tile to tile: fresh memory costs a page fault every 4 KiB."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self.held: dict[str, NumpyArray] = {}

    def take(self, use: str, shape: tuple[int, ...]) -> NumpyArray:
        """A dense array of this shape for one use; what it held before is lost."""
        size = math.prod(shape)
        if use not in self.held or self.held[use].size < size:
            self.held[use] = np.empty(size, self.dtype)
        return self.held[use][:size].reshape(shape)


class Tables:
    """cos and the sine's coefficient for the swapped member, both [batch or 1, 1, tokens, R], per tile."""

    def __init__(self, spec: RopeSpec, inputs: Inputs, *, forward: bool) -> None:
        self.spec, self.forward, self.compute = spec, forward, numpy_dtype(spec.compute)
        self.cos, self.sin = (_with_batch(inputs[name]) for name in ("cos", "sin"))

    def of(self, tile: Tile) -> tuple[NumpyArray, NumpyArray]:
        """c, and −σ_j·s_p(j) (exact adjoint), −σ_j·s_j (paired) or +σ_j·s_j (forward)."""
        spec = self.spec
        cos, sin = self._wide(self.cos, tile), self._wide(self.sin, tile)
        first, second = members(sin, spec.pairing)
        coefficient = np.empty_like(sin)
        out1, out2 = members(coefficient, spec.pairing)
        # Products with ±1: np.negative is wrong from 16-byte input strides to other strides (NumPy 2.4.6).
        if self.forward:
            np.multiply(first, -1, out=out1)
            np.copyto(out2, second)
        elif spec.adjoint == "exact":
            np.copyto(out1, second)
            np.multiply(first, -1, out=out2)
        else:
            np.copyto(out1, first)
            np.multiply(second, -1, out=out2)
        return cos, coefficient

    def _wide(self, table: NumpyArray, tile: Tile) -> NumpyArray:
        """A tile of a table in the compute dtype, a column a channel."""
        spec = self.spec
        batch = tile.batch if table.shape[0] == spec.batch else slice(None)
        rows = table[batch, None, tile.tokens]
        if spec.table == "full":
            return cast(rows, self.compute)
        wide = np.empty((*rows.shape[:-1], spec.rotary_dim), self.compute)
        for member in members(wide, spec.pairing):
            np.copyto(member, rows)
        return wide


class RopeBackward:
    """The rope gradients of one task at a time."""

    def __init__(self, spec: RopeSpec, inputs: Inputs, out: Outputs) -> None:
        self.spec, self.out, self.compute = spec, out, numpy_dtype(spec.compute)
        self.own_rows = spec.table_batch == spec.batch  # no two batches share a table row
        self.wanted = [name for name in ("cos", "sin") if name in spec.needs]
        rotates = "q" in spec.needs or "k" in spec.needs
        self.tables = Tables(spec, inputs, forward=False) if rotates else None
        self.sides = [side for side, heads in (("q", spec.heads), ("k", spec.kv_heads)) if heads is not None]
        headed = {f"grad_{side}_embed" for side in self.sides} | set(self.sides)
        self.inputs = {
            name: axes.to_bhsd(np, array, spec.layout) for name, array in inputs.items() if name in headed
        }
        self.grads = {
            side: axes.to_bhsd(np, out[f"grad_{side}"], spec.layout)
            for side in ("q", "k")
            if side in spec.needs
        }

    def run(self, task: Task, scratch: Scratch) -> None:
        """All gradients of the table rows of this task and of the tokens that read them."""
        totals: dict[str, NumpyArray] = {}
        for tile in task:
            tables = self.tables.of(tile) if self.tables else None
            sums: dict[str, NumpyArray] = {}
            for side in self.sides:
                self._side(side, tile, tables, sums, scratch)
            for name, part in sums.items():
                totals[name] = self._collect(part, totals.get(name))
        for name, total in totals.items():
            batch = task[0].batch if self.own_rows else slice(None)
            target = _with_batch(self.out[f"grad_{name}"])[batch, task[0].tokens]
            write_table(self.spec, name, total, target)

    def _side(
        self,
        side: str,
        tile: Tile,
        tables: tuple[NumpyArray, NumpyArray] | None,
        sums: dict[str, NumpyArray],
        scratch: Scratch,
    ) -> None:
        spec = self.spec
        if side not in self.grads and not self.wanted:
            return
        grad = self.inputs[f"grad_{side}_embed"][tile.batch, :, tile.tokens]
        g = rows(grad[..., : spec.rotary_dim], "g", scratch)
        swapped = swap(g, spec.pairing, scratch)
        if self.wanted:
            x = rows(self.inputs[side][tile.batch, :, tile.tokens, : spec.rotary_dim], "x", scratch)
            for name in self.wanted:
                part = np.einsum("bhsd,bhsd->bsd", g if name == "cos" else swapped, x)
                sums[name] = part if name not in sums else np.add(sums[name], part, out=sums[name])
        if side in self.grads and tables is not None:
            target = self.grads[side][tile.batch, :, tile.tokens]
            rotate(g, swapped, *tables, target, grad, scratch, accumulate=spec.accumulate)

    def _collect(self, part: NumpyArray, total: NumpyArray | None) -> NumpyArray:
        """Add the batches that share table rows, one after the other, to what earlier tiles gave."""
        if self.own_rows:
            return part
        rows = part if total is None else np.concatenate([total, part])
        return np.add.reduce(rows, axis=0, keepdims=True)  # row after row: the first axis is the slowest


def write_table(spec: RopeSpec, name: str, total: NumpyArray, target: NumpyArray) -> None:
    """Fold a half table's columns, undo the sine's swap, round once; both arrays [batch or 1, tokens, ·]."""
    if name == "cos" and spec.table == "full":
        store(total, target, accumulate=spec.accumulate)
        return
    first, second = members(total, spec.pairing)
    if name == "sin":  # Σ w·x holds each member's gradient at its partner's place, without its sign
        first, second = second * -1, first
    if spec.table == "half":
        store(first + second, target, accumulate=spec.accumulate)
        return
    for value, member in zip((first, second), members(target, spec.pairing), strict=True):
        store(value, member, accumulate=spec.accumulate)


def members(x: NumpyArray, pairing: str) -> tuple[NumpyArray, NumpyArray]:
    """Views of the first and second members of the pairs on the last axis."""
    if pairing == "half":
        middle = x.shape[-1] // 2
        return x[..., :middle], x[..., middle:]
    return x[..., 0::2], x[..., 1::2]


def swap(x: NumpyArray, pairing: str, scratch: Scratch) -> NumpyArray:
    """A dense copy of x with the members of each pair exchanged."""
    swapped = scratch.take("swapped", x.shape)
    pairs = (2, x.shape[-1] // 2) if pairing == "half" else (x.shape[-1] // 2, 2)
    there, here = swapped.reshape(*x.shape[:-1], *pairs), x.reshape(*x.shape[:-1], *pairs)
    np.copyto(there, here[..., ::-1, :] if pairing == "half" else here[..., ::-1])
    return swapped


def rotate(
    g: NumpyArray,
    swapped: NumpyArray,
    cos: NumpyArray,
    coefficient: NumpyArray,
    target: NumpyArray,
    whole: NumpyArray,
    scratch: Scratch,
    *,
    accumulate: bool = False,
) -> None:
    """target = g·cos + swapped·coefficient, channels past the rotary width from `whole`; spoils swapped."""
    width = g.shape[-1]
    rotated = target[..., :width]
    np.multiply(swapped, coefficient, out=swapped)
    if rotated.dtype == g.dtype and not accumulate:
        np.multiply(g, cos, out=rotated)
        np.add(rotated, swapped, out=rotated)
    else:
        product = np.multiply(g, cos, out=scratch.take("product", g.shape))
        np.add(product, swapped, out=swapped)
        store(swapped, rotated, accumulate=accumulate)
    if width < target.shape[-1]:
        store(whole[..., width:], target[..., width:], accumulate=accumulate, compute=g.dtype)


def store(
    value: NumpyArray, target: NumpyArray, *, accumulate: bool, compute: np.dtype[Any] | None = None
) -> None:
    """Write, or add, value into target, rounding once."""
    if accumulate:
        total = target.astype(compute or value.dtype)
        np.copyto(target, np.add(total, value, out=total), casting="same_kind")
    else:
        np.copyto(target, value, casting="same_kind")


def _with_batch(table: NumpyArray) -> NumpyArray:
    return table[None] if table.ndim == 2 else table


def cast(x: NumpyArray, dtype: np.dtype[Any]) -> NumpyArray:
    """X in this dtype, copied only if it has another."""
    return x if x.dtype == dtype else x.astype(dtype)


def rows(x: NumpyArray, use: str, scratch: Scratch) -> NumpyArray:
    """X in the compute dtype, aligned, channels side by side and heads apart; copied only if it is not so.

    Only then does einsum add heads up one after the other, and never multiply a gradient that heads share
    by the sum of their x.
    """
    apart = x.strides[-1] == x.itemsize and abs(x.strides[1]) > x.itemsize
    if apart and x.flags.aligned and x.dtype == scratch.dtype:
        return x
    dense = scratch.take(use, x.shape)
    np.copyto(dense, x)
    return dense
