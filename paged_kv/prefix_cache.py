# Exported from book/08_prefix_hashing.py by tools/export.py; edit the chapter, not this file.
"""Blocks found again by content: match, publish, forget; admission over a BlockManager."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paged_kv.block_manager import BlockManager
from paged_kv.block_names import BlockNames, Removed, Stored
from paged_kv.block_pool import BlockIds, BlockPool, OutOfBlocks, checked_ids, places_of
from paged_kv.prefix_keys import (
    NO_PARTS,
    Key,
    Node,
    Parts,
    Tokens,
    encode_parts,
    filled_chunks,
    known_chain,
    split_chunks,
    token_array,
)
from paged_kv.sizing import at_least


@dataclass(frozen=True)
class PrefixStats:
    """Counts since the cache was made; `published` - `evicted` == `findable`, in blocks.

    `queried` and `hit` are tokens of admitted prompts; `evicted` counts every published block
    that is not findable any more: overwritten, withdrawn, rewound into or reset.
    """

    queried: int
    hit: int
    published: int
    evicted: int

    @property
    def findable(self) -> int:
        """Blocks that a look-up can find."""
        return self.published - self.evicted

    @property
    def hit_rate(self) -> float:
        """Hit tokens to queried tokens; 0 where nothing was queried."""
        return self.hit / self.queried if self.queried else 0.0


class PrefixCache:
    """Which blocks hold which tokens after which history.  Owns no block, reads no byte.

    State
        names       a BlockNames.
        generation  raised by `reset`: whoever began in an older one must not publish.
    Invariant I4: a findable block holds the K/V of its name.
    Source: vllm/v1/core/block_pool.py, there by hashes.
    """

    root = staticmethod(encode_parts)

    def __init__(self, pool: BlockPool, block_size: int, *, events: bool = False) -> None:
        self.pool, self.block_size = pool, at_least(1, "block_size", block_size)
        self.names = BlockNames(pool, block_size, events)
        self.generation = 0
        self._queried = self._hit = 0

    @property
    def stats(self) -> PrefixStats:
        """The counts as they are now."""
        return PrefixStats(self._queried, self._hit, self.names.given, self.names.lost)

    def count(self, queried: int, hit: int) -> None:
        """Note an admitted prompt of `queried` tokens, of which `hit` were found."""
        self._queried += queried
        self._hit += hit

    def key_of(self, block: int) -> int | None:
        """The key of `block`, None where it is not findable."""
        node = self.names.of(block)
        return None if node is None else self.names.tree.number(node)

    def digest(self, key: Key) -> bytes:
        """SHA-256 of `key`, equal in every process: for keys that leave this one."""
        return self.names.digest(self.names.tree.above(key))

    def check(self) -> None:
        """Assert I4, and that names and blocks agree.  O(num_blocks), for tests."""
        self.names.check()

    def match(
        self, root: Key, tokens: Tokens, limit: int | None = None, parts: Parts = NO_PARTS
    ) -> list[int]:
        """The longest chain of findable blocks that `tokens` begin with, behind `root`.

        Never more than floor((len - 1) / block_size) blocks: a token stays to be computed;
        nor more than `limit`.  Changes nothing.  Of twins it names one in use, else the first.
        """
        if type(root) not in (bytes, int):
            raise ValueError(f"root = {root!r}: neither a root nor the key of a block")
        data = token_array(tokens)
        most = max(0, len(data) - 1) // self.block_size
        most = most if limit is None else min(most, at_least(0, "limit", limit))
        nodes = _walk(self.names, root, data, most, parts)
        if self.names.twins:
            return [_pick(self.pool.ref_count, node) for node in nodes]
        return [node.block for node in nodes]

    def forget(self, ids: BlockIds) -> None:
        """Make `ids` unfindable: they are, or will be, overwritten, withdrawn or rewound into.

        Blocks without a name are left alone.  Other blocks of the same name stay findable.
        """
        self.names.take_away(checked_ids(ids, self.pool.num_blocks))

    def reset(self) -> None:
        """Make every block unfindable, as after new weights; a new generation begins."""
        self.forget(range(self.pool.num_blocks))
        self.generation += 1

    def drain_events(self) -> list[Stored | Removed]:
        """What became findable or ceased to be since the last call, oldest first."""
        return self.names.events.drain() if self.names.events is not None else []

    def publish(self, parent: Key, tokens: Tokens, ids: BlockIds, parts: Parts = NO_PARTS) -> Key:
        """Make the blocks `ids`, which hold `tokens` behind `parent`, findable.

        Args: `parent`, the key of the block before them, or the root; `tokens`
        [len(ids) x block_size]; `parts`, extra parts by index of block.
        Returns: the key of the last.  A key that has a block already gets a twin.
        Raises, with nothing changed: ValueError for a parent that is gone, tokens that do not
        fill the blocks, a block that nobody holds or that has another name.
        """
        above = self.publish_behind(self.names.tree.above(parent), tokens, ids, parts)
        return self.names.tree.number(above) if isinstance(above, Node) else above

    def publish_behind(
        self, above: Node | bytes, tokens: Tokens, ids: BlockIds, parts: Parts = NO_PARTS
    ) -> Node | bytes:
        """`publish` for those who hold nodes: behind `above`, a node or a root; the last node."""
        if isinstance(above, Node) and self.names.tree.find(above.parent, above.chunk) is not above:
            raise ValueError("above: a node that is gone")
        names, places = self.names, places_of(ids, self.pool.num_blocks)
        chunks = filled_chunks(tokens, self.block_size, len(places), parts)
        names.refuse(places, known_chain(names.tree, above, chunks))
        return [above, *names.add([above], chunks, places)][-1]

    def publish_each(
        self, parents: Sequence[Key], tokens: NDArray[np.int32], ids: BlockIds
    ) -> list[Key]:
        """`publish` for many rows at once, one block each; `tokens` [len(ids), block_size]."""
        names, places = self.names, places_of(ids, self.pool.num_blocks)
        if len(parents) != len(places):
            raise ValueError(f"parents: {len(parents)} for {len(places)} blocks")
        chunks = filled_chunks(tokens.reshape(-1), self.block_size, len(places), NO_PARTS)
        above = list(map(names.tree.above, parents))
        names.refuse(places, map(names.tree.find, above, chunks))
        return [names.tree.number(node) for node in names.add(above, chunks, places)]


def _walk(
    names: BlockNames, root: Key, data: NDArray[np.int32], most: int, parts: Parts
) -> list[Node]:
    """At most `most` findable nodes of the chain of `data` behind `root`, first to last."""
    tree, size = names.tree, names.block_size
    data = data[: most * size]
    above = root if isinstance(root, bytes) else tree.by_id.get(root)
    if above is None:
        return []
    nodes = tree.ride(above, data, size) if not parts else []
    ridden = len(nodes)
    above = nodes[-1] if nodes else above
    for chunk in split_chunks(data, size, parts, ridden):
        node = tree.find(above, chunk)
        if node is None or node.block < 0:
            break
        nodes.append(node)
        above = node
    if len(nodes) > 2 * ridden and not parts:
        nodes[0].trail = (data[: len(nodes) * size].copy(), nodes)
    return nodes


def _pick(counts: NDArray[np.int32], node: Node) -> int:
    """A block of `node`: of twins one in use, else the first."""
    return next((b for b in (node.block, *node.twins) if counts[b]), node.block)


def admit_cached(
    manager: BlockManager,
    cache: PrefixCache,
    tokens: Tokens,
    root: bytes = b"",
    new_tokens: int | None = None,
) -> tuple[int, int]:
    """Open a row for `tokens`, over the blocks that hold its beginning already.

    Args: `root` from `PrefixCache.root`; `new_tokens`, how many tokens beyond those found get
    room now, as the first chunk of a prefill; None for all.
    Returns: the row, and how many of its tokens were found; the others are to be computed.
    Raises, with nothing changed: OutOfBlocks, counting idle blocks that are found as well;
    ValueError for tokens that no row can hold, or no row left.
    """
    pool, tables, size = manager.pool, manager.tables, manager.block_size
    if cache.pool is not pool or cache.block_size != size:
        raise ValueError("cache: it belongs to another pool, or has another block size")
    data = token_array(tokens)
    if len(data) > tables.max_seq_len:
        raise ValueError(f"tokens: {len(data)}, a row holds at most {tables.max_seq_len}")
    hits = np.array(array("I", cache.match(root, data)), np.int64)
    found, length = len(hits) * size, len(data)
    if new_tokens is not None:
        length = min(length, found + at_least(0, "new_tokens", new_tokens))
    fresh = -(-length // size) - len(hits)
    needed = fresh + len(hits) - int(np.count_nonzero(pool.ref_count[hits]))
    if needed > pool.num_free:
        raise OutOfBlocks(needed, pool.num_free)
    row = tables.open()
    pool.hold(hits)
    taken = pool.take(fresh)
    cache.names.take_away(taken)
    tables.table[row, : len(hits)] = hits
    tables.num_blocks[row] = len(hits)
    tables.extend(row, taken)
    tables.seq_lens[row] = length
    cache.count(len(data), found)
    return row, found


def publish_full(
    manager: BlockManager,
    cache: PrefixCache,
    row: int,
    tokens: Tokens,
    published: int,
    root: bytes = b"",
) -> int:
    """Publish the full blocks of `row` from index `published` on, as far as `tokens` go.

    Args: `tokens`, the row's own from its first one, as far as they are known.
    Returns: how many of its blocks are published now.  Where the block before is not findable
    any more, or a block has left the window, nothing is published.
    """
    tables, size = manager.tables, manager.block_size
    full = min(len(tokens), int(tables.seq_lens[row])) // size
    if full <= at_least(0, "published", published):
        return published
    ids: list[int] = tables.table[row, max(0, published - 1) : full].tolist()
    names, data = cache.names, tokens[published * size : full * size]
    above = root if published == 0 else names.of(ids.pop(0))
    if above is None or -1 in ids:
        return published
    if any(map(names.named.__getitem__, ids)):
        cache.publish_behind(above, data, ids)
    else:
        names.add([above], filled_chunks(data, size, len(ids), NO_PARTS), np.array(ids))
    return full


def publish_filled(
    manager: BlockManager,
    cache: PrefixCache,
    rows: NDArray[np.int64],
    tokens: NDArray[np.int32],
    published: NDArray[np.int64],
    roots: Sequence[bytes],
) -> None:
    """`publish_full` for many rows whose next block has just filled, one block each.

    Args: `rows` [n], all different; `tokens` [max_seqs, max_seq_len], known up to the end of
    that block; `published` [max_seqs], raised in place; `roots` [n].
    """
    tables, size, names = manager.tables, manager.block_size, cache.names
    parents, ids, done, texts = list[Node | bytes](), list[int](), list[int](), []
    for root, row, index in zip(roots, rows.tolist(), published[rows].tolist(), strict=True):
        block, end = tables.table.item(row, index), (index + 1) * size
        above = names.of(tables.table.item(row, index - 1)) if index else root
        if above is not None and block >= 0 and tables.seq_lens.item(row) >= end:
            parents.append(above)
            ids.append(block)
            done.append(row)
            texts.append(tokens[row, end - size : end])
    if not ids:
        return
    chunks, places = filled_chunks(np.concatenate(texts), size, len(ids), NO_PARTS), np.array(ids)
    if any(map(names.named.__getitem__, ids)):
        names.refuse(places, map(names.tree.find, parents, chunks))
    names.add(parents, chunks, places)
    published[done] += 1


def give_back(manager: BlockManager, row: int) -> None:
    """Close `row` and give its blocks back, the tail first: a parent outlasts its children."""
    manager.pool.drop(np.array(array("I", manager.tables.detach(row)[::-1]), np.int64))
