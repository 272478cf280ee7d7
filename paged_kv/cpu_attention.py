# Exported from book/13_engine.py by tools/export.py; edit the chapter, not this file.
"""Attention on a CPU: decodes by whole blocks, planned once a step for all layers."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged_kv.attend import count_decodes
from paged_kv.attention import paged_attention
from paged_kv.kv_store import KVStore, check_range
from paged_kv.packed_batch import PackedBatch


class Decodes(NamedTuple):
    """Some sequences of one new token each, of like length, padded to the longest.

    Fields
        tokens  int64 [n]: their places in the batch.
        halves  int64 [2 x n x blocks]: where the keys of each block lie, then its values, with
                half a block of the pool as the unit.
        dead    int64: which of the tokens fetched are not seen; keys first.
        mask    float32 [n, 1, 1, blocks x block_size]: 0 for a token that is seen, else -inf.
    """

    tokens: Tensor
    halves: Tensor
    dead: Tensor
    mask: Tensor


def like_lengths(counts: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Places of `counts`, in groups in which the least is half of the largest or more."""
    groups, order = list[NDArray[np.int64]](), (-counts).argsort(kind="stable")
    while len(order):
        size = int((2 * counts[order] >= counts[order[0]]).sum())
        groups.append(order[:size])
        order = order[size:]
    return groups


def plan_decodes(
    batch: PackedBatch, num_decodes: int, block_size: int, window: int | None
) -> list[Decodes]:
    """Plans of the first `num_decodes` sequences; those that hold nothing are left out.

    Raises: ValueError for a window below 1, or a token that is seen and has no block.
    """
    lens = batch.seq_lens[:num_decodes].numpy().astype(np.int64)
    if window is not None and window < 1:
        raise ValueError(f"window = {window}: a token sees itself, so 1 or more is needed")
    first = np.maximum(lens - window, 0) if window is not None else np.zeros_like(lens)
    begin, end = first // block_size, -(-lens // block_size)
    places, found = lens.nonzero()[0], list[Decodes]()
    for group in like_lengths((end - begin)[places]):
        at = places[group]
        index = begin[at, None] + np.arange(end[at[0]] - begin[at[0]])
        real = index < end[at, None]
        rows = batch.rows.numpy()[at, None]
        ids = batch.block_table.numpy()[rows, np.where(real, index, 0)].astype(np.int64)
        if (ids[real] < 0).any():
            raise ValueError("block_table: -1 found where a token should be")
        halves = 2 * np.where(real, ids, 0)
        position = (index[:, :, None] * block_size + np.arange(block_size)).reshape(len(at), -1)
        seen = (position < lens[at, None]) & (position >= first[at, None])
        dead = (~seen).reshape(-1).nonzero()[0]
        mask = np.where(seen, np.float32(0), np.float32(-np.inf))[:, None, None]
        parts = at, np.append(halves, halves + 1), np.append(dead, dead + seen.size), mask
        found.append(Decodes(*map(torch.from_numpy, parts)))
    return found


def attend_decodes(
    query: Tensor, tensor: Tensor, plan: Decodes, scale: float | None, output: Tensor
) -> None:
    """Attention of the sequences of `plan`, in float32, into their places in `output`.

    Args: query and output [num_tokens, num_q_heads, head_size]; `tensor`, one of
    `KVStore.tensors`.
    """
    heads, size = tensor.shape[3:]
    n = len(plan.tokens)
    fetched = tensor.view(-1, tensor[0, 0].numel()).index_select(0, plan.halves)
    fetched.view(-1, heads * size).index_fill_(0, plan.dead, 0)
    k, v = fetched.view(2, n, -1, heads, size).float().transpose(2, 3)
    q = query[plan.tokens].float().view(n, heads, -1, size)  # a KV head's queries, as its tokens
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, plan.mask, scale=scale)
    output[plan.tokens] = out.reshape(n, -1, size).to(output.dtype)


class CpuAttention:
    """A `LayerAttention` for a CPU; equals `write_and_attend` but for rounding.

    State: `batch`, the one planned for, known by its identity; `num_decodes`, its sequences in
    front with one new token; `lines`, where its keys and its values go, None where a token is
    skipped; `plans`, {window: Decodes}.
    """

    def __init__(self) -> None:
        self.batch: PackedBatch | None = None
        self.num_decodes = 0
        self.lines: tuple[Tensor, Tensor] | None = None
        self.plans: dict[int | None, list[Decodes]] = {}

    def begin(self, batch: PackedBatch, store: KVStore) -> None:
        """Forget the plans of the last step.  Raises: ValueError for what points nowhere."""
        size, slots = store.block_size, batch.slot_mapping
        check_range("rows", batch.rows, 0, len(batch.block_table))
        check_range("seq_lens", batch.seq_lens, -1, batch.block_table.shape[1] * size + 1)
        check_range("slot_mapping", slots, -1, store.num_blocks * size)
        self.batch, self.plans, self.lines = batch, {}, None
        self.num_decodes = count_decodes(batch.cu_seqlens)
        if len(slots) and int(slots.min()) >= 0:
            keys = slots + slots // size * size
            self.lines = keys, keys + size

    def write(self, store: KVStore, layer: int, key: Tensor, value: Tensor) -> None:
        """`KVStore.write`, of which nothing has to be found out."""
        assert self.batch is not None
        if self.lines is None:
            store.write(layer, key, value, self.batch.slot_mapping)
            return
        rows = store.tensors[layer].view(-1, *key.shape[1:])
        for line, data in zip(self.lines, (key, value), strict=True):
            rows.index_copy_(0, line, data.to(rows.dtype))

    def __call__(
        self,
        store: KVStore,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch: PackedBatch,
        *,
        scale: float | None,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Store the new K/V and return attention, [num_tokens, num_q_heads, head_size]."""
        if batch is not self.batch:
            self.begin(batch, store)
        self.write(store, layer, key, value)
        n = self.num_decodes if softcap is None and sinks is None else 0
        output = torch.zeros_like(query)
        if n and window not in self.plans:
            self.plans[window] = plan_decodes(batch, n, store.block_size, window)
        for plan in self.plans[window] if n else ():
            attend_decodes(query, store.tensors[layer], plan, scale, output)
        if n < len(batch.seq_lens):
            output[n:] = paged_attention(
                query[n:], store.keys(layer), store.values(layer), batch.block_table,
                batch.cu_seqlens[n:] - n, batch.seq_lens[n:], rows=batch.rows[n:],
                scale=scale, window=window, softcap=softcap, sinks=sinks,
            )[0]  # fmt: skip
        return output
