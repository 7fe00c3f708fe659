"""The problems that `ropegrad verify TARGET` puts to a target: an ordinary one, then all by size."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

from ropegrad.errors import SpecError
from ropegrad.spec import QKV_WEIGHTS, ROPE_NEEDS, QkvSpec, RopeSpec
from ropegrad.suites import SUITES
from ropegrad.verify.cases import qkv_recipes, rope_recipes
from ropegrad.verify.conformance import DRAWS, seed
from ropegrad.verify.domain import Domain, fitted, is_empty
from ropegrad.verify.recipe import Recipe
from ropegrad.verify.target import SHAPES, Contract

_BASE = RopeSpec(batch=2, heads=4, kv_heads=2, seq=5, head_dim=8, rotary_dim=8, table_batch=2)


def battery(contract: Contract, domain: Domain) -> list[Recipe]:
    """The problems inside the domain, by size, under the contract; the first is one that tells something.

    Raises SpecError where there is none but empty ones: of a domain of very large heads, say.
    """
    recipes = rope_recipes() if contract.op == "rope" else qkv_recipes()
    recipes = [recipe for recipe in recipes if _is_plain(recipe)] + (_ROPE if contract.op == "rope" else _QKV)
    chosen: dict[Recipe, Recipe] = {}
    least = math.inf
    for turn, recipe in enumerate(recipes):
        moved = fitted(recipe, contract, domain, turn)
        least = least if is_empty(moved) else min(least, size(moved))
        if is_inside(domain, moved):
            chosen.setdefault(replace(moved, name="", seed=0), moved)
    if all(map(is_empty, chosen)):
        most = f"the smallest here has {least:,.0f} elements, a problem may have {LARGEST:,}"
        raise SpecError(f"no problem lies in this domain: {most}")
    ordered = sorted(chosen.values(), key=size)
    telling = [recipe for recipe in ordered if _tells(recipe)]
    for first in sorted(telling, key=lambda one: one.rope.batch < 2 or size(one) < ENOUGH)[:1]:
        ordered.remove(first)
        ordered.insert(0, replace(first, often=True))
    return ordered


def _tells(recipe: Recipe) -> bool:
    """Whether a fault of a process's first call must show in this problem."""
    data = (recipe.values, recipe.memory)
    return data == ("normal", "contiguous") and recipe.rope.rotary_dim > 0 and not is_empty(recipe)


def is_inside(domain: Domain, recipe: Recipe) -> bool:
    """Whether a problem lies in the domain, and is not made too large by it."""
    return domain.outside(recipe) is None and size(recipe) <= LARGEST


LARGEST = 1 << 22  # elements of a problem that is not of a suite
ENOUGH = 256  # elements: several of all axes


def beyond(contract: Contract, domain: Domain) -> list[Recipe]:
    """Problems outside the domain, contiguous or not: a target should decline them or get them right."""
    recipes = battery(contract, Domain(rotary="any"))
    return [recipe for recipe in recipes if domain.outside(recipe) is not None and size(recipe) < 1e5]


def suite(name: str, contract: Contract, domain: Domain) -> list[Recipe]:
    """The 16 cases of a suite, both draws of its inputs in turn, those inside the domain."""
    found = []
    first, second = DRAWS[name].values()
    for case, spec in SUITES[name]().items():
        recipe = Recipe(spec, seed(case, "suite"), *first, name=case, then=second)
        moved = fitted(recipe, contract, replace(domain, head_dim=(), gqa=(), max_tokens=None))
        if domain.outside(moved) is None:
            found.append(moved)
    return sorted(found, key=size)


def property_recipes(contract: Contract, domain: Domain) -> list[Recipe]:
    """Problems with small whole numbers on which properties are checked."""
    tables = ("normal", "scaled")
    names = [f"properties, {kind} tables" for kind in tables]
    make = _rope if contract.op == "rope" else partial(_qkv, hidden_size=6)
    recipes = [make(name, values="coded", tables=kind) for name, kind in zip(names, tables, strict=True)]
    if domain.rotary == "any":
        recipes += [make("properties, partial width", values="coded", rotary_dim=4)]
    moved = [fitted(recipe, contract, domain) for recipe in recipes]
    return [recipe for recipe in moved if is_inside(domain, recipe)]


def table_shapes(contract: Contract, domain: Domain) -> dict[str, Recipe]:
    """A problem for each shape of tables that the contract does not promise, by that shape."""
    make = _rope if contract.op == "rope" else partial(_qkv, hidden_size=6)
    found = {}
    for shape, words in SHAPES.items():
        moved = fitted(make(f"tables [{words}]"), replace(contract, table_shape=shape), domain)
        if shape != contract.table_shape and is_inside(domain, moved):
            found[shape] = moved
    return found


def size(recipe: Recipe) -> float:
    """Elements of the inputs, and a little for every way in which it is not plain."""
    rope = recipe.rope
    heads = (rope.heads or 0) + (rope.kv_heads or 0)
    elements = math.prod((rope.batch, rope.seq, heads, rope.head_dim))
    if isinstance(recipe.spec, QkvSpec):
        elements += heads * rope.head_dim * (recipe.spec.hidden_size or 0)
    odd = (recipe.values != "normal") + (recipe.memory != "contiguous") + (recipe.tables != "normal")
    odd += recipe.memory in ("mixed", "movable")
    return elements * (1 + 0.25 * odd) + odd


def _is_plain(recipe: Recipe) -> bool:
    """Whether only sizes and data make the recipe what it is: the contract has the options."""
    rope, spec = recipe.rope, recipe.spec
    needs = ROPE_NEEDS if isinstance(spec, RopeSpec) else QKV_WEIGHTS
    options = (rope.layout, rope.pairing, rope.table, rope.adjoint, rope.dtype, rope.table_dtype)
    return (
        options == ("bhsd", "half", "full", "exact", "float32", "float32")
        and spec.needs == needs
        and not spec.accumulate
        and None not in (rope.heads, rope.kv_heads)
        and rope.table_batch == rope.batch
    )


def _rope(name: str, *, values: str = "normal", tables: str = "normal", memory: str = "contiguous",
          **sizes: int) -> Recipe:  # fmt: skip
    if "head_dim" in sizes:
        sizes.setdefault("rotary_dim", sizes["head_dim"])
    if "batch" in sizes:
        sizes.setdefault("table_batch", sizes["batch"])
    return Recipe(replace(_BASE, **sizes), len(name), values, tables, memory, name)  # type: ignore[arg-type]


def _qkv(name: str, hidden_size: int, *, values: str = "normal", tables: str = "normal",
         memory: str = "contiguous", **sizes: int) -> Recipe:  # fmt: skip
    recipe = _rope(name, values=values, tables=tables, memory=memory, **sizes)
    return replace(recipe, spec=QkvSpec(rope=replace(recipe.rope, needs=()), hidden_size=hidden_size))


_ONE: dict[str, Any] = {"batch": 1, "heads": 1, "kv_heads": 1}
_FEW: dict[str, Any] = {"batch": 1, "heads": 2, "kv_heads": 1}
_SHORT: dict[str, Any] = {"seq": 5, "head_dim": 4}
# Heads of q and of k as models have them, and a few that none has: a kernel may choose its blocks by them.
HEADS = (
    (3, 1), (3, 3), (5, 1), (5, 5), (6, 2), (7, 7), (9, 3), (10, 2), (12, 1), (12, 2), (12, 4), (12, 12),
    (14, 2), (15, 5), (16, 16), (20, 4), (20, 20), (24, 8), (28, 4), (32, 8), (36, 36), (40, 8), (40, 40),
    (48, 8), (56, 8), (64, 8), (71, 1), (96, 8), (128, 16),
)  # fmt: skip
BATCHES = (3, 4, 5, 7, 8, 16, 32)
TOKENS = (32, 96, 128, 256, 512, 1024, 2048)  # of one small head: a kernel may choose its tiles by them
CHANNELS = (65, 96, 128, 130, 257, 515)  # of the hidden states
_ROPE = [
    _rope("the smallest", **_ONE, seq=1, head_dim=2),
    _rope("one token of two pairs", **_ONE, seq=1, head_dim=4),
    _rope("two columns of a pair alike", tables="equal"),
    _rope("two columns of a pair alike, one head", **_ONE, tables="equal"),
    _rope("position 0 alone: nothing turns", **_ONE, seq=1, head_dim=4, values="coded", tables="llama3"),
    _rope("whole numbers that tell their index", values="coded"),
    _rope("real tables, whole numbers", values="coded", tables="llama3"),
    *[_rope(f"{n} tokens", seq=n, batch=1) for n in (2, 13, 16, 17, 31, 33, 64, 65, 127, 129)],
    *[_rope(f"{n} tokens", **_ONE, seq=n, head_dim=4) for n in (301, 1031, 4099)],
    *[_rope(f"{n} tokens, one head", **_ONE, seq=n, head_dim=4) for n in TOKENS],
    *[_rope(f"{n} batches", batch=n, heads=2, kv_heads=1, seq=2, head_dim=4) for n in BATCHES],
    *[_rope(f"GQA ratio {n}", heads=2 * n) for n in (1, 3, 4, 8)],
    *[_rope(f"GQA ratio {n}, few channels", heads=2 * n, **_SHORT) for n in (16, 32)],
    _rope("33 heads, 11 of k", heads=33, kv_heads=11),
    *[_rope(f"{n} heads, {m} of k", heads=n, kv_heads=m, **_SHORT) for n, m in HEADS],
    _rope("scaled tables, far positions", tables="far", values="scales"),
    _rope("small rows beside large ones", values="reciprocal", seq=6),
    _rope("tables of many magnitudes", tables="wide"),
    *[_rope(f"NaN and Inf beside zeros in tables of {n} tokens", seq=n, values="nonfinite", tables="zeros")
      for n in (6, 7)],
    _rope("small normal gradients of one head", **_ONE, values="small"),
    *[_rope(f"few products, {n + m} heads", values=few, batch=1, heads=n, kv_heads=m, head_dim=32)
      for n, m in ((12, 4), (32, 8), (64, 8)) for few in ("sparse", "lone")],
    *[_rope(f"{n} heads, {m} of k, wide", batch=b, heads=n, kv_heads=m, seq=t, head_dim=d)
      for n, m, b, t, d in ((8, 8, 1, 3, 64), (8, 1, 2, 3, 64), (4, 1, 1, 1, 128), (2, 2, 4, 2, 64))],
    _rope("mixed memory, unlike for q and k", memory="mixed", values="coded", tables="llama3"),
    _rope("mixed memory, wide heads", memory="mixed", head_dim=64, seq=17),
    _rope("sums of 256 products: the precision gate", batch=1, heads=224, kv_heads=32, seq=64, head_dim=64),
]  # fmt: skip
_QKV = [
    _qkv("the smallest", 1, **_ONE, seq=1, head_dim=2),
    _qkv("two columns of a pair alike", 8, tables="equal"),
    _qkv("whole numbers that tell their index", 8, values="coded"),
    _qkv("real tables", 16, values="coded", tables="base10000"),
    *[_qkv(f"{n} tokens", 12, seq=n, batch=1) for n in (2, 13, 16, 17, 33, 65)],
    *[_qkv(f"{n} tokens, one head", 4, **_ONE, seq=n, head_dim=4) for n in TOKENS],
    *[_qkv(f"{n} tokens, two heads", 4, batch=1, heads=2, kv_heads=1, seq=n, head_dim=4)
      for n in (257, 515, 1031)],
    *[_qkv(f"{n} channels of the hidden states", n, **_ONE, seq=3, head_dim=4) for n in CHANNELS],
    _qkv("many channels, no multiple of 32", 6, batch=1, heads=33, kv_heads=11, seq=3, head_dim=20),
    _qkv("several tiles of everything", 131, batch=1, heads=7, kv_heads=1, seq=133, head_dim=20),
    *[_qkv(f"{n} batches", 4, batch=n, heads=2, kv_heads=1, seq=2, head_dim=4) for n in BATCHES],
    *[_qkv(f"GQA ratio {n}", 12, heads=2 * n) for n in (1, 3, 4, 8)],
    *[_qkv(f"GQA ratio {n}, few channels", 6, heads=2 * n, **_SHORT) for n in (16, 32)],
    *[_qkv(f"{n} heads, {m} of k", 6, heads=n, kv_heads=m, **_SHORT) for n, m in HEADS],
    _qkv("sparse probe, longer", 32, values="sparse", seq=33, head_dim=32),
    *[_qkv(f"one product: the sharpest bound, {n} channels", n, values="lone", **_FEW, seq=m, head_dim=d)
      for n, m, d in ((130, 65, 20), (257, 33, 32), (515, 17, 8))],
    _qkv("one token: sums of one product", 24, values="sparse", **_ONE, seq=1, head_dim=16),
    _qkv("small normal gradients of one token", 8, **_ONE, seq=1, head_dim=4, values="small"),
    _qkv("scaled tables", 8, tables="scaled"),
    _qkv("small rows beside large ones", 8, values="reciprocal", seq=6),
    _qkv("small rows beside large ones, longer", 12, values="reciprocal", seq=33, tables="base10000"),
    _qkv("mixed memory", 24, memory="mixed", values="coded"),
    _qkv("sums of 256 products: the precision gate", 64, heads=4, kv_heads=2, seq=128, head_dim=32),
]  # fmt: skip
