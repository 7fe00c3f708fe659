"""Is problem 068's formula the gradient of its forward, on problem 068's own inputs? Prints a Markdown table.

068 computes grad_q = g·cos − rotate_half(g)·sin, which takes each channel's own sine (`adjoint="paired"`).
The exact adjoint takes its partner's. A linear map's adjoint is unique: ⟨g, f(q)⟩ = ⟨f*(g), q⟩ for every q.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import ropegrad as rg
from ropegrad.suites import rope_suite
from ropegrad.verify import Case, make_case
from ropegrad.verify.bounds import bounds
from ropegrad.verify.judge import worst_ratio
from ropegrad.verify.oracle import expected

CASE = "B=1 S=256 H=32/8"
DRAWS = {"as problem 068 draws them": ("normal", "benchmark"), "real Llama 3 tables": ("normal", "llama3")}


def inner(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    """⟨a, b⟩ in float64."""
    return float(np.vdot(a.astype(np.float64), b.astype(np.float64)))


def row(draw: str, case: Case, adjoint: str) -> str:
    """One line of the table: how far a formula is from being the adjoint."""
    arrays = list(case.inputs.values())
    grad = rg.rope_backward(*arrays, adjoint=adjoint).grad_q
    exact = expected(case)["grad_q"]
    ratio = worst_ratio(grad, exact, bounds(case, {"grad_q": exact})["grad_q"]).ratio
    error = np.linalg.norm(grad - exact.value) / np.linalg.norm(exact.value)
    q, g = case.inputs["q"], case.inputs["grad_q_embed"]
    assert q is not None
    assert g is not None
    forward = inner(g, rg.rope(q, None, case.inputs["cos"], case.inputs["sin"]).q_embed)
    backward = inner(grad, q)
    return f"| {draw} | `{adjoint}` | {forward:.1f} | {backward:.1f} | {100 * error:.2g} % | {ratio:.2g} |"


def main() -> None:
    """Print the table."""
    print(f"{CASE}, float32\n")
    print("| tables | formula | ⟨g, f(q)⟩ | ⟨grad_q, q⟩ | ‖grad_q − exact‖ / ‖exact‖ | worst error/bound |")
    print("|---|---|--:|--:|--:|--:|")
    for draw, (values, tables) in DRAWS.items():
        case = make_case(rope_suite()[CASE], 68, values=values, tables=tables)
        for adjoint in ("exact", "paired"):
            print(row(draw, case, adjoint))


if __name__ == "__main__":
    main()
