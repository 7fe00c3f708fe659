"""How fast the QKV projections' gradients are at each precision, beside cuBLAS's bare products. Needs a GPU.

For each workload of the qkv suite: ours is checked against the oracle (the whole workload with --whole, else
the same heads and channels on few tokens), then takes turns with the bare products of cuBLAS, with its own
memory pass, with cuBLAS's products on the pass's operands and, with --wide, with itself on data for which one
scale for a matrix does not do. Prints a table, by graph and by span, and writes one JSON line a workload,
contender and protocol.

    python analysis/tune_qkv.py [--cases N ...] [--samples N] [--whole] [--wide] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import cupy
import numpy as np

from ropegrad.backends.cublas import multiply
from ropegrad.backends.cublas_narrow import Narrow
from ropegrad.backends.cupy_tensor import execute, place, processor
from ropegrad.backends.hopper import Both
from ropegrad.backends.qkv_launch import Fill, Launch, Room, Steps, prepare
from ropegrad.backends.qkv_workspace import workspace
from ropegrad.bench import device as devices
from ropegrad.bench.products import PRECISIONS, Product
from ropegrad.bench.timing import Call, measure, sets_needed
from ropegrad.cost import qkv_cost
from ropegrad.qkv_plan import plan_qkv_rope_backward
from ropegrad.spec import QkvSpec
from ropegrad.suites import qkv_suite
from ropegrad.verify import check, make_case
from ropegrad.verify.case import Case
from ropegrad.verify.runners import run_backend, to_namespace

PROTOCOLS, PROMISES = ("graph", "span"), ("highest", "high", "medium")
BARE = {"fp16": "cuBLAS float16", "tf32": "cuBLAS TF32", "fp32": "cuBLAS IEEE"}
Arrays = dict[str, Any]


@dataclass(frozen=True)
class Bound:
    """One call on one set of arrays, as its steps: all of them, or the launches or products alone."""

    spec: QkvSpec
    steps: Steps
    held: tuple[Any, ...]

    def __call__(self) -> None:
        """Make the steps."""
        execute(self.steps)

    def only(self, *kinds: type) -> Bound:
        """The same with some kinds of step."""
        kept = tuple(step for step in self.steps.steps if isinstance(step, kinds))
        return replace(self, steps=replace(self.steps, steps=kept))


def bind(spec: QkvSpec, inputs: Arrays) -> Bound:
    """Outputs (the weights' in one buffer) and workspace of their own."""
    weights = cupy.full((sum(map(spec.rows, "qkv")), spec.hidden_size), cupy.nan, cupy.float32)
    outputs, start = {}, 0
    for part in "qkv":
        outputs[f"grad_{part}_weight"] = weights[start : start + spec.rows(part)]
        start += spec.rows(part)
    outputs["grad_hidden_states"] = cupy.full(spec.hidden_shape, cupy.nan, cupy.float32)
    room = cupy.empty(workspace(spec).size, cupy.uint8)
    placed = {name: place(x) for name, x in (inputs | outputs).items()}
    at = Room(room.data.ptr, room.data.ptr)
    return Bound(spec, prepare(spec, placed, at, processor(0)), (inputs, outputs, room))


def case_of(name: str, spec: QkvSpec) -> Case:
    """The benchmark's draw."""
    return make_case(spec, 2026, tables="benchmark", name=name)


def wide(case: Case) -> Case:
    """Tokens of very different magnitudes: D·W takes scales by token, Dᵀ·X by channel."""
    inputs = dict(case.inputs)
    rope = case.spec.rope if isinstance(case.spec, QkvSpec) else case.spec
    for name in ("grad_query", "grad_key", "grad_value"):
        x = inputs[name]
        assert x is not None
        axis = {"bhsd": 2, "bshd": 1, "sbhd": 0}[rope.layout]
        shape = [1] * x.ndim
        shape[axis] = x.shape[axis]
        factors = 10.0 ** (24 * (x.shape[axis] > 1) * (np.arange(x.shape[axis]) % 7 / 6) - 12)
        inputs[name] = (x * factors.reshape(shape)).astype(x.dtype)
    return replace(case, inputs=inputs, name=f"{case.name}, tokens of many scales")


def right(case: Case, precision: str, entire: bool) -> dict[str, float]:
    """Effective bits of our outputs. Raises AssertionError where the promise is broken."""
    spec = case.spec
    assert isinstance(spec, QkvSpec)
    if not entire:
        spec = replace(spec, rope=replace(spec.rope, batch=1, seq=256, table_batch=1))
        case = case_of(case.name, spec)
    case = replace(case, spec=replace(spec, precision=precision, rope=replace(spec.rope, namespace="numpy")))
    verdict = check(case, partial(run_backend, backend="cupy_tensor", namespace="cupy"), measure_bits=True)
    assert verdict.passed, verdict.findings
    return verdict.bits


def bare(spec: QkvSpec, precision: str) -> Callable[[], None]:
    """Both products of a workload by cuBLAS at one precision, float32 results."""
    m, k, n = spec.tokens, sum(map(spec.rows, "qkv")), spec.hidden_size or 0
    mode = PRECISIONS[precision][0]
    (d, w, hidden), (t, x, weights) = (
        Product(*shape, precision).arrays(1)[0] for shape in ((m, k, n), (k, m, n))
    )
    t = cupy.ascontiguousarray(t.T).T  # Dᵀ as it lies in memory

    def run() -> None:
        multiply(d, w, hidden, mode)
        multiply(t, x, weights, mode)

    return run


def tune(name: str, spec: QkvSpec, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Check and time one workload; a line for each contender and protocol."""
    here, cost = devices.current(), qkv_cost(spec)
    case = case_of(name, replace(spec, rope=replace(spec.rope, namespace="numpy")))
    bits = {precision: right(case, precision, given.whole) for precision in PROMISES}
    cases = {"": case} | ({" wide": wide(case)} if given.wide else {})
    if given.wide:
        right(cases[" wide"], "high", True)
    count = sets_needed(cost.read, here.l2)
    contenders: dict[str, list[Call]] = {BARE[one]: [bare(spec, one)] for one in BARE}
    chosen: dict[str, str] = {}
    for kind, one in cases.items():
        first = {key: to_namespace(x, "cupy") for key, x in one.inputs.items() if x is not None}
        sets = [first, *({key: x.copy() for key, x in first.items()} for _ in range(count - 1))]
        for precision in PROMISES:
            promised = replace(spec, precision=precision)
            plan = plan_qkv_rope_backward(promised)
            plan(*first.values())
            chosen[precision + kind] = str(plan.status())
            bound = [bind(promised, inputs) for inputs in sets]
            contenders[precision + kind] = list(bound)
            if not kind:
                for call in bound:
                    call()  # the products alone then find operands and alpha
                products = (Fill, Both) if precision == "highest" else (Narrow,)
                contenders[f"{precision}, pass alone"] = [call.only(Fill, Launch) for call in bound]
                contenders[f"{precision}, products alone"] = [call.only(*products) for call in bound]
    lines = []
    for protocol in PROTOCOLS:
        for key, taken in measure(contenders, protocol, l2=here.l2, samples=given.samples).items():
            lines.append(
                {
                    "case": name, "contender": key, "protocol": taken.protocol, "device": here.name,
                    "median_us": round(taken.median_us, 3), "spread_us": round(taken.spread_us, 3),
                    "flops": cost.flops, "moved": cost.moved, "effective_bits": bits.get(key),
                    "status": chosen.get(key),
                }
            )  # fmt: skip
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", type=int, nargs="*", help="numbers of the suite's cases, from 0")
    parser.add_argument("--samples", type=int, default=30)
    parser.add_argument("--whole", action="store_true", help="check the whole workload, on the host: slow")
    parser.add_argument("--wide", action="store_true", help="also time data that need finer scales")
    parser.add_argument("--out", default="tune-qkv.jsonl")
    given = parser.parse_args()
    suite = list(qkv_suite().items())
    chosen = [suite[i] for i in given.cases] if given.cases else suite
    print(f"{devices.current().name}, CuPy {cupy.__version__}; microseconds")
    started, everything = time.perf_counter(), []
    with open(given.out, "w", encoding="utf-8") as file:
        for name, spec in chosen:
            lines = tune(name, replace(spec, rope=replace(spec.rope, namespace="cupy")), given)
            file.writelines(json.dumps(line) + "\n" for line in lines)
            file.flush()
            everything += lines
            for protocol in dict.fromkeys(line["protocol"] for line in lines):
                times = {x["contender"]: x["median_us"] for x in lines if x["protocol"] == protocol}
                told = "  ".join(f"{key} {value:.1f}" for key, value in times.items())
                print(f"{name:26} {protocol:12} {told}", flush=True)
    for protocol in dict.fromkeys(line["protocol"] for line in everything):
        mine = [line for line in everything if line["protocol"] == protocol]
        print(f"mean by {protocol}:")
        for key in dict.fromkeys(line["contender"] for line in mine):
            mean = statistics.fmean(line["median_us"] for line in mine if line["contender"] == key)
            print(f"  {key:26} {mean:8.2f}")
    print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
