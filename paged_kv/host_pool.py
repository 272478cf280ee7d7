# Exported from book/10_preemption.py by tools/export.py; edit the chapter, not this file.
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
