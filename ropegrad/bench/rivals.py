"""Who is timed on a GPU: ropegrad's CuPy backends, and what a user would pick instead, if installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ropegrad import api
from ropegrad.backends.base import Inputs
from ropegrad.spec import QkvSpec, RopeSpec
from ropegrad.verify.conformance import NAMESPACES, own_backends
from ropegrad.verify.runners import options

Spec = RopeSpec | QkvSpec
_ROPE = ("grad_q_embed", "grad_k_embed", "q", "k", "cos", "sin")
Call = Callable[
    [], Sequence[Any]
]  # launches on CuPy's current stream; gives the outputs in the problem's order


@dataclass(frozen=True)
class Contender:
    """One way to compute a case. `bind` takes a set of CuPy arrays by name; backend is what is at work."""

    name: str
    backend: str
    kernel: str
    precision: str | None
    options: dict[str, Any]
    bind: Callable[[Inputs], Call]


def contenders(spec: Spec, *, rivals: bool) -> Iterator[Contender]:
    """Ours, then theirs."""
    for name in own_backends(spec):
        if NAMESPACES.get(name) == "cupy":
            yield Contender(name, name, name, _promise(spec), {}, partial(_bind_ours, spec, name))
    if not rivals or importlib.util.find_spec("torch") is None:
        return
    if isinstance(spec, RopeSpec) and set(spec.needs) == {"q", "k"}:
        if importlib.util.find_spec("liger_kernel") is not None:
            bind = partial(_bind_liger, spec.layout == "bshd")
            yield Contender("liger", "liger", "liger", None, {"in_place": True}, bind)
        return
    yield from _torch(spec)
    if isinstance(spec, RopeSpec) and importlib.util.find_spec("triton") is not None:
        yield Contender("triton", "triton", "triton", None, {}, _bind_triton)


def _bind_ours(spec: Spec, backend: str, inputs: Inputs) -> Call:
    import cupy

    wanted = {need: cupy.empty(*spec.output(need)) for need in spec.needs}
    names = ("q", "k", "cos", "sin") if isinstance(spec, RopeSpec) else spec.needs
    out = tuple(wanted.get(name) for name in names)
    call = api.rope_backward if isinstance(spec, RopeSpec) else api.qkv_rope_backward
    arrays = map(inputs.get, _ROPE) if isinstance(spec, RopeSpec) else inputs.values()
    launch = partial(call, *arrays, **options(spec), out=out, backend=backend)
    return lambda: [x for x in launch() if x is not None]


def _torch(spec: Spec) -> Iterator[Contender]:
    """The reference formula eager, and every formula compiled."""
    import torch

    from ropegrad.bench.torch_formulas import FORMULAS

    torch._dynamo.reset()  # it gives up compiling after a few shapes of one formula
    op = "rope" if isinstance(spec, RopeSpec) else "qkv"
    for formula in FORMULAS[op]:
        for compiled in (False, True):
            if compiled or formula == "reference":
                kernel = f"torch {'compile' if compiled else 'eager'}"
                facts = {"formula": formula, "compiled": compiled}
                bind = partial(_bind_torch, op, formula, compiled)
                yield Contender(f"{kernel} {formula}", "torch", kernel, _promise(spec), facts, bind)


def _bind_torch(op: str, formula: str, compiled: bool, inputs: Inputs) -> Call:
    import torch

    from ropegrad.bench.torch_formulas import FORMULAS

    function = FORMULAS[op][formula]
    if compiled:
        function = torch.compile(function, dynamic=False)
    torch.backends.cuda.matmul.allow_tf32 = False
    return _on_cupys_stream(function, _tensors(inputs))


def _bind_triton(inputs: Inputs) -> Call:
    from ropegrad.bench.triton_rope import rope_backward

    return _on_cupys_stream(rope_backward, _tensors(inputs))


def _bind_liger(own_layout: bool, inputs: Inputs) -> Call:
    """Liger-Kernel's rope: gradients of q and k alone, in place, for tables whose halves are equal.

    It works on [B, S, H, D] in memory, seen as [B, H, S, D]; from any other memory it copies first.
    """
    from liger_kernel.ops.rope import rope_backward

    read = ("grad_q_embed", "grad_k_embed", "cos", "sin")
    gq, gk, cos, sin = _tensors({name: inputs[name] for name in read})
    gq, gk = gq.clone(), gk.clone()  # it may write into them

    def run() -> Sequence[Any]:
        if not own_layout:
            return tuple(rope_backward(gq, gk, cos, sin)[:2])
        dq, dk, *_ = rope_backward(gq.transpose(1, 2), gk.transpose(1, 2), cos, sin)
        return dq.transpose(1, 2), dk.transpose(1, 2)

    return _on_cupys_stream(run, [])


def _tensors(inputs: Inputs) -> list[Any]:
    import torch

    return [torch.utils.dlpack.from_dlpack(x) for x in inputs.values()]


def _on_cupys_stream(function: Callable[..., Sequence[Any]], tensors: list[Any]) -> Call:
    import cupy
    import torch

    external: Any = torch.cuda.ExternalStream

    def run() -> Sequence[Any]:
        stream = external(cupy.cuda.get_current_stream().ptr)
        with torch.cuda.stream(stream), torch.no_grad():
            return function(*tensors)

    return run


def _promise(spec: Spec) -> str | None:
    return None if isinstance(spec, RopeSpec) else spec.precision
