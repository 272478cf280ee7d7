# Exported from book/11_triton_decode.py by tools/export.py; edit the chapter, not this file.
"""The decode kernel: a run of tiles a program, one sequence after the other.

A tile's keys multiply the queries from the left, K Q^T and then V^T W, so that the many rows
of the cache fill the rows of the matrix unit, and the few queries its columns.
"""

# mypy: ignore-errors
from __future__ import annotations

from paged_kv.decode_parts import finish_range, write_empty
from paged_kv.decode_tiles import (
    attend_range,
    base_rows,
    load_sequence,
    open_sequence,
    range_end,
    read_record,
)
from paged_kv.triton_device import jit, tl


@jit
def walk_range(
    to,
    query,
    table,
    seq_lens,
    rows,
    cum,
    k_base,
    v_base,
    own,
    d_ok,
    r_token,
    lane,
    out,
    parts,
    arrived,
    sinks,
    batch,
    scale,
    cap,
    window,
    q_stride,
    q_head_stride,
    k_block,
    k_token,
    v_block,
    v_token,
    table_stride,
    HEAD_SIZE: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    SINKS: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    UPCAST: tl.constexpr,
    FUSED: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
):
    """All tiles of one program; what a sequence begins with is loaded during the one before."""
    begin, end, seq, seq_begin, seq_end, length, row, next_row = read_record(to)
    entries, tile = table + row.to(tl.int64) * table_stride, begin
    q, ahead = open_sequence(
        query,
        seq,
        q_stride,
        q_head_stride,
        lane,
        entries,
        tile - seq_begin,
        length,
        window,
        r_token,
        TOKENS,
        BLOCK_SIZE,
        WINDOW,
        UPCAST,
    )
    while tile < end:
        stop, after = range_end(tile, end, seq, seq_begin, seq_end, SPLITS, LEAST)
        next_begin, next_end, next_length, last_row = load_sequence(
            cum, seq_lens, rows, after, batch, HAS_ROWS
        )
        row = tl.where(after == seq, row, next_row)
        upcoming = table + row.to(tl.int64) * table_stride
        next_q, next_ahead = open_sequence(
            query,
            tl.minimum(after, batch - 1),
            q_stride,
            q_head_stride,
            lane,
            upcoming,
            tl.where(after == seq, stop - seq_begin, 0),
            next_length,
            window,
            r_token,
            TOKENS,
            BLOCK_SIZE,
            WINDOW,
            UPCAST,
        )
        acc, peak, total = attend_range(
            tl.trans(q),
            ahead,
            k_base,
            v_base,
            entries,
            tile - seq_begin,
            stop - seq_begin,
            length,
            own,
            d_ok,
            r_token,
            scale,
            cap,
            window,
            k_block,
            k_token,
            v_block,
            v_token,
            TOKENS,
            BLOCK_SIZE,
            D == HEAD_SIZE,
            WINDOW,
            CAP,
            STAGES,
            UPCAST,
        )
        if stop > tile:
            finish_range(
                acc,
                peak,
                total,
                begin,
                tile,
                stop,
                (seq, seq_begin, seq_end),
                out,
                parts,
                arrived,
                cum,
                lane,
                sinks,
                batch,
                HEAD_SIZE,
                D,
                N,
                SINKS,
                FUSED,
                SPLITS,
                LEAST,
            )
        tile, seq, seq_begin, seq_end = stop, after, next_begin, next_end
        length, next_row, q, ahead, entries = next_length, last_row, next_q, next_ahead, upcoming


@jit(do_not_specialize=["batch", "cap", "scale", "window", "table_stride", "num_q_heads"])
def decode_kernel(
    query,
    keys,
    values,
    table,
    seq_lens,
    rows,
    cum,
    record,
    output,
    lse,
    part,
    part_lse,
    arrived,
    sinks,
    batch,
    scale,
    cap,
    window,
    q_stride,
    q_head_stride,
    o_stride,
    o_head_stride,
    k_block,
    k_token,
    k_head,
    v_block,
    v_token,
    v_head,
    table_stride,
    num_q_heads,
    HEAD_SIZE: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    SINKS: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    UPCAST: tl.constexpr,
    FUSED: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
):
    """Attention of the tiles in one program's record, for HEADS neighbouring KV heads."""
    TOKENS: tl.constexpr = ROWS // HEADS
    r, n, d = tl.arange(0, ROWS), tl.arange(0, N), tl.arange(0, D)
    r_token, group0 = r // HEADS, tl.program_id(1) * HEADS
    own = (r % HEADS)[:, None] == (n // GROUP)[None, :]  # which rows a query head attends to
    head_ok, d_ok = n < HEADS * GROUP, (d < HEAD_SIZE)[None, :]
    lane = (group0 * GROUP + n, head_ok, d, head_ok[:, None] & d_ok, num_q_heads)
    out, parts = (output, lse, o_stride, o_head_stride), (part, part_lse)
    head = group0 + r % HEADS
    k_base = base_rows(keys, head, r_token, d, k_head, k_token, TOKENS, BLOCK_SIZE)
    v_base = base_rows(values, head, r_token, d, v_head, v_token, TOKENS, BLOCK_SIZE)
    walk_range(
        record + tl.program_id(0) * 8,
        query,
        table,
        seq_lens,
        rows,
        cum,
        k_base,
        v_base,
        own,
        d_ok,
        r_token,
        lane,
        out,
        parts,
        arrived,
        sinks,
        batch,
        scale,
        cap,
        window,
        q_stride,
        q_head_stride,
        k_block,
        k_token,
        v_block,
        v_token,
        table_stride,
        HEAD_SIZE,
        D,
        N,
        TOKENS,
        BLOCK_SIZE,
        WINDOW,
        CAP,
        SINKS,
        HAS_ROWS,
        STAGES,
        UPCAST,
        FUSED,
        SPLITS,
        LEAST,
    )
    if FUSED:
        write_empty(cum, seq_lens, out, lane, batch)
