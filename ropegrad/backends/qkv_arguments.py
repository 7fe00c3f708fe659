"""The struct Arguments of kernels/qkv_inputs.cuh: where a QKV problem's arrays stand, as 64-bit numbers."""

from __future__ import annotations

from array import array

from ropegrad.backends.qkv_access import GRADIENTS, Placed
from ropegrad.backends.qkv_workspace import maxima_of, pitch, products_of, width_of
from ropegrad.spec import QkvSpec

Arrays = dict[str, Placed]


def arguments(
    spec: QkvSpec, arrays: Arrays, parts: tuple[str, ...], blocks: dict[str, int], state: int
) -> array[int]:
    """For a D of these parts. blocks: addresses of the maxima and of the copies d, x and w, 0 for none."""
    rope, columns = spec.rope, spec.hidden_size or 0
    (hidden, weights), width = products_of(spec), width_of(spec, parts)
    values: list[int] = []
    for part in "qkv":
        values += _heads(spec, arrays.get(GRADIENTS[part]))
    values += [spec.rows(part) if part in parts else 0 for part in "qkv"]
    values += [*_table(spec, arrays.get("cos")), *_table(spec, arrays.get("sin"))]
    values += token_rows(arrays.get("hidden_states") if weights else None)
    for part in "qkv":
        one = arrays.get(f"{part}_weight") if hidden else None
        values += (0,) * 4 if one is None else (one.address, 0, *_steps(one))
    values += [hidden, weights, spec.tokens, inner_of(spec), rope.head_dim, rope.rotary_dim, width, columns]
    pitches = [pitch(spec, n) for n in (width, columns, columns)]
    values += [blocks[name] for name in "dxw"] + pitches
    values += [rows * step for rows, step in zip((spec.tokens, spec.tokens, width), pitches, strict=True)]
    maxima = blocks["maxima"]
    for length in maxima_of(spec):
        values.append(maxima)
        maxima += 4 * length
    return array("q", [*values, state])


def inner_of(spec: QkvSpec) -> int:
    """Tokens that follow each other in `inner`: positions, or batches in layout sbhd."""
    return max(spec.rope.batch if spec.rope.layout == "sbhd" else spec.rope.seq, 1)


def token_rows(one: Placed | None) -> tuple[int, ...]:
    """The struct Rows of an array [outer, inner, columns]."""
    return (0,) * 4 if one is None else (one.address, *_steps(one))


def _heads(spec: QkvSpec, one: Placed | None) -> tuple[int, ...]:
    """Address, strides of outer, inner, head and channel."""
    if one is None:
        return (0,) * 5
    steps = _steps(one)
    order = {"bhsd": (0, 2, 1, 3), "bshd": (0, 1, 2, 3), "sbhd": (0, 1, 2, 3)}[spec.rope.layout]
    return (one.address, *(steps[axis] for axis in order))


def _table(spec: QkvSpec, one: Placed | None) -> tuple[int, ...]:
    """Address, strides of outer, inner and column: one table for all batches has none of batch."""
    if one is None:
        return (0,) * 4
    steps = _steps(one)
    batch, token, column = steps if len(steps) == 3 else (0, *steps)
    return (one.address, *((token, batch) if spec.rope.layout == "sbhd" else (batch, token)), column)


def _steps(one: Placed) -> tuple[int, ...]:
    return tuple(step if size > 1 else 0 for step, size in zip(one.strides, one.shape, strict=True))
