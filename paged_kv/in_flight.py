# Exported from book/09_scheduling.py by tools/export.py; edit the chapter, not this file.
"""Plans that were handed out and are not committed: what comes back, and what does not."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from paged_kv.ledger import Ledger
from paged_kv.request import MAX_TOKEN, Group, Ints, Tokens
from paged_kv.residents import Residents, rewire_beams
from paged_kv.step_plan import Cadence, StepPlan


class Flight(NamedTuple):
    """A plan handed out and not committed.

    Fields
        moved       the groups that it suspends or restores.
        departures  how many tenants had left by then.
        steady      for how many steps more every row of it runs one token, if nobody comes or
                    goes; -1 where some do not.
        cadence, after  of a steady plan that follows another: what comes round; seq_lens + 1.
    """

    plan: StepPlan
    moved: list[Group]
    departures: int
    steady: int
    cadence: Cadence | None = None
    after: Ints | None = None


def checked_samples(sampled: ArrayLike, count: int) -> Tokens:
    """`sampled` as int32 [count]; ValueError for another number of them, or what is no token."""
    tokens = np.asarray(sampled)
    if tokens.shape != (count,) or (count and tokens.dtype.kind not in "iu"):
        raise ValueError(f"sampled: {count} token ids are needed, not {sampled!r}")
    own = tokens.astype(np.int32)
    if np.count_nonzero(own < 0) or (tokens.itemsize > 4 and (tokens != own).any()):
        raise ValueError(f"sampled: token ids are 0 to {MAX_TOKEN}")
    return own


def follow_parents(home: Residents, plan: StepPlan, parents: ArrayLike | None) -> None:
    """Let the beams of `plan` become what their parents are, in groups that still run."""
    lives = home.rows.serial[plan.sample_rows] == plan.sample_serials
    of = np.asarray([] if parents is None else parents)
    if of.shape != lives.shape or of.dtype.kind not in "iu":
        raise ValueError(f"parents: {len(lives)} numbers of beams are needed, not {parents!r}")
    for _, places in plan.beams:
        if not 0 <= of[places].min() <= of[places].max() < len(places):
            raise ValueError(f"parents: {of[places]} for {len(places)} beams")
    for _, places in plan.beams:
        if lives[places].all():
            rows = plan.sample_rows[places]
            rewire_beams(home, rows, rows[of[places]])


def void_from(ledger: Ledger, flights: deque[Flight], plan: StepPlan) -> None:
    """Void `plan` and what was scheduled behind it, the newest first."""
    if all(flight.plan is not plan for flight in flights):
        raise ValueError(f"plan: step {plan.step} is not in flight")
    flight = None
    while flight is None or flight.plan is not plan:
        flight = flights.pop()
        void(ledger, flight)


def void(ledger: Ledger, flight: Flight) -> None:
    """Withdraw what a plan wrote; its groups, and all that hold such a block, wait again."""
    home, plan, size = ledger.home, flight.plan, ledger.manager.block_size
    copied = [block for _, block in plan.moves if isinstance(block, int)]
    written = np.unique(np.append(plan.slot_mapping // size, copied).astype(np.int64))
    touched = np.isin(home.manager.tables.table[home.running], written).any(1)
    rows = np.append(plan.rows, home.running[touched]).tolist()
    if ledger.cache is not None:
        ledger.cache.forget(written)
    groups = [home.rows.group[row] for row in rows if row in home.rows.group]
    for group in dict.fromkeys([*groups, *flight.moved, *ledger.moved]):
        if group.state == "running":
            ledger.release(group)
        elif group.state == "swapped":
            ledger.relief.drop(ledger, group)
            ledger.turn(group, "waiting")
    ledger.moved = []
