# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The block manager
#
# Three requests have reserved stretches of a cache of 32 slots, one slot a token. The second has
# just finished. A fourth arrives and asks for twelve slots. Twelve are free.

# %%
from itertools import groupby

slots = ["R1"] * 12 + ["free"] * 8 + ["R3"] * 8 + ["free"] * 4
free = slots.count("free")
longest = max(len(list(run)) for owner, run in groupby(slots) if owner == "free")
print(f"{free} slots free, at most {longest} in a row")
print("a request for 12 in a row is", "served" if longest >= 12 else "refused")

# %% [markdown]
# Nothing is wrong with those twelve slots except that they are not neighbours. **The question.** Can
# a sequence live in pieces, and what must be kept so that nobody ever notices?
#
# :::{card} This chapter
# - **You need**: nothing but Python and a little NumPy.
# - **Exports**: `block_pool` (`BlockPool`, `OutOfBlocks`), `block_tables` (`BlockTables`,
#   `slot_mapping`), `block_manager` (`BlockManager`).
# - **Device**: CPU.
# - **Run time**: a few seconds.
# - **You are here** 00 tour · 01 sizing · 02 contiguous pool · **03 block manager** · 04 paged
#   attention · 05 guest model · 06 copy-on-write · 07 sampling · 08 prefix cache · 09
#   scheduling · 10 preemption · 11 decode kernel · 12 prefill kernel · 13 engine · 14 full speed
# :::
#
# Operating systems met this problem with programs in memory and answered it in the 1960s: cut the
# memory into frames of one size, give each program any frames that are free, and keep a table that
# says which frame holds which piece. We do the same to the cache {cite}`kwon2023paged`. The frame is
# a *block* of `block_size` tokens, written $B$. The table is a *block table*. What was one
# allocation of unknown final length becomes a series of small ones, each of the same size, each made
# when it is needed; and since all blocks are equal, any free one will do.
#
# There are three parts, and they know little of one another:
#
# | part | knows | does not know |
# |---|---|---|
# | `BlockPool` | ids, which are free, how often each is held | tokens, sequences, bytes |
# | `BlockTables` | which ids make up which sequence | which ids are free |
# | `BlockManager` | how to keep the two in step | the bytes |
#
# The bytes themselves come in the next chapter.
#
# ## A pool of ids
#
# The pool's state is two arrays and a queue.
#
# | field | type | written by | meaning |
# |---|---|---|---|
# | `ref_count` | int32 `[num_blocks]` | take, claim, release | how many rows hold the block |
# | `epoch` | int64 `[num_blocks]` | take | how often the block was taken to be overwritten |
# | the free queue | ordered set of ids | take, claim, release | next to be taken first |
#
# A count may seem too much where a flag would do: in this chapter it is only ever 0 or 1. But a
# count of 0 that is released again shows itself at once, and from chapter 6 on a block will have
# several holders. The epoch costs one addition and answers a question that will haunt us later: are
# the bytes in this block still the ones that I remember?
#
# > **I1.** A block is in the free queue if and only if its count is 0.
#
# Arguments are checked by `at_least` of chapter 01, which returns a number or refuses it by name.

# %% tags=["export:block_pool"]
"""Block ids: a queue of the free ones, and for each the number of rows that hold it.

The pool knows ids only.  It has never seen a token or a byte.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paged_kv.sizing import at_least

BlockIds: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]
FEW = 8  # up to so many elements a Python loop is quicker than a few array operations


class OutOfBlocks(RuntimeError):
    """Fewer blocks are free than an operation needs; nothing has changed.

    Attributes: `needed` and `free`, in blocks.
    """

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{needed} blocks needed, {free} free")
        self.needed = needed
        self.free = free


# %% tags=["export:block_pool"]
class BlockPool:
    """Hands out block ids from the front of a queue and takes them back at its end.

    State
        ref_count  int32 [num_blocks]: the number of rows that hold the block.
        epoch      int64 [num_blocks]: raised whenever the block is taken to be overwritten.
        the free queue: the ids of count 0, next to be taken first.
    Invariant I1: a block is in the free queue iff its count is 0.
    Source: vllm/v1/core/block_pool.py, which links the free blocks through the blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = at_least(1, "num_blocks", num_blocks)
        self.ref_count = np.zeros(num_blocks, np.int32)
        self.epoch = np.zeros(num_blocks, np.int64)
        self._free = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def free_ids(self) -> list[int]:
        """The free queue, next to be taken first; a copy."""
        return list(self._free)

    def __repr__(self) -> str:
        counts = " ".join(map(str, self.ref_count.tolist()))
        queue = " ".join(map(str, self._free)) or "-"
        free = f"{self.num_free} of {self.num_blocks} free"
        return f"BlockPool: {free}, counts {counts}, queue {queue}"


# %% [markdown]
# The queue is an `OrderedDict` used for its keys. That is a doubly linked list with an index: taking
# from the front, adding at the back and, above all, pulling one block *out of the middle* cost the
# same whatever its length. The last will matter when a finished sequence's blocks wait in the queue
# with their bytes intact and somebody asks for them again. A plain list would search.
#
# Three operations change the state. `take` removes blocks from the front, to be overwritten.
# `claim` adds a holder to blocks that are named, whether idle or held, and leaves their bytes in
# peace. `release` drops a holder, and a block that nobody holds any more joins the back of the queue.
# First-in, first-out is a decision: the block given back last is reused last, so its bytes survive
# for as long as possible. Today nobody cares; chapter 8 lives on it. `hold` and `drop` are `claim` and
# `release` without the check of the ids, for callers that read them off a table: at a hundred blocks a
# sequence the check costs as much as the rest.

# %% tags=["export:block_pool"]
def checked_ids(ids: BlockIds, num_blocks: int) -> list[int]:
    """`ids` as a list; ValueError unless all are blocks of the pool and none is named twice."""
    return _packed(ids, num_blocks).tolist()


def places_of(ids: BlockIds, num_blocks: int) -> NDArray[np.int64]:
    """`checked_ids` as int64 [n], to index arrays with."""
    return np.array(_packed(ids, num_blocks), np.int64)


def _packed(ids: BlockIds, num_blocks: int) -> array[int]:
    named, packed = ids.tolist() if isinstance(ids, np.ndarray) else list(ids), None
    try:
        packed = array("I", named)  # the quickest way to see that all are whole numbers, 0 or more
    except TypeError:
        raise ValueError(f"ids: {ids!r} are not block ids, which are whole numbers") from None
    except OverflowError:
        pass  # a number below 0, or a very large one: foreign
    if packed is None or max(named, default=0) >= num_blocks:
        bad = next(block for block in named if not 0 <= block < num_blocks)
        raise ValueError(f"ids: block {bad} is foreign, ids are 0 to {num_blocks - 1}")
    if len(set(named)) != len(named):
        raise ValueError(f"ids: {named} names a block twice")
    return packed


# %% tags=["export:block_pool"]
class BlockPool(BlockPool):  # type: ignore
    def take(self, count: int) -> list[int]:
        """Take `count` blocks from the front of the queue, to be overwritten.

        Returns: their ids.  Raises: OutOfBlocks, before anything changes.
        """
        if not 0 <= count <= len(self._free):
            raise OutOfBlocks(at_least(0, "count", count), len(self._free))
        ids = list(islice(self._free, count))
        for block in ids:
            del self._free[block]
        places = ids if count <= FEW else [np.array(ids)]  # single elements, or one array
        for place in places:
            self.ref_count[place] = 1
            self.epoch[place] += 1
        return ids

    def claim(self, ids: BlockIds) -> None:
        """Count one holder more for each of `ids`, idle or held; the bytes stay as they are."""
        self.hold(places_of(ids, self.num_blocks))

    def hold(self, places: NDArray[np.int64]) -> None:
        """`claim` unchecked, for a caller that found the ids in this pool's own records."""
        held = self.ref_count[places]
        self.ref_count[places] = held + 1
        if np.count_nonzero(held) < len(held):
            for block in places[held == 0].tolist():
                del self._free[block]


# %% tags=["export:block_pool"]
class BlockPool(BlockPool):  # type: ignore
    def release(self, ids: BlockIds) -> None:
        """Count one holder less for each of `ids`; those at 0 queue up in the order given."""
        self.drop(places_of(ids, self.num_blocks))

    def drop(self, places: NDArray[np.int64]) -> None:
        """`release` for a caller that has the ids from a table, where they stand once a row.

        Raises, with nothing changed: ValueError for a block that nobody holds.
        """
        held, idle = self.ref_count[places], places.tolist()
        counts = held.tolist()
        if 0 in counts:
            raise ValueError(f"ids: block {idle[counts.index(0)]} is free already, nobody holds it")
        self.ref_count[places] = held - 1
        if counts.count(1) < len(counts):
            idle = places[held == 1].tolist()
        for block in idle:
            self._free[block] = None

    def check(self) -> None:
        """Assert I1 and that no count is negative.  O(num_blocks): for tests, not for serving."""
        assert (self.ref_count >= 0).all(), "a count is negative"
        idle = np.flatnonzero(self.ref_count == 0).tolist()
        assert sorted(self._free) == idle, f"I1: free {sorted(self._free)}, count 0 {idle}"


# %% [markdown]
# Ids in one call must differ. The reason is a trap of NumPy: `ref_count[[5, 5]] += 1` adds **one**,
# because the right side is computed for both before either is stored. We could have used
# `np.add.at`; but a row never names a block twice, so a repeated id is a mistake worth reporting.
#
# A chat takes two blocks and gives them back. Then break it on purpose.

# %%
def attempt(action, *args):
    """Run it and print how it was refused."""
    try:
        print("done:", action(*args))
    except (ValueError, RuntimeError) as error:
        print(f"{type(error).__name__}: {error}")


pool = BlockPool(num_blocks=8)
chat_a = pool.take(2)
print(pool)
pool.release(chat_a)
attempt(pool.release, chat_a)  # a double free
attempt(pool.release, [8])  # a block of somebody else's pool
attempt(pool.claim, [5, 5])
attempt(pool.take, 9)
pool.check()
print(pool)

# %% [markdown]
# Each was refused with its argument named, and `check` finds the state as it was. A pool that took
# the double free would have put block 0 in the queue a second time, and two chats would one day have
# been given the same block: each overwrites the other, and the answers turn to nonsense far from
# the cause.
#
# :::{admonition} Predict
# :class: tip
# Someone writes to the state behind the pool's back: `pool.ref_count[3] = 1`. Does `check` object,
# and does the next `take(8)` fail?
# :::
#
# :::{dropdown} Reasoning
# Block 3 now has a holder and stands in the queue: I1 is broken and `check` says so. But `take` looks
# at the queue only, finds eight ids in it and hands out all of them, block 3 too. The damage is
# silent until somebody checks. That is why `check` exists, and why it runs after every step of the
# tests.
# :::

# %%
pool.ref_count[3] = 1
try:
    pool.check()
except AssertionError as error:
    print("check:", error)
print("take:", pool.take(8))

# %% [markdown]
# ## Rows of block ids
#
# A sequence of tokens is cut into *logical blocks*: tokens 0 to $B - 1$, tokens $B$ to $2B - 1$, and
# so on. Its row in the table says where each lies. All rows stand in one matrix, because a GPU kernel
# will want them so: one tensor, changed in place, in which a sequence keeps its row for life.
#
# | field | type | meaning |
# |---|---|---|
# | `table` | int32 `[max_seqs, max_blocks]` | the block id of each logical block, -1 behind the last |
# | `num_blocks` | int32 `[max_seqs]` | logical blocks of the row |
# | `seq_lens` | int32 `[max_seqs]` | tokens of the row, -1 where the row is closed |
# | `writable_until` | int32 `[max_seqs]` | how far the row may grow without asking anybody |
#
# The matrix is not as wasteful as it looks: at 16 tokens a block, a row for 4,096 tokens has 256
# entries of 4 bytes.

# %% tags=["hide-input"]
entries = 4096 // 16
print(f"{entries} entries, {entries * 4 / 1024:.0f} KiB a row")
print(f"K/V behind them, at 320 KiB a token: {4096 * 320 / 1024**2:.2f} GiB")

# %% [markdown]
# A table of 1 KiB stands guard over 1.25 GiB of keys and values, in a model that keeps 320 KiB a
# token. The first operations: open a row, put blocks behind its last one, read them, take it apart.
# Ids are taken on trust: whoever calls has them from the pool, and the manager's `check` would tell.

# %% tags=["export:block_tables"]
"""Block tables: which blocks hold each sequence, in order, in one matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paged_kv.sizing import at_least

TokenCounts: TypeAlias = int | NDArray[np.integer[Any]]  # one for all rows, or one a row


# %% tags=["export:block_tables"]
class BlockTables:
    """One row of block ids a sequence, all rows in one matrix.

    State
        table           int32 [max_seqs, max_blocks]: the id of each logical block, else -1.
        num_blocks      int32 [max_seqs]: logical blocks, those dropped in front included.
        seq_lens        int32 [max_seqs]: tokens, -1 where the row is closed.
        writable_until  int32 [max_seqs]: tokens to which the row may grow unasked.
        guarded         rows whose tail must be looked at before they grow.
        room            int32 [max_blocks + 1], constant: tokens that so many blocks hold.
    Invariant: a row names no block twice, and behind its last block stands -1.
    Source: the block table of arXiv 2309.06180, section 4.2; one matrix for all rows as
    in vllm/v1/worker/block_table.py.
    """

    def __init__(self, max_seqs: int, max_seq_len: int, block_size: int) -> None:
        at_least(1, "max_seqs", max_seqs)
        self.max_seq_len = at_least(1, "max_seq_len", max_seq_len)
        self.block_size = at_least(1, "block_size", block_size)
        self.table = np.full((max_seqs, -(-max_seq_len // block_size)), -1, np.int32)
        self.num_blocks = np.zeros(max_seqs, np.int32)
        self.seq_lens = np.full(max_seqs, -1, np.int32)
        self.writable_until = np.full(max_seqs, -2, np.int32)
        room = np.minimum(np.arange(self.table.shape[1] + 1) * block_size, max_seq_len)
        self.room = room.astype(np.int32)
        self.guarded: set[int] = set()
        self._closed = list(range(max_seqs))[::-1]
        self._checked_last = b""


# %% tags=["export:block_tables"]
class BlockTables(BlockTables):  # type: ignore
    def open(self) -> int:
        """Open an empty row and return its index, the sequence's own for life."""
        if not self._closed:
            raise ValueError(f"max_seqs = {len(self.table)}: every row is in use")
        row = self._closed.pop()
        self.seq_lens[row] = self.writable_until[row] = 0
        return row

    def ids(self, row: int) -> list[int]:
        """The blocks that `row` holds, first to last; dropped ones left out."""
        self._check_open(row)
        held: list[int] = self.table[row, : self.num_blocks[row]].tolist()
        return [block for block in held if block >= 0] if -1 in held else held

    def extend(self, row: int, ids: Sequence[int]) -> None:
        """Put `ids` behind the last block of `row`."""
        self._check_open(row)
        ids = checked_ids(ids, 2**31)
        end = (start := int(self.num_blocks[row])) + len(ids)
        if end > self.table.shape[1]:
            raise ValueError(f"ids: {end} blocks, but a row has {self.table.shape[1]} entries")
        self.table[row, start:end], self.num_blocks[row] = ids, end
        self.writable_until[row] = self.room[end]

    def detach(self, row: int) -> list[int]:
        """Close `row` and return the blocks it held, first to last; they are not released."""
        ids = self.ids(row)
        self.table[row, : self.num_blocks[row]] = -1
        self.num_blocks[row], self.seq_lens[row], self.writable_until[row] = 0, -1, -2
        self.guarded.discard(row)
        self._closed.append(row)
        self._checked_last = b""
        return ids

    def _check_open(self, row: int) -> None:
        whole = isinstance(row, (int, np.integer)) and not isinstance(row, bool)
        if not (whole and 0 <= row < len(self.table) and self.seq_lens[row] >= 0):
            raise ValueError(f"row = {row!r}: not an open row")


# %% [markdown]
# A chat may also shrink (a model that guessed several tokens ahead takes some back), lose its oldest
# blocks (a layer with a sliding window never looks at them again) or have one block put in another's
# place (when two chats share it and one wants to write). None of these needs the pool, so they
# belong here. `detach`, `shrink` and `drop_front` return ids and leave it to the caller to release
# them: the order in which blocks go back to the queue decides how long their bytes survive, and that
# is not the table's business.

# %% tags=["export:block_tables"]
class BlockTables(BlockTables):  # type: ignore
    def replace(self, row: int, index: int, block: int) -> int:
        """Put `block` at logical block `index` of `row`; return the id that stood there."""
        self._check_open(row)
        if not 0 <= index < self.num_blocks[row]:
            raise ValueError(f"index = {index}: row {row} has {self.num_blocks[row]} blocks")
        old = int(self.table[row, index])
        self.table[row, index] = block
        return old

    def shrink(self, row: int, num_tokens: int) -> list[int]:
        """Cut `row` to its first `num_tokens`; return the ids of the blocks it gives up."""
        self._check_open(row)
        if not 0 <= num_tokens <= self.seq_lens[row]:
            raise ValueError(f"num_tokens = {num_tokens}: row {row} has {self.seq_lens[row]}")
        keep = -(-num_tokens // self.block_size)
        cut: list[int] = self.table[row, keep : self.num_blocks[row]].tolist()
        self.table[row, keep : self.num_blocks[row]] = -1
        self.num_blocks[row], self.seq_lens[row] = keep, num_tokens
        self.guard(row)
        return [block for block in cut if block >= 0]

    def drop_front(self, row: int, count: int) -> list[int]:
        """Forget the first `count` blocks of `row`, leaving -1; return the ids given up."""
        self._check_open(row)
        if not 0 <= count * self.block_size <= self.seq_lens[row]:
            raise ValueError(f"count = {count}: row {row} has {self.seq_lens[row]} tokens")
        dropped: list[int] = self.table[row, :count].tolist()
        self.table[row, :count] = -1
        return [block for block in dropped if block >= 0]

    def guard(self, row: int) -> None:
        """Have the next append to `row` ask first whether another row holds its tail."""
        self._check_open(row)
        self.guarded.add(row)
        self.writable_until[row] = self.seq_lens[row]


# %% [markdown]
# And here is the reason for all of it, the translation from a token's position to its place. Token
# `p` lies in logical block `p // B` at offset `p % B`. The row translates the first part; the second
# is not translated at all. The *slot* is the place counted in tokens from the start of the pool.

# %% tags=["export:block_tables"]
def slot_mapping(
    table: NDArray[np.int32], rows: ArrayLike, positions: ArrayLike, block_size: int
) -> NDArray[np.int64]:
    """Slots of tokens: block id x block_size + offset, -1 where the row names no block.

    Args: table int32 [max_seqs, max_blocks]; rows and positions int [n], one a token; a
    position of -1 is padding, and so is its slot.
    Returns: int64 [n].  64 bits since a pool may hold more than 2^31 elements.
    """
    at = np.asarray(positions, np.int64)
    blocks = table[np.asarray(rows, np.int64), at // block_size].astype(np.int64)
    return np.where((blocks < 0) | (at < 0), -1, blocks * block_size + at % block_size)


# %%
tables = BlockTables(max_seqs=2, max_seq_len=16, block_size=4)
a = tables.open()
tables.extend(a, [0, 1, 5])
tables.seq_lens[a] = 9
print("row", tables.table[a])
print("slots of tokens 3, 4, 8, 12:", slot_mapping(tables.table, a, [3, 4, 8, 12], 4))

# %% [markdown]
# Tokens 3 and 4 lie in slots 3 and 4, neighbours by chance. Token 8 lies in slot 20, since its
# logical block 2 is physical block 5. Token 12 has no block, and its slot is -1, which everybody in
# this book agrees never to read or write through. One division, one look-up and one
# multiplication are all that paging costs per access, and a kernel pays for the look-up once a block
# rather than once a token.
#
# ## All or nothing
#
# The manager composes the two. It has no state of its own, and one sentence says what it is for:
#
# > **I2.** The count of a block is the number of rows that hold it.
#
# Its operations follow one pattern, *check, then mutate*: work out how many blocks the whole call
# needs, refuse if there are fewer, and only then begin to change things. A batch of 256 chats that
# finds no block for its last one must not have served the other 255: who would undo it?

# %% tags=["export:block_manager"]
"""The manager that keeps block tables and the pool in step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paged_kv.sizing import at_least


# %% tags=["export:block_manager"]
class BlockManager:
    """Sequences over one pool of blocks: add, append, finish; each of them all or nothing.

    State: `pool`, a BlockPool, and `tables`, a BlockTables; nothing besides.
    Invariant I2: the count of a block is the number of rows that hold it.
    """

    def __init__(self, num_blocks: int, block_size: int, max_seqs: int, max_seq_len: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.tables = BlockTables(max_seqs, max_seq_len, block_size)
        self.block_size = block_size

    def add(self, num_tokens: int) -> int:
        """Admit a sequence of `num_tokens` tokens and return its row.

        Raises: OutOfBlocks; ValueError for a length that no row can hold, or no row left.
        """
        if at_least(0, "num_tokens", num_tokens) > self.tables.max_seq_len:
            raise ValueError(f"num_tokens = {num_tokens}: at most {self.tables.max_seq_len}")
        needed = -(-num_tokens // self.block_size)
        if needed > self.pool.num_free:
            raise OutOfBlocks(needed, self.pool.num_free)
        row = self.tables.open()
        self.tables.extend(row, self.pool.take(needed))
        self.tables.seq_lens[row] = num_tokens
        return row

    def finish(self, row: int) -> None:
        """Close `row` and give its blocks back in table order."""
        self.pool.drop(np.array(self.tables.detach(row), np.int64))


# %% [markdown]
# Appending is the operation that runs all day: each step of the model adds one token to every chat in
# the batch, and only one step in $B$ of each chat needs a block. So the common case must cost next to
# nothing, and it can be decided with one comparison. `writable_until` holds, for each row, the length
# to which it may grow in the blocks it has. A row that stays within it needs no division, no look at
# the table, no look at the counts.
#
# What about a chat whose last block is partly full and held by another row too? It must not write
# there (that is invariant I3, of chapter 6). Whoever creates such a situation calls `guard`, which
# lowers `writable_until` to the present length; the next append to the row then falls out of the fast
# path and looks. Reading never looks at all.
#
# First the parts that a batch needs. A batch that comes again unchanged, as it does in almost every
# step, is recognised by its bytes and not checked twice. Another one is checked as a whole, and row by
# row only if it fails, to find out which row is to blame.

# %% tags=["export:block_tables"]
INT64 = np.dtype(np.int64)


def as_rows(rows: ArrayLike) -> NDArray[np.int64]:
    """One row, or a list of rows, as int64 [n]; ValueError for anything else."""
    given = np.asarray(rows)
    if given.ndim > 1 or (given.dtype.kind not in "iu" and given.size):
        raise ValueError(f"rows = {rows!r}: one row, or a list of rows, is needed")
    return given.astype(np.int64).reshape(-1)


def checked_rows(tables: BlockTables, rows: ArrayLike) -> NDArray[np.int64]:
    """`rows` as int64 [n]; ValueError unless all are open and none is named twice."""
    if not (isinstance(rows, np.ndarray) and rows.dtype is INT64 and rows.ndim == 1):
        rows = as_rows(rows)
    batch = rows.tobytes()
    if batch != tables._checked_last:
        if not (len(rows) > FEW and all_open_and_different(tables.seq_lens, rows)):
            named = rows.tolist()
            for row in named:
                tables._check_open(row)
            if len(set(named)) != len(named):
                raise ValueError(f"rows: {named} names a row twice")
        tables._checked_last = batch
    return rows


# %% tags=["export:block_tables"]
def all_open_and_different(lens: NDArray[np.int32], rows: NDArray[np.int64]) -> bool:
    """Whether all of `rows`, at least one, are open and none is named twice; in a few passes."""
    if rows.max() >= len(lens) or rows.min() < 0:
        return False
    return bool(np.count_nonzero(np.bincount(rows)) == len(rows) and lens[rows].min() >= 0)


def refuse_shared_tails(pool: BlockPool, tables: BlockTables, rows: set[int]) -> None:
    """ValueError if one of `rows` would write a block that another row holds (I3)."""
    for row in rows:
        index, offset = divmod(int(tables.seq_lens[row]), tables.block_size)
        block = tables.table[row, index] if offset else -1
        if block >= 0 and pool.ref_count[block] > 1:
            raise ValueError(f"rows: row {row} would write block {block}, held by others too")


# %% [markdown]
# The number of new tokens is one for the whole batch, or one for each row. Lengths are int32, and in
# NumPy a sum that passes $2^{31} - 1$ comes out negative without a word; so a number above
# `max_seq_len` is refused before anything is added to it.

# %% tags=["export:block_tables"]
def checked_counts(
    tables: BlockTables, rows: NDArray[np.int64], new_tokens: ArrayLike
) -> NDArray[np.int64]:
    """`new_tokens` as int64, one number or one a row; ValueError for what no row can take."""
    counts = np.asarray(new_tokens)
    numbers = counts.dtype.kind in "iu" or not counts.size
    if counts.shape not in ((), rows.shape) or not numbers:
        raise ValueError(f"new_tokens = {new_tokens!r}: a whole number, or one a row, is needed")
    if counts.size and not 0 <= counts.min() <= counts.max() <= tables.max_seq_len:
        raise ValueError(f"new_tokens = {counts}: 0 to {tables.max_seq_len} is needed")
    return counts.astype(np.int64)


def extend_each(
    tables: BlockTables, rows: NDArray[np.int64], counts: NDArray[np.int32] | int, ids: list[int]
) -> None:
    """Put the next of `ids` behind the last block of each of `rows`: `counts`, or counts[i]."""
    held, taken = tables.num_blocks[rows], iter(ids)
    ends = (held + counts).tolist()
    for row, start, end in zip(rows.tolist(), held.tolist(), ends, strict=True):
        for index in range(start, end):
            tables.table[row, index] = next(taken)
        tables.num_blocks[row] = end
        tables.writable_until[row] = tables.room[end]


def extend_by_one(
    tables: BlockTables, rows: NDArray[np.int64], held: NDArray[np.int32], ids: ArrayLike
) -> None:
    """Put one of `ids` behind the `held` blocks of each of `rows`."""
    tables.table[rows, held] = ids
    more = held + 1
    tables.num_blocks[rows] = more
    tables.writable_until[rows] = tables.room[more]


# %% [markdown]
# There are two ways to extend, as `take` and `checked_rows` have two, because NumPy has a price of
# entry: a few array operations cost as much as a Python loop over some eight elements. Below that the
# loop wins, above it the arrays do.

# %% tags=["export:block_manager"]
class BlockManager(BlockManager):  # type: ignore
    def append(self, rows: ArrayLike, new_tokens: TokenCounts = 1) -> list[int]:
        """Give each of `rows` room for `new_tokens` tokens more, one number or one a row.

        Returns: the ids that it took, to be overwritten; none in most steps.
        Raises, with nothing changed: OutOfBlocks; ValueError for a row that is not open,
        named twice, would pass max_seq_len or would write a block that others hold.
        """
        tables = self.tables
        rows = checked_rows(tables, rows)
        if type(new_tokens) is not int or not 0 <= new_tokens <= tables.max_seq_len:
            new_tokens = checked_counts(tables, rows, new_tokens)
        ends = tables.seq_lens[rows] + new_tokens
        beyond = (ends > tables.writable_until[rows]).nonzero()[0]
        one_each = type(new_tokens) is int and new_tokens == 1 and not tables.guarded
        taken = _grow(self, rows[beyond], ends[beyond], one_each) if len(beyond) else []
        tables.seq_lens[rows] = ends
        return taken

    def blocks_needed(self, rows: ArrayLike, new_tokens: ArrayLike = 1) -> int:
        """Blocks that `rows` need, all together, to take `new_tokens` tokens more each."""
        rows = checked_rows(self.tables, rows)
        ends = self.tables.seq_lens[rows] + checked_counts(self.tables, rows, new_tokens)
        return int(missing_blocks(self.tables, rows, ends).sum())


# %% tags=["export:block_manager"]
def missing_blocks(
    tables: BlockTables, rows: NDArray[np.int64], ends: NDArray[Any]
) -> NDArray[np.int32]:
    """How many blocks each of `rows` lacks to hold `ends` tokens."""
    missing: NDArray[np.int32] = -(-ends // tables.block_size) - tables.num_blocks[rows]
    return np.maximum(missing, 0)


def _grow(
    manager: BlockManager, rows: NDArray[np.int64], ends: NDArray[Any], one_each: bool
) -> list[int]:
    """Take and append the blocks that `rows` lack; all or nothing.  Returns their ids."""
    pool, tables = manager.pool, manager.tables
    if (longest := max(ends.tolist())) > tables.max_seq_len:
        raise ValueError(f"new_tokens: {longest}, a row holds {tables.max_seq_len} tokens")
    if one_each:  # each is beyond its blocks by one token
        taken = pool.take(len(rows))
        if len(rows) > FEW:
            extend_by_one(tables, rows, tables.num_blocks[rows], taken)
        else:
            extend_each(tables, rows, 1, taken)
        return taken
    guarded = tables.guarded.intersection(rows.tolist())
    refuse_shared_tails(pool, tables, guarded)
    missing = missing_blocks(tables, rows, ends)
    taken = pool.take(int(missing.sum()))
    extend_each(tables, rows, missing, taken)
    tables.guarded -= guarded
    return taken


# %% [markdown]
# The last body holds what a reader of the state needs: the invariants, executed; a plain snapshot for
# pictures; and the manager in one line.

# %% tags=["export:block_manager"]
class BlockManager(BlockManager):  # type: ignore
    def check(self) -> None:
        """Assert I1, I2, I3 and the form of every row.  O(max_seqs x max_blocks), for tests."""
        self.pool.check()
        tables = self.tables
        counts = np.zeros(self.pool.num_blocks, np.int64)
        for row in range(len(tables.table)):
            used, length = tables.num_blocks[row], tables.seq_lens[row]
            assert (tables.table[row, used:] == -1).all(), f"row {row}: an id behind its end"
            if length < 0:
                assert used == 0, f"row {row} is closed but holds blocks"
                continue
            ids = tables.ids(row)
            assert len(set(ids)) == len(ids), f"row {row} names a block twice"
            assert used * self.block_size >= length, f"row {row}: a token has no block"
            counts[ids] += 1
        assert (counts == self.pool.ref_count).all(), f"I2: rows {counts}, {self.pool.ref_count}"
        for row in np.flatnonzero(tables.seq_lens % self.block_size > 0).tolist():
            tail = tables.table[row, tables.seq_lens[row] // self.block_size]
            free_to_write = tables.writable_until[row] > tables.seq_lens[row]
            shared = tail >= 0 and counts[tail] > 1
            assert not (shared and free_to_write), f"I3: row {row} may write shared block {tail}"

    def snapshot(self, names: Mapping[str, int]) -> dict[str, Any]:
        """The state in plain Python, for `draw`; `names` maps the name of a sequence to its row."""
        return {
            "block_size": self.block_size,
            "num_blocks": self.pool.num_blocks,
            "free": self.pool.free_ids(),
            "tables": {name: self.tables.ids(row) for name, row in names.items()},
            "seq_lens": {name: int(self.tables.seq_lens[row]) for name, row in names.items()},
            "ref_counts": self.pool.ref_count.tolist(),
        }

    def __repr__(self) -> str:
        open_rows = np.flatnonzero(self.tables.seq_lens >= 0).tolist()
        rows = ", ".join(f"{row}: {self.tables.ids(row)}" for row in open_rows)
        return f"BlockManager: {{{rows}}}, free {self.pool.free_ids()}"


# %% [markdown]
# ## The run to do by hand
#
# Blocks of four tokens, eight blocks, three chats. Take a pencil: before each picture, write down
# the tables and the queue.

# %%
from IPython.display import display

from paged_kv.draw import draw_pool

manager = BlockManager(num_blocks=8, block_size=4, max_seqs=4, max_seq_len=32)
chats = {}


def show(event):
    """Check and draw the state after `event`."""
    manager.check()
    return draw_pool(manager.snapshot(chats), title=event)


chats["A"] = manager.add(6)
chats["B"] = manager.add(3)
chats["C"] = manager.add(5)
show("A arrives with 6, B with 3, C with 5")

# %% [markdown]
# A holds two blocks for six tokens, B one for three, C two for five. The empty slots, six of them,
# are all at the tails.
#
# :::{admonition} Predict
# :class: tip
# A generates two tokens, then a third. At which of the three does it get a block, and which?
# :::
#
# :::{dropdown} Reasoning
# A has 6 tokens in two blocks, so two slots are left: the first two tokens are free of charge. The
# third would be token 8, at the start of logical block 2, and the queue's front is block 5.
# :::

# %%
before = manager.pool.num_free
manager.append(chats["A"], 2)
print("after two tokens:", before - manager.pool.num_free, "blocks taken")
manager.append(chats["A"])
show("A + 2, then A + 1")

# %% [markdown]
# B takes two tokens more, and block 7 is the last one free. Then B finishes, and C runs on.

# %%
manager.append(chats["B"], 2)
display(show("B + 2"))
manager.finish(chats.pop("B"))
display(show("B finishes"))
manager.append(chats["C"], 4)
show("C + 4")

# %% [markdown]
# C took block 7, which stood in front, and not block 2, which had just come back. Its table reads 3,
# 4, 7. A fourth chat now comes with five tokens and gets what is left: blocks 2 and 6, B's old ones,
# neither of them next to the other. Its fifth token, position 4, is in logical block 1, which is
# block 6, at offset 0.

# %%
chats["D"] = manager.add(5)
display(show("D arrives with 5"))
slot = slot_mapping(manager.tables.table, chats["D"], 4, 4).item()
print(f"D's token 4: logical block {4 // 4}, block {slot // 4}, offset {slot % 4}")
print("tokens D may still add:", 4 * 2 - 5)
attempt(manager.append, [chats["D"], chats["A"]], np.array([3, 4]))
manager.check()
print(manager)

# %% [markdown]
# The last call asked for room for three tokens of D, which has it, and four of A, which needs a block
# that does not exist. It was refused as a whole; D did not grow. Chapter 10 is about what a server
# does next.
#
# Here is the whole run as a table. The cell compares each entry with one worked out by hand.

# %% tags=["hide-input"]
replay = BlockManager(8, 4, 4, 32)
chat_rows = {}
by_hand = [
    ("start", None, {}, [0, 1, 2, 3, 4, 5, 6, 7], 0),
    ("A arrives, 6", lambda: chat_rows.update(A=replay.add(6)),
     {"A": [0, 1]}, [2, 3, 4, 5, 6, 7], 2),
    ("B arrives, 3", lambda: chat_rows.update(B=replay.add(3)),
     {"A": [0, 1], "B": [2]}, [3, 4, 5, 6, 7], 3),
    ("C arrives, 5", lambda: chat_rows.update(C=replay.add(5)),
     {"A": [0, 1], "B": [2], "C": [3, 4]}, [5, 6, 7], 6),
    ("A + 2", lambda: replay.append(chat_rows["A"], 2),
     {"A": [0, 1], "B": [2], "C": [3, 4]}, [5, 6, 7], 4),
    ("A + 1", lambda: replay.append(chat_rows["A"], 1),
     {"A": [0, 1, 5], "B": [2], "C": [3, 4]}, [6, 7], 7),
    ("B + 2", lambda: replay.append(chat_rows["B"], 2),
     {"A": [0, 1, 5], "B": [2, 6], "C": [3, 4]}, [7], 9),
    ("B finishes", lambda: replay.finish(chat_rows.pop("B")),
     {"A": [0, 1, 5], "C": [3, 4]}, [7, 2, 6], 6),
    ("C + 4", lambda: replay.append(chat_rows["C"], 4),
     {"A": [0, 1, 5], "C": [3, 4, 7]}, [2, 6], 6),
    ("D arrives, 5", lambda: chat_rows.update(D=replay.add(5)),
     {"A": [0, 1, 5], "C": [3, 4, 7], "D": [2, 6]}, [], 9),
]
print(f"{'event':14}{'tokens':22}{'tables':44}{'free':18}wasted")
for event, act, tables_then, free_then, wasted_then in by_hand:
    if act:
        act()
    state = replay.snapshot(chat_rows)
    wasted = sum(4 * len(ids) - state["seq_lens"][name] for name, ids in state["tables"].items())
    assert (state["tables"], state["free"], wasted) == (tables_then, free_then, wasted_then), event
    tokens = " ".join(f"{name}:{length}" for name, length in state["seq_lens"].items())
    ids_text = " ".join(f"{name}{ids}" for name, ids in state["tables"].items()).replace(", ", ",")
    print(f"{event:14}{tokens:22}{ids_text:44}{' '.join(map(str, state['free'])):18}{wasted}")

# %% [markdown]
# In the built book you can take the same steps with your own hands:
#
# <paged-pool scenario="by-hand">
# The run by hand, step by step, appears here in the built book.
# </paged-pool>
#
# - Press "Next step" nine times and compare each line of its history with the table above.
# - When B finishes, 2 and 6 go to the back, behind 7; D takes them. On the left, where each chat
#   reserves, D is shut out with 8 slots free.
#
# **Turn the knob.** Give the manager of the pictures 16 blocks of 2 tokens and run them again: the
# same slots; expect 3 empty ones at the end where there were 9, nearly twice the entries in each
# table, and room for the call that was refused.
#
# ## What is still wasted
#
# Nothing is lost *between* blocks: any free block serves anybody, so free memory is usable memory.
# What is lost is at the tails. A sequence of $n$ tokens holds $\lceil n/B \rceil$ blocks, so at most
# $B - 1$ of its slots are empty, however long it is and however long it might have become. If lengths
# fall anywhere in a block with equal chance, the mean is $(B - 1)/2$. Let a few thousand random
# chats try it.

# %%
rng = np.random.default_rng(0)
lengths = rng.integers(1, 2001, 4000)
for block_size in (1, 4, 16, 64):
    big = BlockManager(2_100_000 // block_size + 5000, block_size, 1, 2000)
    empty = []
    for length in lengths.tolist():
        row = big.add(length)
        empty.append(len(big.tables.ids(row)) * block_size - length)
        big.finish(row)
    share = 100 * sum(empty) / (sum(empty) + lengths.sum())
    print(f"B = {block_size:2}: worst {max(empty):2} slots, mean {np.mean(empty):5.2f}, "
          f"expected {(block_size - 1) / 2:4.1f}, {share:.2f} % of what is held")
print(f"reserving 2,048 slots each: {100 * (1 - lengths.mean() / 2048):.1f} % empty")

# %% [markdown]
# At 16 tokens a block, 0.73 % of the slots held are empty. A reservation of 2,048 slots for each of
# these chats would leave 50.7 % empty. Smaller blocks waste less, but need longer tables and are
# read and copied in shorter pieces; larger blocks the reverse. Where the knee lies is a question for a GPU, and
# chapter 11 asks it there.
#
# :::{admonition} Predict
# :class: tip
# Hundreds of chats come and go in random order, growing a token at a time. The queue's order is soon a
# complete jumble. Does the waste grow with time, as it does in a heap that fragments?
# :::
#
# :::{dropdown} Reasoning
# No. Fragmentation needs objects of different sizes, or neighbours that matter. Here every hole is
# exactly one block and every request is for single blocks. Jumbled ids change which memory is used,
# not how much.
# :::

# %% tags=["hide-input"]
churn = BlockManager(num_blocks=2000, block_size=16, max_seqs=64, max_seq_len=1024)
alive, shares = [], []
for step in range(3000):
    while len(alive) < 40:
        alive.append(churn.add(int(rng.integers(1, 400))))
    if rng.random() < 0.2:
        churn.finish(alive.pop(int(rng.integers(len(alive)))))
    growing = [row for row in alive if churn.tables.seq_lens[row] < 1024]
    churn.append(growing)
    held = 2000 - churn.pool.num_free
    shares.append(100 * (1 - churn.tables.seq_lens[alive].sum() / (16 * held)))
churn.check()
print(f"empty share of held slots: steps 0-999 {np.mean(shares[:1000]):.1f} %, "
      f"2000-2999 {np.mean(shares[2000:]):.1f} %")
queue = churn.pool.free_ids()
neighbours = sum(b - a == 1 for a, b in zip(queue, queue[1:]))
print(f"of {len(queue) - 1} neighbours in the queue, {neighbours} are neighbours in memory")


# %% [markdown]
# The share of empty slots is about the same early and late, though hardly any two blocks that follow each
# other in the queue still lie side by side.
#
# ## What a step costs
#
# A model on a fast GPU makes a token in a few milliseconds, and while it waits for the bookkeeping it
# does nothing. So the bookkeeping of a step has to be counted in microseconds.
#
# The hypothesis: most rows need no block, so one step should cost about a dozen NumPy operations,
# whatever the number of rows, plus a little for each row that does need one, a sixteenth of them. A
# manager that handles sequences one by one pays for each of them in each step. At a single sequence
# there is nothing to gain: NumPy's price of entry is all there is.
#
# The comparison below was measured outside this notebook by `benchmarks/bookkeeping.py` against the
# cache manager of vLLM 0.23, both growing the same sequences by one sampled token, taking turns in one
# process. It shows accounting for plain growth only: no prefix hashing, no scheduling, and not what
# a server as a whole gains.

# %% tags=["hide-input"]
import json

import matplotlib.pyplot as plt

from paged_kv.draw import book_style

book_style()
result = json.load(open("../benchmarks/results/bookkeeping.json"))
measured = result["rows"]
running = [row["running"] for row in measured]
fig, ax = plt.subplots(figsize=(6.4, 3.6))
theirs = [row["vllm_us"] for row in measured]
ours = [row["ours_us"] for row in measured]
ax.loglog(running, theirs, "s--", label="vLLM 0.23, one sequence at a time")
ax.loglog(running, ours, "o-", label="BlockManager, whole batch")
ax.set_xticks(running, [str(n) for n in running])
ax.set(xlabel="running sequences", ylabel="us a decode step")
ax.legend()
plt.show()
print("measured:", result["device"], "numpy", result["versions"]["numpy"], result["statistic"])
for row in measured:
    print(f"measured: {row['running']:5} running: {row['ours_us']:8.1f} us, "
          f"vLLM {row['vllm_us']:8.1f} us, {row['x_vllm']:.1f} times")

# %% [markdown]
# *Figure: time of one decode step's bookkeeping against the number of running sequences, both axes
# logarithmic. Ours rises slowly; vLLM's rises in proportion.*
#
# As predicted, ours rises far more slowly than the number of rows, and at one sequence next to
# nothing is gained. Both are in Python, both on
# one core of the machine named above. vLLM's manager does more than ours at this point of the book (it
# serves several groups of layers at once); when ours has learned prefixes and scheduling, chapters 8
# and 9 measure again.
#
# :::{admonition} Predict
# :class: tip
# The decode batch is the same from step to step and `checked_rows` recognises it by its bytes. What if
# every step comes with a batch in a different order? How often does it look at a single row?
# :::
#
# :::{dropdown} Reasoning
# Each is checked in full, but not row by row: the largest and the smallest row, how many different
# ones there are, and the shortest length say that all is well, in a few passes over the batch. Only up
# to eight rows a loop is quicker, and of larger ones only a batch that fails needs it, to name the culprit. A
# scheduler that keeps its rows in one order still saves the passes. The cell counts the calls instead
# of timing them.
# :::

# %% tags=["hide-input"]
from unittest.mock import patch

crowd = BlockManager(num_blocks=800, block_size=16, max_seqs=256, max_seq_len=256)
batch = np.array([crowd.add(16) for _ in range(256)])
shuffles = [rng.permutation(256) for _ in range(10)]
look = BlockTables._check_open
cases = [("same order", [batch] * 10), ("shuffled", shuffles),
         ("eight rows, shuffled", [rng.permutation(8) for _ in range(10)])]
for name, batches in cases:
    with patch.object(BlockTables, "_check_open", autospec=True, side_effect=look) as counted:
        for rows_of_step in batches:
            crowd.append(rows_of_step)
    print(f"{name}: {counted.call_count} rows looked at in {len(batches)} steps")
try:
    crowd.append(np.append(batch[1:], batch[-1]))
except ValueError as error:
    print("one row twice:", "..." + str(error)[-30:])

# %% [markdown]
# ## Break it
#
# A manager is only as good as what it does with nonsense. Each of these must name the argument that
# is wrong, and none may leave a trace.

# %%
fragile = BlockManager(num_blocks=4, block_size=4, max_seqs=2, max_seq_len=12)
a = fragile.add(6)
before = fragile.snapshot({"A": a})
attempt(fragile.add, 13)  # longer than a row
attempt(fragile.add, 12)  # 3 blocks, 2 are free
attempt(fragile.append, a, 7)  # 13 tokens
attempt(fragile.append, a, -1)
attempt(fragile.append, a, 1.5)
attempt(fragile.append, a, 2**31 - 6)  # would wrap an int32
attempt(fragile.append, [a, a])
attempt(fragile.append, [1])  # not open
attempt(fragile.finish, 7)
attempt(fragile.tables.shrink, a, 9)
fragile.check()
assert fragile.snapshot({"A": a}) == before

# %% [markdown]
# One danger no argument check can see: a finished chat's blocks are free, but its bytes are still
# there, and so is anybody's stale copy of its table. We cannot make stale copies impossible. We can make
# them detectable, and that is what the epoch is for.

# %%
stale = fragile.tables.ids(a)
seen = fragile.pool.epoch[stale].tolist()
fragile.finish(a)
print("same bytes as I knew?", fragile.pool.epoch[stale].tolist() == seen)
b = fragile.add(12)
print("and after B took them?", fragile.pool.epoch[stale].tolist() == seen, fragile.tables.ids(b))

# %% [markdown]
# Between the two calls the blocks were free and yet intact. Stale bytes in a free block harm nobody,
# since attention reads only slots below a sequence's length. They are even worth something, as chapter
# 8 will show.
#
# ## Mistakes in circulation
#
# :::{admonition} Check it yourself
# :class: warning
# It is said that a table for 1,000,000 tokens guards ~~320 GiB at 320 KiB a token~~. That is the value
# for 2^20 tokens.
# :::

# %%
print("at 320 KiB a token and 16 tokens a block:")
for tokens in (10**6, 2**20):
    entries = -(-tokens // 16)
    print(f"{tokens:9,} tokens: {entries:6,} entries, {entries * 4:7,} B of table, "
          f"{tokens * 320 / 2**20:.1f} GiB of K/V")

# %% [markdown]
# ## State card
#
# | class | state | invariants | what breaks next |
# |---|---|---|---|
# | `BlockPool` | `ref_count`, `epoch`, free queue | I1: free iff count 0 | a block with two holders (chapter 6) |
# | `BlockTables` | `table`, lengths, `writable_until` | no id twice in a row | a shared tail (chapter 6) |
# | `BlockManager` | the two above | I2: count = rows that hold it | what to do when it refuses (chapter 10) |
#
# All of this moved ids about. There is still not a single key or value in this book's cache. The next
# chapter adds the bytes and the attention that finds them.
#
# ## Real world
#
# - vLLM keeps the same three parts: `vllm/v1/core/block_pool.py` holds the blocks, and the queue of
#   `vllm/v1/core/kv_cache_utils.py` links the free ones through the block objects themselves, which
#   gives removal from the middle without a dictionary; `vllm/v1/core/kv_cache_manager.py` allocates
#   per request; the worker's `vllm/v1/worker/block_table.py` is one int32 matrix on the device.
# - SGLang allocates at the grain of a token or of a block (`srt/mem_cache/allocator/token.py` and
#   `srt/mem_cache/allocator/paged.py`) and maps requests to slots in `srt/mem_cache/memory_pool.py`,
#   a matrix `req_to_token` with one entry a *token*: no division, and $B$ times the entries.
# - TensorRT-LLM has a block manager in C++ (`cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp`); its free
#   queues, by priority, are in `cpp/tensorrt_llm/batch_manager/evictionPolicy.cpp`.
# - vAttention {cite}`prabhu2024vattention` leaves the table to the GPU's own virtual memory: contiguous
#   addresses, paged underneath. The indirection does not go away; the hardware walks it.
#
# ## Exercises
#
# :::{exercise}
# :label: ex-03-compute
# **Compute.** A sequence of 1,000 tokens with $B = 16$: how many blocks, how many empty slots, in which
# logical block and at which offset is token 999?
# :::
#
# :::{solution} ex-03-compute
# :class: dropdown
# 63 blocks hold 1,008 slots, so 8 are empty. Token 999 is in logical block 62 at offset 7.
# :::

# %% tags=["hide-input"]
assert (-(-1000 // 16), 63 * 16 - 1000, divmod(999, 16)) == (63, 8, (62, 7))

# %% [markdown]
# :::{exercise}
# :label: ex-03-trace
# **Trace.** In the run by hand, let A finish right after D has arrived. What is in the queue? Chat E
# arrives with 9 tokens: what is its table, and what is in the queue then?
# :::
#
# :::{solution} ex-03-trace
# :class: dropdown
# A gives back 0, 1, 5 in this order. E takes all three: its table is 0, 1, 5 and the queue is empty.
# :::

# %% tags=["hide-input"]
replay.finish(chat_rows.pop("A"))
assert replay.pool.free_ids() == [0, 1, 5]
chat_rows["E"] = replay.add(9)
assert replay.tables.ids(chat_rows["E"]) == [0, 1, 5] and not replay.pool.num_free
replay.check()

# %% [markdown]
# :::{exercise}
# :label: ex-03-break
# **Break.** Write a `naive_release` that trusts its caller, release a block twice, and let two chats
# arrive. What does each see? Which invariant would have told?
# :::
#
# :::{solution} ex-03-break
# :class: dropdown
# With a plain list for a queue, the block stands in it twice and both chats get it: each overwrites
# the other's tokens, and no exception is raised anywhere. I2 tells, since two rows hold a block whose
# count says otherwise. (The `OrderedDict` happens to hide it, as a key cannot stand in it twice.)
# :::

# %% tags=["hide-input"]
naive_queue = [0, 1]


def naive_release(block):
    naive_queue.append(block)


taken = naive_queue.pop(0)
naive_release(taken)
naive_release(taken)
naive_queue.pop(0)  # block 1 goes to a third chat
first_chat, second_chat = naive_queue.pop(0), naive_queue.pop(0)
print("two chats in block", first_chat, "and block", second_chat)
assert first_chat == second_chat

# %% [markdown]
# :::{exercise}
# :label: ex-03-implement
# **Implement.** `add_all(manager, lengths)`: admit several sequences at once, all or none. When blocks
# are short it raises `OutOfBlocks` and nothing has changed.
# :::
#
# :::{solution} ex-03-implement
# :class: dropdown
# Count first: the sum of the blocks of all. The order matters; adding one by one and finishing those
# that were added when one fails would leave the queue in another order than before.
# :::

# %% tags=["hide-input"]
def add_all(manager, lengths):
    needed = sum(-(-length // manager.block_size) for length in lengths)
    if needed > manager.pool.num_free:
        raise OutOfBlocks(needed, manager.pool.num_free)
    return [manager.add(length) for length in lengths]


eager = BlockManager(num_blocks=4, block_size=4, max_seqs=4, max_seq_len=16)
attempt(add_all, eager, [8, 5, 1])
assert eager.pool.free_ids() == [0, 1, 2, 3]
assert add_all(eager, [8, 5]) == [0, 1]
eager.check()

# %% [markdown]
# :::{exercise}
# :label: ex-03-queue
# **Compute.** Ten blocks are free and one chat after another takes two blocks and gives them back. For
# how many further chats do the first one's bytes survive if the free ids are a queue, and if they are
# a stack?
# :::
#
# :::{solution} ex-03-queue
# :class: dropdown
# In the queue four other chats take the other eight blocks first; the fifth overwrites them. With a
# stack the very next chat takes the blocks just given back: none.
# :::

# %% tags=["hide-input"]
line = BlockPool(10)
mine = line.take(2)
line.release(mine)
survived = 0
while set(other := line.take(2)).isdisjoint(mine):
    line.release(other)
    survived += 1
assert survived == 4

# %% [markdown]
# ## Further reading
#
# - Gentle: the memory-allocation chapter of the xv6 book {cite}`cox2022xv6`, whose allocator keeps
#   its free list inside the free memory itself and fills what is freed with junk.
# - The source of the idea: sections 3 and 4 of the PagedAttention paper {cite}`kwon2023paged`.
# - Deep: vAttention {cite}`prabhu2024vattention`, on what it takes to get the same without a block table.
