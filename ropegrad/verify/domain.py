"""The problems that a target is for, as its author states them; never guessed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ropegrad.spec import judge_positive, judge_word
from ropegrad.verify.placing import MEMORY
from ropegrad.verify.recipe import Recipe
from ropegrad.verify.target import Contract

# Kinds of tables whose two columns of a pair are equal, as tables of real positions are.
EQUAL = frozenset({"llama3", "base10000", "far", "scaled", "equal"})
# What arrays of a namespace cannot be: torch has no negative steps, GPUs need alignment, JAX owns its memory.
IMPOSSIBLE = {
    "numpy": frozenset[str](), "torch": frozenset({"negative", "misaligned"}),
    "cupy": frozenset({"misaligned"}), "jax": frozenset({*MEMORY, "mixed"} - {"contiguous"}),
}  # fmt: skip


DOUBTED = 4  # failures that are tried again inside a domain before it is offered as an excuse
WORTH = 8  # problems that must pass inside a domain before it is offered as an excuse


@dataclass(frozen=True, kw_only=True)
class Domain:
    """Restrictions, each as wide as it can be by default, but for `rotary`: the problems have R = D.

    head_dim    the head sizes it takes; () any
    gqa         the ratios H / Hkv it takes; () any
    max_tokens  the longest sequence; None any
    tables      any, or equal-halves: the two columns of a pair are equal
    strides     any, or contiguous
    empty       yes: axes of size 0 may come; no
    rotary      full: all channels are rotated (R = D), or any: some may pass through
    """

    head_dim: tuple[int, ...] = ()
    gqa: tuple[int, ...] = ()
    max_tokens: int | None = None
    tables: str = "any"
    strides: str = "any"
    empty: str = "yes"
    rotary: str = "full"

    def __post_init__(self) -> None:
        judge_positive("max_tokens", self.max_tokens)
        for name, sizes in (("head_dim", self.head_dim), ("gqa", self.gqa)):
            for size in sizes:
                judge_positive(name, size)
        judge_word("tables", self.tables, ("any", "equal-halves"))
        judge_word("strides", self.strides, ("any", "contiguous"))
        judge_word("empty", self.empty, ("yes", "no"))
        judge_word("rotary", self.rotary, ("full", "any"))

    def outside(self, recipe: Recipe) -> str | None:
        """The restriction, as an option, that a problem is outside of; None where it is inside."""
        rope = recipe.rope
        heads, kv_heads = rope.heads or 0, rope.kv_heads or 0
        if self.rotary == "full" and rope.rotary_dim != rope.head_dim:
            return "--rotary full"
        if self.head_dim and rope.head_dim not in self.head_dim:
            return f"--head-dim {','.join(map(str, self.head_dim))}"
        if self.gqa and kv_heads and heads // kv_heads not in self.gqa:
            return f"--gqa {','.join(map(str, self.gqa))}"
        if self.max_tokens is not None and rope.seq > self.max_tokens:
            return f"--max-tokens {self.max_tokens}"
        if self.tables == "equal-halves" and rope.table == "full" and recipe.tables not in EQUAL:
            return "--tables equal-halves"
        if self.strides == "contiguous" and recipe.memory != "contiguous":
            return "--strides contiguous"
        if self.empty == "no" and is_empty(recipe):
            return "--empty no"
        return None


def is_empty(recipe: Recipe) -> bool:
    """Whether an axis has size 0."""
    rope = recipe.rope
    sizes = (rope.batch, rope.heads, rope.kv_heads, rope.seq, rope.head_dim)
    return 0 in sizes or getattr(recipe.spec, "hidden_size", None) == 0


def simpler(domain: Domain) -> list[Domain]:
    """The domain with one option as narrow as it can be."""
    return [
        replace(domain, rotary="full"), replace(domain, empty="no"),
        replace(domain, strides="contiguous"), replace(domain, tables="equal-halves"),
    ]  # fmt: skip


def doubts(contract: Contract, domain: Domain, failed: list[Recipe], passed: list[Recipe]) -> list[Recipe]:
    """A few failures moved into each domain that none of them lies in: an excuse must hold for them.

    That nothing was wrong there says little if problems of their sizes were never put to the target there.
    """
    found: dict[Recipe, Recipe] = {}
    if not failed:
        return []
    shortest = min(recipe.rope.seq for recipe in failed)
    fewer = sorted({1, 2, shortest // 2, shortest - 1} & set(range(1, shortest)))
    offers = simpler(domain) + [replace(domain, max_tokens=tokens) for tokens in fewer]
    offers += [replace(domain, gqa=(ratio,)) for ratio in sorted(_ratios(failed, passed))]
    for offer in offers:
        if all(offer.outside(recipe) for recipe in failed):
            for recipe in failed[:DOUBTED]:
                moved = fitted(recipe, contract, offer)
                if offer.outside(moved) is None:
                    found.setdefault(replace(moved, name="", seed=0), moved)
    return list(found.values())


def _ratios(failed: list[Recipe], passed: list[Recipe]) -> set[int]:
    return {_ratio(recipe) for recipe in passed} - {_ratio(recipe) for recipe in failed} - {0}


def excuses(domain: Domain, failed: list[Recipe], passed: list[Recipe]) -> list[Domain]:
    """Domains that would leave all failures out, and enough of what passed in to be worth stating."""
    dims = {recipe.rope.head_dim for recipe in passed} - {recipe.rope.head_dim for recipe in failed}
    ratios = _ratios(failed, passed)
    shortest = min((recipe.rope.seq for recipe in failed), default=0)
    lists = [replace(domain, max_tokens=shortest - 1)] if shortest > 1 else []
    lists += [replace(domain, gqa=tuple(sorted(ratios)))] if ratios else []
    lists += [replace(domain, head_dim=tuple(sorted(dims)))] if dims else []
    return _fitting(domain, simpler(domain), failed, passed) or _fitting(domain, lists, failed, passed)


def _fitting(
    domain: Domain, offers: list[Domain], failed: list[Recipe], passed: list[Recipe]
) -> list[Domain]:
    return [
        offer for offer in offers
        if offer != domain and all(offer.outside(recipe) for recipe in failed)
        and sum(offer.outside(recipe) is None for recipe in passed) >= WORTH
    ]  # fmt: skip


def _ratio(recipe: Recipe) -> int:
    return (recipe.rope.heads or 0) // (recipe.rope.kv_heads or 1)


def fitted(recipe: Recipe, contract: Contract, domain: Domain, turn: int = 0) -> Recipe:
    """The recipe under a contract, moved into the domain; `turn` chooses among its head sizes and ratios."""
    rope, tables, memory = recipe.rope, recipe.tables, recipe.memory
    heads, kv_heads, dim, width = rope.heads or 1, rope.kv_heads or 1, rope.head_dim, rope.rotary_dim
    if domain.gqa and heads // kv_heads not in domain.gqa:
        heads = kv_heads * domain.gqa[turn % len(domain.gqa)]
    if domain.head_dim and dim not in domain.head_dim:
        dim = domain.head_dim[turn % len(domain.head_dim)]
        width = dim if width == rope.head_dim else min(width, dim // 2 // 2 * 2)
    seq = rope.seq if domain.max_tokens is None else min(rope.seq, domain.max_tokens)
    if domain.tables == "equal-halves" and tables not in EQUAL:
        tables = "equal"
    if memory == "mixed" and contract.arrays in ("torch", "cupy"):
        memory = "movable"
    if domain.strides == "contiguous" or memory in IMPOSSIBLE[contract.arrays]:
        memory = "contiguous"
    spec = contract.spec(
        batch=rope.batch, heads=heads if rope.heads else 0, kv_heads=kv_heads, seq=seq, head_dim=dim,
        rotary_dim=width, hidden_size=getattr(recipe.spec, "hidden_size", None),
    )  # fmt: skip
    return replace(recipe, spec=spec, tables=tables, memory=memory)
