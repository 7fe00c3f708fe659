"""Which colour and marker a contender has, and the words and legends that the figures share."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from matplotlib.lines import Line2D

from ropegrad.records import Record
from ropegrad.report.canvas import LIGHT, MARKERS, Words
from ropegrad.report.rows import Point, Series, Setting, digest

Mark = tuple[str, str, str]  # colour, marker, colour inside
Marks = Mapping[Series, Mark]


def marks(setting: Setting) -> Marks:
    """A colour a contender, a marker for it at each precision; the same in every figure of a setting."""
    found = list(setting.series())
    names = list(dict.fromkeys(series.name for series in found))
    shapes = list(dict.fromkeys(_what(series) for series in found))
    return {
        series: (
            LIGHT.series[names.index(series.name) % len(LIGHT.series)],
            MARKERS[shapes.index(_what(series)) % len(MARKERS)],
            LIGHT.paper if series.rival else LIGHT.series[names.index(series.name) % len(LIGHT.series)],
        )
        for series in found
    }


def _what(series: Series) -> str:
    """The legend's words: what has no precision is as accurate as `highest`."""
    return replace(series, precision=None if series.precision == "highest" else series.precision).label


def dot(series: Series, found: Marks) -> dict[str, Any]:
    """Arguments of a marker: filled for ours, hollow for rivals."""
    colour, marker, fill = found[series]
    return {
        "linestyle": "none", "color": colour, "marker": marker, "markerfacecolor": fill, "markersize": 6,
        "markeredgewidth": 1.4,
    }  # fmt: skip


def legend(found: Marks, points: Sequence[Point]) -> list[Line2D]:
    """A handle for each contender of the points; a star where it has several variants."""
    handles: dict[str, Line2D] = {}
    shown = {point.series for point in points}
    for series in found:
        if series in shown:
            several = any(point.variants > 1 for point in points if point.series == series)
            label = _what(series) + (" *" if several else "")
            handles.setdefault(_what(series), Line2D([], [], label=label, **dot(series, found)))
    return list(handles.values())


def used(points: Iterable[Point], limits: Iterable[Record] = ()) -> list[Record]:
    """The records that a figure of these points shows, each once."""
    found: dict[int, Record] = {}
    for point in points:
        for record in (point.record, point.ceiling):
            if record is not None:
                found[id(record)] = record
    return list((found | {id(record): record for record in limits}).values())


def conditions(setting: Setting, records: Sequence[Record]) -> str:
    """Device, threads, driver, clocks, protocol."""
    clocks = next((record.clocks for record in records if record.clocks), None)
    mhz = f"SM {clocks.get('sm')} MHz, memory {clocks.get('memory')} MHz" if clocks else None
    drivers = ", ".join(sorted({record.driver for record in records}))
    threads = sorted({str(r.options["threads"]) for r in records if "threads" in r.options})
    parts = (
        setting.device, f"{', '.join(threads)} threads" if threads else None, f"driver {drivers}", mhz,
        f"protocol {setting.protocol}",
    )  # fmt: skip
    return ", ".join(part for part in parts if part)


@dataclass(frozen=True)
class About:
    """A figure before it is drawn: its words and the records it shows."""

    words: Words
    records: Sequence[Record]

    @property
    def digest(self) -> str:
        """Of the records."""
        return digest(self.records)


def about(title: str, setting: Setting, records: Sequence[Record], notes: Sequence[str]) -> About | None:
    """With the records' digest, and when and at which commit they were made; None if there are none."""
    if not records:
        return None
    commits = sorted({record.commit[:10] for record in records})
    dates = sorted({record.date for record in records})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    made = f"records {digest(records)}, measured {when} at {', '.join(commits)}"
    lines = [line for note in notes for line in textwrap.wrap(note, 150)]
    return About(Words(title, conditions(setting, records), made, lines), records)


def commands(records: Iterable[Record]) -> list[str]:
    """What makes these records again, each command once; of another machine's files the names alone."""
    return sorted({re.sub(r"(?<=[ =])/\S*/", "", record.command) for record in records})
