"""Where a factor of a product becomes Inf by being rounded to the bits that `high` and `medium` promise.

Operands rounded to nearest at 11 or 8 significand bits, with float32's exponents: a factor of at least
(2 - 2^-11)·2^127, or (2 - 2^-8)·2^127, is finite in float32 and Inf as such an operand.
"""

from __future__ import annotations

import math

import numpy as np

from ropegrad.spec import QkvSpec
from ropegrad.verify.bounds import FORMATS, gamma
from ropegrad.verify.case import Case, rope_geometry
from ropegrad.verify.exact import Bools, Expected, Product
from ropegrad.verify.judge import Must, States

DIGITS = {"high": 11, "medium": 8}


def overflowing(case: Case, output: Expected, must: States | None) -> States | None:
    """What every element must be; where a factor may overflow, a result that is not finite is right, too."""
    spec, product = case.spec, output.product
    if product is None or not isinstance(spec, QkvSpec) or spec.precision not in DIGITS:
        return must
    if rope_geometry(case).compute != "float32":
        return must
    reached = _reached(product, DIGITS[spec.precision])
    if not reached.any():
        return must
    state = np.zeros(output.value.shape, np.int8) if must is None else must.copy()
    state[reached.reshape(state.shape) & (state != Must.NOT_BE_FINITE)] = Must.BE_EITHER  # an Inf of any sign
    return state


def _reached(product: Product, digits: int) -> Bools:
    """Elements whose row of D, as far as float32 knows it, or column of B has such a factor."""
    threshold = math.ldexp(2 - 2.0**-digits, 127)
    error = gamma(2, FORMATS["float32"].u) * product.spread
    rows = (np.abs(product.left) + error >= threshold).any(axis=1)
    columns = (product.size >= threshold).any(axis=0)
    reached: Bools = rows[:, None] | columns
    return reached
