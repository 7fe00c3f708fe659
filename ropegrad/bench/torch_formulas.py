"""The two backwards as people write them in PyTorch: what ropegrad is timed against.

How torch.compile fuses depends on the formula by a factor of several, so there are several, and the best
counts. Arguments and results as `ropegrad.rope_backward` and `qkv_rope_backward` have them, layout bhsd, half
pairing, full tables [B, S, D]; every formula is the exact adjoint. Gradients have their input's dtype, also
where autocast multiplies in another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Tensor = Any
Formula = Callable[..., tuple[Tensor, ...]]


def rotate_half(x: Tensor) -> Tensor:
    """(−x2, x1), as model code writes it."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def unrotate_reference(g: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The adjoint of x·cos + rotate_half(x)·sin."""
    return g * cos - rotate_half(g * sin)


def unrotate_halves(g: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Both halves written out, then joined."""
    (g1, g2), (c1, c2), (s1, s2) = (x.chunk(2, dim=-1) for x in (g, cos, sin))
    return torch.cat((g1 * c1 + g2 * s2, g2 * c2 - g1 * s1), dim=-1)


def unrotate_flipped(g: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The members of a pair on an axis of their own, exchanged by a flip: nothing is joined."""
    pairs = (2, g.shape[-1] // 2)
    sign = torch.tensor([[1.0], [-1.0]], device=g.device, dtype=g.dtype)
    swapped = (g * sin).unflatten(-1, pairs).flip(-2) * sign
    return g * cos + swapped.flatten(-2)


def _rope(unrotate: Callable[[Tensor, Tensor, Tensor], Tensor], swap: Callable[[Tensor], Tensor]) -> Formula:
    def formula(gq: Tensor, gk: Tensor, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        c, s = cos[:, None], sin[:, None]
        grad_cos = (gq * q).sum(dim=1) + (gk * k).sum(dim=1)
        grad_sin = (gq * swap(q)).sum(dim=1) + (gk * swap(k)).sum(dim=1)
        return unrotate(gq, c, s), unrotate(gk, c, s), grad_cos, grad_sin

    return formula


def _swap_flipped(x: Tensor) -> Tensor:
    pairs = (2, x.shape[-1] // 2)
    sign = torch.tensor([[-1.0], [1.0]], device=x.device, dtype=x.dtype)
    return (x.unflatten(-1, pairs).flip(-2) * sign).flatten(-2)


def _rope_halves(gq: Tensor, gk: Tensor, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """No rotate_half anywhere: sums of the halves' products, joined at the end."""
    c, s = cos[:, None], sin[:, None]
    sums = []
    for g, x in ((gq, q), (gk, k)):
        (g1, g2), (x1, x2) = (y.chunk(2, dim=-1) for y in (g, x))
        sums.append([(a * b).sum(dim=1) for a, b in ((g1, x1), (g2, x2), (g1, x2), (g2, x1))])
    c1, c2, s1, s2 = (a + b for a, b in zip(*sums, strict=True))
    joined = (torch.cat(pair, dim=-1) for pair in ((c1, c2), (-s1, s2)))
    return unrotate_halves(gq, c, s), unrotate_halves(gk, c, s), *joined


def _rows(g: Tensor) -> Tensor:
    """[B, H, S, D] as [B·S, H·D]."""
    return g.transpose(1, 2).flatten(2).flatten(0, 1)


def _qkv_reference(
    gq: Tensor,
    gk: Tensor,
    gv: Tensor,
    x: Tensor,
    wq: Tensor,
    wk: Tensor,
    wv: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> Any:
    """Six products."""
    c, s = cos[:, None], sin[:, None]
    rows = [_rows(g) for g in (unrotate_reference(gq, c, s), unrotate_reference(gk, c, s), gv)]
    tokens = x.flatten(0, 1)
    hidden = rows[0] @ wq + rows[1] @ wk + rows[2] @ wv
    return hidden.view_as(x).to(x.dtype), *((row.t() @ tokens).to(wq.dtype) for row in rows)


def _qkv_packed(
    gq: Tensor,
    gk: Tensor,
    gv: Tensor,
    x: Tensor,
    wq: Tensor,
    wk: Tensor,
    wv: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> Any:
    """Two products, as a careful user writes it."""
    c, s = cos[:, None], sin[:, None]
    rotated = unrotate_reference(gq, c, s), unrotate_reference(gk, c, s), gv
    packed = torch.cat([_rows(g) for g in rotated], dim=1)
    hidden = packed @ torch.cat((wq, wk, wv))
    weights = (packed.t() @ x.flatten(0, 1)).to(wq.dtype)
    return hidden.view_as(x).to(x.dtype), *weights.split([w.shape[0] for w in (wq, wk, wv)])


FORMULAS: dict[str, dict[str, Formula]] = {
    "rope": {
        "reference": _rope(unrotate_reference, rotate_half),
        "halves": _rope_halves,
        "flipped": _rope(unrotate_flipped, _swap_flipped),
    },
    "qkv": {"reference": _qkv_reference, "packed": _qkv_packed},
}
