"""How many of the planted wrong kernels would the usual tolerances catch? Prints a Markdown table.

Every policy compares with the exact result, and gets two chances: one ordinary problem, as most test-suites
have it (normal values, tables of real positions, contiguous), and ropegrad's own problems. An exception, a
missing result or a wrong shape counts as caught. The wrong kernels are those of tests/faults.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ropegrad.verify.battery import battery
from ropegrad.verify.calling import named
from ropegrad.verify.domain import Domain
from ropegrad.verify.examine import Examination, broken_rules
from ropegrad.verify.oracle import expected
from ropegrad.verify.recipe import Recipe
from ropegrad.verify.runner import Here
from ropegrad.verify.target import Contract
from ropegrad.verify.trial import attempt

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "faults")]

FINITE = ("normal", "coded", "zeros", "sparse", "tiny_gradients", "scales", "dominating", "subnormal")

Close = Callable[[Any, Any], bool]
Array = np.ndarray[Any, Any]


def close(rtol: float, atol: float, share: float = 1.0) -> Close:
    """numpy.isclose on so large a share of the elements."""

    def policy(got: Array, exact: Array) -> bool:
        with np.errstate(all="ignore"):
            alike = np.isclose(got.astype(np.float64), exact, rtol=rtol, atol=atol, equal_nan=True)
        return bool(np.mean(alike) >= share) if alike.size else True

    return policy


POLICIES: dict[str, tuple[Close, str]] = {
    "1e-2 / 1e-2 on 99 % of the elements": (close(1e-2, 1e-2, 0.99), "float32"),
    "1e-2 / 1e-3": (close(1e-2, 1e-3), "float32"),
    "1e-5 / 1e-5": (close(1e-5, 1e-5), "float32"),
    "1e-3 / 1e-5 in float64 (defaults of torch's gradcheck)": (close(1e-3, 1e-5), "float64"),
}


def passes(function: Any, contract: Contract, recipe: Recipe, policy: Close) -> bool:
    """Whether a policy finds nothing wrong with one call."""
    case = recipe.case()
    arrays = [None if x is None else np.array(x) for x in case.inputs.values()]
    exact = expected(case)
    forms = [case.spec.output(need) for need in case.spec.needs]
    outputs = [_room(shape, dtype) for shape, dtype in forms] if contract.dps else []
    try:
        found = function(*arrays, *outputs)
        results = dict(zip(exact, outputs, strict=True)) if contract.dps else named(found, tuple(exact))
        if isinstance(results, str):
            return False
        pairs = [(results[name], one.value) for name, one in exact.items()]
        return all(g.shape == e.shape and policy(g, e) for g, e in pairs)
    except Exception:
        return False


def _room(shape: tuple[int, ...], dtype: str) -> Array:
    """Zeros with room behind them: one of the wrong kernels writes there."""
    size = int(np.prod(shape))
    return np.zeros(size + 64, dtype)[:size].reshape(shape)


def alarm(function: Any, contract: Contract, policy: Close, dtype: str, recipes: Iterable[Recipe]) -> bool:
    """Whether a policy calls the function wrong on any of the problems."""
    getattr(function, "fresh", lambda: None)()
    contract = replace(contract, dtype=dtype, table_dtype=dtype)
    return not all(passes(function, contract, in_dtype(recipe, dtype), policy) for recipe in recipes)


def tried(contract: Contract, domain: Domain) -> list[Recipe]:
    """Ropegrad's problems without NaN, Inf and overflow, which a comparison alone does not understand."""
    return [r for r in battery(contract, domain) if r.values in FINITE and r.tables != "nonfinite"]


def in_dtype(recipe: Recipe, dtype: str) -> Recipe:
    """The same problem with other numbers."""
    rope = replace(recipe.rope, dtype=dtype, table_dtype=dtype)
    spec = rope if recipe.spec is recipe.rope else replace(recipe.spec, rope=rope)  # type: ignore[arg-type]
    return replace(recipe, spec=spec)


def ordinary(contract: Contract) -> Recipe:
    """What most test-suites try."""
    hidden = 64 if contract.op == "qkv" else None
    spec = contract.spec(batch=2, heads=8, kv_heads=2, seq=64, head_dim=32, rotary_dim=32, hidden_size=hidden)
    return Recipe(spec, 1, tables="base10000")


def caught_by_ropegrad(fault: Any) -> bool:
    """Whether ropegrad names the rule that the fault breaks."""
    getattr(fault.function, "fresh", lambda: None)()
    seen = Examination(fault.contract, fault.domain)
    runner = Here(fault.function, fault.contract)
    for recipe in battery(fault.contract, fault.domain):
        seen.trials.append(attempt(runner, recipe))
        if any(fault.rule in {one.rule for one in broken_rules(seen)} for _ in "1" if seen.trials[-1].faults):
            return True
    return False


def main() -> None:
    """Print the table."""
    for module in ("rope_faults", "qkv_faults"):  # they plant
        importlib.import_module(module)
    faults = importlib.import_module("planting").PLANTED
    right = importlib.import_module("right_kernels").RIGHT
    right = [one for one in right if one[1].dtype == "float32" and one[1].precision == "highest"]
    print(
        "| rtol / atol | caught on an ordinary problem | on ropegrad's | right kernels called wrong there |"
    )
    print("|---|--:|--:|--:|")
    for title, (policy, dtype) in POLICIES.items():
        few = many = false = 0
        for fault in faults:
            few += alarm(fault.function, fault.contract, policy, dtype, [ordinary(fault.contract)])
            many += alarm(fault.function, fault.contract, policy, dtype, tried(fault.contract, fault.domain))
        for function, contract, domain, _ in right:
            false += alarm(function, contract, policy, dtype, tried(contract, domain))
        counts = f"{few} of {len(faults)} | {many} of {len(faults)} | {false} of {len(right)}"
        print(f"| {title} | {counts} |", flush=True)
    caught = sum(caught_by_ropegrad(fault) for fault in faults)
    print(f"| ropegrad's bounds and rules | | {caught} of {len(faults)} | 0 of {len(right)} (test-suite) |")


if __name__ == "__main__":
    main()
