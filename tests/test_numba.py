"""The compiled CPU backend: what it promises beyond being right, and how it is chosen."""

import dataclasses
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import ml_dtypes
import numpy as np
import pytest
from conftest import need
from hypothesis import given, settings
from hypothesis import strategies as st

import ropegrad as rg
from ropegrad import backends
from ropegrad.backends import numba_call, numba_cpu
from ropegrad.backends.numba_cpu import NumbaCpu
from ropegrad.spec import RopeSpec
from ropegrad.verify.draws import make_case
from ropegrad.verify.runners import options, run_backend
from ropegrad.verify.strategies import cases, rope_specs

need("numba", "cpu")

BIG = RopeSpec(batch=2, heads=8, kv_heads=4, seq=700, head_dim=64, rotary_dim=48, table_batch=None)
WIDE = dataclasses.replace(BIG, table_batch=2, dtype="bfloat16", pairing="interleaved")


def same_bits(a, b):
    return all(a[name].tobytes() == b[name].tobytes() for name in a)


def given_plan(case, **changes):
    """The gradients by a plan with these changes, into poisoned arrays."""
    out = {
        f"grad_{n}": np.full(shape, np.nan, d) for n in case.spec.needs for shape, d in [case.spec.output(n)]
    }
    for name, prior in case.prior.items():
        out[name][...] = prior
    inputs = case.inputs
    sides = tuple((inputs[f"grad_{side}_embed"], inputs[side], out.get(f"grad_{side}")) for side in "qk")
    plan = dataclasses.replace(numba_call.plan_backward(case.spec, sides, threads=1), **changes)
    numba_call.run(numba_cpu.compiled(), plan, sides, inputs, out)
    return out


# ---- the same bits, whatever the threads -------------------------------------------------------------------


@settings(max_examples=60)
@given(case=cases(rope_specs()), workers=st.integers(1, 4), tile=st.integers(1, 20), streams=st.booleans())
def test_tiles_threads_and_streams_change_nothing(case, workers, tile, streams):
    streams = streams and not case.spec.accumulate
    got = given_plan(case, workers=workers, tile=tile, streams=streams)
    assert same_bits(got, given_plan(case, workers=1, tile=1 << 20, streams=False))


@pytest.mark.parametrize("spec", [BIG, WIDE], ids=["shared tables", "bfloat16"])
def test_a_large_problem_repeats_bit_for_bit_on_any_number_of_threads(spec):
    case = make_case(spec, 1)
    first = run_backend(case, "numba_cpu")
    for threads in (1, 2, 3, 7):
        inputs = {name: x for name, x in case.inputs.items() if x is not None}
        assert same_bits(first, NumbaCpu(threads=threads).rope_backward(spec, inputs, None))


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "sbhd"])
@pytest.mark.parametrize("start", [0, 1, 5])
def test_streamed_rows_are_all_written_and_nothing_beside_them(layout, start):
    """Rows of 96 bytes, which never end where a cache line does, at any alignment."""
    spec = dataclasses.replace(BIG, seq=90, head_dim=24, rotary_dim=24, layout=layout, needs=("q", "k"))
    case = make_case(spec, 4)
    sides, buffers = [], []
    for side, heads in (("q", 8), ("k", 4)):
        shape = spec.head_shape(heads)
        buffers.append(np.full(np.prod(shape) + 16, np.nan, np.float32))
        out = buffers[-1][start : start + np.prod(shape)].reshape(shape)
        sides.append((case.inputs[f"grad_{side}_embed"], case.inputs[side], out))
    right = run_backend(case, "numba_cpu")
    for tile in (1, 7, 64):
        plan = dataclasses.replace(
            numba_call.plan_backward(spec, tuple(sides), threads=1), tile=tile, streams=True
        )
        for buffer in buffers:
            buffer[...] = np.nan
        numba_call.run(numba_cpu.compiled(), plan, tuple(sides), case.inputs, {})
        for (_, _, out), buffer, name in zip(sides, buffers, ("grad_q", "grad_k"), strict=True):
            assert out.tobytes() == right[name].tobytes()
            assert np.isnan(buffer).sum() == 16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_needs_and_out_change_no_bit(dtype):
    """q's and k's are made two heads at a time, beside the tables' or alone, the tables' head by head."""
    arrays = list(make_case(dataclasses.replace(BIG, dtype=dtype), 5).inputs.values())
    full = rg.rope_backward(*arrays, backend="numba_cpu")
    into = tuple(np.full_like(x, np.nan) for x in full)
    rg.rope_backward(*arrays, out=into, backend="numba_cpu")
    for name, whole, written in zip(BIG.needs, full, into, strict=True):
        alone = getattr(rg.rope_backward(*arrays, needs=(name,), backend="numba_cpu"), f"grad_{name}")
        assert alone.tobytes() == whole.tobytes()
        assert written.tobytes() == whole.tobytes()


def test_large_problems_run_on_every_core_and_small_ones_on_one():
    for seq, workers in ((700, 3), (9, 1)):
        spec = dataclasses.replace(BIG, seq=seq)
        sides = ((np.empty(spec.head_shape(8), np.float32), None, None),)
        plan = numba_call.plan_backward(spec, sides, threads=3)
        assert plan.workers == workers
        assert plan.jobs * plan.tile >= seq


def test_heads_side_by_side_are_read_in_the_order_of_memory():
    x = np.empty((2, 700, 8, 64), np.float32)
    bshd = dataclasses.replace(BIG, layout="bshd")
    moved = ((x.transpose(0, 2, 1, 3), None, None),)
    assert numba_call.plan_backward(bshd, ((x, None, None),), threads=1).tile == 1
    assert numba_call.plan_backward(BIG, moved, threads=1).tile == 1
    packed = ((x, None, np.empty((2, 8, 700, 64), np.float32).transpose(0, 2, 1, 3)),)
    assert numba_call.plan_backward(bshd, packed, threads=1).tile > 1


# ---- threads, processes ------------------------------------------------------------------------------------


def test_concurrent_calls_do_not_disturb_each_other():
    case = make_case(BIG, 2)
    right, seen = run_backend(case, "numba_cpu"), []
    callers = [threading.Thread(target=lambda: seen.append(run_backend(case, "numba_cpu"))) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(seen) == 4
    assert all(same_bits(right, other) for other in seen)


# In a process of its own: where JAX is loaded, it warns of every fork().
FORK = """
import multiprocessing
import os
import signal
import numpy as np
import ropegrad as rg

x, table = np.arange(1 << 20, dtype=np.float32).reshape(1, 8, 2048, 64), np.ones((2048, 64), np.float32)
call = lambda: rg.rope_backward(x, x, x, x, table, table, backend="numba_cpu")
right = call()

def again(queue):
    queue.put(all(a.tobytes() == b.tobytes() for a, b in zip(right, call())))

context = multiprocessing.get_context("fork")
queue = context.SimpleQueue()
child = context.Process(target=again, args=(queue,))
child.start()
child.join(60)
print(child.exitcode, queue.get())
"""


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="this system has no fork()")
def test_a_forked_child_computes_after_its_parent_did():
    """Thread pools do not survive fork(); ours end with the call."""
    done = subprocess.run(
        [sys.executable, "-c", FORK], capture_output=True, text=True, check=True, timeout=90
    )
    assert done.stdout.split() == ["0", "True"]


def test_an_interrupted_call_waits_for_its_threads():
    """They write to arrays that the interrupted caller would let go."""
    main, ended = threading.current_thread(), []

    def work():
        if threading.current_thread() is not main:
            time.sleep(0.5)
            ended.append(True)

    interrupt = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        numba_call._together(work, 3)
    assert ended == [True, True]


def test_an_error_on_any_thread_reaches_the_caller(monkeypatch):
    loop = numba_cpu.compiled()
    main = threading.current_thread()

    class Broken:
        Rows, Side, Problem, BUFFER = loop.Rows, loop.Side, loop.Problem, loop.BUFFER

        @staticmethod
        def run(*arguments):
            if threading.current_thread() is not main:
                raise MemoryError("planted")
            started.wait(10)

    started = threading.Event()
    monkeypatch.setattr(numba_cpu, "compiled", lambda: Broken)
    threading.Timer(0.2, started.set).start()
    with pytest.raises(MemoryError, match="planted"):
        NumbaCpu(threads=2).rope_backward(BIG, make_case(BIG, 1).inputs, None)


# ---- numbers of 16 bits ------------------------------------------------------------------------------------


def rounded(values, dtype):
    """The values, finite and of a table's dtype, as the backend rounds them: dx = 1·c + 0·s."""
    cos = values.reshape(-1, 2)
    ones = np.ones((1, 1, len(cos), 2), dtype)
    sin = np.zeros_like(cos)
    both = [
        rg.rope_backward(g, None, None, None, cos, sin, needs=("q",), backend="numba_cpu").grad_q
        for g in (ones * np.array([1, 0], dtype), ones * np.array([0, 1], dtype))
    ]
    return np.stack([both[0][..., 0], both[1][..., 1]], -1).reshape(-1)


def everything(dtype):
    """All 65,536 numbers of a dtype of 16 bits."""
    return np.arange(1 << 16, dtype=np.uint16).view(dtype)


def exact(numbers):
    """As float64, without a word about signalling NaNs."""
    with np.errstate(all="ignore"):
        return numbers.astype(np.float64)


def finite(dtype):
    """All finite numbers of a dtype of 16 bits, in order."""
    numbers = exact(everything(dtype))
    return np.sort(numbers[np.isfinite(numbers)])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_every_number_of_16_bits_is_read_and_written_as_it_is(dtype):
    numbers = everything(dtype)
    one, zero = np.ones((len(numbers), 2), np.float32), np.zeros((len(numbers), 2), np.float32)
    g = np.stack([numbers, np.zeros_like(numbers)], -1)[None, None]
    got = rg.rope_backward(g, None, None, None, one, zero, needs=("q",), backend="numba_cpu").grad_q
    first = got[0, 0, :, 0]
    assert np.array_equal(exact(first), exact(numbers), equal_nan=True)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("wide", [np.float32, np.float64])
def test_rounding_to_16_bits_is_to_nearest_with_ties_to_even(dtype, wide):
    """Every number, every midpoint, and the numbers just beside them."""
    numbers = finite(dtype)
    middle = (numbers[1:] + numbers[:-1]) / 2
    points = np.concatenate([numbers, middle]).astype(wide)
    points = np.concatenate([points, np.nextafter(points, wide(np.inf)), np.nextafter(points, wide(-np.inf))])
    points = points[np.isfinite(points)]
    points = points[: len(points) // 2 * 2]
    index = np.clip(np.searchsorted(numbers, points), 1, len(numbers) - 1)
    below, above = numbers[index - 1], numbers[index]
    down, up = points - below, above - points  # exact: neighbours are close
    even = (below.astype(dtype).view(np.uint16) & 1) == 0
    nearest = np.where((down < up) | ((down == up) & even), below, above)
    got = rounded(points, dtype).astype(np.float64)
    inside = np.abs(points) <= numbers[-1]
    assert np.array_equal(got[inside], nearest[inside])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_numbers_past_the_largest_become_infinite_where_they_round_up(dtype):
    before, largest = finite(dtype)[-2:]
    limit = largest + (largest - before) / 2
    points = np.array([limit, np.nextafter(limit, 0), 1e300, -limit])
    assert rounded(points, dtype).astype(np.float64).tolist() == [np.inf, largest, np.inf, -np.inf]


def test_channels_past_the_rotary_width_keep_the_bits_of_their_nans():
    bits = np.full((1, 1, 2, 6), 0x7F81, np.uint16)  # a signalling NaN
    g = bits.view(ml_dtypes.bfloat16)
    table = np.ones((2, 2), np.float32)
    got = rg.rope_backward(g, None, None, None, table, table, needs=("q",), backend="numba_cpu").grad_q
    assert (got.view(np.uint16)[..., 2:] == 0x7F81).all()
    assert np.isnan(exact(got)).all()


# ---- how it is chosen --------------------------------------------------------------------------------------


def test_large_problems_go_to_the_compiled_loop_and_small_ones_to_numpy():
    large = rg.explain("rope_backward", *make_case(BIG, 1).inputs.values())
    assert large.backend == "numba_cpu"
    assert "one compiled loop over tiles of" in str(large)
    assert large.why_not["numpy_tiled"] == "it can run this, but numba_cpu is preferred"
    small = dataclasses.replace(BIG, seq=9)
    said = rg.explain("rope_backward", *make_case(small, 1).inputs.values())
    assert said.backend == "numpy_tiled"
    assert "preferred for fewer than 65,536 channels, here 13,824: it has no" in said.why_not["numba_cpu"]
    assert said.why_not["portable"] == "it can run this, but numpy_tiled is preferred"


@pytest.mark.parametrize(
    "reason", ["Numba is not installed (extra cpu)", "Numba cannot be imported: planted"]
)
def test_without_numba_numpy_runs_and_the_reason_is_shown(monkeypatch, reason):
    monkeypatch.setattr(numba_cpu, "compiled", lambda: reason)
    case = make_case(BIG, 1)
    said = rg.explain("rope_backward", *case.inputs.values())
    assert said.backend == "numpy_tiled"
    assert said.why_not["numba_cpu"] == reason
    with pytest.raises(rg.SpecError, match="backend='numba_cpu' cannot run this: Numba"):
        rg.rope_backward(*case.inputs.values(), **options(BIG) | {"accumulate": False}, backend="numba_cpu")


def test_a_numba_that_cannot_be_used_is_a_reason_not_an_error(monkeypatch):
    numba_cpu.compiled.cache_clear()
    try:
        monkeypatch.setitem(sys.modules, "numba", None)
        assert "Numba" in numba_cpu.compiled()
        monkeypatch.undo()
        numba_cpu.compiled.cache_clear()
        monkeypatch.setattr("numba.config.DISABLE_JIT", 1)
        assert numba_cpu.compiled() == "NUMBA_DISABLE_JIT is set"
    finally:
        monkeypatch.undo()
        numba_cpu.compiled.cache_clear()


def test_every_backend_has_its_place_in_either_order():
    for seq in (1, 4096):
        spec = dataclasses.replace(BIG, seq=seq)
        assert sorted(b.name for b in backends.order(spec)) == sorted(b.name for b in backends.BACKENDS)


PROBE = """
import sys
import numpy as np
import ropegrad as rg
x, table = np.ones((1, {heads}, 64, 64), np.float32), np.ones((64, 64), np.float32)
rg.rope_backward(x, x, x, x, table, table)
print("numba" in sys.modules)
if "numba" in sys.modules:
    from ropegrad.backends import numba_kernel
    stats = numba_kernel.run.stats
    print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))
"""


def probe(heads):
    command = [sys.executable, "-c", PROBE.format(heads=heads)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def test_numba_is_imported_for_large_problems_only_and_compiles_once_for_all_processes():
    assert probe(1) == ["False"]
    assert probe(16)[0] == "True"
    assert probe(16) == ["True", "1", "0"]


def test_without_a_folder_for_its_cache_the_loop_is_compiled_anyway(monkeypatch):
    from ropegrad.backends import numba_kernel

    asked = []

    def njit(**given):
        asked.append(given)
        if given.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: function

    monkeypatch.setattr(numba_kernel, "njit", njit)
    assert numba_kernel._compiled(len) is len
    assert asked == [{"nogil": True, "cache": True}, {"nogil": True}]
