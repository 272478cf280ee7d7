# Exported from book/04_paged_attention.py by tools/export.py; edit the chapter, not this file.
"""Attention that reads keys and values through a block table: a plain oracle, and torch.

Options of both
    scale    of the scores; head_size ** -0.5 if None.
    window   a query sees this many tokens, its own the last one; all before it if None.
    softcap  a score s becomes softcap * tanh(s / softcap); as it is if None.
    sinks    [num_q_heads]: one score more a head in the denominator, with no value.
Both return (output, lse).  lse is the log of the softmax's denominator, sink included; a
sequence without a token gives output 0 and lse -inf.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged_kv.kv_store import check_range

Array = NDArray[Any]


def read_through(pool: Array, block_table_row: Array, start: int, stop: int) -> Array:
    """Rows of positions start .. stop - 1 of one sequence, block after block, in float64."""
    block_size, parts = pool.shape[1], [np.zeros((0, *pool.shape[2:]))]
    for logical in range(start // block_size, -(-stop // block_size)):
        first = logical * block_size
        block = int(block_table_row[logical])
        assert block >= 0, f"position {max(first, start)} has no block"
        part = pool[block, max(0, start - first) : stop - first]
        parts.append(part.astype(np.float64))
    return np.concatenate(parts)


def paged_attention_numpy(
    query: Array,
    keys: Array,
    values: Array,
    block_table_row: Array,
    seq_len: int,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
) -> tuple[Array, Array]:
    """Attention of one sequence's last tokens, in float64: the oracle of every faster one.

    Args: query [num_tokens, num_q_heads, head_size], the last at position seq_len - 1; keys,
    values [num_blocks, block_size, num_kv_heads, head_size]; block_table_row [max_blocks].
    Returns: output, float64 in the shape of query, and lse, float64 [num_tokens, num_q_heads].
    """
    num_tokens, num_q_heads, head_size = query.shape
    scale = head_size**-0.5 if scale is None else scale
    output, lse = np.zeros(query.shape), np.full(query.shape[:2], -np.inf)
    for i in range(num_tokens if seq_len > 0 else 0):
        stop = seq_len - num_tokens + i + 1
        start = 0 if window is None else max(0, stop - window)
        k = read_through(keys, block_table_row, start, stop)
        v = read_through(values, block_table_row, start, stop)
        for head in range(num_q_heads):
            kv_head = head * keys.shape[2] // num_q_heads
            scores = k[:, kv_head] @ query[i, head].astype(np.float64) * scale
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            extra = [] if sinks is None else [float(sinks[head])]
            lse[i, head] = np.logaddexp.reduce([*scores, *extra])
            output[i, head] = np.exp(scores - lse[i, head]) @ v[:, kv_head]
    return output, lse


QUERY_TILE = 256  # queries of one sequence handled at once
MAX_ELEMENTS = 1 << 19  # keys, values or scores held at once: 2 MiB each in float32


@dataclass(frozen=True)
class Piece:
    """Neighbouring queries of one sequence, and the cached tokens that they see.

    first: index of the first one in the packed batch; count: how many; start, stop: positions
    of the tokens that any of them sees; row: the sequence's row of the block table.
    """

    first: int
    count: int
    start: int
    stop: int
    row: int


def cut_batch(
    cu_seqlens: Tensor, seq_lens: Tensor, rows: Tensor | None, window: int | None
) -> Iterator[Piece]:
    """Cut a batch into pieces of at most QUERY_TILE queries; empty sequences have none."""
    cu, lens = cu_seqlens.tolist(), seq_lens.tolist()
    table_rows = range(len(lens)) if rows is None else rows.tolist()
    for s, (begin, end, seq_len) in enumerate(zip(cu, cu[1:], lens, strict=False)):
        if 0 < seq_len < end - begin:
            raise ValueError(f"seq_lens: sequence {s} has {seq_len} tokens, {end - begin} queries")
        for first in range(begin, end if seq_len > 0 else begin, QUERY_TILE):
            last = min(first + QUERY_TILE, end)
            stop = seq_len - (end - last)
            start = 0 if window is None else max(0, stop - (last - first) - window + 1)
            yield Piece(first, last - first, start, stop, table_rows[s])


def group_pieces(parts: Iterator[Piece], kv_width: int, num_q_heads: int) -> Iterator[list[Piece]]:
    """Bring pieces of like sizes together; kv_width: the numbers in one key.

    A group ends where its keys or scores, padded, would pass MAX_ELEMENTS.
    """
    group: list[Piece] = []
    longest = 0
    for piece in sorted(parts, key=lambda p: (p.count, p.stop - p.start)):
        longest = max(longest, piece.stop - piece.start)
        width = max(kv_width, piece.count * num_q_heads)
        if group and (len(group) + 1) * longest * width > MAX_ELEMENTS:
            yield group
            group, longest = [], piece.stop - piece.start
        group.append(piece)
    if group:
        yield group


def piece_positions(
    group: list[Piece], device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Where a group's queries and keys are.

    Returns: token, own [pieces, queries], each query's index in the batch and its position,
    shorter pieces repeating their last; key [pieces, keys], positions, shorter pieces running
    on behind their last token; row [pieces, 1].
    """
    table = [[p.first, p.count, p.start, p.stop, p.row] for p in group]
    first, count, start, stop, row = torch.tensor(table, device=device).T[:, :, None]
    query = torch.arange(max(p.count for p in group), device=device).minimum(count - 1)
    key = torch.arange(max(p.stop - p.start for p in group), device=device)
    return first + query, stop - count + query, start + key, row


def fetch_rows(pool: Tensor, block: Tensor, offset: Tensor) -> Tensor:
    """The tokens at (block, offset), [n, num_keys] each, as [n, num_kv_heads, num_keys, d]."""
    num_heads, size = pool.shape[2:]
    step = pool.stride()
    head = torch.arange(num_heads, device=pool.device)[:, None]
    address = (block * step[0] + offset * step[1])[:, None] + head * step[2]
    last = sum((n - 1) * s for n, s in zip(pool.shape[:3], step[:3], strict=True))
    rows = pool.as_strided((last + 1, size), (1, step[3]))
    return torch.nn.functional.embedding(address, rows)


def load_tokens(
    keys: Tensor, values: Tensor, block_table: Tensor, row: Tensor, position: Tensor
) -> tuple[Tensor, Tensor]:
    """Read tokens through the table, float32 [pieces, num_kv_heads, num_keys, head_size].

    Every position [pieces, num_keys] is one that holds a token, so that no unwritten slot,
    where a NaN may lie, is ever read.
    """
    block_size = keys.shape[1]
    block = block_table[row, position // block_size].long()
    if (block < 0).any():
        raise ValueError("block_table: -1 found where a token should be")
    offset = position % block_size
    return fetch_rows(keys, block, offset).float(), fetch_rows(values, block, offset).float()


def dense_attention(
    query: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Dense attention in float32; every query sees at least one key.

    Args: query [n, t, num_q_heads, d]; k, v [n, num_kv_heads, s, d]; visible bool [n, t, s].
    Returns: output [n, t, num_q_heads, d] and lse [n, t, num_q_heads].
    """
    n, t, heads, d = query.shape
    kv_heads, s = k.shape[1:3]
    q = query.float().view(n, t, kv_heads, -1, d).permute(0, 2, 3, 1, 4) * scale
    scores = (q.reshape(n, kv_heads, -1, d) @ k.transpose(2, 3)).view(n, heads, t, s)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill_(~visible[:, None], -math.inf)
    peak = scores.amax(-1, keepdim=True)
    if sinks is not None:
        sink = sinks.float().view(-1, 1, 1)
        peak = torch.maximum(peak, sink)
    weights = scores.sub_(peak).exp_()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sink - peak)
    output = (weights.view(n, kv_heads, -1, s) @ v).view(n, heads, t, d) / total
    lse = (peak + total.log())[..., 0]
    return output.transpose(1, 2), lse.transpose(1, 2)


def visible_keys(key: Tensor, own: Tensor, window: int | None) -> Tensor:
    """Which query, at position own, may see which key: bool [pieces, count, num_keys]."""
    key, own = key[:, None, :], own[:, :, None]
    visible = key <= own
    return visible if window is None else visible & (key > own - window)


def check_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    rows: Tensor | None,
    window: int | None,
    sinks: Tensor | None,
) -> None:
    """ValueError where the arguments of one call do not fit each other."""
    heads, kv_heads = query.shape[1], keys.shape[2]
    if heads % kv_heads:
        raise ValueError(f"query: {heads} heads, a multiple of the {kv_heads} KV heads is needed")
    if query.shape[2] != keys.shape[3] or keys.shape != values.shape:
        shapes = [tuple(t.shape) for t in (query, keys, values)]
        raise ValueError(f"query, keys, values: the shapes {shapes} do not fit each other")
    if len(cu_seqlens) != len(seq_lens) + 1 or cu_seqlens[-1] != len(query):
        raise ValueError(f"cu_seqlens: {len(seq_lens) + 1} entries ending in {len(query)} needed")
    if rows is not None and len(rows) != len(seq_lens):
        raise ValueError(f"rows: {len(rows)} entries, {len(seq_lens)} needed")
    if window is not None and window < 1:
        raise ValueError(f"window = {window}: a token sees itself, so 1 or more is needed")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks: shape {tuple(sinks.shape)}, ({heads},) is needed")
    named = torch.arange(len(seq_lens)) if rows is None else rows
    check_range("rows", named, 0, len(block_table))
    check_range("seq_lens", seq_lens, -1, block_table.shape[1] * keys.shape[1] + 1)


def paged_attention(
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
) -> tuple[Tensor, Tensor]:
    """Causal attention of a packed batch, prefill and decode mixed, through a block table.

    Args
        query        [num_tokens, num_q_heads, head_size], sequence after sequence.
        keys, values [num_blocks, block_size, num_kv_heads, head_size], any strides.
        block_table  int32 [num_rows, max_blocks], -1 where there is no block.
        cu_seqlens   int32 [num_seqs + 1]: sequence s owns query[cu[s] : cu[s + 1]].
        seq_lens     int32 [num_seqs]: tokens in the cache, this step's included, 0 (or less)
                     for an empty one; query i of t stands at position seq_len - t + i.
        rows         [num_seqs]: the sequence's row of the table; 0, 1, 2 ... if None.
    Returns: output, like query, and lse, float32 [num_tokens, num_q_heads].
    Raises: ValueError where the arguments do not fit.  Changes nothing.  On a GPU it waits
    for the lengths, so no CUDA graph can hold it: that is for the kernels.
    """
    check_attention(query, keys, values, block_table, cu_seqlens, seq_lens, rows, window, sinks)
    scale = query.shape[2] ** -0.5 if scale is None else scale
    output = torch.zeros_like(query)
    lse = torch.full_like(query[..., 0], -math.inf, dtype=torch.float32)
    parts = cut_batch(cu_seqlens, seq_lens, rows, window)
    for group in group_pieces(parts, keys.shape[2] * keys.shape[3], query.shape[1]):
        token, own, key, row = piece_positions(group, query.device)
        k, v = load_tokens(keys, values, block_table, row, key.minimum(own[:, -1:]))
        visible = visible_keys(key, own, window)
        part = dense_attention(query[token], k, v, visible, scale, softcap, sinks)
        output[token], lse[token] = part[0].to(query.dtype), part[1]
    return output, lse
