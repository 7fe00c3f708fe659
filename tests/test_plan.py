"""Plans: the public function's answers and refusals, remembered calls, pickles and threads."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import ropegrad as rg
from ropegrad import plan
from ropegrad.repeats import Last, key_of
from ropegrad.spec import QkvSpec, RopeSpec
from ropegrad.verify.draws import make_case
from ropegrad.verify.runners import options

SPEC = RopeSpec(batch=2, heads=6, kv_heads=2, seq=5, head_dim=8, rotary_dim=8, table_batch=2)
SPECS = {
    "all": SPEC,
    "q alone": replace(SPEC, kv_heads=None, needs=("q",)),
    "added": replace(SPEC, accumulate=True, layout="sbhd", pairing="interleaved"),
    "tables only": replace(SPEC, needs=("sin",), table="half", table_batch=None, dtype="float16"),
}


def call_of(spec):
    """Inputs, and outputs or None, as a call takes them."""
    case = make_case(spec, 3)
    prior = {name: x.copy() for name, x in case.prior.items()}
    return list(case.inputs.values()), tuple(prior.get(n) for n in rg.RopeGrads._fields) if prior else None


@pytest.mark.parametrize("name", SPECS)
def test_a_plan_gives_what_the_function_gives(name):
    spec = SPECS[name]
    arrays, out = call_of(spec)
    right = rg.rope_backward(*arrays, **options(spec), out=out)
    right = [None if x is None else x.copy() for x in right]
    arrays, out = call_of(spec)
    got = rg.plan_rope_backward(spec)(*arrays, out=out)
    assert isinstance(got, rg.RopeGrads)
    assert all(np.array_equal(a, b) for a, b in zip(got, right, strict=True) if b is not None)
    assert [x is None for x in got] == [x is None for x in right]


def test_arrays_of_another_spec_are_refused():
    plan = rg.plan_rope_backward(SPEC)
    with pytest.raises(rg.SpecError, match="another spec than the plan: heads 12, planned 6"):
        plan(*call_of(replace(SPEC, heads=12))[0])
    with pytest.raises(rg.SpecError, match="dtype 'float16', planned 'float32'"):
        plan(*call_of(replace(SPEC, dtype="float16"))[0])
    with pytest.raises(rg.SpecError, match="5 arrays given: a plan takes 6"):
        plan(*call_of(SPEC)[0][:5])
    with pytest.raises(rg.SpecError, match="out is a list of 4"):
        plan(*call_of(SPEC)[0], out=[None] * 4)


def test_an_impossible_backend_is_refused_when_the_plan_is_made():
    with pytest.raises(rg.SpecError, match="'cupy_fused' cannot run this"):
        rg.plan_rope_backward(SPEC, backend="cupy_fused")
    with pytest.raises(rg.SpecError, match="backend='other' is unknown"):
        rg.plan_rope_backward(SPEC, backend="other")


def test_a_plan_explains_itself():
    plan = rg.plan_rope_backward(SPEC, backend="numpy_tiled")
    assert plan.explain() == "backend: numpy_tiled\n  reads 5760 bytes, writes 3200"
    assert plan.workspace_bytes is None
    with pytest.raises(rg.SpecError, match=r"graph\(\) captures cupy_fused, this plan is of numpy_tiled"):
        plan.graph(*call_of(SPEC)[0], out=(None,) * 4)


def test_a_plan_for_a_gpu_explains_itself_where_there_is_none(monkeypatch):
    monkeypatch.setattr(plan, "no_gpu", lambda: "CuPy sees no GPU: ImportError: no libnvrtc")
    said = rg.plan_rope_backward(replace(SPEC, namespace="cupy"), backend="cupy_fused").explain()
    assert said.splitlines()[0] == "backend: cupy_fused"
    assert said.endswith("depends on the GPU: CuPy sees no GPU: ImportError: no libnvrtc")


def test_a_plan_can_be_pickled():
    plan = rg.plan_rope_backward(SPEC)
    again = pickle.loads(pickle.dumps(plan))
    assert again == plan
    arrays, _ = call_of(SPEC)
    assert all(np.array_equal(a, b) for a, b in zip(again(*arrays), plan(*arrays), strict=True))


def test_threads_may_share_a_plan():
    plan = rg.plan_rope_backward(SPEC)
    arrays, _ = call_of(SPEC)
    right = plan(*arrays)
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda _: plan(*arrays), range(40)):
            assert all(np.array_equal(a, b) for a, b in zip(got, right, strict=True))


# ---- what is remembered ----------------------------------------------------------------------------------


def on_device(ptr=1024, shape=(2, 3), strides=(12, 4), dtype="float32"):
    return SimpleNamespace(data=SimpleNamespace(ptr=ptr), shape=shape, strides=strides, dtype=np.dtype(dtype))


def test_a_call_is_known_by_everything_that_could_change_it():
    def known(*call):
        return next(i for i, key in enumerate(keys) if key == key_of(*call))

    calls = [
        ((on_device(), None), (on_device(2048),), "half", None),
        ((on_device(), None), (on_device(2052),), "half", None),
        ((on_device(shape=(3, 2)), None), (on_device(2048),), "half", None),
        ((on_device(strides=(4, 8)), None), (on_device(2048),), "half", None),
        ((on_device(dtype="int32"), None), (on_device(2048),), "half", None),
        ((None, on_device()), (on_device(2048),), "half", None),
        ((on_device(), None), (on_device(2048),), "interleaved", None),
        ((on_device(), None), (on_device(2048), None), "half", None),
    ]
    keys = [key_of(*call) for call in calls]
    assert [known(*call) for call in calls] == list(range(len(calls)))


class Thing:
    """Something that can be referred to weakly."""


def test_the_last_call_is_known_by_its_arrays_as_long_as_they_live():
    last, launches = Last(), []
    a, b, c = Thing(), Thing(), Thing()
    assert not last.call((a, None, b))
    last.keep((a, None, b), lambda: launches.append(1))
    assert last.call((a, None, b))
    for other in ((a, None, c), (a, b, None), (None, a, b), (a, None), (a, None, b, None), (b, None, a)):
        assert not last.call(other)
    del b
    assert not last.call((a, None, None))
    assert launches == [1]


@pytest.mark.parametrize("out", [None, [on_device()], (np.zeros(1),), (object(),)])
def test_what_cannot_be_known_is_not(out):
    assert key_of((on_device(),), out) is None
    assert key_of((on_device(),), (on_device(),), ["q"]) is None


@pytest.mark.parametrize("make", [rg.plan_rope_backward, rg.plan_qkv_rope_backward])
@pytest.mark.parametrize("spec", [None, "a spec", 3])
def test_a_plan_of_something_else_is_refused(make, spec):
    with pytest.raises(rg.SpecError, match=f"spec must be a ropegrad.*got {type(spec).__name__}"):
        make(spec)


def test_a_spec_is_kept_in_the_order_of_the_result_and_knows_what_is_there():
    assert replace(SPEC, needs=["sin", "q"]).needs == ("q", "sin")
    assert replace(SPEC, kv_heads=None).needs == ("q", "cos", "sin")
    assert replace(SPEC, batch=np.int64(2)).batch == 2
    inner = QkvSpec(rope=SPEC, hidden_size=8, needs=("v_weight", "q_weight"))
    assert inner.rope.needs == ()
    assert inner.needs == ("q_weight", "v_weight")


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (lambda: replace(SPEC, kv_heads=None, needs=("k",)), "no heads of k"),
        (lambda: replace(SPEC, needs=3), "no tuple of names"),
        (lambda: replace(SPEC, needs="q"), "is a string"),
        (lambda: replace(SPEC, batch=1.0), "batch=1.0 must be a whole number"),
        (lambda: QkvSpec(rope=None, hidden_size=8), "rope must be a ropegrad.RopeSpec, got NoneType"),
        (lambda: QkvSpec(rope=SPEC, hidden_size=-3), "hidden_size=-3 must be a whole number"),
        (
            lambda: rg.plan_qkv_rope_backward(QkvSpec(rope=replace(SPEC, adjoint="paired"), hidden_size=8)),
            "rope.adjoint is 'paired'",
        ),
    ],
)
def test_a_spec_that_no_call_could_have_is_refused(make, wanted):
    with pytest.raises(rg.SpecError, match=wanted):
        make()
