"""NumPy, a tile at a time: every pass over a tile finds it in cache, and several threads share the tiles.

What happens to a tile is in `numpy_tile`; here are the schedule, the threads and the matrix products.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from ropegrad.arrays import numpy_dtype
from ropegrad.backends.base import Inputs, Outputs, quiet
from ropegrad.backends.numpy_tile import (
    NumpyArray,
    RopeBackward,
    Tables,
    cast,
    rotate,
    small_rope_backward,
    store,
    swap,
)
from ropegrad.maths import layout as axes
from ropegrad.spec import QkvSpec, RopeSpec
from ropegrad.tiles import Task, Tile, tasks

SMALL = 1 << 12  # channels up to which the number of NumPy calls is what costs
_STACKED = {"grad_q_embed", "grad_k_embed", "q", "k"}
PARALLEL = 1 << 18  # channels below which starting threads costs more than it saves


@dataclass(frozen=True)
class NumpyTiled:
    """Tiled NumPy on `threads` threads (default: one a core that this process may use).

    `cells` is the number of (batch, token) pairs of a tile; neither number changes a single bit of a result.
    """

    threads: int | None = None
    cells: int | None = None
    name: str = "numpy_tiled"

    def why_not(self, spec: RopeSpec | QkvSpec) -> str | None:
        """It wants NumPy arrays."""
        return None if spec.namespace == "numpy" else f"it runs NumPy arrays, these are of {spec.namespace}"

    def explain(self, spec: RopeSpec | QkvSpec, inputs: Inputs) -> list[str]:
        """Tiles, threads and copies."""
        geometry = spec if isinstance(spec, RopeSpec) else spec.rope
        schedule = tasks(geometry, self.cells)
        tile = schedule[0][0] if schedule else Tile(slice(0, 0), slice(0, 0))
        lines = [
            f"tiles of {tile.batch.stop} x {tile.tokens.stop} tokens on {self._workers(geometry, schedule)} "
            f"threads, computing in {geometry.compute}; any strides are read and written in place"
        ]
        if isinstance(spec, QkvSpec):
            lines += _copies(spec, inputs)
        return lines

    @quiet
    def rope_backward(self, spec: RopeSpec, inputs: Inputs, out: Outputs | None) -> Outputs:
        """Gradients of RoPE; see `ropegrad.rope_backward`."""
        results = out if out is not None else _allocate(spec)
        if spec.batch and _channels(spec) <= SMALL and inputs.keys() >= _STACKED:
            small_rope_backward(spec, inputs, results)
            return results
        kernel = RopeBackward(spec, inputs, results)
        schedule = tasks(spec, self.cells)
        if not schedule and not spec.accumulate:
            for array in results.values():
                array[...] = 0
        self._run(spec, schedule, kernel.run)
        return results

    @quiet
    def qkv_rope_backward(self, spec: QkvSpec, inputs: Inputs, out: Outputs | None) -> Outputs:
        """Gradients of the projections and RoPE; see `ropegrad.qkv_rope_backward`."""
        results = out if out is not None else {}
        packed = self._packed_gradients(spec, inputs)
        products = _products(spec, inputs, packed, results)
        return {name: _settle(spec, value, results.get(name)) for name, value in products.items()}

    @quiet
    def rope(self, spec: RopeSpec, inputs: Inputs) -> Outputs:
        """RoPE of q and k; see `ropegrad.rope`."""
        results = {}
        for side in spec.needs:
            results[f"{side}_embed"] = np.empty(spec.output(side)[0], numpy_dtype(spec.dtype))
            self._rotate_all(spec, inputs, inputs[side], results[f"{side}_embed"], forward=True)
        return results

    @quiet
    def qkv_rope(self, spec: QkvSpec, inputs: Inputs) -> Outputs:
        """Projections and RoPE; see `ropegrad.qkv_rope`."""
        geometry, compute = spec.rope, numpy_dtype(spec.rope.compute)
        hidden = _matrix(inputs["hidden_states"], compute)
        results = {}
        for part, name in (("q", "query"), ("k", "key"), ("v", "value")):
            rows = hidden @ _matrix(inputs[f"{part}_weight"], compute).T
            if f"{part}_bias" in inputs:
                rows += inputs[f"{part}_bias"].astype(compute)
            heads = (geometry.heads if part == "q" else geometry.kv_heads) or 0
            shape = (geometry.batch, heads, geometry.seq, geometry.head_dim)
            projected = axes.from_rows(np, rows, shape, geometry.layout)
            results[name] = np.empty(geometry.head_shape(heads), numpy_dtype(geometry.dtype))
            if part == "v":
                np.copyto(results[name], projected, casting="same_kind")
            else:
                self._rotate_all(geometry, inputs, projected, results[name], forward=True)
        return results

    def _packed_gradients(self, spec: QkvSpec, inputs: Inputs) -> dict[str, NumpyArray]:
        """dQ, dK, dV as column blocks of one matrix [tokens, ·], each also under its own name."""
        geometry, compute = spec.rope, numpy_dtype(spec.rope.compute)
        parts = [p for p in "qkv" if {"hidden_states", f"{p}_weight", f"{p}_bias"} & set(spec.needs)]
        packed = np.empty((spec.tokens, sum(map(spec.rows, parts))), compute)
        blocks, start = {"packed": packed}, 0
        for part in parts:
            block = packed[:, start : start + spec.rows(part)]
            start += spec.rows(part)
            heads = (geometry.heads if part == "q" else geometry.kv_heads) or 0
            shape = (geometry.batch, heads, geometry.seq, geometry.head_dim)
            view = axes.from_rows(np, block, shape, geometry.layout)
            grad = inputs[{"q": "grad_query", "k": "grad_key", "v": "grad_value"}[part]]
            if part == "v":
                np.copyto(view, grad)
            else:
                self._rotate_all(geometry, inputs, grad, view, forward=False)
            blocks[part] = block
        return blocks

    def _rotate_all(
        self, spec: RopeSpec, inputs: Inputs, x: NumpyArray, y: NumpyArray, *, forward: bool
    ) -> None:
        """Rotate x into y, forward or back, tile by tile; both in the caller's layout."""
        source, target = (axes.to_bhsd(np, array, spec.layout) for array in (x, y))
        tables = Tables(spec, inputs, forward=forward)

        def run(task: Task) -> None:
            for tile in task:
                cos, coefficient = tables.of(tile)
                part = source[tile.batch, :, tile.tokens]
                g = cast(part[..., : spec.rotary_dim], cos.dtype)
                rotate(g, swap(g, spec.pairing), cos, coefficient, target[tile.batch, :, tile.tokens], part)

        self._run(spec, tasks(spec, self.cells), run)

    def _run(self, spec: RopeSpec, schedule: list[Task], run: Callable[[Task], None]) -> None:
        workers = self._workers(spec, schedule)
        if workers <= 1:
            _share(schedule, run)
            return
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(_share, [schedule[worker::workers] for worker in range(workers)], [run] * workers))

    def _workers(self, spec: RopeSpec, schedule: list[Task]) -> int:
        limit = self.threads or (1 if _channels(spec) < PARALLEL else len(os.sched_getaffinity(0)))
        return max(min(limit, len(schedule)), 1)


def _channels(spec: RopeSpec) -> int:
    return spec.batch * spec.seq * ((spec.heads or 0) + (spec.kv_heads or 0)) * spec.head_dim


@quiet  # a new thread starts with NumPy's own settings
def _share(schedule: list[Task], run: Callable[[Task], None]) -> None:
    """One worker's tasks."""
    for task in schedule:
        run(task)


def _allocate(spec: RopeSpec | QkvSpec) -> Outputs:
    return {
        f"grad_{need}": np.empty(shape, numpy_dtype(dtype))
        for need in spec.needs
        for shape, dtype in [spec.output(need)]
    }


# ---- the products of qkv -------------------------------------------------------------------------------


def _matrix(x: NumpyArray, dtype: np.dtype[Any]) -> NumpyArray:
    """Rows of the last axis as a matrix that BLAS takes; a view wherever one exists."""
    return np.ascontiguousarray(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), dtype)


def _products(
    spec: QkvSpec, inputs: Inputs, blocks: dict[str, NumpyArray], out: Outputs
) -> dict[str, NumpyArray]:
    """Two products, dX = [dQ dK dV]·[Wq; Wk; Wv] and [dWq; dWk; dWv] = [dQ dK dV]ᵀ·X, and sums for biases."""
    compute, products = numpy_dtype(spec.rope.compute), {}
    if "hidden_states" in spec.needs:
        weights = np.concatenate([cast(inputs[f"{part}_weight"], compute) for part in "qkv"])
        products["grad_hidden_states"] = (blocks["packed"] @ weights).reshape(spec.hidden_shape)
    parts = [part for part in "qkv" if f"{part}_weight" in spec.needs]
    if parts:
        hidden = _matrix(inputs["hidden_states"], compute)
        dense = _joined(blocks, parts)
        product, start = dense.T @ hidden, 0
        for part in parts:
            products[f"grad_{part}_weight"] = product[start : start + spec.rows(part)]
            start += spec.rows(part)
    for part in "qkv":
        if f"{part}_bias" in spec.needs:
            products[f"grad_{part}_bias"] = blocks[part].sum(axis=0)
    return products


def _joined(blocks: dict[str, NumpyArray], parts: list[str]) -> NumpyArray:
    """The column blocks of `parts`; the packed matrix itself if that is all of it."""
    present = [part for part in blocks if part != "packed"]
    if present == parts:
        return blocks["packed"]
    return np.concatenate([blocks[part] for part in parts], axis=1)


def _settle(spec: QkvSpec, value: NumpyArray, out: NumpyArray | None) -> NumpyArray:
    """Round once to the output's dtype, into `out` where given."""
    if out is None:
        return cast(value, numpy_dtype(spec.rope.dtype))
    store(value, out, accumulate=spec.accumulate)
    return out


def _copies(spec: QkvSpec, inputs: Inputs) -> list[str]:
    """What the products copy, for `explain`."""
    lines = []
    if "hidden_states" in spec.needs:
        rows = sum(map(spec.rows, "qkv"))
        lines.append(f"copies the three weights into one matrix {rows} x {spec.hidden_size}")
    if any(f"{part}_weight" in spec.needs for part in "qkv"):
        hidden = inputs["hidden_states"]
        compute = numpy_dtype(spec.rope.compute)
        if not (hidden.flags.c_contiguous and hidden.dtype == compute):
            lines.append(f"copies hidden_states into a dense {compute} matrix")
    return lines
