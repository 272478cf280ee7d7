# Exported from book/labs/L4_eviction_and_radix.py by tools/export.py; edit the chapter, not this file.
"""Prompts in a radix tree: runs of tokens on the edges, split where two prompts part.

The other way to find a common beginning, to compare with `prefix_cache`; it stores no K/V.
Source: arXiv 2312.07104, section 3; python/sglang/srt/mem_cache/radix_cache.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from paged_kv.sizing import at_least

Run = tuple[int, ...]


@dataclass(slots=True, eq=False)
class RadixNode:
    """A run of tokens and what follows it; `last` is the walk that passed it last."""

    tokens: Run
    parent: RadixNode | None
    last: int = 0
    children: dict[Run, RadixNode] = field(default_factory=dict)


class RadixTree:
    """Which beginnings of prompts are cached, in pages of `page_size` tokens.

    State: `root`, an empty node; `now`, walks so far; `num_tokens`, on all edges together.
    Invariants: the children of a node begin with different pages, and are keyed by them; no
    node was used after its parent; runs are whole pages, none but the root's is empty.
    """

    def __init__(self, page_size: int = 1) -> None:
        self.page_size = at_least(1, "page_size", page_size)
        self.root = RadixNode((), None)
        self.now = self.num_tokens = 0

    def match(self, tokens: Sequence[int]) -> int:
        """How many of `tokens`, whole pages, are cached; marks them as used."""
        return self._walk(tuple(tokens))[1]

    def insert(self, tokens: Sequence[int]) -> int:
        """Cache the whole pages of `tokens`; return how many tokens were not there yet."""
        run = tuple(tokens)
        run = run[: len(run) // self.page_size * self.page_size]
        node, at = self._walk(run)
        if at < len(run):
            leaf = RadixNode(run[at:], node, self.now)
            node.children[leaf.tokens[: self.page_size]] = leaf
            self.num_tokens += len(leaf.tokens)
        return len(run) - at

    def _walk(self, run: Run) -> tuple[RadixNode, int]:
        """Go down as far as `run` is known; return the node reached and the tokens matched."""
        self.now += 1
        node, at, size = self.root, 0, self.page_size
        while True:
            node.last = self.now
            child = node.children.get(run[at : at + size])
            if child is None:
                return node, at
            end = size
            while end < len(child.tokens) and (
                child.tokens[end : end + size] == run[at + end : at + end + size]
            ):
                end += size
            if end < len(child.tokens):
                child = self._split(child, end)
            node, at = child, at + end

    def _split(self, node: RadixNode, size: int) -> RadixNode:
        """Cut the run of `node` behind `size` tokens; return the new upper half."""
        upper = RadixNode(node.tokens[:size], node.parent, node.last)
        node.tokens, node.parent = node.tokens[size:], upper
        upper.children[node.tokens[: self.page_size]] = node
        if upper.parent is not None:
            upper.parent.children[upper.tokens[: self.page_size]] = upper
        return upper

    def evict(self, num_tokens: int) -> int:
        """Drop at least `num_tokens` tokens, whole pages of the leaves used longest ago.

        What the last walk passed stays.  Returns how many were dropped; fewer if all else is
        gone.  Looks at every node: O(nodes) a leaf.
        """
        dropped = 0
        while dropped < num_tokens:
            leaves = [node for node in self.nodes() if not node.children and node.last < self.now]
            if not leaves:
                break
            leaf = min(leaves, key=lambda node: node.last)
            pages = -(-(num_tokens - dropped) // self.page_size)
            kept = leaf.tokens[: max(0, len(leaf.tokens) - pages * self.page_size)]
            dropped += len(leaf.tokens) - len(kept)
            if not kept and leaf.parent is not None:
                del leaf.parent.children[leaf.tokens[: self.page_size]]
            leaf.tokens = kept
        self.num_tokens -= dropped
        return dropped

    def nodes(self) -> Iterator[RadixNode]:
        """All nodes but the root, parents before children."""
        waiting = list(self.root.children.values())
        while waiting:
            yield (node := waiting.pop())
            waiting += node.children.values()

    def check(self) -> None:
        """Assert the invariants.  O(tokens), for tests."""
        check_radix(self)


def check_radix(tree: RadixTree) -> None:
    """Assert what `RadixTree` promises."""
    for node in tree.nodes():
        size = tree.page_size
        assert node.tokens and len(node.tokens) % size == 0, f"a run of {len(node.tokens)} tokens"
        assert node.parent is not None and node.last <= node.parent.last, "used after its parent"
        assert node.parent.children[node.tokens[:size]] is node, "not where its key says"
    assert tree.num_tokens == sum(len(node.tokens) for node in tree.nodes())
