"""The arrays that a function under test is given: its namespace's, over one arena."""

from __future__ import annotations

import importlib
from typing import Any

from ropegrad.arrays import Array, numpy_dtype
from ropegrad.verify.arena import Bytes, Plan, Slot, view
from ropegrad.verify.runners import to_namespace, to_numpy
from ropegrad.verify.target import Contract


class Place:
    """Arrays of the contract's namespace and device over one arena."""

    def __init__(self, contract: Contract, memory: Bytes) -> None:
        self.contract, self.memory = contract, memory
        self.shares = contract.arrays != "jax"
        self.device: Array | None = None
        if contract.device == "cuda":
            self.module = importlib.import_module(contract.arrays)
            xp = self.module
            self.device = xp.asarray(memory) if contract.arrays == "cupy" else xp.from_numpy(memory).cuda()

    def refill(self, memory: Bytes) -> None:
        """Take what memory of the same size and address holds now."""
        self.memory = memory
        if self.device is not None and self.contract.arrays == "cupy":
            self.device.set(memory)
        elif self.device is not None:
            self.device.copy_(self.module.from_numpy(memory))

    def __call__(self, slot: Slot) -> Array:
        """The array of one slot."""
        if self.device is None:
            array = view(self.memory, slot)
            if self.contract.arrays == "jax":
                return to_namespace(array.copy(), "jax")
            return to_namespace(array, self.contract.arrays)
        if self.contract.arrays == "cupy":
            memory = self.device.data + (slot.first if slot.span else 0)
            return self.module.ndarray(slot.shape, numpy_dtype(slot.dtype), memory, slot.strides)
        dtype = getattr(self.module, slot.dtype)
        item = dtype.itemsize
        steps = [step // item for step in slot.strides]
        storage = self.device.untyped_storage()
        empty = self.module.empty(0, dtype=dtype, device="cuda")
        return empty.set_(storage, slot.first // item if slot.span else 0, slot.shape, steps)

    def finish(self) -> None:
        """Wait for the device, and bring back what was written there."""
        if self.device is not None:
            (self.module.cuda.Device() if self.contract.arrays == "cupy" else self.module.cuda).synchronize()
            self.memory[...] = to_numpy(self.device)

    def strange(self, array: Any) -> str | None:
        """Why this is no array of the contract's namespace and device."""
        kind = type(array)
        home = kind.__module__.partition(".")[0]
        expected = {"numpy": "numpy", "torch": "torch", "cupy": "cupy", "jax": "jax"}[self.contract.arrays]
        if home not in (expected, "jaxlib") or not hasattr(array, "dtype") or not hasattr(array, "shape"):
            return f"is a {home}.{kind.__name__}, not an array of {expected}"
        if expected == "torch" and array.device.type != self.contract.device:
            return f"is on device {array.device}, its inputs are on {self.contract.device}"
        return None


class Given:
    """The arrays that calls are given: in every second call of a kind the same objects as before.

    So what a function remembers by the identity or the address of an array is not what the array holds. In
    between they are new objects, each made as soon as its predecessor is gone, and likely to have its `id`.
    """

    def __init__(self, contract: Contract) -> None:
        self.contract = contract
        self.kind: Any = None
        self.again = False
        self.arrays: dict[str, Array] = {}

    def __call__(self, memory: Bytes, layout: Plan) -> tuple[Place, dict[str, Array]]:
        """The place of all arrays of a call, and its inputs by name."""
        kind = (layout, memory.ctypes.data)
        same = kind == self.kind and self.contract.arrays != "jax"
        if not same:
            self.arrays, self.kind = {}, kind
            self.place = Place(self.contract, memory)
        else:
            self.place.refill(memory)
        self.again = same and not self.again
        for slot in layout.inputs:
            if self.again and _as_made(self.arrays[slot.name], slot):
                _changed(self.arrays[slot.name])
                continue
            self.arrays.pop(slot.name, None)
            self.arrays[slot.name] = self.place(slot)
        return self.place, dict(self.arrays)


def _as_made(array: Array, slot: Slot) -> bool:
    """Whether a function left shape and flags of its argument alone: who did not gets another object."""
    return tuple(array.shape) == slot.shape and not getattr(array, "requires_grad", False)


def _changed(array: Array) -> None:
    """Tell PyTorch that an array was written: functions may trust its count of versions."""
    if hasattr(array, "_version"):
        importlib.import_module("torch").autograd.graph.increment_version(array)
