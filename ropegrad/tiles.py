"""The schedule: which batches and tokens are worked on together, by whom, in which order.

A table row belongs to one task, which adds up its batches in order. So results depend neither on the size of
the tiles nor on the number of workers.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from ropegrad.spec import QkvSpec, RopeSpec

SHARED = (
    1 << 20
)  # channels of a tile where threads take turns at the interpreter: few calls, 4 MiB of float32
ALONE = 1 << 18  # channels of a tile on one thread: 1 MiB of float32, a core's share of cache


class Tile(NamedTuple):
    """Batches and tokens that are worked on at once; all heads, all channels."""

    batch: slice
    tokens: slice


Task = list[Tile]  # tiles that one worker does in this order: they may share table rows


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def channels(spec: RopeSpec | QkvSpec) -> int:
    """Channels of all heads of q and k: the size of a problem."""
    rope = spec if isinstance(spec, RopeSpec) else spec.rope
    return rope.batch * rope.seq * ((rope.heads or 0) + (rope.kv_heads or 0)) * rope.head_dim


def tasks(spec: RopeSpec, cells: int | None = None, workers: int = 1) -> list[Task]:
    """Cut [batch, seq] into tiles of about `cells` (batch, token) pairs, grouped into independent tasks.

    Without `cells` there is work for every worker.
    """
    if not spec.batch or not spec.seq:
        return []
    per_cell = max(spec.heads or 0, spec.kv_heads or 0, 1) * max(spec.head_dim, 1)
    fitting = (SHARED if workers > 1 else ALONE) // per_cell
    cells = cells or max(min(fitting, -(-spec.batch * spec.seq // workers)), 1)
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
