"""From a call to its spec: arrays are judged against each other and against the options, before any work."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from ropegrad.arrays import TRACED, Array, Facts, facts
from ropegrad.errors import SpecError
from ropegrad.spec import (
    LAYOUTS,
    PACKED_NEEDS,
    PRECISIONS,
    QKV_BIASES,
    QKV_NEEDS,
    QKV_WEIGHTS,
    ROPE_NEEDS,
    QkvSpec,
    RopeSpec,
    judge_flag,
    judge_needs,
    judge_table_batch,
    judge_word,
    judge_words,
    names_of,
    parts_of,
    whole,
)

_QKV_INPUTS = (
    "grad_query", "grad_key", "grad_value", "hidden_states", "q_weight", "k_weight", "v_weight", "cos", "sin",
)  # fmt: skip
_Facts = tuple[tuple[str, Facts], ...]
_Needs = tuple[str, ...] | None


def by_name(names: tuple[str, ...], arrays: tuple[Array | None, ...]) -> dict[str, Array]:
    """The arrays that are there, by name. SpecError unless there are as many as names."""
    if len(arrays) != len(names):
        raise SpecError(f"{len(arrays)} arrays given: the operation takes {len(names)}, {', '.join(names)}")
    return {name: array for name, array in zip(names, arrays, strict=True) if array is not None}


def qkv_inputs(arrays: tuple[Array | None, ...], qkv_weight: Array | None) -> dict[str, Array]:
    """The arrays of a `qkv_rope_backward` call that are there, by name."""
    inputs = by_name(_QKV_INPUTS, arrays)
    if qkv_weight is not None:
        inputs["qkv_weight"] = qkv_weight
    return inputs


def rope_spec(
    arrays: dict[str, Array],
    *,
    needs: Iterable[str] | None = None,
    table: str = "full",
    layout: str = "bhsd",
    pairing: str = "half",
    adjoint: str = "exact",
    accumulate: bool = False,
) -> RopeSpec:
    """The RopeSpec of a call, from its arrays by name (absent ones left out).

    Raises SpecError, with what was passed and what would be right.
    """
    judge_words(layout, pairing, table, adjoint)
    names, adds = None if needs is None else names_of(needs), judge_flag("accumulate", accumulate)
    return _rope_spec(_gather(arrays), names, table, layout, pairing, adjoint, adds)


@lru_cache(maxsize=256)  # a spec follows from these facts and words alone
def _rope_spec(
    facts_by_name: _Facts,
    needs: _Needs,
    table: str,
    layout: str,
    pairing: str,
    adjoint: str,
    accumulate: bool,
) -> RopeSpec:
    found = _alike(facts_by_name)
    sides = {side: _present(found, f"grad_{side}_embed", side) for side in ("q", "k")}
    wanted = _rope_needs(needs, found, sides)
    axes = _head_axes(found, ("grad_q_embed", "q"), ("grad_k_embed", "k"), layout)
    return _rope_spec_of(found, axes, table, layout, pairing, adjoint, wanted, accumulate)


def qkv_spec(
    arrays: dict[str, Array],
    *,
    needs: Iterable[str] | None = None,
    table: str = "full",
    layout: str = "bhsd",
    pairing: str = "half",
    precision: str = "highest",
    accumulate: bool = False,
) -> tuple[QkvSpec, bool]:
    """The QkvSpec of a call, from its arrays by name (absent ones left out), and whether it is packed.

    A packed call has "qkv_weight" among its arrays, or a packed name in needs. Its spec needs the parts.

    Raises SpecError, with what was passed and what would be right.
    """
    judge_words(layout, pairing, table, "exact")
    judge_word("precision", precision, PRECISIONS)
    names, adds = None if needs is None else names_of(needs), judge_flag("accumulate", accumulate)
    return _qkv_spec(_gather(arrays), names, table, layout, pairing, precision, adds)


@lru_cache(maxsize=256)
def _qkv_spec(
    facts_by_name: _Facts,
    needs: _Needs,
    table: str,
    layout: str,
    pairing: str,
    precision: str,
    accumulate: bool,
) -> tuple[QkvSpec, bool]:
    found = _alike(facts_by_name)
    packed = _is_packed((*found, *(needs or ())))
    wanted = _qkv_needs(needs, found, packed)
    axes = _head_axes(found, ("grad_query",), ("grad_key", "grad_value"), layout)
    rope = _rope_spec_of(found, axes, table, layout, pairing, "exact", (), accumulate)
    hidden = _hidden_size(found, rope)
    return QkvSpec(rope=rope, hidden_size=hidden, precision=precision, needs=wanted), packed


def rope_forward_spec(arrays: dict[str, Array], *, table: str, layout: str, pairing: str) -> RopeSpec:
    """The RopeSpec of the forward `rope(q, k, cos, sin)`; its needs name what is rotated."""
    judge_words(layout, pairing, table, "exact")
    found = _alike(_gather(arrays))
    for name in ("cos", "sin"):
        if name not in found:
            raise SpecError(f"{name} is None: the forward reads both tables")
    axes = _head_axes(found, ("q",), ("k",), layout)
    wanted = tuple(side for side in ("q", "k") if side in found)
    return _rope_spec_of(found, axes, table, layout, pairing, "exact", wanted, False)


def qkv_forward_spec(
    arrays: dict[str, Array],
    *,
    head_dim: int,
    kv_heads: int | None,
    table: str,
    layout: str,
    pairing: str,
    precision: str,
) -> QkvSpec:
    """The QkvSpec of the forward `qkv_rope(hidden_states, ...)`; kv_heads are a packed weight's."""
    judge_words(layout, pairing, table, "exact")
    judge_word("precision", precision, PRECISIONS)
    head_dim = whole("head_dim", head_dim)
    kv_heads = None if kv_heads is None else whole("kv_heads", kv_heads)
    return _qkv_forward_spec(_gather(arrays), head_dim, kv_heads, table, layout, pairing, precision)


@lru_cache(maxsize=256)
def _qkv_forward_spec(
    facts_by_name: _Facts,
    head_dim: int,
    kv_heads: int | None,
    table: str,
    layout: str,
    pairing: str,
    precision: str,
) -> QkvSpec:
    found = _alike(facts_by_name)
    weights = ("qkv_weight",) if _is_packed(found) else QKV_WEIGHTS[1:]
    for name in ("hidden_states", *weights, "cos", "sin"):
        if name not in found:
            raise SpecError(f"{name} is None: the forward reads it")
    if head_dim < 1:
        raise SpecError(f"head_dim must be positive, got {head_dim}")
    _judge_rank("hidden_states", found["hidden_states"], 3, _hidden_axes(layout))
    heads, kv_heads = _forward_heads(found, head_dim, kv_heads)
    rows = found["hidden_states"].shape[:2]
    batch, seq = rows[::-1] if layout == "sbhd" else rows
    rope = _rope_spec_of(
        found, (batch, heads, kv_heads, seq, head_dim), table, layout, pairing, "exact", (), False
    )
    return QkvSpec(rope=rope, hidden_size=_hidden_size(found, rope), precision=precision)


def _judge_rank(name: str, fact: Facts, rank: int, axes: str) -> None:
    if len(fact.shape) != rank:
        raise SpecError(f"{name} has shape {fact.shape}: it must have {rank} axes {axes}")


def _gather(arrays: dict[str, Array]) -> _Facts:
    return tuple((name, facts(name, array)) for name, array in arrays.items())


def _alike(facts_by_name: _Facts) -> dict[str, Facts]:
    """The facts by name; SpecError unless all arrays are of one namespace on one device."""
    found = dict(facts_by_name)
    if not found:
        raise SpecError("every array is None: pass at least those that the wanted gradients read")
    placed = ((name, fact) for name, fact in found.items() if fact.device != TRACED)
    first, reference = next(placed, next(iter(found.items())))
    for name, fact in found.items():
        if fact.namespace != reference.namespace:
            raise SpecError(
                f"{name} is an array of {fact.namespace}, {first} one of {reference.namespace}: "
                "convert one of them"
            )
        if fact.device not in (reference.device, TRACED):
            raise SpecError(f"{name} is on {fact.device}, {first} on {reference.device}: move one of them")
    return found


def _present(found: dict[str, Facts], *names: str) -> bool:
    return any(name in found for name in names)


def _judge_needs(given: tuple[str, ...], allowed: tuple[str, ...]) -> tuple[str, ...]:
    wanted = judge_needs(given, allowed)
    if not wanted:
        raise SpecError(f"needs is empty: name some of {', '.join(allowed)}")
    return wanted


def _require(found: dict[str, Facts], wanted: str, *names: str) -> None:
    for name in names:
        if name not in found:
            packed = name in ("k_weight", "v_weight") and "q_weight" in found
            one = "; one weight for q, k and v is passed as qkv_weight=" if packed else ""
            raise SpecError(
                f"{name} is None, but the gradient of {wanted} reads it: "
                f"pass it or leave it out of needs{one}"
            )


def _rope_needs(needs: _Needs, found: dict[str, Facts], sides: dict[str, bool]) -> tuple[str, ...]:
    default = tuple(name for name in ROPE_NEEDS if sides.get(name, True))
    wanted = default if needs is None else _judge_needs(needs, ROPE_NEEDS)
    for side in ("q", "k"):
        if side in wanted:
            _require(found, side, f"grad_{side}_embed", "cos", "sin")
    for name in ("cos", "sin"):
        if name in wanted:
            if not any(sides.values()):
                raise SpecError(f"q and k are both absent, but the gradient of {name} sums over them")
            present = [side for side in ("q", "k") if sides[side]]
            _require(found, name, *(n for side in present for n in (f"grad_{side}_embed", side)))
            _require(found, name, name)
    return wanted


_QKV_READS = {
    "hidden_states": _QKV_INPUTS[:3] + _QKV_INPUTS[4:],
    "q_weight": ("grad_query", "hidden_states", "cos", "sin"),
    "k_weight": ("grad_key", "hidden_states", "cos", "sin"),
    "v_weight": ("grad_value", "hidden_states"),
    "q_bias": ("grad_query", "cos", "sin"),
    "k_bias": ("grad_key", "cos", "sin"),
    "v_bias": ("grad_value",),
}
_PACKED_READS = {
    "hidden_states": (*_QKV_INPUTS[:3], "qkv_weight", "cos", "sin"),
    "qkv_weight": (*_QKV_INPUTS[:4], "cos", "sin"),
    "qkv_bias": (*_QKV_INPUTS[:3], "cos", "sin"),
}


def _is_packed(named: Iterable[str]) -> bool:
    """Whether a call that names these has one array for q, k and v; SpecError if it has that and three."""
    packed, parts = ([n for n in named if n in names] for names in (PACKED_NEEDS[1:], QKV_NEEDS[1:]))
    if packed and parts:
        raise SpecError(
            f"the call names {packed[0]} and {parts[0]}: pass, and name in needs, either one packed array "
            "or its three parts"
        )
    return bool(packed)


def _qkv_needs(needs: _Needs, found: dict[str, Facts], packed: bool) -> tuple[str, ...]:
    """The wanted gradients; of a packed call, the parts of what is wanted."""
    if not packed:
        wanted, reads = QKV_WEIGHTS if needs is None else _judge_needs(needs, QKV_NEEDS), _QKV_READS
    else:
        wanted = PACKED_NEEDS[:2] if needs is None else _judge_needs(needs, PACKED_NEEDS)
        reads = _PACKED_READS
    for name in wanted:
        _require(found, name, *reads[name])
    return tuple(part for name in wanted for part in parts_of(name))


def _same(found: dict[str, Facts], names: Iterable[str], what: str) -> Facts | None:
    """The facts that the present ones of `names` share; SpecError where shape or dtype differ."""
    present = [name for name in names if name in found]
    if not present:
        return None
    first = present[0]
    for name in present[1:]:
        for field in ("shape", "dtype"):
            mine, others = getattr(found[name], field), getattr(found[first], field)
            if mine != others:
                raise SpecError(f"{name} has {field} {mine}, {first} has {others}: {what}")
    return found[first]


def _head_axes(
    found: dict[str, Facts], q_names: tuple[str, ...], k_names: tuple[str, ...], layout: str
) -> tuple[int, int | None, int | None, int, int]:
    """(B, H, Hkv, S, D) of the arrays with heads."""
    for name in (*q_names, *k_names):
        if name in found:
            _judge_rank(name, found[name], 4, f"{LAYOUTS[layout]} (layout={layout!r})")
    q = _same(found, q_names, "they must be alike")
    k = _same(found, k_names, "they must be alike")
    if q is None and k is None:
        raise SpecError(f"{' and '.join((*q_names, *k_names))} are all None: pass those of q or of k")
    if q is not None and k is not None and q.dtype != k.dtype:
        raise SpecError(f"{k_names[0]} has dtype {k.dtype}, {q_names[0]} has {q.dtype}: they must be alike")
    q_axes, k_axes = (None if fact is None else _bhsd(fact.shape, layout) for fact in (q, k))
    batch, _, seq, dim = q_axes or k_axes or (0, 0, 0, 0)
    if q_axes and k_axes and (k_axes[0], k_axes[2], k_axes[3]) != (batch, seq, dim):
        raise SpecError(
            f"k's axes [B, Hkv, S, D] are {list(k_axes)}, q's [B, H, S, D] {list(q_axes)}: "
            "only the number of heads may differ"
        )
    return batch, None if q_axes is None else q_axes[1], None if k_axes is None else k_axes[1], seq, dim


def _bhsd(shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    a, b, c, d = shape
    return {"bhsd": (a, b, c, d), "bshd": (a, c, b, d), "sbhd": (b, c, a, d)}[layout]


def _rope_spec_of(
    found: dict[str, Facts],
    axes: tuple[int, int | None, int | None, int, int],
    table: str,
    layout: str,
    pairing: str,
    adjoint: str,
    needs: tuple[str, ...],
    accumulate: bool,
) -> RopeSpec:
    batch, heads, kv_heads, seq, head_dim = axes
    fact = _same(found, ("cos", "sin"), "cos and sin must be alike")
    table_batch, rotary, table_dtype = None, 0, _head_dtype(found)
    if fact is not None:
        table_batch, columns = _table_axes(fact, batch, seq)
        rotary, table_dtype = columns * (2 if table == "half" else 1), fact.dtype
    reference = next(iter(found.values()))
    return RopeSpec(
        batch=batch, heads=heads, kv_heads=kv_heads, seq=seq, head_dim=head_dim, rotary_dim=rotary,
        table_batch=table_batch, layout=layout, pairing=pairing, table=table, adjoint=adjoint,
        dtype=_head_dtype(found), table_dtype=table_dtype, needs=needs, accumulate=accumulate,
        namespace=reference.namespace, device=reference.device,
    )  # fmt: skip


def _head_dtype(found: dict[str, Facts]) -> str:
    return next(fact.dtype for name, fact in found.items() if name not in ("cos", "sin"))


def _table_axes(fact: Facts, batch: int, seq: int) -> tuple[int | None, int]:
    if len(fact.shape) not in (2, 3):
        raise SpecError(
            f"cos and sin have shape {fact.shape}: they must be [S, columns] or [1 or B, S, columns]"
        )
    *lead, rows, columns = fact.shape
    if rows != seq:
        raise SpecError(f"cos and sin have {rows} rows, q and k {seq} tokens: pass exactly one row a token")
    table_batch = lead[0] if lead else None
    judge_table_batch(table_batch, batch)
    return table_batch, columns


def _hidden_axes(layout: str) -> str:
    return "[S, B, C]" if layout == "sbhd" else "[B, S, C]"


def _hidden_size(found: dict[str, Facts], rope: RopeSpec) -> int | None:
    """C, with hidden_states, the weights and the biases judged against it and against the gradients."""
    size: int | None = None
    for name, fact in found.items():
        if name not in ("cos", "sin") and fact.dtype != rope.dtype:
            raise SpecError(f"{name} has dtype {fact.dtype}, the others {rope.dtype}: only tables may differ")
    for name in (*QKV_WEIGHTS, "qkv_weight"):
        if name not in found:
            continue
        fact = found[name]
        hidden = name == "hidden_states"
        _judge_rank(name, fact, 3 if hidden else 2, _hidden_axes(rope.layout) if hidden else "[rows, C]")
        if size is not None and fact.shape[-1] != size:
            turned = "; transpose it, weights are [rows, C]" if fact.shape[0] == size else ""
            raise SpecError(
                f"{name} has shape {fact.shape}: its last axis must be the hidden size {size}{turned}"
            )
        size = fact.shape[-1]
        _judge_rows(name, fact.shape, rope)
    for name in (*QKV_BIASES, "qkv_bias"):
        if name in found:
            _judge_rank(name, found[name], 1, "[rows]")
            _judge_rows(name, found[name].shape, rope)
    return size


def _judge_rows(name: str, shape: tuple[int, ...], rope: RopeSpec) -> None:
    if name == "hidden_states":
        rows = (rope.seq, rope.batch) if rope.layout == "sbhd" else (rope.batch, rope.seq)
        if shape[:2] != rows:
            raise SpecError(
                f"{name} has shape {shape}: its tokens must be {_hidden_axes(rope.layout)}, {rows}"
            )
        return
    parts = name.partition("_")[0]  # "q", "k", "v", or all three
    heads = [rope.heads if part == "q" else rope.kv_heads for part in parts]
    right = sum(count or 0 for count in heads) * rope.head_dim
    if None not in heads and shape[0] != right:
        told = str(heads[0]) if len(heads) == 1 else f"({' + '.join(map(str, heads))})"
        every = ((rope.heads or 0) + 2 * (rope.kv_heads or 0)) * rope.head_dim
        packed = name.endswith("weight") and shape[0] == every
        one = "; those are q's, k's and v's rows: pass it as qkv_weight=" if packed else ""
        right_rows = f"heads x head_dim = {told} x {rope.head_dim} = {right}"
        raise SpecError(f"{name} has {shape[0]} rows: it must have {right_rows}{one}")


def _forward_heads(found: dict[str, Facts], head_dim: int, kv_heads: int | None) -> tuple[int, int]:
    """H and Hkv by the weights' rows; those of a packed weight must be told how many are k's."""
    if "qkv_weight" not in found:
        if kv_heads is not None:
            raise SpecError(f"kv_heads={kv_heads} goes with qkv_weight alone: k_weight's rows say it")
        return _whole_heads(found, "q_weight", head_dim), _whole_heads(found, "k_weight", head_dim)
    if kv_heads is None:
        raise SpecError("kv_heads is None: pass the number of k's heads, which qkv_weight does not show")
    total = _whole_heads(found, "qkv_weight", head_dim)
    if total <= 2 * kv_heads:
        raise SpecError(
            f"qkv_weight has rows of {total} heads: it must have those of k and v, 2 x {kv_heads}, and of q"
        )
    return total - 2 * kv_heads, kv_heads


def _whole_heads(found: dict[str, Facts], name: str, head_dim: int) -> int:
    _judge_rank(name, found[name], 2, "[heads * head_dim, C]")
    rows = found[name].shape[0]
    if rows % head_dim:
        raise SpecError(f"{name} has {rows} rows: it must be a multiple of head_dim {head_dim}")
    return rows // head_dim
