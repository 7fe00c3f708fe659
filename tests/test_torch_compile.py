"""RoPE inside torch.compile: one graph, no break, the same bits; warnings of NumPy stay off outside it."""

import warnings

import numpy as np
import pytest
from conftest import need

import ropegrad as rg

torch = need("torch", "interop")

pytestmark = pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")


@pytest.fixture
def whole():
    """Compiles without code generation; a break of the graph is an error."""
    torch._dynamo.reset()
    yield lambda function: torch.compile(function, fullgraph=True, backend="eager")
    torch._dynamo.reset()


def problem(layout="bhsd", width=16):
    shape = {"bhsd": (2, 4, 8, 16), "bshd": (2, 8, 4, 16), "sbhd": (8, 2, 4, 16)}[layout]
    return [torch.randn(shape) for _ in range(4)], [torch.randn(8, width) for _ in range(2)]


@pytest.mark.parametrize(
    "words",
    [
        {},
        {"layout": "sbhd", "pairing": "interleaved", "needs": ("q", "cos")},
        {"layout": "bshd", "table": "half"},
    ],
)
def test_gradients_are_one_graph(whole, words):
    heads, tables = problem(words.get("layout", "bhsd"), 8 if "table" in words else 16)
    compiled = whole(lambda *arrays: rg.rope_backward(*arrays, **words))
    right = rg.rope_backward(*heads, *tables, **words)
    for got, want in zip(compiled(*heads, *tables), right, strict=True):
        assert (got is None) == (want is None)
        assert want is None or torch.equal(got, want)


def test_the_forward_and_its_tables_are_one_graph(whole):
    (q, k, _, _), _ = problem()

    def rotated(q, k, positions):
        return rg.rope(q, k, *rg.rope_tables(positions, 16))

    positions = torch.arange(8)
    for got, want in zip(whole(rotated)(q, k, positions), rotated(q, k, positions), strict=True):
        assert torch.equal(got, want)


def test_numpy_is_silent_about_what_is_ieee():
    big = np.full((1, 2, 4, 8), 3e38, np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rg.rope_backward(big, big, big, big, big[0, 0], big[0, 0], backend="portable")
