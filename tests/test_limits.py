"""Ceilings: the datasheets' units, the work a stream does, which record is the ceiling, the command."""

import itertools
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from test_cli import run
from test_records import record

from ropegrad import records
from ropegrad.backends.cupy_plain import no_gpu
from ropegrad.bench import limits, products, streams, terminal
from ropegrad.bench import run as runs
from ropegrad.bench.datasheet import DATASHEETS, find
from ropegrad.bench.device import Device
from ropegrad.bench.products import Product
from ropegrad.bench.streams import CONFIGS, Config, elements, grid
from ropegrad.bench.timing import Timing
from ropegrad.cost import rope_cost
from ropegrad.suites import rope_suite

H200 = Device("NVIDIA H200", "580.1", 60 << 20, 132, "0000:00:06.0")
RUN = runs.Run(H200, {"cupy": "14.2.0"}, "abc")


# ---- datasheets --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sheet", DATASHEETS, ids=lambda sheet: sheet.name)
def test_datasheet_units(sheet):
    """Bytes/s, FLOP/s, bytes: a figure in GB/s, TFLOP/s or MB is off by thousands; a sparse rate by two."""
    assert 0.5e12 < sheet.bandwidth < 20e12
    assert 10e12 < sheet.fp32 < 200e12
    assert sheet.fp32 < sheet.tf32 < sheet.fp16
    assert sheet.fp16 / sheet.tf32 == pytest.approx(2, rel=0.05)  # dense beside dense
    assert sheet.l2 is None or 20 << 20 <= sheet.l2 <= 256 << 20
    assert "NVIDIA" in sheet.source


def test_dense_rates_of_the_h200():
    sheet = find("NVIDIA H200")
    assert (sheet.bandwidth, sheet.rate("fp32"), sheet.l2) == (4.8e12, 67e12, 62_914_560)
    assert sheet.rate("fp16") == pytest.approx(1979e12 / 2)
    assert sheet.rate("tf32") == pytest.approx(989e12 / 2)


def test_the_five_devices_are_found_by_the_name_that_cuda_reports():
    names = ("NVIDIA B200", "NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA L40S")
    assert [find(name).name for name in names] == [sheet.name for sheet in DATASHEETS]
    for other in ("NVIDIA H100 PCIe", "NVIDIA L40", "NVIDIA L4", "NVIDIA H2000", ""):
        assert find(other) is None, other


# ---- what a stream and a product do ------------------------------------------------------------------------


def test_24_configurations():
    each = {(c.blocks_per_sm, c.unroll, c.streaming) for c in CONFIGS}
    assert each == set(itertools.product((4, 8, 16, 32), (1, 2, 4), (False, True)))
    assert len({config.name for config in CONFIGS}) == len(CONFIGS) == 24


@pytest.mark.parametrize("spec", rope_suite().values(), ids=rope_suite())
def test_a_stream_moves_the_case_s_bytes_in_its_mix(spec):
    cost, n = rope_cost(spec), elements(rope_cost(spec).moved)
    assert 0 <= 48 * n - cost.moved < 48
    assert 32 * n == pytest.approx(cost.read, rel=0.03)


@pytest.mark.parametrize("n", [1, 255, 256, 257, 338_603, 10_000_000])
def test_every_block_has_work_and_every_element_an_owner(n):
    for config in CONFIGS:
        blocks, tile = grid(config, n, 132), streams.THREADS * config.unroll
        assert 1 <= blocks <= config.blocks_per_sm * 132
        assert (blocks - 1) * tile < n
        if blocks < config.blocks_per_sm * 132:
            assert blocks * tile >= n
    assert grid(Config(4, 1, False), 10**9, 132) == 528


def test_work_of_a_product():
    product = Product(8, 4, 2, "fp16")
    assert (product.flops, product.read, product.written) == (128, (32 + 8) * 2, 64)
    assert Product(8, 4, 2, "tf32").read == (32 + 8) * 4


# ---- records and ceilings ----------------------------------------------------------------------------------


def taken(us=30.0, error=0.0, **facts):
    work = {"bytes_read": 86_000_000, "bytes_written": 44_000_000, "flops": 0} | facts
    timing = Timing("span/cupti", (us, us + 1, us - 1))
    return RUN.record(
        "stream", "a case", timing, {"sum": error}, spec={}, backend="cuda", kernel="stream", **work
    )


def test_a_record_of_a_right_run_has_its_time_and_floor():
    found = taken()
    assert (found.median_us, found.spread_us, found.invalid) == (30.0, 1.0, None)
    assert found.floor_us == pytest.approx(86 / 4.8)
    assert (found.device, found.driver, found.protocol) == ("NVIDIA H200", "580.1", "span/cupti")


def test_a_time_that_cannot_be_is_recorded_as_invalid():
    assert taken(17.9).invalid.startswith("INVALID: 17.90 us is less than input bytes / 4.8 TB/s = 17.92 us")


@pytest.mark.parametrize("error", [1.01, math.inf, math.nan, None])
def test_a_wrong_run_has_no_time(error):
    found = taken(error=error)
    assert (found.samples_us, found.median_us) == ([], None)
    assert not found.passed


def test_an_unknown_device_has_no_floor():
    other = runs.Run(Device("Some GPU", "1", 1, 1, "0000:17:00.0"), {}, "abc")
    assert other.floors({"bytes_read": 1, "bytes_written": 1, "flops": 1}) == {}


def limit(op, us, case="x", **other):
    times = {"samples_us": [us], "median_us": us, "spread_us": 0.0, "floor_us": 0.5}
    return record(op=op, case=case, **times | other)


def test_the_ceiling_is_the_faster_of_what_counts():
    untimed = {"samples_us": [], "median_us": None, "spread_us": None, "error_over_bound": {"sum": None}}
    for copy, stream, best in [
        (limit("copy", 5.0), limit("stream", 4.0), "stream"),
        (limit("copy", 3.0), limit("stream", 4.0), "copy"),
        (limit("copy", 3.0), limit("stream", 2.0, invalid="INVALID"), "copy"),
        (limit("copy", 3.0, **untimed), limit("stream", 9.0), "stream"),
    ]:
        (found,) = limits.ceilings([limit("copy", 1.0, case="64 MiB"), copy, limit("gemm", 1.0), stream])
        assert found.best.op == best
    (found,) = limits.ceilings([limit("copy", 3.0, **untimed), limit("stream", 2.0, invalid="INVALID")])
    assert found.best is None


def test_a_digest_covers_what_a_figure_depends_on():
    package = Path(runs.__file__).resolve().parent.parent
    for backend, patterns in runs.DECIDES.items():
        assert all(list(package.glob(pattern)) for pattern in patterns), (
            "a file that is not there decides nothing"
        )
        clock = {"bench/on_cpu.py"} if backend == "cpu" else {"bench/timing.py", "bench/activity.py"}
        assert clock <= set(patterns)
        assert len(runs.digest(backend)) == 16
    assert len({runs.digest(backend) for backend in ("cuda", "cupy_plain", "torch")}) == 3


# ---- the same checks that run on the device, on NumPy ------------------------------------------------------


def test_a_copy_that_misses_a_byte_is_wrong():
    source = np.arange(8, dtype=np.float32)
    target = source.copy()
    target.view("u1")[30] ^= 1
    assert limits._copied([(source, source.copy())], 32) == 0
    assert limits._copied([(source, target)], 30) == 0
    assert limits._copied([(source, target)], 31) == math.inf


@pytest.mark.parametrize("fault", [None, "unwritten", "value"])
def test_a_stream_that_misses_an_element_is_wrong(monkeypatch, fault):
    def calls(config, sets, multiprocessors):
        def call(a, b, c):
            np.add(a, b, out=c, where=np.arange(c.size) != (3 if fault == "unwritten" else -1))
            c[0] *= 1.0001 if fault == "value" else 1

        return [lambda group=group: call(*group) for group in sets]

    monkeypatch.setattr(limits, "stream_calls", calls)
    # c is right before the call
    sets = [[np.full(8, x, np.float32) for x in (1.5, 1.5, 3)] for _ in range(2)]
    assert limits._added(sets, CONFIGS[0], 132) == (0 if fault is None else math.inf)


@pytest.mark.parametrize("precision", products.PRECISIONS)
def test_a_product_is_judged_by_the_bound_of_its_precision(monkeypatch, precision):
    monkeypatch.setitem(sys.modules, "cupy", np)
    product = Product(16, 64, 8, precision)
    dtype = products.PRECISIONS[precision][1]
    random = np.random.default_rng(1)
    a, b = (random.standard_normal(shape).astype(dtype) for shape in ((16, 64), (64, 8)))
    right = (a.astype(np.float64) @ b.astype(np.float64)).astype(np.float32)
    ratio, bits = product.check(a, b, right)
    assert ratio <= 1
    assert bits > 20
    lost = right.copy()
    lost[-1] -= a[-1, 5].astype(np.float32) * b[5].astype(np.float32)
    assert product.check(a, b, lost)[0] > 1
    assert product.check(a, b, np.full_like(right, np.nan))[0] == math.inf


# ---- the command -------------------------------------------------------------------------------------------


def test_without_a_gpu_the_datasheets_and_one_sentence(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(terminal, "no_gpu", lambda: "CuPy sees no GPU: there is none")
    target = tmp_path / "limits.jsonl"
    assert run("limits", "--json", str(target), monkeypatch=monkeypatch) == 0
    printed = capsys.readouterr().out
    for sheet in DATASHEETS:
        assert sheet.name in printed
    assert "Nothing was measured: CuPy sees no GPU: there is none" in printed
    assert not target.exists()


def test_what_was_measured_is_shown_and_written(monkeypatch, capsys, tmp_path):
    found = [
        limit("copy", 5.0),
        limit("stream", 4.0, bytes_read=8, bytes_written=4),
        limit("copy", 2.0, "1 MiB"),
    ]
    found.append(limit("gemm", 2.0, "8x8x8", flops=4_000_000, precision="tf32"))
    found.append(limit("gemm", 1.0, "8x8x9", invalid="INVALID: too fast"))
    found[0] = limit("copy", 5.0, spec={"suite": "rope"})
    monkeypatch.setattr(terminal, "no_gpu", lambda: None)
    monkeypatch.setattr(terminal, "start", lambda commit: commit)
    monkeypatch.setattr(terminal, "measure_limits", lambda commit, progress: iter(found))
    target = tmp_path / "deep" / "limits.jsonl"
    assert run("limits", "--json", str(target), monkeypatch=monkeypatch) == 0
    printed = capsys.readouterr().out
    assert "mean ceiling 4.00 µs over 1 cases" in printed
    assert "2.00 ±0.00" in printed
    assert "INVALID: too fast" in printed
    assert records.read(target) == found
    assert json.loads(target.read_text().splitlines()[1])["op"] == "stream"
    assert run("limits", "--json", str(tmp_path), monkeypatch=monkeypatch) == 2


@pytest.mark.skipif(no_gpu() is not None, reason="needs a GPU")
def test_one_case_on_the_gpu():
    few = limits.Samples(tuning=2, final=3, product=2)
    run_here = runs.start("abc")
    copy, stream = limits.case_limits(run_here, "small", 3_000_000, few)
    assert copy.passed
    assert stream.passed
    assert limits.product_limit(run_here, Product(256, 128, 64, "fp16"), few).passed


def test_start_reads_the_device(monkeypatch):
    monkeypatch.setattr(runs.devices, "current", lambda: H200)
    monkeypatch.setattr(runs.devices, "versions", lambda: {"cupy": "14"})
    monkeypatch.setattr(runs.records, "commit", lambda: "from git")
    assert runs.start().commit == "from git"
    assert runs.start("given").commit == "given"


def test_clocks_are_null_without_nvml(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert H200.clocks() is None
    nvml = SimpleNamespace(
        nvmlInit=lambda: None, NVML_CLOCK_SM=1, NVML_CLOCK_MEM=2,
        nvmlDeviceGetHandleByPciBusId=lambda bus: bus, nvmlDeviceGetClockInfo=lambda bus, kind: kind * 1000,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert H200.clocks() == {"sm": 1000, "memory": 2000}
