"""What a backend is: a name, a reason why not, and the four operations."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, Protocol, TypeVar

import numpy as np

from ropegrad.arrays import Array
from ropegrad.spec import QkvSpec, RopeSpec

Inputs = dict[
    str, Array
]  # by the problem's names, in the caller's layout, judged by spec.py; absent ones left out
Outputs = dict[str, Array]  # by name ('grad_q', …): exactly what spec.needs asks for


_Words = ParamSpec("_Words")
_Result = TypeVar("_Result")


def quiet(function: Callable[_Words, _Result]) -> Callable[_Words, _Result]:
    """The function without NumPy's warnings: NaN, Inf and overflow are the caller's business.

    torch.compile, which would break its graph at NumPy's settings, sees the function alone.
    """

    @wraps(function)
    def run(*args: _Words.args, **words: _Words.kwargs) -> _Result:
        compiler = getattr(sys.modules.get("torch"), "compiler", None)
        if compiler is not None and compiler.is_compiling():
            return function(*args, **words)
        with np.errstate(all="ignore"):
            return function(*args, **words)

    return run


class Backend(Protocol):
    """One way to compute. It is handed judged inputs only and never writes to them.

    `out` holds an array for every output, to be overwritten or, with spec.accumulate, added to; without it
    the backend makes fresh ones. The result maps the same names to the same arrays.
    """

    @property
    def name(self) -> str:
        """How users call it."""
        ...

    def why_not(self, spec: RopeSpec | QkvSpec) -> str | None:
        """None if it can run this spec here; otherwise the sentence to show."""
        ...

    def explain(self, spec: RopeSpec | QkvSpec, inputs: Inputs) -> list[str]:
        """How it would run these arrays: kernel, tiles, threads, and what it would copy."""
        ...

    def rope_backward(self, spec: RopeSpec, inputs: Inputs, out: Outputs | None) -> Outputs:
        """Gradients of RoPE."""
        ...

    def qkv_rope_backward(self, spec: QkvSpec, inputs: Inputs, out: Outputs | None) -> Outputs:
        """Gradients of the projections and RoPE."""
        ...

    def rope(self, spec: RopeSpec, inputs: Inputs) -> Outputs:
        """RoPE of q and k: 'q_embed', 'k_embed'."""
        ...

    def qkv_rope(self, spec: QkvSpec, inputs: Inputs) -> Outputs:
        """Projections and RoPE: 'query', 'key', 'value'."""
        ...
