"""Hypothesis strategies for problems: draw a spec and kinds of data, then make the arrays from one seed.

For a test of your own: `@given(case=problems(Contract(op="rope"), Domain(gqa=(1, 4))))`; case.inputs holds
the arrays by name, case.spec what they mean, and `ropegrad.verify.check(case, function)` judges.
"""

from __future__ import annotations

from itertools import product

from hypothesis import strategies as st

from ropegrad.arrays import DTYPES
from ropegrad.spec import ADJOINTS, LAYOUTS, PAIRINGS, QKV_NEEDS, ROPE_NEEDS, TABLES, QkvSpec, RopeSpec
from ropegrad.verify import draws
from ropegrad.verify.battery import LARGEST
from ropegrad.verify.case import Case
from ropegrad.verify.domain import Domain, fitted
from ropegrad.verify.placing import MEMORY
from ropegrad.verify.recipe import Recipe
from ropegrad.verify.target import Contract

HEAD_DIMS = (0, 1, 2, 4, 6, 8, 20, 33, 48, 72, 80, 96, 112, 128)
RATIOS = (0, 1, 2, 3, 4, 7, 8)
SEEDS = st.integers(0, 2**32 - 1)


@st.composite
def rope_specs(draw: st.DrawFn, *, dtypes: tuple[str, ...] = DTYPES) -> RopeSpec:
    """Any RopeSpec with small axes: all options, odd and empty sizes, absent sides, subsets of gradients."""
    return draw(_geometries(dtypes=dtypes, absent=True))


@st.composite
def qkv_specs(draw: st.DrawFn, *, dtypes: tuple[str, ...] = DTYPES) -> QkvSpec:
    """Any QkvSpec with small axes; all inputs present."""
    rope = draw(_geometries(dtypes=dtypes, absent=False, needs=(), adjoints=("exact",)))
    return QkvSpec(
        rope=rope,
        hidden_size=draw(st.sampled_from((1, 2, 3, 8, 17, 64, 65, 130))),
        precision=draw(st.sampled_from(("highest", "high", "medium"))),
        needs=draw(_subsets(QKV_NEEDS)),
    )


@st.composite
def cases(
    draw: st.DrawFn,
    specs: st.SearchStrategy[RopeSpec | QkvSpec],
    memory: st.SearchStrategy[str] = st.sampled_from((*MEMORY, "mixed")),  # noqa: B008
) -> Case:
    """A case of a spec drawn from `specs`: values and tables of every kind, `memory` of every kind too."""
    return draws.make_case(
        draw(specs),
        draw(SEEDS),
        values=draw(st.sampled_from(list(draws.VALUES))),
        tables=draw(st.sampled_from(list(draws.TABLES))),
        memory=draw(memory),
    )


# Of targets: what is simplest stands first, and failures shrink to it.
WIDTHS = (2, 4, 6, 8, 20, 48, 72, 80, 96, 112, 128, 160, 192, 256)
TOKENS = (1, 2, 3, 5, 7, 8, 13, 16, 17, 31, 33, 64, 65, 127, 129, 257)
ELEMENTS = (1 << 11, 1 << 11, 1 << 11, 1 << 14)  # of q, about: a problem takes milliseconds


def recipes(contract: Contract, domain: Domain = Domain()) -> st.SearchStrategy[Recipe]:  # noqa: B008  frozen
    """A problem inside a target's domain, before its data are made: sizes, kinds of data, a seed."""
    widths = domain.head_dim or WIDTHS
    return _recipes(
        contract, domain,
        st.sampled_from((*widths[:4] * max(1, len(widths) // 4), *widths)),  # small ones in half of them
        st.sampled_from(domain.gqa or (1, 2, 3, 4, 5, 6, 7, 8, 16, 33)),
        st.integers(0, 15 if domain.empty == "yes" else 14),
        st.integers(0, max(widths) // 2) if domain.rotary == "any" else st.nothing(),
    )  # fmt: skip


@st.composite
def _recipes(
    draw: st.DrawFn, contract: Contract, domain: Domain, widths: st.SearchStrategy[int],
    ratios: st.SearchStrategy[int], emptiness: st.SearchStrategy[int], pairs: st.SearchStrategy[int],
) -> Recipe:  # fmt: skip
    head_dim, (most, kv_heads, batch) = draw(widths), draw(_SIZES)
    ratio = draw(ratios)
    if kv_heads * ratio * head_dim > LARGEST:  # of a domain that has ratios or head sizes of its own
        head_dim, ratio, kv_heads = min(domain.head_dim or WIDTHS), min(domain.gqa or (1,)), 1
    heads = kv_heads * ratio
    seq = draw(_TOKENS) or heads
    if draw(emptiness) == 15:
        batch, seq = (0, 1) if batch > 1 else (1, 0)
    batch = min(batch, max(1, most // (heads * head_dim))) if batch else 0
    seq = min(seq, max(1, most // max(batch * heads * head_dim, 1))) if seq else 0
    rotary = head_dim if pairs.is_empty else 2 * min(draw(pairs), head_dim // 2)
    hidden = None
    if contract.op == "qkv":  # weights of some times as many elements as q may have
        hidden = min(draw(_HIDDEN), max(1, 4 * most // max(heads * head_dim, 1)))
    spec = contract.spec(
        batch=batch, heads=heads, kv_heads=kv_heads, seq=seq, head_dim=head_dim, rotary_dim=rotary,
        hidden_size=hidden,
    )  # fmt: skip
    recipe = Recipe(spec, draw(SEEDS), *draw(_DATA))
    return fitted(recipe, contract, domain)


# What goes together is drawn at once: every draw costs Hypothesis as much as a call of a small target.
# Elements, k's heads, batches:
_SIZES = st.sampled_from(list(product(ELEMENTS, (1, 2, 3, 5, 8), (1, 2, 3, 4, 8))))
_TOKENS = st.sampled_from((*TOKENS, 0))  # 0: as many as heads
_HIDDEN = st.sampled_from((1, 2, 3, 8, 17, 64, 65, 130, 257))
_TABLES = (
    "normal",
    "equal",
    "llama3",
    "base10000",
    "far",
    "scaled",
    "benchmark",
    "zeros",
    "wide",
    "nonfinite",
)
_DATA = st.sampled_from(list(product(draws.VALUES, _TABLES, (*MEMORY, "mixed"))))


def problems(contract: Contract, domain: Domain = Domain()) -> st.SearchStrategy[Case]:  # noqa: B008  frozen
    """A problem inside a target's domain, with its data."""
    return recipes(contract, domain).map(Recipe.case)


def _subsets(names: tuple[str, ...]) -> st.SearchStrategy[tuple[str, ...]]:
    full = (1 << len(names)) - 1
    chosen = st.integers(1, full) | st.just(full)
    return chosen.map(lambda bits: tuple(name for i, name in enumerate(names) if bits >> i & 1))


@st.composite
def _geometries(
    draw: st.DrawFn,
    *,
    dtypes: tuple[str, ...],
    absent: bool,
    needs: tuple[str, ...] | None = None,
    adjoints: tuple[str, ...] = ADJOINTS,
) -> RopeSpec:
    batch = draw(st.sampled_from((1, 2, 3, 0)))
    kv_heads = draw(st.sampled_from((1, 2, 3)))
    side = draw(st.sampled_from(("both", "both", "q", "k"))) if absent else "both"
    heads = kv_heads * draw(st.sampled_from(RATIOS))
    head_dim = draw(st.sampled_from(HEAD_DIMS))
    if needs is None:
        allowed = tuple(n for n in ROPE_NEEDS if side == "both" or n not in {"q": "k", "k": "q"}[side])
        needs = draw(_subsets(allowed))
    return RopeSpec(
        batch=batch,
        heads=None if side == "k" else heads,
        kv_heads=None if side == "q" else kv_heads,
        seq=draw(st.sampled_from((1, 2, 3, 5, 7, 16, kv_heads, 0))),
        head_dim=head_dim,
        rotary_dim=head_dim // 2 * 2 if draw(st.booleans()) else 2 * draw(st.integers(0, head_dim // 2)),
        table_batch=draw(st.sampled_from((None, 1, batch))),
        layout=draw(st.sampled_from(tuple(LAYOUTS))),
        pairing=draw(st.sampled_from(PAIRINGS)),
        table=draw(st.sampled_from(TABLES)),
        adjoint=draw(st.sampled_from(adjoints)),
        dtype=draw(st.sampled_from(dtypes)),
        table_dtype=draw(st.sampled_from(dtypes)),
        needs=needs,
        accumulate=draw(st.booleans()),
    )
