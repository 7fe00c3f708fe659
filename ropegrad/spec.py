"""What a call means: axes, layout, pairing, tables, dtypes. Numbers and words are judged here.

A spec is a frozen fact sheet. `calls` reads one off a caller's arrays and options; one that is written by
hand is judged just the same.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from ropegrad.arrays import DTYPES, compute_dtype
from ropegrad.errors import SpecError

LAYOUTS = {"bhsd": "[B, H, S, D]", "bshd": "[B, S, H, D]", "sbhd": "[S, B, H, D]"}
PAIRINGS = ("half", "interleaved")
TABLES = ("full", "half")
ADJOINTS = ("exact", "paired")
PRECISIONS = ("highest", "high", "medium")

ROPE_NEEDS = ("q", "k", "cos", "sin")
QKV_WEIGHTS = ("hidden_states", "q_weight", "k_weight", "v_weight")
QKV_BIASES = ("q_bias", "k_bias", "v_bias")
QKV_NEEDS = QKV_WEIGHTS + QKV_BIASES
PACKED_NEEDS = ("hidden_states", "qkv_weight", "qkv_bias")  # of a call with the three weights in one array


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """One RoPE problem (benchmark problem 068).

    q is `[batch, heads, seq, head_dim]` in the order that `layout` names, k has `kv_heads` heads;
    None heads: that side is absent. Tables are `[seq, columns]` (table_batch None) or
    `[table_batch, seq, columns]` with table_batch 1 or batch; columns = rotary_dim for `full`
    tables and rotary_dim / 2 for `half` ones. `dtype` is q's, k's and their gradients'. `needs` are kept in
    the order of the result; by default they are of all that is there.

    Raises SpecError where the numbers or words do not fit together.
    """

    batch: int
    heads: int | None
    kv_heads: int | None
    seq: int
    head_dim: int
    rotary_dim: int
    table_batch: int | None = None
    layout: str = "bhsd"
    pairing: str = "half"
    table: str = "full"
    adjoint: str = "exact"
    dtype: str = "float32"
    table_dtype: str = "float32"
    needs: tuple[str, ...] = ROPE_NEEDS
    accumulate: bool = False
    namespace: str = "numpy"
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("batch", "heads", "kv_heads", "seq", "head_dim", "rotary_dim"):
            size = judge_size(name, getattr(self, name), optional=name in ("heads", "kv_heads"))
            object.__setattr__(self, name, size)
        judge_words(self.layout, self.pairing, self.table, self.adjoint)
        judge_dtype("dtype", self.dtype)
        judge_dtype("table_dtype", self.table_dtype)
        judge_heads(self.heads, self.kv_heads)
        judge_rotary(self.rotary_dim, self.head_dim)
        judge_table_batch(self.table_batch, self.batch)
        sides = {"q": self.heads, "k": self.kv_heads}
        there = tuple(name for name in ROPE_NEEDS if sides.get(name, 0) is not None)
        needs = there if self.needs is ROPE_NEEDS else judge_needs(self.needs, ROPE_NEEDS)
        for name in needs:
            if name not in there:
                raise SpecError(f"needs has {name!r}, but the spec has no heads of {name}")
        object.__setattr__(self, "needs", ROPE_NEEDS if needs == ROPE_NEEDS else needs)
        judge_flag("accumulate", self.accumulate)

    @property
    def columns(self) -> int:
        """Columns of a table."""
        return self.rotary_dim if self.table == "full" else self.rotary_dim // 2

    @property
    def table_shape(self) -> tuple[int, ...]:
        """Shape of cos, sin and of their gradients."""
        shape = (self.seq, self.columns)
        return shape if self.table_batch is None else (self.table_batch, *shape)

    def head_shape(self, heads: int) -> tuple[int, ...]:
        """Shape of an array with this many heads, in the caller's layout."""
        return in_layout((self.batch, heads, self.seq, self.head_dim), self.layout)

    @property
    def compute(self) -> str:
        """Dtype of every product and sum."""
        return compute_dtype(self.dtype, self.table_dtype)

    def output(self, need: str) -> tuple[tuple[int, ...], str]:
        """Shape and dtype of the gradient of input `need`."""
        if need in ("cos", "sin"):
            return self.table_shape, self.table_dtype
        return self.head_shape((self.heads if need == "q" else self.kv_heads) or 0), self.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class QkvSpec:
    """One problem of Q, K, V projections followed by RoPE (benchmark problem 064).

    `rope` describes the gradients of query and key after RoPE, and the tables (what it needs is dropped);
    hidden_states are `[batch, seq, hidden_size]` (`[seq, batch, hidden_size]` in layout sbhd), the weights
    `[heads * head_dim, hidden_size]` and twice `[kv_heads * head_dim, hidden_size]`.
    A None among heads, kv_heads or hidden_size: no wanted gradient depends on it.
    """

    rope: RopeSpec
    hidden_size: int | None
    precision: str = "highest"
    needs: tuple[str, ...] = QKV_WEIGHTS

    def __post_init__(self) -> None:
        if not isinstance(self.rope, RopeSpec):
            raise SpecError(f"rope must be a ropegrad.RopeSpec, got {type(self.rope).__name__}")
        judge_word("precision", self.precision, PRECISIONS)
        object.__setattr__(self, "hidden_size", judge_size("hidden_size", self.hidden_size, optional=True))
        object.__setattr__(self, "needs", judge_needs(self.needs, QKV_NEEDS))
        if self.rope.needs:
            object.__setattr__(self, "rope", replace(self.rope, needs=()))

    @property
    def namespace(self) -> str:
        """Where the arrays come from."""
        return self.rope.namespace

    @property
    def accumulate(self) -> bool:
        """Whether the result is added into `out`."""
        return self.rope.accumulate

    @property
    def tokens(self) -> int:
        """M = batch * seq, the rows of every matrix."""
        return self.rope.batch * self.rope.seq

    @property
    def hidden_shape(self) -> tuple[int, ...]:
        """Shape of hidden_states in the caller's layout."""
        rows = (self.rope.batch, self.rope.seq)
        return (*(rows[::-1] if self.rope.layout == "sbhd" else rows), self.hidden_size or 0)

    def rows(self, part: str) -> int:
        """Rows of the weight of `part` ('q', 'k' or 'v'; 'qkv' for the packed one)."""
        if part == "qkv":
            return sum(map(self.rows, part))
        return ((self.rope.heads if part == "q" else self.rope.kv_heads) or 0) * self.rope.head_dim

    def output(self, need: str) -> tuple[tuple[int, ...], str]:
        """Shape and dtype of the gradient of input `need`."""
        if need == "hidden_states":
            return self.hidden_shape, self.rope.dtype
        part, _, kind = need.partition("_")
        rows = self.rows(part)
        return (rows,) if kind == "bias" else (rows, self.hidden_size or 0), self.rope.dtype


def parts_of(name: str) -> tuple[str, ...]:
    """The names that a packed one stands for: those of q, k and v; any other stands for itself."""
    return tuple(name.replace("qkv_", f"{part}_") for part in "qkv") if "qkv_" in name else (name,)


def in_layout(bhsd: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """The axes (B, H, S, D) in the order of `layout`."""
    batch, heads, seq, dim = bhsd
    return {
        "bhsd": (batch, heads, seq, dim),
        "bshd": (batch, seq, heads, dim),
        "sbhd": (seq, batch, heads, dim),
    }[layout]


def judge_word(option: str, word: object, allowed: Iterable[str]) -> None:
    """SpecError if the option is not one of the allowed words."""
    if not isinstance(word, str) or word not in tuple(allowed):
        raise SpecError(f"{option}={word!r} is unknown: it must be one of {', '.join(map(repr, allowed))}")


def whole(option: str, value: Any) -> int:
    """The whole number that the option is; SpecError if it is none."""
    try:
        return operator.index(value)
    except TypeError:
        raise SpecError(f"{option}={value!r} is no whole number: pass an int") from None


def judge_size(name: str, size: Any, *, optional: bool = False) -> int | None:
    """The size as an int, or None where the side may be absent; SpecError unless it is 0 or more."""
    if size is None and optional:
        return None
    try:
        number = operator.index(size)
    except TypeError:
        number = -1
    if number < 0:
        raise SpecError(f"{name}={size!r} must be a whole number, 0 or more")
    return number


def judge_words(layout: str, pairing: str, table: str, adjoint: str) -> None:
    """SpecError if one of the words that both operations share is unknown."""
    judge_word("layout", layout, LAYOUTS)
    judge_word("pairing", pairing, PAIRINGS)
    judge_word("table", table, TABLES)
    judge_word("adjoint", adjoint, ADJOINTS)


def judge_flag(option: str, value: object) -> bool:
    """The truth value that the option is; SpecError for anything else, a string say."""
    if type(value).__name__ not in ("bool", "bool_"):  # Python's, and NumPy's without importing it
        raise SpecError(f"{option}={value!r} must be True or False")
    return bool(value)


def judge_positive(option: str, number: float | None) -> None:
    """SpecError for 0, less, and NaN; None is no number and may be."""
    if number is not None and not number > 0:
        raise SpecError(f"{option}={number!r} must be positive")


def judge_needs(given: Iterable[str], allowed: tuple[str, ...]) -> tuple[str, ...]:
    """Names of inputs, in the order of the result; SpecError unless they are known and each stands once."""
    given = names_of(given)
    for name in given:
        if name not in allowed:
            raise SpecError(f"needs has {name!r}: it must name some of {', '.join(allowed)}")
        if given.count(name) > 1:
            raise SpecError(f"needs names {name!r} more than once")
    return tuple(name for name in allowed if name in given)


def names_of(needs: Iterable[str]) -> tuple[str, ...]:
    """The names as a tuple of strings; SpecError for anything else."""
    if isinstance(needs, str):
        raise SpecError(f"needs={needs!r} is a string: pass a tuple such as ({needs!r},)")
    try:
        names = tuple(needs)
    except TypeError:
        raise SpecError(f"needs={needs!r} is no tuple of names") from None
    for name in names:
        if not isinstance(name, str):
            raise SpecError(f"needs has {name!r}: it must hold names of inputs")
    return names


def judge_dtype(name: str, dtype: str) -> None:
    """SpecError if there is no such dtype."""
    judge_word(name, dtype, DTYPES)


def judge_heads(heads: int | None, kv_heads: int | None) -> None:
    """SpecError unless q's heads are a multiple of k's, and k has some."""
    if kv_heads is not None and kv_heads < 1:
        raise SpecError(f"k has {kv_heads} heads: it needs at least one; for a q-only call pass None for k")
    if heads is not None and kv_heads is not None and heads % kv_heads:
        raise SpecError(f"q has {heads} heads and k {kv_heads}: q's must be a multiple of k's (GQA)")


def judge_rotary(rotary: int, head_dim: int) -> None:
    """SpecError unless the rotary width is even and fits the head."""
    if rotary % 2:
        raise SpecError(f"rotary width must be even, got {rotary}: a table's columns come in pairs")
    if rotary > head_dim:
        raise SpecError(
            f"rotary width {rotary} is larger than head_dim {head_dim}: pass a narrower table, "
            "or say table='half' or table='full' as it is"
        )


def judge_table_batch(table_batch: int | None, batch: int) -> None:
    """SpecError unless the tables serve one batch, every batch or each its own."""
    if table_batch not in (None, 1, batch):
        raise SpecError(
            f"the tables have batch {table_batch}: it must be 1 or q's {batch}, or leave the axis out"
        )
