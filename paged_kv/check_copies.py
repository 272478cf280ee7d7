# Exported from book/appendices/A5_check_your_own.py by tools/export.py; edit the chapter, not this file.
"""The functions over a manager that share blocks, against the paper."""

from __future__ import annotations

from typing import Any

import numpy as np

from paged_kv.check_managers import ManagerSubject
from paged_kv.check_rules import Broken
from paged_kv.check_subjects import number_of


class CopySubject(ManagerSubject):
    """The functions of chapter 06 over a BlockManager."""

    def do_fork(self, chat: str, child: str) -> None:
        """`child` arrives as a copy of `chat`."""
        if chat not in self.rows or child in self.rows:
            return
        self.log.append(f"{child} is forked from {chat}")
        row = self.attempt({""}, self.module.fork, self.manager, self.rows[chat])
        if not isinstance(row, int | np.integer) or row in self.rows.values():
            raise Broken("ROW", f"a row that no other chat has ({self.rows})", repr(row))
        self.rows[child], self.texts[child] = int(row), list(self.texts[chat])
        self.paper.tables[child] = list(self.paper.tables[chat])
        self.paper.lens[child] = self.paper.lens[chat]
        self.compare([])

    def do_rewind(self, chat: str, tokens: int) -> None:
        """`chat` takes tokens back."""
        if chat not in self.rows:
            return
        self.log.append(f"{chat} is rewound by {number_of(tokens, 'token')}")
        paper, keep = self.paper, self.paper.lens[chat] - tokens
        allowed = "ValueError" if keep < 0 else ""
        self.attempt({allowed}, self.module.rewind, self.manager, [self.rows[chat]], tokens)
        if allowed:
            return
        blocks = -(-keep // paper.block_size)
        cut, paper.tables[chat] = paper.tables[chat][blocks:], paper.tables[chat][:blocks]
        paper.let_go(cut[::-1])
        paper.lens[chat], self.texts[chat] = keep, self.texts[chat][:keep]
        self.compare([])

    def do_nonsense(self, which: int) -> None:
        """A row that is not open."""
        closed = next(row for row in range(6) if row not in self.rows.values())
        name, rows = (("fork", closed), ("rewind", [closed]))[which % 2]
        self.log.append(f"{name} a closed row, which is nonsense")
        self.attempt({"ValueError"}, getattr(self.module, name), self.manager, rows)
        self.compare([])

    def do_write(self, chats: str, tokens: int) -> None:
        """make_writable, the copies, append, and the new tokens, for all of `chats` at once."""
        batch, paper = [chat for chat in chats if chat in self.rows], self.paper
        if not batch or not tokens:
            return
        self.log.append(f"write {number_of(tokens, 'token')}: {', '.join(batch)}")
        rows = [self.rows[chat] for chat in batch]
        before = {chat: list(ids) for chat, ids in paper.tables.items()}
        copies = sum(map(self.copy_tail, batch))
        allowed = self.refusals(batch, tokens, copies)

        def both() -> Any:
            pairs = self.module.make_writable(self.manager, rows, tokens)
            self.manager.append(rows, tokens)
            return pairs

        rule = "I3" if copies else "REFUSE"
        pairs = self.attempt(allowed or {""}, both, rule=rule)
        if allowed:
            paper.tables = before
            return
        self.slots.update(copied_slots(self.slots, pairs, paper.block_size))
        self.count_copies(pairs, copies)
        self.grow(batch, tokens, copies)

    def copy_tail(self, chat: str) -> int:
        """On paper: 1 and a fresh place if the tail of `chat` is copied, else 0."""
        if not self.paper.tail_is_shared(chat):
            return 0
        self.paper.tables[chat][self.paper.lens[chat] // self.paper.block_size] = None
        return 1

    def count_copies(self, pairs: Any, copies: int) -> None:
        """As many copies as needed.  Too few break I3, since somebody writes what others read."""
        if len(pairs) > copies:
            self.invariants()
            raise Broken("COPY", f"{copies} copies", f"{len(pairs)}: {list(pairs)}")
        if len(pairs) < copies:
            raise Broken(
                "I3",
                f"{copies} copies, so that each writer has a tail of its own",
                f"{len(pairs)}: {list(pairs)}",
            )

    def do_rewire(self, chats: str, parents: str) -> None:
        """Each of `chats` becomes what its parent is, all at once."""
        if not set(chats + parents) <= set(self.rows):
            return
        self.log.append(f"{' and '.join(chats)} become {' and '.join(parents)}")
        paper, rows = self.paper, self.rows
        self.attempt(
            {""},
            self.module.rewire,
            self.manager,
            [rows[chat] for chat in chats],
            [rows[chat] for chat in parents],
        )
        lost = [paper.tables[chat][::-1] for chat in chats]
        for of_chats in (paper.tables, self.texts):
            copies: list[Any] = [list(of_chats[parent]) for parent in parents]
            of_chats.update(zip(chats, copies, strict=True))
        paper.lens.update({chat: len(self.texts[chat]) for chat in chats})
        paper.let_go([block for ids in lost for block in ids])
        self.invariants()
        if (found := self.state().tables) != paper.tables:
            raise Broken("BEAM", f"tables {paper.tables}", found)
        self.compare([], "BEAM")


def copied_slots(slots: dict[int, int], pairs: Any, size: int) -> dict[int, int]:
    """What stands where after whole blocks have been copied, all at once."""
    after = {}
    for source, destination in pairs:
        for offset in range(size):
            if (slot := source * size + offset) in slots:
                after[destination * size + offset] = slots[slot]
    return after
