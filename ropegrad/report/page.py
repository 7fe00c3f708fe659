"""The page: one file without a network, with the figures as SVG and every record in a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from importlib import resources
from string import Template

from ropegrad.report.canvas import DARK, LIGHT, Theme
from ropegrad.report.figures import Drawn
from ropegrad.report.grids import Grid, predictions, published_records, sol_scores, summary
from ropegrad.report.published import limit_us, published
from ropegrad.report.records_table import provenance, records_table
from ropegrad.report.rows import Setting, digest


def page(found: Sequence[Setting], drawn: Sequence[tuple[Setting, Sequence[Drawn]]], command: str) -> str:
    """HTML of all settings, with the figures of those that have some."""
    records = [record for setting in found for record in setting.records]
    parts = [
        f"<p>{len(records)} records, digest <code>{digest(records)}</code>, drawn by "
        f"<code>{escape(command)}</code>. Every time was checked first, in the same process, against exact "
        "gradients. Different devices and protocols are never ranked with one another.</p>"
    ]
    for setting, figures in drawn:
        parts.append(f"<h2>{escape(setting.device)}, {escape(setting.protocol)}</h2>")
        parts += [table(summary(setting, op)) for op in setting.suites]
        parts += [_figure(one, f"{len(parts)}-{i}", command) for i, one in enumerate(figures)]
        parts += _scores(setting)
        parts += [f"<p>{escape(sentence)}</p>" for sentence in predictions(setting)]
    parts += _published()
    parts += records_table(found)
    parts += provenance(records)
    template = Template(resources.files("ropegrad.report").joinpath("page.html").read_text("utf-8"))
    return template.substitute(
        title="ropegrad: gradients of RoPE, measured",
        body="\n".join(parts),
        light=_css(LIGHT),
        dark=_css(DARK),
    )


def _css(theme: Theme) -> str:
    return " ".join(f"--{name}: {colour};" for colour, name in theme.variables.items())


def table(grid: Grid) -> str:
    """A small table; cells are escaped here."""
    sides = ["" if i < grid.left else ' class="n"' for i in range(len(grid.headings))]

    def row(cells: Sequence[str], tag: str) -> str:
        pairs = zip(sides, cells, strict=True)
        return "<tr>" + "".join(f"<{tag}{side}>{escape(cell)}</{tag}>" for side, cell in pairs) + "</tr>"

    body = "".join(row(cells, "td") for cells in grid.rows)
    head = row(grid.headings, "th")
    return f'<div class="wide"><table><thead>{head}</thead><tbody>{body}</tbody></table></div>'


def _figure(one: Drawn, number: str, command: str) -> str:
    made = "; ".join(f"<code>{escape(text)}</code>" for text in one.commands)
    label = escape(f"{one.words.title}: {one.words.subtitle}", quote=True)
    picture = one.svg.replace("figure-", f"f{number}-").replace("<svg ", f'<svg aria-label="{label}" ', 1)
    return (
        f"<figure>{picture}<figcaption>{escape(one.words.title)}. Records "
        f"<code>{one.digest}</code>, made by {made}; drawn by <code>{escape(command)}</code>.</figcaption>"
        "</figure>"
    )


def _scores(setting: Setting) -> Iterator[str]:
    grid = sol_scores(setting)
    if grid.rows:
        yield "<h3>SOL score (this device)</h3>"
        yield (
            "<p>1/(1 + (T − T_sol)/(T_base − T_sol)), mean over the cases, with this device's datasheet "
            "floor as T_sol and torch.compile in a captured graph as T_base. No published percentage can be "
            "compared with it: those have another T_sol and another T_base.</p>"
        )
        yield table(grid)


def _published() -> Iterator[str]:
    yield "<h2>Published elsewhere</h2>"
    for op, what in published().items():
        again, work = what.second_environment, "bytes" if op == "rope" else "FLOPs"
        yield f"<h3>{op}: {escape(what.device)}, {escape(what.trust)}</h3>"
        yield (
            f"<p>{escape(what.problem)}; {escape(what.source)}, last observed {what.last_observed}; "
            f"{escape(what.protocol)}, {escape(what.statistic)}. The score is the benchmark's, with its own "
            f"T_sol and T_base. The share is of {limit_us(op, what.sheet):.1f} µs, the suite's {work} by "
            f"this device's datasheet. In a second environment: {again.us:.1f} µs "
            f"({escape(again.implementation)}, {again.runs} runs).</p>"
        )
        yield table(published_records(op, what))
