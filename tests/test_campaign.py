"""The bar that is stated in thousands: 20,000 problems, every element of every gradient inside its bound.

Writes analysis/results/campaign.jsonl, which the README quotes.
"""

import datetime
import json
import pathlib
import platform
import subprocess
from functools import partial

import numpy as np
import pytest
from conftest import need
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ropegrad
from ropegrad.verify.check import check_all
from ropegrad.verify.runners import run_backend
from ropegrad.verify.strategies import cases, qkv_specs, rope_specs

ROOT = pathlib.Path(__file__).resolve().parent.parent
CAMPAIGN = ROOT / "analysis" / "results" / "campaign.jsonl"
SPECS = {"rope": rope_specs, "qkv": qkv_specs}
BACKENDS = ("numpy_tiled", "numba_cpu", "portable")
EACH = 15_000  # drawn per operation: enough that 20,000 in all are different specs


def commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    changed = subprocess.run(
        ["git", "status", "--porcelain", "ropegrad"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() + ("+changes" if changed.stdout else "")


def run(op: str) -> dict:
    """Judge EACH problems of one operation on all backends; the counts and the worst figures."""
    seen, worst = set(), {name: {} for name in BACKENDS}
    examples = 0

    @settings(max_examples=EACH, suppress_health_check=list(HealthCheck))
    @given(case=cases(SPECS[op]()), into=st.booleans())
    def body(case, into):
        nonlocal examples
        functions = {name: partial(run_backend, backend=name, into=into) for name in BACKENDS}
        verdicts = check_all(case, functions)
        for name, verdict in verdicts.items():
            assert verdict.passed, (name, verdict.findings)
            for output, ratio in verdict.worst.items():
                worst[name][output] = max(ratio, worst[name].get(output, 0.0))
        examples += 1
        seen.add(case.spec)

    body()
    return {"op": op, "examples": examples, "specs": len(seen), "worst_error_over_bound": worst}


@pytest.mark.long
def test_twenty_thousand_problems(request):
    need("numba", "cpu")
    seed = request.config.getoption("hypothesis_seed")
    rows = []
    for op in SPECS:
        rows.append(run(op) | {
            "seed": None if seed is None else int(seed), "commit": commit(), "ropegrad": ropegrad.__version__,
            "numpy": np.__version__, "python": platform.python_version(), "machine": platform.machine(),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "command": "python3 scripts/test --long tests/test_campaign.py",
        })  # fmt: skip
    assert sum(row["specs"] for row in rows) >= 20_000, [row["specs"] for row in rows]
    CAMPAIGN.parent.mkdir(parents=True, exist_ok=True)
    CAMPAIGN.write_text("".join(json.dumps(row) + "\n" for row in rows))
