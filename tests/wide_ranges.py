"""Projections whose ranges no 16-bit number has: factors by token, head, channel; NaN and Inf among them."""

from dataclasses import replace

import numpy as np

from ropegrad.spec import QkvSpec, RopeSpec
from ropegrad.verify.draws import make_case

ROPE = RopeSpec(batch=2, heads=4, kv_heads=2, seq=12, head_dim=8, rotary_dim=8, table_batch=2, needs=())
SPEC = QkvSpec(rope=ROPE, hidden_size=32, precision="high")
GRADIENTS = ("grad_query", "grad_key", "grad_value")
WEIGHTS = ("q_weight", "k_weight", "v_weight")
HIDDEN = "hidden_states"


def times(x, factors, axis=None):
    """x by one factor, or by factor i on everything at index i of the axis; rounded once."""
    shape = [1] * x.ndim
    if axis is not None:
        shape[axis] = -1
    return (x.astype(np.float64) * np.reshape(factors, shape)).astype(x.dtype)


def put(x, where, value):
    """Write one element, at these indices as far as the axes reach."""
    if x.size:
        x[tuple(i % n for i, n in zip(where, x.shape, strict=True))] = value


def one_column(x, column, factor):
    """x with a factor on this index of the last axis."""
    factors = np.ones(x.shape[-1])
    put(factors, (column,), factor)
    return times(x, factors, -1)


def adversarial(kind, rng, spec, inputs):
    """Change the inputs in place. float16 has a tenth of the others' exponents, and gets a tenth of them."""
    layout, share = spec.rope.layout, 0.1 if spec.rope.dtype == "float16" else 1.0
    axes = {"tokens": layout.index("s"), "heads": layout.index("h")}
    huge = 10.0 ** (14 * share)
    if kind in axes:
        for name in GRADIENTS:
            reach = 12 * share
            factors = 10.0 ** rng.uniform(-reach, reach, inputs[name].shape[axes[kind]])
            inputs[name] = times(inputs[name], factors, axes[kind])
    elif kind == "weight column":
        for name in WEIGHTS:
            inputs[name] = one_column(inputs[name], 3, huge)
    elif kind == "hidden channel":
        inputs[HIDDEN] = one_column(inputs[HIDDEN], 5, huge)
    elif kind == "reciprocal rows":
        powers = 2.0 ** rng.choice((-40 * share, 40 * share), spec.rope.seq)
        for name in GRADIENTS:
            inputs[name] = times(inputs[name], powers, axes["tokens"])
        inputs[HIDDEN] = times(inputs[HIDDEN], 1 / powers, 0 if layout == "sbhd" else 1)
    elif kind == "one huge element":
        put(inputs["grad_query"], (1, 2, 3, 4), 10.0 ** (30 * share))
        put(inputs[HIDDEN], (0, 1, 2), -(10.0 ** (30 * share)))
    elif kind == "padding":
        for name in GRADIENTS:
            inputs[name] = times(inputs[name], np.arange(spec.rope.seq) < 7, axes["tokens"])
        inputs[HIDDEN] = times(inputs[HIDDEN], np.arange(spec.rope.seq) < 7, 0 if layout == "sbhd" else 1)
    elif kind == "zeros":
        for name in (*GRADIENTS, HIDDEN):
            inputs[name][...] = 0
    elif kind == "nearly overflowing":
        inputs["grad_value"] = times(inputs["grad_value"], 5 * 10.0 ** (37 * share))
        inputs["v_weight"] = times(inputs["v_weight"], 10.0 ** (-30 * share))
    elif kind == "subnormal":
        least = {"float16": -6.5, "bfloat16": -39.5}.get(spec.rope.dtype, -42.0)
        for name in GRADIENTS:
            inputs[name] = times(inputs[name], 10.0**least)
    elif kind in ("all tiny", "all large"):
        factor = 2.0 ** ({"all tiny": -70, "all large": 50}[kind] * share)
        for name in (*GRADIENTS, HIDDEN, *WEIGHTS):
            inputs[name] = times(inputs[name], factor)
    elif kind == "nonfinite":
        put(inputs["grad_query"], (0, 1, 2, 3), np.nan)
        put(inputs[HIDDEN], (1, 4, 6), np.inf)
        put(inputs["k_weight"], (5, 7), -np.inf)
    else:
        parts = {"tokens and heads": ("tokens", "heads"),
                 "nonfinite among wide": ("tokens", "hidden channel", "nonfinite")}  # fmt: skip
        for part in parts[kind]:
            adversarial(part, rng, spec, inputs)


KINDS = (
    "tokens", "heads", "tokens and heads", "weight column", "hidden channel", "reciprocal rows",
    "one huge element", "padding", "zeros", "nearly overflowing", "subnormal", "all tiny", "all large",
    "nonfinite", "nonfinite among wide",
)  # fmt: skip


def widened(case, kind, seed):
    """The case with its range made adversarial, in contiguous memory."""
    inputs = {name: np.array(x) for name, x in case.inputs.items()}
    with np.errstate(all="ignore"):
        adversarial(kind, np.random.default_rng(seed), case.spec, inputs)
    return replace(case, inputs=inputs, name=kind)


def wide_case(kind, seed=0, spec=SPEC, values="normal"):
    return widened(make_case(spec, seed, values=values), kind, seed)
