"""Where the wrong elements of a result are, in words that hold for any size: the last head, the last tile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ropegrad.verify.case import Case, rope_geometry

Words = dict[str, list[str]]  # by axis: all phrases that fit, most telling first


def regions(wrong: Any, axes: list[str], case: Case) -> Words:
    """Phrases for each axis that could tell something, none where elements of all of it are wrong."""
    if wrong.ndim != len(axes):
        return {}
    found = {}
    for axis, name in enumerate(axes):
        if wrong.shape[axis] > 1:
            others = tuple(i for i in range(wrong.ndim) if i != axis)
            touched = np.flatnonzero(wrong.any(axis=others))
            found[name] = list(_phrases(touched, wrong.shape[axis], name, case))
    return found


def common(samples: Iterable[Words]) -> list[str]:
    """For each axis the first phrase that fits all samples with more than one element along it."""
    together: Words = {}
    for words in samples:
        for axis, phrases in words.items():
            before = together.get(axis)
            together[axis] = phrases if before is None else [p for p in before if p in phrases]
    return [phrases[0] for phrases in together.values() if phrases]


def _phrases(touched: Any, size: int, name: str, case: Case) -> Iterator[str]:
    first, last, count = int(touched[0]), int(touched[-1]), len(touched)
    if name == "channel" and first >= rope_geometry(case).rotary_dim:
        yield "is wrong in the channels that pass through only"
    if count == size:
        return
    if name in ("channel", "column"):
        yield from _halves(first, last, size, name)
    if first == last == size - 1:
        yield f"is wrong in the last {name} only"
    if first == last == 0:
        yield f"is wrong in the first {name} only"
    if first == 1 and count == size - 1:
        yield f"is wrong in every {name} after the first"
    if name == "token":
        for tile in (128, 64, 32, 16, 8, 4):
            if size % tile and first == size // tile * tile:
                yield f"is wrong in the last, partial tile of {tile} tokens"
    if count > 1 and (touched % 2 == 1).all():
        yield f"is wrong in odd {name}s only"
    if count > 1 and (touched % 2 == 0).all():
        yield f"is wrong in even {name}s only"
    if count == last - first + 1 and last == size - 1:
        yield f"is wrong from {name} {first} on"
    if first == last:
        yield f"is wrong in {name} {first} only"


def _halves(first: int, last: int, size: int, name: str) -> Iterator[str]:
    if first >= size // 2:
        yield f"is wrong in the second half of the {name}s only"
    if last < size - size // 2:
        yield f"is wrong in the first half of the {name}s only"
