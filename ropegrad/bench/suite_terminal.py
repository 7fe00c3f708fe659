"""`python -m ropegrad.bench.suite_terminal`: a suite, or this GPU's plain limits, into a file of records.

The projections are timed at every promise at once, each contender at its own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ropegrad import records
from ropegrad.bench import on_gpu
from ropegrad.bench.ahead import compile_ahead
from ropegrad.bench.asked import Asked
from ropegrad.bench.bench_terminal import run, show_run
from ropegrad.bench.ledger import Ledger
from ropegrad.bench.limits import Samples, plain_limits
from ropegrad.bench.place import Choice
from ropegrad.bench.run import digest
from ropegrad.bench.workloads import TIMED, problems
from ropegrad.records import Record
from ropegrad.verify.target import Contract


def main(arguments: Sequence[str]) -> int:
    """Add to FILE what it lacks of a suite at today's code; exit status 0 only if all of it is right."""
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
    place = on_gpu.start(given.samples, given.commit, given.command)
    records.write(given.file, [one for one in kept(given.file) if one.commit == place.run.commit])
    ledger = Ledger(given.file)
    if given.suite == "limits":
        if not any(record.op == "gemm" for record in ledger.records):
            ledger.add(list(plain_limits(place.run, console.print, Samples(final=given.samples))))
        return 0
    contract = Contract(op=given.suite.partition("-")[0])
    asked = Asked(suite=given.suite, choice=Choice(rivals=not given.without_rivals), json=given.file)
    cases = problems(given.suite, contract, asked.domain)[: given.cases]
    show_run(console, place)
    if asked.choice.rivals:
        compile_ahead([problem.spec for problem in cases if not ledger.of(problem)])
    return run(console, place, cases, (), asked, ledger)


def kept(path: Path) -> list[Record]:
    """The records of a file that today's code would make; those of a run that was interrupted."""
    found = records.read(path) if path.exists() else []
    return [record for record in found if record.digest == digest(record.backend)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
