"""scripts/gpu: what it says without a GPU, and how its steps are run, kept and taken up again."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from ropegrad.bench import evidence
from ropegrad.bench.device import Device

ROOT = Path(__file__).resolve().parent.parent
SPEC = importlib.util.spec_from_file_location("gpu_steps", ROOT / "scripts" / "gpu_steps.py")
assert SPEC is not None
assert SPEC.loader is not None
gpu_steps = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(gpu_steps)
Step = gpu_steps.Step


def gpu(*arguments):
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / "gpu", *arguments], capture_output=True, text=True, check=False
    )


def test_an_unknown_stage_is_refused():
    done = gpu("--only", "tests,tme")
    assert done.returncode == 2
    assert "tests, verify, sanitize, time" in done.stderr


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(gpu_steps, "no_gpu", lambda: "CuPy sees no GPU: none")
    assert gpu_steps.main("tests", "/nowhere", "abc", "0") == 2
    assert "no GPU" in capsys.readouterr().err


COUNT = """
import pathlib, sys
log = pathlib.Path(sys.argv[1])
log.write_text((log.read_text() if log.exists() else "") + "x")
print("seen", sys.argv[2])
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def here(monkeypatch, tmp_path):
    """A device that is not there, and steps that take no GPU."""
    device = Device("Some GPU", "1.2", 1 << 20, 4, "0")
    monkeypatch.setattr(gpu_steps, "no_gpu", lambda: None)
    monkeypatch.setattr(gpu_steps.devices, "current", lambda: device)
    program = tmp_path / "count.py"
    program.write_text(COUNT)

    def steps(stage, out, stem, commit):
        log = str(tmp_path / "log")
        yield Step("good", "cupy_plain", (str(program), log, "0"))
        yield Step("bad", "cupy_plain", (str(program), log, "3"))
        yield Step("tool", "cupy_plain", (str(program), log, "0"), ("no-such-sanitizer",))

    monkeypatch.setattr(gpu_steps, "steps", steps)
    return tmp_path


def outcomes(folder):
    found = evidence.read(folder / "out" / "some-gpu.evidence.json")
    return found, {name: (step.status, step.detail) for name, step in found.steps.items()}


def test_outcomes_are_kept_as_they_come(here, capsys):
    assert gpu_steps.main("tests", str(here / "out"), "abc", "0") == 1
    found, seen = outcomes(here)
    assert seen["good"] == ("passed", "seen 0")
    assert seen["bad"] == ("failed", "seen 3")
    assert seen["tool"] == ("missing", "no-such-sanitizer is not on the PATH")
    assert (found.device, found.driver, found.steps["good"].commit) == ("Some GPU", "1.2", "abc")
    assert found.steps["good"].command == "python3 scripts/gpu --only tests"


def test_what_passed_is_not_run_again_unless_asked(here):
    for again, runs in (("0", 2), ("0", 3), ("1", 5)):
        gpu_steps.main("tests", str(here / "out"), "abc", again)
        assert (here / "log").read_text() == "x" * runs


def test_what_passed_with_other_code_is_run_again(here, monkeypatch):
    gpu_steps.main("tests", str(here / "out"), "abc", "0")
    for module in (gpu_steps, evidence):
        monkeypatch.setattr(module, "digest", lambda backend: "other")
    gpu_steps.main("tests", str(here / "out"), "def", "0")
    found, _ = outcomes(here)
    assert (found.steps["good"].digest, found.steps["good"].commit) == ("other", "def")


def test_a_step_that_hangs_is_ended(here, monkeypatch):
    monkeypatch.setattr(gpu_steps, "LIMIT", 1)
    endless = Step("endless", "cupy_plain", ("-c", "import time; print('begun', flush=True); time.sleep(60)"))
    found = gpu_steps.run(endless, "tests", "abc")
    assert (found.status, found.detail) == ("timed out", "after 1 s: begun")


def test_a_missing_tool_is_no_fault_of_the_code(here, monkeypatch):
    right = [Step("tool", "cupy_plain", ("-c", "0"), ("no-such-sanitizer",))]
    monkeypatch.setattr(gpu_steps, "steps", lambda *_: right)
    assert gpu_steps.main("sanitize", str(here / "out"), "abc", "0") == 0


def test_the_steps_of_every_stage():
    right = gpu_steps.backends_of
    gpu_steps.backends_of = lambda op: ["numpy_tiled", "cupy_plain"]
    try:
        found = [step for stage in ("tests", "verify", "sanitize", "time")
                 for step in gpu_steps.steps(stage, Path("out"), "gpu", "abc")]  # fmt: skip
    finally:
        gpu_steps.backends_of = right
    assert {step.name: step.backend for step in found if step.name in ("time rope", "time qkv")} == {
        "time rope": "cupy_plain", "time qkv": "cupy_tensor",
    }  # fmt: skip
    fuzz = next(step for step in found if step.name == "fuzz cupy_tensor")
    assert fuzz.arguments == ("analysis/fuzz.py", "cupy_tensor", "10000", "out/fuzz-gpu-cupy_tensor.json")
    assert [step.name for step in found] == [
        "tests cupy_plain", "tests cupy_tensor", "tests targets", "verify cupy_plain", "fuzz cupy_plain",
        "verify cupy_tensor", "fuzz cupy_tensor", "known kernels",
        "memcheck cupy_plain", "racecheck cupy_plain", "initcheck cupy_plain", "memcheck cupy_tensor",
        "racecheck cupy_tensor", "initcheck cupy_tensor",
        "time large", "DRAM bytes", "time other", "time bfloat16", "time needs-q-k",
        "time rope", "time rope-qk", "time rope-qk-bshd", "time qkv", "time limits",
    ]  # fmt: skip
