"""What `ropegrad report` says on the screen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ropegrad import records
from ropegrad.records import command
from ropegrad.report.write import write_report


def report(console: Console, files: Sequence[Path], folder: Path, protocol: str | None) -> int:
    """Exit status 0, or 2 where the files cannot be read or the folder not be written."""
    try:
        others = [path for path in files if len(files) > 1 and records.is_other(path)]
        for path in others:
            console.print(f"{path} holds no records of times: left out", highlight=False, markup=False)
        files = [path for path in files if path not in others]
        with console.status("drawing"):
            written = write_report(files, folder, command(), protocol=protocol)
    except ValueError as error:
        return _refuse(console, str(error))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        return _refuse(console, f"cannot write into {folder} ({reason}): name another folder with -o")
    for path in written:
        console.print(str(path), highlight=False, markup=False, soft_wrap=True)
    return 0


def _refuse(console: Console, sentence: str) -> int:
    console.print(f"ropegrad report: {sentence}", style="bold red", highlight=False, markup=False)
    return 2
