"""Judge a backend on thousands of random problems: python analysis/fuzz.py BACKEND [EXAMPLES] [FILE]."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ropegrad.verify.survey import SPECS, survey

SEED = 2026


def main(backend: str, examples: str = "3500", file: str = "") -> None:
    """Print, and write a JSON line an operation; a wrong gradient raises with the smallest problem."""
    rows = [survey(op, [backend], int(examples), SEED) for op in SPECS]
    if file:
        Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    worst = max(max(row["worst_error_over_bound"][backend].values()) for row in rows)
    different = sum(row["specs"] for row in rows)
    print(f"{backend}: {different} different problems, all right; worst error/bound {worst:.6f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
