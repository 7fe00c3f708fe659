"""The matrix products of the projections' backward in NumPy, on gradients that stand packed in one matrix."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ropegrad.arrays import numpy_dtype
from ropegrad.backends.base import Inputs, Outputs
from ropegrad.backends.blas import one_thread
from ropegrad.backends.numpy_tile import NumpyArray, cast, store
from ropegrad.backends.threads import share
from ropegrad.spec import QkvSpec

Blocks = dict[str, NumpyArray]  # dQ, dK, dV as 'q', 'k', 'v': column blocks of the matrix 'packed'

PARALLEL = 1 << 24  # multiplications below which starting threads costs more than it saves
ROWS, COLUMNS = 512, 1024  # at most, of a block: smaller ones cost 5 % of BLAS's rate, larger ones cores


class Product(NamedTuple):
    """C = A·B, of matrices; C is to be written."""

    a: NumpyArray
    b: NumpyArray
    c: NumpyArray

    def blocks(self) -> Iterator[Product]:
        """The product in parts that depend on its shape alone, whoever multiplies them."""
        for rows in _cut(self.c.shape[0], ROWS):
            for columns in _cut(self.c.shape[1], COLUMNS):
                yield Product(self.a[rows], self.b[:, columns], self.c[rows, columns])

    def multiply(self) -> None:
        """By BLAS, straight into C."""
        np.matmul(self.a, self.b, out=self.c)


def _cut(length: int, most: int) -> Iterator[slice]:
    """Equal parts, as few as may be."""
    parts = -(-length // most)
    for i in range(parts):
        yield slice(length * i // parts, length * (i + 1) // parts)


def multiply(products: list[Product], threads: int) -> None:
    """All the products, block by block on so many threads, each block by BLAS on one."""
    blocks = [block for product in products for block in product.blocks()]
    work = sum(product.c.size * product.a.shape[1] for product in products)
    with one_thread():  # from the first block to the last; its workers may come and go
        share([partial(_block, block) for block in blocks], threads if work >= PARALLEL else 1, lambda: None)


def _block(product: Product, _: None) -> None:
    with one_thread():  # where the number is a thread's own
        product.multiply()


def gradients(spec: QkvSpec, inputs: Inputs, blocks: Blocks, out: Outputs) -> dict[str, Product]:
    """dX = [dQ dK dV]·[Wq; Wk; Wv] and dW = dYᵀ·X for each weight, by the gradients' names.

    C is the output itself where BLAS can write there; `settle` brings the others home.
    """
    compute = numpy_dtype(spec.rope.compute)
    wanted = {}
    if "hidden_states" in spec.needs:
        weights = np.concatenate([cast(inputs[f"{part}_weight"], compute) for part in "qkv"])
        wanted["grad_hidden_states"] = blocks["packed"], weights
    parts = [part for part in "qkv" if f"{part}_weight" in spec.needs]
    if parts:
        hidden = matrix(inputs["hidden_states"], compute)
        wanted |= {f"grad_{part}_weight": (blocks[part].T, hidden) for part in parts}
    return {name: Product(a, b, _room(spec, a, b, out.get(name))) for name, (a, b) in wanted.items()}


def _room(spec: QkvSpec, a: NumpyArray, b: NumpyArray, out: NumpyArray | None) -> NumpyArray:
    shape = (a.shape[0], b.shape[1])
    if out is not None and out.dtype == a.dtype and out.flags.c_contiguous and not spec.accumulate:
        return out.reshape(shape)
    return np.empty(shape, a.dtype)


def settle(spec: QkvSpec, name: str, value: NumpyArray, out: NumpyArray | None) -> NumpyArray:
    """A gradient in its own shape, rounded once to its dtype, in `out` where given."""
    value = value.reshape(spec.output(name.removeprefix("grad_"))[0])
    if out is None:
        return cast(value, numpy_dtype(spec.rope.dtype))
    if not np.may_share_memory(value, out):
        store(value, out, accumulate=spec.accumulate)
    return out


def matrix(x: NumpyArray, dtype: np.dtype[Any]) -> NumpyArray:
    """Rows of the last axis as a dense matrix; a view wherever one exists."""
    return np.ascontiguousarray(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), dtype)


def copies(spec: QkvSpec, inputs: Inputs) -> list[str]:
    """What the products copy, for `explain`."""
    lines = []
    if "hidden_states" in spec.needs:
        height = sum(map(spec.rows, "qkv"))
        lines.append(f"copies the three weights into one matrix {height} x {spec.hidden_size}")
    if any(f"{part}_weight" in spec.needs for part in "qkv"):
        hidden, compute = inputs["hidden_states"], numpy_dtype(spec.rope.compute)
        if not (hidden.flags.c_contiguous and hidden.dtype == compute):
            lines.append(f"copies hidden_states into a dense {compute} matrix")
    return lines
