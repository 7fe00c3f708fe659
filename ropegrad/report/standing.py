"""The published records, our own, and a prediction: three places, each against its own device's limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ropegrad.bench.facts import OPS
from ropegrad.report.canvas import LIGHT, WIDTH, Words, frame, sheet
from ropegrad.report.marks import About, about, dot, marks, used
from ropegrad.report.published import Prediction, limit_us, predict, published
from ropegrad.report.rows import Setting
from ropegrad.report.summary import Line, lines
from ropegrad.suites import SUITES

LEFT, RIGHT = 2.15, 0.2  # margins, inches
SHOWN = 5  # published records by name; all are in the page's table


def ours(setting: Setting, op: str) -> list[Line]:
    """Our backends that ran the whole suite in float32 on a device with a datasheet."""
    return [
        line
        for line in lines(setting, op)
        if not line.series.rival
        and line.series.dtype == "float32"
        and line.floor_us
        and {p.record.case for p in setting.series(op)[line.series]} == set(SUITES[op]())
    ]


def describe(setting: Setting) -> About | None:
    """Title and records; none where no suite of ours is complete."""
    shown = {op: {line.series for line in ours(setting, op)} for op in OPS}
    records = used(p for op in OPS for p in setting.of(op) if p.series in shown[op])
    one = published()["rope"]
    notes = [
        f"Published: {one.device}, {one.protocol}, {one.statistic}; {one.source}, {one.last_observed} and "
        f"{published()['qkv'].last_observed}. {one.trust[0].upper()}{one.trust[1:]}.",
        "100 %: the suite's own bytes ÷ the device's bandwidth (rope), its FLOPs ÷ the device's dense fp16 "
        "rate (qkv), by datasheet. Other devices, clocks and protocols: not a ranking.",
    ]
    notes += [
        f"Prediction, {op}: {found.basis}." for op in OPS if (found := predict(setting, op)) is not None
    ]
    return about("Published records, ours, and a prediction", setting, records, notes)


def draw(setting: Setting, words: Words) -> Figure:
    """A column an operation; published, measured and predicted are places of their own."""
    found = {op: ours(setting, op) for op in OPS}
    found = {op: own for op, own in found.items() if own}
    most = max(len(own) for own in found.values())
    guesses = {op: predict(setting, op) for op in found}
    heights = [SHOWN + 1, most + 0.5, *([1.5] if any(guesses.values()) else [])]
    figure, axes = sheet(len(heights), len(found), 0.24 * sum(heights) + 0.5 * len(heights), ratios=heights)
    for column, (op, own) in enumerate(found.items()):
        mine = axes[column :: len(found)]
        _published(mine[0], op)
        _ours(mine[1], setting, own)
        if len(mine) > 2:
            _predicted(mine[2], op, guesses[op])
        for place in mine:
            place.set_xlim(0, 105)
            place.axvline(100, color=LIGHT.ink, linewidth=1, linestyle=":")
            place.tick_params(axis="y", length=0, labelsize=8)
            place.grid(axis="y", visible=False)
        mine[-1].set_xlabel(f"{op}: % of the datasheet's limit")
    frame(figure, words, left=LEFT, right=RIGHT, between=(1.0, 0.62))
    return figure


def _published(axes: Axes, op: str) -> None:
    what = published()[op]
    limit = limit_us(op, what.sheet)
    named = what.entries[:SHOWN]
    rest = what.entries[SHOWN:]
    style: dict[str, Any] = {"linestyle": "none", "marker": "d", "color": LIGHT.soft, "markersize": 5.5}
    axes.plot([100 * limit / e.us for e in named], range(len(named)), **style)
    axes.plot([100 * limit / e.us for e in rest], [SHOWN] * len(rest), **style)
    names = [f"{entry.implementation}, {entry.us:.1f} µs" for entry in named]
    _rows(axes, f"{op}, published: {what.device}, not reproduced", [*names, f"{len(rest)} slower"])


def _ours(axes: Axes, setting: Setting, own: list[Line]) -> None:
    known = marks(setting)
    for row, line in enumerate(own):
        axes.plot([100 * (line.of_datasheet or 0)], [row], **dot(line.series, known))
    _rows(
        axes,
        f"{own[0].op}, measured: {setting.device}, {setting.protocol}",
        [f"{line.series.label}, {line.us:.1f} µs" for line in own],
    )


def _predicted(axes: Axes, op: str, found: Prediction | None) -> None:
    if found is None:
        _rows(
            axes,
            f"{op}, predicted: needs the whole suite" + (" at high" if op == "qkv" else ""),
            ["no prediction"],
        )
        return
    low, high = (100 * limit_us(op, found.sheet) / us for us in (found.slow_us, found.fast_us))
    axes.add_patch(
        Rectangle(
            (low, -0.3), high - low, 0.6, fill=False, edgecolor=LIGHT.series[0], linewidth=1.4, linestyle="--"
        )
    )
    _rows(
        axes,
        f"{op}, predicted, never measured: {found.sheet.name}",
        [f"{found.fast_us:.1f} to {found.slow_us:.1f} µs"],
    )


def _rows(axes: Axes, title: str, names: Sequence[str]) -> None:
    """The title begins left of the axes, above the names."""
    grid = axes.get_gridspec()
    columns = grid.ncols if grid is not None else 1
    width = (WIDTH - LEFT - RIGHT) / (2 * columns - 1)  # between two columns is as much as one
    axes.set_title(title, x=(0.15 - LEFT) / width)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
