"""The one-pass RoPE kernel on NumPy arrays: its own launches, its own text, on the CPU."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import shim

from ropegrad.arrays import numpy_dtype
from ropegrad.backends.rope_config import Config
from ropegrad.backends.rope_instance import Instance, kernel_text
from ropegrad.backends.rope_launch import Launch, prepare, wanted
from ropegrad.backends.rope_memory import ALIGNED, NAMES, Memory
from ropegrad.spec import RopeSpec
from ropegrad.verify.case import Case, NumpyArray

Arrays = dict[str, NumpyArray]
Fault = tuple[str, str]


@dataclass(frozen=True)
class Launching:
    """How the kernel is launched: on a GPU with how much L2, how shared, in which order, with which fault.

    config None: the rule's. The fault is text of the kernel and what stands in its place. into: outputs lie
    in every second token of larger arrays.
    """

    l2: int = 1 << 26
    config: Config | None = None
    order: int = 0
    fault: Fault | None = None
    into: bool = False


PLAIN = Launching()


def run(case: Case, launching: Launching = PLAIN) -> Arrays:
    """The gradients of this case: a function for `check`."""
    arrays = arrays_of(case, launching)
    assert isinstance(case.spec, RopeSpec)
    launch(case.spec, arrays, launching)
    return {name: arrays[name] for name in case.outputs}


def arrays_of(case: Case, launching: Launching) -> Arrays:
    """Inputs and outputs by name, each far from the others; outputs are NaN, or what is added to."""
    arrays = {name: shim.apart(x) for name, x in case.inputs.items() if x is not None}
    for need in case.spec.needs:
        shape, name = case.spec.output(need)
        dtype = numpy_dtype(name)
        if launching.into:
            out = shim.empty((*shape[:-2], 2 * shape[-2], shape[-1]), dtype)[..., ::2, :]
        else:
            out = shim.empty(shape, dtype)
        if case.spec.accumulate:
            out[...] = case.prior[f"grad_{need}"]
        arrays[f"grad_{need}"] = out
    return arrays


def launch(spec: RopeSpec, arrays: Arrays, launching: Launching = PLAIN) -> Launch | None:
    """Run the kernel on inputs and outputs by name, where there is anything to write."""
    given = {name: arrays[name] for name in wanted(spec)}
    addresses = {name: x.__array_interface__["data"][0] for name, x in given.items()}
    made = prepared(spec, arrays, launching)
    if made is not None:
        compile_all([made.instance], launching.fault)
        values = made.filled(tuple(addresses.get(name, 0) for name in NAMES))
        _kernels[made.instance, launching.fault](
            made.grid, made.block, (values.tobytes(),), shared_mem=made.shared, arrays=list(given.values()),
            order=launching.order,
        )  # fmt: skip
    return made


def prepared(spec: RopeSpec, arrays: Arrays, launching: Launching) -> Launch | None:
    """The launch for these arrays."""
    names = wanted(spec)
    memory = {
        name: Memory(arrays[name].__array_interface__["data"][0] % ALIGNED, arrays[name].strides)
        for name in names
    }
    return prepare(spec, tuple(memory.get(name) for name in NAMES), launching.l2, launching.config)


_kernels: dict[tuple[Instance, Fault | None], Any] = {}


def compile_all(instances: Iterable[Instance], fault: Fault | None = None) -> None:
    """Compile those that are not yet, as one program: its text takes longer than an instance of it."""
    new = [one for one in dict.fromkeys(instances) if (one, fault) not in _kernels]
    if not new:
        return
    text = kernel_text()
    if fault is not None:
        assert text.count(fault[0]) == 1, f"{text.count(fault[0])} places have {fault[0]!r}"
        text = text.replace(*fault)
    entries = {f"kernel_{i}": one for i, one in enumerate(new)}
    module = shim.RawModule(
        code=text + "".join(one.definition(entry) for entry, one in entries.items()),
        name_expressions=list(entries),
    )
    _kernels.update({(one, fault): module.get_function(entry) for entry, one in entries.items()})
