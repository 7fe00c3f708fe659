"""Results of earlier calls, held while later ones are made: no call may change what another gave."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from ropegrad.arrays import Array, memory
from ropegrad.verify.case import NumpyArray
from ropegrad.verify.runners import to_numpy

OVERWRITTEN = "overwritten by a later call"
CALLS = 20  # whose results are held: more than buffers that anybody uses in turn
MOST = 1 << 24  # bytes of them beyond those of the last two calls: each is read again after every call


class _Result(NamedTuple):
    """A result as it was returned, and the checksum of what was read from it then."""

    name: str
    array: Array
    digest: int


class Kept:
    """The results of the last calls: of two at least, of more where they are small."""

    def __init__(self) -> None:
        self.calls: list[list[_Result]] = []

    @property
    def nbytes(self) -> int:
        """Memory that is held here and may not be counted as the function's own."""
        return sum(map(_held, self.calls))

    def keep(self, arrays: Mapping[str, Array]) -> None:
        """Hold what a call gave; let the oldest go."""
        self.calls.append([_Result(n, _bare(x), _digest(x)) for n, x in arrays.items()])
        del self.calls[:-CALLS]
        while len(self.calls) > 2 and self.nbytes - sum(map(_held, self.calls[-2:])) > MOST:
            del self.calls[0]

    def overwritten(self, arrays: Mapping[str, Array]) -> Iterator[tuple[str, str]]:
        """Names and sentences of those that a call changed, or whose memory it gave out again as `arrays`.

        A call before the last may have had the data of this one: its results are the same bits, then.
        """
        for old in (old for call in self.calls for old in call):
            if _digest(old.array) != old.digest:
                text = f"{old.name} of an earlier call has changed: a later call overwrites its results"
                yield old.name, text
        given = {name: memory(array) for name, array in arrays.items()}
        for old in (old for call in self.calls[:-1] for old in call if given):
            there = memory(old.array)
            for name, here in given.items():
                if shares(here, there):
                    text = f"{name} is in the memory of an earlier call's {old.name}, which it overwrites"
                    yield old.name, text


def shares(a: NumpyArray, b: NumpyArray) -> bool:
    """Whether two arrays surely share a byte: an alarm needs certainty."""
    try:
        return bool(np.shares_memory(a, b, max_work=100_000))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return False


def _digest(array: Array) -> int:
    return zlib.crc32(np.ascontiguousarray(to_numpy(array)).reshape(-1).view(np.uint8).data)


def _bare(array: Array) -> Array:
    """Without the graph that PyTorch may have hung on it."""
    return array.detach() if hasattr(array, "detach") else array


def _held(call: list[_Result]) -> int:
    """Bytes that are not given back while these results live: all of the buffers that they are views of."""
    total = 0
    for result in call:
        array = result.array
        while isinstance(array, np.ndarray) and isinstance(array.base, np.ndarray):
            array = array.base
        whole = array.untyped_storage() if hasattr(array, "untyped_storage") else array
        total += int(whole.nbytes() if callable(whole.nbytes) else whole.nbytes)
    return total
