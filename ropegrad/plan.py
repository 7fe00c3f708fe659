"""A call that is judged once and made many times: a spec bound to a backend.

CuPy arrays that a plan has seen before, at the same addresses with the same shapes, strides and dtypes, are
launched at once; all else is judged as in any call, so a plan is as safe as the public function.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from ropegrad.arrays import Array
from ropegrad.backends import choose, find
from ropegrad.backends.base import Inputs
from ropegrad.backends.cupy_fused import explain_dense
from ropegrad.backends.cupy_plain import no_gpu
from ropegrad.backends.rope_bound import bound
from ropegrad.calls import rope_spec
from ropegrad.cost import rope_cost
from ropegrad.errors import SpecError
from ropegrad.outputs import RopeGrads, judge_out
from ropegrad.repeats import Arrays, Last, Repeats, key_of
from ropegrad.spec import RopeSpec

_INPUTS = ("grad_q_embed", "grad_k_embed", "q", "k", "cos", "sin")


def plan_rope_backward(spec: RopeSpec, *, backend: str | None = None) -> RopePlan:
    """A plan for `rope_backward` calls of one spec.

    The spec says namespace="cupy" for CuPy arrays; which device it names does not matter. backend: as for
    `rope_backward`. Raises SpecError if no backend can run it.
    """
    given: object = spec
    if not isinstance(given, RopeSpec):
        raise SpecError(f"spec must be a ropegrad.RopeSpec, got {type(given).__name__}")
    return RopePlan(spec, choose(spec, backend).name)


@dataclass(frozen=True)
class RopePlan:
    """`rope_backward` for one spec: call it with the six arrays and, if they are there, `out=`.

    Cheap, picklable, and one plan serves many threads. Arrays that are the very objects of the last call are
    not judged again, so do not change their shape in place.
    """

    spec: RopeSpec
    backend: str
    _repeats: Repeats = field(default_factory=Repeats, init=False, repr=False, compare=False)
    _last: Last = field(default_factory=Last, init=False, repr=False, compare=False)

    def __call__(self, *arrays: Array | None, out: Arrays | None = None) -> RopeGrads:
        """The gradients, as `ropegrad.rope_backward` gives them. Raises SpecError as it does."""
        if out is not None and self._last.call((*arrays, *out)):
            return RopeGrads(*out)
        key = key_of(arrays, out) if self.backend == "cupy_fused" else None
        if out is not None and key is not None and self._repeats.call(key):
            return RopeGrads(*out)
        spec, inputs, given = self._judged(arrays, out)
        if key is not None and given is not None:
            assert out is not None
            self._last.keep((*arrays, *out), self._repeats.first(key, spec, inputs | given))
            return RopeGrads(*map(given.get, RopeGrads._fields))
        results = find(self.backend).rope_backward(spec, inputs, given)
        return RopeGrads(*map(results.get, RopeGrads._fields))

    @property
    def workspace_bytes(self) -> int | None:
        """Memory that a call takes besides inputs and outputs; None where the backend cannot tell."""
        return 0 if self.backend == "cupy_fused" else None

    def explain(self) -> str:
        """The backend, the bytes it must move and, on a GPU, the kernel for contiguous arrays."""
        cost = rope_cost(self.spec)
        lines = [f"backend: {self.backend}", f"  reads {cost.read} bytes, writes {cost.written}"]
        if self.backend == "cupy_fused":
            reason = no_gpu()
            told = (
                explain_dense(self.spec) if reason is None else [f"its kernel depends on the GPU: {reason}"]
            )
            lines += [f"  {line}" for line in told]
        return "\n".join(lines)

    def graph(self, *arrays: Array | None, out: Arrays) -> RopeGraph:
        """A CUDA graph of this call, on these arrays: call the result to replay it on the current stream.

        Raises SpecError as the plan does, and for a backend other than cupy_fused.
        """
        if self.backend != "cupy_fused":
            raise SpecError(f"graph() captures cupy_fused, this plan is of {self.backend}")
        spec, inputs, given = self._judged(arrays, out)
        assert given is not None
        captured = bound(spec).filled(inputs | given).captured()
        return RopeGraph(captured, (*arrays, *out), RopeGrads(*map(given.get, RopeGrads._fields)))

    def __reduce__(self) -> tuple[Any, ...]:
        return RopePlan, (self.spec, self.backend)

    def _judged(self, arrays: Arrays, out: Arrays | None) -> tuple[RopeSpec, Inputs, Inputs | None]:
        """The call's spec, on its own device, its inputs and outputs. SpecError if it is of another spec."""
        if len(arrays) != len(_INPUTS):
            raise SpecError(f"{len(arrays)} arrays given: a plan takes {len(_INPUTS)}, {', '.join(_INPUTS)}")
        inputs = {name: x for name, x in zip(_INPUTS, arrays, strict=True) if x is not None}
        mine = self.spec
        spec = rope_spec(
            inputs, needs=mine.needs, table=mine.table, layout=mine.layout, pairing=mine.pairing,
            adjoint=mine.adjoint, accumulate=mine.accumulate,
        )  # fmt: skip
        if replace(spec, device=mine.device) != mine:
            names = [one.name for one in fields(mine) if one.name != "device"]
            wrong = [name for name in names if getattr(spec, name) != getattr(mine, name)]
            told = ", ".join(
                f"{name} {getattr(spec, name)!r}, planned {getattr(mine, name)!r}" for name in wrong
            )
            raise SpecError(f"the arrays are of another spec than the plan: {told}")
        return spec, inputs, judge_out(spec, RopeGrads._fields, out, inputs)


@dataclass(frozen=True)
class RopeGraph:
    """A captured call. It holds its arrays; calling it replays it and returns its outputs."""

    captured: Any
    arrays: Arrays
    grads: RopeGrads

    def __call__(self) -> RopeGrads:
        """Replay on the current stream."""
        self.captured.launch()
        return self.grads
