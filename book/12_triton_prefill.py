# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Prefill and mixed batches in Triton
#
# Chapter 11's kernel computes attention for one new token a sequence. A prompt is many new
# tokens. So give it the prompt as that many sequences, all with the same row of the table and
# lengths 1, 2, 3 and so on. Nothing forbids it.

# %% tags=["hide-input"]
import os

import numpy as np
import torch

if not torch.cuda.is_available():  # before Triton is imported: run kernels in its interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")
torch.set_num_threads(1)
device = "cuda" if torch.cuda.is_available() else "cpu"

from paged_kv.attention import paged_attention
from paged_kv.decode_plan import DecodePlan
from paged_kv.decode_tiles import soft_cap
from paged_kv.kernels import check_buffers, decode_attention
from paged_kv.kernels_cache import is_index, write_kv
from paged_kv.kv_store import KVStore
from paged_kv.packed_batch import PackedBatch
from paged_kv.sizing import KVSpec
from paged_kv.triton_device import (
    LOG2E, Limits, interpreted, jit, limits_of, next_pow2, runs_kernels, tl, triton)

B, HEADS, KV_HEADS, SIZE = 4, 4, 2, 32
gen = torch.Generator().manual_seed(0)


def ints(data):
    return torch.tensor(data, dtype=torch.int32, device=device)


def fill(store, table, lens):
    """Random K/V for every token of these sequences; returns the same in float32."""
    for row, n in enumerate(lens):
        position = torch.arange(n)
        slots = table[row].cpu().long()[position // B] * B + position % B
        k, v = (torch.randn(n, *store.keys(0).shape[2:], generator=gen) for _ in range(2))
        write_kv(k.to(device), v.to(device), slots.to(device), store.keys(0), store.values(0))


def gap(a, b):
    """The largest difference between two results."""
    return max((x.float() - y.float()).abs().nan_to_num(0.0).max().item() for x, y in zip(a, b))


# %%
store = KVStore(KVSpec(1, KV_HEADS, SIZE, "fp32"), num_blocks=8, block_size=B, device=device)
table = ints([[3, 0, 6], [1, 4, -1], [5, 2, -1]])  # chats A, B and C
fill(store, table, [10, 8, 6])
pools = (store.keys(0), store.values(0), table)

prompt = torch.randn(10, HEADS, SIZE, generator=gen).to(device)  # A's ten queries
rows = torch.zeros(10, dtype=torch.int64, device=device)
as_decodes = decode_attention(prompt, *pools, ints(range(1, 11)), rows=rows)
right = paged_attention(prompt, *pools, ints([0, 10]), ints([10]), rows=rows[:1])
print("the same result:", gap(as_decodes, right) < 1e-5)

n, row_bytes = 8192, 2 * 8 * 128 * 2  # Llama 3 8B's keys and values, one layer, bf16
reads = n * (n + 1) // 2
print(f"K/V of 8,192 tokens: {n * row_bytes / 1e6:.1f} MB; read this way: "
      f"{reads * row_bytes / 1e9:.0f} GB, {reads / n:,.0f} times")

# %% [markdown]
# The result is right, and the price absurd: each token reads again what its predecessors read.
# For a prompt of 8,192 tokens the kernel would ask memory and caches for 137 GB in every layer,
# where 33.6 MB hold all that there is to know.
#
# **The question.** How can the queries of a prompt share what they read, although each may see
# another number of keys, and what becomes of a step in which chunks and decodes are mixed?
#
# :::{card} This chapter
# - **You need** chapters [04](04_paged_attention), [05](05_guest_model) and
#   [11](11_triton_decode); Triton's language as introduced there.
# - **Exports** `paged_kv/prefill_plan.py`: `PrefillTiles`, `PrefillPlan`;
#   `paged_kv/prefill_tiles.py`, `paged_kv/kernels_prefill.py`: `prefill_attention`;
#   `paged_kv/attend.py`: `attend`, `KernelAttention`.
# - **Device** a CUDA GPU, or a CPU, where the kernels run in Triton's interpreter and print the
#   same. Speeds were measured by `benchmarks/prefill_attention.py` on an H200.
# - **Run time** half a minute.
# - **You are here** 00 tour · 01 sizing · 02 contiguous pool · 03 block manager · 04 paged
#   attention · 05 guest model · 06 copy-on-write · 07 sampling · 08 prefix cache · 09
#   scheduling · 10 preemption · 11 decode kernel · **12 prefill kernel** · 13 engine · 14 full speed
# :::

# %% [markdown]
# ## One query, or thousands
#
# Take one key and its value in bf16, $d$ numbers each: $4d$ bytes. A query that attends to them
# needs $2d$ operations for its score (a multiplication and an addition a number) and $2d$ to
# add up the value. One fetched pair serves $t$ queries of $g$ heads that share the KV head, so
#
# $$ \frac{\text{operations}}{\text{bytes}} = \frac{4 d \cdot t g}{4 d} = t g. $$
#
# The size of a head drops out. A processor has its own ratio: operations it can do in the time
# that a byte takes to arrive. Below it memory is what one waits for, above it arithmetic.
#
# :::{admonition} Predict
# :class: tip
# Llama 3 8B has $g = 4$. A step brings one token of a chat, or 16, or 512. Which of the three
# are bound by memory on an H200, which multiplies bf16 matrices at some 790 TFLOP/s and copies at
# a little over 4.2 TB/s?
# :::
#
# :::{dropdown} Reasoning
# Its ratio is near 188. One token has 4, far below. Sixteen have 64: still memory, though the
# arithmetic is no longer free. The border is at about 47 tokens. With 512 the ratio is 2,048, and
# whoever fetches every pair once is bound by arithmetic alone.
# :::

# %% tags=["hide-input"]
import json
from pathlib import Path

result = json.loads(Path("../benchmarks/results/prefill_attention.json").read_text())
cases = {row["case"]: row for row in result["rows"]}
flops, bandwidth = result["ceilings"]["matmul_tflops"], result["ceilings"]["copy_tb_s"]
print("measured:", result["device"], "torch", result["versions"]["torch"],
      "Triton", result["versions"]["triton"])
print(f"measured: a matrix product {flops:.0f} TFLOP/s, a copy {bandwidth:.2f} TB/s")
print("as rounded above: 790 TFLOP/s, 4.2 TB/s")
for t in (1, 16, 48, 512):
    side = "memory" if t * 4 < 790 / 4.2 else "arithmetic"
    print(f"{t:3} queries: {t * 4:4} operations a byte, bound by {side}")

# %% [markdown]
# So these are two different problems. The decode kernel was all about bytes: read each once, keep
# many requests in flight, spread one long chat over the card. The prefill kernel is about the
# matrix unit: feed it large products, and do as little as possible that is not one.

# %% [markdown]
# ## A tile of queries
#
# A matrix unit multiplies tiles. We make a tile of some neighbouring queries of *one* sequence,
# times the heads that share a KV head: all of its rows want the same keys. Chapter 11 packed heads
# because there was nothing else to pack. Here a prompt has queries enough, but the last piece of
# one, or a chunk of five tokens, is the better off for it.

# %% tags=["export:prefill_plan"]
"""Which queries go together: the tiles of a packed batch, named on the device.

A tile is some neighbouring queries of one sequence, times the heads that share a KV head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

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

# %% tags=["export:prefill_plan"]
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

# %%
for heads, size, itemsize in ((HEADS, SIZE, 4), (32, 128, 2), (28, 128, 2), (71, 64, 2)):
    kv_heads = {HEADS: KV_HEADS, 32: 8, 28: 4, 71: 1}[heads]
    tiles = pick_prefill_tiles(heads, kv_heads, size, itemsize, Limits(132, 232448))
    used = tiles.queries * tiles.pack
    print(f"{heads:2} / {kv_heads} heads of {size:3}: {tiles.queries} queries x {tiles.pack} heads",
          f"= {used} of {tiles.rows} rows; {tiles.keys} keys a step")

# %% [markdown]
# With 28 query and 4 KV heads a tile holds 9 queries of 7 heads, and its last row is idle. With
# 71 heads on one KV head no divisor is small enough, and each head has tiles of its own. Why
# 64 rows and not 128? A tile's sums live in registers, 64 rows of 128 numbers in fp32 for 128
# threads, and two such programs fit a multiprocessor: while one waits, the other multiplies.
# **Turn the knob.** Set the limits to those of a small card, `Limits(40, 65536)`; expect 32 keys a
# step for the heads of 128, and no change for the others.
#
# The list of all that the heuristic may pick lets a test compile the kernel ahead of time for cards
# that are not there.

# %% tags=["export:prefill_plan"]
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

# %% [markdown]
# ## Which program takes which tile?
#
# A step packs sequences of all lengths behind one another. The grid of a launch must be fixed
# before anybody has looked at the lengths, or the host would have to wait for them, and no CUDA
# graph could hold the launch. A bound is enough: sequences that bring $T$ tokens in all make at
# most $\lceil T / \text{queries} \rceil$ tiles plus one for each sequence. A small kernel writes
# five integers for each; those left over are told that they have nothing to do.
#
# | name | type | shape | written by |
# |---|---|---|---|
# | `record` | int32 | `[max_tiles, 5]`: first query, begin, end, length, row | `PrefillPlan.update`, once a step |
#
# The invariant: each query of the batch is in exactly one tile.
#
# :::{admonition} Predict
# :class: tip
# Programs start in the order of their numbers. Should tile 0 be the first tile of the batch?
# :::
#
# :::{dropdown} Reasoning
# The last tile of a prompt sees all its keys, the first almost none. If the long tiles start last,
# the card ends with a few of them running and everything else idle. So the order is turned
# round: of each prompt the longest tile first, and the short ones fill the gaps.
# :::

# %% tags=["export:prefill_plan"]
@jit(do_not_specialize=["num_seqs", "max_tiles"],
     do_not_specialize_on_alignment=["cu_seqlens", "seq_lens", "rows"])
def tile_kernel(
    cu_seqlens, seq_lens, rows, record, num_seqs, max_tiles, QUERIES: tl.constexpr,
    BATCH: tl.constexpr, CHUNK: tl.constexpr, HAS_ROWS: tl.constexpr,
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

# %% tags=["export:prefill_plan"]
class PrefillPlan:
    """The tiles of one step's queries, named on the device; used by every layer.

    Made for a number of sequences and a largest number of tokens; `update` once a step.
    Args: dtype, of the cache; tiles, if not those of `pick_prefill_tiles`.
    State: record, int32 [max_tiles, 5]: what each tile's programs are to do; a tile beyond
    the last has no query.  Nothing is allocated after construction.
    """

    def __init__(
        self, num_seqs: int, max_tokens: int, num_q_heads: int, num_kv_heads: int,
        head_size: int, device: torch.device | str, *, dtype: torch.dtype = torch.bfloat16,
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
                cu_seqlens, seq_lens, rows, self.record, self.num_seqs, self.max_tiles,
                QUERIES=self.tiles.queries, BATCH=size, CHUNK=chunk, HAS_ROWS=rows is not None)

# %% [markdown]
# By hand: A brings 10 queries, B one, C the last 3 of its 6. With tiles of 4 queries that makes
# three tiles, one and one. C's begins at 11: ten queries of A's and one of B's lie before it.

# %%
cu, lens = ints([0, 10, 11, 14]), ints([10, 8, 6])
rows = torch.tensor([0, 1, 2], device=device)
plan = PrefillPlan(3, 14, HEADS, KV_HEADS, SIZE, device, tiles=PrefillTiles(8, 16, pack=2))
plan.update(cu, lens, rows)
print("first begin  end length row")
for tile in plan.record.tolist():
    print("".join(f"{x:6}" for x in tile), "" if tile[2] else "  nothing to do")
assert plan.record.tolist()[:5] == [
    [0, 11, 14, 6, 2], [0, 10, 11, 8, 1], [8, 0, 10, 10, 0], [4, 0, 10, 10, 0], [0, 0, 10, 10, 0]]

# %% [markdown]
# ## The keys that a tile needs
#
# The query at position $p$ sees the keys 0 to $p$. A tile whose queries stand at $p_0$ to $p_1$
# divides its key tiles in three: those that all its queries see, which need no mask; those on the
# edge, which some see in part; and those that nobody sees, which are not touched. A cached prefix,
# or the chunks of earlier steps, only shift $p_0$. A sliding window cuts off the front too.

# %% tags=["export:prefill_tiles"]
"""The steps of the prefill kernel: a tile of keys folded into the sums of a tile of queries."""

from __future__ import annotations

# mypy: ignore-errors


@jit
def tile_lanes(token0, end, head0, low, PACK: tl.constexpr, ROWS: tl.constexpr):
    """For each row of a tile: its token, head and position, and whether there is such a token."""
    m = tl.arange(0, ROWS)
    token = token0 + m // PACK
    real = (token < end) & (m < ROWS // PACK * PACK)
    return token.to(tl.int64), (head0 + m % PACK).to(tl.int64), low + m // PACK, real


@jit
def key_range(low, queries, length, window, KEYS: tl.constexpr, WINDOW: tl.constexpr):
    """Key tiles of a query tile: where it starts, where masks begin, where it stops.

    low: the position of its first query.  All its queries see the tiles before the masks.
    """
    start = 0
    if WINDOW:
        start = tl.maximum(low - window + 1, 0) // KEYS
    clear = tl.maximum(tl.maximum(low + 1, 0) // KEYS, start)
    end = tl.maximum(tl.minimum(low + queries, length), 0)
    return start, clear, tl.maximum((end + KEYS - 1) // KEYS, clear)

# %%
def ranges(first, queries, keys, length, window=None):
    """`key_range` in plain Python, for counting."""
    start = 0 if window is None else max(first - window + 1, 0) // keys
    clear = max((first + 1) // keys, start)
    return start, clear, max(-(-min(first + queries, length) // keys), clear)


for title, cached, window in (("a prompt of 128 tokens", 0, None), ("its second half", 64, None),
                              ("the same, with a window of 40", 64, 40)):
    print(title)
    for first in range(cached, 128, 16):
        start, clear, stop = ranges(first, 16, 16, 128, window)
        edge = "/" * (stop - clear)
        if window:  # there every tile is masked
            edge, clear = "/" * (stop - start), start
        print(f"  queries from {first:3}: ", "." * start + "#" * (clear - start) + edge
              + "." * (8 - stop))

# %% [markdown]
# `#` is clear, `/` masked, `.` skipped: nothing is loaded for it, nothing multiplied.
#
# :::{admonition} Predict
# :class: tip
# Causality skips half the work, it is said. With tiles of 16 queries and 64 keys, how much is left
# of a prompt of 512 tokens, and of one of 8,192?
# :::
#
# :::{dropdown} Reasoning
# The triangle is made of tiles, and each tile on its edge counts whole. Of 512 tokens there are 8
# key tiles, of which a query tile visits 1 to 8, on average 4.5: more than half. The longer the
# prompt, the less the edge weighs.
# :::
#
# :::{admonition} Check it yourself
# :class: warning
# "Causal attention costs ~~50 %~~ of the full square." It costs 56.2 % at 512 tokens and 50.4 %
# at 8,192, with these tiles. And "chunked prefill computes attention ~~again for every chunk~~":
# the tiles are the same ones, only in other steps. What is read again is K/V.
# :::

# %%
def visited(first, last, queries=16, keys=64):
    """Key tiles visited by the queries first .. last - 1 of one sequence."""
    return sum(b - a for i in range(first, last, queries)
               for a, _, b in [ranges(i, min(queries, last - i), keys, last)])


for n in (512, 8192):
    print(f"{n:5} tokens: {100 * visited(0, n) / ((n // 16) * (n // 64)):.1f} % of the square")
chunks = [visited(i, i + 512) for i in range(0, 8192, 512)]
print(f"{visited(0, 8192):,} tiles in one step, {sum(chunks):,} in chunks of 512")
assert sum(chunks) == visited(0, 8192)

# %% [markdown]
# ## Folding in a tile of keys
#
# Chapter 04's exercise of the running softmax, for 64 rows at a time. Look at four places.
#
# *Block ids.* Where a block holds a whole key tile, one id is read; otherwise one for each token.
# Ids past the sequence's end are not read, so it does not matter what stands there.
#
# *Rows that are not there.* On the edge, keys *and values* past the end are loaded as 0. A score
# of minus infinity gives weight 0, but a zero times NaN is NaN, and an unwritten slot may hold one.
#
# *Minus infinity.* A row may have seen nothing yet, and then its maximum is minus infinity.
# Subtracted from itself that is NaN, hence `safe`.
#
# *One formula.* Masks are applied to the raw score, so that a clear tile and an edge tile compute
# the same expression. Where a sequence is cut into chunks decides which tiles are on an edge; like
# this, on a GPU, it changes no bit of the result. The lab on batch invariance makes use of it.

# %% tags=["export:prefill_tiles"]
@jit
def key_blocks(entries, tile, n, length, KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """The block ids of a key tile: one where a block holds it all, otherwise one a token."""
    if BLOCK_SIZE % KEYS == 0:
        return tl.load(entries + tile * KEYS // BLOCK_SIZE, mask=tile * KEYS < length, other=0)
    else:
        token = tile * KEYS + n
        return tl.load(entries + token // BLOCK_SIZE, mask=token < length, other=0)


@jit
def key_rows(at, ok, d_ok, MASKED: tl.constexpr, FULL: tl.constexpr):
    """A tile of keys or values [KEYS, D]; what is not ok is 0, whatever its memory holds."""
    if MASKED and FULL:
        return tl.load(at, mask=ok[:, None], other=0.0)
    elif MASKED:
        return tl.load(at, mask=ok[:, None] & d_ok[None, :], other=0.0)
    elif FULL:
        return tl.load(at)
    else:
        return tl.load(at, mask=d_ok[None, :], other=0.0)

# %% tags=["export:prefill_tiles"]
@jit
def softmax_step(s, peak, total, unit):
    """Weights of one tile of scores; what was summed before fades by `fade`."""
    new = tl.maximum(peak, tl.max(s, 1) * unit)
    safe = tl.where(new == float("-inf"), 0.0, new)  # nothing seen yet: no inf minus inf
    weight, fade = tl.exp2(s * unit - safe[:, None]), tl.exp2(peak - safe)
    return weight, fade, new, total * fade + tl.sum(weight, 1)


@jit
def tile_scores_seen(s, token, position, window, WINDOW: tl.constexpr):
    """The scores [ROWS, KEYS], minus infinity where a query does not see the key."""
    seen = token[None, :] <= position[:, None]
    if WINDOW:
        seen = seen & (token[None, :] > position[:, None] - window)
    return tl.where(seen, s, float("-inf"))

# %% tags=["export:prefill_tiles"]
@jit
def attend_keys(
    q, acc, peak, total, keys, values, entries, first, last, length, position, window, scale, cap,
    k_block, k_token, d, HEAD_SIZE: tl.constexpr, KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, STAGES: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Fold the key tiles first .. last - 1 into the sums of a query tile."""
    FULL: tl.constexpr = HEAD_SIZE == d.shape[0]
    n, d_ok, unit = tl.arange(0, KEYS), d < HEAD_SIZE, LOG2E * (1.0 if CAP else scale)
    ahead = key_blocks(entries, first, n, length, KEYS, BLOCK_SIZE)
    for i in tl.range(first, last, num_stages=STAGES):
        # Read a step ahead and cast here, not before: else the compiler would keep the ids
        # in a pipeline of their own, and the keys would come one tile later.
        token, block = i * KEYS + n, ahead.to(tl.int64)
        ahead = key_blocks(entries, tl.minimum(i + 1, last - 1), n, length, KEYS, BLOCK_SIZE)
        at = (block * k_block + token % BLOCK_SIZE * k_token)[:, None] + d[None, :]
        ok = (token < length) & (block >= 0)  # blocks that left the window are gone
        k = key_rows(keys + at, ok, d_ok, MASKED, FULL)
        if UPCAST:  # the interpreter multiplies no bf16
            k = k.to(tl.float32)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if CAP:
            s = soft_cap(s * scale, cap)
        if MASKED:
            s = tile_scores_seen(s, token, position, window, WINDOW)
        weight, fade, peak, total = softmax_step(s, peak, total, unit)
        v = key_rows(values + at, ok, d_ok, MASKED, FULL)
        weight = weight.to(v.dtype)
        if UPCAST:
            v, weight = v.to(tl.float32), weight.to(tl.float32)
        acc = tl.dot(weight, v, acc * fade[:, None], input_precision="ieee")
    return acc, peak, total

# %% [markdown]
# The comment in the loop is worth its lines. The ids of the next tile are asked for a step ahead,
# because the addresses of keys depend on them. With the cast to 64 bits on the other side of the
# loop's back edge, the program means the same. But Triton's pipeliner then takes the ids for one
# more stage of loads, keeps them in shared memory, and starts the loads of keys and values one
# tile later. No test on a CPU can see that. It shows in the compiled code, which has half as many
# asynchronous copies; that is where we found it.

# %% [markdown]
# ## The kernel
#
# A program reads its five integers, loads its queries, goes through the clear tiles and then
# those on the edge, and writes. A sink is added at the end: it is a score like any other, only
# without a value. `tl.static_range` unrolls, so the clear loop is compiled without a mask.

# %% tags=["export:prefill_tiles"]
@jit
def add_sink(sinks, head, real, acc, peak, total):
    """The sink's share of the denominator; a row that saw no key stays as it is."""
    sink = tl.load(sinks + head, mask=real, other=float("-inf")).to(tl.float32) * LOG2E
    sink = tl.where(total > 0, sink, float("-inf"))
    top = tl.maximum(peak, sink)
    safe = tl.where(top == float("-inf"), 0.0, top)
    fade = tl.exp2(peak - safe)
    return acc * fade[:, None], top, total * fade + tl.exp2(sink - safe)


@jit
def put_tile(output, lse, at, at_lse, ok, real, acc, peak, total):
    """Divide by the denominator; store the output and the log of the denominator."""
    good = tl.where(total > 0, total, 1.0)
    tl.store(output + at, (acc / good[:, None]).to(output.dtype.element_ty), mask=ok)
    tl.store(lse + at_lse, (peak + tl.log2(good)) / LOG2E, mask=real)

# %% tags=["export:kernels_prefill"]
"""Prefill attention of a packed batch through a block table, in one launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

# %% tags=["export:kernels_prefill"]
@jit(do_not_specialize=["scale", "cap", "window", "table_stride", "num_q_heads"])
def prefill_kernel(
    query, keys, values, table, record, output, lse, sinks, scale, cap, window, q_token, q_head,
    o_token, o_head, k_block, k_token, k_head, table_stride, num_q_heads,
    HEAD_SIZE: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, SINKS: tl.constexpr, STAGES: tl.constexpr, UPCAST: tl.constexpr,
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
                q, acc, peak, total, keys + base, values + base, entries,
                clear if EDGE else start, stop if EDGE else clear, length, position, window,
                scale, cap, k_block, k_token, d, HEAD_SIZE, KEYS, BLOCK_SIZE, EDGE == 1 or WINDOW,
                WINDOW, CAP, STAGES, UPCAST)
        if SINKS:
            acc, peak, total = add_sink(sinks, head, real, acc, peak, total)
        at = (token * o_token + head * o_head)[:, None] + d[None, :]
        put_tile(output, lse, at, token * num_q_heads + head, ok, real, acc, peak, total)

# %% tags=["export:kernels_prefill"]
def prefill_constants(
    tiles: PrefillTiles, group: int, head_size: int, block_size: int, **options: bool
) -> dict[str, Any]:
    """What the prefill kernel is compiled with; options WINDOW, CAP, SINKS."""
    return {"WINDOW": False, "CAP": False, "SINKS": False} | options | {
        "HEAD_SIZE": head_size, "D": max(16, next_pow2(head_size)), "GROUP": group,
        "PACK": tiles.pack, "ROWS": tiles.rows, "KEYS": tiles.keys, "BLOCK_SIZE": block_size,
        "STAGES": tiles.stages, "UPCAST": interpreted()}


def check_prefill(
    query: Tensor, keys: Tensor, values: Tensor, plan: PrefillPlan, window: int | None,
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

# %% tags=["export:kernels_prefill"]
def launch_prefill(
    plan: PrefillPlan, query: Tensor, keys: Tensor, values: Tensor, block_table: Tensor,
    scale: float, window: int | None, softcap: float | None, sinks: Tensor | None,
    output: Tensor, lse: Tensor,
) -> None:
    """One launch: a program for each tile and each pack of heads."""
    tiles, (heads, kv_heads, size) = plan.tiles, plan.shape
    constants = prefill_constants(
        tiles, heads // kv_heads, size, keys.shape[1], WINDOW=window is not None,
        CAP=softcap is not None, SINKS=sinks is not None)
    prefill_kernel[(plan.max_tiles * (heads // tiles.pack),)](
        query, keys, values, block_table, plan.record, output, lse, sinks, scale,
        softcap or 1.0, window or 0, *query.stride()[:2], *output.stride()[:2],
        *keys.stride()[:3], block_table.stride(0), heads, **constants, num_warps=tiles.warps)

# %% tags=["export:kernels_prefill"]
def prefill_attention(
    query: Tensor, keys: Tensor, values: Tensor, block_table: Tensor, cu_seqlens: Tensor,
    seq_lens: Tensor, *, rows: Tensor | None = None, scale: float | None = None,
    window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
    plan: PrefillPlan | None = None, output: Tensor | None = None, lse: Tensor | None = None,
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
        plan = PrefillPlan(len(seq_lens), tokens, heads, kv_heads, size, query.device,
                           dtype=keys.dtype)
        plan.update(cu_seqlens, seq_lens, rows)
    check_prefill(query, keys, values, plan, window, scale)
    check_buffers(query, block_table, num_rows, softcap, sinks, output, lse)
    output = torch.empty_like(query) if output is None else output
    lse = torch.empty(tokens, heads, device=query.device) if lse is None else lse
    launch_prefill(plan, query, keys, values, block_table, scale, window, softcap, sinks,
                   output, lse)
    return output, lse

# %% [markdown]
# The batch of above: A's whole prompt, one token of B's, C's last three. Some slots have never
# been written and hold NaN. C's row is given a stale entry past its end. The oracle is chapter 04's.

# %%
query = torch.randn(14, HEADS, SIZE, generator=gen).to(device)
stale = table.clone()
stale[2, 2] = 3  # A's block; C has 6 tokens, so two blocks
step = (query, store.keys(0), store.values(0), stale, cu, lens)
sinks = torch.arange(HEADS, device=device).float()
for options in ({}, {"window": 3}, {"softcap": 2.0}, {"sinks": sinks}, {"scale": 0.5, "window": 5}):
    found = prefill_attention(*step, rows=rows, **options)
    right = paged_attention(*step, rows=rows, **options)
    print(", ".join(options) or "plain", "agrees:", gap(found, right) < 1e-5)
    assert gap(found, right) < 1e-5 and found[0].isfinite().all()

# %% [markdown]
# Then other shapes: 16-bit types, a head size that is no power of two, 7 heads on one, blocks of
# one token, a sequence without a single key.

# %%
def agrees(dtype, heads, kv_heads, size, block_size, counts, lens):
    """Compare with the oracle, which computes in float32, on random blocks."""
    need = [-(-n // block_size) for n in lens]
    other = KVStore(KVSpec(1, kv_heads, size, "fp32"), sum(need), block_size, device, dtype, 0.0)
    other.tensors[0].copy_(torch.randn(other.tensors[0].shape, generator=gen))
    ids, table = torch.randperm(sum(need), generator=gen).tolist(), torch.full((len(lens), 99), -1)
    for row, count in enumerate(need):
        table[row, :count] = torch.tensor([ids.pop() for _ in range(count)])
    query = torch.randn(sum(counts), heads, size, generator=gen).to(device, dtype)
    where = (table.int().to(device), ints([0, *np.cumsum(counts)]), ints(lens))
    output, lse = prefill_attention(query, other.keys(0), other.values(0), *where)
    right = paged_attention(query.float(), other.keys(0).float(), other.values(0).float(), *where)
    return gap((output, lse), right) < (1e-5 if dtype == torch.float32 else 0.05)


for case in ((torch.bfloat16, 4, 2, 64, 16), (torch.float16, 4, 2, 80, 4),
             (torch.float32, 7, 1, 32, 1), (torch.bfloat16, 3, 3, 40, 16)):
    print(*case, agrees(*case, counts=[5, 2, 1], lens=[17, 0, 9]))

# %% [markdown]
# `compute-sanitizer` and pools beyond $2^{31}$ numbers are for the GPU tests, in `tests/gpu`, as
# are the tiles that a GPU would really use. The interpreter proves the program; only the card proves what
# the compiler made of it.
#
# ## Chunks and decodes in one step
#
# A scheduler that cuts prompts into chunks gives steps such as: 64 chats that decode, and 512
# tokens of somebody's prompt. The prefill kernel can compute all of it, for a decode is a chunk of
# one. Or each kernel does what it was made for, in two launches.
#
# :::{admonition} Predict
# :class: tip
# 64 decodes at 4,096 tokens and a chunk of 512. One launch or two? And with 4 decodes at 32,768?
# :::
#
# :::{dropdown} Reasoning
# Two launches run one after the other: first memory is busy and the matrix unit idle, then the
# reverse. In one launch tiles of both kinds share the multiprocessors, so the one may hide behind
# the other. That speaks for one, as long as there are tiles enough. But the prefill kernel gives a
# decode only as many programs as there are KV heads. Four decodes make 32 programs, on a card with
# room for 264: an eighth of it works, through the longest contexts of the batch.
# :::

# %% tags=["hide-input"]
print(f"room for {132 * 2} programs; 64 decodes make {64 * 8}, 4 make {4 * 8}")
for name, row in cases.items():
    if "decodes" in name:
        ways = (way for way in row["us"] if not way[0].isdigit())
        print(f"measured: {name}:", ", ".join(f"{way} {row['us'][way]:.0f} us" for way in ways))

# %% [markdown]
# With 64 decodes the single launch is even a little ahead, as the reasoning had it; the difference
# is a few parts in a hundred. The few long ones decide. A kernel that must never be slow cannot
# leave seven eighths of the card idle, so `attend` takes two launches: the decodes, which stand in
# front, go to chapter 11's kernel with its even shares, and all behind them to this one. A decode
# that stands further back is right too, only slower. The plan is made once a step; the layers share it.

# %% tags=["export:attend"]
"""Attention of mixed batches: decodes by one kernel, chunks of prompts by the other.

Triton's kernels serve on a CUDA device and in Triton's interpreter; chapter 04's torch code
everywhere else, with the same arguments and results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


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

# %% tags=["export:attend"]
def plan_attend(
    query: Tensor, keys: Tensor, rows: Tensor, cu_seqlens: Tensor, seq_lens: Tensor,
    num_decodes: int, window: int | None = None, batch_invariant: bool = False,
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
        decode = DecodePlan(n, heads, kv_heads, size, keys.device, dtype=keys.dtype,
                            window=window, batch_invariant=batch_invariant)
        decode.update(seq_lens[:n], rows[:n])
    if n < num_seqs and runs_kernels(keys.device):
        prefill = PrefillPlan(num_seqs - n, len(query), heads, kv_heads, size, keys.device,
                              dtype=keys.dtype)
        prefill.update(cu_seqlens[n:], seq_lens[n:], rows[n:])
    return AttendPlan(n, decode, prefill)

# %% tags=["export:attend"]
def attend(
    query: Tensor, store: KVStore, layer: int, rows: Tensor, block_table: Tensor,
    cu_seqlens: Tensor, seq_lens: Tensor, *, num_decodes: int | None = None,
    plan: AttendPlan | None = None, **options: Any,
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
        return paged_attention(query, keys, values, block_table, cu_seqlens, seq_lens, rows=rows,
                               **options)
    if plan is None:
        n = count_decodes(cu_seqlens) if num_decodes is None else num_decodes
        window = options.get("window")
        plan = plan_attend(query, keys, rows, cu_seqlens, seq_lens, n, window)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.empty(query.shape[:2], device=query.device)
    n, query = plan.num_decodes, query.to(keys.dtype)
    if plan.decode is not None:
        decode_attention(query[:n], keys, values, block_table, seq_lens[:n], rows=rows[:n],
                         plan=plan.decode, output=out[:n], lse=lse[:n], **options)
    if plan.prefill is not None:
        prefill_attention(query, keys, values, block_table, cu_seqlens[n:], seq_lens[n:],
                          rows=rows[n:], plan=plan.prefill, output=out, lse=lse, **options)
    return out, lse

# %% [markdown]
# One step: B and C decode, A brings its prompt of ten. B's and C's tokens go to the front. However
# the step is divided, the result is the same but for rounding.

# %%
order, cu, lens = torch.tensor([1, 2, 0], device=device), ints([0, 1, 2, 12]), ints([8, 6, 10])
query = torch.randn(12, HEADS, SIZE, generator=gen).to(device)
right = paged_attention(query, *pools, cu, lens, rows=order)
print("decodes in front:", count_decodes(cu))
for n in (0, 1, 2):
    found = attend(query, store, 0, order, table, cu, lens, num_decodes=n)
    print(f"{n} by the decode kernel: agrees {gap(found, right) < 1e-5}")

# %% [markdown]
# ## A model on top
#
# What remains is the seam of chapter 05: a `LayerAttention` that stores a layer's new K/V and then
# attends. `KernelAttention` does so with the kernels, and keeps the plans of the step between
# layers. It is an object, not a function, for that reason alone.

# %% tags=["export:attend"]
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
        self, store: KVStore, layer: int, query: Tensor, key: Tensor, value: Tensor,
        batch: PackedBatch, **options: Any,
    ) -> Tensor:
        """Store the new K/V and return attention, [num_tokens, num_q_heads, head_size]."""
        if batch is not self.batch:
            self.begin(batch)
        keys, where = store.keys(layer), (batch.rows, batch.cu_seqlens, batch.seq_lens)
        write_kv(key, value, batch.slot_mapping, keys, store.values(layer))
        window = options.get("window")
        shape = (query.shape[1], *keys.shape[2:], window or 0)
        if shape not in self.plans:
            self.plans[shape] = plan_attend(query, keys, *where, self.num_decodes, window,
                                            self.batch_invariant)
        return attend(query, store, layer, batch.rows, batch.block_table, batch.cu_seqlens,
                      batch.seq_lens, plan=self.plans[shape], **options)[0]

# %%
import warnings

warnings.filterwarnings("ignore", message="IProgress")  # tqdm, on import, in a notebook
from transformers import LlamaConfig, LlamaForCausalLM

from paged_kv.block_manager import BlockManager
from paged_kv.hf_adapter import PagedModel, continuous_decode, host

torch.manual_seed(0)
config = LlamaConfig(vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
model = LlamaForCausalLM(config).to(device)
attention = KernelAttention()
guest = PagedModel(model, KVStore(KVSpec(2, 2, 16, "fp32"), 8, B, device), attention=attention)
report = guest.report
print(report.num_tokens, "tokens, right to within the tolerance:", report.error < report.tolerance)

# %% [markdown]
# The check at load has run: prompts in chunks, an arrival, decodes, all through the kernels,
# compared with the model's own eager forward. Now a serving loop. Three prompts are answered with
# the plain attention of chapter 04 and with the kernels.

# %%
def answers(guest, prompts=([1, 2, 3, 4, 5], [6, 7], [8, 9, 10])):
    steps = continuous_decode(guest, BlockManager(8, B, max_seqs=2, max_seq_len=32), prompts, 3)
    return [list(progress.output) for progress in steps][-1]


print("kernels", answers(guest))
print("torch  ", answers(host(model, 8, B)))
assert answers(guest) == answers(host(model, 8, B))

# %% [markdown]
# ## How fast, and where the rest goes
#
# On the GPU the kernel is measured against two others that read the same pool through the same
# table: FlashAttention-3 {cite}`shah2024fa3`, written for this processor in CUDA, and vLLM's own
# Triton kernel, which serves prefill and decode alike.

# %% tags=["hide-input"]
import matplotlib.pyplot as plt

from paged_kv.draw import book_style

book_style()
shown = [row for row in result["rows"] if "FlashAttention-3" in row["us"]]
fig, ax = plt.subplots(figsize=(7.5, 0.8 + 0.6 * len(shown)))
for i, (way, hatch) in enumerate((("ours", ""), ("FlashAttention-3", "//"), ("vLLM Triton", ".."))):
    speed = [row["tflops"].get(way, 0) for row in shown]
    ax.barh(np.arange(len(shown)) + 0.27 * (i - 1), speed, 0.27, label=way, hatch=hatch)
ax.axvline(flops, color="black", linewidth=0.8, linestyle=":")
ax.set(yticks=range(len(shown)), yticklabels=[row["case"] for row in shown], xlabel="TFLOP/s")
ax.invert_yaxis()
ax.legend(fontsize=9)
plt.show()
print("measured:", result["workload"])
for row in shown:
    print(f"measured: {row['case']}:", ", ".join(
        f"{way} {row['us'][way] / 1e3:.2f} ms, {row['tflops'][way]:.0f} TFLOP/s"
        for way in ("ours", "FlashAttention-3", "vLLM Triton") if way in row["us"]))
print("measured: ours against FlashAttention-3", result["headline"]["prefill_x_fa3"],
      "against vLLM Triton", result["headline"]["prefill_x_vllm_triton"])
others = {way: us for way, us in cases["4 x 8,192"]["us"].items() if way[0].isdigit()}
for way, us in others.items():
    print(f"measured: 4 x 8,192 with {way}: {us / 1e3:.2f} ms")

# %% [markdown]
# *Figure: operations a second of three kernels; the dotted line is a plain matrix product.*
#
# On long prompts we reach about six times vLLM's Triton kernel, and two thirds of FlashAttention-3; of
# the mixed steps one is level with it and one well ahead, thanks to chapter 11. Where is the last third?
# Not in the tiles: other shapes, in the last lines above, come out alike, and only a stage less
# of loads in flight costs much. It is in the order of events. A step has two products, $QK^\top$ and
# $PV$, with the softmax in between, which the matrix unit cannot do. Hopper's products are
# asynchronous: one may be started, and something else done meanwhile. FlashAttention-3 runs two groups
# of warps in turns, so that one group's softmax hides behind the other's products
# {cite}`shah2024fa3`. In the code that Triton makes of our loop the first product is waited for
# as soon as it is started, since its scores are needed at once, and our overlap comes only from
# two programs on a multiprocessor that happen to be at different places. What this does not show:
# other heads, other cards.
#
# Small batches are another matter. How does the time of one prompt depend on its chunks?
#
# :::{admonition} Predict
# :class: tip
# A prompt of 8,192 tokens, alone on the card, in chunks of 64, 512 or all at once. The tiles
# are the same in all three. How much longer do the chunks take?
# :::
#
# :::{dropdown} Reasoning
# A chunk of 512 makes 32 tiles for each of 8 KV heads, 256 programs, and the card has room for 264.
# A chunk of 64 makes 32: eight times too few, and 128 steps of it. Hence up to 8 times as long, and
# from 512 on nearly level.
# :::

# %% tags=["hide-input"]
row = cases["8,192 in chunks"]["us"]
for size in (64, 128, 256, 512, 2048, 8192):
    programs = size // 16 * 8
    slower = max(1, 264 / programs)
    print(f"chunks of {size:4}: {programs:4} programs, {slower:.0f} times by this count")
print("measured:", ", ".join(f"{size}: {row[size] / row['8192']:.2f} x" for size in row))

# %% [markdown]
# The order is as predicted, the loss somewhat smaller, because a program that has a multiprocessor
# for itself runs faster. So a chunk of a few hundred tokens is what a scheduler should cut,
# unless the step has other work to fill the card with, as it mostly has. A kernel that also
# splits the keys of small chunks, as chapter 11's does, would not care; the last exercise goes half
# the way.

# %% [markdown]
# ## State card
#
# | class or function | state | invariant |
# |---|---|---|
# | `PrefillTiles` | `rows`, `keys`, `pack`, `warps`, `stages` | fits the device; the batch has no say |
# | `PrefillPlan` | `record`, five integers a tile | every query of the step is in exactly one tile |
# | `prefill_attention` | none | equals the oracle; skips what no query sees; nothing read past a sequence's end |
# | `attend` | none | decodes in front to one kernel, all others to the other; the division changes nothing but time and rounding |
# | `KernelAttention` | `batch`, `plans` | plans are those of `batch`; a batch changed in place needs `begin` |
#
# What breaks next: each step costs the host a launch for every layer's write, decode and prefill. With a
# small model the GPU waits for Python. Chapter 14 captures the launches in a graph.
#
# ## Real world
#
# - vLLM's `vllm/v1/attention/ops/triton_unified_attention.py` is one kernel for prefill and decode: a tile is
#   queries times heads, as ours, and each program searches its sequence in `cu_seqlens` by bisection instead of
#   reading a record. Ringlein and others tell its story {cite}`ringlein2025anatomy`.
# - Its `vllm/v1/attention/backends/flashinfer.py` asks for decodes at the front of the batch and uses one wrapper for
#   each of the two parts.
# - SGLang's `python/sglang/srt/layers/attention/triton_ops/extend_attention.py` attends to the cached prefix through indices
#   and to the new tokens from their own contiguous tensor, in one kernel.
# - TensorRT-LLM separates context and generation phases of a batch too, in `cpp/tensorrt_llm/common/attentionOp.cpp`.
#
# ## Exercises
#
# :::{exercise}
# :label: ex-12-intensity
# **Compute.** A model has 64 query heads on 8 KV heads. From how many queries on is a chunk bound by arithmetic,
# on a processor with 188 operations a byte? And without grouping, 64 on 64?
# :::
#
# :::{solution} ex-12-intensity
# :class: dropdown
# $t g \ge 188$: 24 queries with $g = 8$, and 188 with $g = 1$.
# :::

# %% tags=["hide-input"]
assert [-(-188 // g) for g in (8, 1)] == [24, 188]

# %% [markdown]
# :::{exercise}
# :label: ex-12-window
# **Compute.** A prompt of 32,768 tokens and a window of 4,096. Which part of the causal key tiles is visited,
# with tiles of 16 queries and 64 keys?
# :::
#
# :::{solution} ex-12-window
# :class: dropdown
# Each query tile visits at most 65 key tiles instead of up to 512: a little under a quarter in all, since the
# first 4,096 tokens see less than a window.
# :::

# %% tags=["hide-input"]
spans = [ranges(i, 16, 64, 32768, 4096) for i in range(0, 32768, 16)]
part = sum(b - a for a, _, b in spans) / visited(0, 32768)
print(f"{100 * part:.1f} % of the causal tiles")
assert 0.23 < part < 0.25 and max(b - a for a, _, b in spans) == 65

# %% [markdown]
# :::{exercise}
# :label: ex-12-trace
# **Trace.** Write down the record for sequences that bring 5, 0 and 4 queries, with tiles of 4, lengths 9, 3 and 4.
# :::
#
# :::{solution} ex-12-trace
# :class: dropdown
# Three tiles, last first: (0, 5, 9, 4, 2), (4, 0, 5, 9, 0), (0, 0, 5, 9, 0). The sequence without queries has none.
# :::

# %% tags=["hide-input"]
traced = PrefillPlan(3, 9, HEADS, KV_HEADS, SIZE, device, tiles=PrefillTiles(8, 16, pack=2))
traced.update(ints([0, 5, 5, 9]), ints([9, 3, 4]))
assert traced.record.tolist()[:3] == [[0, 5, 9, 4, 2], [4, 0, 5, 9, 0], [0, 0, 5, 9, 0]]

# %% [markdown]
# :::{exercise}
# :label: ex-12-break
# **Break.** Give `prefill_attention` a plan that was updated with the lengths of the step before. Is there an error?
# Which tokens come out wrong?
# :::
#
# :::{solution} ex-12-break
# :class: dropdown
# None: lengths are on the device, and looking at them would mean waiting. The record's lengths place the queries one
# position too early, so they see one key too few, all of them. That is why `KernelAttention` knows its
# step by the batch's identity.
# :::

# %% tags=["hide-input"]
old = PrefillPlan(1, 3, HEADS, KV_HEADS, SIZE, device, dtype=torch.float32)
old.update(ints([0, 3]), ints([9]), rows[:1])
late = (query[:3], *pools, ints([0, 3]), ints([10]))
wrong, fine = (prefill_attention(*late, rows=rows[:1], plan=p)[0] for p in (old, None))
assert (wrong - fine).abs().amax((1, 2)).min() > 1e-3

# %% [markdown]
# :::{exercise}
# :label: ex-12-merge
# **Implement.** A small chunk over a long prefix leaves most of the card idle. Compute it in two calls over disjoint keys,
# all of the prefix and then the chunk itself, and join them by their lse, as chapter 04's `merge` does. The second part
# needs a table row that begins at the chunk; the first has queries that see *all* keys, which causal attention does not
# offer: how can one query a sequence express it?
# :::
#
# :::{solution} ex-12-merge
# :class: dropdown
# A query alone in its sequence stands at the last position and sees everything. So the prefix is attended to as decodes,
# with the same row for each. It is what the opening did; here the prefix is shared by few queries and the decode kernel
# splits it over the card.
# :::

# %% tags=["hide-input"]
whole = prefill_attention(query[:2], *pools, ints([0, 2]), ints([10]), rows=rows[:1])
front = decode_attention(query[:2], *pools, ints([8, 8]), rows=torch.zeros_like(rows[:2]))
rest = prefill_attention(query[:2], *pools[:2], table[:1, 2:], ints([0, 2]), ints([2]))
lse = torch.logaddexp(front[1], rest[1])
parts = [(part[1] - lse).exp()[..., None] * part[0] for part in (front, rest)]
assert gap((parts[0] + parts[1], lse), whole) < 1e-5

# %% [markdown]
# ## Further reading
#
# - Gentle: FlashAttention {cite}`dao2022flash`, of which this kernel is a paged form, and FlashAttention-2
#   {cite}`dao2024fa2`, which gives the loop its present order.
# - Chunked prefill and why to mix: Sarathi-Serve {cite}`agrawal2024sarathi`.
# - Triton's unified kernel in vLLM, step by step: Ringlein and others {cite}`ringlein2025anatomy`.
# - Deep: FlashAttention-3 {cite}`shah2024fa3`, on what Hopper's asynchrony is good for.
