"""What only a GPU can show of plans and graphs, and of calls that are remembered."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from conftest import need, skip

import ropegrad as rg
from ropegrad.backends.cupy_plain import no_gpu
from ropegrad.spec import RopeSpec
from ropegrad.verify.draws import make_case
from ropegrad.verify.runners import to_namespace

SPEC = RopeSpec(
    batch=2, heads=6, kv_heads=2, seq=97, head_dim=64, rotary_dim=48, table_batch=2, namespace="cupy"
)


@pytest.fixture
def cupy():
    module = need("cupy", "cuda13")
    if no_gpu() is not None:
        skip(no_gpu(), required=False)
    return module


@pytest.fixture
def fused(cupy):
    """A plan, its inputs and outputs, and the right answer."""
    arrays = [to_namespace(x, "cupy") for x in make_case(SPEC, 3).inputs.values()]
    out = tuple(cupy.empty_like(x) for x in arrays[2:])
    right = [x.get() for x in rg.rope_backward(*arrays)]
    return rg.plan_rope_backward(SPEC), arrays, out, right


def same(grads, right):
    return all(np.array_equal(a.get(), b) for a, b in zip(grads, right, strict=True))


def test_a_repeated_call_reads_what_is_there_now(cupy, fused):
    plan, arrays, out, right = fused
    for call in (plan, rg.rope_backward):
        for _ in range(3):
            for x in out:
                x.fill(float("nan"))
            assert same(call(*arrays, out=out), right)
        arrays[0][...] *= 2
        twice = [x.get() for x in rg.rope_backward(*arrays)]
        assert same(call(*arrays, out=out), twice)
        arrays[0][...] *= 0.5


def test_a_graph_replays_on_the_current_stream(cupy, fused):
    plan, arrays, out, right = fused
    graph = plan.graph(*arrays, out=out)
    for x in out:
        x.fill(float("nan"))
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        grads = graph()
    stream.synchronize()
    assert same(grads, right)


def test_a_call_can_be_captured(cupy, fused):
    _, arrays, out, right = fused
    rg.rope_backward(*arrays, out=out)  # compiled and loaded
    for x in out:
        x.fill(float("nan"))
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        rg.rope_backward(*arrays, out=out)
        graph = stream.end_capture()
        graph.launch()
    stream.synchronize()
    assert same(out, right)


def test_nothing_but_the_outputs_is_allocated(cupy, fused):
    _, arrays, _, _ = fused
    pool = cupy.get_default_memory_pool()
    before = pool.used_bytes()
    grads = rg.rope_backward(*arrays)
    rounded = sum(-(-x.nbytes // 512) * 512 for x in grads)  # the pool's units
    assert pool.used_bytes() - before == rounded


def test_threads_may_share_a_plan(cupy, fused):
    plan, arrays, _, right = fused
    with ThreadPoolExecutor(4) as pool:
        for grads in pool.map(lambda _: plan(*arrays), range(40)):
            assert same(grads, right)
