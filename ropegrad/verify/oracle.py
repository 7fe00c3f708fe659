"""What the gradients are: to float64 or better, in formulas of their own.

NaN and Inf are taken out before any arithmetic and followed by a sum of indicators over the same terms:
complex products would smear them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropegrad.spec import RopeSpec
from ropegrad.verify.case import Case
from ropegrad.verify.exact import Bools, Expected, Product, accumulated, finite, indicators, known
from ropegrad.verify.products import expected_products
from ropegrad.verify.sums import Change, Floats, Inputs, bilinear, precise

__all__ = ["Expected", "Product", "expected"]


def expected(case: Case) -> dict[str, Expected]:
    """The exact gradients of a case, for every name in case.outputs ('grad_q', ...).

    float64 where the compute dtype is float32 (products are exact in it), double-double where it is
    float64. Inputs are only read. Memory: 16 bytes an output element; for qkv also 16 bytes an element
    of the upstream gradients, of hidden_states and of the weights.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return (
            _rope(case, case.spec) if isinstance(case.spec, RopeSpec) else expected_products(case, case.spec)
        )


# ---- rope ----------------------------------------------------------------------------------------------


def _shape(spec: RopeSpec, name: str) -> tuple[int, ...]:
    if name in ("grad_cos", "grad_sin"):
        return spec.table_shape
    return spec.head_shape((spec.heads if name == "grad_q" else spec.kv_heads) or 0)


def _terms(spec: RopeSpec, name: str) -> int:
    if name in ("grad_q", "grad_k"):
        return 2
    shared = 1 if spec.table_batch == spec.batch else spec.batch
    return ((spec.heads or 0) + (spec.kv_heads or 0)) * shared * (2 if spec.table == "half" else 1)


def _sums(
    spec: RopeSpec, inputs: Inputs, names: tuple[str, ...], f: Change, g: Change, one: float = 1.0
) -> dict[str, Floats]:
    out = {name: np.zeros(_shape(spec, name)) for name in names}
    bilinear(spec, inputs, out, f, g, one=one)
    return out


def _values(
    spec: RopeSpec, inputs: Inputs, names: tuple[str, ...]
) -> dict[str, tuple[Floats, Floats | None]]:
    if spec.compute == "float64":
        return dict(precise(spec, inputs, names))
    out = {name: np.zeros(_shape(spec, name)) for name in names}
    bilinear(spec, inputs, out, sign=-1)
    return {name: (value, None) for name, value in out.items()}


def _touched(spec: RopeSpec, inputs: Inputs, names: tuple[str, ...]) -> dict[str, Bools]:
    bad = indicators(inputs)
    left = _sums(spec, bad, names, np.abs, np.ones_like)
    right = _sums(spec, bad, names, np.ones_like, np.abs, one=0.0)
    return {name: left[name] + right[name] > 0 for name in names}


def _rope(case: Case, spec: RopeSpec) -> dict[str, Expected]:
    names = case.outputs
    inputs, found = finite(case.inputs)
    values = _values(spec, inputs, names)
    magnitudes = _sums(spec, inputs, names, np.abs, np.abs)
    touched = _touched(spec, case.inputs, names) if found else {}
    results = {}
    for name in names:
        result = Expected(
            *values[name], magnitudes[name], _terms(spec, name), touched=touched.get(name),
            bilinear=lambda f, g, name=name: _sums(spec, inputs, (name,), f, g)[name],  # type: ignore[misc]
        )  # fmt: skip
        if spec.accumulate:
            result = accumulated(result, case.prior[name])
        elif name in ("grad_q", "grad_k") and spec.rotary_dim < spec.head_dim:
            result = _with_copies(result, case.inputs[f"{name}_embed"], spec.rotary_dim)
        results[name] = known(result, result.magnitude)
    return results


def _with_copies(result: Expected, upstream: NDArray[Any] | None, width: int) -> Expected:
    """Channels that pass through as they came, NaN and Inf included."""
    assert upstream is not None
    result.value[..., width:] = upstream[..., width:]
    if result.touched is not None:
        result.touched[..., width:] = False
    return replace(result, copied=width)
