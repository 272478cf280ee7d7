# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Paged attention
#
# Chat A has 10 tokens. Their keys and values lie in blocks 3, 0 and 6, because those were free
# when A grew. The attention code that we have takes what it always took: where the chat begins,
# and how long it is.

# %%
import numpy as np

from paged_kv.draw import draw_pool

B = 4
tables = {"A": [3, 0, 6], "B": [1, 4], "C": [5, 2]}
seq_lens = {"A": 10, "B": 8, "C": 6}
draw_pool({"block_size": B, "num_blocks": 8, "free": [7], "tables": tables, "seq_lens": seq_lens})

# %%
owner = np.full(8 * B, "-")  # whose token lies in each slot of the pool
for chat, table in tables.items():
    for position in range(seq_lens[chat]):
        owner[table[position // B] * B + position % B] = chat

rng = np.random.default_rng(0)
keys, query = rng.normal(size=(8 * B, 8)), rng.normal(size=8)

start = tables["A"][0] * B
mine = slice(start, start + seq_lens["A"])
weights = np.exp(keys[mine] @ query / 8**0.5)
weights /= weights.sum()
foreign = weights[owner[mine] != "A"].sum()
print("read for A:", *owner[mine])
print(f"weight that falls on other chats: {100 * foreign:.0f} %")

# %% [markdown]
# Six of the ten rows belong to B and C. Nothing complained: they are numbers like any others, the
# softmax adds up to 1, and A's user is answered partly from other people's chats.
#
# **The question.** How does attention read a chat whose tokens lie in scattered blocks, and how
# do we know that it reads nothing else?
#
# :::{card} This chapter
# - **You need** [chapter 01](01_kv_sizing) and PyTorch; block tables are written by hand here, so
#   chapter 03 helps but is not needed.
# - **Exports** `paged_kv/kv_store.py`: `KVStore`, `resolve_copies`;
#   `paged_kv/attention.py`: `paged_attention_numpy`, `paged_attention`.
# - **Device** CPU. Every line also runs on a GPU; what is fast there comes in chapter 11.
# - **Run time** ten seconds.
# - **You are here** 00 tour · 01 sizing · 02 contiguous pool · 03 block manager · **04 paged
#   attention** · 05 guest model · 06 copy-on-write · 07 sampling · 08 prefix cache · 09
#   scheduling · 10 preemption · 11 decode kernel · 12 prefill kernel · 13 engine · 14 full speed
# :::

# %% [markdown]
# ## The bytes
#
# State first. A `KVStore` knows bytes only. It has no idea which chat a block belongs to, or
# whether it is free.
#
# | name | type | shape | written by |
# |---|---|---|---|
# | `tensors` | list, one tensor a layer | `[num_blocks, 2, block_size, num_kv_heads, head_size]` | `write`, `copy_blocks` |
#
# Index 0 of the second dimension holds keys, index 1 values. The block comes first, so that
# `tensor[b]` is everything that a layer keeps in block `b`. Whoever moves whole blocks about (a
# copy, a swap to the host, a transfer) walks the list and asks for nothing else. A later
# chapter can put scales or latents in the list, and they will travel along.

# %% tags=["export:kv_store"]
"""The bytes of a paged KV cache: one tensor a layer, written by slot, copied by block."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from paged_kv.sizing import KVSpec, at_least, blocks_for

BlockT = TypeVar("BlockT", bound=Hashable)
TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


# %% tags=["export:kv_store"]
class KVStore:
    """The keys and values of every block, and no idea whose they are.

    Args: `spec`, one token's shape; `dtype`, if not the one of `spec`; `fill`, what fresh
    memory holds: NaN, so that a stale read shows; None leaves it as it comes.
    State
        tensors  one a layer, [num_blocks, 2, block_size, num_kv_heads, head_size], keys at
                 index 0 and values at 1.  To copy, swap or send blocks, walk this list.
    A token lives in a slot: slot = block * block_size + offset.
    Source of the layout: vllm/v1/attention/backends/flashinfer.py.
    """

    def __init__(
        self, spec: KVSpec, num_blocks: int, block_size: int, device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None, fill: float | None = float("nan"),
    ) -> None:
        if spec.tensors_per_layer != 2 or (dtype is None and spec.dtype not in TORCH_DTYPES):
            raise ValueError(f"spec = {spec}: K and V of {', '.join(TORCH_DTYPES)} are needed")
        self.num_blocks = at_least(1, "num_blocks", num_blocks)
        self.block_size = at_least(1, "block_size", block_size)
        self.dtype = dtype or TORCH_DTYPES[spec.dtype]
        shape = (num_blocks, 2, block_size, spec.num_kv_heads, spec.head_size)
        empty = partial(torch.empty, shape, dtype=self.dtype, device=device)
        self.tensors = [empty() for _ in range(spec.num_layers)]
        if fill is not None:
            for tensor in self.tensors:
                tensor.fill_(fill)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def keys(self, layer: int) -> Tensor:
        """A view [num_blocks, block_size, num_kv_heads, head_size]; the blocks lie apart."""
        return self.tensors[layer][:, 0]

    def values(self, layer: int) -> Tensor:
        """A view [num_blocks, block_size, num_kv_heads, head_size]; the blocks lie apart."""
        return self.tensors[layer][:, 1]


# %%
spec = KVSpec(num_layers=2, num_kv_heads=2, head_size=8, dtype="fp32")
store = KVStore(spec, num_blocks=8, block_size=B)
print("a layer ", tuple(store.tensors[0].shape))
print("its keys", tuple(store.keys(0).shape), "strides", store.keys(0).stride())
print(f"in all   {store.nbytes / 1024:.0f} KiB, of which a block has {spec.bytes_per_block(B)} B")
print("a fresh slot holds", store.keys(0)[0, 0, 0, 0].item())

# %% [markdown]
# The strides say how many numbers apart two neighbours lie: one block to the next 128, one slot
# to the next 16, one head to the next 8. Keys of one block are adjacent (64 numbers), but
# between two blocks of keys lie 64 values. No code below may assume that the view is
# contiguous.
#
# Fresh memory is filled with NaN, after the custom of the xv6 kernel {cite}`cox2022xv6`, which
# fills freed pages with junk. A program that reads what nobody wrote then fails at once. Zeros
# would give an answer that is merely a little wrong. The fill costs one write of the pool,
# once: about the time that one decode step takes to read a full cache.

# %% [markdown]
# ## A slot for every token
#
# The token at position $p$ of a chat is in logical block `p // B`, at offset `p % B`. The table
# names the block, and the pair becomes one number, the *slot*:
#
# $$ \text{slot}(p) = \text{table}[p \,/\!/\, B] \cdot B + p \bmod B $$
#
# A *slot mapping* lists the slots of all tokens of a step, in 64-bit integers, -1 where there
# is nothing to write. Chapter 03 makes it for whole batches of rows; for one row it takes a
# line. The store only receives it, and refuses slots that do not exist.

# %% tags=["export:kv_store"]
def check_range(name: str, ids: Tensor, low: int, high: int) -> None:
    """ValueError unless low <= ids < high; silent on a GPU, where looking means waiting."""
    if ids.device.type == "cpu" and len(ids):
        for value in (int(ids.min()), int(ids.max())):
            if not low <= value < high:
                raise ValueError(f"{name}: {value} found, {low} to {high - 1} allowed")


# %%
tables = torch.tensor([[0, 2, 4, 5], [1, 3, -1, -1], [7, 6, -1, -1]], dtype=torch.int32)


def slots_of(row, positions, block_size):
    """The slots of these positions of one chat; row, its blocks."""
    return row.long()[positions // block_size] * block_size + positions % block_size


positions = torch.tensor([0, 3, 4, 12])
print("A's positions", positions.tolist(), "slots", slots_of(tables[0], positions, B).tolist())

# %% [markdown]
# By hand: position 4 of A is the first of its second block, block 2, so slot 8. Position 12 opens
# block 5: slot 20.
#
# `write` puts the keys and values of a batch into their slots. In memory a block is $B$ rows of
# keys, then $B$ rows of values, so the key of slot $s$ in block $b$ is row $s + bB$ of the
# tensor, and its value $B$ rows later. The one difficulty is -1.
#
# :::{admonition} Predict
# :class: tip
# A pool has 5 blocks of 16 slots. A step writes 64 real tokens and, since its batch is padded
# to 128, 64 tokens with slot -1. What does `pool[slots] = k` do with the second half?
# :::
#
# :::{dropdown} Reasoning
# In Python -1 is the last element. All 64 padding tokens are written to slot 79, the last slot
# of the last block, on top of whatever is there. It goes unnoticed until somebody owns that
# block and fills it to the end.
# :::

# %%
pool = torch.zeros(5 * 16)
pool[79] = 7.0  # somebody's token
slots = torch.cat([torch.arange(64), torch.full((64,), -1)])
pool[slots] = torch.ones(128)
print("slot 79 holds", pool[79].item())

# %% [markdown]
# One could drop the padding with a mask. But then the number of rows depends on the data, and
# on a GPU the host must wait to learn it, in every layer of every step. So the shape stays, and
# each padding token is made to repeat the first real write, bytes and all. Writing the same
# bytes twice changes nothing, in whatever order the two happen.

# %% tags=["export:kv_store"]
def _without_skipped(
    rows: Tensor, index: Tensor, data: Tensor, real: Tensor
) -> tuple[Tensor, Tensor]:
    """Make each skipped write repeat the first real one; the shapes stay as they are.

    Where none is real, row 0 is given its own bytes back.
    """
    first = real.int().argmax(0, keepdim=True)  # [1]: to index with a scalar, the host would wait
    any_real = real[first]
    target = torch.where(any_real, index[first], 0)
    same = torch.where(any_real[:, None, None], data[first], rows[:1])
    return torch.where(real, index, target), torch.where(real[:, None, None], data, same)


# %% tags=["export:kv_store"]
class KVStore(KVStore):  # type: ignore
    def write(self, layer: int, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        """Store one key and one value a token.

        Args: k, v [num_tokens, num_kv_heads, head_size]; slot_mapping int64 [num_tokens], -1
        where a token is to be skipped, the others all different.
        Changes the named slots of `layer` and nothing else; never waits for a GPU.
        """
        if not len(slot_mapping):
            return
        check_range("slot_mapping", slot_mapping, -1, self.num_blocks * self.block_size)
        rows = self.tensors[layer].view(-1, *k.shape[1:])
        key_row = slot_mapping + slot_mapping // self.block_size * self.block_size
        for data, row in ((k, key_row), (v, key_row + self.block_size)):
            index, new = _without_skipped(rows, row, data.to(self.dtype), slot_mapping >= 0)
            rows.index_copy_(0, index, new)

    def gather(self, layer: int, block_table_row: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
        """One sequence in one piece: contiguous k and v, [seq_len, num_kv_heads, head_size].

        Args: block_table_row int32 [max_blocks]; seq_len, its tokens.  Changes nothing.
        """
        blocks = block_table_row[: blocks_for(seq_len, self.block_size)].long()
        check_range("block_table_row", blocks, 0, self.num_blocks)
        if len(blocks) * self.block_size < seq_len:
            raise ValueError(f"seq_len = {seq_len}: the row has {len(blocks)} blocks only")
        k, v = (pool[blocks].flatten(0, 1)[:seq_len] for pool in self.tensors[layer].unbind(1))
        return k, v


# %% [markdown]
# The padded batch again, and then chats A and B, which grow in turn, a token each, to 13 and 7
# tokens. Their blocks interleave.

# %%
spot = KVStore(KVSpec(1, 1, 8, "fp32"), num_blocks=5, block_size=16)
spot.keys(0)[4, 15] = 7.0
spot.write(0, torch.ones(128, 1, 8), torch.ones(128, 1, 8), slots)
print("slot 79 holds", spot.keys(0)[4, 15, 0, 0].item())
print("written:", (spot.keys(0) == 1).all(-1).sum().item(), "slots, 0 to 63:",
      bool((spot.keys(0)[:4] == 1).all()))

# %%
store = KVStore(spec, num_blocks=8, block_size=B)
gen = torch.Generator().manual_seed(0)
lens = torch.tensor([13, 7, 5])
chats = [torch.randn(2, n, 2, 8, generator=gen) for n in lens.tolist()]  # k and v of A, B, C


def store_token(row, position):
    slot = slots_of(tables[row], torch.tensor([position]), B)
    k, v = chats[row][:, position, None]
    for layer in range(2):
        store.write(layer, k, v, slot)


for position in range(13):
    for row in range(3):
        if position < lens[row]:
            store_token(row, position)

held = {name: [b for b in row if b >= 0] for name, row in zip("ABC", tables.tolist())}
counts = dict(zip("ABC", lens.tolist()))
draw_pool({"block_size": B, "num_blocks": 8, "free": [], "tables": held, "seq_lens": counts})

# %%
for name, row, (k, v) in zip("ABC", tables, chats):
    found = [store.gather(layer, row, len(k)) for layer in range(2)]
    print(name, all(torch.equal(a, k) and torch.equal(b, v) for a, b in found))

unwritten = store.keys(0).isnan().all(-1).all(-1)
print("slots never written:", (unwritten.flatten().nonzero().flatten()).tolist())
assert int(unwritten.sum()) == 8 * B - 25

# %% [markdown]
# Exactly the empty ends of the last blocks still hold NaN: 7 slots for the three chats.

# %% [markdown]
# ## Reading through the table
#
# The output of a query is a mean of values, weighted by the softmax of its scores:
#
# $$ o = \sum_p w_p v_p, \qquad w_p = \frac{e^{s_p}}{\sum_r e^{s_r}}, \qquad s_p = \frac{q \cdot k_p}{\sqrt d} $$
#
# Positions appear in the sums only as names. Nothing asks that $k_0$ and $k_1$ be neighbours.
# So we walk the row of the table, take from each block the slots that belong to the chat, and
# stop where it ends. First in NumPy, in float64, for one chat, with no thought of speed: this
# is the *oracle* that every faster version in this book is held against.

# %% tags=["export:attention"]
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


# %% [markdown]
# With more query heads than KV heads (*grouped-query attention*, GQA {cite}`ainslie2023gqa`),
# query heads share a KV head in groups: with 4 and 2, heads 0 and 1 read KV head 0. The queries
# are the chat's last tokens, so query $i$ of $t$ in a chat of $n$ tokens stands at position $n
# - t + i$ and sees nothing behind it. One query is a decode step, $n$ queries are a prefill,
# anything between a chunk of a prompt. The same function does all three. `window`, `softcap`
# and `sinks` have a section below.

# %% tags=["export:attention"]
def paged_attention_numpy(
    query: Array, keys: Array, values: Array, block_table_row: Array, seq_len: int, *,
    scale: float | None = None, window: int | None = None, softcap: float | None = None,
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


# %% [markdown]
# Is it right? PyTorch's own attention knows no blocks. It gets each chat as one flat array, in
# float64; the oracle gets the pool. The blocks of the pool are handed out in random order, and
# the lengths are those where off-by-one errors live.

# %%
def flat_attention(q, k, v):
    """Causal attention over flat arrays, by PyTorch; all [num_tokens, heads, head_size]."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return sdpa(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1)


def in_blocks(k, v, block_size):
    """A store with these tokens in blocks taken in random order, and the row that names them."""
    num_blocks = len(k) // block_size + 2
    row = torch.randperm(num_blocks, generator=gen).int()
    store = KVStore(KVSpec(1, *k.shape[1:], "fp32"), num_blocks, block_size)
    store.write(0, k, v, slots_of(row, torch.arange(len(k)), block_size))
    return store, row


# %%
for block_size in (1, 4, 16, 128):
    for head_size in (8, 40, 80):
        for n in {0, 1, block_size - 1, block_size, block_size + 1}:
            q, k, v = (torch.randn(n, h, head_size, generator=gen) for h in (4, 2, 2))
            pool, row = in_blocks(k, v, block_size)
            ours, _ = paged_attention_numpy(
                q.numpy(), pool.keys(0).numpy(), pool.values(0).numpy(), row.numpy(), n)
            assert np.abs(ours - flat_attention(q, k, v).numpy()).max(initial=0) < 1e-12
    print(f"blocks of {block_size}: equal to the flat array")

# %% [markdown]
# The oracle is equal at every length and head size; its memory was NaN wherever nobody had
# written. The interleaved chats of the last section, in the same way:

# %%
for name, row, (k, v) in zip("ABC", tables, chats):
    q = torch.randn(len(k), 4, 8, generator=gen)
    ours, _ = paged_attention_numpy(
        q.numpy(), store.keys(0).numpy(), store.values(0).numpy(), row.numpy(), len(k))
    print(name, len(k), "tokens:", np.allclose(ours, flat_attention(q, k, v), atol=1e-12, rtol=0))

# %% [markdown]
# **Turn the knob.** Swap two entries of A's row, `tables[0]`, and run the last cell again;
# expect A to differ and B and C to stay.

# %% [markdown]
# ## What lies in an empty slot
#
# Fast code does not read slot by slot. It reads whole blocks, the empty end of the last one
# too, and masks the scores of what does not count: minus infinity, so that the weight is 0.
#
# :::{admonition} Predict
# :class: tip
# B has 7 tokens in two blocks of 4. The last slot was never written and holds NaN, in the keys
# and in the values. The code below masks its score. Is the output right?
# :::
#
# :::{dropdown} Reasoning
# The key does no harm: its score is NaN, but the mask replaces it. The weight is exactly 0. The
# output adds weight times value, and 0 × NaN is NaN, not 0. One slot that counts for nothing
# spoils the row.
# :::

# %%
def naive_masked(query, pool, row, seq_len):
    """Reads whole blocks and masks the scores only."""
    blocks = row[: -(-seq_len // B)].long()
    k, v = (x[blocks].flatten(0, 1)[:, 0] for x in (pool.keys(0), pool.values(0)))
    scores = k @ query / 8**0.5
    scores[seq_len:] = -torch.inf
    weights = torch.softmax(scores, 0)
    return weights, weights @ v


weights, output = naive_masked(torch.ones(8), store, tables[1], 7)
print("weights", [f"{w:.2f}" for w in weights.tolist()])
print("output ", output.tolist())

# %% [markdown]
# In a live server memory is seldom NaN: a block that is handed on keeps the finite numbers of
# its last owner, and the fault sleeps until some block holds an infinity. It has been found and
# mended in several attention libraries, one after the other. The rule: **do not load what does
# not count**, or replace it on loading. Masking the score is not enough.
#
# The oracle obeys: it never reads beyond `stop`. The torch version below obeys in another way:
# where a batch must be padded, a padding entry *names the chat's newest token again*. Every
# address it reads holds a token.

# %% [markdown]
# ## A whole batch at once
#
# A server does not call attention chat by chat. One step holds chats that decode (one query
# each), prompts, and chunks of prompts, and all their queries stand in one *packed* tensor,
# chat after chat. Three small integer arrays say what is what:
#
# | name | shape | what it says |
# |---|---|---|
# | `cu_seqlens` | `[num_seqs + 1]` | chat s owns `query[cu_seqlens[s] : cu_seqlens[s + 1]]` |
# | `seq_lens` | `[num_seqs]` | its tokens in the cache, those of this step included |
# | `rows` | `[num_seqs]` | its row of the block table |
#
# `rows` is there because a row stays with a chat for life while batches come and go. This step
# has C's prompt of 5, B's last 3 tokens, A decoding, and a padding entry of length 0:

# %%
rows = torch.tensor([2, 1, 0, 0])
cu_seqlens = torch.tensor([0, 5, 8, 9, 10], dtype=torch.int32)
seq_lens = torch.tensor([5, 7, 13, 0], dtype=torch.int32)
cu = cu_seqlens.tolist()
for name, begin, end, n in zip("CBA-", cu, cu[1:], seq_lens.tolist()):
    positions = list(range(max(0, n - (end - begin)), n))
    print(f"{name} queries {begin} to {end - 1} at positions", positions)

# %% [markdown]
# Now the torch version. It cuts the batch into *pieces*, at most 256 queries of one chat each. A
# piece of a long prompt is exactly a chunk of it, and has no use for keys behind its last query.

# %% tags=["export:attention"]
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


# %%
for piece in cut_batch(cu_seqlens, seq_lens, rows, window=None):
    print(piece)

# %% [markdown]
# Pieces are handled together, as one padded batch of matrix products. This is what makes 64
# decoding chats cost a few calls and not 64. They are sorted, so that neighbours need little
# padding, and a group ends where its padded keys or scores would fill more than 2 MiB. Up to
# there a little wasted arithmetic costs less than another call would.

# %% tags=["export:attention"]
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


# %%
print(f"{MAX_ELEMENTS * 4 / 1024**2:.0f} MiB in float32")
for group in group_pieces(cut_batch(cu_seqlens, seq_lens, rows, None), 16, 4):
    for name, part in zip(("token", "own", "key"), piece_positions(group, "cpu")):
        print(name, part.tolist())

# %% [markdown]
# Loading is address arithmetic, the same that a GPU kernel does. The key of one token and head
# is a short run of `head_size` numbers. Its address is block, offset and head, each times its
# stride, in 64 bits: a pool passes $2^{31}$ numbers sooner than one thinks, and a 32-bit
# product then wraps to an address in another chat. `fetch_rows` sees the memory as a table that
# has a row starting at *every* number, each overlapping the next. Nothing is copied for that.
# An address is then the index of a row, and fetching rows by index is what `embedding` is fast
# at. It works for any strides.

# %% tags=["export:attention"]
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


# %%
layers, kv_heads, head_size, block_size = 32, 8, 128, 16
step = 2 * block_size * kv_heads * head_size
blocks = 2**31 // step
print(f"{step:,} numbers a block: block {blocks:,} starts at 2^31")
print(f"one layer's pool of that size in bf16: {2 * 2**31 / 1024**3:.0f} GiB")
print("in 32 bits its address is", torch.tensor(blocks, dtype=torch.int32).mul(step).item())

# %% [markdown]
# For Llama 3 8B the wrap comes with block 65,536, in a pool of 4 GiB a layer.
#
# What is left is dense attention over arrays without gaps, in float32. The query heads that
# share a KV head are stacked into one matrix, so the keys are never repeated. The softmax
# subtracts the largest score before it takes exponentials, and a masked score is minus
# infinity, not a large negative number (we come back to both).

# %% tags=["export:attention"]
def dense_attention(
    query: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, softcap: float | None,
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


# %% [markdown]
# `paged_attention` puts them together. `visible_keys` is the causal mask, by position.

# %% tags=["export:attention"]
def visible_keys(key: Tensor, own: Tensor, window: int | None) -> Tensor:
    """Which query, at position own, may see which key: bool [pieces, count, num_keys]."""
    key, own = key[:, None, :], own[:, :, None]
    visible = key <= own
    return visible if window is None else visible & (key > own - window)


def check_attention(
    query: Tensor, keys: Tensor, values: Tensor, block_table: Tensor, cu_seqlens: Tensor,
    seq_lens: Tensor, rows: Tensor | None, window: int | None, sinks: Tensor | None,
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


# %% tags=["export:attention"]
def paged_attention(
    query: Tensor, keys: Tensor, values: Tensor, block_table: Tensor, cu_seqlens: Tensor,
    seq_lens: Tensor, *, rows: Tensor | None = None, scale: float | None = None,
    window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
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


# %% [markdown]
# `key.minimum(own[:, -1:])` is the rule of the last section: a padding entry runs on behind the
# last token, so its address is taken back to the newest token, and the mask, which sees the
# position as it was, hides it. Against the oracle, chat by chat:

# %%
def compare(query, store, block_table, cu_seqlens, seq_lens, rows, **options):
    """Largest difference to the oracle in output and in lse."""
    pools = (store.keys(0), store.values(0))
    output, lse = paged_attention(
        query, *pools, block_table, cu_seqlens, seq_lens, rows=rows, **options)
    arrays = {k: v.numpy() if isinstance(v, Tensor) else v for k, v in options.items()}
    worst = 0.0
    for s, row in enumerate(rows.tolist()):
        part = slice(cu_seqlens[s], cu_seqlens[s + 1])
        right = paged_attention_numpy(
            query[part].numpy(), *(pool.numpy() for pool in pools), block_table[row].numpy(),
            int(seq_lens[s]), **arrays)
        for ours, oracle in zip((output[part], lse[part]), right):
            known = np.isfinite(oracle)
            assert np.array_equal(np.isfinite(ours.numpy()), known)
            worst = max(worst, np.abs(ours.numpy()[known] - oracle[known]).max(initial=0))
    return worst


# %%
query = torch.randn(10, 4, 8, generator=gen)
batch = (tables, cu_seqlens, seq_lens, rows)
assert compare(query, store, *batch) < 1e-6
output, lse = paged_attention(query, store.keys(0), store.values(0), *batch[:3], rows=rows)
print("mixed batch equal to the oracle; NaN anywhere:", bool(output.isnan().any()))
print("the empty entry:", output[9].abs().max().item(), lse[9].tolist())

# %% [markdown]
# The padding entry names A's row, as a stale entry of a CUDA graph's batch would. Its length is
# 0, so nothing is read through it: output 0, lse minus infinity, and so in every kernel of this
# book.
#
# :::{admonition} Predict
# :class: tip
# All blocks of the pool are moved about at random, as a defragmenter might do. Once the table
# is rewritten to follow, once it is forgotten. What happens to A's output in either case, to
# the last bit?
# :::
#
# :::{dropdown} Reasoning
# With its table, A reads the same numbers in the same order from other addresses: the same
# bits. With the old table it reads other tokens or unwritten slots, and so a finite wrong
# answer or NaN. Nothing raises: the table is the only thing that knows what is true.
# :::

# %%
shuffle = torch.randperm(8, generator=gen)  # block b moves to shuffle[b]
moved = torch.empty_like(store.tensors[0])
moved[shuffle] = store.tensors[0]
followed = torch.where(tables >= 0, shuffle[tables.long()], -1).int()
for name, table in (("with its table", followed), ("without", tables)):
    again, _ = paged_attention(query, moved[:, 0], moved[:, 1], table, *batch[1:3], rows=rows)
    print(f"{name}: same bits {torch.equal(again, output)}")

# %% [markdown]
# ## Windows, caps and sinks
#
# Three variations are common enough in models to be in the signature.
#
# A *sliding window* of $W$: a query sees the last $W$ tokens, its own included. A *soft cap*
# bends each score $s$ to $c \tanh(s / c)$, so that none leaves the range from $-c$ to $c$. An
# *attention sink* is one more term in the denominator of the softmax, learned for each head,
# with no value behind it: a head that finds nothing worth reading puts its weight there.
#
# :::{admonition} Predict
# :class: tip
# A has 13 tokens in blocks 0, 2, 4, 5 (B = 4), and the layer has a window of 4. Which blocks
# could A give back now, and for good?
# :::
#
# :::{dropdown} Reasoning
# The query at position 12 sees positions 9 to 12: logical blocks 2 and 3. Later queries see
# later positions. So logical blocks 0 and 1, that is blocks 0 and 2, can go. Their entries
# become -1, and someone else may write there.
# :::

# %%
decode = (torch.tensor([0, 1]), torch.tensor([13]))
pools = (store.keys(0), store.values(0))
before, _ = paged_attention(query[:1], *pools, tables[:1], *decode, window=4)
trimmed = torch.tensor([[-1, -1, 4, 5]])
recycled = store.tensors[0].clone()
recycled[[0, 2]] = torch.nan
pools = (recycled[:, 0], recycled[:, 1])
after, _ = paged_attention(query[:1], *pools, trimmed, *decode, window=4)
print("window 4, blocks 0 and 2 gone: same bits", torch.equal(after, before))

# %%
everything = {"scale": 0.3, "softcap": 2.0, "sinks": torch.tensor([-1.0, 0.0, 1.0, 2.0])}
for window in (1, 2, 4, 5, 13, None):
    assert compare(query, store, *batch, window=window, **everything) < 1e-6
pools = (store.keys(0), store.values(0))
_, lse = paged_attention(query, *pools, *batch[:3], rows=rows, **everything)
share = torch.exp(everything["sinks"] - lse[8])
print("weight on the sinks of A's four heads:", [f"{w:.2f}" for w in share.tolist()])

# %% [markdown]
# All agree with the oracle. The last lines use what lse is good for: $e^{s - \text{lse}}$ is
# the weight of a score. Two attentions over different tokens can be merged by it, too (an
# exercise), and chapter 11 will split one long chat over many processors that way.
#
# **Turn the knob.** Ask for `window=9` with the trimmed table; expect a `ValueError`, since
# position 5 is then visible and has no block.

# %% [markdown]
# ## Scores that are far from ordinary
#
# Two shortcuts are popular in softmax code. Both work on random tests.
#
# The first masks with a large negative number, say $-5 \cdot 10^4$. A true score can be lower
# still. The second keeps a running sum in bf16, which has 8 significant bits: from 256 on,
# adding 1 changes nothing.

# %%
score, mask = torch.tensor([-6e4]), torch.tensor([-5e4])
weights = torch.softmax(torch.cat([score, mask.expand(3)]), 0)
print("finite mask: weight of the only real key", weights[0].item())

total = torch.zeros((), dtype=torch.bfloat16)
for _ in range(1000):
    total += 1
print("1000 ones in bf16:", total.item())

# %%
q = torch.full((1, 1, 8), 100.0)
lone = KVStore(KVSpec(1, 1, 8, "fp32"), num_blocks=1, block_size=4)
lone.write(0, torch.full((1, 1, 8), -212.13), torch.ones(1, 1, 8), torch.tensor([0]))
one = (torch.tensor([[0]]), torch.tensor([0, 1]), torch.tensor([1]))
output, lse = paged_attention(q, lone.keys(0), lone.values(0), *one)
print(f"one key, score {lse.item():.0f}: output", output[0, 0, 0].item())

n = 32_768
long = KVStore(KVSpec(1, 1, 8, "fp32"), num_blocks=n // 16, block_size=16, fill=1.0)
many = (torch.arange(n // 16)[None], torch.tensor([0, 1]), torch.tensor([n]))
output, _ = paged_attention(q, long.keys(0), long.values(0), *many)
print(f"{n:,} equal keys, values 1: output", output[0, 0, 0].item())

# %% [markdown]
# So: minus infinity for what is masked, and maximum, sum and accumulator in float32, whatever the
# store holds.

# %% [markdown]
# ## Whole blocks
#
# `copy_blocks` copies whole blocks within the pool. Chapter 06 will want it when two chats
# share a block and one of them is about to write: the step then begins with a list of (source,
# destination) pairs.
#
# The list was made in some order. A GPU runs all of it at once: it reads every source as it was
# when the step began. Are the two the same?
#
# :::{admonition} Predict
# :class: tip
# Blocks 0, 1, 2 hold the letters a, b, c. The list says 0 → 1, then 1 → 2. What is in block 2
# if the pairs run one by one? What, if all sources are read before anything is written?
# :::
#
# :::{dropdown} Reasoning
# One by one, block 1 is an *a* by the time it is read, and block 2 becomes an *a*. All at once,
# block 2 gets the *b* that block 1 held at the start. So a batch of copies must not be launched
# as it stands. The other order, 1 → 2 and then 0 → 1, is the same both ways.
# :::

# %%
pairs = [(0, 1), (1, 2)]
one_by_one, at_once = list("abc"), list("abc")
for source, destination in pairs:
    one_by_one[destination] = one_by_one[source]
at_once[1], at_once[2] = at_once[0], at_once[1]
print("one by one", *one_by_one, "| at once", *at_once)

# %% [markdown]
# One could refuse such lists. It is as easy to make them right: trace each source back to the
# block that held its bytes at the start. A destination that is written twice keeps its last
# source, and one that ends up with its own bytes drops out. The result may run in any order, as
# long as all is read before anything is written.

# %% tags=["export:kv_store"]
def resolve_copies(pairs: Iterable[tuple[BlockT, BlockT]]) -> list[tuple[BlockT, BlockT]]:
    """Copies that run at once, with the result of `pairs` run one by one in the order given.

    Args: (source, destination) pairs; anything hashable may name a block.
    Returns: pairs whose sources mean the bytes at the start and whose destinations differ.
    A block may be both: read all sources before writing any destination.
    """
    origin: dict[BlockT, BlockT] = {}
    for source, destination in pairs:
        origin[destination] = origin.get(source, source)
    return [(source, block) for block, source in origin.items() if source != block]


# %% tags=["export:kv_store"]
class KVStore(KVStore):  # type: ignore
    def copy_blocks(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination) ids, in every tensor of the list.

        The result is that of one copy after the other, though all run at once.
        Raises: ValueError for an id that does not exist, before anything changes.
        """
        copies = torch.tensor(resolve_copies(pairs), dtype=torch.int64).view(-1, 2)
        check_range("pairs", copies.flatten(), 0, self.num_blocks)
        source, destination = copies.to(self.tensors[0].device).unbind(1)
        for tensor in self.tensors:
            flat = tensor.flatten(1)
            flat.index_copy_(0, destination, flat.index_select(0, source))


# %%
letters = KVStore(KVSpec(2, 1, 8, "fp32"), num_blocks=6, block_size=B)
for tensor in letters.tensors:
    tensor.copy_(torch.arange(6.0).view(6, 1, 1, 1, 1).expand_as(tensor))
pairs = [(0, 1), (1, 2), (4, 5), (3, 4), (5, 3)]
print("resolved ", resolve_copies(pairs))
letters.copy_blocks(pairs)
print("contents ", letters.keys(1)[:, 0, 0, 0].int().tolist())

by_hand = list(range(6))
for source, destination in pairs:
    by_hand[destination] = by_hand[source]
assert letters.values(0)[:, -1, 0, -1].tolist() == by_hand

# %% [markdown]
# ## Which layout?
#
# The order of the five dimensions was given, not argued. Four layouts of the same bytes:
#
# | layout | list of tensors | a block is |
# |---|---|---|
# | K and V together (ours) | one a layer `[num_blocks, 2, block_size, num_kv_heads, head_size]` | a piece a layer |
# | K and V apart | two a layer `[num_blocks, block_size, num_kv_heads, head_size]` | two pieces a layer |
# | one slab | one `[num_blocks, num_layers, 2, block_size, num_kv_heads, head_size]` | one piece |
# | heads before slots | one a layer `[num_blocks, 2, num_kv_heads, block_size, head_size]` | a piece a layer |
#
# What can they change? Not the bytes moved: writing a token, gathering a chat and attending to
# it touch the same rows of `head_size` numbers in each. They change how many separate pieces a
# block is, and that matters to whoever moves whole blocks. So the prediction from counts:
# write, gather and attention nearly alike, and for copies the fewer pieces the better.
#
# :::{admonition} Check it yourself
# :class: warning
# A 16-token block of a 70B-class model (80 layers, 8 KV heads of 128, fp16) takes 5 MiB, and
# one reads that "a block is ~~one 5 MiB slab~~". With a tensor a layer it is 64 KiB, 80 times
# over, each in another tensor. Only the slab layout makes it one piece.
# :::

# %%
big = KVSpec(num_layers=80, num_kv_heads=8, head_size=128, dtype="fp16")
whole = big.bytes_per_block(16)
print(f"a block: {whole / 1024**2:.0f} MiB")
for name, count in (("together", 80), ("apart", 160), ("slab", 1)):
    print(f"{name:8}: {whole / count / 1024:.0f} KiB, {count} times")

# %% tags=["hide-input"]
import json
from pathlib import Path

import matplotlib.pyplot as plt

from paged_kv.draw import book_style

book_style()
result = json.loads(Path("../benchmarks/results/kv_layout.json").read_text())
actions, models = ("write", "gather", "attention", "copy"), ("SmolLM2-135M", "Llama 3 8B")
fig, axes = plt.subplots(1, 2, figsize=(8, 3.6), sharey=True)
for ax, model in zip(axes, models):
    rows = [row for row in result["rows"] if row["model"] == model]
    for i, (row, hatch) in enumerate(zip(rows, ("", "//", "..", "xx"))):
        share = [row[f"{a}_ms"] / rows[0][f"{a}_ms"] for a in actions]
        ax.bar(np.arange(4) + 0.2 * i - 0.3, share, 0.2, label=row["layout"], hatch=hatch)
    ax.set(title=model, xticks=range(4), xticklabels=actions)
    ax.axhline(1, color="black", linewidth=0.8)
axes[0].set_ylabel("time, ours = 1")
axes[0].legend(fontsize=9)
plt.show()
print("measured:", result["device"], "torch", result["versions"]["torch"])
print("measured:", result["workload"])
for row in result["rows"]:
    print(f"measured: {row['model']:12} {row['layout']:18}",
          *(f"{action} {row[action + '_ms']:.1f} ms," for action in actions))

# %% [markdown]
# *Figure: time of four operations in four layouts, relative to keys and values together, for
# two model shapes, all layers.*
#
# On this processor the prediction is half right. Write, gather and attention are alike to
# within what repeated runs differ by, with one exception: heads before slots spreads a token's
# heads over the block, and writing and gathering suffer. But fewer pieces do not make copies
# faster. A copy that reads all before it writes needs room for what it has read. With a tensor
# a layer that is one layer's share, used again for the next; with the slab it is everything,
# fresh from the operating system, and the large model pays for it.
#
# So the CPU does not decide, and we choose by count and by need. K and V together gives half as
# many pieces as K and V apart. The slab gives fewest, and a transfer over a network likes that;
# but all layers must then be of one shape, and the memory must be had in one piece. What a GPU
# adds: each copy call costs microseconds to launch, so 80 or 160 calls a step must become one
# kernel that walks the list (chapter 11); a piece of 64 KiB is large enough to use the bus
# well; and a row of `head_size` numbers fills whole memory transactions in all four. What this
# experiment does not show is a GPU's attention kernel: that is measured in chapter 11.

# %% [markdown]
# ## What grouping buys
#
# The torch attention is the CPU engine's real path, so its speed matters a little. Prediction:
# one call for a batch saves the fixed cost of all calls but a few, so it gains most with many
# short chats, and nothing with one long prompt. As a second opinion, PyTorch's fused
# `torch.nn.functional.scaled_dot_product_attention` is called once a chat, on its gathered keys
# and values.

# %% tags=["hide-input"]
result = json.loads(Path("../benchmarks/results/attention_cpu.json").read_text())
names = [row["case"] for row in result["rows"]]
fig, ax = plt.subplots(figsize=(7, 3.6))
for i, (way, label, hatch) in enumerate((("loop", "ours, one call a chat", "//"),
                                         ("sdpa", "PyTorch's, one call a chat", ".."))):
    share = [row[f"{way}_ms"] / row["grouped_ms"] for row in result["rows"]]
    ax.barh(np.arange(len(names)) + 0.4 * i - 0.2, share, 0.4, label=label, hatch=hatch)
ax.axvline(1, color="black", linewidth=0.8)
ax.set(yticks=range(len(names)), yticklabels=names, xlabel="time, ours grouped = 1")
ax.invert_yaxis()
ax.legend()
plt.show()
print("measured:", result["device"], "torch", result["versions"]["torch"])
print("measured:", result["workload"])
for row in result["rows"]:
    print(f"measured: {row['case']:31} grouped {row['grouped_ms']:6.1f} ms, "
          f"loop {row['loop_ms']:6.1f} ms, PyTorch {row['sdpa_ms']:6.1f} ms")

# %% [markdown]
# *Figure: time of one layer's attention, one call a chat, relative to one call for the batch.*
#
# Against our own code called chat by chat the prediction holds: most with 256 short chats,
# nothing with one prompt.
# Where one chat is far longer than the rest, repeated runs disagree about who is ahead.
# PyTorch's fused kernel is ahead in most rows, even chat by chat. It never puts the scores in
# memory, but it returns no lse and knows no soft cap and no sinks. We keep the version that can
# be read and checked. Where speed counts there is a GPU, and chapters 11 and 12 do there what
# the fused kernel does here.

# %% [markdown]
# ## State card
#
# | class or function | state | invariant |
# |---|---|---|
# | `KVStore` | `tensors`, one a layer, the block first; `block_size`, `num_blocks`, `dtype` | only named slots and blocks change; -1 is never written through |
# | `resolve_copies` | none | at once equals one by one |
# | `paged_attention_numpy` | none | the definition, in float64 |
# | `paged_attention` | none | equals the oracle; reads only slots that hold a token; empty rows give 0 and minus infinity |
#
# What breaks next: random numbers are easy to please. Chapter 05 puts a real model on top, which
# notices.
#
# ## Real world
#
# - vLLM shapes a layer's cache per attention backend: `vllm/v1/attention/backends/flashinfer.py` has
#   used ours and `flash_attn.py` the one with the 2 in front of the blocks, and a stride order can put heads before slots or
#   all layers of a block side by side for transfers. Its write kernel, in `csrc/cache_kernels.cu`, returns
#   at once for a negative slot.
# - SGLang (`srt/mem_cache/memory_pool.py`) keeps K and V apart, two buffers a layer, indexed by slot;
#   slot 0 is set aside to take the padding's writes.
# - TensorRT-LLM's pool (`cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp`) has the block first and
#   its layers inside, near to the slab.
# - transformers' paged attention gathers the blocks into flat arrays and calls ordinary attention, as our
#   second opinion did.
#
# ## Exercises
#
# :::{exercise}
# :label: ex-04-address
# **Compute.** In `store` ($B = 4$, 2 KV heads of 8), at which index of `tensors[0].flatten()`
# does the *value* of A's position 9, head 1, begin? A's row is 0, 2, 4, 5.
# :::
#
# :::{solution} ex-04-address
# :class: dropdown
# Position 9 is at offset 1 of logical block 2, block 4. A block has 128 numbers, its values start
# at 64, a slot has 16 and a head 8: $4 \cdot 128 + 64 + 1 \cdot 16 + 1 \cdot 8 = 600$.
# :::

# %% tags=["hide-input"]
flat = store.tensors[0].flatten()
assert torch.equal(flat[600:608], chats[0][1][9, 1])

# %% [markdown]
# :::{exercise}
# :label: ex-04-pieces
# **Compute.** A chat of 2,000 tokens of the 70B-class model goes to the host, block by block
# ($B = 16$). How many pieces are copied in each of the layouts, and how large is each?
# :::
#
# :::{solution} ex-04-pieces
# :class: dropdown
# It has 125 blocks: 10,000 pieces of 65,536 bytes with K and V together, 20,000 of half that
# apart, 125 of 5,242,880 as a slab.
# :::

# %% tags=["hide-input"]
from paged_kv.sizing import blocks_for

assert blocks_for(2000, 16) == 125
assert (125 * 80, whole // 80) == (10_000, 65_536)
assert (125 * 160, whole // 160) == (20_000, 32_768)
assert (125, whole) == (125, 5_242_880)

# %% [markdown]
# :::{exercise}
# :label: ex-04-trace
# **Trace.** Resolve the list 3 → 5, 5 → 6, 2 → 3, 6 → 2 by hand. Which blocks hold what in the
# end?
# :::
#
# :::{solution} ex-04-trace
# :class: dropdown
# Block 5 gets 3's bytes, 6 gets them from 5, so from 3; 3 gets 2's; 2 gets 6's, so 3's. At
# once: 3 → 5, 3 → 6, 2 → 3, 3 → 2. Blocks 2 and 3 have changed places, and 5 and 6 hold copies
# of the old 3.
# :::

# %% tags=["hide-input"]
assert resolve_copies([(3, 5), (5, 6), (2, 3), (6, 2)]) == [(3, 5), (3, 6), (2, 3), (3, 2)]

# %% [markdown]
# :::{exercise}
# :label: ex-04-break
# **Break.** Run `naive_masked` on a copy of `store` whose fresh memory was filled with 0 and
# not with NaN. Does the output betray the fault? What does that say about the default of
# `fill`?
# :::
#
# :::{solution} ex-04-break
# :class: dropdown
# It does not: 0 × 0 is 0, the output is right, and a test on such a pool passes. The fault
# shows only once the memory holds something that is not finite. Filling with NaN makes every
# test look for it.
# :::

# %% tags=["hide-input"]
clean = KVStore(spec, num_blocks=8, block_size=B, fill=0.0)
for tensor, filled in zip(clean.tensors, store.tensors):
    tensor.copy_(filled.nan_to_num(0.0))
_, output = naive_masked(torch.ones(8), clean, tables[1], 7)
right, _ = paged_attention_numpy(
    np.ones((1, 2, 8)), clean.keys(0).numpy(), clean.values(0).numpy(), tables[1].numpy(), 7)
assert np.allclose(output.numpy(), right[0, 0], atol=1e-6)

# %% [markdown]
# :::{exercise}
# :label: ex-04-merge
# **Implement.** `merge(o1, l1, o2, l2)`: from output and lse of attention over two disjoint
# sets of keys, those over both. One set may be empty.
# :::
#
# :::{solution} ex-04-merge
# :class: dropdown
# Each output is a sum divided by its denominator $e^{\text{lse}}$. The denominators add up, so
# the parts are weighted by $e^{l_1 - l}$ and $e^{l_2 - l}$, where $l = \log(e^{l_1} +
# e^{l_2})$. An empty part has lse minus infinity, weight 0 and output 0; that is why the
# contract for empty rows is as it is. If both are empty the difference must not become NaN.
# :::

# %% tags=["hide-input"]
def merge(o1, l1, o2, l2):
    lse = torch.logaddexp(l1, l2)
    safe = lse.masked_fill(lse == -torch.inf, 0)
    return (l1 - safe).exp()[..., None] * o1 + (l2 - safe).exp()[..., None] * o2, lse


pools, cut = (store.keys(0), store.values(0)), torch.tensor([0, 1])
whole = paged_attention(query[:1], *pools, tables[:1], cut, torch.tensor([13]))
for blocks in (0, 1, 2, 3):
    first = paged_attention(query[:1], *pools, tables[:1], cut, torch.tensor([blocks * B]))
    left = torch.tensor([13 - blocks * B])
    rest = paged_attention(query[:1], *pools, tables[:1, blocks:], cut, left)
    for ours, right in zip(merge(*first, *rest), whole):
        assert torch.allclose(ours, right, atol=1e-6)

# %% [markdown]
# :::{exercise}
# :label: ex-04-online
# **Implement.** Decode attention that reads one block at a time and keeps only a running
# maximum, a running sum and an accumulator: `online(q, keys, values, row, seq_len)` for one
# head. Why is the old accumulator multiplied when the maximum rises?
# :::
#
# :::{solution} ex-04-online
# :class: dropdown
# The weights so far were taken relative to the old maximum. When it rises by $\delta$ they are
# all too large by $e^{\delta}$, so sum and accumulator are multiplied by $e^{-\delta}$. This is
# the loop of every kernel in chapter 11.
# :::

# %% tags=["hide-input"]
def online(q, keys, values, row, seq_len):
    peak, total, sums = -torch.inf, 0.0, torch.zeros(8)
    for logical in range(-(-seq_len // B)):
        count = min(B, seq_len - logical * B)
        block = int(row[logical])
        scores = keys[block, :count] @ q / 8**0.5
        new = max(peak, scores.max().item())
        shrink, weights = np.exp(peak - new), torch.exp(scores - new)
        total = total * shrink + weights.sum()
        sums = sums * shrink + weights @ values[block, :count]
        peak = new
    return sums / total


ours = online(query[8, 0], store.keys(0)[:, :, 0], store.values(0)[:, :, 0], tables[0], 13)
right, _ = paged_attention(query[8:9], *pools, tables[:1], cut, torch.tensor([13]))
assert torch.allclose(ours, right[0, 0], atol=1e-6)

# %% [markdown]
# ## Further reading
#
# - Gentle: the PagedAttention paper {cite}`kwon2023paged`, section 4, from which all of this descends.
# - The softmax in one pass: Milakov and Gimelshein {cite}`milakov2018online`, three pages; then
#   FlashAttention {cite}`dao2022flash`, which builds on it.
# - Grouped-query attention {cite}`ainslie2023gqa`.
# - Deep: FlashInfer {cite}`ye2025flashinfer`, on block tables as sparse matrices and what layouts kernels want.
