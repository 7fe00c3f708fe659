"""What others have reported about the two suites, with its trust label; and what a B200 might do here.

The published figures are other devices', other clocks' and another score's: they are shown beside ours,
each against its own device's limit, and never ranked with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

import msgspec

from ropegrad.bench.datasheet import Datasheet, find
from ropegrad.cost import qkv_cost, rope_cost
from ropegrad.report.rows import Point, Setting
from ropegrad.spec import RopeSpec
from ropegrad.suites import SUITES


class Entry(msgspec.Struct, frozen=True):
    """One published record. us: mean over the suite; the percentage is the benchmark's own score."""

    implementation: str
    us: float
    sol_score_percent: int
    observed: str


class Again(msgspec.Struct, frozen=True):
    """The best of a second environment of the source."""

    implementation: str
    us: float
    runs: int


class Published(msgspec.Struct, frozen=True):
    """All of one problem, fastest first."""

    problem: str
    source: str
    last_observed: str
    device: str
    protocol: str
    statistic: str
    trust: str
    entries: list[Entry]
    second_environment: Again

    @property
    def best(self) -> Entry:
        """The fastest."""
        return min(self.entries, key=lambda entry: entry.us)

    @property
    def sheet(self) -> Datasheet:
        """Of the device that the records are of."""
        found = find(self.device)
        assert found is not None, "published records are of a device with a datasheet"
        return found


@cache
def published() -> dict[str, Published]:
    """By suite."""
    data = resources.files("ropegrad.report").joinpath("published.json").read_bytes()
    return msgspec.json.decode(data, type=dict[str, Published])


@cache
def suite_work(op: str) -> tuple[float, float]:
    """Mean bytes and FLOPs of a suite's cases."""
    costs = [
        rope_cost(spec) if isinstance(spec, RopeSpec) else qkv_cost(spec) for spec in SUITES[op]().values()
    ]
    return sum(cost.moved for cost in costs) / len(costs), sum(cost.flops for cost in costs) / len(costs)


def limit_us(op: str, sheet: Datasheet) -> float:
    """The suite's own bytes (rope) or FLOPs (qkv, at the fp16 rate) by a datasheet: microseconds, mean."""
    moved, flops = suite_work(op)
    return 1e6 * (moved / sheet.bandwidth if op == "rope" else flops / sheet.fp16)


@dataclass(frozen=True)
class Prediction:
    """A range of the suite's mean on a device that nobody has run this on. It is not a record."""

    op: str
    sheet: Datasheet
    fast_us: float
    slow_us: float
    basis: str


def predict(setting: Setting, op: str) -> Prediction | None:
    """From our share of the measured device's limit, to the rate that the best published record implies.

    qkv: for precision `high` alone, which the fp16 rate belongs to. None without all 16 cases of one backend.
    """
    what, here = published()[op], setting.sheet
    there, best = what.sheet, what.best.us
    if here is None or here.name == there.name:
        return None
    complete = [
        points
        for series, points in setting.series(op).items()
        if not series.rival and _is_the_suite(points, op) and (op == "rope" or series.precision == "high")
    ]
    if not complete:
        return None
    mean = min(sum(point.us for point in points) / len(points) for points in complete)
    share = limit_us(op, here) / mean
    ours = limit_us(op, there) / share
    amount, unit, rate = (
        ("bytes", "TB/s", there.bandwidth) if op == "rope" else ("FLOPs", "TFLOP/s", there.fp16)
    )
    implied = rate * limit_us(op, there) / best
    basis = (
        f"suite {amount} ÷ {rate / 1e12:,.0f} {unit} ÷ {share:.0%}, our share of the {here.name}'s "
        f"datasheet, is {ours:.1f} µs; at {_rate(implied)} {unit}, which the best published record implies, "
        f"{best:.1f} µs"
    )
    return Prediction(op, there, min(ours, best), max(ours, best), basis)


def _rate(rate: float) -> str:
    return f"{rate / 1e12:.1f}" if rate < 1e14 else f"{rate / 1e12:.0f}"


def _is_the_suite(points: Sequence[Point], op: str) -> bool:
    """Every case of the suite by name, and in float32."""
    return {point.record.case for point in points} == set(SUITES[op]()) and all(
        point.series.dtype == "float32" for point in points
    )
