"""Planted faults: wrong backward functions that shipped somewhere. The judge says no to each, by its rule."""

import numpy as np
import pytest

import ropegrad as rg
from ropegrad.verify import check
from ropegrad.verify.cases import qkv_edge_cases, rope_edge_cases
from ropegrad.verify.runners import options, run_backend

# `right` below knows nothing of adding into `out`.
ROPE = [case for case in rope_edge_cases() if not case.spec.accumulate]
QKV = [case for case in qkv_edge_cases() if not case.spec.accumulate]


def right(case, **changes):
    """The right gradients, of inputs or options changed here."""
    arrays = {name: changes.pop(name, x) for name, x in case.inputs.items()}
    words = options(case.spec) | changes
    function = rg.rope_backward if "q" in arrays else rg.qkv_rope_backward
    results = function(*arrays.values(), **words)
    return {name: np.array(getattr(results, name)) for name in case.outputs}


def changed(case, name, change):
    """The right gradients, one of them changed."""
    results = right(case)
    if name in results:
        results[name] = change(results[name])
    return results


def flip_sine(case):
    return right(case, sin=-case.inputs["sin"])


def own_sine(case):
    return right(case, adjoint="paired" if case.spec.adjoint == "exact" else "exact")


def swapped_tables(case):
    return right(case, cos=case.inputs["sin"], sin=case.inputs["cos"])


def other_pairing(case):
    return right(case, pairing="half" if case.spec.pairing == "interleaved" else "interleaved")


def half_precision_tables(case):
    tables = {n: case.inputs[n].astype(np.float16).astype(case.inputs[n].dtype) for n in ("cos", "sin")}
    return right(case, **tables)


def position_off_by_one(case):
    return right(case, **{n: np.roll(case.inputs[n], 1, axis=-2) for n in ("cos", "sin")})


def inverse_not_transpose(case):
    norm = case.inputs["cos"].astype(np.float64) ** 2 + case.inputs["sin"].astype(np.float64) ** 2
    with np.errstate(all="ignore"):
        tables = {n: (case.inputs[n] / norm).astype(case.inputs[n].dtype) for n in ("cos", "sin")}
    return right(case, **tables)


def kv_heads_missing_from_tables(case):
    return right(case, k=np.zeros_like(case.inputs["k"])) if case.inputs["k"] is not None else right(case)


def last_head_of_k_left_alone(case):
    axis = {"bhsd": 1, "bshd": 2, "sbhd": 2}[case.spec.layout]

    def leave(grad):
        np.moveaxis(grad, axis, 0)[-1:] = np.moveaxis(case.inputs["grad_k_embed"], axis, 0)[-1:]
        return grad

    return changed(case, "grad_k", leave)


def last_token_stale(case):
    return changed(
        case, "grad_sin", lambda x: np.concatenate([x[..., :-1, :], np.zeros_like(x[..., -1:, :])], axis=-2)
    )


def pass_through_is_one(case):
    def ones(grad):
        grad[..., case.spec.rotary_dim :] = 1
        return grad

    return changed(case, "grad_q", ones)


def not_written(case):
    return changed(case, "grad_q", lambda x: np.full_like(x, np.nan))


def zeros(case):
    return {name: np.zeros_like(x) for name, x in right(case).items()}


def copies_upstream(case):
    return changed(case, "grad_q", lambda x: np.array(case.inputs["grad_q_embed"]))


def bfloat16_sums(case):
    import ml_dtypes

    return changed(case, "grad_cos", lambda x: x.astype(ml_dtypes.bfloat16).astype(x.dtype))


def one_element_one_percent_off(case):
    def nudge(x):
        x.reshape(-1)[-1:] *= x.dtype.type(1.01)
        return x

    return changed(case, "grad_k", nudge)


def nan_hidden(case):
    return {name: np.nan_to_num(x, posinf=0, neginf=0) for name, x in right(case).items()}


VALUE_FAULTS = [
    flip_sine, own_sine, swapped_tables, other_pairing, half_precision_tables, position_off_by_one,
    inverse_not_transpose, kv_heads_missing_from_tables, last_head_of_k_left_alone, last_token_stale,
    pass_through_is_one, not_written, zeros, copies_upstream, bfloat16_sums, one_element_one_percent_off,
    nan_hidden,
]  # fmt: skip


def rules(function, cases):
    """The rules that any of the cases finds broken."""
    broken = set()
    for case in cases:
        try:
            broken |= {finding.rule for finding in check(case, function).findings}
        except rg.SpecError:  # the planted change made a call that is none
            continue
    return broken


@pytest.mark.parametrize("fault", VALUE_FAULTS, ids=lambda fault: fault.__name__)
def test_wrong_values_are_found(fault):
    assert rules(fault, ROPE) == {"wrong value"}


def test_the_unchanged_function_is_right():
    assert rules(right, ROPE) == set()
    assert rules(right, QKV) == set()


def missing(case):
    return right(case) | {"grad_cos": None}


def broadcast_shape(case):
    """A shared table's gradient, not summed over the batch."""
    results = right(case)
    if case.spec.table_batch in (None, 1) and "grad_cos" in results:
        shape = (case.spec.batch, *results["grad_cos"].shape[-2:])
        results["grad_cos"] = np.broadcast_to(results["grad_cos"], shape)
    return results


def wider_dtype(case):
    return changed(case, "grad_q", lambda x: x.astype(np.float64))


def test_wrong_forms_are_found():
    assert rules(missing, ROPE) == {"missing gradient"}
    assert rules(broadcast_shape, ROPE) == {"wrong shape, dtype or device"}
    assert rules(wider_dtype, ROPE) == {"wrong shape, dtype or device"}


def test_a_mutated_input_is_found():
    case = rope_edge_cases()[0]
    for name in case.inputs:
        unlocked = np.array(case.inputs[name])
        case.inputs[name] = unlocked

        def spoils(case, unlocked=unlocked):
            results = right(case)
            unlocked.reshape(-1)[-1] += 1
            return results

        broken = [finding for finding in check(case, spoils).findings if finding.rule == "input mutated"]
        assert [finding.array for finding in broken] == [name]


QKV_FAULTS = {
    "dropped value projection": lambda case: right(case, grad_value=np.zeros_like(case.inputs["grad_value"])),
    "rotation forgotten": lambda case: right(
        case, cos=np.ones_like(case.inputs["cos"]), sin=np.zeros_like(case.inputs["sin"])
    ),
    "rotated the wrong way": lambda case: right(case, sin=-case.inputs["sin"]),
    "key and value weights swapped": lambda case: right(
        case, k_weight=case.inputs["v_weight"], v_weight=case.inputs["k_weight"]
    ),
    "TF32 operands": lambda case: right(
        case, hidden_states=tf32(case.inputs["hidden_states"]), q_weight=tf32(case.inputs["q_weight"])
    ),
}


def tf32(x):
    """Rounded to nearest at 11 significand bits."""
    if x.dtype != np.float32:
        return x
    with np.errstate(all="ignore"):
        scaled = x * np.float32(1 + 2**12)
        return np.where(np.isfinite(scaled), scaled - (scaled - x), x)


@pytest.mark.parametrize("fault", QKV_FAULTS.values(), ids=QKV_FAULTS)
def test_wrong_projections_are_found(fault):
    assert rules(fault, QKV) == {"wrong value"}


def test_unwritten_out_is_found(monkeypatch):
    from ropegrad.backends import numpy_tile

    monkeypatch.setattr(numpy_tile, "write_table", lambda *arguments: None)
    assert "wrong value" in rules(lambda case: run_backend(case, "numpy_tiled", into=True), rope_edge_cases())
