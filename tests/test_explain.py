"""What `explain` says is what happens; a backend that cannot keep a promise says why; nothing falls back."""

from dataclasses import replace

import numpy as np
import pytest
from conftest import need

import ropegrad as rg
from ropegrad.backends.numpy_tiled import SMALL
from ropegrad.spec import QkvSpec, RopeSpec
from ropegrad.verify.draws import make_case
from ropegrad.verify.runners import to_namespace

ROPE = make_case(RopeSpec(batch=1, heads=4, kv_heads=2, seq=6, head_dim=8, rotary_dim=8, table_batch=1), 1)
QKV = make_case(
    QkvSpec(
        rope=RopeSpec(batch=1, heads=4, kv_heads=2, seq=6, head_dim=8, rotary_dim=8, table_batch=1),
        hidden_size=16,
    ),
    1,
)


def arrays(case, namespace="numpy"):
    return [to_namespace(x, namespace) for x in case.inputs.values()]


def test_numpy_arrays_go_to_the_tiled_backend():
    said = rg.explain("rope_backward", *arrays(ROPE))
    assert said.backend == "numpy_tiled"
    assert "portable" in said.why_not
    assert "numpy_tiled is preferred" in str(said)
    assert "all heads at once, computing in float32" in str(said)
    larger = make_case(replace(ROPE.spec, seq=SMALL), 1)
    assert "tiles of 1 x " in str(rg.explain("rope_backward", *arrays(larger), backend="numpy_tiled"))


def test_a_forced_backend_is_the_one_that_runs():
    said = rg.explain("rope_backward", *arrays(ROPE), backend="portable")
    assert said.backend == "portable"
    assert "portable is asked for" in str(said)


def test_copies_are_named():
    said = str(rg.explain("qkv_rope_backward", *arrays(QKV)))
    assert "three weights into one matrix 64 x 16" in said
    assert "hidden_states" not in said
    case = [np.asfortranarray(x) if name == "hidden_states" else x for name, x in QKV.inputs.items()]
    assert "copies hidden_states into a dense float32 matrix" in str(rg.explain("qkv_rope_backward", *case))
    half = [x.astype(np.float16) for x in arrays(ROPE)]
    said = str(rg.explain("rope_backward", *half, backend="portable"))
    assert "copies every float16 array to float32" in said


def test_torch_tensors_go_to_the_portable_backend_and_the_reason_is_shown():
    need("torch", "interop")
    said = rg.explain("rope_backward", *arrays(ROPE, "torch"))
    assert said.backend == "portable"
    assert said.why_not["numpy_tiled"] == "it runs NumPy arrays, these are of torch"
    with pytest.raises(rg.SpecError, match="'numpy_tiled' cannot run this: it runs NumPy arrays"):
        rg.rope_backward(*arrays(ROPE, "torch"), backend="numpy_tiled")


def test_torch_switches_that_round_products_are_refused_not_obeyed():
    torch = need("torch", "interop")
    tensors = arrays(QKV, "torch")
    kept = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with pytest.raises(rg.SpecError, match=r"is 'medium' and would break precision='highest'"):
            rg.qkv_rope_backward(*tensors)
        with pytest.raises(rg.SpecError, match="would break precision='high'"):
            rg.qkv_rope_backward(*tensors, precision="high")
        rg.qkv_rope_backward(*tensors, precision="medium")
        rg.rope_backward(*arrays(ROPE, "torch"))  # has no matrix products
    finally:
        torch.set_float32_matmul_precision(kept)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(rg.SpecError, match="autocast is on for cpu"):
        rg.qkv_rope_backward(*tensors)


def test_out_takes_no_part_in_autograd():
    torch = need("torch", "interop")
    tensors = [x.clone().requires_grad_() for x in arrays(ROPE, "torch")]
    out = tuple(torch.zeros_like(x, requires_grad=False) for x in tensors[2:])
    for _ in range(2):
        rg.rope_backward(*tensors, out=out, accumulate=True)
    assert not any(x.requires_grad for x in out)


def test_jax_products_do_not_follow_its_global_setting():
    jax = need("jax", "interop")
    right = rg.qkv_rope_backward(*arrays(QKV, "jax"))
    with jax.default_matmul_precision("bfloat16"):
        again = rg.qkv_rope_backward(*arrays(QKV, "jax"))
    for a, b in zip(right, again, strict=True):
        assert np.array_equal(a, b)


def test_works_inside_jax_jit_and_under_torch_autograd():
    jax = need("jax", "interop")
    inputs = arrays(ROPE, "jax")
    eager, jitted = rg.rope_backward(*inputs), jax.jit(rg.rope_backward)(*inputs)
    for a, b in zip(eager, jitted, strict=True):
        assert np.allclose(a, b, rtol=0, atol=8 * np.finfo(np.float32).eps * np.abs(a).max())
    torch = need("torch", "interop")
    tensors = [x.clone().requires_grad_() for x in arrays(ROPE, "torch")]
    grads = rg.rope_backward(*tensors)
    assert torch.autograd.grad(grads.grad_q.sum(), tensors[0])[0].shape == tensors[0].shape


def test_explain_computes_and_writes_nothing():
    out = tuple(
        np.full(shape, 7, dtype) for need in ROPE.spec.needs for shape, dtype in [ROPE.spec.output(need)]
    )
    rg.explain("rope_backward", *arrays(ROPE), out=out)
    assert all((x == 7).all() for x in out)


def test_an_unknown_operation_or_number_of_arrays_is_refused():
    with pytest.raises(rg.SpecError, match="operation 'rope' is unknown: it must be 'rope_backward'"):
        rg.explain("rope", *arrays(ROPE))
    with pytest.raises(rg.SpecError, match="5 arrays given: the operation takes 6"):
        rg.explain("rope_backward", *arrays(ROPE)[:5])
