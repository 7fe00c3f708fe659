"""What a problem must cost at least: bytes moved and floating-point operations, as exact integers.

What a wanted gradient reads is read once, every output is written once (and read once more with
`accumulate`). A table that is broadcast over the batch counts once; channels of q and k past the rotary width
are never read.
"""

from __future__ import annotations

from typing import NamedTuple

from ropegrad.arrays import nbytes
from ropegrad.spec import QkvSpec, RopeSpec


class Cost(NamedTuple):
    """Bytes read and written, and floating-point operations."""

    read: int
    written: int
    flops: int

    @property
    def moved(self) -> int:
        """All bytes."""
        return self.read + self.written


def rope_cost(spec: RopeSpec) -> Cost:
    """Cost of `rope_backward`; with R = D, all in b bytes each, (3(H+Hkv) + 4)·D·b·B·S bytes."""
    tables = sum(name in spec.needs for name in ("cos", "sin"))
    read = written = flops = 0
    for side, heads in (("q", spec.heads), ("k", spec.kv_heads)):
        rows, wanted = spec.batch * (heads or 0) * spec.seq, side in spec.needs
        rotated = nbytes((rows, spec.rotary_dim), spec.dtype)
        grad = nbytes((rows, spec.head_dim), spec.dtype) if wanted else rotated * (tables > 0)
        read += grad + rotated * (tables > 0)
        flops += rows * spec.rotary_dim * (3 * wanted + 2 * tables)
    if "q" in spec.needs or "k" in spec.needs:
        read += 2 * nbytes(spec.table_shape, spec.table_dtype)
    written = sum(nbytes(*spec.output(need)) for need in spec.needs)
    return Cost(read + written * spec.accumulate, written, flops)


def qkv_cost(spec: QkvSpec) -> Cost:
    """Cost of `qkv_rope_backward`; operations are those of the matrix products, 4·M·(H+2Hkv)·D·C for all."""
    needs, rope = spec.needs, spec.rope
    hidden = spec.hidden_size or 0
    parts = [p for p in "qkv" if {"hidden_states", f"{p}_weight", f"{p}_bias"} & set(needs)]
    read = sum(nbytes((spec.tokens, spec.rows(part)), rope.dtype) for part in parts)
    if "q" in parts or "k" in parts:
        read += 2 * nbytes(rope.table_shape, rope.table_dtype)
    products = [spec.rows(part) for part in "qkv" if f"{part}_weight" in needs]
    if products:
        read += nbytes(spec.hidden_shape, rope.dtype)
    if "hidden_states" in needs:
        rows = sum(spec.rows(part) for part in "qkv")
        read += nbytes((rows, hidden), rope.dtype)
        products.append(rows)
    written = sum(nbytes(*spec.output(need)) for need in needs)
    flops = 2 * spec.tokens * hidden * sum(products)
    return Cost(read + written * spec.accumulate, written, flops)
