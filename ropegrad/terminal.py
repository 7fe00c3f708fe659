"""What `ropegrad verify` shows: a progress bar, a table row a case, the findings, a file of all figures."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ropegrad.backends import find
from ropegrad.errors import SpecError
from ropegrad.info import info
from ropegrad.records import probe
from ropegrad.suites import SUITES
from ropegrad.verify.cases import EDGE_CASES
from ropegrad.verify.check import Verdict
from ropegrad.verify.conformance import DRAWS, Row, backends_of, cannot_run, edge_rows, suite_rows


def verify(console: Console, suite: str, backend: str | None, *, quick: bool, json_file: Path | None) -> int:
    """Judge the backends; exit status 0 right, 1 wrong, 2 could not be judged."""
    ops = list(SUITES) if suite == "all" else [suite]
    try:
        backends = _backends(console, ops, backend)
        probe(json_file)
    except (SpecError, OSError) as error:
        console.print(f"ropegrad verify: {error}", style="bold red", highlight=False)
        return 2
    start = time.perf_counter()
    ops = list(backends)
    rows = {op: _run(console, op, names, quick=quick) for op, names in backends.items()}
    everything = [row for op in ops for kind in rows[op] for row in kind]
    for op in ops:
        _show_suite(console, op, rows[op][1])
    _show_edges(console, ops, rows)
    failed = [row for row in everything if not row.passed]
    for row in failed:
        _show_findings(console, row)
    _summarise(console, everything, failed, time.perf_counter() - start)
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(_report(everything)), indent=1) + b"\n")
    return 1 if failed else 0


def _backends(console: Console, ops: list[str], name: str | None) -> dict[str, list[str]]:
    """By operation the backends to judge; SpecError if the one that is asked for can run none of them."""
    if name is None:
        return {op: backends_of(op) for op in ops}
    backend = find(name)
    reasons = {op: cannot_run(backend, next(iter(SUITES[op]().values()))) for op in ops}
    if all(reasons.values()):
        raise SpecError(f"backend {name!r} cannot run here: {next(iter(reasons.values()))}")
    for op, reason in reasons.items():
        if reason:
            console.print(f"{op} is left out: {name} cannot run it: {reason}", highlight=False)
    return {op: [name] for op, reason in reasons.items() if not reason}


def _run(console: Console, op: str, backends: list[str], *, quick: bool) -> tuple[list[Row], list[Row]]:
    """Edge rows and suite rows of one operation, under a progress bar."""
    steps = len(EDGE_CASES[op]()) + (0 if quick else len(SUITES[op]()) * len(DRAWS[op]))
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(op, total=steps)
        started = 0

        def progress(what: str) -> None:
            nonlocal started
            bar.update(task, completed=started, description=what)
            started += 1

        edges = list(edge_rows(op, backends, progress))
        return edges, [] if quick else list(suite_rows(op, backends, progress))


def _show_suite(console: Console, op: str, rows: list[Row]) -> None:
    if not rows:
        return
    names = list(next(iter(rows[0].verdicts.values())).worst)
    console.print(
        f"\n{op}: worst error/bound of both draws (at most 1 is right) and effective bits", highlight=False
    )
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("case", no_wrap=True)
    table.add_column("backend", no_wrap=True)
    for name in names:
        heading = name.removeprefix("grad_").replace("hidden_states", "hidden")
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("ms", justify="right", no_wrap=True)
    table.add_column("GB/s" if op == "rope" else "GFLOP/s", justify="right", no_wrap=True)
    for row in rows:
        work = row.moved if op == "rope" else row.flops
        lines = [_cells(backend, verdict, names, work) for backend, verdict in row.verdicts.items()]
        cells = ("\n".join(column) for column in zip(*lines, strict=True))
        style = "green" if row.passed else "bold red"
        table.add_row("ok" if row.passed else "NO", row.case.replace("=", ""), *cells, style=style)
    console.print(table)


def _cells(backend: str, verdict: Verdict, names: list[str], work: int) -> Iterator[str]:
    yield backend
    for name in names:
        yield f"{_short(verdict.worst.get(name, math.nan))} {verdict.bits.get(name, math.nan):4.1f}"
    measured = math.isfinite(verdict.seconds)
    yield f"{verdict.seconds * 1e3:.0f}" if measured else "-"
    yield f"{work / verdict.seconds / 1e9:.1f}" if measured else "-"


def _short(ratio: float) -> str:
    """Four characters."""
    if ratio == 0 or ratio >= 0.9995:
        return f"{ratio:.2f}" if ratio < 10 else f"{min(ratio, 9e99):.0e}".replace("e+0", "e")
    return f"{ratio:.3f}"[1:] if ratio >= 0.01 else f"{ratio:.0e}".replace("e-0", "e-")


def _show_edges(console: Console, ops: list[str], rows: dict[str, tuple[list[Row], list[Row]]]) -> None:
    console.print("\nnamed edge cases")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for heading in ("op", "backend", "cases", "right", "worst error/bound"):
        table.add_column(heading, justify="left" if heading in ("op", "backend") else "right")
    for op in ops:
        edges = rows[op][0]
        for backend in dict.fromkeys(backend for row in edges for backend in row.verdicts):
            verdicts = [row.verdicts[backend] for row in edges if backend in row.verdicts]
            right = sum(verdict.passed for verdict in verdicts)
            worst = max(max(verdict.worst.values(), default=0.0) for verdict in verdicts)
            style = "green" if right == len(verdicts) else "bold red"
            table.add_row(op, backend, str(len(verdicts)), str(right), f"{worst:.3f}", style=style)
    console.print(table)


def _show_findings(console: Console, row: Row) -> None:
    for backend, verdict in row.verdicts.items():
        for finding in verdict.findings[:5]:
            text = f"{row.op} {row.case}, {backend}: {finding.rule}: {finding.message}"
            console.print(text, style="red", highlight=False)


def _summarise(console: Console, rows: list[Row], failed: list[Row], seconds: float) -> None:
    outcome = "all right" if not failed else f"{len(failed)} of {len(rows)} WRONG"
    style = "bold red" if failed else "bold green"
    console.print(f"\n{len(rows)} cases, {outcome}; {seconds:.0f} s", style=style, highlight=False)
    console.print(
        "Every element of every gradient was compared with an exact result; times are the better of the two "
        "draws, each run once, and no benchmark.",
        style="dim",
    )


def _report(rows: list[Row]) -> dict[str, object]:
    """Plain values; what is not finite becomes a string, since JSON has no such numbers."""

    def plain(x: float) -> float | str:
        return x if math.isfinite(x) else str(x)

    return {
        "info": info(),
        "cases": [
            {
                "op": row.op,
                "case": row.case,
                "backend": backend,
                "passed": verdict.passed,
                "error_over_bound": {name: plain(x) for name, x in verdict.worst.items()},
                "effective_bits": {name: plain(x) for name, x in verdict.bits.items()},
                "seconds": plain(verdict.seconds),
                "bytes": row.moved,
                "flops": row.flops,
                "findings": [vars(finding) for finding in verdict.findings],
            }
            for row in rows
            for backend, verdict in row.verdicts.items()
        ],
    }  # fmt: skip
