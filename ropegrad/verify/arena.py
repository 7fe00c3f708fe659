"""One run of memory for everything a function under test may touch: inputs and outputs between canaries.

Comparing the bytes before and after a call tells every write that was none of its business.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ropegrad.arrays import dtype_name, numpy_dtype
from ropegrad.verify.case import NumpyArray

GUARD = 4096  # bytes around every array: a write one row too far lands in them
ALIGNED = 64
_PIECE = 1 << 18
CANARY = 0xFF  # NaN in every dtype: what is read from a guard shows, too

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

# What outputs hold before a call: a NaN that no arithmetic makes, and a number. A function that adds into
# its output instead of writing it keeps the NaN, but not the number.
POISONS = {
    "nan": {"float16": 0x7EBD, "bfloat16": 0x7FEB, "float32": 0x7FEBADBD, "float64": 0x7FF8EBADBADEBADB},
    "number": {"float16": 0xE3B5, "bfloat16": 0xC4F6, "float32": 0xC4F6EBAD, "float64": 0xC09EDD6F34549A2B},
}


class Slot(NamedTuple):
    """Where an array is in the arena, in bytes: `low` is its lowest address, `span` bytes hold all of it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    first: int
    low: int
    span: int


class Plan(NamedTuple):
    """Slots by name, inputs first, and the bytes that they need with all guards."""

    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    nbytes: int


def plan(inputs: Mapping[str, NumpyArray | None], outputs: Iterable[tuple[str, NumpyArray]] = ()) -> Plan:
    """Room for copies of arrays with the same strides, gaps and alignment; absent inputs have no slot."""
    end = GUARD

    def slot(name: str, x: NumpyArray) -> Slot:
        nonlocal end
        below, span, shift = 0, x.nbytes, 0
        if x.size and not x.flags.c_contiguous:
            below = -sum(step * (n - 1) for step, n in zip(x.strides, x.shape, strict=True) if step < 0)
            span = x.itemsize + sum(abs(step) * (n - 1) for step, n in zip(x.strides, x.shape, strict=True))
        if not x.flags.aligned:
            shift = x.__array_interface__["data"][0] % x.itemsize
        low = -(-end // ALIGNED) * ALIGNED + shift
        end = low + span + GUARD
        return Slot(name, dtype_name(x.dtype), x.shape, x.strides, low + below, low, span)

    slots = tuple(slot(name, x) for name, x in inputs.items() if x is not None)
    return Plan(slots, tuple(slot(name, x) for name, x in outputs), end)


def view(memory: Any, slot: Slot) -> NumpyArray:
    """The slot's array over the arena."""
    return _window(memory, slot, numpy_dtype(slot.dtype), slot.first)


def _window(memory: Any, slot: Slot, dtype: np.dtype[Any], first: int) -> NumpyArray:
    return np.ndarray(slot.shape, dtype, memory, first if slot.span else 0, slot.strides)


def fill(memory: Bytes, layout: Plan, inputs: Mapping[str, NumpyArray | None], poison: str = "nan") -> None:
    """Canaries everywhere, then the inputs with all that is in their gaps, then poison in the outputs."""
    memory[: layout.nbytes] = CANARY
    for slot in layout.inputs:
        source = inputs[slot.name]
        assert source is not None
        if source.flags.c_contiguous and source.ndim and slot.span:
            memory[slot.low : slot.low + slot.span] = source.reshape(-1).view(np.uint8)
        elif slot.span:
            lowest = source.__array_interface__["data"][0] - (slot.first - slot.low)
            raw = (ctypes.c_uint8 * slot.span).from_address(lowest)
            memory[slot.low : slot.low + slot.span] = np.ctypeslib.as_array(raw)
    for slot in layout.outputs:
        words = view(memory, slot).view(f"u{numpy_dtype(slot.dtype).itemsize}")
        words[...] = POISONS[poison][slot.dtype]


def poisoned(x: NumpyArray, poison: str) -> Any:
    """Where an output still has the poison."""
    return x.view(f"u{x.itemsize}") == POISONS[poison][str(x.dtype)]


def same_bytes(one: Bytes, other: Bytes) -> bool:
    """Whether two runs of memory are equal; in pieces, so that it takes no memory of its own."""
    pieces = range(0, len(one), _PIECE)
    return len(one) == len(other) and all(
        one[i : i + _PIECE].tobytes() == other[i : i + _PIECE].tobytes() for i in pieces
    )


class Trespass(NamedTuple):
    """A write that was not allowed: the input whose bytes changed ('' none), and where, in words."""

    array: str
    message: str


def trespasses(before: Bytes, after: Bytes, layout: Plan) -> list[Trespass]:
    """What changed between two states of the arena, other than elements of outputs."""
    if not layout.outputs and same_bytes(before, after):
        return []
    changed = before != after
    for slot in layout.outputs:
        elements = np.zeros(len(before), np.bool_)
        for byte in range(numpy_dtype(slot.dtype).itemsize if slot.span else 0):
            _window(elements, slot, np.dtype(np.bool_), slot.first + byte)[...] = True
        changed &= ~elements
    found = []
    for slot in layout.inputs:
        part = changed[slot.low : slot.low + slot.span]
        if part.any():
            found.append(_mutation(slot, before, after))
            part[...] = False
    if changed.any():
        found.append(Trespass("", _outside(np.flatnonzero(changed), layout)))
    return found


def _mutation(slot: Slot, before: Bytes, after: Bytes) -> Trespass:
    old, new = (view(memory, slot) for memory in (before, after))
    words = f"u{numpy_dtype(slot.dtype).itemsize}"
    differs = old.view(words) != new.view(words)
    if not differs.any():
        return Trespass(slot.name, f"bytes between the elements of {slot.name} changed during the call")
    place = tuple(int(i) for i in np.argwhere(differs)[0])
    numbers = f"{slot.name}{list(place)} was {float(old[place])!r} and is {float(new[place])!r}"
    return Trespass(slot.name, f"{int(differs.sum())} of {differs.size} elements changed: {numbers}")


def _outside(where: Any, layout: Plan) -> str:
    slots = (*layout.inputs, *layout.outputs)
    first = int(where[0])

    def distance(slot: Slot) -> int:
        return max(slot.low - first, first - (slot.low + slot.span) + 1, 0)

    nearest = min(slots, key=distance, default=None)
    if nearest is None:
        return f"{len(where)} bytes changed"
    item = numpy_dtype(nearest.dtype).itemsize
    if nearest.low <= first < nearest.low + nearest.span:
        return f"{len(where)} bytes changed between the elements of {nearest.name}"
    side = "before" if first < nearest.low else "past the end of"
    return f"{len(where)} bytes changed {side} {nearest.name}, {-(-distance(nearest) // item)} elements away"
