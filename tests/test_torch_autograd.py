"""Forward and backward against torch.autograd, with RoPE written from scratch here; and rules of algebra.

Tolerances are derived: every result is a sum of n products, so that each of the two computations is within
γ_n·Σ|t| of the exact one (Higham 2002, §3.1). Σ|t| comes out of the same graph when all inputs are made
absolute and no sign is flipped. Where all inputs are small whole numbers, everything is exact and results are
compared with ==.
"""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from conftest import need
from hypothesis import assume, given, note
from hypothesis import strategies as st

import ropegrad as rg
from ropegrad.backends import BACKENDS
from ropegrad.spec import LAYOUTS, PAIRINGS, TABLES
from ropegrad.verify import draws
from ropegrad.verify.case import ROPE_INPUTS
from ropegrad.verify.strategies import SEEDS, qkv_specs, rope_specs

torch = need("torch", "interop")

ANY = rg.RopeSpec(batch=1, heads=1, kv_heads=1, seq=1, head_dim=2, rotary_dim=2)
RUNS = [("torch", None), *(("numpy", b.name) for b in BACKENDS if b.why_not(ANY) is None)]
UNITS = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
TINY = {"float64": 2.0**-1075, "float32": 2.0**-150, "float16": 2.0**-25, "bfloat16": 2.0**-134}
AXES = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (1, 2, 0, 3)}  # where b, h, s, d are
each_run = pytest.mark.parametrize(("namespace", "backend"), RUNS)


def runs():
    """As `each_run`, one after the other on the same example."""
    for namespace, backend in RUNS:
        note(f"{namespace} {backend or ''}")
        yield namespace, backend


# ---- RoPE as models write it -----------------------------------------------------------------------------


def rotate_half(x, sign=-1):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((sign * second, first), dim=-1)


def rotate_every_two(x, sign=-1):
    return torch.stack((sign * x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def forward(x, cos, sin, spec, sign=-1):
    """RoPE of one side, in the caller's layout; sign=+1 adds up what the rotation would subtract."""
    rotate = rotate_half if spec.pairing == "half" else rotate_every_two
    if spec.table == "half":
        cos, sin = (
            torch.cat((t, t), dim=-1) if spec.pairing == "half" else t.repeat_interleave(2, dim=-1)
            for t in (cos, sin)
        )
    cos, sin = (t[..., None, :, :] if t.ndim == 3 else t for t in (cos, sin))
    heads = x.permute(AXES[spec.layout])
    rotary, through = heads[..., : spec.rotary_dim], heads[..., spec.rotary_dim :]
    y = torch.cat((rotary * cos + rotate(rotary, sign) * sin, through), dim=-1)
    return y.permute(tuple(np.argsort(AXES[spec.layout])))


def projections(x, cos, sin, spec, sign=-1):
    """query, key and value of the hidden states."""
    results = []
    for part in "qkv":
        rows = x["hidden_states"] @ x[f"{part}_weight"].T + x[f"{part}_bias"]
        count = spec.rope.heads if part == "q" else spec.rope.kv_heads
        heads = rows.unflatten(-1, (count, spec.rope.head_dim))
        heads = heads.transpose(1, 2) if spec.rope.layout == "bhsd" else heads
        results.append(heads if part == "v" else forward(heads, cos, sin, spec.rope, sign))
    return results


def differentiate(case, sign=-1):
    """The wanted gradients by autograd in float64; with sign=+1, of absolute inputs: Σ|t|."""
    spec = case.spec
    x = {n: torch.from_numpy(v.astype(np.float64)) for n, v in case.inputs.items() if v is not None}
    x |= biases(spec)
    x = {name: (value.abs() if sign > 0 else value).requires_grad_() for name, value in x.items()}
    if isinstance(spec, rg.RopeSpec):
        sides = [side for side in "qk" if f"grad_{side}_embed" in x]
        outputs = [forward(x[side], x["cos"], x["sin"], spec, sign) for side in sides]
        upstream = [x[f"grad_{side}_embed"] for side in sides]
    else:
        outputs = projections(x, x["cos"], x["sin"], spec, sign)
        upstream = [x["grad_query"], x["grad_key"], x["grad_value"]]
    leaves = [x[need] for need in spec.needs]
    found = torch.autograd.grad(outputs, leaves, upstream, allow_unused=True, materialize_grads=True)
    results = dict(zip(case.outputs, found, strict=True))
    if isinstance(spec, rg.RopeSpec) and spec.adjoint == "paired":
        results |= paired(x, spec, sign)
    if case.spec.accumulate:
        prior = {name: torch.from_numpy(value.astype(np.float64)) for name, value in case.prior.items()}
        results = {n: v + (prior[n].abs() if sign > 0 else prior[n]) for n, v in results.items()}
    return {name: value.detach().numpy() for name, value in results.items()}


def paired(x, spec, sign):
    """Problem 068's formula, g*cos - rotate_half(g)*sin, which is the forward with −sin."""
    sin = x["sin"] if sign > 0 else -x["sin"]
    return {
        f"grad_{side}": forward(x[f"grad_{side}_embed"], x["cos"], sin, spec, sign)
        for side in "qk"
        if side in spec.needs
    }


def biases(spec):
    if isinstance(spec, rg.RopeSpec):
        return {}
    return {f"{p}_bias": torch.linspace(-2, 3, spec.rows(p), dtype=torch.float64) for p in "qkv"}


# ---- ours ------------------------------------------------------------------------------------------------


def send(x, namespace):
    """An array of the namespace with the values of a NumPy array, which it does not share."""
    if x is None or namespace == "numpy":
        return None if x is None else x.copy()
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.astype(np.float32)).bfloat16()
    return torch.from_numpy(x.copy())


def fetch(x):
    return x if isinstance(x, np.ndarray) else x.double().numpy()


def words(spec):
    return {"table": spec.table, "layout": spec.layout, "pairing": spec.pairing}


def options(spec):
    own = {"needs": spec.needs, "accumulate": spec.accumulate}
    if isinstance(spec, rg.RopeSpec):
        return own | words(spec) | {"adjoint": spec.adjoint}
    return own | words(spec.rope) | {"precision": spec.precision}


def gradients(case, namespace, backend):
    """Our gradients by name, as the namespace returns them."""
    spec = case.spec
    is_rope = isinstance(spec, rg.RopeSpec)
    biased = not is_rope and any(need.endswith("bias") for need in spec.needs)
    kind = rg.RopeGrads if is_rope else rg.QkvBiasGrads if biased else rg.QkvGrads
    out = None
    if spec.accumulate:
        out = tuple(send(case.prior.get(name), namespace) for name in kind._fields)
    operation = rg.rope_backward if is_rope else rg.qkv_rope_backward
    arrays = [send(x, namespace) for x in case.inputs.values()]
    results = operation(*arrays, **options(spec), out=out, backend=backend)
    assert type(results) is kind
    found = {name: x for name, x in results._asdict().items() if x is not None}
    assert tuple(found) == case.outputs
    return found


# ---- judging ---------------------------------------------------------------------------------------------


def gamma(n, unit):
    return n * unit / (1 - n * unit)


def products(spec, name):
    """The products that this gradient is a sum of, what is accumulated being one; a rotated factor is two."""
    if not isinstance(spec, rg.RopeSpec):
        return spec.accumulate + 2 + (sum(map(spec.rows, "qkv")) if "hidden" in name else spec.tokens)
    if name in ("grad_q", "grad_k"):
        return spec.accumulate + 2
    heads, shared = (spec.heads or 0) + (spec.kv_heads or 0), spec.table_batch != spec.batch
    return spec.accumulate + heads * (spec.batch if shared else 1) * (2 if spec.table == "half" else 1)


def assert_close(got, expected, magnitude, n, *, compute="float64", storage="float64"):
    """Within both computations' rounding of n products, and ours to the storage dtype."""
    got = fetch(got).astype(np.float64)
    assert got.shape == expected.shape
    error = gamma(n, UNITS[compute]) * magnitude + n * TINY[compute]
    if storage != compute:
        error = error * (1 + UNITS[storage]) + UNITS[storage] * np.abs(expected) + TINY[storage]
    bound = error + gamma(n, UNITS["float64"]) * magnitude
    assert np.all(np.abs(got - expected) <= bound), np.max(np.abs(got - expected) / np.maximum(bound, 1e-300))


VALUES = st.sampled_from(["normal", "tiny_gradients", "zeros", "sparse", "coded"])
FINITE_TABLES = st.sampled_from(["normal", "benchmark", "llama3", "far", "scaled"])


@st.composite
def problems(draw, specs):
    """A case of a spec from `specs` with finite data that are no trouble to float64."""
    return draws.make_case(draw(specs), draw(SEEDS), values=draw(VALUES), tables=draw(FINITE_TABLES))


@given(case=problems(rope_specs(dtypes=("float64",))))
def test_rope_gradients_are_those_of_autograd(case):
    expected, magnitude = differentiate(case), differentiate(case, sign=1)
    for run in runs():
        for name, got in gradients(case, *run).items():
            assert_close(got, expected[name], magnitude[name], products(case.spec, name))


@given(case=problems(qkv_specs(dtypes=("float64",))))
def test_qkv_gradients_are_those_of_autograd(case):
    expected, magnitude = differentiate(case), differentiate(case, sign=1)
    for run in runs():
        for name, got in gradients(case, *run).items():
            assert_close(got, expected[name], magnitude[name], products(case.spec, name))


@given(case=problems(rope_specs()))
def test_gradients_in_any_dtype_round_once_and_keep_shape_and_dtype(case):
    expected, magnitude = differentiate(case), differentiate(case, sign=1)
    for run in runs():
        for name, got in gradients(case, *run).items():
            shape, storage = case.spec.output(name.removeprefix("grad_"))
            assert (tuple(got.shape), str(got.dtype).removeprefix("torch.")) == (shape, storage)
            precision = {"compute": case.spec.compute, "storage": storage}
            assert_close(got, expected[name], magnitude[name], products(case.spec, name), **precision)


@given(case=problems(rope_specs(dtypes=("float64",))))
def test_rope_rotates_as_models_do(case):
    spec = case.spec
    expected, magnitude = {}, {}
    for side in "qk":
        if case.inputs[side] is not None:
            x = [torch.from_numpy(case.inputs[name].copy()) for name in (side, "cos", "sin")]
            expected[f"{side}_embed"] = forward(*x, spec).numpy()
            magnitude[f"{side}_embed"] = forward(*(t.abs() for t in x), spec, sign=1).numpy()
    for namespace, backend in runs():
        arrays = {name: send(case.inputs[name], namespace) for name in ("q", "k", "cos", "sin")}
        for name, got in rg.rope(**arrays, **words(spec), backend=backend)._asdict().items():
            assert (got is None) == (name not in expected)
            if got is not None:
                assert_close(got, expected[name], magnitude[name], 2)


@given(case=problems(qkv_specs(dtypes=("float64",))), biased=st.booleans())
def test_qkv_rope_projects_and_rotates_as_models_do(case, biased):
    spec = case.spec
    assume(spec.rope.head_dim > 0)
    x = {n: torch.from_numpy(v.copy()) for n, v in case.inputs.items() if not n.startswith("grad")}
    bias = {name: value * biased for name, value in biases(spec).items()}
    expected = projections(x | bias, x["cos"], x["sin"], spec)
    absolute = {name: value.abs() for name, value in (x | bias).items()}
    magnitude = projections(absolute, absolute["cos"], absolute["sin"], spec, sign=1)
    options = words(spec.rope) | {"head_dim": spec.rope.head_dim, "precision": spec.precision}
    for namespace, backend in runs():
        arrays = {n: send(v.numpy(), namespace) for n, v in (x | (bias if biased else {})).items()}
        results = rg.qkv_rope(**arrays, **options, backend=backend)
        for got, right, size in zip(results, expected, magnitude, strict=True):
            assert_close(got, right.numpy(), size.numpy(), spec.hidden_size + 3)


@each_run
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_paired_differs_from_autograd_where_the_sines_of_a_pair_differ(namespace, backend, pairing):
    spec = rg.RopeSpec(
        batch=2, heads=4, kv_heads=2, seq=3, head_dim=6, rotary_dim=4, pairing=pairing, adjoint="paired",
        dtype="float64", table_dtype="float64", needs=("q", "k"),
    )  # fmt: skip
    unequal = draws.make_case(spec, 1, tables="normal")
    equal = draws.make_case(spec, 1, tables="llama3")
    for case, agrees in ((unequal, False), (equal, True)):
        exact = differentiate(replace(case, spec=replace(spec, adjoint="exact")))
        magnitude = differentiate(case, sign=1)
        for name, got in gradients(case, namespace, backend).items():
            error = np.abs(fetch(got) - exact[name])[..., :4]
            assert np.all(error <= 2 * gamma(2, UNITS["float64"]) * magnitude[name][..., :4]) == agrees
            if not agrees:
                assert np.median(error) > 0.1


# ---- the rules of the algebra, in whole numbers ----------------------------------------------------------


@st.composite
def whole(draw):
    """A spec, and a function that makes whole-number inputs for it, exact through every sum."""
    spec = draw(rope_specs(dtypes=("float64",)))
    kv_heads = spec.kv_heads or 1
    heads = 3 * kv_heads if spec.heads is None else spec.heads
    spec = replace(spec, heads=heads, kv_heads=kv_heads, needs=("q", "k", "cos", "sin"), accumulate=False)
    rng = np.random.default_rng(draw(SEEDS))
    shapes = {name: shape for name, (shape, _) in draws.input_shapes(spec).items()}
    return spec, lambda name: rng.integers(-9, 10, shapes[name]).astype(np.float64)


def run(spec, inputs, namespace, backend):
    """Our gradients as NumPy arrays, without grad_ in the names."""
    given_arrays = {name: send(x, namespace) for name, x in inputs.items()}
    results = rg.rope_backward(**given_arrays, **options(spec), backend=backend)
    return {name.removeprefix("grad_"): fetch(x) for name, x in results._asdict().items() if x is not None}


def made(draw_whole, *names):
    return {name: draw_whole(name) for name in names or ROPE_INPUTS}


def dot(a, b):
    return float(np.sum(a * b))


@given(problem=whole())
def test_adjoint_identities_hold_exactly(problem):
    spec, draw_whole = problem
    spec = replace(spec, adjoint="exact")
    x = made(draw_whole)
    g, width = [x["grad_q_embed"], x["grad_k_embed"]], spec.rotary_dim
    for namespace, backend in runs():
        back = run(spec, x, namespace, backend)
        arrays = {name: send(x[name], namespace) for name in ("q", "k", "cos", "sin")}
        y = [fetch(side) for side in rg.rope(**arrays, **words(spec), backend=backend)]
        in_heads = dot(g[0], y[0]) + dot(g[1], y[1])
        assert in_heads == dot(back["q"], x["q"]) + dot(back["k"], x["k"])
        in_tables = sum(dot(a[..., :width], b[..., :width]) for a, b in zip(g, y, strict=True))
        assert in_tables == dot(back["cos"], x["cos"]) + dot(back["sin"], x["sin"])


@given(problem=whole())
def test_gradients_are_linear_in_the_upstream_gradient(problem):
    spec, draw_whole = problem
    x, other = made(draw_whole), made(draw_whole, "grad_q_embed", "grad_k_embed")
    mixed = {name: x[name] - 3 * other[name] for name in other}
    for each in runs():
        first, second, both = (run(spec, x | change, *each) for change in ({}, other, mixed))
        assert all(np.array_equal(both[name], first[name] - 3 * second[name]) for name in both)


@given(problem=whole())
def test_permuting_heads_permutes_their_gradients_and_leaves_the_tables(problem):
    spec, draw_whole = problem
    x, axis = made(draw_whole), spec.layout.index("h")
    flipped = {n: np.flip(v, axis) if n not in ("cos", "sin") else v for n, v in x.items()}
    for each in runs():
        plain, permuted = run(spec, x, *each), run(spec, flipped, *each)
        for name in plain:
            expected = np.flip(plain[name], axis) if name in ("q", "k") else plain[name]
            assert np.array_equal(permuted[name], expected)


@given(problem=whole())
def test_batches_do_not_see_each_other(problem):
    spec, draw_whole = problem
    assume(spec.batch > 0)
    x, axis, own = made(draw_whole), spec.layout.index("b"), spec.table_batch == spec.batch
    single = replace(spec, batch=1, table_batch=1 if own else spec.table_batch)
    for each in runs():
        whole, total = run(spec, x, *each), {"cos": 0.0, "sin": 0.0}
        for b in range(spec.batch):
            alone = {n: v[b : b + 1] if own else v for n, v in x.items() if n in ("cos", "sin")}
            alone |= {n: np.take(v, [b], axis) for n, v in x.items() if n not in alone}
            part = run(single, alone, *each)
            for name in ("q", "k"):
                assert np.array_equal(part[name], np.take(whole[name], [b], axis))
            for name in total:
                total[name] = total[name] + part[name]
                assert not own or np.array_equal(part[name], whole[name][b : b + 1])
        assert own or all(np.array_equal(total[name], whole[name]) for name in total)


@each_run
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("table", TABLES)
def test_channels_past_the_rotary_width_come_back_bit_for_bit(namespace, backend, dtype, table):
    spec = rg.RopeSpec(
        batch=2, heads=2, kv_heads=1, seq=3, head_dim=7, rotary_dim=2, table=table, dtype=dtype,
        table_dtype=dtype, needs=("q", "k"),
    )  # fmt: skip
    x = draws.make_case(spec, 7).inputs
    edges = np.array([0.0, -0.0, np.inf, -np.inf, ml_dtypes.finfo(dtype).smallest_subnormal], dtype)
    for side in ("grad_q_embed", "grad_k_embed"):
        x[side] = x[side].copy()
        x[side][..., 2:] = edges
    back = run(spec, x, namespace, backend)
    for side in "qk":
        expected = x[f"grad_{side}_embed"][..., 2:]
        assert back[side][..., 2:].astype(dtype).tobytes() == expected.tobytes()


@each_run
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_axes_of_equal_size_are_not_confused(namespace, backend, layout, pairing):
    spec = rg.RopeSpec(
        batch=4, heads=4, kv_heads=4, seq=4, head_dim=4, rotary_dim=4, table_batch=4, layout=layout,
        pairing=pairing, dtype="float64", table_dtype="float64",
    )  # fmt: skip
    case = draws.make_case(spec, 3, values="coded")
    expected, magnitude = differentiate(case), differentiate(case, sign=1)
    for name, got in gradients(case, namespace, backend).items():
        assert_close(got, expected[name], magnitude[name], products(spec, name))


@each_run
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_angle_zero_is_the_identity(namespace, backend, table, pairing):
    spec = rg.RopeSpec(
        batch=2, heads=4, kv_heads=2, seq=3, head_dim=6, rotary_dim=6, table=table, pairing=pairing
    )
    x = draws.make_case(spec, 5).inputs
    cos, sin = rg.rope_tables(np.zeros(3), 6, table=table, pairing=pairing)
    arrays = {name: send(value, namespace) for name, value in (x | {"cos": cos, "sin": sin}).items()}
    back = rg.rope_backward(**arrays, table=table, pairing=pairing, backend=backend)
    ahead = rg.rope(
        *(arrays[name] for name in ("q", "k", "cos", "sin")), table=table, pairing=pairing, backend=backend
    )
    for got, name in zip((*back[:2], *ahead), ("grad_q_embed", "grad_k_embed", "q", "k"), strict=True):
        assert np.array_equal(fetch(got), x[name])
