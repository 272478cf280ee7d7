# Exported from book/09_scheduling.py by tools/export.py; edit the chapter, not this file.
"""Every request from its submission to its end, and what a relief may do with those that run."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Protocol

import numpy as np

from paged_kv.block_manager import BlockManager
from paged_kv.request import Completion, Group, Ints, Output, Sample, State, Tokens, WaitingQueue
from paged_kv.residents import Residents, Saved
from paged_kv.step_plan import Move


class Relief(Protocol):
    """What happens when a running group needs a block and there is none."""

    def victim(self, ledger: Ledger, candidates: Sequence[Group]) -> Group:
        """Choose one of `candidates`, which come in (priority, arrival) order."""

    def evict(self, ledger: Ledger, group: Group) -> list[Move]:
        """Have `group` give up its blocks: by `ledger.release` or `ledger.suspend`."""

    def restore(self, ledger: Ledger, group: Group) -> list[Move] | None:
        """Bring a suspended `group` back, or None, with nothing changed, if it must wait."""

    def drop(self, ledger: Ledger, group: Group) -> None:
        """Forget what was kept of a suspended `group`."""


class Recompute:
    """The simplest relief: the last in order gives everything up and starts again."""

    def victim(self, ledger: Ledger, candidates: Sequence[Group]) -> Group:
        """The last of `candidates`."""
        return candidates[-1]

    def evict(self, ledger: Ledger, group: Group) -> list[Move]:
        """Release it; no byte is moved."""
        ledger.release(group)
        return []

    def restore(self, ledger: Ledger, group: Group) -> list[Move] | None:
        """Never asked for, since it suspends nobody."""
        return None

    def drop(self, ledger: Ledger, group: Group) -> None:
        """Nothing is kept."""


class Ledger:
    """Who waits, runs, is swapped, has finished.

    State
        home      Residents: the groups that hold rows.
        queue     those that do not: waiting and swapped.
        groups    {id: group}, all that have not ended.
        beams     {serial: group}, the running beam groups.
        untimed   {serial: group}, those that run and have no token yet.
        counts    requests in each state.
        outputs   those that ended and were not reported yet.
        moves, moved  block moves for the next plan, and the groups that it suspends or restores.
    Invariant I5: waiting + running + swapped + finished == submitted.
    """

    def __init__(self, home: Residents, relief: Relief, clock: Callable[[], float]) -> None:
        self.home, self.relief, self.now = home, relief, clock
        self.manager, self.cache, self.rows = home.manager, home.cache, home.rows
        self.queue = WaitingQueue()
        self.groups: dict[Hashable, Group] = {}
        self.beams: dict[int, Group] = {}
        self.untimed: dict[int, Group] = {}
        self.outputs: list[Output] = []
        self.moves: list[Move] = []
        self.moved: list[Group] = []
        self.counts: dict[State, int] = dict.fromkeys(STATES, 0)
        self.submitted = 0

    def enter(self, group: Group) -> None:
        """Take in a new group, to wait for its turn."""
        self.groups[group.id] = group
        self.submitted += 1
        self.counts["waiting"] += 1
        self.queue.push(group)

    def turn(self, group: Group, state: State) -> None:
        """Note that `group` is now in `state`."""
        self.counts[group.state] -= 1
        self.counts[state] += 1
        group.state = state
        self.beams.pop(group.serial, None)
        if state == "running" and group.beams:
            self.beams[group.serial] = group
        if state == "running" and group.first_token_at is None:
            self.untimed[group.serial] = group

    def end_rows(self, rows: Ints, reason: str, now: float) -> None:
        """The samples in `rows` end; groups without another end with them."""
        tenants = [(self.rows.group[row], self.rows.sample[row]) for row in rows.tolist()]
        for _, sample in tenants:
            sample.finish_reason = reason
        self.home.vacate([sample for _, sample in tenants])
        for group in dict.fromkeys(group for group, _ in tenants):
            if not group.live():
                close(self, group, now)

    def end(self, group: Group, reason: str, now: float) -> None:
        """End `group`, whatever its state: blocks, rows and what a relief keeps are given up."""
        if group.state != "running":
            self.queue.remove(group)
        if group.state == "swapped":
            self.relief.drop(self, group)
        living = group.live()
        for sample in living:
            sample.finish_reason = reason
        if group.state == "running":
            self.home.vacate(living)
            self.home.branching.pop(group.serial, None)
        close(self, group, now)

    def running_groups(self) -> list[Group]:
        """The groups that hold rows, in (priority, arrival) order."""
        found = {self.rows.group[row] for row in self.home.running.tolist()}
        return sorted(found, key=lambda group: group.order)

    def rows_of(self, group: Group) -> list[int]:
        """The rows of its live samples, in their order; those yet to branch have none."""
        return [sample.row for sample in group.live() if sample.row >= 0]

    def tokens_of(self, sample: Sample) -> Tokens:
        """Its prompt and the output committed so far."""
        if sample.row < 0:
            return sample.tokens
        return self.rows.tokens[sample.row, : self.rows.known[sample.row]]

    def release(self, group: Group) -> None:
        """Let a running group wait again, in its old place: tokens stay, blocks do not."""
        leave(self, group, "waiting")

    def suspend(self, group: Group) -> list[Saved]:
        """As `release`, but its K/V are to come back; returns what is worth keeping."""
        saved = worth_keeping(self, group)
        leave(self, group, "swapped")
        return saved

    def resume(self, group: Group, rows: Mapping[int, int]) -> None:
        """Seat a suspended group again: {sample index: row} for each that was saved."""
        seat_again(self, group, rows)

    def blocks_freed_by(self, group: Group) -> int:
        """Blocks that nobody else holds."""
        return blocks_freed(self.manager, self.rows_of(group))

    def tokens_to_replay(self, group: Group, after_hits: bool = True) -> int:
        """Tokens to run again if it were released; see `replay_tokens`."""
        return replay_tokens(self, group, after_hits)


STATES: tuple[State, ...] = ("waiting", "running", "swapped", "finished")


def close(ledger: Ledger, group: Group, now: float) -> None:
    """Forget `group`, all of whose samples have ended, and make its Output."""
    ledger.turn(group, "finished")
    ledger.untimed.pop(group.serial, None)
    del ledger.groups[group.id]
    start = len(group.request.tokens)
    done = tuple(
        Completion(sample.index, sample.tokens[start:].tolist(), str(sample.finish_reason))
        for sample in group.samples
    )
    times = group.arrival, group.first_token_at, now
    ledger.outputs.append(Output(group.id, done, *times, group.hit_tokens, group.preemptions))


def note_first(ledger: Ledger, now: float) -> None:
    """Give the groups whose first token has come its time."""
    for group in list(ledger.untimed.values()):
        row = group.samples[0].row
        if row >= 0 and ledger.rows.known[row] > len(group.request.tokens):
            group.first_token_at = now
            del ledger.untimed[group.serial]


def leave(ledger: Ledger, group: Group, state: State) -> None:
    """Have a running `group` give up rows and blocks, keep its tokens and queue in its old place.

    Samples of it that are in flight will be dropped, since its rows lose their tenant.
    """
    ledger.home.vacate(group.live())
    ledger.home.branching.pop(group.serial, None)
    group.preemptions += 1
    ledger.turn(group, state)
    ledger.queue.push(group)


def worth_keeping(ledger: Ledger, group: Group) -> list[Saved]:
    """What a running group can come back with, without its newest token.

    That one has to run again, since the sample in flight behind it is dropped.  The blocks will be
    free, and their bytes intact until later moves and writes of the coming plan.
    """
    saved, tables = [], ledger.manager.tables
    for sample in group.live():
        if (row := sample.row) >= 0:
            keep = int(min(tables.seq_lens[row], ledger.rows.known[row] - 1))
            blocks = tables.table[row, : -(-keep // tables.block_size)]
            saved.append(Saved(sample.index, keep, blocks.tolist()))
    return saved


def seat_again(ledger: Ledger, group: Group, rows: Mapping[int, int]) -> None:
    """Let a suspended group run: {sample index: row}, open, with blocks and lengths.

    Nothing in these rows counts as published; samples that had no row wait to branch, as before.
    """
    for index, row in rows.items():
        ledger.home.seat(row, group, group.samples[index])
    living = group.live()
    ledger.home.reserved += len(living)
    if any(sample.row < 0 for sample in living):
        ledger.home.branching[group.serial] = group
    ledger.turn(group, "running")


def blocks_freed(manager: BlockManager, rows: list[int]) -> int:
    """Blocks that come free if all of `rows` are closed: those that no other row holds."""
    width = int(manager.tables.num_blocks[rows].max(initial=0))
    ids = manager.tables.table[rows, :width]
    ids, times = np.unique(ids[ids >= 0], return_counts=True)
    return int((manager.pool.ref_count[ids] == times).sum())


def replay_tokens(ledger: Ledger, group: Group, after_hits: bool) -> int:
    """Tokens that `group` would run again after a release: the prompt once, each output.

    `after_hits`: without the leading blocks that can be found again, unless they are taken.
    """
    rows = ledger.rows_of(group)
    prompt, known = len(group.request.tokens), ledger.rows.known[rows]
    tokens = prompt + int((known - prompt).sum())
    if after_hits and ledger.cache is not None:
        size = ledger.manager.block_size
        found = np.minimum(ledger.rows.published[rows], (known - 1) // size)
        tokens = min(tokens, int((known - found * size).sum()))
    return tokens


def is_ending(ledger: Ledger, group: Group) -> bool:
    """Whether the last sample of all its texts is in flight."""
    rows = ledger.rows_of(group)
    done = (ledger.rows.expected[rows] == ledger.rows.limit[rows]).all()
    return bool(done) and group.serial not in ledger.home.branching


def check_ledger(ledger: Ledger) -> None:
    """Assert I5 and that each group is where its state says.  For tests."""
    home, counts = ledger.home, ledger.counts
    home.check()
    assert sum(counts.values()) == ledger.submitted, f"I5: {counts}, {ledger.submitted} submitted"
    states = [group.state for group in ledger.groups.values()]
    for state in STATES[:3]:
        assert states.count(state) == counts[state], f"{state}: {counts}"
    assert len(ledger.queue) == counts["waiting"] + counts["swapped"], "the queue"
    running = {group for group in ledger.groups.values() if group.state == "running"}
    assert set(ledger.running_groups()) == running, "a running group without a row"
    living = sum(len(group.live()) for group in running)
    assert living == home.reserved, f"{home.reserved} rows reserved, {living} needed"
