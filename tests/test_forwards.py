"""Differentiable forwards of PyTorch and JAX: their values, and the gradients that the framework gives."""

from dataclasses import replace

import numpy as np
import pytest
from conftest import need
from test_cli import run

import ropegrad
from ropegrad.verify import Contract, Domain, assert_gradients
from ropegrad.verify.assertion import sentences
from ropegrad.verify.battery import battery, property_recipes
from ropegrad.verify.calling import FORWARD_VALUES
from ropegrad.verify.examine import Examination, broken_rules, examine
from ropegrad.verify.forward import forward_standard
from ropegrad.verify.observed import contract_lines
from ropegrad.verify.recipe import Recipe
from ropegrad.verify.runner import Here
from ropegrad.verify.trial import attempt


def contracts(**words):
    return [Contract(op=op, of="forward", arrays="torch", **words) for op in ("rope", "qkv")]


@pytest.mark.parametrize("memory", ["contiguous", "mixed"])
@pytest.mark.parametrize("values", ["normal", "scales", "nonfinite", "zeros"])
@pytest.mark.parametrize(
    "contract",
    [
        *contracts(),
        *contracts(pairing="interleaved", table="half", layout="bshd"),
        *contracts(dtype="bfloat16"),
        *contracts(dtype="float64", table_dtype="float64", table_shape="sd", layout="sbhd"),
    ],
    ids=lambda c: f"{c.op} {c.dtype} {c.layout}",
)
def test_ropegrad_s_own_forward_is_inside_the_bounds(contract, values, memory):
    hidden = 12 if contract.op == "qkv" else None
    for rotary in (8, 4):
        spec = contract.spec(
            batch=2, heads=4, kv_heads=2, seq=5, head_dim=8, rotary_dim=rotary, hidden_size=hidden
        )
        case = Recipe(spec, 3, values, memory=memory).case()
        words = {"layout": contract.layout, "pairing": contract.pairing, "table": contract.table}
        arrays = [x for name, x in case.inputs.items() if not name.startswith("grad")]
        with np.errstate(all="ignore"):
            if contract.op == "rope":
                got = ropegrad.rope(*arrays, **words)
            else:
                got = ropegrad.qkv_rope(*arrays, head_dim=8, **words)
        rule = forward_standard(case)
        for name, y in zip(FORWARD_VALUES[contract.op], got, strict=True):
            assert rule.worst(name, y) <= 1, name
            nudged = y.copy()
            finite = np.argwhere(np.isfinite(y.astype(np.float64)) & (np.abs(y.astype(np.float64)) > 1e-3))
            if len(finite):
                nudged[tuple(finite[0])] *= y.dtype.type(1.02)
                assert rule.worst(name, nudged) > 1, name


# ---- targets -------------------------------------------------------------------------------------------

SMALL = Domain(max_tokens=5, head_dim=(2, 8))
FORWARD = Contract(of="forward", arrays="torch")


def messages(function, **words):
    """What assert_gradients says is wrong."""
    with pytest.raises(AssertionError) as raised:
        assert_gradients(function, **words)
    return str(raised.value)


@pytest.fixture(scope="module")
def kernels():
    need("torch", "interop")
    import torch_kernels

    return torch_kernels


def test_a_right_torch_forward_is_right(kernels):
    assert_gradients(kernels.rope, contract=FORWARD, domain=SMALL, examples=30)
    assert_gradients(kernels.Layer(), contract=replace(FORWARD, op="qkv"), domain=SMALL)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_eager_half_precision_is_a_contract_and_no_fault(kernels, dtype):
    contract = replace(FORWARD, dtype=dtype, table_dtype=dtype)
    more = property_recipes(contract, SMALL)
    runner = Here(kernels.rope, contract)
    seen = examine(runner, battery(contract, SMALL), SMALL, lambda what: None, properties=more)
    assert seen.status == 0, sentences(seen)
    assert ("rounding", "at every step") in contract_lines(seen)


def test_wrong_torch_forwards_are_named(kernels):
    said = messages(kernels.own_sine, contract=FORWARD, domain=SMALL)
    assert "diagnosis: grad_q: uses its own sine instead of its partner's" in said
    assert "missing gradient" in said
    assert "grad_cos is None" in said
    assert "no fault was seen inside the domain --needs q,k" in said
    assert "missing gradient" not in messages(
        kernels.own_sine, contract=replace(FORWARD, needs=("q", "k")), domain=SMALL
    )
    said = messages(kernels.detached, contract=FORWARD, domain=SMALL)
    assert "grad_q is None" in said
    assert "wrong value" not in said
    said = messages(kernels.wrong_values, contract=FORWARD, domain=SMALL)
    assert "q_embed is" in said
    said = messages(kernels.in_place, contract=replace(FORWARD, needs=("q", "k")), domain=SMALL)
    assert "input mutated" in said
    assert "grad_q_embed" in said


def test_torch_backward_functions(kernels):
    contract = Contract(arrays="torch")
    assert_gradients(kernels.backward, contract=contract, domain=SMALL)
    assert_gradients(kernels.negative_bit, contract=contract, domain=SMALL)
    assert "input mutated" in messages(kernels.overwrites, contract=contract, domain=SMALL)
    said = messages(kernels.two_buffers_in_turn, contract=contract, domain=SMALL)
    assert "overwritten by a later call" in said
    assert "overwritten by a later call" in messages(kernels.static_buffer, contract=FORWARD, domain=SMALL)
    assert "not an array of torch" in messages(kernels.numpy_results, contract=contract, domain=SMALL)


def test_a_torch_module_in_a_process_of_its_own(kernels, monkeypatch, capsys):
    target = f"{kernels.__file__}:Layer"
    options = ("--op", "qkv", "--of", "forward", "--arrays", "torch", "--max-tokens", "2")
    assert run("verify", target, *options, monkeypatch=monkeypatch) == 0
    assert "qkv forward; torch float32 on cpu" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("shape", ["bsd", "1sd"])
def test_the_rotation_of_transformers(shape):
    need("torch", "interop")
    model = need("transformers.models.llama.modeling_llama", "interop")
    contract = replace(FORWARD, table_shape=shape)
    assert_gradients(model.apply_rotary_pos_emb, contract=contract, domain=SMALL, examples=10)


def test_jax_forwards():
    need("jax", "interop")
    import jax_kernels

    contract = Contract(of="forward", arrays="jax")
    spec = contract.spec(batch=2, heads=4, kv_heads=2, seq=3, head_dim=8, rotary_dim=8)
    for values, words in (("coded", set()), ("subnormal", {"flushes subnormals"})):
        trial = attempt(Here(jax_kernels.rope, contract), Recipe(spec, 1, values))
        assert not trial.faults
        assert trial.contract >= words
    seen = Examination(contract, Domain())
    seen.trials = [attempt(Here(jax_kernels.wrong_way, contract), Recipe(spec, seed)) for seed in (1, 2)]
    (broken,) = broken_rules(seen)
    assert {fault.array for fault in broken.faults} == {"grad_q", "grad_k"}
    assert all("is the forward formula g·cos + rotate(g)·sin" in fault.names for fault in broken.faults)
