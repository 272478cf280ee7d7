# Exported from book/12_triton_prefill.py by tools/export.py; edit the chapter, not this file.
"""Prefill attention of a packed batch through a block table, in one launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paged_kv.kernels import check_buffers
from paged_kv.prefill_plan import PrefillPlan, PrefillTiles
from paged_kv.prefill_tiles import add_sink, attend_keys, key_range, put_tile, tile_lanes
from paged_kv.triton_device import interpreted, jit, next_pow2, tl

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@jit(do_not_specialize=["scale", "cap", "window", "table_stride", "num_q_heads"])
def prefill_kernel(
    query,
    keys,
    values,
    table,
    record,
    output,
    lse,
    sinks,
    scale,
    cap,
    window,
    q_token,
    q_head,
    o_token,
    o_head,
    k_block,
    k_token,
    k_head,
    table_stride,
    num_q_heads,
    HEAD_SIZE: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    PACK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    SINKS: tl.constexpr,
    STAGES: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One tile: ROWS // PACK queries of PACK heads that share a KV head."""
    head0 = tl.program_id(0) % (num_q_heads // PACK) * PACK
    to = record + tl.program_id(0) // (num_q_heads // PACK) * 5
    first, begin, end, length = tl.load(to), tl.load(to + 1), tl.load(to + 2), tl.load(to + 3)
    if begin + first < end:
        low, d = length - (end - begin) + first, tl.arange(0, D)
        token, head, position, real = tile_lanes(begin + first, end, head0, low, PACK, ROWS)
        ok = real[:, None] & (d < HEAD_SIZE)[None, :]
        at = (token * q_token + head * q_head)[:, None] + d[None, :]
        q = tl.load(query + at, mask=ok, other=0.0)
        if UPCAST:
            q = q.to(tl.float32)
        start, clear, stop = key_range(low, ROWS // PACK, length, window, KEYS, WINDOW)
        peak, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
        acc, base = tl.zeros([ROWS, D], tl.float32), (head0 // GROUP).to(tl.int64) * k_head
        entries = table + tl.load(to + 4).to(tl.int64) * table_stride
        for EDGE in tl.static_range(2):  # the tiles that all queries see, then the others
            acc, peak, total = attend_keys(
                q,
                acc,
                peak,
                total,
                keys + base,
                values + base,
                entries,
                clear if EDGE else start,
                stop if EDGE else clear,
                length,
                position,
                window,
                scale,
                cap,
                k_block,
                k_token,
                d,
                HEAD_SIZE,
                KEYS,
                BLOCK_SIZE,
                EDGE == 1 or WINDOW,
                WINDOW,
                CAP,
                STAGES,
                UPCAST,
            )
        if SINKS:
            acc, peak, total = add_sink(sinks, head, real, acc, peak, total)
        at = (token * o_token + head * o_head)[:, None] + d[None, :]
        put_tile(output, lse, at, token * num_q_heads + head, ok, real, acc, peak, total)


def prefill_constants(
    tiles: PrefillTiles, group: int, head_size: int, block_size: int, **options: bool
) -> dict[str, Any]:
    """What the prefill kernel is compiled with; options WINDOW, CAP, SINKS."""
    return (
        {"WINDOW": False, "CAP": False, "SINKS": False}
        | options
        | {
            "HEAD_SIZE": head_size,
            "D": max(16, next_pow2(head_size)),
            "GROUP": group,
            "PACK": tiles.pack,
            "ROWS": tiles.rows,
            "KEYS": tiles.keys,
            "BLOCK_SIZE": block_size,
            "STAGES": tiles.stages,
            "UPCAST": interpreted(),
        }
    )


def check_prefill(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: PrefillPlan,
    window: int | None,
    scale: float,
) -> None:
    """ValueError where the arguments of one call do not fit each other, kernel or plan."""
    (tokens, heads, size), kv_heads = query.shape, keys.shape[2]
    if heads % kv_heads or keys.shape != values.shape or keys.shape[3] != size:
        shapes = [tuple(t.shape) for t in (query, keys, values)]
        raise ValueError(f"query, keys, values: the shapes {shapes} do not fit each other")
    if keys.stride() != values.stride() or (query.stride(2), keys.stride(3)) != (1, 1):
        raise ValueError("query, keys, values: contiguous heads, keys laid out as values needed")
    if size % 8 or not 8 <= size <= 256:
        raise ValueError(f"query: head size {size}; a multiple of 8 up to 256 is needed")
    if query.dtype != keys.dtype or keys.dtype not in KERNEL_DTYPES:
        raise ValueError(f"query: {query.dtype}, cache {keys.dtype}; one of {KERNEL_DTYPES}")
    if (window is not None and window < 1) or scale <= 0:
        raise ValueError(f"window = {window}, scale = {scale}: more than 0 is needed")
    if plan.shape != (heads, kv_heads, size) or plan.dtype != keys.dtype:
        raise ValueError(f"plan: made for {plan.shape}, {plan.dtype}, not for this call")
    if tokens > plan.max_tokens:
        raise ValueError(f"plan: made for {plan.max_tokens} tokens, {tokens} given")


def launch_prefill(
    plan: PrefillPlan,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    output: Tensor,
    lse: Tensor,
) -> None:
    """One launch: a program for each tile and each pack of heads."""
    tiles, (heads, kv_heads, size) = plan.tiles, plan.shape
    constants = prefill_constants(
        tiles,
        heads // kv_heads,
        size,
        keys.shape[1],
        WINDOW=window is not None,
        CAP=softcap is not None,
        SINKS=sinks is not None,
    )
    prefill_kernel[(plan.max_tiles * (heads // tiles.pack),)](
        query,
        keys,
        values,
        block_table,
        plan.record,
        output,
        lse,
        sinks,
        scale,
        softcap or 1.0,
        window or 0,
        *query.stride()[:2],
        *output.stride()[:2],
        *keys.stride()[:3],
        block_table.stride(0),
        heads,
        **constants,
        num_warps=tiles.warps,
    )


def prefill_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    *,
    rows: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    plan: PrefillPlan | None = None,
    output: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of a packed batch through a block table, in one launch.

    Arguments and results as `paged_attention`; besides
        plan         updated with these cu_seqlens, seq_lens and rows; if None, made here.
        output, lse  where the result goes; new tensors if None.
    A token that cu_seqlens gives to no sequence is not computed: its output stays as it is.
    Raises: ValueError where shapes or types do not fit.  It never waits for a GPU; given plan,
    output and lse it allocates nothing.  Ids are not looked at: a wrong one reads a wrong block.
    """
    (tokens, heads, size), kv_heads = query.shape, keys.shape[2]
    scale = size**-0.5 if scale is None else scale
    num_rows = len(seq_lens) if plan is None and rows is None else 0
    if plan is None:
        plan = PrefillPlan(
            len(seq_lens), tokens, heads, kv_heads, size, query.device, dtype=keys.dtype
        )
        plan.update(cu_seqlens, seq_lens, rows)
    check_prefill(query, keys, values, plan, window, scale)
    check_buffers(query, block_table, num_rows, softcap, sinks, output, lse)
    output = torch.empty_like(query) if output is None else output
    lse = torch.empty(tokens, heads, device=query.device) if lse is None else lse
    launch_prefill(
        plan, query, keys, values, block_table, scale, window, softcap, sinks, output, lse
    )
    return output, lse
