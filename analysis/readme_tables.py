"""Write the README's tables and pictures of what was measured: `python analysis/readme_tables.py [--check]`.

Both come from the records in analysis/results, and stand between two markers in the README. `--check` writes
nothing; it says what belongs to other records, with exit status 1.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from figure import ROOT, published
from PIL import Image

from ropegrad.report.figures import FIGURES, draw, stem
from ropegrad.report.marks import commands
from ropegrad.report.promises import points_of, promises, sentence
from ropegrad.report.rows import Setting
from ropegrad.report.tables import document, markdown, published_best
from ropegrad.report.write import choose, load, write_pictures

BEGIN, END = "<!-- results: begin -->\n", "<!-- results: end -->\n"
COMMAND = "python analysis/readme_tables.py"


def settings(root: Path) -> tuple[list[Setting], list[Setting]]:
    """Of the published records: all, and one a device."""
    return choose(load(published(root)), None)


def pictures(setting: Setting) -> Iterator[tuple[str, str, str]]:
    """Of each figure that the records make: its name, the digest of its records, what is said beside it."""
    for name, (_, describe) in FIGURES.items():
        about = describe(setting)
        if about is not None:
            made = ", ".join(f"`{command}`" for command in commands(about.records))
            said = f"{about.words.title}: records `{about.digest}` by {made}, drawn by `{COMMAND}`."
            yield name, about.digest, said


def block(every: list[Setting], found: list[Setting]) -> str:
    """What stands between the markers."""
    parts = []
    for setting in found:
        parts.append(document([setting], cases=False))
        sides = [one for one in every if one.device == setting.device and one.sheet and points_of(one)]
        if sides:
            parts.append(f"{markdown(promises(sides))}\n\n{sentence(sides)}\n")
        for name, _, said in pictures(setting):
            path = f"analysis/figures/{stem(setting.device)}-{name}"
            parts.append(
                f'<picture><source media="(prefers-color-scheme: dark)" srcset="{path}-dark.png">'
                f'<img alt="{said.partition(":")[0]}, {setting.device}" src="{path}-light.png"></picture>\n\n'
                f"{said}\n"
            )
    return "\n".join([*parts, published_best(found)]).rstrip() + "\n"


def parts(readme: str) -> tuple[str, str, str]:
    """Before, between and after the markers."""
    before, _, rest = readme.partition(BEGIN)
    between, marker, after = rest.partition(END)
    if not marker:
        raise SystemExit(f"README.md lacks the markers {BEGIN.strip()} and {END.strip()}")
    return before, between, after


def faults(root: Path = ROOT) -> list[str]:
    """What in the README and its pictures does not belong to the records."""
    every, found = settings(root)
    said = []
    if parts((root / "README.md").read_text("utf-8"))[1] != block(every, found):
        said.append("README.md: tables or captions are those of other records")
    for setting in found:
        for name, right, _ in pictures(setting):
            for theme in ("light", "dark"):
                path = root / "analysis" / "figures" / f"{stem(setting.device)}-{name}-{theme}.png"
                if not path.exists():
                    said.append(f"{path.name}: missing")
                elif _digest(path) != right:
                    said.append(f"{path.name}: shows the records {_digest(path)}, not {right}")
    return said


def _digest(path: Path) -> str | None:
    with Image.open(path) as picture:
        return picture.info.get("Records")


def write(root: Path = ROOT) -> None:
    """Both anew."""
    readme = root / "README.md"
    before, _, after = parts(readme.read_text("utf-8"))
    every, found = settings(root)
    folder = root / "analysis" / "figures"
    folder.mkdir(exist_ok=True)
    for path in folder.glob("*.png"):
        path.unlink()
    for setting in found:
        for name, _, _ in pictures(setting):
            drawn = draw(setting, name, COMMAND)
            assert drawn is not None, "a figure that can be described can be drawn"
            write_pictures(drawn, folder, stem(setting.device))
    readme.write_text(before + BEGIN + block(every, found) + END + after, "utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        wrong = faults()
        print("\n".join(wrong) or "README.md and its pictures belong to the records")
        sys.exit(1 if wrong else 0)
    write()
