"""What all records of one run share, and the code that a figure depends on."""

from __future__ import annotations

import datetime
import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropegrad import records
from ropegrad.bench import device as devices
from ropegrad.bench.timing import Timing, floors_us, invalid
from ropegrad.records import Record

# What decides machine code, launch, timing and judgement of each backend's figures: files of the package.
_TIMED = ("bench/activity.py", "bench/timing.py")
_JUDGED = ("verify/bounds.py", "verify/judge.py")
_CUDA = ("bench/limits.py", "bench/products.py", "bench/streams.py", "backends/cublas.py", *_TIMED)
DECIDES: dict[str, tuple[str, ...]] = {
    "cuda": _CUDA,
    "cublas": _CUDA,
    "cupy_fused": (
        "backends/cupy_fused.py",
        "backends/rope_*.py",
        "backends/kernels/rope_*",
        "backends/kernels/memory.cuh",
        "backends/kernels/numbers.cuh",
        *_TIMED,
        *_JUDGED,
    ),
    "cupy_tensor": (
        "backends/cupy_tensor.py",
        "backends/hopper.py",
        "backends/qkv_*.py",
        "backends/cublas*.py",
        "backends/kernels/numbers.cuh",
        "backends/kernels/memory.cuh",
        "backends/kernels/hopper.cuh",
        "backends/kernels/qkv_*",
        *_TIMED,
        *_JUDGED,
    ),
    "cupy_plain": ("backends/cupy_plain.py", "backends/cublas.py", "maths/layout.py", *_TIMED, *_JUDGED),
    "torch": ("bench/torch_formulas.py", "bench/torch_rivals.py", *_TIMED, *_JUDGED),
    "triton": ("bench/triton_rope.py", *_TIMED, *_JUDGED),
    "liger": (*_TIMED, *_JUDGED),
    "target": (*_TIMED, *_JUDGED),
    "cpu": (
        "bench/on_cpu.py",
        "bench/competitors.py",
        "bench/threads.py",
        "tiles.py",
        "backends/numba_*.py",
        "backends/numpy_*.py",
        "backends/portable.py",
        "maths/*.py",
        *_JUDGED,
    ),
}
# Bytes a second that no core loads and stores, from whichever cache: three vectors of 64 a clock at 6 GHz.
CORE = 1.2e12


@functools.cache
def digest(backend: str) -> str:
    """Of the code that a backend's figures depend on."""
    package = Path(__file__).resolve().parent.parent
    return records.digest(path for pattern in DECIDES[backend] for path in package.glob(pattern))


def digest_with(backend: str, source: Path | None) -> str:
    """The same, and of a target's file, which may be edited between two runs."""
    if source is None:
        return digest(backend)
    return hashlib.sha256(f"{digest(backend)} {records.digest([source])}".encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Run:
    """One run on one device. `commit` is the code's, `command` what makes the same records again."""

    device: devices.Device
    versions: dict[str, str]
    commit: str
    command: str = "ropegrad limits"

    def record(
        self,
        op: str,
        case: str,
        timing: Timing,
        error: Mapping[str, float | None],
        *,
        backend: str,
        refused: str | None = None,
        **facts: Any,
    ) -> Record:
        """A record; without a time if the check failed or if it is refused with this reason."""
        floors = self.floors(facts)
        right = all(ratio is not None and ratio <= 1 for ratio in error.values()) and bool(error)
        times: dict[str, Any] = {"invalid": f"INVALID: {refused}" if refused else None}
        if right and timing.samples_us and not refused:
            rounded = [round(sample, 4) for sample in timing.samples_us]
            median, spread = records.median_and_spread(rounded)
            times = {"samples_us": rounded, "median_us": median, "spread_us": spread}
            times["invalid"] = invalid(median, floors) if floors else None
        facts = {"note": timing.note, "digest": digest(backend) if "digest" not in facts else ""} | facts
        return Record(
            op=op, case=case, backend=backend, protocol=timing.protocol,
            device=self.device.name, driver=self.device.driver, clocks=self.device.clocks(),
            versions=self.versions, commit=self.commit, command=self.command,
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
            floor_us=max(floors.values()) if floors else None, error_over_bound=dict(error), **times, **facts,
        )  # fmt: skip

    def floors(self, facts: Mapping[str, Any]) -> dict[str, float]:
        """Empty for a GPU without a datasheet: then no time can be called invalid."""
        sheet = self.device.datasheet
        if sheet is None:
            return {} if self.device.pci_bus else self._of_cores(facts["bytes_read"] + facts["bytes_written"])
        return floors_us(
            sheet, self.device.l2, read=facts["bytes_read"], written=facts["bytes_written"],
            flops=facts["flops"], precision=facts.get("precision") or "fp32",
        )  # fmt: skip

    def _of_cores(self, moved: int) -> dict[str, float]:
        cores = self.device.multiprocessors
        return {f"{moved / 1e6:.3g} MB / {cores} cores of {CORE / 1e12:g} TB/s": moved / (cores * CORE) * 1e6}


def start(commit: str | None = None, command: str | None = None) -> Run:
    """Facts about here and now. commit: where git cannot tell; command: where it is not `ropegrad …`."""
    here = command or records.command()
    return Run(devices.current(), devices.versions(), commit or records.commit(), here)
