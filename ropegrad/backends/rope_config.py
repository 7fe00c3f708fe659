"""How the RoPE backward kernel is spread over a GPU: a rule from the shape, no table of cases."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

MOST_SHARED = 48 << 10  # bytes a block has without asking
MOST_HELD = 400  # bytes of a thread's registers for what it holds, beside addresses and the like
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
    each row in flight.
    """

    lanes: int
    heads: int
    kv_heads: int
    batch: int
    seq: int
    thread_bytes: int
    held_bytes: int
    row_bytes: int
    multiprocessors: int


def choose(work: Work) -> Config:
    """The rule.

    With table gradients a block owns a token, so that heads are summed inside it. Its threads share the heads
    evenly, four rows in flight each, or as many as registers allow. Without them the grid splits tokens and
    heads alike.
    """
    lanes = min(work.lanes, 32)
    rows = next((rows for rows in (4, 2) if work.held_bytes + rows * work.row_bytes <= MOST_HELD), 1)
    threads = 256
    if work.thread_bytes:
        threads = min(threads, MOST_SHARED // work.thread_bytes - 64)
    return spread(work, lanes=lanes, threads=threads, rows=rows)


def spread(work: Work, *, lanes: int, threads: int, rows: int) -> Config:
    """Blocks of at most `threads` threads, more tokens in each only where one token does not need as many.

    A thread takes n heads, as few as the threads allow; if at most twice as many share them evenly, so many.
    """
    most = max(2, min(threads // lanes, MOST_GROUPS))
    heads = work.heads, work.kv_heads
    n = next(n for n in range(max(1, sum(heads) // most), sum(heads) + 2) if _groups(heads, n) <= most)
    even = [m for m in range(n, 2 * n + 1) if gcd(*heads) % m == 0]
    n = even[0] if even and sum(heads) else n
    in_flight = max(r for r in range(1, min(rows, n) + 1) if n % r == 0)
    in_flight = in_flight if 2 * in_flight >= min(rows, n) else min(rows, n)
    groups_q, groups_k = (-(-number // n) for number in heads)
    groups_q = max(groups_q, groups_k == 0)
    tokens = max(1, min(threads // (lanes * (groups_q + groups_k)), work.seq))
    return Config(lanes=lanes, tokens=tokens, groups_q=groups_q, groups_k=groups_k, rows=in_flight)


def _groups(heads: tuple[int, ...], n: int) -> int:
    return sum(-(-number // n) for number in heads)
