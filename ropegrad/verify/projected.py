"""What query, key and value have to be: x·Wᵀ, of which query and key are rotated."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ropegrad.spec import QkvSpec
from ropegrad.verify.bounds import FORMATS, Format, gamma
from ropegrad.verify.case import Case
from ropegrad.verify.exact import Bools, Expected, finite
from ropegrad.verify.judge import judge_nonfinite
from ropegrad.verify.ruling import Standard
from ropegrad.verify.sums import Change, Floats, bhsd, members, same

NAMES = {"query": "q_weight", "key": "k_weight", "value": "v_weight"}
ORACLE = FORMATS["float64"].u
# Operands rounded to 11 or 8 significand bits, each by half a unit: (1 + u)² - 1.
OPERANDS = {"high": 2.0**-10 + 2.0**-22, "medium": 2.0**-7 + 2.0**-16}


def projected_standard(case: Case, spec: QkvSpec, *, rounds_every_step: bool = False) -> Standard:
    """Exact values of the forward of op qkv, and bounds: each is a sum of 2·C products of three factors.

    γ_{C+3}·Σ|t|, γ_{C+3} + 12u for `highest` in float32 as the backward's products have it; for `high` and
    `medium` the operands' rounding and a truncating accumulator in place of that. Gradual underflow costs η
    a product, multiplied by the table. Values are float64's, with their own error in the bound.
    """
    compute, storage = FORMATS[spec.rope.compute], FORMATS[spec.rope.dtype]
    clean, found = finite(case.inputs)
    exact, bound = {}, {}
    for name in NAMES:
        value = _sums(spec, clean, name, same, same, -1)
        size = _sums(spec, clean, name, np.abs, np.abs, 1)
        touched = _touched(spec, case.inputs, name) if found else None
        exact[name] = Expected(
            value, None, size, spec.hidden_size or 0, touched=touched,
            bilinear=lambda f, g, name=name: _sums(spec, clean, name, f, g, 1),  # type: ignore[misc]
        )  # fmt: skip
        error = _factor(spec, compute) * size + _underflow(spec, clean, name, compute)
        if storage.u > compute.u:
            if rounds_every_step:  # the projection, the products with the tables
                error += gamma(2, storage.u) * size + 4 * storage.eta
            error = error * (1 + storage.u) + storage.u * np.abs(value) + storage.eta
        bound[name] = error
    return Standard(
        case, exact, bound, judge_nonfinite(case, exact, bound, rounds_every_step=rounds_every_step)
    )


def _factor(spec: QkvSpec, compute: Format) -> float:
    n = spec.hidden_size or 0
    own = 2 * gamma(n + 4, ORACLE)
    if compute.u == ORACLE or spec.precision == "highest":
        extra = 0.0 if compute.u == ORACLE else 12 * compute.u
        return float(gamma(n + 3, compute.u) + extra + own)
    accumulation = 2.0**-23 * (n + math.ceil(n / 16))
    return float(gamma(3, compute.u) + OPERANDS[spec.precision] + accumulation + own)


def _rotated(spec: QkvSpec, z: Floats, cos: Floats, sin: Floats, sign: int) -> Floats:
    """y_j = z_j·c_j + σ_j·z_p(j)·s_j for z in the caller's layout; sign 1: with + throughout."""
    rope = spec.rope
    result = z.copy()
    tables = [table[:, None] if table.ndim == 3 else table[None, None] for table in (cos, sin)]
    (c1, c2), (s1, s2) = ((t, t) if rope.table == "half" else members(t, rope) for t in tables)
    z1, z2 = members(bhsd(z, rope.layout), rope)
    first, second = members(bhsd(result, rope.layout), rope)
    first[...] = z1 * c1 + sign * (z2 * s1)
    second[...] = z2 * c2 + z1 * s2
    return result


def _heads(spec: QkvSpec, rows: Any) -> Any:
    """[tokens, heads · D], tokens as hidden_states has them, to the caller's layout."""
    rope = spec.rope
    outer = (rope.seq, rope.batch) if rope.layout == "sbhd" else (rope.batch, rope.seq)
    heads = rows.reshape(*outer, rows.shape[1] // max(rope.head_dim, 1), rope.head_dim)
    return heads.transpose(0, 2, 1, 3) if rope.layout == "bhsd" else heads


def _sums(spec: QkvSpec, inputs: dict[str, Any], name: str, f: Change, g: Change, sign: int) -> Floats:
    """The values; with sign 1 the sums of f(x)·g(w)·g(table) over their terms instead."""
    x, w = (inputs[key].astype(np.float64) for key in ("hidden_states", NAMES[name]))
    z: Floats = _heads(spec, f(x.reshape(spec.tokens, x.shape[-1])) @ g(w).T)
    if name == "value":
        return z
    cos, sin = (g(inputs[key].astype(np.float64)) for key in ("cos", "sin"))
    return _rotated(spec, z, cos, sin, sign)


def _underflow(spec: QkvSpec, inputs: dict[str, Any], name: str, compute: Format) -> Floats:
    ones = _heads(spec, np.ones((spec.tokens, len(inputs[NAMES[name]]))))
    if name != "value":
        cos, sin = (np.abs(inputs[key].astype(np.float64)) for key in ("cos", "sin"))
        ones = 1 + _rotated(spec, ones, cos, sin, 1)
    error: Floats = 2 * compute.eta * ((spec.hidden_size or 0) + 2) * ones
    return error


def _touched(spec: QkvSpec, inputs: dict[str, Any], name: str) -> Bools:
    """Where a NaN or Inf enters."""
    bad = {key: ~np.isfinite(inputs[key]) for key in ("hidden_states", NAMES[name], "cos", "sin")}
    rows = bad["hidden_states"].reshape(spec.tokens, spec.hidden_size or 0).any(axis=1)
    z = _heads(spec, (rows[:, None] | bad[NAMES[name]].any(axis=1)).astype(np.float64))
    if name == "value":
        return np.asarray(z > 0)
    cos, sin = bad["cos"].astype(np.float64), bad["sin"].astype(np.float64)
    tables = _rotated(spec, np.ones_like(z), cos, sin, 1)
    if spec.rope.rotary_dim < spec.rope.head_dim:
        tables[..., spec.rope.rotary_dim :] = 0
    return np.asarray(_rotated(spec, z, np.ones_like(cos), np.ones_like(sin), 1) + tables > 0)
