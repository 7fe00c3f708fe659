"""Records as a GPU run of both suites would make them, with times by formula: for what reads records."""

from dataclasses import asdict, replace

import msgspec

from ropegrad.bench.contender import promising
from ropegrad.cost import qkv_cost, rope_cost
from ropegrad.records import Record, median_and_spread
from ropegrad.spec import RopeSpec
from ropegrad.suites import SUITES

FACTS = {
    "driver": "580.1", "clocks": {"sm": 1980, "memory": 3201}, "versions": {"cupy": "14.2.0"},
    "commit": "0123456789abcdef", "digest": "0" * 16, "date": "2026-11-30", "floor_us": None,
}  # fmt: skip
COMMAND = "python3 scripts/gpu --only time"


def record(op, case, us, *, backend, device="NVIDIA H200", protocol="graph", bits=None, **facts):
    """A record; `us` None: its check failed."""
    samples = [] if us is None else [round(us, 4)]
    median, spread = median_and_spread(samples) if samples else (None, None)
    given = {
        "op": op, "case": case, "backend": backend, "kernel": backend, "device": device, "protocol": protocol,
        "spec": {}, "command": COMMAND, "bytes_read": 10**6, "bytes_written": 10**6, "flops": 0,
        "samples_us": samples, "median_us": median, "spread_us": spread,
        "error_over_bound": {"grad_q": 0.5 if samples else 2.0}, "effective_bits": {"grad_q": bits},
    }  # fmt: skip
    return Record(**FACTS | given | facts)


def contender(op, case, us, name, *, formula=None, **facts):
    """A record of a suite's case by a contender."""
    spec = promising(SUITES[op]()[case], facts.get("precision"))
    cost = rope_cost(spec) if isinstance(spec, RopeSpec) else qkv_cost(spec)
    options = {"contender": name}
    if formula is not None:
        options |= {"contender": f"{name} {formula}", "formula": formula, "compiled": "compile" in name}
    return record(
        op, case, us, backend="torch" if formula else name, kernel=name, options=options,
        spec={"suite": op} | asdict(spec), bytes_read=cost.read, bytes_written=cost.written,
        flops=cost.flops, **facts,
    )  # fmt: skip


def rope_case(case, **where):
    """The ceilings at the case's bytes, then two of ours and PyTorch."""
    moved = rope_cost(SUITES["rope"]()[case]).moved
    ceiling = moved / 4.2e6 + 3
    half = {"bytes_read": moved // 2, "bytes_written": moved // 2, "spec": {"suite": "rope"}}
    yield record("copy", case, ceiling, backend="cuda", **half, **where)
    yield record("stream", case, 0.98 * ceiling, backend="cuda", **half, **where)
    yield contender("rope", case, 1.06 * ceiling, "cupy_plain", bits=24.6, **where)
    yield contender("rope", case, 1.5 * ceiling, "portable", bits=24.2, **where)
    yield contender("rope", case, 9.0 * ceiling, "torch eager", formula="reference", bits=23.6, **where)
    yield contender("rope", case, 2.2 * ceiling, "torch compile", formula="reference", bits=23.8, **where)
    yield contender("rope", case, 2.0 * ceiling, "torch compile", formula="halves", bits=23.8, **where)


def without_tables(case, suite="rope-qk", **where):
    """A suite of other gradients of the same cases: fewer bytes, its own ceilings, another rival."""
    cost = rope_cost(replace(SUITES["rope"]()[case], needs=("q", "k")))
    us, half = cost.moved / 4.2e6 + 3, {"bytes_read": cost.moved // 2, "bytes_written": cost.moved // 2}
    yield record("copy", case, us, backend="cuda", spec={"suite": suite}, **half, **where)
    for backend, slower in (("cupy_plain", 1.1), ("liger", 1.7)):
        facts = {"bytes_read": cost.read, "bytes_written": cost.written, "flops": cost.flops}
        facts |= {"spec": {"suite": suite} | asdict(replace(SUITES["rope"]()[case], needs=("q", "k")))}
        facts |= {"options": {"contender": backend}, "effective_bits": {"grad_q": 24.7}}
        yield record("rope", case, us * slower, backend=backend, **facts, **where)


def qkv_case(case, **where):
    """The bare products of each precision, ours at each promise, and PyTorch."""
    flops = qkv_cost(SUITES["qkv"]()[case]).flops
    for precision, rate in {"fp32": 50, "tf32": 300, "fp16": 700}.items():
        us = flops / rate / 1e6 + 5
        yield record("products", case, us, backend="cublas", precision=precision, flops=flops, **where)
    for precision, rate, bits in (("highest", 47, 20.8), ("high", 500, 11.7), ("medium", 600, 8.8)):
        us = flops / rate / 1e6 + 15
        yield contender("qkv", case, us, "cupy_plain", precision=precision, bits=bits, **where)
    for name, us in (("torch eager", flops / 4e7 + 60), ("torch compile", flops / 4.4e7 + 30)):
        facts = {"precision": "highest", "formula": "reference", "bits": 20.5}
        yield contender("qkv", case, us, name, **facts, **where)


def qkv_promises(case, faster=1.0, **where):
    """As a GPU run writes the case, every promise at once. faster: of ours below highest."""
    for one in qkv_case(case, **where):
        if one.op == "products":
            yield changed(one, spec={"suite": "qkv"}, effective_bits={"grad_weights": 11.8})
    flops = qkv_cost(SUITES["qkv"]()[case]).flops
    yield contender("qkv", case, flops / 4.7e7 + 15, "cupy_plain", precision="highest", bits=20.8, **where)
    for precision, rate, bits in (("highest", 46, 20.5), ("high", 250, 11.6), ("medium", 500, 8.4)):
        us = flops / rate / 1e6
        facts = {"precision": precision, "bits": bits, **where}
        for formula, slower in (("reference", 1.5), ("packed", 1.2)):
            yield contender("qkv", case, us * slower + 60, "torch eager", formula=formula, **facts)
            yield contender("qkv", case, us * slower + 30, "torch compile", formula=formula, **facts)
        if precision != "highest":
            ours = (us * 1.2 + 30) / faster
            yield contender("qkv", case, ours, "cupy_tensor", precision=precision, bits=bits + 0.2, **where)


def suites(**where):
    """All 32 cases."""
    makers = {"rope": rope_case, "qkv": qkv_case}
    return [one for op, make in makers.items() for case in SUITES[op]() for one in make(case, **where)]


def cpu():
    """As `ropegrad bench` writes them on a CPU: no bits, no precision, variants by kernel, two dtypes."""
    wall = {"device": "A CPU of some maker @ 2 GHz", "protocol": "wall", "clocks": None}
    wall |= {"driver": "Linux 6.1", "options": {"threads": 2}}
    base, qkv = SUITES["rope"]()["B=1 S=2048 H=64/8"], SUITES["qkv"]()["B=1 S=2048"]
    half = replace(base, dtype="bfloat16", table_dtype="bfloat16")
    cases = {"B=1 S=2048": base, "B=1 S=8192": replace(base, seq=8192), "bfloat16": half, "qkv": qkv}
    for name, spec in cases.items():
        op, cost = ("rope", rope_cost(spec)) if isinstance(spec, RopeSpec) else ("qkv", qkv_cost(spec))
        us, facts = cost.moved / 2e4, wall | {"spec": asdict(spec)}
        moved = {"bytes_read": cost.moved // 2, "bytes_written": cost.moved // 2}
        yield record("copy", name, us, backend="numpy", kernel="copyto", **moved, **facts)
        facts |= {"bytes_read": cost.read, "bytes_written": cost.written, "flops": cost.flops}
        for backend, kernel, slower in (
            ("numba_cpu", "out", 1.2), ("numba_cpu", "fresh", 1.6), ("numpy_tiled", "out", 3.8),
            ("numpy", "rotate_half", 18.0), ("torch.compile", "halves", 2.8), ("torch.compile", "roll", 9.0),
        ):  # fmt: skip
            yield record(op, name, us * slower, backend=backend, kernel=kernel, **facts, effective_bits={})


def changed(record, **facts):
    """The same record with other facts, for instance a time."""
    if "median_us" in facts:
        us = round(facts["median_us"], 4)
        facts |= {"samples_us": [us], "median_us": us, "spread_us": 0.0}
    return msgspec.structs.replace(record, **facts)
