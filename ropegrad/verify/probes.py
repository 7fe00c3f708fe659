"""Rows and columns of very unlike size, so that what one scale for a whole array would lose shows.

Even tokens have small upstream gradients and large inputs, odd ones the other way round, so that every
product of a weight's gradient is about as large; the hidden channels differ, too. Of a bound that is normwise
in the rows and columns of a product (`bounds`, "high") nothing must be left that could hide a loss: a head
and a hidden channel are zero at every other token. The rows and columns that are left have one size each,
which is all that a kernel with a scale for each row and column needs to be right.
"""

from __future__ import annotations

import numpy as np

from ropegrad.spec import QkvSpec, RopeSpec
from ropegrad.verify.case import NumpyArray

REACH = {"float16": 5}  # else 2^±40: far beyond float16's range, and no product leaves float32's
CHANNELS = {"float16": 1}  # else 2^±20
AXES = {"bhsd": (2, 1), "bshd": (1, 2), "sbhd": (0, 2)}  # of tokens, of heads


def reciprocal(x: NumpyArray, name: str, spec: RopeSpec | QkvSpec) -> NumpyArray:
    """An input of normal numbers with its rows and columns scaled and thinned as above."""
    rope = spec if isinstance(spec, RopeSpec) else spec.rope
    reach, channels = REACH.get(rope.dtype, 40), CHANNELS.get(rope.dtype, 20)
    token_axis, head_axis = AXES[rope.layout]
    if name.endswith("_weight"):
        return _scaled(x, channels * _signs(x, -1, 2))
    if name == "hidden_states":
        token_axis = 0 if rope.layout == "sbhd" else 1
        powers = -reach * _signs(x, token_axis) + channels * _signs(x, -1, 2)
        return _scaled(x, powers) * _alike(x, token_axis, 2)
    grad = name.startswith("grad_")
    scaled = _scaled(x, (1 if grad else -1) * reach * _signs(x, token_axis))
    return scaled * _alike(x, token_axis, head_axis) if grad else scaled


def _index(x: NumpyArray, axis: int, run: int = 1) -> NumpyArray:
    """0 and 1 in turn along an axis, in runs, shaped to go with x."""
    axis %= x.ndim
    turns = np.arange(x.shape[axis]) // run % 2
    return turns.reshape([-1 if i == axis else 1 for i in range(x.ndim)])


def _signs(x: NumpyArray, axis: int, run: int = 1) -> NumpyArray:
    return 2 * _index(x, axis, run) - 1


def _alike(x: NumpyArray, one: int, other: int) -> NumpyArray:
    """1 where the turns along two axes agree, else 0."""
    alike: NumpyArray = (_index(x, one) == _index(x, other)).astype(x.dtype)
    return alike


def _scaled(x: NumpyArray, powers: NumpyArray) -> NumpyArray:
    with np.errstate(all="ignore"):
        scaled: NumpyArray = np.ldexp(x.astype(np.float64), powers).astype(x.dtype)
    return scaled
