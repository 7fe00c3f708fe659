"""The bar that is stated in thousands: 20,000 problems, every element of every gradient inside its bound.

Writes analysis/results/campaign.jsonl, which the README quotes.
"""

import datetime
import json
import pathlib
import platform
import subprocess

import numpy as np
import pytest
from conftest import need

import ropegrad
from ropegrad.verify.survey import SPECS, survey

ROOT = pathlib.Path(__file__).resolve().parent.parent
CAMPAIGN = ROOT / "analysis" / "results" / "campaign.jsonl"
BACKENDS = ["numpy_tiled", "numba_cpu", "portable"]
EACH = 15_000  # drawn per operation: enough that 20,000 in all are different specs


def commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    changed = subprocess.run(
        ["git", "status", "--porcelain", "ropegrad"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() + ("+changes" if changed.stdout else "")


def test_a_campaign_counts_what_it_judged():
    need("numba", "cpu")
    found = survey("rope", BACKENDS, 40, 7)
    assert found["examples"] == 40
    assert 20 < len(found["specs"]) <= 40
    assert set(found["worst_error_over_bound"]) == set(BACKENDS)
    assert all(0 < max(worst.values()) <= 1 for worst in found["worst_error_over_bound"].values())


def test_a_campaign_ends_at_a_wrong_gradient(monkeypatch):
    from ropegrad.backends import numpy_tile

    right = numpy_tile.swap
    monkeypatch.setattr(numpy_tile, "swap", lambda x, pairing, scratch: -right(x, pairing, scratch))
    with pytest.raises(AssertionError, match="wrong value"):
        survey("rope", ["numpy_tiled"], 200, 7)


@pytest.mark.long
def test_twenty_thousand_problems(request):
    need("numba", "cpu")
    seed = int(request.config.getoption("hypothesis_seed"))
    rows = []
    for op in SPECS:
        rows.append(survey(op, BACKENDS, EACH, seed) | {
            "commit": commit(), "ropegrad": ropegrad.__version__,
            "numpy": np.__version__, "python": platform.python_version(), "machine": platform.machine(),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "command": "python3 scripts/test --long tests/test_campaign.py",
        })  # fmt: skip
    for row in rows:
        row["specs"] = len(row["specs"])
    assert sum(row["specs"] for row in rows) >= 20_000, [row["specs"] for row in rows]
    CAMPAIGN.parent.mkdir(parents=True, exist_ok=True)
    CAMPAIGN.write_text("".join(json.dumps(row) + "\n" for row in rows))
