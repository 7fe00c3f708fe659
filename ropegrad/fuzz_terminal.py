"""What `ropegrad fuzz TARGET` shows: how many problems were tried, and the smallest that went wrong."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ropegrad.errors import SpecError
from ropegrad.spec import judge_positive
from ropegrad.target_terminal import Limits, Reports, refuse, show, show_heading
from ropegrad.verify.battery import battery
from ropegrad.verify.campaign import Jobs, diary, earlier_runs, note_run
from ropegrad.verify.domain import Domain
from ropegrad.verify.examine import Examination, broken_rules, explain
from ropegrad.verify.fuzz import Search, Stop, database, search
from ropegrad.verify.process import Process
from ropegrad.verify.target import Contract, NoTarget
from ropegrad.verify.trial import attempt


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How long to look: problems or minutes, in so many processes; where failures are kept; the seed."""

    examples: int | None = None
    minutes: float | None = None
    jobs: int = 1
    database: Path = Path(".hypothesis")
    seed: int | None = None

    def __post_init__(self) -> None:
        judge_positive("examples", self.examples)
        judge_positive("minutes", self.minutes)

    @property
    def seconds(self) -> float | None:
        """The minutes in seconds."""
        return None if self.minutes is None else 60 * self.minutes

    @property
    def share(self) -> int | None:
        """The problems of one process."""
        return None if self.examples is None else -(-self.examples // self.jobs)


def fuzz(
    console: Console,
    target: str,
    contract: Contract,
    domain: Domain,
    limits: Limits,
    effort: Effort,
    reports: Reports = Reports(),  # noqa: B008  frozen
) -> tuple[int, Examination | None]:
    """Look for a problem that the target gets wrong; exit status 0 none found, 1 found, 2 not judged,
    130 interrupted before one was found."""
    file = diary(effort.database, target, contract)
    began = time.monotonic()
    try:
        reports.probe()
        battery(contract, domain)  # or there is nothing to draw
        show_heading(console, target, contract, domain)
        with Process(target, contract, timeout=limits.timeout, memory=limits.nbytes) as process:
            seen = _look(console, process, domain, limits, effort)
    except (NoTarget, SpecError, OSError) as error:
        return refuse(console, error), None
    seconds = time.monotonic() - began
    show(console, seen, seconds)
    before = earlier_runs(file)
    note_run(file, seen.problems, seconds, effort.jobs, bool(seen.broken))
    if before:
        problems = sum(run.problems for run in before) + seen.problems
        console.print(f"with {len(before)} earlier runs: {problems:,} problems", style="dim", highlight=False)
    if seen.interrupted:
        console.print("interrupted; start it again to go on", style="yellow")
    reports.write(console, target, contract, limits, seen, seconds)
    return seen.status, seen


def _look(console: Console, process: Process, domain: Domain, limits: Limits, effort: Effort) -> Examination:
    """Search here and in the other jobs; all that was seen."""
    found, stopped = Search(process.contract, domain), False
    base = int.from_bytes(os.urandom(4)) if effort.seed is None else effort.seed
    tasks = [_task(process, domain, limits, effort, base + (n << 32)) for n in range(1, effort.jobs)]
    jobs = Jobs(tasks)
    try:
        with _progress(console, jobs, effort) as progress, _ctrl_c() as pressed:

            def told(now: Search) -> None:
                nonlocal found
                found = now
                progress(now)
                if pressed():
                    raise KeyboardInterrupt
                if jobs.failure is not None and now.failure is None:
                    raise Stop

            store = database(effort.database, process.target, process.contract)
            found = search(process, domain, examples=effort.share, seconds=effort.seconds, store=store,
                           start=base, progress=told)  # fmt: skip
            if found.failure is None and jobs.failure is None:
                jobs.wait()
    except KeyboardInterrupt:
        stopped = True
    finally:
        jobs.stop()
    if jobs.failure is not None and found.failure is None:
        found.failures.append(attempt(process, jobs.failure))
    seen = replace(as_examination(found, jobs), interrupted=stopped)
    if seen.trials and not stopped:
        explain(process, seen, lambda what: None)
    else:
        seen.broken = broken_rules(seen)
    return seen


@contextlib.contextmanager
def _ctrl_c() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed: a KeyboardInterrupt raised while Python collects garbage is lost."""
    pressed = False

    def handler(number: int, frame: object) -> None:
        nonlocal pressed
        pressed = True
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _task(process: Process, domain: Domain, limits: Limits, effort: Effort, seed: int) -> dict[str, Any]:
    return {
        "target": process.target, "contract": asdict(process.contract), "domain": asdict(domain),
        "timeout": limits.timeout, "memory": limits.nbytes, "folder": process.folder, "seed": seed,
        "database": str(effort.database), "examples": effort.share, "seconds": effort.seconds,
    }  # fmt: skip


def as_examination(found: Search, jobs: Jobs) -> Examination:
    """A search's failures and some of what passed, to be shown as what `verify` saw."""
    seen = Examination(found.contract, found.domain, trials=[*found.failures, *found.passed])
    seen.declined = found.declined + jobs.total("declined")
    seen.problems = found.judged + jobs.total("judged") + seen.declined
    seen.all_calls = found.calls + jobs.total("calls")
    return seen


@contextlib.contextmanager
def _progress(console: Console, jobs: Jobs, effort: Effort) -> Iterator[Callable[[Search], None]]:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    began = time.monotonic()
    last = 0.0
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("importing the target", total=None)

        def progress(now: Search) -> None:
            nonlocal last
            if time.monotonic() - last < 0.1:
                return
            last = time.monotonic()
            count = now.judged + now.declined + jobs.total("judged") + jobs.total("declined")
            rate = count / max(last - began, 1e-3)
            what = "making the failure small" if now.failure is not None else "none wrong so far"
            many = f" in {effort.jobs} jobs" if effort.jobs > 1 else ""
            limit = f" of {effort.minutes:g} min" if effort.minutes is not None else ""
            bar.update(task, description=f"{count:,} problems{many}, {rate:.0f} a second, {what}{limit}")

        yield progress
