# Exported from book/appendices/A5_check_your_own.py by tools/export.py; edit the chapter, not this file.
"""Managers and the functions over them, against the paper; tokens are numbers in slots."""

from __future__ import annotations

from itertools import count
from types import ModuleType
from typing import Any

import numpy as np

from paged_kv.check_paper import (
    Paper,
    Seen,
    check_i1,
    check_i2,
    check_rows,
    look_at_manager,
    look_at_pool,
)
from paged_kv.check_reader import call_theirs, field_of, name_of
from paged_kv.check_rules import Broken
from paged_kv.check_subjects import Subject, number_of


class RowSubject(Subject):
    """A BlockManager, the bytes behind it, and what each chat ought to read.

    State
        rows   {chat: row};  texts  {chat: its tokens}, no token twice in all.
        slots  {slot: token}: the memory, written through the reader's own tables.
    """

    def __init__(self, module: ModuleType, num_blocks: int, block_size: int, max_len: int) -> None:
        super().__init__()
        self.module, self.paper = module, Paper(num_blocks, block_size, max_len)
        made = call_theirs(name_of(module, "BlockManager"), num_blocks, block_size, 6, max_len)
        if made[0]:
            raise Broken("REFUSE", "a BlockManager is made", f"{made[0]}: {made[1]}")
        self.manager: Any = made[1]
        self.rows: dict[str, int] = {}
        self.texts: dict[str, list[int]] = {}
        self.slots: dict[int, int] = {}
        self.tokens = count()

    def state(self) -> Seen:
        """All that the manager shows."""
        return look_at_manager(self.manager, self.rows)

    def queue_invariant(self) -> None:
        """I1."""
        pool = self.manager.pool
        check_i1(*look_at_pool(pool), int(field_of(pool, "num_free")))

    def invariants(self) -> None:
        """I1, the form of the rows, I2."""
        self.queue_invariant()
        seen = self.state()
        check_rows(seen)
        check_i2(seen)

    def put(self, chat: str, tokens: int) -> None:
        """The last `tokens` of `chat` are written where its table says."""
        size, ids = self.paper.block_size, self.state().tables[chat]
        for _ in range(tokens):
            index, offset = divmod(len(self.texts[chat]), size)
            if index >= len(ids):
                at = len(self.texts[chat])
                raise Broken("ROOM", f"{chat} has a block for position {at}", f"its row is {ids}")
            self.slots[ids[index] * size + offset] = token = next(self.tokens)
            self.texts[chat].append(token)

    def read_back(self, rule: str) -> None:
        """Every chat reads, through its table, what it wrote; else `rule` is broken."""
        size, tables = self.paper.block_size, self.state().tables
        for chat, text in self.texts.items():
            for at, token in enumerate(text[: len(tables[chat]) * size]):
                block = tables[chat][at // size]
                if (found := self.slots.get(block * size + at % size)) != token:
                    whose = [who for who in sorted(self.texts) if found in self.texts[who]]
                    said = f"a token of {whose[0]}" if whose else "nothing"
                    raise Broken(
                        rule,
                        f"{chat} reads its own token at position {at}",
                        f"in block {block} stands {said}",
                    )

    def compare(self, taken: list[int], rule: str = "I3") -> None:
        """Everything, the most telling first.  `taken`: the blocks for the places not settled."""
        self.invariants()
        self.read_back(rule)
        seen, paper = self.state(), self.paper
        if seen.lens != paper.lens:
            raise Broken("ROOM", f"seq_lens {paper.lens}", seen.lens)
        for chat, ids in paper.tables.items():
            if len(seen.tables[chat]) != len(ids):
                raise Broken("ROOM", f"{len(ids)} blocks for {chat}", seen.tables[chat])
        if seen.free != paper.queue:
            raise Broken("FIFO", f"the queue {paper.queue}", seen.free)
        fresh = []
        for chat, ids in paper.tables.items():
            for index, (block, found) in enumerate(zip(ids, seen.tables[chat], strict=True)):
                if block is None:
                    fresh.append(found)
                elif block != found:
                    said = f"block {block} stays at logical block {index} of {chat}"
                    raise Broken("ROOM", said, found)
            paper.tables[chat] = list(seen.tables[chat])
        if sorted(fresh) != sorted(taken):
            raise Broken("FIFO", f"fresh blocks {taken}, the front of the queue", fresh)

    def leave(self, chat: str) -> None:
        """Strike a chat off the lists, its table apart."""
        for of_chats in (self.rows, self.texts, self.paper.lens):
            del of_chats[chat]


class ManagerSubject(RowSubject):
    """The operations of chapter 03 over a BlockManager."""

    def do_add(self, chat: str, tokens: int) -> None:
        """A chat arrives."""
        paper = self.paper
        if chat in self.rows:
            return
        self.log.append(f"{chat} arrives with {number_of(tokens, 'token')}")
        blocks = -(-tokens // paper.block_size)
        allowed = {"OutOfBlocks"} if blocks > len(paper.queue) else set()
        allowed |= {"ValueError"} if tokens > paper.max_seq_len else set()
        row = self.attempt(allowed or {""}, self.manager.add, tokens)
        if allowed:
            return
        if not isinstance(row, int | np.integer) or row in self.rows.values():
            raise Broken("ROW", f"a row that no other chat has ({self.rows})", repr(row))
        self.rows[chat], self.texts[chat] = int(row), []
        paper.tables[chat], paper.lens[chat] = [None] * blocks, tokens
        self.put(chat, tokens)
        self.compare(paper.take(blocks))

    def do_finish(self, chat: str) -> None:
        """A chat ends."""
        if chat not in self.rows:
            return
        self.log.append(f"{chat} finishes")
        self.attempt({""}, self.manager.finish, self.rows[chat])
        self.leave(chat)
        ids = self.paper.tables.pop(chat)
        self.paper.let_go(ids)
        self.compare([])

    def do_append(self, chats: str, tokens: int) -> None:
        """Each of `chats` grows; a shared tail must be refused."""
        batch, paper = [chat for chat in chats if chat in self.rows], self.paper
        if not batch:
            return
        self.log.append(f"append {number_of(tokens, 'token')}: {', '.join(batch)}")
        allowed = self.refusals(batch, tokens, 0)
        if tokens and any(map(paper.tail_is_shared, batch)):
            allowed.add("ValueError")
        rows = [self.rows[chat] for chat in batch]
        rule = "REFUSE" if "ValueError" not in allowed else "I3"
        self.attempt(allowed or {""}, self.manager.append, rows, tokens, rule=rule)
        if not allowed:
            self.grow(batch, tokens, 0)

    def refusals(self, batch: list[str], tokens: int, copies: int) -> set[str]:
        """The exceptions that are right if `batch` is to grow."""
        paper = self.paper
        needed = copies + sum(paper.missing(chat, tokens) for chat in batch)
        too_long = any(paper.lens[chat] + tokens > paper.max_seq_len for chat in batch)
        short = {"OutOfBlocks"} if needed > len(paper.queue) else set()
        return short | ({"ValueError"} if too_long else set())

    def grow(self, batch: list[str], tokens: int, copies: int) -> None:
        """The paper follows, the tokens are written, and the two are compared."""
        paper = self.paper
        for chat in batch:
            copies += paper.missing(chat, tokens)
            paper.tables[chat] += [None] * paper.missing(chat, tokens)
            paper.lens[chat] += tokens
            self.put(chat, tokens)
        self.compare(paper.take(copies))

    def do_nonsense(self, which: int) -> None:
        """A call that must be refused."""
        manager, rows = self.manager, sorted(self.rows.values())
        closed = next(row for row in range(6) if row not in rows)
        calls: list[tuple[str, Any, tuple[Any, ...]]] = [
            ("append to a closed row", manager.append, ([closed], 1)),
            ("finish a row that does not exist", manager.finish, (99,)),
            ("finish a closed row", manager.finish, (closed,)),
            ("add -1 tokens", manager.add, (-1,)),
        ]
        if rows:
            calls += [
                ("append to a row named twice", manager.append, ([rows[0], rows[0]], 1)),
                ("append -1 tokens", manager.append, ([rows[0]], -1)),
                ("append to an open and a closed row", manager.append, ([rows[0], closed], 1)),
            ]
        said, function, args = calls[which % len(calls)]
        self.log.append(f"{said}, which is nonsense")
        self.attempt({"ValueError"}, function, *args)
        self.compare([])
