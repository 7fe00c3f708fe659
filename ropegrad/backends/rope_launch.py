"""From a RoPE problem and the memory of its arrays to one launch: instance, grid, block, arguments.

Nothing here needs a GPU: addresses, strides and sizes go in, numbers come out.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import NamedTuple

from ropegrad.arrays import nbytes
from ropegrad.backends.rope_config import MOST_GRID, Config, Gpu, Work, choose
from ropegrad.backends.rope_instance import Instance
from ropegrad.errors import SpecError
from ropegrad.spec import RopeSpec

# The order of the pointers in the kernel's `Arguments`: with heads, then tables.
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


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch, but for the addresses: `arguments` has gaps for them at `places`, in the order of NAMES.

    shared: bytes. arguments: the kernel's only parameter as 64-bit numbers.
    """

    instance: Instance
    config: Config
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    arguments: array[int]

    def filled(self, addresses: tuple[int, ...]) -> array[int]:
        """The arguments with these addresses, 0 where there is no array."""
        values = self.arguments[:]
        for place, address in zip(PLACES, addresses, strict=True):
            values[place] = address
        return values


PLACES = (0, 5, 10, 15, 20, 25, 30, 34, 38, 42)


def wanted(spec: RopeSpec) -> tuple[str, ...]:
    """Names, out of NAMES, of the arrays that the kernel reads or writes."""
    products = "cos" in spec.needs or "sin" in spec.needs
    rotated = [side for side in ("q", "k") if side in spec.needs]
    names = {f"grad_{need}" for need in spec.needs} | ({"cos", "sin"} if rotated else set())
    for side, heads in (("q", spec.heads), ("k", spec.kv_heads)):
        if heads is not None and (products or side in rotated):
            names |= {f"grad_{side}_embed"} | ({side} if products else set())
    return tuple(name for name in NAMES if name in names)


def prepare(spec: RopeSpec, layout: Layout, gpu: Gpu, config: Config | None = None) -> Launch | None:
    """The launch for arrays in this memory; None where there is nothing to write.

    `config` overrides the rule. Raises SpecError for memory that no GPU can read.
    """
    memory = dict(zip(NAMES, layout, strict=True))
    walking = spec.table_batch != spec.batch and bool({"cos", "sin"} & set(spec.needs))
    tokens = spec.seq if walking else spec.batch * spec.seq
    if not tokens:
        return None
    vector, dense = _access(spec, memory, config.vector if config else ALIGNED)
    work = _work(spec, memory, vector, dense, tokens, gpu)
    config = config or choose(work)
    instance = _instance(spec, memory, vector, dense, config)
    values = _arguments(spec, memory, instance, config, tokens, walking)
    grid, block = _shape(work, config)
    return Launch(instance, config, grid, block, _shared(spec, instance, config), values)


# ---- access ------------------------------------------------------------------------------------------------


def _access(spec: RopeSpec, memory: dict[str, Memory | None], most: int) -> tuple[int, bool]:
    """Channels an access, and whether it is one instruction: the widest that widths and memory allow."""
    size = nbytes((1,), spec.dtype)
    least = 2 if spec.pairing == "interleaved" else 1
    given = [(name, found) for name in HEADS if (found := memory[name]) is not None]
    sizes = spec.head_shape(2)
    for name, found in given:
        _judge(name, found, size)
    vector = most // size
    while vector >= least:
        whole = (spec.rotary_dim if least == 2 else spec.rotary_dim // 2) % vector == 0
        whole = whole and (spec.head_dim - spec.rotary_dim) % vector == 0
        if whole and all(_dense(found, sizes, size, vector * size) for _, found in given):
            return vector, True
        vector //= 2
    return least, False


def _judge(name: str, found: Memory, size: int) -> None:
    if found.offset % size or any(step % size for step in found.strides):
        raise SpecError(f"{name} has elements at addresses that are no multiple of {size} bytes: copy it")


def _dense(found: Memory, sizes: tuple[int, ...], size: int, aligned: int) -> bool:
    """Whether rows have unit stride and start at multiples of `aligned` bytes."""
    *outer, last = found.strides
    if last != size and sizes[-1] > 1:
        return False
    steps = (step for step, length in zip(outer, sizes, strict=False) if length > 1)
    return found.offset % aligned == 0 and all(step % aligned == 0 for step in steps)


def _instance(
    spec: RopeSpec, memory: dict[str, Memory | None], vector: int, dense: bool, config: Config
) -> Instance:
    size = nbytes((1,), spec.table_dtype)
    interleaved, half = spec.pairing == "interleaved", spec.table == "half"
    run = vector // 2 if interleaved and half else vector
    for name in TABLES:
        if (found := memory[name]) is not None:
            _judge(name, found, size)
    read = [found for name in ("cos", "sin") if (found := memory[name]) is not None]
    threads = config.threads // 32 * 32 + 64 if config.stages else -(-config.threads // 64) * 64
    return Instance(
        storage=spec.dtype, table=spec.table_dtype, compute=spec.compute, vector=vector,
        lanes=-(-spec.rotary_dim // (2 * vector)), dense=dense,
        dense_table=all(_dense(found, spec.table_shape, size, min(run * size, ALIGNED)) for found in read),
        interleaved=interleaved, half_table=half, rotate=bool({"q", "k"} & set(spec.needs)),
        rest=spec.rotary_dim < spec.head_dim,
        cos="cos" in spec.needs, sin="sin" in spec.needs, add=spec.accumulate, rows=config.rows,
        hint=config.hint, threads=threads, blocks=config.blocks,
        stages=config.stages, groups_q=config.groups_q * bool(config.stages),
        groups_k=config.groups_k * bool(config.stages),
    )  # fmt: skip


# ---- shape -------------------------------------------------------------------------------------------------


def _work(
    spec: RopeSpec, memory: dict[str, Memory | None], vector: int, dense: bool, tokens: int, gpu: Gpu
) -> Work:
    kinds = len({"cos", "sin"} & set(spec.needs))
    slots = vector if spec.table == "half" else 2 * vector
    rest = (spec.head_dim - spec.rotary_dim) // vector
    heads, kv_heads = _heads(spec)
    return Work(
        lanes=max(-(-spec.rotary_dim // (2 * vector)), -(-rest // 4), 1),
        heads=heads, kv_heads=kv_heads, tokens=tokens,
        thread_bytes=kinds * slots * nbytes((1,), spec.compute), gpu=gpu,
        row_bytes=nbytes((spec.rotary_dim,), spec.dtype) * (2 if kinds else 1),
        pipeline=gpu.capability >= 90 and dense and _pipelines(spec, memory, vector),
    )  # fmt: skip


def _pipelines(spec: RopeSpec, memory: dict[str, Memory | None], vector: int) -> bool:
    """Whether rows can be copied in bulk: whole ones, of multiples of 16 bytes at multiples of 16."""
    whole = spec.rotary_dim == spec.head_dim and spec.rotary_dim % (2 * vector) == 0
    rows = nbytes((spec.head_dim,), spec.dtype), nbytes((spec.columns,), spec.table_dtype)
    if spec.accumulate or not whole or not sum(_heads(spec)) or any(row % ALIGNED for row in rows):
        return False
    shapes = {name: spec.head_shape(2) for name in HEADS} | dict.fromkeys(TABLES, spec.table_shape)
    sizes = {name: nbytes((1,), spec.dtype if name in HEADS else spec.table_dtype) for name in NAMES}
    read = [name for name in NAMES if memory[name] is not None and name not in ("grad_cos", "grad_sin")]
    return all(
        _dense(found, shapes[name], sizes[name], ALIGNED)
        for name in read
        if (found := memory[name]) is not None
    )


def _shape(work: Work, config: Config) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Grid and block."""
    if config.stages:
        if not work.pipeline or config.lanes != work.lanes or config.tokens != 1:
            raise ValueError(f"no pipeline for {work} by {config}")
        each = -(-work.tokens // (work.gpu.multiprocessors * config.blocks))
        return (-(-work.tokens // each), 1, 1), (-(-config.threads // 32) * 32 + 32, 1, 1)
    grid = (
        -(-work.tokens // config.tokens),
        -(-work.lanes // config.lanes),
        1 if work.thread_bytes else _splits(work, config),
    )
    return grid, (config.lanes, config.tokens, config.groups)


def _splits(work: Work, config: Config) -> int:
    """Blocks that share a token's heads where nothing is summed over them."""
    q = -(-work.heads // (max(config.groups_q, 1) * config.rows))
    k = -(-work.kv_heads // (max(config.groups_k, 1) * config.rows))
    return max(1, min(q, k, MOST_GRID) if q and k else min(max(q, k), MOST_GRID))


def _heads(spec: RopeSpec) -> tuple[int, int]:
    """Heads of q and k that the kernel goes over: a side without a wanted gradient has none."""
    products = "cos" in spec.needs or "sin" in spec.needs
    return (
        (spec.heads or 0) if products or "q" in spec.needs else 0,
        (spec.kv_heads or 0) if products or "k" in spec.needs else 0,
    )


def _shared(spec: RopeSpec, instance: Instance, config: Config) -> int:
    """Bytes: partial sums, padded as the kernel's `slot_stride`; the pipeline's `Ring`."""
    size = nbytes((1,), instance.compute)
    stride = -(-config.threads // 32) * 32 + 128 // (size * instance.table_run)
    sums = (instance.cos + instance.sin) * instance.slots * stride * size
    if not config.stages:
        return sums
    rows = config.groups * config.rows * nbytes((spec.head_dim,), spec.dtype)
    stage = rows * (1 + (instance.cos or instance.sin)) + 2 * nbytes((spec.columns,), spec.table_dtype)
    return config.stages * (stage + 16) + 2 * sums


def _arguments(
    spec: RopeSpec,
    memory: dict[str, Memory | None],
    instance: Instance,
    config: Config,
    tokens: int,
    walking: bool,
) -> array[int]:
    """The struct `Arguments` of rope_backward.cu, addresses 0."""
    values: list[int] = []
    size, sizes = nbytes((1,), spec.dtype), spec.head_shape(2)
    for name in HEADS:
        values += [0, *_strides(memory[name], sizes, size, _AXES[spec.layout])]
    size = nbytes((1,), spec.table_dtype)
    for name in TABLES:
        batched = spec.table_batch is not None
        strides = _strides(memory[name], spec.table_shape, size, (0, 1, 2) if batched else (0, 1))
        values += [0, *(strides if batched else [0, *strides])]
    vectors = spec.rotary_dim // instance.vector
    rest = (spec.head_dim - spec.rotary_dim) // (instance.vector if instance.dense else 1)
    values += [
        *_heads(spec),
        spec.seq,
        config.groups_q,
        config.groups_k,
        tokens,
        spec.batch if walking else 1,
    ]
    values += [vectors, rest, spec.adjoint == "paired"]
    return array("q", values)


def _strides(found: Memory | None, sizes: tuple[int, ...], size: int, axes: tuple[int, ...]) -> list[int]:
    """In elements, 0 along axes of one: a table that all batches share, say."""
    if found is None:
        return [0] * len(axes)
    return [found.strides[axis] // size if sizes[axis] > 1 else 0 for axis in axes]
