"""From a RoPE problem and the memory of its arrays to one launch: instance, grid, block, arguments.

Nothing here needs a GPU: addresses, strides and sizes go in, numbers come out.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from ropegrad.arrays import nbytes
from ropegrad.backends.rope_config import MOST_GRID, Config, Work, choose, suits
from ropegrad.backends.rope_instance import Instance
from ropegrad.backends.rope_memory import (
    ALIGNED,
    HEADS,
    NAMES,
    TABLES,
    Found,
    Layout,
    access,
    dense,
    judge,
    strides,
)
from ropegrad.cost import rope_cost
from ropegrad.spec import RopeSpec

MOST_RESTS = 4  # vectors of channels that pass through, which a thread has in flight for each row
PLACES = (0, 5, 10, 15, 20, 25, 30, 34, 38, 42)  # of the addresses in `Arguments`, in the order of NAMES
Three = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch, but for the addresses: `arguments` has 0 for them, at PLACES.

    shared: bytes. arguments: the kernel's only parameter, as 64-bit numbers.
    """

    instance: Instance
    config: Config
    grid: Three
    block: Three
    shared: int
    arguments: array[int]

    def filled(self, addresses: tuple[int, ...]) -> array[int]:
        """The arguments with these addresses, 0 where there is no array."""
        values = self.arguments[:]
        for place, address in zip(PLACES, addresses, strict=True):
            values[place] = address
        return values


def wanted(spec: RopeSpec) -> tuple[str, ...]:
    """Names, out of NAMES, of the arrays that the kernel reads or writes."""
    products = _products(spec)
    rotated = [side for side in ("q", "k") if side in spec.needs]
    names = {f"grad_{need}" for need in spec.needs} | ({"cos", "sin"} if rotated else set())
    for side, heads in (("q", spec.heads), ("k", spec.kv_heads)):
        if heads is not None and (products or side in rotated):
            names |= {f"grad_{side}_embed"} | ({side} if products else set())
    return tuple(name for name in NAMES if name in names)


def too_many(spec: RopeSpec) -> bool:
    """Whether there are more batches and tokens than a grid can count."""
    return not _walks(spec) and min(spec.batch, spec.seq) > MOST_GRID


def prepare(spec: RopeSpec, layout: Layout, l2: int, config: Config | None = None) -> Launch | None:
    """The launch for arrays in this memory; None where there is nothing to write.

    l2: bytes of the GPU's L2. `config` overrides the rule. Raises SpecError for memory that no GPU can read.
    """
    memory = {name: found for name, found in zip(NAMES, layout, strict=True) if found is not None}
    judge(spec, memory)
    if not spec.seq or not (spec.batch or _walks(spec)):
        return None
    for width in (config.vector,) if config else (ALIGNED // 2, ALIGNED):
        vector, one = access(spec, memory, width)
        work = _work(spec, vector, l2)
        chosen = config or choose(work)
        if suits(work, chosen):
            break
    config = chosen
    instance = _instance(spec, memory, vector, one, config)
    grid, block = _shape(work, config, instance)
    return Launch(
        instance, config, grid, block, _shared(instance, config), _arguments(spec, memory, instance)
    )


def _products(spec: RopeSpec) -> bool:
    return "cos" in spec.needs or "sin" in spec.needs


def _walks(spec: RopeSpec) -> bool:
    """Whether a block walks over the batch, since its table's gradient is summed over it."""
    return spec.table_batch != spec.batch and _products(spec)


def _swapped(spec: RopeSpec) -> bool:
    return spec.batch > MOST_GRID and not _walks(spec)


def _heads(spec: RopeSpec) -> tuple[int, int]:
    """Heads of q and k that the kernel goes over: a side without a wanted gradient has none."""
    return (
        (spec.heads or 0) if _products(spec) or "q" in spec.needs else 0,
        (spec.kv_heads or 0) if _products(spec) or "k" in spec.needs else 0,
    )


# ---- what is compiled --------------------------------------------------------------------------------------


def _work(spec: RopeSpec, vector: int, l2: int) -> Work:
    kinds = len({"cos", "sin"} & set(spec.needs))
    slots = vector if spec.table == "half" else 2 * vector
    rest = (spec.head_dim - spec.rotary_dim) // vector
    lanes = max(-(-spec.rotary_dim // (2 * vector)), -(-rest // MOST_RESTS), 1)
    heads, kv_heads = _heads(spec)
    rotates = "q" in spec.needs or "k" in spec.needs
    thread_slot = kinds * nbytes((1,), spec.compute)
    return Work(
        lanes=lanes, heads=heads, kv_heads=kv_heads, seq=spec.seq, batch=1 if _walks(spec) else spec.batch,
        thread_bytes=slots * thread_slot,
        held_bytes=slots * (thread_slot + 2 * rotates * nbytes((1,), spec.table_dtype)),
        row_bytes=nbytes((2 * vector,), spec.dtype) * (1 + bool(kinds))
        + nbytes((-(-rest // lanes) * vector,), spec.dtype) * rotates,
        moved=rope_cost(spec).moved, l2=l2,
    )  # fmt: skip


def _instance(spec: RopeSpec, memory: Found, vector: int, one: bool, config: Config) -> Instance:
    interleaved, half = spec.pairing == "interleaved", spec.table == "half"
    run = (vector // 2 if interleaved and half else vector) * nbytes((1,), spec.table_dtype)
    turns = config.groups_q * config.rows, config.groups_k * config.rows
    left = [heads % turn if turn else heads for heads, turn in zip(_heads(spec), turns, strict=True)]
    unread = [side for side, heads in zip("qk", _heads(spec), strict=True) if not heads]
    return Instance(
        storage=spec.dtype, table=spec.table_dtype, compute=spec.compute, vector=vector,
        vectors=spec.rotary_dim // vector, lanes=config.lanes, tokens=config.tokens,
        groups_q=config.groups_q, groups_k=config.groups_k, rows=config.rows,
        rests=_rests(spec, vector, config.lanes) if one and not spec.accumulate else 0, hint=config.hint,
        dense=one, dense_table=dense(spec, memory, ("cos", "sin"), min(run, ALIGNED)),
        even=not any(left), once=turns == _heads(spec) and _products(spec), walks=_walks(spec),
        swapped=_swapped(spec),
        wide=any(abs(step) >= 1 << 31 for name in NAMES for step in strides(spec, memory, name)[1:]),
        interleaved=interleaved, half_table=half, own_sine=spec.adjoint == "paired",
        rotate=bool({"q", "k"} & set(spec.needs)),
        rotate_all={*spec.needs, *unread} >= {"q", "k"}, rest=spec.rotary_dim < spec.head_dim,
        cos="cos" in spec.needs, sin="sin" in spec.needs, add=spec.accumulate, blocks=config.blocks,
    )  # fmt: skip


def _rests(spec: RopeSpec, vector: int, lanes: int) -> int:
    """Vectors past the rotary width that each of a row's threads passes through; 0 if they are too many."""
    parts = max(1, -(-((spec.rotary_dim // vector + 1) // 2) // lanes))
    rests = -(-(spec.head_dim - spec.rotary_dim) // (vector * parts * lanes))
    return rests if rests <= MOST_RESTS else 0


# ---- what is launched --------------------------------------------------------------------------------------


def _shape(work: Work, config: Config, instance: Instance) -> tuple[Three, Three]:
    """Grid and block."""
    tokens = -(-work.seq // config.tokens)
    splits = 1 if work.thread_bytes else min(_splits(work, config), MOST_GRID)
    x, z = (work.batch, tokens) if instance.swapped else (tokens, work.batch)
    return (x * instance.parts, splits, z), (instance.threads, 1, 1)


def _splits(work: Work, config: Config) -> int:
    """Blocks that share a token's heads where nothing is summed over them."""
    shares = (work.heads, config.groups_q), (work.kv_heads, config.groups_k)
    return max(1, *(-(-heads // (groups * config.rows)) for heads, groups in shares if groups))


def _shared(instance: Instance, config: Config) -> int:
    """Bytes of partial sums: the kernel's `Kept`."""
    size = nbytes((1,), instance.compute)
    stride = -(-config.threads // 32) * 32 + 128 // (size * instance.table_run)
    return (instance.cos + instance.sin) * instance.slots * stride * size


def _arguments(spec: RopeSpec, memory: Found, instance: Instance) -> array[int]:
    """The struct `Arguments` of rope_rows.cuh, addresses 0."""
    values: list[int] = []
    for name in (*HEADS, *TABLES):
        values += [0, *strides(spec, memory, name)]
    batch = 1 if _walks(spec) else spec.batch
    rest = (spec.head_dim - spec.rotary_dim) // (instance.vector if instance.dense else 1)
    values += [*_heads(spec), batch, spec.seq, spec.batch, rest]
    return array("q", values)
