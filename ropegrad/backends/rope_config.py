"""How the RoPE backward kernel is spread over a GPU: a rule from the shape, no table of cases."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

MOST_SHARED = 48 << 10  # bytes a block has without asking
MOST_HELD = 400  # bytes of a thread's registers for what it holds, beside addresses and the like
MOST_LANES = 32
MOST_THREADS = 512  # then each has 128 registers
MOST_GROUPS = 64  # threads along z
MOST_GRID = 65_535  # blocks along y and z


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A block is lanes x tokens x (groups_q + groups_k) threads; each has `rows` rows in flight.

    groups_q, groups_k: share the heads of q and of k.
    vector: most bytes an access; blocks: how many must fit a multiprocessor; hint: see `Instance`.
    """

    vector: int = 16
    lanes: int
    tokens: int
    groups_q: int
    groups_k: int
    rows: int
    blocks: int = 1
    hint: int = 0

    @property
    def groups(self) -> int:
        """Of a block."""
        return self.groups_q + self.groups_k

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.lanes * self.tokens * self.groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What the rule looks at.

    lanes: threads that a whole row takes; heads, kv_heads: of q and k, 0 where none are read; batch, seq:
    what blocks pick their tokens from; thread_bytes: of shared memory that a thread needs, 0 where no table
    gradient is wanted; held_bytes, row_bytes: of registers that a thread needs for tables and sums, and for
    each row in flight; moved: bytes in all; l2: bytes of the GPU's L2.
    """

    lanes: int
    heads: int
    kv_heads: int
    batch: int
    seq: int
    thread_bytes: int
    held_bytes: int
    row_bytes: int
    moved: int
    l2: int


def choose(work: Work) -> Config:
    """The rule, for accesses of a width.

    A thread has four rows in flight, or as many as registers allow, and those are all that it works on: so
    there are as many groups as the heads need. With table gradients that is a block a token, so that heads
    are summed inside it; only where it would be too large do threads take several turns, and only where it
    would be small does it have several tokens. Without them blocks of any size do. Loads pass L1 by where
    most of what moves stays in L2.
    """
    lanes = min(work.lanes, MOST_LANES)
    rows = next((rows for rows in (4, 2) if work.held_bytes + rows * work.row_bytes <= MOST_HELD), 1)
    threads = 256
    if work.thread_bytes:
        threads = min(MOST_THREADS, MOST_SHARED // work.thread_bytes - 64)
    config = spread(work, lanes=lanes, threads=threads, rows=rows)
    return replace(config, hint=int(3 * work.moved <= 4 * work.l2))


def suits(work: Work, config: Config) -> bool:
    """Whether a block of this shape takes one turn and whole rows: then narrow accesses are the faster ones.

    They take half the registers, so that more threads ask for as many bytes.
    """
    taken = config.groups_q * config.rows >= work.heads and config.groups_k * config.rows >= work.kv_heads
    return bool(work.thread_bytes) and taken and config.lanes == work.lanes


def spread(work: Work, *, lanes: int, threads: int, rows: int) -> Config:
    """Blocks of at most `threads` threads, each with at most `rows` rows in flight.

    A thread takes n heads: as many as it has in flight, or the largest smaller number that shares q's heads
    and k's without remainder; more, in turns, where the threads do not suffice.
    """
    most = max(2, min(threads // lanes, MOST_GROUPS))
    heads = work.heads, work.kv_heads
    few = sum(heads) * 5 // 4  # rows that may be in flight: a quarter of them for nothing
    rows = next((r for r in range(rows, 0, -1) if _groups(heads, r) * r <= few), 1)
    n = max(
        (d for d in range(2, rows + 1) if gcd(*heads) % d == 0 and _groups(heads, d) <= most), default=rows
    )
    while _groups(heads, n) > most:
        n += rows
    groups_q, groups_k = (-(-number // n) for number in heads)
    groups_q = max(groups_q, groups_k == 0)
    tokens = max(1, min(192 // (lanes * (groups_q + groups_k)), work.seq))
    return Config(lanes=lanes, tokens=tokens, groups_q=groups_q, groups_k=groups_k, rows=min(rows, n))


def _groups(heads: tuple[int, ...], n: int) -> int:
    return sum(-(-number // n) for number in heads)
