"""From a case to a public call in any namespace, and back to NumPy."""

from __future__ import annotations

import ctypes
import importlib
import sys
from typing import Any

import ml_dtypes
import numpy as np

from ropegrad import api
from ropegrad.arrays import Array
from ropegrad.outputs import QkvBiasGrads, QkvGrads, RopeGrads
from ropegrad.spec import QKV_BIASES, QkvSpec, RopeSpec
from ropegrad.verify.case import Case, NumpyArray

MODULES = {
    "numpy": "numpy",
    "torch": "torch",
    "jax": "jax",
    "dask": "dask.array",
    "array_api_strict": "array_api_strict",
}


def run_backend(
    case: Case, backend: str | None = None, namespace: str = "numpy", *, into: bool = False
) -> dict[str, NumpyArray]:
    """The gradients that the public function gives for this case, as NumPy arrays by name.

    `into` asks for them through `out=`, poisoned with NaN; so does a case that accumulates.
    Raises SpecError where the backend cannot run it.
    """
    spec = case.spec
    arrays = [None if x is None else to_namespace(x, namespace) for x in case.inputs.values()]
    fields = _fields(spec)
    out = None
    if into or spec.accumulate:
        held = case.prior or {
            f"grad_{need}": np.full(shape, np.nan, _numpy_dtype(dtype))
            for need in spec.needs
            for shape, dtype in [spec.output(need)]
        }
        out = tuple(to_namespace(held[n].copy(), namespace) if n in held else None for n in fields)
    operation = api.rope_backward if isinstance(spec, RopeSpec) else api.qkv_rope_backward
    results = operation(*arrays, **options(spec), out=out, backend=backend)
    return {name: to_numpy(getattr(results, name)) for name in case.outputs}


def options(spec: RopeSpec | QkvSpec) -> dict[str, Any]:
    """The keyword options of the public call that this spec describes."""
    geometry = spec if isinstance(spec, RopeSpec) else spec.rope
    words: dict[str, Any] = {
        "needs": spec.needs, "accumulate": geometry.accumulate,
        "table": geometry.table, "layout": geometry.layout, "pairing": geometry.pairing,
    }  # fmt: skip
    if isinstance(spec, RopeSpec):
        return words | {"adjoint": spec.adjoint}
    return words | {"precision": spec.precision}


def _fields(spec: RopeSpec | QkvSpec) -> tuple[str, ...]:
    if isinstance(spec, RopeSpec):
        return RopeGrads._fields
    return QkvBiasGrads._fields if set(QKV_BIASES) & set(spec.needs) else QkvGrads._fields


def _numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def to_namespace(x: NumpyArray, namespace: str) -> Array:
    """A NumPy array as one of `namespace` on the CPU, with the same strides where the namespace has them."""
    if namespace == "numpy":
        return x
    if namespace == "torch":
        return _to_torch(x)
    if namespace == "cupy":
        return _to_cupy(x)
    module = importlib.import_module(MODULES[namespace] if namespace != "jax" else "jax.numpy")
    if namespace == "dask":
        return module.from_array(x, chunks=tuple(max(1, -(-size // 2)) for size in x.shape))
    return module.asarray(x)


def _to_cupy(x: NumpyArray) -> Array:
    """A copy on the device with the same strides, gaps and overlaps; aligned, as GPUs must have it."""
    cupy = importlib.import_module("cupy")
    item = x.dtype.itemsize
    if not x.size or any(step % item for step in x.strides):
        return cupy.asarray(np.ascontiguousarray(x))
    low = sum(step * (size - 1) for step, size in zip(x.strides, x.shape, strict=True) if step < 0)
    span = sum(abs(step) * (size - 1) for step, size in zip(x.strides, x.shape, strict=True)) + item
    first = x.__array_interface__["data"][0] + low
    raw = np.ctypeslib.as_array((ctypes.c_uint8 * span).from_address(first)).copy()
    memory = cupy.asarray(raw).data
    return cupy.ndarray(x.shape, x.dtype, memory + -low, x.strides)


def _to_torch(x: NumpyArray) -> Array:
    torch = importlib.import_module("torch")
    if x.dtype.itemsize and any(step < 0 or step % x.dtype.itemsize for step in x.strides):
        x = x.copy()  # PyTorch has no such strides
    if x.dtype == np.dtype(ml_dtypes.bfloat16):
        return torch.from_numpy(np.asarray(_Writable(x.view(np.int16)))).view(torch.bfloat16)
    return torch.from_numpy(np.asarray(_Writable(x)))


class _Writable:
    """The memory of a read-only array: PyTorch has no read-only tensors and warns of them."""

    def __init__(self, x: NumpyArray) -> None:
        interface = dict(x.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__, self.owner = interface, x


def to_numpy(x: Array) -> NumpyArray:
    """Any CPU array as NumPy; computes what is lazy."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        x = x.detach().cpu().resolve_conj().resolve_neg()  # views that are negated when they are read
        if x.dtype == torch.bfloat16:
            x = x.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        else:
            x = x.numpy()
    if hasattr(x, "compute"):
        x = x.compute()
    if hasattr(x, "get"):
        x = x.get()
    return np.asarray(x)
