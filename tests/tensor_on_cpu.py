"""The tensor-core backend on NumPy arrays: its own steps and kernels on the CPU, products in NumPy."""

import contextlib
import ctypes
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import shim

from ropegrad import qkv_plan
from ropegrad.arrays import numpy_dtype
from ropegrad.backends import cublas, cupy_tensor, qkv_launch
from ropegrad.backends.cublas_narrow import Narrow
from ropegrad.backends.hopper import Both
from ropegrad.backends.qkv_access import Placed, standing_of
from ropegrad.backends.qkv_instance import ENTRIES, THREADS, Instance, kernel_text
from ropegrad.backends.qkv_launch import Launch, Processor, Room, Steps, prepare
from ropegrad.backends.qkv_status import STATE, status_of
from ropegrad.backends.qkv_workspace import CUBLAS, operand, workspace
from ropegrad.spec import QkvSpec
from ropegrad.verify import runners
from ropegrad.verify.case import Case, NumpyArray

Arrays = dict[str, NumpyArray]
Fault = tuple[str, str]
DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Launching:
    """How the kernels are launched.

    order: of threads. fault: text of the kernels and what stands in its place. into: outputs lie in every
    second row of larger arrays. flushes: the products' results lose subnormals, as a GPU's may. widest:
    channels an access. hopper: the GPU that is stood in for.
    """

    order: int = 0
    fault: Fault | None = None
    into: bool = False
    flushes: bool = False
    widest: int = 8
    hopper: bool = False


PLAIN = Launching()


def run(case: Case, launching: Launching = PLAIN) -> Arrays:
    """The gradients of this case: a function for `check`."""
    return whole(case, launching)[0]


def whole(case: Case, launching: Launching = PLAIN) -> tuple[Arrays, np.void]:
    """The gradients, and the state that the kernels leave."""
    arrays, memory, steps = prepared(case, launching)
    assert isinstance(case.spec, QkvSpec)
    execute(case.spec, steps, [*arrays.values(), memory[: memory.size - CUBLAS]], launching)
    state = memory[: STATE.itemsize].view(STATE)[0] if memory.size else np.zeros((), STATE)[()]
    return {name: arrays[name] for name in case.outputs}, state


def prepared(case: Case, launching: Launching = PLAIN) -> tuple[Arrays, NumpyArray, Steps]:
    """Inputs and outputs by name, the workspace, and what is to be done."""
    spec = case.spec
    assert isinstance(spec, QkvSpec)
    arrays = {name: shim.apart(x) for name, x in case.inputs.items() if x is not None}
    for need in spec.needs:
        arrays[f"grad_{need}"] = _output(case, need, launching.into)
    placed = {name: place(x) for name, x in arrays.items()}
    size = workspace(spec, standing_of(spec, placed)).size
    memory = shim.empty(size, np.uint8)
    with mock.patch.object(qkv_launch, "vectors", functools.partial(_narrower, launching.widest)):
        at = memory.__array_interface__["data"][0]
        return arrays, memory, prepare(spec, placed, Room(at, at), Processor(2, launching.hopper))


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
            block = (THREADS[step.entry],)
            kernels[step.entry]((step.grid,), block, given, arrays=arrays, order=launching.order)
        elif isinstance(step, Narrow):
            multiply(step, operand(spec), launching.flushes)
        elif isinstance(step, Both):
            multiply_both(step)
        else:
            _at(step.address, (step.size,), (1,), np.uint8)[...] = 0


def multiply(p: Narrow, name: str, flushes: bool) -> None:
    """What cuBLAS computes, at these addresses."""
    dtype = numpy_dtype(name)
    shape = (p.k, p.m) if p.transposed else (p.m, p.k)
    left = _at(p.left, shape, (p.left_pitch, dtype.itemsize), dtype).astype(np.float32)
    right = _at(p.right, (p.k, p.n), (p.right_pitch, dtype.itemsize), dtype).astype(np.float32)
    out = _at(p.out, (p.m, p.n), (4 * p.n, 4), np.float32)
    alpha, beta = (_at(at, (1,), (4,), np.float32)[0] for at in (p.alpha, p.beta))
    with np.errstate(all="ignore"):
        made = alpha * ((left.T if p.transposed else left) @ right)
        made = made + beta * out if beta else made
    if flushes and dtype != np.float32:  # tensor cores may, float32's units do not
        made[np.abs(made) < 2.0**-126] = 0
    out[...] = made


def multiply_both(step: Both) -> None:
    """What qkv_multiply.cu computes, at these addresses."""
    arguments, results = step.parameters
    state = _at(arguments[-1], (1,), (STATE.itemsize,), STATE)[0]
    terms = [_at(m.address, m[1:3], (m.pitch, 2), np.float16).astype(np.float64) for m in step.maps]
    d, x, w = ((terms[i], terms[i + 1]) for i in (0, 2, 4))
    at, columns = 0, arguments[15:18]
    outs = [(0, results[0], d, w)]
    for address, count in zip(results[1:], columns, strict=True):
        outs.append((1, address, tuple(one.T[at : at + count] for one in d), x))
        at += count
    for product, address, left, right in outs:
        if not address or state["recompute"][product]:
            continue
        with np.errstate(all="ignore"):
            small = left[0] @ right[1] + left[1] @ right[0]
            made = ((left[0] @ right[0] + small / 2**11) * state["alpha"][product]).astype(np.float32)
            out = _at(address, made.shape, (4 * made.shape[1], 4), np.float32)
            out[...] = made + out if step.entry == "qkv_multiply_add" else made


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


# ---- the public call ---------------------------------------------------------------------------------------

NUMBERS = {"qkv_mend": (11, 1), "qkv_biases": (6,)}  # behind the 68 of Arguments
STREAM, HANDLE = 7, 5


class Device:
    """What the backend's own Python asks of CuPy, the driver and cuBLAS; `called` is what it asked for."""

    def __init__(self) -> None:
        self.called: list[str] = []
        self.held: list[NumpyArray] = []
        self.kernels: list[tuple[str, Any]] = []

    def keep(self, x: NumpyArray) -> NumpyArray:
        self.held.append(x)
        return x

    def compiled(self, instance: Instance) -> dict[str, Any]:
        compile_all([instance])
        self.kernels = list(_kernels[instance, None].items())
        each = enumerate(self.kernels)
        return {entry: SimpleNamespace(kernel=SimpleNamespace(ptr=i)) for i, (entry, _) in each}

    def launch(self, function: int, *given: int) -> None:
        gx, gy, gz, bx, by, bz, shared, stream, pointers, extra = given
        assert (gy, gz, by, bz, shared, stream, extra) == (1, 1, 1, 1, 0, STREAM, 0)
        entry, kernel = self.kernels[function]
        self.called.append(entry)
        sizes = [8 * count for count in (68, *NUMBERS.get(entry, ()))]
        at = (ctypes.c_void_p * len(sizes)).from_address(pointers)
        arguments = [ctypes.string_at(at[i], size) for i, size in enumerate(sizes)]
        kernel((gx,), (bx,), arguments, arrays=self.held)

    def memset(self, address: int, value: int, size: int, stream: int) -> None:
        assert stream == STREAM
        ctypes.memset(address, value, size)

    def both(self, step: Both) -> None:
        self.called.append(step.entry)
        multiply_both(step)

    # ---- cuBLAS

    def cublasSetStream_v2(self, handle: Any, stream: Any) -> int:
        assert (handle.value, stream.value) == (HANDLE, STREAM)
        self.called.append("stream")
        return 0

    def cublasSetWorkspace_v2(self, handle: Any, at: Any, size: Any) -> int:
        assert at.value % 256 == 0
        assert any(0 <= at.value - place(x).address <= x.nbytes - size.value for x in self.held)
        self.called.append("workspace")
        return 0

    def cublasSetPointerMode_v2(self, handle: Any, mode: int) -> int:
        self.called.append(f"pointers {mode}")
        return 0

    def cublasGemmEx_64(
        self, handle: Any, no: int, transposed: int, n: Any, m: Any, k: Any, alpha: Any, right: Any,
        kind: int, right_step: Any, left: Any, left_kind: int, left_step: Any, beta: Any, out: Any,
        out_kind: int, out_step: Any, compute: int, algorithm: int,
    ) -> int:  # fmt: skip
        assert (no, left_kind, out_kind, out_step.value, algorithm) == (0, kind, 0, n.value, -1)
        name, item = {2: ("float16", 2), 14: ("bfloat16", 2), 0: ("float32", 4)}[kind]
        assert compute == (69 if kind == 0 else 68)
        assert self.called[-2:] == ["workspace", "pointers 1"]
        product = Narrow(
            left.value, item * left_step.value, bool(transposed), right.value, item * right_step.value,
            out.value, m.value, n.value, k.value, alpha.value, beta.value,
        )  # fmt: skip
        multiply(product, name, flushes=True)
        self.called.append("product")
        return 0


def place(x: NumpyArray) -> Placed:
    """As the backend's, of a NumPy array."""
    return Placed(x.__array_interface__["data"][0], x.shape, x.strides)


@contextlib.contextmanager
def on_cpu(hopper: bool = False) -> Iterator[Device]:
    """The backend without a device: its own Python, its own kernels."""
    import cupy
    import cupy.cuda.device

    device = Device()
    nowhere = contextlib.nullcontext
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (cupy, "empty", lambda shape, dtype: device.keep(shim.empty(shape, dtype))),
            (cupy.cuda.runtime, "getDevice", lambda: 0),
            (cupy.cuda.runtime, "memsetAsync", device.memset),
            (cupy.cuda, "get_current_stream", lambda: SimpleNamespace(ptr=STREAM)),
            (cupy.cuda.device, "get_cublas_handle", lambda: HANDLE),
            (cupy.cuda.driver, "launchKernel", device.launch),
            (cublas, "_library", lambda: device),
            (cupy_tensor, "processor", lambda number: Processor(2, hopper)),
            (cupy_tensor.hopper, "multiply", device.both),
            (cupy_tensor, "device_of", lambda inputs: nowhere()),
            (cupy_tensor, "place", place),
            (cupy_tensor, "compiled", device.compiled),
            (cupy_tensor.CupyTensor, "why_not", lambda self, spec: None),
            (qkv_plan, "device_of", lambda inputs: nowhere()),
            (qkv_plan, "read_status", lambda state: status_of(state.tobytes())),
            (runners, "to_namespace", lambda x, namespace: device.keep(shim.apart(x))),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield device
