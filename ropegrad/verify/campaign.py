"""A long search in several processes: their counts together, and a diary of all runs of a target."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ropegrad.verify.fuzz import slug
from ropegrad.verify.process import import_path
from ropegrad.verify.recipe import Recipe
from ropegrad.verify.target import Contract
from ropegrad.verify.worker import recipe_from


@dataclass
class Job:
    """One worker process and the last that it told."""

    process: subprocess.Popen[str]
    told: dict[str, Any] = field(default_factory=dict)
    thread: threading.Thread | None = None

    @property
    def failure(self) -> Recipe | None:
        """The smallest failure, once the worker has ended with one."""
        fields = self.told.get("failure")
        return None if fields is None else recipe_from(fields)


class Jobs:
    """Workers that search at the same time as this process."""

    def __init__(self, tasks: list[dict[str, Any]]) -> None:
        self.jobs = [_started(task) for task in tasks]

    def total(self, key: str) -> int:
        """The sum of a count over all workers."""
        return sum(int(job.told.get(key, 0)) for job in self.jobs)

    @property
    def failure(self) -> Recipe | None:
        """A failure that a worker found."""
        return next((job.failure for job in self.jobs if job.failure is not None), None)

    def wait(self) -> None:
        """Until all have ended by themselves."""
        for job in self.jobs:
            job.process.wait()
            if job.thread is not None:
                job.thread.join()

    def stop(self) -> None:
        """End those that still run."""
        for job in self.jobs:
            job.process.terminate()
        self.wait()
        for job in self.jobs:
            for stream in (job.process.stdin, job.process.stdout):
                if stream is not None:
                    stream.close()


def _started(task: dict[str, Any]) -> Job:
    process = subprocess.Popen(
        [sys.executable, "-m", "ropegrad.verify.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, start_new_session=True, env=os.environ | {"PYTHONPATH": import_path()},
    )  # fmt: skip
    assert process.stdin is not None
    process.stdin.write(json.dumps(task) + "\n")
    process.stdin.flush()
    job = Job(process)

    def listen() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            job.told = json.loads(line)

    job.thread = threading.Thread(target=listen, daemon=True)
    job.thread.start()
    return job


@dataclass(frozen=True)
class Run:
    """One run of a campaign."""

    problems: int
    seconds: float
    jobs: int
    found: bool
    date: str


def diary(folder: Path, target: str, contract: Contract) -> Path:
    """The file that keeps a line for each run."""
    return folder / f"{slug(target, contract)}.jsonl"


def earlier_runs(file: Path) -> list[Run]:
    """The runs before this one."""
    if not file.exists():
        return []
    return [Run(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]


def note_run(file: Path, problems: int, seconds: float, jobs: int, found: bool) -> None:
    """Add a line to the diary."""
    file.parent.mkdir(parents=True, exist_ok=True)
    run = Run(problems, seconds, jobs, found, time.strftime("%Y-%m-%dT%H:%M:%S"))
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(asdict(run)) + "\n")
