# Exported from book/03_block_manager.py by tools/export.py; edit the chapter, not this file.
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
