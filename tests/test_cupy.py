"""What only a GPU can show of the CuPy backend: its stream, its device, its bits, its arithmetic."""

import os
import subprocess
import sys

import numpy as np
import pytest
from conftest import need, skip

import ropegrad as rg
from ropegrad.backends import cupy_plain
from ropegrad.spec import QkvSpec, RopeSpec
from ropegrad.verify.draws import make_case
from ropegrad.verify.runners import run_backend, to_namespace

ROPE = RopeSpec(batch=2, heads=8, kv_heads=2, seq=97, head_dim=64, rotary_dim=48, table_batch=1)
BOTH = pytest.mark.parametrize("backend", ["cupy_fused", "cupy_plain"])


@pytest.fixture
def cupy():
    module = need("cupy", "cuda13")
    if cupy_plain.no_gpu() is not None:
        skip(cupy_plain.no_gpu(), required=False)
    return module


def test_every_kernel_can_be_built():
    """Without a device: names, types and signatures are judged when the objects are made."""
    need("cupy", "cuda13")
    for compute in ("float32", "float64"):
        for forward, accumulate in ((False, False), (True, False), (False, True)):
            for heads in (1, 2):
                cupy_plain.rotation(compute, forward, accumulate, heads)
        cupy_plain.table_sums(compute)
        cupy_plain.summed(compute)
        for signs in ((1,), (1, 1), (-1, -1), (1, 1, 1, -1, -1)):
            cupy_plain.combined(compute, signs)


@BOTH
def test_the_same_bits_every_time(cupy, backend):
    case = make_case(ROPE, 1)
    first = run_backend(case, backend, "cupy")
    for _ in range(20):
        again = run_backend(case, backend, "cupy")
        assert all(np.array_equal(first[name], again[name]) for name in first)


@BOTH
def test_runs_on_the_current_stream(cupy, backend):
    """What the stream was told before the call is seen by the call, and nothing waits for the default one."""
    case = make_case(ROPE, 1)
    right = run_backend(case, backend, "cupy")
    source = [to_namespace(x, "cupy") for x in case.inputs.values()]
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        arrays = [cupy.zeros_like(x) for x in source]
        busy = cupy.random.standard_normal((4096, 4096), dtype=cupy.float32)
        for _ in range(20):
            busy = busy @ busy * 1e-3
        for array, x in zip(arrays, source, strict=True):
            array[...] = x
        grads = rg.rope_backward(*arrays, backend=backend)
    stream.synchronize()
    for name, value in right.items():
        assert np.array_equal(getattr(grads, name).get(), value)


@BOTH
def test_a_device_that_is_not_the_current_one(cupy, backend):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        skip("needs two GPUs", required=False)
    case = make_case(ROPE, 1)
    right = run_backend(case, backend, "cupy")
    with cupy.cuda.Device(1):
        arrays = [to_namespace(x, "cupy") for x in case.inputs.values()]
    grads = rg.rope_backward(*arrays, backend=backend)
    assert all(grad.device.id == 1 for grad in grads)
    for name, value in right.items():
        assert np.array_equal(getattr(grads, name).get(), value)


PROBE = """
from ropegrad.spec import QkvSpec, RopeSpec
from ropegrad.verify import check, make_case
from ropegrad.verify.runners import run_backend
rope = RopeSpec(batch=1, heads=8, kv_heads=2, seq=64, head_dim=64, rotary_dim=64, table_batch=1, needs=())
case = make_case(QkvSpec(rope=rope, hidden_size=256), 1, values="sparse")
verdict = check(case, lambda case: run_backend(case, "cupy_plain", "cupy"))
assert verdict.passed, verdict.findings
"""


@pytest.mark.parametrize("switch", ["CUPY_TF32", "NVIDIA_TF32_OVERRIDE", "CUBLAS_EMULATE_SINGLE_PRECISION"])
def test_no_environment_switch_makes_highest_less(cupy, switch):
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env=os.environ | {switch: "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


def test_cupy_arrays_go_to_cupy_fused_and_the_answer_is_cupys(cupy):
    arrays = [to_namespace(x, "cupy") for x in make_case(ROPE, 1).inputs.values()]
    said = rg.explain("rope_backward", *arrays)
    assert said.backend == "cupy_fused"
    assert "one pass of rope_backward.cu computing in float32" in str(said)
    assert "copies nothing" in str(said)
    assert "cupy_fused is preferred" in said.why_not["cupy_plain"]
    assert all(isinstance(grad, cupy.ndarray) for grad in rg.rope_backward(*arrays))


def whole(spec):
    """A case of small whole numbers, tables too: every product and sum is exact, in any order."""
    case = make_case(spec, 3, values="coded")
    rng = np.random.default_rng(3)
    for name in ("cos", "sin"):
        case.inputs[name] = rng.integers(-8, 9, case.inputs[name].shape).astype(spec_of(spec).table_dtype)
    return case


def spec_of(spec):
    return spec if isinstance(spec, RopeSpec) else spec.rope


def test_forward_and_backward_agree(cupy):
    """⟨g, f(q)⟩ = ⟨f*(g), q⟩, exactly."""
    spec = RopeSpec(batch=2, heads=4, kv_heads=2, seq=9, head_dim=16, rotary_dim=12, table_batch=None)
    gq, gk, q, k, cos, sin = (to_namespace(x, "cupy") for x in whole(spec).inputs.values())
    forward, back = rg.rope(q, k, cos, sin), rg.rope_backward(gq, gk, q, k, cos, sin)
    assert float((gq * forward.q_embed).sum()) == float((back.grad_q * q).sum())
    assert float((gk * forward.k_embed).sum()) == float((back.grad_k * k).sum())


def test_qkv_forward_matches_numpy(cupy):
    rope = RopeSpec(batch=2, heads=4, kv_heads=2, seq=9, head_dim=16, rotary_dim=16, needs=())
    inputs = whole(QkvSpec(rope=rope, hidden_size=24)).inputs
    names = ("hidden_states", "q_weight", "k_weight", "v_weight", "cos", "sin")
    host = rg.qkv_rope(*(inputs[name] for name in names), head_dim=16)
    device = rg.qkv_rope(*(to_namespace(inputs[name], "cupy") for name in names), head_dim=16)
    for a, b in zip(host, device, strict=True):
        assert np.array_equal(a, b.get())
