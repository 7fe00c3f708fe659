"""The command `ropegrad`: words in, tables out; no maths."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, Literal

import cyclopts
from rich.console import Console
from rich.table import Table

import ropegrad

app = cyclopts.App(
    name="ropegrad",
    help="Exact, verified gradients of rotary position embedding and of the QKV projections before it.",
    version=ropegrad.__version__,
)


class Screen(Console):
    """A console whose reader may go: rich would end the program as if the verdict were "wrong"."""

    def on_broken_pipe(self) -> None:
        """Leave it to `main`."""
        raise BrokenPipeError


@app.command
def verify(
    *,
    suite: Literal["rope", "qkv", "all"] = "all",
    backend: str | None = None,
    quick: bool = False,
    json: Annotated[Path | None, cyclopts.Parameter(help="Also write every figure to this file.")] = None,
) -> int:
    """Prove ropegrad's own backends right here: every element of every gradient, against an exact oracle.

    Runs the named edge cases and the 16 + 16 workloads of benchmark problems 068 (rope) and 064 (qkv), on
    inputs as the benchmark draws them and as training sees them. Exit status: 0 right, 1 wrong, 2 could not
    be judged.

    Parameters
    ----------
    suite
        Which operation.
    backend
        Only this backend; default: all that can run here.
    quick
        The named edge cases only: seconds instead of minutes.
    """
    from ropegrad import terminal

    return terminal.verify(Screen(), suite, backend, quick=quick, json_file=json)


@app.command
def limits(
    *,
    json: Annotated[
        Path | None, cyclopts.Parameter(help="Write the records to this file, one a line.")
    ] = None,
    commit: str | None = None,
) -> int:
    """What no GPU time can beat: makers' datasheets, and ceilings measured on the GPU that is here.

    Measures, for each case of the rope suite, a device-to-device copy and a tuned stream kernel that reads
    twice what it writes, at the case's bytes; and matrix products at each precision. Without a GPU it shows
    the datasheets and says why nothing was measured.

    Parameters
    ----------
    commit
        Recorded as the code's commit; default: what git says.
    """
    from ropegrad.bench.terminal import show

    return show(Screen(), json_file=json, commit=commit)


@app.command
def report(
    *records: Path,
    out: Annotated[Path, cyclopts.Parameter(name=["--out", "-o"])],
    protocol: Literal["graph", "wall", "span/cupti", "span/events"] | None = None,
) -> int:
    """Figures, tables and one page (index.html, no network needed) from files of records.

    Every picture is written for light and dark backgrounds; tables.md holds the tables for a README.

    Parameters
    ----------
    records
        Files of records: one JSON line a measured case.
    out
        The folder to write into; it is made if need be.
    protocol
        Which protocol's times the figures show; default: of each device graph, else wall, else span. The
        tables show all.
    """
    from ropegrad.report.terminal import report as write

    return write(Screen(), records, out, protocol)


@app.command
def info() -> int:
    """Versions, devices, BLAS, and which backends can run here and why the others cannot."""
    from ropegrad.info import info as gather

    table = Table(show_header=False, box=None)
    for key, value in gather().items():
        lines = value.items() if isinstance(value, dict) else [(key, value)]
        for name, fact in lines:
            text = ", ".join(fact) if isinstance(fact, list) else fact
            label = name if name == key else f"{key.removesuffix('s')} {name}"
            table.add_row(label, "not installed" if text is None else str(text))
    Screen().print(table)
    return 0


def main() -> None:
    """Run the command line; exit with its status (2: it was called wrongly)."""
    try:
        status = app(sys.argv[1:], exit_on_error=False, result_action="return_value")
    except cyclopts.CycloptsError:  # it has printed what is wrong
        status = 2
    except BrokenPipeError:  # whoever read the output has gone: nothing can be said, least of all "right"
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 2
    except Exception:  # not a verdict: 1 means wrong, and only a judgement may say so
        traceback.print_exc()
        status = 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = 130
    sys.exit(status if isinstance(status, int) else 0)
