"""Where the wrong elements of a result are, in words that hold for any size: the last head, the last tile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from ropegrad.verify.case import Case, rope_geometry

ALL = 0.9  # a share of a place's elements that says: it is wrong; by chance some are right
LEAST = 0.5  # in any one problem


@dataclass(frozen=True)
class Where:
    """The wrong elements of one output: the mask, those that could be wrong, places that hold all of them.

    places: by axis, all phrases that fit, each with the indices along the axis that it means. None where
    elements of all of an axis are wrong.
    """

    wrong: Any
    there: Any
    axes: list[str]
    places: dict[str, dict[str, Any]]

    def share(self, phrases: dict[str, str]) -> float:
        """How much of what lies in these places is wrong."""
        inside = self.there | self.wrong
        for axis, phrase in phrases.items():
            if axis in self.places:
                at = self.axes.index(axis)
                mask = self.places[axis][phrase]
                inside = inside & mask.reshape([-1 if i == at else 1 for i in range(inside.ndim)])
        return float(self.wrong.sum() / inside.sum())


def regions(wrong: Any, there: Any, axes: list[str], case: Case) -> Where:
    """Where these elements are."""
    found = {}
    for axis, name in enumerate(axes if wrong.ndim == len(axes) else []):
        if wrong.shape[axis] > 1:
            others = tuple(i for i in range(wrong.ndim) if i != axis)
            touched = np.flatnonzero(wrong.any(axis=others))
            indices = np.arange(wrong.shape[axis])
            meant = _phrases(touched, len(indices), name, case)
            found[name] = {words: np.isin(indices, indices[part]) for words, part in meant}
    return Where(wrong, there, axes, found)


def common(samples: list[Where]) -> list[str]:
    """What fits all samples: places that are wrong as a whole, or how few elements are wrong in them."""
    together: dict[str, list[str]] = {}
    for sample in samples:
        for axis, places in sample.places.items():
            before = together.get(axis, list(places))
            together[axis] = [phrase for phrase in before if phrase in places]
    chosen = {axis: _closest(axis, phrases, samples) for axis, phrases in together.items() if phrases}
    if not samples:
        return []
    if all(sample.wrong.sum() == 1 for sample in samples) and samples[-1].wrong.size > 1:
        return [", ".join(["is wrong in one element only", *map("in {}".format, chosen.values())])]
    shares = [sample.share(chosen) for sample in samples]
    if chosen and median(shares) >= ALL and min(shares) >= LEAST:
        return [f"is wrong in {phrase}{_only(phrase)}" for phrase in chosen.values()]
    about = f"is wrong in about {max(100 * median(shares), 1):.0f} % of the elements"
    if chosen:
        return [f"{about} in {' and '.join(chosen.values())}, in none elsewhere"]
    return [about] if max(shares) < LEAST else []


def _closest(axis: str, phrases: list[str], samples: list[Where]) -> str:
    """The phrase that means the fewest elements; of equals the first."""
    places = [sample.places[axis] for sample in samples if axis in sample.places]
    return min(phrases, key=lambda phrase: sum(int(place[phrase].sum()) for place in places))


def _only(phrase: str) -> str:
    return "" if phrase.startswith("every") or phrase.endswith(" on") else " only"


def _phrases(touched: Any, size: int, name: str, case: Case) -> Iterator[tuple[str, Any]]:
    first, last, count = int(touched[0]), int(touched[-1]), len(touched)
    many = f"{name}es" if name == "batch" else f"{name}s"
    if name == "channel" and first >= rope_geometry(case).rotary_dim:
        yield "the channels that pass through", slice(rope_geometry(case).rotary_dim, size)
    if count == size:
        return
    if name in ("channel", "column"):
        yield from _halves(first, last, size, many)
    if first == last == size - 1:
        yield f"the last {name}", slice(size - 1, size)
    if first == last == 0:
        yield f"the first {name}", slice(0, 1)
    if first == 1 and count == size - 1:
        yield f"every {name} after the first", slice(1, size)
    if name == "token":
        for tile in (128, 64, 32, 16, 8, 4):
            if size % tile and first == size // tile * tile > 0:
                yield f"the last, partial tile of {tile} tokens", slice(first, size)
    if count > 1 and (touched % 2 == 1).all():
        yield f"odd {many}", slice(1, size, 2)
    if count > 1 and (touched % 2 == 0).all():
        yield f"even {many}", slice(0, size, 2)
    if count == last - first + 1 and last == size - 1:
        yield f"the {many} from {first} on", slice(first, size)
    if first == last:
        yield f"{name} {first}", slice(first, first + 1)


def _halves(first: int, last: int, size: int, many: str) -> Iterator[tuple[str, Any]]:
    if first >= size // 2:
        yield f"the second half of the {many}", slice(size // 2, size)
    if last < size - size // 2:
        yield f"the first half of the {many}", slice(0, size - size // 2)
