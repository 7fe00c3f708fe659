"""Calling a function under test, in whatever process: arrays out of the arena, results as plain bytes."""

from __future__ import annotations

import importlib
import inspect
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ropegrad.arrays import Array, memory
from ropegrad.verify.arena import Bytes, Plan
from ropegrad.verify.case import NumpyArray
from ropegrad.verify.given import Given, Place
from ropegrad.verify.kept import OVERWRITTEN, Kept, shares
from ropegrad.verify.runners import to_numpy
from ropegrad.verify.target import Contract, NoTarget

FORWARD_VALUES = {"rope": ("q_embed", "k_embed"), "qkv": ("query", "key", "value")}
UPSTREAM = {"rope": ("grad_q_embed", "grad_k_embed"), "qkv": ("grad_query", "grad_key", "grad_value")}


@dataclass
class Answer:
    """What a call gave: its status, the arrays by name, and what was seen of them where they were made.

    status    returned, raised, declined (NotImplementedError), hung, crashed
    outputs   None where the function gave None; absent where it gave nothing usable
    notes     (rule, array, sentence) of faults that only the calling process can see

    What it says may come from the target: characters that a terminal would obey are escaped.
    """

    status: str
    message: str = ""
    outputs: dict[str, NumpyArray | None] = field(default_factory=dict)
    notes: list[tuple[str, str, str]] = field(default_factory=list)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.message = _printable(self.message)
        self.notes = [(rule, array, _printable(text)) for rule, array, text in self.notes]


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


Function = Callable[..., Any]


class Caller:
    """Calls one function; holds the results of the last calls, which a later one must leave alone.

    limit: what the function's own work is done in, told how many bytes are held here.
    """

    def __init__(
        self, function: Function, contract: Contract,
        limit: Callable[[int], AbstractContextManager[None]] = lambda held: nullcontext(),
    ) -> None:  # fmt: skip
        self.function, self.contract, self.limit = function, contract, limit
        self.given = Given(contract)
        self.upstream = UPSTREAM[contract.op]

    def __call__(
        self, memory: Bytes, layout: Plan, names: tuple[str, ...], order: list[str], *, anew: bool
    ) -> Answer:
        """Call with the arena's arrays: `order` names the arguments, `names` the outputs.

        anew: let go of what is held of calls before.
        Writes what the function wrote on a device back into `memory`. Raises nothing that the function does.
        """
        if anew:
            self.kept = Kept()
        place, inputs = self.given(memory, layout)
        outputs = [place(slot) for slot in layout.outputs]
        start = time.perf_counter()
        try:
            with warnings.catch_warnings(), self.limit(self.kept.nbytes):
                warnings.simplefilter("ignore")
                found = self._results(inputs, outputs, names, order)
                place.finish()
        except NotImplementedError as error:
            return Answer("declined", str(error))
        except BaseException as error:
            return Answer("raised", _where(error) + self._misfit(order, names))
        answer = Answer("returned", seconds=time.perf_counter() - start)
        self._look(found, inputs, outputs, answer, place)
        return answer

    def _results(
        self, inputs: dict[str, Array], outputs: list[Array], names: tuple[str, ...], order: list[str]
    ) -> dict[str, Any] | str:
        """Results by name, or a sentence why they cannot be told apart."""
        if self.contract.of == "forward":
            return _DIFFERENTIATE[self.contract.arrays](self.function, self.contract, inputs, names, order)
        result = self.function(*[inputs.get(name) for name in order], *outputs)
        if self.contract.dps:
            return dict(zip(names, outputs, strict=True))
        return named(result, names, self.contract.most)

    def _misfit(self, order: list[str], names: tuple[str, ...]) -> str:
        """What the function was called with, where it does not take so many arguments; else ''."""
        given = order if self.contract.of == "backward" else [n for n in order if n not in self.upstream]
        given = [*given, *names] if self.contract.dps else given
        try:
            inspect.signature(self.function).bind(*given)
        except TypeError:
            packed = "; weights are not packed in one" if "q_weight" in given else ""
            return f"; it is called with {len(given)} arguments: {', '.join(given)}{packed}"
        except ValueError:  # of a built-in function nothing is known
            pass
        return ""

    def _look(
        self, found: dict[str, Any] | str, inputs: dict[str, Array], given: list[Array], answer: Answer,
        place: Place,
    ) -> None:  # fmt: skip
        if isinstance(found, str):
            answer.notes.append(("wrong shape, dtype or device", "", found))
            return
        arrays: dict[str, Array] = {}
        for name, array in found.items():
            reason = None if array is None else place.strange(array)
            if reason is not None:
                answer.notes.append(("wrong shape, dtype or device", name, f"{name} {reason}"))
                continue
            answer.outputs[name] = None if array is None else np.ascontiguousarray(to_numpy(array))
            if array is not None:
                arrays[name] = array
        if place.shares and not given:
            _aliases(arrays, inputs, answer)
        for name, text in self.kept.overwritten(arrays if place.shares else {}):
            answer.notes.append((OVERWRITTEN, name, text))
        said = {name for _, name, _ in answer.notes}  # of one that is an input's memory, say
        self.kept.keep({} if given else {n: x for n, x in arrays.items() if n not in said})


def probe(contract: Contract) -> None:
    """NoTarget where there are no such arrays here: a framework that is missing, a device that is."""
    try:
        if contract.arrays != "numpy":
            importlib.import_module(contract.arrays)
        Place(contract, np.zeros(64, np.uint8)).finish()
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise NoTarget(f"no {contract.arrays} arrays on {contract.device} here: {reason}") from None


def named(result: Any, names: tuple[str, ...], most: int = 0) -> dict[str, Any] | str:
    """A function's result by the outputs' names: a mapping, a tuple in their order, or one array.

    More than is asked for is a sentence, too; but None for other gradients: the operation has `most` in all.
    """
    if isinstance(result, Mapping):
        more = [str(name) for name, x in result.items() if name not in names and x is not None]
        if set(names) & set(result):
            if more:
                return f"the result has {', '.join(more)}, too: {', '.join(names)} were asked for"
            return {name: result.get(name) for name in names}
        given = ", ".join(map(str, result)) or "nothing"
        return f"the result is a mapping of {given}, not of {', '.join(names)}"
    if not isinstance(result, (tuple, list)):
        if result is not None and not hasattr(result, "shape"):
            return f"the result is a {type(result).__name__}, not a tuple of arrays: {', '.join(names)}"
        result = (result,)
    if all(x is None for x in result):
        return dict.fromkeys(names)
    many = len(result) > max(len(names), most) or any(x is not None for x in result[len(names) :])
    if len(result) < len(names) or many:
        fewer = (
            "; --needs asks for fewer" if len(result) < len(names) and names[0].startswith("grad_") else ""
        )
        return f"the result has {len(result)} values, not {len(names)}: {', '.join(names)}{fewer}"
    return dict(zip(names, result, strict=False))


def _where(error: BaseException) -> str:
    """Type and text of an error, and the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    text = text if len(text) < 400 else text[:400] + "…"
    return f"{text} ({frames[-1].filename}:{frames[-1].lineno})" if len(frames) > 1 else text


def _aliases(arrays: dict[str, Array], inputs: dict[str, Array], answer: Answer) -> None:
    """Notes for outputs that share memory with an input or with one another."""
    others = [(f"the input {name}", memory(array)) for name, array in inputs.items()]
    for name, array in arrays.items():
        mine = memory(array)
        for title, other in others:
            if shares(mine, other):
                text = f"{name} shares memory with {title}"
                answer.notes.append(("output aliases an input or another output", name, text))
        others.append((name, mine))


# ---- differentiable forwards ---------------------------------------------------------------------------


def _values(result: Any, op: str) -> dict[str, Any] | str:
    return named(result, FORWARD_VALUES[op])


def _with_torch(
    function: Function, contract: Contract, inputs: dict[str, Array], names: tuple[str, ...], order: list[str]
) -> dict[str, Any] | str:
    """The forward's values, and what torch.autograd gives for the upstream gradients."""
    torch = importlib.import_module("torch")
    leaves = {name: inputs[name].detach() for name in order if name not in UPSTREAM[contract.op]}
    for name, leaf in leaves.items():
        leaf.requires_grad_(f"grad_{name}" in names)
    values = _values(function(*leaves.values()), contract.op)
    if isinstance(values, str):
        return values
    wanted = [name for name in names if name.removeprefix("grad_") in leaves]
    pairs = [(value, inputs[up]) for value, up in zip(values.values(), UPSTREAM[contract.op], strict=True)]
    pairs = [(value, up) for value, up in pairs if value is not None and value.requires_grad]
    shapes = [f"{tuple(v.shape)} for {tuple(up.shape)}" for v, up in pairs if v.shape != up.shape]
    if shapes:
        return f"the forward's values have shape {', '.join(shapes)}"
    grads: Any = [None] * len(wanted)
    if pairs:
        of = [leaves[name.removeprefix("grad_")] for name in wanted]
        grads = torch.autograd.grad([v for v, _ in pairs], of,
                                    [up.to(v.dtype) for v, up in pairs], allow_unused=True)  # fmt: skip
    return dict(zip(wanted, grads, strict=True)) | values


def _with_jax(
    function: Function, contract: Contract, inputs: dict[str, Array], names: tuple[str, ...], order: list[str]
) -> dict[str, Any] | str:
    """The forward's values, and what jax.vjp gives for the upstream gradients."""
    jax = importlib.import_module("jax")
    leaves = {name: inputs[name] for name in order if name not in UPSTREAM[contract.op]}
    result, pull = jax.vjp(function, *leaves.values())
    values = _values(result, contract.op)
    if isinstance(values, str):
        return values
    upstream = [inputs[name] for name in UPSTREAM[contract.op]]
    _, tree = jax.tree_util.tree_flatten(result)
    grads = dict(zip(leaves, pull(jax.tree_util.tree_unflatten(tree, upstream)), strict=True))
    return {name: grads[name.removeprefix("grad_")] for name in names if name.startswith("grad_")} | values


_DIFFERENTIATE = {"torch": _with_torch, "jax": _with_jax}
