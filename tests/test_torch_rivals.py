"""PyTorch as a rival, without a GPU: who is timed at which promise, in whose arithmetic, compiled how."""

import multiprocessing
import os
import time
import types
from dataclasses import replace
from multiprocessing.pool import ThreadPool

import numpy as np
import pytest
from conftest import need
from test_suite import QKV, ROPE, Stand

from ropegrad.bench import ahead, rivals, torch_rivals
from ropegrad.bench.place import Choice
from ropegrad.bench.suite import time_case
from ropegrad.bench.workloads import Problem
from ropegrad.spec import PRECISIONS, QkvSpec
from ropegrad.suites import SUITES
from ropegrad.verify.draws import make_case

torch = need("torch", "interop")

from ropegrad.bench.torch_formulas import FORMULAS  # noqa: E402

EVERY = ("reference", "packed")


@pytest.fixture
def compiled(monkeypatch):
    """Tensors of the CPU, on no stream; what is compiled stays as it is, and how is noted."""
    asked = []

    def compile(formula, **words):
        asked.append(words)
        return lambda *tensors: formula(*tensors)

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(torch._dynamo, "reset", lambda: None)
    monkeypatch.setattr(
        torch_rivals, "tensors", lambda inputs: [torch.from_numpy(np.array(x)) for x in inputs.values()]
    )
    monkeypatch.setattr(torch_rivals, "on_cupys_stream", lambda run, given: lambda: run(*given))
    return asked


def test_every_formula_at_every_promise_and_each_judged_at_its_own(compiled):
    everybody = [*torch_rivals.contenders(QKV, PRECISIONS)]
    found = time_case(Stand(), Problem("qkv", "a case", QKV), everybody, ("span", "graph"), lambda what: None)
    assert all(record.passed and record.median_us for record in found), [record.note for record in found]
    assert {(r.options["contender"], r.precision, r.options["arithmetic"]) for r in found} == {
        (f"torch {how} {formula}", precision, arithmetic)
        for how in ("eager", "compile") for formula in EVERY
        for precision, arithmetic in zip(PRECISIONS, ("IEEE", "TF32", "bfloat16"), strict=True)
    }  # fmt: skip
    bits = {
        p: min(b for r in found if r.precision == p for b in r.effective_bits.values()) for p in PRECISIONS
    }
    assert bits["highest"] > 20
    assert bits["medium"] < 9
    assert compiled == [{"dynamic": False, "fullgraph": True, "mode": "default"}] * 6


def test_rope_has_no_promise_and_one_eager_formula(compiled):
    found = [(one.name, one.precision, one.options) for one in torch_rivals.contenders(ROPE, [None])]
    assert [name for name, _, _ in found] == [
        "torch eager reference", "torch compile reference", "torch compile halves", "torch compile flipped",
    ]  # fmt: skip
    assert {precision for _, precision, _ in found} == {None}
    assert found[0][2] == {"formula": "reference", "compiled": False}


@pytest.mark.parametrize(("spec", "count"), [(ROPE, 1), (QKV, 6)], ids=["rope", "qkv"])
def test_a_first_look_compiles_nothing(compiled, monkeypatch, spec, count):
    monkeypatch.setattr(rivals, "own_backends", lambda spec: [])
    found = [one for one in rivals.contenders(spec, Choice(quick=True)) if one.backend == "torch"]
    assert [one.kernel for one in found] == ["torch eager"] * count
    assert not compiled


def test_arithmetic_is_switched_for_its_own_calls_alone(compiled, monkeypatch):
    seen = []

    def spy(*tensors):
        seen.append((torch.get_float32_matmul_precision(), torch.is_autocast_enabled("cpu")))
        if seen[3:]:
            raise ArithmeticError("of course")
        return tensors

    monkeypatch.setitem(FORMULAS, "qkv", {"reference": spy})
    inputs = make_case(QKV, 1).inputs
    calls = [one.bind(inputs) for one in torch_rivals.contenders(QKV, PRECISIONS)]
    before = torch.get_float32_matmul_precision()
    for call in calls[::2]:
        call()
        assert (torch.get_float32_matmul_precision(), torch.is_autocast_enabled("cpu")) == (before, False)
    assert seen == [("highest", False), ("high", False), ("highest", True)]
    with pytest.raises(ArithmeticError):
        calls[2]()
    assert torch.get_float32_matmul_precision() == before


def test_the_largest_case_is_autotuned_packed_below_highest(compiled):
    found = {}
    for case, spec in SUITES["qkv"]().items():
        for one in torch_rivals.contenders(spec, PRECISIONS):
            if "mode" in one.options:
                found.setdefault(case, []).append((one.name, one.precision, one.options["mode"]))
    ways = [("torch compile packed autotuned", p, "max-autotune-no-cudagraphs") for p in ("high", "medium")]
    assert found == {"B=1 S=8192": ways}
    keys = [one.key for one in torch_rivals.contenders(spec, PRECISIONS)]
    assert len(set(keys)) == len(keys) == 14
    assert [words["mode"] for words in compiled].count("max-autotune-no-cudagraphs") == 4


@pytest.mark.parametrize(
    ("choice", "right"),
    [
        (Choice(), [("cupy_plain", "highest"), ("cupy_tensor", "high"), ("cupy_tensor", "medium")]),
        (Choice(precisions=("high",)), [("cupy_plain", "high"), ("cupy_tensor", "high")]),
        (Choice(("cupy_tensor",)), [("cupy_tensor", "high"), ("cupy_tensor", "medium")]),
        (Choice(("cupy_tensor",), precisions=("highest",)), [("cupy_tensor", "highest")]),
    ],
    ids=str,
)
def test_ours_are_timed_where_they_compute_otherwise(compiled, monkeypatch, choice, right):
    def cannot_run(backend, spec):
        narrow = isinstance(spec, QkvSpec) and spec.precision != "highest"
        return None if narrow or backend.name != "cupy_tensor" else "its operands are narrow"

    able = lambda spec: [n for n in ("cupy_plain", "cupy_tensor") if not cannot_run(rivals.find(n), spec)]  # noqa: E731
    monkeypatch.setattr(rivals, "cannot_run", cannot_run)
    monkeypatch.setattr(rivals, "own_backends", able)
    everybody = [*rivals.contenders(QKV, choice)]
    assert [(one.name, one.precision) for one in everybody if one.backend != "torch"] == right
    promises = {one.precision for one in everybody if one.backend == "torch"}
    assert promises == set(choice.precisions or PRECISIONS)
    refused = [one.refused for one in everybody if one.refused]
    assert refused == (["cupy_tensor cannot run this: its operands are narrow"] if "highest" in right[0][1:]
                       and right[0][0] == "cupy_tensor" else [])  # fmt: skip


# ---- compiled ahead ----------------------------------------------------------------------------------------


def test_only_what_pytorch_competes_in_is_compiled_ahead(monkeypatch):
    """In threads here, where a patched function can be seen."""
    asked, made = [], []

    def pool(workers):
        made.append(workers)
        return ThreadPool(workers)

    monkeypatch.setattr(ahead.multiprocessing, "get_context", lambda how: types.SimpleNamespace(Pool=pool))
    monkeypatch.setattr(ahead, "compile_all", asked.append)
    monkeypatch.setattr(ahead, "cores", lambda: 16)
    ahead.compile_ahead([ROPE, QKV, replace(ROPE, needs=("q", "k"))])
    assert sorted(asked, key=repr) == sorted([ROPE, QKV], key=repr)
    ahead.compile_ahead([replace(ROPE, needs=("q", "k"))])
    assert made == [2]


def slow(spec):
    time.sleep(60)


def dies(spec):
    os._exit(1)


def raises(spec):
    raise ArithmeticError("of course")


@pytest.mark.parametrize("failing", [slow, dies, raises])
def test_what_hangs_dies_or_raises_ahead_holds_nothing_up(monkeypatch, failing):
    monkeypatch.setattr(ahead, "compile_all", failing)
    monkeypatch.setattr(ahead, "LIMIT", 8)
    before = time.monotonic()
    ahead.compile_ahead([QKV])
    assert time.monotonic() - before < 40
    assert not multiprocessing.active_children()


def test_all_but_the_autotuned_are_compiled_ahead_and_a_failure_is_left_to_the_run(compiled, monkeypatch):
    """Under the arithmetic that the run compiles with: guards would compile it again otherwise."""
    import torch._inductor.config as config

    seen = []

    def broken(*tensors):
        raise ArithmeticError("of course")

    def spy(*tensors):
        seen.append((torch.get_float32_matmul_precision(), torch.is_autocast_enabled("cpu")))
        return tensors

    ones = types.SimpleNamespace(ones=lambda shape, dtype: np.ones(shape, dtype))
    monkeypatch.setitem(__import__("sys").modules, "cupy", ones)
    monkeypatch.setattr(rivals, "own_backends", lambda spec: [])
    monkeypatch.setitem(FORMULAS, "qkv", {"reference": broken, "packed": spy})
    for name in ("compile_threads", "autotune_local_cache"):
        monkeypatch.setattr(config, name, getattr(config, name))
    spec = SUITES["qkv"]()["B=2 S=128"]
    assert ahead.compile_all(spec) == 3
    assert seen == [("highest", False), ("high", False), ("highest", True)]
    assert (config.compile_threads, config.autotune_local_cache) == (1, False)
    shapes = [tuple(x.shape) for x in make_case(spec, 1).inputs.values()]
    received = []
    monkeypatch.setitem(FORMULAS, "qkv", {"packed": lambda *given: received.append([*map(np.shape, given)])})
    ahead.compile_all(spec)
    assert received[0] == shapes
