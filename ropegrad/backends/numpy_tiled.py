"""NumPy, a tile at a time: every pass over a tile finds it in cache, and several threads share the tiles.

What happens to a tile is in `numpy_tile`, what is multiplied in `numpy_products`; here are the threads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ropegrad.arrays import numpy_dtype
from ropegrad.backends import numpy_projection as projection
from ropegrad.backends.base import Inputs, Outputs, quiet
from ropegrad.backends.numpy_products import copies
from ropegrad.backends.numpy_small import NEEDED, small_rope_backward
from ropegrad.backends.numpy_tile import (
    NumpyArray,
    RopeBackward,
    Scratch,
    Tables,
    rotate,
    rows,
    swap,
)
from ropegrad.backends.threads import share
from ropegrad.maths import layout as axes
from ropegrad.spec import QkvSpec, RopeSpec
from ropegrad.tiles import Task, Tile, channels, cores, tasks

SMALL = 1 << 12  # channels up to which the number of NumPy calls is what costs
PARALLEL = 1 << 18  # channels below which starting threads costs more than it saves

Job = Callable[[Scratch], None]


@dataclass(frozen=True)
class NumpyTiled:
    """Tiled NumPy on `threads` threads (default: one a core that this process may use).

    `cells` is the number of (batch, token) pairs of a tile; neither number changes a single bit of a result,
    nor does the number of BLAS's threads: products are cut into blocks, and BLAS multiplies each on one.
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
        schedule = self._schedule(geometry)
        tile = schedule[0][0] if schedule else Tile(slice(0, 0), slice(0, 0))
        if isinstance(spec, RopeSpec) and is_small(spec, inputs):
            return [f"all heads at once, computing in {geometry.compute}: NumPy's calls are the cost"]
        lines = [
            f"tiles of {tile.batch.stop} x {tile.tokens.stop} tokens on {self._workers(geometry, schedule)} "
            f"threads, computing in {geometry.compute}; any strides are read and written in place"
        ]
        if isinstance(spec, QkvSpec):
            lines += copies(spec, inputs)
        return lines

    @quiet
    def rope_backward(self, spec: RopeSpec, inputs: Inputs, out: Outputs | None) -> Outputs:
        """Gradients of RoPE; see `ropegrad.rope_backward`."""
        results = out if out is not None else _allocate(spec)
        if is_small(spec, inputs):
            small_rope_backward(spec, inputs, results)
            return results
        kernel = RopeBackward(spec, inputs, results)
        schedule = self._schedule(spec)
        if not schedule and not spec.accumulate:
            for array in results.values():
                array[...] = 0
        self._run(spec, [partial(kernel.run, task) for task in schedule])
        return results

    def qkv_rope_backward(self, spec: QkvSpec, inputs: Inputs, out: Outputs | None) -> Outputs:
        """Gradients of the projections and RoPE; see `ropegrad.qkv_rope_backward`."""
        return projection.backward(
            spec, inputs, out or {}, self._rotation(spec.rope, inputs, forward=False), self.threads or cores()
        )

    @quiet
    def rope(self, spec: RopeSpec, inputs: Inputs) -> Outputs:
        """RoPE of q and k; see `ropegrad.rope`."""
        rotate = self._rotation(spec, inputs, forward=True)
        results = {}
        for side in spec.needs:
            results[f"{side}_embed"] = np.empty(spec.output(side)[0], numpy_dtype(spec.dtype))
            rotate(inputs[side], results[f"{side}_embed"])
        return results

    def qkv_rope(self, spec: QkvSpec, inputs: Inputs) -> Outputs:
        """Projections and RoPE; see `ropegrad.qkv_rope`."""
        rotate = self._rotation(spec.rope, inputs, forward=True)
        return projection.forward(spec, inputs, rotate, self.threads or cores())

    def _rotation(self, spec: RopeSpec, inputs: Inputs, *, forward: bool) -> projection.Rotate:
        """What rotates x into y, forward or back, both in the caller's layout."""

        def run(tables: Tables, source: NumpyArray, target: NumpyArray, task: Task, scratch: Scratch) -> None:
            for tile in task:
                part, into = (array[tile.batch, :, tile.tokens] for array in (source, target))
                g = rows(part[..., : spec.rotary_dim], "g", scratch)
                rotate(g, swap(g, spec.pairing, scratch), *tables.of(tile), into, part, scratch)

        def rotate_all(x: NumpyArray, y: NumpyArray) -> None:
            tables = Tables(spec, inputs, forward=forward)  # not there where only v's gradients are wanted
            source, target = (axes.to_bhsd(np, array, spec.layout) for array in (x, y))
            jobs: list[Job] = [partial(run, tables, source, target, task) for task in self._schedule(spec)]
            self._run(spec, jobs)

        return rotate_all

    def _run(self, spec: RopeSpec, jobs: list[Job]) -> None:
        share(jobs, self._limit(spec), lambda: Scratch(numpy_dtype(spec.compute)))

    def _schedule(self, spec: RopeSpec) -> list[Task]:
        return tasks(spec, self.cells, self._limit(spec))

    def _workers(self, spec: RopeSpec, schedule: list[Task]) -> int:
        return max(min(self._limit(spec), len(schedule)), 1)

    def _limit(self, spec: RopeSpec) -> int:
        return self.threads or (1 if channels(spec) < PARALLEL else cores())


def is_small(spec: RopeSpec, inputs: Inputs) -> bool:
    """Whether `numpy_small` does it: with all inputs there, and few channels."""
    return bool(spec.batch) and channels(spec) <= SMALL and inputs.keys() >= NEEDED


def _allocate(spec: RopeSpec) -> Outputs:
    return {name: np.empty(shape, dtype) for name, shape, dtype in _outputs(spec)}


@functools.lru_cache(maxsize=256)
def _outputs(spec: RopeSpec) -> list[tuple[str, tuple[int, ...], np.dtype[Any]]]:
    made = ((need, *spec.output(need)) for need in spec.needs)
    return [(f"grad_{need}", shape, numpy_dtype(dtype)) for need, shape, dtype in made]
