"""The tensor-core backend on NumPy arrays: its own steps and kernels on the CPU, products in NumPy."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import shim

from ropegrad.arrays import numpy_dtype
from ropegrad.backends import qkv_launch
from ropegrad.backends.cublas_narrow import Narrow
from ropegrad.backends.qkv_instance import ENTRIES, THREADS, Instance, kernel_text
from ropegrad.backends.qkv_launch import OPERANDS, Launch, Placed, Room, Steps, aside_of, prepare
from ropegrad.backends.qkv_status import STATE
from ropegrad.backends.qkv_workspace import CUBLAS, workspace
from ropegrad.spec import QkvSpec
from ropegrad.verify.case import Case, NumpyArray

Arrays = dict[str, NumpyArray]
Fault = tuple[str, str]
DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Launching:
    """How the kernels are launched.

    order: of threads. fault: text of the kernels and what stands in its place. into: outputs lie in every
    second row of larger arrays. flushes: the products' results lose subnormals, as a GPU's may. widest:
    channels an access.
    """

    order: int = 0
    fault: Fault | None = None
    into: bool = False
    flushes: bool = False
    widest: int = 8


PLAIN = Launching()


def run(case: Case, launching: Launching = PLAIN) -> Arrays:
    """The gradients of this case: a function for `check`."""
    return whole(case, launching)[0]


def whole(case: Case, launching: Launching = PLAIN) -> tuple[Arrays, np.void]:
    """The gradients, and the state that the kernels leave."""
    spec = case.spec
    assert isinstance(spec, QkvSpec)
    arrays = {name: shim.apart(x) for name, x in case.inputs.items() if x is not None}
    for need in spec.needs:
        arrays[f"grad_{need}"] = _output(case, need, launching.into)
    placed = {n: Placed(x.__array_interface__["data"][0], x.shape, x.strides) for n, x in arrays.items()}
    size = workspace(spec, aside_of(spec, placed)).size
    memory = shim.empty(size, np.uint8)
    with mock.patch.object(qkv_launch, "vectors", functools.partial(_narrower, launching.widest)):
        at = memory.__array_interface__["data"][0]
        steps = prepare(spec, placed, Room(at, at), 2)
    execute(spec, steps, [*arrays.values(), memory[: size - CUBLAS]], launching)
    state = memory[: STATE.itemsize].view(STATE)[0] if size else np.zeros((), STATE)[()]
    return {name: arrays[name] for name in case.outputs}, state


_vectors = qkv_launch.vectors


def _narrower(widest: int, spec: QkvSpec, arrays: dict[str, Placed]) -> tuple[int, int]:
    vector, matrix_vector = _vectors(spec, arrays)
    return min(vector, widest), min(matrix_vector, widest)


def _output(case: Case, need: str, into: bool) -> NumpyArray:
    shape, name = case.spec.output(need)
    dtype = numpy_dtype(name)
    out = shim.empty((2 * shape[0], *shape[1:]), dtype)[::2] if into else shim.empty(shape, dtype)
    if case.spec.accumulate:
        out[...] = case.prior[f"grad_{need}"]
    return out


def execute(spec: QkvSpec, steps: Steps, arrays: list[NumpyArray], launching: Launching) -> None:
    """Every step."""
    compile_all([steps.instance], launching.fault)
    kernels = _kernels[steps.instance, launching.fault]
    for step in steps.steps:
        if isinstance(step, Launch):
            given = [parameter.tobytes() for parameter in step.parameters]
            kernels[step.entry](
                (step.grid,), (THREADS[step.entry],), given, arrays=arrays, order=launching.order
            )
        elif isinstance(step, Narrow):
            multiply(step, OPERANDS[spec.precision], launching.flushes)
        else:
            _at(step.address, (step.size,), (1,), np.uint8)[...] = 0


def multiply(p: Narrow, operand: str, flushes: bool) -> None:
    """What cuBLAS computes, at these addresses."""
    dtype = numpy_dtype(operand)
    shape = (p.k, p.m) if p.transposed else (p.m, p.k)
    left = _at(p.left, shape, (p.left_pitch, 2), dtype).astype(np.float32)
    right = _at(p.right, (p.k, p.n), (p.right_pitch, 2), dtype).astype(np.float32)
    out = _at(p.out, (p.m, p.n), (4 * p.n, 4), np.float32)
    alpha, beta = (_at(at, (1,), (4,), np.float32)[0] for at in (p.alpha, p.beta))
    with np.errstate(all="ignore"):
        made = alpha * ((left.T if p.transposed else left) @ right)
        made = made + beta * out if beta else made
    if flushes:
        made[np.abs(made) < 2.0**-126] = 0
    out[...] = made


def _at(address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> NumpyArray:
    interface = {
        "version": 3, "typestr": f"|V{np.dtype(dtype).itemsize}",
        "data": (address, False), "shape": shape, "strides": strides,
    }  # fmt: skip
    holder = type("Holder", (), {"__array_interface__": interface})()
    return np.asarray(holder).view(dtype)


_kernels: dict[tuple[Instance, Fault | None], dict[str, Any]] = {}


def compile_all(instances: Iterable[Instance], fault: Fault | None = None) -> None:
    """Compile those that are not yet, as one program: its text takes longer than an instance of it."""
    new = [one for one in dict.fromkeys(instances) if (one, fault) not in _kernels]
    if not new:
        return
    text = kernel_text()
    if fault is not None:
        assert text.count(fault[0]) == 1, f"{text.count(fault[0])} places have {fault[0]!r}"
        text = text.replace(*fault)
    module = shim.RawModule(
        code=text + "".join(one.definition(f"_{i}") for i, one in enumerate(new)),
        name_expressions=[f"{entry}_{i}" for i in range(len(new)) for entry in ENTRIES],
    )
    for i, one in enumerate(new):
        _kernels[one, fault] = {entry: module.get_function(f"{entry}_{i}") for entry in ENTRIES}
