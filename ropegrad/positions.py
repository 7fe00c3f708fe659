"""`rope_tables`: from positions to cos and sin."""

from __future__ import annotations

import math
import sys
from numbers import Real
from typing import Any

import array_api_compat.numpy as numpy_namespace
import numpy as np

from ropegrad.arrays import DTYPES, Array, dtype_in, namespace, namespace_name
from ropegrad.backends.base import quiet
from ropegrad.errors import SpecError
from ropegrad.maths import tables
from ropegrad.spec import PAIRINGS, TABLES, judge_word, whole


@quiet
def rope_tables(
    positions: Array,
    rotary_dim: int,
    *,
    base: float = 10_000.0,
    table: str = "full",
    pairing: str = "half",
    dtype: str = "float32",
) -> tuple[Array, Array]:
    """cos and sin of θ = position · base^(−2i/R), i = 0 … R/2−1 (Su et al., "RoFormer", 2021, §3.2.2).

    Parameters
    ----------
    positions
        [S] or [B, S], whole or real numbers of any value, negative ones too; an array of any namespace. Not
        of a 16-bit dtype: bfloat16 has no 257, so that the tables of long sequences would have equal rows.
    rotary_dim
        R, even: the channels that are rotated.
    base
        10,000 in RoFormer and Llama 2; 500,000 in Llama 3.
    table
        "full": columns for both members of each pair, [..., R]; "half": one a pair, [..., R/2].
    pairing
        "half" or "interleaved": where a full table's two columns of a pair stand.
    dtype
        Of the result: "float16", "bfloat16", "float32" or "float64". Angles, cosines and sines are computed
        in float64 and rounded once (to bfloat16 by way of float32, as NumPy and PyTorch do), so that far
        positions stay apart.

    Returns
    -------
    (cos, sin)
        In the namespace and on the device of `positions`.

    Raises
    ------
    SpecError
        If rotary_dim is odd, the base not positive, a word unknown, or positions no array [S] or [B, S] of
        whole numbers, float32 or float64.
    """
    _judge(positions, rotary_dim, base, table, pairing, dtype)
    xp: Any = namespace(positions)
    device = getattr(positions, "device", None)
    target: Any = xp
    host = positions
    if xp.__name__ == "jax.numpy":  # float64 may be switched off there: compute on the host
        host, target = _concrete(positions), numpy_namespace
    theta = tables.angles(target, target.astype(host, target.float64), int(rotary_dim), float(base))
    made = tables.cos_sin(target, theta, pairing=pairing, table=table)
    cos, sin = (target.astype(array, dtype_in(target, dtype)) for array in made)
    if target is xp:
        return cos, sin
    cos, sin = (xp.asarray(table, device=device) for table in (cos, sin))
    if str(cos.dtype) != dtype:
        raise SpecError(f"dtype={dtype!r} is switched off in this JAX: enable x64, or ask for float32")
    return cos, sin


def _as_float(number: Real) -> float:
    try:
        return float(number)
    except OverflowError:  # a whole number beyond float64
        return math.inf


def _concrete(positions: Array) -> np.ndarray[Any, Any]:
    try:
        return np.asarray(positions)
    except Exception:
        raise SpecError(
            "positions are being traced by JAX: make the tables outside, from concrete positions"
        ) from None


def _judge(positions: Any, rotary_dim: object, base: object, table: str, pairing: str, dtype: str) -> None:
    namespace_name("positions", positions)
    kind = str(positions.dtype).rpartition(".")[2]
    if not kind.startswith(("int", "uint", "float", "bfloat")):
        raise SpecError(f"positions have dtype {kind}: they must be whole or real numbers")
    if kind.startswith(("bfloat", "float8", "float16")):
        raise SpecError(
            f"positions have dtype {kind}, which rounds far ones: make them whole or float32 ones"
        )
    if len(positions.shape) not in (1, 2):
        raise SpecError(f"positions have shape {tuple(positions.shape)}: they must be [S] or [B, S]")
    width = whole("rotary_dim", rotary_dim)
    if width < 0 or width % 2:
        raise SpecError(f"rotary_dim must be an even number of channels, got {width}")
    if (
        isinstance(base, bool)
        or not isinstance(base, Real)
        or not sys.float_info.min <= _as_float(base) < math.inf
    ):
        raise SpecError(f"base must be a positive number, got {base!r}")
    judge_word("table", table, TABLES)
    judge_word("pairing", pairing, PAIRINGS)
    judge_word("dtype", dtype, DTYPES)
