"""Somebody else's function among the contenders: called as `verify TARGET` calls it, in this process."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ropegrad.arrays import Array, numpy_dtype
from ropegrad.backends.base import Inputs
from ropegrad.bench.contender import TARGET, Call, Contender, Spec, promise
from ropegrad.verify.calling import UPSTREAM, named, probe
from ropegrad.verify.runners import to_namespace
from ropegrad.verify.target import Contract, load

Function = Callable[..., Any]
Names = tuple[str, ...]


class Target:
    """A function of these problems' inputs. Raises NoTarget where it or its arrays cannot be had."""

    def __init__(self, name: str, contract: Contract) -> None:
        probe(contract)
        self.name, self.contract, self.function = name, contract, load(name)
        made_by = inspect.getmodule(self.function) or inspect.getmodule(type(self.function))
        found = inspect.getsourcefile(made_by) if made_by is not None else None
        self.source = Path(found) if found else None

    def contender(self, spec: Spec) -> Contender:
        """For a case."""
        contract = self.contract
        names = tuple(f"grad_{need}" for need in spec.needs)
        bind = _forward if contract.of == "forward" else _backward
        on_threads = contract.of == "forward" and contract.device == "cuda"
        return Contender(
            self.name, TARGET, self.name, promise(spec),
            {"target": self.name, "contract": asdict(contract)},
            partial(bind, self.function, contract, spec, names),
            flushes=contract.arrays == "jax" and contract.device == "cpu", source=self.source,
            movable=contract.of == "backward" and contract.arrays != "jax",
            protocols=("wall",) if on_threads else (),
        )  # fmt: skip


def _arrays(contract: Contract, inputs: Inputs) -> dict[str, Array]:
    """The inputs as the target takes them; the same memory, but for JAX."""
    if contract.device == "cuda":
        if contract.arrays == "cupy":
            return dict(inputs)
        torch = importlib.import_module("torch")
        return {name: torch.utils.dlpack.from_dlpack(x) for name, x in inputs.items()}
    return {name: to_namespace(x, contract.arrays) for name, x in inputs.items()}


def _poisoned(contract: Contract, spec: Spec) -> list[Array]:
    """Outputs full of NaN."""
    made = []
    for need in spec.needs:
        shape, dtype = spec.output(need)
        values = np.full(shape, np.nan, numpy_dtype(dtype))
        if contract.device == "cuda" and contract.arrays == "torch":
            made.append(to_namespace(values, "torch").cuda())
        else:
            made.append(to_namespace(values, contract.arrays))
    return made


def _backward(function: Function, contract: Contract, spec: Spec, names: Names, inputs: Inputs) -> Call:
    arrays = list(_arrays(contract, inputs).values())
    outputs = _poisoned(contract, spec) if contract.dps else []

    def call() -> Sequence[Any]:
        result = function(*arrays, *outputs)
        return outputs if contract.dps else _in_order(result, names, contract)

    return _on_cupys_stream(call) if (contract.device, contract.arrays) == ("cuda", "torch") else call


def _in_order(result: Any, names: Names, contract: Contract) -> list[Any]:
    found = named(result, names)
    if isinstance(found, str):
        raise ValueError(found)
    if contract.arrays == "jax":
        importlib.import_module("jax").block_until_ready(list(found.values()))
    return [found[name] for name in names]


def _on_cupys_stream(call: Call) -> Call:
    import cupy
    import torch

    external: Any = torch.cuda.ExternalStream

    def run() -> Sequence[Any]:
        with torch.cuda.stream(external(cupy.cuda.get_current_stream().ptr)):
            return call()

    return run


def _forward(function: Function, contract: Contract, spec: Spec, names: Names, inputs: Inputs) -> Call:
    """The gradients alone: the forward runs once, outside the time."""
    arrays = _arrays(contract, inputs)
    upstream = [arrays[name] for name in UPSTREAM[contract.op]]
    leaves = {name: x for name, x in arrays.items() if name not in UPSTREAM[contract.op]}
    pull = _with_jax if contract.arrays == "jax" else _with_torch
    return pull(function, leaves, upstream, names)


def _with_torch(function: Function, leaves: dict[str, Array], upstream: list[Array], names: Names) -> Call:
    torch = importlib.import_module("torch")
    leaves = {name: x.detach().requires_grad_(f"grad_{name}" in names) for name, x in leaves.items()}
    values = function(*leaves.values())
    of = [leaves[name.removeprefix("grad_")] for name in names]

    def call() -> Sequence[Any]:
        grads = torch.autograd.grad(list(values), of, upstream, retain_graph=True, allow_unused=True)
        return grads  # type: ignore[no-any-return]

    return call


def _with_jax(function: Function, leaves: dict[str, Array], upstream: list[Array], names: Names) -> Call:
    jax = importlib.import_module("jax")
    values, pull = jax.vjp(function, *leaves.values())
    _, tree = jax.tree_util.tree_flatten(values)
    given, order = jax.tree_util.tree_unflatten(tree, upstream), list(leaves)

    def call() -> Sequence[Any]:
        grads = jax.block_until_ready(pull(given))
        return [grads[order.index(name.removeprefix("grad_"))] for name in names]

    return call
