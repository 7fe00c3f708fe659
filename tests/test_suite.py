"""What the suites are timed against is right itself, and what is wrong gets no time."""

import io
import math
from dataclasses import replace

import numpy as np
import pytest
from conftest import need
from rich.console import Console
from test_limits import RUN

from ropegrad.bench import suite, suite_terminal
from ropegrad.bench.rivals import Contender
from ropegrad.bench.timing import Timing
from ropegrad.cost import rope_cost
from ropegrad.records import Record
from ropegrad.spec import QkvSpec, RopeSpec
from ropegrad.verify.check import check
from ropegrad.verify.draws import make_case

ROPE = RopeSpec(batch=2, heads=6, kv_heads=2, seq=31, head_dim=16, rotary_dim=16, table_batch=2)
QKV = QkvSpec(rope=replace(ROPE, needs=()), hidden_size=40)


@pytest.mark.parametrize("spec", [ROPE, QKV], ids=["rope", "qkv"])
@pytest.mark.parametrize("number", range(3))
def test_every_formula_of_pytorch_is_the_exact_adjoint(spec, number):
    torch = need("torch", "interop")
    from ropegrad.bench.torch_formulas import FORMULAS

    op = "rope" if isinstance(spec, RopeSpec) else "qkv"
    formula = list(FORMULAS[op].values())[number]
    case = make_case(spec, 3, tables="benchmark")  # a pair's columns differ: "paired" would show

    def run(case):
        results = formula(*(torch.from_numpy(x.copy()) for x in case.inputs.values()))
        return dict(zip(case.outputs, (x.numpy() for x in results), strict=True))

    verdict = check(case, run)
    assert verdict.passed, verdict.findings


def contender(factor):
    def bind(inputs):
        def run():
            from ropegrad import api

            grads = api.rope_backward(*inputs.values())
            return [grads[0] * np.float32(factor), *grads[1:]]

        return run

    return Contender(f"times {factor}", "cupy_plain", "a kernel", None, {}, bind)


@pytest.mark.parametrize(("factor", "right"), [(1, True), (1.001, False)])
def test_only_what_is_right_has_a_time(factor, right):
    case = make_case(ROPE, 1)
    one = contender(factor)
    verdict = suite._judge(case, one, one.bind(case.inputs))
    assert verdict.passed is right
    timing = Timing("graph", (50.0, 51.0, 52.0))
    found = suite._record(RUN, "rope", "a case", ROPE, rope_cost(ROPE), one, timing, verdict)
    assert (found.median_us == 51.0) is right
    assert found.passed is right
    assert found.effective_bits["grad_cos"] > 20


def test_a_contender_that_gives_the_wrong_shape_is_wrong():
    case = make_case(ROPE, 1)

    def run():
        from ropegrad import api

        return [x[..., :4] for x in api.rope_backward(*case.inputs.values())]

    verdict = suite._judge(case, contender(1), run)
    found = suite._record(
        RUN, "rope", "a case", ROPE, rope_cost(ROPE), contender(1), Timing("graph", ()), verdict
    )
    assert not found.passed
    assert found.median_us is None


def record(op, backend, us, protocol="graph", precision=None, **options):
    timing = Timing(protocol, (us,))
    return RUN.record(
        op, "B=1 S=8", timing, {"x": 0.5}, backend=backend, kernel="k", spec={"suite": "rope"},
        options=options, precision=precision, bytes_read=1, bytes_written=1, flops=0,
    )  # fmt: skip


ROWS: list[Record] = [
    record("copy", "cuda", 12.0), record("stream", "cuda", 10.0),
    record("rope", "cupy_plain", 25.0, contender="cupy_plain"),
    record("rope", "torch", 90.0, compiled=False, formula="reference"),
    record("rope", "torch", 60.0, compiled=True, formula="reference"),
    record("rope", "torch", 55.0, compiled=True, formula="halves"),
]  # fmt: skip


def test_the_ceiling_and_the_rivals_of_a_case():
    assert suite_terminal.ceiling_us(ROWS) == 10.0
    assert suite_terminal.torch_us(ROWS) == {"eager": 90.0, "compile": 60.0, "best": 55.0}
    products = [record("products", "cublas", us, precision=p) for us, p in ((9.0, "tf32"), (30.0, "fp32"))]
    assert suite_terminal.ceiling_us(products) == 30.0
    assert suite_terminal.ceiling_us([]) is None


def test_the_table_names_protocol_ceiling_and_ratio():
    screen = io.StringIO()
    suite_terminal.show(Console(file=screen, width=120, highlight=False), ROWS)
    said = screen.getvalue()
    assert "graph" in said
    assert "NVIDIA H200" in said
    (row,) = (line.split() for line in said.splitlines() if line.startswith("ok"))
    assert row == ["ok", "B1", "S8", "10.0", "25.0", "2.50", "90.0", "60.0", "55.0"]


def test_a_run_goes_on_where_it_was_interrupted(tmp_path, monkeypatch):
    file = tmp_path / "times.jsonl"
    asked = []

    def time_suite(run, op, progress, samples, *, rivals, skip):
        asked.append(list(skip))
        yield [replace_case(row, name) for row in ROWS for name in [f"case {len(asked)}"]]

    def replace_case(row, name):
        import msgspec

        return msgspec.structs.replace(row, case=name)

    monkeypatch.setattr(suite_terminal, "time_suite", time_suite)
    monkeypatch.setattr(suite_terminal, "start", lambda commit, command: RUN)
    for _ in range(2):
        assert suite_terminal.main(["rope", str(file), "--commit", "abc"]) == 0
    assert asked[0] == []
    assert asked[1] == ["case 1"]
    cases = {row.case for row in suite_terminal.kept(file)}
    assert cases == {"case 1", "case 2"}
    assert math.isclose(suite_terminal.ceiling_us(suite_terminal.kept(file)) or 0, 10.0)
