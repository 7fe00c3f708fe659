"""From arrays to one run of the compiled loop: sizes and flags, addresses and strides, threads.

The threads are Python's own and end with the call. Numba's threading layers would not survive fork() (omp) or
would end the process on concurrent calls (workqueue).
"""

from __future__ import annotations

import _thread
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ropegrad.arrays import numpy_dtype
from ropegrad.backends.base import Inputs, Outputs
from ropegrad.backends.numpy_tile import NumpyArray
from ropegrad.spec import RopeSpec
from ropegrad.tiles import channels

LINE = 64  # bytes of a cache line
TILE = 1 << 18  # bytes of tables and sums that one tile keeps: a share of a core's second cache
STREAM = 1 << 24  # bytes of results that would push everything else out of the cache and not stay there
SHARES = 16  # pieces of work a thread, so that the faster one takes more
PARALLEL = 1 << 18  # channels below which starting threads costs more than it saves

Operands = tuple[NumpyArray | None, NumpyArray | None, NumpyArray | None]  # gradient, x, result of one side

_KINDS = {numpy_dtype(name): kind for kind, name in enumerate(("float32", "float64", "bfloat16", "float16"))}
_AXES = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (1, 2, 0, 3)}
_NOWHERE = (0, 0, 0, 0, 0, 0)  # rows that are neither read nor written


@dataclass(frozen=True)
class Plan:
    """What one run does, and who does it.

    sums          the tables' gradients that are wanted
    streams       results are written past the cache, without reading their memory first
    tile, jobs    tokens of a tile, and how many tiles there are: with `shared`, each takes all batches
    workers       threads
    """

    spec: RopeSpec
    sums: tuple[str, ...]
    rotates: bool
    forward: bool
    accumulate: bool
    streams: bool
    tile: int
    workers: int

    @property
    def shared(self) -> bool:
        """Whether several batches add to one row of a table's gradient."""
        return bool(self.sums) and self.spec.table_batch != self.spec.batch

    @property
    def jobs(self) -> int:
        """Pieces of work that depend on no other."""
        return (1 if self.shared else self.spec.batch) * -(-self.spec.seq // self.tile)


def plan_backward(
    spec: RopeSpec, sides: tuple[Operands, ...], *, threads: int, tokens: int | None = None
) -> Plan:
    """The gradients that spec.needs names, on at most so many threads."""
    sums = tuple(name for name in ("cos", "sin") if name in spec.needs)
    tile, workers = _schedule(spec, sides, threads, tokens, shared=bool(sums))
    return Plan(
        spec, sums, rotates="q" in spec.needs or "k" in spec.needs, forward=False, accumulate=spec.accumulate,
        streams=_large(spec) and not spec.accumulate, tile=tile, workers=workers,
    )  # fmt: skip


def plan_rotation(
    spec: RopeSpec, sides: tuple[Operands, ...], *, forward: bool, threads: int, tokens: int | None = None
) -> Plan:
    """Rotate whatever is given, forward or back, without gradients of tables.

    Back, it is for the products that follow at once: they shall find it in the cache.
    """
    tile, workers = _schedule(spec, sides, threads, tokens, shared=False)
    return Plan(
        spec, (), rotates=True, forward=forward, accumulate=False, streams=forward and _large(spec),
        tile=tile, workers=workers,
    )  # fmt: skip


def _large(spec: RopeSpec) -> bool:
    """Too large for the cache."""
    return channels(spec) * numpy_dtype(spec.dtype).itemsize >= STREAM


def _schedule(
    spec: RopeSpec, sides: tuple[Operands, ...], threads: int, tokens: int | None, *, shared: bool
) -> tuple[int, int]:
    """Tokens of a tile, and threads: tiles fit the cache, and there are several for every thread.

    Where a token's heads stand side by side in memory, a tile is one token, and memory is read in order.
    """
    groups = 1 if shared and spec.table_batch != spec.batch else spec.batch
    if channels(spec) < PARALLEL:
        threads = 1
    fitting = tokens or TILE // max(4 * spec.rotary_dim * numpy_dtype(spec.compute).itemsize, 1)
    if threads > 1:
        fitting = min(fitting, -(-groups * spec.seq // (threads * SHARES)))
    if tokens is None and all(_by_token(x, spec.layout) for side in sides for x in side if x is not None):
        fitting = 1
    tile = max(min(fitting, spec.seq), 1)
    return tile, max(min(threads, groups * -(-spec.seq // tile)), 1)


def _by_token(array: NumpyArray, layout: str) -> bool:
    _, head, token, _ = (abs(array.strides[axis]) for axis in _AXES[layout])
    return head < token


def run(loop: Any, plan: Plan, sides: tuple[Operands, ...], inputs: Inputs, grads: Outputs) -> None:
    """Run the compiled module `loop`; `inputs` has the tables, `grads` the tables' gradients."""
    spec, zero = plan.spec, numpy_dtype(plan.spec.compute).type(0)
    problem = loop.Problem(
        compute=_KINDS[zero.dtype], item=zero.itemsize, batch=spec.batch, seq=spec.seq, dim=spec.head_dim,
        pairs=spec.rotary_dim // 2, tile=plan.tile, interleaved=int(spec.pairing == "interleaved"),
        half_table=int(spec.table == "half"), shared=int(plan.shared),
        own_sine=int(plan.forward or spec.adjoint == "paired"), forward=int(plan.forward),
        rotates=int(plan.rotates), cos=int("cos" in plan.sums), sin=int("sin" in plan.sums),
        accumulate=int(plan.accumulate), stream=int(plan.streams),
    )  # fmt: skip
    operands = [_side(loop, plan, *side) for side in (*sides, (None,) * 3)[:2]]
    operands += [_table(loop, plan, inputs.get(name)) for name in ("cos", "sin")]
    operands += [_table(loop, plan, grads.get(f"grad_{name}")) for name in ("cos", "sin")]
    step = max(plan.jobs // (plan.workers * SHARES * 2), 1)
    rows = 4 * spec.rotary_dim * plan.tile + 8 * spec.rotary_dim + 2 * spec.head_dim
    size = rows * zero.itemsize + 2 * loop.BUFFER
    counter = np.zeros(1, np.int64)

    def share(held: object = (sides, inputs, grads)) -> None:  # which the loop knows by address alone
        scratch = np.empty(size + LINE, np.uint8)
        address = -(-scratch.ctypes.data // LINE) * LINE
        loop.run(problem, *operands, counter.ctypes.data, plan.jobs, step, address, zero)

    _together(share, plan.workers)


def _together(work: Callable[[], None], workers: int) -> None:
    """Do it on so many threads, this one among them; raise what was raised on any, once all have ended.

    Of the low-level kind: a `threading.Thread` is waited for before it has begun.
    """
    failures: list[BaseException] = []
    running: list[_thread.LockType] = []
    ended: list[_thread.LockType] = []

    def other(done: _thread.LockType) -> None:
        try:
            work()
        except BaseException as failure:
            failures.append(failure)
        finally:
            ended.append(done)
            done.release()

    try:
        for _ in range(workers - 1):
            done = _thread.allocate_lock()
            done.acquire()
            _thread.start_new_thread(other, (done,))
            running.append(done)
        work()
    finally:
        for done in running:
            while done not in ended:  # they write to the caller's arrays: Ctrl-C must not free these
                try:
                    done.acquire(timeout=0.1)
                except BaseException as failure:
                    failures.append(failure)
    for first in failures:
        raise first


def _side(loop: Any, plan: Plan, *arrays: NumpyArray | None) -> Any:
    """q or k for the loop; without heads if there is nothing to do."""
    grad = arrays[0]
    wanted = arrays[2] is not None
    rows = (_rows(loop, array, plan.spec.layout) for array in arrays)
    heads = 0 if grad is None or not (wanted or plan.sums) else grad.shape[_AXES[plan.spec.layout][1]]
    return loop.Side(heads, int(wanted), *rows)


def _rows(loop: Any, array: NumpyArray | None, layout: str) -> Any:
    if array is None:
        return loop.Rows(*_NOWHERE)
    steps = (array.strides[axis] for axis in _AXES[layout])
    return loop.Rows(_KINDS[array.dtype], array.ctypes.data, *steps)


def _table(loop: Any, plan: Plan, array: NumpyArray | None) -> Any:
    if array is None:
        return loop.Rows(*_NOWHERE)
    batch = array.strides[0] if array.ndim == 3 and plan.spec.table_batch == plan.spec.batch else 0
    return loop.Rows(_KINDS[array.dtype], array.ctypes.data, batch, 0, *array.strides[-2:])
