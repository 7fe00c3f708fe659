"""For a test-suite: one call that raises AssertionError with the whole verdict, or returns."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from ropegrad.verify.battery import battery, property_recipes
from ropegrad.verify.domain import Domain
from ropegrad.verify.examine import UNSTEADY, Examination, examine, explain
from ropegrad.verify.process import Process
from ropegrad.verify.runner import Here, Runner
from ropegrad.verify.target import Contract


def assert_gradients(
    function: Callable[..., Any] | str,
    *,
    op: str = "rope",
    contract: Contract | None = None,
    domain: Domain = Domain(),  # noqa: B008  frozen
    examples: int = 0,
    timeout: float = 30.0,
) -> None:
    """Put dozens of problems to a function; AssertionError with the fault's name if it is wrong.

    function   a backward, or what `contract` says it is: called in this process. A string, as
               "package.module:function" or "path/to/file.py:function", is called in a process of its own,
               where a call may take `timeout` seconds.
    op         rope or qkv; contract: all of what it promises (its op then counts), domain: for which problems
    examples   so many more problems, drawn by Hypothesis from fixed seeds, failures made small

    Raises NoTarget where a string names no function, AssertionError where it declines everything.
    """
    contract = contract or Contract(op=op)
    here = nullcontext(Here(function, contract)) if callable(function) else None
    with here or Process(str(function), contract, timeout=timeout) as runner:
        properties = property_recipes(contract, domain)
        seen = examine(runner, battery(contract, domain), domain, _silent, properties=properties)
        if seen.status == 0 and examples:
            seen = _search(runner, domain, examples)
    if seen.status == 2:
        raise AssertionError("the function could not be judged: it declines every problem")
    if seen.status:
        raise AssertionError(sentences(seen))


def _silent(what: str) -> None:
    """No progress is shown."""


def _search(runner: Runner, domain: Domain, examples: int) -> Examination:
    from ropegrad.verify.fuzz import search  # Hypothesis takes a while to load

    found = search(runner, domain, examples=examples, start=0)
    seen = Examination(found.contract, found.domain, trials=[*found.failures, *found.passed])
    explain(runner, seen, _silent)
    return seen


def sentences(seen: Examination) -> str:
    """All that is known of the broken rules, a line each."""
    lines = []
    for broken in seen.broken:
        lines.append(f"{broken.rule}, in {broken.cases} problems; the smallest: {broken.recipe}")
        for fault in broken.faults:
            lines.append(f"    {fault.message}")
            if fault.names:
                lines.append(f"    diagnosis: {fault.array}: {'; '.join(fault.names)}")
        if not broken.steady:
            lines.append(f"    {UNSTEADY}")
        if broken.excuses:
            lines.append(f"    no fault was seen inside the domain {' or '.join(broken.excuses)}")
    return "\n".join(lines)
