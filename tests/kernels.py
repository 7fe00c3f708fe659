"""Backward functions as their authors write them, in plain NumPy: right ones, and some that misbehave."""

import ctypes
import os
import time

import numpy as np


def rotate_half(x):
    """(x1, x2) -> (-x2, x1)."""
    half = x.shape[-1] // 2
    return np.concatenate([-x[..., half:], x[..., :half]], axis=-1)


def rotate_half_back(x):
    """The transpose of rotate_half."""
    return -rotate_half(x)


def rope_backward(grad_q_embed, grad_k_embed, q, k, cos, sin):
    c, s = cos[:, None], sin[:, None]
    grad_q = grad_q_embed * c + rotate_half_back(grad_q_embed * s)
    grad_k = grad_k_embed * c + rotate_half_back(grad_k_embed * s)
    grad_cos = (grad_q_embed * q).sum(axis=1) + (grad_k_embed * k).sum(axis=1)
    grad_sin = (grad_q_embed * rotate_half(q)).sum(axis=1) + (grad_k_embed * rotate_half(k)).sum(axis=1)
    return grad_q, grad_k, grad_cos, grad_sin


def rope_backward_into(grad_q_embed, grad_k_embed, q, k, cos, sin, *outputs):
    for out, result in zip(outputs, rope_backward(grad_q_embed, grad_k_embed, q, k, cos, sin), strict=True):
        out[...] = result


def by_name(*arrays):
    return dict(zip(("grad_q", "grad_k", "grad_cos", "grad_sin"), rope_backward(*arrays), strict=True))


def own_sine(grad_q_embed, grad_k_embed, q, k, cos, sin):
    """Problem 068's formula."""
    c, s = cos[:, None], sin[:, None]
    _, _, grad_cos, grad_sin = rope_backward(grad_q_embed, grad_k_embed, q, k, cos, sin)
    grad_q = grad_q_embed * c - rotate_half(grad_q_embed) * s
    grad_k = grad_k_embed * c - rotate_half(grad_k_embed) * s
    return grad_q, grad_k, grad_cos, grad_sin


def channel_37(*arrays):
    """Wrong in heads of more than 37 channels, whatever the tables."""
    results = rope_backward(*arrays)
    results[0][..., 37:38] *= 1.001
    return results


def qkv_backward(grad_query, grad_key, grad_value, hidden_states, q_weight, k_weight, v_weight, cos, sin):
    def rows(grad):
        return grad.transpose(0, 2, 1, 3).reshape(-1, grad.shape[1] * grad.shape[3])

    def unrotate(grad):
        return grad * cos[:, None] + rotate_half_back(grad * sin[:, None])

    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    dq, dk, dv = rows(unrotate(grad_query)), rows(unrotate(grad_key)), rows(grad_value)
    hidden = (dq @ q_weight + dk @ k_weight + dv @ v_weight).reshape(hidden_states.shape)
    return hidden, dq.T @ x, dk.T @ x, dv.T @ x


def declines(*arrays):
    raise NotImplementedError("not today")


def raises(*arrays):
    raise ValueError("no such kernel")


def raises_in_colour(*arrays):
    raise ValueError("\x1b[31mred\x1b[0m\nand \x07 a bell")


def one_shape(*arrays):
    """Takes a table for each batch, and nothing else."""
    if arrays[4].ndim == 2:
        raise ValueError("tables have three axes")
    if arrays[4].shape[0] != arrays[0].shape[0]:
        raise NotImplementedError("a table for each batch")
    return rope_backward(*arrays)


def hangs(*arrays):
    while True:
        time.sleep(0.01)


def segfaults(*arrays):
    ctypes.string_at(0)


def leaves(*arrays):
    os._exit(0)


def eats_memory(*arrays):
    np.ones(1 << 28)  # 2 GiB


def small_part_of_much(*arrays):
    results = []
    for x in rope_backward(*arrays):
        room = np.zeros((1 << 23) + x.size, np.float32)
        results.append(room[: x.size].reshape(x.shape))
        results[-1][...] = x
    return tuple(results)


def prints(*arrays):
    print("grad_q is on its way")
    return rope_backward(*arrays)


def five_tokens_wrong(*arrays):
    results = rope_backward(*arrays)
    if arrays[0].shape[2] >= 5:
        results[1][:, :, -1] *= 1.001
    return results


def mutates(*arrays):
    results = rope_backward(*arrays)
    arrays[4][...] += 1
    return results


def negative_strides_wrong(*arrays):
    def forgets_the_sign(x):
        return x if all(step >= 0 for step in x.strides) else np.flip(x)

    return rope_backward(*map(forgets_the_sign, arrays))


def writes_too_far(*arrays):
    rope_backward_into(*arrays)
    last = arrays[-1]
    ctypes.memset(last.ctypes.data + last.nbytes + 8, 0, 4)


_CACHE = {}


def stale(*arrays):
    return _CACHE.setdefault(arrays[0].shape, rope_backward(*arrays))


def stale_by_object(*arrays):
    if id(arrays[0]) not in _CACHE:
        _CACHE[id(arrays[0])] = arrays, rope_backward(*arrays)
    return tuple(x.copy() for x in _CACHE[id(arrays[0])][1])


_RING = {}


def buffers(*arrays):
    """Four, used in turn."""
    results = rope_backward(*arrays)
    ring = _RING.setdefault(arrays[0].shape + arrays[1].shape, [])
    ring.append(results if len(ring) < 4 else ring.pop(0))
    for buffer, result in zip(ring[-1], results, strict=True):
        buffer[...] = result
    return ring[-1]


fixed_True, fixed_False = rope_backward_into, rope_backward
