"""Who is timed on a GPU: ropegrad's CuPy backends, and what a user would pick instead, if installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from ropegrad import api
from ropegrad.backends import find
from ropegrad.backends.base import Inputs
from ropegrad.backends.cupy_tensor import allocate
from ropegrad.bench import torch_rivals
from ropegrad.bench.contender import Call, Contender, Spec, is_textbook, promise, promising, refusing
from ropegrad.bench.place import Choice
from ropegrad.bench.torch_rivals import on_cupys_stream, tensors
from ropegrad.spec import PRECISIONS, QKV_BIASES, QKV_NEEDS, QKV_WEIGHTS, ROPE_NEEDS, RopeSpec
from ropegrad.verify.conformance import NAMESPACES, cannot_run, own_backends
from ropegrad.verify.runners import options

_ROPE = ("grad_q_embed", "grad_k_embed", "q", "k", "cos", "sin")
BY_PROMISE = ("cupy_tensor",)  # ours that compute otherwise at another promise; the rest does what it does


def contenders(spec: Spec, choice: Choice) -> Iterator[Contender]:
    """Ours that can run here, or those that are chosen; then theirs. Each at its promises."""
    asked: list[str | None] = [None]
    if not isinstance(spec, RopeSpec):
        asked = [one for one in PRECISIONS if one in (choice.precisions or PRECISIONS)]
    specs = [promising(spec, precision) for precision in asked]
    yield from _ours(specs, choice.backends)
    if not choice.rivals or importlib.util.find_spec("torch") is None:
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
    yield from torch_rivals.contenders(spec, asked, compiled=not choice.quick)
    if isinstance(spec, RopeSpec) and importlib.util.find_spec("triton") is not None:
        yield Contender("triton", "triton", "triton", None, {}, _bind_triton)


def _ours(specs: Sequence[Spec], names: Sequence[str]) -> Iterator[Contender]:
    """specs: one problem under each promise, the strictest first; who always computes alike has that one."""
    for name in names or dict.fromkeys(name for spec in specs for name in own_backends(spec)):
        if NAMESPACES.get(name) != "cupy":
            if names:
                yield refusing(name, specs[0], f"{name} takes NumPy arrays: write --arrays numpy")
            continue
        backend = find(name)
        reasons = [cannot_run(backend, spec) for spec in specs]
        able = [spec for spec, reason in zip(specs, reasons, strict=True) if reason is None]
        for spec in able if name in BY_PROMISE else able[:1]:
            yield Contender(name, name, name, promise(spec), {}, partial(_bind_ours, spec, name))
        if names and not able:
            yield refusing(name, specs[-1], f"{name} cannot run this: {reasons[-1]}")


def _bind_ours(spec: Spec, backend: str, inputs: Inputs) -> Call:
    import cupy

    launch: Call
    words = options(spec) | {"backend": backend}
    if isinstance(spec, RopeSpec):
        made = {f"grad_{need}": cupy.empty(*spec.output(need)) for need in spec.needs}
        words["out"] = tuple(made.get(f"grad_{name}") for name in ROPE_NEEDS)
        launch = partial(api.rope_backward, *map(inputs.get, _ROPE), **words)
    else:
        made = allocate(spec)  # as fresh results lie: the weights' are one matrix
        names = QKV_NEEDS if set(QKV_BIASES) & set(spec.needs) else QKV_WEIGHTS
        words["out"] = tuple(made.get(f"grad_{name}") for name in names)
        launch = partial(api.qkv_rope_backward, *inputs.values(), **words)
    return lambda: [x for x in launch() if x is not None]


def _bind_triton(inputs: Inputs) -> Call:
    from ropegrad.bench.triton_rope import rope_backward

    return on_cupys_stream(rope_backward, tensors(inputs))


def _bind_liger(own_layout: bool, inputs: Inputs) -> Call:
    """Liger-Kernel's rope: gradients of q and k alone, in place, for tables whose halves are equal.

    It works on [B, S, H, D] in memory, seen as [B, H, S, D]; from any other memory it copies first.
    """
    from liger_kernel.ops.rope import rope_backward

    read = ("grad_q_embed", "grad_k_embed", "cos", "sin")
    gq, gk, cos, sin = tensors({name: inputs[name] for name in read})
    gq, gk = gq.clone(), gk.clone()  # it may write into them

    def run() -> Sequence[Any]:
        if not own_layout:
            return tuple(rope_backward(gq, gk, cos, sin)[:2])
        dq, dk, *_ = rope_backward(gq.transpose(1, 2), gk.transpose(1, 2), cos, sin)
        return dq.transpose(1, 2), dk.transpose(1, 2)

    return on_cupys_stream(run, [])
