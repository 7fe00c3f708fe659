"""A program of kernels, and their launches on NumPy arrays."""

import ctypes
import os
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shim.build import program

_EXTERN_C = re.compile(r'extern\s+"C"\s+__global__\s+void\s+(?:__\w+__\s*\([^()]*\)\s*)*(\w+)\s*\(')


class Fault(Exception):
    """A kernel did what it must not do; the text says what and where."""


class _Region(ctypes.Structure):
    _fields_ = (
        ("begin", ctypes.c_size_t), ("end", ctypes.c_size_t),
        ("array", ctypes.c_int), ("writable", ctypes.c_int),
    )  # fmt: skip


class _Launch(ctypes.Structure):
    _fields_ = (
        ("most", ctypes.c_ulonglong), ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint), ("order", ctypes.c_uint),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)), ("sizes", ctypes.POINTER(ctypes.c_size_t)),
        ("count", ctypes.c_int),
        ("regions", ctypes.POINTER(_Region)), ("region_count", ctypes.c_int),
    )  # fmt: skip


class RawModule:
    """A compiled program; takes what cupy.RawModule takes, of `options` those that start with -I and -D."""

    def __init__(
        self,
        code: str | None = None,
        *,
        path: str | os.PathLike[str] | None = None,
        options: Sequence[str] = (),
        name_expressions: Iterable[str] | None = None,
    ) -> None:
        text = Path(path).read_text(encoding="utf-8") if path is not None else code
        assert text is not None, "neither code nor path"
        self.names = tuple(name_expressions or _EXTERN_C.findall(text))
        flags = [option for option in options if option.startswith(("-I", "-D"))]
        self.path = program(text, self.names, flags, Path(path).name if path is not None else "kernels.cu")
        self.library = ctypes.PyDLL(str(self.path))  # one launch at a time: the interpreter lock is held
        self.library.shim_launch.restype = ctypes.c_char_p

    def get_function(self, name: str) -> "Kernel":
        """The kernel of one of the name expressions, or called so in extern "C"."""
        return Kernel(self, name, self.names.index(name))

    def lines(self, place: re.Match[str]) -> str:
        """File and line of an offset into the program, from the inside out."""
        command = ["addr2line", "-i", "-s", "-e", str(self.path), place[1]]
        lines = subprocess.check_output(command, text=True).splitlines()
        return ", from ".join(line.partition(" ")[0] for line in lines)


@dataclass(frozen=True)
class Kernel:
    """One kernel, called as a cupy.RawKernel is."""

    module: RawModule
    name: str
    index: int

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[Any],
        *,
        shared_mem: int = 0,
        arrays: Sequence[np.ndarray] = (),
        order: int = 0,
        most: int = 1 << 32,
    ) -> None:
        """Run every block to its end. Raises Fault, also after `most` loads and stores."""
        held = [_value(x) for x in args]
        known = [x for x in args if isinstance(x, np.ndarray)]
        regions = _regions([*known, *arrays])
        launch = _Launch(
            most, _three(grid), _three(block), shared_mem, order,
            (ctypes.c_void_p * len(held))(*(ctypes.addressof(x) for x in held)),
            (ctypes.c_size_t * len(held))(*(ctypes.sizeof(x) for x in held)), len(held),
            regions, len(regions),
        )  # fmt: skip
        message = self.module.library.shim_launch(self.index, ctypes.byref(launch))
        if message is not None:
            text = re.sub("<(0x[0-9a-f]+)>", self.module.lines, message.decode())
            raise Fault(f"{self.name}: {text}")


def _three(sizes: tuple[int, ...]) -> Any:
    return (ctypes.c_uint * 3)(*(*sizes, 1, 1, 1)[:3])


def _value(x: Any) -> Any:
    """An argument's bytes, typed as CuPy types them: int is long long, float is double."""
    if isinstance(x, np.ndarray):
        return ctypes.c_void_p(x.__array_interface__["data"][0])
    if isinstance(x, bool):
        return ctypes.c_bool(x)
    if isinstance(x, int):
        return ctypes.c_longlong(x)
    if isinstance(x, float):
        return ctypes.c_double(x)
    raw = x if isinstance(x, bytes) else x.tobytes()
    return (ctypes.c_char * len(raw)).from_buffer_copy(raw)


def _regions(arrays: Sequence[np.ndarray]) -> Any:
    """The bytes of each array, overlapping ones together: views of one array are one array to a kernel."""
    found: list[list[int]] = []
    for i, x in enumerate(arrays):
        if not x.size:
            continue
        low, high = np.lib.array_utils.byte_bounds(x)
        found.append([low, high, i, int(x.flags.writeable)])
    merged: list[list[int]] = []
    for region in sorted(found, key=lambda region: (region[3], region[0])):
        if merged and merged[-1][3] == region[3] and region[0] <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], region[1])
        else:
            merged.append(region)
    return (_Region * len(merged))(*(_Region(*region) for region in merged))
