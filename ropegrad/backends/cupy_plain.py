"""The readable GPU version on CuPy: one elementwise kernel, one reduction, one product. Kept for ever.

It separates "the GPU is wrong" from "the fast kernel is wrong". Arithmetic is written as PTX instructions
because CuPy compiles every kernel with -ftz=true, which would flush float32 subnormals to zero.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from typing import Any

from ropegrad.arrays import Array, numpy_dtype
from ropegrad.backends.base import Inputs, Outputs
from ropegrad.backends.cublas import PEDANTIC_32F, PEDANTIC_64F, multiply
from ropegrad.maths import layout as axes
from ropegrad.spec import QkvSpec, RopeSpec

# f32 without .ftz keeps subnormals; f64 has no such switch. `widen` and `narrow` convert as exactly.
ARITHMETIC = r"""
__device__ float mul(float a, float b) {
    float r; asm("mul.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r;
}
__device__ float add(float a, float b) {
    float r; asm("add.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r;
}
__device__ double mul(double a, double b) { return __dmul_rn(a, b); }
__device__ double add(double a, double b) { return __dadd_rn(a, b); }
__device__ float to_float(float x) { return x; }
__device__ float to_float(double x) { float r; asm("cvt.rn.f32.f64 %0, %1;" : "=f"(r) : "d"(x)); return r; }
__device__ double to_double(float x) { double r; asm("cvt.f64.f32 %0, %1;" : "=d"(r) : "f"(x)); return r; }
__device__ double to_double(double x) { return x; }
template <class A> struct Wide;  // any of the four dtypes as the compute dtype A
template <> struct Wide<float> {
    template <class T> static __device__ float from(T x) { return static_cast<float>(x); }
};
template <> struct Wide<double> {
    template <class T> static __device__ double from(T x) { return to_double(static_cast<float>(x)); }
    static __device__ double from(double x) { return x; }
};
template <class T> struct Narrow {  // the compute dtype as T
    template <class A> static __device__ T from(A x) { return T(to_float(x)); }
};
template <> struct Narrow<double> {
    template <class A> static __device__ double from(A x) { return to_double(x); }
};
"""


@functools.cache
def rotation(compute: str, forward: bool, accumulate: bool, heads: int) -> Any:
    """One thread a pair of channels in one or two heads: d1 = g1·c1 + g2·s1, d2 = g2·c2 − g1·s2.

    Forward the sines' signs are the other way. Reads each gradient once; a table row stays in cache from
    head to head. Two heads share the arithmetic of the index, which is most of what a thread does.
    """
    import cupy

    a = _C[compute]
    first, second = "mul(a2, Wide<A>::from(s1))", "mul(a1, Wide<A>::from(s2))"
    first, second = (f"mul(A(-1), {first})", second) if forward else (first, f"mul(A(-1), {second})")
    x1, x2 = f"add(mul(a1, Wide<A>::from(c1)), {first})", f"add(mul(a2, Wide<A>::from(c2)), {second})"
    if accumulate:
        x1, x2 = f"add({x1}, Wide<A>::from(d1))", f"add({x2}, Wide<A>::from(d2))"
    rotate = f"""
    template <class G, class C, class T> __device__ void ropegrad_rotate(
        G g1, G g2, C c1, C c2, C s1, C s2, T& d1, T& d2) {{
        typedef {a} A;
        A a1 = Wide<A>::from(g1), a2 = Wide<A>::from(g2);
        A x1 = {x1};
        A x2 = {x2};
        d1 = Narrow<T>::from(x1);
        d2 = Narrow<T>::from(x2);
    }}
    """
    each = range(heads)
    return cupy.ElementwiseKernel(
        ", ".join([f"G g1_{i}, G g2_{i}" for i in each] + ["C c1, C c2, C s1, C s2"]),
        ", ".join(f"T d1_{i}, T d2_{i}" for i in each),
        " ".join(f"ropegrad_rotate(g1_{i}, g2_{i}, c1, c2, s1, s2, d1_{i}, d2_{i});" for i in each),
        f"ropegrad_rotation_{a}_{heads}{'_forward' * forward}{'_accumulate' * accumulate}",
        preamble=ARITHMETIC + rotate,
    )


@functools.cache
def table_sums(compute: str) -> Any:
    """Σ g1·x1, Σ g2·x2, −Σ g1·x2 and Σ g2·x1 over the axes reduced: both tables' gradients, both members.

    One pass reads g and x once; sums in the compute dtype, in a fixed order: the same bits every time.
    """
    import cupy

    a = _C[compute]
    four = f"ropegrad_four_{a}"
    struct = f"""
    struct {four} {{
        typedef {a} A;
        A c1, c2, s1, s2;
        __device__ {four}() {{}}
        __device__ {four}(int zero) : c1(zero), c2(zero), s1(zero), s2(zero) {{}}
        __device__ {four}(A c1, A c2, A s1, A s2) : c1(c1), c2(c2), s1(s1), s2(s2) {{}}
        template <class T> static __device__ {four} products(T y1, T y2, T z1, T z2) {{
            A g1 = Wide<A>::from(y1), g2 = Wide<A>::from(y2), x1 = Wide<A>::from(z1), x2 = Wide<A>::from(z2);
            return {four}(mul(g1, x1), mul(g2, x2), mul(A(-1), mul(g1, x2)), mul(g2, x1));
        }}
    }};
    """
    return cupy.ReductionKernel(
        "T g1, T g2, T x1, T x2", f"{compute} c1, {compute} c2, {compute} s1, {compute} s2",
        f"{four}::products(g1, g2, x1, x2)",
        f"{four}(add(a.c1, b.c1), add(a.c2, b.c2), add(a.s1, b.s1), add(a.s2, b.s2))",
        "c1 = a.c1, c2 = a.c2, s1 = a.s1, s2 = a.s2", "0",
        f"ropegrad_table_sums_{a}", reduce_type=four, preamble=ARITHMETIC + struct,
    )  # fmt: skip


@functools.cache
def summed(compute: str) -> Any:
    """Σ x over the axes reduced."""
    import cupy

    a = _C[compute]
    return cupy.ReductionKernel(
        f"{compute} x", f"{compute} sum", "x", "add(a, b)", "sum = a", "0", f"ropegrad_summed_{a}",
        reduce_type=a, preamble=ARITHMETIC,
    )  # fmt: skip


@functools.cache
def combined(compute: str, signs: tuple[int, ...]) -> Any:
    """Out = ±x0 ± x1 ± …, added in order and rounded once."""
    import cupy

    a = _C[compute]
    terms = [f"Wide<{a}>::from(x{i})" for i in range(len(signs))]
    terms = [term if sign > 0 else f"mul({a}(-1), {term})" for term, sign in zip(terms, signs, strict=True)]
    total = functools.reduce("add({}, {})".format, terms)
    name = "".join("p" if sign > 0 else "m" for sign in signs)
    return cupy.ElementwiseKernel(
        ", ".join(f"{'ABCDEFGH'[i]} x{i}" for i in range(len(signs))), "R out",
        f"out = Narrow<R>::from({total})", f"ropegrad_combined_{a}_{name}", preamble=ARITHMETIC,
    )  # fmt: skip


_C = {"float32": "float", "float64": "double"}
_PARTS = {"q": "grad_query", "k": "grad_key", "v": "grad_value"}


@dataclass(frozen=True)
class CupyPlain:
    """CuPy's kernel makers and cuBLAS in IEEE arithmetic, on the arrays' device and the current stream."""

    name: str = "cupy_plain"

    def why_not(self, spec: RopeSpec | QkvSpec) -> str | None:
        """It wants CuPy arrays."""
        if importlib.util.find_spec("cupy") is None:
            return "CuPy is not installed (extra cuda12 or cuda13)"
        return None if spec.namespace == "cupy" else f"it runs CuPy arrays, these are of {spec.namespace}"

    def explain(self, spec: RopeSpec | QkvSpec, inputs: Inputs) -> list[str]:
        """Kernels and copies."""
        geometry = spec if isinstance(spec, RopeSpec) else spec.rope
        lines = [
            f"ElementwiseKernel for rotations, ReductionKernel for sums, computing in {geometry.compute}; "
            "any strides are read and written in place"
        ]
        if isinstance(spec, QkvSpec):
            lines.append(f"cuBLAS in IEEE {geometry.compute}; packs the rotated gradients and the weights")
        return lines

    def rope_backward(self, spec: RopeSpec, inputs: Inputs, out: Outputs | None) -> Outputs:
        """Gradients of RoPE; see `ropegrad.rope_backward`."""
        with _device_of(inputs):
            results = out if out is not None else _allocate(spec)
            for side in ("q", "k"):
                if side in spec.needs:
                    grad, result = inputs[f"grad_{side}_embed"], results[f"grad_{side}"]
                    _rotate(spec, inputs, grad, result, accumulate=spec.accumulate)
            _table_gradients(spec, inputs, results)
        return results

    def qkv_rope_backward(self, spec: QkvSpec, inputs: Inputs, out: Outputs | None) -> Outputs:
        """Gradients of the projections and RoPE; see `ropegrad.qkv_rope_backward`."""
        with _device_of(inputs):
            results = out if out is not None else _allocate(spec)
            blocks = _packed_gradients(spec, inputs)
            if "hidden_states" in spec.needs:
                weights = _stacked(spec, [inputs[f"{part}_weight"] for part in "qkv"])
                product = _gemm(blocks["packed"], weights)
                _finish(spec, product.reshape(spec.hidden_shape), results["grad_hidden_states"])
            parts = [part for part in "qkv" if f"{part}_weight" in spec.needs]
            if parts:
                hidden = axes.hidden_rows(_xp(), _as_compute(spec, inputs["hidden_states"]))
                for part in parts:
                    _finish(spec, _gemm(blocks[part].T, hidden), results[f"grad_{part}_weight"])
            for part in "qkv":
                if f"{part}_bias" in spec.needs:
                    total = summed(spec.rope.compute)(blocks[part], axis=0)
                    _finish(spec, total, results[f"grad_{part}_bias"])
        return results

    def rope(self, spec: RopeSpec, inputs: Inputs) -> Outputs:
        """RoPE of q and k; see `ropegrad.rope`."""
        with _device_of(inputs):
            results = {}
            for side in spec.needs:
                results[f"{side}_embed"] = _cupy().empty(spec.output(side)[0], numpy_dtype(spec.dtype))
                _rotate(spec, inputs, inputs[side], results[f"{side}_embed"], forward=True)
        return results

    def qkv_rope(self, spec: QkvSpec, inputs: Inputs) -> Outputs:
        """Projections and RoPE; see `ropegrad.qkv_rope`."""
        geometry = spec.rope
        with _device_of(inputs):
            hidden = axes.hidden_rows(_xp(), _as_compute(spec, inputs["hidden_states"]))
            results = {}
            for part, name in (("q", "query"), ("k", "key"), ("v", "value")):
                product = _gemm(hidden, _as_compute(spec, inputs[f"{part}_weight"]).T)
                if f"{part}_bias" in inputs:
                    _combine(geometry, (product, 1), (inputs[f"{part}_bias"], 1), out=product)
                heads = (geometry.heads if part == "q" else geometry.kv_heads) or 0
                shape = (geometry.batch, heads, geometry.seq, geometry.head_dim)
                projected = axes.from_rows(_xp(), product, shape, geometry.layout)
                results[name] = _cupy().empty(geometry.head_shape(heads), numpy_dtype(geometry.dtype))
                if part == "v":
                    _combine(geometry, (projected, 1), out=results[name])
                else:
                    _rotate(geometry, inputs, projected, results[name], forward=True)
        return results


def no_gpu() -> str | None:
    """Why there is no device to run on; None if there is one."""
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # a missing driver or library has many names
        return f"CuPy sees no GPU: {type(error).__name__}: {error}"
    return None


def _cupy() -> Any:
    import cupy

    return cupy


def _xp() -> Any:
    import array_api_compat.cupy

    return array_api_compat.cupy


def _device_of(inputs: Inputs) -> Any:
    return next(iter(inputs.values())).device


def _allocate(spec: RopeSpec | QkvSpec) -> Outputs:
    return {
        f"grad_{need}": _cupy().empty(shape, numpy_dtype(dtype))
        for need in spec.needs
        for shape, dtype in [spec.output(need)]
    }


def _members(x: Array, pairing: str) -> tuple[Array, Array]:
    """Views of the first and second members of the pairs on the last axis."""
    if pairing == "half":
        middle = x.shape[-1] // 2
        return x[..., :middle], x[..., middle:]
    return x[..., 0::2], x[..., 1::2]


def _table(spec: RopeSpec, table: Array) -> tuple[Array, Array]:
    """A table's columns for the two members, [batch or 1, 1, tokens, R/2]."""
    rows = (table[None] if table.ndim == 2 else table)[:, None]
    return _members(rows, spec.pairing) if spec.table == "full" else (rows, rows)


def _rotate(
    spec: RopeSpec, inputs: Inputs, x: Array, y: Array, *, forward: bool = False, accumulate: bool = False
) -> None:
    """Rotate x into y, both in the caller's layout; y may be x."""
    source, target = (axes.to_bhsd(_xp(), array, spec.layout) for array in (x, y))
    width = spec.rotary_dim
    c1, c2 = _table(spec, inputs["cos"])
    s1, s2 = _table(spec, inputs["sin"])
    if not forward and spec.adjoint == "exact":
        s1, s2 = s2, s1  # each channel's partner's sine
    even = source.shape[1] // 2 * 2
    for heads in ([slice(0, even, 2), slice(1, even, 2)], [slice(even, None)]):
        gs = [part for head in heads for part in _members(source[:, head, :, :width], spec.pairing)]
        ds = [part for head in heads for part in _members(target[:, head, :, :width], spec.pairing)]
        if ds[0].size:
            rotation(spec.compute, forward, accumulate, len(heads))(*gs, c1, c2, s1, s2, *ds)
    if width < spec.head_dim:
        rest = target[..., width:]
        _combine(spec, *([(rest, 1)] if accumulate else []), (source[..., width:], 1), out=rest)


def _table_gradients(spec: RopeSpec, inputs: Inputs, results: Outputs) -> None:
    """Σ g_j·x_j and σ_j·Σ g_j·x_p(j): q's heads and k's, both columns of a half table, rounded once."""
    names = [name for name in ("cos", "sin") if name in spec.needs]
    sides = [side for side, heads in (("q", spec.heads), ("k", spec.kv_heads)) if heads is not None]
    own = spec.table_batch == spec.batch
    sums: dict[str, list[Array]] = {"cos": [], "sin": []}
    for side in sides if names else []:
        views = (axes.to_bhsd(_xp(), inputs[n], spec.layout) for n in (f"grad_{side}_embed", side))
        gx = [part for x in views for part in _members(x[..., : spec.rotary_dim], spec.pairing)]
        shape = ((spec.batch,) if own else ()) + (spec.seq, spec.rotary_dim)
        full = {name: _cupy().empty(shape, numpy_dtype(spec.compute)) for name in sums}
        members = [part for x in full.values() for part in _members(x, spec.pairing)]
        table_sums(spec.compute)(*gx, *members, axis=1 if own else (0, 1))
        for name, x in full.items():
            sums[name].append(x)
    for name in names:
        out = results[f"grad_{name}"]
        target = out if own else out.reshape(spec.seq, spec.columns)
        parts = [_members(x, spec.pairing) if spec.table == "half" else (x,) for x in sums[name]]
        held = [(target, 1)] if spec.accumulate else []
        _combine(spec, *held, *((x, 1) for part in parts for x in part), out=target)


def _combine(spec: RopeSpec, *terms: tuple[Array, int], out: Array) -> None:
    """The sum of sign·term in the compute dtype, rounded once into `out`."""
    if out.size:
        arrays, signs = zip(*terms, strict=True)
        combined(spec.compute, signs)(*arrays, out)


def _as_compute(spec: QkvSpec, x: Array) -> Array:
    dtype = numpy_dtype(spec.rope.compute)
    if x.dtype == dtype:
        return x
    wide = _cupy().empty(x.shape, dtype)
    _combine(spec.rope, (x, 1), out=wide)
    return wide


def _finish(spec: QkvSpec, value: Array, out: Array) -> None:
    """Round once into `out`, or add."""
    held = [(out, 1)] if spec.accumulate else []
    _combine(spec.rope, *held, (value, 1), out=out)


def _stacked(spec: QkvSpec, matrices: list[Array]) -> Array:
    """The matrices one below the other, in the compute dtype."""
    return _cupy().concatenate([_as_compute(spec, matrix) for matrix in matrices])


def _packed_gradients(spec: QkvSpec, inputs: Inputs) -> dict[str, Array]:
    """dQ, dK, dV as column blocks of one matrix [tokens, ·], each also under its own name."""
    geometry = spec.rope
    parts = [p for p in "qkv" if {"hidden_states", f"{p}_weight", f"{p}_bias"} & set(spec.needs)]
    packed = _cupy().empty((spec.tokens, sum(map(spec.rows, parts))), numpy_dtype(geometry.compute))
    blocks, start = {"packed": packed}, 0
    for part in parts:
        blocks[part] = packed[:, start : start + spec.rows(part)]
        start += spec.rows(part)
        heads = (geometry.heads if part == "q" else geometry.kv_heads) or 0
        shape = (geometry.batch, heads, geometry.seq, geometry.head_dim)
        view = axes.from_rows(_xp(), blocks[part], shape, geometry.layout)
        if part == "v":
            _combine(geometry, (inputs[_PARTS[part]], 1), out=view)
        else:
            _rotate(geometry, inputs, inputs[_PARTS[part]], view)
    return blocks


def _gemm(a: Array, b: Array) -> Array:
    """A·B of two matrices in IEEE arithmetic. (cupy.matmul follows CUPY_TF32, and cannot be captured.)"""
    c = _cupy().empty((a.shape[0], b.shape[1]), a.dtype)
    multiply(a, b, c, PEDANTIC_64F if a.dtype.itemsize == 8 else PEDANTIC_32F)
    return c
