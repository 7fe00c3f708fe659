"""`ropegrad report`: from files of records to a folder with the page, the pictures and the tables."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ropegrad import records
from ropegrad.records import Record
from ropegrad.report.figures import FIGURES, Drawn, draw, stem
from ropegrad.report.page import page
from ropegrad.report.rows import Setting, settings, shown
from ropegrad.report.tables import document, published_best

PAGE, TABLES = "index.html", "tables.md"


def load(files: Sequence[Path]) -> list[Record]:
    """All records of the files. Raises ValueError that says which file is not one of records."""
    if not files:
        raise ValueError("name files of records, as `ropegrad bench --json FILE` writes them")
    found = [record for file in files for record in records.read(file)]
    if not found:
        text = "no records in {}: `ropegrad bench --json FILE` or `ropegrad limits --json FILE` writes some"
        raise ValueError(text.format(", ".join(map(str, files))))
    return found


def choose(found: Sequence[Record], protocol: str | None) -> tuple[list[Setting], list[Setting]]:
    """All settings, and those that figures are drawn of: one a device.

    Raises ValueError if no setting has the protocol that was asked for.
    """
    every = settings(found)
    if protocol is None:
        return every, shown(every)
    wanted = [setting for setting in every if setting.protocol == protocol]
    if not wanted:
        known = ", ".join(dict.fromkeys(setting.protocol for setting in every))
        raise ValueError(f"protocol must be one of {known}, got {protocol!r}")
    return every, wanted


def write_report(
    files: Sequence[Path], folder: Path, command: str, *, protocol: str | None = None
) -> list[Path]:
    """Write everything and give the paths, the page first."""
    every, drawn_of = choose(load(files), protocol)
    drawn: list[tuple[Setting, list[Drawn]]] = []
    for setting in drawn_of:
        figures = [draw(setting, name, command) for name in FIGURES]
        drawn.append((setting, [one for one in figures if one is not None]))
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / PAGE, folder / TABLES]
    _replace(written[0], page(every, drawn, command).encode())
    _replace(written[1], f"{document(every)}\n{published_best(every)}".encode())
    for setting, figures_of in drawn:
        for one in figures_of:
            written += write_pictures(one, folder, stem(setting.device))
    return written


def write_pictures(one: Drawn, folder: Path, begin: str) -> list[Path]:
    """A PNG a theme."""
    paths = []
    for theme, data in one.png.items():
        paths.append(folder / f"{begin}-{one.name}-{theme}.png")
        _replace(paths[-1], data)
    return paths


def _replace(path: Path, data: bytes) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(data)
    os.replace(part, path)
