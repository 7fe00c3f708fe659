"""One output against its bound: where NaN and Inf are right, the worst element, and effective bits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ropegrad.verify.bounds import FORMATS, Format
from ropegrad.verify.case import Case, rope_geometry
from ropegrad.verify.exact import Expected
from ropegrad.verify.sums import Floats

States = NDArray[np.int8]
_CHUNK = 1 << 16  # elements judged at a time: temporaries stay in a core's cache


class Must(IntEnum):
    """What one element of a result has to be."""

    BE_FINITE = 0
    BE_INF = 1  # of the exact value's sign
    BE_EITHER = 2  # finite and within the bound, or not finite
    NOT_BE_FINITE = 3  # a NaN or Inf input enters the sum


class Worst(NamedTuple):
    """The element with the largest |got - exact| / bound; where is () where there are no elements."""

    ratio: float
    where: tuple[int, ...]
    got: float
    exact: float
    bound: float


def judge_nonfinite(
    case: Case,
    expected: dict[str, Expected],
    bounds: dict[str, Floats],
    *,
    rounds_every_step: bool = False,
) -> dict[str, States | None]:
    """What every element must be (`Must` as int8); None where all of an output must be finite.

    With Ω and Ω_out the largest numbers of the compute and of the output's dtype, E the error before the
    result is stored: finite where Σ|t| + 2E < Ω and |y| + E does not round beyond Ω_out; Inf of y's sign
    where |y| - E does and no partial sum of the other sign can overflow, (Σ|t| - |y|)/2 + E < Ω; between
    them either (3e38·1.5 - 3e38·1.5 is NaN in float32, and -4Ω + 6Ω may be, whatever the order).
    rounds_every_step: as for `bounds`; intermediate results may then overflow in the output's dtype.
    """
    spec = rope_geometry(case)
    compute = FORMATS[spec.compute]
    states = {}
    with np.errstate(over="ignore", invalid="ignore"):
        for name, output in expected.items():
            table = name in ("grad_cos", "grad_sin")
            storage = FORMATS[spec.table_dtype if table else spec.dtype]
            steps = storage if rounds_every_step else compute
            states[name] = _states(case, name, output, bounds[name], steps, storage)
    return states


def _states(
    case: Case, name: str, output: Expected, bound: Floats, compute: Format, storage: Format
) -> States | None:
    state: States | None = None
    if not _surely_finite(case, name, output, min(compute.largest, storage.largest)):
        state = _overflow(case, name, output, bound, compute, storage)
    masks = (_risky(output, compute), Must.BE_EITHER), (output.touched, Must.NOT_BE_FINITE)
    for mask, must in masks:
        if mask is not None and mask.any():
            state = np.zeros(bound.shape, np.int8) if state is None else state
            state[mask] = must
    return state


def _risky(output: Expected, compute: Format) -> NDArray[np.bool_] | None:
    """Where nothing is known, or a rotated gradient that enters a product may overflow."""
    unknown = np.isnan(output.value) if output.low is not None else None
    if output.product is None:
        return unknown
    most = output.product.spread.max(axis=1, initial=0.0)
    rows = most >= compute.largest * (1 - 4 * compute.u)
    if not rows.any():
        return unknown
    risky = np.broadcast_to(rows[:, None], (rows.size, output.product.right.shape[1])).reshape(
        output.value.shape
    )
    return risky if unknown is None else risky | unknown


def _surely_finite(case: Case, name: str, output: Expected, largest: float) -> bool:
    """Whether Σ|t| is far from overflow everywhere: cheap, and nearly always true."""
    if output.magnitude is not None:
        return bool(output.magnitude.max(initial=0.0) < largest / 4)
    assert output.product is not None
    product = output.product
    most = product.spread.max(initial=0.0) * product.size.max(initial=0.0) * product.left.shape[1]
    if rope_geometry(case).accumulate:
        most += np.abs(case.prior[name].astype(np.float64)).max(initial=0.0)
    return bool(most < largest / 4)


def _overflow(
    case: Case, name: str, output: Expected, bound: Floats, compute: Format, storage: Format
) -> States:
    magnitude, value = _magnitude(case, name, output), np.abs(output.value)
    error = bound
    if storage.u > compute.u:  # undo the last rounding
        error = (bound - storage.u * value - storage.eta) / (1 + storage.u)
        error = np.maximum(error, 0) + 2.0**-50 * bound
    finite = (magnitude + 2 * error < compute.largest) & (value + error < storage.overflow)
    one_sided = (magnitude - value) / 2 + error < compute.largest
    infinite = (value - error >= storage.overflow) & one_sided
    state = np.full(bound.shape, Must.BE_EITHER, np.int8)
    state[finite] = Must.BE_FINITE
    state[infinite] = Must.BE_INF
    return state


def _magnitude(case: Case, name: str, output: Expected) -> Floats:
    """Σ|t|; of a matrix product P, which is no less."""
    if output.magnitude is not None:
        return output.magnitude
    assert output.product is not None
    magnitude = output.product.P.reshape(output.value.shape)
    if rope_geometry(case).accumulate:
        magnitude = magnitude + np.abs(np.nan_to_num(case.prior[name].astype(np.float64)))
    return magnitude


# ---- worst element -------------------------------------------------------------------------------------


def worst_ratio(got: NDArray[Any], expected: Expected, bound: Floats, must: States | None = None) -> Worst:
    """The worst |got - exact| / bound of one output, and where; a right result has at most 1.

    got: any of the four dtypes, float64 without loss. Where the bound is 0 only the exact value (±0 alike)
    has ratio 0, everything else Inf; copied channels must have the input's bits (every NaN is as good).
    must: from `judge_nonfinite`; an element that breaks it has ratio Inf. None: all must be finite.
    Raises ValueError where shapes differ.
    """
    if got.shape != expected.value.shape:
        raise ValueError(f"the result has shape {got.shape}, expected was {expected.value.shape}")
    best = -1.0
    place: tuple[int, ...] = ()
    with np.errstate(all="ignore"):
        for chunk in _chunks(got.shape):
            ratios = _ratios(got[chunk], expected, bound, must, chunk)
            at = int(ratios.argmax())
            if ratios.flat[at] > best:
                best = float(ratios.flat[at])
                inner = np.unravel_index(at, ratios.shape)
                place = tuple(int(i) + (s.start or 0) for i, s in zip(inner, chunk, strict=True))
    if best < 0:
        return Worst(0.0, (), 0.0, 0.0, 0.0)
    return Worst(best, place, float(got[place]), float(expected.value[place]), float(bound[place]))


def all_ratios(got: NDArray[Any], expected: Expected, bound: Floats, must: States | None = None) -> Floats:
    """As `worst_ratio`, for every element: |got - exact| / bound, Inf where a rule about NaN is broken."""
    with np.errstate(all="ignore"):
        return _ratios(got, expected, bound, must, (slice(None),) * got.ndim)


def _chunks(shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Slices of about _CHUNK elements that cover an array in memory order; none where it is empty."""
    if 0 in shape:
        return
    axis, inner = len(shape), 1
    while axis and inner * shape[axis - 1] <= _CHUNK:
        axis -= 1
        inner *= shape[axis]
    rest = tuple(slice(0, n) for n in shape[axis:])
    if axis == 0:
        yield rest
        return
    run = max(1, _CHUNK // inner)
    for outer in np.ndindex(*shape[: axis - 1]):
        for start in range(0, shape[axis - 1], run):
            yield (*(slice(i, i + 1) for i in outer), slice(start, start + run), *rest)


def _ratios(
    got: NDArray[Any], expected: Expected, bound: Floats, must: States | None, chunk: tuple[slice, ...]
) -> Floats:
    value, wide = expected.value[chunk], got.astype(np.float64)
    error = wide - value
    if expected.low is not None:
        error -= expected.low[chunk]
    np.abs(error, out=error)
    error /= bound[chunk]
    plain = must is None or not must[chunk].any()
    if not (plain and math.isfinite(error.max())):
        error = _careful(wide, expected, bound, must, chunk)
    if expected.copied is not None:
        through = (..., slice(expected.copied, None))
        error[through] = np.where(_same_bits(wide[through], value[through]), 0.0, np.inf)
    return error


def _careful(
    got: Floats, expected: Expected, bound: Floats, must: States | None, chunk: tuple[slice, ...]
) -> Floats:
    """Ratios where a bound is 0 or something is not finite."""
    value, known = expected.value[chunk], np.isfinite(expected.value[chunk])
    error = got - value
    if expected.low is not None:
        error -= expected.low[chunk]
    ratio = np.where((error == 0) & (bound[chunk] == 0) | ~known, 0.0, np.abs(error) / bound[chunk])
    ratio[np.isnan(ratio)] = np.inf
    finite = np.isfinite(got)
    state = np.zeros(got.shape, np.int8) if must is None else must[chunk]
    wrong = ~finite & (state == Must.BE_FINITE) | finite & (state == Must.NOT_BE_FINITE)
    wrong |= (state == Must.BE_INF) & (got != np.copysign(np.inf, value))
    result: Floats = np.where(wrong, np.inf, np.where(finite, ratio, 0.0))
    return result


def _same_bits(a: Floats, b: Floats) -> NDArray[np.bool_]:
    alike: NDArray[np.bool_] = np.isnan(a) & np.isnan(b) | (a == b) & (np.signbit(a) == np.signbit(b))
    return alike


# ---- precision -----------------------------------------------------------------------------------------


def effective_bits(got: NDArray[Any], expected: Expected, rows: int = 64) -> float:
    """-log2 rms(err / √Σt²): the bits that a result is good to. For draws that no promise depends on.

    Of a matrix product about `rows` rows, and at least 4096 elements if it has them; else everything.
    Inf where all is exact, -Inf where something is not finite, NaN where there is nothing to measure.
    """
    value, low = expected.value, expected.low
    if expected.product is not None:
        depth = expected.product.left.shape[0]
        columns = value.shape[-1]
        value = value.reshape(depth, columns)
        wanted = min(depth, max(rows, -(-4096 // max(columns, 1))))
        chosen = np.unique(np.linspace(0, max(depth - 1, 0), wanted).astype(np.intp))
        got, value = got.reshape(depth, columns)[chosen], value[chosen]
        low = None if low is None else low.reshape(depth, columns)[chosen]
        squares = expected.product.squares(chosen)
    else:
        assert expected.bilinear is not None
        squares = expected.bilinear(np.square, np.square)
    with np.errstate(all="ignore"):
        error = got.astype(np.float64) - value
        error = error if low is None else error - low
        counted = squares > 0
        r = (
            float(np.sqrt(np.mean(np.square(error[counted]) / squares[counted])))
            if counted.any()
            else math.nan
        )
    if not counted.any():
        return math.nan
    return -math.log2(r) if r and math.isfinite(r) else math.inf if r == 0 else -math.inf


def gate(precision: str, n: int, *, compute: str = "float32", storage: str = "float32") -> float:
    """The largest rms(err / √Σt²) of a result that keeps the promise `precision`, over n products.

    Only for independent draws of zero mean, n >= 256 and at least 4096 outputs. highest: a random walk of
    the sum's rounding errors, twice what sequential float32 shows, 0.29·√n·u. high, medium: half a bit
    below what operands of 11 and 8 bits show. A narrower output adds its own rounding, rms below u_o/√3.
    float64 has one precision.
    """
    unit = FORMATS[compute].u
    limit = (0.58 * math.sqrt(n) + 2) * unit
    if compute != "float64" and precision != "highest":
        limit = {"high": 2.0**-11.5, "medium": 2.0**-8.5}[precision]
    rounding = FORMATS[storage].u if FORMATS[storage].u > unit else 0.0
    return math.hypot(limit, rounding / math.sqrt(3))
