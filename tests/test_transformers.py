"""Forward, backward and tables against the code of three model families in the package transformers.

Upstream gradients, q and k are small whole numbers: products with float32 tables are exact in float64, so
every result has one rounding and must be theirs to the bit.
"""

import math

import numpy as np
import pytest
from conftest import need

import ropegrad as rg

torch = need("torch", "interop")
need("transformers", "interop")
U = 2.0**-24
HEADS, KV_HEADS, HEAD_DIM, SEQ, BATCH = 8, 2, 16, 12, 2


def llama():
    """Half pairing, full tables, the whole head."""
    model = need("transformers.models.llama.modeling_llama", "interop")
    config = need("transformers", "interop").LlamaConfig(
        hidden_size=HEADS * HEAD_DIM, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS
    )

    def tables(positions):
        return model.LlamaRotaryEmbedding(config)(torch.ones(1), positions)

    words = {"layout": "bhsd", "pairing": "half", "table": "full"}
    return tables, model.apply_rotary_pos_emb, words, HEAD_DIM


def gpt_neox():
    """Half pairing, full tables, the first quarter of the head."""
    model = need("transformers.models.gpt_neox.modeling_gpt_neox", "interop")
    config = need("transformers", "interop").GPTNeoXConfig(
        hidden_size=HEADS * HEAD_DIM, num_attention_heads=HEADS, rotary_pct=0.25
    )

    def tables(positions):
        return model.GPTNeoXRotaryEmbedding(config)(torch.ones(1), positions)

    words = {"layout": "bhsd", "pairing": "half", "table": "full"}
    return tables, model.apply_rotary_pos_emb, words, HEAD_DIM // 4


def gptj():
    """Interleaved pairing, half tables, the first half of the head, tokens before heads."""
    model = need("transformers.models.gptj.modeling_gptj", "interop")
    width = HEAD_DIM // 2

    def tables(positions):
        sin, cos = model.create_sinusoidal_positions(int(positions.max()) + 1, width)[positions].chunk(2, -1)
        return cos, sin

    def rotate(q, k, cos, sin):
        rotated = (model.apply_rotary_pos_emb(x[..., :width], sin, cos) for x in (q, k))
        return [torch.cat((y, x[..., width:]), dim=-1) for y, x in zip(rotated, (q, k), strict=True)]

    return tables, rotate, {"layout": "bshd", "pairing": "interleaved", "table": "half"}, width


MODELS = [llama, gpt_neox, gptj]


def whole(generator, *shape):
    return torch.randint(-9, 10, shape, generator=generator).double()


@pytest.mark.parametrize("own_tables", [True, False], ids=["their tables", "whole-number tables"])
@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_those_of_the_model_code(model, own_tables):
    tables, rotate, words, _ = model()
    generator = torch.Generator().manual_seed(8)
    positions = torch.stack((torch.arange(SEQ), torch.arange(SEQ) + 300))
    cos, sin = (table.double() for table in tables(positions))
    if not own_tables:  # the two columns of a pair differ
        cos, sin = (whole(generator, *table.shape) for table in (cos, sin))
    order = (0, 1, 2) if words["layout"] == "bhsd" else (0, 2, 1)
    heads = ([(BATCH, h, SEQ)[axis] for axis in order] + [HEAD_DIM] for h in 2 * (HEADS, KV_HEADS))
    q, k, grad_q_embed, grad_k_embed = (whole(generator, *shape) for shape in heads)

    inputs = [x.requires_grad_() for x in (q, k, cos, sin)]
    outputs = rotate(*inputs)
    expected = torch.autograd.grad(outputs, inputs, (grad_q_embed, grad_k_embed))
    arrays = [x.detach() for x in (grad_q_embed, grad_k_embed, *inputs)]
    for got, right in zip(rg.rope_backward(*arrays, **words), expected, strict=True):
        assert torch.equal(got, right)
    for got, right in zip(rg.rope(*arrays[2:], **words), outputs, strict=True):
        assert torch.equal(got, right)
    as_numpy = [x.numpy() for x in arrays]
    for got, right in zip(rg.rope_backward(*as_numpy, **words), expected, strict=True):
        assert np.array_equal(got, right.numpy())


@pytest.mark.parametrize("model", MODELS)
def test_tables_are_those_of_the_model_code(model):
    """They compute angles in float32, so that their error grows with the position; ours does not."""
    tables, _, words, width = model()
    positions = torch.arange(100)[None]
    ours = rg.rope_tables(positions, width, pairing=words["pairing"], table=words["table"])
    for got, theirs in zip(ours, tables(positions), strict=True):
        assert (got.shape, got.dtype) == (theirs.shape, theirs.dtype)
        assert np.all(np.abs((got - theirs).numpy()) <= bound(positions[0].numpy(), width, words["table"]))


def bound(positions, width, table, base=10_000.0):
    """θ's relative error: the exponent's rounding times ln base, a power (2 units), a division, a product;
    then 2 units of cos or sin (|.| ≤ 1) and one to round ours."""
    exponent = 2 * np.arange(width // 2) / width
    theta = positions[:, None] * base**-exponent
    error = theta * (exponent * math.log(base) + 4) * U + 3 * U
    return 1.001 * (np.tile(error, 2) if table == "full" else error)  # what is second order
