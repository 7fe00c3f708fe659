"""One compiled version of the RoPE backward kernel: what is fixed when it is compiled, and its text."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from pathlib import Path

FOLDER = Path(__file__).parent / "kernels"
PARTS = ("numbers.cuh", "memory.cuh", "rope_rows.cuh", "rope_tables.cuh", "rope_backward.cu")
ENTRY = "rope_backward"

_TYPES = {"float16": "Float16", "bfloat16": "BFloat16", "float32": "float", "float64": "double"}
_NOT_COMPILED = ("storage", "table", "compute", "blocks")  # types, and the launch bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """Dtypes, access width, how threads share the work, what is wanted.

    storage, table, compute
        Dtypes of q and k, of the tables, of products and sums.
    vector, vectors
        Channels an access: 1, 2, 4 or 8, at least 2 where interleaved; how many make up the rotary width.
    lanes, tokens, groups_q, groups_k, rows
        A block, and the rows that a thread has in flight; see `Config`.
    hint
        A sum. 1: loads pass L1 by; 2: what is stored leaves L2 first.
    dense, dense_table
        Whether rows of q and k, and of the tables, have unit stride and are aligned to their accesses.
    even, once
        Whether the heads are shared without remainder; and whether each thread has all of its own in flight.
    walks, swapped
        Whether a block walks over the batch; whether the grid's x counts batches and its z tokens.
    wide
        Whether a stride of heads, tokens or channels needs 64 bits.
    interleaved, half_table, own_sine
        Pairing, form of the tables, and adjoint="paired".
    rests
        Vectors of the channels that pass through which a thread has in flight for each row; 0: it takes those
        one by one, or there are none.
    rotate, rotate_all, rest, cos, sin, add
        Whether gradients of q or k are written, of all that is read, with channels that pass through, of cos,
        of sin; whether they are added to what is there.
    blocks
        That must fit a multiprocessor, which limits the registers.
    """

    storage: str
    table: str
    compute: str
    vector: int
    vectors: int
    lanes: int
    tokens: int
    groups_q: int
    groups_k: int
    rows: int
    rests: int
    hint: int
    dense: bool
    dense_table: bool
    even: bool
    once: bool
    walks: bool
    swapped: bool
    wide: bool
    interleaved: bool
    half_table: bool
    own_sine: bool
    rotate: bool
    rotate_all: bool
    rest: bool
    cos: bool
    sin: bool
    add: bool
    blocks: int

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.lanes * self.tokens * (self.groups_q + self.groups_k)

    @property
    def parts(self) -> int:
        """Blocks that share a row."""
        lanes = (self.vectors + 1) // 2
        return max(1, -(-lanes // self.lanes))

    @property
    def slots(self) -> int:
        """Partial sums that a thread keeps for each wanted table."""
        return self.vector if self.half_table else 2 * self.vector

    @property
    def table_run(self) -> int:
        """Consecutive columns of a table that belong to one vector."""
        return self.vector // 2 if self.half_table and self.interleaved else self.vector

    def source(self) -> str:
        """The kernel's text and this instance of it, `extern "C"` and called ENTRY."""
        return f"{kernel_text()}\n{self.definition()}"

    def definition(self, entry: str = ENTRY) -> str:
        """The part of the source that is this instance's own."""
        types = " ".join(
            f"using {name.capitalize()} = {_TYPES[getattr(self, name)]};"
            for name in ("storage", "table", "compute")
        )
        names = (field.name for field in fields(self) if field.name not in _NOT_COMPILED)
        values = " ".join(f"static constexpr int {name} = {int(getattr(self, name))};" for name in names)
        return (
            f"struct {entry}_instance {{ {types} {values} }};\n"
            f'extern "C" __global__ void __launch_bounds__({self.threads}, {self.blocks})\n'
            f"{entry}(const Arguments arguments) {{ rope_backward_of<{entry}_instance>(arguments); }}\n"
        )


@functools.cache
def kernel_text() -> str:
    """The files of the kernel, in the order in which they build on each other."""
    return "\n".join((FOLDER / part).read_text(encoding="utf-8") for part in PARTS)
