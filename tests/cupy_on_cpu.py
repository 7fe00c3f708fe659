"""The CuPy backend on NumPy arrays: its own Python, CuPy's generated CUDA C++ on the CPU, cuBLAS in NumPy.

Only what needs a device is replaced: the launch, the allocation, the product. The text of a kernel is what
CuPy would compile, headers included; which array is contiguous, and whether offsets have 32 bits, is chosen
here as CuPy would choose it or more narrowly.
"""

import contextlib
import ctypes
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import array_api_compat.numpy
import numpy as np
import offline_compile as offline
import shim

from ropegrad.backends import cublas, cupy_plain
from ropegrad.verify import runners
from ropegrad.verify.case import Case, NumpyArray

THREADS = 128  # of a block of CuPy's elementwise kernels
MOST_BLOCKS = 3  # fewer than CuPy's, so that threads have several turns
REDUCES = {"rotation": False, "combined": False, "table_sums": True, "summed": True}
INPUTS = {"table_sums": 4, "summed": 1}  # of a reduction; what else it is given, it writes


@dataclass(frozen=True)
class Launching:
    """How kernels are launched: a layout of offline.LAYOUTS, the order of threads, a fault in the text.

    Arrays that are not contiguous are `strided` where `contiguous` is asked for. Kernels are there for inputs
    and tables of these dtypes. The fault is text and what stands in its place.
    """

    layout: str = "strided"
    order: int = 0
    dtypes: tuple[str, ...] = ("float32",)
    fault: tuple[str, str] | None = None


def run(case: Case, launching: Launching, *, into: bool = False) -> dict[str, NumpyArray]:
    """The gradients that `cupy_plain` gives for this case: a function for `check`."""
    with on_cpu(launching):
        return runners.run_backend(case, "cupy_plain", into=into)


@contextlib.contextmanager
def on_cpu(launching: Launching) -> Iterator[None]:
    """The backend without a device."""
    import cupy.cuda.device

    for layout in {launching.layout, "strided"}:
        program(layout, launching.dtypes, launching.fault)  # while the makers are CuPy's
    product = cupy_plain._gemm
    makers = {maker: functools.partial(_stand_in, launching, maker) for maker in REDUCES}
    with (
        mock.patch.multiple(
            cupy_plain,
            _cupy=lambda: _ALLOCATOR,
            _device_of=lambda inputs: contextlib.nullcontext(),
            _xp=lambda: array_api_compat.numpy,
            _gemm=lambda a, b: product(a.view(_OnDevice), b.view(_OnDevice)),
            **makers,
        ),  # fmt: skip
        mock.patch.object(cupy_plain.CupyPlain, "why_not", return_value=None),
        mock.patch.object(runners, "to_namespace", lambda x, namespace: shim.apart(x)),
        mock.patch.object(cublas, "_library", return_value=_LIBRARY),
        mock.patch.object(cupy, "ascontiguousarray", lambda x: np.ascontiguousarray(x).view(_OnDevice)),
        mock.patch.object(cupy.cuda, "get_current_stream", return_value=SimpleNamespace(ptr=0)),
        mock.patch.object(cupy.cuda.device, "get_cublas_handle", return_value=0),
    ):
        yield


# ---- kernels -------------------------------------------------------------------------------------------


def _stand_in(launching: Launching, maker: str, *arguments: Any) -> Callable[..., Any]:
    def kernel(*arrays: NumpyArray, axis: Any = None) -> NumpyArray | None:
        if not REDUCES[maker]:
            _elementwise(launching, offline.Wanted(maker, arguments, tuple(x.dtype for x in arrays)), arrays)
            return None
        return _reduction(launching, maker, arguments, arrays, axis)

    return kernel


def _elementwise(launching: Launching, wanted: offline.Wanted, arrays: tuple[NumpyArray, ...]) -> None:
    shape = np.broadcast_shapes(*(x.shape for x in arrays))
    assert arrays[-1].shape == shape, "CuPy does not broadcast what is written"
    arrays = tuple(np.broadcast_to(x, shape) if x.shape != shape else x for x in arrays)
    if not arrays[-1].size:
        return
    flat = all(x.flags.c_contiguous for x in arrays)
    kernel, axes = _kernel(launching, wanted, flat)
    blocks = min(-(-arrays[-1].size // THREADS), MOST_BLOCKS)
    arguments = [_carray(x, axes) for x in arrays] + [_indexer(shape, axes)]
    kernel((blocks,), (THREADS,), arguments, arrays=arrays, order=launching.order)


def _reduction(
    launching: Launching, maker: str, arguments: tuple[Any, ...], arrays: tuple[NumpyArray, ...], axis: Any
) -> NumpyArray:
    """Reduced axes come first, then those that stay, as CuPy permutes them; one thread adds every k-th."""
    from cupy._core import _reduction as cupys

    arrays, results = arrays[: INPUTS[maker]], arrays[INPUTS[maker] :]
    shape = np.broadcast_shapes(*(x.shape for x in arrays))
    over = (axis,) if isinstance(axis, int) else tuple(axis)
    stay = tuple(i for i in range(len(shape)) if i not in over)
    results = results or (shim.empty(tuple(shape[i] for i in stay), arguments[0]),)
    assert all(x.shape == tuple(shape[i] for i in stay) for x in results)
    if 0 in shape:
        for x in results:
            x[...] = 0  # the identity: nothing is added
        return results[0]
    views = [np.broadcast_to(x, shape).transpose(over + stay) for x in arrays]
    wanted = offline.Wanted(maker, arguments, tuple(x.dtype for x in (*arrays, *results)))
    flat = all(x.flags.c_contiguous for x in (*views, *results))
    kernel, axes = _kernel(launching, wanted, flat)
    kept = offline.kept_axes(axes, len(results))
    run = min(shape[-1], 32) if shape[-1] else 1
    size = views[0].size
    block, stride, blocks = cupys._get_block_specs(size, results[0].size, run, -1)
    given = [
        *(_carray(x, axes) for x in views), *(_carray(x, kept) for x in results),
        _indexer(views[0].shape, axes), _indexer(results[0].shape, kept), np.int32(stride),
    ]  # fmt: skip
    used = [*views, *results]
    kernel((min(blocks, MOST_BLOCKS),), (block,), given, arrays=used, order=launching.order)
    return results[0]


def _carray(x: NumpyArray, axes: int) -> bytes:
    """CuPy's CArray: address, size, shape, strides in bytes; leading axes of one element fill it up."""
    address = x.__array_interface__["data"][0]
    if axes == 1:
        return np.array((address, x.size, x.size, x.itemsize), np.uint64).tobytes()
    spare = axes - x.ndim
    words = [address, x.size, *(1,) * spare, *x.shape, *(0,) * spare, *x.strides]
    return np.array(words[:1], np.uint64).tobytes() + np.array(words[1:], np.int64).tobytes()


def _indexer(shape: tuple[int, ...], axes: int) -> bytes:
    """CuPy's CIndexer: size, shape, and room for an index."""
    size = int(np.prod(shape))
    full = (size,) if axes == 1 else (1,) * (axes - len(shape)) + shape
    return np.array((size, *full, *(-1,) * axes), np.int64).tobytes()


def _kernel(launching: Launching, wanted: offline.Wanted, flat: bool) -> tuple[shim.Kernel, int]:
    layout = launching.layout if flat or launching.layout != "contiguous" else "strided"
    return program(layout, launching.dtypes, launching.fault)[wanted], offline.LAYOUTS[layout][0]


@functools.cache
def program(
    layout: str, dtypes: tuple[str, ...], fault: tuple[str, str] | None
) -> dict[offline.Wanted, shim.Kernel]:
    """Every kernel that the backend asks for where inputs and tables have these dtypes, as one program."""
    import cupy

    kernels = [
        wanted for wanted in offline.wanted() if {str(dtype) for dtype in wanted.dtypes} <= set(dtypes)
    ]
    parts = [f"#include <cupy/{header}.cuh>\n" for header in ("carray", "float16", "bfloat16")]
    for i, wanted in enumerate(kernels):
        text = re.sub(r"^\s*#include .*$", "", offline.source(wanted, layout), flags=re.MULTILINE)
        text = re.sub(r'extern "C" __global__ void \w+\(', "__global__ void kernel(", text)
        undone = "".join(f"#undef {name}\n" for name in re.findall(r"#define (\w+)", text))
        parts.append(f"namespace n{i} {{\n{text}\n}}\n{undone}")
    whole = "".join(parts)
    if fault is not None:
        assert fault[0] in whole
        whole = whole.replace(*fault)
    include = f"-I{Path(cupy.__file__).parent / '_core' / 'include'}"
    names = [f"n{i}::kernel" for i in range(len(kernels))]
    module = shim.RawModule(code=whole, options=(include,), name_expressions=names)
    return {wanted: module.get_function(name) for wanted, name in zip(kernels, names, strict=True)}


# ---- memory and products -------------------------------------------------------------------------------


class _OnDevice(np.ndarray):
    """An array whose address is asked for as CuPy's is."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.__array_interface__["data"][0])


_ALLOCATOR = SimpleNamespace(
    empty=lambda shape, dtype: shim.empty(shape, dtype).view(_OnDevice), concatenate=np.concatenate
)


def _gemm_ex(
    handle: ctypes.c_void_p, transpose_a: int, transpose_b: int,
    m: ctypes.c_int64, n: ctypes.c_int64, k: ctypes.c_int64,
    alpha: Any, a: ctypes.c_void_p, a_type: int, lda: ctypes.c_int64,
    b: ctypes.c_void_p, b_type: int, ldb: ctypes.c_int64,
    beta: Any, c: ctypes.c_void_p, c_type: int, ldc: ctypes.c_int64, compute: int, algorithm: int,
) -> int:  # fmt: skip
    """C = op(A)·op(B) of column-major matrices at these addresses, as cuBLAS has it."""
    kind = {0: ctypes.c_float, 1: ctypes.c_double}[a_type]
    assert compute == {0: cublas.PEDANTIC_32F, 1: cublas.PEDANTIC_64F}[a_type]
    assert (alpha._obj.value, beta._obj.value, b_type, c_type) == (1, 0, a_type, a_type)

    def matrix(at: ctypes.c_void_p, rows: int, columns: int, leading: int) -> NumpyArray:
        assert leading >= rows
        flat = np.ctypeslib.as_array((kind * (leading * (columns - 1) + rows)).from_address(at.value or 0))
        return np.lib.stride_tricks.as_strided(
            flat, (rows, columns), (flat.itemsize, leading * flat.itemsize)
        )

    (m_, n_, k_), lds = (x.value for x in (m, n, k)), (lda.value, ldb.value, ldc.value)
    left = matrix(a, k_, m_, lds[0]).T if transpose_a else matrix(a, m_, k_, lds[0])
    right = matrix(b, n_, k_, lds[1]).T if transpose_b else matrix(b, k_, n_, lds[1])
    with np.errstate(all="ignore"):
        matrix(c, m_, n_, lds[2])[...] = left @ right
    return 0


_LIBRARY = SimpleNamespace(cublasSetStream_v2=lambda handle, stream: 0, cublasGemmEx_64=_gemm_ex)
