"""Lab L1: the simulator keeps its promises, and the stored result says what the lab says."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import figure2_simulation as lab  # noqa: E402

PAPER = {"Orca (Max)": 7.00, "Orca (Pow2)": 9.81, "Orca (Oracle)": 13.62, "vLLM": 30.42}


@pytest.fixture(scope="module")
def result():
    return json.loads((ROOT / "benchmarks/results/figure2.json").read_text())


def memory(policy):
    chosen = lab.POLICIES[policy]
    return lab.Paged() if chosen is None else lab.Reserving(chosen)


def test_seven_windows_fit():
    assert lab.NUM_SLOTS // lab.MAX_LEN == 7
    assert round(100 * (1 - 7 * lab.MAX_LEN / lab.NUM_SLOTS), 1) == 8.9
    assert lab.NUM_SLOTS % lab.BLOCK_SIZE == 0


@pytest.mark.parametrize("name", list(lab.MEANS))
def test_lengths_have_the_published_means_and_pass_the_filter(name):
    normal = np.random.default_rng(1).normal(size=(200_000, 2))
    pairs = lab.draw_lengths(lab.fit_mu(lab.MEANS[name], lab.SIGMA), normal, lab.SIGMA)
    assert np.allclose(pairs.mean(0), lab.MEANS[name], rtol=2e-3)
    assert pairs.min() >= 1
    assert pairs[:, 0].max() <= 1024
    assert pairs.sum(1).max() <= 2048


def test_sigma_is_azures():
    assert round(float(np.sqrt(2 * np.log(211 / 129))), 2) == 0.99
    assert lab.SIGMA == 1.0


def test_one_policy_after_the_other_by_hand():
    requests = [lab.Request(0.0, 600, 2) for _ in range(10)]
    steps = list(lab.simulate(requests, lab.Reserving(lab.reserve_max), horizon=100))
    assert [step.batched for step in steps] == [7, 7, 7, 3, 3, 3]
    assert [step.split.used for step in steps] == [4200, 4207, 4214, 1800, 1803, 1806]
    assert steps[0].split.free == lab.NUM_SLOTS - 7 * lab.MAX_LEN
    paged = list(lab.simulate([lab.Request(0.0, 600, 2) for _ in range(10)], lab.Paged(), horizon=100))
    assert [step.batched for step in paged] == [10, 10, 10]


def test_step_time_is_bytes_over_bandwidth():
    assert lab.step_seconds(0, 0) == pytest.approx(26e9 / (0.6 * 1555e9))
    more = lab.step_seconds(1000, 10) - lab.step_seconds(0, 0)
    assert more == pytest.approx(1000 * 819_200 / (0.6 * 1555e9) + 26e9 * 10 / 156e12)


@pytest.mark.parametrize("policy", list(lab.POLICIES))
def test_every_step_accounts_for_every_slot_and_every_token(policy):
    requests = lab.poisson_requests("ShareGPT", 60, rate=8.0)
    kept = memory(policy)
    steps = []
    for step in lab.simulate(requests, kept, horizon=60):
        steps.append(step)
        split = step.split
        assert split.used + split.later + split.never + split.rounding + split.free == lab.NUM_SLOTS
        assert min(split.used, split.later, split.never, split.rounding, split.free) >= 0
        (kept.manager if policy == "vLLM" else kept.pool).check() if len(steps) % 50 == 0 else None
    finished = sum(request.produced == request.output for request in requests)
    assert finished > 10
    assert all(request.produced <= request.output for request in requests)
    if policy == "Orca (Max)":
        assert max(step.batched for step in steps) == 7
    if policy == "vLLM":
        assert sum(step.preempted for step in steps) > 0


@pytest.mark.parametrize("policy", list(lab.POLICIES))
def test_first_come_first_served_to_the_end(policy):
    requests = [lab.Request(0.1 * i, 100 + 37 * i % 500, 1 + 53 * i % 400) for i in range(60)]
    kept = memory(policy)
    list(lab.simulate(requests, kept, horizon=1e6))
    assert all(request.produced == request.output for request in requests)
    fresh = memory(policy)
    if policy == "vLLM":
        assert kept.manager.pool.num_free == fresh.manager.pool.num_free
    else:
        assert kept.pool._free == fresh.pool._free


def test_one_short_run_is_the_same_twice():
    first, second = (lab.summarise(lab.run("Alpaca", "Orca (Pow2)", 5), 5) for _ in range(2))
    assert first == second


def test_stored_result(result):
    rows = {(row["workload"], row["policy"]): row for row in result["rows"]}
    assert len(rows) == 8
    for (workload, policy), row in rows.items():
        assert sum(row[field] for field in lab.FIELDS) == pytest.approx(100)
        if policy == "Orca (Max)":  # saturated throughout: exactly 7
            assert row["always_waiting"]
            assert (row["fewest"], row["most"]) == (7, 7)
            assert row["batched"] == pytest.approx(7)
            assert row["free"] == pytest.approx(100 * (1 - 7 * 2048 / 15_728))
        if workload == "ShareGPT":
            assert row["batched"] == pytest.approx(PAPER[policy], rel=0.1)
    for workload in lab.MEANS:
        batched = [rows[workload, policy]["batched"] for policy in lab.POLICIES]
        used = [rows[workload, policy]["used"] for policy in lab.POLICIES]
        assert batched == sorted(batched)
        assert used == sorted(used)


def test_stored_parameters_are_those_of_the_script(result):
    assert result["parameters"] == {
        "sigma": lab.SIGMA,
        "means": {name: list(means) for name, means in lab.MEANS.items()},
        "rates": lab.RATES,
        "horizons": lab.HORIZONS,
        "max_prompt": lab.MAX_PROMPT,
        "bandwidth": lab.BANDWIDTH,
        "flops": lab.FLOPS,
        "parameters": lab.PARAMETERS,
        "watermark": lab.WATERMARK,
    }
