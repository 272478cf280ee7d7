"""Chapter 10: moves in order, the host pool, prices, coming back; the real model in a pool that is far too small."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from toy_model import ToyModel, reference, run  # noqa: E402

from paged_kv.block_manager import BlockManager  # noqa: E402
from paged_kv.block_pool import OutOfBlocks  # noqa: E402
from paged_kv.copy_on_write import blocks_held, fork_many, make_writable  # noqa: E402
from paged_kv.host_pool import HostPool, blocks_to_return, distinct_blocks, run_moves, unpack  # noqa: E402
from paged_kv.kv_store import KVStore  # noqa: E402
from paged_kv.preemption import POLICIES, Candidate, Costs, Preemption, cheapest, last_arrived  # noqa: E402
from paged_kv.prefix_cache import PrefixCache  # noqa: E402
from paged_kv.request import Group, Request, blocks_of_tree, hang_branches  # noqa: E402
from paged_kv.residents import Saved  # noqa: E402
from paged_kv.scheduler import Scheduler  # noqa: E402
from paged_kv.sizing import KVSpec  # noqa: E402
from paged_kv.step_plan import Host  # noqa: E402

SPEC = KVSpec(num_layers=2, num_kv_heads=1, head_size=4, dtype="fp32")
SWAP = Costs(1, 1e9, 1.0)  # moving is free
REPLAY = Costs(1, 1e9, 1.0, transfer_latency=1e9)  # moving takes for ever


def random_store(num_blocks: int, seed: int) -> KVStore:
    """Any bytes at all, NaNs with payloads among them."""
    store, bits = KVStore(SPEC, num_blocks, 4), torch.Generator().manual_seed(seed)
    for tensor in store.tensors:
        tensor.view(torch.int32).copy_(
            torch.randint(-(2**31), 2**31 - 1, tensor.shape, generator=bits, dtype=torch.int32)
        )
    return store


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


# ---------------------------------------------------------------- moves (A11)

ends = st.integers(0, 9) | st.integers(0, 7).map(Host)


def check_program(program: list[Any], seed: int = 0) -> None:
    stores = random_store(10, seed), random_store(8, seed + 1)
    want = [[tensor.clone() for tensor in store.tensors] for store in stores]
    for source, destination in program:
        for layer in range(2):
            data = want[isinstance(source, Host)][layer][getattr(source, "index", source)].clone()
            want[isinstance(destination, Host)][layer][getattr(destination, "index", destination)] = data
    run_moves(program, *stores)
    for store, tensors in zip(stores, want, strict=True):
        assert all(map(same_bits, store.tensors, tensors))


def test_a11_moves_of_one_step_run_as_if_one_by_one() -> None:
    """A11: the program of the report; grouping it by kind would give block 4 somebody else's bytes."""
    check_program([(5, Host(2)), (Host(7), 5), (5, 9), (Host(2), 4), (6, Host(2))])
    check_program([])
    check_program([(1, Host(0)), (Host(0), 2), (Host(0), 1)])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(ends, ends), min_size=1, max_size=50), st.integers(0, 99))
def test_a11_random_programs(program: list[Any], seed: int) -> None:
    """A11: programs of 1 to 50 operations over both pools, equal to the bit."""
    check_program(program, seed)


@pytest.mark.parametrize("bad", [(10, Host(0)), (Host(8), 0), (0, Host(-1)), (-1, 3)])
def test_a_move_to_nowhere_changes_nothing(bad: Any) -> None:
    stores = random_store(10, 0), random_store(8, 1)
    before = [tensor.clone() for store in stores for tensor in store.tensors]
    with pytest.raises(ValueError, match="moves"):
        run_moves([(0, 1), bad], *stores)
    assert all(map(same_bits, before, [tensor for store in stores for tensor in store.tensors]))


# ---------------------------------------------------------------- the host pool


def forked(num_blocks: int = 10) -> tuple[BlockManager, list[int], list[Saved]]:
    """Three rows of one prompt, each with a tail of its own."""
    manager = BlockManager(num_blocks, 4, max_seqs=6, max_seq_len=40)
    rows = [manager.add(10)]
    rows += fork_many(manager, rows * 2)
    make_writable(manager, rows)
    manager.append(rows)
    return manager, rows, [Saved(i, 11, manager.tables.ids(row)) for i, row in enumerate(rows)]


def test_a_parcel_has_one_host_block_for_each_distinct_block() -> None:
    manager, rows, saved = forked()
    host = HostPool(6)
    moves = host.put("A", saved)
    assert (
        [source for source, _ in moves]
        == distinct_blocks(saved)
        == [*dict.fromkeys(b for one in saved for b in one.ids)]
    )
    assert len(moves) == 5 == len(blocks_held(manager, rows))
    assert host.num_free == 1
    host.check()
    assert host.snapshot(4)["ref_counts"] == [3, 3, 1, 1, 1, 0]
    assert "A:[0, 1, 2, 3, 4]" in repr(host)
    for key, error in (("A", ValueError), ("B", OutOfBlocks)):
        with pytest.raises(error):
            host.put(key, saved)
        assert host.num_free == 1
        assert list(host.parcels) == ["A"]
    host.discard("A")
    assert host.num_free == 6
    with pytest.raises(ValueError, match="no parcel"):
        host.discard("A")
    host.check()


def test_the_limit_of_the_host_pool() -> None:
    with pytest.raises(ValueError, match="num_blocks"):
        HostPool(-1)
    with pytest.raises(OutOfBlocks):
        HostPool(0).put("A", [Saved(0, 1, [0])])
    HostPool(0).check()


def test_unpacked_rows_share_as_before() -> None:
    manager, rows, saved = forked()
    host = HostPool(6)
    host.put("A", saved)
    for row in rows[::-1]:
        manager.pool.release(manager.tables.detach(row)[::-1])
    other = manager.add(4)
    back, moves = unpack(manager, host.parcels["A"])
    manager.check()
    assert len(moves) == 5
    assert manager.tables.seq_lens[back].tolist() == [11, 11, 11]
    tables = np.array([manager.tables.ids(row) for row in back])
    assert (tables[:, :2] == tables[0, :2]).all()
    assert len(set(tables[:, 2].tolist())) == 3
    with pytest.raises(ValueError, match="rows"):
        unpack(manager, [Saved(0, 1, [0])] * 9)
    free = manager.pool.num_free
    with pytest.raises(OutOfBlocks):
        unpack(manager, [Saved(0, 40, list(range(10)))])
    assert manager.pool.num_free == free
    manager.finish(other)
    manager.check()


def test_blocks_to_return_counts_growth_and_copies() -> None:
    """What `make_writable` and `append` will take is what was counted, for rows that share a partly filled tail."""
    manager = BlockManager(30, 4, max_seqs=6, max_seq_len=40)
    rows = [manager.add(6)]
    rows += fork_many(manager, rows * 2)
    saved = [Saved(i, 6, manager.tables.ids(row)) for i, row in enumerate(rows)]
    for more in (1, 2, 3, 7):
        other = BlockManager(30, 4, max_seqs=6, max_seq_len=40)
        back, _ = unpack(other, saved)
        make_writable(other, back, more)
        other.append(back, more)
        assert 30 - other.pool.num_free == blocks_to_return(saved, [6 + more] * 3, 4)
    assert blocks_to_return([Saved(0, 8, [0, 1])], [9], 4) == 3


# ---------------------------------------------------------------- going and coming back


def served(
    num_blocks: int, costs: Costs, requests: list[Request], host_blocks: int = 20, cached: bool = False, **options: Any
) -> Any:
    manager = BlockManager(num_blocks, 4, max_seqs=8, max_seq_len=64)
    relief = Preemption(manager, host_blocks, costs, last_arrived)
    cache = PrefixCache(manager.pool, 4) if cached else None
    scheduler = Scheduler(manager, cache, **{"relief": relief, "token_budget": 64} | options)
    model = ToyModel(scheduler, {request.request_id: request for request in requests})
    for request in requests:
        scheduler.submit(request)
    return scheduler, model, relief


def turn(scheduler: Scheduler, model: ToyModel) -> Any:
    plan = scheduler.schedule()
    if plan is not None:
        scheduler.commit(plan, *model.step(plan))
    return plan


def test_a12_a_swapped_sequence_needs_its_next_token_too() -> None:
    """A12: 8 tokens, two full blocks: later with 2 free, accepted with 3, never with 2 in all; the bytes come back."""
    scheduler, model, relief = served(6, SWAP, [Request(range(8), 9, request_id="A")])
    turn(scheduler, model)
    ledger, group = scheduler.ledger, scheduler.ledger.groups["A"]
    kept = [model.block(block).copy() for block in scheduler.manager.tables.ids(0)]
    scheduler.ledger.moves += relief.evict(ledger, group)
    assert group.state == "swapped"
    assert relief.host.num_free == 18
    assert scheduler.manager.pool.num_free == 6
    others = scheduler.manager.pool.take(4)
    assert relief.restore(ledger, group) is None
    assert group.state == "swapped"
    assert scheduler.manager.pool.num_free == 2
    assert relief.host.num_free == 18
    scheduler.manager.pool.release(others[:1])
    plan = scheduler.schedule()
    assert plan.new_tokens.tolist() == [1]
    assert plan.seq_lens.tolist() == [9]
    assert len(plan.moves) == 4
    scheduler.commit(plan, *model.step(plan))
    for before, block in zip(kept, scheduler.manager.tables.ids(0), strict=False):
        assert (model.block(block) == before).all()
    scheduler.manager.pool.release(others[1:])
    while turn(scheduler, model):
        scheduler.check()

    scheduler, model, relief = served(2, SWAP, [Request(range(8), 9, request_id="A")])
    turn(scheduler, model)
    relief.evict(scheduler.ledger, scheduler.ledger.groups["A"])
    assert scheduler.schedule() is None
    (output,) = scheduler.take_outputs()
    assert output.completions[0].finish_reason == "out_of_blocks"
    assert len(output.completions[0].token_ids) == 1
    assert relief.host.num_free == 20
    assert scheduler.manager.pool.num_free == 2
    assert relief.events["drop"] == 1


def test_a12_the_round_trip_is_bit_identical() -> None:
    """A12: device -> host -> other device blocks, NaN payloads included."""
    store, host_store, host = random_store(8, 0), random_store(6, 1), HostPool(6)
    manager = BlockManager(8, 4, max_seqs=2, max_seq_len=32)
    row = manager.add(10)
    ids = manager.tables.ids(row)
    kept = [tensor[ids].clone() for tensor in store.tensors]
    run_moves(host.put("A", [Saved(0, 10, ids)]), store, host_store)
    manager.finish(row)
    for tensor in store.tensors:
        tensor.zero_()
    manager.add(4)
    (row,), moves = unpack(manager, host.parcels["A"])
    run_moves(moves, store, host_store)
    assert manager.tables.ids(row) != ids
    assert all(same_bits(tensor[manager.tables.ids(row)], old) for tensor, old in zip(store.tensors, kept, strict=True))


@pytest.mark.parametrize(("lost", "times"), [(0, 1), (0, 2), (1, 1)])
def test_a15_what_is_left_in_the_cache_is_hit_again(lost: int, times: int) -> None:
    """A15: 10 tokens, put aside; hits 8 and runs 2; also twice; with only the first block left hits 4 and runs 6."""
    request = Request(range(1, 10), 9, request_id="A")
    scheduler, model, relief = served(8, REPLAY, [request], cached=True)
    turn(scheduler, model)
    group = scheduler.ledger.groups["A"]
    for known in range(10, 10 + times):
        assert scheduler.home.rows.known[scheduler.ledger.rows_of(group)].tolist() == [known]
        relief.evict(scheduler.ledger, group)
        if lost:  # of the queue, all are taken but the group's first block, which was given back last
            pool = scheduler.manager.pool
            taken = pool.take(7)
            scheduler.cache.forget(taken)
            pool.release(taken)
        plan = scheduler.schedule()
        assert plan.positions.tolist() == list(range(4 if lost else 8, known))
        assert plan.seq_lens.tolist() == [known]
        scheduler.commit(plan, *model.step(plan))
    outputs = []
    while (plan := scheduler.schedule()) is not None:
        outputs += scheduler.commit(plan, *model.step(plan))
    assert outputs[0].completions[0].token_ids == reference(request)[0]
    assert relief.events["recompute"] == outputs[0].preemptions == times


def test_a17_relief_is_called_at_block_boundaries_and_not_before() -> None:
    """A17: at KV length 4 with nothing free somebody has to go in this step; at 3 nobody."""
    for length, preempted in ((3, 0), (4, 1)):
        requests = [Request([7] * length, 9, request_id=0), Request([8] * length, 9, request_id=1)]
        scheduler, model, relief = served(2, REPLAY, requests)
        turn(scheduler, model)
        assert scheduler.manager.pool.num_free == 0
        plan = scheduler.schedule()
        assert relief.events["recompute"] == preempted
        assert len(plan.rows) == 2 - preempted


def test_a10_what_a_group_frees() -> None:
    """A10: 12 tokens of prompt, 4 samples with one token each: 7 blocks are freed, not the 16 that its tables name."""
    scheduler, model, relief = served(20, SWAP, [Request(range(12), 5, request_id="A", n=4)])
    for _ in range(2):
        turn(scheduler, model)
    group = scheduler.ledger.groups["A"]
    price = relief.price(scheduler.ledger, group)
    assert (price.frees, price.moves) == (7, 7)
    assert price.method == "swap"
    moves = relief.evict(scheduler.ledger, group)
    scheduler.ledger.moves += moves
    assert len(moves) == 7
    assert scheduler.manager.pool.num_free == 20
    assert [len(one.ids) for one in relief.host.parcels["A"]] == [4] * 4
    while turn(scheduler, model):
        scheduler.check()
    assert relief.events["restore"] == 1


# ---------------------------------------------------------------- prices


def test_seconds_of_both_ways() -> None:
    costs = Costs(5 * 2**20, 25e9, 8000.0)
    assert f"{1e3 * costs.swap_seconds(256) / 2:.1f}" == "53.7"
    assert costs.replay_seconds(800) == 0.1
    assert costs.source == "assumed"
    square = Costs(1, 1.0, math.ldexp(1, 40), seconds_per_pair=1.0)
    assert math.isclose(square.replay_seconds(3, context=10), 30 + 6, rel_tol=1e-9)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bytes_per_block", 0),
        ("bytes_per_block", 1.5),
        ("bandwidth", 0.0),
        ("bandwidth", math.nan),
        ("bandwidth", math.inf),
        ("prefill_tokens_per_s", -1.0),
        ("transfer_latency", -1.0),
        ("seconds_per_pair", math.nan),
        ("seconds_per_token", math.inf),
    ],
)
def test_costs_that_cannot_be(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        Costs(**{"bytes_per_block": 1, "bandwidth": 1.0, "prefill_tokens_per_s": 1.0, name: value})


def test_the_price_is_what_preempting_changes() -> None:
    """125 blocks shared through the cache and 10 own: frees 10, replays 160 tokens, a swap moves 135."""
    manager = BlockManager(300, 16, max_seqs=4, max_seq_len=4096)
    relief = Preemption(manager, 300, Costs(5 * 2**20, 25e9, 8000.0))
    scheduler = Scheduler(manager, PrefixCache(manager.pool, 16), relief=relief, token_budget=4096)
    prompt = np.arange(2160) % 1000
    requests = [Request(prompt[:2000], 50, request_id="first"), Request(prompt, 50, request_id="second")]
    model = ToyModel(scheduler, {request.request_id: request for request in requests})
    for request in requests:
        scheduler.submit(request)
        turn(scheduler, model)
    first, second = (relief.price(scheduler.ledger, scheduler.ledger.groups[name]) for name in ("first", "second"))
    assert (second.frees, second.moves, second.replay, second.method) == (10, 135, 160, "recompute")
    assert second.seconds == 160 / 8000
    assert second.left == 49
    assert first.frees == 1, "its tail alone: the rest is held by the other"
    assert (isinstance(first, Candidate) and cheapest(second) < cheapest(first)) or second.seconds > first.seconds


def three_running(
    deadlines: tuple[float | None, ...] = (None, None, None),
    priorities: tuple[int, ...] = (0, 0, 0),
) -> Any:
    """Three chats that hold 1, 4 and 2 blocks and have 20, 2 and 20 tokens to go."""
    shapes = ((3, 21), (14, 3), (6, 21))
    requests = [
        Request([i] * length, new, request_id="ABC"[i], deadline=deadlines[i], priority=priorities[i])
        for i, (length, new) in enumerate(shapes)
    ]
    scheduler, model, relief = served(40, REPLAY, requests, clock=lambda: 0.0)
    turn(scheduler, model)
    return scheduler, relief


def pick(policy: str, **options: Any) -> Any:
    scheduler, relief = three_running(**options)
    relief.policy = POLICIES[policy]
    groups = scheduler.ledger.running_groups()
    return relief.victim(scheduler.ledger, groups).id


def test_each_policy_picks_its_victim() -> None:
    assert pick("last_arrived") == "C"
    assert pick("last_arrived", priorities=(2, 0, 1)) == "C", "B is first in order; A, C remain, C came last"
    assert pick("lowest_priority", priorities=(2, 0, 1)) == "A"
    assert pick("lowest_priority") == "C"
    # B would replay 14 tokens for 4 blocks over 2 steps, C 6 tokens for 2 blocks over 20 steps
    assert pick("cheapest") == "C"
    assert pick("most_slack", deadlines=(None, 900.0, 100.0)) == "B"
    assert pick("most_slack", deadlines=(None, 900.0, 1.0)) == "C", "its deadline is lost already"
    assert pick("cost_x_slack", deadlines=(None, 900.0, None)) == "C"


def test_the_first_in_order_is_never_the_victim() -> None:
    for policy in POLICIES:
        for priorities in ((0, 0, 0), (2, 1, 0), (1, 0, 2)):
            first = min(range(3), key=lambda i, p=priorities: (p[i], i))
            assert pick(policy, priorities=priorities) != "ABC"[first]


def test_progress_counts() -> None:
    """One token before its end a chat is a bad victim, though it holds as much as another."""
    requests = [Request([i] * 8, new, request_id=i) for i, new in enumerate((30, 2, 30))]
    scheduler, model, relief = served(40, REPLAY, requests)
    turn(scheduler, model)
    relief.policy = cheapest
    groups = [scheduler.ledger.groups[i] for i in (0, 2, 1)]
    assert relief.victim(scheduler.ledger, groups).id == 2
    assert relief.price(scheduler.ledger, groups[2]).left == 1


def test_a_full_host_pool_means_recompute() -> None:
    scheduler, model, relief = served(20, SWAP, [Request([1] * 9, 9, request_id="A")], host_blocks=2)
    turn(scheduler, model)
    group = scheduler.ledger.groups["A"]
    assert relief.price(scheduler.ledger, group).method == "recompute"
    assert relief.evict(scheduler.ledger, group) == []
    assert group.state == "waiting"


# ---------------------------------------------------------------- groups


def test_a_group_is_replayed_as_a_trie() -> None:
    """4 beams over 500 + 300 tokens, different in the last 20: 56 blocks, not 107 of replays behind the prompt."""
    manager = BlockManager(120, 16, max_seqs=4, max_seq_len=1024)
    beams = [manager.add(780)]
    beams += fork_many(manager, beams * 3)
    make_writable(manager, beams, 20)
    manager.append(beams, 20)
    assert len(blocks_held(manager, beams)) == 56
    rng = np.random.default_rng(0)
    common = rng.integers(0, 1000, 780).astype(np.int32)
    group = Group("A", Request(common[:500], 400, beam_width=4), 0, 0.0)
    for i, sample in enumerate(group.samples):
        sample.tokens = np.append(common, [i, *range(19)]).astype(np.int32)
    hang_branches(group)
    assert blocks_of_tree(group, 16) == 56
    for sample in group.samples[1:]:
        sample.at = 500
    assert blocks_of_tree(group, 16) == 107


@pytest.mark.parametrize("costs", [SWAP, REPLAY], ids=["swap", "recompute"])
@pytest.mark.parametrize("kind", ["n", "beam_width"])
@pytest.mark.parametrize("lag", [0, 1])
def test_groups_come_back_as_they_went(costs: Costs, kind: str, lag: int) -> None:
    requests = [Request(range(1, 7), 22, request_id="A"), Request(range(11, 16), 9, request_id="B", **{kind: 3})]
    scheduler, _, relief = served(11, costs, [])
    outputs = run(scheduler, requests, lag=lag)
    for request in requests:
        assert [done.token_ids for done in outputs[request.request_id].completions] == reference(request)
    assert relief.events["swap" if costs is SWAP else "recompute"] >= 1


def test_a_failed_step_loses_the_parcels_it_made() -> None:
    requests = [Request([1, 2, 3, 4], 16, request_id="A"), Request([5, 6, 7, 8], 16, request_id="B")]
    for crash in range(8, 16):
        scheduler, _, relief = served(6, SWAP, [])
        outputs = run(scheduler, requests, crashes=[crash])
        for request in requests:
            assert [done.token_ids for done in outputs[request.request_id].completions] == reference(request)
        relief.host.check()
        assert not relief.host.parcels


# ---------------------------------------------------------------- the real model


def greedy(guest: Any, scheduler: Scheduler, requests: list[Request], host_store: KVStore) -> dict[Any, list[int]]:
    """Serve `requests` through plans; the likeliest token each time."""
    from paged_kv.packed_batch import PackedBatch

    outputs = []
    for request in requests:
        scheduler.submit(request)
    while (plan := scheduler.schedule()) is not None:
        run_moves(plan.moves, guest.store, host_store)
        wide = {
            "input_ids": plan.token_ids,
            "positions": plan.positions,
            "slot_mapping": plan.slot_mapping,
            "rows": plan.rows,
            "logits_at": plan.cu_seqlens[1:][plan.sample_logits] - 1,
        }
        narrow = {
            "block_table": scheduler.manager.tables.table,
            "cu_seqlens": plan.cu_seqlens,
            "seq_lens": plan.seq_lens,
        }
        batch = PackedBatch(
            **{name: torch.tensor(data, dtype=torch.int64) for name, data in wide.items()},
            **{name: torch.tensor(data, dtype=torch.int32) for name, data in narrow.items()},
        )
        outputs += scheduler.commit(plan, guest.forward(batch).argmax(-1).numpy())
        scheduler.check()
    return {output.request_id: output.completions[0].token_ids for output in outputs}


PROMPTS = (
    "The first president was",
    "It was raining, so",
    "A triangle has",
    "Yesterday I went to",
    "The recipe calls for",
    "Birds can fly because",
    "In the morning she",
    "A poem about the sea:",
    "The opposite of hot is",
    "He opened the door and",
    "Three fruits are apples,",
    "The moon is made of",
    "Dear Sir or Madam,",
    "My dog likes to",
)


def test_the_real_model_answers_alike_in_a_pool_that_is_far_too_small(request: pytest.FixtureRequest) -> None:
    """Each method fires at least ten times, and every token is that of a large pool."""
    pytest.importorskip("transformers")
    from paged_kv.hf_adapter import host, load_guest, model_folder

    try:
        model_folder()
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine threads wait for one another at every layer
    request.addfinalizer(lambda: torch.set_num_threads(threads))
    model, tokenizer = load_guest()
    guest = host(model, num_blocks=400, block_size=2)
    requests = [Request(tokenizer(text)["input_ids"], 14, request_id=text) for text in PROMPTS]
    spec = KVSpec(len(guest.store.tensors), *guest.store.tensors[0].shape[3:], dtype="fp32")
    host_store = KVStore(spec, 40, 2)

    def serve(num_blocks: int, relief: Any) -> dict[Any, list[int]]:
        manager = BlockManager(num_blocks, 2, max_seqs=20, max_seq_len=32)
        scheduler = Scheduler(
            manager, PrefixCache(manager.pool, 2), relief=relief and relief(manager), token_budget=128
        )
        return greedy(guest, scheduler, requests, host_store)

    roomy = serve(400, None)
    reliefs: list[Preemption] = []

    def relief(manager: BlockManager) -> Preemption:
        reliefs.append(Preemption(manager, 40, Costs(1, 1e9, 1.0, transfer_latency=4.0), last_arrived))
        return reliefs[-1]

    tight = serve(14, relief)
    assert tight == roomy
    assert min(reliefs[0].events[method] for method in ("recompute", "swap")) >= 10, reliefs[0].events


# ------------------------------------------------------------------------------------------ resets


def findable(cache: PrefixCache) -> list[int]:
    """The blocks that have a name."""
    return [block for block, node in enumerate(cache.names.named) if node is not None]


def named_text(cache: PrefixCache, block: int) -> list[int] | None:
    """The tokens from the root to the end of `block` that its name stands for."""
    above, chunks = cache.names.named[block], list[bytes]()
    if above is None:
        return None
    while not isinstance(above, bytes):
        assert above is not None
        chunks.insert(0, above.chunk)
        above = above.parent
    return np.frombuffer(b"".join(chunks), np.int32).tolist()


@pytest.mark.parametrize("seed", range(25))
def test_what_was_written_before_a_reset_is_never_found(seed: int) -> None:
    """Samples that branch, chunks, preemption by recompute, resets at any step: by epochs and by whole texts."""
    rng = np.random.default_rng(seed)
    manager = BlockManager(int(rng.integers(16, 40)), 4, 8, 64)
    cache = PrefixCache(manager.pool, 4)
    scheduler = Scheduler(manager, cache, token_budget=int(rng.integers(5, 30)))
    for _ in range(6):
        prompt = rng.integers(0, 3, rng.integers(1, 30))
        scheduler.submit(Request(prompt, int(rng.integers(1, 12)), n=int(rng.integers(1, 4))))
    before: np.ndarray[Any, Any] = np.full(manager.pool.num_blocks, -1)
    while (plan := scheduler.schedule()) is not None:
        if rng.random() < 0.15:
            cache.reset()
            before = manager.pool.epoch.copy()
            assert not findable(cache)
        scheduler.commit(plan, rng.integers(0, 3, len(plan.sample_rows)))
        blocks = findable(cache)
        assert (manager.pool.epoch[blocks] > before[blocks]).all(), "K/V from before the reset"
        home = scheduler.home
        for row in home.running.tolist():
            full = int(manager.tables.seq_lens[row]) // 4  # a tail may be another's, up to where they part
            for index, block in enumerate(manager.tables.ids(row)[:full]):
                text = named_text(cache, block)
                whole = home.rows.tokens[row, : 4 * index + 4].tolist()
                assert text is None or text == whole, f"block {block}: its name leaves out what stands before it"
        scheduler.check()


def test_what_was_swapped_before_a_reset_is_not_found_after_it() -> None:
    manager = BlockManager(12, 4, 8, 64)
    cache = PrefixCache(manager.pool, 4)
    relief = Preemption(manager, 64, Costs(1, 1e12, 1.0))
    scheduler = Scheduler(manager, cache, token_budget=64, relief=relief)
    for start in (10, 40):
        scheduler.submit(Request(list(range(start, start + 20)), 20))
    resets = 0
    while (plan := scheduler.schedule()) is not None:
        scheduler.commit(plan, np.full(len(plan.sample_rows), 100 + plan.step))
        if scheduler.counts["swapped"] and not resets:
            cache.reset()
            resets = 1
        if relief.events["restore"]:
            break
    assert (resets, relief.events["restore"]) == (1, 1)
    for start in (10, 40):
        assert cache.match(b"", [*range(start, start + 20), 0]) == []
    scheduler.check()


def test_the_first_request_after_a_reset_is_published() -> None:
    manager = BlockManager(64, 4, 8, 64)
    cache = PrefixCache(manager.pool, 4)
    scheduler = Scheduler(manager, cache, token_budget=64)
    for _ in range(2):
        cache.reset()
        scheduler.submit(Request(list(range(20)), 3))
        while (plan := scheduler.schedule()) is not None:
            scheduler.commit(plan, np.full(len(plan.sample_rows), 7))
        assert len(cache.match(b"", [*range(20), 0])) == 5
