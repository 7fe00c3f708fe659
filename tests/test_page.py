"""The page in a real browser: it renders, sorts and filters, without an error or the network."""

import json
import re
import shutil
import subprocess

import pytest
from conftest import skip
from measured import suites

from ropegrad import records
from ropegrad.report.write import write_report

# Runs inside the page, after its own script.
DRIVER = """
<script>
const told = { errors: window.errors, resources: performance.getEntriesByType("resource").length };
const table = document.getElementById("records"), rows = () => [...table.tBodies[0].rows];
const heads = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
const column = (name) => rows().filter((row) => !row.hidden)
  .map((row) => row.cells[heads.indexOf(name)].dataset.v ?? row.cells[heads.indexOf(name)].textContent);
const press = (name) => table.tHead.rows[0].cells[heads.indexOf(name)].querySelector("button").click();
const enter = (control, value) => { control.value = value; control.dispatchEvent(new Event("input")); };
const count = () => document.getElementById("count").textContent;
told.title = document.title;
told.figures = [...document.querySelectorAll("figure svg")].map((svg) => {
  const box = svg.getBoundingClientRect();
  return [box.width, box.height, svg.querySelectorAll("use").length];
});
told.wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
told.all = count();
press("µs"); told.up = column("µs");
press("µs"); told.down = column("µs");
press("case"); told.cases = column("case");
const op = document.querySelector('select[aria-label="suite"]');
told.ops = [...op.options].map((option) => option.value);
enter(op, "rope"); told.rope = column("suite"); told.ropeCount = count();
enter(document.getElementById("search"), "CUPY_plain 2048");
told.found = column("case"); told.foundCount = count();
enter(op, ""); enter(document.getElementById("search"), "no such words"); told.none = count();
enter(document.getElementById("search"), ""); told.again = count();
const paper = () => getComputedStyle(document.body).backgroundColor;
const ink = () => getComputedStyle(document.querySelector("figure svg text, figure svg g[style*=fill]")).fill;
told.light = [paper(), ink()];
document.getElementById("theme").click(); told.dark = [paper(), ink()];
document.getElementById("theme").click(); told.back = [paper(), ink()];
const out = document.createElement("pre"); out.id = "told"; out.textContent = JSON.stringify(told);
document.body.append(out);
</script>
"""
WATCH = (
    "<script>window.errors = []; addEventListener('error', (e) => window.errors.push(e.message));</script>"
)


def browse(chromium, path, profile):
    """The document after its scripts, and what the browser said; no name resolves."""
    command = [
        chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={profile}", "--window-size=1200,900",
        "--enable-logging=stderr", "--virtual-time-budget=5000", "--dump-dom", path.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def chromium():
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        skip(f"needs a browser: none of {', '.join(names)} is on the PATH")
    return found


@pytest.fixture(scope="module")
def told(chromium, tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    source = folder / "records.jsonl"
    records.write(source, suites())
    html = write_report([source], folder, "ropegrad report records.jsonl")[0].read_text("utf-8")
    driven = folder / "driven.html"
    driven.write_text(
        html.replace("<title>", f"{WATCH}<title>").replace("</body>", f"{DRIVER}</body>"), "utf-8"
    )
    document, said = browse(chromium, driven, folder / "profile")
    (outcome,) = re.findall(r'<pre id="told">(.*?)</pre>', document)
    return json.loads(outcome.replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">")) | {
        "said": said
    }


def test_no_error_and_no_network(told):
    assert told["errors"] == []
    assert told["resources"] == 0
    assert "CONSOLE" not in told["said"]


def test_every_figure_is_shown_at_page_width(told):
    assert len(told["figures"]) == 5
    for width, height, glyphs in told["figures"]:
        assert width > 1000
        assert height > 400
        assert glyphs > 100
    assert told["wide"] <= 0, "the page scrolls sideways"


def test_it_sorts_by_number_both_ways_and_by_name(told):
    up, down = ([float(x) for x in told[way]] for way in ("up", "down"))
    assert up == sorted(up)
    assert down == sorted(up, reverse=True)
    assert len(set(up)) > 100
    assert told["cases"][0].startswith("1x1") or told["cases"][0].startswith("B=1")
    assert told["cases"] != sorted(told["cases"]), "2048 comes after 293"


def test_it_filters(told):
    assert told["all"] == told["again"] == "240 of 240 records"
    assert {"", "rope", "qkv", "copy"} <= set(told["ops"])
    assert set(told["rope"]) == {"rope"}
    assert told["ropeCount"] == "80 of 240 records"
    assert sorted(told["found"]) == ["B=1 S=2048 H=64/8", "B=2 S=2048 H=32/8"]
    assert told["foundCount"].startswith("2 of")
    assert told["none"] == "0 of 240 records"


def test_light_and_dark(told):
    assert told["light"] == told["back"]
    assert told["light"][0] != told["dark"][0]
    assert told["light"][1] != told["dark"][1]
