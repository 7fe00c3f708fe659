"""NumPy arrays through one compiled loop: every byte is read once and written once, on all cores.

The loop is in `numba_kernel`, how arrays get there in `numba_call`. Numba is imported when it is first used.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ropegrad.arrays import numpy_dtype
from ropegrad.backends import numpy_projection as projection
from ropegrad.backends.base import Inputs, Outputs
from ropegrad.backends.numba_call import Operands, Plan, plan_backward, plan_rotation, run
from ropegrad.backends.numpy_products import copies
from ropegrad.backends.numpy_tile import NumpyArray
from ropegrad.spec import QkvSpec, RopeSpec
from ropegrad.tiles import cores


@cache
def compiled() -> Any:
    """The module of the compiled loop, or the sentence why Numba cannot be used here."""
    if importlib.util.find_spec("numba") is None:
        return "Numba is not installed (extra cpu)"
    try:
        import numba

        if numba.config.DISABLE_JIT:
            return "NUMBA_DISABLE_JIT is set"
        from ropegrad.backends import numba_kernel
    except Exception as error:  # a Numba that does not fit this NumPy, say: the other backends need none
        return f"Numba cannot be imported: {type(error).__name__}: {error}"
    return numba_kernel


@dataclass(frozen=True)
class NumbaCpu:
    """One compiled loop on `threads` threads (default: one a core that this process may use).

    `tokens` is the number of tokens of a tile; neither number changes a single bit of a result.
    """

    threads: int | None = None
    tokens: int | None = None
    name: str = "numba_cpu"

    def why_not(self, spec: RopeSpec | QkvSpec) -> str | None:
        """It wants NumPy arrays, and Numba."""
        if spec.namespace != "numpy":
            return f"it runs NumPy arrays, these are of {spec.namespace}"
        found = compiled()
        return found if isinstance(found, str) else None

    def explain(self, spec: RopeSpec | QkvSpec, inputs: Inputs) -> list[str]:
        """Tiles, threads and copies."""
        if isinstance(spec, RopeSpec):
            plan = plan_backward(spec, _sides(inputs, {}), threads=self._threads, tokens=self.tokens)
            return [_words(plan)]
        sides = ((inputs.get("grad_query"), None, None), (inputs.get("grad_key"), None, None))
        plan = plan_rotation(spec.rope, sides, forward=False, threads=self._threads, tokens=self.tokens)
        return [_words(plan), *copies(spec, inputs)]

    def rope_backward(self, spec: RopeSpec, inputs: Inputs, out: Outputs | None) -> Outputs:
        """Gradients of RoPE; see `ropegrad.rope_backward`."""
        results = out if out is not None else {
            f"grad_{need}": np.empty(shape, numpy_dtype(dtype))
            for need in spec.needs for shape, dtype in [spec.output(need)]
        }  # fmt: skip
        sides = _sides(inputs, results)
        plan = plan_backward(spec, sides, threads=self._threads, tokens=self.tokens)
        run(compiled(), plan, sides, inputs, results)
        return results

    def qkv_rope_backward(self, spec: QkvSpec, inputs: Inputs, out: Outputs | None) -> Outputs:
        """Gradients of the projections and RoPE; see `ropegrad.qkv_rope_backward`."""
        rotate = self._rotation(spec.rope, inputs, forward=False)
        return projection.backward(spec, inputs, out or {}, rotate, self._threads)

    def rope(self, spec: RopeSpec, inputs: Inputs) -> Outputs:
        """RoPE of q and k; see `ropegrad.rope`."""
        rotate = self._rotation(spec, inputs, forward=True)
        results = {}
        for side in spec.needs:
            results[f"{side}_embed"] = np.empty(spec.output(side)[0], numpy_dtype(spec.dtype))
            rotate(inputs[side], results[f"{side}_embed"])
        return results

    def qkv_rope(self, spec: QkvSpec, inputs: Inputs) -> Outputs:
        """Projections and RoPE; see `ropegrad.qkv_rope`."""
        rotate = self._rotation(spec.rope, inputs, forward=True)
        return projection.forward(spec, inputs, rotate, self._threads)

    def _rotation(self, spec: RopeSpec, inputs: Inputs, *, forward: bool) -> projection.Rotate:
        def rotate(x: NumpyArray, y: NumpyArray) -> None:
            sides = ((x, None, y),)
            plan = plan_rotation(spec, sides, forward=forward, threads=self._threads, tokens=self.tokens)
            run(compiled(), plan, sides, inputs, {})

        return rotate

    @property
    def _threads(self) -> int:
        return self.threads or cores()


def _sides(inputs: Inputs, results: Outputs) -> tuple[Operands, ...]:
    return tuple(
        (inputs.get(f"grad_{side}_embed"), inputs.get(side), results.get(f"grad_{side}")) for side in "qk"
    )


def _words(plan: Plan) -> str:
    tokens = "1 token" if plan.tile == 1 else f"{plan.tile} tokens"
    threads = "1 thread" if plan.workers == 1 else f"{plan.workers} threads"
    return (
        f"one compiled loop over tiles of {tokens} on {threads}, computing in {plan.spec.compute}"
        f"{', writing past the cache' if plan.streams else ''}; any strides are read and written in place"
    )
