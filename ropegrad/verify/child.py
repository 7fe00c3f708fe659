"""The other end of `process`: loads one target, then answers calls until its parent closes the line.

Run as a module, never imported by the rest. Requests and answers go over the standard streams; what the
target prints goes to the standard error.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import marshal
import mmap
import os
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from typing import IO, Any

import numpy as np

from ropegrad.arrays import dtype_name
from ropegrad.verify.arena import ALIGNED, Plan, Slot
from ropegrad.verify.calling import Answer, Caller, probe
from ropegrad.verify.target import Contract, NoTarget, load


def main() -> None:
    """Serve the parent; end when it is gone."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    faulthandler.enable()
    _die_with_parent()
    caller, arena = None, int(sys.argv[1])
    memory = np.zeros(0, np.uint8)
    with contextlib.suppress(EOFError):
        while True:
            request = marshal.load(requests)
            if isinstance(request, dict):
                caller = _load(request, answers)
                continue
            assert caller is not None
            inputs, outputs, nbytes, names, order, size, anew = request
            if size > len(memory):
                memory = np.frombuffer(mmap.mmap(arena, size), np.uint8)
            given, room = (tuple(Slot(*slot) for slot in part) for part in (inputs, outputs))
            _send(answers, caller(memory[:nbytes], Plan(given, room, nbytes), names, order, anew=anew))


def _load(request: dict[str, Any], answers: IO[bytes]) -> Caller | None:
    words = request["contract"]
    contract = Contract(**(words | {"needs": tuple(words["needs"])}))
    try:
        probe(contract)
        function = load(request["target"], request["folder"])
    except NoTarget as error:
        _send(answers, Answer("unusable", str(error)))
        return None
    except BaseException as error:
        _send(answers, Answer("unusable", f"importing it raised {type(error).__name__}: {error}"))
        return None
    _send(answers, Answer("returned"))
    return Caller(function, contract, limited(request["memory"]))


def limited(nbytes: int) -> Callable[[int], contextlib.AbstractContextManager[None]]:
    """A limit on memory beyond what is in use now: past it allocations fail, before the machine does.

    It holds inside `with limit(more):`, where `more` bytes may be in use besides: what the harness keeps.
    """
    try:  # not every system has it
        import resource

        with open("/proc/self/status", encoding="ascii") as status:
            used = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))
        before = resource.getrlimit(resource.RLIMIT_DATA)
    except (ImportError, OSError, StopIteration):
        return lambda more: contextlib.nullcontext()

    @contextlib.contextmanager
    def limit(more: int) -> Iterator[None]:
        wanted = min(used + nbytes + more, 1 << 62)
        soft = wanted if before[0] == resource.RLIM_INFINITY else min(wanted, before[0])
        resource.setrlimit(resource.RLIMIT_DATA, (soft, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, before)

    return limit


def _die_with_parent() -> None:
    with contextlib.suppress(OSError, AttributeError):  # Linux only; elsewhere the closed line does it
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _send(stream: IO[bytes], answer: Answer) -> None:
    arrays = [x for x in answer.outputs.values() if x is not None]
    forms = {
        name: None if x is None else (dtype_name(x.dtype), x.shape, x.nbytes)
        for name, x in answer.outputs.items()
    }
    header = (answer.status, answer.message, forms, answer.notes, answer.seconds)
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % ALIGNED)
    stream.write(struct.pack("<QQ", len(encoded), len(encoded) + sum(x.nbytes for x in arrays)) + encoded)
    for array in arrays:
        stream.write(array.reshape(-1).view(np.uint8).data if array.size else b"")
    stream.flush()


if __name__ == "__main__":
    main()
