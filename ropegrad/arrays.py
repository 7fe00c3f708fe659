"""What the library asks of one array: which namespace, device, dtype and memory it has.

Everything here works without importing a framework that the caller has not imported already.
"""

from __future__ import annotations

import math
import sys
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import array_api_compat
import array_api_compat.numpy as numpy_namespace
import ml_dtypes
import numpy as np

from ropegrad.errors import SpecError

Array = Any  # an array of any namespace: NumPy, CuPy, PyTorch, JAX, Dask, array-api-strict

DTYPES = ("float16", "bfloat16", "float32", "float64")
_NUMPY_DTYPES = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in DTYPES}
_NUMPY_NAMES = {dtype: name for name, dtype in _NUMPY_DTYPES.items()}
_WIDTH = {"float16": 16, "bfloat16": 16, "float32": 32, "float64": 64}
TRACED = "traced"  # the device of an array in jax.jit, jax.grad or jax.vmap: it goes with any
LAZY_OR_FROZEN = {"jax": "JAX arrays cannot be written", "dask": "Dask arrays are lazy and cannot be written"}


class Facts(NamedTuple):
    """The part of an array that a spec is judged by."""

    namespace: str
    device: str
    dtype: str
    shape: tuple[int, ...]


def facts(name: str, array: Array) -> Facts:
    """Namespace, device, dtype and shape of the argument called `name`; SpecError if it is no array."""
    if type(array) is np.ndarray:
        dtype = _NUMPY_NAMES.get(array.dtype)
        return Facts("numpy", "cpu", dtype or _bad_dtype(name, array.dtype), array.shape)
    cupy = sys.modules.get("cupy")
    if cupy is not None and type(array) is cupy.ndarray:  # as below, in a tenth of the time
        dtype = _NUMPY_NAMES.get(array.dtype)
        where = f"<cuda device {array.data.device_id}>"
        return Facts("cupy", where, dtype or _bad_dtype(name, array.dtype), array.shape)
    namespace = namespace_name(name, array)
    dtype = str(array.dtype).rpartition(".")[2]
    if dtype not in DTYPES:
        _bad_dtype(name, array.dtype)
    shape = tuple(array.shape)
    if any(size is None or size != size for size in shape):
        raise SpecError(f"{name} has an unknown size in its shape {shape}: compute its chunk sizes first")
    return Facts(namespace, _device(array), dtype, tuple(int(size) for size in shape))


def _bad_dtype(name: str, dtype: object) -> str:
    remedy = "convert it first"
    if "complex" in str(dtype):
        tables = name.removeprefix("out's grad_") in ("cos", "sin")
        remedy = (
            "pass the real tables cos and sin" if tables else "view it as real pairs, pairing='interleaved'"
        )
    raise SpecError(f"{name} has dtype {dtype}: it must be one of {', '.join(DTYPES)}; {remedy}")


def namespace_name(name: str, array: Array) -> str:
    """Namespace of the argument called `name`; SpecError if it is no dense array."""
    if type(array) is np.ndarray:
        return "numpy"
    if isinstance(array, np.ndarray) and not isinstance(array, np.memmap):
        raise SpecError(f"{name} is a {type(array).__name__}: pass the plain array, numpy.asarray({name})")
    if isinstance(array, np.generic) or not array_api_compat.is_array_api_obj(array):
        kind = type(array).__name__
        raise SpecError(
            f"{name} is a {kind}, not an array: pass an array of NumPy, CuPy, PyTorch, JAX or Dask"
        )
    if hasattr(array, "data_ptr") and str(array.layout) != "torch.strided":
        raise SpecError(f"{name} has layout {array.layout}: pass a dense tensor, {name}.to_dense()")
    module = str(array_api_compat.array_namespace(array).__name__)
    return module.removeprefix("array_api_compat.").partition(".")[0]


def _device(array: Array) -> str:
    try:
        device = array_api_compat.device(array)
    except Exception:  # a tracer of jax.jit has no device; the compiled program will
        return TRACED
    if device is None or type(device).__name__.endswith("Sharding"):  # spread over devices: JAX sees to it
        return TRACED
    return str(device).lower()


def namespace(array: Array) -> ModuleType:
    """The array-API namespace of `array`."""
    if type(array) is np.ndarray:
        return numpy_namespace
    return array_api_compat.array_namespace(array)


def dtype_in(xp: ModuleType, name: str) -> Any:
    """The dtype called `name` in namespace xp."""
    if xp.__name__ in ("array_api_compat.numpy", "array_api_compat.cupy", "array_api_compat.dask.array"):
        return _NUMPY_DTYPES[name]
    try:
        return getattr(xp, name)
    except AttributeError:
        raise SpecError(f"{xp.__name__} has no dtype {name}: choose another") from None


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype called `name`; bfloat16 is ml_dtypes'."""
    return _NUMPY_DTYPES[name]


@cache
def dtype_name(dtype: np.dtype[Any]) -> str:
    """str(dtype), which NumPy makes anew each time."""
    return str(dtype)


def compute_dtype(*names: str) -> str:
    """The dtype of products and sums: the widest of float32 and the dtypes given."""
    return "float64" if any(_WIDTH[name] > 32 for name in names) else "float32"


class _Address:
    """Looks like an array to NumPy, so that its overlap solver can judge memory that it never reads."""

    def __init__(self, pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> None:
        self.__array_interface__ = {
            "version": 3, "typestr": f"|V{itemsize}",
            "data": (pointer, False), "shape": shape, "strides": strides,
        }  # fmt: skip


def memory(array: Array) -> np.ndarray[Any, Any]:
    """A NumPy array over the same addresses, for overlap tests only: device memory must not be read."""
    if isinstance(array, np.ndarray):
        return array
    if hasattr(array, "data_ptr"):  # PyTorch counts strides in elements
        item = array.element_size()
        strides = tuple(step * item for step in array.stride())
        return np.asarray(_Address(array.data_ptr(), tuple(array.shape), strides, item))
    if hasattr(array, "__cuda_array_interface__"):
        strides = tuple(array.strides)
        return np.asarray(_Address(array.data.ptr, array.shape, strides, array.dtype.itemsize))
    shared: np.ndarray[Any, Any] = np.from_dlpack(array)
    return shared


def overlap(a: Array, b: Array) -> bool:
    """Whether two arrays share any byte; True too where finding out would take too long."""
    first, second = memory(a), memory(b)
    if not np.may_share_memory(first, second):
        return False
    try:
        return bool(np.shares_memory(first, second, max_work=100_000))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def same_memory(a: Array, b: Array) -> bool:
    """Whether two arrays are the same elements at the same addresses."""
    first, second = memory(a), memory(b)
    return (
        first.__array_interface__["data"][0] == second.__array_interface__["data"][0]
        and first.shape == second.shape
        and _steps(first) == _steps(second)
        and first.itemsize == second.itemsize
    )


def _steps(view: np.ndarray[Any, Any]) -> list[int]:
    """Strides along axes of more than one element: the others lead nowhere."""
    return [step for step, size in zip(view.strides, view.shape, strict=True) if size > 1]


def overlaps_itself(array: Array) -> bool:
    """Whether two elements of one array share an address (a broadcast or expanded view, say)."""
    view = memory(array)
    if view.size == 0:
        return False
    steps = sorted((abs(step), size) for step, size in zip(view.strides, view.shape, strict=True) if size > 1)
    reach = view.itemsize
    for step, size in steps:
        if step < reach:
            return True
        reach += step * (size - 1)
    return False


def nbytes(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of a dense array."""
    return math.prod(shape) * _WIDTH[dtype] // 8
