"""Random programs over tiny pools: every request ends, nothing is lost, and the texts are those of unlimited memory.

Requests with adversarial lengths, forks, beams, priorities, deadlines, aborts and failed steps, at lag 0 and 1, under
every policy.  Each program must have preempted by recompute and by swap, or it fails for not having tested.
PAGED_KV_STEPS=200000 runs more.
"""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from toy_model import ToyModel, reference, run

from paged_kv.block_manager import BlockManager
from paged_kv.ledger import Recompute
from paged_kv.liveness import Livelock, ProgressWatch
from paged_kv.preemption import POLICIES, Costs, Preemption, last_arrived
from paged_kv.prefix_cache import PrefixCache
from paged_kv.request import NeverFits, Request
from paged_kv.scheduler import Scheduler

STEPS = int(os.environ.get("PAGED_KV_STEPS", "800"))
STEPS_A_PROGRAM = 20
picks = st.integers(0, 10**6)
TALLY: Counter[str] = Counter()


def costs(latency: float) -> Costs:
    """A swap takes as long as the replay of 2 x `latency` tokens, whatever its size."""
    return Costs(
        bytes_per_block=1, bandwidth=1e9, prefill_tokens_per_s=1.0, transfer_latency=latency, seconds_per_token=0.1
    )


class Server(RuleBasedStateMachine):
    """A scheduler with a toy model, driven step by step."""

    relief_class: type[Preemption] = Preemption

    @initialize(
        block_size=st.sampled_from([1, 2, 4, 4, 5]),
        num_blocks=st.integers(5, 12),
        host_blocks=st.sampled_from([0, 8, 20, 20]),
        policy=st.sampled_from(sorted(POLICIES)),
        latency=st.sampled_from([0.5, 1.5, 4.0]),
        budget=st.sampled_from([8, 9, 24, 64]),
        cached=st.booleans(),
        lag=st.sampled_from([0, 1]),
    )
    def start(
        self,
        block_size: int,
        num_blocks: int,
        host_blocks: int,
        policy: str,
        latency: float,
        budget: int,
        cached: bool,
        lag: int,
    ) -> None:
        self.manager = BlockManager(num_blocks, block_size, max_seqs=8, max_seq_len=96)
        self.relief = self.relief_class(self.manager, host_blocks, costs(latency), POLICIES[policy])
        self.clock = itertools.count()
        cache = PrefixCache(self.manager.pool, block_size) if cached else None
        options = {"token_budget": budget, "relief": self.relief, "clock": lambda: float(next(self.clock))}
        self.scheduler = Scheduler(self.manager, cache, **options)
        self.requests: dict[Any, Request] = {}
        self.model = ToyModel(self.scheduler, self.requests)
        self.watch, self.lag = ProgressWatch(), lag
        self.flying: list[Any] = []
        self.outputs: dict[Any, Any] = {}

    # ---- what a server does

    def take(self, outputs: list[Any]) -> None:
        for output in outputs:
            assert output.request_id not in self.outputs, "an answer twice"
            self.outputs[output.request_id] = output

    def step(self, crash: bool = False) -> None:
        """One turn of the serving loop, and everything that must hold after it."""
        waited, running = self.waiting(), self.scheduler.ledger.running_groups()
        plan = self.scheduler.schedule()
        self.no_overtaking(waited)
        assert not running or running[0].state in ("running", "finished"), "the first in order was put aside"
        if plan is not None and crash:
            for held in [*(entry[0] for entry in self.flying), plan]:
                self.model.crash(held)
            self.scheduler.fail(self.flying[0][0] if self.flying else plan)
            self.flying.clear()
            self.watch = ProgressWatch()
        elif plan is not None:
            self.flying.append((plan, *self.model.step(plan)))
        if self.flying and (len(self.flying) > self.lag or plan is None):
            self.take(self.scheduler.commit(*self.flying.pop(0)))
        self.take(self.scheduler.take_outputs())
        self.holds()
        self.watch.observe(self.scheduler)

    def waiting(self) -> dict[Any, Any]:
        return {key: group for key, group in self.scheduler.ledger.groups.items() if group.state != "running"}

    def no_overtaking(self, waited: dict[Any, Any]) -> None:
        """Who was let in stood before all who were not."""
        entered = [group.order for group in waited.values() if group.state == "running"]
        left = [group.order for group in waited.values() if group.state in ("waiting", "swapped")]
        assert not entered or not left or max(entered) < min(left), "somebody was overtaken"

    def holds(self) -> None:
        """Conservation: of requests, of blocks, of host blocks."""
        self.scheduler.check()
        self.relief.host.check()
        counts = self.scheduler.counts
        assert sum(counts.values()) == self.scheduler.ledger.submitted == len(self.requests)
        swapped = {key for key, group in self.scheduler.ledger.groups.items() if group.state == "swapped"}
        assert set(self.relief.host.parcels) == swapped, "a parcel without a swapped group, or the other way round"

    def submit(self, prompt: list[int], new: int, **options: Any) -> None:
        name = len(self.requests)
        request = Request(prompt, new, request_id=name, **options)
        before = self.scheduler.counts
        try:
            self.scheduler.submit(request)
            self.requests[name] = request
        except ValueError as error:
            TALLY["refused"] += isinstance(error, NeverFits)
            known = isinstance(error, NeverFits) or re.search("max_running|a row has", str(error))
            if not known or self.scheduler.counts != before:
                raise

    # ---- rules

    @rule(
        blocks=st.sampled_from([0, 1, 1, 2, 3, 4, 13]),
        off=st.integers(-1, 2),
        kind=st.integers(0, 2),
        new=st.integers(1, 24),
        width=st.sampled_from([1, 1, 1, 2, 3]),
        beams=st.booleans(),
        priority=st.integers(0, 2),
        deadline=st.none() | st.integers(0, 400),
        stops=st.sampled_from([(), (), (3, 7)]),
    )
    def arrive(
        self,
        blocks: int,
        off: int,
        kind: int,
        new: int,
        width: int,
        beams: bool,
        priority: int,
        deadline: int | None,
        stops: tuple[int, ...],
    ) -> None:
        """A request whose prompt ends near a block's end and may begin like another one's."""
        length = max(1, blocks * self.manager.block_size + off)
        prompt = [(i * i + kind * (i > 5)) % 11 for i in range(length)]
        group = {"beam_width": width} if beams and width > 1 else {"n": width}
        self.submit(prompt, new, priority=priority, deadline=deadline, stop_tokens=stops, **group)

    @rule(count=st.integers(3, 5), kind=st.integers(0, 2), blocks=st.integers(1, 5))
    def burst(self, count: int, kind: int, blocks: int) -> None:
        """Several short prompts with long answers: they get in together and outgrow the pool together."""
        for i in range(count):
            new = blocks * self.manager.block_size + i
            self.submit([kind, i][: 1 + i % 2], new, n=1 + (i == 2), priority=i % 2, deadline=100 * i or None)

    @rule(count=st.integers(1, 12))
    def serve(self, count: int) -> None:
        for _ in range(count):
            self.step()

    @precondition(lambda self: self.scheduler.ledger.groups)
    @rule(pick=picks)
    def abort(self, pick: int) -> None:
        names = list(self.scheduler.ledger.groups)
        self.take([self.scheduler.abort(names[pick % len(names)])])
        self.holds()

    @precondition(lambda self: self.relief.host.parcels)
    @rule()
    def abort_swapped(self) -> None:
        self.take([self.scheduler.abort(next(iter(self.relief.host.parcels)))])
        self.holds()

    @rule()
    def crash(self) -> None:
        self.step(crash=True)

    # ---- the end

    def drain(self) -> None:
        """Serve until all have ended; the bound is on steps, not on luck."""
        for _ in range(4000):
            if not self.scheduler.ledger.groups and not self.flying:
                return
            self.step()
        raise AssertionError(f"not at an end: {self.scheduler.counts}")

    def press(self, latency: float) -> None:
        """Two that fit one by one, not together: somebody has to go."""
        self.relief.costs = costs(latency)
        half = (self.manager.pool.num_blocks // 2 + 1) * self.manager.block_size
        for kind in range(2):
            self.submit([20 + kind, 3], half)
        self.drain()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.drain()
        natural = {name: self.relief.events[name] for name in ("recompute", "swap", "restore", "drop")}
        TALLY.update(natural)
        TALLY["programs"] += 1
        self.press(latency=1e9)
        self.relief.host.__init__(self.manager.pool.num_blocks)  # type: ignore[misc]
        self.press(latency=0.0)
        events = self.relief.events
        assert min(events["recompute"], events["swap"]) > 0, f"not tested: {events}"
        assert events["swap"] == events["restore"] + events["drop"]
        assert not self.relief.host.parcels
        assert self.manager.pool.num_free == self.manager.pool.num_blocks
        assert self.outputs.keys() == self.requests.keys(), "a request has no answer"
        for name, output in self.outputs.items():
            check_answer(self.requests[name], output)


def check_answer(request: Request, output: Any) -> None:
    """What came out is what unlimited memory would have given, or its beginning where the request was cut short."""
    for done, want in zip(output.completions, reference(request), strict=True):
        if done.finish_reason in ("length", "stop"):
            assert done.token_ids == want, f"{request}: {done}, not {want}"
        elif request.beam_width < 2:
            assert done.token_ids == want[: len(done.token_ids)], f"{request}: {done}, not the beginning of {want}"
        TALLY[done.finish_reason] += 1


def run_programs(machine: type[Server], steps: int) -> None:
    """Random programs of `machine`, about `steps` rules in all."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max(10, steps // STEPS_A_PROGRAM),
            stateful_step_count=STEPS_A_PROGRAM,
            deadline=None,
            derandomize=True,
            database=None,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_every_program_ends_with_the_texts_of_unlimited_memory() -> None:
    TALLY.clear()
    run_programs(Server, STEPS)
    print(dict(TALLY))
    assert min(TALLY["recompute"], TALLY["swap"]) > TALLY["programs"], "the programs hardly preempted"
    assert TALLY["drop"], "no swapped request was aborted or lost its step"
    for reason in ("length", "stop", "aborted", "out_of_blocks", "refused"):
        assert TALLY[reason], f"no request ended with {reason!r}"


# ---- broken reliefs must be found


class BytesStay(Preemption):
    """Puts a group out, and nobody copies its blocks."""

    def evict(self, ledger: Any, group: Any) -> list[Any]:
        super().evict(ledger, group)
        return []


class CacheNotTold(Preemption):
    """Overwrites blocks that the cache still finds."""

    def restore(self, ledger: Any, group: Any) -> Any:
        real, ledger.cache = ledger.cache, None
        try:
            return super().restore(ledger, group)
        finally:
            ledger.cache = real


class ParcelKept(Preemption):
    """Brings a group back and leaves its host blocks booked."""

    def restore(self, ledger: Any, group: Any) -> Any:
        real, self.host.discard = self.host.discard, lambda key: None  # type: ignore[method-assign]
        try:
            return super().restore(ledger, group)
        finally:
            self.host.discard = real  # type: ignore[method-assign]


class FirstGoes(Preemption):
    """Picks among all, the first in order too."""

    def victim(self, ledger: Any, candidates: Any) -> Any:
        return candidates[0]


class MovesGrouped(Preemption):
    """Issues the blocks of a parcel in the wrong order."""

    def restore(self, ledger: Any, group: Any) -> Any:
        moves = super().restore(ledger, group)
        if moves is None or len(moves) < 2:
            return moves
        return list(zip([source for source, _ in moves][::-1], [block for _, block in moves], strict=True))


@pytest.mark.parametrize("broken", [BytesStay, CacheNotTold, ParcelKept, FirstGoes, MovesGrouped])
def test_a_broken_relief_is_found(broken: type[Preemption]) -> None:
    class Broken(Server):
        relief_class = broken

    with pytest.raises((AssertionError, KeyError, ValueError)):
        run_programs(Broken, 600)


# ---- the watch


class NaiveRestart:
    """The biggest goes, and forgets what it has generated."""

    def victim(self, ledger: Any, candidates: Any) -> Any:
        return max(candidates, key=ledger.blocks_freed_by)

    def evict(self, ledger: Any, group: Any) -> list[Any]:
        ledger.release(group)
        for sample in group.samples:
            sample.tokens = sample.tokens[: len(group.request.tokens)]
        return []

    restore = drop = None  # never called: it suspends nobody


def two_rivals() -> list[Request]:
    return [Request([1, 2, 3, 4], 16, request_id="A"), Request([5, 6, 7, 8], 16, request_id="B")]


def scheduler_over(num_blocks: int, relief: Any = None, **options: Any) -> Scheduler:
    manager = BlockManager(num_blocks, 4, max_seqs=8, max_seq_len=64)
    return Scheduler(manager, relief=relief(manager) if relief else None, **{"token_budget": 16} | options)


def test_the_watch_names_the_cycle_of_a_broken_policy() -> None:
    scheduler = scheduler_over(6, lambda manager: NaiveRestart())
    watch = ProgressWatch()
    with pytest.raises(Livelock) as found:
        run(scheduler, two_rivals(), watch=lambda plan: watch.observe(scheduler), check=False)
    assert set(found.value.cycle) == {
        f"{name}: {what}"
        for name in "AB"
        for what in ("running -> waiting", "waiting -> running", "knows 4 tokens, knew 14")
    }


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_watch_is_silent_where_all_is_well(policy: str) -> None:
    for latency in (0.0, 1e9):
        scheduler = scheduler_over(
            6, lambda manager, latency=latency: Preemption(manager, 8, costs(latency), POLICIES[policy])
        )
        watch = ProgressWatch()
        outputs = run(
            scheduler, two_rivals(), watch=lambda plan, watch=watch, scheduler=scheduler: watch.observe(scheduler)
        )
        for request in two_rivals():
            check_answer(request, outputs[request.request_id])
            assert outputs[request.request_id].completions[0].finish_reason == "length"


def test_the_watch_finds_a_standstill() -> None:
    """Requests wait, and nobody does anything: what a scheduler may never do, done by a stand-in."""
    group = SimpleNamespace(state="waiting", live=lambda: [SimpleNamespace(index=0, tokens=np.arange(5), row=-1)])
    manager = SimpleNamespace(tables=SimpleNamespace(seq_lens=np.full(1, -1)), pool=SimpleNamespace(num_free=4))
    ledger = SimpleNamespace(groups={"A": group}, submitted=1, counts={"finished": 0})
    scheduler: Any = SimpleNamespace(
        manager=manager, ledger=ledger, home=SimpleNamespace(rows=SimpleNamespace(known=np.zeros(1)))
    )
    watch = ProgressWatch(visits=5)
    for _ in range(5):
        watch.observe(scheduler)
    with pytest.raises(Livelock, match="nothing happens any more"):
        watch.observe(scheduler)
    ledger.counts["finished"] = 1
    watch.observe(scheduler)


def test_a_long_replay_is_no_livelock() -> None:
    """A replay in many small chunks makes no progress until it passes its old mark, and no state comes twice."""
    scheduler = scheduler_over(
        12, lambda manager: Preemption(manager, 0, costs(1e9), last_arrived), token_budget=4, max_running=4
    )
    watch = ProgressWatch(visits=1)
    requests = [Request([i] * 12, 20, request_id=i) for i in range(3)]
    outputs = run(scheduler, requests, watch=lambda plan: watch.observe(scheduler))
    assert sum(output.preemptions for output in outputs.values()) >= 1
    for request in requests:
        check_answer(request, outputs[request.request_id])


# ---- bounds


def test_a13_prompts_that_never_fit_do_not_block_those_behind() -> None:
    """A13: five prompts of 1002 tokens are refused at once, with the numbers; ten of 20 tokens finish."""
    manager = BlockManager(50, 16, max_seqs=16, max_seq_len=2048)
    scheduler = Scheduler(manager, relief=Preemption(manager, 50, costs(2.0)))
    for _ in range(5):
        with pytest.raises(NeverFits) as refused:
            scheduler.submit(Request([1] * 1002, 4))
        assert (refused.value.needed, refused.value.existing) == (63, 50)
    outputs = run(scheduler, [Request([i] * 20, 4, request_id=i) for i in range(10)])
    assert len(outputs) == 10
    assert scheduler.counts["finished"] == 10


def test_a14_a_lone_sequence_that_outgrows_the_pool_ends() -> None:
    """A14: N = 2, B = 4, 8 tokens of prompt, 5 wanted: one token, sampled from the prefill, then out_of_blocks."""
    for latency in (0.0, 1e9):
        scheduler = scheduler_over(2, lambda manager, latency=latency: Preemption(manager, 8, costs(latency)))
        request = Request(range(8), 5, request_id="A")
        done = run(scheduler, [request])["A"].completions[0]
        assert (done.finish_reason, len(done.token_ids)) == ("out_of_blocks", 1)
        assert scheduler.manager.pool.num_free == 2
        assert scheduler.schedule() is None


def test_a16_a_budget_smaller_than_a_replay() -> None:
    """A16: a preempted request outgrew the budget; its replay is cut into chunks, even without chunked prefill."""
    for chunked in (True, False):
        scheduler = scheduler_over(
            8, lambda manager: Preemption(manager, 0, costs(1e9), last_arrived), token_budget=8, chunked=chunked
        )
        requests = [Request([i] * 6, 18, request_id=i) for i in range(2)]
        outputs = run(scheduler, requests)
        assert outputs[1].preemptions >= 1
        for request in requests:
            check_answer(request, outputs[request.request_id])


def test_overtaking_is_bounded_by_priority() -> None:
    """Among equals nobody is let in before an earlier one; recompute and swap keep the place in the queue."""
    for latency in (0.0, 1e9):
        scheduler = scheduler_over(
            9, lambda manager, latency=latency: Preemption(manager, 30, costs(latency)), token_budget=16
        )
        first: list[Any] = []

        def watch(plan: Any, first: list[Any] = first) -> None:
            first.extend(name for _, name, _ in plan.news.opened if name not in first)

        requests = [Request([i] * 5, 12, request_id=i, priority=i % 2) for i in range(8)]
        outputs = run(scheduler, requests, watch=watch)
        assert first == [0, 2, 4, 6, 1, 3, 5, 7]
        assert sum(output.preemptions for output in outputs.values()) >= 2


def test_the_relief_of_chapter_9_keeps_its_promises_too() -> None:
    scheduler = scheduler_over(6, lambda manager: Recompute())
    watch = ProgressWatch()
    outputs = run(scheduler, two_rivals(), watch=lambda plan: watch.observe(scheduler))
    for request in two_rivals():
        check_answer(request, outputs[request.request_id])
