"""The steps of `scripts/gpu`: each a command of its own, at most eight minutes, its outcome kept at once."""

from __future__ import annotations

import datetime
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from ropegrad import records
from ropegrad.backends.cupy_plain import no_gpu
from ropegrad.bench import device as devices
from ropegrad.bench import evidence
from ropegrad.bench.evidence import Evidence, Outcome
from ropegrad.bench.run import digest
from ropegrad.suites import SUITES
from ropegrad.verify.conformance import NAMESPACES, own_backends

LIMIT = 480  # seconds a step
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore::DeprecationWarning")
TESTS = (
    "tests/test_cupy.py",
    "tests/test_cupy_plan.py",
    "tests/test_pipeline.py",
    "tests/test_limits.py",
    "tests/test_backends.py",
    "tests/test_compile.py",
)
TOOLS = ("memcheck", "racecheck", "initcheck")


class Step(NamedTuple):
    """Arguments of python, and the backend whose code they judge; `tool` runs python under itself."""

    name: str
    backend: str
    arguments: tuple[str, ...]
    tool: tuple[str, ...] = ()


def steps(stage: str, out: Path, stem: str, commit: str) -> Iterator[Step]:
    """What a stage runs: each backend on CuPy arrays, on its own."""
    spec = next(iter(SUITES["rope"]().values()))
    backends = [name for name in own_backends(spec) if NAMESPACES.get(name) == "cupy"]
    for name in backends:
        if stage == "tests":
            yield Step(
                f"tests {name}", name, (*PYTEST, *TESTS, "-k", f"gpu or test_cupy or what_runs or {name}")
            )
        elif stage == "verify":
            judge = ("-m", "ropegrad", "verify", "--backend", name)
            yield Step(f"verify {name}", name, (*judge, "--json", str(out / f"verify-{stem}-{name}.json")))
            fuzz = ("analysis/fuzz.py", name, "3500", str(out / f"fuzz-{stem}-{name}.jsonl"))
            yield Step(f"fuzz {name}", name, fuzz)
        elif stage == "sanitize":
            for tool in TOOLS:
                sanitizer = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "86")
                small = ("-m", "ropegrad", "verify", "--quick", "--backend", name)
                yield Step(f"{tool} {name}", name, small, sanitizer)
    if stage == "time":
        for suite in (*SUITES, "rope-qk", "limits"):
            timed = (
                "-m",
                "ropegrad.bench.suite_terminal",
                suite,
                str(out / f"{stem}.jsonl"),
                "--commit",
                commit,
            )
            yield Step(f"time {suite}", "cuda" if suite == "limits" else backends[0], timed)


def run(step: Step, stage: str, commit: str) -> Outcome:
    """Run a step, its output on the screen; the last line is kept."""
    start = time.monotonic()
    if step.tool and shutil.which(step.tool[0]) is None:
        status, detail = "missing", f"{step.tool[0]} is not on the PATH"
    else:
        status, detail = _call([*step.tool, sys.executable, *step.arguments])
    seconds, today = round(time.monotonic() - start, 1), datetime.datetime.now(datetime.UTC).date()
    return Outcome(
        status=status, detail=detail, backend=step.backend, digest=digest(step.backend), commit=commit,
        date=today.isoformat(), seconds=seconds, command=f"python3 scripts/gpu --only {stage}",
    )  # fmt: skip


def _call(command: list[str]) -> tuple[str, str]:
    said, late = "", threading.Event()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:

        def stop() -> None:
            late.set()
            child.kill()

        timer = threading.Timer(LIMIT, stop)
        timer.start()
        for line in child.stdout or ():
            print(line, end="", flush=True)
            said = line.strip() or said
        timer.cancel()
    if late.is_set():
        return "timed out", f"after {LIMIT} s: {said}"
    return "passed" if child.returncode == 0 else "failed", said


def main(stages: str, out: str, commit: str, again: str) -> int:
    """Run what is not done yet; 0 if all passed or were missing a tool, 1 if not, 2 without a GPU."""
    reason = no_gpu()
    if reason is not None:
        print(f"ropegrad: nothing to run on: {reason}", file=sys.stderr)
        return 2
    console, here, folder = Console(highlight=False), devices.current(), Path(out)
    stem = here.name.lower().replace(" ", "-")
    commit = commit or records.commit()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem}.evidence.json"
    seen = evidence.read(path) if path.exists() else Evidence(device=here.name, driver=here.driver)
    seen.driver = here.driver
    ran = []
    for stage in stages.split(","):
        for step in steps(stage, folder, stem, commit):
            ran.append(step.name)
            done = seen.steps.get(step.name)
            if done and done.status == "passed" and seen.is_current(step.name) and again != "1":
                console.print(f"{step.name}: passed already, at {done.commit}")
                continue
            console.rule(step.name)
            seen.steps[step.name] = run(step, stage, commit)
            seen.stale.pop(step.name, None)
            evidence.write(path, seen)
    console.rule(f"{here.name}, driver {here.driver}")
    for name in ran:
        outcome = seen.steps[name]
        style = {"passed": "green", "missing": "yellow"}.get(outcome.status, "bold red")
        console.print(f"{outcome.status:9} {name:24} {outcome.seconds:6.1f} s  {outcome.detail}", style=style)
    return 0 if all(seen.steps[name].status in ("passed", "missing") for name in ran) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
