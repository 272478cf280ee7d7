# Exported from book/08_prefix_hashing.py by tools/export.py; edit the chapter, not this file.
"""What names a block: its tokens, all tokens before it, and whatever else shapes its K/V.

Names are interned.  A node of the tree stands for one (parent, tokens, extra parts), compared
byte for byte, so that two contents never share a name.  A digest is made only on request.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, repeat
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Key: TypeAlias = int | bytes  # a node's id; or a root, which stands before a first block
Part: TypeAlias = tuple[str, str | bytes | int]  # kind and value, such as ("salt", "tenant 7")
Tokens: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]
Parts: TypeAlias = Mapping[int, Sequence[Part]]  # extra parts of single blocks, by index
NO_PARTS: Parts = MappingProxyType({})
TOKEN_BYTES = 4


def token_array(tokens: Tokens) -> NDArray[np.int32]:
    """`tokens` as int32 [len], without a copy where they are such an array already.

    Raises: ValueError unless all are whole numbers from 0 to 2^31 - 1.
    """
    try:
        if not isinstance(tokens, np.ndarray):
            if isinstance(tokens, (bytes, bytearray, str)):
                raise TypeError(f"a {type(tokens).__name__}")
            ids = np.array(array("I", tokens), copy=False).view(np.int32)  # quickest off a list
        elif tokens.dtype.kind not in "iu" or tokens.ndim != 1:
            raise TypeError(f"{tokens.dtype} of shape {tokens.shape}")
        else:
            ids = np.ascontiguousarray(tokens, np.int32)
            if tokens.dtype.itemsize > TOKEN_BYTES and (ids != tokens).any():
                raise OverflowError("a number of more than 32 bits")
        if len(ids) and (least := ids.min()) < 2:
            if least < 0:
                raise OverflowError("a number outside that range")
            if not isinstance(tokens, np.ndarray):
                refuse_bools(tokens, ids)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"tokens: whole numbers from 0 to 2^31 - 1, not {error}") from None
    return ids


def refuse_bools(tokens: Sequence[int], ids: NDArray[np.int32]) -> None:
    """TypeError if one of `tokens` is True or False, which Python takes for 1 and 0."""
    for place in (ids < 2).nonzero()[0].tolist():
        if isinstance(tokens[place], bool):
            raise TypeError(f"{tokens[place]}")


def encode_parts(parts: Sequence[Part] = ()) -> bytes:
    """One byte string for `parts`; other kinds, types, values or another order give another.

    Each field is preceded by its length, each value by its type.  No parts: b"".
    Raises: ValueError for a value that is neither str, bytes nor int.
    """
    out = bytearray()
    for kind, value in parts:
        tag = next((t for t in (str, bytes, int) if isinstance(value, t)), None)
        if tag is None or isinstance(value, bool):
            raise ValueError(f"parts: {kind} = {value!r} is neither str, bytes nor int")
        raw = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
        for field in (kind.encode("utf-8", "surrogatepass"), tag.__name__.encode(), raw):
            out += len(field).to_bytes(8, "little") + field
    return bytes(out)


@cache
def chunk_type(block_size: int) -> np.dtype[np.void]:
    """The bytes of a block's tokens as one NumPy item."""
    return np.dtype((np.void, block_size * TOKEN_BYTES))


def split_chunks(
    tokens: NDArray[np.int32], block_size: int, parts: Parts = NO_PARTS, first: int = 0
) -> list[bytes]:
    """The blocks of `tokens` from `first` on, as bytes, each with its extra parts behind it."""
    chunks: list[bytes] = tokens.view(chunk_type(block_size))[first:].tolist()
    for index, extra in parts.items():
        if first <= index < first + len(chunks):
            chunks[index - first] += encode_parts(extra)
    return chunks


def filled_chunks(tokens: Tokens, block_size: int, count: int, parts: Parts) -> list[bytes]:
    """`split_chunks` of exactly `count` blocks; ValueError where `tokens` are not so many."""
    data = token_array(tokens)
    if len(data) != count * block_size:
        raise ValueError(f"tokens: {len(data)} for {count} blocks of {block_size}")
    return split_chunks(data, block_size, parts)


class Node:
    """One name: `chunk`, token bytes and encoded parts, behind `parent`, a node or a root.

    `block` holds its K/V, -1 where none does; `twins` are further such blocks; `behind` is None,
    the one node that follows, or {chunk: node} of several; `id` is -1 until `KeyTree.number`;
    `trail` is a long walk that began here, with its tokens.
    """

    __slots__ = ("behind", "block", "chunk", "digest", "id", "parent", "trail", "twins")

    def __init__(self, parent: Node | bytes, chunk: bytes) -> None:
        self.parent, self.chunk, self.digest = parent, chunk, b""
        self.id = self.block = -1
        self.behind: Node | dict[bytes, Node] | None = None
        self.twins: tuple[int, ...] = ()
        self.trail: tuple[NDArray[np.int32], list[Node]] | None = None

    def follower(self, chunk: bytes) -> Node | None:
        """The node of `chunk` behind this one, if there is one."""
        behind = self.behind
        if isinstance(behind, dict):
            return behind.get(chunk)
        return behind if behind is not None and behind.chunk == chunk else None

    def followers(self) -> list[Node]:
        """All nodes right behind this one."""
        if isinstance(self.behind, dict):
            return list(self.behind.values())
        return [] if self.behind is None else [self.behind]


class KeyTree:
    """All names in use, each made once: interning in place of hashing.

    State
        roots  {(root, chunk): Node}, the names of first blocks; the others stand behind them.
        by_id  {id: Node}, of nodes with a number.
    Ids count up and are never used again.  A node lives while a block or a follower needs it.
    """

    def __init__(self) -> None:
        self.roots: dict[tuple[bytes, bytes], Node] = {}
        self.by_id: dict[int, Node] = {}
        self._next_id = 0

    def number(self, node: Node) -> int:
        """The id of `node`; it gets one when somebody first asks."""
        if node.id < 0:
            node.id = self._next_id
            self.by_id[node.id] = node
            self._next_id += 1
        return node.id

    def above(self, key: Key) -> Node | bytes:
        """What stands for `key`: a node or the root itself.  ValueError for a node that is gone."""
        if isinstance(key, bytes):
            return key
        node = self.by_id.get(key) if type(key) is int else None
        if node is None:
            raise ValueError(f"key = {key!r}: neither a root nor a node, or a node no longer")
        return node

    def find(self, above: Node | bytes, chunk: bytes) -> Node | None:
        """The node of `chunk` behind `above`, a node or a root, if there is one."""
        if isinstance(above, Node):
            return above.follower(chunk)
        return self.roots.get((above, chunk))

    def intern(self, parents: Iterable[Node | bytes], chunks: Iterable[bytes]) -> Iterator[Node]:
        """The node of each chunk behind its parent, made where there is none yet.

        Where parents run out, the node before is the parent: a chain has one, above its first.
        """
        above: Node | bytes = b""
        for parent, chunk in zip(chain(parents, repeat(None)), chunks):
            above = above if parent is None else parent
            if isinstance(above, Node) and above.behind is None:
                above.behind = node = Node(above, chunk)  # most often: a text grows at its end
            else:
                node = self.find(above, chunk) or self._attach(above, chunk)
            above = node
            yield node

    def _attach(self, above: Node | bytes, chunk: bytes) -> Node:
        node = Node(above, chunk)
        if not isinstance(above, Node):
            self.roots[above, chunk] = node
        elif isinstance(above.behind, dict):
            above.behind[chunk] = node
        else:
            assert above.behind is not None
            above.behind = {above.behind.chunk: above.behind, chunk: node}
        return node

    def prune(self, node: Node) -> None:
        """Drop `node` if nothing needs it, and then its ancestors likewise."""
        while node.block < 0 and not node.behind:
            parent, node.trail = node.parent, None  # a trail leads back to its node
            self.by_id.pop(node.id, None)
            if not isinstance(parent, Node):
                del self.roots[parent, node.chunk]
                break
            if isinstance(parent.behind, dict):
                del parent.behind[node.chunk]
            else:
                parent.behind = None
            node = parent

    def ride(self, above: Node | bytes, tokens: NDArray[np.int32], block_size: int) -> list[Node]:
        """The findable nodes that `tokens` share with the trail of their first block."""
        first = self.find(above, tokens[:block_size].tobytes())
        if first is None or first.trail is None:
            return []
        before, nodes = first.trail
        length = min(len(before), len(tokens))
        differ = before[:length] != tokens[:length]
        at = int(differ.argmax())
        shared = nodes[: (at if differ[at] else length) // block_size]
        blocks = [node.block for node in shared]
        if -1 in blocks:  # a trail keeps nodes alive: not beyond what it led to
            shared = shared[: blocks.index(-1)]
            first.trail = (before[: len(shared) * block_size].copy(), shared) if shared else None
        return list(shared)

    def digest(self, above: Node | bytes, block_size: int) -> bytes:
        """SHA-256 of a node or root, the same in every process; kept with the node once made."""
        path: list[Node] = []
        while isinstance(above, Node) and not above.digest:
            path.append(above)
            above = above.parent
        digest = above.digest if isinstance(above, Node) else root_digest(above, block_size)
        for node in reversed(path):
            digest = node.digest = hashlib.sha256(digest + node.chunk).digest()
        return digest

    def nodes(self) -> Iterator[Node]:
        """All of them, a parent before its followers."""
        left = list(self.roots.values())
        while left:
            node = left.pop()
            yield node
            left += node.followers()


def root_digest(root: bytes, block_size: int) -> bytes:
    """SHA-256 of a root; the block size is in it, since it decides what a block covers."""
    return hashlib.sha256(b"root %d " % block_size + root).digest()


def known_chain(
    tree: KeyTree, above: Node | bytes, chunks: Iterable[bytes]
) -> Iterator[Node | None]:
    """The nodes of `chunks` one behind the other, None from the first that is missing on."""
    last: Node | bytes | None = above
    for chunk in chunks:
        last = node = None if last is None else tree.find(last, chunk)
        yield node


def prompt_digests(root: bytes, tokens: Tokens, block_size: int) -> list[str]:
    """Hex digests of the full blocks of `tokens` behind `root`: what a router computes.

    Needs no cache, and equals `PrefixCache.digest` of the same blocks in any process.
    """
    data, width = token_array(tokens).tobytes(), block_size * TOKEN_BYTES
    found, digest = [], root_digest(root, block_size)
    for end in range(width, len(data) + 1, width):
        digest = hashlib.sha256(digest + data[end - width : end]).digest()
        found.append(digest.hex())
    return found
