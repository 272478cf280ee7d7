# Exported from book/09_scheduling.py by tools/export.py; edit the chapter, not this file.
"""Who may run: the token budget among those who do, and the door for those who wait."""

from __future__ import annotations

from itertools import count

import numpy as np

from paged_kv.block_pool import OutOfBlocks
from paged_kv.ledger import Ledger
from paged_kv.request import Group, Ints, NeverFits, Request, blocks_of_tree, hang_branches


def share_budget(
    ledger: Ledger, rows: Ints, budget: int, steady: bool = False
) -> tuple[Ints, Ints | int, int]:
    """How many tokens each of `rows` runs: decodes first, then prefills in order.

    `steady`: it is known that each runs one.
    Returns: the rows that run, tokens each (1 if that is all), the budget left.
    """
    if steady:
        return rows, 1, budget - len(rows)
    state = ledger.rows
    want = state.reach(rows) - ledger.manager.tables.seq_lens[rows]
    if ledger.beams:
        want = hold_beams(ledger, rows, want)
    if want.max(initial=1) <= 1:
        rows = rows if (want == 1).all() else rows[want == 1]
        return rows, 1, budget - len(rows)
    counts = (want == 1).astype(np.int64)
    budget -= int(counts.sum())
    longer = (want > 1).nonzero()[0].tolist()
    for i in sorted(longer, key=lambda i: state.group[int(rows[i])].order):
        counts[i] = min(int(want[i]), budget)
        budget -= int(counts[i])
    return rows[counts > 0], counts[counts > 0], budget


def hold_beams(ledger: Ledger, rows: Ints, want: Ints) -> Ints:
    """Beams wait for their last commit, and in a replay for one another before they sample."""
    wants, state = dict(zip(rows.tolist(), want.tolist(), strict=True)), ledger.rows
    for group in ledger.beams.values():
        mine = [row for row in ledger.rows_of(group) if row in wants]
        if (state.expected[mine] > state.known[mine]).any():
            wants |= dict.fromkeys(mine, 0)
        elif group.serial in ledger.home.branching or any(wants[row] > 1 for row in mine):
            spare = group.first_token_at is not None
            wants |= {row: max(0, wants[row] - spare) for row in mine}
    return np.array(list(wants.values()), np.int64)


class Admission:
    """The door: what is refused at once, and who comes in when.

    State
        token_budget, max_running, chunked   the limits, as the scheduler got them.
        refused  serial of the group that had no room last, and the blocks that were free then.
    """

    def __init__(self, ledger: Ledger, token_budget: int, max_running: int, chunked: bool) -> None:
        self.ledger, self.home = ledger, ledger.home
        self.token_budget, self.max_running, self.chunked = token_budget, max_running, chunked
        self.refused = (-1, 0)

    def submit(self, request: Request) -> Group:
        """Check that `request` can be served at all, and let it wait.

        Raises, with nothing changed: NeverFits; ValueError, naming the field.
        """
        ledger, length = self.ledger, len(request.tokens)
        free = (number for number in count(ledger.submitted) if number not in ledger.groups)
        name = next(free) if request.request_id is None else request.request_id
        longest = ledger.manager.tables.max_seq_len
        if name in ledger.groups:
            raise ValueError(f"request_id = {name!r}: still in use")
        if request.width > self.max_running:
            raise ValueError(f"n, beam_width: {request.width} rows, max_running {self.max_running}")
        if request.limit - 1 > longest:
            raise ValueError(f"prompt: it grows to {request.limit - 1} tokens, a row has {longest}")
        if length > self.token_budget and not self.chunked:
            raise ValueError(f"prompt: {length} tokens in one step of {self.token_budget}")
        arrival = ledger.now() if request.arrival is None else request.arrival
        root = b"" if ledger.cache is None else ledger.cache.root(request.extra)
        group = Group(name, request, ledger.submitted, arrival, root)
        needed, pool = blocks_of_tree(group, ledger.manager.block_size), ledger.manager.pool
        if needed > pool.num_blocks:
            raise NeverFits(needed, pool.num_blocks)
        ledger.enter(group)
        return group

    def admit(self, budget: int) -> list[tuple[int, int]]:
        """Let groups in, from the head of the queue, while rows, blocks and `budget` last.

        Returns: (row, tokens) of what they run in this step.
        """
        ledger, runs = self.ledger, list[tuple[int, int]]()
        while budget and (group := ledger.queue.head()):
            enter = self._restore if group.state == "swapped" else self._place
            fits = self.home.reserved + len(group.live()) <= self.max_running
            more = enter(group, budget) if fits else None
            if more is None and len(self.home.running):
                break
            if more is None:  # all blocks are free and it still has no room
                ledger.end(group, "out_of_blocks", ledger.now())
                continue
            ledger.queue.remove(group)
            runs += more
            budget -= sum(count for _, count in more)
        return runs

    def _place(self, group: Group, budget: int) -> list[tuple[int, int]] | None:
        pool, others = self.ledger.manager.pool, len(group.live()) - 1
        if self.refused == (group.serial, pool.num_free) and len(self.home.running):
            return None
        todo, blocks = lookup(self.ledger, group)
        if blocks > pool.num_free:
            self.refused = group.serial, pool.num_free
            return None
        fresh = group.first_token_at is None
        if todo > budget and fresh and not self.chunked:
            return None
        count = min(todo - bool(group.beams and others and not fresh), budget)
        row = self.home.move_in(group, count)
        self.ledger.turn(group, "running")
        return [(row, count)] if count else []

    def _restore(self, group: Group, budget: int) -> list[tuple[int, int]] | None:
        ledger = self.ledger
        if len(group.live()) > budget:
            return None
        moves = ledger.relief.restore(ledger, group)
        if moves is None:
            return None
        assert group.state == "running", f"{group}: restored, but it does not run"
        ledger.moves += moves
        ledger.moved.append(group)
        mine = np.array(ledger.rows_of(group), np.int64)
        rows, counts, _ = share_budget(ledger, mine, budget)
        try:
            ledger.moves += self.home.reserve(rows, counts)
        except OutOfBlocks:
            return []
        return list(zip(rows.tolist(), np.broadcast_to(counts, rows.shape).tolist(), strict=True))


def lookup(ledger: Ledger, group: Group) -> tuple[int, int]:
    """Tokens that the first live sample has to run, and free blocks that the whole group takes.

    Hits need no tokens; those that are idle need a free block, since they stop being free.
    """
    hang_branches(group)
    tokens, size = group.live()[0].tokens, ledger.manager.block_size
    hits = [] if ledger.cache is None else ledger.cache.match(group.root, tokens)
    in_use = int(np.count_nonzero(ledger.manager.pool.ref_count[hits])) if len(hits) else 0
    return len(tokens) - len(hits) * size, blocks_of_tree(group, size) - in_use
