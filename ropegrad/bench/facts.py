"""What a record is about: its suite, its dtype, and which other record is of the same thing."""

from __future__ import annotations

from typing import Any

from ropegrad.backends import BACKENDS
from ropegrad.records import Record

OPS = ("rope", "qkv")  # also the names of the suites that ask for every gradient
OWN = frozenset(backend.name for backend in BACKENDS)
# What a promise is held against: bare products that keep it, and how many of them; float32 numbers as two
# float16 terms each take three. The fastest is the ceiling.
PRODUCTS = {
    "highest": {"fp32": 1, "fp16": 3}, "high": {"tf32": 1, "fp16": 1}, "medium": {"tf32": 1, "fp16": 1},
}  # fmt: skip


def limit_us(ceiling: Record, promise: str | None) -> float:
    """Time of a copy, a stream, or as many bare products as the promise takes."""
    return (ceiling.median_us or 0.0) * PRODUCTS[promise or "highest"].get(ceiling.precision or "", 1)


def rope_spec(record: Record) -> dict[str, Any]:
    """The part of a spec that says batch, tokens and heads."""
    inner = record.spec.get("rope")
    return inner if isinstance(inner, dict) else record.spec


def dtype_of(record: Record) -> str:
    """Of q."""
    return str(rope_spec(record).get("dtype", "float32"))


def suite_of(record: Record) -> str:
    """By its spec; of a record that names none, the operation."""
    return str(record.spec.get("suite", record.op))


def contender_of(record: Record) -> str:
    """The name in its run; a ceiling is the same one whatever configuration was best."""
    if record.op not in OPS:
        return record.op
    return str(record.options.get("contender", f"{record.backend} {record.kernel}"))


def identity(record: Record) -> tuple[object, ...]:
    """Equal for two measurements of the same thing, wherever they were made."""
    return (
        record.op, suite_of(record), record.case, contender_of(record), record.precision, dtype_of(record),
        record.protocol,
    )  # fmt: skip
