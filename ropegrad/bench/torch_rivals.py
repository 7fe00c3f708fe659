"""PyTorch on a GPU: every formula eager and compiled, in the arithmetic that makes the same promise as ours.

What decides that arithmetic is switched for these calls alone: while they are checked, compiled, warmed up,
captured and timed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from ropegrad.backends.base import Inputs
from ropegrad.bench.contender import Call, Contender, Spec, geometry
from ropegrad.spec import QkvSpec

ARITHMETIC = {"highest": "IEEE", "high": "TF32", "medium": "bfloat16"}
COMPILED, AUTOTUNED = "default", "max-autotune-no-cudagraphs"  # modes of torch.compile
# Autotuning takes much longer than compiling, so only the largest case of the qkv suite has it (batch,
# tokens), of the formula that makes the fewest products, at the promises to beat.
AUTOTUNED_CASES = ((1, 8192),)
AUTOTUNED_WAYS = (("packed", "high"), ("packed", "medium"))


def contenders(spec: Spec, precisions: Sequence[str | None], *, compiled: bool = True) -> Iterator[Contender]:
    """Each formula at each promise, eager and, if `compiled`, by torch.compile."""
    import torch

    from ropegrad.bench.torch_formulas import FORMULAS

    torch._dynamo.reset()  # it gives up compiling after a few shapes of one formula
    torch.cuda.empty_cache()  # what the case before took, on streams that are gone
    for precision in precisions:
        formulas = FORMULAS["qkv" if isinstance(spec, QkvSpec) else "rope"]
        for name, formula in formulas.items():
            for mode in _modes(spec, name, precision, compiled=compiled):
                kernel = f"torch {'compile' if mode else 'eager'}"
                facts: dict[str, Any] = {"formula": name, "compiled": mode is not None}
                if precision is not None:
                    facts["arithmetic"] = ARITHMETIC[precision]
                title = f"{kernel} {name}"
                if mode == AUTOTUNED:
                    title, facts["mode"] = f"{title} autotuned", mode
                function = formula
                if mode is not None:  # a second graph, or a formula that is not compiled, is an error
                    function = torch.compile(formula, dynamic=False, fullgraph=True, mode=mode)
                bind = partial(_bind, function, ARITHMETIC[precision or "highest"])
                yield Contender(title, "torch", kernel, precision, facts, bind)


def _modes(spec: Spec, formula: str, precision: str | None, *, compiled: bool) -> list[str | None]:
    """None: eager. Of RoPE alone only the reference; its formulas are there for what is compiled."""
    modes: list[str | None] = [None] if formula == "reference" or isinstance(spec, QkvSpec) else []
    if not compiled:
        return modes
    modes.append(COMPILED)
    rope = geometry(spec)
    if (formula, precision) in AUTOTUNED_WAYS and (rope.batch, rope.seq) in AUTOTUNED_CASES:
        modes.append(AUTOTUNED)
    return modes


def _bind(function: Callable[..., Sequence[Any]], arithmetic: str, inputs: Inputs) -> Call:
    def run(*given: Any) -> Sequence[Any]:
        with computing(arithmetic, given[0].device.type):
            return function(*given)

    return on_cupys_stream(run, tensors(inputs))


@contextlib.contextmanager
def computing(arithmetic: str, device: str) -> Iterator[None]:
    """Matrix products in IEEE float32, in TF32, or in bfloat16 as autocast does it."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if arithmetic == "TF32" else "highest")
    try:
        with torch.autocast(device, torch.bfloat16, enabled=arithmetic == "bfloat16"):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def tensors(inputs: Inputs) -> list[Any]:
    """The same memory, as PyTorch's."""
    import torch

    return [torch.utils.dlpack.from_dlpack(x) for x in inputs.values()]


def on_cupys_stream(function: Callable[..., Sequence[Any]], given: list[Any]) -> Call:
    """A call on CuPy's current stream."""
    import cupy
    import torch

    external: Any = torch.cuda.ExternalStream

    def run() -> Sequence[Any]:
        stream = external(cupy.cuda.get_current_stream().ptr)
        with torch.cuda.stream(stream), torch.no_grad():
            return function(*given)

    return run
