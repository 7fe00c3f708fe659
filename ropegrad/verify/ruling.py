"""One output of somebody else's function: which rule it breaks, where and by how much."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ropegrad.spec import QkvSpec
from ropegrad.verify.arena import POISONS, poisoned
from ropegrad.verify.bounds import FORMATS, bounds, gamma
from ropegrad.verify.case import Case, NumpyArray, rope_geometry
from ropegrad.verify.exact import Expected
from ropegrad.verify.flushing import nothing_to_flush
from ropegrad.verify.judge import (
    Must,
    States,
    all_ratios,
    effective_bits,
    gate,
    judge_nonfinite,
    worst_ratio,
)
from ropegrad.verify.narrow import overflowing
from ropegrad.verify.sums import Floats

RULES = (
    "wrong value", "below the promised precision", "missing gradient", "wrong shape, dtype or device",
    "output not (fully) written", "stale output", "overwritten by a later call", "input mutated",
    "output aliases an input or another output", "written outside the output", "unjustified NaN or Inf",
    "hidden NaN or Inf", "depends on strides or alignment", "breaks a property", "declined", "raised", "hung",
    "crashed",
)  # fmt: skip
WRONG, LOW, MISSING = RULES[:3]
FLUSHES = "flushes subnormals"
ROUNDS = "rounds at every step"
# What arithmetic may do and still be right, narrowest first: a target's contract is the first that fits.
ALLOWANCES: tuple[tuple[str, ...], ...] = ((), (ROUNDS,), (FLUSHES,), (FLUSHES, ROUNDS))
FRESH = 0x7F  # every byte of memory that was allocated and never written, where the C library can do it


@dataclass(frozen=True)
class Fault:
    """A rule that was broken: by which array, a sentence with the numbers, and the worst element.

    axes    its index by name (batch, head, token, channel, ...)
    share   elements that are off, by rounding perhaps, and all of them
    low     the arithmetic whose errors its own do not pass, if they look like rounding; '' if they do not
    names   what the result was recognised as (diagnosis), most telling first
    """

    rule: str
    array: str
    message: str
    ratio: float = math.nan
    axes: tuple[tuple[str, int], ...] = ()
    bits: float = math.nan
    share: tuple[int, int] = (0, 0)
    low: str = ""
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Standard:
    """What the outputs of one case have to be: exact values, and the bounds under one allowance."""

    case: Case
    exact: dict[str, Expected]
    bound: dict[str, Floats]
    must: dict[str, States | None]

    def ratios(self, name: str, got: NumpyArray) -> Floats:
        """|got - exact| / bound of every element."""
        return all_ratios(got, self.exact[name], self.bound[name], self.must[name])

    def worst(self, name: str, got: NumpyArray) -> float:
        """The largest of them."""
        return worst_ratio(got, self.exact[name], self.bound[name], self.must[name]).ratio


def standard(case: Case, exact: dict[str, Expected], allowance: tuple[str, ...] = ()) -> Standard:
    """The standard of a case under an allowance."""
    steps = ROUNDS in allowance
    bound = bounds(case, exact, rounds_every_step=steps)
    if FLUSHES in allowance:
        wider = bounds(case, exact, flushes_subnormals=True, rounds_every_step=steps)
        for name, narrow in bound.items():
            normal = nothing_to_flush(case, name, exact[name], narrow)
            bound[name] = wider[name] if normal is None else np.where(normal, narrow, wider[name])
    must = judge_nonfinite(case, exact, bound, rounds_every_step=steps)
    return Standard(case, exact, bound, {n: overflowing(case, exact[n], must[n]) for n in exact})


def form_fault(case: Case, name: str, got: NumpyArray | None, shape: Any, dtype: str) -> Fault | None:
    """What is wrong with an output before its values are looked at."""
    if got is None:
        return Fault(MISSING, name, f"{name} is None")
    if got.shape != tuple(shape) or str(got.dtype) != dtype:
        found, right = f"{got.dtype} {list(got.shape)}", f"{dtype} {list(shape)}"
        text = f"{name} is {found}, it must be {right}{_shape_of(case, got.shape, tuple(shape))}"
        return Fault("wrong shape, dtype or device", name, text)
    return None


def _shape_of(case: Case, got: tuple[int, ...], right: tuple[int, ...]) -> str:
    """What a wrong shape would be right for, as the end of a sentence; '' where nothing is known."""
    spec = case.spec
    alike = [name for name, x in case.inputs.items() if x is not None and x.shape == got]
    if got == right:
        return ""
    if isinstance(spec, QkvSpec) and got == (spec.rows("qkv"), *right[1:]):
        return ": that is of q, k and v packed in one"
    if alike:
        return f": that is the shape of {' and of '.join(alike)}"
    if sorted(got) == sorted(right):
        return ": the axes are in another order"
    return ": as many elements in another shape" if math.prod(got) == math.prod(right) else ""


def value_fault(
    rule: Standard, name: str, got: NumpyArray, *, earlier: NumpyArray | None, dps: str | None
) -> Fault | None:
    """The rule that an output's values break, or None.

    earlier: the same output of the call before. dps: the poison that was in the output, if it was given.
    """
    worst = worst_ratio(got, rule.exact[name], rule.bound[name], rule.must[name])
    if worst.ratio <= 1:
        return None
    ratios = rule.ratios(name, got)
    wrong = ratios > 1
    low, off = "", _off(rule, name, ratios)
    kind, place, why = _kind(rule, name, got, wrong, earlier, dps)
    if kind == WRONG:
        low = _lower_precision(rule, name, got) if _is_everywhere(rule, name, ratios) else ""
        if low and 4 * off >= wrong.size:  # rounding spares few elements
            kind = LOW
    where = worst.where if place is None else place
    axes = named_axes(rule.case, name, where)
    at = ", ".join(f"{axis} {index}" for axis, index in axes)
    numbers = f"{name} is {_short(float(got[where]))}, exactly {_exactly(rule, name, where)}"
    ratio = float(ratios[where])
    size = f"{ratio:.3g} times its bound of {float(rule.bound[name][where]):.2g}"
    share = f"{int(wrong.sum())} of {wrong.size} elements wrong"
    message = f"{numbers}, at {at}: {size}; {share}{why}" if at else f"{numbers}: {size}{why}"
    if math.isinf(ratio):
        message = f"{numbers}, at {at}; {share}{why}"
    bits = effective_bits(got, rule.exact[name])
    if kind == LOW and math.isfinite(bits):
        message += f", {bits:.1f} effective bits"
    return Fault(kind, name, message, ratio, axes, bits, (off, wrong.size), low)


def _exactly(rule: Standard, name: str, where: tuple[int, ...]) -> str:
    must = rule.must[name]
    if must is not None and must[where] == Must.NOT_BE_FINITE:
        return "NaN or Inf"  # the value is of the finite inputs alone
    return _short(float(rule.exact[name].value[where]))


def _short(x: float) -> str:
    return f"{x:.9g}"


def _kind(
    rule: Standard, name: str, got: NumpyArray, wrong: Any, earlier: NumpyArray | None, dps: str | None
) -> tuple[str, tuple[int, ...] | None, str]:
    """The rule's name, the element to show (None: the worst), and more words."""
    untouched = np.zeros(got.shape, np.bool_)
    if dps is not None:
        untouched = poisoned(got, dps)
        if dps == "number" and _is_added(rule, name, got, wrong):
            return WRONG, None, ", added to what the output held instead of written"
    elif got.size:
        untouched = (np.ascontiguousarray(got).view(np.uint8) == FRESH).reshape(*got.shape, -1).all(axis=-1)
    if (untouched & wrong).any():
        return "output not (fully) written", _first(untouched & wrong), ", never written"
    if _is_stale(got, wrong, earlier):
        return "stale output", None, ", and those are the results of the call before"
    must = rule.must[name]
    state = np.zeros(got.shape, np.int8) if must is None else must
    finite = np.isfinite(got.astype(np.float64))
    if (wrong & ~finite & (state == Must.BE_FINITE)).any():
        return "unjustified NaN or Inf", _first(wrong & ~finite & (state == Must.BE_FINITE)), ""
    hidden = wrong & finite & ((state == Must.NOT_BE_FINITE) | (state == Must.BE_INF))
    if hidden.any():
        text = ", a NaN or Inf enters its sum" if (state[hidden] == Must.NOT_BE_FINITE).all() else ""
        return "hidden NaN or Inf", _first(hidden), text
    if not got.astype(np.float64).any():
        return MISSING, None, ": all of it is zero"
    return WRONG, None, ""


def _is_added(rule: Standard, name: str, got: NumpyArray, wrong: Any) -> bool:
    held = np.array(POISONS["number"][str(got.dtype)], f"u{got.itemsize}").view(got.dtype).astype(np.float64)
    off = np.abs(got.astype(np.float64) - held - rule.exact[name].value)
    near = off <= 2 * rule.bound[name] + 4 * FORMATS[str(got.dtype)].u * np.abs(held)
    return bool(near[wrong].all() and (near & ~poisoned(got, "number") & wrong).any())


def _first(mask: Any) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(mask)[0])


def _is_stale(got: NumpyArray, wrong: Any, earlier: NumpyArray | None) -> bool:
    if earlier is None or earlier.shape != got.shape:
        return False
    words = f"u{got.itemsize}"
    same = np.ascontiguousarray(got).view(words) == np.ascontiguousarray(earlier).view(words)
    return bool(same[wrong].all() and got.astype(np.float64)[wrong].any())


def _is_off(rule: Standard, name: str, ratios: Floats) -> Any:
    """Elements that are farther off than IEEE arithmetic makes them: bounds of products are wide."""
    usual = 1.0 if rule.exact[name].product is None else 1 / 8
    return (ratios > usual) | (rule.bound[name] == 0)


def _off(rule: Standard, name: str, ratios: Floats) -> int:
    return int(_is_off(rule, name, ratios).sum())


SEVERAL = 8  # elements of which rounding too coarsely hits one, at least


def _is_everywhere(rule: Standard, name: str, ratios: Floats) -> bool:
    """Whether no head, token or batch of several elements is spared: rounding does not choose among them."""
    off = _is_off(rule, name, ratios)
    for axis, word in enumerate(axis_words(rule.case, name, off.ndim)):
        others = tuple(i for i in range(off.ndim) if i != axis)
        several = word in ("batch", "head", "token") and off.size >= SEVERAL * off.shape[axis]
        if several and not off.any(axis=others).all():
            return False
    return True


def near_underflow(rule: Standard, name: str) -> Any:
    """Elements so small that losing them to underflow looks like rounding."""
    compute = FORMATS[rope_geometry(rule.case).compute]
    return np.abs(rule.exact[name].value) < compute.tiny / compute.u


_KEPT = {"high": "TF32 products", "medium": "bfloat16 products"}
# Bits of what an accuracy is named after. Who has so many more was not limited by it.
DIGITS = {"TF32 products": 11, "bfloat16 products": 8, "float32 arithmetic": 24, "float16 arithmetic": 11,
          "bfloat16 arithmetic": 8}  # fmt: skip
SPARE = 3


def _lower_precision(rule: Standard, name: str, got: NumpyArray) -> str:
    """The lower promise or narrower dtype whose errors these are at most; '' if they are no rounding."""
    spec, compute = rule.case.spec, rope_geometry(rule.case).compute
    if not np.isfinite(got.astype(np.float64)).all() or near_underflow(rule, name).all():
        return ""
    if isinstance(spec, QkvSpec) and compute == "float32" and not name.endswith("_bias"):
        lower = ("high", "medium")[("highest", "high", "medium").index(spec.precision) :]
        for promise in lower:
            case = replace(rule.case, spec=replace(spec, precision=promise))
            if standard(case, {name: rule.exact[name]}).worst(name, got) <= 1:
                return _KEPT[promise]
        return ""
    for dtype in ("float32", "float16", "bfloat16"):
        if FORMATS[dtype].u > FORMATS[compute].u and _within(rule, name, got, dtype):
            return f"{dtype} arithmetic"
    return ""


def _within(rule: Standard, name: str, got: NumpyArray, dtype: str) -> bool:
    """Whether the errors are such that steps of this dtype make: γ_{n+3}·Σ|t|, with its underflow."""
    exact, format_ = rule.exact[name], FORMATS[dtype]
    if exact.magnitude is None:
        return False
    error = np.abs(got.astype(np.float64) - exact.value)
    allowed = gamma(exact.depth + 3, format_.u) * exact.magnitude + 4 * (exact.depth + 1) * format_.eta
    return bool((error <= allowed + rule.bound[name]).all())


def _repeats(case: Case) -> bool:
    arrays = (array for array in case.inputs.values() if array is not None)
    return any(step == 0 and size > 1 for x in arrays for step, size in zip(x.strides, x.shape, strict=True))


def gate_fault(rule: Standard, name: str, got: NumpyArray) -> tuple[Fault | None, float]:
    """The precision gate on independent draws of zero mean, and the effective bits (NaN: nothing to say).

    Worst-case bounds grow with n, and rounding errors with √n: this tells TF32 from float32 in long sums.
    Where a NaN or Inf of a table enters a sum there is nothing to say, nor where a stride of 0 repeats an
    element: rounding errors of equal terms grow with n, too.
    """
    exact, spec = rule.exact[name], rule.case.spec
    if exact.touched is not None or _repeats(rule.case):
        return None, math.nan
    bits = effective_bits(got, exact)
    if exact.depth < 256 or got.size < 4096 or math.isnan(bits):
        return None, bits
    precision = spec.precision if isinstance(spec, QkvSpec) else "highest"
    limit = gate(precision, exact.depth, compute=rope_geometry(rule.case).compute, storage=str(got.dtype))
    if 2.0**-bits <= limit:
        return None, bits
    text = (
        f"{name} has {bits:.1f} effective bits in sums of {exact.depth} products; "
        f"precision {precision!r} promises {-math.log2(limit):.1f}"
    )
    return Fault(LOW, name, text, 2.0**-bits / limit, bits=bits), bits


_HEADS = {"bhsd": "batch head token channel", "bshd": "batch token head channel",
          "sbhd": "token batch head channel"}  # fmt: skip


def named_axes(case: Case, name: str, where: tuple[int, ...]) -> tuple[tuple[str, int], ...]:
    """The index of an element of an output, by the names of its axes."""
    pairs = zip(axis_words(case, name, len(where)), where, strict=False)
    axes = [(word, index + case.first_token * (word == "token")) for word, index in pairs]
    if name.endswith(("_weight", "_bias")) and where:
        head, channel = divmod(where[0], rope_geometry(case).head_dim)
        axes[:1] = [("head", head), ("channel", channel)]
    return tuple(axes)


def axis_words(case: Case, name: str, count: int) -> list[str]:
    """The names of the axes of an output that has so many."""
    need, layout = name.removeprefix("grad_"), rope_geometry(case).layout
    if need in ("cos", "sin"):
        return ["batch", "token", "column"][-count:] if count else []
    if need.endswith(("_weight", "_bias")):
        return ["row", "hidden channel"]
    if need == "hidden_states":
        return [*(["token", "batch"] if layout == "sbhd" else ["batch", "token"]), "hidden channel"]
    return _HEADS[layout].split()
