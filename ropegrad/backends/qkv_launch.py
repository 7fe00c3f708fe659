"""From a QKV problem and the memory of its arrays to the steps on the GPU: launches, products, fills.

Nothing here needs a GPU: addresses, strides and sizes go in, numbers come out.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ropegrad.arrays import nbytes
from ropegrad.backends.cublas_narrow import Narrow
from ropegrad.backends.qkv_access import Placed, standing_of, vectors
from ropegrad.backends.qkv_arguments import arguments, inner_of, token_rows
from ropegrad.backends.qkv_instance import Instance
from ropegrad.backends.qkv_workspace import (
    OPERANDS,
    Standing,
    biases_of,
    item,
    maxima_of,
    parts_of,
    pitch,
    products_of,
    scaled,
    width_of,
    workspace,
)
from ropegrad.errors import SpecError
from ropegrad.spec import QkvSpec

CHAIN = 16_384  # products that a tensor core may add before float32 takes over
_ALPHA, _ONE, _ZERO = 56, 64, 68  # bytes into the struct State
_BEFORE_HIDDEN, _BEFORE_WEIGHTS, _LAST = range(3)  # turns of `mend`
_NOTHING = (0,) * 11  # the struct Finish of qkv_pass.cu
_MENDERS = 2, 8  # blocks a multiprocessor where there is normally nothing to do, and where there is


class Launch(NamedTuple):
    """A kernel, a grid in one dimension, and its parameters, each a struct of 64-bit numbers."""

    entry: str
    grid: int
    parameters: tuple[array[int], ...]


class Fill(NamedTuple):
    """Zeros."""

    address: int
    size: int


Step = Launch | Narrow | Fill


@dataclass(frozen=True)
class Steps:
    """What is done, in order; which instance is launched; where cuBLAS has its workspace."""

    instance: Instance
    steps: tuple[Step, ...]
    cublas: int


class Room(NamedTuple):
    """Addresses of the workspace and of the state, which may stand in it or apart."""

    memory: int
    state: int


def prepare(spec: QkvSpec, arrays: dict[str, Placed], room: Room, multiprocessors: int) -> Steps:
    """The steps for these inputs and outputs by name.

    Raises SpecError for arrays that no GPU can read.
    """
    for name, one in arrays.items():
        _judge(spec, name, one)
    problem = _Problem(spec, arrays, room, multiprocessors)
    return Steps(problem.instance, tuple(problem.all_steps()), problem.block("cublas"))


def _judge(spec: QkvSpec, name: str, one: Placed) -> None:
    size = _itemsize(spec, name)
    if one.address % size or any(step % size for step in one.strides):
        raise SpecError(f"{name} has elements at addresses that are no multiple of {size} bytes: copy it")


def _itemsize(spec: QkvSpec, name: str) -> int:
    return nbytes((1,), spec.rope.table_dtype if name in ("cos", "sin") else spec.rope.dtype)


@dataclass(frozen=True)
class _Problem:
    """A problem on its way to steps."""

    spec: QkvSpec
    arrays: dict[str, Placed]
    room: Room
    multiprocessors: int

    @property
    def standing(self) -> Standing:
        return standing_of(self.spec, self.arrays)

    @property
    def _widths(self) -> tuple[int, int]:
        return vectors(self.spec, self.arrays)

    @property
    def instance(self) -> Instance:
        rope, (vector, matrix_vector) = self.spec.rope, self._widths
        return Instance(
            storage=rope.dtype, table=rope.table_dtype, operand=OPERANDS[self.spec.precision],
            vector=vector, matrix_vector=matrix_vector, interleaved=rope.pairing == "interleaved",
            half_table=rope.table == "half", add=self.spec.accumulate,
        )  # fmt: skip

    def all_steps(self) -> Iterator[Step]:
        hidden, weights = products_of(self.spec)
        if hidden or weights:
            arguments = self._arguments(parts_of(self.spec))
            if scaled(self.spec):
                yield Fill(self.block("maxima"), 4 * sum(maxima_of(self.spec)))
            yield Launch("qkv_convert", self.multiprocessors, (arguments,))
            yield from self._mend(arguments, _BEFORE_HIDDEN)
            if hidden:
                yield from self._hidden(arguments)
            else:
                yield from self._mend(arguments, _BEFORE_WEIGHTS)
            if weights:
                yield from self._weights(arguments)
        yield from self._biases()

    # ---- the pass ------------------------------------------------------------------------------------------

    def _mend(
        self, arguments: array[int], turn: int, finish: tuple[int, ...] = _NOTHING, busy: bool = False
    ) -> Iterator[Step]:
        """What is normally nothing, unless `busy`, and without scales nothing for certain."""
        grid = _MENDERS[busy] * self.multiprocessors
        if busy or scaled(self.spec):
            yield Launch("qkv_mend", grid, (arguments, array("q", finish), array("q", [turn])))

    # ---- products ------------------------------------------------------------------------------------------

    def _hidden(self, arguments: array[int]) -> Iterator[Step]:
        spec, width = self.spec, width_of(self.spec, parts_of(self.spec))
        out = self.arrays["grad_hidden_states"]
        aside = "hidden_states" in self.standing.aside
        at = self.block("product") if aside else out.address
        left = self.block("d"), pitch(spec, width), False
        right = self._operand("weights", f"{parts_of(spec)[0]}_weight", "w")
        yield from self._product(0, left, right, at, spec.tokens, width)
        finish = at, *token_rows(out), spec.tokens, self._columns, inner_of(spec), 0, 0, int(not aside)
        yield from self._mend(arguments, _BEFORE_WEIGHTS, finish, aside)

    def _operand(self, name: str, array: str, block: str) -> tuple[int, int]:
        """Address and pitch of the products' right operand: a copy, or the array as it is."""
        if name in self.standing.in_place:
            return self.arrays[array].address, item(self.spec) * self._columns
        return self.block(block), pitch(self.spec, self._columns)

    def _weights(self, arguments: array[int]) -> Iterator[Step]:
        spec, parts = self.spec, parts_of(self.spec)
        step = pitch(spec, width_of(spec, parts))
        right = self._operand("hidden_states", "hidden_states", "x")
        for first, rows, out, aside in self._runs(parts):
            at = self.block("product") if aside else out.address
            yield from self._product(
                1, (self.block("d") + item(spec) * first, step, True), right, at, rows, spec.tokens
            )
            to = (out.address, 0, *(out.strides if aside else (4 * self._columns, 4)))
            finish = at, *to, rows, self._columns, max(rows, 1), 1, first, int(not aside)
            if rows and self._columns:
                yield from self._mend(arguments, _LAST, finish, aside)

    def _runs(self, parts: tuple[str, ...]) -> list[tuple[int, int, Placed, bool]]:
        """First column of D, rows, output, and whether its product stands aside, for one product each.

        Neighbours in D whose outputs are neighbours in memory are one. Not where all that is done is to fill
        them with zeros: CUDA refuses to fill across allocations, though a kernel may write there.
        """
        runs: list[tuple[int, int, Placed, bool]] = []
        column = 0
        for part in parts:
            rows, need = self.spec.rows(part), f"{part}_weight"
            if need in self.spec.needs:
                out, aside = self.arrays[f"grad_{need}"], need in self.standing.aside
                if (
                    self.spec.tokens
                    and runs
                    and not aside
                    and not runs[-1][3]
                    and sum(runs[-1][:2]) == column
                ):
                    first, before, start, _ = runs[-1]
                    if start.address + 4 * before * self._columns == out.address:
                        runs[-1] = (first, before + rows, start, False)
                        column += rows
                        continue
                runs.append((column, rows, out, aside))
            column += rows
        return runs

    def _product(
        self, which: int, left: tuple[int, int, bool], right: tuple[int, int], out: int, m: int, k: int
    ) -> Iterator[Step]:
        """left·right; on tensor cores in chains of at most CHAIN products."""
        n, state, size = self._columns, self.room.state, item(self.spec)
        if not (m and n):
            return
        if not k:
            yield Fill(out, 4 * m * n)
        chains = -(-k // CHAIN) if scaled(self.spec) else 1
        each = -(-k // max(chains, 1) // 64) * 64  # of like length
        for start in range(0, k, max(each, 1)):
            (at, step, transposed), (other, other_step) = left, right
            yield Narrow(
                at + start * (step if transposed else size), step, transposed, other + start * other_step,
                other_step, out, m, n, min(each, k - start), state + _ALPHA + 4 * which,
                state + (_ONE if start else _ZERO),
            )  # fmt: skip

    def _biases(self) -> Iterator[Step]:
        parts = biases_of(self.spec)
        width = width_of(self.spec, parts)
        if width:
            outs = [self.arrays.get(f"grad_{part}_bias") for part in "qkv"]
            values = [0 if out is None else out.address for out in outs]
            values += [0 if out is None else out.strides[0] for out in outs]
            yield Launch("qkv_biases", -(-width // 32), (self._arguments(parts), array("q", values)))

    # ---- arguments -----------------------------------------------------------------------------------------

    @property
    def _columns(self) -> int:
        return self.spec.hidden_size or 0

    def block(self, name: str) -> int:
        """Address of a block of the workspace."""
        return self.room.memory + workspace(self.spec, self.standing).offsets[name]

    def _arguments(self, parts: tuple[str, ...]) -> array[int]:
        blocks = {name: self.block(name) for name in ("maxima", "d", "x", "w")}
        in_place = self.standing.in_place
        blocks |= {block: 0 for name, block in (("hidden_states", "x"), ("weights", "w")) if name in in_place}
        return arguments(self.spec, self.arrays, parts, blocks, self.room.state)
