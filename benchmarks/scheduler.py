"""What scheduling costs: blocks over the lives of 20,000 requests, and the whole decision of a step.

    python benchmarks/scheduler.py [--peer FOLDER]

FOLDER holds `vllm_bookkeeping.py`, which drives vLLM 0.23's KVCacheManager, in an environment where vLLM can be
imported; without it only ours is timed and no result is written.

Churn: every request is admitted, gets room for one token a step until its length is reached, and is finished; 256 run
at a time.  "blocks" is our BlockManager, "whole" our Scheduler with everything (queue, plan, tokens, keys of filled
blocks, stop checks); vLLM's part is its KVCacheManager alone, with and without prefix caching.  All take turns, a slice
of work each, and the clock is that of the one thread at work.  Steps: schedule and commit of decode steps.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import write_result
from paged_kv import row_state, scheduler
from paged_kv.block_manager import BlockManager
from paged_kv.block_names import BlockNames
from paged_kv.prefix_cache import PrefixCache
from paged_kv.request import Request
from paged_kv.scheduler import Scheduler

BLOCK_SIZE, MAX_LEN, BLOCKS, RUNNING = 16, 4096, 27_648, 256
REQUESTS, MEAN_IN, MEAN_OUT, SIGMA = 20_000, 161, 338, 1.0
STEPS, ROUNDS, SIZES = 64, 15, (64, 256, 1024)
MODULES = ["block_pool", "block_tables", "block_manager", "prefix_keys", "block_names", "prefix_cache", "request"]
MODULES += ["row_state"]
MODULES += ["residents", "turns", "step_plan", "ledger", "admission", "in_flight", "scheduler"]


def workload(count: int) -> list[tuple[int, int]]:
    """Prompt and output lengths: lognormal around the means of ShareGPT, cut at half a row each."""
    rng = np.random.default_rng(0)
    lengths = [
        rng.lognormal(math.log(mean) - SIGMA**2 / 2, SIGMA, count).astype(int).clip(1, MAX_LEN // 2).tolist()
        for mean in (MEAN_IN, MEAN_OUT)
    ]
    return list(zip(*lengths, strict=True))


def churn_blocks(work: list[tuple[int, int]]) -> Iterator[int]:
    """Our BlockManager; yields the tokens of each step."""
    manager = BlockManager(BLOCKS, BLOCK_SIZE, RUNNING, MAX_LEN)
    tokens, ends = np.zeros(RUNNING * MAX_LEN, np.int32), np.zeros(RUNNING, np.int64)
    rows, waiting = np.empty(0, np.int64), iter(work)
    yield 0
    while True:
        new = []
        for prompt, output in waiting if len(rows) < RUNNING else ():
            new.append(manager.add(prompt))
            ends[new[-1]] = prompt + output - 1
            if len(rows) + len(new) == RUNNING:
                break
        if new:
            rows = np.concatenate([rows, new])
        lens = manager.tables.seq_lens[rows]
        going = lens < ends[rows]
        if np.count_nonzero(going) < len(rows):
            for row in rows[~going].tolist():
                manager.finish(row)
            rows, lens = rows[going], lens[going]
        if not len(rows):
            return
        tokens[rows * MAX_LEN + lens] = 7
        manager.append(rows)
        yield len(rows)


def churn_whole(work: list[tuple[int, int]]) -> Iterator[int]:
    """Our Scheduler, prefix cache included; yields the tokens that each step samples."""
    manager = BlockManager(BLOCKS, BLOCK_SIZE, RUNNING, MAX_LEN)
    one = Scheduler(manager, PrefixCache(manager.pool, BLOCK_SIZE), token_budget=8192, max_running=RUNNING)
    rng = np.random.default_rng(1)
    prompts = rng.integers(0, 32_000, MAX_LEN + len(work)).astype(np.int32)
    sampled = rng.integers(0, 32_000, 2 * RUNNING).astype(np.int32)
    yield 0
    for index, (prompt, output) in enumerate(work):
        one.submit(Request(prompts[index : index + prompt], output, stop_tokens=(32_001,)))
    while (plan := one.schedule()) is not None:
        one.commit(plan, sampled[plan.step % RUNNING :][: len(plan.sample_rows)])
        yield len(plan.sample_rows)


def churn_vllm(work: list[tuple[int, int]], caching: bool) -> Iterator[int]:
    """vLLM's KVCacheManager, request by request as its scheduler calls it."""
    from vllm_bookkeeping import VllmBookkeeping

    book = VllmBookkeeping(num_blocks=BLOCKS, block_size=BLOCK_SIZE, max_len=MAX_LEN, caching=caching)
    rng = np.random.default_rng(1)
    prompts = rng.integers(0, 32_000, MAX_LEN + len(work)).tolist()
    running: list[list[Any]] = []
    waiting = iter(enumerate(work))
    yield 0
    while True:
        for index, (prompt, output) in waiting if len(running) < RUNNING else ():
            request = book.request(index, prompts[index : index + prompt])
            assert book.admit(request) is not None
            running.append([request, output - 1])
            if len(running) == RUNNING:
                break
        for entry in running:
            if not entry[1]:
                book.finish(entry[0])
        running = [entry for entry in running if entry[1]]
        if not running:
            return
        for entry in running:
            assert book.decode(entry[0], 7 + entry[1] % 5)
            entry[1] -= 1
        yield len(running)


def take_turns(contestants: dict[str, Iterator[int]], slice_steps: int = 256) -> list[dict[str, Any]]:
    """Run all to the end, `slice_steps` steps at a time each; processor time of the thread."""
    seconds, tokens, steps = (dict.fromkeys(contestants, 0.0) for _ in range(3))
    going = dict(contestants)
    for steps_of in going.values():
        next(steps_of)  # sets up
    while going:
        for name, steps_of in list(going.items()):
            start = time.thread_time()
            for _ in range(slice_steps):
                ran = next(steps_of, None)
                if ran is None:
                    del going[name]
                    break
                tokens[name] += ran
                steps[name] += 1
            seconds[name] += time.thread_time() - start
    return [
        {
            "part": "churn",
            "who": name,
            "seconds": round(seconds[name], 3),
            "steps": int(steps[name]),
            "us_a_step": round(seconds[name] / steps[name] * 1e6, 1),
            "requests_per_s": round(REQUESTS / seconds[name]),
        }
        for name in contestants
    ]


def decoding(running: int) -> tuple[Scheduler, np.ndarray[Any, Any]]:
    """A scheduler with `running` decoding rows, and tokens to commit."""
    manager = BlockManager(running * 220, BLOCK_SIZE, running, MAX_LEN)
    one = Scheduler(manager, PrefixCache(manager.pool, BLOCK_SIZE), token_budget=running * 512, max_running=running)
    rng = np.random.default_rng(running)
    for index in range(running):
        prompt = rng.integers(0, 32_000, 100 + index * 7 % 300)
        one.submit(Request(prompt, MAX_LEN - 400, stop_tokens=(32_001,)))
    plan = one.schedule()
    assert plan is not None
    assert len(plan.sample_rows) == running
    one.commit(plan, rng.integers(0, 32_000, running))
    return one, rng.integers(0, 32_000, (STEPS * (ROUNDS + 2), running)).astype(np.int32)


def step_times(running: int) -> dict[str, Any]:
    """Median over ROUNDS of the mean of STEPS steps: schedule and commit, in microseconds."""
    one, tokens = decoding(running)
    times: list[tuple[float, float]] = []
    gc.collect()
    gc.disable()
    for turn in range(ROUNDS + 1):
        scheduling = committing = 0.0
        for sampled in tokens[turn * STEPS : (turn + 1) * STEPS]:
            start = time.thread_time()
            plan = one.schedule()
            middle = time.thread_time()
            one.commit(plan, sampled)  # type: ignore[arg-type]
            committing += time.thread_time() - middle
            scheduling += middle - start
        times.append((scheduling / STEPS * 1e6, committing / STEPS * 1e6))
    gc.enable()
    schedule_us, commit_us = (statistics.median(column) for column in zip(*times[1:], strict=True))
    total = statistics.median(sum(pair) for pair in times[1:])
    least = min(sum(pair) for pair in times[1:])
    return {
        "part": "step",
        "running": running,
        "schedule_us": round(schedule_us, 1),
        "commit_us": round(commit_us, 1),
        "step_us": round(total, 1),
        "least_us": round(least, 1),
    }


def profile(running: int) -> list[dict[str, Any]]:
    """Where the time of a step goes: medians of the parts, measured apart from the totals."""
    one, tokens = decoding(running)
    spent: dict[str, list[float]] = {}

    def timed(place: Any, name: str, label: str) -> Callable[[], None]:
        inner = getattr(place, name)

        def outer(*args: Any, **named: Any) -> Any:
            start = time.thread_time()
            result = inner(*args, **named)
            spent.setdefault(label, []).append((time.thread_time() - start) * 1e6)
            return result

        setattr(place, name, outer)
        return lambda: setattr(place, name, inner)

    parts = [
        (scheduler, "share_budget", "who runs: share the budget"),
        (scheduler, "advance", "blocks: take and enter"),
        (BlockNames, "take_away", "keys: forget taken blocks"),
        (scheduler, "next_plan", "the plan's arrays"),
        (row_state.RowState, "record", "tokens and stop checks"),
        (scheduler, "publish_turn", "keys: publish filled blocks"),
        (Scheduler, "schedule", "schedule"),
        (Scheduler, "commit", "commit"),
    ]
    undo = [timed(*part) for part in parts]
    for sampled in tokens[: STEPS * ROUNDS]:
        one.commit(one.schedule(), sampled)  # type: ignore[arg-type]
    for restore in undo:
        restore()
    rows = []
    for label, times in spent.items():
        if len(times) < 10 * BLOCK_SIZE:
            continue
        means = [statistics.fmean(times[i : i + BLOCK_SIZE]) for i in range(0, len(times) - BLOCK_SIZE, BLOCK_SIZE)]
        rows.append({"part": "profile", "running": running, "what": label, "us": round(statistics.median(means), 1)})
    return rows


def main() -> None:
    """Time everything, print it, write the JSON if the peer was there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="folder with vllm_bookkeeping.py")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="fewer, to try the script; nothing is written")
    options = parser.parse_args()
    if options.peer:
        sys.path.append(options.peer)
    rows = [step_times(running) for running in SIZES] + profile(256)
    work = workload(options.requests)
    contestants = {"blocks": churn_blocks(work), "whole": churn_whole(work)}
    if options.peer:
        contestants |= {"vllm": churn_vllm(work, caching=False), "vllm, caching": churn_vllm(work, caching=True)}
    rows += take_turns(contestants)
    for row in rows:
        print(row)
    if options.peer and options.requests == REQUESTS:
        churn = {row["who"]: row["seconds"] for row in rows if row["part"] == "churn"}
        steps = {f"step_us_{row['running']}": row["step_us"] for row in rows if row["part"] == "step"}
        lengths = np.array(work).mean(0)
        path = write_result(
            "scheduler",
            modules=MODULES,
            workload=f"churn: {REQUESTS:,} requests, lognormal lengths (sigma {SIGMA}, means {lengths[0]:.0f} in, "
            f"{lengths[1]:.0f} out after cutting at {MAX_LEN // 2:,}), {BLOCKS:,} blocks of {BLOCK_SIZE}, {RUNNING} "
            "running; step: decoding rows, prefix cache on, one stop token each",
            repeats=ROUNDS,
            statistic=f"step: median of {ROUNDS} means over {STEPS} steps; churn: one run, in turns of 256 steps; "
            "processor time of the thread",
            rows=rows,
            headline={"x_vllm_churn": round(churn["vllm"] / churn["blocks"], 1), **steps},
            packages=("numpy", "vllm"),
        )
        print(path)


if __name__ == "__main__":
    main()
