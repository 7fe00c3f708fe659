"""Text that g++ would not take, as C++ that it does: dynamic shared memory and simple inline PTX."""

import re

# What an instruction computes, its destination first. g++ adds nothing up: no contraction, no flushing.
MEANING = {
    "mul.rn.f32": "{0} = {1} * {2}",
    "add.rn.f32": "{0} = {1} + {2}",
    "sub.rn.f32": "{0} = {1} - {2}",
    "fma.rn.f32": "{0} = fmaf({1}, {2}, {3})",
    "mul.rn.f64": "{0} = {1} * {2}",
    "add.rn.f64": "{0} = {1} + {2}",
    "sub.rn.f64": "{0} = {1} - {2}",
    "fma.rn.f64": "{0} = fma({1}, {2}, {3})",
    "cvt.rn.f32.f64": "{0} = float({1})",
    "cvt.f64.f32": "{0} = double({1})",
}
_DYNAMIC = re.compile(
    r"extern\s+__shared__\s+((?:__align__|alignas)\s*\([^)]*\)\s*)?([\w:<>\s]+?)\s*\b(\w+)\s*\[\s*\]\s*;"
)
_ASM = re.compile(
    r"""asm\s*(?:volatile)?\s*\(\s*"\s*([\w.]+)\s+([^";]*);\s*"\s*:([^:;]*):([^:;]*?)\)\s*;""", re.DOTALL
)
_OPERAND = re.compile(r'"[^"]*"\s*\(((?:[^()]|\([^()]*\))*)\)')


def translate(text: str) -> str:
    """The same program with the same lines."""
    text = _DYNAMIC.sub(r"\2* const \3 = static_cast<\2*>(::shim::shared_memory());", text)
    return _ASM.sub(_meaning, text)


def _meaning(found: re.Match[str]) -> str:
    instruction, places, outputs, inputs = found.groups()
    if instruction not in MEANING:
        return found[0]
    operands = _OPERAND.findall(outputs) + _OPERAND.findall(inputs)
    order = [int(place) for place in re.findall(r"%(\d+)", places)]
    return MEANING[instruction].format(*(f"({operands[i]})" for i in order)) + ";"
