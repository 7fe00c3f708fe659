"""Records as figures and tables show them: each beside the ceilings of its case, device and protocol."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec

from ropegrad.bench.datasheet import Datasheet, find
from ropegrad.bench.facts import OPS, OWN, PRODUCTS, dtype_of, identity, limit_us, rope_spec, suite_of
from ropegrad.records import Record

CEILINGS = ("copy", "stream", "products", "gemm")
PROTOCOLS = ("graph", "wall", "span/cupti", "span/events")  # the first that a device has makes its figures


@dataclass(frozen=True, order=True)
class Series:
    """One contender over all its cases; several variants of one are one, each case its fastest."""

    rival: bool
    name: str
    precision: str | None
    dtype: str

    @property
    def label(self) -> str:
        """For legends and tables."""
        words = [self.name, self.precision, None if self.dtype == "float32" else self.dtype]
        return ", ".join(word for word in words if word)


@dataclass(frozen=True)
class Point:
    """One record with a time that counts.

    us: its median; ceiling: the fastest measured at this case; variants: of how many this is the fastest.
    """

    record: Record
    series: Series
    us: float
    ceiling: Record | None
    sheet: Datasheet | None
    variants: int = 1

    @property
    def suite(self) -> str:
        """What it is compared within: rope and qkv, or a suite that asks for other gradients."""
        return suite_of(self.record)

    @property
    def tokens(self) -> int:
        """Of the batch."""
        spec = rope_spec(self.record)
        return int(spec["batch"]) * int(spec["seq"])

    @property
    def heads(self) -> tuple[int, int]:
        """Of q and of k."""
        spec = rope_spec(self.record)
        return int(spec["heads"] or 0), int(spec["kv_heads"] or 0)

    @property
    def floor_us(self) -> float | None:
        """The larger of bytes ÷ bandwidth and FLOPs ÷ rate, both the datasheet's."""
        if self.sheet is None:
            return None
        rate = self.sheet.rate(self.record.precision or "fp32")
        return 1e6 * max(self.record.bytes / self.sheet.bandwidth, self.record.flops / rate)

    @property
    def ceiling_us(self) -> float | None:
        """Of the measured ceiling."""
        return limit_us(self.ceiling, self.record.precision) or None if self.ceiling else None

    @property
    def of_datasheet(self) -> float | None:
        """The roofline fraction against the datasheet."""
        return self.floor_us / self.us if self.floor_us else None

    @property
    def of_ceiling(self) -> float | None:
        """The fraction of the measured ceiling's speed."""
        return self.ceiling_us / self.us if self.ceiling_us else None

    @property
    def bits(self) -> float | None:
        """Effective bits of the worst output."""
        return min((bits for bits in self.record.effective_bits.values() if bits is not None), default=None)


@dataclass(frozen=True)
class Setting:
    """One device under one protocol.

    every    a point for each record that has a time
    points   the same, but of several variants of one contender only the fastest of each case
    limits   all ceilings of the device, under any protocol
    """

    device: str
    protocol: str
    records: tuple[Record, ...]
    every: tuple[Point, ...]
    points: tuple[Point, ...]
    limits: tuple[Record, ...]

    @property
    def sheet(self) -> Datasheet | None:
        """What the device's maker says; None if no document is known."""
        return find(self.device)

    @property
    def suites(self) -> list[str]:
        """Those that it has points of, rope and qkv first."""
        return list(dict.fromkeys([*(op for op in OPS if self.of(op)), *(p.suite for p in self.points)]))

    def of(self, suite: str) -> list[Point]:
        """The points of one suite."""
        return [point for point in self.points if point.suite == suite]

    def series(self, suite: str | None = None) -> dict[Series, list[Point]]:
        """Points by contender, ours first, each from few tokens to many."""
        found: dict[Series, list[Point]] = {}
        for point in sorted(self.points, key=lambda point: (point.series.rival, point.tokens)):
            if suite in (None, point.suite):
                found.setdefault(point.series, []).append(point)
        return found


def digest(records: Iterable[Record]) -> str:
    """First 16 hexadecimal digits of SHA-256 over the records, in any order."""
    lines = sorted(msgspec.json.encode(record) for record in records)
    return hashlib.sha256(b"\n".join(lines)).hexdigest()[:16]


def settings(records: Iterable[Record]) -> list[Setting]:
    """By device as first met, then by protocol, that of the figures first."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in latest(records):
        groups.setdefault((record.device, record.protocol), []).append(record)
    devices = list(dict.fromkeys(device for device, _ in groups))
    order = sorted(groups, key=lambda key: (devices.index(key[0]), PROTOCOLS.index(key[1])))
    return [_setting(device, protocol, groups) for device, protocol in order]


def _setting(device: str, protocol: str, groups: dict[tuple[str, str], list[Record]]) -> Setting:
    group = groups[device, protocol]
    every = [
        Point(record, series_of(record), record.median_us, _ceiling(record, group), find(device))
        for record in group
        if record.op in OPS and record.median_us is not None and counts(record)
    ]
    limits = [r for (other, _), records in groups.items() if other == device for r in records]
    ceilings = tuple(record for record in limits if record.op in CEILINGS)
    return Setting(device, protocol, tuple(group), tuple(every), tuple(_fastest(every)), ceilings)


def shown(found: Sequence[Setting]) -> list[Setting]:
    """A setting a device: the first with suite records, else the first."""
    first: dict[str, Setting] = {}
    for setting in sorted(found, key=lambda setting: not setting.points):
        first.setdefault(setting.device, setting)
    return [setting for setting in found if first[setting.device] is setting]


def latest(records: Iterable[Record]) -> list[Record]:
    """Of records of the same thing, measured again, the last."""
    kept = {(record.device, identity(record)): record for record in records}
    return list(kept.values())


def series_of(record: Record) -> Series:
    """By the backend; by the kernel where that is the library and the options say which formula."""
    name = record.kernel if "formula" in record.options else record.backend
    return Series(record.backend not in OWN, name, record.precision, dtype_of(record))


def counts(record: Record) -> bool:
    """Whether the record has a time that can be true."""
    return record.median_us is not None and record.invalid is None


def _fastest(every: Sequence[Point]) -> list[Point]:
    """One point a series and case; the fastest of its variants."""
    groups: dict[tuple[Series, str, str], list[Point]] = {}
    for point in every:
        groups.setdefault((point.series, point.suite, point.record.case), []).append(point)
    return [
        replace(min(points, key=lambda point: point.us), variants=len(points)) for points in groups.values()
    ]


def _ceiling(record: Record, group: Sequence[Record]) -> Record | None:
    """rope: the faster of copy and stream at the case's bytes; qkv: the products that keep its promise."""

    def fits(other: Record) -> bool:
        if other.case != record.case or not counts(other):
            return False
        if "suite" in other.spec and suite_of(other) != suite_of(record):
            return False
        if record.op == "rope":
            return other.op in ("copy", "stream") and abs(other.bytes - record.bytes) <= 0.01 * record.bytes
        promised = PRODUCTS.get(record.precision or "highest", ())
        return other.op == "products" and other.precision in (None, *promised)

    return min((r for r in group if fits(r)), key=lambda r: limit_us(r, record.precision), default=None)
