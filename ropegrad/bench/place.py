"""Where a run takes place: a CPU or a GPU, behind the few things that differ between the two."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ropegrad.backends.base import Inputs
from ropegrad.bench.contender import Call, Contender, Spec
from ropegrad.bench.run import Run
from ropegrad.bench.timing import Timing
from ropegrad.bench.workloads import Problem
from ropegrad.records import Record
from ropegrad.verify.case import Case


@dataclass(frozen=True)
class Choice:
    """Who is wanted: these backends of ours, or all that can run; and others, too.

    precisions   of matrix products, on a GPU; () all
    """

    backends: tuple[str, ...] = ()
    rivals: bool = True
    quick: bool = False
    precisions: tuple[str, ...] = ()


class Ceiling(Protocol):
    """What no contender can beat, timed among them."""

    @property
    def contenders(self) -> Mapping[str, Sequence[Any]]:
        """Calls by name."""
        ...

    def records(self, case: str, timings: Mapping[str, Timing], suite: str) -> Iterable[Record]:
        """Checked, of one protocol."""
        ...


class Place(Protocol):
    """A device and how things are timed on it."""

    @property
    def run(self) -> Run:
        """What its records share."""
        ...

    @property
    def samples(self) -> int:
        """Of each contender."""
        ...

    @property
    def options(self) -> dict[str, Any]:
        """Of all its records."""
        ...

    @property
    def protocols(self) -> tuple[str, ...]:
        """Those that are used if none is asked for."""
        ...

    def refusal(self, protocol: str) -> str | None:
        """Why nothing can be read by this protocol here."""
        ...

    def refuses(self, one: Contender, call: Call, protocol: str) -> str | None:
        """Why a contender cannot be timed by a protocol that the others can."""
        ...

    def sets(self, case: Case, read: int) -> list[Inputs]:
        """Sets of inputs, equal and apart; none is the case's own memory."""
        ...

    def contenders(self, spec: Spec, choice: Choice) -> Iterator[Contender]:
        """Ours, then theirs."""
        ...

    def ceiling(self, problem: Problem) -> Ceiling:
        """At the problem's size."""
        ...

    def time(self, contenders: Mapping[str, Sequence[Any]], protocol: str) -> dict[str, Timing]:
        """All of them, in turns."""
        ...

    def digest(self, one: Contender) -> str:
        """Of the code that its figures depend on."""
        ...
