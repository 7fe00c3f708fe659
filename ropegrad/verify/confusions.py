"""Confusions as changes of a problem's inputs: what a faulty function computes is exactly right for these.

Each takes a case and the output in question, and gives the changed case, or None where it says nothing of
that output or changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ropegrad.arrays import numpy_dtype
from ropegrad.spec import QkvSpec, RopeSpec
from ropegrad.verify.case import Case, NumpyArray, rope_geometry
from ropegrad.verify.sums import bhsd, members

Change = Callable[[Case, str], Case | None]
_TABLES = ("cos", "sin")


def _is_table(name: str) -> bool:
    return name.removeprefix("grad_") in _TABLES


def _with(case: Case, **arrays: Any) -> Case:
    return replace(case, inputs=case.inputs | arrays)


def _table_change(change: Callable[[Case, Any, Any], tuple[Any, Any] | None]) -> Change:
    """A change of cos and sin, in float64, rounded to their dtype; gradients of tables do not read them."""

    def changed(case: Case, name: str) -> Case | None:
        if _is_table(name) or name == "grad_v_weight":
            return None
        old = [np.asarray(case.inputs[table]) for table in _TABLES]
        with np.errstate(all="ignore"):
            made = change(case, *(x.astype(np.float64) for x in old))
            if made is None:
                return None
            cos, sin = (np.asarray(x).astype(old[0].dtype) for x in made)
        return _with(case, cos=cos, sin=sin)

    return changed


def _swapped(case: Case, table: NumpyArray) -> NumpyArray | None:
    """A full table with the two columns of each pair exchanged."""
    spec = rope_geometry(case)
    if spec.table == "half":
        return None
    result = np.empty_like(table)
    for new, old in zip(members(result, spec), reversed(members(table, spec)), strict=True):
        new[...] = old
    return result


def _other_sine(case: Case, cos: Any, sin: Any) -> Any:
    swapped = _swapped(case, sin)
    return None if swapped is None else (cos, swapped)


def _forward_formula(case: Case, cos: Any, sin: Any) -> Any:
    swapped = _swapped(case, sin)
    return None if swapped is None else (cos, -swapped)


def _one_column(which: int) -> Callable[[Case, Any, Any], Any]:
    def change(case: Case, cos: Any, sin: Any) -> Any:
        spec = rope_geometry(case)
        if spec.table == "half":
            return None
        for table in (cos, sin):
            pair = members(table, spec)
            pair[1 - which][...] = pair[which]
        return cos, sin

    return change


def _other_order(case: Case, cos: Any, sin: Any) -> Any:
    """A pair's columns are looked for where the other pairing has them."""
    spec = rope_geometry(case)
    if spec.table == "half":
        return None
    other = replace(spec, pairing="half" if spec.pairing == "interleaved" else "interleaved")
    found = np.empty_like(cos), np.empty_like(sin)
    for new, old in zip(found, (cos, sin), strict=True):
        for column, there in zip(members(new, spec), members(old, other), strict=True):
            column[...] = there
    return found


def _inverse(case: Case, cos: Any, sin: Any) -> Any:
    norm = cos * cos + sin * sin
    return cos / norm, sin / norm


def _rolled(step: int) -> Callable[[Case, Any, Any], Any]:
    return lambda case, cos, sin: (np.roll(cos, step, axis=-2), np.roll(sin, step, axis=-2))


def _first_batch(case: Case, cos: Any, sin: Any) -> Any:
    if cos.ndim != 3 or cos.shape[0] < 2:
        return None
    return tuple(np.broadcast_to(x[:1], x.shape).copy() for x in (cos, sin))


def _first_token(case: Case, cos: Any, sin: Any) -> Any:
    if cos.shape[-2] < 2:
        return None
    return tuple(np.broadcast_to(x[..., :1, :], x.shape).copy() for x in (cos, sin))


def _rounded(dtype: str) -> Callable[[Case, Any, Any], Any]:
    def change(case: Case, cos: Any, sin: Any) -> Any:
        if str(np.asarray(case.inputs["cos"]).dtype) == dtype:
            return None
        return tuple(x.astype(numpy_dtype(dtype)).astype(np.float64) for x in (cos, sin))

    return change


def _other_pairing(case: Case, name: str) -> Case | None:
    other = "half" if rope_geometry(case).pairing == "interleaved" else "interleaved"
    if isinstance(case.spec, RopeSpec):
        return replace(case, spec=replace(case.spec, pairing=other))
    return replace(case, spec=replace(case.spec, rope=replace(case.spec.rope, pairing=other)))


def _heads_kept(side: str, keep: Callable[[int, RopeSpec], Any]) -> Change:
    """Upstream gradients of the heads of one side set to zero but for those kept; for gradients of tables."""

    def changed(case: Case, name: str) -> Case | None:
        spec, upstream = case.spec, case.inputs.get(f"grad_{side}_embed")
        if not _is_table(name) or not isinstance(spec, RopeSpec) or upstream is None:
            return None
        new = np.zeros_like(upstream)
        kept = keep(bhsd(upstream, spec.layout).shape[1], spec)
        bhsd(new, spec.layout)[:, kept] = bhsd(upstream, spec.layout)[:, kept]
        return _with(case, **{f"grad_{side}_embed": new})

    return changed


def _batches_kept(case: Case, name: str) -> Case | None:
    spec = rope_geometry(case)
    if not isinstance(case.spec, RopeSpec):
        hidden, axis = case.inputs["hidden_states"], 1 if spec.layout == "sbhd" else 0
        if not name.endswith("_weight") or hidden is None or spec.batch < 2:
            return None
        new = np.zeros_like(hidden)
        np.moveaxis(new, axis, 0)[0] = np.moveaxis(hidden, axis, 0)[0]
        return _with(case, hidden_states=new)
    if not _is_table(name) or spec.table_batch == spec.batch:
        return None
    new_arrays = {}
    for key in ("grad_q_embed", "grad_k_embed"):
        upstream = case.inputs[key]
        if upstream is not None:
            new = np.zeros_like(upstream)
            bhsd(new, spec.layout)[:1] = bhsd(upstream, spec.layout)[:1]
            new_arrays[key] = new
    return _with(case, **new_arrays)


def _repeated(case: Case, name: str) -> Case | None:
    """k's heads counted as often as they serve q's."""
    spec = rope_geometry(case)
    upstream = case.inputs.get("grad_k_embed")
    ratio = (spec.heads or 0) // (spec.kv_heads or 1)
    if not _is_table(name) or upstream is None or ratio < 2:
        return None
    return _with(case, grad_k_embed=upstream * upstream.dtype.type(ratio))


def _zeroed(array: str, *outputs: str) -> Change:
    def changed(case: Case, name: str) -> Case | None:
        old = case.inputs.get(array)
        if name not in outputs or old is None or not isinstance(case.spec, QkvSpec):
            return None
        return _with(case, **{array: np.zeros_like(old)})

    return changed


def _weights_swapped(case: Case, name: str) -> Case | None:
    if name != "grad_hidden_states":
        return None
    return _with(case, k_weight=case.inputs["v_weight"], v_weight=case.inputs["k_weight"])


CONFUSIONS: tuple[tuple[str, Change], ...] = (
    ("uses its own sine instead of its partner's", _table_change(_other_sine)),
    ("rotates the wrong way: the sine's sign is flipped", _table_change(lambda case, c, s: (c, -s))),
    ("is the forward formula g·cos + rotate(g)·sin", _table_change(_forward_formula)),
    ("has cosine and sine exchanged", _table_change(lambda case, c, s: (s, c))),
    ("matches the other pairing of channels", _other_pairing),
    ("is the inverse of the rotation, not its transpose", _table_change(_inverse)),
    ("reads only the first column of each pair of the tables", _table_change(_one_column(0))),
    ("reads only the second column of each pair of the tables", _table_change(_one_column(1))),
    ("reads the columns of the tables in the order of the other pairing", _table_change(_other_order)),
    ("is not rotated", _table_change(lambda case, c, s: (np.ones_like(c), np.zeros_like(s)))),
    ("leaves out the sine", _table_change(lambda case, c, s: (c, np.zeros_like(s)))),
    ("leaves out the cosine", _table_change(lambda case, c, s: (np.zeros_like(c), s))),
    ("reads the tables one position early", _table_change(_rolled(1))),
    ("reads the tables one position late", _table_change(_rolled(-1))),
    ("reads the first batch's tables for every batch", _table_change(_first_batch)),
    ("reads the first token's row of the tables for every token", _table_change(_first_token)),
    ("reads tables rounded to float16", _table_change(_rounded("float16"))),
    ("reads tables rounded to bfloat16", _table_change(_rounded("bfloat16"))),
    ("leaves out k's heads", _heads_kept("k", lambda n, spec: slice(0, 0))),
    ("leaves out q's heads", _heads_kept("q", lambda n, spec: slice(0, 0))),
    ("leaves out k's heads after the first", _heads_kept("k", lambda n, spec: slice(0, 1))),
    ("leaves out q's heads after the first", _heads_kept("q", lambda n, spec: slice(0, 1))),
    ("leaves out k's last head", _heads_kept("k", lambda n, spec: slice(0, n - 1))),
    ("leaves out q's last head", _heads_kept("q", lambda n, spec: slice(0, n - 1))),
    ("counts as many of q's heads as k has", _heads_kept("q", lambda n, spec: slice(0, spec.kv_heads))),
    ("counts heads of q up to 32", _heads_kept("q", lambda n, spec: slice(0, 32))),
    ("counts k's heads once for every head of q", _repeated),
    ("leaves out batches after the first", _batches_kept),
    ("leaves out the query's part", _zeroed("grad_query", "grad_hidden_states")),
    ("leaves out the key's part", _zeroed("grad_key", "grad_hidden_states")),
    ("leaves out the value's part", _zeroed("grad_value", "grad_hidden_states")),
    ("has the weights of key and value exchanged", _weights_swapped),
)  # fmt: skip
