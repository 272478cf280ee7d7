# Exported from book/appendices/A5_check_your_own.py by tools/export.py; edit the chapter, not this file.
"""The state as a pencil keeps it, what is seen of the reader's, and the invariants over that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paged_kv.check_reader import call_theirs, field_of
from paged_kv.check_rules import Broken


class Paper:
    """Queue and tables as plain lists; a count is never stored, but counted.

    State
        queue   the free ids, next to be taken first.
        tables  {chat: ids}; None where a fresh block goes whose id is not settled.
        lens    {chat: tokens}.
    """

    def __init__(self, num_blocks: int, block_size: int = 1, max_seq_len: int = 1) -> None:
        self.block_size, self.max_seq_len = block_size, max_seq_len
        self.queue = list(range(num_blocks))
        self.tables: dict[str, list[int | None]] = {}
        self.lens: dict[str, int] = {}

    def count(self, block: int | None) -> int:
        """Rows that hold `block`."""
        return sum(ids.count(block) for ids in self.tables.values())

    def take(self, count: int) -> list[int]:
        """The first `count` of the queue."""
        taken, self.queue = self.queue[:count], self.queue[count:]
        return taken

    def let_go(self, ids: Sequence[int | None]) -> None:
        """Queue up those of `ids` that no row holds any more; call it after changing the rows."""
        idle = [block for block in ids if block is not None and not self.count(block)]
        self.queue += [*dict.fromkeys(idle[::-1])][::-1]  # where the last holder let go

    def missing(self, chat: str, more: int) -> int:
        """Blocks that `chat` needs for `more` tokens beyond those it has."""
        return max(0, -(-(self.lens[chat] + more) // self.block_size) - len(self.tables[chat]))

    def tail_is_shared(self, chat: str) -> bool:
        """Whether the next token of `chat` goes into a block that others hold too."""
        index, offset = divmod(self.lens[chat], self.block_size)
        return offset > 0 and self.count(self.tables[chat][index]) > 1


@dataclass(frozen=True)
class Seen:
    """What a manager shows: the queue, all counts, and for each chat its blocks and tokens.

    behind: what stands in each row behind its last block; closed: the rows that no chat has, the
    length and then the ids.
    """

    free: list[int]
    counts: list[int]
    tables: dict[str, list[int]]
    lens: dict[str, int]
    behind: dict[str, list[int]]
    closed: list[list[int]]

    def differs_from(self, other: Seen) -> str:
        """The first difference in words, empty for none."""
        for name in ("free", "counts", "tables", "lens", "behind", "closed"):
            if getattr(self, name) != getattr(other, name):
                what = {"free": "queue", "closed": "rows of nobody"}.get(name, name)
                return f"{what} {getattr(other, name)}, before {getattr(self, name)}"
        return ""


def look_at_pool(pool: Any) -> tuple[list[int], list[int]]:
    """Queue and counts of a pool."""
    outcome, free = call_theirs(field_of(pool, "free_ids"))
    if outcome:
        raise Broken("CRASH", "free_ids() returns the queue", free)
    return [int(block) for block in free], np.asarray(field_of(pool, "ref_count")).tolist()


def look_at_manager(manager: Any, rows: Mapping[str, int]) -> Seen:
    """Everything that an operation could change."""
    free, counts = look_at_pool(field_of(manager, "pool"))
    tables = field_of(manager, "tables")
    table = np.asarray(field_of(tables, "table")).tolist()
    used = np.asarray(field_of(tables, "num_blocks")).tolist()
    lens = np.asarray(field_of(tables, "seq_lens")).tolist()
    return Seen(
        free,
        counts,
        {chat: table[row][: used[row]] for chat, row in rows.items()},
        {chat: lens[row] for chat, row in rows.items()},
        {chat: table[row][used[row] :] for chat, row in rows.items()},
        [[lens[row], *ids] for row, ids in enumerate(table) if row not in rows.values()],
    )


def check_i1(free: list[int], counts: list[int], num_free: int) -> None:
    """I1, from the outside: no negative count, nothing lost, nothing queued twice or early."""
    for block, count in enumerate(counts):
        if count < 0:
            raise Broken("I1", "no count below 0", f"block {block} has count {count}")
    idle = [block for block, count in enumerate(counts) if count == 0]
    if sorted(free) != idle:
        raise Broken("I1", f"in the queue, in some order, {idle}", f"{free}, counts {counts}")
    if num_free != len(free):
        raise Broken("I1", f"num_free = {len(free)}, the length of the queue", num_free)


def check_rows(seen: Seen) -> None:
    """The form of every row: ids of the pool, none twice, -1 behind them, closed rows empty."""
    for chat, ids in seen.tables.items():
        if len(set(ids)) != len(ids) or not all(0 <= i < len(seen.counts) for i in ids):
            raise Broken("ROW", "different blocks of the pool", f"{chat} has {ids}")
        if set(seen.behind[chat]) - {-1}:
            raise Broken("ROW", f"-1 behind {ids} of {chat}", seen.behind[chat])
    for ids in seen.closed:
        if set(ids) - {-1}:
            said = f"length {ids[0]}, ids {ids[1:]}"
            raise Broken("ROW", "-1 all along in a row that no chat has, for its length too", said)


def check_i2(seen: Seen) -> None:
    """I2: each count against the rows."""
    for block, count in enumerate(seen.counts):
        holders = [chat for chat, ids in seen.tables.items() if block in ids]
        if count != len(holders):
            held = f"held by {' and '.join(holders)}" if holders else "held by no row"
            raise Broken("I2", f"block {block} has count {len(holders)}: {held}", f"count {count}")
