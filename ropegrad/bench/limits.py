"""Ceilings measured on this device: how fast bytes can move in RoPE's mix, and how fast matrices multiply.

The ceiling of a case is the faster of a device-to-device copy and the tuned stream kernel at the case's
bytes, in the same run. The stream kernel is tuned over all of `streams.CONFIGS`; the best few are then timed
again beside the copy, so the figure is not the luckiest of 24.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ropegrad import records
from ropegrad.bench import device as devices
from ropegrad.bench.products import PRECISIONS, SHAPES, Product
from ropegrad.bench.streams import CONFIGS, Config, arrays, copy_calls, elements, stream_calls
from ropegrad.bench.timing import Timing, floors_us, invalid, measure, sets_needed
from ropegrad.cost import rope_cost
from ropegrad.records import Record
from ropegrad.suites import rope_suite

MIB = 1 << 20
COPIES = (4 * MIB, 8 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)  # bytes copied; twice as many move
FINALISTS = 3
DECIDES = ("activity", "datasheet", "limits", "products", "streams", "timing")  # a figure depends on these

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Samples:
    """How many each contender gets: while tuning, in the final run, and for a matrix product."""

    tuning: int = 10
    final: int = 50
    product: int = 10


@dataclass(frozen=True)
class Run:
    """What all records of one run share."""

    device: devices.Device
    versions: dict[str, str]
    commit: str
    digest: str

    def record(
        self, op: str, case: str, timing: Timing, error: Mapping[str, float | None], **facts: Any
    ) -> Record:
        """A record; without a time if the check failed."""
        floors = self.floors(facts)
        right = all(ratio is not None and ratio <= 1 for ratio in error.values()) and bool(error)
        times: dict[str, Any] = {}
        if right:
            rounded = [round(sample, 4) for sample in timing.samples_us]
            median, spread = records.median_and_spread(rounded)
            times = {"samples_us": rounded, "median_us": median, "spread_us": spread}
            times["invalid"] = invalid(median, floors) if floors else None
        return Record(
            op=op, case=case, backend="cublas" if op == "gemm" else "cuda", protocol=timing.protocol,
            device=self.device.name, driver=self.device.driver, clocks=self.device.clocks(),
            versions=self.versions, commit=self.commit, digest=self.digest, command=records.command(),
            date=datetime.datetime.now(datetime.UTC).date().isoformat(), note=timing.note,
            floor_us=max(floors.values()) if floors else None, error_over_bound=dict(error), **times, **facts,
        )  # fmt: skip

    def floors(self, facts: Mapping[str, Any]) -> dict[str, float]:
        """Empty for a device without a datasheet: then no time can be called invalid."""
        sheet = self.device.datasheet
        if sheet is None:
            return {}
        return floors_us(
            sheet, self.device.l2, read=facts["bytes_read"], written=facts["bytes_written"],
            flops=facts["flops"], precision=facts.get("precision") or "fp32",
        )  # fmt: skip


def start(commit: str | None = None) -> Run:
    """Facts about here and now. commit: where git cannot tell."""
    here = Path(__file__).parent
    digest = records.digest(here / f"{name}.py" for name in DECIDES)
    return Run(devices.current(), devices.versions(), commit or records.commit(), digest)


def measure_limits(run: Run, progress: Progress, samples: Samples | None = None) -> Iterator[Record]:
    """Copy and stream for each case of the rope suite, plain copies, matrix products."""
    samples = samples or Samples()
    for name, spec in rope_suite().items():
        progress(f"rope {name}")
        yield from case_limits(run, name, rope_cost(spec).moved, samples)
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
    n, half, here = elements(moved), -(-moved // 2), run.device
    sets = arrays(sets_needed(48 * n, here.l2), [4 * n] * 3)
    wide = arrays(sets_needed(2 * half, here.l2), [-(-half // 4)] * 2)
    contenders = {config.name: stream_calls(config, sets, here.multiprocessors) for config in CONFIGS}
    tuning = measure(contenders, "span", l2=here.l2, samples=samples.tuning)
    ranked = sorted(CONFIGS, key=lambda config: tuning[config.name].median_us)[:FINALISTS]
    final = measure(
        {"copy": copy_calls(wide, half), **{config.name: contenders[config.name] for config in ranked}},
        "span", l2=here.l2, samples=samples.final,
    )  # fmt: skip
    best = min(ranked, key=lambda config: final[config.name].median_us)
    options = asdict(best) | {"tuning_us": {other.name: tuning[other.name].median_us for other in CONFIGS}}
    yield run.record(
        "copy", name, final["copy"], {"copy": _copied(wide, half)}, spec={"suite": "rope"},
        kernel="cudaMemcpyAsync", bytes_read=half, bytes_written=half, flops=0,
    )  # fmt: skip
    yield run.record(
        "stream", name, final[best.name], {"sum": _added(sets, best, here)}, spec={"suite": "rope"},
        options=options, kernel=f"stream {best.name}", bytes_read=32 * n, bytes_written=16 * n, flops=0,
    )  # fmt: skip


def copy_limit(run: Run, nbytes: int, samples: Samples) -> Record:
    """A device-to-device copy of this many bytes."""
    sets = arrays(sets_needed(2 * nbytes, run.device.l2), [nbytes // 4] * 2)
    timing = measure({"copy": copy_calls(sets, nbytes)}, "span", l2=run.device.l2, samples=samples.final)
    return run.record(
        "copy", f"{nbytes // MIB} MiB", timing["copy"], {"copy": _copied(sets, nbytes)}, spec={},
        kernel="cudaMemcpyAsync", bytes_read=nbytes, bytes_written=nbytes, flops=0,
    )  # fmt: skip


def product_limit(run: Run, product: Product, samples: Samples) -> Record:
    """A matrix product's rate."""
    sets = product.arrays(sets_needed(product.read + product.written, run.device.l2))
    timing = measure({"gemm": product.calls(sets)}, "span", l2=run.device.l2, samples=samples.product)
    ratio, bits = product.check(*sets[-1])
    return run.record(
        "gemm", f"{product.m}x{product.k}x{product.n}", timing["gemm"], {"product": ratio},
        effective_bits={"product": bits}, spec={"m": product.m, "k": product.k, "n": product.n},
        kernel="cublasGemmEx", precision=product.precision,
        bytes_read=product.read, bytes_written=product.written, flops=product.flops,
    )  # fmt: skip


def _copied(sets: Sequence[Sequence[Any]], nbytes: int) -> float:
    """0 if each copy is its source bit for bit, else infinite."""
    same = all(bool((group[-1].view("u1")[:nbytes] == group[0].view("u1")[:nbytes]).all()) for group in sets)
    return 0.0 if same else float("inf")


def _added(sets: Sequence[Sequence[Any]], config: Config, here: devices.Device) -> float:
    """0 if this configuration writes a + b everywhere, bit for bit, else infinite; c is poisoned first."""
    for group in sets:
        group[2].fill(float("nan"))
    for call in stream_calls(config, sets, here.multiprocessors):
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
