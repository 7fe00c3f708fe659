"""Memory for the compiled loop: numbers at any alignment, lines past the cache, lines asked for ahead.

Addresses are integers. What Numba has no word for is written in LLVM's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core.extending import intrinsic

LINE = 64  # bytes of a cache line, or half of one
PLACES = 9  # `take` and `give` tell so many places apart
_U8 = np.uint8(0)


def _pointer(context: Any, builder: Any, kind: Any, address: Any, index: Any) -> Any:
    """Where element `index` of this Numba type from `address` is."""
    return builder.gep(builder.inttoptr(address, context.get_value_type(kind).as_pointer()), [index])


@intrinsic
def read(context: Any, address: Any, index: Any, zero: Any) -> Any:
    """Element `index`, of the zero's type, from `address`, whatever its alignment."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_pointer(context, builder, signature.args[2], *args[:2]), align=1)

    return zero(types.int64, types.int64, zero), build


@intrinsic
def write(context: Any, address: Any, index: Any, value: Any) -> Any:
    """Write a value as element `index` from `address`, whatever its alignment."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], _pointer(context, builder, signature.args[2], *args[:2]), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, value), build


@intrinsic(prefer_literal=True)
def take(context: Any, address: Any, index: Any, zero: Any, place: Any) -> Any:
    """As `read`, from a place that only `give` with the same number writes to."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found = builder.load(_pointer(context, builder, signature.args[2], *args[:2]), align=1)
        return _apart(builder, found, place.literal_value)

    return zero(types.int64, types.int64, zero, place), build


@intrinsic(prefer_literal=True)
def give(context: Any, address: Any, index: Any, value: Any, place: Any) -> Any:
    """As `write`, to a place that no `take` with another number reads from."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        stored = builder.store(args[2], _pointer(context, builder, signature.args[2], *args[:2]), align=1)
        _apart(builder, stored, place.literal_value)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, value, place), build


def _apart(builder: Any, instruction: Any, place: int) -> Any:
    """Tell LLVM that different places never meet: it would compare eight pairs of addresses, and no more."""
    module = builder.module
    domain = module.add_metadata(["ropegrad"])
    scopes = [module.add_metadata([f"ropegrad {i}", domain]) for i in range(PLACES)]
    others = [scope for i, scope in enumerate(scopes) if i != place]
    instruction.set_metadata("alias.scope", module.add_metadata([scopes[place]]))
    instruction.set_metadata("noalias", module.add_metadata(others))
    return instruction


@intrinsic
def _stream(context: Any, to: Any, source: Any) -> Any:
    """Copy a line past the cache; `to` is a multiple of its size."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.VectorType(ir.IntType(32), LINE // 4).as_pointer()
        to, source = (builder.inttoptr(address, kind) for address in args)
        stored = builder.store(builder.load(source, align=1), to, align=LINE)
        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), build


@intrinsic
def _prefetch(context: Any, address: Any) -> Any:
    """Ask for the line of an address, which need not be there."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        i32 = ir.IntType(32)
        where = builder.inttoptr(args[0], ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [where.type, i32, i32, i32])
        function = builder.module.declare_intrinsic("llvm.prefetch", [where.type], kind)
        builder.call(function, [where, i32(0), i32(0), i32(1)])  # to read, soon and once, data
        return context.get_dummy_value()

    return types.void(types.int64), build


@intrinsic
def claim(context: Any, counter: Any, step: Any) -> Any:
    """The int64 at this address, which grows by `step`: no two threads get the same."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        where = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", where, args[1], "monotonic")

    return types.int64(types.int64, types.int64), build


@intrinsic
def fence(context: Any) -> Any:
    """What was written before is seen by every thread before what is written after, streams included."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), build


@njit
def copy(to, source, size):
    """Copy `size` bytes."""
    for i in range(size):
        write(to, i, read(source, i, _U8))


@njit
def prefetch(address, size):
    """Ask for `size` bytes."""
    for i in range(0, size, LINE):
        _prefetch(address + i)


@njit
def stream(to, source, size):
    """Copy past the cache all but a part of a last line; the number of bytes that are done.

    Whole lines need not be read from memory before they are written.
    """
    head = min(-to & (LINE - 1), size)
    copy(to, source, head)
    stop = head + (size - head) // LINE * LINE
    for i in range(head, stop, LINE):
        _stream(to + i, source + i)
    return stop
