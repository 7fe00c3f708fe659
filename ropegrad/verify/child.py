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
            inputs, outputs, nbytes, names, order, size = request
            if size > len(memory):
                memory = np.frombuffer(mmap.mmap(arena, size), np.uint8)
            given, room = (tuple(Slot(*slot) for slot in part) for part in (inputs, outputs))
            _send(answers, caller(memory[:nbytes], Plan(given, room, nbytes), names, order))


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
    _limit(request["memory"])
    _send(answers, Answer("returned"))
    return Caller(function, contract)


def _limit(nbytes: int) -> None:
    """A limit on memory beyond what importing took: past it allocations fail, before the machine does."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # not every system has it
        import resource

        with open("/proc/self/status", encoding="ascii") as status:
            used = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))
        resource.setrlimit(resource.RLIMIT_DATA, (used + nbytes, used + nbytes))


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
