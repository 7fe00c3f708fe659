"""Thousands of problems drawn at random, and the worst error/bound of each backend over all of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from ropegrad.verify.case import Case
from ropegrad.verify.check import check_all
from ropegrad.verify.conformance import NAMESPACES
from ropegrad.verify.runners import run_backend
from ropegrad.verify.strategies import cases, qkv_specs, rope_specs

SPECS: dict[str, Callable[[], st.SearchStrategy[Any]]] = {"rope": rope_specs, "qkv": qkv_specs}


def survey(op: str, backends: list[str], examples: int, number: int) -> dict[str, Any]:
    """Judge so many problems of one operation on all backends; `number` seeds the draw.

    Returns examples drawn, the different specs among them, the worst error/bound of every output. Raises
    AssertionError with the findings of the smallest problem that a backend gets wrong.
    """
    seen: set[Any] = set()
    worst: dict[str, dict[str, float]] = {name: {} for name in backends}
    drawn = 0

    @seed(number)
    @settings(
        max_examples=examples, deadline=None, database=None, print_blob=False,
        suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink],
    )  # fmt: skip
    @given(case=cases(SPECS[op]()), into=st.booleans())
    def body(case: Case, into: bool) -> None:
        nonlocal drawn
        functions = {
            name: partial(run_backend, backend=name, namespace=NAMESPACES.get(name, "numpy"), into=into)
            for name in backends
        }
        for name, verdict in check_all(case, functions).items():
            assert verdict.passed, (name, verdict.findings)
            for output, ratio in verdict.worst.items():
                worst[name][output] = max(ratio, worst[name].get(output, 0.0))
        drawn += 1
        seen.add(case.spec)

    body()
    return {
        "op": op, "examples": drawn, "specs": seen, "seed": number, "worst_error_over_bound": worst,
    }  # fmt: skip
