"""Who is timed on a GPU: ropegrad's CuPy backends, and what a user would pick instead, if installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from ropegrad import api
from ropegrad.backends import find
from ropegrad.backends.base import Inputs
from ropegrad.bench.contender import Call, Contender, Spec, is_textbook, promise, refusing
from ropegrad.spec import RopeSpec
from ropegrad.verify.conformance import NAMESPACES, cannot_run, own_backends
from ropegrad.verify.runners import options

_ROPE = ("grad_q_embed", "grad_k_embed", "q", "k", "cos", "sin")


def contenders(spec: Spec, *, names: Sequence[str] = (), rivals: bool) -> Iterator[Contender]:
    """Ours that can run here, or those of these names; then theirs."""
    yield from _ours(spec, names)
    if not rivals or importlib.util.find_spec("torch") is None:
        return
    if isinstance(spec, RopeSpec) and set(spec.needs) == {"q", "k"}:
        usual = (spec.pairing, spec.table, spec.adjoint) == ("half", "full", "exact")
        usual = usual and spec.layout in ("bhsd", "bshd") and spec.rotary_dim == spec.head_dim
        if usual and importlib.util.find_spec("liger_kernel") is not None:
            bind = partial(_bind_liger, spec.layout == "bshd")
            yield Contender("liger", "liger", "liger", None, {"in_place": True}, bind)
        return
    if not is_textbook(spec):
        return
    yield from _torch(spec)
    if isinstance(spec, RopeSpec) and importlib.util.find_spec("triton") is not None:
        yield Contender("triton", "triton", "triton", None, {}, _bind_triton)


def _ours(spec: Spec, names: Sequence[str]) -> Iterator[Contender]:
    for name in names or own_backends(spec):
        reason = cannot_run(find(name), spec) if names else None
        if NAMESPACES.get(name) != "cupy":
            if names:
                yield refusing(name, spec, f"{name} takes NumPy arrays: write --arrays numpy")
        elif reason is not None:
            yield refusing(name, spec, f"{name} cannot run this: {reason}")
        else:
            yield Contender(name, name, name, promise(spec), {}, partial(_bind_ours, spec, name))


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
                bind = partial(_bind_torch, op, formula, compiled, promise(spec) or "highest")
                yield Contender(f"{kernel} {formula}", "torch", kernel, promise(spec), facts, bind)


def _bind_torch(op: str, formula: str, compiled: bool, precision: str, inputs: Inputs) -> Call:
    import torch

    from ropegrad.bench.torch_formulas import FORMULAS

    function = FORMULAS[op][formula]
    if compiled:
        function = torch.compile(function, dynamic=False)
    torch.set_float32_matmul_precision(precision)  # a run has one
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
