"""A file of records that a run adds to, a case at a time; and which cases it has already."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from ropegrad import records
from ropegrad.bench.contender import TARGET, Contender, promising
from ropegrad.bench.facts import OPS, OWN, contender_of, dtype_of, suite_of
from ropegrad.bench.place import Place
from ropegrad.bench.suite import PROTOCOLS, facts_of, options_of
from ropegrad.bench.workloads import Problem
from ropegrad.records import Record

Key = tuple[object, ...]


class Ledger:
    """The records of a file, or of this run alone. Raises ValueError or OSError for another kind of file."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.records = records.read(path) if path is not None and path.exists() else []
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("ab").close()  # better known before than after

    def has(
        self, place: Place, problem: Problem, everybody: Sequence[Contender], protocols: Sequence[str]
    ) -> bool:
        """Whether each of these was measured here: same device, code, options and number of samples."""
        known = {_key(record) for record in self.records if _is_done(record, place.samples)}
        wanted = {_planned(place, problem, one, protocol) for one in everybody for protocol in protocols}
        return wanted <= known

    def add(self, found: Sequence[Record]) -> None:
        """Keep these; what was measured before of the same things here goes."""
        again = {_thing(record) for record in found}
        self.records = [record for record in self.records if _thing(record) not in again] + list(found)
        if self.path is not None:
            records.write(self.path, self.records)

    def of(self, problem: Problem) -> list[Record]:
        """All of a case, whatever they promise."""
        return [
            record for record in self.records
            if (suite_of(record), record.case) == (problem.suite, problem.name)
            and (record.op not in OPS or _facts(problem, record.precision).items() <= record.spec.items())
        ]  # fmt: skip


def _is_done(record: Record, samples: int) -> bool:
    """A rival that cannot run here is done, too; what was refused, and what is ours and wrong, is not."""
    if record.samples_us:
        return len(record.samples_us) == samples
    return record.invalid is None and not is_judged(record)


def is_judged(record: Record) -> bool:
    """Whether the record is of a target or of ropegrad's own backend, whose faults are faults of the run."""
    return record.op in OPS and record.backend in (TARGET, *OWN)


def _facts(problem: Problem, precision: str | None) -> dict[str, object]:
    return facts_of(promising(problem.spec, precision))


def _text(facts: object) -> bytes:
    return msgspec.json.encode(facts, order="deterministic")


def _code(commit: str) -> str:
    """A run writes files, perhaps into the checkout: the digest says whether code was changed."""
    return commit.removesuffix("+changes")


def _planned(place: Place, problem: Problem, one: Contender, protocol: str) -> Key:
    return (
        problem.op, problem.suite, problem.name, one.name, one.precision, PROTOCOLS[protocol].split("/")[0],
        _text({"suite": problem.suite} | _facts(problem, one.precision)), _text(options_of(place, one)),
        place.run.device.name, _code(place.run.commit), place.digest(one),
    )  # fmt: skip


def _key(record: Record) -> Key:
    return (
        record.op, suite_of(record), record.case, contender_of(record), record.precision,
        record.protocol.split("/")[0], _text(record.spec), _text(record.options), record.device,
        _code(record.commit), record.digest,
    )  # fmt: skip


def _thing(record: Record) -> Key:
    threads = record.options.get("threads")
    return (
        record.op, suite_of(record), record.case, contender_of(record), record.precision, dtype_of(record),
        record.protocol.split("/")[0], record.device, threads,
    )  # fmt: skip
