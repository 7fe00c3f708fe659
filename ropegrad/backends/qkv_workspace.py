"""Memory that the QKV projections' gradients take besides inputs and outputs: known in advance."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ropegrad.spec import QkvSpec

ALIGNED = 256  # bytes, of every block
CUBLAS = 32 << 20  # what NVIDIA recommends for sm_90; less elsewhere
STATE = 256  # the struct State of qkv_inputs.cuh
NARROW = 2  # bytes of an operand


@dataclass(frozen=True)
class Workspace:
    """Where each block starts, in bytes, and what all take. A block that is not needed takes none."""

    offsets: dict[str, int]
    size: int


def parts_of(spec: QkvSpec) -> tuple[str, ...]:
    """The parts of D, of 'q', 'k' and 'v', that a product needs."""
    return tuple(p for p in "qkv" if {"hidden_states", f"{p}_weight"} & set(spec.needs))


def biases_of(spec: QkvSpec) -> tuple[str, ...]:
    """The parts whose bias has a wanted gradient."""
    return tuple(p for p in "qkv" if f"{p}_bias" in spec.needs)


def products_of(spec: QkvSpec) -> tuple[bool, bool]:
    """Whether D·W and Dᵀ·X are wanted."""
    return "hidden_states" in spec.needs, any(f"{p}_weight" in spec.needs for p in "qkv")


def width_of(spec: QkvSpec, parts: Iterable[str]) -> int:
    """Columns of D."""
    return sum(map(spec.rows, parts))


def maxima_of(spec: QkvSpec) -> tuple[int, ...]:
    """Words of maxima: of rows and columns of D, of columns of X and W, of rows of X and W; a counter's.

    Each is whole accesses of a warp, 512 bytes.
    """
    hidden, weights = products_of(spec)
    tokens, columns, width = spec.tokens, spec.hidden_size or 0, width_of(spec, parts_of(spec))
    words = tokens, width, columns * weights, columns * hidden, tokens * weights, width * hidden, 1
    return tuple(-(-count // 128) * 128 for count in words)


def pitch(columns: int) -> int:
    """Bytes from row to row of a matrix of operands: whole 16-byte accesses."""
    return -(-columns * NARROW // 16) * 16


def workspace(spec: QkvSpec, aside: tuple[str, ...] | None = None) -> Workspace:
    """The blocks. aside: outputs whose product cannot stand in them at once, default for contiguous ones."""
    if aside is None:
        direct = spec.rope.dtype == "float32" and not spec.accumulate
        aside = () if direct else tuple(n for n in spec.needs if not n.endswith("_bias"))
    hidden, weights = products_of(spec)
    tokens, columns, width = spec.tokens, spec.hidden_size or 0, width_of(spec, parts_of(spec))
    rows = {"hidden_states": tokens} | {f"{p}_weight": spec.rows(p) for p in "qkv"}
    any_product = hidden or weights
    sizes = {
        "state": STATE * any_product,
        "maxima": 4 * sum(maxima_of(spec)) * any_product,
        "d": tokens * pitch(width),
        "x": tokens * pitch(columns) * weights,
        "w": width * pitch(columns) * hidden,
        "product": 4 * columns * max((rows[name] for name in aside), default=0),
        "cublas": CUBLAS * any_product,
    }
    offsets, at = {}, 0
    for name, size in sizes.items():
        offsets[name] = at
        at += -(-size // ALIGNED) * ALIGNED
    return Workspace(offsets, at)
