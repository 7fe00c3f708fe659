"""Who may be written, and that strides and aliases change no bit.

Without out= nothing that the caller passed is written, nor shared by a result. With out=, grad_q may stand
exactly on grad_q_embed or q (grad_k likewise); test_bad_calls has what is refused.

grad_q and grad_k are the same bits for any strides. So are the tables' gradients, except that `portable`
leaves the order of the sum over heads to the namespace: there they are compared in whole numbers, which add
up exactly.
"""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from conftest import need
from hypothesis import assume, given, note
from hypothesis import strategies as st

import ropegrad as rg
from ropegrad.backends import BACKENDS
from ropegrad.spec import LAYOUTS, PAIRINGS
from ropegrad.verify import draws
from ropegrad.verify.placing import MEMORY
from ropegrad.verify.strategies import SEEDS, qkv_specs, rope_specs

ANY = rg.RopeSpec(batch=1, heads=1, kv_heads=1, seq=1, head_dim=2, rotary_dim=2)
CPU = [backend.name for backend in BACKENDS if backend.why_not(ANY) is None]
ORDERED = [name for name in CPU if name != "portable"]  # their sums over heads run in the heads' order
NAMESPACES = {
    "numpy": ("numpy", "test"), "torch": ("torch", "interop"), "jax": ("jax.numpy", "interop"),
    "dask": ("dask.array", "dask"), "array_api_strict": ("array_api_strict", "test"),
}  # fmt: skip
GRADS = {"q": "grad_q_embed", "k": "grad_k_embed"}


def words(spec):
    geometry = spec if isinstance(spec, rg.RopeSpec) else spec.rope
    return {"table": geometry.table, "layout": geometry.layout, "pairing": geometry.pairing}


def backward(spec, inputs, out=None, backend=None):
    """Our gradients by name, without grad_; `out` maps names to arrays."""
    is_rope = isinstance(spec, rg.RopeSpec)
    kind = rg.RopeGrads if is_rope else rg.QkvGrads
    if not is_rope and any(need.endswith("bias") for need in spec.needs):
        kind = rg.QkvBiasGrads
    options = words(spec) | {"needs": spec.needs, "backend": backend}
    if is_rope:
        options["adjoint"] = spec.adjoint
    if out is not None:
        options["out"] = tuple(out.get(name.removeprefix("grad_")) for name in kind._fields)
        options["accumulate"] = (spec if is_rope else spec.rope).accumulate
    operation = rg.rope_backward if is_rope else rg.qkv_rope_backward
    results = operation(*inputs.values(), **options)._asdict()
    return {name.removeprefix("grad_"): x for name, x in results.items() if x is not None}


def same_bits(got, expected):
    return {name: x.tobytes() == expected[name].tobytes() for name, x in got.items()}


def dense(inputs):
    """Contiguous twins: fresh memory, C order."""
    return {name: None if x is None else np.array(x, order="C") for name, x in inputs.items()}


def placed(rng, inputs, memory):
    """The values of `inputs` in memory of this kind; stride 0 changes values, so take the twin afterwards."""
    return {name: None if x is None else draws.place(rng, x, memory, name) for name, x in inputs.items()}


# ---- nothing is written without out= ---------------------------------------------------------------------


def whole(spec, seed=0):
    """Inputs in small whole numbers."""
    rng = np.random.default_rng(seed)
    shapes = draws.input_shapes(spec)
    order = draws.ROPE_INPUTS if isinstance(spec, rg.RopeSpec) else draws.QKV_INPUTS
    made = {name: rng.integers(-9, 10, shapes[name][0]) for name in order if name in shapes}
    return {name: made[name].astype(np.float32) if name in made else None for name in order}


ROPE = rg.RopeSpec(batch=2, heads=4, kv_heads=2, seq=3, head_dim=6, rotary_dim=4)
CALLS = [
    *(replace(ROPE, layout=layout, pairing=pairing) for layout in LAYOUTS for pairing in PAIRINGS),
    replace(ROPE, rotary_dim=0), replace(ROPE, rotary_dim=6), replace(ROPE, table="half", table_batch=2),
    rg.QkvSpec(rope=replace(ROPE, needs=()), hidden_size=5),
    rg.QkvSpec(rope=replace(ROPE, needs=(), rotary_dim=0), hidden_size=5, needs=("v_weight", "v_bias")),
]  # fmt: skip


def everything(spec, arrays):
    """The results of the backward and of the forward."""
    results = list(backward(spec, arrays).values())
    if isinstance(spec, rg.RopeSpec):
        forward = {name: arrays[name] for name in ("q", "k", "cos", "sin")}
        return results + list(rg.rope(**forward, **words(spec)))
    forward = {name: x for name, x in arrays.items() if not name.startswith("grad")}
    return results + list(rg.qkv_rope(**forward, **words(spec), head_dim=spec.rope.head_dim))


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_inputs_are_neither_written_nor_shared_by_results(namespace):
    xp = need(*NAMESPACES[namespace])
    for spec in CALLS:
        inputs = whole(spec)
        before = {name: x.copy() for name, x in inputs.items()}
        arrays = {
            name: xp.asarray(x) for name, x in inputs.items()
        }  # NumPy's memory, wherever it can be shared
        for result in everything(spec, arrays):
            if namespace == "dask":
                result.compute()
            elif namespace != "jax":
                result[...] = 77.0
        for name in inputs:
            assert np.array_equal(inputs[name], before[name])
            assert np.array_equal(np.asarray(arrays[name]), before[name])


@pytest.mark.parametrize("backend", CPU)
@given(spec=rope_specs() | qkv_specs(), seed=SEEDS, memory=st.sampled_from((*MEMORY, "mixed")))
def test_a_second_call_gives_the_same_bits_and_finds_the_same_inputs(backend, spec, seed, memory):
    case = draws.make_case(spec, seed, memory=memory)
    before = {name: x.tobytes() for name, x in case.inputs.items() if x is not None}
    first, second = (backward(spec, case.inputs, backend=backend) for _ in range(2))
    assert all(same_bits(first, second).values())
    assert {name: x.tobytes() for name, x in case.inputs.items() if x is not None} == before


@pytest.mark.parametrize("backend", CPU)
def test_a_second_call_on_several_threads_gives_the_same_bits(backend):
    spec = replace(ROPE, batch=3, heads=16, kv_heads=8, seq=100, head_dim=128, rotary_dim=96)
    inputs = draws.make_case(spec, 1).inputs
    first, second = (backward(spec, inputs, backend=backend) for _ in range(2))
    assert all(same_bits(first, second).values())


# ---- any strides -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", CPU)
@given(spec=rope_specs(), seed=SEEDS, memory=st.sampled_from((*MEMORY, "mixed")))
def test_strides_of_rope_inputs_change_no_bit(backend, spec, seed, memory):
    inputs = draws.make_case(spec, seed, memory=memory).inputs
    equal = same_bits(backward(spec, inputs, backend=backend), backward(spec, dense(inputs), backend=backend))
    if backend not in ORDERED:
        equal = {name: same for name, same in equal.items() if name in ("q", "k")}
    assert all(equal.values()), equal


@pytest.mark.parametrize("backend", CPU)
@given(spec=rope_specs(dtypes=("float32",)), seed=SEEDS, memory=st.sampled_from((*MEMORY, "mixed")))
def test_strides_of_rope_inputs_change_no_value_of_a_table_gradient(backend, spec, seed, memory):
    inputs = placed(np.random.default_rng(seed), whole(spec, seed), memory)
    got, expected = (backward(spec, x, backend=backend) for x in (inputs, dense(inputs)))
    assert all(np.array_equal(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize("backend", CPU)
@given(spec=qkv_specs(dtypes=("float32",)), seed=SEEDS, memory=st.sampled_from((*MEMORY, "mixed")))
def test_strides_of_qkv_inputs_change_no_value(backend, spec, seed, memory):
    inputs = placed(np.random.default_rng(seed), whole(spec, seed), memory)
    got, expected = (backward(spec, x, backend=backend) for x in (inputs, dense(inputs)))
    assert all(np.array_equal(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize("backend", CPU)
@given(
    spec=rope_specs() | qkv_specs(),
    seed=SEEDS,
    memory=st.sampled_from([m for m in MEMORY if m != "expanded"]),
)
def test_outputs_of_any_strides_are_filled_and_nothing_beside_them(backend, spec, seed, memory):
    case, rng = draws.make_case(spec, seed), np.random.default_rng(seed)
    accumulate = (spec if isinstance(spec, rg.RopeSpec) else spec.rope).accumulate
    prior = {n.removeprefix("grad_"): x for n, x in case.prior.items()}
    held = prior or {
        n: np.full_like(x, np.nan) for n, x in backward(spec, case.inputs, backend=backend).items()
    }
    out = {name: MEMORY[memory](rng, x.copy()) for name, x in held.items()}
    twin = {name: np.array(x, order="C") for name, x in held.items()}
    got, expected = (backward(spec, case.inputs, out=o, backend=backend) for o in (out, twin))
    assert all(got[name] is out[name] for name in got)
    assert all(same_bits(got, expected).values())
    assert accumulate or all(
        np.array_equal(expected[name], x) for name, x in backward(spec, case.inputs, backend=backend).items()
    )
    if memory in ("sliced", "stepped"):
        for array in out.values():
            assert np.isnan(array.base).sum() == array.base.size - array.size


def heads_innermost(x):
    """The same values of [B, H, S, D], a token's heads side by side in memory."""
    return np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)


@pytest.mark.parametrize("backend", ORDERED)
@pytest.mark.parametrize("seq", [3, 300], ids=["small", "tiled"])
def test_heads_side_by_side_in_memory_change_no_bit(backend, seq):
    """NumPy would add such heads up several at a time, in another order."""
    spec = replace(ROPE, heads=8, kv_heads=8, seq=seq, head_dim=16, rotary_dim=16)
    inputs = draws.make_case(spec, 2).inputs
    moved = {name: heads_innermost(x) if x.ndim == 4 else x for name, x in inputs.items()}
    results = (backward(spec, x, backend=backend) for x in (moved, inputs))
    equal = same_bits(*results)
    assert all(equal.values()), equal


@pytest.mark.parametrize("backend", CPU)
@pytest.mark.parametrize("seq", [3, 300], ids=["small", "tiled"])
def test_a_gradient_with_stride_0_over_heads_is_no_common_factor(backend, seq):
    """1e-30·3e38 + 1e-30·3e38 is small; 1e-30·(3e38 + 3e38) is not."""
    spec = replace(ROPE, heads=8, kv_heads=8, seq=seq, head_dim=16, rotary_dim=16)
    inputs = draws.make_case(spec, 2).inputs
    for side, grad in GRADS.items():
        inputs[side] = heads_innermost(np.full_like(inputs[side], 3e38))
        inputs[grad] = np.broadcast_to(np.float32(1e-30), inputs[grad].shape)
    results = backward(replace(spec, needs=("cos", "sin")), inputs, backend=backend)
    assert all(np.isfinite(x).all() for x in results.values())


def torch_views(torch, x):
    """The tensor in memory of other kinds: axes in another order, a window, a step, stride 0."""
    yield x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    yield torch.nn.functional.pad(x, (1, 2, 0, 0, 2, 1), value=torch.nan)[:, 2:-1, :, 1:-2]
    yield torch.stack((x, x * torch.nan), dim=-1)[..., 0]
    for axis in range(x.ndim):
        yield x.narrow(axis, 0, 1).expand_as(x)
    yield torch.ones(()).expand_as(x)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_strides_of_tensors_change_nothing(layout, pairing):
    torch = need("torch", "interop")
    spec = replace(ROPE, layout=layout, pairing=pairing)
    inputs = {name: torch.from_numpy(x) for name, x in whole(spec).items()}
    for name in GRADS.values() | GRADS.keys():
        for view in torch_views(torch, inputs[name]):
            got, expected = (backward(spec, inputs | {name: x}) for x in (view, view.contiguous().clone()))
            assert all(torch.equal(got[need], expected[need]) for need in expected)


# ---- out= on an input ------------------------------------------------------------------------------------


def aliases(spec, inputs, prior, on):
    """Arguments with an output exactly on one input of its side, which holds what is accumulated to."""
    out = {name: np.full(*spec.output(name)) for name in spec.needs}
    for side in ("q", "k"):
        if side in spec.needs:
            target = GRADS[side] if on != "input" else side
            out[side] = inputs[target]
    return out | {name: x for name, x in prior.items() if name in ("cos", "sin")}


@pytest.mark.parametrize("on", ["gradient", "input", "both"])
@pytest.mark.parametrize("backend", CPU)
@given(spec=rope_specs(), seed=SEEDS, memory=st.sampled_from([m for m in MEMORY if m != "expanded"]))
def test_gradients_written_onto_an_input_are_right(backend, on, spec, seed, memory):
    assume({"q", "k"} & set(spec.needs))
    rng = np.random.default_rng(seed)
    values = dense(draws.make_case(spec, seed).inputs)
    inputs = {name: None if x is None else MEMORY[memory](rng, x) for name, x in values.items()}
    if on == "both":  # q and its upstream gradient are one array
        inputs |= {side: inputs[grad] for side, grad in GRADS.items()}
    twins = dense(inputs)
    tables = {name for name in ("cos", "sin") if name in spec.needs}
    targets = {side: inputs[side if on == "input" else GRADS[side]] for side in {"q", "k"} & set(spec.needs)}
    fresh = {name: np.array(x, order="C") for name, x in targets.items()}
    prior = {name: np.ones(spec.table_shape, inputs["cos"].dtype) for name in tables}
    got = backward(spec, inputs, out=targets | prior, backend=backend)
    expected = backward(
        spec, twins, out=fresh | {n: np.ones_like(x) for n, x in prior.items()}, backend=backend
    )
    note(f"{memory} {targets.keys()}")
    assert all(got[name] is targets[name] for name in targets)
    compared = same_bits(got, expected)
    if backend not in ORDERED:
        compared = {name: same for name, same in compared.items() if name not in tables}
    assert all(compared.values()), compared
    touched = {id(x) for x in targets.values()}
    assert all(
        np.array_equal(x, twins[n]) for n, x in inputs.items() if x is not None and id(x) not in touched
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_tensors_written_onto_an_input_are_right(layout, pairing):
    torch = need("torch", "interop")
    spec = replace(ROPE, layout=layout, pairing=pairing)
    for accumulate in (False, True):
        each = replace(spec, accumulate=accumulate)
        for q_on, k_on in (("grad_q_embed", "k"), ("q", "grad_k_embed")):
            x = {name: torch.from_numpy(array) for name, array in whole(spec).items()}
            tables = [{name: torch.zeros_like(x[name]) for name in ("cos", "sin")} for _ in range(2)]
            fresh = {"q": x[q_on].clone(), "k": x[k_on].clone()} | tables[0]
            expected = backward(each, x, out=fresh)
            got = backward(each, x, out={"q": x[q_on], "k": x[k_on]} | tables[1])
            assert all(torch.equal(got[name], expected[name]) for name in expected)
            assert got["q"] is x[q_on]


# ---- one buffer for q, k and v ---------------------------------------------------------------------------


def parts(buffer, spec):
    """Views of a fused buffer [B, S, (H + 2·Hkv)·D] as q, k and v in the spec's layout."""
    heads = buffer.reshape(*buffer.shape[:2], -1, spec.head_dim)
    cuts = (0, spec.heads, spec.heads + spec.kv_heads, heads.shape[2])
    order = {"bshd": (0, 1, 2, 3), "bhsd": (0, 2, 1, 3), "sbhd": (1, 0, 2, 3)}[spec.layout]
    return [heads[:, :, a:b].transpose(order) for a, b in pairwise(cuts)]


def fused(rng, spec, poison=False):
    shape = (spec.batch, spec.seq, (spec.heads + 2 * spec.kv_heads) * spec.head_dim)
    return np.full(shape, np.nan, np.float32) if poison else rng.standard_normal(shape, np.float32)


@pytest.mark.parametrize("backend", CPU)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_parts_of_one_buffer_serve_as_inputs_and_outputs_of_rope(backend, layout, pairing):
    spec, rng = replace(ROPE, layout=layout, pairing=pairing), np.random.default_rng(4)
    (grad_q, grad_k, _), (q, k, _) = parts(fused(rng, spec), spec), parts(fused(rng, spec), spec)
    cos, sin = rng.standard_normal((2, *spec.table_shape), np.float32)
    inputs = dict(zip(draws.ROPE_INPUTS, (grad_q, grad_k, q, k, cos, sin), strict=True))
    expected = backward(spec, dense(inputs), backend=backend)

    buffer = fused(rng, spec, poison=True)
    out = dict(zip("qkv", parts(buffer, spec), strict=True))
    untouched = out.pop("v")
    tables = {name: np.empty_like(cos) for name in ("cos", "sin")}
    got = backward(spec, inputs, out=out | tables, backend=backend)
    assert all(same_bits({n: got[n] for n in "qk"}, expected).values())
    assert backend not in ORDERED or all(same_bits(got, expected).values())
    assert np.isnan(untouched).all()
    assert np.isnan(buffer).sum() == untouched.size

    upstream = {"q": grad_q, "k": grad_k}  # and the very buffer of the upstream gradients
    in_place = backward(spec, inputs, out=upstream | tables, backend=backend)
    assert all(same_bits({n: in_place[n] for n in "qk"}, expected).values())


@pytest.mark.parametrize("backend", CPU)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_of_one_buffer_serve_as_inputs_and_outputs_of_qkv(backend, layout):
    rope = replace(ROPE, layout=layout, needs=())
    spec, rng = rg.QkvSpec(rope=rope, hidden_size=5), np.random.default_rng(5)
    rows = np.cumsum([0, *map(spec.rows, "qkv")])
    hidden = rng.standard_normal(spec.hidden_shape, np.float32)
    weights = rng.standard_normal((rows[-1], 5), np.float32)
    cos, sin = rng.standard_normal((2, *rope.table_shape), np.float32)
    blocks = [weights[a:b] for a, b in pairwise(rows)]
    arrays = (*parts(fused(rng, rope), rope), hidden, *blocks, cos, sin)
    inputs = dict(zip(draws.QKV_INPUTS, arrays, strict=True))
    expected = backward(spec, dense(inputs), backend=backend)

    buffer = np.full((rows[-1] + 2, 5), np.nan, np.float32)  # a row too many before and after
    names = ("q_weight", "k_weight", "v_weight")
    out = {n: buffer[1 + a : 1 + b] for n, (a, b) in zip(names, pairwise(rows), strict=True)}
    got = backward(spec, inputs, out=out | {"hidden_states": np.empty_like(hidden)}, backend=backend)
    assert all(same_bits(got, expected).values())
    assert np.isnan(buffer[[0, -1]]).all()
    assert np.isnan(buffer).sum() == 2 * 5


def test_in_place_where_an_axis_of_one_has_another_stride():
    rng = np.random.default_rng(1)
    grad, x = rng.standard_normal((2, 2, 3, 4), dtype=np.float32)
    q, k = (
        rng.standard_normal((1, 2, 3, 4), dtype=np.float32),
        rng.standard_normal((1, 2, 3, 4), dtype=np.float32),
    )
    cos, sin = rng.standard_normal((2, 3, 4), dtype=np.float32)
    right = rg.rope_backward(grad[None], x[None].copy(), q, k, cos, sin)
    out = (grad.reshape(1, 2, 3, 4), np.empty_like(k), np.empty_like(cos), np.empty_like(sin))
    assert grad[None].strides != out[0].strides
    got = rg.rope_backward(grad[None], x[None].copy(), q, k, cos, sin, out=out)
    assert all(np.array_equal(a, b) for a, b in zip(got, right, strict=True))
