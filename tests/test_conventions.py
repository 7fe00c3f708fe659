"""The conventions that people mix up, and how each maps onto the others."""

import numpy as np

import ropegrad as rg
from ropegrad.spec import RopeSpec
from ropegrad.verify.draws import make_case
from ropegrad.verify.runners import run_backend

WIDTH = 12
SPEC = RopeSpec(batch=2, heads=4, kv_heads=2, seq=5, head_dim=16, rotary_dim=WIDTH, table_batch=2)
CASE = make_case(SPEC, 3)
# Channel 2i of an interleaved head is channel i of a half-paired one, 2i + 1 is i + R/2; the rest stays.
TO_HALF = np.concatenate([np.arange(0, WIDTH, 2), np.arange(1, WIDTH, 2), np.arange(WIDTH, 16)])


def moved(x):
    return x[..., TO_HALF[x.shape[-1] > TO_HALF]]


def test_interleaved_is_half_pairing_with_the_channels_moved(backend):
    inputs = CASE.inputs.values()
    interleaved = rg.rope_backward(*inputs, pairing="interleaved", backend=backend)
    half = rg.rope_backward(*map(moved, inputs), pairing="half", backend=backend)
    for a, b in zip(interleaved, half, strict=True):
        assert np.array_equal(moved(a), b)


def test_the_two_pairings_differ():
    inputs = CASE.inputs.values()
    interleaved, half = rg.rope_backward(*inputs, pairing="interleaved"), rg.rope_backward(*inputs)
    for name in ("grad_q", "grad_k", "grad_sin"):
        assert not np.array_equal(getattr(interleaved, name), getattr(half, name))
    assert np.array_equal(interleaved.grad_cos, half.grad_cos)  # a full table's cosine has no partner


def test_negative_sines_rotate_the_other_way_and_are_no_error():
    values = dict(CASE.inputs)
    values["sin"] = -values["sin"]
    turned = rg.rope_backward(*values.values())
    right = rg.rope_backward(*CASE.inputs.values())
    assert np.array_equal(turned.grad_sin, right.grad_sin)  # it does not read the tables
    assert not np.array_equal(turned.grad_q, right.grad_q)


def test_packed_sequences_are_one_batch_whose_positions_start_again(backend):
    """[T, H, D] of sequences of 3, 0, 1 and 2 tokens, as `layout="bshd"` has them."""
    lengths, rng = (3, 0, 1, 2), np.random.default_rng(0)
    gq, q = rng.standard_normal((2, sum(lengths), 4, 8), dtype=np.float32)
    gk, k = rng.standard_normal((2, sum(lengths), 2, 8), dtype=np.float32)
    words = {"layout": "bshd", "backend": backend}

    def gradients(tokens, positions):
        tables = rg.rope_tables(positions, 8)
        return rg.rope_backward(*(x[None, tokens] for x in (gq, gk, q, k)), *tables, **words)

    packed = gradients(slice(None), np.concatenate([np.arange(n) for n in lengths]))
    start = 0
    for n in lengths:
        alone, rows = gradients(slice(start, start + n), np.arange(n)), slice(start, start + n)
        for name in ("grad_q", "grad_k"):
            assert np.array_equal(getattr(packed, name)[:, rows], getattr(alone, name))
        for name in ("grad_cos", "grad_sin"):
            assert np.array_equal(getattr(packed, name)[rows], getattr(alone, name))
        start += n


def test_weights_and_their_gradients_move_from_half_to_interleaved_pairing():
    heads, dim, hidden = 4, 8, 6

    def moved_rows(w):
        return w.reshape(-1, 2, dim // 2, hidden).swapaxes(1, 2).reshape(-1, hidden)

    def moved_channels(x):
        return x.reshape(*x.shape[:-1], 2, dim // 2).swapaxes(-1, -2).reshape(x.shape)

    rng = np.random.default_rng(1)
    gq, gk, gv = (rng.integers(-4, 5, (1, n, 5, dim)).astype(np.float32) for n in (heads, 2, 2))
    x, wq, wk, wv = (
        rng.integers(-4, 5, shape).astype(np.float32)
        for shape in ((1, 5, hidden), *((n * dim, hidden) for n in (heads, 2, 2)))
    )
    cos, sin = rng.integers(-4, 5, (2, 5, dim // 2)).astype(np.float32)
    half = rg.qkv_rope_backward(gq, gk, gv, x, wq, wk, wv, cos, sin, table="half")
    interleaved = rg.qkv_rope_backward(
        moved_channels(gq), moved_channels(gk), gv, x, moved_rows(wq), moved_rows(wk), wv, cos, sin,
        table="half", pairing="interleaved",
    )  # fmt: skip
    assert np.array_equal(interleaved.grad_hidden_states, half.grad_hidden_states)
    assert np.array_equal(interleaved.grad_q_weight, moved_rows(half.grad_q_weight))
    assert np.array_equal(interleaved.grad_k_weight, moved_rows(half.grad_k_weight))


def test_a_half_table_is_a_full_one_with_equal_columns_and_collects_both_gradients():
    half = {name: CASE.inputs[name][..., : WIDTH // 2] for name in ("cos", "sin")}
    for pairing in ("half", "interleaved"):
        full = {n: np.tile(x, 2) if pairing == "half" else np.repeat(x, 2, axis=-1) for n, x in half.items()}
        narrow = rg.rope_backward(*(CASE.inputs | half).values(), pairing=pairing, table="half")
        wide = rg.rope_backward(*(CASE.inputs | full).values(), pairing=pairing)
        assert np.array_equal(narrow.grad_q, wide.grad_q)
        first, second = (
            (wide.grad_cos[..., : WIDTH // 2], wide.grad_cos[..., WIDTH // 2 :])
            if pairing == "half"
            else (wide.grad_cos[..., 0::2], wide.grad_cos[..., 1::2])
        )
        assert np.array_equal(narrow.grad_cos, first + second)


def test_the_table_form_is_never_guessed():
    """A table of 8 columns fits a head of 16 either way; the word decides, and the results differ."""
    table = {name: CASE.inputs[name][..., :8] for name in ("cos", "sin")}
    full = rg.rope_backward(*(CASE.inputs | table).values())
    half = rg.rope_backward(*(CASE.inputs | table).values(), table="half")
    assert full.grad_cos.shape == half.grad_cos.shape
    assert not np.array_equal(full.grad_q, half.grad_q)
    assert np.array_equal(full.grad_q[..., 8:], CASE.inputs["grad_q_embed"][..., 8:])


def test_a_layout_only_says_where_the_axes_are():
    right = run_backend(CASE, "numpy_tiled")
    for layout, order in {"bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3)}.items():
        inputs = [x if name in ("cos", "sin") else x.transpose(order) for name, x in CASE.inputs.items()]
        grads = rg.rope_backward(*inputs, layout=layout)
        assert np.array_equal(grads.grad_q, right["grad_q"].transpose(order))
        assert np.array_equal(grads.grad_k, right["grad_k"].transpose(order))
        assert np.array_equal(grads.grad_cos, right["grad_cos"])
        assert np.array_equal(grads.grad_sin, right["grad_sin"])


def test_q_and_k_of_different_heads_keep_their_own_strides():
    """q out of a fused buffer, k dense: one's stride must not serve the other."""
    buffer = np.zeros((2, 5, 4 + 2 + 2, 16), np.float32)
    q = buffer[:, :, :4].transpose(0, 2, 1, 3)
    q[...] = CASE.inputs["q"]
    grads = rg.rope_backward(*(CASE.inputs | {"q": q}).values())
    for name, right in run_backend(CASE, "numpy_tiled").items():
        assert np.array_equal(getattr(grads, name), right)


def test_accumulating_bfloat16_sums_does_not_stall(backend):
    """1,024 contributions of one: a bfloat16 accumulator stops growing at 256."""
    import ml_dtypes

    ones = np.ones((1, 1024, 1, 2), ml_dtypes.bfloat16)
    table = np.ones((1, 2), ml_dtypes.bfloat16)
    grads = rg.rope_backward(ones, None, ones, None, table, table, backend=backend)
    assert (grads.grad_cos.astype(np.float32) == 1024).all()


def test_gradients_of_v_alone_need_no_table(backend):
    """README: inputs that only other gradients read may be None."""
    rng = np.random.default_rng(3)
    grad_value = rng.standard_normal((2, 2, 8, 16)).astype(np.float32)
    hidden = rng.standard_normal((2, 8, 12)).astype(np.float32)
    absent = [None] * 5
    grads = rg.qkv_rope_backward(
        None, None, grad_value, hidden, *absent, needs=("v_weight",), backend=backend
    )
    rows = grad_value.transpose(0, 2, 1, 3).reshape(16, 32).astype(np.float64)
    exact = rows.T @ hidden.reshape(16, 12)
    size = np.abs(rows.T) @ np.abs(hidden.reshape(16, 12))
    assert (np.abs(grads.grad_v_weight - exact) <= 17 * 2.0**-24 * size).all()
