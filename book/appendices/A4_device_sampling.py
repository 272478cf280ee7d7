# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A4 Sampling on the device
#
# In every step a server draws one token for each chat of its batch. The obvious way is one call of
# `torch.multinomial` for all of them. Here a model of twelve words, in which the last word alone
# decides about the next, talks to chat A: alone, then in company. Same seed, same probabilities.

# %% tags=["hide-input"]
import os
import warnings

import torch

warnings.filterwarnings("ignore", message="IProgress not found")  # we show no progress bars
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels run in Triton's interpreter

# %%
WORDS = "the cat sat on a warm mat and then it ran off".split()
MODEL = 2 * torch.randn(12, 12, generator=torch.Generator().manual_seed(4))  # a row a last word


def naive_serve(chats, steps=7):
    generator = torch.Generator().manual_seed(1)
    texts = {name: [0] for name in chats}
    for _ in range(steps):
        logits = MODEL[[text[-1] for text in texts.values()]]
        chosen = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        for text, token in zip(texts.values(), chosen[:, 0].tolist()):
            text.append(token)
    return texts


def words(text):
    return " ".join(WORDS[token] for token in text)


for chats in ("A", "AB", "CBA"):
    print(f"A in {chats:3}:", words(naive_serve(chats)["A"]))

# %% [markdown]
# Nobody asked A anything else. The generator deals its numbers out over the batch, so with another
# row beside it A gets other numbers. In a server the company changes with every step: no text can
# be repeated, no fault report replayed. The loop has a second fault. It reads the tokens with `.tolist()`, and for that the host stands still until
# the device has finished the step.
#
# **The question.** Can each row of a batch get its own token by its own rules, so that neither its
# company nor the host's haste shows in the text?
#
# :::{card} This chapter
# - **You need**: what logits and softmax are; [chapter 07](../07_sampling_and_beams), which does
#   the same for one sequence on the host; for two sections, [chapter 11](../11_triton_decode).
# - **Exports**: `sampling_params` (`SamplingOptions`), `keyed_noise` (`draw_tokens`), `draw_kernel`,
#   `token_cuts` (`cut_tokens`), `shape_kernels`, `row_settings`, `device_sampling` (`DeviceSampler`).
# - **Device**: any CUDA GPU, or a CPU, where the kernels run in Triton's interpreter. The
#   measurements are an H200's.
# - **Run time**: half a minute.
# - **You are here**: chapters 00 to 14 · labs · appendices: A1 drawing · A2 command line ·
#   A3 real configs · **A4 device sampling**
# :::
#
# ## What a row asks for
#
# A request brings up to nine numbers. They act in the order of transformers (whose only penalty is the
# repetition penalty):
#
# 1. penalties change the logits of tokens that were seen before;
# 2. the temperature divides the logits;
# 3. top-k, then top-p, then min-p cut unlikely tokens off;
# 4. the draw, by seed and place.
#
# Log-probabilities stand outside: they are of what the model said, before step 1, as vLLM reports
# them unless told otherwise.

# %% tags=["export:sampling_params"]
"""What a request asks of the choice of its tokens, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real

RANGES: dict[str, tuple[type, float, float, str]] = {
    "temperature": (Real, 1e-6, 1e6, "0 (greedy), or 1e-6 to 1e6"),
    "top_k": (Integral, 0, 2**31 - 1, "an integer, 0 (off) to 2147483647"),
    "top_p": (Real, 1e-9, 1, "a number from 1e-9 to 1 (off)"),
    "min_p": (Real, 0, 1, "a number from 0 (off) to 1"),
    "repetition_penalty": (Real, 0.01, 100, "a number from 0.01 to 100 (1 is off)"),
    "presence_penalty": (Real, -2, 2, "a number from -2 to 2 (0 is off)"),
    "frequency_penalty": (Real, -2, 2, "a number from -2 to 2 (0 is off)"),
    "seed": (Integral, 0, 2**64 - 1, "None, or an integer from 0 to 2**64 - 1"),
    "logprobs": (Integral, 0, 20, "None, or an integer from 0 to 20"),
}


# %% tags=["export:sampling_params"]
@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How the tokens of one request are chosen.

    Fields
        temperature         what the noise is scaled by: 0 (greedy), or 1e-6 to 1e6.
        top_k               keep the k likeliest tokens and what ties with the last; 0 keeps all.
        top_p               keep the likeliest tokens that together reach it; above 0, up to 1.
        min_p               keep tokens at least this share as likely as the likeliest; 0 to 1.
        repetition_penalty  divides (multiplies, if negative) logits of tokens seen; 0.01 to 100.
        presence_penalty    subtracted once from the logit of a generated token; -2 to 2.
        frequency_penalty   subtracted for each time it was generated; -2 to 2.
        seed                of the request, 0 to 2**64 - 1; None: somebody has yet to draw one.
        logprobs            None: none; 0: of the chosen token; k up to 20: of the k likeliest too.
    Raises: ValueError naming the field, its value and what is allowed.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, (kind, low, high, said) in RANGES.items():
            value = getattr(self, name)
            if value is None and name in ("seed", "logprobs"):
                continue
            number = isinstance(value, kind) and not isinstance(value, bool)
            if not number or not (low <= value <= high or (name == "temperature" and value == 0)):
                raise ValueError(f"{name} = {value!r}: must be {said}")


# %% tags=["export:sampling_params", "hide-input"]
class SamplingOptions(SamplingOptions):  # type: ignore
    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, without a draw."""
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        """Whether unlikely tokens are cut off first; greedy rows never need it."""
        return not self.greedy and bool(self.top_k or self.top_p < 1 or self.min_p)

    @property
    def penalises(self) -> bool:
        """Whether the choice depends on the tokens so far."""
        added = self.presence_penalty or self.frequency_penalty
        return bool(added) or self.repetition_penalty != 1

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities are asked for."""
        return self.logprobs is not None


SamplingParams = SamplingOptions  # the field's name; paged_kv itself lists chapter 07's under it

# %% [markdown]
# A number out of its range is refused when the request is made, not in the middle of a batch. NaN
# fails every comparison, and `True` is not taken for 1.

# %%
for wrong in ({"top_p": 0}, {"temperature": float("nan")}, {"top_k": True}):
    try:
        SamplingOptions(**wrong)
    except ValueError as error:
        print(error)

# %% [markdown]
# ## Temperature is the volume of the noise
#
# Drawing looks sequential: sum up probabilities until a random number is passed. There is a way in
# which every token acts alone. Give each token a clock that rings after a random, exponentially
# distributed time, at a rate that is the token's probability. Who rings first? Token $i$ with
# probability $p_i$, exactly, since rates of exponential clocks add up.
#
# Take logarithms. With $E_i$ the waiting time of a clock of rate 1, the first to ring is the largest
# of $\log p_i - \log E_i$. The noise $g_i = -\log E_i$ is called Gumbel noise. Softmax only subtracts
# a constant from the logits $x_i$, which the comparison does not see, and a temperature $T$ divides
# them. Multiplied by $T$, the token is
#
# $$ \arg\max_i \; x_i + T \, g_i $$
#
# No sum, no softmax, no division: an addition and a maximum, in any order, in pieces of any size.
#
# :::{admonition} Predict
# :class: tip
# Most samplers treat temperature 0 apart, for it would divide by zero. What does the formula give
# for $T = 0$? And for a $T$ of a million?
# :::
#
# :::{dropdown} Reasoning
# $T = 0$ silences the noise: the largest logit wins, which is greedy, and no branch is needed. At a
# million the logits are whispers beside the noise, and all tokens come equally often.
# :::

# %%
logits = torch.tensor([2.0, 1.0, 0.0])
waits = -torch.rand(30000, 3, generator=torch.Generator().manual_seed(0)).log()
for temperature in (0, 0.5, 1, 1e6):
    chosen = (logits - temperature * waits.log()).argmax(-1)
    often = chosen.bincount(minlength=3) / len(chosen)
    right = (logits / temperature).softmax(-1) if temperature else torch.tensor([1.0, 0, 0])
    print(f"T = {temperature:<9g} drawn {often.numpy().round(3)}  softmax {right.numpy().round(3)}")
    assert (often - right).abs().max() < 0.01

# %% [markdown]
# **Turn the knob.** Add 100 to all logits; expect the same tokens, each one of them.
#
# ## Random numbers that are looked up
#
# A generator is *state*: what it gives next depends on what it gave before. The noise of one token of
# one row needs no past. Let it be a *function* of what it is for:
#
# | part of the key | why it is there |
# |---|---|
# | seed of the request | two requests differ |
# | index of the sample | n answers to one prompt differ |
# | position the new token will take | two steps differ |
# | id of the token | tokens of the vocabulary differ |
#
# The row, the batch, the step and the device are absent. A chat that is moved, preempted, split into
# chunks or padded looks up the same numbers.
#
# The function has to be cheap, since it is asked once for each token of the vocabulary, and the same
# everywhere. `mix32` scrambles a 32-bit word by shifts, xors and two multiplications; each step can be
# undone, so no two words collide. The words live in int64, and no product overflows, so the bits are
# those of Python's own integers on any device.

# %% tags=["export:keyed_noise"]
"""Random numbers that are looked up, not drawn: by seed, sample, position and token."""

from __future__ import annotations

import struct
from hashlib import blake2b

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
CHUNK = 1 << 14  # tokens of the vocabulary that are looked at together


def mix32(x: Tensor) -> Tensor:
    """Scramble 32-bit words held in int64; a bijection, the same bits on every device.

    No product overflows: a word is below 2**32 and both factors are below 2**31.
    """
    x = x ^ (x >> 16)
    x = (x * 0x21F0AAAD) & MASK
    x = x ^ (x >> 15)
    x = (x * 0x735A2D97) & MASK
    return x ^ (x >> 15)


# %% [markdown]
# The key is used in three stages, each as seldom as possible. Seed and sample are hashed once, on the
# host, when a row is opened. The position turns that into a summand and a factor once a step and row.
# Only the last line runs for every token: its scrambled id, times the factor, plus the summand,
# scrambled again.

# %% tags=["export:keyed_noise"]
def row_key(seed: int, sample_index: int) -> tuple[int, int, int, int]:
    """Four 32-bit words that stand for one sample of one request, made on the host."""
    digest = blake2b(struct.pack("<QQ", seed, sample_index), digest_size=16).digest()
    first, second, third, fourth = struct.unpack("<4I", digest)
    return first, second, third, fourth


def position_keys(keys: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """A summand and an odd factor, each [S, 1], for each row's place in its text.

    Args: `keys` int64 [S, 4], each row a `row_key`; `positions` int64 [S].
    """
    place = (positions & MASK)[:, None]
    pair = mix32(mix32(place ^ keys[:, 0:2]) ^ keys[:, 2:4])
    return pair[:, :1], pair[:, 1:] >> 1 | 1


def noise_words(summand: Tensor, factor: Tensor, ids: Tensor) -> Tensor:
    """Uniform 32-bit words [S, n] in int64 for tokens `ids` [n]; summand, factor [S, 1]."""
    return mix32((mix32(ids) * factor + summand) & MASK)


# %% [markdown]
# A word becomes a uniform number, and that a waiting time. Here is a trap. Who wins is decided among
# *short* waits, of about one over the size of the vocabulary. Computed as $-\log u$, a short wait needs
# $u$ close to 1, where float32 has a step of $2^{-24}$: among 128,256 tokens those that decide would share
# some hundred values. Computed as $-\log(1 - u)$ it needs $u$ close to 0, where floats are finest.

# %% tags=["export:keyed_noise"]
def gumbel(words: Tensor) -> Tensor:
    """Gumbel noise, float32, of uniform words: minus the log of an exponential waiting time.

    The uniform number is (word + 1/2) / 2**32, finest near 0, where short waits come from.
    """
    uniform = ((words.float() + 0.5) * 2**-32).clamp(max=1 - 2**-24)
    return -torch.log(-torch.log1p(-uniform))


def draw_tokens(logits: Tensor, temperature: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    """Choose a token a row: the largest of logit + temperature x noise.

    Args: `logits` [S, V], any float; `temperature` float32 [S], 0 is greedy; `keys` int64 [S, 4];
    `positions` int64 [S].  Returns: int64 [S]; -1 where a row has NaN or nothing finite.
    """
    summand, factor = position_keys(keys, positions)
    best = torch.full((len(logits),), -torch.inf, device=logits.device)
    tokens = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    for start in range(0, logits.shape[1], CHUNK):
        part = logits[:, start : start + CHUNK].float()
        ids = torch.arange(start, start + part.shape[1], device=logits.device)
        noise = gumbel(noise_words(summand, factor, ids))
        score, at = (part + temperature[:, None] * noise).max(-1)
        better = (score > best) | score.isnan()
        best = torch.where(better, score, best)
        tokens = torch.where(better, at + start, tokens)
    return tokens.masked_fill(~best.isfinite(), -1)


# %% [markdown]
# NaN needs no test of its own: a maximum over numbers with a NaN among them is NaN, and stays so. A row
# whose best is not finite gets -1, and the engine ends that request while the others go on.
#
# :::{admonition} Predict
# :class: tip
# Chat A draws seven tokens. Then it draws three, is thrown out, and returns with those three as part of
# its prompt, last in a batch of three. Where do the two texts part?
# :::
#
# :::{dropdown} Reasoning
# Nowhere. The fourth token is drawn for position 4, whoever computed the first three and how.
# :::

# %%
SEEDS = {"A": 1, "B": 2, "C": 3}


def serve(chats, steps, texts=None, pick=draw_tokens):
    texts = texts or {name: [0] for name in chats}
    keys = torch.tensor([row_key(SEEDS[name], 0) for name in chats])
    for _ in range(steps):
        positions = torch.tensor([len(texts[name]) for name in chats])
        rows = MODEL[[texts[name][-1] for name in chats]]
        tokens = pick(rows, torch.ones(len(chats)), keys, positions)
        for name, token in zip(chats, tokens.tolist()):
            texts[name].append(token)
    return texts["A"]


alone = serve("A", 7)
begun = serve("A", 3)
resumed = serve("CBA", 4, {"C": [5, 5], "B": [3], "A": begun})
print("in one go:", words(alone))
print("resumed:  ", words(resumed))
assert alone == resumed

# %% [markdown]
# How good are the numbers? The tests look at uniformity of high, middle and low bits, at pairs, at
# correlation along tokens, positions, samples and seeds, and at what one changed bit changes. Here is one
# of them: a quarter of a million words in 256 bins. The chi-square statistic should lie within a few
# standard deviations of its mean.

# %%
def many_words(position, count=1 << 18, seed=7):
    keys = torch.tensor([row_key(seed, 0)])
    return noise_words(*position_keys(keys, torch.tensor([position])), torch.arange(count))[0]


for shift, bits in ((24, "high"), (12, "middle"), (0, "low")):
    bins = (many_words(5) >> shift & 255).bincount(minlength=256).double()
    off = (((bins - 1024) ** 2 / 1024).sum() - 255) / 510**0.5
    print(f"{bits:6} bits: {off:+.1f} standard deviations")
    assert abs(off) < 4
next_door = torch.stack([many_words(5).double(), many_words(6).double()])
print(f"correlation with the next position: {next_door.corrcoef()[0, 1]:+.4f}")

# %% [markdown]
# What is guaranteed: equal words, bit for bit, on any device. Their logarithm is the device's own and
# may differ in its last digit, so a token can differ between devices where two sums agree to seven
# digits. What is not: probabilities below $2^{-33}$, about one in eight billion, are smaller than the
# noise's own grain.
#
# ## In one reading of the logits
#
# On a GPU each operation of `draw_tokens` reads and writes a table of the size of the logits, and some twenty
# follow each other. A kernel does it in one reading. Its time should be that of reading the logits:

# %%
size = 256 * 128256 * 2
print(f"256 rows of 128,256 logits in bf16: {size / 2**20:.1f} MiB, "
      f"{size / 4.8e12 * 1e6:.0f} us at an H200's 4.8 TB/s")

# %% tags=["export:draw_kernel"]
"""Noise, temperature and the largest sum in one reading of the logits: a kernel."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from paged_kv.triton_device import jit, limits_of, tl

TILE_TOKENS = 1024  # tokens that a program looks at together
PROGRAMS = 8  # for each multiprocessor
MOST_PARTS = 128  # shares of a row, each a program


@jit
def mixed32(x):
    """`mix32` of 32-bit words that are really 32 bits wide."""
    x = x ^ (x >> 16)
    x = x * 0x21F0AAAD
    x = x ^ (x >> 15)
    x = x * 0x735A2D97
    return x ^ (x >> 15)


@jit
def gumbel_of(words):
    """`gumbel`, with a series where 1 - uniform would lose the digits that decide."""
    u = tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    tail = 1 / 4 + u * (1 / 5 + u * (1 / 6 + u * (1 / 7)))
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * tail)))
    return -tl.log(tl.where(u < 0.0625, series, -tl.log(1 - u)))


@jit
def key_word(settings, row, WIDTH: tl.constexpr, at: tl.constexpr):
    """One word of a row's key, which stands among its settings as a float64."""
    return tl.load(settings + row * WIDTH + at).to(tl.int64).to(tl.uint32)

# %% tags=["export:draw_kernel"]
@jit(do_not_specialize=["vocab", "share"])
def draw_kernel(
    logits, stride, vocab, settings, rows, positions, values, ids, share,
    WIDTH: tl.constexpr, KEY: tl.constexpr, TILE: tl.constexpr,
):
    """The best of `share` tokens of one row: its sum (NaN if any is), and its id."""
    line, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.maximum(tl.load(rows + line), 0)
    place = tl.load(positions + line).to(tl.uint32)
    temperature = tl.load(settings + row * WIDTH).to(tl.float32)
    summand = mixed32(place ^ key_word(settings, row, WIDTH, KEY))
    summand = mixed32(summand ^ key_word(settings, row, WIDTH, KEY + 2))
    factor = mixed32(place ^ key_word(settings, row, WIDTH, KEY + 1))
    factor = (mixed32(factor ^ key_word(settings, row, WIDTH, KEY + 3)) >> 1) | 1
    lanes = tl.arange(0, TILE)
    best = tl.full((TILE,), float("-inf"), tl.float32)
    at = tl.zeros((TILE,), tl.int32)
    for start in range(part * share, tl.minimum((part + 1) * share, vocab), TILE):
        token = start + lanes
        x = tl.load(logits + line * stride + token, mask=token < vocab, other=float("-inf"))
        score = x.to(tl.float32)
        if temperature > 0:
            words = mixed32(mixed32(token.to(tl.uint32)) * factor + summand)
            score += temperature * gumbel_of(words)
        better = (score > best) | (score != score)
        best, at = tl.where(better, score, best), tl.where(better, token, at)
    broken = tl.max((best != best).to(tl.int32), 0)
    top = tl.max(tl.where(best == best, best, float("-inf")), 0)
    first = tl.min(tl.where(best == top, at, vocab), 0)
    out = line * tl.num_programs(1) + part
    tl.store(values + out, tl.where(broken > 0, float("nan"), top))
    tl.store(ids + out, first)

# %% tags=["export:draw_kernel", "hide-input"]
@jit(do_not_specialize=["parts"])
def join_kernel(values, ids, rows, tokens, parts, PARTS: tl.constexpr):
    """The best share of one row; -1 for padding, and where the best is not finite."""
    line = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    inside = part < parts
    value = tl.load(values + line * parts + part, mask=inside, other=float("-inf"))
    token = tl.load(ids + line * parts + part, mask=inside, other=2147483647)
    broken = tl.max((value != value).to(tl.int32), 0)
    best = tl.max(tl.where(value == value, value, float("-inf")), 0)
    first = tl.min(tl.where(value == best, token, 2147483647), 0).to(tl.int64)
    sound = (broken == 0) & (best > float("-inf")) & (best < float("inf"))
    sound = sound & (tl.load(rows + line) >= 0)
    tl.store(tokens + line, tl.where(sound, first, -1))


# %% tags=["export:draw_kernel", "hide-input"]
@lru_cache
def processors_of(device: torch.device) -> int:
    """How many multiprocessors; asked in every step, so the answer is kept."""
    return limits_of(device).processors


def launch_draw(
    logits: Tensor, settings: Tensor, key: int, rows: Tensor, positions: Tensor
) -> Tensor:
    """`draw_tokens` in one reading of the logits; a row's words of key begin at column `key`.

    Args: `logits` [S, V], its rows contiguous; `settings` float64 [num_rows, n], column 0 the
    temperature; `rows`, `positions` int64 [S].  Returns: int64 [S], -1 also for a row of -1.
    """
    lines, vocab = logits.shape
    tiles = -(-vocab // TILE_TOKENS)
    wanted = -(-PROGRAMS * processors_of(logits.device) // max(1, lines))
    share = -(-tiles // min(tiles, wanted, MOST_PARTS)) * TILE_TOKENS
    parts = -(-vocab // share)
    values = torch.empty(lines, parts, device=logits.device)
    ids = torch.empty(lines, parts, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(lines, dtype=torch.int64, device=logits.device)
    if lines:
        draw_kernel[(lines, parts)](
            logits, logits.stride(0), vocab, settings, rows, positions, values, ids, share,
            WIDTH=settings.shape[1], KEY=key, TILE=TILE_TOKENS, num_warps=4,
        )  # fmt: skip
        join_kernel[(lines,)](values, ids, rows, tokens, parts, PARTS=MOST_PARTS, num_warps=1)
    return tokens

# %% [markdown]
# A program takes a share of one row and keeps, for each of its lanes, the best sum so far and whose it
# is. The shares' results are compared by a second, tiny kernel. How many shares there are depends on the batch, and the
# token does not: a maximum may be taken in any pieces. The logarithm of a number near 1 is inexact on a
# GPU, so where it matters a series takes its place.

# %%
from paged_kv.triton_device import runs_kernels

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
some = torch.randn(3, 2500, generator=torch.Generator().manual_seed(3)).bfloat16()
table = torch.tensor([[t, *row_key(seed, 0)] for seed, t in enumerate((0, 1, 5))]).double()
places = torch.tensor([6, 7, 8])
by_torch = draw_tokens(some, table[:, 0].float(), table[:, 1:].long(), places)
if runs_kernels(device):
    given = (part.to(device) for part in (some, table, torch.arange(3), places))
    x, settings, rows, at = given
    by_kernel = launch_draw(x, settings, 1, rows, at).cpu()
    print("torch ", by_torch.tolist(), "\nkernel", by_kernel.tolist())
    assert torch.equal(by_torch, by_kernel)

# %% [markdown]
# ## A threshold in place of a sort
#
# Top-k asks for the k-th largest logit, top-p for the smallest that is still needed. Sorted, both are
# easy to read off. But a sort moves every logit several times, in order to find one number. That number
# can be searched for: guess it, add up what lies at or below the guess, halve.
#
# What is halved is the range of *floats*. The bits of positive floats, read as integers, are in the
# order of the numbers; flip the others' and the negative ones fall into line. 32 halvings find any
# float32 exactly.

# %% tags=["export:token_cuts"]
"""Which tokens may be chosen at all: top-k, top-p, min-p by thresholds, without sorting."""

from __future__ import annotations

import torch
from torch import Tensor

SCALE = 2.0**40  # weights are counted in units of 2**-40 of the likeliest token's
SMALL_K = 1024  # up to here a partial selection is quicker than a search


def ordered_bits(x: Tensor) -> Tensor:
    """Integers, int32, in the same order as the float32 numbers `x`."""
    bits = (x + 0.0).view(torch.int32)  # adding zero makes one of the two zeros
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def boundary(order: Tensor, weights: Tensor, limit: Tensor) -> Tensor:
    """The smallest integer at or below which a row's tokens weigh more than `limit`.

    Args: `order` int32 [n, V]; `weights` int64 [n, V], not negative; `limit` int64 [n, 1], less
    than the sum of all.  Returns: int64 [n, 1].  Sums of integers: any order of summing is right.
    """
    low = torch.full_like(limit, -(2**31))
    high = torch.full_like(limit, 2**31 - 1)
    for _ in range(32):
        middle = (low + high) >> 1
        weight = torch.where(order <= middle, weights, 0).sum(-1, keepdim=True)
        high = torch.where(weight > limit, middle, high)
        low = torch.where(weight > limit, low, middle + 1)
    return high

# %%
x = torch.tensor([[2.0, -1.0, 0.5, 2.0, -0.0, 0.0]])
order = ordered_bits(x)
print(order.tolist()[0])
ones = torch.ones_like(order, dtype=torch.int64)
found = boundary(order, ones, torch.tensor([[6 - 3]]))  # more than three at or below: the third
print("third largest:", x[order == found].tolist())

# %% tags=["hide-input"]
import numpy as np

low, high = -(2**31), 2**31 - 1
for round_ in range(1, 33):
    middle = (low + high) >> 1
    at_or_below = int((order <= middle).sum())
    low, high = (low, middle) if at_or_below > 3 else (middle + 1, high)
    if round_ in (1, 2, 3, 4, 5, 32):
        bits = np.int32(middle ^ ((middle >> 31) & 0x7FFFFFFF))
        print(f"round {round_:2}: at or below {bits.view(np.float32):13.9g} are {at_or_below}, "
              f"so it is {'no larger' if at_or_below > 3 else 'larger'}")
assert high == int(found)

# %% [markdown]
# The two twos share first and second place, so the third largest is 0.5. For top-k every token weighs 1.
# For top-p it weighs its probability, and there is a trap.
#
# :::{admonition} Predict
# :class: tip
# Three tokens have float32 weights 1, 5e-8 and 5e-8. They are added up from the left, then from the right.
# Are the two sums equal? A GPU adds in an order that depends on the shape of the batch. What follows for a
# token at the edge of top-p?
# :::
#
# :::{dropdown} Reasoning
# Each addition rounds, so different orders give different sums. At the edge, a token is in or out by
# the last digit: its fate would depend on the company again. Integers add up the same in any order.
# :::

# %%
share = torch.tensor([1.0, 5e-8, 5e-8])
units = (share * 2**40).long()
for name, (a, b, c) in (("floats", share), ("integers", units)):
    print(f"{name:8} {((a + b) + c).item():.8f} and {(a + (b + c)).item():.8f}")
    assert ((a + b) + c == a + (b + c)) == (name == "integers")

# %% [markdown]
# So weights are counted in units of $2^{-40}$ of the likeliest token's. A sum over a million tokens still
# fits into 64 bits, and what a smaller weight would add is lost to everybody alike.
#
# Ties are left. In bf16 many logits are equal. Top-k keeps all that tie with the k-th, as transformers
# does. In top-p the last value may be needed three times and occur ten times: three of ten stay. *How
# many* is fixed by the sum, *which* is not. transformers leaves it to an unstable sort; here the lowest
# ids stay.

# %% tags=["export:token_cuts"]
def within_top_k(x: Tensor, k: Tensor, largest_k: int) -> Tensor:
    """Which tokens are no smaller than their row's k-th largest, bool [n, V].

    Args: `x` float32 [n, V]; `k` int64 [n, 1], 0 for all; `largest_k`, the largest of them.
    """
    if largest_k <= SMALL_K:
        top = x.topk(min(largest_k, x.shape[1])).values
        last = top.gather(-1, (k - 1).clamp(0, top.shape[1] - 1))
        return (x >= last) | (k == 0)
    order = ordered_bits(x)
    limit = torch.where(k > 0, x.shape[1] - k, -1).clamp(min=-1)
    return order >= boundary(order, torch.ones_like(order, dtype=torch.int64), limit)


def within_top_p(x: Tensor, weights: Tensor, p: Tensor) -> Tensor:
    """Which tokens are among the likeliest that together reach p, bool [n, V].

    Args: `x` float32 [n, V]; `weights` int64 [n, V], 0 for a token cut off before; `p` float64
    [n, 1].  Of tokens that tie at the end only as many stay as are needed, those of lowest id.
    """
    total = weights.sum(-1, keepdim=True)
    limit = ((1 - p) * total).long().minimum(total - 1)
    limit = torch.where(p < 1, limit, -1)
    order = ordered_bits(x)
    last = boundary(order, weights, limit)
    ties = order == last
    below = torch.where(order < last, weights, 0).sum(-1, keepdim=True)
    each = torch.where(ties, weights, 0).amax(-1, keepdim=True).clamp(min=1)
    dropped = ((limit - below) // each).clamp(min=0)
    rank = ties.cumsum(-1)
    return (order > last) | (ties & (rank <= rank[:, -1:] - dropped))

# %% tags=["export:token_cuts"]
def cut_tokens(x: Tensor, temperature: Tensor, knobs: Tensor, largest_k: int) -> Tensor:
    """The logits, -inf where top-k, then top-p, then min-p cut a token off.

    Args: `x` float32 [n, V]; `temperature` float32 [n, 1], not 0; `knobs` float64 [n, 3]: k, p,
    min-p of each row; `largest_k`, 0 if no row has one.
    """
    k, p, min_p = knobs.unbind(-1)
    kept = torch.ones_like(x, dtype=torch.bool)
    if largest_k:
        kept = within_top_k(x, k.long()[:, None], largest_k)
    share = ((x - x.amax(-1, keepdim=True)) / temperature).exp()
    weights = torch.where(kept, (share * SCALE).long(), 0)
    kept &= within_top_p(x, weights, p[:, None])
    kept &= share >= min_p.float()[:, None]
    return torch.where(kept, x, -torch.inf)

# %%
from transformers.generation.logits_process import TopPLogitsWarper

flat = torch.zeros(1, 20)
knobs = torch.tensor([[0, 0.5, 0]], dtype=torch.float64)
ours = cut_tokens(flat, torch.ones(1, 1), knobs, 0).isfinite()[0].nonzero().flatten().tolist()
theirs = TopPLogitsWarper(0.5)(None, flat).isfinite()[0].nonzero().flatten().tolist()
print("20 equal tokens, top-p 0.5: ours keeps", ours)
print("transformers keeps as many:", len(theirs) == len(ours))
assert ours == list(range(10))

# %% [markdown]
# **Turn the knob.** Make one of the 20 a little likelier; expect that it stays, with nine others.
#
# In torch each of the 32 rounds is two launches over the whole table. The kernel takes one row a program
# and looks at it as seldom as it can. A survey weighs what lies above eight pivots at once, a second one
# eight pivots between the two that matter. What lies between the last two is gathered, and only that is
# halved, each time to the nearest number that occurs. Pivots decide how long it takes, never what comes
# out.

# %% tags=["export:shape_kernels"]
"""Penalties and cuts as kernels: what is drawn from, made in a few readings of the logits."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import torch
from torch import Tensor

from paged_kv.triton_device import jit, tl


@jit
def order_of(x):
    """`ordered_bits` in a kernel."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def weight_of(x, top, rate, COUNT: tl.constexpr):
    """One, or the probability in units of 2**-40 of the likeliest token's."""
    if COUNT:
        return tl.full(x.shape, 1, tl.int64)
    return (tl.exp((x - top) * rate) * 1099511627776.0).to(tl.int64)


@jit
def survey_pivots(x, vocab, pivots, top, rate, COUNT: tl.constexpr, TILE: tl.constexpr):
    """What weighs the part of a row that is no smaller than a pivot, for eight pivots."""
    lanes = tl.arange(0, TILE)
    sums = tl.zeros((8, TILE), tl.int64)
    for start in range(0, vocab, TILE):
        value = tl.load(x + start + lanes, mask=start + lanes < vocab, other=float("-inf"))
        weight = tl.where(start + lanes < vocab, weight_of(value, top, rate, COUNT), 0)
        sums += tl.where(value[None, :] >= pivots[:, None], weight[None, :], 0)
    return tl.sum(sums, 1)


# %% tags=["export:shape_kernels", "hide-input"]
@jit
def enclose(x, vocab, need, p, top, scale, rate, COUNT: tl.constexpr, TILE: tl.constexpr):
    """Logits between which the boundary lies, and what is needed below the upper one."""
    which = tl.arange(0, 8)
    pivots = top - scale * tl.exp2(which.to(tl.float32) - 2)
    pivots = tl.where(which < 7, pivots, float("-inf"))
    sums = survey_pivots(x, vocab, pivots, top, rate, COUNT, TILE)
    if not COUNT:
        total = tl.max(sums, 0)
        need = total - tl.minimum(((1 - p) * total).to(tl.int64), total - 1)
    low = tl.max(tl.where(sums >= need, pivots, float("-inf")), 0)
    high = tl.min(tl.where(sums >= need, float("inf"), pivots), 0)
    above = tl.max(tl.where(sums >= need, 0, sums), 0)
    if low > float("-inf"):
        start = tl.minimum(high, top)
        pivots = start - (start - low) * ((which + 1).to(tl.float32) * 0.125)
        pivots = tl.where(which < 7, pivots, low)
        sums = survey_pivots(x, vocab, pivots, top, rate, COUNT, TILE)
        low = tl.max(tl.where(sums >= need, pivots, low), 0)
        high = tl.min(tl.where(sums >= need, high, pivots), 0)
        above = tl.max(tl.where(sums >= need, above, sums), 0)
    return low, high, need - above


# %% tags=["export:shape_kernels", "hide-input"]
@jit
def gather_between(x, kept, vocab, low, high, TILE: tl.constexpr):
    """Copy what is at least `low` and less than `high` to the front of `kept`; how many."""
    lanes = tl.arange(0, TILE)
    count = tl.zeros((), tl.int32)
    for start in range(0, vocab, TILE):
        value = tl.load(x + start + lanes, mask=start + lanes < vocab, other=float("nan"))
        mine = (value >= low) & (value < high)
        tl.store(kept + count + tl.cumsum(mine.to(tl.int32), 0) - 1, value, mask=mine)
        count += tl.sum(mine.to(tl.int32), 0)
    tl.debug_barrier()  # what was stored is read by other threads of the program
    return count


# %% tags=["export:shape_kernels", "hide-input"]
@jit
def weigh(x, count, bound, floor, top, rate, COUNT: tl.constexpr, TILE: tl.constexpr):
    """What the logits weigh whose order is at least `bound` and `floor`, and the orders next to it.

    Returns: the weight; the smallest order that is not below the bound; the largest that is.
    """
    lanes = tl.arange(0, TILE)
    bound = tl.maximum(bound, floor).to(tl.int32)
    total = tl.zeros((TILE,), tl.int64)
    up = tl.full((TILE,), 2147483647, tl.int32)
    down = tl.full((TILE,), -2147483648, tl.int32)
    for start in range(0, count, TILE):
        within = start + lanes < count
        value = tl.load(x + start + lanes, mask=within, other=float("-inf"))
        order = order_of(value)
        above = within & (order >= bound)
        total += tl.where(above, weight_of(value, top, rate, COUNT), 0)
        up = tl.minimum(up, tl.where(above, order, 2147483647))
        down = tl.maximum(down, tl.where(within & (order < bound), order, -2147483648))
    return tl.sum(total, 0), tl.min(up, 0).to(tl.int64), tl.max(down, 0).to(tl.int64)


@jit
def search_order(x, count, need, low, top, rate, COUNT: tl.constexpr, TILE: tl.constexpr):
    """The largest order such that what lies no lower weighs at least `need`."""
    floor, high = low, order_of(top).to(tl.int64)
    while low < high:
        middle = low + ((high - low + 1) >> 1)
        weight, up, down = weigh(x, count, middle, floor, top, rate, COUNT, TILE)
        low = tl.where(weight >= need, tl.maximum(up, low), low)
        high = tl.where(weight >= need, high, tl.maximum(down, low))
    return low


# %% tags=["export:shape_kernels", "hide-input"]
@jit
def top_and_mean(x, vocab, TILE: tl.constexpr):
    """The largest logit of a row, and the mean of the finite ones."""
    lanes = tl.arange(0, TILE)
    best = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    finite = tl.zeros((TILE,), tl.float32)
    for start in range(0, vocab, TILE):
        value = tl.load(x + start + lanes, mask=start + lanes < vocab, other=float("-inf"))
        best = tl.maximum(best, value)
        real = value > float("-inf")
        total += tl.where(real, value, 0.0)
        finite += tl.where(real, 1.0, 0.0)
    return tl.max(best, 0), tl.sum(total, 0) / tl.maximum(tl.sum(finite, 0), 1.0)


# %% tags=["export:shape_kernels", "hide-input"]
@jit(do_not_specialize=["vocab"])
def cut_kernel(
    x, kept, vocab, settings, rows,
    WIDTH: tl.constexpr, TOP_K: tl.constexpr, TILE: tl.constexpr,
):
    """Write one row with -inf where top-k, then top-p, then min-p cut a token off."""
    line = tl.program_id(0).to(tl.int64)
    x, kept = x + line * vocab, kept + line * vocab
    mine = settings + tl.maximum(tl.load(rows + line), 0) * WIDTH
    temperature = tl.load(mine).to(tl.float32)
    temperature = tl.where(temperature > 0, temperature, 1.0)
    k, p = tl.load(mine + TOP_K).to(tl.int64), tl.load(mine + TOP_K + 1)
    min_p = tl.load(mine + TOP_K + 2).to(tl.float32)
    top, mean = top_and_mean(x, vocab, TILE)
    rate, need = 1.0 / temperature, k
    low, high = tl.full((), float("-inf"), tl.float32), tl.full((), float("inf"), tl.float32)
    if k > 0:  # top-p then looks at all that top-k leaves, so nothing is left out above
        low, _, _ = enclose(x, vocab, k, p, top, (top - mean) * 0.125, 1.0, True, TILE)
    elif p < 1:
        low, high, need = enclose(x, vocab, k, p, top, temperature, rate, False, TILE)
    last = order_of(low).to(tl.int64)
    stay = tl.full((), 2147483647, tl.int64)  # of the tokens that tie at the end
    if (k > 0) | (p < 1):
        count = gather_between(x, kept, vocab, low, high, TILE)
        if k > 0:
            last = search_order(kept, count, k, last, top, 1.0, True, TILE)
        if p < 1:
            if k > 0:
                total, _, _ = weigh(kept, count, last, last, top, rate, False, TILE)
                need = total - tl.minimum(((1 - p) * total).to(tl.int64), total - 1)
            last = search_order(kept, count, need, last, top, rate, False, TILE)
            stay = ties_that_stay(kept, count, need, last, top, rate, TILE)
    tl.debug_barrier()
    keep_row(x, kept, vocab, last, stay, min_p, top, rate, TILE)


# %% tags=["export:shape_kernels", "hide-input"]
@jit
def ties_that_stay(x, count, need, last, top, rate, TILE: tl.constexpr):
    """Of the tokens at the boundary, how many are needed."""
    many, _, _ = weigh(x, count, last, last, top, rate, True, TILE)
    more, _, _ = weigh(x, count, last + 1, last, top, rate, True, TILE)
    weight, _, _ = weigh(x, count, last, last, top, rate, False, TILE)
    above, _, _ = weigh(x, count, last + 1, last, top, rate, False, TILE)
    ties = many - more
    each = tl.maximum((weight - above) // tl.maximum(ties, 1), 1)
    return ties - (weight - need) // each


@jit
def keep_row(x, kept, vocab, last, stay, min_p, top, rate, TILE: tl.constexpr):
    """Copy what lies above `last`, and the first `stay` of what equals it."""
    lanes = tl.arange(0, TILE)
    seen = tl.zeros((), tl.int64)
    for start in range(0, vocab, TILE):
        inside = start + lanes < vocab
        value = tl.load(x + start + lanes, mask=inside, other=float("-inf"))
        order = order_of(value)
        ties = inside & (order == last)
        rank = seen + tl.cumsum(ties.to(tl.int32), 0)
        stays = (order > last) | (ties & (rank <= stay))
        stays = stays & (tl.exp((value - top) * rate) >= min_p)
        tl.store(kept + start + lanes, tl.where(stays, value, float("-inf")), mask=inside)
        seen += tl.sum(ties.to(tl.int32), 0)


def launch_cut(x: Tensor, settings: Tensor, top_k: int, rows: Tensor, tile: int = 2048) -> Tensor:
    """`cut_tokens` of float32 logits [n, V]; k, p, min-p stand from column `top_k`."""
    x = x.contiguous()
    kept = torch.empty_like(x)
    if len(x):
        cut_kernel[(len(x),)](
            x, kept, x.shape[1], settings, rows,
            WIDTH=settings.shape[1], TOP_K=top_k, TILE=tile, num_warps=16,
        )  # fmt: skip
    return kept

# %%
if runs_kernels(device):
    x = some[:, :500].float()
    table = torch.tensor([[1, 0, 0.5, 0], [1, 40, 0.9, 0], [2, 0, 1, 0.1]]).double()
    by_torch = cut_tokens(x, table[:, :1].float(), table[:, 1:], 40)
    by_kernel = launch_cut(x.to(device), table.to(device), 1, torch.arange(3, device=device), 256)
    print("kept by torch ", by_torch.isfinite().sum(1).tolist())
    print("kept by kernel", by_kernel.isfinite().sum(1).tolist())
    assert torch.equal(by_torch, by_kernel.cpu())

# %% [markdown]
# ## Settings that stay
#
# A row's numbers do not change while it lives, so they live on the device. State first:
#
# | name | dtype, shape | where | who writes it |
# |---|---|---|---|
# | `settings` | float64 [num_rows, 12] | device | `open_rows` |
# | `seen` | int32 [num_rows, vocab] | device, made when first needed | `open_rows`, `count` |
# | `flags` | int8 [num_rows] | host | `open_rows`, `close_row` |
#
# Why float64? It holds a 32-bit word of the key exactly, so one table does, filled by one upload. The
# flags are what makes haste possible: the host knows, without asking the device, whether any row of a
# batch draws, truncates, penalises or wants log-probabilities, and launches what is needed.

# %% tags=["export:row_settings"]
"""What each row of a batch wants of its tokens, resident on the device."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# The columns of a row's settings; its key takes the last four.
TEMPERATURE, TOP_K, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY, COUNTS, KEY = range(9)
WIDTH = KEY + 4
# What the host knows of a row: bits.
DRAWS, TRUNCATES, PENALISES, LOGPROBS = 1, 2, 4, 8
SHAPED = TRUNCATES | PENALISES


def flags_of(params: SamplingOptions) -> int:
    """What the host has to know of a row."""
    return (
        DRAWS * (not params.greedy)
        | TRUNCATES * params.truncates
        | PENALISES * params.penalises
        | LOGPROBS * params.wants_logprobs
    )


# %% tags=["export:row_settings", "hide-input"]
def row_settings(params: SamplingOptions, sample_index: int) -> list[float]:
    """A row's settings as numbers, column by column.  Raises: ValueError for a missing seed."""
    whole = isinstance(sample_index, Integral) and not isinstance(sample_index, bool)
    if not whole or not 0 <= sample_index < 2**63:
        raise ValueError(f"sample_index = {sample_index!r}: must be an integer of at least 0")
    if params.seed is None and not params.greedy:
        raise ValueError("seed = None: a row that draws needs one; draw it first")
    key = row_key(int(params.seed or 0), int(sample_index))
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    cuts = (params.top_k, params.top_p, params.min_p) if params.truncates else (0, 1, 0)
    return [float(x) for x in (params.temperature, *cuts, *penalties, params.penalises, *key)]


def uploaded(values: NDArray[np.int64], device: torch.device) -> Tensor:
    """An array on the device; the host does not wait for its arrival."""
    here = torch.from_numpy(values)
    if device.type != "cuda":
        return here.to(device)
    return here.pin_memory().to(device, non_blocking=True)


# %% tags=["export:row_settings"]
class RowSettings:
    """Settings of every row on the device, and what the host has to know of them.

    State
        settings  float64 [num_rows, WIDTH] on the device, changed by `open_rows` only.
        seen      int32 [num_rows, vocab] on the device, made when the first row penalises: twice
                  the times a token was generated, plus 1 if it stands in the prompt.
        flags     int8 [num_rows] on the host: what the row needs; -1 if it is closed.
    Invariant: an open row has the settings on the device that its flags on the host speak of.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device | str) -> None:
        """No row is open.  Takes 96 bytes a row on the device."""
        for name, value in (("num_rows", num_rows), ("vocab_size", vocab_size)):
            if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} = {value!r}: must be an integer of at least 1")
        self.num_rows, self.vocab_size = int(num_rows), int(vocab_size)
        self.device = torch.device(device)
        shape = (num_rows, WIDTH)
        self.settings = torch.zeros(shape, dtype=torch.float64, device=self.device)
        self.seen: Tensor | None = None
        self.flags = np.full(num_rows, -1, np.int8)
        self.top_k = np.zeros(num_rows, np.int64)
        self.num_logprobs = np.zeros(num_rows, np.int64)

    def __repr__(self) -> str:
        """A letter a row: - closed, g greedy, d draws; + where it truncates or penalises."""
        letters = (
            "-" if flag < 0 else ("d" if flag & DRAWS else "g") + "+" * bool(flag & SHAPED)
            for flag in self.flags.tolist()
        )
        return f"{type(self).__name__}({' '.join(letters)})"


# %% [markdown]
# Rows are opened several at once. Whatever they bring travels as one array of int64, the floats as
# their bits, and is taken apart on the device. Everything is checked before anything is changed.

# %% tags=["export:row_settings"]
class RowSettings(RowSettings):  # type: ignore
    def open_rows(
        self,
        rows: Sequence[int],
        params: Sequence[SamplingOptions],
        sample_indices: Sequence[int],
        prompts: Sequence[Sequence[int]],
        generated: Sequence[Sequence[int]],
    ) -> None:
        """Give rows their settings, in one upload; a row that is open starts anew.

        Args, one a row: its number; its params, with a seed unless greedy; which sample of its
        request it is; the tokens of its prompt; those generated so far.  Tokens are looked at
        only where params penalise.
        Raises: ValueError, with nothing changed.
        """
        numbers = self._checked_rows(rows)
        lengths = [len(x) for x in (params, sample_indices, prompts, generated)]
        if lengths != [len(rows)] * 4:
            raise ValueError(f"rows: {len(rows)}, and {lengths} of what goes with them")
        together = zip(params, sample_indices, prompts, generated, strict=True)
        given = list(zip(numbers.tolist(), together, strict=True))
        settings = np.array([row_settings(one, i) for _, (one, i, _, _) in given], np.float64)
        counted = [(row, was, made) for row, (one, _, was, made) in given if one.penalises]
        was = [self._flat(row, tokens, "prompts") for row, tokens, _ in counted]
        made = [self._flat(row, tokens, "generated") for row, _, tokens in counted]
        anew = np.array([row for row, _, _ in counted], np.int64)
        parts = [numbers, settings.view(np.int64).reshape(-1), anew, *was, *made]
        sizes = [len(numbers), settings.size, len(anew), sum(map(len, was)), sum(map(len, made))]
        if given:
            arrived = uploaded(np.concatenate(parts), self.device)
            self._write(torch.split(arrived, sizes))
        for row, (one, *_) in given:
            self.flags[row] = flags_of(one)
            self.top_k[row] = min(one.top_k, self.vocab_size) if one.truncates else 0
            self.num_logprobs[row] = one.logprobs or 0


# %% tags=["export:row_settings", "hide-input"]
class RowSettings(RowSettings):  # type: ignore
    def close_row(self, row: int) -> None:
        """Forget a row.  The device is not told: nobody asks for a closed row."""
        self.flags[self._checked_rows([row])] = -1

    def _checked_rows(self, rows: Sequence[int]) -> NDArray[np.int64]:
        for row in rows:
            whole = isinstance(row, Integral) and not isinstance(row, bool)
            if not whole or not 0 <= row < self.num_rows:
                raise ValueError(f"row = {row!r}: must be an integer from 0 to {self.num_rows - 1}")
        if len(set(rows)) != len(rows):
            raise ValueError(f"rows = {list(rows)}: one is named twice")
        return np.asarray(rows, np.int64).reshape(-1)

    def _flat(self, row: int, tokens: Sequence[int], name: str) -> NDArray[np.int64]:
        """Where these tokens of a row are counted, as places in the table laid out flat."""
        ids = np.asarray(tokens)
        if ids.size and ids.dtype.kind not in "iu":
            raise ValueError(f"{name}: token ids must be integers, not {ids.dtype}")
        ids = ids.astype(np.int64).reshape(-1)
        if ids.size and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            wrong = ids.min() if ids.min() < 0 else ids.max()
            raise ValueError(f"{name}: id {wrong} is not from 0 to {self.vocab_size - 1}")
        return row * self.vocab_size + ids

    def _write(self, parts: Sequence[Tensor]) -> None:
        """Put uploaded settings where they belong; count the tokens of rows that penalise."""
        rows, settings, anew, prompts, generated = parts
        self.settings.index_copy_(0, rows, settings.view(torch.float64).view(-1, WIDTH))
        if len(anew):
            if self.seen is None:
                shape = (self.num_rows, self.vocab_size)
                self.seen = torch.zeros(shape, dtype=torch.int32, device=self.device)
            self.seen.index_fill_(0, anew, 0)
            flat = self.seen.view(-1)
            flat.index_fill_(0, prompts, 1)
            flat.scatter_add_(0, generated, torch.full_like(generated, 2, dtype=torch.int32))


# %% [markdown]
# ## Counts of what was said
#
# Three penalties make a row repeat itself less. The repetition penalty looks at prompt and answer and
# divides a logit (a negative one it multiplies, so that both get smaller). The other two are OpenAI's and
# look at the answer only: one is subtracted once, the other for each time.
#
# One table serves all three. An entry is twice the number of times a token was generated, plus one if
# the prompt has it: `seen > 0` and `seen >> 1` are what the formulas ask for. It costs four bytes a
# token and row, so it is made when the first row penalises, and not before.

# %% tags=["export:row_settings"]
def penalised(
    x: Tensor, seen: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """Logits with what was said before made less likely (or likelier).

    Args: `x` float32 [n, V]; `seen` int32 [n, V] as RowSettings keeps it; the rest [n, 1].
    """
    times = (seen >> 1).float()
    x = torch.where(seen > 0, torch.where(x < 0, x * repetition, x / repetition), x)
    return x - frequency * times - presence * (times > 0)


def count_tokens(rows: Tensor, tokens: Tensor, settings: Tensor, seen: Tensor) -> None:
    """Add tokens just chosen, int64 [S], to `seen` where their row penalises; -1 counts nowhere."""
    rows = rows.clamp(min=0)
    counts = (settings.index_select(0, rows)[:, COUNTS] > 0) & (tokens >= 0)
    amount = torch.where(counts, 2, 0).to(torch.int32)
    seen.view(-1).scatter_add_(0, rows * seen.shape[1] + tokens.clamp(min=0), amount)


# %% tags=["export:shape_kernels", "hide-input"]
@jit(do_not_specialize=["vocab"])
def penalise_kernel(
    logits, stride, x, vocab, seen, settings, rows,
    WIDTH: tl.constexpr, REPETITION: tl.constexpr, TILE: tl.constexpr,
):
    """`penalised` for a tile of one row, straight from its counts; float32 comes out."""
    line = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    row = tl.maximum(tl.load(rows + line), 0)
    mine = settings + row * WIDTH + REPETITION
    repetition = tl.load(mine).to(tl.float32)
    presence, frequency = tl.load(mine + 1).to(tl.float32), tl.load(mine + 2).to(tl.float32)
    inside = token < vocab
    value = tl.load(logits + line * stride + token, mask=inside).to(tl.float32)
    was = tl.load(seen + row * vocab + token, mask=inside, other=0)
    less = tl.where(value < 0, value * repetition, tl.div_rn(value, repetition))
    value = tl.where(was > 0, less, value)
    value -= frequency * (was >> 1).to(tl.float32)
    value -= tl.where(was > 1, presence, 0.0)
    tl.store(x + line * vocab + token, value, mask=inside)


def launch_penalise(
    logits: Tensor, seen: Tensor, settings: Tensor, repetition: int, rows: Tensor
) -> Tensor:
    """`penalised` logits, float32 [n, V]; the three penalties stand from column `repetition`."""
    lines, vocab = logits.shape
    x = torch.empty(lines, vocab, device=logits.device)
    if lines:
        penalise_kernel[(lines, -(-vocab // 2048))](
            logits, logits.stride(0), x, vocab, seen, settings, rows,
            WIDTH=settings.shape[1], REPETITION=repetition, TILE=2048,
        )  # fmt: skip
    return x

# %%
gib = 256 * 128256 * 4 / 2**20
print(f"256 rows, 128,256 tokens: {gib:.0f} MiB of counts")
# never, in the prompt, once, twice and in the prompt
seen = torch.tensor([[0, 1, 2, 5]], dtype=torch.int32)
three = [torch.tensor([[value]]) for value in (2.0, 0.5, 0.25)]
print(penalised(torch.tensor([[1.0, 1.0, 1.0, -1.0]]), seen, *three).tolist())

# %% [markdown]
# By hand: 1; 1/2; 1/2 - 0.25 - 0.5; and -1 x 2 - 2 x 0.25 - 0.5. For a batch of 256 rows the table takes
# 125 MiB.
#
# ## A whole batch
#
# What is left is to put the parts in order. Rows that need shaping (cuts or penalties) go through it by
# themselves, in float32; the rest never pays for them.

# %% tags=["export:device_sampling"]
"""Tokens chosen for a whole batch on the device, without the host looking at any number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from paged_kv.triton_device import triton


def shaped_logits(
    mine: RowSettings, logits: Tensor, rows: Tensor, host: NDArray[np.int64]
) -> Tensor:
    """Penalties, then cuts: float32 [n, V], not yet divided by the temperature."""
    flags = np.where(host < 0, 0, mine.flags[host])
    kernels = logits.is_cuda and triton is not None and logits.stride(1) == 1
    rows = rows.clamp(min=0)
    settings = mine.settings.index_select(0, rows)
    x = logits.float()
    if (flags & PENALISES).any():
        assert mine.seen is not None
        if kernels:
            x = launch_penalise(logits, mine.seen, mine.settings, REPETITION, rows)
        else:
            penalties = settings[:, REPETITION : FREQUENCY + 1].float()
            x = penalised(x, mine.seen.index_select(0, rows), *penalties[:, :, None].unbind(1))
    if not (flags & TRUNCATES).any():
        return x
    if kernels:
        return launch_cut(x, mine.settings, TOP_K, rows)
    temperature = settings[:, TEMPERATURE, None].float()
    temperature = torch.where(temperature > 0, temperature, 1)
    largest_k = int(mine.top_k[host[host >= 0]].max(initial=0))
    return cut_tokens(x, temperature, settings[:, TOP_K : MIN_P + 1], largest_k)


# %% tags=["export:device_sampling", "hide-input"]
@dataclass(frozen=True)
class Sampled:
    """What one step chose, all on the device.

    Fields
        tokens        int64 [S]; -1 for padding, or where logits have NaN or nothing finite.
        logprobs      float32 [S], of the chosen tokens; NaN where none was asked for.  Or None.
        top_logprobs  float32 [S, k], of the k likeliest, k the most that a row asked for.  Or None.
        top_ids       int64 [S, k], which they are; -1 where none was asked for.  Or None.
    """

    tokens: Tensor
    logprobs: Tensor | None = None
    top_logprobs: Tensor | None = None
    top_ids: Tensor | None = None


def checked_batch(
    mine: RowSettings, logits: Tensor, rows: Tensor, positions: Tensor, host_rows: ArrayLike
) -> tuple[NDArray[np.int8], NDArray[np.int64]]:
    """The flags of a batch's rows, 0 for padding, and those rows; by shapes and the host's copy."""
    host = np.asarray(host_rows, np.int64).reshape(-1)
    shape = (len(host), mine.vocab_size)
    if tuple(logits.shape) != shape or not logits.is_floating_point():
        raise ValueError(f"logits: {logits.dtype} {list(logits.shape)}, not floats {list(shape)}")
    for name, value in (("rows", rows), ("positions", positions)):
        if tuple(value.shape) != shape[:1] or value.dtype != torch.int64:
            said = f"{value.dtype} {list(value.shape)}, not int64 {list(shape[:1])}"
            raise ValueError(f"{name}: {said}")
    if len(host) and not -1 <= host.min() <= host.max() < mine.num_rows:
        raise ValueError(f"host_rows: not all from -1 to {mine.num_rows - 1}")
    flags = np.where(host < 0, np.int8(0), mine.flags[host])
    if (flags < 0).any():
        raise ValueError(f"host_rows: row {host[flags < 0][0]} is closed")
    return flags, host


# %% [markdown]
# Log-probabilities are the one place that needs a sum over the vocabulary. Only the rows that asked are
# gathered for it.

# %% tags=["export:device_sampling", "hide-input"]
def raw_logprobs(
    logits: Tensor, tokens: Tensor, most: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Log-probabilities of the tokens and of the `most` likeliest, before anything was changed.

    Args: `logits` [n, V]; `tokens` int64 [n], -1 has none.  Returns: [n], [n, most], ids
    [n, most]; None for both where `most` is 0.
    """
    x = logits.float()
    total = x.logsumexp(-1, keepdim=True)
    of_token = x.gather(-1, tokens.clamp(min=0)[:, None]) - total
    of_token = of_token[:, 0].masked_fill(tokens < 0, torch.nan)
    if not most:
        return of_token, None, None
    top = x.topk(min(most, x.shape[1]))
    return of_token, top.values - total, top.indices


def spread_rows(part: Tensor | None, at: Tensor, size: int) -> Tensor | None:
    """`part` [n, ...] at the places `at` of `size`; elsewhere NaN, or -1 for ids."""
    if part is None:
        return None
    empty = torch.nan if part.is_floating_point() else -1
    return part.new_full((size, *part.shape[1:]), empty).index_copy(0, at, part)


# %% tags=["export:device_sampling"]
class DeviceSampler(RowSettings):
    """The settings of every row, and the choice of one token for any of them.

    Invariant: what `sample` launches follows from the host's flags and the shapes alone.
    """

    def sample(
        self, logits: Tensor, rows: Tensor, positions: Tensor, host_rows: ArrayLike
    ) -> Sampled:
        """Choose a token for each row of a batch, and count it where the row penalises.

        Args: `logits` [S, vocab], any float; `rows` int64 [S], which row each belongs to, -1 for
        padding; `positions` int64 [S], the place in its sequence that the new token will take;
        these three on the device; `host_rows` [S], the same rows on the host.
        Raises: ValueError, with nothing changed.  The host waits for nothing.
        """
        flags, host = checked_batch(self, logits, rows, positions, host_rows)
        shaped = np.flatnonzero(flags & SHAPED)
        if len(shaped) == len(flags) > 0:
            tokens = self._sample_shaped(logits, rows, positions, host)
        else:
            plain = flags[(flags & SHAPED) == 0]
            tokens = self.sample_plain(logits, rows, positions, bool((plain & DRAWS).any()))
            if len(shaped):
                at = uploaded(shaped, self.device)
                some = [part.index_select(0, at) for part in (logits, rows, positions)]
                chosen = self._sample_shaped(some[0], some[1], some[2], host[shaped])
                tokens = tokens.index_copy(0, at, chosen)
        if (flags & PENALISES).any():
            assert self.seen is not None
            count_tokens(rows, tokens, self.settings, self.seen)
        return self._with_logprobs(logits, tokens, flags, host)


# %% tags=["export:device_sampling"]
class DeviceSampler(DeviceSampler):  # type: ignore
    def sample_plain(
        self, logits: Tensor, rows: Tensor, positions: Tensor, draws: bool = True
    ) -> Tensor:
        """Choose tokens of rows that neither truncate nor penalise: int64 [S].

        Arguments as `sample`.  `draws` False: all are greedy.  Launches the same kernels for the
        same shapes, uploads nothing and changes nothing, so that a CUDA graph can hold it.
        """
        if logits.is_cuda and triton is not None and logits.stride(1) == 1:
            return launch_draw(logits, self.settings, KEY, rows, positions)
        if not draws:
            best, tokens = logits.max(-1)
            tokens = tokens.masked_fill(~best.isfinite(), -1)
        else:
            mine = self.settings.index_select(0, rows.clamp(min=0))
            temperature, keys = mine[:, TEMPERATURE].float(), mine[:, KEY:].long()
            tokens = draw_tokens(logits, temperature, keys, positions)
        return tokens.masked_fill(rows < 0, -1)

    def _sample_shaped(
        self, logits: Tensor, rows: Tensor, positions: Tensor, host: NDArray[np.int64]
    ) -> Tensor:
        tokens = self.sample_plain(shaped_logits(self, logits, rows, host), rows, positions)
        return tokens.masked_fill(~logits.amax(-1).isfinite(), -1)


# %% tags=["export:device_sampling", "hide-input"]
class DeviceSampler(DeviceSampler):  # type: ignore
    def apply(self, logits: Tensor, rows: Tensor, host_rows: ArrayLike) -> Tensor:
        """What the tokens are drawn from: logits after penalties, temperature and cuts.

        Returns: float32 [S, vocab], -inf where cut off; greedy rows keep a temperature of 1.
        """
        _, host = checked_batch(self, logits, rows, rows, host_rows)
        temperature = self.settings.index_select(0, rows.clamp(min=0))[:, TEMPERATURE, None].float()
        x = shaped_logits(self, logits, rows, host)
        return x / torch.where(temperature > 0, temperature, 1)

    def open_row(
        self,
        row: int,
        params: SamplingOptions,
        sample_index: int = 0,
        prompt_tokens: Sequence[int] = (),
        generated_tokens: Sequence[int] = (),
    ) -> None:
        """Give one row its settings; as `open_rows` with one."""
        self.open_rows([row], [params], [sample_index], [prompt_tokens], [generated_tokens])

    def _with_logprobs(
        self, logits: Tensor, tokens: Tensor, flags: NDArray[np.int8], host: NDArray[np.int64]
    ) -> Sampled:
        """The tokens, with log-probabilities where the host knows that they are wanted."""
        wanted = np.flatnonzero(flags & LOGPROBS)
        if not len(wanted):
            return Sampled(tokens)
        most = int(self.num_logprobs[host[wanted]].max())
        if len(wanted) == len(flags):
            return Sampled(tokens, *raw_logprobs(logits, tokens, most))
        at = uploaded(wanted, self.device)
        some = raw_logprobs(logits.index_select(0, at), tokens.index_select(0, at), most)
        return Sampled(tokens, *(spread_rows(part, at, len(tokens)) for part in some))

# %%
def mixed_batch(names, steps=6, texts=None):
    """Chats with rules of their own, through one sampler; A's words."""
    options = {
        "A": SamplingOptions(temperature=1, top_p=0.9, seed=1, presence_penalty=0.5),
        "B": SamplingOptions(),
        "C": SamplingOptions(temperature=2, top_k=4, seed=3, logprobs=0),
    }
    sampler = DeviceSampler(len(names), 12, "cpu")
    texts = texts or {name: [0] for name in names}
    for row, name in enumerate(names):
        sampler.open_row(row, options[name], 0, texts[name][:1], texts[name][1:])
    for _ in range(steps):
        logits = MODEL[[texts[name][-1] for name in names]]
        positions = torch.tensor([len(texts[name]) for name in names])
        rows = list(range(len(names)))
        sampled = sampler.sample(logits, torch.tensor(rows), positions, rows)
        for name, token in zip(names, sampled.tokens.tolist()):
            texts[name].append(token)
    return sampler, texts


for names in ("A", "AB", "CBA"):
    sampler, texts = mixed_batch(names)
    print(f"A in {names:3}: {words(texts['A'])}   {sampler}")
_, begun = mixed_batch("A", 2)
_, resumed = mixed_batch("BA", 4, {"A": begun["A"], "B": [7, 7, 7]})
print("resumed: ", words(resumed["A"]))
assert resumed["A"] == texts["A"]

# %% [markdown]
# Top-p, a penalty and an interruption are in it, and A says the same. What about a row whose model has
# gone wrong?

# %%
logits = torch.zeros(3, 12)
logits[1, 5] = torch.nan
rows = torch.arange(3)
broken = DeviceSampler(3, 12, "cpu")
for row in range(3):
    broken.open_row(row, SamplingOptions(temperature=1, seed=row, logprobs=2))
got = broken.sample(logits, rows, rows, [0, 1, 2])
print("tokens", got.tokens.tolist())
print("log-probabilities", [round(value, 3) for value in got.logprobs.tolist()])
assert got.tokens[1] == -1 and (got.tokens[[0, 2]] >= 0).all()

# %% [markdown]
# -1 travels to the host with the other tokens; nobody looked at the device to find it. That claim, that
# the host never waits, is tested twice: on a CPU by a mode of torch that sees every operation and
# refuses those whose result the host would need, on a GPU by CUDA's own debug mode.
#
# ## What it costs
#
# Predictions for 256 rows on an H200. Greedy and temperature read the logits once and could be as quick as
# a plain read; the noise costs some hundred integer and float operations a token, so the latter will be
# bound by arithmetic. Cutting reads a row six times and writes it once. Sorting moves 131 MB of keys and 263 MB of ids
# through memory several times, and should lose; for one row, where 131 of 132 multiprocessors have nothing
# to do, the search should lose.

# %% tags=["hide-input"]
import json

result = json.load(open("../../benchmarks/results/device_sampling.json"))
print("measured:", result["device"], "torch", result["versions"]["torch"])
for row in result["rows"]:
    others = ", ".join(f"{name} {us:,.0f} us" for name, us in row["us"].items() if name != "ours")
    case, ours = row["case"], row["us"]["ours"]
    print(f"measured: {row['batch']:3} rows, {case:17} {ours:7,.0f} us ({others})")
print("measured: of 256 rows:", result["headline"])
print(f"256 x 128,256 logits: {256 * 128256 * 4 / 1e6:.0f} MB in float32, "
      f"ids {256 * 128256 * 8 / 1e6:.0f} MB")

# %% [markdown]
# It came out so on the device that the first line names, but for greedy: with 256 rows it takes twice as
# long as the read. "torch" is the path without kernels,
# "multinomial" a softmax and `torch.multinomial`, "sort" what a batch with knobs of its own does with a
# sort, a running sum and `torch.multinomial`; neither of the latter two is keyed. For a single row sorting
# is quicker than the search, as feared. What this does not show: the logits were drawn from a normal
# distribution. How long the search takes depends on how many tokens two pivots enclose, and with that on
# the model.
#
# ## Break it
#
# Leave out one part of the key at a time.

# %%
def without(part):
    def pick(logits, temperature, keys, positions):
        positions = positions * 0 if part == "position" else positions
        keys = keys[:1].expand_as(keys) if part == "seed" else keys
        return draw_tokens(logits, temperature, keys, positions)

    return pick


print("no position:", words(serve("A", 9, pick=without("position"))))
twins = {"A": [0], "B": [0]}
serve("AB", 9, twins, without("seed"))
print("no seed:    ", words(twins["A"]), "|", words(twins["B"]))
assert twins["A"] == twins["B"]

# %% [markdown]
# Without the position a step hears the same noise as the one before, and a text that comes back to a word
# goes round for ever. Without the seed two answers to one prompt are one. Neither raises an error,
# and each single step has the right probabilities.
#
# ## Mistakes in circulation
#
# :::{admonition} Check it yourself
# :class: warning
# - A seed is said to ~~make a text repeatable~~. Only if the numbers belong to the text; the opening had a
#   seed.
# - Top-k is said to ~~keep k tokens~~. It keeps what ties with the k-th too, and in bf16 that happens.
# - Greedy is said to be ~~sampling at a very low temperature~~. Two equal logits are drawn evenly at any
#   temperature above 0; greedy always takes the first.
# :::

# %%
tied = torch.tensor([[3.0, 1.0, 3.0, 3.0]]).expand(300, -1)
one = DeviceSampler(1, 4, "cpu")
one.open_row(0, SamplingOptions(temperature=1, top_k=1, seed=0))
rows, positions = torch.zeros(300, dtype=torch.int64), torch.arange(300)
print("top-k 1 keeps", int(one.apply(tied, rows, rows)[0].isfinite().sum()), "of", [3, 1, 3, 3])
for temperature in (1e-6, 0):
    one.open_row(0, SamplingOptions(temperature=temperature, seed=0))
    tokens = one.sample(tied, rows, positions, rows).tokens
    print(f"temperature {temperature:g}:", tokens.bincount(minlength=4).tolist())
assert tokens.unique().tolist() == [0]

# %% [markdown]
# ## State card
#
# | class or function | state, or what it is a function of | invariant | what breaks next |
# |---|---|---|---|
# | `draw_tokens` | seed, sample, position, token | the batch is not among its arguments | logits themselves depend on the batch, through matrix products (lab on batch invariance) |
# | `cut_tokens` | one row's logits and knobs | sums of integers: no order of adding matters | a flat row is searched slowly |
# | `RowSettings` | `settings`, `seen`, `flags` | an open row's flags speak of its settings | a step that is undone has been counted (chapter 13 opens the row anew) |
# | `DeviceSampler.sample` | all of these | what is launched follows from flags and shapes | penalties and cuts of mixed batches are not in a graph (chapter 14) |
#
# ## Real world
#
# - vLLM 0.23: `vllm/v1/sample/sampler.py` says the order of its steps in its first comment; log-probabilities
#   are raw unless told otherwise. A request with a seed has a generator of its own, and
#   `vllm/v1/sample/ops/topk_topp_sampler.py` visits them one after the other. Its newer runner keys the noise
#   by seed and position, as we do (`vllm/v1/worker/gpu/sample/gumbel.py`), keeps counts of generated tokens
#   and a bit mask of the prompt (`vllm/v1/worker/gpu/sample/penalties.py`). `vllm/v1/sample/ops/topk_topp_triton.py` searches
#   for pivots in place of a sort.
# - SGLang: `python/sglang/srt/layers/sampler.py` has a seeded draw of the same kind, a hash of seed, position
#   and token turned into Gumbel noise. Without seeds it calls FlashInfer's kernels, which draw again until a
#   token lies inside the cuts.
# - TensorRT-LLM samples in `tensorrt_llm/_torch/pyexecutor/sampler.py`, rows with like settings together.
# - transformers runs one processor after the other (`generation/logits_process.py`), each with one value for
#   the whole batch. They are the oracle of the tests here.
#
# ## Exercises
#
# :::{exercise}
# :label: ex-A4-compute
# **Compute.** Three tokens have logits 2, 1 and 0. Which of them does top-p 0.7 keep at temperature 1? And at
# temperature 2? And min-p 0.3, at both?
# :::
#
# :::{solution} ex-A4-compute
# :class: dropdown
# Probabilities at 1: 0.665, 0.245, 0.090. The first alone does not reach 0.7, so two stay. At 2: 0.506, 0.307,
# 0.186: two again. Min-p compares with the likeliest: ratios 1, 0.368, 0.135 at 1, so two stay; 1, 0.607,
# 0.368 at 2, so all three.
# :::

# %% tags=["hide-input"]
x = torch.tensor([[2.0, 1, 0]])
for temperature, want in ((1.0, (2, 2)), (2.0, (2, 3))):
    knobs = torch.tensor([[0, 0.7, 0], [0, 1, 0.3]], dtype=torch.float64)
    kept = cut_tokens(x.expand(2, -1), torch.full((2, 1), temperature), knobs, 0).isfinite().sum(1)
    assert kept.tolist() == list(want)

# %% [markdown]
# :::{exercise}
# :label: ex-A4-trace
# **Trace.** A row was opened with prompt `[1, 2]` and generated tokens `[2, 5, 5]`. What stands in its line of
# `seen`, for a vocabulary of 6? It then draws 1. What stands there now?
# :::
#
# :::{solution} ex-A4-trace
# :class: dropdown
# Token 1 is in the prompt: 1. Token 2 is in the prompt and once generated: 1 + 2 = 3. Token 5 was generated
# twice: 4. After the draw token 1 has 1 + 2 = 3.
# :::

# %% tags=["hide-input"]
row = DeviceSampler(1, 6, "cpu")
row.open_row(0, SamplingOptions(presence_penalty=0.1), 0, [1, 2], [2, 5, 5])
assert row.seen.tolist() == [[0, 1, 3, 0, 0, 4]]
zero = torch.zeros(1, dtype=torch.int64)
token = row.sample(torch.eye(6)[1:2], zero, zero, [0]).tokens
assert token.tolist() == [1] and row.seen.tolist() == [[0, 3, 3, 0, 0, 4]]

# %% [markdown]
# :::{exercise}
# :label: ex-A4-break
# **Break.** Write `naive_gumbel`, which computes the waiting time as $-\log u$ with $u$ = (word + 1/2) / $2^{32}$ in
# float32. Among a million words, how many different values do the shortest 128 waits have, and how many with
# `gumbel`?
# :::
#
# :::{solution} ex-A4-break
# :class: dropdown
# Near 1 float32 has a step of $2^{-24}$. A million words spread over the unit interval have their 128 largest
# within $128 / 2^{20} = 2^{-13}$ of 1, where there are 2,048 steps: a few values coincide, and the very
# shortest wait is rounded to 0 or one step. `gumbel` keeps all 128 apart.
# :::

# %% tags=["hide-input"]
def naive_gumbel(words):
    uniform = (words.float() + 0.5) * 2**-32
    return -(-uniform.log()).log()


million = many_words(9, 1 << 20)
kept_apart = [len(f(million).sort().values[-128:].unique()) for f in (naive_gumbel, gumbel)]
assert kept_apart[0] < kept_apart[1] == 128, kept_apart

# %% [markdown]
# :::{exercise}
# :label: ex-A4-implement
# **Implement.** `draw_many(logits, temperature, keys, positions, n)`: the n *different* tokens of a row in the order
# in which they would be drawn without putting back. Hint: nothing new has to be drawn.
# :::
#
# :::{solution} ex-A4-implement
# :class: dropdown
# The clocks ring one after the other: the n largest sums, in order.
# :::

# %% tags=["hide-input"]
def draw_many(logits, temperature, keys, positions, n):
    ids = torch.arange(logits.shape[1])
    noise = gumbel(noise_words(*position_keys(keys, positions), ids))
    return (logits + temperature[:, None] * noise).topk(n).indices


count = 20000
keys = torch.tensor([row_key(1, 0)]).expand(count, -1)
flat = torch.tensor([2.0, 1, 0]).expand(count, -1)
pairs = draw_many(flat, torch.ones(count), keys, torch.arange(count), 2)
assert torch.equal(pairs[:, 0], draw_tokens(flat, torch.ones(count), keys, torch.arange(count)))
p = flat[0].softmax(-1)
often = ((pairs[:, 0] == 0) & (pairs[:, 1] == 1)).float().mean()
assert abs(often - p[0] * p[1] / (1 - p[0])) < 0.015

# %% [markdown]
# :::{exercise}
# :label: ex-A4-bytes
# **Compute.** How many bytes would a table of `seen` take for 1,024 rows of Gemma's 262,144 tokens? And with two
# bytes a count and one bit for the prompt? What is lost?
# :::
#
# :::{solution} ex-A4-bytes
# :class: dropdown
# 1 GiB; half of it, plus 32 MiB for the bits. The 65,536th time a token is
# generated its count returns to 0, and two tables have to be kept in step.
# :::

# %% tags=["hide-input"]
entries = 1024 * 262144
print(f"{entries * 4 / 2**30:.0f} GiB, or {entries / 8 / 2**20:.0f} MiB of bits")
assert 4 * entries == 2**30 and entries // 8 == 32 * 2**20
assert np.array([65535], np.uint16) + np.uint16(1) == 0  # the count that returns

# %% [markdown]
# ## Further reading
#
# - Gentle: [the Gumbel-max trick](https://timvieira.github.io/blog/post/2014/07/31/gumbel-max-trick/) by Tim
#   Vieira, with its proof in a few lines.
# - [Parallel random numbers: as easy as 1, 2, 3](https://doi.org/10.1145/2063384.2063405) (Salmon, Moraes, Dror
#   and Shaw, 2011): why a counter and a mixing function are all that a generator needs.
# - [The curious case of neural text degeneration](https://arxiv.org/abs/1904.09751) (Holtzman and others, 2020),
#   where top-p comes from.
# - Deep: [Stochastic beams and where to find them](https://arxiv.org/abs/1903.06059) (Kool, van Hoof and Welling,
#   2019), which draws whole sentences without putting back, by the exercise's device.
