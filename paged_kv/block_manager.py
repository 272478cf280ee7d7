# Exported from book/03_block_manager.py by tools/export.py; edit the chapter, not this file.
"""The manager that keeps block tables and the pool in step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paged_kv.block_pool import FEW, BlockPool, OutOfBlocks
from paged_kv.block_tables import (
    BlockTables,
    TokenCounts,
    checked_counts,
    checked_rows,
    extend_by_one,
    extend_each,
    refuse_shared_tails,
)
from paged_kv.sizing import at_least


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
