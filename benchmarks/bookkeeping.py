"""How long the bookkeeping of one decode step takes, beside vLLM's KVCacheManager.

    python benchmarks/bookkeeping.py [--peer FOLDER]

FOLDER holds `vllm_bookkeeping.py`, which drives vLLM 0.23's KVCacheManager, in an environment where
vLLM can be imported; without it only ours is timed and no result is written.  Both do the same
work: every running sequence gets the token just sampled and room for it, a block where it needs one.
Ours and theirs take turns, so that a machine whose speed drifts does so for both, and the clock is
that of the one thread at work, so that other programs on the machine do not count.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import write_result
from paged_kv.block_manager import BlockManager

BLOCK_SIZE, MAX_LEN, STEPS, ROUNDS = 16, 4096, 64, 15
RUNNING = (1, 16, 64, 256, 1024)


def prompt_tokens(index: int) -> int:
    """Spread over all offsets in a block, so that a sixteenth of the rows grows in each step."""
    return 100 + index * 7 % 300


def ours(running: int) -> Callable[[], None]:
    """A function that does one decode step for `running` sequences."""
    manager = BlockManager(running * 200 + 100, BLOCK_SIZE, running, MAX_LEN)
    rows = np.array([manager.add(prompt_tokens(index)) for index in range(running)])
    tokens = np.zeros(running * MAX_LEN, np.int32)
    first = rows * MAX_LEN
    sampled = np.arange(running, dtype=np.int32)

    def step() -> None:
        tokens[first + manager.tables.seq_lens[rows]] = sampled
        manager.append(rows)

    return step


def theirs(running: int) -> Callable[[], None]:
    """The same by vLLM's KVCacheManager, prefix caching off."""
    from vllm_bookkeeping import VllmBookkeeping

    book = VllmBookkeeping(num_blocks=running * 200 + 100, block_size=BLOCK_SIZE, max_len=MAX_LEN, caching=False)
    requests = [book.request(index, range(prompt_tokens(index))) for index in range(running)]
    for request in requests:
        book.admit(request)
    sampled = list(range(running))

    def step() -> None:
        for request, token in zip(requests, sampled, strict=True):
            book.decode(request, token)

    return step


def mean_step_us(step: Callable[[], None]) -> float:
    """Mean over STEPS steps, four blocks' worth, so that taking blocks is in it."""
    start = time.thread_time()
    for _ in range(STEPS):
        step()
    return (time.thread_time() - start) / STEPS * 1e6


def main() -> None:
    """Time all sizes, print a table, write the JSON if the peer was there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="folder with vllm_bookkeeping.py")
    peer = parser.parse_args().peer
    if peer:
        sys.path.append(peer)
    rows = []
    for running in RUNNING:
        contestants = {"ours_us": ours(running), **({"vllm_us": theirs(running)} if peer else {})}
        times: dict[str, list[float]] = {name: [] for name in contestants}
        gc.collect()
        gc.disable()
        for _ in range(ROUNDS + 1):
            for name, step in contestants.items():
                times[name].append(mean_step_us(step))
        gc.enable()
        row = {"running": running} | {name: round(statistics.median(t[1:]), 2) for name, t in times.items()}
        if peer:
            row["x_vllm"] = round(row["vllm_us"] / row["ours_us"], 1)
        rows.append(row)
        print(row)
    if peer:
        by_size = {row["running"]: row for row in rows}
        headline = {f"x_vllm_{n}": by_size[n]["x_vllm"] for n in (64, 256, 1024)} | {"us_1": by_size[1]["ours_us"]}
        path = write_result(
            "bookkeeping",
            modules=["block_pool", "block_manager"],
            workload=f"one decode step, {BLOCK_SIZE}-token blocks, prompts of 100 to 399 tokens, prefix caching off; "
            "each sequence appends its sampled token and gets room for it",
            repeats=ROUNDS,
            statistic=f"median of {ROUNDS} means over {STEPS} steps, processor time of the thread, taking turns",
            rows=rows,
            headline=headline,
            packages=("numpy", "vllm"),
        )
        print(path)


if __name__ == "__main__":
    main()
