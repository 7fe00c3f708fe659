"""All trials of a target put together: which rules it broke and where, and what its contract is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from ropegrad.spec import RopeSpec
from ropegrad.verify.battery import size
from ropegrad.verify.case import Case, NumpyArray
from ropegrad.verify.confusions import CONFUSIONS
from ropegrad.verify.diagnosis import Diagnosis, diagnose, is_small
from ropegrad.verify.domain import Domain, doubts
from ropegrad.verify.excusing import excused, unsteady
from ropegrad.verify.properties import property_faults
from ropegrad.verify.recipe import Recipe
from ropegrad.verify.ruling import DIGITS, FLUSHES, LOW, MISSING, ROUNDS, RULES, SPARE, WRONG, Fault
from ropegrad.verify.runner import Runner
from ropegrad.verify.target import Contract
from ropegrad.verify.trial import Trial, attempt

HANGS, CRASHES = 2, 10  # as many are enough to know
UNSTEADY = "not every time: the same problem was right when it was put again"
INTERRUPTED = 130  # the exit status of programs that SIGINT ends


@dataclass
class Broken:
    """A rule that was broken: in how many cases, the smallest of them, what would excuse it.

    steady: the smallest did not come out right when it was put to the target again.
    """

    rule: str
    cases: int
    recipe: Recipe
    faults: list[Fault]
    excuses: list[str] = field(default_factory=list)
    steady: bool = True


@dataclass
class Examination:
    """What is known of a target after all trials.

    outside    problems outside its domain; tables: a problem for each shape of tables it does not promise
    not_run    problems that were left out after too many hangs or crashes
    problems   how many were put to it; all_calls: how often it was called; declined: how many it declined
    excuses    options that leave all failures out; unsteady: failures that were right when put again
    interrupted  the user ended it before its time: that nothing was found says little
    """

    contract: Contract
    domain: Domain
    trials: list[Trial] = field(default_factory=list)
    outside: list[Trial] = field(default_factory=list)
    tables: dict[str, Trial] = field(default_factory=dict)
    not_run: int = 0
    problems: int = 0
    all_calls: int = 0
    declined: int = 0
    interrupted: bool = False
    excuses: list[str] = field(default_factory=list)
    unsteady: set[Recipe] = field(default_factory=set)
    broken: list[Broken] = field(default_factory=list)

    @property
    def allowance(self) -> tuple[str, ...]:
        """What its arithmetic does and may do, as seen where it was right."""
        facts = set().union(*(trial.contract for trial in self.trials if trial.status == "right"))
        return tuple(word for word in (FLUSHES, ROUNDS) if word in facts)

    @property
    def status(self) -> int:
        """0 right, 1 wrong, 2 not judged: it declined everything, 130 interrupted, nothing wrong so far."""
        judged = [trial for trial in self.trials if trial.status != "declined"]
        if judged and (self.broken or any(trial.faults for trial in judged)):
            return 1
        return INTERRUPTED if self.interrupted else 0 if judged else 2


Progress = Callable[[str], None]


def examine(
    runner: Runner,
    recipes: Iterable[Recipe],
    domain: Domain,
    progress: Progress,
    beyond: Iterable[Recipe] = (),
    properties: Iterable[Recipe] = (),
    tables: Mapping[str, Recipe] = MappingProxyType({}),
) -> Examination:
    """Put the problems to a target; `progress` is told each that is about to start.

    beyond: problems outside its domain; properties: problems on which properties are checked, without the
    oracle, of a target that the oracle finds right; so are `tables` put to it, by the shapes of tables that
    it does not promise to take.
    """
    seen = Examination(runner.contract, domain)
    for recipe in recipes:
        if _enough(seen.trials):
            seen.not_run += 1
            continue
        progress(recipe.name or str(recipe))
        seen.trials.append(attempt(runner, recipe))
    failed = sorted((trial.recipe for trial in seen.trials if trial.faults), key=size)
    passed = [trial.recipe for trial in seen.trials if trial.status == "right"]
    for recipe in doubts(runner.contract, domain, failed, passed):
        if not _enough(seen.trials):
            progress(recipe.name or str(recipe))
            seen.trials.append(attempt(runner, recipe))
    if not _enough(seen.trials) and not any(trial.faults for trial in seen.trials):
        for recipe in properties:
            progress(recipe.name)
            faults, calls = property_faults(runner, recipe, seen.allowance)
            trial = Trial(recipe, "wrong" if faults else "right", faults, calls=calls)
            seen.trials.append(trial)
    if not any(trial.faults for trial in seen.trials):
        for shape, recipe in tables.items():
            progress(recipe.name)
            seen.tables[shape] = attempt(runner, recipe, stop=True)
    if not _enough(seen.trials):  # last: there compiled code may write anywhere in its process
        for recipe in beyond:
            progress(f"outside the domain: {recipe.name or recipe}")
            seen.outside.append(attempt(runner, recipe, stop=True))
            if _enough(seen.outside):
                break
    everything = (*seen.trials, *seen.outside, *seen.tables.values())
    seen.problems, seen.all_calls = len(seen.trials), sum(trial.calls for trial in everything)
    seen.declined = sum(trial.status == "declined" for trial in seen.trials)
    explain(runner, seen, progress)
    return seen


def explain(runner: Runner, seen: Examination, progress: Progress) -> None:
    """Ask again whether what failed always fails, and what would excuse it; then name the broken rules."""
    if not _enough(seen.trials):
        seen.excuses = excused(runner, seen.domain, seen.trials, progress)
        seen.unsteady = unsteady(runner, seen.trials)
    seen.broken = broken_rules(seen)


def _enough(trials: list[Trial]) -> bool:
    rules = [fault.rule for trial in trials for fault in trial.faults]
    return rules.count("hung") >= HANGS or rules.count("crashed") >= CRASHES


def broken_rules(seen: Examination) -> list[Broken]:
    """The rules that were broken, each with its smallest case, diagnosed."""
    wrong = [trial for trial in seen.trials if trial.faults]
    _settle(wrong)
    _given(seen.trials)
    _recognise(wrong)
    shadows = _shadows(wrong)
    found = []
    for rule in RULES:
        trials = [trial for trial in wrong if any(_told(fault, rule, shadows) for fault in trial.faults)]
        if not trials or (rule == "declined" and len(trials) == len(seen.trials)):
            continue
        trials.sort(key=lambda trial: size(trial.recipe))
        faults = {f.array: f for t in reversed(trials) for f in t.faults if _told(f, rule, shadows)}
        smallest = [f for f in faults.values() if any(f is other for other in trials[0].faults)]
        named = [replace(fault, names=_names(trials, fault)) for fault in smallest or faults.values()]
        offers = _needs(seen.contract, named) if rule == MISSING else seen.excuses
        steady = trials[0].recipe not in seen.unsteady
        found.append(Broken(rule, len(trials), trials[0].recipe, named, offers, steady))
    return found


def _needs(contract: Contract, faults: list[Fault]) -> list[str]:
    """The gradients that a target does give, as an option."""
    missing = {fault.array for fault in faults}
    given = [need for need in contract.wanted if f"grad_{need}" not in missing]
    return [f"--needs {','.join(given)}"] if given else []


def _settle(trials: list[Trial]) -> None:
    """One rule for an output whose values are off: few elements of a small problem do not tell which."""
    faults: dict[str, list[Fault]] = {}
    for trial in trials:
        for fault in trial.faults:
            if fault.rule in (WRONG, LOW) and fault.share[1]:
                faults.setdefault(fault.array, []).append(fault)
    rules = {}
    for array, alike in faults.items():
        wrong, size_ = (sum(fault.share[i] for fault in alike) for i in (0, 1))
        rounding = 4 * sum(bool(fault.low) for fault in alike) >= 3 * len(alike) and 4 * wrong >= size_
        rules[array] = LOW if rounding else WRONG
    for trial in trials:
        trial.faults = [
            replace(f, rule=rules[f.array]) if f.rule in (WRONG, LOW) and f.array in rules else f
            for f in trial.faults
        ]


def _given(trials: list[Trial]) -> None:
    """A gradient that is all zero in some problems and given in others is not missing, but wrong in those."""
    given = set().union(*(trial.given for trial in trials))
    for trial in trials:
        trial.faults = [
            replace(f, rule=WRONG) if f.rule == MISSING and f.share[1] and f.array in given else f
            for f in trial.faults
        ]


# Formulas with errors of any size: who computes one of them does not merely round too much.
FORMULAS = frozenset(words for words, _ in CONFUSIONS if "rounded to" not in words)


def _recognise(trials: list[Trial]) -> None:
    """A known wrong formula is a wrong value, however much its errors look like rounding in a long sum."""
    for array in {f.array for trial in trials for f in trial.faults if f.rule == LOW and f.share[1]}:
        ordered = sorted(trials, key=lambda trial: size(trial.recipe))
        if not FORMULAS.isdisjoint(_diagnosis(ordered, Fault(LOW, array, "")).formulas):
            for trial in trials:
                trial.faults = [
                    replace(f, rule=WRONG) if (f.rule, f.array) == (LOW, array) else f for f in trial.faults
                ]


# Rules about values. A wrong formula breaks several: a NaN where data overflow is then no fault of its own.
VALUES = ("wrong value", "below the promised precision", "missing gradient", "unjustified NaN or Inf",
          "hidden NaN or Inf", "depends on strides or alignment", "output not (fully) written")  # fmt: skip
EXPLAINED = {"missing gradient": (WRONG,), WRONG: ("stale output",)}  # rules by what they may look like
SHADOW = 4  # a rule that an output breaks so many times less often than another one is that one's shadow


def _shadows(trials: list[Trial]) -> set[tuple[str, str]]:
    """(rule, array) of values that another rule explains."""
    counts: dict[str, Counter[str]] = {}
    for trial in trials:
        for fault in trial.faults:
            if fault.rule in VALUES or fault.rule == "stale output":
                counts.setdefault(fault.array, Counter())[fault.rule] += 1
    shadows = set()
    for array, rules in counts.items():
        explained = {rule for rule in rules if any(rules[other] for other in EXPLAINED.get(rule, ()))}
        most = max(count for rule, count in rules.items() if rule not in explained)
        shadows |= {
            (rule, array) for rule, count in rules.items() if rule in explained or count * SHADOW < most
        }
    return shadows  # of every output at least one rule is left: no explanation is explained in a circle


def _told(fault: Fault, rule: str, shadows: set[tuple[str, str]]) -> bool:
    return fault.rule == rule and (rule, fault.array) not in shadows


# Rules that say what is wrong by themselves, but not where.
PLACED = ("output not (fully) written", "depends on strides or alignment", "stale output")


def _names(trials: list[Trial], fault: Fault) -> tuple[str, ...]:
    """The diagnosis that fits all of a few problems with this fault."""
    found = _diagnosis(trials, fault)
    formulas = fault.rule == WRONG or (fault.rule == LOW and isinstance(trials[0].recipe.spec, RopeSpec))
    if not formulas and fault.rule not in PLACED:
        found = Diagnosis({}, [])
    elif not formulas:
        found = replace(found, formulas={})
    return (*found.words, *(_accuracy(trials, fault.array) if fault.rule == LOW else ()))


def _accuracy(trials: list[Trial], array: str) -> tuple[str, ...]:
    """What arithmetic this output is as accurate as, if nearly all ordinary problems say so."""
    ordinary = [
        fault for trial in trials for fault in trial.faults
        if (fault.rule, fault.array) == (LOW, array) and fault.share[1] >= TELLING
        and (trial.recipe.values, trial.recipe.tables) == ("normal", "normal")
    ]  # fmt: skip
    said = Counter(f.low for f in ordinary if f.low and f.bits <= DIGITS[f.low] + SPARE)
    return tuple(f"is as accurate as {low}" for low, count in said.items() if 4 * count >= 3 * len(ordinary))


TELLING = 64  # elements whose errors together tell an accuracy


def _diagnosis(trials: list[Trial], fault: Fault) -> Diagnosis:
    """What fits all of a few problems with this fault, rich ones among them."""
    alike = [
        trial for trial in trials
        if any((f.rule, f.array) == (fault.rule, fault.array) for f in trial.faults)
        and fault.array in trial.got and trial.recipe.values in ("normal", "coded", "reciprocal", "small")
        and is_small(trial.got[fault.array][0])
    ]  # fmt: skip
    rich = sorted(alike, key=lambda trial: (trial.recipe.rope.kv_heads or 0, trial.recipe.rope.seq))
    chosen = {id(trial): trial for trial in (*alike[:1], *alike[len(alike) // 2 :][:2], *rich[-2:])}
    return diagnose(_evidence(trial, fault.array) for trial in chosen.values())


def _evidence(trial: Trial, array: str) -> tuple[Case, str, NumpyArray]:
    case, got = trial.got[array]
    return case, array, got
