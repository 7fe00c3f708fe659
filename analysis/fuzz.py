"""Judge a backend on thousands of random problems, in several processes.

    python analysis/fuzz.py BACKEND [EXAMPLES] [FILE]

EXAMPLES are shared by the operations that the backend can run; each process draws with a seed of its own.
cupy_tensor is judged at every promise, `highest` in both of its ways, half of its problems with an
adversarial range (tests/wide_ranges.py).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from ropegrad.backends import cupy_tensor, qkv_workspace
from ropegrad.backends.qkv_workspace import LEAST, MOST
from ropegrad.spec import QkvSpec
from ropegrad.tiles import cores
from ropegrad.verify.case import Case
from ropegrad.verify.check import check
from ropegrad.verify.conformance import backends_of
from ropegrad.verify.placing import MEMORY
from ropegrad.verify.runners import run_backend
from ropegrad.verify.strategies import SEEDS, cases, qkv_specs
from ropegrad.verify.survey import SPECS, survey

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from wide_ranges import KINDS, widened  # type: ignore[import-not-found]

SEED = 2026
NARROW = "cupy_tensor"
# Precisions, and the shortest sums that `highest` makes of two terms: here any, or none.
PROMISES = {"highest, float32": ("highest", MOST), "highest, two terms": ("highest", 1),
            "high": ("high", LEAST), "medium": ("medium", LEAST)}  # fmt: skip
# Dtype, the tables' dtype, pairing, table, accumulate: kernels are compiled for each, so not all are drawn.
FORMS = (
    ("float32", "float32", "half", "full", False), ("float32", "float32", "interleaved", "half", True),
    ("float32", "bfloat16", "half", "half", False), ("float32", "float16", "interleaved", "full", False),
    ("bfloat16", "bfloat16", "half", "full", True), ("bfloat16", "float32", "interleaved", "half", False),
    ("float16", "float16", "half", "half", True), ("float16", "float32", "interleaved", "full", False),
)  # fmt: skip
Job = Callable[[], dict[str, Any]]


def narrow_survey(promise: str, form: tuple[str, str, str, str, bool], examples: int, number: int) -> Any:
    """As `survey`, of projections at one promise and in one form."""
    dtype, table_dtype, pairing, table, accumulate = form
    precision, qkv_workspace.LEAST = PROMISES[promise]
    for remembered in (cupy_tensor.needed, cupy_tensor.prepared):
        remembered.cache_clear()
    facts = {"dtype": dtype, "table_dtype": table_dtype, "pairing": pairing, "table": table}
    seen, drawn, worst = set[QkvSpec](), 0, dict[str, float]()

    def formed(spec: QkvSpec) -> QkvSpec:
        rope = replace(spec.rope, accumulate=accumulate, **facts)  # type: ignore[arg-type]
        return replace(spec, rope=rope, precision=precision)

    @seed(number)
    @settings(
        max_examples=examples, deadline=None, database=None, print_blob=False,
        suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink],
    )  # fmt: skip
    @given(
        case=cases(
            qkv_specs(dtypes=(dtype,)).map(formed),
            st.sampled_from([kind for kind in MEMORY if kind != "misaligned"]),
        ),
        kind=st.sampled_from(("", *KINDS)), wide=st.booleans(), other=SEEDS, into=st.booleans(),
    )  # fmt: skip
    def body(case: Case, kind: str, wide: bool, other: int, into: bool) -> None:
        nonlocal drawn
        if wide and kind:
            case = widened(case, kind, other)
        verdict = check(case, partial(run_backend, backend=NARROW, namespace="cupy", into=into))
        assert verdict.passed, (kind if wide else "", promise, verdict.findings)
        for output, ratio in verdict.worst.items():
            worst[output] = max(ratio, worst.get(output, 0.0))
        drawn += 1
        assert isinstance(case.spec, QkvSpec)
        seen.add(case.spec)

    body()
    return {
        "op": "qkv", "precision": promise, "form": form, "examples": drawn, "specs": seen, "seed": number,
        "worst_error_over_bound": {NARROW: worst},
    }  # fmt: skip


def jobs(backend: str, examples: int) -> Iterator[Job]:
    """What the processes do."""
    if backend == NARROW:
        ways = list(product(PROMISES, FORMS))
        share = -(-examples // len(ways))
        for number, (promise, form) in enumerate(ways):
            yield partial(narrow_survey, promise, form, share, SEED + number)
        return
    ops = [op for op in SPECS if backend in backends_of(op)]
    each = max(cores() // (2 * len(ops)), 1)
    share = -(-examples // (len(ops) * each))
    for op in ops:
        for number in range(each):
            yield partial(survey, op, [backend], share, SEED + number)


def call(job: Job) -> dict[str, Any]:
    """What a process is given."""
    return job()


def main(backend: str, examples: str = "7000", file: str = "") -> int:
    """Print, and write a JSON line a process; a wrong gradient raises with the smallest problem."""
    todo = list(jobs(backend, int(examples)))
    workers = min(len(todo), max(cores() // 2, 2))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        rows = list(pool.map(call, todo))
    specs = set().union(*(row["specs"] for row in rows))
    if file:
        Path(file).write_text(json.dumps([row | {"specs": len(row["specs"])} for row in rows], indent=1))
    worst = max(max(row["worst_error_over_bound"][backend].values()) for row in rows)
    drawn = sum(row["examples"] for row in rows)
    ops = " and ".join(dict.fromkeys(row["op"] for row in rows))
    print(f"{backend}: {drawn} problems of {ops}, {len(specs)} specs, worst {worst:.6f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
