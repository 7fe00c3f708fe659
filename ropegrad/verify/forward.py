"""What a forward's values have to be: RoPE's forward is a backward with other sines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ropegrad.spec import QkvSpec, RopeSpec
from ropegrad.verify.case import Case, NumpyArray
from ropegrad.verify.oracle import expected
from ropegrad.verify.projected import projected_standard
from ropegrad.verify.ruling import ROUNDS, Standard, standard
from ropegrad.verify.sums import members


def forward_shapes(case: Case) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of the forward's values, by name."""
    if isinstance(case.spec, QkvSpec):
        return _qkv_shapes(case.spec)
    spec = case.spec
    sides = (("q_embed", spec.heads), ("k_embed", spec.kv_heads))
    return {name: (spec.head_shape(heads), spec.dtype) for name, heads in sides if heads is not None}


def forward_standard(case: Case, allowance: tuple[str, ...] = ()) -> Standard:
    """The exact values of the forward of a case, and their bounds."""
    if isinstance(case.spec, QkvSpec):
        return projected_standard(case, case.spec, rounds_every_step=ROUNDS in allowance)
    turned = as_backward(case)
    rule = standard(turned, expected(turned), allowance)
    names = {"grad_q": "q_embed", "grad_k": "k_embed"}

    def renamed(facts: dict[str, Any]) -> dict[str, Any]:
        return {names[name]: fact for name, fact in facts.items()}

    return replace(
        rule, case=case, exact=renamed(rule.exact), bound=renamed(rule.bound), must=renamed(rule.must)
    )


def as_backward(case: Case) -> Case:
    """The backward case that computes this one's forward: dx_j = g_j·c_j - σ_j·g_p(j)·s_p(j) with g = x and
    the sine -s_p(j) in column j, so that each channel reads σ_j·x_p(j)·s_j."""
    spec = case.spec
    assert isinstance(spec, RopeSpec)
    sin = case.inputs["sin"]
    assert sin is not None
    inputs = dict(case.inputs)
    inputs |= {"grad_q_embed": case.inputs["q"], "grad_k_embed": case.inputs["k"], "sin": _turned(sin, spec)}
    needs = tuple(side for side, heads in (("q", spec.heads), ("k", spec.kv_heads)) if heads is not None)
    return replace(case, spec=replace(spec, needs=needs, adjoint="exact", accumulate=False), inputs=inputs)


def _turned(sin: NumpyArray, spec: RopeSpec) -> NumpyArray:
    if spec.table == "half":
        return -sin
    turned = np.empty_like(sin)
    first, second = members(turned, spec)
    first[...], second[...] = (-member for member in reversed(members(sin, spec)))
    return turned


def _qkv_shapes(spec: QkvSpec) -> dict[str, tuple[tuple[int, ...], str]]:
    heads = (("query", spec.rope.heads), ("key", spec.rope.kv_heads), ("value", spec.rope.kv_heads))
    return {name: (spec.rope.head_shape(count or 0), spec.rope.dtype) for name, count in heads}
