"""RoPE's gradients past 2^31 elements: 1,000,000 tokens, 32 query and 8 key heads, 61 GB moved. Needs a GPU.

Right? Sampled tokens are judged against the oracle, and all of them by the adjoint identity: the gradients of
a bilinear map v·T satisfy <grad_v, v> = <grad_T, T>, summed here in float64. Fast? In turns with the tuned
stream kernel of `ropegrad limits` on the same arrays; 4,096 tokens likewise. Rates are of bytes moved.

    python analysis/large_rope.py [FILE]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cupy

import ropegrad as rg
from ropegrad.bench import device as devices
from ropegrad.bench.streams import CONFIGS, stream_calls
from ropegrad.bench.timing import Call, measure
from ropegrad.cost import rope_cost
from ropegrad.spec import RopeSpec
from ropegrad.verify import check, make_case
from ropegrad.verify.case import Case, NumpyArray
from ropegrad.verify.draws import input_shapes

TOKENS = (4096, 1_000_000)
SPEC = RopeSpec(
    batch=1, heads=32, kv_heads=8, seq=0, head_dim=128, rotary_dim=128, table_batch=1, namespace="cupy"
)
RUN = 1 << 13  # tokens of one temporary
SAMPLED = 96  # tokens for the oracle, the first and the last among them
INPUTS = ("grad_q_embed", "grad_k_embed", "q", "k", "cos", "sin")  # in the order of a call
Arrays = dict[str, Any]


def runs(tokens: int) -> Iterator[slice]:
    """All tokens, RUN at a time."""
    for start in range(0, tokens, RUN):
        yield slice(start, min(start + RUN, tokens))


def inputs_of(spec: RopeSpec) -> Arrays:
    """Random normal numbers, drawn in runs: no generator is trusted with more than 2^31 of them."""
    random = cupy.random.default_rng(2026)
    made = {}
    for name, (shape, _) in input_shapes(spec).items():
        made[name] = cupy.empty(shape, cupy.float32)
        for run in runs(spec.seq):
            part = made[name][..., run, :]
            part[...] = random.standard_normal(part.shape, dtype=cupy.float32)
    return made


def sampled(spec: RopeSpec, inputs: Arrays, grads: Arrays) -> float:
    """Worst error over bound of some tokens. Raises AssertionError where one is wrong."""
    chosen = cupy.random.default_rng(1).integers(0, spec.seq, SAMPLED)
    chosen[:2] = cupy.asarray([0, spec.seq - 1])

    def few(x: Any) -> NumpyArray:
        rows: NumpyArray = x[..., chosen, :].get()
        return rows

    drawn = make_case(replace(spec, seq=SAMPLED, namespace="numpy"), 1)
    case = replace(drawn, inputs={name: few(x) for name, x in inputs.items()})

    def results(case: Case) -> dict[str, NumpyArray]:
        return {name: few(x) for name, x in grads.items()}

    verdict = check(case, results)
    assert verdict.passed, verdict.findings
    return max(ratio for ratio in verdict.worst.values() if ratio is not None)


def adjoint(spec: RopeSpec, inputs: Arrays, grads: Arrays) -> tuple[float, float]:
    """|<grad_q, q> + <grad_k, k> - <grad_cos, cos> - <grad_sin, sin>| and what rounding allows of it.

    Each side errs by at most γ_n of the sum of the magnitudes of its terms g·x·c and g·x·s, n = heads + 2.
    """
    difference, magnitude = 0.0, 0.0
    turned = spec.rotary_dim // 2
    for run in runs(spec.seq):
        part = {name: x[..., run, :].astype(cupy.float64) for name, x in (inputs | grads).items()}
        difference += float(sum((part[f"grad_{n}"] * part[n]).sum() for n in ("q", "k")))
        difference -= float(sum((part[f"grad_{n}"] * part[n]).sum() for n in ("cos", "sin")))
        for side in ("q", "k"):
            g, x = abs(part[f"grad_{side}_embed"]), abs(part[side])
            other = cupy.roll(x, turned, axis=-1)
            magnitude += float((g * (x * abs(part["cos"]) + other * abs(part["sin"]))).sum())
    n = (spec.heads or 0) + (spec.kv_heads or 0) + 2
    gamma = n * 2.0**-24 / (1 - n * 2.0**-24)
    return abs(difference), 2 * gamma * magnitude


def timed(spec: RopeSpec, inputs: Arrays, grads: Arrays) -> dict[str, Any]:
    """Our rate beside the tuned stream's."""
    here = devices.current()
    arrays, out = tuple(inputs[name] for name in INPUTS), tuple(grads.values())
    plan = rg.plan_rope_backward(spec)
    set_of = [inputs["grad_q_embed"].ravel(), inputs["q"].ravel(), grads["grad_q"].ravel()]
    contenders: dict[str, list[Call]] = {"ours": [partial(plan, *arrays, out=out)]}
    for config in CONFIGS:
        contenders[config.name] = stream_calls(config, [set_of], here.multiprocessors)
    seen = measure(contenders, "span", l2=here.l2, samples=9)
    best = min((key for key in seen if key != "ours"), key=lambda key: seen[key].median_us)
    ours = rope_cost(spec).moved / seen["ours"].median_us / 1e6
    ceiling = 3 * set_of[0].nbytes / seen[best].median_us / 1e6
    return {
        "protocol": seen["ours"].protocol, "median_us": seen["ours"].median_us, "TB_per_s": ours,
        "stream": best, "stream_TB_per_s": ceiling, "share_of_stream": ours / ceiling,
    }  # fmt: skip


def main(file: str = "") -> None:
    """Check, time, print, and write JSON."""
    lines = []
    for tokens in TOKENS:
        spec = replace(SPEC, seq=tokens)
        inputs = inputs_of(spec)
        grads = rg.rope_backward(**inputs)._asdict()
        worst = sampled(spec, inputs, grads)
        difference, allowed = adjoint(spec, inputs, grads)
        assert difference <= allowed, (difference, allowed)
        line: dict[str, Any] = {
            "tokens": tokens, "elements": inputs["q"].size, "moved": rope_cost(spec).moved,
            "sampled_tokens": SAMPLED, "worst_error_over_bound": worst,
            "adjoint_difference_over_bound": difference / allowed, "device": devices.current().name,
        }  # fmt: skip
        line |= timed(spec, inputs, grads)
        lines.append(line)
        del inputs, grads
        cupy.get_default_memory_pool().free_all_blocks()
        print(
            f"{tokens:9,} tokens, {line['elements']:,} elements of q: sampled rows at {worst:.3f} of their "
            f"bound, adjoint identity at {difference / allowed:.2g}; {line['TB_per_s']:.3f} TB/s, "
            f"{line['share_of_stream']:.3f} of the tuned stream's",
            flush=True,
        )
    if file:
        Path(file).write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
