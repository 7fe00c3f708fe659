"""How a GPU time is read, and when a reading cannot be true.

Three protocols, never mixed in one column:
- *span*: first kernel's start to last kernel's end. `span/cupti` reads the kernels' own time stamps;
  `span/events`, its stand-in where CUPTI is missing, reads CUDA events around the call, so it also bills
  launch gaps and some two microseconds of its own (an H200: 12.7 against 10.2 for a copy).
- *graph*: CUDA events around one replay of the captured call.
- *wall*: the host's clock from before the call until the device is idle.

Before each sample the L2 is flushed by zeroing a buffer of twice its size; each call goes to another set of
inputs (together more than twice the L2); all contenders take turns within one run, in an order that rotates.
Clocks are never set.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ropegrad.bench.activity import Tracer, tracer
from ropegrad.bench.datasheet import Datasheet
from ropegrad.records import median_and_spread

Call = Callable[[], object]  # launches on the current stream


@dataclass(frozen=True)
class Timing:
    """Samples in microseconds, and how they were read; `note` says why a stand-in was used."""

    protocol: str
    samples_us: tuple[float, ...]
    note: str | None = None

    @property
    def median_us(self) -> float:
        """Microseconds."""
        return median_and_spread(self.samples_us)[0]

    @property
    def spread_us(self) -> float:
        """Median absolute deviation, microseconds."""
        return median_and_spread(self.samples_us)[1]


# ---- what cannot be true -----------------------------------------------------------------------------------


def floors_us(
    sheet: Datasheet, l2: int, *, read: int, written: int, flops: int, precision: str = "fp32"
) -> dict[str, float]:
    """Microseconds that no true time is below, by reason.

    After a flush every input byte comes from memory; of all bytes at most one L2 may still be on its way.
    """
    return {
        f"input bytes / {sheet.bandwidth / 1e12:g} TB/s": read / sheet.bandwidth * 1e6,
        f"(all bytes - L2) / {sheet.bandwidth / 1e12:g} TB/s": (read + written - l2) / sheet.bandwidth * 1e6,
        f"FLOPs / {sheet.rate(precision) / 1e12:g} TFLOP/s": flops / sheet.rate(precision) * 1e6,
    }


def invalid(median_us: float, floors: Mapping[str, float]) -> str | None:
    """The sentence why a time cannot be true; None if it can."""
    reason = max(floors, key=lambda name: floors[name])
    if median_us >= floors[reason]:
        return None
    return f"INVALID: {median_us:.2f} us is less than {reason} = {floors[reason]:.2f} us"


def sets_needed(bytes_per_set: int, l2: int) -> int:
    """How many sets of inputs: together more than twice the L2, and at least two."""
    return max(2, 2 * l2 // max(bytes_per_set, 1) + 1)


# ---- reading -----------------------------------------------------------------------------------------------


class Reader(Protocol):
    """Takes samples under one protocol."""

    protocol: str

    def prepare(self, call: Call) -> Call:
        """What is to be sampled in place of `call`."""
        ...

    def sample(self, name: str, call: Call) -> None:
        """Call once; the flush is already queued."""
        ...

    def finish(self) -> list[tuple[str, float]]:
        """Contender and microseconds, in the order of sampling."""
        ...


class CuptiReader:
    """span/cupti."""

    protocol = "span/cupti"

    def __init__(self, tracer: Tracer) -> None:
        self._tracer, self._names = tracer, list[str]()
        tracer.start()

    def prepare(self, call: Call) -> Call:
        """As it is."""
        return call

    def sample(self, name: str, call: Call) -> None:
        """Call as the owner of what it launches."""
        self._tracer.call(len(self._names), call)
        self._names.append(name)

    def finish(self) -> list[tuple[str, float]]:
        """Raises RuntimeError if a call left no trace."""
        found = self._tracer.stop()
        missing = [name for i, name in enumerate(self._names) if i not in found]
        if missing:
            raise RuntimeError(f"CUPTI saw nothing of {len(missing)} calls, the first of {missing[0]}")
        return [(name, found[i]) for i, name in enumerate(self._names)]


class EventReader:
    """span/events and graph: CUDA events before and after."""

    def __init__(self, protocol: str, stream: Any) -> None:
        self.protocol, self._stream = protocol, stream
        self._events: list[tuple[str, Any, Any]] = []

    def prepare(self, call: Call) -> Call:
        """For graph: a replay of the captured call, on the device already."""
        if self.protocol != "graph":
            return call
        call()  # what it builds or allocates once cannot be captured
        self._stream.synchronize()
        self._stream.begin_capture()
        call()
        graph = self._stream.end_capture()
        graph.upload(self._stream)
        return lambda: graph.launch(self._stream)

    def sample(self, name: str, call: Call) -> None:
        """Event, call, event."""
        import cupy

        before, after = cupy.cuda.Event(), cupy.cuda.Event()
        before.record(self._stream)
        call()
        after.record(self._stream)
        self._events.append((name, before, after))

    def finish(self) -> list[tuple[str, float]]:
        """Events resolve about half a microsecond."""
        import cupy

        self._stream.synchronize()
        return [(name, cupy.cuda.get_elapsed_time(a, b) * 1e3) for name, a, b in self._events]


class WallReader:
    """wall."""

    protocol = "wall"

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._samples: list[tuple[str, float]] = []

    def prepare(self, call: Call) -> Call:
        """As it is."""
        return call

    def sample(self, name: str, call: Call) -> None:
        """Idle device, call, idle device."""
        self._stream.synchronize()
        start = time.perf_counter()
        call()
        self._stream.synchronize()
        self._samples.append((name, (time.perf_counter() - start) * 1e6))

    def finish(self) -> list[tuple[str, float]]:
        """As taken."""
        return self._samples


def reader(protocol: str, stream: Any) -> tuple[Reader, str | None]:
    """The reader of "span", "graph" or "wall", and why it is a stand-in if it is one."""
    if protocol == "graph":
        return EventReader("graph", stream), None
    if protocol == "wall":
        return WallReader(stream), None
    if protocol != "span":
        raise ValueError(f"protocol must be span, graph or wall, got {protocol!r}")
    found = tracer()
    if isinstance(found, Tracer):
        return CuptiReader(found), None
    return EventReader("span/events", stream), f"CUDA events in place of CUPTI: {found}"


def rounds(
    reader: Reader, contenders: Mapping[str, Sequence[Call]], samples: int, flush: Call, settle: Call
) -> dict[str, tuple[float, ...]]:
    """Samples of each contender, in turns; `settle` waits for the device between rounds."""
    prepared = {name: [reader.prepare(call) for call in calls] for name, calls in contenders.items()}
    names = list(prepared)
    for number in range(samples):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            flush()
            reader.sample(name, prepared[name][number % len(prepared[name])])
        settle()
    taken = reader.finish()
    return {name: tuple(us for other, us in taken if other == name) for name in names}


def warm_up(contenders: Mapping[str, Sequence[Call]], seconds: float, settle: Call) -> None:
    """Call everything once, then on until the time is over: clocks rise, code is compiled and loaded."""
    end = time.perf_counter() + seconds
    while True:
        for calls in contenders.values():
            for call in calls:
                call()
        settle()
        if time.perf_counter() >= end:
            return


def measure(
    contenders: Mapping[str, Sequence[Call]], protocol: str, *, l2: int, samples: int, seconds: float = 0.1
) -> dict[str, Timing]:
    """Time all contenders in one run; each is its call on each set of inputs. seconds: of warm-up."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        buffer = cupy.empty(2 * l2, cupy.uint8)
        cupy.cuda.Device().synchronize()  # inputs were made on other streams
        warm_up(contenders, seconds, stream.synchronize)
        using, note = reader(protocol, stream)
        flush = lambda: buffer.data.memset_async(0, buffer.nbytes, stream)  # noqa: E731
        taken = rounds(using, contenders, samples, flush, stream.synchronize)
    return {name: Timing(using.protocol, times, note) for name, times in taken.items()}
