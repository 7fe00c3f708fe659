"""The maths in the caller's own namespace: NumPy, CuPy, PyTorch, JAX, Dask, array-api-strict.

Whole arrays at a time, so it needs several temporaries of the size of q. Nothing here is tuned.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType

from ropegrad.arrays import Array, dtype_in, namespace
from ropegrad.backends.base import Inputs, Outputs, quiet
from ropegrad.maths import layout as axes
from ropegrad.maths import projection, rope
from ropegrad.spec import PRECISIONS, QkvSpec, RopeSpec


@dataclass(frozen=True)
class Portable:
    """The formulas of `ropegrad.maths`, run as they stand."""

    name: str = "portable"

    def why_not(self, spec: RopeSpec | QkvSpec) -> str | None:
        """None, but where a global switch of PyTorch would round the products behind our back."""
        if isinstance(spec, QkvSpec) and spec.namespace == "torch":
            return _torch_rounds_products(spec)
        return None

    def explain(self, spec: RopeSpec | QkvSpec, inputs: Inputs) -> list[str]:
        """Temporaries, in words: the namespace decides."""
        geometry = spec if isinstance(spec, RopeSpec) else spec.rope
        lines = [f"array-API operations of {spec.namespace}, computing in {geometry.compute}"]
        if geometry.compute != geometry.dtype:
            lines.append(f"copies every {geometry.dtype} array to {geometry.compute}")
        if isinstance(spec, QkvSpec):
            lines.append("copies the rotated gradients and the weights into one packed matrix each")
        return lines

    @quiet
    def rope_backward(self, spec: RopeSpec, inputs: Inputs, out: Outputs | None) -> Outputs:
        """Gradients of RoPE; see `ropegrad.rope_backward`."""
        xp, x = _prepare(spec, inputs)
        results = {}
        for side in ("q", "k"):
            if side in spec.needs:
                results[f"grad_{side}"] = _rotate_back(xp, spec, x[f"grad_{side}_embed"], x["cos"], x["sin"])
        formulas = {"cos": rope.cos_backward, "sin": rope.sin_backward}
        for name, formula in formulas.items():
            if name in spec.needs:
                results[f"grad_{name}"] = _table_gradient(xp, spec, x, formula)
        return _deliver(xp, spec, results, out)

    @quiet
    def qkv_rope_backward(self, spec: QkvSpec, inputs: Inputs, out: Outputs | None) -> Outputs:
        """Gradients of the projections and RoPE; see `ropegrad.qkv_rope_backward`."""
        geometry = spec.rope
        xp, x = _prepare(geometry, inputs)
        matmul = _matmul(xp)
        rows = {}
        for part, name in (("q", "grad_query"), ("k", "grad_key"), ("v", "grad_value")):
            if {"hidden_states", f"{part}_weight", f"{part}_bias"} & set(spec.needs):
                grad = x[name]
                if part != "v":
                    grad = _rotate_back(xp, geometry, grad, x["cos"], x["sin"])
                rows[part] = axes.to_rows(xp, axes.from_bhsd(xp, grad, geometry.layout), geometry.layout)
        results = {}
        if "hidden_states" in spec.needs:
            weights = xp.concat([x["q_weight"], x["k_weight"], x["v_weight"]], axis=0)
            packed = xp.concat([rows["q"], rows["k"], rows["v"]], axis=1)
            hidden = projection.hidden_backward(xp, packed, weights, matmul=matmul)
            results["grad_hidden_states"] = axes.reshape(xp, hidden, spec.hidden_shape)
        results |= _weight_gradients(xp, spec, rows, x.get("hidden_states"), matmul)
        for part in "qkv":
            if f"{part}_bias" in spec.needs:
                results[f"grad_{part}_bias"] = projection.bias_backward(xp, rows[part])
        return _deliver(xp, spec, results, out)

    @quiet
    def rope(self, spec: RopeSpec, inputs: Inputs) -> Outputs:
        """RoPE of q and k; see `ropegrad.rope`."""
        xp, x = _prepare(spec, inputs)
        rotated = {f"{side}_embed": _rotate(xp, spec, x[side], x["cos"], x["sin"]) for side in spec.needs}
        return _cast(xp, spec, {k: axes.from_bhsd(xp, v, spec.layout) for k, v in rotated.items()})

    @quiet
    def qkv_rope(self, spec: QkvSpec, inputs: Inputs) -> Outputs:
        """Projections and RoPE; see `ropegrad.qkv_rope`."""
        geometry = spec.rope
        xp, x = _prepare(geometry, inputs)
        hidden = axes.hidden_rows(xp, x["hidden_states"])
        results = {}
        for part, name in (("q", "query"), ("k", "key"), ("v", "value")):
            rows = projection.project(
                xp, hidden, x[f"{part}_weight"], x.get(f"{part}_bias"), matmul=_matmul(xp)
            )
            heads = (geometry.heads if part == "q" else geometry.kv_heads) or 0
            shape = (geometry.batch, heads, geometry.seq, geometry.head_dim)
            projected = axes.from_rows(xp, rows, shape, geometry.layout)
            if part != "v":
                bhsd = axes.to_bhsd(xp, projected, geometry.layout)
                projected = axes.from_bhsd(
                    xp, _rotate(xp, geometry, bhsd, x["cos"], x["sin"]), geometry.layout
                )
            results[name] = projected
        return _cast(xp, geometry, results)


_HEADED = ("grad_q_embed", "grad_k_embed", "q", "k", "grad_query", "grad_key", "grad_value")


def _prepare(spec: RopeSpec, inputs: Inputs) -> tuple[ModuleType, dict[str, Array]]:
    """The namespace, and the inputs in the compute dtype: heads as [B, H, S, D], tables as [B or 1, S, ·]."""
    xp = namespace(next(array for array in inputs.values() if array is not None))
    compute = dtype_in(xp, spec.compute)
    prepared = {}
    for name, array in inputs.items():
        if array is None:
            continue
        if name in ("cos", "sin") and spec.table_batch is None:
            array = array[None, ...]
        elif name in _HEADED:
            array = axes.to_bhsd(xp, array, spec.layout)
        prepared[name] = xp.astype(array, compute, copy=False)
    return xp, prepared


def _rotate(xp: ModuleType, spec: RopeSpec, x: Array, cos: Array, sin: Array) -> Array:
    width = spec.rotary_dim
    y = rope.rope(xp, x[..., :width], cos, sin, pairing=spec.pairing, table=spec.table)
    return y if width == spec.head_dim else xp.concat([y, x[..., width:]], axis=-1)


def _rotate_back(xp: ModuleType, spec: RopeSpec, grad: Array, cos: Array, sin: Array) -> Array:
    width = spec.rotary_dim
    words = {"pairing": spec.pairing, "table": spec.table, "adjoint": spec.adjoint}
    back = rope.rope_backward(xp, grad[..., :width], cos, sin, **words)
    return back if width == spec.head_dim else xp.concat([back, grad[..., width:]], axis=-1)


def _table_gradient(xp: ModuleType, spec: RopeSpec, x: dict[str, Array], formula: rope.TableFormula) -> Array:
    """Sum over q's heads, then k's, then whatever the table was broadcast over."""
    width = spec.rotary_dim
    sides = [side for side, heads in (("q", spec.heads), ("k", spec.kv_heads)) if heads is not None]
    parts = [
        formula(
            xp, x[f"grad_{side}_embed"][..., :width], x[side][..., :width],
            pairing=spec.pairing, table=spec.table,
        )
        for side in sides
    ]  # fmt: skip
    total = parts[0] if len(parts) == 1 else parts[0] + parts[1]
    if spec.table_batch != spec.batch:
        total = xp.sum(total, axis=0, keepdims=True)
    return axes.reshape(xp, total, spec.table_shape)


def _weight_gradients(
    xp: ModuleType, spec: QkvSpec, rows: dict[str, Array], hidden: Array, matmul: projection.Matmul
) -> dict[str, Array]:
    """One product for all wanted weights; each gets its rows of the result."""
    parts = [part for part in "qkv" if f"{part}_weight" in spec.needs]
    if not parts:
        return {}
    packed = rows[parts[0]] if len(parts) == 1 else xp.concat([rows[part] for part in parts], axis=1)
    product = projection.weight_backward(xp, packed, axes.hidden_rows(xp, hidden), matmul=matmul)
    results, start = {}, 0
    for part in parts:
        results[f"grad_{part}_weight"] = product[start : start + spec.rows(part), :]
        start += spec.rows(part)
    return results


def _cast(xp: ModuleType, spec: RopeSpec, results: dict[str, Array]) -> Outputs:
    return {name: xp.astype(value, dtype_in(xp, spec.dtype), copy=False) for name, value in results.items()}


def _deliver(
    xp: ModuleType, spec: RopeSpec | QkvSpec, results: dict[str, Array], out: Outputs | None
) -> Outputs:
    """Round once to the output's dtype, into `out` where given."""
    geometry = spec if isinstance(spec, RopeSpec) else spec.rope
    delivered = {}
    for need in spec.needs:
        name = f"grad_{need}"
        value = results[name]
        if need in ("q", "k"):
            value = axes.from_bhsd(xp, value, geometry.layout)
        if out is None:
            delivered[name] = xp.astype(value, dtype_in(xp, spec.output(need)[1]), copy=False)
            continue
        if spec.accumulate:
            value = xp.astype(out[name], dtype_in(xp, geometry.compute), copy=False) + value
        value = xp.astype(value, dtype_in(xp, spec.output(need)[1]), copy=False)
        out[name][...] = (
            value.detach() if hasattr(value, "detach") else value
        )  # out= takes no part in autograd
        delivered[name] = out[name]
    return delivered


def _matmul(xp: ModuleType) -> projection.Matmul:
    """The namespace's product in IEEE arithmetic of the operands' dtype."""
    words = {"precision": "highest"} if xp.__name__ == "jax.numpy" else {}  # its default is a global setting

    def product(a: Array, b: Array) -> Array:
        if 0 in a.shape or 0 in b.shape:  # Dask has no empty products
            shape = (a.shape[0], b.shape[1])
            return xp.zeros(shape, dtype=a.dtype, device=getattr(a, "device", None))
        return xp.matmul(a, b, **words)

    return product


def _torch_rounds_products(spec: QkvSpec) -> str | None:
    torch = sys.modules["torch"]
    kind = spec.rope.device.partition(":")[0]
    if kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind):
        return f"torch.autocast is on for {kind} and would round the matrix products: leave it for this call"
    try:
        allowed = torch.get_float32_matmul_precision()
    except RuntimeError:  # PyTorch's newer switches and this one exclude each other
        return (
            "torch's fp32_precision switches are set and may round the matrix products: "
            "set them back to 'none', or use torch.set_float32_matmul_precision"
        )
    if PRECISIONS.index(allowed) > PRECISIONS.index(spec.precision):
        return (
            f"torch.get_float32_matmul_precision() is {allowed!r} and would break "
            f"precision={spec.precision!r}: set it to {spec.precision!r}, or ask for precision={allowed!r}"
        )
    return None
