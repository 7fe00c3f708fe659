"""The one-pass RoPE kernel (plain loads) on the CPU: all its indexing, judged as any backend is."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import shim
from conftest import skip
from hypothesis import given, settings
from hypothesis import strategies as st

from ropegrad.backends.rope_config import Config
from ropegrad.spec import RopeSpec
from ropegrad.verify.cases import rope_edge_cases
from ropegrad.verify.check import check
from ropegrad.verify.draws import make_case
from ropegrad.verify.placing import MEMORY
from ropegrad.verify.strategies import cases, rope_specs

if shim.why_not() is not None:
    skip(shim.why_not())

from fused_on_cpu import PLAIN, Launching, arrays_of, compile_all, launch, prepared, run

ORDERS = st.integers(0, 2**16)
ALIGNED = [case for case in rope_edge_cases() if case.name != "memory: misaligned"]
MIXED = RopeSpec(batch=2, heads=6, kv_heads=2, seq=5, head_dim=16, rotary_dim=12, table_batch=2)


def judge(case, launching):
    verdict = check(case, functools.partial(run, launching=launching))
    assert verdict.passed, verdict.findings


def test_edge_cases():
    turns = [(case, Launching(order=i, into=bool(i % 2))) for i, case in enumerate(ALIGNED)]
    launches = [prepared(case.spec, arrays_of(case, how), how) for case, how in turns]
    compile_all(one.instance for one in launches if one is not None)
    for case, launching in turns:
        judge(case, launching)


def any_problem(examples):
    """Each example is a program of its own for g++, half a second."""
    memory = st.sampled_from([kind for kind in MEMORY if kind != "misaligned"])

    @settings(max_examples=examples)
    @given(
        case=cases(rope_specs(), memory), into=st.booleans(), order=ORDERS, l2=st.sampled_from((0, 1 << 26))
    )
    def body(case, into, order, l2):
        judge(case, Launching(l2, order=order, into=into))

    body()


def test_any_problem():
    any_problem(25)


@pytest.mark.long
def test_many_problems():
    any_problem(2000)


@st.composite
def configs(draw):
    return Config(
        vector=draw(st.sampled_from((16, 8, 4))), lanes=draw(st.integers(1, 9)),
        tokens=draw(st.integers(1, 3)),
        groups_q=draw(st.integers(1, 4)), groups_k=draw(st.integers(1, 3)), rows=draw(st.integers(1, 3)),
        hint=draw(st.integers(0, 2)),
    )  # fmt: skip


def any_configuration(examples):
    @settings(max_examples=examples)
    @given(config=configs(), order=ORDERS, seed=st.integers(0, 99), specs=rope_specs(dtypes=("float32",)))
    def body(config, order, seed, specs):
        kv_heads = specs.kv_heads or 1
        spec = replace(specs, heads=specs.heads or 3 * kv_heads, kv_heads=kv_heads)
        judge(make_case(spec, seed), Launching(config=config, order=order))

    body()


def test_any_configuration():
    """However the work is shared, and whether it comes out even or not."""
    any_configuration(15)


@pytest.mark.long
def test_many_configurations():
    any_configuration(1000)


def test_gradients_of_q_and_k_have_the_same_bits_in_every_configuration():
    case = make_case(replace(MIXED, rotary_dim=16), 1)
    found = [run(case)]
    for vector, lanes, tokens, groups, rows in ((16, 1, 2, 2, 1), (8, 4, 1, 3, 2), (4, 3, 5, 1, 3)):
        config = Config(vector=vector, lanes=lanes, tokens=tokens, groups_q=groups, groups_k=1, rows=rows)
        found.append(run(case, Launching(config=config)))
    for other in found[1:]:
        assert all(np.array_equal(other[name], found[0][name]) for name in ("grad_q", "grad_k"))


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_an_output_may_be_an_input(pairing, accumulate):
    spec = replace(MIXED, pairing=pairing, accumulate=accumulate)
    case = make_case(spec, 4)
    for q_on, k_on in (("grad_q_embed", "k"), ("q", "grad_k_embed")):
        fresh, same = arrays_of(case, PLAIN), {name: x.copy() for name, x in arrays_of(case, PLAIN).items()}
        fresh |= {"grad_q": fresh[q_on].copy(), "grad_k": fresh[k_on].copy()}
        launch(spec, fresh)
        launch(spec, same | {"grad_q": same[q_on], "grad_k": same[k_on]}, Launching(order=5))
        same |= {"grad_q": same[q_on], "grad_k": same[k_on]}
        assert all(np.array_equal(same[name], fresh[name]) for name in case.outputs)


def test_a_table_gradient_without_heads_is_zero():
    case = make_case(replace(MIXED, heads=0, kv_heads=None, needs=("cos", "sin")), 1)
    assert not any(x.any() for x in run(case).values())


def test_float64_is_rounded_to_float16_once():
    """1 + 2^-11 + 2^-40 lies above the middle between two float16; as float32 it is the middle."""
    spec = RopeSpec(
        batch=1, heads=1, kv_heads=None, seq=1, head_dim=2, rotary_dim=2, dtype="float16",
        table_dtype="float64", needs=("q",),
    )  # fmt: skip
    case = make_case(spec, 1)
    case.inputs.update({
        "grad_q_embed": np.array([[[[1, 0]]]], np.float16), "cos": np.array([[1 + 2**-11 + 2**-40, 0]]),
        "sin": np.zeros((1, 2)),
    })  # fmt: skip
    assert run(case)["grad_q"].tolist() == [[[[1 + 2**-10, 0]]]]


# ---- far apart -----------------------------------------------------------------------------------------


def far(x, axis, step):
    """The same values, `step` bytes from one to the next on an axis; only touched pages take memory."""
    strides = [*x.strides]
    strides[axis] = step
    size = step * (x.shape[axis] - 1) + x.nbytes
    copy = np.ndarray(x.shape, x.dtype, shim.reserve(size), 0, tuple(strides))
    copy[...] = x
    return copy


@pytest.mark.parametrize(
    ("axis", "step", "wide"),
    [(0, 3 << 30, False), (1, 3 << 30, True), (1, (1 << 31) - 16, False), (2, 5 << 30, True)],
    ids=["batches", "heads", "heads, just 32 bits", "tokens"],
)
def test_offsets_past_32_bits(axis, step, wide):
    spec = RopeSpec(batch=2, heads=4, kv_heads=4, seq=2, head_dim=8, rotary_dim=8, table_batch=2)
    case = make_case(spec, 2)
    near = run(case)
    arrays = {name: far(x, axis, step) if x.ndim == 4 else shim.apart(x) for name, x in case.inputs.items()}
    for name, x in near.items():
        arrays[name] = (
            far(np.full_like(x, np.nan), axis, step) if x.ndim == 4 else shim.empty(x.shape, x.dtype)
        )
    assert launch(spec, arrays).instance.wide == wide
    assert all(np.array_equal(arrays[name], x) for name, x in near.items())


def test_more_batches_than_a_grid_has_along_z():
    spec = RopeSpec(
        batch=65_537, heads=1, kv_heads=None, seq=1, head_dim=2, rotary_dim=2, table_batch=65_537,
        needs=("q", "cos", "sin"),
    )  # fmt: skip
    judge(make_case(spec, 1), PLAIN)


# ---- the proof can fail --------------------------------------------------------------------------------

FAULTS = {
    "a barrier less": ("        __syncthreads();\n", ""),
    "own sine": ("I::own_sine ? cf : cs", "I::own_sine ? cs : cf"),
    "the last group's heads": ("r < group.heads;", "r < group.heads - 1;"),
    "the first group's sums only": ("group < S::groups;", "group < 1;"),
    "a vector too far": ("step * Shape<I>::apart", "step * (Shape<I>::apart + 1)"),
    "another batch's table": ("from.batch * place.batch +", "0 * place.batch +"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(fault):
    """In a launch with several turns, groups and tokens a block."""
    config = Config(lanes=2, tokens=2, groups_q=2, groups_k=1, rows=2)
    case = make_case(MIXED, 3)
    judge(case, Launching(config=config))
    with pytest.raises((AssertionError, shim.Fault)):
        judge(case, Launching(config=config, fault=FAULTS[fault]))
