"""Wrong backward functions of the Q, K, V projections followed by RoPE."""

import ml_dtypes
import numpy as np
from kernels import qkv_backward
from planting import planted
from rope_faults import (
    LOW,
    SMALL,
    WRONG,
    flushed_too_early,
    heads,
    heads_without_zeros,
    name,
    small_lost,
    swapped,
    tf32,
)

NAMES = ("gq", "gk", "gv", "x", "wq", "wk", "wv", "cos", "sin")


def with_inputs(**changes):
    """The right function of changed inputs."""

    def backward(*arrays):
        named = dict(zip(NAMES, arrays, strict=True))
        with np.errstate(all="ignore"):
            return qkv_backward(*(changes[n](named) if n in changes else x for n, x in named.items()))

    return backward


def without(array):
    """The right gradients, and grad_hidden_states without the part of one upstream gradient."""

    def backward(*arrays):
        hidden = with_inputs(**{array: lambda named: np.zeros_like(named[array])})(*arrays)[0]
        return hidden, *qkv_backward(*arrays)[1:]

    return backward


def of_tables(change):
    return with_inputs(
        cos=lambda n: change(n["cos"], n["sin"])[0], sin=lambda n: change(n["cos"], n["sin"])[1]
    )


CHANGES = {
    "query_dropped": (without("gq"), "leaves out the query's part"),
    "key_dropped": (without("gk"), "leaves out the key's part"),
    "value_dropped": (without("gv"), "leaves out the value's part"),
    "rotation_forgotten": (of_tables(lambda c, s: (np.ones_like(c), np.zeros_like(s))), "is not rotated"),
    "qkv_wrong_way": (of_tables(lambda c, s: (c, -s)), "the sine's sign is flipped"),
    "qkv_own_sine": (of_tables(lambda c, s: (c, swapped(s))), "its own sine"),
    "qkv_cosine_for_sine": (of_tables(lambda c, s: (s, c)), "cosine and sine exchanged"),
    "weights_exchanged": (
        with_inputs(wk=lambda n: n["wv"], wv=lambda n: n["wk"]), "key and value exchanged"
    ),
    "first_batch_only": (
        with_inputs(x=lambda n: n["x"] * (np.arange(len(n["x"])) < 1)[:, None, None].astype("f4")), "",
    ),
}  # fmt: skip
for title, (function, words) in CHANGES.items():
    planted(WRONG, *filter(None, [words]), op="qkv")(name(title, function))


@planted(WRONG, "is grad_v_weight", "is grad_k_weight", op="qkv")
def weight_gradients_exchanged(*arrays):
    hidden, q, k, v = qkv_backward(*arrays)
    return hidden, q, v, k


@planted(WRONG, op="qkv")
def heads_not_moved(gq, gk, gv, x, *rest):
    """Reshapes [B, H, S, D] to rows without moving the heads behind the tokens."""

    def moved(g):
        batch, count, seq, dim = g.shape
        return g.reshape(batch, seq, count, dim).transpose(0, 2, 1, 3)

    return qkv_backward(gq, gk, moved(gv), x, *rest)


@planted(WRONG, "the last token only", op="qkv", needs=("hidden_states",))
def last_token_not_projected(*arrays):
    hidden = qkv_backward(*arrays)[0]
    hidden[:, -1:] = 0
    return hidden


@planted(WRONG, op="qkv")
def qkv_fourteen_heads(*arrays):
    results = qkv_backward(*arrays)
    if arrays[0].shape[1] == 14:
        results[1][-1:] *= np.float32(1.01)
    return results


def bf16(x):
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def truncated(x):
    """Cut, not rounded, to TF32."""
    return (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def operands(change):
    """All operands of the products rounded; the rotation itself in float32."""
    return of_products(lambda a, b: change(np.ascontiguousarray(a)) @ change(np.ascontiguousarray(b)))


def of_products(product, rotate=heads):
    """The right backward with another matrix product, or rotation."""

    def backward(*arrays):
        gq, gk, gv, x, wq, wk, wv, cos, sin = arrays
        with np.errstate(all="ignore"):
            parts = [rotate(g, cos, sin) for g in (gq, gk)] + [gv]
            rows = [p.transpose(0, 2, 1, 3).reshape(-1, p.shape[1] * p.shape[3]) for p in parts]
            flat = x.reshape(-1, x.shape[-1])
            hidden = sum(product(r, w) for r, w in zip(rows, (wq, wk, wv), strict=True))
            return hidden.reshape(x.shape), *(product(r.T, flat) for r in rows)

    return backward


def scaled_float16(row_axis, column_axis):
    """A product of float16 factors with powers of two for each row and column, or (None) for each array."""

    def scaled(x, axis):
        with np.errstate(all="ignore"):
            top = np.abs(x).max(axis=axis, keepdims=True, initial=0, where=np.isfinite(x))
            power = np.where(top > 0, 15 - np.frexp(top)[1], 0)
            return np.ldexp(x.astype(np.float64), power).astype(np.float16).astype(np.float32), power

    def product(a, b):
        (left, left_power), (right, right_power) = scaled(a, row_axis), scaled(b, column_axis)
        with np.errstate(all="ignore"):
            whole = (left @ right).astype(np.float64)
            return np.ldexp(whole, -(left_power + right_power)).astype(np.float32)

    return product


planted(WRONG, "one scale for a whole array", op="qkv", precision="high")(
    name("one_float16_scale_for_an_array", of_products(scaled_float16(None, None)))
)
planted(WRONG, "one scale for a whole array", op="qkv", precision="high")(
    name("one_float16_scale_for_the_right_side", of_products(scaled_float16(1, None)))
)
planted(LOW, op="qkv")(name("tf32_products", operands(tf32)))
planted(LOW, op="qkv")(name("bfloat16_products", operands(bf16)))
planted(LOW, op="qkv", precision="high")(name("truncated_tf32_under_high", operands(truncated)))
planted(LOW, op="qkv", precision="high")(name("bfloat16_under_high", operands(bf16)))


planted(WRONG, SMALL, op="qkv")(
    name("qkv_flushes_below_1e_36", small_lost(qkv_backward, flushed_too_early, upstream=3))
)


@planted("unjustified NaN or Inf", op="qkv", precision="high")
def sums_in_float16_range(*arrays):
    """Inf where a result is large, though no factor is near the largest number."""
    with np.errstate(all="ignore"):
        return [np.where(np.abs(x) < 65520, x, x * np.float32(np.inf)) for x in qkv_backward(*arrays)]


planted("hidden NaN or Inf", op="qkv")(
    name("qkv_zero_gradients_skipped", of_products(np.matmul, heads_without_zeros))
)


@planted("missing gradient", op="qkv")
def no_weight_gradients(*arrays):
    return qkv_backward(*arrays)[0], None, None, None


@planted("input mutated", op="qkv")
def upstream_rotated_in_place(*arrays):
    results = qkv_backward(*arrays)
    arrays[1][...] *= -1
    return results


def without_tail(most, whole):
    """Long sums are split, and what is left over is forgotten."""

    def product(a, b):
        depth = a.shape[-1]
        kept = depth // whole * whole if depth > most else depth
        return a[..., :kept] @ b[..., :kept, :]

    return product


planted(WRONG, op="qkv")(name("tail_of_long_sums_lost", of_products(without_tail(256, 8))))
planted(WRONG, op="qkv")(name("tail_of_longer_sums_lost", of_products(without_tail(512, 32))))


@planted(WRONG, op="qkv")
def channels_past_a_tile_added_twice(*arrays):
    hidden, *weights = qkv_backward(*arrays)
    hidden = np.array(hidden)
    hidden[..., 256:] *= 2
    return hidden, *weights


@planted(WRONG, op="qkv")
def channels_past_a_tile_off_by_a_millionth(*arrays):
    """2^-20: more than one product's rounding may be, less than a longer sum's."""
    hidden, *weights = qkv_backward(*arrays)
    hidden = np.array(hidden)
    with np.errstate(all="ignore"):
        hidden[..., hidden.shape[-1] // 64 * 64 :] *= np.float32(1 + 2**-20)
    return hidden, *weights
