# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The decode kernel
#
# Chats A, B and C have 13, 7 and 5 tokens in the cache, and each of them wants its next one. Every
# key and value must be read once; nothing can be done about that. What does the attention of
# chapter 04 read and write?

# %% tags=["hide-input"]
import os

import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # the kernels below run in Triton's interpreter

# %%
from paged_kv.attention import load_tokens, paged_attention
from paged_kv.kv_store import KVStore
from paged_kv.sizing import KVSpec

B = 4
spec = KVSpec(num_layers=1, num_kv_heads=4, head_size=32, dtype="bf16")
store = KVStore(spec, num_blocks=8, block_size=B, device=device)
block_table = torch.tensor([[0, 2, 4, 5], [1, 3, -1, -1], [7, 6, -1, -1]], dtype=torch.int32)
seq_lens = torch.tensor([13, 7, 5], dtype=torch.int32)
gen = torch.Generator().manual_seed(0)
for row, n in zip(block_table.long(), seq_lens.tolist()):
    k, v = torch.randn(2, n, 4, 32, generator=gen).to(device)
    slots = row[torch.arange(n) // B] * B + torch.arange(n) % B
    store.write(0, k, v, slots.to(device))
keys, values = store.keys(0), store.values(0)
block_table, seq_lens = block_table.to(device), seq_lens.to(device)

rows = torch.arange(3, device=device)[:, None]
positions = torch.arange(13, device=device).minimum(seq_lens[:, None] - 1)
copies = load_tokens(keys, values, block_table, rows, positions)  # what chapter 04 makes
needed = int(seq_lens.sum()) * spec.bytes_per_token
made = sum(copy.nbytes for copy in copies)  # in float32
moved = made // 2 + made // 2 + made // 2 + made + made  # read, gather, read, widen, multiply
print(f"must be read {needed / 1024:.2f} KiB")
print(f"read and written {moved / 1024:.2f} KiB, {moved / needed:.1f} times as much")

# %% tags=["hide-input"]
import json
from pathlib import Path

result = json.loads(Path("../benchmarks/results/decode_attention.json").read_text())
cases = {row["case"]: row for row in result["rows"]}
waits, reads = result["torch_us"]["64x4096"] / 1e3, cases["64x4096"]["read_us"] / 1e3
print("measured:", result["device"], "torch", result["versions"]["torch"],
      "Triton", result["versions"]["triton"])
print(f"measured: 64 chats of 4,096 tokens, one layer: chapter 04 {waits:.1f} ms, "
      f"a plain read of the bytes {reads:.2f} ms, {waits / reads:.0f} times less")

# %% [markdown]
# It moves 10.9 times the bytes: it gathers them into a copy, widens the copy, and pads three chats
# to the length of the longest. On an H200 (last line) it takes hundreds of times as long as reading
# the bytes would, since it also waits for the host at every turn.
#
# **The question.** How close to the time of one plain read can decode attention come, when its
# bytes lie in scattered blocks?
#
# :::{card} This chapter
# - **You need** [chapter 04](04_paged_attention) with its exercise on merging, and the shape of
#   a GPU: some hundred processors, each with a little fast memory, in front of one large slow one.
# - **Exports** `triton_device`, `kernels_cache` (`write_kv`, `copy_kv_blocks`), `decode_plan`
#   (`DecodePlan`, `pick_tiles`), `kernels` (`decode_attention`), and the kernels themselves in
#   `decode_shares`, `decode_tiles`, `decode_parts`, `decode_kernels`.
# - **Device** any CUDA GPU; without one every cell runs in Triton's interpreter and prints the
#   same. The measurements are an H200's, made by `benchmarks/decode_attention.py`.
# - **Run time** half a minute.
# - **You are here** 00 tour · 01 sizing · 02 contiguous pool · 03 block manager · 04 paged
#   attention · 05 guest model · 06 copy-on-write · 07 sampling · 08 prefix cache · 09 scheduling ·
#   10 preemption · **11 decode kernel** · 12 prefill kernel · 13 engine · 14 full speed
# :::

# %% [markdown]
# ## The floor
#
# A decode step does little with much. For each cached token a KV head brings $2d$ numbers, and each
# of the query heads that share it does $2d$ operations with the key and $2d$ with the value. With
# $g$ query heads to a KV head and two bytes a number that is $4dg$ operations for $4d$ bytes.

# %%
peak_flops, peak_bytes = 989e12, 4.8e12  # an H200's data sheet: dense bf16, memory
for name, group in (("no grouping", 1), ("Llama 3 8B", 4), ("Llama 3 70B", 8), ("71 to 1", 71)):
    share = 100 * group * peak_bytes / peak_flops
    print(f"{name:11} {group:2} FLOP/B, {share:4.1f} % of the arithmetic")
print(f"balance: {peak_flops / peak_bytes:.0f} FLOP/B")

# %% tags=["hide-input"]
import matplotlib.pyplot as plt
import numpy as np

from paged_kv.draw import book_style

book_style()
row = cases["64x4096"]
x = np.logspace(-1, 3.5, 100)
fig, ax = plt.subplots(figsize=(7, 3.6))
ax.loglog(x, np.minimum(x * row["read_tb_s"], 989), label="roof: plain read, matrix units")
for rung, us in {**row["rungs_us"], "final": row["ours_us"]}.items():
    if rung[0] in "1234f" or rung == "6 even shares":
        ax.plot([4], [4 * row["bytes"] / us / 1e6], "o", label=rung)
ax.axvline(206, color="black", linewidth=0.8)
ax.set(xlabel="operations a byte", ylabel="TFLOP/s", ylim=(0.3, 2000))
ax.legend(fontsize=8)
plt.show()

# %% [markdown]
# *Figure: a roofline of the H200 for 64 chats of 4,096 tokens: six kernels of this chapter, all at 4 operations a
# byte, far left of the balance at 206, and ever nearer to the sloping roof but for the fourth.*
#
# The card balances at 206 FLOP/B and we offer 4 FLOP/B. Even 71 query heads to one KV head would not
# make arithmetic the limit. So the floor is the time of a plain read, and we measure that too: a
# kernel that sums the same number of bytes, in the same harness. Every time below is to be
# compared with it.
#
# :::{admonition} Predict
# :class: tip
# Two models have the same KV cache; one has 32 query heads and the other 64. How much longer does
# the second take for a decode step's attention?
# :::
#
# :::{dropdown} Reasoning
# The bytes are the same, and the arithmetic is hidden behind them as long as it keeps up. So: hardly
# any longer, if the kernel reads each key once for all heads of its group. The two rows are printed below.
# :::

# %% tags=["hide-input"]
for case in ("64x4096", "64x4096 64/8"):
    row = cases[case]
    print(f"measured: {row['q_heads']} query heads {row['ours_us']:.1f} us, "
          f"plain read {row['read_us']:.1f} us")

# %% [markdown]
# ## A first kernel
#
# A Triton kernel {cite}`tillet2019triton` is a Python function that a compiler turns into machine
# code. It is launched as a grid of *programs*, each knowing only its number. A program works on small
# arrays, *tiles*, whose sizes are fixed when it is compiled (`tl.constexpr`) and powers of two. It
# loads them from addresses that it computes, with a mask that says which elements really exist.
# The compiler deals the elements out to threads.
#
# Where there is no GPU, Triton can interpret the same functions in NumPy. That proves the
# program, not the compiler: one version of this chapter's kernel was right in the interpreter and, on the card,
# read beyond its shared memory. So the same tests run in both places.

# %% tags=["export:triton_device", "hide-input"]
"""Where Triton kernels run: on a CUDA device, or in Triton's interpreter on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

try:
    import triton as found
    import triton.language as found_language
except ImportError:  # the package works without it, on the CPU
    found = found_language = None

triton: Any = found
tl: Any = found_language
LOG2E: Any = tl and tl.constexpr(1.4426950408889634)


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`triton.jit`, which compiles at the first launch; the plain function without Triton."""
    if function is None:
        return lambda inner: jit(inner, **options)
    return function if triton is None else triton.jit(function, **options)


@jit
def probe_kernel() -> None:
    """Does nothing: what `jit` made of it says whether kernels are compiled or interpreted."""

# %% tags=["export:triton_device", "hide-input"]
def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter: TRITON_INTERPRET was 1 as they were made."""
    return triton is not None and not isinstance(probe_kernel, triton.JITFunction)


def runs_kernels(device: torch.device) -> bool:
    """Whether tensors on this device can be given to the kernels."""
    return triton is not None and (device.type == "cuda" or interpreted())


@dataclass(frozen=True)
class Limits:
    """What a device offers: its multiprocessors, and bytes of shared memory for one program."""

    processors: int
    shared_memory: int


def limits_of(device: torch.device) -> Limits:
    """The limits of a CUDA device; small ones for the interpreter, where each program costs."""
    if device.type != "cuda":
        return Limits(processors=2, shared_memory=65536)
    card = torch.cuda.get_device_properties(device)
    shared = card.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return Limits(card.multi_processor_count, shared)


def next_pow2(n: int) -> int:
    """The smallest power of two that is n or more: the sizes that a tile can have."""
    return 1 << max(0, n - 1).bit_length()

# %% [markdown]
# The first kernel writes keys and values into their slots. A program takes two tokens, with all heads that fit a tile.
# The block and the offset come from the slot, the address from the strides of the pool. A slot of
# -1 must write nothing: it becomes part of the mask. Slots are 64-bit, and so is every product
# with a block id, since a pool passes $2^{31}$ numbers sooner than one thinks (chapter 04).

# %% tags=["export:kernels_cache"]
"""Writing tokens into their slots and copying blocks, one launch for a whole batch."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


@jit(do_not_specialize=["num_tokens"])
def write_kernel(
    k, v, slots, keys, values, num_tokens, k_row, k_row_head, v_row, v_row_head,
    k_block, k_token, k_head, v_block, v_token, v_head,
    HEAD_SIZE: tl.constexpr, WIDTH: tl.constexpr, PIECE: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """TOKENS tokens a program, PIECE numbers of each; a negative slot writes nothing."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    number = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    slot = tl.load(slots + token, mask=token < num_tokens, other=-1).to(tl.int64)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    head, d = number // HEAD_SIZE, number % HEAD_SIZE
    ok = (slot >= 0)[:, None] & (number < WIDTH)[None, :]
    row = token.to(tl.int64)
    key = tl.load(k + (row * k_row)[:, None] + (head * k_row_head + d)[None, :], mask=ok)
    value = tl.load(v + (row * v_row)[:, None] + (head * v_row_head + d)[None, :], mask=ok)
    to_key = (block * k_block + offset * k_token)[:, None] + (head * k_head + d)[None, :]
    to_value = (block * v_block + offset * v_token)[:, None] + (head * v_head + d)[None, :]
    tl.store(keys + to_key, key.to(keys.dtype.element_ty), mask=ok)
    tl.store(values + to_value, value.to(values.dtype.element_ty), mask=ok)

# %% tags=["export:kernels_cache", "hide-input"]
def is_index(*tensors: Tensor | None) -> bool:
    """Whether all are contiguous integers, as kernels read them; None is left out."""
    given = [t for t in tensors if t is not None]
    return all(t.dtype in (torch.int32, torch.int64) and t.is_contiguous() for t in given)


def write_kv(k: Tensor, v: Tensor, slot_mapping: Tensor, keys: Tensor, values: Tensor) -> None:
    """Store one key and one value a token, in one launch.

    Args: k, v [num_tokens, num_kv_heads, head_size], the last dimension contiguous;
    slot_mapping int64 [num_tokens], -1 where a token is to be skipped, the others all
    different; keys, values [num_blocks, block_size, num_kv_heads, head_size], other strides free.
    Changes the named slots and nothing else.  On a GPU it neither waits nor allocates.
    Raises: ValueError where the shapes or strides do not fit.
    """
    same = k.shape == v.shape and keys.shape == values.shape and k.shape[1:] == keys.shape[2:]
    if not same or slot_mapping.shape != k.shape[:1]:
        shapes = [tuple(t.shape) for t in (k, v, slot_mapping, keys, values)]
        raise ValueError(f"k, v, slot_mapping, keys, values: {shapes} do not fit each other")
    if not is_index(slot_mapping):
        raise ValueError("slot_mapping: contiguous integers are needed")
    if any(t.stride(-1) != 1 for t in (k, v, keys, values)):
        raise ValueError("k, v, keys, values: the numbers of a head are not contiguous")
    block_size, (heads, size) = keys.shape[1], k.shape[1:]
    if not runs_kernels(keys.device):
        real = slot_mapping >= 0
        at = slot_mapping[real]
        for data, pool in ((k, keys), (v, values)):
            pool[at // block_size, at % block_size] = data[real].to(pool.dtype)
    elif len(k):
        width, tokens = heads * size, 2
        piece = min(next_pow2(width), 2048)
        write_kernel[(triton.cdiv(len(k), tokens), triton.cdiv(width, piece))](
            k, v, slot_mapping, keys, values, len(k), *k.stride()[:2], *v.stride()[:2],
            *keys.stride()[:3], *values.stride()[:3], HEAD_SIZE=size, WIDTH=width, PIECE=piece,
            TOKENS=tokens, BLOCK_SIZE=block_size)

# %%
pool = torch.full((5, 2, 16, 2, 8), 7.0, device=device)
k, v = torch.randn(2, 128, 2, 8, generator=gen).to(device)
slots = torch.cat([torch.randperm(79, generator=gen)[:64], torch.full((64,), -1)]).to(device)
write_kv(k, v, slots, pool[:, 0], pool[:, 1])
at = slots[:64]
print("written:", torch.equal(pool[at // 16, 0, at % 16], k[:64]),
      " slot 79 holds", pool[4, 1, 15, 0, 0].item())
print("slots changed:", int((pool[:, 0] != 7).all(-1).all(-1).sum()))

# %% [markdown]
# Copy-on-write needs whole blocks copied, in every layer, and chapter 04 does it with two calls a
# layer. A launch costs microseconds, so for 32 layers the launches cost more than the bytes. But a
# kernel can walk the list of tensors itself, if it gets their addresses. A program copies one
# *slice* of a block of one layer.
#
# In which order? A list of copies may use a block both as destination and as source. If each slice
# goes through all pairs in turn, within one program, then every byte sees the copies in the order
# given, and any list is right. If the list has no such pair, the pairs may be dealt out over more
# programs (*lanes*) and run at once.

# %% tags=["export:kernels_cache"]
@jit(do_not_specialize=["num_pairs", "lanes"])
def copy_kernel(addresses, pairs, num_pairs, lanes, words, SLICE: tl.constexpr):
    """One slice of every block of one tensor, the pairs of one lane in the order given."""
    at = tl.program_id(0) * SLICE + tl.arange(0, SLICE)
    ok = at < words
    base = tl.load(addresses + tl.program_id(1)).to(tl.pointer_type(tl.int64))
    base = tl.multiple_of(base, 16)
    for i in tl.range(tl.program_id(2), num_pairs, lanes, num_stages=1):
        source = tl.load(pairs + 2 * i).to(tl.int64)
        target = tl.load(pairs + 2 * i + 1).to(tl.int64)
        if (source >= 0) & (target >= 0):
            data = tl.load(base + source * words + at, mask=ok)
            tl.store(base + target * words + at, data, mask=ok)

# %% tags=["export:kernels_cache", "hide-input"]
def tensor_addresses(tensors: Sequence[Tensor]) -> Tensor:
    """Where each tensor begins: int64 on their device, made once for a store."""
    return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64).to(tensors[0].device)


def copy_kv_blocks(
    tensors: Sequence[Tensor], pairs: Tensor, *, ordered: bool, addresses: Tensor | None = None
) -> None:
    """Copy whole blocks, (source, destination), in every tensor, all in one launch.

    Args: tensors, the list of a KVStore: blocks first, alike and contiguous; pairs, integers
    [n, 2] on their device, -1 to skip; ordered: the result is that of one copy after another;
    otherwise no block may be in two pairs, unless as source only; addresses, of
    `tensor_addresses`: given, nothing is allocated.  Changes the destinations only.
    Raises: ValueError where the tensors are not alike, or a block is no multiple of 8 bytes.
    """
    alike = {(t.shape, t.dtype) for t in tensors}
    if len(alike) != 1 or not all(t.is_contiguous() for t in tensors):
        raise ValueError("tensors: contiguous ones of one shape and type are needed")
    if addresses is not None and (len(addresses), addresses.dtype) != (len(tensors), torch.int64):
        raise ValueError("addresses: those of other tensors")
    if tensors[0][:1].nbytes % 8 or any(t.data_ptr() % 16 for t in tensors):
        raise ValueError("tensors: aligned ones, with blocks of whole 8-byte words, are needed")
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        raise ValueError(f"pairs: {tuple(pairs.shape)}, not (source, destination) in each row")
    if not runs_kernels(tensors[0].device):
        for source, target in pairs[(pairs >= 0).all(1)].tolist():
            for tensor in tensors:
                tensor[target] = tensor[source]
    elif len(pairs):
        addresses = tensor_addresses(tensors) if addresses is None else addresses
        words = tensors[0][0].nbytes // 8
        piece = min(512, next_pow2(words))
        lanes = 1 if ordered else min(len(pairs), 65535)
        copy_kernel[(triton.cdiv(words, piece), len(tensors), lanes)](
            addresses, pairs.contiguous(), len(pairs), lanes, words, SLICE=piece)

# %%
layers = [torch.arange(6.0, device=device).view(6, 1, 1).repeat(1, 4, 8) for _ in range(3)]
pairs = torch.tensor([[0, 1], [1, 2], [4, 5], [-1, -1], [3, 4], [5, 3]], device=device)
copy_kv_blocks(layers, pairs, ordered=True)
print([int(t) for t in layers[2][:, 0, 0]])

# %% tags=["hide-input"]
for row in result["moves"]:
    rate = {name: row["bytes"] / us / 1e6 for name, us in row["us"].items()}
    print(f"measured: {row['case']}")
    for name, us in row["us"].items():
        print(f"measured:   {name:26} {us:7.1f} us {rate[name]:5.2f} TB/s")

# %% [markdown]
# Above some hundred MB both kernels run at the pace of a device copy or above it; below, what is
# left is a launch. One block in all layers takes about what a device copy of its bytes takes; with a call a
# layer, some thirty times as long. Copying many in order is somewhat slower than at once, and always right.
#
# ## One program a head
#
# Now attention. **Rung 1** gives each query head of each chat a program, which walks the chat block
# by block with the online softmax of chapter 04's last exercise: a running maximum `peak`, a running
# sum `total`, an accumulator `acc`. *Hypothesis:* right, and four times the floor, since each KV
# head is read by the four query heads that share it.

# %% tags=["ladder"]
@jit
def naive_one_head(query, keys, values, table, seq_lens, output, scale, k_block, k_token, k_head,
                   table_stride, num_q_heads, D: tl.constexpr, GROUP: tl.constexpr,
                   BLOCK_SIZE: tl.constexpr):
    """One program a sequence and query head; one block a step; sums in plain arithmetic."""
    seq, head = tl.program_id(0), tl.program_id(1)
    d, t = tl.arange(0, D), tl.arange(0, BLOCK_SIZE)
    q = tl.load(query + (seq * num_q_heads + head) * D + d).to(tl.float32) * (scale * LOG2E)
    length = tl.load(seq_lens + seq)
    peak, total, acc = float("-inf"), 0.0, tl.zeros([D], tl.float32)
    for i in range(0, tl.cdiv(length, BLOCK_SIZE)):
        block = tl.load(table + seq * table_stride + i).to(tl.int64)
        there = i * BLOCK_SIZE + t < length
        at = block * k_block + (t * k_token)[:, None] + head // GROUP * k_head + d[None, :]
        k = tl.load(keys + at, mask=there[:, None], other=0.0).to(tl.float32)
        s = tl.where(there, tl.sum(k * q[None, :], 1), float("-inf"))
        new = tl.maximum(peak, tl.max(s, 0))
        weight, fade = tl.exp2(s - new), tl.exp2(peak - new)
        v = tl.load(values + at, mask=there[:, None], other=0.0).to(tl.float32)
        total = total * fade + tl.sum(weight, 0)
        acc = acc * fade + tl.sum(v * weight[:, None], 0)
        peak = new
    tl.store(output + (seq * num_q_heads + head) * D + d, acc / total)

# %% [markdown]
# Scores are taken in base 2 (`exp2` is what the hardware has), with $\log_2 e$ folded into the scale.
# The mask `there` guards the loads: an empty slot is never read, so a NaN in it harms nobody.
#
# **Rung 2** fixes what the hypothesis names. A program takes a *KV head* and all query heads of its
# group, stacked as the rows of a matrix product, so each key is loaded once. *Hypothesis:* at
# the floor? A program waits for its block's id, then for its keys and values, then
# computes, with nothing in flight meanwhile. So no. **Rung 3** reads four blocks a step (a
# *gather* of 64 tokens, each with its own block id): four times as much in flight. **Rung 4** lets the
# compiler pipeline the loop: three tiles in flight in shared memory, loaded while an earlier one is
# computed. All three are one function with different numbers.

# %% tags=["ladder"]
@jit
def naive_step(q, keys, values, block, there, token, kv_head, d, peak, total, acc, scale,
               k_block, k_token, k_head, BLOCK_SIZE: tl.constexpr, UPCAST: tl.constexpr):
    """Fold one tile of tokens into the running maximum, sum and accumulator."""
    offset = token % BLOCK_SIZE * k_token + kv_head * k_head
    at = (block.to(tl.int64) * k_block + offset)[:, None] + d[None, :]
    k = tl.load(keys + at, mask=there[:, None], other=0.0)
    v = tl.load(values + at, mask=there[:, None], other=0.0)
    dtype = v.dtype
    if UPCAST:  # the interpreter multiplies no bf16
        k, v = k.to(tl.float32), v.to(tl.float32)
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2E)
    s = tl.where(there[None, :], s, float("-inf"))
    new = tl.maximum(peak, tl.max(s, 1))
    weight, fade = tl.exp2(s - new[:, None]), tl.exp2(peak - new)
    total = total * fade + tl.sum(weight, 1)
    acc = tl.dot(weight.to(dtype).to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return new, total, acc

# %% tags=["ladder"]
@jit
def naive_group(query, keys, values, table, seq_lens, output, part, part_lse, scale, k_block,
                k_token, k_head, table_stride, num_q_heads, D: tl.constexpr, GROUP: tl.constexpr,
                BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
                SPLITS: tl.constexpr, UPCAST: tl.constexpr):
    """One program a sequence, KV head and split: a group of query heads shares every load."""
    seq, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n, d, t = tl.arange(0, 16), tl.arange(0, D), tl.arange(0, TILE)
    q_head, n_ok = kv_head * GROUP + n, (n < GROUP)[:, None]
    at = ((seq * num_q_heads + q_head) * D)[:, None] + d[None, :]
    q = tl.load(query + at, mask=n_ok, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    length = tl.load(seq_lens + seq)
    per = tl.cdiv(tl.cdiv(length, TILE), SPLITS)
    first, last = split * per, tl.minimum((split + 1) * per, tl.cdiv(length, TILE))
    peak, total = tl.full([16], float("-inf"), tl.float32), tl.zeros([16], tl.float32)
    acc = tl.zeros([16, D], tl.float32)
    entries = table + seq * table_stride
    token = first * TILE + t
    ahead = tl.load(entries + token // BLOCK_SIZE, mask=token < length, other=0)
    for i in tl.range(first, last, num_stages=STAGES):
        token, block = i * TILE + t, ahead  # the next ids are asked for before this tile's bytes
        ahead = tl.load(entries + (token + TILE) // BLOCK_SIZE, mask=token + TILE < length, other=0)
        peak, total, acc = naive_step(q, keys, values, block, token < length, token, kv_head, d,
                                      peak, total, acc, scale, k_block, k_token, k_head,
                                      BLOCK_SIZE, UPCAST)
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    if SPLITS == 1:
        tl.store(output + at, acc.to(output.dtype.element_ty), mask=n_ok)
    else:
        slot = (seq * SPLITS + split) * num_q_heads + q_head
        tl.store(part + (slot * D)[:, None] + d[None, :], acc, mask=n_ok)
        lse = peak + tl.log2(tl.where(total > 0, total, 1.0))
        tl.store(part_lse + slot, lse, mask=n < GROUP)

# %% [markdown]
# Two details carry over to the final kernel. The ids of the next tile are loaded one step ahead,
# for otherwise each tile would wait twice, first for the id and then for the bytes. And where a group
# has 4 heads the matrix product still has 16 rows, the least of that instruction: three quarters of
# the arithmetic is thrown away, and at 4 operations a byte nobody misses it.
#
# **Rung 5** answers a case that none of these can serve: one long chat. Eight KV heads are eight
# programs, on a card with 132 processors. So a chat is *split*, each program takes a share of its
# tokens and writes a partial output with its log-sum-exp, and a second launch joins them by the rule
# of chapter 04's exercise ("flash decoding" {cite}`dao2023flashdecoding`).

# %% tags=["ladder"]
@jit
def naive_join(part, part_lse, output, num_q_heads, D: tl.constexpr, SPLITS: tl.constexpr):
    """One program a sequence and query head joins the splits."""
    seq, head = tl.program_id(0), tl.program_id(1)
    c, d = tl.arange(0, SPLITS), tl.arange(0, D)
    slot = (seq * SPLITS + c) * num_q_heads + head
    x = tl.load(part_lse + slot)
    o = tl.load(part + (slot * D)[:, None] + d[None, :])
    weight = tl.exp2(x - tl.max(x, 0))
    out = tl.sum(o * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(output + (seq * num_q_heads + head) * D + d, out.to(output.dtype.element_ty))

# %% tags=["ladder"]
def run_one_head(query, keys, values, table, seq_lens):
    """Rung 1 on a batch, one new token a sequence; returns the output."""
    (batch, heads, size), output = query.shape, torch.empty_like(query)
    naive_one_head[(batch, heads)](
        query, keys, values, table, seq_lens, output, size**-0.5, *keys.stride()[:3],
        table.stride(0), heads, D=size, GROUP=heads // keys.shape[2], BLOCK_SIZE=keys.shape[1])
    return output


def run_group(query, keys, values, table, seq_lens, tile=16, stages=1, splits=1, warps=4):
    """Rungs 2 to 5 on a batch; returns the output."""
    (batch, heads, size), output = query.shape, torch.empty_like(query)
    part = torch.empty(batch, splits, heads, size, device=query.device)
    part_lse = torch.empty(batch, splits, heads, device=query.device)
    naive_group[(batch, keys.shape[2], splits)](
        query, keys, values, table, seq_lens, output, part, part_lse, size**-0.5,
        *keys.stride()[:3], table.stride(0), heads, D=size, GROUP=heads // keys.shape[2],
        BLOCK_SIZE=keys.shape[1], TILE=tile, STAGES=stages, SPLITS=splits,
        UPCAST=interpreted(), num_warps=warps)
    if splits > 1:
        naive_join[(batch, heads)](part, part_lse, output, heads, D=size, SPLITS=splits)
    return output

# %%
def cu(count):
    return torch.arange(count + 1, dtype=torch.int32, device=device)


query = torch.randn(3, 8, 32, generator=gen).to(device).bfloat16()
right, _ = paged_attention(query, keys, values, block_table, cu(3), seq_lens)
batch = (query, keys, values, block_table, seq_lens)
ways = {"1 one head": lambda: run_one_head(*batch), "2 group": lambda: run_group(*batch),
        "4 pipelined": lambda: run_group(*batch, stages=3),
        "5 split": lambda: run_group(*batch, splits=4)}
for name, way in ways.items():
    error = (way().float() - right.float()).norm() / right.float().norm()
    print(f"{name:12} agrees with chapter 04: {bool(error < 1e-2)}")

# %% [markdown]
# :::{admonition} Predict
# :class: tip
# 64 chats of 4,096 tokens already give 512 programs. Is splitting each chat in 64 better than in 4, worse, or
# all the same?
# :::
#
# :::{dropdown} Reasoning
# Worse. The bytes are the same, but a program now has a single tile to read: nothing is left to
# pipeline, and each part is written, read again and joined. For one chat of 131,072 tokens the same 64 splits are what
# fills the card. The best number of splits depends on the batch, so a fixed number is wrong
# somewhere.
# :::

# %% tags=["hide-input"]
rungs = ("1 one head", "2 group", "3 wide gather", "4 pipelined", "5 split in 4", "5 split in 64")
shown = ("64x4096", "8x32768", "1x131072", "256 ragged", "16x512")
print(f"measured: {'times the plain read':20}", *(f"{case:>11}" for case in shown))
for rung in rungs:
    line = ""
    for case in shown:
        us = cases[case]["rungs_us"].get(rung)
        line += f"{us / cases[case]['read_us']:12.1f}" if us else " " * 12
    print(f"measured: {rung:20}{line}")

# %% [markdown]
# Rung 1 misses its prediction by far: twelve floors and not four. Plain arithmetic, one block at a time, keeps
# the processors busy with sums, and latency does the rest. Rung 2 wins most of it back. Rung 3 wins
# again, everywhere. Rung 4 wins where there are few programs (8 long chats, one chat) and
# *loses* at 64 chats: three tiles of shared memory a program leave room for fewer programs on a
# processor, and there the programs had been hiding each other's latency. Rung 5 wins by an order of
# magnitude on one chat. But the number of splits that is right for one batch is wrong for the next, and the
# ragged batch, of 43 to 12,696 tokens a chat, stays nearly a third above the floor at best.

# %% [markdown]
# ## Even shares
#
# What to divide, then, is not the chats but the work. Cut every chat into tiles, number the
# tiles of the whole batch, chat after chat, and give every program an equal run of numbers. A
# run may begin in the middle of one chat and end in the middle of another. However ragged the batch,
# no program has more than one tile more than another, and the number of programs is chosen for the card, not for the
# batch.
#
# The state is small, and a kernel makes it once a step, on the device, for all layers:
#
# | name | shape | what it says |
# |---|---|---|
# | `cum` | `[batch + 3]` | tiles before each chat, and in all; programs at work; empty chats |
# | `record` | `[programs, 8]` | a program's first tile and the one behind its last; its first chat, that chat's tiles and length, its row of the table and the next one |
#
# No host sees the lengths, so nothing waits, and a captured graph replays with other lengths. The invariant: every
# tile belongs to exactly one program. Finding the chat of a tile is a comparison with all of `cum` at
# once, which a vector machine does sooner than a binary search.

# %% tags=["export:decode_shares"]
"""Who reads what: the tiles of a batch divided among the programs of a decode launch.

A tile is some tokens of one sequence.  All tiles of a batch, sequence after sequence, have
numbers; a program reads a run of them, which may begin and end inside a sequence.
"""

# mypy: ignore-errors
from __future__ import annotations


@jit
def split_tiles(tiles, SPLITS: tl.constexpr, LEAST: tl.constexpr):
    """Tiles in one part of a sequence that is cut by its own length alone."""
    return tl.maximum((tiles + SPLITS - 1) // SPLITS, LEAST)


@jit
def locate(upto, item, batch):
    """Which sequence each item is in, as an index and as a mask [items, sequences]."""
    s = tl.arange(0, upto.shape[0])[None, :]
    before = (upto[None, :] <= item[:, None]) & (s < batch)
    seq = tl.minimum(tl.sum(before.to(tl.int32), 1), batch - 1)
    return seq, s == seq[:, None]


@jit
def chosen(here, values):
    """The value of the chosen sequence, for each item."""
    return tl.sum(tl.where(here, values[None, :], 0), 1)

# %% tags=["export:decode_shares", "hide-input"]
@jit
def active_programs(tiles, total, programs, EVEN: tl.constexpr):
    """How many programs get a share: fewer, where sequences of one length then stay whole."""
    active = programs
    if EVEN:
        some = tl.maximum(tl.sum((tiles > 0).to(tl.int32), 0), 1)
        longest = tl.maximum(tl.max(tiles, 0), 1)
        alike = total == some * longest
        each = (some + programs - 1) // programs
        if alike & (some <= programs):  # some whole number of programs a sequence
            active = tl.minimum(programs // some, longest) * some
        elif alike & (some % each == 0):  # some whole number of sequences a program
            active = some // each
    return tl.maximum(tl.minimum(active, total), 1)

# %% tags=["export:decode_shares", "hide-input"]
@jit
def first_tile(item, upto, tiles_upto, tiles, items, per, batch):
    """The number of the tile at which an item begins; the total, behind the last."""
    _, here = locate(upto, item, batch)
    inside = (item - chosen(here, upto - items)) * chosen(here, per)
    return chosen(here, tiles_upto - tiles) + tl.minimum(inside, chosen(here, tiles))

# %% tags=["export:decode_shares"]
@jit(do_not_specialize=["batch", "window", "programs"])
def plan_kernel(
    seq_lens, rows, cum, record, batch, window, programs, TOKENS: tl.constexpr,
    BATCH: tl.constexpr, CHUNK: tl.constexpr, HAS_ROWS: tl.constexpr, WINDOW: tl.constexpr,
    EVEN: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr,
):
    """Divide all tiles evenly among the programs; every instance writes CHUNK records."""
    s = tl.arange(0, BATCH)
    length = tl.maximum(tl.load(seq_lens + s, mask=s < batch, other=0), 0)
    tiles = (length + TOKENS - 1) // TOKENS
    if WINDOW:
        tiles -= tl.maximum(length - window, 0) // TOKENS
    per = tl.full([BATCH], 1, tl.int32)
    if SPLITS:  # parts are handed out, not tiles
        per = split_tiles(tiles, SPLITS, LEAST)
    items = (tiles + per - 1) // per
    upto, tiles_upto, total = tl.cumsum(items, 0), tl.cumsum(tiles, 0), tl.sum(items, 0)
    active = active_programs(tiles, total, programs, EVEN)
    if tl.program_id(0) == 0:
        tl.store(cum, 0)
        tl.store(cum + 1 + s, tiles_upto, mask=s < batch)
        tl.store(cum + batch + 1, active)
        tl.store(cum + batch + 2, tl.sum(((length == 0) & (s < batch)).to(tl.int32), 0))
    p = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    live, ok, to = p < active, p < programs, record + p * 8
    begin_item = tl.where(live, p.to(tl.int64) * total // active, 0).to(tl.int32)
    end_item = tl.where(live, (p + 1).to(tl.int64) * total // active, 0).to(tl.int32)
    begin, end = begin_item, end_item
    seq, here = locate(upto, begin_item, batch)
    if SPLITS:
        begin = first_tile(begin_item, upto, tiles_upto, tiles, items, per, batch)
        end = first_tile(end_item, upto, tiles_upto, tiles, items, per, batch)
    write_record(to, ok, begin, tl.where(live, end, begin), seq, chosen(here, tiles_upto - tiles),
                 chosen(here, tiles_upto), chosen(here, length), rows, batch, HAS_ROWS)

# %% tags=["export:decode_shares", "hide-input"]
@jit
def write_record(to, ok, begin, end, seq, seq_begin, seq_end, length, rows, batch,
                 HAS_ROWS: tl.constexpr):
    """The eight integers of each program."""
    row, next_row = seq, tl.minimum(seq + 1, batch - 1)
    if HAS_ROWS:
        row = tl.load(rows + row, mask=ok, other=0).to(tl.int32)
        next_row = tl.load(rows + next_row, mask=ok, other=0).to(tl.int32)
    tl.store(to, begin, mask=ok)
    tl.store(to + 1, end, mask=ok)
    tl.store(to + 2, seq, mask=ok)
    tl.store(to + 3, seq_begin, mask=ok)
    tl.store(to + 4, seq_end, mask=ok)
    tl.store(to + 5, length, mask=ok)
    tl.store(to + 6, row, mask=ok)
    tl.store(to + 7, next_row, mask=ok)

# %% [markdown]
# (`SPLITS` is a mode that the last section needs.) `Tiles` holds what the compiler must know, and
# `DecodePlan` the buffers. It is made once for a batch size; `update` launches the kernel above.

# %% tags=["export:decode_plan"]
"""The plan of a decode step: tiles that suit the device, and each program's share of the work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

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

# %% tags=["export:decode_plan"]
def pick_tiles(
    batch: int, num_q_heads: int, num_kv_heads: int, head_size: int, itemsize: int, limits: Limits,
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

# %% tags=["export:decode_plan", "hide-input"]
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

# %% tags=["export:decode_plan"]
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
        self, batch: int, num_q_heads: int, num_kv_heads: int, head_size: int,
        device: torch.device | str, *, dtype: torch.dtype = torch.bfloat16,
        window: int | None = None, tiles: Tiles | None = None, batch_invariant: bool = False,
    ) -> None:
        self.device = torch.empty(0, device=device).device
        self.batch, self.window, self.splits = batch, window, MAX_PARTS if batch_invariant else 0
        self.shape, self.dtype = (num_q_heads, num_kv_heads, head_size), dtype
        self.tiles = tiles or pick_tiles(
            batch, *self.shape, dtype.itemsize, limits_of(self.device), batch_invariant)
        self.least = max(1, LEAST_TOKENS // self.tiles.tokens)
        slots = batch * MAX_PARTS if batch_invariant else 2 * self.tiles.programs
        zeros = partial(torch.zeros, dtype=torch.int32, device=self.device)
        self.cum = zeros(batch + 3)
        self.record = zeros(self.tiles.programs, RECORD)
        self.arrived = zeros(batch, num_kv_heads // self.tiles.heads)
        self.part = torch.empty(slots, num_q_heads, head_size, device=self.device)
        self.part_lse = torch.empty(slots, num_q_heads, device=self.device)

# %% tags=["export:decode_plan", "hide-input"]
class DecodePlan(DecodePlan):  # type: ignore
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
                seq_lens, rows, self.cum, self.record, self.batch, self.window or 0,
                self.tiles.programs, TOKENS=self.tiles.tokens, BATCH=size, CHUNK=chunk,
                HAS_ROWS=rows is not None, WINDOW=self.window is not None, EVEN=self.tiles.even,
                SPLITS=self.splits, LEAST=self.least)

# %% [markdown]
# Chats A, B and C in tiles of 4 tokens have 4, 2 and 2 of them: 8 tiles, numbered 0 to 7. Three
# programs get $\lfloor 8p/3 \rfloor$ onward: 0 to 1, 2 to 4, 5 to 7. So A is cut, and B too.

# %%
tiny = Tiles(rows=16, heads=4, warps=4, stages=2, programs=3)  # 4 tokens of 4 KV heads
plan = DecodePlan(3, 8, 4, 32, device, tiles=tiny)
plan.update(seq_lens)
owner = "AAAABBCC"
for p, (begin, end, seq, first, behind, length, *_) in enumerate(plan.record.tolist()):
    print(f"program {p}: tiles {begin} to {end - 1}", *owner[begin:end],
          f"  starts in {'ABC'[seq]}, tiles {first} to {behind - 1}, {length} tokens")
assert plan.record[:, :6].tolist() == [[0, 2, 0, 0, 4, 13], [2, 5, 0, 0, 4, 13], [5, 8, 1, 4, 6, 7]]
assert plan.cum.tolist() == [0, 4, 6, 8, 3, 0]

# %% [markdown]
# **Turn the knob.** Set `programs=8` and expect one tile each; set it to 100 and expect 8 programs
# at work, the fifth number of `cum`.
#
# ## The final kernel
#
# Two things differ from the rungs in the steps of a tile.
#
# The product is turned round: keys times queries, $K Q^\top$, and not queries times keys. Hopper's own
# matrix instruction has 64 rows at least and as few as 8 columns. The cache has rows to fill it; a
# group of queries has four. Half as many matrix instructions are issued for the same tile (the counters below).
#
# And a tile can hold several neighbouring KV heads of the same tokens, since they lie side by side in
# the pool. A query head must then attend to the rows of its own KV head only; `own` masks the rest.

# %% tags=["export:decode_tiles"]
"""The steps of the decode kernel: tiles of keys and values folded into running sums."""

# mypy: ignore-errors
from __future__ import annotations


@jit
def soft_cap(score, cap):
    """cap * tanh(score / cap), from exp2 alone."""
    e = tl.exp2(tl.abs(score) * (2.0 * LOG2E / cap))
    t = cap * (1.0 - 2.0 / (e + 1.0))
    return tl.where(score < 0, -t, t)


@jit
def tile_scores(k, q, scale, cap, CAP: tl.constexpr, UPCAST: tl.constexpr):
    """Scores [ROWS, N], in base 2; the interpreter multiplies no bf16, hence UPCAST."""
    if UPCAST:
        k = k.to(tl.float32)
    s = tl.dot(k, q, input_precision="ieee")
    if CAP:
        s = soft_cap(s * scale, cap) * LOG2E
    else:
        s = s * (scale * LOG2E)
    return s


@jit
def add_values(acc, weight, v, UPCAST: tl.constexpr):
    """acc + transposed v times weight."""
    weight = weight.to(v.dtype)
    if UPCAST:
        v, weight = v.to(tl.float32), weight.to(tl.float32)
    return tl.dot(tl.trans(v), weight, acc, input_precision="ieee")

# %% tags=["export:decode_tiles"]
@jit
def base_rows(pool, head, token, d, per_head, per_token, TOKENS: tl.constexpr,
              BLOCK_SIZE: tl.constexpr):
    """Pointers [ROWS, D] with all in them that does not change from tile to tile."""
    base = pool + (head * per_head)[:, None] + d[None, :]
    if BLOCK_SIZE % TOKENS == 0:
        base += (token * per_token)[:, None]
    return base


@jit
def tile_rows(base, block, tile, token, per_block, per_token, TOKENS: tl.constexpr,
              BLOCK_SIZE: tl.constexpr):
    """Pointers [ROWS, D] to one tile; block: its block's id, or an id for each row."""
    block = block.to(tl.int64)
    if BLOCK_SIZE % TOKENS == 0:
        return base + (block * per_block + tile * TOKENS % BLOCK_SIZE * per_token)
    else:
        return base + (block * per_block + token % BLOCK_SIZE * per_token)[:, None]


@jit
def tile_blocks(entries, tile, row_token, length, TOKENS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """The block ids of a tile: one where it lies in one block, otherwise one for each row."""
    if BLOCK_SIZE % TOKENS == 0:
        return tl.load(entries + tile * TOKENS // BLOCK_SIZE)
    else:
        token = tile * TOKENS + row_token
        return tl.load(entries + token // BLOCK_SIZE, mask=token < length, other=0)

# %% [markdown]
# Where the tile lies in one block (`BLOCK_SIZE % TOKENS == 0`), its block id is one number, and the
# addresses of its rows are one addition apart from the last tile's. Otherwise each row has an id of
# its own. `attend_range` is the loop of rung 4 over any run of tiles of one chat.

# %% tags=["export:decode_tiles"]
@jit
def attend_range(
    q, ahead, k_base, v_base, entries, tile, stop, length, own, d_ok, row_token, scale, cap, window,
    k_block, k_token, v_block, v_token, TOKENS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    FULL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, STAGES: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Tiles tile .. stop - 1 of one sequence's window; ahead: the block ids of the first.

    q is [D, N], the result acc [D, N].
    """
    peak = tl.full([q.shape[1]], float("-inf"), tl.float32)
    total = tl.zeros([q.shape[1]], tl.float32)
    acc = tl.zeros([q.shape[0], q.shape[1]], tl.float32)
    start = 0
    if WINDOW:
        start = tl.maximum(length - window, 0)
    first, last = tile + start // TOKENS, tl.maximum(stop + start // TOKENS - 1, 0)
    for i in tl.range(first, stop + start // TOKENS, num_stages=STAGES):
        token, block = i * TOKENS + row_token, ahead
        ahead = tile_blocks(entries, tl.minimum(i + 1, last), row_token, length, TOKENS, BLOCK_SIZE)
        there = token < length
        if WINDOW:  # blocks that left the window are gone from the table
            there = there & (token >= start)
        ok = there[:, None]
        if not FULL:
            ok = ok & d_ok
        k_at = tile_rows(k_base, block, i, token, k_block, k_token, TOKENS, BLOCK_SIZE)
        v_at = tile_rows(v_base, block, i, token, v_block, v_token, TOKENS, BLOCK_SIZE)
        s = tile_scores(tl.load(k_at, mask=ok, other=0.0), q, scale, cap, CAP, UPCAST)
        s = tl.where(there[:, None] & own, s, float("-inf"))
        new = tl.maximum(peak, tl.max(s, 0))
        safe = tl.where(new == float("-inf"), 0.0, new)
        weight, fade = tl.exp2(s - safe[None, :]), tl.exp2(peak - safe)
        total = total * fade + tl.sum(weight, 0)
        acc = add_values(acc * fade[None, :], weight, tl.load(v_at, mask=ok, other=0.0), UPCAST)
        peak = new
    return acc, peak, total

# %% [markdown]
# `there` guards the loads of keys *and* values, so unwritten slots, stale ids past the end and blocks
# that a sliding window gave back (their ids are -1) are never read. Where a query sees nothing of a tile, all
# scores are minus infinity; `safe` keeps minus infinity minus itself, a NaN, out of the exponent. Sums and accumulator are fp32.
#
# ## Parts, and who joins them
#
# A program that reads a whole chat writes its output. Otherwise it writes a part. Every program has
# two slots, one for the chat in which it begins and one for that in which it ends; in between all
# chats are whole. Which programs share a chat follows from the plan by arithmetic, so nobody keeps
# a list.

# %% tags=["export:decode_parts"]
"""Results and partial results: stored, joined by the program that comes last, or by a launch."""

# mypy: ignore-errors
from __future__ import annotations


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

# %% tags=["export:decode_parts"]
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

# %% tags=["export:decode_parts", "hide-input"]
@jit
def join_parts(parts, first, last, late, lane, sinks, HEAD_SIZE: tl.constexpr, N: tl.constexpr,
               D: tl.constexpr, SINKS: tl.constexpr, PARTS: tl.constexpr):
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

# %% [markdown]
# Joining in a second launch costs the launch. Instead, the program that *finishes last* can do it. Each adds 1 to
# the chat's counter when its part is written, and the one that finds all others there joins.
# This is correct only with care for the order of memory. A barrier makes all threads of the program finish
# their stores first; the addition *releases* them to whoever *acquires* the counter after it; and
# the joiner's loads go past its own L1 cache (`.cg`), which may hold what these addresses had before.
# It sets the counter to 0 again, for the next layer.

# %% tags=["export:decode_parts"]
@jit
def finish_range(
    acc, peak, total, begin, tile, stop, where, out, parts, arrived, cum, lane, sinks, batch,
    HEAD_SIZE: tl.constexpr, D: tl.constexpr, N: tl.constexpr, SINKS: tl.constexpr,
    FUSED: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr,
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
                    parts, first, last, late, lane, sinks, HEAD_SIZE, N, D, SINKS, PARTS)
                put_rows(acc, peak, total, to, to_lse, ok, head_ok, LOG2E)

# %% tags=["export:decode_parts", "hide-input"]
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

# %% tags=["export:decode_parts", "hide-input"]
@jit(do_not_specialize=["batch", "num_q_heads"])
def reduce_kernel(
    part, part_lse, cum, sinks, output, lse, batch, o_stride, o_head_stride, num_q_heads,
    HEAD_SIZE: tl.constexpr, D: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr,
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
                acc, peak, total = join_chunk(acc, peak, total, part, index, x,
                                              there[:, :, None] & d_ok[None, :, :], HEAD_SIZE, D)
            put_rows(acc, peak, total, to, to_lse, ok, head_ok, LOG2E)

# %% [markdown]
# The joining program reads its parts one after the other, so where a single chat has hundreds of them, the second
# launch with its many programs is better. The plan decides by the number of parts a chat.
#
# What is left is the walk. A program goes through its run chat by chat, and what the next chat
# begins with (queries, first ids, length) is asked for *before* the tiles of this one, so that it
# is there in time.

# %% tags=["export:decode_tiles", "hide-input"]
@jit
def read_record(at):
    """A program's line of the plan."""
    begin, end, seq = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    seq_begin, seq_end, length = tl.load(at + 3), tl.load(at + 4), tl.load(at + 5)
    return begin, end, seq, seq_begin, seq_end, length, tl.load(at + 6), tl.load(at + 7)


@jit
def range_end(tile, end, seq, seq_begin, seq_end, SPLITS: tl.constexpr, LEAST: tl.constexpr):
    """Where the work on this sequence stops for now, and which sequence is next."""
    stop, after = tl.minimum(end, seq_end), seq + 1
    if SPLITS:
        stop = tl.minimum(stop, tile + split_tiles(seq_end - seq_begin, SPLITS, LEAST))
        after = seq + (stop == seq_end).to(tl.int32)
    return stop, after


@jit
def load_sequence(cum, seq_lens, rows, seq, batch, HAS_ROWS: tl.constexpr):
    """First tile, tile behind the last and length of a sequence; the row of the one behind it."""
    real, row = seq < batch, tl.minimum(seq + 1, batch - 1)
    if HAS_ROWS:
        row = tl.load(rows + row).to(tl.int32)
    begin, end = tl.load(cum + seq, mask=real, other=0), tl.load(cum + seq + 1, mask=real, other=0)
    return begin, end, tl.load(seq_lens + seq, mask=real, other=0), row

# %% tags=["export:decode_tiles", "hide-input"]
@jit
def open_sequence(query, seq, q_stride, q_head_stride, lane, entries, tile, length, window,
                  row_token, TOKENS: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
                  UPCAST: tl.constexpr):
    """A sequence's queries [N, D] and the block ids of its tile `tile`, to begin with."""
    q_head, _, d, ok, _ = lane
    at = seq.to(tl.int64) * q_stride + (q_head * q_head_stride)[:, None] + d[None, :]
    q = tl.load(query + at, mask=ok, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    if WINDOW:
        tile += tl.maximum(length - window, 0) // TOKENS
    return q, tile_blocks(entries, tile, row_token, length, TOKENS, BLOCK_SIZE)

# %% tags=["export:decode_kernels", "hide-input"]
"""The decode kernel: a run of tiles a program, one sequence after the other.

A tile's keys multiply the queries from the left, K Q^T and then V^T W, so that the many rows
of the cache fill the rows of the matrix unit, and the few queries its columns.
"""

# mypy: ignore-errors
from __future__ import annotations

# %% tags=["export:decode_kernels"]
@jit
def walk_range(
    to, query, table, seq_lens, rows, cum, k_base, v_base, own, d_ok, r_token, lane, out, parts,
    arrived, sinks, batch, scale, cap, window, q_stride, q_head_stride, k_block, k_token, v_block,
    v_token, table_stride, HEAD_SIZE: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    SINKS: tl.constexpr, HAS_ROWS: tl.constexpr, STAGES: tl.constexpr, UPCAST: tl.constexpr,
    FUSED: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr,
):
    """All tiles of one program; what a sequence begins with is loaded during the one before."""
    begin, end, seq, seq_begin, seq_end, length, row, next_row = read_record(to)
    entries, tile = table + row.to(tl.int64) * table_stride, begin
    q, ahead = open_sequence(query, seq, q_stride, q_head_stride, lane, entries, tile - seq_begin,
                             length, window, r_token, TOKENS, BLOCK_SIZE, WINDOW, UPCAST)
    while tile < end:
        stop, after = range_end(tile, end, seq, seq_begin, seq_end, SPLITS, LEAST)
        next_begin, next_end, next_length, last_row = load_sequence(
            cum, seq_lens, rows, after, batch, HAS_ROWS)
        row = tl.where(after == seq, row, next_row)
        upcoming = table + row.to(tl.int64) * table_stride
        next_q, next_ahead = open_sequence(
            query, tl.minimum(after, batch - 1), q_stride, q_head_stride, lane, upcoming,
            tl.where(after == seq, stop - seq_begin, 0), next_length, window, r_token, TOKENS,
            BLOCK_SIZE, WINDOW, UPCAST)
        acc, peak, total = attend_range(
            tl.trans(q), ahead, k_base, v_base, entries, tile - seq_begin, stop - seq_begin,
            length, own, d_ok, r_token, scale, cap, window, k_block, k_token, v_block, v_token,
            TOKENS, BLOCK_SIZE, D == HEAD_SIZE, WINDOW, CAP, STAGES, UPCAST)
        if stop > tile:
            finish_range(acc, peak, total, begin, tile, stop, (seq, seq_begin, seq_end), out,
                         parts, arrived, cum, lane, sinks, batch, HEAD_SIZE, D, N, SINKS, FUSED,
                         SPLITS, LEAST)
        tile, seq, seq_begin, seq_end = stop, after, next_begin, next_end
        length, next_row, q, ahead, entries = next_length, last_row, next_q, next_ahead, upcoming

# %% tags=["export:decode_kernels"]
@jit(do_not_specialize=["batch", "cap", "scale", "window", "table_stride", "num_q_heads"])
def decode_kernel(
    query, keys, values, table, seq_lens, rows, cum, record, output, lse, part, part_lse, arrived,
    sinks, batch, scale, cap, window, q_stride, q_head_stride, o_stride, o_head_stride, k_block,
    k_token, k_head, v_block, v_token, v_head, table_stride, num_q_heads, HEAD_SIZE: tl.constexpr,
    D: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr,
    HAS_ROWS: tl.constexpr, STAGES: tl.constexpr, UPCAST: tl.constexpr, FUSED: tl.constexpr,
    SPLITS: tl.constexpr, LEAST: tl.constexpr,
):
    """Attention of the tiles in one program's record, for HEADS neighbouring KV heads."""
    TOKENS: tl.constexpr = ROWS // HEADS
    r, n, d = tl.arange(0, ROWS), tl.arange(0, N), tl.arange(0, D)
    r_token, group0 = r // HEADS, tl.program_id(1) * HEADS
    own = (r % HEADS)[:, None] == (n // GROUP)[None, :]  # which rows a query head attends to
    head_ok, d_ok = n < HEADS * GROUP, (d < HEAD_SIZE)[None, :]
    lane = (group0 * GROUP + n, head_ok, d, head_ok[:, None] & d_ok, num_q_heads)
    out, parts = (output, lse, o_stride, o_head_stride), (part, part_lse)
    head = group0 + r % HEADS
    k_base = base_rows(keys, head, r_token, d, k_head, k_token, TOKENS, BLOCK_SIZE)
    v_base = base_rows(values, head, r_token, d, v_head, v_token, TOKENS, BLOCK_SIZE)
    walk_range(record + tl.program_id(0) * 8, query, table, seq_lens, rows, cum, k_base, v_base,
               own, d_ok, r_token, lane, out, parts, arrived, sinks, batch, scale, cap, window,
               q_stride, q_head_stride, k_block, k_token, v_block, v_token, table_stride,
               HEAD_SIZE, D, N, TOKENS, BLOCK_SIZE, WINDOW, CAP, SINKS, HAS_ROWS, STAGES, UPCAST,
               FUSED, SPLITS, LEAST)
    if FUSED:
        write_empty(cum, seq_lens, out, lane, batch)

# %% tags=["export:kernels", "hide-input"]
"""Decode attention through the block table: one new token a sequence, as fast as the bytes come."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paged_kv.attention import paged_attention


def decode_constants(
    tiles: Tiles, group: int, head_size: int, block_size: int, splits: int = 0, least: int = 1,
    **options: bool,
) -> dict[str, Any]:
    """What the decode kernel is compiled with; options WINDOW, CAP, SINKS, HAS_ROWS."""
    plain = {"WINDOW": False, "CAP": False, "SINKS": False, "HAS_ROWS": False}
    return plain | options | {
        "HEAD_SIZE": head_size, "D": max(16, next_pow2(head_size)), "GROUP": group,
        "HEADS": tiles.heads, "N": max(16, next_pow2(group * tiles.heads)), "ROWS": tiles.rows,
        "BLOCK_SIZE": block_size, "STAGES": tiles.stages, "UPCAST": interpreted(),
        "FUSED": tiles.fused, "SPLITS": splits, "LEAST": least,
    }

# %% tags=["export:kernels", "hide-input"]
def launch_decode(
    plan: DecodePlan, query: Tensor, keys: Tensor, values: Tensor, block_table: Tensor,
    seq_lens: Tensor, rows: Tensor | None, scale: float, softcap: float | None,
    sinks: Tensor | None, output: Tensor, lse: Tensor,
) -> None:
    """One launch over the plan's programs, and one to join parts where that is not fused."""
    tiles, (heads, kv_heads, size) = plan.tiles, plan.shape
    constants = decode_constants(
        tiles, heads // kv_heads, size, keys.shape[1], plan.splits, plan.least,
        WINDOW=plan.window is not None, CAP=softcap is not None, SINKS=sinks is not None,
        HAS_ROWS=rows is not None)
    decode_kernel[(tiles.programs, kv_heads // tiles.heads)](
        query, keys, values, block_table, seq_lens, rows, plan.cum, plan.record, output, lse,
        plan.part, plan.part_lse, plan.arrived, sinks, plan.batch, scale, softcap or 1.0,
        plan.window or 0, *query.stride()[:2], *output.stride()[:2], *keys.stride()[:3],
        *values.stride()[:3], block_table.stride(0), heads, **constants, num_warps=tiles.warps)
    if not tiles.fused:
        launch_reduce(plan, sinks, output, lse)

# %% tags=["export:kernels", "hide-input"]
def launch_reduce(plan: DecodePlan, sinks: Tensor | None, output: Tensor, lse: Tensor) -> None:
    """The second launch: few heads a program where there is little else to fill the card."""
    heads, _, size = plan.shape
    d = max(16, next_pow2(size))
    n = min(next_pow2(max(1, min(16, plan.batch * heads // 512))), next_pow2(heads))
    parts = max(2, min(64, next_pow2(-(-plan.tiles.programs // plan.batch) + 1)))
    chunk = max(2, min(parts, 8192 // (n * d)))
    reduce_kernel[(plan.batch, triton.cdiv(heads, n))](
        plan.part, plan.part_lse, plan.cum, sinks, output, lse, plan.batch, *output.stride()[:2],
        heads, HEAD_SIZE=size, D=d, N=n, CHUNK=chunk, SINKS=sinks is not None,
        num_warps=4 if n * chunk * d >= 2048 else 2)

# %% tags=["export:kernels", "hide-input"]
def check_buffers(
    query: Tensor, block_table: Tensor, num_rows: int, softcap: float | None,
    sinks: Tensor | None, output: Tensor | None, lse: Tensor | None,
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

# %% tags=["export:kernels", "hide-input"]
def check_decode(
    query: Tensor, keys: Tensor, values: Tensor, seq_lens: Tensor, rows: Tensor | None,
    window: int | None, plan: DecodePlan | None,
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

# %% tags=["export:kernels"]
def decode_attention(
    query: Tensor, keys: Tensor, values: Tensor, block_table: Tensor, seq_lens: Tensor, *,
    rows: Tensor | None = None, scale: float | None = None, window: int | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, plan: DecodePlan | None = None,
    output: Tensor | None = None, lse: Tensor | None = None) -> tuple[Tensor, Tensor]:
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
        made, sums = paged_attention(query, keys, values, block_table, cu, seq_lens, rows=rows,
                                     scale=scale, window=window, softcap=softcap, sinks=sinks)
        return (made if output is None else output.copy_(made),
                sums if lse is None else lse.copy_(sums))
    output = torch.empty_like(query) if output is None else output
    lse = torch.empty(batch, heads, device=query.device) if lse is None else lse
    if not batch:
        return output, lse
    if plan is None:
        plan = DecodePlan(batch, heads, keys.shape[2], size, query.device, dtype=query.dtype,
                          window=window)
        plan.update(seq_lens, rows)
    launch_decode(plan, query, keys, values, block_table, seq_lens, rows,
                  size**-0.5 if scale is None else scale, softcap, sinks, output, lse)
    return output, lse

# %%
output, lse = decode_attention(*batch, plan=plan)
right, right_lse = paged_attention(query, keys, values, block_table, cu(3), seq_lens)
print("as chapter 04:", torch.allclose(output.float(), right.float(), atol=2e-2),
      torch.allclose(lse, right_lse, atol=1e-4))
print("counters are 0 again:", not plan.arrived.any())

# %% [markdown]
# ## What could go wrong
#
# The batch has what kernels stumble over: an empty chat, a row of the table that is not its
# place in the batch, NaN in every unwritten slot, and ids of living blocks behind the end.

# %%
from paged_kv.attention import paged_attention_numpy

stale = block_table.clone()
stale[stale < 0] = 0  # A's first block, where there should be nothing
lens = torch.tensor([7, 0, 13, 5], dtype=torch.int32, device=device)
rows = torch.tensor([1, 0, 0, 2], dtype=torch.int32, device=device)
q = torch.randn(4, 8, 32, generator=gen).to(device).bfloat16()
sinks = torch.randn(8, generator=gen).to(device)


def check(**options):
    """The largest error against the oracle, for 1, 2, 3 and 7 programs."""
    worst, numpy = 0.0, [t.float().cpu().numpy() for t in (q, keys, values)]
    given = options | ({"sinks": sinks.cpu().numpy()} if "sinks" in options else {})
    for programs in (1, 2, 3, 7):
        some = Tiles(16, 4, 4, 2, programs, fused=programs != 2)
        plan = DecodePlan(4, 8, 4, 32, device, tiles=some, window=options.get("window"))
        plan.update(lens, rows)
        found, sums = decode_attention(
            q, keys, values, stale, lens, rows=rows, plan=plan, **options)
        for i, (n, row) in enumerate(zip(lens.tolist(), rows.tolist())):
            right, right_sum = paged_attention_numpy(
                numpy[0][i : i + 1], *numpy[1:], stale[row].cpu().numpy(), n, **given)
            worst = max(worst, np.abs(found[i].float().cpu().numpy() - right[0]).max())
            assert np.allclose(sums[i].cpu().numpy(), right_sum[0], atol=1e-4)
    return worst


for options in ({}, {"window": 6}, {"softcap": 2.0}, {"sinks": sinks}):
    print(f"{', '.join(options) or 'plain':8} right: {bool(check(**options) < 2e-2)}")

# %% [markdown]
# The tests go on from here: other head sizes, ratios and blocks, extreme scores, pools above $2^{31}$ numbers, captured
# graphs with padding entries.

# %% [markdown]
# ## Climbing on

# %% tags=["hide-input"]
rungs = ("4 pipelined", "5 split in 4", "6 even shares", "7 two heads", "8 whole sequences",
         "9 fused join", "final")
shown = ("64x4096", "256x1024", "8x32768", "1x131072", "122 ragged", "256 ragged", "16x512",
         "1x4096")
print(f"measured: {'us':18}", *(f"{case:>10}" for case in shown))
for rung in rungs:
    row = [cases[c]["ours_us"] if rung == "final" else cases[c]["rungs_us"][rung] for c in shown]
    print(f"measured: {rung:18}", *(f"{us:10.1f}" for us in row))
print(f"measured: {'plain read':18}", *(f"{cases[c]['read_us']:10.1f}" for c in shown))

# %% [markdown]
# **Rung 6**, even shares with a second launch to join, is near the floor in all columns but the last two.
# *Hypothesis:* most for one long chat and for ragged batches, nothing where rung 4 had no trouble.
# It holds, but 122 ragged chats gain little, and 16 short ones lose: a program a chat and head was enough.
#
# **Rung 7** puts two KV heads in a tile, to read longer pieces of memory. *Hypothesis:* a
# small gain. Alone it brings none. **Rung 8** lets chats of equal length have whole numbers of programs, or programs whole
# numbers of chats, so that nothing is cut that need not be. **Rung 9** fuses the join: a launch less. The three
# together gain a little in batches of many chats; the fused join is a clear loss for one chat with hundreds of parts.
#
# The final kernel is rung 9 where a chat has few parts and rung 8 where it has many, with 1, 2 or 4 heads
# a tile by the rule in `pick_tiles`.
#
# Not everything helped. Still more heads a tile cost more in extra score columns than the longer pieces gain.
# Two tiles in flight instead of three take a quarter more time.

# %% tags=["hide-input"]
tried = cases["64x4096"]["variants_us"]
print(f"measured: as it is {cases['64x4096']['ours_us']:.1f} us;",
      ", ".join(f"{name} {us:.1f} us" for name, us in tried.items()))
counters = result["counters"]
for name, c in counters.items():
    print(f"measured: {name:14} memory {c['dram_percent_of_peak']:.0f} % of its peak, "
          f"read {c['dram_bytes_read'] / 1e9:.2f} GB, "
          f"stalled on memory {c['stalled_on_memory_per_issue']:.1f}, "
          f"{c['tensor_instructions'] / 1e6:.1f} M matrix instructions")

# %% [markdown]
# The profiler agrees. All of them read the same bytes from memory, once. What changes is how often
# a warp (32 threads in step) that could issue an instruction is waiting for memory instead, and how much of the
# memory's peak is reached. The matrix instructions halve with the turned product.
#
# ## How fast

# %% tags=["hide-input"]
book_style()
names = list(cases)
labels = ["plain read", "ours", *next(iter(cases.values()))["peers_tb_s"]]
fig, ax = plt.subplots(figsize=(8, 6))
for i, (label, marker) in enumerate(zip(labels, "|osD^")):
    speeds = [row["read_tb_s"] if label == "plain read" else row["ours_graph_tb_s"]
              if label == "ours" else row["peers_tb_s"].get(label) for row in cases.values()]
    ax.plot(speeds, range(len(names)), marker, linestyle="", label=label,
            markersize=12 if marker == "|" else 6)
ax.set(yticks=range(len(names)), yticklabels=names, xlabel="TB/s", xlim=(0, None))
ax.invert_yaxis()
ax.legend(fontsize=8, loc="lower left")
plt.show()
print("measured:", result["workload"])
for name, row in cases.items():
    best = max(row["peers_tb_s"], key=row["peers_tb_s"].get)
    print(f"measured: {name:13} {row['ours_graph_tb_s']:.2f} TB/s, "
          f"{100 * row['read_share']:.0f} % of the read, {row['x_best_peer']:.3f} times {best}; "
          f"plan {row['plan_us']:.1f} us")

# %% [markdown]
# *Figure: bytes over time for sixteen batches (chats x tokens, h head size, B block size, query/KV heads): a plain read, ours,
# FlashAttention-3, FlashInfer and vLLM's Triton kernel.*
#
# Large even batches run at almost the plain read's speed, ragged ones somewhat below, small
# ones at a launch's. Against the fastest of three peers, with their planning outside the measurement, we are level or a
# few percent ahead in the large cases and further ahead in the small and ragged ones. Our plan costs five to eleven microseconds, once a step, for all layers.
#
# What it does not show: other cards, other types, and a machine without noise. The same kernel
# compiled with its loads in another order moves by one or two hundredths, which is as much as separates the
# contestants in the large cases.

# %% tags=["hide-input"]
grid = result["sweeps"]["grid"]
fig, ax = plt.subplots(figsize=(7, 3.6))
for count in sorted({g["batch"] for g in grid}):
    rows_of = [g for g in grid if g["batch"] == count]
    ax.plot([g["context"] for g in rows_of], [g["bytes"] / g["ours_us"] / 1e3 for g in rows_of],
            marker="o", label=f"{count} chats")
ax.set(xscale="log", xlabel="tokens a chat", ylabel="GB/s", ylim=(0, None))
ax.legend(fontsize=8)
plt.show()
for g in grid[:: 4]:
    print(f"measured: {g['batch']} x {g['context']}: {g['bytes'] / g['ours_us'] / 1e3:.0f} GB/s, "
          f"plain read {g['bytes'] / g['read_us'] / 1e3:.0f} GB/s")

# %% [markdown]
# *Figure: bandwidth over the length of the chats, for 1 to 256 of them; what counts is their product.*
#
# Batch and context enter as a product only. Below a few tens of MB of cache a fixed ten microseconds
# of launch and ramp dominate.
#
# ## Does the table cost anything?
#
# :::{admonition} Check it yourself
# :class: warning
# One reads that the gather makes ~~a block size of 16 slow on GPUs, and blocks must be 128 or more~~. Same
# kernel, same chats, blocks of 1 to 4,096 tokens, in random order and in the order of the memory. A block of 4,096 in order
# is a contiguous cache.
# :::
#
# :::{admonition} Predict
# :class: tip
# A block of 16 has 32 KiB of keys in a layer, and the next block of the chat lies anywhere. How much slower than the
# contiguous cache is that: nothing, a twentieth, or half?
# :::
#
# :::{dropdown} Reasoning
# A block of keys is 16 tokens x 8 heads x 256 bytes, far more than the 64 bytes that memory hands out at
# a time, so no byte is fetched in vain. The ids are less than a ten-thousandth of the bytes. What is left is address arithmetic, and
# locality within the memory's own pages: a few hundredths.
# :::

# %% tags=["hide-input"]
sweep = result["sweeps"]["blocks"]
us = {(b["block_size"], b["order"]): b["us"] for b in sweep}
sizes = sorted({size for size, _ in us})
fig, ax = plt.subplots(figsize=(7, 3.6))
for order in ("scattered", "in order"):
    ax.plot(sizes, [us[size, order] for size in sizes], marker="o", label=order, clip_on=False)
ax.axhline(cases["64x4096"]["read_us"], color="black", linewidth=0.8, label="plain read")
ax.set(xscale="log", xlabel="block size, tokens", ylabel="us", ylim=(0, None))
ax.legend(fontsize=8)
plt.show()
flat = us[4096, "in order"]
for size in sizes:
    apart = us[size, "scattered"]
    print(f"measured: blocks of {size:4}: scattered {apart:.1f} us, "
          f"{100 * apart / flat - 100:+.1f} % against contiguous; "
          f"in order {us[size, 'in order']:.1f} us")
print(f"a block's keys are {16 * 8 * 128 * 2 // 1024} KiB, "
      f"ids are {100 * 4 / 65536:.3f} % of the bytes")

# %% [markdown]
# *Figure: time of one layer over the block size, blocks scattered and in order, 64 chats of 4,096 tokens.*
#
# From 16 on the table is free within a few hundredths. Blocks of 2 and 4 are the worst: their rows need an
# id each, as those of a block of 1 do, and division on top. This is the price that the paper put at a fifth to a quarter of
# the attention kernel's time {cite}`kwon2023paged`; a kernel that loads ids ahead and pipelines hides it.

# %% [markdown]
# ## The same bits in any batch
#
# Is a chat's output the same bits alone and in company? With even shares it is not: where a chat is cut depends on the others, and
# floating-point sums depend on where they are cut.

# %%
def bits(batch_invariant, *chats):
    """The first chat's output, in a batch of these."""
    at = torch.tensor(chats, device=device)
    plan = DecodePlan(len(chats), 8, 4, 32, device, tiles=tiny, batch_invariant=batch_invariant)
    plan.least = 1  # parts of one tile, so that even chats this short have several
    plan.update(seq_lens[at], at.int())
    found = decode_attention(query[at], keys, values, block_table, seq_lens[at], rows=at.int(),
                             plan=plan)
    return found[1][0]  # the log-sum-exp, in fp32


for mode in (False, True):
    alone, others = bits(mode, 0), (bits(mode, 0, 1, 2), bits(mode, 0, 0, 2, 2, 1))
    print("batch invariant" if mode else "even shares    ",
          "same bits alone and in two batches:", all(torch.equal(alone, x) for x in others))

# %% tags=["hide-input"]
for name in ("64x4096", "122 ragged", "1x131072"):
    row = cases[name]
    print(f"measured: {name:10} even shares {row['ours_us']:.1f} us, "
          f"batch invariant {row['batch_invariant_us']:.1f} us")

# %% [markdown]
# The mode cuts every chat by its own length alone, into at most 32 parts of 256 tokens or more, with tiles that do not depend on the
# batch either, and joins the parts in order. The programs then share out parts instead of tiles, so shares
# are less even and more must be joined. That is the price; [a lab](labs/L3_batch_invariance) looks closer.

# %% [markdown]
# ## State card
#
# | class or function | state | invariant |
# |---|---|---|
# | `DecodePlan` | `cum`, `record`, `part`, `part_lse`, `arrived` | every tile belongs to one program; `arrived` is 0 between launches; one stream at a time |
# | `pick_tiles` | none | what it picks fits the device's shared memory, for every architecture that is tested |
# | `decode_attention` | none | equals chapter 04; reads only slots that hold a token; 0 and minus infinity for an empty chat |
# | `write_kv`, `copy_kv_blocks` | none | only named slots and blocks change; in order, a copy sees those before it |
#
# What breaks next: a step with a *prompt* in it. Thousands of queries a chat make arithmetic the limit, and this
# kernel gives each query a matrix of its own. Chapter 12.
#
# ## Real world
#
# - vLLM calls FlashAttention-3 or FlashInfer where they exist (`vllm/v1/attention/backends/flash_attn.py`);
#   its own Triton kernel (`vllm/v1/attention/ops/triton_unified_attention.py`, described in {cite}`ringlein2025anatomy`) splits long chats in a
#   fixed number of segments and joins them in a second launch, which is our rung 5.
# - FlashInfer {cite}`ye2025flashinfer` plans on the host, with a binary search for the size of a share, and
#   copies the plan to the device each step.
# - FlashAttention-3 {cite}`shah2024fa3` reads pages of any size through per-row addresses when a page is smaller than its tile, as we do, and
#   gets its split counts from a small kernel on the device.
# - SGLang (`python/sglang/srt/layers/attention/triton_ops/decode_attention.py`) takes a number of splits for each chat, computed on the device.
# - TensorRT-LLM (`cpp/tensorrt_llm/kernels/decoderMaskedMultiheadAttention/decoderMaskedMultiheadAttentionTemplate.h`) fuses the write of the new key, its rotation and
#   the attention into one kernel.
#
# ## Exercises
#
# :::{exercise}
# :label: ex-11-floor
# **Compute.** One layer of Llama 3 8B, 32 chats of 2,000 tokens, bf16. What is the floor of a decode step's attention at the data sheet's bandwidth, in
# microseconds, and for all 32 layers?
# :::
#
# :::{solution} ex-11-floor
# :class: dropdown
# A token has 4,096 bytes a layer, so 64,000 tokens have 262,144,000 bytes: 55 microseconds, and 1.75 milliseconds for all
# layers, without the weights.
# :::

# %% tags=["hide-input"]
tokens = 32 * 2000 * 2 * 8 * 128 * 2
assert tokens == 262_144_000
assert round(tokens / 4.8e12 * 1e6) == 55
assert round(32 * tokens / 4.8e12 * 1e3, 2) == 1.75

# %% [markdown]
# :::{exercise}
# :label: ex-11-plan
# **Trace.** Four programs for A, B and C in tiles of 4 tokens (13, 7 and 5 tokens). Which tiles does each read, which chats are cut,
# and how many parts are written?
# :::
#
# :::{solution} ex-11-plan
# :class: dropdown
# Two tiles each: A0 A1, A2 A3, B, C. Only A is cut, in two parts; B and C are written whole.
# :::

# %% tags=["hide-input"]
four = DecodePlan(3, 8, 4, 32, device, tiles=Tiles(16, 4, 4, 2, 4))
four.update(seq_lens)
assert four.record[:, :2].tolist() == [[0, 2], [2, 4], [4, 6], [6, 8]]

# %% [markdown]
# :::{exercise}
# :label: ex-11-even
# **Compute.** 100 chats of one length and 66 programs a head group. How many programs does `active_programs` put to work, and
# how many if there are 60 chats?
# :::
#
# :::{solution} ex-11-even
# :class: dropdown
# With 100 chats a program would take $\lceil 100/66 \rceil = 2$ whole ones: 50 programs work and 16 do not. With 60, one program a
# chat: 60. In both cases nothing is cut and nothing joined, at the price of idle programs.
# :::

# %% tags=["hide-input"]
for count, working in ((100, 50), (60, 60)):
    even = DecodePlan(count, 8, 4, 32, device, tiles=Tiles(16, 4, 4, 2, 66))
    even.update(torch.full((count,), 400, dtype=torch.int32, device=device))
    assert int(even.cum[-2]) == working

# %% [markdown]
# :::{exercise}
# :label: ex-11-break
# **Break.** `naive_one_head` has no guard for an empty chat. What does it return for one, and which guard of the final kernel is it
# that prevents this?
# :::
#
# :::{solution} ex-11-break
# :class: dropdown
# Nothing is added, so `total` is 0 and the output 0/0, NaN. The final kernel never sees an empty chat in its walk, since it has no tile;
# `write_empty` writes 0 and minus infinity, and where a sum is divided by, `put_rows` replaces 0 by 1.
# :::

# %% tags=["hide-input"]
none = torch.zeros(3, dtype=torch.int32, device=device)
with np.errstate(all="ignore"):  # the interpreter divides in NumPy, which would say so
    assert run_one_head(query, keys, values, block_table, none).isnan().all()
found, sums = decode_attention(query, keys, values, block_table, none)
assert not found.any() and (sums == -torch.inf).all()

# %% [markdown]
# :::{exercise}
# :label: ex-11-shares
# **Implement.** `shares(seq_lens, tokens, programs)`: the plan in plain Python, a list of `(begin, end)` tile numbers a program, without the
# rule for equal lengths. Compare with the kernel for random lengths.
# :::
#
# :::{solution} ex-11-shares
# :class: dropdown
# Count the tiles; program $p$ of $n$ begins at $\lfloor p \cdot \text{total} / n \rfloor$, with $n$ at most the number of tiles.
# :::

# %% tags=["hide-input"]
def shares(seq_lens, tokens, programs):
    total = sum(-(-n // tokens) for n in seq_lens)
    working = max(1, min(programs, total))
    found = [(p * total // working, (p + 1) * total // working) for p in range(working)]
    return found + [(0, 0)] * (programs - working)


for programs in (1, 5, 9):
    lengths = torch.randint(0, 60, (6,), generator=gen).int()
    one = DecodePlan(6, 8, 4, 32, device, tiles=Tiles(16, 4, 4, 2, programs, even=False))
    one.update(lengths.to(device))
    assert [tuple(r) for r in one.record[:, :2].tolist()] == shares(lengths.tolist(), 4, programs)

# %% [markdown]
# ## Further reading
#
# - Gentle: Triton's own paper {cite}`tillet2019triton`; its fused softmax tutorial is this chapter in the small.
# - The split: "Flash-Decoding" {cite}`dao2023flashdecoding`, one page.
# - Even shares and block tables as sparse matrices: FlashInfer {cite}`ye2025flashinfer`, sections 3 and 4.
# - Deep: FlashAttention-3 {cite}`shah2024fa3`, on what Hopper's matrix units want; a tuned Triton paged kernel taken apart {cite}`ringlein2025anatomy`.
