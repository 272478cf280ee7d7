"""Which idle block to evict: seven policies and the best possible, over the same streams of requests.

    python benchmarks/eviction.py [--mooncake FILE] [--only WORKLOAD]

FILE is conversation_trace.jsonl of github.com/kvcache-ai/Mooncake (FAST25-release/traces); without it the
made-up workloads are run and no result is written.  Requests are served one at a time: the leading blocks
of a prompt that are cached are hits, the others take places, evicting idle blocks where there is no room,
and then all of them are idle and findable.  Nothing is timed.  A hit rate is a share of prompt blocks.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import write_result
from paged_kv.trace_shapes import KIMI_CONVERSATION, KIMI_PAPER, Lognormal, generate
from paged_kv.traces import TraceRequest, read_mooncake, trace_stats

Chain = tuple[int, ...]  # the ids of a prompt's blocks; an id fixes all ids before it
NEVER = math.inf

# ------------------------------------------------------------------------------------------ policies


@dataclass(slots=True)
class Entry:
    """What a policy may know of a cached block."""

    depth: int  # place in its chain, 0 at the head
    born: int  # request that brought it
    last: int  # request that used it last
    uses: int
    next: float  # request that will use it next: only the bound may look
    worth: float = 0.0  # cost-aware: uses x cost, above the age when it was last used


Key = Callable[[Entry], tuple[float, ...]]

KEYS: dict[str, Key] = {
    "LRU, tail first": lambda e: (e.last, -e.depth),
    "LRU, head first": lambda e: (e.last, e.depth),
    "FIFO": lambda e: (e.born, -e.depth),
    "LFU": lambda e: (e.uses, e.last, -e.depth),
    "length-aware": lambda e: (e.uses, -e.depth, e.last),
    "cost-aware": lambda e: (e.worth, -e.depth),
    "Belady's bound": lambda e: (-e.next, -e.depth),
}
"""The block with the smallest key goes first."""

POLICIES = (*list(KEYS)[:-1], "ARC", "Belady's bound")


def block_cost(depth: int, block_tokens: int = 512) -> float:
    """Work to compute a block again, 1 for the first: weights, plus attention to all that is before.

    Of Llama 3 8B: 16 GFLOP a token for the weights, 4 x 32 layers x 4,096 for each earlier token.
    """
    return 1 + depth * block_tokens * (4 * 32 * 4096) / 16e9


class HeapCache:
    """Blocks with keys in a heap.

    State: `entries`, id -> Entry; a heap of (key, id) in which an entry counts only while its key is the
    block's own; for "cost-aware" also how many cached children each block has, since a key that grows
    with depth would evict parents first: only leaves go.
    """

    def __init__(self, capacity: int, policy: str) -> None:
        self.capacity, self.key = capacity, KEYS[policy]
        self.costed = policy == "cost-aware"
        self.entries: dict[int, Entry] = {}
        self.heap: list[tuple[tuple[float, ...], int]] = []
        self.children: defaultdict[int, int] = defaultdict(int)
        self.parent: dict[int, int] = {}
        self.age = 0.0
        self.now = 0

    def serve(self, chain: Chain, next_use: Callable[[int], float]) -> int:
        """One request; return its hits.  A prompt longer than the pool keeps what fits."""
        chain, self.now = chain[: self.capacity], self.now + 1
        hits = leading(chain, self.entries)
        missing = sum(block not in self.entries for block in chain)
        self.evict(len(self.entries) + missing - self.capacity, set(chain))
        for depth, block in enumerate(chain):
            entry = self.entries.get(block)
            old = self.key(entry) if entry else None
            if entry is None:
                entry = self.entries[block] = Entry(depth, self.now, self.now, 0, NEVER)
                if self.costed and depth:
                    self.parent[block] = chain[depth - 1]
                    self.children[chain[depth - 1]] += 1
            entry.last, entry.uses, entry.next = self.now, entry.uses + 1, next_use(block)
            if self.costed:
                entry.worth = self.age + entry.uses * block_cost(depth)
            if (key := self.key(entry)) != old:
                heapq.heappush(self.heap, (key, block))
        return hits

    def evict(self, count: int, pinned: set[int]) -> None:
        """Drop the `count` blocks with the smallest keys that are not pinned."""
        kept = []
        while count > 0:
            key, block = heapq.heappop(self.heap)
            entry = self.entries.get(block)
            if entry is None or self.key(entry) != key or (self.costed and self.children[block]):
                continue
            if block in pinned:
                kept.append((key, block))
                continue
            del self.entries[block]
            count -= 1
            if self.costed:
                self.age = key[0]
                self._leaf_again(self.parent.pop(block, -1))
        for item in kept:
            heapq.heappush(self.heap, item)

    def _leaf_again(self, block: int) -> None:
        if block in self.entries:
            self.children[block] -= 1
            if not self.children[block]:
                heapq.heappush(self.heap, (self.key(self.entries[block]), block))


class ArcCache:
    """ARC (Megiddo and Modha, FAST 2003): `once` and `often` share the pool, and ghosts move the border.

    State: `once` and `often`, cached ids, least recent first; `once_gone` and `often_gone`, ids evicted
    from each; `target`, the size that `once` should have.  A chain is used tail first, so that its head is
    the more recent; blocks of the request being served are passed over.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.target = capacity, 0.0
        self.once, self.often, self.once_gone, self.often_gone = (OrderedDict[int, None]() for _ in range(4))

    def serve(self, chain: Chain, next_use: Callable[[int], float]) -> int:
        """One request; return its hits."""
        chain = chain[: self.capacity]
        hits = next((i for i, b in enumerate(chain) if b not in self.once and b not in self.often), len(chain))
        pinned, missing = set(chain), []
        for block in reversed(chain):
            if block in self.once or block in self.often:
                self.once.pop(block, None)
                self.often.pop(block, None)
                self.often[block] = None
            else:
                missing.append(block)
        for block in missing:
            self._bring(block, pinned)
        return hits

    def _bring(self, block: int, pinned: set[int]) -> None:
        once_gone, often_gone = self.once_gone, self.often_gone
        if block in once_gone:
            self.target = min(self.capacity, self.target + max(1, len(often_gone) / len(once_gone)))
        elif block in often_gone:
            self.target = max(0, self.target - max(1, len(once_gone) / len(often_gone)))
        elif len(self.once) + len(once_gone) >= self.capacity and once_gone:
            once_gone.popitem(last=False)
        elif len(self.once) + len(self.often) + len(once_gone) + len(often_gone) >= 2 * self.capacity:
            (often_gone or once_gone).popitem(last=False)
        if len(self.once) + len(self.often) >= self.capacity:
            self._replace(pinned, block in often_gone)
        seen = block in once_gone or block in often_gone
        once_gone.pop(block, None)
        often_gone.pop(block, None)
        (self.often if seen else self.once)[block] = None

    def _replace(self, pinned: set[int], tie: bool) -> None:
        first = len(self.once) > self.target or (tie and len(self.once) == self.target)
        sides = [(self.once, self.once_gone), (self.often, self.often_gone)]
        for cached, ghosts in sides if first else sides[::-1]:
            victim = next((block for block in cached if block not in pinned), None)
            if victim is not None:
                del cached[victim]
                ghosts[victim] = None
                return
        raise AssertionError("every cached block is pinned")


def leading(chain: Chain, cached: Any) -> int:
    """Blocks of `chain` that are cached, up to the first that is not."""
    for index, block in enumerate(chain):
        if block not in cached:
            return index
    return len(chain)


def make_cache(policy: str, capacity: int) -> HeapCache | ArcCache:
    """An empty cache."""
    return ArcCache(capacity) if policy == "ARC" else HeapCache(capacity, policy)


def replay(chains: Sequence[Chain], policy: str, capacity: int) -> list[int]:
    """Hits of each request."""
    cache = make_cache(policy, capacity)
    uses: defaultdict[int, list[int]] = defaultdict(list)
    if policy == "Belady's bound":
        for number in range(len(chains) - 1, -1, -1):
            for block in chains[number]:
                uses[block].append(number)
    hits = []
    for chain in chains:
        for block in chain if uses else ():
            uses[block].pop()  # this use
        hits.append(cache.serve(chain, lambda block: uses[block][-1] if uses.get(block) else NEVER))
    return hits


def hit_rate(chains: Sequence[Chain], policy: str, capacity: int) -> float:
    """Share of all blocks that were hits."""
    return sum(replay(chains, policy, capacity)) / sum(map(len, chains))


# ------------------------------------------------------------------------------------------ workloads


def agent_loop(
    seed: int, sessions: int = 500, turns: int = 8, at_once: int = 64, block_tokens: int = 64
) -> list[Chain]:
    """Sessions behind one 3,000-token tool block; each turn adds 400 tokens, answer and tool result.

    `at_once` sessions are open, a random one of them takes the next turn, and a finished one makes room.
    """
    rng, ids = np.random.default_rng(seed), itertools.count()
    tools = tuple(itertools.islice(ids, 3000 // block_tokens))
    waiting, chains = sessions, []
    active: list[tuple[int, Chain]] = []
    while waiting or active:
        while waiting and len(active) < at_once:
            active.append((0, tools))
            waiting -= 1
        turn, before = active.pop(int(rng.integers(len(active))))
        blocks = -(-(3200 + 400 * turn) // block_tokens)
        kept = before if turn == 0 else before[: (3200 + 400 * (turn - 1)) // block_tokens]
        chain = kept + tuple(itertools.islice(ids, blocks - len(kept)))
        chains.append(chain)
        if turn + 1 < turns:
            active.append((turn + 1, chain))
    return chains


def shared_mix(seed: int, requests: int = 4000, openings: int = 200, block_tokens: int = 64) -> list[Chain]:
    """Tenants with system prompts, Zipf-popular, and one request in five a long document never seen again."""
    rng, ids = np.random.default_rng(seed), itertools.count()
    opening, own = Lognormal(2000, 0.7), Lognormal(500, 0.7)
    prompts = [tuple(itertools.islice(ids, max(1, int(opening.draw(rng)) // block_tokens))) for _ in range(openings)]
    weights = np.arange(1, openings + 1) ** -1.0
    chosen = rng.choice(openings, requests, p=weights / weights.sum())
    document = rng.random(requests) < 0.2
    chains = []
    for which, is_document in zip(chosen.tolist(), document.tolist(), strict=True):
        tokens = 8000 if is_document else own.draw(rng)
        tail = tuple(itertools.islice(ids, -(-int(tokens) // block_tokens)))
        chains.append(tail if is_document else prompts[which] + tail)
    return chains


def chains_of(requests: Iterable[TraceRequest]) -> list[Chain]:
    """The block ids of a trace."""
    return [request.prefix_ids for request in requests]


WORKLOADS: dict[str, tuple[Callable[[int], list[Chain]], tuple[int, ...], int]] = {
    "agent loop": (agent_loop, (400, 800, 1600, 3200), 2),
    "shared-prefix mix": (shared_mix, (500, 1000, 2000, 4000), 2),
    "generated, Kimi paper": (
        lambda seed: chains_of(generate(KIMI_PAPER, 23_608, seed)),
        (1000, 3000, 10_000, 30_000),
        1,
    ),
    "generated, conversation": (
        lambda seed: chains_of(generate(KIMI_CONVERSATION, 12_031, seed)),
        (1000, 3000, 10_000, 30_000),
        1,
    ),
}
"""What makes the requests from a seed, the pool sizes, how many seeds."""

RECORDED = "Mooncake conversation, recorded"


# ------------------------------------------------------------------------------------------ fit


def fit(trace: Sequence[TraceRequest]) -> dict[str, float]:
    """What the generator's shape needs, counted in a recorded trace; no cache is involved.

    A request returns where more than one leading block had come before; its last turn is the latest
    request with the deepest of those.
    """
    last: dict[int, TraceRequest] = {}
    first, added, pauses = [], [], []
    for request in trace:
        known = leading(request.prefix_ids, last)
        if known > 1:
            before = last[request.prefix_ids[known - 1]]
            added.append(request.input_length - before.input_length - before.output_length)
            pauses.append(request.arrival_s - before.arrival_s)
        else:
            first.append(request.input_length - 512 * known)
        last.update(dict.fromkeys(request.prefix_ids, request))
    more = [tokens for tokens in added if tokens > 0]
    return {
        "continues": round(len(added) / len(trace), 3),
        "first_mean": round(float(np.mean(first)), 1),
        "first_sigma": round(float(np.log(np.maximum(first, 1)).std()), 3),
        "added_mean": round(float(np.mean(more)), 1),
        "added_sigma": round(float(np.log(more).std()), 3),
        "added_something": round(len(more) / len(added), 3),
        "pause_mean_s": round(float(np.mean(pauses)), 1),
        "pause_sigma": round(float(np.log(np.maximum(pauses, 1)).std()), 3),
    }


# ------------------------------------------------------------------------------------------ main


def measure(name: str, streams: list[list[Chain]], sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """A row for each policy and pool size: mean over the streams, smallest and largest."""
    for policy, blocks in itertools.product(POLICIES, sizes):
        rates = [100 * hit_rate(chains, policy, blocks) for chains in streams]
        yield {
            "workload": name,
            "policy": policy,
            "blocks": blocks,
            "hit_rate": round(sum(rates) / len(rates), 2),
            "from": round(min(rates), 2),
            "to": round(max(rates), 2),
        }


def unlimited(chains: Sequence[Chain]) -> float:
    """Percent of the blocks that had come before."""
    return round(100 * (1 - len({block for chain in chains for block in chain}) / sum(map(len, chains))), 2)


def gaps(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Points of hit rate, tail-first LRU less each other policy: mean over all rows of the workload."""
    rate = {(row["workload"], row["policy"], row["blocks"]): row["hit_rate"] for row in rows}
    found = {}
    for name in dict.fromkeys(row["workload"] for row in rows):
        sizes = [blocks for workload, policy, blocks in rate if (workload, policy) == (name, POLICIES[0])]
        for policy in POLICIES[1:]:
            gap = [rate[name, POLICIES[0], blocks] - rate[name, policy, blocks] for blocks in sizes]
            found[f"{name}: {policy}"] = round(math.fsum(gap) / len(gap), 2)
    return found


def main() -> None:
    """Replay all, print a line each, write the JSON if the recorded trace was there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mooncake", help="conversation_trace.jsonl")
    parser.add_argument("--only", help="one workload; nothing is written")
    options = parser.parse_args()
    streams = {
        name: ([make(seed) for seed in range(seeds)], sizes)
        for name, (make, sizes, seeds) in WORKLOADS.items()
        if options.only in (None, name)
    }
    trace = list(read_mooncake(options.mooncake)) if options.mooncake else []
    if trace:
        streams[RECORDED] = ([chains_of(trace)], WORKLOADS["generated, conversation"][1])
    rows, ceilings = [], {}
    for name, (chains, sizes) in streams.items():
        ceilings[name] = round(float(np.mean([unlimited(each) for each in chains])), 2)
        print(f"{name}: unlimited {ceilings[name]} %", flush=True)
        for row in measure(name, chains, sizes):
            rows.append(row)
            print(f"  {row['policy']:16} {row['blocks']:6} blocks {row['hit_rate']:6.2f} %", flush=True)
    if not trace or options.only:
        return
    path = write_result(
        "eviction",
        modules=["traces", "trace_shapes"],
        workload="requests served one at a time; agent loop and shared-prefix mix in blocks of 64 tokens, "
        "the others of 512; a block of a prompt that is cached behind cached blocks is a hit",
        repeats=max(seeds for _, _, seeds in WORKLOADS.values()),
        statistic="share of prompt blocks, %, mean over seeds (traces: one), with smallest and largest",
        rows=rows,
        headline={"lead_of_default_points": gaps(rows)},
        packages=("numpy",),
        unlimited=ceilings,
        fit=fit(trace),
        stats={
            "generated, Kimi paper": asdict(trace_stats(generate(KIMI_PAPER, 23_608))),
            "generated, conversation": asdict(trace_stats(generate(KIMI_CONVERSATION, 12_031))),
            RECORDED: asdict(trace_stats(trace)),
        },
    )
    print(path)


if __name__ == "__main__":
    main()
