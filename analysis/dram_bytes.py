"""Bytes that the one-pass RoPE kernel reads and writes in DRAM, by Nsight Compute, beside the model's.

The model: every input read once, every output written once. What is written may still be in L2 when the
kernel ends, so only the reads are judged: exit status 1 if they are more than 2 % off. Needs a GPU with CuPy
and ncu.

    python analysis/dram_bytes.py [FILE]
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import cupy

import ropegrad as rg
from ropegrad.backends.rope_instance import ENTRY
from ropegrad.bench import device as devices
from ropegrad.cost import rope_cost
from ropegrad.spec import RopeSpec
from ropegrad.suites import rope_suite
from ropegrad.verify.draws import input_shapes

CASES = ("B=16 S=128 H=32/8", "B=1 S=1024 H=64/8", "B=1 S=2053 H=32/8", "B=4 S=1571 H=32/8")
METRICS = {"dram__bytes_read.sum": "read", "dram__bytes_write.sum": "written"}
ALLOWED = 0.02


def specs() -> dict[str, RopeSpec]:
    """The suite's cases that are large enough to be read from DRAM in whole pages."""
    suite = rope_suite()
    return {name: replace(suite[name], namespace="cupy") for name in CASES}


def launch() -> None:
    """One call for each case."""
    random = cupy.random.default_rng(2026)
    for spec in specs().values():
        shapes = input_shapes(spec).items()
        inputs = {name: random.standard_normal(shape, dtype=cupy.float32) for name, (shape, _) in shapes}
        rg.rope_backward(**inputs, backend="cupy_fused")
    cupy.cuda.Device().synchronize()


def counted() -> list[dict[str, float]]:
    """Bytes by launch, in order."""
    profiler = [
        "ncu",
        "--csv",
        "--print-units",
        "base",
        "--kernel-name",
        ENTRY,
        "--metrics",
        ",".join(METRICS),
    ]
    command = [*profiler, sys.executable, __file__, "--launch"]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    lines = [line for line in said.splitlines() if line.startswith('"')]
    launches: dict[str, dict[str, float]] = {}
    for row in csv.DictReader(lines):
        value = float(row["Metric Value"].replace(",", ""))
        launches.setdefault(row["ID"], {})[METRICS[row["Metric Name"]]] = value
    return list(launches.values())


def main(file: str = "") -> int:
    """Print a line a case, and write JSON."""
    found, worst = [], 0.0
    for (name, spec), seen in zip(specs().items(), counted(), strict=True):
        cost = rope_cost(spec)
        off = seen["read"] / cost.read - 1
        worst = max(worst, abs(off))
        found.append({
            "case": name, "device": devices.current().name, "read": seen["read"], "model_read": cost.read,
            "written": seen["written"], "model_written": cost.written,
        })  # fmt: skip
        print(
            f"{name}: {seen['read'] / 1e6:.2f} MB read, model {cost.read / 1e6:.2f}: {off:+.2%}", flush=True
        )
    if file:
        Path(file).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(worst > ALLOWED)


if __name__ == "__main__":
    if sys.argv[1:] == ["--launch"]:
        launch()
    else:
        sys.exit(main(*sys.argv[1:]))
