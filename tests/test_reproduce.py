"""`ropegrad bench --reproduce`: which times are compared, when they agree, and what is said to differ."""

import sys

import pytest
from conftest import need
from measured import changed, contender, cpu, qkv_case, record, rope_case, suites, without_tables

from ropegrad import cli, records
from ropegrad.bench import on_cpu, reproduce, reproduce_terminal
from ropegrad.bench.contender import promising
from ropegrad.bench.facts import OPS, identity
from ropegrad.bench.place import Choice
from ropegrad.bench.reproduce import Pair, differences, pairs, spec_of
from ropegrad.bench.suite import time_case
from ropegrad.bench.workloads import Problem
from ropegrad.spec import RopeSpec
from ropegrad.suites import SUITES

ROPE, QKV = "B=2 S=128 H=32/8", "B=2 S=128"


def run(*arguments, monkeypatch):
    """Exit status of `ropegrad bench` in this process."""
    monkeypatch.setattr(sys, "argv", ["ropegrad", "bench", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return stopped.value.code


@pytest.mark.parametrize(
    ("old", "new", "agree"),
    [(100.0, 103.0, True), (100.0, 103.1, False), (100.0, 96.9, False), (5.0, 5.3, True), (5.0, 5.31, False)],
)
def test_three_percent_or_a_third_of_a_microsecond(old, new, agree):
    pair = Pair(*(contender("rope", ROPE, us, "cupy_plain") for us in (old, new)))
    assert pair.reproduced is agree
    assert pair.ratio == pytest.approx(new / old)


def test_what_is_missing_wrong_or_untrue_is_not_reproduced():
    old = contender("rope", ROPE, 5.0, "cupy_plain")
    assert not Pair(old, None).reproduced
    assert not Pair(old, contender("rope", ROPE, None, "cupy_plain")).reproduced
    assert not Pair(old, changed(old, invalid="faster than light")).reproduced
    assert Pair(old, old).reproduced


def test_each_time_finds_its_own():
    everything = [
        *rope_case(ROPE), *rope_case(ROPE, protocol="span/cupti"), *qkv_case(QKV), *without_tables(ROPE),
        *without_tables(ROPE, "rope-qk-bshd"), *cpu(),
    ]  # fmt: skip
    assert len({identity(one) for one in everything}) == len(everything)
    found = pairs(everything, everything[::-1])
    assert len(found) == len(everything)
    assert all(pair.old is pair.new for pair in found)
    assert pairs([*everything, record("gemm", "2048", 9.0, backend="numpy")], everything) == found
    half = pairs(everything, everything[::2])
    assert [pair.new is None for pair in half] == [i % 2 == 1 for i in range(len(half))]


def test_what_differs_is_named_and_nothing_else():
    old = list(rope_case(ROPE))
    assert differences(old, old) == []
    new = [changed(one, driver="999", versions={"cupy": "15"}, clocks=None) for one in old]
    new = [changed(one, digest="f" * 16) if one.backend == "cupy_plain" else one for one in new]
    assert differences(old, new) == [
        ("driver", "580.1", "999"),
        ("clocks", "{'sm': 1980, 'memory': 3201}", ""),
        ("cupy", "14.2.0", "15"),
        ("code of cupy_plain", "0" * 16, "f" * 16),
    ]


def test_a_record_says_the_whole_specification():
    for one in [*suites(), *without_tables(ROPE), *cpu()]:
        if one.op in OPS:
            spec = spec_of(one)
            name = one.spec.get("suite")
            if name in SUITES:
                assert spec == promising(SUITES[name]()[one.case], one.precision)
            elif name is not None:
                assert spec.needs == ("q", "k")


def test_records_of_a_gpu_need_one(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(reproduce, "no_gpu", lambda: "there is none")
    file = tmp_path / "r.jsonl"
    records.write(file, rope_case(ROPE))
    assert run("--reproduce", file, monkeypatch=monkeypatch) == 2
    assert "of a GPU, NVIDIA H200: there is none" in capsys.readouterr().out
    records.write(file, [record("copy", "4 MiB", 3.0, backend="cuda")])
    assert run("--reproduce", file, monkeypatch=monkeypatch) == 2
    assert "ropegrad limits" in capsys.readouterr().out
    assert run("--reproduce", tmp_path / "none", monkeypatch=monkeypatch) == 2


@pytest.mark.parametrize(("factor", "status"), [(1.0, 0), (1.1, 1)])
def test_status_and_table(factor, status, monkeypatch, capsys, tmp_path):
    old, file, new_file = list(rope_case(ROPE)), tmp_path / "r.jsonl", tmp_path / "new.jsonl"
    records.write(file, old)
    new = [changed(one, median_us=one.median_us * factor, driver="999") for one in old]
    monkeypatch.setattr(reproduce_terminal, "measure_again", lambda *arguments: iter([new]))
    monkeypatch.setattr(reproduce, "no_gpu", lambda: None)
    monkeypatch.setenv("COLUMNS", "140")
    assert run("--reproduce", file, "--json", new_file, monkeypatch=monkeypatch) == status
    said = capsys.readouterr().out
    assert f"{0 if status else 7} of 7 times within 3%" in said
    assert said.count("1.100" if status else "1.000") == 7
    assert "driver: 580.1, here 999" in said
    assert [one.median_us for one in records.read(new_file)] == [one.median_us for one in new]


def test_a_cpus_records_are_measured_again(monkeypatch, capsys, tmp_path):
    """Whether the times agree is not judged here."""
    need("threadpoolctl", "cpu")
    spec = RopeSpec(batch=1, heads=4, kv_heads=2, seq=16, head_dim=16, rotary_dim=16, table_batch=1)
    place = on_cpu.start(threads=1, samples=2, commit="c", command="d")
    mine = [*place.contenders(spec, Choice(("numpy_tiled",), rivals=False))]
    old = time_case(place, Problem("rope", "tiny", spec), mine, ["wall"], lambda text: None)
    old = [changed(one, device="a CPU") for one in old]
    file, new_file = tmp_path / "r.jsonl", tmp_path / "new.jsonl"
    records.write(file, old)
    monkeypatch.setenv("COLUMNS", "140")
    status = run("--reproduce", file, "--samples", 2, "--json", new_file, monkeypatch=monkeypatch)
    assert status in (0, 1)
    new = records.read(new_file)
    assert [identity(one) for one in new] == [identity(one) for one in old]
    assert all(one.passed for one in new)
    said = capsys.readouterr().out
    assert "device: a CPU, here " in said
    assert f"of {len(old)} times" in said


def test_who_was_timed_by_what_is_timed_again():
    old = [*rope_case(ROPE), *rope_case(ROPE, protocol="span/events"), *cpu()]
    first, *others = reproduce.cases(old)
    assert (first.problem.suite, first.problem.name, first.threads) == ("rope", ROPE, None)
    assert first.protocols == ("graph", "span")
    assert first.choice == Choice(("cupy_plain", "portable"), rivals=True)
    assert [one.threads for one in others] == [2] * 4
