"""NumPy's BLAS held to one thread while our own threads call it.

A BLAS with threads of its own cuts a product where their number says, and the cut decides the order of
sums. Blocks cut by us, each multiplied by one thread, give the same bits on any number of threads.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_LOCK = threading.Lock()
_held: list[list[int]] = []  # what to restore, an entry a caller inside: the first one's counts


@contextmanager
def one_thread() -> Iterator[None]:
    """BLAS on one thread, in this thread and, where its number is the process's, everywhere meanwhile.

    Every thread that multiplies enters; nests. The process's number comes back when the last one leaves.
    """
    shared, own = _libraries()
    before = [library.num_threads for library in own]
    with _LOCK:
        _held.append(_held[0] if _held else [library.num_threads for library in shared])
        if len(_held) == 1:
            _set(shared, [1] * len(shared))
    _set(own, [1] * len(own))
    try:
        yield
    finally:
        _set(own, before)
        with _LOCK:
            counts = _held.pop()
            if not _held:
                _set(shared, counts)


def _set(libraries: list[Any], counts: list[int]) -> None:
    for library, count in zip(libraries, counts, strict=True):
        # threadpoolctl 3.8 ignores, silently, all threads but the first that ever set a number.
        release = getattr(library, "clear_controlling_thread", lambda force: None)
        release(force=True)
        library.set_num_threads(count)
        release(force=True)


@functools.cache
def _libraries() -> tuple[list[Any], list[Any]]:
    """The BLAS loaded so far, NumPy's among them: those with one number a process, and one a thread.

    Looking for them takes milliseconds, so once.
    """
    from threadpoolctl import ThreadpoolController

    found = ThreadpoolController().select(user_api="blas").lib_controllers
    own = [library for library in found if getattr(library, "threading_layer", None) == "openmp"]
    return [library for library in found if library not in own], own
