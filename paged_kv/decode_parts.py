# Exported from book/11_triton_decode.py by tools/export.py; edit the chapter, not this file.
"""Results and partial results: stored, joined by the program that comes last, or by a launch."""

# mypy: ignore-errors
from __future__ import annotations

from paged_kv.decode_shares import split_tiles
from paged_kv.triton_device import LOG2E, jit, tl


@jit
def out_rows(out, seq, q_head, d, num_q_heads):
    """Pointers to a sequence's output [N, D] and lse [N]."""
    output, lse, o_stride, o_head_stride = out
    seq = seq.to(tl.int64)
    to = output + seq * o_stride + (q_head * o_head_stride)[:, None] + d[None, :]
    return to, lse + seq * num_q_heads + q_head


@jit
def put_rows(acc, peak, total, to, to_lse, ok, head_ok, unit):
    """Divide acc [N, D] by its total and store it, and the log of the denominator."""
    good = tl.where(total > 0, total, 1.0)
    tl.store(to, (acc / good[:, None]).to(to.dtype.element_ty), mask=ok)
    tl.store(to_lse, (peak + tl.log2(good)) / unit, mask=head_ok)


@jit
def put_nothing(to, to_lse, ok, head_ok):
    """A sequence without a token: output 0, lse minus infinity."""
    tl.store(to, tl.zeros(to.shape, to.dtype.element_ty), mask=ok)
    tl.store(to_lse, tl.full(to_lse.shape, float("-inf"), tl.float32), mask=head_ok)


@jit
def start_sums(sinks, q_head, head_ok, N: tl.constexpr, SINKS: tl.constexpr):
    """Maximum and total before any key: those of the sink, a score without a value."""
    peak = tl.full([N], float("-inf"), tl.float32)
    if SINKS:
        peak = tl.load(sinks + q_head, mask=head_ok, other=float("-inf")).to(tl.float32) * LOG2E
    return peak, tl.where(peak == float("-inf"), 0.0, 1.0)


@jit
def merge(acc, peak, total, other, x, weight):
    """acc [N, D] and its sums, joined with `other`, whose weights sum to `weight` times 2^x."""
    new = tl.maximum(peak, x)
    safe = tl.where(new == float("-inf"), 0.0, new)
    fade, weight = tl.exp2(peak - safe), weight * tl.exp2(x - safe)
    return acc * fade[:, None] + other * weight[:, None], new, total * fade + weight


@jit
def part_range(seq, seq_begin, seq_end, cum, batch, SPLITS: tl.constexpr, LEAST: tl.constexpr):
    """First and last part of a sequence, and whether its first is its program's second.

    Even shares: a part is what one program reads of the sequence, and has its number.
    """
    if SPLITS:
        per = split_tiles(seq_end - seq_begin, SPLITS, LEAST)
        first, late = seq * SPLITS, 0
        last = first + (seq_end - seq_begin - 1) // per
    else:
        tiles = tl.load(cum + batch).to(tl.int64)
        active = tl.load(cum + batch + 1).to(tl.int64)
        first = (((seq_begin + 1).to(tl.int64) * active - 1) // tiles).to(tl.int32)
        last = ((seq_end.to(tl.int64) * active - 1) // tiles).to(tl.int32)
        late = (first.to(tl.int64) * tiles // active != seq_begin).to(tl.int32)
    return first, last, late


@jit
def join_parts(
    parts,
    first,
    last,
    late,
    lane,
    sinks,
    HEAD_SIZE: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    SINKS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Join the parts of one sequence, read past the L1 cache, which may hold stale lines."""
    part, part_lse = parts
    q_head, head_ok, d, ok, num_q_heads = lane
    peak, total = start_sums(sinks, q_head, head_ok, N, SINKS)
    acc = tl.zeros([N, D], tl.float32)
    for i in tl.range(first, last + 1, 2, num_stages=1):  # two at once: their loads overlap
        p = first * 0 + i  # a tensor in the interpreter too
        a = (PARTS * p + tl.where(p == first, late, 0)).to(tl.int64) * num_q_heads + q_head
        b = (PARTS * (p + 1)).to(tl.int64) * num_q_heads + q_head
        two = p + 1 <= last
        x = tl.load(part_lse + a, mask=head_ok, other=float("-inf"), cache_modifier=".cg")
        y = tl.load(part_lse + b, mask=head_ok & two, other=float("-inf"), cache_modifier=".cg")
        at_a, at_b = a[:, None] * HEAD_SIZE + d[None, :], b[:, None] * HEAD_SIZE + d[None, :]
        o = tl.load(part + at_a, mask=ok, other=0.0, cache_modifier=".cg")
        u = tl.load(part + at_b, mask=ok & two, other=0.0, cache_modifier=".cg")
        acc, peak, total = merge(acc, peak, total, o, x, 1.0)
        acc, peak, total = merge(acc, peak, total, u, y, 1.0)
    return acc, peak, total


@jit
def finish_range(
    acc,
    peak,
    total,
    begin,
    tile,
    stop,
    where,
    out,
    parts,
    arrived,
    cum,
    lane,
    sinks,
    batch,
    HEAD_SIZE: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    SINKS: tl.constexpr,
    FUSED: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
):
    """Write a whole sequence, or a part of one; who comes last joins the parts."""
    PARTS: tl.constexpr = 1 if SPLITS else 2
    seq, seq_begin, seq_end = where
    q_head, head_ok, d, ok, num_q_heads = lane
    to, to_lse = out_rows(out, seq, q_head, d, num_q_heads)
    acc, p = tl.trans(acc), tl.program_id(0)
    if (tile == seq_begin) & (stop == seq_end):
        if SINKS:
            x, one = start_sums(sinks, q_head, head_ok, N, SINKS)
            acc, peak, total = merge(acc, peak, total, tl.zeros([N, D], tl.float32), x, one)
        put_rows(acc, peak, total, to, to_lse, ok, head_ok, LOG2E)
    else:
        slot = 2 * p + (tile != begin).to(tl.int32)
        if SPLITS:
            per = split_tiles(seq_end - seq_begin, SPLITS, LEAST)
            slot = seq * SPLITS + (tile - seq_begin) // per
        at = slot.to(tl.int64) * num_q_heads + q_head
        to_part = parts[0] + at[:, None] * HEAD_SIZE + d[None, :]
        put_rows(acc, peak, total, to_part, parts[1] + at, ok, head_ok, 1.0)
        if FUSED:
            first, last, late = part_range(seq, seq_begin, seq_end, cum, batch, SPLITS, LEAST)
            flag = arrived + seq * tl.num_programs(1) + tl.program_id(1)
            tl.debug_barrier()  # every thread's part is written before the program says so
            if tl.atomic_add(flag, 1, sem="acq_rel") == last - first:
                tl.store(flag, 0)
                acc, peak, total = join_parts(
                    parts, first, last, late, lane, sinks, HEAD_SIZE, N, D, SINKS, PARTS
                )
                put_rows(acc, peak, total, to, to_lse, ok, head_ok, LOG2E)


@jit
def write_empty(cum, seq_lens, out, lane, batch):
    """Somebody has to write for the sequences without a token, if there are any."""
    q_head, head_ok, d, ok, num_q_heads = lane
    if tl.load(cum + batch + 2) > 0:
        for i in range(tl.program_id(0), batch, tl.num_programs(0)):
            seq = tl.program_id(0) * 0 + i
            if tl.load(seq_lens + seq) <= 0:
                to, to_lse = out_rows(out, seq, q_head, d, num_q_heads)
                put_nothing(to, to_lse, ok, head_ok)


@jit
def join_chunk(acc, peak, total, part, index, x, ok, HEAD_SIZE: tl.constexpr, D: tl.constexpr):
    """acc [N, D] and its sums, joined with the parts at index [CHUNK, N], whose lse is x."""
    d = tl.arange(0, D)[None, None, :]
    o = tl.load(part + index[:, :, None] * HEAD_SIZE + d, mask=ok, other=0.0)
    new = tl.maximum(peak, tl.max(x, 0))
    safe = tl.where(new == float("-inf"), 0.0, new)
    weight, fade = tl.exp2(x - safe[None, :]), tl.exp2(peak - safe)
    acc = acc * fade[:, None] + tl.sum(o * weight[:, :, None], 0)
    return acc, new, total * fade + tl.sum(weight, 0)


@jit(do_not_specialize=["batch", "num_q_heads"])
def reduce_kernel(
    part,
    part_lse,
    cum,
    sinks,
    output,
    lse,
    batch,
    o_stride,
    o_head_stride,
    num_q_heads,
    HEAD_SIZE: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    CHUNK: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Join the parts of one sequence, CHUNK at once; nothing to do where it was not cut."""
    seq, c, d = tl.program_id(0), tl.arange(0, CHUNK), tl.arange(0, D)
    head = tl.program_id(1) * N + tl.arange(0, N)
    head_ok, d_ok = head < num_q_heads, (d < HEAD_SIZE)[None, :]
    ok = head_ok[:, None] & d_ok
    seq_begin, seq_end = tl.load(cum + seq), tl.load(cum + seq + 1)
    to, to_lse = out_rows((output, lse, o_stride, o_head_stride), seq, head, d, num_q_heads)
    if seq_begin == seq_end:
        put_nothing(to, to_lse, ok, head_ok)
    else:
        first, last, late = part_range(seq, seq_begin, seq_end, cum, batch, 0, 0)
        if last > first:
            peak, total = start_sums(sinks, head, head_ok, N, SINKS)
            acc = tl.zeros([N, D], tl.float32)
            for at in tl.range(first, last + 1, CHUNK):
                p = first * 0 + at + c
                slot = (2 * p + tl.where(p == first, late, 0)).to(tl.int64)
                index = slot[:, None] * num_q_heads + head[None, :]
                there = (p <= last)[:, None] & head_ok[None, :]
                x = tl.load(part_lse + index, mask=there, other=float("-inf"))
                acc, peak, total = join_chunk(
                    acc,
                    peak,
                    total,
                    part,
                    index,
                    x,
                    there[:, :, None] & d_ok[None, :, :],
                    HEAD_SIZE,
                    D,
                )
            put_rows(acc, peak, total, to, to_lse, ok, head_ok, LOG2E)
