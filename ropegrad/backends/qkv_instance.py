"""One compiled version of the QKV memory pass: what is fixed when it is compiled, and its text."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from pathlib import Path

FOLDER = Path(__file__).parent / "kernels"
PARTS = ("numbers.cuh", "memory.cuh", "qkv_inputs.cuh", "qkv_scales.cuh", "qkv_terms.cuh",
         "qkv_rows.cuh", "qkv_pass.cu")  # fmt: skip

_TYPES = {"float16": "Float16", "bfloat16": "BFloat16", "float32": "float"}
_KERNELS = {  # parameters behind `Arguments`, the body, threads of a block; blocks that must fit
    "qkv_convert": ("", "qkv_convert_of<I>(a)", 512, 1),
    "qkv_mend": (", const Finish finish, const long long turn", "mend<I>(a, finish, turn)", 256, 2),
    "qkv_biases": (", const Biases biases", "bias_all<I>(a, biases)", 1024, 1),
}
ENTRIES = tuple(_KERNELS)
THREADS = {entry: threads for entry, (_, _, threads, _) in _KERNELS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """Dtypes, access widths, pairing and form of the tables.

    storage, table, operand
        Dtypes of gradients, hidden states and weights, of the tables, of the products' operands.
    two
        Whether an operand has a second term.
    vector, matrix_vector
        Channels an access: of the gradients, and of hidden states and weights.
    interleaved, half_table, add
        Pairing, form of the tables; whether results are added to what is there.
    """

    storage: str
    table: str
    operand: str
    two: bool
    vector: int
    matrix_vector: int
    interleaved: bool
    half_table: bool
    add: bool

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
        text = [f"struct {instance} {{ {types} {values} }};"]
        for entry, (parameters, body, threads, blocks) in _KERNELS.items():
            text.append(
                f'extern "C" __global__ void __launch_bounds__({threads}, {blocks})\n'
                f"{entry}{suffix}(const Arguments a{parameters}) {{ using I = {instance}; {body}; }}"
            )
        return "\n".join(text) + "\n"


@functools.cache
def kernel_text() -> str:
    """The files of the kernels, in the order in which they build on each other."""
    return "\n".join((FOLDER / part).read_text(encoding="utf-8") for part in PARTS)
