# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Preemption
#
# The scheduler of chapter 9 asks somebody for relief when a running chat needs a block and none is
# free. Suppose that somebody thinks: the chat that holds most blocks goes, that gains most; and what
# goes starts again from its prompt, that is simplest. Two chats, each fits the pool by itself. The
# model is a toy, whose next token is a checksum of all tokens that it reads through the table.

# %% tags=["hide-input"]
import warnings
import zlib

import numpy as np

from paged_kv.block_manager import BlockManager
from paged_kv.prefix_cache import PrefixCache
from paged_kv.request import Request
from paged_kv.scheduler import Scheduler
from paged_kv.step_plan import Host

warnings.filterwarnings("ignore", message="IProgress not found")  # we show no progress bars


class Toy:
    """A model over two stores of token ids; it reads and writes as its plans say, no other way."""

    def __init__(self, scheduler, host_blocks=0):
        self.scheduler, self.tables = scheduler, scheduler.manager.tables
        size = scheduler.manager.block_size
        self.device = np.full((scheduler.manager.pool.num_blocks, size), -1)
        self.host = np.full((host_blocks, size), -1)

    def at(self, block):
        return self.host[block.index] if isinstance(block, Host) else self.device[block]

    def run(self, plan):
        """One step: moves one by one, writes, then one token a sample."""
        for source, destination in plan.moves:
            self.at(destination)[:] = self.at(source)
        self.device.reshape(-1)[plan.slot_mapping] = plan.token_ids
        pairs = zip(plan.sample_rows.tolist(), plan.sample_logits.tolist())
        return np.array([self.token(*pair, plan) for pair in pairs], np.int64)

    def token(self, sample_row, sequence, plan):
        table = self.tables.table[plan.rows[sequence]]
        read = self.device[table[table >= 0]].reshape(-1)[: plan.seq_lens[sequence]]
        salt = self.scheduler.home.rows.sample[sample_row].index
        return zlib.crc32(read.tobytes(), salt) % 1000


def serve(scheduler, requests, host_blocks=0, watch=None, steps=1000):
    """Run `requests` to their ends, or for so many steps; return id -> texts, and the plans."""
    toy, plans, outputs = Toy(scheduler, host_blocks), [], []
    for request in requests:
        scheduler.submit(request)
    while len(plans) < steps and (plan := scheduler.schedule()) is not None:
        plans.append(plan)
        outputs += scheduler.commit(plan, toy.run(plan))
        scheduler.check()
        if watch is not None:
            watch.observe(scheduler)
    outputs += scheduler.take_outputs()
    return {one.request_id: [c.token_ids for c in one.completions] for one in outputs}, plans


# %%
class NaiveRestart:
    """The biggest goes, and starts again from its prompt."""

    def victim(self, ledger, candidates):
        return max(candidates, key=ledger.blocks_freed_by)

    def evict(self, ledger, group):
        ledger.release(group)
        for sample in group.samples:
            sample.tokens = sample.tokens[: len(group.request.prompt)]
        return []


chats = [Request([1, 2, 3, 4], 16, request_id="A"), Request([5, 6, 7, 8], 16, request_id="B")]
manager = BlockManager(num_blocks=6, block_size=4, max_seqs=4, max_seq_len=24)
scheduler = Scheduler(manager, relief=NaiveRestart(), token_budget=16)
texts, plans = serve(scheduler, chats, steps=500)
print(f"{len(plans)} steps, {sum(plan.num_tokens for plan in plans)} tokens computed, "
      f"{len(texts)} of {len(chats)} chats finished")

# %% [markdown]
# Both want 16 tokens more, so 19 tokens of cache each and five blocks, and there are six. Whoever grows larger is
# thrown out by the other, and so on for ever. **The question.** When blocks run out, who has to go, what
# happens to its keys and values, and how do we know that everybody still ends?
#
# :::{card} This chapter
# - **You need**: chapters 3 and 9; chapter 6 for groups, chapter 4 for the bytes.
# - **Exports**: `host_pool` (`HostPool`, `run_moves`, `unpack`, `blocks_to_return`), `preemption` (`Costs`,
#   `Candidate`, the policies, `Preemption`), `liveness` (`ProgressWatch`, `Livelock`).
# - **Device**: CPU.
# - **Run time**: under a minute, most of it the real model.
# - **You are here**: 00 tour · 01 sizing · 02 contiguous pool · 03 block manager · 04 paged
#   attention · 05 guest model · 06 copy-on-write · 07 sampling · 08 prefix cache · 09
#   scheduling · **10 preemption** · 11 decode kernel · 12 prefill kernel · 13 engine · 14 full speed
# :::
#
# Running out of blocks is normal. What matters is that it costs time only, never a wrong token and never a
# request that hangs. To *preempt* a request is to take its blocks away before it has ended.
#
# ## Two ways out
#
# Keys and values are a function of the tokens, and the tokens are known. So there are two ways to
# make room:
#
# - **Recompute**: drop the K/V, keep the tokens. When there is room again, run all of them, prompt and
#   generated alike, as one prefill. What chapter 8 still finds need not be run.
# - **Swap**: copy the blocks to host memory, and later back. Nothing is computed again.
#
# Recompute is what `Ledger.release` of chapter 9 does: it closes the rows, gives the blocks back tail first and
# puts the request where it was in the queue. Here is a chat of ten tokens that it happens to. Its two full blocks
# were published, and nobody takes them while it waits.

# %%
from paged_kv.draw import draw_pool
from paged_kv.ledger import Recompute

def small(num_blocks, relief=None, cached=True, **options):
    """A scheduler over a small pool with B = 4."""
    manager = BlockManager(num_blocks, 4, max_seqs=12, max_seq_len=64)
    cache = PrefixCache(manager.pool, 4) if cached else None
    return Scheduler(manager, cache, relief=relief or Recompute(), **{"token_budget": 64} | options)


scheduler = small(8)
toy = Toy(scheduler)
scheduler.submit(Request(range(1, 10), 8, request_id="A"))
plan = scheduler.schedule()
scheduler.commit(plan, toy.run(plan))
print("known", scheduler.home.rows.known[0], "in the cache", scheduler.manager.tables.seq_lens[0])
scheduler.ledger.release(scheduler.ledger.groups["A"])
plan = scheduler.schedule()
print("back: tokens run", plan.new_tokens.tolist(), "at positions", plan.positions.tolist())

# %% [markdown]
# Ten tokens were known, nine had K/V, eight lie in full blocks. On return the look-up comes before
# anything is counted: 8 tokens hit, and the plan runs 2, at positions 8 and 9. The tenth token, sampled last, is
# what makes at least one token run: a request that comes back always has something to do.
#
# **Turn the knob.** Make the scheduler with `cached=False` and run the cell again; expect ten tokens from
# position 0 on.
#
# That was the friendly case. A victim is chosen because others need its blocks, and these are taken
# tail first: what it finds on return is what was left over. So recompute costs nothing in the
# best case and the whole text in the worst. Swap costs the same in both.
#
# ## A second pool
#
# Host memory is one more pool of blocks, with ids, an allocator and a limit of its own. Nothing there
# is shared between groups and nothing is looked up, so it needs no counts. Its state:
#
# | name | type | who writes it |
# |---|---|---|
# | `parcels` | dict, group id → rows as `Saved` | `put`, `discard` |
# | the free queue | host block ids | `put`, `discard` |
#
# A `Saved`, from chapter 9, is one row: its sample, how many tokens, its blocks first to last. In a
# *parcel* these ids are host blocks. A *group* is a request with all its samples, as
# in chapter 9, and it leaves as a whole. Its rows share blocks, so the pool keeps **one host block for each
# distinct block**, not one for each table entry.
#
# > **I7.** A host block is free or belongs to exactly one parcel, and a group has a parcel iff it is
# > swapped.

# %% tags=["export:host_pool"]
"""Host memory as a second pool: who left blocks there, and the moves between both stores.

`HostPool` knows ids, as BlockPool does; `run_moves` knows bytes, as KVStore does.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from paged_kv.block_manager import BlockManager
from paged_kv.block_pool import OutOfBlocks
from paged_kv.kv_store import KVStore, check_range, resolve_copies
from paged_kv.residents import Saved
from paged_kv.sizing import at_least, blocks_for
from paged_kv.step_plan import Host, Move


def distinct_blocks(saved: Iterable[Saved]) -> list[int]:
    """The blocks that the rows of a group name, each once, in the order of first mention."""
    return list(dict.fromkeys(block for one in saved for block in one.ids))


# %% tags=["export:host_pool"]
class HostPool:
    """Host blocks with an allocator of their own, and which group left what in them.

    Args: `num_blocks`, the limit; 0 means that nothing is ever swapped.
    State
        parcels  group id -> its rows as `Saved`, whose ids are host blocks.
        the free queue: the host blocks that belong to no parcel.
    Invariant I7: a host block is free or belongs to exactly one parcel, never both.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = at_least(0, "num_blocks", num_blocks)
        self.parcels: dict[Hashable, list[Saved]] = {}
        self._free = deque(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Host blocks that belong to no parcel."""
        return len(self._free)

    def put(self, key: Hashable, saved: Sequence[Saved]) -> list[Move]:
        """Give the group `key` a host block for each distinct block of `saved`.

        Returns: the moves device -> host.  Raises, with nothing changed: OutOfBlocks;
        ValueError for a group that has a parcel already.
        """
        ids = distinct_blocks(saved)
        if key in self.parcels:
            raise ValueError(f"key = {key!r}: has a parcel already")
        if len(ids) > len(self._free):
            raise OutOfBlocks(len(ids), len(self._free))
        home = {block: self._free.popleft() for block in ids}
        self.parcels[key] = [replace(one, ids=[home[b] for b in one.ids]) for one in saved]
        return [(block, Host(place)) for block, place in home.items()]

    def discard(self, key: Hashable) -> None:
        """Take the host blocks of the group `key` back; ValueError if it has none."""
        if key not in self.parcels:
            raise ValueError(f"key = {key!r}: has no parcel")
        self._free.extend(distinct_blocks(self.parcels.pop(key)))


# %% tags=["export:host_pool"]
class HostPool(HostPool):  # type: ignore
    def check(self) -> None:
        """Assert I7.  O(num_blocks), for tests."""
        held = [block for saved in self.parcels.values() for block in distinct_blocks(saved)]
        assert sorted([*held, *self._free]) == list(range(self.num_blocks)), "a host block is lost"

    def snapshot(self, block_size: int) -> Mapping[str, Any]:
        """The parcels as plain data, one table a row, in the form that `draw_pool` takes."""
        rows = {
            f"{key}{one.index * chr(39)}": one
            for key, saved in self.parcels.items()
            for one in saved
        }
        counts = Counter(block for one in rows.values() for block in one.ids)
        return {
            "block_size": block_size,
            "num_blocks": self.num_blocks,
            "free": list(self._free),
            "tables": {name: list(one.ids) for name, one in rows.items()},
            "seq_lens": {name: one.num_tokens for name, one in rows.items()},
            "ref_counts": [counts[block] for block in range(self.num_blocks)],
        }

    def __repr__(self) -> str:
        each = [f"{key}:{distinct_blocks(saved)}" for key, saved in self.parcels.items()]
        free = f"{self.num_free} of {self.num_blocks} free"
        return f"HostPool: {free}, parcels {' '.join(each) or '-'}"


# %% [markdown]
# `put` moves no byte; it returns moves, as `make_writable` of chapter 6 returned pairs. Chat A below has
# forked: two rows name six blocks, but there are four.

# %%
from paged_kv.copy_on_write import fork, make_writable

manager = BlockManager(num_blocks=8, block_size=4, max_seqs=4, max_seq_len=24)
rows = [manager.add(10)]
rows.append(fork(manager, rows[0]))
make_writable(manager, rows)
manager.append(rows)
saved = [Saved(i, 11, manager.tables.ids(row)) for i, row in enumerate(rows)]
print("named", [one.ids for one in saved], "distinct", distinct_blocks(saved))
host = HostPool(num_blocks=6)
print(host.put("A", saved))
draw_pool(host.snapshot(4), title="A's parcel in host memory")

# %% [markdown]
# ## Moves, in the order issued
#
# The moves of a step go into its plan, and the engine runs them before any K/V are written. One step can put
# one chat out, bring another one back into the very blocks that came free, and copy on write. An example, where
# `H2` is a host block:
#
# | | move | why |
# |---|---|---|
# | 1 | 5 → H2 | A is put out |
# | 2 | H7 → 5 | B comes back into block 5 |
# | 3 | 5 → 9 | B's fork copies block 5 before it writes |
# | 4 | H2 → 4 | A's block is wanted again, elsewhere |
# | 5 | 6 → H2 | C is put out, where A lay |
#
# :::{admonition} Predict
# :class: tip
# A faster engine would group them: all moves out in one transfer, then all moves in, then the copies within the device.
# Which blocks end up with wrong contents?
# :::
#
# :::{dropdown} Reasoning
# Moves 1 and 5 both write H2, so after the transfer out H2 holds what block 6 held. Then move 4 reads H2:
# block 4 gets C's tokens in place of A's. The others come out right, by luck. The chat that gets block 4 will
# answer with somebody else's text.
# :::

# %%
moves = [(5, Host(2)), (Host(7), 5), (5, 9), (Host(2), 4), (6, Host(2))]
start = {**{i: f"d{i}" for i in range(10)}, **{Host(i): f"h{i}" for i in range(8)}}


def in_turn(pairs):
    state = dict(start)
    for source, destination in pairs:
        state[destination] = state[source]
    return state


def kind(move):
    """Out first, then in, then within the device."""
    source, destination = (isinstance(block, Host) for block in move)
    return 0 if destination else 1 if source else 2


right, grouped = in_turn(moves), in_turn(sorted(moves, key=kind))
wrong = {b: (grouped[b], right[b]) for b in right if grouped[b] != right[b]}
print("grouped by kind, wrong:", wrong)

# %% [markdown]
# The cure is the one of chapter 6. `resolve_copies` follows each destination back to the bytes that it means *at
# the start of the step*; anything hashable may name a block, so a `Host` will do. Then all sources are read, then all
# destinations written, and grouping is safe. A chain may end in a move from host to host that nobody issued.

# %% tags=["export:host_pool"]
def run_moves(moves: Iterable[Move], device: KVStore, host: KVStore) -> None:
    """Move whole blocks between and within two stores; an int names a device block.

    The result is that of one move after the other, though all sources are read first.
    Raises: ValueError for a block that does not exist, before anything changes.
    """
    kinds: dict[tuple[bool, bool], list[tuple[int, int]]] = {}
    for move in resolve_copies(moves):
        ends = [end.index if isinstance(end, Host) else end for end in move]
        kind = (isinstance(move[0], Host), isinstance(move[1], Host))
        kinds.setdefault(kind, []).append((ends[0], ends[1]))
    places = {kind: torch.tensor(pairs).unbind(1) for kind, pairs in kinds.items()}
    stores = (device, host)
    for kind, ids in places.items():
        for on_host, side in zip(kind, ids, strict=True):
            check_range("moves", side, 0, stores[on_host].num_blocks)
    for tensors in zip(device.tensors, host.tensors, strict=True):
        flat = [tensor.flatten(1) for tensor in tensors]
        read = {
            kind: flat[kind[0]].index_select(0, source.to(flat[kind[0]].device))
            for kind, (source, _) in places.items()
        }
        for kind, data in read.items():
            side = flat[kind[1]]
            side.index_copy_(0, places[kind][1].to(side.device), data.to(side.device))


# %% tags=["hide-input"]
from paged_kv.sizing import KVSpec

spec = KVSpec(num_layers=2, num_kv_heads=1, head_size=2, dtype="fp32")
rng = np.random.default_rng(0)


def numbered(num_blocks, first):
    """A store whose blocks hold their own number, counted from `first`, in every layer."""
    store = KVStore(spec, num_blocks, block_size=4)
    for tensor in store.tensors:
        tensor[:] = torch.arange(first, first + num_blocks).view(-1, 1, 1, 1, 1)
    return store


def end():
    return int(rng.integers(10)) if rng.random() < 0.5 else Host(int(rng.integers(8)))


for program in [moves] + [[(end(), end()) for _ in range(rng.integers(1, 51))] for _ in range(300)]:
    stores = numbered(10, 0), numbered(8, 10)
    run_moves(program, *stores)
    found = [int(t[0, 0, 0, 0]) for store in stores for t in store.tensors[1]]
    want = [f"d{n}" if n < 10 else f"h{n - 10}" for n in found]
    assert want == list(in_turn(program).values())
print("301 programs of up to 50 moves: at once = in turn, in both stores")

# %% [markdown]
# ## Coming back
#
# A swapped group waits in the same queue as everybody else. When may it come back? Take one that left with 8 tokens
# in two full blocks, $B = 4$, and a pool with 2 free blocks.
#
# :::{admonition} Predict
# :class: tip
# Two blocks were saved and two are free. Shall it come back? And if the whole pool has two blocks?
# :::
#
# :::{dropdown} Reasoning
# Its blocks are full: the next token needs a third. With two it would come back, find no room, and be put out again,
# with all the bytes moved twice for nothing. With three it may come. If the pool has two in all, it can
# never go on; it must end, not wait.
# :::

# %% tags=["export:host_pool"]
def blocks_to_return(saved: Sequence[Saved], known: Sequence[int], block_size: int) -> int:
    """Device blocks that a group needs to come back *and* to run all its known tokens.

    Args: `saved`, its rows; `known`, the tokens that each is to hold then.
    Counts each distinct block once, what lies behind it, and a copy for each writer of a
    partly filled block but its last holder.
    """
    holders = Counter(block for one in saved for block in one.ids)
    tails = Counter(one.ids[-1] for one in saved if one.num_tokens % block_size)
    copies = sum(min(writers, holders[tail] - 1) for tail, writers in tails.items())
    grown = [blocks_for(n, block_size) - len(s.ids) for n, s in zip(known, saved, strict=True)]
    return len(holders) + copies + sum(grown)


def unpack(manager: BlockManager, saved: Sequence[Saved]) -> tuple[list[int], list[Move]]:
    """Open a row for each of `saved` over fresh device blocks, shared as they were.

    Returns: the rows; the moves host -> device, whose destinations are the blocks taken.
    Raises, with nothing changed: OutOfBlocks; ValueError if too few rows are left.
    Keeps I2 and I3: a shared block is taken once, and every row looks before it writes.
    """
    pool, tables = manager.pool, manager.tables
    left = int((tables.seq_lens < 0).sum())
    if len(saved) > left:
        raise ValueError(f"saved: {len(saved)} rows are needed, {left} are left")
    ids = distinct_blocks(saved)
    fresh = dict(zip(ids, pool.take(len(ids)), strict=True))
    rows, held = [], set[int]()
    for one in saved:
        row, mine = tables.open(), [fresh[block] for block in one.ids]
        tables.extend(row, mine)
        tables.seq_lens[row] = one.num_tokens
        tables.guard(row)
        pool.claim([block for block in mine if block in held])  # take() counted the first
        held.update(mine)
        rows.append(row)
    return rows, [(Host(block), place) for block, place in fresh.items()]


# %%
chat = [Saved(0, 8, [0, 1])]
for free in (2, 3):
    needed = blocks_to_return(chat, [9], block_size=4)
    print(f"{free} free, {needed} needed:", "comes back" if needed <= free else "later")
print("A and its fork, one token more each:", blocks_to_return(host.parcels["A"], [12, 12], 4))
for row in rows[::-1]:
    manager.pool.release(manager.tables.detach(row)[::-1])
print(unpack(manager, host.parcels["A"]))
manager.check()
draw_pool(manager.snapshot({"A": 0, "A'": 1}), title="A is back, in other blocks, still sharing")

# %% [markdown]
# The two rows came back over four blocks, and the first two have a count of 2 again. The ids differ from those before,
# and nobody can tell: attention reads through the table.
#
# ## The price of a victim
#
# Whom to put aside, and how? Both questions are answered by a price, and a price should be what the
# decision *changes*:
#
# - **What is gained** is not what a group holds. Blocks that others hold too stay where they are.
# - **What is lost** by recompute is the tokens that must run again. Blocks that others hold will be found
#   by the look-up; the group's own will be handed to somebody else in this very step.
# - **What swap moves** is each distinct block, shared or not, out and back.

# %% tags=["export:preemption"]
"""When blocks run out: whom to put aside, and whether its K/V are dropped or kept.

`Preemption` is a Relief, as the scheduler asks for one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np

from paged_kv.block_manager import BlockManager
from paged_kv.copy_on_write import blocks_held
from paged_kv.ledger import Ledger
from paged_kv.request import Group
from paged_kv.sizing import at_least
from paged_kv.step_plan import Move


# %% tags=["export:preemption"]
@dataclass(frozen=True)
class Costs:
    """What a machine takes for the two ways out.

    Fields
        bytes_per_block       of all layers.
        bandwidth             B/s between device and host, one way at a time.
        prefill_tokens_per_s  tokens of a replay.
        transfer_latency      s, once for each way.
        seconds_per_pair      s, attention of one query to one key; 0 leaves replay linear.
        seconds_per_token     s, a decoding step: to know whether a deadline can be kept.
        source                "assumed", or where the numbers were measured.
    Raises: ValueError naming the field.
    """

    bytes_per_block: int
    bandwidth: float
    prefill_tokens_per_s: float
    transfer_latency: float = 0.0
    seconds_per_pair: float = 0.0
    seconds_per_token: float = 0.0
    source: str = "assumed"

    def __post_init__(self) -> None:
        at_least(1, "bytes_per_block", self.bytes_per_block)
        for name in ("bandwidth", "prefill_tokens_per_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} = {getattr(self, name)}: more than 0 is needed")
        for name in ("transfer_latency", "seconds_per_pair", "seconds_per_token"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} = {getattr(self, name)}: 0 or more is needed")

    def replay_seconds(self, tokens: int, context: int = 0) -> float:
        """To run `tokens` again behind `context` tokens that are there."""
        pairs = tokens * context + tokens * (tokens + 1) / 2
        return tokens / self.prefill_tokens_per_s + pairs * self.seconds_per_pair

    def swap_seconds(self, blocks: int) -> float:
        """To move `blocks` blocks out, and back."""
        return 2 * (self.transfer_latency + blocks * self.bytes_per_block / self.bandwidth)

# %% [markdown]
# Transfer times are bytes over bandwidth and a fixed part; a replay is tokens over the rate of prefill and, in
# long texts, a part that grows with the square. None of these numbers is ours yet: they are *assumed*, and marked so,
# until chapter 14 measures them. Moving 1.25 GiB, 4,096 tokens of a 70B model, over a link of 25 GB/s:

# %%
big = KVSpec(num_layers=80, num_kv_heads=8, head_size=128, dtype="fp16")
costs = Costs(16 * big.bytes_per_token, bandwidth=25e9, prefill_tokens_per_s=8000)
print(f"{4096 * big.bytes_per_token / 2**30:.2f} GiB at {costs.bandwidth / 1e9:.0f} GB/s: "
      f"{1e3 * costs.swap_seconds(256) / 2:.1f} ms each way")
late = Costs(16 * big.bytes_per_token, 25e9, 8000, transfer_latency=0.02)
crossing = next(n for n in range(1, 257) if late.swap_seconds(n) < late.replay_seconds(16 * n))
print(f"with {1e3 * late.transfer_latency:.0f} ms for each transfer, "
      f"swap wins from {crossing} blocks on, {16 * crossing} tokens")

# %% [markdown]
# That is 53.7 ms each way. Once a transfer has a fixed part, short texts are replayed sooner than swapped, long ones not.
# Where the border lies depends on the machine, and a lab draws it.
#
# :::{admonition} Predict
# :class: tip
# A 70B chat holds 135 blocks of 16 tokens: 125 of a system prompt that another chat holds as well, and 10 of its own.
# Beside it runs a chat with 135 blocks all its own. With the costs above: what does putting each aside gain, and which
# way out is quicker?
# :::
#
# :::{dropdown} Reasoning
# The first frees 10 blocks, the second 135. A swap moves 135 blocks for either. A replay of the first finds the 125 and
# runs 160 tokens; of the second, 2,160. So they look alike from outside, and one should be replayed, the
# other swapped.
# :::

# %%
manager = BlockManager(num_blocks=300, block_size=16, max_seqs=4, max_seq_len=4096)
system = manager.add(2000)
first = fork(manager, system)
manager.append(first, 160)
second = manager.add(2160)
for name, row in (("shared", first), ("alone", second)):
    ids = manager.tables.ids(row)
    frees = int((manager.pool.ref_count[ids] == 1).sum())
    swap, replay = costs.swap_seconds(len(ids)), costs.replay_seconds(16 * frees)
    print(f"{name:6} holds {len(ids)}, frees {frees:3}: "
          f"swap {1e3 * swap:.1f} ms, replay {1e3 * replay:.1f} ms")

# %% [markdown]
# Two more things belong into the price. **Progress**: to put a chat aside one token before its end is waste, for in one
# step its blocks come free by themselves; to put one aside that was just admitted costs next to nothing. So what is gained is
# counted in blocks *times steps*, with the tokens it may still make as the number of steps. And **slack**: the
# time left until the deadline of the request, once the work that it still needs is subtracted. Where that is
# negative, the deadline is lost already, and is no reason to keep the blocks.
#
# `Candidate` bundles all that. Nothing in it walks over tokens: a figure is a look at a row's lengths, or one pass of NumPy
# over its table and counts, made only when a policy asks.

# %% tags=["export:preemption"]
class Candidate:
    """A running group as a policy sees it; a figure is looked up when it is first asked for.

    State: `order`, (priority, arrival number), lower first; `host_free`, free host blocks.
    """

    def __init__(self, ledger: Ledger, group: Group, costs: Costs, host_free: int) -> None:
        self.ledger, self.group, self.costs = ledger, group, costs
        self.order, self.host_free = group.order, host_free
        self.rows = ledger.rows_of(group)

    @cached_property
    def frees(self) -> int:
        """Device blocks that nobody else holds: what putting it aside gains."""
        return self.ledger.blocks_freed_by(self.group)

    @cached_property
    def moves(self) -> int:
        """Distinct blocks that a swap moves out, and later back."""
        tables, known = self.ledger.manager.tables, self.ledger.rows.known
        kept = np.minimum(tables.seq_lens[self.rows], known[self.rows] - 1)
        starts = np.arange(tables.table.shape[1]) * tables.block_size
        return len(np.unique(tables.table[self.rows][starts < kept[:, None]]))

    @cached_property
    def replay(self) -> int:
        """Tokens that a recompute runs again if the blocks of others stay."""
        own = self.frees * self.ledger.manager.block_size
        return max(1, min(own, self.ledger.tokens_to_replay(self.group, after_hits=False)))


# %% tags=["export:preemption"]
class Candidate(Candidate):  # type: ignore
    @cached_property
    def method(self) -> str:
        """The quicker of "swap", where the host pool has room, and "recompute"."""
        possible = 0 < self.moves <= self.host_free
        quicker = self.costs.swap_seconds(self.moves) < self.costs.replay_seconds(self.replay)
        return "swap" if possible and quicker else "recompute"

    @cached_property
    def seconds(self) -> float:
        """What `method` takes, there and back."""
        if self.method == "swap":
            return self.costs.swap_seconds(self.moves)
        return self.costs.replay_seconds(self.replay)

    @cached_property
    def left(self) -> int:
        """Tokens that its longest sample may still make."""
        state = self.ledger.rows
        return max(1, int((state.limit[self.rows] - state.known[self.rows]).max(initial=1)))

    @cached_property
    def slack(self) -> float:
        """Seconds to its deadline once the work left is done; inf without one, or too late."""
        deadline = self.group.request.deadline
        if deadline is None:
            return math.inf
        work = self.left * self.costs.seconds_per_token + self.seconds
        slack = deadline - self.ledger.now() - work
        return slack if slack >= 0 else math.inf


# %% [markdown]
# A policy is then one function, from a candidate to a sort key. The least key goes.

# %% tags=["export:preemption"]
Policy: TypeAlias = Callable[[Candidate], tuple[float, ...]]


def last_arrived(one: Candidate) -> tuple[float, ...]:
    """Whoever came last, whatever its priority."""
    return (-one.group.serial,)


def lowest_priority(one: Candidate) -> tuple[float, ...]:
    """The least important; among equals, the last that came."""
    return tuple(-part for part in one.order)


def cheapest(one: Candidate) -> tuple[float, ...]:
    """Least seconds for each block gained and step that it is gained for."""
    gain = one.frees * one.left
    return (one.seconds / gain if gain else math.inf, *lowest_priority(one))


def most_slack(one: Candidate) -> tuple[float, ...]:
    """Whoever can wait longest; those without a deadline first."""
    return (-one.slack, *lowest_priority(one))


def cost_x_slack(one: Candidate) -> tuple[float, ...]:
    """Cheap and patient: the price of `cheapest` times the urgency 1 / (1 + slack)."""
    price = cheapest(one)
    urgency = 1 / (1 + one.slack)
    return (price[0] * urgency if urgency else 0.0, *price)


POLICIES: dict[str, Policy] = {
    policy.__name__: policy
    for policy in (last_arrived, lowest_priority, cheapest, most_slack, cost_x_slack)
}

# %% [markdown]
# ## The relief
#
# Now the object that the scheduler asks. It has four methods. `victim` picks by policy, with one exception that no
# policy can override: the **first candidate in order is never the victim**. The order is priority, then arrival. Why this one
# line matters is the subject of a later section.

# %% tags=["export:preemption"]
class Preemption:
    """A Relief that chooses a victim by a policy, and recompute or swap by cost.

    Args: `manager`, the scheduler's; `host_blocks`, the limit of the host pool; `costs`;
    `policy`, such as `cheapest`.
    State
        host    HostPool, with a parcel for each group that is swapped.
        events  how often each happened: "recompute", "swap", "restore", "drop".
    Invariants: the first candidate in order is never the victim; a group has a parcel iff it
    is swapped.
    """

    def __init__(
        self, manager: BlockManager, host_blocks: int, costs: Costs, policy: Policy = cheapest
    ) -> None:
        self.manager, self.costs, self.policy = manager, costs, policy
        self.host = HostPool(host_blocks)
        self.events: Counter[str] = Counter()

    def price(self, ledger: Ledger, group: Group) -> Candidate:
        """What a policy may know of `group`, as things stand now."""
        return Candidate(ledger, group, self.costs, self.host.num_free)

    def victim(self, ledger: Ledger, candidates: Sequence[Group]) -> Group:
        """Of `candidates`, in order, the one to put aside; never the first of them."""
        priced = [self.price(ledger, group) for group in candidates[1:]]
        return min(priced, key=self.policy).group

    def evict(self, ledger: Ledger, group: Group) -> list[Move]:
        """Put `group` aside by the quicker method; return the moves device -> host."""
        method = self.price(ledger, group).method
        self.events[method] += 1
        if method == "recompute":
            ledger.release(group)
            return []
        return self.host.put(group.id, ledger.suspend(group))


# %% tags=["export:preemption"]
class Preemption(Preemption):  # type: ignore
    def restore(self, ledger: Ledger, group: Group) -> list[Move] | None:
        """Bring a swapped group back if its blocks *and* those of its next tokens are there.

        Returns: the moves host -> device, or None with nothing changed.
        """
        saved = self.host.parcels[group.id]
        known = [len(group.samples[one.index].tokens) for one in saved]
        needed = blocks_to_return(saved, known, self.manager.block_size)
        if needed > self.manager.pool.num_free:
            return None
        rows, moves = unpack(self.manager, saved)
        if ledger.cache is not None:
            ledger.cache.forget(blocks_held(self.manager, rows))
        self.host.discard(group.id)
        ledger.resume(group, {one.index: row for one, row in zip(saved, rows, strict=True)})
        self.events["restore"] += 1
        return moves

    def drop(self, ledger: Ledger, group: Group) -> None:
        """Forget the parcel of a swapped group that will not come back this way."""
        self.host.discard(group.id)
        self.events["drop"] += 1


# %% [markdown]
# The host blocks of a parcel come free as soon as the moves back are *issued*, though no byte has moved yet; and a victim's
# device blocks are handed out again in the step that saves them. Both are safe for the same reason: moves run in order, and
# steps too.
#
# Here are the three chats, in a pool of eight blocks. A swap costs as much as a replay of ten tokens and one more for
# each block, so a short text is computed again and a longer one is moved.

# %%
def relief_for(manager, host_blocks=12, policy=last_arrived):
    """Costs in which swapping n blocks equals replaying 10 + n tokens."""
    costs = Costs(bytes_per_block=1, bandwidth=2.0, prefill_tokens_per_s=1.0, transfer_latency=5.0)
    return Preemption(manager, host_blocks, costs, policy)


def three_chats():
    prompts = {"A": range(1, 8), "B": range(11, 16), "C": range(21, 27)}
    return [Request(list(prompt), 12, request_id=name) for name, prompt in prompts.items()]


manager = BlockManager(num_blocks=8, block_size=4, max_seqs=8, max_seq_len=32)
relief = relief_for(manager)
scheduler = Scheduler(manager, PrefixCache(manager.pool, 4), relief=relief, token_budget=64)
tight, plans = serve(scheduler, three_chats(), host_blocks=12)
for plan in plans:
    if plan.moves:
        ends = [[f"H{b.index}" if isinstance(b, Host) else b for b in move] for move in plan.moves]
        print(f"step {plan.step}:", " ".join(f"{a}->{b}" for a, b in ends))
print(dict(relief.events))

# %%
roomy, few = serve(small(99), three_chats())
assert tight == roomy
print(f"same texts; {len(plans)} steps against {len(few)}, "
      f"{sum(p.num_tokens for p in plans)} tokens run against {sum(p.num_tokens for p in few)}")
relief.host.check()
print(relief.host)

# %% [markdown]
# The last two figures differ by the *tax*: 9 tokens that were computed twice. It is zero for swap, which pays in bytes.
#
# **Turn the knob.** Give `relief_for` no host blocks: every preemption becomes a recompute, and the tax rises. Give it
# `transfer_latency=0`: all become swaps.

# %% [markdown]
# ## A group comes back as a trie
#
# Four beams over a prompt of 500 tokens, 300 tokens further on, differ in their last 20 tokens only. They got there by
# forking, so most blocks are shared. How many blocks do they hold, and how many will they want after a recompute?
#
# :::{admonition} Predict
# :class: tip
# $B = 16$. Count the blocks of the four beams. Then count them again if each of them is replayed behind the shared *prompt*.
# :::
#
# :::{dropdown} Reasoning
# 780 tokens are common: 48 full blocks, and 12 tokens in a 49th which each beam copied when it wrote. Each has 50 blocks, so
# 2 of its own: 48 + 4 x 2 = 56. The prompt fills 31 blocks; replayed behind it, each wants 19 more: 31 + 4 x 19 = 107. A
# group that ran in 56 blocks may then not fit any more, and wait for a pool that will never be free enough.
# :::
#
# So the group is replayed as it grew, as a *trie*: a tree in which texts that begin alike share a path. One sample is
# computed to its end; the next is forked off it, rewound to the last common token, and runs only what differs; and so on,
# each forked from the earlier sample that shares most. Fork and rewind are chapter 6's, and chapter 9's scheduler does this
# whenever it admits a group; `hang_branches` says who hangs where, and admission counts `blocks_of_tree`.

# %%
from paged_kv.copy_on_write import blocks_held, fork_many
from paged_kv.request import blocks_of_tree, hang_branches

manager = BlockManager(num_blocks=120, block_size=16, max_seqs=4, max_seq_len=1024)
beams = [manager.add(780)]
beams += fork_many(manager, beams * 3)
make_writable(manager, beams, 20)
manager.append(beams, 20)
rng = np.random.default_rng(0)
common = rng.integers(0, 1000, 780)
group = Group("beams", Request(common[:500], 400, beam_width=4), serial=0, arrival=0.0)
for sample in group.samples:
    sample.tokens = np.concatenate([common, rng.integers(0, 1000, 20)])
hang_branches(group)
print("hung at", [(sample.parent, sample.at) for sample in group.samples])
print(f"held {len(blocks_held(manager, beams))}, as a trie {blocks_of_tree(group, 16)}", end="")
for sample in group.samples[1:]:
    sample.at = 500
print(f", behind the prompt {blocks_of_tree(group, 16)}")

# %% [markdown]
# Swap has no such trouble, since a parcel has one host block for each distinct block. Below, a group of three samples is put
# aside by each method, beside a chat that wants its blocks.

# %%
for latency in (1e9, 0.0):
    manager = BlockManager(num_blocks=11, block_size=4, max_seqs=8, max_seq_len=40)
    relief = relief_for(manager, host_blocks=12)
    relief.costs = Costs(1, 1e9, 1.0, transfer_latency=latency)
    scheduler = Scheduler(manager, relief=relief, token_budget=8)
    pair = [Request(range(1, 7), 22, request_id="A"),
            Request(range(11, 16), 9, n=3, request_id="B")]
    tight, plans = serve(scheduler, pair, host_blocks=12)
    roomy, _ = serve(small(99, cached=False), pair)
    print(dict(relief.events), "same texts:", tight == roomy)

# %% [markdown]
# ## Why everybody ends
#
# Back to the opening. Nothing was lost there, no block leaked, and `check` was content: a *livelock*, in which all move and
# nobody gets anywhere. To catch one, say first what getting somewhere is. A request comes or ends; or a sample knows more
# tokens than ever; or has more K/V than ever. A replay is none of these until it passes the old mark. If the whole state
# recurs and there was no progress in between, then, since the scheduler is deterministic, it will recur for ever. The watch
# below compares where each group stands and how many blocks are free, and waits for the third return.

# %% tags=["export:liveness"]
"""Does it move?  A watch over a scheduler, which names the cycle if it goes in circles."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeAlias

from paged_kv.request import Group
from paged_kv.scheduler import Scheduler

Figures: TypeAlias = tuple[int, int, int]  # of a sample: index, known tokens, reserved tokens
Standing: TypeAlias = tuple[str, tuple[Figures, ...]]  # of a group: state, living samples


class Livelock(RuntimeError):
    """A scheduler came back to a state it had been in, and nothing was gained in between.

    Attributes: `cycle`, the events from one visit to the next; empty if nothing happens at all.
    """

    def __init__(self, cycle: list[str]) -> None:
        super().__init__("; ".join(cycle) or "nothing happens any more")
        self.cycle = cycle


def standing(scheduler: Scheduler, group: Group) -> Standing:
    """Where a group stands; reserved is -1 for a sample without a row."""
    known, reserved = scheduler.home.rows.known, scheduler.manager.tables.seq_lens
    samples = [
        (one.index, len(one.tokens), -1)
        if one.row < 0
        else (one.index, int(known[one.row]), int(reserved[one.row]))
        for one in group.live()
    ]
    return group.state, tuple(samples)


# %% tags=["export:liveness"]
def changes(before: dict[Hashable, Standing], after: dict[Hashable, Standing]) -> list[str]:
    """What happened to each group from one look to the next, in words; growth is left out."""
    told = []
    for key, (state, samples) in after.items():
        was, then = before.get(key, ("new", ()))
        if was != state:
            told.append(f"{key}: {was} -> {state}")
        knew = {index: known for index, known, _ in then}
        for index, known, _ in samples:
            if known < knew.get(index, 0):
                told.append(f"{key}: knows {known} tokens, knew {knew[index]}")
    return told


# %% tags=["export:liveness"]
class ProgressWatch:
    """Look at a scheduler after every step; raises Livelock.

    Progress is a request that comes or ends, a sample that knows more tokens than ever before,
    or one that has more K/V than ever before.
    Args: `visits`, how often a state may be met without progress.
    State: the marks that living samples have reached, the events since the last progress, and
    at which of them each state was met.
    """

    def __init__(self, visits: int = 3) -> None:
        self.visits = visits
        self.marks: dict[tuple[Hashable, int], tuple[int, int]] = {}
        self.ends = (0, 0)
        self.last: dict[Hashable, Standing] = {}
        self.log: list[str] = []
        self.met: dict[tuple[object, ...], list[int]] = {}

    def observe(self, scheduler: Scheduler) -> None:
        """Take note of the state; Livelock if it was met too often without progress."""
        now = {key: standing(scheduler, group) for key, group in scheduler.ledger.groups.items()}
        told, self.last = changes(self.last, now), now
        if self._progress(scheduler) or not now:
            self.log, self.met = [], {}
        self.log += told
        state = (tuple(now.items()), scheduler.manager.pool.num_free)
        met = self.met.setdefault(state, [])
        met.append(len(self.log))
        if len(met) > self.visits and now:
            raise Livelock(self.log[met[-2] : met[-1]])

    def _progress(self, scheduler: Scheduler) -> bool:
        ledger, before = scheduler.ledger, (self.ends, self.marks)
        self.ends, self.marks = (ledger.submitted, ledger.counts["finished"]), {}
        for key, (_, samples) in self.last.items():
            for index, known, reserved in samples:
                mark = before[1].get((key, index), (0, 0))
                self.marks[key, index] = (max(mark[0], known), max(mark[1], reserved))
        return before != (self.ends, self.marks)


# %%
manager = BlockManager(num_blocks=6, block_size=4, max_seqs=4, max_seq_len=24)
scheduler = Scheduler(manager, relief=NaiveRestart(), token_budget=16)
try:
    serve(scheduler, chats, watch=ProgressWatch())
except Livelock as found:
    print("livelock:", "\n  ".join(found.cycle))

# %% [markdown]
# Each grows to 15 tokens in 4 blocks, is thrown out, and begins again. Which of our rules forbids that? Three together:
#
# 1. **Tokens are kept.** A request never knows fewer tokens than before, whatever happens to its K/V.
# 2. **The first in order is never put aside** while another one runs. So while it runs it has a token in every step in which
#    the budget reaches it, and it ends after finitely many.
# 3. **There is one queue.** Waiting and swapped requests stand in one order, and if its head does not fit, nobody behind it
#    is admitted. So whoever is first in order will be admitted as blocks come free, and nobody later slips past.
#
# When the first in order ends, the next one is first. Hence every request ends, unless more important ones arrive for ever,
# and a request is overtaken, in being admitted, by none but those of higher priority.
#
# And if the first is alone and still finds no block? Then there is nothing to take, and preempting itself would lead
# nowhere: it ends, with `finish_reason="out_of_blocks"` and what it has. A prompt that could never fit does not get that far.

# %%
from paged_kv.request import NeverFits

scheduler = small(2)
texts, plans = serve(scheduler, [Request(range(8), 5, request_id="A")], watch=ProgressWatch())
print("alone in 2 blocks:", texts, "free again:", scheduler.manager.pool.num_free)
try:
    small(10).submit(Request([1] * 48, 1))
except NeverFits as refused:
    print("refused:", refused)

# %% [markdown]
# **Turn the knob.** Delete the loop of `NaiveRestart`, so that tokens are kept, and run the opening again; expect both chats
# to end, B before A, who came first. Rule 1 was enough for an end, but not for a fair one.
#
# The claims hold for these runs. That they hold for others is the business of `tests/test_liveness.py`: random programs of
# requests, forks, priorities and aborts over tiny pools, against the toy model with a pool of any size. Each must give the
# same texts, keep waiting + running + swapped + finished equal to what was submitted, and count at least one recompute and
# one swap, or fail for not having tested any.
#
# ## A real model
#
# The same scheduler, with SmolLM2-135M behind it {cite}`allal2025smollm2`. One function turns a plan into the packed batch
# of chapter 5; another runs the moves and the model, and chooses the likeliest tokens.

# %% tags=["hide-input"]
from paged_kv.hf_adapter import host as host_model, load_guest
from paged_kv.packed_batch import PackedBatch


def packed(plan, tables):
    """The batch that a plan describes while no other is in flight."""
    wide = {
        "input_ids": plan.token_ids, "positions": plan.positions, "slot_mapping": plan.slot_mapping,
        "rows": plan.rows, "logits_at": plan.cu_seqlens[1:][plan.sample_logits] - 1,
    }
    narrow = {"block_table": tables.table, "cu_seqlens": plan.cu_seqlens, "seq_lens": plan.seq_lens}
    return PackedBatch(
        **{name: torch.tensor(data, dtype=torch.int64) for name, data in wide.items()},
        **{name: torch.tensor(data, dtype=torch.int32) for name, data in narrow.items()},
    )


def answer(guest, scheduler, requests, host_store):
    """Serve `requests` greedily; return id -> text ids, and the tokens run."""
    outputs, tokens = [], 0
    for request in requests:
        scheduler.submit(request)
    while (plan := scheduler.schedule()) is not None:
        run_moves(plan.moves, guest.store, host_store)
        logits = guest.forward(packed(plan, scheduler.manager.tables))
        outputs += scheduler.commit(plan, logits.argmax(-1).numpy())
        tokens += plan.num_tokens
    return {one.request_id: one.completions[0].token_ids for one in outputs}, tokens

# %% [markdown]
# Fourteen prompts of a few words, 14 tokens each to say, blocks of two tokens: roomy in 400 blocks, and then in 14, of which one
# chat takes up to ten. The costs are set so that a replay of up to eight tokens is preferred to a swap.

# %%
from paged_kv.hf_adapter import guest_spec

model, tokenizer = load_guest()
guest = host_model(model, num_blocks=400, block_size=2)
host_store = KVStore(guest_spec(model), 40, 2)
prompts = """The capital of France is;Once upon a time there was a;Water boils at a temperature of
To make bread you need;The largest planet is called;My favourite colour is;In the morning she
A poem about the sea:;The opposite of hot is;He opened the door and;Three fruits are apples,
The moon is made of;Dear Sir or Madam,;My dog likes to""".replace("\n", ";").split(";")
requests = [Request(tokenizer(text)["input_ids"], 14, request_id=text) for text in prompts]
answers, reliefs = {}, {}
for num_blocks in (400, 14):
    manager = BlockManager(num_blocks, 2, max_seqs=20, max_seq_len=32)
    costs = Costs(1, 1e9, 1.0, transfer_latency=4.0)
    relief = reliefs[num_blocks] = Preemption(manager, 40, costs, last_arrived)
    cache = PrefixCache(manager.pool, 2)
    scheduler = Scheduler(manager, cache, relief=relief, token_budget=128)
    answers[num_blocks], tokens = answer(guest, scheduler, requests, host_store)
    print(f"{num_blocks:3} blocks: {tokens} tokens run, {dict(relief.events)}")
assert answers[14] == answers[400]
assert min(reliefs[14].events[method] for method in ("recompute", "swap")) >= 10
first = prompts[0]
print(f"{len(prompts)} answers, {sum(map(len, answers[14].values()))} tokens, all equal")
print(repr(first + tokenizer.decode(answers[14][first])))

# %% [markdown]
# Chats were put aside and came back all the time, by both methods, and not one token changed. (They might: a replay computes
# in one batch what decoding computed one by one, and floating-point sums differ in the last digits. Where two tokens are all
# but equally likely, that can decide. Swap brings the very bytes back.)
#
# ## Mistakes in circulation
#
# :::{admonition} Check it yourself
# :class: warning
# - vLLM is said to ~~swap to 4 GiB of host memory under pressure~~. Its first generation did; today's recomputes only.
# - Putting a chat aside is said to ~~free the blocks that it holds~~. It frees those that nobody else holds.
# - A swapped request is said to ~~fit again once as many blocks are free as it left~~. If its last block is full, it needs
#   one more at once.
# :::

# %%
print(f"4 GiB would hold {4 * 2**30 // big.bytes_per_token:,} tokens of the 70B model")
manager = BlockManager(300, 16, max_seqs=2, max_seq_len=4096)
chat = fork(manager, manager.add(2000))
manager.append(chat, 160)
held, free = len(manager.tables.ids(chat)), manager.pool.num_free
manager.finish(chat)
print(f"held {held} blocks, freed {manager.pool.num_free - free}")
print("left 2 blocks, needs", blocks_to_return([Saved(0, 32, [0, 1])], [33], 16))

# %% [markdown]
# ## State card
#
# | class | fields | invariants | what breaks next |
# |---|---|---|---|
# | `HostPool` | `parcels`, the free queue | I7: a host block is free or in one parcel | copies that overlap with computing (chapter 14) |
# | `Candidate` | a running group, looked at | a price is what the decision changes | assumed costs (measured in chapter 14) |
# | `Preemption` | `host`, `events`, `costs`, `policy` | the first in order is never the victim; a group has a parcel iff it is swapped | thrashing under overload (a lab) |
# | `ProgressWatch` | `marks`, `log`, `met` | no state recurs without progress | - |
#
# What we have not done is to be *early*. A chat is let in whenever it fits, though everybody who runs will want a block soon; the
# one let in last is then the first to go. The lab on victim economics measures what that costs.
#
# ## Real world
#
# - vLLM's `vllm/v1/core/sched/scheduler.py` recomputes only. First come first served, the victim is the last of those
#   running; with priorities, the least important one that came last. Its first generation had swap as well, which the paper
#   describes {cite}`kwon2023paged`; there recompute was never more than 20 % slower {cite}`kwon2023paged`.
# - SGLang's `srt/managers/schedule_batch.py` *retracts* the requests that have generated least, the longest prompts first
#   among equals, and then admits less: it raises its estimate of what the others will still generate, which is one answer to
#   being early.
# - TensorRT-LLM lets the operator choose in `cpp/tensorrt_llm/batch_manager/capacityScheduler.cpp`: `GUARANTEED_NO_EVICT`
#   admits only what can run to its end, as chapter 5 did, and `MAX_UTILIZATION` admits more and pauses requests when blocks
#   run out.
# - Operating systems have swapped whole programs and chosen victims for sixty years; *thrashing* is when the machine does
#   little else.
#
# ## Exercises
#
# :::{exercise}
# :label: ex-10-compute
# **Compute.** Llama 3 8B keeps 131,072 bytes a token. If its prefill runs 20,000 tokens in a second and transfers cost
# nothing but their bytes, at which bandwidth do swap and recompute take the same time? Does it depend on the length?
# :::
#
# :::{solution} ex-10-compute
# :class: dropdown
# A swap moves each byte twice: 2 x 131,072 x 20,000 bytes in a second, 5.24 GB/s. The length cancels, as long as both are
# linear. A fixed cost of a transfer favours recompute for short texts; attention, which grows with the square, favours swap
# for long ones.
# :::

# %% tags=["hide-input"]
rate, token_bytes = 20_000, 131_072
even = 2 * token_bytes * rate
print(f"{even / 1e9:.2f} GB/s")
for blocks in (1, 64, 512):
    same = Costs(16 * token_bytes, even, rate)
    assert abs(same.swap_seconds(blocks) - same.replay_seconds(16 * blocks)) < 1e-12

# %% [markdown]
# :::{exercise}
# :label: ex-10-trace
# **Trace.** Run `1 → H0, H1 → 1, 1 → H1, H0 → 2` by hand, block 1 holding x and H1 holding y. What do 1, 2, H0 and H1 hold
# at the end? What does `resolve_copies` make of it?
# :::
#
# :::{solution} ex-10-trace
# :class: dropdown
# H0 = x, then 1 = y, then H1 = y (its own bytes again), then 2 = x. Resolved: 1 → H0, H1 → 1 and 1 → 2; the third move has
# vanished, since it gives H1 what it has.
# :::

# %% tags=["hide-input"]
program = [(1, Host(0)), (Host(1), 1), (1, Host(1)), (Host(0), 2)]
assert resolve_copies(program) == [(1, Host(0)), (Host(1), 1), (1, 2)]
state = in_turn(program)
assert [state[b] for b in (1, 2, Host(0), Host(1))] == ["h1", "d1", "d1", "h1"]

# %% [markdown]
# :::{exercise}
# :label: ex-10-break
# **Break.** Let `restore` count only the blocks that were saved. Are any texts wrong? What is?
# :::
#
# :::{solution} ex-10-break
# :class: dropdown
# No text is wrong, and everybody still ends. But a group comes back, finds no room for its next token, and is put out again:
# more swaps, more bytes, and the same number of useful tokens.
# :::

# %% tags=["hide-input"]
class Hasty(Preemption):
    """Comes back as soon as the blocks that were saved fit."""

    def restore(self, ledger, group):
        saved = self.host.parcels[group.id]
        if len(distinct_blocks(saved)) > self.manager.pool.num_free:
            return None
        rows, moves = unpack(self.manager, saved)
        self.host.discard(group.id)
        ledger.resume(group, {one.index: row for one, row in zip(saved, rows)})
        return moves


def moved_by(kind):
    manager = BlockManager(num_blocks=7, block_size=4, max_seqs=8, max_seq_len=40)
    relief = kind(manager, 20, Costs(1, 1e9, 1.0), last_arrived)
    scheduler = Scheduler(manager, relief=relief, token_budget=64)
    rivals = [Request([i] * 7, 18, request_id=i) for i in range(3)]
    texts, plans = serve(scheduler, rivals, host_blocks=20)
    return texts, sum(len(plan.moves) for plan in plans)


(patient, few), (hasty, many) = moved_by(Preemption), moved_by(Hasty)
assert patient == hasty and many > few
print(f"blocks moved: {few} against {many}")

# %% [markdown]
# :::{exercise}
# :label: ex-10-implement
# **Implement.** A policy `biggest`: whoever frees most blocks goes. For pools of 9, 10, 11, 12, 14 and 16 blocks, compare
# the tokens that it, `last_arrived` and `cheapest` compute twice. Which is best?
# :::
#
# :::{solution} ex-10-implement
# :class: dropdown
# None. The texts are the same under all; the tax of `biggest` is the smallest in pools of 9 and 10 blocks and not in the
# others. A policy decides one step at a time and cannot know what its choice brings about later, so it takes many runs to
# rank them, which is the work of a lab.
# :::

# %% tags=["hide-input"]
def biggest(one):
    return (-one.frees, *lowest_priority(one))


def tax(policy, num_blocks):
    manager = BlockManager(num_blocks, block_size=4, max_seqs=8, max_seq_len=64)
    relief = Preemption(manager, 0, Costs(1, 1.0, 1.0), policy)
    scheduler = Scheduler(manager, relief=relief, token_budget=64)
    crowd = [Request([i] * length, 12, request_id=i) for i, length in enumerate((5, 20, 5, 6, 7))]
    _, plans = serve(scheduler, crowd)
    needed = sum(len(one.tokens) + one.max_new_tokens - 1 for one in crowd)
    return sum(plan.num_tokens for plan in plans) - needed


pools = (9, 10, 11, 12, 14, 16)
taxes = {one.__name__: [tax(one, n) for n in pools] for one in (last_arrived, cheapest, biggest)}
print("pool", pools, taxes)
best = [min(taxes, key=lambda name: taxes[name][i]) for i in range(len(pools))]
assert [name == "biggest" for name in best] == [True] * 2 + [False] * 4

# %% [markdown]
# :::{exercise}
# :label: ex-10-choose
# **Compute.** Three chats may be put aside. X would free 4 blocks at a cost of 8 s and has 2 tokens to go; Y 2 blocks, 3 s,
# 20 tokens, and no slack; Z 2 blocks, 4 s, 20 tokens, and 9 s of slack. Whom does `cheapest` choose, whom `cost_x_slack`, if
# X has no deadline?
# :::
#
# :::{solution} ex-10-choose
# :class: dropdown
# Seconds for each block and step: X 8/8 = 1, Y 3/40 = 0.075, Z 4/40 = 0.1; `cheapest` takes Y. Times 1/(1 + slack): Y 0.075,
# Z 0.01, X 0, for it can wait for ever; `cost_x_slack` takes X.
# :::

# %% tags=["hide-input"]
from types import SimpleNamespace

shapes = {"X": (4, 8.0, 2, math.inf), "Y": (2, 3.0, 20, 0.0), "Z": (2, 4.0, 20, 9.0)}
three = [
    SimpleNamespace(name=name, frees=frees, seconds=seconds, left=left, slack=slack, order=(0, i))
    for i, (name, (frees, seconds, left, slack)) in enumerate(shapes.items())
]
for one in three:
    print(f"{one.name}: {one.seconds:.0f} s, slack {one.slack:.0f} s, "
          f"{cheapest(one)[0]:.3f}, {cost_x_slack(one)[0]:.3f}")
assert min(three, key=cheapest).name == "Y"
assert min(three, key=cost_x_slack).name == "X"

# %% [markdown]
# ## Further reading
#
# - Gentle: the chapters on swapping, mechanisms and policies, in *Operating Systems: Three Easy Pieces* {cite}`arpaci2018ostep`.
# - The source: sections 4.5 and 7.3 of the PagedAttention paper {cite}`kwon2023paged`, on preemption, groups, and recompute
#   against swap.
# - Deep: FastServe {cite}`wu2023fastserve` preempts at every token, to let short answers pass long ones, and swaps ahead
#   of need.
