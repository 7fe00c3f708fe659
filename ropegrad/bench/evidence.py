"""What was seen on a GPU and of which code: outcomes by step, beside the records of the times.

A figure speaks for the code whose digest it carries. When that code has changed, the figure is stale; it may
stay published only if the file lists it under `stale`, with the reason.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from ropegrad.bench.run import digest

OUTCOMES = ("passed", "failed", "timed out", "missing")


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One step on one device. status: one of OUTCOMES; detail: counts, or why it is missing."""

    status: str
    detail: str
    backend: str
    digest: str
    commit: str
    date: str
    seconds: float
    command: str


class Evidence(msgspec.Struct, kw_only=True):
    """All steps of a device, by name; reasons for steps and for files of records published though stale."""

    device: str
    driver: str
    steps: dict[str, Outcome] = {}
    stale: dict[str, str] = {}
    stale_files: dict[str, str] = {}

    def is_current(self, step: str) -> bool:
        """Whether the step was run with today's code."""
        outcome = self.steps.get(step)
        return outcome is not None and outcome.digest == digest(outcome.backend)

    def faults(self) -> list[str]:
        """What must not be published like this."""
        found = []
        for step, outcome in self.steps.items():
            if outcome.status not in ("passed", "missing"):
                found.append(f"{step}: {outcome.status}: {outcome.detail}")
            if not self.is_current(step) and not self.stale.get(step):
                found.append(
                    f"{step} was run with other code, at {outcome.commit}, and is not listed as stale"
                )
        for step in self.stale:
            if step not in self.steps:
                found.append(f"{step} is listed as stale and was never run")
            elif self.is_current(step):
                found.append(f"{step} is listed as stale and is not")
        return found


def read(path: Path) -> Evidence:
    """The evidence in a file. Raises ValueError (msgspec's) if it is something else."""
    return msgspec.json.decode(path.read_bytes(), type=Evidence)


def write(path: Path, evidence: Evidence) -> None:
    """Replace the file; readers never see half of it."""
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(evidence), indent=1) + b"\n")
    os.replace(part, path)
