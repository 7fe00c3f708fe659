"""The README's CuPy pipeline does in a graph, bit for bit, what it does without one."""

import pathlib
import re

import numpy as np
from conftest import need, skip

from ropegrad.backends.cupy_plain import no_gpu

README = pathlib.Path(__file__).resolve().parent.parent / "README.md"


def blocks():
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.S)


def test_the_blocks_of_the_readme_are_python():
    assert len(blocks()) >= 3
    for text in blocks():
        compile(text, "README.md", "exec")


def test_pipeline():
    need("cupy", "cuda13")
    if no_gpu() is not None:
        skip(no_gpu(), required=False)
    captured, plain = {}, {}
    (block,) = (text for text in blocks() if "cupy" in text)
    exec(block, captured)
    again = block.replace("    stream.begin_capture()\n    step()\n", "")
    again = again.replace("stream.end_capture()", "None").replace("graph.launch(stream)", "step()")
    assert "capture" not in again
    exec(again, plain)
    for one, other in zip(captured["weights"], plain["weights"], strict=True):
        assert np.array_equal(one.get(), other.get())
    start = {}
    exec(block.split("pool =")[0], start)  # all but the steps
    assert loss(captured) < 0.95 * loss(start)


def loss(names):
    arrays = [names["hidden"], *names["weights"], names["cos"], names["sin"]]
    return float((names["rg"].qkv_rope(*arrays, head_dim=64).query ** 2).mean())
