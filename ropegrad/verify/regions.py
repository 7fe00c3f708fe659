"""Where the wrong elements of a result are, in words that hold for any size: the last head, the last tile."""

from __future__ import annotations

from typing import Any

import numpy as np

from ropegrad.verify.case import Case, rope_geometry


def regions(wrong: Any, axes: list[str], case: Case) -> list[str]:
    """A phrase for every axis on which all that is wrong is confined to some part."""
    if wrong.ndim != len(axes):
        return []
    found = []
    for axis, name in enumerate(axes):
        others = tuple(i for i in range(wrong.ndim) if i != axis)
        touched = np.flatnonzero(wrong.any(axis=others))
        phrase = _phrase(touched, wrong.shape[axis], name, case)
        if phrase:
            found.append(phrase)
    return found


def _phrase(touched: Any, size: int, name: str, case: Case) -> str:
    first, last, count = int(touched[0]), int(touched[-1]), len(touched)
    if count == size or size < 2:
        return ""
    spec = rope_geometry(case)
    if name in ("channel", "column"):
        return _channels(touched, size, spec.rotary_dim if name == "channel" else size, spec.head_dim)
    if first == last == size - 1:
        return f"is wrong in the last {name} only"
    if first == last == 0:
        return f"is wrong in the first {name} only"
    run = count == last - first + 1
    if run and last == size - 1:
        tile = next((t for t in (128, 64, 32, 16, 8, 4, 2) if first % t == 0), 0)
        if name == "token" and tile and size % tile and size - first <= tile:
            return f"is wrong in the last, partial tile of {tile} tokens"
        return (
            f"is wrong in every {name} after the first" if first == 1 else f"is wrong from {name} {first} on"
        )
    if run and first == 0:
        return f"is wrong up to {name} {last}"
    if (touched % 2 == touched[0] % 2).all() and count > 1:
        return f"is wrong in {'odd' if touched[0] % 2 else 'even'} {name}s only"
    return ""


def _channels(touched: Any, size: int, width: int, head_dim: int) -> str:
    """Channels and columns: halves, members of pairs, those that pass through, all past a power of two."""
    first, last = int(touched[0]), int(touched[-1])
    if width < head_dim and first >= width:
        return "is wrong in the channels that pass through only"
    if first >= width // 2 and first == size // 2:
        return "is wrong in the second half of the channels only"
    if last < width // 2:
        return "is wrong in the first half of the channels only"
    if (touched % 2 == touched[0] % 2).all() and len(touched) > 1:
        return f"is wrong in {'odd' if touched[0] % 2 else 'even'} channels only"
    if first and first & (first - 1) == 0 and first > size // 2:
        return f"is wrong from channel {first} on, a power of two"
    if first == last:
        return f"is wrong in channel {first} only"
    return ""
