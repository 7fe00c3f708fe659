"""All figures by name, and one of them drawn: PNG for each theme, SVG for the page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.figure import Figure

from ropegrad.report import accuracy, roofline, scaling, shares, standing
from ropegrad.report.canvas import Words, context, png, svg
from ropegrad.report.marks import About, commands
from ropegrad.report.rows import Setting

Draw = Callable[[Setting, Words], Figure]
Describe = Callable[[Setting], About | None]  # None: there is nothing to draw
FIGURES: dict[str, tuple[Draw, Describe]] = {
    "standing": (standing.draw, standing.describe),
    "roofline": (roofline.draw, roofline.describe),
    "shares": (shares.draw, shares.describe),
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
    about = describe(setting)
    if about is None:
        return None
    words, records = about.words, about.records
    facts = {
        "Title": f"{words.title}: {words.subtitle}", "Software": command,
        "Source": "; ".join(commands(records)), "Records": about.digest,
    }  # fmt: skip
    with context():
        figure = drawing(setting, words)
        pictures, vector = png(figure, facts), svg(figure)
    return Drawn(name, words, facts["Records"], tuple(commands(records)), pictures, vector)
