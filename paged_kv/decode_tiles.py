# Exported from book/11_triton_decode.py by tools/export.py; edit the chapter, not this file.
"""The steps of the decode kernel: tiles of keys and values folded into running sums."""

# mypy: ignore-errors
from __future__ import annotations

from paged_kv.decode_shares import split_tiles
from paged_kv.triton_device import LOG2E, jit, tl


@jit
def soft_cap(score, cap):
    """cap * tanh(score / cap), from exp2 alone."""
    e = tl.exp2(tl.abs(score) * (2.0 * LOG2E / cap))
    t = cap * (1.0 - 2.0 / (e + 1.0))
    return tl.where(score < 0, -t, t)


@jit
def tile_scores(k, q, scale, cap, CAP: tl.constexpr, UPCAST: tl.constexpr):
    """Scores [ROWS, N], in base 2; the interpreter multiplies no bf16, hence UPCAST."""
    if UPCAST:
        k = k.to(tl.float32)
    s = tl.dot(k, q, input_precision="ieee")
    if CAP:
        s = soft_cap(s * scale, cap) * LOG2E
    else:
        s = s * (scale * LOG2E)
    return s


@jit
def add_values(acc, weight, v, UPCAST: tl.constexpr):
    """acc + transposed v times weight."""
    weight = weight.to(v.dtype)
    if UPCAST:
        v, weight = v.to(tl.float32), weight.to(tl.float32)
    return tl.dot(tl.trans(v), weight, acc, input_precision="ieee")


@jit
def base_rows(
    pool, head, token, d, per_head, per_token, TOKENS: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    """Pointers [ROWS, D] with all in them that does not change from tile to tile."""
    base = pool + (head * per_head)[:, None] + d[None, :]
    if BLOCK_SIZE % TOKENS == 0:
        base += (token * per_token)[:, None]
    return base


@jit
def tile_rows(
    base, block, tile, token, per_block, per_token, TOKENS: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    """Pointers [ROWS, D] to one tile; block: its block's id, or an id for each row."""
    block = block.to(tl.int64)
    if BLOCK_SIZE % TOKENS == 0:
        return base + (block * per_block + tile * TOKENS % BLOCK_SIZE * per_token)
    else:
        return base + (block * per_block + token % BLOCK_SIZE * per_token)[:, None]


@jit
def tile_blocks(entries, tile, row_token, length, TOKENS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """The block ids of a tile: one where it lies in one block, otherwise one for each row."""
    if BLOCK_SIZE % TOKENS == 0:
        return tl.load(entries + tile * TOKENS // BLOCK_SIZE)
    else:
        token = tile * TOKENS + row_token
        return tl.load(entries + token // BLOCK_SIZE, mask=token < length, other=0)


@jit
def attend_range(
    q,
    ahead,
    k_base,
    v_base,
    entries,
    tile,
    stop,
    length,
    own,
    d_ok,
    row_token,
    scale,
    cap,
    window,
    k_block,
    k_token,
    v_block,
    v_token,
    TOKENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FULL: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    STAGES: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Tiles tile .. stop - 1 of one sequence's window; ahead: the block ids of the first.

    q is [D, N], the result acc [D, N].
    """
    peak = tl.full([q.shape[1]], float("-inf"), tl.float32)
    total = tl.zeros([q.shape[1]], tl.float32)
    acc = tl.zeros([q.shape[0], q.shape[1]], tl.float32)
    start = 0
    if WINDOW:
        start = tl.maximum(length - window, 0)
    first, last = tile + start // TOKENS, tl.maximum(stop + start // TOKENS - 1, 0)
    for i in tl.range(first, stop + start // TOKENS, num_stages=STAGES):
        token, block = i * TOKENS + row_token, ahead
        ahead = tile_blocks(entries, tl.minimum(i + 1, last), row_token, length, TOKENS, BLOCK_SIZE)
        there = token < length
        if WINDOW:  # blocks that left the window are gone from the table
            there = there & (token >= start)
        ok = there[:, None]
        if not FULL:
            ok = ok & d_ok
        k_at = tile_rows(k_base, block, i, token, k_block, k_token, TOKENS, BLOCK_SIZE)
        v_at = tile_rows(v_base, block, i, token, v_block, v_token, TOKENS, BLOCK_SIZE)
        s = tile_scores(tl.load(k_at, mask=ok, other=0.0), q, scale, cap, CAP, UPCAST)
        s = tl.where(there[:, None] & own, s, float("-inf"))
        new = tl.maximum(peak, tl.max(s, 0))
        safe = tl.where(new == float("-inf"), 0.0, new)
        weight, fade = tl.exp2(s - safe[None, :]), tl.exp2(peak - safe)
        total = total * fade + tl.sum(weight, 0)
        acc = add_values(acc * fade[None, :], weight, tl.load(v_at, mask=ok, other=0.0), UPCAST)
        peak = new
    return acc, peak, total


@jit
def read_record(at):
    """A program's line of the plan."""
    begin, end, seq = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    seq_begin, seq_end, length = tl.load(at + 3), tl.load(at + 4), tl.load(at + 5)
    return begin, end, seq, seq_begin, seq_end, length, tl.load(at + 6), tl.load(at + 7)


@jit
def range_end(tile, end, seq, seq_begin, seq_end, SPLITS: tl.constexpr, LEAST: tl.constexpr):
    """Where the work on this sequence stops for now, and which sequence is next."""
    stop, after = tl.minimum(end, seq_end), seq + 1
    if SPLITS:
        stop = tl.minimum(stop, tile + split_tiles(seq_end - seq_begin, SPLITS, LEAST))
        after = seq + (stop == seq_end).to(tl.int32)
    return stop, after


@jit
def load_sequence(cum, seq_lens, rows, seq, batch, HAS_ROWS: tl.constexpr):
    """First tile, tile behind the last and length of a sequence; the row of the one behind it."""
    real, row = seq < batch, tl.minimum(seq + 1, batch - 1)
    if HAS_ROWS:
        row = tl.load(rows + row).to(tl.int32)
    begin, end = tl.load(cum + seq, mask=real, other=0), tl.load(cum + seq + 1, mask=real, other=0)
    return begin, end, tl.load(seq_lens + seq, mask=real, other=0), row


@jit
def open_sequence(
    query,
    seq,
    q_stride,
    q_head_stride,
    lane,
    entries,
    tile,
    length,
    window,
    row_token,
    TOKENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """A sequence's queries [N, D] and the block ids of its tile `tile`, to begin with."""
    q_head, _, d, ok, _ = lane
    at = seq.to(tl.int64) * q_stride + (q_head * q_head_stride)[:, None] + d[None, :]
    q = tl.load(query + at, mask=ok, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    if WINDOW:
        tile += tl.maximum(length - window, 0) // TOKENS
    return q, tile_blocks(entries, tile, row_token, length, TOKENS, BLOCK_SIZE)
