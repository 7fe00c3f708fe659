"""When a call's kernels, copies and fills ran, as CUPTI saw it: package cupti-python.

What belongs to an iteration is decided by correlation ids: the calls made between push and pop of an external
id are its own, whatever their kernels are called. (A library may issue a memset of its own, so names do not
tell a call from the flush before it.)
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

BUFFER = 8 << 20  # bytes CUPTI is given at a time: some 40,000 activities
Activity = tuple[int, int, int]  # correlation id, start, end (nanoseconds)


def spans(work: Iterable[Activity], owners: Mapping[int, int]) -> dict[int, float]:
    """Microseconds from the first start to the last end of each iteration's own activities.

    owners: from correlation id to iteration. Activities without an owner (the flush) belong to nobody.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for correlation, start, end in work:
        if correlation in owners:
            iteration = owners[correlation]
            first[iteration] = min(start, first.get(iteration, start))
            last[iteration] = max(end, last.get(iteration, end))
    return {iteration: (last[iteration] - first[iteration]) / 1e3 for iteration in first}


class Tracer:
    """CUPTI's activity records of this process, while switched on. One a process: see `tracer`."""

    def __init__(self, cupti: Any) -> None:
        self._cupti = cupti
        kind = cupti.ActivityKind
        self._work_kinds = {int(kind.CONCURRENT_KERNEL), int(kind.MEMCPY), int(kind.MEMSET)}
        self._owner_kind = int(kind.EXTERNAL_CORRELATION)
        self._group = cupti.ExternalCorrelationKind.CUSTOM0
        self._kinds = [kind.CONCURRENT_KERNEL, kind.MEMCPY, kind.MEMSET, kind.EXTERNAL_CORRELATION]
        self._work: list[Activity] = []
        self._owners: dict[int, int] = {}
        cupti.activity_register_callbacks(lambda: (BUFFER, 0), self._take)

    def find_kinds(self, calls: list[Callable[[], object]]) -> None:
        """Add what must be traced so that these calls get an owner: as little as will do.

        Some versions of CUPTI record the owner of a launch only if API calls are traced too.
        """
        kind = self._cupti.ActivityKind
        base = self._kinds
        for extra in ([], [kind.DRIVER], [kind.RUNTIME], [kind.DRIVER, kind.RUNTIME]):
            self._kinds = [*base, *extra]
            self.start()
            for number, call in enumerate(calls):
                self.call(number, call)
            if len(self.stop()) == len(calls):
                return
        raise RuntimeError("CUPTI gives no correlation ids for these calls")

    def start(self) -> None:
        """Switch on."""
        self._work.clear()
        self._owners.clear()
        for kind in self._kinds:
            self._cupti.activity_enable(kind)

    def call(self, iteration: int, call: Callable[[], object]) -> None:
        """Call, and own whatever it launches."""
        self._cupti.activity_push_external_correlation_id(self._group, iteration)
        try:
            call()
        finally:
            self._cupti.activity_pop_external_correlation_id(self._group)

    def stop(self) -> dict[int, float]:
        """Wait for the device, switch off; microseconds of each iteration that launched anything."""
        import cupy

        cupy.cuda.Device().synchronize()
        self._cupti.activity_flush_all(1)
        for kind in self._kinds:
            self._cupti.activity_disable(kind)
        return spans(self._work, self._owners)

    def _take(self, activities: list[Any]) -> None:
        for activity in activities:
            if activity.kind in self._work_kinds:
                self._work.append((activity.correlation_id, activity.start, activity.end))
            elif activity.kind == self._owner_kind:
                self._owners[activity.correlation_id] = activity.external_id


@cache
def tracer() -> Tracer | str:
    """The process's tracer, or the sentence why there is none."""
    try:
        cupti = importlib.import_module("cupti.cupti")
    except Exception as error:  # absent, or its library is
        return f"cupti-python cannot be imported: {type(error).__name__}: {error}"
    try:
        import cupy

        x, y = cupy.zeros(64, cupy.float32), cupy.zeros(64, cupy.float32)
        kernel = cupy.ElementwiseKernel("float32 x", "float32 y", "y = x", "ropegrad_probe")
        kernel(x, y)
        made = Tracer(cupti)
        made.find_kinds([lambda: kernel(x, y), lambda: y.data.copy_from_device_async(x.data, x.nbytes)])
    except Exception as error:  # another profiler holds it, or the driver refuses
        return f"CUPTI cannot be used: {type(error).__name__}: {error}"
    return made
