"""Judging calls: the right arrays given back, inputs left unharmed, every element in bounds?"""

from __future__ import annotations

import itertools
import math
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ropegrad.spec import RopeSpec
from ropegrad.verify.bounds import bounds
from ropegrad.verify.case import Case, NumpyArray, token_slices
from ropegrad.verify.judge import effective_bits, judge_nonfinite, worst_ratio
from ropegrad.verify.oracle import expected

Function = Callable[[Case], dict[str, NumpyArray]]
Outputs = dict[str, NumpyArray]
Part = tuple[Case, dict[str, Outputs]]  # a piece of a case, and of every function's outputs
SLICE = 1 << 20  # elements of q and k that are judged at a time: temporaries are float64 and complex
SAMPLED = 1 << 22  # bytes of an input above which a sample is hashed: hashing must not cost more than judging


@dataclass(frozen=True)
class Finding:
    """A rule that was broken: its name, the array it concerns, and one sentence with the numbers."""

    rule: str
    array: str
    message: str


@dataclass
class Verdict:
    """What was seen of one call: per output the worst error/bound and the effective bits."""

    case: str
    seconds: float = math.nan
    worst: dict[str, float] = field(default_factory=dict)
    bits: dict[str, float] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether no rule was broken."""
        return not self.findings

    def merge(self, other: Verdict) -> None:
        """Take the worse of each figure, the better time, and all findings."""
        self.seconds = min(self.seconds, other.seconds)
        for name, ratio in other.worst.items():
            self.worst[name] = max(ratio, self.worst.get(name, 0.0))
        for name, bits in other.bits.items():
            self.bits[name] = min(bits, self.bits.get(name, math.inf))
        self.findings += other.findings


def check(case: Case, function: Function, *, measure_bits: bool = False, flushes: bool = False) -> Verdict:
    """Call `function` with the case and judge what it returns.

    `measure_bits` fills Verdict.bits; `flushes` judges by the wider bound for arithmetic that flushes
    subnormals to zero. Whatever the function raises is passed on.
    """
    return check_all(case, {"": function}, measure_bits=measure_bits, flushes=flushes)[""]


def check_all(
    case: Case,
    functions: Mapping[str, Function],
    *,
    measure_bits: bool = False,
    flushes: bool = False,
    catch: bool = False,
) -> dict[str, Verdict]:
    """As `check`, for several functions by name; the oracle is asked once.

    `catch` makes a finding of what a function raises instead of passing it on.
    """
    verdicts, outputs = {}, {}
    for name, function in functions.items():
        try:
            verdicts[name], outputs[name] = _call(case, function)
        except Exception as error:
            if not catch:
                raise
            raised = Finding("raised", "", f"{type(error).__name__}: {error}")
            verdicts[name], outputs[name] = Verdict(case.name, findings=[raised]), {}

    parts = _parts(case, outputs)
    for seen in _map(lambda part: _judge(*part, measure_bits=measure_bits, flushes=flushes), parts):
        for name, verdict in seen.items():
            verdict.seconds = verdicts[name].seconds
            verdicts[name].merge(verdict)
    return verdicts


def _map(judge: Callable[[Part], dict[str, Verdict]], parts: Iterator[Part]) -> Iterator[dict[str, Verdict]]:
    """The verdicts of all parts; two at a time where there is more than one."""
    first = next(parts, None)
    if first is None:
        return
    second = next(parts, None)
    if second is None:
        yield judge(first)
        return
    with ThreadPoolExecutor(2) as pool:
        yield from pool.map(judge, itertools.chain((first, second), parts))


def _call(case: Case, function: Function) -> tuple[Verdict, Outputs]:
    verdict = Verdict(case.name)
    before = _digests(case)
    start = time.perf_counter()
    outputs = function(case)
    verdict.seconds = time.perf_counter() - start
    for name, digest in _digests(case).items():
        if digest != before[name]:
            verdict.findings.append(Finding("input mutated", name, f"{name} changed during the call"))
    return verdict, {name: got for name, got in outputs.items() if _has_right_form(case, name, got, verdict)}


def _judge(
    case: Case, outputs: dict[str, Outputs], *, measure_bits: bool, flushes: bool
) -> dict[str, Verdict]:
    exact = expected(case)
    bound = bounds(case, exact, flushes_subnormals=flushes)
    must = judge_nonfinite(case, exact, bound)
    verdicts = {}
    for function, arrays in outputs.items():
        verdict = verdicts[function] = Verdict(case.name)
        for name, got in arrays.items():
            worst = worst_ratio(got, exact[name], bound[name], must[name])
            verdict.worst[name] = worst.ratio
            if worst.ratio > 1:
                message = (
                    f"{name}{list(worst.where)} is {worst.got!r}, exact {worst.exact!r}: "
                    f"{worst.ratio:.3g} times its bound {worst.bound:.3g}"
                )
                verdict.findings.append(Finding("wrong value", name, message))
            if measure_bits:
                verdict.bits[name] = effective_bits(got, exact[name])
    return verdicts


def _has_right_form(case: Case, name: str, got: Any, verdict: Verdict) -> bool:
    shape, dtype = case.spec.output(name.removeprefix("grad_"))
    if got is None:
        verdict.findings.append(Finding("missing gradient", name, f"{name} is None"))
        return False
    if got.shape != shape or str(got.dtype) != dtype:
        message = f"{name} is {got.dtype} {got.shape}, it must be {dtype} {shape}"
        verdict.findings.append(Finding("wrong shape, dtype or device", name, message))
        return False
    return True


def _parts(case: Case, outputs: dict[str, Outputs]) -> Iterator[Part]:
    """The whole of a small case or of a projection; runs of tokens of a large RoPE case."""
    spec = case.spec
    if not isinstance(spec, RopeSpec):
        yield case, outputs
        return
    token = spec.batch * ((spec.heads or 0) + (spec.kv_heads or 0)) * spec.head_dim
    tokens = max(SLICE // max(token, 1), 1)
    if tokens >= spec.seq:
        yield case, outputs
        return
    flat = {(function, name): got for function, arrays in outputs.items() for name, got in arrays.items()}
    for part, sliced in token_slices(case, flat, tokens):
        grouped: dict[str, Outputs] = {function: {} for function in outputs}
        for (function, name), got in sliced.items():
            grouped[function][name] = got
        yield part, grouped


def _digests(case: Case) -> dict[str, int]:
    """A checksum of each input; of a large one, of evenly spread rows."""
    digests = {}
    for name, array in case.inputs.items():
        if array is not None and array.size:
            step = max(array.nbytes // SAMPLED, 1)
            rows = array if step == 1 else array[..., ::step, :]
            digests[name] = zlib.crc32(np.ascontiguousarray(rows).view(np.uint8).data)
    return digests
