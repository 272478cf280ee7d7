# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Copy-on-write
#
# A user asks for two answers to one question. The question's keys and values are computed once, and
# since a block table is a short list of numbers, the second answer gets a copy of the list. Here a
# block is four characters of a string, and a token is a character.

# %%
cache = list("What is best?...")  # four blocks of four slots
table_a = [0, 1, 2, 3]
table_b = list(table_a)  # the second answer: the same blocks


def put(table, position, token):
    cache[table[position // 4] * 4 + position % 4] = token


put(table_a, 13, "a")
put(table_b, 13, "b")
print("answer A reads back", cache[table_a[3] * 4 + 1])

# %% [markdown]
# A wrote an a and reads a b. Had we copied the whole cache instead, both would be right, and the
# question would lie in memory twice. **The question.** Can many sequences share memory and each
# still write as if it were alone?
#
# :::{card} This chapter
# - **You need**: chapter 3; from chapter 4 the store, to see real bytes.
# - **Exports**: `copy_on_write` (`fork`, `fork_many`, `make_writable`, `blocks_needed`,
#   `copies_needed`, `rewire`, `rewind`, `blocks_held`).
# - **Device**: CPU.
# - **Run time**: a few seconds.
# - **You are here**: 00 tour · 01 sizing · 02 contiguous pool · 03 block manager · 04 paged
#   attention · 05 guest model · **06 copy-on-write** · 07 sampling · 08 prefix cache · 09
#   scheduling · 10 preemption · 11 decode kernel · 12 prefill kernel · 13 engine · 14 full speed
# :::
#
# Unix answered the same question for programs. `fork` gives the child the parent's memory, page by
# page the same, and whoever writes to a page that is still shared gets a copy of that page first.
# Most pages are never written, so most are never copied. Ours is the easier case: a sequence is
# written at its end only.
#
# Nothing new has to be stored for it. The counts of chapter 3 say who shares what; this chapter
# adds operations over `BlockManager`, and no class.
#
# ## Forking
#
# The state that a fork touches is known: one new line of `table`, `num_blocks` and `seq_lens`, and
# one holder more in `ref_count` for each block of the parent. No block is taken and no byte is
# read, so a fork cannot run out of blocks. It can run out of rows.
#
# Invariant I2 is unchanged, but here it first says something: a count is the number of *rows*. A row
# whose window has slid on has -1 in front, and those entries count for nobody.

# %% tags=["export:copy_on_write"]
"""Sequences that share blocks: fork, copy before writing, rewire beams, rewind.

Functions over a BlockManager; they keep no state of their own.  They move ids: the bytes
follow when the caller hands the (source, destination) pairs to `KVStore.copy_blocks`.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paged_kv.block_manager import BlockManager
from paged_kv.block_tables import BlockTables, TokenCounts, as_rows, checked_rows
from paged_kv.block_pool import BlockPool, OutOfBlocks


# %% tags=["export:copy_on_write"]
def fork_many(manager: BlockManager, parents: ArrayLike) -> list[int]:
    """Open one row for each of `parents`, over the same blocks and of the same length.

    Args: `parents`, rows [n]; a row named twice gets two children.
    Returns: the new rows [n].  Takes no block and reads no byte.
    Raises: ValueError for a parent that is not open or too few rows left; nothing changes.
    Keeps I2: each block of a parent has one holder more for each child.
    """
    pool, tables = manager.pool, manager.tables
    parent = as_rows(parents)
    times = Counter(parent.tolist())
    checked_rows(tables, list(times))
    left = int((tables.seq_lens < 0).sum())
    if len(parent) > left:
        raise ValueError(f"parents: {len(parent)} rows are needed, {left} are left")
    children = [tables.open() for _ in range(len(parent))]
    width = int(tables.num_blocks[parent].max(initial=0))
    tables.table[children, :width] = tables.table[parent, :width]
    for column in (tables.num_blocks, tables.seq_lens):
        column[children] = column[parent]
    for row, count in times.items():
        pool.ref_count[tables.ids(row)] += count
    _guard_all(tables, [*times, *children])
    return children


def fork(manager: BlockManager, row: int) -> int:
    """Open a second row over the blocks of `row`; return it.  As `fork_many` with one parent."""
    return fork_many(manager, [row])[0]


def _guard_all(tables: BlockTables, rows: list[int]) -> None:
    """`BlockTables.guard` for many open rows: each must look before it grows."""
    tables.guarded.update(rows)
    tables.writable_until[rows] = tables.seq_lens[rows]


# %% [markdown]
# The blocks of an open row have a count of at least 1, so they are not in the free queue, and adding
# holders is plain arithmetic. One row names no block twice, which is what makes `+=` right; two
# parents may hold the same block, so each has an addition of its own.
#
# Both the parent and the children are guarded: from now on each of them looks before it writes.
# Here is chat A with a prompt of six tokens in a pool of six blocks, and B, its fork.

# %%
from paged_kv.block_manager import BlockManager
from paged_kv.draw import draw_pool

manager = BlockManager(num_blocks=6, block_size=4, max_seqs=8, max_seq_len=24)
chats = {"A": manager.add(6)}
chats["B"] = fork(manager, chats["A"])
manager.check()
draw_pool(manager.snapshot(chats), title="A holds 6 tokens, B is its fork")

# %% [markdown]
# Two rows, twelve tokens, two blocks. What that is worth depends on the prompt.
#
# :::{admonition} Predict
# :class: tip
# Four samples are drawn for a prompt of 2,000 tokens, in a model that keeps 320 KiB a token. How much
# memory does the prompt take if each sample has its own, how much if they fork? By what factor?
# :::
#
# :::{dropdown} Reasoning
# Once: 125 blocks of 16 tokens, 5 MiB each. Four times that apart. The factor is four, exactly: the
# prompt is stored once in place of four times, and 2,000 is a multiple of 16.
# :::

# %%
from paged_kv.sizing import KVSpec, format_bytes

spec = KVSpec(num_layers=80, num_kv_heads=8, head_size=128, dtype="fp16")
token = spec.bytes_per_token
prompt = 2000 * token
print(f"a token {format_bytes(token)}, a block {format_bytes(16 * token)}")
print(f"shared {format_bytes(prompt)} in {2000 // 16} blocks, apart {format_bytes(4 * prompt)}, "
      f"saved {format_bytes(3 * prompt)}: {4 * prompt / prompt:.1f} times")
print(f"ten slots of a tail: {format_bytes(10 * token, 3)}")

# %% [markdown]
# Sharing takes the prompt from 2.44 GiB to 625 MiB and saves 1.83 GiB. A prompt of 2,010 tokens would
# have a last block with ten filled slots, 3.125 MiB of useful bytes. That block is where the
# trouble starts.
#
# In the built book a fork can be watched step by step:
#
# <paged-pool scenario="copy-on-write">
# The fork, step by step, appears here in the built book.
# </paged-pool>
#
# - Step through it. The fork copies nothing on the right, and six tokens on the left. A's write
#   copies block 1 into block 2; B then writes in place.
# - Start over, press +1 on A twice, fork, then +1 again: the shared block is full, so nothing is
#   copied.
#
# ## Who may write where
#
# > **I3.** Nobody writes a block that another row reads.
#
# Reading needs no care. Sharing changes nothing about where a token lies, so attention never looks at
# a count. All care goes into writing, and a sequence writes in one place: behind its last token. There
# are three cases.
#
# | the last block of the writer | shared? | what happens |
# |---|---|---|
# | full for the writer | either | it gets a fresh block; nothing is copied |
# | partly filled | no, count 1 | it writes in place |
# | partly filled | yes, count 2 or more | it copies that block, then writes into the copy |
#
# "Full for the writer" is the point that is often missed. A shared block that is full is never
# written, so it is never copied, however many rows hold it. A divergence costs at most one block, not
# the sequence.
#
# So the test is one comparison in the write path. A row is guarded if its `writable_until` is no
# larger than its length; only such a row with a partly filled tail has to look at a count.

# %% tags=["export:copy_on_write"]
def guarded_tails(
    manager: BlockManager, rows: ArrayLike, new_tokens: TokenCounts = 1
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
    """Of `rows`, those about to write into a partly filled block that they must look at first.

    Returns three arrays [n]: the rows, the logical index of that block, its id.
    Raises: ValueError for a bad row, or a length that no row can have.
    """
    tables = manager.tables
    rows = checked_rows(tables, rows)
    lens = tables.seq_lens[rows].astype(np.int64)
    more = np.broadcast_to(np.asarray(new_tokens), lens.shape)
    whole = more.dtype.kind in "iu" or not more.size
    if not whole or (more < 0).any() or (lens + more > tables.max_seq_len).any():
        raise ValueError(f"new_tokens = {new_tokens}: a row holds 0 to {tables.max_seq_len} tokens")
    index, offset = np.divmod(lens, manager.block_size)
    asked = (tables.writable_until[rows] <= lens) & (offset > 0) & (more > 0)
    return rows[asked], index[asked], tables.table[rows[asked], index[asked]]


def must_copy(ref_count: NDArray[np.int32], blocks: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Which writers of `blocks`, one writer an entry, need a copy; the last holder does not.

    With r holders of a block of whom k write, min(k, r - 1) copy: as if they came in turn.
    """
    order = np.argsort(blocks, kind="stable")
    first = np.searchsorted(blocks[order], blocks[order])
    turn = np.empty(len(blocks), np.int64)
    turn[order] = np.arange(len(blocks)) - first
    return turn < ref_count[blocks] - 1


# %% [markdown]
# `must_copy` deals with several writers of one block in one step. Let them come one after the other.
# The first finds $r$ holders, copies, and lets go of the block; the second finds $r - 1$. Whoever
# finds a count of 1 is the last holder and writes in place. If all $r$ write, that is the last of
# them, and $r - 1$ copies are made; if only $k < r$ write, each copies, since those who do not
# write still read. Together: $\min(k, r - 1)$ copies. To give each writer its turn without a loop, sort them by
# block and number them within each group.

# %%
import numpy as np

counts = np.array([1, 4, 2], np.int32)  # holders of blocks 0, 1, 2
writers = np.array([1, 2, 1, 0, 2, 1], np.int32)  # the block that each of six rows writes
for block, copies in zip(writers, must_copy(counts, writers)):
    print(f"block {block}, {counts[block]} holders:", "copies" if copies else "writes in place")

# %% [markdown]
# Block 1 has four holders and three of them write: all three copy, and the fourth keeps the
# original. Both holders of block 2 write: the first copies, the second stays.
#
# ## Make room, then write
#
# `make_writable` makes it so for a batch. It follows chapter 3: count everything that the step will
# need, full tails *and* copies, for all rows; refuse if there is too little; only then change
# anything. Counting only the copies would be a trap: the copies are made, and the `append` behind them
# finds no block for the next row.

# %% tags=["export:copy_on_write"]
def copies_needed(
    manager: BlockManager, rows: ArrayLike, new_tokens: TokenCounts = 1
) -> int:
    """Blocks to be copied before `rows`, all together, write `new_tokens` tokens more each."""
    _, _, blocks = guarded_tails(manager, rows, new_tokens)
    return int(must_copy(manager.pool.ref_count, blocks).sum())


def blocks_needed(
    manager: BlockManager, rows: ArrayLike, new_tokens: TokenCounts = 1
) -> int:
    """Blocks that the step takes from the pool: behind full tails, and for copies."""
    copies = copies_needed(manager, rows, new_tokens)
    return copies + manager.blocks_needed(rows, new_tokens)


def make_writable(
    manager: BlockManager, rows: ArrayLike, new_tokens: TokenCounts = 1
) -> list[tuple[int, int]]:
    """Give each of `rows` a tail of its own, so that `append(rows, new_tokens)` is allowed.

    Returns: (source, destination) block ids; copy these bytes before anybody writes.
    Raises, with nothing changed: OutOfBlocks, counting what the append will take as well;
    ValueError as `guarded_tails`.  Where no row has a guarded tail, it leaves it to `append`.
    Keeps I3.  A tail that is written in place gets a new epoch: its bytes will differ.
    """
    pool, tables = manager.pool, manager.tables
    writers, index, blocks = guarded_tails(manager, rows, new_tokens)
    if not len(writers):
        return []
    copied = must_copy(pool.ref_count, blocks)
    sources = blocks[copied]
    needed = len(sources) + manager.blocks_needed(rows, new_tokens)
    if needed > pool.num_free:
        raise OutOfBlocks(needed, pool.num_free)
    fresh = pool.take(len(sources))
    tables.table[writers[copied], index[copied]] = fresh
    np.subtract.at(pool.ref_count, sources, 1)
    pool.epoch[blocks[~copied]] += 1
    return list(zip(sources.tolist(), fresh, strict=True))


# %% [markdown]
# The counts of the sources can be lowered without asking the pool: a block is copied only while
# somebody else still holds it, so none of them reaches 0 and the free queue has no part in it.
#
# Now the run to do by hand, in which A writes its seventh token, number 6, and then B its own.
#
# :::{admonition} Predict
# :class: tip
# Which blocks do A and B hold after A's token, and what are the counts of blocks 0, 1 and 2? And
# after B's token?
# :::
#
# :::{dropdown} Reasoning
# Token 6 belongs in logical block 1, which is block 1, partly filled and held twice. A takes block 2,
# the front of the queue, and lets go of block 1. Now B holds block 1 alone and writes in place:
# nothing changes but its length. Block 0 is full for both, stays shared and is never copied.
# :::

# %%
def step(*names):
    """One more token for each chat named; return the copies to make."""
    rows = [chats[name] for name in names]
    pairs = make_writable(manager, rows)
    manager.append(rows)
    manager.check()
    return pairs


before = manager.snapshot(chats)
print("A writes token 6, copies", step("A"))
draw_pool(manager.snapshot(chats), title="A has written token 6", before=before)

# %%
print("B writes token 6, copies", step("B"))
draw_pool(manager.snapshot(chats), title="B has written token 6")

# %% [markdown]
# Here is the run as a table, each entry compared with one worked out on paper.

# %% tags=["hide-input"]
manager, chats = BlockManager(6, 4, 8, 24), {}
by_hand = [
    ("A holds the prompt", lambda: chats.update(A=manager.add(6)),
     {"A": [0, 1]}, [1, 1, 0], [2, 3, 4, 5], None),
    ("B forks", lambda: chats.update(B=fork(manager, chats["A"])),
     {"A": [0, 1], "B": [0, 1]}, [2, 2, 0], [2, 3, 4, 5], None),
    ("A writes token 6", lambda: step("A"),
     {"A": [0, 2], "B": [0, 1]}, [2, 1, 1], [3, 4, 5], [(1, 2)]),
    ("B writes token 6", lambda: step("B"),
     {"A": [0, 2], "B": [0, 1]}, [2, 1, 1], [3, 4, 5], []),
]
print(f"{'event':20}{'tables':20}{'counts 0, 1, 2':16}{'free':12}copies")
for event, act, tables_then, counts_then, free_then, copies_then in by_hand:
    copies = act()
    state = manager.snapshot(chats)
    found = (state["tables"], state["ref_counts"][:3], state["free"], copies)
    assert found == (tables_then, counts_then, free_then, copies_then), event
    rows_text = " ".join(f"{name}{ids}" for name, ids in state["tables"].items()).replace(", ", ",")
    free_text = " ".join(map(str, state["free"]))
    print(f"{event:20}{rows_text:20}{state['ref_counts'][:3]!s:16}{free_text:12}{copies or '-'}")

# %% [markdown]
# **Turn the knob.** Where A is made, above, give it eight tokens in place of six, and run its fork and the
# two steps again; expect no copy at all, and a fresh block for each of the two.
#
# ## Three rows, one tail
#
# Three beams over one prompt of six tokens, all of which write in the same step.

# %%
manager = BlockManager(num_blocks=8, block_size=4, max_seqs=8, max_seq_len=24)
chats = {"A": manager.add(6)}
chats["B"], chats["C"] = fork_many(manager, [chats["A"]] * 2)
for writers in ("A", "AB", "ABC"):
    rows = [chats[name] for name in writers]
    print(f"{len(rows)} of 3 write: {copies_needed(manager, rows)} copies")
print("copies", step("A", "B", "C"))
draw_pool(manager.snapshot(chats), title="three beams have written token 6")

# %% [markdown]
# Two copies for three writers. An implementation that asks "is it shared?" once for all and copies
# for each would make three, and block 1 would lie there with count 0 and nobody to free it. Being
# last holder is not a property of a row but of the order in which rows come.
#
# Out of blocks, it must be all or nothing. Eight blocks, four held. D is a stranger with a full
# tail, and the rest of the pool is given to others but for one block.

# %%
from paged_kv.block_pool import OutOfBlocks

chats["D"] = manager.add(4)
chats["E"] = fork(manager, chats["A"])
filler = manager.add(8)
rows = [chats[name] for name in "AED"]
before = manager.snapshot(chats)
print(f"{copies_needed(manager, rows)} copy, {blocks_needed(manager, rows)} blocks in all")
try:
    make_writable(manager, rows)
except OutOfBlocks as error:
    print("OutOfBlocks:", error)
assert manager.snapshot(chats) == before
print("without D:", make_writable(manager, rows[:2]))

# %% [markdown]
# One block was free, and one copy was needed: a check of the copies alone would have let the step
# begin. A and E by themselves need just that one block, and get it.
#
# ## The bytes follow
#
# So far no byte has moved. `make_writable` returns pairs, and somebody has to copy those blocks,
# in every layer, before the step writes anything. `KVStore.copy_blocks` of chapter 4 takes the pairs
# of a whole step in one call.
#
# To see real bytes, the store below keeps letters: each token's key is its character code. Two layers
# stand for the eighty.

# %% tags=["hide-input"]
import torch

from paged_kv.block_tables import slot_mapping
from paged_kv.kv_store import KVStore

letters = KVSpec(num_layers=2, num_kv_heads=1, head_size=1, dtype="fp32")


def write(store, manager, row, text):
    """Store `text` as the last tokens of `row`, in both layers."""
    end = int(manager.tables.seq_lens[row])
    positions = np.arange(end - len(text), end)
    slots = slot_mapping(manager.tables.table, [row] * len(text), positions, manager.block_size)
    codes = torch.tensor([float(ord(letter)) for letter in text]).view(-1, 1, 1)
    for layer in range(2):
        store.write(layer, codes, codes, torch.from_numpy(slots))


def read(store, manager, row):
    """What `row` reads back; * where the two layers differ, ? for memory never written."""
    table = torch.from_numpy(manager.tables.table[row])
    length = int(manager.tables.seq_lens[row])
    layers = [store.gather(layer, table, length)[0].flatten().tolist() for layer in range(2)]
    shown = ["?" if a != a else chr(int(a)) if a == b else "*" for a, b in zip(*layers)]
    return "".join(shown)


# %%
manager, store = BlockManager(8, 4, 8, 24), KVStore(letters, 8, 4)
chats = {"A": manager.add(6)}
write(store, manager, chats["A"], "I like")
chats["B"], chats["C"] = fork_many(manager, [chats["A"]] * 2)


# %%
def say(**texts):
    """One step: each chat named gets the letters given; return the copies made."""
    rows = [chats[name] for name in texts]
    counts = np.array([len(text) for text in texts.values()])
    pairs = make_writable(manager, rows, counts)
    manager.append(rows, counts)
    store.copy_blocks(pairs)
    for row, text in zip(rows, texts.values()):
        write(store, manager, row, text)
    manager.check()
    return pairs


# %%
print("copies", say(A="ly", B=" tea", C=" it."))
print({name: read(store, manager, row) for name, row in chats.items()})

# %% [markdown]
# Three texts, five letters of which lie in one place only: "I li" in block 0. The two copies were
# made of block 1, "ke", for A and for B; C kept it.
#
# The pairs of one step may stem from several calls, and blocks that one call lets go another may
# take. Suppose C's chat is forked twice in a row, with a write in between: the pairs can read
# 1 → 5, 5 → 6. A GPU runs all copies of a step at once, so each reads what its source held when
# the step *began*, and block 6 would get what block 5 held before. `copy_blocks` therefore rewrites
# the list first, with `resolve_copies`: 5 → 6 becomes 1 → 6.

# %%
from paged_kv.kv_store import resolve_copies

print(resolve_copies([(1, 5), (5, 6)]), resolve_copies([(1, 5), (3, 1)]))

# %% tags=["hide-input"]
rng = np.random.default_rng(0)
for _ in range(2000):
    program = [tuple(rng.integers(0, 6, 2).tolist()) for _ in range(rng.integers(1, 12))]
    in_turn, at_start = list("abcdef"), list("abcdef")
    for source, destination in program:
        in_turn[destination] = in_turn[source]
    at_once = list(at_start)
    for source, destination in resolve_copies(program):
        at_once[destination] = at_start[source]
    assert at_once == in_turn
print("2,000 random programs: at once = in turn")

# %% [markdown]
# The second list shows the other hazard: block 1 is read and then overwritten. Reading at step start is
# right there, provided that all reads really come before all writes.
#
# ## Beams change places
#
# Beam search, the next chapter, keeps the $k$ most likely texts. In each step every beam proposes
# continuations, the best $k$ of all proposals live on, and these may be three children of one
# beam and none of another. The rows of the losers are handed to the winners' children. Written as
# an assignment to all at once: row $i$ becomes what row `parents[i]` was.
#
# A cache without blocks has to reorder its keys and values in step with the beams, all of them. Here
# only tables change, and only the rows that do not go on as themselves. Even there, most entries are
# equal in loser and winner, since both come from one prompt.

# %% tags=["export:copy_on_write"]
def rewire(manager: BlockManager, rows: ArrayLike, parents: ArrayLike) -> None:
    """Let each of `rows` become what the row at its place in `parents` was, all at once.

    Args: `rows` [n], all different; `parents` [n], open rows, any of them any number of times.
    Blocks that nobody holds any more go back, tails first; no block is taken.
    Raises: ValueError for a row that is not open or named twice; nothing changes.
    Source: arXiv 2309.06180, section 4.4, beam search.
    """
    tables = manager.tables
    row, parent = checked_rows(tables, rows), as_rows(parents)
    checked_rows(tables, np.unique(parent))
    if len(row) != len(parent):
        raise ValueError(f"parents: {len(parent)} for {len(row)} rows")
    moved = row != parent
    row, parent = row[moved], parent[moved]
    width = int(tables.num_blocks[np.concatenate([row, parent])].max(initial=0))
    old, new = tables.table[row, :width], tables.table[parent, :width]
    differ = (old != new)[:, ::-1]
    lost, gained = old[:, ::-1][differ], new[:, ::-1][differ]
    tables.table[row, :width] = new
    for column in (tables.num_blocks, tables.seq_lens):
        column[row] = column[parent]
    _recount(manager.pool, gained[gained >= 0], lost[lost >= 0])
    _guard_all(tables, [*row.tolist(), *parent.tolist()])


def _recount(pool: BlockPool, gained: NDArray[np.int32], lost: NDArray[np.int32]) -> None:
    """Add and drop holders, ids repeated at will; `gained` are held already.

    A block at 0 queues up where the last of its holders let go of it.
    """
    np.add.at(pool.ref_count, gained, 1)
    np.subtract.at(pool.ref_count, lost, 1)
    idle = lost[pool.ref_count[lost] == 0].tolist()
    idle = list(dict.fromkeys(idle[::-1]))[::-1]
    pool.ref_count[idle] = 1
    pool.release(idle)


# %% [markdown]
# The order inside matters. Holders are added before any are dropped; the other way round a block that
# passes from one row to another would touch 0 in between and be thrown into the queue. And what is
# taken over is read before any row changes, or two beams that swap places would both become one.
#
# :::{admonition} Predict
# :class: tip
# A, B and C say "I likely", "I like tea" and "I like it." as above. Now A has two children and B
# one: A's second child takes the row of C. Which blocks become free? How many bytes are copied?
# :::
#
# :::{dropdown} Reasoning
# C's own blocks go: its copy of the tail and what followed it. "I li" is held by all and stays. No
# byte is copied: A's last block is full for both children, so each will go on in a fresh block.
# :::

# %%
before = manager.snapshot(chats)
rows = [chats[name] for name in "ABC"]
rewire(manager, rows, [chats[name] for name in "ABA"])
manager.check()
freed = [b for b in manager.pool.free_ids() if b not in before["free"]]
print("freed", freed, "copies", copies_needed(manager, rows))
print({name: read(store, manager, row) for name, row in chats.items()})
draw_pool(manager.snapshot(chats), title="C is now A's second child", before=before)

# %%
print("copies", say(A=".", B=".", C=" so"))
print({name: read(store, manager, row) for name, row in chats.items()})

# %% [markdown]
# ## Taking tokens back
#
# A model that drafts four tokens with a cheap helper and then finds two of them wrong has to drop them
# again; this is called *speculative decoding*. The row gets shorter, and whole blocks
# behind its new end go back. What about the block in which it now ends?
#
# - It may have been full and is *partly filled* now: a full shared block is never written, but this
#   one will be. So a rewound row is guarded (`shrink` sees to that), and the next write looks at the
#   count.
# - If the row holds it alone, its bytes are about to change in place. Anybody who has noted down "block 7
#   holds these four tokens", as chapter 8 does, must not believe the note any longer. The *epoch* rises.

# %% tags=["export:copy_on_write"]
def rewind(manager: BlockManager, rows: ArrayLike, count: TokenCounts = 1) -> None:
    """Drop the last `count` tokens of each of `rows`, also in blocks that others hold.

    Blocks go back tails first, over all rows.  A partly filled tail that one row alone holds
    gets a new epoch: its bytes will change.  Raises, with nothing changed: ValueError for a bad
    row, for more tokens than it has, or if the block of the last token to stay was dropped.
    """
    pool, tables, size = manager.pool, manager.tables, manager.block_size
    rows = checked_rows(tables, rows)
    drop = np.broadcast_to(np.asarray(count), rows.shape)
    whole = drop.dtype.kind in "iu" or not drop.size
    if not whole or (drop < 0).any() or (drop > tables.seq_lens[rows]).any():
        raise ValueError(f"count = {count}: rows {rows.tolist()} hold {tables.seq_lens[rows]}")
    keep = tables.seq_lens[rows] - drop.astype(np.int64)
    rows, keep = rows[drop > 0], keep[drop > 0]
    tails = tables.table[rows, (keep - 1).clip(0) // size]
    if (tails[keep > 0] < 0).any():
        raise ValueError(f"count = {count}: reaches into blocks that were dropped")
    cut: list[tuple[int, int]] = []
    for row, length in zip(rows.tolist(), keep.tolist(), strict=True):
        cut += enumerate(tables.shrink(row, length), -(-length // size))
    cut.sort(key=lambda place: -place[0])
    _recount(pool, np.empty(0, np.int32), np.array([block for _, block in cut], np.int32))
    tails = tails[keep % size > 0]
    pool.epoch[tails[pool.ref_count[tails] == 1]] += 1


def blocks_held(manager: BlockManager, rows: ArrayLike) -> list[int]:
    """The blocks that `rows` hold together, each once, in ascending order."""
    held = np.unique(manager.tables.table[checked_rows(manager.tables, rows)])
    return [block for block in held.tolist() if block >= 0]


# %%
manager, store = BlockManager(6, 4, 4, 24), KVStore(letters, 6, 4)
chats = {"A": manager.add(8)}
write(store, manager, chats["A"], "I like x")
chats["B"] = fork(manager, chats["A"])
print("both full: copies", copies_needed(manager, list(chats.values())))
rewind(manager, chats["A"])  # A takes back its x
print("A rewound: copies", copies_needed(manager, list(chats.values())))
print("copies", say(A="y", B="!"))
print({name: read(store, manager, row) for name, row in chats.items()})

# %% [markdown]
# A's block was full and shared, and after the rewind A had to copy it; B kept its x. Now the epochs,
# in a block that one row owns.

# %%
alone = manager.tables.ids(chats["A"])[1]
note = int(manager.pool.epoch[alone])
rewind(manager, chats["A"])
print(f"block {alone}: noted at epoch {note}, is now at {manager.pool.epoch[alone]}")
manager = BlockManager(6, 4, 4, 24)
a = manager.add(8)
b = fork(manager, a)
noted = manager.pool.epoch.copy()
rewind(manager, a)
print("rewinding into a shared block raises", np.flatnonzero(manager.pool.epoch != noted).tolist())
manager.finish(b)
pairs = make_writable(manager, a)
raised = np.flatnonzero(manager.pool.epoch != noted).tolist()
print("once its other holder has left, writing raises", raised, "copies", pairs)

# %% [markdown]
# In the last part the epoch could not rise at the rewind, for another row still held the block and
# its bytes were going to stay. It rises when the last holder is about to write in place. Without
# that, a note taken while the block was full would outlive its truth by one chat.
#
# ## Break it
#
# Three mistakes, each made on purpose, each seen in the bytes. The first forgets the copy: it
# takes a block and rewires the table, but hands nothing to the store.

# %% tags=["hide-input"]
def fresh_pair(text="I like"):
    """A and its fork B over `text`, in a new pool and store."""
    manager, store = BlockManager(6, 4, 4, 24), KVStore(letters, 6, 4)
    row = manager.add(len(text))
    write(store, manager, row, text)
    return manager, store, row, fork(manager, row)


def report(mistake, manager, store, **rows):
    """What each row reads, and what `check` says."""
    try:
        manager.check()
        verdict = "silent"
    except AssertionError as error:
        verdict = str(error).split(":")[0]
    texts = {name: read(store, manager, row) for name, row in rows.items()}
    print(f"{mistake:22} check: {verdict:7} {texts}")


# %%
manager, store, a, b = fresh_pair()
make_writable(manager, a)  # the pairs are dropped
manager.append(a)
write(store, manager, a, "s")
report("copy skipped", manager, store, A=a, B=b)

# %% [markdown]
# A reads a hole where "ke" was. No invariant of the *tables* is broken, so `check` is silent. What shows it
# is the junk that fresh memory is filled with; with recycled blocks it would be somebody else's letters.
# The second mistake writes into a shared block, ignoring the guard.

# %%
manager, store, a, b = fresh_pair()
for row, letter in ((a, "s"), (b, "d")):
    manager.tables.seq_lens[row] += 1  # what append would have refused
    manager.tables.writable_until[row] = 8
    write(store, manager, row, letter)
report("shared block written", manager, store, A=a, B=b)
manager, store, a, b = fresh_pair()
try:
    manager.append(a)
except ValueError as error:
    print("append by itself:", error)

# %% [markdown]
# Both now end in d, as in the opening. I3 catches it here, and `append` refuses in the first place.
# The third releases the fork's blocks twice, as code does which frees a sequence both when it is
# beaten and when its group ends.

# %%
manager, store, a, b = fresh_pair()
blocks = manager.tables.detach(b)
manager.pool.release(blocks)
manager.pool.release(blocks)  # again: now A's own hold is gone
stranger = manager.add(24 - 8)
write(store, manager, stranger, "meet me at seven")
late = manager.add(4)
write(store, manager, late, "now!")
report("released twice", manager, store, A=a)
print("counts of A's blocks:", manager.pool.ref_count[blocks].tolist())

# %% [markdown]
# The second release was not an error to the pool, since A's hold was still there to be dropped. That is
# the difference sharing makes: in chapter 3 a double free was refused on the spot, here it silently takes
# *somebody else's* hold. A now reads what a stranger wrote. I2 catches it, comparing counts with rows.
#
# ## What it costs
#
# A prediction from bytes. Let a thousand sequences fork from one and write. Forked, each copies
# one block of 16 tokens, whatever the length of the prompt. Copied whole, each moves its whole
# prompt. For prompts of 506 and of 2,010 tokens the ratio should be 32 and 126. A step of
# 256 beam searches of four beams should be further apart: with whole caches every beam's cache is
# moved in every step; with tables a block is copied only for a beam which shares its tail, and
# mostly the tail is not shared or is full.
#
# Time will follow bytes only where bytes are what takes the time. Each layer's copy is a launch of its own
# on a GPU, and 30 layers of small copies are bound by launches. So expect the ratio of times to be well
# below that of bytes there, and nearer to it on the CPU.

# %% tags=["hide-input"]
import json

result = json.load(open("../benchmarks/results/copy_on_write.json"))
print("measured:", result["device"])
print("measured:", result["workload"])
for row in result["rows"]:
    print(f"measured: {row['case']}, {row['device']}:")
    print(f"measured:    tables {row['ours_ms']:.1f} ms (ids {row['bookkeeping_ms']:.1f} ms), "
          f"copies {row['ours_mib']:,.0f} MiB, holds {row['ours_held_mib']:,.0f} MiB")
    print(f"measured:    whole caches {row['theirs_ms']:.1f} ms, "
          f"copies {row['theirs_mib']:,.0f} MiB: "
          f"{row['x_time']:.1f} times the time, {row['x_bytes']:.0f} times the bytes")
latency = {name: value for name, value in result["headline"].items() if name.startswith("fork_")}
print("measured: one fork of 2,010 tokens,", latency)
for row, prompt_len in zip(result["rows"][::2], (506, 2010)):
    assert abs(row["x_bytes"] - prompt_len / 16) < 0.1

# %% [markdown]
# The comparison is with `DynamicCache` of transformers {cite}`wolf2020transformers`, on the machine
# named in the output: `batch_repeat_interleave` and then one token, and `reorder_cache`. Time is for the
# cache's part of the step only, bookkeeping and copies and the new token's K/V, without the model. The
# bytes came out as predicted (the cell asserts it), the times as feared: on the GPU a step moves
# more than a hundred times fewer bytes and is only a few times faster. What does not shrink is memory: there
# the whole caches hold what they copy, and the tables the figure printed after "holds".
#
# What this leaves out: attention through a table is not free (chapter 11 measures it), and at a prompt
# of a few tokens there is nothing to save. With one sequence and no fork, `make_writable` costs its
# few NumPy calls and gains nothing.
#
# ## Mistakes in circulation
#
# :::{admonition} Check it yourself
# :class: warning
# - Sharing a prompt four ways is said to save ~~3.9 times~~. It is 4.0, to the byte.
# - A beam that diverges inside a full block is said to ~~copy that block~~. Full blocks are not written.
# - Beams that generate the same words are said to ~~come to share the blocks of those words~~. Sharing
#   comes from forking alone; equal texts written apart stay apart, unless somebody looks them up by
#   content, which is chapter 8.
# :::

# %% tags=["hide-input"]
print(f"four ways: {4 * prompt / prompt:.1f} times")
manager, store, a, b = fresh_pair("I like x")
print("diverging behind a full block:", copies_needed(manager, [a, b]), "copies")
chats = {"A": a, "B": b}
say(A="yes!", B="yes!")
print("the same word, written apart:", [manager.tables.ids(row)[2] for row in (a, b)])

# %% [markdown]
# ## State card
#
# | function | changes | invariants | what breaks next |
# |---|---|---|---|
# | `fork_many` | new rows, counts up | I2 over many rows | when is forking worth it? (chapter 7) |
# | `make_writable` | tails of writers, counts, epochs | I3: nobody writes what another reads | the copies must be ordered with the writes (chapter 13) |
# | `rewire` | rows of losers | I2; nothing is freed that a winner took over | beams that finish early (chapter 7) |
# | `rewind` | lengths, epochs | a stale note is detectable | who keeps such notes? (chapter 8) |
#
# Nobody can share what they did not fork. Two users who send the same system prompt still hold it twice;
# chapter 8 finds such twins.
#
# ## Real world
#
# - vLLM began with what this chapter does: the block manager of its first generation forked sequences and
#   returned pairs to copy. `vllm/v1/core/kv_cache_manager.py` of vLLM 0.23 does not fork: parallel samples are
#   requests of their own (`vllm/v1/engine/parallel_sampling.py`) that find the prompt's full
#   blocks in the prefix cache and compute the partial tail again. That trades a copied block for at
#   most $B - 1$ recomputed tokens and one mechanism less.
# - SGLang shares through a tree of prefixes (`python/sglang/srt/mem_cache/radix_cache.py`); at a grain of one token there
#   is no partly filled block, and no copy.
# - TensorRT-LLM's `cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp` shares the context blocks of beams, and
#   its attention follows a second table which says, for each step and beam, whose token to read.
# - The operating system's version, with page faults in place of a test in `append`, is an exercise of the
#   xv6 course {cite}`cox2022xv6`.
#
# ## Exercises
#
# :::{exercise}
# :label: ex-06-compute
# **Compute.** Six beams share a tail; four of them write in this step. How many copies? And if all six do?
# How many bytes is that at 320 KiB a token and blocks of 16?
# :::
#
# :::{solution} ex-06-compute
# :class: dropdown
# min(4, 5) = 4 and min(6, 5) = 5 copies, of 5 MiB each: 20 MiB and 25 MiB.
# :::

# %% tags=["hide-input"]
counts = np.array([6], np.int32)
for k in (4, 6):
    copies = int(must_copy(counts, np.zeros(k, np.int32)).sum())
    assert copies == min(k, 6 - 1)
    print(f"{k} write: {copies} copies of {16 * 320 / 1024:.0f} MiB (16 tokens of 320 KiB) "
          f"are {copies * 16 * 320 / 1024:.0f} MiB")

# %% [markdown]
# :::{exercise}
# :label: ex-06-trace
# **Trace.** Four beams over a prompt of 12 tokens with $B = 4$ have each written one token. How many blocks
# does the group hold, and how many do its tables name? All four are rewound by five tokens: which blocks come free, and in what
# order? What are the counts of those that stay?
# :::
#
# :::{solution} ex-06-trace
# :class: dropdown
# 7 blocks: three shared and four own; the tables name 16. Rewinding by five leaves 8 tokens. The four own tails
# go first, then block 2, which comes free only when the fourth has let go of it. Blocks 0 and 1 have a count of 4.
# :::

# %% tags=["hide-input"]
manager = BlockManager(8, 4, 4, 24)
first = manager.add(12)
group = [first, *fork_many(manager, [first] * 3)]
assert make_writable(manager, group) == []
manager.append(group)
assert len(blocks_held(manager, group)) == 7
assert sum(len(manager.tables.ids(row)) for row in group) == 16
rewind(manager, group, 5)
assert manager.pool.free_ids() == [7, 3, 4, 5, 6, 2]
assert manager.pool.ref_count[:3].tolist() == [4, 4, 0]
manager.check()

# %% [markdown]
# :::{exercise}
# :label: ex-06-break
# **Break.** Write a `naive_rewire` that handles one row after the other: release what the row holds, then
# take over the parent's blocks. Find two beams for which it goes wrong.
# :::
#
# :::{solution} ex-06-break
# :class: dropdown
# Let the two swap places. The first becomes the second; the second then becomes what the first *now* is,
# which is itself. One text is lost and its blocks are freed, though it should have lived.
# :::

# %% tags=["hide-input"]
def naive_rewire(manager, rows, parents):
    for row, parent in zip(rows, parents):
        if row != parent:
            manager.pool.release(manager.tables.shrink(row, 0))
            manager.tables.extend(row, manager.tables.ids(parent))
            manager.pool.claim(manager.tables.ids(row))
            manager.tables.seq_lens[row] = manager.tables.seq_lens[parent]


left, right = BlockManager(4, 4, 2, 16), BlockManager(4, 4, 2, 16)
for swapped, how in ((left, naive_rewire), (right, rewire)):
    pair = [swapped.add(4), swapped.add(4)]
    how(swapped, pair, pair[::-1])
assert [left.tables.ids(row) for row in pair] == [[1], [1]]
assert [right.tables.ids(row) for row in pair] == [[1], [0]]

# %% [markdown]
# :::{exercise}
# :label: ex-06-implement
# **Implement.** `freed_by(manager, rows)`: how many blocks would really come free if all of `rows` were
# finished? It is the price that chapter 10 will ask for.
# :::
#
# :::{solution} ex-06-implement
# :class: dropdown
# A block comes free if all its holders are among `rows`: count how often each id occurs in their tables and
# compare with its count.
# :::

# %% tags=["hide-input"]
def freed_by(manager, rows):
    ids = manager.tables.table[rows]
    ids, times = np.unique(ids[ids >= 0], return_counts=True)
    return int((manager.pool.ref_count[ids] == times).sum())


manager = BlockManager(200, 16, 4, 4096)
root = manager.add(2000)  # 125 blocks
branch = fork(manager, root)
manager.append(branch, 150)  # 10 blocks of its own
assert freed_by(manager, [branch]) == 10 and freed_by(manager, [root, branch]) == 135
free = manager.pool.num_free
manager.finish(branch)
assert manager.pool.num_free == free + 10

# %% [markdown]
# :::{exercise}
# :label: ex-06-window
# **Trace.** A row of 10 tokens with $B = 4$ and a sliding window of 8 forks. Both write three tokens; then the
# first block is out of both windows and each drops it with `drop_front`. After how many drops is it free, and
# how many blocks are free when both have finished?
# :::
#
# :::{solution} ex-06-window
# :class: dropdown
# Its count was 2, so after the second drop. When both have finished all blocks are free: no row names a
# block twice, and a dropped block is -1 in the row, so nothing is released a second time.
# :::

# %% tags=["hide-input"]
manager = BlockManager(10, 4, 2, 32)
a = manager.add(10)
b = fork(manager, a)
for _ in range(3):
    make_writable(manager, [a, b])
    manager.append([a, b])
for row, count_then in ((b, 1), (a, 0)):
    manager.pool.release(manager.tables.drop_front(row, 1))
    assert manager.pool.ref_count[0] == count_then
    manager.check()
manager.finish(a)
manager.finish(b)
assert manager.pool.num_free == 10

# %% [markdown]
# ## Further reading
#
# - Gentle: the chapters on process creation and on paging in *Operating Systems: Three Easy Pieces*
#   {cite}`arpaci2018ostep`.
# - The source: section 4.4 of the PagedAttention paper {cite}`kwon2023paged`, on parallel sampling and beam
#   search over shared blocks.
# - Deep: speculative decoding {cite}`leviathan2023speculative`, the reason why a cache must be able to take
#   tokens back.
