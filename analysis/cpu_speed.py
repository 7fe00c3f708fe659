"""How fast the CPU path is beside plain NumPy, and what a call costs at least. Prints a Markdown table.

Both are checked against the oracle first; then they take turns, and the median of their times is shown.
"""

from __future__ import annotations

import statistics
import time
import timeit
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import ropegrad as rg
from ropegrad.info import info
from ropegrad.spec import QkvSpec, RopeSpec
from ropegrad.verify import Case, check, make_case
from ropegrad.verify.conformance import own_backends

ROPE = RopeSpec(batch=1, heads=32, kv_heads=8, seq=2048, head_dim=128, rotary_dim=128, table_batch=1)
QKV = QkvSpec(
    rope=RopeSpec(
        batch=1, heads=24, kv_heads=4, seq=2048, head_dim=96, rotary_dim=96, table_batch=1, needs=()
    ),
    hidden_size=1536,
)  # the one of problem 064's workloads with 2,048 tokens in one batch
ROUNDS = 15
Arrays = tuple[np.ndarray[Any, Any], ...]


def rotate_half(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """(−x2, x1), as model code writes it."""
    half = x.shape[-1] // 2
    return np.concatenate([-x[..., half:], x[..., :half]], axis=-1)


def unrotate(g: np.ndarray[Any, Any], cos: np.ndarray[Any, Any], sin: np.ndarray[Any, Any]) -> Any:
    """The adjoint of x·cos + rotate_half(x)·sin."""
    return g * cos - rotate_half(g * sin)


def naive_rope(gq: Any, gk: Any, q: Any, k: Any, cos: Any, sin: Any) -> Arrays:
    """Gradients of RoPE in plain NumPy."""
    c, s = cos[:, None], sin[:, None]
    grad_cos = (gq * q).sum(axis=1) + (gk * k).sum(axis=1)
    grad_sin = (gq * rotate_half(q)).sum(axis=1) + (gk * rotate_half(k)).sum(axis=1)
    return unrotate(gq, c, s), unrotate(gk, c, s), grad_cos, grad_sin


def naive_qkv(gq: Any, gk: Any, gv: Any, x: Any, wq: Any, wk: Any, wv: Any, cos: Any, sin: Any) -> Arrays:
    """Gradients of the projections and RoPE in plain NumPy."""
    c, s = cos[:, None], sin[:, None]
    rows = [g.transpose(0, 2, 1, 3).reshape(-1, g.shape[1] * g.shape[3])
            for g in (unrotate(gq, c, s), unrotate(gk, c, s), gv)]  # fmt: skip
    tokens = x.reshape(-1, x.shape[-1])
    hidden = rows[0] @ wq + rows[1] @ wk + rows[2] @ wv
    return (hidden.reshape(x.shape), *(row.T @ tokens for row in rows))


def race(contestants: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median seconds of each, taking turns; a turn is one call to warm up and one that is timed."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(ROUNDS):
        for name, run in contestants.items():
            run()
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(seen) for name, seen in times.items()}


def judge(case: Case, function: Callable[..., Any]) -> None:
    """Raise unless the function's gradients are inside their bounds."""
    verdict = check(case, lambda case: dict(zip(case.outputs, function(*case.inputs.values()), strict=True)))
    if not verdict.passed:
        raise SystemExit(f"not timed, because wrong: {verdict.findings}")


def compare(
    title: str, spec: RopeSpec | QkvSpec, ours: Callable[..., Any], naive: Callable[..., Any]
) -> None:
    """One line of the table."""
    case = make_case(spec, 1)
    backends = [name for name in ("numpy_tiled", "numba_cpu") if name in own_backends(spec)]
    judge(case, naive)
    for name in backends:
        judge(case, partial(ours, backend=name))
    arrays = list(case.inputs.values())
    out = tuple(np.empty(*spec.output(need)) for need in spec.needs)
    runs: dict[str, Callable[[], object]] = {"naive": lambda: naive(*arrays)}
    runs |= {name: partial(ours, *arrays, out=out, backend=name) for name in backends}
    runs["fresh"] = partial(ours, *arrays, backend="numpy_tiled")
    times = race(runs)
    cells = [f"{1e3 * times['naive']:.1f}", f"{1e3 * times['fresh']:.1f}"]
    for name in ("numpy_tiled", "numba_cpu"):
        cells += (
            [f"{1e3 * times[name]:.1f}", f"{times['naive'] / times[name]:.2f} ×"]
            if name in times
            else ["-", "-"]
        )
    print(f"| {title} | {' | '.join(cells)} |")


def products_alone() -> float:
    """Median seconds of the two matrix products of QKV: what no NumPy code can do without."""
    rows, size = sum(map(QKV.rows, "qkv")), QKV.hidden_size or 0
    rng = np.random.default_rng(1)
    packed, weights, hidden = (
        rng.standard_normal(shape, dtype=np.float32)
        for shape in ((QKV.tokens, rows), (rows, size), (QKV.tokens, size))
    )
    out = np.empty_like(hidden), np.empty_like(weights)

    def run() -> None:
        np.matmul(packed, weights, out=out[0])
        np.matmul(packed.T, hidden, out=out[1])

    return race({"products": run})["products"]


def main() -> None:
    """Print the machine, the table and the cost of the smallest call."""
    facts = info()
    print(f"{facts['cpu']}, {facts['cores']} cores, {facts['blas']}, NumPy {np.__version__}, float32\n")
    print(
        "| | plain NumPy, ms | `numpy_tiled`, ms | with `out=` | faster | `numba_cpu` with `out=` | faster |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|")
    compare("rope, B=1 H=32 Hkv=8 S=2048 D=128", ROPE, rg.rope_backward, naive_rope)
    compare("qkv, 2,048 tokens, C=1536 H=24 Hkv=4 D=96", QKV, rg.qkv_rope_backward, naive_qkv)
    print(f"\nThe two matrix products of that qkv, and nothing else: {1e3 * products_alone():.1f} ms")
    tiny = RopeSpec(batch=1, heads=1, kv_heads=1, seq=1, head_dim=2, rotary_dim=2, table_batch=1)
    arrays = list(make_case(tiny, 1).inputs.values())
    cost = statistics.median(timeit.repeat(lambda: rg.rope_backward(*arrays), number=2000, repeat=9)) / 2000
    print(f"The smallest call, rope of shape (1, 1, 1, 2): {1e6 * cost:.0f} µs")


if __name__ == "__main__":
    main()
