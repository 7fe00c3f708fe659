"""The one compiled loop of `numba_cpu`: a row of a head is read once, its gradient is written once.

Compiled for two compute dtypes only. Arrays come as addresses and strides in bytes, their dtypes as numbers,
so that neither strides, alignment nor storage make another compilation. Floating point is as written: no
fastmath, so no operation is fused or moved, and the heads of a channel are added up in order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from ropegrad.backends import numba_numbers
from ropegrad.backends.numba_numbers import (
    FLOAT32,
    FLOAT64,
    copy,
    fence,
    give,
    load,
    read,
    store,
    store_sum,
    stream,
    take,
    write,
)

BUFFER = 1 << 12  # bytes of results that wait to be streamed
_U16, _U32, _U64 = np.uint16(0), np.uint32(0), np.uint64(0)


class Rows(NamedTuple):
    """An array [batch, heads, tokens, channels] in memory: where it starts, and its strides in bytes."""

    kind: int
    address: int
    batch: int
    head: int
    token: int
    channel: int


class Side(NamedTuple):
    """q or k: its upstream gradient, itself, the gradient to write."""

    heads: int
    wanted: int
    grad: Rows
    x: Rows
    result: Rows


class Problem(NamedTuple):
    """Sizes and choices; flags are 0 or 1. `tile` is the number of tokens whose sums are kept in cache."""

    compute: int  # the kind of products and sums
    item: int  # bytes of one
    batch: int
    seq: int
    dim: int
    pairs: int
    tile: int
    interleaved: int
    half_table: int
    shared: int  # several batches add to one table row: a job takes them all, in order
    own_sine: int  # d1 takes the first member's sine (paired adjoint, forward), not the second's
    forward: int
    rotates: int
    cos: int
    sin: int
    accumulate: int
    stream: int  # results are too large for the cache: write them past it


# ---- rows --------------------------------------------------------------------------------------------------


@njit
def size_of(kind):
    """Bytes of a stored number."""
    return 8 if kind == FLOAT64 else 4 if kind == FLOAT32 else 2


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


# ---- tiles -------------------------------------------------------------------------------------------------


@njit
def fill_tables(p, cos, sin, b, start, stop, to, w, spare, zero):
    """A row a token: cosines of first and second members, then the sines that meet g2 in d1 and g1 in d2."""
    n = p.pairs
    for s in range(start, stop):
        row = to + (s - start) * 4 * w
        c, t = cos.address + b * cos.batch + s * cos.token, sin.address + b * sin.batch + s * sin.token
        if p.half_table:
            load(cos.kind, c, cos.channel, n, row, zero)
            load(cos.kind, c, cos.channel, n, row + w, zero)
            load(sin.kind, t, sin.channel, n, row + 2 * w, zero)
            load(sin.kind, t, sin.channel, n, row + 3 * w, zero)
        else:
            halves(p, cos.kind, c, cos.channel, row, w, spare, zero)
            if p.own_sine:
                halves(p, sin.kind, t, sin.channel, row + 2 * w, w, spare, zero)
            else:
                halves(p, sin.kind, t, sin.channel, row + 3 * w, -w, spare, zero)
        if p.forward:
            for i in range(2 * n):
                write(row + 2 * w, i, -read(row + 2 * w, i, zero))


@njit
def write_sums(p, rows, b, start, stop, sums, w, spare, zero):
    """The gradient of one table, from its sums for the first token on."""
    for s in range(start, stop):
        source, n = sums + (s - start) * 4 * w, 2 * p.pairs
        to = rows.address + b * rows.batch + s * rows.token
        if p.half_table:
            n = p.pairs
            for i in range(n):
                write(source, i, read(source, i, zero) + read(source + w, i, zero))
        else:
            source = whole(p.interleaved, source, p.pairs, w, spare, zero)
        if p.accumulate:
            store_sum(rows.kind, source, to, rows.channel, n, spare + 2 * w, zero)
        else:
            store(rows.kind, source, to, rows.channel, n, zero)


@njit(inline="always")
def do_row(p, side, g, x, d, to, tables, sums, spare, w, zero):
    """One row of one head, given its addresses: terms of the tables' gradients, then its own gradient.

    The rotated channels go to `to`: d, or a buffer where they stand side by side.
    """
    n, r = p.pairs, side.result
    in_place = side.grad.kind == p.compute and side.grad.channel == p.item and not p.interleaved
    g1, g2 = g, g + w
    if not in_place or g == d:
        g1, g2 = spare, spare + w
        halves(p, side.grad.kind, g, side.grad.channel, spare, w, spare + 6 * w, zero)
    if p.cos or p.sin:
        x1, x2 = x, x + w
        if side.x.channel != p.item or side.x.kind != p.compute or p.interleaved or x == d:
            x1, x2 = spare + 2 * w, spare + 3 * w
            halves(p, side.x.kind, x, side.x.channel, x1, w, spare + 6 * w, zero)
        add_products(sums, g1, g2, x1, x2, n, w, zero)
    if not side.wanted:
        return
    if r.kind == p.compute and r.channel == p.item and not p.interleaved and not p.accumulate:
        rotate(g1, g2, tables, to, to + w, n, w, zero)
    else:
        rotate(g1, g2, tables, spare + 4 * w, spare + 5 * w, n, w, zero)
        source = whole(p.interleaved, spare + 4 * w, n, w, spare + 6 * w, zero)
        if p.accumulate:
            store_sum(r.kind, source, to, r.channel, 2 * n, spare, zero)
        else:
            store(r.kind, source, to, r.channel, 2 * n, zero)
    if p.dim > 2 * n:
        pass_through(p, side, g + 2 * n * side.grad.channel, d + 2 * n * r.channel, spare, zero)


@njit
def pass_through(p, side, g, d, spare, zero):
    """The channels past the rotary width: bit for bit, unless they are added or the dtype changes."""
    n, step, r = p.dim - 2 * p.pairs, side.grad.channel, side.result
    if r.kind == side.grad.kind and not p.accumulate:
        move(size_of(r.kind), g, step, d, r.channel, n)
        return
    load(side.grad.kind, g, step, n, spare, zero)
    if p.accumulate:
        store_sum(r.kind, spare, d, r.channel, n, spare + n * p.item, zero)
    else:
        store(r.kind, spare, d, r.channel, n, zero)


@njit
def do_side(p, side, b, start, stop, tables, sums, spare, buffer, w, zero):
    """All heads of q or k, of one batch's tokens start … stop.

    Rows to be streamed wait in the buffer until they make whole lines: the next row's memory often follows.
    """
    g, x, d = side.grad, side.x, side.result
    size = 2 * p.pairs * size_of(d.kind)
    streams = p.stream and side.wanted and d.channel == size_of(d.kind) and p.dim == 2 * p.pairs
    begin, held = 0, 0
    for h in range(side.heads):
        for s in range(start, stop):
            offset = (s - start) * 4 * w
            g_row = g.address + b * g.batch + h * g.head + s * g.token
            x_row = x.address + b * x.batch + h * x.head + s * x.token
            d_row = d.address + b * d.batch + h * d.head + s * d.token
            to, waits = d_row, streams and d_row != g_row and d_row != x_row
            if waits:
                if d_row != begin + held:
                    done = stream(begin, buffer, held)
                    copy(begin + done, buffer + done, held - done)
                    begin, held = d_row, 0
                to = buffer + held
            do_row(p, side, g_row, x_row, d_row, to, tables + offset, sums + offset, spare, w, zero)
            if waits:
                held += size
                if held >= BUFFER:
                    done = stream(begin, buffer, held)
                    copy(buffer, buffer + done, held - done)
                    begin, held = begin + done, held - done
    done = stream(begin, buffer, held)
    copy(begin + done, buffer + done, held - done)


@njit
def do_jobs(p, q, k, cos, sin, grad_cos, grad_sin, first, last, scratch, zero):
    """Jobs first … last: tokens of one batch or, where batches share table rows, of all."""
    n, w, tiles = p.pairs, p.pairs * p.item, -(-p.seq // p.tile)
    tables, sums, spare = scratch, scratch + 4 * w * p.tile, scratch + 8 * w * p.tile
    buffer = spare + 8 * w + 2 * p.dim * p.item
    for job in range(first, last):
        start = job % tiles * p.tile
        stop = min(start + p.tile, p.seq)
        own = job // tiles
        if p.rotates:
            fill_tables(p, cos, sin, own, start, stop, tables, w, spare, zero)
        for i in range(4 * n * (stop - start)):
            write(sums, i, zero)
        for b in range(0 if p.shared else own, p.batch if p.shared else own + 1):
            do_side(p, q, b, start, stop, tables, sums, spare, buffer, w, zero)
            do_side(p, k, b, start, stop, tables, sums, spare, buffer, w, zero)
        if p.cos:
            write_sums(p, grad_cos, own, start, stop, sums, w, spare, zero)
        if p.sin:
            write_sums(p, grad_sin, own, start, stop, sums + 2 * w, w, spare, zero)
    fence()


def _with_sources(digest: int) -> Callable[..., None]:
    """`do_jobs` for Numba's cache, which looks at this file and at what is closed over, but at no import."""

    def run(p, q, k, cos, sin, grad_cos, grad_sin, first, last, scratch, zero):
        digest  # noqa: B018
        do_jobs(p, q, k, cos, sin, grad_cos, grad_sin, first, last, scratch, zero)

    return run


def _compiled(function: Callable[..., None]) -> Any:
    """Compiled on its first call, and kept on disk where there is a folder that can be written."""
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:  # Numba found no such folder
        return njit(nogil=True)(function)


def _digest(path: str) -> int:
    return int.from_bytes(hashlib.sha256(Path(path).read_bytes()).digest()[:7], "big")


run = _compiled(_with_sources(_digest(numba_numbers.__file__)))
