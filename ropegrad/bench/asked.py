"""What a run of `ropegrad bench` is asked for: which words go together, what a missing one means."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ropegrad.backends import find
from ropegrad.backends.cupy_plain import no_gpu
from ropegrad.bench.place import Choice
from ropegrad.bench.workloads import HEADLINE
from ropegrad.errors import SpecError
from ropegrad.verify.domain import Domain
from ropegrad.verify.target import Contract

PLAIN, ANY, ALL = Contract(), Domain(), Choice()


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What to time, where, and how.

    suite, op   None: what is usual; op: only cases of this operation
    arrays      the word that was given, if one was; gpu: where that leads
    protocols   () the place's own; samples, threads: None the default
    """

    suite: str | None = None
    op: str | None = None
    targets: tuple[str, ...] = ()
    contract: Contract = PLAIN
    domain: Domain = ANY
    arrays: str | None = None
    case: str | None = None
    protocols: tuple[str, ...] = ()
    choice: Choice = ALL
    gpu: bool = False
    threads: int | None = None
    samples: int | None = None
    json: Path | None = None
    commit: str | None = None
    command: str | None = None

    @property
    def cases_of(self) -> str:
        """The suite, by default the one for a first look."""
        return self.suite or ("all" if self.choice.quick else HEADLINE)


def settle(asked: Asked) -> Asked:
    """The same with an operation and a place. Raises SpecError where words do not fit together."""
    for name in asked.choice.backends:
        find(name)
    of_suite = asked.suite.partition("-")[0] if asked.suite not in (None, HEADLINE, "all") else None
    if of_suite and asked.op not in (None, of_suite):
        raise SpecError(f"--suite {asked.suite} is not of --op {asked.op}")
    if asked.arrays in ("torch", "jax") and not asked.targets:
        raise SpecError(f"--arrays {asked.arrays} says what a TARGET takes: name one, or write cupy or numpy")
    if asked.contract.of == "forward" and not asked.targets:
        raise SpecError("--of forward says how a TARGET is called: name one")
    op = of_suite or asked.op or ("rope" if asked.targets else None)
    on_gpu = asked.contract.device == "cuda"
    if asked.arrays is None and not asked.targets and not on_gpu:
        on_gpu = no_gpu() is None
    if on_gpu and asked.threads is not None:
        raise SpecError("--threads is for a CPU: write --arrays numpy")
    for number, name in ((asked.samples, "samples"), (asked.threads, "threads")):
        if number is not None and number < 1:
            raise SpecError(f"--{name} {number}: at least one is needed")
    return replace(asked, op=op, gpu=on_gpu)


def judge_again(asked: Asked) -> None:
    """SpecError where `--reproduce` is asked for something that the records say."""
    plain = Asked(samples=asked.samples, json=asked.json, commit=asked.commit, gpu=asked.gpu, op=asked.op)
    if asked != plain:
        raise SpecError(
            "--reproduce measures what its records say: only --samples, --json and --commit go with it"
        )
