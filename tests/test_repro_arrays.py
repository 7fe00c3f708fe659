"""Scripts that show a fault of a target with PyTorch's or CuPy's arrays: wrong with it, right without."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import need
from test_cli import run

from ropegrad.verify.recipe import Recipe
from ropegrad.verify.repro import script
from ropegrad.verify.ruling import Fault
from ropegrad.verify.target import Contract

FILE = Path(__file__).parent / "torch_kernels.py"
BF16 = ("--dtype", "bfloat16")


def run_script(file, *paths):
    code = f"import sys, runpy; sys.path[:0] = {list(map(str, paths))!r}\n"
    code += f"runpy.run_path({str(file)!r}, None, '__main__')"
    return subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("name", "fixed", "options", "words"),
    [
        ("wrong_sine", "backward", (), "grad_sin["),
        ("wrong_sine", "backward", BF16, "grad_sin["),
        ("overwrites", "backward", (), "grad_q_embed was changed"),
        ("numpy_results", "backward", (), "is a numpy.ndarray, not an array of torch"),
        ("two_buffers_in_turn", "backward", (), "is in the memory of an earlier call's grad_q"),
        ("static_buffer", "rope", ("--of", "forward"), "grad_q of an earlier call was changed"),
        ("one_more", "backward", (), "the result has 5 values, not 4"),
        ("into_too_much", "into", ("--dps",), "memory beside grad_sin was written"),
        ("own_sine", "rope", ("--of", "forward"), "grad_q["),
        ("wrong_values", "rope", ("--of", "forward"), "q_embed["),
    ],
)
def test_a_script_for_pytorch(name, fixed, options, words, monkeypatch, capsys, tmp_path):
    need("torch", "interop")
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "repro.py"
    arguments = ("--arrays", "torch", "--empty", "no", "--repro", str(file), *options)
    assert run("verify", f"{FILE}:{name}", *arguments, monkeypatch=monkeypatch) == 1
    assert "shown again by" in capsys.readouterr().out
    again = run_script(file)
    assert again.returncode == 1, again.stderr
    assert words in again.stdout
    file.write_text(file.read_text().replace(f"torch_kernels.py:{name}'", f"torch_kernels.py:{fixed}'"))
    again = run_script(file)
    assert (again.returncode, again.stdout) == (0, "right\n"), again.stdout + again.stderr


# CuPy's arrays without a GPU: as many of their ways as the script has to do with.
FAKE = """
import numpy as np
class Pointer:
    def __init__(self, owner, ptr): self.owner, self.ptr = owner, ptr
    def __add__(self, n): return Pointer(self.owner, self.ptr + n)
class Array:
    def __init__(self, shape, dtype, memptr, strides):
        owner = memptr.owner
        first = memptr.ptr - owner.__array_interface__["data"][0]
        self.host, self.data = np.ndarray(shape, dtype, owner.data, first, strides), memptr
        self.dtype, self.shape, self.nbytes = self.host.dtype, self.host.shape, self.host.nbytes
    def get(self): return self.host.copy()
Array.__module__ = "cupy"
ndarray = Array
def asarray(x):
    x = np.ascontiguousarray(x)
    x = x.copy()
    return Array(x.shape, x.dtype, Pointer(x.reshape(-1).view(np.uint8), x.ctypes.data), x.strides)
"""
TARGET = """
import cupy
from kernels import rope_backward
def right(*arrays): return [cupy.asarray(x) for x in rope_backward(*(x.host for x in arrays))]
def wrong(*arrays): return [cupy.asarray(2 * x) for x in rope_backward(*(x.host for x in arrays))]
def changes(*arrays):
    grads = right(*arrays)
    arrays[2].host[...] = 0
    return grads
def into(*arrays):
    for out, x in zip(arrays[6:], right(*arrays[:6]), strict=True): out.host[...] = x.host
def short(*arrays):
    into(*arrays)
    arrays[6].host[..., -1:] = -1975
"""


@pytest.mark.parametrize("memory", ["contiguous", "sliced", "expanded"])
@pytest.mark.parametrize(
    ("name", "words"),
    [("right", ""), ("into", ""), ("wrong", "grad_q["), ("changes", "q was changed"), ("short", "grad_q[")],
)
def test_a_script_for_cupy(name, words, memory, tmp_path):
    (tmp_path / "cupy.py").write_text(FAKE)
    (tmp_path / "kernels_on_gpu.py").write_text(TARGET)
    contract = Contract(arrays="cupy", device="cuda", dps=name in ("into", "short"))
    spec = contract.spec(batch=2, heads=4, kv_heads=2, seq=5, head_dim=8, rotary_dim=8)
    recipe = Recipe(spec, 7, memory=memory)
    target = f"{tmp_path / 'kernels_on_gpu.py'}:{name}"
    text = script(target, contract, [recipe.case(), recipe.case(other=1)], Fault("wrong value", "", ""), 60)
    (tmp_path / "repro.py").write_text(text)
    again = run_script(tmp_path / "repro.py", tmp_path, FILE.parent)
    assert again.returncode == bool(words), again.stdout + again.stderr
    assert words in again.stdout
