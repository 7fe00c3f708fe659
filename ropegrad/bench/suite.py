"""The two suites on a GPU: every contender checked, then all timed in turns, beside the device's ceilings.

A case's records: the ceilings at its bytes (rope) or its bare matrix products (qkv), ropegrad's CuPy
backends, PyTorch eager and compiled. All get the same inputs; each is judged against the oracle.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from ropegrad import api
from ropegrad.backends.base import Inputs
from ropegrad.bench.limits import Progress, Samples, Tuned
from ropegrad.bench.products import PRECISIONS, Product
from ropegrad.bench.run import Run
from ropegrad.bench.timing import Call, Timing, measure, sets_needed
from ropegrad.cost import Cost, qkv_cost, rope_cost
from ropegrad.records import Record
from ropegrad.spec import QkvSpec, RopeSpec
from ropegrad.suites import SUITES
from ropegrad.verify.case import Case
from ropegrad.verify.check import Verdict, check
from ropegrad.verify.conformance import NAMESPACES, own_backends, seed
from ropegrad.verify.draws import make_case
from ropegrad.verify.runners import options, to_namespace, to_numpy

PROTOCOLS = ("span", "graph")
Spec = RopeSpec | QkvSpec
Run_ = Callable[[], Sequence[Any]]  # launches, and gives the outputs in the problem's order


@dataclass(frozen=True)
class Contender:
    """One way to compute a case. `bind` takes a set of CuPy arrays by name."""

    name: str
    backend: str
    kernel: str
    precision: str | None
    options: dict[str, Any]
    bind: Callable[[Inputs], Run_]


# ---- who competes ------------------------------------------------------------------------------------------


def ours(spec: Spec) -> Iterator[Contender]:
    """Ropegrad's CuPy backends."""
    for name in own_backends(spec):
        if NAMESPACES.get(name) == "cupy":
            yield Contender(name, name, name, _promise(spec), {}, partial(_bind_ours, spec, name))


def _bind_ours(spec: Spec, backend: str, inputs: Inputs) -> Run_:
    import cupy

    out = tuple(cupy.empty(*spec.output(need)) for need in spec.needs)
    call = api.rope_backward if isinstance(spec, RopeSpec) else api.qkv_rope_backward
    return partial(call, *inputs.values(), **options(spec), out=out, backend=backend)


def torch_rivals(spec: Spec) -> Iterator[Contender]:
    """PyTorch: the reference formula eager, and every formula compiled; none if it is not installed."""
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    torch._dynamo.reset()  # it gives up compiling after a few shapes of one formula
    from ropegrad.bench.torch_formulas import FORMULAS

    op = "rope" if isinstance(spec, RopeSpec) else "qkv"
    for formula in FORMULAS[op]:
        for compiled in (False, True):
            if compiled or formula == "reference":
                how = "compile" if compiled else "eager"
                facts = {"formula": formula, "compiled": compiled}
                bind = partial(_bind_torch, op, formula, compiled)
                yield Contender(
                    f"torch {how} {formula}", "torch", f"torch {how}", _promise(spec), facts, bind
                )


def _bind_torch(op: str, formula: str, compiled: bool, inputs: Inputs) -> Run_:
    import cupy
    import torch

    from ropegrad.bench.torch_formulas import FORMULAS

    function = FORMULAS[op][formula]
    if compiled:
        function = torch.compile(function, dynamic=False)
    torch.backends.cuda.matmul.allow_tf32 = False
    tensors = [torch.utils.dlpack.from_dlpack(x) for x in inputs.values()]

    external: Any = torch.cuda.ExternalStream

    def run() -> Sequence[Any]:
        stream = external(cupy.cuda.get_current_stream().ptr)
        with torch.cuda.stream(stream), torch.no_grad():
            return function(*tensors)

    return run


def _promise(spec: Spec) -> str | None:
    return None if isinstance(spec, RopeSpec) else spec.precision


# ---- one case ----------------------------------------------------------------------------------------------


def time_suite(
    run: Run, op: str, progress: Progress, samples: Samples, *, rivals: bool = True, skip: Sequence[str] = ()
) -> Iterator[list[Record]]:
    """The records of one case after the other, but for those to skip."""
    for name, spec in SUITES[op]().items():
        if name not in skip:
            progress(f"{op} {name}")
            yield time_case(run, op, name, spec, samples, rivals=rivals)


def time_case(run: Run, op: str, name: str, spec: Spec, samples: Samples, *, rivals: bool) -> list[Record]:
    """Check, tune the ceiling, then all in turns: by span, then by graph."""
    case = make_case(spec, seed(name, "benchmark"), tables="benchmark", name=name)
    cost = rope_cost(spec) if isinstance(spec, RopeSpec) else qkv_cost(spec)
    first = {key: to_namespace(x, "cupy") for key, x in case.inputs.items() if x is not None}
    count = sets_needed(cost.read, run.device.l2)
    sets = [first, *({key: x.copy() for key, x in first.items()} for _ in range(count - 1))]
    contenders = [*ours(spec), *(torch_rivals(spec) if rivals else ())]
    bound = {one.name: [one.bind(inputs) for inputs in sets] for one in contenders}
    verdicts = {one.name: _judge(case, one, bound[one.name][0]) for one in contenders}
    ceiling = Tuned(run, cost.moved, samples) if isinstance(spec, RopeSpec) else BareProducts(run, spec)
    found: list[Record] = []
    for protocol in PROTOCOLS:
        right = {name: calls for name, calls in bound.items() if verdicts[name].passed}
        timings = measure(ceiling.contenders | right, protocol, l2=run.device.l2, samples=samples.final)
        found += ceiling.records(name, timings)
        for one in contenders:
            timing = timings.get(one.name, Timing(next(iter(timings.values())).protocol, ()))
            found.append(_record(run, op, name, spec, cost, one, timing, verdicts[one.name]))
    return found


def _judge(case: Case, one: Contender, call: Run_) -> Verdict:
    spec = case.spec
    if one.precision is not None and isinstance(spec, QkvSpec):
        case = replace(case, spec=replace(spec, precision=one.precision))
    names = case.outputs
    return check(case, lambda _: dict(zip(names, map(to_numpy, call()), strict=True)), measure_bits=True)


def _record(
    run: Run, op: str, case: str, spec: Spec, cost: Cost, one: Contender, timing: Timing, verdict: Verdict
) -> Record:
    broken = {finding.array or "call": math.inf for finding in verdict.findings}
    return run.record(
        op, case, timing, verdict.worst | broken, backend=one.backend, kernel=one.kernel,
        spec={"suite": op} | asdict(spec), options=one.options | {"contender": one.name},
        precision=one.precision, bytes_read=cost.read, bytes_written=cost.written, flops=cost.flops,
        effective_bits={key: bits if math.isfinite(bits) else None for key, bits in verdict.bits.items()},
    )  # fmt: skip


class BareProducts:
    """A qkv case's two matrix products by cuBLAS at each precision, and nothing else; to be timed."""

    def __init__(self, run: Run, spec: QkvSpec) -> None:
        self.run, m, k, n = run, spec.tokens, sum(map(spec.rows, "qkv")), spec.hidden_size or 0
        self.pairs = {one: (Product(m, k, n, one), Product(k, m, n, one)) for one in PRECISIONS}
        self._arrays = {one: [product.arrays(1)[0] for product in pair] for one, pair in self.pairs.items()}
        self.contenders: dict[str, list[Call]] = {
            f"products {one}": [partial(self._call, one)] for one in self.pairs
        }

    def _call(self, precision: str) -> None:
        for product, arrays in zip(self.pairs[precision], self._arrays[precision], strict=True):
            product.calls([arrays])[0]()

    def records(self, case: str, timings: Mapping[str, Timing]) -> Iterator[Record]:
        """One a precision."""
        for precision, pair in self.pairs.items():
            self._call(precision)
            checks = [
                product.check(*arrays) for product, arrays in zip(pair, self._arrays[precision], strict=True)
            ]
            names = ("grad_hidden_states", "grad_weights")
            yield self.run.record(
                "products", case, timings[f"products {precision}"],
                {name: ratio for name, (ratio, _) in zip(names, checks, strict=True)},
                effective_bits={name: bits for name, (_, bits) in zip(names, checks, strict=True)},
                spec={"suite": "qkv"}, backend="cublas", kernel="cublasGemmEx", precision=precision,
                bytes_read=sum(product.read for product in pair),
                bytes_written=sum(product.written for product in pair),
                flops=sum(product.flops for product in pair),
            )  # fmt: skip
