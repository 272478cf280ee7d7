# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Lab: the price of indirection on a CPU
#
# Blocks of one token waste nothing. So why not use them? Here is attention that walks through
# the blocks where they lie, one after the other, against the same attention over one run of
# memory. The numbers were measured by `benchmarks/indirection_cpu.py`.

# %%
import json
import sys
from pathlib import Path

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "benchmarks").is_dir())
sys.path.insert(0, str(ROOT / "benchmarks"))
import indirection_cpu as lab

result = json.loads((ROOT / "benchmarks/results/indirection_cpu.json").read_text())
rows = {row["block_size"]: row for row in result["rows"]}
print("measured: on", result["device"])
print("measured:", result["workload"], "- median of", result["repeats"])
print(f"measured: one run {rows[1]['ms']['contiguous']:.0f} ms, walking blocks of 1",
      f"{rows[1]['ms']['walk']:.0f} ms, {rows[1]['ratio']['walk']:.0f} times as long")

# %% [markdown]
# **The question.** What does it cost to find K/V through a table, and how does the block size
# change it?
#
# :::{card} This lab
# - **You need** chapters [03](../03_block_manager) and [04](../04_paged_attention).
# - **Exports** nothing; it reads what `benchmarks/indirection_cpu.py` measured.
# - **Device** CPU.
# - **Run time** a few seconds; the benchmark takes a minute.
# - **You are here** 00 tour · 01 sizing · 02 contiguous pool · 03 block manager · 04 paged
#   attention · **lab** · 05 guest model
# :::
#
# This is the price on a CPU, in PyTorch. A GPU kernel pays it in another currency, and
# chapters 11 and 12 measure that. What carries over is the way of counting.

# %% [markdown]
# ## Four ways, one result
#
# Decode attention has one query a sequence and reads all its keys and values once. We do it
# in four ways.
#
# | way | table | copies K/V | visits |
# |---|---|---|---|
# | contiguous | none | no | one run a sequence |
# | copy tokens: chapter 04's `paged_attention` | a look-up a token | yes | one run |
# | copy blocks: `KVStore.gather` | a look-up a block | yes | one run |
# | walk | a look-up a block | no | block after block, with a running softmax |
#
# Before any clock runs, the four must agree.

# %%
import torch

torch.set_num_threads(1)
for block_size in (1, 4, 16, 128):
    case = lab.Case(block_size, num_seqs=3, seq_len=37)
    expected = case.contiguous()
    for attend in list(lab.WAYS.values())[1:]:
        assert torch.allclose(attend(case), expected, atol=1e-5)
    row = case.table[0, :5].tolist()
    print(f"blocks of {block_size:3}: the table begins {row}, all agree")

# %% [markdown]
# The blocks lie in random order, as in a pool that has been in use for a while. Only the
# first five entries of a row are shown. **Turn the knob.** Set `seq_len=1`; expect a table of
# one column and four ways that still agree.

# %% [markdown]
# ## What the bytes predict
#
# A token of one layer here is 8 KV heads of 128 elements in fp32, keys and values: 8 KiB.
#
# :::{admonition} Predict
# :class: tip
# The two copying ways read K/V from the blocks, write them into a run, and read the run. How
# many times as long as the contiguous way should they take, and how does that depend on the
# block size?
# :::
#
# :::{dropdown} Reasoning
# Each byte moves three times where it moved once, and at decode there is little arithmetic to
# hide behind. So about 3 times as long. The table costs 4 bytes a block beside 8 KiB a token:
# nothing. Hence the block size should hardly matter, not even at 1.
# :::

# %%
tokens = lab.NUM_SEQS * lab.SEQ_LEN
kv = lab.SPEC.bytes_for(tokens)
print(f"a token {lab.SPEC.bytes_per_token // 1024} KiB, {tokens:,} tokens {kv / 2**20:.2f} MiB")
print(f"copying moves {3 * kv / 2**20:.2f} MiB, {3 * kv / kv:.0f} times as much")
for block_size in (1, 16, 128):
    blocks = rows[block_size]["blocks"]
    print(f"blocks of {block_size:3}: a table of {4 * blocks:6,} B, {400 * blocks / kv:.4f} %")

# %% [markdown]
# :::{admonition} Predict
# :class: tip
# Walking copies nothing: it reads each byte once, as the contiguous way does. Does that make
# it the fastest of the paged ways?
# :::
#
# :::{dropdown} Reasoning
# Only with large blocks. Each visit costs about a dozen calls into PyTorch, however few
# tokens there are in the block. That is a fixed price a block, and the number of blocks is
# tokens / B: halve the block size and you double the bill. At B = 1 there are 4,000 visits, and
# the bytes do not matter at all.
# :::

# %% [markdown]
# ## What was measured

# %% tags=["hide-input"]
import matplotlib.pyplot as plt

from paged_kv.draw import book_style

for block_size, row in rows.items():
    print(f"measured: blocks of {block_size:3}:",
          ", ".join(f"{way} {row['ratio'][way]:.1f} times" for way in list(lab.WAYS)[1:]))
book_style()
fig, ax = plt.subplots()
for way, marker in zip(list(lab.WAYS)[1:], "os^"):
    ratios = [row["ratio"][way] for row in rows.values()]
    ax.plot(range(len(rows)), ratios, marker=marker, label=way)
ax.axhline(1, color="#666666", linewidth=1)
ax.text(0, 1.08, "one run of memory", color="#444444", fontsize=10)
ax.set_yscale("log")
ax.set_yticks([1, 3, 10, 30], ["1", "3", "10", "30"])
ax.minorticks_off()
ax.set_xticks(range(len(rows)), rows)
ax.set(xlabel="block size, tokens", ylabel="time, contiguous = 1", ylim=(0.85, 80))
ax.legend()
plt.show()

# %% [markdown]
# *Figure: time of the three paged ways against the block size, as a multiple of the
# contiguous way; both axes are logarithmic. The copying ways stay near 3 at every block size.
# Walking falls almost in a straight line, crosses them at blocks of 32 to 64, and comes closest to 1
# at 128.*
#
# Both predictions hold. Copying costs about what its bytes say, and a table with an entry a
# token costs hardly more than one with an entry for 128. Walking costs a fixed price a block.
# The next cell divides what walking takes beyond the contiguous way by the number of visits.
#
# :::{admonition} Check it yourself
# :class: warning
# Walking small blocks is slow since ~~the table has to be read~~. The table is less than a
# thousandth of the bytes; what costs is the calls of each visit.
# :::

# %%
price = {}
for block_size, row in rows.items():
    price[block_size] = 1000 * (row["ms"]["walk"] - row["ms"]["contiguous"]) / row["blocks"]
    print(f"measured: blocks of {block_size:3}: {row['blocks']:5,} visits,",
          f"{price[block_size]:.0f} us each")
assert max(price.values()) < 2 * min(price.values())
assert rows[1]["ratio"]["walk"] > 20 > 4 > rows[1]["ratio"]["copy tokens"]

# %% [markdown]
# The price of a visit stays within a factor of two over all block sizes, noise included, while
# the number of visits falls by 63 times from blocks of 1 to blocks of 64. So this is the *software* price of a look-up: the calls that
# surround it, not the memory access.

# %%
print(f"{rows[1]['blocks']:,} visits against {rows[64]['blocks']}:",
      f"{rows[1]['blocks'] / rows[64]['blocks']:.1f}, about 63 times")

# %% [markdown]
# :::{admonition} Predict
# :class: tip
# A Triton kernel walks too: one program reads block after block and keeps a running softmax.
# Will it show the same straight line?
# :::
#
# :::{dropdown} Reasoning
# No. Inside a kernel a visit is one load of 4 bytes and an addition, not a dozen calls. The
# kernel reads tiles of many tokens and finds the address of each through the table, so that a
# small block costs an extra load and perhaps a shorter contiguous read. The PagedAttention
# paper measured its kernel at 20-26 % slower than a contiguous one {cite}`kwon2023paged`;
# kernels of today have narrowed that.
# :::
#
# The check is chapter 11's. What we can check here is the counting: how many table entries a
# kernel with tiles of 64 tokens loads for a sequence of 300 tokens.

# %%
for block_size in (8, 16, 64):
    tile_entries = sum(-(-min(64, 300 - start) // block_size) for start in range(0, 300, 64))
    print(f"blocks of {block_size:2}: {tile_entries} entries in {-(-300 // 64)} tiles")

# %% [markdown]
# ## What this does not show
#
# It shows one layer, one CPU thread, fp32, and sequences of one length. It counts CPU time of
# the thread, so that other work on the machine disturbs it less. The contiguous baseline is
# the best layout there is, heads outermost; a cache that grows token by token would rather
# copy at every step. And it shows nothing about a GPU, save that an implementation of paging
# in PyTorch calls loses there as it does here: that is why chapters 11 and 12 write kernels.

# %% [markdown]
# ## State card
#
# | | |
# |---|---|
# | Classes | `Case`: the same sequences as runs and as blocks |
# | Invariant | all four ways return the same output |
# | Copying | the bytes moved, three for one, at any block size |
# | Walking | a price a block: 1 / B, best for large blocks |
# | What breaks next | whole models call attention once a layer, packed: [chapter 05](../05_guest_model) |
#
# ## Real world
#
# vLLM's CPU backend (`csrc/cpu/`) walks blocks in C++, where a visit is cheap, and its first
# GPU kernel (`csrc/attention/attention_kernels.cuh`) gave each warp a block. FlashInfer and
# FlashAttention take a block table argument and look addresses up tile by tile. SGLang's
# default page size of 1 is possible for the same reason: inside the kernel, a look-up a token
# is a load, not a call. transformers' own paged mode gathers through indices when it runs on
# plain `sdpa`, which is our "copy tokens".
#
# ## Exercises
#
# :::{exercise}
# :label: ex-L2-compute
# *Compute.* A layer of Llama 3 8B keeps 4 KiB a token in bf16. How many bytes does copying
# move for one step of 16 sequences of 8,192 tokens, over 32 layers?
# :::
#
# :::{solution} ex-L2-compute
# :class: dropdown
# 16 sequences hold 16 GiB; copying moves three times that, 48 GiB, where 16 GiB would do.
# :::

# %% tags=["hide-input"]
held = 16 * 8192 * 32 * 4 * 1024
print(f"{4} KiB a token and layer, {held / 2**30:g} GiB held, {3 * held / 2**30:g} GiB moved")
assert held == 16 * 2**30

# %% [markdown]
# :::{exercise}
# :label: ex-L2-trace
# *Trace.* A sequence of 10 tokens in blocks of 4 has the row [7, 2, 5]. Which slots does
# "copy tokens" read for positions 3, 4 and 9?
# :::
#
# :::{solution} ex-L2-trace
# :class: dropdown
# Block times 4 plus offset: 31, 8 and 21.
# :::

# %% tags=["hide-input"]
row = [7, 2, 5]
print([row[p // 4] * 4 + p % 4 for p in (3, 4, 9)])
assert [row[p // 4] * 4 + p % 4 for p in (3, 4, 9)] == [31, 8, 21]

# %% [markdown]
# :::{exercise}
# :label: ex-L2-break
# *Break.* Swap two entries of a row. Does decode attention notice, without positions in the
# keys? And with a partly filled last block?
# :::
#
# :::{solution} ex-L2-break
# :class: dropdown
# Swapping two *full* blocks changes nothing: softmax and sum do not know order, and in a real
# model the position is inside the key already. Swapping the last, partly filled block with
# another reads slots that hold nothing. Here fresh memory is NaN, so it shows.
# :::

# %% tags=["hide-input"]
case = lab.Case(4, num_seqs=1, seq_len=10)
right = case.walk()
case.table[0, [0, 1]] = case.table[0, [1, 0]]
full = case.walk()
case.table[0, [1, 2]] = case.table[0, [2, 1]]
print("full blocks swapped: same", torch.allclose(full, right, atol=1e-5),
      "| tail swapped: NaN", bool(case.walk().isnan().any()))
assert torch.allclose(full, right, atol=1e-5) and case.walk().isnan().any()

# %% [markdown]
# :::{exercise}
# :label: ex-L2-implement
# *Implement.* Walk faster where neighbours in the row are neighbours in memory: write
# `spans(row)` that merges ids which follow one another into (first id, count). How many
# visits are left for [3, 4, 5, 9, 1, 2]?
# :::
#
# :::{solution} ex-L2-implement
# :class: dropdown
# Three. A pool that hands out fresh ids in order gives long spans at first and short ones
# after some use, so the gain fades. It is also the idea behind huge pages: ask for neighbours
# on purpose.
# :::

# %% tags=["hide-input"]
def spans(row):
    """Maximal stretches of ids that follow one another, as (first id, count)."""
    found = []
    for block in row:
        if found and sum(found[-1]) == block:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((block, 1))
    return found


print(spans([3, 4, 5, 9, 1, 2]))
assert spans([3, 4, 5, 9, 1, 2]) == [(3, 3), (9, 1), (1, 2)] and spans([]) == []

# %% [markdown]
# :::{exercise}
# :label: ex-L2-own
# *Compute.* From the measured price a visit, at which block size does walking take as long as
# copying? Compare with the figure.
# :::
#
# :::{solution} ex-L2-own
# :class: dropdown
# Walking adds price x tokens / B, copying adds about 2 contiguous times. They meet where
# price x tokens / B = 2 contiguous times: on our machine between 16 and 64, in the figure
# between 32 and 64.
# :::

# %% tags=["hide-input"]
meet = price[16] * tokens / 1000 / (rows[16]["ms"]["copy tokens"] - rows[16]["ms"]["contiguous"])
print(f"measured: they meet at blocks of about {meet:.0f}")
assert 8 < meet < 128

# %% [markdown]
# ## Further reading
#
# - The PagedAttention paper, section 7.1, on the overhead of its kernel, and 7.2 on block
#   sizes {cite}`kwon2023paged`.
# - Milakov and Gimelshein, on the running softmax that walking needs
#   {cite}`milakov2018online`.
# - FlashInfer, on attention over many layouts of blocks {cite}`ye2025flashinfer`.
