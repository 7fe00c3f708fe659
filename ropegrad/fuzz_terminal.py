"""What `ropegrad fuzz TARGET` shows: how many problems were tried, and the smallest that went wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ropegrad.errors import SpecError
from ropegrad.target_terminal import COULD_NOT, Limits, Reports, refuse, show, show_heading
from ropegrad.verify.domain import Domain
from ropegrad.verify.examine import Examination, broken_rules
from ropegrad.verify.fuzz import Search, database, search
from ropegrad.verify.process import Process
from ropegrad.verify.target import Contract, NoTarget


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How long to look: problems, or minutes in so many processes; where failures are kept; the seed."""

    examples: int | None = None
    minutes: float | None = None
    jobs: int = 1
    database: Path = Path(".hypothesis")
    seed: int | None = None


def fuzz(
    console: Console, target: str, contract: Contract, domain: Domain, limits: Limits, effort: Effort,
    reports: Reports = Reports(),  # noqa: B008  frozen
) -> tuple[int, Examination | None]:  # fmt: skip
    """Look for a problem that the target gets wrong; exit status 0 none found, 1 found, 2 not judged."""
    seen = Search(contract, domain)
    stopped = False
    try:
        reports.probe()
        show_heading(console, target, contract, domain)
        with Process(target, contract, timeout=limits.timeout, memory=limits.nbytes) as process:
            store = database(effort.database, target, contract)
            with _progress(console) as progress:

                def told(now: Search) -> None:
                    nonlocal seen
                    seen = now
                    progress(now)

                seconds = None if effort.minutes is None else 60 * effort.minutes
                try:
                    seen = search(process, domain, examples=effort.examples, seconds=seconds, store=store,
                                  start=effort.seed, progress=told)  # fmt: skip
                except KeyboardInterrupt:
                    stopped = True
    except (NoTarget, SpecError, OSError) as error:
        return refuse(console, error), None
    examination = as_examination(seen)
    show(console, examination, seen.seconds)
    if stopped:
        console.print("interrupted; start it again to go on", style="yellow")
    reports.write(console, target, contract, limits, examination, seen.seconds)
    return (COULD_NOT if stopped and seen.status == 0 else seen.status), examination


def as_examination(found: Search) -> Examination:
    """A search's failures and some of what passed, to be shown as what `verify` saw."""
    seen = Examination(found.contract, found.domain, trials=[*found.failures, *found.passed])
    seen.problems, seen.all_calls, seen.declined = found.judged + found.declined, found.calls, found.declined
    seen.broken = broken_rules(seen)
    return seen


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[Callable[[Search], None]]:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("importing the target", total=None)

        def progress(now: Search) -> None:
            what = "shrinking" if now.failure is not None else "none wrong so far"
            bar.update(task, description=f"{now.judged + now.declined} problems, {what}")

        yield progress
