"""Judging `out=` before anything is written to it, and results by name and as tuples."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ropegrad.arrays import LAZY_OR_FROZEN, Array, facts, overlap, overlaps_itself, same_memory
from ropegrad.errors import SpecError
from ropegrad.spec import QKV_BIASES, QkvSpec, RopeSpec, parts_of

# Outputs that may stand exactly on an input: each element is read before it is written.
IN_PLACE = {"grad_q": ("grad_q_embed", "q"), "grad_k": ("grad_k_embed", "k")}


def judge_out(
    spec: RopeSpec | QkvSpec, fields: tuple[str, ...], out: Any, inputs: dict[str, Array]
) -> dict[str, Array] | None:
    """The wanted arrays of `out` by name; SpecError if any could not take its gradient safely.

    `fields` are the result's names in order. Nothing is written.
    """
    if out is None:
        if spec.accumulate:
            raise SpecError("accumulate=True adds into out=: pass the arrays to add to")
        return None
    if not isinstance(out, tuple) or len(out) != len(fields):
        kind = type(out).__name__ + (f" of {len(out)}" if isinstance(out, (tuple, list)) else "")
        raise SpecError(f"out is a {kind}: it must be a tuple ({', '.join(fields)}), None where not needed")
    if spec.namespace in LAZY_OR_FROZEN:
        raise SpecError(f"{LAZY_OR_FROZEN[spec.namespace]}: leave out= away and use what is returned")
    if _geometry(spec).device == "meta":
        raise SpecError("meta tensors have no memory to write: leave out= away and use what is returned")
    wanted = {f"grad_{need}" for need in spec.needs}
    given = {}
    for name, array in zip(fields, out, strict=True):
        asked = name in wanted or parts_of(name)[0] in wanted
        if not asked and array is not None:
            raise SpecError(f"out has an array for {name}, which needs does not name: put None there")
        if asked:
            _judge_one(spec, name, array)
            given[name] = array
    _judge_overlaps(given, inputs)
    return given


def _geometry(spec: RopeSpec | QkvSpec) -> RopeSpec:
    return spec if isinstance(spec, RopeSpec) else spec.rope


def _judge_one(spec: RopeSpec | QkvSpec, name: str, array: Array) -> None:
    label = f"out's {name}"
    if array is None:
        raise SpecError(f"{label} is None, but needs asks for it: pass an array, or leave it out of needs")
    fact = facts(label, array)
    shape, dtype = spec.output(name.removeprefix("grad_"))
    for what, mine, right in (
        ("namespace", fact.namespace, spec.namespace),
        ("device", fact.device, _geometry(spec).device),
        ("shape", fact.shape, shape),
        ("dtype", fact.dtype, dtype),
    ):
        if mine != right:
            raise SpecError(f"{label} has {what} {mine}: it must be {right}")
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        raise SpecError(f"{label} is read-only: pass an array that can be written")
    if getattr(array, "requires_grad", False):
        raise SpecError(f"{label} requires grad: pass a detached tensor")
    if overlaps_itself(array):
        raise SpecError(
            f"{label} has elements that share memory, or interleave (a broadcast view?): pass a plain array"
        )


def _judge_overlaps(given: dict[str, Array], inputs: dict[str, Array]) -> None:
    names = list(given)
    for i, name in enumerate(names):
        for other in names[i + 1 :]:
            if overlap(given[name], given[other]):
                raise SpecError(f"out's {name} and {other} overlap in memory: give each its own")
        for source, array in inputs.items():
            if not overlap(given[name], array):
                continue
            if source in IN_PLACE.get(name, ()) and same_memory(given[name], array):
                continue
            raise SpecError(f"out's {name} overlaps {source} in memory: give it its own")


class RopeGrads(NamedTuple):
    """Gradients of RoPE, each in the shape and dtype of its input; None where not needed."""

    grad_q: Array
    grad_k: Array
    grad_cos: Array
    grad_sin: Array


class QkvGrads(NamedTuple):
    """Gradients of the projections and RoPE, each in its input's shape and dtype; None where not needed."""

    grad_hidden_states: Array
    grad_q_weight: Array
    grad_k_weight: Array
    grad_v_weight: Array


class QkvBiasGrads(NamedTuple):
    """`QkvGrads` and the gradients of the biases, [rows] each: the result where `needs` names a bias."""

    grad_hidden_states: Array
    grad_q_weight: Array
    grad_k_weight: Array
    grad_v_weight: Array
    grad_q_bias: Array
    grad_k_bias: Array
    grad_v_bias: Array


class QkvPackedGrads(NamedTuple):
    """`QkvGrads` in the packed form: one array for the weights, one for the biases."""

    grad_hidden_states: Array
    grad_qkv_weight: Array
    grad_qkv_bias: Array


QkvKind = type[QkvGrads] | type[QkvBiasGrads] | type[QkvPackedGrads]


def qkv_kind(spec: QkvSpec, packed: bool) -> QkvKind:
    """What a call of this spec returns."""
    if packed:
        return QkvPackedGrads
    return QkvBiasGrads if set(QKV_BIASES) & set(spec.needs) else QkvGrads


class RopeOut(NamedTuple):
    """q and k after RoPE; None where absent."""

    q_embed: Array
    k_embed: Array


class QkvOut(NamedTuple):
    """query and key after RoPE, and value."""

    query: Array
    key: Array
    value: Array
