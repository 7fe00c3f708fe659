"""`rope_tables` against mpmath with 50 digits, in every namespace.

The bound is derived. With u = 2⁻⁵³, θ = p·b^(−e), e = 2i/R rounded once: δ = (e·ln b + 4)·u bounds θ's
relative error (the exponent's rounding, a power within 2u, the roundings of the frequency and the product),
|θ|·δ is what reaches cos and sin, and 8u more allows them 4 units in the last place, the most that NumPy
accepts of its own loops. Then one rounding to the table's dtype; float64 becomes a 16-bit dtype by way of
float32.
"""

import itertools
import math

import ml_dtypes
import numpy as np
import pytest
from conftest import need
from hypothesis import given
from hypothesis import strategies as st

import ropegrad as rg

mpmath = need("mpmath", "test")
U = 2.0**-53
FINAL = {"float64": 0.0, "float32": 2.0**-24, "float16": 2.0**-11 + 2.0**-24, "bfloat16": 2.0**-8 + 2.0**-24}
TINY = {"float64": 0.0, "float32": 2.0**-150, "float16": 2.0**-25, "bfloat16": 2.0**-134}
DTYPES = tuple(FINAL)
NAMESPACES = {
    "numpy": ("numpy", "test"), "torch": ("torch", "interop"), "jax": ("jax.numpy", "interop"),
    "dask": ("dask.array", "dask"), "array_api_strict": ("array_api_strict", "test"),
}  # fmt: skip


def exact(position, rotary_dim, base):
    """θ, cos θ and sin θ of every pair, rounded once to float64."""
    found = []
    with mpmath.workdps(50):
        for i in range(rotary_dim // 2):
            theta = mpmath.mpf(position) * mpmath.mpf(base) ** (-mpmath.mpf(2 * i) / rotary_dim)
            found.append([float(x) for x in (theta, mpmath.cos(theta), mpmath.sin(theta))])
    return np.array(found).reshape(-1, 3).T


def assert_tables(
    tables, positions, rotary_dim, base=10_000.0, table="full", pairing="half", dtype="float32"
):
    """Shape, order of columns, and every element within the bound."""
    columns = np.arange(rotary_dim // 2)
    if table == "full":
        columns = np.tile(columns, 2) if pairing == "half" else np.repeat(columns, 2)
    found = np.array([exact(p, rotary_dim, base) for p in positions.ravel().tolist()])
    theta, *right = np.moveaxis(found.reshape(*positions.shape, 3, rotary_dim // 2)[..., columns], -2, 0)
    exponent = 2 * columns / max(rotary_dim, 1)
    error = 1.001 * np.abs(theta) * (exponent * abs(math.log(base)) + 4) * U + 8 * U
    for got, expected in zip(tables, right, strict=True):
        assert got.shape == expected.shape
        bound = error * (1 + FINAL[dtype]) + (FINAL[dtype] + U) * np.abs(expected) + TINY[dtype]
        assert np.all(np.abs(got.astype(np.float64) - expected) <= bound)


def to_numpy(x):
    if hasattr(x, "detach"):
        return x.double().numpy()
    return np.asarray(x.compute() if hasattr(x, "compute") else x)


WORDS = list(itertools.product(("full", "half"), ("half", "interleaved"), DTYPES))


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_every_namespace_gives_tables_of_its_own_kind(namespace):
    xp = need(*NAMESPACES[namespace])
    positions = np.array([[-3, 0, 1, 7], [1000, 65_536, 131_071, 1_000_000]], np.int32)
    given_positions = xp.asarray(positions)
    for table, pairing, dtype in WORDS:
        if namespace == "array_api_strict" and dtype.endswith("16"):
            with pytest.raises(rg.SpecError, match=f"array_api_strict has no dtype {dtype}: choose another"):
                rg.rope_tables(given_positions, 6, dtype=dtype)
            continue
        if namespace == "jax" and dtype == "float64":
            continue  # its own test below
        words = {"table": table, "pairing": pairing, "dtype": dtype}
        tables = rg.rope_tables(given_positions, 6, **words)
        for made in tables:
            assert type(made) is type(given_positions)
            assert str(made.dtype).rpartition(".")[2] == dtype
            assert getattr(made, "device", None) == getattr(given_positions, "device", None)
        assert_tables([to_numpy(made) for made in tables], positions, 6, **words)
    assert np.array_equal(to_numpy(given_positions), positions)


def test_jax_gives_float64_where_it_is_switched_on_and_far_positions_where_it_is_not():
    jax = need("jax", "interop")
    positions = np.array([0, 1_000_000])
    for x64, dtype in ((False, "float32"), (True, "float32"), (True, "float64")):
        with jax.enable_x64(x64):
            tables = rg.rope_tables(jax.numpy.asarray(positions), 6, dtype=dtype)
            assert_tables([np.asarray(made) for made in tables], positions, 6, dtype=dtype)


@given(
    positions=st.lists(
        st.integers(-(2**31), 2**31) | st.floats(-1e6, 1e6) | st.sampled_from([1e6, -1e6, 0.0]), max_size=3
    ),
    rotary_dim=st.integers(0, 20).map(lambda pairs: 2 * pairs),
    base=st.sampled_from([10_000.0, 500_000.0, 1e6, 2.0, 1.0, 0.5]),
    words=st.sampled_from(WORDS),
)
def test_tables_are_within_their_bound(positions, rotary_dim, base, words):
    table, pairing, dtype = words
    positions = np.array(positions, np.float64)
    options = {"base": base, "table": table, "pairing": pairing, "dtype": dtype}
    tables = rg.rope_tables(positions, rotary_dim, **options)
    assert all(made.dtype == np.dtype(getattr(ml_dtypes, dtype, dtype)) for made in tables)
    assert_tables(tables, positions, rotary_dim, **options)


WHOLE = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]


@pytest.mark.parametrize("dtype", [*WHOLE, "float32", "float64"])
@pytest.mark.parametrize("shape", [(4,), (2, 2), (0,), (2, 0)])
def test_positions_of_any_dtype_and_shape(dtype, shape):
    numbers = [0, 1, 5, 100] if dtype.startswith("u") else [-100, -1, 0, 100]
    positions = np.array(numbers[: math.prod(shape)], np.dtype(dtype)).reshape(shape)
    tables = rg.rope_tables(positions, 8)
    assert_tables(tables, positions.astype(np.float64), 8)
    assert rg.rope_tables(positions, np.int64(8), base=np.float32(1e4))[0].shape == (*shape, 8)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn"])
def test_positions_that_were_rounded_are_refused(dtype):
    """As autocast makes them: 65,536 and the seven that follow are one number in bfloat16."""
    positions = np.arange(8).astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    with pytest.raises(rg.SpecError, match=f"positions have dtype {dtype}, which rounds far ones"):
        rg.rope_tables(positions, 16)


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_full_tables_hold_each_column_of_half_tables_for_both_members(pairing):
    positions = np.array([2, 3])
    half = rg.rope_tables(positions, 6, table="half", pairing=pairing)
    for wide, narrow in zip(rg.rope_tables(positions, 6, pairing=pairing), half, strict=True):
        first, second = (wide[:, :3], wide[:, 3:]) if pairing == "half" else (wide[:, ::2], wide[:, 1::2])
        assert np.array_equal(first, narrow)
        assert np.array_equal(second, narrow)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_far_positions_stay_apart(dtype):
    """bfloat16 angles would make one row of all eight: their step at 65,536 is 512."""
    positions = np.arange(65_536, 65_544)
    for made in rg.rope_tables(positions, 16, dtype=dtype):
        assert len({row.tobytes() for row in made}) == len(positions)


def test_neighbouring_far_positions_give_what_is_used_with_bfloat16_queries():
    positions = np.arange(65_536, 65_544)
    cos, sin = rg.rope_tables(positions, 16)
    q = np.ones((1, 1, 8, 16), ml_dtypes.bfloat16)
    rotated = rg.rope(q, None, cos, sin).q_embed
    assert rotated.dtype == q.dtype
    assert len({row.tobytes() for row in rotated[0, 0]}) == len(positions)


BAD = [
    ({"positions": [1, 2]}, r"positions is a list, not an array: pass an array"),
    ({"positions": 3}, "positions is a int, not an array: pass"),
    ({"positions": np.int64(3)}, "positions is a int64, not an array: pass"),
    ({"positions": np.ma.masked_array([1, 2])}, "MaskedArray: pass the plain array"),
    ({"positions": np.array([True])}, "dtype bool: they must be whole or real numbers"),
    ({"positions": np.array([1j])}, "dtype complex128: they must be whole or real numbers"),
    ({"positions": np.array([None])}, "dtype object: they must be whole or real"),
    ({"positions": np.array(["a"])}, "dtype <U1: they must be whole or real"),
    ({"rotary_dim": 5}, "rotary_dim must be an even number of channels, got 5"),
    ({"rotary_dim": -2}, "even number of channels, got -2"),
    ({"rotary_dim": 4.0}, "rotary_dim=4.0 is no whole number: pass an int"),
    ({"rotary_dim": None}, "rotary_dim=None is no whole number: pass an int"),
    *(({"base": base}, f"base must be a positive number, got {base!r}")
      for base in (0.0, -1.0, math.nan, math.inf, 5e-324, 10**400, "10000", None, True)),
    ({"positions": np.array(3)}, r"positions have shape \(\): they must be \[S\] or \[B, S\]"),
    ({"positions": np.ones((1, 2, 3))}, r"positions have shape \(1, 2, 3\): they must be"),
    ({"table": "both"}, "table='both' is unknown: it must be one of 'full', 'half'"),
    ({"pairing": None}, "pairing=None is unknown: it must be one of 'half', 'interleaved'"),
    ({"dtype": np.float32}, "dtype=.* is unknown: it must be one of 'float16', 'bfloat16'"),
    ({"dtype": "float8"}, "dtype='float8' is unknown: it must be one of"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_bad_calls_are_refused(changes, message):
    with pytest.raises(rg.SpecError, match=message):
        rg.rope_tables(**({"positions": np.arange(3), "rotary_dim": 4} | changes))


def test_positions_that_jax_traces_are_refused():
    jax = need("jax", "interop")
    with pytest.raises(rg.SpecError, match="traced by JAX: make the tables outside"):
        jax.jit(lambda positions: rg.rope_tables(positions, 4))(jax.numpy.arange(3))
