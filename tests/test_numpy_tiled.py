"""The tiled NumPy backend: neither threads, nor tiles, nor `needs`, nor `out=` change a single bit."""

import os
import threading
from dataclasses import replace
from functools import partial

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits

import ropegrad as rg
from ropegrad.backends import numpy_small, numpy_tile, numpy_tiled
from ropegrad.backends.numpy_tiled import NumpyTiled
from ropegrad.spec import QkvSpec, RopeSpec
from ropegrad.tiles import tasks
from ropegrad.verify.draws import make_case
from ropegrad.verify.runners import run_backend
from ropegrad.verify.strategies import cases, rope_specs


def tiled(case, threads, cells):
    """The gradients through tiles of this size, whatever the size of the problem."""
    inputs = {name: x for name, x in case.inputs.items() if x is not None}
    out = {
        f"grad_{n}": np.full(shape, np.nan, d) for n in case.spec.needs for shape, d in [case.spec.output(n)]
    }
    for name, prior in case.prior.items():
        out[name][...] = prior
    backend = NumpyTiled(threads=threads, cells=cells)
    schedule = tasks(case.spec, cells)
    with np.errstate(all="ignore"):
        kernel = numpy_tile.RopeBackward(case.spec, inputs, out)
        if not schedule:
            return backend.rope_backward(case.spec, inputs, out)
        backend._run(case.spec, [partial(kernel.run, task) for task in schedule])
    return out


def same_bits(a, b):
    return all(np.array_equal(a[name].view(np.uint8), b[name].view(np.uint8)) for name in a)


@given(case=cases(rope_specs()), threads=st.integers(1, 4), cells=st.integers(1, 40))
def test_tiles_and_threads_change_nothing(case, threads, cells):
    assert same_bits(tiled(case, threads, cells), tiled(case, 1, 1 << 40))


@given(case=cases(rope_specs()), again=st.integers(1, 40))
def test_tiles_cover_every_token_once(case, again):
    spec = case.spec
    seen = np.zeros((spec.batch, spec.seq), int)
    for task in tasks(spec, again):
        for tile in task:
            seen[tile.batch, tile.tokens] += 1
    assert (seen == 1).all()


BIG = RopeSpec(batch=2, heads=8, kv_heads=4, seq=700, head_dim=64, rotary_dim=48, table_batch=None)


def test_a_large_problem_repeats_bit_for_bit_on_any_number_of_threads():
    case = make_case(BIG, 1)
    first = run_backend(case, "numpy_tiled")
    inputs = dict(case.inputs)
    for threads in (1, 2, 3, 7):
        again = NumpyTiled(threads=threads).rope_backward(BIG, inputs, None)
        assert same_bits(first, again)


def test_the_default_is_one_thread_a_core_for_large_problems_only():
    backend = NumpyTiled()
    assert backend._workers(BIG, tasks(BIG)) == min(len(os.sched_getaffinity(0)), len(tasks(BIG)))
    small = RopeSpec(batch=1, heads=1, kv_heads=1, seq=9, head_dim=8, rotary_dim=8)
    assert backend._workers(small, tasks(small, 1)) == 1


def test_needs_and_out_change_no_bit():
    for seq in (3, 600):  # the stacked path for small problems, and the tiles
        spec = RopeSpec(batch=2, heads=6, kv_heads=2, seq=seq, head_dim=32, rotary_dim=32, table_batch=1)
        case = make_case(spec, 5)
        arrays = list(case.inputs.values())
        full = rg.rope_backward(*arrays, backend="numpy_tiled")
        into = tuple(np.empty_like(x) for x in full)
        rg.rope_backward(*arrays, out=into, backend="numpy_tiled")
        for need, whole, written in zip(spec.needs, full, into, strict=True):
            alone = getattr(rg.rope_backward(*arrays, needs=(need,), backend="numpy_tiled"), f"grad_{need}")
            assert np.array_equal(alone, whole)
            assert np.array_equal(written, whole)


def projections(case, threads, blas, *, out=False, needs=None):
    """The gradients of the projections on so many threads of ours and of BLAS, into `out` or fresh."""
    spec = case.spec if needs is None else replace(case.spec, needs=needs)
    into = {f"grad_{n}": np.empty(shape, d) for n in spec.needs for shape, d in [spec.output(n)]}
    with threadpool_limits(blas, "blas"):
        return NumpyTiled(threads=threads).qkv_rope_backward(spec, case.inputs, into if out else None)


@given(
    tokens=st.integers(1, 700),
    hidden=st.integers(1, 1300),
    heads=st.integers(1, 3),
    dtype=st.sampled_from(["float32", "float64"]),
    seed=st.integers(0, 99),
)
def test_neither_our_threads_nor_those_of_blas_change_a_bit_of_the_products(
    tokens, hidden, heads, dtype, seed
):
    rope = RopeSpec(
        batch=1,
        heads=2 * heads,
        kv_heads=heads,
        seq=tokens,
        head_dim=34,
        rotary_dim=34,
        dtype=dtype,
        needs=(),
    )
    case = make_case(QkvSpec(rope=rope, hidden_size=hidden), seed)
    one = projections(case, 1, 1)
    assert same_bits(one, projections(case, 2, 2, out=True))
    assert same_bits(one, projections(case, 3, 4))
    for need in case.spec.needs:
        alone = projections(case, 2, 2, needs=(need,))
        assert same_bits(alone, one)


def test_small_problems_take_the_stacked_path(monkeypatch):
    called = []
    monkeypatch.setattr(numpy_tiled, "small_rope_backward", lambda *a: called.append(a))
    case = make_case(RopeSpec(batch=1, heads=1, kv_heads=1, seq=1, head_dim=2, rotary_dim=2), 1)
    rg.rope_backward(*case.inputs.values())
    assert called


@given(case=cases(rope_specs()))
def test_the_stacked_path_gives_the_bits_of_the_tiled_one(case):
    if {name for name, x in case.inputs.items() if x is not None} >= numpy_small.NEEDED and case.spec.batch:
        out = {name: x.copy() for name, x in tiled(case, 1, 1).items()}
        for name, x in out.items():
            x[...] = case.prior.get(name, np.nan)
        with np.errstate(all="ignore"):
            numpy_small.small_rope_backward(case.spec, dict(case.inputs), out)
        assert same_bits(out, tiled(case, 1, 1))


def test_concurrent_calls_do_not_disturb_each_other():
    case = make_case(BIG, 2)
    right = run_backend(case, "numpy_tiled")
    seen = []

    def call():
        seen.append(run_backend(case, "numpy_tiled"))

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(seen) == 4
    assert all(same_bits(right, other) for other in seen)
