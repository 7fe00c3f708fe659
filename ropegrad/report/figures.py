"""All figures by name, and one of them drawn: PNG for each theme, SVG for the page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.figure import Figure

from ropegrad.records import Record
from ropegrad.report import accuracy, fractions, roofline, scaling, standing
from ropegrad.report.canvas import DARK, LIGHT, Theme, Words, context, png, svg
from ropegrad.report.marks import commands
from ropegrad.report.rows import Setting, digest

Draw = Callable[[Setting, Theme], Figure | None]
Describe = Callable[[Setting], tuple[Words, list[Record]]]
FIGURES: dict[str, tuple[Draw, Describe]] = {
    "standing": (standing.draw, standing.describe),
    "roofline": (roofline.draw, roofline.describe),
    "fractions": (fractions.draw, fractions.describe),
    "accuracy": (accuracy.draw, accuracy.describe),
    "scaling": (scaling.draw, scaling.describe),
}


@dataclass(frozen=True)
class Drawn:
    """A finished figure. digest and commands: of the records it shows; png: by theme."""

    name: str
    words: Words
    digest: str
    commands: tuple[str, ...]
    png: dict[str, bytes]
    svg: str


def stem(device: str) -> str:
    """A device's name as the beginning of file names."""
    return "-".join("".join(c if c.isalnum() else " " for c in device.lower()).split())


def draw(setting: Setting, name: str, command: str) -> Drawn | None:
    """The figure, or None where the records do not make one. `command` draws it again."""
    drawing, describe = FIGURES[name]
    words, records = describe(setting)
    facts = {
        "Title": f"{words.title}: {words.subtitle}", "Software": command,
        "Source": "; ".join(commands(records)), "Records": digest(records),
    }  # fmt: skip
    pictures, vector = {}, ""
    for theme in (LIGHT, DARK):
        with context(theme):
            figure = drawing(setting, theme)
            if figure is None:
                return None
            pictures[theme.name] = png(figure, facts)
            if theme is LIGHT:
                vector = svg(figure, theme, f"{stem(setting.device)}-{name}")
    return Drawn(name, words, facts["Records"], tuple(commands(records)), pictures, vector)
