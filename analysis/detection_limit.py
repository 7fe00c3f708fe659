"""The smallest errors that are always caught, and which precision is told from which. Prints Markdown tables.

One element: a right result of which one element is off by a relative error. Systematic: all elements are. The
limit is the smallest power of two that is caught in every trial, and at which all larger ones are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import ropegrad as rg
from ropegrad.arrays import numpy_dtype
from ropegrad.verify.bounds import FORMATS
from ropegrad.verify.case import Case
from ropegrad.verify.oracle import expected
from ropegrad.verify.recipe import Recipe
from ropegrad.verify.ruling import gate_fault, standard
from ropegrad.verify.target import Contract

Array = np.ndarray[Any, Any]
TRIALS = 200
POWERS = range(-30, 0)
DTYPES = ("float32", "bfloat16", "float16", "float64")


def problems(dtype: str) -> list[Case]:
    """Ordinary problems: normal values, tables of real positions."""
    contract = Contract(dtype=dtype, table_dtype=dtype)
    spec = contract.spec(batch=1, heads=8, kv_heads=2, seq=16, head_dim=32, rotary_dim=32)
    return [Recipe(spec, seed, tables="llama3").case() for seed in range(TRIALS)]


def one_element(x: Array, error: float, rng: np.random.Generator) -> Array:
    """The largest of 16 elements drawn, changed: of one close to zero a relative error is nothing."""
    changed = x.copy()
    flat = changed.reshape(-1)
    drawn = rng.integers(flat.size, size=16)
    at = drawn[np.argmax(np.abs(flat[drawn].astype(np.float64)))]
    flat[at] = (float(flat[at]) * (1 + error)).__float__()
    return changed


def everything(x: Array, error: float, rng: np.random.Generator) -> Array:
    """All elements changed alike."""
    return (x.astype(np.float64) * (1 + error)).astype(x.dtype)


def limits(dtype: str, change: Callable[[Array, float, np.random.Generator], Array]) -> dict[str, int]:
    """For each output the power of two of the smallest error that is always caught."""
    found: dict[str, int] = {}
    rng = np.random.default_rng(1)
    missed = {name: min(POWERS) - 60 for name in ("grad_q", "grad_k", "grad_cos", "grad_sin")}
    powers = [p - (30 if dtype == "float64" else 0) for p in POWERS]
    for case in problems(dtype):
        rule = standard(case, expected(case))
        got = rg.rope_backward(*case.inputs.values())._asdict()
        for power in powers:
            for name, x in got.items():
                if rule.worst(name, change(x, 2.0**power, rng)) <= 1:
                    missed[name] = max(missed[name], power)
    for name, power in missed.items():
        found[name] = power + 1
    return found


def rounded(dtype: str) -> Callable[[Array], Array]:
    """Operands of another precision."""
    if dtype == "TF32":
        return lambda x: ((x.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
    return lambda x: x.astype(numpy_dtype(dtype)).astype(x.dtype)


def told_apart(precision: str) -> list[str]:
    """Arithmetic that breaks a promise of qkv, among float32, TF32 and bfloat16 products."""
    contract = Contract(op="qkv", precision=precision)
    broken = []
    for arithmetic in ("float32", "TF32", "bfloat16"):
        caught = 0
        for values, seq in (("sparse", 33), ("normal", 256)):
            spec = contract.spec(
                batch=1, heads=4, kv_heads=2, seq=seq, head_dim=32, rotary_dim=32, hidden_size=64
            )
            case = Recipe(spec, 5, values).case()
            rule = standard(case, expected(case))
            change = rounded(arithmetic)
            arrays = [
                x if n in ("cos", "sin") else change(x) for n, x in case.inputs.items() if x is not None
            ]
            for name, x in rg.qkv_rope_backward(*arrays)._asdict().items():
                caught += rule.worst(name, x) > 1 or gate_fault(rule, name, x)[0] is not None
        broken += [arithmetic] if caught else []
    return broken


def main() -> None:
    """Print the tables."""
    print(
        "| dtype | unit roundoff | one element: q and k | cos and sin | all elements: q and k | cos and sin |"
    )
    print("|---|--:|--:|--:|--:|--:|")
    for dtype in DTYPES:
        cells = []
        for change in (one_element, everything):
            found = limits(dtype, change)
            for names in (("grad_q", "grad_k"), ("grad_cos", "grad_sin")):
                cells.append(f"2^{max(found[name] for name in names)}")
        unit = int(np.log2(FORMATS[dtype].u))
        print(f"| {dtype} | 2^{unit} | {' | '.join(cells)} |", flush=True)
    print("\n| promise of qkv | broken by |")
    print("|---|---|")
    for precision in ("highest", "high", "medium"):
        print(f"| `{precision}` | {', '.join(told_apart(precision)) or 'none of these'} |", flush=True)


if __name__ == "__main__":
    main()
