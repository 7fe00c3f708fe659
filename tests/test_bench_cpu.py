"""`ropegrad bench` on CPUs: only what was right is timed, and the competitors are what they claim to be.

Nothing here judges a time.
"""

import dataclasses
import os

import numpy as np
import pytest
from conftest import need

from ropegrad import cli, records
from ropegrad.bench import competitors, cpu, threads
from ropegrad.bench.competitors import FORMULAS, NUMPY, Contender
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
RUN = cpu.Run(threads=1, samples=2, commit="none", digest="none", device="here", versions={})


def passes(case, call, **options):
    named = lambda case: {n: to_numpy(x) for n, x in zip(case.outputs, call(), strict=True)}  # noqa: E731
    return check(case, named, **options).passed


@pytest.mark.parametrize("formula", FORMULAS, ids=lambda formula: formula.name)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_every_formula_is_right_in_numpy(spec, formula):
    case = make_case(spec, 1)
    body = competitors._body(case, NUMPY, formula)
    assert passes(case, lambda: body(*case.inputs.values()))


def contenders(spec, backends):
    case = make_case(spec, 1)
    return case, [c for c in competitors.competitors(case) if c.backend in backends]


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_torch_and_jax_are_right(spec):
    need("torch", "interop")
    need("jax", "interop").config.update("jax_enable_x64", True)
    case, found = contenders(spec, ("torch", "jax.jit"))
    assert {c.backend for c in found} == {"torch", "jax.jit"}
    for contender in found:
        assert passes(case, contender.call, flushes=contender.backend == "jax.jit"), contender.kernel


@pytest.mark.long
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_every_formula_is_right_in_torch_compile(spec):
    need("torch", "interop")
    case, found = contenders(spec, ("torch.compile",))
    assert len(found) == 2 * len(FORMULAS)
    for contender in found:
        assert passes(case, contender.call), contender.kernel


def measured(monkeypatch, *planted):
    monkeypatch.setattr(cpu, "competitors", lambda case: planted)
    return list(cpu.measure(RUN, "small", ROPE, lambda what: None))


def test_each_record_has_its_check_and_its_samples(monkeypatch, tmp_path):
    found = measured(monkeypatch)
    assert found[0].op == "copy"
    assert {r.backend for r in found[1:]} >= {"numpy_tiled"}
    assert all(r.passed and len(r.samples_us) == 2 for r in found)
    assert found[0].bytes == pytest.approx(found[1].bytes, abs=1)
    records.write(tmp_path / "cpu.jsonl", found)
    assert records.read(tmp_path / "cpu.jsonl") == found


def test_what_is_wrong_or_fails_has_no_time(monkeypatch):
    case = make_case(ROPE, 1)
    right = competitors._body(case, NUMPY, FORMULAS[0])(*case.inputs.values())
    wrong = (right[0] * np.float32(1.001), *right[1:])

    def fails():
        raise RuntimeError("no compiler\nat all")

    found = measured(
        monkeypatch,
        Contender("right", "it", lambda: right),
        Contender("wrong", "it", lambda: wrong),
        Contender("fails", "it", fails),
    )
    by_name = {r.backend: r for r in found}
    assert by_name["right"].median_us is not None
    assert by_name["wrong"].median_us is None
    assert "times its bound" in by_name["wrong"].note
    assert by_name["fails"].median_us is None
    assert by_name["fails"].note == "RuntimeError: no compiler"


def test_all_take_turns_and_who_begins_rotates():
    seen = []
    names = "abc"
    cpu.race([Contender(n, "", lambda n=n: seen.append(n)) for n in names], 3)
    assert "".join(seen[::2]) == "abcbcacab"
    assert seen[::2] == seen[1::2]


def test_the_copy_copies_everything():
    cost = cpu.rope_cost(ROPE)
    for count in (1, 3):
        (target,) = cpu._copy(cost, count)()
        assert target.size == cost.moved // 2
        assert target.all()


def test_threads_are_limited_and_given_back():
    pools = need("threadpoolctl", "cpu")
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    with threads.limited(1):
        assert before is None or cores() == 1
        assert all(pool["num_threads"] == 1 for pool in pools.threadpool_info())
    assert before is None or os.sched_getaffinity(0) == before
    assert threads.unlimited(1) is None
    assert "this process may use 1 to" in threads.unlimited(cores() + 1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--case", "none"], "no case 'none': rope B=1 S=2048"),
        (["--threads", "0"], "--threads 0"),
        (["--samples", "0"], "--samples 0: at least one"),
    ],
)
def test_a_bench_that_cannot_be_says_why(monkeypatch, capsys, given, said):
    need("threadpoolctl", "cpu")
    monkeypatch.setattr("sys.argv", ["ropegrad", "bench", *given])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert said in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("suite", ["headline", "rope", "qkv"])
def test_every_workload_suits_the_competitors(suite):
    for spec in cpu.workloads(suite).values():
        geometry = spec if isinstance(spec, RopeSpec) else spec.rope
        assert (geometry.table, geometry.pairing, geometry.layout) == ("full", "half", "bhsd")
        assert geometry.rotary_dim == geometry.head_dim
        assert geometry.table_batch == geometry.batch
