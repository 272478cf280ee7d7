# Exported from book/appendices/A5_check_your_own.py by tools/export.py; edit the chapter, not this file.
"""The reader's classes on one side, the paper on the other, one operation at a time.

An operation is a tuple such as ("append", "AB", 2).  One that makes no sense as things stand,
such as a token for a chat that has gone, is passed over: so any part of a program is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from paged_kv.check_paper import Paper, Seen, check_i1, check_i2, look_at_pool
from paged_kv.check_reader import call_theirs, field_of
from paged_kv.check_rules import Broken

Op: TypeAlias = tuple[Any, ...]


class Subject:
    """What the subjects share.  State: `log`, in words, what was done so far."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def step(self, op: Op) -> bool:
        """Do one operation on both sides and compare; False if it was passed over."""
        done = len(self.log)
        getattr(self, f"do_{op[0]}")(*op[1:])
        return len(self.log) > done

    def state(self) -> Any:
        """What a refusal must leave as it was."""
        raise NotImplementedError

    def queue_invariant(self) -> None:
        """What holds even after an operation that should have been refused: I1."""

    def attempt(
        self, allowed: set[str], function: Callable[..., Any], *args: Any, rule: str = "REFUSE"
    ) -> Any:
        """The reader's result, None where it was refused and rightly so, with nothing changed.

        `allowed` holds "" for success and the names of exceptions; `rule` is broken by any other.
        """
        before = self.state()
        outcome, value = call_theirs(function, *args)
        if outcome in allowed:
            if outcome and (difference := before.differs_from(self.state())):
                raise Broken("WHOLE", f"refused with {outcome}, and all as before", difference)
            return None if outcome else value
        if not outcome:
            self.queue_invariant()
        short = "OutOfBlocks" in {outcome, *allowed} and outcome != "ValueError"
        wanted = " or ".join(sorted(allowed - {""})) or "no refusal"
        found = f"{outcome}: {value}" if outcome else "no refusal"
        raise Broken("SHORT" if short else rule, wanted, found)


class PoolSubject(Subject):
    """A BlockPool on its own; the rows are lists of ids that the chats keep themselves."""

    def __init__(self, module: ModuleType, num_blocks: int, *_: int) -> None:
        super().__init__()
        self.pool = self.attempt_new(module, num_blocks)
        self.paper = Paper(num_blocks)
        self.compare()

    def attempt_new(self, module: ModuleType, num_blocks: int) -> Any:
        """Make the pool; a refusal of this is a fault."""
        outcome, pool = call_theirs(module.BlockPool, num_blocks)
        if outcome:
            raise Broken("REFUSE", f"BlockPool({num_blocks}) is made", f"{outcome}: {pool}")
        return pool

    def state(self) -> Seen:
        """Queue and counts; the pool has no rows."""
        return Seen(*look_at_pool(self.pool), {}, {}, {}, [])

    def queue_invariant(self) -> None:
        """I1."""
        seen = self.state()
        check_i1(seen.free, seen.counts, int(field_of(self.pool, "num_free")))

    def compare(self) -> None:
        """I1, I2 against the lists that the chats keep, and the order of the queue."""
        self.queue_invariant()
        rows = self.paper.tables.items()
        tables = {chat: [b for b in ids if b is not None] for chat, ids in rows}
        check_i2(Seen([], self.state().counts, tables, {}, {}, []))
        if (free := self.state().free) != self.paper.queue:
            raise Broken("FIFO", f"the queue {self.paper.queue}", free)

    def do_take(self, chat: str, count: int) -> None:
        """`chat`, which has none, takes blocks."""
        if chat in self.paper.tables:
            return
        self.log.append(f"{chat} takes {number_of(count, 'block')}")
        before = np.array(field_of(self.pool, "epoch"))
        allowed = "OutOfBlocks" if count > len(self.paper.queue) else ""
        ids = self.attempt({allowed}, self.pool.take, count)
        if allowed:
            return
        self.paper.tables[chat] = list(taken := self.paper.take(count))
        if not ids_equal(ids, taken):
            raise Broken("FIFO", f"blocks {taken}, the front of the queue", ids)
        self.compare()
        self.check_epochs(before, taken)

    def check_epochs(self, before: Any, taken: list[int]) -> None:
        """The epochs of the blocks taken, and no others, have been raised."""
        raised = np.flatnonzero(np.asarray(self.pool.epoch) != before).tolist()
        if raised != sorted(taken):
            raise Broken("EPOCH", f"raised for {sorted(taken)}", f"raised for {raised}")

    def do_release(self, chat: str, backwards: bool) -> None:
        """`chat` gives back what it holds, first to last or last to first."""
        if not self.paper.tables.get(chat):
            return
        ids = self.paper.tables.pop(chat)[:: -1 if backwards else 1]
        self.log.append(f"{chat} releases {ids}")
        self.attempt({""}, self.pool.release, list(ids))
        self.paper.let_go(ids)
        self.compare()

    def do_claim(self, chat: str, first: int, count: int) -> None:
        """`chat`, which has none, claims blocks by name, whether idle or held."""
        size = len(self.state().counts)
        if chat in self.paper.tables or count < 1:
            return
        ids = [(first + 2 * i) % size for i in range(min(count, (size + 1) // 2))]
        self.log.append(f"{chat} claims {ids}")
        before = np.array(field_of(self.pool, "epoch"))
        self.attempt({""}, self.pool.claim, list(ids))
        self.paper.tables[chat] = list(ids)
        self.paper.queue = [block for block in self.paper.queue if block not in ids]
        self.compare()
        self.check_epochs(before, [])

    def do_nonsense(self, which: int) -> None:
        """A call that must be refused."""
        size, queue = len(self.state().counts), self.paper.queue
        calls: list[tuple[str, list[Any]]] = [
            *[("release", [block]) for block in queue[:1]],
            *[("release", [held, queue[0]]) for held in self.held()[:1] if queue],
            ("release", [size]),
            ("release", [-1]),
            ("claim", [0, 0]),
            ("claim", [size]),
        ]
        name, ids = calls[which % len(calls)]
        self.log.append(f"somebody calls {name}({ids}), which is nonsense")
        self.attempt({"ValueError"}, getattr(self.pool, name), ids)
        self.compare()

    def held(self) -> list[int]:
        """Blocks that somebody holds."""
        return [b for ids in self.paper.tables.values() for b in ids if b is not None]


def number_of(count: int, thing: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{count} {thing}{'s' * (count != 1)}"


def ids_equal(found: Any, expected: Sequence[int]) -> bool:
    """Whether somebody's answer is this list of ids."""
    return isinstance(found, list | tuple | np.ndarray) and list(map(int, found)) == list(expected)
