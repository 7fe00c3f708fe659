"""The GPU's side of `ropegrad bench` without a GPU: cupy_plain's own kernels on the CPU, a given clock."""

import contextlib
import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import shim
from conftest import need, skip
from test_limits import RUN

from ropegrad import cli, records
from ropegrad.bench import asked, bench_terminal, on_gpu, rivals, timing, workloads
from ropegrad.bench.contender import Contender
from ropegrad.bench.place import Choice
from ropegrad.bench.products import Product
from ropegrad.bench.suite import time_case
from ropegrad.bench.workloads import Problem
from ropegrad.spec import QkvSpec, RopeSpec
from ropegrad.suites import SUITES

if shim.why_not() is not None:
    skip(shim.why_not())
need("cupy", "compile")

from cupy_on_cpu import Launching, on_cpu  # noqa: E402

ROPE = RopeSpec(batch=2, heads=4, kv_heads=2, seq=6, head_dim=16, rotary_dim=16, table_batch=2)
QKV = QkvSpec(rope=replace(ROPE, needs=()), hidden_size=24)


class Events:
    """Samples that take as long as they are said to."""

    def __init__(self, protocol):
        self.protocol, self.taken = protocol, []

    def prepare(self, call):
        return call

    def sample(self, name, call):
        call()
        self.taken.append((name, 50.0 + len(self.taken)))

    def finish(self):
        return self.taken


def measure(contenders, protocol, *, l2, samples):
    reader = Events("span/events" if protocol == "span" else protocol)
    taken = timing.rounds(reader, contenders, samples, lambda: None, lambda: None)
    return {name: timing.Timing(reader.protocol, times, "by the test") for name, times in taken.items()}


def apart(x, namespace):
    """A copy that may be written."""
    made = shim.empty(x.shape, x.dtype)
    made[...] = x
    return made


@pytest.fixture
def gpu(monkeypatch):
    """CuPy's arrays are NumPy's, kernels run on the CPU, time is given."""
    ceiling = SimpleNamespace(contenders={"copy": [lambda: None]}, records=lambda *_: ())
    monkeypatch.setattr(on_gpu, "to_namespace", apart)
    monkeypatch.setattr(on_gpu, "measure", measure)
    monkeypatch.setattr(on_gpu.Gpu, "ceiling", lambda *_: ceiling)
    monkeypatch.setattr(on_gpu, "here", lambda commit, command: replace(RUN, command=command or "ropegrad"))
    monkeypatch.setattr(rivals, "own_backends", lambda spec: ["numpy_tiled", "cupy_plain"])
    monkeypatch.setattr(rivals, "cannot_run", lambda backend, spec: None)
    for module in (asked, bench_terminal):
        monkeypatch.setattr(module, "no_gpu", lambda: None)
    import cupy

    empty = lambda shape, dtype: shim.empty(shape, np.dtype(dtype))  # noqa: E731
    with on_cpu(Launching()), mock.patch.object(cupy, "empty", empty):
        yield


@pytest.fixture
def bench(gpu, monkeypatch, capsys, tmp_path):
    """Exit status, what is said, the records."""
    cases = {"rope": {"small": ROPE}, "qkv": {"small": QKV}, "headline": {"rope": ROPE, "qkv": QKV}}
    monkeypatch.setattr(workloads, "timed_suite", cases.get)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "140")

    def run(*arguments):
        words = ("--without-rivals", "--samples", "2", "--json", "r.jsonl")
        monkeypatch.setattr(sys, "argv", ["ropegrad", "bench", *arguments, *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        found = records.read(tmp_path / "r.jsonl")
        return ended.value.code, " ".join(capsys.readouterr().out.split()), found

    return run


def test_where_a_gpu_is_it_is_taken_and_both_protocols(bench):
    status, said, found = bench()
    assert status == 0, said
    assert [(r.op, r.backend, r.protocol) for r in found] == [
        (op, "cupy_plain", protocol) for op in ("rope", "qkv") for protocol in ("span/events", "graph")
    ]
    assert all(r.passed and len(r.samples_us) == 2 and r.note == "by the test" for r in found)
    assert {r.device for r in found} == {"NVIDIA H200"}
    assert [r.precision for r in found] == [None, None, "highest", "highest"]
    status, said, again = bench()
    assert "2 of 2 cases were in r.jsonl already" in said
    assert again == found


def test_span_by_name_needs_cupti(bench, monkeypatch):
    monkeypatch.setattr(on_gpu, "tracer", lambda: "cupti-python cannot be imported: none")
    status, _, found = bench("--protocol", "span", "wall", "--suite", "rope")
    assert status == 2
    assert {r.protocol: r.invalid for r in found} == {
        "wall": None,
        "span/cupti": "INVALID: --protocol span needs CUPTI: cupti-python cannot be imported: none",
    }


def test_a_target_of_cupy_arrays(bench, tmp_path, monkeypatch):
    (tmp_path / "kernels.py").write_text(
        "import ropegrad as rg\n"
        "def right(*arrays):\n    return rg.rope_backward(*arrays, backend='portable')\n"
        "def wrong(*arrays):\n    return rg.rope_backward(*arrays, backend='portable', adjoint='paired')\n"
    )
    monkeypatch.setattr("ropegrad.bench.targets.probe", lambda contract: None)
    monkeypatch.setattr(on_gpu, "uncapturable", lambda call: "it waits for the device")
    names = ("kernels.py:right", "kernels.py:wrong")
    status, said, found = bench(*names, "--arrays", "cupy", "--suite", "rope")
    assert status == 1, said
    right = {r.protocol: r for r in found if r.kernel == "kernels.py:right"}
    assert len(right["span/events"].samples_us) == 2
    assert right["graph"].invalid == "INVALID: it waits for the device"
    wrong = [r for r in found if r.kernel == "kernels.py:wrong"]
    assert len(wrong) == 2
    assert not any(r.samples_us for r in wrong)
    assert all(r.samples_us for r in found if r.backend == "cupy_plain")


def test_threads_are_of_a_cpu(bench, capsys):
    with pytest.raises(ValueError, match="there is no file"):  # nothing was written
        bench("--threads", "2")
    assert "--threads is for a CPU: write --arrays numpy" in capsys.readouterr().out


def test_inputs_together_are_more_than_twice_the_l2(gpu):
    problem = Problem("rope", "small", ROPE)
    sets = on_gpu.Gpu(RUN, 2).sets(problem.case(), 50 << 20)
    assert len(sets) == timing.sets_needed(50 << 20, RUN.device.l2) == 3
    assert len({x.__array_interface__["data"][0] for inputs in sets for x in inputs.values()}) == 18


def test_a_backend_that_is_asked_for_and_cannot_run_is_named(monkeypatch):
    monkeypatch.setattr(rivals, "cannot_run", lambda backend, spec: "it has no rope")
    (found,) = rivals.contenders(ROPE, Choice(("cupy_tensor",), rivals=False))
    assert found.refused == "cupy_tensor cannot run this: it has no rope"
    (found,) = rivals.contenders(ROPE, Choice(("numpy_tiled",), rivals=False))
    assert found.refused == "numpy_tiled takes NumPy arrays: write --arrays numpy"


class Stream(contextlib.nullcontext):
    """A stream that can be captured, unless something waits for it."""

    capturing = False

    def __init__(self, *, non_blocking):
        super().__init__()

    def synchronize(self):
        if Stream.capturing:
            raise RuntimeError("operation not permitted when stream is capturing")

    def begin_capture(self):
        Stream.capturing = True

    def end_capture(self):
        Stream.capturing = False


def test_what_cannot_be_captured_says_why(monkeypatch):
    monkeypatch.setattr(on_gpu, "_aside", lambda: Stream(non_blocking=True))
    assert on_gpu.uncapturable(lambda: None) is None
    reason = on_gpu.uncapturable(lambda: Stream(non_blocking=True).synchronize())
    assert reason.endswith("RuntimeError: operation not permitted when stream is capturing")
    assert not Stream.capturing


@pytest.mark.parametrize(("backend", "judged"), [("torch", True), ("target", True), ("cupy_tensor", False)])
def test_what_is_not_ours_is_captured_once_before_it_is_timed_by_graph(monkeypatch, backend, judged):
    monkeypatch.setattr(on_gpu, "_aside", lambda: Stream(non_blocking=True))
    one = Contender("f", backend, "f", None, {}, lambda inputs: lambda: ())
    place, waits = on_gpu.Gpu(RUN, 2), lambda: Stream(non_blocking=True).synchronize()
    assert (place.refuses(one, waits, "graph") is not None) is judged
    assert place.refuses(one, waits, "span") is None
    assert place.refuses(one, lambda: (), "graph") is None


def test_a_forward_is_refused_where_its_kernels_cannot_be_seen():
    one = Contender("f", "target", "f", None, {}, lambda inputs: lambda: (), protocols=("wall",))
    place = on_gpu.Gpu(RUN, 2)
    assert "write --protocol wall" in place.refuses(one, lambda: (), "graph")
    assert place.refuses(one, lambda: (), "wall") is None


def test_the_tensor_backend_at_both_promises_by_its_own_kernels(monkeypatch):
    """As the run binds it: the weights' gradients lie in one matrix, and one product makes them."""
    from tensor_on_cpu import on_cpu as tensor_on_cpu

    monkeypatch.setattr(rivals, "own_backends", lambda spec: ["cupy_tensor"][: spec.precision != "highest"])
    monkeypatch.setattr(rivals, "cannot_run", lambda _, spec: None if spec.precision != "highest" else "no")
    monkeypatch.setattr(on_gpu, "measure", measure)
    ceiling = SimpleNamespace(contenders={"copy": [lambda: None]}, records=lambda *_: ())
    monkeypatch.setattr(on_gpu.Gpu, "ceiling", lambda *_: ceiling)
    place, problem = on_gpu.Gpu(RUN, 2), Problem("qkv", "small", QKV)
    with tensor_on_cpu() as device:
        monkeypatch.setattr(on_gpu, "to_namespace", lambda x, _: device.keep(apart(x, _)))
        monkeypatch.setattr(on_gpu, "sets_needed", lambda *_: 1)
        everybody = [*place.contenders(QKV, Choice(rivals=False))]
        found = time_case(place, problem, everybody, ("graph",), lambda what: None)
    assert [(r.backend, r.precision, r.spec["precision"]) for r in found] == [
        ("cupy_tensor", precision, precision) for precision in ("high", "medium")
    ]  # fmt: skip
    assert all(r.passed and len(r.samples_us) == 2 for r in found), [r.note for r in found]
    assert device.called.count("product") == 2 * device.called.count("qkv_convert") > 0


def test_the_bare_products_read_the_gradients_token_by_token(monkeypatch):
    """As ours do: rows of 293 tokens would be misaligned, and cuBLAS several times slower."""
    monkeypatch.setattr(
        Product, "arrays", lambda one, count: [[np.zeros((one.m, one.k)), np.zeros((one.k, one.n)), None]]
    )
    spec = SUITES["qkv"]()["B=2 S=293"]
    for hidden, weights in on_gpu.BareProducts(None, spec)._arrays.values():
        assert hidden[0].flags.c_contiguous
        assert weights[0].flags.f_contiguous
        assert weights[0].shape == (3072, 586)
