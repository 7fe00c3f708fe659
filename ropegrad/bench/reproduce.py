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
from ropegrad.bench.facts import OPS, identity, suite_of
from ropegrad.records import Record
from ropegrad.spec import QkvSpec, RopeSpec

Spec = RopeSpec | QkvSpec
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
    """Each old record that has a time, and the new one of the same thing."""
    found = {identity(record): record for record in new}
    return [Pair(record, found.get(identity(record))) for record in old if record.median_us is not None]


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
    if reason is not None and any(record.protocol != "wall" for record in old):
        return f"these records are of a GPU, {old[0].device}: {reason}"
    return None


def cases(old: Sequence[Record]) -> dict[tuple[str, str, bool], Record]:
    """A record of each case, by suite, name, and whether it is of a CPU."""
    return {
        (suite_of(record), record.case, record.protocol == "wall"): record
        for record in old
        if record.op in OPS
    }


def spec_of(record: Record) -> Spec:
    """The specification that the record was made of."""
    facts = {name: value for name, value in record.spec.items() if name != "suite"}
    kind: type[Spec] = QkvSpec if "rope" in facts else RopeSpec
    return msgspec.convert(facts, kind)


def measure_again(
    old: Sequence[Record], samples: int, progress: Progress, commit: str | None
) -> Iterator[list[Record]]:
    """The records of one case after the other, everything that competes in it included."""
    for (suite, name, on_cpu), record in cases(old).items():
        spec = spec_of(record)
        if on_cpu:
            from ropegrad.bench import cpu
            from ropegrad.bench.threads import limited

            threads = int(record.options.get("threads", 1))
            with limited(threads):
                yield list(cpu.measure(cpu.start(threads, samples, commit), name, spec, progress))
        else:
            from ropegrad.bench.limits import Samples
            from ropegrad.bench.run import start
            from ropegrad.bench.suite import time_case

            progress(f"{suite} {name}")
            rivals = any(one.backend == "torch" for one in old)
            yield time_case(start(commit), suite, name, spec, Samples(final=samples), rivals=rivals)
