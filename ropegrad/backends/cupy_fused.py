"""RoPE's gradients on CuPy in one hand-written pass: every input read once, every output written once.

The kernel is kernels/rope_backward.cu; `rope_config` spreads it over the GPU, `rope_launch` writes its
arguments. It runs on the arrays' device and the current stream, allocates the outputs only, and never waits.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from array import array
from dataclasses import dataclass, field
from typing import Any

from ropegrad.arrays import Array, numpy_dtype
from ropegrad.backends.base import Inputs, Outputs
from ropegrad.backends.cupy_plain import CupyPlain
from ropegrad.backends.rope_config import MOST_GRID, Config
from ropegrad.backends.rope_instance import ENTRY, Instance
from ropegrad.backends.rope_launch import PLACES, Launch, prepare, too_many, wanted
from ropegrad.backends.rope_memory import ALIGNED, NAMES, Memory, array_of, dense_memory
from ropegrad.spec import QkvSpec, RopeSpec

_PLAIN = CupyPlain()


@dataclass(frozen=True)
class CupyFused:
    """One pass for the gradients of q, k, cos and sin; the forward is cupy_plain's."""

    name: str = "cupy_fused"

    def why_not(self, spec: RopeSpec | QkvSpec) -> str | None:
        """It wants CuPy arrays, and has no projections."""
        if importlib.util.find_spec("cupy") is None:
            return "CuPy is not installed (extra cuda12 or cuda13)"
        if spec.namespace != "cupy":
            return f"it runs CuPy arrays, these are of {spec.namespace}"
        if isinstance(spec, QkvSpec):
            return "it has RoPE alone, not the projections"
        return f"more than {MOST_GRID} batches of more than {MOST_GRID} tokens" if too_many(spec) else None

    def explain(self, spec: RopeSpec | QkvSpec, inputs: Inputs) -> list[str]:
        """The kernel's access and shape."""
        assert isinstance(spec, RopeSpec)
        launch = prepare(
            spec, _layout_of(spec, inputs), multiprocessors(next(iter(inputs.values())).device.id)
        )
        return describe(spec, launch)

    def rope_backward(self, spec: RopeSpec, inputs: Inputs, out: Outputs | None) -> Outputs:
        """Gradients of RoPE; see `ropegrad.rope_backward`."""
        return bound(spec)(inputs, out)

    def qkv_rope_backward(self, spec: QkvSpec, inputs: Inputs, out: Outputs | None) -> Outputs:
        """Not here."""
        raise AssertionError(self.why_not(spec))

    def rope(self, spec: RopeSpec, inputs: Inputs) -> Outputs:
        """RoPE of q and k, by cupy_plain; see `ropegrad.rope`."""
        return _PLAIN.rope(spec, inputs)

    def qkv_rope(self, spec: QkvSpec, inputs: Inputs) -> Outputs:
        """Not here."""
        raise AssertionError(self.why_not(spec))


def describe(spec: RopeSpec, launch: Launch | None) -> list[str]:
    """A launch in words."""
    if launch is None:
        return ["nothing to write"]
    instance, config = launch.instance, launch.config
    size = numpy_dtype(spec.dtype).itemsize
    access = f"{instance.vector * size} bytes an access" if instance.dense else "element by element (strides)"
    return [
        f"one pass of rope_backward.cu computing in {spec.compute}, {access}; copies nothing",
        f"{launch.grid} blocks of {config.lanes} lanes x {config.tokens} tokens x "
        f"{config.groups_q} + {config.groups_k} groups of heads, {config.rows} rows in flight a thread",
    ]


# ---- bound to a spec ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Filled:
    """A launch on certain addresses; calling it makes it, on the current stream. Nothing in it is written.

    shape: grid, block, bytes of shared memory. values[0] is CUDA's list of one parameter, which stands behind
    it. kernel holds the loaded module; function None: there is nothing to do.
    """

    device: int
    function: int | None
    shape: tuple[int, ...]
    values: array[int]
    kernel: Any

    def __call__(self) -> None:
        """Launch."""
        import cupy

        if self.function is None:
            return
        with on_device(self.device):
            stream, start = cupy.cuda.get_current_stream().ptr, self.values.buffer_info()[0]
            cupy.cuda.driver.launchKernel(self.function, *self.shape, stream, start, 0)

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
        if prepared.function is None:
            return prepared
        values = prepared.values[:]
        for place, address in zip(self.places, addresses, strict=True):
            values[place] = address
        values[0] = values.buffer_info()[0] + values.itemsize
        return Filled(device, prepared.function, prepared.shape, values, prepared.kernel)

    def _prepare(self, device: int, memory: tuple[Any, ...]) -> Filled:
        found = dict(zip(self.names, (Memory(*one) for one in memory), strict=True))
        launch = prepare(
            self.spec, tuple(found.get(name) for name in NAMES), multiprocessors(device), self.config
        )
        if launch is None:
            return Filled(device, None, (), array("q"), None)
        with on_device(device):
            kernel = compiled(launch.instance)
            function = kernel.kernel.ptr
        shape = (*launch.grid, *launch.block, launch.shared)
        return Filled(device, function, shape, array("q", [0]) + launch.arguments, kernel)


def on_device(device: int) -> contextlib.AbstractContextManager[Any]:
    """Make this the current device, which it mostly is."""
    import cupy

    here = cupy.cuda.runtime.getDevice() == device
    return contextlib.nullcontext() if here else cupy.cuda.Device(device)


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
def multiprocessors(device: int) -> int:
    """Of a device."""
    import cupy

    runtime = cupy.cuda.runtime
    return int(runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, device))


def allocate(spec: RopeSpec) -> Outputs:
    """Fresh outputs on the current device, not written."""
    import cupy

    made = ((f"grad_{need}", spec.output(need)) for need in spec.needs)
    return {name: cupy.empty(shape, numpy_dtype(dtype)) for name, (shape, dtype) in made}


def explain_dense(spec: RopeSpec) -> list[str]:
    """The launch for contiguous arrays on the current device."""
    import cupy

    return describe(spec, prepare(spec, _layout_of(spec, {}), multiprocessors(cupy.cuda.runtime.getDevice())))


def _layout_of(spec: RopeSpec, inputs: Inputs) -> tuple[Memory | None, ...]:
    """The memory of these inputs; of what is not among them, as if it were contiguous."""
    memory = {name: Memory(x.data.ptr % ALIGNED, x.strides) for name, x in inputs.items()}
    return tuple(
        None if name not in wanted(spec) else memory.get(name) or dense_memory(*array_of(spec, name))
        for name in NAMES
    )
