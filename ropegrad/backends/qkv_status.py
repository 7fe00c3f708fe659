"""What the QKV memory pass decided about its scales, read back from the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

# The struct State of kernels/qkv_inputs.cuh.
STATE = np.dtype(
    [
        ("exponent", "3i4"), ("again", "3i4"), ("again_d", "i4"), ("own", "2i4"), ("own_columns", "3i4"),
        ("unscale", "2i4"), ("alpha", "2f4"), ("one", "f4"), ("zero", "f4"), ("largest", "3u4"),
        ("recompute", "2i4"), ("mend", "3i4"), ("further", "2f4"),
    ]
)  # fmt: skip
_MATRICES = ("gradients", "hidden_states", "weights")


@dataclass(frozen=True)
class Status:
    """The scales of one call.

    exponents
        By matrix: it was multiplied by 2 to this power, where it has one scale.
    largest
        By matrix: its largest finite magnitude.
    again
        Matrices whose first, guessed scale was not kept: they were converted twice.
    own_scales
        What had scales of its own, since one for the matrix would have broken the promise.
    unscaled
        Products whose scales were undone by a pass of their own.
    recomputed
        Products computed anew in float32, slowly: what is small in one operand is large in the other.
    """

    exponents: dict[str, int]
    largest: dict[str, float]
    again: tuple[str, ...]
    own_scales: tuple[str, ...]
    unscaled: tuple[str, ...]
    recomputed: tuple[str, ...]

    def __str__(self) -> str:
        lines = [
            f"{name}: largest magnitude {self.largest[name]:.3g}, scaled by 2^{self.exponents[name]}"
            + (", converted twice" if name in self.again else "")
            for name in _MATRICES
        ]
        lines += [f"own scales: {name}" for name in self.own_scales]
        lines += [f"unscaled apart: {name}" for name in self.unscaled]
        return "\n".join(lines + [f"computed anew in float32: {name}" for name in self.recomputed])


def status_of(state: Any) -> Status:
    """From the bytes of a State."""
    s = np.frombuffer(bytes(state), STATE, 1)[0]
    own = {
        "tokens of the gradients, for grad_hidden_states": s["own"][0],
        "channels of the gradients, for the weights' gradients": s["own"][1],
        "channels of hidden_states": s["own_columns"][1],
        "columns of the weights": s["own_columns"][2],
    }
    products = "grad_hidden_states", "the weights' gradients"
    again = zip(_MATRICES, s["again"], strict=True)
    return Status(
        exponents=dict(zip(_MATRICES, s["exponent"].tolist(), strict=True)),
        largest=dict(zip(_MATRICES, s["largest"].view(np.float32).tolist(), strict=True)),
        again=tuple(name for name, more in again if more or (name == "gradients" and s["again_d"])),
        own_scales=tuple(name for name, has in own.items() if has),
        unscaled=tuple(name for name, apart in zip(products, s["unscale"], strict=True) if apart),
        recomputed=tuple(name for name, anew in zip(products, s["recompute"], strict=True) if anew),
    )
