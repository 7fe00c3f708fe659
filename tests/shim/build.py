"""From the text of kernels to a shared object, made once for each text, compiler and headers."""

import fcntl
import functools
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from shim.ptx import translate

HERE = Path(__file__).parent
RUNTIME = ("runtime", "memory", "races", "sanitizers")
# -fno-gnu-unique: what two programs both call __shared__ is not the same variable.
_FLAGS = ("-std=c++20", "-O1", "-g1", "-fPIC", "-ffp-contract=off", "-fno-gnu-unique", "-U_FORTIFY_SOURCE")
_CHECKS = "alignment,bounds,signed-integer-overflow"
_KERNEL_FLAGS = (
    "-w", f"-fsanitize=kernel-address,{_CHECKS}", f"-fno-sanitize-recover={_CHECKS}", "-DROPEGRAD_ON_CPU=1",
    f"-I{HERE / 'include'}",
)  # fmt: skip


def why_not() -> str | None:
    """Why nothing can be compiled here; None if it can."""
    if not sys.platform.startswith("linux"):
        return f"needs Linux, not {sys.platform}"
    return "needs g++ (not clang)" if "Free Software Foundation" not in _compiler() else None


def program(text: str, names: Sequence[str], flags: Sequence[str], file: str) -> Path:
    """A shared object with the runtime and the kernels of these names; `file` is what its lines are of."""
    kernels = "".join(f"shim::Entry<{name}>::value, " for name in names)
    whole = (
        f'#include "cuda_on_cpu.h"\n#line 1 "{file}"\n{translate(text)}\n'
        f"extern const shim::Kernel shim_kernels[] = {{{kernels}{{}}}};\n"
    )
    objects = [str(_object(part)) for part in RUNTIME]
    return _compiled("program.so", whole, [*_KERNEL_FLAGS, *flags], ["-shared", *objects])


@functools.cache
def _object(part: str) -> Path:
    return _compiled(f"{part}.o", f'#include "{HERE / part}.cpp"\n', [], ["-c"])


def _compiled(name: str, text: str, flags: Sequence[str], more: Sequence[str]) -> Path:
    """What g++ makes of the text, kept by a digest of all that it depends on: every header is in it."""
    flags = [*_FLAGS, *flags]
    text = _run(["g++", *flags, "-E", "-x", "c++", "-"], text)
    digest = hashlib.sha256("\0".join((_compiler(), *flags, *more, text)).encode()).hexdigest()[:32]
    kept = _folder() / f"{digest}-{name}"
    with open(kept.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another test process may be making the same
        if not kept.exists():
            with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
                made = Path(folder) / name
                _run(["g++", *flags, "-x", "c++-cpp-output", "-", "-x", "none", *more, "-o", str(made)], text)
                os.replace(made, kept)
    return kept


@functools.cache
def _compiler() -> str:
    try:
        return subprocess.check_output(["g++", "--version"], text=True)
    except FileNotFoundError:
        return ""


@functools.cache
def _folder() -> Path:
    """Where programs are kept: this user's own, since they will be loaded."""
    folder = Path(tempfile.gettempdir()) / f"ropegrad-shim-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o022:
        return Path(tempfile.mkdtemp())
    return folder


def _run(command: list[str], text: str) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{done.stderr}\nfrom {command}")
    return done.stdout
