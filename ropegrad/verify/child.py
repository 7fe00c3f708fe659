"""The other end of `process`: loads one target, then answers calls until its parent closes the line.

Run as a module, never imported by the rest. Requests and answers go over the standard streams; what the
target prints goes to the standard error.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import mmap
import os
import signal
import struct
import sys
from dataclasses import asdict
from typing import IO, Any

import numpy as np

from ropegrad.verify.arena import Plan, Slot
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
    for line in requests:
        request = json.loads(line)
        if "target" in request:
            caller = _load(request, answers)
            continue
        assert caller is not None
        inputs, outputs = (tuple(map(_slot, slots)) for slots in request["slots"])
        layout = Plan(inputs, outputs, request["nbytes"])
        if request["size"] > len(memory):
            memory = np.frombuffer(mmap.mmap(arena, request["size"]), np.uint8)
        part = memory[: layout.nbytes]
        _send(answers, caller(part, layout, tuple(request["names"]), request["order"]))


def _slot(fields: list[Any]) -> Slot:
    name, dtype, shape, strides, *numbers = fields
    return Slot(name, dtype, tuple(shape), tuple(strides), *numbers)


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
    arrays = {name: x for name, x in answer.outputs.items() if x is not None}
    header = asdict(answer) | {
        "outputs": {
            name: None if x is None else [str(x.dtype), x.shape, x.nbytes]
            for name, x in answer.outputs.items()
        }
    }
    encoded = json.dumps(header).encode()
    stream.write(struct.pack("<Q", len(encoded)) + encoded)
    for array in arrays.values():
        stream.write(array.reshape(-1).view(np.uint8).data if array.size else b"")
    stream.flush()


if __name__ == "__main__":
    main()
