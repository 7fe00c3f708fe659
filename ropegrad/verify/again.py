"""The same call made again: whether it gives the same bits, and whether a fault is still there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ropegrad.verify.arena import same_bytes
from ropegrad.verify.case import Case, NumpyArray
from ropegrad.verify.oracle import expected
from ropegrad.verify.ruling import WRONG, Fault, standard

Outputs = dict[str, NumpyArray | None]


def same_results(one: Outputs, other: Outputs) -> bool:
    """Whether two calls gave the same shapes, dtypes and bits."""

    def same(x: NumpyArray | None, y: NumpyArray | None) -> bool:
        if x is None or y is None:
            return x is y
        words = (np.ascontiguousarray(z).reshape(-1).view(np.uint8) for z in (x, y))
        return x.shape == y.shape and x.dtype == y.dtype and same_bytes(*words)

    return one.keys() == other.keys() and all(same(x, other[name]) for name, x in one.items())


Got = dict[str, tuple[Case, NumpyArray]]


def right_again(faults: list[Fault], got: Got, case: Case, outputs: Outputs) -> list[Fault]:
    """The faults; those say so whose output was wrong in the first call and is right in its repetition."""
    return [_told(fault, got, case, outputs.get(fault.array)) for fault in faults]


def _told(fault: Fault, got: Got, case: Case, now: NumpyArray | None) -> Fault:
    first = got.get(fault.array, (None, None))[0]
    if fault.rule != WRONG or first is not case or fault.array not in case.outputs or now is None:
        return fault
    exact = {fault.array: expected(case)[fault.array]}
    if now.shape != exact[fault.array].value.shape or standard(case, exact).worst(fault.array, now) > 1:
        return fault
    return replace(fault, message=f"{fault.message}; the same call is right when it is made again")
