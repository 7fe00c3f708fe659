"""The roofline: what a case does per second against what it moves, below the ceilings of its device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ropegrad.bench.facts import OPS
from ropegrad.records import Record
from ropegrad.report.canvas import LIGHT, Words, frame, plain_log, sheet, spread
from ropegrad.report.marks import About, about, dot, legend, marks, used
from ropegrad.report.rows import Point, Setting, counts

WIDE = {"fp32": "fp32", "tf32": "TF32", "fp16": "fp16"}


class Roof(NamedTuple):
    """A ceiling: bytes/s of a slope, FLOP/s of a flat one."""

    label: str
    rate: float
    measured: bool


def memory(setting: Setting) -> Iterator[Roof]:
    """The datasheet's bandwidth and the fastest copy or stream."""
    if setting.sheet is not None:
        yield Roof(f"datasheet, {setting.sheet.bandwidth / 1e12:g} TB/s", setting.sheet.bandwidth, False)
    best = _fastest([r for r in setting.limits if r.op in ("copy", "stream")], "bytes")
    if best is not None:
        record, rate = best
        yield Roof(f"measured {record.op}, {_bandwidth(rate)} ({record.protocol})", rate, True)


def _bandwidth(rate: float) -> str:
    return f"{rate / 1e12:.2f} TB/s" if rate >= 1e12 else f"{rate / 1e9:.1f} GB/s"


def unit_of(setting: Setting) -> tuple[str, float]:
    """Of the axis and of the rates beside it: TFLOP/s where anything is that fast."""
    rates = [setting.sheet.rate("fp32")] if setting.sheet else []
    rates += [r.flops / r.median_us * 1e6 for r in setting.limits if r.flops and counts(r) and r.median_us]
    rates += [_place(point)[1] for point in _shown(setting)]
    return ("TFLOP/s", 1e12) if max(rates, default=0) >= 1e12 else ("GFLOP/s", 1e9)


def compute(setting: Setting) -> Iterator[Roof]:
    """The datasheet's rates of matrix products and the fastest measured, by precision."""
    _, scale = unit_of(setting)
    for precision, name in WIDE.items():
        if setting.sheet is not None:
            rate = setting.sheet.rate(precision)
            yield Roof(f"{name} datasheet {rate / scale:.0f}", rate, False)
        products = [
            r for r in setting.limits if r.op in ("gemm", "products") and (r.precision or "fp32") == precision
        ]
        best = _fastest(products, "flops")
        if best is not None:
            yield Roof(f"{name} measured {best[1] / scale:.3g}", best[1], True)


def _fastest(records: Sequence[Record], work: str) -> tuple[Record, float] | None:
    rates = [(r, getattr(r, work) / r.median_us * 1e6) for r in records if counts(r) and r.median_us]
    return max(rates, key=lambda pair: pair[1], default=None)


def describe(setting: Setting) -> About | None:
    """Title and records; none without a ceiling to draw."""
    some = any(memory(setting)) or any(compute(setting))
    records = used(_shown(setting), setting.limits) if some else []
    notes = ["Every input counts as read once, every output as written once. Slopes: memory."]
    if any(compute(setting)):
        notes[0] += f" Flat: dense matrix products, {unit_of(setting)[0]}."
    return about("Roofline", setting, records, notes)


def _shown(setting: Setting) -> list[Point]:
    """The suites that ask for every gradient."""
    return [point for op in OPS for point in setting.of(op)]


def draw(setting: Setting, words: Words) -> Figure:
    """Slopes, flats, and a marker a case and contender."""
    slopes, flats = list(memory(setting)), list(compute(setting))
    found = marks(setting)
    figure, [axes] = sheet(1, 1, 3.6)
    low, high = _limits(list(map(_place, _shown(setting))), slopes, flats)
    axes.set(xlim=low[:1] + high[:1], ylim=low[1:] + high[1:])
    unit, scale = unit_of(setting)
    plain_log(axes, x=True, y=True, y_unit=scale)
    axes.set(xlabel="arithmetic intensity, FLOP per byte", ylabel=unit)
    handles = _draw_slopes(axes, slopes, flats, high)
    _draw_flats(axes, slopes, flats, high)
    for point in _shown(setting):
        axes.plot(*_place(point), **dot(point.series, found))
    handles += legend(found, _shown(setting))
    frame(figure, words, handles, right=1.75 if flats else 0.3)
    return figure


Corner = tuple[float, float]


def _place(point: Point) -> Corner:
    """FLOP a byte, FLOP/s."""
    return point.record.flops / point.record.bytes, point.record.flops / point.us * 1e6


def _limits(rates: Sequence[Corner], slopes: Sequence[Roof], flats: Sequence[Roof]) -> tuple[Corner, Corner]:
    """Corners of the plot: all points, the ridges of all roofs, and some air."""
    wide = max([x for x, _ in rates] + [roof.rate / slopes[0].rate for roof in flats if slopes] + [1.0])
    highest = [roof.rate for roof in flats] or [roof.rate * wide for roof in slopes]
    top = max(highest + [y for _, y in rates])
    left = min([x for x, _ in rates] + [0.5])
    floor = min([y for _, y in rates] + [roof.rate * left for roof in slopes])
    return (left / 2, floor / 2), (wide * 4, top * 2)


def _draw_slopes(axes: Axes, slopes: Sequence[Roof], flats: Sequence[Roof], high: Corner) -> list[Line2D]:
    highest = max((roof.rate for roof in flats), default=high[1])
    handles = []
    for roof in slopes:
        style = "--" if roof.measured else "-"
        ridge = highest / roof.rate
        left = axes.get_xlim()[0]
        [line] = axes.plot(
            [left, ridge], [roof.rate * left, highest], style, color=LIGHT.ink, linewidth=1.3,
            label=f"memory: {roof.label}",
        )  # fmt: skip
        handles.append(line)
    return handles


def _draw_flats(axes: Axes, slopes: Sequence[Roof], flats: Sequence[Roof], high: Corner) -> None:
    """Their names stand right of the axes, as near as they can without touching."""
    bandwidth = max((roof.rate for roof in slopes), default=None)
    low, top = axes.get_ylim()
    decades = [math.log(roof.rate / low, top / low) for roof in flats]
    for roof, at, place in zip(flats, decades, spread(decades, 0.042), strict=True):
        start = roof.rate / bandwidth if bandwidth else axes.get_xlim()[0]
        axes.plot(
            [start, high[0]], [roof.rate] * 2, "--" if roof.measured else "-", color=LIGHT.soft,
            linewidth=1.1,
        )  # fmt: skip
        axes.plot(
            [1, 1.02], [at, place], color=LIGHT.soft, linewidth=0.8, transform=axes.transAxes, clip_on=False
        )
        axes.text(
            1.03, place, roof.label, transform=axes.transAxes, va="center", fontsize=8.5, color=LIGHT.soft
        )
