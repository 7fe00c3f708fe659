"""What a call of rope_backward costs the host, on a GPU with CuPy. Prints a Markdown table, microseconds.

The problem is so small that the GPU is never the one that is waited for.

    python analysis/launch_cost.py [--first]

--first: the first call of this process, after import and context, instead.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace

import cupy

import ropegrad as rg
from ropegrad.spec import RopeSpec

SPEC = RopeSpec(
    batch=1, heads=32, kv_heads=8, seq=2, head_dim=128, rotary_dim=128, table_batch=1, namespace="cupy"
)
CALLS = 5000


def cost(call: Callable[[], object]) -> float:
    """Microseconds a call, the best of five runs."""
    best = float("inf")
    for _ in range(5):
        cupy.cuda.Device().synchronize()
        start = time.perf_counter()
        for _ in range(CALLS // 5):
            call()
        best = min(best, time.perf_counter() - start)
        cupy.cuda.Device().synchronize()
    return best / (CALLS // 5) * 1e6


def main() -> None:
    """Print it."""
    random = cupy.random.default_rng(1)
    q, k = (SPEC.head_shape(heads) for heads in (32, 8))
    shapes = (q, k, q, k, SPEC.table_shape, SPEC.table_shape)
    arrays = tuple(random.standard_normal(shape, dtype=cupy.float32) for shape in shapes)
    out = tuple(cupy.empty_like(x) for x in arrays[2:])
    cupy.cuda.Device().synchronize()
    if "--first" in sys.argv:
        start = time.perf_counter()
        rg.rope_backward(*arrays, out=out)
        cupy.cuda.Device().synchronize()
        print(f"first call: {time.perf_counter() - start:.3f} s")
        return
    plan = rg.plan_rope_backward(SPEC)
    graph = plan.graph(*arrays, out=out)
    plain = rg.plan_rope_backward(replace(SPEC), backend="cupy_plain")
    rows: dict[str, Callable[[], object]] = {
        "`rope_backward(…, out=)`": lambda: rg.rope_backward(*arrays, out=out),
        "`rope_backward(…)`": lambda: rg.rope_backward(*arrays),
        "`plan(…, out=)`": lambda: plan(*arrays, out=out),
        "`plan(…)`": lambda: plan(*arrays),
        "`graph()`": graph,
        "`cupy_plain`, `plan(…, out=)`": lambda: plain(*arrays, out=out),
    }
    print("| | us |\n|---|--:|")
    for name, call in rows.items():
        print(f"| {name} | {cost(call):.1f} |")


if __name__ == "__main__":
    main()
