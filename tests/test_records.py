"""Records: what goes in comes out, and what must not be written or read is refused."""

import json
import math
from pathlib import Path

import msgspec
import pytest

from ropegrad import records
from ropegrad.records import Record

FACTS = {
    "op": "rope", "case": "B=1 S=1", "spec": {"batch": 1, "needs": ["q", "k"]}, "options": {"table": "half"},
    "backend": "cupy_plain", "kernel": "rotate", "protocol": "graph", "precision": "highest",
    "device": "A GPU", "driver": "580.1", "clocks": {"sm": 1980, "memory": 3201}, "versions": {"cupy": "14"},
    "commit": "abc", "digest": "0123", "date": "2026-11-30", "command": "ropegrad bench", "bytes_read": 100,
    "bytes_written": 50, "flops": 10, "floor_us": 1.5, "samples_us": [3.0, 2.0, 4.0, 2.5, 9.0],
    "median_us": 3.0, "spread_us": 1.0,
    "error_over_bound": {"grad_q": 0.5, "grad_k": 1.0}, "effective_bits": {"grad_q": 23.1},
}  # fmt: skip
UNTIMED = {"samples_us": [], "median_us": None, "spread_us": None}
RESULTS = Path(__file__).parent.parent / "analysis" / "results"


def record(**other):
    return Record(**FACTS | other)


def test_round_trip(tmp_path):
    path = tmp_path / "deep" / "records.jsonl"
    timed, failed = record(), record(error_over_bound={"grad_q": 1.5}, **UNTIMED)
    records.write(path, [timed])
    records.append(path, [failed])
    assert records.read(path) == [timed, failed]
    assert len(path.read_text().splitlines()) == 2
    records.write(path, [failed])
    assert records.read(path) == [failed]
    assert [file.name for file in path.parent.iterdir()] == ["records.jsonl"]
    assert timed.bytes == 150


@pytest.mark.parametrize(
    "error", [{"grad_q": 0.1, "grad_k": 1.0001}, {"grad_q": math.nan}, {"grad_q": None}, {}]
)
def test_a_run_whose_check_failed_has_no_time(error):
    with pytest.raises(ValueError, match="check failed"):
        record(error_over_bound=error)
    assert not record(error_over_bound=error, **UNTIMED).passed
    assert record().passed


def test_what_is_not_finite_is_read_as_a_failure(tmp_path):
    path = tmp_path / "records.jsonl"
    records.write(path, [record(error_over_bound={"grad_q": math.inf}, **UNTIMED)])
    assert records.read(path)[0].error_over_bound == {"grad_q": None}
    assert not records.read(path)[0].passed


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"median_us": 2.5}, "median_us and spread_us are 2.5 and 1.0; the samples' are 3.0 and 1.0"),
        ({"spread_us": 0.1}, "the samples' are 3.0 and 1.0"),
        ({"samples_us": []}, "needs samples_us"),
        ({"samples_us": [0.0], "median_us": 0.0, "spread_us": 0.0}, "positive"),
        ({"samples_us": [math.nan], "median_us": 1.0}, "finite"),
        ({"floor_us": 3.1}, "below floor_us 3.1: invalid must say so"),
        ({"protocol": "span"}, "got 'span'"),
        ({"digest": ""}, "digest must not be empty"),
        ({"bytes_read": -1}, "negative"),
        ({"schema": 0}, "schema must be 1, got 0"),
    ],
)
def test_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        record(**wrong)


def test_a_time_below_the_floor_may_stand_if_it_says_so():
    assert record(floor_us=3.1, invalid="INVALID: too fast").invalid


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": 5}, r"Expected `str`, got `int` - at `\$.device`"),
        ({"extra": 1}, "unknown field `extra`"),
        ({"error_over_bound": {"grad_q": 2.0}}, "check failed"),
        ({"median_us": 1.0}, "the samples' are"),
    ],
)
def test_reading_names_file_and_line(tmp_path, change, message):
    path = tmp_path / "records.jsonl"
    records.write(path, [record()])
    wrong = json.loads(msgspec.json.encode(record())) | change
    with path.open("a") as file:
        file.write(json.dumps(wrong) + "\n")
    with pytest.raises(ValueError, match=rf"records.jsonl:2: .*{message}"):
        records.read(path)


def test_a_missing_field_and_a_broken_line_are_named(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text('{"op": "rope"}\n')
    with pytest.raises(ValueError, match=r"records.jsonl:1: .*missing required field"):
        records.read(path)
    path.write_text('{"op": \n')
    with pytest.raises(ValueError, match=r"records.jsonl:1: "):
        records.read(path)


def test_digest_sees_code_and_nothing_else(tmp_path):
    path = tmp_path / "a.py"

    def digest(text, name="a.py"):
        (tmp_path / name).write_text(text)
        return records.digest([tmp_path / name])

    first = digest('"""Doc."""\ndef f(x):\n    """Doc."""\n    return x + 1\n')
    assert digest("# comment\ndef f( x ):\n    return x+1  # comment\n") == first
    assert digest("def f(x):\n    return x + 2\n") != first
    assert digest("def f(x):\n    return x - 1\n") != first
    assert digest("int a;", "a.cu") != digest("int  a;", "a.cu")
    assert records.digest([path, tmp_path / "a.cu"]) == records.digest([tmp_path / "a.cu", path])
    assert len(first) == 16


def test_digest_is_the_same_under_every_python():
    """Written out once, by hand: a changed figure means that published digests no longer say anything."""
    assert records._code("def f(x: int = 1) -> None: ...") == (
        "Module(body=[FunctionDef(name='f',args=arguments(args=[arg(arg='x',annotation=Name(id='int',ctx=Load()))],"
        "defaults=[Constant(value=1)]),body=[Expr(value=Constant(value=Ellipsis))],returns=Constant())])"
    )


@pytest.mark.parametrize("path", sorted(RESULTS.glob("limits-*.jsonl")), ids=lambda path: path.name)
def test_published_records_can_be_read(path):
    found = records.read(path)
    assert found
    assert all(record.passed and record.median_us for record in found)
