"""Plain CUDA kernels run without a GPU: the CuPy backend's, judged as any backend is, and the stream's."""

import functools
from unittest import mock

import numpy as np
import pytest
import shim
from conftest import need, skip
from hypothesis import given, settings
from hypothesis import strategies as st
from test_forward import rotated

import ropegrad as rg
from ropegrad.arrays import DTYPES
from ropegrad.backends import cupy_plain
from ropegrad.bench import streams
from ropegrad.spec import RopeSpec
from ropegrad.verify.cases import EDGE_CASES
from ropegrad.verify.check import check
from ropegrad.verify.draws import make_case
from ropegrad.verify.runners import options
from ropegrad.verify.strategies import cases, qkv_specs, rope_specs

if shim.why_not() is not None:
    skip(shim.why_not())
need("cupy", "compile")

from cupy_on_cpu import Launching, on_cpu, run  # noqa: E402

ORDERS = st.integers(0, 2**16)
# Kernels of all dtypes take g++ ten seconds a layout.
GATE = {"strided": DTYPES, "contiguous": ("float32",), "strided64": ("float32",)}


@pytest.mark.parametrize("op", ["rope", "qkv"])
def test_edge_cases(op):
    for i, case in enumerate(EDGE_CASES[op]()):
        launching = Launching(dtypes=DTYPES, order=i)
        verdict = check(case, lambda case, how=launching, into=bool(i % 2): run(case, how, into=into))
        assert verdict.passed, verdict.findings


@pytest.mark.parametrize("layout", GATE)
@pytest.mark.parametrize("specs", [rope_specs, qkv_specs], ids=["rope", "qkv"])
def test_any_problem(layout, specs):
    any_problem(layout, specs, GATE[layout], examples=100)


@pytest.mark.long
@pytest.mark.parametrize("layout", GATE)
@pytest.mark.parametrize("specs", [rope_specs, qkv_specs], ids=["rope", "qkv"])
def test_any_problem_of_any_dtype(layout, specs):
    any_problem(layout, specs, DTYPES, examples=2000)


def any_problem(layout, specs, dtypes, examples):
    @settings(max_examples=examples)
    @given(case=cases(specs(dtypes=dtypes)), into=st.booleans(), order=ORDERS)
    def body(case, into, order):
        launching = Launching(layout, order, dtypes)
        verdict = check(case, lambda case: run(case, launching, into=into))
        assert verdict.passed, verdict.findings

    body()


@pytest.mark.parametrize("table_batch", [None, 2])
def test_the_same_bits_in_any_order_of_threads(table_batch):
    spec = RopeSpec(batch=2, heads=6, kv_heads=3, seq=5, head_dim=20, rotary_dim=16, table_batch=table_batch)
    case = make_case(spec, 1)
    first, *others = (run(case, Launching(order=order)) for order in range(4))
    for other in others:
        assert all(np.array_equal(first[name], other[name]) for name in case.outputs)


# ---- forwards ------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(spec=rope_specs(dtypes=("float32",)), seed=st.integers(0, 2**32 - 1), order=ORDERS)
def test_rope_is_the_complex_product(spec, seed, order):
    rng = np.random.default_rng(seed)
    q, k = (
        None if heads is None else rng.integers(-9, 10, spec.head_shape(heads)).astype(np.float32)
        for heads in (spec.heads, spec.kv_heads)
    )
    cos, sin = rng.integers(-9, 10, (2, *spec.table_shape)).astype(np.float32)
    words = {"table": spec.table, "layout": spec.layout, "pairing": spec.pairing}
    with on_cpu(Launching(order=order)):
        turned = rg.rope(q, k, cos, sin, **words, backend="cupy_plain")
    for x, y in zip((q, k), turned, strict=True):
        assert (x is None and y is None) or np.array_equal(y, rotated(x, cos, sin, spec))


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "sbhd"])
def test_qkv_rope_is_numpys(layout):
    rng = np.random.default_rng(1)
    tokens = (3, 2) if layout == "sbhd" else (2, 3)
    hidden = rng.integers(-4, 5, (*tokens, 7)).astype(np.float32)
    weights = [rng.integers(-4, 5, (heads * 6, 7)).astype(np.float32) for heads in (4, 2, 2)]
    biases = [rng.integers(-4, 5, heads * 6).astype(np.float32) for heads in (4, 2, 2)]
    cos, sin = rng.integers(-4, 5, (2, 3, 6)).astype(np.float32)
    words = dict(zip(("q_bias", "k_bias", "v_bias"), biases, strict=True), head_dim=6, layout=layout)
    with on_cpu(Launching()):
        made = rg.qkv_rope(hidden, *weights, cos, sin, **words, backend="cupy_plain")
    for ours, numpys in zip(made, rg.qkv_rope(hidden, *weights, cos, sin, **words), strict=True):
        assert np.array_equal(ours, numpys)


# ---- offsets past 2 GiB --------------------------------------------------------------------------------


def far(x):
    """The same values, the batches 3 GiB apart; only the pages that are touched take memory."""
    step = 3 << 30  # as a 32-bit integer it is negative
    pages = shim.reserve(step * (x.shape[0] - 1) + x[0].nbytes)
    copy = np.ndarray(x.shape, x.dtype, pages, 0, (step, *x.strides[1:]))
    copy[...] = x
    return copy


def run_far(case, layout):
    arrays = [far(x) if x.ndim == 4 else x for x in case.inputs.values()]
    shapes = [case.spec.output(need)[0] for need in case.spec.needs]
    out = [
        far(np.zeros(shape, np.float32)) if len(shape) == 4 else shim.empty(shape, "f4") for shape in shapes
    ]
    with on_cpu(Launching(layout)):
        rg.rope_backward(*arrays, **options(case.spec), out=tuple(out), backend="cupy_plain")
    return dict(zip(case.outputs, out, strict=True))


@pytest.mark.parametrize("table_batch", [None, 2])
def test_batches_further_apart_than_2_gib(table_batch):
    spec = RopeSpec(batch=2, heads=4, kv_heads=2, seq=5, head_dim=12, rotary_dim=8, table_batch=table_batch)
    case = make_case(spec, 1)
    verdict = check(case, lambda case: run_far(case, "strided64"))
    assert verdict.passed, verdict.findings
    with pytest.raises(shim.Fault, match=r"overflows|of array"):
        run_far(case, "strided")


# ---- planted faults ------------------------------------------------------------------------------------

PLANTED = {
    "one element too many": ("CUPY_FOR(i, _ind.size())", "CUPY_FOR(i, _ind.size() + 1)"),
    "one sum too many": ("_i < _out_ind.size()) {", "_i <= _out_ind.size()) {"),
    "no barrier between the steps of the tree": ("}\n      __syncthreads();", "}"),
    "a product for a sum": ("add.rn.f32 %0", "mul.rn.f32 %0"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_fault_in_a_kernel(fault):
    spec = RopeSpec(batch=2, heads=6, kv_heads=2, seq=7, head_dim=8, rotary_dim=8, table_batch=2)
    case = make_case(spec, 1)
    assert all(is_red(case, Launching(order=order, fault=PLANTED[fault])) for order in range(3))


def is_red(case, launching):
    try:
        return not check(case, lambda case: run(case, launching)).passed
    except shim.Fault:
        return True


@pytest.mark.parametrize("start", [0, 1])
def test_a_fault_in_the_views_handed_to_kernels(start, monkeypatch):
    """The first members of the pairs, right and one channel late."""
    spec = RopeSpec(batch=1, heads=2, kv_heads=1, seq=3, head_dim=8, rotary_dim=6, table_batch=1)
    case = make_case(spec, 1, values="coded")
    monkeypatch.setattr(cupy_plain, "_members", lambda x, pairing: (x[..., start : start + 3], x[..., 3:]))
    assert is_red(case, Launching()) == bool(start)


# ---- the stream kernel ---------------------------------------------------------------------------------


@functools.cache
def stream_module(source=streams.SOURCE):
    names = sorted({streams._expression(config) for config in streams.CONFIGS})
    return shim.RawModule(code=source, name_expressions=names)


def stream(config, n, source=streams.SOURCE, order=0):
    rng = np.random.default_rng(n)
    a, b = (shim.apart(rng.standard_normal(4 * n, dtype=np.float32)) for _ in range(2))
    c = shim.empty(4 * n, np.float32)
    with mock.patch.object(streams, "module", return_value=stream_module(source)):
        (call,) = streams.stream_calls(config, [(a, b, c)], multiprocessors=1)
    call(order=order)
    return a, b, c


@pytest.mark.parametrize("config", streams.CONFIGS, ids=lambda config: config.name)
def test_the_stream_adds_every_element_once(config):
    for n in (1, 255, 256, 257, 1023, 4 * 256 * config.unroll + 5, 5000):
        a, b, c = stream(config, n, order=n)
        assert np.array_equal(c, a + b)


def test_a_stream_that_goes_one_element_too_far():
    config = streams.Config(blocks_per_sm=4, unroll=2, streaming=False)
    stream(config, 257)
    faulty = streams.SOURCE.replace("start + u * 256 < n", "start + u * 256 <= n")
    assert faulty != streams.SOURCE
    with pytest.raises(shim.Fault, match=r"reads .* bytes at byte 4112 of array 0, which has 4112 bytes"):
        stream(config, 257, faulty)


def test_a_stream_from_a_misaligned_address():
    a, b, c = (shim.empty(65, np.float32)[1:] for _ in range(3))
    kernel = stream_module().get_function("stream<1, true>")
    with pytest.raises(shim.Fault, match=r"misaligned .*float4"):
        kernel((1,), (256,), (a, b, c, 16))
