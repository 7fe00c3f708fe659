"""The forwards against complex numbers, exactly: whole numbers, so that every sum is right in any order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ropegrad as rg
from ropegrad.verify.strategies import rope_specs

TO_BHSD = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (1, 2, 0, 3)}


def members(x, pairing):
    half = x.shape[-1] // 2
    return (x[..., :half], x[..., half:]) if pairing == "half" else (x[..., 0::2], x[..., 1::2])


def rotated(x, cos, sin, spec):
    """(x1 + i·x2)·(c + i·s), its real part by the first column of each pair, its imaginary by the second."""
    y = x.copy()
    heads = y.transpose(TO_BHSD[spec.layout])
    z1, z2 = members(heads[..., : spec.rotary_dim].copy(), spec.pairing)
    tables = [t if t.ndim == 3 else t[None] for t in (cos, sin)]
    (c1, c2), (s1, s2) = (members(t[:, None], spec.pairing) if spec.table == "full" else (t[:, None],) * 2
                          for t in tables)  # fmt: skip
    z = z1 + 1j * z2
    first, second = members(heads[..., : spec.rotary_dim], spec.pairing)
    first[...], second[...] = (z * (c1 + 1j * s1)).real, (z * (c2 + 1j * s2)).imag
    return y


@given(spec=rope_specs(dtypes=("float32",)), seed=st.integers(0, 2**32 - 1))
def test_rope_is_the_complex_product(backend, spec, seed):
    rng = np.random.default_rng(seed)
    q, k = (
        None if heads is None else rng.integers(-9, 10, spec.head_shape(heads)).astype(np.float32)
        for heads in (spec.heads, spec.kv_heads)
    )
    cos, sin = rng.integers(-9, 10, (2, *spec.table_shape)).astype(np.float32)
    words = {"table": spec.table, "layout": spec.layout, "pairing": spec.pairing}
    turned = rg.rope(q, k, cos, sin, **words, backend=backend)
    for x, y in zip((q, k), turned, strict=True):
        assert (x is None and y is None) or np.array_equal(y, rotated(x, cos, sin, spec))


@pytest.mark.parametrize("layout", list(TO_BHSD))
def test_qkv_rope_projects_and_turns(backend, layout):
    rng = np.random.default_rng(1)
    tokens = (3, 2) if layout == "sbhd" else (2, 3)
    hidden = rng.integers(-4, 5, (*tokens, 7)).astype(np.float32)
    weights = [rng.integers(-4, 5, (heads * 6, 7)).astype(np.float32) for heads in (4, 2, 2)]
    biases = [rng.integers(-4, 5, heads * 6).astype(np.float32) for heads in (4, 2, 2)]
    cos, sin = rng.integers(-4, 5, (2, 3, 6)).astype(np.float32)
    named = dict(zip(("q_bias", "k_bias", "v_bias"), biases, strict=True))
    made = rg.qkv_rope(hidden, *weights, cos, sin, head_dim=6, layout=layout, backend=backend, **named)
    projected = []
    for weight, bias in zip(weights, biases, strict=True):
        rows = (hidden @ weight.T + bias).reshape(*tokens, -1, 6)
        projected.append(rows.transpose(0, 2, 1, 3) if layout == "bhsd" else rows)
    turned = rg.rope(*projected[:2], cos, sin, layout=layout, backend=backend)
    for got, right in zip(made, (*turned, projected[2]), strict=True):
        assert np.array_equal(got, right)
