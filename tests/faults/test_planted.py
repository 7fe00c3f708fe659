"""Every planted fault breaks its rule, and its diagnosis names it; right kernels break none."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import qkv_faults  # noqa: F401  plants
import rope_faults  # noqa: F401  plants
from hypothesis import given
from hypothesis import strategies as st
from kernels import qkv_backward, rope_backward
from planting import PLANTED, Planted
from right_kernels import RIGHT

import ropegrad as rg
from ropegrad.verify.assertion import sentences
from ropegrad.verify.battery import battery, beyond, property_recipes, table_shapes
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


def named(function, rule="wrong value", contract=Contract()):  # noqa: B008
    """Everything that is said of a function that breaks a rule, and of no other."""
    (one,) = broken = judged(Planted(function, rule, (), contract))
    assert one.rule == rule, broken
    return "; ".join(sentence for fault in one.faults for sentence in (fault.message, *fault.names))


def scaled(place, factor):
    """A backward with a part of grad_q scaled."""

    def backward(*arrays):
        results = list(rope_backward(*arrays))
        with np.errstate(all="ignore"):
            results[0][place(results[0])] *= np.float32(factor)
        return results

    return backward


def test_what_must_not_be_finite_is_not_said_to_be_a_number():
    def backward(*arrays):
        return [np.where(np.isnan(x), np.float32(0), x) for x in rope_backward(*arrays)]

    broken = judged(Planted(backward, "hidden NaN or Inf", (), Contract()))
    said = [fault.message for one in broken if one.rule == "hidden NaN or Inf" for fault in one.faults]
    assert said
    assert all(", exactly NaN or Inf, at " in message for message in said)


def test_columns_in_the_order_of_the_other_pairing_are_recognised():
    """A cache of c0, c0, c1, c1 for pairs j, j + D/2, as models have it that mix two conventions."""

    def backward(gq, gk, q, k, cos, sin):
        cos, sin = (np.concatenate([t[..., ::2], t[..., 1::2]], axis=-1) for t in (cos, sin))
        return rope_backward(gq, gk, q, k, cos, sin)

    said = named(backward)
    assert said.count("reads the columns of the tables in the order of the other pairing") == 2
    interleaved = Contract(pairing="interleaved", needs=("q", "k"))

    def repeated(gq, gk, q, k, cos, sin):
        half = cos.shape[-1] // 2
        cos, sin = (np.stack([t[..., :half], t[..., half:]], axis=-1).reshape(t.shape) for t in (cos, sin))
        found = rg.rope_backward(gq, gk, q, k, cos, sin, pairing="interleaved", needs=("q", "k"))
        return found.grad_q, found.grad_k

    assert "in the order of the other pairing" in named(repeated, contract=interleaved)


@pytest.mark.parametrize(("second", "words"), [(1, "in each"), (0, "in the first, as of half tables")])
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_a_table_gradient_that_is_summed_over_a_pair_is_recognised(pairing, second, words):
    """As of a kernel that reads one column of each pair: its gradient is that of a half table."""

    def backward(*arrays):
        results = rg.rope_backward(*arrays, pairing=pairing)
        for table in results[2:]:
            half = table.shape[-1] // 2
            first, last = np.s_[..., :half], np.s_[..., half:]
            if pairing == "interleaved":
                first, last = np.s_[..., ::2], np.s_[..., 1::2]
            table[first] += table[last]
            table[last] = second * table[first]
        return results

    said = named(backward, contract=Contract(pairing=pairing))
    assert said.count(f"has the sum of a pair's two columns {words}") == 2


LAST_HEAD, FEW_OF_IT = (lambda x: np.s_[:, -1:]), (lambda x: np.s_[:, -1:, ::3, ::5])


def test_an_error_of_a_few_bounds_is_not_as_small_as_float16_s():
    said = named(scaled(lambda x: np.s_[:], 1 + 4e-7), "below the promised precision")
    assert "effective bits" in said
    assert "as accurate as" not in said


@pytest.mark.parametrize("place", [LAST_HEAD, FEW_OF_IT, lambda x: np.s_[..., ::7, 1:2]])
def test_a_small_error_in_a_part_is_a_wrong_value_and_no_precision(place):
    assert "as accurate as" not in named(scaled(place, 1 + 1e-4))


def test_a_place_is_named_only_if_all_of_it_is_wrong():
    assert "is wrong in the last head only" in named(scaled(LAST_HEAD, 1.5))
    said = named(scaled(FEW_OF_IT, 0))
    assert "where it is wrong, it is zero" in said
    assert "% of the elements in the last head, in none elsewhere" in said
    assert "in the last head only" not in said
    said = named(scaled(lambda x: np.s_[:, 1:, ::3, ::5], 1.5))
    assert "% of the elements in every head after the first, in none elsewhere" in said


def test_scattered_elements_have_no_place():
    def backward(*arrays):
        results = list(rope_backward(*arrays))
        flat = results[0].reshape(-1)
        flat[7::97] *= np.float32(1.5)
        return flat.reshape(results[0].shape), *results[1:]

    assert "is wrong in about 1 % of the elements" in named(backward)


@pytest.mark.parametrize("least", [1e-30, 1e-25])
def test_small_gradients_that_are_flushed_are_not_missing(least):
    def backward(*arrays):
        with np.errstate(all="ignore"):
            return [np.where(np.abs(x) < least, np.float32(0) * x, x) for x in rope_backward(*arrays)]

    assert "loses small though normal numbers" in named(backward)


def test_what_is_not_rotated_is_not_of_the_other_pairing():
    """v's gradients, in bfloat16 products: any pairing gives the same."""
    bfloat16 = next(one for one in PLANTED if one.name == "bfloat16_under_high")
    assert "pairing" not in str([fault.names for one in judged(bfloat16) for fault in one.faults])


@pytest.mark.parametrize(
    ("results", "words"),
    [
        (lambda h, q, k, v: (h, np.concatenate([q, k, v]), k, v), "that is of q, k and v packed in one"),
        (lambda h, q, k, v: (h, q.T, k, v), "the axes are in another order"),
        (lambda h, q, k, v: (h, h.copy(), k, v), "that is the shape of hidden_states"),
        (lambda h, q, k, v: (x for x in (h, q, k, v)), "the result is a generator, not a tuple of arrays"),
    ],
)
def test_results_of_another_form_are_named(results, words):
    recipe = Recipe(Contract(op="qkv").spec(batch=2, heads=4, kv_heads=2, seq=5, head_dim=8, rotary_dim=8,
                                            hidden_size=24))  # fmt: skip
    runner = Here(lambda *arrays: results(*qkv_backward(*arrays)), Contract(op="qkv"))
    (fault,) = attempt(runner, recipe).faults
    assert fault.rule == "wrong shape, dtype or device"
    assert words in fault.message


def test_a_target_that_takes_one_packed_weight_is_told_what_it_is_given():
    contract = Contract(op="qkv")
    recipe = Recipe(
        contract.spec(batch=1, heads=1, kv_heads=1, seq=1, head_dim=2, rotary_dim=2, hidden_size=1)
    )
    (fault,) = attempt(Here(lambda gq, gk, gv, x, qkv_weight, cos, sin: None, contract), recipe).faults
    assert "it is called with 9 arguments: grad_query, " in fault.message
    assert "weights are not packed in one" in fault.message


def every(number):
    """A backward that is wrong in every so manieth call."""
    count = itertools.count(1)

    def backward(*arrays):
        results = rope_backward(*arrays)
        results[0][...] *= np.float32(1.5 if next(count) % number == 0 else 1)
        return results

    return backward


@pytest.mark.parametrize("number", [7, 11, 13, 29, 31, 53])
def test_a_fault_that_comes_and_goes_has_no_excuse(number):
    seen = examine(
        Here(every(number), Contract()), battery(Contract(), Domain()), Domain(), lambda what: None
    )
    (one,) = seen.broken
    assert one.rule == "wrong value"
    assert not one.excuses
    assert not one.steady
    assert "not every time: the same problem was right when it was put again" in sentences(seen)


@pytest.mark.parametrize("number", [2, 3, 5])
def test_a_fault_that_comes_and_goes_is_not_laid_on_strides(number):
    runner = Here(every(number), Contract())
    spec = Contract().spec(batch=2, heads=4, kv_heads=2, seq=5, head_dim=8, rotary_dim=8)
    rules = {
        f.rule for seed in range(8) for f in attempt(runner, Recipe(spec, seed, memory="transposed")).faults
    }
    assert rules == {"wrong value"}


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


def test_problems_outside_the_domain_come_last():
    """Compiled code may write anywhere there, and all problems of a target share a process."""
    contract, domain, said = Contract(), Domain(), []
    examine(
        Here(rope_backward, contract), battery(contract, domain)[:2], domain, said.append,
        beyond(contract, domain), property_recipes(contract, domain), table_shapes(contract, domain),
    )  # fmt: skip
    outside = [what.startswith("outside the domain") for what in said]
    assert 0 < sum(outside) < len(said)
    assert outside == sorted(outside)


def test_repeated_elements_are_no_independent_draws():
    """Sums of 256 equal products err by more than a random walk does; every second draw here has some."""
    contract = Contract(op="qkv")
    sizes = {"batch": 4, "heads": 3, "kv_heads": 3, "seq": 64, "head_dim": 8, "rotary_dim": 8}
    spec = contract.spec(**sizes, hidden_size=200)
    for seed in range(6):
        trial = attempt(Here(qkv_backward, contract), Recipe(spec, seed, memory="expanded"))
        assert not trial.faults


def test_a_nan_in_a_table_is_no_loss_of_precision():
    """Sums of 288 products and 4,096 results: enough for the precision gate, which is for finite numbers."""
    contract = Contract(op="qkv")
    sizes = {"batch": 1, "heads": 1, "kv_heads": 1, "seq": 64, "head_dim": 96, "rotary_dim": 96}
    spec = contract.spec(**sizes, hidden_size=64)
    for seed in range(4):
        trial = attempt(Here(qkv_backward, contract), Recipe(spec, seed, "normal", "nonfinite"))
        assert not trial.faults
