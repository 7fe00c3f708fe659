"""Data that cannot hide bugs: values of many kinds and memory of many shapes, all from one seed.

Tables are made here again, without `ropegrad.maths`, so that a fault there cannot reach its own test.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ropegrad.arrays import numpy_dtype
from ropegrad.spec import QkvSpec, RopeSpec
from ropegrad.verify.case import QKV_INPUTS, ROPE_INPUTS, Case, NumpyArray, rope_geometry
from ropegrad.verify.placing import place
from ropegrad.verify.probes import reciprocal

Rng = np.random.Generator


def make_case(
    spec: RopeSpec | QkvSpec,
    seed: int,
    *,
    values: str = "normal",
    tables: str = "normal",
    memory: str = "contiguous",
    name: str = "",
) -> Case:
    """A case of `spec` with data of these kinds (of VALUES, TABLES and placing.MEMORY), from `seed` alone."""
    rng = np.random.default_rng(seed)
    geometry = rope_geometry(Case("", spec, {}))
    inputs: dict[str, NumpyArray | None] = {}
    for input_name, (shape, dtype) in input_shapes(spec).items():
        if input_name in ("cos", "sin"):
            continue
        x = VALUES[values](rng, shape, dtype, _role(input_name))
        inputs[input_name] = reciprocal(x, input_name, spec) if values == "reciprocal" else x
    inputs["cos"], inputs["sin"] = TABLES[tables](rng, geometry)
    placed = {key: place(rng, array, memory, key) for key, array in inputs.items() if array is not None}
    order = ROPE_INPUTS if isinstance(spec, RopeSpec) else QKV_INPUTS
    prior = {}
    if spec.accumulate:
        for need in spec.needs:
            shape, dtype = spec.output(need)
            prior[f"grad_{need}"] = VALUES["normal"](rng, shape, dtype, "gradient")
    return Case(name or f"seed {seed}", spec, {key: placed.get(key) for key in order}, prior)


def input_shapes(spec: RopeSpec | QkvSpec) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every input that is there, tables included."""
    geometry = spec if isinstance(spec, RopeSpec) else spec.rope
    tables = dict.fromkeys(("cos", "sin"), (geometry.table_shape, geometry.table_dtype))
    if isinstance(spec, RopeSpec):
        shapes = {}
        for side, heads in (("q", spec.heads), ("k", spec.kv_heads)):
            if heads is not None:
                shapes[f"grad_{side}_embed"] = shapes[side] = (spec.head_shape(heads), spec.dtype)
        return shapes | tables
    q, k = (geometry.head_shape(heads or 0) for heads in (geometry.heads, geometry.kv_heads))
    heads_shapes = {"grad_query": q, "grad_key": k, "grad_value": k, "hidden_states": spec.hidden_shape}
    weights = {f"{part}_weight": (spec.rows(part), spec.hidden_size or 0) for part in "qkv"}
    return {name: (shape, geometry.dtype) for name, shape in (heads_shapes | weights).items()} | tables


def _role(name: str) -> str:
    return "gradient" if name.startswith("grad") else "weight" if name.endswith("weight") else "input"


# ---- values --------------------------------------------------------------------------------------------


def _cast(x: NumpyArray, dtype: str) -> NumpyArray:
    with np.errstate(all="ignore"):
        return x.astype(numpy_dtype(dtype))


def _normal(rng: Rng, shape: tuple[int, ...], dtype: str, role: str) -> NumpyArray:
    """N(0, 1); weights N(0, 1)/√C, as the benchmark draws them."""
    x = rng.standard_normal(shape, dtype=np.float64 if dtype == "float64" else np.float32)
    if role == "weight" and shape[-1]:
        x *= 1 / math.sqrt(shape[-1])
    return _cast(x, dtype)


def _tiny_gradients(rng: Rng, shape: tuple[int, ...], dtype: str, role: str) -> NumpyArray:
    """As training sees them: upstream gradients near 1e-6."""
    x = _normal(rng, shape, "float64" if dtype == "float64" else "float32", role)
    return _cast(x * x.dtype.type(1e-6 if role == "gradient" else 1), dtype)


def _coded(rng: Rng, shape: tuple[int, ...], dtype: str, role: str) -> NumpyArray:
    """Small whole numbers that tell their index, of both signs, exact in every dtype: never constant."""
    index = np.arange(math.prod(shape), dtype=np.int64).reshape(shape) + int(rng.integers(97))
    return _cast((index * 37 % 97 - 48).astype(np.float64), dtype)


def _scales(rng: Rng, shape: tuple[int, ...], dtype: str, role: str) -> NumpyArray:
    """Magnitudes over many binades: 2^±100 for gradients where the dtype allows it."""
    reach = 100 if role == "gradient" else 12
    reach = min(reach, 6 if dtype == "float16" else reach)
    x = rng.standard_normal(shape)
    return _cast(np.ldexp(x, rng.integers(-reach, reach + 1, shape)), dtype)


def _subnormal(rng: Rng, shape: tuple[int, ...], dtype: str, role: str) -> NumpyArray:
    """Gradients below the smallest normal number; everything else normal."""
    if role != "gradient":
        return _normal(rng, shape, dtype, role)
    steps = {"float16": -24, "bfloat16": -133, "float32": -149, "float64": -1074}[dtype]
    return _cast(np.ldexp(rng.integers(-100, 101, shape).astype(np.float64), steps), dtype)


def _small(rng: Rng, shape: tuple[int, ...], dtype: str, role: str) -> NumpyArray:
    """Gradients in the lowest 16 binades of normal numbers; everything else normal."""
    if role != "gradient":
        return _normal(rng, shape, dtype, role)
    lowest = {"float16": -14, "bfloat16": -126, "float32": -126, "float64": -1022}[dtype]
    x = rng.uniform(1, 2, shape) * rng.choice([-1.0, 1.0], shape)
    return _cast(np.ldexp(x, rng.integers(lowest, lowest + 16, shape)), dtype)


def _zeros(rng: Rng, shape: tuple[int, ...], dtype: str, role: str) -> NumpyArray:
    """Half of the elements are zeros, of both signs."""
    x = rng.standard_normal(shape)
    x[rng.random(shape) < 0.25] = 0.0
    x[rng.random(shape) < 0.25] = -0.0
    return _cast(x, dtype)


def _dominating(rng: Rng, shape: tuple[int, ...], dtype: str, role: str) -> NumpyArray:
    """One element far larger than all others."""
    x = np.asarray(rng.standard_normal(shape))
    if x.size and role == "gradient":
        x.reshape(-1)[int(rng.integers(x.size))] = 1e4 if dtype == "float16" else 1e20
    return _cast(x, dtype)


def _sparse(rng: Rng, shape: tuple[int, ...], dtype: str, role: str) -> NumpyArray:
    """Few nonzeros a row, so that sums are short and their bounds sharp."""
    x = rng.standard_normal(shape)
    if role == "gradient":
        x[rng.random(shape) > 4 / max(shape[-1], 4)] = 0.0
    return _cast(x, dtype)


def _lone(rng: Rng, shape: tuple[int, ...], dtype: str, role: str) -> NumpyArray:
    """A single nonzero in each upstream gradient: sums of one product, of whatever sizes."""
    x = rng.standard_normal(shape)
    if role == "gradient" and x.size:
        place = int(rng.integers(x.size))
        x.reshape(-1)[np.arange(x.size) != place] = 0.0
    return _cast(x, dtype)


def _nonfinite(rng: Rng, shape: tuple[int, ...], dtype: str, role: str) -> NumpyArray:
    """A few NaN and Inf among normal numbers."""
    x = np.asarray(rng.standard_normal(shape))
    flat = x.reshape(-1)
    for value in (np.nan, np.inf, -np.inf)[: int(rng.integers(4))]:
        if x.size:
            flat[int(rng.integers(x.size))] = value
    return _cast(x, dtype)


def _overflow(rng: Rng, shape: tuple[int, ...], dtype: str, role: str) -> NumpyArray:
    """Gradients whose products reach past the largest number of the dtype."""
    x = rng.uniform(0.4, 1.0, shape) * rng.choice([-1.0, 1.0], shape)
    top = {"float16": 65504.0, "float64": 1e300}.get(dtype, 3e38)
    return _cast(x * (top if role == "gradient" else 1.0), dtype)


Values = Callable[[Rng, tuple[int, ...], str, str], NumpyArray]
VALUES: dict[str, Values] = {
    "normal": _normal, "tiny_gradients": _tiny_gradients, "coded": _coded, "scales": _scales,
    "subnormal": _subnormal, "small": _small, "zeros": _zeros, "dominating": _dominating,
    "sparse": _sparse, "lone": _lone, "nonfinite": _nonfinite, "overflow": _overflow,
    "reciprocal": _normal,  # and then `probes`
}  # fmt: skip


# ---- tables --------------------------------------------------------------------------------------------


def _random_tables(rng: Rng, spec: RopeSpec) -> tuple[NumpyArray, NumpyArray]:
    """Unrelated normal numbers: the two columns of a pair differ, and cos² + sin² is not 1."""
    cos, sin = rng.standard_normal((2, *spec.table_shape))
    return _cast(cos, spec.table_dtype), _cast(sin, spec.table_dtype)


def _equal_tables(rng: Rng, spec: RopeSpec) -> tuple[NumpyArray, NumpyArray]:
    """Normal numbers, the two columns of a pair alike: what a function may need that reads one of them."""
    made = []
    for _ in range(2):
        x = rng.standard_normal((*spec.table_shape[:-1], spec.rotary_dim // 2))
        if spec.table == "full":
            x = np.tile(x, 2) if spec.pairing == "half" else np.repeat(x, 2, axis=-1)
        made.append(_cast(x, spec.table_dtype))
    return made[0], made[1]


def _benchmark_tables(rng: Rng, spec: RopeSpec) -> tuple[NumpyArray, NumpyArray]:
    """As the benchmark draws them: cos θ and sin φ, θ and φ independent N(0, 1) clipped to ±π."""
    theta, phi = (
        np.clip(rng.standard_normal(spec.table_shape, dtype=np.float32), -np.pi, np.pi) for _ in range(2)
    )
    return _cast(np.cos(theta), spec.table_dtype), _cast(np.sin(phi), spec.table_dtype)


def _real_tables(base: float, first: int = 0, scale: float = 1.0) -> Callable[..., Any]:
    """Tables of the positions first, first + 1, …; a per-batch table starts each batch at its own."""

    def tables(rng: Rng, spec: RopeSpec) -> tuple[NumpyArray, NumpyArray]:
        pairs = spec.rotary_dim // 2
        starts = first + 7 * np.arange(1 if spec.table_batch is None else spec.table_batch)
        position = starts[:, None] + np.arange(spec.seq)
        if spec.table_batch is None:
            position = position[0]
        theta = position[..., None] / base ** (2 * np.arange(pairs) / max(spec.rotary_dim, 1))
        made = []
        for x in (scale * np.cos(theta), scale * np.sin(theta)):
            if spec.table == "full":
                x = np.tile(x, 2) if spec.pairing == "half" else np.repeat(x, 2, axis=-1)
            made.append(_cast(x, spec.table_dtype))
        return made[0], made[1]

    return tables


def _zero_tables(rng: Rng, spec: RopeSpec) -> tuple[NumpyArray, NumpyArray]:
    """Half of the elements are zeros, of both signs."""
    cos, sin = (_zeros(rng, spec.table_shape, spec.table_dtype, "table") for _ in range(2))
    return cos, sin


def _wide_tables(rng: Rng, spec: RopeSpec) -> tuple[NumpyArray, NumpyArray]:
    """Magnitudes over 40 binades, as cosines and sines near their zeros have; some float16 ones are 0."""
    cos, sin = np.ldexp(
        rng.standard_normal((2, *spec.table_shape)), rng.integers(-40, 1, (2, *spec.table_shape))
    )
    return _cast(cos, spec.table_dtype), _cast(sin, spec.table_dtype)


def _nonfinite_tables(rng: Rng, spec: RopeSpec) -> tuple[NumpyArray, NumpyArray]:
    """A NaN or an Inf in a table: an uninitialised buffer, say."""
    return (
        _nonfinite(rng, spec.table_shape, spec.table_dtype, "table"),
        _nonfinite(rng, spec.table_shape, spec.table_dtype, "table"),
    )


Tables = Callable[[Rng, RopeSpec], tuple[NumpyArray, NumpyArray]]
TABLES: dict[str, Tables] = {
    "normal": _random_tables,
    "equal": _equal_tables,
    "benchmark": _benchmark_tables,
    "llama3": _real_tables(500_000.0),
    "base10000": _real_tables(10_000.0),
    "far": _real_tables(10_000.0, first=1_000_000),
    "scaled": _real_tables(10_000.0, scale=1.4159),
    "zeros": _zero_tables,
    "wide": _wide_tables,
    "nonfinite": _nonfinite_tables,
}
