"""A target in a process of its own, with a clock and a memory limit: whatever it does becomes an answer.

The inputs travel in shared memory; this side keeps copies, the exact results and the clock to itself.
"""

from __future__ import annotations

import contextlib
import json
import marshal
import mmap
import os
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from types import TracebackType
from typing import Any

import numpy as np

from ropegrad.arrays import numpy_dtype
from ropegrad.verify.arena import Bytes, Plan
from ropegrad.verify.calling import Answer
from ropegrad.verify.target import Contract, NoTarget

# Memory in which a right target can be expected to work, beyond its imports: for threads, compilers and
# workspaces, and times a problem's arrays. A tighter limit may be what makes it fail.
ENOUGH, TIMES = 512 << 20, 8
DOUBTS = 3  # calls that are made again with enough memory, for a target that fails then, too
_OF_MEMORY = re.compile("MemoryError|bad_alloc|DefaultCPUAllocator|Cannot allocate memory")
FIRST = 5  # times as long for importing a target and for its first call, which may compile


class Process:
    """One target in a child process, which is started again after a crash or a hang.

    timeout: seconds a call may take. memory: bytes it may take beyond its imports.
    Raises NoTarget where the target cannot be loaded.
    """

    def __init__(
        self, target: str, contract: Contract, *, timeout: float = 30.0, memory: int = 8 << 30,
        folder: str = ".",
    ) -> None:  # fmt: skip
        self.target, self.contract, self.folder = target, contract, os.path.abspath(folder)
        self.timeout, self.limit = timeout, memory
        self.file, self.size = _shared_file(), 0
        self.memory: Bytes = np.zeros(0, np.uint8)
        self.child: subprocess.Popen[bytes] | None = None
        self.restarts = self.doubts = 0
        self.fresh = True
        self._start(memory)

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the child and all that it started, and give the shared memory back."""
        self._stop()
        if self.file >= 0:
            os.close(self.file)
            self.file = -1

    def _stop(self) -> None:
        if self.child is not None:
            _kill(self.child)
            self.errors.close()
            self.child = None

    def arena(self, nbytes: int) -> Bytes:
        """The memory that the target will see, at least as long as asked for."""
        if nbytes > self.size:
            self.size = max(nbytes, 2 * self.size, 1 << 20)
            os.ftruncate(self.file, self.size)
            self.memory = np.frombuffer(mmap.mmap(self.file, self.size), np.uint8)
        return self.memory[:nbytes]

    def call(self, layout: Plan, names: tuple[str, ...], order: list[str], *, anew: bool) -> Answer:
        """Let the target work on what is in the arena.

        Raises NoTarget where it fails, and would not if the limit on memory were fit for the problem.
        """
        if self.child is None:
            self._start(self.limit)
            self.restarts += 1
        inputs, outputs = ([tuple(slot) for slot in part] for part in (layout.inputs, layout.outputs))
        request = (inputs, outputs, layout.nbytes, names, order, self.size, anew)
        enough = ENOUGH + TIMES * layout.nbytes
        tight = self.limit < enough and self.doubts < DOUBTS
        before = self.memory[: layout.nbytes].copy() if tight else None
        answer = self._timed(request)
        if answer.status in ("raised", "crashed") and before is not None:
            self.doubts += 1
            self._stop()
            self.memory[: layout.nbytes] = before
            self._start(enough)
            if self._timed(request).status == "returned":
                raise NoTarget(
                    f"the limit of {_mib(self.limit)} (--memory) is too small for a problem whose arrays "
                    f"take {_mib(layout.nbytes)}: {answer.message}; within {_mib(enough)} the target returns"
                )
            self._stop()
        if _OF_MEMORY.search(answer.message):
            answer.message += f"; the limit is {_mib(self.limit)} beyond its imports (--memory)"
        if answer.status == "raised" and self.contract.device == "cuda":
            self._stop()  # an error of CUDA sticks to its process
        return answer

    def _timed(self, request: Any) -> Answer:
        limit = self.timeout * (FIRST if self.fresh else 1)
        self.fresh = False
        return self._ask(request, limit)

    def _start(self, memory: int) -> None:
        self.fresh = True
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  closed when replaced
        environment = os.environ | {"MALLOC_PERTURB_": "128"}  # glibc: memory not written reads as 3.4e38
        self.child = subprocess.Popen(
            [sys.executable, "-m", "ropegrad.verify.child", str(self.file)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, pass_fds=[self.file],
            env=environment | {"PYTHONPATH": import_path()}, start_new_session=True,
        )  # fmt: skip
        request = {
            "target": self.target, "contract": asdict(self.contract), "folder": self.folder, "memory": memory,
        }  # fmt: skip
        answer = self._ask(request, max(60.0, FIRST * self.timeout))
        if answer.status != "returned":
            self.close()
            raise NoTarget(answer.message)

    def _ask(self, request: Any, limit: float) -> Answer:
        """Requests are Python's own bytes; answers, which a wrecked child may garble, JSON and arrays."""
        child = self.child
        assert child is not None
        assert child.stdin is not None
        start = time.monotonic()
        deadline = start + limit
        try:
            child.stdin.write(marshal.dumps(request))
            child.stdin.flush()
            length, whole = struct.unpack("<QQ", self._read(16, deadline).data)
            return _answer(self._read(whole, deadline), length)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.kill(child.pid, signal.SIGABRT)  # makes faulthandler say where it is
                child.wait(1)
            message = f"no answer within {limit:g} s{self._last_line()}"
            self._stop()
            return Answer("hung", message)
        except (EOFError, OSError):
            return Answer("crashed", self._post_mortem())
        except BaseException:  # Ctrl-C: the rest of this answer must not be read as the next one
            self._stop()
            raise

    def _read(self, length: int, deadline: float) -> Bytes:
        assert self.child is not None
        assert self.child.stdout is not None
        stream = self.child.stdout.fileno()
        data = bytearray(length)
        at = memoryview(data)
        while at:
            ready, _, _ = select.select([stream], [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                raise TimeoutError
            count = os.readv(stream, [at])
            if not count:
                raise EOFError
            at = at[count:]
        return np.frombuffer(data, np.uint8)

    def _post_mortem(self) -> str:
        """How the child ended, and where it was."""
        child = self.child
        assert child is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(5)
        code = child.returncode
        if code is not None and code < 0:
            how = f"killed by {signal.Signals(-code).name}"
        else:
            how = f"the process ended with status {code}"
        how += self._last_line()
        self._stop()
        return how

    def _last_line(self) -> str:
        self.errors.seek(0)
        text = self.errors.read().decode(errors="replace")
        frames: list[tuple[str, str, str]] = re.findall(r'  File "([^"]+)", line (\d+) in (\S+)', text)
        ours = os.path.join("ropegrad", "verify", "")
        for file, line, function in frames:
            if ours not in file:
                return f" in {function} ({file}:{line})"
        last = text.strip().rpartition("\n")[2]
        return f": {last[:300]}" if last and not frames else ""


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.4g} MiB"


def _answer(data: Bytes, at: int) -> Answer:
    """The answer whose header is the first `at` bytes, its arrays the others."""
    status, message, outputs, notes, seconds = json.loads(data[:at].tobytes())
    for name, form in outputs.items():
        if form is not None:
            dtype, shape, nbytes = form
            kind, part = _dtype(dtype), data[at : at + nbytes]
            outputs[name] = (part.copy() if at % kind.itemsize else part).view(kind).reshape(shape)
            at += nbytes
    return Answer(status, message, outputs, [tuple(note) for note in notes], seconds)


def _dtype(name: str) -> np.dtype[Any]:
    try:
        return numpy_dtype(name)
    except KeyError:
        return np.dtype(name)


def _shared_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("ropegrad")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def import_path() -> str:
    """Where this ropegrad is, so that the child has the same one."""
    here = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])


def _kill(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.kill()
    child.wait()
    for stream in (child.stdin, child.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
