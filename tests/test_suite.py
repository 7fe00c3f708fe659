"""What the suites are timed against is right itself, and what is wrong gets no time."""

import io
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
from conftest import need
from rich.console import Console
from test_limits import RUN

from ropegrad import records
from ropegrad.bench import bench_terminal, suite_terminal
from ropegrad.bench.contender import Contender, promising, refusing
from ropegrad.bench.facts import limit_us
from ropegrad.bench.suite import time_case
from ropegrad.bench.timing import Timing
from ropegrad.bench.workloads import Problem
from ropegrad.records import Record
from ropegrad.spec import PRECISIONS, QkvSpec, RopeSpec
from ropegrad.verify.check import check
from ropegrad.verify.draws import make_case

ROPE = RopeSpec(batch=2, heads=6, kv_heads=2, seq=31, head_dim=16, rotary_dim=16, table_batch=2)
QKV = QkvSpec(rope=replace(ROPE, needs=()), hidden_size=40)


FORMULAS = [
    (ROPE, "reference"), (ROPE, "halves"), (ROPE, "flipped"), (QKV, "reference"), (QKV, "packed"),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "name"), FORMULAS, ids=lambda x: x if isinstance(x, str) else x.needs[0])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_formula_of_pytorch_is_the_exact_adjoint_at_its_promise(spec, name, precision):
    torch = need("torch", "interop")
    from ropegrad.bench.torch_formulas import FORMULAS
    from ropegrad.bench.torch_rivals import ARITHMETIC, computing

    if spec is ROPE and precision != "highest":
        return
    formula = FORMULAS["rope" if spec is ROPE else "qkv"][name]
    case = make_case(promising(spec, precision), 3, tables="benchmark")  # columns differ: "paired" would show

    def run(case):
        with computing(ARITHMETIC[precision], "cpu"):
            results = formula(*(torch.from_numpy(x.copy()) for x in case.inputs.values()))
        return dict(zip(case.outputs, (x.numpy() for x in results), strict=True))

    verdict = check(case, run)
    assert verdict.passed, verdict.findings
    if precision == "medium":
        assert not check(promised(case, "high"), run).passed


def promised(case, precision):
    return replace(case, spec=promising(case.spec, precision))


class Stand:
    """A GPU without one: NumPy arrays, the real turns, times that are given."""

    run, samples, options, protocols = RUN, 3, MappingProxyType({}), ("span", "graph")

    def __init__(self, us=50.0, stuck=()):
        self.us, self.stuck = us, stuck

    def refusal(self, protocol):
        return None if protocol in ("span", "graph") else "there is no such clock"

    def refuses(self, one, call, protocol):
        return "it cannot be captured" if protocol == "graph" and one.name in self.stuck else None

    def sets(self, case, read):
        return [{name: x.copy() for name, x in case.inputs.items()} for _ in range(2)]

    def ceiling(self, problem):
        return SimpleNamespace(contenders={"copy": [lambda: None]}, records=lambda *_: ())

    def time(self, contenders, protocol):
        if "lost" in contenders:
            raise RuntimeError("CUPTI saw nothing of 3 calls, the first of lost")
        for calls in contenders.values():
            for call in calls:
                call()
        name = "span/cupti" if protocol == "span" else protocol
        return {one: Timing(name, (self.us, self.us + 1, self.us + 2)) for one in contenders}

    def digest(self, one):
        return "0" * 16


def contender(name="cupy_plain", factor=1, backend="cupy_plain", columns=None):
    def bind(inputs):
        def call():
            from ropegrad import api

            first, *others = (x[..., :columns] for x in api.rope_backward(*inputs.values()))
            return [first * np.float32(factor), *others]

        return call

    return Contender(name, backend, "a kernel", None, {}, bind)


def timed(*everybody, place=None, protocols=("graph",), spec=ROPE):
    problem = Problem("rope", "a case", spec)
    return time_case(place or Stand(), problem, everybody, protocols, lambda what: None)


@pytest.mark.parametrize(("factor", "right"), [(1, True), (1.001, False)])
def test_only_what_is_right_has_a_time(factor, right):
    (found,) = timed(contender(factor=factor))
    assert (found.median_us == 51.0) is right
    assert found.passed is right
    assert found.effective_bits["grad_cos"] > 20
    assert found.spec["suite"] == "rope"


def test_a_contender_that_gives_the_wrong_shape_is_wrong():
    (found,) = timed(contender(columns=4))
    assert not found.passed
    assert found.median_us is None


def projection(precision, factor=1.0, backend="cupy_plain"):
    def bind(inputs):
        from ropegrad import api

        return lambda: [x * np.float32(factor) for x in api.qkv_rope_backward(*inputs.values())]

    return Contender("one name", backend, "a kernel", precision, {}, bind)


def timed_qkv(*everybody, seq=31):
    spec = replace(QKV, rope=replace(QKV.rope, seq=seq))
    problem = Problem("qkv", "a case", spec)
    return {r.precision: r for r in time_case(Stand(), problem, everybody, ("graph",), lambda what: None)}


@pytest.mark.parametrize(
    ("factor", "right"),
    [(1, PRECISIONS), (1 + 2.0**-11, PRECISIONS[1:]), (1 + 2.0**-8, ("medium",)), (2, ())],
)
def test_each_is_judged_at_its_own_promise_beside_the_others(factor, right):
    found = timed_qkv(*(projection(precision, factor) for precision in PRECISIONS))
    assert tuple(precision for precision, record in found.items() if record.median_us) == right
    assert all(record.spec["precision"] == precision for precision, record in found.items())


@pytest.mark.parametrize(("factor", "note"), [(1.0, None), (1 + 2.0**-8, "medium asks for 8.50")])
def test_a_record_says_which_bits_its_promise_lacks(factor, note):
    record = timed_qkv(projection("medium", factor, "torch"), seq=200)["medium"]
    assert record.median_us
    assert record.note is None if note is None else record.note.endswith(note), record.note
    assert record.note is None or record.note.startswith("grad_")


def test_what_cannot_be_honoured_is_invalid_with_the_reason():
    asked = [contender(), refusing("cupy_tensor", ROPE, "cupy_tensor cannot run this: it has no rope")]
    found = timed(*asked, contender("stuck", backend="target"), place=Stand(stuck=("stuck",)),
                  protocols=("span", "graph", "wall"))  # fmt: skip
    said = {(r.options["contender"], r.protocol): r.invalid for r in found}
    assert said == {
        **{("cupy_plain", protocol): None for protocol in ("span/cupti", "graph")},
        **{("cupy_tensor", protocol): "INVALID: cupy_tensor cannot run this: it has no rope"
           for protocol in ("span/cupti", "graph", "wall")},
        ("stuck", "span/cupti"): None, ("stuck", "graph"): "INVALID: it cannot be captured",
        **{(name, "wall"): "INVALID: there is no such clock" for name in ("cupy_plain", "stuck")},
    }  # fmt: skip
    assert all((r.median_us is None) is (r.invalid is not None) for r in found)


def test_a_time_below_the_floor_is_invalid():
    spec = replace(ROPE, seq=64 * 1024, heads=1, kv_heads=1, batch=1, table_batch=1)
    (found,) = timed(contender(), place=Stand(us=0.001), spec=spec)
    assert found.passed
    assert "us is less than" in found.invalid


@pytest.mark.parametrize("backend", ["target", "torch"])
def test_what_cannot_be_timed_costs_ours_no_time(backend):
    found = {r.options["contender"]: r for r in timed(contender(), contender("lost", backend=backend))}
    assert found["cupy_plain"].median_us == 51.0
    assert "CUPTI saw nothing" in found["lost"].invalid
    with pytest.raises(RuntimeError, match="CUPTI"):
        timed(contender("lost"))


def test_a_target_that_keeps_its_results_is_found_out():
    kept = {}

    def bind(inputs):
        from ropegrad import api

        return lambda: kept.setdefault("results", api.rope_backward(*inputs.values()))

    cheat = Contender("cheat", "target", "a kernel", None, {}, bind)
    (found,) = timed(cheat)
    assert found.median_us is None
    assert found.note.startswith("on other data in the same memory: grad_q")


def test_a_target_that_stops_computing_once_it_was_checked_is_found_out():
    calls = []

    def bind(inputs):
        from ropegrad import api

        def call():
            if len(calls) < 3:
                calls.append(api.rope_backward(*inputs.values()))
            return calls[-1]

        return call

    cheat = Contender("cheat", "target", "a kernel", None, {}, bind)
    found = timed(cheat, protocols=("span", "graph"))
    assert [record.median_us for record in found] == [None, None]
    assert all(record.note.startswith("after the timed calls: grad_q") for record in found)


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


def test_the_ceiling_and_ours():
    assert bench_terminal.ceiling_of(ROWS[:2], None).median_us == 10.0
    assert bench_terminal.best(ROWS).median_us == 25.0
    rates = ((9.0, "tf32"), (14.0, "fp32"), (5.0, "fp16"))
    products = [record("products", "cublas", us, precision=p) for us, p in rates]
    assert [bench_terminal.ceiling_of(products, promise).median_us for promise in PRECISIONS] == [14, 5, 5]
    products[1] = record("products", "cublas", 16.0, precision="fp32")
    three = bench_terminal.ceiling_of(products, "highest")  # two float16 terms take three
    assert (three.precision, limit_us(three, "highest"), limit_us(three, "high")) == ("fp16", 15.0, 5.0)
    assert bench_terminal.ceiling_of([], None) is None


def test_the_table_names_protocol_ceiling_and_ratios():
    screen = io.StringIO()
    bench_terminal.show_case(Console(file=screen, width=120, highlight=False), "rope B=1", ROWS)
    said = screen.getvalue()
    assert "rope B=1, graph: 0.01 ms, the ceiling (stream)" in said
    rows = {line.split()[0]: line.split()[1:] for line in said.splitlines() if line.startswith("cupy")}
    assert rows == {"cupy_plain": ["0.025", "±0", "2.50", "1.00", "-", "0.5"]}


def test_the_suites_command_goes_on_where_it_was_interrupted(tmp_path, monkeypatch):
    """As `scripts/gpu` calls it; records of other code go first."""
    file, asked = tmp_path / "times.jsonl", []
    place = Stand()
    place.contenders = lambda spec, choice: iter([contender()])
    small = [Problem("rope", name, ROPE) for name in ("one", "two", "three")]
    monkeypatch.setattr(suite_terminal.on_gpu, "start", lambda *_: place)
    monkeypatch.setattr(suite_terminal, "problems", lambda *_: small)
    compiled = []
    monkeypatch.setattr(suite_terminal, "compile_ahead", lambda specs: compiled.append(len(specs)))
    monkeypatch.setattr(suite_terminal, "kept", lambda path: records.read(path) if path.exists() else [])
    real = bench_terminal.time_case

    def time_case(place, problem, *others):
        asked.append(problem.name)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return real(place, problem, *others)

    monkeypatch.setattr(bench_terminal, "time_case", time_case)
    assert suite_terminal.main(["rope", str(file), "--samples", "3"]) == 130
    assert [r.case for r in records.read(file)] == ["one"] * 2
    assert suite_terminal.main(["rope", str(file), "--samples", "3"]) == 0
    assert asked == ["one", "two", "two", "three"]
    assert compiled == [3, 2]
    assert [r.case for r in records.read(file)] == [name for name in ("one", "two", "three") for _ in "sg"]
