"""Why a target fails: whether it always does, and the domains in which it does not, both tried again.

A fault that depends on the number of the call, or on chance, would make an excuse of any domain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ropegrad.verify.battery import size
from ropegrad.verify.domain import Domain, excuses, fitted
from ropegrad.verify.recipe import Recipe
from ropegrad.verify.runner import Runner
from ropegrad.verify.trial import Trial, attempt

AGAIN = 3  # times
FEW = 3  # problems that are put again, on either side
SLOW = ("hung", "crashed")  # failures that are not asked for again


def unsteady(runner: Runner, trials: Iterable[Trial]) -> set[Recipe]:
    """Of the smallest problems with each fault, those that a target gets right when they are put again."""
    smallest: dict[str, Recipe] = {}
    for trial in sorted(trials, key=lambda trial: size(trial.recipe)):
        for fault in trial.faults:
            if trial.status == "wrong" and fault.rule not in SLOW:
                smallest.setdefault(fault.rule, trial.recipe)
    return {recipe for recipe in smallest.values() for _ in range(AGAIN) if not _fails(runner, recipe)}


def excused(
    runner: Runner, domain: Domain, trials: Iterable[Trial], progress: Callable[[str], None]
) -> list[str]:
    """Options that leave all failures out: a few problems outside fail again and again, inside none does."""
    trials = list(trials)
    failures = sorted((trial for trial in trials if trial.faults), key=lambda trial: size(trial.recipe))
    failed = [trial.recipe for trial in failures]
    passed = sorted((trial.recipe for trial in trials if not trial.faults), key=size)
    offers = excuses(domain, failed, passed) if failed else []
    if not offers:
        return []
    again = [trial.recipe for trial in failures if not any(f.rule in SLOW for f in trial.faults)][:FEW]
    for _ in range(AGAIN):
        progress("what would excuse it, again")
        if not all(_fails(runner, recipe) for recipe in again):
            return []
        offers = [offer for offer in offers if _holds(runner, offer, again, passed)]
    return [str(offer.outside(failed[0])) for offer in offers]


def _holds(runner: Runner, offer: Domain, failed: list[Recipe], passed: list[Recipe]) -> bool:
    """Whether nothing fails in a domain: neither failures brought into it nor what passed there."""
    return not any(_fails(runner, one) for one in (*_moved(runner, offer, failed), *_inside(offer, passed)))


def _moved(runner: Runner, offer: Domain, failed: list[Recipe]) -> list[Recipe]:
    """Failures with as little changed as brings them into a domain: they must not fail there."""
    moved = [fitted(recipe, runner.contract, offer, turn) for turn, recipe in enumerate(failed)]
    return [recipe for recipe in moved if offer.outside(recipe) is None]


def _inside(offer: Domain, passed: list[Recipe]) -> list[Recipe]:
    """A few problems that lie in a domain: of all sizes."""
    inside = [recipe for recipe in passed if offer.outside(recipe) is None]
    return inside[:: max(len(inside) // FEW, 1)][:FEW]


def _fails(runner: Runner, recipe: Recipe) -> bool:
    return bool(attempt(runner, recipe, stop=True).faults)
