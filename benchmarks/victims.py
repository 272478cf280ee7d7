"""Lab L7: what a preemption costs, whom it should hit, and two settings that decide how often it happens.

    python benchmarks/victims.py [--seeds 12] [--only EXPERIMENT ...]

All times are simulated (lab L6); the constants of the device are assumed.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import write_result
from benchmarks.simulate import kept_rows
from paged_kv.block_manager import BlockManager
from paged_kv.cost_model import LLAMA_3_8B_ON_H200, CostModel
from paged_kv.metrics import SLO, Report, bootstrap_interval
from paged_kv.preemption import POLICIES, Costs, Preemption
from paged_kv.request import Request
from paged_kv.scheduler import Scheduler
from paged_kv.simulate import VOCABULARY, Clock, simulate
from paged_kv.step_plan import Host, StepPlan

MODULES = ["preemption", "host_pool", "simulate", "cost_model", "metrics", "scheduler", "ledger", "residents"]
COST = LLAMA_3_8B_ON_H200
BLOCK_SIZE = 16

# ------------------------------------------------------------------------------------------ crossover

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
BANDWIDTHS = (5e9, 9e9, 12.5e9, 25e9, 50e9, 200e9)  # B/s
BESIDE = (0, 32, 200)  # rows of 500 tokens that decode meanwhile


def prices(cost: CostModel, block_size: int) -> Costs:
    """What `Preemption` is told: the constants of the cost model, as rates."""
    return Costs(
        bytes_per_block=round(cost.kv_bytes * block_size),
        bandwidth=cost.host_bandwidth,
        prefill_tokens_per_s=cost.matmul_rate / cost.token_flops,
        seconds_per_pair=cost.pair_flops / cost.matmul_rate,
        seconds_per_token=cost.read_seconds(1, 0) + cost.overhead,
    )


def free_tokens(cost: CostModel, beside: int, held: int = 500) -> float:
    """Tokens that a step can run in the time that it reads anyway; one more row decodes."""
    new, lens = np.ones(beside + 1), np.full(beside + 1, held)
    spare = cost.read_seconds(new, lens) - cost.multiply_seconds(new, lens)
    return max(0.0, spare * cost.matmul_rate / cost.token_flops)


def predicted(cost: CostModel, length: int, beside: int) -> dict[str, float]:
    """Seconds that each method adds, from bytes and rates."""
    tokens = max(0.0, length - free_tokens(cost, beside))
    replay = tokens * cost.token_flops + length**2 / 2 * cost.pair_flops
    return {"recompute": replay / cost.matmul_rate, "swap": 2 * length * cost.kv_bytes / cost.host_bandwidth}


def added_seconds(cost: CostModel, length: int, beside: int, method: str) -> float:
    """Simulated: the same steps with and without one request being put aside and taken back."""
    seconds, moved = serve_beside(cost, length, beside, method)
    return seconds + cost.move_seconds(0, moved, BLOCK_SIZE) - serve_beside(cost, length, beside, "")[0]


def serve_beside(cost: CostModel, length: int, beside: int, method: str) -> tuple[float, int]:
    """Twelve steps of decoding; before the seventh, `method` hits one request.

    Returns: seconds without those of the moves, and the blocks that were moved, both ways.
    """
    manager = BlockManager(8192, BLOCK_SIZE, beside + 1, 16_384)
    told = replace(prices(cost, BLOCK_SIZE), bandwidth=1e30)  # swap, if there is room on the host
    relief = Preemption(manager, 1024 if method == "swap" else 0, told)
    scheduler = Scheduler(manager, relief=relief, token_budget=200_000, max_running=beside + 1)
    for number, tokens in enumerate([500] * beside + [length]):
        scheduler.submit(Request(range(tokens), 100, request_id=number))
    seconds, moved = 0.0, 0
    for step in range(13):  # the first runs the prompts and is not counted
        if method and step == 7:
            moved += len(relief.evict(scheduler.ledger, scheduler.ledger.groups[beside]))
        plan = scheduler.schedule()
        assert plan is not None
        moved += len(plan.moves)
        seconds += cost.step_seconds(plan.new_tokens, plan.seq_lens) if step else 0
        scheduler.commit(plan, np.ones(len(plan.sample_rows), np.int64), now=0.0)
    assert relief.events[method] == bool(method)
    return seconds, moved


def crossover() -> Iterator[dict[str, Any]]:
    """Both methods, predicted and simulated, over length, bandwidth and rows beside."""
    for beside, length in itertools.product(BESIDE, LENGTHS):
        base = serve_beside(COST, length, beside, "")[0]
        ran = {method: serve_beside(COST, length, beside, method) for method in ("recompute", "swap")}
        for bandwidth in BANDWIDTHS:
            cost = replace(COST, host_bandwidth=bandwidth)
            said = predicted(cost, length, beside)
            row: dict[str, Any] = {"beside": beside, "bandwidth": bandwidth, "length": length}
            for method, (seconds, moved) in ran.items():
                row[f"{method}_predicted_ms"] = round(1e3 * said[method], 4)
                row[f"{method}_ms"] = round(1e3 * (seconds + cost.move_seconds(0, moved, BLOCK_SIZE) - base), 4)
            yield row


# ------------------------------------------------------------------------------------------ overload


@dataclass(frozen=True)
class Overload:
    """Two kinds of requests, in bursts.

    Fields: `seconds` of arrivals; `rate` in requests/s, `swing` of it up and down every
    `period` seconds; `hasty`, the share that a person waits for.
    """

    seconds: float = 10.0
    rate: float = 32.0
    swing: float = 0.6
    period: float = 5.0
    hasty: float = 0.7


def lognormal(rng: np.random.Generator, mean: float, most: int) -> int:
    """A length of about this mean, sigma 1."""
    return int(np.clip(rng.lognormal(np.log(mean) - 0.5, 1.0), 4, most))


def overload(seed: int, load: Overload = Overload()) -> list[Request]:
    """Requests of one seed: those a person waits for (2 to 6 s), and batch work (10 to 25 s)."""
    rng, now, requests = np.random.default_rng(seed), 0.0, []
    while True:
        up = (now // load.period) % 2 == 0
        now += rng.exponential(1 / (load.rate * (1 + (load.swing if up else -load.swing))))
        if now >= load.seconds:
            return requests
        hasty = bool(rng.random() < load.hasty)
        prompt, output = (lognormal(rng, 161, 1024), lognormal(rng, 200, 600)) if hasty else (
            lognormal(rng, 800, 2048), lognormal(rng, 500, 1000))  # fmt: skip
        wait = float(rng.uniform(2, 6) if hasty else rng.uniform(10, 25))
        tokens = rng.integers(0, VOCABULARY, prompt, np.int32)
        requests.append(Request(tokens, output, priority=int(not hasty), arrival=now, deadline=now + wait))


CONFIGURATIONS = {
    "last_arrived, recompute only": ("last_arrived", 0),
    **{name: (name, 2048) for name in POLICIES},
}
POOL = 1024  # blocks: 2 GiB of K/V, room for 16,384 tokens


@dataclass
class Traffic:
    """Counts the blocks that plans move between device and host."""

    blocks: int = 0

    def __call__(self, plan: StepPlan) -> None:
        """Count those of one plan."""
        self.blocks += sum(isinstance(end, Host) for move in plan.moves for end in move)


def serve(
    requests: Sequence[Request], policy: str, host_blocks: int, block_size: int = BLOCK_SIZE, pool: int = POOL
) -> tuple[Report, Traffic, Preemption]:
    """Serve `requests` under a policy, in as much memory as `pool` blocks of 16 take."""
    clock, traffic = Clock(), Traffic()
    manager = BlockManager(pool * BLOCK_SIZE // block_size, block_size, 128, 4096)
    relief = Preemption(manager, host_blocks, prices(COST, block_size), POLICIES[policy])
    scheduler = Scheduler(manager, relief=relief, clock=clock, token_budget=1024, max_running=128)
    report = simulate(scheduler, clock, requests, COST, slo=SLO(2.0, 0.03), on_step=traffic)
    return report, traffic, relief


FIGURES = ("missed", "tax", "preemptions", "tokens_per_s", "first_token_p99", "gap_p99", "rows", "slots_filled")


def policies(seeds: int) -> Iterator[dict[str, Any]]:
    """Each configuration on the same arrivals, seed by seed."""
    for seed in range(seeds):
        requests = overload(seed)
        for name, (policy, host_blocks) in CONFIGURATIONS.items():
            report, traffic, relief = serve(requests, policy, host_blocks)
            figures = report.summary()
            row = {name: float(f"{figures[name]:.5g}") for name in FIGURES}
            moved = round(traffic.blocks * COST.kv_bytes * BLOCK_SIZE / 2**30, 3)
            yield {"seed": seed, "policy": name, "requests": len(requests), **row, "moved_gib": moved, **relief.events}


def compared(rows: Sequence[dict[str, Any]], figures: Sequence[str], base: str) -> list[dict[str, Any]]:
    """Means over seeds, and their difference from configuration `base`, with 95 % intervals."""
    names = list(dict.fromkeys(row["policy"] for row in rows))
    table = {n: {f: np.array([row[f] for row in rows if row["policy"] == n]) for f in figures} for n in names}
    result = []
    for name, figure in itertools.product(names, figures):
        values = table[name][figure]
        entry = {"policy": name, "figure": figure, "mean": float(values.mean())}
        entry["interval"] = list(bootstrap_interval(values))
        difference = values - table[base][figure]
        entry |= {"difference": float(difference.mean()), "difference_interval": list(bootstrap_interval(difference))}
        result.append(entry)
    return result


# ------------------------------------------------------------------------------------------ chunks

BUDGETS = (256, 512, 1024, 2048, 4096, 8192)


def long_prompts(seed: int, rate: float = 12.0, seconds: float = 20.0) -> list[Request]:
    """Chats among which one in ten has a long document in its prompt."""
    rng, now, requests = np.random.default_rng(seed), 0.0, []
    while (now := now + rng.exponential(1 / rate)) < seconds:
        prompt = int(rng.integers(4096, 8193)) if rng.random() < 0.1 else lognormal(rng, 300, 2048)
        tokens = rng.integers(0, VOCABULARY, prompt, np.int32)
        requests.append(Request(tokens, lognormal(rng, 300, 1000), arrival=now))
    return requests


def serve_chunks(requests: Sequence[Request], budget: int, chunked: bool) -> Report:
    """Serve `requests` in a pool that holds them all."""
    clock = Clock()
    manager = BlockManager(27_648, BLOCK_SIZE, 256, 10_240)
    scheduler = Scheduler(manager, token_budget=budget, max_running=256, chunked=chunked, clock=clock)
    return simulate(scheduler, clock, requests, COST)


def chunks(seeds: int) -> Iterator[dict[str, Any]]:
    """The token budget of a step, and prompts that are not cut at all."""
    settings = [(budget, True) for budget in BUDGETS] + [(BUDGETS[-1], False)]
    for seed, (budget, chunked) in itertools.product(range(seeds), settings):
        figures = serve_chunks(long_prompts(seed), budget, chunked).summary()
        wanted = (
            "gap_p50",
            "gap_p99",
            "gap_p99.9",
            "gap_max",
            "first_token_p50",
            "first_token_p99",
            "tokens_per_s",
            "busy",
        )
        row = {name: float(f"{figures[name]:.5g}") for name in wanted}
        yield {"seed": seed, "budget": budget, "chunked": chunked, **row}


# ------------------------------------------------------------------------------------------ block size

SIZES = (1, 4, 8, 16, 32, 64, 128, 256)


def block_sizes(seeds: int) -> Iterator[dict[str, Any]]:
    """The same memory in blocks of several sizes, recompute only."""
    for seed, size in itertools.product(range(seeds), SIZES):
        report, _, _ = serve(overload(seed), "last_arrived", 0, size)
        figures = report.summary()
        row = {name: float(f"{figures[name]:.5g}") for name in FIGURES}
        yield {"seed": seed, "block_size": size, **row}


EXPERIMENTS = ("crossover", "policies", "chunks", "block_sizes")


def main() -> None:
    """All experiments, of which the policies take longest; or some, with the rows of the others kept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--only", nargs="*", default=list(EXPERIMENTS), choices=EXPERIMENTS)
    options = parser.parse_args()
    few = min(options.seeds, 3)
    runs = {
        "crossover": lambda: crossover(),
        "policies": lambda: policies(options.seeds),
        "chunks": lambda: chunks(few),
        "block_sizes": lambda: block_sizes(few),
    }
    rows = kept_rows("victims", options.only, MODULES)
    for name in options.only:
        for row in runs[name]():
            rows.append({"experiment": name, **row})
            print(rows[-1], file=sys.stderr)
    rows.sort(key=lambda row: EXPERIMENTS.index(row["experiment"]))
    of = [row for row in rows if row["experiment"] == "policies"]
    table = compared(of, ("missed", "tax", "moved_gib"), "last_arrived, recompute only") if of else []
    best = min((entry for entry in table if entry["figure"] == "missed"), key=lambda entry: entry["mean"], default={})
    write_result(
        "victims",
        modules=MODULES,
        workload="simulated time; Llama 3 8B on an H200, assumed; crossover: one request put aside by hand; policies: "
        f"bursts of two kinds of requests, {POOL} blocks of {BLOCK_SIZE}; chunks: one prompt in ten of 4,096 to 8,192",
        repeats=options.seeds,
        statistic="one row a seed; means and 95 % bootstrap intervals in `compared`",
        packages=("numpy",),
        rows=rows,
        compared=table,
        overload=asdict(Overload()),
        headline={"fewest_missed": best.get("policy", ""), "missed": round(best.get("mean", 0.0), 4)},
    )


if __name__ == "__main__":
    main()
