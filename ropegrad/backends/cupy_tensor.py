"""Gradients of the QKV projections by one memory pass and two products, at every promise.

The pass (kernels/qkv_pass.cu) undoes RoPE and lays the gradients out as one matrix: in float32 for IEEE
products, or, with hidden states and weights, as scaled 16-bit numbers for tensor cores, as accurate as TF32
or bfloat16 promise on any range. `qkv_launch` says which steps; here they are made, on the arrays' device and
the current stream, without waiting for the device: a CUDA graph can capture all of it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np

from ropegrad.arrays import Array, numpy_dtype
from ropegrad.backends import hopper
from ropegrad.backends.base import Inputs, Outputs
from ropegrad.backends.cublas_narrow import Narrow, multiply_narrow
from ropegrad.backends.cupy_plain import CupyPlain
from ropegrad.backends.qkv_access import Placed, standing_of, vectors
from ropegrad.backends.qkv_instance import ENTRIES, THREADS, Instance
from ropegrad.backends.qkv_launch import (
    PROMOTED,
    SHORT,
    Fill,
    Launch,
    Processor,
    Room,
    Steps,
    prepare,
)
from ropegrad.backends.qkv_status import Status, status_of
from ropegrad.backends.qkv_workspace import (
    ALIGNED,
    CUBLAS,
    STATE,
    operand,
    products_of,
    terms,
    workspace,
)
from ropegrad.backends.rope_bound import on_device
from ropegrad.errors import SpecError
from ropegrad.spec import QkvSpec, RopeSpec

_PLAIN = CupyPlain()
OLDEST = 80  # compute capability: conversion to bfloat16, and its tensor cores
MOST = 1 << 31  # of tokens, and of columns


@dataclass(frozen=True)
class CupyTensor:
    """qkv_rope_backward in float32; the forward is cupy_plain's."""

    name: str = "cupy_tensor"

    def why_not(self, spec: RopeSpec | QkvSpec) -> str | None:
        """It wants CuPy arrays, and sums in float32."""
        if importlib.util.find_spec("cupy") is None:
            return "CuPy is not installed (extra cuda12 or cuda13)"
        if spec.namespace != "cupy":
            return f"it runs CuPy arrays, these are of {spec.namespace}"
        if isinstance(spec, RopeSpec):
            return "it has the projections' gradients alone"
        if spec.rope.compute == "float64":
            return "it sums in float32, this is float64"
        if max(spec.tokens, spec.hidden_size or 0, *map(spec.rows, "qkv")) >= MOST:
            return f"a matrix with {MOST:,} rows or columns, or more"
        return _too_old()

    def explain(self, spec: RopeSpec | QkvSpec, inputs: Inputs) -> list[str]:
        """The steps, the rule of the scales, the memory."""
        assert isinstance(spec, QkvSpec)
        return describe(spec, vectors(spec, {name: place(x) for name, x in inputs.items()}))

    def qkv_rope_backward(self, spec: QkvSpec, inputs: Inputs, out: Outputs | None) -> Outputs:
        """Gradients of the projections and RoPE; see `ropegrad.qkv_rope_backward`."""
        with device_of(inputs):
            results = out if out is not None else allocate(spec)
            run(spec, inputs | results)
        return results

    def rope_backward(self, spec: RopeSpec, inputs: Inputs, out: Outputs | None) -> Outputs:
        """Not here."""
        raise AssertionError(self.why_not(spec))

    def rope(self, spec: RopeSpec, inputs: Inputs) -> Outputs:
        """Not here."""
        raise AssertionError(self.why_not(spec))

    def qkv_rope(self, spec: QkvSpec, inputs: Inputs) -> Outputs:
        """Projections and RoPE, by cupy_plain; see `ropegrad.qkv_rope`."""
        return _PLAIN.qkv_rope(spec, inputs)


def _too_old() -> str | None:
    try:
        import cupy

        capability = int(cupy.cuda.Device().compute_capability)
    except Exception:  # no GPU at all: what comes first there says so
        return None
    if capability >= OLDEST:
        return None
    return f"it needs compute capability {OLDEST / 10}, this GPU has {capability / 10}"


def describe(spec: QkvSpec, widths: tuple[int, int]) -> list[str]:
    """The steps in words."""
    size = numpy_dtype(spec.rope.dtype).itemsize
    accesses = f"{widths[0] * size} and {widths[1] * size} bytes an access"
    room = f"workspace of {workspace(spec).size} bytes for contiguous arrays"
    if not terms(spec):
        return [
            f"one pass of qkv_pass.cu writes the rotated gradients as one float32 matrix, {accesses}, and "
            "copies hidden states and weights where cuBLAS cannot read them as they are; cuBLAS multiplies "
            "in IEEE float32, whatever switches say",
            room,
        ]
    if terms(spec) == 2:
        return [
            "one pass of qkv_pass.cu writes rotated gradients, hidden states and weights as two float16 "
            f"numbers an element, {accesses}; three products are made for one",
            "on Hopper (sm_90a), where results are float32, contiguous, an even number a row, one launch of "
            f"qkv_multiply.cu makes them; float32 takes over from tensor cores every {PROMOTED} terms",
            f"elsewhere cuBLAS makes them, and float32 takes over every {SHORT} terms",
            "one scale for a matrix, a power of two guessed from 256 elements; on the device, the small "
            "elements of rows and columns are counted: where they could be seen in a result, the product is "
            "computed anew in float32",
            room,
        ]
    return [
        f"one pass of qkv_pass.cu writes rotated gradients, hidden states and weights as {operand(spec)}, "
        f"{accesses}; cuBLAS multiplies with float32 sums",
        "scales are powers of two, guessed from 256 elements of each matrix and judged on the device by the "
        "maxima of rows and columns: one for a matrix; where its range is too wide, one for each token or "
        "channel of the gradients, for each column of hidden states and weights; where one operand is large "
        "just where the other is tiny, the product is computed anew in float32",
        room,
    ]


def describe_dense(spec: QkvSpec) -> list[str]:
    """The steps for contiguous arrays."""
    return describe(spec, vectors(spec, {}))


def read_status(state: Array) -> Status:
    """The status that a call has left; waits for the device."""
    return status_of(state.get().tobytes())


# ---- running -----------------------------------------------------------------------------------------------


def device_of(inputs: Inputs) -> contextlib.AbstractContextManager[Any]:
    """The inputs' device as the current one."""
    return on_device(next(iter(inputs.values())).data.device_id)


def place(x: Array) -> Placed:
    """Where an array stands."""
    return Placed(x.data.ptr, x.shape, x.strides)


def allocate(spec: QkvSpec) -> Outputs:
    """Fresh outputs on the current device, not written; the weights' are views of one buffer."""
    import cupy

    dtype, columns = numpy_dtype(spec.rope.dtype), spec.hidden_size or 0
    parts = [part for part in "qkv" if f"{part}_weight" in spec.needs]
    buffer = cupy.empty((sum(map(spec.rows, parts)), columns), dtype)
    made, start = {}, 0
    for part in parts:
        made[f"grad_{part}_weight"] = buffer[start : start + spec.rows(part)]
        start += spec.rows(part)
    for need in spec.needs:
        if not need.endswith("_weight"):
            made[f"grad_{need}"] = cupy.empty(spec.output(need)[0], dtype)
    return made


Memory = tuple[tuple[str, Placed], ...]  # the arrays of a call by name
MOST_CALLS = 1024  # whose steps are remembered


@functools.lru_cache(MOST_CALLS)
def needed(spec: QkvSpec, arrays: Memory) -> int:
    """Bytes of the workspace of a call on these inputs and outputs."""
    return workspace(spec, standing_of(spec, dict(arrays))).size


@functools.lru_cache(MOST_CALLS)
def prepared(spec: QkvSpec, arrays: Memory, room: Room, processor: Processor) -> Steps:
    """As `prepare`, which takes the host longer than a small problem takes the GPU."""
    return prepare(spec, dict(arrays), room, processor)


def run(spec: QkvSpec, arrays: dict[str, Array], memory: Array | None = None) -> Array | None:
    """All steps on judged inputs and outputs, on the current device and stream.

    memory: bytes of the device, as many as `needed` says; its first ones then hold the state. Returns the
    state's bytes, None where there are no scales. Raises SpecError where memory is too small.
    """
    import cupy

    placed = tuple([(name, place(x)) for name, x in arrays.items()])
    size = needed(spec, placed)
    state = cupy.empty(STATE, np.uint8) if memory is None else memory[:STATE]
    memory = cupy.empty(size, np.uint8) if memory is None else memory
    at, state_at = place(memory).address, place(state).address
    if memory.nbytes < size or at % ALIGNED:
        raise SpecError(
            f"the workspace has {memory.nbytes} bytes at address {at}: this call needs {size} "
            f"at a multiple of {ALIGNED}"
        )
    device = processor(cupy.cuda.runtime.getDevice())
    execute(prepared(spec, placed, Room(at, state_at), device))
    return state if terms(spec) and any(products_of(spec)) else None


@functools.cache
def processor(device: int) -> Processor:
    """A device's."""
    import cupy

    runtime = cupy.cuda.runtime
    count = int(runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, device))
    return Processor(count, hopper.is_hopper(device))


def execute(steps: Steps) -> None:
    """Make every step on the current stream."""
    import cupy

    kernels = compiled(steps.instance)
    for step in steps.steps:
        if isinstance(step, Launch):
            launch(kernels[step.entry], step)
        elif isinstance(step, hopper.Both):
            hopper.multiply(step)
        elif isinstance(step, Narrow):
            multiply_narrow(step, steps.instance.operand, steps.cublas, CUBLAS)
        else:
            assert isinstance(step, Fill)
            stream = cupy.cuda.get_current_stream().ptr
            cupy.cuda.runtime.memsetAsync(step.address, 0, step.size, stream)


def launch(kernel: Any, step: Launch) -> None:
    """One kernel; its parameters are copied while it is launched."""
    import cupy

    pointers = array("q", [parameter.buffer_info()[0] for parameter in step.parameters])
    cupy.cuda.driver.launchKernel(
        kernel.kernel.ptr, step.grid, 1, 1, THREADS[step.entry], 1, 1, 0,
        cupy.cuda.get_current_stream().ptr, pointers.buffer_info()[0], 0,
    )  # fmt: skip


@functools.cache
def compiled(instance: Instance) -> dict[str, Any]:
    """The kernels of an instance; CuPy compiles them at the first use on a device and keeps them on disk."""
    import cupy

    module = cupy.RawModule(code=instance.source())
    return {entry: module.get_function(entry) for entry in ENTRIES}
