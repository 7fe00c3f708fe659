"""Figures: labels that do not touch, units, colours that can be told from the paper, and their records."""

import io
import itertools
import re

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from measured import cpu, record, suites
from PIL import Image

from ropegrad.report import figures
from ropegrad.report.canvas import DARK, LIGHT, context, spread, svg
from ropegrad.report.figures import FIGURES
from ropegrad.report.rows import digest, settings

FIGURES_OF = {
    "all": suites(),
    "rope alone": [one for one in suites() if one.op in ("rope", "copy", "stream")],
    "a CPU": list(cpu()),
    "one case": list(cpu())[:7],
}
LIMITS = [
    record("copy", "4 MiB", 1.0, backend="cuda"),
    *(
        record("gemm", "1x1", us, backend="cublas", precision=precision, flops=10**9)
        for precision, us in (("fp32", 20.0), ("tf32", 2.9), ("fp16", 2.8))
    ),
]


def drawn(setting, name):
    """The figure after it was laid out."""
    draw, describe = FIGURES[name]
    about = describe(setting)
    with context():
        figure = draw(setting, about.words)
        FigureCanvasAgg(figure).draw()
    return figure


MADE = [
    (records, name)
    for records, name in itertools.product(FIGURES_OF, FIGURES)
    if FIGURES[name][1](settings(FIGURES_OF[records])[0])
]


@pytest.fixture(scope="module", params=MADE, ids=" ".join)
def figure(request):
    records, name = request.param
    return drawn(settings(FIGURES_OF[records])[0], name)


def test_only_what_needs_a_datasheet_or_bits_is_missing_on_a_cpu():
    missing = set(itertools.product(FIGURES_OF, FIGURES)) - set(MADE)
    assert missing == {
        *itertools.product(("a CPU", "one case"), ("standing", "accuracy")), ("one case", "scaling"),
    }  # fmt: skip


def visible(figure):
    """Every text that can be seen; ticks beyond the axes' ends are not drawn."""
    ticks = {}
    for axes in (axes for axes in figure.axes if axes.get_visible()):
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in axis.get_major_ticks():
                inside = low <= tick.get_loc() <= high
                ticks |= {tick.label1: inside, tick.label2: False}
    hidden = {text for axes in figure.axes if not axes.get_visible() for text in axes.findobj(Text)}
    for text in figure.findobj(Text):
        if text.get_text() and text.get_visible() and ticks.get(text, True) and text not in hidden:
            yield text


def test_no_two_labels_touch_and_none_is_cut(figure):
    boxes = [(text.get_text(), text.get_window_extent()) for text in visible(figure)]
    assert len(boxes) > 10
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        assert not a.overlaps(b), f"{one!r} touches {other!r}"
    for text, box in boxes:
        assert box.x0 >= 0, text
        assert box.y0 >= 0, text
        assert box.x1 <= figure.bbox.x1, text
        assert box.y1 <= figure.bbox.y1, text


def test_labels_that_touch_would_be_seen(figure):
    text = next(visible(figure))
    figure.text(*figure.transFigure.inverted().transform(text.get_window_extent().p0), "planted")
    boxes = [text.get_window_extent() for text in visible(figure)]
    figure.texts[-1].remove()
    assert any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


def test_every_axis_of_numbers_has_its_unit(figure):
    units = ("µs", "ms", "%", "FLOP/s", "FLOP per byte", "bits", "tokens")
    for axes in (axes for axes in figure.axes if axes.get_visible()):
        column = [other for other in figure.axes if other.get_position().x0 == axes.get_position().x0]
        lowest = min(column, key=lambda other: other.get_position().y0)
        assert any(unit in lowest.get_xlabel() for unit in units)
        named = any(re.search("[A-Za-z]", label.get_text()) for label in axes.get_yticklabels())
        assert named or any(unit in axes.get_ylabel() for unit in units)


def test_a_device_of_which_only_ceilings_are_known_has_a_roofline_alone():
    (setting,) = settings(LIMITS)
    assert [name for name in FIGURES if FIGURES[name][1](setting)] == ["roofline"]
    texts = [text.get_text() for text in visible(drawn(setting, "roofline"))]
    assert "fp16 measured 357" in texts
    assert any("4.8 TB/s" in text for text in texts)


def test_nothing_is_drawn_of_records_without_times():
    (setting,) = settings([record("rope", "a case", None, backend="cupy_plain")])
    assert not [name for name in FIGURES if FIGURES[name][1](setting)]


def test_a_prediction_is_hollow_and_called_so():
    figure = drawn(settings(FIGURES_OF["all"])[0], "standing")
    predicted = [axes for axes in figure.axes if "predicted, never measured" in axes.get_title(loc="left")]
    assert len(predicted) == 2
    for axes in predicted:
        (bar,) = (patch for patch in axes.patches)
        assert not bar.get_fill()
    published = [axes for axes in figure.axes if "published" in axes.get_title(loc="left")]
    assert all("not reproduced" in axes.get_title(loc="left") for axes in published)
    assert not set(published) & set(predicted)


# ---- themes ------------------------------------------------------------------------------------------------


def luminance(colour):
    """Relative luminance, WCAG 2.2."""
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=lambda theme: theme.name)
def test_contrast_is_what_wcag_asks_for(theme):
    def contrast(colour):
        light, dark = sorted((luminance(colour), luminance(theme.paper)), reverse=True)
        return (light + 0.05) / (dark + 0.05)

    assert all(contrast(colour) >= 3 for colour in theme.series)  # graphics, level AA
    assert contrast(theme.soft) >= 4.5  # text, level AA
    assert contrast(theme.ink) >= 7  # text, level AAA


def test_the_dark_picture_is_the_light_one_in_the_dark_theme_s_colours():
    setting = settings(FIGURES_OF["all"])[0]
    pictures = figures.draw(setting, "accuracy", "a command").png
    light, dark = (
        np.asarray(Image.open(io.BytesIO(pictures[name])).convert("RGB")) for name in ("light", "dark")
    )
    weights = 1 << np.arange(40, -1, -8)
    pairs = np.unique(np.concatenate([light, dark], axis=-1) @ weights)
    channels = (pairs[:, None] // weights % 256).tolist()
    places = {tuple(pair[:3]): tuple(pair[3:]) for pair in channels}
    assert len(places) == len(pairs), "one colour has become two"

    def rgb(colour):
        return tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))

    shown = {name: colour for colour, name in LIGHT.variables.items() if rgb(colour) in places}
    assert {"paper", "ink", "soft", "series-0", "series-1", "series-2", "series-3"} <= set(shown)
    for colour, name in DARK.variables.items():
        if name in shown:
            assert places[rgb(shown[name])] == rgb(colour)


def test_both_themes_name_the_same_variables():
    assert list(LIGHT.variables.values()) == list(DARK.variables.values())
    assert len(set(LIGHT.variables)) == len(LIGHT.variables)


def test_a_picture_says_its_records_and_the_vector_follows_the_theme():
    setting = settings(FIGURES_OF["all"])[0]
    one = figures.draw(setting, "scaling", "a command")
    assert one.digest == digest(FIGURES["scaling"][1](setting).records)
    for data in one.png.values():
        with Image.open(io.BytesIO(data)) as picture:
            assert picture.info["Records"] == one.digest
            assert picture.info["Software"] == "a command"
            assert picture.info["Source"] == "python3 scripts/gpu --only time"
    assert one.png["light"] != one.png["dark"]
    assert not re.search(r"#[0-9a-f]{6}", one.svg)
    assert "xlink" not in one.svg
    ids, used = (
        set(re.findall(pattern, one.svg)) for pattern in (r'\bid="([^"]+)"', r'(?:href="|url\()#([^")]+)')
    )
    assert used == ids
    assert all(name.startswith("figure-") for name in ids)


def test_the_vector_is_the_same_every_time():
    setting = settings(FIGURES_OF["rope alone"])[0]
    with context():
        one, two = (svg(drawn(setting, "accuracy")) for _ in range(2))
    assert one == two


@pytest.mark.parametrize(
    ("wanted", "right"),
    [
        ([0.0, 1.0], [0.0, 1.0]),
        ([0.5, 0.5], [0.4, 0.6]),
        ([0.6, 0.5], [0.65, 0.45]),
        ([0.5, 0.5, 0.75], [0.383333, 0.583333, 0.783333]),
        ([], []),
    ],
)
def test_labels_move_apart_no_further_than_needed(wanted, right):
    assert spread(wanted, 0.2) == pytest.approx(right, abs=1e-5)
