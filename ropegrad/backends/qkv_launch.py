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
from ropegrad.backends.qkv_instance import THREADS, Instance
from ropegrad.backends.qkv_workspace import (
    biases_of,
    maxima_of,
    parts_of,
    pitch,
    products_of,
    width_of,
    workspace,
)
from ropegrad.errors import SpecError
from ropegrad.spec import QkvSpec

CHAIN = 16_384  # products that a tensor core may add before float32 takes over
ALIGNED = 16  # bytes of the widest access
OPERANDS = {"high": "float16", "medium": "bfloat16"}
GRADIENTS = {"q": "grad_query", "k": "grad_key", "v": "grad_value"}
_ALPHA, _ONE, _ZERO = 56, 64, 68  # bytes into the struct State
_TILE = 64, 32  # rows of a tile of `convert`, vectors of its columns
_WAVES = 8  # blocks a multiprocessor where they take turns


class Placed(NamedTuple):
    """An array on the device: address and strides in bytes."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


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


def aside_of(spec: QkvSpec, arrays: dict[str, Placed]) -> tuple[str, ...]:
    """Needs whose product cannot stand in the output at once: it is rounded, added or spread later."""
    names = [need for need in spec.needs if not need.endswith("_bias")]
    direct = spec.rope.dtype == "float32" and not spec.accumulate
    return tuple(n for n in names if not direct or not _dense(arrays[f"grad_{n}"], 4, ALIGNED))


def _dense(one: Placed, itemsize: int, aligned: int) -> bool:
    step = itemsize
    for size, stride in zip(reversed(one.shape), reversed(one.strides), strict=True):
        if size > 1 and stride != step:
            return False
        step *= size
    return one.address % aligned == 0


def vectors(spec: QkvSpec, arrays: dict[str, Placed]) -> tuple[int, int]:
    """Channels an access, of the gradients and of the matrices: the widest that widths and memory allow."""
    rope, size = spec.rope, nbytes((1,), spec.rope.dtype)
    grads = [arrays[name] for name in GRADIENTS.values() if name in arrays]
    tables = [arrays[name] for name in ("cos", "sin") if name in arrays]
    matrices = [arrays[n] for n in ("hidden_states", *(f"{p}_weight" for p in "qkv")) if n in arrays]
    interleaved = rope.pairing == "interleaved"
    turned = rope.rotary_dim if interleaved else rope.rotary_dim // 2

    def head(vector: int) -> bool:
        run = vector // 2 if interleaved and rope.table == "half" else vector
        whole = rope.head_dim % vector == 0 and turned % vector == 0
        fits = all(_aligned(x, size, vector) for x in grads)
        return whole and fits and all(_aligned(x, nbytes((1,), rope.table_dtype), run) for x in tables)

    def matrix(vector: int) -> bool:
        return (spec.hidden_size or 0) % vector == 0 and all(_aligned(x, size, vector) for x in matrices)

    widths = [width for width in (8, 4, 2) if width * size <= ALIGNED]
    return next(filter(head, widths), 1), next(filter(matrix, widths), 1)


def _aligned(one: Placed, itemsize: int, vector: int) -> bool:
    """Whether `vector` neighbours on the last axis are one access, or several of 16 bytes."""
    if not one.shape or 0 in one.shape:
        return True
    unit = min(vector * itemsize, ALIGNED)
    if one.shape[-1] > 1 and one.strides[-1] != itemsize:
        return False
    others = zip(one.shape[:-1], one.strides[:-1], strict=True)
    return one.address % unit == 0 and all(step % unit == 0 for size, step in others if size > 1)


@dataclass(frozen=True)
class _Problem:
    """A problem on its way to steps."""

    spec: QkvSpec
    arrays: dict[str, Placed]
    room: Room
    multiprocessors: int

    @property
    def aside(self) -> tuple[str, ...]:
        return aside_of(self.spec, self.arrays)

    @property
    def instance(self) -> Instance:
        rope = self.spec.rope
        vector, matrix_vector = vectors(self.spec, self.arrays)
        return Instance(
            storage=rope.dtype, table=rope.table_dtype, operand=OPERANDS[self.spec.precision],
            vector=vector, matrix_vector=matrix_vector, interleaved=rope.pairing == "interleaved",
            half_table=rope.table == "half", add=self.spec.accumulate,
        )  # fmt: skip

    def all_steps(self) -> Iterator[Step]:
        hidden, weights = products_of(self.spec)
        if hidden or weights:
            parts = parts_of(self.spec)
            arguments = self._arguments(parts)
            tiles = self._tiles(parts)
            clearing = -(-sum(maxima_of(self.spec)) // THREADS["qkv_guess"])
            yield Launch("qkv_guess", max(1, min(64, clearing)), (arguments,))
            yield Launch("qkv_convert", max(1, tiles), (arguments, array("q", [0])))
            yield Launch("qkv_judge", 1, (arguments,))
            yield Launch("qkv_convert", self._few(tiles), (arguments, array("q", [1])))
            if hidden:
                yield from self._hidden(arguments)
            if weights:
                yield Launch("qkv_convert", self._few(tiles), (arguments, array("q", [2])))
                yield from self._weights(arguments)
        yield from self._biases()

    # ---- products ------------------------------------------------------------------------------------------

    def _hidden(self, arguments: array[int]) -> Iterator[Step]:
        spec, width = self.spec, width_of(self.spec, parts_of(self.spec))
        out = self.arrays["grad_hidden_states"]
        aside = "hidden_states" in self.aside
        at = self.block("product") if aside else out.address
        left, right = (self.block("d"), pitch(width), False), (self.block("w"), pitch(self._columns))
        yield from self._product(0, left, right, at, spec.tokens, width)
        yield from self._finish(arguments, 0, at, self._token_rows(out), spec.tokens, self._inner, 0, aside)

    def _weights(self, arguments: array[int]) -> Iterator[Step]:
        spec, parts = self.spec, parts_of(self.spec)
        step = pitch(width_of(spec, parts))
        right = self.block("x"), pitch(self._columns)
        for first, rows, out, aside in self._runs(parts):
            at = self.block("product") if aside else out.address
            yield from self._product(
                1, (self.block("d") + 2 * first, step, True), right, at, rows, spec.tokens
            )
            to = (out.address, 0, *(out.strides if aside else (4 * self._columns, 4)))
            yield from self._finish(arguments, 1, at, to, rows, max(rows, 1), first, aside)

    def _runs(self, parts: tuple[str, ...]) -> list[tuple[int, int, Placed, bool]]:
        """First column of D, rows, output, and whether its product stands aside, for one product each.

        Neighbours in D whose outputs are neighbours in memory are one.
        """
        runs: list[tuple[int, int, Placed, bool]] = []
        column = 0
        for part in parts:
            rows, need = self.spec.rows(part), f"{part}_weight"
            if need in self.spec.needs:
                out, aside = self.arrays[f"grad_{need}"], need in self.aside
                if runs and not aside and not runs[-1][3] and sum(runs[-1][:2]) == column:
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
        """left·right in chains of at most CHAIN products."""
        n, state = self._columns, self.room.state
        if not (m and n):
            return
        if not k:
            yield Fill(out, 4 * m * n)
        chains = -(-k // CHAIN)
        each = -(-k // max(chains, 1) // 64) * 64  # of like length
        for start in range(0, k, max(each, 1)):
            (at, step, transposed), (other, other_step) = left, right
            yield Narrow(
                at + start * (step if transposed else 2), step, transposed, other + start * other_step,
                other_step, out, m, n, min(each, k - start), state + _ALPHA + 4 * which,
                state + (_ONE if start else _ZERO),
            )  # fmt: skip

    def _finish(
        self, arguments: array[int], which: int, product: int, to: tuple[int, ...], rows: int, inner: int,
        first: int, aside: bool,
    ) -> Iterator[Step]:  # fmt: skip
        if rows and self._columns:
            values = [product, *to, rows, self._columns, inner, which, first, int(not aside)]
            yield Launch("qkv_finish", self._few(rows), (arguments, array("q", values)))

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

    @property
    def _inner(self) -> int:
        """Tokens that follow each other in `inner`: positions, or batches in layout sbhd."""
        rope = self.spec.rope
        return max(rope.batch if rope.layout == "sbhd" else rope.seq, 1)

    def block(self, name: str) -> int:
        """Address of a block of the workspace."""
        return self.room.memory + workspace(self.spec, self.aside).offsets[name]

    def _few(self, blocks: int) -> int:
        return max(1, min(blocks, _WAVES * self.multiprocessors))

    def _tiles(self, parts: tuple[str, ...]) -> int:
        spec, (vector, matrix_vector) = self.spec, vectors(self.spec, self.arrays)
        (hidden, weights), width = products_of(spec), width_of(spec, parts)
        matrices = ((spec.tokens, width, vector), (spec.tokens * weights, self._columns, matrix_vector),
                    (width * hidden, self._columns, matrix_vector))  # fmt: skip
        rows, vectors_ = _TILE
        return sum(-(-height // rows) * -(-wide // (vectors_ * v)) for height, wide, v in matrices)

    def _heads(self, name: str) -> tuple[int, ...]:
        """Address, strides of outer, inner, head and channel."""
        one = self.arrays.get(name)
        if one is None:
            return (0,) * 5
        steps = self._steps(one)
        order = {"bhsd": (0, 2, 1, 3), "bshd": (0, 1, 2, 3), "sbhd": (0, 1, 2, 3)}[self.spec.rope.layout]
        return (one.address, *(steps[axis] for axis in order))

    def _token_rows(self, one: Placed | None) -> tuple[int, ...]:
        return (0,) * 4 if one is None else (one.address, *self._steps(one))

    def _table(self, name: str) -> tuple[int, ...]:
        """Address, strides of outer, inner and column: one table for all batches has none of batch."""
        one = self.arrays.get(name)
        if one is None:
            return (0,) * 4
        steps = self._steps(one)
        batch, token, column = steps if len(steps) == 3 else (0, *steps)
        return (one.address, *((token, batch) if self.spec.rope.layout == "sbhd" else (batch, token)), column)

    @staticmethod
    def _steps(one: Placed) -> tuple[int, ...]:
        return tuple(step if size > 1 else 0 for step, size in zip(one.strides, one.shape, strict=True))

    def _arguments(self, parts: tuple[str, ...]) -> array[int]:
        """The struct Arguments of qkv_inputs.cuh for a D of these parts."""
        spec, rope = self.spec, self.spec.rope
        (hidden, weights), width, columns = products_of(spec), width_of(spec, parts), self._columns
        values: list[int] = []
        for part in "qkv":
            values += self._heads(GRADIENTS[part])
        values += [spec.rows(part) if part in parts else 0 for part in "qkv"]
        values += [*self._table("cos"), *self._table("sin")]
        values += self._token_rows(self.arrays.get("hidden_states") if weights else None)
        for part in "qkv":
            one = self.arrays.get(f"{part}_weight") if hidden else None
            values += (0,) * 4 if one is None else (one.address, 0, *self._steps(one))
        values += [hidden, weights, spec.tokens, self._inner, rope.head_dim, rope.rotary_dim, width, columns]
        values += [self.block(name) for name in "dxw"] + [pitch(width), pitch(columns), pitch(columns)]
        maxima = self.block("maxima")
        for length in maxima_of(spec):
            values.append(maxima)
            maxima += 4 * length
        return array("q", [*values, sum(maxima_of(spec)), self.room.state])
