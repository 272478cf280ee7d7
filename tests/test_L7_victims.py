"""Lab L7: predictions by hand, each method as simulated, and the stored result."""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from paged_kv.metrics import bootstrap_interval
from paged_kv.preemption import POLICIES

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks import victims as lab  # noqa: E402


@pytest.fixture(scope="module")
def result():
    return json.loads((ROOT / "benchmarks/results/victims.json").read_text())


def test_the_prediction_by_hand():
    cost = dataclasses.replace(
        lab.COST,
        weight_bytes=1000,
        kv_bytes=1,
        read_bandwidth=100.0,
        token_flops=10,
        pair_flops=0,
        matmul_rate=100.0,
        host_bandwidth=4.0,
    )
    # One row of 500: (1000 + 501) / 100 s of reading; a token takes 0.1 s of multiplying.
    assert lab.free_tokens(cost, 0) == pytest.approx(150.1 - 1)
    assert lab.predicted(cost, 100, 0) == {"recompute": 0.0, "swap": 50.0}
    assert lab.predicted(cost, 249, 0)["recompute"] == pytest.approx((249 - 149.1) / 10)


def test_prices_are_the_clock_as_rates():
    told = lab.prices(lab.COST, 16)
    assert told.bytes_per_block == 16 * 131_072
    assert told.replay_seconds(1000) == pytest.approx(lab.COST.multiply_seconds([1000], [1000]))
    assert told.swap_seconds(10) == pytest.approx(lab.COST.move_seconds(0, 20, 16))
    assert told.source == "assumed"


@pytest.mark.parametrize(("length", "beside"), [(64, 0), (600, 0), (2048, 5)])
def test_each_method_costs_what_was_predicted(length, beside):
    cost = dataclasses.replace(lab.COST, host_bandwidth=12.5e9)
    said = lab.predicted(cost, length, beside)
    for method, seconds in said.items():
        found = lab.added_seconds(cost, length, beside, method)
        blocks = -(-(length + 6) // 16) * 16 / length  # whole blocks are moved, and six tokens have come
        assert found == pytest.approx(seconds * (blocks if method == "swap" else 1), rel=0.05, abs=1e-4)
    assert lab.serve_beside(cost, length, beside, "recompute")[1] == 0


def test_arrivals_are_those_of_the_seed_and_of_both_kinds():
    requests = lab.overload(1)
    again = lab.overload(1)
    assert [(r.arrival, r.deadline, r.limit) for r in requests] == [(r.arrival, r.deadline, r.limit) for r in again]
    hasty = [r for r in requests if r.priority == 0]
    assert 0.6 < len(hasty) / len(requests) < 0.8
    assert all(2 <= r.deadline - r.arrival <= 6 for r in hasty)
    assert all(10 <= r.deadline - r.arrival <= 25 for r in requests if r.priority)
    assert all(r.limit <= 4096 for r in requests)
    load = lab.Overload()
    up = sum(r.arrival % (2 * load.period) < load.period for r in requests)
    assert up > 2 * (len(requests) - up)


@pytest.mark.parametrize("policy", list(POLICIES))
def test_a_policy_serves_everybody(policy):
    requests = lab.overload(0, lab.Overload(seconds=2.0, rate=30.0))
    report, traffic, relief = lab.serve(requests, policy, 512, pool=400)
    assert report.submitted == len(requests) == report.first_token.count
    assert report.output == sum(request.max_new_tokens for request in requests)
    assert relief.events["swap"] == relief.events["restore"] > 0
    assert traffic.blocks > 0
    assert relief.host.num_free == 512


def test_differences_are_paired_by_seed():
    rows = [
        {"policy": name, "missed": base + gain} for base in (0.1, 0.5, 0.9) for name, gain in (("a", 0), ("b", 0.01))
    ]
    table = {entry["policy"]: entry for entry in lab.compared(rows, ["missed"], "a")}
    assert table["a"]["difference"] == 0
    assert table["b"]["difference"] == pytest.approx(0.01)
    low, high = table["b"]["difference_interval"]
    assert high - low < 1e-9 < table["b"]["interval"][1] - table["b"]["interval"][0]
    assert table["a"]["interval"] == list(bootstrap_interval([0.1, 0.5, 0.9]))


def test_chunks_bound_the_longest_gap():
    found = {}
    for budget in (256, 4096):
        found[budget] = lab.serve_chunks(lab.long_prompts(0, seconds=2.0), budget, True).gaps.maximum
    token = lab.COST.token_flops / lab.COST.matmul_rate
    assert found[256] < 0.02 < 0.5 * 4096 * token < found[4096]


# ------------------------------------------------------------------------------------------ the stored result


def test_winners_are_those_predicted(result):
    rows = [row for row in result["rows"] if row["experiment"] == "crossover"]
    assert len(rows) == len(lab.BESIDE) * len(lab.BANDWIDTHS) * len(lab.LENGTHS)
    wins = {(row["swap_ms"] < row["recompute_ms"]) for row in rows}
    assert wins == {True, False}
    for row in rows:
        assert (row["swap_ms"] < row["recompute_ms"]) == (row["swap_predicted_ms"] < row["recompute_predicted_ms"]), row


def test_the_table_follows_from_the_rows(result):
    rows = [row for row in result["rows"] if row["experiment"] == "policies"]
    base = "last_arrived, recompute only"
    assert lab.compared(rows, ("missed", "tax", "moved_gib"), base) == result["compared"]
    assert {row["policy"] for row in rows} == set(lab.CONFIGURATIONS)
    assert all(row["moved_gib"] == 0 for row in rows if row["policy"] == base)
    fewest = min((e for e in result["compared"] if e["figure"] == "missed"), key=lambda e: e["mean"])
    assert result["headline"]["fewest_missed"] == fewest["policy"]


def test_the_longest_gap_follows_the_budget(result):
    rows = [row for row in result["rows"] if row["experiment"] == "chunks" and row["chunked"]]
    token = lab.COST.token_flops / lab.COST.matmul_rate
    for row in rows:
        if row["budget"] >= 1024:
            assert 0.9 < row["gap_max"] / (row["budget"] * token) < 1.35, row


def test_large_blocks_leave_slots_empty(result):
    rows = [row for row in result["rows"] if row["experiment"] == "block_sizes"]
    filled = {size: np.mean([r["slots_filled"] for r in rows if r["block_size"] == size]) for size in lab.SIZES}
    assert filled[1] == 1.0
    assert list(filled.values()) == sorted(filled.values(), reverse=True)
