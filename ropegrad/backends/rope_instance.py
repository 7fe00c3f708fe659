"""One compiled version of the RoPE backward kernel: what is fixed when it is compiled, and its text."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from pathlib import Path

FOLDER = Path(__file__).parent / "kernels"
PARTS = ("numbers.cuh", "memory.cuh", "rope_rows.cuh", "rope_tables.cuh", "rope_backward.cu")
PIPELINE = "rope_pipeline.cu"
ENTRY = "rope_backward"

_TYPES = {"float16": "Float16", "bfloat16": "BFloat16", "float32": "float", "float64": "double"}
_COMPILED = ("vector", "lanes", "groups_q", "groups_k", "rows", "stages", "hint", "dense",
             "dense_table", "interleaved", "half_table", "rotate", "rest", "cos", "sin", "add")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """Dtypes, access width, what is wanted, and how many registers a thread may have.

    storage, table, compute
        Dtypes of q and k, of the tables, of products and sums.
    vector, lanes
        Channels an access: 1, 2, 4 or 8, at least 2 where interleaved; threads that share a row's rotation.
    dense, dense_table
        Whether rows of q and k, and of the tables, have unit stride and are aligned to their accesses.
    interleaved, half_table
        Pairing and form of the tables.
    rotate, rest, cos, sin, add
        Whether gradients of q or k are written, with channels that pass through, of cos, of sin; whether they
        are added to what is there.
    rows
        Rows a thread has in flight.
    stages, groups_q, groups_k
        Of the pipeline (sm_90 and newer): its depth, and the groups of threads that share q's and k's heads.
        All 0: the kernel of plain loads, which is told its groups when it is launched.
    hint
        0: none; 1: loads pass L1 by, stores leave L2 first; 2: as 1, and loads fetch 256 bytes into L2.
    threads, blocks
        Launch bounds: most threads a block, and blocks that must fit a multiprocessor.
    """

    storage: str
    table: str
    compute: str
    vector: int
    lanes: int
    dense: bool
    dense_table: bool
    interleaved: bool
    half_table: bool
    rotate: bool
    rest: bool
    cos: bool
    sin: bool
    add: bool
    rows: int
    hint: int
    threads: int
    blocks: int
    stages: int = 0
    groups_q: int = 0
    groups_k: int = 0

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
        return f"{kernel_text(bool(self.stages))}\n{self.definition()}"

    def definition(self, entry: str = ENTRY) -> str:
        """The part of the source that is this instance's own."""
        types = " ".join(
            f"using {name.capitalize()} = {_TYPES[getattr(self, name)]};"
            for name in ("storage", "table", "compute")
        )
        values = " ".join(f"static constexpr int {name} = {int(getattr(self, name))};" for name in _COMPILED)
        body = "rope_pipeline_of" if self.stages else "rope_backward_of"
        return (
            f"struct {entry}_instance {{ {types} {values} }};\n"
            f'extern "C" __global__ void __launch_bounds__({self.threads}, {self.blocks})\n'
            f"{entry}(const Arguments arguments) {{ {body}<{entry}_instance>(arguments); }}\n"
        )


assert set(_COMPILED) < {field.name for field in fields(Instance)}


@functools.cache
def kernel_text(pipeline: bool) -> str:
    """The files of the kernel, in the order in which they build on each other."""
    return "\n".join(
        (FOLDER / part).read_text(encoding="utf-8") for part in (*PARTS, *(PIPELINE,) * pipeline)
    )
