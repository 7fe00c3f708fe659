"""One way to compute a case, whoever wrote it; and which problems the formulas of others are for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ropegrad.backends.base import Inputs
from ropegrad.spec import QKV_WEIGHTS, ROPE_NEEDS, QkvSpec, RopeSpec

Spec = RopeSpec | QkvSpec
Call = Callable[[], Sequence[Any]]  # gives the outputs in the problem's order
TARGET = "target"  # the backend of a record of somebody else's function


@dataclass(frozen=True)
class Contender:
    """One way to compute a case, by a name that no other of its run and promise has.

    backend    what is at work; kernel: in which form
    bind       takes a set of inputs by name; its calls may reuse memory
    flushes    it flushes subnormal numbers, and is judged as such
    source     a target's file
    movable    its calls see what is written into its inputs later
    protocols  by which it can be timed; () any
    refused    why it cannot run here at all
    """

    name: str
    backend: str
    kernel: str
    precision: str | None
    options: dict[str, Any]
    bind: Callable[[Inputs], Call]
    flushes: bool = False
    source: Path | None = None
    movable: bool = True
    protocols: tuple[str, ...] = ()
    refused: str | None = None

    @property
    def key(self) -> str:
        """What no other of its run has."""
        return f"{self.name}, {self.precision}" if self.precision else self.name


def refusing(name: str, spec: Spec, reason: str) -> Contender:
    """One of ours that was asked for and cannot run."""

    def bind(inputs: Inputs) -> Call:
        raise AssertionError(reason)

    return Contender(name, name, name, promise(spec), {}, bind, refused=reason)


def promise(spec: Spec) -> str | None:
    """The precision that matrix products are held to."""
    return None if isinstance(spec, RopeSpec) else spec.precision


def promising(spec: Spec, precision: str | None) -> Spec:
    """The same problem under a promise."""
    return spec if precision is None or isinstance(spec, RopeSpec) else replace(spec, precision=precision)


def geometry(spec: Spec) -> RopeSpec:
    """Heads, tables and layout."""
    return spec if isinstance(spec, RopeSpec) else spec.rope


def is_textbook(spec: Spec) -> bool:
    """Whether the formulas that people write compute it: one convention, every gradient."""
    rope = geometry(spec)
    return (
        (rope.layout, rope.pairing, rope.table, rope.adjoint) == ("bhsd", "half", "full", "exact")
        and rope.rotary_dim == rope.head_dim
        and rope.table_batch == rope.batch
        and spec.needs == (ROPE_NEEDS if isinstance(spec, RopeSpec) else QKV_WEIGHTS)
    )
