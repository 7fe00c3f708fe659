"""Memory that the QKV projections' gradients take besides inputs and outputs: known in advance."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ropegrad.arrays import nbytes
from ropegrad.spec import QkvSpec

ALIGNED = 256  # bytes, of every block
CUBLAS = 32 << 20  # what NVIDIA recommends for sm_90; less elsewhere
STATE = 256  # the struct State of qkv_inputs.cuh
LEAST, MOST = 256, 1 << 16  # products of a sum, for operands in two terms


class Standing(NamedTuple):
    """What decides, besides the spec, how much is set aside.

    aside     needs whose product cannot stand in the output at once: it is rounded, added or spread later
    in_place  operands that the products read where they are, of "hidden_states" and "weights"
    """

    aside: tuple[str, ...]
    in_place: tuple[str, ...]


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


def terms(spec: QkvSpec) -> int:
    """How many 16-bit numbers stand for an element; 0 where the products take float32."""
    if spec.precision != "highest":
        return 1
    depths = spec.tokens, width_of(spec, parts_of(spec))
    return 2 if min(depths) >= LEAST and max(*depths, spec.hidden_size or 0) < MOST else 0


def operand(spec: QkvSpec) -> str:
    """Dtype of what the products multiply."""
    return "bfloat16" if spec.precision == "medium" else "float16" if terms(spec) else "float32"


def maxima_of(spec: QkvSpec) -> tuple[int, ...]:
    """Words of maxima: rows and columns of D, columns of X and W, rows of X and W; matrices'; a counter's.

    Each is whole accesses of a warp, 512 bytes.
    """
    if not terms(spec):
        return (0,) * 8
    hidden, weights = products_of(spec)
    tokens, columns, width = spec.tokens, spec.hidden_size or 0, width_of(spec, parts_of(spec))
    one = terms(spec) == 1  # else no row of X or W is measured, but each matrix
    rows = (tokens * weights, width * hidden, 0) if one else (0, 0, 3)
    words = tokens, width, columns * weights, columns * hidden, *rows, 1
    return tuple(-(-count // 128) * 128 for count in words)


def item(spec: QkvSpec) -> int:
    """Bytes of an operand's element."""
    return nbytes((1,), operand(spec))


def pitch(spec: QkvSpec, columns: int) -> int:
    """Bytes from row to row of a matrix of operands: whole 16-byte accesses."""
    return -(-columns * item(spec) // 16) * 16


def _contiguous(spec: QkvSpec) -> Standing:
    """For contiguous arrays, each weight by itself."""
    direct = spec.rope.dtype == "float32"
    aside = tuple(n for n in spec.needs if not n.endswith("_bias"))
    return Standing(
        () if direct and not spec.accumulate else aside,
        ("hidden_states",) if direct and not terms(spec) else (),
    )


def workspace(spec: QkvSpec, standing: Standing | None = None) -> Workspace:
    """The blocks. standing: default for contiguous arrays."""
    aside, in_place = standing or _contiguous(spec)
    hidden, weights = products_of(spec)
    tokens, columns, width = spec.tokens, spec.hidden_size or 0, width_of(spec, parts_of(spec))
    rows = {"hidden_states": tokens} | {f"{p}_weight": spec.rows(p) for p in "qkv"}
    any_product, each = hidden or weights, max(terms(spec), 1)
    sizes = {
        "state": STATE * any_product,
        "maxima": 4 * sum(maxima_of(spec)) * any_product,
        "d": each * tokens * pitch(spec, width),
        "x": each * tokens * pitch(spec, columns) * (weights and "hidden_states" not in in_place),
        "w": each * width * pitch(spec, columns) * (hidden and "weights" not in in_place),
        "product": 4 * columns * max((rows[name] for name in aside), default=0),
        "cublas": CUBLAS * any_product,
    }
    offsets, at = {}, 0
    for name, size in sizes.items():
        offsets[name] = at
        at += -(-size // ALIGNED) * ALIGNED
    return Workspace(offsets, at)
