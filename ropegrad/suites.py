"""The two benchmark suites whose workloads ropegrad is measured on: shapes only, in the published order.

Source: NVIDIA SOL-ExecBench problems 068 (fused RoPE application backward; from Llama-3.1-Nemotron-8B-
UltraLong-1M-Instruct) and 064 (multi-head QKV projection with RoPE backward; from Parakeet-TDT-0.6B-v3),
16 cases of float32 each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ropegrad.spec import QkvSpec, RopeSpec

# batch, seq, heads, kv_heads; head_dim 128
_ROPE = (
    (2, 128, 32, 8), (16, 128, 32, 8), (32, 128, 32, 8), (1, 256, 32, 8), (1, 293, 32, 8), (1, 512, 64, 8),
    (2, 512, 64, 8), (2, 541, 32, 8), (1, 997, 32, 8), (1, 1024, 32, 32), (1, 1024, 64, 8), (2, 1024, 32, 8),
    (4, 1571, 32, 8), (1, 2048, 64, 8), (2, 2048, 32, 8), (1, 2053, 32, 8),
)  # fmt: skip

# batch, seq; 24 heads and 4 kv heads of 96 channels, hidden size 1536
_QKV = (
    (2, 128), (16, 128), (32, 128), (64, 128), (4, 256), (8, 256), (2, 293), (8, 512), (4, 541), (2, 1024),
    (4, 1024), (2, 1321), (1, 2048), (4, 2048), (1, 4096), (1, 8192),
)  # fmt: skip


def rope_suite() -> dict[str, RopeSpec]:
    """The 16 cases of problem 068 by name."""
    return {
        f"B={batch} S={seq} H={heads}/{kv_heads}": RopeSpec(
            batch=batch, heads=heads, kv_heads=kv_heads, seq=seq, head_dim=128, rotary_dim=128,
            table_batch=batch, adjoint="exact",
        )
        for batch, seq, heads, kv_heads in _ROPE
    }  # fmt: skip


def qkv_suite() -> dict[str, QkvSpec]:
    """The 16 cases of problem 064 by name."""
    return {
        f"B={batch} S={seq}": QkvSpec(
            rope=RopeSpec(
                batch=batch, heads=24, kv_heads=4, seq=seq, head_dim=96, rotary_dim=96, table_batch=batch,
                needs=(),
            ),
            hidden_size=1536,
        )
        for batch, seq in _QKV
    }  # fmt: skip


SUITES: dict[str, Callable[[], Mapping[str, RopeSpec | QkvSpec]]] = {"rope": rope_suite, "qkv": qkv_suite}
