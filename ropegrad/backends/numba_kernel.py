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

from numba import njit

from ropegrad.backends import numba_memory, numba_numbers, numba_rows
from ropegrad.backends.numba_memory import claim, copy, fence, prefetch, read, stream, write
from ropegrad.backends.numba_numbers import load, store, store_sum
from ropegrad.backends.numba_rows import alike, do_row, halves, pass_through, size_of, two_heads, whole

BUFFER = 1 << 9  # bytes of results that wait to be streamed: few, for larger bursts hold up what is read
AHEAD = 1 << 13  # bytes that are asked for before they are read, which takes about as long as memory does


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


# ---- what is read soon, and what waits to be written -------------------------------------------------------


@njit(forceinline=True)
def row(rows, b, h, s):
    """The address of a row."""
    return rows.address + b * rows.batch + h * rows.head + s * rows.token


@njit(forceinline=True)
def ask(p, side, b, at, second, of_x):
    """Ask for the gradient's or x's row at this place, or for the same of the second head.

    Rows whose elements do not stand side by side are left to the hardware.
    """
    rows, h = side.x if of_x else side.grad, at[0] + second
    size = size_of(rows.kind)
    if rows.channel == size and h < side.heads and (p.cos or p.sin or not of_x):
        prefetch(row(rows, b, h, at[1]), 2 * p.pairs * size)


@njit(forceinline=True)
def after(p, side, heads, at):
    """The place after this one: h, s, and the tokens of the tile; after its last the next tile's first."""
    h, s, start, stop = at
    s += 1
    if s == stop:
        h, s = h + heads, start
    if h >= side.heads:
        if stop < p.seq:
            start, stop = stop, min(stop + p.tile, p.seq)
        h, s = 0, start
    return h, s, start, stop


@njit
def ahead(p, side, heads, start, stop):
    """The place whose rows are asked for when those of the tile's first are read."""
    tokens, size = stop - start, size_of(side.grad.kind)
    if p.cos or p.sin:
        size += size_of(side.x.kind)
    steps = max(AHEAD // max(2 * p.pairs * heads * size, 1), 1)
    before = min(steps, -(-side.heads // heads) * tokens) - 1
    return after(p, side, heads, (before // tokens * heads, start + before % tokens, start, stop))


@njit(forceinline=True)
def place(d, begin, buffer, held):
    """Where in the buffer the row goes that belongs at d. If d is not its end, it is emptied first."""
    if d != begin + held:
        finish(begin, buffer, held)
        begin, held = d, 0
    return buffer + held, begin, held


@njit(forceinline=True)
def drain(begin, buffer, held):
    """Write a full buffer past the cache; what makes no whole line moves to its front."""
    if held < BUFFER:
        return begin, held
    done = stream(begin, buffer, held)
    copy(buffer, buffer + done, held - done)
    return begin + done, held - done


@njit
def finish(begin, buffer, held):
    """Write all that the buffer holds."""
    done = stream(begin, buffer, held)
    copy(begin + done, buffer + done, held - done)


# ---- jobs --------------------------------------------------------------------------------------------------


@njit
def do_side(p, side, b, start, stop, tables, sums, spare, buffer, w, zero):
    """All heads of q or k, of one batch's tokens start … stop; two heads at a time where that is known.

    Rows to be streamed wait in two buffers until they make whole lines: the next row's memory often follows.
    What is read soon is asked for in four bursts, between other work: in one, they would wait for each other.
    """
    g, x, d, n = side.grad, side.x, side.result, 2 * p.pairs
    size = n * size_of(d.kind)
    streams = p.stream and side.wanted and d.channel == size_of(d.kind) and p.dim == n
    heads = 2 if side.wanted and not p.accumulate and alike(p, side) else 1
    buffer2 = buffer + BUFFER + 4 * w
    begin, held, begin2, held2 = 0, 0, 0, 0
    at = ahead(p, side, heads, start, stop)
    for h in range(0, side.heads, heads):
        two = heads == 2 and h + 1 < side.heads
        for s in range(start, stop):
            ask(p, side, b, at, 0, 0)
            row_tables, row_sums = tables + (s - start) * 4 * w, sums + (s - start) * 4 * w
            g1, x1, d1 = row(g, b, h, s), row(x, b, h, s), row(d, b, h, s)
            g2, x2, d2 = g1 + g.head, x1 + x.head, d1 + d.head
            apart = d1 != g1 and d1 != x1
            to1, to2 = d1, d2
            if streams and apart:
                to1, begin, held = place(d1, begin, buffer, held)
                held += size
                if two and d2 == begin + held:
                    to2, held = buffer + held, held + size
                elif two:
                    to2, begin2, held2 = place(d2, begin2, buffer2, held2)
                    held2 += size
            ask(p, side, b, at, 0, 1)
            if two and apart:
                two_heads(p, g.kind, row_sums, row_tables, g1, g2, x1, x2, to1, to2, w, zero)
                if p.dim > n:
                    pass_through(p, side, g1, d1, spare, zero)
                    pass_through(p, side, g2, d2, spare, zero)
            else:
                for _ in range(2 if two else 1):
                    do_row(p, side, g1, x1, d1, to1, row_tables, row_sums, spare, w, zero)
                    g1, x1, d1, to1 = g2, x2, d2, to2
            if heads == 2:
                ask(p, side, b, at, 1, 0)
            begin, held = drain(begin, buffer, held)
            if heads == 2:
                ask(p, side, b, at, 1, 1)
            begin2, held2 = drain(begin2, buffer2, held2)
            at = after(p, side, heads, at)
    finish(begin, buffer, held)
    finish(begin2, buffer2, held2)


@njit
def do_jobs(p, q, k, cos, sin, grad_cos, grad_sin, counter, jobs, step, scratch, zero):
    """Jobs, `step` at a time, while there are any that nobody took.

    A job is a tile's tokens, of one batch or, where batches share table rows, of all.
    """
    n, w, tiles = p.pairs, p.pairs * p.item, -(-p.seq // p.tile)
    tables, sums, spare = scratch, scratch + 4 * w * p.tile, scratch + 8 * w * p.tile
    buffer = spare + 8 * w + 2 * p.dim * p.item
    first = claim(counter, step)
    while first < jobs:
        for job in range(first, min(first + step, jobs)):
            start = job % tiles * p.tile
            stop = min(start + p.tile, p.seq)
            own = job // tiles
            if p.rotates:
                fill_tables(p, cos, sin, own, start, stop, tables, w, spare, zero)
            for i in range(4 * n * (stop - start)):
                write(sums, i, zero)
            for b in range(0 if p.shared else own, p.batch if p.shared else own + 1):
                for side in (q, k):
                    do_side(p, side, b, start, stop, tables, sums, spare, buffer, w, zero)
            if p.cos:
                write_sums(p, grad_cos, own, start, stop, sums, w, spare, zero)
            if p.sin:
                write_sums(p, grad_sin, own, start, stop, sums + 2 * w, w, spare, zero)
        first = claim(counter, step)
    fence()


def _with_sources(digests: tuple[int, ...]) -> Callable[..., None]:
    """`do_jobs` for Numba's cache, which looks at this file and at what is closed over, but at no import."""

    def run(p, q, k, cos, sin, grad_cos, grad_sin, counter, jobs, step, scratch, zero):
        digests  # noqa: B018
        do_jobs(p, q, k, cos, sin, grad_cos, grad_sin, counter, jobs, step, scratch, zero)

    return run


def _compiled(function: Callable[..., None]) -> Any:
    """Compiled on its first call, and kept on disk where there is a folder that can be written."""
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:  # Numba found no such folder
        return njit(nogil=True)(function)


def _digest(path: str) -> int:
    return int.from_bytes(hashlib.sha256(Path(path).read_bytes()).digest()[:7], "big")


_SOURCES = (numba_memory, numba_numbers, numba_rows)
run = _compiled(_with_sources(tuple(_digest(str(module.__file__)) for module in _SOURCES)))
