"""Memory of many shapes for the same values: what PyTorch, fused buffers and careless callers hand over."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ropegrad.verify.case import NumpyArray

Rng = np.random.Generator


def _contiguous(rng: Rng, x: NumpyArray) -> NumpyArray:
    return x


def _transposed(rng: Rng, x: NumpyArray) -> NumpyArray:
    """The axes in another order in memory; the last need not have unit stride."""
    order = rng.permutation(x.ndim)
    return np.ascontiguousarray(x.transpose(order)).transpose(np.argsort(order))


def _sliced(rng: Rng, x: NumpyArray) -> NumpyArray:
    """A window into a larger buffer, as q is in a fused QKV buffer."""
    axis = int(rng.integers(x.ndim))
    shape = list(x.shape)
    shape[axis] += 5
    buffer = np.full(shape, np.nan, x.dtype)
    window = buffer[(slice(None),) * axis + (slice(2, 2 + x.shape[axis]),)]
    window[...] = x
    return window


def _stepped(rng: Rng, x: NumpyArray) -> NumpyArray:
    """Every second element of the last axis."""
    buffer = np.full((*x.shape[:-1], 2 * x.shape[-1]), np.nan, x.dtype)
    buffer[..., ::2] = x
    return buffer[..., ::2]


def _negative(rng: Rng, x: NumpyArray) -> NumpyArray:
    """Negative strides on a random axis."""
    axis = int(rng.integers(x.ndim))
    return np.flip(np.flip(x, axis).copy(), axis)


def _expanded(rng: Rng, x: NumpyArray) -> NumpyArray:
    """Stride 0: one value stands for a whole axis, as after .sum().backward()."""
    axis = int(rng.integers(x.ndim))
    if not x.shape[axis]:
        return x
    return np.broadcast_to(np.take(x, [0], axis), x.shape)


def _misaligned(rng: Rng, x: NumpyArray) -> NumpyArray:
    """An address that is no multiple of the element's size."""
    buffer = np.zeros(x.nbytes + 1, np.uint8)
    view = buffer[1:].view(x.dtype).reshape(x.shape)
    view[...] = x
    return view


Memory = Callable[[Rng, NumpyArray], NumpyArray]
MEMORY: dict[str, Memory] = {
    "contiguous": _contiguous, "transposed": _transposed, "sliced": _sliced, "stepped": _stepped,
    "negative": _negative, "expanded": _expanded, "misaligned": _misaligned,
}  # fmt: skip


# `mixed` draws a kind for each array; `movable` only those that PyTorch and GPUs have, too.
MIXTURES = {"mixed": tuple(MEMORY), "movable": ("contiguous", "transposed", "sliced", "stepped", "expanded")}


def place(rng: Rng, x: NumpyArray, memory: str, name: str) -> NumpyArray:
    """The same values in memory of another kind, read-only."""
    kinds = MIXTURES.get(memory, (memory,))
    kind = kinds[int(rng.integers(len(kinds)))] if len(kinds) > 1 else memory
    placed = MEMORY[kind](rng, x) if x.ndim else x
    placed = placed.view()
    placed.flags.writeable = False
    return placed
