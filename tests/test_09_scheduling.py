"""Chapter 09: one decision a step.  Random programs against a model without a pool; cases A8 and A13 to A17."""

from __future__ import annotations

import random
from collections.abc import Hashable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_model import ToyModel, reference, run

from paged_kv import scheduler as scheduler_module
from paged_kv.block_manager import BlockManager
from paged_kv.block_pool import OutOfBlocks
from paged_kv.ledger import Recompute
from paged_kv.prefix_cache import PrefixCache
from paged_kv.request import Group, NeverFits, Output, Request, WaitingQueue, blocks_of_tree, hang_branches
from paged_kv.scheduler import Scheduler
from paged_kv.step_plan import StepPlan

ROWS, LONGEST, VOCAB = 8, 64, 50


def make(
    num_blocks: int, block_size: int = 4, cached: bool = False, longest: int = LONGEST, **options: Any
) -> Scheduler:
    """A scheduler over a small pool."""
    manager = BlockManager(num_blocks, block_size, ROWS, longest)
    cache = PrefixCache(manager.pool, block_size) if cached else None
    return Scheduler(manager, cache, **options)


def answer(scheduler: Scheduler, plan: StepPlan | None = None) -> list[Output]:
    """One step by a model that always says 7."""
    plan = plan or scheduler.schedule()
    assert plan is not None
    return scheduler.commit(plan, np.full(len(plan.sample_rows), 7))


@st.composite
def programs(draw: st.DrawFn) -> dict[str, Any]:
    """Requests of all kinds that share beginnings, a pool that is often too small, aborts, failures."""
    size, budget = draw(st.sampled_from([1, 2, 4, 16])), draw(st.sampled_from([8, 9, 12, 64]))
    common = draw(st.lists(st.integers(0, VOCAB - 1), min_size=30, max_size=30))
    requests = []
    for name in range(draw(st.integers(1, 8))):
        prompt = common[: draw(st.integers(1, 24))] + draw(st.lists(st.integers(0, VOCAB - 1), max_size=5))
        kind = draw(st.sampled_from(["one", "one", "samples", "beams"]))
        request = Request(
            prompt,
            draw(st.integers(1, 16)),
            request_id=name,
            priority=draw(st.sampled_from([0, 0, 1])),
            stop_tokens=tuple(draw(st.lists(st.integers(0, VOCAB - 1), max_size=2))),
            extra=draw(st.sampled_from([(), (), (("salt", "a"),)])),
            n=draw(st.integers(2, 4)) if kind == "samples" else 1,
            beam_width=draw(st.integers(2, 3)) if kind == "beams" else 0,
        )
        requests.append((draw(st.integers(0, 12)), request))
    steps = st.integers(1, 30)
    return {
        "num_blocks": draw(st.sampled_from([4, 6, 10, 40])),
        "block_size": size,
        "options": {"token_budget": budget, "chunked": draw(st.booleans())},
        "requests": requests,
        "aborts": draw(st.dictionaries(steps, st.lists(st.integers(0, 7), min_size=1, max_size=2), max_size=3)),
        "crashes": draw(st.sets(steps, max_size=2)),
    }


def feasible(program: dict[str, Any]) -> list[tuple[int, Request]]:
    """The requests that are not refused at once."""
    kept = []
    for at, request in program["requests"]:
        try:
            make(program["num_blocks"], program["block_size"], **program["options"]).submit(request)
            kept.append((at, request))
        except ValueError:
            continue
    return kept


def check_answers(requests: list[tuple[int, Request]], outputs: dict[Hashable, Output]) -> None:
    """Every text is what a model without a pool says; what was cut short is the beginning of it."""
    assert set(outputs) == {request.request_id for _, request in requests}
    for _, request in requests:
        wanted, completions = reference(request, VOCAB), outputs[request.request_id].completions
        assert [one.index for one in completions] == list(range(request.width))
        for one, want in zip(completions, wanted, strict=True):
            if one.finish_reason in ("length", "stop"):
                assert one.token_ids == want
            elif request.beam_width < 2:  # a beam may still have become another
                assert one.finish_reason in ("aborted", "out_of_blocks")
                assert one.token_ids == want[: len(one.token_ids)]


@settings(max_examples=60, deadline=None)
@given(programs(), st.booleans(), st.sampled_from([0, 1]))
def test_programs_equal_unlimited_memory(program: dict[str, Any], cached: bool, lag: int) -> None:
    scheduler = make(program["num_blocks"], program["block_size"], cached, **program["options"])
    requests = feasible(program)
    names = {request.request_id for _, request in requests}
    aborts = {step: [name for name in ids if name in names] for step, ids in program["aborts"].items()}
    outputs = run(scheduler, requests, lag, aborts, program["crashes"], VOCAB)
    check_answers(requests, outputs)


def crowd(seed: int, count: int = 10) -> list[tuple[int, Request]]:
    """Requests that a pool of 12 blocks of 4 cannot hold together."""
    rng = random.Random(seed)
    common = [rng.randrange(VOCAB) for _ in range(20)]
    requests = []
    for name in range(count):
        prompt = common[: rng.randint(4, 16)] + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 4))]
        kind = {"n": 3} if name % 4 == 1 else {"beam_width": 2} if name % 4 == 3 else {}
        new = rng.randint(4, 12)
        requests.append((rng.randint(0, 9), Request(prompt, new, request_id=name, priority=int(name % 5 == 4), **kind)))
    return requests


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("cached", [False, True])
def test_the_programs_test_something(cached: bool, lag: int) -> None:
    """Each kind of event happens, again and again; else a program shows nothing."""
    seen = dict.fromkeys(("preempted", "hits", "chunks", "copies", "forks", "lagging", "stopped short"), 0)

    def watch(plan: StepPlan) -> None:
        seen["chunks"] += int((plan.samples == 0).sum())
        seen["copies"] += len(plan.moves)
        seen["forks"] += sum(index > 0 for _, _, index in plan.news.opened)
        seen["lagging"] += int((plan.token_source >= 0).sum())

    for seed in range(12):
        requests = crowd(seed)
        outputs = run(make(12, 4, cached, token_budget=8), requests, lag, watch=watch)
        check_answers(requests, outputs)
        seen["preempted"] += sum(one.preemptions for one in outputs.values())
        seen["hits"] += sum(one.hit_tokens for one in outputs.values())
        seen["stopped short"] += sum(
            sample.finish_reason == "out_of_blocks" for one in outputs.values() for sample in one.completions
        )
    assert min(seen[name] for name in ("preempted", "chunks", "copies", "forks")) > 20, seen
    assert ((seen["hits"] > 100), (seen["lagging"] > 100)) == (cached, bool(lag)), seen


def test_outputs_do_not_depend_on_the_lag() -> None:
    for seed in range(6):
        told = []
        for lag in (0, 1):
            outputs = run(make(40, 4, True), crowd(seed), lag)
            told.append({name: one.completions for name, one in outputs.items()})
        assert told[0] == told[1]


@pytest.mark.parametrize("lag", [0, 1])
def test_nobody_overtakes(lag: int) -> None:
    """Who comes in leaves nobody waiting who is before it in (priority, arrival) order."""
    entered = 0
    for seed in range(8):
        scheduler = make(12, 4, True, token_budget=16)

        def watch(plan: StepPlan, scheduler: Scheduler = scheduler) -> None:
            nonlocal entered
            groups = scheduler.ledger.groups
            waiting = [group.order for group in groups.values() if group.state == "waiting"]
            for _, name, _ in plan.news.opened:
                entered += 1
                assert all(groups[name].order < order for order in waiting)

        run(scheduler, crowd(seed), lag, watch=watch)
    assert entered > 80


@pytest.mark.parametrize("lag", [0, 1])
def test_the_short_way_makes_the_same_plans(lag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`next_plan`, where nobody came or went, equals `build_plan` field by field."""
    plans: list[list[StepPlan]] = []
    short_ways = []
    inner = scheduler_module.next_plan
    monkeypatch.setattr(scheduler_module, "next_plan", lambda *args: short_ways.append(1) or inner(*args))
    for short in (True, False):
        if not short:
            monkeypatch.setattr(scheduler_module, "is_steady", lambda scheduler: False)
        told: list[StepPlan] = []
        for seed in range(4):
            scheduler = make(40, 4, True, token_budget=16)

            plain = [(0, Request(range(3 + name), 24, request_id=100 + name)) for name in range(5)]
            run(scheduler, [*plain, *crowd(seed)], lag, watch=told.append)
        plans.append(told)
    assert len(plans[0]) == len(plans[1])
    assert len(short_ways) > 20
    for one, other in zip(*plans, strict=True):
        for field in fields(StepPlan):
            left, right = getattr(one, field.name), getattr(other, field.name)
            if field.name == "news":
                assert (left.opened, left.closed) == (right.opened, right.closed)
                left, right = (np.array(sorted(zip(*news.table_updates, strict=True))) for news in (left, right))
            if isinstance(left, np.ndarray):
                assert np.array_equal(left, right), field.name
            elif field.name == "beams":
                assert [(name, at.tolist()) for name, at in left] == [(name, at.tolist()) for name, at in right]
            else:
                assert left == right, field.name


def test_a8_a_refused_admission_changes_nothing() -> None:
    """Case A8 (a): two idle hits and three new blocks where three are idle; a hundred tries, then it goes."""
    scheduler = make(8, 16, True, longest=100)
    text = list(range(100))
    scheduler.submit(Request(text[:33], 1, request_id="before"))
    answer(scheduler)
    scheduler.submit(Request(text[20:90], 10, request_id="R0"))
    answer(scheduler)
    scheduler.submit(Request([*text[:32], *text[60:98]], 2, request_id="R1"))
    pool, cache = scheduler.manager.pool, scheduler.cache
    assert cache is not None
    before = pool.free_ids(), pool.ref_count.tolist(), pool.epoch.tolist(), cache.stats.published
    assert len(before[0]) == 3
    for _ in range(100):
        scheduler.door.refused = (-1, 0)
        assert scheduler.door.admit(100) == []
    assert before == (pool.free_ids(), pool.ref_count.tolist(), pool.epoch.tolist(), cache.stats.published)
    scheduler.check()
    scheduler.abort("R0")
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.new_tokens.tolist() == [38]
    assert plan.seq_lens.tolist() == [70]
    assert scheduler.ledger.groups["R1"].hit_tokens == 32


def test_a8_idle_hits_are_not_counted_twice() -> None:
    """Case A8 (b): five idle blocks of which two are hits, four new ones needed: refused up front."""
    scheduler = make(8, 4, True)
    scheduler.submit(Request(range(9), 1))
    answer(scheduler)
    scheduler.submit(Request(range(30, 39), 4, request_id="R0"))
    answer(scheduler)
    assert scheduler.manager.pool.num_free == 5
    scheduler.submit(Request([*range(8), *range(40, 56)], 1, request_id="R1"))
    plan = scheduler.schedule()
    assert plan is not None
    assert len(plan.rows) == 1
    assert scheduler.counts["waiting"] == 1
    scheduler.check()


def test_a8_a_failed_decode_keeps_what_it_had() -> None:
    """Case A8 (c): four full blocks, nothing idle, one more wanted."""
    scheduler = make(4)
    scheduler.submit(Request(range(16), 5))
    answer(scheduler)
    with pytest.raises(OutOfBlocks):
        scheduler.home.reserve(scheduler.home.running, 1)
    assert scheduler.manager.tables.ids(0) == [0, 1, 2, 3]
    scheduler.check()


def test_a13_a_prompt_that_never_fits_is_refused_and_the_others_go_on() -> None:
    """Case A13: 1,002 tokens are 63 blocks of 16, of 50."""
    scheduler = Scheduler(BlockManager(50, 16, 16, 2048))
    for _ in range(5):
        with pytest.raises(NeverFits, match="63 blocks needed, 50 exist") as info:
            scheduler.submit(Request([1] * 1002, 4))
        assert (info.value.needed, info.value.existing) == (63, 50)
    requests = [Request([i] * 20, 4, request_id=i) for i in range(10)]
    assert len(run(scheduler, requests, most_steps=100)) == 10


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("cached", [False, True])
def test_a14_a_lone_sequence_that_outgrows_the_pool(cached: bool, lag: int) -> None:
    """Case A14: two blocks of four, a prompt of eight: one token, sampled from the prefill, then an honest end."""
    scheduler = make(2, 4, cached)
    request = Request(range(8), 5, request_id="A")
    output = run(scheduler, [request], lag, most_steps=20)["A"]
    assert output.completions[0].finish_reason == "out_of_blocks"
    assert output.completions[0].token_ids == reference(request)[0][:1]
    assert scheduler.manager.pool.num_free == 2
    assert scheduler.schedule() is None


def test_a15_look_up_comes_before_the_budget() -> None:
    """Case A15: ten tokens, preempted twice; two full blocks survive, then only the first."""
    scheduler = make(8, 4, True)
    request = Request(range(7), 5, request_id="A")
    scheduler.submit(request)
    model = ToyModel(scheduler, {"A": request}, VOCAB)

    def step() -> StepPlan:
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(plan, *model.step(plan))
        return plan

    for _ in range(3):
        step()
    group = scheduler.ledger.groups["A"]
    assert len(scheduler.ledger.tokens_of(group.samples[0])) == 10
    scheduler.ledger.release(group)
    plan = scheduler.schedule()
    assert plan is not None
    assert (plan.positions.tolist(), plan.seq_lens.tolist()) == ([8, 9], [10])
    blocks = scheduler.manager.tables.ids(0)
    scheduler.fail(plan)  # as good as a second preemption, and nothing of this plan may be found
    assert scheduler.cache is not None
    scheduler.cache.forget(blocks[1:2])
    plan = scheduler.schedule()
    assert plan is not None
    assert (plan.positions.tolist(), plan.seq_lens.tolist()) == (list(range(4, 10)), [10])
    scheduler.commit(plan, *model.step(plan))
    while scheduler.ledger.groups:
        plan = scheduler.schedule()
        assert plan is not None
        outputs = scheduler.commit(plan, *model.step(plan))
    assert outputs[0].completions[0].token_ids == reference(request)[0]


def test_a16_a_budget_smaller_than_a_prompt() -> None:
    """Case A16: 2,048 fits in one step, 2,049 is refused without chunking and runs as 2,048 + 1 with it."""
    manager = BlockManager(300, 16, 4, 4096)
    scheduler = Scheduler(manager, chunked=False)
    scheduler.submit(Request([1] * 2048, 1))
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.new_tokens.tolist() == [2048]
    with pytest.raises(ValueError, match="2049 tokens in one step of 2048"):
        scheduler.submit(Request([1] * 2049, 1))
    scheduler = Scheduler(BlockManager(300, 16, 4, 4096))
    scheduler.submit(Request([1] * 2049, 1))
    counts = []
    while (plan := scheduler.schedule()) is not None:
        counts += plan.new_tokens.tolist()
        answer(scheduler, plan)
    assert counts == [2048, 1]


def test_a16_a_replay_is_cut_even_without_chunking() -> None:
    """Prompt and output together may exceed a budget that the prompt alone did not."""
    scheduler = make(20, 4, token_budget=8, chunked=False)
    request = Request(range(8), 12, request_id="A")
    outputs = run(scheduler, [request], crashes={6})
    assert outputs["A"].preemptions == 1
    assert outputs["A"].completions[0].token_ids == reference(request)[0]


def test_a17_blocks_are_counted_by_kv_length() -> None:
    """Case A17: K/V lengths 3 to 8 need 0, 1, 0, 0, 0, 1 blocks; preemption at 4 and not at 3."""
    manager = BlockManager(20, 4, 8, LONGEST)
    rows = [manager.add(length) for length in range(3, 9)]
    assert [manager.blocks_needed([row]) for row in rows] == [0, 1, 0, 0, 0, 1]
    for length, preempted in ((3, 0), (4, 1)):
        scheduler = make(2)
        for name in "AB":
            scheduler.submit(Request(range(length), 4, request_id=name))
        answer(scheduler)
        plan = scheduler.schedule()
        assert plan is not None
        assert len(plan.rows) == 2 - preempted
        assert scheduler.ledger.groups["B"].preemptions == preempted
        assert scheduler.ledger.groups["A"].preemptions == 0


@pytest.mark.parametrize("lag", [0, 1])
def test_abort_in_any_state(lag: int) -> None:
    scheduler = make(6, 4, True, token_budget=8)
    for name, prompt, n in (("runs", 5, 1), ("forks", 3, 3), ("prefills", 12, 1), ("waits", 20, 1)):
        scheduler.submit(Request(range(prompt), 8, request_id=name, n=n))
    flying = [scheduler.schedule()]
    if lag:
        flying.append(scheduler.schedule())
    for name in ("waits", "forks", "runs", "prefills"):
        output = scheduler.abort(name)
        assert output is not None
        assert {one.finish_reason for one in output.completions} == {"aborted"}
        assert scheduler.abort(name) is None
        scheduler.check()
    assert scheduler.manager.pool.num_free == 6
    assert scheduler.abort("never heard of") is None
    scheduler.submit(Request(range(5), 1, request_id="next"))
    for plan in filter(None, flying):
        assert answer(scheduler, plan) == []
        assert len(scheduler.accepted[0]) == 0
    while scheduler.ledger.groups:
        outputs = answer(scheduler)
    assert outputs[0].request_id == "next"
    assert scheduler.counts["finished"] == 5


def test_a_late_token_does_not_reach_the_next_tenant() -> None:
    """The row is taken over while the token of the one before is still in flight."""
    scheduler = make(4)
    scheduler.submit(Request([1, 2], 8, request_id="A"))
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert first is not None
    assert second is not None
    assert second.token_ids.tolist() == [-1]
    scheduler.commit(first, [10])
    scheduler.abort("A")
    scheduler.submit(Request([3, 4], 2, request_id="B"))
    third = scheduler.schedule()
    assert third is not None
    assert third.rows.tolist() == second.rows.tolist() == [0]
    scheduler.commit(second, [11])
    scheduler.commit(third, [12])
    fourth = scheduler.schedule()
    assert fourth is not None
    assert scheduler.commit(fourth, [13])[0].completions[0].token_ids == [12, 13]


def test_stop_tokens_end_a_sample_and_only_it() -> None:
    scheduler = make(20, 4)
    scheduler.submit(Request([1, 2, 3], 5, request_id="A", stop_tokens=(30, 31, 32), n=2))
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.samples.tolist() == [2]
    assert plan.sample_rows.tolist() == [0, 1]
    assert scheduler.commit(plan, [5, 31]) == []
    while scheduler.ledger.groups:
        (*_, output) = [None, *answer(scheduler)]
    assert output is not None
    assert [(one.token_ids, one.finish_reason) for one in output.completions] == [
        ([5, 7, 7, 7, 7], "length"),
        ([31], "stop"),
    ]
    scheduler.submit(Request([1], 2, request_id="B", stop_tokens=(7,)))
    assert answer(scheduler)[0].completions[0].finish_reason == "stop"


def test_a_group_is_prefilled_once_and_copies_only_its_tail() -> None:
    scheduler = make(20, 4)
    request = Request(range(6), 3, request_id="A", n=4)
    run_tokens, moves = [], 0

    def watch(plan: StepPlan) -> None:
        nonlocal moves
        run_tokens.append(plan.num_tokens)
        moves += len(plan.moves)

    outputs = run(scheduler, [request], watch=watch)
    assert run_tokens == [6, 4, 4]
    assert moves == 3
    assert [one.token_ids for one in outputs["A"].completions] == reference(request)


def test_a_group_comes_back_as_a_tree() -> None:
    """Four texts that part after 8 and 9 of 10 tokens: 4 blocks shared or own, not 4 x 3."""
    request = Request(range(6), 8, n=4)
    group = Group("A", request, 0, 0.0)
    for sample, tail in zip(group.samples, ([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 9, 9], [8, 8, 8, 8]), strict=True):
        sample.tokens = np.array([*range(6), *tail], np.int32)
    hang_branches(group)
    assert [(sample.parent, sample.at) for sample in group.samples] == [(-1, 0), (0, 9), (0, 8), (0, 6)]
    assert blocks_of_tree(group, 4) == 3 + 1 + 1 + 2
    same = Group("B", request, 1, 0.0)
    assert [(sample.parent, sample.at) for sample in same.samples] == [(-1, 0)] + [(0, 6)] * 3
    assert blocks_of_tree(same, 4) == 2 + 1 + 1 + 1


def test_beams_run_in_step_and_never_ahead() -> None:
    scheduler = make(20, 4)
    scheduler.submit(Request(range(5), 4, request_id="A", beam_width=2))
    first = scheduler.schedule()
    assert first is not None
    assert first.beams[0][0] == "A"
    assert first.beams[0][1].tolist() == [0, 1]
    assert scheduler.schedule() is None  # nothing may run before the parents are known
    with pytest.raises(ValueError, match="parents"):
        scheduler.commit(first, [5, 6])
    with pytest.raises(ValueError, match="parents"):
        scheduler.commit(first, [5, 6], [0, 2])
    assert scheduler.flights[0].plan is first
    scheduler.commit(first, [5, 6], [1, 1])
    assert scheduler.finish("A", "stop") is not None
    assert scheduler.manager.pool.num_free == 20


def test_a_failed_step_leaves_no_trace() -> None:
    """What it published is withdrawn, and the groups stand where they were, tokens kept."""
    scheduler = make(10, 4, True)
    scheduler.submit(Request(range(9), 4, request_id="A"))
    plan = scheduler.schedule()
    assert plan is not None
    assert scheduler.cache is not None
    assert scheduler.cache.stats.findable == 2
    scheduler.fail(plan)
    scheduler.check()
    assert scheduler.cache.stats.findable == 0
    assert scheduler.manager.pool.num_free == 10
    assert scheduler.counts["waiting"] == 1
    with pytest.raises(ValueError, match="not in flight"):
        scheduler.fail(plan)
    with pytest.raises(ValueError, match="not the oldest in flight"):
        scheduler.commit(plan, [1])
    again = scheduler.schedule()
    assert again is not None
    assert again.new_tokens.tolist() == [9]


def test_a_reset_cache_is_not_filled_with_old_kv() -> None:
    """New weights: what was computed before must not be published after."""
    scheduler = make(10, 4, True)
    scheduler.submit(Request(range(6), 9, request_id="A"))
    answer(scheduler)
    assert scheduler.cache is not None
    scheduler.cache.reset()
    for _ in range(6):
        answer(scheduler)
    assert scheduler.cache.stats.findable == 0
    scheduler.submit(Request(range(10, 16), 1, request_id="B"))
    answer(scheduler)
    assert scheduler.cache.stats.findable == 1
    scheduler.check()


def test_a_number_given_by_the_scheduler_is_one_that_nobody_uses() -> None:
    scheduler = make(4, token_budget=4)
    names = [scheduler.submit(Request([1], 1, request_id=name)) for name in (None, 1, None, 5, None, None, None)]
    assert len(set(names)) == len(names)
    assert (names[1], names[3]) == (1, 5)


def test_bad_requests_and_calls_are_refused() -> None:
    for bad in (
        {"prompt": []},
        {"prompt": [1.5]},
        {"prompt": [True]},
        {"prompt": [-1]},
        {"prompt": [2**31]},
        {"max_new_tokens": 0},
        {"max_new_tokens": 1.0},
        {"stop_tokens": (-1,)},
        {"stop_tokens": 5},
        {"deadline": "soon"},
        {"deadline": True},
        {"n": 0},
        {"n": True},
        {"n": 2, "beam_width": 2},
        {"priority": 0.5},
        {"arrival": float("nan")},
    ):
        with pytest.raises(ValueError, match=next(iter(bad))):
            Request(**{"prompt": [1], "max_new_tokens": 1, **bad})
    once = Request((n for n in (1, 2)), 1, stop_tokens=(n for n in (7, 8)))  # type: ignore[arg-type]
    assert (once.tokens.tolist(), once.stop_tokens) == ([1, 2], (7, 8))
    scheduler = make(4, token_budget=4)
    scheduler.submit(Request([1], 2, request_id="A"))
    for request, words in (
        (Request([1], 1, request_id="A"), "still in use"),
        (Request([1], 1, n=5), "max_running"),
        (Request([1] * 40, 26), "a row has 64"),
    ):
        with pytest.raises(ValueError, match=words):
            scheduler.submit(request)
    with pytest.raises(ValueError, match="max_running"):
        make(4, token_budget=4, max_running=5)
    plan = scheduler.schedule()
    assert plan is not None
    for sampled in ([], [1, 2], [-1], [1.5], [2**31], [True]):
        with pytest.raises(ValueError, match="sampled"):
            scheduler.commit(plan, sampled)
    second = scheduler.schedule()
    assert second is not None
    with pytest.raises(ValueError, match="two plans"):
        scheduler.schedule()
    with pytest.raises(ValueError, match="oldest"):
        scheduler.commit(second, [1])
    assert scheduler.counts == {"waiting": 0, "running": 1, "swapped": 0, "finished": 0}


def test_broken_invariants_are_seen() -> None:
    def broken(harm: Any, words: str) -> None:
        scheduler = make(10, 4, True)
        scheduler.submit(Request(range(6), 4, n=2))
        scheduler.submit(Request(range(6), 4, priority=3))
        answer(scheduler)
        scheduler.check()
        harm(scheduler)
        with pytest.raises(AssertionError, match=words):
            scheduler.check()

    broken(lambda one: one.ledger.counts.update(finished=1), "I5")
    broken(lambda one: one.ledger.counts.update(running=1, waiting=1), "running")
    broken(lambda one: one.manager.add(3), "without a tenant")
    broken(lambda one: one.home.rows.expected.__iadd__(5), "samples in flight")
    broken(lambda one: one.manager.tables.seq_lens.__setitem__(0, 8), "not known")
    broken(lambda one: setattr(one.home, "reserved", 9), "reserved")


def test_a_careless_relief_is_found_out() -> None:
    """A relief that evicts nobody is an error at once, not an endless loop."""

    class Idle(Recompute):
        def evict(self, ledger: Any, group: Group) -> list[Any]:
            return []

    scheduler = make(2, relief=Idle())
    for name in "AB":
        scheduler.submit(Request(range(4), 4, request_id=name))
    answer(scheduler)
    with pytest.raises(AssertionError, match="evicted, but it runs"):
        scheduler.schedule()


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=60))
def test_the_queue_keeps_its_order(program: list[tuple[int, bool]]) -> None:
    queue, alive = WaitingQueue(), list[Group]()
    for serial, (priority, leave) in enumerate(program):
        group = Group(serial, Request([1], 1, priority=priority), serial, 0.0)
        queue.push(group)
        alive.append(group)
        if leave:
            gone = alive.pop(serial % len(alive))
            queue.remove(gone)
            if serial % 3 == 0:  # preempted again
                queue.push(gone)
                alive.append(gone)
        assert len(queue) == len(alive)
        assert len(queue._heap) <= 2 * len(alive) + 9
        assert queue.head() is min(alive, key=lambda one: one.order, default=None)


def test_memory_does_not_grow_with_the_requests_served() -> None:
    scheduler = make(40, 4, True)
    for name in range(600):
        scheduler.submit(Request([name % 7, 1, 2, 3, 4], 2, request_id=name))
        if name % 3 == 0:
            scheduler.abort(name)
        if name % 6 == 5:
            while scheduler.ledger.groups:
                answer(scheduler)
    home, ledger = scheduler.home, scheduler.ledger
    assert scheduler.counts["finished"] == 600
    left = (ledger.groups, ledger.untimed, ledger.beams, home.branching, home.above, home.opened, home.whole)
    assert not any(left)
    assert len(ledger.queue._heap) < 10
    assert len(home.closed) <= ROWS
    assert not home.rows.group
    assert not home.rows.sample


def test_times_and_counts_are_told() -> None:
    now = iter(range(100))
    scheduler = make(20, 4, True, clock=lambda: float(next(now)))
    scheduler.submit(Request(range(6), 2, request_id="A", arrival=-3.5))
    scheduler.submit(Request(range(6), 1, request_id="B"))
    outputs = {one.request_id: one for _ in range(2) for one in answer(scheduler)}
    assert outputs["A"].arrival == -3.5
    assert outputs["B"].arrival == 0.0
    assert outputs["A"].first_token_at == outputs["B"].first_token_at == outputs["B"].finished_at
    assert outputs["A"].finished_at > outputs["B"].finished_at
    assert (outputs["A"].hit_tokens, outputs["B"].hit_tokens) == (0, 4)  # found in the same step
