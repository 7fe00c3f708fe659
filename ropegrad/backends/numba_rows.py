"""Rows of heads for the compiled loop, one or two at a time. `p` is its Problem, `side` its Side."""

from __future__ import annotations

import numpy as np
from numba import njit

from ropegrad.backends.numba_memory import give, read, take, write
from ropegrad.backends.numba_numbers import (
    BF16,
    BFLOAT16,
    F16,
    FLOAT32,
    FLOAT64,
    load,
    narrow,
    store,
    store_sum,
    widen,
)

_U16, _U32, _U64 = np.uint16(0), np.uint32(0), np.uint64(0)


@njit(forceinline=True)
def size_of(kind):
    """Bytes of a stored number."""
    return 8 if kind == FLOAT64 else 4 if kind == FLOAT32 else 2


@njit(forceinline=True)
def as_is(p, rows):
    """Whether these rows can be computed with where they are."""
    return rows.kind == p.compute and rows.channel == p.item and not p.interleaved


@njit
def move(size, source, source_step, to, step, n):
    """n elements bit for bit."""
    for i in range(n):
        a, b = source + i * source_step, to + i * step
        if size == 2:
            write(b, 0, read(a, 0, _U16))
        elif size == 4:
            write(b, 0, read(a, 0, _U32))
        else:
            write(b, 0, read(a, 0, _U64))


@njit
def add_products(sums, g1, g2, x1, x2, n, w, zero):
    """One head's terms of grad_cos (first, second members) and grad_sin."""
    cos1, cos2, sin1, sin2 = sums, sums + w, sums + 2 * w, sums + 3 * w
    for i in range(n):
        g, h, x, y = take(g1, i, zero, 6), take(g2, i, zero, 6), take(x1, i, zero, 6), take(x2, i, zero, 6)
        give(cos1, i, take(cos1, i, zero, 0) + g * x, 0)
        give(cos2, i, take(cos2, i, zero, 1) + h * y, 1)
        give(sin1, i, take(sin1, i, zero, 2) - g * y, 2)
        give(sin2, i, take(sin2, i, zero, 3) + h * x, 3)


@njit
def rotate(g1, g2, tables, d1, d2, n, w, zero):
    """d1 = g1·c1 + g2·a, d2 = g2·c2 − g1·b, with the tables' row c1, c2, a, b."""
    c1, c2, a, b = tables, tables + w, tables + 2 * w, tables + 3 * w
    for i in range(n):
        g, h = take(g1, i, zero, 6), take(g2, i, zero, 6)
        give(d1, i, g * take(c1, i, zero, 6) + h * take(a, i, zero, 6), 4)
        give(d2, i, h * take(c2, i, zero, 6) - g * take(b, i, zero, 6), 5)


@njit(forceinline=True)
def alike(p, side):
    """Whether what is read and written is stored in order and in one dtype that `two_heads` knows."""
    g, x, d = side.grad, side.x, side.result
    size = size_of(g.kind)
    stored = g.kind == d.kind and (g.kind == p.compute or size == 2)
    in_order = g.channel == size and d.channel == size and not p.interleaved
    return stored and in_order and (not (p.cos or p.sin) or (x.kind == g.kind and x.channel == size))


@njit(forceinline=True)
def two_heads(p, kind, sums, tables, g1, g2, x1, x2, d1, d2, w, zero):
    """`add_products` if a table's gradient is wanted, and `rotate`, for two heads' rows of this kind."""
    if kind == p.compute:
        _two_heads(p, zero, w, sums, tables, g1, g2, x1, x2, d1, d2, w, zero)
    elif kind == BFLOAT16:
        _two_heads(p, BF16, 2 * p.pairs, sums, tables, g1, g2, x1, x2, d1, d2, w, zero)
    else:
        _two_heads(p, F16, 2 * p.pairs, sums, tables, g1, g2, x1, x2, d1, d2, w, zero)


@njit(forceinline=True)
def _two_heads(p, stored, v, sums, tables, g1, g2, x1, x2, d1, d2, w, zero):
    """A row's first members take w bytes in the compute dtype, v as stored."""
    if p.cos or p.sin:
        _add_and_rotate(stored, v, sums, tables, g1, g2, x1, x2, d1, d2, p.pairs, w, zero)
    else:
        _rotate(stored, v, tables, g1, g2, d1, d2, p.pairs, w, zero)


@njit
def _rotate(stored, v, tables, g1, g2, d1, d2, n, w, zero):
    """The row of tables is read once for both heads."""
    for i in range(n):
        c, d = take(tables, i, zero, 6), take(tables + w, i, zero, 6)
        a, b = take(tables + 2 * w, i, zero, 6), take(tables + 3 * w, i, zero, 6)
        g, h = widen(take(g1, i, stored, 6), zero), widen(take(g1 + v, i, stored, 6), zero)
        give(d1, i, narrow(g * c + h * a, stored), 4)
        give(d1 + v, i, narrow(h * d - g * b, stored), 5)
        g, h = widen(take(g2, i, stored, 6), zero), widen(take(g2 + v, i, stored, 6), zero)
        give(d2, i, narrow(g * c + h * a, stored), 7)
        give(d2 + v, i, narrow(h * d - g * b, stored), 8)


@njit
def _add_and_rotate(stored, v, sums, tables, g1, g2, x1, x2, d1, d2, n, w, zero):
    """First the terms of the head with g1, x1, d1, then those of the other: sums and tables are read once."""
    for i in range(n):
        c, d = take(tables, i, zero, 6), take(tables + w, i, zero, 6)
        a, b = take(tables + 2 * w, i, zero, 6), take(tables + 3 * w, i, zero, 6)
        cos1, cos2 = take(sums, i, zero, 0), take(sums + w, i, zero, 1)
        sin1, sin2 = take(sums + 2 * w, i, zero, 2), take(sums + 3 * w, i, zero, 3)
        g, h = widen(take(g1, i, stored, 6), zero), widen(take(g1 + v, i, stored, 6), zero)
        x, y = widen(take(x1, i, stored, 6), zero), widen(take(x1 + v, i, stored, 6), zero)
        cos1, cos2, sin1, sin2 = cos1 + g * x, cos2 + h * y, sin1 - g * y, sin2 + h * x
        give(d1, i, narrow(g * c + h * a, stored), 4)
        give(d1 + v, i, narrow(h * d - g * b, stored), 5)
        g, h = widen(take(g2, i, stored, 6), zero), widen(take(g2 + v, i, stored, 6), zero)
        x, y = widen(take(x2, i, stored, 6), zero), widen(take(x2 + v, i, stored, 6), zero)
        give(sums, i, cos1 + g * x, 0)
        give(sums + w, i, cos2 + h * y, 1)
        give(sums + 2 * w, i, sin1 - g * y, 2)
        give(sums + 3 * w, i, sin2 + h * x, 3)
        give(d2, i, narrow(g * c + h * a, stored), 7)
        give(d2 + v, i, narrow(h * d - g * b, stored), 8)


@njit
def halves(p, kind, address, step, to, w, spare, zero):
    """The first members of a row's pairs to `to`, the second ones w bytes behind, in the compute dtype.

    w is the bytes of n elements, or minus that.
    """
    n = p.pairs
    if not p.interleaved:
        load(kind, address, step, n, to, zero)
        load(kind, address + n * step, step, n, to + w, zero)
        return
    if kind != p.compute or step != p.item:
        load(kind, address, step, 2 * n, spare, zero)
        address = spare
    for i in range(n):
        write(to, i, read(address, 2 * i, zero))
        write(to + w, i, read(address, 2 * i + 1, zero))


@njit
def whole(interleaved, source, n, w, to, zero):
    """The inverse of `halves` within the compute dtype: the address of 2n channels in order."""
    if not interleaved:
        return source
    for i in range(n):
        write(to, 2 * i, read(source, i, zero))
        write(to, 2 * i + 1, read(source + w, i, zero))
    return to


@njit(inline="always")
def do_row(p, side, g, x, d, to, tables, sums, spare, w, zero):
    """One row of one head, given its addresses: terms of the tables' gradients, then its own gradient.

    The rotated channels go to `to`: d, or a buffer where they stand side by side.
    """
    n, r = p.pairs, side.result
    g1, g2 = g, g + w
    if not as_is(p, side.grad) or g == d:
        g1, g2 = spare, spare + w
        halves(p, side.grad.kind, g, side.grad.channel, spare, w, spare + 6 * w, zero)
    if p.cos or p.sin:
        x1, x2 = x, x + w
        if not as_is(p, side.x) or x == d:
            x1, x2 = spare + 2 * w, spare + 3 * w
            halves(p, side.x.kind, x, side.x.channel, x1, w, spare + 6 * w, zero)
        add_products(sums, g1, g2, x1, x2, n, w, zero)
    if not side.wanted:
        return
    if as_is(p, r) and not p.accumulate:
        rotate(g1, g2, tables, to, to + w, n, w, zero)
    else:
        rotate(g1, g2, tables, spare + 4 * w, spare + 5 * w, n, w, zero)
        source = whole(p.interleaved, spare + 4 * w, n, w, spare + 6 * w, zero)
        if p.accumulate:
            store_sum(r.kind, source, to, r.channel, 2 * n, spare, zero)
        else:
            store(r.kind, source, to, r.channel, 2 * n, zero)
    if p.dim > 2 * n:
        pass_through(p, side, g, d, spare, zero)


@njit
def pass_through(p, side, g, d, spare, zero):
    """A row's channels past the rotary width: bit for bit, unless they are added or the dtype changes."""
    n, step, r = p.dim - 2 * p.pairs, side.grad.channel, side.result
    g, d = g + 2 * p.pairs * step, d + 2 * p.pairs * r.channel
    if r.kind == side.grad.kind and not p.accumulate:
        move(size_of(r.kind), g, step, d, r.channel, n)
        return
    load(side.grad.kind, g, step, n, spare, zero)
    if p.accumulate:
        store_sum(r.kind, spare, d, r.channel, n, spare + n * p.item, zero)
    else:
        store(r.kind, spare, d, r.channel, n, zero)
