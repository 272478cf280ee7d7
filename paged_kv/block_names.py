# Exported from book/08_prefix_hashing.py by tools/export.py; edit the chapter, not this file.
"""Which block holds which name, and the events that say so to the world outside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_kv.block_pool import BlockPool
from paged_kv.prefix_keys import KeyTree, Node


@dataclass(frozen=True)
class Stored:
    """A key became findable.  Both fields are hex digests; `parent` may be that of a root."""

    key: str
    parent: str
    kind: str = "stored"


@dataclass(frozen=True)
class Removed:
    """A key is not findable any more: no block holds it.  `key` is a hex digest."""

    key: str
    kind: str = "removed"


class EventLog:
    """Events since they were last drained; an event and its opposite cancel out.

    So it holds at most two events a block, however long nobody drains it.
    """

    def __init__(self) -> None:
        self._pending: dict[str, Stored | Removed] = {}

    def note(self, event: Stored | Removed) -> None:
        """Keep `event`, unless it takes back one that nobody has seen."""
        if self._pending.pop(event.key, None) is None:
            self._pending[event.key] = event

    def drain(self) -> list[Stored | Removed]:
        """The events so far, oldest first; the log is empty then."""
        events = list(self._pending.values())
        self._pending.clear()
        return events


class BlockNames:
    """The name of each findable block, and the blocks of each name.

    State
        tree    a KeyTree: the names in use.
        named   [num_blocks]: the node of each findable block, else None.
        epochs  int64 [num_blocks]: `pool.epoch` when the block was given its name.
        events  an EventLog, None where nobody asked for one.
        given, lost  counts: names given to blocks, and lost by blocks, so far.
        twins   how many blocks have a name that another block had first.
    Invariant I4: a named block holds the K/V of its name, so its epoch is as it was.
    """

    def __init__(self, pool: BlockPool, block_size: int, events: bool) -> None:
        self.pool, self.block_size = pool, block_size
        self.tree = KeyTree()
        self.named: list[Node | None] = [None] * pool.num_blocks
        self.epochs = np.zeros(pool.num_blocks, np.int64)
        self.events = EventLog() if events else None
        self.given = self.lost = self.twins = 0

    def of(self, block: int) -> Node | None:
        """The node of `block`; None where it has no name, or where -1 stands for a block."""
        return self.named[block] if block >= 0 else None

    def digest(self, above: Node | bytes) -> bytes:
        """SHA-256 of a node or root, the same in every process."""
        return self.tree.digest(above, self.block_size)

    def _hold(self, node: Node, block: int) -> None:
        if node.block >= 0:
            node.twins += (block,)
            self.twins += 1
            return
        node.block = block
        if self.events is not None:
            key, parent = self.digest(node).hex(), self.digest(node.parent).hex()
            self.events.note(Stored(key, parent))

    def refuse(self, places: NDArray[np.int64], nodes: Iterable[Node | None]) -> None:
        """ValueError if a block of `places` cannot be given the name at its place in `nodes`."""
        held, ids = self.pool.ref_count[places], places.tolist()
        if np.count_nonzero(held) < len(held):
            idle = places[held == 0].tolist()
            raise ValueError(f"ids: blocks {idle} are idle, nobody can have written them")
        if any(map(self.named.__getitem__, ids)):
            for block, node in zip(ids, nodes, strict=True):
                if self.named[block] not in (None, node):
                    raise ValueError(f"ids: block {block} has another name: forget it first")

    def add(
        self,
        parents: Iterable[Node | bytes],
        chunks: Iterable[bytes],
        places: NDArray[np.integer[Any]],
    ) -> list[Node]:
        """Name each block of `places` by its chunk, see `KeyTree.intern`; named ones keep theirs.

        Returns: the node of each.
        """
        named, quiet, given, nodes = self.named, self.events is None, 0, list[Node]()
        self.epochs[places] = self.pool.epoch[places]
        for node, block in zip(self.tree.intern(parents, chunks), places.tolist(), strict=True):
            nodes.append(node)
            if named[block] is None:
                named[block] = node
                given += 1
                if quiet and node.block < 0:
                    node.block = block
                else:
                    self._hold(node, block)
        self.given += given
        return nodes

    def take_away(self, ids: list[int]) -> None:
        """Let `ids` have no name; those that have none are left alone."""
        for block, node in zip(ids, map(self.named.__getitem__, ids), strict=True):
            if node is None:
                continue
            self.named[block] = None
            self.lost += 1
            if node.twins:
                self.twins -= 1
                left = [held for held in (node.block, *node.twins) if held != block]
                node.block, node.twins = left[0], tuple(left[1:])
            else:
                node.block = -1
                if self.events is not None:
                    self.events.note(Removed(self.digest(node).hex()))
                self.tree.prune(node)

    def check(self) -> None:
        """Assert I4, and that blocks and nodes agree, each way.  O(num_blocks), for tests."""
        nodes, holders = set(self.tree.nodes()), Counter[Node]()
        for block, node in enumerate(self.named):
            if node is not None:
                assert node in nodes, f"block {block}: its name is gone"
                assert self.epochs[block] == self.pool.epoch[block], f"I4: block {block} retaken"
                assert block in (node.block, *node.twins), f"block {block}: its name lost it"
                holders[node] += 1
        assert holders.total() == self.given - self.lost
        assert self.twins == holders.total() - len(holders)
        for node in nodes:
            assert self.tree.find(node.parent, node.chunk) is node, "a node is not where it belongs"
            assert node.behind or node.block >= 0, f"{node.chunk!r}: nothing needs it"
            assert holders[node] == (node.block >= 0) + len(node.twins)
        for number, node in self.tree.by_id.items():
            assert node in nodes and node.id == number, f"key {number}: its node is gone"
