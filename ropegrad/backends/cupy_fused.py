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
from ropegrad.backends.rope_config import MOST_SHARED, Config, Gpu
from ropegrad.backends.rope_instance import ENTRY, Instance
from ropegrad.backends.rope_launch import ALIGNED, NAMES, PLACES, Launch, Memory, prepare, wanted
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
        return "it has RoPE alone, not the projections" if isinstance(spec, QkvSpec) else None

    def explain(self, spec: RopeSpec | QkvSpec, inputs: Inputs) -> list[str]:
        """The kernel's access and shape."""
        assert isinstance(spec, RopeSpec)
        launch = prepare(spec, _layout_of(spec, inputs), gpu(next(iter(inputs.values())).device.id))
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
class _Ready:
    """A launch on one device, but for the addresses. values[0] is CUDA's list of one parameter, behind it."""

    function: int
    shape: tuple[int, ...]  # grid, block, bytes of shared memory
    values: array[int]
    places: tuple[int, ...]
    kernel: Any  # holds the loaded module


@dataclass(frozen=True)
class Bound:
    """The kernel for one spec: launches are prepared once for each memory layout of the arrays.

    config overrides the rule, for tuning. Threads may share it: what it keeps is only ever added to.
    """

    spec: RopeSpec
    config: Config | None = None
    _ready: dict[Any, _Ready | None] = field(default_factory=dict, compare=False, repr=False)

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Of the arrays that the kernel takes."""
        return wanted(self.spec)

    def __call__(self, inputs: Inputs, out: Outputs | None) -> Outputs:
        """Launch on judged arrays; fresh outputs where `out` is None."""
        import cupy

        device = next(iter(inputs.values())).data.device_id
        here = cupy.cuda.runtime.getDevice() == device
        with contextlib.nullcontext() if here else cupy.cuda.Device(device):
            results = allocate(self.spec) if out is None else out
            self.launch(inputs | results, device)
        return results

    def launch(self, arrays: dict[str, Array], device: int) -> None:
        """On the current stream of `device`, which is the current one."""
        import cupy

        given = [arrays[name] for name in self.names]
        addresses = [x.data.ptr for x in given]
        key = device, tuple([(a % ALIGNED, x.strides) for a, x in zip(addresses, given, strict=True)])
        if key not in self._ready:
            self._ready[key] = self._prepare(*key)
        ready = self._ready[key]
        if ready is None:
            return
        values = ready.values[:]
        for place, address in zip(ready.places, addresses, strict=True):
            values[place] = address
        start = values.buffer_info()[0]
        values[0] = start + values.itemsize
        stream = cupy.cuda.get_current_stream().ptr
        cupy.cuda.driver.launchKernel(ready.function, *ready.shape, stream, start, 0)

    def _prepare(self, device: int, memory: tuple[Any, ...]) -> _Ready | None:
        found = dict(zip(self.names, (Memory(*one) for one in memory), strict=True))
        layout = tuple(found.get(name) for name in NAMES)
        launch = prepare(self.spec, layout, gpu(device), self.config)
        if launch is None:
            return None
        kernel = compiled(launch.instance)
        if launch.shared > MOST_SHARED:
            kernel.max_dynamic_shared_size_bytes = launch.shared
        return _Ready(
            function=kernel.kernel.ptr,  # on the current device
            shape=(*launch.grid, *launch.block, launch.shared),
            values=array("q", [0]) + launch.arguments,
            places=tuple(1 + PLACES[NAMES.index(name)] for name in self.names),
            kernel=kernel,
        )


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
def gpu(device: int) -> Gpu:
    """What the rule knows of a device."""
    import cupy

    runtime = cupy.cuda.runtime
    wanted = runtime.cudaDevAttrMultiProcessorCount, runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin
    multiprocessors, shared = (int(runtime.deviceGetAttribute(one, device)) for one in wanted)
    return Gpu(multiprocessors, int(cupy.cuda.Device(device).compute_capability), shared)


def allocate(spec: RopeSpec) -> Outputs:
    """Fresh outputs on the current device, not written."""
    import cupy

    made = ((f"grad_{need}", spec.output(need)) for need in spec.needs)
    return {name: cupy.empty(shape, numpy_dtype(dtype)) for name, (shape, dtype) in made}


def _layout_of(spec: RopeSpec, inputs: Inputs) -> tuple[Memory | None, ...]:
    """The memory of these inputs and of fresh outputs."""
    memory = {name: Memory(x.data.ptr % ALIGNED, x.strides) for name, x in inputs.items()}
    for need in spec.needs:
        shape, dtype = spec.output(need)
        strides = [numpy_dtype(dtype).itemsize]
        for size in shape[:0:-1]:
            strides.insert(0, strides[0] * size)
        memory[f"grad_{need}"] = Memory(0, tuple(strides))
    names = wanted(spec)
    return tuple(memory[name] if name in names else None for name in NAMES)
