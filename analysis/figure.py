"""Draw one figure from records: `python analysis/figure.py NAME [RECORDS…] [-o DIR]`.

Without RECORDS: from those published in analysis/results, into analysis/figures.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ropegrad.report.figures import FIGURES, draw, stem
from ropegrad.report.write import choose, load, write_pictures

ROOT = Path(__file__).resolve().parent.parent


def published(root: Path = ROOT) -> list[Path]:
    """Files of a device's times in analysis/results, its limits first: what was timed again later counts."""
    files = (root / "analysis" / "results").glob("*.jsonl")
    others = ("campaign", "plain-kernels")  # not of the suites
    return sorted(
        (file for file in files if not file.stem.startswith(others) and not file.stem.endswith("-again")),
        key=lambda file: (not file.stem.startswith("limits-"), file.name),
    )


def main(name: str, arguments: Sequence[str]) -> None:
    """Draw it for each device that has such a figure, and say where."""
    parser = argparse.ArgumentParser(description=f"Draw the figure {name} from records.")
    parser.add_argument("records", nargs="*", type=Path, help="default: those in analysis/results")
    parser.add_argument("-o", "--out", type=Path, default=ROOT / "analysis" / "figures")
    given = parser.parse_args(arguments)
    command = shlex.join(["python", f"analysis/{name}.py", *arguments])
    given.out.mkdir(parents=True, exist_ok=True)
    for setting in choose(load(given.records or published()), None)[1]:
        drawn = draw(setting, name, command)
        if drawn is None:
            print(f"{setting.device}: the records do not make this figure")
            continue
        for path in write_pictures(drawn, given.out, stem(setting.device)):
            print(path)


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in FIGURES:
        raise SystemExit(f"name a figure: {', '.join(FIGURES)}")
    main(sys.argv[1], sys.argv[2:])
