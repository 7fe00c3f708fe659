"""`ropegrad bench`: whose times it takes, what it refuses and why, how it goes on after an interruption."""

import sys
from dataclasses import replace

import pytest
from conftest import need

from ropegrad import cli, records
from ropegrad.bench import bench_terminal, on_cpu, targets, workloads
from ropegrad.bench.contender import is_textbook
from ropegrad.bench.workloads import problems
from ropegrad.spec import QkvSpec, RopeSpec
from ropegrad.verify.domain import Domain
from ropegrad.verify.target import Contract

ROPE = RopeSpec(batch=2, heads=4, kv_heads=2, seq=6, head_dim=16, rotary_dim=16, table_batch=2)
SMALL = {
    "rope": {"one": ROPE, "two": replace(ROPE, seq=7)},
    "qkv": {"one": QkvSpec(rope=replace(ROPE, needs=()), hidden_size=24)},
    "headline": {"one": ROPE},
}
TARGETS = """
import numpy as np
import ropegrad as rg


def right(*arrays):
    return rg.rope_backward(*arrays, backend="portable")


def right_qkv(*arrays):
    return rg.qkv_rope_backward(*arrays, backend="portable")


def wrong(*arrays):
    first, *others = right(*arrays)
    return (first * np.float32(1.0001), *others)


def paired(*arrays):
    return rg.rope_backward(*arrays, adjoint="paired")


def into(*arrays):
    for out, result in zip(arrays[6:], right(*arrays[:6])):
        out[...] = result


def short(*arrays):
    return right(*arrays)[:2]


def blhd(*arrays):
    return rg.rope_backward(*arrays, layout="bshd")


def dies(*arrays):
    raise ZeroDivisionError("of course")


def forward(q, k, cos, sin):
    def turned(x):
        first, second = x.chunk(2, -1)
        return type(x).cat([-second, first], -1) if hasattr(type(x), "cat") else _cat(-second, first)

    return q * cos[:, None] + turned(q) * sin[:, None], k * cos[:, None] + turned(k) * sin[:, None]


def _cat(*parts):
    import torch

    return torch.cat(parts, -1)
"""


@pytest.fixture
def bench(tmp_path, monkeypatch, capsys):
    """Run the command in a folder with targets, on tiny suites: exit status, what it says, its records."""
    need("threadpoolctl", "cpu")
    (tmp_path / "mine.py").write_text(TARGETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setattr(workloads, "timed_suite", SMALL.get)
    monkeypatch.setattr(bench_terminal, "show_products", lambda *_: None)

    def run(*arguments):
        for option, value in (("--arrays", "numpy"), ("--threads", "1"), ("--samples", "2")):
            if option not in arguments:
                arguments = (*arguments, option, value)
        monkeypatch.setattr(sys, "argv", ["ropegrad", "bench", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        file = tmp_path / "r.jsonl"
        return (
            ended.value.code, " ".join(capsys.readouterr().out.split()),
            records.read(file) if file.exists() else [],
        )  # fmt: skip

    return run


KEEP = ("--json", "r.jsonl", "--without-rivals")


def of_target(found):
    return [record for record in found if record.backend == "target"]


# ---- somebody else's function ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("mine.py:right",), ("mine.py:into", "--dps"), ("mine:right", "mine.py:into"),
        ("mine.py:right_qkv", "--suite", "qkv"), ("mine.py:paired", "--adjoint", "paired"),
        ("mine.py:blhd", "--layout", "bshd"), ("mine.py:paired", "--tables", "equal-halves"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_right_target_has_times_beside_ours(bench, arguments):
    if "mine.py:into" in arguments and "--dps" not in arguments:
        arguments = arguments[:1]
    status, said, found = bench(*arguments, "--backend", "numpy_tiled", *KEEP)
    assert status == 0, said
    mine = of_target(found)
    assert mine
    assert all(record.passed and len(record.samples_us) == 2 for record in mine)
    assert {record.options["contender"] for record in mine} == {arguments[0]}
    ours = [record for record in found if record.backend == "numpy_tiled"]
    assert len(ours) == len(mine)
    assert all(record.median_us for record in ours)
    assert arguments[0] in said


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("mine.py:wrong",), "times its bound"),
        (("mine.py:paired",), "grad_q["),
        (("mine.py:blhd",), "SpecError: "),
        (("mine.py:short",), "the result has 2 values, not 4"),
        (("mine.py:dies",), "ZeroDivisionError: of course"),
        (("mine.py:right", "--dps"), "takes"),
    ],
    ids=str,
)
def test_a_wrong_target_has_no_time_and_the_others_have(bench, arguments, reason):
    status, said, found = bench(*arguments, "--suite", "rope", "--backend", "numpy_tiled", *KEEP)
    assert status == 1
    mine = of_target(found)
    assert len(mine) == 2
    assert all(record.median_us is None and not record.passed for record in mine)
    assert all(record.median_us for record in found if record.backend != "target")
    if reason != "takes":
        assert reason in " ".join(record.note for record in mine)
        assert reason in said


def test_a_forward_is_timed_by_its_gradients(bench):
    need("torch", "interop")
    status, said, found = bench(
        "mine.py:forward", "--of", "forward", "--arrays", "torch", "--suite", "rope", *KEEP
    )
    assert status == 0, said
    assert all(record.passed and record.median_us for record in of_target(found))
    assert len(of_target(found)) == 2


def test_a_target_of_torch_or_jax_takes_their_arrays(tmp_path, monkeypatch):
    need("torch", "interop")
    need("jax", "interop")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(TARGETS)
    for arrays in ("torch", "jax"):
        target = targets.Target("mine.py:right", Contract(arrays=arrays))
        one = target.contender(ROPE)
        assert one.movable is (arrays != "jax")
        place = on_cpu.start(threads=1, samples=2, commit="c", command="d")
        problem = workloads.Problem("rope", "small", ROPE)
        *_, found = bench_terminal.time_case(place, problem, [one], ["wall"], lambda what: None)
        assert found.passed, found.note


# ---- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--case", "none"), "no case 'none': one"),
        (("--threads", "0"), "--threads 0: at least one"),
        (("--threads", "4096"), "--threads 4096: this process may use 1 to"),
        (("--samples", "0"), "--samples 0: at least one"),
        (("--backend", "fast"), "backend='fast' is unknown: it must be one of 'numba_cpu'"),
        (("--arrays", "torch"), "says what a TARGET takes: name one, or write cupy or numpy"),
        (("--of", "forward"), "only torch and jax differentiate"),
        (("--suite", "qkv", "--op", "rope"), "--suite qkv is not of --op rope"),
        (("--needs", "weight"), "needs='weight' is unknown: it must be one of"),
        (("--head-dim", "many"), "--head-dim 'many': write whole numbers"),
        (("--suite", "rope", "--head-dim", "7"), "no case of suite 'rope' is of this operation"),
        (("--timeout", "3"), "use ropegrad verify"),
        (("nowhere.py:f",), "there is no file nowhere.py"),
        (("mine.py:none",), "mine.py has no 'none'; it has"),
        (("mine",), "'mine' is no target"),
        (("--json", "mine.py"), "mine.py:1: "),
        (("--json", "nowhere/r.jsonl"), "there is no folder nowhere"),
        (("--reproduce", "r.jsonl", "--protocol", "wall"), "only --samples, --json and --commit go with it"),
    ],
    ids=str,
)
def test_bad_options_are_named_and_nothing_is_timed(bench, arguments, said):
    status, text, found = bench(*arguments)
    assert status == 2
    assert said in text
    assert not found


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--protocol", "graph"), "--protocol graph is read on a GPU; on a CPU write --protocol wall"),
        (("--protocol", "span"), "--protocol span is read on a GPU; on a CPU write --protocol wall"),
        (("--backend", "cupy_plain"), "it takes cupy arrays: write --arrays cupy"),
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_recorded_as_invalid(bench, arguments, reason):
    status, said, found = bench(*arguments, "--suite", "rope", *KEEP)
    assert status == 2
    mine = [record for record in found if record.op == "rope"]
    assert mine
    assert all(record.invalid.startswith("INVALID: ") and reason in record.invalid for record in mine)
    assert not any(record.samples_us for record in mine)
    assert reason in said


def test_on_a_gpu_that_is_not_there(bench, monkeypatch):
    monkeypatch.setattr(bench_terminal, "no_gpu", lambda: "CuPy sees no GPU: none")
    monkeypatch.setattr(sys, "argv", ["ropegrad", "bench", "--arrays", "cupy"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2


def test_one_protocol_that_is_possible_is_measured_beside_one_that_is_not(bench):
    status, _, found = bench("--protocol", "wall", "graph", "--suite", "rope", *KEEP)
    assert status == 2
    assert {(r.protocol, r.invalid is None) for r in found if r.op == "rope"} == {
        ("wall", True), ("graph", False),
    }  # fmt: skip


# ---- interrupted, and again --------------------------------------------------------------------------------


def test_it_goes_on_where_it_was_interrupted(bench, monkeypatch):
    asked, real = [], bench_terminal.time_case

    def time_case(place, problem, *others):
        asked.append(problem.name)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return real(place, problem, *others)

    monkeypatch.setattr(bench_terminal, "time_case", time_case)
    command = ("--suite", "rope", "--backend", "numpy_tiled", *KEEP)
    status, said, found = bench(*command)
    assert status == 130
    assert "interrupted; r.jsonl has what was measured" in said
    assert {record.case for record in found if record.op == "rope"} == {"one"}
    first = next(record for record in found if record.op == "rope")
    status, said, found = bench(*command)
    assert (status, asked) == (0, ["one", "two", "two"])
    assert "1 of 2 cases were in r.jsonl already" in said
    assert first in found
    assert [record.case for record in found if record.op == "rope"] == ["one", "two"]


def again(bench, *other, first=(), monkeypatch):
    """Names of the cases that a second command measures."""
    asked, real = [], bench_terminal.time_case

    def time_case(place, problem, *others):
        asked.append(problem.name)
        return real(place, problem, *others)

    command = ("--suite", "rope", "--backend", "numpy_tiled", *KEEP)
    bench(*command, *first)
    monkeypatch.setattr(bench_terminal, "time_case", time_case)
    _, _, found = bench(*command, *other)
    return asked, found


@pytest.mark.parametrize(
    ("first", "other", "measured"),
    [
        ((), (), []),
        ((), ("--case", "two"), []),
        ((), ("--commit", "another"), ["one", "two"]),
        ((), ("mine.py:right",), ["one", "two"]),
        (("mine.py:right",), (), []),
        ((), ("--dtype", "float64"), ["one", "two"]),
        ((), ("--layout", "bshd"), ["one", "two"]),
        (("mine.py:wrong",), ("mine.py:wrong",), ["one", "two"]),
    ],
    ids=str,
)
def test_only_what_is_the_same_is_skipped(bench, monkeypatch, first, other, measured):
    assert again(bench, *other, first=first, monkeypatch=monkeypatch)[0] == measured


def test_a_target_that_was_edited_is_measured_again(bench, monkeypatch, tmp_path):
    command = ("mine.py:right", "--suite", "rope", "--case", "one", *KEEP)
    _, _, before = bench(*command)
    (tmp_path / "mine.py").write_text(TARGETS + "\nX = 1\n")
    _, said, after = bench(*command)
    assert "already" not in said
    (old,), (new,) = of_target(before), of_target(after)
    assert old.digest != new.digest


def test_other_records_of_the_file_stay(bench, monkeypatch):
    _, found = again(bench, "--dtype", "float64", monkeypatch=monkeypatch)
    assert {record.spec.get("dtype") for record in found if record.op == "rope"} == {"float32", "float64"}


# ---- cases -------------------------------------------------------------------------------------------------


def test_a_contract_changes_the_cases_and_the_name_of_their_suite():
    (first, *_) = problems("rope", Contract(layout="bshd", needs=("q",)), Domain())
    assert (first.suite, first.spec.layout, first.spec.needs) == ("rope-bshd-q", "bshd", ("q",))
    assert not is_textbook(first.spec)
    (first, *_) = problems("rope", Contract(), Domain())
    assert first.suite == "rope"
    assert is_textbook(first.spec)
    assert {p.suite for p in problems("all", Contract(table="half"), Domain())} == {
        "rope-half-tables", "qkv-half-tables",
    }  # fmt: skip
    assert {p.op for p in problems("all", Contract(), Domain(), only="qkv")} == {"qkv"}
    assert [p.spec.precision for p in problems("qkv", Contract(op="qkv", precision="high"), Domain())] == [
        "high"
    ] * 16


def test_a_domain_leaves_cases_out_and_chooses_tables():
    assert {p.spec.seq for p in problems("rope", Contract(), Domain(max_tokens=300))} == {128, 256, 293}
    assert {p.spec.heads // p.spec.kv_heads for p in problems("rope", Contract(), Domain(gqa=(1,)))} == {1}
    assert {p.tables for p in problems("rope", Contract(), Domain(tables="equal-halves"))} == {"llama3"}
    assert {p.tables for p in problems("rope", Contract(), Domain())} == {"benchmark"}
    assert {p.tables for p in problems("rope-qk", Contract(), Domain())} == {"llama3"}


def test_quick_is_the_smallest_of_each_operation():
    found = problems("all", Contract(), Domain(), quick=True)
    assert [(p.op, p.name) for p in found] == [("rope", "B=2 S=128 H=32/8"), ("qkv", "B=2 S=128")]
