# Exported from book/12_triton_prefill.py by tools/export.py; edit the chapter, not this file.
"""Which queries go together: the tiles of a packed batch, named on the device.

A tile is some neighbouring queries of one sequence, times the heads that share a KV head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from paged_kv.kernels_cache import is_index
from paged_kv.triton_device import Limits, jit, limits_of, next_pow2, runs_kernels, tl, triton

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

TILE_RECORD = 5  # integers a tile: its first query; its sequence's begin, end, length and row


@dataclass(frozen=True)
class PrefillTiles:
    """What the prefill kernel is compiled for.

    rows: of a tile, `rows // pack` queries of `pack` heads that share a KV head; keys: tokens
    of a step; warps, stages: of the compiler, stages being the key tiles in flight.
    """

    rows: int
    keys: int
    pack: int
    warps: int = 4
    stages: int = 3

    @property
    def queries(self) -> int:
        """Query tokens of a tile."""
        return self.rows // self.pack


def pick_prefill_tiles(
    num_q_heads: int, num_kv_heads: int, head_size: int, itemsize: int, limits: Limits
) -> PrefillTiles:
    """Tiles from the shape and the device's limits, found by measuring on an H200.

    The batch has no say: the same query is added up in the same order in every batch.
    """
    size, group = max(16, next_pow2(head_size)), num_q_heads // num_kv_heads
    pack = max(n for n in range(1, min(group, 16) + 1) if group % n == 0)
    rows, keys, stages = 64, 64 if size <= 128 else 32, 3
    if itemsize == 4:  # no matrix unit in full precision: registers are what is short
        rows, keys, stages = 16, 16, 2
    while (rows + 2 * stages * keys) * size * itemsize + 2048 > limits.shared_memory:
        if (keys, stages) == (16, 2):
            break
        keys, stages = (keys, 2) if stages > 2 else (keys // 2, 2)
    return PrefillTiles(rows, keys, pack, stages=stages)


@dataclass(frozen=True)
class PrefillPick:
    """One thing that the heuristic can ask the compiler for."""

    tiles: PrefillTiles
    group: int
    head_size: int
    itemsize: int


def every_prefill_pick(limits: Limits) -> Iterator[PrefillPick]:
    """All that `pick_prefill_tiles` can ask for on such a device, one for each size and type."""
    for head_size in (32, 64, 128, 256):
        for itemsize in (2, 4):
            tiles = pick_prefill_tiles(8, 2, head_size, itemsize, limits)
            yield PrefillPick(tiles, 4, head_size, itemsize)


@jit(
    do_not_specialize=["num_seqs", "max_tiles"],
    do_not_specialize_on_alignment=["cu_seqlens", "seq_lens", "rows"],
)
def tile_kernel(
    cu_seqlens,
    seq_lens,
    rows,
    record,
    num_seqs,
    max_tiles,
    QUERIES: tl.constexpr,
    BATCH: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_ROWS: tl.constexpr,
):
    """Name each tile's sequence and first query, the batch's last tile first."""
    s = tl.arange(0, BATCH)
    real = s < num_seqs
    begin = tl.load(cu_seqlens + s, mask=real, other=0)
    count = tl.load(cu_seqlens + s + 1, mask=real, other=0) - begin
    tiles = (count + QUERIES - 1) // QUERIES
    upto, total = tl.cumsum(tiles, 0), tl.sum(tiles, 0)
    # A tile is in the first sequence that ends behind it, counted from the batch's front.
    t = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    ok, live, front = t < max_tiles, t < total, total - 1 - t
    before = (upto[None, :] <= front[:, None]) & real[None, :]
    seq = tl.minimum(tl.sum(before.to(tl.int32), 1), num_seqs - 1)
    here = s[None, :] == seq[:, None]
    first = (front - tl.sum(tl.where(here, (upto - tiles)[None, :], 0), 1)) * QUERIES
    row = seq
    if HAS_ROWS:
        row = tl.load(rows + seq, mask=live, other=0).to(tl.int32)
    to = record + t * 5
    tl.store(to, tl.where(live, first, 0), mask=ok)  # a tile beyond the last has no query
    tl.store(to + 1, tl.load(cu_seqlens + seq, mask=live, other=0), mask=ok)
    tl.store(to + 2, tl.load(cu_seqlens + seq + 1, mask=live, other=0), mask=ok)
    tl.store(to + 3, tl.load(seq_lens + seq, mask=live, other=0), mask=ok)
    tl.store(to + 4, row, mask=ok)


class PrefillPlan:
    """The tiles of one step's queries, named on the device; used by every layer.

    Made for a number of sequences and a largest number of tokens; `update` once a step.
    Args: dtype, of the cache; tiles, if not those of `pick_prefill_tiles`.
    State: record, int32 [max_tiles, 5]: what each tile's programs are to do; a tile beyond
    the last has no query.  Nothing is allocated after construction.
    """

    def __init__(
        self,
        num_seqs: int,
        max_tokens: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_size: int,
        device: torch.device | str,
        *,
        dtype: torch.dtype = torch.bfloat16,
        tiles: PrefillTiles | None = None,
    ) -> None:
        self.num_seqs, self.shape = num_seqs, (num_q_heads, num_kv_heads, head_size)
        self.dtype, self.device = dtype, torch.empty(0, device=device).device
        limits = limits_of(self.device)
        self.tiles = tiles or pick_prefill_tiles(*self.shape, dtype.itemsize, limits)
        self.max_tokens = max_tokens
        self.max_tiles = -(-max_tokens // self.tiles.queries) + num_seqs
        shape = (self.max_tiles, TILE_RECORD)
        self.record = torch.zeros(shape, dtype=torch.int32, device=self.device)

    def update(self, cu_seqlens: Tensor, seq_lens: Tensor, rows: Tensor | None = None) -> None:
        """Name the tiles of a step, once, before its first layer; one launch.

        Args: cu_seqlens int32 [num_seqs + 1], seq_lens int32 [num_seqs], rows integers
        [num_seqs], as for attention.  Changes `record`.
        """
        counts = (len(cu_seqlens) - 1, len(seq_lens), self.num_seqs if rows is None else len(rows))
        if counts != (self.num_seqs,) * 3:
            raise ValueError(f"cu_seqlens, seq_lens, rows: of {counts}, not {self.num_seqs}")
        if not is_index(cu_seqlens, seq_lens, rows) or cu_seqlens.ndim + seq_lens.ndim != 2:
            raise ValueError("cu_seqlens, seq_lens, rows: contiguous integers are needed")
        if runs_kernels(self.device):
            size = next_pow2(self.num_seqs)
            chunk = max(1, min(16, 8192 // size))
            tile_kernel[(triton.cdiv(self.max_tiles, chunk),)](
                cu_seqlens,
                seq_lens,
                rows,
                self.record,
                self.num_seqs,
                self.max_tiles,
                QUERIES=self.tiles.queries,
                BATCH=size,
                CHUNK=chunk,
                HAS_ROWS=rows is not None,
            )
