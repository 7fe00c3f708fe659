"""What a wrong result looks like: formulas and oversights that people confuse, tried one by one.

A candidate is the same problem with changed inputs: its exact result is known as well as the right one, so a
match is no guess. Names only; the verdict never depends on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ropegrad.verify.arena import POISONS
from ropegrad.verify.case import Case, NumpyArray, rope_geometry
from ropegrad.verify.confusions import CONFUSIONS
from ropegrad.verify.exact import Product
from ropegrad.verify.forward import as_backward
from ropegrad.verify.oracle import expected
from ropegrad.verify.regions import Words, common, regions
from ropegrad.verify.ruling import Standard, named_axes, near_underflow, standard

# A candidate's changed tables are rounded once more than the function's own: its bound, a little wider.
SLACK = 16.0
_TURNED = {"q_embed": "grad_q", "k_embed": "grad_k"}
_OTHER = {"grad_cos": "grad_sin", "grad_sin": "grad_cos", "grad_q_weight": "grad_k_weight",
          "grad_k_weight": "grad_v_weight", "grad_v_weight": "grad_k_weight"}  # fmt: skip


def diagnose(samples: Iterable[tuple[Case, str, NumpyArray]], *, formulas: bool = True) -> list[str]:
    """What fits every sample (case, output, what was got) of one fault: formulas, then where it is wrong."""
    fitting: list[str] | None = None
    places = []
    for case, name, got in samples:
        found = _look(case, name, got)
        if found is None:
            continue
        fitting = found[0] if fitting is None else [words for words in fitting if words in found[0]]
        places.append(found[1])
    return [*(fitting or [] if formulas else []), *common(places)]


def _look(case: Case, name: str, got: NumpyArray) -> tuple[list[str], Words] | None:
    """Formulas that the wrong elements of output `name` match, and where they are; None: nothing is known."""
    if name in _TURNED:
        case, name = as_backward(case), _TURNED[name]
    if name not in case.outputs or not got.size:
        return None
    rule = standard(case, expected(case))
    wrong = rule.ratios(name, got) > 1
    if not wrong.any() or not np.isfinite(got.astype(np.float64)[wrong]).all():
        return None
    found = [words for words, fits in _simple(rule, name, got) if fits(wrong)]
    for words, change in CONFUSIONS:
        changed = change(case, name)
        if changed is not None and _matches(changed, name, got, wrong):
            found.append(words)
    return found, regions(wrong, [axis for axis, _ in named_axes(case, name, (0,) * got.ndim)], case)


def _matches(changed: Case, name: str, got: NumpyArray, wrong: Any) -> bool:
    """Whether the changed problem's result is what was got, where that was wrong."""
    with np.errstate(all="ignore"):
        exact = expected(changed)
    if exact[name].value.shape != got.shape:
        return False
    ratios = standard(changed, {name: exact[name]}).ratios(name, got)
    return bool((ratios[wrong] <= SLACK).all())


def _simple(rule: Standard, name: str, got: NumpyArray) -> list[tuple[str, Callable[[Any], bool]]]:
    """Candidates that are made of the right result, of another output's, or of nothing."""
    wide, value = got.astype(np.float64), rule.exact[name].value
    allowed = SLACK * rule.bound[name]
    poison = np.array(POISONS["number"][str(got.dtype)], f"u{got.itemsize}").view(got.dtype).astype(float)

    def near(other: Any, room: Any = allowed) -> Callable[[Any], bool]:
        return lambda wrong: bool((np.abs(wide - other) <= room)[wrong].all())

    coarse = allowed + 2.0**-7 * np.abs(poison)  # the poison swamps what is added to it
    small = near_underflow(rule, name)
    candidates = [
        ("is zero", lambda wrong: not wide[wrong].any()),
        ("is one", near(1.0, 0.0)),
        ("has the opposite sign", near(-value)),
        (
            "loses small though normal numbers: flushed to zero, or scaled on the way",
            lambda wrong: bool(small[wrong].all()),
        ),
        ("is added to what the output held instead of written", near(value + poison, coarse)),
    ]
    if rule.exact[name].product is not None:
        candidates.append(("is lost where factors are small beside others: one scale for a whole array",
                           lambda wrong: _only_small(rule.exact[name].product, wrong)))  # fmt: skip
    spec = rope_geometry(rule.case)
    heads = (spec.heads or 0) + (spec.kv_heads or 0)
    if name in ("grad_cos", "grad_sin") and heads > 1:
        candidates.append(("is a mean over heads instead of a sum", near(value / heads)))
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


def _only_small(product: Product | None, wrong: Any) -> bool:
    """Whether only rows and columns of factors are wrong that float16 loses beside the largest of all."""
    assert product is not None
    small = []
    for factor, axis in ((np.abs(product.left), 1), (product.size, 0)):
        most = factor.max(axis=axis, initial=0.0)
        small.append(most < 2.0**-19 * most.max(initial=0.0))
    lost = (small[0][:, None] | small[1]).reshape(wrong.shape)
    return bool(lost[wrong].all() and not lost.all())


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
