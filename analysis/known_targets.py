"""Rotary kernels that no one here wrote, as `ropegrad verify --of forward` calls them: q, k, cos, sin.

Classes, so that what they import is imported when the target is loaded, and not within the first call.
"""

from __future__ import annotations

from typing import Any


class Liger:
    """Liger-Kernel's Triton rope, forward and backward; it may work in place, so it gets copies."""

    def __init__(self) -> None:
        from liger_kernel.ops.rope import LigerRopeFunction

        self.function: Any = LigerRopeFunction

    def __call__(self, q: Any, k: Any, cos: Any, sin: Any) -> Any:
        return self.function.apply(q.clone(), k.clone(), cos, sin)


class FlashAttention:
    """flash-attention's Triton rotary: x [B, S, H, D], tables [S, R/2]."""

    def __init__(self) -> None:
        from flash_attn.layers.rotary import apply_rotary_emb

        self.function: Any = apply_rotary_emb

    def __call__(self, q: Any, k: Any, cos: Any, sin: Any) -> Any:
        return self.function(q, cos, sin), self.function(k, cos, sin)
