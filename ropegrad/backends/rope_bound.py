"""The one-pass RoPE kernel bound to a spec: compiled, prepared for the arrays' memory, launched.

Launches go to the arrays' device and the current stream. Only outputs are allocated; nothing is waited for.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ropegrad.arrays import Array, numpy_dtype
from ropegrad.backends.base import Inputs, Outputs
from ropegrad.backends.rope_config import Config
from ropegrad.backends.rope_instance import ENTRY, Instance
from ropegrad.backends.rope_launch import PLACES, prepare, wanted
from ropegrad.backends.rope_memory import ALIGNED, NAMES, Memory
from ropegrad.spec import RopeSpec


@dataclass(frozen=True, slots=True)
class Filled:
    """A launch on certain addresses; calling it makes it, on the current stream. Nothing in it is written.

    launch: function, grid, block, bytes of shared memory; empty where there is nothing to do. start: address
    of values, whose first is CUDA's list of one parameter, which stands behind it. kernel holds the module.
    """

    device: int
    launch: tuple[int, ...]
    values: array[int]
    start: int
    kernel: Any

    def __call__(self) -> None:
        """Launch."""
        if not self.launch:
            return
        launch, get_device, stream = _cuda()
        if get_device() == self.device and self.device in _contexts.devices:
            launch(*self.launch, stream().ptr, self.start, 0)
        else:
            with on_device(self.device):
                launch(*self.launch, stream().ptr, self.start, 0)

    def captured(self) -> Any:
        """A CUDA graph of this launch."""
        import cupy

        with on_device(self.device), cupy.cuda.Stream(non_blocking=True) as stream:
            stream.begin_capture()
            try:
                self()
            finally:
                graph = stream.end_capture()
        return graph


@dataclass(frozen=True)
class Bound:
    """The kernel for one spec: launches are prepared once for each memory layout of the arrays.

    config overrides the rule, for tuning. Threads may share it: what it keeps is only ever added to.
    """

    spec: RopeSpec
    config: Config | None = None
    _prepared: dict[Any, Filled] = field(default_factory=dict, init=False, compare=False, repr=False)

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Of the arrays that the kernel takes."""
        return wanted(self.spec)

    @functools.cached_property
    def places(self) -> tuple[int, ...]:
        """Of their addresses among a launch's values."""
        return tuple(1 + PLACES[NAMES.index(name)] for name in self.names)

    def __call__(self, inputs: Inputs, out: Outputs | None) -> Outputs:
        """Launch on judged arrays; fresh outputs where `out` is None."""
        if out is None:
            with on_device(next(iter(inputs.values())).data.device_id):
                out = allocate(self.spec)
        self.filled(inputs | out)()
        return out

    def filled(self, arrays: dict[str, Array]) -> Filled:
        """The launch on judged arrays, inputs and outputs."""
        given = [arrays[name] for name in self.names]
        device = next(iter(arrays.values())).data.device_id
        addresses = [x.data.ptr for x in given]
        key = device, tuple([(a % ALIGNED, x.strides) for a, x in zip(addresses, given, strict=True)])
        prepared = self._prepared.get(key)
        if prepared is None:
            prepared = self._prepared[key] = self._prepare(*key)
        if not prepared.launch:
            return prepared
        values = prepared.values[:]
        for place, address in zip(self.places, addresses, strict=True):
            values[place] = address
        start = values.buffer_info()[0]
        values[0] = start + values.itemsize
        return Filled(device, prepared.launch, values, start, prepared.kernel)

    def _prepare(self, device: int, memory: tuple[Any, ...]) -> Filled:
        found = dict(zip(self.names, (Memory(*one) for one in memory), strict=True))
        launch = prepare(self.spec, tuple(found.get(name) for name in NAMES), l2_of(device), self.config)
        if launch is None:
            return Filled(device, (), array("q"), 0, None)
        with on_device(device):
            kernel = compiled(launch.instance)
            function = kernel.kernel.ptr
        shape = (function, *launch.grid, *launch.block, launch.shared)
        return Filled(device, shape, array("q", [0]) + launch.arguments, 0, kernel)


class _Contexts(threading.local):
    """Devices whose context this thread is known to have: the driver launches nothing without one."""

    def __init__(self) -> None:
        self.devices: set[int] = set()


_contexts = _Contexts()


@functools.cache
def _cuda() -> tuple[Callable[..., None], Callable[[], int], Callable[[], Any]]:
    import cupy

    return cupy.cuda.driver.launchKernel, cupy.cuda.runtime.getDevice, cupy.cuda.get_current_stream


@contextlib.contextmanager
def on_device(device: int) -> Iterator[None]:
    """Make this the current device, with its context."""
    import cupy

    with cupy.cuda.Device(device):
        if device not in _contexts.devices:
            cupy.cuda.runtime.memGetInfo()  # makes the device's context this thread's
            _contexts.devices.add(device)
        yield


@functools.lru_cache(maxsize=256)
def bound(spec: RopeSpec) -> Bound:
    """The kernel for this spec."""
    return Bound(spec)


@functools.cache
def compiled(instance: Instance) -> Any:
    """The kernel of an instance; CuPy compiles it at the first use on a device and keeps it on disk."""
    import cupy

    return cupy.RawModule(code=instance.source()).get_function(ENTRY)


@functools.cache
def l2_of(device: int) -> int:
    """Bytes of a device's L2."""
    import cupy

    runtime = cupy.cuda.runtime
    return int(runtime.deviceGetAttribute(runtime.cudaDevAttrL2CacheSize, device))


def allocate(spec: RopeSpec) -> Outputs:
    """Fresh outputs on the current device, not written."""
    import cupy

    made = ((f"grad_{need}", spec.output(need)) for need in spec.needs)
    return {name: cupy.empty(shape, numpy_dtype(dtype)) for name, (shape, dtype) in made}
