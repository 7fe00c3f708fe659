"""`python -m ropegrad.bench.suite_terminal`: time the suites into a file of records, and show its table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ropegrad import records
from ropegrad.bench.limits import Samples, plain_limits
from ropegrad.bench.run import digest, start
from ropegrad.bench.suite import TIMED, time_suite, timed_suite
from ropegrad.bench.terminal import columns
from ropegrad.records import Record

CEILINGS = ("copy", "stream", "products")


def main(arguments: Sequence[str]) -> int:
    """Add to FILE what it lacks of a suite at today's code; exit status 1 if something was wrong."""
    parser = argparse.ArgumentParser(prog="python -m ropegrad.bench.suite_terminal", description=__doc__)
    parser.add_argument("suite", choices=[*TIMED, "limits"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--commit")
    parser.add_argument("--command", default="python3 scripts/gpu --only time")
    parser.add_argument("--samples", type=int, default=30)
    parser.add_argument("--without-rivals", action="store_true")
    parser.add_argument("--cases", type=int, help="only the first so many")
    given = parser.parse_args(arguments)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    run = start(given.commit, given.command)
    held = [record for record in kept(given.file) if record.commit == run.commit]
    records.write(given.file, held)
    samples = Samples(final=given.samples)
    if given.suite == "limits":
        if not any(record.op == "gemm" for record in held):
            records.append(given.file, plain_limits(run, console.print, samples))
        return 0
    suite = timed_suite(given.suite)
    done = {record.case for record in held if record.spec.get("suite") == given.suite}
    left = list(suite)[given.cases :] if given.cases is not None else []
    for found in time_suite(
        run, given.suite, console.print, samples, rivals=not given.without_rivals, skip=[*done, *left]
    ):
        records.append(given.file, found)
    mine = [record for record in records.read(given.file) if record.spec.get("suite") == given.suite]
    show(console, mine)
    return 0 if all(record.passed and not record.invalid for record in mine) else 1


def kept(path: Path) -> list[Record]:
    """The records of a file that today's code would make; those of a run that was interrupted."""
    found = records.read(path) if path.exists() else []
    return [record for record in found if record.digest == digest(record.backend)]


def show(console: Console, found: list[Record]) -> None:
    """A row a case and protocol: the ceiling, each backend of ours and its ratio to that, PyTorch."""
    for protocol in dict.fromkeys(record.protocol for record in found):
        here = [record for record in found if record.protocol == protocol]
        timed = dict.fromkeys(r.backend for r in here if r.op not in CEILINGS and r.backend != "torch")
        mine = list(timed)
        torch = ("eager", "compile", "best") if any(r.backend == "torch" for r in here) else ()
        console.print(
            f"\n{here[0].device}, driver {here[0].driver}, {protocol}, median µs. Ceiling: the faster of "
            "copy and stream at the same bytes (rope), cuBLAS's bare products in IEEE float32 (qkv). "
            "torch: the reference formula eager and compiled, the best compiled formula."
        )
        headings = [heading for name in mine for heading in (name, "ratio")]
        table = columns("", "case", "ceiling", *headings, *(f"torch {name}" for name in torch), left=2)
        for case in dict.fromkeys(record.case for record in here):
            rows = [record for record in here if record.case == case]
            right = all(record.passed and not record.invalid for record in rows)
            ceiling, times = ceiling_us(rows), torch_us(rows)
            cells = [_us(ceiling)]
            for name in mine:
                us = next((r.median_us for r in rows if r.backend == name and r.op not in CEILINGS), None)
                cells += [_us(us), f"{us / ceiling:.2f}" if us and ceiling else "-"]
            cells += [_us(times.get(name)) for name in torch]
            style = "green" if right else "bold red"
            table.add_row("ok" if right else "NO", case.replace("=", ""), *cells, style=style)
        console.print(table)


def torch_us(rows: Sequence[Record]) -> dict[str, float]:
    """PyTorch's medians of a case: "eager" and "compile" of the reference formula, "best" compiled."""
    times = {
        (r.options["compiled"], r.options["formula"]): r.median_us
        for r in rows
        if r.backend == "torch" and r.median_us is not None
    }
    compiled = [us for (is_compiled, _), us in times.items() if is_compiled]
    found = {"eager": times.get((False, "reference")), "compile": times.get((True, "reference"))}
    found["best"] = min(compiled, default=None)
    return {name: us for name, us in found.items() if us is not None}


def _us(us: float | None) -> str:
    return "-" if us is None else f"{us:.1f}"


def ceiling_us(rows: Sequence[Record]) -> float | None:
    """Of a case under one protocol: fp32 products where precision is highest, else the fastest of bytes."""
    times = [
        record.median_us
        for record in rows
        if record.op in CEILINGS and record.precision in (None, "fp32") and record.median_us
    ]
    return min(times, default=None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
