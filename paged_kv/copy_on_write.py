# Exported from book/06_copy_on_write.py by tools/export.py; edit the chapter, not this file.
"""Sequences that share blocks: fork, copy before writing, rewire beams, rewind.

Functions over a BlockManager; they keep no state of their own.  They move ids: the bytes
follow when the caller hands the (source, destination) pairs to `KVStore.copy_blocks`.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paged_kv.block_manager import BlockManager
from paged_kv.block_pool import BlockPool, OutOfBlocks
from paged_kv.block_tables import BlockTables, TokenCounts, as_rows, checked_rows


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


def copies_needed(manager: BlockManager, rows: ArrayLike, new_tokens: TokenCounts = 1) -> int:
    """Blocks to be copied before `rows`, all together, write `new_tokens` tokens more each."""
    _, _, blocks = guarded_tails(manager, rows, new_tokens)
    return int(must_copy(manager.pool.ref_count, blocks).sum())


def blocks_needed(manager: BlockManager, rows: ArrayLike, new_tokens: TokenCounts = 1) -> int:
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
