"""The README's tables and pictures belong to the records beside them, and the check can see when not."""

import runpy
import shutil
import sys
from pathlib import Path

import pytest
from measured import changed, rope_case

from ropegrad import records

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def tables():
    """The script's functions."""
    sys.path.insert(0, str(ROOT / "analysis"))
    try:
        return runpy.run_path(str(ROOT / "analysis" / "readme_tables.py"))
    finally:
        sys.path.remove(str(ROOT / "analysis"))


@pytest.fixture
def copy(tmp_path):
    """A checkout with the README and one file of records."""
    shutil.copy(ROOT / "README.md", tmp_path)
    file = tmp_path / "analysis" / "results" / "a-gpu.jsonl"
    records.write(file, rope_case("B=2 S=128 H=32/8"))
    return tmp_path, file


def test_the_readme_and_its_pictures_belong_to_the_records(tables):
    assert tables["faults"]() == []


def test_other_records_are_seen_in_table_and_pictures(tables, copy):
    root, file = copy
    tables["write"](root)
    assert tables["faults"](root) == []
    readme = (root / "README.md").read_text("utf-8")
    assert readme.startswith((ROOT / "README.md").read_text("utf-8").partition("<!-- results: begin -->")[0])
    assert "| cupy_plain | 1 | 7.3 |" in readme
    for line in readme.split('src="')[1:]:
        assert (root / line.partition('"')[0]).exists()

    held = records.read(file)
    records.write(file, [changed(one, median_us=one.median_us * 1.5) for one in held])
    said = tables["faults"](root)
    assert said[0].startswith("README.md")
    assert len(said) == 1 + 2 * 3  # three figures, two themes

    records.write(file, held)
    (root / "analysis" / "figures" / "nvidia-h200-shares-dark.png").unlink()
    assert tables["faults"](root) == ["nvidia-h200-shares-dark.png: missing"]


def test_a_readme_without_markers_is_said(tables, copy):
    root, _ = copy
    (root / "README.md").write_text("nothing")
    with pytest.raises(SystemExit, match="lacks the markers"):
        tables["write"](root)


def test_limits_come_first_and_other_files_do_not_count(tables, tmp_path):
    folder = tmp_path / "analysis" / "results"
    folder.mkdir(parents=True)
    for name in ("campaign", "plain-kernels-a", "limits-a", "limits-a-again", "a", "cpu"):
        (folder / f"{name}.jsonl").touch()
    assert [file.stem for file in tables["published"](tmp_path)] == ["limits-a", "a", "cpu"]
