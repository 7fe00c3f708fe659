"""Projections whose ranges no 16-bit number has: factors by token, head, channel; NaN and Inf among them."""

from dataclasses import replace

import numpy as np

from ropegrad.spec import QkvSpec, RopeSpec
from ropegrad.verify.draws import make_case

ROPE = RopeSpec(batch=2, heads=4, kv_heads=2, seq=12, head_dim=8, rotary_dim=8, table_batch=2, needs=())
SPEC = QkvSpec(rope=ROPE, hidden_size=32, precision="high")


def each(x, axis, factors):
    """x with factor i on everything at index i of the axis."""
    shape = [1] * x.ndim
    shape[axis] = -1
    return (x * factors.reshape(shape)).astype(x.dtype)


def tokens(x, rng):
    return each(x, 2, 10.0 ** rng.uniform(-12, 12, x.shape[2]))


def heads(x, rng):
    return each(x, 1, 10.0 ** rng.uniform(-12, 12, x.shape[1]))


def adversarial(kind, rng, inputs):
    """Change the inputs in place."""
    gradients = ("grad_query", "grad_key", "grad_value")
    if kind in ("tokens", "heads"):
        for name in gradients:
            inputs[name] = {"tokens": tokens, "heads": heads}[kind](inputs[name], rng)
    elif kind == "weight column":
        for name in ("q_weight", "k_weight", "v_weight"):
            inputs[name][:, 3] *= np.float32(1e14)
    elif kind == "hidden channel":
        inputs["hidden_states"][..., 5] *= np.float32(1e14)
    elif kind == "reciprocal rows":
        powers = np.ldexp(1.0, rng.choice((-40, 40), ROPE.seq))
        for name in gradients:
            inputs[name] = each(inputs[name], 2, powers)
        inputs["hidden_states"] = each(inputs["hidden_states"], 1, 1 / powers)
    elif kind == "one huge element":
        inputs["grad_query"][1, 2, 3, 4] = 1e30
        inputs["hidden_states"][0, 1, 2] = -1e30
    elif kind == "padding":
        for name in gradients:
            inputs[name][:, :, 7:] = 0
        inputs["hidden_states"][:, 7:] = 0
    elif kind == "zeros":
        for name in (*gradients, "hidden_states"):
            inputs[name][...] = 0
    elif kind == "nearly overflowing":
        inputs["grad_value"] *= np.float32(5e37)
        inputs["v_weight"] *= np.float32(1e-30)
    elif kind == "subnormal":
        for name in gradients:
            inputs[name] = (inputs[name] * np.float32(1e-20) * np.float32(1e-22)).astype(np.float32)
    elif kind == "all tiny":
        for name in inputs:
            if name not in ("cos", "sin"):
                inputs[name] *= np.float32(2.0**-70)
    elif kind == "all large":
        for name in inputs:
            if name not in ("cos", "sin"):
                inputs[name] *= np.float32(2.0**50)
    elif kind == "nonfinite":
        inputs["grad_query"][0, 1, 2, 3] = np.nan
        inputs["hidden_states"][1, 4, 6] = np.inf
        inputs["k_weight"][5, 7] = -np.inf
    elif kind == "nonfinite among wide":
        adversarial("tokens", rng, inputs)
        adversarial("hidden channel", rng, inputs)
        adversarial("nonfinite", rng, inputs)
    else:
        assert kind == "tokens and heads"
        adversarial("tokens", rng, inputs)
        adversarial("heads", rng, inputs)


KINDS = (
    "tokens", "heads", "tokens and heads", "weight column", "hidden channel", "reciprocal rows",
    "one huge element", "padding", "zeros", "nearly overflowing", "subnormal", "all tiny", "all large",
    "nonfinite", "nonfinite among wide",
)  # fmt: skip


def wide_case(kind, seed=0, spec=SPEC, values="normal"):
    case = make_case(spec, seed, values=values)
    inputs = {name: np.array(x) for name, x in case.inputs.items()}
    with np.errstate(all="ignore"):
        adversarial(kind, np.random.default_rng(seed), inputs)
    return replace(case, inputs=inputs, name=kind)
