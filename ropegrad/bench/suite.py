"""One case, on a CPU or on a GPU: everybody is checked on the inputs that are then timed, in turns.

A case's records: the ceilings at its bytes or its bare matrix products, ropegrad's backends, targets, rivals.
All get the same inputs; each is judged against the oracle at its own promise, and who is wrong has no time.
Who is inside every bound and yet shows fewer bits than its promise says is timed, and its record says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from ropegrad.backends.base import Inputs
from ropegrad.bench.contender import TARGET, Call, Contender, Spec, promising
from ropegrad.bench.facts import OWN
from ropegrad.bench.place import Place
from ropegrad.bench.timing import Timing
from ropegrad.bench.workloads import Problem
from ropegrad.records import Record
from ropegrad.spec import QkvSpec
from ropegrad.verify.case import Case, NumpyArray
from ropegrad.verify.check import Finding, Verdict, check_all
from ropegrad.verify.judge import gate
from ropegrad.verify.runners import to_numpy

Progress = Callable[[str], None]
HELD = 1 << 30  # bytes of outputs that are kept for one judgement
GATED = 256  # products of a sum from which on effective bits tell a promise that was broken
PROTOCOLS = {"span": "span/cupti", "graph": "graph", "wall": "wall"}  # as asked for, and as recorded


@dataclass
class Entry:
    """A contender in a case: its calls on each set of inputs, and what the check said."""

    one: Contender
    calls: list[Call] = field(default_factory=list)
    verdict: Verdict | None = None

    @property
    def right(self) -> bool:
        """Whether it may be timed."""
        return self.verdict is not None and self.verdict.passed


def time_case(
    place: Place, problem: Problem, everybody: Sequence[Contender], protocols: Sequence[str],
    progress: Progress,
) -> list[Record]:  # fmt: skip
    """Check, then time all in turns by each protocol that is possible; what is not is recorded as INVALID."""
    reasons = {protocol: place.refusal(protocol) for protocol in protocols}
    entries = [Entry(one) for one in everybody]
    found: list[Record] = []
    possible = [protocol for protocol, reason in reasons.items() if reason is None]
    if possible and any(one.refused is None for one in everybody):
        case = problem.case()
        sets = place.sets(case, problem.cost.read)
        _judge(problem, case, sets, entries, progress)
        progress("the ceiling")
        ceiling = place.ceiling(problem)
        for protocol in possible:
            found += _timed(place, problem, case, sets[0], entries, ceiling, protocol, progress)
        possible_too = possible
    else:
        possible_too = []
    for protocol in protocols:
        if protocol not in possible_too:
            found += [_refused(place, problem, entry, protocol, reasons[protocol]) for entry in entries]
    return found


def _timed(
    place: Place, problem: Problem, case: Case, inputs: Inputs, entries: Sequence[Entry], ceiling: Any,
    protocol: str, progress: Progress,
) -> Iterator[Record]:  # fmt: skip
    """Everybody under one protocol; a target that is wrong afterwards loses its time."""
    refused: dict[str, str | None] = {}
    for entry in entries:
        if entry.right:
            refused[entry.one.key] = place.refuses(entry.one, entry.calls[0], protocol)
    running = {e.one.key: e.calls for e in entries if e.right and refused[e.one.key] is None}
    progress(f"{protocol}: timing {len(running)}")
    try:
        timings = place.time({**ceiling.contenders, **running}, protocol)
    except Exception as error:  # one of others' that works on a stream of its own, say: ours go on
        others = {e.one.key for e in entries if e.one.backend not in OWN} & set(running)
        if not others:
            raise
        refused |= dict.fromkeys(others, f"it could not be timed: {error}")
        running = {name: calls for name, calls in running.items() if name not in others}
        timings = place.time({**ceiling.contenders, **running}, protocol)
    for entry in entries:
        if entry.one.key in running and _is_doubted(entry):
            progress(f"checking {entry.one.name} again, after the timed calls")
            _judge_again(problem, case, inputs, entry, "after the timed calls")
    yield from ceiling.records(problem.name, timings, problem.suite)
    read = next(iter(timings.values())).protocol
    for entry in entries:
        reason = entry.one.refused or refused.get(entry.one.key)
        if reason is not None:
            yield _refused(place, problem, entry, protocol, reason)
        else:
            yield _record(place, problem, entry, timings.get(entry.one.key, Timing(read, ())))


def _refused(place: Place, problem: Problem, entry: Entry, protocol: str, reason: str | None) -> Record:
    said = entry.one.refused or reason
    return _record(place, problem, entry, Timing(PROTOCOLS[protocol], ()), refused=said)


def _record(
    place: Place, problem: Problem, entry: Entry, timing: Timing, refused: str | None = None
) -> Record:
    one, verdict = entry.one, entry.verdict or Verdict(problem.name)
    spec = promising(problem.spec, one.precision)
    broken = {finding.array or "call": math.inf for finding in verdict.findings}
    bits = {name: bits if math.isfinite(bits) else None for name, bits in verdict.bits.items()}
    return place.run.record(
        problem.op, problem.name, timing, broken | verdict.worst, refused=refused,
        note="; ".join(_notes(spec, verdict, timing)) or None,
        backend=one.backend, kernel=one.kernel, spec={"suite": problem.suite} | facts_of(spec),
        options=options_of(place, one), precision=one.precision, bytes_read=problem.cost.read,
        bytes_written=problem.cost.written, flops=problem.cost.flops, effective_bits=bits,
        digest=place.digest(one),
    )  # fmt: skip


def _notes(spec: Spec, verdict: Verdict, timing: Timing) -> Iterator[str]:
    """What was found first; of one that is right, what it lacks, and how it was timed."""
    if verdict.findings:
        yield verdict.findings[0].message.partition("\n")[0]
        return
    if isinstance(spec, QkvSpec):
        for name, bits in verdict.bits.items():
            products = sum(map(spec.rows, "qkv")) if name == "grad_hidden_states" else spec.tokens
            limit = gate(spec.precision, products, compute=spec.rope.compute, storage=spec.rope.dtype)
            if products >= GATED and 2.0**-bits > limit:
                asked = f"{spec.precision} asks for {-math.log2(limit):.2f}"
                yield f"{name} has {bits:.2f} effective bits, {asked}"
    if timing.note is not None:
        yield timing.note


def options_of(place: Place, one: Contender) -> dict[str, Any]:
    """The options of a contender's records, as they are read back."""
    found = one.options | {"contender": one.name} | place.options
    return msgspec.json.decode(msgspec.json.encode(found))  # type: ignore[no-any-return]


def facts_of(spec: Any) -> dict[str, Any]:
    """A specification as a record holds it."""
    return msgspec.json.decode(msgspec.json.encode(spec))  # type: ignore[no-any-return]


# ---- the check ---------------------------------------------------------------------------------------------


def _judge(
    problem: Problem, case: Case, sets: list[Inputs], entries: Sequence[Entry], progress: Progress
) -> None:
    """Fill in calls and verdicts; the oracle is asked once for contenders of one promise."""
    groups: dict[tuple[bool, str | None], list[Entry]] = {}
    for entry in entries:
        if entry.one.refused is None:
            groups.setdefault((entry.one.flushes, entry.one.precision), []).append(entry)
    several = max(HELD // max(problem.cost.written, 1), 1)
    for (flushes, precision), group in groups.items():
        judged = replace(case, spec=promising(case.spec, precision))
        for start in range(0, len(group), several):
            some = {entry.one.key: entry for entry in group[start : start + several]}
            functions = {name: _checked(entry, case, sets, progress) for name, entry in some.items()}
            verdicts = check_all(judged, functions, measure_bits=True, flushes=flushes, catch=True)
            for name, entry in some.items():
                verdicts[name].findings += entry.verdict.findings if entry.verdict else []
                entry.verdict = verdicts[name]
    for entry in entries:
        if entry.right and _is_doubted(entry):
            progress(f"checking {entry.one.name} again, other data in the same memory")
            _judge_again(problem, case, sets[0], entry, "on other data in the same memory")


def _checked(
    entry: Entry, case: Case, sets: list[Inputs], progress: Progress
) -> Callable[[Case], dict[str, NumpyArray]]:
    """The first call, as the judge wants it; what it did to its inputs is kept and undone."""

    def function(_: Case) -> dict[str, NumpyArray]:
        progress(f"checking {entry.one.key}")
        entry.verdict = Verdict(case.name)
        entry.calls = [entry.one.bind(inputs) for inputs in sets]
        arrays = entry.calls[0]()
        entry.verdict.findings += restored(case, sets[0])
        return {name: np.array(to_numpy(x)) for name, x in zip(case.outputs, arrays, strict=True)}

    return function


def restored(case: Case, inputs: Inputs) -> list[Finding]:
    """A finding for each input that is not the case's any more; it is made so again."""
    found = []
    for name, array in inputs.items():
        original = case.inputs[name]
        if original is not None and not np.array_equal(_bytes(to_numpy(array)), _bytes(original)):
            found.append(Finding("input mutated", name, f"{name} changed during the call"))
            put(array, original)
    return found


def put(array: Any, values: NumpyArray) -> None:
    """Write into an array, on a device or not."""
    if isinstance(array, np.ndarray):
        array[...] = values
    else:
        array.set(np.ascontiguousarray(values))


def _bytes(x: NumpyArray) -> NumpyArray:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def _is_doubted(entry: Entry) -> bool:
    """Whether it is somebody else's and sees what is written into its inputs."""
    return entry.one.backend == TARGET and entry.one.movable


def _judge_again(problem: Problem, case: Case, inputs: Inputs, entry: Entry, when: str) -> None:
    """Results that were kept from a call before do not fit other data in the same memory."""
    other = problem.case(when)
    for name, array in inputs.items():
        values = other.inputs[name]
        assert values is not None
        put(array, values)

    def function(_: Case) -> dict[str, NumpyArray]:
        return {n: to_numpy(x) for n, x in zip(case.outputs, entry.calls[0](), strict=True)}

    verdict = check_all(other, {"": function}, flushes=entry.one.flushes, catch=True)[""]
    restored(case, inputs)
    assert entry.verdict is not None
    stale = [replace(one, rule="stale output", message=f"{when}: {one.message}") for one in verdict.findings]
    entry.verdict.findings += stale
    entry.verdict.worst |= {name: ratio for name, ratio in verdict.worst.items() if ratio > 1}
