"""The GPU that CuPy uses: ropegrad's CuPy backends beside its ceilings, PyTorch, Triton and Liger-Kernel."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ropegrad.backends.base import Inputs
from ropegrad.bench.activity import tracer
from ropegrad.bench.contender import Call, Contender, Spec
from ropegrad.bench.facts import OWN
from ropegrad.bench.limits import Samples, Tuned
from ropegrad.bench.place import Ceiling, Choice
from ropegrad.bench.products import PRECISIONS, Product
from ropegrad.bench.rivals import contenders
from ropegrad.bench.run import Run, digest_with
from ropegrad.bench.run import start as here
from ropegrad.bench.timing import Timing, measure, sets_needed
from ropegrad.bench.workloads import Problem
from ropegrad.records import Record
from ropegrad.spec import QkvSpec
from ropegrad.verify.case import Case
from ropegrad.verify.runners import to_namespace


@dataclass(frozen=True)
class Gpu:
    """The current device. cupti: span must be read by CUPTI, not by its stand-in."""

    run: Run
    samples: int
    cupti: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    protocols: tuple[str, ...] = ("span", "graph")
    name: str = "gpu"

    def refusal(self, protocol: str) -> str | None:
        """Asked for by name, span is the kernels' own time stamps."""
        found = tracer() if protocol == "span" and self.cupti else None
        return f"--protocol span needs CUPTI: {found}" if isinstance(found, str) else None

    def refuses(self, one: Contender, call: Call, protocol: str) -> str | None:
        """What of others' cannot be captured, and what runs on threads and streams of its own."""
        if one.protocols and protocol not in one.protocols:
            return f"its kernels run on threads of its framework's: write --protocol {one.protocols[0]}"
        return uncapturable(call) if protocol == "graph" and one.backend not in OWN else None

    def sets(self, case: Case, read: int) -> list[Inputs]:
        """Together more than twice the L2."""
        first = {name: to_namespace(x, "cupy") for name, x in case.inputs.items() if x is not None}
        count = sets_needed(read, self.run.device.l2)
        return [first, *({name: x.copy() for name, x in first.items()} for _ in range(count - 1))]

    def contenders(self, spec: Spec, choice: Choice) -> Iterator[Contender]:
        """Ours, then theirs."""
        return contenders(spec, choice)

    def ceiling(self, problem: Problem) -> Ceiling:
        """Copy and stream at the case's bytes; of the projections the bare matrix products."""
        if isinstance(problem.spec, QkvSpec):
            return BareProducts(self.run, problem.spec)
        return Tuned(self.run, problem.cost.moved, Samples(final=self.samples))

    def time(self, contenders: Mapping[str, Sequence[Any]], protocol: str) -> dict[str, Timing]:
        """In turns."""
        return measure(contenders, protocol, l2=self.run.device.l2, samples=self.samples)

    def digest(self, one: Contender) -> str:
        """Of its backend's code, or of the target's file and of what times and judges it."""
        return digest_with(one.backend, one.source)


def start(samples: int, commit: str | None = None, command: str | None = None, *, cupti: bool = False) -> Gpu:
    """Facts about here and now. commit: where git cannot tell; command: where it is not `ropegrad …`."""
    return Gpu(here(commit, command), samples, cupti)


def uncapturable(call: Call) -> str | None:
    """Why no graph can be captured of a call; None if one can."""
    stream = _aside()
    with stream:
        call()  # what it builds or allocates once cannot be captured
        stream.synchronize()
        stream.begin_capture()
        try:
            call()
        except Exception as error:
            with contextlib.suppress(Exception):  # it says the same again
                stream.end_capture()
            return f"it cannot be captured in a CUDA graph: {type(error).__name__}: {error}"
        try:
            stream.end_capture()
        except Exception as error:
            return f"it cannot be captured in a CUDA graph: {type(error).__name__}: {error}"
    return None


@functools.cache
def _aside() -> Any:
    """One stream for all: PyTorch keeps memory for each stream that it has seen."""
    import cupy

    return cupy.cuda.Stream(non_blocking=True)


class BareProducts:
    """A qkv case's two matrix products by cuBLAS at each precision, and nothing else; to be timed.

    The left operand of the weights' gradients is Dᵀ as it lies in memory, token by token: rows of as many
    elements as there are tokens would be misaligned where that is no multiple of eight.
    """

    def __init__(self, run: Run, spec: QkvSpec) -> None:
        self.run, m, k, n = run, spec.tokens, sum(map(spec.rows, "qkv")), spec.hidden_size or 0
        self.pairs = {one: (Product(m, k, n, one), Product(k, m, n, one)) for one in PRECISIONS}
        self._arrays = {one: [product.arrays(1)[0] for product in pair] for one, pair in self.pairs.items()}
        for _, weights in self._arrays.values():
            weights[0] = weights[0].T.copy().T
        self.contenders = {f"products {one}": [partial(self._call, one)] for one in self.pairs}

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
