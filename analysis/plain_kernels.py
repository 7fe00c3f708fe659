"""The two kernels of `cupy_plain`, each beside the ceiling of its own bytes, into FILE.

    python analysis/plain_kernels.py FILE

At B=1 H=32 D=128, 2,048 tokens (where the whole of rope_backward moves 130 MB with 8 kv heads) and 4,096.
Both are checked against CuPy's own arithmetic first. Needs a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ropegrad import records
from ropegrad.backends.cupy_plain import rotation, table_sums
from ropegrad.bench.limits import Samples, Tuned
from ropegrad.bench.run import Run, start
from ropegrad.bench.timing import Call, measure, sets_needed
from ropegrad.records import Record

HEADS, WIDTH = 32, 128
Arrays = dict[str, Any]


def arrays(tokens: int) -> Arrays:
    """Random g and x [1, H, S, D], tables [1, 1, S, D], and room for the results."""
    import cupy

    random = cupy.random.default_rng(1)
    shapes = {"g": (1, HEADS, tokens, WIDTH), "cos": (1, 1, tokens, WIDTH)}
    shapes |= {"x": shapes["g"], "dx": shapes["g"], "sin": shapes["cos"]}
    made = {name: random.standard_normal(shape, dtype=cupy.float32) for name, shape in shapes.items()}
    return made | {name: cupy.empty((1, tokens, WIDTH), cupy.float32) for name in ("dcos", "dsin")}


def members(x: Any) -> tuple[Any, Any]:
    """The two halves of the last axis."""
    return x[..., : WIDTH // 2], x[..., WIDTH // 2 :]


def rotate(a: Arrays) -> None:
    """The ElementwiseKernel, as `cupy_plain` launches it."""
    pairs = [members(a[name][:, start::2]) for name in ("g", "dx") for start in (0, 1)]
    (c1, c2), (s1, s2) = members(a["cos"]), members(a["sin"])
    rotation("float32", False, False, 2)(*pairs[0], *pairs[1], c1, c2, s2, s1, *pairs[2], *pairs[3])


def add_up(a: Arrays) -> None:
    """The ReductionKernel, as `cupy_plain` launches it."""
    table_sums("float32")(
        *members(a["g"]), *members(a["x"]), *members(a["dcos"]), *members(a["dsin"]), axis=1
    )


def errors(a: Arrays) -> dict[str, dict[str, float]]:
    """Worst error/bound of each kernel's result, in float64: γ_2 and γ_H times the sum of magnitudes."""
    import cupy

    rotate(a)
    add_up(a)
    g, x, c, s = (a[name].astype(cupy.float64) for name in ("g", "x", "cos", "sin"))
    (g1, g2), (x1, x2), (c1, c2), (s1, s2) = map(members, (g, x, c, s))
    u = 2.0**-24

    def worst(got: Any, parts: Sequence[tuple[Any, Any]], n: int) -> float:
        exact, size = (cupy.concatenate([part[i] for part in parts], axis=-1) for i in (0, 1))
        return float((abs(got - exact) / (n * u / (1 - n * u) * size)).max())

    rotated = [
        (g1 * c1 + g2 * s2, abs(g1 * c1) + abs(g2 * s2)),
        (g2 * c2 - g1 * s1, abs(g2 * c2) + abs(g1 * s1)),
    ]

    def summed(*products: Any) -> list[tuple[Any, Any]]:
        return [(product.sum(axis=1), abs(product).sum(axis=1)) for product in products]

    return {
        "rotation": {"dx": worst(a["dx"], rotated, 2)},
        "table_sums": {
            "dcos": worst(a["dcos"], summed(g1 * x1, g2 * x2), HEADS),
            "dsin": worst(a["dsin"], summed(-g1 * x2, g2 * x1), HEADS),
        },
    }


def measured(run: Run, tokens: int) -> list[Record]:
    """Ceiling and both kernels at so many tokens, in turns."""
    big, table = 4 * HEADS * tokens * WIDTH, 4 * tokens * WIDTH
    sets = [arrays(tokens) for _ in range(sets_needed(2 * big, run.device.l2))]
    error, samples = errors(sets[0]), Samples()
    ceiling = Tuned(run, 2 * big + 2 * table, samples)
    calls: dict[str, list[Call]] = {
        name: [lambda a=a, call=call: call(a) for a in sets]  # type: ignore[misc]
        for name, call in (("rotation", rotate), ("table_sums", add_up))
    }
    timings = measure(ceiling.contenders | calls, "span", l2=run.device.l2, samples=samples.final)
    case = f"S={tokens}"
    found = list(ceiling.records(case, timings))
    moved = {"rotation": (big + 2 * table, big), "table_sums": (2 * big, 2 * table)}
    for name, (read, written) in moved.items():
        found.append(run.record(
            "kernel", case, timings[name], error[name], backend="cupy_plain", kernel=name,
            spec={"heads": HEADS, "seq": tokens, "head_dim": WIDTH},
            bytes_read=read, bytes_written=written, flops=0,
        ))  # fmt: skip
    return found


def main(file: str, commit: str | None = None) -> None:
    """Measure, write the records, print each kernel's share of the ceiling's rate."""
    run = start(commit, "python analysis/plain_kernels.py FILE")
    found = [record for tokens in (2048, 4096) for record in measured(run, tokens)]
    records.write(Path(file), found)
    for case in dict.fromkeys(record.case for record in found):
        rows = [record for record in found if record.case == case]
        best = min(r.median_us for r in rows if r.op in ("copy", "stream") and r.median_us)
        for row in (r for r in rows if r.op == "kernel"):
            assert row.median_us is not None, f"{row.kernel} is wrong: {row.error_over_bound}"
            share = best / row.median_us
            size = f"{row.bytes / 1e6:.0f} MB"
            print(f"{case} {row.kernel}: {row.median_us:.1f} µs for {size}, ceiling {best:.1f}: {share:.0%}")


if __name__ == "__main__":
    main(*sys.argv[1:])
