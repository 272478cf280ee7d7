# Exported from book/11_triton_decode.py by tools/export.py; edit the chapter, not this file.
"""The plan of a decode step: tiles that suit the device, and each program's share of the work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from paged_kv.decode_shares import plan_kernel
from paged_kv.kernels_cache import is_index
from paged_kv.triton_device import Limits, limits_of, next_pow2, runs_kernels, triton

RECORD = 8  # integers a program: its tiles, first sequence, that one's tiles, length, rows
MAX_PARTS = 32  # at most so many parts a sequence where a batch may not change a bit
LEAST_TOKENS = 256  # and so many tokens a part, but for the last


@dataclass(frozen=True)
class Tiles:
    """What the decode kernel is compiled for, and how many programs run.

    rows: cache rows in a tile, `rows // heads` tokens of `heads` neighbouring KV heads; warps,
    stages: of the compiler, stages being the tiles in flight; programs: for each group of
    heads; even: whether batches of one length are cut at whole sequences; fused: whether the
    last program of a sequence joins its parts, or a second launch does.
    """

    rows: int
    heads: int
    warps: int
    stages: int
    programs: int
    even: bool = True
    fused: bool = True

    @property
    def tokens(self) -> int:
        """Tokens of a tile."""
        return self.rows // self.heads


def pick_tiles(
    batch: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_size: int,
    itemsize: int,
    limits: Limits,
    batch_invariant: bool = False,
) -> Tiles:
    """Tiles from the shape and the device's limits, found by measuring on an H200.

    A tile has 16 KiB of keys.  Two programs share a multiprocessor, with three tiles in flight
    each, where the shared memory allows.  A tile has two KV heads; one where a handful of
    sequences must fill the card, so that fewer parts are joined; four where sequences are
    more than programs, so that a program crosses fewer borders.
    """
    size = max(16, next_pow2(head_size))
    rows, stages = max(64 if itemsize == 2 else 16, min(128, 16384 // (size * itemsize))), 3
    buffers = 2 * size * itemsize  # bytes that a row takes in flight, key and value
    while stages * rows * buffers + 16384 > limits.shared_memory and (stages, rows) != (2, 16):
        stages, rows = (2, rows) if stages > 2 else (2, rows // 2)
    resident = max(1, min(2, limits.shared_memory // (stages * rows * buffers + 12288)))
    slots = limits.processors * resident
    heads = 1 if batch <= 4 and not batch_invariant else 2
    if resident == 1 or (slots * 2 // num_kv_heads < batch and not batch_invariant):
        heads = 4
    most = max(1, 16 // (num_q_heads // num_kv_heads))  # a matrix product has 16 columns free
    heads = min(heads, num_kv_heads & -num_kv_heads, most)
    programs = max(1, slots * heads // num_kv_heads)
    fused = batch_invariant or programs <= 10 * batch
    return Tiles(rows, heads, 4, stages, programs, even=not batch_invariant, fused=fused)


@dataclass(frozen=True)
class Pick:
    """One thing that the heuristic can ask the compiler for."""

    tiles: Tiles
    group: int
    head_size: int
    itemsize: int


def every_pick(limits: Limits) -> Iterator[Pick]:
    """All that `pick_tiles` can ask for on such a device, one for each that compiles alike."""
    seen = set()
    for head_size in (32, 64, 128, 256):
        for itemsize in (2, 4):
            for group in (1, 4, 8, 16, 71):
                for batch in (1, 16, 4096):
                    tiles = pick_tiles(batch, 8 * group, 8, head_size, itemsize, limits)
                    columns = max(16, next_pow2(group * tiles.heads))
                    key = (head_size, itemsize, tiles.heads, tiles.rows, tiles.stages, columns)
                    if key not in seen and (group < 71 or head_size == 64):
                        seen.add(key)
                        yield Pick(replace(tiles, programs=1), group, head_size, itemsize)


class DecodePlan:
    """The division of one step's work, made on the device, and room for partial results.

    Made once for a batch size (or captured graph); `update` once a step; then used by every
    layer that has this shape and window, on one stream.
    Args: batch, sequences, empty ones included; dtype, of query and cache; window, as for
    attention; tiles, if not those of `pick_tiles`; batch_invariant: every sequence is cut by
    its own length alone, so that its output is the same bits alone and in any batch.
    State
        cum      int32 [batch + 3]: tiles before each sequence and in all; programs at work;
                 empty sequences
        record   int32 [programs, 8]: where each program begins
        part, part_lse   float32: partial results, a slot each
        arrived  int32: how many parts of a sequence are done; 0 between launches
    Nothing is allocated after construction.  Source: the idea is that of the scheduler in
    flashinfer/include/flashinfer/attention/scheduler.cuh, which plans on the host.
    """

    def __init__(
        self,
        batch: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_size: int,
        device: torch.device | str,
        *,
        dtype: torch.dtype = torch.bfloat16,
        window: int | None = None,
        tiles: Tiles | None = None,
        batch_invariant: bool = False,
    ) -> None:
        self.device = torch.empty(0, device=device).device
        self.batch, self.window, self.splits = batch, window, MAX_PARTS if batch_invariant else 0
        self.shape, self.dtype = (num_q_heads, num_kv_heads, head_size), dtype
        self.tiles = tiles or pick_tiles(
            batch, *self.shape, dtype.itemsize, limits_of(self.device), batch_invariant
        )
        self.least = max(1, LEAST_TOKENS // self.tiles.tokens)
        slots = batch * MAX_PARTS if batch_invariant else 2 * self.tiles.programs
        zeros = partial(torch.zeros, dtype=torch.int32, device=self.device)
        self.cum = zeros(batch + 3)
        self.record = zeros(self.tiles.programs, RECORD)
        self.arrived = zeros(batch, num_kv_heads // self.tiles.heads)
        self.part = torch.empty(slots, num_q_heads, head_size, device=self.device)
        self.part_lse = torch.empty(slots, num_q_heads, device=self.device)

    def update(self, seq_lens: Tensor, rows: Tensor | None = None) -> None:
        """Divide a step's work; once, before its first layer.

        Args: seq_lens int32 [batch], rows integers [batch] as for attention; both on the
        plan's device.  Changes `cum` and `record`.  One launch, which a graph can hold; where
        no kernels run, nothing.
        """
        if seq_lens.shape != (self.batch,) or seq_lens.dtype != torch.int32:
            said = f"{tuple(seq_lens.shape)}, {seq_lens.dtype}"
            raise ValueError(f"seq_lens: {said}; int32 [{self.batch}] is needed")
        if not is_index(seq_lens, rows) or (rows is not None and rows.shape != (self.batch,)):
            raise ValueError(f"seq_lens, rows: contiguous integers [{self.batch}] are needed")
        if runs_kernels(self.device):
            size = next_pow2(self.batch)
            chunk = max(1, min(16, 8192 // size))
            plan_kernel[(triton.cdiv(self.tiles.programs, chunk),)](
                seq_lens,
                rows,
                self.cum,
                self.record,
                self.batch,
                self.window or 0,
                self.tiles.programs,
                TOKENS=self.tiles.tokens,
                BATCH=size,
                CHUNK=chunk,
                HAS_ROWS=rows is not None,
                WINDOW=self.window is not None,
                EVEN=self.tiles.even,
                SPLITS=self.splits,
                LEAST=self.least,
            )
