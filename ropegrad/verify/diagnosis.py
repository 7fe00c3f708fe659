"""What a wrong result looks like: formulas and oversights that people confuse, tried one by one.

A candidate is the same problem with changed inputs: its exact result is known as well as the right one, so a
match is no guess. Names only; the verdict never depends on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ropegrad.spec import RopeSpec
from ropegrad.verify.arena import POISONS
from ropegrad.verify.case import Case, NumpyArray, rope_geometry
from ropegrad.verify.confusions import CONFUSIONS
from ropegrad.verify.exact import Product
from ropegrad.verify.forward import as_backward
from ropegrad.verify.oracle import expected
from ropegrad.verify.regions import Where, common, regions
from ropegrad.verify.ruling import Standard, axis_words, near_underflow, standard
from ropegrad.verify.sums import members

# A candidate's changed tables are rounded once more than the function's own: its bound, a little wider.
SLACK = 16.0
LOSSES = (
    "loses small though normal numbers: flushed to zero, or scaled on the way",
    "is lost where factors are small beside others: one scale for a whole array",
)
FLUSHED = 1e-15  # below it a zero may be a number that was taken for nothing
_TURNED = {"q_embed": "grad_q", "k_embed": "grad_k"}
_OTHER = {"grad_cos": "grad_sin", "grad_sin": "grad_cos", "grad_q_weight": "grad_k_weight",
          "grad_k_weight": "grad_v_weight", "grad_v_weight": "grad_k_weight"}  # fmt: skip


@dataclass(frozen=True)
class Diagnosis:
    """What fits every sample of one fault: formulas, each with whether all of the result is it; places."""

    formulas: dict[str, bool]
    places: list[str]

    @property
    def words(self) -> tuple[str, ...]:
        """Sentences without a subject: what it is, where it is wrong. What is lost says that itself."""
        lost = next((words for words in self.formulas if words in LOSSES), None)
        if lost is not None:
            return (lost,)
        whole = " or ".join(words for words, entire in self.formulas.items() if entire)
        part = " or ".join(words for words, entire in self.formulas.items() if not entire)
        return tuple(filter(None, [whole or (part and f"where it is wrong, it {part}"), *self.places]))


def diagnose(samples: Iterable[tuple[Case, str, NumpyArray]]) -> Diagnosis:
    """What fits every sample (case, output, what was got) of one fault: formulas, and where it is wrong."""
    fitting: dict[str, bool] | None = None
    places = []
    for case, name, got in samples:
        found = _look(case, name, got)
        if found is None:
            continue
        known = found[0] if fitting is None else fitting
        fitting = {words: known[words] and whole for words, whole in found[0].items() if words in known}
        places.append(found[1])
    return Diagnosis(fitting or {}, common(places))


def _look(case: Case, name: str, got: NumpyArray) -> tuple[dict[str, bool], Where] | None:
    """Formulas that the wrong elements of output `name` match, and where they are; None: nothing is known."""
    if name in _TURNED:
        case, name = as_backward(case), _TURNED[name]
    if name not in case.outputs or not got.size:
        return None
    rule = standard(case, expected(case))
    wrong = rule.ratios(name, got) > 1
    if not wrong.any() or not np.isfinite(got.astype(np.float64)[wrong]).all():
        return None
    everything, wide = np.ones_like(wrong), got.astype(np.float64)
    found = {words: fits(everything) for words, fits in _simple(rule, name, got) if fits(wrong)}
    found |= dict.fromkeys((words for words, fits in _losses(rule, name, got) if fits(wrong)), True)
    for words, change in CONFUSIONS:
        changed = change(case, name)
        with np.errstate(all="ignore"):
            other = None if changed is None else expected(changed)[name]
        if changed is None or other is None or other.value.shape != got.shape:
            continue
        matching = standard(changed, {name: other}).ratios(name, got) <= SLACK
        off = np.abs(wide - rule.exact[name].value)
        if (matching & (np.abs(wide - other.value) < off))[wrong].all():
            found[words] = bool(matching.all())
    return found, _where(rule, name, wrong)


def _where(rule: Standard, name: str, wrong: Any) -> Where:
    """Places of wrong elements; rows of weights are heads and channels."""
    axes, there = axis_words(rule.case, name, wrong.ndim), rule.exact[name].value != 0
    if axes[:1] == ["row"]:
        shape = (-1, rope_geometry(rule.case).head_dim, *wrong.shape[1:])
        wrong, there, axes = wrong.reshape(shape), there.reshape(shape), ["head", "channel", *axes[1:]]
    return regions(wrong, there, axes, rule.case)


Candidates = list[tuple[str, Callable[[Any], bool]]]


def _simple(rule: Standard, name: str, got: NumpyArray) -> Candidates:
    """Candidates that are made of the right result, of another output's, or of nothing."""
    wide, value = got.astype(np.float64), rule.exact[name].value
    allowed = SLACK * rule.bound[name]
    poison = np.array(POISONS["number"][str(got.dtype)], f"u{got.itemsize}").view(got.dtype).astype(float)

    def near(other: Any, room: Any = allowed) -> Callable[[Any], bool]:
        return lambda wrong: bool((np.abs(wide - other) <= room)[wrong].all())

    coarse = allowed + 2.0**-7 * np.abs(poison)  # the poison swamps what is added to it
    candidates = [
        ("is zero", lambda wrong: not wide[wrong].any()),
        ("is one", near(1.0, 0.0)),
        ("has the opposite sign", near(-value)),
        ("is added to what the output held instead of written", near(value + poison, coarse)),
    ]
    spec = rope_geometry(rule.case)
    heads = (spec.heads or 0) + (spec.kv_heads or 0)
    if name in ("grad_cos", "grad_sin") and heads > 1:
        candidates.append(("is a mean over heads instead of a sum", near(value / heads)))
    if name in ("grad_cos", "grad_sin") and spec.table == "full":
        for second, words in ((1, "in each"), (0, "in the first, as of half tables")):
            both, room = (_summed(x, spec, second) for x in (value, allowed))
            candidates.append((f"has the sum of a pair's two columns {words}", near(both, room)))
    factor = _factor(wide, value)
    if factor is not None:
        candidates.append(
            (f"is {factor:.6g} times what it should be", near(factor * value, abs(factor) * allowed))
        )
    other = _OTHER.get(name)
    if other in rule.exact and rule.exact[other].value.shape == value.shape:
        for sign, words in ((1, f"is {other}"), (-1, f"is {other} with the opposite sign")):
            candidates.append((words, near(sign * rule.exact[other].value)))
    return candidates


def _losses(rule: Standard, name: str, got: NumpyArray) -> Candidates:
    """Losses of small numbers: the words say themselves which elements are wrong."""
    small = near_underflow(rule, name) | ((got == 0) & (np.abs(rule.exact[name].value) < FLUSHED))
    product = rule.exact[name].product
    candidates: Candidates = [(LOSSES[0], lambda wrong: bool(small[wrong].all()))]
    if product is not None:
        candidates.append((LOSSES[1], lambda wrong: _only_small(product, wrong)))
    return candidates


def _only_small(product: Product, wrong: Any) -> bool:
    """Whether only rows and columns of factors are wrong that float16 loses beside the largest of all."""
    small = []
    for factor, axis in ((np.abs(product.left), 1), (product.size, 0)):
        most = factor.max(axis=axis, initial=0.0)
        small.append(most < 2.0**-19 * most.max(initial=0.0))
    lost = (small[0][:, None] | small[1]).reshape(wrong.shape)
    return bool(lost[wrong].all() and not lost.all())


def _summed(x: Any, spec: RopeSpec, second: int) -> Any:
    """The sum of the two columns of each pair: in the first, and `second` times in the other."""
    result = np.zeros_like(x)
    first, last = members(x, spec)
    for column, times in zip(members(result, spec), (1, second), strict=True):
        column[...] = times * (first + last)
    return result


def _factor(wide: Any, value: Any) -> float | None:
    """The number that all of the result is times the exact one, if the largest elements agree on one."""
    at = np.argsort(np.abs(value).ravel())[-5:]
    with np.errstate(all="ignore"):
        ratios = wide.ravel()[at] / value.ravel()[at]
    middle = float(np.median(ratios)) if ratios.size else 0.0
    steady = np.isfinite(ratios).all() and (np.abs(ratios - middle) <= 1e-3 * abs(middle)).all()
    return middle if steady and middle and abs(middle - 1) > 1e-3 and abs(middle + 1) > 1e-3 else None


def is_small(case: Case) -> bool:
    """Whether trying all candidates is a matter of a second."""
    return sum(x.size for x in case.inputs.values() if x is not None) < 200_000
