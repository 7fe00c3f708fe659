"""NumPy, a tile at a time: every pass over a tile finds it in cache, and several threads share the tiles.

What happens to a tile is in `numpy_tile`, what is multiplied in `numpy_products`; here are the threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from ropegrad.arrays import numpy_dtype
from ropegrad.backends.base import Inputs, Outputs, quiet
from ropegrad.backends.blas import one_thread
from ropegrad.backends.numpy_products import Product, backward, copies, matrix, settle
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
from ropegrad.tiles import Task, Tile, cores, tasks

SMALL = 1 << 12  # channels up to which the number of NumPy calls is what costs
_STACKED = {"grad_q_embed", "grad_k_embed", "q", "k"}
PARALLEL = 1 << 18  # channels below which starting threads costs more than it saves
MULTIPLY = 1 << 24  # multiplications below which it does for a matrix product

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
        if spec.batch and _channels(spec) <= SMALL and inputs.keys() >= _STACKED:
            small_rope_backward(spec, inputs, results)
            return results
        kernel = RopeBackward(spec, inputs, results)
        schedule = self._schedule(spec)
        if not schedule and not spec.accumulate:
            for array in results.values():
                array[...] = 0
        self._run(spec, [partial(kernel.run, task) for task in schedule])
        return results

    @quiet
    def qkv_rope_backward(self, spec: QkvSpec, inputs: Inputs, out: Outputs | None) -> Outputs:
        """Gradients of the projections and RoPE; see `ropegrad.qkv_rope_backward`."""
        blocks, out = self._packed_gradients(spec, inputs), out or {}
        products = backward(spec, inputs, blocks, out)
        self._multiply(spec, list(products.values()))
        results = {name: product.c for name, product in products.items()}
        for part in "qkv":
            if f"{part}_bias" in spec.needs:
                results[f"grad_{part}_bias"] = blocks[part].sum(axis=0)
        return {name: settle(spec, name, value, out.get(name)) for name, value in results.items()}

    @quiet
    def rope(self, spec: RopeSpec, inputs: Inputs) -> Outputs:
        """RoPE of q and k; see `ropegrad.rope`."""
        results = {}
        for side in spec.needs:
            results[f"{side}_embed"] = np.empty(spec.output(side)[0], numpy_dtype(spec.dtype))
            self._run(
                spec, self._rotations(spec, inputs, inputs[side], results[f"{side}_embed"], forward=True)
            )
        return results

    @quiet
    def qkv_rope(self, spec: QkvSpec, inputs: Inputs) -> Outputs:
        """Projections and RoPE; see `ropegrad.qkv_rope`."""
        geometry, compute = spec.rope, numpy_dtype(spec.rope.compute)
        hidden = matrix(inputs["hidden_states"], compute)
        results = {}
        for part, name in (("q", "query"), ("k", "key"), ("v", "value")):
            weight = matrix(inputs[f"{part}_weight"], compute).T
            product = np.empty((hidden.shape[0], weight.shape[1]), compute)
            self._multiply(spec, [Product(hidden, weight, product)])
            if f"{part}_bias" in inputs:
                product += inputs[f"{part}_bias"].astype(compute)
            heads = (geometry.heads if part == "q" else geometry.kv_heads) or 0
            shape = (geometry.batch, heads, geometry.seq, geometry.head_dim)
            projected = axes.from_rows(np, product, shape, geometry.layout)
            results[name] = np.empty(geometry.head_shape(heads), numpy_dtype(geometry.dtype))
            if part == "v":
                np.copyto(results[name], projected, casting="same_kind")
            else:
                jobs = self._rotations(geometry, inputs, projected, results[name], forward=True)
                self._run(geometry, jobs)
        return results

    def _packed_gradients(self, spec: QkvSpec, inputs: Inputs) -> dict[str, NumpyArray]:
        """dQ, dK, dV as column blocks of one matrix [tokens, ·], each also under its own name."""
        geometry, compute = spec.rope, numpy_dtype(spec.rope.compute)
        parts = [p for p in "qkv" if {"hidden_states", f"{p}_weight", f"{p}_bias"} & set(spec.needs)]
        packed = np.empty((spec.tokens, sum(map(spec.rows, parts))), compute)
        blocks, start = {"packed": packed}, 0
        jobs: list[Job] = []
        for part in parts:
            block = packed[:, start : start + spec.rows(part)]
            start += spec.rows(part)
            heads = (geometry.heads if part == "q" else geometry.kv_heads) or 0
            shape = (geometry.batch, heads, geometry.seq, geometry.head_dim)
            view = axes.from_rows(np, block, shape, geometry.layout)
            grad = inputs[{"q": "grad_query", "k": "grad_key", "v": "grad_value"}[part]]
            if part == "v":
                jobs.append(partial(_copy, view, grad))
            else:
                jobs += self._rotations(geometry, inputs, grad, view, forward=False)
            blocks[part] = block
        self._run(geometry, jobs)
        return blocks

    def _rotations(
        self, spec: RopeSpec, inputs: Inputs, x: NumpyArray, y: NumpyArray, *, forward: bool
    ) -> list[Job]:
        """What rotates x into y, forward or back, both in the caller's layout."""
        source, target = (axes.to_bhsd(np, array, spec.layout) for array in (x, y))
        tables = Tables(spec, inputs, forward=forward)

        def run(task: Task, scratch: Scratch) -> None:
            for tile in task:
                part, into = (array[tile.batch, :, tile.tokens] for array in (source, target))
                g = rows(part[..., : spec.rotary_dim], "g", scratch)
                rotate(g, swap(g, spec.pairing, scratch), *tables.of(tile), into, part, scratch)

        return [partial(run, task) for task in self._schedule(spec)]

    def _multiply(self, spec: QkvSpec, products: list[Product]) -> None:
        """All the products, block by block, each block by BLAS on one thread."""
        jobs: list[Job] = [partial(_block, block) for product in products for block in product.blocks()]
        work = sum(product.c.size * product.a.shape[1] for product in products)
        with one_thread():  # from the first block to the last; its workers may come and go
            _share(spec.rope, jobs, self.threads or (1 if work < MULTIPLY else cores()))

    def _run(self, spec: RopeSpec, jobs: list[Job]) -> None:
        _share(spec, jobs, self._limit(spec))

    def _schedule(self, spec: RopeSpec) -> list[Task]:
        return tasks(spec, self.cells, self._limit(spec))

    def _workers(self, spec: RopeSpec, schedule: list[Task]) -> int:
        return max(min(self._limit(spec), len(schedule)), 1)

    def _limit(self, spec: RopeSpec) -> int:
        return self.threads or (1 if _channels(spec) < PARALLEL else cores())


def _channels(spec: RopeSpec) -> int:
    return spec.batch * spec.seq * ((spec.heads or 0) + (spec.kv_heads or 0)) * spec.head_dim


def _share(spec: RopeSpec, jobs: list[Job], threads: int) -> None:
    """Do the jobs, whoever is free the next that waits."""
    waiting, workers = deque(jobs), min(threads, len(jobs))
    if workers <= 1:
        _work(spec, waiting)
        return
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda _: _work(spec, waiting), range(workers)))


@quiet  # a new thread starts with NumPy's own settings
def _work(spec: RopeSpec, waiting: deque[Job]) -> None:
    """One worker's jobs."""
    scratch = Scratch(numpy_dtype(spec.compute))
    while True:
        try:
            job = waiting.popleft()
        except IndexError:
            return
        job(scratch)


def _copy(target: NumpyArray, source: NumpyArray, scratch: Scratch) -> None:
    np.copyto(target, source)


def _block(product: Product, scratch: Scratch) -> None:
    with one_thread():  # where the number is a thread's own
        product.multiply()


def _allocate(spec: RopeSpec | QkvSpec) -> Outputs:
    return {
        f"grad_{need}": np.empty(shape, numpy_dtype(dtype))
        for need in spec.needs
        for shape, dtype in [spec.output(need)]
    }
