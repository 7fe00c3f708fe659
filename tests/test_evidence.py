"""What is published of a GPU was seen with today's code, or says that it was not."""

import json
import pathlib

import pytest

from ropegrad import records
from ropegrad.bench import evidence, run
from ropegrad.bench.evidence import Evidence, Outcome

RESULTS = pathlib.Path(__file__).resolve().parent.parent / "analysis" / "results"
FILES = sorted(RESULTS.glob("*.evidence.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_published_evidence_is_of_todays_code(path):
    assert evidence.read(path).faults() == []


def is_current(path):
    return all(record.digest == run.digest(record.backend) for record in records.read(path))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_published_times_are_of_todays_code(path):
    held = evidence.read(path)
    stem = path.name.removesuffix(".evidence.json")
    published = list(RESULTS.glob(f"*{stem}*.jsonl"))
    assert RESULTS / f"{stem}.jsonl" in published
    for file in published:
        assert all(record.passed and not record.invalid for record in records.read(file)), file.name
    old = {file.name for file in published if not is_current(file)}
    assert old == set(held.stale_files), "run them again, or list them with the reason"
    assert all(held.stale_files.values())


def outcome(**other):
    facts = {
        "status": "passed", "detail": "", "backend": "cupy_plain", "digest": run.digest("cupy_plain"),
        "commit": "abc", "date": "2026-01-01", "seconds": 1.0, "command": "x",
    }  # fmt: skip
    return Outcome(**facts | other)


@pytest.mark.parametrize(
    ("steps", "stale", "said"),
    [
        ({"verify": outcome()}, {}, None),
        ({"verify": outcome(status="missing", detail="no such tool")}, {}, None),
        ({"verify": outcome(status="failed")}, {}, "failed"),
        ({"verify": outcome(status="timed out")}, {}, "timed out"),
        ({"verify": outcome(digest="0" * 16)}, {}, "other code"),
        ({"verify": outcome(digest="0" * 16)}, {"verify": ""}, "other code"),
        ({"verify": outcome(digest="0" * 16)}, {"verify": "a comment in PTX"}, None),
        ({"verify": outcome()}, {"verify": "why"}, "is not"),
        ({}, {"verify": "why"}, "never run"),
    ],
)
def test_what_may_not_be_published(steps, stale, said):
    faults = Evidence(device="x", driver="1", steps=steps, stale=stale).faults()
    assert (said is None and not faults) or said in faults[0]


def test_evidence_survives_its_file(tmp_path):
    held = Evidence(device="x", driver="1", steps={"verify": outcome()}, stale={})
    evidence.write(tmp_path / "e.json", held)
    assert evidence.read(tmp_path / "e.json") == held
    assert json.loads((tmp_path / "e.json").read_text())["steps"]["verify"]["status"] == "passed"


def test_a_comment_changes_no_digest_and_code_does(monkeypatch, tmp_path):
    digest = run.digest.__wrapped__  # what is remembered does not read
    right = digest("cupy_plain")
    read = pathlib.Path.read_text

    def edited(addition):
        def text(path, *args, **words):
            return read(path, *args, **words) + (addition if path.name == "cupy_plain.py" else "")

        monkeypatch.setattr(pathlib.Path, "read_text", text)
        return digest("cupy_plain")

    assert edited("\n# a comment\n") == right
    assert edited("\nX = 1\n") != right
