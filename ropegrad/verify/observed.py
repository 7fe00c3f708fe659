"""The contract that a right target turned out to have: what is legal, but worth knowing."""

from __future__ import annotations

import math

from ropegrad.verify.domain import EQUAL, is_empty
from ropegrad.verify.examine import Examination
from ropegrad.verify.ruling import FLUSHES, ROUNDS
from ropegrad.verify.target import SHAPES
from ropegrad.verify.trial import NOT_REPEATABLE, Trial

LOUD = ("raised", "crashed", "hung")


def contract_lines(seen: Examination) -> list[tuple[str, str]]:
    """What is legal but worth knowing, as (what, what was seen)."""
    right = [trial for trial in seen.trials if trial.status == "right"]
    if not right:
        return []
    facts = set().union(*(trial.contract for trial in right))
    unequal = [t for t in seen.trials if t.recipe.tables not in EQUAL and t.recipe.rope.table == "full"]
    lines = [
        ("repeatable", "no: bits differ between equal calls" if NOT_REPEATABLE in facts else "bit for bit"),
        ("gradients of tables", _tables_given(seen)),
        ("columns of tables", _columns(seen, unequal)),
        ("shapes of tables", _shapes(seen)),
        ("subnormal numbers", _subnormals(right, facts)),
        ("rounding", "at every step" if ROUNDS in facts else "once, at the end, as far as can be seen"),
        ("effective bits", _bits(right)),
        ("empty arrays", _empty(seen)),
    ]
    if seen.outside:
        counts = {s: sum(t.status == s for t in seen.outside) for s in ("right", "declined")}
        loud = sum(t.status == "wrong" and t.faults[-1].rule in LOUD for t in seen.outside)
        silent = len(seen.outside) - counts["right"] - counts["declined"] - loud
        text = (
            f"{counts['right']} right, {counts['declined']} declined, {loud} raised, {silent} silently wrong"
        )
        lines.append(("outside its domain", f"{len(seen.outside)} cases: {text}"))
    return [(what, text) for what, text in lines if text]


def _tables_given(seen: Examination) -> str:
    if seen.contract.op == "qkv":
        return ""
    return "yes" if {"cos", "sin"} & set(seen.contract.wanted) else "not asked for"


def _shapes(seen: Examination) -> str:
    """What became of the shapes that the contract does not promise: not one of them is a fault."""
    said = [f"[{SHAPES[seen.contract.table_shape]}] in all problems"]
    for shape, trial in seen.tables.items():
        fate = trial.status
        if fate == "wrong":
            fault = trial.faults[0]
            fate = fault.rule if fault.rule in LOUD else f"silently wrong ({fault.rule})"
        said.append(f"[{SHAPES[shape]}] {fate}")
    return "; ".join(said)


def _columns(seen: Examination, unequal: list[Trial]) -> str:
    if seen.contract.table == "half":
        return "half tables, one column a pair"
    if not unequal:
        return "not known: the domain has equal columns in a pair only"
    right = sum(trial.status == "right" for trial in unequal)
    if right == len(unequal):
        return "both of a pair are read"
    return f"{len(unequal) - right} of {len(unequal)} cases with unequal columns in a pair go wrong"


def _subnormals(right: list[Trial], facts: set[str]) -> str:
    if FLUSHES in facts:
        return "flushed to zero"
    return "kept" if any(trial.recipe.values == "subnormal" for trial in right) else ""


def _bits(right: list[Trial]) -> str:
    least: dict[str, float] = {}
    for trial in right:
        for name, bits in trial.bits.items():
            if math.isfinite(bits):
                least[name] = min(bits, least.get(name, math.inf))
    return ", ".join(f"{name.removeprefix('grad_')} {bits:.1f}" for name, bits in least.items())


def _empty(seen: Examination) -> str:
    trials = [trial for trial in seen.trials if is_empty(trial.recipe)]
    if not trials:
        return "not asked for"
    right = sum(trial.status == "right" for trial in trials)
    return "accepted" if right == len(trials) else f"{right} of {len(trials)} accepted"
