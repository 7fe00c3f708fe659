"""A suite in one line a contender: means over its cases, shares of both ceilings, and the SOL score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ropegrad.report.rows import Point, Series, Setting


@dataclass(frozen=True)
class Line:
    """One contender on one operation. Times in microseconds, means over `cases` cases.

    of_datasheet, of_ceiling   sums of the cases' floors, or ceilings, over the sum of their times
    bits, error                of the worst output of the worst case
    """

    op: str
    series: Series
    cases: int
    us: float
    floor_us: float | None
    ceiling_us: float | None
    bits: float | None
    error: float

    @property
    def of_datasheet(self) -> float | None:
        """The suite's roofline fraction against the datasheet."""
        return self.floor_us / self.us if self.floor_us else None

    @property
    def of_ceiling(self) -> float | None:
        """The suite's fraction of the measured ceiling's speed."""
        return self.ceiling_us / self.us if self.ceiling_us else None


def lines(setting: Setting, op: str) -> list[Line]:
    """A line a contender, ours first."""
    return [_line(op, series, points) for series, points in setting.series(op).items()]


def _line(op: str, series: Series, points: Sequence[Point]) -> Line:
    bits = [point.bits for point in points if point.bits is not None]
    ratios = [ratio for point in points for ratio in point.record.error_over_bound.values()]
    return Line(
        op, series, len(points), _mean([point.us for point in points]) or 0.0,
        _mean([point.floor_us for point in points]), _mean([point.ceiling_us for point in points]),
        min(bits, default=None), max(ratio for ratio in ratios if ratio is not None),
    )  # fmt: skip


def _mean(values: Sequence[float | None]) -> float | None:
    """None if one is missing: a mean over other cases would be compared with this one."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


@dataclass(frozen=True)
class Score:
    """SOL score on this device: means over the cases. Not comparable with a published percentage."""

    series: Series
    cases: int
    score: float
    us: float
    base_us: float
    sol_us: float


def scores(setting: Setting, op: str) -> list[Score]:
    """1/(1 + (T − T_sol)/(T_base − T_sol)) of our backends; none where T_sol or T_base is missing.

    T_sol: the datasheet's floor. T_base: torch.compile, each case's fastest formula, in a captured graph.
    """
    if setting.protocol != "graph":
        return []
    base = {
        (point.record.case, point.series.precision, point.series.dtype): point.us
        for point in setting.of(op)
        if point.series.name == "torch compile"
    }
    found = []
    for series, points in setting.series(op).items():
        known = [
            (point.us, base[key], point.floor_us)
            for point in points
            if (key := (point.record.case, series.precision, series.dtype)) in base
            and point.floor_us is not None
            and base[key] > point.floor_us
        ]
        if known and not series.rival:
            each = [1 / (1 + (t - sol) / (t_base - sol)) for t, t_base, sol in known]
            means = (sum(column) / len(known) for column in zip(*known, strict=True))
            found.append(Score(series, len(known), sum(each) / len(known), *means))
    return found
