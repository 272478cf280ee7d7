# Exported from book/10_preemption.py by tools/export.py; edit the chapter, not this file.
"""Does it move?  A watch over a scheduler, which names the cycle if it goes in circles."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeAlias

from paged_kv.request import Group
from paged_kv.scheduler import Scheduler

Figures: TypeAlias = tuple[int, int, int]  # of a sample: index, known tokens, reserved tokens
Standing: TypeAlias = tuple[str, tuple[Figures, ...]]  # of a group: state, living samples


class Livelock(RuntimeError):
    """A scheduler came back to a state it had been in, and nothing was gained in between.

    Attributes: `cycle`, the events from one visit to the next; empty if nothing happens at all.
    """

    def __init__(self, cycle: list[str]) -> None:
        super().__init__("; ".join(cycle) or "nothing happens any more")
        self.cycle = cycle


def standing(scheduler: Scheduler, group: Group) -> Standing:
    """Where a group stands; reserved is -1 for a sample without a row."""
    known, reserved = scheduler.home.rows.known, scheduler.manager.tables.seq_lens
    samples = [
        (one.index, len(one.tokens), -1)
        if one.row < 0
        else (one.index, int(known[one.row]), int(reserved[one.row]))
        for one in group.live()
    ]
    return group.state, tuple(samples)


def changes(before: dict[Hashable, Standing], after: dict[Hashable, Standing]) -> list[str]:
    """What happened to each group from one look to the next, in words; growth is left out."""
    told = []
    for key, (state, samples) in after.items():
        was, then = before.get(key, ("new", ()))
        if was != state:
            told.append(f"{key}: {was} -> {state}")
        knew = {index: known for index, known, _ in then}
        for index, known, _ in samples:
            if known < knew.get(index, 0):
                told.append(f"{key}: knows {known} tokens, knew {knew[index]}")
    return told


class ProgressWatch:
    """Look at a scheduler after every step; raises Livelock.

    Progress is a request that comes or ends, a sample that knows more tokens than ever before,
    or one that has more K/V than ever before.
    Args: `visits`, how often a state may be met without progress.
    State: the marks that living samples have reached, the events since the last progress, and
    at which of them each state was met.
    """

    def __init__(self, visits: int = 3) -> None:
        self.visits = visits
        self.marks: dict[tuple[Hashable, int], tuple[int, int]] = {}
        self.ends = (0, 0)
        self.last: dict[Hashable, Standing] = {}
        self.log: list[str] = []
        self.met: dict[tuple[object, ...], list[int]] = {}

    def observe(self, scheduler: Scheduler) -> None:
        """Take note of the state; Livelock if it was met too often without progress."""
        now = {key: standing(scheduler, group) for key, group in scheduler.ledger.groups.items()}
        told, self.last = changes(self.last, now), now
        if self._progress(scheduler) or not now:
            self.log, self.met = [], {}
        self.log += told
        state = (tuple(now.items()), scheduler.manager.pool.num_free)
        met = self.met.setdefault(state, [])
        met.append(len(self.log))
        if len(met) > self.visits and now:
            raise Livelock(self.log[met[-2] : met[-1]])

    def _progress(self, scheduler: Scheduler) -> bool:
        ledger, before = scheduler.ledger, (self.ends, self.marks)
        self.ends, self.marks = (ledger.submitted, ledger.counts["finished"]), {}
        for key, (_, samples) in self.last.items():
            for index, known, reserved in samples:
                mark = before[1].get((key, index), (0, 0))
                self.marks[key, index] = (max(mark[0], known), max(mark[1], reserved))
        return before != (self.ends, self.marks)
