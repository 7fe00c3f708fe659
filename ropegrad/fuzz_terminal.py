"""What `ropegrad fuzz TARGET` shows: how many problems were tried, and the smallest that went wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ropegrad.errors import SpecError
from ropegrad.target_terminal import COULD_NOT, Limits, refuse, show, show_heading
from ropegrad.verify.domain import Domain
from ropegrad.verify.examine import Broken, Examination, broken_rules
from ropegrad.verify.fuzz import Search, database, search
from ropegrad.verify.process import Process
from ropegrad.verify.repro import script
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
    repro: Path | None = None,
) -> tuple[int, Examination | None]:  # fmt: skip
    """Look for a problem that the target gets wrong; exit status 0 none found, 1 found, 2 not judged."""
    seen = Search(contract, domain)
    stopped = False
    try:
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
    except (NoTarget, SpecError) as error:
        return refuse(console, error), None
    examination = as_examination(seen)
    show(console, examination, seen.seconds)
    if stopped:
        console.print("interrupted; start it again to go on", style="yellow")
    if repro is not None and examination.broken:
        return write_repro(console, repro, target, contract, examination.broken[0], limits), examination
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


def write_repro(
    console: Console, file: Path, target: str, contract: Contract, broken: Broken, limits: Limits
) -> int:
    """Write the script; exit status 1, since something is wrong, or 2 where it cannot be written."""
    cases = [broken.recipe.case(), broken.recipe.case(other=1)]
    try:
        text = script(target, contract, cases, broken.faults[0], 10 * limits.timeout)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except (SpecError, OSError) as error:
        console.print(f"no script: {error}", style="bold red", highlight=False, markup=False)
        return COULD_NOT
    console.print(f"shown again by: python {file}", highlight=False, markup=False)
    return 1
