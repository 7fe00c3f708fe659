"""Judge a backend on thousands of random problems, in several processes.

    python analysis/fuzz.py BACKEND [EXAMPLES] [FILE]

EXAMPLES are shared by the operations that the backend can run; each process draws with a seed of its own.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from ropegrad.tiles import cores
from ropegrad.verify.conformance import backends_of
from ropegrad.verify.survey import SPECS, survey

SEED = 2026


def main(backend: str, examples: str = "7000", file: str = "") -> int:
    """Print, and write a JSON line a process; a wrong gradient raises with the smallest problem."""
    ops = [op for op in SPECS if backend in backends_of(op)]
    each = max(cores() // (2 * len(ops)), 1)
    share = -(-int(examples) // (len(ops) * each))
    jobs = [(op, [backend], share, SEED + number) for op in ops for number in range(each)]
    with ProcessPoolExecutor(len(jobs), mp_context=get_context("spawn")) as pool:
        rows = list(pool.map(survey, *zip(*jobs, strict=True)))
    specs = set().union(*(row["specs"] for row in rows))
    if file:
        Path(file).write_text(json.dumps([row | {"specs": len(row["specs"])} for row in rows], indent=1))
    worst = max(max(row["worst_error_over_bound"][backend].values()) for row in rows)
    drawn = sum(row["examples"] for row in rows)
    print(f"{backend}: {drawn} problems of {' and '.join(ops)}, {len(specs)} specs, worst {worst:.6f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
