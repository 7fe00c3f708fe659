"""Hypothesis strategies for problems: draw a spec and kinds of data, then make the arrays from one seed."""

from __future__ import annotations

from hypothesis import strategies as st

from ropegrad.arrays import DTYPES
from ropegrad.spec import ADJOINTS, LAYOUTS, PAIRINGS, QKV_NEEDS, ROPE_NEEDS, TABLES, QkvSpec, RopeSpec
from ropegrad.verify import draws
from ropegrad.verify.case import Case

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
        hidden_size=draw(st.sampled_from((1, 2, 3, 8, 17, 64))),
        precision=draw(st.sampled_from(("highest", "high", "medium"))),
        needs=draw(_subsets(QKV_NEEDS)),
    )


@st.composite
def cases(
    draw: st.DrawFn,
    specs: st.SearchStrategy[RopeSpec | QkvSpec],
    memory: st.SearchStrategy[str] = st.sampled_from((*draws.MEMORY, "mixed")),  # noqa: B008
) -> Case:
    """A case of a spec drawn from `specs`: values and tables of every kind, `memory` of every kind too."""
    return draws.make_case(
        draw(specs),
        draw(SEEDS),
        values=draw(st.sampled_from(list(draws.VALUES))),
        tables=draw(st.sampled_from(list(draws.TABLES))),
        memory=draw(memory),
    )


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
