"""`ropegrad report`: what it writes, what it refuses, and the tables."""

import re
import sys
from pathlib import Path

import pytest
from measured import COMMAND, changed, cpu, record, rope_case, suites

from ropegrad import cli, records
from ropegrad.report.grids import by_case, ceilings, sol_scores, summary
from ropegrad.report.page import page
from ropegrad.report.rows import settings
from ropegrad.report.tables import document, markdown, published_best

ROPE = "B=2 S=128 H=32/8"


def run(*arguments, monkeypatch):
    """Exit status of `ropegrad report` in this process."""
    monkeypatch.setattr(sys, "argv", ["ropegrad", "report", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return stopped.value.code


def test_a_folder_with_page_pictures_and_tables(monkeypatch, capsys, tmp_path):
    source, out = tmp_path / "a run.jsonl", tmp_path / "deep" / "out"
    records.write(source, rope_case(ROPE))
    assert run(source, "-o", out, monkeypatch=monkeypatch) == 0
    said = capsys.readouterr().out.split("\n")
    written = {path.name for path in out.iterdir()}
    pictures = {
        f"nvidia-h200-{name}-{theme}.png"
        for name in ("roofline", "shares", "accuracy")  # one case is no scaling, and no whole suite
        for theme in ("light", "dark")
    }
    assert written == {"index.html", "tables.md"} | pictures
    assert {line.rpartition("/")[2] for line in said if line} == written
    html = (out / "index.html").read_text("utf-8")
    assert "a run.jsonl" in html
    assert html.count("<figure>") == 3
    ids = re.findall(r' id="([^"]+)"', html)
    assert len(ids) == len(set(ids))


def a_folder(path):
    path.mkdir()


def nothing(path):
    """There is none."""


def forbidden(path):
    path.write_text("{}")
    path.chmod(0)


def damaged(path):
    path.write_text("{}")


def written(text):
    return lambda path: path.write_text(text)


def right(path):
    records.write(path, rope_case(ROPE))


@pytest.mark.parametrize(
    ("make", "arguments", "said"),
    [
        (written(""), [], "no records in {}: `ropegrad bench --json FILE`"),
        (
            written("{}\n"),
            [],
            "{}:1: Object missing required field `op`; a file of records, as ",
        ),
        (written("a,b\n"), [], "{}:1: JSON is malformed"),
        (written("\x00\xff"), [], "{}:1: "),
        (nothing, [], "there is no file {}: `ropegrad bench --json"),
        (a_folder, [], "{} is a folder: name the files of records in it"),
        (forbidden, [], "{} may not be read by this user: change its permissions"),
        (damaged, [], "{} cannot be read (Input/output error): copy it"),
        (right, ["--protocol", "wall"], "protocol must be one of graph, got 'wall'"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_sentence_and_nothing_is_written(
    make, arguments, said, monkeypatch, capsys, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    source, error = Path("r.jsonl"), {forbidden: PermissionError(13, "Permission denied"),
                                      damaged: OSError(5, "Input/output error")}.get(make)  # fmt: skip
    make(source)
    if error is not None:  # root may read everything

        def read_bytes(path):
            raise error

        monkeypatch.setattr(Path, "read_bytes", read_bytes)
    assert run(source, *arguments, "-o", "out", monkeypatch=monkeypatch) == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("ropegrad report: ")
    assert said.format(source) in line
    assert "Errno" not in line
    assert not Path("out").exists()


def test_a_folder_that_cannot_be_written_is_named(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    right(Path("r.jsonl"))
    Path("out").write_text("a file")
    assert run("r.jsonl", "-o", "out", monkeypatch=monkeypatch) == 2
    said = " ".join(capsys.readouterr().out.split())
    assert said == "ropegrad report: cannot write into out (file exists): name another folder with -o"
    assert run("-o", "out", monkeypatch=monkeypatch) == 2
    assert "name files of records" in capsys.readouterr().out


def test_a_file_without_records_is_left_out_beside_others(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    right(Path("r.jsonl"))
    Path("campaign.jsonl").write_text('{"examples": 3}\n')
    assert run("r.jsonl", "campaign.jsonl", "-o", "out", monkeypatch=monkeypatch) == 0
    assert "campaign.jsonl holds no records of times: left out" in capsys.readouterr().out
    assert run("campaign.jsonl", "-o", "other", monkeypatch=monkeypatch) == 2


# ---- tables ------------------------------------------------------------------------------------------------


def test_the_tables_hold_the_figures_of_the_records():
    (setting,) = settings(rope_case(ROPE))
    rows = {row[0]: row for row in summary(setting, "rope").rows}
    assert rows["cupy_plain"][1:] == ("1", "7.3", "92 %", "46 %", "24.6", "0.50")
    (grid,) = by_case(setting, "rope")
    (row,) = grid.rows
    assert dict(zip(grid.headings, row, strict=True))["torch compile"] == "13.7"
    assert row[:4] == (ROPE, "256", "7.3", "1.08")
    assert [one[0] for one in sol_scores(setting).rows] == ["rope: cupy_plain", "rope: portable"]


def test_on_a_cpu_a_table_a_dtype_without_empty_columns_and_nothing_published():
    found = settings(cpu())
    text = document(found)
    assert "bits" not in text
    assert "datasheet" not in text
    assert len(list(by_case(found[0], "rope"))) == 2
    assert "| numba_cpu, bfloat16 | 1 |" in text
    assert "2 threads" in text
    assert published_best(found) == ""


def test_ceilings_alone_are_a_table_of_the_fastest():
    slow, fast = (record("copy", f"{us} us", us, backend="cuda") for us in (3.0, 2.0))
    (setting,) = settings([slow, fast, record("gemm", "1x1", 4.0, backend="cublas", flops=8 * 10**6)])
    assert ceilings(setting).rows == [
        ("copy", "2.0 us", "2.0", "1 TB/s"),
        ("gemm", "1x1", "4.0", "2 TFLOP/s"),
    ]
    assert "fastest measured" in document([setting])


def test_markdown_is_one_table_and_escapes_bars():
    (setting,) = settings([changed(one, device="A | B") for one in rope_case(ROPE)])
    text = document([setting])
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        head, line, *rows = table.splitlines()
        widths = {len(re.findall(r"(?<!\\)\|", row)) for row in (head, line, *rows)}
        assert len(widths) == 1
    assert markdown(sol_scores(settings([record("copy", "x", 1.0, backend="cuda")])[0])) == ""
    assert f"by `{COMMAND}`" in text


def test_published_records_have_tables_of_their_own():
    (setting,) = settings(suites())
    names = {"RIAC as well", "Recursive"}
    assert not [name for name in names if name in document([setting])]
    assert all(name in published_best([setting]) for name in names)
    assert published_best([setting]).count("not independently reproduced") == 2
    html = page([setting], [(setting, [])], "a command")
    for table in re.findall(r"<table.*?</table>", html, flags=re.DOTALL):
        assert not ("Recursive" in table and "cupy_plain" in table)
        assert not ("SOL score (this device)" in table and "benchmark's SOL score" in table)


# ---- the page ----------------------------------------------------------------------------------------------


def test_everything_that_comes_from_records_is_escaped():
    nasty = "<b>&\"'"
    base = list(rope_case(ROPE))
    (setting,) = settings([changed(one, device=nasty, command=nasty, case=nasty) for one in base])
    html = page([setting], [(setting, [])], nasty)
    assert "<b>" not in html


def test_trouble_has_no_time_and_is_marked():
    wrong = record("rope", "wrong", None, backend="cupy_plain", spec=next(rope_case(ROPE)).spec)
    untrue = changed(list(rope_case(ROPE))[2], invalid="INVALID: faster than light")
    found = settings([wrong, untrue])
    html = page(found, [], "a command")
    bad = re.findall(r'<tr class="bad">.*?</tr>', html)
    assert len(bad) == 2
    assert "wrong: no time" in bad[0]
    assert "INVALID: faster than light" in bad[1]


def test_what_other_code_was_measured_is_said():
    from ropegrad.bench.run import digest

    (old,) = (one for one in rope_case(ROPE) if one.backend == "cupy_plain")
    assert "cupy_plain (other code)" in page(settings([old]), [], "a command")
    assert "other code" not in page(settings([changed(old, digest=digest("cupy_plain"))]), [], "a command")


def test_commands_of_other_machines_lose_their_folders():
    (setting,) = settings(
        [changed(one, command="ropegrad limits --json /root/a/b.jsonl") for one in rope_case(ROPE)]
    )
    html = page([setting], [(setting, [])], "a command")
    assert "ropegrad limits --json b.jsonl" in html
    assert "/root" not in html + document([setting])


def test_a_thousand_records_are_less_than_two_megabytes():
    """Two devices with all figures; how long it takes is measured by hand, not here."""
    found = settings(
        [one for device in ("NVIDIA H200", "NVIDIA B200") for protocol in ("graph", "span/cupti")
         for one in suites(device=device, protocol=protocol)]
    )  # fmt: skip
    assert sum(len(setting.records) for setting in found) == 4 * (16 * 7 + 16 * 8)
    assert len(page(found, [(setting, []) for setting in found], "a command").encode()) < 1e6


@pytest.mark.parametrize(
    "options", [(f"{Path(__file__).parent}/kernels.py:raises", "--max-tokens", "1"), ("--quick",)]
)
def test_a_verdict_is_told_from_records(options, monkeypatch, capsys, tmp_path):
    verdict = tmp_path / "v.json"
    monkeypatch.setattr(sys, "argv", ["ropegrad", "verify", *options, "--json", str(verdict)])
    with pytest.raises(SystemExit):
        cli.main()
    capsys.readouterr()
    assert run(verdict, "-o", tmp_path / "out", monkeypatch=monkeypatch) == 2
    said = " ".join(capsys.readouterr().out.split())
    assert "v.json holds a verdict of `ropegrad verify` or `fuzz`, no times; a file of records" in said
