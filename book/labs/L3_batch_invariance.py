# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Lab: batch invariance
#
# Chat A asks for its next token, once alone and once in a step with B and C. Nothing is random:
# same model, same weights, same cache, greedy choice. The attention reads A's blocks and nobody
# else's. Are A's logits the same numbers?

# %% tags=["hide-input"]
import os
import warnings

import torch

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: kernels run in its interpreter
torch.set_num_threads(1)
device = "cpu"  # also where there is a GPU: which bits differ depends on the machine
warnings.filterwarnings("ignore", message="IProgress not found")  # tqdm, in a notebook

from transformers import LlamaConfig, LlamaForCausalLM

from paged_kv.attend import KernelAttention
from paged_kv.block_manager import BlockManager
from paged_kv.decode_plan import DecodePlan, Tiles
from paged_kv.guest_attention import write_and_attend
from paged_kv.hf_adapter import host
from paged_kv.kernels import decode_attention
from paged_kv.kernels_prefill import prefill_attention
from paged_kv.packed_batch import pack

torch.manual_seed(0)
config = LlamaConfig(vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512)
guest = host(LlamaForCausalLM(config).to(device), num_blocks=32)
gen = torch.Generator().manual_seed(1)
prompts = {chat: torch.randint(97, (n,), generator=gen).tolist()
           for chat, n in (("A", 300), ("B", 70), ("C", 5))}


def next_logits(chats, attention):
    """Logits of each chat's next token; the prompts are computed one by one, in torch."""
    manager = BlockManager(32, 16, 4, 512)
    rows = {chat: manager.add(len(prompts[chat]) - 1) for chat in chats}
    guest.attention = write_and_attend
    for chat, row in rows.items():
        guest.forward(pack(manager.tables, [row], [prompts[chat][:-1]], device))
    manager.append(list(rows.values()))
    guest.attention = attention
    step = [prompts[chat][-1:] for chat in chats]
    return guest.forward(pack(manager.tables, list(rows.values()), step, device))


# %%
def compare(attention):
    """A's logits, alone and with B and C."""
    alone, together = (next_logits(chats, attention)[0] for chats in ("A", "ABC"))
    print("same bits:", torch.equal(alone, together),
          "- same to 1e-5:", torch.allclose(alone, together, atol=1e-5),
          "- same token:", bool(alone.argmax() == together.argmax()))


compare(write_and_attend)

# %% [markdown]
# Close, and the same token this time, but not the same numbers. Sooner or later a near tie may fall
# the other way, and from there on the texts differ. Whoever compares two runs, caches
# answers, or trains on the sampled tokens while another program computes their probabilities, finds
# that the answer depends on who else was asking.
#
# **The question.** Where does a sequence's result depend on its batch, can that be helped, and what
# does it cost?
#
# :::{card} This lab
# - **You need** chapters [05](../05_guest_model), [11](../11_triton_decode) and
#   [12](../12_triton_prefill).
# - **Exports** nothing; it reads what `benchmarks/batch_invariance.py` measured.
# - **Device** a CPU, with Triton's interpreter; what a GPU does was measured on one.
# - **Run time** half a minute; the benchmark takes as long on a GPU.
# - **You are here** 11 decode kernel · 12 prefill kernel · **lab** · 13 engine
# :::

# %% [markdown]
# ## The order of additions
#
# A computer's addition rounds, so it is not associative. Sums of the same numbers in another order
# give other bits.

# %%
print((0.1 + 0.2) + 0.3 == 0.1 + (0.2 + 0.3))
x, w = torch.randn(64, 256, generator=gen), torch.randn(256, 256, generator=gen)
first = [torch.nn.functional.linear(x[:rows], w)[0] for rows in (1, 64)]
print("row 0 of a product, alone and among 64, same bits:", torch.equal(*first))

# %% [markdown]
# Row 0 of a matrix product is computed from row 0 alone. But the library picks another routine for
# one row than for 64, and it adds up in another order. The same happens wherever the *shape of
# the batch* decides how the work is cut. So the question for each kernel is: who decides the order of
# additions of one sequence? If it is the sequence's own length, all is well.

# %% [markdown]
# ## Attention, with even shares
#
# Chapter 11's plan lines up the tiles of the whole batch and gives each program the same number. Look
# at A's 300 tokens, in tiles of 32 and with 4 programs: alone, and behind C's five tokens.
#
# :::{admonition} Predict
# :class: tip
# Where is A cut, alone and in company?
# :::
#
# :::{dropdown} Reasoning
# A has 10 tiles. Alone, four programs share 10: cuts at 2, 5 and 7. With C there are 11 tiles, and
# A's begin at the second: cuts at tile 2, 5 and 8 of all, which is 1, 4 and 7 of A's own.
# :::

# %%
def cuts(lens, invariant):
    """After which of A's tiles a part ends; A is the last sequence."""
    tiles = Tiles(rows=64, heads=2, warps=4, stages=2, programs=4, even=False)
    plan = DecodePlan(len(lens), 4, 2, 16, device, tiles=tiles, batch_invariant=invariant)
    plan.update(torch.tensor(lens, dtype=torch.int32, device=device))
    total, mine = sum(-(-n // 32) for n in lens), -(-lens[-1] // 32)
    ends = [end - (total - mine) for end in plan.record[:, 1].tolist()]
    return [end for end in ends if 0 < end < mine]


print("alone:", cuts([300], False), " behind C:", cuts([5, 300], False))
assert cuts([300], False) == [2, 5, 7] and cuts([5, 300], False) == [1, 4, 7]

# %% [markdown]
# Each part is summed by itself, then the parts are joined. Other cuts, other bits. That is no
# fault of the plan: its purpose is to let the batch decide, so that no program is left with more than
# its share.

# %% [markdown]
# ## A mode that does not look at the batch
#
# With `batch_invariant=True` a sequence is cut by its own length: a part has at least 256 tokens,
# and there are at most 32 parts. Programs are handed whole parts. Which program computes a part may
# still depend on the batch; what is added to what does not.

# %%
for n in (200, 300, 4096, 131072):
    parts = min(32, -(-n // 256))
    print(f"{n:7,} tokens: {parts:2} parts of about {-(-n // parts):,}")

# %% [markdown]
# Now the kernel itself, on one pool: three sequences together, then each alone, in both modes.

# %%
pool = torch.randn(32, 2, 16, 2, 32, generator=gen).to(device)
table = torch.randperm(32, generator=gen).int()[:27].split([19, 5, 3])
table = torch.nn.utils.rnn.pad_sequence(list(table), batch_first=True, padding_value=-1).to(device)
lens = torch.tensor([300, 70, 40], dtype=torch.int32, device=device)
query = torch.randn(3, 4, 32, generator=gen).to(device)


# %%
def decode(part, invariant):
    """Attention for some of the three sequences, in one call."""
    plan = DecodePlan(len(lens[part]), 4, 2, 32, device, dtype=pool.dtype,
                      batch_invariant=invariant)
    plan.update(lens[part].clone())
    return decode_attention(query[part].clone(), pool[:, 0], pool[:, 1], table[part].clone(),
                            lens[part].clone(), plan=plan)[0]


for invariant in (False, True):
    together = decode(slice(0, 3), invariant)
    same = [torch.equal(decode(slice(s, s + 1), invariant)[0], together[s]) for s in range(3)]
    print(f"batch_invariant={invariant}:", "all the same" if all(same) else "bits differ")

# %% [markdown]
# **Turn the knob.** Give the *second* sequence 20 tokens in place of 70: expect the first to change by
# default, and not in the mode. With 80 tokens nothing changes: they are as many tiles of 64 as 70.

# %%
first = {mode: decode(slice(0, 3), mode)[0] for mode in (False, True)}
for tokens in (20, 80, 70):
    lens[1] = tokens
    same = [torch.equal(decode(slice(0, 3), mode)[0], bits) for mode, bits in first.items()]
    print(f"beside {tokens} tokens, same bits by default: {same[0]}, in the mode: {same[1]}")

# %% [markdown]
# ## Prefill
#
# :::{admonition} Predict
# :class: tip
# The prefill kernel of chapter 12 does not split keys, and its tiles are picked without a look at
# the batch. Is its output invariant? And if the prompt is cut into chunks, so that other tiles are
# masked?
# :::
#
# :::{dropdown} Reasoning
# A query's sum runs over key tiles from the front, whatever else is in the batch. A masked tile adds
# weights of exactly 0, and computes the others by the same formula as a clear one. So yes, and
# yes, provided that a product treats all its rows alike, since a cut may move a query to another row
# of its tile.
# :::

# %%
prompt = torch.randn(40, 4, 32, generator=gen).to(device)


def prefill(begin, end):
    """A's tokens at positions 260 + begin .. 260 + end - 1, in a step of their own."""
    cu, own = (torch.tensor(n, device=device).int() for n in ([0, end - begin], [260 + end]))
    return prefill_attention(prompt[begin:end], pool[:, 0], pool[:, 1], table[:1], cu, own)[0]


whole = prefill(0, 40)
for cut in (16, 32):
    print("in two chunks, same bits:",
          torch.equal(torch.cat([prefill(0, cut), prefill(cut, 40)]), whole))
last = decode_attention(prompt[39:], pool[:, 0], pool[:, 1], table[:1], lens[:1])[0]
print("by the decode kernel, to 1e-5:", torch.allclose(last[0], whole[39], atol=1e-5))

# %% [markdown]
# Here the cuts are at whole tiles. A GPU's matrix unit does treat all rows alike, and the benchmark
# below finds no changed bit for chunks of 1, 7, 64 and 500 tokens. Triton's interpreter multiplies
# by NumPy, whose library does not: **turn the knob** to a cut of 13, and expect other bits on a CPU
# and the same on a GPU.
#
# One promise is not made: the two kernels add in different orders, so a token computed by decoding and
# the same token computed again in a prefill, after a preemption say, may differ in the last bits. Who
# needs that too must replay decoded tokens through the decode kernel.

# %% [markdown]
# ## The rest of the model
#
# Attention is one of two places. The other is every matrix product.
#
# :::{admonition} Check it yourself
# :class: warning
# An invariant attention kernel is said to make ~~the model~~ invariant. The cell below uses one.
# :::

# %%
compare(KernelAttention(batch_invariant=True))

# %% [markdown]
# Not enough. Make the products invariant in the crudest way,
# a row at a time, and try both modes of attention.

# %%
plain = torch.nn.Linear.forward


def naive_rowwise(self, x):
    """The same product, each row by itself."""
    rows = x.reshape(-1, x.shape[-1])
    return torch.cat([plain(self, row[None]) for row in rows]).view(*x.shape[:-1], -1)


torch.nn.Linear.forward = naive_rowwise
try:
    compare(KernelAttention())
    compare(KernelAttention(batch_invariant=True))
finally:
    torch.nn.Linear.forward = plain

# %% [markdown]
# Only both together give the same bits. Norms and activations need no help: they sum over one row,
# by a routine that does not change with the number of rows. A server would not multiply row by row, of
# course. It would use a product with fixed tiles and no splitting of the inner dimension, and lose some
# speed where rows are few.
#
# On the GPU the library's product shows the same. The lines say how many of the 4,096 numbers of row 0
# differ from those that it gives for a single row.

# %% tags=["hide-input"]
import json
from pathlib import Path

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "benchmarks").is_dir())
result = json.loads((ROOT / "benchmarks/results/batch_invariance.json").read_text())
print("measured:", result["device"], "torch", result["versions"]["torch"])
for row in result["rows"]:
    if row["case"].startswith("linear"):
        print(f"measured: {row['case']}:",
              ", ".join(f"{count} of {rows} rows" for rows, count in row["changed"].items()))

# %% [markdown]
# In bf16 the result has so few bits that most differences are rounded away, which is why the effect is
# easy to miss in a test of one layer.

# %% [markdown]
# ## The price
#
# What should the mode cost? Count parts for 32 query heads of 128. A part leaves an output and a
# log-sum-exp in fp32 for every head, to be written and read again.
#
# :::{admonition} Predict
# :class: tip
# 64 sequences of 4,096 tokens, and one of 131,072, on 132 multiprocessors with two programs each. Which
# of the two pays more?
# :::
#
# :::{dropdown} Reasoning
# The first: 16 parts a sequence, 1,024 in all, 16.5 KB each; written and read, 34 MB beside
# 1,074 MB of keys and values. That is 3 %, plus what it costs to end one part and begin another.
# The second: a program takes two of the 8 KV heads, so 32 parts are 128 programs' work, and there is
# room for 264. Half the card is idle, so up to twice the time.
# :::

# %%
part_bytes = 32 * (128 + 1) * 4
extra, kv = 2 * 1024 * part_bytes, 64 * 4096 * 2 * 8 * 128 * 2
print(f"{part_bytes / 1e3:.1f} KB a part, {extra / 1e6:.0f} MB extra beside {kv / 1e6:,.0f} MB:",
      f"{100 * extra / kv:.0f} %")
print(f"{32 * 4} programs' work of {132 * 2}")

# %% tags=["hide-input"]
import matplotlib.pyplot as plt

from paged_kv.draw import book_style

book_style()
rows = [row for row in result["rows"] if "price" in row]
fig, ax = plt.subplots(figsize=(7, 3.6))
ax.barh(range(len(rows)), [row["us"]["batch_invariant"] / row["us"]["default"] for row in rows])
ax.axvline(1, color="black", linewidth=0.8)
ax.set(yticks=range(len(rows)), yticklabels=[row["case"] for row in rows],
       xlabel="time of a step, default = 1")
ax.invert_yaxis()
plt.show()
for row in rows:
    us, changed = row["us"], row["changed"]
    print(f"measured: {row['case']}: default {us['default']:.0f} us, invariant"
          f" {us['batch_invariant']:.0f} us; other bits than alone: {changed['default']} and"
          f" {changed['batch_invariant']} of {row['tried']}")
chunks = next(row for row in result["rows"] if row["case"] == "prefill")
print("measured: prefill, tokens with other bits:", chunks["changed_alone"], "alone,",
      sum(chunks["changed_in_chunks"].values()), "in chunks")
assert all(row["changed"]["batch_invariant"] == 0 for row in rows)
assert chunks["changed_alone"] == sum(chunks["changed_in_chunks"].values()) == 0

# %% [markdown]
# *Figure: time of one layer's decode attention in the invariant mode, relative to the default.*
#
# By default every sequence that was tried in company comes out in other bits than alone; in the mode,
# none. The single long sequence pays most, for the reason predicted. The even batches pay more
# than their bytes explain: a part of 256 tokens is only a few tiles long, and at its end the
# pipeline of loads runs dry and must be filled again. Longer parts would be cheaper there and worse
# for few long sequences; the limit of 32 parts is a compromise that looks at one length at a time,
# which is just what the mode has to do. Prefill pays nothing: it is invariant as it stands.
#
# What this does not show: whole models. Attention is a part of a step, and invariant matrix products
# have a price of their own.

# %% [markdown]
# ## State card
#
# | | |
# |---|---|
# | Mode | `DecodePlan(..., batch_invariant=True)`, `KernelAttention(batch_invariant=True)` |
# | Invariant | a sequence's parts follow from its length alone; they are joined in order |
# | Prefill | on a GPU the same bits alone, in any batch and in any chunks, without a mode |
# | Not promised | the same bits from the decode and the prefill kernel, on two kinds of card, or from torch's products |
#
# ## Real world
#
# vLLM has a batch-invariant mode, in `vllm/model_executor/layers/batch_invariant.py`: it replaces matrix
# products, norms and means by Triton kernels with fixed tiles and fixes the splits of attention. SGLang's
# deterministic mode does likewise, in `python/sglang/srt/batch_invariant_ops/`. Both follow an essay
# {cite}`he2025nondeterminism` which also points out what this lab found: no atomic additions and no race are
# needed for it, a varying batch is enough.
#
# ## Exercises
#
# :::{exercise}
# :label: ex-L3-parts
# **Compute.** How many tokens has the longest part of a sequence of 20,000 tokens in the invariant mode, and from what
# length on do parts grow beyond 256?
# :::
#
# :::{solution} ex-L3-parts
# :class: dropdown
# 32 parts of 625 tokens, rounded up to whole tiles. Beyond 8,192 tokens.
# :::

# %% tags=["hide-input"]
assert (min(32, -(-20000 // 256)), 20000 // 32, 32 * 256) == (32, 625, 8192)

# %% [markdown]
# :::{exercise}
# :label: ex-L3-cuts
# **Trace.** Where is A cut in the invariant mode, alone and behind C, with the tiles of above?
# :::
#
# :::{solution} ex-L3-cuts
# :class: dropdown
# 256 tokens are 8 tiles, so after tile 8, in both.
# :::

# %% tags=["hide-input"]
assert cuts([300], True) == cuts([5, 300], True) == [8]

# %% [markdown]
# :::{exercise}
# :label: ex-L3-break
# **Break.** Add the numbers 1, 1e8 and -1e8 in fp32 in all six orders. How many different sums are there, and which is
# right?
# :::
#
# :::{solution} ex-L3-break
# :class: dropdown
# Two: 0 and 1. The 1 is lost whenever it meets a large number before the two large ones have met, in four of six orders.
# :::

# %% tags=["hide-input"]
from itertools import permutations

sums = [float((torch.tensor(a) + b) + c) for a, b, c in permutations([1.0, 1e8, -1e8])]
assert sorted(sums) == [0.0] * 4 + [1.0] * 2

# %% [markdown]
# :::{exercise}
# :label: ex-L3-implement
# **Implement.** `fixed_tiles(x, w)`: a matrix product whose rows do not depend on how many there are, but
# faster than row by row.
# :::
#
# :::{solution} ex-L3-implement
# :class: dropdown
# Always multiply 16 rows, the last ones padded with zeros: one shape, one routine, one order.
# :::

# %% tags=["hide-input"]
def fixed_tiles(x, w, size=16):
    padded = torch.nn.functional.pad(x, (0, 0, 0, -len(x) % size))
    tiles = [torch.nn.functional.linear(tile, w) for tile in padded.split(size)]
    return torch.cat(tiles)[: len(x)]


product = fixed_tiles(x, w)
assert all(torch.equal(fixed_tiles(x[:n], w), product[:n]) for n in (1, 5, 16, 17, 33))
assert torch.allclose(product, torch.nn.functional.linear(x, w), atol=1e-4)

# %% [markdown]
# :::{exercise}
# :label: ex-L3-full
# **Compute.** Into how many parts would the 131,072 tokens have to be cut to give each of the 264
# programs one? How long would a part be?
# :::
#
# :::{solution} ex-L3-full
# :class: dropdown
# A part is work for four programs, so 66 parts, of 1,986 tokens.
# :::

# %% tags=["hide-input"]
parts = 132 * 2 // 4
assert (parts, -(-131072 // parts)) == (66, 1986)

# %% [markdown]
# ## Further reading
#
# - Gentle: the essay named above {cite}`he2025nondeterminism`.
# - Deep: how splitting keys fills a GPU, and so brings the cuts about {cite}`dao2023flashdecoding`.
