"""Ceilings measured on this device: how fast bytes can move in RoPE's mix, and how fast matrices multiply.

The ceiling of a case is the faster of a device-to-device copy and the tuned stream kernel at the case's
bytes, in the same run. The stream kernel is tuned over all of `streams.CONFIGS`; the best few are then timed
again beside the copy, so the figure is not the luckiest of 24.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ropegrad.bench.products import PRECISIONS, SHAPES, Product
from ropegrad.bench.run import Run
from ropegrad.bench.streams import CONFIGS, Config, arrays, copy_calls, elements, stream_calls
from ropegrad.bench.timing import Call, Timing, measure, sets_needed
from ropegrad.cost import rope_cost
from ropegrad.records import Record
from ropegrad.suites import rope_suite

MIB = 1 << 20
COPIES = (4 * MIB, 8 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)  # bytes copied; twice as many move
FINALISTS = 3

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Samples:
    """How many each contender gets: while tuning, in the final run, and for a matrix product."""

    tuning: int = 10
    final: int = 50
    product: int = 10


def measure_limits(run: Run, progress: Progress, samples: Samples | None = None) -> Iterator[Record]:
    """Copy and stream for each case of the rope suite, plain copies, matrix products."""
    samples = samples or Samples()
    for name, spec in rope_suite().items():
        progress(f"rope {name}")
        yield from case_limits(run, name, rope_cost(spec).moved, samples)
    yield from plain_limits(run, progress, samples)


def plain_limits(run: Run, progress: Progress, samples: Samples | None = None) -> Iterator[Record]:
    """Plain copies and matrix products."""
    samples = samples or Samples()
    for nbytes in COPIES:
        progress(f"copy {nbytes // MIB} MiB")
        yield copy_limit(run, nbytes, samples)
    for shape in SHAPES:
        for precision in PRECISIONS:
            product = Product(*shape, precision)
            progress(f"matrix product {shape} {precision}")
            yield product_limit(run, product, samples)


def case_limits(run: Run, name: str, moved: int, samples: Samples) -> Iterator[Record]:
    """The copy's record and the tuned stream's, at these bytes."""
    tuned = Tuned(run, moved, samples)
    timings = measure(tuned.contenders, "span", l2=run.device.l2, samples=samples.final)
    yield from tuned.records(name, timings)


class Tuned:
    """Copy, and the stream kernel in its best configurations, at some number of bytes; to be timed."""

    def __init__(self, run: Run, moved: int, samples: Samples) -> None:
        self.run, self.n, self.half = run, elements(moved), -(-moved // 2)
        l2, self._processors = run.device.l2, run.device.multiprocessors
        self._sets = arrays(sets_needed(48 * self.n, l2), [4 * self.n] * 3)
        self._wide = arrays(sets_needed(2 * self.half, l2), [-(-self.half // 4)] * 2)
        every = {config.name: stream_calls(config, self._sets, self._processors) for config in CONFIGS}
        tuning = measure(every, "span", l2=l2, samples=samples.tuning)
        self.tuning_us = {config.name: tuning[config.name].median_us for config in CONFIGS}
        self.finalists = sorted(CONFIGS, key=lambda config: self.tuning_us[config.name])[:FINALISTS]
        self.contenders: dict[str, list[Call]] = {"copy": copy_calls(self._wide, self.half)}
        self.contenders |= {config.name: every[config.name] for config in self.finalists}

    def records(self, case: str, timings: Mapping[str, Timing], suite: str = "rope") -> Iterator[Record]:
        """The copy's, and that of the finalist that was fastest."""
        best = min(self.finalists, key=lambda config: timings[config.name].median_us)
        options = asdict(best) | {"tuning_us": self.tuning_us}
        yield self.run.record(
            "copy", case, timings["copy"], {"copy": _copied(self._wide, self.half)}, spec={"suite": suite},
            backend="cuda", kernel="cudaMemcpyAsync", bytes_read=self.half, bytes_written=self.half, flops=0,
        )  # fmt: skip
        yield self.run.record(
            "stream", case, timings[best.name], {"sum": _added(self._sets, best, self._processors)},
            spec={"suite": suite}, options=options, backend="cuda", kernel=f"stream {best.name}",
            bytes_read=32 * self.n, bytes_written=16 * self.n, flops=0,
        )  # fmt: skip


def copy_limit(run: Run, nbytes: int, samples: Samples) -> Record:
    """A device-to-device copy of this many bytes."""
    sets = arrays(sets_needed(2 * nbytes, run.device.l2), [nbytes // 4] * 2)
    timing = measure({"copy": copy_calls(sets, nbytes)}, "span", l2=run.device.l2, samples=samples.final)
    return run.record(
        "copy", f"{nbytes // MIB} MiB", timing["copy"], {"copy": _copied(sets, nbytes)}, spec={},
        backend="cuda", kernel="cudaMemcpyAsync", bytes_read=nbytes, bytes_written=nbytes, flops=0,
    )  # fmt: skip


def product_limit(run: Run, product: Product, samples: Samples) -> Record:
    """A matrix product's rate."""
    sets = product.arrays(sets_needed(product.read + product.written, run.device.l2))
    timing = measure({"gemm": product.calls(sets)}, "span", l2=run.device.l2, samples=samples.product)
    ratio, bits = product.check(*sets[-1])
    return run.record(
        "gemm", f"{product.m}x{product.k}x{product.n}", timing["gemm"], {"product": ratio},
        effective_bits={"product": bits}, spec={"m": product.m, "k": product.k, "n": product.n},
        backend="cublas", kernel="cublasGemmEx", precision=product.precision,
        bytes_read=product.read, bytes_written=product.written, flops=product.flops,
    )  # fmt: skip


def _copied(sets: Sequence[Sequence[Any]], nbytes: int) -> float:
    """0 if each copy is its source bit for bit, else infinite."""
    same = all(bool((group[-1].view("u1")[:nbytes] == group[0].view("u1")[:nbytes]).all()) for group in sets)
    return 0.0 if same else float("inf")


def _added(sets: Sequence[Sequence[Any]], config: Config, multiprocessors: int) -> float:
    """0 if this configuration writes a + b everywhere, bit for bit, else infinite; c is poisoned first."""
    for group in sets:
        group[2].fill(float("nan"))
    for call in stream_calls(config, sets, multiprocessors):
        call()
    return 0.0 if all(bool((c == a + b).all()) for a, b, c in sets) else float("inf")


@dataclass(frozen=True)
class Ceiling:
    """The shortest of what was measured at a case's bytes."""

    case: str
    copy: Record
    stream: Record

    @property
    def best(self) -> Record | None:
        """The faster of the records that have a time and are not invalid."""
        good = [r for r in (self.copy, self.stream) if r.median_us is not None and r.invalid is None]
        return min(good, key=lambda record: record.median_us or 0.0, default=None)


def ceilings(found: Sequence[Record]) -> list[Ceiling]:
    """One a case for which both records are there, in their order."""
    streams = {record.case: record for record in found if record.op == "stream"}
    return [Ceiling(r.case, r, streams[r.case]) for r in found if r.op == "copy" and r.case in streams]
