"""Compile the CuPy backend's kernels for GPUs that are not here: no driver, no nvcc, only NVRTC's wheels.

CuPy makes a kernel's source when it is launched, so the source comes from private functions of CuPy 14.
Two CUDA versions cannot serve one CuPy, so NVRTC is called directly; its options are those of CuPy.
"""

import contextlib
import ctypes
import functools
import importlib.util
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from ropegrad.arrays import DTYPES
from ropegrad.backends import cupy_plain
from ropegrad.spec import QKV_NEEDS, QkvSpec, RopeSpec
from ropegrad.verify.draws import make_case

ARCHES = ("sm_80", "sm_90a", "sm_100a")
_LIBRARY = {12: "cuda_nvrtc/lib/libnvrtc.so.12", 13: "cu13/lib/libnvrtc.so.13"}
_HEADERS = {12: "cuda_runtime/include", 13: "cu13/include"}  # where cuda_fp16.h is
WHEELS = {
    12: ("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-runtime-cu12"),
    13: ("nvidia-cuda-nvrtc", "nvidia-cuda-runtime"),
}

# How CuPy sees an array once it has merged axes: axes, contiguous, 32-bit offsets.
LAYOUTS = {"contiguous": (1, True, True), "strided": (4, False, True), "strided64": (4, False, False)}
_ARRAY, _INDEXER, _SCALAR = 1, 2, 3  # CuPy's kinds of argument


@dataclass(frozen=True)
class Wanted:
    """A kernel as the backend asks for it: a function of cupy_plain, its arguments, the arrays' dtypes."""

    maker: str
    arguments: tuple[Any, ...]
    dtypes: tuple[np.dtype[Any], ...]

    def __str__(self) -> str:
        words = [str(x).replace(" ", "") for x in self.arguments]
        return f"{self.maker}({','.join(words)}) {' '.join(map(str, self.dtypes))}"


@dataclass(frozen=True)
class Compiled:
    """One kernel after ptxas. Memory in bytes."""

    kernel: str
    registers: int
    shared: int
    stack: int
    spilled: int
    ptx: str

    def faults(self) -> list[str]:
        """What may not be: memory for want of registers, float32 flushed to zero, products left unrounded."""
        found = [f"{self.stack} bytes of stack frame"] if self.stack else []
        found += [f"{self.spilled} bytes of spills"] if self.spilled else []
        return found + sorted(set(_INEXACT.findall(self.ptx)))


# A product or sum without .rn may be joined with the next into one fma.
_INEXACT = re.compile(
    r"\b(?:[a-z]\w*[\w.]*\.ftz\b[\w.]*|(?:fma|mad)\.[\w.]*f(?:32|64)|(?:mul|add|sub)\.f(?:32|64))\b"
)


def wanted() -> list[Wanted]:
    """Every kernel that the backend asks for, over dtypes, tables, heads and accumulation.

    The backend runs on NumPy arrays, with stand-ins for its kernels that note the call and compute nothing.
    """
    seen: dict[Wanted, None] = {}

    def stand_in(maker: str, reduces: bool) -> Callable[..., Any]:
        def make(compute: str, *arguments: Any) -> Callable[..., Any]:
            def kernel(*arrays: Any, axis: Any = None) -> Any:
                result = np.zeros_like(arrays[0], dtype=compute).sum(axis) if reduces else None
                dtypes = [x.dtype for x in (*arrays, result) if x is not None]
                seen[Wanted(maker, (compute, *arguments), tuple(dtypes))] = None
                return result

            return kernel

        return make

    makers = {"rotation": False, "combined": False, "table_sums": False, "summed": True}
    with mock.patch.multiple(
        cupy_plain,
        _cupy=lambda: np,
        _xp=lambda: importlib.import_module("array_api_compat.numpy"),
        _device_of=lambda inputs: contextlib.nullcontext(),
        _gemm=lambda a, b: np.zeros((a.shape[0], b.shape[1]), a.dtype),
        **{maker: stand_in(maker, reduces) for maker, reduces in makers.items()},
    ):
        for case in (make_case(spec, 0) for spec in _specs()):
            inputs = {name: x for name, x in case.inputs.items() if x is not None}
            out = case.prior if case.spec.accumulate else None
            plain = cupy_plain.CupyPlain()
            if isinstance(case.spec, QkvSpec):
                plain.qkv_rope_backward(case.spec, inputs, out)
                biases = ((f"{part}_bias", inputs[f"{part}_weight"][:, 0]) for part in "qkv")
                plain.qkv_rope(case.spec, inputs | dict(biases))
            else:
                plain.rope_backward(case.spec, inputs, out)
                sides = tuple(side for side in "qk" if side in inputs)
                plain.rope(replace(case.spec, needs=sides), inputs)
    return list(seen)


def _specs() -> Iterator[RopeSpec | QkvSpec]:
    choices = itertools.product(DTYPES, DTYPES, (False, True), ("full", "half"), (1, None))
    for dtype, table_dtype, accumulate, table, kv_heads in choices:
        rope = RopeSpec(
            batch=1, heads=2, kv_heads=kv_heads, seq=2, head_dim=4, rotary_dim=2, table_batch=1, table=table,
            dtype=dtype, table_dtype=table_dtype, accumulate=accumulate,
            needs=("q", "k", "cos", "sin") if kv_heads else ("q", "cos", "sin"),
        )  # fmt: skip
        yield rope
        if kv_heads:
            whole = replace(rope, rotary_dim=rope.head_dim, needs=())
            yield QkvSpec(rope=whole, hidden_size=2, needs=QKV_NEEDS)


def source(kernel: Wanted, layout: str) -> str:
    """CUDA C++ of a kernel with arrays of one of LAYOUTS, as CuPy would write it."""
    import cupy
    from cupy._core import _carray, _kernel, _reduction, _scalar

    made = getattr(cupy_plain, kernel.maker)(*kernel.arguments)
    axes, contiguous, short = LAYOUTS[layout]

    def array(dtype: np.dtype[Any], axes: int, contiguous: bool) -> Any:
        return _kernel._ArgInfo(_ARRAY, cupy.ndarray, dtype, axes, contiguous, short)

    def indexer(axes: int) -> Any:
        return _kernel._ArgInfo(_INDEXER, _carray.Indexer, None, axes, True, short)

    types = tuple(dtype.type for dtype in kernel.dtypes)
    inputs, outputs = kernel.dtypes[: made.nin], kernel.dtypes[made.nin :]
    *_, names = _kernel._decide_params_type(
        made.in_params, made.out_params, types[: made.nin], types[made.nin :]
    )
    given = tuple(array(dtype, axes, contiguous) for dtype in inputs)
    if isinstance(made, cupy.ElementwiseKernel):
        arrays = given + tuple(array(dtype, axes, contiguous) for dtype in outputs)
        return _kernel._get_elementwise_kernel_code(
            (*arrays, indexer(axes)), names, made.params, made.operation, made.name, made.preamble
        )
    names = _kernel._TypeMap((*names._pairs, ("IndexT", "int32" if short else "int64")))
    stride = _kernel._ArgInfo(_SCALAR, _scalar.CScalar, np.dtype("int32"), 0, True, True)
    kept = kept_axes(axes, len(outputs))
    results = tuple(array(dtype, kept, kept == 1) for dtype in outputs)
    infos = (*given, *results, indexer(axes), indexer(kept), stride)
    return _reduction._ReductionKernel_get_cached_function_code(
        made.nin, made.nout, made._params, infos, names, made.name, 512, made.reduce_type, made.identity,
        made.map_expr, made.reduce_expr, made.post_map_expr, made.preamble, made.options,
    )  # fmt: skip


def kept_axes(axes: int, results: int) -> int:
    """Axes of what a reduction writes; a lone result is fresh, so contiguous."""
    return max(axes - 1, 1) if results > 1 else 1


def program(sources: Iterable[str]) -> str:
    """Many kernels as one program, the i-th called kernel_i: CuPy's headers take longer than a kernel."""
    from cupy._core import core

    includes = dict.fromkeys(f"#include <{header}>" for header in core._cupy_header_list)
    parts = []
    for i, text in enumerate(sources):
        includes |= dict.fromkeys(re.findall(r"^\s*(#include .*)$", text, re.M))
        text = re.sub(r"^\s*#include .*$", "", text, flags=re.M)
        text = re.sub(r'extern "C" __global__ void \w+\(', f'extern "C" __global__ void kernel_{i}(', text)
        undone = "".join(f"#undef {name}\n" for name in re.findall(r"#define (\w+)", text))
        parts.append(f"namespace n{i} {{\n{text}\n}}\n{undone}")
    return "\n".join([*includes, *parts])


@functools.cache
def load(major: int) -> ctypes.CDLL | None:
    """NVRTC of CUDA 12 or 13 from its wheel; None if that or the headers' wheel is not installed."""
    found = _wheel_file(_LIBRARY[major])
    if found is None or _wheel_file(f"{_HEADERS[major]}/cuda_fp16.h") is None:
        return None
    library = ctypes.CDLL(str(found))
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    version = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(*map(ctypes.byref, version))
    assert version[0].value == major
    return library


def _wheel_file(name: str) -> Path | None:
    spec = importlib.util.find_spec("nvidia")
    folders = (spec and spec.submodule_search_locations) or ()
    return next((Path(folder, name) for folder in folders if Path(folder, name).exists()), None)


def options(major: int, arch: str) -> tuple[str, ...]:
    """What CuPy passes to NVRTC, with this CUDA's headers, this GPU, and ptxas talking."""
    import cupy
    from cupy._core import core

    ours = f"-I{Path(cupy.__file__).parent}"
    cupys = core.assemble_cupy_compiler_options(())
    kept = [option for option in cupys if option.startswith(("--", ours))]
    return (
        *kept, f"-I{_wheel_file(_HEADERS[major])}", "-ftz=true", f"-arch={arch}",
        "--device-as-default-execution-space", "--ptxas-options=-v",
    )  # fmt: skip


def compile_program(major: int, arch: str, text: str) -> list[Compiled]:
    """Every kernel of a program, compiled for `arch` by NVRTC of that CUDA version."""
    library = load(major)
    assert library is not None
    handle = ctypes.c_void_p()
    _check(library, library.nvrtcCreateProgram(ctypes.byref(handle), text.encode(), b"k.cu", 0, None, None))
    try:
        flags = [option.encode() for option in options(major, arch)]
        status = library.nvrtcCompileProgram(handle, len(flags), (ctypes.c_char_p * len(flags))(*flags))
        log = _text(library, handle, "ProgramLog")
        if status:
            raise RuntimeError(log)
        ptx = _text(library, handle, "PTX")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(handle))
    head, *rest = re.split(r"^\.(?:visible|weak) \.entry (\w+)", ptx, flags=re.M)
    bodies = dict(zip(rest[::2], rest[1::2], strict=True))
    return [_compiled(name, report, head + bodies[name]) for name, report in _entries(log, arch)]


def _check(library: ctypes.CDLL, status: int) -> None:
    if status:
        raise RuntimeError(library.nvrtcGetErrorString(status).decode())


def _text(library: ctypes.CDLL, handle: ctypes.c_void_p, what: str) -> str:
    size = ctypes.c_size_t()
    _check(library, getattr(library, f"nvrtcGet{what}Size")(handle, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(library, getattr(library, f"nvrtcGet{what}")(handle, buffer))
    return buffer.value.decode()


def _entries(log: str, arch: str) -> list[tuple[str, str]]:
    parts = re.split(rf"entry function '(\w+)' for '{arch}'", log)
    return list(zip(parts[1::2], parts[2::2], strict=True))


def _compiled(name: str, report: str, ptx: str) -> Compiled:
    def number(pattern: str) -> int:
        return sum(map(int, re.findall(pattern, report)))

    registers = number(r"Used (\d+) registers")
    stack = re.findall(r"(\d+) bytes stack frame", report)
    assert registers, report  # another wording must not read as nothing
    assert stack, report
    return Compiled(
        name, registers, number(r"(\d+) bytes smem"), int(stack[0]), number(r"(\d+) bytes spill"), ptx
    )
