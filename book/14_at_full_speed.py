# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # At full speed
#
# Chapter 13's engine is complete, and on a GPU it crawls. A decode step is a long list of small
# operations; Python names each of them, one after the other, and the device, done with one before
# the next is named, waits. Count them for a small model, then see what a large one pays.

# %% tags=["hide-input"]
import json
import warnings
from collections import Counter
from pathlib import Path

warnings.filterwarnings("ignore", message="IProgress not found")  # we show no progress bars
import matplotlib.pyplot as plt
import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from paged_kv.draw import book_style
from paged_kv.engine import Engine

torch.set_num_threads(1)
book_style()
device = "cuda" if torch.cuda.is_available() else "cpu"
RESULTS = Path("../benchmarks/results/engine.json")
result = json.loads(RESULTS.read_text())
rows = result["rows"]


def row_of(engine, requests=None, **wanted):
    """The row of an engine, and of a number of requests."""
    return next((r for r in rows if r["engine"] == engine and r.get("requests") == requests
                 and all(r.get(key) == value for key, value in wanted.items())), None)


def small_model(layers=2):
    """A random Llama: two layers, four query heads, two KV heads, 300 tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=300, max_position_embeddings=512, initializer_range=0.2)
    return LlamaForCausalLM(config).to(device).eval()


rng = np.random.default_rng(0)
prompts = [rng.integers(0, 300, rng.integers(1, 60)).tolist() for _ in range(12)]


def tokens_of(answers):
    """What each request was answered."""
    return [answer.texts[0].token_ids for answer in answers]

# %%
class CountOps(TorchDispatchMode):
    """Counts the operations that torch hands to a device; views cost nothing and do not count."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.count += not op.is_view
        return op(*args, **(kwargs or {}))


with torch.inference_mode():
    counts = []
    for layers in (2, 3):
        model, ids = small_model(layers), torch.tensor([[5]], device=device)
        with CountOps() as seen:
            model(ids, use_cache=False)
        counts.append(seen.count)
each = counts[1] - counts[0]
print(f"operations in one layer, without the cache: {each}")
print(f"in 32 layers: {32 * each}")
plain, asked = row_of("eager", 256), row_of("paged_kv", 256)
print(f"measured: {result['device']}: eager {plain['tokens_per_s']:,} tokens/s,",
      f"{1000 * plain['seconds'] / sum(plain['step_kinds'].values()):.0f} ms a step")
print(f"measured: the floor under the same steps {asked['floor_s']:.1f} s,",
      f"eager took {plain['seconds']:.1f} s")

# %% [markdown]
# More than a thousand launches a step, and a host that needs some tens of microseconds to get each
# one through Python, PyTorch and the driver. The device finishes most of them sooner. Nothing here is
# wrong, and for most of the time a very expensive machine waits.
#
# **The question.** How does the same engine come near the speed of the device's memory, without a
# single answer changing?
#
# :::{card} This chapter
# - **You need** [chapter 13](13_engine.ipynb) and, for what is inside a step, [11](11_triton_decode.ipynb) and
#   [12](12_triton_prefill.ipynb).
# - **Exports** `step_sizes`, `fused_layers`, `fast_moves`, `graphs`.
# - **Device** CPU, one thread; on a GPU the same cells print the same. What is fast was measured on an H200.
# - **Run time** under a minute.
# - **You are here** 00 tour · 01 sizing · 02 contiguous pool · 03 block manager · 04 paged attention ·
#   05 guest model · 06 copy-on-write · 07 sampling · 08 prefix cache · 09 scheduling · 10 preemption ·
#   11 decode kernel · 12 prefill kernel · 13 engine · **14 full speed**
# :::
#
# ## The floor
#
# Before anything is made faster: how fast could it be? A step must read every weight once, and the K/V of
# every token that it attends to; it must multiply every weight with every token. Neither can be avoided, and
# both can at best happen at the same time. So each step has a floor: the larger of bytes over bandwidth and
# operations over rate. Here it is for a step of 256 sequences with 350 tokens each, of the shape of Llama 3 8B,
# with the two ceilings as they were measured on the device: a plain sum, and one large matrix product.

# %%
weights = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 128256 * 4096
kv = 2 * 32 * 8 * 128 * 2  # bytes of one token
read, matmul = asked["read_TB_s"], asked["matmul_TFLOP_s"]


def floor(sequences, context):
    """Milliseconds for the bytes, and for the arithmetic, of one decode step."""
    num_bytes = 2 * weights + sequences * context * kv
    flops = 2 * weights * sequences + 4 * sequences * context * 4096 * 32
    return num_bytes / (read * 1e12) * 1e3, flops / (matmul * 1e12) * 1e3


print(f"measured: reads {read:.2f} TB/s, products {matmul} TFLOP/s")
print(f"weights {2 * weights / 1e9:.1f} GB, K/V of 256 x 350 tokens {256 * 350 * kv / 1e9:.1f} GB")
for n in (1, 16, 64, 256, 1024):
    of_bytes, of_products = floor(n, 350)
    print(f"{n:5} sequences: {of_bytes:5.1f} ms of bytes, {of_products:5.1f} ms of products")

# %% [markdown]
# :::{admonition} Predict
# :class: tip
# The weights are the same for one sequence and for 256. From how many sequences on does the arithmetic of
# the products, and not the reading of the weights, set their pace?
# :::
#
# :::{dropdown} Reasoning
# A weight has two bytes, and $n$ sequences do $2n$ operations with it. Reading takes as long as computing where $n$ is the
# rate of products over that of reads: 800 over 4.7, about 170. So at 256 the products are bound by arithmetic, while attention
# beside them stays bound by bytes. The floor lets the two overlap. An engine that runs one behind the other, as ours does,
# cannot reach it.
# :::

# %%
crossing = matmul / read
print(f"measured: products turn from bytes to arithmetic at {crossing:.0f} sequences")
assert 100 < crossing < 250

# %% [markdown]
# ## What can be recorded
#
# The cure for launches is not to launch. A CUDA graph is a recording: the driver notes a sequence of kernels
# once, with all their arguments, and replays it later by a single call. The price is in "all their arguments".
# Addresses, shapes and the number of launches are fixed for good. Whatever differs from step to step has to lie
# *in memory*, at the place that the recording knows, and no decision may be left to the host in between.
#
# Most of that was prepared long ago, for this moment. The block tables stay on the device and change in
# place. The kernels take lengths, rows and slots from memory, and their plans are made by a launch, not by
# the host ([chapter 11](11_triton_decode.ipynb)). A step arrives in one buffer by one copy, and each field
# always lies at the same place (`StepUpload`). The tokens that the last step drew never leave the device
# before the next one needs them. What is left is the *shape*: today 37 sequences decode, tomorrow 38.
#
# So shapes are rounded up. A handful of sizes is recorded, and a step runs in the smallest that holds it; the
# rest of it is padding. Steps that only decode have one number; mixed steps have two, decodes and tokens of
# chunks beside them.

# %% tags=["export:step_sizes"]
"""Which sizes of steps are captured, and which of them holds a given step."""

from collections.abc import Iterator
from dataclasses import dataclass

from paged_kv.runner import Room
from paged_kv.sizing import at_least
from paged_kv.step_upload import StepShape


@dataclass(frozen=True)
class StepSizes:
    """The shapes that graphs are captured for.

    Fields
        decodes  sizes of steps that decode and nothing else, rising.
        beside   decodes that may stand beside chunks of prompts, rising.
        tokens   of those chunks together, rising;  chunks: sequences among them, one of which
                 is padding.
    """

    decodes: tuple[int, ...]
    beside: tuple[int, ...]
    tokens: tuple[int, ...]
    chunks: int

    def fit(self, shape: StepShape) -> StepShape | None:
        """The smallest captured shape that holds `shape`; None where none does."""
        if not shape.chunks:
            decodes = ceiling(self.decodes, shape.decodes)
            return None if decodes is None else StepShape(decodes, 0, 0)
        decodes, tokens = ceiling(self.beside, shape.decodes), ceiling(self.tokens, shape.tokens)
        if decodes is None or tokens is None or shape.chunks >= self.chunks:
            return None
        return StepShape(decodes, self.chunks, tokens)

# %% tags=["export:step_sizes"]
class StepSizes(StepSizes):  # type: ignore
    def __iter__(self) -> Iterator[StepShape]:
        """Every shape, the largest first: the first one captured sizes the memory of all."""
        for decodes in reversed(self.beside):
            for tokens in reversed(self.tokens):
                yield StepShape(decodes, self.chunks, tokens)
        for decodes in reversed(self.decodes):
            yield StepShape(decodes, 0, 0)


def ceiling(sizes: tuple[int, ...], least: int) -> int | None:
    """The smallest of `sizes` that is no less than `least`."""
    return next((size for size in sizes if size >= least), None)


def usual_sizes(room: Room, chunks: int = 24) -> StepSizes:
    """Sizes for steps of up to `room.max_tokens` tokens and `room.max_seqs` sequences.

    Padding is under 8 or 16 decodes alone and under 32 beside chunks.  The tokens of chunks are
    padded to under twice as many where they are few, so that the weights set the pace, and by
    under half where they are many.
    Args: `chunks`, how many may be in a captured step, padding included.
    """
    most = at_least(1, "max_seqs", room.max_seqs)
    small = (1, 2, 4, *range(8, 64, 8), *range(64, 512, 16), *range(512, most, 64))
    decodes = (*[n for n in small if n < most], most)
    beside = (*[n for n in (0, 16, *range(32, 4096, 32)) if n < most], most)
    more = (2 ** (i // 2 + 8) + i % 2 * 2 ** (i // 2 + 7) for i in range(40))  # 256, 384, 512 ...
    tokens = [n for n in (32, 64, 128, *more) if n < room.max_tokens]
    return StepSizes(decodes, beside, (*tokens, room.max_tokens), chunks)

# %%
usual = usual_sizes(Room(2048, 256, (256, 512)))
print(len(usual.decodes), "sizes of decode steps,", len(usual.beside) * len(usual.tokens),
      "of mixed ones")
for asked_shape in (StepShape(37, 0, 0), StepShape(3, 1, 70), StepShape(200, 2, 700),
                    StepShape(5, 30, 300)):
    print(asked_shape, "->", usual.fit(asked_shape))

# %% [markdown]
# The last one has too many chunks for any recording; it runs the plain way, launch by launch. Such a step is never
# wrong, only slow, and `stats` counts it.
#
# **Turn the knob.** `usual_sizes(room, chunks=40)` holds it too; expect every mixed step to run a few more programs
# that find nothing to do.
#
# ## Padding that harms nobody
#
# Padding must not be seen by anybody: no byte of the store may change, and no logit. The contract is the
# book's old one: a token to skip has slot -1, a sequence that is not there has length 0. `StepUpload` fills a
# shape with exactly these. Each padded decode is a token of its own, without a slot, in a sequence that holds
# nothing; what is left over behind the last chunk belongs to one more sequence that holds nothing.
#
# We compare. Below, every step of a run is computed twice, in its exact shape and in a padded one,
# over two stores, and all logits and *all bytes* of both stores are compared, the NaN of unwritten slots
# included.

# %%
from paged_kv import step_upload
from paged_kv.hf_adapter import host
from paged_kv.runner import EagerRunner
from paged_kv.step_upload import shape_of


class Twice:
    """Runs each plan in its exact and in a padded shape, over two stores, and compares."""

    def __init__(self, guest, store, room):
        self.counts, self.worst, self.padding = Counter(), 0.0, 0
        self.exact = EagerRunner(guest, store, room)
        self.padded = EagerRunner(host(guest.model, guest.store.num_blocks, 4), store, room)
        self.sizes = usual_sizes(room)

    def forward(self, plan, sampled):
        logits, step = self.exact.forward(plan, sampled)
        shape = self.sizes.fit(shape_of(plan))
        if shape is None:  # too many chunks: no padding to speak of
            shape = shape_of(plan)
        load = self.padded.upload.load
        self.padded.upload.load = lambda plan: load(plan, shape)
        other, _ = self.padded.forward(plan, sampled)
        self.padded.upload.load = load
        pairs = [(other, logits), *zip(*(r.guest.store.tensors for r in (self.padded, self.exact)))]
        for a, b in pairs:
            assert torch.equal(a.isnan(), b.isnan()), "a slot that nobody owns was written"
            self.worst = max(self.worst, (a - b).nan_to_num(0).abs().max().item())
        self.padding += shape.num_tokens - plan.num_tokens
        return logits, step


model = small_model()
twice = Engine(
    model, num_blocks=120, block_size=4, max_running=16, token_budget=64, runner=Twice,
    ahead=False)
asked_for = tokens_of(twice.generate(prompts, 16, stop_tokens=()))
print("steps compared:", twice.steps, " tokens of padding:", twice.runner.padding)
print("logits and bytes alike to 1e-4:", twice.runner.worst < 1e-4)

# %% [markdown]
# Now break it. A careless upload pads slots with 0 and not with -1: the padding then writes into block 0, which
# belongs to somebody. That is I3, nobody writes a block that another reads, violated by nobody in particular.

# %%
lay_out = step_upload.lay_out
step_upload.lay_out = lambda *given: lay_out(*given[:-1], max(given[-1], 0))  # the last is pad
careless = Engine(
    model, num_blocks=120, block_size=4, max_running=16, token_budget=64, runner=Twice)
try:
    careless.generate(prompts, 16, stop_tokens=())
except AssertionError as error:
    print("AssertionError:", error)
finally:
    step_upload.lay_out = lay_out

# %% [markdown]
# ## Moves without waiting
#
# One part of a step still stops the host: `run_moves`, which copies blocks between device and host memory for
# [chapter 10](10_preemption.ipynb). It gathers the blocks of each layer, waits for them, and scatters them; 32
# layers are 32 waits. The device can do better by itself. Host memory that is *pinned* has an address that
# the device can use, so a kernel may read or write it directly, over the bus, for all layers and all blocks in
# one launch. Order is kept by the stream: what is launched later sees what was launched before.

# %% tags=["export:fast_moves"]
"""Block moves between device and pinned host memory, one launch a direction, nobody waits."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from collections.abc import Iterable, Sequence

import torch

from paged_kv.host_pool import run_moves
from paged_kv.kernels_cache import tensor_addresses
from paged_kv.kv_store import KVStore, resolve_copies
from paged_kv.step_plan import Host, Move
from paged_kv.triton_device import jit, next_pow2, tl, triton


@jit(do_not_specialize=["words"])
def move_kernel(sources, targets, pairs, words, SLICE: tl.constexpr):
    """One slice of one block of one tensor: from one list of tensors to another."""
    at = tl.program_id(0) * SLICE + tl.arange(0, SLICE)
    pair = pairs + 2 * tl.program_id(2)
    source = tl.load(sources + tl.program_id(1)).to(tl.pointer_type(tl.int64))
    target = tl.load(targets + tl.program_id(1)).to(tl.pointer_type(tl.int64))
    source, target = tl.multiple_of(source, 16), tl.multiple_of(target, 16)
    data = tl.load(source + tl.load(pair).to(tl.int64) * words + at, mask=at < words)
    tl.store(target + tl.load(pair + 1).to(tl.int64) * words + at, data, mask=at < words)

# %% tags=["export:fast_moves"]
class FastMoves:
    """Runs the moves of plans between two stores of one shape.

    Host memory is pinned, so that the device reads and writes it itself.
    State: `stores` and the addresses of their tensors, device first.  On a CPU, or where a block
    is no multiple of 8 bytes: `run_moves`.
    """

    def __init__(self, device: KVStore, host: KVStore) -> None:
        self.stores = device, host
        words = device.tensors[0][:1].nbytes % 8 == 0
        self.on_gpu = words and device.tensors[0].device.type == "cuda"
        if self.on_gpu:
            host.tensors[:] = [tensor.pin_memory() for tensor in host.tensors]
            where = device.tensors[0].device
            self.addresses = [tensor_addresses(s.tensors).to(where) for s in self.stores]

    def __call__(self, moves: Sequence[Move]) -> None:
        """Run `moves`; the result is that of one after the other."""
        pairs = resolve_copies(moves)
        ends = {end for pair in pairs for end in pair}
        if not self.on_gpu or len(ends) < len({source for source, _ in pairs}) + len(pairs):
            run_moves(moves, *self.stores)  # some block is both read and written
            return
        kinds: dict[tuple[bool, bool], list[tuple[int, int]]] = {}
        for pair in pairs:
            kind = isinstance(pair[0], Host), isinstance(pair[1], Host)
            ids = [end.index if isinstance(end, Host) else end for end in pair]
            kinds.setdefault(kind, []).append((ids[0], ids[1]))
        for (source, target), ids_of in kinds.items():
            self.launch(self.addresses[source], self.addresses[target], ids_of)

# %% tags=["export:fast_moves"]
class FastMoves(FastMoves):  # type: ignore
    def launch(
        self, sources: torch.Tensor, targets: torch.Tensor, pairs: Iterable[tuple[int, int]]
    ) -> None:
        """All pairs of one direction."""
        tensors = self.stores[0].tensors
        where = torch.tensor(list(pairs), dtype=torch.int64).to(tensors[0].device)
        words = tensors[0][0].nbytes // 8
        piece = min(1024, next_pow2(words))
        grid = (triton.cdiv(words, piece), len(tensors), len(where))
        move_kernel[grid](sources, targets, where, words, SLICE=piece)

# %% [markdown]
# All pairs of a direction run at once, so a block that is both read and written in one list would be a race. Such lists
# are rare, an evicted block that a returning sequence takes at once, and go the slow and careful way.
#
# :::{admonition} Predict
# :class: tip
# Chapter 10 assumed a bus of 25 GB/s that takes 20 ms to get going, and a device that prefills 8,000 tokens/s; with these,
# short sequences are better computed again. On the H200 the bus is PCIe 5.0 x16. For a sequence of 4,096 tokens, which is quicker:
# to compute it again, or to move its 256 blocks out and back?
# :::
#
# :::{dropdown} Reasoning
# 256 blocks of 2 MiB are 0.54 GB, twice. At some 50 GB/s that is about 21 ms. To compute 4,096 tokens takes 15 GFLOP
# each, 61 TFLOP, at 800 TFLOP/s no less than 77 ms. So swapping should win by more than three times, and since
# both grow with length, it should win almost everywhere.
# :::

# %%
one = sorted((r for r in rows if r["engine"] == "one sequence"), key=lambda r: r["tokens"])
flop = 2 * weights  # a token
print(f"a block {kv * 16 / 2**20:.0f} MiB, 256 of them {256 * kv * 16 / 1e9:.2f} GB;",
      f"both ways {2 * 256 * kv * 16 / 50e9 * 1e3:.0f} ms at 50 GB/s")
print(f"a token {flop / 1e9:.0f} GFLOP, 4,096 of them {4096 * flop / 1e12:.0f} TFLOP:",
      f"{4096 * flop / 800e12 * 1e3:.0f} ms at 800 TFLOP/s")
for r in one:
    speed = 2 * r["blocks"] * r["bytes_per_block"] / r["swap_s"] / 1e9
    print(f"measured: {r['tokens']:5} tokens: again {1e3 * r['replay_s']:6.1f} ms,",
          f"out and back {1e3 * r['swap_s']:5.1f} ms at {speed:.0f} GB/s,",
          f"{r['replay_s'] / r['swap_s']:.1f} times")
assumed = [(2 * (0.02 + r["blocks"] * r["bytes_per_block"] / 25e9), r["tokens"] / 8000)
           for r in one]
print("as chapter 10 assumed: 25 GB/s and 20 ms each way, 8,000 tokens/s")

# %% tags=["hide-input"]
figure, axes = plt.subplots(figsize=(7, 3.2))
lengths = [r["tokens"] for r in one]
AGAIN, SWAP = "#D55E00", "#0072B2"
axes.plot(lengths, [1e3 * r["replay_s"] for r in one], "o-", color=AGAIN, label="computed again")
axes.plot(lengths, [1e3 * r["swap_s"] for r in one], "s-", color=SWAP, label="out and back")
axes.plot(lengths, [1e3 * b for _, b in assumed], ":", color=AGAIN, label="again, as assumed")
axes.plot(lengths, [1e3 * a for a, _ in assumed], ":", color=SWAP, label="swap, as assumed")
axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms", xticks=lengths,
         xticklabels=[f"{n:,}" for n in lengths])
axes.minorticks_off()
axes.legend()
plt.show()

# %% [markdown]
# *Figure: what it costs to take a sequence's blocks away and bring it back, by its length, on one H200: computed again, or
# moved to host memory and back; dotted, what chapter 10 had assumed.*
#
# There is no crossover where we looked: on this machine a swap wins at every length tried. What the figure does *not* show: both were
# measured alone. In a busy engine a replay shares its steps with decodes whose weights are read anyway, while a
# move keeps the device's processors waiting for the bus; and host memory has to be there. An overloaded pool, at the end of
# this chapter, shows how much of the advantage is left.
#
# Chapter 10's `Costs` were marked *assumed*. Here they are for this machine, by a fit to the times above, and marked with
# where they come from:

# %%
from paged_kv.preemption import Costs

tokens = np.array([r["tokens"] for r in one], float)
moved = np.array([r["blocks"] * r["bytes_per_block"] for r in one], float)
slope, latency = np.polyfit(moved, [r["swap_s"] / 2 for r in one], 1)
of_token, of_pair = np.linalg.lstsq(
    np.stack([tokens, tokens * (tokens + 1) / 2], 1), [r["replay_s"] for r in one], rcond=None)[0]
costs = Costs(one[0]["bytes_per_block"], 1 / slope, 1 / of_token, max(0.0, latency), of_pair,
              source=f"{result['device']}, {result['parts']['preempt']['date']}")
print(f"measured: bandwidth {costs.bandwidth / 1e9:.0f} GB/s,",
      f"{1e3 * costs.transfer_latency:.2f} ms for each way,",
      f"prefill {costs.prefill_tokens_per_s:,.0f} tokens/s,",
      f"{1e9 * costs.seconds_per_pair:.2f} ns a pair")
replays = [n for n in range(1, 501) if costs.replay_seconds(16 * n) < costs.swap_seconds(n)]
print("lengths, of 1 to 500 blocks, at which a replay would be quicker:", len(replays))

# %% [markdown]
# ## Fewer, larger operations
#
# A recording replays a thousand small kernels as faithfully as five large ones. Between the matrix products of a layer
# stand normalisations, rotations, activations and additions; each reads and writes the whole batch and does almost nothing to
# it. `torch.compile` fuses them. And the products of one input, queries, keys and values, or gate and up, can be one
# product over stacked weights: the same bytes and operations, fewer and larger launches that fill the device better.
#
# Both change the guest, so both are on trial like the guest itself in [chapter 05](05_guest_model.ipynb): its logits on the packed
# batch of the check at load, before and after. If they move by more than that check allows, everything is undone.

# %% tags=["export:fused_layers"]
"""Fewer, larger operations: products with one input merged, small ones fused by torch.compile."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import config as dynamo_config
from torch.nn import Linear, Parameter
from torch.nn import functional as F
from transformers import AttentionInterface

from paged_kv.guest_attention import HOST_NAME, host_attention
from paged_kv.guest_check import Probe, largest
from paged_kv.hf_adapter import PagedModel

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

# %% tags=["export:fused_layers"]
class Siblings:
    """Linear layers that are given the same input, as one product.

    The first one called computes all and keeps the others' shares until they are called.  A
    sibling called with another input computes its own, so the model stays usable by itself.
    State: `parts`, whose weights are now views of `weight`, [sum of out_features, in_features].
    """

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts, self.sizes = list(parts), [part.out_features for part in parts]
        self.weight = torch.cat([part.weight.detach() for part in parts])
        self.bias: Tensor | None = None
        if parts[0].bias is not None:
            self.bias = torch.cat([part.bias.detach() for part in parts])
        self.given: Tensor | None = None
        self.shares: Sequence[Tensor] = ()
        for place, own in enumerate(torch.split(self.weight, self.sizes)):
            parts[place].weight = Parameter(own, requires_grad=False)
            parts[place].forward = self.forward_of(place)

    def forward_of(self, place: int) -> Callable[[Tensor], Tensor]:
        """What the sibling at `place` does from now on."""

        def first(x: Tensor) -> Tensor:
            self.given = x
            self.shares = torch.split(F.linear(x, self.weight, self.bias), self.sizes, -1)
            return self.shares[0]

        def other(x: Tensor) -> Tensor:
            if not torch.compiler.is_compiling() and x is not self.given:
                return F.linear(x, self.parts[place].weight, self.parts[place].bias)
            return self.shares[place]

        return other if place else first

# %% tags=["export:fused_layers"]
class Siblings(Siblings):  # type: ignore
    def part_again(self) -> None:
        """Let each compute its own again; the weights stay together in memory."""
        self.given, self.shares = None, ()
        for part in self.parts:
            del part.forward


def merge_siblings(model: Any) -> list[Siblings]:
    """Merge the products that `SIBLINGS` names, wherever a module of `model` has them all."""
    merged = []
    for module in model.modules():
        for names in SIBLINGS:
            parts: list[Any] = [getattr(module, name, None) for name in names]
            if all(type(p) is Linear and "forward" not in vars(p) for p in parts):
                if len({p.bias is None for p in parts}) == 1:
                    merged.append(Siblings(parts))
    return merged

# %%
def logits_of(model):
    with torch.inference_mode():
        return model(torch.tensor([[5, 6, 7]], device=device), use_cache=False).logits


alone = small_model()
before, names = logits_of(alone), sorted(alone.state_dict())
with CountOps() as seen:
    logits_of(alone)
merged = merge_siblings(alone)
with CountOps() as now:
    logits_of(alone)
print("products merged:", len(merged), " operations:", seen.count, "->", now.count)
print("logits alike to 1e-5:", torch.allclose(before, logits_of(alone), atol=1e-5))
print("the same names in the state dict:", sorted(alone.state_dict()) == names)

# %% [markdown]
# Attention itself stays out of the compiler's sight: it is a kernel already, and what it needs travels in
# a keyword argument. So each layer is compiled around it, once for all layers, with the number of tokens left open.

# %% tags=["export:fused_layers"]
def decoder_layers(model: Any) -> list[Any]:
    """The layers of `model`: its list of modules that is as long as its config says."""
    lists = [part for part in model.modules() if isinstance(part, torch.nn.ModuleList)]
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    return next((list(part) for part in lists if len(part) == count), [])


def compiled_call(layer: Any) -> Any:
    """What `layer` would do when called, if it were compiled; it is not."""
    layer.compile(dynamic=True)
    call, layer._compiled_call_impl = layer._compiled_call_impl, None
    return call


@cache
def opaque_attention() -> Any:
    """`host_attention`, into which torch.compile does not look."""
    hidden: Any = torch.compiler.disable(host_attention)  # type: ignore[no-untyped-call]
    return hidden

# %% tags=["export:fused_layers"]
class FusedLayers:
    """A guest's layers with merged products, and all that lies between them and attention fused.

    State
        moved   how far the logits of the check at load moved; None if the model does not
                compile, or they moved by more than that check allows: then nothing is fused.
    Outside of `on` the model is what it was, save that products stay merged.
    """

    def __init__(self, guest: PagedModel) -> None:
        self.layers, self.moved = decoder_layers(guest.model), None
        self.calls: list[Any] = []
        with torch.inference_mode():
            plain = Probe(guest.model, guest.attention).hosted()
        merged = merge_siblings(guest.model)
        self.calls = [compiled_call(layer) for layer in self.layers]
        with torch.inference_mode():
            try:
                with self.on():
                    fused = Probe(guest.model, guest.attention).hosted()
                apart = [a - b for a, b in zip(fused, plain, strict=True)]
                moved = largest(apart, guest.model.dtype)
            except Exception:  # a compiler of so many parts fails in more ways than can be named
                moved = float("inf")
        if moved <= guest.report.tolerance:
            self.moved = moved
            return
        self.calls = []
        for siblings in merged:
            siblings.part_again()

# %% tags=["export:fused_layers"]
class FusedLayers(FusedLayers):  # type: ignore
    @contextmanager
    def on(self) -> Iterator[None]:
        """Within this context the layers run fused."""
        if self.calls:
            AttentionInterface.register(HOST_NAME, opaque_attention())
        for layer, call in zip(self.layers, self.calls, strict=False):
            layer._compiled_call_impl = call
        try:
            with dynamo_config.patch(recompile_limit=64):
                yield
        finally:
            for layer in self.layers:
                layer._compiled_call_impl = None

# %% [markdown]
# The check is worth something only if it can fail. Give it a compiler that is wrong by a little, and the fusion is undone.

# %%
right = compiled_call


def compiled_call(layer, factor=1.01):
    return lambda *given, **options: factor * layer.forward(*given, **options)


wrong = FusedLayers(host(small_model(), 8, 4))


def compiled_call(layer):
    return layer.forward  # merged products only, nothing compiled


fine = FusedLayers(host(small_model(), 8, 4))
compiled_call = right
print("a wrong compiler: moved by", wrong.moved, "  layers fused:", len(wrong.calls))
print("products merged: moved by less than 1e-4:", fine.moved < 1e-4, "  layers:", len(fine.calls))

# %% [markdown]
# ## The runner
#
# Now the parts come together: a `Runner`, as chapter 13 asks for one. It loads a step into the smallest recorded
# shape, runs the moves, and replays. What no shape holds runs eagerly. On a CPU, where there are no recordings, a step
# runs launch by launch *in its padded shape*, so that all of this is tested on every machine, except for the recording.

# %% tags=["export:graphs"]
"""Steps as CUDA graphs: recorded once for each size, then launched by one call."""

from collections import Counter
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from paged_kv.attend import KernelAttention
from paged_kv.hf_adapter import PagedModel
from paged_kv.kv_store import KVStore
from paged_kv.runner import logits_of_samples
from paged_kv.step_plan import StepPlan
from paged_kv.step_upload import (
    DeviceStep,
    StepUpload,
    field_places,
    shape_of,
    with_late_tokens,
)


def programs_compiled() -> int:
    """How many programs torch.compile has made in this process."""
    return int(counters["stats"]["unique_graphs"])

# %% tags=["export:graphs"]
class GraphRunner:
    """A Runner that replays a captured graph wherever the step fits one.

    Args: `sizes`, `usual_sizes` if None; `fuse`: whether `FusedLayers` are tried, on a GPU if
    None; `lazy`: capture at first use, not now.
    State
        graphs   {shape: (graph, logits)}.   failed: why capture is not possible, or None.
        sampled  int64, where a recording finds the tokens of the step before.
        counts   steps by how they ran: "graph"; "eager"; "recompiled", eager and with a pause
                 for torch.compile; "padded", on a CPU.
    """

    def __init__(
        self, guest: PagedModel, host: KVStore, room: Room, *,
        sizes: StepSizes | None = None, fuse: bool | None = None, lazy: bool = False,
    ) -> None:  # fmt: skip
        self.guest, self.moves = guest, FastMoves(guest.store, host)
        self.attention, self.sizes = guest.attention, sizes or usual_sizes(room)
        device = guest.model.device
        self.on_gpu = device.type == "cuda"
        tokens = max([room.max_tokens, *(shape.num_tokens for shape in self.sizes)])
        seqs = max([room.max_seqs, *(shape.num_seqs for shape in self.sizes)])
        self.upload = StepUpload(tokens, seqs, room.table_shape, device)
        self.sampled = torch.zeros(seqs, dtype=torch.int64, device=device)
        self.counts: Counter[str] = Counter()
        self.graphs: dict[StepShape, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.failed: str | None = None
        self.pool: Any = torch.cuda.graph_pool_handle() if self.on_gpu else None
        fuse = self.on_gpu if fuse is None else fuse
        self.fused = FusedLayers(guest) if fuse else None
        if self.on_gpu and not lazy:
            self.capture_all(room)

# %% tags=["export:graphs"]
class GraphRunner(GraphRunner):  # type: ignore
    def forward(self, plan: StepPlan, sampled: Tensor) -> tuple[Tensor, DeviceStep]:
        """As `Runner` says."""
        shape = None if self.failed else self.sizes.fit(shape_of(plan))
        step = self.upload.load(plan, shape)
        if plan.moves:
            self.moves(plan.moves)
        self.sampled[: len(sampled)].copy_(sampled)
        if shape is None or not self.on_gpu or not self.has_graph(step):
            before = programs_compiled()
            logits = self.run(step, self.sampled)
            kind = "eager" if shape is None or self.on_gpu else "padded"
            self.counts["recompiled" if programs_compiled() > before else kind] += 1
        else:
            graph, logits = self.graphs[shape]
            graph.replay()
            self.counts["graph"] += 1
        return logits_of_samples(logits, step, plan), step

    def has_graph(self, step: DeviceStep) -> bool:
        """Whether the shape of `step` is captured, if need be now."""
        return step.shape in self.graphs or self.capture(step)

    def run(self, step: DeviceStep, sampled: Tensor) -> Tensor:
        """One forward pass, launch by launch; logits, a row for each sequence of the shape."""
        batch = with_late_tokens(step, sampled)
        if isinstance(self.attention, KernelAttention):
            self.attention.begin(batch, step.shape.decodes)
        with nullcontext() if self.fused is None else self.fused.on():
            return self.guest.forward(batch)

# %% [markdown]
# To record is to run once while the driver takes notes. Before that, the same step runs for real, so that every kernel is
# compiled: a compiler cannot be recorded. All recordings share one pool of memory, since never two of them run at
# once, and the largest comes first, so that the others find room in what it took. A step made of padding only serves to
# record from; it reads nothing and writes nothing.

# %% tags=["export:graphs"]
class GraphRunner(GraphRunner):  # type: ignore
    def capture_all(self, room: Room) -> None:
        """Run eager steps of some sizes, so that kernels are compiled; then capture every size.

        All of these steps are padding and nothing else.
        """
        counts = [2**i for i in range(min(room.max_seqs, room.max_tokens, 64).bit_length())]
        with torch.inference_mode():
            for chunks in counts:
                shape = StepShape(min(1, room.max_tokens - chunks), chunks, room.max_tokens - 1)
                self.run(idle_step(self.upload, shape), self.sampled)
        for shape in self.sizes:
            if self.failed is None:
                self.capture(idle_step(self.upload, shape))

    def capture(self, step: DeviceStep) -> bool:
        """Record one size; False, with the reason in `failed`, where the model cannot be recorded.

        The step runs once before, so that kernels are compiled: it may, its slots get the same
        bytes again.
        """
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.inference_mode():
                with torch.cuda.stream(stream):
                    self.run(step, self.sampled)
                torch.cuda.current_stream().wait_stream(stream)
                with torch.cuda.graph(graph, pool=self.pool):
                    logits = self.run(step, self.sampled)
        except RuntimeError as error:
            self.failed = f"{type(error).__name__}: {error}".splitlines()[0]
            return False
        self.graphs[step.shape] = graph, logits
        return True

# %% tags=["export:graphs"]
def idle_step(upload: StepUpload, shape: StepShape) -> DeviceStep:
    """A step of nothing but padding, written to where the fields of `shape` lie."""
    step = upload.view(shape, field_places(shape, 0))
    batch = step.batch
    for field in (batch.input_ids, batch.positions, batch.rows, batch.logits_at, batch.seq_lens):
        field.zero_()
    batch.slot_mapping.fill_(-1)
    step.source.fill_(-1)
    batch.cu_seqlens.copy_(torch.arange(shape.num_seqs + 1, device=upload.device))
    batch.cu_seqlens[shape.decodes + 1 :] = shape.num_tokens
    return step

# %%
def kinds_of(engine):
    """Steps by kind; a recorded step on a GPU and a padded one on a CPU are the same step."""
    kinds = Counter(engine.stats.step_kinds)
    return {"in a recorded shape": kinds["graph"] + kinds["padded"],
            "launch by launch": kinds["eager"] + kinds["recompiled"]}


def plainly(guest, store, room):
    """A GraphRunner that does not fuse: float32 answers stay the same bits on any machine."""
    return GraphRunner(guest, store, room, sizes=usual_sizes(room, chunks=4), fuse=False, lazy=True)


model = small_model()
fast = Engine(model, num_blocks=120, block_size=4, max_running=16, token_budget=64, runner=plainly,
              ahead=False)
print("the same answers:", tokens_of(fast.generate(prompts, 16, stop_tokens=())) == asked_for)
print(kinds_of(fast))

# %% [markdown]
# ## A step ahead
#
# Between two replays the host has work: read the tokens, note who has ended, choose who runs next, write the next step. If
# the device waits meanwhile, that time is lost in every step. But the next step can be *decided* before the tokens of this
# one are known: its rows, blocks and slots depend only on how many tokens there are. Chapter 09 made `schedule()` so that it may run one step
# ahead of `commit()`, and chapter 13 feeds the drawn tokens forward on the device. So the engine launches step n + 1,
# and only then asks for the tokens of step n, which are there by the time it has asked.
#
# :::{admonition} Predict
# :class: tip
# Who reaches a token limit is known beforehand. Who says a stop token is not. Twelve requests end by a stop token or by
# their limit. Does running a step ahead cost the device anything, and how much?
# :::
#
# :::{dropdown} Reasoning
# A sequence that said its stop token in step n is in step n + 1 already: one token is computed for nothing, and
# dropped at its commit. Ends by length cost nothing, since the scheduler counts what it has planned. So at most one token
# for each request that stops by itself, and nothing else.
# :::

# %%
stops = list(range(0, 300, 12))
run = {}
for ahead in (False, True):
    engine = Engine(model, num_blocks=120, block_size=4, ahead=ahead, runner=plainly,
                    prefix_caching=False)
    answers = engine.generate(prompts, 24, stop_tokens=stops)
    run[ahead] = engine.tokens_run
    ended = Counter(answer.texts[0].finish_reason for answer in answers)
    if ahead:
        print("the same answers:", tokens_of(answers) == said)
    said = tokens_of(answers)
print("ended:", dict(sorted(ended.items())))
print("tokens computed:", run[False], "and a step ahead", run[True])
print("for nothing:", run[True] - run[False])
assert 0 < run[True] - run[False] <= ended["stop"]

# %% [markdown]
# One for each request that stopped by itself, and not one more.
#
# :::{admonition} Check it yourself
# :class: warning
# "Planning a step ahead computes ~~one token in vain for every request~~." Only for those that stop by themselves: above,
# of twelve requests, those that ended by their limit cost nothing, for the scheduler had counted their tokens beforehand. The
# cell above asserts it.
# :::
#
# ## The ladder
#
# Four measures, one after the other, on one workload: 256 requests with lognormal lengths, a
# model of the shape of Llama 3 8B with random weights in bf16, one H200. The prediction from the counts above: recording should
# remove nearly all of the host's time, a step ahead the rest of it, and fusing about a fifth of what the device is left with.

# %% tags=["hide-input"]
steps = ["eager", "eager, a step ahead", "graphs", "graphs, a step ahead"]
found = [(name, row_of(name, 256)) for name in steps]
found.append(("graphs, a step ahead, fused", row_of("paged_kv", 256)))
print("measured:", result["device"], "torch", result["versions"]["torch"])
for name, r in found:
    print(f"measured: {name:28} {r['tokens_per_s']:6,} tokens/s, {r['seconds']:5.1f} s")
gains = [b["tokens_per_s"] / a["tokens_per_s"] for (_, a), (_, b) in zip(found, found[1:])]
print(f"measured: recording brings {gains[0] * gains[1]:.1f} times, fusing {gains[3]:.2f} times;")
print(f"measured: a step ahead eager {gains[0]:.2f} times, recorded {gains[2]:.2f} times")
figure, axes = plt.subplots(figsize=(7, 2.6))
axes.barh([n for n, _ in found][::-1], [r["tokens_per_s"] for _, r in found][::-1], color="#0072B2")
at_best = asked["output_tokens"] / asked["floor_s"]
axes.axvline(at_best, color="#D55E00", linestyle="--", label="floor")
axes.set(xlabel="useful output tokens/s")
axes.legend()
plt.show()

# %% [markdown]
# *Figure: useful output tokens a second at 256 requests, one measure after the other, and the rate at which the floor of the
# same steps would allow them.*
#
# Recording is the large one. A step ahead can hide no more than the shorter of the two, host or device: for the eager engine
# that is the device, for the recorded one the host. Fusing brings more than the fifth that was predicted. The prediction counted the
# small kernels only; what the merged products add was not measured by itself.
#
# ## Anatomy of a step
#
# Where does a step's time go? Below, five steps of 256 sequences: the host's parts by its own clock, the device's by its events, first
# with the host behind the device, then a step ahead.

# %% tags=["hide-input"]
shapes = [r for r in rows if r["engine"] == "anatomy"]
COLOURS = {"schedule": "#009E73", "launch": "#0072B2", "choose": "#56B4E9", "commit": "#E69F00"}
HATCHES = {"schedule": "//", "launch": "", "choose": "..", "commit": "xx"}
figure, axes = plt.subplots(len(shapes), 1, figsize=(7.5, 4), layout="constrained")
for axis, shape in zip(axes, shapes):
    begin = shape["device_spans"][1][0] - 1
    for a, b in shape["device_spans"]:
        axis.broken_barh([(a - begin, b - a)], (0, 0.8), color="#999999", edgecolor="black")
    for name, a, b in shape["host_spans"]:
        if name in COLOURS:
            look = {"facecolor": COLOURS[name], "edgecolor": "black", "hatch": HATCHES[name]}
            axis.broken_barh([(a - begin, b - a)], (1, 0.8), **look)
    axis.set(yticks=[0.4, 1.4], yticklabels=["device", "host"], xlim=(-2, 44), ylim=(-0.2, 2))
    axis.set_title("a step ahead" if shape["ahead"] else "behind the device", loc="left")
axes[-1].set_xlabel("ms")
handles = [plt.Rectangle((0, 0), 1, 1, facecolor=COLOURS[n], edgecolor="black", hatch=HATCHES[n])
           for n in COLOURS]
figure.legend(handles, COLOURS, loc="upper right", ncol=4)
plt.show()
for shape in shapes:
    parts = ", ".join(
        f"{name} {ms:.2f}" for name, ms in shape["host_ms"].items() if name in COLOURS)
    print(f"measured: ahead {shape['ahead']}: a step {shape['step_ms']:.2f} ms,",
          f"device {shape['device_ms']:.2f} ms; host: {parts}")
kinds = shapes[0]["kernels_ms"]
for kind, ms in sorted(kinds.items(), key=lambda pair: -pair[1]):
    print(f"measured: {kind:28} {ms:6.2f} ms")

# %% [markdown]
# *Figure: five decode steps of 256 sequences on one H200; grey, the device at work; coloured, what the host does meanwhile. A step
# ahead, the device's bars touch.*
#
# The host's work has not become less; it has become invisible. What is left is the device's own: products, which at this
# batch are bound by arithmetic and come close to the rate of the one large product; attention, bound by bytes,
# which chapter 11 brought near the ceiling; and a rest of norms, rotation and activation that the floor does not
# contain at all. The floor lets bytes and arithmetic overlap. Here products and attention stand one behind the other,
# and that, more than anything else, is the distance.
#
# ## Against others
#
# The script compares four ways to serve the same requests, with the same lengths, on one machine, at most 256 at once: ours;
# transformers' `generate` on static batches, which pads every prompt to the longest and runs until the last answer is done;
# its continuous batching; and vLLM 0.23 with its graphs and its compiler. The prediction: most of a static batch is padding and
# waiting, so tens of times; vLLM does what we do, so no more than a few hundredths either way.

# %% tags=["hide-input"]
order = {"ours": 0, "vllm": 1, "batch": 2, "static": 3}
against = sorted((r for r in rows if r["part"] in order and "tokens_per_s" in r),
                 key=lambda r: (order[r["part"]], r["requests"]))
print(f"{'engine':33}{'requests':>9}{'tokens/s':>10}{'of the floor':>14}")
for r in against:
    base = row_of("paged_kv", r["requests"])
    known = base and r["part"] != "static"
    share = f"{100 * base['floor_s'] / r['seconds']:.0f} %" if known else ""
    print(f"measured: {r['engine']:23}{r['requests']:9}{r['tokens_per_s']:10,.0f}{share:>14}")
PEERS = {"x_vllm_32": "vLLM 0.23, 32 requests", "x_vllm_256": "vLLM 0.23, 256 requests",
         "x_vllm_1024": "vLLM 0.23, 1,024 requests", "x_hf_generate_batch": "generate_batch",
         "x_hf_static_64": "generate in static batches of 64"}
for name, peer in PEERS.items():
    print(f"measured: {result['headline'][name]} times {peer}")
sessions = {}
for name, part in result["parts"].items():
    sessions.setdefault((part["device"], part["date"], part["commit"]), []).append(name)
for (machine, day, commit), names in sessions.items():
    print(f"measured: {', '.join(names)}: commit {commit}")
static = row_of("generate, static 64", 64)
useful = static["output_tokens"] / (64 * static["steps"])
print(f"measured: static 64: {100 * useful:.0f} % of its rows' steps gave a useful token,",
      f"{1e3 * static['seconds'] / static['steps']:.0f} ms a step")

# %% [markdown]
# A static batch of 64 loses twice: three quarters of what it computes is for answers that have ended, and its
# steps run launch by launch, each over a cache that is copied to grow. The batch of 256 was stopped when the time that a run may take was over, and is counted as far as it
# came. The continuous batching of transformers wastes nothing on ended answers. It is warmed up before the clock starts, uses torch's attention, since no other
# kernel was at hand, and its time was not taken apart here. We have seen it at twice this rate, on such a device with another host, in a run
# that was not kept: take the factor as that of one machine.
#
# vLLM and ours stand close, and the rest of the floor is the same rest: products and attention one behind the other, norms and activations,
# prefills whose chunks come in sizes. At 1,024 requests the prediction missed. There queues are long and most steps mixed: ours are recorded
# whole, its in pieces around attention. That is an explanation by what the two do, not a measurement of the difference.
#
# The floor is that of *our* steps, prefill included: another engine may cut its steps otherwise, but the useful work is the same.
# What this does not show: long prompts, where prefill rules; models that do not fit one device; and latency,
# since all requests are there at once. One device, one model, random weights.
#
# The same engine serves from two CPU cores, where chapter 13's attention by blocks and packed products take the place of kernels and
# recordings. SmolLM2 in float32, greedy, against transformers' static batch of all prompts; the prediction is the ratio of
# the tokens that the two run through the model.

# %% tags=["hide-input"]
on_cpu = json.loads(RESULTS.with_name("engine_cpu.json").read_text())
print("measured:", on_cpu["device"], "torch", on_cpu["versions"]["torch"])
for r in on_cpu["rows"]:
    print(f"measured: {r['case']:10} {r['ours_s']:6.1f} s, generate {r['hf_s']:6.1f} s:",
          f"{r['times']} times; predicted {r['expected']} times;",
          f"equal answers {r['equal_answers']} of {r['prompts']}")

# %% [markdown]
# The prediction counts tokens, and misses on the high side: the longest answer fixes the number of steps for both, and a step of a few rows
# costs nearly as much as one of thirty-two, since it reads all weights either way. What the static batch wastes in a step is
# cheap for it, except attention over padding, and a prefill in which every prompt is as long as the longest.
#
# What the block table brings on top needs no new code, only requests that share:

# %% tags=["hide-input"]
for r in rows:
    if r["part"] == "features":
        print(f"measured: {r['engine']:26} {r['tokens_per_s']:6,} tokens/s,",
              f"{r['tokens_run']:8,} tokens computed")
for r in rows:
    if r["engine"].startswith("pool:"):
        events = {kind: n for kind, n in r["preemptions"].items() if n}
        print(f"measured: {r['engine']:16} {r['tokens_per_s']:6,} tokens/s,",
              f"{r['blocks']:,} blocks, {r['tokens_run']:8,} tokens computed, {events}")
roomy, again, swapped = (row_of(f"pool: {name}") for name in ("roomy", "recompute", "swap"))
more = again["tokens_run"] / roomy["tokens_run"] - 1
quicker = swapped["tokens_per_s"] / again["tokens_per_s"] - 1
print(f"measured: replays computed {100 * more:.0f} % more,",
      f"swaps were {100 * quicker:.0f} % quicker")

# %% [markdown]
# The last lines are the overloaded pool. Alone, a swap was more than four times quicker than a replay. Under load it is 9 %
# quicker, although the replays computed 34 % more tokens: they ride in steps that run anyway. A cost model that is
# fed with the times of single sequences overrates the swap; and either way, four tenths of the roomy pool's speed are gone.
#
# ## State card
#
# | class or function | state | invariant |
# |---|---|---|
# | `StepSizes` | sizes of decode steps and of mixed ones | a shape holds the step and one sequence of padding |
# | `FastMoves` | addresses of two stores | the result is that of one move after the other |
# | `Siblings` | stacked weights, shares not yet asked for | each product is what it was; the model stays usable by itself |
# | `FusedLayers` | compiled calls, `moved` | logits moved no more than the check at load allows, or nothing is fused |
# | `GraphRunner` | recordings by shape, counts | a replay does what the eager step would have done; padding is seen by nobody |
#
# What breaks next is no longer speed. Four questions stay open, and each has its seam. *Quantised blocks*: `KVStore.tensors` is
# a list, and scales would be further tensors of it, copied, swapped and forked with the rest. *Huge pages*: the kernels ask for
# a block's address only, so larger blocks are a number, and what they waste is chapter 02's sum. *Blocks
# across machines*: a move has two ends, and `Host` need not be the only other one. *Latent attention*: one tensor a layer
# instead of keys and values; tables, scheduler and recordings do not look inside.
#
# ## Real world
#
# - vLLM records decode steps whole and mixed steps in pieces around attention, in `vllm/v1/cudagraph_dispatcher.py` and
#   `vllm/compilation/cuda_graph.py`; its sizes stand in `vllm/config/compilation.py`. Its asynchronous
#   scheduling is the step ahead.
# - SGLang's `python/sglang/srt/model_executor/cuda_graph_runner.py` pads batches to recorded sizes; its scheduler overlaps the
#   host with the device in the same way (`event_loop_overlap`).
# - TensorRT-LLM pads with dummy requests in `tensorrt_llm/_torch/pyexecutor/cuda_graph_runner.py`, and has the step ahead in
#   `tensorrt_llm/_torch/pyexecutor/py_executor.py`.
# - Merged projections are how their model code is written in the first place; it is the price of guests that they come as
#   their authors wrote them.
#
# ## Exercises
#
# :::{exercise}
# :label: ex-14-floor
# **Compute.** At 32 sequences of 350 tokens, what share of the floor is the weights? And what would weights of one byte
# instead of two do to it?
# :::
#
# :::{solution} ex-14-floor
# :class: dropdown
# 15.0 GB of weights and 1.5 GB of K/V: 91 %. With one byte a weight the step would take 9.0 GB instead of 16.5, so a
# little more than half the time.
# :::

# %% tags=["hide-input"]
cache_bytes = 32 * 350 * kv
share = 2 * weights / (2 * weights + cache_bytes)
two, one_byte = 2 * weights + cache_bytes, weights + cache_bytes
print(f"{2 * weights / 1e9:.1f} GB, {cache_bytes / 1e9:.1f} GB: {100 * share:.0f} %;",
      f"{one_byte / 1e9:.1f} GB instead of {two / 1e9:.1f} GB")
assert round(100 * share) == 91

# %% [markdown]
# :::{exercise}
# :label: ex-14-trace
# **Trace.** Sizes (2, 4, 8) for decodes, (0, 4) beside chunks, (16, 32) tokens and 3 chunks. In which shapes do these steps
# run: 3 decodes; 3 decodes and one chunk of 17; 5 decodes and one chunk of 2; two chunks of 8; three chunks of 5?
# :::
#
# :::{solution} ex-14-trace
# :class: dropdown
# 4 decodes; 4 beside 32; eagerly, for 5 is more than 4; 0 beside 16; eagerly, for one of three chunks has to be padding.
# :::

# %% tags=["hide-input"]
few = StepSizes((2, 4, 8), (0, 4), (16, 32), 3)
traced = [StepShape(*numbers) for numbers in
          ((3, 0, 0), (3, 1, 17), (5, 1, 2), (0, 2, 16), (0, 3, 15))]
assert [few.fit(shape) for shape in traced] == [
    StepShape(4, 0, 0), StepShape(4, 3, 32), None, StepShape(0, 3, 16), None]

# %% [markdown]
# :::{exercise}
# :label: ex-14-break
# **Break.** `with_late_tokens` reads the tokens of the step before from `sampled`. Let it forget them, and use token 0 instead. Which
# requests get other answers, with the host a step ahead and without?
# :::
#
# :::{solution} ex-14-break
# :class: dropdown
# Without the step ahead nobody: the tokens are known when a step is planned, and travel in it. A step ahead every request
# that decodes goes astray from its second token on.
# :::

# %% tags=["hide-input"]
kept = with_late_tokens
astray = {}
for ahead in (False, True):

    def with_late_tokens(step, sampled):
        return kept(step, torch.zeros_like(sampled))

    engine = Engine(
        model, num_blocks=120, block_size=4, max_running=16, ahead=ahead, runner=plainly)
    wrong_tokens = tokens_of(engine.generate(prompts, 16, stop_tokens=()))
    astray[ahead] = sum(a != b for a, b in zip(wrong_tokens, asked_for))
    with_late_tokens = kept
assert astray == {False: 0, True: len(prompts)}

# %% [markdown]
# :::{exercise}
# :label: ex-14-price
# **Compute.** A recording takes about 0.15 s at the start. With the usual sizes for 256 sequences and 2,048 tokens, how long
# does it take to record them all? How would you start sooner?
# :::
#
# :::{solution} ex-14-price
# :class: dropdown
# 123 shapes, about 18 s. Record at first use (`lazy=True`): the first step of each size then pays, and the sizes that
# never come cost nothing.
# :::

# %% tags=["hide-input"]
count = len(list(usual))
print(count, "shapes,", f"{0.15 * count:.0f} s at 0.15 s each")
assert round(0.15 * count) == 18

# %% [markdown]
# :::{exercise}
# :label: ex-14-sizes
# **Implement.** Write `sizes_for(shapes, most)`: at most `most` sizes of decode steps such that the padded tokens, summed over a list of
# steps seen, are as few as possible. (Every step must fit.) Compare with the usual sizes on 200 random steps.
# :::
#
# :::{solution} ex-14-sizes
# :class: dropdown
# Sort the distinct numbers; a size is one of them. Let `best[j][m]` be the least padding of the steps up to number j with m sizes, the
# last of which is j. It is the minimum over the size before it, i, of `best[i][m - 1]` plus what the steps between i and j
# are padded by.
# :::

# %% tags=["hide-input"]
def sizes_for(shapes, most):
    count = Counter(shapes)
    sizes = sorted(count)

    def pad(i, j):
        return sum(count[s] * (sizes[j] - s) for s in sizes[i:j + 1])

    best = [(pad(0, j), (sizes[j],)) for j in range(len(sizes))]
    for _ in range(most - 1):
        best = [min([best[j]] + [(best[i][0] + pad(i + 1, j), best[i][1] + (sizes[j],))
                                 for i in range(j)]) for j in range(len(sizes))]
    return best[-1]


seen_steps = [int(n) for n in np.random.default_rng(1).integers(1, 257, 200)]
padding, own = sizes_for(seen_steps, len(usual.decodes))
usual_padding = sum(ceiling(usual.decodes, n) - n for n in seen_steps)
assert len(own) <= len(usual.decodes) and all(ceiling(own, n) is not None for n in seen_steps)
assert padding < usual_padding

# %% [markdown]
# ## Further reading
#
# - Gentle: how to think about rooflines, in *How to Scale Your Model* {cite}`austin2025scaling`.
# - vLLM's and SGLang's own accounts of the step ahead: asynchronous scheduling, the overlapped scheduler
#   {cite}`zheng2024sglang`.
# - Orca {cite}`yu2022orca`, where scheduling by the step began; Sarathi-Serve {cite}`agrawal2024sarathi`, for why steps are mixed.
# - Deep: the compiler behind `torch.compile`, PyTorch 2 {cite}`ansel2024pytorch2`.
