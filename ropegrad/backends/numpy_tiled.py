"""NumPy, a tile at a time: every pass over a tile finds it in cache, and several threads share the tiles.

What happens to a tile is in `numpy_tile`; here are the schedule, the threads and the matrix products.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from ropegrad.arrays import numpy_dtype
from ropegrad.backends.base import Inputs, Outputs, quiet
from ropegrad.backends.numpy_products import copies, products
from ropegrad.backends.numpy_projection import pack, project
from ropegrad.backends.numpy_tile import (
    NumpyArray,
    RopeBackward,
    Scratch,
    Tables,
    rotate,
    rows,
    small_rope_backward,
    swap,
)
from ropegrad.maths import layout as axes
from ropegrad.spec import QkvSpec, RopeSpec
from ropegrad.tiles import Task, Tile, channels, cores, tasks

SMALL = 1 << 12  # channels up to which the number of NumPy calls is what costs
_STACKED = {"grad_q_embed", "grad_k_embed", "q", "k"}
PARALLEL = 1 << 18  # channels below which starting threads costs more than it saves


Run = Callable[[Task, Scratch], None]


@dataclass(frozen=True)
class NumpyTiled:
    """Tiled NumPy on `threads` threads (default: one a core that this process may use).

    `cells` is the number of (batch, token) pairs of a tile; neither number changes a single bit of a result.
    BLAS has threads of its own, and their number may change bits of qkv's products.
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
        if spec.batch and channels(spec) <= SMALL and inputs.keys() >= _STACKED:
            small_rope_backward(spec, inputs, results)
            return results
        kernel = RopeBackward(spec, inputs, results)
        schedule = self._schedule(spec)
        if not schedule and not spec.accumulate:
            for array in results.values():
                array[...] = 0
        self._run(spec, schedule, kernel.run)
        return results

    @quiet
    def qkv_rope_backward(self, spec: QkvSpec, inputs: Inputs, out: Outputs | None) -> Outputs:
        """Gradients of the projections and RoPE; see `ropegrad.qkv_rope_backward`."""
        # On one thread: BLAS's own spin for a while after a product, and a second thread would wait for them.
        blocks = pack(
            spec, inputs, lambda x, y: self._rotate_all(spec.rope, inputs, x, y, forward=False, alone=True)
        )
        return products(spec, inputs, blocks, out or {})

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
        return project(spec, inputs, lambda x, y: self._rotate_all(spec.rope, inputs, x, y, forward=True))

    def _rotate_all(
        self,
        spec: RopeSpec,
        inputs: Inputs,
        x: NumpyArray,
        y: NumpyArray,
        *,
        forward: bool,
        alone: bool = False,
    ) -> None:
        """Rotate x into y, forward or back, both in the caller's layout; `alone`: on one thread."""
        source, target = (axes.to_bhsd(np, array, spec.layout) for array in (x, y))
        tables = Tables(spec, inputs, forward=forward)

        def run(task: Task, scratch: Scratch) -> None:
            for tile in task:
                part, into = (array[tile.batch, :, tile.tokens] for array in (source, target))
                g = rows(part[..., : spec.rotary_dim], "g", scratch)
                rotate(g, swap(g, spec.pairing, scratch), *tables.of(tile), into, part, scratch)

        if alone:
            _share(spec, deque(tasks(spec, self.cells)), run)
        else:
            self._run(spec, self._schedule(spec), run)

    def _run(self, spec: RopeSpec, schedule: list[Task], run: Run) -> None:
        workers = self._workers(spec, schedule)
        if workers <= 1:
            _share(spec, deque(schedule), run)
            return
        waiting = deque(schedule)
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(lambda _: _share(spec, waiting, run), range(workers)))

    def _schedule(self, spec: RopeSpec) -> list[Task]:
        return tasks(spec, self.cells, self._limit(spec))

    def _workers(self, spec: RopeSpec, schedule: list[Task]) -> int:
        return max(min(self._limit(spec), len(schedule)), 1)

    def _limit(self, spec: RopeSpec) -> int:
        return self.threads or (1 if channels(spec) < PARALLEL else cores())


@quiet  # a new thread starts with NumPy's own settings
def _share(spec: RopeSpec, waiting: deque[Task], run: Run) -> None:
    """One worker's tasks: the next that waits, until none does."""
    scratch = Scratch(numpy_dtype(spec.compute))
    while True:
        try:
            task = waiting.popleft()
        except IndexError:
            return
        run(task, scratch)


def _allocate(spec: RopeSpec | QkvSpec) -> Outputs:
    return {
        f"grad_{need}": np.empty(shape, numpy_dtype(dtype))
        for need in spec.needs
        for shape, dtype in [spec.output(need)]
    }
