# Exported from book/03_block_manager.py by tools/export.py; edit the chapter, not this file.
"""Block ids: a queue of the free ones, and for each the number of rows that hold it.

The pool knows ids only.  It has never seen a token or a byte.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Sequence
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

    def take(self, count: int) -> list[int]:
        """Take `count` blocks from the front of the queue, to be overwritten.

        Returns: their ids.  Raises: OutOfBlocks, before anything changes.
        """
        if not 0 <= count <= len(self._free):
            raise OutOfBlocks(at_least(0, "count", count), len(self._free))
        pop = self._free.popitem
        ids = [pop(last=False)[0] for _ in range(count)]
        places = ids if count <= FEW else [np.array(ids)]  # single elements, or one array
        for place in places:
            self.ref_count[place] = 1
            self.epoch[place] += 1
        return ids

    def claim(self, ids: BlockIds) -> None:
        """Count one holder more for each of `ids`, idle or held; the bytes stay as they are."""
        ids = checked_ids(ids, self.num_blocks)
        self.ref_count[np.array(ids, np.int64)] += 1
        pull_out = self._free.pop
        for block in ids:
            pull_out(block, None)

    def release(self, ids: BlockIds) -> None:
        """Count one holder less for each of `ids`; those at 0 queue up in the order given."""
        ids = checked_ids(ids, self.num_blocks)
        places = np.array(ids, np.int64)
        left = self.ref_count[places] - 1
        counts = left.tolist()
        if -1 in counts:
            raise ValueError(f"ids: block {ids[counts.index(-1)]} is free already, nobody holds it")
        self.ref_count[places] = left
        if any(counts):
            ids = [block for block, count in zip(ids, counts, strict=True) if not count]
        self._free.update(dict.fromkeys(ids))

    def check(self) -> None:
        """Assert I1 and that no count is negative.  O(num_blocks): for tests, not for serving."""
        assert (self.ref_count >= 0).all(), "a count is negative"
        idle = np.flatnonzero(self.ref_count == 0).tolist()
        assert sorted(self._free) == idle, f"I1: free {sorted(self._free)}, count 0 {idle}"


def checked_ids(ids: BlockIds, num_blocks: int) -> list[int]:
    """`ids` as a list; ValueError unless all are blocks of the pool and none is named twice."""
    try:
        ids = list(map(operator.index, ids.tolist() if isinstance(ids, np.ndarray) else ids))
    except TypeError:
        raise ValueError(f"ids: {ids!r} are not block ids, which are whole numbers") from None
    if ids and not (0 <= min(ids) and max(ids) < num_blocks):
        bad = next(block for block in ids if not 0 <= block < num_blocks)
        raise ValueError(f"ids: block {bad} is foreign, ids are 0 to {num_blocks - 1}")
    if len(set(ids)) != len(ids):
        raise ValueError(f"ids: {ids} names a block twice")
    return ids
