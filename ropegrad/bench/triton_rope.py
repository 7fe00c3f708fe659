"""RoPE's backward as a competent user writes it in Triton: what ropegrad is timed against. Needs PyTorch.

One program a token: a tile of heads at a time, both halves of each row loaded once, gradients stored,
products added up in registers. Half pairing, full tables [B, S, D], contiguous float32 [B, H, S, D].
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

Tensor = Any


@triton.jit
def _side(
    g_ptr,
    x_ptr,
    d_ptr,
    first,
    c1,
    c2,
    s1,
    s2,
    h1,
    h2,
    a1,
    a2,
    S,
    H: tl.constexpr,
    D: tl.constexpr,
    T: tl.constexpr,
):
    """All heads of one token: `first` is its first head's row; c, s its table row; the sums so far."""
    half = tl.arange(0, D // 2)
    for start in tl.range(0, H, T):
        head = start + tl.arange(0, T)
        rows = (first + head.to(tl.int64) * S)[:, None] * D + half[None, :]
        inside = (head < H)[:, None] & (half >= 0)[None, :]
        g1 = tl.load(g_ptr + rows, mask=inside, other=0.0)
        g2 = tl.load(g_ptr + rows + D // 2, mask=inside, other=0.0)
        x1 = tl.load(x_ptr + rows, mask=inside, other=0.0)
        x2 = tl.load(x_ptr + rows + D // 2, mask=inside, other=0.0)
        tl.store(d_ptr + rows, g1 * c1 + g2 * s2, mask=inside)
        tl.store(d_ptr + rows + D // 2, g2 * c2 - g1 * s1, mask=inside)
        h1 += tl.sum(g1 * x1, axis=0)
        h2 += tl.sum(g2 * x2, axis=0)
        a1 -= tl.sum(g1 * x2, axis=0)
        a2 += tl.sum(g2 * x1, axis=0)
    return h1, h2, a1, a2


@triton.autotune(
    configs=[
        triton.Config({"T": heads}, num_warps=warps)
        for heads, warps in ((4, 2), (4, 4), (8, 2), (8, 4), (8, 8), (16, 4), (16, 8))
    ],
    key=["S", "H", "K"],
)
@triton.jit
def _backward(
    gq,
    gk,
    q,
    k,
    cos,
    sin,
    dq,
    dk,
    dcos,
    dsin,
    S,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    T: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    batch, place = token // S, token % S
    half = tl.arange(0, D // 2)
    table = token * D + half
    c1, c2 = tl.load(cos + table), tl.load(cos + table + D // 2)
    s1, s2 = tl.load(sin + table), tl.load(sin + table + D // 2)
    zero = tl.zeros((D // 2,), tl.float32)
    h1, h2, a1, a2 = _side(
        gq, q, dq, batch * H * S + place, c1, c2, s1, s2, zero, zero, zero, zero, S, H, D, T
    )
    h1, h2, a1, a2 = _side(gk, k, dk, batch * K * S + place, c1, c2, s1, s2, h1, h2, a1, a2, S, K, D, T)
    tl.store(dcos + table, h1)
    tl.store(dcos + table + D // 2, h2)
    tl.store(dsin + table, a1)
    tl.store(dsin + table + D // 2, a2)


def rope_backward(
    gq: Tensor, gk: Tensor, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of q, k, cos and sin, in fresh tensors."""
    out = tuple(torch.empty_like(x) for x in (q, k, cos, sin))
    batch, heads, seq, width = q.shape
    _backward[(batch * seq,)](gq, gk, q, k, cos, sin, *out, seq, heads, k.shape[1], width)
    return out
