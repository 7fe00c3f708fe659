"""Differentiable forwards in PyTorch, as models have them, and autograd Functions, right and wrong."""

import ctypes

import torch


def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def rope(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class _Rotation(torch.autograd.Function):
    """A rotation whose backward gives no gradient to the tables and uses each channel's own sine."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return x * cos + rotate_half(x) * sin

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return grad * cos - rotate_half(grad) * sin, None, None


def own_sine(q, k, cos, sin):
    return tuple(_Rotation.apply(x, cos.unsqueeze(1), sin.unsqueeze(1)) for x in (q, k))


class _InPlace(torch.autograd.Function):
    """A backward that writes into the incoming gradient."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return x * cos + rotate_half(x) * sin

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        turned = grad * cos - rotate_half(grad * sin)
        return grad.copy_(turned), None, None


def in_place(q, k, cos, sin):
    return tuple(_InPlace.apply(x, cos.unsqueeze(1), sin.unsqueeze(1)) for x in (q, k))


def detached(q, k, cos, sin):
    with torch.no_grad():
        return rope(q, k, cos, sin)


def wrong_values(q, k, cos, sin):
    """The gradients of its own forward are right, but that is no RoPE."""
    return rope(q, k, cos, -sin)


class Layer(torch.nn.Module):
    """Projections and RoPE as a module; the weights are inputs."""

    def forward(self, hidden_states, q_weight, k_weight, v_weight, cos, sin):
        batch, seq, _ = hidden_states.shape
        size = cos.shape[-1]

        def heads(weight):
            projected = torch.nn.functional.linear(hidden_states, weight)
            return projected.view(batch, seq, weight.shape[0] // size, size).transpose(1, 2)

        return *rope(heads(q_weight), heads(k_weight), cos, sin), heads(v_weight)


def negative_bit(*arrays):
    """Right; the first result is a view that PyTorch negates when it is read."""
    first, *others = backward(*arrays)
    return torch._neg_view(-first), *others


def backward(grad_q_embed, grad_k_embed, q, k, cos, sin):
    c, s = cos.unsqueeze(1), sin.unsqueeze(1)

    def back(g):
        return g * c - rotate_half(g * s)

    grad_cos = (grad_q_embed * q).sum(1) + (grad_k_embed * k).sum(1)
    grad_sin = (grad_q_embed * rotate_half(q)).sum(1) + (grad_k_embed * rotate_half(k)).sum(1)
    return back(grad_q_embed), back(grad_k_embed), grad_cos, grad_sin


def overwrites(grad_q_embed, *rest):
    grads = backward(grad_q_embed, *rest)
    grad_q_embed.zero_()
    return grads


def wrong_sine(*arrays):
    grads = backward(*arrays)
    return grads[0], grads[1], grads[2], -grads[3]


def into(*arrays):
    for out, grad in zip(arrays[6:], backward(*arrays[:6]), strict=True):
        out.copy_(grad)


def into_too_much(*arrays):
    into(*arrays)
    last = arrays[-1]
    ctypes.memset(last.data_ptr() + last.numel() * last.element_size(), 0, 4)


def numpy_results(*arrays):
    return [x.numpy() for x in backward(*arrays)]


def one_more(*arrays):
    return *backward(*arrays), arrays[0].sum()


_RING = {}


def two_buffers_in_turn(*arrays):
    ring = _RING.setdefault(tuple(x.shape for x in arrays), [backward(*arrays) for _ in range(2)])
    ring.reverse()
    for buffer, result in zip(ring[0], backward(*arrays), strict=True):
        buffer.copy_(result)
    return ring[0]


class _Static(torch.autograd.Function):
    """A backward that gives its results in one buffer for each shape."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(x, cos, sin)
        return x * cos + rotate_half(x) * sin

    @staticmethod
    def backward(ctx, grad):
        x, cos, sin = ctx.saved_tensors
        buffer = _RING.setdefault((x.shape, ctx.needs_input_grad), torch.empty_like(x))
        buffer.copy_(grad * cos - rotate_half(grad * sin))
        return buffer, (grad * x).sum(1, keepdim=True), (grad * rotate_half(x)).sum(1, keepdim=True)


def static_buffer(q, k, cos, sin):
    return _Static.apply(q, cos.unsqueeze(1), sin.unsqueeze(1)), rope(q, k, cos, sin)[1]
