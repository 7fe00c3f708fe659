"""What else computes these gradients on a CPU: the formulas that people write, in NumPy, PyTorch and JAX.

torch.compile's speed depends on the formula by several times, so it gets several, each with fresh results
and into arrays that are there already; the best of them is the one to beat. All compute in float32 at least
and round once, so that they pass the same check as ours.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from ropegrad.arrays import Array, numpy_dtype
from ropegrad.backends.base import Inputs
from ropegrad.bench.contender import Call, Contender, Spec, geometry, is_textbook, promise
from ropegrad.spec import RopeSpec
from ropegrad.verify.runners import to_namespace

Arrays = tuple[Array, ...]


@dataclass(frozen=True)
class Ops:
    """What the libraries spell differently; all on the last axis."""

    concat: Callable[[list[Array]], Array]
    stack: Callable[[list[Array]], Array]
    roll: Callable[[Array, int], Array]
    cast: Callable[[Array, str], Array]


@dataclass(frozen=True)
class Formula:
    """The adjoint of y = x·cos + rotate_half(x)·sin, and Σ over heads of g·rotate_half(x); half pairing."""

    name: str
    unrotate: Callable[[Ops, Array, Array, Array], Array]
    sine: Callable[[Ops, Array, Array], Array]


def _split(x: Array) -> tuple[Array, Array]:
    middle = x.shape[-1] // 2
    return x[..., :middle], x[..., middle:]


def _rotate_half(ops: Ops, x: Array) -> Array:
    first, second = _split(x)
    return ops.concat([-second, first])


def _halves(g: Array, cos: Array, sin: Array) -> list[Array]:
    (g1, g2), (c1, c2), (s1, s2) = map(_split, (g, cos, sin))
    return [g1 * c1 + g2 * s2, g2 * c2 - g1 * s1]


def _half_sums(ops: Ops, g: Array, x: Array) -> Array:
    (g1, g2), (x1, x2) = _split(g), _split(x)
    return ops.concat([-(g1 * x2).sum(1), (g2 * x1).sum(1)])


def _stacked(ops: Ops, g: Array, cos: Array, sin: Array) -> Array:
    first, second = _halves(g, cos, sin)
    return ops.stack([first, second]).reshape(g.shape)


def _signs(ops: Ops, x: Array) -> Array:
    first, second = _split(x[:1, :1, :1] * 0 + 1)
    return ops.concat([first, -second])


FORMULAS = (
    Formula(
        "rotate_half",
        lambda ops, g, c, s: g * c - _rotate_half(ops, g * s),
        lambda ops, g, x: (g * _rotate_half(ops, x)).sum(1),
    ),
    Formula("halves", lambda ops, g, c, s: ops.concat(_halves(g, c, s)), _half_sums),
    Formula("stack", _stacked, _half_sums),
    Formula(
        "roll",
        lambda ops, g, c, s: g * c + _signs(ops, g) * ops.roll(g * s, g.shape[-1] // 2),
        lambda ops, g, x: -(g * _signs(ops, x) * ops.roll(x, x.shape[-1] // 2)).sum(1),
    ),
)


def rope(ops: Ops, formula: Formula, compute: str, *arrays: Array) -> Arrays:
    """Problem 068's outputs from its inputs, with the exact adjoint, in the compute dtype."""
    gq, gk, q, k, cos, sin = (ops.cast(x, compute) for x in arrays)
    c, s = cos[:, None], sin[:, None]
    grad_cos = (gq * q).sum(1) + (gk * k).sum(1)
    grad_sin = formula.sine(ops, gq, q) + formula.sine(ops, gk, k)
    return formula.unrotate(ops, gq, c, s), formula.unrotate(ops, gk, c, s), grad_cos, grad_sin


def qkv(ops: Ops, formula: Formula, compute: str, *arrays: Array) -> Arrays:
    """Problem 064's outputs from its inputs, by six products."""
    gq, gk, gv, x, wq, wk, wv, cos, sin = (ops.cast(array, compute) for array in arrays)
    c, s = cos[:, None], sin[:, None]
    heads = (formula.unrotate(ops, gq, c, s), formula.unrotate(ops, gk, c, s), gv)
    dq, dk, dv = (g.swapaxes(1, 2).reshape(-1, g.shape[1] * g.shape[3]) for g in heads)
    tokens = x.reshape(-1, x.shape[-1])
    hidden = dq @ wq + dk @ wk + dv @ wv
    return hidden.reshape(x.shape), dq.T @ tokens, dk.T @ tokens, dv.T @ tokens


# ---- libraries ---------------------------------------------------------------------------------------------

NUMPY = Ops(
    concat=lambda parts: np.concatenate(parts, axis=-1),
    stack=lambda parts: np.stack(parts, axis=-2),
    roll=lambda x, by: np.roll(x, by, axis=-1),
    cast=lambda x, name: x.astype(numpy_dtype(name), copy=False),
)


def competitors(spec: Spec, *, compiled: bool = True) -> Iterator[Contender]:
    """Everything that is installed here, if the formulas are for this spec."""
    if not is_textbook(spec):
        return
    yield from _numpy(spec)
    if importlib.util.find_spec("torch"):
        yield from _torch(spec, compiled=compiled)
    if importlib.util.find_spec("jax"):
        yield from _jax(spec)


def body_of(spec: Spec, ops: Ops, formula: Formula) -> Callable[..., Arrays]:
    """The outputs that are wanted, in their dtypes, from arrays in the problem's order."""
    compute = geometry(spec).compute
    operation = rope if isinstance(spec, RopeSpec) else qkv
    dtypes = [spec.output(need)[1] for need in spec.needs]

    def body(*arrays: Array) -> Arrays:
        results = operation(ops, formula, compute, *arrays)
        return tuple(ops.cast(x, name) for x, name in zip(results, dtypes, strict=True))

    return body


def _contender(spec: Spec, backend: str, kernel: str, bind: Callable[[Inputs], Call]) -> Contender:
    flushes = backend == "jax.jit"  # XLA does, on CPUs
    return Contender(f"{backend} {kernel}", backend, kernel, promise(spec), {}, bind, flushes=flushes)


def _numpy(spec: Spec) -> Iterator[Contender]:
    body = body_of(spec, NUMPY, FORMULAS[0])
    yield _contender(spec, "numpy", FORMULAS[0].name, lambda inputs: partial(body, *inputs.values()))


def _torch(spec: Spec, *, compiled: bool) -> Iterator[Contender]:
    torch = importlib.import_module("torch")
    torch.compiler.reset()  # past eight compilations of one function it would run eagerly
    ops = Ops(
        concat=lambda parts: torch.cat(parts, -1),
        stack=lambda parts: torch.stack(parts, -2),
        roll=lambda x, by: torch.roll(x, by, -1),
        cast=lambda x, name: x.to(getattr(torch, name)),
    )
    for formula in FORMULAS[:2]:
        eager = partial(_bind_torch, body_of(spec, ops, formula))
        yield _contender(spec, "torch", formula.name, eager)
    for formula in FORMULAS if compiled else ():
        body = body_of(spec, ops, formula)
        fresh = torch.compile(body, dynamic=False, fullgraph=True)
        yield _contender(spec, "torch.compile", formula.name, partial(_bind_torch, fresh))
        into = torch.compile(_into(body), dynamic=False, fullgraph=True)
        yield _contender(spec, "torch.compile", f"{formula.name}, out", partial(_bind_torch_out, spec, into))


def _bind_torch(body: Callable[..., Arrays], inputs: Inputs) -> Call:
    return partial(body, *(to_namespace(x, "torch") for x in inputs.values()))


def _bind_torch_out(spec: Spec, body: Callable[..., Arrays], inputs: Inputs) -> Call:
    torch = importlib.import_module("torch")
    forms = [spec.output(need) for need in spec.needs]
    out = tuple(torch.empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in forms)
    return partial(body, out, *(to_namespace(x, "torch") for x in inputs.values()))


def _into(body: Callable[..., Arrays]) -> Callable[..., Arrays]:
    def written(out: Arrays, *arrays: Array) -> Arrays:
        for array, result in zip(out, body(*arrays), strict=True):
            array.copy_(result)
        return out

    return written


def _jax(spec: Spec) -> Iterator[Contender]:
    jax = importlib.import_module("jax")
    xp = jax.numpy
    ops = Ops(
        concat=lambda parts: xp.concatenate(parts, axis=-1),
        stack=lambda parts: xp.stack(parts, axis=-2),
        roll=lambda x, by: xp.roll(x, by, axis=-1),
        cast=lambda x, name: x.astype(name),
    )
    body = jax.jit(body_of(spec, ops, FORMULAS[1]))

    def bind(inputs: Inputs) -> Call:
        arrays = [to_namespace(x, "jax") for x in inputs.values()]
        return lambda: jax.block_until_ready(body(*arrays))

    yield _contender(spec, "jax.jit", FORMULAS[1].name, bind)
