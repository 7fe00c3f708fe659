"""Which record is held against which ceiling, which times count, and what is averaged."""

import pytest
from measured import changed, contender, qkv_case, record, rope_case, suites, without_tables

from ropegrad.bench.datasheet import find
from ropegrad.cost import rope_cost
from ropegrad.report.published import limit_us, predict, published, suite_work
from ropegrad.report.rows import digest, latest, settings, shown
from ropegrad.report.summary import lines, scores
from ropegrad.suites import SUITES

ROPE, QKV = "B=2 S=128 H=32/8", "B=2 S=128"


def only(records):
    (setting,) = settings(records)
    return setting


def points(records, op="rope"):
    return {point.series.label: point for point in only(records).of(op)}


def test_rope_is_held_against_the_faster_of_copy_and_stream():
    found = points(rope_case(ROPE))
    ours = found["cupy_plain"]
    assert ours.ceiling.op == "stream"
    assert ours.of_ceiling == pytest.approx(0.98 / 1.06, rel=1e-3)
    moved = rope_cost(SUITES["rope"]()[ROPE]).moved
    assert ours.floor_us == pytest.approx(moved / 4.8e6)
    assert ours.of_datasheet == pytest.approx(moved / 4.8e6 / ours.us)
    assert (ours.tokens, ours.heads, ours.bits) == (256, (32, 8), 24.6)


def test_a_ceiling_at_other_bytes_or_that_cannot_be_true_is_none():
    records = list(rope_case(ROPE))
    fewer = changed(records[1], bytes_read=records[1].bytes_read // 2)
    wrong = changed(records[0], invalid="faster than light")
    assert points([wrong, fewer, *records[2:]])["cupy_plain"].ceiling is None
    assert points([records[0], fewer, *records[2:]])["cupy_plain"].ceiling.op == "copy"


def test_products_count_only_where_they_keep_the_promise():
    found = points(qkv_case(QKV), "qkv")
    assert found["cupy_plain, highest"].ceiling.precision == "fp16"
    assert found["cupy_plain, highest"].ceiling_us == 3 * found["cupy_plain, high"].ceiling_us
    assert found["cupy_plain, high"].ceiling.precision == "fp16"
    slow_fp16 = [changed(r, median_us=9e5) if r.precision == "fp16" else r for r in qkv_case(QKV)]
    assert points(slow_fp16, "qkv")["cupy_plain, medium"].ceiling.precision == "tf32"
    assert points(slow_fp16, "qkv")["cupy_plain, highest"].ceiling.precision == "fp32"


def test_formulas_are_one_contender_with_its_fastest():
    found = points(rope_case(ROPE))
    assert found["torch compile"].variants == 2
    assert found["torch compile"].record.options["formula"] == "halves"
    assert found["torch eager"].variants == 1
    assert found["torch compile"].series.rival
    assert not found["cupy_plain"].series.rival
    assert len(only(rope_case(ROPE)).every) == len(found) + 1


def test_what_failed_or_cannot_be_true_has_no_point_and_stays_a_record():
    failed = contender("rope", ROPE, None, "cupy_plain")
    untrue = contender("rope", ROPE, 0.1, "portable", invalid="faster than light")
    setting = only([failed, untrue])
    assert not setting.points
    assert setting.records == (failed, untrue)


def test_of_the_same_thing_measured_again_the_last_counts():
    first = list(rope_case(ROPE))
    again = [changed(one, median_us=one.median_us * 2) for one in first]
    assert latest(first + again) == again
    other_device = list(rope_case(ROPE, device="NVIDIA B200"))
    assert latest(first + other_device) == first + other_device


def test_devices_and_protocols_stay_apart_and_graph_makes_the_figures():
    gpu = [one for protocol in ("span/cupti", "graph") for one in rope_case(ROPE, protocol=protocol)]
    limits = [record("copy", "4 MiB", 3.0, backend="cuda", protocol="span/cupti")]
    cpu = list(rope_case(ROPE, device="A CPU", protocol="wall"))
    found = settings(gpu + limits + cpu)
    assert [(one.device, one.protocol) for one in found] == [
        ("NVIDIA H200", "graph"), ("NVIDIA H200", "span/cupti"), ("A CPU", "wall"),
    ]  # fmt: skip
    assert [one.protocol for one in shown(found)] == ["graph", "wall"]
    assert any(one.case == "4 MiB" for one in found[0].limits)
    assert found[2].points[0].of_datasheet is None
    only_span = settings([*rope_case(ROPE, protocol="span/cupti"), changed(limits[0], protocol="graph")])
    assert [one.protocol for one in shown(only_span)] == ["span/cupti"]


def test_suites_of_the_same_cases_are_not_mixed():
    setting = only([*rope_case(ROPE), *qkv_case(QKV), *without_tables(ROPE), *without_tables(ROPE, "other")])
    assert setting.suites == ["rope", "qkv", "rope-qk", "other"]
    found = {suite: {p.series.name: p for p in setting.of(suite)} for suite in setting.suites}
    assert set(found["rope-qk"]) == {"cupy_plain", "liger"}
    assert "liger" not in found["rope"]
    assert found["rope-qk"]["liger"].series.rival
    for suite in ("rope-qk", "other"):
        assert found[suite]["cupy_plain"].ceiling.spec == {"suite": suite}
        assert found[suite]["cupy_plain"].of_ceiling == pytest.approx(1 / 1.1, rel=1e-4)
    assert len(setting.records) == 7 + 6 + 3 + 3 + 2


def test_dtypes_are_not_mixed():
    single = contender("rope", ROPE, 5.0, "portable")
    half = changed(contender("rope", ROPE, 3.0, "portable"), spec=single.spec | {"dtype": "bfloat16"})
    found = points([single, half])
    assert set(found) == {"portable", "portable, bfloat16"}


def test_digest_sees_every_figure_and_no_order():
    records = list(rope_case(ROPE))
    assert digest(records) == digest(records[::-1])
    assert digest(records) != digest([changed(records[0], median_us=1.0), *records[1:]])


# ---- means, scores -----------------------------------------------------------------------------------------


def test_a_line_is_the_mean_of_its_cases():
    cases = (ROPE, "B=4 S=1571 H=32/8")
    setting = only([one for case in cases for one in rope_case(case)])
    line = next(line for line in lines(setting, "rope") if line.series.name == "cupy_plain")
    each = [one for one in setting.of("rope") if one.series.name == "cupy_plain"]
    assert line.us == pytest.approx(sum(one.us for one in each) / 2)
    assert line.of_ceiling == pytest.approx(sum(one.ceiling_us for one in each) / sum(one.us for one in each))
    assert (line.cases, line.bits, line.error) == (2, 24.6, 0.5)


def test_no_share_where_one_case_lacks_its_ceiling():
    other = [one for one in rope_case("B=4 S=1571 H=32/8") if one.op == "rope"]
    line = lines(only([*rope_case(ROPE), *other]), "rope")[0]
    assert line.cases == 2
    assert line.of_ceiling is None
    assert line.of_datasheet is not None


def test_the_score_is_one_at_the_floor_and_a_half_at_torch_compile():
    base = list(rope_case(ROPE))
    floor = points(base)["cupy_plain"].floor_us
    compiled = points(base)["torch compile"].us

    def score(us, **where):
        records = [one for one in rope_case(ROPE, **where) if one.backend not in ("cupy_plain", "portable")]
        setting = only([*records, contender("rope", ROPE, us, "cupy_plain", **where)])
        return scores(setting, "rope")

    (at_floor,) = score(floor)
    assert at_floor.score == pytest.approx(1, abs=1e-4)
    (at_base,) = score(compiled)
    assert at_base.score == pytest.approx(0.5)
    assert (at_base.base_us, at_base.sol_us) == (compiled, floor)
    assert not score(floor, protocol="span/cupti")  # T_base is a captured graph's
    assert not scores(only([one for one in base if one.backend != "torch"]), "rope")


# ---- published and predicted -------------------------------------------------------------------------------


def test_published_records_are_whole_and_labelled():
    for op, count, best in (("rope", 14, 17.7), ("qkv", 20, 81.9)):
        what = published()[op]
        assert len(what.entries) == count
        assert what.best.us == best
        assert [one.us for one in what.entries] == sorted(one.us for one in what.entries)
        assert what.device == "NVIDIA B200"
        assert "not independently reproduced" in what.trust
        assert limit_us(op, what.sheet) < best, "nobody is faster than the device's limit"


def test_the_suites_work_is_the_formulas():
    tokens = [one.batch * one.seq for one in SUITES["rope"]().values()]
    heads = [one.heads + one.kv_heads for one in SUITES["rope"]().values()]
    by_hand = [(3 * h + 4) * 128 * 4 * m for h, m in zip(heads, tokens, strict=True)]
    assert suite_work("rope")[0] == sum(by_hand) / 16
    tokens = [one.rope.batch * one.rope.seq for one in SUITES["qkv"]().values()]
    assert suite_work("qkv")[1] == sum(4 * m * 32 * 96 * 1536 for m in tokens) / 16


def test_a_prediction_reaches_from_our_share_to_the_best_published():
    setting = only(suites())
    b200, h200 = find("NVIDIA B200"), find("NVIDIA H200")
    for op, precision in (("rope", None), ("qkv", "high")):
        ours = next(
            line for line in lines(setting, op)
            if line.series.name == "cupy_plain" and line.series.precision == precision
        )  # fmt: skip
        found = predict(setting, op)
        scaled = limit_us(op, b200) * ours.us / limit_us(op, h200)
        assert [found.fast_us, found.slow_us] == pytest.approx(sorted([scaled, published()[op].best.us]))
        assert found.fast_us < found.slow_us
    assert "7.5 TB/s" in predict(setting, "rope").basis
    assert "804 TFLOP/s" in predict(setting, "qkv").basis


@pytest.mark.parametrize("lacking", ["a case", "the precision", "the datasheet", "the other device"])
def test_no_prediction_without_what_it_rests_on(lacking):
    records = [one for one in suites() if one.op == "qkv"]
    if lacking == "a case":
        records = [one for one in records if one.case != QKV]
    elif lacking == "the precision":
        records = [one for one in records if one.precision != "high"]
    else:
        device = "Some GPU" if lacking == "the datasheet" else "NVIDIA B200"
        records = [changed(one, device=device) for one in records]
    assert predict(only(records), "qkv") is None
