"""Ropegrad's own backends against the oracle: the two suites on both draws of their inputs, and the edges."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from ropegrad.backends import BACKENDS, find
from ropegrad.backends.base import Backend
from ropegrad.backends.cupy_plain import no_gpu
from ropegrad.cost import qkv_cost, rope_cost
from ropegrad.spec import QkvSpec, RopeSpec
from ropegrad.suites import SUITES
from ropegrad.verify.case import Case
from ropegrad.verify.cases import EDGE_CASES
from ropegrad.verify.check import Verdict, check_all
from ropegrad.verify.draws import make_case
from ropegrad.verify.runners import run_backend

# As the benchmark draws its inputs, and as training sees them: real tables, upstream gradients near 1e-6.
# Bits are measured on the first.
DRAWS = {
    "rope": {"benchmark": ("normal", "benchmark"), "training": ("tiny_gradients", "llama3")},
    "qkv": {"benchmark": ("normal", "benchmark"), "training": ("tiny_gradients", "base10000")},
}


@dataclass
class Row:
    """One case: a verdict per backend, over all its draws."""

    op: str
    case: str
    moved: int
    flops: int
    verdicts: dict[str, Verdict]

    @property
    def passed(self) -> bool:
        """Whether every backend kept every rule."""
        return all(verdict.passed for verdict in self.verdicts.values())


Progress = Callable[[str], None]


NAMESPACES = {
    "cupy_fused": "cupy",
    "cupy_plain": "cupy",
    "cupy_tensor": "cupy",
}  # of the arrays that a backend is given; numpy for the others


def own_backends(spec: RopeSpec | QkvSpec) -> list[str]:
    """Names of the backends that can run here."""
    return [backend.name for backend in BACKENDS if cannot_run(backend, spec) is None]


def cannot_run(backend: Backend, spec: RopeSpec | QkvSpec) -> str | None:
    """Why a backend cannot run arrays of its own namespace here; None if it can."""
    namespace = NAMESPACES.get(backend.name, "numpy")
    if isinstance(spec, RopeSpec):
        asked: RopeSpec | QkvSpec = replace(spec, namespace=namespace)
    else:
        asked = replace(spec, rope=replace(spec.rope, namespace=namespace))
    return backend.why_not(asked) or (no_gpu() if namespace == "cupy" else None)


def backends_of(op: str) -> list[str]:
    """Names of the backends that can run an operation here."""
    return own_backends(next(iter(SUITES[op]().values())))


def suite_rows(op: str, backends: list[str], progress: Progress) -> Iterator[Row]:
    """The 16 cases of a suite, smallest first; `progress` is told each draw that is about to start."""
    specs = sorted(SUITES[op]().items(), key=lambda item: cost(item[1])[1])
    for name, spec in specs:
        moved, flops = cost(spec)
        row = Row(op, name, moved, flops, {})
        for draw, (values, tables) in DRAWS[op].items():
            progress(f"{op} {name} ({draw})")
            case = make_case(spec, seed(name, draw), values=values, tables=tables, name=f"{name} ({draw})")
            _add(row, case, backends, measure_bits=draw == "benchmark")
        yield row


def edge_rows(op: str, backends: list[str], progress: Progress) -> Iterator[Row]:
    """The named edge cases of an operation, each with fresh results and with poisoned `out=`."""
    for case in EDGE_CASES[op]():
        progress(f"{op}: {case.name}")
        row = Row(op, case.name, *cost(case.spec), {})
        _add(row, case, backends, measure_bits=False)
        _add(row, case, backends, measure_bits=False, into=True)
        yield row


def cost(spec: RopeSpec | QkvSpec) -> tuple[int, int]:
    """Bytes moved and floating-point operations."""
    least = rope_cost(spec) if isinstance(spec, RopeSpec) else qkv_cost(spec)
    return least.moved, least.flops


def seed(name: str, draw: str) -> int:
    """A seed that is the same on every machine."""
    return zlib.crc32(f"{name} {draw}".encode())


def _add(row: Row, case: Case, backends: list[str], *, measure_bits: bool, into: bool = False) -> None:
    able = [name for name in backends if cannot_run(find(name), case.spec) is None]
    namespaces = {name: NAMESPACES.get(name, "numpy") for name in able}
    functions = {
        name: partial(run_backend, backend=name, namespace=namespace, into=into)
        for name, namespace in namespaces.items()
    }
    for name, verdict in check_all(case, functions, measure_bits=measure_bits, catch=True).items():
        if namespaces[name] != "numpy":
            verdict.seconds = math.nan  # most of it was copying to the device and back
        if name in row.verdicts:
            row.verdicts[name].merge(verdict)
        else:
            row.verdicts[name] = verdict
