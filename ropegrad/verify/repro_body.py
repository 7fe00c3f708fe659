"""The part of a reproducing script that is the same for every fault: `repro` puts the data before it.

Runs without ropegrad: this file's text is copied into the script.
"""
# ruff: noqa: D103

from __future__ import annotations

import base64
import faulthandler
import importlib
import importlib.util
import os
import sys
import zlib
from typing import Any

import numpy as np


def number_type(name: str) -> Any:
    if name == "bfloat16":
        return np.dtype(importlib.import_module("ml_dtypes").bfloat16)
    return np.dtype(name)


def unpack(text: str, dtype: str, shape: tuple[int, ...]) -> Any:
    return np.frombuffer(zlib.decompress(base64.b85decode(text)), number_type(dtype)).reshape(shape)


def lay(x: Any, strides: tuple[int, ...], shift: int = 0) -> Any:
    """The values of x in memory with these strides (bytes), `shift` bytes off alignment, NaN all around."""
    below = -sum(step * (n - 1) for step, n in zip(strides, x.shape, strict=True) if step < 0)
    above = sum(step * (n - 1) for step, n in zip(strides, x.shape, strict=True) if step > 0)
    memory = np.full(below + above + x.itemsize + 256, 255, np.uint8)
    start = -memory.__array_interface__["data"][0] % 64 + 64 + shift + below
    view = np.ndarray(x.shape, x.dtype, memory.data, start, strides)
    view[...] = x
    return view


def function_named(target: str) -> Any:
    place, _, name = target.rpartition(":")
    if place.endswith(".py"):
        sys.path.insert(0, os.path.dirname(place))
        spec = importlib.util.spec_from_file_location(os.path.basename(place)[:-3], place)
        assert spec is not None
        assert spec.loader is not None
        found: Any = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = found
        spec.loader.exec_module(found)
    else:
        sys.path.insert(0, os.getcwd())
        found = importlib.import_module(place)
    for part in name.split("."):
        found = getattr(found, part)
    return found() if isinstance(found, type) else found


def faults_of_form(name: str, got: Any, exact: Any, dtype: str) -> str | None:
    if got is None:
        return f"{name} is None"
    if got.shape != exact.shape or str(got.dtype) != dtype:
        return f"{name} is {got.dtype} {list(got.shape)}, it must be {dtype} {list(exact.shape)}"
    return None


def fault_of_values(name: str, got: Any, exact: Any, bound: Any, state: Any) -> str | None:
    """state: 0 must be finite, 1 Inf of the exact sign, 2 either, 3 must not be finite."""
    got = got.astype(np.float64)
    with np.errstate(all="ignore"):
        off = ~(np.abs(got - exact) <= bound)
        finite = np.isfinite(got)
        wrong = np.where(state == 3, finite, finite & off & ~np.isnan(exact))
        wrong |= (state == 0) & ~finite | (state == 1) & (got != np.copysign(np.inf, exact))
    if not wrong.any():
        return None
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    numbers = f"{name}{list(at)} is {got[at]:.9g}, exactly {exact[at]:.9g}, may be off by {bound[at]:.2g}"
    return f"{numbers}; {int(wrong.sum())} of {wrong.size} elements wrong"


def room(shape: tuple[int, ...], kind: Any) -> tuple[Any, list[Any]]:
    """An output that holds a number, and the memory on both sides of it."""
    size = int(np.prod(shape)) * kind.itemsize
    memory = np.full(size + 8192, 255, np.uint8)
    inside = memory[4096 : 4096 + size].view(kind).reshape(shape)
    inside[...] = -1975.0
    return inside, [memory[:4096], memory[4096 + size :]]


def results_by_name(results: Any, names: list[str]) -> dict[str, Any]:
    if isinstance(results, dict):
        return {name: results.get(name) for name in names}
    results = results if isinstance(results, (tuple, list)) else (results,)
    return dict(zip(names, (*results, *[None] * len(names)), strict=False))


def judge_call(function: Any, call: dict[str, Any], dps: bool, kept: list[Any]) -> list[str]:
    """Call the function once; sentences about what is wrong."""
    inputs = call["inputs"]
    before = {name: x.tobytes() for name, x in inputs.items()}
    names = list(call["exact"])
    rooms = [room(call["exact"][n].shape, number_type(call["dtypes"][n])) for n in names]
    given = [inside for inside, _ in rooms]
    results = function(*inputs.values(), *(given if dps else []))
    found = dict(zip(names, given, strict=True)) if dps else results_by_name(results, names)
    faults = [f"{name} was changed" for name, x in inputs.items() if x.tobytes() != before[name]]
    faults += [f"memory beside {n} was written" for n, (_, edges) in zip(names, rooms, strict=True)
               if any((edge != 255).any() for edge in edges)]  # fmt: skip
    for name, got in found.items():
        exact, bound, state = call["exact"][name], call["bound"][name], call["state"][name]
        fault = faults_of_form(name, got, exact, call["dtypes"][name])
        fault = fault or fault_of_values(name, got, exact, bound, state)
        faults += [fault] if fault else []
        others = {**inputs, **{n: x for n, x in found.items() if n != name}}
        if got is not None and not dps:
            shared = [n for n, x in others.items() if x is not None and np.shares_memory(got, x)]
            faults += [f"{name} shares memory with {other}" for other in shared]
    faults += [f"{n} of the call before was changed" for n, x, old in kept if x.tobytes() != old]
    kept[:] = [(n, x, x.tobytes()) for n, x in found.items() if x is not None and not dps]
    return faults


def main(target: str, calls: list[dict[str, Any]], dps: bool, seconds: float) -> int:
    """Put the calls to the target, the first one again at the end; 1 if anything is wrong."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    function = function_named(target)
    kept: list[Any] = []
    status = 0
    for number, call in enumerate([*calls, calls[0]], start=1):
        for fault in judge_call(function, call, dps, kept):
            print(f"call {number}: {fault}")
            status = 1
    print("wrong" if status else "right")
    return status
