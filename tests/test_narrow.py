"""Operands that their rounding makes Inf: right where `high` or `medium` is promised, and only there."""

import numpy as np
import pytest
from kernels import qkv_backward

from ropegrad.verify.recipe import Recipe
from ropegrad.verify.runner import Here
from ropegrad.verify.target import Contract
from ropegrad.verify.trial import attempt

LARGE = {"highest": 3.4028e38, "high": 3.4022e38, "medium": 3.3965e38}  # Inf at so many bits, not in float32
BELOW = {"high": 3.401e38, "medium": 3.38e38}  # rounds to a finite operand


def faults(precision, value):
    """Rules that a product breaks which makes Inf of a factor, put to one token and one hidden channel."""
    contract = Contract(op="qkv", precision=precision)
    spec = contract.spec(batch=1, heads=1, kv_heads=1, seq=1, head_dim=2, rotary_dim=2, hidden_size=1)
    case = Recipe(spec, 1).case()
    inputs = dict(case.inputs) | {
        name: np.full_like(case.inputs[name], 0.25)
        for name in ("hidden_states", "q_weight", "k_weight", "v_weight")
    }
    inputs["grad_value"] = np.full_like(inputs["grad_value"], value)

    def backward(*arrays):
        hidden, q, k, v = qkv_backward(*arrays)
        return hidden + np.float32(np.inf), q, k, v + np.float32(np.inf)

    class Made(Recipe):
        def case(self, other=0):
            return type(case)("made", spec, inputs)

    return {(f.rule, f.array) for f in attempt(Here(backward, contract), Made(spec)).faults}


@pytest.mark.parametrize("precision", LARGE)
def test_inf_is_right_where_the_promise_allows_it(precision):
    broken = {("unjustified NaN or Inf", name) for name in ("grad_hidden_states", "grad_v_weight")}
    assert faults(precision, LARGE[precision]) == (broken if precision == "highest" else set())
    if precision in BELOW:
        assert faults(precision, BELOW[precision]) == broken
