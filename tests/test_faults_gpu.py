"""Planted CUDA faults: on a GPU through `ropegrad verify --arrays cupy`, on the CPU through the shim."""

import json
import sys
from pathlib import Path

import pytest
import shim
from conftest import need, skip

sys.path.insert(0, str(Path(__file__).parent / "faults"))

from cupy_faults import TARGETS
from test_cli import run

from ropegrad.backends import cupy_plain
from ropegrad.verify.battery import battery
from ropegrad.verify.domain import Domain
from ropegrad.verify.recipe import Recipe
from ropegrad.verify.runner import Here
from ropegrad.verify.target import Contract
from ropegrad.verify.trial import attempt

FILE = Path(__file__).parent / "faults" / "cupy_faults.py"
CONTIGUOUS = Domain(strides="contiguous")
RACES = ("no_barrier", "not_atomic")


@pytest.mark.parametrize("name", TARGETS)
def test_the_verdict_on_a_gpu(name, monkeypatch, capsys, tmp_path):
    need("cupy", "cuda13")
    if cupy_plain.no_gpu() is not None:
        skip(cupy_plain.no_gpu(), required=False)
    options, rules = TARGETS[name]
    report = tmp_path / "report.json"
    arguments = ("--arrays", "cupy", "--strides", "contiguous", "--json", str(report), *options)
    status = run("verify", f"{FILE}:{name}", *arguments, monkeypatch=monkeypatch)
    said = capsys.readouterr().out
    broken = {rule for rule, found in json.loads(report.read_text())["rules"].items() if found}
    assert status == bool(rules), said
    assert not rules or broken & set(rules), said
    assert rules or not broken, said


def on_cpu(name, recipes):
    """Rules that the kernel breaks through the shim."""
    if shim.why_not() is not None:
        skip(shim.why_not())
    module = __import__("cupy_faults")
    options, _ = TARGETS[name]
    runner = Here(getattr(module, name), Contract(dps="--dps" in options))
    return {fault.rule for recipe in recipes for fault in attempt(runner, recipe).faults}


@pytest.mark.parametrize("name", [name for name in TARGETS if name != "not_atomic"])
def test_the_verdict_on_the_cpu(name):
    """The same text. Blocks run one after another there: what races between them goes unseen."""
    small = [r for r in battery(Contract(), CONTIGUOUS) if r.rope.seq <= 5 and (r.rope.heads or 0) < 9][:9]
    long = Contract().spec(batch=1, heads=1, kv_heads=1, seq=4099, head_dim=4, rotary_dim=4)
    broken = on_cpu(name, [Recipe(long)] if name == "index_wraps" else small)
    rules = ("raised",) if name in RACES else TARGETS[name][1]  # the shim names the race
    assert broken & set(rules) if rules else not broken, broken
