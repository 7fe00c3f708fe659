"""What the tables hold, as words: the page and the Markdown show the same ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ropegrad.bench.facts import OPS
from ropegrad.records import Record
from ropegrad.report.published import Published, limit_us, predict
from ropegrad.report.rows import Point, Series, Setting, counts
from ropegrad.report.summary import lines, scores

MISSING = "–"


@dataclass(frozen=True)
class Grid:
    """Headings and rows; the first `left` columns are words, the others numbers."""

    headings: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    left: int = 1


def number(value: float | None, places: int = 1) -> str:
    """With thousands apart; a dash for None."""
    return MISSING if value is None else f"{value:,.{places}f}"


def percent(value: float | None) -> str:
    """A share."""
    return MISSING if value is None else f"{100 * value:.0f} %"


def summary(setting: Setting, op: str) -> Grid:
    """One line a contender of an operation."""
    headings = (
        f"{op}, mean of the cases", "cases", "µs", "of the measured ceiling", "of the datasheet",
        "effective bits", "error/bound",
    )  # fmt: skip
    rows = [
        (
            line.series.label, str(line.cases), number(line.us), percent(line.of_ceiling),
            percent(line.of_datasheet), number(line.bits), number(line.error, 2),
        )
        for line in lines(setting, op)
    ]  # fmt: skip
    return _without_empty(Grid(headings, rows))


def by_case(setting: Setting, op: str) -> Iterator[Grid]:
    """One line a case: everybody's microseconds, ours with the ratio to the ceiling; a table a dtype."""
    found = setting.series(op)
    for dtype in dict.fromkeys(series.dtype for series in found):
        yield _by_case(op, {one: points for one, points in found.items() if one.dtype == dtype})


def _by_case(op: str, found: dict[Series, list[Point]]) -> Grid:
    cases: dict[str, dict[Series, Point]] = {}
    for series, points in found.items():
        for point in points:
            cases.setdefault(point.record.case, {})[series] = point
    headings = tuple(heading for series in found for heading in _headings(series))
    rows = [
        (
            case, number(next(iter(cases[case].values())).tokens, 0),
            *(cell for series in found for cell in _cells(series, cases[case].get(series))),
        )
        for case in sorted(cases, key=lambda case: next(iter(cases[case].values())).tokens)
    ]  # fmt: skip
    return _without_empty(Grid((f"{op}, µs", "tokens", *headings), rows))


def _without_empty(grid: Grid) -> Grid:
    """Without the columns that nobody has a figure in."""
    kept = [i for i in range(len(grid.headings)) if any(row[i] != MISSING for row in grid.rows)]
    return Grid(
        tuple(grid.headings[i] for i in kept), [tuple(row[i] for i in kept) for row in grid.rows], grid.left
    )


def _headings(series: Series) -> tuple[str, ...]:
    return (series.label,) if series.rival else (series.label, "× ceiling")


def _cells(series: Series, point: Point | None) -> tuple[str, ...]:
    us = number(point.us if point else None)
    if series.rival:
        return (us,)
    return us, number(point.us / point.ceiling_us if point and point.ceiling_us else None, 2)


def ceilings(setting: Setting) -> Grid:
    """The measured ceilings alone: the fastest of each kind."""
    best: dict[tuple[str, str | None], Record] = {}
    for record in setting.limits:
        if counts(record):
            key = (record.op, record.precision)
            best[key] = max(best.get(key, record), record, key=_rate)
    rows = [
        (" ".join(filter(None, key)), record.case, number(record.median_us), _rate_words(record))
        for key, record in best.items()
    ]
    return Grid(("fastest measured", "case", "µs", "rate"), rows, left=2)


def _rate(record: Record) -> float:
    return (record.flops or record.bytes) / (record.median_us or 1)


def _rate_words(record: Record) -> str:
    return f"{_rate(record) / 1e6:.3g} {'TFLOP/s' if record.flops else 'TB/s'}"


def sol_scores(setting: Setting) -> Grid:
    """Our SOL scores, each with its T_base and T_sol; no rows where there is none."""
    rows = [
        (
            f"{op}: {one.series.label}", str(one.cases), number(one.us), number(one.base_us),
            number(one.sol_us), number(one.score, 2),
        )
        for op in setting.suites
        for one in scores(setting, op)
    ]  # fmt: skip
    return Grid(("SOL score (this device)", "cases", "T, µs", "T_base, µs", "T_sol, µs", "score"), rows)


def predictions(setting: Setting) -> Iterator[str]:
    """What a device might do that was not measured, as a sentence that says so."""
    for op in OPS:
        found = predict(setting, op)
        if found is not None:
            yield (
                f"Prediction, never measured: {op} on an {found.sheet.name} between {found.fast_us:.1f} and "
                f"{found.slow_us:.1f} µs ({found.basis})."
            )


def published_records(op: str, what: Published) -> Grid:
    """All published records of a suite."""
    limit = limit_us(op, what.sheet)
    rows = [
        (
            one.implementation, one.observed, number(one.us), percent(limit / one.us),
            f"{one.sol_score_percent} %",
        )
        for one in what.entries
    ]  # fmt: skip
    headings = ("published", "observed", "µs", "of the datasheet's limit", "benchmark's SOL score")
    return Grid(headings, rows, left=2)
