"""One compiled version of the QKV memory pass: what is fixed when it is compiled, and its text."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from pathlib import Path

FOLDER = Path(__file__).parent / "kernels"
PARTS = ("numbers.cuh", "memory.cuh", "qkv_inputs.cuh", "qkv_scales.cuh", "qkv_rows.cuh", "qkv_pass.cu")

_TYPES = {"float16": "Float16", "bfloat16": "BFloat16", "float32": "float"}
_KERNELS = {  # parameters behind `Arguments`, the body; blocks that must fit
    "qkv_convert": ("", "qkv_convert_of<I>(a)", 1),
    "qkv_mend": (", const Finish finish, const long long turn", "mend<I>(a, finish, turn)", 2),
    "qkv_biases": (", const Biases biases", "bias_all<I>(a, biases)", 1),
}
ENTRIES = tuple(_KERNELS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """Dtypes, access widths, pairing and form of the tables.

    storage, table, operand
        Dtypes of gradients, hidden states and weights, of the tables, of the products' operands.
    vector, matrix_vector
        Channels an access: of the gradients, and of hidden states and weights.
    interleaved, half_table, add
        Pairing, form of the tables; whether results are added to what is there.
    """

    storage: str
    table: str
    operand: str
    vector: int
    matrix_vector: int
    interleaved: bool
    half_table: bool
    add: bool

    @property
    def warps(self) -> int:
        """Of a block of the pass, one a multiprocessor: as many as its registers allow."""
        return 20 if max(self.vector, self.matrix_vector) <= 4 else 16

    def threads(self, entry: str) -> int:
        """Of a block."""
        return {"qkv_convert": 32 * self.warps, "qkv_mend": 256, "qkv_biases": 1024}[entry]

    def source(self) -> str:
        """The kernels' text and this instance of them, `extern "C"` and called as in ENTRIES."""
        return f"{kernel_text()}\n{self.definition()}"

    def definition(self, suffix: str = "") -> str:
        """The part of the source that is this instance's own; `suffix` goes behind every name."""
        types = " ".join(
            f"using {name.capitalize()} = {_TYPES[getattr(self, name)]};"
            for name in ("storage", "table", "operand")
        )
        names = [field.name for field in fields(self)][3:]
        values = " ".join(f"static constexpr int {name} = {int(getattr(self, name))};" for name in names)
        instance = f"instance{suffix}"
        values += f" static constexpr int warps = {self.warps};"
        text = [f"struct {instance} {{ {types} {values} }};"]
        for entry, (parameters, body, blocks) in _KERNELS.items():
            text.append(
                f'extern "C" __global__ void __launch_bounds__({self.threads(entry)}, {blocks})\n'
                f"{entry}{suffix}(const Arguments a{parameters}) {{ using I = {instance}; {body}; }}"
            )
        return "\n".join(text) + "\n"


@functools.cache
def kernel_text() -> str:
    """The files of the kernels, in the order in which they build on each other."""
    return "\n".join((FOLDER / part).read_text(encoding="utf-8") for part in PARTS)
