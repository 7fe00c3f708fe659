"""Judging somebody else's function: the command, the process it runs in, what is said of it."""

import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree

import kernels
import pytest
from hypothesis import given, settings
from test_cli import run

from ropegrad.errors import SpecError
from ropegrad.verify import Domain, assert_gradients, check, repro
from ropegrad.verify.battery import suite
from ropegrad.verify.campaign import Jobs
from ropegrad.verify.process import Process
from ropegrad.verify.recipe import Recipe
from ropegrad.verify.ruling import RULES
from ropegrad.verify.runner import Here
from ropegrad.verify.runners import run_backend
from ropegrad.verify.strategies import problems
from ropegrad.verify.target import Contract, NoTarget
from ropegrad.verify.trial import attempt

FILE = Path(kernels.__file__)
CONTRACT = Contract()
SPEC = CONTRACT.spec(batch=2, heads=4, kv_heads=2, seq=5, head_dim=8, rotary_dim=8)


def verify(name, *options, monkeypatch, capsys):
    """Exit status of `ropegrad verify`, and what it printed, without line breaks."""
    status = run("verify", f"{FILE}:{name}", *options, monkeypatch=monkeypatch)
    return status, " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("rope_backward", ()),
        ("rope_backward_into", ("--dps",)),
        ("by_name", ("--strides", "contiguous")),
        ("qkv_backward", ("--op", "qkv")),
    ],
)
def test_right_functions_are_right(name, options, monkeypatch, capsys):
    status, printed = verify(name, *options, monkeypatch=monkeypatch, capsys=capsys)
    assert status == 0, printed
    assert "RIGHT" in printed
    assert "NO " not in printed
    assert "subnormal numbers kept" in printed


def test_a_wrong_function_is_named_with_its_fault_and_its_excuse(monkeypatch, capsys):
    status, printed = verify("own_sine", monkeypatch=monkeypatch, capsys=capsys)
    assert status == 1
    assert "NO wrong value in" in printed
    assert "grad_q, grad_k: uses its own sine instead of its partner's" in printed
    assert "no fault was seen inside the domain --tables equal-halves" in printed
    assert "WRONG, 1 rule broken" in printed
    status, printed = verify("own_sine", "--tables", "equal-halves", monkeypatch=monkeypatch, capsys=capsys)
    assert status == 0, printed


def test_no_domain_is_an_excuse_where_the_same_problems_fail_in_it(monkeypatch, capsys):
    status, printed = verify("channel_37", monkeypatch=monkeypatch, capsys=capsys)
    assert status == 1
    assert "--tables equal-halves" not in printed
    assert "--max-tokens" not in printed
    assert "no fault was seen inside the domain --head-dim" in printed


@pytest.mark.parametrize(("option", "number"), [("--examples", "0"), ("--minutes", "-1")])
def test_a_search_of_nothing_is_refused(option, number, monkeypatch, capsys):
    assert run("fuzz", f"{FILE}:rope_backward", option, number, monkeypatch=monkeypatch) == 2
    assert "must be positive" in capsys.readouterr().out


NONE = ("--gqa", "1000003", "--head-dim", "64")  # problems of its domain are too large, or empty


def test_a_search_where_no_problem_lies_is_refused(monkeypatch, capsys):
    assert run("fuzz", f"{FILE}:rope_backward", *NONE, monkeypatch=monkeypatch) == 2
    assert "no problem lies in this domain" in capsys.readouterr().out
    with pytest.raises(SpecError, match="no problem lies in this domain"):
        assert_gradients(kernels.rope_backward, domain=Domain(gqa=(1000003,), head_dim=(64,)))


@pytest.mark.parametrize("command", ["verify", "fuzz"])
def test_a_domain_of_huge_heads_is_judged_on_what_fits(command, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    start = time.monotonic()
    options = ("--gqa", "300007", "--max-tokens", "1", *(("--examples", "3") if command == "fuzz" else ()))
    assert run(command, f"{FILE}:rope_backward", *options, monkeypatch=monkeypatch) == 0
    assert time.monotonic() - start < 30


@pytest.mark.parametrize(
    ("target", "options", "reason"),
    [
        (f"{FILE}:nothing", (), "has no 'nothing'; it has"),
        (f"{FILE}", (), "is no target"),
        ("no_such_file.py:f", (), "there is no file no_such_file.py"),
        ("no_such_module:f", (), "No module named"),
        (f"{FILE}:declines", (), "it declines everything"),
        (f"{FILE}:rope_backward", ("--of", "forward"), "only torch and jax differentiate"),
        (f"{FILE}:rope_backward", ("--suite", "qkv"), "is not of --op rope"),
        (f"{FILE}:rope_backward", ("--gqa", "many"), "write whole numbers"),
        (f"{FILE}:rope_backward", ("--arrays", "cupy"), "no cupy arrays on cuda here: "),
        (f"{FILE}:rope_backward", ("--head-dim", "7"), "rotary width must be even"),
        (f"{FILE}:rope_backward", ("--max-tokens", "0"), "max_tokens=0 must be positive"),
        (f"{FILE}:rope_backward", ("--head-dim", "0"), "head_dim=0 must be positive"),
        (f"{FILE}:rope_backward", ("--gqa", "2,-1"), "gqa=-1 must be positive"),
        (f"{FILE}:rope_backward", ("--head-dim", ","), "--head-dim ',': write whole numbers, as 64,128"),
        (f"{FILE}:rope_backward", ("--needs", "value"), "needs='value' is unknown"),
        (f"{FILE}:rope_backward", ("--needs", "q,k,q"), "needs names 'q' more than once"),
        (f"{FILE}:rope_backward", NONE, "no problem lies in this domain: the smallest here has 64,000,"),
        (f"{FILE}:rope_backward", ("--timeout", "0"), "timeout=0.0 must be positive"),
        (f"{FILE}:rope_backward", ("--memory", "-1"), "memory=-1.0 must be positive"),
        (f"{FILE}:rope_backward", ("--quick",), "--quick and --backend are of ropegrad's own"),
    ],
)
def test_what_cannot_be_judged_has_status_2(target, options, reason, monkeypatch, capsys):
    assert run("verify", target, *options, monkeypatch=monkeypatch) == 2
    assert reason in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (
            f"{FILE}:rope_backward",
            (),
            "[B, S, ·] in all problems; [1, S, ·] silently wrong (wrong",
        ),
        (f"{FILE}:rope_backward", (), "; [S, ·] raised"),
        (f"{FILE}:one_shape", (), "[1, S, ·] declined; [S, ·] raised"),
        ("ropegrad:rope_backward", (), "[1, S, ·] right; [S, ·] right"),
        ("ropegrad:rope_backward", ("--table-shape", "sd"), "[S, ·] in all problems; [B, S, ·] right; [1, S"),
    ],
)
def test_other_shapes_of_tables_are_tried_and_no_fault(name, options, words, monkeypatch, capsys):
    status = run("verify", name, "--max-tokens", "5", *options, monkeypatch=monkeypatch)
    printed = " ".join(capsys.readouterr().out.split())
    assert status == 0, printed
    assert words in printed


def test_options_of_a_target_need_one(monkeypatch, capsys):
    assert run("verify", "--dps", monkeypatch=monkeypatch) == 2
    assert "name one" in capsys.readouterr().out


def test_a_module_is_found_beside_the_caller(monkeypatch, capsys):
    monkeypatch.chdir(FILE.parent)
    assert run("verify", "kernels:rope_backward", "--max-tokens", "5", monkeypatch=monkeypatch) == 0
    assert "tokens up to 5" in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.parametrize(
    ("name", "rule", "words"),
    [
        ("hangs", "hung", "in hangs ("),
        ("segfaults", "crashed", "killed by SIGSEGV"),
        ("leaves", "crashed", "the process ended with status 0"),
        ("eats_memory", "raised", "MemoryError"),
        ("raises", "raised", "ValueError: no such kernel"),
        ("raises_in_colour", "raised", "ValueError: \\x1b[31mred\\x1b[0m\nand \\x07 a bell"),
    ],
)
def test_whatever_a_target_does_becomes_a_verdict(name, rule, words):
    start = time.monotonic()
    with Process(f"{FILE}:{name}", CONTRACT, timeout=0.2, memory=1 << 30) as process:
        trial = attempt(process, Recipe(SPEC))
    assert [fault.rule for fault in trial.faults] == [rule]
    assert words in trial.faults[0].message
    assert time.monotonic() - start < 20


@pytest.mark.parametrize("memory", ["1e-9", "0.001", "0.01"])
def test_a_limit_on_memory_that_no_target_can_keep_is_no_verdict(memory, monkeypatch, capsys):
    status, printed = verify("rope_backward", "--memory", memory, monkeypatch=monkeypatch, capsys=capsys)
    assert status == 2, printed
    assert "could not be judged: the limit of" in printed
    assert "MiB (--memory) is too small for a problem whose arrays take" in printed
    assert "within 5" in printed


def test_whoever_eats_memory_is_told_the_limit(monkeypatch, capsys):
    """Under a tight limit, too: with enough for its arrays it fails as well."""
    for memory in ("0.4", "1"):
        options = ("--memory", memory, "--max-tokens", "1")
        status, printed = verify("eats_memory", *options, monkeypatch=monkeypatch, capsys=capsys)
        assert status == 1
        assert "NO raised in" in printed
        assert f"the limit is {float(memory) * 1024:.4g} MiB beyond its imports (--memory)" in printed


def test_what_is_held_here_is_not_counted_as_the_target_s(monkeypatch, capsys):
    """Each result is a view of 32 MiB, and many calls' results are held at a time."""
    options = ("--memory", "0.2", "--max-tokens", "5")
    status, printed = verify("small_part_of_much", *options, monkeypatch=monkeypatch, capsys=capsys)
    assert status == 0, printed


def test_the_process_is_started_again_after_a_crash():
    with Process(f"{FILE}:segfaults", CONTRACT) as process:
        for _ in range(2):
            assert attempt(process, Recipe(SPEC)).faults[0].rule == "crashed"
        assert process.restarts == 1


def test_what_a_target_prints_is_no_answer():
    with Process(f"{FILE}:prints", CONTRACT) as process:
        assert attempt(process, Recipe(SPEC)).status == "right"


def test_a_file_that_fails_to_import_says_how(tmp_path):
    (tmp_path / "broken.py").write_text("import no_such_package")
    with pytest.raises(NoTarget, match="importing it raised ModuleNotFoundError"):
        Process(f"{tmp_path / 'broken.py'}:f", CONTRACT)


def test_both_ways_of_calling_see_the_same():
    recipes = [Recipe(SPEC, 3, memory="mixed"), Recipe(SPEC, 4, tables="llama3")]
    with Process(f"{FILE}:own_sine", CONTRACT) as process:
        there = [attempt(process, recipe).faults for recipe in recipes]
    here = [attempt(Here(kernels.own_sine, CONTRACT), recipe).faults for recipe in recipes]
    assert repr(there) == repr(here)
    assert there[0]
    assert not there[1]


# ---- fuzzing -------------------------------------------------------------------------------------------


def fuzz(name, *options, monkeypatch, capsys):
    status = run("fuzz", f"{FILE}:{name}", *options, monkeypatch=monkeypatch)
    return status, " ".join(capsys.readouterr().out.split())


def test_fuzzing_finds_a_fault_and_makes_it_small(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hypothesis.core.global_force_seed", None)  # with pytest's seed nothing is remembered
    status, printed = fuzz("five_tokens_wrong", "--seed", "1", monkeypatch=monkeypatch, capsys=capsys)
    assert status == 1
    assert "NO wrong value" in printed
    assert "the smallest: B=1 H=1/1 S=5 D=2, normal values, normal tables, contiguous memory" in printed
    assert "is wrong in the last token only" in printed
    status, printed = fuzz("five_tokens_wrong", "--examples", "1", monkeypatch=monkeypatch, capsys=capsys)
    assert status == 1, "the next run tries the known failure first"
    assert "S=5 D=2" in printed


def test_fuzzing_finds_nothing_in_a_right_function(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    status, printed = fuzz("rope_backward", "--examples", "60", monkeypatch=monkeypatch, capsys=capsys)
    assert status == 0, printed
    assert "RIGHT (60 problems, 180 calls" in printed
    assert not list(tmp_path.rglob("*.py"))


def test_a_campaign_in_several_processes(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    options = ("--jobs", "2", "--minutes", "0.03")
    status, printed = fuzz("rope_backward", *options, monkeypatch=monkeypatch, capsys=capsys)
    assert status == 0, printed
    assert "earlier" not in printed
    first = int(re.search(r"\((\d+) problems", printed)[1])
    status, printed = fuzz("rope_backward", *options, monkeypatch=monkeypatch, capsys=capsys)
    second = int(re.search(r"\((\d+) problems", printed)[1])
    assert f"with 1 earlier runs: {first + second:,} problems" in printed
    assert fuzz("rope_backward", "--jobs", "0", monkeypatch=monkeypatch, capsys=capsys)[0] == 2


def test_a_job_s_failure_ends_the_campaign(tmp_path):
    contract, domain = Contract(), Domain()
    task = {"target": f"{FILE}:own_sine", "contract": asdict(contract), "domain": asdict(domain), "seed": 1,
            "timeout": 5, "memory": 1 << 30, "folder": ".", "database": str(tmp_path), "examples": 50,
            "seconds": None}  # fmt: skip
    jobs = Jobs([task])
    jobs.wait()
    jobs.stop()
    assert jobs.failure == Recipe(
        contract.spec(batch=1, heads=1, kv_heads=1, seq=1, head_dim=2, rotary_dim=2)
    )


def test_a_campaign_that_is_interrupted_says_what_it_saw(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    calls = 0

    def interrupted(*arguments, **words):
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt
        return attempt(*arguments, **words)

    monkeypatch.setattr("ropegrad.verify.fuzz.attempt", interrupted)
    files = ("--json", "report.json", "--junit", "report.xml")
    status, printed = fuzz("rope_backward", *files, monkeypatch=monkeypatch, capsys=capsys)
    assert status == 130
    assert "interrupted after 4 examples, no fault found so far" in printed
    assert "RIGHT" not in printed
    assert "interrupted; start it again to go on" in printed
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["verdict"] == "interrupted, no fault found so far"
    assert ElementTree.parse("report.xml").getroot().get("errors") == "1"
    assert fuzz("rope_backward", "--examples", "3", monkeypatch=monkeypatch, capsys=capsys)[0] == 0


def test_ctrl_c_in_the_middle_of_a_search(tmp_path):
    """The signal itself: no verdict that was not reached, and the status of a program that SIGINT ends."""
    (tmp_path / "target.py").write_text(
        f"import sys\nsys.path.insert(0, {str(FILE.parent)!r})\nfrom kernels import rope_backward\n"
        "def backward(*arrays):\n    open('started', 'w').close()\n    return rope_backward(*arrays)\n"
    )
    command = [sys.executable, "-m", "ropegrad", "fuzz", "target.py:backward", "--minutes", "5"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    while not (tmp_path / "started").exists() and process.poll() is None:
        time.sleep(0.1)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    printed = process.communicate(timeout=60)[0]
    assert process.returncode == 130, printed
    assert re.search(r"interrupted after [\d,]+ examples, no fault found so far", printed)
    assert "RIGHT" not in printed


def test_ctrl_c_in_the_middle_of_a_verdict(tmp_path):
    (tmp_path / "target.py").write_text(
        "import time\ndef backward(*arrays):\n    open('started', 'w').close()\n    time.sleep(20)\n"
    )
    program = (  # a job in the background ignores Ctrl-C
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from ropegrad.cli import main; main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, "verify", "target.py:backward"], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, cwd=tmp_path,
    )  # fmt: skip
    while not (tmp_path / "started").exists() and process.poll() is None:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    printed, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, "interrupted\n"), printed
    assert not re.search("RIGHT|WRONG|ok  ", printed)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("own_sine", (), "grad_q[0, 0, 0, 0] is"),
        ("mutates", (), "cos was changed"),
        ("negative_strides_wrong", (), "2 of 2 elements wrong"),
        ("writes_too_far", ("--dps",), "memory beside grad_sin was written"),
        ("stale", (), "call 2: grad_q"),
        ("stale_by_object", (), "call 2: grad_q"),
    ],
)
def test_a_script_shows_the_fault_again(name, options, words, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "repro.py"
    options = (*options, "--repro", str(script), "--seed", "3", "--examples", "300")
    status, printed = fuzz(name, *options, monkeypatch=monkeypatch, capsys=capsys)
    assert status == 1, printed
    again = subprocess.run(
        [sys.executable, "-I", script], capture_output=True, text=True, check=False, cwd="/"
    )
    assert again.returncode == 1, again.stderr
    assert words in again.stdout
    fixed = script.read_text().replace(
        f"kernels.py:{name}'", f"kernels.py:fixed_{bool(options[0] == '--dps')}'"
    )
    script.write_text(fixed)
    again = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stdout
    assert again.stdout == "right\n"


def test_a_script_shows_buffers_in_turn(monkeypatch, capsys, tmp_path):
    script = tmp_path / "repro.py"
    status, printed = verify("buffers", "--repro", str(script), monkeypatch=monkeypatch, capsys=capsys)
    assert status == 1
    assert "NO overwritten by a later call in" in printed
    again = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert "call 5: grad_q of an earlier call was changed" in again.stdout


def test_a_script_needs_no_ropegrad():
    text = (Path(repro.__file__).parent / "repro_body.py").read_text()
    assert "ropegrad" not in "".join(re.findall(r"^(?:from|import) .*$", text, re.MULTILINE))


# ---- reports -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["verify", "fuzz"])
def test_reports_for_machines(command, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    files = ("--json", "report.json", "--junit", "report.xml", "--repro", "repro.py")
    assert run(command, f"{FILE}:own_sine", "--max-tokens", "3", *files, monkeypatch=monkeypatch) == 1
    report = json.loads(Path("report.json").read_text())
    assert report["verdict"] == "wrong"
    assert report["contract"]["op"] == "rope"
    assert report["domain"]["max_tokens"] == 3
    fault = report["rules"]["wrong value"]["faults"][0]
    assert fault["output"] == "grad_q"
    assert set(fault["where"]) == {"batch", "head", "token", "channel"}
    assert fault["error_over_bound"] > 1
    assert fault["diagnosis"] == ["uses its own sine instead of its partner's"]
    assert report["rules"]["wrong value"]["every_time"] is True
    assert report["rules"]["input mutated"] is None
    suite = ElementTree.parse("report.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == (str(len(RULES)), "1", "0")
    assert suite.find("testcase[@name='wrong value']/failure").get("type") == "wrong value"
    assert Path("repro.py").exists()
    capsys.readouterr()
    assert run(command, f"{FILE}:own_sine", "--json", str(tmp_path), monkeypatch=monkeypatch) == 2
    said = "".join(capsys.readouterr().out.split())  # a terminal folds it somewhere
    assert "".join(f"{tmp_path} cannot be written: it is a folder".split()) in said


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--junit", ""), ". cannot be written: it is a folder, name a file in it"),
        (("--repro", "/"), "/ cannot be written: it is a folder, name a file in it"),
        (("--json", "/proc/x"), "/proc/x cannot be written: no such file or directory"),
        (("--json", "x", "--junit", "x"), "x cannot be written: two reports are to go there"),
    ],
)
@pytest.mark.parametrize("command", ["verify", "fuzz"])
def test_a_report_that_cannot_be_written_is_refused_before_the_work(
    command, options, sentence, monkeypatch, tmp_path, capsys
):
    monkeypatch.chdir(tmp_path)
    assert run(command, f"{FILE}:hangs", *options, monkeypatch=monkeypatch) == 2
    assert " ".join(capsys.readouterr().out.split()) == f"could not be judged: {sentence}"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", ["--json", "--junit", "--repro"])
@pytest.mark.parametrize("command", ["verify", "fuzz"])
def test_a_report_without_a_folder_is_refused_before_the_work(command, option, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(command, f"{FILE}:hangs", option, "deep/report", monkeypatch=monkeypatch) == 2
    printed = " ".join(capsys.readouterr().out.split())
    assert printed == "could not be judged: deep/report cannot be written: there is no folder deep"
    assert not list(tmp_path.iterdir())
    assert run(command, "nothing.py:f", option, "report", monkeypatch=monkeypatch) == 2
    assert not list(tmp_path.iterdir())


# ---- in a test-suite -----------------------------------------------------------------------------------


def test_assert_gradients_says_what_is_wrong():
    assert_gradients(kernels.rope_backward, examples=30)
    assert_gradients(f"{FILE}:qkv_backward", op="qkv")
    assert_gradients(kernels.own_sine, domain=Domain(tables="equal-halves"))
    assert_gradients(kernels.rope_backward_into, contract=Contract(dps=True))
    with pytest.raises(AssertionError, match="grad_q: uses its own sine instead of its partner's"):
        assert_gradients(kernels.own_sine)
    with pytest.raises(AssertionError, match="declines every problem"):
        assert_gradients(kernels.declines)
    with pytest.raises(AssertionError, match=r"2 values, not 4: .*; --needs asks for fewer"):
        assert_gradients(lambda *arrays: kernels.rope_backward(*arrays)[:2])


@settings(max_examples=20)
@given(case=problems(Contract(), Domain(gqa=(1, 4), rotary="any")))
def test_the_strategies_serve_a_test_of_ones_own(case):
    assert case.spec.heads // case.spec.kv_heads in (1, 4)
    assert check(case, run_backend).passed


# ---- large problems ------------------------------------------------------------------------------------


def test_a_fault_in_a_large_problem_is_shown_at_its_token():
    def late(*arrays):
        results = kernels.rope_backward(*arrays)
        results[0][:, 3, 1500, 7] += 1
        return results

    spec = CONTRACT.spec(batch=1, heads=8, kv_heads=2, seq=2000, head_dim=64, rotary_dim=64)
    (fault,) = attempt(Here(late, CONTRACT), Recipe(spec)).faults
    assert fault.axes == (("batch", 0), ("head", 3), ("token", 1500), ("channel", 7))
    assert "at batch 0, head 3, token 1500, channel 7" in fault.message


@pytest.mark.parametrize("op", ["rope", "qkv"])
def test_the_suites_are_put_to_targets_with_both_draws_in_turn(op):
    recipes = suite(op, Contract(op=op), Domain())
    assert len(recipes) == 16
    first, second = recipes[0].case(), recipes[0].case(other=1)
    up = "grad_q_embed" if op == "rope" else "grad_query"
    assert abs(first.inputs[up]).max() > 1 > 1e-4 > abs(second.inputs[up]).max()
    function = kernels.rope_backward if op == "rope" else kernels.qkv_backward
    trial = attempt(Here(function, Contract(op=op)), recipes[0])
    assert trial.status == "right"
    assert min(trial.bits.values()) > 20
