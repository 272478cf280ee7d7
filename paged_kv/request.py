# Exported from book/09_scheduling.py by tools/export.py; edit the chapter, not this file.
"""What a user asks for, and how far it has come."""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from numbers import Real
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paged_kv.prefix_keys import token_array
from paged_kv.sizing import at_least

Ints: TypeAlias = NDArray[np.int64]
Tokens: TypeAlias = NDArray[np.int32]
Extra: TypeAlias = tuple[tuple[str, str | bytes | int], ...]
State: TypeAlias = Literal["waiting", "running", "swapped", "finished"]
MAX_TOKEN = 2**31 - 1


class NeverFits(ValueError):
    """A request that the pool could not hold even alone; nothing has changed.

    Attributes: `needed` and `existing`, in blocks.
    """

    def __init__(self, needed: int, existing: int) -> None:
        super().__init__(f"prompt: {needed} blocks needed, {existing} exist")
        self.needed = needed
        self.existing = existing


@dataclass(frozen=True, eq=False)
class Request:
    """What a user asks for.  Raises ValueError, naming the field, for what cannot be.

    Fields
        prompt          token ids, at least one; `tokens` holds them as int32.
        max_new_tokens  tokens to generate at most, for each sample.
        request_id      anything hashable; None lets the scheduler choose a number.
        priority        lower goes first.
        deadline        the time by which it should be finished; the scheduler does not look.
        stop_tokens     generation ends with any of these.
        extra           (kind, value) pairs that change K/V: a tenant's salt, an adapter.
        n               samples of this prompt;  beam_width: beams in place of samples, or 0.
        arrival         time of arrival; None means that of submission.
    """

    prompt: Sequence[int] | Tokens
    max_new_tokens: int
    _: KW_ONLY
    request_id: Hashable = None
    priority: int = 0
    deadline: float | None = None
    stop_tokens: tuple[int, ...] = ()
    extra: Extra = ()
    n: int = 1
    beam_width: int = 0
    arrival: float | None = None
    tokens: Tokens = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", own_tokens("prompt", self.prompt))
        stops = own_tokens("stop_tokens", self.stop_tokens).tolist()
        object.__setattr__(self, "stop_tokens", tuple(stops))
        check_numbers(self)

    @property
    def width(self) -> int:
        """Rows that it takes once it generates."""
        return self.beam_width or self.n

    @property
    def limit(self) -> int:
        """Tokens at which a sample ends, the prompt's included."""
        return len(self.tokens) + self.max_new_tokens


def own_tokens(name: str, tokens: Sequence[int] | NDArray[np.integer[Any]]) -> Tokens:
    """`tokens` as a read-only int32 array of its own; ValueError, naming it, for what is none."""
    try:
        if not isinstance(tokens, np.ndarray | Sequence):  # a generator can be read only once
            tokens = list(tokens)
        if not isinstance(tokens, np.ndarray) and bool in set(map(type, tokens)):
            raise ValueError("whole numbers are needed, not bools")
        own = token_array(tokens).copy()
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from None
    own.flags.writeable = False
    return own


def check_numbers(request: Request) -> None:
    """ValueError, naming it, for a field of `request` that is out of its range."""
    at_least(1, "prompt, its length", len(request.tokens))
    at_least(1, "max_new_tokens", request.max_new_tokens)
    at_least(-MAX_TOKEN, "priority", request.priority)
    at_least(0, "beam_width", request.beam_width)
    for name, when in (("arrival", request.arrival), ("deadline", request.deadline)):
        number = isinstance(when, Real) and not isinstance(when, bool)
        if when is not None and not (number and math.isfinite(when)):
            raise ValueError(f"{name} = {when!r}: a finite time is needed, or None")
    if at_least(1, "n", request.n) > 1 and request.beam_width:
        raise ValueError(f"n = {request.n}: samples or beams, not both")


@dataclass(frozen=True)
class Completion:
    """One sample's generated ids, and why it ended.

    Reasons: "length", "stop", "aborted", "out_of_blocks", or what `Scheduler.finish` was told.
    """

    index: int
    token_ids: list[int]
    finish_reason: str


@dataclass(frozen=True)
class Output:
    """A finished request: all its samples, and its times by the scheduler's clock."""

    request_id: Hashable
    completions: tuple[Completion, ...]
    arrival: float
    first_token_at: float | None
    finished_at: float
    hit_tokens: int
    preemptions: int


@dataclass(eq=False, slots=True)
class Sample:
    """One text of a group.

    `tokens`, prompt and committed output, are valid while it has no row.  While its group runs
    and it has none, it waits to fork: off the sample `parent`, to share its first `at` tokens.
    """

    index: int
    tokens: Tokens
    row: int = -1
    finish_reason: str | None = None
    parent: int = -1
    at: int = 0


@dataclass(eq=False)
class Group:
    """A request on its way; its samples are admitted, preempted and aborted together.

    `serial` numbers arrivals, `root` is where the keys of its blocks begin, `generation` is the
    cache's when its K/V began: only then may they be found.
    """

    id: Hashable
    request: Request
    serial: int
    arrival: float
    root: bytes = b""
    state: State = "waiting"
    samples: list[Sample] = field(default_factory=list)
    first_token_at: float | None = None
    hit_tokens: int = 0
    preemptions: int = 0
    generation: int = 0

    def __post_init__(self) -> None:
        self.order = (self.request.priority, self.serial)
        self.beams = self.request.beam_width > 1
        self.samples = [Sample(i, self.request.tokens) for i in range(self.request.width)]
        hang_branches(self)

    def live(self) -> list[Sample]:
        """The samples that have not ended."""
        return [sample for sample in self.samples if sample.finish_reason is None]

    def __repr__(self) -> str:
        rows = [sample.row for sample in self.live()]
        return f"Group {self.id!r}: {self.state}, rows {rows}, order {self.order}"


def common_prefix(one: Tokens, other: Tokens) -> int:
    """How many tokens two texts have in common from the start."""
    shorter = min(len(one), len(other))
    differ = (one[:shorter] != other[:shorter]).nonzero()[0]
    return int(differ[0]) if len(differ) else shorter


def hang_branches(group: Group) -> None:
    """Make a tree of the live samples: each hangs on the earlier one that it shares most with.

    A sample that has generated nothing shares all its tokens: it needs only a token sampled from
    its parent's logits.  Any other has at least one token to run itself.
    """
    earlier: list[Sample] = []
    for sample in group.live():
        sample.parent, sample.at = -1, 0
        fresh = len(sample.tokens) == len(group.request.tokens)
        most = len(sample.tokens) - (not fresh)
        for other in earlier:
            shared = min(common_prefix(sample.tokens, other.tokens), most)
            if shared > sample.at:
                sample.parent, sample.at = other.index, shared
        earlier.append(sample)


def blocks_of_tree(group: Group, block_size: int) -> int:
    """Blocks that the live samples need together to run the tokens they have, as a tree.

    Full blocks before `at` are the parent's; the one that `at` lies in is copied on writing.
    """
    total = 0
    for sample in group.live():
        if sample.at < group.request.limit - 1:
            total += -(-len(sample.tokens) // block_size) - sample.at // block_size
    return total


class WaitingQueue:
    """Groups in (priority, arrival) order, those that were preempted in their old place.

    State: a heap; groups that left by an abort stay in it, marked, until they surface.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Group]] = []
        self._members: set[int] = set()

    def __len__(self) -> int:
        return len(self._members)

    def push(self, group: Group) -> None:
        """Put `group` in its place."""
        heapq.heappush(self._heap, (*group.order, group))
        self._members.add(group.serial)

    def head(self) -> Group | None:
        """The group that goes next, left where it is."""
        while self._heap and self._heap[0][1] not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def remove(self, group: Group) -> None:
        """Take `group` out, wherever it stands."""
        self._members.remove(group.serial)
        if self._heap[0][2] is group:
            heapq.heappop(self._heap)
        if len(self._heap) > 2 * len(self._members) + 8:
            self._heap = [entry for entry in self._heap if entry[1] in self._members]
            heapq.heapify(self._heap)
