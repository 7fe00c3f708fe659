"""The look that all figures share: colours, a frame with title and provenance, PNG and SVG.

A figure is drawn once, in the light theme. The dark one is a change of palette.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from PIL import Image
from PIL.PngImagePlugin import PngInfo

WIDTH = 9.6  # inches; text of 10 points is legible where a page shows this at 800 pixels
DPI = 150


@dataclass(frozen=True)
class Theme:
    """Colours as hexadecimal digits. series: at least 3:1 on paper, apart to the colour-blind."""

    name: str
    paper: str
    ink: str
    soft: str
    grid: str
    series: tuple[str, ...]

    @property
    def variables(self) -> dict[str, str]:
        """Name of the CSS variable by colour."""
        named = {self.paper: "paper", self.ink: "ink", self.soft: "soft", self.grid: "grid"}
        return named | {colour: f"series-{i}" for i, colour in enumerate(self.series)}


# Blue, vermilion, green, purple, ochre, teal: Okabe and Ito's hues (2008), darker on white, lighter on black.
LIGHT = Theme(
    "light", "#fefefe", "#1b1f24", "#59626d", "#dde1e6",
    ("#0065a8", "#c44e00", "#007f5f", "#a8488b", "#8f6a00", "#4a7f96"),
)  # fmt: skip
DARK = Theme(
    "dark", "#14171c", "#eceff3", "#a3adb8", "#343b45",
    ("#5bb0f0", "#ff8a4a", "#35c79a", "#e08ac4", "#e8b93a", "#8fc3d6"),
)  # fmt: skip
Colours = npt.NDArray[np.uint8]
STAR = "* of several formulas, or with results into given arrays and into fresh ones, each case's fastest"
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "h", "<", ">", "p", "*")


@dataclass(frozen=True)
class Words:
    """What a figure says about itself, in the picture and beside it."""

    title: str
    subtitle: str
    provenance: str
    notes: Sequence[str] = field(default=())


def context() -> AbstractContextManager[None]:
    """Settings under which a figure must be drawn and saved."""
    return matplotlib.rc_context({
        "font.family": "DejaVu Sans", "font.size": 9.5, "axes.titlesize": 10, "axes.titleweight": "bold",
        "axes.titlelocation": "left", "axes.labelsize": 9.5, "legend.fontsize": 9, "xtick.labelsize": 9,
        "ytick.labelsize": 9, "text.color": LIGHT.ink, "axes.labelcolor": LIGHT.ink,
        "axes.titlecolor": LIGHT.ink, "xtick.color": LIGHT.soft, "ytick.color": LIGHT.soft,
        "xtick.labelcolor": LIGHT.ink, "ytick.labelcolor": LIGHT.ink, "axes.edgecolor": LIGHT.soft,
        "axes.facecolor": LIGHT.paper, "figure.facecolor": LIGHT.paper, "savefig.facecolor": LIGHT.paper,
        "grid.color": LIGHT.grid, "axes.grid": True, "axes.axisbelow": True, "axes.spines.top": False,
        "axes.spines.right": False, "legend.frameon": False, "svg.fonttype": "path",
        "svg.hashsalt": "ropegrad", "text.hinting": "none", "axes.titley": 1.0,
    })  # fmt: skip


def sheet(
    rows: int, columns: int, height: float, ratios: Sequence[float] | None = None
) -> tuple[Figure, list[Axes]]:
    """A figure and its axes, row by row; margins come with `frame`.

    height: of all rows with what is between them, in inches; ratios: of the rows.
    """
    figure = Figure(figsize=(WIDTH, height), dpi=DPI)
    axes = figure.subplots(rows, columns, squeeze=False, height_ratios=ratios)
    return figure, list(axes.flat)


def frame(
    figure: Figure,
    words: Words,
    handles: Sequence[Artist] = (),
    *,
    columns: int = 3,
    left: float = 0.75,
    right: float = 0.2,
    between: tuple[float, float] = (0.25, 0.45),
) -> None:
    """Title above, legend and provenance below; margins in inches, space between axes in their own sizes."""
    width, inside = figure.get_size_inches()
    rows = -(-len(handles) // columns)
    starred = any(str(handle.get_label()).endswith("*") for handle in handles)
    footer = [*words.notes, *([STAR] if starred else []), words.provenance]
    bottom, top = 0.62 + 0.22 * rows + 0.17 * len(footer), 0.95
    height = inside + bottom + top
    figure.set_size_inches(width, height)
    figure.subplots_adjust(
        left=left / width, right=1 - right / width, top=1 - top / height, bottom=bottom / height,
        wspace=between[0], hspace=between[1],
    )  # fmt: skip
    figure.text(0.15 / width, 1 - 0.3 / height, words.title, fontsize=13, fontweight="bold")
    figure.text(0.15 / width, 1 - 0.54 / height, words.subtitle, fontsize=9.5, color=LIGHT.soft)
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        if not axis.get_label_text():
            axis.set_label_coords(0, 0)  # no search for a place that is free
    if handles:
        figure.legend(
            handles=handles, loc="lower center", ncols=columns, columnspacing=1.6, handlelength=2.2,
            bbox_to_anchor=(0.5, (0.1 + 0.17 * len(footer)) / height), borderpad=0, labelspacing=0.45,
        )  # fmt: skip
    for i, line in enumerate(reversed(footer)):
        figure.text(0.15 / width, (0.1 + 0.17 * i) / height, line, fontsize=7.5, color=LIGHT.soft)


def plain_log(axes: Axes, *, x: bool = False, y: bool = False, y_unit: float = 1) -> None:
    """Logarithmic axes with numbers that people read: 0.1, 2, 50, 1,000; on y as multiples of its unit."""
    for wanted, axis, name in ((x, axes.xaxis, "x"), (y, axes.yaxis, "y")):
        if wanted:
            axes.set_xscale("log") if name == "x" else axes.set_yscale("log")
            low, high = axis.get_view_interval()
            decades = len(str(int(high / low))) if low > 0 else 1
            steps = (1.0, 2.0, 5.0) if decades < 4 else (1.0,)
            axis.set_major_locator(LogLocator(base=10, subs=steps))
            axis.set_major_formatter(FuncFormatter(partial(_plain, y_unit if name == "y" else 1)))
            axis.set_minor_locator(NullLocator())


def _plain(unit: float, value: float, _: int) -> str:
    return f"{value / unit:,.10g}"


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Positions as near to the wanted ones as a gap between any two allows; same order as given."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    blocks: list[tuple[float, list[int]]] = []  # centre and members, each member a gap from the next
    for i in order:
        blocks.append((wanted[i], [i]))
        while len(blocks) > 1 and _top(blocks[-2], gap) + gap > _bottom(blocks[-1], gap):
            members = blocks[-2][1] + blocks[-1][1]
            blocks[-2:] = [(sum(wanted[j] for j in members) / len(members), members)]
    placed = dict.fromkeys(order, 0.0)
    for block in blocks:
        for place, member in enumerate(block[1]):
            placed[member] = _bottom(block, gap) + place * gap
    return [placed[i] for i in range(len(wanted))]


def _bottom(block: tuple[float, list[int]], gap: float) -> float:
    return block[0] - gap * (len(block[1]) - 1) / 2


def _top(block: tuple[float, list[int]], gap: float) -> float:
    return block[0] + gap * (len(block[1]) - 1) / 2


# ---- files -------------------------------------------------------------------------------------------------


def png(figure: Figure, facts: dict[str, str]) -> dict[str, bytes]:
    """The picture in both themes, drawn once, with facts (digest, command) as PNG text."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # type: ignore[no-untyped-call]
    pixels = np.asarray(canvas.buffer_rgba())  # type: ignore[no-untyped-call]
    picture = Image.fromarray(nearest(pixels, palette(LIGHT)), mode="P")
    text = PngInfo()
    for key, value in facts.items():
        text.add_itxt(key, value)
    found = {}
    for theme in (LIGHT, DARK):
        picture.putpalette(palette(theme).tobytes())
        buffer = io.BytesIO()
        picture.save(buffer, "png", pnginfo=text)
        found[theme.name] = buffer.getvalue()
    return found


def palette(theme: Theme) -> Colours:
    """Paper, and each of a theme's colours mixed with it in steps: all that lines and letters are made of."""
    paper, *inks = ([int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in theme.variables)
    share = np.linspace(0, 1, 255 // len(inks) + 1)[1:, None]
    mixed = [paper + share * np.subtract(ink, paper) for ink in inks]
    colours: Colours = np.rint(np.concatenate([[paper], *mixed])).astype(np.uint8)
    return colours


def nearest(pixels: Colours, colours: Colours) -> Colours:
    """Of each pixel [height, width, 4], the index of the nearest colour [n, 3]."""
    packed = pixels.view(np.uint32)[..., 0]
    inked = packed != packed[0, 0]  # most of a figure is paper, and sorting it takes longest
    found, back = np.unique(packed[inked], return_inverse=True)
    found = np.append(found, packed[0, 0])
    apart = found.view(np.uint8).reshape(-1, 1, 4)[..., :3].astype(np.int32) - colours
    places: Colours = (apart**2).sum(-1).argmin(1).astype(np.uint8)
    indices = np.full(packed.shape, places[-1])
    indices[inked] = places[back]
    return indices


def svg(figure: Figure) -> str:
    """For use inside a page: no header, colours as CSS variables that a page's theme sets.

    Its few ids begin with "figure-", which a page makes its own number of.
    """
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', 'width="100%" role="img"', text, count=1)
    text = _short_ids(text.replace(' xmlns:xlink="http://www.w3.org/1999/xlink"', "").replace("xlink:", ""))
    for colour, variable in LIGHT.variables.items():
        text = text.replace(colour, f"var(--{variable})")
    text = re.sub(r"(?<![\d.])([1-9]\d*\.\d\d)\d+", r"\1", text)  # a hundredth of a point is enough
    return re.sub(r"\s*\n\s*", "\n", text)


def _short_ids(text: str) -> str:
    """Only ids that are used, and those short: each letter of a figure refers to one."""
    used = re.findall(r'(?:href="|url\()#([^")]+)', text)
    names = {name: f"figure-{i}" for i, name in enumerate(dict.fromkeys(used))}
    text = re.sub(r' id="([^"]+)"', lambda m: f' id="{names[m[1]]}"' if m[1] in names else "", text)
    return re.sub(r'(href="|url\()#([^")]+)', lambda m: f"{m[1]}#{names[m[2]]}", text)
