"""The oracle against a second one in exact rational arithmetic, written from the index formulas."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropegrad.arrays import DTYPES, numpy_dtype
from ropegrad.spec import LAYOUTS, PAIRINGS, QKV_NEEDS, QkvSpec, RopeSpec
from ropegrad.verify import oracle
from ropegrad.verify.case import Case
from ropegrad.verify.doubledouble import dot, two_product, two_sum

Term = tuple[int, float, float]  # sign, left factor, right factor
ETA = Fraction(1, 2**1074)


# ---- the slow oracle -----------------------------------------------------------------------------------


def at(array: np.ndarray, layout: str, b: int, h: int, s: int, j: int) -> float:
    index = {"bhsd": (b, h, s, j), "bshd": (b, s, h, j), "sbhd": (s, b, h, j)}[layout]
    return float(array[index])


def partner(spec: RopeSpec, j: int) -> tuple[int, int]:
    """p(j) and σ(j)."""
    if spec.pairing == "interleaved":
        return j ^ 1, -1 if j % 2 == 0 else 1
    half = spec.rotary_dim // 2
    return (j + half, -1) if j < half else (j - half, 1)


def column(spec: RopeSpec, j: int) -> int:
    """The table column of channel j."""
    if spec.table == "full":
        return j
    return j // 2 if spec.pairing == "interleaved" else j % (spec.rotary_dim // 2)


def table(array: np.ndarray, b: int, s: int, column: int) -> float:
    if array.ndim == 2:
        return float(array[s, column])
    return float(array[b if array.shape[0] > 1 else 0, s, column])


def rotated_terms(spec: RopeSpec, inputs: dict, upstream: str, b: int, h: int, s: int, j: int) -> list[Term]:
    """dx_j = g_j·c_j − σ_j·g_p·s_p, or s_j where the benchmark's own formula is asked for."""
    g = inputs[upstream]
    own = at(g, spec.layout, b, h, s, j)
    if j >= spec.rotary_dim:
        return [(1, own, 1.0)]
    p, sigma = partner(spec, j)
    sine = column(spec, j if spec.adjoint == "paired" else p)
    return [
        (1, own, table(inputs["cos"], b, s, column(spec, j))),
        (-sigma, at(g, spec.layout, b, h, s, p), table(inputs["sin"], b, s, sine)),
    ]


def rope_terms(case: Case, name: str) -> dict[tuple[int, ...], list[Term]]:
    """Every element's exact terms."""
    spec, inputs = case.spec, case.inputs
    assert isinstance(spec, RopeSpec)
    terms: dict[tuple[int, ...], list[Term]] = {}
    if name in ("grad_q", "grad_k"):
        heads = spec.heads if name == "grad_q" else spec.kv_heads
        for b, h, s, j in itertools.product(*map(range, (spec.batch, heads, spec.seq, spec.head_dim))):
            index = {"bhsd": (b, h, s, j), "bshd": (b, s, h, j), "sbhd": (s, b, h, j)}[spec.layout]
            terms[index] = rotated_terms(spec, inputs, f"{name}_embed", b, h, s, j)
        return terms
    terms = {index: [] for index in np.ndindex(spec.table_shape)}
    for side, heads in (("q", spec.heads), ("k", spec.kv_heads)):
        for b, h, s, j in itertools.product(*map(range, (spec.batch, heads or 0, spec.seq, spec.rotary_dim))):
            p, sigma = partner(spec, j)
            g = at(inputs[f"grad_{side}_embed"], spec.layout, b, h, s, j)
            x = at(inputs[side], spec.layout, b, h, s, j if name == "grad_cos" else p)
            row = () if spec.table_batch is None else (b if spec.table_batch > 1 else 0,)
            terms[(*row, s, column(spec, j))].append((1 if name == "grad_cos" else sigma, g, x))
    return terms


def exactly(terms: list[Term]) -> Fraction:
    return sum((sign * Fraction(a) * Fraction(b) for sign, a, b in terms), Fraction(0))


def size(terms: list[Term]) -> Fraction:
    return sum((abs(Fraction(a) * Fraction(b)) for _, a, b in terms), Fraction(0))


def own_error(precise: bool, n: int, magnitude: Fraction) -> Fraction:
    """What the oracle promises: γ_n in float64, or double-double's."""
    if precise:
        return 16 * (n + 2) ** 2 * magnitude / 2**106 + 4 * (n + 1) * ETA
    return (n + 3) * magnitude * Fraction(1001, 1000) / 2**53


# ---- cases ---------------------------------------------------------------------------------------------


def values(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, spread: int) -> np.ndarray:
    """Normal values times powers of two; one in ten is zero."""
    wide = rng.standard_normal(shape) * 2.0 ** rng.integers(-spread, spread + 1, shape)
    wide = np.where(rng.random(shape) < 0.1, 0.0, wide)
    return wide.astype(np.float32 if dtype == "bfloat16" else numpy_dtype(dtype)).astype(numpy_dtype(dtype))


def arrays(
    spec: RopeSpec, rng: np.random.Generator, names: dict[str, int | None], spread: int
) -> dict[str, Any]:
    """Inputs with heads, and the two tables."""
    found: dict[str, Any] = {
        name: None if heads is None else values(rng, spec.head_shape(heads), spec.dtype, spread)
        for name, heads in names.items()
    }
    for name in ("cos", "sin"):
        found[name] = values(rng, spec.table_shape, spec.table_dtype, spread)
    return found


@st.composite
def rope_specs(draw: st.DrawFn, **fixed: Any) -> RopeSpec:
    kv_heads = draw(st.sampled_from([None, 1, 1, 2]))
    heads = draw(st.sampled_from([None, 0, 1, 2])) if kv_heads != 2 else draw(st.sampled_from([2, 4]))
    if heads is None and kv_heads is None:
        heads = 1
    batch = draw(st.integers(0, 3))
    rotary = 2 * draw(st.integers(0, 3))
    options: dict[str, Any] = {
        "batch": batch, "heads": heads, "kv_heads": kv_heads, "seq": draw(st.integers(0, 3)),
        "head_dim": max(rotary + draw(st.integers(0, 2)), 1), "rotary_dim": rotary,
        "table_batch": draw(st.sampled_from([None, 1, batch])), "layout": draw(st.sampled_from([*LAYOUTS])),
        "pairing": draw(st.sampled_from(PAIRINGS)), "table": draw(st.sampled_from(["full", "half"])),
        "adjoint": draw(st.sampled_from(["exact", "paired"])), "dtype": draw(st.sampled_from(DTYPES)),
        "table_dtype": draw(st.sampled_from(DTYPES)), "accumulate": draw(st.booleans()),
    }  # fmt: skip
    spec = RopeSpec(**(options | fixed))
    possible = [
        n
        for n in ("q", "k", "cos", "sin")
        if getattr(spec, {"q": "heads", "k": "kv_heads"}.get(n, "seq")) is not None
    ]
    return replace(spec, needs=tuple(draw(st.lists(st.sampled_from(possible), min_size=1, unique=True))))


@st.composite
def rope_cases(draw: st.DrawFn, **fixed: Any) -> Case:
    spec = draw(rope_specs(**fixed))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    heads = {"grad_q_embed": spec.heads, "grad_k_embed": spec.kv_heads, "q": spec.heads, "k": spec.kv_heads}
    inputs = arrays(spec, rng, heads, draw(st.sampled_from([0, 3, 10])))
    prior = {}
    for name in spec.needs if spec.accumulate else ():
        dtype = spec.table_dtype if name in ("cos", "sin") else spec.dtype
        prior[f"grad_{name}"] = values(rng, inputs[name].shape, dtype, 2)
    return Case("drawn", spec, inputs, prior)


@st.composite
def qkv_cases(draw: st.DrawFn, **fixed: Any) -> Case:
    precision = draw(st.sampled_from(["highest", "high", "medium"]))
    rope = draw(rope_specs(heads=2, kv_heads=1, adjoint="exact", **fixed))
    needs = tuple(draw(st.lists(st.sampled_from(QKV_NEEDS), min_size=1, unique=True)))
    spec = QkvSpec(rope=rope, hidden_size=draw(st.integers(0, 3)), precision=precision, needs=needs)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([0, 3]))
    inputs = arrays(rope, rng, {"grad_query": 2, "grad_key": 1, "grad_value": 1}, spread)
    shapes = {f"{part}_weight": (spec.rows(part), spec.hidden_size) for part in "qkv"}
    shapes |= {"hidden_states": spec.hidden_shape} | {f"{part}_bias": (spec.rows(part),) for part in "qkv"}
    drawn = {name: values(rng, shape, rope.dtype, spread) for name, shape in shapes.items()}
    prior = {f"grad_{name}": values(rng, shapes[name], rope.dtype, 1) for name in needs if rope.accumulate}
    return Case("drawn", spec, inputs | {n: a for n, a in drawn.items() if "bias" not in n}, prior)


# ---- rope ----------------------------------------------------------------------------------------------


def exact_value(output: oracle.Expected, index: tuple[int, ...]) -> Fraction:
    low = 0.0 if output.low is None else output.low[index]
    return Fraction(float(output.value[index])) + Fraction(float(low))


@given(rope_cases())
def test_rope_agrees_with_rational_arithmetic(case: Case) -> None:
    spec = case.spec
    precise = spec.compute == "float64"
    expected = oracle.expected(case)
    assert tuple(expected) == case.outputs
    for name, output in expected.items():
        assert output.touched is None
        elements = rope_terms(case, name)
        assert set(elements) == set(np.ndindex(output.value.shape))
        for index, terms in elements.items():
            if output.copied is not None and index[-1] >= output.copied:
                assert exact_value(output, index) == exactly(terms)
                continue
            assert spec.accumulate or len(terms) == output.terms or index[-1] >= spec.rotary_dim
            prior = Fraction(float(case.prior[name][index])) if spec.accumulate else Fraction(0)
            exact, magnitude = exactly(terms) + prior, size(terms) + abs(prior)
            error = abs(exact_value(output, index) - exact)
            assert error <= own_error(precise, len(terms), magnitude)
            own = own_error(False, len(terms), magnitude) + len(terms) * ETA
            assert abs(Fraction(float(output.magnitude[index])) - magnitude) <= own
    assert (expected.get("grad_q") is None) or (expected["grad_q"].copied is None) == (
        spec.accumulate or spec.rotary_dim == spec.head_dim
    )


@given(rope_cases(accumulate=False))
def test_squares_are_the_terms_squares(case: Case) -> None:
    for name, output in oracle.expected(case).items():
        squares = output.bilinear(np.square, np.square)
        for index, terms in rope_terms(case, name).items():
            exact = sum((Fraction(a) ** 2 * Fraction(b) ** 2 for _, a, b in terms), Fraction(0))
            assert float(exact) == pytest.approx(squares[index], rel=1e-12, abs=1e-300)


@given(st.one_of(rope_cases(), qkv_cases()), st.integers(0, 2**32))
def test_strides_do_not_matter_and_inputs_are_only_read(case: Case, seed: int) -> None:
    rng = np.random.default_rng(seed)

    def scattered(array: np.ndarray | None) -> np.ndarray | None:
        """The same values in every second place of a larger buffer, axes reversed in memory."""
        if array is None:
            return None
        buffer = np.full([2 * n for n in array.shape[::-1]], 99, array.dtype)
        view = buffer[(slice(None, None, 2),) * array.ndim].T
        view = view[(slice(None, None, int(rng.choice([-1, 1]))),) * array.ndim]
        view[...] = array
        view.flags.writeable = False
        return view

    moved = replace(case, inputs={name: scattered(array) for name, array in case.inputs.items()})
    for name, output in oracle.expected(case).items():
        again = oracle.expected(moved)[name]
        size = output.magnitude if output.product is None else output.product.P.reshape(output.value.shape)
        assert np.all(np.abs(again.value - output.value) <= size * 2.0**-45)


# ---- projections ---------------------------------------------------------------------------------------


def d_terms(case: Case) -> Callable[[str], list[list[list[Term]]]]:
    """Terms of D, [tokens][channels], of a part; tokens in the order of hidden_states' rows."""
    spec = case.spec
    rope = spec.rope
    outer = [(b, s) for b in range(rope.batch) for s in range(rope.seq)]
    if rope.layout == "sbhd":
        outer = [(b, s) for s in range(rope.seq) for b in range(rope.batch)]

    def of(part: str) -> list[list[list[Term]]]:
        side = replace(rope, rotary_dim=0) if part == "v" else rope
        upstream = {"q": "grad_query", "k": "grad_key", "v": "grad_value"}[part]
        heads = range(spec.rows(part) // rope.head_dim)
        channels = [(h, j) for h in heads for j in range(rope.head_dim)]
        return [
            [rotated_terms(side, case.inputs, upstream, b, h, s, j) for h, j in channels] for b, s in outer
        ]

    return of


def qkv_elements(case: Case, name: str) -> Iterator[tuple[tuple[int, ...], list[tuple[list[Term], float]]]]:
    """Index in the matrix, and for every product the terms of D and the factor B."""
    spec, of = case.spec, d_terms(case)
    if name == "grad_hidden_states":
        ds = [list(itertools.chain(*parts)) for parts in zip(of("q"), of("k"), of("v"), strict=True)]
        weights = np.concatenate([case.inputs[f"{part}_weight"].astype(np.float64) for part in "qkv"])
        for row, d in enumerate(ds):
            for c in range(spec.hidden_size):
                yield (row, c), [(terms, float(weights[k, c])) for k, terms in enumerate(d)]
        return
    part = name.removeprefix("grad_")[0]
    d, hidden = of(part), case.inputs["hidden_states"].reshape(spec.tokens, spec.hidden_size)
    for row in range(spec.rows(part)):
        if name.endswith("bias"):
            yield (row,), [(d[token][row], 1.0) for token in range(spec.tokens)]
            continue
        for c in range(spec.hidden_size):
            yield (row, c), [(d[token][row], float(hidden[token, c])) for token in range(spec.tokens)]


@given(qkv_cases())
def test_qkv_agrees_with_rational_arithmetic(case: Case) -> None:
    spec = case.spec
    precise = spec.rope.compute == "float64"
    expected = oracle.expected(case)
    assert tuple(expected) == case.outputs
    for name, output in expected.items():
        assert output.touched is None
        shape = case.prior[name].shape if spec.accumulate else output.value.shape
        assert output.value.shape == shape
        for index, products in qkv_elements(case, name):
            place = np.unravel_index(np.ravel_multi_index(index, flat(output)), shape)
            check_element(case, name, output, products, place, precise)


def flat(output: oracle.Expected) -> tuple[int, ...]:
    """The shape of the result as a matrix."""
    if output.product is None:
        return output.value.shape
    return (output.product.left.shape[0], output.product.right.shape[1])


def check_element(
    case: Case, name: str, output: oracle.Expected, products: list, place: tuple, precise: bool
) -> None:
    prior = Fraction(float(case.prior[name][place])) if case.spec.accumulate else Fraction(0)
    exact = prior + sum((exactly(terms) * Fraction(b) for terms, b in products), Fraction(0))
    p = sum((size(terms) * abs(Fraction(b)) for terms, b in products), Fraction(0))
    q = sum((abs(exactly(terms) * Fraction(b)) for terms, b in products), Fraction(0))
    # D's own double-double sum is an error in p, not in q
    assert abs(exact_value(output, place) - exact) <= own_error(
        precise, 2 * len(products) + 2, p + abs(prior)
    )
    if output.product is None:
        magnitude = output.magnitude[place]
        assert float(p + abs(prior)) == pytest.approx(magnitude, rel=1e-12)
        return
    assert float(p) == pytest.approx(output.product.P.reshape(output.value.shape)[place], rel=1e-12)
    assert float(q) == pytest.approx(
        output.product.Q.reshape(output.value.shape)[place], rel=1e-12, abs=float(p) * 1e-12
    )
    n = sum(1 for terms, b in products if b and any(a and f for _, a, f in terms))
    assert n == np.broadcast_to(output.terms, output.value.shape)[place]


# ---- NaN and Inf ---------------------------------------------------------------------------------------


def poison(case: Case, rng: np.random.Generator) -> Case:
    """The case with a NaN or Inf in about one input element of ten."""

    def spoilt(array: np.ndarray | None) -> np.ndarray | None:
        if array is None:
            return None
        bad = rng.choice([np.nan, np.inf, -np.inf], array.shape)
        return np.where(rng.random(array.shape) < 0.1, bad, array.astype(np.float64)).astype(array.dtype)

    inputs = {name: spoilt(array) for name, array in case.inputs.items()}
    return replace(case, inputs=inputs, prior={name: spoilt(array) for name, array in case.prior.items()})


def bad(terms: list[Term]) -> bool:
    return any(not (np.isfinite(a) and np.isfinite(b)) for _, a, b in terms)


@given(rope_cases(), st.integers(0, 2**32))
def test_rope_follows_nan_and_inf_through_the_sums(case: Case, seed: int) -> None:
    case = poison(case, np.random.default_rng(seed))
    for name, output in oracle.expected(case).items():
        touched = np.broadcast_to(False if output.touched is None else output.touched, output.value.shape)
        for index, terms in rope_terms(case, name).items():
            if output.copied is not None and index[-1] >= output.copied:
                assert not touched[index]
                np.testing.assert_equal(output.value[index], terms[0][1])
                continue
            spoilt = case.spec.accumulate and not np.isfinite(float(case.prior[name][index]))
            assert touched[index] == (spoilt or bad(terms))
            assert np.isfinite(output.value[index])


@given(qkv_cases(), st.integers(0, 2**32))
def test_qkv_follows_nan_and_inf_through_the_sums(case: Case, seed: int) -> None:
    case = poison(case, np.random.default_rng(seed))
    for name, output in oracle.expected(case).items():
        touched = np.broadcast_to(False if output.touched is None else output.touched, output.value.shape)
        for index, products in qkv_elements(case, name):
            place = np.unravel_index(np.ravel_multi_index(index, flat(output)), output.value.shape)
            reached = any(bad(terms) or not np.isfinite(b) for terms, b in products)
            spoilt = case.spec.accumulate and not np.isfinite(float(case.prior[name][place]))
            assert touched[place] == (spoilt or reached)


# ---- double-double -------------------------------------------------------------------------------------

finite = st.floats(allow_nan=False, allow_infinity=False)
ordinary = st.floats(min_value=-(2.0**300), max_value=2.0**300).filter(lambda a: a == 0 or abs(a) > 2.0**-300)


@given(finite, finite)
def test_two_sum_is_exact(a: float, b: float) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        total, error = two_sum(np.array(a), np.array(b))
    if np.isfinite(total):
        assert Fraction(float(total)) + Fraction(float(error)) == Fraction(a) + Fraction(b)


@given(finite, finite)
def test_two_product_is_exact_until_it_leaves_the_range(a: float, b: float) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        product, error = two_product(np.array(a), np.array(b))
    exact = Fraction(a) * Fraction(b)
    if not np.isfinite(product):
        assert abs(exact) >= Fraction(2) ** 1023
        return
    assert abs(Fraction(float(product)) + Fraction(float(error)) - exact) <= ETA
    if abs(exact) >= Fraction(1, 2**900):
        assert Fraction(float(product)) + Fraction(float(error)) == exact


@given(st.lists(st.tuples(ordinary, ordinary), max_size=30))
def test_dot_keeps_its_promise(pairs: list[tuple[float, float]]) -> None:
    high, low = dot(((np.array(a), np.array(b)) for a, b in pairs), ())
    exact = sum((Fraction(a) * Fraction(b) for a, b in pairs), Fraction(0))
    magnitude = sum((abs(Fraction(a) * Fraction(b)) for a, b in pairs), Fraction(0))
    allowed = 4 * len(pairs) ** 2 * magnitude / 2**106 + len(pairs) * ETA
    assert abs(Fraction(float(high)) + Fraction(float(low)) - exact) <= allowed
    assert float(high) + float(low) == float(high)


def test_double_double_survives_cancellation_that_float64_does_not() -> None:
    big = 2.0**60 + 2.0**20
    pairs = [(big, big), (1.0, 3.0), (-big, big)]
    assert dot(((np.array(a), np.array(b)) for a, b in pairs), ()) == (3.0, 0.0)
    assert big * big + 3.0 - big * big == 0.0


def test_float64_overflow_leaves_the_value_unknown() -> None:
    spec = RopeSpec(
        batch=1, heads=1, kv_heads=None, seq=1, head_dim=4, rotary_dim=4, dtype="float64", needs=("q",),
        table_dtype="float64",
    )  # fmt: skip
    inputs = {"grad_q_embed": np.array([1e200, 1.0, 1e200, 2.0]).reshape(1, 1, 1, 4), "q": None}
    inputs |= {"cos": np.array([[1e200, 3.0, 2.0, 1.0]]), "sin": np.array([[1.0, 2.0, 1.0, 0.0]])}
    inputs |= {"grad_k_embed": None, "k": None}
    output = oracle.expected(Case("overflow", spec, inputs))["grad_q"]
    np.testing.assert_array_equal(np.isnan(output.value.ravel()), [True, False, False, False])
    assert output.value.ravel()[1] == 3.0
