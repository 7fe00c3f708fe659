"""Shares of the ceilings, a row a case: our fastest backend of each precision, PyTorch beside it."""

from __future__ import annotations

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ropegrad.report.canvas import LIGHT, Words, frame, sheet
from ropegrad.report.marks import About, Marks, about, dot, legend, marks, used
from ropegrad.report.rows import Point, Series, Setting

WITHOUT_TABLES = "rope-qk: gradients of q and k alone; -bshd: tensors in the order [B, S, H, D]."
Panel = tuple[str, Series, list[Point]]


def panels(setting: Setting) -> list[Panel]:
    """Operation, our fastest contender of a precision and dtype, and its points that have a ceiling."""
    best: dict[tuple[str, str | None, str], Panel] = {}
    for op in setting.suites:
        for series, points in setting.series(op).items():
            known = [p for p in points if p.of_ceiling is not None or p.of_datasheet is not None]
            if series.rival or not known:
                continue
            key = (op, series.precision, series.dtype)
            if key not in best or _mean(known) < _mean(best[key][2]):
                best[key] = (op, series, known)
    return list(best.values())


def _mean(points: list[Point]) -> float:
    return sum(point.us for point in points) / len(points)


def rivals(setting: Setting, panel: Panel) -> dict[Series, list[Point]]:
    """Other people's points of the same cases and precision."""
    op, ours, points = panel
    cases = {point.record.case for point in points}
    found = {}
    for series, theirs in setting.series(op).items():
        if series.rival and (series.precision, series.dtype) == (ours.precision, ours.dtype):
            found[series] = [point for point in theirs if point.record.case in cases]
    return {series: points for series, points in found.items() if points}


def describe(setting: Setting) -> About | None:
    """Title and records; none if nothing of ours has a ceiling."""
    found = panels(setting)
    records = used(
        p for panel in found for points in (panel[2], *rivals(setting, panel).values()) for p in points
    )
    notes = []
    if setting.sheet is not None:
        maker = setting.sheet
        notes.append(
            f"Datasheet: the larger of bytes ÷ {maker.bandwidth / 1e12:g} TB/s and FLOPs ÷ "
            f"{maker.fp16 / 1e12:g} TFLOP/s (fp16)."
        )
    notes.append(
        "Measured ceiling: the faster of a copy and a tuned stream kernel at the case's own bytes (rope); "
        "the bare matrix products that keep the same promise (qkv: the faster of IEEE float32 and three "
        "times fp16 for highest, else of TF32 and fp16)."
    )
    if [suite for suite in setting.suites if suite.startswith("rope-qk")]:
        notes.append(WITHOUT_TABLES)
    return about("Share of the ceiling, by case", setting, records, notes)


def draw(setting: Setting, words: Words) -> Figure:
    """A panel an operation and precision."""
    found = panels(setting)
    known, columns = marks(setting), min(2, len(found))
    rows = -(-len(found) // columns)
    longest = max(len(points) for _, _, points in found)
    tall = 0.3 + 0.235 * longest
    figure, axes = sheet(rows, columns, rows * tall + (rows - 1) * 0.85)
    for spare in axes[len(found) :]:
        spare.set_visible(False)
    beside: list[Point] = []
    for place, panel in zip(axes, found, strict=False):
        _panel(place, setting, panel, known, longest)
        beside += [point for points in rivals(setting, panel).values() for point in points]
    measured: Artist = Patch(facecolor=LIGHT.series[0], alpha=0.5, label="ropegrad, of the measured ceiling")
    datasheet = Patch(facecolor="none", edgecolor=LIGHT.ink, label="ropegrad, of the datasheet")
    bars = [measured, *([datasheet] if setting.sheet else [])]
    frame(figure, words, [*bars, *legend(known, beside)], left=1.55, between=(0.62, 0.85 / tall), columns=2)
    return figure


def _panel(axes: Axes, setting: Setting, panel: Panel, known: Marks, longest: int) -> None:
    op, ours, points = panel
    order = [point.record.case for point in points]
    rows = range(len(points))
    axes.barh(
        rows, [100 * (p.of_ceiling or 0) for p in points], height=0.62, color=LIGHT.series[0], alpha=0.5
    )
    if setting.sheet is not None:
        axes.barh(
            rows, [100 * (p.of_datasheet or 0) for p in points], height=0.3, color="none",
            edgecolor=LIGHT.ink, linewidth=1,
        )  # fmt: skip
    for series, theirs in rivals(setting, panel).items():
        pairs = [(100 * p.of_ceiling, order.index(p.record.case)) for p in theirs if p.of_ceiling]
        if pairs:
            style = dot(series, known) | {"markersize": 5}
            axes.plot(*zip(*pairs, strict=True), **style)
    axes.axvline(100, color=LIGHT.ink, linewidth=1, linestyle=":")
    axes.set_yticks(rows, [case.replace("=", "") for case in order], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, max(105, axes.get_xlim()[1]))
    axes.set_ylim(longest - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.set(xlabel="% of the ceiling's speed", title=f"{op}: {ours.label}")
