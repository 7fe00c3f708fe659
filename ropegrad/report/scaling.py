"""Time against tokens, beside the measured ceiling."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ropegrad.bench.facts import OPS
from ropegrad.report.canvas import LIGHT, Words, frame, plain_log, sheet
from ropegrad.report.marks import About, Marks, about, dot, legend, marks, used
from ropegrad.report.rows import Point, Setting


def comparable(setting: Setting, op: str) -> list[Point]:
    """The points of the commonest numbers of heads, as others cost more or less a token.

    None unless they have at least two sizes.
    """
    points = setting.of(op)
    common = Counter(point.heads for point in points).most_common(1)
    found = [point for point in points if common and point.heads == common[0][0]]
    return found if len({point.tokens for point in found}) > 1 else []


def describe(setting: Setting) -> About | None:
    """Title and records; none where all cases have one size."""
    points = [point for op in OPS for point in comparable(setting, op)]
    notes = ["Where several cases have as many tokens, the line goes through their median."]
    return about("Time against tokens", setting, used(points), notes)


def draw(setting: Setting, words: Words) -> Figure:
    """A panel an operation."""
    found = [op for op in OPS if comparable(setting, op)]
    known = marks(setting)
    figure, axes = sheet(1, len(found), 3.1)
    for place, op in zip(axes, found, strict=True):
        _panel(place, setting, op, known)
    handles = legend(known, [point for op in found for point in comparable(setting, op)])
    handles.append(Line2D([], [], color=LIGHT.ink, linestyle="--", label="measured ceiling, each precision"))
    frame(figure, words, handles, between=(0.22, 0.4))
    return figure


def _panel(axes: Axes, setting: Setting, op: str, known: Marks) -> None:
    points = comparable(setting, op)
    for series in known:
        mine = [point for point in points if point.series == series]
        axes.plot([p.tokens for p in mine], [p.us for p in mine], **dot(series, known))
        axes.plot(*_medians([(p.tokens, p.us) for p in mine]), color=known[series][0], linewidth=1.2)
    for kind in dict.fromkeys(map(_kind, points)):
        ceilings = {(p.tokens, p.ceiling_us) for p in points if _kind(p) == kind and p.ceiling_us is not None}
        axes.plot(*_medians(sorted(ceilings)), color=LIGHT.ink, linestyle="--", linewidth=1.1)
    unit, scale = ("ms", 1e3) if max(point.us for point in points) > 1e4 else ("µs", 1)
    plain_log(axes, x=True, y=True, y_unit=scale)
    heads, kv_heads = points[0].heads
    axes.set(xlabel="tokens (batch × sequence)", ylabel=f"time, {unit}", title=f"{op}, H={heads}/{kv_heads}")


def _kind(point: Point) -> tuple[str | None, str]:
    """What a ceiling belongs to."""
    return point.series.precision, point.series.dtype


def _medians(pairs: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    by_tokens: dict[int, list[float]] = {}
    for tokens, us in pairs:
        by_tokens.setdefault(tokens, []).append(us)
    order = sorted(by_tokens)
    return order, [statistics.median(by_tokens[tokens]) for tokens in order]
