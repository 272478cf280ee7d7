# Exported from book/appendices/A5_check_your_own.py by tools/export.py; edit the chapter, not this file.
"""A prefix cache against a list of what each block holds."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from paged_kv.check_managers import RowSubject
from paged_kv.check_reader import call_theirs
from paged_kv.check_rules import Broken


class PrefixSubject(RowSubject):
    """PrefixCache and admit_cached.  State: `holds`, {block: (salt, all tokens up to its end)}."""

    def __init__(self, module: ModuleType, num_blocks: int, block_size: int, max_len: int) -> None:
        super().__init__(module, num_blocks, block_size, max_len)
        made = call_theirs(module.PrefixCache, self.manager.pool, block_size)
        if made[0]:
            raise Broken("REFUSE", "a PrefixCache is made", f"{made[0]}: {made[1]}")
        self.cache: Any = made[1]
        self.holds: dict[int, tuple[int, str]] = {}

    def root(self, salt: int) -> Any:
        """The root of a tenant; 0 is nobody's."""
        return self.cache.root([("salt", f"tenant {salt}")]) if salt else b""

    def known(self, salt: int, text: str) -> list[list[int]]:
        """For each block of `text`, those that hold it, up to the first that none does."""
        found, size = [], self.paper.block_size
        for end in range(size, len(text) + 1, size):
            blocks = [b for b, held in self.holds.items() if held == (salt, text[:end])]
            if not blocks:
                break
            found.append(blocks)
        return found[: max(0, len(text) - 1) // size]

    def publish(self, chat: str, text: str, salt: int, found: int) -> None:
        """The blocks that the chat has computed become findable."""
        size, args = self.paper.block_size, (self.manager, self.cache, self.rows[chat])
        tokens, root = [ord(letter) for letter in text], self.root(salt)
        self.attempt({""}, self.module.publish_full, *args, tokens, found // size, root)
        for index in range(found // size, len(text) // size):
            block = self.paper.tables[chat][index]
            self.holds[block or 0] = (salt, text[: (index + 1) * size])

    def do_admit(self, chat: str, text: str, salt: int) -> None:
        """A chat arrives with letters for tokens, and its full blocks are published."""
        paper, free = self.paper, self.paper.queue
        if chat in self.rows:
            return
        self.log.append(f'{chat} of tenant {salt} arrives with "{text}"')
        known = self.known(salt, text)
        fresh = -(-len(text) // paper.block_size) - len(known)
        idle = sum(all(b in free for b in blocks) for blocks in known)
        allowed = {"OutOfBlocks"} if fresh + idle > len(free) else set()
        allowed |= {"ValueError"} if len(text) > paper.max_seq_len else set()
        tokens, root = [ord(letter) for letter in text], self.root(salt)
        answer = self.attempt(
            allowed | {""}, self.module.admit_cached, self.manager, self.cache, tokens, root
        )
        if answer is None and allowed:
            return
        self.rows[chat], found = (int(part) for part in answer)
        self.check_hits(chat, text, salt, found)
        if allowed:
            raise Broken("SHORT", " or ".join(allowed), "no refusal")
        self.arrived(chat, text, salt, found)
        self.publish(chat, text, salt, found)

    def do_done(self, chat: str) -> None:
        """A chat ends; its blocks stay findable until they are taken."""
        if chat not in self.rows:
            return
        self.log.append(f"{chat} is done")
        self.attempt({""}, self.module.give_back, self.manager, self.rows[chat])
        self.leave(chat)
        ids = self.paper.tables.pop(chat)
        self.paper.let_go(ids[::-1])
        free = self.state().free
        if sorted(free) == sorted(self.paper.queue) and free != self.paper.queue:
            raise Broken("TAIL", f"the queue {self.paper.queue}", free)
        self.compare([])

    def check_hits(self, chat: str, text: str, salt: int, found: int) -> None:
        """Look at what was found: not too much, nothing foreign, nothing overlooked."""
        size = self.paper.block_size
        most = max(0, len(text) - 1) // size * size
        if found > most:
            raise Broken("LAST", f"at most {most} of {len(text)} tokens are found", found)
        for index, block in enumerate(self.state().tables[chat][: found // size]):
            want, has = (salt, text[: (index + 1) * size]), self.holds.get(block)
            if has != want:
                said = f'its own is "{has[1]}" of tenant {has[0]}' if has else "it has none now"
                raise Broken(
                    "I4",
                    f'a block whose history is "{want[1]}" of tenant {salt}',
                    f"block {block}, and {said}",
                )
        if found < (expected := len(self.known(salt, text)) * size):
            raise Broken("FIND", f"{expected} tokens are found", found)

    def arrived(self, chat: str, text: str, salt: int, found: int) -> None:
        """The paper follows, and the two are compared."""
        paper, size = self.paper, self.paper.block_size
        hits = self.state().tables[chat][: found // size]
        paper.queue = [block for block in paper.queue if block not in hits]
        blocks = -(-len(text) // size)
        paper.tables[chat] = [*hits, *[None] * (blocks - len(hits))]
        paper.lens[chat], self.texts[chat] = len(text), []
        taken = paper.take(blocks - len(hits))
        for block in taken:
            self.holds.pop(block, None)
        self.compare(taken)


def check_roots(module: ModuleType) -> None:
    """Extra parts that differ give roots that differ."""
    parts: list[list[tuple[str, Any]]] = [
        [], [("adapter", "S")], [("salt", "S")], [("salt", "1")], [("salt", 1)],
        [("ab", "c")], [("a", "bc")], [("a", "b"), ("c", "d")], [("a", "bcd")],
    ]  # fmt: skip
    seen: dict[Any, Any] = {}
    for part in parts:
        outcome, root = call_theirs(module.PrefixCache.root, part)
        if outcome:
            raise Broken("REFUSE", f"a root for {part}", f"{outcome}: {root}")
        if root in seen:
            raise Broken("KEYS", f"{seen[root]} and {part} have two roots", "they have one")
        seen[root] = part
