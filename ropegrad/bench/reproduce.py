"""`ropegrad bench --reproduce`: the same cases here and now, beside the records of another run.

A time is reproduced if it is within 3 % or 0.3 µs of the other, whichever is larger: what two runs of one
device differ by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ropegrad.backends.cupy_plain import no_gpu
from ropegrad.bench import on_cpu, on_gpu
from ropegrad.bench.contender import TARGET, Contender, Spec
from ropegrad.bench.facts import OPS, OWN, identity, suite_of
from ropegrad.bench.place import Choice, Place
from ropegrad.bench.suite import time_case
from ropegrad.bench.targets import Target
from ropegrad.bench.threads import limited
from ropegrad.bench.workloads import WITHOUT_TABLES, Problem
from ropegrad.records import Record
from ropegrad.spec import QkvSpec, RopeSpec
from ropegrad.verify.target import Contract

Progress = Callable[[str], None]
RELATIVE, MICROSECONDS = 0.03, 0.3


@dataclass(frozen=True)
class Pair:
    """Two measurements of the same thing; `new` is None where nothing here could be timed."""

    old: Record
    new: Record | None

    @property
    def ratio(self) -> float | None:
        """New ÷ old."""
        if self.new is None or not self.new.median_us or not self.old.median_us:
            return None
        return self.new.median_us / self.old.median_us

    @property
    def reproduced(self) -> bool:
        """Whether the times agree; never where one is missing or cannot be true."""
        if self.new is None or self.ratio is None or self.new.invalid or self.old.invalid:
            return False
        old, new = self.old.median_us or 0.0, self.new.median_us or 0.0
        return abs(new - old) <= max(RELATIVE * old, MICROSECONDS)


def pairs(old: Sequence[Record], new: Sequence[Record]) -> list[Pair]:
    """Each old record of a case that has a time, and the new one of the same thing."""
    found = {identity(record): record for record in new}
    known = {record.case for record in old if record.op in OPS}  # other ceilings are not measured again
    return [
        Pair(record, found.get(identity(record)))
        for record in old
        if record.median_us is not None and record.case in known
    ]


def differences(old: Sequence[Record], new: Sequence[Record]) -> list[tuple[str, str, str]]:
    """What is not the same here: its name, then there, then here."""
    names = dict.fromkeys(name for record in (*old, *new) for name in record.versions)
    facts: dict[str, Callable[[Record], Any]] = {
        "device": lambda record: record.device,
        "driver": lambda record: record.driver,
        "clocks": lambda record: record.clocks,
        "threads": lambda record: record.options.get("threads"),
        **{name: lambda record, name=name: record.versions.get(name) for name in names},  # type: ignore[misc]
        "commit": lambda record: record.commit[:10],
    }
    found = [(name, _values(old, fact), _values(new, fact)) for name, fact in facts.items()]
    for backend in dict.fromkeys(record.backend for record in old):
        sides = ([one for one in side if one.backend == backend] for side in (old, new))
        there, here = (_values(side, lambda record: record.digest) for side in sides)
        found.append((f"code of {backend}", there, here or there))
    return [one for one in found if one[1] != one[2]]


def _values(records: Sequence[Record], fact: Callable[[Record], Any]) -> str:
    """All values, each once; what is unknown is left out."""
    known = (fact(record) for record in records)
    return ", ".join(dict.fromkeys(str(value) for value in known if value is not None))


# ---- measuring again ---------------------------------------------------------------------------------------


def why_not(old: Sequence[Record]) -> str | None:
    """The sentence why nothing of these records can be measured here; None if it can."""
    if not [record for record in old if record.op in OPS]:
        return "these records are of no case of rope or qkv; ropegrad limits measures ceilings"
    reason = no_gpu()
    if reason is not None and any("threads" not in record.options for record in old if record.op in OPS):
        return f"these records are of a GPU, {old[0].device}: {reason}"
    return None


@dataclass(frozen=True)
class Again:
    """A case of old records: how many threads it had on a CPU, and who was timed by what."""

    problem: Problem
    threads: int | None
    records: tuple[Record, ...]

    @property
    def protocols(self) -> tuple[str, ...]:
        """As a user asks for them."""
        return tuple(dict.fromkeys(record.protocol.partition("/")[0] for record in self.records))

    @property
    def choice(self) -> Choice:
        """Our backends that were timed, at which promise, and whether others were."""
        names = dict.fromkeys(record.backend for record in self.records)
        mine = tuple(name for name in names if name in OWN)
        promises = dict.fromkeys(record.precision for record in self.records)
        precisions = tuple(promise for promise in promises if promise is not None)
        return Choice(mine, rivals=bool(set(names) - set(mine) - {TARGET}), precisions=precisions)

    def targets(self) -> Iterator[Contender]:
        """Those that can still be had. Raises NoTarget for the others."""
        for facts in {str(r.options): r.options for r in self.records if r.backend == TARGET}.values():
            contract = msgspec.convert(facts["contract"], Contract)
            yield Target(facts["target"], contract).contender(self.problem.spec)


def cases(old: Sequence[Record]) -> list[Again]:
    """The cases, in the order of their first records."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in old:
        if record.op in OPS:
            key = (suite_of(record), record.case, record.precision, record.options.get("threads"))
            groups.setdefault((*key, str(record.spec)), []).append(record)
    return [
        Again(_problem(group[0]), group[0].options.get("threads"), tuple(group)) for group in groups.values()
    ]


def _problem(record: Record) -> Problem:
    suite = suite_of(record)
    real = suite in WITHOUT_TABLES
    return Problem(suite, record.case, spec_of(record), "llama3" if real else "benchmark")


def spec_of(record: Record) -> Spec:
    """The specification that the record was made of."""
    facts = {name: value for name, value in record.spec.items() if name != "suite"}
    kind: type[Spec] = QkvSpec if "rope" in facts else RopeSpec
    return msgspec.convert(facts, kind)


def measure_again(
    old: Sequence[Record], samples: int | None, progress: Progress, commit: str | None
) -> Iterator[list[Record]]:
    """The records of one case after the other, everything that competes in it included."""
    for again in cases(old):
        threads = again.threads
        if threads is None:
            yield _measure(on_gpu.start(samples or 30, commit), again, progress)
        else:
            with limited(threads):
                yield _measure(on_cpu.start(threads, samples or 15, commit), again, progress)


def _measure(place: Place, again: Again, progress: Progress) -> list[Record]:
    problem = again.problem
    everybody = [*place.contenders(problem.spec, again.choice), *again.targets()]
    tell: Progress = lambda what: progress(f"{problem.suite} {problem.name}: {what}")  # noqa: E731
    return time_case(place, problem, everybody, again.protocols, tell)
