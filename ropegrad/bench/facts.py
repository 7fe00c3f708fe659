"""What a record is about: its suite, its dtype, and which other record is of the same thing."""

from __future__ import annotations

from typing import Any

from ropegrad.backends import BACKENDS
from ropegrad.records import Record

OPS = ("rope", "qkv")  # also the names of the suites that ask for every gradient
OWN = frozenset(backend.name for backend in BACKENDS)
# What a promise is held against: bare products at least as accurate. The fastest of them is the ceiling.
PRODUCTS = {"highest": ("fp32",), "high": ("tf32", "fp16"), "medium": ("tf32", "fp16")}


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
