# Exported from book/11_triton_decode.py by tools/export.py; edit the chapter, not this file.
"""Decode attention through the block table: one new token a sequence, as fast as the bytes come."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paged_kv.attention import paged_attention
from paged_kv.decode_kernels import decode_kernel
from paged_kv.decode_parts import reduce_kernel
from paged_kv.decode_plan import DecodePlan, Tiles
from paged_kv.kernels_cache import is_index
from paged_kv.triton_device import interpreted, next_pow2, runs_kernels, triton


def decode_constants(
    tiles: Tiles,
    group: int,
    head_size: int,
    block_size: int,
    splits: int = 0,
    least: int = 1,
    **options: bool,
) -> dict[str, Any]:
    """What the decode kernel is compiled with; options WINDOW, CAP, SINKS, HAS_ROWS."""
    plain = {"WINDOW": False, "CAP": False, "SINKS": False, "HAS_ROWS": False}
    return (
        plain
        | options
        | {
            "HEAD_SIZE": head_size,
            "D": max(16, next_pow2(head_size)),
            "GROUP": group,
            "HEADS": tiles.heads,
            "N": max(16, next_pow2(group * tiles.heads)),
            "ROWS": tiles.rows,
            "BLOCK_SIZE": block_size,
            "STAGES": tiles.stages,
            "UPCAST": interpreted(),
            "FUSED": tiles.fused,
            "SPLITS": splits,
            "LEAST": least,
        }
    )


def launch_decode(
    plan: DecodePlan,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    rows: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    output: Tensor,
    lse: Tensor,
) -> None:
    """One launch over the plan's programs, and one to join parts where that is not fused."""
    tiles, (heads, kv_heads, size) = plan.tiles, plan.shape
    constants = decode_constants(
        tiles,
        heads // kv_heads,
        size,
        keys.shape[1],
        plan.splits,
        plan.least,
        WINDOW=plan.window is not None,
        CAP=softcap is not None,
        SINKS=sinks is not None,
        HAS_ROWS=rows is not None,
    )
    decode_kernel[(tiles.programs, kv_heads // tiles.heads)](
        query,
        keys,
        values,
        block_table,
        seq_lens,
        rows,
        plan.cum,
        plan.record,
        output,
        lse,
        plan.part,
        plan.part_lse,
        plan.arrived,
        sinks,
        plan.batch,
        scale,
        softcap or 1.0,
        plan.window or 0,
        *query.stride()[:2],
        *output.stride()[:2],
        *keys.stride()[:3],
        *values.stride()[:3],
        block_table.stride(0),
        heads,
        **constants,
        num_warps=tiles.warps,
    )
    if not tiles.fused:
        launch_reduce(plan, sinks, output, lse)


def launch_reduce(plan: DecodePlan, sinks: Tensor | None, output: Tensor, lse: Tensor) -> None:
    """The second launch: few heads a program where there is little else to fill the card."""
    heads, _, size = plan.shape
    d = max(16, next_pow2(size))
    n = min(next_pow2(max(1, min(16, plan.batch * heads // 512))), next_pow2(heads))
    parts = max(2, min(64, next_pow2(-(-plan.tiles.programs // plan.batch) + 1)))
    chunk = max(2, min(parts, 8192 // (n * d)))
    reduce_kernel[(plan.batch, triton.cdiv(heads, n))](
        plan.part,
        plan.part_lse,
        plan.cum,
        sinks,
        output,
        lse,
        plan.batch,
        *output.stride()[:2],
        heads,
        HEAD_SIZE=size,
        D=d,
        N=n,
        CHUNK=chunk,
        SINKS=sinks is not None,
        num_warps=4 if n * chunk * d >= 2048 else 2,
    )


def check_buffers(
    query: Tensor,
    block_table: Tensor,
    num_rows: int,
    softcap: float | None,
    sinks: Tensor | None,
    output: Tensor | None,
    lse: Tensor | None,
) -> None:
    """ValueError where a kernel would read or write beside a tensor, or softcap is no cap."""
    tokens, heads, _ = query.shape
    if len(block_table) < num_rows:
        raise ValueError(f"block_table: {len(block_table)} rows for {num_rows} sequences")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap = {softcap}: more than 0, or None, is needed")
    if block_table.dtype != torch.int32 or block_table.ndim != 2 or block_table.stride(1) != 1:
        raise ValueError("block_table: int32 [num_rows, max_blocks], rows contiguous, is needed")
    if sinks is not None and (sinks.shape != (heads,) or not sinks.is_contiguous()):
        raise ValueError(f"sinks: {tuple(sinks.shape)}, not one a query head ({heads})")
    if output is not None and (output.shape != query.shape or output.stride(2) != 1):
        raise ValueError(f"output: {tuple(output.shape)}, not laid out like query")
    if lse is not None and (
        lse.shape != (tokens, heads) or lse.dtype != torch.float32 or not lse.is_contiguous()
    ):
        raise ValueError(f"lse: contiguous float32 {[tokens, heads]} is needed")


def check_decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    seq_lens: Tensor,
    rows: Tensor | None,
    window: int | None,
    plan: DecodePlan | None,
) -> None:
    """ValueError where the arguments of one call do not fit each other or the plan."""
    (batch, heads, size), kv_heads = query.shape, keys.shape[2]
    if heads % kv_heads or keys.shape != values.shape or keys.shape[3] != size:
        shapes = [tuple(t.shape) for t in (query, keys, values)]
        raise ValueError(f"query, keys, values: the shapes {shapes} do not fit each other")
    if size % 8 or not 8 <= size <= 256:
        raise ValueError(f"query: head size {size}; a multiple of 8 up to 256 is needed")
    if query.dtype != keys.dtype or keys.dtype != values.dtype:
        raise ValueError(f"query: {query.dtype}, but the cache holds {keys.dtype}")
    if not query.stride(2) == keys.stride(3) == values.stride(3) == 1:
        raise ValueError("query, keys, values: the numbers of a head are not contiguous")
    if seq_lens.shape != (batch,) or seq_lens.dtype != torch.int32:
        raise ValueError(f"seq_lens: int32 [{batch}] is needed, not {seq_lens.dtype}")
    if rows is not None and rows.shape != (batch,):
        raise ValueError(f"rows: {tuple(rows.shape)}, not one a sequence ({batch})")
    if not is_index(seq_lens, rows):
        raise ValueError("seq_lens, rows: contiguous integers are needed")
    if window is not None and window < 1:
        raise ValueError(f"window = {window}: a token sees itself, so 1 or more is needed")
    if plan is not None:
        made_for = (plan.batch, *plan.shape, plan.window, plan.dtype)
        if made_for != (batch, heads, kv_heads, size, window, query.dtype):
            raise ValueError(f"plan: made for {made_for}, not for this call")


def decode_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    rows: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    plan: DecodePlan | None = None,
    output: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one new token a sequence, through a block table.

    As `paged_attention` with one query a sequence, which serves where no kernels run.
    Args
        query       [batch, num_q_heads, head_size], the last dimension contiguous.
        block_table int32 [num_rows, max_blocks]; keys, values, seq_lens (int32), rows, scale,
                    window, softcap, sinks as there.  A padding entry has length 0.
        plan        of this shape and window, updated with these seq_lens and rows; if None, one
                    is made for this call.
        output, lse where the result goes; new tensors if None.
    Returns: output, like query, and lse, float32 [batch, num_q_heads].
    Raises: ValueError where shapes or types do not fit.
    On a GPU it never waits; given plan, output and lse it allocates nothing.  Lengths, rows
    and ids are not looked at there: a wrong id reads a wrong block.
    """
    check_decode(query, keys, values, seq_lens, rows, window, plan)
    batch, heads, size = query.shape
    check_buffers(query, block_table, 0 if rows is not None else batch, softcap, sinks, output, lse)
    if not runs_kernels(query.device):
        cu = torch.arange(batch + 1, dtype=torch.int32, device=query.device)
        made, sums = paged_attention(
            query,
            keys,
            values,
            block_table,
            cu,
            seq_lens,
            rows=rows,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
        return (
            made if output is None else output.copy_(made),
            sums if lse is None else lse.copy_(sums),
        )
    output = torch.empty_like(query) if output is None else output
    lse = torch.empty(batch, heads, device=query.device) if lse is None else lse
    if not batch:
        return output, lse
    if plan is None:
        plan = DecodePlan(
            batch, heads, keys.shape[2], size, query.device, dtype=query.dtype, window=window
        )
        plan.update(seq_lens, rows)
    launch_decode(
        plan,
        query,
        keys,
        values,
        block_table,
        seq_lens,
        rows,
        size**-0.5 if scale is None else scale,
        softcap,
        sinks,
        output,
        lse,
    )
    return output, lse
