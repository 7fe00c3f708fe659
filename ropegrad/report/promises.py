"""The projections, promise by promise: everybody by graph and by span, beside the bare products."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ropegrad.records import Record
from ropegrad.report.grids import MISSING, Grid, number
from ropegrad.report.rows import Point, Series, Setting, counts, digest
from ropegrad.spec import PRECISIONS

BARE = {"highest": "fp32", "high": "fp16", "medium": "fp16"}  # cuBLAS's fastest that keeps the promise
BITS = {"high": 11.5, "medium": 8.5}  # what `verify` demands of those precisions

Times = dict[str, float]  # microseconds by case


@dataclass(frozen=True)
class Side:
    """One protocol of a device: the times of products by their precision, and of contenders."""

    name: str
    products: dict[str, Times]
    contenders: dict[Series, Times]


def side(setting: Setting) -> Side:
    """Of the suite's cases in float32; of several variants the fastest of each case."""
    products: dict[str, Times] = {}
    for record in products_of(setting):
        products.setdefault(str(record.precision), {})[record.case] = record.median_us or 0.0
    contenders: dict[Series, Times] = {}
    for point in points_of(setting):
        contenders.setdefault(point.series, {})[point.record.case] = point.us
    return Side(setting.protocol.partition("/")[0], products, contenders)


def products_of(setting: Setting) -> list[Record]:
    """The bare products of the suite's cases."""
    return [r for r in setting.records if r.op == "products" and r.spec.get("suite") == "qkv" and counts(r)]


def points_of(setting: Setting) -> list[Point]:
    """The contenders' points."""
    return [point for point in setting.of("qkv") if point.series.dtype == "float32"]


def promises(found: Sequence[Setting]) -> Grid:
    """A line a contender under each promise. found: the settings of one device, a protocol each.

    Ratios are geometric means over the cases; a rival's time is that of the fastest with the same promise.
    """
    sides = [side(setting) for setting in found]
    bits = bits_of(found)
    per_side = [f"{s.name}: {what}" for s in sides for what in ("mean, µs", "geometric mean, µs", "× bare")]
    faster = [f"× faster than the best rival, {s.name}" for s in sides]
    headings = ("qkv, by promise", "", "cases", *per_side, "effective bits", *faster)
    rows = []
    for promise in PRECISIONS:
        kept = dict.fromkeys(s for one in sides for s in one.contenders if s.precision == promise)
        if not kept:
            continue
        bare, none = [one.products.get(BARE[promise], {}) for one in sides], [MISSING] * len(sides)
        seen = number(bits.get(BARE[promise]), 2)
        rows.append((promise, f"bare products, {BARE[promise]}", *_line(bare, bare), seen, *none))
        for series in sorted(kept):
            times = [one.contenders.get(series, {}) for one in sides]
            seen = _bits(promise, bits.get(series))
            beat = none if series.rival else [number(_faster(one, series), 2) for one in sides]
            rows.append((promise, series.name, *_line(times, bare), seen, *beat))
    return Grid(headings, rows, left=2)


def bits_of(found: Sequence[Setting]) -> dict[Series | str, float]:
    """Effective bits of the worst output in the worst case, of products by their precision.

    Of a contender with several formulas the worst, whichever was the fastest.
    """
    worst: dict[Series | str, float] = {}
    for setting in found:
        seen: list[tuple[Series | str, Record]] = [(str(r.precision), r) for r in products_of(setting)]
        seen += [(point.series, point.record) for point in setting.every if point.suite == "qkv"]
        for who, record in seen:
            for bits in filter(None, record.effective_bits.values()):
                worst[who] = min(bits, worst.get(who, bits))
    return worst


def _line(times: Sequence[Times], bare: Sequence[Times]) -> Iterator[str]:
    yield str(max(map(len, times)))
    for mine, least in zip(times, bare, strict=True):
        yield number(statistics.fmean(mine.values()) if mine else None)
        yield number(statistics.geometric_mean(mine.values()) if mine else None)
        yield number(_ratio(mine, least), 2)


def _bits(promise: str, bits: float | None) -> str:
    limit = BITS.get(promise)
    return number(bits, 2) + (f" of {limit}" if bits is not None and limit and bits < limit else "")


def _faster(one: Side, ours: Series) -> float | None:
    """The fastest rival's time over ours."""
    best: Times = {}
    for series, times in one.contenders.items():
        if series.rival and series.precision == ours.precision:
            best |= {case: min(us, best.get(case, us)) for case, us in times.items()}
    mine = one.contenders.get(ours, {})
    return _ratio({case: us for case, us in best.items() if case in mine}, mine)


def _ratio(times: Times, to: Times) -> float | None:
    """None where a case lacks one of both: a mean over other cases would be compared with this one."""
    if not times or times.keys() != to.keys():
        return None
    return statistics.geometric_mean(us / to[case] for case, us in times.items())


def sentence(found: Sequence[Setting]) -> str:
    """What the columns mean, who was autotuned, and which records they are of."""
    records = [
        r for setting in found for r in (*products_of(setting), *(p.record for p in points_of(setting)))
    ]
    every = [point.record for setting in found for point in setting.every if point.suite == "qkv"]
    tuned = dict.fromkeys(record.case for record in every if "mode" in record.options)
    also = f" Autotuned by torch.compile as well: {', '.join(tuned)}." if tuned else ""
    return (
        "Every contender was checked at its promise, then all took turns. × bare: over cuBLAS's bare "
        "products; ratios are geometric means of the cases. Of several formulas each case's fastest counts. "
        f"Effective bits: the worst output of the worst case.{also} Records `{digest(records)}`."
    )
