"""How fast the one-pass RoPE kernel is in each configuration, beside the ceiling. Needs a GPU with CuPy.

For each workload of the rope suite: every configuration is checked against the oracle on a few tokens of
the same heads, and on the whole workload against the others; the right ones take turns with the stream kernel
and the copy of `ropegrad limits` at the same bytes; the best meet again in a longer run. Prints a table, and
writes JSON, an object a workload and contender of the longer run.

    python analysis/tune_rope.py [--cases N ... | --other N] [--samples N] [--all] [--rule] [--out FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import cupy

from ropegrad.arrays import nbytes, numpy_dtype
from ropegrad.backends.cupy_fused import describe
from ropegrad.backends.rope_bound import Bound, l2_of
from ropegrad.backends.rope_config import Config
from ropegrad.backends.rope_launch import prepare, wanted
from ropegrad.backends.rope_memory import NAMES, Memory, array_of, dense_memory
from ropegrad.bench import device as devices
from ropegrad.bench.streams import CONFIGS, arrays, copy_calls, elements, stream_calls
from ropegrad.bench.timing import Call, Timing, measure, sets_needed
from ropegrad.cost import rope_cost
from ropegrad.spec import RopeSpec
from ropegrad.suites import rope_suite
from ropegrad.verify import check, make_case
from ropegrad.verify.case import Case, NumpyArray
from ropegrad.verify.draws import input_shapes
from ropegrad.verify.runners import to_namespace, to_numpy

Arrays = dict[str, Any]


def others(count: int) -> Iterator[tuple[str, RopeSpec]]:
    """Workloads that no suite has: heads, ratios, widths, layouts and tables at random, 16 to 400 MB."""
    random = Random(2026)
    while count:
        kv_heads, ratio = (
            random.choice((1, 2, 4, 5, 6, 8, 16, 32)),
            random.choice((1, 2, 3, 4, 5, 6, 7, 8, 12)),
        )
        head_dim = random.choice((64, 80, 96, 112, 128, 160, 192, 256))
        batch, seq = random.choice((1, 2, 3, 4, 8)), random.randrange(100, 10_000)
        spec = RopeSpec(
            batch=batch, heads=kv_heads * ratio, kv_heads=kv_heads, seq=seq, head_dim=head_dim,
            rotary_dim=head_dim // random.choice((1, 1, 1, 2)),
            layout=random.choice(("bhsd", "bshd", "sbhd")),
            table_batch=batch, pairing=random.choice(("half", "half", "interleaved")),
            table=random.choice(("full", "full", "half")),
        )  # fmt: skip
        if kv_heads * ratio <= 128 and 16e6 <= rope_cost(spec).moved <= 4e8:
            count -= 1
            heads = f"B={batch} S={seq} H={spec.heads}/{kv_heads}"
            turned = f" R={spec.rotary_dim}" if spec.rotary_dim < head_dim else ""
            yield f"{heads} D={head_dim}{turned} {spec.layout} {spec.pairing} {spec.table}", spec


# ---- configurations ----------------------------------------------------------------------------------------


def candidates(spec: RopeSpec) -> Iterator[Config]:
    """Configurations to try: heads a thread, rows in flight, access width, lanes, tokens, registers."""
    size = nbytes((1,), spec.dtype)
    shapes = itertools.product((16, 8), (1, 2, 4, 8), (1, 2), (1, 2), (1, 2))
    for width, rows, turns, parts, tokens in shapes:
        lanes = spec.rotary_dim * size // (2 * width * parts)
        heads = rows * turns
        groups_q, groups_k = -(-(spec.heads or 0) // heads), -(-(spec.kv_heads or 0) // heads)
        config = Config(
            vector=width, lanes=lanes, tokens=tokens, groups_q=groups_q, groups_k=groups_k, rows=rows
        )
        registers = 24 + width * (4 + rows)  # about what the compiler takes for float32
        whole = turns == 1 or (rows == 2 and parts == 1)
        if whole and 64 <= config.threads <= 640 and config.groups <= 64 and registers <= 168:
            yield config
    if not {"cos", "sin"} & set(spec.needs):  # blocks need not have all heads
        for width, rows, tokens in itertools.product((16, 8), (1, 2, 4, 8), (2, 4, 8)):
            lanes = spec.rotary_dim * size // (2 * width)
            ratio = (spec.heads or 0) // (spec.kv_heads or 1)
            yield Config(vector=width, lanes=lanes, tokens=tokens, groups_q=ratio, groups_k=1, rows=rows)


def refined(best: list[Config]) -> Iterator[Config]:
    """The best ones with hints to the caches, and with fewer registers."""
    for config in best:
        for hint in (1, 2, 3):
            yield replace(config, hint=hint)
        for registers in (64, 96):
            yield replace(config, blocks=max(1, 65536 // (config.threads * registers)))


def label(config: Config) -> str:
    """For a table."""
    groups = f"{config.groups_q}+{config.groups_k}"
    return (
        f"v{config.vector} {config.lanes}x{config.tokens}x({groups}) r{config.rows} b{config.blocks} "
        f"h{config.hint}"
    )


# ---- right? ------------------------------------------------------------------------------------------------


def few_tokens(spec: RopeSpec, config: Config | None) -> str | None:
    """What is wrong with this configuration on a few tokens; None if nothing is."""
    case = make_case(replace(spec, batch=1, seq=5, table_batch=1), 1)

    def run(case: Case) -> dict[str, NumpyArray]:
        assert isinstance(case.spec, RopeSpec)
        inputs = {name: to_namespace(x, "cupy") for name, x in case.inputs.items() if x is not None}
        out = poisoned(case.spec)
        Bound(case.spec, config)(inputs, out)
        return {name: to_numpy(x) for name, x in out.items()}

    try:
        verdict = check(case, run)
    except Exception as error:  # cannot be compiled or launched: not a candidate
        return f"{type(error).__name__}: {error}"[:300]
    return None if verdict.passed else str(verdict.findings[0])


def poisoned(spec: RopeSpec) -> Arrays:
    """Outputs full of NaN."""
    made = {}
    for need in spec.needs:
        shape, dtype = spec.output(need)
        made[f"grad_{need}"] = cupy.empty(shape, numpy_dtype(dtype))
        made[f"grad_{need}"].view(cupy.uint8).fill(255)
    return made


def whole(spec: RopeSpec, config: Config | None, inputs: Arrays, reference: Arrays | None) -> Arrays:
    """Outputs for the whole workload. Raises AssertionError where they do not go with `reference`.

    grad_q and grad_k have the same bits in every configuration; sums in another order may differ by twice
    their bound, 2·γ_n·Σ|g·x|.
    """
    out = poisoned(spec)
    Bound(spec, config)(inputs, out)
    if reference is None:
        return out
    for name in {"grad_q", "grad_k"} & set(out):
        same = out[name].view(cupy.uint8) == reference[name].view(cupy.uint8)
        assert bool(same.all()), f"{name} differs"
    n = (spec.heads or 0) + (spec.kv_heads or 0)
    gamma = n * 2.0**-24 / (1 - n * 2.0**-24)
    unit = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}[spec.table_dtype]
    wide = {name: x.astype(cupy.float32) for name, x in inputs.items()}
    for name in {"grad_cos", "grad_sin"} & set(out):
        apart = spec.rotary_dim // 2 if name == "grad_sin" else 0
        magnitude = sum(
            abs(wide[f"grad_{s}_embed"] * cupy.roll(wide[s], apart, axis=-1)).sum(axis=1) for s in ("q", "k")
        )
        mine, other = (x[name].astype(cupy.float32) for x in (out, reference))
        bound = 2 * (1 + 2 * unit) * (gamma * magnitude + unit * abs(other))
        assert bool((abs(mine - other) <= bound).all()), f"{name} differs"
    return out


# ---- timing ------------------------------------------------------------------------------------------------


def input_sets(spec: RopeSpec, count: int) -> list[tuple[Arrays, Arrays]]:
    """`count` sets of random inputs and of outputs."""
    random = cupy.random.default_rng(2026)
    sets = []
    for _ in range(count):
        inputs = {
            name: narrowed(random.standard_normal(shape, dtype=cupy.float32), dtype)
            for name, (shape, dtype) in input_shapes(spec).items()
        }
        sets.append((inputs, poisoned(spec)))
    return sets


def narrowed(x: Any, dtype: str) -> Any:
    """A float32 array as this dtype; to bfloat16 by leaving bits away."""
    if dtype == "bfloat16":
        return (x.view(cupy.uint32) >> 16).astype(cupy.uint16).view(numpy_dtype(dtype))
    return x.astype(numpy_dtype(dtype), copy=False)


def calls(spec: RopeSpec, config: Config | None, sets: list[tuple[Arrays, Arrays]]) -> list[Call]:
    """A launch on each set."""
    bound = Bound(spec, config)
    return [partial(bound, inputs, out) for inputs, out in sets]


def tune(name: str, spec: RopeSpec, samples: int, every: bool, only: bool) -> list[dict[str, Any]]:
    """Time one workload; a line for each contender of the longer run."""
    here = devices.current()
    moved = rope_cost(spec).moved
    n, half = elements(moved), -(-moved // 2)
    sets = input_sets(spec, sets_needed(moved, here.l2))
    streams = arrays(sets_needed(48 * n, here.l2), [4 * n] * 3)
    copies = arrays(sets_needed(2 * half, here.l2), [-(-half // 4)] * 2)
    ceiling = {f"stream {c.name}": stream_calls(c, streams, here.multiprocessors) for c in CONFIGS}
    reference = whole(spec, None, sets[0][0], None)

    def right(configs: Iterator[Config]) -> dict[str, Config]:
        found = {}
        for config in configs:
            reason = few_tokens(spec, config)
            if reason is None:
                whole(spec, config, sets[0][0], reference)
                found[label(config)] = config
            else:
                print(f"  not {label(config)}: {reason}")
        return found

    def timed(configs: Mapping[str, Config], others: Mapping[str, list[Call]], n: int) -> dict[str, Timing]:
        ours = {key: calls(spec, config, sets) for key, config in configs.items()}
        return measure({**ours, **others}, "span", l2=here.l2, samples=n)

    reason = few_tokens(spec, None)
    assert reason is None, reason
    configs = right(iter(()) if only else candidates(spec))
    first = timed(configs, ceiling, 8)
    ranked = sorted(configs, key=lambda key: first[key].median_us)
    more = right(refined([configs[key] for key in ranked[:3]]))
    second = timed(more, {}, 8) if more else {}
    configs |= more
    ranked = sorted(configs, key=lambda key: {**first, **second}[key].median_us)
    fastest = sorted(ceiling, key=lambda key: first[key].median_us)[:3]
    finalists: dict[str, list[Call]] = {key: ceiling[key] for key in fastest}
    finalists |= {"copy": copy_calls(copies, half), "rule": calls(spec, None, sets)}
    final = timed({key: configs[key] for key in ranked[:6]}, finalists, samples)
    kept = {**first, **second, **final} if every else final
    rule = prepare(spec, dense(spec), l2_of(cupy.cuda.Device().id))
    best = min(final[key].median_us for key in ("copy", *fastest))
    return [
        {
            "case": name, "moved": moved, "contender": key, "median_us": round(taken.median_us, 3),
            "spread_us": round(taken.spread_us, 3), "ratio": round(taken.median_us / best, 4),
            "ceiling_us": round(best, 3), "protocol": taken.protocol, "device": here.name,
            "final": key in final,
            "config": asdict(configs[key]) if key in configs else None, "rule": describe(spec, rule)[-1],
        }
        for key, taken in kept.items()
    ]  # fmt: skip


def dense(spec: RopeSpec) -> tuple[Memory | None, ...]:
    """The memory of contiguous arrays."""
    return tuple(dense_memory(*array_of(spec, name)) if name in wanted(spec) else None for name in NAMES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", type=int, nargs="*", help="numbers of the suite's cases, from 0")
    parser.add_argument("--samples", type=int, default=30)
    parser.add_argument("--all", action="store_true", help="also write what left after the short runs")
    parser.add_argument("--other", type=int, default=0, help="so many workloads outside the suite instead")
    parser.add_argument("--rule", action="store_true", help="time only what the rule chooses")
    parser.add_argument("--dtype", default="float32", help="of everything: float32, float16 or bfloat16")
    parser.add_argument("--needs", nargs="+", default=["q", "k", "cos", "sin"])
    parser.add_argument("--out", default="tune-rope.json")
    given = parser.parse_args()
    suite = list(others(given.other)) if given.other else list(rope_suite().items())
    chosen = [suite[i] for i in given.cases] if given.cases else suite
    print(f"{devices.current().name}, CuPy {cupy.__version__}; microseconds, and their ratio to the ceiling")
    print(f"{'case':24} {'MB':>6} {'ceiling':>8} {'rule':>8} {'':6} {'best':>8} {'':6} configuration")
    started, ratios, everything = time.perf_counter(), [], []
    for name, spec in chosen:
        mine = replace(
            spec, namespace="cupy", needs=tuple(given.needs), dtype=given.dtype, table_dtype=given.dtype
        )
        lines = tune(name, mine, given.samples, given.all, given.rule)
        everything += lines
        Path(given.out).write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")
        final = {line["contender"]: line for line in lines if line["final"]}
        rule = final["rule"]
        ours = [line for line in final.values() if line["config"]] or [rule]
        best = min(ours, key=lambda line: line["median_us"])
        ratios.append((rule["median_us"], best["median_us"], rule["ceiling_us"]))
        print(
            f"{name:24} {rule['moved'] / 1e6:6.1f} {rule['ceiling_us']:8.2f} {rule['median_us']:8.2f} "
            f"{rule['ratio']:6.3f} {best['median_us']:8.2f} {best['ratio']:6.3f} {best['contender']}",
            flush=True,
        )
    for i, who in enumerate(("rule", "best")):
        mean = statistics.fmean(row[i] for row in ratios), statistics.fmean(row[2] for row in ratios)
        geometric = statistics.geometric_mean(row[i] / row[2] for row in ratios)
        print(
            f"{who}: mean {mean[0]:.2f} us, {mean[0] / mean[1]:.3f} x ceiling; geometric mean {geometric:.3f}"
        )
    print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
