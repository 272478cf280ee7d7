# Exported from book/03_block_manager.py by tools/export.py; edit the chapter, not this file.
"""Block tables: which blocks hold each sequence, in order, in one matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paged_kv.block_pool import FEW, BlockPool, checked_ids
from paged_kv.sizing import at_least

TokenCounts: TypeAlias = int | NDArray[np.integer[Any]]  # one for all rows, or one a row


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
