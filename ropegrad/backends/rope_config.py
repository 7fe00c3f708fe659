"""How the RoPE backward kernel is spread over a GPU: a rule from the shape, no table of cases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

MOST_SHARED = 48 << 10  # bytes a block has without asking
MOST_GROUPS = 64  # threads along z
MOST_GRID = 65_535  # blocks along y and z


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A block is lanes x tokens x (groups_q + groups_k) threads; each has `rows` rows in flight.

    groups_q, groups_k: share the heads of q and of k. stages: of the pipeline, 0 for plain loads.
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
    stages: int = 0

    @property
    def groups(self) -> int:
        """Of a block."""
        return self.groups_q + self.groups_k

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.lanes * self.tokens * self.groups


class Gpu(NamedTuple):
    """What the rule knows of a GPU. capability: 90 for sm_90; shared: bytes a block may have at most."""

    multiprocessors: int
    capability: int
    shared: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What the rule looks at.

    lanes: threads that a whole row takes; heads, kv_heads: of q and k, 0 where none are read; tokens: in all;
    thread_bytes: of shared memory that a thread needs, 0 where no table gradient is wanted; row_bytes: read
    for a head of a token; pipeline: whether bulk copies can bring the rows.
    """

    lanes: int
    heads: int
    kv_heads: int
    tokens: int
    thread_bytes: int
    row_bytes: int
    pipeline: bool
    gpu: Gpu


def choose(work: Work) -> Config:
    """The rule.

    With table gradients a block owns a token, so that heads are summed inside it. Its threads share the heads
    evenly: many threads where tokens are too few to fill the GPU otherwise, else 256.
    Without them the grid splits tokens and heads alike.
    """
    lanes = min(work.lanes, 32)
    if not work.thread_bytes:
        return spread(work, lanes=lanes, threads=256, rows=4)
    few = work.tokens <= 2 * work.gpu.multiprocessors
    threads = min(640 if few else 256, MOST_SHARED // work.thread_bytes - 64)
    return spread(work, lanes=lanes, threads=threads, rows=2)


def spread(work: Work, *, lanes: int, threads: int, rows: int, **others: int) -> Config:
    """Blocks of at most `threads` threads, more tokens in each only where one token does not need as many.

    A thread takes n heads, n as small as the threads allow; a divisor of k's heads wastes none of them.
    """
    most = max(2, min(threads // lanes, MOST_GROUPS))
    for n in range(rows, rows + max(work.heads, work.kv_heads) + 1):
        groups_q, groups_k = -(-work.heads // n), -(-work.kv_heads // n)
        if groups_q + groups_k <= most:
            break
    groups_q = max(groups_q, groups_k == 0)
    tokens = max(1, min(threads // (lanes * (groups_q + groups_k)), work.tokens))
    return Config(lanes=lanes, tokens=tokens, groups_q=groups_q, groups_k=groups_k, rows=rows, **others)
