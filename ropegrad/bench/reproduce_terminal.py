"""What `ropegrad bench --reproduce` shows: old, new and ratio of each time, and what is different here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ropegrad import records
from ropegrad.bench.facts import contender_of, suite_of
from ropegrad.bench.reproduce import MICROSECONDS, RELATIVE, Pair, differences, measure_again, pairs, why_not
from ropegrad.bench.terminal import columns
from ropegrad.bench.threads import unlimited
from ropegrad.errors import SpecError
from ropegrad.records import Record
from ropegrad.verify.target import NoTarget


def reproduce(
    console: Console, file: Path, *, samples: int | None, json_file: Path | None, commit: str | None
) -> int:
    """Exit status 0 if all times were reproduced, 1 if not, 2 if they cannot be measured here."""
    try:
        old = records.read(file)
        reason = why_not(old) or _threads(old)
    except (OSError, ValueError) as error:
        reason = str(error)
    if reason is not None:
        console.print(f"ropegrad bench: {reason}", style="bold red", highlight=False, markup=False)
        return 2
    new: list[Record] = []
    try:
        with console.status("") as status:
            for found in measure_again(old, samples, status.update, commit):
                new += found
                if json_file is not None:
                    records.write(json_file, new)
    except (NoTarget, SpecError) as error:
        console.print(f"ropegrad bench: {error}", style="bold red", highlight=False, markup=False)
        return 2
    return show(console, old, new)


def _threads(old: Sequence[Record]) -> str | None:
    counts = {int(record.options["threads"]) for record in old if "threads" in record.options}
    return next(filter(None, map(unlimited, sorted(counts))), None)


def show(console: Console, old: Sequence[Record], new: Sequence[Record]) -> int:
    """The table, the differences, and a line that says how many agree; exit status 0 if all do."""
    found = pairs(old, new)
    table = columns("", "suite", "case", "contender", "protocol", "old µs", "new µs", "ratio", left=5)
    for pair in found:
        style = "green" if pair.reproduced else "red"
        table.add_row("ok" if pair.reproduced else "NO", *_facts(pair), style=style)
    console.print(table)
    for name, there, here in differences(old, new):
        console.print(f"{name}: {there or '-'}, here {here or '-'}", highlight=False, markup=False)
    agree = sum(pair.reproduced for pair in found)
    console.print(
        f"{agree} of {len(found)} times within {RELATIVE:.0%} or {MICROSECONDS} µs, whichever is larger",
        highlight=False,
    )
    return 0 if agree == len(found) else 1


def _facts(pair: Pair) -> tuple[str, ...]:
    name = " ".join(filter(None, (contender_of(pair.old), pair.old.precision)))
    new = pair.new.median_us if pair.new else None
    times = (pair.old.median_us, new)
    return (
        suite_of(pair.old), pair.old.case.replace("=", ""), name, pair.old.protocol,
        *("-" if us is None else f"{us:.2f}" for us in times),
        "-" if pair.ratio is None else f"{pair.ratio:.3f}",
    )  # fmt: skip
