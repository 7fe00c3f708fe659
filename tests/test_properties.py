"""Properties of a bilinear map's gradients that need no oracle: right functions keep them, wrong ones not."""

import kernels
import numpy as np
import pytest

import ropegrad
from ropegrad.verify import Contract, Domain
from ropegrad.verify.battery import property_recipes
from ropegrad.verify.properties import property_faults
from ropegrad.verify.runner import Here

ROPE, QKV = Contract(), Contract(op="qkv")


def broken(function, contract=ROPE, domain=Domain()):  # noqa: B008  frozen
    """The properties that a function breaks, and the outputs."""
    found = set()
    for recipe in property_recipes(contract, domain):
        faults, calls = property_faults(Here(function, contract), recipe)
        assert calls
        found |= {(fault.message.partition(":")[0], fault.array) for fault in faults}
    return found


@pytest.mark.parametrize(
    ("function", "contract"),
    [
        (kernels.rope_backward, ROPE),
        (kernels.qkv_backward, QKV),
        (ropegrad.rope_backward, ROPE),
        (lambda *a: ropegrad.rope_backward(*a, layout="sbhd", pairing="interleaved", table="half"),
         Contract(layout="sbhd", pairing="interleaved", table="half")),
        (lambda *a: ropegrad.rope_backward(*a), Contract(dtype="float64", table_dtype="float64")),
        (lambda *a: ropegrad.qkv_rope_backward(*a, layout="bshd"), Contract(op="qkv", layout="bshd")),
    ],
)  # fmt: skip
def test_right_functions_keep_them(function, contract):
    assert broken(function, contract) == set()


def test_channels_that_pass_through():
    assert broken(ropegrad.rope_backward, domain=Domain(rotary="any")) == set()


def changed(change, right=kernels.rope_backward):
    def function(*arrays):
        results = [np.array(x) for x in right(*arrays)]
        change(results, *arrays)
        return results

    return function


ADJOINT, LINEAR = "adjoint identity <g, f(v)> = <f*(g), v>", "linear in the upstream gradients"


def test_wrong_formulas_break_the_adjoint_identity():
    assert broken(kernels.own_sine) >= {(ADJOINT, "grad_q"), (ADJOINT, "grad_k")}
    half = changed(lambda results, *arrays: results[3].__imul__(np.float32(0.5)))
    assert broken(half) == {(ADJOINT, "grad_cos and grad_sin")}
    value = changed(lambda results, *arrays: results[3].__imul__(np.float32(0.5)), kernels.qkv_backward)
    assert broken(value, QKV) == {(ADJOINT, "grad_v_weight")}


def test_what_depends_on_more_than_it_should_is_seen():
    constant = changed(lambda results, *arrays: results[0].__iadd__(np.float32(1)))
    assert (LINEAR, "grad_q") in broken(constant)
    by_head = changed(lambda results, *arrays: results[1][:, 1:].__iadd__(results[1][:, :1]))
    assert ("heads in reverse order", "grad_k") in broken(by_head)
    by_batch = changed(lambda results, *arrays: results[2][1:].__iadd__(results[2][:1]))
    assert ("batches in reverse order", "grad_cos") in broken(by_batch)


def test_no_answer_is_no_proof():
    assert broken(kernels.raises) == {("a call gave no results where another of the same sizes did", "")}
