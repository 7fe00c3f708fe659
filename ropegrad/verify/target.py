"""Somebody else's function: where it is, how it is called, and what it promises."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropegrad.errors import SpecError
from ropegrad.spec import (
    QKV_NEEDS,
    QKV_WEIGHTS,
    ROPE_NEEDS,
    QkvSpec,
    RopeSpec,
    judge_dtype,
    judge_word,
    judge_words,
)

OPS = ("rope", "qkv")
OF = ("backward", "forward")
ARRAYS = ("numpy", "torch", "cupy", "jax")
SHAPES = {"bsd": "B, S, ·", "1sd": "1, S, ·", "sd": "S, ·"}  # of tables


@dataclass(frozen=True, kw_only=True)
class Contract:
    """What a target promises: the operation, how it is called, and ropegrad's own options.

    op          rope (problem 068) or qkv (problem 064)
    of          backward, or forward: a differentiable forward whose framework gives the gradients
    arrays      the namespace of the arrays it takes; device: where they are
    dps         it writes into outputs that come last among its arguments, and returns nothing
    table_shape tables are [B, S, ·], [1, S, ·] or [S, ·]

    Raises SpecError where a word is unknown or two do not fit together.
    """

    op: str = "rope"
    of: str = "backward"
    arrays: str = "numpy"
    device: str = "cpu"
    dps: bool = False
    dtype: str = "float32"
    table_dtype: str = "float32"
    table_shape: str = "bsd"
    layout: str = "bhsd"
    pairing: str = "half"
    table: str = "full"
    adjoint: str = "exact"
    precision: str = "highest"
    needs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        judge_word("op", self.op, OPS)
        judge_word("of", self.of, OF)
        judge_word("arrays", self.arrays, ARRAYS)
        judge_word("device", self.device, ("cpu", "cuda"))
        judge_word("table_shape", self.table_shape, tuple(SHAPES))
        judge_words(self.layout, self.pairing, self.table, self.adjoint)
        judge_word("precision", self.precision, ("highest", "high", "medium"))
        judge_dtype("dtype", self.dtype)
        judge_dtype("table_dtype", self.table_dtype)
        for name in self.needs:
            judge_word("needs", name, ROPE_NEEDS if self.op == "rope" else QKV_NEEDS)
            if self.needs.count(name) > 1:
                raise SpecError(f"needs names {name!r} more than once")
        self._judge_pairs()

    def _judge_pairs(self) -> None:
        if self.of == "forward" and self.arrays not in ("torch", "jax"):
            raise SpecError(f"of='forward' with arrays={self.arrays!r}: only torch and jax differentiate")
        if self.of == "forward" and (self.dps or self.adjoint == "paired"):
            raise SpecError("of='forward' has no outputs to write into and no formula but its own gradient")
        if self.dps and self.arrays == "jax":
            raise SpecError("dps with arrays='jax': JAX arrays cannot be written")
        if self.op == "qkv" and self.adjoint != "exact":
            raise SpecError("adjoint='paired' is the formula of op='rope' only")
        if (self.arrays == "cupy") != (self.device == "cuda") and self.arrays != "torch":
            raise SpecError(
                f"arrays={self.arrays!r} with device={self.device!r}: cupy is on cuda, this on cpu"
            )

    @property
    def wanted(self) -> tuple[str, ...]:
        """Inputs whose gradients are wanted, in the result's order."""
        every = ROPE_NEEDS if self.op == "rope" else QKV_NEEDS
        chosen = self.needs or (ROPE_NEEDS if self.op == "rope" else QKV_WEIGHTS)
        return tuple(name for name in every if name in chosen)

    @property
    def most(self) -> int:
        """How many gradients the operation has."""
        return len(ROPE_NEEDS if self.op == "rope" else QKV_NEEDS)

    def table_batch(self, batch: int) -> int | None:
        """Batch axis of the tables of a problem with this many batches."""
        return {"bsd": batch, "1sd": 1, "sd": None}[self.table_shape]

    def spec(
        self, *, batch: int, heads: int, kv_heads: int, seq: int, head_dim: int, rotary_dim: int,
        hidden_size: int | None = None,
    ) -> RopeSpec | QkvSpec:  # fmt: skip
        """The problem of these sizes under this contract; hidden_size for op qkv."""
        rope = RopeSpec(
            batch=batch, heads=heads, kv_heads=kv_heads, seq=seq, head_dim=head_dim, rotary_dim=rotary_dim,
            table_batch=self.table_batch(batch), layout=self.layout, pairing=self.pairing, table=self.table,
            adjoint=self.adjoint, dtype=self.dtype, table_dtype=self.table_dtype,
            needs=self.wanted if self.op == "rope" else (),
        )  # fmt: skip
        if self.op == "rope":
            return rope
        return QkvSpec(rope=rope, hidden_size=hidden_size, precision=self.precision, needs=self.wanted)


class NoTarget(Exception):
    """The target cannot be had: a sentence that says why."""


def load(target: str, folder: str = ".") -> Callable[..., Any]:
    """The function called `package.module:function` or `path/to/file.py:function`, dots in it allowed.

    Modules are looked for in `folder`, too. A class is called without arguments, as for a torch Module.
    Raises NoTarget.
    """
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise NoTarget(f"{target!r} is no target: write package.module:function or path/to/file.py:function")
    sys.path.insert(0, str(Path(folder).resolve()))
    found: Any = _module(place, folder)
    for part in name.split("."):
        if not hasattr(found, part):
            functions = [n for n, v in vars(found).items() if callable(v) and not n.startswith("_")]
            raise NoTarget(f"{place} has no {part!r}; it has {', '.join(functions) or 'no functions'}")
        found = getattr(found, part)
    if isinstance(found, type):
        found = found()
    if not callable(found):
        raise NoTarget(f"{target} is a {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]


def _module(place: str, folder: str) -> Any:
    if not place.endswith(".py"):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise NoTarget(
                f"cannot import {place}: {error}; for a file write its path, ending in .py"
            ) from None
    path = Path(folder, place).resolve()
    if not path.is_file():
        raise NoTarget(f"there is no file {place}")
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # as import does: dataclasses and pickles in it look for it there
    spec.loader.exec_module(module)
    return module
