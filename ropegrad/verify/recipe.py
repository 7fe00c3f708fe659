"""A problem before its data are made: small, comparable, and the same on every machine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from ropegrad.spec import QkvSpec, RopeSpec
from ropegrad.verify.case import Case
from ropegrad.verify.draws import make_case


@dataclass(frozen=True)
class Recipe:
    """A spec, kinds of data (keys of draws.VALUES, draws.TABLES, placing.MEMORY) and a seed.

    then: values and tables of the second draw, if they are others. often: many calls with data of their own,
    for what shows only in the third or eighth.
    """

    spec: RopeSpec | QkvSpec
    seed: int = 0
    values: str = "normal"
    tables: str = "normal"
    memory: str = "contiguous"
    name: str = ""
    then: tuple[str, str] | None = None
    often: bool = False

    @property
    def draws(self) -> tuple[int, ...]:
        """The draws of the data that are put to a target in turn; the last call has the data of the first."""
        return (*range(18), 0) if self.often else (0, 1, 0)

    def case(self, other: int = 0) -> Case:
        """The case; with `other`, the second draw."""
        values, tables = (self.values, self.tables) if not other or self.then is None else self.then
        return make_case(
            self.spec, self.seed + other, values=values, tables=tables, memory=self.memory,
            name=self.name or str(self),
        )  # fmt: skip

    @property
    def rope(self) -> RopeSpec:
        """Heads and tables."""
        return self.spec if isinstance(self.spec, RopeSpec) else self.spec.rope

    def __str__(self) -> str:
        rope = self.rope
        sizes = f"B={rope.batch} H={rope.heads}/{rope.kv_heads} S={rope.seq} D={rope.head_dim}"
        if rope.rotary_dim != rope.head_dim:
            sizes += f" R={rope.rotary_dim}"
        if isinstance(self.spec, QkvSpec):
            sizes += f" C={self.spec.hidden_size}"
        return f"{sizes}, {self.values} values, {self.tables} tables, {self.memory} memory"


def contiguous(case: Case, names: Iterable[str]) -> Case:
    """The same values, those of the inputs named in contiguous memory."""
    return replace(case, inputs=case.inputs | {n: np.array(case.inputs[n], order="C") for n in names})
