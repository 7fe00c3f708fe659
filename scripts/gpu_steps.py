"""The steps of `scripts/gpu`: each a command of its own, at most eight minutes, its outcome kept at once."""

from __future__ import annotations

import datetime
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from ropegrad import records
from ropegrad.backends.cupy_plain import no_gpu
from ropegrad.bench import device as devices
from ropegrad.bench import evidence
from ropegrad.bench.evidence import Evidence, Outcome
from ropegrad.bench.run import digest
from ropegrad.bench.workloads import TIMED
from ropegrad.tiles import cores
from ropegrad.verify.conformance import NAMESPACES, backends_of

LIMIT = 480  # seconds a step
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore::DeprecationWarning")
TESTS = (
    "tests/test_cupy.py",
    "tests/test_cupy_plan.py",
    "tests/test_packed.py",
    "tests/test_pipeline.py",
    "tests/test_limits.py",
    "tests/test_backends.py",
    "tests/test_compile.py",
)
TUNED = {  # cupy_fused beside the ceiling, by `analysis/tune_rope.py`
    "other": ("--other", "40"),
    "bfloat16": ("--dtype", "bfloat16"),
    "needs-q-k": ("--needs", "q", "k"),
}
FUZZED = {"cupy_fused": "21000", "cupy_tensor": "10000"}  # problems drawn
TIMES_OF = {"qkv": "cupy_tensor", "limits": "cuda"}  # whose code makes a suite's times; rope's: the first
TOOLS = ("memcheck", "racecheck", "initcheck")


class Step(NamedTuple):
    """Arguments of python, and the backend whose code they judge.

    `tool` runs python under itself; `calls` is a program that python will run.
    """

    name: str
    backend: str
    arguments: tuple[str, ...]
    tool: tuple[str, ...] = ()
    calls: str = ""


def steps(stage: str, out: Path, stem: str, commit: str) -> Iterator[Step]:
    """What a stage runs: each backend on CuPy arrays, on its own."""
    backends = [name for name in backends_of("rope") if NAMESPACES.get(name) == "cupy"]
    for name in backends:
        if stage == "tests":
            yield Step(
                f"tests {name}", name, (*PYTEST, *TESTS, "-k", f"gpu or test_cupy or what_runs or {name}")
            )
        elif stage == "verify":
            judge = ("-m", "ropegrad", "verify", "--backend", name)
            yield Step(f"verify {name}", name, (*judge, "--json", str(out / f"verify-{stem}-{name}.json")))
            yield _fuzz(name, out, stem)
        elif stage == "sanitize":
            for tool in TOOLS:
                sanitizer = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "86")
                small = ("-m", "ropegrad", "verify", "--quick", "--backend", name)
                yield Step(f"{tool} {name}", name, small, sanitizer)
    yield from _tensor_steps(stage, out, stem)
    yield from _shape_steps(stage, out, stem)
    if stage == "tests":
        yield Step("tests targets", "target", (*PYTEST, "tests/test_faults_gpu.py", "-k", "on_a_gpu"))
    elif stage == "verify":
        known = ("analysis/known_kernels.py", str(out / f"known-kernels-{stem}.json"))
        yield Step("known kernels", "target", known)
    if stage == "time":
        for suite in (*sorted(TIMED, key="qkv".__eq__), "limits"):  # the projections take longest
            timed = (
                "-m",
                "ropegrad.bench.suite_terminal",
                suite,
                str(out / f"{stem}.jsonl"),
                "--commit",
                commit,
            )
            yield Step(f"time {suite}", TIMES_OF.get(suite, backends[0]), timed)


def _fuzz(name: str, out: Path, stem: str) -> Step:
    """Random problems, each backend as many as its options need."""
    drawn = ("analysis/fuzz.py", name, FUZZED.get(name, "7000"), str(out / f"fuzz-{stem}-{name}.json"))
    return Step(f"fuzz {name}", name, drawn)


def _tensor_steps(stage: str, out: Path, stem: str) -> Iterator[Step]:
    """cupy_tensor has the projections alone, and tests of its own at the lower precisions."""
    name, tests = "cupy_tensor", (*PYTEST, "tests/test_tensor.py")
    if stage == "tests":
        yield Step(f"tests {name}", name, tests)
    elif stage == "verify":
        judge = ("-m", "ropegrad", "verify", "--suite", "qkv", "--backend", name)
        yield Step(f"verify {name}", name, (*judge, "--json", str(out / f"verify-{stem}-{name}.json")))
        yield _fuzz(name, out, stem)
    elif stage == "sanitize":
        for tool in TOOLS:
            sanitizer = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "86")
            yield Step(f"{tool} {name}", name, (*tests, "-k", "edge_cases"), sanitizer)


def _shape_steps(stage: str, out: Path, stem: str) -> Iterator[Step]:
    """cupy_fused past 2^31 elements, on other shapes, dtypes and needs: a wrong result raises."""
    if stage == "time":
        large = ("analysis/large_rope.py", str(out / f"large-{stem}.json"))
        yield Step("time large", "cupy_fused", large)
        counted = ("analysis/dram_bytes.py", str(out / f"dram-{stem}.json"))
        yield Step("DRAM bytes", "cupy_fused", counted, calls="ncu")
        for name, chosen in TUNED.items():
            rest = ("--rule", "--samples", "15", "--out", str(out / f"{name}-{stem}.json"))
            yield Step(f"time {name}", "cupy_fused", ("analysis/tune_rope.py", *chosen, *rest))


def run(step: Step, stage: str, commit: str) -> Outcome:
    """Run a step; the last line that it prints is kept."""
    start = time.monotonic()
    program = step.tool[0] if step.tool else step.calls
    if program and shutil.which(program) is None:
        status, detail = "missing", f"{program} is not on the PATH"
    else:
        status, detail = _call([*step.tool, sys.executable, *step.arguments], at_once=stage == "time")
    seconds, today = round(time.monotonic() - start, 1), datetime.datetime.now(datetime.UTC).date()
    return Outcome(
        status=status, detail=detail, backend=step.backend, digest=digest(step.backend), commit=commit,
        date=today.isoformat(), seconds=seconds, command=f"python3 scripts/gpu --only {stage}",
    )  # fmt: skip


def _call(command: list[str], *, at_once: bool) -> tuple[str, str]:
    """Status and last line; what is printed appears at once, or whole at the end."""
    lines, late = list[str](), threading.Event()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:

        def stop() -> None:
            late.set()
            child.kill()

        timer = threading.Timer(LIMIT, stop)
        timer.start()
        for line in child.stdout or ():
            lines.append(line)
            if at_once:
                print(line, end="", flush=True)
        timer.cancel()
    if not at_once:
        print("".join(lines), flush=True)
    said = next((line.strip() for line in reversed(lines) if line.strip()), "")
    if late.is_set():
        return "timed out", f"after {LIMIT} s: {said}"
    return "passed" if child.returncode == 0 else "failed", said


class Ledger:
    """The evidence file, written after every step."""

    def __init__(self, path: Path, here: devices.Device, again: bool) -> None:
        self.path, self._again, self._lock = path, again, threading.Lock()
        self.seen = evidence.read(path) if path.exists() else Evidence(device=here.name, driver=here.driver)
        self.seen.driver = here.driver

    def needs(self, name: str) -> bool:
        """Whether the step did not pass with today's code, or is asked for again."""
        done = self.seen.steps.get(name)
        return self._again or not (done and done.status == "passed" and self.seen.is_current(name))

    def keep(self, name: str, outcome: Outcome) -> None:
        """Add an outcome to the file."""
        with self._lock:
            self.seen.steps[name] = outcome
            self.seen.stale.pop(name, None)
            evidence.write(self.path, self.seen)


def main(stages: str, out: str, commit: str, again: str) -> int:
    """Run what is not done yet; 0 if all passed or were missing a tool, 1 if not, 2 without a GPU.

    Steps that take no time of the device run side by side, four cores each.
    """
    reason = no_gpu()
    if reason is not None:
        print(f"ropegrad: nothing to run on: {reason}", file=sys.stderr)
        return 2
    console, here, folder = Console(highlight=False), devices.current(), Path(out)
    stem = here.name.lower().replace(" ", "-")
    commit = commit or records.commit()
    folder.mkdir(parents=True, exist_ok=True)
    ledger, named = Ledger(folder / f"{stem}.evidence.json", here, again == "1"), []
    for stage in stages.split(","):
        all_steps = list(steps(stage, folder, stem, commit))
        named += [step.name for step in all_steps]
        left = [step for step in all_steps if ledger.needs(step.name)]
        console.rule(f"{stage}: {len(left)} of {len(all_steps)} steps to run")

        def do(step: Step, stage: str = stage) -> None:
            ledger.keep(step.name, run(step, stage, commit))
            console.print(f"{step.name}: {ledger.seen.steps[step.name].status}")

        with ThreadPoolExecutor(1 if stage == "time" else max(cores() // 4, 1)) as pool:
            list(pool.map(do, left))
    console.rule(f"{here.name}, driver {here.driver}")
    for name in named:
        outcome = ledger.seen.steps[name]
        style = {"passed": "green", "missing": "yellow"}.get(outcome.status, "bold red")
        console.print(f"{outcome.status:9} {name:24} {outcome.seconds:6.1f} s  {outcome.detail}", style=style)
    return 0 if all(ledger.seen.steps[name].status in ("passed", "missing") for name in named) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
