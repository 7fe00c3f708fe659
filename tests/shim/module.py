"""Compiles a program of kernels once, and launches them on NumPy arrays."""

import ctypes
import functools
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shim.ptx import translate

HERE = Path(__file__).parent
_FLAGS = ("-std=c++20", "-O1", "-g1", "-fPIC", "-ffp-contract=off", "-U_FORTIFY_SOURCE", "-fno-gnu-unique")
_CHECKS = "alignment,bounds,signed-integer-overflow"
_KERNEL_FLAGS = (
    "-w", f"-fsanitize=kernel-address,{_CHECKS}", f"-fno-sanitize-recover={_CHECKS}", "-DROPEGRAD_ON_CPU=1",
)  # fmt: skip

_EXTERN_C = re.compile(r'extern\s+"C"\s+__global__\s+void\s+(?:__\w+__\s*\([^()]*\)\s*)*(\w+)\s*\(')


def why_not() -> str | None:
    """Why nothing can be compiled here; None if it can."""
    if not sys.platform.startswith("linux"):
        return f"needs Linux, not {sys.platform}"
    return "needs g++ (not clang)" if "Free Software Foundation" not in _compiler() else None


class Fault(Exception):
    """A kernel did what it must not do; the text says what and where."""


class _Region(ctypes.Structure):
    _fields_ = (
        ("begin", ctypes.c_size_t), ("end", ctypes.c_size_t),
        ("array", ctypes.c_int), ("writable", ctypes.c_int),
    )  # fmt: skip


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3),
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
        path: str | os.PathLike[str] | None = None,
        *,
        options: Sequence[str] = (),
        name_expressions: Iterable[str] | None = None,
        **_: Any,
    ) -> None:
        text = Path(path).read_text(encoding="utf-8") if path is not None else code
        assert text is not None, "neither code nor path"
        names = name_expressions or _EXTERN_C.findall(text)
        self.names = tuple(names)
        flags = tuple(option for option in options if option.startswith(("-I", "-D")))
        self.path = build(text, self.names, flags, Path(path).name if path is not None else "kernels.cu")
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
        **_: Any,
    ) -> None:
        """Run every block to its end. Raises Fault."""
        held = [_value(x) for x in args]
        known = [x for x in args if isinstance(x, np.ndarray)]
        regions = _regions([*known, *arrays])
        launch = _Launch(
            _three(grid), _three(block), shared_mem, order,
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


# ---- building ------------------------------------------------------------------------------------------


def build(text: str, names: Sequence[str], flags: Sequence[str], file: str) -> Path:
    """The shared object of a program, made once for each text, flags and state of this folder."""
    kernels = "".join(f"shim::Entry<{name}>::value, " for name in names)
    glue = f"\nextern const shim::Kernel shim_kernels[] = {{{kernels}{{}}}};\n"
    program = f'#include "cuda_on_cpu.h"\n#line 1 "{file}"\n{translate(text)}{glue}'
    include = f"-I{HERE / 'include'}"

    def compile_program(made: Path) -> None:
        source = made.with_suffix(".cpp")
        source.write_text(program, encoding="utf-8")
        objects = [str(_runtime(part)) for part in ("runtime", "memory", "races", "sanitizers")]
        _run(
            "g++", *_FLAGS, *_KERNEL_FLAGS, *flags, include, "-shared", str(source), *objects, "-o", str(made)
        )

    return _made("program.so", compile_program, program, *flags)


@functools.cache
def _runtime(part: str) -> Path:
    source = HERE / f"{part}.cpp"
    return _made(f"{part}.o", lambda made: _run("g++", *_FLAGS, "-c", str(source), "-o", str(made)))


def _made(name: str, make: Any, *inputs: str) -> Path:
    """The file that `make` writes, kept by a digest of all that it depends on."""
    digest = hashlib.sha256("\0".join((name, *inputs, *_state())).encode()).hexdigest()[:32]
    kept = _folder() / f"{digest}-{name}"
    if not kept.exists():
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            make(Path(folder) / name)
            os.replace(Path(folder) / name, kept)  # at once: others may be making the same
    return kept


@functools.cache
def _compiler() -> str:
    try:
        return subprocess.check_output(["g++", "--version"], text=True)
    except FileNotFoundError:
        return ""


@functools.cache
def _state() -> tuple[str, ...]:
    files = sorted(path for path in HERE.rglob("*") if path.suffix in (".h", ".cpp"))
    return (_compiler(), *_FLAGS, *_KERNEL_FLAGS, *(path.read_text(encoding="utf-8") for path in files))


@functools.cache
def _folder() -> Path:
    """Where programs are kept: this user's own, since they will be loaded."""
    folder = Path(tempfile.gettempdir()) / f"ropegrad-shim-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o022:
        return Path(tempfile.mkdtemp())
    return folder


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{done.stderr}\nfrom {command}")
