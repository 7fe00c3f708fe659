"""Calls on CuPy arrays that were judged before: same addresses, shapes, strides and dtypes. Launched at once.

Judging a call (who overlaps whom?) takes the host longer than small kernels take the GPU.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from ropegrad.arrays import Array
from ropegrad.backends.base import Inputs
from ropegrad.backends.cupy_fused import Filled, bound
from ropegrad.spec import RopeSpec

MOST = 4096  # calls that are remembered; then all are forgotten
Arrays = tuple[Array | None, ...]


class Repeats:
    """Launches by what tells a call from every other. Threads may share it."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, Filled] = {}

    def call(self, key: Hashable) -> bool:
        """Launch again what `key` stands for; False if that is not known."""
        filled = self._seen.get(key)
        if filled is None:
            return False
        filled()
        return True

    def first(self, key: Hashable, spec: RopeSpec, arrays: Inputs) -> None:
        """Launch on judged arrays, inputs and outputs by name, and remember it."""
        if len(self._seen) >= MOST:
            self._seen.clear()
        filled = self._seen[key] = bound(spec).filled(arrays)
        filled()


def key_of(arrays: Arrays, out: Any, *words: object) -> Hashable | None:
    """What tells this call from every other; None where it cannot be told, or is not worth it."""
    if type(out) is not tuple or any(type(x) is np.ndarray for x in out):
        return None
    try:
        key = (
            *[x if x is None else (x.data.ptr, x.shape, x.strides, x.dtype) for x in (*arrays, *out)], *words,
        )  # fmt: skip
        hash(key)
    except (AttributeError, TypeError):  # no CuPy array, or a word that is none: judging will tell
        return None
    return key
