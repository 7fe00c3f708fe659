"""Every planted fault breaks its rule, and its diagnosis names it; right kernels break none."""

from types import SimpleNamespace

import pytest
import qkv_faults  # noqa: F401  plants
import rope_faults  # noqa: F401  plants
from hypothesis import given
from hypothesis import strategies as st
from kernels import qkv_backward, rope_backward
from planting import PLANTED
from right_kernels import RIGHT

from ropegrad.verify.assertion import sentences
from ropegrad.verify.battery import battery
from ropegrad.verify.domain import Domain
from ropegrad.verify.examine import VALUES, Examination, _shadows, broken_rules, examine
from ropegrad.verify.fuzz import search
from ropegrad.verify.observed import contract_lines
from ropegrad.verify.recipe import Recipe
from ropegrad.verify.ruling import Fault
from ropegrad.verify.runner import Here
from ropegrad.verify.target import Contract
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


@pytest.mark.parametrize("tile", [16, 64, 128])
@pytest.mark.parametrize("outputs", [(0, 1), (0, 1, 2, 3)])
def test_a_kernel_that_leaves_its_last_tile_zero_is_wrong(tile, outputs):
    """In most small problems its gradients are zero, in few large ones they are partly wrong."""

    def backward(*arrays):
        found = list(rope_backward(*arrays))
        for i in outputs:
            tokens = found[i].shape[-2]
            found[i][..., tokens // tile * tile :, :] = 0
        return tuple(found)

    seen = examine(Here(backward, Contract()), battery(Contract(), Domain()), Domain(), lambda what: None)
    assert seen.status == 1
    assert "wrong value" in {one.rule for one in seen.broken}


@pytest.mark.parametrize("wrong_from", [300, 1000, 4000])
def test_a_kernel_that_is_wrong_for_many_tokens_is_wrong(wrong_from):
    def backward(*arrays):
        found = rope_backward(*arrays)
        found[2][:, wrong_from:] = 0
        return found

    seen = examine(Here(backward, Contract()), battery(Contract(), Domain()), Domain(), lambda what: None)
    assert seen.status == 1


VALUES_SEEN = st.sampled_from((*VALUES, "stale output"))


@given(st.lists(st.lists(VALUES_SEEN, min_size=1), min_size=1, max_size=60))
def test_no_explanation_hides_all_that_is_wrong(rules):
    trials = [SimpleNamespace(faults=[Fault(rule, "grad_q", "") for rule in some]) for some in rules]
    shadows = _shadows(trials)
    assert any((fault.rule, fault.array) not in shadows for trial in trials for fault in trial.faults)


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


def test_a_nan_in_a_table_is_no_loss_of_precision():
    """Sums of 288 products and 4,096 results: enough for the precision gate, which is for finite numbers."""
    contract = Contract(op="qkv")
    sizes = {"batch": 1, "heads": 1, "kv_heads": 1, "seq": 64, "head_dim": 96, "rotary_dim": 96}
    spec = contract.spec(**sizes, hidden_size=64)
    for seed in range(4):
        trial = attempt(Here(qkv_backward, contract), Recipe(spec, seed, "normal", "nonfinite"))
        assert not trial.faults
