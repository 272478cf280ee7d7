# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Prefix hashing
#
# Two users open with the same words, and a server could compute those words once. So it keeps the K/V
# of each full block in a dictionary, under the words that the block holds. Here a token is a word, a
# block has four, and in place of K/V stands what they depend on: all words read so far.

# %%
cache = {}  # the words of a block -> what its last token has read
for chat, text in [("A", "you are kind . what am i ?"), ("B", "you are rude . what am i ?")]:
    words = text.split()
    for start in (0, 4):
        block = tuple(words[start : start + 4])
        read = cache.setdefault(block, " ".join(words[: start + 4]))
    print(chat, "answers after reading:", read)

# %% [markdown]
# B was called rude, and answers as if it had been called kind. Its second block holds the same four
# words as A's, but not the same K/V: each of them was computed by attention over everything before it.
# **The question.** What must a block's name say, so that whoever finds it finds the right bytes, and
# only those who may?
#
# :::{card} This chapter
# - **You need**: chapter 3; the model part needs chapter 5.
# - **Exports**: `prefix_keys` (`token_array`, `encode_parts`, `KeyTree`, `prompt_digests`),
#   `block_names` (`BlockNames`, `Stored`, `Removed`), `prefix_cache` (`PrefixCache`, `admit_cached`,
#   `publish_full`, `publish_filled`, `give_back`).
# - **Device**: CPU.
# - **Run time**: half a minute, most of it the model.
# - **You are here**: 00 tour · 01 sizing · 02 contiguous pool · 03 block manager · 04 paged
#   attention · 05 guest model · 06 copy-on-write · 07 sampling · **08 prefix cache** · 09
#   scheduling · 10 preemption · 11 decode kernel · 12 prefill kernel · 13 engine · 14 full speed
# :::
#
# First, what there is to win. A prompt of 2,000 tokens that every request carries, and an agent whose
# tools take 3,000 tokens to describe, in a model that keeps 320 KiB a token:

# %%
from paged_kv.sizing import blocks_for, format_bytes

token, B = 320 * 2**10, 16
print(f"{token // 2**10} KiB a token")
for what, users, shared in [("requests", 1000, 2000), ("agent sessions", 500, 3000)]:
    once = blocks_for(shared, B) * B * token
    apart = users * shared * token
    print(f"{users:,} {what}: {format_bytes(apart)} apart, {format_bytes(once, 3)} once in "
          f"{blocks_for(shared, B)} blocks: {apart / once:.0f} times")

# %% [markdown]
# 610.35 GiB against 625 MiB, and 457.76 GiB against 940 MiB: 499 times, not 500, since 3,000 tokens
# end within a block. The same factor applies to the arithmetic of the prefill.
#
# ## A name covers all that came before
#
# The repair is old. Let a block's name be made of its own tokens *and the name of the block before it*.
# Names then form chains, and one look-up a block walks down the chain: the first that is missing ends
# the walk, since no later block can stand behind it.
#
# ```
# root ──► "you are kind ." ──► "what am i ?"          A
#      └─► "you are rude ." ──► "what am i ?"          B: other parent, other name
# ```
#
# Only full blocks get a name. A partly filled one will be written again, and what is written must not be
# shared (I3). And whatever else shapes K/V belongs in the name: an adapter (small extra weights), a picture in place of some
# tokens. We put what holds for a whole sequence before its first block, as a *root*.
#
# :::{admonition} Predict
# :class: tip
# Chat A opens with block X and goes on with twenty blocks S. Chat B opens with block Y and goes on with
# the same S. How many blocks can B reuse?
# :::
#
# :::{dropdown} Reasoning
# None. The first block differs, so its name does, so does the name of each block behind it, and rightly:
# the K/V of S depend on X. A change of one token at the front costs everything behind it. Whoever writes
# prompts puts what changes, such as the date, at the end.
# :::

# %%
import hashlib
from fractions import Fraction


def naive_names(tokens, block_size=4):
    """A chain of digests, the way most systems make it."""
    name, names = b"", []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        block = str(tokens[start : start + block_size]).encode()
        name = hashlib.sha256(name + block).digest()
        names.append(name)
    return names


suffix = list(range(80))
a, b = (naive_names([opening, 1, 2, 3, *suffix]) for opening in (7, 8))
print("blocks:", len(a), " names that A and B share:", len(set(a) & set(b)))

# %% [markdown]
# ## What a collision costs
#
# SHA-256, 32 bytes that nobody can make two texts share, is slow for this purpose, and a tempting key has 64 bits: multiply what you have by an odd
# constant, add the next token. By chance, two of a million blocks collide with a probability of about
# $10^{12} / 2^{65}$, which nobody needs to fear. But a prompt is not chance. Its author chooses it.
#
# Two lists of $n$ tokens with one parent get the same key if their differences $d_i$ satisfy
# $\sum_i d_i\, M^{\,n-1-i} \equiv 0 \pmod{2^{64}}$. Each $d_i$ only has to stay within the
# vocabulary. The solutions form a lattice, and a short vector of a lattice is found much as Euclid found common divisors:
# take multiples of the shorter from the longer, again and again.

# %%
M = 6364136223846793005  # a multiplier of good repute


def naive_key(parent, tokens):
    """64 bits for a block: fast, and made for honest users."""
    key = parent
    for token in tokens:
        key = (key * M + token + 1) % 2**64
    return key


def dot(u, v):
    return sum(x * y for x, y in zip(u, v))


def short_vector(basis):
    """Take multiples of shorter vectors from longer ones until none gets shorter."""
    shrinking = True
    while shrinking:
        shrinking = False
        basis.sort(key=lambda v: dot(v, v))
        for i in range(len(basis)):
            for other in basis[:i]:
                factor = round(Fraction(dot(basis[i], other), dot(other, other)))
                basis[i] = [x - factor * y for x, y in zip(basis[i], other)]
                shrinking |= factor != 0
    return basis[0]

# %%
n = 8  # tokens in a block
powers = [pow(M, n - 1 - i, 2**64) for i in range(n)]
lattice = [[0] * n for _ in range(n)]  # every row, and every sum of rows, fits the equation
for i in range(n - 1):
    lattice[i][i], lattice[i][-1] = 1, -powers[i]
lattice[-1][-1] = 2**64
difference = short_vector(lattice)
print("differences:", difference)

# %%
victim = [900 + max(0, -d) for d in difference]  # all are valid ids of any vocabulary
attacker = [token + d for token, d in zip(victim, difference)]
print("victim:  ", victim)
print("attacker:", attacker)
print("keys:    ", hex(naive_key(0, victim)), hex(naive_key(0, attacker)))
assert naive_key(0, victim) == naive_key(0, attacker) and victim != attacker
assert 0 <= min(attacker) and max(victim + attacker) < 32_000

# %% [markdown]
# Two different blocks, one key, no luck involved. What it costs shows in the bytes. A victim's block lies
# in a store, filed under its key, and an attacker sends the other list.

# %%
import torch

from paged_kv.block_manager import BlockManager
from paged_kv.kv_store import KVStore
from paged_kv.sizing import KVSpec

manager = BlockManager(num_blocks=4, block_size=8, max_seqs=4, max_seq_len=32)
store = KVStore(KVSpec(num_layers=1, num_kv_heads=1, head_size=4, dtype="fp32"), 4, 8)
row = manager.add(8)
secret = torch.randn(8, 1, 4, generator=torch.manual_seed(8))  # K of the victim's tokens
store.write(0, secret, -secret, torch.arange(8))
naive_table = {naive_key(0, victim): manager.tables.ids(row)[0]}

hit = naive_table[naive_key(0, attacker)]
print("the attacker's prompt finds block", hit)
print("its bytes are the victim's:", torch.equal(store.keys(0)[hit], secret))

# %% [markdown]
# The attacker's model now attends to the victim's keys and values, and its answer depends on them. This
# is no theory. Megatron-LM named its blocks by such a polynomial until 2026, with 31 in place of our multiplier, so that
# one token up by 1 and its neighbour down by 31 collide (pull request 4158 replaced it by SHA-256); vLLM went from Python's `hash` to SHA-256 (pull request
# 15297); a TODO in openvino.genai still says that tokens should be compared (issue 3722).
#
# There are two ways out. Use a digest so wide and so well mixed that nobody can construct a collision; or
# compare what the digest stands for. The second has a consequence. If tokens are stored and compared
# anyway, the hash only has to find the place, and a dictionary does that by itself. File the block under
# the pair (parent's number, the token bytes), let the dictionary hash and compare it, and number the
# entries. This is *interning*. Equal pairs have one number, different pairs have two, by construction, and the
# number is the parent of the next pair.
#
# Which is faster? The candidates name and look up the 128 blocks of a known prompt of 2,048 tokens.
# Python's tokenizers give lists of integers, so conversion is part of the price; from arrays it is not.

# %% tags=["hide-input"]
import json

import matplotlib.pyplot as plt

from paged_kv.draw import book_style

book_style()
result = json.load(open("../benchmarks/results/prefix_cache.json"))
keys = [row for row in result["keys"] if "us_block_lists" in row]
fig, ax = plt.subplots(figsize=(6.4, 3.4))
names = [row["key"] for row in keys]
ax.barh(names, [row["us_block_lists"] for row in keys], height=0.38, align="edge", label="lists")
ax.barh(names, [row.get("us_block_arrays", 0) for row in keys], height=-0.38, align="edge",
        label="int32 arrays")
ax.invert_yaxis()
ax.set(xlabel="us a block")
ax.legend()
plt.show()
print("measured:", result["device"], result["statistic"])
for row in result["keys"]:
    print("measured:", row)
for form in ("us_block_lists", "us_block_arrays", "us_block_new"):
    quickest = min((row for row in keys if form in row), key=lambda row: row[form])
    assert quickest["key"] in ("interning of bytes", "a tree of bytes"), form

# %% [markdown]
# *Figure: time to name and find one block of 16 tokens by each kind of key, from lists and from arrays of
# int32 (vLLM takes lists only). The shortest bars are those of interned bytes, in one dictionary or in the tree that this
# chapter builds.*
#
# Interning is exact *and* the quickest, on the machine named in the output: it does less. Its two forms
# take about the same, for known names and, the last figure of a line, for new ones. vLLM's row is its
# naming alone, without a look-up. Tuples of Python integers would save the conversion of lists, but need
# several times the memory, and `1`, `1.0` and `True` are one key to Python. We intern bytes.
#
# One thing remains for which a digest is right. A key that leaves the process, to a router or another
# machine, has to mean the same everywhere, so it is a SHA-256 chain, computed when somebody asks.
# And a rule for the numbers: none is ever used twice, or an old key would name new content.
#
# ## Bytes that mean one thing
#
# A name must be canonical: one content, one byte string, wherever it comes from. Token ids become int32, so a
# list, an array of int64 and a slice of either agree; what is no token id is refused by name. The
# extra parts carry their kind, their type and their lengths. `("ab", "c")` and `("a", "bc")` differ, as do the
# adapter "S" and the salt "S", and the number 1 and the text "1".

# %% tags=["export:prefix_keys"]
"""What names a block: its tokens, all tokens before it, and whatever else shapes its K/V.

Names are interned.  A node of the tree stands for one (parent, tokens, extra parts), compared
byte for byte, so that two contents never share a name.  A digest is made only on request.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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


# %% tags=["export:prefix_keys"]
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


# %% tags=["export:prefix_keys"]
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


# %% tags=["export:prefix_keys"]
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

# %%
import numpy as np

for tokens in ([1.0, 2], [-1], [2**31], np.array([2**32 + 5]), "text", [5, True]):
    try:
        token_array(tokens)
    except ValueError as error:
        print(error)
pairs = [("adapter", "S"), ("salt", "S"), ("salt", "1"), ("salt", 1), ("ab", "c"), ("a", "bc")]
assert len({encode_parts([pair]) for pair in pairs}) == len(pairs)

# %% [markdown]
# ## A tree of names
#
# | field of a `Node` | meaning |
# |---|---|
# | `parent`, `chunk` | what it names: the node (or root) before it, and its own bytes |
# | `behind` | what follows: nothing, one node, or a dictionary of several by their bytes |
# | `block`, `twins` | the block that holds its K/V, -1 for none, and further ones |
# | `trail` | the longest walk that began here of late: tokens, and the nodes they led to |
# | `id` | its number, given when somebody first asks, never used again |
# | `digest` | its SHA-256, once somebody has asked for it |
#
# One dictionary for all pairs would do. But it grows with the pool, and each entry needs a pair and a number besides its node.
# Let each node keep those behind it instead. Most have a single one, since an answer grows at one end, so no dictionary is
# needed at all: comparing 64 bytes finds it. A number is needed only by those who cannot hold the node itself.
#
# A node lives while a block or a child needs it. If a parent loses its block, its children stay, named
# as before: compute the parent again and they are found again. When the last need goes, the node goes, and its
# ancestors with it if nothing else holds them. So the tree never has more nodes than named blocks and their
# ancestors, however many requests have passed.

# %% tags=["export:prefix_keys"]
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


# %% tags=["export:prefix_keys"]
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


# %% tags=["export:prefix_keys"]
class KeyTree(KeyTree):  # type: ignore
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


# %% tags=["export:prefix_keys"]
class KeyTree(KeyTree):  # type: ignore
    def ride(
        self, above: Node | bytes, tokens: NDArray[np.int32], block_size: int
    ) -> list[Node]:
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


# %% tags=["export:prefix_keys"]
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

# %% [markdown]
# `ride` is the one optimisation. Most prompts begin like an earlier prompt, for thousands of tokens. Walking block
# by block asks a question for each of 125 blocks, which one comparison of two arrays can answer. So the first
# block of a walk remembers it, and the next prompt rides along as far as its tokens are the same.
# It is exact: a node's name never changes, and nodes that lost their block end the ride.
#
# ## Which block has which name
#
# Names and blocks are tied both ways: a node knows its blocks, a block its node. The epoch of chapter 3
# says whether the tie still holds.
#
# > **I4.** A findable block holds the K/V of its name: its epoch is what it was when it was named.
#
# The world outside learns of changes by events. A `Stored` says that a key became findable, a `Removed` that it
# ceased to be. An event and its opposite cancel as long as nobody has fetched them, so the log stays short.

# %% tags=["export:block_names"]
"""Which block holds which name, and the events that say so to the world outside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_kv.block_pool import BlockPool


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


# %% tags=["export:block_names"]
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


# %% tags=["export:block_names"]
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


# %% tags=["export:block_names"]
class BlockNames(BlockNames):  # type: ignore
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


# %% tags=["export:block_names"]
class BlockNames(BlockNames):  # type: ignore
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

# %% [markdown]
# Look at `take_away` with two blocks of one name, called *twins*. They arise when two requests with one
# prompt run in the same step, and in one case every day: a prompt found whole still computes its last block. Tables
# only ever grow at the end, so a twin is not merged; both stay, and losing one must not hide the other.
#
# ## Match, publish, forget
#
# The cache itself is what is left: three verbs. `match` finds the longest chain, and changes nothing. `publish`
# makes blocks findable once their tokens are known. `forget` is called by whoever takes blocks, in the
# same step.
#
# `match` never returns a whole prompt. One token at least has to be computed, or there would be no logits to sample
# from: of $n$ tokens it reuses at most $\lfloor (n-1)/B \rfloor B$.

# %% tags=["export:prefix_cache"]
"""Blocks found again by content: match, publish, forget; admission over a BlockManager."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_kv.block_manager import BlockManager
from paged_kv.block_pool import BlockIds, BlockPool, OutOfBlocks, checked_ids, places_of
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


# %% tags=["export:prefix_cache"]
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


# %% tags=["export:prefix_cache"]
class PrefixCache(PrefixCache):  # type: ignore
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


# %% tags=["export:prefix_cache"]
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


# %% tags=["export:prefix_cache"]
class PrefixCache(PrefixCache):  # type: ignore
    def publish(
        self, parent: Key, tokens: Tokens, ids: BlockIds, parts: Parts = NO_PARTS
    ) -> Key:
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

# %% [markdown]
# Now a run by hand with $B = 4$ and 8 blocks. Chat A brings ten tokens; B begins with the same eight.

# %%
from paged_kv.draw import draw_pool

manager = BlockManager(num_blocks=8, block_size=4, max_seqs=4, max_seq_len=32)
cache = PrefixCache(manager.pool, block_size=4)
tokens_a, tokens_b = list("you are kin"[:10]), list("you are rude")
tokens_a, tokens_b = ([ord(letter) for letter in text] for text in (tokens_a, tokens_b))
a = manager.add(len(tokens_a))
last = cache.publish(b"", tokens_a[:8], manager.tables.ids(a)[:2])
print("A's blocks", manager.tables.ids(a), "  key of the last full one:", last)
print("B finds", cache.match(b"", tokens_b), "  A's own text again:", cache.match(b"", tokens_a))
print("eight tokens only:", cache.match(b"", tokens_b[:8]), "  none:", cache.match(b"", []))
cache.check()
draw_pool(manager.snapshot({"A": a}), title="A's full blocks are findable: 0 and 1")

# %% [markdown]
# B finds both blocks that it shares. With eight tokens it would find one: the second is complete, but then nothing
# would be left to compute.
#
# ## Admission
#
# Putting it together has an order that matters. Found blocks may be idle, standing in the free queue with their bytes
# intact. They cost free blocks too: claiming one takes it out of the queue. So `admit_cached` counts both, refuses
# if there is too little, claims what it found, and only then takes new ones. In the other order `take` might
# hand out the very block that was found.

# %% tags=["export:prefix_cache"]
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


# %% tags=["export:prefix_cache"]
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


# %% tags=["export:prefix_cache"]
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

# %% [markdown]
# `publish_full` is for prefills, chunk by chunk: it publishes what is full and known, each block once. Where the chunks
# ended leaves no trace in the keys. `publish_filled` does the same for a batch of decoding rows. Both know from the tables that
# the blocks are in use, so where none has a name yet they skip the checks of `publish`. Blocks
# are published when their step is *scheduled*, before the bytes exist: every layer writes the K/V of the
# whole batch before it attends, so a reader in the same step is right. If the step fails, `forget` takes them back.
#
# :::{admonition} Predict
# :class: tip
# A pool of 8 blocks, $B = 4$. A (ten tokens) has finished. Its three blocks are idle. B comes with twelve tokens that begin
# with A's eight, while C holds four blocks. One block was never used. Is B admitted?
# :::
#
# :::{dropdown} Reasoning
# Four blocks are idle. B needs three: two that it finds, which are among the idle, and a new one. $2 + 1 \le 4$, so
# yes. With C holding six, two would be idle, B's hits; the new block is missing, and B is refused though "two free
# blocks, one needed" sounds enough.
# :::

# %%
give_back(manager, a)
c = manager.add(16)
print("idle, next first:", manager.pool.free_ids(), "  B would find", cache.match(b"", tokens_b))
before = manager.snapshot({"C": c})
b, found = admit_cached(manager, cache, tokens_b)
print("B has", manager.tables.ids(b), "found", found, "computes", len(tokens_b) - found, "tokens")
print(cache.stats, f"hit rate {cache.stats.hit_rate:.2f}")
cache.check(), manager.check()
draw_pool(manager.snapshot({"B": b, "C": c}), title="B over A's blocks", before=before)

# %%
from paged_kv.block_pool import OutOfBlocks

give_back(manager, b)
crowd = manager.add(8)
try:
    admit_cached(manager, cache, tokens_b)
except OutOfBlocks as error:
    print("refused:", error, "  still found:", cache.match(b"", tokens_b))
give_back(manager, crowd)

# %% [markdown]
# **Turn the knob.** Give the pool 9 blocks; expect B to be admitted beside `crowd`.
#
# ## What is forgotten first
#
# Nobody evicts. Idle blocks stand in the pool's queue, and whoever takes a block takes the front one, with its
# name. The order of the queue is the policy: the block idle for longest goes first, which is *least recently used*. One
# detail makes it right. `give_back` releases a row's blocks **tail first**. A chain is found from its head; if the head
# went first, all the others would keep their bytes and never be found again.
#
# So a child always becomes idle before its parent: every row that holds the child holds a parent before it and lets go of it later.
#
# :::{admonition} Predict
# :class: tip
# Three prompts of two blocks finish in the order A, B, C, in a pool of 8. Then A's prompt comes again and finishes.
# Then all eight blocks are taken, one at a time. In which order do blocks lose their names?
# :::
#
# :::{dropdown} Reasoning
# A block that was never used stands in front. Then the first block of A's second half: it was computed again (a token
# stays to compute), in a new block, so the old one, now a twin, has been idle longest. Then B's tail, B's head, C's tail, C's head, and A
# last, tail before head: it was claimed and given back.
# :::

# %%
manager = BlockManager(num_blocks=8, block_size=4, max_seqs=4, max_seq_len=32)
cache = PrefixCache(manager.pool, block_size=4, events=True)
prompts = {name: [ord(name)] * 8 for name in "ABC"}
place = {}
for name in "ABCA":
    row, found = admit_cached(manager, cache, prompts[name])
    publish_full(manager, cache, row, prompts[name], found // 4)
    place |= {block: f"{name}{at}" for at, block in enumerate(manager.tables.ids(row))}
    give_back(manager, row)
print("queue:", [place.get(block, "-") for block in manager.pool.free_ids()])
lost = []
for _ in range(8):
    (block,) = manager.pool.take(1)
    if cache.key_of(block) is not None:
        lost.append(place[block])
    cache.forget([block])
    cache.check()
print("lost: ", lost)

# %% [markdown]
# The first A1 is the old twin. The name outlived it, with the second. The lab on eviction compares this queue with
# cleverer orders, on traces of real traffic.
#
# ## A router that follows
#
# A fleet of servers wants each request sent to where its prefix lies. The router cannot ask each server for each request;
# it follows the events. They are plain data, and the key of a prompt's block can be computed by anybody who has the tokens.

# %%
from dataclasses import asdict

wire = [json.dumps(asdict(event)) for event in cache.drain_events()]
print("events after all that:", len(wire), "(stored and removed cancelled out)")
manager = BlockManager(num_blocks=8, block_size=4, max_seqs=4, max_seq_len=32)
cache = PrefixCache(manager.pool, block_size=4, events=True)
prompt = prompts["A"] + [1]
row, _ = admit_cached(manager, cache, prompt)
publish_full(manager, cache, row, prompt, 0)
known = set()
for event in map(json.loads, [json.dumps(asdict(event)) for event in cache.drain_events()]):
    (known.add if event["kind"] == "stored" else known.discard)(event["key"])
wanted = prompt_digests(b"", prompts["A"] + [2, 3], block_size=4)
print("the router expects", sum(key in known for key in wanted), "blocks of", len(wanted))

# %% [markdown]
# After every step the keys that a router replayed equal those that are findable; the tests run
# random programs to show it.
#
# ## Who may see a hit
#
# A hit skips prefill, so the answer begins sooner. Whoever measures time learns what others have sent, and can guess a
# secret block by block: with a right guess one block fewer is computed. No clock is needed to see it here; the number
# of computed tokens is the signal.

# %%
def probe(guesses, salts):
    manager = BlockManager(num_blocks=64, block_size=4, max_seqs=2, max_seq_len=32)
    cache = PrefixCache(manager.pool, block_size=4)
    victim, prober = (cache.root([("salt", salt)] if salt else ()) for salt in salts)
    row, _ = admit_cached(manager, cache, secret_pin, victim)
    publish_full(manager, cache, row, secret_pin, 0, victim)
    computed = []
    for guess in guesses:
        row, found = admit_cached(manager, cache, [*guess, 0], prober)
        computed.append(len(guess) + 1 - found)
        give_back(manager, row)
    return computed


secret_pin = [7, 3, 3, 9, 1, 4, 4, 2, 5]
guesses = [[7, 3, 3, 8], [7, 3, 3, 9], [7, 3, 3, 9, 1, 4, 4, 2]]
print("computed tokens, no salt: ", probe(guesses, (None, None)))
print("computed tokens, salted:  ", probe(guesses, ("tenant 1", "tenant 2")))

# %% [markdown]
# Unsalted, the right guess computes one token where the wrong one computes five. With a salt for each tenant
# (a customer apart from the others) in the root,
# every guess of a given length costs the same, whatever anybody else has sent. Isolation has a price: what two tenants both send is
# kept twice. So salts follow trust: one a tenant, or one for each user, or none for a public system prompt. A lab
# measures the channel in real times to the first token.
#
# ## A real model
#
# Now with SmolLM2 {cite}`allal2025smollm2`: a system prompt, three questions, with and without the cache. The answers must be the
# same, token for token. Only the tokens that were not found are packed; attention reads the others through the table.

# %%
import warnings

warnings.filterwarnings("ignore", message="IProgress not found")  # we show no progress bars
from paged_kv.hf_adapter import host, load_guest
from paged_kv.packed_batch import pack

smol, tokenizer = load_guest()
guest = host(smol, num_blocks=40)
opening = "<|im_start|>system\nYou know " + "animals, plants, stars, " * 20
system = tokenizer(opening)["input_ids"][:100]
questions = ["How many legs has a spider?", "What do bees make?", "Is the sun a star?"]
asked = [system + tokenizer("<|im_end|>\n<|im_start|>user\n" + question
                            + "<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
         for question in questions]


def answer_all(batches, cached, new_tokens=6):
    """Greedy answers, and how many prompt tokens the model computed."""
    manager = BlockManager(num_blocks=40, block_size=16, max_seqs=4, max_seq_len=256)
    cache, answers, computed = PrefixCache(manager.pool, 16), [], 0
    for batch in batches:
        rows, new_ids = [], []
        for prompt in batch:
            row, found = admit_cached(manager, cache, prompt)
            if cached:
                publish_full(manager, cache, row, prompt, found // 16)
            rows.append(row)
            new_ids.append(prompt[found:])
        computed += sum(map(len, new_ids))
        texts = [[] for _ in batch]
        for _ in range(new_tokens):
            new_ids = guest.forward(pack(manager.tables, rows, new_ids)).argmax(-1, True).tolist()
            texts = [text + new for text, new in zip(texts, new_ids)]
            cache.forget(manager.append(rows))
        answers += texts
        for row in rows:
            give_back(manager, row)
    return answers, computed


one_by_one, together = [[prompt] for prompt in asked], [asked]
plain, all_tokens = answer_all(one_by_one, cached=False)
for name, batches in (("one by one", one_by_one), ("together", together)):
    answers, computed = answer_all(batches, cached=True)
    print(f"{name}: {computed} prompt tokens computed in place of {all_tokens}, same answers:",
          answers == plain)
    assert answers == plain
print([tokenizer.decode(answer) for answer in plain])

# %% [markdown]
# "Together" means that all three are admitted in one step, and the second and third find blocks whose bytes do not exist yet. They
# will, layer by layer, just in time.
#
# :::{admonition} Predict
# :class: tip
# The shared part has 2,050 tokens, $B = 16$. How many of its blocks does the second request reuse, and how many of
# its tokens does it compute again?
# :::
#
# :::{dropdown} Reasoning
# 2,050 = 128 x 16 + 2: 128 blocks, 2,048 tokens, are found. The other 2 lie in a block that ends with each request's own tokens, and
# are computed again. A grain of 16 costs at most 15 tokens a request.
# :::

# %% tags=["hide-input"]
big = BlockManager(num_blocks=300, block_size=16, max_seqs=2, max_seq_len=4096)
big_cache, shared = PrefixCache(big.pool, 16), list(range(2050))
row, _ = admit_cached(big, big_cache, [*shared, 1, 2, 3])
publish_full(big, big_cache, row, [*shared, 1, 2, 3], 0)
_, found = admit_cached(big, big_cache, [*shared, 7, 8, 9])
print(f"{found // 16} blocks = {found} tokens found, {2050 - found} computed again")
assert (found // 16, 2050 - found) == (128, 2)
model = json.load(open("../benchmarks/results/prefix_model.json"))
print("measured:", model["device"], "torch", model["versions"]["torch"])
print("measured:", model["workload"])
for run in model["rows"]:
    print(f"measured: {run['arrival']:10} {'cache' if run['cache'] else 'none '}"
          f" {run['tokens_computed']:6,} prompt tokens computed,"
          f" first token after {run['first_ttft_s']:6.2f} s, median {run['median_ttft_s']:6.2f} s,"
          f" at most {run['peak_blocks']} blocks")

# %% [markdown]
# The full-sized run is in the output: twelve requests behind 2,000 shared tokens. The first of them pays for all; the others start
# after a fraction of its time, because they compute their own tokens and no more. Admitted together, all twelve wait for the one long prefill, and still
# for about a tenth of what it would be without the cache. The answers of the four runs are the same; the script fails otherwise.
#
# ## What the bookkeeping costs
#
# A cache that costs more than it saves is none. The script `benchmarks/prefix_cache.py` runs the whole bookkeeping (name, look up, allocate, decode,
# release) beside vLLM's, on two workloads: 2,000 requests behind 2,000 shared tokens; and 500 agent sessions of eight
# turns behind 3,000, in a pool that cannot hold them all.
#
# From counts one expects: ours hashes nothing twice, compares shared prefixes as arrays and decodes a batch at once. What cannot shrink is
# the conversion of lists. The gain should be largest where prompts are long and shared, and vanish for short prompts that nobody repeats.
#
# One number of the workload decides much, and is a choice: how many tokens each request decodes. The more, the more of the
# time is decoding, where a batch gains most. The comparison fixes 64, about the length of a short answer; the second output varies it.

# %% tags=["hide-input"]
fig, axes = plt.subplots(1, 2, figsize=(6.8, 3.2), sharey=True)
for ax, row in zip(axes, result["rows"]):
    for at, (side, label) in enumerate((("vllm", "vLLM 0.23"), ("ours", "ours"))):
        bottom = 0
        for number, part in enumerate(("key", "allocate", "publish", "decode", "release")):
            height = row[f"parts_{side}"].get(part, 0)
            ax.bar(label, height, bottom=bottom, color=f"C{number}", hatch=".x/\\o"[number],
                   label=part if at == 1 and ax is axes[1] else None)
            bottom += height
    ax.set(title=row["workload"])
axes[0].set(ylabel="us a request")
fig.legend(loc="outside right upper")
plt.show()
print("measured:", result["device"], result["statistic"])
print("measured:", result["workload"])
for row in result["rows"]:
    print(f"measured: {row['workload']:6} {row['us_request_ours']:7.1f} us a request,"
          f" vLLM {row['us_request_vllm']:7.1f} us, {row['x_vllm']:.1f} times;"
          f" hit rate {100 * row['hit_rate_ours']:.1f} % and {100 * row['hit_rate_vllm']:.1f} %")
    assert row["hit_rate_ours"] >= row["hit_rate_vllm"]

# %% [markdown]
# *Figure: time a request by component, vLLM and ours, for the shared prompt and for the agent sessions; publishing is part of
# allocating in vLLM.*

# %% tags=["hide-input"]
fig, ax = plt.subplots(figsize=(5.6, 2.8))
for number, name in enumerate(("shared", "agent")):
    line = [row for row in result["sweep"] if row["workload"] == name]
    ax.plot([row["decoded"] for row in line], [row["x_vllm"] for row in line],
            "os"[number] + "-", label=name)
ax.set(xscale="log", xlabel="tokens decoded by each request", ylabel="times vLLM", ylim=(0, None))
ax.set_xticks([row["decoded"] for row in line], [str(row["decoded"]) for row in line])
ax.legend()
plt.show()
for row in result["sweep"]:
    print(f"measured: {row['workload']:6} {row['decoded']:3} decoded:",
          f"{row['us_request_ours']:7.1f} us a request,",
          f"vLLM {row['us_request_vllm']:8.1f} us, {row['x_vllm']:.1f} times")

# %% [markdown]
# *Figure: the quotient of the two times against the number of tokens that each request decodes.*
#
# With one token, which is all prefill, the quotient is that of naming, looking up and allocating; each token more adds a step in which
# 64 requests cost us one batch and vLLM 64 calls. For the shared prompt the quotient is therefore largest where answers are long: a single
# figure says as much about the workload as about the two programs. The agent sessions hardly depend on it. Their pool is full, so
# with every block taken a name is lost, here and there.
#
# Hit rates are equal, as they should be: with the same prompts, the same rule and the same queue, both find the same tokens. A test drives vLLM's
# manager and ours through random programs and compares found tokens, tables and the free queue after each operation. vLLM's does more than ours
# here: it can hold several groups of layers with different windows. Short prompts that nobody repeats were not measured.
#
# ## Mistakes in circulation
#
# :::{admonition} Check it yourself
# :class: warning
# - 1,000 requests of 2,000 tokens at 320 KiB are said to take ~~625 GiB~~. It is 610.35 GiB; 625 is the MiB of one.
# - That prompt is drawn as ~~8 blocks of together 640 MiB~~. It has 125 blocks; 8 of them are 40 MiB.
# - vLLM is said to have ~~no isolation of tenants~~. It has a salt in each request, `cache_salt`, which is mixed into the first
#   block's hash.
# - A name made of the block's own tokens is said to be ~~enough for full blocks~~. The first cell of this chapter shows what comes of it.
# :::

# %%
print(f"{token // 2**10} KiB a token: {1000 * 2000 * token / 2**30:.2f} GiB; one prompt "
      f"{2000 * token / 2**20:.0f} MiB in {2000 // 16} blocks; "
      f"8 blocks {8 * 16 * token / 2**20:.0f} MiB")

# %% [markdown]
# ## State card
#
# | class | state | invariant | what breaks next |
# |---|---|---|---|
# | `KeyTree` | `roots`, `by_id` | one name, one node; a node lives while needed | names for blocks on other machines |
# | `BlockNames` | `named`, `epochs`, events | I4: a findable block holds the K/V of its name | whoever takes blocks and does not say so |
# | `PrefixCache` | `generation`, counts | `published` - `evicted` = `findable` | a row from before a reset must not publish (chapter 9 keeps its generation) |
#
# A request now costs what is new in it. What it may cost in one step, and who goes first, is the scheduler's business: chapter 9.
#
# ## Real world
#
# - vLLM hashes in `vllm/v1/core/kv_cache_utils.py` (tokens, parent's hash, extra keys: adapter, media, `cache_salt`) and keeps blocks by hash in
#   `vllm/v1/core/block_pool.py`. A collision would go unnoticed, so its default is SHA-256. Events for routers are in `vllm/distributed/kv_events.py`.
# - SGLang keeps a radix tree over token ids {cite}`zheng2024sglang`, in `python/sglang/srt/mem_cache/radix_cache.py`: tokens are compared, at a grain of one or of a
#   page, an extra key keeps tenants and adapters apart, and the eviction order is an option. Its paper reports hit rates of 50 % to 99 % on its benchmarks, 52.4 % and 74.1 % in production {cite}`zheng2024sglang`.
# - TensorRT-LLM gives each block a map of those that follow it, keyed by tokens, adapter, extra ids and salt, which are compared; it can
#   reuse a part of a block by copying it (`cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp`).
# - Mooncake {cite}`qin2025mooncake` shares prefixes between machines, by chained hashes.
#
# ## Exercises
#
# :::{exercise}
# :label: ex-08-compute
# **Compute.** 800 sessions share 3,000 tokens of tools; each adds 500 of its own. How many blocks of 16 does it take with and without sharing? What share
# of prompt tokens is found, if each session comes once?
# :::
#
# :::{solution} ex-08-compute
# :class: dropdown
# Apart 800 x 219 = 175,200 blocks. Shared: 187 full blocks once (2,992 tokens), and 32 for each session: 25,787. The hit rate is
# $799 \cdot 2992 / (800 \cdot 3500)$: 85.4 %.
# :::

# %% tags=["hide-input"]
apart = 800 * blocks_for(3500, 16)
shared = 3000 // 16 + 800 * (blocks_for(3500, 16) - 3000 // 16)
rate = 799 * 2992 / (800 * 3500)
print(f"{apart:,} blocks apart, {shared:,} shared, hit rate {100 * rate:.1f} %")
assert (apart, shared) == (175_200, 25_787)

# %% [markdown]
# :::{exercise}
# :label: ex-08-trace
# **Trace.** $B = 4$, a pool of 2. A prompt of 8 tokens runs and finishes; then one of 3 tokens does. What does a look-up of the first prompt find, if it asks
# with one token more? (After vLLM's issue 4761, where an evicted block stayed in the table.)
# :::
#
# :::{solution} ex-08-trace
# :class: dropdown
# The queue was block 1 (tail), block 0. The short prompt took block 1, and its name was forgotten. The look-up finds block 0 alone.
# :::

# %% tags=["hide-input"]
manager = BlockManager(num_blocks=2, block_size=4, max_seqs=2, max_seq_len=16)
cache = PrefixCache(manager.pool, block_size=4)
for prompt in (list(range(8)), [90, 91, 92]):
    row, found = admit_cached(manager, cache, prompt)
    publish_full(manager, cache, row, prompt, found // 4)
    give_back(manager, row)
assert cache.match(b"", list(range(9))) == [0]
assert manager.pool.free_ids() == [0, 1]

# %% [markdown]
# :::{exercise}
# :label: ex-08-break
# **Break.** Take a block from the pool and do not tell the cache. Show that a stranger then reads bytes that are not of its prompt, and which
# assertion fires.
# :::
#
# :::{solution} ex-08-break
# :class: dropdown
# The block is still findable under its old name while somebody else overwrites it. `check` compares epochs, I4. This is the use-after-free of prefix caches.
# :::

# %% tags=["hide-input"]
manager = BlockManager(num_blocks=4, block_size=4, max_seqs=2, max_seq_len=16)
cache = PrefixCache(manager.pool, block_size=4)
row, _ = admit_cached(manager, cache, list(range(5)))
publish_full(manager, cache, row, list(range(5)), 0)
give_back(manager, row)
manager.pool.take(4)  # and not a word to the cache
assert cache.match(b"", list(range(5))) == [0]
try:
    cache.check()
except AssertionError as error:
    print(error)

# %% [markdown]
# :::{exercise}
# :label: ex-08-implement
# **Implement.** `group_by_prefix(prompts, block_size)`: order waiting prompts so that those which share most come one after the other. SGLang does this to raise
# the hit rate when the pool is small.
# :::
#
# :::{solution} ex-08-implement
# :class: dropdown
# Sorting the lists of block bytes lexicographically is a depth-first walk of the tree. Below, two families of prompts take turns in a pool that holds
# one family's prefix only.
# :::

# %% tags=["hide-input"]
def group_by_prefix(prompts, block_size):
    return sorted(prompts, key=lambda prompt: split_chunks(
        token_array(prompt)[: len(prompt) // block_size * block_size], block_size))


def hits(prompts):
    manager = BlockManager(num_blocks=6, block_size=4, max_seqs=2, max_seq_len=64)
    cache = PrefixCache(manager.pool, block_size=4)
    for prompt in prompts:
        row, found = admit_cached(manager, cache, prompt)
        publish_full(manager, cache, row, prompt, found // 4)
        give_back(manager, row)
    return cache.stats.hit


waiting = [[family] * 16 + [number] * 4 for number in range(6) for family in (1, 2)]
print("hit tokens as they came:", hits(waiting), " grouped:", hits(group_by_prefix(waiting, 4)))
assert hits(group_by_prefix(waiting, 4)) > hits(waiting)

# %% [markdown]
# :::{exercise}
# :label: ex-08-salt
# **Break.** A service puts the salt into the prompt as its *last* tokens in place of the root. What does a prober learn?
# :::
#
# :::{solution} ex-08-salt
# :class: dropdown
# Everything: the blocks before the salt have the same names for all tenants. A salt has to stand before what it protects, since names are chained forwards only.
# :::

# %% tags=["hide-input"]
manager = BlockManager(num_blocks=16, block_size=4, max_seqs=2, max_seq_len=32)
cache = PrefixCache(manager.pool, block_size=4)
found_by = {}
for tenant in (1001, 1002):
    row, found_by[tenant] = admit_cached(manager, cache, secret_pin[:8] + [tenant] * 4)
    publish_full(manager, cache, row, secret_pin[:8] + [tenant] * 4, found_by[tenant] // 4)
assert found_by == {1001: 0, 1002: 8}

# %% [markdown]
# ## Further reading
#
# - Gentle: the chapters on paging and swapping policies in *Operating Systems: Three Easy Pieces* {cite}`arpaci2018ostep`.
# - The sources: SGLang's RadixAttention {cite}`zheng2024sglang`; Mooncake, a cache as the centre of a serving system {cite}`qin2025mooncake`.
# - Deep: [Factoring polynomials with rational coefficients](https://doi.org/10.1007/BF01457454) (Lenstra, Lenstra and Lovász, 1982), which finds short vectors where our Euclid would get stuck; and
#   [hash-flooding attacks](https://www.aumasson.jp/siphash/siphash.pdf) (Aumasson and Bernstein, 2012), why Python hashes strings with a secret key.
