"""Every record as a row that can be sorted and filtered, and where the records come from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape

from ropegrad.bench.facts import OPS, contender_of, suite_of
from ropegrad.bench.run import digest as code_digest
from ropegrad.records import Record
from ropegrad.report.marks import commands
from ropegrad.report.rows import Point, Setting

HEADINGS = (
    "suite", "case", "contender", "precision", "protocol", "device", "tokens", "µs", "±", "% of ceiling",
    "% of datasheet", "bits", "error/bound", "source",
)  # fmt: skip
FILTERS = {"suite": 0, "contender": 2, "precision": 3, "protocol": 4, "device": 5}
TEXT = 6  # columns before the numbers


@dataclass(frozen=True)
class Origin:
    """What records of one run share. where: date, device, driver."""

    command: str
    commit: str
    where: tuple[str, str, str]
    versions: str


def records_table(found: Sequence[Setting]) -> Iterator[str]:
    """Controls and the table."""
    sources = _sources([record for setting in found for record in setting.records])
    yield '<h2>All records</h2><div class="filters">'
    yield '<input id="search" type="search" aria-label="search" placeholder="words to find">'
    for name, column in FILTERS.items():
        yield f'<select data-column="{column}" aria-label="{name}"><option value="">any {name}</option>'
        yield "</select>"
    yield '<span id="count" class="soft" role="status"></span></div>'
    yield '<div class="wide tall"><table id="records"><thead><tr>'
    for i, heading in enumerate(HEADINGS):
        side = ' class="n"' if i >= TEXT else ""
        yield f'<th{side}><button type="button">{escape(heading)}</button></th>'
    yield "</tr></thead><tbody>"
    for setting in found:
        points = {id(point.record): point for point in setting.every}
        for record in setting.records:
            yield _row(record, points.get(id(record)), sources)
    yield "</tbody></table></div>"


def _row(record: Record, point: Point | None, sources: dict[Origin, int]) -> str:
    name = contender_of(record) if record.op in OPS else record.kernel
    trouble = record.invalid or (None if record.passed else "wrong: no time")
    if not trouble and not _is_current(record):
        name = f"{name} (other code)"
    worst = [ratio for ratio in record.error_over_bound.values() if ratio is not None]
    bits = [bits for bits in record.effective_bits.values() if bits is not None]
    text = [
        suite_of(record) if record.op in OPS else record.op,
        record.case,
        str(name),
        record.precision or "",
        record.protocol,
        record.device,
    ]
    numbers = [
        _number(point.tokens if point else None, 0),
        f'<td class="n" data-v="">{escape(trouble)}</td>' if trouble else _number(record.median_us, 2),
        _number(record.spread_us, 2),
        _number(100 * point.of_ceiling if point and point.of_ceiling else None, 1),
        _number(100 * point.of_datasheet if point and point.of_datasheet else None, 1),
        _number(min(bits, default=None), 2),
        _number(max(worst, default=None), 3),
    ]
    source = sources[_origin(record)]
    cells = "".join(f"<td>{escape(cell)}</td>" for cell in text) + "".join(numbers)
    mark = ' class="bad"' if trouble else ""
    return (
        f'<tr{mark}>{cells}<td class="n" data-v="{source}"><a href="#source-{source}">{source}</a></td></tr>'
    )


def _number(value: float | None, places: int) -> str:
    if value is None:
        return '<td class="n" data-v=""></td>'
    return f'<td class="n" data-v="{value:.6g}">{value:,.{places}f}</td>'


@cache
def _code(backend: str) -> str | None:
    try:
        return code_digest(backend)
    except KeyError:  # a backend or target that has no digest here
        return None


def _is_current(record: Record) -> bool:
    """Whether the record was made with today's code, as far as that can be known: on GPUs."""
    elsewhere = "threads" in record.options or record.backend == "target"
    return elsewhere or _code(record.backend) in (None, record.digest)


def _origin(record: Record) -> Origin:
    versions = ", ".join(f"{name} {version}" for name, version in sorted(record.versions.items()))
    return Origin(commands([record])[0], record.commit, (record.date, record.device, record.driver), versions)


def _sources(records: Sequence[Record]) -> dict[Origin, int]:
    return {origin: i for i, origin in enumerate(dict.fromkeys(map(_origin, records)), 1)}


def provenance(records: Sequence[Record]) -> Iterator[str]:
    """What makes each record again, and with what it was made."""
    yield '<h2>Sources</h2><div class="wide"><table><thead><tr>'
    for heading in ("", "command", "commit", "date", "device", "driver", "versions"):
        yield f"<th>{heading}</th>"
    yield "</tr></thead><tbody>"
    for origin, number in _sources(records).items():
        cells = "".join(f"<td>{escape(text)}</td>" for text in (origin.commit[:10], *origin.where))
        yield (
            f'<tr id="source-{number}"><td>{number}</td>'
            f'<td class="long"><code>{escape(origin.command)}</code></td>'
            f'{cells}<td class="long">{escape(origin.versions)}</td></tr>'
        )
    yield "</tbody></table></div>"
