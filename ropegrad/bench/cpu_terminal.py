"""What `ropegrad bench` shows: for each case the contenders' times, as multiples of the copy's and of ours.

The last column is the worst error of the check before, as a fraction of its bound.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from ropegrad import records
from ropegrad.bench.cpu import Run, measure, products, start, workloads
from ropegrad.bench.threads import limited, unlimited
from ropegrad.records import Record


def show(
    console: Console, suite: str, *, case: str | None, threads: int, samples: int, json_file: Path | None,
    commit: str | None,
) -> int:  # fmt: skip
    """Measure and show; exit status 0, 1 if one of ours is wrong, 2 if it cannot be measured."""
    cases = {name: spec for name, spec in workloads(suite).items() if case in (None, name)}
    reason = unlimited(threads) or ("" if cases else f"no case {case!r}: {', '.join(workloads(suite))}")
    if samples < 1:
        reason = f"--samples {samples}: at least one is needed"
    if reason:
        console.print(f"ropegrad bench: {reason}", style="bold red", highlight=False)
        return 2
    with limited(threads):
        run = start(threads, samples, commit)
        found = [products(run)]
        _show_run(console, run, found[0])
        for name, spec in cases.items():
            with console.status(name) as status:
                here = list(measure(run, name, spec, status.update))
            _show_case(console, name, here)
            found += here
            if json_file is not None:
                records.write(json_file, found)
    wrong = [r for r in found if not r.passed and r.backend in ("numba_cpu", "numpy_tiled")]
    return 1 if wrong else 0


def _show_run(console: Console, run: Run, product: Record) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    console.print(
        f"{run.device}, {run.threads} threads for each, {run.samples} samples in turns, commit {run.commit}, "
        f"digest {run.digest}\n{versions}",
        highlight=False,
    )
    if product.median_us:
        rate = product.flops / product.median_us / 1e3
        console.print(f"matrix products of {product.case}: {rate:.0f} GFLOP/s", highlight=False)


def _show_case(console: Console, name: str, found: list[Record]) -> None:
    copy, ours = found[0].median_us or 0.0, best(found, "numba_cpu", "numpy_tiled")
    console.print(
        f"\n{name}: {copy / 1e3:.2f} ms to copy the same {found[0].bytes / 1e6:.0f} MB", style="bold"
    )
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for i, heading in enumerate(("", "formula", "ms", "/ copy", "/ ours", "error")):
        table.add_column(heading, justify="left" if i < 2 else "right", no_wrap=True)
    for record in found[1:]:
        table.add_row(record.backend, record.kernel, *_figures(record, copy, ours))
    console.print(table)
    for record in found[1:]:
        if record.median_us is None:
            console.print(f"{record.backend} {record.kernel}: {record.note}", style="red", highlight=False)


def best(found: list[Record], *backends: str) -> Record | None:
    """The fastest record of these backends that has a time."""
    timed = [r for r in found if r.backend in backends and r.op != "copy" and r.median_us is not None]
    return min(timed, key=lambda record: record.median_us or 0.0, default=None)


def _figures(record: Record, copy: float, ours: Record | None) -> list[str]:
    worst = max((ratio for ratio in record.error_over_bound.values() if ratio is not None), default=None)
    error = "-" if worst is None else f"{worst:.3g}"
    if record.median_us is None:
        return ["no time", "-", "-", error]
    relative = "-" if ours is None or not ours.median_us else f"{record.median_us / ours.median_us:.2f}"
    median, spread = record.median_us / 1e3, (record.spread_us or 0.0) / 1e3
    return [f"{median:.2f} ±{spread:.2f}", f"{record.median_us / copy:.2f}", relative, error]
