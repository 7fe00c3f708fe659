"""Bytes and operations: the closed forms for the 32 suite cases, and what is counted on real arrays."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ropegrad as rg
from ropegrad.arrays import numpy_dtype
from ropegrad.cost import qkv_cost, rope_cost
from ropegrad.suites import SUITES
from ropegrad.verify.draws import input_shapes
from ropegrad.verify.strategies import qkv_specs, rope_specs

ROPE, QKV = SUITES["rope"](), SUITES["qkv"]()


def test_the_suites_are_the_published_ones():
    assert len(ROPE) == len(QKV) == 16
    assert sum(spec.batch * spec.seq for spec in ROPE.values()) == 29_141
    assert sum(spec.tokens for spec in QKV.values()) == 55_824
    assert sum(rope_cost(spec).moved for spec in ROPE.values()) == 2_114_344_960
    assert sum(qkv_cost(spec).moved for spec in QKV.values()) == 2_018_783_232


@pytest.mark.parametrize("name", ROPE)
def test_rope_suite_moves_each_input_and_output_once(name):
    spec = ROPE[name]
    tokens, heads, dim = spec.batch * spec.seq, spec.heads + spec.kv_heads, 128
    cost = rope_cost(spec)
    assert cost.moved == (3 * heads + 4) * dim * 4 * tokens
    assert cost.written == (heads + 2) * dim * 4 * tokens
    assert (
        cost.flops == (3 + 2 * 2) * heads * dim * tokens
    )  # two products and a sum; twice a product and a sum


@pytest.mark.parametrize("name", QKV)
def test_qkv_suite_moves_each_input_and_output_once(name):
    spec = QKV[name]
    tokens, rows, dim, hidden = spec.tokens, (24 + 2 * 4) * 96, 96, 1536
    cost = qkv_cost(spec)
    assert cost.moved == 4 * (tokens * (rows + 2 * hidden + 2 * dim) + 2 * rows * hidden)
    assert cost.flops == 4 * tokens * rows * hidden
    assert type(cost.moved) is type(cost.flops) is int


# ---- counted ---------------------------------------------------------------------------------------------


def arrays(spec):
    """Zeros for every input of the spec."""
    return {name: np.zeros(shape, numpy_dtype(dtype)) for name, (shape, dtype) in input_shapes(spec).items()}


def written(spec):
    """Bytes of the outputs that the library makes."""
    x = arrays(spec)
    geometry = spec if isinstance(spec, rg.RopeSpec) else spec.rope
    words = {"table": geometry.table, "layout": geometry.layout, "pairing": geometry.pairing}
    if isinstance(spec, rg.RopeSpec):
        sides = {name: x.get(name) for name in ("grad_q_embed", "grad_k_embed", "q", "k")}
        results = rg.rope_backward(**x | sides, **words, needs=spec.needs)
    else:
        results = rg.qkv_rope_backward(**x, **words, needs=spec.needs)
    return sum(result.nbytes for result in results if result is not None)


def read_by_rope(spec):
    """Bytes of the inputs' elements in the formulas of the wanted gradients."""
    x, total = arrays(spec), 0
    tables = {"cos", "sin"} & set(spec.needs)
    for side in "qk":
        if side in spec.needs:
            total += x[f"grad_{side}_embed"].nbytes
        elif tables and f"grad_{side}_embed" in x:
            total += x[f"grad_{side}_embed"][..., : spec.rotary_dim].nbytes
        if tables and side in x:
            total += x[side][..., : spec.rotary_dim].nbytes
    if {"q", "k"} & set(spec.needs):
        total += x["cos"].nbytes + x["sin"].nbytes
    return total


def read_by_qkv(spec):
    """As `read_by_rope`: what each gradient reads, each input once."""
    reads = {
        "hidden_states": {"grad_query", "grad_key", "grad_value", "q_weight", "k_weight", "v_weight"},
        "q_weight": {"grad_query", "hidden_states"}, "q_bias": {"grad_query"},
        "k_weight": {"grad_key", "hidden_states"}, "k_bias": {"grad_key"},
        "v_weight": {"grad_value", "hidden_states"}, "v_bias": {"grad_value"},
    }  # fmt: skip
    names = set().union(*(reads[need] for need in spec.needs))
    if names & {"grad_query", "grad_key"}:
        names |= {"cos", "sin"}
    return sum(array.nbytes for name, array in arrays(spec).items() if name in names)


def assert_counted(spec, cost, read, flops):
    out = written(spec)
    accumulate = (spec if isinstance(spec, rg.RopeSpec) else spec.rope).accumulate
    assert (cost.read, cost.written) == (read + out * accumulate, out)
    assert (cost.moved, cost.flops) == (cost.read + cost.written, flops)


@given(spec=rope_specs())
def test_rope_bytes_and_operations_are_those_counted_on_arrays(spec):
    flops, tables = 0, sum(name in spec.needs for name in ("cos", "sin"))
    for side, heads in (("q", spec.heads), ("k", spec.kv_heads)):
        elements = math.prod((spec.batch, heads or 0, spec.seq, spec.rotary_dim))
        flops += elements * (3 * (side in spec.needs) + 2 * tables)
    assert_counted(spec, rope_cost(spec), read_by_rope(spec), flops)


@given(spec=qkv_specs())
def test_qkv_bytes_and_operations_are_those_counted_on_arrays(spec):
    x = arrays(spec)
    outer = 2 * spec.tokens
    flops = sum(outer * x[need].size for need in spec.needs if need.endswith("weight"))
    if "hidden_states" in spec.needs:
        flops += sum(outer * x[f"{part}_weight"].size for part in "qkv")
    assert_counted(spec, qkv_cost(spec), read_by_qkv(spec), flops)


@given(data=st.data())
def test_a_table_for_every_batch_costs_its_bytes_and_nothing_else(data):
    spec = data.draw(rope_specs())
    shared, own = (
        rope_cost(rg.RopeSpec(**{n: getattr(spec, n) for n in spec.__slots__} | {"table_batch": batch}))
        for batch in (None, spec.batch)
    )
    rows = 2 * spec.seq * spec.columns * numpy_dtype(spec.table_dtype).itemsize
    reads = bool({"q", "k"} & set(spec.needs))
    assert own.read - shared.read - (own.written - shared.written) * spec.accumulate == (
        rows * (spec.batch - 1) * reads
    )
    assert own.flops == shared.flops
