"""How a time is taken and judged: statistics, the rule for INVALID, who owns a kernel, whose turn it is."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from ropegrad.bench import activity, timing
from ropegrad.bench.datasheet import Datasheet
from ropegrad.bench.timing import Timing, floors_us, invalid, rounds, sets_needed, warm_up

SHEET = Datasheet("A GPU", bandwidth=1e12, fp32=1e12, tf32=2e12, fp16=4e12, l2=50_000_000, source="none")


@pytest.mark.parametrize(
    ("samples", "median", "spread"),
    [((5.0,), 5, 0), ((1.0, 2.0, 3.0, 4.0, 100.0), 3, 1), ((1.0, 2.0, 4.0, 8.0), 3, 1.5)],
)
def test_median_and_spread(samples, median, spread):
    found = Timing("graph", samples)
    assert (found.median_us, found.spread_us) == (median, spread)


@pytest.mark.parametrize(
    ("work", "floor"),
    [
        ({"read": 100_000_000, "written": 10_000_000, "flops": 0}, 100),  # inputs come from memory
        ({"read": 100_000_000, "written": 100_000_000, "flops": 0}, 150),  # all but one L2
        ({"read": 1_000, "written": 1_000, "flops": 300_000_000}, 300),  # arithmetic
    ],
)
def test_invalid_is_what_no_device_can_do(work, floor):
    floors = floors_us(SHEET, SHEET.l2, **work)
    assert max(floors.values()) == pytest.approx(floor)
    assert invalid(floor * 1.001, floors) is None
    assert f"= {floor}.00 us" in invalid(floor * 0.999, floors)


def test_arithmetic_counts_at_the_rate_of_its_precision():
    work = {"read": 0, "written": 0, "flops": 4_000_000}
    found = {p: max(floors_us(SHEET, 0, **work, precision=p).values()) for p in ("fp32", "tf32", "fp16")}
    assert found == pytest.approx({"fp32": 4, "tf32": 2, "fp16": 1})


@pytest.mark.parametrize(("nbytes", "sets"), [(1, 121), (60, 3), (61, 2), (119, 2), (500, 2), (0, 121)])
def test_sets_are_more_than_twice_the_l2(nbytes, sets):
    assert sets_needed(nbytes, 60) == sets
    assert sets * max(nbytes, 1) > 120


# ---- who owns what -----------------------------------------------------------------------------------------


def test_spans_go_by_correlation_not_by_order():
    owners = {11: 0, 12: 0, 21: 1}
    work = [
        (12, 4_000, 9_000),
        (10, 0, 50_000),
        (21, 20_000, 21_500),
        (11, 1_000, 3_000),
        (20, 9_000, 20_000),
    ]
    assert activity.spans(work, owners) == {0: 8.0, 1: 1.5}
    assert activity.spans([(10, 0, 5)], owners) == {}


class FakeCupti(ModuleType):
    """Records an owner only while an API kind is traced, as CUPTI does; a launch lasts 3 µs."""

    ActivityKind = SimpleNamespace(
        CONCURRENT_KERNEL=10, MEMCPY=1, MEMSET=2, EXTERNAL_CORRELATION=39, DRIVER=4, RUNTIME=5
    )
    ExternalCorrelationKind = SimpleNamespace(CUSTOM0=3)

    def __init__(self, owner_needs):
        super().__init__("fake")
        self.needs, self.on, self.stack, self.pending, self.clock = set(owner_needs), set(), [], [], 0

    def activity_register_callbacks(self, requested, completed):
        assert requested()[0] > 0
        self.completed = completed

    def activity_enable(self, kind):
        self.on.add(kind)

    def activity_disable(self, kind):
        self.on.remove(kind)

    def activity_push_external_correlation_id(self, group, number):
        self.stack.append(number)

    def activity_pop_external_correlation_id(self, group):
        self.stack.pop()

    def activity_flush_all(self, flag):
        self.completed(self.pending)
        self.pending = []

    def launch(self, kind=10):
        self.clock += 5_000
        if self.on:
            times = {"start": self.clock, "end": self.clock + 3_000}
            self.pending.append(SimpleNamespace(kind=kind, correlation_id=self.clock, **times))
            if self.stack and self.needs <= self.on:
                owner = {"correlation_id": self.clock, "external_id": self.stack[-1]}
                self.pending.append(SimpleNamespace(kind=39, **owner))


@pytest.fixture
def no_device(monkeypatch):
    cupy = SimpleNamespace(cuda=SimpleNamespace(Device=lambda: SimpleNamespace(synchronize=lambda: None)))
    monkeypatch.setitem(sys.modules, "cupy", cupy)


@pytest.mark.parametrize("needs", [[], [4], [5], [4, 5]])
def test_the_tracer_finds_what_it_must_trace(no_device, needs):
    cupti = FakeCupti(needs)
    tracer = activity.Tracer(cupti)
    tracer.find_kinds([cupti.launch])
    reader = timing.CuptiReader(tracer)
    assert set(needs) <= cupti.on
    taken = rounds(
        reader, {"one": [cupti.launch], "two": [twice(cupti.launch)]}, 3, cupti.launch, lambda: None
    )
    assert taken == {"one": (3.0,) * 3, "two": (8.0,) * 3}
    assert not cupti.on


def twice(call):
    return lambda: (call(), call(1))


def test_a_tracer_that_sees_nothing_says_so(no_device):
    cupti = FakeCupti([99])
    with pytest.raises(RuntimeError, match="no correlation ids"):
        activity.Tracer(cupti).find_kinds([cupti.launch])
    tracer = activity.Tracer(FakeCupti([]))
    reader = timing.CuptiReader(tracer)
    reader.sample("idle", lambda: None)
    with pytest.raises(RuntimeError, match="saw nothing of 1 calls, the first of idle"):
        reader.finish()


def test_the_stand_in_says_that_it_is_one(monkeypatch):
    monkeypatch.setattr(timing, "tracer", lambda: "cupti-python cannot be imported: it is not here")
    reader, note = timing.reader("span", None)
    assert reader.protocol == "span/events"
    assert note == "CUDA events in place of CUPTI: cupti-python cannot be imported: it is not here"
    assert timing.reader("graph", None)[0].protocol == "graph"
    assert timing.reader("graph", None)[1] is None
    with pytest.raises(ValueError, match="got 'speed'"):
        timing.reader("speed", None)


# ---- whose turn it is --------------------------------------------------------------------------------------


def test_contenders_take_turns_on_fresh_inputs_after_a_flush():
    log = []

    class Reader:
        protocol = "graph"

        def prepare(self, call):
            return call

        def sample(self, name, call):
            call()

        def finish(self):
            return [(name[0], float(i)) for i, name in enumerate(log) if name not in ("flush", "settle")]

    calls = {name: [lambda s=s: log.append(s) for s in (name + "0", name + "1")] for name in "ab"}
    taken = rounds(Reader(), calls, 3, lambda: log.append("flush"), lambda: log.append("settle"))
    assert log == [
        "flush", "a0", "flush", "b0", "settle", "flush", "b1", "flush", "a1", "settle",
        "flush", "a0", "flush", "b0", "settle",
    ]  # fmt: skip
    assert taken == {"a": (1.0, 8.0, 11.0), "b": (3.0, 6.0, 13.0)}


def test_warm_up_goes_by_time_and_calls_everything_at_least_once(monkeypatch):
    clock, called = [0.0], []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def settle():
        clock[0] += 0.4

    warm_up({"a": [lambda: called.append("a0"), lambda: called.append("a1")]}, 1.0, settle)
    assert called == ["a0", "a1"] * 3
    called.clear()
    warm_up({"a": [lambda: called.append("a0")]}, 0.0, settle)
    assert called == ["a0"]


def test_wall_waits_for_the_device_before_and_after(monkeypatch):
    clock, log = [0.0], []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def synchronize():
        log.append("wait")
        clock[0] += 1e-6

    reader = timing.WallReader(SimpleNamespace(synchronize=synchronize))
    reader.sample("a", lambda: log.append("call"))
    assert log == ["wait", "call", "wait"]
    assert reader.finish() == [("a", pytest.approx(1.0))]
