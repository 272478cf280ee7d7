# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Scheduling
#
# Two chats of six tokens, a pool of four blocks of four slots, and the obvious server: a chat is let in
# as soon as its prompt fits, and in every step each chat gets one token more.

# %%
from paged_kv.block_manager import BlockManager
from paged_kv.block_pool import OutOfBlocks

manager = BlockManager(num_blocks=4, block_size=4, max_seqs=4, max_seq_len=32)
chats = {name: manager.add(6) for name in "AB"}  # both prompts fit
for step in range(1, 9):
    try:
        manager.append(list(chats.values()))
    except OutOfBlocks as error:
        print(f"step {step}: {error}")
held = manager.tables.seq_lens[list(chats.values())]
print("tokens:", held, "of 10 each; nobody will ever finish")

# %% [markdown]
# Either chat alone would have ended in four steps. Together they hold all blocks, each needs one more,
# and neither gives any back before it ends.
#
# **The question.** Who runs which tokens in the next step, in which blocks, so that every request
# ends?
#
# :::{card} This chapter
# - **You need**: chapters 3, 6 and 8; chapter 5 for the real model at the end.
# - **Exports**: `request` (`Request`), `row_state`, `residents`, `turns`, `step_plan` (`StepPlan`), `ledger`,
#   `admission`, `in_flight`, `scheduler` (`Scheduler`).
# - **Device**: CPU.
# - **Run time**: half a minute.
# - **You are here**: 00 tour · 01 sizing · 02 contiguous pool · 03 block manager · 04 paged
#   attention · 05 guest model · 06 copy-on-write · 07 sampling · 08 prefix cache · **09
#   scheduling** · 10 preemption · 11 decode kernel · 12 prefill kernel · 13 engine · 14 full speed
# :::
#
# ## Two currencies
#
# A running server spends blocks in two ways. An arrival pays in bulk: 2,000 tokens of prompt want
# 125 blocks of 16 at once, before the first word of the answer. A chat that decodes pays in drips: one
# block in 16 steps. 64 chats that decode take four blocks a step between them, so one arrival costs
# what they spend in about 31 steps.

# %% tags=["hide-input"]
import matplotlib.pyplot as plt
import numpy as np

from paged_kv.draw import book_style

book_style()
steps = np.arange(60)
lens = 100 + 7 * np.arange(64)  # 64 chats, at all offsets within a block
drip = np.array([int(((lens + step) % 16 == 0).sum()) for step in steps])
bulk, chunked = drip.copy(), drip.copy()
bulk[20] += 125
chunked[20:36] += np.diff(-(-np.minimum(np.arange(17) * 128, 2000) // 16))
fig, axes = plt.subplots(2, 1, figsize=(6.4, 3.8), sharex=True)
for ax, taken, how in zip(axes, (bulk, chunked), ("in one piece", "in chunks of 128 tokens")):
    ax.bar(steps, taken, width=1.0, color="#0072B2", label="prompt of 2,000 tokens, " + how)
    ax.bar(steps, drip, width=1.0, color="#E69F00", label="64 chats that decode")
    ax.set(ylabel="blocks taken")
    ax.legend(loc="upper right")
axes[1].set_xlabel("step")
plt.show()
print(f"bulk: {bulk[20] - drip[20]} blocks at once; in chunks at most "
      f"{(chunked - drip).max()} a step; drip: {drip.mean():.1f} blocks a step")
assert (bulk - drip).sum() == (chunked - drip).sum() == 125

# %% [markdown]
# *Figure: blocks taken in each step by 64 decoding chats and by one prompt of 2,000 tokens, whole
# above (125 blocks in one step) and in chunks below (eight a step).*
#
# A prompt need not be paid at once. Attention does not care in how many steps the K/V of a prompt are
# written. Cut into chunks, it takes its blocks in instalments, and the chats that decode beside it never wait for 2,000
# tokens to pass: a step runs as many tokens as its *budget* says, decodes first {cite}`agrawal2024sarathi`.
#
# So the unit of scheduling is the token and not the request, and there is no "prefill phase". A row has
# some tokens that are known, and some whose K/V are in the cache. It wants to run the difference. If that is one
# token, we say it decodes; if it is more, that is a prompt, or a chat that was thrown out and comes back.
#
# ## What a user asks for
#
# Nine modules follow. The first is the vocabulary: what a request may ask for, and what
# comes back.

# %% tags=["export:request"]
"""What a user asks for, and how far it has come."""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from numbers import Real
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paged_kv.prefix_keys import token_array
from paged_kv.sizing import at_least

Ints: TypeAlias = NDArray[np.int64]
Tokens: TypeAlias = NDArray[np.int32]
Extra: TypeAlias = tuple[tuple[str, str | bytes | int], ...]
State: TypeAlias = Literal["waiting", "running", "swapped", "finished"]
MAX_TOKEN = 2**31 - 1


class NeverFits(ValueError):
    """A request that the pool could not hold even alone; nothing has changed.

    Attributes: `needed` and `existing`, in blocks.
    """

    def __init__(self, needed: int, existing: int) -> None:
        super().__init__(f"prompt: {needed} blocks needed, {existing} exist")
        self.needed = needed
        self.existing = existing


# %% tags=["export:request"]
@dataclass(frozen=True, eq=False)
class Request:
    """What a user asks for.  Raises ValueError, naming the field, for what cannot be.

    Fields
        prompt          token ids, at least one; `tokens` holds them as int32.
        max_new_tokens  tokens to generate at most, for each sample.
        request_id      anything hashable; None lets the scheduler choose a number.
        priority        lower goes first.
        deadline        the time by which it should be finished; the scheduler does not look.
        stop_tokens     generation ends with any of these.
        extra           (kind, value) pairs that change K/V: a tenant's salt, an adapter.
        n               samples of this prompt;  beam_width: beams in place of samples, or 0.
        arrival         time of arrival; None means that of submission.
    """

    prompt: Sequence[int] | Tokens
    max_new_tokens: int
    _: KW_ONLY
    request_id: Hashable = None
    priority: int = 0
    deadline: float | None = None
    stop_tokens: tuple[int, ...] = ()
    extra: Extra = ()
    n: int = 1
    beam_width: int = 0
    arrival: float | None = None
    tokens: Tokens = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", own_tokens("prompt", self.prompt))
        stops = own_tokens("stop_tokens", self.stop_tokens).tolist()
        object.__setattr__(self, "stop_tokens", tuple(stops))
        check_numbers(self)


# %% tags=["export:request"]
class Request(Request):  # type: ignore
    @property
    def width(self) -> int:
        """Rows that it takes once it generates."""
        return self.beam_width or self.n

    @property
    def limit(self) -> int:
        """Tokens at which a sample ends, the prompt's included."""
        return len(self.tokens) + self.max_new_tokens


def own_tokens(name: str, tokens: Sequence[int] | NDArray[np.integer[Any]]) -> Tokens:
    """`tokens` as a read-only int32 array of its own; ValueError, naming it, for what is none."""
    try:
        if not isinstance(tokens, np.ndarray | Sequence):  # a generator can be read only once
            tokens = list(tokens)
        if not isinstance(tokens, np.ndarray) and bool in set(map(type, tokens)):
            raise ValueError("whole numbers are needed, not bools")
        own = token_array(tokens).copy()
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from None
    own.flags.writeable = False
    return own


def check_numbers(request: Request) -> None:
    """ValueError, naming it, for a field of `request` that is out of its range."""
    at_least(1, "prompt, its length", len(request.tokens))
    at_least(1, "max_new_tokens", request.max_new_tokens)
    at_least(-MAX_TOKEN, "priority", request.priority)
    at_least(0, "beam_width", request.beam_width)
    for name, when in (("arrival", request.arrival), ("deadline", request.deadline)):
        number = isinstance(when, Real) and not isinstance(when, bool)
        if when is not None and not (number and math.isfinite(when)):
            raise ValueError(f"{name} = {when!r}: a finite time is needed, or None")
    if at_least(1, "n", request.n) > 1 and request.beam_width:
        raise ValueError(f"n = {request.n}: samples or beams, not both")


# %% [markdown]
# The prompt is copied and made read-only, since its user may go on with the list. A request with `n` samples or with beams
# is one thing to its user, so it is one thing to the scheduler, a *group*: admitted, thrown out and ended as a whole.

# %% tags=["export:request"]
@dataclass(frozen=True)
class Completion:
    """One sample's generated ids, and why it ended.

    Reasons: "length", "stop", "aborted", "out_of_blocks", or what `Scheduler.finish` was told.
    """

    index: int
    token_ids: list[int]
    finish_reason: str


@dataclass(frozen=True)
class Output:
    """A finished request: all its samples, and its times by the scheduler's clock."""

    request_id: Hashable
    completions: tuple[Completion, ...]
    arrival: float
    first_token_at: float | None
    finished_at: float
    hit_tokens: int
    preemptions: int


@dataclass(eq=False, slots=True)
class Sample:
    """One text of a group.

    `tokens`, prompt and committed output, are valid while it has no row.  While its group runs
    and it has none, it waits to fork: off the sample `parent`, to share its first `at` tokens.
    """

    index: int
    tokens: Tokens
    row: int = -1
    finish_reason: str | None = None
    parent: int = -1
    at: int = 0


# %% tags=["export:request"]
@dataclass(eq=False)
class Group:
    """A request on its way; its samples are admitted, preempted and aborted together.

    `serial` numbers arrivals, `root` is where the keys of its blocks begin, `generation` is the
    cache's when its K/V began: only then may they be found.
    """

    id: Hashable
    request: Request
    serial: int
    arrival: float
    root: bytes = b""
    state: State = "waiting"
    samples: list[Sample] = field(default_factory=list)
    first_token_at: float | None = None
    hit_tokens: int = 0
    preemptions: int = 0
    generation: int = 0

    def __post_init__(self) -> None:
        self.order = (self.request.priority, self.serial)
        self.beams = self.request.beam_width > 1
        self.samples = [Sample(i, self.request.tokens) for i in range(self.request.width)]
        hang_branches(self)

    def live(self) -> list[Sample]:
        """The samples that have not ended."""
        return [sample for sample in self.samples if sample.finish_reason is None]

    def __repr__(self) -> str:
        rows = [sample.row for sample in self.live()]
        return f"Group {self.id!r}: {self.state}, rows {rows}, order {self.order}"


# %% [markdown]
# A group prefills once. The first sample runs the prompt; the others hang on it and fork when its last token is
# scheduled, each to draw its own first token from the same logits. A group that was thrown out comes back the same
# way, only that its texts have parted: each sample hangs on the earlier one that it shares most with. Four texts
# over a common prompt are replayed as a *tree*, not four times.

# %% tags=["export:request"]
def common_prefix(one: Tokens, other: Tokens) -> int:
    """How many tokens two texts have in common from the start."""
    shorter = min(len(one), len(other))
    differ = (one[:shorter] != other[:shorter]).nonzero()[0]
    return int(differ[0]) if len(differ) else shorter


def hang_branches(group: Group) -> None:
    """Make a tree of the live samples: each hangs on the earlier one that it shares most with.

    A sample that has generated nothing shares all its tokens: it needs only a token sampled from
    its parent's logits.  Any other has at least one token to run itself.
    """
    earlier: list[Sample] = []
    for sample in group.live():
        sample.parent, sample.at = -1, 0
        fresh = len(sample.tokens) == len(group.request.tokens)
        most = len(sample.tokens) - (not fresh)
        for other in earlier:
            shared = min(common_prefix(sample.tokens, other.tokens), most)
            if shared > sample.at:
                sample.parent, sample.at = other.index, shared
        earlier.append(sample)


def blocks_of_tree(group: Group, block_size: int) -> int:
    """Blocks that the live samples need together to run the tokens they have, as a tree.

    Full blocks before `at` are the parent's; the one that `at` lies in is copied on writing.
    """
    total = 0
    for sample in group.live():
        if sample.at < group.request.limit - 1:
            total += -(-len(sample.tokens) // block_size) - sample.at // block_size
    return total


# %%
group = Group("A", Request(range(6), 8, n=4), serial=0, arrival=0.0)
print("blocks for a prompt of 6, B = 4, four samples:", blocks_of_tree(group, 4))
for sample, tail in zip(group.samples, ("abcd", "abce", "abxy", "zzzz")):
    sample.tokens = np.array([*range(6), *map(ord, tail)], np.int32)
hang_branches(group)
print("(parent, at):", [(sample.parent, sample.at) for sample in group.samples])
print("as a tree", blocks_of_tree(group, 4), "blocks, apart", 4 * 3)

# %% [markdown]
# The tree needs 7 blocks where four replays apart would need 12, and it is the 7 that admission will count.
#
# Whoever has no row waits in one queue, ordered by priority and then by arrival. A group that was thrown out
# keeps its number, so it returns to its old place.

# %% tags=["export:request"]
class WaitingQueue:
    """Groups in (priority, arrival) order, those that were preempted in their old place.

    State: a heap; groups that left by an abort stay in it, marked, until they surface.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Group]] = []
        self._members: set[int] = set()

    def __len__(self) -> int:
        return len(self._members)

    def push(self, group: Group) -> None:
        """Put `group` in its place."""
        heapq.heappush(self._heap, (*group.order, group))
        self._members.add(group.serial)

    def head(self) -> Group | None:
        """The group that goes next, left where it is."""
        while self._heap and self._heap[0][1] not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def remove(self, group: Group) -> None:
        """Take `group` out, wherever it stands."""
        self._members.remove(group.serial)
        if self._heap[0][2] is group:
            heapq.heappop(self._heap)
        if len(self._heap) > 2 * len(self._members) + 8:
            self._heap = [entry for entry in self._heap if entry[1] in self._members]
            heapq.heapify(self._heap)


# %% [markdown]
# ## What is known of a row
#
# A step over 256 rows must not cost 256 turns of a Python loop. What the scheduler knows of a running text lies in
# arrays with one entry a row of the block table, so that one operation reads or writes it for the whole batch.
#
# | array | counts |
# |---|---|
# | `known` | tokens that are committed |
# | `expected` | those, and the samples that are in flight |
# | `seq_lens` of the table | tokens whose K/V have a place |
# | `limit` | tokens at which the text ends |
#
# A row may run up to `min(expected, limit - 1)` tokens: the last token of all is sampled and
# never run, so it needs no K/V. `serial` is the row's tenant; it will tell late tokens from timely ones.

# %% tags=["export:row_state"]
"""What is known of the sequence in each row, in arrays that one operation reads for all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paged_kv.prefix_keys import chunk_type

NONE = np.empty(0, np.int64)


class RowState:
    """Tokens, lengths and ends of the sequences that hold rows.

    State, one entry a row of the block table
        tokens     int32 [max_seqs, width]: prompt and output.
        chunks     the same memory, an item a block.   flat: the same, [max_seqs x width].
        known      int64: tokens committed.
        expected   int64: those and the samples in flight.
        limit      int64: tokens at which it ends.
        published  int64: leading blocks whose keys are published.
        serial     int64: number of the tenant, never used again; -1 without one.
        sample_at  int64: place of its newest sample in the plan that takes it.
        stop       int32 [width of the largest set, max_seqs]: stop tokens, padded with -1.
        group, sample  {row: whose it is}.
    Invariant: known <= expected <= known + 2 (two plans in flight) and expected <= limit.
    """

    def __init__(self, max_seqs: int, max_seq_len: int, block_size: int = 1) -> None:
        self.width = -(-(max_seq_len + 1) // block_size) * block_size
        self.tokens = np.zeros((max_seqs, self.width), np.int32)
        self.flat = self.tokens.reshape(-1)
        self.chunks = self.tokens.view(chunk_type(block_size))
        columns = np.zeros((5, max_seqs), np.int64)
        self.known, self.expected, self.limit, self.published, self.sample_at = columns
        self.serial, self.stop = np.full(max_seqs, -1), np.full((1, max_seqs), -1, np.int32)
        self.group, self.sample = dict[int, Group](), dict[int, Sample]()
        self._tenants = 0


# %% tags=["export:row_state"]
class RowState(RowState):  # type: ignore
    def bind(self, row: int, group: Group, sample: Sample, published: int) -> None:
        """Let `sample` of `group` move into `row`, where it has `published` blocks with keys."""
        known = len(sample.tokens)
        self.tokens[row, :known] = sample.tokens
        self.known[row] = self.expected[row] = known
        self.limit[row] = group.request.limit
        self.published[row] = published
        self.serial[row] = self._tenants
        self._tenants += 1
        self.group[row], self.sample[row] = group, sample
        sample.row = row
        stops = () if group.beams else group.request.stop_tokens
        if len(stops) > len(self.stop):
            more = np.full((len(stops) - len(self.stop), self.stop.shape[1]), -1, np.int32)
            self.stop = np.concatenate([self.stop, more])
        self.stop[:, row] = -1
        self.stop[: len(stops), row] = stops

    def unbind(self, row: int) -> None:
        """Let the sample in `row` move out, with its tokens."""
        sample = self.sample.pop(row)
        sample.tokens, sample.row = self.tokens[row, : self.known[row]].copy(), -1
        self.serial[row] = -1
        del self.group[row]


# %% tags=["export:row_state"]
class RowState(RowState):  # type: ignore
    def reach(self, rows: Ints) -> Ints:
        """How many tokens of K/V each row can have now; its very last token needs none."""
        return np.minimum(self.expected[rows], self.limit[rows] - 1)

    def record(
        self,
        rows: Ints,
        ends: Ints,
        tokens: Tokens,
        may_fill: bool = True,
        at_hand: tuple[Ints, Ints, Sequence[Tokens]] | None = None,
    ) -> tuple[Ints, Ints]:
        """Commit one token a row, behind the `ends` that are known.

        Args: `may_fill`, whether one of them could reach its limit with it; `at_hand`, if the
        caller has them, the places in `flat`, `ends + 1` and the stop tokens of these rows.
        Returns: the rows that end, at a stop token and at their limit.
        """
        if at_hand is None:
            at_hand = rows * self.width + ends, ends + 1, [stop[rows] for stop in self.stop]
        places, known, stops = at_hand
        self.flat[places] = tokens
        self.known[rows] = known
        stopped = stops[0] == tokens
        for others in stops[1:]:
            stopped |= others == tokens
        if may_fill:
            full = (known == self.limit[rows]) & ~stopped
            return rows[stopped], rows[full]
        return (rows[stopped], NONE) if np.count_nonzero(stopped) else (NONE, NONE)

    def check(self) -> None:
        """Assert the invariant.  O(max_seqs), for tests."""
        held = self.serial >= 0
        known, expected = self.known[held], self.expected[held]
        assert ((known <= expected) & (expected <= known + 2)).all(), "samples in flight"
        assert (expected <= self.limit[held]).all(), "a sample past the limit"
        assert len(set(self.serial[held].tolist())) == held.sum(), "two tenants of one number"


# %% [markdown]
# A check for stop tokens is one comparison for the batch, and so is the check for the limit. With two rows,
# by hand:

# %%
state = RowState(max_seqs=4, max_seq_len=8)
for row, name in enumerate("AB"):
    request = Request([5, 6, 7][: 2 + row], 2, request_id=name, stop_tokens=(9,))
    group = Group(name, request, row, 0.0)
    state.bind(row, group, group.samples[0], published=0)
rows, ends = np.array([0, 1]), np.array([2, 3])
print("may run", state.reach(rows), "tokens")
print("A says 9, B says 4: stopped, full =", state.record(rows, ends, np.array([9, 4], np.int32)))
print("B says 8: stopped, full =", state.record(rows[1:], ends[1:] + 1, np.array([8], np.int32)))

# %% [markdown]
# ## Moving in, moving out
#
# `Residents` keeps rows, blocks and tenants in step, and a journal for
# the device, which has its own copy of the block table: which rows have a new tenant, which are closed, which
# entries differ. Sending only those keeps the upload small.

# %% tags=["export:residents"]
"""The groups that hold rows: how they move in, grow, branch, and move out."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_kv.block_manager import BlockManager
from paged_kv.block_tables import BlockTables, extend_by_one
from paged_kv.copy_on_write import fork, guarded_tails, make_writable, rewind, rewire
from paged_kv.prefix_cache import PrefixCache, admit_cached, give_back
from paged_kv.prefix_keys import Node

NEVER = 2**40  # so many blocks count as published that no more will be


@dataclass(frozen=True)
class Saved:
    """What one sample of a suspended group had in the cache and can come back with.

    `ids` are the blocks of its first `num_tokens` tokens, first to last.
    """

    index: int
    num_tokens: int
    ids: list[int]


@dataclass(frozen=True)
class News:
    """What the device has to be told: changed entries of tables, new tenants, closed rows."""

    table_updates: tuple[Ints, Ints, NDArray[np.int32]]
    opened: tuple[tuple[int, Hashable, int], ...]
    closed: tuple[int, ...]


# %% tags=["export:residents"]
class Residents:
    """Rows of the block table and their tenants, kept in step.

    State
        rows      RowState, one entry a row.
        running   int64 [n]: the rows with a tenant, in the order in which they moved in.
        above     {row: the node of its last published block, or its root}.
        branching {serial: group}: those with samples that have no row yet.
        reserved  rows that the running groups have or will need.
        opened, closed, whole, cells   what the next plan has to tell the device; and `grown`,
                  whether rows that run one token have taken blocks, which it sees for itself.
        departures  how many tenants have left so far.
        flat_table, flat_chunks  the block table and `rows.chunks`, the same memory in a row.
        ramp, ones, none  int64, longer than any batch, constant: 0, 1, 2, ...; all 1; all -1.
    Invariant: a row of the table is open iff it has a tenant.
    """

    def __init__(self, manager: BlockManager, cache: PrefixCache | None) -> None:
        self.manager, self.cache = manager, cache
        max_seqs = len(manager.tables.table)
        self.rows = RowState(max_seqs, manager.tables.max_seq_len, manager.block_size)
        self.running = NONE
        self.above: dict[int, Node | bytes] = {}
        self.generation = 0 if cache is None else cache.generation
        self.branching: dict[int, Group] = {}
        self.reserved = self.departures = 0
        self.opened: dict[int, None] = {}
        self.closed: dict[int, None] = {}
        self.whole: dict[int, None] = {}
        self.cells: list[tuple[Ints, Ints]] = []
        self.grown = False
        self.flat_table = manager.tables.table.reshape(-1)
        self.flat_chunks = self.rows.chunks.reshape(-1)
        self.ramp = np.arange(max(max_seqs, manager.block_size) + 1)
        self.ones, self.none = np.ones_like(self.ramp), np.full_like(self.ramp, -1)
        for constant in (self.ramp, self.ones, self.none):
            constant.flags.writeable = False


# %% tags=["export:residents"]
class Residents(Residents):  # type: ignore
    def seat(self, row: int, group: Group, sample: Sample, published: int = 0) -> None:
        """Give the open `row` its tenant; its first `published` blocks are known by their keys."""
        self.above[row] = group.root
        if self.cache is not None and group.generation != self.cache.generation:
            published = NEVER
        elif published and self.cache is not None:
            node = self.cache.names.named[self.manager.tables.table.item(row, published - 1)]
            self.above[row] = group.root if node is None else node
            published = NEVER if node is None else published
        self.rows.bind(row, group, sample, published)
        self.running = np.append(self.running, row)
        self.opened[row] = self.whole[row] = None

    def vacate(self, samples: Sequence[Sample]) -> None:
        """Close the rows of `samples`, which keep their tokens; blocks go back tails first."""
        for sample in samples:
            if (row := sample.row) >= 0:
                self.rows.unbind(row)
                give_back(self.manager, row)
                del self.above[row]
                self.departures += 1
                if row in self.opened:
                    del self.opened[row]
                else:
                    self.closed[row] = None
                self.whole.pop(row, None)
        self.running = self.running[self.rows.serial[self.running] >= 0]
        self.reserved -= len(samples)

    def check(self) -> None:
        """Assert that open rows and tenants agree, and the invariants of both.  For tests."""
        self.manager.check()
        self.rows.check()
        open_rows = (self.manager.tables.seq_lens >= 0).nonzero()[0].tolist()
        assert sorted(self.running.tolist()) == open_rows, "an open row without a tenant"
        assert (self.rows.serial[self.running] >= 0).all(), "a tenant without a number"
        assert sorted(self.above) == open_rows, "a row whose next block has nothing to stand behind"
        lens = self.manager.tables.seq_lens[self.running]
        assert (lens <= self.rows.reach(self.running)).all(), "K/V of a token not known of"


# %% [markdown]
# Rows grow as chapters 3, 6 and 8 say: copies first, then blocks for the whole batch or for none, and
# the prefix cache hears of every block whose bytes are about to change.

# %% tags=["export:residents"]
class Residents(Residents):  # type: ignore
    def move_in(self, group: Group, num_tokens: int) -> int:
        """Open a row for the first live sample, with hits and `num_tokens` tokens beyond them.

        Returns: the row.  Raises OutOfBlocks, with nothing changed.
        """
        manager, (sample, *others) = self.manager, group.live()
        keep_up(self)
        group.generation = self.generation
        if self.cache is None:
            row, hit = manager.add(num_tokens), 0
        else:
            row, hit = admit_cached(manager, self.cache, sample.tokens, group.root, num_tokens)
        group.hit_tokens += hit
        if others:
            self.branching[group.serial] = group
        self.reserved += 1 + len(others)
        self.seat(row, group, sample, hit // manager.block_size)
        publish(self, np.array([row]), manager.tables.seq_lens[[row]])
        return row

    def reserve(self, rows: Ints, counts: Ints | int) -> list[tuple[int, int]]:
        """Room for `counts` tokens more in each of `rows`.  Returns the copies to make first.

        Raises OutOfBlocks, with nothing changed.  Keeps the cache informed.
        """
        tables, copies, fresh = self.manager.tables, list[tuple[int, int]](), list[int]()
        if tables.guarded:
            writers, index, _ = guarded_tails(self.manager, rows, counts)
            copies = make_writable(self.manager, rows, counts)
            self.cells.append((writers, index))
            fresh = tables.table[writers, index].tolist()
        taken = self.manager.append(rows, counts)
        self.grown |= bool(taken) and isinstance(counts, int)
        if taken and not isinstance(counts, int):
            self.cells.append(new_cells(tables, rows, counts))
        if self.cache is not None and (taken or fresh):
            self.cache.forget(taken + fresh)
        return copies


# %% tags=["export:residents"]
def new_cells(tables: BlockTables, rows: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """Row and column of each block that `rows` took to hold their last `counts` tokens."""
    ends, size = tables.seq_lens[rows].astype(np.int64), tables.block_size
    first = -(-(ends - counts) // size)
    more = -(-ends // size) - first
    place = np.arange(more.sum()) - np.repeat(more.cumsum() - more, more)
    return np.repeat(rows, more), np.repeat(first, more) + place


# %% tags=["export:turns"]
"""Rows that decode together, and reach the end of a block together."""

from typing import NamedTuple


class Turn(NamedTuple):
    """Rows of a batch that are at the same place in their block.

    Fields: their `places` in the batch; `rows`, and `named`, the same as a list; `cells` and
    `chunks`, where these rows begin in the flat views of the table and of `RowState.chunks`.
    """

    places: Ints
    rows: Ints
    named: list[int]
    cells: Ints
    chunks: Ints


def advance(home: Residents, rows: Ints, ends: Ints, turn: Turn) -> None:
    """`Residents.reserve` of one token for each of `rows`, of which nothing has to be found out.

    Args: `ends`, their lengths then; `turn`, those of them that begin a block.
    Raises OutOfBlocks, with nothing changed.
    """
    tables, begin = home.manager.tables, turn.rows
    if len(begin):
        taken = home.manager.pool.take(len(begin))
        held = tables.num_blocks[begin]
        home.cells.append((begin, held.astype(np.int64)))
        extend_by_one(tables, begin, held, np.array(taken, np.int32))
        if home.cache is not None:
            home.cache.names.take_away(taken)
    tables.seq_lens[rows] = ends.astype(np.int32)


# %% [markdown]
# Publishing follows the contract of chapter 8: a prompt's full blocks get their keys when they are scheduled, blocks
# of generated tokens when the last of these is committed.

# %% tags=["export:residents"]
def keep_up(home: Residents) -> None:
    """After a reset of the cache: what the rows hold from before is never to be found."""
    if home.cache is not None and home.cache.generation != home.generation:
        home.rows.published[home.running] = NEVER
        home.generation = home.cache.generation


def publish(home: Residents, rows: Ints, ends: NDArray[np.integer[Any]]) -> None:
    """Make the full blocks of the first `ends` tokens findable, where `rows` have new ones."""
    cache, state, size = home.cache, home.rows, home.manager.block_size
    if cache is None:
        return
    keep_up(home)
    full = ends // size
    due = (full > state.published[rows]).nonzero()[0]
    if not len(due):
        return
    rows, full = rows[due], full[due]
    place, named = full - 1, rows.tolist()
    blocks = home.manager.tables.table[rows, place]
    if len(set(blocks.tolist())) < len(named) or (state.published[rows] != place).any():
        for row, end in zip(named, full.tolist(), strict=True):
            publish_row(home, cache, row, end)
        return
    publish_one_each(home, cache, named, state.chunks[rows, place].tolist(), blocks)
    state.published[rows] = full


# %% tags=["export:turns"]
def publish_turn(home: Residents, turn: Turn, ends: Ints) -> None:
    """`publish` where it is known whose last block is full: `turn`, of a batch with `ends`."""
    cache, state, size = home.cache, home.rows, home.manager.block_size
    if cache is None or not turn.named:
        return
    rows, last, place = turn.rows, ends[turn.places], state.published[turn.rows]
    one_each = [(done + 1) * size for done in place.tolist()] == last.tolist()
    if not one_each or cache.generation != home.generation:
        publish(home, rows, last)
        return
    blocks = home.flat_table[turn.cells + place]  # all different, since each row wrote its own (I3)
    chunks = home.flat_chunks[turn.chunks + place].tolist()
    publish_one_each(home, cache, turn.named, chunks, blocks)
    state.published[rows] = place + home.ones[: len(chunks)]


# %% tags=["export:residents"]
def publish_one_each(
    home: Residents,
    cache: PrefixCache,
    named: list[int],
    chunks: list[bytes],
    blocks: NDArray[np.int32],
) -> None:
    """Name `blocks`, each the next one of its row, by their tokens."""
    nodes = cache.names.add(map(home.above.__getitem__, named), chunks, blocks)
    home.above.update(zip(named, nodes, strict=True))


def publish_row(home: Residents, cache: PrefixCache, row: int, end: int) -> None:
    """Publish the blocks of `row` from the first that is not up to the `end`th."""
    state, size, before = home.rows, home.manager.block_size, home.rows.published.item(row)
    ids = home.manager.tables.table[row, before:end]
    tokens = state.tokens[row, before * size : end * size]
    home.above[row] = cache.publish_behind(home.above[row], tokens, ids)
    state.published[row] = end


# %% [markdown]
# Branching is one rule for both cases: a sample forks once its parent has scheduled `at` tokens, and rewinds to
# them if the parent is further on.

# %% tags=["export:residents"]
def branch(home: Residents) -> list[tuple[int, int]]:
    """Fork the samples whose parent has come as far as their common text.

    Returns: (row of the parent, row of the child) where the child needs a sample drawn
    from the parent's logits; the others have tokens of their own to run.
    """
    tables, first = home.manager.tables, list[tuple[int, int]]()
    for group in list(home.branching.values()):
        for sample in group.live():
            row = group.samples[sample.parent].row
            if sample.row >= 0 or row < 0 or tables.seq_lens[row] < sample.at:
                continue
            child = fork(home.manager, row)
            rewind(home.manager, child, int(tables.seq_lens[row]) - sample.at)
            if sample.at == len(sample.tokens):
                first.append((row, child))
            shared = sample.at // home.manager.block_size
            home.seat(child, group, sample, min(shared, home.rows.published.item(row)))
        if all(sample.row >= 0 for sample in group.live()):
            del home.branching[group.serial]
    return first


def rewire_beams(home: Residents, rows: Ints, parents: Ints) -> None:
    """Let the beam in each of `rows` become what that in `parents` was, text and blocks."""
    rewire(home.manager, rows, parents)
    state = home.rows
    state.tokens[rows] = state.tokens[parents]
    state.published[rows] = state.published[parents]
    above = [home.above[row] for row in parents.tolist()]
    home.above.update(zip(rows.tolist(), above, strict=True))
    home.whole.update(dict.fromkeys(rows[rows != parents].tolist()))


# %% tags=["export:residents"]
def take_news(home: Residents) -> News:
    """What the device does not know yet, for the next plan; from now on it does."""
    table, counts = home.manager.tables.table, home.manager.tables.num_blocks
    if len(home.cells) == 1 and not (home.whole or home.opened or home.closed):
        (rows, columns), home.cells, home.grown = home.cells[0], [], False
        return News((rows, columns.astype(np.int64, copy=False), table[rows, columns]), (), ())
    cells = home.cells + [(np.full(counts[r], r), np.arange(counts[r])) for r in home.whole]
    if len(cells) == 1:
        rows, columns = cells[0]
    else:
        rows = np.concatenate([NONE, *(cell[0] for cell in cells)])
        columns = np.concatenate([NONE, *(cell[1] for cell in cells)])
    tenants = [(row, home.rows.group[row], home.rows.sample[row]) for row in home.opened]
    opened = tuple((row, group.id, sample.index) for row, group, sample in tenants)
    news = News((rows, columns, table[rows, columns]), opened, tuple(home.closed))
    home.cells, home.grown, home.whole, home.opened, home.closed = [], False, {}, {}, {}
    return news


# %% [markdown]
# ## The plan
#
# The scheduler's product is a `StepPlan`: exactly what the device needs for one step, and nothing else. It runs without
# asking back, which lets the same scheduler drive a real model, a toy model in the tests and, in a lab, a clock.

# %% tags=["export:step_plan"]
"""What the device is to do in one step: everything it needs, and nothing else."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Host:
    """A block of host memory, by its index there."""

    index: int


Move: TypeAlias = tuple[int | Host, int | Host]


# %% tags=["export:step_plan"]
@dataclass(frozen=True, eq=False)
class StepPlan:
    """One step, decided.  n sequences run T tokens; S tokens are sampled.  All Ints are int64.

    First the news are taken in, then the moves are made one by one, then K/V are written.
    Fields
        step           number of the plan.
        rows           [n];  new_tokens [n], tokens that each runs.
        seq_lens       [n]: tokens in the cache once this step has written its own.
        cu_seqlens     [n + 1]: sequence i owns tokens cu[i] to cu[i + 1] - 1.
        token_ids      int32 [T]: -1 where the previous plan samples it; see `token_source`.
        token_source   [n]: which sample of the previous plan is the last token, else -1.
        positions      [T];  slot_mapping [T]: where the K/V go.
        sample_rows    [S]: the row that each sample belongs to.
        sample_logits  [S]: the sequence, 0 to n - 1, whose logits it is drawn from.
        sample_serials [S]: the tenants of these rows; who moved out gets no token.
        beams          for each beam group its id, and its samples in the order of its beams.
        moves          (source, destination) blocks.
        news           `closed` rows; `opened`, (row, request id, sample index) of new tenants;
                       `table_updates`, (rows, columns, ids): in this order.
    """

    step: int
    rows: Ints
    new_tokens: Ints
    seq_lens: Ints
    cu_seqlens: Ints
    token_ids: NDArray[np.int32]
    token_source: Ints
    positions: Ints
    slot_mapping: Ints
    sample_rows: Ints
    sample_logits: Ints
    sample_serials: Ints
    beams: tuple[tuple[Hashable, Ints], ...]
    moves: tuple[Move, ...]
    news: News


# %% tags=["export:step_plan"]
class StepPlan(StepPlan):  # type: ignore
    @property
    def num_tokens(self) -> int:
        """Tokens that the step runs."""
        return len(self.token_ids)

    @property
    def samples(self) -> Ints:
        """int64 [n]: tokens sampled behind each sequence's last one, 0 in mid-prefill."""
        return np.bincount(self.sample_logits, minlength=len(self.rows))


# %% [markdown]
# Decodes and chunks are packed alike, row after row without padding.

# %% tags=["export:step_plan"]
def pack_rows(
    home: Residents, rows: Ints, counts: Ints | int, ends: Ints
) -> tuple[Ints, Ints, Ints, Ints]:
    """The tokens that `rows` run, `counts` each, up to `ends`.

    Returns: new_tokens and cu_seqlens, one a row; row and position, one a token.
    """
    if isinstance(counts, int):
        assert counts == 1
        return home.ones[: len(rows)], home.ramp[: len(rows) + 1], rows, ends - 1
    cu = np.zeros(len(rows) + 1, np.int64)
    counts.cumsum(out=cu[1:])
    positions = np.arange(cu[-1]) + np.repeat(ends - cu[1:], counts)
    return counts, cu, np.repeat(rows, counts), positions


def slots_of(home: Residents, owner: Ints, positions: Ints) -> Ints:
    """As `slot_mapping`, for tokens that all have a row and a block.

    Where rows that run one token have grown, it tells `home` which cells of the table that are.
    """
    table, size = home.manager.tables.table, home.manager.block_size
    index = positions // size
    if home.grown:
        at = (index * size == positions).nonzero()[0]
        home.cells.append((owner[at], index[at]))
    blocks: Ints = table.reshape(-1)[owner * table.shape[1] + index].astype(np.int64)
    return (blocks - index) * size + positions


# %% tags=["export:step_plan"]
def draw_samples(
    rows: Ints, sampling: NDArray[np.bool_], children: Sequence[tuple[int, int]]
) -> tuple[Ints, Ints]:
    """The row that each sample goes to, and the sequence whose logits it is drawn from.

    Args: `children`, (parent row, row) of those that draw from their parent's logits.
    """
    logits = sampling.nonzero()[0]
    if not children:
        return rows[logits], logits
    of: dict[int, list[int]] = {}
    for parent, child in children:
        of.setdefault(parent, []).append(child)
    drawn = [(to, i) for i in logits.tolist() for to in (int(rows[i]), *of.get(int(rows[i]), ()))]
    both = np.array(drawn, np.int64)
    return both[:, 0], both[:, 1]


def beam_places(
    beams: Mapping[int, Group], sample_rows: Ints
) -> tuple[tuple[Hashable, Ints], ...]:
    """For each beam group that samples in this step: its id, and where its samples stand."""
    place = {row: i for i, row in enumerate(sample_rows.tolist())} if beams else {}
    found = []
    for group in beams.values():
        places = [place.get(sample.row, -1) for sample in group.live()]
        if places[0] >= 0:
            assert min(places) >= 0, f"{group}: some beams are sampled, some are not"
            found.append((group.id, np.array(places)))
    return tuple(found)


# %% tags=["export:step_plan"]
def build_plan(
    home: Residents,
    batch: tuple[Ints, Ints | int],
    children: list[tuple[int, int]],
    beams: Mapping[int, Group],
    step: int,
    moves: Sequence[Move],
    lagging: bool,
) -> StepPlan:
    """The plan of a `batch` of rows and tokens each, which have their blocks already.

    Args: `children`, see `draw_samples`; `beams`, the running beam groups; `lagging`, whether
    a plan is in flight.  Changes `expected` and `sample_at`, and empties the journal of `home`.
    """
    state, (rows, counts) = home.rows, batch
    ends, source = home.manager.tables.seq_lens[rows].astype(np.int64), home.none[: len(rows)]
    new_tokens, cu, owner, positions = pack_rows(home, rows, counts, ends)
    token_ids = state.flat[owner * state.width + positions]
    if lagging:
        awaited = state.expected[rows] > state.known[rows]
        source = np.where(awaited, state.sample_at[rows], -1)
        token_ids[cu[1:][awaited] - 1] = -1
    sample_rows, logits = rows, home.ramp[: len(rows)]
    if beams or children or not isinstance(counts, int):
        sample_rows, logits = draw_samples(rows, ends == state.expected[rows], children)
    state.expected[sample_rows] = ends[logits] + 1
    state.sample_at[sample_rows] = home.ramp[: len(sample_rows)]
    slots, places = slots_of(home, owner, positions), beam_places(beams, sample_rows)
    sampling = (sample_rows, logits, state.serial[sample_rows], places)
    tokens = (token_ids, source, positions, slots)
    return StepPlan(
        step, rows, new_tokens, ends, cu, *tokens, *sampling, tuple(moves), take_news(home)
    )


# %% [markdown]
# Most steps of a busy server are dull: the same rows as before, a token more each. Then the new plan is the
# last one with a few numbers raised by one. Which rows are at the end of a block comes round every $B$ steps, so
# a batch that repeats is sorted once by offset, its *cadence*, and no step has to search. A test compares the
# two ways field by field.

# %% tags=["export:step_plan"]
class Cadence:
    """What comes round every block_size steps while the same rows run one token each.

    State
        step    number of the plan that it was made from.
        turns   block_size Turns: the rows in whose last block so many tokens stood then, a full
                block counting as none.
        starts  [n]: where each row begins in `RowState.flat`.
        stops   their stop tokens, [n] each.
    """

    def __init__(self, home: Residents, plan: StepPlan) -> None:
        self.step, size, state = plan.step, home.manager.block_size, home.rows
        offset = plan.seq_lens % size
        order = offset.argsort(kind="stable")
        edges = np.searchsorted(offset[order], home.ramp[: size + 1]).tolist()
        rows = plan.rows[order]
        cells, chunks = (rows * m.shape[1] for m in (home.manager.tables.table, state.chunks))
        named, spans = rows.tolist(), [slice(at, end) for at, end in pairwise(edges)]
        self.turns = [Turn(order[s], rows[s], named[s], cells[s], chunks[s]) for s in spans]
        self.starts = plan.rows * state.width
        self.stops = [stop[plan.rows] for stop in state.stop]

    def full(self, step: int) -> Turn:
        """Those whose last block is full after the plan of this number."""
        return self.turns[(self.step - step) % len(self.turns)]


# %% tags=["export:step_plan"]
def next_plan(
    home: Residents,
    last: StepPlan,
    ends: Ints,
    begin: Ints,
    moves: Sequence[Move],
    tokens: Tokens | None,
) -> StepPlan:
    """The plan behind `last` where nobody came or went: every row runs one token more.

    It equals `build_plan` in a fraction of the time, since most fields are those of `last`.
    Args: `ends`, the lengths then; `begin`, the places in the batch of those that begin a
    block; `tokens`, what `last` has sampled, or None while it is in flight.
    """
    count, news = len(ends), take_news(home)
    slots, source = last.slot_mapping + home.ones[:count], home.none[:count]
    if len(begin):
        slots[begin] = news.table_updates[2] * np.int64(home.manager.block_size)
    if tokens is None:
        tokens, source = source.astype(np.int32), home.ramp[:count]
    plan = object.__new__(StepPlan)
    vars(plan).update(  # plans are frozen, so they can share fields
        vars(last), step=last.step + 1, seq_lens=ends, token_ids=tokens, token_source=source,
        positions=last.seq_lens, slot_mapping=slots, moves=tuple(moves), news=news,
    )  # fmt: skip
    return plan


# %% [markdown]
# ## From submission to the end
#
# The ledger knows every request that has not ended, and moves groups between states.
#
# > **I5.** waiting + running + swapped + finished = submitted, always.
#
# A *relief* is whatever happens when a running group needs a block and there is none. The simplest takes the last in
# order and forgets its K/V; the tokens stay, so that it can start again. Chapter 10 writes a better one, which may
# move blocks to host memory; hence `suspend` and `resume`, which nothing here calls.

# %% tags=["export:ledger"]
"""Every request from its submission to its end, and what a relief may do with those that run."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Protocol

import numpy as np


class Relief(Protocol):
    """What happens when a running group needs a block and there is none."""

    def victim(self, ledger: Ledger, candidates: Sequence[Group]) -> Group:
        """Choose one of `candidates`, which come in (priority, arrival) order."""

    def evict(self, ledger: Ledger, group: Group) -> list[Move]:
        """Have `group` give up its blocks: by `ledger.release` or `ledger.suspend`."""

    def restore(self, ledger: Ledger, group: Group) -> list[Move] | None:
        """Bring a suspended `group` back, or None, with nothing changed, if it must wait."""

    def drop(self, ledger: Ledger, group: Group) -> None:
        """Forget what was kept of a suspended `group`."""


# %% tags=["export:ledger"]
class Recompute:
    """The simplest relief: the last in order gives everything up and starts again."""

    def victim(self, ledger: Ledger, candidates: Sequence[Group]) -> Group:
        """The last of `candidates`."""
        return candidates[-1]

    def evict(self, ledger: Ledger, group: Group) -> list[Move]:
        """Release it; no byte is moved."""
        ledger.release(group)
        return []

    def restore(self, ledger: Ledger, group: Group) -> list[Move] | None:
        """Never asked for, since it suspends nobody."""
        return None

    def drop(self, ledger: Ledger, group: Group) -> None:
        """Nothing is kept."""


# %% tags=["export:ledger"]
class Ledger:
    """Who waits, runs, is swapped, has finished.

    State
        home      Residents: the groups that hold rows.
        queue     those that do not: waiting and swapped.
        groups    {id: group}, all that have not ended.
        beams     {serial: group}, the running beam groups.
        untimed   {serial: group}, those that run and have no token yet.
        counts    requests in each state.
        outputs   those that ended and were not reported yet.
        moves, moved  block moves for the next plan, and the groups that it suspends or restores.
    Invariant I5: waiting + running + swapped + finished == submitted.
    """

    def __init__(self, home: Residents, relief: Relief, clock: Callable[[], float]) -> None:
        self.home, self.relief, self.now = home, relief, clock
        self.manager, self.cache, self.rows = home.manager, home.cache, home.rows
        self.queue = WaitingQueue()
        self.groups: dict[Hashable, Group] = {}
        self.beams: dict[int, Group] = {}
        self.untimed: dict[int, Group] = {}
        self.outputs: list[Output] = []
        self.moves: list[Move] = []
        self.moved: list[Group] = []
        self.counts: dict[State, int] = dict.fromkeys(STATES, 0)
        self.submitted = 0

    def enter(self, group: Group) -> None:
        """Take in a new group, to wait for its turn."""
        self.groups[group.id] = group
        self.submitted += 1
        self.counts["waiting"] += 1
        self.queue.push(group)


STATES: tuple[State, ...] = ("waiting", "running", "swapped", "finished")


# %% tags=["export:ledger"]
class Ledger(Ledger):  # type: ignore
    def turn(self, group: Group, state: State) -> None:
        """Note that `group` is now in `state`."""
        self.counts[group.state] -= 1
        self.counts[state] += 1
        group.state = state
        self.beams.pop(group.serial, None)
        if state == "running" and group.beams:
            self.beams[group.serial] = group
        if state == "running" and group.first_token_at is None:
            self.untimed[group.serial] = group

    def end_rows(self, rows: Ints, reason: str, now: float) -> None:
        """The samples in `rows` end; groups without another end with them."""
        tenants = [(self.rows.group[row], self.rows.sample[row]) for row in rows.tolist()]
        for _, sample in tenants:
            sample.finish_reason = reason
        self.home.vacate([sample for _, sample in tenants])
        for group in dict.fromkeys(group for group, _ in tenants):
            if not group.live():
                close(self, group, now)

    def end(self, group: Group, reason: str, now: float) -> None:
        """End `group`, whatever its state: blocks, rows and what a relief keeps are given up."""
        if group.state != "running":
            self.queue.remove(group)
        if group.state == "swapped":
            self.relief.drop(self, group)
        living = group.live()
        for sample in living:
            sample.finish_reason = reason
        if group.state == "running":
            self.home.vacate(living)
            self.home.branching.pop(group.serial, None)
        close(self, group, now)


# %% tags=["export:ledger"]
def close(ledger: Ledger, group: Group, now: float) -> None:
    """Forget `group`, all of whose samples have ended, and make its Output."""
    ledger.turn(group, "finished")
    ledger.untimed.pop(group.serial, None)
    del ledger.groups[group.id]
    start = len(group.request.tokens)
    done = tuple(
        Completion(sample.index, sample.tokens[start:].tolist(), str(sample.finish_reason))
        for sample in group.samples
    )
    times = group.arrival, group.first_token_at, now
    ledger.outputs.append(Output(group.id, done, *times, group.hit_tokens, group.preemptions))


def note_first(ledger: Ledger, now: float) -> None:
    """Give the groups whose first token has come its time."""
    for group in list(ledger.untimed.values()):
        row = group.samples[0].row
        if row >= 0 and ledger.rows.known[row] > len(group.request.tokens):
            group.first_token_at = now
            del ledger.untimed[group.serial]


def leave(ledger: Ledger, group: Group, state: State) -> None:
    """Have a running `group` give up rows and blocks, keep its tokens and queue in its old place.

    Samples of it that are in flight will be dropped, since its rows lose their tenant.
    """
    ledger.home.vacate(group.live())
    ledger.home.branching.pop(group.serial, None)
    group.preemptions += 1
    ledger.turn(group, state)
    ledger.queue.push(group)


# %% [markdown]
# The rest is for reliefs: ways to put a group out and back, and what that costs. A group frees the blocks that nobody else
# holds, which may be fewer than it has.

# %% tags=["export:ledger"]
class Ledger(Ledger):  # type: ignore
    def running_groups(self) -> list[Group]:
        """The groups that hold rows, in (priority, arrival) order."""
        found = {self.rows.group[row] for row in self.home.running.tolist()}
        return sorted(found, key=lambda group: group.order)

    def rows_of(self, group: Group) -> list[int]:
        """The rows of its live samples, in their order; those yet to branch have none."""
        return [sample.row for sample in group.live() if sample.row >= 0]

    def tokens_of(self, sample: Sample) -> Tokens:
        """Its prompt and the output committed so far."""
        if sample.row < 0:
            return sample.tokens
        return self.rows.tokens[sample.row, : self.rows.known[sample.row]]

    def release(self, group: Group) -> None:
        """Let a running group wait again, in its old place: tokens stay, blocks do not."""
        leave(self, group, "waiting")

    def suspend(self, group: Group) -> list[Saved]:
        """As `release`, but its K/V are to come back; returns what is worth keeping."""
        saved = worth_keeping(self, group)
        leave(self, group, "swapped")
        return saved

    def resume(self, group: Group, rows: Mapping[int, int]) -> None:
        """Seat a suspended group again: {sample index: row} for each that was saved."""
        seat_again(self, group, rows)

    def blocks_freed_by(self, group: Group) -> int:
        """Blocks that nobody else holds."""
        return blocks_freed(self.manager, self.rows_of(group))

    def tokens_to_replay(self, group: Group, after_hits: bool = True) -> int:
        """Tokens to run again if it were released; see `replay_tokens`."""
        return replay_tokens(self, group, after_hits)


# %% tags=["export:ledger"]
def worth_keeping(ledger: Ledger, group: Group) -> list[Saved]:
    """What a running group can come back with, without its newest token.

    That one has to run again, since the sample in flight behind it is dropped.  The blocks will be
    free, and their bytes intact until later moves and writes of the coming plan.
    """
    saved, tables = [], ledger.manager.tables
    for sample in group.live():
        if (row := sample.row) >= 0:
            keep = int(min(tables.seq_lens[row], ledger.rows.known[row] - 1))
            blocks = tables.table[row, : -(-keep // tables.block_size)]
            saved.append(Saved(sample.index, keep, blocks.tolist()))
    return saved


def seat_again(ledger: Ledger, group: Group, rows: Mapping[int, int]) -> None:
    """Let a suspended group run: {sample index: row}, open, with blocks and lengths.

    Nothing in these rows counts as published; samples that had no row wait to branch, as before.
    """
    for index, row in rows.items():
        ledger.home.seat(row, group, group.samples[index])
    living = group.live()
    ledger.home.reserved += len(living)
    if any(sample.row < 0 for sample in living):
        ledger.home.branching[group.serial] = group
    ledger.turn(group, "running")


# %% tags=["export:ledger"]
def blocks_freed(manager: BlockManager, rows: list[int]) -> int:
    """Blocks that come free if all of `rows` are closed: those that no other row holds."""
    width = int(manager.tables.num_blocks[rows].max(initial=0))
    ids = manager.tables.table[rows, :width]
    ids, times = np.unique(ids[ids >= 0], return_counts=True)
    return int((manager.pool.ref_count[ids] == times).sum())


def replay_tokens(ledger: Ledger, group: Group, after_hits: bool) -> int:
    """Tokens that `group` would run again after a release: the prompt once, each output.

    `after_hits`: without the leading blocks that can be found again, unless they are taken.
    """
    rows = ledger.rows_of(group)
    prompt, known = len(group.request.tokens), ledger.rows.known[rows]
    tokens = prompt + int((known - prompt).sum())
    if after_hits and ledger.cache is not None:
        size = ledger.manager.block_size
        found = np.minimum(ledger.rows.published[rows], (known - 1) // size)
        tokens = min(tokens, int((known - found * size).sum()))
    return tokens


def is_ending(ledger: Ledger, group: Group) -> bool:
    """Whether the last sample of all its texts is in flight."""
    rows = ledger.rows_of(group)
    done = (ledger.rows.expected[rows] == ledger.rows.limit[rows]).all()
    return bool(done) and group.serial not in ledger.home.branching


# %% tags=["export:ledger"]
def check_ledger(ledger: Ledger) -> None:
    """Assert I5 and that each group is where its state says.  For tests."""
    home, counts = ledger.home, ledger.counts
    home.check()
    assert sum(counts.values()) == ledger.submitted, f"I5: {counts}, {ledger.submitted} submitted"
    states = [group.state for group in ledger.groups.values()]
    for state in STATES[:3]:
        assert states.count(state) == counts[state], f"{state}: {counts}"
    assert len(ledger.queue) == counts["waiting"] + counts["swapped"], "the queue"
    running = {group for group in ledger.groups.values() if group.state == "running"}
    assert set(ledger.running_groups()) == running, "a running group without a row"
    living = sum(len(group.live()) for group in running)
    assert living == home.reserved, f"{home.reserved} rows reserved, {living} needed"


# %% [markdown]
# ## Who may run
#
# The budget goes to the decodes first; there is enough for them, since `max_running` is no more than
# `token_budget`. What is left goes to the prefills, in order. Beams need two exceptions: they cannot run ahead of a
# commit, which alone knows who is whose child, and in a replay they wait for one another so as to be sampled together.

# %% tags=["export:admission"]
"""Who may run: the token budget among those who do, and the door for those who wait."""

from __future__ import annotations

from itertools import count

import numpy as np

from paged_kv.block_pool import OutOfBlocks


def share_budget(
    ledger: Ledger, rows: Ints, budget: int, steady: bool = False
) -> tuple[Ints, Ints | int, int]:
    """How many tokens each of `rows` runs: decodes first, then prefills in order.

    `steady`: it is known that each runs one.
    Returns: the rows that run, tokens each (1 if that is all), the budget left.
    """
    if steady:
        return rows, 1, budget - len(rows)
    state = ledger.rows
    want = state.reach(rows) - ledger.manager.tables.seq_lens[rows]
    if ledger.beams:
        want = hold_beams(ledger, rows, want)
    if want.max(initial=1) <= 1:
        rows = rows if (want == 1).all() else rows[want == 1]
        return rows, 1, budget - len(rows)
    counts = (want == 1).astype(np.int64)
    budget -= int(counts.sum())
    longer = (want > 1).nonzero()[0].tolist()
    for i in sorted(longer, key=lambda i: state.group[int(rows[i])].order):
        counts[i] = min(int(want[i]), budget)
        budget -= int(counts[i])
    return rows[counts > 0], counts[counts > 0], budget


# %% tags=["export:admission"]
def hold_beams(ledger: Ledger, rows: Ints, want: Ints) -> Ints:
    """Beams wait for their last commit, and in a replay for one another before they sample."""
    wants, state = dict(zip(rows.tolist(), want.tolist(), strict=True)), ledger.rows
    for group in ledger.beams.values():
        mine = [row for row in ledger.rows_of(group) if row in wants]
        if (state.expected[mine] > state.known[mine]).any():
            wants |= dict.fromkeys(mine, 0)
        elif group.serial in ledger.home.branching or any(wants[row] > 1 for row in mine):
            spare = group.first_token_at is not None
            wants |= {row: max(0, wants[row] - spare) for row in mine}
    return np.array(list(wants.values()), np.int64)


# %% [markdown]
# The door has two sides. At submission a request is refused that could never run, with an error that says how many
# blocks it needs and how many exist. Later the head of the queue comes in when rows, blocks and budget allow.

# %% tags=["export:admission"]
class Admission:
    """The door: what is refused at once, and who comes in when.

    State
        token_budget, max_running, chunked   the limits, as the scheduler got them.
        refused  serial of the group that had no room last, and the blocks that were free then.
    """

    def __init__(self, ledger: Ledger, token_budget: int, max_running: int, chunked: bool) -> None:
        self.ledger, self.home = ledger, ledger.home
        self.token_budget, self.max_running, self.chunked = token_budget, max_running, chunked
        self.refused = (-1, 0)

    def submit(self, request: Request) -> Group:
        """Check that `request` can be served at all, and let it wait.

        Raises, with nothing changed: NeverFits; ValueError, naming the field.
        """
        ledger, length = self.ledger, len(request.tokens)
        free = (number for number in count(ledger.submitted) if number not in ledger.groups)
        name = next(free) if request.request_id is None else request.request_id
        longest = ledger.manager.tables.max_seq_len
        if name in ledger.groups:
            raise ValueError(f"request_id = {name!r}: still in use")
        if request.width > self.max_running:
            raise ValueError(f"n, beam_width: {request.width} rows, max_running {self.max_running}")
        if request.limit - 1 > longest:
            raise ValueError(f"prompt: it grows to {request.limit - 1} tokens, a row has {longest}")
        if length > self.token_budget and not self.chunked:
            raise ValueError(f"prompt: {length} tokens in one step of {self.token_budget}")
        arrival = ledger.now() if request.arrival is None else request.arrival
        root = b"" if ledger.cache is None else ledger.cache.root(request.extra)
        group = Group(name, request, ledger.submitted, arrival, root)
        needed, pool = blocks_of_tree(group, ledger.manager.block_size), ledger.manager.pool
        if needed > pool.num_blocks:
            raise NeverFits(needed, pool.num_blocks)
        ledger.enter(group)
        return group


# %% [markdown]
# Who comes in is decided in this order:
#
# 1. *Look up first.* What the cache has needs no tokens of the budget, and of the blocks only those which
#    are idle. Who counts the tokens before the look-up runs too many.
# 2. *Then see that all of it has room.* Blocks are taken in instalments, but a prompt that will not fit is
#    not begun: half-done prefills that evict one another are work for nothing.
# 3. *Then let the budget cut the chunk.*
#
# If the head does not fit, nobody behind it is tried. Small requests could be squeezed in, but then a large
# one may wait for ever.

# %% tags=["export:admission"]
class Admission(Admission):  # type: ignore
    def admit(self, budget: int) -> list[tuple[int, int]]:
        """Let groups in, from the head of the queue, while rows, blocks and `budget` last.

        Returns: (row, tokens) of what they run in this step.
        """
        ledger, runs = self.ledger, list[tuple[int, int]]()
        while budget and (group := ledger.queue.head()):
            enter = self._restore if group.state == "swapped" else self._place
            fits = self.home.reserved + len(group.live()) <= self.max_running
            more = enter(group, budget) if fits else None
            if more is None and len(self.home.running):
                break
            if more is None:  # all blocks are free and it still has no room
                ledger.end(group, "out_of_blocks", ledger.now())
                continue
            ledger.queue.remove(group)
            runs += more
            budget -= sum(count for _, count in more)
        return runs

    def _place(self, group: Group, budget: int) -> list[tuple[int, int]] | None:
        pool, others = self.ledger.manager.pool, len(group.live()) - 1
        if self.refused == (group.serial, pool.num_free) and len(self.home.running):
            return None
        todo, blocks = lookup(self.ledger, group)
        if blocks > pool.num_free:
            self.refused = group.serial, pool.num_free
            return None
        fresh = group.first_token_at is None
        if todo > budget and fresh and not self.chunked:
            return None
        count = min(todo - bool(group.beams and others and not fresh), budget)
        row = self.home.move_in(group, count)
        self.ledger.turn(group, "running")
        return [(row, count)] if count else []


# %% tags=["export:admission"]
class Admission(Admission):  # type: ignore
    def _restore(self, group: Group, budget: int) -> list[tuple[int, int]] | None:
        ledger = self.ledger
        if len(group.live()) > budget:
            return None
        moves = ledger.relief.restore(ledger, group)
        if moves is None:
            return None
        assert group.state == "running", f"{group}: restored, but it does not run"
        ledger.moves += moves
        ledger.moved.append(group)
        mine = np.array(ledger.rows_of(group), np.int64)
        rows, counts, _ = share_budget(ledger, mine, budget)
        try:
            ledger.moves += self.home.reserve(rows, counts)
        except OutOfBlocks:
            return []
        return list(zip(rows.tolist(), np.broadcast_to(counts, rows.shape).tolist(), strict=True))


def lookup(ledger: Ledger, group: Group) -> tuple[int, int]:
    """Tokens that the first live sample has to run, and free blocks that the whole group takes.

    Hits need no tokens; those that are idle need a free block, since they stop being free.
    """
    hang_branches(group)
    tokens, size = group.live()[0].tokens, ledger.manager.block_size
    hits = [] if ledger.cache is None else ledger.cache.match(group.root, tokens)
    in_use = int(np.count_nonzero(ledger.manager.pool.ref_count[hits])) if len(hits) else 0
    return len(tokens) - len(hits) * size, blocks_of_tree(group, size) - in_use


# %% [markdown]
# A group that had no room is not looked up again until the number of free blocks changes.
#
# ## In flight
#
# Between a plan and its commit lies the time that the device takes. A server that waits for it wastes the
# time of one of the two, so `schedule` may run one step ahead: plan 2 is made while plan 1 runs. It does
# not know the token that plan 1 samples, but it knows that there will be one and where its K/V go. At most two
# plans are in flight; they are committed in the order in which they were made.

# %% tags=["export:in_flight"]
"""Plans that were handed out and are not committed: what comes back, and what does not."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike


class Flight(NamedTuple):
    """A plan handed out and not committed.

    Fields
        moved       the groups that it suspends or restores.
        departures  how many tenants had left by then.
        steady      for how many steps more every row of it runs one token, if nobody comes or
                    goes; -1 where some do not.
        cadence, after  of a steady plan that follows another: what comes round; seq_lens + 1.
    """

    plan: StepPlan
    moved: list[Group]
    departures: int
    steady: int
    cadence: Cadence | None = None
    after: Ints | None = None


# %% tags=["export:in_flight"]
def checked_samples(sampled: ArrayLike, count: int) -> Tokens:
    """`sampled` as int32 [count]; ValueError for another number of them, or what is no token."""
    tokens = np.asarray(sampled)
    if tokens.shape != (count,) or (count and tokens.dtype.kind not in "iu"):
        raise ValueError(f"sampled: {count} token ids are needed, not {sampled!r}")
    own = tokens.astype(np.int32)
    if np.count_nonzero(own < 0) or (tokens.itemsize > 4 and (tokens != own).any()):
        raise ValueError(f"sampled: token ids are 0 to {MAX_TOKEN}")
    return own


def follow_parents(home: Residents, plan: StepPlan, parents: ArrayLike | None) -> None:
    """Let the beams of `plan` become what their parents are, in groups that still run."""
    lives = home.rows.serial[plan.sample_rows] == plan.sample_serials
    of = np.asarray([] if parents is None else parents)
    if of.shape != lives.shape or of.dtype.kind not in "iu":
        raise ValueError(f"parents: {len(lives)} numbers of beams are needed, not {parents!r}")
    for _, places in plan.beams:
        if not 0 <= of[places].min() <= of[places].max() < len(places):
            raise ValueError(f"parents: {of[places]} for {len(places)} beams")
    for _, places in plan.beams:
        if lives[places].all():
            rows = plan.sample_rows[places]
            rewire_beams(home, rows, rows[of[places]])


# %% [markdown]
# A step can fail, on a GPU that runs out of memory for something else, say. Then nobody knows what its slots
# hold. What it wrote is withdrawn from the cache, and whoever ran in it, or holds a block that it wrote, waits again
# with the tokens it has. What earlier steps published is still found, so little is computed twice.

# %% tags=["export:in_flight"]
def void_from(ledger: Ledger, flights: deque[Flight], plan: StepPlan) -> None:
    """Void `plan` and what was scheduled behind it, the newest first."""
    if all(flight.plan is not plan for flight in flights):
        raise ValueError(f"plan: step {plan.step} is not in flight")
    flight = None
    while flight is None or flight.plan is not plan:
        flight = flights.pop()
        void(ledger, flight)


def void(ledger: Ledger, flight: Flight) -> None:
    """Withdraw what a plan wrote; its groups, and all that hold such a block, wait again."""
    home, plan, size = ledger.home, flight.plan, ledger.manager.block_size
    copied = [block for _, block in plan.moves if isinstance(block, int)]
    written = np.unique(np.append(plan.slot_mapping // size, copied).astype(np.int64))
    touched = np.isin(home.manager.tables.table[home.running], written).any(1)
    rows = np.append(plan.rows, home.running[touched]).tolist()
    if ledger.cache is not None:
        ledger.cache.forget(written)
    groups = [home.rows.group[row] for row in rows if row in home.rows.group]
    for group in dict.fromkeys([*groups, *flight.moved, *ledger.moved]):
        if group.state == "running":
            ledger.release(group)
        elif group.state == "swapped":
            ledger.relief.drop(ledger, group)
            ledger.turn(group, "waiting")
    ledger.moved = []


# %% [markdown]
# ## One decision
#
# Now the scheduler itself is short. `schedule` gives those who run their tokens, lets in whoever fits, branches, and
# makes the plan; `commit` takes what was sampled.

# %% tags=["export:scheduler"]
"""One decision a step: which tokens run, in which blocks, and who has to wait."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable

import numpy as np
from numpy.typing import ArrayLike

from paged_kv.block_manager import BlockManager
from paged_kv.block_pool import OutOfBlocks
from paged_kv.prefix_cache import PrefixCache
from paged_kv.sizing import at_least




# %% tags=["export:scheduler"]
class Scheduler:
    """Requests over one block manager: which tokens run next, until each request has ended.

    Args: `token_budget`, tokens a step at most; `max_running`, rows at most; `chunked`, whether
    a prompt may take several steps; `relief`, what happens when blocks run out.
    State
        ledger    Ledger: every request and where it stands.
        home      Residents: the groups that hold rows.
        flights   plans handed out and not committed, at most two.   last: the newest of all.
        steady    whether the step in the making is the last one again, a token further.
        accepted  rows and tokens of the last commit, without those that came too late.
    Source: vllm/v1/core/sched/scheduler.py, which decides request by request.
    """

    def __init__(
        self,
        manager: BlockManager,
        cache: PrefixCache | None = None,
        *,
        token_budget: int = 2048,
        max_running: int | None = None,
        chunked: bool = True,
        relief: Relief | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        most = min(at_least(1, "token_budget", token_budget), len(manager.tables.table))
        self.max_running = min(256, most) if max_running is None else max_running
        if at_least(1, "max_running", self.max_running) > most:
            raise ValueError(f"max_running = {max_running}: at most {most}, budget and rows")
        self.manager, self.cache, self.now = manager, cache, clock
        self.token_budget, self.home = token_budget, Residents(manager, cache)
        self.ledger = Ledger(self.home, relief or Recompute(), clock)
        self.door = Admission(self.ledger, token_budget, self.max_running, chunked)
        self.flights: deque[Flight] = deque()
        self.last: Flight | None = None
        self.steady = False
        self.accepted: tuple[Ints, Tokens] = (NONE, NONE.astype(np.int32))


# %% tags=["export:scheduler"]
class Scheduler(Scheduler):  # type: ignore
    def submit(self, request: Request) -> Hashable:
        """Queue `request`; returns its id.

        Raises, with nothing changed: NeverFits; ValueError for an id in use, more rows or tokens
        than there can be, or a prompt above the budget without chunking.
        """
        return self.door.submit(request).id

    def schedule(self) -> StepPlan | None:
        """Decide the next step and reserve its blocks.

        Returns None where nothing can run before the next commit or submission.
        Raises: ValueError while two plans are in flight.
        """
        return decide(self)

    def commit(
        self,
        plan: StepPlan,
        sampled: ArrayLike,
        parents: ArrayLike | None = None,
        now: float | None = None,
    ) -> list[Output]:
        """Take the tokens that `plan` sampled; those of rows with another tenant are dropped.

        Args: `sampled`, ints [S]; `parents`, ints [S], for beams the beam that each comes from;
        `now`, the time if not the clock's.   Returns: the requests that have ended.
        Raises, with nothing changed: ValueError for a plan out of turn, or what is no token.
        """
        settle(self, plan, sampled, parents, now)
        return self.take_outputs()


# %% tags=["export:scheduler"]
def decide(scheduler: Scheduler) -> StepPlan | None:
    """The next plan, its blocks reserved; None where nothing can run."""
    home, ledger = scheduler.home, scheduler.ledger
    if len(scheduler.flights) > 1:
        raise ValueError("two plans are in flight: commit one first")
    batch = choose_batch(scheduler)
    if batch is None:
        return None
    tenants = len(home.running)
    children = branch(home) if home.branching else []
    if not len(batch[0]):
        if len(home.running) > tenants:
            return decide(scheduler)
        assert scheduler.flights or not ledger.groups, "nothing runs, and nothing ever will"
        return None
    scheduler.last = take_off(scheduler, batch, children)
    scheduler.flights.append(scheduler.last)
    ledger.moves, ledger.moved = [], []
    return scheduler.last.plan


# %% [markdown]
# `choose_batch` is the decision. Blocks for the running rows are taken all at once, so either the step has room
# or somebody has to go, and then the question is put again from the start. In such a step nobody is let in: the blocks that
# a victim gave up are not for those behind it.
#
# With one group left there is nobody to evict. It has all blocks and needs more; it ends with what it has, and says so.

# %% tags=["export:scheduler"]
def choose_batch(scheduler: Scheduler) -> tuple[Ints, Ints | int] | None:
    """Rows and tokens each, blocks reserved: first who runs, then who waits.

    None: better wait for a commit, which will bring blocks.
    """
    home, ledger, short = scheduler.home, scheduler.ledger, False
    while True:
        scheduler.steady = is_steady(scheduler)
        rows, counts, budget = share_budget(
            ledger, home.running, scheduler.token_budget, scheduler.steady
        )
        try:
            if scheduler.steady and scheduler.last is not None:
                keep_pace(scheduler, scheduler.last)
            else:
                ledger.moves += home.reserve(rows, counts)
            break
        except OutOfBlocks:
            short = True
            if not relieve(ledger, waiting=bool(scheduler.flights)):
                return None
    if not isinstance(counts, int):
        longer = rows[counts > 1]
        publish(home, longer, scheduler.manager.tables.seq_lens[longer])
    if not ledger.queue or (short and len(home.running)):
        return rows, counts
    if runs := scheduler.door.admit(budget):
        scheduler.steady = False
        each = np.array(runs, np.int64)
        counts = np.append(np.broadcast_to(counts, rows.shape), each[:, 1])
        rows = np.append(rows, each[:, 0])
    return rows, counts


# %% tags=["export:scheduler"]
def relieve(ledger: Ledger, waiting: bool) -> bool:
    """Have a group give up its blocks; False where a commit, if `waiting`, will bring some."""
    groups = ledger.running_groups()
    if waiting and (len(groups) == 1 or any(is_ending(ledger, group) for group in groups)):
        return False
    if len(groups) == 1:
        ledger.end(groups[0], "out_of_blocks", ledger.now())
        return True
    victim = ledger.relief.victim(ledger, groups)
    ledger.moves += ledger.relief.evict(ledger, victim)
    if victim.state == "swapped":
        ledger.moved.append(victim)
    assert victim.state != "running", f"{victim}: evicted, but it runs"
    return True


# %% tags=["export:scheduler"]
def is_steady(scheduler: Scheduler) -> bool:
    """Whether every running row was in the last plan and runs one token more."""
    last, tables = scheduler.last, scheduler.manager.tables
    if last is None or last.steady < 1 or last.plan.rows is not scheduler.home.running:
        return False
    return not (scheduler.ledger.beams or tables.guarded)


def keep_pace(scheduler: Scheduler, last: Flight) -> None:
    """Reserve the blocks of a steady step.  Raises OutOfBlocks, with nothing changed."""
    home, plan, beat, ends = scheduler.home, last.plan, last.cadence, last.after
    if beat is None or ends is None:
        beat, ends = Cadence(home, plan), plan.seq_lens + 1
        scheduler.last = last._replace(cadence=beat, after=ends)
    advance(home, plan.rows, ends, beat.full(plan.step))


def take_off(
    scheduler: Scheduler, batch: tuple[Ints, Ints | int], children: list[tuple[int, int]]
) -> Flight:
    """The plan of a `batch` that has its blocks; the short way where the last one goes on."""
    home, ledger, last = scheduler.home, scheduler.ledger, scheduler.last
    rows, counts, lagging = *batch, bool(scheduler.flights)
    if last is not None and scheduler.steady and not children:
        tokens = None if lagging else scheduler.accepted[1]
        return go_on(scheduler, last, tokens)
    step = 0 if last is None else last.plan.step + 1
    plan = build_plan(home, batch, children, ledger.beams, step, ledger.moves, lagging)
    steady, plain = -1, isinstance(counts, int) and not (children or ledger.beams)
    if plain and rows is home.running:
        steady = int((home.rows.limit[rows] - 1 - plan.seq_lens).min())
    return Flight(plan, ledger.moved, home.departures, steady)


# %% tags=["export:scheduler"]
def go_on(scheduler: Scheduler, last: Flight, tokens: Tokens | None) -> Flight:
    """The plan behind a steady one, whose blocks `keep_pace` has reserved."""
    home, ledger, beat, ends = scheduler.home, scheduler.ledger, last.cadence, last.after
    assert beat is not None and ends is not None
    begin = beat.full(last.plan.step).places
    plan = next_plan(home, last.plan, ends, begin, ledger.moves, tokens)
    after = ends + home.ones[: len(ends)]
    home.rows.expected[plan.rows] = after
    return Flight(plan, ledger.moved, home.departures, last.steady - 1, beat, after)


# %% tags=["export:scheduler"]
def settle(
    scheduler: Scheduler,
    plan: StepPlan,
    sampled: ArrayLike,
    parents: ArrayLike | None,
    now: float | None,
) -> None:
    """Write down what was sampled, publish blocks that are full, end what has come to its end."""
    home, flights = scheduler.home, scheduler.flights
    if not flights or flights[0].plan is not plan:
        raise ValueError(f"plan: step {plan.step} is not the oldest in flight")
    tokens = checked_samples(sampled, len(plan.sample_rows))
    if plan.beams:
        follow_parents(home, plan, parents)
    flight, rows, ends = flights.popleft(), plan.sample_rows, plan.seq_lens
    beat, after, at_hand = flight.cadence, flight.after, None
    if rows is not plan.rows:
        ends = ends[plan.sample_logits]
    if flight.departures != home.departures:  # somebody left: late tokens are dropped
        lives = home.rows.serial[rows] == plan.sample_serials
        rows, tokens, ends = rows[lives], tokens[lives], ends[lives]
    elif beat is not None and after is not None:
        at_hand = beat.starts + ends, after, beat.stops
    stopped, full = home.rows.record(rows, ends, tokens, flight.steady <= 0, at_hand)
    scheduler.accepted = rows, tokens
    if at_hand is None or beat is None:
        publish(home, rows, ends)
    else:
        publish_turn(home, beat.full(plan.step), ends)
    if scheduler.ledger.untimed or len(stopped) or len(full):
        end_some(scheduler.ledger, stopped, full, scheduler.now() if now is None else now)


def end_some(ledger: Ledger, stopped: Ints, full: Ints, now: float) -> None:
    """Note first tokens, then end the samples that said a stop token or are at their limit."""
    note_first(ledger, now)
    for rows, reason in ((stopped, "stop"), (full, "length")):
        if len(rows):
            ledger.end_rows(rows, reason, now)


# %% tags=["export:scheduler"]
class Scheduler(Scheduler):  # type: ignore
    @property
    def counts(self) -> dict[State, int]:
        """Requests waiting, running, swapped, finished; together all that were submitted."""
        return dict(self.ledger.counts)

    def take_outputs(self) -> list[Output]:
        """The requests that have ended and were not reported yet."""
        ended, self.ledger.outputs = self.ledger.outputs, []
        return ended

    def abort(self, request_id: Hashable) -> Output | None:
        """End a request in any state; None if it has ended already."""
        return self.finish(request_id, "aborted")

    def finish(self, request_id: Hashable, reason: str) -> Output | None:
        """End a request with what it has, for a reason that the caller gives."""
        group = self.ledger.groups.get(request_id)
        if group is None:
            return None
        self.ledger.end(group, reason, self.now())
        return self.ledger.outputs.pop()

    def fail(self, plan: StepPlan) -> None:
        """`plan` did not run: it and a later one are void, and their groups wait again.

        Raises: ValueError if `plan` is not in flight.
        """
        void_from(self.ledger, self.flights, plan)

    def check(self) -> None:
        """Assert all invariants, those of the cache included.  For tests."""
        check_ledger(self.ledger)
        if self.cache is not None:
            self.cache.check()


# %% [markdown]
# Chats A, B and C by hand: prompts of 6, 10 and 5 tokens, 8 blocks of 4, a budget of 8 tokens a step. The
# model here always says 7; what it says does not matter yet.
#
# :::{admonition} Predict
# :class: tip
# How many tokens of each chat run in the first three steps?
# :::
#
# :::{dropdown} Reasoning
# Step 0: nobody decodes. A is first and takes 6, B gets the 2 that are left, C waits. Step 1: A decodes, 1; B has 8 to
# go and 7 are left. Step 2: A decodes, B runs its last prompt token, which is one token like any other, and for C
# all 5 fit.
# :::

# %%
from paged_kv.draw import draw_pool

NAMES = "ABC"


def fresh(num_blocks=8, block_size=4, cached=True, **options):
    manager = BlockManager(num_blocks, block_size, max_seqs=4, max_seq_len=32)
    cache = PrefixCache(manager.pool, block_size) if cached else None
    return Scheduler(manager, cache, **options)


def table_of(scheduler):
    """Which chat has which row."""
    return {str(group.id): row for row, group in scheduler.home.rows.group.items()}


def told(scheduler, plan):
    """Tokens that each chat runs in a plan."""
    names = {row: name for name, row in table_of(scheduler).items()}
    return {names[row]: count for row, count in zip(plan.rows.tolist(), plan.new_tokens.tolist())}


scheduler = fresh(token_budget=8)
for name, length, new in (("A", 6, 4), ("B", 10, 4), ("C", 5, 3)):
    scheduler.submit(Request(range(ord(name), ord(name) + length), new, request_id=name))
for step in range(3):
    plan = scheduler.schedule()
    print(f"step {step}: {told(scheduler, plan)}, sampled for {plan.samples.tolist()}")
    scheduler.commit(plan, [7] * len(plan.sample_rows))
    scheduler.check()
draw_pool(scheduler.manager.snapshot(table_of(scheduler)), title="after step 2: all three decode")

# %% [markdown]
# In step 0 the sample counts are 1 for A and 0 for B, which is in the middle of its prompt: its logits are of no use to
# anybody. Most of the next plan:

# %%
plan = scheduler.schedule()
for name in ("rows", "new_tokens", "seq_lens", "token_ids", "positions", "slot_mapping"):
    print(f"{name:13}", getattr(plan, name))
updates = [column.tolist() for column in plan.news.table_updates]
print("new entries of the table:", updates, "moves:", plan.moves)
outputs = scheduler.commit(plan, [7] * 3)
print("ended:", [(out.request_id, out.completions[0].token_ids) for out in outputs])

# %% [markdown]
# **Turn the knob.** Set `token_budget=4` above; expect A's prompt in two steps. Set it to 64; expect all three prompts in step 0.
#
# :::{admonition} Predict
# :class: tip
# Two users send the same 9 tokens; both requests wait when the step is decided, and the cache is empty. How many
# tokens does each run?
# :::
#
# :::{dropdown} Reasoning
# The first runs 9. Its two full blocks are published while the step is still being put together, so the second
# finds 8 tokens, and runs 1. In every layer the first one's K/V are written before the second one attends. Neither waits.
# :::

# %%
scheduler = fresh()
for name in "AB":
    scheduler.submit(Request(range(9), 3, request_id=name))
plan = scheduler.schedule()
print("tokens:", told(scheduler, plan), " positions of B:", plan.positions[-1:])
tables = scheduler.manager.tables
print("tables:", {name: tables.ids(row) for name, row in table_of(scheduler).items()})
assert plan.new_tokens.tolist() == [9, 1]

# %% [markdown]
# And a group of three samples, which shares a prompt of six tokens and draws three tokens from one row of logits:

# %%
scheduler = fresh()
scheduler.submit(Request(range(6), 3, request_id="A", n=3))
plan = scheduler.schedule()
print("step 0: runs", plan.new_tokens, "samples", plan.samples, "for rows", plan.sample_rows)
scheduler.commit(plan, [11, 12, 13])
plan = scheduler.schedule()
print("step 1: runs", plan.token_ids, "copies", plan.moves)
names = {f"A{sample.index}": sample.row for sample in scheduler.ledger.groups["A"].samples}
draw_pool(scheduler.manager.snapshot(names), title="the samples part in their second block")

# %% [markdown]
# Two copies for three writers, as chapter 6 said: the last holder writes in place.
#
# ## One step ahead
#
# In a plan that is made before the last one's token is known, its id is -1, and `token_source` says
# which sample of the previous plan it will be; the device takes it from there.

# %%
scheduler = fresh(1)
scheduler.submit(Request([1, 2], 8, request_id="A"))
first, second = scheduler.schedule(), scheduler.schedule()
print("plan 0 runs", first.token_ids, " plan 1 runs", second.token_ids,
      "from sample", second.token_source, "at slot", second.slot_mapping)
state, reserved = scheduler.home.rows, scheduler.manager.tables.seq_lens[0]
print(f"committed {state.known[0]}, K/V reserved {reserved}, expected {state.expected[0]}")

# %% [markdown]
# Three lengths, each one ahead of the last. While plans fly, their rows may lose their tenant: to a stop token that nobody
# could foresee, an abort, a relief. Row 0 below goes from A to B with one of A's tokens still in the air.
#
# :::{admonition} Predict
# :class: tip
# Plan 2 puts B into A's row and into A's block, and is sent off before plan 1, which still writes A's K/V, has
# come back. Can B read what A writes?
# :::
#
# :::{dropdown} Reasoning
# No. The device runs plans in the order in which they were sent. A's late K/V are written first; B's come after, into the
# same slots, and B reads only slots that it has written. Blocks may be reused at once. What must not be taken over is A's
# late *token*, which arrives at the host when B is in the row already. The plan remembers the tenants' numbers.
# :::

# %%
scheduler.commit(first, [10])
aborted = scheduler.abort("A")
scheduler.submit(Request([3, 4], 2, request_id="B"))
third = scheduler.schedule()
print("A has", aborted.completions[0].token_ids, "and leaves row", second.rows,
      "with a write to slot", second.slot_mapping, "in the air")
print("B is in row", third.rows, "and writes to slots", third.slot_mapping)
scheduler.commit(second, [11])  # too late
print("taken from plan 1:", scheduler.accepted[1])
scheduler.commit(third, [12])
print("B:", scheduler.commit(scheduler.schedule(), [13])[0].completions[0].token_ids)

# %% [markdown]
# A late token is wasted work, one for each chat that ends on a stop token. It buys a device that need not wait for Python.
# With a plan in flight nothing is evicted while a running chat is about to end anyway: `schedule` answers None, commit
# first.
#
# A test drives random programs, in step and one step ahead, against a model whose next token is a checksum of everything
# that it reads through the table, with requests of all kinds, tiny pools, aborts and failed steps. Every output equals that
# of a model with no pool at all.
#
# ## When blocks run out
#
# The opening again: two chats of six tokens, four blocks, five tokens to generate each.

# %%
scheduler = fresh(4)
for name in "AB":
    scheduler.submit(Request(range(ord(name), ord(name) + 6), 5, request_id=name))
while (plan := scheduler.schedule()) is not None:
    line = f"step {plan.step}: {told(scheduler, plan)}, {scheduler.manager.pool.num_free} free"
    ended = scheduler.commit(plan, [7] * len(plan.sample_rows))
    print(line, *(f"{out.request_id} ends after {out.preemptions} preemptions" for out in ended))
print(scheduler.counts, "and", scheduler.manager.pool.num_free, "blocks free")

# %% [markdown]
# In step 3 both need a third block, and B, the last that came, goes. When A has ended B comes back, finds its first
# block in the cache, and runs the rest.
#
# A block is needed before the *next token's K/V* are written, so the length that counts is that of the K/V. The number
# of tokens is one larger, and an estimate made from it is off by one step at each edge of a block.

# %%
manager = BlockManager(20, 4, 8, 32)
rows = [manager.add(length) for length in range(3, 9)]
print("K/V length   ", list(range(3, 9)))
print("blocks needed", [manager.blocks_needed([row]) for row in rows])
assert [manager.blocks_needed([row]) for row in rows] == [0, 1, 0, 0, 0, 1]

# %% [markdown]
# Three requests that no eviction helps. One is too long for the pool, one too long for a step without chunks: both
# are refused at submission. The third fits, holds all blocks at its first token, and ends with what it has.

# %%
scheduler = fresh(2)
for door, length in ((scheduler, 12), (fresh(token_budget=8, chunked=False), 9)):
    try:
        door.submit(Request(range(length), 1))
    except ValueError as error:
        print(f"{type(error).__name__}: {error}")
scheduler.submit(Request(range(8), 5, request_id="A"))
scheduler.commit(scheduler.schedule(), [7])
print("next plan:", scheduler.schedule())
print(scheduler.take_outputs()[0].completions[0])

# %% [markdown]
# ## Break it
#
# Every request ends, with tokens that are its own.
#
# > **I6.** If nothing is in flight and a request has not ended, `schedule` returns a plan or ends a request.
#
# Four rules under it are broken here: a relief frees blocks; nobody overtakes the head of the queue; a late token is
# dropped; every group is in the queue or has a row. First a relief that evicts nobody: an endless loop, if nobody looked.

# %%
class Polite(Recompute):
    def evict(self, ledger, group):
        return []  # after you


scheduler = fresh(2, relief=Polite())
for name in "AB":
    scheduler.submit(Request(range(4), 4, request_id=name))
scheduler.commit(scheduler.schedule(), [7, 7])
try:
    scheduler.schedule()
except AssertionError as error:
    print("AssertionError:", error)

# %% [markdown]
# Then a door that lets others pass when the head has no room, to use the blocks that are left. Short chats arrive, one every
# second step, and a long one early on.

# %%
class naive_Door(Admission):
    def admit(self, budget):
        runs = super().admit(budget)
        aside = []
        while (head := self.ledger.queue.head()) and len(aside) < 3:
            aside.append(head)  # look behind the head
            self.ledger.queue.remove(head)
            runs += super().admit(budget - sum(count for _, count in runs))
        for group in aside:
            if group.state == "waiting":
                self.ledger.queue.push(group)
        return runs


def starts_at(door, steps=400):
    """The step in which the long request gets its first token."""
    scheduler = fresh(8, cached=False, clock=lambda: 0.0)
    scheduler.door = door(scheduler.ledger, 2048, 4, True)
    for step in range(steps):
        if step % 2 == 0:
            scheduler.submit(Request(range(5), 5))
        if step == 5:
            scheduler.submit(Request(range(28), 2, request_id="long"))
        plan = scheduler.schedule()
        scheduler.commit(plan, [7] * len(plan.sample_rows))
        group = scheduler.ledger.groups.get("long")
        if step > 5 and (group is None or group.state == "running"):
            return step
    return None


print("nobody overtakes: the long one starts in step", starts_at(Admission))
print("others may pass:  the long one starts in step", starts_at(naive_Door))

# %% [markdown]
# It has not started after 400 steps. One may want that, with a bound on how often a request is passed; ours is zero.
#
# Third, a late token that nobody recognises. We forge the numbers of the tenants in a plan.

# %%
scheduler = fresh(4)
scheduler.submit(Request([1, 2], 8, request_id="A"))
first, second = scheduler.schedule(), scheduler.schedule()
scheduler.commit(first, [10])
scheduler.abort("A")
scheduler.submit(Request([3, 4], 3, request_id="B"))
third = scheduler.schedule()
second.sample_serials[:] = third.sample_serials  # as if A still lived in this row
scheduler.commit(second, [11])
(sample,) = scheduler.ledger.groups["B"].samples
print("B has", scheduler.ledger.tokens_of(sample), "before its first step came back")

# %% [markdown]
# B has said 10 and 11, both A's words. Last, a group taken from the queue and put nowhere.

# %%
scheduler = fresh()
scheduler.submit(Request([1, 2], 8, request_id="A"))
scheduler.ledger.queue.remove(scheduler.ledger.groups["A"])
try:
    scheduler.check()
except AssertionError as error:
    print("check:", error)
try:
    scheduler.schedule()
except AssertionError as error:
    print("schedule:", error)

# %% [markdown]
# ## A real model, driven by plans
#
# The plan has all that chapter 5's `PackedBatch` wants, so a few lines join them. SmolLM2 {cite}`allal2025smollm2` answers
# the three questions of chapter 5 out of 24 blocks, in chunks of at most 16 tokens, and one step ahead: plan $k + 1$ is made
# before the tokens of plan $k$ are committed.

# %%
import warnings

warnings.filterwarnings("ignore", message="IProgress not found")  # we show no progress bars
import torch

from paged_kv.hf_adapter import continuous_decode, host, load_guest
from paged_kv.packed_batch import PackedBatch


def packed(plan, table, last):
    """A plan as tensors; `last` is what the previous plan sampled."""
    ids, late = plan.token_ids.astype(np.int64), plan.token_source >= 0
    if late.any():
        ids[plan.cu_seqlens[1:][late] - 1] = last[plan.token_source[late]]
    rows, columns, blocks = plan.news.table_updates
    table[rows, columns] = blocks
    arrays = (ids, plan.positions, plan.slot_mapping, table, plan.rows,
              plan.cu_seqlens.astype(np.int32), plan.seq_lens.astype(np.int32),
              plan.cu_seqlens[1:][plan.sample_logits] - 1)
    return PackedBatch(*(torch.from_numpy(array.copy()) for array in arrays))


def serve(guest, scheduler):
    """Greedy answers to all that was submitted, one step ahead; id -> token ids, and the steps."""
    table = np.full_like(scheduler.manager.tables.table, -1)
    outputs, flying, last = [], [], None
    while scheduler.ledger.groups or flying:
        if (plan := scheduler.schedule()) is not None:
            guest.store.copy_blocks(plan.moves)
            last = guest.forward(packed(plan, table, last)).argmax(-1).numpy()
            flying.append((plan, last))
        if flying and (len(flying) > 1 or plan is None):
            outputs += scheduler.commit(*flying.pop(0))
    steps = scheduler.last.plan.step + 1
    return {out.request_id: out.completions[0].token_ids for out in outputs}, steps


# %%
smol, tokenizer = load_guest()
guest = host(smol, num_blocks=24)
questions = ["What is the capital of France?", "Name three colours.", "What is 2 + 3?"]
prompts = [
    tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    for question in questions
]
stops = (tokenizer.eos_token_id,)
manager = BlockManager(num_blocks=24, block_size=16, max_seqs=3, max_seq_len=128)
scheduler = Scheduler(manager, PrefixCache(manager.pool, 16), token_budget=16)
for i, prompt in enumerate(prompts):
    scheduler.submit(Request(prompt, 12, request_id=i, stop_tokens=stops))
answers, steps = serve(guest, scheduler)
for i, question in enumerate(questions):
    print(question, "->", tokenizer.decode(answers[i], skip_special_tokens=True).replace("\n", " "))
print("prompts of", [len(prompt) for prompt in prompts], "tokens;", scheduler.counts)

# %% [markdown]
# The same tokens as chapter 5's loop, which ran every prompt whole and nothing ahead, and as `generate` of the model
# itself:

# %%
manager = BlockManager(num_blocks=24, block_size=16, max_seqs=3, max_seq_len=128)
*_, final = continuous_decode(host(smol, num_blocks=24), manager, prompts, 12, set(stops))
assert [answers[i] for i in range(3)] == final.output
for i, prompt in enumerate(prompts):
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    own = smol.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=12)
    assert own[0, len(prompt):].tolist() == answers[i]
print("equal to continuous_decode and to generate:", sum(map(len, answers.values())), "tokens")

# %% [markdown]
# A second visit, in which all three prompts are found up to their last block, takes fewer steps. And a pool of 8 blocks,
# with answers of 20 tokens to the bitter end, is too small for the three together: they are let in, since they share a block, but
# each grows by one. Somebody has to go.

# %%
for i, prompt in enumerate(prompts):
    scheduler.submit(Request(prompt, 12, request_id=i, stop_tokens=stops))
again, together = serve(guest, scheduler)
print("the same again:", again == answers, f"in {together - steps} steps instead of {steps}")
long = []
for num_blocks in (24, 8):
    manager = BlockManager(num_blocks, block_size=16, max_seqs=3, max_seq_len=128)
    scheduler, evicted = Scheduler(manager, PrefixCache(manager.pool, 16)), []

    class Noting(Recompute):
        def victim(self, ledger, candidates, evicted=evicted):
            evicted.append(candidates[-1].id)
            return candidates[-1]

    scheduler.ledger.relief = Noting()
    for i, prompt in enumerate(prompts):
        scheduler.submit(Request(prompt, 20, request_id=i))
    long.append(serve(host(smol, num_blocks), scheduler)[0])
    print(num_blocks, "blocks, evicted:", evicted)
print("the same words:", long[0] == long[1])
assert evicted and long[0] == long[1]

# %% [markdown]
# ## What it costs
#
# The scheduler runs between two steps of the device, or beside them if it is a step ahead; either way a decode step of a
# few milliseconds sets the limit. A prediction from counts: vLLM's manager works request by request, ours for the
# batch, and over the whole life of a request ours also opens and closes a row with Python. So the factor should be below
# that of chapter 3, where nobody came or went, and well above one. In a dull step of 256 rows, 16 begin a block and 16 fill one.
# The rest is about twenty array operations, flat in the batch; the keys of filled blocks are not, one Python object each.

# %% tags=["hide-input"]
import json

book_style()
result = json.load(open("../benchmarks/results/scheduler.json"))
by_part = {part: [row for row in result["rows"] if row["part"] == part]
           for part in ("step", "profile", "churn")}
parts = [row for row in by_part["profile"] if row["what"] not in ("schedule", "commit")]
fig, ax = plt.subplots(figsize=(6.4, 2.8))
ax.barh([row["what"] for row in parts], [row["us"] for row in parts], color="#0072B2")
ax.set(xlabel="us a step, 256 rows")
ax.invert_yaxis()
plt.show()
print("measured:", result["device"], "numpy", result["versions"]["numpy"])
print("measured:", result["statistic"])
for row in by_part["step"]:
    print(f"measured: {row['running']:5} running: schedule {row['schedule_us']:6.1f} us, "
          f"commit {row['commit_us']:6.1f} us, together {row['step_us']:6.1f} us")
print("measured:", result["workload"].split("; step")[0])
for row in by_part["churn"]:
    print(f"measured: {row['who']:14} {row['us_a_step']:8.1f} us a step, "
          f"{row['requests_per_s']:6,} requests/s")
print(f"measured: blocks alone against vLLM's: {result['headline']['x_vllm_churn']:.1f} times")

# %% [markdown]
# *Figure: where the time of a decode step over 256 rows goes. Keys of filled blocks take the most, then blocks; deciding who
# runs takes next to nothing where nobody came or went.*
#
# "blocks" is our `BlockManager` alone beside vLLM's manager alone, "whole" our scheduler with everything else that it does:
# queue, plan, tokens, keys, stop checks. Both are Python on one core of the machine named above, shared with other work.
# What this does not show: vLLM's own scheduler on top of its manager, and the upload of a plan. Where it loses: with one
# chat running a plan costs about as many NumPy calls as with a hundred; and where requests come or go in most steps, as in
# "whole", few steps are dull.
#
# ## Mistakes in circulation
#
# :::{admonition} Check it yourself
# :class: warning
# - The prompt of 2,000 tokens that opens many accounts of this subject is said to take ~~8 blocks~~. It takes 125, of 16
#   tokens each; 8 blocks of 5 MiB would be 40 MiB, room for 128 tokens.
# - "Running out of blocks ~~gives wrong answers~~." It gives delay: a queue, then a pause and a replay.
# - The blocks of the next step are often ~~estimated from the number of tokens~~. It is the K/V length that counts, one less.
# :::

# %%
from paged_kv.sizing import KVSpec, blocks_for

block = KVSpec(num_layers=80, num_kv_heads=8, head_size=128, dtype="fp16").bytes_per_block(16)
print(f"2,000 tokens: {blocks_for(2000, 16)} blocks of {block / 2**20:.0f} MiB")
print(f"8 blocks: {8 * block / 2**20:.0f} MiB, {8 * 16} tokens")
lens = np.arange(3, 9)
by_tokens = ((lens + 1) % 4 == 0).astype(int)  # one block for every fourth token
print("K/V lengths", lens, "right", (lens % 4 == 0).astype(int), "from tokens", by_tokens)

# %% [markdown]
# ## State card
#
# | class | holds | invariant | what breaks next |
# |---|---|---|---|
# | `RowState` | `known`, `expected`, `limit`, `tokens` by row | `known` $\le$ `expected` $\le$ `known` + 2 | sampling on the device (chapter 14) |
# | `Residents` | rows and tenants, news for the device | a row is open iff it has a tenant | |
# | `Ledger` | groups, queue, counts | I5: nobody is lost | a better relief (chapter 10) |
# | `Admission` | limits | nobody overtakes | |
# | `Scheduler` | plans in flight | I6: there is always a next step | who runs the plans (chapter 13) |
#
# The simplest relief throws work away: B ran four tokens twice. Whether to copy blocks to host memory instead, and who should go,
# is a matter of prices, which chapter 10 sets.
#
# ## Real world
#
# - **vLLM** has the same shape in `vllm/v1/core/sched/scheduler.py`: one loop over running requests, one over waiting ones,
#   a token budget, no prefill phase. Its priority policy evicts the least important, its default one the last.
#   It runs ahead as well, with placeholders for tokens to come (`vllm/v1/core/sched/async_scheduler.py`).
# - **SGLang** picks what to prefill in `python/sglang/srt/managers/schedule_policy.py`; its policy `lpm`, longest cached
#   prefix first, trades order for hits. It overlaps the scheduler with the device.
# - **TensorRT-LLM** decides capacity and then the micro batch in `cpp/tensorrt_llm/batch_manager/capacityScheduler.cpp` and
#   `cpp/tensorrt_llm/batch_manager/microBatchScheduler.cpp`; one of its policies, "guaranteed no evict", admits only what
#   could run to its end, like chapter 5's loop.
# - The idea to decide anew after every step is Orca's {cite}`yu2022orca`; chunks in the decode batch are Sarathi-Serve's
#   {cite}`agrawal2024sarathi`.
#
# ## Exercises
#
# :::{exercise}
# :label: ex-09-compute
# **Compute.** A prompt of 2,049 tokens, a budget of 2,048, nobody else. How many steps until its first token? And with 64
# chats that decode beside it? What if chunking is off?
# :::
#
# :::{solution} ex-09-compute
# :class: dropdown
# Two steps, 2,048 + 1. With 64 decodes the budget leaves 1,984 a step: two steps again, 1,984 + 65. Without chunks
# it is refused at submission.
# :::

# %% tags=["hide-input"]
for beside in (0, 64):
    manager = BlockManager(400, 16, 80, 4096)
    scheduler = Scheduler(manager)
    for name in range(beside):
        scheduler.submit(Request([1], 50))
    if beside:
        scheduler.commit(scheduler.schedule(), [7] * beside)
    scheduler.submit(Request([1] * 2049, 1, request_id="long"))
    counts = []
    while "long" in scheduler.ledger.groups:
        plan = scheduler.schedule()
        counts.append(int(plan.new_tokens[-1] if not counts else plan.new_tokens.max()))
        scheduler.commit(plan, [7] * len(plan.sample_rows))
    assert counts == ([2048, 1] if not beside else [1984, 65])
try:
    Scheduler(manager, chunked=False).submit(Request([1] * 2049, 1))
    raise AssertionError("not refused")
except ValueError as error:
    print(error)

# %% [markdown]
# :::{exercise}
# :label: ex-09-trace
# **Trace.** $B = 4$, prefix cache on. A chat has 10 tokens, 7 of prompt and 3 generated, when it is released. It comes back
# twice: once with all its full blocks still in the cache, once when only the first has survived. How many tokens are found,
# how many are run, at which positions?
# :::
#
# :::{solution} ex-09-trace
# :class: dropdown
# It has 9 tokens of K/V, two full blocks. All there: 8 found, 2 run, positions 8 and 9. Only the first: 4 found, 6
# run, positions 4 to 9. The look-up came first; a count made before it would have been 10 both times.
# :::

# %% tags=["hide-input"]
scheduler = fresh()
scheduler.submit(Request(range(7), 9, request_id="A"))
for _ in range(3):
    scheduler.commit(scheduler.schedule(), [7])
for survive, positions in ((2, [8, 9]), (1, [4, 5, 6, 7, 8, 9])):
    group = scheduler.ledger.groups["A"]
    blocks = scheduler.manager.tables.ids(group.samples[0].row)
    scheduler.ledger.release(group)
    scheduler.cache.forget(blocks[survive:])
    plan = scheduler.schedule()
    assert plan.positions.tolist() == positions
    scheduler.fail(plan)  # it never ran: back to 10 tokens
    plan = scheduler.schedule()

# %% [markdown]
# :::{exercise}
# :label: ex-09-break
# **Break.** Five prompts of 1,002 tokens and ten of 20 wait for a pool of 50 blocks of 16. Show what a scheduler
# does that does not refuse the five at submission, and what ours does.
# :::
#
# :::{solution} ex-09-break
# :class: dropdown
# The first needs 63 blocks, never fits, and nobody overtakes it: the ten wait for ever, with 50 blocks free. (Ours, if one forced
# the group past its door, would still end it, since nothing runs and it has no room.) With the refusal the ten finish.
# :::

# %% tags=["hide-input"]
manager = BlockManager(50, 16, 16, 2048)
scheduler = Scheduler(manager)
for length in [1002] * 5 + [20] * 10:
    try:
        scheduler.submit(Request([1] * length, 4))
    except NeverFits as error:
        assert (error.needed, error.existing) == (63, 50)
while (plan := scheduler.schedule()) is not None:
    scheduler.commit(plan, [7] * len(plan.sample_rows))
assert scheduler.counts["finished"] == 10
forced = Group("long", Request([1] * 1002, 4), scheduler.ledger.submitted, 0.0)
scheduler.ledger.enter(forced)
assert scheduler.schedule() is None
assert scheduler.take_outputs()[0].completions[0].finish_reason == "out_of_blocks"

# %% [markdown]
# :::{exercise}
# :label: ex-09-refuse
# **Trace.** Eight blocks of 16, of which R0 holds five. Three are idle, and two of these hold the start of R1, which needs five
# blocks in all. Is it let in? How many free blocks does it need?
# :::
#
# :::{solution} ex-09-refuse
# :class: dropdown
# No. Three new blocks and two idle hits: five, and three are free. An idle hit costs a free block, since it ceases to be
# free. Had the hits been in use by R0, three would have been enough. A refusal changes nothing, so it may be tried again in
# every step.
# :::

# %% tags=["hide-input"]
manager = BlockManager(8, 16, 4, 128)
scheduler = Scheduler(manager, PrefixCache(manager.pool, 16))
scheduler.submit(Request(range(33), 1))
scheduler.commit(scheduler.schedule(), [7])
scheduler.submit(Request(range(50, 120), 10, request_id="R0"))
scheduler.commit(scheduler.schedule(), [7])
scheduler.submit(Request([*range(32), *range(200, 238)], 2, request_id="R1"))
from paged_kv.admission import lookup

before = repr(manager), manager.pool.epoch.tolist()
assert lookup(scheduler.ledger, scheduler.ledger.groups["R1"]) == (38, 5)
for _ in range(100):
    scheduler.door.refused = (-1, 0)
    assert scheduler.door.admit(99) == []
assert before == (repr(manager), manager.pool.epoch.tolist())
scheduler.abort("R0")
assert scheduler.schedule().new_tokens.tolist() == [38]

# %% [markdown]
# :::{exercise}
# :label: ex-09-implement
# **Implement.** A relief, `LeastWork`, that evicts whoever has the fewest tokens to replay. Run it on the opening's two chats
# with prompts of 6 and 3 tokens.
# :::
#
# :::{solution} ex-09-implement
# :class: dropdown
# Only `victim` changes: `min` over the candidates with `tokens_to_replay`. Whether it is wise is another matter: the chat that
# has just come in always goes first, and after a replay it is again the one with least to lose.
# :::

# %% tags=["hide-input"]
class LeastWork(Recompute):
    def victim(self, ledger, candidates):
        return min(candidates, key=lambda group: ledger.tokens_to_replay(group, after_hits=False))


scheduler = fresh(3, relief=LeastWork())
scheduler.submit(Request(range(3), 6, request_id="short"))
scheduler.submit(Request(range(10, 16), 6, request_id="long"))
finished = []
while (plan := scheduler.schedule()) is not None:
    finished += scheduler.commit(plan, [7] * len(plan.sample_rows))
assert {out.request_id: out.preemptions for out in finished} == {"long": 0, "short": 1}
assert all(len(out.completions[0].token_ids) == 6 for out in finished)

# %% [markdown]
# ## Further reading
#
# - Gentle: the chapters on scheduling in *Operating Systems: Three Easy Pieces* {cite}`arpaci2018ostep`: turnaround, response,
#   and why shortest-first starves.
# - The source of step-by-step batching: Orca {cite}`yu2022orca`; of memory on demand under it, the PagedAttention paper,
#   section 4.5 {cite}`kwon2023paged`.
# - Deep: Sarathi-Serve {cite}`agrawal2024sarathi` on chunks, and what a budget does to the tail of the time between tokens.
