"""`ropegrad bench` on a CPU: check everything, then let all take turns.

A sample is one call, by the wall clock, after a call that is not counted; who begins rotates from round to
round. The copy moves as many bytes as the case must (half of them read, half written) on as many threads.
"""

from __future__ import annotations

import datetime
import gc
import importlib.metadata
import itertools
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import ropegrad
from ropegrad import records
from ropegrad.bench.competitors import Contender, competitors
from ropegrad.cost import Cost, qkv_cost, rope_cost
from ropegrad.info import info
from ropegrad.records import Record
from ropegrad.spec import QkvSpec, RopeSpec
from ropegrad.suites import SUITES
from ropegrad.verify import Case, check, make_case
from ropegrad.verify.runners import options, to_numpy

Spec = RopeSpec | QkvSpec
Progress = Callable[[str], None]
PACKAGES = ("numpy", "numba", "torch", "jax", "threadpoolctl")
OURS = (("numba_cpu", True), ("numba_cpu", False), ("numpy_tiled", True))  # backend, with out=
HERE = Path(__file__).parent
DECIDES = (
    HERE / "cpu.py", HERE / "competitors.py", HERE / "threads.py", HERE.parent / "tiles.py",
    *(HERE.parent / "backends" / f"{name}.py" for name in (
        "numba_call", "numba_cpu", "numba_kernel", "numba_numbers", "numpy_products", "numpy_projection",
        "numpy_small", "numpy_tile", "numpy_tiled",
    )),
)  # fmt: skip


def workloads(suite: str) -> dict[str, Spec]:
    """Cases by name: `headline`, the four that the README quotes, or the 16 of a benchmark problem."""
    if suite != "headline":
        return dict(SUITES[suite]())
    rope = RopeSpec(
        batch=1, heads=32, kv_heads=8, seq=2048, head_dim=128, rotary_dim=128, table_batch=1
    )  # fmt: skip
    return {
        "rope B=1 S=2048 H=32/8": rope,
        "rope B=1 S=8192 H=32/8": replace(rope, seq=8192),
        "rope B=1 S=2048 H=32/8 bfloat16": replace(rope, dtype="bfloat16", table_dtype="bfloat16"),
        "qkv B=1 S=2048": SUITES["qkv"]()["B=1 S=2048"],
    }


@dataclass(frozen=True)
class Run:
    """What all records of one run share."""

    threads: int
    samples: int
    commit: str
    digest: str
    device: str
    versions: dict[str, str]


def start(threads: int, samples: int, commit: str | None = None) -> Run:
    """Facts about here and now. commit: where git cannot tell."""
    facts = info()
    versions = {"ropegrad": ropegrad.__version__, "python": platform.python_version(), "blas": facts["blas"]}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return Run(
        threads, samples, commit or records.commit(), records.digest(DECIDES), facts["cpu"], versions
    )  # fmt: skip


def measure(run: Run, name: str, spec: Spec, progress: Progress) -> Iterator[Record]:
    """A record for the copy and for each contender; one that is wrong or fails has no time."""
    case = make_case(spec, 1, name=name)
    cost = rope_cost(spec) if isinstance(spec, RopeSpec) else qkv_cost(spec)
    copy = Contender("numpy", "copyto", _copy(cost, run.threads))
    found, errors, notes = [], [], []
    for contender in (*ours(case), *competitors(case)):
        progress(f"{name}: checking {contender.backend} {contender.kernel}")
        error, note = judge(case, contender)
        found.append(contender)
        errors.append(error)
        notes.append(note)
    right = [i for i, note in enumerate(notes) if note is None]
    progress(f"{name}: timing {len(right)} contenders")
    taken = race([copy, *(found[i] for i in right)], run.samples)
    times = dict(zip(right, taken[1:], strict=True))
    yield _record(run, "copy", name, spec, cost, copy, {"copy": 0.0}, taken[0], None)
    op = "rope" if isinstance(spec, RopeSpec) else "qkv"
    for i, contender in enumerate(found):
        yield _record(run, op, name, spec, cost, contender, errors[i], times.get(i, []), notes[i])


def products(run: Run) -> Record:
    """How fast BLAS multiplies float32 matrices here: whole numbers, whose product is exact in any order."""
    n, rng = 2048, np.random.default_rng(1)
    a, b = rng.integers(-8, 9, (2, n, n)).astype(np.float32)
    out = np.empty_like(a)
    contender = Contender("numpy", "matmul", lambda: (np.matmul(a, b, out=out),))
    contender.call()
    exact = np.array_equal(out[:64], a[:64].astype(np.float64) @ b.astype(np.float64))
    samples = race([contender], run.samples)[0] if exact else []
    cost = Cost(read=2 * a.nbytes, written=out.nbytes, flops=2 * n**3)
    error: dict[str, float | None] = {"product": 0.0 if exact else None}
    facts = {"rows": n, "columns": n, "inner": n, "dtype": "float32"}
    return _record(run, "gemm", f"{n} x {n} x {n}", facts, cost, contender, error, samples, None)


def ours(case: Case) -> Iterator[Contender]:
    """Ropegrad's own CPU backends that can run here, through the public function."""
    from ropegrad.backends import find

    spec, arrays = case.spec, list(case.inputs.values())
    operation = ropegrad.rope_backward if isinstance(spec, RopeSpec) else ropegrad.qkv_rope_backward
    out = tuple(np.empty_like(case.inputs[need]) for need in spec.needs)
    for backend, into in OURS:
        if find(backend).why_not(spec) is not None:
            continue
        words = options(spec) | {"backend": backend} | ({"out": out} if into else {})

        def call(words: dict[str, Any] = words) -> tuple[Any, ...]:
            return operation(*arrays, **words)

        yield Contender(backend, "out" if into else "fresh", call)


def judge(case: Case, contender: Contender) -> tuple[dict[str, float | None], str | None]:
    """Worst error/bound of each output, and why there is none."""

    def function(case: Case) -> dict[str, Any]:
        return {n: to_numpy(x) for n, x in zip(case.outputs, contender.call(), strict=True)}

    try:
        verdict = check(case, function, flushes=contender.backend.startswith("jax"))
    except Exception as error:  # a compiler that is missing here, say: the others go on
        return {}, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    note = verdict.findings[0].message if verdict.findings else None
    return dict(verdict.worst), note


def race(contenders: list[Contender], samples: int) -> list[list[float]]:
    """Microseconds of each contender's samples, in turns."""
    times: list[list[float]] = [[] for _ in contenders]
    collecting = gc.isenabled()
    gc.disable()
    try:
        for number in range(samples):
            for turn in range(len(contenders)):
                i = (turn + number) % len(contenders)
                contenders[i].call()
                begin = time.perf_counter()
                contenders[i].call()
                times[i].append((time.perf_counter() - begin) * 1e6)
            gc.collect()
    finally:
        if collecting:
            gc.enable()
    return times


def _copy(cost: Cost, threads: int) -> Callable[[], tuple[Any, ...]]:
    size = cost.moved // 2
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    cuts = [size * i // threads for i in range(threads + 1)]
    parts = [slice(a, b) for a, b in itertools.pairwise(cuts)]

    def call() -> tuple[Any, ...]:
        others = [
            threading.Thread(target=np.copyto, args=(target[part], source[part])) for part in parts[1:]
        ]  # fmt: skip
        for other in others:
            other.start()
        np.copyto(target[parts[0]], source[parts[0]])
        for other in others:
            other.join()
        return (target,)

    return call


def _record(
    run: Run, op: str, name: str, spec: Spec | dict[str, Any], cost: Cost, contender: Contender,
    error: Mapping[str, float | None], samples: list[float], note: str | None,
) -> Record:  # fmt: skip
    times: dict[str, Any] = {}
    if samples:
        rounded = [round(sample, 1) for sample in samples]
        median, spread = records.median_and_spread(rounded)
        times = {"samples_us": rounded, "median_us": median, "spread_us": spread}
    half = cost.moved // 2
    copies = op == "copy"
    facts = msgspec.json.decode(msgspec.json.encode(spec))  # as it is read back
    return Record(
        op=op, case=name, spec=facts, options={"threads": run.threads}, backend=contender.backend,
        kernel=contender.kernel, protocol="wall", device=run.device,
        driver=f"{platform.system()} {platform.release()}", clocks=None, versions=run.versions,
        commit=run.commit, digest=run.digest, date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        command=records.command(), bytes_read=half if copies else cost.read,
        bytes_written=half if copies else cost.written, flops=0 if copies else cost.flops, floor_us=None,
        error_over_bound=dict(error), note=note, **times,
    )  # fmt: skip
