"""Exact, verified gradients of rotary position embedding and of the QKV projections before it."""

from ropegrad.api import Explanation, explain, qkv_rope, qkv_rope_backward, rope, rope_backward
from ropegrad.errors import SpecError
from ropegrad.outputs import QkvBiasGrads, QkvGrads, QkvOut, QkvPackedGrads, RopeGrads, RopeOut
from ropegrad.plan import RopeGraph, RopePlan, plan_rope_backward
from ropegrad.positions import rope_tables
from ropegrad.qkv_plan import QkvPlan, plan_qkv_rope_backward
from ropegrad.spec import QkvSpec, RopeSpec

__version__ = "0.1.0"

__all__ = [
    "Explanation",
    "QkvBiasGrads",
    "QkvGrads",
    "QkvOut",
    "QkvPackedGrads",
    "QkvPlan",
    "QkvSpec",
    "RopeGrads",
    "RopeGraph",
    "RopeOut",
    "RopePlan",
    "RopeSpec",
    "SpecError",
    "explain",
    "plan_qkv_rope_backward",
    "plan_rope_backward",
    "qkv_rope",
    "qkv_rope_backward",
    "rope",
    "rope_backward",
    "rope_tables",
]
