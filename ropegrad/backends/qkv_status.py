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
    """

    exponents: dict[str, int]
    largest: dict[str, float]
    again: tuple[str, ...]
    own_scales: tuple[str, ...]
    unscaled: tuple[str, ...]

    def __str__(self) -> str:
        lines = [
            f"{name}: largest magnitude {self.largest[name]:.3g}, scaled by 2^{self.exponents[name]}"
            + (", converted twice" if name in self.again else "")
            for name in _MATRICES
        ]
        lines += [f"own scales: {name}" for name in self.own_scales]
        return "\n".join(lines + [f"unscaled apart: {name}" for name in self.unscaled])


def status_of(state: Any) -> Status:
    """From the bytes of a State."""
    s = np.frombuffer(bytes(state), STATE, 1)[0]
    own = {
        "tokens of the gradients, for grad_hidden_states": s["own"][0],
        "channels of the gradients, for the weights' gradients": s["own"][1],
        "channels of hidden_states": s["own_columns"][1],
        "columns of the weights": s["own_columns"][2],
    }
    products = zip(("grad_hidden_states", "the weights' gradients"), s["unscale"], strict=True)
    again = zip(_MATRICES, s["again"], strict=True)
    return Status(
        exponents=dict(zip(_MATRICES, s["exponent"].tolist(), strict=True)),
        largest=dict(zip(_MATRICES, s["largest"].view(np.float32).tolist(), strict=True)),
        again=tuple(name for name, more in again if more or (name == "gradients" and s["again_d"])),
        own_scales=tuple(name for name, has in own.items() if has),
        unscaled=tuple(name for name, apart in products if apart),
    )
