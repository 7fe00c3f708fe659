"""Every planted fault breaks its rule, and its diagnosis names it; right kernels break none."""

import pytest
import qkv_faults  # noqa: F401  plants
import rope_faults  # noqa: F401  plants
from planting import PLANTED
from right_kernels import RIGHT

from ropegrad.verify.assertion import sentences
from ropegrad.verify.battery import battery
from ropegrad.verify.examine import Examination, broken_rules, examine
from ropegrad.verify.fuzz import search
from ropegrad.verify.observed import contract_lines
from ropegrad.verify.runner import Here
from ropegrad.verify.trial import attempt

ENOUGH = 12  # problems that went wrong: more would only say the same


def judged(fault):
    """The rules that the function breaks, from the smallest problems on until enough went wrong."""
    seen = Examination(fault.contract, fault.domain)
    runner = Here(fault.function, fault.contract)
    for recipe in battery(fault.contract, fault.domain):
        seen.trials.append(attempt(runner, recipe))
        if sum(trial.status == "wrong" for trial in seen.trials) == ENOUGH:
            break
    return broken_rules(seen)


@pytest.mark.parametrize("fault", PLANTED, ids=lambda fault: fault.name)
def test_a_planted_fault_gets_its_rule_and_its_name(fault):
    broken = judged(fault)
    said = [sentence for one in broken for f in one.faults for sentence in (*f.names, f.message)]
    assert fault.rule in {one.rule for one in broken}, [(one.rule, one.faults) for one in broken]
    if fault.words:
        assert any(
            words in sentence for words in fault.words for sentence in [*said, *(b.rule for b in broken)]
        ), said


def test_there_are_enough():
    assert len(PLANTED) >= 60
    assert len({fault.name for fault in PLANTED}) == len(PLANTED)
    assert len(RIGHT) >= 20


@pytest.mark.parametrize(
    ("function", "contract", "domain", "words"), RIGHT, ids=lambda x: getattr(x, "__name__", "")
)
def test_no_false_alarm(function, contract, domain, words, request):
    long = request.config.getoption("long")
    recipes = battery(contract, domain)
    seen = examine(
        Here(function, contract), recipes if long or words else recipes[::3], domain, lambda what: None
    )
    assert seen.status == 0, sentences(seen)
    said = [text for _, text in contract_lines(seen)]
    assert all(any(word in text for text in said) for word in words), said
    found = search(
        Here(function, contract), domain, examples=10_000 if long else 20, start=None if long else 0
    )
    assert found.status == 0, (found.failure.recipe, found.failure.faults)
