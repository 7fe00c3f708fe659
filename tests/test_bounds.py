"""Right kernels stay within the bounds in any order of summation; planted faults do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropegrad.arrays import DTYPES, numpy_dtype
from ropegrad.spec import QKV_WEIGHTS, QkvSpec, RopeSpec
from ropegrad.verify import bounds, oracle
from ropegrad.verify.case import Case, rope_geometry
from ropegrad.verify.judge import Must, effective_bits, gate, judge_nonfinite, worst_ratio

Array = np.ndarray[Any, Any]
Outputs = dict[str, Array]
TO_BHSD = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (1, 2, 0, 3)}
FROM_BHSD = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3)}


# ---- kernels in a chosen arithmetic --------------------------------------------------------------------


def sequential(a: Array, b: Array) -> Array:
    total = np.zeros(np.broadcast_shapes(a.shape, b.shape)[1:], a.dtype)
    for left, right in zip(a, b, strict=True):
        total = total + left * right
    return total


def reverse(a: Array, b: Array) -> Array:
    return sequential(a[::-1], b[::-1])


def blocks(a: Array, b: Array) -> Array:
    parts = [sequential(a[i : i + 3], b[i : i + 3]) for i in range(0, len(a), 3)]
    ones = np.ones((len(parts),), a.dtype).reshape(-1, *[1] * (a.ndim - 1))
    return sequential(np.stack(parts), ones) if parts else sequential(a, b)


def pairwise(a: Array, b: Array) -> Array:
    terms = list(a * b)
    while len(terms) > 1:
        terms = [sum(terms[i + 1 : i + 2], terms[i]) for i in range(0, len(terms), 2)]
    return terms[0] if terms else sequential(a, b)


def fused(a: Array, b: Array) -> Array:
    """Multiply-add with one rounding: the product is exact in float64."""
    total = np.zeros(np.broadcast_shapes(a.shape, b.shape)[1:], a.dtype)
    for left, right in zip(a.astype(np.float64), b.astype(np.float64), strict=True):
        total = (total.astype(np.float64) + left * right).astype(a.dtype)
    return total


def wide(a: Array, b: Array) -> Array:
    """Everything in float64, rounded once."""
    return (a.astype(np.float64) * b.astype(np.float64)).sum(axis=0).astype(a.dtype)


ORDERS: dict[str, Callable[[Array, Array], Array]] = {
    f.__name__: f for f in (sequential, reverse, blocks, pairwise, fused, wide)
}


def pairing(spec: RopeSpec) -> tuple[Array, Array, Array]:
    """p(j), σ(j) and the table column of channel j, for the first R channels."""
    j, half = np.arange(spec.rotary_dim), spec.rotary_dim // 2
    if spec.pairing == "interleaved":
        return j ^ 1, np.where(j % 2 == 0, -1, 1), j if spec.table == "full" else j // 2
    return (j + half) % max(2 * half, 1), np.where(j < half, -1, 1), j if spec.table == "full" else j % half


def tables(case: Case, kind: Any) -> list[Array]:
    """cos and sin, [batch or 1, 1, seq, R], a column a channel."""
    _, _, column = pairing(rope_geometry(case))
    found = [case.inputs[name].astype(kind)[..., column] for name in ("cos", "sin")]
    return [(a if a.ndim == 3 else a[None])[:, None] for a in found]


def rotate_back(case: Case, upstream: Array, kind: Any, add: Callable, *, own_sine: bool = False) -> Array:
    """[B, H, S, D] in dtype `kind`."""
    spec = rope_geometry(case)
    g = upstream.transpose(TO_BHSD[spec.layout]).astype(kind)
    if not spec.rotary_dim:
        return g
    p, sigma, _ = pairing(spec)
    cos, sin = tables(case, kind)
    sine = sin if own_sine or spec.adjoint == "paired" else sin[..., p]
    r = spec.rotary_dim
    factors = np.broadcast_arrays(cos, -sigma.astype(kind) * sine)
    rotated = add(np.stack([g[..., :r], g[..., p]]), np.stack(factors))
    return np.concatenate([rotated, g[..., r:]], axis=-1)


def rope_kernel(case: Case, order: str = "sequential", **faults: bool) -> Outputs:
    """The gradients of a rope case in its compute dtype, rounded once to the outputs' dtypes."""
    spec = case.spec
    add, kind = ORDERS[order], numpy_dtype(spec.compute)
    results = {}
    for name in case.outputs:
        if name in ("grad_q", "grad_k"):
            back = rotate_back(case, case.inputs[f"{name}_embed"], kind, add, **faults)
            result, dtype = back.transpose(FROM_BHSD[spec.layout]), spec.dtype
        else:
            result, dtype = table_kernel(case, name, kind, add), spec.table_dtype
        if spec.accumulate:
            result = case.prior[name].astype(kind) + result
        results[name] = result.astype(numpy_dtype(dtype))
    return results


def table_kernel(case: Case, name: str, kind: Any, add: Callable) -> Array:
    spec = case.spec
    p, sigma, column = pairing(spec)
    lefts, rights = [], []
    for side in ("q", "k"):
        if case.inputs[f"grad_{side}_embed"] is None or case.inputs[side] is None:
            continue
        g, x = (
            case.inputs[n].transpose(TO_BHSD[spec.layout]).astype(kind) for n in (f"grad_{side}_embed", side)
        )
        g, x = g[..., : spec.rotary_dim], x[..., : spec.rotary_dim]
        x = x if name == "grad_cos" else sigma.astype(kind) * x[..., p]
        lefts += list(g.transpose(1, 0, 2, 3))
        rights += list(x.transpose(1, 0, 2, 3))
    if spec.table_batch != spec.batch:
        lefts, rights = ([a[b : b + 1] for a in side for b in range(spec.batch)] for side in (lefts, rights))
    columns = spec.columns
    if spec.table == "half" and columns:
        groups = [np.flatnonzero(column == c) for c in range(columns)]
        lefts, rights = (
            [a[..., [group[m] for group in groups]] for a in side for m in (0, 1)] for side in (lefts, rights)
        )
    if not lefts:
        return np.zeros(spec.table_shape, kind)
    return add(np.stack(lefts), np.stack(rights)).reshape(spec.table_shape)


# ---- draws ---------------------------------------------------------------------------------------------


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, scale: int = 0) -> Array:
    narrow = rng.standard_normal(shape) * 2.0**scale
    return narrow.astype(np.float32 if dtype == "bfloat16" else dtype).astype(numpy_dtype(dtype))


def rope_case(seed: int = 0, scales: tuple[int, int, int] = (0, 0, 0), **options: Any) -> Case:
    """Normal draws times powers of two: upstream gradients, q and k, tables."""
    defaults: dict[str, Any] = {
        "batch": 2, "heads": 4, "kv_heads": 2, "seq": 5, "head_dim": 8, "rotary_dim": 8, "table_batch": 2,
    }  # fmt: skip
    spec = RopeSpec(**(defaults | options))
    rng = np.random.default_rng(seed)
    inputs: dict[str, Any] = {}
    for side, heads in (("q", spec.heads), ("k", spec.kv_heads)):
        for name, scale in ((f"grad_{side}_embed", scales[0]), (side, scales[1])):
            shape = spec.head_shape(heads or 0)
            inputs[name] = None if heads is None else normal(rng, shape, spec.dtype, scale)
    for name in ("cos", "sin"):
        inputs[name] = normal(rng, spec.table_shape, spec.table_dtype, scales[2])
    prior = {}
    for name in spec.needs if spec.accumulate else ():
        if inputs[name] is not None:
            dtype = spec.table_dtype if name in ("cos", "sin") else spec.dtype
            prior[f"grad_{name}"] = normal(rng, inputs[name].shape, dtype, min(scales[0], 10))
    return Case("drawn", spec, inputs, prior)


def worst(case: Case, got: Outputs, **contract: bool) -> dict[str, float]:
    """error/bound of every output."""
    expected = oracle.expected(case)
    limit = bounds.bounds(case, expected, **contract)
    must = judge_nonfinite(case, expected, limit)
    return {n: worst_ratio(got[n], expected[n], limit[n], must[n]).ratio for n in expected}


# ---- rope: right kernels -------------------------------------------------------------------------------


@given(st.data())
def test_right_rope_kernels_stay_within_the_bounds(data: st.DataObject) -> None:
    draw = data.draw
    dtype, table_dtype = (draw(st.sampled_from(DTYPES)) for _ in range(2))
    far = {"float64": 500, "float16": 12}
    scales = [
        draw(st.sampled_from([-far.get(d, 70), -far.get(d, 70) // 2, 0, 0, 0, far.get(d, 60) // 2]))
        for d in (dtype, dtype, table_dtype)
    ]
    batch = draw(st.integers(0, 3))
    case = rope_case(
        draw(st.integers(0, 2**32)), tuple(scales), dtype=dtype, table_dtype=table_dtype, batch=batch,
        heads=draw(st.sampled_from([None, 2, 12])), head_dim=8, rotary_dim=draw(st.sampled_from([0, 4, 8])),
        layout=draw(st.sampled_from([*TO_BHSD])), table_batch=draw(st.sampled_from([None, 1, batch])),
        pairing=draw(st.sampled_from(["half", "interleaved"])), table=draw(st.sampled_from(["full", "half"])),
        adjoint=draw(st.sampled_from(["exact", "paired"])), accumulate=draw(st.booleans()),
    )  # fmt: skip
    if case.spec.heads is None:
        case = replace(case, spec=replace(case.spec, needs=("k", "cos", "sin")))
    with np.errstate(over="ignore", invalid="ignore"):
        got = rope_kernel(case, draw(st.sampled_from([*ORDERS])))
    ratios = worst(case, got)
    assert max(ratios.values()) <= 1, ratios


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_terms_stay_within_the_bounds_and_near_them(order: str, dtype: str) -> None:
    case = rope_case(1, dtype=dtype, table_dtype=dtype, heads=64, kv_heads=8, seq=40, table_batch=None)
    ratios = worst(case, rope_kernel(case, order))
    assert max(ratios.values()) <= 1, ratios
    assert ratios["grad_q"] > 0.4  # a bound ten times too wide would be seen


def test_a_bound_by_hand() -> None:
    """γ_2·Σ|t| + 2η in float32, then one rounding to a narrower dtype: E(1 + u_o) + u_o·|y| + η_o."""
    u, eta = 2.0**-24, 2.0**-150
    gamma_2 = 2 * u / (1 - 2 * u)
    for dtype, u_o, eta_o in (("float16", 2.0**-11, 2.0**-25), ("bfloat16", 2.0**-8, 2.0**-134)):
        for g, y, size in (((1, -1), 0.0, 6.0), ((1, 1), 6.0, 6.0), ((0, 0), 0.0, 0.0)):
            case = one_pair(g, 3, 3, dtype, "float32")
            expected = oracle.expected(case)
            error = gamma_2 * size + 2 * eta
            stored = error * (1 + u_o) + u_o * abs(y) + eta_o
            np.testing.assert_allclose(bounds.bounds(case, expected)["grad_q"][0, 0, 0, 0], stored, rtol=1e-6)
    case = one_pair((2.0**-140, 0), 1, 1, "float32", "float32")
    limit = bounds.bounds(case, oracle.expected(case))["grad_q"][0, 0, 0, 0]
    np.testing.assert_allclose(limit, gamma_2 * 2.0**-140 + 2 * eta, rtol=1e-6)


def test_a_compensated_sum_of_two_products_and_zeros_is_right() -> None:
    """Kahan's correction, off by a roundoff of its own, is added to the zero that follows two products."""
    rng = np.random.default_rng(0)
    g, x = (rng.uniform(1, 2, (2, 200_000)).astype(np.float32) for _ in range(2))
    g[0] *= np.float32(0.25)
    exact = (g.astype(np.float64) * x).sum(axis=0)
    total, lost = np.zeros((2, g.shape[1]), np.float32)
    for term in (*(g * x), np.zeros_like(total)):
        corrected = term - lost
        new = total + corrected
        total, lost = new, (new - total) - corrected
    largest = (np.abs(total - exact) / exact).max() * 2.0**24
    assert 2 < largest <= 3


@pytest.mark.parametrize("table", ["full", "half"])
@pytest.mark.parametrize("heads", [0, 1, 3])
def test_products_that_are_zero_do_not_widen_a_bound(table: str, heads: int) -> None:
    """Of 64 heads' gradients so many are there: these are the sums' products, two each for half tables."""
    case = rope_case(1, heads=64, kv_heads=8, seq=3, table_batch=1, table=table)
    upstream = case.inputs["grad_q_embed"]
    assert upstream is not None
    few = upstream.copy()
    few[:, heads:] = 0
    none = np.zeros_like(case.inputs["grad_k_embed"])
    case = replace(case, inputs=case.inputs | {"grad_q_embed": few, "grad_k_embed": none})
    expected = oracle.expected(case)
    n = case.spec.batch * heads * (2 if table == "half" else 1)
    for name in ("grad_cos", "grad_sin"):
        size = expected[name].magnitude
        assert size is not None
        steps = n + (n > 1)  # Kahan's sums round once more where zeros follow
        wanted = steps * 2.0**-24 / (1 - steps * 2.0**-24) * size + n * 2.0**-150
        np.testing.assert_allclose(bounds.bounds(case, expected)[name], wanted, rtol=1e-6)


# ---- rope: planted faults ------------------------------------------------------------------------------


def with_own_sine(case: Case) -> Outputs:
    return rope_kernel(case, own_sine=True)


def with_the_forward_formula(case: Case) -> Outputs:
    turned = {name: -a if name == "sin" else a for name, a in case.inputs.items()}
    back = rope_kernel(replace(case, inputs=turned))
    return {name: back[name] if name in ("grad_q", "grad_k") else a for name, a in rope_kernel(case).items()}


def without_kv_heads(case: Case) -> Outputs:
    alone = rope_kernel(
        replace(case, inputs=case.inputs | {"grad_k_embed": None, "k": None}, spec=q_only(case))
    )
    return rope_kernel(case) | alone


def q_only(case: Case) -> RopeSpec:
    return replace(case.spec, kv_heads=None, needs=("q", "cos", "sin"))


def without_the_last_kv_head(case: Case) -> Outputs:
    k = case.inputs["k"].copy()
    k[:, -1] = 0
    return rope_kernel(replace(case, inputs=case.inputs | {"k": k})) | {
        name: a for name, a in rope_kernel(case).items() if name in ("grad_q", "grad_k")
    }


def with_bfloat16_sums(case: Case) -> Outputs:
    terms = [case.inputs[f"grad_{side}_embed"] * case.inputs[side] for side in "qk"]
    total = np.zeros(case.spec.table_shape, numpy_dtype("bfloat16"))
    for term in np.concatenate(terms, axis=1).transpose(1, 0, 2, 3):
        total = (total + term).astype(total.dtype)
    return rope_kernel(case) | {"grad_cos": total.astype(case.inputs["cos"].dtype)}


def with_narrow_tables(dtype: str) -> Callable[[Case], Outputs]:
    def kernel(case: Case) -> Outputs:
        narrow = {name: case.inputs[name].astype(numpy_dtype(dtype)) for name in ("cos", "sin")}
        wide = {name: a.astype(case.inputs[name].dtype) for name, a in narrow.items()}
        return rope_kernel(replace(case, inputs=case.inputs | wide))

    kernel.__name__ = f"with_{dtype}_tables"
    return kernel


def with_one_stale_element(case: Case) -> Outputs:
    got = rope_kernel(case)
    got["grad_k"][1, 0, 2, 3] = got["grad_k"][0, 0, 2, 3]
    return got


def with_an_ulp_too_much(case: Case) -> Outputs:
    """Eight units of float32's roundoff where two are possible."""
    got = rope_kernel(case)
    return got | {"grad_q": got["grad_q"] * (1 + 2.0**-21)}


FAULTS = [
    with_own_sine, with_the_forward_formula, without_kv_heads, without_the_last_kv_head, with_bfloat16_sums,
    with_narrow_tables("float16"), with_narrow_tables("bfloat16"), with_one_stale_element,
    with_an_ulp_too_much,
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_planted_rope_faults_exceed_the_bounds(fault: Callable[[Case], Outputs], dtype: str) -> None:
    case = rope_case(3, heads=8, kv_heads=2, dtype=dtype, table_dtype=dtype)
    assert max(worst(case, rope_kernel(case)).values()) <= 1
    assert max(worst(case, fault(case)).values()) > 1


def eager(case: Case) -> Outputs:
    """A rounding to the outputs' dtype at every array operation; sums over heads in float32."""
    spec = case.spec
    p, sigma, _ = pairing(spec)
    cos, sin = tables(case, numpy_dtype(spec.dtype))
    sign = sigma.astype(numpy_dtype(spec.dtype))
    results = {}
    for side in "qk":
        g = case.inputs[f"grad_{side}_embed"]
        results[f"grad_{side}"] = g * cos - sign * (g[..., p] * sin[..., p])
    for name in ("cos", "sin"):
        total = 0
        for side in "qk":
            g, x = case.inputs[f"grad_{side}_embed"], case.inputs[side]
            terms = g * (x if name == "cos" else sign * x[..., p])
            total = total + terms.astype(np.float32).sum(axis=1).astype(g.dtype)
        results[f"grad_{name}"] = total
    return results


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounding_at_every_step_is_a_contract_of_its_own(dtype: str) -> None:
    case = rope_case(4, dtype=dtype, table_dtype=dtype, seq=64)
    ratios = worst(case, eager(case))
    assert min(ratios.values()) > 1, ratios
    allowed = worst(case, eager(case), rounds_every_step=True)
    assert max(allowed.values()) <= 1, allowed
    assert max(worst(case, with_own_sine(case), rounds_every_step=True).values()) > 1


def flush(a: Array) -> Array:
    return np.where(np.abs(a) < 2.0**-126, a * 0, a)


def flushing(case: Case) -> Outputs:
    def add(a: Array, b: Array) -> Array:
        total = np.zeros(np.broadcast_shapes(a.shape, b.shape)[1:], a.dtype)
        for left, right in zip(flush(a), flush(b), strict=True):
            total = flush(total + flush(left * right))
        return total

    ORDERS["flushing"] = add
    try:
        return rope_kernel(case, "flushing")
    finally:
        del ORDERS["flushing"]


@pytest.mark.parametrize("scales", [(-126, 0, 0), (0, -126, -127), (-64, -63, -62), (-127, 60, 60)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_flushing_subnormals_is_a_contract_of_its_own(scales: tuple[int, int, int], dtype: str) -> None:
    case = rope_case(5, scales, dtype=dtype, table_dtype="float32", seq=16)
    assert max(worst(case, rope_kernel(case)).values()) <= 1
    assert max(worst(case, flushing(case)).values()) > 1
    allowed = worst(case, flushing(case), flushes_subnormals=True)
    assert max(allowed.values()) <= 1, allowed
    assert max(worst(case, with_own_sine(case), flushes_subnormals=True).values()) > 0.5


@pytest.mark.parametrize(
    ("dtypes", "scales"),
    [(("float32", "float64"), (-127, -127, 0)), (("float64", "bfloat16"), (-127, 0, -127))],
)
@pytest.mark.parametrize("accumulate", [False, True])
def test_what_is_flushed_is_below_the_smallest_number_of_its_own_dtype(
    dtypes: tuple[str, str], scales: tuple[int, int, int], accumulate: bool
) -> None:
    """float32 that is widened to float64 is flushed as float32, its results too: what XLA does."""
    dtype, table_dtype = dtypes
    case = rope_case(7, scales, dtype=dtype, table_dtype=table_dtype, seq=16, accumulate=accumulate)

    def own(arrays: dict[str, Any]) -> dict[str, Any]:
        floors = {n: 2.0**-1022 if a.dtype == np.float64 else 2.0**-126 for n, a in arrays.items()}
        return {n: np.where(np.abs(a) < floors[n], a * 0, a) for n, a in arrays.items()}

    got = own(rope_kernel(replace(case, inputs=own(case.inputs), prior=own(case.prior))))
    assert max(worst(case, got).values()) > 1
    assert max(worst(case, got, flushes_subnormals=True).values()) <= 1


def test_channels_that_pass_through_are_compared_bit_for_bit() -> None:
    case = rope_case(6, head_dim=8, rotary_dim=4, needs=("q", "k"))
    case.inputs["grad_q_embed"][0, 0, 0, 4:7] = [-0.0, np.nan, -np.inf]
    limit = bounds.bounds(case, oracle.expected(case))["grad_q"]
    assert not limit[..., 4:].any()
    assert limit[..., :4].all()
    assert worst(case, rope_kernel(case)) == pytest.approx({"grad_q": 0.5, "grad_k": 0.5}, abs=0.5)
    for value in (0.0, 1.0, np.inf):
        got = rope_kernel(case)
        place = got["grad_q"][0, 0, 0]
        place[{0.0: 4, 1.0: 5, np.inf: 6}[value]] = value
        assert worst(case, got)["grad_q"] == np.inf
    got = rope_kernel(case)
    got["grad_k"][0, 0, 0, 7] = np.nextafter(got["grad_k"][0, 0, 0, 7], np.float32(9))
    assert worst(case, got)["grad_k"] == np.inf


# ---- NaN and Inf ---------------------------------------------------------------------------------------


def one_pair(g: tuple[float, float], cos: float, sin: float, dtype: str, table_dtype: str) -> Case:
    """dx1 = g1·cos + g2·sin."""
    spec = RopeSpec(
        batch=1, heads=1, kv_heads=None, seq=1, head_dim=2, rotary_dim=2, table="half", dtype=dtype,
        table_dtype=table_dtype, needs=("q",),
    )  # fmt: skip
    upstream = np.array(g, np.float64).astype(numpy_dtype(dtype)).reshape(1, 1, 1, 2)
    inputs: dict[str, Any] = {"grad_q_embed": upstream, "q": None, "grad_k_embed": None, "k": None}
    inputs |= {
        name: np.array([[value]], np.float64).astype(numpy_dtype(table_dtype))
        for name, value in (("cos", cos), ("sin", sin))
    }
    return Case("edge", spec, inputs)


def must_be(case: Case) -> Must:
    expected = oracle.expected(case)
    states = judge_nonfinite(case, expected, bounds.bounds(case, expected))["grad_q"]
    return Must.BE_FINITE if states is None else Must(int(states[0, 0, 0, 0]))


def accepts(case: Case, value: float) -> bool:
    got = np.full((1, 1, 1, 2), value, case.inputs["grad_q_embed"].dtype)
    with np.errstate(all="ignore"):
        got[..., 1] = rope_kernel(case)["grad_q"][..., 1]
    return worst(case, {"grad_q": got})["grad_q"] <= 1


@pytest.mark.parametrize(
    ("g", "cos", "sin", "dtypes", "must"),
    [
        ((65504, 0), 1, 0, ("float16", "float32"), Must.BE_FINITE),
        ((65504, 15.9), 1, 1, ("float16", "float32"), Must.BE_FINITE),  # below the midpoint 65520
        ((65504, 16), 1, 1, ("float16", "float32"), Must.BE_EITHER),  # on it
        ((65504, 16.1), 1, 1, ("float16", "float32"), Must.BE_INF),
        ((-65504, -16.1), 1, 1, ("float16", "float32"), Must.BE_INF),
        ((65504, -65504), 2, 2, ("float16", "float32"), Must.BE_FINITE),
        ((3e38, -3e38), 1.5, 1.5, ("float32", "float32"), Must.BE_EITHER),
        ((3e38, 3e38), 1.5, 1.5, ("float32", "float32"), Must.BE_INF),
        ((3e38, 0), 1.5, 1.5, ("float32", "float32"), Must.BE_INF),
        ((3e38, -3e38), 8, 2, ("float32", "float32"), Must.BE_EITHER),  # Inf - Inf, though 6·3e38 > 0
        ((3e38, -3e38), 8, 1, ("float32", "float32"), Must.BE_INF),  # -3e38 alone is finite
        ((3e38, 3e38), 0.5, 0.5, ("float32", "float32"), Must.BE_FINITE),
        ((1e300, -1e300), 1e10, 1e10, ("float64", "float64"), Must.BE_EITHER),
        ((1e300, 1.0), 1.0, 1.0, ("float64", "float64"), Must.BE_FINITE),
        ((np.nan, 0), 1, 0, ("float32", "float32"), Must.NOT_BE_FINITE),
        ((1, np.inf), 1, 0, ("float32", "float32"), Must.NOT_BE_FINITE),  # Inf · 0
        ((1, 1), 1, -np.inf, ("float64", "float32"), Must.NOT_BE_FINITE),
    ],
)
def test_where_results_must_be_finite_or_not(
    g: tuple[float, float], cos: float, sin: float, dtypes: tuple[str, str], must: Must
) -> None:
    case = one_pair(g, cos, sin, *dtypes)
    assert must_be(case) == must
    with np.errstate(all="ignore"):
        right = rope_kernel(case)["grad_q"][0, 0, 0, 0]
        sign = float(np.copysign(1.0, g[0] * cos + g[1] * sin))
    assert accepts(case, right)
    assert accepts(case, np.nan) == (must in (Must.BE_EITHER, Must.NOT_BE_FINITE))
    assert accepts(case, sign * np.inf) == (must != Must.BE_FINITE)
    assert accepts(case, -sign * np.inf) == (must in (Must.BE_EITHER, Must.NOT_BE_FINITE))
    if must in (Must.BE_INF, Must.NOT_BE_FINITE):
        assert not accepts(case, 1.0)
        assert not accepts(case, float(np.finfo(np.float16).max))


def test_results_are_compared_without_losing_bits() -> None:
    """float64 results are off by less than float64 can tell from a rounded exact value."""
    case = one_pair((1 / 3, 0.0), 1 / 3, 0.0, "float64", "float64")
    expected = oracle.expected(case)["grad_q"]
    limit = bounds.bounds(case, {"grad_q": expected})["grad_q"]
    right = rope_kernel(case)["grad_q"]
    ratio = worst_ratio(right, expected, limit).ratio
    assert 0 < ratio <= 0.5
    beyond = np.nextafter(np.nextafter(np.nextafter(right, 1), 1), 1)
    assert worst_ratio(beyond, expected, limit).ratio > 1


def test_a_bound_that_is_not_a_number_passes_nothing() -> None:
    case = rope_case(7, needs=("q",))
    expected = oracle.expected(case)["grad_q"]
    limit = bounds.bounds(case, {"grad_q": expected})["grad_q"]
    limit[1, 0, 2, 3] = np.nan
    found = worst_ratio(rope_kernel(case)["grad_q"], expected, limit)
    assert (found.ratio, found.where) == (np.inf, (1, 0, 2, 3))


def test_worst_ratio_names_the_element_and_refuses_other_shapes() -> None:
    case = rope_case(7, heads=40, seq=70, head_dim=32, rotary_dim=32, needs=("q",))  # several chunks
    expected = oracle.expected(case)["grad_q"]
    limit = bounds.bounds(case, {"grad_q": expected})["grad_q"]
    got = rope_kernel(case)["grad_q"]
    for place in [(0, 0, 0, 0), (1, 39, 69, 31), (1, 17, 30, 3)]:
        faulty = got.copy()
        faulty[place] += 1
        found = worst_ratio(faulty, expected, limit)
        assert found.where == place
        assert found.got == float(faulty[place])
        assert found.ratio > 1000
    with pytest.raises(ValueError, match="shape"):
        worst_ratio(got[:1], expected, limit)
    empty = oracle.expected(rope_case(8, seq=0, needs=("q",)))["grad_q"]
    assert worst_ratio(empty.value, empty, empty.value).ratio == 0


def test_empty_sums_are_exactly_zero() -> None:
    case = rope_case(9, batch=0, table_batch=None, needs=("cos",))
    assert worst(case, {"grad_cos": np.zeros(case.spec.table_shape, np.float32)})["grad_cos"] == 0
    assert worst(case, {"grad_cos": np.full(case.spec.table_shape, -0.0, np.float32)})["grad_cos"] == 0
    tiny = np.full(case.spec.table_shape, 1e-45, np.float32)
    assert worst(case, {"grad_cos": tiny})["grad_cos"] == np.inf


# ---- projections: arithmetics --------------------------------------------------------------------------

Multiply = Callable[[Array, Array], Array]


def to_bits(a: Array, bits: int, *, truncate: bool = False) -> Array:
    """float32 with significands of so many bits."""
    significand, exponent = np.frexp(a.astype(np.float64))
    scaled = significand * 2.0**bits
    cut = np.trunc(scaled) if truncate else np.rint(scaled)
    return np.ldexp(cut / 2.0**bits, exponent).astype(np.float32)


def ieee(a: Array, b: Array) -> Array:
    return a @ b


def in_order(a: Array, b: Array) -> Array:
    return sequential(a.T[:, :, None], b[:, None, :])


def in_blocks(a: Array, b: Array) -> Array:
    total = np.zeros((a.shape[0], b.shape[1]), a.dtype)
    for k in range(0, a.shape[1], 32):
        total = total + a[:, k : k + 32] @ b[k : k + 32]
    return total


def backwards(a: Array, b: Array) -> Array:
    return in_order(a[:, ::-1], b[::-1])


def tf32(a: Array, b: Array) -> Array:
    return to_bits(a, 11) @ to_bits(b, 11)


def truncated_tf32(a: Array, b: Array) -> Array:
    return to_bits(a, 11, truncate=True) @ to_bits(b, 11, truncate=True)


def bfloat16(a: Array, b: Array) -> Array:
    return to_bits(a, 8) @ to_bits(b, 8)


def truncated_bfloat16(a: Array, b: Array) -> Array:
    return to_bits(a, 8, truncate=True) @ to_bits(b, 8, truncate=True)


def tensor_scaled_float16(a: Array, b: Array) -> Array:
    """One scale for all of a and one for all of b."""
    shifts = [15 - int(np.frexp(np.abs(m).max(initial=0))[1]) for m in (a, b)]
    left, right = (
        np.ldexp(m.astype(np.float64), e).astype(np.float16).astype(np.float32)
        for m, e in zip((a, b), shifts, strict=True)
    )
    return np.ldexp((left @ right).astype(np.float64), -sum(shifts)).astype(np.float32)


def _split(a: Array, bits: int) -> tuple[Array, Array]:
    high = to_bits(a, bits)
    return high, to_bits(a - high, bits)


def float16_split(a: Array, b: Array) -> Array:
    (a1, a2), (b1, b2) = _split(a, 11), _split(b, 11)
    return a1 @ b1 + (a1 @ b2 + a2 @ b1)


def bfloat16_split(a: Array, b: Array) -> Array:
    (a1, a2), (b1, b2) = _split(a, 8), _split(b, 8)
    return a1 @ b1 + (a1 @ b2 + a2 @ b1)


def scaled_float16(a: Array, b: Array) -> Array:
    """Float16 operands after scaling each row of a and column of b, exactly, to [2^14, 2^15)."""
    rows = 15 - np.frexp(np.abs(a).max(axis=1, keepdims=True, initial=0))[1]
    columns = 15 - np.frexp(np.abs(b).max(axis=0, keepdims=True, initial=0))[1]
    left, right = (
        np.ldexp(m.astype(np.float64), e).astype(np.float16).astype(np.float32)
        for m, e in ((a, rows), (b, columns))
    )
    return np.ldexp((left @ right).astype(np.float64), -rows - columns).astype(np.float32)


def qkv_kernel(case: Case, multiply: Multiply = ieee) -> Outputs:
    spec = case.spec
    rope, kind = spec.rope, numpy_dtype(spec.rope.compute)
    m = {n: None if a is None else a.astype(kind) for n, a in case.inputs.items()}
    rows = (1, 0) if rope.layout == "sbhd" else (0, 1)
    d = {}
    for part, name in (("q", "grad_query"), ("k", "grad_key"), ("v", "grad_value")):
        upstream = case.inputs[name]
        if upstream is None:
            continue
        if part == "v":
            back = m[name].transpose(TO_BHSD[rope.layout])
        else:
            back = rotate_back(case, upstream, kind, sequential)
        back = back.transpose(0, 2, 1, 3).transpose(*rows, 2, 3)
        d[part] = np.ascontiguousarray(back).reshape(spec.tokens, spec.rows(part))
    x = m["hidden_states"].reshape(spec.tokens, spec.hidden_size)
    got = {}
    for name in case.outputs:
        part = name.removeprefix("grad_")[0]
        if name == "grad_hidden_states":
            result = multiply(
                np.concatenate(list(d.values()), axis=1),
                np.concatenate([m[f"{part}_weight"] for part in "qkv"]),
            ).reshape(spec.hidden_shape)
        else:
            result = d[part].sum(axis=0) if name.endswith("bias") else multiply(d[part].T, x)
        if spec.accumulate:
            result = case.prior[name].astype(kind) + result
        got[name] = result.astype(numpy_dtype(rope.dtype))
    return got


def qkv_case(seed: int = 0, *, hidden: int = 24, scale: int = 0, sparse: int = 0, **options: Any) -> Case:
    """Normal draws; `sparse`: so many nonzero upstream gradients a token, few a channel."""
    words = {k: options.pop(k) for k in ("precision", "needs") if k in options}
    defaults: dict[str, Any] = {
        "batch": 2, "heads": 4, "kv_heads": 2, "seq": 12, "head_dim": 8, "rotary_dim": 8, "table_batch": 2,
    }  # fmt: skip
    rope = RopeSpec(**(defaults | options))
    spec = QkvSpec(rope=rope, hidden_size=hidden, **words)
    rng = np.random.default_rng(seed)
    inputs: dict[str, Any] = {}
    for name, heads in (
        ("grad_query", rope.heads),
        ("grad_key", rope.kv_heads),
        ("grad_value", rope.kv_heads),
    ):
        g = normal(rng, rope.head_shape(heads or 0), rope.dtype, scale)
        if sparse:
            flat = g.reshape(-1, rope.head_dim)
            flat[np.argsort(rng.random(flat.shape), axis=1) >= sparse] = 0
            keep = rng.random(g.shape[:3]) < 0.25
            g[~keep] = 0
        inputs[name] = g
    shapes = {f"{part}_weight": (spec.rows(part), hidden) for part in "qkv"}
    shapes |= {"hidden_states": spec.hidden_shape} | {f"{part}_bias": (spec.rows(part),) for part in "qkv"}
    for name in ("hidden_states", "q_weight", "k_weight", "v_weight"):
        inputs[name] = normal(rng, shapes[name], rope.dtype)
    for name in ("cos", "sin"):
        inputs[name] = normal(rng, rope.table_shape, rope.table_dtype)
    prior = {f"grad_{n}": normal(rng, shapes[n], rope.dtype) for n in spec.needs if rope.accumulate}
    return Case("drawn", spec, inputs, prior)


def widest(case: Case, multiply: Multiply, **contract: bool) -> float:
    return max(worst(case, qkv_kernel(case, multiply), **contract).values())


# ---- projections: bounds -------------------------------------------------------------------------------


@given(st.data())
def test_right_qkv_kernels_stay_within_the_bounds(data: st.DataObject) -> None:
    draw = data.draw
    batch = draw(st.integers(0, 2))
    case = qkv_case(
        draw(st.integers(0, 2**32)), hidden=draw(st.sampled_from([0, 1, 9])), batch=batch,
        scale=draw(st.sampled_from([0, 0, -20, -125, -148])), sparse=draw(st.sampled_from([0, 0, 1, 2, 4])),
        dtype=draw(st.sampled_from(DTYPES)), table_dtype=draw(st.sampled_from(DTYPES)),
        seq=draw(st.sampled_from([0, 1, 7, 40])), table_batch=draw(st.sampled_from([None, 1, batch])),
        rotary_dim=draw(st.sampled_from([0, 4, 8])), layout=draw(st.sampled_from([*TO_BHSD])),
        precision=draw(st.sampled_from(["highest", "high", "medium"])), accumulate=draw(st.booleans()),
        needs=(*QKV_WEIGHTS, "q_bias", "v_bias"),
    )  # fmt: skip
    multiply = draw(st.sampled_from([ieee, in_order, in_blocks, backwards]))
    ratios = worst(case, qkv_kernel(case, multiply))
    assert max(ratios.values()) <= 1, ratios


PROBES = [(seed, nonzeros) for seed in range(4) for nonzeros in (1, 2, 4)]


@pytest.mark.parametrize(
    ("precision", "multiply", "most"),
    [
        ("highest", ieee, 0.5), ("highest", in_order, 0.5), ("highest", float16_split, 0.8),
        ("high", ieee, 0.1), ("high", tf32, 1), ("high", scaled_float16, 1), ("high", float16_split, 0.1),
        ("medium", tf32, 0.3), ("medium", bfloat16, 1), ("medium", truncated_tf32, 1),
    ],
)  # fmt: skip
def test_arithmetics_that_keep_a_promise_pass_sparse_probes(
    precision: str, multiply: Multiply, most: float
) -> None:
    for seed, nonzeros in PROBES:
        case = qkv_case(seed, sparse=nonzeros, precision=precision)
        assert widest(case, multiply) <= most


@pytest.mark.parametrize(
    ("precision", "multiply", "least"),
    [
        ("highest", tf32, 200), ("highest", bfloat16, 2000), ("highest", bfloat16_split, 4),
        ("highest", scaled_float16, 200), ("high", bfloat16, 3), ("high", truncated_tf32, 1.2),
        ("medium", truncated_bfloat16, 1.2),
    ],
)  # fmt: skip
def test_arithmetics_that_break_a_promise_fail_sparse_probes(
    precision: str, multiply: Multiply, least: float
) -> None:
    probes = [qkv_case(seed, sparse=nonzeros, precision=precision) for seed, nonzeros in PROBES]
    assert max(widest(case, multiply) for case in probes) > least


@pytest.mark.parametrize(
    ("precision", "multiply"),
    [("highest", ieee), ("high", ieee), ("medium", ieee), ("high", scaled_float16)],
)
def test_tiny_gradients_underflow_within_the_bounds(precision: str, multiply: Multiply) -> None:
    for seed in range(10):
        assert widest(qkv_case(seed, scale=-146, precision=precision), multiply) <= 1


def test_the_normwise_part_of_high_admits_scales_that_fit_and_no_others() -> None:
    """Within a row 2^40 apart: float16 with a scale a row and a column may lose the small ones."""
    case = qkv_case(14, sparse=4, precision="high", needs=("hidden_states",))
    rng = np.random.default_rng(0)
    for name in ("grad_query", "grad_key", "grad_value"):
        case.inputs[name] *= np.float32(2) ** rng.integers(-40, 1, case.inputs[name].shape).astype(np.float32)
    assert widest(case, scaled_float16) <= 1
    assert widest(case, tf32) <= 1
    expected = oracle.expected(case)
    product = expected["grad_hidden_states"].product
    d, b = np.abs(product.left), product.size
    normwise = np.outer(d.max(axis=1), b.sum(axis=0)) + np.outer(d.sum(axis=1), b.max(axis=0))
    n, u = product.terms, 2.0**-24
    by_hand = 2 * u * product.P + (2.0**-10 + 2.0**-22 + 2 * u * (n + np.ceil(n / 16))) * product.Q
    by_hand += 2.0**-20 * normwise
    limit = bounds.bounds(case, expected)["grad_hidden_states"]
    np.testing.assert_allclose(limit.reshape(by_hand.shape), by_hand, rtol=1e-6)
    token_scales = qkv_case(14, precision="high", needs=("hidden_states",))
    for name in ("grad_query", "grad_key", "grad_value"):
        token_scales.inputs[name][:, :, ::2] *= np.float32(1e-12)
    assert widest(token_scales, scaled_float16) <= 1
    assert widest(token_scales, tensor_scaled_float16) > 100


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_prior_content_may_be_added_first(precision: str) -> None:
    """Then every one of n small products may be lost in it."""
    case = qkv_case(15, precision=precision, needs=("v_weight",), seq=20, accumulate=True)
    case.inputs["grad_value"][...] = 0.99 * 2.0**-25
    case.inputs["hidden_states"][...] = 1
    case.prior["grad_v_weight"][...] = 1
    got = case.prior["grad_v_weight"].copy()
    assert 0.1 < worst(case, {"grad_v_weight": got})["grad_v_weight"] <= 1
    assert worst(case, {"grad_v_weight": got * np.float32(1.0001)})["grad_v_weight"] > 1


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_planted_qkv_faults_exceed_the_bounds(dtype: str, precision: str) -> None:
    case = qkv_case(2, dtype=dtype, table_dtype=dtype, precision=precision)
    own = replace(case, spec=replace(case.spec, rope=replace(case.spec.rope, adjoint="paired")))
    expected = oracle.expected(case)
    right = qkv_kernel(case)
    limit = bounds.bounds(case, expected)
    for faulty in (
        qkv_kernel(own),
        right | {"grad_v_weight": right["grad_k_weight"]},
        right | {"grad_hidden_states": right["grad_hidden_states"] * 0},
        right | {"grad_q_weight": right["grad_q_weight"][::-1]},
    ):
        assert max(worst_ratio(faulty[n], expected[n], limit[n]).ratio for n in expected) > 10
    assert max(worst_ratio(right[n], expected[n], limit[n]).ratio for n in expected) <= 1


def test_float64_products_are_held_to_float64() -> None:
    case = qkv_case(3, dtype="float64", table_dtype="float64", precision="medium")
    assert widest(case, in_order) <= 1
    assert widest(case, lambda a, b: a.astype(np.float32) @ b.astype(np.float32)) > 1000


def test_a_few_zeros_cost_their_own_rows_and_columns_only() -> None:
    """Elements with fewer products get the tighter bound, whichever way it was computed."""
    case = qkv_case(4, seq=40)
    for name, place in (("q_weight", (3, 5)), ("grad_query", (1, 2, 7, 3)), ("grad_value", (0, 0, 0, 0))):
        case.inputs[name][place] = 0
    expected = oracle.expected(case)
    limit = bounds.bounds(case, expected)
    for name, output in expected.items():
        product, n = output.product, np.broadcast_to(output.terms, output.value.shape)
        u = 2.0**-24
        p, q = product.P.reshape(n.shape), product.Q.reshape(n.shape)
        by_hand = (n + 2) * u / (1 - (n + 2) * u) * p + 12 * u * q
        np.testing.assert_allclose(limit[name], by_hand, rtol=1e-7)
    assert expected["grad_hidden_states"].terms.min() == 62  # its token's zero and its column's
    assert expected["grad_q_weight"].terms == 80


def test_a_rotated_gradient_that_cancels_still_counts_as_a_product() -> None:
    """g·c = -g_p·s exactly: with fused multiply-add D is the rounding error of one of them, not 0."""
    p, q = np.float32(3000017), np.float32(1234577)  # 3p, 5p, 3q, 5q are float32 numbers, 15pq is not
    rope = RopeSpec(batch=1, heads=1, kv_heads=None, seq=1, head_dim=2, rotary_dim=2, table="half")
    inputs: dict[str, Any] = dict.fromkeys(("grad_key", "grad_value"))
    inputs["grad_query"] = np.array([3 * p, -5 * p]).reshape(1, 1, 1, 2)
    inputs |= {"cos": np.array([[5 * q]]), "sin": np.array([[3 * q]])}
    inputs["hidden_states"] = np.array([[[1e-3, 0]]], np.float32)
    case = Case("cancels", QkvSpec(rope=rope, hidden_size=2, needs=("q_weight",)), inputs)
    output = oracle.expected(case)["grad_q_weight"]
    assert output.value[0, 0] == 0
    np.testing.assert_array_equal(output.terms, [[1, 0], [1, 0]])
    left_over = np.float32(np.float64(3 * p) * np.float64(5 * q) - np.float64((5 * p) * (3 * q)))
    assert left_over != 0
    got = qkv_kernel(case)["grad_q_weight"]
    assert got[0, 0] == 0
    for first in (got[0, 0], left_over * np.float32(1e-3)):
        got[0, 0] = first
        assert worst(case, {"grad_q_weight": got})["grad_q_weight"] <= 1


def test_flushing_is_a_contract_for_products_too() -> None:
    case = qkv_case(5, scale=-126, seq=16, needs=(*QKV_WEIGHTS, "k_bias", "v_bias"))
    for name in ("q_weight", "k_weight", "v_weight"):
        case.inputs[name] *= np.float32(2**30)  # what is flushed in D is then far above the subnormals
    case.inputs["hidden_states"][0, :, 0] = 2.0**-127  # and here D's partner
    large = case.inputs["grad_query"][0] != 0
    case.inputs["grad_query"][0][large] = 2.0**20
    flushed = replace(case, inputs={name: flush(a) for name, a in case.inputs.items()})
    got = {n: flush(a) for n, a in qkv_kernel(flushed, lambda a, b: flush(a) @ flush(b)).items()}
    ratios = worst(case, got)
    assert min(ratios["grad_hidden_states"], ratios["grad_q_weight"]) > 1
    allowed = worst(case, got, flushes_subnormals=True)
    assert 0.01 < max(allowed.values()) <= 1, allowed


def test_rounding_at_every_step_is_a_contract_for_products_too() -> None:
    needs = ("hidden_states", "q_weight", "q_bias")
    case = qkv_case(6, dtype="bfloat16", table_dtype="bfloat16", seq=16, needs=needs)
    spec, kind = case.spec, numpy_dtype("bfloat16")
    m = case.inputs
    d = [
        a.transpose(0, 2, 1, 3).reshape(spec.tokens, -1)
        for a in (
            rotate_back(case, m["grad_query"], kind, sequential),
            rotate_back(case, m["grad_key"], kind, sequential),
            m["grad_value"],
        )
    ]
    parts = [
        (left.astype(np.float32) @ m[f"{part}_weight"].astype(np.float32)).astype(kind)
        for left, part in zip(d, "qkv", strict=True)
    ]
    hidden = m["hidden_states"].reshape(spec.tokens, -1).astype(np.float32)
    got = {
        "grad_hidden_states": ((parts[0] + parts[1]) + parts[2]).reshape(spec.hidden_shape),
        "grad_q_weight": (d[0].T.astype(np.float32) @ hidden).astype(kind),
        "grad_q_bias": d[0].astype(np.float32).sum(axis=0).astype(kind),
    }
    assert min(worst(case, got).values()) > 1
    allowed = worst(case, got, rounds_every_step=True)
    assert 0.1 < max(allowed.values()) <= 1, allowed


@pytest.mark.parametrize("table", ["full", "half"])
def test_steps_of_eager_code_are_counted_and_not_more(table: str) -> None:
    case = rope_case(0, dtype="bfloat16", table_dtype="bfloat16", batch=1, table_batch=1, seq=1, table=table)
    expected = oracle.expected(case)
    plain, stepwise = (
        bounds.bounds(case, expected, rounds_every_step=on) for on in (False, True)
    )  # fmt: skip
    u = 2.0**-8
    for name, steps in (("grad_q", 1), ("grad_cos", 3 if table == "half" else 2)):
        more = (stepwise[name] - plain[name]) / expected[name].magnitude
        np.testing.assert_allclose(more, (1 + u) * steps * u / (1 - steps * u), rtol=1e-3)
    case = qkv_case(0, dtype="bfloat16", table_dtype="bfloat16")
    expected = oracle.expected(case)
    plain, stepwise = (bounds.bounds(case, expected, rounds_every_step=on) for on in (False, True))
    for name, steps in (("grad_hidden_states", 4), ("grad_q_weight", 2)):
        more = (stepwise[name] - plain[name]) / expected[name].product.P.reshape(plain[name].shape)
        np.testing.assert_allclose(more, (1 + u) * steps * u / (1 - steps * u), rtol=1e-3)


# ---- projections: NaN and Inf, precision gate ----------------------------------------------------------


def test_an_overflowing_rotation_excuses_its_token_and_channels() -> None:
    """D overflows float32 although its product with 1e-30 would not."""
    case = qkv_case(7)
    case.inputs["grad_query"][0, 1, 3] = 3e38
    for name in ("cos", "sin"):
        case.inputs[name][0, 3] = 1.5
    case.inputs["q_weight"] *= np.float32(1e-30)
    case.inputs["hidden_states"] *= np.float32(1e-30)
    expected = oracle.expected(case)
    states = judge_nonfinite(case, expected, bounds.bounds(case, expected))
    either = np.zeros((2, 12, 24), np.bool_)
    either[0, 3] = True
    np.testing.assert_array_equal(states["grad_hidden_states"] == Must.BE_EITHER, either)
    np.testing.assert_array_equal(states["grad_q_weight"][8:16] == Must.BE_EITHER, True)
    assert not states["grad_q_weight"][:8].any()
    assert states["grad_k_weight"] is None
    with np.errstate(all="ignore"):
        got = qkv_kernel(case)
    assert not np.isfinite(got["grad_hidden_states"]).all()
    assert max(worst(case, got).values()) <= 1


def test_float64_rotations_that_overflow_are_unknown_in_their_token_and_channel_only() -> None:
    case = qkv_case(7, dtype="float64", table_dtype="float64", seq=4, needs=(*QKV_WEIGHTS, "q_bias"))
    case.inputs["grad_query"][0, 1, 3] = 1.5e308
    for name in ("cos", "sin"):
        case.inputs[name][0, 3] = 1.5
    expected = oracle.expected(case)
    unknown = np.zeros((2, 4, 24), np.bool_)
    unknown[0, 3] = True
    np.testing.assert_array_equal(np.isnan(expected["grad_hidden_states"].value), unknown)
    assert np.isnan(expected["grad_q_weight"].value[8:16]).all()
    assert np.isnan(expected["grad_q_bias"].value[8:16]).all()
    assert not np.isnan(expected["grad_q_weight"].value[:8]).any()
    with np.errstate(all="ignore"):
        got = qkv_kernel(case)
    assert max(worst(case, got).values()) <= 1
    got["grad_hidden_states"][0, 2, 0] = np.inf
    assert worst(case, got)["grad_hidden_states"] == np.inf


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_inf_must_show_in_products_and_nowhere_else(bad: float) -> None:
    case = qkv_case(8)
    case.inputs["grad_key"][1, 0, 2, 3] = bad
    case.inputs["v_weight"][3, 5] = bad
    with np.errstate(all="ignore"):
        got = qkv_kernel(case)
    assert max(worst(case, got).values()) <= 1
    hidden = got["grad_hidden_states"]
    assert not np.isfinite(hidden[1, 2]).any()
    assert not np.isfinite(hidden[..., 5]).any()
    hiding = hidden.copy()
    hiding[1, 2, 4] = 0
    assert worst(case, got | {"grad_hidden_states": hiding})["grad_hidden_states"] == np.inf
    spreading = hidden.copy()
    spreading[1, 1, 4] = np.nan
    assert worst(case, got | {"grad_hidden_states": spreading})["grad_hidden_states"] == np.inf


def test_products_that_overflow_must_show_it() -> None:
    case = qkv_case(9, batch=1, seq=2, table_batch=None, hidden=2)
    for name in case.inputs:
        case.inputs[name][...] = 1
    case.inputs["sin"][...] = 0
    case.inputs["q_weight"][:, 0] = 2e37  # 32 of them overflow float32, the others add 32
    case.inputs["q_weight"][:, 1] = 1e37
    with np.errstate(over="ignore"):
        got = qkv_kernel(case)
    assert np.isinf(got["grad_hidden_states"][..., 0]).all()
    assert worst(case, got)["grad_hidden_states"] <= 1
    for value, column in ((3e38, 0), (-np.inf, 0), (np.inf, 1)):
        faulty = got["grad_hidden_states"].copy()
        faulty[0, 1, column] = value
        assert worst(case, got | {"grad_hidden_states": faulty})["grad_hidden_states"] == np.inf


@pytest.mark.parametrize(
    ("precision", "multiply", "kept"),
    [
        ("highest", ieee, True), ("highest", in_order, True), ("highest", float16_split, True),
        ("highest", tf32, False), ("highest", bfloat16_split, False),
        ("high", tf32, True), ("high", scaled_float16, True), ("high", truncated_tf32, False),
        ("high", bfloat16, False), ("medium", bfloat16, True), ("medium", tf32, True),
        ("medium", truncated_bfloat16, False),
    ],
)  # fmt: skip
def test_the_gate_tells_precisions_apart_on_dense_draws(
    precision: str, multiply: Multiply, kept: bool
) -> None:
    case = qkv_case(10, hidden=96, batch=2, seq=256, heads=24, kv_heads=4, precision=precision)
    expected = oracle.expected(case)
    got = qkv_kernel(case, multiply)
    for name in ("grad_hidden_states", "grad_q_weight"):
        n = expected[name].depth
        assert n >= 256
        assert (2.0 ** -effective_bits(got[name], expected[name]) <= gate(precision, n)) == kept


def test_the_gate_makes_room_for_narrow_outputs_and_none_for_float64() -> None:
    case = qkv_case(11, hidden=96, seq=256, heads=24, kv_heads=4, dtype="bfloat16", table_dtype="bfloat16")
    expected = oracle.expected(case)["grad_hidden_states"]
    got = qkv_kernel(case)["grad_hidden_states"]
    r = 2.0 ** -effective_bits(got, expected)
    assert gate("highest", 256) < r <= gate("highest", 256, storage="bfloat16")
    assert gate("medium", 256, compute="float64", storage="float64") < 1e-14


def test_effective_bits_of_what_cannot_be_measured() -> None:
    case = rope_case(12, needs=("cos",))
    expected = oracle.expected(case)["grad_cos"]
    got = rope_kernel(case)["grad_cos"]
    assert 22 < effective_bits(got, expected) < 30
    assert effective_bits(expected.value, expected) == np.inf
    assert effective_bits(got * np.float32(np.nan), expected) == -np.inf
    double = rope_case(12, needs=("cos",), dtype="float64", table_dtype="float64")
    expected = oracle.expected(double)["grad_cos"]
    assert 53 < effective_bits(expected.value, expected) < 60  # the nearest float64 is not exact
    empty = oracle.expected(rope_case(13, seq=0, needs=("cos",)))["grad_cos"]
    assert np.isnan(effective_bits(empty.value, empty))
