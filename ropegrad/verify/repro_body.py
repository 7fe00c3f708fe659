"""The part of a reproducing script that is the same for every fault: `repro` puts the data before it.

Runs without ropegrad: this file's text is copied into the script.
"""
# ruff: noqa: D103

from __future__ import annotations

import base64
import ctypes
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
    return np.frombuffer(zlib.decompress(base64.b85decode(text)), number_type(dtype)).reshape(shape).copy()


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
    right = f"exactly {exact[at]:.9g}, may be off by {bound[at]:.2g}"
    if np.broadcast_to(state, wrong.shape)[at] == 3:
        right = "must be NaN or Inf"
    numbers = f"{name}{list(at)} is {got[at]:.9g}, {right}"
    return f"{numbers}; {int(wrong.sum())} of {wrong.size} elements wrong"


def room(shape: tuple[int, ...], kind: Any) -> tuple[Any, Any]:
    """An output that holds a number, and the memory with it and 4096 bytes on both of its sides."""
    size = int(np.prod(shape)) * kind.itemsize
    memory = np.full(size + 8192, 255, np.uint8)
    memory[4096 : 4096 + size].view(kind)[...] = -1975.0
    return memory[4096 : 4096 + size].view(kind).reshape(shape), memory


def results_by_name(results: Any, names: list[str]) -> dict[str, Any]:
    if isinstance(results, dict):
        return {name: results.get(name) for name in names}
    results = results if isinstance(results, (tuple, list)) else (results,)
    return dict(zip(names, (*results, *[None] * len(names)), strict=False))


def surplus(results: Any, names: list[str], most: int) -> list[str]:
    if isinstance(results, dict):
        more = [name for name, x in results.items() if name not in names and x is not None]
        return [f"the result has {', '.join(more)}, too"] if more else []
    if not isinstance(results, (tuple, list)):
        return []
    many = len(results) > max(len(names), most) or any(x is not None for x in results[len(names) :])
    return [f"the result has {len(results)} values, not {len(names)}"] if many else []


# ---- arrays of other libraries -------------------------------------------------------------------------


def as_given(x: Any, arrays: str, device: str, memory: Any = None) -> tuple[Any, Any]:
    """x as the target takes it, in the same memory or a copy of it on the device, and all that memory."""
    if arrays == "numpy":
        return x, memory
    library = importlib.import_module(arrays)
    if device == "cpu":
        bits = x.view(np.int16) if x.dtype.name == "bfloat16" else x
        return library.from_numpy(bits).view(getattr(library, x.dtype.name)), memory
    first = 0 if memory is None else 4096
    if memory is None:
        span = x.itemsize + sum(step * (n - 1) for step, n in zip(x.strides, x.shape, strict=True))
        raw = (ctypes.c_uint8 * span).from_address(x.ctypes.data) if x.size else (ctypes.c_uint8 * 16)()
        memory = np.ctypeslib.as_array(raw).copy()
    if arrays == "cupy":
        there = library.asarray(memory)
        return library.ndarray(x.shape, x.dtype, there.data + first, x.strides), there
    there = library.from_numpy(memory).cuda()
    empty = library.empty(0, dtype=getattr(library, x.dtype.name), device="cuda")
    steps = [step // x.itemsize for step in x.strides]
    return empty.set_(there.untyped_storage(), first // x.itemsize, x.shape, steps), there


def as_numpy(x: Any) -> Any:
    """The numbers of an array, wherever it is; the same memory if it is NumPy's or PyTorch's on the CPU."""
    if hasattr(x, "detach"):
        x = x.detach().cpu().resolve_conj().resolve_neg()
        if str(x.dtype) == "torch.bfloat16":
            return x.view(importlib.import_module("torch").int16).numpy().view(number_type("bfloat16"))
        return x.numpy()
    return x if (isinstance(x, np.ndarray) and type(x) is np.ndarray) or not hasattr(x, "get") else x.get()


def overlap(one: Any, other: Any) -> bool:
    """Whether two arrays surely share memory; on a device by their first and last addresses."""
    ranges = []
    for x in (one, other):
        if hasattr(x, "data_ptr"):
            ranges.append((x.data_ptr(), x.data_ptr() + x.numel() * x.element_size()))
        elif hasattr(x, "get"):
            ranges.append((x.data.ptr, x.data.ptr + x.nbytes))
    if len(ranges) < 2:
        return bool(np.shares_memory(one, other))
    return bool(max(low for low, _ in ranges) < min(high for _, high in ranges))


def differentiated(function: Any, inputs: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """A differentiable forward's values, and what torch.autograd gives for the upstream gradients."""
    torch = importlib.import_module("torch")
    leaves = {n: x.detach() for n, x in inputs.items() if not n.startswith("grad_")}
    for name, leaf in leaves.items():
        leaf.requires_grad_(f"grad_{name}" in names)
    values = results_by_name(function(*leaves.values()), [n for n in names if not n.startswith("grad_")])
    upstream = [x for n, x in inputs.items() if n.startswith("grad_")]
    pairs = [(v, up) for v, up in zip(values.values(), upstream, strict=True) if v.requires_grad]
    wanted = [n for n in names if n.startswith("grad_")]
    grads = [None] * len(wanted)
    if pairs:
        of = [leaves[n.removeprefix("grad_")] for n in wanted]
        ups = [up.to(v.dtype) for v, up in pairs]
        grads = torch.autograd.grad([v for v, _ in pairs], of, ups, allow_unused=True)
    return {**dict(zip(wanted, grads, strict=True)), **values}


# ---- the calls -----------------------------------------------------------------------------------------


def same(name: str, x: Any, how: dict[str, Any]) -> Any:
    """The object that the calls before were given, refilled: what is remembered of an object shows."""
    if how["arrays"] != "numpy" or x.strides != np.empty(x.shape, x.dtype).strides or not x.flags.aligned:
        return x
    given = how.setdefault("given", {})
    if name not in given or given[name].shape != x.shape:
        given[name] = x.copy()
    np.copyto(given[name], x)
    return given[name]


def judge_call(function: Any, call: dict[str, Any], how: dict[str, Any], kept: list[Any]) -> list[str]:
    """Call the function once; sentences about what is wrong."""
    arrays, device, dps = how["arrays"], how["device"], how["dps"]
    inputs = {name: as_given(same(name, x, how), arrays, device)[0] for name, x in call["inputs"].items()}
    before = {name: as_numpy(x).tobytes() for name, x in inputs.items()}
    names = list(call["exact"])
    rooms = [room(call["exact"][n].shape, number_type(call["dtypes"][n])) for n in names] if dps else []
    given = [as_given(x, arrays, device, memory) for x, memory in rooms]
    if how["forward"]:
        found = differentiated(function, inputs, names)
    else:
        results = function(*inputs.values(), *(x for x, _ in given))
        found = results_by_name([x for x, _ in given] if dps else results, names)
    faults = [f"{name} was changed" for name, x in inputs.items() if as_numpy(x).tobytes() != before[name]]
    if not how["forward"] and not dps:
        faults += surplus(results, names, how["most"])
    for name, (_, memory) in zip(names, given, strict=False):
        edges = as_numpy(memory)
        if (edges[:4096] != 255).any() or (edges[-4096:] != 255).any():
            faults.append(f"memory beside {name} was written")
    for name, got in found.items():
        faults += faults_of_output(name, got, call, arrays)
        others = {**inputs, **{n: x for n, x in found.items() if n != name}} if got is not None else {}
        if not dps and not how["forward"]:
            shared = [n for n, x in others.items() if x is not None and overlap(got, x)]
            faults += [f"{name} shares memory with {other}" for other in shared]
    for n, x, old in kept:
        again = [name for name, got in found.items() if got is not None and not dps and overlap(got, x)]
        if as_numpy(x).tobytes() != old:
            faults.append(f"{n} of an earlier call was changed")
        faults += [f"{name} is in the memory of an earlier call's {n}" for name in again]
    kept += [(n, x, as_numpy(x).tobytes()) for n, x in found.items() if x is not None and not dps]
    return faults


def faults_of_output(name: str, got: Any, call: dict[str, Any], arrays: str) -> list[str]:
    home = type(got).__module__.partition(".")[0]
    if got is not None and home != arrays:
        return [f"{name} is a {home}.{type(got).__name__}, not an array of {arrays}"]
    exact, dtype = call["exact"][name], call["dtypes"][name]
    got = None if got is None else as_numpy(got)
    fault = faults_of_form(name, got, exact, dtype)
    return list(filter(None, [
        fault or fault_of_values(name, got, exact, call["bound"][name], call["state"][name])
    ]))  # fmt: skip


def main(target: str, calls: list[dict[str, Any]], how: dict[str, Any], seconds: float) -> int:
    """Put the calls to the target, the first one again at the end; 1 if anything is wrong."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    function = function_named(target)
    kept: list[Any] = []
    status = 0
    for number, call in enumerate([*calls, calls[0]], start=1):
        for fault in judge_call(function, call, how, kept):
            print(f"call {number}: {fault}")
            status = 1
    print("wrong" if status else "right")
    return status
