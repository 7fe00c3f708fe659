"""`ropegrad bench` on CPUs: only what was right is timed, and the competitors are what they claim to be.

Nothing here judges a time.
"""

import dataclasses
import os

import numpy as np
import pytest
from conftest import need

from ropegrad import records
from ropegrad.bench import competitors, threads
from ropegrad.bench import on_cpu as cpu
from ropegrad.bench.competitors import FORMULAS, NUMPY
from ropegrad.bench.contender import Contender, is_textbook
from ropegrad.bench.place import Choice
from ropegrad.bench.suite import time_case
from ropegrad.bench.timing import Timing
from ropegrad.bench.workloads import Problem, timed_suite
from ropegrad.spec import QkvSpec, RopeSpec
from ropegrad.tiles import cores
from ropegrad.verify import check, make_case
from ropegrad.verify.runners import to_numpy

ROPE = RopeSpec(batch=2, heads=4, kv_heads=2, seq=6, head_dim=16, rotary_dim=16, table_batch=2)
SPECS = {
    "float32": ROPE,
    "bfloat16": dataclasses.replace(ROPE, dtype="bfloat16", table_dtype="bfloat16"),
    "float64": dataclasses.replace(ROPE, dtype="float64", table_dtype="float64"),
    "qkv": QkvSpec(rope=dataclasses.replace(ROPE, needs=()), hidden_size=24),
}
PLACE = cpu.start(threads=1, samples=2, commit="none", command="none")


def passes(case, call, **options):
    named = lambda case: {n: to_numpy(x) for n, x in zip(case.outputs, call(), strict=True)}  # noqa: E731
    return check(case, named, **options).passed


@pytest.mark.parametrize("formula", FORMULAS, ids=lambda formula: formula.name)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_every_formula_is_right_in_numpy(spec, formula):
    case = make_case(spec, 1)
    body = competitors.body_of(spec, NUMPY, formula)
    assert passes(case, lambda: body(*case.inputs.values()))


def contenders(spec, backends):
    case = make_case(spec, 1)
    return case, [c for c in competitors.competitors(spec) if c.backend in backends]


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_torch_and_jax_are_right(spec):
    need("torch", "interop")
    need("jax", "interop").config.update("jax_enable_x64", True)
    case, found = contenders(spec, ("torch", "jax.jit"))
    assert {c.backend for c in found} == {"torch", "jax.jit"}
    for contender in found:
        assert passes(case, contender.bind(case.inputs), flushes=contender.backend == "jax.jit"), (
            contender.kernel
        )


@pytest.mark.long
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_every_formula_is_right_in_torch_compile(spec):
    need("torch", "interop")
    case, found = contenders(spec, ("torch.compile",))
    assert len(found) == 2 * len(FORMULAS)
    for contender in found:
        assert passes(case, contender.bind(case.inputs)), contender.kernel


def planted(name, call):
    return Contender(name, name, "it", None, {}, lambda inputs: lambda: call(inputs))


def right(inputs):
    return competitors.body_of(ROPE, NUMPY, FORMULAS[0])(*inputs.values())


def measured(*others):
    everybody = [*PLACE.contenders(ROPE, Choice(rivals=False)), *others]
    return time_case(PLACE, Problem("rope", "small", ROPE), everybody, ["wall"], lambda what: None)


def test_each_record_has_its_check_and_its_samples(tmp_path):
    found = measured()
    assert found[0].op == "copy"
    assert {r.backend for r in found[1:]} >= {"numpy_tiled"}
    assert all(r.passed and len(r.samples_us) == 2 for r in found)
    assert found[0].bytes == pytest.approx(found[1].bytes, abs=1)
    assert found[1].effective_bits["grad_q"] > 20
    records.write(tmp_path / "cpu.jsonl", found)
    assert records.read(tmp_path / "cpu.jsonl") == found


def test_what_is_wrong_or_fails_has_no_time():
    def wrong(inputs):
        first, *others = right(inputs)
        return [first * np.float32(1.001), *others]

    def fails(inputs):
        raise RuntimeError("no compiler\nat all")

    def writes(inputs):
        results = right(inputs)
        inputs["q"][...] = 0
        return results

    found = measured(
        *(planted(one.__name__, one) for one in (right, wrong, fails, writes)), planted("last", right)
    )
    by_name = {r.backend: r for r in found}
    assert by_name["right"].median_us is not None
    assert by_name["wrong"].median_us is None
    assert "times its bound" in by_name["wrong"].note
    assert by_name["fails"].median_us is None
    assert by_name["fails"].note == "RuntimeError: no compiler"
    assert by_name["writes"].median_us is None
    assert by_name["writes"].note == "q changed during the call"
    assert by_name["last"].median_us is not None, "what another did to the inputs is undone"


def test_a_time_in_which_no_core_moves_these_bytes_is_invalid():
    """As of a target that keeps its results by a few of its inputs' elements."""
    facts = {"bytes_read": 10**9, "bytes_written": 10**9, "flops": 0}
    words = {"backend": "target", "kernel": "k", "spec": {}, "options": {}} | facts
    floor = 2e9 / (1.2e12 * cores()) * 1e6
    for us in (0.99 * floor, 1.01 * floor):
        found = PLACE.run.record("rope", "x", Timing("wall", (us,)), {"grad_q": 0.5}, **words)
        assert found.median_us
        assert found.floor_us == pytest.approx(floor)
        assert (found.invalid is None) == (us > floor)
    assert "2e+03 MB /" in PLACE.run.record("rope", "x", Timing("wall", (1.0,)), {"q": 0.5}, **words).invalid


def test_shared_memory_of_outputs_hides_no_fault():
    """Two formulas may write into the same arrays: each is judged by what it wrote."""
    shared = [np.empty_like(x) for x in right(make_case(ROPE, 1).inputs)]

    def into(factor):
        def call(inputs):
            for array, result in zip(shared, right(inputs), strict=True):
                array[...] = result * np.float32(factor)
            return shared

        return call

    found = measured(planted("wrong", into(1.01)), planted("right", into(1)))
    assert [r.backend for r in found if not r.passed] == ["wrong"]


def test_all_take_turns_and_who_begins_rotates():
    seen = []
    taken = cpu.race({n: lambda n=n: seen.append(n) for n in "abc"}, 3)
    assert "".join(seen[::2]) == "abcbcacab"
    assert seen[::2] == seen[1::2]
    assert {name: len(times) for name, times in taken.items()} == dict.fromkeys("abc", 3)


def test_the_copy_copies_everything():
    cost = Problem("rope", "", ROPE).cost
    for count in (1, 3):
        copy = cpu.Copy(dataclasses.replace(PLACE, threads=count), cost)
        copy.call()
        assert copy.target.size == cost.moved // 2
        assert copy.target.all()


def test_threads_are_limited_and_given_back():
    pools = need("threadpoolctl", "cpu")
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    with threads.limited(1):
        assert before is None or cores() == 1
        assert all(pool["num_threads"] == 1 for pool in pools.threadpool_info())
    assert before is None or os.sched_getaffinity(0) == before
    assert threads.unlimited(1) is None
    assert "this process may use 1 to" in threads.unlimited(cores() + 1)


@pytest.mark.parametrize("suite", ["headline", "rope", "qkv"])
def test_every_workload_suits_the_competitors(suite):
    for spec in timed_suite(suite).values():
        assert is_textbook(spec)
