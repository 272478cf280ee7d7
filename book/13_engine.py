# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The engine
#
# Three people ask a model. All three texts begin with the same eight tokens of instructions; each
# may get up to 12 tokens of answer, and the pool has 8 blocks. Chapter 5 has a loop that serves them.

# %% tags=["hide-input"]
import warnings

warnings.filterwarnings("ignore", message="IProgress not found")  # we show no progress bars
import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

SMALL = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}


def small_model(**changes):
    """A random Llama of two layers."""
    torch.manual_seed(0)
    config = LlamaConfig(**{**SMALL, "initializer_range": 0.2, **changes})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def alone(model, prompt, new, **options):
    """What transformers' own generate says of one prompt."""
    ids = torch.tensor([prompt])
    settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": None,
                "pad_token_id": 0, "max_new_tokens": new} | options
    with torch.inference_mode():
        return model.generate(ids, **settings)[0, len(prompt):].tolist()


model = small_model()

# %%
from paged_kv.block_manager import BlockManager
from paged_kv.hf_adapter import continuous_decode, host

rules = [11, 12, 13, 14, 15, 16, 17, 18]
chats = {"A": [*rules, 20, 21], "B": [*rules, 30, 31, 32], "C": [*rules, 40]}
guest = host(model, num_blocks=8, block_size=4)
manager = BlockManager(num_blocks=8, block_size=4, max_seqs=4, max_seq_len=64)

at_once = []
for state in continuous_decode(guest, manager, list(chats.values()), 12):
    at_once.append(len(state.running))
naive_run = sum(len(prompt) + 11 for prompt in chats.values())
print(f"{len(at_once)} steps, {naive_run} tokens run, at most {max(at_once)} chat at once")

# %% [markdown]
# The texts are right, and the service is poor. The loop promises every chat its last block before
# it begins, so they queue: 36 steps, one chat at a time. It computes the instructions three times. And
# nobody could ask it for a warmer answer, for two answers, for an end at a certain word, or take a question back.
# Every part that is missing has been built: sharing in chapters 6 to 8, decisions in chapter 9, relief in chapter 10.
#
# **The question.** How do all these parts become one loop that serves anybody's model, and how do we know that
# no request can tell who else was served?
#
# :::{card} This chapter
# - **You need** chapters 5 and 8 to 10; chapter 7 for beams. Appendix A4 chooses the tokens.
# - **Exports** `step_upload`, `cpu_attention`, `packed_products`, `runner`, `answers`, `chooser`,
#   `delivery`, `request_options`, `engine_setup`, `engine` (`Engine`).
# - **Device** CPU, one thread, float32. The same code serves a GPU.
# - **Run time** under two minutes, most of it the real model.
# - **You are here** 00 tour · 01 sizing · 02 contiguous pool · 03 block manager · 04 paged
#   attention · 05 guest model · 06 copy-on-write · 07 sampling · 08 prefix cache · 09 scheduling ·
#   10 preemption · 11 decode kernel · 12 prefill kernel · **13 engine** · 14 full speed
# :::
#
# ## The loop in one cell
#
# A step has one direction: requests, a plan, the device, tokens, and back to the requests. With the scheduler of
# chapter 9 and the guest of chapter 5 it fits a cell.

# %%
from paged_kv.packed_batch import PackedBatch
from paged_kv.host_pool import run_moves
from paged_kv.prefix_cache import PrefixCache
from paged_kv.request import Request
from paged_kv.scheduler import Scheduler


def naive_step(guest, scheduler):
    """Decide, upload, move, run, choose, commit."""
    plan, tables = scheduler.schedule(), scheduler.manager.tables
    if plan is None:
        return None, []
    run_moves(plan.moves, guest.store, guest.store)
    there = torch.tensor
    batch = PackedBatch(
        there(plan.token_ids).long(), there(plan.positions), there(plan.slot_mapping),
        there(tables.table), there(plan.rows), there(plan.cu_seqlens).int(),
        there(plan.seq_lens).int(), there(plan.cu_seqlens[1:] - 1),
    )
    logits = guest.forward(batch)[there(plan.sample_logits)]
    return plan, scheduler.commit(plan, logits.argmax(-1).numpy())


manager = BlockManager(num_blocks=8, block_size=4, max_seqs=4, max_seq_len=64)
scheduler = Scheduler(manager, PrefixCache(manager.pool, 4), token_budget=64)
for name, prompt in chats.items():
    scheduler.submit(Request(prompt, 12, request_id=name))
outputs, steps, run = [], 0, 0
while scheduler.ledger.groups:
    plan, ended = naive_step(guest, scheduler)
    outputs, steps, run = outputs + ended, steps + 1, run + plan.num_tokens
want = {name: alone(model, prompt, 12) for name, prompt in chats.items()}
assert all(one.completions[0].token_ids == want[one.request_id] for one in outputs)
print(f"{steps} steps, {run} tokens run; all three as the model says by itself")

# %% [markdown]
# 18 steps in place of 36, 57 tokens in place of 63, and the same texts. The rest of the chapter replaces
# the parts of this cell that do not last:
#
# - it sends the whole table, and eight arrays besides, one copy each;
# - it waits for the tokens before it decides what comes next: on a GPU the device idles meanwhile;
# - it takes the likeliest token for everybody, and nobody sees a word before the end;
# - if the model fails, or says nonsense, everything is lost.
#
# ## One upload
#
# Everything that a step needs is a few arrays of whole numbers. They go into one buffer, in one copy. The block tables
# stay on the device, where a step changes only the entries that are news.
#
# | name | dtype, shape | who writes it |
# |---|---|---|
# | `table` | int32 [max_seqs, max_blocks], on the device | `load`, by each plan's `table_updates` |
# | `hosts` | two buffers, int64, pinned for a GPU | `load`, in turns |
# | `data` | int64, on the device | one copy a step |
#
# **Invariant.** After `load(plan)` the device's table equals the scheduler's in every row that the plan runs.
#
# Two buffers, because the copy of one may still be on its way while the next is filled. A step may also be laid out in a
# shape larger than it is: chapter 14 needs that. The rest is padding that reads and writes nothing.

# %% tags=["export:step_upload"]
"""A step on its way to the device: one buffer, one copy, and tables that stay there."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged_kv.packed_batch import PackedBatch
from paged_kv.step_plan import StepPlan


@dataclass(frozen=True)
class StepShape:
    """Room for a step: `decodes` sequences of one token, then `chunks` sequences of `tokens`."""

    decodes: int
    chunks: int
    tokens: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole step."""
        return self.decodes + self.tokens

    @property
    def num_seqs(self) -> int:
        """Sequences of the whole step."""
        return self.decodes + self.chunks


def shape_of(plan: StepPlan) -> StepShape:
    """The exact shape of a plan; a sequence of one token behind a longer one counts as a chunk."""
    longer = plan.new_tokens > 1
    decodes = int(longer.argmax()) if longer.any() else len(longer)
    return StepShape(decodes, len(plan.rows) - decodes, plan.num_tokens - decodes)

# %% tags=["export:step_upload"]
@dataclass(frozen=True)
class DeviceStep:
    """A step as it lies on the device, valid until the next but one is loaded.

    Fields
        shape        of it; where it is larger than the plan, the rest is padding.
        batch        PackedBatch, with token 0 where the previous plan samples it.
        source       int64 [num_tokens]: which sample of the previous plan that is, or -1.
        sample_at    int64 [S]: the sequence of the batch that each sample is drawn from.
        sample_rows  int64 [S];  positions int64 [S]: a sample's row, its place in the sequence.
    """

    shape: StepShape
    batch: PackedBatch
    source: Tensor
    sample_at: Tensor
    sample_rows: Tensor
    positions: Tensor


def with_late_tokens(step: DeviceStep, sampled: Tensor) -> PackedBatch:
    """The batch, with the tokens that the previous plan sampled; the host never sees them.

    Args: `sampled`, int64: the samples of the previous plan, in its order.
    """
    late = sampled[step.source.clamp(min=0)]
    ids = torch.where(step.source >= 0, late, step.batch.input_ids)
    return replace(step.batch, input_ids=ids)

# %% tags=["export:step_upload"]
class StepUpload:
    """Brings plans to the device, each by one copy, and keeps the block tables there.

    Args: `max_tokens`, `max_seqs` of a step, padding included; `table_shape`, of the tables.
    State
        table  int32 [max_seqs, max_blocks] on the device, changed in place by each plan's news.
        hosts  two buffers, int64, pinned for a GPU: one is filled while the other travels.
        data   int64, where they arrive.  The fields of a shape always lie at the same places.
    """

    def __init__(
        self, max_tokens: int, max_seqs: int, table_shape: tuple[int, int], device: Any
    ) -> None:
        self.device = torch.empty(0, device=device).device
        self.on_gpu = self.device.type == "cuda"
        words = 6 * max_tokens + 16 * max(max_seqs, table_shape[0])
        self.hosts = [torch.zeros(words, dtype=torch.int64, pin_memory=self.on_gpu) for _ in "ab"]
        self.data = self.hosts[0].to(self.device)
        self.table = torch.full(table_shape, -1, dtype=torch.int32, device=self.device)
        self.turn = 0

# %% [markdown]
# `load` does the work in a fixed order: the fields, behind them the news of the table, one copy, then the news are
# put where they belong.

# %% tags=["export:step_upload"]
class StepUpload(StepUpload):  # type: ignore
    def load(self, plan: StepPlan, shape: StepShape | None = None) -> DeviceStep:
        """Take in the news of `plan` and bring what it runs, in a shape at least as large.

        Never waits for the device, unless the news are longer than a buffer.
        """
        shape, self.turn = shape or shape_of(plan), self.turn ^ 1
        host, places = self.hosts[self.turn], field_places(shape, len(plan.sample_rows))
        fill({name: host[at].numpy() for name, at in places.items()}, plan, shape)
        rows, columns, ids = plan.news.table_updates
        news = np.concatenate([rows * self.table.shape[1] + columns, ids])
        start = places["positions_of_samples"].stop
        fits = start + len(news) <= len(host)
        end = start + len(news) * fits
        if fits:
            host[start:end].numpy()[:] = news
        if self.on_gpu:
            self.data[:end].copy_(host[:end], non_blocking=True)
        else:
            self.data = host
        if len(news):
            arrived = self.data[start:end] if fits else torch.from_numpy(news).to(self.device)
            cells, blocks = arrived.view(2, -1)
            self.table.view(-1).index_copy_(0, cells, blocks.int())
        return self.view(shape, places)

    def view(self, shape: StepShape, places: dict[str, slice]) -> DeviceStep:
        """The fields of a step, as they lie on the device."""
        part = {name: self.data[at] for name, at in places.items()}
        cu = part["cu_seqlens"].view(torch.int32)[: shape.num_seqs + 1]
        lens = part["seq_lens"].view(torch.int32)[: shape.num_seqs]
        batch = PackedBatch(
            part["token_ids"], part["positions"], part["slots"], self.table,
            part["rows"], cu, lens, part["logits_at"],
        )  # fmt: skip
        samples = part["sample_at"], part["sample_rows"], part["positions_of_samples"]
        return DeviceStep(shape, batch, part["source"], *samples)

# %% tags=["export:step_upload"]
def field_places(shape: StepShape, num_samples: int) -> dict[str, slice]:
    """Where in the buffer each field lies, in words; those of samples come last, for they vary."""
    tokens, seqs = shape.num_tokens, shape.num_seqs
    sizes = dict.fromkeys(("token_ids", "positions", "slots", "source"), tokens)
    sizes |= {"rows": seqs, "logits_at": seqs, "cu_seqlens": seqs // 2 + 1}
    sizes |= {"seq_lens": (seqs + 1) // 2}
    sizes |= dict.fromkeys(("sample_at", "sample_rows", "positions_of_samples"), num_samples)
    ends = np.cumsum(list(sizes.values())).tolist()
    return {name: slice(end - n, end) for (name, n), end in zip(sizes.items(), ends, strict=True)}


def lay_out(values: NDArray[Any], real: int, room: int, out: NDArray[Any], pad: int) -> None:
    """Write `values` to `out`: the first `real` in front, the rest from `room` on, else `pad`."""
    end = room + len(values) - real
    out[:real], out[real:room] = values[:real], pad
    out[room:end], out[end:] = values[real:], pad

# %% tags=["export:step_upload"]
def fill(out: dict[str, NDArray[Any]], plan: StepPlan, shape: StepShape) -> None:
    """Write the fields of `plan`.

    Padding is tokens without a slot in sequences that hold nothing: a padded decode owns one,
    the first padded chunk all that lie behind the last real one.
    """
    real, room, last = shape_of(plan).decodes, shape.decodes, plan.cu_seqlens[1:] - 1
    source = np.full(plan.num_tokens, -1)
    source[last] = plan.token_source
    for name, values, pad in (
        ("token_ids", np.maximum(plan.token_ids, 0), 0), ("positions", plan.positions, 0),
        ("slots", plan.slot_mapping, -1), ("source", source, -1), ("rows", plan.rows, 0),
        ("logits_at", last, 0),
    ):  # fmt: skip
        lay_out(values, real, room, out[name], pad)
    out["logits_at"][room : room + len(plan.rows) - real] += room - real
    lay_out(plan.seq_lens, real, room, out["seq_lens"].view(np.int32)[: shape.num_seqs], 0)
    cu = out["cu_seqlens"].view(np.int32)[: shape.num_seqs + 1]
    cu[: room + 1] = np.arange(room + 1)
    lay_out(plan.cu_seqlens[real + 1 :] + room - real, 0, 0, cu[room + 1 :], 0)
    cu[room + 1 + len(plan.rows) - real :] = shape.num_tokens
    out["sample_at"][:] = plan.sample_logits + (plan.sample_logits >= real) * (room - real)
    out["sample_rows"][:] = plan.sample_rows
    out["positions_of_samples"][:] = plan.seq_lens[plan.sample_logits]

# %% [markdown]
# Here are the three chats once more, four steps in, and the fifth plan as it lies in the buffer: exactly, and with room for four decodes.

# %%
def fresh(num_blocks=8, **options):
    manager = BlockManager(num_blocks, block_size=4, max_seqs=4, max_seq_len=64)
    scheduler = Scheduler(manager, PrefixCache(manager.pool, 4), token_budget=64, **options)
    for name, prompt in chats.items():
        scheduler.submit(Request(prompt, 12, request_id=name))
    return scheduler


scheduler = fresh()
upload = StepUpload(16, 4, scheduler.manager.tables.table.shape, "cpu")
for _ in range(5):
    plan = scheduler.schedule()
    step = upload.load(plan)
    rows = plan.rows
    assert (upload.table.numpy()[rows] == scheduler.manager.tables.table[rows]).all()
    scheduler.commit(plan, np.full(len(plan.sample_rows), 50))
padded = upload.load(plan, StepShape(decodes=4, chunks=0, tokens=0))
for field in ("input_ids", "positions", "slot_mapping", "seq_lens"):
    print(f"{field:13}", getattr(step.batch, field).tolist(), getattr(padded.batch, field).tolist())
print("news of the table:", [part.tolist() for part in plan.news.table_updates])
print(f"words sent: {field_places(step.shape, len(plan.sample_rows))['positions_of_samples'].stop}")

# %% [markdown]
# A padded sequence has length 0 and slot -1. By the contracts of chapter 4 it writes nowhere and its attention is 0.
#
# **Turn the knob.** Make the shape `StepShape(3, 2, 8)`; expect two sequences of no token, and eight tokens that belong
# to nobody.
#
# ## The token that the host has not seen
#
# On a GPU the host only launches work. Between the end of one step and the launch of the next the device would idle, for as long as it takes to
# read the tokens, decide and lay out. So the scheduler may decide a step *ahead*: every row will run one token more,
# and it does not matter which. Only the embedding needs to know, and that is on the device.
#
# :::{admonition} Predict
# :class: tip
# The scheduler plans step 2 while step 1 is in flight. Which fields of plan 2 depend on the tokens of step 1? And if
# A's token turns out to be its stop token?
# :::
#
# :::{dropdown} Reasoning
# Positions, slots, lengths and tables follow from counts. Only `token_ids` depends on them, and there the plan has -1 and
# names the sample in `token_source`. If A has ended, step 2 has run a token for nobody: its row has no tenant any more,
# and its sample is dropped at commit. That is the price of being ahead: one wasted token for each
# text that ends by a word.
# :::

# %%
scheduler = fresh()
upload = StepUpload(64, 4, scheduler.manager.tables.table.shape, "cpu")
one, two = scheduler.schedule(), scheduler.schedule()
print("plan 2: ids", two.token_ids, "from samples", two.token_source, "at", two.positions)
upload.load(one)
step = upload.load(two)
sampled = torch.tensor([71, 72, 73])
print("on the device:", step.batch.input_ids.tolist(), "->",
      with_late_tokens(step, sampled).input_ids.tolist())
scheduler.commit(one, sampled.numpy())
scheduler.abort("A")  # A leaves while step 2 is in flight
scheduler.commit(two, np.array([81, 82, 83]))
print("kept of step 2:", scheduler.accepted[1])

# %% [markdown]
# ## Who runs it
#
# The engine does not know how a plan becomes logits. It asks a *runner*, one method wide. The plain one
# launches each operation in turn; chapter 14 records whole steps and replays them. This is the only seam between the two chapters.

# %% tags=["export:runner"]
"""Who runs a plan on the device: the plain way, one launch after another."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Protocol

from paged_kv.attend import KernelAttention
from paged_kv.hf_adapter import PagedModel
from paged_kv.host_pool import run_moves
from paged_kv.kv_store import KVStore


class Runner(Protocol):
    """Runs plans on a device.  `counts`: steps by how they ran, such as "eager" or "graph"."""

    counts: Counter[str]

    def forward(self, plan: StepPlan, sampled: Tensor) -> tuple[Tensor, DeviceStep]:
        """Take in the news, run moves and tokens; `sampled`: those of the previous plan.

        Returns: logits [S, vocab_size], one a sample; and the step as it was loaded.
        """
        ...


@dataclass(frozen=True)
class Room:
    """How large steps may become: tokens, sequences; and the shape of the block tables."""

    max_tokens: int
    max_seqs: int
    table_shape: tuple[int, int]

# %% [markdown]
# A CPU has no kernel of ours. Chapter 4's `paged_attention` works there, but it finds out in every layer where the tokens of a step are,
# although all layers ask the same, and it fetches them one by one. Decodes can do better. What depends on the step alone is
# found once; whole blocks are fetched, since a block's keys lie in one piece, and its values in the next; and sequences of like length
# are padded to the longest of them, with zeros where no token is, so that nothing unwritten is ever multiplied.

# %% tags=["export:cpu_attention"]
"""Attention on a CPU: decodes by whole blocks, planned once a step for all layers."""

from typing import NamedTuple

from paged_kv.attend import count_decodes
from paged_kv.attention import paged_attention
from paged_kv.kv_store import check_range


class Decodes(NamedTuple):
    """Some sequences of one new token each, of like length, padded to the longest.

    Fields
        tokens  int64 [n]: their places in the batch.
        halves  int64 [2 x n x blocks]: where the keys of each block lie, then its values, with
                half a block of the pool as the unit.
        dead    int64: which of the tokens fetched are not seen; keys first.
        mask    float32 [n, 1, 1, blocks x block_size]: 0 for a token that is seen, else -inf.
    """

    tokens: Tensor
    halves: Tensor
    dead: Tensor
    mask: Tensor


def like_lengths(counts: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Places of `counts`, in groups in which the least is half of the largest or more."""
    groups, order = list[NDArray[np.int64]](), (-counts).argsort(kind="stable")
    while len(order):
        size = int((2 * counts[order] >= counts[order[0]]).sum())
        groups.append(order[:size])
        order = order[size:]
    return groups


# %% tags=["export:cpu_attention"]
def plan_decodes(
    batch: PackedBatch, num_decodes: int, block_size: int, window: int | None
) -> list[Decodes]:
    """Plans of the first `num_decodes` sequences; those that hold nothing are left out.

    Raises: ValueError for a window below 1, or a token that is seen and has no block.
    """
    lens = batch.seq_lens[:num_decodes].numpy().astype(np.int64)
    if window is not None and window < 1:
        raise ValueError(f"window = {window}: a token sees itself, so 1 or more is needed")
    first = np.maximum(lens - window, 0) if window is not None else np.zeros_like(lens)
    begin, end = first // block_size, -(-lens // block_size)
    places, found = lens.nonzero()[0], list[Decodes]()
    for group in like_lengths((end - begin)[places]):
        at = places[group]
        index = begin[at, None] + np.arange(end[at[0]] - begin[at[0]])
        real = index < end[at, None]
        rows = batch.rows.numpy()[at, None]
        ids = batch.block_table.numpy()[rows, np.where(real, index, 0)].astype(np.int64)
        if (ids[real] < 0).any():
            raise ValueError("block_table: -1 found where a token should be")
        halves = 2 * np.where(real, ids, 0)
        position = (index[:, :, None] * block_size + np.arange(block_size)).reshape(len(at), -1)
        seen = (position < lens[at, None]) & (position >= first[at, None])
        dead = (~seen).reshape(-1).nonzero()[0]
        mask = np.where(seen, np.float32(0), np.float32(-np.inf))[:, None, None]
        parts = at, np.append(halves, halves + 1), np.append(dead, dead + seen.size), mask
        found.append(Decodes(*map(torch.from_numpy, parts)))
    return found


# %% tags=["export:cpu_attention"]
def attend_decodes(
    query: Tensor, tensor: Tensor, plan: Decodes, scale: float | None, output: Tensor
) -> None:
    """Attention of the sequences of `plan`, in float32, into their places in `output`.

    Args: query and output [num_tokens, num_q_heads, head_size]; `tensor`, one of
    `KVStore.tensors`.
    """
    heads, size = tensor.shape[3:]
    n = len(plan.tokens)
    fetched = tensor.view(-1, tensor[0, 0].numel()).index_select(0, plan.halves)
    fetched.view(-1, heads * size).index_fill_(0, plan.dead, 0)
    k, v = fetched.view(2, n, -1, heads, size).float().transpose(2, 3)
    q = query[plan.tokens].float().view(n, heads, -1, size)  # a KV head's queries, as its tokens
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, plan.mask, scale=scale)
    output[plan.tokens] = out.reshape(n, -1, size).to(output.dtype)


# %% tags=["export:cpu_attention"]
class CpuAttention:
    """A `LayerAttention` for a CPU; equals `write_and_attend` but for rounding.

    State: `batch`, the one planned for, known by its identity; `num_decodes`, its sequences in
    front with one new token; `lines`, where its keys and its values go, None where a token is
    skipped; `plans`, {window: Decodes}.
    """

    def __init__(self) -> None:
        self.batch: PackedBatch | None = None
        self.num_decodes = 0
        self.lines: tuple[Tensor, Tensor] | None = None
        self.plans: dict[int | None, list[Decodes]] = {}

    def begin(self, batch: PackedBatch, store: KVStore) -> None:
        """Forget the plans of the last step.  Raises: ValueError for what points nowhere."""
        size, slots = store.block_size, batch.slot_mapping
        check_range("rows", batch.rows, 0, len(batch.block_table))
        check_range("seq_lens", batch.seq_lens, -1, batch.block_table.shape[1] * size + 1)
        check_range("slot_mapping", slots, -1, store.num_blocks * size)
        self.batch, self.plans, self.lines = batch, {}, None
        self.num_decodes = count_decodes(batch.cu_seqlens)
        if len(slots) and int(slots.min()) >= 0:
            keys = slots + slots // size * size
            self.lines = keys, keys + size

    def write(self, store: KVStore, layer: int, key: Tensor, value: Tensor) -> None:
        """`KVStore.write`, of which nothing has to be found out."""
        assert self.batch is not None
        if self.lines is None:
            store.write(layer, key, value, self.batch.slot_mapping)
            return
        rows = store.tensors[layer].view(-1, *key.shape[1:])
        for line, data in zip(self.lines, (key, value), strict=True):
            rows.index_copy_(0, line, data.to(rows.dtype))


# %% tags=["export:cpu_attention"]
class CpuAttention(CpuAttention):  # type: ignore
    def __call__(
        self,
        store: KVStore,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch: PackedBatch,
        *,
        scale: float | None,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Store the new K/V and return attention, [num_tokens, num_q_heads, head_size]."""
        if batch is not self.batch:
            self.begin(batch, store)
        self.write(store, layer, key, value)
        n = self.num_decodes if softcap is None and sinks is None else 0
        output = torch.zeros_like(query)
        if n and window not in self.plans:
            self.plans[window] = plan_decodes(batch, n, store.block_size, window)
        for plan in self.plans[window] if n else ():
            attend_decodes(query, store.tensors[layer], plan, scale, output)
        if n < len(batch.seq_lens):
            output[n:] = paged_attention(
                query[n:], store.keys(layer), store.values(layer), batch.block_table,
                batch.cu_seqlens[n:] - n, batch.seq_lens[n:], rows=batch.rows[n:],
                scale=scale, window=window, softcap=softcap, sinks=sinks,
            )[0]  # fmt: skip
        return output

# %% [markdown]
# The check: random batches, long and short, with and without a window; the slots that nobody has written hold NaN.

# %% tags=["hide-input"]
from paged_kv.block_manager import BlockManager
from paged_kv.guest_attention import write_and_attend
from paged_kv.packed_batch import pack
from paged_kv.sizing import KVSpec

worst, torch_rng = 0.0, torch.Generator().manual_seed(0)
for lengths, chunk in [((5, 70, 33, 16, 1), 9), ((17, 1), 0), ((), 40)]:
    stores = [KVStore(KVSpec(1, 2, 8, "fp32"), 64, 4) for _ in "ab"]
    manager = BlockManager(64, 4, 8, 96)
    news = [1] * len(lengths) + [chunk] * (chunk > 0)
    rows = [manager.add(n) for n in (*lengths, *(50,) * (chunk > 0))]
    old = sum(manager.tables.seq_lens[rows])
    before = pack(manager.tables, rows, [[0] * int(manager.tables.seq_lens[row]) for row in rows])
    for store in stores:
        kv = torch.randn(old, 2, 8, generator=torch.Generator().manual_seed(1))
        store.write(0, kv, kv + 1, before.slot_mapping)
    manager.append(rows, np.array(news))
    batch, ours = pack(manager.tables, rows, [[0] * n for n in news]), CpuAttention()
    q, k, v = (torch.randn(sum(news), heads, 8, generator=torch_rng) for heads in (6, 2, 2))
    for window in (None, 7):
        options = {"scale": None, "window": window, "softcap": None, "sinks": None}
        one = ours(stores[0], 0, q, k, v, batch, **options)
        two = write_and_attend(stores[1], 0, q, k, v, batch, **options)
        worst = max(worst, float((one - two).abs().max()))
print("largest difference below 1e-5:", worst < 1e-5)
assert worst < 1e-5

# %% [markdown]
# The products are the larger half of a step. PyTorch hands them to a library with the weights as they lie, and at a few dozen rows it spends
# its time on arranging them. oneDNN can be given weights in its own layout, arranged once. The price is a second copy of them, and
# the danger is the usual one of copies: whoever changes the weights must be noticed. A tensor counts its changes, but not those made
# through `.data`, as loaders like to make them; so before each step a few weights of every layer are looked at as well.
# Layers that are given the same input, those of queries, keys and values say, become one product: with few rows, one large
# product wastes less than three small ones. What stays small all the same is left alone.

# %% tags=["export:packed_products"]
"""A model's large matrix products on a CPU, from weights laid out for oneDNN once."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch.nn import Linear, Parameter
from torch.nn import functional as F

PACK_FROM = 1 << 18  # weights of a product from which on packing pays
TYPICAL_ROWS = 32  # the batch that the layout is chosen for; others are right too
PROBES = 16  # numbers of a parameter that are compared before each step
ONE_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # as models name them
ONE_AT_A_TIME = threading.RLock()  # a model's layers are the same in all threads


def state_of(parameter: Parameter | None) -> tuple[Any, ...]:
    """What tells whether a parameter is still the one it was, save its numbers."""
    if parameter is None:
        return ()
    return id(parameter), parameter._version, parameter.data_ptr(), parameter.stride()


# %% tags=["export:packed_products"]
class PackedProduct:
    """What `layers` compute of one input, as one product with a packed copy of their weights.

    The first layer that is called computes for all, the others take their shares; one that is
    given something else computes its own from its own weight.
    State: `held`, the weights and biases that were copied, and the `states` they were in;
    `looks`, views of a few of their numbers, and `probe`, what was seen; `copy`, `bias`;
    `forwards`, what each layer does instead; `given`, the last input, and `shares` of it.
    """

    def __init__(self, *layers: Linear) -> None:
        self.layers, self.sizes = layers, [layer.out_features for layer in layers]
        self.given: Tensor | None = None
        self.shares: Sequence[Tensor] = ()
        self.forwards = [self.forward_of(place) for place in range(len(layers))]
        self.pack()

    def parameters(self) -> list[Parameter | None]:
        """The weights, then the biases, as the layers have them now."""
        own = [layer._parameters for layer in self.layers]
        return [each.get("weight") for each in own] + [each.get("bias") for each in own]

    def pack(self) -> None:
        """Copy the weights into oneDNN's layout."""
        self.held, count = self.parameters(), len(self.layers)
        self.states = [state_of(parameter) for parameter in self.held]
        data = [parameter.detach() for parameter in self.held if parameter is not None]
        flat = [each.view(-1) for each in data]
        self.looks = [each[:: max(1, len(each) // PROBES)] for each in flat]
        self.probe = bits_of(self.looks)
        self.bias = torch.cat(data[count:]) if data[count:] else None
        self.copy = torch.ops.mkldnn._reorder_linear_weight(torch.cat(data[:count]), TYPICAL_ROWS)


def bits_of(looks: Sequence[Tensor]) -> Tensor:
    """The numbers of `looks` as int32, so that NaN equals itself."""
    return torch.cat(list(looks)).view(torch.int32)


# %% tags=["export:packed_products"]
class PackedProduct(PackedProduct):  # type: ignore
    def untouched(self) -> bool:
        """Whether the parameters are those that were copied, and count no change since."""
        return [state_of(parameter) for parameter in self.parameters()] == self.states

    def renew(self) -> None:
        """Copy again if a parameter is another, or has changed, or shows other numbers.

        Unseen: a change through `.data` of single numbers that are none of those looked at.
        """
        if not (self.untouched() and torch.equal(bits_of(self.looks), self.probe)):
            self.pack()


# %% tags=["export:packed_products"]
class PackedProduct(PackedProduct):  # type: ignore
    def __call__(self, x: Tensor) -> Tensor:
        """The product of x [..., in_features] with all weights, [..., sum of out_features]."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self.copy, self.bias, "none", [], ""
        )
        return product

    def forward_of(self, place: int) -> Callable[[Tensor], Tensor]:
        """What the layer at `place` does while its product is packed."""
        if len(self.layers) == 1:
            return self

        def first(x: Tensor) -> Tensor:
            self.given, self.shares = x, torch.split(self(x), self.sizes, -1)
            return self.shares[0]

        def other(x: Tensor) -> Tensor:
            layer = self.layers[place]
            if x is not self.given:
                return F.linear(x, layer.weight, layer.bias)
            return self.shares[place]

        return other if place else first


def can_pack(*layers: Any) -> bool:
    """Whether all are as their class made them, in float32, alike, and large together."""
    if not all(type(layer) is Linear and "forward" not in vars(layer) for layer in layers):
        return False
    found = [p for layer in layers for p in layer._parameters.values() if p is not None]
    plain = all(p.dtype == torch.float32 and p.is_contiguous() for p in found)
    plain &= not any(p.is_inference() or p.device.type != "cpu" for p in found)
    alike = len({(layer.in_features, layer.bias is None) for layer in layers}) == 1
    size = sum(layer.out_features * layer.in_features for layer in layers)
    return plain and alike and len(found) >= len(layers) and size >= PACK_FROM


# %% tags=["export:packed_products"]
class PackedProducts:
    """The large products of a model, packed; as many bytes more as their weights have.

    State: `packed`, its PackedProducts, none where PyTorch has no oneDNN, or the weights are
    not in float32 on a CPU; `looks` and `probe`, those of all.  One thread at a time.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.pack()

    def pack(self) -> None:
        """Find the products as the model is now, and copy their weights."""
        able: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        parts = list(self.model.modules()) if able else []
        groups: list[list[Any]] = [
            [getattr(part, name, None) for name in names] for part in parts for names in ONE_INPUT
        ]
        self.packed, done = list[PackedProduct](), set[Linear]()
        for group in [*groups, *([part] for part in parts)]:
            if can_pack(*group) and len({*group} - done) == len(group):
                self.packed.append(PackedProduct(*group))
                done.update(group)
        self.looks = [look for product in self.packed for look in product.looks]
        self.probe = bits_of(self.looks) if self.looks else None

    def renew(self) -> None:
        """Pack again if anything has changed, see `PackedProduct.renew`."""
        if self.probe is not None and not (
            all(product.untouched() for product in self.packed)
            and torch.equal(bits_of(self.looks), self.probe)
        ):
            self.pack()


# %% tags=["export:packed_products"]
class PackedProducts(PackedProducts):  # type: ignore
    @contextmanager
    def on(self) -> Iterator[None]:
        """Within this context the model runs packed products, of weights as they are now."""
        with ONE_AT_A_TIME:
            self.renew()
            pairs = [pair for product in self.packed
                     for pair in zip(product.layers, product.forwards, strict=True)]  # fmt: skip
            before = [vars(layer).get("forward") for layer, _ in pairs]
            for layer, forward in pairs:
                vars(layer)["forward"] = forward
            try:
                yield
            finally:
                for (layer, _), former in zip(pairs, before, strict=True):
                    del vars(layer)["forward"]
                    if former is not None:
                        vars(layer)["forward"] = former
                for product in self.packed:
                    product.given, product.shares = None, ()

# %% tags=["hide-input"]
layer = torch.nn.Linear(512, 1024)
packed, x = PackedProduct(layer), torch.randn(3, 512)
with torch.inference_mode():
    apart = [float((packed(x) - layer(x)).abs().max())]
    layer.weight.data.mul_(2)
    packed.renew()
    apart.append(float((packed(x) - layer(x)).abs().max()))
print("equal but for rounding:", apart[0] < 1e-5)
print("and after the weight was doubled:", apart[1] < 1e-5)
assert max(apart) < 1e-5

# %% tags=["export:runner"]
MakeRunner = Callable[[PagedModel, KVStore, Room], Runner]


def logits_of_samples(logits: Tensor, step: DeviceStep, plan: StepPlan) -> Tensor:
    """One row a sample, from one row a sequence of the batch."""
    if plan.sample_rows is plan.rows:
        return logits[: len(plan.rows)]
    return logits.index_select(0, step.sample_at)


class EagerRunner:
    """The plain Runner: any step, at the pace at which the CPU can launch it.

    Args: `packed`, whether a model on a CPU runs from packed copies of its weights.
    State: `guest`; `host`, the store that swapped blocks go to; `upload`; `products`.
    """

    def __init__(
        self, guest: PagedModel, host: KVStore, room: Room, *, packed: bool = True
    ) -> None:
        self.guest, self.host = guest, host
        self.products = PackedProducts(guest.model) if packed else None
        device = guest.model.device
        self.upload = StepUpload(room.max_tokens, room.max_seqs, room.table_shape, device)
        self.counts: Counter[str] = Counter()

    def forward(self, plan: StepPlan, sampled: Tensor) -> tuple[Tensor, DeviceStep]:
        """As `Runner` says."""
        step = self.upload.load(plan)
        if plan.moves:
            run_moves(plan.moves, self.guest.store, self.host)
        attention = self.guest.attention
        batch = with_late_tokens(step, sampled)
        if isinstance(attention, KernelAttention):
            attention.begin(batch, step.shape.decodes)
        self.counts["eager"] += 1
        with nullcontext() if self.products is None else self.products.on():
            logits = self.guest.forward(batch)
        return logits_of_samples(logits, step, plan), step

# %% [markdown]
# A runner serves a `PagedModel`, and making one tries the model first (chapter 5): a packed batch, chunks and decodes mixed,
# against the model's own forward. *Whether* a model is supported is decided when it is loaded, by what it says, and not by a list of
# names. Bloom's layers never call the attention that they are given, and its positions are in a mask:

# %%
from paged_kv.guest_check import GuestRefused
from transformers import BloomConfig

config = BloomConfig(vocab_size=100, hidden_size=64, n_layer=2, n_head=4)
bloom = AutoModelForCausalLM.from_config(config)
dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
for odd in (bloom, small_model(rope_parameters=dynamic)):
    try:
        host(odd, num_blocks=8)
    except GuestRefused as error:
        print(f"{type(odd).__name__}: {error}")

# %% [markdown]
# The second one would pass a short trial: its angles change only when somebody's text is long. Such things are read from the config.
#
# ## What a user gets
#
# A sample becomes a `Text`, a request an `Answer`; on the way each step gives `Delta`s, one a sample.

# %% tags=["export:answers"]
"""What users get: pieces of text as they come, and answers when they are complete."""

from collections.abc import Hashable, Sequence
from dataclasses import field

from paged_kv.beams import BeamSearch
from paged_kv.sampling_params import SamplingOptions


@dataclass(frozen=True)
class Text:
    """One completed sample or beam.

    Fields
        index          of the sample; beams stand best first.
        token_ids      generated, a stop token included.
        text           without special tokens, cut before a stop string; "" without tokenizer.
        finish_reason  "length", "stop", "aborted", "out_of_blocks" or "error: ...".
        logprobs       of each token, where they were asked for;  top_logprobs, {id: logprob}.
        score          of a beam: its log-probability over length ** length_penalty.
    """

    index: int
    token_ids: list[int]
    text: str
    finish_reason: str
    logprobs: list[float] | None = None
    top_logprobs: list[dict[int, float]] | None = None
    score: float | None = None

# %% tags=["export:answers"]
@dataclass(frozen=True)
class Answer:
    """All that became of one request; times are those of the engine's clock."""

    request_id: Hashable
    prompt_token_ids: list[int]
    texts: tuple[Text, ...]
    arrival: float
    first_token_at: float | None
    finished_at: float
    hit_tokens: int
    preemptions: int

    @property
    def text(self) -> str:
        """The text of the first sample, or of the best beam."""
        return self.texts[0].text


@dataclass(frozen=True)
class Delta:
    """What one step brought to one sample.

    `finish_reason` comes with a sample's last piece, `answer` with the last one of its request.
    `text` may lag behind the tokens: bytes of an unfinished character, or what could be the
    beginning of a stop string, are held back.  Beams come whole, when the search has ended.
    """

    request_id: Hashable
    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None = None
    answer: Answer | None = None

# %% [markdown]
# Tokens are not characters. A character of three bytes may come in three tokens, and a stop string may begin in one token and end two
# later. Text that was shown cannot be taken back. So a stream holds back what is not certain.

# %% tags=["export:answers"]
class TextStream:
    """Token ids in, text out, until one of the stop strings appears.

    Bytes at the end that are no whole character never come out.
    State: `text`, what was given out; `held`, what may yet become a stop string; `stopped`.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        from tokenizers.decoders import DecodeStream

        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.decoder = DecodeStream(skip_special_tokens=True)
        self.text, self.held, self.stopped = "", "", False

    def push(self, token: int) -> str:
        """Take in one token; return the text that is certain now."""
        if self.stopped:
            return ""
        self.held += self.decoder.step(self.tokenizer, token) or ""
        found = [at for word in self.stop if (at := self.held.find(word)) >= 0]
        if found:
            self.held, self.stopped = self.held[: min(found)], True
            return self.flush()
        certain = len(self.held) - max((overlap(self.held, word) for word in self.stop), default=0)
        return self._give_out(certain)

    def flush(self) -> str:
        """Give out what was held back: nothing more will come."""
        return self._give_out(len(self.held))

    def _give_out(self, count: int) -> str:
        new, self.held = self.held[:count], self.held[count:]
        self.text += new
        return new

# %% tags=["export:answers"]
def overlap(text: str, word: str) -> int:
    """Characters at the end of `text` with which `word` begins, `word` itself left out."""
    longest = min(len(word) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if word.startswith(text[-n:])), 0)


@dataclass(eq=False)
class Job:
    """What the engine remembers of a request beside the scheduler: how to choose, how to spell.

    State: `several`, whether it has more than one sample; `streams`, `logprobs`, `tops` by
    sample index; `search`, of a beam group; `told`, the samples whose end was reported.
    """

    id: Hashable
    prompt: list[int]
    sampling: SamplingOptions
    stop: tuple[str, ...] = ()
    several: bool = False
    search: BeamSearch | None = None
    streams: dict[int, TextStream] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    tops: dict[int, list[dict[int, float]]] = field(default_factory=dict)
    told: set[int] = field(default_factory=set)

# %% [markdown]
# :::{admonition} Predict
# :class: tip
# The stop string is " a store". The text is "It is a stove, not a store.", token by token. What is shown, and when?
# :::
#
# :::{dropdown} Reasoning
# " a" could be its beginning and is held. The next token is " stove": it was harmless, and both come out together. The second time the stop
# string is completed: it and all behind it are never shown.
# :::

# %%
from paged_kv.hf_adapter import load_guest

real, tokenizer = load_guest()
for text, stop in (("It is a stove, not a store.", " a store"), ("Tea 茶 is hot", "zzz")):
    stream = TextStream(tokenizer.backend_tokenizer, [stop])
    ids = tokenizer(text)["input_ids"]
    print([stream.push(token) for token in ids], "stopped:", stream.stopped)

# %% [markdown]
# ## Choosing, once for all rows
#
# The tokens of a step are chosen on the device, all rows together, by the sampler of appendix A4: each row has its own settings, and its
# random numbers follow from its seed, its sample and its position alone. The chooser tells it who lives in which row, keeps the newest tokens for the next step, and
# sends a copy to the host, which reads it when it arrives.

# %% tags=["export:chooser"]
"""From logits to tokens: chosen on the device, read by the host when it needs them."""

from collections.abc import Mapping

from paged_kv.device_sampling import DeviceSampler, Sampled
from paged_kv.request import Ints
from paged_kv.row_state import RowState


@dataclass
class Pending:
    """A launched step whose tokens the host has not read.

    State: `plan`; `owners`, (job, sample index) of each sample; `host`, the tokens on their way
    to pinned memory; `ready`, None on a CPU; `drawn`, all that was chosen; `beams`, {request id:
    log-probabilities of its beams}.
    """

    plan: StepPlan
    owners: list[tuple[Job, int]]
    host: Tensor
    ready: Any
    drawn: Sampled
    beams: dict[Hashable, Tensor]

    def read(self) -> Ints:
        """The tokens, int64 [S], -1 for logits that are no numbers; waits for the step."""
        if self.ready is not None:
            self.ready.synchronize()
        return self.host.numpy()[: len(self.plan.sample_rows)].copy()

# %% tags=["export:chooser"]
def choose_beams(pending: Pending, tokens: Ints, alive: NDArray[np.bool_]) -> Ints:
    """Let each beam search of a step choose: writes its tokens, returns the parents, int64 [S].

    Args: `alive`, bool [S]: samples whose rows still have the tenant that they were drawn for.
    A search that was put aside or has ended does not choose.
    """
    parents = np.zeros(len(tokens), np.int64)
    for name, places in pending.plan.beams:
        search = pending.owners[places[0]][0].search
        if search is None or search.done or not alive[places].all():
            continue
        came = search.advance(pending.beams[name][: len(search.texts)])
        parents[places[: len(came)]] = came
        tokens[places] = 0
        tokens[places[: len(came)]] = [text[-1] for text in search.texts]
    return parents

# %% tags=["export:chooser"]
class Chooser:
    """Draws the tokens of each step and keeps them on the device for the next one.

    Args: `vocab_size`; `num_rows`, of the tables.
    State
        sampler  DeviceSampler, which knows how each row chooses.
        sampled  int64 [num_rows] on the device: the tokens of the newest step.
        hosts    two pinned buffers that they travel to, in turns.
        tenant   {row: (job, sample index)}.
    """

    def __init__(self, vocab_size: int, num_rows: int, device: Any) -> None:
        self.device = torch.empty(0, device=device).device
        self.on_gpu = self.device.type == "cuda"
        self.sampler = DeviceSampler(num_rows, vocab_size, self.device)
        self.sampled = torch.zeros(num_rows, dtype=torch.int64, device=self.device)
        self.hosts = [
            torch.zeros(num_rows, dtype=torch.int64, pin_memory=self.on_gpu) for _ in "ab"
        ]
        self.tenant: dict[int, tuple[Job, int]] = {}
        self.turn = 0

    def clear(self) -> None:
        """Forget all tenants; the next plan must open every row anew."""
        for row in self.tenant:
            self.sampler.close_row(row)
        self.tenant.clear()

# %% tags=["export:chooser"]
class Chooser(Chooser):  # type: ignore
    def open(self, plan: StepPlan, jobs: Mapping[Hashable, Job], state: RowState) -> None:
        """Learn who left and who came, and how the latter choose."""
        for row in plan.news.closed:
            self.tenant.pop(row, None)
            self.sampler.close_row(row)
        if not plan.news.opened:
            return
        rows, names, indices = zip(*plan.news.opened, strict=True)
        came = [jobs[name] for name in names]
        self.tenant.update(zip(rows, zip(came, indices, strict=True), strict=True))
        said = [
            state.tokens[row, len(job.prompt) : state.known[row]].tolist()
            for row, job in zip(rows, came, strict=True)
        ]
        prompts = [job.prompt for job in came]
        self.sampler.open_rows(rows, [job.sampling for job in came], indices, prompts, said)

    def choose(self, plan: StepPlan, logits: Tensor, step: DeviceStep) -> Pending:
        """Draw one token a sample; returns at once, the tokens follow."""
        count, self.turn, ready = len(plan.sample_rows), self.turn ^ 1, None
        drawn = self.sampler.sample(logits, step.sample_rows, step.positions, plan.sample_rows)
        torch.clamp(drawn.tokens, min=0, out=self.sampled[:count])  # the next step reads them
        host = self.hosts[self.turn]
        host[:count].copy_(drawn.tokens, non_blocking=True)
        beams = {
            name: logits[torch.from_numpy(places).to(self.device)].float().log_softmax(-1)
            for name, places in plan.beams
        }
        if self.on_gpu:
            event: Any = torch.cuda.Event
            ready = event()
            ready.record()
        owners = [self.tenant[row] for row in plan.sample_rows.tolist()]
        return Pending(plan, owners, host, ready, drawn, beams)

# %% [markdown]
# Beams choose on the host: a search needs the log-probabilities of all its beams at once, and rewires tables. The scheduler therefore never runs
# beams ahead. But it may put their group aside while their step is in flight. Then the step must not count, and `alive` says so: a search that moved on
# without its blocks would never find back.
#
# ## Delivery
#
# When the tokens are there, order matters: first those who got no number are ended, then searches choose, then the scheduler commits,
# then what it kept is spelled. A stop string ends a sample *after* the commit, like a user who leaves.

# %% tags=["export:delivery"]
"""When a step's tokens are there: commit them, spell them, end what has come to its end."""

from paged_kv.request import Output
from paged_kv.scheduler import Scheduler


@dataclass
class Desk:
    """Who is being served, and by whom.

    State: `scheduler`, `chooser`, `tokenizer`; `jobs`, what is known of each living request
    beside the scheduler; `tokens_made`, sampled and kept since the start.
    """

    scheduler: Scheduler
    chooser: Chooser
    tokenizer: Any
    jobs: dict[Hashable, Job] = field(default_factory=dict)
    tokens_made: int = 0

    def alive(self, plan: StepPlan) -> NDArray[np.bool_]:
        """Which samples of `plan` have a row with the tenant that they were drawn for."""
        serials = self.scheduler.home.rows.serial[plan.sample_rows]
        return np.asarray(serials == plan.sample_serials)

    def end(self, job: Job, reason: str) -> None:
        """End the request of `job` with what it has; its Output waits to be taken."""
        output = self.scheduler.finish(job.id, reason)
        if output is not None:
            self.scheduler.ledger.outputs.append(output)

# %% tags=["export:delivery"]
def deliver(desk: Desk, pending: Pending) -> list[Delta]:
    """Take in the tokens of the oldest step: commit them, spell them, end what has ended."""
    plan, tokens = pending.plan, pending.read()
    refuse_nan(desk, pending, tokens)
    parents = choose_beams(pending, tokens, desk.alive(plan)) if plan.beams else None
    outputs = desk.scheduler.commit(plan, np.maximum(tokens, 0), parents)
    rows, kept = desk.scheduler.accepted
    desk.tokens_made += len(rows)
    places = list(range(len(rows)))
    if len(rows) < len(pending.owners):
        places = np.isin(plan.sample_rows, rows).nonzero()[0].tolist()
    note_logprobs(pending, places)
    owners = [pending.owners[place] for place in places]
    pieces = spell(desk, rows.tolist(), owners, kept.tolist())
    for name, _ in plan.beams:
        job = desk.jobs.get(name)
        if job is not None and job.search is not None and job.search.done:
            desk.end(job, "stop")
    return close_all(desk, outputs + desk.scheduler.take_outputs(), pieces)


def refuse_nan(desk: Desk, pending: Pending, tokens: Ints) -> None:
    """End requests whose logits are no numbers, and see that nobody finds their K/V.

    A block that others hold stays findable: it is as good or bad as they will turn out to be.
    """
    bad = ((tokens < 0) & desk.alive(pending.plan)).nonzero()[0].tolist()
    scheduler = desk.scheduler
    for job in dict.fromkeys(pending.owners[place][0] for place in bad):
        if scheduler.cache is not None:
            rows = scheduler.ledger.rows_of(scheduler.ledger.groups[job.id])
            table = scheduler.manager.tables.table[rows]
            ids, times = np.unique(table[table >= 0], return_counts=True)
            scheduler.cache.forget(ids[scheduler.manager.pool.ref_count[ids] == times])
        desk.end(job, "error: the model's logits are not numbers")

# %% tags=["export:delivery"]
def note_logprobs(pending: Pending, places: Sequence[int]) -> None:
    """Keep the log-probabilities of the tokens that were taken, for those who asked."""
    drawn = pending.drawn
    if drawn.logprobs is None:
        return
    own, tops, ids = drawn.logprobs.tolist(), None, None
    if drawn.top_logprobs is not None and drawn.top_ids is not None:
        tops, ids = drawn.top_logprobs.tolist(), drawn.top_ids.tolist()
    for place in places:
        job, index = pending.owners[place]
        if (k := job.sampling.logprobs) is None:
            continue
        job.logprobs.setdefault(index, []).append(own[place])
        if k and tops is not None and ids is not None:
            pairs = zip(ids[place][:k], tops[place][:k], strict=True)
            job.tops.setdefault(index, []).append(dict(pairs))

# %% [markdown]
# Each token is spelled once, for its own stream. If somebody's tokenizer fails on it, that request ends, with the reason, and no other.

# %% tags=["export:delivery"]
def spell(
    desk: Desk, rows: list[int], owners: list[tuple[Job, int]], tokens: list[int]
) -> dict[Hashable, list[Delta]]:
    """The pieces of a step, by request; samples that have said a stop string end here."""
    pieces: dict[Hashable, list[Delta]] = {}
    stopped, several, ledger = list[int](), dict[Job, None](), desk.scheduler.ledger
    for row, (job, index), token in zip(rows, owners, tokens, strict=True):
        if job.search is not None:
            continue
        text = "" if desk.tokenizer is None else push_token(desk, job, index, token)
        if text is None or (job.stop and job.streams[index].stopped):
            stopped.append(row)
        pieces.setdefault(job.id, []).append(Delta(job.id, index, (token,), text or ""))
        if job.several:
            several[job] = None
    stopped = [row for row in stopped if row in ledger.rows.group]
    if stopped:
        ledger.end_rows(np.array(stopped), "stop", desk.scheduler.now())
    for job in several:
        tell_ends(desk, job, pieces[job.id])
    return pieces


def push_token(desk: Desk, job: Job, index: int, token: int) -> str | None:
    """The text that a token makes certain; None where the tokenizer fails, which ends the job."""
    if index not in job.streams:
        job.streams[index] = TextStream(desk.tokenizer.backend_tokenizer, job.stop)
    try:
        return job.streams[index].push(token)
    except Exception as error:  # a tokenizer of somebody else's, on tokens that it never made
        desk.end(job, f"error: the tokenizer failed: {error}")
        return None

# %% tags=["export:delivery"]
def tell_ends(desk: Desk, job: Job, pieces: list[Delta]) -> None:
    """Give the last piece of each sample that has ended before its request its reason."""
    group = desk.scheduler.ledger.groups.get(job.id)
    for place, piece in enumerate(pieces if group is not None else ()):
        assert group is not None
        reason = group.samples[piece.index].finish_reason
        if reason is not None:
            stream = job.streams.get(piece.index)
            rest = "" if stream is None else stream.flush()
            pieces[place] = replace(piece, text=piece.text + rest, finish_reason=reason)
            job.told.add(piece.index)

# %% tags=["export:delivery"]
def close_all(
    desk: Desk, outputs: Sequence[Output], pieces: dict[Hashable, list[Delta]]
) -> list[Delta]:
    """All pieces of a step; those of requests that have ended with their reasons and answers."""
    for output in outputs:
        job = desk.jobs.pop(output.request_id)
        answer = make_answer(output, job, desk.tokenizer)
        mine = {piece.index: piece for piece in pieces.get(output.request_id, ())}
        for text in answer.texts:
            if text.index in job.told:
                continue
            stream = job.streams.get(text.index)
            rest = "" if stream is None else stream.flush()
            piece = mine.get(text.index, Delta(output.request_id, text.index, (), ""))
            if job.search is not None:
                piece, rest = replace(piece, token_ids=tuple(text.token_ids)), text.text
            mine[text.index] = replace(
                piece, text=piece.text + rest, finish_reason=text.finish_reason
            )
        *others, last = mine.values()
        pieces[output.request_id] = [*others, replace(last, answer=answer)]
    return [piece for each in pieces.values() for piece in each]

# %% tags=["export:delivery"]
def make_answer(output: Output, job: Job, tokenizer: Any) -> Answer:
    """What the scheduler, the search and the spelling know of a request, together."""
    texts = sample_texts(output, job)
    if job.search is not None:
        texts = beam_texts(output, job.search, tokenizer)
    times = output.arrival, output.first_token_at, output.finished_at
    counts = output.hit_tokens, output.preemptions
    return Answer(output.request_id, job.prompt, tuple(texts), *times, *counts)


def sample_texts(output: Output, job: Job) -> list[Text]:
    """The samples, with the text that their streams gave out or still hold back."""
    texts = []
    for one in output.completions:
        text, reason, stream = "", one.finish_reason, job.streams.get(one.index)
        if stream is not None:
            text = stream.text + stream.held
            reason = "stop" if stream.stopped else reason
        logprobs, tops = job.logprobs.get(one.index), job.tops.get(one.index)
        texts.append(Text(one.index, one.token_ids, text, reason, logprobs, tops))
    return texts


def beam_texts(output: Output, search: BeamSearch, tokenizer: Any) -> list[Text]:
    """The best texts of a beam search; of one that was cut short, those that it had begun."""
    reasons = [output.completions[0].finish_reason] * search.num_beams
    found = [(one.ids, one.score) for one in search.finished]
    if search.done:
        stopped = [ids[-1] in search.stop_ids for ids, _ in found]
        reasons = ["stop" if stop else "length" for stop in stopped]
    elif not found:
        begun = zip(search.texts, search.scores.tolist(), strict=True)
        penalty = search.length_penalty
        found = [(ids, score / max(1, len(ids)) ** penalty) for ids, score in begun]
    texts = []
    for rank, ((ids, score), reason) in enumerate(zip(found, reasons, strict=False)):
        text = "" if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=True)
        texts.append(Text(rank, ids, text, reason, score=score))
    return texts

# %% [markdown]
# ## What may be asked
#
# Options are checked when the request is made, before anything changes, so that one bad request costs nobody else anything.

# %% tags=["export:request_options"]
"""What a request may ask for beside its prompt, checked when it is made."""

from collections.abc import Collection
from numbers import Real
from typing import Literal, TypeAlias

from paged_kv.request import Request, own_tokens

Prompt: TypeAlias = str | Sequence[int] | NDArray[np.integer[Any]]

# %% tags=["export:request_options"]
@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """What a request asks for.  Raises: ValueError, naming the field.

    Fields
        sampling        how tokens are chosen; greedy if None.
        n, beam_width   samples of the prompt, or beams in their place.
        length_penalty, early_stopping   of beams, see `BeamSearch`; the former -10 to 10.
        stop            strings that end a sample and are not part of it.
        stop_tokens     that end a sample, and are part of it; the model's own if None.
        priority        lower goes first.
        deadline        on the clock of `time.perf_counter`, for the policy that chooses victims.
        salt            K/V are shared only among requests with the same one.
        request_id      anything hashable; a number if None.
    """

    sampling: SamplingOptions | None = None
    n: int = 1
    beam_width: int = 0
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    stop: str | Sequence[str] = ()
    stop_tokens: Sequence[int] | None = None
    priority: int = 0
    deadline: float | None = None
    salt: str | None = None
    request_id: Hashable = None

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def stop_words(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

# %% tags=["export:request_options"]
def check_options(asked: RequestOptions) -> None:
    """ValueError, naming the field, for what cannot be, or not together."""
    check_kinds(asked)
    words, sampling = asked.stop_words, asked.sampling or SamplingOptions()
    if not all(isinstance(word, str) and word for word in words):
        raise ValueError(f"stop = {asked.stop!r}: texts are needed that are not empty")
    if asked.early_stopping not in (True, False, "never"):
        raise ValueError(f"early_stopping = {asked.early_stopping!r}: True, False or 'never'")
    if not -10 <= asked.length_penalty <= 10:
        raise ValueError(f"length_penalty = {asked.length_penalty!r}: -10 to 10 are possible")
    if asked.beam_width and sampling != SamplingOptions(seed=sampling.seed):
        raise ValueError("sampling: beams are ranked by the model's own log-probabilities")
    if asked.beam_width and words:
        raise ValueError(f"stop = {asked.stop!r}: beams end with stop_tokens alone")


def check_kinds(asked: RequestOptions) -> None:
    """ValueError, naming the field, for a value that is not of its kind."""
    for name, kind, said in (
        ("sampling", SamplingOptions, "SamplingOptions are needed, or None"),
        ("length_penalty", Real, "a number is needed"),
        ("stop", Collection, "a text is needed, or a list of texts"),
        ("stop_tokens", Collection, "a list of token ids is needed, or None"),
        ("deadline", Real, "a time is needed, or None"),
        ("salt", str, "a text is needed, or None"),
    ):
        value = getattr(asked, name)
        free = value is None and name not in ("length_penalty", "stop")
        if not free and (isinstance(value, bool) or not isinstance(value, kind)):
            raise ValueError(f"{name} = {value!r}: {said}")
    try:
        hash(asked.request_id)
    except TypeError:
        raise ValueError(f"request_id = {asked.request_id!r}: it must be hashable") from None

# %% tags=["export:request_options"]
def eos_ids(model: Any) -> list[int]:
    """The tokens that end a text by the model's own generation config."""
    config: Any = getattr(model, "generation_config", None)
    found: Any = getattr(config, "eos_token_id", None)
    return list(found) if isinstance(found, (list, tuple)) else [found] * (found is not None)


def encode(prompt: Prompt, tokenizer: Any, vocab_size: int) -> Any:
    """Token ids of `prompt`; ValueError for an empty one, or an id that the model has not."""
    given: Any = prompt
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("prompt: token ids are needed, there is no tokenizer")
        given = tokenizer(prompt)["input_ids"]
    kinds: Any = Sequence, np.ndarray, Tensor
    if not isinstance(given, kinds):
        raise ValueError(f"prompt = {given!r}: a text is needed, or a list of token ids")
    ids = own_tokens("prompt", given)
    if not len(ids):
        raise ValueError("prompt: it is empty")
    if not 0 <= ids.min() <= ids.max() < vocab_size:
        raise ValueError(f"prompt: ids {ids.min()} to {ids.max()}, 0 to {vocab_size - 1} exist")
    return ids

# %% tags=["export:request_options"]
def make_request(ids: Any, max_new_tokens: int, asked: RequestOptions, stops: list[int]) -> Request:
    """The request as the scheduler takes it; `stops`, the model's own stop tokens."""
    own = stops if asked.stop_tokens is None else asked.stop_tokens
    return Request(
        ids,
        max_new_tokens,
        request_id=asked.request_id,
        priority=asked.priority,
        deadline=asked.deadline,
        stop_tokens=tuple(own),
        extra=() if asked.salt is None else (("salt", asked.salt),),
        n=asked.n,
        beam_width=asked.beam_width,
    )


def make_job(name: Hashable, request: Request, asked: RequestOptions, seed: int) -> Job:
    """What the engine remembers of `request`; `seed`, if it gives none of its own."""
    sampling = asked.sampling or SamplingOptions()
    if sampling.seed is None:
        sampling = replace(sampling, seed=seed % 2**64)
    prompt = request.tokens.tolist()
    job = Job(name, prompt, sampling, asked.stop_words, asked.n > 1)
    if asked.beam_width > 1:
        rules = asked.length_penalty, asked.early_stopping
        width, most = asked.beam_width, request.max_new_tokens
        job.search = BeamSearch(width, most, request.stop_tokens, *rules)
    return job

# %%
for bad in ({"stop": ""}, {"beam_width": 2, "stop": "end"}, {"salt": 7}):
    try:
        RequestOptions(**bad)
    except ValueError as error:
        print(error)

# %% [markdown]
# The engine has settings of its own. Where memory does not suffice, the error says how much was asked for and what to do.

# %% tags=["export:engine_setup"]
"""What an engine needs before it can start: room for K/V, limits; and its figures."""

import time

from paged_kv.block_manager import BlockManager
from paged_kv.preemption import POLICIES, Costs, Preemption
from paged_kv.prefix_cache import PrefixCache
from paged_kv.sizing import KVSpec, at_least, format_bytes, parse_bytes

# %% tags=["export:engine_setup"]
@dataclass(frozen=True, kw_only=True)
class Settings:
    """How an engine serves.

    Fields
        memory            for K/V: bytes, or text such as "4 GiB"; or num_blocks, of block_size.
                          By default 85 % of what is free on a GPU, 1 GiB on a CPU.
        max_seq_len       of prompt and answer; the model's own limit if None.
        max_running       sequences at once; 256, or the token budget if that is less, if None.
        token_budget      tokens a step at most.
        chunked           whether a prompt may take several steps.
        prefix_caching    whether equal beginnings are computed once.
        host_blocks       room for swapped K/V; 0: victims are always recomputed.
        costs, policy     of preemption: see `Costs` and `POLICIES`.
        batch_invariant   on a GPU: decode attention has the same bits in any batch.
        ahead             whether the CPU plans a step while the last one runs; on a GPU if None.
        seed              of requests that give none: they get seed + their number.
    """

    memory: int | str | None = None
    num_blocks: int | None = None
    block_size: int = 16
    max_seq_len: int | None = None
    max_running: int | None = None
    token_budget: int = 2048
    chunked: bool = True
    prefix_caching: bool = True
    host_blocks: int = 0
    costs: Costs | None = None
    policy: str = "cheapest"
    batch_invariant: bool = False
    ahead: bool | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_settings(self)

# %% tags=["export:engine_setup"]
def check_settings(given: Settings) -> None:
    """ValueError, naming the field, for a value that is not of its kind."""
    for name in ("chunked", "prefix_caching", "batch_invariant", "ahead"):
        value = getattr(given, name)
        if not (isinstance(value, bool) or (name == "ahead" and value is None)):
            raise ValueError(f"{name} = {value!r}: True or False is needed")
    at_least(0, "host_blocks", given.host_blocks)
    at_least(0, "seed", given.seed)
    if given.policy not in list(POLICIES):
        raise ValueError(f"policy = {given.policy!r}: one of {sorted(POLICIES)} is needed")
    if not isinstance(given.costs, Costs | None):
        raise ValueError(f"costs = {given.costs!r}: Costs are needed, or None")


def free_memory(device: torch.device) -> int:
    """Bytes that nobody has taken: of the GPU; 1 GiB on a CPU, whatever there is."""
    if device.type != "cuda":
        return 2**30
    free, _ = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + held

# %% tags=["export:engine_setup"]
def make_store(spec: KVSpec, settings: Settings, device: torch.device) -> KVStore:
    """A store of `num_blocks` blocks, or of as many as `memory` holds.

    Raises: ValueError, with advice, where that is not one block, or more than the device has.
    """
    if settings.memory is not None and settings.num_blocks is not None:
        raise ValueError("memory, num_blocks: one of them, not both")
    block_size = at_least(1, "block_size", settings.block_size)
    size, num_blocks = spec.bytes_per_block(block_size), settings.num_blocks
    if num_blocks is None:
        asked = bytes_asked(settings.memory, device)
        num_blocks = asked // size
        if not num_blocks:
            raise ValueError(f"memory: {format_bytes(asked)}, one block takes {format_bytes(size)}")
    return new_store("memory", spec, num_blocks, block_size, device)


def bytes_asked(memory: int | str | None, device: torch.device) -> int:
    """The setting `memory` in bytes; where it is None, what may be taken of the device."""
    if memory is None:
        free = free_memory(device)
        return int(0.85 * free) if device.type == "cuda" else free
    if not isinstance(memory, str):
        return at_least(0, "memory", memory)
    try:
        return parse_bytes(memory)
    except ValueError as error:
        raise ValueError(f"memory: {error}") from None

# %% tags=["export:engine_setup"]
def new_store(
    name: str, spec: KVSpec, num_blocks: int, block_size: int, device: torch.device
) -> KVStore:
    """A store; ValueError, beginning with `name`, with advice, where there is no room for it."""
    try:
        return KVStore(spec, num_blocks, block_size, device)
    except (RuntimeError, TypeError) as error:  # TypeError: a size of more than 64 bits
        want = format_bytes(num_blocks * spec.bytes_per_block(block_size))
        advice = "give a smaller memory= or num_blocks=, or a smaller model"
        if name != "memory":
            advice = f"give a smaller {name}="
        free = "" if name != "memory" else f", and {format_bytes(free_memory(device))} are free"
        raise ValueError(
            f"{name}: {num_blocks} blocks are {want}{free} on {device}; {advice}"
        ) from error


def check_given(model: Any, tokenizer: Any) -> None:
    """ValueError, naming it, for what is no model or no tokenizer of transformers."""
    if not (hasattr(model, "config") and hasattr(model, "device")):
        raise ValueError(f"model = {model!r}: a loaded model of transformers is needed")
    if tokenizer is not None and not hasattr(tokenizer, "backend_tokenizer"):
        raise ValueError(f"tokenizer: {type(tokenizer).__name__} is not a fast one")

# %% tags=["export:engine_setup"]
def longest_sequence(config: Any, asked: int | None, store: KVStore) -> int:
    """Tokens that a row may hold: as asked, or the model's limit, or else all of the store's."""
    limit: int | None = getattr(config, "max_position_embeddings", None)
    if asked is None:
        return limit or store.num_blocks * store.block_size
    if at_least(1, "max_seq_len", asked) > (limit or asked):
        raise ValueError(f"max_seq_len = {asked}: the model was made for {limit}")
    return asked


def assumed_costs(bytes_per_block: int, on_gpu: bool) -> Costs:
    """Figures to weigh recompute against swap where nobody has measured the machine."""
    bandwidth, prefill = (25e9, 20_000.0) if on_gpu else (5e9, 200.0)
    return Costs(bytes_per_block, bandwidth, prefill, source="assumed")


def make_scheduler(
    settings: Settings, store: KVStore, longest: int
) -> tuple[Scheduler, Preemption]:
    """A scheduler over the blocks of `store`, and what it does when they run out.

    Raises: ValueError, naming the setting.
    """
    budget, most = settings.token_budget, settings.max_running
    most = min(256, at_least(1, "token_budget", budget)) if most is None else most
    manager = BlockManager(
        store.num_blocks, store.block_size, at_least(1, "max_running", most), longest
    )
    cache = PrefixCache(manager.pool, store.block_size) if settings.prefix_caching else None
    on_gpu = store.tensors[0].device.type == "cuda"
    costs = settings.costs or assumed_costs(store.nbytes // store.num_blocks, on_gpu)
    relief = Preemption(manager, settings.host_blocks, costs, POLICIES[settings.policy])
    scheduler = Scheduler(
        manager, cache, token_budget=budget, max_running=most, chunked=settings.chunked,
        relief=relief, clock=time.perf_counter,
    )  # fmt: skip
    return scheduler, relief

# %% tags=["export:engine_setup"]
@dataclass(frozen=True)
class EngineStats:
    """The figures of one moment.

    Fields
        steps              launched so far;  step_kinds: how they ran, such as {"graph": 90}.
        tokens_run         through the model;  tokens_made: sampled and kept.
        waiting, running, swapped, finished   requests.
        blocks, blocks_used                   of the pool; used by running sequences.
        slots_filled       of the used blocks' slots, the share that holds a token; 1 if none.
        hit_tokens, queried_tokens            of admitted prompts, by the prefix cache.
        preemptions        how often each happened: "recompute", "swap", "restore", "drop".
    """

    steps: int
    step_kinds: dict[str, int]
    tokens_run: int
    tokens_made: int
    waiting: int
    running: int
    swapped: int
    finished: int
    blocks: int
    blocks_used: int
    slots_filled: float
    hit_tokens: int
    queried_tokens: int
    preemptions: dict[str, int]

    @property
    def hit_rate(self) -> float:
        """Hit tokens to queried tokens."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0

# %% tags=["export:engine_setup"]
def take_stats(
    desk: Desk, relief: Preemption, kinds: Counter[str], steps: int, tokens_run: int
) -> EngineStats:
    """The figures of this moment; `kinds`, `steps`, `tokens_run` as the engine counted them."""
    scheduler = desk.scheduler
    pool, tables, cache = scheduler.manager.pool, scheduler.manager.tables, scheduler.cache
    held = int(np.maximum(tables.seq_lens, 0).sum())
    slots = int(tables.num_blocks.sum()) * tables.block_size
    counts = scheduler.counts
    hits = (0, 0) if cache is None else (cache.stats.hit, cache.stats.queried)
    return EngineStats(
        steps, dict(kinds), tokens_run, desk.tokens_made,
        counts["waiting"], counts["running"], counts["swapped"], counts["finished"],
        pool.num_blocks, pool.num_blocks - pool.num_free, held / slots if slots else 1.0,
        *hits, {kind: relief.events[kind] for kind in ("recompute", "swap", "restore", "drop")},
    )  # fmt: skip

# %% [markdown]
# ## The engine
#
# What remains is short. A step launches plans until `depth` are in flight, then takes in the oldest: depth 1 waits for each step, depth 2 is one step ahead.

# %% tags=["export:engine"]
"""The engine: requests in, text out, everything above at work."""

from collections import deque
from collections.abc import Iterable, Iterator, Set

import transformers

from paged_kv.guest_check import guest_spec

# %% tags=["export:engine"]
class Engine:
    """Serves a causal language model of transformers: continuous batching over a paged cache.

    Args: `model`, `tokenizer` of transformers, without a tokenizer prompts are token ids;
    `runner`, which makes the `Runner`: `EagerRunner`, or chapter 14's; options, see `Settings`.
    State: `scheduler` over `manager` and `cache`; `runner` over `guest`; `desk`, who is being
    served; `pending`, launched steps, at most `depth`; `mail`, {request id: pieces} where
    somebody waits for them, `backlog`, all others.
    Raises: GuestRefused for a model that would be served wrong; ValueError.
    """

    def __init__(
        self, model: Any, tokenizer: Any = None, *, runner: MakeRunner = EagerRunner, **options: Any
    ) -> None:
        check_given(model, tokenizer)
        self.settings = settings = Settings(**options)
        self.model, self.tokenizer, self.device = model, tokenizer, model.device
        spec, on_gpu = guest_spec(model), self.device.type == "cuda"
        config = model.config.get_text_config(decoder=True)
        store = make_store(spec, settings, self.device)
        spare, host = max(1, settings.host_blocks), torch.device("cpu")
        self.host = new_store("host_blocks", spec, spare, store.block_size, host)
        longest = longest_sequence(config, settings.max_seq_len, store)
        self.scheduler, self.relief = make_scheduler(settings, store, longest)
        self.manager, self.cache = self.scheduler.manager, self.scheduler.cache
        attention = KernelAttention(settings.batch_invariant) if on_gpu else CpuAttention()
        self.guest = PagedModel(model, store, attention)
        shape = self.manager.tables.table.shape
        self.runner = runner(self.guest, self.host, Room(settings.token_budget, shape[0], shape))
        self.vocab_size = config.vocab_size
        self.desk = Desk(self.scheduler, Chooser(self.vocab_size, shape[0], self.device), tokenizer)
        self.depth = 1 + (on_gpu if settings.ahead is None else settings.ahead)
        self.pending, self.mail = deque[Pending](), dict[Hashable, deque[Delta]]()
        self.backlog, self.steps, self.tokens_run = list[Delta](), 0, 0

    def __repr__(self) -> str:
        now = self.stats
        requests = f"{now.waiting} waiting, {now.running} running, {now.swapped} swapped"
        return f"Engine: {requests}, {now.blocks_used} of {now.blocks} blocks used"

# %% tags=["export:engine"]
class Engine(Engine):  # type: ignore
    def add_request(self, prompt: Prompt, max_new_tokens: int = 128, **options: Any) -> Hashable:
        """Queue a request; returns its id.  Options: see `RequestOptions`.

        Raises, with nothing changed: ValueError, naming the argument.
        """
        asked = RequestOptions(**options)
        if asked.stop and self.tokenizer is None:
            raise ValueError(f"stop = {asked.stop!r}: a tokenizer is needed")
        ids = encode(prompt, self.tokenizer, self.vocab_size)
        request = make_request(ids, max_new_tokens, asked, eos_ids(self.model))
        number = self.scheduler.ledger.submitted
        name = self.scheduler.submit(request)
        self.desk.jobs[name] = make_job(name, request, asked, self.settings.seed + number)
        return name

    def step(self) -> list[Delta]:
        """Launch what can be launched, then take in the oldest step.

        Returns: what came of it, the last piece of a request with its Answer; without pieces
        that a `stream` or `generate` waits for.
        A step that fails is undone, its requests wait again, and the error goes on.
        """
        turn_over(self)
        pieces, self.backlog = self.backlog, []
        return pieces

    def abort(self, request_id: Hashable) -> Answer | None:
        """End a request in any state with what it has; None if it is unknown or has ended."""
        output = self.scheduler.abort(request_id)
        if output is None:
            return None
        pieces = close_all(self.desk, [output], {})
        post(self, [piece for piece in pieces if request_id in self.mail])
        return pieces[-1].answer

# %% tags=["export:engine"]
class Engine(Engine):  # type: ignore
    @property
    def idle(self) -> bool:
        """Whether nothing is left to do."""
        return not (self.desk.jobs or self.pending or self.backlog)

    def run(self) -> Iterator[Delta]:
        """Step until nothing is left, and give out all pieces; a break loses none."""
        yield from all_pieces(self)

    def stream(self, prompt: Prompt, *given: Any, **options: Any) -> Iterator[Delta]:
        """Add a request when its first piece is asked for, and give out its pieces.

        Arguments as for `add_request`.  Others are served besides.  Leaving it aborts it.
        """
        yield from pieces_of(self, self.add_request(prompt, *given, **options))

    def generate(
        self, prompts: Sequence[Prompt], max_new_tokens: int | Sequence[int] = 128,
        *, progress: bool = False, **options: Any,
    ) -> list[Answer]:  # fmt: skip
        """Answer all `prompts`, in their order; options as for `add_request`.

        If one of them cannot be, ValueError names it and none is begun.
        """
        return answers_to(self, prompts, max_new_tokens, progress, options)

    @property
    def stats(self) -> EngineStats:
        """The figures of this moment."""
        return take_stats(self.desk, self.relief, self.runner.counts, self.steps, self.tokens_run)

    def check(self) -> None:
        """Assert all invariants.  For tests."""
        self.scheduler.check()
        self.relief.host.check()
        assert set(self.desk.jobs) == set(self.scheduler.ledger.groups), "a job without its group"

# %% [markdown]
# The functions below are the loop. Whatever goes wrong between a decision and its delivery, an interrupt from the keyboard included, `undo` voids all that was in flight: blocks,
# names and rows are given up, every request waits again with the tokens it had, and the error goes on to the caller.

# %% tags=["export:engine"]
def turn_over(engine: Engine) -> None:
    """Launch what can be launched, take in the oldest step, give its pieces to who waits."""
    desk, pending = engine.desk, engine.pending
    try:
        while len(pending) < engine.depth and (plan := engine.scheduler.schedule()):
            launch(engine, plan)
        if pending:
            post(engine, deliver(desk, pending.popleft()))
        while pending and not desk.jobs:
            deliver(desk, pending.popleft())  # nobody waits for it any more
    except BaseException:
        undo(engine)
        raise
    finally:
        post(engine, close_all(desk, engine.scheduler.take_outputs(), {}))


def launch(engine: Engine, plan: StepPlan) -> None:
    """Send one plan to the device."""
    chooser = engine.desk.chooser
    chooser.open(plan, engine.desk.jobs, engine.scheduler.ledger.rows)
    with torch.inference_mode():
        logits, step = engine.runner.forward(plan, chooser.sampled)
        engine.pending.append(chooser.choose(plan, logits, step))
    engine.steps += 1
    engine.tokens_run += plan.num_tokens


def undo(engine: Engine) -> None:
    """Void all steps in flight: every request waits again, and the device is told anew."""
    flights, ledger = engine.scheduler.flights, engine.scheduler.ledger
    if flights:
        engine.scheduler.fail(flights[0].plan)
    for group in ledger.running_groups():
        ledger.release(group)
    engine.pending.clear()
    engine.desk.chooser.clear()

# %% tags=["export:engine"]
def post(engine: Engine, pieces: Sequence[Delta]) -> None:
    """Put pieces where they are waited for; forget all rows once nobody is left."""
    for piece in pieces:
        engine.mail.get(piece.request_id, engine.backlog).append(piece)
    if not (engine.desk.jobs or engine.pending):
        engine.desk.chooser.clear()


def all_pieces(engine: Engine) -> Iterator[Delta]:
    """Step until nothing is left; what was not taken goes back, to be given out first."""
    while not engine.idle:
        pieces = deque(engine.step())
        try:
            while pieces:
                yield pieces.popleft()
        finally:
            engine.backlog[:0] = pieces


def pieces_of(engine: Engine, name: Hashable) -> Iterator[Delta]:
    """The pieces of one request until it has ended; aborts it if it has not."""
    box = engine.mail[name] = deque()
    try:
        while name in engine.desk.jobs or box:
            if not box:
                turn_over(engine)
            while box:
                yield box.popleft()
    finally:
        engine.abort(name)
        del engine.mail[name]

# %% tags=["export:engine"]
def answers_to(
    engine: Engine, prompts: Any, most: Any, progress: bool, options: dict[str, Any]
) -> list[Answer]:
    """Add all `prompts` and step until they have their answers; aborts them if it cannot."""
    if isinstance(prompts, (str, bytes, Mapping, Set)) or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts = {prompts!r}: a list of prompts is needed")
    given, each = list(prompts), isinstance(most, (Sequence, np.ndarray))
    counts = list(most) if each and not isinstance(most, str) else [most] * len(given)
    if len(counts) != len(given):
        raise ValueError(f"max_new_tokens: {len(counts)} numbers for {len(given)} prompts")
    names: list[Hashable] = []
    try:
        for place, prompt in enumerate(given):
            try:
                names.append(engine.add_request(prompt, counts[place], **options))
            except ValueError as error:
                error.args = (f"prompts[{place}]: {error}",)
                raise
        return collect(engine, names, progress)
    except BaseException:
        for name in names:
            engine.abort(name)
        raise

# %% tags=["export:engine"]
def collect(engine: Engine, names: Sequence[Hashable], progress: bool) -> list[Answer]:
    """Step until all of `names` have their answers; what belongs to others waits for `step`."""
    answers: dict[Hashable, Answer] = {}
    box: deque[Delta] = deque()
    bar: Any = transformers.utils.logging.tqdm(total=len(names)) if progress else None
    engine.mail |= dict.fromkeys(names, box)
    try:
        while len(answers) < len(names):
            turn_over(engine)
            new = [piece.answer for piece in box if piece.answer is not None]
            box.clear()
            answers |= {answer.request_id: answer for answer in new}
            if bar is not None:
                bar.update(len(new))
    finally:
        for name in names:
            del engine.mail[name]
        if bar is not None:
            bar.close()
    return [answers[name] for name in names]

# %% [markdown]
# The opening's three chats, served. A also asks for three samples; they are forks of one prompt.

# %%
engine = Engine(model, num_blocks=8, block_size=4, ahead=True)
print(engine)
answers = engine.generate(list(chats.values()), 12, stop_tokens=())
assert [answer.texts[0].token_ids for answer in answers] == list(want.values())
stats = engine.stats
print(f"{stats.steps} steps, {stats.tokens_run} tokens run,",
      f"{stats.preemptions['recompute']} put aside")

roomy = Engine(model, num_blocks=40, block_size=4)
warm = SamplingOptions(temperature=1.0, seed=3)
three = roomy.generate([chats["A"]], 5, n=3, sampling=warm, stop_tokens=())[0]
print([text.token_ids for text in three.texts], f"{roomy.stats.tokens_run} tokens run")

# %% [markdown]
# :::{admonition} Predict
# :class: tip
# Three samples of a prompt of 10 tokens, five new tokens each: how many tokens does the model run? 3 x 14 = 42?
# :::
#
# :::{dropdown} Reasoning
# The prompt runs once, and its last logits give the first token of all three. The last token of a text is never run. So 10 + 3 x 4 = 22.
# :::
#
# ## Nobody can tell
#
# A request with a seed must get the same text whoever else is served and whatever happens to it. We give it the worst: a crowd, a pool so
# small that it is put aside, prompts cut into chunks of at most 9 tokens.

# %%
from paged_kv.preemption import Costs

mine = {"sampling": SamplingOptions(temperature=1.0, top_p=0.9, seed=3), "stop_tokens": ()}
quiet = Engine(model, num_blocks=40).generate([chats["B"]], 14, **mine)[0]
engine = Engine(model, num_blocks=14, block_size=4, host_blocks=20, ahead=True, token_budget=9,
                policy="last_arrived", costs=Costs(1, 1e12, 1e-3))  # swapping costs nothing
for k in range(6):
    engine.add_request([*rules, *range(50 + k, 60)], 14, stop_tokens=())
engine.add_request(chats["B"], 14, request_id="mine", **mine)
busy = {piece.request_id: piece.answer for piece in engine.run() if piece.answer}["mine"]
assert busy.texts[0].token_ids == quiet.texts[0].token_ids
print(f"same text; put aside {busy.preemptions} time(s), {busy.hit_tokens} tokens found;",
      {kind: count for kind, count in engine.stats.preemptions.items() if count})

# %% [markdown]
# ## Is it right?
#
# Now the real model, against transformers' own `generate`, one prompt at a time. Six prompts of mixed lengths, half of them behind
# common instructions; served by the cache, in chunks, one step ahead, and in a pool so small that some are recomputed and some
# swapped. The host pool has 4 blocks only; whoever finds it full is recomputed.
#
# A first difference would be excused only where the reference's two best logits lie within four times the measured noise. It would be counted.

# %%
instructions = "You keep a small museum. Answer visitors briefly. "
questions = ["Why is glass clear?", "Name a river.", "What do bees eat in winter, and why?",
             "Who drew the first maps?", "Tell me of owls.", "Why does iron rust?"]
texts = [instructions * (i % 2) + text for i, text in enumerate(questions)]
prompts = [tokenizer(text)["input_ids"] for text in texts]
NEW = 12


def by_itself(prompt):
    ids = torch.tensor([prompt])
    out = real.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW,
                        do_sample=False, eos_token_id=None, pad_token_id=0,
                        output_logits=True, return_dict_in_generate=True)
    best = torch.cat(out.logits).topk(2).values
    return out.sequences[0, len(prompt):].tolist(), (best[:, 0] - best[:, 1]).tolist()


def verdict(ours, theirs, gaps, allowed):
    if ours == theirs:
        return "equal"
    first = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), None)
    return "excused" if first is not None and gaps[first] < allowed else "different"


references = [by_itself(prompt) for prompt in prompts]

# %%
engine = Engine(real, tokenizer, num_blocks=14, block_size=4, host_blocks=4, max_seq_len=256,
                token_budget=16, ahead=True, costs=Costs(1, 1e12, 1e-3))
answers = engine.generate(prompts, NEW, stop_tokens=())
allowed = 4 * engine.guest.report.noise
verdicts = [verdict(answer.texts[0].token_ids, *reference, allowed)
            for answer, reference in zip(answers, references)]
print({word: verdicts.count(word) for word in ("equal", "excused", "different")})
assert "different" not in verdicts
stats = engine.stats
print(f"{stats.tokens_made} tokens made; recomputed {stats.preemptions['recompute']},",
      f"swapped {stats.preemptions['swap']}, tokens found again {stats.hit_tokens}")
assert stats.preemptions["recompute"] and stats.preemptions["swap"] and stats.hit_tokens
engine.check()
print(repr(answers[4].text))

# %% [markdown]
# **Turn the knob.** Set `num_blocks=400`; expect nobody to be put aside, and the same six texts.
#
# The figures of any moment are in `stats`; here is the pool in mid-service, with one chat that is read as it comes.

# %%
from paged_kv.draw import draw_pool

engine = Engine(real, tokenizer, num_blocks=12, block_size=16, max_seq_len=256)
for prompt in prompts[1:4:2]:
    engine.add_request(prompt, NEW, stop_tokens=())
said = []
for piece in engine.stream(prompts[0], NEW, stop_tokens=()):
    said.append(piece.text)
    if len(said) == 6:
        rows = {"ABC"[i]: row for i, row in enumerate(engine.scheduler.home.running.tolist())}
        picture = draw_pool(engine.manager.snapshot(rows), title="Six tokens into C's answer")
        filled = engine.stats.slots_filled
print(said)
print(f"{100 * filled:.0f} % of the slots in use are filled")
picture

# %% [markdown]
# ## When something goes wrong
#
# Two things go wrong in service. A *request* may be bad: its logits become NaN, for reasons of the model's own. A *step* may fail: the device is
# out of memory, or the user presses stop. The first ends one request, with its reason. The second must not end any.

# %%
class Trouble(EagerRunner):
    """Fails at the third step; gives NaN to texts that begin with token 99."""

    number = 0

    def forward(self, plan, sampled):
        self.number += 1
        if self.number == 3:
            raise RuntimeError("the device has had enough")
        logits, step = super().forward(plan, sampled)
        tokens = engine.scheduler.ledger.rows.tokens
        bad = torch.from_numpy(tokens[plan.sample_rows, 0] == 99)
        return logits.masked_fill(bad[:, None], torch.nan), step


engine = Engine(model, num_blocks=20, block_size=4, runner=Trouble, ahead=True)
for name, prompt in (chats | {"D": [99, 1, 2, 3, 4]}).items():
    engine.add_request(prompt, 12, request_id=name, stop_tokens=())
answers = {}
while not engine.idle:
    try:
        pieces = engine.step()
    except RuntimeError as error:
        print(f"step {engine.runner.number}: {error}; {engine}")
        continue
    answers |= {piece.request_id: piece.answer for piece in pieces if piece.answer}
engine.check()
for name, answer in sorted(answers.items()):
    right = answer.texts[0].token_ids == want.get(name)
    print(name, answer.texts[0].finish_reason, "- as the model says by itself" if right else "")

# %% [markdown]
# D is told why. Its blocks may hold NaN, so nobody may find them in the cache; a block that others hold stays, for it is theirs as well. Step 3 was undone: everybody waited again
# with the tokens they had, and their texts are what they would have been.
#
# :::{admonition} Check it yourself
# :class: warning
# ~~With greedy decoding a batch cannot change anybody's text.~~ It can, by the last bits: sums in another order differ, and where two tokens are almost
# equally likely the other one wins. That is why the comparison above has a stated tolerance, and why chapter 12's `batch_invariant` exists.
# :::

# %%
big, small, rival = torch.tensor(2.0**24), torch.tensor(1.0), torch.tensor(0.5)
for total in ((big + small) - big, (big - big) + small):  # the same three numbers, added up
    logits = torch.stack([total, rival])
    print("logits", logits.tolist(), "the likeliest is token", int(logits.argmax()))

# %% [markdown]
# ## State card
#
# | class | state | invariant | what breaks next |
# |---|---|---|---|
# | `StepUpload` | table on the device, two host buffers | device table = scheduler's, in rows that run | every launch costs the CPU some microseconds (14) |
# | `Runner` | guest, host store | same plan, same logits | one launch an operation (14) |
# | `CpuAttention` | plans of one step | equals chapter 4's attention but for rounding | products are then the larger part |
# | `PackedProducts` | packed copies of large weights | a weight that changes is packed again | the memory of a second copy |
# | `Chooser` | sampler, newest tokens, tenants | a tenant's settings lie in its row | |
# | `Desk` | jobs by request | a job lives as long as its group | spelling is Python, a token at a time |
# | `Engine` | steps in flight, mail | idle: pool full, no tenants, no jobs | one process, one GPU |
#
# ## Real world
#
# - vLLM: `vllm/v1/engine/core.py`, `step`: schedule, execute, `update_from_output`; `step_with_batch_queue` keeps more than one step in flight. In
#   `vllm/v1/worker/gpu_model_runner.py` the next step takes `prev_sampled_token_ids` on the GPU, as our `source` does. If a step raises, the engine process
#   ends (`EngineDeadError` in `vllm/v1/engine/exceptions.py`) and its requests with it.
# - SGLang: `python/sglang/srt/managers/scheduler.py`, `event_loop_overlap`: launches a batch, then processes the results of the one before.
# - TensorRT-LLM: `tensorrt_llm/_torch/pyexecutor/py_executor.py` has two loops; the one with overlap does likewise.
# - nano-vllm: `nanovllm/engine/llm_engine.py`: schedule, run, postprocess in a dozen lines, without a step ahead; a step is all prefill or all decode.
#
# vLLM (`vllm/v1/engine/output_processor.py`) and SGLang (`python/sglang/srt/managers/detokenizer_manager.py`) spell in another process than the one that launches, so
# that text never delays a step; TensorRT-LLM can hand it to workers (`tensorrt_llm/executor/postproc_worker.py`).
#
# ## Exercises
#
# :::{exercise}
# :label: ex-13-compute
# **Compute.** n = 4 samples of a prompt of 2,000 tokens, 100 new tokens each, B = 16. Tokens run? Blocks at the end, and without forking?
# :::
#
# :::{solution} ex-13-compute
# :class: dropdown
# 2,000 + 4 x 99 = 2,396 tokens. The prompt fills 125 blocks, which are shared; each sample adds 99 tokens, 7 blocks: 153. Apart, each would hold 2,099 tokens, 132 blocks: 528.
# :::

# %% tags=["hide-input"]
assert 2000 + 4 * 99 == 2396
assert 2000 // 16 + 4 * -(-99 // 16) == 153 and 4 * -(-2099 // 16) == 528
check = Engine(model, num_blocks=40, block_size=4, prefix_caching=False)
check.add_request([5] * 16, 8, n=4, sampling=warm, stop_tokens=())
held = max(check.stats.blocks_used for _ in iter(check.step, []))
assert held == 16 // 4 + 4 * -(-7 // 4) and check.stats.tokens_run == 16 + 4 * 7
print("blocks", held, "tokens", check.stats.tokens_run)

# %% [markdown]
# :::{exercise}
# :label: ex-13-trace
# **Trace.** Stop strings "aba" and "bc"; tokens are single letters: a b a b c. Which pieces come out, and what is the text?
# :::
#
# :::{solution} ex-13-trace
# :class: dropdown
# "a" is held, "ab" is held, "aba" is there: the text is empty, and "bc" never gets its turn. With "bc" alone: "a", then "b" is held, then "a" shows that it was
# harmless: "ba"; "b" held; "bc" ends it: "aba".
# :::

# %% tags=["hide-input"]
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel

letters = Tokenizer(WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="c"))
letters.decoder = Fuse()
for stops, shown in ((["aba", "bc"], ["", "", "", "", ""]), (["bc"], ["a", "", "ba", "", ""])):
    stream = TextStream(letters, stops)
    assert [stream.push(token) for token in (0, 1, 0, 1, 2)] == shown
    print(stops, shown, repr(stream.text))

# %% [markdown]
# :::{exercise}
# :label: ex-13-break
# **Break.** Let `Chooser.choose` keep -1 for a row of NaN in `sampled`, instead of 0. What fails, and whom does it hit?
# :::
#
# :::{solution} ex-13-break
# :class: dropdown
# One step ahead the next plan feeds it: the embedding has no row -1. On a CPU the whole step raises an error, on a GPU the device asserts and takes the process with it. One bad
# request would end all.
# :::

# %% tags=["hide-input"]
source = torch.tensor([0, -1, -1, -1])
step = DeviceStep(StepShape(1, 0, 0), padded.batch, source, *[torch.zeros(1)] * 3)
late = with_late_tokens(step, torch.tensor([-1])).input_ids
try:
    model.model.embed_tokens(late)
    raise AssertionError("it was taken")
except IndexError as error:
    print(type(error).__name__, late.tolist())
assert late[0] == -1 and (late[1:] >= 0).all()  # one row is enough

# %% [markdown]
# :::{exercise}
# :label: ex-13-implement
# **Implement.** Give up requests whose deadline has passed, with what they have, without touching the engine.
# :::
#
# :::{solution} ex-13-implement
# :class: dropdown
# Between two steps, abort them. The engine is a loop that you drive, so any rule about time can stand outside of it.
# :::

# %% tags=["hide-input"]
def serve_until(engine, deadlines, clock):
    while not engine.idle:
        for name in [name for name, end in deadlines.items() if clock() > end]:
            del deadlines[name]
            if (answer := engine.abort(name)) is not None:
                yield answer
        yield from (piece.answer for piece in engine.step() if piece.answer)


engine, ticks = Engine(model, num_blocks=20, block_size=4), iter(range(100))
for name, prompt in chats.items():
    engine.add_request(prompt, 12, request_id=name, stop_tokens=())
ended = {one.request_id: one.texts[0] for one in serve_until(engine, {"B": 4}, lambda: next(ticks))}
assert ended["B"].finish_reason == "aborted" and ended["B"].token_ids == want["B"][:5]
assert ended["A"].token_ids == want["A"] and engine.idle
print({name: (text.finish_reason, len(text.token_ids)) for name, text in sorted(ended.items())})

# %% [markdown]
# :::{exercise}
# :label: ex-13-ahead
# **Compute.** A step takes the device 10 ms and the host 2 ms. What does one step ahead gain? What if every text ends by a stop token after 20 tokens?
# :::
#
# :::{solution} ex-13-ahead
# :class: dropdown
# 12 ms become 10 ms: 1.20 times the tokens. Each text runs one token for nobody, 21 in place of 20: 1.14 times remain. The host's time is hidden as long as it is the shorter of the two.
# :::

# %% tags=["hide-input"]
gain = (10 + 2) / 10
print(f"10 ms and 2 ms: 12 ms, or 10 ms: {gain:.2f} times")
print(f"with a wasted token {gain * 20 / 21:.2f} times")
assert 10 + 2 == 12 and round(gain * 20 / 21, 2) == 1.14

# %% [markdown]
# ## Further reading
#
# - Gentle: *How continuous batching enables 23x throughput in LLM inference*, a post of Anyscale (2023), which shows with pictures why a static batch waits for its longest text.
# - The source of the idea: Orca {cite}`yu2022orca`, which schedules iteration by iteration.
# - Chunks beside decodes: Sarathi-Serve {cite}`agrawal2024sarathi`.
# - Deep: *Defeating nondeterminism in LLM inference* {cite}`he2025nondeterminism`, on results that do not depend on the batch.
