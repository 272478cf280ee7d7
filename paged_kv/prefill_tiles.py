# Exported from book/12_triton_prefill.py by tools/export.py; edit the chapter, not this file.
"""The steps of the prefill kernel: a tile of keys folded into the sums of a tile of queries."""

from __future__ import annotations

from paged_kv.decode_tiles import soft_cap
from paged_kv.triton_device import LOG2E, jit, tl

# mypy: ignore-errors


@jit
def tile_lanes(token0, end, head0, low, PACK: tl.constexpr, ROWS: tl.constexpr):
    """For each row of a tile: its token, head and position, and whether there is such a token."""
    m = tl.arange(0, ROWS)
    token = token0 + m // PACK
    real = (token < end) & (m < ROWS // PACK * PACK)
    return token.to(tl.int64), (head0 + m % PACK).to(tl.int64), low + m // PACK, real


@jit
def key_range(low, queries, length, window, KEYS: tl.constexpr, WINDOW: tl.constexpr):
    """Key tiles of a query tile: where it starts, where masks begin, where it stops.

    low: the position of its first query.  All its queries see the tiles before the masks.
    """
    start = 0
    if WINDOW:
        start = tl.maximum(low - window + 1, 0) // KEYS
    clear = tl.maximum(tl.maximum(low + 1, 0) // KEYS, start)
    end = tl.maximum(tl.minimum(low + queries, length), 0)
    return start, clear, tl.maximum((end + KEYS - 1) // KEYS, clear)


@jit
def key_blocks(entries, tile, n, length, KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """The block ids of a key tile: one where a block holds it all, otherwise one a token."""
    if BLOCK_SIZE % KEYS == 0:
        return tl.load(entries + tile * KEYS // BLOCK_SIZE, mask=tile * KEYS < length, other=0)
    else:
        token = tile * KEYS + n
        return tl.load(entries + token // BLOCK_SIZE, mask=token < length, other=0)


@jit
def key_rows(at, ok, d_ok, MASKED: tl.constexpr, FULL: tl.constexpr):
    """A tile of keys or values [KEYS, D]; what is not ok is 0, whatever its memory holds."""
    if MASKED and FULL:
        return tl.load(at, mask=ok[:, None], other=0.0)
    elif MASKED:
        return tl.load(at, mask=ok[:, None] & d_ok[None, :], other=0.0)
    elif FULL:
        return tl.load(at)
    else:
        return tl.load(at, mask=d_ok[None, :], other=0.0)


@jit
def softmax_step(s, peak, total, unit):
    """Weights of one tile of scores; what was summed before fades by `fade`."""
    new = tl.maximum(peak, tl.max(s, 1) * unit)
    safe = tl.where(new == float("-inf"), 0.0, new)  # nothing seen yet: no inf minus inf
    weight, fade = tl.exp2(s * unit - safe[:, None]), tl.exp2(peak - safe)
    return weight, fade, new, total * fade + tl.sum(weight, 1)


@jit
def tile_scores_seen(s, token, position, window, WINDOW: tl.constexpr):
    """The scores [ROWS, KEYS], minus infinity where a query does not see the key."""
    seen = token[None, :] <= position[:, None]
    if WINDOW:
        seen = seen & (token[None, :] > position[:, None] - window)
    return tl.where(seen, s, float("-inf"))


@jit
def attend_keys(
    q,
    acc,
    peak,
    total,
    keys,
    values,
    entries,
    first,
    last,
    length,
    position,
    window,
    scale,
    cap,
    k_block,
    k_token,
    d,
    HEAD_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    STAGES: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Fold the key tiles first .. last - 1 into the sums of a query tile."""
    FULL: tl.constexpr = HEAD_SIZE == d.shape[0]
    n, d_ok, unit = tl.arange(0, KEYS), d < HEAD_SIZE, LOG2E * (1.0 if CAP else scale)
    ahead = key_blocks(entries, first, n, length, KEYS, BLOCK_SIZE)
    for i in tl.range(first, last, num_stages=STAGES):
        # Read a step ahead and cast here, not before: else the compiler would keep the ids
        # in a pipeline of their own, and the keys would come one tile later.
        token, block = i * KEYS + n, ahead.to(tl.int64)
        ahead = key_blocks(entries, tl.minimum(i + 1, last - 1), n, length, KEYS, BLOCK_SIZE)
        at = (block * k_block + token % BLOCK_SIZE * k_token)[:, None] + d[None, :]
        ok = (token < length) & (block >= 0)  # blocks that left the window are gone
        k = key_rows(keys + at, ok, d_ok, MASKED, FULL)
        if UPCAST:  # the interpreter multiplies no bf16
            k = k.to(tl.float32)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if CAP:
            s = soft_cap(s * scale, cap)
        if MASKED:
            s = tile_scores_seen(s, token, position, window, WINDOW)
        weight, fade, peak, total = softmax_step(s, peak, total, unit)
        v = key_rows(values + at, ok, d_ok, MASKED, FULL)
        weight = weight.to(v.dtype)
        if UPCAST:
            v, weight = v.to(tl.float32), weight.to(tl.float32)
        acc = tl.dot(weight, v, acc * fade[:, None], input_precision="ieee")
    return acc, peak, total


@jit
def add_sink(sinks, head, real, acc, peak, total):
    """The sink's share of the denominator; a row that saw no key stays as it is."""
    sink = tl.load(sinks + head, mask=real, other=float("-inf")).to(tl.float32) * LOG2E
    sink = tl.where(total > 0, sink, float("-inf"))
    top = tl.maximum(peak, sink)
    safe = tl.where(top == float("-inf"), 0.0, top)
    fade = tl.exp2(peak - safe)
    return acc * fade[:, None], top, total * fade + tl.exp2(sink - safe)


@jit
def put_tile(output, lse, at, at_lse, ok, real, acc, peak, total):
    """Divide by the denominator; store the output and the log of the denominator."""
    good = tl.where(total > 0, total, 1.0)
    tl.store(output + at, (acc / good[:, None]).to(output.dtype.element_ty), mask=ok)
    tl.store(lse + at_lse, (peak + tl.log2(good)) / LOG2E, mask=real)
