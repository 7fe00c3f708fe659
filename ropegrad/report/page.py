"""The page: one file without a network, with the figures as SVG and every record in a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib import resources
from string import Template

from ropegrad.report.canvas import DARK, LIGHT, Theme
from ropegrad.report.figures import Drawn
from ropegrad.report.published import limit_us, predict, published
from ropegrad.report.records_table import provenance, records_table
from ropegrad.report.rows import SUITES, Setting, digest
from ropegrad.report.summary import lines, scores
from ropegrad.report.tables import number, percent

Cell = str | float | None


def page(found: Sequence[Setting], drawn: Sequence[tuple[Setting, Sequence[Drawn]]], command: str) -> str:
    """HTML of all settings, with the figures of those that have some."""
    records = [record for setting in found for record in setting.records]
    parts = [
        f"<p>{len(records)} records, digest <code>{digest(records)}</code>, drawn by "
        f"<code>{escape(command)}</code>. Every time was checked first, in the same process, against exact "
        "gradients. Different devices and protocols are never ranked with one another.</p>"
    ]
    for setting, figures in drawn:
        parts.append(f"<h2>{escape(setting.device)}</h2>")
        parts += _summaries(setting)
        parts += [_figure(one, command) for one in figures]
        parts += _scores(setting)
        parts += _predictions(setting)
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


def grid(headings: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A small table; cells are escaped here."""
    sides = ["" if i < left else ' class="n"' for i in range(len(headings))]
    head = "".join(f"<th{side}>{escape(text)}</th>" for side, text in zip(sides, headings, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{s}>{escape(c)}</td>" for s, c in zip(sides, row, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _summaries(setting: Setting) -> Iterator[str]:
    for op in SUITES:
        found = lines(setting, op)
        if found:
            yield f"<h3>{op}, {escape(setting.protocol)}: means over the cases</h3>"
            yield grid(
                ("contender", "cases", "µs", "of the measured ceiling", "of the datasheet", "effective bits",
                 "error/bound"),
                (
                    (line.series.label, str(line.cases), number(line.us), percent(line.of_ceiling),
                     percent(line.of_datasheet), number(line.bits), number(line.error, 2))
                    for line in found
                ),
            )  # fmt: skip


def _figure(one: Drawn, command: str) -> str:
    made = "; ".join(f"<code>{escape(text)}</code>" for text in one.commands)
    label = escape(f"{one.words.title}: {one.words.subtitle}", quote=True)
    picture = one.svg.replace("<svg ", f'<svg aria-label="{label}" ', 1)
    return (
        f'<figure id="{one.name}">{picture}<figcaption>{escape(one.words.title)}. Records '
        f"<code>{one.digest}</code>, made by {made}; drawn by <code>{escape(command)}</code>.</figcaption>"
        "</figure>"
    )


def _scores(setting: Setting) -> Iterator[str]:
    found = [(op, score) for op in SUITES for score in scores(setting, op)]
    if found:
        yield "<h3>SOL score (this device)</h3>"
        yield (
            "<p>1/(1 + (T − T_sol)/(T_base − T_sol)), mean over the cases, with this device's datasheet "
            "floor as T_sol and torch.compile in a captured graph as T_base. No published percentage can be "
            "compared with it: those have another T_sol and another T_base.</p>"
        )
        yield grid(
            ("contender", "cases", "T, µs", "T_base, µs", "T_sol, µs", "SOL score (this device)"),
            (
                (f"{op}: {one.series.label}", str(one.cases), number(one.us), number(one.base_us),
                 number(one.sol_us), number(one.score, 2))
                for op, one in found
            ),
        )  # fmt: skip


def _predictions(setting: Setting) -> Iterator[str]:
    for op in SUITES:
        found = predict(setting, op)
        if found is not None:
            yield (
                f"<p><strong>Prediction, never measured:</strong> {op} on an {escape(found.sheet.name)} "
                f"between {found.fast_us:.1f} and {found.slow_us:.1f} µs ({escape(found.basis)}).</p>"
            )


def _published() -> Iterator[str]:
    yield "<h2>Published elsewhere</h2>"
    for op, what in published().items():
        limit = limit_us(op, what.sheet)
        again = what.second_environment
        yield f"<h3>{op}: {escape(what.device)}, {escape(what.trust)}</h3>"
        yield (
            f"<p>{escape(what.problem)}; {escape(what.source)}, last observed {what.last_observed}; "
            f"{escape(what.protocol)}, {escape(what.statistic)}. The score is the benchmark's, with its own "
            f"T_sol and T_base. The share is of {limit:.1f} µs, the suite's "
            f"{'bytes' if op == 'rope' else 'FLOPs'} by this device's datasheet. In a second environment: "
            f"{again.us:.1f} µs ({escape(again.implementation)}, {again.runs} runs).</p>"
        )
        yield grid(
            ("implementation", "observed", "µs", "of the datasheet's limit", "benchmark's SOL score"),
            (
                (entry.implementation, entry.observed, number(entry.us), percent(limit / entry.us),
                 f"{entry.sol_score_percent} %")
                for entry in what.entries
            ),
            left=2,
        )  # fmt: skip
