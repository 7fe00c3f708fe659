"""Bad calls: SpecError says what was passed and what would be right, and nothing has been written.

In the tables below a change is the new value of an argument, or a function of a good call's value.
"""

import re

import ml_dtypes
import numpy as np
import pytest
from conftest import need
from hypothesis import event, given, settings
from hypothesis import strategies as st

import ropegrad as rg

B, H, KV, S, D, R, C = 2, 4, 2, 3, 6, 4, 5
AXES = {"bhsd": (B, H, S, D), "bshd": (B, S, H, D), "sbhd": (S, B, H, D)}
DTYPES = "float16, bfloat16, float32, float64"


def numbers(*shape):
    """Small whole numbers: every sum of their products is exact in float32."""
    return (np.arange(np.prod(shape)).reshape(shape) * 7 % 11 - 5.0).astype(np.float32)


def good(operation):
    """The arguments of a call that is right, by name."""
    q, k, table = (B, H, S, D), (B, KV, S, D), (B, S, R)
    tables = {"cos": numbers(*table), "sin": numbers(*table) + 1}
    weights = {"q_weight": numbers(H * D, C), "k_weight": numbers(KV * D, C), "v_weight": numbers(KV * D, C)}
    hidden = {"hidden_states": numbers(B, S, C)} | weights
    if operation == "rope_backward":
        grads = {"grad_q_embed": numbers(*q), "grad_k_embed": numbers(*k)}
        return grads | {"q": numbers(*q), "k": numbers(*k)} | tables
    if operation == "qkv_rope_backward":
        grads = {"grad_query": numbers(*q), "grad_key": numbers(*k), "grad_value": numbers(*k)}
        return grads | hidden | tables
    if operation == "rope":
        return {"q": numbers(*q), "k": numbers(*k)} | tables
    if operation == "qkv_rope":
        biases = {"q_bias": numbers(H * D), "k_bias": numbers(KV * D), "v_bias": numbers(KV * D)}
        return hidden | tables | biases | {"head_dim": D}
    return {"positions": np.arange(S), "rotary_dim": R}


def outputs(operation, **changes):
    """A tuple for out= with poison in it."""
    call = good(operation)
    names = ("q", "k", "cos", "sin")
    if operation == "qkv_rope_backward":
        names = ("hidden_states", "q_weight", "k_weight", "v_weight")
    made = {name: np.full_like(call[name], np.nan) for name in names}
    return tuple(changes.get(name, array) for name, array in made.items())


def changed(call, changes):
    return call | {n: v(call[n]) if callable(v) and n in call else v for n, v in changes.items()}


def contents(call):
    """The bytes of every array in the call, those in out= too."""
    found = [*call.values(), *(call["out"] if isinstance(call.get("out"), tuple) else ())]
    return [np.asarray(array).tobytes() for array in found if hasattr(array, "shape")]


def refuse(operation, changes, *wanted):
    """The call raises SpecError with a text that matches all `wanted`, and has written nothing."""
    call = changed(good(operation), changes)
    before = contents(call)
    with pytest.raises(rg.SpecError) as refusal:
        getattr(rg, operation)(**call)
    for pattern in wanted:
        assert re.search(pattern, str(refusal.value)), f"{refusal.value!s} lacks {pattern}"
    assert contents(call) == before
    if operation.endswith("backward"):
        arrays = [call.pop(name) for name in good(operation)]
        with pytest.raises(rg.SpecError, match=re.escape(str(refusal.value))):
            rg.explain(operation, *arrays, **call)


def test_the_calls_before_their_change_are_right():
    for operation in ("rope", "qkv_rope", "rope_tables"):
        getattr(rg, operation)(**good(operation))
    for operation in ("rope_backward", "qkv_rope_backward"):
        given = outputs(operation)
        results = getattr(rg, operation)(**good(operation), out=given)
        assert all(result is array for result, array in zip(results, given, strict=True))
        assert all(np.isfinite(array).all() for array in given)


# ---- shapes ----------------------------------------------------------------------------------------------

OPERATIONS = ("rope_backward", "qkv_rope_backward", "rope", "qkv_rope")
ARRAYS = [(o, n) for o in OPERATIONS for n, array in good(o).items() if isinstance(array, np.ndarray)]


@pytest.mark.parametrize(("operation", "name"), ARRAYS)
def test_one_axis_of_one_array_has_another_size(operation, name):
    shape = good(operation)[name].shape
    for axis, size in enumerate(shape):
        grown = tuple(size + (i == axis) for i, size in enumerate(shape))
        refuse(
            operation, {name: numbers(*grown)}, rf"\b{size + 1}\b", rf"\b{size}\b|multiple", "must|may|pass"
        )


@pytest.mark.parametrize(("operation", "name"), ARRAYS)
def test_one_array_has_an_axis_too_few_or_too_many(operation, name):
    array = good(operation)[name]
    for wrong in (array[0, ...], array[None]):
        refuse(operation, {name: wrong}, re.escape(str(wrong.shape)), "must")


SHAPES = [
    ("rope_backward", {"cos": numbers(R), "sin": numbers(R)}, r"\(4,\).*\[S, columns\]"),
    ("rope_backward", {"cos": numbers(1, 1, S, R), "sin": numbers(1, 1, S, R)}, r"\(1, 1, 3, 4\).*must be"),
    ("rope_backward", {"cos": numbers(S - 1, R), "sin": numbers(S - 1, R)}, "2 rows.*3 tokens.*one row a"),
    ("rope_backward", {"cos": numbers(S + 1, R), "sin": numbers(S + 1, R)}, "4 rows.*3 tokens.*one row a"),
    ("rope_backward", {"cos": numbers(3, S, R), "sin": numbers(3, S, R)}, "batch 3.*must be 1 or q's 2"),
    ("rope_backward", {"cos": numbers(S, 5), "sin": numbers(S, 5)}, "even, got 5.*columns come in pairs"),
    ("rope_backward", {"cos": numbers(S, 8), "sin": numbers(S, 8)}, "width 8.*head_dim 6.*narrower"),
    ("rope_backward", {"table": "half"}, "width 8 is larger than head_dim 6.*table='full'"),
    (
        "rope_backward",
        {"q": numbers(B, 5, S, D), "grad_q_embed": numbers(B, 5, S, D)},
        "5 heads and k 2.*mult",
    ),
    ("rope_backward", {"k": numbers(B, 0, S, D), "grad_k_embed": numbers(B, 0, S, D)}, "k has 0.*pass None"),
    ("rope_backward", {"k": numbers(B, 8, S, D), "grad_k_embed": numbers(B, 8, S, D)}, "4 heads and k 8"),
    (
        "rope_backward",
        {"layout": "bshd"},
        r"k's axes .*\[2, 3, 2, 6\], q's .*\[2, 3, 4, 6\].*only.*may differ",
    ),
    ("rope_backward", {"layout": "sbhd"}, r"\[4, 3, 2, 6\]: only the number of heads may differ"),
    ("rope", {"k": numbers(B, KV, 1, D)}, r"\[2, 2, 1, 6\].*only the number of heads may differ"),
    ("qkv_rope_backward", {"k_weight": numbers(H * D, C)}, "24 rows.*heads x head_dim = 2 x 6"),
    ("qkv_rope", {"head_dim": 5}, "q_weight has 24 rows.*multiple of head_dim 5"),
    ("qkv_rope", {"head_dim": 0}, "head_dim must be positive, got 0"),
    ("qkv_rope", {"head_dim": 6.0}, "head_dim=6.0 is no whole number: pass an int"),
    ("qkv_rope", {"head_dim": None}, "head_dim=None is no whole number: pass an int"),
]


@pytest.mark.parametrize(("operation", "changes", "wanted"), SHAPES)
def test_shapes_that_do_not_fit(operation, changes, wanted):
    refuse(operation, changes, wanted)


# ---- what is no array, or none that can be computed with ---------------------------------------------------

NON_ARRAYS = {
    "a list": (lambda x: x.tolist(), "is a list, not an array: pass an array of NumPy"),
    "a float": (1.5, "is a float, not an array: pass"),
    "a NumPy scalar": (np.float32(1.5), "is a float32, not an array: pass"),
    "a string": ("q", "is a str, not an array: pass"),
    "a masked array": (np.ma.masked_array, r"is a MaskedArray: pass the plain array, numpy.asarray\("),
    "a record array": (lambda x: x.view(np.recarray), r"is a recarray: pass the plain array"),
}
WRONG = [np.int32, np.uint8, np.bool_, np.complex64, object, ">f4", ml_dtypes.float8_e4m3fn, "M8[s]"]
WRONG += [np.longdouble] if np.dtype(np.longdouble) != np.float64 else []


@pytest.mark.parametrize("kind", NON_ARRAYS)
def test_an_argument_is_no_array(kind):
    change, wanted = NON_ARRAYS[kind]
    for operation, name in ARRAYS:
        refuse(operation, {name: change}, f"{name} {wanted}")


def test_a_matrix_is_no_array():
    with pytest.warns(PendingDeprecationWarning):
        matrix = np.matrix(numbers(S, R))
    for operation in OPERATIONS:
        refuse(operation, {"cos": matrix}, r"cos is a matrix: pass the plain array, numpy.asarray\(cos\)")


@pytest.mark.parametrize("dtype", [np.dtype(dtype) for dtype in WRONG], ids=str)
def test_an_array_has_a_dtype_that_cannot_be_computed_with(dtype):
    for operation, name in ARRAYS:
        of_complex = "real tables" if name in ("cos", "sin") else "real pairs"
        shown, remedy = re.escape(str(dtype)), of_complex if dtype.kind == "c" else "convert"
        refuse(operation, {name: lambda x: x.astype(dtype)}, f"{name} has dtype {shown}.*{DTYPES}.*{remedy}")


@pytest.mark.parametrize(("operation", "name"), ARRAYS)
def test_one_array_has_another_dtype_than_its_fellows(operation, name):
    for dtype in (np.float16, np.float64, ml_dtypes.bfloat16):
        dtype = np.dtype(dtype)
        refuse(operation, {name: lambda x, d=dtype: x.astype(d)}, str(dtype), "float32", "must|only")


def absent(operation, *names):
    return operation, dict.fromkeys(names)


MISSING = [
    (*absent("rope_backward", *good("rope_backward")), "every array is None: pass"),
    (*absent("rope_backward", "grad_q_embed", "q", "grad_k_embed", "k"), "q and k are both absent.*sums"),
    (*absent("rope_backward", "grad_q_embed"), "grad_q_embed is None.*of q reads it: pass it or leave"),
    (*absent("rope_backward", "q"), "q is None, but the gradient of cos reads it: pass it or leave it out"),
    (*absent("rope_backward", "k"), "k is None, but the gradient of cos reads it: pass it or leave it out"),
    (*absent("rope_backward", "cos"), "cos is None, but the gradient of q reads it"),
    (*absent("rope_backward", "sin"), "sin is None, but the gradient of q reads it"),
    ("rope_backward", {"q": None, "grad_q_embed": None, "needs": ("q", "k")}, "grad_q_embed is None.*of q"),
    ("rope_backward", {"k": None, "grad_k_embed": None, "needs": ("k",)}, "grad_k_embed is None.*of k"),
    ("rope_backward", {"sin": None, "needs": ("sin",)}, "sin is None, but the gradient of sin reads it"),
    (*absent("rope", "q", "k"), "q and k are all None: pass those of q or of k"),
    (*absent("rope", "cos"), "cos is None: the forward reads both tables"),
    (*absent("rope", "sin"), "sin is None: the forward reads both tables"),
    (*absent("qkv_rope_backward", *good("qkv_rope_backward")), "every array is None|grad_query is None"),
    *((*absent("qkv_rope_backward", name), f"{name} is None, but the gradient of .* reads it: pass it")
      for name in good("qkv_rope_backward")),
    ("qkv_rope_backward", {"grad_key": None, "needs": ("k_bias",)}, "grad_key is None.*of k_bias"),
    ("qkv_rope_backward", {"cos": None, "needs": ("q_weight",)}, "cos is None.*of q_weight"),
    *((*absent("qkv_rope", name), f"{name} is None: the forward reads it")
      for name in ("hidden_states", "q_weight", "k_weight", "v_weight", "cos", "sin")),
]  # fmt: skip


@pytest.mark.parametrize(("operation", "changes", "wanted"), MISSING)
def test_an_array_that_is_read_is_missing(operation, changes, wanted):
    refuse(operation, changes, wanted)


# ---- options ---------------------------------------------------------------------------------------------

WORDS = [
    ("layout", "bhds", "'bhsd', 'bshd', 'sbhd'"),
    ("pairing", "interleave", "'half', 'interleaved'"),
    ("pairing", None, "'half', 'interleaved'"),
    ("table", "Full", "'full', 'half'"),
    ("table", True, "'full', 'half'"),
    ("adjoint", "inverse", "'exact', 'paired'"),
    ("precision", "tf32", "'highest', 'high', 'medium'"),
    ("backend", "cuda", "'numpy_tiled'"),
    ("layout", ["bhsd"], "'bhsd'"),
    ("layout", np.array(["bhsd", "bshd"]), "'bhsd'"),
]
TAKES = {
    "rope_backward": ("layout", "pairing", "table", "adjoint", "backend"),
    "qkv_rope_backward": ("layout", "pairing", "table", "precision", "backend"),
    "rope": ("layout", "pairing", "table", "backend"),
    "qkv_rope": ("layout", "pairing", "table", "precision", "backend"),
    "rope_tables": ("pairing", "table"),
}


@pytest.mark.parametrize(("option", "word", "allowed"), WORDS)
def test_an_option_is_no_word_of_its_own(option, word, allowed):
    for operation, options in TAKES.items():
        if option in options:
            shown = re.escape(f"{option}={word!r} is unknown: it must be one of ")
            refuse(operation, {option: word}, f"{shown}.*{allowed}")


NEEDS = [
    ("rope_backward", "q", "needs='q' is a string: pass a tuple such as"),
    ("rope_backward", (), "needs is empty: name some of q, k, cos, sin"),
    ("rope_backward", ("q", "grad_k"), "needs has 'grad_k': it must name some of q, k, cos, sin"),
    ("rope_backward", 5, "needs=5 is no tuple of names"),
    ("rope_backward", ("q", 3), "needs has 3: it must"),
    ("rope_backward", ("q", "k", "q"), "needs names 'q' more than once"),
    ("qkv_rope_backward", "hidden_states", "is a string: pass a tuple such as"),
    ("qkv_rope_backward", (), "needs is empty: name some of hidden_states"),
    ("qkv_rope_backward", ("cos",), "needs has 'cos': it must name some of hidden_states, .*v_bias"),
]


@pytest.mark.parametrize(("operation", "needs", "wanted"), NEEDS)
def test_needs_does_not_name_inputs(operation, needs, wanted):
    refuse(operation, {"needs": needs}, wanted)


def test_explain_is_asked_about_what_it_does_not_know():
    arrays = good("rope_backward").values()
    with pytest.raises(rg.SpecError, match="'rope' is unknown: it must be 'rope_backward' or"):
        rg.explain("rope", *arrays)
    with pytest.raises(rg.SpecError, match="5 arrays given: the operation takes 6, grad_q_embed"):
        rg.explain("rope_backward", *list(arrays)[:5])


# ---- out= ------------------------------------------------------------------------------------------------


def frozen(array):
    array = array.copy()
    array.flags.writeable = False
    return array


def overlapping():
    """Two windows of q's shape into one buffer that share all but a head."""
    buffer = np.zeros((B, H + 1, S, D), np.float32)
    return buffer[:, 1:], buffer[:, :-1]


def bad_outs():
    """(operation, other changes, what the message holds) for out= of every wrong kind."""
    rope, qkv = "rope_backward", "qkv_rope_backward"
    q = numbers(B, H, S, D)
    first, second = overlapping()
    both = {"grad_k_embed": q, "k": q}
    yield rope, {"out": list(outputs(rope))}, "out is a list of 4: it must be a tuple .*grad_sin"
    yield rope, {"out": outputs(rope)[:3]}, "out is a tuple of 3: it must be a tuple .*grad_q, grad_k"
    yield rope, {"out": q}, "out is a ndarray: it must be a tuple"
    yield rope, {"out": outputs(rope, k=None)}, "out's grad_k is None, but needs asks for it: pass an array"
    yield rope, {"out": outputs(rope), "needs": ("q", "k", "cos")}, "array for grad_sin.*put None there"
    yield rope, {"accumulate": True}, "accumulate=True adds into out=: pass the arrays to add to"
    yield rope, {"out": outputs(rope, q=q[:, 1:])}, r"grad_q has shape \(2, 3, 3, 6\).*\(2, 4, 3, 6\)"
    yield rope, {"out": outputs(rope, cos=q[0, 0, :, :R])}, r"grad_cos has shape \(3, 4\).*\(2, 3, 4\)"
    yield rope, {"out": outputs(rope, q=q.astype(float))}, "grad_q has dtype float64: it must be float32"
    yield rope, {"out": outputs(rope, q=q.astype(int))}, f"grad_q has dtype int64.*{DTYPES}"
    yield rope, {"out": outputs(rope, q=q.tolist())}, "grad_q is a list, not an array: pass"
    yield rope, {"out": outputs(rope, q=frozen(q))}, "grad_q is read-only: pass an array that can be written"
    yield rope, {"out": outputs(rope, q=np.broadcast_to(q[:, :1], q.shape).view())}, "read-only|share memory"
    yield (
        rope,
        {"out": outputs(rope, q=np.lib.stride_tricks.as_strided(q, q.shape, (288, 0, 24, 4)))},
        "share",
    )
    yield (
        rope,
        {"out": outputs(rope, q=np.lib.stride_tricks.as_strided(q, q.shape, (288, 72, 20, 4)))},
        "share",
    )
    yield rope, {"out": outputs(rope, q=first, k=second), **both}, "grad_q and grad_k overlap.*each its own"
    yield rope, {"out": outputs(rope, q=first), "q": second}, "grad_q overlaps q in memory: give it its own"
    yield rope, {"out": outputs(rope, q=first), "grad_q_embed": second}, "grad_q overlaps grad_q_embed"
    yield rope, {"out": outputs(rope, q=q), "grad_q_embed": q[:, ::-1]}, "grad_q overlaps grad_q_embed"
    yield (
        rope,
        {"out": outputs(rope, k=q), "grad_q_embed": q, **both, "grad_k_embed": q.copy(), "k": q.copy()},
        "grad_k overlaps grad_q_embed",
    )
    yield rope, {"out": outputs(rope, q=q, k=q.copy()), **both}, "grad_q overlaps grad_k_embed in memory"
    table = numbers(B, S, R)
    yield rope, {"out": outputs(rope, cos=table), "cos": table}, "grad_cos overlaps cos in memory: give it"
    yield rope, {"out": outputs(rope, cos=table, sin=table)}, "grad_cos and grad_sin overlap"
    yield qkv, {"out": (*outputs(qkv), None, None, None)}, "out is a tuple of 7: it must be a tuple"
    yield qkv, {"out": outputs(qkv), "needs": ("q_bias",)}, "tuple of 4.*grad_v_bias"
    yield qkv, {"out": outputs(qkv, q_weight=None)}, "grad_q_weight is None, but needs asks"
    yield qkv, {"out": outputs(qkv, q_weight=numbers(C, H * D))}, r"shape \(5, 24\): it must be \(24, 5\)"
    weight = numbers(H * D, C)
    yield qkv, {"out": outputs(qkv, q_weight=weight), "q_weight": weight}, "grad_q_weight overlaps q_weight"
    yield qkv, {"accumulate": True}, "pass the arrays to add to"
    yield rope, {"accumulate": "no", "out": outputs(rope)}, "accumulate='no' must be True or False"
    yield qkv, {"accumulate": 1, "out": outputs(qkv)}, "accumulate=1 must be True or False"


@pytest.mark.parametrize(("operation", "changes", "wanted"), [*bad_outs()])
def test_out_cannot_take_the_gradients(operation, changes, wanted):
    refuse(operation, changes, wanted)


# ---- one array for the three weights -----------------------------------------------------------------------


def bad_packed():
    """(operation, changes to a good packed call, what the message holds)."""
    back, ahead = "qkv_rope_backward", "qkv_rope"
    rows = (H + 2 * KV) * D
    weight = numbers(rows, C)
    hidden = numbers(B, S, C)
    both = "either one packed array or its three parts"
    names = "must name some of hidden_states, qkv_weight, qkv_bias$"
    named = "out is a tuple of {}: it must be a tuple .*grad_hidden_states, grad_qkv_weight, grad_qkv_bias"
    given = (hidden.copy(), weight.copy(), None)
    yield back, {"k_weight": numbers(KV * D, C)}, f"names qkv_weight and k_weight: pass, .*{both}"
    yield back, {"needs": ("hidden_states", "q_weight")}, f"names qkv_weight and q_weight: .*{both}"
    yield back, {"needs": ("qkv_weight", "v_bias")}, f"names qkv_weight and v_bias: .*{both}"
    yield back, {"needs": ("qkv",)}, f"needs has 'qkv': it {names}"
    yield back, {"needs": ("qkv_bias", "qkv_bias")}, "names 'qkv_bias' more than once"
    yield back, {"needs": ()}, "needs is empty: name some of hidden_states, qkv_weight, qkv_bias"
    yield (
        back,
        {"qkv_weight": None, "needs": ("hidden_states", "qkv_bias")},
        "qkv_weight is None, but .*of hid",
    )
    for name in ("grad_query", "grad_key", "grad_value", "hidden_states", "cos", "sin"):
        yield back, {name: None, "needs": ("qkv_weight",)}, f"{name} is None, but the gradient of qkv_weight"
    yield back, {"qkv_weight": weight[1:]}, r"qkv_weight has 47 rows.* = \(4 \+ 2 \+ 2\) x 6 = 48"
    yield back, {"qkv_weight": weight[:, 1:]}, r"qkv_weight has shape \(48, 4\).*hidden size 5"
    one = {"qkv_weight": None, "q_weight": weight}
    three = {"k_weight": numbers(KV * D, C), "v_weight": numbers(KV * D, C)}
    yield back, one, "k_weight is None, .*; one weight for q, k and v is passed as qkv_weight="
    yield (
        back,
        one | three,
        "q_weight has 48 rows: .*; those are q's, k's and v's rows: pass it as qkv_weight=",
    )
    yield back, {"qkv_weight": weight.T}, r"qkv_weight has shape \(5, 48\).*; transpose it, weights are"
    yield back, {"qkv_weight": weight[0]}, r"qkv_weight has shape \(5,\): it must have 2 axes"
    yield back, {"qkv_weight": weight.astype(float)}, "qkv_weight has dtype float64, the others float32"
    yield back, {"qkv_weight": weight.tolist()}, "qkv_weight is a list, not an array: pass"
    yield back, {"out": given[:2]}, named.format(2)
    yield back, {"out": (*given, None)}, named.format(4)
    yield back, {"out": (given[0], None, None)}, "grad_qkv_weight is None, but needs asks for it"
    yield (
        back,
        {"out": (*given[:2], numbers(rows))},
        "out has an array for grad_qkv_bias, which needs does not",
    )
    yield (
        back,
        {"out": (given[0], weight[:-1], None)},
        r"grad_qkv_weight has shape \(47, 5\): it must be \(48, 5",
    )
    yield back, {"out": (given[0], frozen(weight), None)}, "grad_qkv_weight is read-only"
    yield back, {"out": (given[0], weight, None), "qkv_weight": weight}, "grad_qkv_weight overlaps qkv_weight"
    yield back, {"accumulate": True}, "pass the arrays to add to"
    yield ahead, {"q_weight": numbers(H * D, C)}, f"names qkv_weight and q_weight: .*{both}"
    yield ahead, {"v_bias": numbers(KV * D)}, f"names qkv_weight and v_bias: .*{both}"
    yield ahead, {"qkv_weight": None, "qkv_bias": numbers(rows)}, "qkv_weight is None: the forward reads it"
    yield ahead, {"qkv_weight": weight[1:]}, "qkv_weight has 47 rows.*multiple of head_dim 6"
    yield ahead, {"qkv_bias": numbers(rows - 1)}, r"qkv_bias has 47 rows.*\(4 \+ 2 \+ 2\) x 6 = 48"
    yield ahead, {"qkv_bias": weight}, r"qkv_bias has shape \(48, 5\): it must have 1 axes"
    yield ahead, {"kv_heads": None}, "kv_heads is None: pass the number of k's heads"
    yield ahead, {"kv_heads": 2.0}, "kv_heads=2.0 is no whole number"
    yield ahead, {"kv_heads": -1}, "kv_heads=-1 must be a whole number, 0 or more"
    yield ahead, {"kv_heads": 0}, "k has 0 heads"
    yield ahead, {"kv_heads": 5}, "rows of 8 heads: it must have those of k and v, 2 x 5, and of q"
    yield ahead, {"kv_heads": 4}, "rows of 8 heads: it must have those of k and v, 2 x 4, and of q"
    yield ahead, {"kv_heads": 3}, "q has 2 heads and k 3"


@pytest.mark.parametrize(("operation", "changes", "wanted"), [*bad_packed()])
def test_a_packed_call_does_not_fit(operation, changes, wanted):
    one = dict.fromkeys(("q_weight", "k_weight", "v_weight")) | {"qkv_weight": numbers((H + 2 * KV) * D, C)}
    if operation == "qkv_rope":
        one |= dict.fromkeys(("q_bias", "k_bias", "v_bias")) | {"kv_heads": KV}
    getattr(rg, operation)(**good(operation) | one)
    refuse(operation, one | changes, wanted)


def test_the_heads_of_k_are_told_twice():
    refuse("qkv_rope", {"kv_heads": KV}, "kv_heads=2 goes with qkv_weight alone: k_weight's rows say it")
    refuse("qkv_rope_backward", {"needs": ("qkv_weight",)}, "names qkv_weight and q_weight: ")


# ---- other namespaces ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("operation", "name"), ARRAYS)
def test_one_array_is_of_another_namespace(operation, name):
    torch = need("torch", "interop")
    refuse(operation, {name: torch.from_numpy}, "one of torch|of torch", "numpy", "convert one of them")


def torch_call(torch, operation="rope_backward"):
    call = good(operation)
    return {n: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for n, v in call.items()}


def test_one_tensor_is_on_another_device():
    torch = need("torch", "interop")
    for name in ("q", "cos"):
        call = torch_call(torch)
        call[name] = call[name].to("meta")
        with pytest.raises(rg.SpecError, match=r"on (meta|cpu), .* on (cpu|meta): move one of them"):
            rg.rope_backward(**call)


def test_a_tensor_is_not_dense():
    torch = need("torch", "interop")
    call = torch_call(torch) | {"q": torch_call(torch)["q"].to_sparse()}
    with pytest.raises(rg.SpecError, match=r"q has layout torch.sparse_coo: pass a dense tensor"):
        rg.rope_backward(**call)


def bad_tensors(torch):
    """grad_q for out= of every wrong kind, and what the message holds."""
    call = torch_call(torch)
    poison = torch.full_like(call["q"], torch.nan)
    yield poison.requires_grad_(), "requires grad: pass a detached tensor"
    yield call["q"][:, :1].expand(B, H, S, D), "share memory"
    yield call["q"].bfloat16(), "has dtype bfloat16: it must be float32"
    yield call["q"].to("meta"), "has device meta: it must be cpu"
    yield call["q"].numpy(), "has namespace numpy: it must be torch"
    yield call["q"].to_sparse(), "has layout torch.sparse_coo"
    yield call["grad_q_embed"].view(-1)[: poison.numel()].view(B, S, H, D).permute(0, 2, 1, 3), None


def test_out_is_a_tensor_that_cannot_take_the_gradient():
    torch = need("torch", "interop")
    for wrong, wanted in bad_tensors(torch):
        call = torch_call(torch) | {"needs": ("q",), "out": (wrong, None, None, None)}
        if wanted is None:  # the upstream gradient's memory with the axes in another order
            call["grad_q_embed"], wanted = wrong._base.view(B, H, S, D), "grad_q overlaps grad_q_embed"
        before = [x.clone() for x in call.values() if isinstance(x, torch.Tensor)]
        with pytest.raises(rg.SpecError, match=wanted):
            rg.rope_backward(**call)
        after = (x for x in call.values() if isinstance(x, torch.Tensor))
        assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


def test_out_on_a_device_without_memory():
    torch = need("torch", "interop")
    call = {name: x.to("meta") for name, x in torch_call(torch).items()}
    out = tuple(torch.empty_like(call[name]) for name in ("q", "k", "cos", "sin"))
    with pytest.raises(rg.SpecError, match="meta tensors have no memory to write: leave out= away"):
        rg.rope_backward(**call, out=out)


@pytest.mark.parametrize("namespace", ["jax.numpy", "dask.array"])
def test_out_of_arrays_that_cannot_be_written(namespace):
    xp = need(namespace, "interop" if namespace.startswith("jax") else "dask")
    call = {name: xp.asarray(array) for name, array in good("rope_backward").items()}
    with pytest.raises(rg.SpecError, match="cannot be written: leave out= away and use what is returned"):
        rg.rope_backward(**call, out=tuple(xp.asarray(x) for x in outputs("rope_backward")))


def test_an_unknown_chunk_size():
    da = need("dask.array", "dask")
    call = {name: da.from_array(array) for name, array in good("rope").items()}
    call["q"] = call["q"][call["q"][:, 0, 0, 0] > -99]
    with pytest.raises(
        rg.SpecError, match=r"unknown size in its shape \(nan, .*compute its chunk sizes first"
    ):
        rg.rope(**call)


def test_arrays_that_jax_traces_go_with_concrete_ones():
    jax = need("jax", "interop")
    call = {name: jax.numpy.asarray(array) for name, array in good("rope").items()}
    q, cos, sin = call.pop("q"), call["cos"], call["sin"]

    def rotated(q):
        return rg.rope(q, **call).q_embed

    assert np.array_equal(jax.jit(rotated)(q), rotated(q))
    assert np.array_equal(jax.vmap(rotated)(q[None]), rotated(q)[None])
    by_hand = rg.rope_backward(jax.numpy.ones_like(q), None, None, None, cos, sin, needs=("q",)).grad_q
    assert np.array_equal(jax.grad(lambda q: rotated(q).sum())(q), by_hand)


# ---- no other exception ----------------------------------------------------------------------------------


def to_bhsd(array, layout):
    return array.transpose([layout.index(axis) for axis in "bhsd"])


def from_bhsd(array, layout):
    return array.transpose(["bhsd".index(axis) for axis in layout])


def rope_reference(call):
    """The gradients of a right call of rope_backward in float64, by index arithmetic."""
    layout, pairing = call.get("layout", "bhsd"), call.get("pairing", "half")
    x = {name: v.astype(np.float64) for name, v in call.items() if isinstance(v, np.ndarray)}
    columns = x["cos"].shape[-1]
    width = columns * (1 if call.get("table", "full") == "full" else 2)
    channel, half = np.arange(width), max(width // 2, 1)
    partner = (channel + half) % max(width, 1) if pairing == "half" else channel ^ 1
    sign = np.where(channel < partner, -1.0, 1.0)
    pair = channel % half if pairing == "half" else channel // 2
    column = channel if columns == width else pair
    cos, sin = ((x[n] if x[n].ndim == 3 else x[n][None])[:, None, :, column] for n in ("cos", "sin"))
    turn = sin if call.get("adjoint") == "paired" else sin[..., partner]
    results, d_cos, d_sin = {}, 0.0, 0.0
    for side in "qk":
        if f"grad_{side}_embed" not in x:
            continue
        back = to_bhsd(x[f"grad_{side}_embed"], layout).copy()
        g = back[..., :width].copy()
        back[..., :width] = g * cos - sign * g[..., partner] * turn
        results[f"grad_{side}"] = from_bhsd(back, layout)
        if side in x:
            y = to_bhsd(x[side], layout)[..., :width]
            d_cos, d_sin = d_cos + (g * y).sum(1), d_sin + (sign * g * y[..., partner]).sum(1)
    for name, wide in (("cos", d_cos), ("sin", d_sin)):
        if np.ndim(wide):
            folded = np.zeros((*wide.shape[:2], columns))
            np.add.at(folded, (slice(None), slice(None), column), wide)
            shared = x[name].ndim == 2 or x[name].shape[0] == 1
            results[f"grad_{name}"] = (folded.sum(0, keepdims=True) if shared else folded).reshape(
                x[name].shape
            )
    return results


def rotate_reference(call, q, k):
    """RoPE of q and k: with −sin, rotating forward is what adjoint="paired" does."""
    turned = {
        "grad_q_embed": q,
        "grad_k_embed": k,
        "sin": -call["sin"].astype(np.float64),
        "adjoint": "paired",
    }
    results = rope_reference(
        {n: call[n] for n in call if n in ("cos", "layout", "pairing", "table")} | turned
    )
    return {f"{side}_embed": results[f"grad_{side}"] for side in "qk" if f"grad_{side}" in results}


def to_rows(heads, layout):
    axes = to_bhsd(heads, layout).transpose((2, 0, 1, 3) if layout == "sbhd" else (0, 2, 1, 3))
    return axes.reshape(axes.shape[0] * axes.shape[1], -1)


def qkv_backward_reference(call):
    layout = call.get("layout", "bhsd")
    x = {name: v.astype(np.float64) for name, v in call.items() if isinstance(v, np.ndarray)}
    rotated = {"v": x.get("grad_value")}
    if "cos" in x and "sin" in x:
        sides = {"grad_q_embed": x.get("grad_query"), "grad_k_embed": x.get("grad_key")}
        words = {name: call[name] for name in ("layout", "pairing", "table") if name in call}
        back = rope_reference(sides | words | {"cos": x["cos"], "sin": x["sin"]})
        rotated |= {side: back.get(f"grad_{side}") for side in "qk"}
    rows = {part: to_rows(array, layout) for part, array in rotated.items() if array is not None}
    results = {f"grad_{part}_bias": array.sum(0) for part, array in rows.items()}
    if "hidden_states" in x:
        hidden = x["hidden_states"].reshape(-1, x["hidden_states"].shape[-1])
        results |= {f"grad_{part}_weight": array.T @ hidden for part, array in rows.items()}
    if len(rows) == 3 and all(f"{part}_weight" in x for part in rows):
        total = sum(array @ x[f"{part}_weight"] for part, array in rows.items())
        outer = to_bhsd(x["grad_query"], layout).shape
        tokens = (outer[2], outer[0]) if layout == "sbhd" else (outer[0], outer[2])
        results["grad_hidden_states"] = total.reshape(*tokens, total.shape[-1])
    return results


def qkv_reference(call):
    layout, dim = call.get("layout", "bhsd"), call["head_dim"]
    x = {name: v.astype(np.float64) for name, v in call.items() if isinstance(v, np.ndarray)}
    projected = {}
    for part in "qkv":
        rows = x["hidden_states"] @ x[f"{part}_weight"].T + x.get(f"{part}_bias", 0.0)
        heads = rows.reshape(*rows.shape[:2], rows.shape[-1] // dim, dim)
        projected[part] = heads.transpose(0, 2, 1, 3) if layout == "bhsd" else heads
    rotated = rotate_reference(call, projected["q"], projected["k"])
    return {"query": rotated["q_embed"], "key": rotated["k_embed"], "value": projected["v"]}


REFERENCES = {
    "rope_backward": rope_reference,
    "qkv_rope_backward": qkv_backward_reference,
    "rope": lambda call: rotate_reference(call, call["q"], call["k"]),
    "qkv_rope": qkv_reference,
}
FAMILIES = [
    ("q", "grad_q_embed"), ("k", "grad_k_embed"), ("cos", "sin"), ("grad_key", "grad_value"),
    ("hidden_states",), ("k_weight", "v_weight"), ("q_weight",), ("q_bias", "k_bias", "v_bias"),
]  # fmt: skip
AXIS_CHANGES = [
    lambda x, a: x.take(0, a % x.ndim) if x.size else x,
    lambda x, a: np.expand_dims(x, a % (x.ndim + 1)),
    lambda x, a: np.moveaxis(x, 0, -1),
    lambda x, a: x.take(np.arange(a % 4) % max(x.shape[a % x.ndim], 1), a % x.ndim) if x.size else x,
]
DTYPE_CHANGES = ["float16", "float64", ml_dtypes.bfloat16, "int64", "complex64", ">f4", "bool"]
OPTION_CHANGES = {
    "layout": ["bhsd", "bshd", "sbhd", "hbsd"],
    "pairing": ["half", "interleaved", "none"],
    "table": ["full", "half", None],
    "adjoint": ["exact", "paired", 1],
    "precision": ["highest", "medium", "low"],
    "needs": [("q",), ("cos", "sin"), ("k", "sin"), "q", (), None, ("v_bias", "k_weight"), ("q_bias",)],
    "backend": ["numpy_tiled", "portable", "cupy", None],
    "accumulate": [True, False],
    "head_dim": [D, 12, 3, 0, None],
}
TAKEN = {
    "rope_backward": (*TAKES["rope_backward"], "needs", "accumulate"),
    "qkv_rope_backward": (*TAKES["qkv_rope_backward"], "needs", "accumulate"),
    "rope": TAKES["rope"],
    "qkv_rope": (*TAKES["qkv_rope"], "head_dim"),
}


@st.composite
def mutations(draw):
    """A good call after up to three changes, most of which break it."""
    operation = draw(st.sampled_from(OPERATIONS))
    call = good(operation)
    arrays = [name for name, array in call.items() if isinstance(array, np.ndarray)]
    families = [family for group in FAMILIES if (family := [name for name in group if name in arrays])]
    for _ in range(draw(st.sampled_from((1, 1, 2, 3)))):
        names = draw(st.sampled_from([*families, arrays, *([name] for name in arrays)]))
        found = {name: call[name] for name in names if isinstance(call[name], np.ndarray) and call[name].ndim}
        kind = draw(st.sampled_from(["axis", "dtype", "swap", "none", "value", *["option"] * 4]))
        if kind == "axis":
            change, axis = draw(st.sampled_from(AXIS_CHANGES)), draw(st.integers(0, 11))
            call |= {name: np.asarray(change(array, axis)) for name, array in found.items()}
        elif kind == "dtype":
            dtype = draw(st.sampled_from(DTYPE_CHANGES))
            call |= {name: array.astype(dtype) for name, array in found.items()}
        elif kind == "swap":
            other = draw(st.sampled_from(arrays))
            call[names[0]], call[other] = call[other], call[names[0]]
        elif kind == "none":
            call |= dict.fromkeys(names)
        elif kind == "value":
            call[names[0]] = draw(st.sampled_from([0, 1.5, "cos", [], np.float64(2), np.zeros(()), ...]))
        else:
            option = draw(st.sampled_from(TAKEN[operation]))
            call[option] = draw(st.sampled_from(OPTION_CHANGES[option]))
    return operation, call


@given(mutation=mutations())
@settings(max_examples=3 * settings.default.max_examples)  # most are refused
@pytest.mark.filterwarnings("ignore:Casting complex values")
def test_a_changed_call_is_refused_or_right(mutation):
    operation, call = mutation
    before = contents(call)
    try:
        results = getattr(rg, operation)(**call)
    except rg.SpecError:
        results = None
    assert contents(call) == before
    event("refused" if results is None else "right")
    if results is None:
        return
    expected = REFERENCES[operation](call)
    dtype = next(v.dtype for n, v in call.items() if isinstance(v, np.ndarray) and n not in ("cos", "sin"))
    for name, result in results._asdict().items():
        if operation.endswith("backward"):
            wanted = call.get("needs") or [n.removeprefix("grad_") for n in expected if "bias" not in n]
            assert (result is not None) == (name.removeprefix("grad_") in wanted)
        if result is not None:
            right = call["cos"].dtype if name in ("grad_cos", "grad_sin") else dtype
            assert (result.shape, result.dtype) == (expected[name].shape, right)
            assert np.array_equal(result, expected[name].astype(right))
