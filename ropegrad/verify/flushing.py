"""Where arithmetic that flushes subnormal numbers finds none to flush: there it must be as exact as any.

The bound for such arithmetic counts a loss for every product and sum. It would excuse a kernel that loses
bits of normal numbers, by scaling them down, say.
"""

from __future__ import annotations

import numpy as np

from ropegrad.verify.bounds import FORMATS
from ropegrad.verify.case import Case, rope_geometry
from ropegrad.verify.exact import Bools, Expected
from ropegrad.verify.sums import Floats, nonzero

_REACH = 8.0  # both factors of a product that is surely normal: one at least so large, one so close to 1


def nothing_to_flush(case: Case, name: str, output: Expected, bound: Floats) -> Bools | None:
    """Elements of which no factor, product or sum can be subnormal; None: of longer sums nothing is known.

    bound: how far a right result may be off that flushes nothing.
    """
    spec = rope_geometry(case)
    if output.bilinear is None or output.depth > 2 or name.endswith("_bias") or spec.accumulate:
        return None
    dtypes = {spec.compute, spec.dtype, spec.table_dtype} - {"float16"}  # of which subnormals are kept
    floor = max(FORMATS[dtype].tiny for dtype in dtypes)
    low_gradient = output.bilinear(lambda a: _below(a, _REACH * floor), nonzero)
    low_factor = output.bilinear(nonzero, lambda b: _below(b, 1 / _REACH))
    normal: Bools = (low_gradient + low_factor == 0) & (np.abs(output.value) - bound >= floor)
    return normal


def _below(x: Floats, least: float) -> Floats:
    low: Floats = ((x != 0) & (np.abs(x) < least)).astype(np.float64)
    return low
