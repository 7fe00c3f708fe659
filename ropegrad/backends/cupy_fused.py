"""RoPE's gradients on CuPy in one hand-written pass: every input read once, every output written once.

The kernel is kernels/rope_backward.cu; `rope_config` spreads it over the GPU, `rope_launch` writes its
arguments. It runs on the arrays' device and the current stream, allocates the outputs only, and never waits.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from ropegrad.arrays import numpy_dtype
from ropegrad.backends.base import Inputs, Outputs
from ropegrad.backends.cupy_plain import CupyPlain
from ropegrad.backends.rope_bound import bound, l2_of
from ropegrad.backends.rope_config import MOST_GRID
from ropegrad.backends.rope_launch import Launch, prepare, too_many, wanted
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
        launch = prepare(spec, _layout_of(spec, inputs), l2_of(next(iter(inputs.values())).device.id))
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


def explain_dense(spec: RopeSpec) -> list[str]:
    """The launch for contiguous arrays on the current device."""
    import cupy

    return describe(spec, prepare(spec, _layout_of(spec, {}), l2_of(cupy.cuda.runtime.getDevice())))


def _layout_of(spec: RopeSpec, inputs: Inputs) -> tuple[Memory | None, ...]:
    """The memory of these inputs; of what is not among them, as if it were contiguous."""
    memory = {name: Memory(x.data.ptr % ALIGNED, x.strides) for name, x in inputs.items()}
    return tuple(
        None if name not in wanted(spec) else memory.get(name) or dense_memory(*array_of(spec, name))
        for name in NAMES
    )
