"""The CPU: ropegrad's backends for NumPy, beside a copy of the same bytes and what else is installed.

A sample is one call, by the wall clock, after a call that is not counted; who begins rotates from round to
round. The copy moves as many bytes as the case must (half of them read, half written) on as many threads,
started as ours are. It is NumPy's copyto, the C library's memcpy, into memory that an uncounted call touched.
"""

from __future__ import annotations

import gc
import importlib.metadata
import itertools
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import ropegrad
from ropegrad import records
from ropegrad.arrays import numpy_dtype
from ropegrad.backends import find
from ropegrad.backends.base import Inputs
from ropegrad.bench.competitors import competitors
from ropegrad.bench.contender import Call, Contender, Spec, promise, refusing
from ropegrad.bench.device import Device
from ropegrad.bench.place import Choice
from ropegrad.bench.run import Run, digest, digest_with
from ropegrad.bench.timing import Timing
from ropegrad.bench.workloads import Problem
from ropegrad.cost import Cost
from ropegrad.info import info
from ropegrad.records import Record
from ropegrad.spec import RopeSpec
from ropegrad.tiles import cores
from ropegrad.verify.case import Case
from ropegrad.verify.conformance import NAMESPACES
from ropegrad.verify.runners import options

PACKAGES = ("numpy", "numba", "torch", "jax", "threadpoolctl")
OURS = (("numba_cpu", True), ("numba_cpu", False), ("numpy_tiled", True))  # backend, with out=


@dataclass(frozen=True)
class Cpu:
    """So many threads for everybody, and so many samples of each."""

    run: Run
    threads: int
    samples: int
    protocols: tuple[str, ...] = ("wall",)

    @property
    def options(self) -> dict[str, Any]:
        """Of each record."""
        return {"threads": self.threads}

    def refusal(self, protocol: str) -> str | None:
        """Only the wall clock is there."""
        if protocol == "wall":
            return None
        return f"--protocol {protocol} is read on a GPU; on a CPU write --protocol wall"

    def refuses(self, one: Contender, call: Call, protocol: str) -> str | None:
        """Nobody."""
        return None

    def sets(self, case: Case, read: int) -> list[Inputs]:
        """One: caches are as warm as the call before leaves them."""
        return [{name: x.copy() for name, x in case.inputs.items() if x is not None}]

    def contenders(self, spec: Spec, choice: Choice) -> Iterator[Contender]:
        """Ours through the public function; then all that is installed."""
        yield from ours(spec, choice.backends)
        if choice.rivals:
            yield from competitors(spec, compiled=not choice.quick)

    def ceiling(self, problem: Problem) -> Copy:
        """The copy."""
        return Copy(self, problem.cost)

    def time(self, contenders: Mapping[str, Sequence[Any]], protocol: str) -> dict[str, Timing]:
        """In turns."""
        taken = race({name: calls[0] for name, calls in contenders.items()}, self.samples)
        return {name: Timing("wall", tuple(times)) for name, times in taken.items()}

    def digest(self, one: Contender) -> str:
        """One for all that is measured here, and the target's own file."""
        return digest_with("cpu", one.source)


def start(threads: int, samples: int, commit: str | None = None, command: str | None = None) -> Cpu:
    """Facts about here and now. commit: where git cannot tell."""
    facts = info()
    versions = {"ropegrad": ropegrad.__version__, "python": platform.python_version(), "blas": facts["blas"]}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    system = f"{platform.system()} {platform.release()}"
    device = Device(facts["cpu"], system, l2=0, multiprocessors=cores(), pci_bus="")
    run = Run(device, versions, commit or records.commit(), command or records.command())
    return Cpu(run, threads, samples)


# ---- who is timed ------------------------------------------------------------------------------------------


def ours(spec: Spec, names: Sequence[str] = ()) -> Iterator[Contender]:
    """Ropegrad's own backends that can run here, or those of these names, with `out=` and fresh results."""
    asked = OURS if not names else [pair for name in names for pair in _variants(name)]
    for backend, into in asked:
        reason = find(backend).why_not(spec)
        if NAMESPACES.get(backend, "numpy") != "numpy":
            reason = f"it takes {NAMESPACES[backend]} arrays: write --arrays {NAMESPACES[backend]}"
        if reason is None:
            kernel = "out" if into else "fresh"
            bind = partial(_bind_ours, spec, backend, into)
            yield Contender(f"{backend} {kernel}", backend, kernel, promise(spec), {}, bind)
        elif names:
            yield refusing(backend, spec, f"{backend} cannot run this: {reason}")


def _variants(name: str) -> list[tuple[str, bool]]:
    find(name)  # SpecError where there is none
    return [pair for pair in OURS if pair[0] == name] or [(name, True)]


def _bind_ours(spec: Spec, backend: str, into: bool, inputs: Inputs) -> Call:
    operation = ropegrad.rope_backward if isinstance(spec, RopeSpec) else ropegrad.qkv_rope_backward
    words = options(spec) | {"backend": backend}
    names = ("q", "k", "cos", "sin") if isinstance(spec, RopeSpec) else spec.needs
    if into:
        made = {need: np.empty(*_form(spec, need)) for need in spec.needs}
        words["out"] = tuple(made.get(name) for name in names)
    launch = partial(operation, *inputs.values(), **words)
    return lambda: [x for x in launch() if x is not None]


def _form(spec: Spec, need: str) -> tuple[tuple[int, ...], Any]:
    shape, dtype = spec.output(need)
    return shape, numpy_dtype(dtype)


# ---- how they are timed ------------------------------------------------------------------------------------


def race(calls: Mapping[str, Callable[[], object]], samples: int) -> dict[str, list[float]]:
    """Microseconds of each one's samples, in turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    collecting = gc.isenabled()
    gc.disable()
    try:
        for number in range(samples):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                calls[name]()
                begin = time.perf_counter()
                calls[name]()
                times[name].append((time.perf_counter() - begin) * 1e6)
            gc.collect()
    finally:
        if collecting:
            gc.enable()
    return times


class Copy:
    """A copy of the case's bytes, half read and half written, on as many threads."""

    def __init__(self, place: Cpu, cost: Cost) -> None:
        self._place, self.half = place, cost.moved // 2
        self._source, self.target = np.ones(self.half, np.uint8), np.zeros(self.half, np.uint8)
        cuts = [self.half * i // place.threads for i in range(place.threads + 1)]
        self._parts = [slice(a, b) for a, b in itertools.pairwise(cuts)]
        self.contenders = {"copy": [self.call]}

    def call(self) -> None:
        """One copy."""
        pairs = [(self.target[part], self._source[part]) for part in self._parts]
        others = [threading.Thread(target=np.copyto, args=pair) for pair in pairs[1:]]
        for other in others:
            other.start()
        np.copyto(*pairs[0])
        for other in others:
            other.join()

    def records(self, case: str, timings: Mapping[str, Timing], suite: str) -> Iterator[Record]:
        """Its own."""
        place = self._place
        yield place.run.record(
            "copy", case, timings["copy"], {"copy": 0.0 if self.target.all() else float("inf")},
            spec={"suite": suite}, options=place.options, backend="numpy", kernel="copyto",
            bytes_read=self.half, bytes_written=self.half, flops=0, digest=digest("cpu"),
        )  # fmt: skip


def products(place: Cpu) -> Record:
    """How fast BLAS multiplies float32 matrices here: whole numbers, whose product is exact in any order."""
    n, rng = 2048, np.random.default_rng(1)
    a, b = rng.integers(-8, 9, (2, n, n)).astype(np.float32)
    out = np.empty_like(a)
    np.matmul(a, b, out=out)
    exact = np.array_equal(out[:64], a[:64].astype(np.float64) @ b.astype(np.float64))
    timing = place.time({"gemm": [partial(np.matmul, a, b, out=out)]}, "wall")["gemm"]
    return place.run.record(
        "gemm", f"{n} x {n} x {n}", timing, {"product": 0.0 if exact else float("inf")},
        spec={"rows": n, "columns": n, "inner": n, "dtype": "float32"}, options=place.options,
        backend="numpy", kernel="matmul", bytes_read=2 * a.nbytes, bytes_written=out.nbytes,
        flops=2 * n**3, digest=digest("cpu"),
    )  # fmt: skip
