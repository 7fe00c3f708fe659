"""From a QKV problem and the memory of its arrays to the steps on the GPU: launches, products, fills.

Nothing here needs a GPU: addresses, strides and sizes go in, numbers come out.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from ropegrad.arrays import nbytes
from ropegrad.backends.cublas_narrow import Narrow
from ropegrad.backends.hopper import Both, Matrix
from ropegrad.backends.qkv_access import Placed, dense, standing_of, vectors
from ropegrad.backends.qkv_arguments import arguments, inner_of, token_rows
from ropegrad.backends.qkv_instance import Instance
from ropegrad.backends.qkv_workspace import (
    Standing,
    biases_of,
    item,
    maxima_of,
    operand,
    parts_of,
    pitch,
    products_of,
    terms,
    width_of,
    workspace,
)
from ropegrad.errors import SpecError
from ropegrad.spec import QkvSpec

CHAIN = 16_384  # products that a tensor core may add before float32 takes over
SHORT = 256  # the same for the first terms of float32 numbers: a tensor core cuts off where float32 rounds
PROMOTED = 64  # the same in qkv_multiply.cu
_ALPHA, _ONE, _ZERO, _FURTHER = 56, 64, 68, 104  # bytes into the struct State
_BEFORE_HIDDEN, _BEFORE_WEIGHTS, _LAST = range(3)  # turns of `mend`
_NOTHING = (0,) * 11  # the struct Finish of qkv_pass.cu
_TURNS = (  # by terms of an element: which of left and of right, their alpha, the longest chain
    ((0, 0, _ALPHA, 1 << 31),),
    ((0, 0, _ALPHA, CHAIN),),
    ((0, 1, _FURTHER, CHAIN), (1, 0, _FURTHER, CHAIN), (0, 0, _ALPHA, SHORT)),
)
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


Step = Launch | Narrow | Both | Fill


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


class Processor(NamedTuple):
    """A GPU: how many multiprocessors, and whether they are Hopper's."""

    multiprocessors: int
    hopper: bool


def prepare(spec: QkvSpec, arrays: dict[str, Placed], room: Room, processor: Processor) -> Steps:
    """The steps for these inputs and outputs by name.

    Raises SpecError for arrays that no GPU can read.
    """
    for name, one in arrays.items():
        _judge(spec, name, one)
    problem = _Problem(spec, arrays, room, processor)
    return Steps(problem.instance, tuple(problem.all_steps()), problem.block("cublas"))


def _judge(spec: QkvSpec, name: str, one: Placed) -> None:
    size = _itemsize(spec, name)
    if one.address % size or any(step % size for step in one.strides):
        raise SpecError(f"{name} has elements at addresses that are no multiple of {size} bytes: copy it")


def _itemsize(spec: QkvSpec, name: str) -> int:
    return nbytes((1,), spec.rope.table_dtype if name in ("cos", "sin") else spec.rope.dtype)


def _chains(k: int, longest: int) -> Iterator[tuple[int, int]]:
    """Starts and lengths of at most so many products each, all but the last of like length."""
    count = -(-k // longest)
    each = -(-k // max(count, 1) // 64) * 64
    for start in range(0, k, max(each, 1)):
        yield start, min(each, k - start)


@dataclass(frozen=True)
class _Operand:
    """A matrix of the products in memory: bytes from row to row, and to its second term."""

    address: int
    pitch: int
    second: int
    transposed: bool = False

    def term(self, number: int) -> int:
        return self.address + number * self.second


@dataclass(frozen=True)
class _Problem:
    """A problem on its way to steps."""

    spec: QkvSpec
    arrays: dict[str, Placed]
    room: Room
    processor: Processor

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
            storage=rope.dtype, table=rope.table_dtype, operand=operand(self.spec), two=terms(self.spec) == 2,
            vector=vector, matrix_vector=matrix_vector, interleaved=rope.pairing == "interleaved",
            half_table=rope.table == "half", add=self.spec.accumulate,
        )  # fmt: skip

    def all_steps(self) -> Iterator[Step]:
        hidden, weights = products_of(self.spec)
        if hidden or weights:
            arguments = self._arguments(parts_of(self.spec))
            if terms(self.spec):
                yield Fill(self.block("maxima"), 4 * sum(maxima_of(self.spec)))
            for _ in range(2 if terms(self.spec) == 2 else 1):  # again, where the first scale did not fit
                yield Launch("qkv_convert", self.processor.multiprocessors, (arguments,))
            yield from self._mend(arguments, _BEFORE_HIDDEN)
            if self.own:
                yield self._both(arguments)
            if hidden:
                yield from self._hidden(arguments)
            else:
                yield from self._mend(arguments, _BEFORE_WEIGHTS)
            if weights:
                yield from self._weights(arguments)
        yield from self._biases()

    @property
    def own(self) -> bool:
        """Whether qkv_multiply.cu multiplies: pairs of results, into all of D's columns or none."""
        spec = self.spec
        wanted = [need for need in spec.needs if not need.endswith("_bias")]
        return (
            self.processor.hopper
            and terms(spec) == 2
            and spec.rope.dtype == "float32"
            and self._columns % 2 == 0
            and len(wanted) - ("hidden_states" in wanted) in (0, len(parts_of(spec)))
            and all(dense(self.arrays[f"grad_{need}"], 4, 8) for need in wanted)
        )

    @property
    def aside(self) -> tuple[str, ...]:
        """Needs whose product stands in the workspace at first."""
        return () if self.own else self.standing.aside

    # ---- the pass ------------------------------------------------------------------------------------------

    def _mend(
        self, arguments: array[int], turn: int, finish: tuple[int, ...] = _NOTHING, busy: bool = False
    ) -> Iterator[Step]:
        """What is normally nothing, unless `busy`, and without scales nothing for certain."""
        grid = _MENDERS[busy] * self.processor.multiprocessors
        if busy or terms(self.spec) == 1 or (terms(self.spec) and finish is not _NOTHING):
            yield Launch("qkv_mend", grid, (arguments, array("q", finish), array("q", [turn])))

    # ---- products ------------------------------------------------------------------------------------------

    def _hidden(self, arguments: array[int]) -> Iterator[Step]:
        spec, width = self.spec, width_of(self.spec, parts_of(self.spec))
        out = self.arrays["grad_hidden_states"]
        aside = "hidden_states" in self.aside
        at = self.block("product") if aside else out.address
        left = self._operand("d", spec.tokens, width)
        right = self._right("weights", f"{parts_of(spec)[0]}_weight", "w", width)
        if not self.own:
            yield from self._product(0, left, right, at, spec.tokens, width)
        finish = at, *token_rows(out), spec.tokens, self._columns, inner_of(spec), 0, 0, int(not aside)
        yield from self._mend(arguments, _BEFORE_WEIGHTS, finish, aside)

    def _both(self, arguments: array[int]) -> Both:
        spec, columns, width = self.spec, self._columns, width_of(self.spec, parts_of(self.spec))
        hidden, weights = products_of(spec)
        d = ("d", spec.tokens, width)  # in the place of what no product reads
        sizes = (d, ("x", spec.tokens, columns) if weights else d, ("w", width, columns) if hidden else d)
        operands = [(self._operand(block, rows, count), rows, count) for block, rows, count in sizes]
        maps = tuple(
            Matrix(one.term(number), rows, count, one.pitch)
            for one, rows, count in operands
            for number in range(2)
        )
        outs = [
            self.arrays.get(f"grad_{need}") for need in ("hidden_states", *(f"{p}_weight" for p in "qkv"))
        ]
        results = array("q", [0 if out is None else out.address for out in outs])
        entry = "qkv_multiply_add" if spec.accumulate else "qkv_multiply"
        return Both(entry, self.processor.multiprocessors, (arguments, results), maps)

    def _right(self, name: str, array: str, block: str, rows: int) -> _Operand:
        """A copy, or the array as it is."""
        if name in self.standing.in_place:
            return _Operand(self.arrays[array].address, item(self.spec) * self._columns, 0)
        return self._operand(block, rows, self._columns)

    def _operand(self, block: str, rows: int, columns: int) -> _Operand:
        step = pitch(self.spec, columns)
        return _Operand(self.block(block), step, rows * step)

    def _weights(self, arguments: array[int]) -> Iterator[Step]:
        spec, parts = self.spec, parts_of(self.spec)
        left = replace(self._operand("d", spec.tokens, width_of(spec, parts)), transposed=True)
        right = self._right("hidden_states", "hidden_states", "x", spec.tokens)
        for first, rows, out, aside in self._runs(parts):
            at = self.block("product") if aside else out.address
            part = replace(left, address=left.address + item(spec) * first)
            if not self.own:
                yield from self._product(1, part, right, at, rows, spec.tokens)
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
                out, aside = self.arrays[f"grad_{need}"], need in self.aside
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
        self, which: int, left: _Operand, right: _Operand, out: int, m: int, k: int
    ) -> Iterator[Step]:
        """left·right in chains; of two terms the smaller products first."""
        n, state, size = self._columns, self.room.state, item(self.spec)
        if not (m and n):
            return
        if not k:
            yield Fill(out, 4 * m * n)
        beta = _ZERO
        for term, other_term, alpha, longest in _TURNS[terms(self.spec)]:
            at, step, transposed = left.term(term), left.pitch, left.transposed
            for start, length in _chains(k, longest):
                yield Narrow(
                    at + start * (step if transposed else size), step, transposed,
                    right.term(other_term) + start * right.pitch, right.pitch, out, m, n, length,
                    state + alpha + 4 * which, state + beta,
                )  # fmt: skip
                beta = _ONE

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
