"""The two suites on a GPU: every contender checked, then all timed in turns, beside the device's ceilings.

A case's records: the ceilings at its bytes (rope) or its bare matrix products (qkv), ropegrad's CuPy
backends, PyTorch eager and compiled. All get the same inputs; each is judged against the oracle.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial

from ropegrad.bench import rivals as others
from ropegrad.bench.limits import Progress, Samples, Tuned
from ropegrad.bench.products import PRECISIONS, Product
from ropegrad.bench.rivals import Contender, Spec, contenders
from ropegrad.bench.run import Run
from ropegrad.bench.timing import Call, Timing, measure, sets_needed
from ropegrad.cost import Cost, qkv_cost, rope_cost
from ropegrad.records import Record
from ropegrad.spec import QkvSpec, RopeSpec
from ropegrad.suites import SUITES, rope_suite
from ropegrad.verify.case import Case
from ropegrad.verify.check import Verdict, check
from ropegrad.verify.conformance import seed
from ropegrad.verify.draws import make_case
from ropegrad.verify.runners import to_namespace, to_numpy

PROTOCOLS = ("span", "graph")


WITHOUT_TABLES = {"rope-qk": "bhsd", "rope-qk-bshd": "bshd"}  # gradients of q and k alone, by layout
TIMED = (*SUITES, *WITHOUT_TABLES)


def timed_suite(name: str) -> dict[str, Spec]:
    """The cases of one of TIMED; without the tables' gradients Liger-Kernel competes too."""
    if name not in WITHOUT_TABLES:
        return dict(SUITES[name]())
    layout = WITHOUT_TABLES[name]
    return {case: replace(spec, needs=("q", "k"), layout=layout) for case, spec in rope_suite().items()}


# ---- one case ----------------------------------------------------------------------------------------------


def time_suite(
    run: Run, op: str, progress: Progress, samples: Samples, *, rivals: bool = True, skip: Sequence[str] = ()
) -> Iterator[list[Record]]:
    """The records of one case after the other, but for those to skip."""
    for name, spec in timed_suite(op).items():
        if name not in skip:
            progress(f"{op} {name}")
            yield time_case(run, op, name, spec, samples, rivals=rivals)


def time_case(run: Run, op: str, name: str, spec: Spec, samples: Samples, *, rivals: bool) -> list[Record]:
    """Check, tune the ceiling, then all in turns: by span, then by graph."""
    tables = "llama3" if op in WITHOUT_TABLES else "benchmark"
    case = make_case(spec, seed(name, "benchmark"), tables=tables, name=name)
    cost = rope_cost(spec) if isinstance(spec, RopeSpec) else qkv_cost(spec)
    first = {key: to_namespace(x, "cupy") for key, x in case.inputs.items() if x is not None}
    count = sets_needed(cost.read, run.device.l2)
    sets = [first, *({key: x.copy() for key, x in first.items()} for _ in range(count - 1))]
    everybody = list(contenders(spec, rivals=rivals))
    bound = {one.name: [one.bind(inputs) for inputs in sets] for one in everybody}
    verdicts = {one.name: _judge(case, one, bound[one.name][0]) for one in everybody}
    ceiling = Tuned(run, cost.moved, samples) if isinstance(spec, RopeSpec) else BareProducts(run, spec)
    found: list[Record] = []
    for protocol in PROTOCOLS:
        right = {name: calls for name, calls in bound.items() if verdicts[name].passed}
        timings = measure({**ceiling.contenders, **right}, protocol, l2=run.device.l2, samples=samples.final)
        found += ceiling.records(name, timings, op)
        for one in everybody:
            timing = timings.get(one.name, Timing(next(iter(timings.values())).protocol, ()))
            found.append(_record(run, op, name, spec, cost, one, timing, verdicts[one.name]))
    return found


def _judge(case: Case, one: Contender, call: others.Call) -> Verdict:
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
        op.partition("-")[0], case, timing, verdict.worst | broken, backend=one.backend, kernel=one.kernel,
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

    def records(self, case: str, timings: Mapping[str, Timing], suite: str) -> Iterator[Record]:
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
                spec={"suite": suite}, backend="cublas", kernel="cublasGemmEx", precision=precision,
                bytes_read=sum(product.read for product in pair),
                bytes_written=sum(product.written for product in pair),
                flops=sum(product.flops for product in pair),
            )  # fmt: skip
