"""What only a GPU can show of the tensor-core backend: its promise there, capture, memory, stream, status."""

from dataclasses import replace

import numpy as np
import pytest
from conftest import need, skip
from hypothesis import given, settings
from hypothesis import strategies as st
from wide_ranges import KINDS, SPEC, wide_case

import ropegrad as rg
from ropegrad.backends import cupy_plain, cupy_tensor, qkv_workspace
from ropegrad.outputs import QkvGrads
from ropegrad.spec import QKV_WEIGHTS, QkvSpec, RopeSpec
from ropegrad.verify.cases import qkv_edge_cases
from ropegrad.verify.check import check
from ropegrad.verify.draws import make_case
from ropegrad.verify.placing import MEMORY
from ropegrad.verify.runners import options, run_backend, to_namespace
from ropegrad.verify.strategies import cases, qkv_specs

NAME = "cupy_tensor"
WAYS = {"float32": "highest", "two terms": "highest", "high": "high", "medium": "medium"}
ROPE = RopeSpec(
    batch=1,
    heads=8,
    kv_heads=2,
    seq=512,
    head_dim=64,
    rotary_dim=64,
    table_batch=1,
    namespace="cupy",
    needs=(),
)
DENSE = QkvSpec(rope=ROPE, hidden_size=512, precision="high")


@pytest.fixture(scope="module")
def cupy():
    module = need("cupy", "cuda13")
    if cupy_plain.no_gpu() is not None:
        skip(cupy_plain.no_gpu(), required=False)
    return module


def judge(case, into=False):
    verdict = check(case, lambda case: run_backend(case, NAME, "cupy", into=into), measure_bits=True)
    assert verdict.passed, verdict.findings
    return verdict


def promised(case, precision):
    return replace(case, spec=replace(case.spec, precision=precision))


def on_gpu(case):
    return [None if x is None else to_namespace(x, "cupy") for x in case.inputs.values()]


@pytest.fixture(params=WAYS)
def precision(request, monkeypatch):
    """Every promise, `highest` in both ways for sums of any length."""
    least = {"float32": qkv_workspace.MOST, "two terms": 1}.get(request.param, qkv_workspace.LEAST)
    monkeypatch.setattr(qkv_workspace, "LEAST", least)
    for remembered in (cupy_tensor.needed, cupy_tensor.prepared):
        remembered.cache_clear()
    yield WAYS[request.param]
    for remembered in (cupy_tensor.needed, cupy_tensor.prepared):
        remembered.cache_clear()


def test_edge_cases(cupy, precision):
    for case in qkv_edge_cases():
        if case.spec.rope.compute == "float32":
            judge(promised(case, precision))
            judge(promised(case, precision), into=True)


@pytest.mark.parametrize("kind", KINDS)
def test_no_range_breaks_the_promise(cupy, kind, precision):
    for seed in range(10):
        judge(promised(wide_case(kind, seed, values=("normal", "sparse", "scales")[seed % 3]), precision))


def test_any_problem(cupy, precision):
    memory = st.sampled_from([kind for kind in MEMORY if kind != "misaligned"])

    @settings(max_examples=max(8, settings().max_examples))  # each compiles kernels of its own
    @given(case=cases(qkv_specs(dtypes=("float32", "float16", "bfloat16")), memory), into=st.booleans())
    def body(case, into):
        judge(promised(case, precision), into)

    body()


@pytest.mark.parametrize(("precision", "least"), [("highest", 20.3), ("high", 11.5), ("medium", 8.5)])
def test_effective_bits(cupy, precision, least):
    verdict = judge(make_case(replace(DENSE, precision=precision), 1))
    assert min(verdict.bits.values()) >= least


def test_the_same_bits_every_time(cupy):
    case = make_case(DENSE, 1)
    first = run_backend(case, NAME, "cupy")
    for _ in range(10):
        again = run_backend(case, NAME, "cupy")
        assert all(np.array_equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("kind", KINDS)
def test_no_range_breaks_two_terms_at_a_size_that_takes_them(cupy, kind):
    judge(wide_case(kind, 1, replace(DENSE, precision="highest")))


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim", "hidden_size"),
    [(256, 6, 64, 128), (257, 11, 34, 130), (383, 6, 80, 2), (449, 13, 26, 66), (1090, 5, 130, 318)],
)
def test_no_edge_of_a_tile_is_lost(cupy, tokens, heads, head_dim, hidden_size, accumulate):
    rope = replace(
        ROPE,
        heads=heads,
        kv_heads=1,
        seq=tokens,
        head_dim=head_dim,
        rotary_dim=head_dim,
        accumulate=accumulate,
    )
    judge(make_case(QkvSpec(rope=rope, hidden_size=hidden_size), tokens))


@pytest.mark.parametrize("tokens", [256, 700, 3000])
def test_two_terms_err_no_more_than_ieee_products(cupy, tokens):
    """Every output, by root mean square."""
    case = make_case(replace(DENSE, precision="highest", rope=replace(ROPE, seq=tokens)), 1)
    ours = judge(case)
    ieee = check(case, lambda case: run_backend(case, "cupy_plain", "cupy"), measure_bits=True)
    for name in case.outputs:
        assert ours.bits[name] >= ieee.bits[name], name


def test_two_terms_see_outliers_and_what_no_scale_serves(cupy):
    spec = replace(DENSE, precision="highest")
    plan = rg.plan_qkv_rope_backward(spec, backend=NAME)
    arrays = on_gpu(make_case(spec, 1))
    plan(*arrays)
    assert plan.status().again == plan.status().recomputed == ()
    arrays[2][0, 1, 301, 3] = 20_000
    plan(*arrays)
    assert plan.status().again == ("gradients",)
    assert plan.status().recomputed == ()
    arrays[0][:, :, 300] *= 1e-9
    arrays[1][:, :, 300] *= 1e-9
    arrays[2][:, :, 300] *= 1e-9
    plan(*arrays)
    assert plan.status().recomputed == ("grad_hidden_states",)


@pytest.mark.parametrize("kind", ["normal", *KINDS])
def test_a_captured_call_follows_its_inputs(cupy, kind):
    """Captured on ordinary data, replayed on others: nothing was decided on the host."""
    ordinary = make_case(SPEC, 5)
    case = ordinary if kind == "normal" else wide_case(kind, 1)
    plan = rg.plan_qkv_rope_backward(replace(SPEC, rope=replace(SPEC.rope, namespace="cupy")), backend=NAME)
    assert plan.backend == NAME
    arrays = on_gpu(ordinary)
    out = tuple(cupy.full(SPEC.output(need)[0], cupy.nan, cupy.float32) for need in QKV_WEIGHTS)
    room = cupy.empty(plan.workspace_bytes, cupy.uint8)
    plan(*arrays, out=out, workspace=room)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        cupy.cuda.Device().synchronize()
        stream.begin_capture()
        plan(*arrays, out=out, workspace=room)
        graph = stream.end_capture()
        for array, x in zip(arrays, case.inputs.values(), strict=True):
            array.set(np.ascontiguousarray(x))
        graph.launch(stream)
        stream.synchronize()
    verdict = check(case, lambda case: {n: x.get() for n, x in zip(QkvGrads._fields, out, strict=True)})
    assert verdict.passed, verdict.findings
    own = bool(plan.status().own_scales)
    assert own or kind not in ("tokens", "heads", "tokens and heads", "weight column", "hidden channel")
    assert not own or kind not in ("normal", "padding", "zeros", "nonfinite")


def test_a_call_allocates_only_what_it_says(cupy):
    spec = DENSE
    plan = rg.plan_qkv_rope_backward(spec, backend=NAME)
    arrays = on_gpu(make_case(spec, 1))
    out = tuple(cupy.empty(spec.output(need)[0], cupy.float32) for need in QKV_WEIGHTS)
    room = cupy.empty(plan.workspace_bytes, cupy.uint8)
    plan(*arrays, out=out, workspace=room)
    pool = cupy.get_default_memory_pool()
    before = pool.used_bytes()

    def refuse(size):
        raise AssertionError(f"{size} bytes allocated")

    with cupy.cuda.using_allocator(refuse):
        plan(*arrays, out=out, workspace=room)
    assert pool.used_bytes() == before
    with pytest.raises(rg.SpecError, match="this call needs"):
        plan(*arrays, out=out, workspace=room[:-256])


def test_runs_on_the_current_stream(cupy):
    case = make_case(DENSE, 1)
    right = run_backend(case, NAME, "cupy")
    source = on_gpu(case)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        arrays = [cupy.zeros_like(x) for x in source]
        busy = cupy.random.standard_normal((4096, 4096), dtype=cupy.float32)
        for _ in range(20):
            busy = busy @ busy * 1e-3
        for array, x in zip(arrays, source, strict=True):
            array[...] = x
        grads = rg.qkv_rope_backward(*arrays, **options(case.spec), backend=NAME)
    stream.synchronize()
    for name, value in right.items():
        assert np.array_equal(getattr(grads, name).get(), value)


def test_cublas_is_left_as_cupy_expects_it(cupy):
    a = cupy.random.standard_normal((64, 64), dtype=cupy.float32)
    before = a @ a
    rg.qkv_rope_backward(*on_gpu(make_case(DENSE, 1)), precision="high", backend=NAME)
    assert bool((a @ a == before).all())
