"""Right backward functions that compute differently: other orders, other arithmetic, other conventions."""

import itertools

import numpy as np
from kernels import by_name, qkv_backward, rope_backward, rope_backward_into, rotate_half, rotate_half_back
from qkv_faults import bf16, of_products, operands, scaled_float16
from rope_faults import heads, name, partial, tf32

import ropegrad
from ropegrad.verify import Contract, Domain

RIGHT = []  # (function, contract, domain, words that its contract section must have)


def right(function, *words, domain=None, **contract):
    RIGHT.append((function, Contract(**contract), domain or Domain(), words))
    return function


def backward(sum_up, rotate=heads):
    """A RoPE backward whose sums over heads are `sum_up` of a list of arrays."""

    def function(gq, gk, q, k, cos, sin):
        with np.errstate(all="ignore"):
            pairs = [(g[:, h], x[:, h]) for g, x in ((gq, q), (gk, k)) for h in range(g.shape[1])]
            grad_cos = sum_up([g * x for g, x in pairs])
            grad_sin = sum_up([g * rotate_half(x) for g, x in pairs])
            return rotate(gq, cos, sin), rotate(gk, cos, sin), grad_cos, grad_sin

    return function


def pairwise(terms):
    while len(terms) > 1:
        terms = [sum(terms[i : i + 2]) for i in range(0, len(terms), 2)]
    return terms[0]


def blocked(terms):
    return pairwise([pairwise(terms[i : i + 4]) for i in range(0, len(terms), 4)])


_TURN = itertools.count()


def in_another_order(terms):
    return sum(terms[:: 1 if next(_TURN) // 4 % 2 else -1], 0 * terms[0].clip(0, 0))


def kahan(terms):
    total, lost = np.zeros_like(terms[0]), np.zeros_like(terms[0])
    for term in terms:
        corrected = term - lost
        new = total + corrected
        lost = np.where(np.isfinite(new), (new - total) - corrected, 0).astype(total.dtype)
        total = new
    return total


def fused(gq, gk, q, k, cos, sin):
    """One rounding for each multiplication and addition together."""

    def rotated(g):
        other = rotate_half_back((g * sin[:, None]).astype(np.float32))
        return (g.astype(np.float64) * cos[:, None] + other).astype(np.float32)

    def added(rotate):
        total = np.zeros(cos.shape, np.float32)
        for g, x in ((gq, q), (gk, k)):
            for h in range(g.shape[1]):
                total = (g[:, h].astype(np.float64) * rotate(x[:, h]) + total).astype(np.float32)
        return total

    with np.errstate(all="ignore"):
        return rotated(gq), rotated(gk), added(lambda x: x), added(rotate_half)


def wide(*arrays):
    with np.errstate(all="ignore"):
        return [x.astype(arrays[0].dtype) for x in rope_backward(*(x.astype(np.float64) for x in arrays))]


def by_einsum(gq, gk, q, k, cos, sin):
    with np.errstate(all="ignore"):
        sums = (np.einsum("bhsd,bhsd->bsd", g, x) for g, x in ((gq, q), (gk, k)))
        turned = (np.einsum("bhsd,bhsd->bsd", g, rotate_half(x)) for g, x in ((gq, q), (gk, k)))
        return heads(gq, cos, sin), heads(gk, cos, sin), sum(sums), sum(turned)


def by_pairs(gq, gk, q, k, cos, sin):
    """2 x 2 matrix products, a pair each."""
    half = cos.shape[-1] // 2

    def paired(x):
        return np.stack([x[..., :half], x[..., half:]], axis=-1)

    c, s = paired(cos), paired(sin)
    turn = np.stack([np.stack([c[..., 0], s[..., 1]], -1), np.stack([-s[..., 0], c[..., 1]], -1)], -2)

    def rotated(g):
        x = (turn[:, None] @ paired(g)[..., None])[..., 0]
        return np.concatenate([x[..., 0], x[..., 1]], axis=-1)

    with np.errstate(all="ignore"):
        return rotated(gq), rotated(gk), *rope_backward(gq, gk, q, k, cos, sin)[2:]


def in_tiles(gq, gk, q, k, cos, sin):
    out = [np.empty_like(x) for x in (gq, gk, cos, sin)]
    for start in range(0, cos.shape[1], 4):
        run = slice(start, start + 4)
        parts = rope_backward(*(x[..., run, :] for x in (gq, gk, q, k)), cos[:, run], sin[:, run])
        for whole, tile in zip(out, parts, strict=True):
            whole[..., run, :] = tile
    return out


def flushing(*arrays):
    def flush(x):
        return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)

    with np.errstate(all="ignore"):
        return [flush(x) for x in rope_backward(*map(flush, arrays))]


def interleaved(gq, gk, q, k, cos, sin):
    """Pairs moved apart, rotated, moved back."""
    size = cos.shape[-1]
    apart = np.r_[0:size:2, 1:size:2]
    back = np.argsort(apart)
    return [x[..., back] for x in rope_backward(*(x[..., apart] for x in (gq, gk, q, k, cos, sin)))]


def half_tables(gq, gk, q, k, cos, sin):
    with np.errstate(all="ignore"):
        grads = rope_backward(gq, gk, q, k, np.tile(cos, 2), np.tile(sin, 2))
        half = cos.shape[-1]
        return *grads[:2], *(x[..., :half] + x[..., half:] for x in grads[2:])


def in_layout(*axes):
    back = np.argsort(axes)

    def function(gq, gk, q, k, cos, sin):
        grads = rope_backward(*(x.transpose(axes) for x in (gq, gk, q, k)), cos, sin)
        return *(x.transpose(back) for x in grads[:2]), *grads[2:]

    return function


def shared_table(gq, gk, q, k, cos, sin):
    with np.errstate(all="ignore"):
        grads = rope_backward(gq, gk, q, k, cos[None], sin[None])
        return *grads[:2], *(x.sum(axis=0) for x in grads[2:])


def once(*arrays):
    """Half precision in and out, float32 inside."""
    with np.errstate(all="ignore"):
        grads = rope_backward(*(x.astype(np.float32) for x in arrays))
        return [
            x.astype(like.dtype) for x, like in zip(grads, (arrays[0], arrays[1], *arrays[4:]), strict=True)
        ]


def eager(gq, gk, q, k, cos, sin):
    """As eager frameworks do: every array is rounded, sums are rounded once."""

    def total(g, x):
        return (g * x).astype(np.float32).sum(axis=1).astype(g.dtype)

    with np.errstate(all="ignore"):
        grads = heads(gq, cos, sin), heads(gk, cos, sin)
        grad_sin = total(gq, rotate_half(q)) + total(gk, rotate_half(k))
        return *grads, total(gq, q) + total(gk, k), grad_sin


def own_sine_on_request(gq, gk, q, k, cos, sin):
    c, s = cos[:, None], sin[:, None]
    with np.errstate(all="ignore"):
        grads = (g * c - rotate_half(g) * s for g in (gq, gk))
        return *grads, *rope_backward(gq, gk, q, k, cos, sin)[2:]


right(rope_backward, "bit for bit", "both of a pair are read", "kept", "once")
right(rope_backward_into, dps=True)
right(by_name)
right(ropegrad.rope_backward)
right(name("in_reverse_order", backward(lambda terms: sum(terms[::-1], 0 * terms[0].clip(0, 0)))))
right(name("pairwise", backward(pairwise)))
right(name("blocked", backward(blocked)))
right(name("kahan", backward(kahan)))
right(name("fsum_like", backward(lambda t: np.sum(np.stack(t).astype("f8"), 0).astype("f4"))))
right(fused)
right(name("another_order_every_time", backward(in_another_order)), "bits differ between equal calls")
right(wide)
right(by_einsum)
right(by_pairs)
right(in_tiles)
right(partial, domain=Domain(rotary="any"))
right(flushing, "flushed to zero")
right(interleaved, pairing="interleaved")
right(half_tables, "half tables", table="half")
right(name("layout_bshd", in_layout(0, 2, 1, 3)), layout="bshd")
right(name("layout_sbhd", in_layout(1, 2, 0, 3)), layout="sbhd")
right(shared_table, table_shape="sd")
right(name("bfloat16_rounded_once", once), "once", dtype="bfloat16", table_dtype="bfloat16")
right(name("float16_with_float32_tables", once), "once", dtype="float16", table_dtype="float32")
right(name("bfloat16_eager", eager), "at every step",
      dtype="bfloat16", table_dtype="bfloat16")  # fmt: skip
right(name("in_float64", rope_backward), dtype="float64", table_dtype="float64")
right(own_sine_on_request, adjoint="paired")
right(name("q_and_k_only", lambda *arrays: rope_backward(*arrays)[:2]), needs=("q", "k"))
right(name("own_sine_where_columns_are_equal", own_sine_on_request), domain=Domain(tables="equal-halves"))


# ---- projections ---------------------------------------------------------------------------------------


def packed(gq, gk, gv, x, wq, wk, wv, cos, sin):
    """One matrix of rotated gradients, two products."""

    def rows(g):
        return g.transpose(0, 2, 1, 3).reshape(-1, g.shape[1] * g.shape[3])

    with np.errstate(all="ignore"):
        d = np.concatenate([rows(heads(gq, cos, sin)), rows(heads(gk, cos, sin)), rows(gv)], axis=1)
        flat = x.reshape(-1, x.shape[-1])
        hidden = (d @ np.concatenate([wq, wk, wv])).reshape(x.shape)
        q, k = len(wq), len(wq) + len(wk)
        weights = d.T @ flat
        return hidden, weights[:q].copy(), weights[q:k].copy(), weights[k:].copy()


def with_products(product):
    """Every matrix product by `product`; the rotation in float32."""

    def function(gq, gk, gv, x, wq, wk, wv, cos, sin):
        with np.errstate(all="ignore"):
            parts = [heads(gq, cos, sin), heads(gk, cos, sin), gv]
            rows = [p.transpose(0, 2, 1, 3).reshape(-1, p.shape[1] * p.shape[3]) for p in parts]
            flat = x.reshape(-1, x.shape[-1])
            hidden = sum(product(r, w) for r, w in zip(rows, (wq, wk, wv), strict=True))
            return hidden.reshape(x.shape), *(product(r.T, flat) for r in rows)

    return function


def split_k(a, b):
    """Sums of products of 8 terms at a time."""
    total = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for start in range(0, a.shape[1], 8):
        total += a[:, start : start + 8] @ b[start : start + 8]
    return total


def one_by_one(a, b):
    """Term after term."""
    total = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for k in range(a.shape[1]):
        total += a[:, k, None] * b[k]
    return total


def wide_product(a, b):
    return (a.astype(np.float64) @ b.astype(np.float64)).astype(np.float32)


operands_scaled = of_products(scaled_float16(1, 0))  # a scale for each row and column

# TF32's and bfloat16's operands are as wide in range as float32's: only Inf made by rounding is theirs.
FINITE = Domain(empty="no")

right(qkv_backward, op="qkv")
right(packed, op="qkv")
right(ropegrad.qkv_rope_backward, op="qkv")
right(name("split_k", with_products(split_k)), op="qkv")
right(name("term_after_term", with_products(one_by_one)), op="qkv")
right(name("float64_products", with_products(wide_product)), op="qkv")
right(name("tf32_under_high", operands(tf32)), op="qkv", precision="high")
right(name("scaled_float16_under_high", operands_scaled), op="qkv", precision="high")
right(name("bfloat16_under_medium", operands(bf16)), op="qkv", precision="medium")
right(name("float32_under_medium", qkv_backward), op="qkv", precision="medium")
