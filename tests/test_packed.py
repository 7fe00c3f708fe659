"""One array for the weights of q, k and v: the same bits as three, in whatever form it is asked for."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
from conftest import need, skip

import ropegrad as rg
from ropegrad import packed
from ropegrad.backends.cupy_plain import no_gpu
from ropegrad.spec import LAYOUTS, PACKED_NEEDS, QKV_NEEDS, parts_of
from ropegrad.verify.draws import make_case
from ropegrad.verify.runners import options, to_namespace, to_numpy

ROPE = rg.RopeSpec(batch=2, heads=6, kv_heads=2, seq=5, head_dim=8, rotary_dim=6, table_batch=2, needs=())
SPEC = rg.QkvSpec(rope=ROPE, hidden_size=7, needs=QKV_NEEDS)
SUBSETS = [None, *((name,) for name in PACKED_NEEDS), PACKED_NEEDS[1:], PACKED_NEEDS[::-1]]
OTHERS = {
    "torch": "interop", "jax": "interop", "dask": "dask", "array_api_strict": "test",
}  # fmt: skip
WEIGHTS = ("q_weight", "k_weight", "v_weight")


def packed_call(arrays, xp=np):
    """The same call with the three weights in one array."""
    one = getattr(xp, "concat", None) or xp.concatenate
    return arrays | dict.fromkeys(WEIGHTS) | {"qkv_weight": one([arrays[name] for name in WEIGHTS])}


def expected(separate):
    """The packed result by name, from the gradients of three weights; None where one is missing."""
    made = {}
    for name in rg.QkvPackedGrads._fields:
        parts = [getattr(separate, own, None) for own in parts_of(name)]
        made[name] = None if parts[0] is None else np.concatenate([to_numpy(x) for x in parts])
    return made


def of_parts(needs):
    return None if needs is None else [own for name in needs for own in parts_of(name)]


def assert_same(got, right):
    assert type(got) is rg.QkvPackedGrads
    for name, x in got._asdict().items():
        assert (x is None) == (right[name] is None), name
        if x is not None:
            x = to_numpy(x)
            assert (x.shape, x.dtype) == (right[name].shape, right[name].dtype)
            assert x.tobytes() == right[name].tobytes(), name


def room(needs=PACKED_NEEDS, fill=np.nan):
    """For out=: the weight's gradient lies in every second row of a larger array."""
    made = {name: np.full((2 * SPEC.output(name)[0][0], *SPEC.output(name)[0][1:]), fill, np.float32)[::2]
            for name in PACKED_NEEDS}  # fmt: skip
    return tuple(made[name] if name in needs else None for name in PACKED_NEEDS)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_bits_as_with_three_weights(backend, layout, dtype):
    spec = replace(SPEC, rope=replace(ROPE, layout=layout, dtype=dtype, pairing="interleaved"))
    arrays, words = make_case(spec, 1).inputs, options(spec) | {"backend": backend}
    for needs in SUBSETS:
        right = rg.qkv_rope_backward(**arrays, **words | {"needs": of_parts(needs)})
        assert_same(rg.qkv_rope_backward(**packed_call(arrays), **words | {"needs": needs}), expected(right))


@pytest.mark.parametrize("needs", SUBSETS[1:])
@pytest.mark.parametrize("accumulate", [False, True])
def test_out_is_written_and_added_to(backend, needs, accumulate):
    arrays = make_case(SPEC, 2).inputs
    words = {"accumulate": accumulate, "backend": backend}
    fields = rg.QkvBiasGrads._fields if "qkv_bias" in needs else rg.QkvGrads._fields
    apart = {f"grad_{name}": np.full(SPEC.output(name)[0], 3, np.float32) for name in of_parts(needs)}
    right = rg.qkv_rope_backward(**arrays, **words, needs=of_parts(needs), out=tuple(map(apart.get, fields)))
    out = room(needs, 3 if accumulate else np.nan)
    got = rg.qkv_rope_backward(**packed_call(arrays), **words, needs=needs, out=out)
    assert all(x is y for x, y in zip(got, out, strict=True))
    assert_same(got, expected(right))


@pytest.mark.parametrize("namespace", OTHERS)
def test_any_library(namespace):
    xp = need({"jax": "jax.numpy", "dask": "dask.array"}.get(namespace, namespace), OTHERS[namespace])
    import array_api_compat

    arrays = {name: to_namespace(x, namespace) for name, x in make_case(SPEC, 3).inputs.items()}
    one = packed_call(arrays, array_api_compat.array_namespace(arrays["cos"]))
    for needs in SUBSETS:
        right = expected(rg.qkv_rope_backward(**arrays, needs=of_parts(needs)))
        assert_same(rg.qkv_rope_backward(**one, needs=needs), right)
    if namespace == "torch":
        right = expected(rg.qkv_rope_backward(**arrays, needs=of_parts(PACKED_NEEDS)))
        out = tuple(xp.from_numpy(np.full(SPEC.output(name)[0], np.nan, "f4")) for name in PACKED_NEEDS)
        got = rg.qkv_rope_backward(**one, needs=PACKED_NEEDS, out=out)
        assert all(x is y for x, y in zip(got, out, strict=True))
        assert_same(got, right)


@pytest.mark.parametrize("name", ["cupy_plain", "cupy_tensor"])
def test_cupy(name):
    cupy = need("cupy", "cuda13")
    if no_gpu() is not None:
        skip(no_gpu(), required=False)
    arrays = {name: to_namespace(x, "cupy") for name, x in make_case(SPEC, 3).inputs.items()}
    words = {"backend": name, "precision": "high"}
    for needs in SUBSETS:
        right = expected(rg.qkv_rope_backward(**arrays, **words, needs=of_parts(needs)))
        assert_same(rg.qkv_rope_backward(**packed_call(arrays, cupy), **words, needs=needs), right)
    out = tuple(cupy.full(SPEC.output(name)[0], cupy.nan, "f4") for name in PACKED_NEEDS)
    right = expected(rg.qkv_rope_backward(**arrays, **words, needs=of_parts(PACKED_NEEDS)))
    assert_same(
        rg.qkv_rope_backward(**packed_call(arrays, cupy), **words, needs=PACKED_NEEDS, out=out), right
    )


def test_torch_differentiates_the_packed_gradient():
    torch = need("torch", "interop")
    arrays = {name: to_namespace(x, "torch") for name, x in make_case(SPEC, 3).inputs.items()}
    one = packed_call(arrays, torch)
    hidden = one["hidden_states"].requires_grad_()
    rg.qkv_rope_backward(**one).grad_qkv_weight.sum().backward()
    assert bool(hidden.grad.abs().sum() > 0)


def test_jax_traces_it():
    jax = need("jax", "interop")
    arrays = {name: to_namespace(x, "jax") for name, x in make_case(SPEC, 3).inputs.items()}
    one = packed_call(arrays, jax.numpy)
    jitted, eager = jax.jit(rg.qkv_rope_backward)(**one), rg.qkv_rope_backward(**one)
    for a, b in zip(jitted[:2], eager[:2], strict=True):
        assert np.allclose(a, b, rtol=0, atol=64 * np.finfo(np.float32).eps * np.abs(b).max())


def test_an_unread_weight_need_not_be_passed():
    arrays = make_case(SPEC, 4).inputs
    right = rg.qkv_rope_backward(**packed_call(arrays), needs=("qkv_weight",))
    absent = arrays | dict.fromkeys(WEIGHTS)
    assert_same(rg.qkv_rope_backward(**absent, needs=iter(["qkv_weight"])), right._asdict())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_forward(backend, layout):
    words = {"layout": layout, "head_dim": 8, "backend": backend}
    case = make_case(replace(SPEC, rope=replace(ROPE, layout=layout)), 5)
    arrays = {name: x for name, x in case.inputs.items() if not name.startswith("grad")}
    bias = np.arange(SPEC.rows("qkv"), dtype=np.float32)
    biases = dict(zip(("q_bias", "k_bias", "v_bias"), np.split(bias, [48, 64]), strict=True))
    one = packed_call(arrays) | {"kv_heads": 2}
    for three, packed_bias in (({}, {}), (biases, {"qkv_bias": bias})):
        right = rg.qkv_rope(**arrays, **three, **words)
        got = rg.qkv_rope(**one, **packed_bias, **words)
        assert all(np.array_equal(a, b) for a, b in zip(got, right, strict=True))


def test_backends_read_and_write_views():
    arrays = packed_call(make_case(SPEC, 6).inputs)
    inputs = {name: x for name, x in arrays.items() if x is not None}
    handed = {}

    def run(spec, inputs, out):
        handed.update(inputs | out)
        return out

    results = packed.backward(run, SPEC, inputs, None)
    for whole, mine in (("qkv_weight", inputs), ("grad_qkv_weight", results), ("grad_qkv_bias", results)):
        starts = [handed[own].__array_interface__["data"][0] for own in parts_of(whole)]
        array = mine[whole]
        begin = array.__array_interface__["data"][0]
        assert starts == [begin + row * array.strides[0] for row in (0, 48, 64)]
    assert handed["hidden_states"] is inputs["hidden_states"]
    assert "qkv_weight" not in handed


def test_explain_and_plan():
    arrays = packed_call(make_case(SPEC, 7).inputs)
    weight = arrays.pop("qkv_weight")
    said = rg.explain("qkv_rope_backward", *arrays.values(), qkv_weight=weight, out=(*room()[:2], None))
    assert "three weights into one matrix 80 x 7" in str(said)
    plan = pickle.loads(pickle.dumps(rg.plan_qkv_rope_backward(SPEC)))
    right = rg.qkv_rope_backward(**arrays, qkv_weight=weight, needs=PACKED_NEEDS)
    assert_same(plan(*arrays.values(), qkv_weight=weight), right._asdict())
    out = room()
    got = plan(*arrays.values(), qkv_weight=weight, out=out)
    assert all(x is y for x, y in zip(got, out, strict=True))
    assert_same(got, right._asdict())
    some = rg.plan_qkv_rope_backward(replace(SPEC, needs=("k_weight",)))
    with pytest.raises(rg.SpecError, match=r"needs \('q_weight', .*'v_weight'\), planned \('k_weight',\)"):
        some(*arrays.values(), qkv_weight=weight)
    with pytest.raises(rg.SpecError, match="8 arrays given: the operation takes 9, grad_query"):
        plan(*list(arrays.values())[:8], qkv_weight=weight)
