"""Wrong backward functions of RoPE. Most of them shipped somewhere."""

import ml_dtypes
import numpy as np
from kernels import by_name, rope_backward, rotate_half, rotate_half_back
from planting import planted

from ropegrad.verify import Domain

WRONG, LOW = "wrong value", "below the promised precision"
PARTIAL = Domain(rotary="any")


def heads(g, cos, sin):
    """The right gradient of q or k."""
    return g * cos[:, None] + rotate_half_back(g * sin[:, None])


def table_sums(gq, gk, q, k):
    """The right gradients of the tables."""
    cos = (gq * q).sum(axis=1) + (gk * k).sum(axis=1)
    return cos, (gq * rotate_half(q)).sum(axis=1) + (gk * rotate_half(k)).sum(axis=1)


def with_tables(change):
    """A backward that reads changed tables for grad_q and grad_k."""

    def backward(gq, gk, q, k, cos, sin):
        with np.errstate(all="ignore"):
            c, s = change(cos, sin)
            return heads(gq, c, s), heads(gk, c, s), *table_sums(gq, gk, q, k)

    return backward


def swapped(x):
    """The two columns of each pair exchanged."""
    half = x.shape[-1] // 2
    return np.concatenate([x[..., half:], x[..., :half]], axis=-1)


def name(title, function):
    function.__name__ = title
    return function


# ---- formulas ------------------------------------------------------------------------------------------


def _inverse(c, s):
    return c / (c * c + s * s), s / (c * c + s * s)


def _first_column(c, s):
    half = c.shape[-1] // 2
    return np.tile(c[..., :half], 2), np.tile(s[..., :half], 2)


def _second_column(c, s):
    half = c.shape[-1] // 2
    return np.tile(c[..., half:], 2), np.tile(s[..., half:], 2)


def _rounded(dtype):
    return lambda c, s: (c.astype(dtype).astype(c.dtype), s.astype(dtype).astype(s.dtype))


def _rows(index):
    return lambda c, s: (np.broadcast_to(c[index], c.shape), np.broadcast_to(s[index], s.shape))


FORMULAS = {
    "own_sine": (lambda c, s: (c, swapped(s)), "its own sine instead of its partner's"),
    "wrong_way": (lambda c, s: (c, -s), "the sine's sign is flipped"),
    "forward_formula": (lambda c, s: (c, -swapped(s)), "the forward formula"),
    "cosine_for_sine": (lambda c, s: (s, c), "cosine and sine exchanged"),
    "inverse_not_transpose": (_inverse, "the inverse of the rotation, not its transpose"),
    "first_column_only": (_first_column, "only the first column of each pair"),
    "second_column_only": (_second_column, "only the second column of each pair"),
    "not_rotated": (lambda c, s: (np.ones_like(c), np.zeros_like(s)), "is not rotated"),
    "no_sine": (lambda c, s: (c, np.zeros_like(s)), "leaves out the sine"),
    "no_cosine": (lambda c, s: (np.zeros_like(c), s), "leaves out the cosine"),
    "one_position_early": (lambda c, s: (np.roll(c, 1, -2), np.roll(s, 1, -2)), "one position early"),
    "one_position_late": (lambda c, s: (np.roll(c, -1, -2), np.roll(s, -1, -2)), "one position late"),
    "first_batch_s_tables": (_rows(slice(0, 1)), "first batch's tables for every batch"),
    "positions_ignored": (_rows((slice(None), slice(0, 1))), "first token's row"),
}
for title, (change, words) in FORMULAS.items():
    planted(WRONG, words)(name(title, with_tables(change)))
planted(LOW, "tables rounded to float16")(name("float16_tables", with_tables(_rounded(np.float16))))
planted(LOW, "tables rounded to bfloat16")(name("bfloat16_tables", with_tables(_rounded(ml_dtypes.bfloat16))))


@planted(WRONG, "the other pairing")
def interleaved_pairs(gq, gk, q, k, cos, sin):
    def turned(x):
        return np.stack([-x[..., 1::2], x[..., ::2]], axis=-1).reshape(x.shape)

    def back(g):
        return g * cos[:, None] - turned(g * sin[:, None])

    grad_sin = (gq * turned(q)).sum(axis=1) + (gk * turned(k)).sum(axis=1)
    return back(gq), back(gk), table_sums(gq, gk, q, k)[0], grad_sin


@planted(WRONG)
def divides_by_the_upstream_gradient(gq, gk, q, k, cos, sin):
    with np.errstate(all="ignore"):
        return (heads(1 / gq, cos, sin), *rope_backward(gq, gk, q, k, cos, sin)[1:])


@planted(WRONG)
def width_padded_to_a_power_of_two(gq, gk, q, k, cos, sin):
    width = 1 << max(gq.shape[-1] - 1, 1).bit_length()

    def padded(x):
        return np.concatenate([x, np.zeros((*x.shape[:-1], width - x.shape[-1]), x.dtype)], axis=-1)

    size = gq.shape[-1]
    return [x[..., :size].copy() for x in rope_backward(*map(padded, (gq, gk, q, k, cos, sin)))]


# ---- sums over heads -----------------------------------------------------------------------------------


def with_heads(change):
    """A backward that counts changed upstream gradients in the tables."""

    def backward(gq, gk, q, k, cos, sin):
        return heads(gq, cos, sin), heads(gk, cos, sin), *table_sums(*change(gq, gk), q, k)

    return backward


def _kept(x, run):
    result = np.zeros_like(x)
    result[:, run] = x[:, run]
    return result


HEADS = {
    "k_missing_from_tables": (lambda gq, gk: (gq, 0 * gk.clip(0, 0)), "leaves out k's heads"),
    "q_missing_from_tables": (lambda gq, gk: (0 * gq.clip(0, 0), gk), "leaves out q's heads"),
    "one_k_head": (lambda gq, gk: (gq, _kept(gk, slice(0, 1))), "k's heads after the first"),
    "one_q_head": (lambda gq, gk: (_kept(gq, slice(0, 1)), gk), "q's heads after the first"),
    "last_k_head_missing": (lambda gq, gk: (gq, _kept(gk, slice(0, -1))), "k's last head"),
    "last_q_head_missing": (lambda gq, gk: (_kept(gq, slice(0, -1)), gk), "q's last head"),
    "q_heads_counted_as_k_s": (lambda gq, gk: (_kept(gq, slice(0, gk.shape[1])), gk), "as k has"),
    "heads_up_to_32": (lambda gq, gk: (_kept(gq, slice(0, 32)), gk), "heads of q up to 32"),
    "k_repeated": (lambda gq, gk: (gq, gk * (gq.shape[1] // gk.shape[1])), "once for every head of q"),
}
for title, (change, words) in HEADS.items():
    planted(WRONG, words)(name(title, with_heads(change)))


def changed(index, change):
    """A backward with one output changed."""

    def backward(*arrays):
        results = list(rope_backward(*arrays))
        with np.errstate(all="ignore"):
            results[index] = change(results[index], *arrays)
        return results

    return backward


@planted(WRONG, "a mean over heads instead of a sum")
def mean_over_heads(gq, gk, q, k, cos, sin):
    count = np.float32(gq.shape[1] + gk.shape[1])
    grads = rope_backward(gq, gk, q, k, cos, sin)
    return grads[0], grads[1], grads[2] / count, grads[3] / count


@planted(WRONG, "is grad_sin", "is grad_cos")
def table_gradients_exchanged(*arrays):
    grad_q, grad_k, grad_cos, grad_sin = rope_backward(*arrays)
    return grad_q, grad_k, grad_sin, grad_cos


SIMPLE = {
    "sine_gradient_negated": (3, lambda x, *_: -x, "has the opposite sign"),
    "twice": (0, lambda x, *_: 2 * x, "is 2 times what it should be"),
    "half": (2, lambda x, *_: x / 2, "is 0.5 times what it should be"),
    "query_gradient_negated": (0, lambda x, *_: -x, "has the opposite sign"),
}
for title, (index, change, words) in SIMPLE.items():
    planted(WRONG, words)(name(title, changed(index, change)))

planted(WRONG, "leaves out batches after the first", table_shape="sd")(
    name("batch_not_summed", lambda gq, gk, q, k, cos, sin: (
        heads(gq, cos[None], sin[None]), heads(gk, cos[None], sin[None]),
        *(x[0] if len(x) else np.zeros_like(cos) for x in table_sums(gq, gk, q, k))))
)  # fmt: skip


@planted("wrong shape, dtype or device", table_shape="1sd")
def table_gradient_not_reduced(*arrays):
    return rope_backward(*arrays)


@planted(WRONG, table="half")
def half_tables_not_folded(gq, gk, q, k, cos, sin):
    both = (np.tile(x, 2) for x in (cos, sin))
    grads = rope_backward(gq, gk, q, k, *both)
    return *grads[:2], *(x[..., : cos.shape[-1]].copy() for x in grads[2:])


# ---- parts of a result ---------------------------------------------------------------------------------


def part(index, place, value):
    """A backward that leaves something else in a part of one output."""

    def change(x, *arrays):
        x[place(x)] = value(x, *arrays)[place(x)] if callable(value) else value
        return x

    return changed(index, change)


def upstream(index):
    return lambda x, *arrays: arrays[index]


def tail(x, tile=4):
    """The tokens after the last whole tile."""
    return np.s_[..., x.shape[-2] // tile * tile :, :]


PARTS = {
    "last_q_head_not_rotated": (0, lambda x: np.s_[:, -1:], upstream(0), "the last head only"),
    "last_k_head_not_rotated": (1, lambda x: np.s_[:, -1:], upstream(1), "is not rotated"),
    "only_first_k_head": (1, lambda x: np.s_[:, 1:], upstream(1), "is not rotated"),
    "tail_tokens_zero": (0, tail, 0, "is zero"),
    "tail_tokens_not_rotated": (1, tail, upstream(1), "is not rotated"),
    "last_token_zero": (2, lambda x: np.s_[..., -1:, :], 0, "the last token only"),
    "last_batch_zero": (1, lambda x: np.s_[-1:], 0, "the last batch only"),
    "second_half_of_channels_zero": (0, lambda x: np.s_[..., x.shape[-1] // 2 :], 0, "second half of the"),
    "odd_channels_zero": (0, lambda x: np.s_[..., 1::2], 0, "is zero"),
}
for title, (index, place, value, words) in PARTS.items():
    planted(WRONG, words)(name(title, part(index, place, value)))


@planted(WRONG, "is wrong in one element only, in the first channel, in the first token")
def one_element_one_percent_off(*arrays):
    results = rope_backward(*arrays)
    results[1][:1, :1, :1, :1] *= np.float32(1.01)
    return results


@planted(WRONG)
def one_element_one_millionth_off(*arrays):
    results = rope_backward(*arrays)
    results[0][-1:, -1:, -1:, -1:] *= np.float32(1 + 2e-6)
    return results


def partial(gq, gk, q, k, cos, sin):
    """The right gradients where channels pass through."""
    width = cos.shape[-1]
    grads = rope_backward(*(x[..., :width] for x in (gq, gk, q, k)), cos, sin)
    whole = (np.concatenate([x, g[..., width:]], -1) for x, g in zip(grads, (gq, gk), strict=False))
    return [*whole, *grads[2:]]


def partial_fault(value):
    def backward(*arrays):
        results, width = partial(*arrays), arrays[4].shape[-1]
        for x in results[:2]:
            x[..., width:] = value(x[..., width:])
        return results

    return backward


PASS = {
    "pass_through_is_one": (np.ones_like, "is one"),
    "pass_through_is_zero": (np.zeros_like, "is zero"),
    "pass_through_is_negated": (np.negative, "has the opposite sign"),
    "pass_through_is_rounded": (lambda x: x.astype(np.float16), "the channels that pass through only"),
}
for title, (value, words) in PASS.items():
    rule = LOW if "rounded" in title else WRONG
    planted(rule, words, domain=PARTIAL)(name(title, partial_fault(value)))


@planted(WRONG, domain=PARTIAL)
def pair_distance_of_the_whole_head(gq, gk, q, k, cos, sin):
    """Pairs channel j with j + D/2 where the rotary width is R."""
    results, width = partial(gq, gk, q, k, cos, sin), cos.shape[-1]
    if 0 < width < gq.shape[-1] // 2 * 2:
        half, c, s = width // 2, cos[:, None], sin[:, None]
        other = gq[..., gq.shape[-1] // 2 :][..., :half]
        results[0][..., :half] = gq[..., :half] * c[..., :half] + other * s[..., half:]
    return results


# ---- missing, of another form --------------------------------------------------------------------------

planted("missing gradient")(
    name("no_table_gradients", lambda *arrays: (*rope_backward(*arrays)[:2], None, None))
)
planted("missing gradient")(name("nothing", lambda *arrays: None))
planted("missing gradient")(name("zeros", lambda *arrays: [0 * x for x in rope_backward(*arrays)]))
planted("missing gradient")(name("by_some_names", lambda *arrays: {"grad_q": rope_backward(*arrays)[0]}))
FORM = "wrong shape, dtype or device"
planted(FORM)(name("float64_results", lambda *arrays: rope_backward(*(x.astype("f8") for x in arrays))))
planted(FORM)(name("head_axis_kept", changed(2, lambda x, *_: x[:, None])))
planted(FORM)(name("tables_first", lambda *arrays: rope_backward(*arrays)[::-1]))
planted(FORM)(name("three_results", lambda *arrays: rope_backward(*arrays)[:3]))
planted(FORM, "has 5 values, not 4")(
    name("five_results", lambda *arrays: (*rope_backward(*arrays), arrays[0]))
)
planted(FORM, "has 5 values, not 4")(name("five_with_none", lambda *arrays: (*rope_backward(*arrays), None)))
planted(FORM, "has loss, too")(
    name("one_more_by_name", lambda *arrays: by_name(*arrays) | {"loss": arrays[0]})
)
planted(FORM)(name("lists", lambda *arrays: [x.tolist() for x in rope_backward(*arrays)]))


# ---- memory --------------------------------------------------------------------------------------------


@planted("input mutated")
def upstream_overwritten(gq, gk, q, k, cos, sin):
    results = rope_backward(gq, gk, q, k, cos, sin)
    gq[...] = results[0]
    return results


@planted("input mutated")
def table_negated(gq, gk, q, k, cos, sin):
    results = rope_backward(gq, gk, q, k, cos, sin)
    np.negative(sin, out=sin)
    return results


@planted("input mutated", "output aliases an input or another output")
def in_place(gq, gk, q, k, cos, sin):
    results = rope_backward(gq, gk, q, k, cos, sin)
    gk[...] = results[1]
    return results[0], gk, *results[2:]


@planted("output aliases an input or another output")
def one_buffer_for_both_sides(gq, gk, q, k, cos, sin):
    results = rope_backward(gq, gk, q, k, cos, sin)
    return (results[1], *results[1:]) if gq.shape == gk.shape else results


@planted("output aliases an input or another output")
def returns_the_upstream_gradient_where_nothing_turns(gq, gk, q, k, cos, sin):
    results = rope_backward(gq, gk, q, k, cos, sin)
    return (gq if np.array_equal(results[0], gq) else results[0]), *results[1:]


_BUFFERS = {}


OVERWRITTEN = "overwritten by a later call"


@planted(OVERWRITTEN)
def static_buffers(*arrays):
    results = rope_backward(*arrays)
    kept = _BUFFERS.setdefault(arrays[0].shape + arrays[1].shape, results)
    for buffer, result in zip(kept, results, strict=True):
        buffer[...] = result
    return kept


_RING = {}


@planted(OVERWRITTEN)
def two_buffers_in_turn(*arrays):
    """The call after the next one, with the same data as this one, overwrites its results."""
    results = rope_backward(*arrays)
    ring = _RING.setdefault(arrays[0].shape + arrays[1].shape, [rope_backward(*arrays) for _ in range(2)])
    ring.reverse()
    for buffer, result in zip(ring[0], results, strict=True):
        buffer[...] = result
    return ring[0]


def buffers_in_turn(count):
    """A backward whose results are overwritten by the call after so many others."""
    rings = {}

    def backward(*arrays):
        results = rope_backward(*arrays)
        ring = rings.setdefault(arrays[0].shape + arrays[1].shape, [])
        if len(ring) < count:
            ring.append(results)
            return results
        ring.append(ring.pop(0))
        for buffer, result in zip(ring[-1], results, strict=True):
            buffer[...] = result
        return ring[-1]

    return backward


for _count in (3, 8, 16):
    planted(OVERWRITTEN)(name(f"{_count}_buffers_in_turn", buffers_in_turn(_count)))

_CACHE = {}


@planted("stale output")
def cached_by_shape(*arrays):
    key = arrays[0].shape + arrays[1].shape
    return tuple(x.copy() for x in _CACHE.setdefault(key, rope_backward(*arrays)))


_LAST = {}


@planted("stale output")
def every_second_call(*arrays):
    key = arrays[0].shape + arrays[1].shape
    last = _LAST.pop(key, None)
    if last is None:
        last = _LAST[key] = rope_backward(*arrays)
    return tuple(x.copy() for x in last)


_TABLES = {}


@planted(WRONG)
def tables_cached_by_shape(gq, gk, q, k, cos, sin):
    c, s = _TABLES.setdefault(cos.shape, (cos.copy(), sin.copy()))
    return heads(gq, c, s), heads(gk, c, s), *table_sums(gq, gk, q, k)


def cached(key, function=rope_backward):
    """A backward that computes once for every key of its arguments."""
    kept = {}

    def backward(*arrays):
        of = key(*arrays)
        if of not in kept:
            kept[of] = arrays, function(*arrays)  # the arguments, too: no other object gets their id
        return tuple(x.copy() for x in kept[of][1])

    return backward


def tables_cached(key):
    """A backward that reads its tables once for every key of them."""
    kept = {}

    def backward(gq, gk, q, k, cos, sin):
        c, s, _ = kept.setdefault((key(cos), cos.shape), (cos.copy(), sin.copy(), cos))
        return heads(gq, c, s), heads(gk, c, s), *table_sums(gq, gk, q, k)

    return backward


def address(x):
    return x.__array_interface__["data"][0]


planted("stale output")(name("cached_by_object", cached(lambda *arrays: tuple(map(id, arrays)))))
planted("stale output")(
    name("cached_by_address", cached(lambda *arrays: (arrays[1].shape, *map(address, arrays))))
)
planted(WRONG)(name("tables_cached_by_object", tables_cached(id)))
planted(WRONG)(name("tables_cached_by_address", tables_cached(address)))


_IDS = {}


@planted(WRONG)
def tables_cached_by_id_alone(gq, gk, q, k, cos, sin):
    """The object is gone, and another one has its id."""
    c, s = _IDS.setdefault((id(cos), cos.shape), (cos.copy(), sin.copy()))
    return heads(gq, c, s), heads(gk, c, s), *table_sums(gq, gk, q, k)


_CALLS = []


@planted(WRONG, "the same call is right when it is made again")
def first_call_of_all(*arrays):
    """As with a cache that is read before it is filled."""
    results = rope_backward(*arrays)
    _CALLS.append(len(arrays))
    return results if len(_CALLS) > 1 else (*results[:2], 2 * results[2], results[3])


first_call_of_all.fresh = _CALLS.clear  # as in a new process


@planted(WRONG)
def twelve_heads(*arrays):
    """As of a kernel that chooses its block by the number of heads."""
    results = rope_backward(*arrays)
    if arrays[0].shape[1] == 12:
        results[3][:, -1:] = 0
    return results


@planted(WRONG)
def eight_batches(*arrays):
    """As of a kernel that is launched over fewer batches than there are."""
    results = rope_backward(*arrays)
    results[0][7:] = 0
    return results


@planted(WRONG)
def ratio_of_sixteen(*arrays):
    """As of a kernel that holds the heads of a group in a fixed number of registers."""
    results = rope_backward(*arrays)
    if arrays[0].shape[1] == 16 * arrays[1].shape[1]:
        results[2][..., -1] = 0
    return results


@planted(WRONG)
def five_hundred_and_twelve_tokens(*arrays):
    """As of a kernel that has a path of its own for whole tiles."""
    results = rope_backward(*arrays)
    if arrays[0].shape[2] == 512:
        results[0][:, :, -1] = 0
    return results


def flat(x):
    """The elements from the first address on, as a kernel reads them that takes no strides."""
    return np.lib.stride_tricks.as_strided(
        x, x.shape, tuple(x.itemsize * int(np.prod(x.shape[i + 1 :])) for i in range(x.ndim))
    )


STRIDES = "depends on strides or alignment"


@planted(STRIDES)
def strides_ignored(gq, gk, q, k, cos, sin):
    return rope_backward(flat(gq), gk, q, k, cos, sin)


@planted(STRIDES)
def table_strides_ignored(gq, gk, q, k, cos, sin):
    return rope_backward(gq, gk, q, k, flat(cos), flat(sin))


@planted(STRIDES)
def stride_zero_taken_for_contiguous(gq, gk, q, k, cos, sin):
    return rope_backward(flat(gq) if 0 in gq.strides else gq, gk, q, k, cos, sin)


@planted(STRIDES)
def negative_strides_not_followed(gq, gk, q, k, cos, sin):
    def forwards(x):
        return np.flip(x, [i for i, step in enumerate(x.strides) if step < 0])

    return rope_backward(forwards(gq), gk, forwards(q), k, cos, sin)


@planted(STRIDES)
def misaligned_pointer_rounded_down(gq, gk, q, k, cos, sin):
    def rounded(x):
        if x.flags.aligned:
            return x
        address = x.__array_interface__["data"][0] // x.itemsize * x.itemsize
        memory = (np.ctypeslib.ctypes.c_uint8 * x.nbytes).from_address(address)
        return np.frombuffer(memory, x.dtype).reshape(x.shape)

    return rope_backward(rounded(gq), gk, q, k, cos, sin)


@planted("raised")
def contiguous_only(*arrays):
    if not all(x.flags.c_contiguous for x in arrays):
        raise ValueError("arrays must be contiguous")
    return rope_backward(*arrays)


# ---- outputs that are given ----------------------------------------------------------------------------


def into(write):
    """A function that writes what it should, then what `write` does to the outputs."""

    def backward(*arrays):
        write(arrays[6:], rope_backward(*arrays[:6]))

    return backward


def all_but(place):
    def write(outputs, results):
        for out, x in zip(outputs, results, strict=True):
            keep = out[place(out)].copy()
            out[...] = x
            out[place(out)] = keep

    return write


def _added(outputs, results):
    for out, x in zip(outputs, results, strict=True):
        out += x


def _too_far(outputs, results):
    for out, x in zip(outputs, results, strict=True):
        out[...] = x
    last = outputs[-1]
    np.ctypeslib.ctypes.memset(last.ctypes.data + last.nbytes, 0, 4)


def _as_if_contiguous(outputs, results):
    for out, x in zip(outputs, results, strict=True):
        out[...] = x
        if x.ndim == 4:
            flat(out)[...] = x


UNWRITTEN = "output not (fully) written"
planted(UNWRITTEN, dps=True)(name("nothing_written", lambda *arrays: None))
planted(UNWRITTEN, dps=True)(name("tail_not_written", into(all_but(tail))))
planted(UNWRITTEN, dps=True)(name("last_head_not_written", into(all_but(lambda x: np.s_[:, -1:]))))
planted(WRONG, "added to what the output held", dps=True)(name("added", into(_added)))
planted("written outside the output", dps=True)(name("one_element_too_far", into(_too_far)))
planted("written outside the output", dps=True)(name("output_strides_ignored", into(_as_if_contiguous)))


# ---- numbers -------------------------------------------------------------------------------------------


def in_dtype(dtype):
    def backward(*arrays):
        with np.errstate(all="ignore"):
            return [x.astype("f4") for x in rope_backward(*(x.astype(dtype) for x in arrays))]

    return backward


def tf32(x):
    """Rounded to 11 significand bits."""
    words = x.astype(np.float32).view(np.uint32)
    return ((words + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


planted(LOW)(name("float16_inside", in_dtype(np.float16)))
planted(LOW)(name("bfloat16_inside", in_dtype(ml_dtypes.bfloat16)))
planted(LOW)(name("tf32_factors", lambda *arrays: rope_backward(*map(tf32, arrays))))
planted(LOW)(
    name("float16_results", lambda *arrays: [x.astype("f2").astype("f4") for x in rope_backward(*arrays)])
)


def small_lost(backward, lose, upstream=2):
    """A backward whose upstream gradients lose something first."""

    def function(*arrays):
        with np.errstate(all="ignore"):
            return backward(*map(lose, arrays[:upstream]), *arrays[upstream:])

    return function


def flushed_too_early(x):
    """Normal numbers from 1.2e-38 to 1e-36 become zero, too."""
    return np.where(np.abs(x) < np.float32(1e-36), x * np.float32(0), x)


def scaled_down_and_up(x):
    """Numbers below 2^-106 lose bits on the way."""
    return x * np.float32(2**-20) * np.float32(2**20)


SMALL = "small though normal numbers"
planted(WRONG, SMALL)(name("flushes_below_1e_36", small_lost(rope_backward, flushed_too_early)))
planted(WRONG, SMALL)(name("scaled_by_2_to_the_minus_20", small_lost(rope_backward, scaled_down_and_up)))


@planted(WRONG, SMALL)
def flushes_results_below_1e_36(*arrays):
    with np.errstate(all="ignore"):
        return [flushed_too_early(x) for x in rope_backward(*arrays)]


@planted(LOW)
def long_sums_scaled(gq, gk, q, k, cos, sin):
    """So little that only the bounds of sums with few products see it."""
    factor = np.float32(1 + 2**-20 * (gq.shape[1] + gk.shape[1] >= 16))
    return heads(gq, cos, sin), heads(gk, cos, sin), *(x * factor for x in table_sums(gq, gk, q, k))


@planted(LOW)
def bfloat16_sums(gq, gk, q, k, cos, sin):
    sums = [np.zeros(cos.shape, ml_dtypes.bfloat16) for _ in range(2)]
    for g, x in ((gq, q), (gk, k)):
        for head in range(g.shape[1]):
            sums[0] += (g[:, head] * x[:, head]).astype(ml_dtypes.bfloat16)
            sums[1] += (g[:, head] * rotate_half(x[:, head])).astype(ml_dtypes.bfloat16)
    return heads(gq, cos, sin), heads(gk, cos, sin), *(x.astype(np.float32) for x in sums)


@planted("unjustified NaN or Inf")
def scaled_by_the_largest(gq, gk, q, k, cos, sin):
    """NaN where an upstream gradient is zero everywhere in a row."""
    with np.errstate(all="ignore"):
        grad_q = heads(gq, cos, sin)
        top = np.abs(gq).max(axis=-1, keepdims=True, initial=0)
        return np.where(top < 1e-30, grad_q * (top / top), grad_q), *rope_backward(gq, gk, q, k, cos, sin)[1:]


@planted("unjustified NaN or Inf")
def squares_overflow(gq, gk, q, k, cos, sin):
    with np.errstate(all="ignore"):
        grads = rope_backward(gq, gk, q, k, cos, sin)
        return grads[0] + 0 * (gq * gq), *grads[1:]


@planted("unjustified NaN or Inf")
def divided_by_the_cosine(gq, gk, q, k, cos, sin):
    """The tangent, in float64 and right, but where the cosine is zero."""

    def rotated(g):
        wide, c, s = g.astype("f8"), cos[:, None].astype("f8"), sin[:, None]
        return (c * (wide + rotate_half_back(wide * s) / c)).astype(g.dtype)

    with np.errstate(all="ignore"):
        return rotated(gq), rotated(gk), *table_sums(gq, gk, q, k)


def heads_without_zeros(g, cos, sin):
    """As with a mask or a sparse product: 0 times Inf is not computed."""

    def times(table):
        return np.where(g == 0, np.float32(0), g * table[:, None])

    with np.errstate(all="ignore"):
        return times(cos) + rotate_half_back(times(sin))


@planted("hidden NaN or Inf")
def zero_gradients_skipped(gq, gk, q, k, cos, sin):
    with np.errstate(all="ignore"):
        rotated = (heads_without_zeros(g, cos, sin) for g in (gq, gk))
        return *rotated, *table_sums(gq, gk, q, k)


@planted("hidden NaN or Inf")
def zero_sines_skipped(gq, gk, q, k, cos, sin):
    """As where a pair that does not turn is left alone: the partner's Inf times 0 is not computed."""

    def rotated(g):
        s = sin[:, None]
        turned = rotate_half_back(np.where(s == 0, np.float32(0), g * s))
        return g * cos[:, None] + turned

    with np.errstate(all="ignore"):
        return rotated(gq), rotated(gk), *table_sums(gq, gk, q, k)


@planted(LOW)
def small_cosines_are_zero(gq, gk, q, k, cos, sin):
    cos, sin = (np.where(np.abs(x) < 1e-7, np.float32(0), x) for x in (cos, sin))
    return *(heads(g, cos, sin) for g in (gq, gk)), *table_sums(gq, gk, q, k)


planted("hidden NaN or Inf")(name("nan_to_num", lambda *a: [np.nan_to_num(x) for x in rope_backward(*a)]))
planted("hidden NaN or Inf")(
    name("clipped", lambda *a: [np.clip(x, np.float32(-3e38), np.float32(3e38)) for x in rope_backward(*a)])
)


# ---- what does not come back ---------------------------------------------------------------------------


@planted("declined")
def declines_odd_lengths(*arrays):
    if arrays[0].shape[2] % 2:
        raise NotImplementedError("even lengths only")
    return rope_backward(*arrays)


@planted("raised")
def raises_on_empty(*arrays):
    if not arrays[0].size:
        raise ValueError("zero-size array to reduction operation")
    return rope_backward(*arrays)


@planted("raised")
def needs_several_heads(*arrays):
    if arrays[1].shape[1] == 1:
        raise IndexError("index 1 is out of bounds for axis 1 with size 1")
    return rope_backward(*arrays)


@planted("raised")
def positions_along_heads(gq, gk, q, k, cos, sin):
    turned = [x.transpose(0, 2, 1, 3) for x in (gq, gk, q, k)]
    grads = rope_backward(*turned, cos, sin)
    return *(x.transpose(0, 2, 1, 3) for x in grads[:2]), *grads[2:]
