# Exported from book/labs/L6_simulate.py by tools/export.py; edit the chapter, not this file.
"""A server without a GPU: scheduler and managers as they are, under a simulated clock."""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from paged_kv.cost_model import CostModel
from paged_kv.metrics import SLO, Report
from paged_kv.request import NeverFits, Output, Request
from paged_kv.scheduler import Scheduler
from paged_kv.step_plan import Host, StepPlan
from paged_kv.traces import BLOCK_TOKENS, TraceRequest

VOCABULARY = 128_256


class Clock:
    """Simulated seconds: `simulate` sets `now`, the scheduler reads it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """The time, in s."""
        return self.now


def prompt_tokens(entry: TraceRequest, own: int) -> NDArray[np.int32]:
    """Tokens [input_length] that are equal where the trace says that prompts are.

    Args: `own`, a number that no other request of the trace has; it stands for prefix_ids
    where the trace has none.
    """
    blocks = -(-entry.input_length // BLOCK_TOKENS)
    ids = entry.prefix_ids or [(1 << 40) + (own << 12) + block for block in range(blocks)]
    starts = np.array(ids, np.uint64)[:, None] ^ np.uint64(0x9E3779B97F4A7C15)
    offsets = np.arange(BLOCK_TOKENS).astype(np.uint64) * np.uint64(0xD1B54A32D192ED03)
    mixed = (starts ^ (starts >> np.uint64(31))) * np.uint64(0x94D049BB133111EB) + offsets
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    tokens: NDArray[np.int32]
    tokens = ((mixed >> np.uint64(33)) % np.uint64(VOCABULARY)).astype(np.int32)
    return tokens.reshape(-1)[: entry.input_length]


def requests_of(trace: Iterable[TraceRequest], deadline: float | None = None) -> Iterator[Request]:
    """The requests of a trace, one by one; entries that generated nothing are left out.

    Args: `deadline`, seconds after its arrival, for each of them.
    """
    for own, entry in enumerate(trace):
        if entry.output_length:
            due = None if deadline is None else entry.arrival_s + deadline
            tokens = prompt_tokens(entry, own)
            yield Request(tokens, entry.output_length, arrival=entry.arrival_s, deadline=due)


class Meter:
    """Fills a Report; remembers a few numbers for each row and each request that lives.

    State
        last_at   float64 [max_seqs]: when the row's last token came, NaN before the first.
        reached   int64 [max_seqs]: tokens of its sample whose K/V was ever computed.
        tenant    for each row (request id, sample index), or None.
        paused    both numbers, for samples that lost their row and will have another.
        due       the deadlines of the requests that live.
        waits     gaps that are not counted yet, in a buffer; they are counted many at a time.
    """

    def __init__(self, scheduler: Scheduler, slo: SLO) -> None:
        max_seqs = len(scheduler.manager.tables.table)
        self.scheduler, self.slo, self.report = scheduler, slo, Report()
        self.last_at = np.full(max_seqs, np.nan)
        self.reached = np.zeros(max_seqs, np.int64)
        self.tenant: list[tuple[Hashable, int] | None] = [None] * max_seqs
        self.paused: dict[tuple[Hashable, int], tuple[float, int]] = {}
        self.due: dict[Hashable, float] = {}
        self.waits, self.num_waits = np.empty(16 * max_seqs + 1024), 0

    def submit(self, request: Request) -> None:
        """Hand a request over; count one that can never fit as refused."""
        self.report.submitted += 1
        try:
            request_id = self.scheduler.submit(request)
        except NeverFits:
            self.report.refused += 1
            self.report.missed += request.deadline is not None
            return
        if request.deadline is not None:
            self.due[request_id] = request.deadline

    def planned(self, plan: StepPlan) -> None:
        """Follow the rows to their tenants; count tokens that are run, and run again."""
        for row in plan.news.closed:
            tenant, self.tenant[row] = self.tenant[row], None
            if tenant is not None and tenant[0] in self.scheduler.ledger.groups:
                self.paused[tenant] = (float(self.last_at[row]), int(self.reached[row]))
        for row, request_id, index in plan.news.opened:
            self.tenant[row] = (request_id, index)
            before = self.paused.pop((request_id, index), (math.nan, 0))
            self.last_at[row], self.reached[row] = before
        rows, ends = plan.rows, plan.seq_lens
        reached, starts = self.reached[rows], ends - plan.new_tokens
        if (reached > starts).any():
            again = np.minimum(reached, ends) - starts
            self.report.recomputed += int(again[again > 0].sum())
            ends = np.maximum(reached, ends)
        self.reached[rows] = ends
        self.report.computed += plan.num_tokens

    def ran(self, plan: StepPlan, seconds: float) -> None:
        """Add up what was held while the step took `seconds`."""
        manager, report = self.scheduler.manager, self.report
        slots = int(manager.tables.num_blocks[plan.rows].sum()) * manager.block_size
        pool = manager.pool
        report.steps += 1
        report.busy += seconds
        report.rows += seconds * len(plan.rows)
        report.held += seconds * (1 - pool.num_free / pool.num_blocks)
        report.filled += seconds * int(plan.seq_lens.sum()) / max(slots, 1)

    def answered(self, now: float, outputs: Iterable[Output]) -> None:
        """Count the tokens that came, and the requests that ended with them."""
        rows = self.scheduler.accepted[0]
        start, self.num_waits = self.num_waits, self.num_waits + len(rows)
        self.waits[start : self.num_waits] = now - self.last_at[rows]
        self.last_at[rows] = now
        if self.num_waits > len(self.waits) - len(self.last_at):
            self.count_waits()
        self.report.output += len(rows)
        self.report.seconds = now
        self.ended(outputs)

    def count_waits(self) -> None:
        """Empty the buffer into the histogram."""
        waits, self.num_waits = self.waits[: self.num_waits], 0
        self.report.gaps.add(waits[waits >= 0])  # NaN, of a first token, is left out

    def ended(self, outputs: Iterable[Output]) -> None:
        """Count the requests that ended, well or not."""
        for output in outputs:
            report, key = self.report, output.request_id
            for completion in output.completions:
                report.reasons[str(completion.finish_reason)] += 1
                self.paused.pop((key, completion.index), None)
            kept = all(each.finish_reason in ("length", "stop") for each in output.completions)
            due = self.due.pop(key, math.inf)
            report.missed += output.finished_at > due or (due < math.inf and not kept)
            report.hits += output.hit_tokens
            report.preemptions += output.preemptions
            if kept and output.first_token_at is not None:
                self._finished(output, output.first_token_at)

    def _finished(self, output: Output, first: float) -> None:
        tokens = max(len(each.token_ids) for each in output.completions)
        waited, each = first - output.arrival, (output.finished_at - first) / max(tokens - 1, 1)
        self.report.first_token.add(waited)
        self.report.per_token.add(each)
        self.report.good += waited <= self.slo.first_token and each <= self.slo.per_token


def plan_seconds(cost: CostModel, plan: StepPlan, block_size: int) -> float:
    """Time of a plan: its moves, then its step, if it has any tokens."""
    host = sum(isinstance(end, Host) for move in plan.moves for end in move)
    moving = cost.move_seconds(len(plan.moves) - host, host, block_size)
    return moving + (cost.step_seconds(plan.new_tokens, plan.seq_lens) if plan.num_tokens else 0)


def simulate(
    scheduler: Scheduler,
    clock: Clock,
    arrivals: Iterable[Request],
    cost: CostModel,
    *,
    slo: SLO = SLO(),
    seed: int = 0,
    on_step: Callable[[StepPlan], None] | None = None,
) -> Report:
    """Serve `arrivals`, in order of arrival, to the last token; sampled tokens are random.

    Args: `scheduler`, built with `clock`; `on_step`, called with each plan before it is run.
    Raises: ValueError for a request without a time of arrival, out of order, or with beams;
    RuntimeError if the scheduler stops before all have ended.
    Invariant: submitted = refused + ended, and at the end no row holds a block.
    """
    meter, rng = Meter(scheduler, slo), np.random.default_rng(seed)
    coming = in_order(arrivals)
    head = next(coming, None)
    while True:
        while head is not None and head[0] <= clock.now:
            meter.submit(head[1])
            head = next(coming, None)
        plan = scheduler.schedule()
        if plan is not None:
            if on_step:
                on_step(plan)
            run_plan(plan, meter, clock, cost, rng)
        elif outputs := scheduler.take_outputs():
            meter.ended(outputs)
        elif head is not None:
            clock.now = head[0]
        else:
            return settled(meter)


def in_order(arrivals: Iterable[Request]) -> Iterator[tuple[float, Request]]:
    """Times and requests; ValueError at the first that cannot be simulated."""
    before = 0.0
    for request in arrivals:
        if request.beam_width:
            raise ValueError(f"{request.request_id}: beams choose by what a model computes")
        if request.arrival is None or not before <= request.arrival < math.inf:
            raise ValueError(f"arrival = {request.arrival}: a time of at least {before} is needed")
        before = request.arrival
        yield before, request


def run_plan(
    plan: StepPlan, meter: Meter, clock: Clock, cost: CostModel, rng: np.random.Generator
) -> None:
    """Let the time of `plan` pass, then commit random tokens."""
    scheduler = meter.scheduler
    meter.planned(plan)
    seconds = plan_seconds(cost, plan, scheduler.manager.block_size)
    meter.ran(plan, seconds)
    clock.now += seconds
    sampled = rng.integers(0, VOCABULARY, len(plan.sample_rows), np.int32)
    meter.answered(clock.now, scheduler.commit(plan, sampled, now=clock.now))


def settled(meter: Meter) -> Report:
    """The report, once it is sure that nothing was lost."""
    counts, pool = meter.scheduler.counts, meter.scheduler.manager.pool
    if counts["waiting"] or counts["running"] or counts["swapped"]:
        raise RuntimeError(f"the scheduler has nothing to do, but {counts}")
    meter.count_waits()
    ended = counts["finished"] + meter.report.refused
    assert ended == meter.report.submitted, f"{ended} ended of {meter.report.submitted}"
    assert pool.num_free == pool.num_blocks, f"{pool.num_blocks - pool.num_free} blocks leaked"
    return meter.report
