"""How far a right result may be from the exact one: derived bounds, element by element.

Rounding: Higham, *Accuracy and Stability of Numerical Algorithms* (2002), §3.1: n operations that round
to unit roundoff u give a relative error of at most γ_n = n·u/(1 − n·u). Gradual underflow adds at most η,
half the smallest subnormal, to a product and nothing to a sum. Any order of summation, with or without
fused multiply-add. The precision gate: Higham & Mary, *Sharper probabilistic backward error analysis
for basic linear algebra kernels with random data* (2020).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ropegrad.spec import QkvSpec
from ropegrad.verify.case import Case, rope_geometry
from ropegrad.verify.exact import Expected, Product
from ropegrad.verify.sums import Floats, nonzero

_ORACLE = 2.0**-53  # unit roundoff of the oracle's own float64 sums


class Format(NamedTuple):
    """A dtype: unit roundoff, half the smallest subnormal, smallest normal, largest number, and the
    threshold from which on results round to Inf."""

    u: float
    eta: float
    tiny: float
    largest: float
    overflow: float


def _format(digits: int, low: int, high: int) -> Format:
    u = 2.0**-digits
    largest = math.ldexp(2 - 2 * u, high - 1)
    eta = math.ldexp(
        1.0, max(low - digits, -1074)
    )  # float64's own, 2^-1075, is no float64: 2^-1074 covers it
    return Format(
        u, eta, math.ldexp(1.0, low), largest, math.ldexp(2 - u, high - 1) if high < 1024 else largest
    )


FORMATS = {
    "float16": _format(11, -14, 16),
    "bfloat16": _format(8, -126, 128),
    "float32": _format(24, -126, 128),
    "float64": _format(53, -1022, 1024),
}


def gamma(n: Any, u: float) -> Any:
    """γ_n; 2·n·u where n·u passes 1/2 (n·u alone holds there: Jeannerod & Rump, *Improved error bounds
    for inner products in floating-point arithmetic*, 2013). n: number or array."""
    product = n * u
    return product / (1 - np.minimum(product, 0.5))


def bounds(
    case: Case,
    expected: dict[str, Expected],
    *,
    flushes_subnormals: bool = False,
    rounds_every_step: bool = False,
) -> dict[str, Floats]:
    """The largest |got - exact| of a right result, for every output element (float64).

    Counts the oracle's own error. 0 where the result must be exact. The options widen it for two
    contracts of other people's code: *flushes subnormals* (products and sums below the smallest normal
    number of the compute dtype become 0, inputs and results below their own dtype's, float16's excepted)
    and *rounds at every step* (every array operation's result goes through the output's dtype, as in
    eager half-precision code).
    """
    results = {}
    with np.errstate(over="ignore", invalid="ignore"):
        for name, output in expected.items():
            error = _error(case, name, output, flushes_subnormals)
            if rounds_every_step:
                error += _step_error(case, name, output)
            results[name] = _stored(error, output, _compute(case), _storage(case, name))
    return results


def _compute(case: Case) -> Format:
    return FORMATS[rope_geometry(case).compute]


def _storage(case: Case, name: str) -> Format:
    return FORMATS[_stored_dtype(case, name)]


def _stored_dtype(case: Case, name: str) -> str:
    spec = rope_geometry(case)
    return spec.table_dtype if name in ("grad_cos", "grad_sin") else spec.dtype


def _stored(error: Floats, output: Expected, compute: Format, storage: Format) -> Floats:
    """One more rounding where the output's dtype is narrower; exact where channels are copied."""
    if storage.u > compute.u:
        error *= 1 + storage.u
        error += storage.eta
        error += storage.u * np.abs(output.value)
    if output.copied is not None:
        error[..., output.copied :] = 0
    return error


def _error(case: Case, name: str, output: Expected, flushes: bool) -> Floats:
    """E, the error in the compute dtype and the oracle's, before the result is stored."""
    if output.product is not None:
        assert isinstance(case.spec, QkvSpec)
        error = _product_error(case.spec, output.product)
        if flushes:
            error += _product_flush(case, name, output.product)
        error = error.reshape(output.value.shape)
        if case.spec.accumulate:
            prior = np.abs(case.prior[name].astype(np.float64))
            error += _prior_factor(case.spec, output) * np.where(np.isfinite(prior), prior, 0.0)
        return error
    error = _sum_error(case, name, output)
    if flushes:
        error += _sum_flush(case, name, output)
    return error


def _own(n: Any, compute: Format) -> Any:
    """The oracle's own error as a part of Σ|t|, and that of Σ|t| itself, both generously."""
    return 16 * (n + 2.0) ** 2 * _ORACLE**2 if _precise(compute) else 2 * gamma(n + 4, _ORACLE)


def _precise(compute: Format) -> bool:
    return compute.u == _ORACLE


def _factor(n: Any, steps: Any, compute: Format) -> Any:
    """γ_steps for a sum of n terms, with what the oracle adds."""
    worst = gamma(steps, compute.u)
    if _precise(compute):
        worst = worst * (1 + 2 * gamma(n + 4, _ORACLE))  # Σ|t| is known to float64 only
    return worst + _own(n, compute)


def _sum_error(case: Case, name: str, output: Expected) -> Floats:
    """γ_n·Σ|t| + n·η for n products: rope's outputs, and the biases' sums of rotated gradients.

    In sums over heads and tokens n counts those that are not zero, and one more beside zeros: plain sums add
    a zero exactly, Kahan's may add a rounded correction to it.
    """
    assert output.magnitude is not None
    compute, spec = _compute(case), rope_geometry(case)
    bias = name.endswith("_bias")  # a term of a bias is itself two products and a sum
    products = _products(case, name, output, output.depth * (1 + bias))
    added = np.minimum(products, output.depth) + spec.accumulate
    steps = added + bias + ((added > 1) & (products < output.depth))
    underflows = products * (2 if _precise(compute) else 1)
    error: Floats = output.magnitude * _factor(output.depth, steps, compute)
    error += underflows * compute.eta * (1 + gamma(steps, compute.u))
    if spec.accumulate and name in ("grad_q", "grad_k") and spec.rotary_dim < spec.head_dim:
        through = np.abs(output.value[..., spec.rotary_dim :])  # prior + gradient: one sum, no underflow
        error[..., spec.rotary_dim :] = through * _factor(1, 1, compute)
    return error


def _products(case: Case, name: str, output: Expected, most: int) -> Any:
    """How many are not zero in sums over heads and tokens; `most` without zeros, and of grad_q and grad_k."""
    unread = () if name.endswith("_bias") else ("cos", "sin")
    read = (x for key, x in case.inputs.items() if x is not None and key not in unread)
    if name in ("grad_q", "grad_k") or all(x.all() for x in read):
        return most
    assert output.bilinear is not None
    return np.minimum(output.bilinear(nonzero, nonzero), most)


# ---- matrix products -----------------------------------------------------------------------------------

_OPERANDS = {"high": 2.0**-10 + 2.0**-22, "medium": 2.0**-7 + 2.0**-16}  # both rounded to 11 or 8 bits


def _accumulation(n: Any) -> Any:
    """Adding n products in a tensor core, whose accumulator truncates to 24 bits."""
    return 2.0**-23 * (n + np.ceil(n / 16))


def _product_error(spec: QkvSpec, product: Product) -> Floats:
    """The bound of the promised precision for D·B, with P = S·|B| and Q = |D|·|B|.

    highest  γ_{n+2}·P + 12u·Q, float32's or float64's u; the 12u, which a float32 product needs that is
             made of three float16 ones, only for float32
    high     γ_2·P + (2⁻¹⁰ + 2⁻²² + 2⁻²³·(n + ⌈n/16⌉))·Q + R: operands of 11 bits, and R for scaling
             by rows of D and columns of B; medium the same with 8 bits. float64 ignores both words
    all      2η·(n + 2·Σ|B|), underflow in D and in the products
    """
    compute = FORMATS[spec.rope.compute]
    error = _weighed(product, lambda n: _weights(spec, n))
    if spec.precision != "highest" and not _precise(compute):
        error += _normwise(product)
    underflows = 3 if _precise(compute) else 1
    error += 2 * compute.eta * (underflows * product.depth + 2 * product.size.sum(axis=0))
    return error


def _weights(spec: QkvSpec, n: Any) -> tuple[Any, Any]:
    """The factors of P and Q for n products."""
    compute, prior = FORMATS[spec.rope.compute], int(spec.accumulate)
    if _precise(compute):
        return _factor(n, n + 2 + prior, compute), 0.0
    if spec.precision == "highest":
        return _factor(n, n + 2 + prior, compute), 12 * compute.u
    return _factor(n, 2, compute), _OPERANDS[spec.precision] + _accumulation(n + prior)


def _weighed(product: Product, weights: Callable[[Any], tuple[Any, Any]]) -> Floats:
    """P and Q by their weights: one matrix product where n is K, P, Q and n themselves where it is less."""

    def by_element(part: Product) -> Floats:
        of_p, of_q = weights(part.terms)
        total: Floats = of_p * part.P + of_q * part.Q
        return total

    rows, columns = product.gaps
    everything = slice(None)
    if 4 * rows.size > len(product.left) or 4 * columns.size > product.right.shape[1]:
        return by_element(product)
    error = product.weighted(*weights(product.depth))
    if rows.size:
        error[rows] = by_element(product.part(rows, everything))
    if columns.size:
        error[:, columns] = by_element(product.part(everything, columns))
    return error


def _normwise(product: Product) -> Floats:
    """R = 2⁻²⁰·(max|D_i|·Σ|B_j| + Σ|D_i|·max|B_j|), over row i of D and column j of B."""
    left = np.abs(product.left)
    row_max, row_sum = left.max(axis=1, initial=0.0), left.sum(axis=1)
    column_max, column_sum = product.size.max(axis=0, initial=0.0), product.size.sum(axis=0)
    normwise: Floats = 2.0**-20 * (np.outer(row_max, column_sum) + np.outer(row_sum, column_max))
    return normwise


def _prior_factor(spec: QkvSpec, output: Expected) -> Any:
    """What the sum may do to the content that results are added to: it is added first in the worst order."""
    compute = FORMATS[spec.rope.compute]
    if spec.precision == "highest" or _precise(compute):
        return gamma(output.terms + 1, compute.u) + 2 * _ORACLE
    return _accumulation(output.terms + 1) + compute.u


# ---- other people's contracts --------------------------------------------------------------------------


# Flushed below: the smallest normal number. float16's subnormals are normal in float32, and CPUs and GPUs
# convert them as they are.
_FLUSHED = {dtype: 0.0 if dtype == "float16" else form.tiny for dtype, form in FORMATS.items()}


def _sum_flush(case: Case, name: str, output: Expected) -> Any:
    """What flushed factors lose, and less than tiny for every flushed product or sum."""
    spec = rope_geometry(case)
    assert output.bilinear is not None
    other = spec.dtype if name in ("grad_cos", "grad_sin") else spec.table_dtype
    operations = (5 if name.endswith("_bias") else 2) * output.depth
    lost = _lost(output.bilinear, spec.dtype, other) + operations * _compute(case).tiny
    return lost + _end_flush(case, name)


def _product_flush(case: Case, name: str, product: Product) -> Any:
    spec, tiny = rope_geometry(case), _compute(case).tiny
    rotated = (_lost(product.sums, spec.dtype, spec.table_dtype) + 4 * tiny) @ product.size
    factors = np.abs(product.left) @ _flushed(product.right, spec.dtype)
    return rotated + factors + 2 * product.left.shape[1] * tiny + _end_flush(case, name)


def _end_flush(case: Case, name: str) -> float:
    """The prior content and the sum with it; the result where a narrower dtype's floor is the higher one."""
    tiny, floor = _compute(case).tiny, _FLUSHED[_stored_dtype(case, name)]
    return rope_geometry(case).accumulate * (floor + tiny) + (floor if floor > tiny else 0.0)


def _lost(sums: Any, upstream: str, other: str) -> Floats:
    """Σ|a·b| over the terms with a factor that is flushed; given the dtypes of both."""
    left = sums(lambda a: _flushed(a, upstream), np.abs)
    right = sums(np.abs, lambda b: _flushed(b, other))
    total: Floats = left + right
    return total


def _flushed(array: Floats, dtype: str) -> Floats:
    """The magnitudes that flushing turns into 0, elsewhere 0."""
    size = np.abs(array)
    lost: Floats = np.where(size < _FLUSHED[dtype], size, 0.0)
    return lost


def _step_error(case: Case, name: str, output: Expected) -> Floats:
    """Roundings to the output's dtype that eager code makes before the last one, which `_stored` counts."""
    storage, compute = _storage(case, name), _compute(case)
    if storage.u <= compute.u:
        return np.zeros(output.value.shape)
    if output.product is not None:
        steps = 4 if name == "grad_hidden_states" else 2  # D's products and sum; the product, a sum of parts
        error: Floats = gamma(steps, storage.u) * output.product.P
        error += storage.eta * (2 + 2 * output.product.size.sum(axis=0))
        return error.reshape(output.value.shape)
    assert output.magnitude is not None
    if name in ("grad_q", "grad_k"):
        steps = 1  # the products
    elif name.endswith("_bias"):
        steps = 2  # D's products and sum
    else:  # the products, the sums over heads, half tables' sums of both members
        steps = 3 if rope_geometry(case).table == "half" else 2
    magnified: Floats = output.magnitude * gamma(steps + case.spec.accumulate, storage.u)
    return magnified + 2 * output.depth * storage.eta
