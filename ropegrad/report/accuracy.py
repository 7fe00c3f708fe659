"""Error against cost: what each precision buys, in effective bits and microseconds."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ropegrad.bench.facts import OPS
from ropegrad.report.canvas import LIGHT, Words, frame, plain_log, sheet
from ropegrad.report.marks import About, Marks, about, dot, legend, marks, used
from ropegrad.report.promises import BITS
from ropegrad.report.rows import Point, Setting


def measured(setting: Setting, op: str) -> list[Point]:
    """The points whose effective bits are known."""
    return [point for point in setting.of(op) if point.bits is not None]


def describe(setting: Setting) -> About | None:
    """Title and records; none where no effective bits were measured."""
    records = used(point for op in OPS for point in measured(setting, op))
    notes = [
        "Marker: the worst output of the worst case, at the mean time of all cases; bar: from there to the "
        "best case's worst output. Effective bits: −log₂ of the root mean square of error ÷ √Σ(terms²)."
    ]
    return about("Error against cost", setting, records, notes)


def draw(setting: Setting, words: Words) -> Figure:
    """A panel an operation."""
    found = [op for op in OPS if measured(setting, op)]
    known = marks(setting)
    figure, axes = sheet(1, len(found), 2.9)
    for place, op in zip(axes, found, strict=True):
        _panel(place, setting, op, known)
    frame(
        figure,
        words,
        legend(known, [p for op in found for p in measured(setting, op)]),
        between=(0.2, 0.4),
    )
    return figure


def _panel(axes: Axes, setting: Setting, op: str, known: Marks) -> None:
    times, seen = [], []
    for series, points in setting.series(op).items():
        bits = [point.bits for point in points if point.bits is not None]
        if bits:
            times.append(sum(point.us for point in points) / len(points))
            seen += [min(bits), max(bits)]
            axes.plot([times[-1]] * 2, seen[-2:], color=known[series][0], linewidth=1.6)
            axes.plot(times[-1:], seen[-2:-1], **dot(series, known) | {"markersize": 8})
    middle, half = (min(seen) + max(seen)) / 2, max(max(seen) - min(seen), 4) / 2 + 0.8
    axes.set_ylim(middle - half, middle + half)
    axes.set_xlim(min(times) / 1.8, max(times) * 1.8)
    plain_log(axes, x=True)
    for promise, bits_promised in BITS.items():
        if op == "qkv" and bits_promised > axes.get_ylim()[0]:
            axes.axhline(bits_promised, color=LIGHT.soft, linestyle=":", linewidth=1.1)
            axes.text(
                0.99, bits_promised, f"{promise}: {bits_promised} bits",
                transform=axes.get_yaxis_transform(), ha="right", va="bottom", fontsize=8.5, color=LIGHT.soft,
            )  # fmt: skip
    cases = len({point.record.case for point in setting.of(op)})
    axes.set(xlabel="mean time, µs", ylabel="effective bits", title=f"{op}, {cases} cases")
