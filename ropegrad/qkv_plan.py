"""`qkv_rope_backward` for one spec, called many times, its memory known in advance."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from ropegrad import packed
from ropegrad.arrays import Array
from ropegrad.backends import choose, find
from ropegrad.backends.base import Inputs
from ropegrad.backends.cupy_tensor import allocate, describe_dense, device_of, read_status, run
from ropegrad.backends.qkv_status import Status
from ropegrad.backends.qkv_workspace import workspace
from ropegrad.calls import qkv_inputs, qkv_spec
from ropegrad.cost import qkv_cost
from ropegrad.errors import SpecError
from ropegrad.outputs import QkvBiasGrads, QkvGrads, QkvPackedGrads, judge_out, qkv_kind
from ropegrad.spec import QkvSpec

_TENSOR = "cupy_tensor"
Arrays = tuple[Array | None, ...]


def plan_qkv_rope_backward(spec: QkvSpec, *, backend: str | None = None) -> QkvPlan:
    """A plan for `qkv_rope_backward` calls of one spec.

    The spec says namespace="cupy" for CuPy arrays; which device it names does not matter. backend: as for
    `qkv_rope_backward`. Raises SpecError if no backend can run it.
    """
    given: object = spec
    if not isinstance(given, QkvSpec):
        raise SpecError(f"spec must be a ropegrad.QkvSpec, got {type(given).__name__}")
    if spec.rope.adjoint != "exact":
        raise SpecError(
            f"rope.adjoint is {spec.rope.adjoint!r}: the projections' gradients have the exact one"
        )
    return QkvPlan(spec, choose(spec, backend).name)


@dataclass(frozen=True)
class QkvPlan:
    """`qkv_rope_backward` for one spec: call it with the nine arrays and, if they are there, `out=`.

    Cheap, picklable, and one plan serves many threads; `status` is of the call that began last.
    """

    spec: QkvSpec
    backend: str
    _last: list[Array] = field(default_factory=list, init=False, repr=False, compare=False)

    def __call__(
        self,
        *arrays: Array | None,
        qkv_weight: Array | None = None,
        out: Arrays | None = None,
        workspace: Array | None = None,
    ) -> QkvGrads | QkvBiasGrads | QkvPackedGrads:
        """The gradients, as `ropegrad.qkv_rope_backward` gives them. Raises SpecError as it does.

        qkv_weight: makes it the packed form, None in the places of the three weights; the spec needs the
        weights of all of q, k and v or of none, and so their biases.
        workspace: an array of `workspace_bytes` bytes on the device, which the call may overwrite until it
        has ended on its stream; without it the call takes memory from CuPy's pool. Only for cupy_tensor.
        """
        if workspace is not None and self.backend != _TENSOR:
            raise SpecError(f"{self.backend} takes no workspace: leave workspace= away")
        inputs = qkv_inputs(arrays, qkv_weight)
        spec, is_packed = self._judged(inputs)
        kind = qkv_kind(spec, is_packed)
        given = judge_out(spec, kind._fields, out, inputs)
        run = partial(self._run, workspace)
        results = packed.backward(run, spec, inputs, given) if is_packed else run(spec, inputs, given)
        return kind(*map(results.get, kind._fields))

    @property
    def workspace_bytes(self) -> int | None:
        """Memory that a call takes besides contiguous outputs; None where the backend cannot tell."""
        return workspace(self.spec).size if self.backend == _TENSOR else None

    def explain(self) -> str:
        """The backend, the bytes it must move and, for cupy_tensor, its steps and the rule of the scales."""
        cost = qkv_cost(self.spec)
        lines = [f"backend: {self.backend}"]
        lines.append(f"  reads {cost.read} bytes, writes {cost.written}, {cost.flops} operations")
        if self.backend == _TENSOR:
            lines += [f"  {line}" for line in describe_dense(self.spec)]
        return "\n".join(lines)

    def status(self) -> Status | None:
        """Which scales the last call took; waits for its device. None before the first, and elsewhere.

        Of a call that was captured in a graph: what its last replay took.
        """
        return read_status(self._last[0]) if self._last else None

    def __reduce__(self) -> tuple[Any, ...]:
        return QkvPlan, (self.spec, self.backend)

    def _run(self, workspace: Array | None, spec: QkvSpec, inputs: Inputs, given: Inputs | None) -> Inputs:
        if self.backend != _TENSOR:
            return find(self.backend).qkv_rope_backward(spec, inputs, given)
        with device_of(inputs):
            results = given if given is not None else allocate(spec)
            state = run(spec, inputs | results, None if workspace is None else _bytes(workspace))
        self._last[:] = [] if state is None else [state]
        return results

    def _judged(self, inputs: Inputs) -> tuple[QkvSpec, bool]:
        """The call's spec, on its own device, and whether it is packed. SpecError if it is another spec's."""
        mine, rope = self.spec, self.spec.rope
        needs = packed.packed_needs(mine.needs) if "qkv_weight" in inputs else mine.needs
        spec, is_packed = qkv_spec(
            inputs, needs=needs, table=rope.table, layout=rope.layout, pairing=rope.pairing,
            precision=mine.precision, accumulate=rope.accumulate,
        )  # fmt: skip
        if replace(spec, rope=replace(spec.rope, device=rope.device)) != mine:
            raise SpecError(f"the arrays are of another spec than the plan: {_difference(spec, mine)}")
        return spec, is_packed


def _difference(spec: QkvSpec, planned: QkvSpec) -> str:
    """What differs, field by field."""
    pairs = [(one.name, spec, planned) for one in fields(spec) if one.name != "rope"]
    pairs += [(one.name, spec.rope, planned.rope) for one in fields(spec.rope) if one.name != "device"]  # type: ignore[misc]
    wrong = [(name, getattr(a, name), getattr(b, name)) for name, a, b in pairs]
    return ", ".join(f"{name} {a!r}, planned {b!r}" for name, a, b in wrong if a != b)


def _bytes(memory: Array) -> Array:
    """A contiguous array as bytes."""
    if not memory.flags.c_contiguous:
        raise SpecError("the workspace is not contiguous: pass a plain array of bytes")
    return memory.reshape(-1).view("uint8")
