"""The public functions: judge the call, choose a backend, hand back what the user asked for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ropegrad import packed
from ropegrad.arrays import Array
from ropegrad.backends import BACKENDS, choose, why_behind
from ropegrad.calls import by_name, qkv_forward_spec, qkv_inputs, qkv_spec, rope_forward_spec, rope_spec
from ropegrad.errors import SpecError
from ropegrad.outputs import (
    QkvBiasGrads,
    QkvGrads,
    QkvOut,
    QkvPackedGrads,
    RopeGrads,
    RopeOut,
    judge_out,
    qkv_kind,
)
from ropegrad.repeats import Repeats, key_of
from ropegrad.spec import QkvSpec, RopeSpec

_REPEATS = Repeats()  # of rope_backward


def rope_backward(
    grad_q_embed: Array | None,
    grad_k_embed: Array | None,
    q: Array | None,
    k: Array | None,
    cos: Array | None,
    sin: Array | None,
    *,
    needs: Iterable[str] | None = None,
    table: str = "full",
    layout: str = "bhsd",
    pairing: str = "half",
    adjoint: str = "exact",
    out: tuple[Array | None, ...] | None = None,
    accumulate: bool = False,
    backend: str | None = None,
) -> RopeGrads:
    """Gradients of rotary position embedding for q, k and the cos and sin tables (benchmark problem 068).

    The forward is y_j = x_j·cos_j + σ_j·x_p(j)·sin_j for each head of q and k, where p(j) is channel j's
    partner and σ_j is −1 for the first member of a pair, +1 for the second. This is its exact adjoint:

        dx_j   = g_j·cos_j − σ_j·g_p(j)·sin_p(j)
        dcos_j = Σ g_j·x_j        dsin_j = Σ σ_j·g_j·x_p(j)      over all heads of q and of k,
                                                               and over what the table was broadcast over

    Source: Su et al., "RoFormer" (2021), eq. 34, differentiated for one cosine and one sine a channel.

    Parameters
    ----------
    grad_q_embed, grad_k_embed, q, k
        [B, H, S, D] and [B, Hkv, S, D] (or as `layout` says), all of one dtype: float16, bfloat16, float32 or
        float64. H is a multiple of Hkv. Both of q's or both of k's may be None: a call without that side.
        An input that only gradients outside `needs` would read may be None.
    cos, sin
        [S, columns], [1, S, columns] or [B, S, columns], of one dtype, which may differ from q's. The rotary
        width R ≤ D follows from the columns; channels R … D−1 pass through.
    needs
        Inputs whose gradient is wanted, of "q", "k", "cos", "sin"; default all. It never changes a value.
    table
        "full": a column a channel (R columns); "half": a column a pair (R/2 columns).
    layout
        "bhsd", "bshd" or "sbhd".
    pairing
        "half": channel j with j ± R/2 (Llama, GPT-NeoX); "interleaved": j with j xor 1 (GPT-J).
    adjoint
        "exact", or "paired": a channel's own sine instead of its partner's. Problem 068 is stated that way;
        it is the gradient of the forward only where the two sines of each pair are equal.
    out
        (grad_q, grad_k, grad_cos, grad_sin) to write into, None where not needed. grad_q may be the very
        array grad_q_embed or q (likewise k); any other overlap is refused.
    accumulate
        Add into `out` instead of overwriting it.
    backend
        Force one by name; default: the fastest that can run these arrays. See `ropegrad.explain`.

    Returns
    -------
    RopeGrads(grad_q, grad_k, grad_cos, grad_sin)
        Each in the shape and dtype of its input; None where not needed. Products and sums are in the widest
        of float32 and the inputs' dtypes, and each result is rounded once (from float64 to a 16-bit dtype by
        way of float32 where the array library converts so). Inputs are never written.

    Raises
    ------
    SpecError
        (a ValueError) before any work, if the arrays or options do not fit; the message says what would.
    """
    arrays = (grad_q_embed, grad_k_embed, q, k, cos, sin)
    words = (needs, table, layout, pairing, adjoint, accumulate, backend)
    key = None if out is None else key_of(arrays, out, *words)
    if out is not None and key is not None and _REPEATS.call(key):
        return RopeGrads(*out)
    inputs = _rope_inputs(*arrays)
    spec = rope_spec(
        inputs, needs=needs, table=table, layout=layout, pairing=pairing, adjoint=adjoint,
        accumulate=accumulate,
    )  # fmt: skip
    chosen = choose(spec, backend)
    given = judge_out(spec, RopeGrads._fields, out, inputs)
    if key is not None and given is not None and chosen.name == "cupy_fused":
        _REPEATS.first(key, spec, inputs | given)
        return RopeGrads(*map(given.get, RopeGrads._fields))
    results = chosen.rope_backward(spec, inputs, given)
    return RopeGrads(*map(results.get, RopeGrads._fields))


def qkv_rope_backward(
    grad_query: Array | None,
    grad_key: Array | None,
    grad_value: Array | None,
    hidden_states: Array | None,
    q_weight: Array | None = None,
    k_weight: Array | None = None,
    v_weight: Array | None = None,
    cos: Array | None = None,
    sin: Array | None = None,
    *,
    qkv_weight: Array | None = None,
    needs: Iterable[str] | None = None,
    table: str = "full",
    layout: str = "bhsd",
    pairing: str = "half",
    precision: str = "highest",
    out: tuple[Array | None, ...] | None = None,
    accumulate: bool = False,
    backend: str | None = None,
) -> QkvGrads | QkvBiasGrads | QkvPackedGrads:
    """Gradients of the Q, K, V projections followed by RoPE on Q and K (benchmark problem 064).

    With dQ, dK the exact adjoint of RoPE (see `rope_backward`) applied to grad_query and grad_key, dV =
    grad_value, all as matrices [tokens, ·], and X the hidden states as [tokens, C]:

        grad_hidden_states = dQ·Wq + dK·Wk + dV·Wv
        grad_q_weight = dQᵀ·X      grad_k_weight = dKᵀ·X      grad_v_weight = dVᵀ·X
        a bias's gradient = the sum of dQ, dK or dV over the tokens

    Parameters
    ----------
    grad_query, grad_key, grad_value
        [B, H, S, D], [B, Hkv, S, D], [B, Hkv, S, D] (or as `layout` says): gradients after RoPE.
    hidden_states
        [B, S, C]; [S, B, C] in layout "sbhd".
    q_weight, k_weight, v_weight
        [H·D, C], [Hkv·D, C], [Hkv·D, C]. Gradients, hidden states and weights share one dtype.
    cos, sin
        As for `rope_backward`; the gradients of the tables are not among this problem's.
    qkv_weight
        [(H + 2·Hkv)·D, C], rows of q, then of k, then of v, in place of the three weights: the packed form.
        Rows in another order, such as GPT-NeoX's (q, k and v of each head together), must be gathered first:
        w.reshape(H, 3, D, C).swapaxes(0, 1).reshape(-1, C), and back for the gradient.
    needs
        Of "hidden_states", "q_weight", "k_weight", "v_weight" (default: these four) and, only when named,
        "q_bias", "k_bias", "v_bias". In the packed form of "hidden_states", "qkv_weight" (default: both) and
        "qkv_bias"; a packed name there is enough where the weight itself is not read.
    precision
        A promise about the products' accuracy: "highest" as IEEE float32, "high" as TF32, "medium" as
        bfloat16. On CPUs every one is served by IEEE arithmetic.
    table, layout, pairing, out, accumulate, backend
        As for `rope_backward`; `out` follows the result's order.

    Returns
    -------
    QkvGrads(grad_hidden_states, grad_q_weight, grad_k_weight, grad_v_weight)
        or, where `needs` names a bias, QkvBiasGrads with grad_q_bias, grad_k_bias, grad_v_bias behind them.
        Weight gradients may be views of one buffer.
    QkvPackedGrads(grad_hidden_states, grad_qkv_weight, grad_qkv_bias)
        in the packed form, each in one array, rows as in qkv_weight. Its parts are written where they belong
        in NumPy, CuPy and `out`; without `out`, the other libraries' are made one by a concatenation.

    Raises
    ------
    SpecError
        (a ValueError) before any work, if the arrays or options do not fit, or name both qkv_weight and one
        of its parts.
    """
    arrays = (grad_query, grad_key, grad_value, hidden_states, q_weight, k_weight, v_weight, cos, sin)
    inputs = qkv_inputs(arrays, qkv_weight)
    spec, is_packed = qkv_spec(
        inputs, needs=needs, table=table, layout=layout, pairing=pairing, precision=precision,
        accumulate=accumulate,
    )  # fmt: skip
    kind = qkv_kind(spec, is_packed)
    run = choose(spec, backend).qkv_rope_backward
    given = judge_out(spec, kind._fields, out, inputs)
    results = packed.backward(run, spec, inputs, given) if is_packed else run(spec, inputs, given)
    return kind(*map(results.get, kind._fields))


def rope(
    q: Array | None,
    k: Array | None,
    cos: Array,
    sin: Array,
    *,
    table: str = "full",
    layout: str = "bhsd",
    pairing: str = "half",
    backend: str | None = None,
) -> RopeOut:
    """Rotary position embedding of q and k: y_j = x_j·cos_j + σ_j·x_p(j)·sin_j.

    Shapes, dtypes and options as for `rope_backward`; q or k may be None. Returns RopeOut(q_embed, k_embed),
    each in the shape and dtype of its input. Raises SpecError, before any work.
    """
    inputs = by_name(("q", "k", "cos", "sin"), (q, k, cos, sin))
    spec = rope_forward_spec(inputs, table=table, layout=layout, pairing=pairing)
    results = choose(spec, backend).rope(spec, inputs)
    return RopeOut(*map(results.get, RopeOut._fields))


def qkv_rope(
    hidden_states: Array,
    q_weight: Array | None = None,
    k_weight: Array | None = None,
    v_weight: Array | None = None,
    cos: Array | None = None,
    sin: Array | None = None,
    *,
    head_dim: int,
    kv_heads: int | None = None,
    q_bias: Array | None = None,
    k_bias: Array | None = None,
    v_bias: Array | None = None,
    qkv_weight: Array | None = None,
    qkv_bias: Array | None = None,
    table: str = "full",
    layout: str = "bhsd",
    pairing: str = "half",
    precision: str = "highest",
    backend: str | None = None,
) -> QkvOut:
    """Q, K, V projections of the hidden states, RoPE on Q and K.

    Shapes, dtypes and options as for `qkv_rope_backward`; head_dim is D, the biases are [H·D], [Hkv·D] and
    [Hkv·D]. In the packed form, qkv_weight, qkv_bias [(H + 2·Hkv)·D] and kv_heads = Hkv take the place of
    the weights and biases. Returns QkvOut(query, key, value) in `layout`. Raises SpecError, before any work.
    """
    names = ("hidden_states", "q_weight", "k_weight", "v_weight", "cos", "sin", "q_bias", "k_bias", "v_bias",
             "qkv_weight", "qkv_bias")  # fmt: skip
    arrays = (hidden_states, q_weight, k_weight, v_weight, cos, sin, q_bias, k_bias, v_bias,
              qkv_weight, qkv_bias)  # fmt: skip
    inputs = by_name(names, arrays)
    spec = qkv_forward_spec(
        inputs, head_dim=head_dim, kv_heads=kv_heads, table=table, layout=layout, pairing=pairing,
        precision=precision,
    )  # fmt: skip
    results = choose(spec, backend).qkv_rope(spec, packed.unpack(spec, inputs))
    return QkvOut(*(results[name] for name in QkvOut._fields))


@dataclass(frozen=True)
class Explanation:
    """What would run, how, and why the others would not. `str()` is meant for reading."""

    spec: RopeSpec | QkvSpec
    backend: str
    details: tuple[str, ...]
    why_not: dict[str, str]

    def __str__(self) -> str:
        lines = [f"backend: {self.backend}", *(f"  {line}" for line in self.details)]
        lines += [f"not {name}: {reason}" for name, reason in self.why_not.items()]
        return "\n".join(lines)


def explain(operation: str, *arrays: Array | None, backend: str | None = None, **options: Any) -> Explanation:
    """Which backend and kernel a call would take, what it would copy, and why not the others.

    `operation` is "rope_backward" or "qkv_rope_backward"; `arrays` and `options` are those of the call,
    with None at the place of each array that is absent. Computes nothing. Raises SpecError where the call
    would.
    """
    out = options.pop("out", None)
    spec: RopeSpec | QkvSpec
    fields: tuple[str, ...]
    if not isinstance(operation, str):
        raise SpecError(f"operation must be a name, got {type(operation).__name__}")
    if operation == "rope_backward":
        inputs = _rope_inputs(*arrays)
        spec, fields = rope_spec(inputs, **options), RopeGrads._fields
    elif operation == "qkv_rope_backward":
        inputs = qkv_inputs(arrays, options.pop("qkv_weight", None))
        spec, is_packed = qkv_spec(inputs, **options)
        fields = qkv_kind(spec, is_packed)._fields
    else:
        raise SpecError(
            f"operation {operation!r} is unknown: it must be 'rope_backward' or 'qkv_rope_backward'"
        )
    chosen = choose(spec, backend)
    judge_out(spec, fields, out, inputs)
    if isinstance(spec, QkvSpec):
        inputs = packed.unpack(spec, inputs)
    why_not = {}
    for other in BACKENDS:
        if other.name != chosen.name:
            reason = other.why_not(spec)
            asked = f"it can run this, but {chosen.name} is asked for"
            why_not[other.name] = reason or (asked if backend else why_behind(other, chosen, spec))
    return Explanation(spec, chosen.name, tuple(chosen.explain(spec, inputs)), why_not)


def _rope_inputs(*arrays: Array | None) -> dict[str, Array]:
    return by_name(("grad_q_embed", "grad_k_embed", "q", "k", "cos", "sin"), arrays)
