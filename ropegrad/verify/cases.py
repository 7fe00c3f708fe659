"""Named edge cases, each a fault that shipped somewhere: small problems that every backend must get right.

The names say what a wrong result would mean. Seeds are fixed, so a case is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ropegrad.spec import QKV_NEEDS, QkvSpec, RopeSpec
from ropegrad.verify.case import Case
from ropegrad.verify.recipe import Recipe

_BASE = RopeSpec(batch=2, heads=6, kv_heads=2, seq=5, head_dim=8, rotary_dim=8, table_batch=2)
_QKV = QkvSpec(rope=replace(_BASE, needs=()), hidden_size=16)


_WIDE: dict[str, Any] = {"head_dim": 32, "rotary_dim": 32}


def rope_edge_cases() -> list[Case]:
    """Edge cases of RoPE: heads, widths, pass-through, tables, layouts, memory, values."""
    return [recipe.case() for recipe in rope_recipes()]


def qkv_edge_cases() -> list[Case]:
    """Edge cases of the projections: packing, layouts, biases, sparse probes, ranges."""
    return [recipe.case() for recipe in qkv_recipes()]


def rope_recipes() -> list[Recipe]:
    """The edge cases of RoPE before their data are made."""
    cases = [
        _rope("kv heads are summed into the tables", heads=4, kv_heads=1),
        _rope("a single head on each side", heads=1, kv_heads=1),
        _rope("GQA ratio 7", heads=7, kv_heads=1),
        _rope("more than 32 heads", heads=40, kv_heads=8),
        _rope("no q heads at all", heads=0, kv_heads=2),
        _rope("one token", seq=1),
        _rope("one channel pair", head_dim=2, rotary_dim=2),
        _rope("heads, tokens and channels alike", heads=8, kv_heads=8, seq=8),
        _rope("no tokens", seq=0),
        _rope("no batches: the shared table's gradient is zero", batch=0, table_batch=None),
        _rope("no rotary channels", rotary_dim=0),
        _rope("odd head size, even rotary width", head_dim=9, rotary_dim=4),
        _rope("pass-through channels, coded gradients", rotary_dim=4, values="coded"),
        _rope("one table for all batches", table_batch=None),
        _rope("one table with a batch axis of one", table_batch=1),
        _rope("half tables collect both members", table="half"),
        _rope("half tables shared by all batches", table="half", table_batch=None),
        _rope("adjacent pairs", pairing="interleaved"),
        _rope(
            "adjacent pairs, half tables, partial width", pairing="interleaved", table="half", rotary_dim=6
        ),
        _rope("a channel's own sine on request", adjoint="paired"),
        _rope("layout bshd", layout="bshd"),
        _rope("layout sbhd", layout="sbhd"),
        _rope("q alone", kv_heads=None, needs=("q", "cos", "sin")),
        _rope("k alone", heads=None, needs=("k", "cos", "sin")),
        _rope("q's gradient only", needs=("q",)),
        _rope("sine's gradient only", needs=("sin",)),
        _rope("added into out", accumulate=True),
        _rope("scaled tables: the transpose, not the inverse", tables="scaled"),
        _rope("positions past a million", tables="far"),
        _rope("real Llama 3 tables, gradients near 1e-6", values="tiny_gradients", tables="llama3"),
        _rope("magnitudes of many scales", values="scales"),
        _rope("subnormal gradients are kept", values="subnormal"),
        _rope("small normal gradients are kept", values="small"),
        _rope("signed zeros", values="zeros"),
        _rope("one dominating element", values="dominating"),
        _rope("products past the largest number", values="overflow"),
        _rope("NaN and Inf go where they enter and nowhere else", values="nonfinite"),
        _rope("zeros of both signs in the tables", tables="zeros"),
        _rope("NaN in a table", tables="nonfinite"),
        _rope("zero times Inf is NaN", values="zeros", tables="nonfinite"),
        _rope("float64", dtype="float64", table_dtype="float64"),
        _rope("float32 with float64 tables", table_dtype="float64"),
        _rope("float32 with bfloat16 tables", table_dtype="bfloat16"),
        _rope("bfloat16 with float32 tables, rounded once", dtype="bfloat16"),
        _rope("long sum of bfloat16", dtype="bfloat16", table_dtype="bfloat16", heads=64, seq=3),
        _rope("float16", dtype="float16", table_dtype="float16"),
        _rope("float16 products past 65,504", dtype="float16", table_dtype="float16", values="overflow"),
    ]
    cases += [  # too large to be stacked and done at once: tiles, threads, sums over several of them
        _rope("a shared table over several tiles", batch=3, heads=8, seq=300, table_batch=None, **_WIDE),
        _rope(
            "a shared table over the batches of one tile", batch=9, heads=8, seq=20, table_batch=1, **_WIDE
        ),
        _rope("several tiles of tokens", heads=40, kv_heads=8, seq=161, head_dim=128, rotary_dim=128),
        _rope("float64 in tiles", seq=300, dtype="float64", table_dtype="float64", **_WIDE),
        _rope("bfloat16 in tiles, added into out", seq=300, dtype="bfloat16", accumulate=True, **_WIDE),
        _rope("half tables in tiles, adjacent pairs", seq=300, table="half", pairing="interleaved", **_WIDE),
    ]
    memories = ("transposed", "sliced", "stepped", "negative", "expanded", "misaligned", "mixed")
    cases += [_rope(f"memory: {memory}", memory=memory, values="coded") for memory in memories]
    for width in (6, 20, 48, 72, 80, 96, 112, 160, 192, 256):
        cases.append(_rope(f"width {width}", head_dim=width, rotary_dim=width, batch=1, table_batch=1))
    for dim, width in ((80, 20), (128, 32), (64, 16), (96, 24), (256, 64)):
        cases.append(_rope(f"width {width} of {dim}", head_dim=dim, rotary_dim=width, batch=1, table_batch=1))
    return cases


def qkv_recipes() -> list[Recipe]:
    """The edge cases of the projections before their data are made."""
    return [
        _qkv("three projections in one", _QKV),
        _qkv("a single head on each side", _rope_of(heads=1, kv_heads=1)),
        _qkv("kv heads as many as heads", _rope_of(heads=2, kv_heads=2)),
        _qkv("one token", _rope_of(batch=1, seq=1, table_batch=1)),
        _qkv("no tokens: zero weight gradients", _rope_of(seq=0)),
        _qkv("hidden size one", replace(_QKV, hidden_size=1)),
        _qkv("layout bshd", _rope_of(layout="bshd")),
        _qkv("layout sbhd: hidden states [S, B, C]", _rope_of(layout="sbhd")),
        _qkv("adjacent pairs, partial width, half tables",
             _rope_of(pairing="interleaved", rotary_dim=6, table="half")),
        _qkv("one table for all batches", _rope_of(table_batch=None)),
        _qkv("biases by name", replace(_QKV, needs=QKV_NEEDS)),
        _qkv("value's weight only", replace(_QKV, needs=("v_weight",))),
        _qkv("key's weight only", replace(_QKV, needs=("k_weight",))),
        _qkv("hidden states only", replace(_QKV, needs=("hidden_states",))),
        _qkv("added into out", _rope_of(accumulate=True)),
        _qkv("sparse probe: few products, sharp bound", _QKV, values="sparse"),
        _qkv("long sums", _rope_of(batch=4, seq=64, table_batch=4)),
        _qkv("magnitudes of many scales", _QKV, values="scales"),
        _qkv("gradients near 1e-6", _QKV, values="tiny_gradients", tables="base10000"),
        _qkv("subnormal gradients are kept", _QKV, values="subnormal"),
        _qkv("small normal gradients are kept", _QKV, values="small"),
        _qkv("NaN and Inf go where they enter and nowhere else", _QKV, values="nonfinite"),
        _qkv("zeros of both signs in the tables", _QKV, tables="zeros"),
        _qkv("zero times Inf is NaN", _QKV, values="zeros", tables="nonfinite"),
        _qkv("products past the largest number", _QKV, values="overflow"),
        _qkv("memory: transposed", _QKV, memory="transposed"),
        _qkv("memory: mixed", _QKV, memory="mixed"),
        _qkv("float64", _rope_of(dtype="float64", table_dtype="float64")),
        _qkv("bfloat16 with float32 tables", _rope_of(dtype="bfloat16")),
        _qkv("float16", _rope_of(dtype="float16", table_dtype="float16")),
    ]  # fmt: skip


EDGE_CASES: dict[str, Callable[[], list[Case]]] = {"rope": rope_edge_cases, "qkv": qkv_edge_cases}


def _rope_of(**changes: object) -> QkvSpec:
    return replace(_QKV, rope=replace(_QKV.rope, **changes))  # type: ignore[arg-type]


def _rope(
    name: str,
    *,
    values: str = "normal",
    tables: str = "normal",
    memory: str = "contiguous",
    **changes: object,
) -> Recipe:
    spec = replace(_BASE, **changes)  # type: ignore[arg-type]
    return Recipe(spec, len(name), values, tables, memory, name)


def _qkv(
    name: str, spec: QkvSpec, *, values: str = "normal", tables: str = "normal", memory: str = "contiguous"
) -> Recipe:
    return Recipe(spec, len(name), values, tables, memory, name)
