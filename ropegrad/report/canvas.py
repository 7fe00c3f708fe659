"""The look that all figures share: two themes, a frame with title and provenance, PNG and SVG."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import matplotlib
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
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "h")


@dataclass(frozen=True)
class Words:
    """What a figure says about itself, in the picture and beside it."""

    title: str
    subtitle: str
    provenance: str
    notes: Sequence[str] = field(default=())


def context(theme: Theme) -> AbstractContextManager[None]:
    """Settings under which a figure must be drawn and saved."""
    return matplotlib.rc_context({
        "font.family": "DejaVu Sans", "font.size": 9.5, "axes.titlesize": 10, "axes.titleweight": "bold",
        "axes.titlelocation": "left", "axes.labelsize": 9.5, "legend.fontsize": 9, "xtick.labelsize": 9,
        "ytick.labelsize": 9, "text.color": theme.ink, "axes.labelcolor": theme.ink,
        "axes.titlecolor": theme.ink, "xtick.color": theme.soft, "ytick.color": theme.soft,
        "xtick.labelcolor": theme.ink, "ytick.labelcolor": theme.ink, "axes.edgecolor": theme.soft,
        "axes.facecolor": theme.paper, "figure.facecolor": theme.paper, "savefig.facecolor": theme.paper,
        "grid.color": theme.grid, "axes.grid": True, "axes.axisbelow": True, "axes.spines.top": False,
        "axes.spines.right": False, "legend.frameon": False, "svg.fonttype": "path",
        "svg.hashsalt": "ropegrad",
    })  # fmt: skip


def sheet(
    rows: int, columns: int, height: float, ratios: Sequence[float] | None = None
) -> tuple[Figure, list[Axes]]:
    """A figure and its axes, row by row; margins come with `frame`. ratios: of the rows' heights."""
    figure = Figure(figsize=(WIDTH, height), dpi=DPI)
    axes = figure.subplots(rows, columns, squeeze=False, height_ratios=ratios)
    return figure, list(axes.flat)


def frame(
    figure: Figure,
    words: Words,
    theme: Theme,
    handles: Sequence[Artist] = (),
    *,
    columns: int = 3,
    left: float = 0.75,
    right: float = 0.2,
    between: tuple[float, float] = (0.25, 0.45),
) -> None:
    """Title above, legend and provenance below; margins in inches, space between axes in their own sizes."""
    width, height = figure.get_size_inches()
    rows = -(-len(handles) // columns)
    footer = [*words.notes, words.provenance]
    bottom = 0.62 + 0.22 * rows + 0.17 * len(footer)
    figure.subplots_adjust(
        left=left / width, right=1 - right / width, top=1 - 0.95 / height, bottom=bottom / height,
        wspace=between[0], hspace=between[1],
    )  # fmt: skip
    figure.text(0.15 / width, 1 - 0.3 / height, words.title, fontsize=13, fontweight="bold")
    figure.text(0.15 / width, 1 - 0.54 / height, words.subtitle, fontsize=9.5, color=theme.soft)
    if handles:
        figure.legend(
            handles=handles, loc="lower center", ncols=columns, columnspacing=1.6, handlelength=2.2,
            bbox_to_anchor=(0.5, (0.1 + 0.17 * len(footer)) / height), borderpad=0, labelspacing=0.45,
        )  # fmt: skip
    for i, line in enumerate(reversed(footer)):
        figure.text(0.15 / width, (0.1 + 0.17 * i) / height, line, fontsize=7.5, color=theme.soft)


def plain_log(axes: Axes, *, x: bool = False, y: bool = False) -> None:
    """Logarithmic axes with numbers that people read: 0.1, 2, 50, 1,000."""
    for wanted, axis, name in ((x, axes.xaxis, "x"), (y, axes.yaxis, "y")):
        if wanted:
            axes.set_xscale("log") if name == "x" else axes.set_yscale("log")
            low, high = axis.get_view_interval()
            decades = len(str(int(high / low))) if low > 0 else 1
            steps = (1.0, 2.0, 5.0) if decades < 4 else (1.0,)
            axis.set_major_locator(LogLocator(base=10, subs=steps))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
            axis.set_minor_locator(NullLocator())


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


def png(figure: Figure, facts: dict[str, str]) -> bytes:
    """The picture, with facts (digest, command) as PNG text."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # type: ignore[no-untyped-call]
    size = canvas.get_width_height()
    drawn = bytes(canvas.buffer_rgba())  # type: ignore[no-untyped-call]
    pixels = Image.frombuffer("RGBA", size, drawn, "raw", "RGBA", 0, 1).convert("RGB")
    text = PngInfo()
    for key, value in facts.items():
        text.add_itxt(key, value)
    buffer = io.BytesIO()
    # 128 colours are more than the themes' few and their edges need, and a third of the bytes.
    pixels.quantize(128, dither=Image.Dither.NONE).save(buffer, "png", pnginfo=text)
    return buffer.getvalue()


def svg(figure: Figure, theme: Theme, name: str) -> str:
    """For use inside a page: no header, ids of its own, colours as CSS variables that a page's theme sets."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    text = re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', 'width="100%" role="img"', text, count=1)
    for colour, variable in theme.variables.items():
        text = text.replace(colour, f"var(--{variable})")
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"(?<![\d.])([1-9]\d*\.\d\d)\d+", r"\1", text)  # a hundredth of a point is enough
    return re.sub(r"\s*\n\s*", "\n", text)
