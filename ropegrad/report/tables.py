"""Markdown tables for a README: one line a contender, then one line a case."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ropegrad.records import Record
from ropegrad.report.marks import commands, conditions
from ropegrad.report.published import limit_us, predict, published
from ropegrad.report.rows import SUITES, Point, Series, Setting, counts, digest
from ropegrad.report.summary import lines, scores

MISSING = "–"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> Iterator[str]:
    """Lines of a Markdown table, the first `left` columns to the left, numbers to the right."""
    yield f"| {' | '.join(headings)} |"
    yield "|" + "|".join("---" if i < left else "--:" for i in range(len(headings))) + "|"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def number(value: float | None, places: int = 1) -> str:
    """With thousands apart; a dash for None."""
    return MISSING if value is None else f"{value:,.{places}f}"


def percent(value: float | None) -> str:
    """A share."""
    return MISSING if value is None else f"{100 * value:.0f} %"


def made(setting: Setting, records: Sequence[Record]) -> str:
    """Where, when, by what: the sentence under a table or figure."""
    commits = ", ".join(f"`{commit[:10]}`" for commit in sorted({record.commit for record in records}))
    how = ", ".join(f"`{command}`" for command in commands(records))
    return f"{conditions(setting, records)}; measured at {commits} by {how}; records `{digest(records)}`"


def summary(setting: Setting, op: str) -> Iterator[str]:
    """One line a contender of an operation."""
    found = lines(setting, op)
    yield from table(
        (f"{op}, mean of the cases", "cases", "µs", "of the measured ceiling", "of the datasheet", "bits",
         "error/bound"),
        (
            (
                line.series.label, str(line.cases), number(line.us), percent(line.of_ceiling),
                percent(line.of_datasheet), number(line.bits), number(line.error, 2),
            )
            for line in found
        ),
    )  # fmt: skip


def by_case(setting: Setting, op: str) -> Iterator[str]:
    """One line a case: the ceiling of each promise, then everybody's microseconds."""
    found = setting.series(op)
    cases: dict[str, dict[Series, Point]] = {}
    for series, points in found.items():
        for point in points:
            cases.setdefault(point.record.case, {})[series] = point
    order = sorted(cases, key=lambda case: next(iter(cases[case].values())).tokens)
    yield from table(
        (f"{op}, µs", "tokens", *(heading for series in found for heading in _headings(series))),
        (
            (
                case, str(next(iter(cases[case].values())).tokens),
                *(cell for series in found for cell in _cells(series, cases[case].get(series))),
            )
            for case in order
        ),
    )  # fmt: skip


def _headings(series: Series) -> tuple[str, ...]:
    return (series.label,) if series.rival else (series.label, "× ceiling")


def _cells(series: Series, point: Point | None) -> tuple[str, ...]:
    us = number(point.us if point else None)
    if series.rival:
        return (us,)
    return us, number(point.us / point.ceiling_us if point and point.ceiling_us else None, 2)


def ceilings(setting: Setting) -> Iterator[str]:
    """The measured ceilings alone: the fastest of each kind."""
    best: dict[tuple[str, str | None], Record] = {}
    for record in setting.limits:
        if counts(record):
            key = (record.op, record.precision)
            best[key] = max(best.get(key, record), record, key=_rate)
    yield from table(
        ("fastest measured", "case", "µs", "rate"),
        (
            (" ".join(filter(None, key)), record.case, number(record.median_us), _rate_words(record))
            for key, record in best.items()
        ),
        left=2,
    )


def _rate(record: Record) -> float:
    return (record.flops or record.bytes) / (record.median_us or 1)


def _rate_words(record: Record) -> str:
    return f"{_rate(record) / 1e6:.3g} {'TFLOP/s' if record.flops else 'TB/s'}"


def sol_scores(setting: Setting) -> Iterator[str]:
    """Our SOL scores, each with its T_base and T_sol; nothing where there is none."""
    found = [(op, score) for op in SUITES for score in scores(setting, op)]
    if found:
        yield from table(
            ("SOL score (this device)", "cases", "T, µs", "T_base, µs", "T_sol, µs", "score"),
            (
                (f"{op}: {s.series.label}", str(s.cases), *(number(x) for x in (s.us, s.base_us, s.sol_us)),
                 number(s.score, 2))
                for op, s in found
            ),
        )  # fmt: skip


def predictions(setting: Setting) -> Iterator[str]:
    """What a device might do that was not measured, said to be that."""
    for op in SUITES:
        found = predict(setting, op)
        if found is not None:
            yield (
                f"Prediction, never measured: {op} on an {found.sheet.name} between {found.fast_us:.1f} and "
                f"{found.slow_us:.1f} µs ({found.basis})."
            )


def published_best() -> Iterator[str]:
    """The fastest published record of each suite, with its label."""
    for op, what in published().items():
        best = what.best
        share = f"{percent(limit_us(op, what.sheet) / best.us)} of its own datasheet limit"
        yield (
            f"Published, {op}: {best.us:.1f} µs, {what.statistic}, on {what.device} ({best.implementation}, "
            f"{best.observed}; {what.source}); {share}; {what.trust}."
        )


def document(found: Sequence[Setting], *, cases: bool = True) -> str:
    """All tables of these settings; `cases`: also the lines by case."""
    blocks: list[str] = []
    for setting in found:
        blocks.append(f"**{setting.device}, {setting.protocol}**")
        shown = [op for op in SUITES if setting.of(op)]
        for op in shown:
            blocks.append("\n".join(summary(setting, op)))
            if cases:
                blocks.append("\n".join(by_case(setting, op)))
        if not shown:
            blocks.append("\n".join(ceilings(setting)))
        blocks.append(made(setting, setting.records) + ".")
        blocks += ["\n".join(sol_scores(setting)), *predictions(setting)]
    return "\n\n".join(block for block in blocks if block) + "\n"
