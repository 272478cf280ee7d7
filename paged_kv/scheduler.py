# Exported from book/09_scheduling.py by tools/export.py; edit the chapter, not this file.
"""One decision a step: which tokens run, in which blocks, and who has to wait."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable

import numpy as np
from numpy.typing import ArrayLike

from paged_kv.admission import Admission, share_budget
from paged_kv.block_manager import BlockManager
from paged_kv.block_pool import OutOfBlocks
from paged_kv.in_flight import Flight, checked_samples, follow_parents, void_from
from paged_kv.ledger import Ledger, Recompute, Relief, check_ledger, is_ending, note_first
from paged_kv.prefix_cache import PrefixCache
from paged_kv.request import Ints, Output, Request, State, Tokens
from paged_kv.residents import Residents, branch, publish
from paged_kv.row_state import NONE
from paged_kv.sizing import at_least
from paged_kv.step_plan import Cadence, StepPlan, build_plan, next_plan
from paged_kv.turns import advance, publish_turn


class Scheduler:
    """Requests over one block manager: which tokens run next, until each request has ended.

    Args: `token_budget`, tokens a step at most; `max_running`, rows at most; `chunked`, whether
    a prompt may take several steps; `relief`, what happens when blocks run out.
    State
        ledger    Ledger: every request and where it stands.
        home      Residents: the groups that hold rows.
        flights   plans handed out and not committed, at most two.   last: the newest of all.
        steady    whether the step in the making is the last one again, a token further.
        accepted  rows and tokens of the last commit, without those that came too late.
    Source: vllm/v1/core/sched/scheduler.py, which decides request by request.
    """

    def __init__(
        self,
        manager: BlockManager,
        cache: PrefixCache | None = None,
        *,
        token_budget: int = 2048,
        max_running: int | None = None,
        chunked: bool = True,
        relief: Relief | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        most = min(at_least(1, "token_budget", token_budget), len(manager.tables.table))
        self.max_running = min(256, most) if max_running is None else max_running
        if at_least(1, "max_running", self.max_running) > most:
            raise ValueError(f"max_running = {max_running}: at most {most}, budget and rows")
        self.manager, self.cache, self.now = manager, cache, clock
        self.token_budget, self.home = token_budget, Residents(manager, cache)
        self.ledger = Ledger(self.home, relief or Recompute(), clock)
        self.door = Admission(self.ledger, token_budget, self.max_running, chunked)
        self.flights: deque[Flight] = deque()
        self.last: Flight | None = None
        self.steady = False
        self.accepted: tuple[Ints, Tokens] = (NONE, NONE.astype(np.int32))

    def submit(self, request: Request) -> Hashable:
        """Queue `request`; returns its id.

        Raises, with nothing changed: NeverFits; ValueError for an id in use, more rows or tokens
        than there can be, or a prompt above the budget without chunking.
        """
        return self.door.submit(request).id

    def schedule(self) -> StepPlan | None:
        """Decide the next step and reserve its blocks.

        Returns None where nothing can run before the next commit or submission.
        Raises: ValueError while two plans are in flight.
        """
        return decide(self)

    def commit(
        self,
        plan: StepPlan,
        sampled: ArrayLike,
        parents: ArrayLike | None = None,
        now: float | None = None,
    ) -> list[Output]:
        """Take the tokens that `plan` sampled; those of rows with another tenant are dropped.

        Args: `sampled`, ints [S]; `parents`, ints [S], for beams the beam that each comes from;
        `now`, the time if not the clock's.   Returns: the requests that have ended.
        Raises, with nothing changed: ValueError for a plan out of turn, or what is no token.
        """
        settle(self, plan, sampled, parents, now)
        return self.take_outputs()

    @property
    def counts(self) -> dict[State, int]:
        """Requests waiting, running, swapped, finished; together all that were submitted."""
        return dict(self.ledger.counts)

    def take_outputs(self) -> list[Output]:
        """The requests that have ended and were not reported yet."""
        ended, self.ledger.outputs = self.ledger.outputs, []
        return ended

    def abort(self, request_id: Hashable) -> Output | None:
        """End a request in any state; None if it has ended already."""
        return self.finish(request_id, "aborted")

    def finish(self, request_id: Hashable, reason: str) -> Output | None:
        """End a request with what it has, for a reason that the caller gives."""
        group = self.ledger.groups.get(request_id)
        if group is None:
            return None
        self.ledger.end(group, reason, self.now())
        return self.ledger.outputs.pop()

    def fail(self, plan: StepPlan) -> None:
        """`plan` did not run: it and a later one are void, and their groups wait again.

        Raises: ValueError if `plan` is not in flight.
        """
        void_from(self.ledger, self.flights, plan)

    def check(self) -> None:
        """Assert all invariants, those of the cache included.  For tests."""
        check_ledger(self.ledger)
        if self.cache is not None:
            self.cache.check()


def decide(scheduler: Scheduler) -> StepPlan | None:
    """The next plan, its blocks reserved; None where nothing can run."""
    home, ledger = scheduler.home, scheduler.ledger
    if len(scheduler.flights) > 1:
        raise ValueError("two plans are in flight: commit one first")
    batch = choose_batch(scheduler)
    if batch is None:
        return None
    tenants = len(home.running)
    children = branch(home) if home.branching else []
    if not len(batch[0]):
        if len(home.running) > tenants:
            return decide(scheduler)
        assert scheduler.flights or not ledger.groups, "nothing runs, and nothing ever will"
        return None
    scheduler.last = take_off(scheduler, batch, children)
    scheduler.flights.append(scheduler.last)
    ledger.moves, ledger.moved = [], []
    return scheduler.last.plan


def choose_batch(scheduler: Scheduler) -> tuple[Ints, Ints | int] | None:
    """Rows and tokens each, blocks reserved: first who runs, then who waits.

    None: better wait for a commit, which will bring blocks.
    """
    home, ledger, short = scheduler.home, scheduler.ledger, False
    while True:
        scheduler.steady = is_steady(scheduler)
        rows, counts, budget = share_budget(
            ledger, home.running, scheduler.token_budget, scheduler.steady
        )
        try:
            if scheduler.steady and scheduler.last is not None:
                keep_pace(scheduler, scheduler.last)
            else:
                ledger.moves += home.reserve(rows, counts)
            break
        except OutOfBlocks:
            short = True
            if not relieve(ledger, waiting=bool(scheduler.flights)):
                return None
    if not isinstance(counts, int):
        longer = rows[counts > 1]
        publish(home, longer, scheduler.manager.tables.seq_lens[longer])
    if not ledger.queue or (short and len(home.running)):
        return rows, counts
    if runs := scheduler.door.admit(budget):
        scheduler.steady = False
        each = np.array(runs, np.int64)
        counts = np.append(np.broadcast_to(counts, rows.shape), each[:, 1])
        rows = np.append(rows, each[:, 0])
    return rows, counts


def relieve(ledger: Ledger, waiting: bool) -> bool:
    """Have a group give up its blocks; False where a commit, if `waiting`, will bring some."""
    groups = ledger.running_groups()
    if waiting and (len(groups) == 1 or any(is_ending(ledger, group) for group in groups)):
        return False
    if len(groups) == 1:
        ledger.end(groups[0], "out_of_blocks", ledger.now())
        return True
    victim = ledger.relief.victim(ledger, groups)
    ledger.moves += ledger.relief.evict(ledger, victim)
    if victim.state == "swapped":
        ledger.moved.append(victim)
    assert victim.state != "running", f"{victim}: evicted, but it runs"
    return True


def is_steady(scheduler: Scheduler) -> bool:
    """Whether every running row was in the last plan and runs one token more."""
    last, tables = scheduler.last, scheduler.manager.tables
    if last is None or last.steady < 1 or last.plan.rows is not scheduler.home.running:
        return False
    return not (scheduler.ledger.beams or tables.guarded)


def keep_pace(scheduler: Scheduler, last: Flight) -> None:
    """Reserve the blocks of a steady step.  Raises OutOfBlocks, with nothing changed."""
    home, plan, beat, ends = scheduler.home, last.plan, last.cadence, last.after
    if beat is None or ends is None:
        beat, ends = Cadence(home, plan), plan.seq_lens + 1
        scheduler.last = last._replace(cadence=beat, after=ends)
    advance(home, plan.rows, ends, beat.full(plan.step))


def take_off(
    scheduler: Scheduler, batch: tuple[Ints, Ints | int], children: list[tuple[int, int]]
) -> Flight:
    """The plan of a `batch` that has its blocks; the short way where the last one goes on."""
    home, ledger, last = scheduler.home, scheduler.ledger, scheduler.last
    rows, counts, lagging = *batch, bool(scheduler.flights)
    if last is not None and scheduler.steady and not children:
        tokens = None if lagging else scheduler.accepted[1]
        return go_on(scheduler, last, tokens)
    step = 0 if last is None else last.plan.step + 1
    plan = build_plan(home, batch, children, ledger.beams, step, ledger.moves, lagging)
    steady, plain = -1, isinstance(counts, int) and not (children or ledger.beams)
    if plain and rows is home.running:
        steady = int((home.rows.limit[rows] - 1 - plan.seq_lens).min())
    return Flight(plan, ledger.moved, home.departures, steady)


def go_on(scheduler: Scheduler, last: Flight, tokens: Tokens | None) -> Flight:
    """The plan behind a steady one, whose blocks `keep_pace` has reserved."""
    home, ledger, beat, ends = scheduler.home, scheduler.ledger, last.cadence, last.after
    assert beat is not None and ends is not None
    begin = beat.full(last.plan.step).places
    plan = next_plan(home, last.plan, ends, begin, ledger.moves, tokens)
    after = ends + home.ones[: len(ends)]
    home.rows.expected[plan.rows] = after
    return Flight(plan, ledger.moved, home.departures, last.steady - 1, beat, after)


def settle(
    scheduler: Scheduler,
    plan: StepPlan,
    sampled: ArrayLike,
    parents: ArrayLike | None,
    now: float | None,
) -> None:
    """Write down what was sampled, publish blocks that are full, end what has come to its end."""
    home, flights = scheduler.home, scheduler.flights
    if not flights or flights[0].plan is not plan:
        raise ValueError(f"plan: step {plan.step} is not the oldest in flight")
    tokens = checked_samples(sampled, len(plan.sample_rows))
    if plan.beams:
        follow_parents(home, plan, parents)
    flight, rows, ends = flights.popleft(), plan.sample_rows, plan.seq_lens
    beat, after, at_hand = flight.cadence, flight.after, None
    if rows is not plan.rows:
        ends = ends[plan.sample_logits]
    if flight.departures != home.departures:  # somebody left: late tokens are dropped
        lives = home.rows.serial[rows] == plan.sample_serials
        rows, tokens, ends = rows[lives], tokens[lives], ends[lives]
    elif beat is not None and after is not None:
        at_hand = beat.starts + ends, after, beat.stops
    stopped, full = home.rows.record(rows, ends, tokens, flight.steady <= 0, at_hand)
    scheduler.accepted = rows, tokens
    if at_hand is None or beat is None:
        publish(home, rows, ends)
    else:
        publish_turn(home, beat.full(plan.step), ends)
    if scheduler.ledger.untimed or len(stopped) or len(full):
        end_some(scheduler.ledger, stopped, full, scheduler.now() if now is None else now)


def end_some(ledger: Ledger, stopped: Ints, full: Ints, now: float) -> None:
    """Note first tokens, then end the samples that said a stop token or are at their limit."""
    note_first(ledger, now)
    for rows, reason in ((stopped, "stop"), (full, "length")):
        if len(rows):
            ledger.end_rows(rows, reason, now)
