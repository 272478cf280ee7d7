# Exported from book/02_contiguous_pool.py by tools/export.py; edit the chapter, not this file.
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
