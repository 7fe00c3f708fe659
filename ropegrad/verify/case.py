"""One problem with its data: what a function under test is called with, and how it is sliced for judging."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ropegrad.spec import QkvSpec, RopeSpec

NumpyArray = np.ndarray[Any, Any]

ROPE_INPUTS = ("grad_q_embed", "grad_k_embed", "q", "k", "cos", "sin")
QKV_INPUTS = (
    "grad_query", "grad_key", "grad_value", "hidden_states", "q_weight", "k_weight", "v_weight", "cos", "sin",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A spec and its inputs by the problem's names: NumPy arrays in the spec's layout, None where absent.

    `first_token` says where a run of tokens that was cut out of a case began.
    `prior` holds, with spec.accumulate, what the output arrays contained before the call ('grad_q', ...).
    """

    name: str
    spec: RopeSpec | QkvSpec
    inputs: dict[str, NumpyArray | None]
    prior: dict[str, NumpyArray] = field(default_factory=dict)
    first_token: int = 0

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the gradients that are wanted, in the result's order."""
        return tuple(f"grad_{name}" for name in self.spec.needs)


def rope_geometry(case: Case) -> RopeSpec:
    """The part of the spec about heads and tables."""
    return case.spec if isinstance(case.spec, RopeSpec) else case.spec.rope


def token_axis(name: str, array: NumpyArray, layout: str) -> int:
    """The axis of a rope input or output that runs over tokens."""
    if name.removeprefix("grad_") in ("cos", "sin"):
        return array.ndim - 2
    return {"bhsd": 2, "bshd": 1, "sbhd": 0}[layout]


Labels = dict[tuple[str, str], NumpyArray]  # outputs by (whose, name)


def token_slices(case: Case, outputs: Labels, tokens: int) -> Iterator[tuple[Case, Labels]]:
    """A rope case and its outputs in runs of `tokens` positions.

    Table rows belong to positions, so the runs are independent and a large case takes little memory.
    """
    spec = case.spec
    assert isinstance(spec, RopeSpec)
    for start in range(0, spec.seq, tokens):
        run = slice(start, min(start + tokens, spec.seq))

        def cut(name: str, array: NumpyArray, run: slice = run) -> NumpyArray:
            axis = token_axis(name, array, spec.layout)
            part: NumpyArray = array[(slice(None),) * axis + (run,)]
            return part

        inputs = {name: None if x is None else cut(name, x) for name, x in case.inputs.items()}
        prior = {name: cut(name, x) for name, x in case.prior.items()}
        part = replace(case, spec=replace(spec, seq=run.stop - run.start), inputs=inputs, prior=prior)
        yield part, {label: cut(label[1], x) for label, x in outputs.items()}
