# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The contiguous pool
#
# A 70B-class model has 5 GiB left for its cache. A chat may grow to 4,096 tokens, so the
# server sets 4,096 slots aside for each. Four chats arrive. They hold 300, 1,200, 2,004 and
# 1,296 tokens. A fifth one asks for room and is refused: the server is out of memory, with
# 3.54 GiB that hold nothing.

# %%
from paged_kv.sizing import GiB, MiB, KVSpec

llama_70b = KVSpec(num_layers=80, num_kv_heads=8, head_size=128, dtype="fp16")
window, lengths = 4096, [300, 1200, 2004, 1296]
reserved = len(lengths) * llama_70b.bytes_for(window)
held = llama_70b.bytes_for(sum(lengths))
room = 5 * GiB - reserved
print(f"reserved {reserved / GiB:g} GiB, room for a fifth chat: {room} B")
print(f"held     {held / GiB:.2f} GiB by {sum(lengths):,} tokens")
print(f"stranded {(reserved - held) / GiB:.2f} GiB")

# %% [markdown]
# **The question.** Why does the memory run out while most of it is empty, and is a better
# allocator enough to mend it?
#
# :::{card} This chapter
# - **You need** [chapter 01](01_kv_sizing): bytes per token.
# - **Exports** `paged_kv/contiguous.py`: `ContiguousPool` and three reservation policies.
# - **Device** CPU.
# - **Run time** a few seconds.
# - **You are here** 00 tour · 01 sizing · **02 contiguous pool** · 03 block manager · 04
#   paged attention · 05 guest model · 06 copy-on-write · 07 sampling · 08 prefix cache · 09
#   scheduling · 10 preemption · 11 decode kernel · 12 prefill kernel · 13 engine · 14 full
#   speed
# :::
#
# The allocator built here is a fair opponent, not a straw man. It is the one that the
# PagedAttention paper gives its baselines {cite}`kwon2023paged`, and we will measure against it in
# the labs.

# %% [markdown]
# ## Slots, runs and what the pool remembers
#
# A *slot* holds the K and V of one token in every layer. A pool is a row of slots. Each chat
# gets a *run*: adjacent slots, because the attention code of the time took one pointer and
# one length. The run is cut when the chat arrives, and nobody yet knows how long the chat
# will be. So the chat asks for more slots than it has tokens. That is a *reservation*.
#
# State first, as in every chapter:
#
# | name | type | what it says | written by |
# |---|---|---|---|
# | `_free` | dict, start -> length | the free pieces | `reserve`, `finish` |
# | `_runs` | dict, name -> `Run` | where each run starts, what was asked, what was given | `reserve`, `finish` |
# | `_used` | dict, name -> int | how many of its slots hold a token | `grow` |
#
# **P1** Free pieces and runs cover every slot exactly once. **P2** A run uses at most what it
# asked for, and was given at least that. **P3** No two free pieces could be one.

# %% tags=["export:contiguous"]
"""The old way: one run of adjacent slots a request, reserved before its length is known.

A slot holds the keys and values of one token in every layer.  The pool knows slots
only; it has never seen a token or a byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from paged_kv.sizing import at_least

Fit = Literal["first", "best", "buddy"]


class OutOfSlots(RuntimeError):
    """No free piece is as long as a reservation needs; nothing has changed."""

    def __init__(self, needed: int, free: int, longest: int) -> None:
        super().__init__(f"{needed} slots in a row needed; {free} free, longest run {longest}")
        self.needed = needed
        self.free = free
        self.longest = longest


class ReservationFull(RuntimeError):
    """A request would grow past the slots it asked for; nothing has changed."""


@dataclass(frozen=True)
class Run:
    """The slots of one request: it asked for `asked` and was given `given` from `start`."""

    start: int
    asked: int
    given: int


# %% [markdown]
# `given` may exceed `asked` for one kind of pool only, the buddy allocator of a later
# section, which hands out powers of two.

# %% tags=["export:contiguous"]
class ContiguousPool:
    """Slots in a row; each request holds one run of them, fixed for its life.

    Args: `fit`, the free piece a run is cut from: "first", the lowest that is long enough;
    "best", the shortest; "buddy", the shortest, in powers of two only.
    State
        _free  start -> length of each free piece.
        _runs  name -> `Run` of each live request.
        _used  name -> slots, from the start of its run, that hold a token.
    Invariants P1, P2, P3: see `check`.
    Source: the baselines of the PagedAttention paper, section 6.1.
    """

    def __init__(self, num_slots: int, fit: Fit = "first") -> None:
        if fit not in ("first", "best", "buddy"):
            raise ValueError(f"fit = {fit!r}: one of 'first', 'best', 'buddy' is needed")
        self.num_slots = at_least(1, "num_slots", num_slots)
        self.fit = fit
        self._free = _powers(self.num_slots) if fit == "buddy" else {0: self.num_slots}
        self._runs: dict[str, Run] = {}
        self._used: dict[str, int] = {}

    @property
    def free_slots(self) -> int:
        """Slots in no run."""
        return sum(self._free.values())

    @property
    def largest_free_run(self) -> int:
        """Length of the longest run that could be granted now."""
        return max(self._free.values(), default=0)

    def run(self, name: str) -> Run:
        """The run of `name`; it never moves and never changes length."""
        if name not in self._runs:
            raise ValueError(f"name = {name!r}: holds no run, a live request is needed")
        return self._runs[name]


# %% [markdown]
# Three small functions work on the free pieces. The first and the last look ahead to the
# buddy allocator: read their other branch for now.

# %% tags=["export:contiguous"]
def _powers(num_slots: int) -> dict[int, int]:
    """Cut the pool into powers of two, longest first: each starts at a multiple of itself."""
    pieces: dict[int, int] = {}
    start = 0
    while start < num_slots:
        pieces[start] = 1 << ((num_slots - start).bit_length() - 1)
        start += pieces[start]
    return pieces


def _cut(free: dict[int, int], slots: int, fit: Fit) -> int | None:
    """Cut `slots` slots from a free piece; return where they start, None if all are shorter."""
    pieces = [(length, start) for start, length in free.items() if length >= slots]
    if not pieces:
        return None
    length, start = min(pieces, key=lambda piece: piece[1] if fit == "first" else piece)
    del free[start]
    while fit == "buddy" and length > slots:  # halve the piece, keep the lower half
        length //= 2
        free[start + length] = length
    if length > slots:
        free[start + slots] = length - slots
    return start


def _merge(free: dict[int, int], start: int, length: int, fit: Fit) -> None:
    """Put a piece back, as one with the free pieces that it touches."""
    if fit == "buddy":
        while free.get(start ^ length) == length:
            del free[start ^ length]
            start, length = min(start, start ^ length), 2 * length
    else:
        length += free.pop(start + length, 0)
        before = [piece for piece in free if piece + free[piece] == start]
        if before:
            start, length = before[0], length + free.pop(before[0])
    free[start] = length


# %% [markdown]
# Two operations need room. `reserve` looks for a free piece and cuts the run from it. It
# looks before it cuts: where no piece is long enough it raises, and nothing has changed.
# `grow` puts tokens into the run and returns their slots.

# %% tags=["export:contiguous"]
class ContiguousPool(ContiguousPool):  # type: ignore
    def reserve(self, name: str, slots: int) -> int:
        """Give `name` a run of at least `slots` slots; return the slot it starts at.

        Raises: `OutOfSlots` where no free piece is long enough.
        """
        if name in self._runs:
            raise ValueError(f"name = {name!r}: holds a run already, a new name is needed")
        asked = given = at_least(1, "slots", slots)
        if self.fit == "buddy":
            given = 1 << (asked - 1).bit_length()
        start = _cut(self._free, given, self.fit)
        if start is None:
            raise OutOfSlots(given, self.free_slots, self.largest_free_run)
        self._runs[name] = Run(start, asked, given)
        self._used[name] = 0
        return start

    def grow(self, name: str, tokens: int = 1) -> range:
        """Put `tokens` more tokens into the run of `name`; return the slots they take."""
        run, used = self.run(name), self._used[name]
        end = used + at_least(0, "tokens", tokens)
        if end > run.asked:
            raise ReservationFull(f"{name!r} needs {end} slots, its reservation has {run.asked}")
        self._used[name] = end
        return range(run.start + used, run.start + end)

    def finish(self, name: str) -> None:
        """Take back the run of `name`."""
        run = self.run(name)
        del self._runs[name], self._used[name]
        _merge(self._free, run.start, run.given, self.fit)


# %% [markdown]
# The rest looks and changes nothing: `split` says what every slot is doing, `check` asserts
# the invariants, `snapshot` is the pool as plain data and `repr` a picture of it.

# %% tags=["export:contiguous"]
@dataclass(frozen=True)
class SlotSplit:
    """What the slots of a pool are doing; the five fields add up to its size.

    Fields
        used      hold a token.
        later     reserved, and a token will come (known with hindsight only).
        never     reserved, and no token will ever come: internal fragmentation.
        rounding  given beyond what was asked, by a buddy allocator.
        free      in no run; external fragmentation while a request waits that they would hold.
    """

    used: int
    later: int
    never: int
    rounding: int
    free: int


# %% tags=["export:contiguous"]
class ContiguousPool(ContiguousPool):  # type: ignore
    def split(self, final_lens: Mapping[str, int]) -> SlotSplit:
        """Sort the slots by use, given how many tokens each request will hold at its end."""
        later = never = rounding = 0
        for name, run in self._runs.items():
            used, end = self._used[name], final_lens.get(name, -1)
            if not used <= end <= run.asked:
                raise ValueError(f"final_lens[{name!r}] = {end}: {used} to {run.asked} is needed")
            later, never = later + end - used, never + run.asked - end
            rounding += run.given - run.asked
        return SlotSplit(sum(self._used.values()), later, never, rounding, self.free_slots)

    def snapshot(self) -> dict[str, Any]:
        """The pool as plain data for `draw_slots`: name -> (start, slots given, slots used)."""
        rows = {name: (r.start, r.given, self._used[name]) for name, r in self._runs.items()}
        return {"num_slots": self.num_slots, "reservations": rows}

    def check(self) -> None:
        """Assert P1, P2 and P3; O(n log n) in the number of pieces."""
        runs, end = [(run.start, run.given) for run in self._runs.values()], 0
        for start, length in sorted([*self._free.items(), *runs]):
            assert start == end < start + length, f"P1: slot {min(start, end)} lost or held twice"
            end = start + length
        assert end == self.num_slots, f"P1: pieces end at {end}, the pool at {self.num_slots}"
        for name, run in self._runs.items():
            assert 0 <= self._used[name] <= run.asked <= run.given, f"P2: {name!r} outgrew {run}"
        for start, length in self._free.items():
            other = start ^ length if self.fit == "buddy" else start + length
            size = length if self.fit == "buddy" else self._free.get(other, -1)
            assert self._free.get(other) != size, f"P3: {start} and {other} could be one piece"

    def __repr__(self) -> str:
        free = f"{self.free_slots:,} free, longest run {self.largest_free_run:,}"
        head = f"{self.fit} fit, {self.num_slots:,} slots, {free}"
        marks = "." * self.num_slots
        for name, run in self._runs.items():
            own = (name[:1].ljust(1, "?") * self._used[name]).ljust(run.asked, "-")
            marks = marks[: run.start] + own.ljust(run.given, "+") + marks[run.start + run.given :]
        return head if self.num_slots > 96 else f"{head}\n{marks}"

# %% [markdown]
# ## A hole that is too short
#
# Three chats arrive in a pool of 32 slots. A reserves 12 and holds 5 tokens, B reserves 8 and
# holds 3, C reserves 8 and holds 6. In the picture a letter is a token, `-` a slot reserved
# and empty, `.` a slot in no run.

# %%
pool = ContiguousPool(32)
for name, asked, tokens in [("A", 12, 5), ("B", 8, 3), ("C", 8, 6)]:
    pool.reserve(name, asked)
    pool.grow(name, tokens)
print(pool)
reserved_empty = sum(pool.run(name).asked for name in "ABC") - (5 + 3 + 6)
print(reserved_empty, "reserved slots hold nothing")
assert (reserved_empty, pool.free_slots) == (14, 4)

# %% [markdown]
# :::{admonition} Predict
# :class: tip
# B finishes. How many slots are free then, and will a request for 12 be served?
# :::
#
# :::{dropdown} Reasoning
# B gives back 8 slots, 4 were free: 12 in all. But A and C still hold their runs, the 8 lie
# between them and the 4 behind C. No run of 12 exists, so the request is refused. Nobody made
# a mistake: each reservation was placed in the first hole there was.
# :::

# %%
from paged_kv.draw import book_style, draw_pool, draw_slots

pool.finish("B")
try:
    pool.reserve("D", 12)
except OutOfSlots as error:
    print("refused:", error)
assert (pool.free_slots, pool.largest_free_run) == (12, 8)
draw_slots(pool.snapshot(), title="B has finished; D wants 12 slots in a row")

# %% [markdown]
# This is *external fragmentation*: enough free memory, in pieces that are too short. It
# depends on the history of arrivals and departures, so it cannot be seen in any request. A
# refusal leaves the pool as it was, which the check confirms.
#
# **Turn the knob.** Let D ask for 8 instead of 12; expect it to land where B was, at slot 12.

# %%
pool.check()
print("D starts at slot", pool.reserve("D", 8))
print(pool)

# %% [markdown]
# ## A run that stays empty
#
# The second waste needs no history at all. Here are 20 slots, and each chat reserves 8. A
# holds 3 tokens and B holds 5. C has 4 tokens and waits.

# %%
pool = ContiguousPool(20)
for name, tokens in [("A", 3), ("B", 5)]:
    pool.reserve(name, 8)
    pool.grow(name, tokens)
try:
    pool.reserve("C", 8)
except OutOfSlots as error:
    print("C waits:", error)
empty = sum(pool.run(name).asked for name in "AB") - (3 + 5)
print(pool, f"\nempty inside the runs: {empty}; C has 4 tokens")
assert empty == 8

# %% [markdown]
# Twelve slots hold no token and four tokens find no place. Eight of the twelve are inside the
# runs: that is *internal fragmentation*, unless A and B grow into them. The tokens of all
# three chats together are 12, the pool has 20 slots. If a chat could live in any two-slot
# pieces, wherever they are, all would fit:

# %%
pieces = {"A": [0, 3], "B": [1, 4, 6], "C": [2, 5]}
tokens = {"A": 3, "B": 5, "C": 4}
spare = 2 * sum(map(len, pieces.values())) - sum(tokens.values())
print("slots left empty in the last piece of a chat:", spare)
assert spare == 2
taken = sum(pieces.values(), [])
draw_pool(
    {"block_size": 2, "num_blocks": 10, "free": [7, 8, 9], "tables": pieces, "seq_lens": tokens,
     "ref_counts": [int(block in taken) for block in range(10)]},
    title="The same three chats in pieces of 2",
)

# %% [markdown]
# Hold on to that picture. It needs a list for each chat that says where its pieces are, and
# attention code that follows the list. Before we pay for these we should know that nothing
# cheaper helps.
#
# In the built book both ways stand side by side, with 64 slots:
#
# <paged-pool reservation="16">
# The pool to play with appears here in the built book.
# </paged-pool>
#
# **Turn the knob.** Pull the slider from 16 to 32; expect C to be shut out. Let A finish, and C
# gets in. Then pull it to 8 and press +1 on A three times; the third is refused, since its
# reservation is full.

# %% [markdown]
# ## How much to reserve
#
# The waste inside the runs depends on how well the server guesses. A request has a prompt of
# `prompt` tokens and ends with `final` tokens, which nobody knows but the book. The
# PagedAttention paper compares three policies {cite}`kwon2023paged`: reserve the maximum, reserve
# the output rounded up to a power of two, or ask an oracle.

# %% tags=["export:contiguous"]
def reserve_max(prompt: int, final: int, max_len: int) -> int:
    """Slots to reserve when nothing is known: room for the longest request allowed."""
    _check_lengths(prompt, final, max_len)
    return max_len


def reserve_pow2(prompt: int, final: int, max_len: int) -> int:
    """Slots to reserve with the output known within 2 times: its length up to a power of two."""
    _check_lengths(prompt, final, max_len)
    output = final - prompt
    return min(max_len, prompt + (1 << (output - 1).bit_length() if output else 0))


def reserve_oracle(prompt: int, final: int, max_len: int) -> int:
    """Slots to reserve with the output known exactly; no server knows it."""
    _check_lengths(prompt, final, max_len)
    return final


def _check_lengths(prompt: int, final: int, max_len: int) -> None:
    at_least(1, "prompt", prompt)
    at_least(prompt, "final", final)
    at_least(final, "max_len", max_len)


# %%
policies = {"max": reserve_max, "pow2": reserve_pow2, "oracle": reserve_oracle}
for name, reserve in policies.items():
    print(f"{name:6} reserves {reserve(prompt=6, final=15, max_len=32):2} slots for 6 + 9 tokens")

# %% [markdown]
# :::{admonition} Predict
# :class: tip
# An oracle reserves exactly what each request will use. A request has a prompt of 8 tokens
# and will end with 40. What share of its run holds a token, on average over its life?
# :::
#
# :::{dropdown} Reasoning
# The oracle wastes nothing at the end. On the way there the run holds 8 tokens, then 9, and
# so on up to 40: on average 24 of 40. That is the mean of prompt and final length, so the
# shorter the prompt, the closer to half of its run a server that sees the future leaves
# empty. No policy that reserves a run in advance can do better than the oracle.
# :::

# %%
pool = ContiguousPool(40)
pool.reserve("A", reserve_oracle(8, 40, max_len=64))
pool.grow("A", 8)
used = [pool.split({"A": 40}).used]
for _ in range(32):
    pool.grow("A")
    used.append(pool.split({"A": 40}).used)
print(f"held on average: {sum(used) / len(used):.0f} of 40 slots, {sum(used) / len(used) / 40:.0%}"
      .replace("%", " %"))

# %% [markdown]
# That empty share is the third waste: slots that *will* be used, later, and that nobody else
# may use until then. `split` tells the three apart, for which it needs the final lengths.
# Here are one moment of one workload and the three policies. A, B and C have prompts of 6, 3
# and 5 tokens and will end with 15, 8 and 21; each has produced two tokens so far.

# %%
final_lens = {"A": 15, "B": 8, "C": 21}
prompts = {"A": 6, "B": 3, "C": 5}
for policy, reserve in policies.items():
    pool = ContiguousPool(96)
    for name in "ABC":
        pool.reserve(name, reserve(prompts[name], final_lens[name], max_len=32))
        pool.grow(name, prompts[name] + 2)
    print(policy, pool.split(final_lens))
    print(repr(pool).splitlines()[1])

# %% [markdown]
# An oracle guesses neither too high nor too low. Too low is worse: a run has a neighbour
# behind it and cannot be lengthened. The pool says so, changes nothing, and the server is
# left with a chat that stops in mid-sentence.

# %%
pool = ContiguousPool(16)
for name in "AB":
    pool.reserve(name, 8)
pool.grow("A", 8)
try:
    pool.grow("A")
except ReservationFull as error:
    print("ReservationFull:", error)
pool.check()
print(pool)

# %% [markdown]
# ## Would a cleverer fit help?
#
# Best fit takes the shortest piece that is long enough, which keeps long pieces whole. Take
# holes of 8 and 4 slots and requests for 4, then 8. First fit spoils the 8. (Two helpers, folded
# here: `with_holes` makes a pool with such holes, a wall of one slot, `#`, behind each; `served`
# counts the requests that get in.)

# %% tags=["hide-input"]
def with_holes(fit, *holes):
    """A pool whose free pieces have the given lengths, one reserved slot behind each."""
    pool = ContiguousPool(sum(holes) + len(holes), fit)
    for i, hole in enumerate(holes):
        pool.reserve(f"hole {i}", hole)
        pool.reserve(f"# wall {i}", 1)
        pool.grow(f"# wall {i}")
    for i in range(len(holes)):
        pool.finish(f"hole {i}")
    return pool


def served(pool, requests):
    """How many of `requests` (name and slots) are served in turn, until one is refused."""
    for count, (name, slots) in enumerate(requests):
        try:
            pool.reserve(name, slots)
            pool.grow(name, slots)
        except OutOfSlots:
            return count
    return len(requests)


# %%
for fit in ("first", "best"):
    pool = with_holes(fit, 8, 4)
    print(served(pool, [("A", 4), ("B", 8)]), "of 2 served,", pool)

# %% [markdown]
# :::{admonition} Predict
# :class: tip
# Now holes of 8 and 7, and requests for 5, 4, 3 and 3. That is 15 slots for 15. Which of the
# two serves all four?
# :::
#
# :::{dropdown} Reasoning
# Best fit puts the 5 into the 7 and leaves 2 there, then the 4 into the 8 and leaves 4, then
# a 3 into the 4 and leaves 1. The last 3 slots are 2 + 1. First fit cuts 5 from the 8,
# leaving 3, and 4 from the 7, leaving 3: both remainders are used. To leave the smallest
# remainder is to leave the most useless one. Neither rule is better for all sequences of
# requests.
# :::

# %%
requests = [("A", 5), ("B", 4), ("C", 3), ("D", 3)]
for fit in ("first", "best"):
    pool = with_holes(fit, 8, 7)
    print(served(pool, requests), "of 4 served,", pool)

# %% [markdown]
# The third rule, which the paper gives to its baselines, is the *buddy* allocator. Every
# piece is a power of two and starts at a multiple of its own length. To cut, halve a piece
# until it is just long enough. To merge, look at one place only: the buddy of the piece at
# `start` begins at `start ^ length`. If it is free and as long, the two become one, and the
# search goes on a size higher. What a cut leaves over is never an odd splinter, and the price
# is rounding: `+` in the picture.

# %%
pool = ContiguousPool(32, "buddy")
for name, asked in [("A", 11), ("B", 5), ("C", 5)]:
    pool.reserve(name, asked)
    pool.grow(name, asked)
print(pool)
print(pool.split({"A": 11, "B": 5, "C": 5}))
pool.finish("B")
print(pool, "  B's buddy is busy")
pool.finish("C")
print(pool, "  B and C merge")
assert pool.largest_free_run == 16

# %% [markdown]
# **Turn the knob.** Make the pool 24 slots long. Expect it to start as two pieces, of 16 and
# 8, which never merge: the missing half of a piece of 32 is no buddy. A and B fill it, and C is
# refused.
#
# An invariant that cannot fail says nothing, so we break each one on purpose. The pool's
# fields are private, and this is why.

# %%
def broken(damage):
    """Do `damage` to a small pool with one hole; return what `check` says about it."""
    pool = with_holes("first", 4, 4)
    damage(pool)
    try:
        pool.check()
    except AssertionError as error:
        return error


print(broken(lambda pool: pool._free.update({0: 5})))
print(broken(lambda pool: pool._free.pop(0)))
print(broken(lambda pool: pool._used.update({"# wall 0": 2})))
print(broken(lambda pool: pool._free.update({0: 2, 2: 2})))

# %% [markdown]
# ## Pay for the window, not for the chat
#
# Now the sizes of real models. Under the max policy a chat costs the window, whatever it
# says. In a pool of 64 slots all three chats fit with reservations of 16. With 32, the third
# is shut out, and its tokens have not changed.

# %%
for reservation in (16, 32):
    count = served(ContiguousPool(64), [(name, reservation) for name in "ABC"])
    print(f"reservations of {reservation}: {count} of 3 chats")

# %% [markdown]
# Windows grow faster than chats. The cell computes what share of its reservation a chat of
# 300 tokens leaves empty, as the window goes from 4K to 128K. Pieces of 16 slots leave at
# most 15 slots empty, at any window.

# %% tags=["hide-input"]
windows = [4096 << i for i in range(6)]
empty = [1 - 300 / slots for slots in windows]
for slots, share in zip(windows, empty):
    print(f"window {slots // 1024:3}K: {llama_70b.bytes_for(slots) / GiB:5.2f} GiB reserved, "
          f"{100 * share:.1f} % empty")
in_pieces = llama_70b.blocks_for(300, 16) * 16 - 300
print(f"pieces of 16: {in_pieces} slots empty, {100 * in_pieces / (300 + in_pieces):.1f} %")

# %% tags=["hide-input"]
import matplotlib.pyplot as plt
import numpy as np

book_style()
fig, ax = plt.subplots()
for tokens in (300, 2000):
    ax.plot([100 * (1 - tokens / slots) for slots in windows], marker="o",
            label=f"one run, {tokens:,} tokens")
ax.plot([100 * in_pieces / (300 + in_pieces)] * 6, marker="s", label="pieces of 16, 300 tokens")
ax.set_xticks(range(6), [f"{slots // 1024}K" for slots in windows])
ax.set(xlabel="window, tokens", ylabel="memory that holds nothing, %", ylim=(0, 101))
ax.legend(loc="center right", bbox_to_anchor=(1, 0.35))
plt.show()

# %% [markdown]
# *Figure: the empty share of a reservation against the window. A 300-token chat wastes 92.7 %
# at 4K and 99.8 % at 128K; in pieces of 16 it wastes 1.3 %, and the window does not matter.*

# %% [markdown]
# Back to the opening picture. The pool below has exactly its 16,384 slots. Then the same four
# chats in blocks of 16, by arithmetic alone: `blocks_for` rounds up.

# %%
lengths = dict(zip("ABCD", [300, 1200, 2004, 1296]))
pool = ContiguousPool(4 * window)
for name, tokens in lengths.items():
    pool.reserve(name, reserve_max(1, tokens, window))
    pool.grow(name, tokens)
used = pool.split(lengths).used
stranded = (pool.num_slots - used) * llama_70b.bytes_per_token
blocks = [llama_70b.blocks_for(tokens, 16) for tokens in lengths.values()]
print(f"one run each:  {pool.num_slots * llama_70b.bytes_per_token / GiB:g} GiB pinned, "
      f"{stranded / GiB:.2f} GiB stranded")
print(f"blocks of 16:  {' + '.join(map(str, blocks))} = {sum(blocks)} blocks, "
      f"{sum(blocks) * llama_70b.bytes_per_block(16) / GiB:.2f} GiB, "
      f"{16 * sum(blocks) - used} slots empty")
assert sum(blocks) == 301 and 16 * sum(blocks) - used == 16

# %% tags=["hide-input"]
fig, (left, right) = plt.subplots(1, 2, figsize=(6.4, 2.6), sharey=True)
colours = {"A": "#0072B2", "B": "#E69F00", "C": "#009E73", "D": "#D55E00"}
for row, (name, tokens) in enumerate(lengths.items()):
    for ax, slots in ((left, window), (right, 16 * blocks[row])):
        ax.barh(row, slots, facecolor="none", edgecolor="#888888", hatch="///")
        ax.barh(row, tokens, color=colours[name], edgecolor="#222222")
        ax.text(tokens / 2, row, name, ha="center", va="center", color="white", weight="bold")
left.set(title="one run each", yticks=[], xlabel="slots", xlim=(0, window))
right.set(title="blocks of 16", xlabel="slots", xlim=(0, window))
left.invert_yaxis()
plt.show()

# %% [markdown]
# *Figure: the four chats of the opening. Left, each pins 4,096 slots and most of them are
# hatched, which means empty. Right, in blocks of 16 the hatching has all but gone: 16 slots
# in two tails.*
#
# External fragmentation scales too. Below, 16 chats of 4,096 slots fill 20 GiB, and every
# other one leaves. Then a request comes whose window is 8,192 tokens.

# %%
pool = ContiguousPool(16 * window, "best")
for i in range(16):
    pool.reserve(f"chat {i}", window)
for i in range(0, 16, 2):
    pool.finish(f"chat {i}")
size = llama_70b.bytes_for
print(f"{size(pool.num_slots) / GiB:g} GiB, of which {size(pool.free_slots) / GiB:g} GiB are free,",
      f"longest run {size(pool.largest_free_run) / GiB} GiB")
try:
    pool.reserve("long", 2 * window)
except OutOfSlots as error:
    print(f"{size(error.needed) / GiB} GiB refused: {error}")

# %% [markdown]
# 10 GiB are free and 2.5 GiB are refused. The holes are 1.25 GiB each, and no fit can
# lengthen a hole.

# %% [markdown]
# ## Why not close the holes?
#
# A file system would move the chats together; so does a garbage collector. Let us do it, with
# real bytes. `keys` is the memory: one row of four numbers a slot. Token `t` of A is written
# as 100 + t, of B as 200 + t, of C as 300 + t. Then B leaves, and there is a hole in front of
# C.

# %%
pool, keys = ContiguousPool(16), np.zeros((16, 4), np.float32)
for base, (name, tokens) in zip((100, 200, 300), [("A", 5), ("B", 4), ("C", 5)]):
    pool.reserve(name, tokens)
    slots = pool.grow(name, tokens)
    keys[slots] = base + np.arange(tokens)[:, None]
pool.finish("B")
print(pool)

# %% [markdown]
# Meanwhile somebody reads C. An attention kernel gets an address and a length, as NumPy's
# view does: `reader` owns no copy, it points into `keys`. So does every kernel that is queued
# on a GPU, and every CUDA graph that was recorded with the address inside.

# %%
run = pool.run("C")
reader = keys[run.start : run.start + run.given]
offset = reader.ctypes.data - keys.ctypes.data
print(f"reader points at byte {offset}, and sees", reader[:, 0])

# %% [markdown]
# :::{admonition} Predict
# :class: tip
# We copy C down over the hole and let D, with 6 tokens from 400 up, have what became free.
# What does `reader` see: C's keys, an error, or something else?
# :::
#
# :::{dropdown} Reasoning
# Nothing tells `reader` that C has moved. It still points at byte 144. Slots 9 and on now
# belong partly to D, whose tokens are perfectly valid keys, of somebody else. There is no
# error. The attention over them is a plausible set of numbers, and wrong.
# :::

# %%
def naive_compact(pool, keys):
    """Move all runs down to close the holes: bytes and bookkeeping, but no reader."""
    packed = ContiguousPool(pool.num_slots, pool.fit)
    for name, (start, given, used) in sorted(pool.snapshot()["reservations"].items(),
                                             key=lambda item: item[1]):
        to = packed.reserve(name, given)
        keys[to : to + used] = keys[start : start + used].copy()
        packed.grow(name, used)
    return packed


pool = naive_compact(pool, keys)
pool.reserve("D", 6)
keys[pool.grow("D", 6)] = 400 + np.arange(6)[:, None]
print(pool)
print("reader sees", reader[:, 0])
start = pool.run("C").start
print("C is now at", keys[start : start + 5, 0])

# %% [markdown]
# C has come through unharmed; its reader sees one stale row of C and then D's. To compact
# safely, everybody who reads must look up where a run starts, at each use, and nobody may
# look while it moves. That look-up is *indirection*: a table with one entry a chat. And even
# then compaction mends only the holes between runs. In the opening picture there are no holes
# at all: everything stranded is inside the runs, where no moving reaches it.
#
# Here is the turn of the argument. Without indirection there is no compaction. With it,
# compaction is hardly needed: if a table says where a chat lives, nothing forces that to be
# *one* place. Give the table an entry for each small piece of the chat, let all pieces have
# the same size, and any free piece serves any chat. Holes too short to use cannot exist. And
# nothing needs to be reserved, since the next piece may be anywhere: take it when the last
# one is full.

# %% [markdown]
# ## What small pieces would admit
#
# How much is that worth? 16 GiB hold 131,072 tokens of Llama 3 8B. Requests of 100 to 2,000
# tokens arrive, are taken first come first served, and each is counted at its final length.
# One server reserves a window of 8,192 slots for each, the other hands out blocks.

# %%
llama_8b = KVSpec(num_layers=32, num_kv_heads=8, head_size=128, dtype="bf16")
num_slots = llama_8b.blocks_in(16 * GiB, 1)
lengths = np.random.default_rng(0).integers(100, 2001, 500)


def admitted_in_blocks(lengths, num_slots, block_size):
    """Requests admitted until the first refusal, slots allocated, slots that hold a token."""
    ends = np.cumsum(-(-lengths // block_size))
    count = int((ends <= num_slots // block_size).sum())
    return count, int(ends[count - 1]) * block_size, int(lengths[:count].sum())


# %%
reserving = served(ContiguousPool(num_slots), [(str(i), 8192) for i in range(500)])
held = int(lengths[:reserving].sum())
count, allocated, used = admitted_in_blocks(lengths, num_slots, 16)
empty = allocated - used
print(f"16 GiB: {num_slots:,} slots")
print(f"reserving 8,192: {reserving} requests, {100 * held / num_slots:.1f} % of the slots used")
print(f"blocks of 16:    {count} requests, {count / reserving:.1f} times as many;",
      f"{allocated:,} slots, {empty} ({100 * empty / allocated:.1f} %) empty")
assert (num_slots, reserving, count, allocated, empty) == (131072, 16, 122, 130800, 913)

# %% tags=["hide-input"]
sizes = [1 << i for i in range(8)]
rows = [admitted_in_blocks(lengths, num_slots, size) for size in sizes]
for size, (count, allocated, used) in zip(sizes, rows):
    share = 100 * (allocated - used) / allocated
    print(f"blocks of {size:3}: {count} admitted, {share:.1f} % empty")
fig, ax = plt.subplots()
ax.bar(range(8), [row[0] for row in rows], color="#0072B2", label="blocks")
ax.axhline(reserving, color="#D55E00", linestyle="--", label="one run of 8,192 each")
for i, row in enumerate(rows):
    ax.text(i, row[0] + 2, row[0], ha="center")
ax.set_xticks(range(8), sizes)
ax.set(xlabel="block size, tokens", ylabel="requests in memory", ylim=(0, 150))
ax.legend(loc="upper right", ncols=2)
plt.show()

# %% [markdown]
# *Figure: requests admitted into 16 GiB for block sizes 1 to 128, against reserved runs. A
# memory effect.*
#
# Reserving admits 16 requests, which use 12.9 % of the slots. Blocks of 16 admit 122, 7.6
# times as many, and 0.7 % of what they take is empty. Up to blocks of 64 the size hardly
# matters here. Two warnings. This is a *memory effect* and no throughput benchmark: 122
# requests at a time do not make a GPU 7.6 times as fast. And the ratio belongs to this
# distribution of lengths; exercise 5 asks you for your own.

# %% [markdown]
# ## Mistakes in circulation
#
# :::{admonition} Check it yourself
# :class: warning
# - A 4,096-token reservation that holds 300 tokens, ~~92 MiB~~ 93.75 MiB, wastes ~~92.8 %~~
#   92.68 %.
# - In 50 GiB, ~~2,700~~ 538 such chats fit in blocks of 16.
# - ~~Compaction would make reserving as good as paging.~~ It would reclaim 0 of the 3.54 GiB
#   of the opening.
# - ~~Best fit is never worse than first fit.~~ It served 3 requests of 4 above.
# :::

# %%
wasted = 1 - 300 / window
print(f"{llama_70b.bytes_for(300) / MiB} MiB held, {100 * wasted:.2f} % wasted;",
      f"{room} B of the {stranded / GiB:.2f} GiB lie between runs, where compaction reaches")
print("50 GiB:", llama_70b.blocks_in(50 * GiB, 16) // llama_70b.blocks_for(300, 16), "chats")
assert served(with_holes("best", 8, 7), requests) == 3

# %% [markdown]
# ## State card
#
# | | |
# |---|---|
# | Classes | `ContiguousPool(num_slots, fit)`; `Run`, `SlotSplit`; `OutOfSlots`, `ReservationFull` |
# | Fields | `_free` start -> length; `_runs` name -> `Run`; `_used` name -> tokens |
# | Invariants | P1 pieces and runs cover each slot once; P2 used <= asked <= given; P3 no two free pieces could be one |
# | Policies | `reserve_max`, `reserve_pow2`, `reserve_oracle` |
# | Three wastes | reserved for later; never used (internal, and rounding); free but too short (external) |
# | What breaks next | a chat in pieces needs a list of its pieces, and a count of who holds each: [chapter 03](03_block_manager) |
#
# ## Real world
#
# Reservation is alive where memory is plentiful or batches are fixed. `StaticCache` in the
# `cache_utils.py` of transformers allocates every row at its full length, because compiled
# graphs want addresses that stay. llama.cpp kept all sequences in one row of cells
# (`llama-kv-cache.cpp`) and long had a defragmentation pass that moved them, possible because
# each step looked its cells up anew. Orca {cite}`yu2022orca` reserved the maximum;
# TensorRT-LLM has known both contiguous and paged caches and serves from the paged one
# (`kvCacheManager.cpp`). vLLM has no contiguous pool (`vllm/v1/core/block_pool.py`), and
# SGLang hands out single tokens or blocks (`srt/mem_cache/allocator/token.py` and
# `srt/mem_cache/allocator/paged.py`). vAttention
# {cite}`prabhu2024vattention` keeps the addresses contiguous and lets the GPU's own page
# tables do the indirection: the pieces are there all the same, one level down and larger.
#
# ## Exercises
#
# :::{exercise}
# :label: ex-02-compute
# *Compute.* Llama 3 8B reserves 8,192 slots for a chat of 500 tokens. How many MiB are
# stranded, and what share of the reservation?
# :::
#
# :::{solution} ex-02-compute
# :class: dropdown
# 7,692 slots at 128 KiB are 961.5 MiB, 93.9 % of a reservation of 1 GiB.
# :::

# %% tags=["hide-input"]
slots = 8192 - 500
print(f"{slots * llama_8b.bytes_per_token / MiB} MiB, {100 * slots / 8192:.1f} %;",
      f"{llama_8b.bytes_per_token // 1024} KiB a slot,",
      f"{llama_8b.bytes_for(8192) // GiB} GiB in all")
assert slots * llama_8b.bytes_per_token == 961.5 * MiB

# %% [markdown]
# :::{exercise}
# :label: ex-02-trace
# *Trace.* A buddy pool of 24 slots. A asks for 5 slots, B for 3 and C for 4; then A finishes. Where do
# the runs start, and what are the free pieces at the end?
# :::
#
# :::{solution} ex-02-trace
# :class: dropdown
# The pool starts as 16 and 8. A gets 8 slots: the shortest piece is the one at 16. B gets 4
# from the 16: it is halved twice, B starts at 0, and 4 + 8 stay free. C takes the 4 at slot
# 4. When A leaves, its buddy would begin at 16 ^ 8 = 24, outside the pool: no merge. Free: 8
# at slot 8, 8 at slot 16. Neighbours, as long as each other, and no buddies.
# :::

# %% tags=["hide-input"]
pool = ContiguousPool(24, "buddy")
starts = [pool.reserve(name, slots) for name, slots in [("A", 5), ("B", 3), ("C", 4)]]
pool.finish("A")
pool.check()
print(starts, sorted(pool._free.items()))
assert (starts, pool._free) == ([16, 0, 4], {8: 8, 16: 8})

# %% [markdown]
# :::{exercise}
# :label: ex-02-break
# *Break.* Remove the lines of `_merge` that look for the piece *before* (keep the one after).
# Which invariant fires, and after which event in the 32-slot run of this chapter?
# :::
#
# :::{solution} ex-02-break
# :class: dropdown
# P3. B's leaving does not show it, A stands before B. When C leaves too, the 4 slots behind
# it are found, the 8 before it are not: pieces at 12 and 20 could be one. A request for 20
# would be refused though 20 in a row are free.
# :::

# %% tags=["hide-input"]
pool = ContiguousPool(32)
for name, asked in [("A", 12), ("B", 8), ("C", 8)]:
    pool.reserve(name, asked)
pool.finish("B")
pool.check()
pool._runs.pop("C"), pool._used.pop("C")
pool._free[20] = 8 + pool._free.pop(28)  # what the crippled merge would do
try:
    pool.check()
except AssertionError as error:
    print(error)
    assert "P3" in str(error)

# %% [markdown]
# :::{exercise}
# :label: ex-02-implement
# *Implement.* Reserve little and extend in place: write `extend(pool, name, slots)`, which
# lengthens a run if the slots behind it are free, and returns whether it could. Try it with
# three chats that start with 4 slots each. Who can be extended?
# :::
#
# :::{solution} ex-02-implement
# :class: dropdown
# Only the last one: the others have a neighbour behind them. Growing in place needs an empty
# neighbourhood, so reserving in advance is the price of having one run.
# :::

# %% tags=["hide-input"]
def extend(pool, name, slots):
    """Lengthen the run of `name` by `slots`, in place, if those behind it are free."""
    run = pool.run(name)
    end = run.start + run.given
    if pool._free.get(end, 0) < slots:
        return False
    rest = pool._free.pop(end) - slots
    if rest:
        pool._free[end + slots] = rest
    pool._runs[name] = Run(run.start, run.asked + slots, run.given + slots)
    return True


pool = ContiguousPool(32)
for name in "ABC":
    pool.reserve(name, 4)
print({name: extend(pool, name, 4) for name in "ABC"})
pool.check()
assert pool.run("C") == Run(8, 8, 8) and not extend(pool, "A", 1)

# %% [markdown]
# :::{exercise}
# :label: ex-02-own
# *Implement.* Repeat the capacity table for lengths of your own: state the distribution, the
# window and the seed, and label the result a memory effect. Does the advantage of blocks grow
# or shrink as chats come closer to the window?
# :::
#
# :::{solution} ex-02-own
# :class: dropdown
# It shrinks, to nothing in the end: chats that fill their windows waste no reservation. For
# chats between 7,000 and 8,192 tokens both ways admit nearly the same number.
# :::

# %% tags=["hide-input"]
for low, high in [(100, 2001), (2000, 6001), (7000, 8193)]:
    own = np.random.default_rng(7).integers(low, high, 500)
    count = admitted_in_blocks(own, num_slots, 16)[0]
    print(f"memory effect, uniform {low:,} to {high - 1:,}:",
          f"{reserving} reserved, {count} in blocks")
assert reserving <= count <= reserving + 2

# %% [markdown]
# ## Further reading
#
# - Arpaci-Dusseau, *Operating Systems: Three Easy Pieces*, the chapter on free-space management:
#   fits, coalescing and buddies from the beginning {cite}`arpaci2018ostep`.
# - The PagedAttention paper, sections 3.1 and 6.1, for the baselines of this chapter
#   {cite}`kwon2023paged`.
# - vAttention, for the opposite answer: keep addresses contiguous, page below them
#   {cite}`prabhu2024vattention`.
# - Knuth, *The Art of Computer Programming*, volume 1, section 2.5: first fit, best fit, buddies,
#   and why about half as many holes as runs are to be expected.
# - Wilson, Johnstone, Neely and Boles, *Dynamic Storage Allocation: A Survey and Critical Review*
#   (1995), for why no fit wins everywhere.
