"""What the RoPE kernel must know of its arrays' memory: how wide an access may be, and the strides."""

from __future__ import annotations

from typing import NamedTuple

from ropegrad.arrays import nbytes
from ropegrad.errors import SpecError
from ropegrad.spec import RopeSpec

# The order of the arrays in the kernel's `Arguments`: with heads, then tables.
HEADS = ("grad_q_embed", "grad_k_embed", "q", "k", "grad_q", "grad_k")
TABLES = ("cos", "sin", "grad_cos", "grad_sin")
NAMES = HEADS + TABLES
ALIGNED = 16  # bytes of the widest access

_AXES = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (1, 2, 0, 3)}  # of batch, head, token, channel


class Memory(NamedTuple):
    """Where an array stands: its address modulo ALIGNED, its strides in bytes."""

    offset: int
    strides: tuple[int, ...]


Layout = tuple[Memory | None, ...]  # in the order of NAMES; None where the kernel is given no array
Found = dict[str, Memory]  # the same by name, without those that are not there


def array_of(spec: RopeSpec, name: str) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of one of NAMES."""
    if name in TABLES:
        return spec.table_shape, spec.table_dtype
    heads = spec.heads if name in ("grad_q_embed", "q", "grad_q") else spec.kv_heads
    return spec.head_shape(heads or 0), spec.dtype


def dense_memory(shape: tuple[int, ...], dtype: str) -> Memory:
    """Of a contiguous array as CUDA allocates it."""
    return Memory(0, tuple(nbytes(shape[axis + 1 :], dtype) for axis in range(len(shape))))


def judge(spec: RopeSpec, memory: Found) -> None:
    """SpecError for elements at addresses that no GPU can read."""
    for name, found in memory.items():
        size = nbytes((1,), array_of(spec, name)[1])
        if found.offset % size or any(step % size for step in found.strides):
            raise SpecError(f"{name} has elements at addresses that are no multiple of {size} bytes: copy it")


def access(spec: RopeSpec, memory: Found, most: int) -> tuple[int, bool]:
    """Channels an access, and whether it is one instruction: the widest that widths and memory allow.

    most: bytes. A vector takes no more than twice the widest access once it is in the compute dtype.
    """
    size = nbytes((1,), spec.dtype)
    interleaved = spec.pairing == "interleaved"
    vector = min(most // size, 2 * ALIGNED // nbytes((1,), spec.compute))
    while vector >= 1 + interleaved:
        whole = (spec.rotary_dim if interleaved else spec.rotary_dim // 2) % vector == 0
        whole = whole and (spec.head_dim - spec.rotary_dim) % vector == 0
        if whole and dense(spec, memory, HEADS, vector * size):
            return vector, True
        vector //= 2
    return 1 + interleaved, False


def dense(spec: RopeSpec, memory: Found, names: tuple[str, ...], aligned: int) -> bool:
    """Whether those of these arrays that are there have unit stride, and rows at multiples of `aligned`."""
    return all(_dense(*array_of(spec, name), memory[name], aligned) for name in names if name in memory)


def _dense(shape: tuple[int, ...], dtype: str, found: Memory, aligned: int) -> bool:
    if shape[-1] > 1 and found.strides[-1] != nbytes((1,), dtype):
        return False
    steps = (step for step, size in zip(found.strides[:-1], shape[:-1], strict=True) if size > 1)
    return found.offset % aligned == 0 and all(step % aligned == 0 for step in steps)


def strides(spec: RopeSpec, memory: Found, name: str) -> tuple[int, ...]:
    """Strides in bytes, of batch, head, token and channel, or of batch, token and column.

    0 along axes of one (a table that all batches share, say), and where there is no array.
    """
    shape, _ = array_of(spec, name)
    axes = _AXES[spec.layout] if name in HEADS else tuple(range(len(shape)))
    if name not in memory:
        steps = (0,) * len(axes)
    else:
        steps = tuple(memory[name].strides[axis] if shape[axis] > 1 else 0 for axis in axes)
    return steps if name in HEADS or len(steps) == 3 else (0, *steps)
