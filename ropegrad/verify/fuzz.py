"""Looking for a problem that a target gets wrong: Hypothesis draws and shrinks, `trial` judges."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis.database import DirectoryBasedExampleDatabase, ExampleDatabase
from hypothesis.errors import Flaky

from ropegrad.verify.battery import size
from ropegrad.verify.domain import Domain
from ropegrad.verify.recipe import Recipe
from ropegrad.verify.runner import Runner
from ropegrad.verify.strategies import recipes
from ropegrad.verify.target import Contract
from ropegrad.verify.trial import Trial, attempt

ROUND = 1000  # examples of one Hypothesis run; a longer search is several, which keeps its memory small
SHRINK = 30.0  # seconds for making a failure small
SLOW = ("hung", "crashed")
SLOW_SHRINKS = 12  # problems tried after one that hung or crashed: each costs a new process


class Found(Exception):
    """The target broke a rule."""


class Stop(BaseException):
    """The end of a search: no Exception, so that Hypothesis does not take it for a failure."""


@dataclass
class Search:
    """What was found: the smallest failure, and all trials' counts.

    judged    problems that were judged; declined are counted apart
    passed    some of those that passed, for the contract
    """

    contract: Contract
    domain: Domain
    judged: int = 0
    declined: int = 0
    calls: int = 0
    seconds: float = 0.0
    failure: Trial | None = None
    failures: list[Trial] = field(default_factory=list)
    passed: list[Trial] = field(default_factory=list)

    @property
    def status(self) -> int:
        """0 nothing found, 1 wrong, 2 could not be judged."""
        if self.failure is not None:
            return 1
        return 0 if self.judged else 2


KEPT = 400  # trials kept for excuses and the contract


def database(folder: Path, target: str, contract: Contract) -> ExampleDatabase:
    """Where failures of a target are kept, for the next run to try first; the folder may be shared."""
    return DirectoryBasedExampleDatabase(folder / slug(target, contract))


def slug(target: str, contract: Contract) -> str:
    """A name for files about a target under a contract."""
    return f"ropegrad-{hashlib.sha256(f'{target} {contract}'.encode()).hexdigest()[:12]}"


def search(
    runner: Runner, domain: Domain, *, examples: int | None = None, seconds: float | None = None,
    store: ExampleDatabase | None = None, start: int | None = None,
    progress: Callable[[Search], None] = lambda search: None,
) -> Search:  # fmt: skip
    """Try problems until one breaks a rule, so many were tried, or time is up; then shrink that one.

    start: the first seed, None for a new one each time. progress is called after every problem, and may raise
    Stop. A KeyboardInterrupt ends the search and is passed on; the caller's `progress` has seen all.
    """
    found = Search(runner.contract, domain)
    began = time.monotonic()
    deadline = None if seconds is None else began + seconds
    base = int.from_bytes(os.urandom(4)) if start is None else start
    turn = 0
    while found.failure is None and (examples is None or found.judged + found.declined < examples):
        if deadline is not None and time.monotonic() >= deadline:
            break
        left = ROUND if examples is None else examples - found.judged - found.declined
        before = found.judged + found.declined
        ended = _round(runner, found, min(left, ROUND), deadline, store, base + turn, progress)
        turn += 1
        if ended or found.judged + found.declined == before:  # or nothing new is left
            break
    found.seconds = time.monotonic() - began
    return found


def _round(
    runner: Runner, found: Search, examples: int, deadline: float | None, store: ExampleDatabase | None,
    number: int, progress: Callable[[Search], None],
) -> bool:  # fmt: skip
    """One Hypothesis run; whether the search ends with it."""
    shrinks = 0

    def body(recipe: Recipe) -> None:
        nonlocal deadline, shrinks
        if deadline is not None and time.monotonic() >= deadline:
            raise Stop
        trial = attempt(runner, recipe, stop=True)
        _count(found, trial)
        progress(found)
        shrinks += found.failure is not None
        if not trial.faults or trial.status == "declined":
            return
        if found.failure is None:
            deadline = time.monotonic() + SHRINK
        rule = trial.faults[0].rule
        if found.failure is None or (
            rule == found.failure.faults[0].rule and size(recipe) <= size(found.failure.recipe)
        ):
            found.failure = trial
        if rule in SLOW and shrinks >= SLOW_SHRINKS:
            raise Stop
        raise _kind(rule)

    phases = (Phase.reuse, Phase.generate, Phase.shrink)
    configured = settings(
        max_examples=examples, deadline=None, database=store, phases=phases, report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck), print_blob=False, derandomize=False,
        verbosity=Verbosity.quiet,
    )  # fmt: skip
    try:
        test = seed(number)(given(recipes(runner.contract, found.domain))(body))
        configured(test)()  # after the seed, which would take the database away
    except Stop:
        return True
    except (Found, Flaky):
        pass
    except BaseExceptionGroup as several:
        if not several.subgroup((Found, Flaky)):
            raise
    return False


@cache
def _kind(rule: str) -> type[Found]:
    """An exception type for each rule, so that shrinking does not slip from one to another."""
    return type(rule, (Found,), {})


def _count(found: Search, trial: Trial) -> None:
    found.calls += trial.calls
    if trial.status == "declined":
        found.declined += 1
        return
    found.judged += 1
    kept = found.failures if trial.faults else found.passed
    if len(kept) < KEPT:
        kept.append(trial)
