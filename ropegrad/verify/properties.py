"""What the gradients of a bilinear map have in common, whatever an oracle says: checked without one.

Only the tolerance comes from `bounds`. The forward of the adjoint identity is ropegrad's own, in float64: it
shares no code with the oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ropegrad import api
from ropegrad.spec import RopeSpec
from ropegrad.verify.calling import FORWARD_VALUES, UPSTREAM
from ropegrad.verify.case import Case, rope_geometry
from ropegrad.verify.oracle import expected
from ropegrad.verify.recipe import Recipe
from ropegrad.verify.ruling import Fault, standard
from ropegrad.verify.runner import Runner
from ropegrad.verify.sums import Floats
from ropegrad.verify.trial import Trial, perform

RULE = "breaks a property"
Outputs = dict[str, Floats]
Call = Callable[[Case], Outputs]
Bounds = Callable[[Case], Outputs]


class _NoAnswer(Exception):
    """A call gave nothing to compare."""


def property_faults(
    runner: Runner, recipe: Recipe, allowance: tuple[str, ...] = ()
) -> tuple[list[Fault], int]:
    """The properties that a target breaks on one problem with finite values, and the calls it took."""

    def bounds(changed: Case) -> Outputs:
        return standard(changed, expected(changed), allowance).bound

    trial = Trial(recipe)
    case = recipe.case()

    def call(changed: Case) -> Outputs:
        answer = perform(runner, changed, "nan", trial)
        if answer is None or any(answer.outputs.get(name) is None for name in changed.outputs):
            raise _NoAnswer
        return {name: np.asarray(answer.outputs[name], np.float64) for name in changed.outputs}

    try:
        got = call(case)
        faults = [
            Fault(
                RULE,
                name,
                f"{title}: {name} is off by {off:.3g}, rounding allows {allowed:.3g}",
                off / allowed,
            )
            for title, check in PROPERTIES.items()
            for name, off, allowed in check(case, got, bounds, call)
            if not off <= allowed
        ]
    except _NoAnswer:
        return [Fault(RULE, "", "a call gave no results where another of the same sizes did")], trial.calls
    return faults, trial.calls


Finding = tuple[str, float, float]  # output, how far off, what rounding allows


def _adjoint(case: Case, got: Outputs, bounds: Bounds, call: Call) -> Iterator[Finding]:
    """<g, f(v)> = <f*(g), v>, v every input that has a gradient, or all that f is linear in together."""
    op = "rope" if isinstance(case.spec, RopeSpec) else "qkv"
    values, bound = _forward(case), bounds(case)
    pairs = {}
    for value_name, upstream in zip(FORWARD_VALUES[op], UPSTREAM[op], strict=True):
        if value_name in values:
            g = np.asarray(case.inputs[upstream], np.float64)
            pairs[value_name] = g * values[value_name]
    for names, of in _groups(case, op):
        if not set(names) <= set(got):
            continue
        sides = {name: np.asarray(case.inputs[name.removeprefix("grad_")], np.float64) for name in names}
        right = sum(float((got[name] * v).sum()) for name, v in sides.items())
        left = sum(float(pairs[value].sum()) for value in of)
        if op == "rope" and names[0] == "grad_cos":
            left -= _passed(case, values)
        size = sum(float(np.abs(pairs[value]).sum()) for value in of)
        allowed = sum(float((bound[name] * np.abs(v)).sum()) for name, v in sides.items())
        yield " and ".join(names), abs(left - right), allowed + 2.0**-40 * size + np.finfo(float).tiny


def _groups(case: Case, op: str) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Gradients, and the values whose products with g their products with the inputs add up to."""
    if op == "qkv":
        parts = [((f"grad_{p}_weight",), (v,)) for p, v in zip("qkv", ("query", "key", "value"), strict=True)]
        return [(("grad_hidden_states",), ("query", "key", "value")), *parts]
    sides = (("grad_q",), ("q_embed",)), (("grad_k",), ("k_embed",))
    return [*sides, (("grad_cos", "grad_sin"), ("q_embed", "k_embed"))]


def _forward(case: Case) -> Outputs:
    spec = rope_geometry(case)
    wide = {n: None if x is None else np.asarray(x, np.float64) for n, x in case.inputs.items()}
    words: dict[str, Any] = {"layout": spec.layout, "pairing": spec.pairing, "table": spec.table}
    if isinstance(case.spec, RopeSpec):
        found: Any = api.rope(wide["q"], wide["k"], wide["cos"], wide["sin"], **words)
    else:
        names = ("hidden_states", "q_weight", "k_weight", "v_weight", "cos", "sin")
        found = api.qkv_rope(*(wide[name] for name in names), head_dim=spec.head_dim, **words)
    return {name: np.asarray(x) for name, x in found._asdict().items() if x is not None}


def _passed(case: Case, values: Outputs) -> float:
    """The part of <g, f(v)> that no table has to do with."""
    width = rope_geometry(case).rotary_dim
    through = (
        (np.asarray(case.inputs[up], np.float64) * values[name])[..., width:]
        for name, up in zip(FORWARD_VALUES["rope"], UPSTREAM["rope"], strict=True)
    )
    return float(sum(x.sum() for x in through))


def _linear(case: Case, got: Outputs, bounds: Bounds, call: Call) -> Iterator[Finding]:
    """f*(g + h) = f*(g) + f*(h); h is g backwards."""
    ups = UPSTREAM["rope" if isinstance(case.spec, RopeSpec) else "qkv"]
    backwards, both = dict(case.inputs), dict(case.inputs)
    for up in ups:
        g = case.inputs[up]
        if g is not None:
            backwards[up] = np.ascontiguousarray(np.flip(g))
            both[up] = (g + backwards[up]).astype(g.dtype)
    cases = [replace(case, inputs=inputs) for inputs in (backwards, both)]
    other, total = (call(one) for one in cases)
    bound, slack = bounds(case), [bounds(one) for one in cases]
    lost = _rounded_sums(case, both, backwards)
    for name, x in got.items():
        off = np.abs(total[name] - x - other[name])
        yield name, *_worst(off, bound[name] + slack[0][name] + slack[1][name] + lost[name])


def _rounded_sums(case: Case, both: dict[str, Any], backwards: dict[str, Any]) -> Outputs:
    """What g + h loses where it is rounded to the dtype of g: nothing for small whole numbers."""
    exact = all(
        x is None
        or np.array_equal(np.asarray(x, float) + np.asarray(backwards[n], float), np.asarray(both[n], float))
        for n, x in case.inputs.items()
        if n.startswith("grad")
    )
    return {name: np.zeros(()) if exact else np.full((), np.inf) for name in case.outputs}


def _permuted(axis_of: Callable[[RopeSpec], int]) -> Callable[..., Iterator[Finding]]:
    def check(case: Case, got: Outputs, bounds: Bounds, call: Call) -> Iterator[Finding]:
        spec = case.spec
        if not isinstance(spec, RopeSpec):
            return
        axis, bound = axis_of(spec), bounds(case)

        def turned(name: str, x: Any) -> Any:
            if name.removeprefix("grad_") in ("cos", "sin"):
                moves = axis == _batch(spec) and spec.table_batch == spec.batch
                return np.flip(x, 0) if moves else x
            return np.flip(x, axis)

        inputs = {
            n: None if x is None else np.ascontiguousarray(turned(n, x)) for n, x in case.inputs.items()
        }
        other = call(replace(case, inputs=inputs))
        for name, x in got.items():
            yield name, *_worst(np.abs(turned(name, other[name]) - x), 2 * bound[name])

    return check


def _heads(spec: RopeSpec) -> int:
    return {"bhsd": 1, "bshd": 2, "sbhd": 2}[spec.layout]


def _batch(spec: RopeSpec) -> int:
    return 1 if spec.layout == "sbhd" else 0


def _worst(off: Floats, allowed: Floats) -> tuple[float, float]:
    """The element that is farthest beyond what is allowed."""
    if not off.size:
        return 0.0, 1.0
    at = int(np.argmax(off - allowed))
    return float(off.flat[at]), float(np.broadcast_to(allowed, off.shape).flat[at]) + np.finfo(float).tiny


PROPERTIES: dict[str, Callable[[Case, Outputs, Bounds, Call], Iterator[Finding]]] = {
    "adjoint identity <g, f(v)> = <f*(g), v>": _adjoint,
    "linear in the upstream gradients": _linear,
    "heads in reverse order": _permuted(_heads),
    "batches in reverse order": _permuted(_batch),
}
