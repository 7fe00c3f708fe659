"""Records: one JSON line a measured case, the only place that figures and published numbers come from.

A record carries no time unless what was timed was checked in the same process and found right:
the constructor refuses anything else, so neither a writer nor a reader can let one through.
"""

from __future__ import annotations

import ast
import hashlib
import math
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

SCHEMA = 1
PROTOCOLS = ("span/cupti", "span/events", "graph", "wall")


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One case under one protocol.

    op               "rope", "qkv", or what a limit measures: "copy", "stream", "gemm"
    case             the workload's name; spec and options say what it means
    precision        of matrix products: a public word, or the compute type of a limit
    protocol         how the time was read (see `ropegrad.bench.timing`): span/cupti, span/events, graph, wall
    clocks           MHz: "sm" and "memory" as NVML read them just after the samples; never set by us
    commit, digest   of the code; digest covers what decides machine code, launch and judgement
    samples_us       each sample, microseconds; median_us and spread_us (median absolute deviation) are theirs
    bytes_read, bytes_written, flops   what the case must move and compute at least
    floor_us         no true time is shorter; invalid says why a time that is shorter does not count
    error_over_bound worst error/bound of each output; at most 1 is right, null (not finite) is not
    effective_bits   of each output; null where no error was seen
    """

    schema: int = SCHEMA
    op: str
    case: str
    spec: dict[str, Any]
    options: dict[str, Any] = {}
    backend: str
    kernel: str
    protocol: str
    precision: str | None = None
    device: str
    driver: str
    clocks: dict[str, int] | None
    versions: dict[str, str]
    commit: str
    digest: str
    date: str
    command: str
    bytes_read: int
    bytes_written: int
    flops: int
    floor_us: float | None
    samples_us: list[float] = []
    median_us: float | None = None
    spread_us: float | None = None
    invalid: str | None = None
    error_over_bound: dict[str, float | None]
    effective_bits: dict[str, float | None] = {}
    note: str | None = None

    def __post_init__(self) -> None:
        if self.schema != SCHEMA:
            raise ValueError(f"schema must be {SCHEMA}, got {self.schema}")
        if self.protocol not in PROTOCOLS:
            raise ValueError(f"protocol must be one of {', '.join(PROTOCOLS)}, got {self.protocol!r}")
        for name in ("op", "case", "backend", "kernel", "device", "commit", "digest", "command"):
            if not getattr(self, name):
                raise ValueError(f"{name} must not be empty")
        if min(self.bytes_read, self.bytes_written, self.flops) < 0:
            raise ValueError("bytes and FLOPs must not be negative")
        self._judge_times()

    @property
    def passed(self) -> bool:
        """Whether a check was made and every output is within its bound (a NaN is not)."""
        ratios = self.error_over_bound.values()
        return bool(ratios) and all(ratio is not None and ratio <= 1 for ratio in ratios)

    @property
    def bytes(self) -> int:
        """All bytes: each input read once, each output written once."""
        return self.bytes_read + self.bytes_written

    def _judge_times(self) -> None:
        if not self.samples_us:
            if self.median_us is not None or self.spread_us is not None:
                raise ValueError("a median or spread needs samples_us")
            return
        if not self.passed:
            raise ValueError(f"a run whose check failed has no time: error/bound {self.error_over_bound}")
        if not all(math.isfinite(sample) and sample > 0 for sample in self.samples_us):
            raise ValueError("samples_us must be finite and positive")
        median, spread = median_and_spread(self.samples_us)
        if (self.median_us, self.spread_us) != (median, spread):
            said = f"{self.median_us} and {self.spread_us}"
            raise ValueError(f"median_us and spread_us are {said}; the samples' are {median} and {spread}")
        if self.floor_us is not None and median < self.floor_us and self.invalid is None:
            raise ValueError(f"median_us {median} is below floor_us {self.floor_us}: invalid must say so")


def median_and_spread(samples: Iterable[float]) -> tuple[float, float]:
    """The median and the median absolute deviation from it, rounded to 10⁻⁴ of the samples' unit."""
    values = list(samples)
    median = statistics.median(values)
    return round(median, 4), round(statistics.median(abs(value - median) for value in values), 4)


def write(path: Path, records: Iterable[Record]) -> None:
    """Replace the file by these records, one line each; readers never see half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(b"".join(map(_line, records)))
    os.replace(part, path)


def append(path: Path, records: Iterable[Record]) -> None:
    """Add these records at the end of the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(b"".join(map(_line, records)))


def read(path: Path) -> list[Record]:
    """All records of a file. Raises ValueError that names file, line, what is wrong there, and what to do."""
    decoder = msgspec.json.Decoder(Record)
    records = []
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(_unreadable(path, error)) from error
    for number, line in enumerate(data.splitlines(), 1):
        try:
            records.append(decoder.decode(line))
        except msgspec.MsgspecError as error:
            form = "a file of records, as `ropegrad bench --json FILE` writes it, has one in each line"
            if _is_verdict(data):
                raise ValueError(
                    f"{path} holds a verdict of `ropegrad verify` or `fuzz`, no times; {form}"
                ) from error
            raise ValueError(f"{path}:{number}: {error}; {form}") from error
    return records


def probe(*files: Path | None) -> None:
    """OSError, in a sentence, before the work where a file could not be written after it; leaves nothing."""
    for file in filter(None, files):
        if files.count(file) > 1:
            raise OSError(f"{file} cannot be written: two reports are to go there")
        if not file.parent.is_dir():
            raise OSError(f"{file} cannot be written: there is no folder {file.parent}")
        if file.is_dir():
            raise OSError(f"{file} cannot be written: it is a folder, name a file in it")
        new = not file.exists()
        try:
            file.open("ab").close()
        except OSError as error:
            raise OSError(f"{file} cannot be written: {(error.strerror or str(error)).lower()}") from None
        if new:
            file.unlink()


def is_other(path: Path) -> bool:
    """Whether a file holds JSON objects of another kind, such as a campaign's counts, in its lines."""
    try:
        with path.open("rb") as file:
            found = msgspec.json.decode(file.readline())
    except (OSError, msgspec.MsgspecError):
        return False
    return isinstance(found, dict) and not {"op", "case", "backend"} <= found.keys()


def _is_verdict(data: bytes) -> bool:
    try:
        found = msgspec.json.decode(data)
    except msgspec.MsgspecError:
        return False
    return isinstance(found, dict) and not {"verdict", "cases"}.isdisjoint(found)


def _unreadable(path: Path, error: OSError) -> str:
    """One sentence: the file and the remedy."""
    if isinstance(error, FileNotFoundError):
        return f"there is no file {path}: `ropegrad bench --json {path}` would make it"
    if isinstance(error, IsADirectoryError):
        return f"{path} is a folder: name the files of records in it, as {path / '*.jsonl'}"
    if isinstance(error, PermissionError):
        return f"{path} may not be read by this user: change its permissions or copy it"
    return f"{path} cannot be read ({error.strerror or error}): copy it to a disk that works"


def _line(record: Record) -> bytes:
    """What is not finite becomes null: JSON has no such numbers."""
    return msgspec.json.encode(record) + b"\n"


# ---- what identifies the code that was measured ------------------------------------------------------------


def digest(files: Iterable[Path]) -> str:
    """First 16 hexadecimal digits of SHA-256 over the files' code.

    Python counts as its syntax tree without docstrings: comments and formatting change nothing.
    """
    total = hashlib.sha256()
    for path in sorted(files, key=lambda path: path.name):
        text = path.read_text(encoding="utf-8")
        total.update(
            path.name.encode() + b"\0" + (_code(text) if path.suffix == ".py" else text).encode() + b"\0"
        )
    return total.hexdigest()[:16]


def _code(text: str) -> str:
    """The same under every version of Python: `ast.dump` shows fields that later versions add."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and ast.get_docstring(node) is not None
        ):
            node.body = node.body[1:]
    return _shown(tree)


def _shown(node: object) -> str:
    """A syntax tree as text, without what is empty."""
    if isinstance(node, list):
        return f"[{','.join(map(_shown, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = ((name, value) for name, value in ast.iter_fields(node) if value is not None and value != [])
    return f"{type(node).__name__}({','.join(f'{name}={_shown(value)}' for name, value in fields)})"


def commit() -> str:
    """The checkout's commit, with "+changes" if files differ from it; "unknown" outside a git checkout."""
    root = Path(__file__).resolve().parent.parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=True
        ).stdout

    try:
        return git("rev-parse", "HEAD").strip() + ("+changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def command() -> str:
    """The command line that makes this record."""
    return shlex.join(["ropegrad", *sys.argv[1:]])
