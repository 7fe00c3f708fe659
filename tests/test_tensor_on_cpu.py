"""The tensor-core backend's promise, proved without a GPU: its kernels on the CPU, its products in NumPy."""

import ctypes
import functools
import itertools
import pickle
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import shim
from conftest import need, skip
from hypothesis import given, settings
from hypothesis import strategies as st

import ropegrad as rg
from ropegrad.backends import cupy_tensor, hopper, qkv_workspace
from ropegrad.backends.cublas_narrow import Narrow
from ropegrad.backends.cupy_tensor import CupyTensor
from ropegrad.backends.hopper import Both
from ropegrad.backends.qkv_access import standing_of
from ropegrad.backends.qkv_instance import ENTRIES, Instance
from ropegrad.backends.qkv_launch import Fill, Placed, Processor, Room, prepare
from ropegrad.backends.qkv_status import STATE
from ropegrad.backends.qkv_workspace import CUBLAS, maxima_of, terms, workspace
from ropegrad.spec import QKV_NEEDS, QkvSpec, RopeSpec
from ropegrad.verify import bounds
from ropegrad.verify.cases import qkv_edge_cases
from ropegrad.verify.check import check
from ropegrad.verify.draws import make_case
from ropegrad.verify.placing import MEMORY
from ropegrad.verify.runners import run_backend
from ropegrad.verify.strategies import cases, qkv_specs

if shim.why_not() is not None:
    skip(shim.why_not())
need("cupy", "compile")

from tensor_on_cpu import (  # noqa: E402
    DTYPES,
    PLAIN,
    Launching,
    compile_all,
    execute,
    on_cpu,
    place,
    prepared,
    run,
    whole,
)
from wide_ranges import KINDS, ROPE, SPEC, wide_case  # noqa: E402

ORDERS = st.integers(0, 2**16)
PRECISIONS = ("highest", "high", "medium")
WAYS = {"float32": "highest", "two terms": "highest", "high": "high", "medium": "medium"}


def judge(case, launching=PLAIN):
    verdict = check(case, functools.partial(run, launching=launching))
    assert verdict.passed, verdict.findings


def promised(case, precision):
    return replace(case, spec=replace(case.spec, precision=precision))


@pytest.fixture(params=WAYS)
def precision(request, monkeypatch):
    """Every promise, `highest` in both ways for sums of any length."""
    monkeypatch.setattr(qkv_workspace, "LEAST", 1 if request.param == "two terms" else qkv_workspace.MOST)
    return WAYS[request.param]


def test_edge_cases(precision):
    dtypes = DTYPES if precision == "high" else ("float32",)
    turns = [
        (promised(case, precision), Launching(order=i, into=bool(i % 2), widest=1, hopper=bool(i // 2 % 2)))
        for i, case in enumerate(qkv_edge_cases())
        if case.spec.rope.dtype in dtypes
    ]
    compile_all(prepared(*turn)[2].instance for turn in turns)
    for turn in turns:
        judge(*turn)


@functools.cache
def compile_narrow():
    """What float32 takes with single-element accesses, as one program."""
    operands = ("float32", False), ("float16", True), ("float16", False), ("bfloat16", False)
    flags = itertools.product(operands, *[(False, True)] * 3)
    compile_all(
        Instance(
            storage="float32", table="float32", operand=operand, two=two, vector=1, matrix_vector=1,
            interleaved=interleaved, half_table=half_table, add=add,
        )
        for (operand, two), interleaved, half_table, add in flags
    )  # fmt: skip


def any_problem(examples, precision, dtypes, widest):
    memory = st.sampled_from([kind for kind in MEMORY if kind != "misaligned"])

    @settings(max_examples=examples)
    @given(
        case=cases(qkv_specs(dtypes=dtypes), memory), into=st.booleans(), flushes=st.booleans(), order=ORDERS,
        hopper=st.booleans(),
    )  # fmt: skip
    def body(case, into, flushes, order, hopper):
        judge(promised(case, precision), Launching(order, None, into, flushes, widest, hopper))

    body()


def test_any_problem(precision):
    compile_narrow()
    any_problem(8, precision, ("float32",), 1)


@pytest.mark.long
def test_many_problems(precision):
    any_problem(1000, precision, DTYPES, 8)


# ---- ranges that a 16-bit operand does not have ------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_no_range_breaks_the_promise(kind, precision):
    for seed in range(4):
        values = "sparse" if seed % 2 else "normal"  # sums so short that their bounds are sharp
        case = promised(wide_case(kind, seed, values=values), precision)
        judge(case, Launching(order=seed, flushes=seed > 1, widest=1, hopper=seed in (1, 2)))


def componentwise(case, launching):
    """Whether all errors are TF32's, product by product: `high` without its term for scaling."""
    with mock.patch.object(bounds, "_normwise", return_value=0.0):
        return check(case, functools.partial(run, launching=launching))


@pytest.mark.parametrize("kind", KINDS)
def test_such_ranges_cost_no_product_its_accuracy(kind):
    verdict = componentwise(wide_case(kind, 5), Launching(widest=1))
    assert verdict.passed, verdict.findings


def test_without_the_second_thought_reciprocal_rows_lose_it():
    fault = "return lost > product + kept;", "return false;"
    assert not componentwise(wide_case("reciprocal rows"), Launching(fault=fault, widest=1)).passed


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_no_range_breaks_the_promise_of_many_draws(kind, precision):
    for seed in range(100):
        spec = replace(SPEC, rope=replace(ROPE, accumulate=bool(seed % 3 == 0)), precision=precision)
        judge(wide_case(kind, seed, spec, ("normal", "sparse", "scales")[seed % 3]), Launching(flushes=True))


EXPECTED = {  # own scales: rows of D in D·W, its columns in Dᵀ·X; columns of D, X, W; computed anew
    "zeros": ([0, 0], [0, 0, 0], [0, 0]), "padding": ([0, 0], [0, 0, 0], [0, 0]),
    "tokens": ([1, 0], None, [0, 0]), "heads": ([0, 1], None, [0, 0]),
    "weight column": ([0, 0], [0, 0, 1], [0, 0]), "hidden channel": ([0, 0], [0, 1, 0], [0, 0]),
    "nonfinite": ([0, 0], [0, 0, 0], [0, 0]), "reciprocal rows": (None, None, [0, 1]),
    "nearly overflowing": (None, None, [1, 0]),
}  # fmt: skip


@pytest.mark.parametrize("kind", EXPECTED)
def test_scales_are_as_fine_as_they_must_be(kind):
    _, state = whole(wide_case(kind), Launching(widest=1))
    for name, value in zip(("own", "own_columns", "recompute"), EXPECTED[kind], strict=True):
        assert value is None or list(state[name]) == value, name


# ---- float32 in two terms ----------------------------------------------------------------------------------


@pytest.fixture
def two_terms(monkeypatch):
    monkeypatch.setattr(qkv_workspace, "LEAST", 1)
    return replace(SPEC, precision="highest")


LONG = replace(ROPE, batch=1, seq=384, head_dim=32, rotary_dim=32, table_batch=1)  # 256 columns


def changed(spec, **words):
    return replace(spec, rope=replace(spec.rope, **words))


@pytest.mark.parametrize(
    ("spec", "into", "entry"),
    [
        (SPEC, False, "qkv_multiply"),
        (changed(SPEC, accumulate=True), False, "qkv_multiply_add"),
        (replace(SPEC, needs=("hidden_states",)), False, "qkv_multiply"),
        (replace(SPEC, needs=("q_weight", "v_weight")), False, "qkv_multiply"),
        (replace(SPEC, needs=QKV_NEEDS), False, "qkv_multiply"),
        (replace(SPEC, needs=("hidden_states", "k_weight")), False, None),  # it would make all three weights'
        (replace(SPEC, hidden_size=33), False, None),  # pairs of results are written
        (changed(SPEC, dtype="bfloat16"), False, None),
        (SPEC, True, None),
    ],
)
def test_what_one_launch_on_hopper_makes(two_terms, spec, into, entry):
    case = promised(make_case(spec, 1), "highest")
    for is_hopper in (False, True):
        launching = Launching(widest=1, into=into, hopper=is_hopper)
        steps = prepared(case, launching)[2].steps
        launched = [step.entry for step in steps if isinstance(step, Both)]
        assert launched == ([entry] if is_hopper and entry else [])
        assert any(isinstance(step, Narrow) for step in steps) == (not launched)
        judge(case, launching)


def test_the_public_call_on_hopper(two_terms):
    case = make_case(two_terms, 1)
    with on_cpu(hopper=True) as device:
        verdict = check(case, functools.partial(run_backend, backend="cupy_tensor"))
    assert verdict.passed, verdict.findings
    assert device.called.count("qkv_multiply") == 1
    assert device.called.count("product") == 0


def test_what_the_driver_gets_on_hopper(two_terms, monkeypatch):
    """Two structs and six maps, each made once, by address."""
    import cupy

    made, launched = [], []

    def encode(at, kind, rank, address, sizes, steps, box, dense, interleave, swizzle, fetch, fill):
        made.append(address.value)
        assert (at.value % 64, kind, rank, tuple(box), tuple(dense)) == (0, 6, 2, (64, 64), (1, 1))
        assert (interleave, swizzle, fill) == (0, 3, 0)
        words = (ctypes.c_uint64 * 16).from_address(at.value)
        words[:4] = [address.value, sizes[1], sizes[0], steps[0]]
        return 0

    def launch(function, gx, gy, gz, bx, by, bz, shared, stream, pointers, extra):
        assert (function, gx, gy, gz, bx, by, bz, stream, extra) == (3, 2, 1, 1, 384, 1, 1, 7, 0)
        at = (ctypes.c_void_p * 3).from_address(pointers)
        maps = np.frombuffer(ctypes.string_at(at[2], 6 * 128), np.uint64).reshape(6, 16)[:, :4]
        launched.append(
            (ctypes.string_at(at[0], 68 * 8), ctypes.string_at(at[1], 4 * 8), maps.tolist(), shared)
        )

    hopper.tensor_map.cache_clear()
    monkeypatch.setattr(hopper, "_encode", lambda: encode)
    monkeypatch.setattr(hopper, "function", lambda entry, device: SimpleNamespace(ptr=3))
    monkeypatch.setattr(cupy.cuda.driver, "launchKernel", launch)
    monkeypatch.setattr(cupy.cuda.runtime, "getDevice", lambda: 0)
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda: SimpleNamespace(ptr=7))
    arrays, memory, steps = prepared(make_case(two_terms, 1), Launching(hopper=True))
    (step,) = (step for step in steps.steps if isinstance(step, Both))
    hopper.multiply(step)
    hopper.multiply(step)
    given = [parameter.tobytes() for parameter in step.parameters]
    wanted = [[one.address, one.rows, one.columns, one.pitch] for one in step.maps]
    assert launched == [(*given, wanted, hopper.SHARED)] * 2
    assert made == [one.address for one in step.maps]
    ends = [one.address + one.rows * one.pitch for one in step.maps]
    assert place(memory).address < min(made)
    assert max(ends) <= place(memory).address + memory.size - CUBLAS
    assert [arrays[f"grad_{need}"].ctypes.data for need in two_terms.needs] == list(step.parameters[1])


@pytest.mark.parametrize("values", ["normal", "tiny_gradients"])
def test_ordinary_data_are_served_by_two_terms(two_terms, values):
    case = make_case(replace(two_terms, rope=LONG), 1, values=values)
    grads, state = whole(case)
    assert not any(state[flag].any() for flag in FLAGS)
    assert check(case, lambda case: grads).passed


@pytest.mark.parametrize("name", ["grad_value", "grad_query", "hidden_states"])
def test_outliers_are_served_by_the_exact_scale(two_terms, name):
    """Where the sample does not meet them: one element, or all of one token."""
    case = make_case(replace(two_terms, rope=LONG), 1)
    x = case.inputs[name].copy()
    where = (0, 1, 190, 3) if name == "grad_value" else (..., 190, slice(None))
    x[where] *= 600 / np.abs(x[where]).max()
    case = replace(case, inputs=case.inputs | {name: x})
    arrays, memory, steps = prepared(case, PLAIN)
    execute(case.spec, steps, [*arrays.values(), memory[: memory.size - CUBLAS]], PLAIN)
    state = memory[: STATE.itemsize].view(STATE)[0]
    assert not state["recompute"].any()
    assert list(state["again"]) == ([0, 1, 0] if name == "hidden_states" else [1, 0, 0])
    assert check(case, lambda case: {name: arrays[name] for name in case.outputs}).passed
    # Nothing was tallied twice: elements that are not zero, which here are all.
    spec, start = case.spec, workspace(case.spec).offsets["maxima"]
    depths = 256, spec.tokens, spec.tokens, 256
    for length, depth in zip(maxima_of(spec), depths, strict=False):
        tallies = memory[start : start + 4 * length].view(np.uint32)
        assert set(tallies[tallies > 0] >> 16) == {depth}
        start += 4 * length


def test_which_sums_take_two_terms():
    def taken(tokens, hidden_size=32, precision="highest"):
        rope = replace(LONG, heads=16, kv_heads=8, head_dim=16, rotary_dim=16, seq=tokens)
        return terms(QkvSpec(rope=rope, hidden_size=hidden_size, precision=precision))  # 512 columns of D

    assert [taken(tokens) for tokens in (255, 256, 65_535, 65_536)] == [0, 2, 2, 0]
    assert taken(512, hidden_size=65_536) == 0  # a tally has 16 bits for its counts
    assert taken(512, precision="high") == taken(65_536, precision="medium") == 1


@pytest.mark.parametrize("kind", ["tokens", "heads", "reciprocal rows"])
def test_what_no_scale_serves_is_computed_anew(two_terms, kind):
    case = promised(wide_case(kind), "highest")
    grads, state = whole(case)
    assert state["recompute"].any()
    assert check(case, lambda case: grads).passed


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("tokens", ("return carried > 0 && lost <=", "return true || lost <=")),
        ("tokens", ("nonzero - carry);", "0u);")),
        ("one huge element", ("const bool again = largest &&", "const bool again = false &&")),
        ("all large", ("rest[i / V].set(i % V, Narrow<Operand>::from(second));", ";")),
        ("all tiny", ("exponent >= -80 &&", "exponent >= -200 &&")),
    ],
)  # fmt: skip
def test_planted_faults_break_two_terms(two_terms, kind, fault):
    launching = Launching(fault=fault, flushes=True, widest=1)
    ways = itertools.product(range(3), ("normal", "sparse"))
    given = [wide_case(kind, seed, two_terms, values) for seed, values in ways]
    assert not all(check(case, functools.partial(run, launching=launching)).passed for case in given)


FLAGS = ("own", "own_columns", "unscale", "again", "again_d", "recompute")


def test_ordinary_data_take_one_scale_and_one_pass():
    for values in ("normal", "tiny_gradients", "sparse"):
        _, state = whole(make_case(SPEC, 3, values=values), Launching(widest=1))
        assert not any(state[flag].any() for flag in FLAGS)


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("tokens", ("own_rows = !fits<Operand>(rows, exact);", "own_rows = false;")),
        ("heads", ("own_columns = !fits<Operand>(columns, exact);", "own_columns = false;")),
        ("hidden channel", ("[self] = own_columns;", "[self] = self != X && own_columns;")),
        ("weight column", ("[self] = own_columns;", "[self] = self != W && own_columns;")),
        ("one huge element",
         ("if (!fits<Operand>(rows, guessed) || !fits<Operand>(columns, guessed)) {", "if (false) {")),
        ("tokens",
         ("if (weights ? matrix != D || !s.again_d : !s.again[matrix])",
          "if (weights || !s.again[matrix])")),
        ("all tiny", (" || exponent < -107 - 2 * Window<Operand>::low || exponent > 127;", ";")),
        ("subnormal", ("return times(times(x, once), twice);", "return times(x, times(once, twice));")),
    ],
)  # fmt: skip
def test_planted_faults_break_it(kind, fault):
    launching = Launching(fault=fault, flushes=True, widest=1)
    verdicts = [check(wide_case(kind, seed), functools.partial(run, launching=launching)) for seed in (0, 1)]
    assert not all(verdict.passed for verdict in verdicts)


@pytest.mark.parametrize(("precision", "least"), [("highest", 20.5), ("high", 11.5), ("medium", 8.5)])
def test_effective_bits_of_long_sums(precision, least, monkeypatch):
    monkeypatch.setattr(qkv_workspace, "LEAST", 1)
    rope = replace(ROPE, batch=1, seq=256, head_dim=64, rotary_dim=64, table_batch=1)
    case = make_case(QkvSpec(rope=rope, hidden_size=64, precision=precision), 2)
    verdict = check(case, run, measure_bits=True)
    assert verdict.passed, verdict.findings
    assert min(verdict.bits.values()) >= least, verdict.bits
    assert len(verdict.bits) == 4


# ---- the pass ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_wide_accesses_give_the_same_bits(dtype):
    rope = replace(ROPE, batch=1, seq=70, head_dim=32, rotary_dim=16, table_batch=1, dtype=dtype)
    case = make_case(QkvSpec(rope=rope, hidden_size=40, precision="high", needs=QKV_NEEDS), 1)
    narrow, wide = (run(case, Launching(widest=widest)) for widest in (1, 8))
    judge(case)
    for name in case.outputs:
        assert np.array_equal(narrow[name].view(np.uint8), wide[name].view(np.uint8)), name


def test_the_same_bits_in_any_order_of_threads():
    case = wide_case("tokens and heads")
    first, *others = (run(case, Launching(order=order, widest=1)) for order in range(3))
    for other in others:
        assert all(np.array_equal(first[name], other[name]) for name in case.outputs)


def test_no_chain_of_products_is_longer_than_a_tensor_core_may_add():
    rope = RopeSpec(
        batch=1, heads=1, kv_heads=1, seq=17_000, head_dim=2, rotary_dim=2, table_batch=1, needs=()
    )
    judge(make_case(QkvSpec(rope=rope, hidden_size=4, precision="high", needs=("q_weight", "k_weight")), 1))


# ---- the backend's own calls -------------------------------------------------------------------------------

PRODUCT = ["stream", "workspace", "pointers 1", "product", "pointers 0", "stream"]


def test_the_public_call():
    """Python, launches and cuBLAS's calls as on a GPU; all cases have kernels that other tests compile."""
    for i, case in enumerate(qkv_edge_cases()):
        if case.spec.rope.dtype == "float32" and not case.spec.accumulate:
            with on_cpu() as device:
                into = bool(i % 2)
                ours = functools.partial(run_backend, backend="cupy_tensor", into=into)
                verdict = check(promised(case, "high"), ours)
            assert verdict.passed, verdict.findings
            assert "".join(device.called).count("".join(PRODUCT)) == device.called.count("product")


def test_one_product_makes_the_weights_gradients_where_they_are_neighbours():
    with on_cpu() as device:
        run_backend(make_case(SPEC, 1), "cupy_tensor")
    assert [name for name in device.called if name in ENTRIES] == [
        "qkv_convert", "qkv_mend", "qkv_mend", "qkv_mend",
    ]  # fmt: skip
    assert device.called.count("product") == 2


def test_one_product_makes_the_packed_gradient():
    case = make_case(SPEC, 1)
    with on_cpu() as device:
        right = run_backend(case, "cupy_tensor")
        device.called.clear()
        three = [f"{part}_weight" for part in "qkv"]
        arrays = {name: device.keep(shim.apart(x)) for name, x in case.inputs.items() if name not in three}
        weight = device.keep(shim.apart(np.concatenate([case.inputs[name] for name in three])))
        shapes = SPEC.hidden_shape, weight.shape
        out = (*(device.keep(shim.empty(shape, np.float32)) for shape in shapes), None)
        words = {"precision": SPEC.precision, "backend": "cupy_tensor"}
        got = rg.qkv_rope_backward(**arrays, qkv_weight=weight, out=out, **words)
    assert device.called.count("product") == 2
    assert np.array_equal(got.grad_hidden_states, right["grad_hidden_states"])
    assert np.array_equal(got.grad_qkv_weight, np.concatenate([right[f"grad_{name}"] for name in three]))


def packed_weights(device, case):
    """Inputs by name, the weights views of one buffer."""
    arrays = {name: device.keep(shim.apart(x)) for name, x in case.inputs.items()}
    names = [f"{part}_weight" for part in "qkv"]
    buffer = device.keep(shim.apart(np.concatenate([case.inputs[name] for name in names])))
    start = 0
    for name in names:
        arrays[name] = buffer[start : start + len(arrays[name])]
        start += len(arrays[name])
    return arrays


def test_ieee_products_read_what_they_can_where_it_is():
    case = promised(make_case(SPEC, 1), "highest")
    spec, words = case.spec, {"precision": "highest", "backend": "cupy_tensor"}
    with on_cpu() as device:
        plan = rg.plan_qkv_rope_backward(spec, backend="cupy_tensor")
        apart = plan(*(device.keep(shim.apart(x)) for x in case.inputs.values()))
        assert device.called.count("qkv_mend") == 0
        assert device.called.count("product") == 2
        assert plan.status() is None
        arrays = packed_weights(device, case)
        placed = {name: place(x) for name, x in (arrays | apart._asdict()).items()}
        copies = workspace(spec).offsets["product"] - workspace(spec).offsets["x"]
        assert workspace(spec).size - workspace(spec, standing_of(spec, placed)).size == copies > 0
        packed = rg.qkv_rope_backward(**arrays, **words)
        arrays["hidden_states"] = device.keep(shim.apart(np.repeat(case.inputs["hidden_states"], 2, 2)))[
            ..., ::2
        ]
        strided = rg.qkv_rope_backward(**arrays, **words)
    for got in (packed, strided):
        assert all(np.array_equal(a, b) for a, b in zip(got, apart, strict=True))
    assert check(case, lambda case: apart._asdict()).passed


def test_plan():
    case = wide_case("heads")
    with on_cpu() as device:
        plan = rg.plan_qkv_rope_backward(SPEC, backend="cupy_tensor")
        assert plan.status() is None
        arrays = [device.keep(x) for x in case.inputs.values()]
        right = plan(*arrays)
        assert plan.status().own_scales == ("channels of the gradients, for the weights' gradients",)
        assert "unscaled apart: the weights' gradients" in str(plan.status())
        room = device.keep(shim.empty(plan.workspace_bytes, np.uint8))
        before = len(device.held)
        out = tuple(device.keep(shim.empty(SPEC.output(need)[0], np.float32)) for need in SPEC.needs)
        got = plan(*arrays, out=out, workspace=room)
        assert len(device.held) == before + len(out), "something was allocated"
        with pytest.raises(rg.SpecError, match="this call needs"):
            plan(*arrays, out=out, workspace=room[:-256])
        with pytest.raises(rg.SpecError, match="hidden_size 32, planned 33"):
            rg.plan_qkv_rope_backward(replace(SPEC, hidden_size=33), backend="cupy_tensor")(*arrays)
        assert str(plan.workspace_bytes) in plan.explain()
    assert all(a is b for a, b in zip(got, out, strict=True))
    for grads in (right, got):
        assert check(case, lambda case, grads=grads: grads._asdict()).passed
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_what_it_cannot_do_it_says():
    why_not = CupyTensor().why_not
    cupy = replace(SPEC, rope=replace(ROPE, namespace="cupy"))
    assert why_not(cupy) is None
    assert "numpy" in why_not(SPEC)
    assert "float64" in why_not(replace(cupy, rope=replace(cupy.rope, table_dtype="float64")))
    assert "projections" in why_not(cupy.rope)
    assert "rows" in why_not(replace(cupy, hidden_size=1 << 31))


def test_no_fill_crosses_from_one_output_into_its_neighbour():
    """The weights' gradients of no tokens may be allocations of their own that happen to touch."""
    rope = replace(SPEC.rope, seq=0)
    spec, outputs, at = replace(SPEC, rope=rope), {}, 1 << 20
    for name in spec.needs:
        shape, _ = spec.output(name)
        outputs[f"grad_{name}"] = Placed(
            at, shape, tuple(4 * int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
        )
        at += 4 * int(np.prod(shape))
    steps = prepare(spec, outputs, Room(256, 256), Processor(1, False)).steps
    fills = (step for step in steps if isinstance(step, Fill))
    filled = {step.address: step.size for step in fills if step.address >= 1 << 20}
    weights = [outputs[f"grad_{part}_weight"] for part in "qkv"]
    assert filled == {one.address: 4 * int(np.prod(one.shape)) for one in weights}


def test_a_repeated_call_is_prepared_once_and_reads_what_is_there_now(monkeypatch):
    made = []
    monkeypatch.setattr(cupy_tensor, "prepare", lambda *given: made.append(given) or prepare(*given))
    first, second = make_case(SPEC, 1), make_case(SPEC, 2)
    with on_cpu() as device:
        right = [run_backend(case, "cupy_tensor", into=True) for case in (first, second)]
        made.clear()
        arrays = {name: device.keep(shim.apart(x.copy())) for name, x in first.inputs.items()}
        shapes = [SPEC.output(need)[0] for need in SPEC.needs]
        outs = [tuple(device.keep(shim.empty(shape, np.float32)) for shape in shapes) for _ in range(2)]
        plan = rg.plan_qkv_rope_backward(SPEC, backend="cupy_tensor")
        memory = device.keep(shim.empty(plan.workspace_bytes, np.uint8))
        for turn, out, times in ((0, outs[0], 1), (1, outs[0], 1), (0, outs[1], 2), (1, outs[1], 2)):
            for name, x in (first, second)[turn].inputs.items():
                arrays[name][...] = x
            got = plan(*arrays.values(), out=out, workspace=memory)
            assert len(made) == times
            for name, x in right[turn].items():
                assert np.array_equal(getattr(got, name), x)
