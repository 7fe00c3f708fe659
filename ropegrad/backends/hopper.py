"""Kernels for Hopper alone: its warpgroup products are of sm_90a, which CuPy's compiler calls do not name."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from array import array
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent / "kernels"
PARTS = ("numbers.cuh", "memory.cuh", "qkv_inputs.cuh", "hopper.cuh", "qkv_multiply.cu")
OPTIONS = ("--std=c++17", "-arch=sm_90a")
THREADS = 384
SHARED = 3 * (64 << 10) + 1024  # bytes: three stages, aligned
BOX = 64  # rows and columns that the copy engine fetches at once
_MAP_BYTES, _MAP_ALIGNED = 128, 64
_FLOAT16, _SWIZZLED, _WIDE_FETCHES = 6, 3, 2  # of CUtensorMap: its dtype, 128-byte rows, 128 bytes into L2


class Matrix(NamedTuple):
    """Rows of float16 numbers in memory, so many bytes apart."""

    address: int
    rows: int
    columns: int
    pitch: int


class Both(NamedTuple):
    """Both products of operands in two terms, by qkv_multiply.cu.

    parameters: the structs Arguments and Results; maps: the matrices of its struct Maps, in order.
    """

    entry: str
    grid: int
    parameters: tuple[array[int], array[int]]
    maps: tuple[Matrix, ...]


def is_hopper(device: int) -> bool:
    """Whether a device runs these kernels, and its driver makes maps for the copy engine."""
    import cupy

    return bool(cupy.cuda.Device(device).compute_capability == "90") and _encode() is not None


def multiply(step: Both) -> None:
    """One launch on the current device and stream."""
    import cupy

    maps = b"".join(map(tensor_map, step.maps))
    parameters = [parameter.buffer_info()[0] for parameter in step.parameters]
    held = ctypes.create_string_buffer(maps, len(maps))
    pointers = array("q", [*parameters, ctypes.addressof(held)])
    cupy.cuda.driver.launchKernel(
        function(step.entry, cupy.cuda.runtime.getDevice()).ptr, step.grid, 1, 1, THREADS, 1, 1, SHARED,
        cupy.cuda.get_current_stream().ptr, pointers.buffer_info()[0], 0,
    )  # fmt: skip


@functools.cache
def text() -> str:
    """CUDA C++ of the kernels."""
    return "\n".join((FOLDER / part).read_text(encoding="utf-8") for part in PARTS)


# ---- maps for the copy engine ------------------------------------------------------------------------------


@functools.lru_cache(4096)
def tensor_map(matrix: Matrix) -> bytes:
    """A CUtensorMap, boxes of 64 x 64, zeros beyond the edges. Raises RuntimeError with CUDA's status."""
    encode = _encode()
    assert encode is not None
    space = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNED)
    at = -(-ctypes.addressof(space) // _MAP_ALIGNED) * _MAP_ALIGNED
    sizes = (ctypes.c_uint64 * 2)(matrix.columns, matrix.rows)
    steps = (ctypes.c_uint64 * 1)(matrix.pitch)
    box, dense = (ctypes.c_uint32 * 2)(BOX, BOX), (ctypes.c_uint32 * 2)(1, 1)
    status = encode(
        ctypes.c_void_p(at), _FLOAT16, 2, ctypes.c_void_p(matrix.address), sizes, steps, box, dense,
        0, _SWIZZLED, _WIDE_FETCHES, 0,
    )  # fmt: skip
    if status:
        raise RuntimeError(f"CUDA refused a map of {matrix}: status {status}")
    return ctypes.string_at(at, _MAP_BYTES)


@functools.cache
def _encode() -> Any:
    """The driver's function, None where there is none."""
    for name in ("libcuda.so.1", "nvcuda.dll"):
        with contextlib.suppress(OSError, AttributeError):
            return ctypes.CDLL(name).cuTensorMapEncodeTiled
    return None


# ---- compiling ---------------------------------------------------------------------------------------------


@functools.cache
def function(entry: str, device: int) -> Any:
    """A kernel on the current device, which is this one."""
    import cupy

    made = _module(device).get_function(entry)
    attribute = cupy.cuda.driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    cupy.cuda.driver.funcSetAttribute(made.ptr, attribute, SHARED)
    return made


@functools.cache
def _module(device: int) -> Any:
    import cupy

    module = cupy.cuda.function.Module()
    module.load(_machine_code())
    return module


@functools.cache
def _machine_code() -> bytes:
    """Compiled by NVRTC, in a fraction of a second."""
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(text(), "qkv_multiply.cu", [], [])
    try:
        nvrtc.compileProgram(program, list(OPTIONS))
        code: bytes = nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError as error:
        raise RuntimeError(nvrtc.getProgramLog(program)) from error
    finally:
        nvrtc.destroyProgram(program)
    return code
