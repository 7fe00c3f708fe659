"""The same number of threads for everybody: cores that the process may use, BLAS, OpenMP and PyTorch."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Iterator

from ropegrad.tiles import cores


def unlimited(threads: int) -> str | None:
    """Why so many threads cannot be had, or cannot be held to; None if they can."""
    if not 1 <= threads <= cores():
        return f"--threads {threads}: this process may use 1 to {cores()} cores"
    if importlib.util.find_spec("threadpoolctl") is None:
        return "threadpoolctl is not installed, and BLAS could take more threads (extra cpu)"
    return None


@contextlib.contextmanager
def limited(threads: int) -> Iterator[None]:
    """Run with so many threads. Before PyTorch or JAX are imported: JAX counts the cores once.

    Where the system has no affinity, JAX takes what it finds.
    """
    from threadpoolctl import threadpool_limits

    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    if before is not None:
        os.sched_setaffinity(0, sorted(before)[:threads])
    try:
        if importlib.util.find_spec("torch") is not None:
            importlib.import_module("torch").set_num_threads(threads)
        with threadpool_limits(threads):
            yield
    finally:
        if before is not None:
            os.sched_setaffinity(0, before)
