"""Lab L6: the clock, the histogram, and the simulator against hand-counted runs and against itself."""

import dataclasses
import gc
import json
import math
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_kv.block_manager import BlockManager
from paged_kv.cost_model import LLAMA_3_8B_ON_H200, CostModel
from paged_kv.metrics import SLO, LogHistogram, Report, bootstrap_interval
from paged_kv.preemption import POLICIES, Costs, Preemption
from paged_kv.prefix_cache import PrefixCache
from paged_kv.request import Request
from paged_kv.scheduler import Scheduler
from paged_kv.simulate import VOCABULARY, Clock, plan_seconds, prompt_tokens, requests_of, simulate
from paged_kv.sizing import KVSpec
from paged_kv.step_plan import Host
from paged_kv.trace_shapes import AZURE_CONVERSATION, generate
from paged_kv.traces import TraceRequest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks import simulate as lab  # noqa: E402

A_SECOND = CostModel(
    weight_bytes=1,
    token_flops=0,
    pair_flops=0,
    kv_bytes=0,
    read_bandwidth=1,
    matmul_rate=1,
    host_bandwidth=1,
    overhead=0,
)


def server(num_blocks=8, block_size=4, max_seqs=3, max_seq_len=16, caching=False, relief=None, **options):
    clock = Clock()
    manager = BlockManager(num_blocks, block_size, max_seqs, max_seq_len)
    cache = PrefixCache(manager.pool, block_size) if caching else None
    chosen = relief(manager) if relief else None
    settings_ = {"token_budget": 16, **options}
    return Scheduler(manager, cache, clock=clock, relief=chosen, **settings_), clock


def chats():
    return [
        Request(range(100, 106), 4, request_id="A", arrival=0.0),
        Request(range(200, 205), 3, request_id="B", arrival=0.0),
        Request(range(300, 309), 2, request_id="C", arrival=1.5),
    ]


# ------------------------------------------------------------------------------------------ the clock


def test_a_step_takes_the_longer_of_reading_and_multiplying():
    cost = CostModel(
        weight_bytes=100,
        token_flops=6,
        pair_flops=2,
        kv_bytes=10,
        read_bandwidth=50,
        matmul_rate=4,
        host_bandwidth=5,
        overhead=0.5,
    )
    assert cost.read_seconds([1, 3], [7, 5]) == (100 + 10 * (12 + 4)) / 50
    pairs = 7 + (3 + 4 + 5)  # one new token sees 7 keys; three see 3, 4 and 5
    assert cost.multiply_seconds([1, 3], [7, 5]) == (6 * 4 + 2 * pairs) / 4
    assert cost.step_seconds([1, 3], [7, 5]) == 0.5 + max((100 + 160) / 50, (24 + 38) / 4)
    assert cost.step_seconds([1], [1]) == 0.5 + max(120 / 50, 8 / 4)
    assert cost.move_seconds(3, 2, block_size=4) == 2 * 3 * 40 / 50 + 2 * 40 / 5


@pytest.mark.parametrize(
    ("field", "value"),
    [("read_bandwidth", 0), ("matmul_rate", -1), ("overhead", math.nan), ("kv_bytes", math.inf), ("overhead", -1e-9)],
)
def test_constants_that_make_no_clock_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        dataclasses.replace(A_SECOND, **{field: value})


def test_what_is_not_measured_is_marked_assumed():
    assert LLAMA_3_8B_ON_H200.describe().count("assumed") == 8
    measured = dataclasses.replace(LLAMA_3_8B_ON_H200, measured={"overhead": "chapter 13"})
    assert measured.describe().count("assumed") == 7
    assert "chapter 13" in measured.describe().splitlines()[-1]
    with pytest.raises(ValueError, match="measured"):
        dataclasses.replace(A_SECOND, measured={"speed": "somewhere"})


def test_the_constants_are_those_of_the_shape():
    assert LLAMA_3_8B_ON_H200.kv_bytes == KVSpec(32, 8, 128).bytes_per_token
    assert LLAMA_3_8B_ON_H200.pair_flops == 4 * 32 * 32 * 128  # layers, query heads, head size


# ------------------------------------------------------------------------------------------ the histogram


@given(
    st.lists(st.floats(1e-4, 1e5), min_size=1, max_size=200),
    st.floats(0, 1),
    st.sampled_from([0.001, 0.01, 0.2]),
)
@settings(deadline=None)
def test_a_quantile_is_within_the_error(values, share, error):
    histogram = LogHistogram(error)
    histogram.add(values[: len(values) // 2])
    histogram.add(values[len(values) // 2 :])
    exact = sorted(values)[min(int(share * len(values)), len(values) - 1)]
    assert abs(histogram.quantile(share) / exact - 1) <= error * (1 + 1e-9)
    assert histogram.count == len(values)
    assert histogram.mean == pytest.approx(sum(values) / len(values))
    assert histogram.maximum == max(values)


def test_a_histogram_takes_what_lies_outside_and_refuses_what_is_no_time():
    histogram = LogHistogram(low=1e-3, high=1e3)
    assert math.isnan(histogram.quantile(0.5))
    assert math.isnan(histogram.mean)
    histogram.add([0.0, 1e9])
    histogram.add([])
    assert (histogram.count, histogram.quantile(0.0)) == (2, 1e-3)
    for bad in (math.nan, -1e-9):
        with pytest.raises(ValueError, match="values"):
            histogram.add([1.0, bad])
    assert histogram.count == 2
    with pytest.raises(ValueError, match="share"):
        histogram.quantile(1.1)
    with pytest.raises(ValueError, match="error"):
        LogHistogram(error=0)


def test_the_interval_covers_the_mean_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = 0
    for seed in range(200):
        low, high = bootstrap_interval(rng.normal(3.0, 1.0, 30), draws=400, seed=seed)
        covered += low <= 3.0 <= high
    assert 176 <= covered <= 198  # 95 % of 200 is 190; the bootstrap of 30 is a little narrow
    assert bootstrap_interval([2.0, 2.0, 2.0]) == (2.0, 2.0)
    for bad in ([1.0], [1.0, math.nan]):
        with pytest.raises(ValueError, match="values"):
            bootstrap_interval(bad)


# ------------------------------------------------------------------------------------------ by hand


def test_three_chats_by_hand():
    scheduler, clock = server()
    report = simulate(scheduler, clock, chats(), A_SECOND)
    assert (report.seconds, report.steps, report.busy) == (4.0, 4, 4.0)
    assert report.first_token.total == 1 + 1 + 1.5
    assert report.per_token.total == 1 + 1 + 1
    assert report.gaps.count == 9 - 3
    assert report.gaps.total == 6.0
    assert report.output == 9
    assert report.computed == 9 + 7 + 10
    assert (report.recomputed, report.preemptions, dict(report.reasons)) == (0, 0, {"length": 3})
    # Blocks: 4 of 8 in steps 1 and 2, then 7; after B has left, A and C have 3 each.
    assert report.held == pytest.approx((4 + 4 + 7 + 6) / 8)
    assert report.rows == 2 + 2 + 3 + 2


def test_a_wait_for_blocks_is_a_wait_for_the_first_token():
    scheduler, clock = server(num_blocks=6)
    report = simulate(scheduler, clock, chats(), A_SECOND)
    assert (report.seconds, report.first_token.maximum) == (5.0, 2.5)


def test_an_idle_server_skips_to_the_next_arrival():
    scheduler, clock = server()
    late = [dataclasses.replace(chats()[0], arrival=1000.0)]
    report = simulate(scheduler, clock, late, A_SECOND)
    assert (report.seconds, report.busy, report.first_token.total) == (1004.0, 4.0, 1.0)


def test_a_replay_is_counted_once_as_computed_and_once_as_recomputed():
    """Two chats of 4 + 16 tokens in 6 blocks: the second is put aside and computed again."""
    scheduler, clock = server(num_blocks=6, max_seq_len=24)
    pair = [Request(range(4), 16, request_id=name, arrival=0.0) for name in "AB"]
    report = simulate(scheduler, clock, pair, A_SECOND)
    assert report.preemptions >= 1
    assert report.recomputed == report.computed - 2 * (4 + 16 - 1) > 0
    assert report.gaps.count == 2 * 15
    assert report.gaps.maximum > 1  # the one put aside waited
    assert report.gaps.total == pytest.approx(report.per_token.total * 15)


def test_swapped_tokens_are_moved_and_not_recomputed():
    swap = Costs(bytes_per_block=1, bandwidth=1e9, prefill_tokens_per_s=1.0)
    moved = []
    scheduler, clock = server(num_blocks=6, max_seq_len=24, relief=lambda m: Preemption(m, 16, swap))
    pair = [Request(range(4), 16, request_id=name, arrival=0.0) for name in "AB"]
    cost = dataclasses.replace(A_SECOND, kv_bytes=1, read_bandwidth=1.0, host_bandwidth=8.0)
    report = simulate(scheduler, clock, pair, cost, on_step=lambda plan: moved.extend(plan.moves))
    out = sum(isinstance(to, Host) for _, to in moved)
    assert out == len(moved) - out > 0
    assert report.recomputed == 0
    assert report.computed == 2 * 19
    resident = sum(isinstance(one, Host) for move in moved for one in move) * 4 / 8.0
    assert report.busy > resident > 0


def test_hits_are_neither_computed_nor_recomputed():
    scheduler, clock = server(num_blocks=16, caching=True)
    same = [Request(range(9), 2, request_id=i, arrival=10.0 * i) for i in range(3)]
    report = simulate(scheduler, clock, same, A_SECOND)
    assert report.hits == 2 * 8
    assert report.computed == 10 + 2 + 2
    assert report.summary()["hit_rate"] == pytest.approx(16 / 30)
    assert report.recomputed == 0


def test_samples_of_one_prompt():
    scheduler, clock = server(num_blocks=16, max_seqs=4)
    report = simulate(scheduler, clock, [Request(range(6), 5, n=3, arrival=0.0)], A_SECOND)
    assert (report.output, report.gaps.count, report.first_token.count) == (15, 12, 1)
    assert dict(report.reasons) == {"length": 3}
    assert report.computed == 6 + 3 * 4


# ------------------------------------------------------------------------------------------ promises and ends


def test_goodput_counts_only_kept_promises():
    promises = {SLO(1.2, 1.0): 2, SLO(1.5, 1.0): 3, SLO(1.5, 0.9): 0}
    for slo, good in promises.items():
        scheduler, clock = server()
        report = simulate(scheduler, clock, chats(), A_SECOND, slo=slo)
        assert report.good == good
        assert report.summary()["goodput"] == good / 4


def test_deadlines_are_missed_by_the_late_the_failed_and_the_refused():
    scheduler, clock = server(num_blocks=3)
    requests = [
        Request(range(5), 3, request_id="in time", arrival=0.0, deadline=3.0),
        Request(range(5), 3, request_id="late", arrival=0.0, deadline=2.9),
        Request(range(9), 8, request_id="outgrows", arrival=10.0, deadline=1000.0),
        Request(range(13), 2, request_id="never fits", arrival=20.0, deadline=1000.0),
        Request(range(13), 2, request_id="nobody waits", arrival=20.0),
    ]
    report = simulate(scheduler, clock, requests, A_SECOND)
    assert (report.submitted, report.refused) == (5, 2)
    assert dict(report.reasons) == {"length": 2, "out_of_blocks": 1}
    assert report.missed == 3
    assert report.first_token.count == 2


def test_what_cannot_be_simulated_is_refused():
    for wrong, match in [
        ([Request(range(4), 2)], "arrival"),
        ([Request(range(4), 2, arrival=2.0), Request(range(4), 2, arrival=1.0)], "arrival"),
        ([Request(range(4), 2, arrival=-1.0)], "arrival"),
        ([Request(range(4), 2, beam_width=2, arrival=0.0)], "beams"),
    ]:
        scheduler, clock = server()
        with pytest.raises(ValueError, match=match):
            simulate(scheduler, clock, wrong, A_SECOND)


def test_a_lost_block_ends_the_run_with_an_error():
    scheduler, clock = server()
    scheduler.manager.pool.take(1)
    with pytest.raises(AssertionError, match="leaked"):
        simulate(scheduler, clock, chats(), A_SECOND)


# ------------------------------------------------------------------------------------------ traces


def test_prompts_are_alike_where_the_trace_says_so():
    one = prompt_tokens(TraceRequest(0.0, 1200, 1, (5, 6, 7)), 0)
    other = prompt_tokens(TraceRequest(0.0, 1100, 1, (5, 6, 9)), 1)
    assert (one[:1024] == other[:1024]).all()
    assert (one[1024:1100] != other[1024:]).mean() > 0.9
    assert one.dtype == np.int32
    assert 0 <= one.min() <= one.max() < VOCABULARY
    top = prompt_tokens(TraceRequest(0.0, 512, 1, (2**63 - 1,)), 2)
    assert len(np.unique(top)) > 400
    bare = [prompt_tokens(TraceRequest(0.0, 600, 1), own) for own in range(3)]
    assert (bare[0] != bare[1]).mean() > 0.9
    assert [len(tokens) for tokens in bare] == [600] * 3


def test_requests_of_a_trace():
    trace = [TraceRequest(0.5, 10, 3), TraceRequest(0.7, 10, 0), TraceRequest(1.0, 20, 1)]
    made = list(requests_of(trace, deadline=2.0))
    assert [(r.arrival, r.deadline, r.limit) for r in made] == [(0.5, 2.5, 13), (1.0, 3.0, 21)]
    assert [r.deadline for r in requests_of(trace)] == [None, None]


# ------------------------------------------------------------------------------------------ conservation, seeds, memory


def figures(report):
    """All of a report, comparable."""
    plain = {f.name: getattr(report, f.name) for f in dataclasses.fields(Report)}
    return {name: value.counts.tolist() if isinstance(value, LogHistogram) else value for name, value in plain.items()}


def tight(seed, policy="cheapest", count=60, on_step=None):
    """Random chats over a pool that is too small for them."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 28, (count, 2))
    arrivals = np.cumsum(rng.exponential(0.5, count))
    requests = [
        Request(rng.integers(0, 9, p), int(n), arrival=float(at), n=int(rng.integers(1, 3)), priority=int(p % 2))
        for at, (p, n) in zip(arrivals, lengths, strict=True)
    ]
    costs = Costs(bytes_per_block=1, bandwidth=2.0, prefill_tokens_per_s=8.0, transfer_latency=1.0)
    scheduler, clock = server(
        num_blocks=24,
        max_seqs=12,
        max_seq_len=96,
        caching=True,
        relief=lambda manager: Preemption(manager, 16, costs, POLICIES[policy]),
    )
    report = simulate(scheduler, clock, requests, A_SECOND, seed=seed, on_step=on_step and on_step(scheduler))
    return report, requests


@pytest.mark.parametrize("policy", list(POLICIES))
def test_nothing_is_lost_under_pressure(policy):
    def checked(scheduler):
        def look(plan):
            if plan.step % 25 == 0:
                scheduler.check()

        return look

    report, requests = tight(3, policy, on_step=checked)
    assert report.preemptions > 10, "too little pressure: this tests nothing"
    assert report.recomputed > 0
    assert report.submitted == len(requests) == report.first_token.count
    assert report.output == sum(request.n * request.max_new_tokens for request in requests)
    assert report.gaps.count == report.output - sum(request.n for request in requests)
    assert sum(report.reasons.values()) == sum(request.n for request in requests)
    assert report.computed + report.hits >= sum(len(r.tokens) for r in requests) + report.recomputed


def test_one_seed_one_result():
    assert figures(tight(5)[0]) == figures(tight(5)[0])
    assert figures(tight(5)[0]) != figures(tight(6)[0])


def test_memory_is_flat_in_finished_requests():
    """What is held after 300 requests is what is held after 100: kept, each would take some 500 B."""
    shape = dataclasses.replace(
        lab.CHAT, requests_per_s=200.0, max_input=48, max_output=4, first=lab.Lognormal(20, 0.5)
    )

    def held(count):
        scheduler, clock = server(num_blocks=64, block_size=16, max_seqs=16, max_seq_len=64, caching=True)
        gc.collect()
        tracemalloc.start()
        report = simulate(scheduler, clock, requests_of(generate(shape, count)), A_SECOND_FAST)
        gc.collect()
        size = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert report.first_token.count == count
        return size

    first, later = held(100), held(300)
    assert later < first + 200 * 100, f"{first:,} B after 100 requests, {later:,} B after 300"


A_SECOND_FAST = dataclasses.replace(A_SECOND, read_bandwidth=1000)


def test_moves_cost_time_even_in_a_plan_without_tokens():
    @dataclasses.dataclass
    class Moves:
        moves: tuple
        num_tokens: int = 0

    cost = dataclasses.replace(A_SECOND, kv_bytes=1)
    assert plan_seconds(cost, Moves(((1, Host(0)), (Host(1), 2), (3, 4))), 4) == 2 * 4 + 2 * 4


# ------------------------------------------------------------------------------------------ the stored result


@pytest.fixture(scope="module")
def result():
    return json.loads((ROOT / "benchmarks/results/simulate.json").read_text())


def test_the_result_is_what_the_lab_says(result):
    load = {row["rate"]: row for row in result["rows"] if row["experiment"] == "load"}
    below, above = (load[rate] for rate in result["opening"])
    assert above["tokens_per_s"] < 1.1 * below["tokens_per_s"]
    assert above["first_token_p50"] > 10 * below["first_token_p50"]
    assert above["goodput"] < below["goodput"] / 3
    speeds = [row for row in result["rows"] if row["experiment"] == "speed"]
    assert result["headline"]["simulated_requests_per_s"] == speeds[-1]["simulated_requests_per_s"] > 0
    assert speeds[-1]["peak_mib"] < 1.25 * speeds[0]["peak_mib"]


def test_a_row_of_the_result_comes_out_again(result):
    row = next(row for row in result["rows"] if row["experiment"] == "load" and row["rate"] == 20)
    again = lab.row("load", lab.run(lab.chat(20, 60)), rate=20)
    assert again == row


def test_the_azure_shape_fits_the_rows_of_the_lab():
    longest = max(entry.input_length + entry.output_length for entry in generate(AZURE_CONVERSATION, 300))
    assert longest <= 16_384 + 2_000
