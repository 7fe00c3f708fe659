"""Jobs shared by threads: whoever is free does the next that waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ropegrad.backends.base import quiet

Own = TypeVar("Own")  # what a worker keeps from job to job


def share(jobs: Iterable[Callable[[Own], None]], threads: int, own: Callable[[], Own]) -> None:
    """Do all jobs on at most so many threads; each worker hands its jobs what it made by `own()`."""
    waiting = deque(jobs)
    workers = min(threads, len(waiting))

    @quiet  # a new thread starts with NumPy's own settings
    def work(_: int) -> None:
        kept = own()
        while True:
            try:
                job = waiting.popleft()
            except IndexError:
                return
            job(kept)

    if workers <= 1:
        work(0)
        return
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, range(workers)))
