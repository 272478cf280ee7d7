# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # What a KV cache is, and how big
#
# A language model writes one token at a time. The shortest program that makes it do so hands the
# model the whole text so far, takes the token it proposes, adds it to the text, and starts again.
# That program is correct. Below it runs on a decoder small enough to read: two layers of causal
# attention, random weights, two query heads that share one key/value head. It counts how often a
# token's **key** and **value** are computed, the two vectors by which later tokens find it (the
# key) and read it (the value).

# %% tags=["hide-input"]
import numpy as np

LAYERS, HEADS, KV_HEADS, SIZE, VOCAB, LONGEST = 2, 2, 1, 8, 64, 1000
HIDDEN = HEADS * SIZE
rng = np.random.default_rng(1)


def weights(rows, columns, scale=1.0):
    return (scale * rng.normal(size=(rows, columns)) / rows**0.5).astype(np.float32)


words, places = weights(VOCAB, HIDDEN, VOCAB**0.5), weights(LONGEST, HIDDEN, LONGEST**0.5)
columns = {"q": HIDDEN, "k": KV_HEADS * SIZE, "v": KV_HEADS * SIZE, "o": HIDDEN}
layers = [{name: weights(HIDDEN, size) for name, size in columns.items()} for _ in range(LAYERS)]
to_logits = weights(HIDDEN, VOCAB)
future = np.triu(np.full((LONGEST, LONGEST), -np.inf, np.float32), 1)


def attend(q, k, v):
    """The last len(q) tokens attend to all len(k) tokens, none to one after itself."""
    start, end = len(k) - len(q), len(k)
    q, k, v = (x.transpose(1, 0, 2) for x in (q / SIZE**0.5, k, v))
    k, v = (np.repeat(x, HEADS // KV_HEADS, axis=0) for x in (k, v))
    scores = q @ k.transpose(0, 2, 1)
    scores += future[start:end, :end]  # in place: these arrays grow to megabytes
    scores -= scores.max(-1, keepdims=True)
    np.exp(scores, out=scores)
    out = scores @ v / scores.sum(-1, keepdims=True)
    return out.transpose(1, 0, 2).reshape(-1, HIDDEN)


# %%
def forward(tokens, kept):
    """Logits after `tokens`, which follow the tokens whose K and V are in `kept`."""
    start = kept[0].shape[1]
    x = words[tokens] + places[start : start + len(tokens)]
    for layer, w in enumerate(layers):
        q, k, v = ((x @ w[name]).reshape(len(tokens), -1, SIZE) for name in "qkv")
        kept[layer] = np.concatenate([kept[layer], [k, v]], axis=1)
        if layer == LAYERS - 1:  # only the last token's logits are wanted
            x, q = x[-1:], q[-1:]
        x = x + attend(q, *kept[layer]) @ w["o"]
    return x[-1] @ to_logits


def nothing_kept():
    return [np.empty((2, 0, KV_HEADS, SIZE), np.float32) for _ in range(LAYERS)]


def naive_generate(steps):
    """Generate `steps` tokens, feeding everything back in each time."""
    text, pairs = [7], 0
    for _ in range(steps):
        logits = forward(text, nothing_kept())
        pairs += len(text)
        text.append(int(logits.argmax()))
    return text, pairs


slow_text, slow_pairs = naive_generate(1000)
print(f"{len(slow_text) - 1:,} tokens generated, K/V computed {slow_pairs:,} times a layer")

# %% [markdown]
# Half a million pairs for a thousand tokens: step 1 computes one pair, step 2 two, step 1,000 a
# thousand, and $1 + 2 + \dots + n = n(n+1)/2$. All but a thousand of them had been computed before.
#
# **The question.** If we keep the pairs instead, how much memory do they take, and how many users
# does that leave room for?
#
# :::{card} This chapter
# - **You need**: Python, NumPy, and a rough idea of attention (queries, keys, values, softmax).
# - **Exports**: `sizing` (units, `KVSpec`, `capacity`).
# - **Device**: any CPU.
# - **Run time**: about 10 s on one thread.
# - **You are here** 00 tour · **01 sizing** · 02 contiguous pool · 03 block manager · 04 paged
#   attention · 05 guest model · 06 copy-on-write · 07 sampling · 08 prefix cache · 09
#   scheduling · 10 preemption · 11 decode kernel · 12 prefill kernel · 13 engine · 14 full speed
# :::

# %% [markdown]
# ## The same tokens, one pair a step
#
# In causal attention a token looks back and never forward. So nothing that comes later changes the
# key or the value of a token that stands: the pair computed for it at step 5 is, but for rounding,
# the pair that step 500 would compute again. Keep it. That store of keys and values is the **KV
# cache**.
#
# With a cache, a step feeds in the newest token only. Its query meets the keys that are kept, and
# its own pair joins them. `forward` was written so that both ways are the same code; only the
# arguments differ.

# %%
def generate(steps):
    """Generate `steps` tokens, keeping every K/V pair."""
    text, pairs, kept = [7], 0, nothing_kept()
    for _ in range(steps):
        logits = forward(text[-1:], kept)
        pairs += 1
        text.append(int(logits.argmax()))
    return text, pairs, kept


# %% [markdown]
# :::{admonition} Predict
# :class: tip
# For 10, 100 and 1,000 tokens: how many times fewer pairs does the cache compute? And is the text
# the same, or nearly the same?
# :::
#
# :::{dropdown} Reasoning
# Without a cache $n(n+1)/2$ pairs, with it $n$: the ratio is $(n+1)/2$ and grows with the text. The
# text is the same, since the same numbers enter the same sums. (Not always in the same order, so
# the last bits of a logit can differ; a token differs only where two logits nearly tie.)
# :::

# %%
print("tokens    pairs without    with          ratio    same text")
for steps in (10, 100, 1000):
    without, naive_pairs = naive_generate(steps) if steps < 1000 else (slow_text, slow_pairs)
    text, pairs, kept = generate(steps)
    ratio = naive_pairs / pairs
    print(f"{steps:6,} {naive_pairs:16,} {pairs:7,} {ratio:8.1f} times    {text == without}")
    assert (naive_pairs, pairs) == (steps * (steps + 1) // 2, steps) and text == without

# %% [markdown]
# At 1,000 tokens the cache computes 500.5 times fewer pairs, at 10 tokens 5.5 times. Every server
# of language models therefore keeps one. What it saves in arithmetic it costs in memory, and the
# rest of this book is about that memory.
#
# Causality is what makes keeping safe. Check it: compute all 1,000 pairs afresh in one pass, and
# compare them with those that were kept along the way, the oldest of them 999 steps ago.

# %%
afresh = nothing_kept()
forward(text[:-1], afresh)
for layer in range(LAYERS):
    assert np.allclose(afresh[layer], kept[layer], rtol=0, atol=1e-4)
print("kept and fresh K/V of", afresh[0].shape[1], "tokens agree in both layers")

# %% [markdown]
# **Turn the knob.** Set `future[:] = 0`, which lets every token see those after it, and run the
# table again; expect `False` in its last column, because old pairs would now have to change with
# each new token. (An exercise at the end does this and puts the mask back.)

# %% [markdown]
# ## What is kept
#
# The state of the cache, first as data. For each layer of the toy:
#
# | axis | size here | meaning |
# |---|---|---|
# | 0 | 2 | keys, then values |
# | 1 | tokens | grows by one a step |
# | 2 | 1 | KV heads |
# | 3 | 8 | head size: numbers in one vector |
#
# Who writes it: the step that computes a token, once. Who reads it: every later step of the same
# text, in full. **Query heads do not appear.** The toy has two of them over one KV head; sharing of
# this kind is called grouped-query attention (GQA), multi-query (MQA) where one KV head serves all.
#
# The size is the product of the axes and of the bytes in one number:
#
# bytes per token = 2 (K and V) × layers × KV heads × head size × bytes per element.

# %%
per_token = 2 * LAYERS * KV_HEADS * SIZE * 4  # float32: 4 bytes
measured = sum(layer.nbytes for layer in kept)
print(kept[0].shape, "in each of", LAYERS, "layers")
print(f"formula: {per_token} B a token, {1000 * per_token:,} B for 1,000 tokens")
print(f"the arrays: {measured:,} B")
assert measured == 1000 * per_token

# %% [markdown]
# 128 B a token, and the arrays agree. A real model has the same five factors. They are only larger.

# %% [markdown]
# ## Units first
#
# A GB is $10^9$ bytes: bandwidths and files are given in it. A GiB is $2^{30}$: most software counts
# memory in it. Mixing the two is the commonest slip in sums like ours, large enough to decide whether
# a model fits. So the module begins with units, and takes the label and the divisor from one table.

# %% tags=["export:sizing"]
"""How many bytes a KV cache takes: per token, per block, per sequence.

Arithmetic only.  KiB, MiB and GiB are powers of 1,024; kB, MB and GB powers of 1,000.
"""

import operator
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

KiB, MiB, GiB, TiB = (1024**power for power in (1, 2, 3, 4))
kB, MB, GB, TB = (1000**power for power in (1, 2, 3, 4))

BINARY_UNITS = {"B": 1, "KiB": KiB, "MiB": MiB, "GiB": GiB, "TiB": TiB}
DECIMAL_UNITS = {"B": 1, "kB": kB, "MB": MB, "GB": GB, "TB": TB}


# %% tags=["export:sizing"]
def format_bytes(num_bytes: float, digits: int = 2, decimal: bool = False) -> str:
    """Write a number of bytes in the largest unit that keeps it at 1 or more.

    Args: `digits`, decimals at most (trailing zeros go); `decimal`, GB and not GiB.
    Returns: such as "93.75 MiB".  The label and the divisor come out of one table.
    """
    units = DECIMAL_UNITS if decimal else BINARY_UNITS
    fits = [unit for unit, size in units.items() if abs(num_bytes) >= size] or ["B"]
    text = f"{num_bytes / units[fits[-1]]:,.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} {fits[-1]}"


def parse_bytes(text: str) -> int:
    """Read "80GB", "1.5 GiB" or "4096" as whole bytes, rounded down.

    Raises: ValueError for anything else, a bare "80G" too: nobody knows which G it is.
    """
    units = {name.lower(): size for name, size in (BINARY_UNITS | DECIMAL_UNITS).items()}
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", text)
    unit = (found[2].lower() or "b") if found else ""
    if not found or unit not in units:
        allowed = ", ".join([*BINARY_UNITS, *list(DECIMAL_UNITS)[1:]])
        raise ValueError(f"size = {text!r}: write a number and one of {allowed}")
    return int(Fraction(found[1]) * units[unit])


# %%
for text in ("8 GiB", "80 GB"):
    size = parse_bytes(text)
    print(f"{text} is {size:,} B, {format_bytes(size, 1)}, {format_bytes(size, decimal=True)}")
try:
    parse_bytes("80G")
except ValueError as error:
    print("ValueError:", error)
for card, reported in (("A100", 81_920), ("H100", 81_559)):
    print(f'{card} "80GB", its driver: {reported:,} MiB, {format_bytes(reported * MiB, 1)}')

# %% [markdown]
# 80 GB are 74.5 GiB: nothing is missing, the divisor changed, and the label with it. What is printed
# on a card is another matter. Makers of GPUs are generous or mean GiB: the drivers of two cards sold
# as "80GB" report 81,920 MiB and 81,559 MiB. So ask the driver. Where this book knows only the name
# of a card, it takes "80 GB" at its word, which errs on the safe side.

# %% [markdown]
# ## `KVSpec`: five factors with a name
#
# A `KVSpec` is what one token leaves behind in a stack of identical layers. It is frozen: it
# crosses into later chapters, and nothing there may change it. Its invariant is that a token's row
# fills whole bytes, which the constructor enforces; a wrong argument is refused with its name and
# value.

# %% tags=["export:sizing"]
BITS = {"fp32": 32, "fp16": 16, "bf16": 16, "fp8": 8, "int8": 8, "int4": 4}


def at_least(minimum: int, name: str, value: int) -> int:
    """Return `value` as an int; ValueError, naming it, if it is no integer >= `minimum`."""
    try:
        number = operator.index(value)
    except TypeError:
        number = minimum - 1
    if number < minimum or isinstance(value, bool):
        raise ValueError(f"{name} = {value!r}: an integer of at least {minimum} is needed")
    return number


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks of `block_size` tokens that hold `num_tokens`: the last one may be partly full."""
    return -(-at_least(0, "num_tokens", num_tokens) // at_least(1, "block_size", block_size))


# %% tags=["export:sizing"]
@dataclass(frozen=True)
class KVSpec:
    """What one token leaves behind in a stack of identical attention layers.

    Fields
        num_layers         layers that keep K/V.
        num_kv_heads       KV heads a layer (the query heads do not matter here).
        head_size          elements a head.
        dtype              element type, a key of `BITS`.
        tensors_per_layer  2 for K and V; 1 for a latent that stands for both (MLA), with
                           one head of kv_lora_rank + qk_rope_head_dim elements.
    Scales of quantised types are not counted.
    """

    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: str = "bf16"
    tensors_per_layer: int = 2

    def __post_init__(self) -> None:
        """Refuse what no cache can be."""
        for name in ("num_layers", "num_kv_heads", "head_size", "tensors_per_layer"):
            object.__setattr__(self, name, at_least(1, name, getattr(self, name)))
        if self.dtype not in BITS:
            raise ValueError(f"dtype = {self.dtype!r}: one of {', '.join(BITS)} is needed")
        if self.tensors_per_layer > 2:
            raise ValueError(f"tensors_per_layer = {self.tensors_per_layer!r}: 2 (K and V) or 1")
        if self.num_kv_heads * self.head_size * BITS[self.dtype] % 8:
            raise ValueError(f"head_size = {self.head_size}: {self.dtype} rows end inside a byte")


# %% [markdown]
# The operations are one line each. A **block** is a fixed number of tokens, `block_size`, whose
# pairs are kept together in all layers; the second half of this chapter says why. A sequence
# without blocks is a sequence in blocks of one token, so `bytes_for` needs no second method.

# %% tags=["export:sizing"]
class KVSpec(KVSpec):  # type: ignore
    @property
    def elements_per_token(self) -> int:
        """Numbers that a token adds to the cache, over all layers."""
        return self.tensors_per_layer * self.num_layers * self.num_kv_heads * self.head_size

    @property
    def bytes_per_token(self) -> int:
        """Bytes that a token adds to the cache, over all layers."""
        return self.elements_per_token * BITS[self.dtype] // 8

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes of a block of `block_size` tokens, over all layers."""
        return self.bytes_per_token * at_least(1, "block_size", block_size)

    def bytes_for(self, num_tokens: int, block_size: int = 1) -> int:
        """Bytes of one sequence; with a block size, of the whole blocks that hold it."""
        return self.blocks_for(num_tokens, block_size) * self.bytes_per_block(block_size)

    def blocks_for(self, num_tokens: int, block_size: int) -> int:
        """Blocks that one sequence of `num_tokens` tokens takes."""
        return blocks_for(num_tokens, block_size)

    def blocks_in(self, memory_bytes: int, block_size: int) -> int:
        """Whole blocks that fit into `memory_bytes`."""
        return at_least(0, "memory_bytes", memory_bytes) // self.bytes_per_block(block_size)


# %% [markdown]
# The toy first, then Llama 3 8B: 32 layers, 8 KV heads of size 128, two bytes a number.

# %%
toy = KVSpec(LAYERS, KV_HEADS, SIZE, "fp32")
llama = KVSpec(num_layers=32, num_kv_heads=8, head_size=128, dtype="bf16")
assert toy.bytes_for(1000) == measured
for name, spec in (("toy", toy), ("Llama 3 8B", llama)):
    print(f"{name}: {spec.bytes_per_token:,} B = {format_bytes(spec.bytes_per_token)} a token")
try:
    KVSpec(32, 8, 128, "float16")
except ValueError as error:
    print("ValueError:", error)

# %% [markdown]
# One token of Llama 3 8B costs 128 KiB. As text it is about four characters.
#
# **Turn the knob.** Set `num_kv_heads` to 32, one for each query head, as models were built before
# GQA; expect four times the bytes. Set the dtype to fp8; expect half.

# %%
print(format_bytes(KVSpec(32, 32, 128).bytes_per_token), "with 32 KV heads")
print(format_bytes(KVSpec(32, 8, 128, "fp8").bytes_per_token), "in fp8")

# %% [markdown]
# ## Seven models
#
# :::{admonition} Predict
# :class: tip
# OPT-13B (2022) has 40 layers of 40 heads, a 70-billion Llama 80 layers with 8 KV heads, both with
# heads of size 128 in fp16. Which of them takes more cache a token?
# :::
#
# :::{dropdown} Reasoning
# Parameters do not enter. 40 × 40 = 1,600 layer-heads against 80 × 8 = 640: the model with a fifth
# of the weights keeps two and a half times the cache.
# :::
#
# Some models (DeepSeek V2 and V3) keep neither K nor V: each layer stores one **latent** vector,
# from which all heads rebuild theirs, and a short part that carries the position. That is
# multi-head latent attention (MLA): 512 + 64 numbers, one tensor a layer, so `tensors_per_layer` is
# 1.

# %%
models = {
    "70B class with GQA": KVSpec(80, 8, 128, "fp16"),
    "Llama 3 8B": llama,
    "OPT-13B": KVSpec(40, 40, 128, "fp16"),
    "quiz model": KVSpec(24, 4, 64, "fp16"),
    "SmolLM2-135M": KVSpec(30, 3, 64, "fp16"),
    "DeepSeek-V3": KVSpec(61, 1, 512 + 64, "bf16", tensors_per_layer=1),
    "DeepSeek-V2": KVSpec(60, 1, 512 + 64, "bf16", tensors_per_layer=1),
}
for name, spec in models.items():
    token, block = spec.bytes_per_token, spec.bytes_per_block(16)
    print(f"{name:20} {token:9,} B a token = {format_bytes(token):10}",
          f"block of 16: {block:10,} B = {format_bytes(block)}", sep="  ")

# %%
big, opt, mla = models["70B class with GQA"], models["OPT-13B"], models["DeepSeek-V3"]
print(f"OPT-13B against the 70B: {opt.bytes_per_token / big.bytes_per_token:.1f} times")
per_layer = big.elements_per_token // big.num_layers, mla.elements_per_token // mla.num_layers
print(f"elements per layer and token: GQA {per_layer[0]:,}, MLA {per_layer[1]}:",
      f"{per_layer[0] / per_layer[1]:.2f} times less")
print(f"MLA: {2 * per_layer[1]:,} B per layer and token = {format_bytes(2 * per_layer[1], 3)}")

# %% tags=["hide-input"]
expected = {  # bytes a token, bytes of a 16-token block
    "70B class with GQA": (327_680, 5 * MiB), "Llama 3 8B": (131_072, 2 * MiB),
    "OPT-13B": (819_200, 12.5 * MiB), "quiz model": (24_576, 384 * KiB),
    "SmolLM2-135M": (23_040, 360 * KiB), "DeepSeek-V3": (70_272, 1_124_352),
    "DeepSeek-V2": (69_120, 1_105_920),
}
for name, spec in models.items():
    assert (spec.bytes_per_token, spec.bytes_per_block(16)) == expected[name], name
assert per_layer == (2048, 576)

# %% [markdown]
# OPT-13B takes 2.5 times the bytes of the 70B. MLA keeps 3.56 times fewer numbers in a layer than
# the GQA model, which is itself eight times leaner than one KV head for each query head would be.

# %% [markdown]
# ## From a token to a chat
#
# Multiply by the length. A chat's cache grows for as long as it is talked to, and is read in full
# for every token it writes.

# %%
for name, spec, tokens in [
    ("Llama 3 8B", llama, 1000), ("Llama 3 8B", llama, 8192), ("Llama 3 8B", llama, 128 * 1024),
    ("OPT-13B", opt, 2048), ("OPT-13B", opt, 128 * 1024),
    ("70B class", big, 300), ("70B class", big, 4096),
]:
    print(f"{name:10}  {tokens:7,} tokens  {format_bytes(spec.bytes_for(tokens), 4)}")
print("ten Llama 3 8B chats of 8,192 tokens:", format_bytes(10 * llama.bytes_for(8192)))

# %% tags=["hide-input"]
assert llama.bytes_for(1000) == 125 * MiB and llama.bytes_for(8192) == GiB
assert llama.bytes_for(128 * 1024) == 16 * GiB and opt.bytes_for(128 * 1024) == 100 * GiB
assert opt.bytes_for(2048) == 1.5625 * GiB and big.bytes_for(4096) == 1.25 * GiB
assert big.bytes_for(300) == 93.75 * MiB

# %% [markdown]
# Llama 3 8B at its first full window of 8,192 tokens holds 1 GiB, exactly; ten such chats hold 10
# GiB.

# %% [markdown]
# ## Reserving for the longest
#
# A server does not know how long a chat will become. The simple answer is to reserve room for the
# longest one allowed. Take the 70B model, a limit of 4,096 tokens, and chats that really hold 300.
#
# :::{admonition} Predict
# :class: tip
# 50 GiB are left for the cache. How many chats get in when each reserves 4,096 tokens? How many if
# each took only the 16-token blocks that it fills?
# :::
#
# :::{dropdown} Reasoning
# A reservation is 1.25 GiB, so 40. In blocks: 300 tokens fill 18 and start a 19th; 19 blocks of 5
# MiB are 95 MiB, and 50 GiB have room for 538. The two counts differ by the ratio of the *limit* to
# the *use*, however much memory is bought.
# :::

# %% tags=["export:sizing"]
class SizedKV(Protocol):
    """Anything that can say how many bytes a sequence takes."""

    def bytes_for(self, num_tokens: int, block_size: int = 1) -> int:
        """Bytes of one sequence, in whole blocks of `block_size` tokens."""
        ...


@dataclass(frozen=True)
class Capacity:
    """Sequences that a memory admits, reserving against paging.

    Fields
        reserved      sequences, each taking room for the longest one allowed.
        paged         sequences, each taking the blocks that hold it.
        reserved_waste, paged_waste  share of a sequence's memory that holds no token, 0 to 1.
    """

    reserved: int
    paged: int
    reserved_waste: float
    paged_waste: float


# %% tags=["export:sizing"]
def capacity(
    kv: SizedKV, memory_bytes: int, num_tokens: int, max_tokens: int, block_size: int = 16
) -> Capacity:
    """Count the sequences of `num_tokens` tokens that `memory_bytes` admits both ways.

    Args: `max_tokens`, what a reservation is made for; at least `num_tokens`.
    """
    num_tokens = at_least(1, "num_tokens", num_tokens)
    max_tokens = at_least(num_tokens, "max_tokens", max_tokens)
    memory_bytes = at_least(0, "memory_bytes", memory_bytes)
    held = kv.bytes_for(num_tokens)
    reserved, paged = kv.bytes_for(max_tokens), kv.bytes_for(num_tokens, block_size)
    return Capacity(
        reserved=memory_bytes // reserved,
        paged=memory_bytes // paged,
        reserved_waste=1 - held / reserved,
        paged_waste=1 - held / paged,
    )


# %%
both = capacity(big, 50 * GiB, num_tokens=300, max_tokens=4096)
print(f"reserving: {both.reserved} chats of {format_bytes(big.bytes_for(4096))},",
      f"{both.reserved_waste:.2%} of each empty".replace("%", " %"))
print(f"           all {both.reserved} hold {format_bytes(both.reserved * big.bytes_for(300))}",
      f"of {format_bytes(50 * GiB)}")
print(f"in blocks: {both.paged} chats of {big.blocks_for(300, 16)} blocks of",
      f"{format_bytes(big.bytes_per_block(16))}, {format_bytes(big.bytes_for(300, 16))} together,",
      f"{both.paged_waste:.2%} of each empty".replace("%", " %"))
print(f"           {both.paged / both.reserved:.2f} times as many")
assert (both.reserved, both.paged) == (40, 538)

# %% [markdown]
# Each reservation is 92.68 % empty. The 40 chats fill the card on paper and hold 3.66 GiB in fact.
# In blocks 13.45 times as many get in, and 1.32 % of what they hold is empty. (A count of
# admissions is a memory effect. How fast 538 chats are then served is another question, for chapter
# 13.)
#
# **Turn the knob.** Set `num_tokens` to 4,096 as well; expect 40 both ways. Paging wins exactly
# what reservation leaves empty, and nothing where chats use their limit.

# %%
print(capacity(big, 50 * GiB, num_tokens=4096, max_tokens=4096))

# %% [markdown]
# ## Blocks, and their unfinished tails
#
# So memory is cut into blocks of `block_size` tokens, and a chat takes one when it needs one. Three
# chats go through this book: A, B and C, here with 6, 3 and 5 tokens, in blocks of 4. The list that
# says which blocks hold a chat, in order, is its **block table**.

# %%
from paged_kv.draw import book_style, draw_pool

lengths = {"A": 6, "B": 3, "C": 5}
tables = {"A": [0, 1], "B": [2], "C": [3, 4]}
picture = draw_pool({"block_size": 4, "num_blocks": 8, "free": [5, 6, 7], "tables": tables,
                     "seq_lens": lengths, "ref_counts": [1, 1, 1, 1, 1, 0, 0, 0]})
picture

# %% [markdown]
# Only the last block of a chat can have empty slots. Everything before it is full.

# %% tags=["export:sizing"]
def tail_waste(num_tokens: int, block_size: int) -> int:
    """Slots left empty in the last block of a sequence of `num_tokens` tokens."""
    return blocks_for(num_tokens, block_size) * block_size - num_tokens


def expected_tail_waste(block_size: int) -> float:
    """Mean of `tail_waste` over sequences that end anywhere in a block: (B - 1) / 2."""
    return (at_least(1, "block_size", block_size) - 1) / 2


# %%
wasted = {chat: tail_waste(tokens, 4) for chat, tokens in lengths.items()}
print("empty slots:", wasted, "sum", sum(wasted.values()))
assert wasted == {"A": 2, "B": 1, "C": 3}
assert all(len(tables[chat]) == blocks_for(tokens, 4) for chat, tokens in lengths.items())

# %% [markdown]
# A sequence may end on any of the $B$ slots of its last block. If each is as likely as the next,
# the empty ones are 0, 1, ..., $B - 1$ in number, $(B - 1)/2$ on average: chats in blocks of 16
# waste 7.5 slots, whatever their length. Below, a mean over all lengths up to 1,600 gives the
# formula back.

# %%
for block_size in (1, 4, 16):
    mean = np.mean([tail_waste(n, block_size) for n in range(1, 1601)])
    print(f"B = {block_size:2}: mean {mean}, formula {expected_tail_waste(block_size)}")
    assert mean == expected_tail_waste(block_size)

# %% [markdown]
# ## The knee
#
# Small blocks waste less and need a longer table; attention has to look up every entry of it, once
# per block it reads. For a chat of 300 tokens:
#
# :::{admonition} Predict
# :class: tip
# You halve the block size from 16 to 8. What happens to the expected waste, to the *actual* waste
# of exactly 300 tokens, and to the table?
# :::
#
# :::{dropdown} Reasoning
# Expected waste falls from 7.5 to 3.5 slots, and the table doubles from 19 entries to 38. But 300 =
# 18 × 16 + 12 = 37 × 8 + 4: both leave 4 slots empty. This one chat gains nothing. An expectation
# says what many chats cost on average, and nothing about one.
# :::

# %%
print("  B   expected waste    of 300     actual   table entries")
knee = {}
for block_size in (8, 16, 32, 64, 128):
    mean, entries = expected_tail_waste(block_size), blocks_for(300, block_size)
    actual = tail_waste(300, block_size)
    knee[block_size] = (mean, actual, entries)
    print(f"{block_size:3} {mean:12} {round(100 * mean / 300, 2):13} % {actual:8} {entries:12}")

# %% tags=["hide-input"]
assert knee == {8: (3.5, 4, 38), 16: (7.5, 4, 19), 32: (15.5, 20, 10),
                64: (31.5, 20, 5), 128: (63.5, 84, 3)}
assert [round(100 * knee[b][0] / 300, 2) for b in knee] == [1.17, 2.5, 5.17, 10.5, 21.17]

# %% tags=["hide-input"]
import matplotlib.pyplot as plt

book_style()
sizes = [2**power for power in range(9)]
figure, axis = plt.subplots(figsize=(7, 3.6))
axis.plot(sizes, [100 * expected_tail_waste(b) / 300 for b in sizes], "o-", color="#0072B2")
axis.plot(sizes, [100 * tail_waste(300, b) / 300 for b in sizes], "x", color="#D55E00")
axis.set(xscale="log", xticks=sizes, xticklabels=sizes, xlabel="block size B (tokens)",
         ylabel="empty slots, % of 300 tokens")
axis.minorticks_off()
other = axis.twinx()
other.plot(sizes, [blocks_for(300, b) for b in sizes], "s--", color="#009E73")
other.set_ylabel("block table entries")
other.grid(False)
figure.legend(["expected waste (left)", "actual waste of 300 (left)", "table entries (right)"],
              loc="upper center", bbox_to_anchor=(0.5, 1.08), ncols=3, frameon=False)
plt.show()

# %% [markdown]
# *Figure: a chat of 300 tokens at block sizes from 1 to 256. Expected waste rises in proportion to
# the block size, the block table falls in inverse proportion; the actual waste of 300 tokens jumps
# about the expectation. Around 16 both are small.*
#
# Going from 1 to 16 shortens the table from 300 entries to 19 and is expected to waste 2.5 % of the
# tokens' memory; going on to 128 saves sixteen more entries and wastes 21.17 %. That corner is why
# 16 is a common default. It depends on the length: long chats dilute a tail, so they bear larger
# blocks.
#
# It depends on the model too. A tail is counted in slots and paid for in bytes: the expected one of
# 7.5 slots is 2.34 MiB in the 70B model, and 514.69 KiB in DeepSeek-V3, whose token takes 68.62 KiB.
# The latent may have blocks 4.66 times as long before its tails cost as many bytes.
#
# **Turn the knob.** Set the length to 3,000; expect every percentage to shrink tenfold and the knee
# to move right.

# %% tags=["hide-input"]
for name, spec in (("70B class", big), ("DeepSeek-V3", mla)):
    tail = expected_tail_waste(16) * spec.bytes_per_token
    print(f"{name}: {format_bytes(spec.bytes_per_token)} a token, tail {format_bytes(tail)}")
print(f"{big.bytes_per_token / mla.bytes_per_token:.2f} times")
for block_size in (16, 128):
    print(f"3,000 tokens, B = {block_size}: {100 * expected_tail_waste(block_size) / 3000:.2f} %")

# %% [markdown]
# ## What the table itself costs
#
# A table entry is an int32, four bytes. It guards a block of megabytes.

# %%
for label, tokens in [("4,096", 4096), ("128 Ki", 128 * 1024), ("10^6", 10**6), ("2^20", 2**20)]:
    entries, guarded = big.blocks_for(tokens, 16), big.bytes_for(tokens)
    digits = 1 if tokens > 10**5 else 2
    print(f"{label:7} tokens: {entries:6,} entries = {4 * entries:7,} B =",
          f"{format_bytes(4 * entries):10} guarding {format_bytes(guarded, digits)}")

# %% tags=["hide-input"]
table_bytes = [4 * big.blocks_for(n, 16) for n in (4096, 128 * 1024, 10**6, 2**20)]
assert table_bytes == [KiB, 32 * KiB, 250_000, 256 * KiB]

# %% [markdown]
# 1 KiB of table guards 1.25 GiB of cache, about a millionth of it. The space is free; what a table
# can cost is *time*, one dependent read per block, which chapter 11 measures. At a million tokens
# that is 62,500 entries for each layer and KV head that walks them: a coarser block would shorten
# the walk, and how to have both is an open question of this book.

# %% [markdown]
# ## Mistakes in circulation
#
# Sums like these are widely copied, slips included. Each line has a wrong value, struck, and the
# right one, which the cell below computes.
#
# :::{admonition} Check it yourself
# :class: warning
# - 300 tokens of the 70B model take ~~92 MiB, so a 4,096-token reservation wastes 92.8 %~~ 93.75
#   MiB, and it wastes 92.68 %.
# - 50 GiB hold ~~2,700 such chats~~ 538, in blocks of 16.
# - $10^6$ tokens at 320 KiB take ~~320 GiB~~ 305.2 GiB; 320 GiB is $2^{20}$ tokens.
# - Blocks of 8 need ~~4 times the table entries~~ 2.0 times the entries of blocks of 16: 38 against
#   19.
# - MLA keeps ~~1.15 KiB~~ 1.125 KiB per layer and token, which is 1,152 B: a kB is no KiB.
# - A context of 128 Ki tokens costs OPT-13B ~~16 GiB~~ 100 GiB. The smaller number is Llama 3 8B.
# :::

# %%
waste = 100 * capacity(big, GiB, 300, 4096).reserved_waste
print(f"1  {format_bytes(big.bytes_for(300))}, {waste:.2f} %")
print(f"2  {big.blocks_in(50 * GiB, 16):,} blocks / {big.blocks_for(300, 16)} =",
      big.blocks_in(50 * GiB, 16) // big.blocks_for(300, 16), "in 50 GiB")
print(f"3  {format_bytes(big.bytes_per_token)} x 10^6 = {format_bytes(big.bytes_for(10**6), 1)},",
      f"x 2^20 = {format_bytes(big.bytes_for(2**20), 1)}")
print(f"4  {blocks_for(300, 8) / blocks_for(300, 16):.1f} times")
print(f"5  {2 * (512 + 64):,} B, which is {format_bytes(2 * (512 + 64), 3)}")
print(f"6  OPT-13B {format_bytes(opt.bytes_for(128 * 1024))},",
      f"Llama 3 8B {format_bytes(llama.bytes_for(128 * 1024))}")

# %% [markdown]
# ## Before you rent a GPU
#
# Memory caps users, not only speed. So do this sum first; it is four lines. Weights take two bytes
# a parameter in bf16, about 16 GB for 8 billion. Leave a tenth of the card to activations and the
# runtime. The rest is cache, and the cache divided by what *one user really holds* is the number of
# users at a time.

# %%
for card in ("24 GB", "48 GB", "80 GB"):
    for_kv = int(0.9 * parse_bytes(card)) - 2 * 8_030_000_000  # Llama 3 8B has 8.03e9 parameters
    one = capacity(llama, for_kv, num_tokens=1500, max_tokens=8192)
    print(f"{card}: {format_bytes(for_kv, 1):8} for KV, {llama.blocks_in(for_kv, 16):6,} blocks;",
          f"{one.reserved:3} users reserving 8,192 tokens, {one.paged:3} paged at 1,500")

# %% tags=["hide-input"]
for_54 = llama.blocks_in(54 * GiB, 16)
print(f"54 GiB for KV: {for_54:,} blocks of {format_bytes(llama.bytes_per_block(16))}",
      f"= {16 * for_54:,} tokens")
print(f"weights: {format_bytes(2 * 8_030_000_000, 0, decimal=True)};",
      f"ten chats of 8,192 tokens: {format_bytes(10 * llama.bytes_for(8192))}")
older, newer = KVSpec(95, 8, 128), models["DeepSeek-V2"]  # DeepSeek 67B has 95 layers of 8 KV heads
for bits in (16, 6):
    share = bits * newer.elements_per_token / (16 * older.elements_per_token)
    print(f"DeepSeek-V2 with {bits:2} bits a number, against DeepSeek 67B with 16:",
          f"{100 * (1 - share):.1f} % less")
assert for_54 == 27_648 and 16 * for_54 == 442_368

# %% [markdown]
# Three things follow for anyone who buys or builds. A model's weights say little about its cache:
# look up layers and KV heads before its parameter count. A server that pages (vLLM, SGLang,
# TensorRT-LLM) turns the mean length into users, where one that reserves turns the limit into
# users. And a cache of a smaller dtype or a latent (MLA) is worth as much as a larger card: the
# DeepSeek-V2 report puts its saving at 93.3 % against DeepSeek 67B {cite}`deepseek2024v2`. That is
# often read as the gain of MLA over one KV head for each query head. It is not: the older model
# shares its heads already, and the newer one is served with 6 bits a number. By our sum the latent
# alone saves 82.2 %, and with 6 bits 93.3 %.
#
# The command `paged-kv size` does this sum for any model's own configuration file (appendices A2
# and A3).

# %% [markdown]
# ## State card
#
# | | |
# |---|---|
# | `KVSpec` | frozen: `num_layers`, `num_kv_heads`, `head_size`, `dtype`, `tensors_per_layer` |
# | its sums | `bytes_per_token`, `bytes_per_block`, `bytes_for`, `blocks_for`, `blocks_in` |
# | `capacity` | sequences that a memory admits, reserving and in blocks: `Capacity` |
# | units | `KiB` ... `TiB`, `kB` ... `TB`, `format_bytes`, `parse_bytes` |
# | invariants | a token's row fills whole bytes; only the last block of a sequence has empty slots, at most `block_size - 1` |
# | what breaks next | a reservation cannot be moved or shared out once a reader points at it (chapter 02) |

# %% [markdown]
# ## Real world
#
# - **vLLM** derives the same sum for each layer: `vllm/v1/kv_cache_interface.py` has one spec class
#   for each kind of attention (full, sliding window, MLA) with a page size in bytes;
#   `vllm/v1/core/kv_cache_utils.py` divides the memory left after a trial run by it. Its documents
#   say "block" as we do.
# - **SGLang** sizes its pools by token in `python/sglang/srt/mem_cache/memory_pool.py`, MHA and MLA
#   apart; its page size may be 1.
# - **TensorRT-LLM** keeps blocks in C++ (`cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp`) and
#   takes the share of free memory to use as a setting.
#
# All three measure what is left after the weights instead of estimating it. A sum like ours is for
# the day before.

# %% [markdown]
# ## Exercises
#
# :::{exercise}
# :label: ex-01-quiz
# *Compute.* The quiz model has 24 layers, 4 KV heads and heads of size 64, in fp16. How many bytes
# do 2,000 tokens take?
# :::
#
# :::{solution} ex-01-quiz
# :class: dropdown
# 2 × 24 × 4 × 64 × 2 B = 24,576 B a token, so 49,152,000 B, which is 46.875 MiB.
# :::

# %% tags=["hide-input"]
quiz = models["quiz model"]
assert quiz.bytes_for(2000) == 49_152_000
print(f"{quiz.bytes_per_token:,} B a token; {quiz.bytes_for(2000):,} B;",
      f"2 B an element; {format_bytes(quiz.bytes_for(2000), 3)}")

# %% [markdown]
# :::{exercise}
# :label: ex-01-trace
# *Trace.* Chat A has 6 tokens in blocks of 4 and grows by one token five times. Write down its
# number of blocks and its empty slots after each token. At which tokens does it take a block?
# :::
#
# :::{solution} ex-01-trace
# :class: dropdown
# 7: 2 and 1. 8: 2 and 0. 9: 3 and 3. 10: 3 and 2. 11: 3 and 1. It takes a block for token number 9,
# the first after a full block.
# :::

# %% tags=["hide-input"]
trace = [(blocks_for(n, 4), tail_waste(n, 4)) for n in range(7, 12)]
assert trace == [(2, 1), (2, 0), (3, 3), (3, 2), (3, 1)]
print(trace)

# %% [markdown]
# :::{exercise}
# :label: ex-01-break
# *Break.* Take the causal mask away (`future[:] = 0`) and compare the text of `generate` with that
# of `naive_generate` over 20 steps. Why do they part?
# :::
#
# :::{solution} ex-01-break
# :class: dropdown
# Without the mask, a new token changes what older tokens see in layer 1, hence their K/V in layer
# 2. The cache still holds the old ones. The first steps may agree by luck; the pairs do not.
# :::

# %% tags=["hide-input"]
causal = future.copy()
future[:] = 0
seeing_all, cached = naive_generate(20)[0], generate(20)[0]
future[:] = causal
again = naive_generate(20)[0] == generate(20)[0]
print("without the mask:", seeing_all == cached, " with it again:", again)
assert seeing_all != cached and again

# %% [markdown]
# :::{exercise}
# :label: ex-01-fit
# *Implement.* Write `largest_context(spec, memory_bytes, block_size)`: the longest single sequence
# that a memory holds. How long is it for Llama 3 8B in 10 GiB and in 10 GB, with blocks of 16
# tokens and of 1,024?
# :::
#
# :::{solution} ex-01-fit
# :class: dropdown
# Whole blocks times the block size. In 10 GiB both block sizes hold 81,920 tokens, since both
# divide it evenly. 10 GB do not come out even: 76,288 tokens in blocks of 16, and 75,776 in blocks
# of 1,024.
# :::

# %% tags=["hide-input"]
def largest_context(spec, memory_bytes, block_size):
    return spec.blocks_in(memory_bytes, block_size) * block_size


for memory in ("10 GiB", "10 GB"):
    longest = [largest_context(llama, parse_bytes(memory), b) for b in (16, 1024)]
    print(f"{memory}: {longest} tokens")
assert longest == [76_288, 75_776]

# %% [markdown]
# :::{exercise}
# :label: ex-01-knee
# *Compute.* For which block size is the sum of expected waste (in slots) and table entries
# smallest, for a chat of $n$ tokens? Treat both as continuous, then check $n = 300$ and 3,000 by
# trying all sizes.
# :::
#
# :::{solution} ex-01-knee
# :class: dropdown
# $(B-1)/2 + n/B$ has its minimum at $B = \sqrt{2n}$: about 24 for 300 tokens, 77 for 3,000.
# Rounding up moves it a little. The weights of the two costs are a choice: a slot is memory, an
# entry is time.
# :::

# %% tags=["hide-input"]
for n in (300, 3000):
    best = min(range(1, 513), key=lambda b: expected_tail_waste(b) + blocks_for(n, b))
    print(f"n = {n}: sqrt(2n) = {(2 * n) ** 0.5:.1f}, smallest sum at B = {best}")
    assert abs(best - (2 * n) ** 0.5) < 6

# %% [markdown]
# :::{exercise}
# :label: ex-01-sliding
# *Implement.* Half of a model's 36 layers (8 KV heads of size 64, 16 bits) attend to the last 128
# tokens only. Build its cache out of two `KVSpec`s. How many bytes for one token, and for 8,192
# tokens if the sliding layers keep only their window?
# :::
#
# :::{solution} ex-01-sliding
# :class: dropdown
# Sliding layers keep their first token as the others do: one token is 73,728 B. From token 129 on
# they stop growing. Appendix A3 does this for any model, and says which of the two allocation
# policies it assumed.
# :::

# %% tags=["hide-input"]
full, sliding = KVSpec(18, 8, 64), KVSpec(18, 8, 64)
windowed = full.bytes_for(8192) + sliding.bytes_for(min(8192, 128))
assert full.bytes_for(1) + sliding.bytes_for(1) == 73_728
print(f"{full.bytes_for(1) + sliding.bytes_for(1):,} B; {format_bytes(windowed)} in place of",
      format_bytes(2 * full.bytes_for(8192)))

# %% [markdown]
# ## Further reading
#
# From gentle to deep.
#
# - Multi-query attention, the first to share KV heads {cite}`shazeer2019mqa`, and GQA, the
#   compromise that most models now use {cite}`ainslie2023gqa`.
# - The PagedAttention paper, sections 2 and 3, for the sums of OPT-13B in its authors' words
#   {cite}`kwon2023paged`.
# - DeepSeek-V2, section 2.1, for MLA {cite}`deepseek2024v2`.
# - Chapter 02, for what a contiguous reservation does to a memory over time.
