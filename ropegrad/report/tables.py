"""Markdown for a README: the tables, and under each where its records come from."""

from __future__ import annotations

from collections.abc import Sequence

from ropegrad.records import Record
from ropegrad.report.grids import Grid, by_case, ceilings, percent, predictions, sol_scores, summary
from ropegrad.report.marks import commands, conditions
from ropegrad.report.published import limit_us, published
from ropegrad.report.rows import Setting, digest
from ropegrad.report.shares import WITHOUT_TABLES


def markdown(grid: Grid) -> str:
    """A table; nothing if it has no rows."""
    if not grid.rows:
        return ""
    sides = ["---" if i < grid.left else "--:" for i in range(len(grid.headings))]
    cells = ([cell.replace("|", "\\|") for cell in row] for row in (grid.headings, *grid.rows))
    head, *rows = (f"| {' | '.join(row)} |" for row in cells)
    return "\n".join([head, f"|{'|'.join(sides)}|", *rows])


AT_FP16 = (
    "The datasheet's limit of qkv is at its float16 rate, whatever the precision; the measured ceiling is "
    "that of the bare products that keep the same promise."
)


def made(setting: Setting, records: Sequence[Record]) -> str:
    """Where, when, by what: the sentence under a table or figure."""
    commits = ", ".join(f"`{commit[:10]}`" for commit in sorted({record.commit for record in records}))
    how = ", ".join(f"`{command}`" for command in commands(records))
    where = conditions(setting, records)
    return f"{where}; measured at {commits} by {how}; records `{digest(records)}`."


def document(found: Sequence[Setting], *, cases: bool = True) -> str:
    """All tables of these settings; `cases`: also the lines by case."""
    blocks = [block for setting in found for block in _setting(setting, cases=cases)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _setting(setting: Setting, *, cases: bool) -> list[str]:
    blocks, ops = [f"**{setting.device}, {setting.protocol}**"], setting.suites
    for op in ops:
        blocks.append(markdown(summary(setting, op)))
        blocks += map(markdown, by_case(setting, op)) if cases else []
    if not ops:
        blocks.append(markdown(ceilings(setting)))
    if [suite for suite in setting.suites if suite.startswith("rope-qk")]:
        blocks.append(WITHOUT_TABLES)
    if "qkv" in ops and setting.sheet:
        blocks.append(AT_FP16)
    return [*blocks, made(setting, setting.records), markdown(sol_scores(setting)), *predictions(setting)]


def published_best(found: Sequence[Setting]) -> str:
    """The fastest published record of each suite, with its label: beside ours of a GPU, not among them."""
    if not any(setting.points and setting.sheet for setting in found):
        return ""
    sentences = []
    for op, what in published().items():
        share = percent(limit_us(op, what.sheet) / what.best.us)
        sentences.append(
            f"Published, {op}: {what.best.us:.1f} µs, {what.statistic}, on {what.device} "
            f"({what.best.implementation}, {what.best.observed}; {what.source}), {share} of that device's "
            f"own datasheet limit; {what.trust}."
        )
    return "\n\n".join(sentences) + "\n"
