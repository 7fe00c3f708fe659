"""What `ropegrad limits` shows: datasheets, the ceilings of the rope suite, copies and matrix products."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from ropegrad import records
from ropegrad.backends.cupy_plain import no_gpu
from ropegrad.bench.datasheet import DATASHEETS
from ropegrad.bench.limits import ceilings, measure_limits
from ropegrad.bench.run import start
from ropegrad.records import Record


def show(console: Console, *, json_file: Path | None, commit: str | None) -> int:
    """Datasheets, then what can be measured here; exit status 0, or 2 where the file cannot be written."""
    _show_datasheets(console)
    reason = no_gpu()
    if reason is not None:
        console.print(f"\nNothing was measured: {reason}", highlight=False)
        return 0
    try:
        if json_file is not None:
            json_file.parent.mkdir(parents=True, exist_ok=True)
            records.probe(json_file)
    except OSError as error:
        console.print(f"ropegrad limits: {error}", style="bold red", highlight=False)
        return 2
    run = start(commit)
    with console.status("") as status:
        found = list(measure_limits(run, status.update))
    if json_file is not None:
        records.write(json_file, found)
    _show_ceilings(console, found)
    _show_plain(console, found)
    return 0


def columns(*headings: str, left: int = 1) -> Table:
    """A table of these columns, the first `left` ones aligned left."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="left" if i < left else "right", no_wrap=True)
    return table


def _show_datasheets(console: Console) -> None:
    console.print("datasheets: memory TB/s, dense TFLOP/s, L2 in MiB")
    table = columns("device", "TB/s", "fp32", "tf32", "fp16", "L2")
    for sheet in DATASHEETS:
        rates = (sheet.bandwidth, sheet.fp32, sheet.tf32, sheet.fp16)
        table.add_row(
            sheet.name,
            *(f"{rate / 1e12:g}" for rate in rates),
            "-" if sheet.l2 is None else f"{sheet.l2 / 2**20:g}",
        )
    console.print(table)
    for sheet in DATASHEETS:
        console.print(f"{sheet.name}: {sheet.source}", style="dim", highlight=False)


def _show_ceilings(console: Console, found: list[Record]) -> None:
    first = found[0]
    console.print(
        f"\n{first.device}, driver {first.driver}, MHz {first.clocks}, {first.protocol}, "
        f"commit {first.commit}, digest {first.digest}\nrope suite, median µs ± median deviation",
        highlight=False,
    )
    if first.note:
        console.print(first.note, highlight=False)
    table = columns("case", "MB", "copy", "stream", "best configuration", "TB/s")
    best = []
    for ceiling in ceilings(found):
        pair = (ceiling.copy, ceiling.stream)
        if ceiling.best is not None and ceiling.best.median_us:
            best.append(ceiling.best.median_us)
        rate = f"{ceiling.best.bytes / best[-1] / 1e6:.2f}" if ceiling.best else "-"
        times = [_time(record) for record in pair]
        kernel = ceiling.stream.kernel.removeprefix("stream ")
        table.add_row(
            ceiling.case.replace("=", ""), f"{ceiling.stream.bytes / 1e6:.1f}", *times, kernel, rate
        )
    console.print(table)
    if best:
        console.print(f"mean ceiling {sum(best) / len(best):.2f} µs over {len(best)} cases", highlight=False)


def _show_plain(console: Console, found: list[Record]) -> None:
    table = columns("op", "case", "precision", "µs", "TB/s", "TFLOP/s", left=3)
    for record in found:
        if (record.op == "copy" and "suite" not in record.spec) or record.op == "gemm":
            us = record.median_us
            rates = (f"{work / us / 1e6:.2f}" if us else "-" for work in (record.bytes, record.flops))
            table.add_row(record.op, record.case, record.precision or "", _time(record), *rates)
    console.print(table)
    for record in found:
        if record.invalid or not record.passed:
            console.print(
                f"{record.op} {record.case}: {record.invalid or 'wrong result: no time'}", style="red"
            )


def _time(record: Record) -> str:
    if record.median_us is None:
        return "wrong"
    return f"{record.median_us:.2f} ±{record.spread_us:.2f}" + (" INVALID" if record.invalid else "")
