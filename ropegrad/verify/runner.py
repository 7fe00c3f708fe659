"""Ways to call a target: what all have in common, and the plain one, in this process."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ropegrad.verify.arena import Bytes, Plan
from ropegrad.verify.calling import Answer, Caller, Function
from ropegrad.verify.target import Contract


class Runner(Protocol):
    """A way to call a target."""

    contract: Contract

    def arena(self, nbytes: int) -> Bytes:
        """Memory that the target will see."""
        ...

    def call(self, layout: Plan, names: tuple[str, ...], order: list[str], *, anew: bool) -> Answer:
        """Let it work on what is in the arena; `anew`: results of earlier calls may go."""
        ...


class Here:
    """A function called in this process: no protection, no start-up."""

    def __init__(self, function: Function, contract: Contract) -> None:
        self.contract, self._caller = contract, Caller(function, contract)
        self._memory: Bytes = np.zeros(0, np.uint8)

    def arena(self, nbytes: int) -> Bytes:
        """Memory that the function will see; the same addresses from call to call."""
        if nbytes > len(self._memory):
            self._memory = np.zeros(max(nbytes, 2 * len(self._memory)), np.uint8)
        return self._memory[:nbytes]

    def call(self, layout: Plan, names: tuple[str, ...], order: list[str], *, anew: bool) -> Answer:
        """Call the function."""
        return self._caller(self._memory[: layout.nbytes], layout, names, order, anew=anew)
