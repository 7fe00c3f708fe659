"""analysis/fuzz.py on the tensor backend, without a GPU: its problems are judged, and a wrong one is seen."""

import json
import runpy
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import shim
from conftest import need, skip

if shim.why_not() is not None:
    skip(shim.why_not())
need("cupy", "compile")

import tensor_on_cpu  # noqa: E402

from ropegrad.backends import qkv_workspace  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def fuzz(monkeypatch):
    """The script's functions; its backend runs on the CPU."""
    found = runpy.run_path(str(ROOT / "analysis" / "fuzz.py"))
    held = found["narrow_survey"].__globals__

    def run_backend(case, backend, namespace, into):
        assert (backend, namespace) == ("cupy_tensor", "cupy")
        return tensor_on_cpu.run(case, tensor_on_cpu.Launching(into=into, widest=1))

    held["run_backend"] = run_backend
    monkeypatch.setattr(qkv_workspace, "LEAST", qkv_workspace.LEAST)  # the script sets it
    return SimpleNamespace(held=held, **found)


@pytest.mark.parametrize("promise", ["highest, two terms", "medium"])
def test_problems_of_one_form_are_judged_at_its_promise(fuzz, promise):
    row = fuzz.narrow_survey(promise, fuzz.FORMS[0], 30, 1)
    assert row["examples"] == 30
    assert {spec.precision for spec in row["specs"]} == {promise.partition(",")[0]}
    assert {(spec.rope.dtype, spec.rope.accumulate) for spec in row["specs"]} == {("float32", False)}
    assert 0 < max(row["worst_error_over_bound"]["cupy_tensor"].values()) <= 1


def test_a_wrong_gradient_raises(fuzz):
    right = fuzz.held["run_backend"]

    def wrong(case, **words):
        with np.errstate(all="ignore"):
            return {name: x * x.dtype.type(1.02) for name, x in right(case, **words).items()}

    fuzz.held["run_backend"] = wrong
    with pytest.raises(AssertionError, match="wrong value"):
        fuzz.narrow_survey("high", fuzz.FORMS[0], 10, 1)


def test_every_promise_and_form_in_one_file(fuzz, tmp_path, capsys, monkeypatch):
    asked = []

    def row(promise, form, examples, number):
        asked.append((promise, form, examples))
        return {"op": "qkv", "examples": examples, "specs": {(promise, form)}, "seed": number,
                "worst_error_over_bound": {"cupy_tensor": {"grad_q_weight": 0.5}}}  # fmt: skip

    fuzz.held["narrow_survey"] = row
    fuzz.held["ProcessPoolExecutor"] = lambda workers, mp_context: ThreadPoolExecutor(workers)
    assert fuzz.main("cupy_tensor", "161", str(tmp_path / "f.json")) == 0
    assert sorted(asked) == sorted((p, f, 6) for p, f in product(fuzz.PROMISES, fuzz.FORMS))
    assert "cupy_tensor: 192 problems of qkv, 32 specs, worst 0.5" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "f.json").read_text())) == 32
