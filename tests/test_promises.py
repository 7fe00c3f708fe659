"""The README's table of the projections by promise: means, ratios, the rival that is beaten."""

import statistics

import pytest
from measured import changed, contender, qkv_promises

from ropegrad.report.promises import promises, sentence
from ropegrad.report.rows import settings
from ropegrad.suites import SUITES

CASES = list(SUITES["qkv"]())


def sides(*, faster=1.0, cases=CASES, protocols=("graph", "span/cupti")):
    return settings(r for p in protocols for case in cases for r in qkv_promises(case, faster, protocol=p))


def table(found):
    grid = promises(found)
    return {row[:2]: dict(zip(grid.headings[2:], row[2:], strict=True)) for row in grid.rows}


def test_every_promise_with_its_products_ours_and_theirs():
    found = table(sides())
    assert list(found) == [
        ("highest", "bare products, fp32"), ("highest", "cupy_plain"), ("highest", "torch compile"),
        ("highest", "torch eager"),
        *((promise, name) for promise in ("high", "medium")
          for name in ("bare products, fp16", "cupy_tensor", "torch compile", "torch eager")),
    ]  # fmt: skip
    assert {row["cases"] for row in found.values()} == {"16"}


def test_means_and_ratios_are_those_of_the_records():
    setting, _ = both = sides()
    ours = {p.record.case: p.us for p in setting.of("qkv") if p.series.label == "cupy_tensor, high"}
    bare = {r.case: r.median_us for r in setting.records if (r.op, r.precision) == ("products", "fp16")}
    row = table(both)["high", "cupy_tensor"]
    assert row["graph: mean, µs"] == f"{statistics.fmean(ours.values()):,.1f}"
    assert row["graph: geometric mean, µs"] == f"{statistics.geometric_mean(ours.values()):,.1f}"
    ratio = statistics.geometric_mean(ours[case] / bare[case] for case in CASES)
    assert row["graph: × bare"] == row["span: × bare"] == f"{ratio:.2f}"
    assert table(both)["high", "bare products, fp16"]["graph: × bare"] == "1.00"


@pytest.mark.parametrize("faster", [0.8, 1.0, 2.0])
def test_the_rival_is_the_fastest_of_the_same_promise(faster):
    """PyTorch's packed formula, compiled, is what `faster` is over; at another promise others are faster."""
    found = table(sides(faster=faster))
    heading = "× faster than the best rival, "
    for promise in ("high", "medium"):
        row = found[promise, "cupy_tensor"]
        assert row[heading + "graph"] == row[heading + "span"] == f"{faster:.2f}"
        assert found[promise, "torch compile"][heading + "graph"] == "–"


def test_bits_below_the_promise_say_so():
    found = table(sides())
    assert found["medium", "torch compile"]["effective bits"] == "8.40 of 8.5"
    assert found["medium", "cupy_tensor"]["effective bits"] == "8.60"
    assert found["high", "torch eager"]["effective bits"] == "11.60"


def test_no_ratio_where_a_case_lacks_one_of_both():
    records = [r for case in CASES for r in qkv_promises(case)]
    lacks = [r for r in records if not (r.op == "products" and r.precision == "fp16" and r.case == CASES[0])]
    assert table(settings(lacks))["high", "cupy_tensor"]["graph: × bare"] == "–"
    lacks = [r for r in records if not (r.backend == "torch" and r.case == CASES[0])]
    row = table(settings(lacks))["high", "cupy_tensor"]
    assert row["× faster than the best rival, graph"] == "–"
    assert row["graph: × bare"] != "–"


def test_one_protocol_or_one_promise_is_a_table_too():
    found = table(sides(protocols=("graph",)))
    assert not any("span" in heading for row in found.values() for heading in row)
    only = [r for r in qkv_promises(CASES[0]) if r.precision in ("highest", "fp32", "fp16")]
    assert {promise for promise, _ in table(settings(only))} == {"highest"}


def test_the_sentence_names_the_autotuned_cases_and_changes_with_the_records():
    found = sides()
    assert "Autotuned" not in sentence(found)
    facts = {"precision": "high", "formula": "packed", "bits": 11.6}
    (tuned,) = [contender("qkv", CASES[0], 1e6, "torch compile", **facts)]
    name = {"contender": "torch compile packed autotuned", "mode": "max-autotune-no-cudagraphs"}
    tuned = changed(tuned, options=tuned.options | name)
    records = [r for setting in found for r in setting.records]
    said = sentence(settings([*records, tuned]))
    assert f"Autotuned by torch.compile as well: {CASES[0]}." in said
    other = [changed(r, median_us=r.median_us * 2) for r in records]
    assert sentence(settings(other)) != sentence(found)
