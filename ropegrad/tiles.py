"""The schedule: which batches and tokens are worked on together, by whom, in which order.

A table row belongs to one task, which adds up its batches in order. So results depend neither on the size of
the tiles nor on the number of workers.
"""

from __future__ import annotations

from typing import NamedTuple

from ropegrad.spec import RopeSpec

SCRATCH = 512 * 1024  # channels of a tile: 2 MiB of float32, near a core's share of cache


class Tile(NamedTuple):
    """Batches and tokens that are worked on at once; all heads, all channels."""

    batch: slice
    tokens: slice


Task = list[Tile]  # tiles that one worker does in this order: they may share table rows


def tasks(spec: RopeSpec, cells: int | None = None) -> list[Task]:
    """Cut [batch, seq] into tiles of about `cells` (batch, token) pairs, grouped into independent tasks."""
    if not spec.batch or not spec.seq:
        return []
    per_cell = max(spec.heads or 0, spec.kv_heads or 0, 1) * max(spec.head_dim, 1)
    cells = cells or max(SCRATCH // per_cell, 1)
    tokens = min(spec.seq, cells)
    batches = min(spec.batch, max(cells // tokens, 1))
    groups = [
        [Tile(slice(b, min(b + batches, spec.batch)), slice(s, min(s + tokens, spec.seq)))
         for b in range(0, spec.batch, batches)]
        for s in range(0, spec.seq, tokens)
    ]  # fmt: skip
    if spec.table_batch == spec.batch:  # every batch has rows of its own
        return [[tile] for group in groups for tile in group]
    return groups
