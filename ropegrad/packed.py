"""Q's, k's and v's weights as one array, whose rows are q's, then k's, then v's.

Backends know three weights: they read row slices of the one, which are views, and write into slices of its
gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from ropegrad.arrays import Array, dtype_in, namespace
from ropegrad.backends.base import Inputs, Outputs
from ropegrad.backends.cupy_tensor import device_of
from ropegrad.outputs import QkvPackedGrads
from ropegrad.spec import PACKED_NEEDS, QkvSpec, parts_of

Backward = Callable[[QkvSpec, Inputs, Outputs | None], Outputs]


def packed_needs(needs: tuple[str, ...]) -> tuple[str, ...]:
    """What a packed call must ask for, so that it gets all of these needs."""
    return tuple(name for name in PACKED_NEEDS if set(parts_of(name)) & set(needs))


def unpack(spec: QkvSpec, arrays: dict[str, Array]) -> dict[str, Array]:
    """The arrays by name, with views of q's, k's and v's rows in the place of what is packed."""
    made = {}
    for name, array in arrays.items():
        if "qkv_" not in name:
            made[name] = array
            continue
        start = 0
        for part, own in zip("qkv", parts_of(name), strict=True):
            made[own] = array[start : start + spec.rows(part), ...]
            start += spec.rows(part)
    return made


def backward(run: Backward, spec: QkvSpec, inputs: Inputs, out: Outputs | None) -> Outputs:
    """The packed gradients by name, from a backend's `run`."""
    if out is None and spec.namespace in ("numpy", "cupy"):
        out = _fresh(spec, inputs)
    if out is not None:
        run(spec, unpack(spec, inputs), unpack(spec, out))
        return out
    results = run(spec, unpack(spec, inputs), None)
    xp = namespace(inputs["grad_query"])
    made = {}
    for name in _wanted(spec):
        parts = [results[own] for own in parts_of(name)]
        made[name] = parts[0] if len(parts) == 1 else xp.concat(parts, axis=0)
    return made


def _fresh(spec: QkvSpec, inputs: Inputs) -> Outputs:
    xp = namespace(inputs["grad_query"])
    made = {}
    with device_of(inputs) if spec.namespace == "cupy" else contextlib.nullcontext():
        for name in _wanted(spec):
            shape, dtype = spec.output(name.removeprefix("grad_"))
            made[name] = xp.empty(shape, dtype=dtype_in(xp, dtype))
    return made


def _wanted(spec: QkvSpec) -> list[str]:
    wanted = {f"grad_{need}" for need in spec.needs}
    return [name for name in QkvPackedGrads._fields if parts_of(name)[0] in wanted]
