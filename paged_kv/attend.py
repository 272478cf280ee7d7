# Exported from book/12_triton_prefill.py by tools/export.py; edit the chapter, not this file.
"""Attention of mixed batches: decodes by one kernel, chunks of prompts by the other.

Triton's kernels serve on a CUDA device and in Triton's interpreter; chapter 04's torch code
everywhere else, with the same arguments and results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paged_kv.attention import paged_attention
from paged_kv.decode_plan import DecodePlan
from paged_kv.kernels import decode_attention
from paged_kv.kernels_cache import write_kv
from paged_kv.kernels_prefill import prefill_attention
from paged_kv.kv_store import KVStore
from paged_kv.packed_batch import PackedBatch
from paged_kv.prefill_plan import PrefillPlan
from paged_kv.triton_device import runs_kernels


def count_decodes(cu_seqlens: Tensor) -> int:
    """How many sequences at the front have a single new token; waits for a GPU."""
    counts = cu_seqlens.diff().tolist()
    return next((i for i, count in enumerate(counts) if count != 1), len(counts))


@dataclass(frozen=True)
class AttendPlan:
    """Who computes what in one step, for all layers with these heads and this window.

    num_decodes: sequences at the front, one new token each, for the decode kernel; decode,
    prefill: the kernels' plans, None where there is nothing to do.
    """

    num_decodes: int
    decode: DecodePlan | None
    prefill: PrefillPlan | None


def plan_attend(
    query: Tensor,
    keys: Tensor,
    rows: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    num_decodes: int,
    window: int | None = None,
    batch_invariant: bool = False,
) -> AttendPlan:
    """The plan of one step, made by a launch or two; query and keys only show their shapes.

    batch_invariant: a sequence's decode output is the same bits alone and in any batch.
    """
    n, num_seqs = num_decodes, len(seq_lens)
    if not 0 <= n <= num_seqs:
        raise ValueError(f"num_decodes = {n}: 0 to {num_seqs} allowed")
    heads, (kv_heads, size) = query.shape[1], keys.shape[2:]
    decode = prefill = None
    if n and runs_kernels(keys.device):
        decode = DecodePlan(
            n,
            heads,
            kv_heads,
            size,
            keys.device,
            dtype=keys.dtype,
            window=window,
            batch_invariant=batch_invariant,
        )
        decode.update(seq_lens[:n], rows[:n])
    if n < num_seqs and runs_kernels(keys.device):
        prefill = PrefillPlan(
            num_seqs - n, len(query), heads, kv_heads, size, keys.device, dtype=keys.dtype
        )
        prefill.update(cu_seqlens[n:], seq_lens[n:], rows[n:])
    return AttendPlan(n, decode, prefill)


def attend(
    query: Tensor,
    store: KVStore,
    layer: int,
    rows: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    *,
    num_decodes: int | None = None,
    plan: AttendPlan | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Causal attention of a packed batch over what `store` holds, decodes and chunks mixed.

    Args: as `paged_attention`, options scale, window, softcap and sinks included; besides
        num_decodes  sequences at the front that have one new token; counted if None, for which
                     the host waits.  Others with one token are right too, but slower.
        plan         of `plan_attend`, for this step; if None, made here.
    Returns: output, like query, and lse, float32 [num_tokens, num_q_heads].
    Raises: ValueError where the arguments do not fit.
    On a GPU, given plan or num_decodes, it never waits, and a CUDA graph can hold it.
    """
    keys, values = store.keys(layer), store.values(layer)
    if not runs_kernels(query.device):
        return paged_attention(
            query, keys, values, block_table, cu_seqlens, seq_lens, rows=rows, **options
        )
    if plan is None:
        n = count_decodes(cu_seqlens) if num_decodes is None else num_decodes
        window = options.get("window")
        plan = plan_attend(query, keys, rows, cu_seqlens, seq_lens, n, window)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.empty(query.shape[:2], device=query.device)
    n, query = plan.num_decodes, query.to(keys.dtype)
    if plan.decode is not None:
        decode_attention(
            query[:n],
            keys,
            values,
            block_table,
            seq_lens[:n],
            rows=rows[:n],
            plan=plan.decode,
            output=out[:n],
            lse=lse[:n],
            **options,
        )
    if plan.prefill is not None:
        prefill_attention(
            query,
            keys,
            values,
            block_table,
            cu_seqlens[n:],
            seq_lens[n:],
            rows=rows[n:],
            plan=plan.prefill,
            output=out,
            lse=lse,
            **options,
        )
    return out, lse


class KernelAttention:
    """A model's attention by the kernels: give it to `PagedModel` as `attention`.

    Each layer's K/V are written, then attended to.  A step is planned by the first layer that
    needs it, for all.  State: `batch`, the one planned for; `plans`, by (heads, KV heads, head
    size, window).  A step is known by its batch's identity: where the tensors of one batch
    change in place, as for a CUDA graph, call `begin` before each step.
    """

    def __init__(self, batch_invariant: bool = False) -> None:
        self.batch_invariant = batch_invariant
        self.batch: PackedBatch | None = None
        self.num_decodes = 0
        self.plans: dict[tuple[int, ...], AttendPlan] = {}

    def begin(self, batch: PackedBatch, num_decodes: int | None = None) -> None:
        """Forget the last step's plans; num_decodes as for `attend`."""
        self.batch, self.plans = batch, {}
        cu = batch.cu_seqlens
        self.num_decodes = count_decodes(cu) if num_decodes is None else num_decodes

    def __call__(
        self,
        store: KVStore,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch: PackedBatch,
        **options: Any,
    ) -> Tensor:
        """Store the new K/V and return attention, [num_tokens, num_q_heads, head_size]."""
        if batch is not self.batch:
            self.begin(batch)
        keys, where = store.keys(layer), (batch.rows, batch.cu_seqlens, batch.seq_lens)
        write_kv(key, value, batch.slot_mapping, keys, store.values(layer))
        window = options.get("window")
        shape = (query.shape[1], *keys.shape[2:], window or 0)
        if shape not in self.plans:
            self.plans[shape] = plan_attend(
                query, keys, *where, self.num_decodes, window, self.batch_invariant
            )
        return attend(
            query,
            store,
            layer,
            batch.rows,
            batch.block_table,
            batch.cu_seqlens,
            batch.seq_lens,
            plan=self.plans[shape],
            **options,
        )[0]
