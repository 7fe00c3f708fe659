"""Differentiable forwards in JAX."""

import jax
import jax.numpy as jnp


def rotate_half(x):
    half = x.shape[-1] // 2
    return jnp.concatenate((-x[..., half:], x[..., :half]), axis=-1)


@jax.jit
def rope(q, k, cos, sin):
    cos, sin = cos[:, None], sin[:, None]
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


@jax.custom_vjp
def rotated(x, cos, sin):
    return x * cos + rotate_half(x) * sin


rotated.defvjp(
    lambda x, cos, sin: (rotated(x, cos, sin), (x, cos, sin)),
    lambda kept, g: (
        g * kept[1] + rotate_half(g) * kept[2],
        (g * kept[0]).sum(1, keepdims=True),
        (g * rotate_half(kept[0])).sum(1, keepdims=True),
    ),
)


def wrong_way(q, k, cos, sin):
    return rotated(q, cos[:, None], sin[:, None]), rotated(k, cos[:, None], sin[:, None])
