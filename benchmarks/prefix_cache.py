"""The whole bookkeeping of shared prompts, beside vLLM's KVCacheManager; and what a key costs.

    python benchmarks/prefix_cache.py [--peer FOLDER] [--quick]

FOLDER holds `vllm_bookkeeping.py`, which drives vLLM 0.23's KVCacheManager, in an environment where
vLLM can be imported; without it only ours is timed and no result is written.  Both get the tokens as a
tokenizer gives them, as lists, and do the same work for each request: name its blocks, look them up,
allocate, decode DECODED tokens in a batch of RUNNING requests, publish what fills, release.
Ours and theirs take turns, and the clock is that of the one thread at work, so that other programs on
the machine do not count.

The headline is the quotient of the whole bookkeeping (key, match, allocate, decode, release) at DECODED tokens a
request.  The quotient depends on that number, since a step of decoding costs us less and them more than anything else
does; so both workloads are run with each number of SWEEP too, and all quotients are stored.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import write_result
from paged_kv.block_manager import BlockManager
from paged_kv.prefix_cache import PrefixCache, admit_cached, give_back, publish_filled, publish_full
from paged_kv.prefix_keys import KeyTree, split_chunks, token_array

BLOCK_SIZE, MAX_LEN, VOCAB = 16, 8192, 32_000
RUNNING, DECODED = 64, 64  # requests at a time; tokens each, about the mean answer to an Alpaca prompt
SWEEP = (1, 16, 64, 256)
POOL = 8192
Wave = list[tuple[str, list[int]]]


def shared_prompt(requests: int = 2000) -> Iterator[Wave]:
    """(a) 2,000 shared tokens and 100 own ones."""
    draw = random.Random(1)
    shared = draw.choices(range(VOCAB), k=2000)
    names = [f"a{index}" for index in range(requests)]
    for start in range(0, requests, RUNNING):
        yield [(name, shared + draw.choices(range(VOCAB), k=100)) for name in names[start : start + RUNNING]]


def agent_sessions(sessions: int = 500, turns: int = 8, active: int = 128, decoded: int = DECODED) -> Iterator[Wave]:
    """(b) Sessions behind a 3,000-token tool block; each turn repeats all before it and adds a message.

    `active` sessions are under way at a time and take turns in random order.
    """
    draw = random.Random(2)
    tools = draw.choices(range(VOCAB), k=3000)
    waiting, history = list(range(sessions)), {}
    under_way: list[int] = []
    while waiting or under_way:
        while waiting and len(under_way) < active:
            session = waiting.pop(0)
            under_way.append(session)
            history[session] = (list(tools), 0)
        wave = []
        for session in draw.sample(under_way, min(RUNNING, len(under_way))):
            tokens, turn = history[session]
            prompt = tokens + draw.choices(range(VOCAB), k=draw.randint(40, 200))
            wave.append((f"b{session}.{turn}", prompt))
            answer = [sampled(f"b{session}.{turn}", step) for step in range(decoded)]
            history[session] = (prompt + answer, turn + 1)
            if turn + 1 == turns:
                under_way.remove(session)
                del history[session]
        yield wave


def sampled(name: str, step: int) -> int:
    """The token that request `name` samples at `step`; both sides get the same."""
    return (hash_name(name) * 31 + step * 7919) % VOCAB


def hash_name(name: str) -> int:
    """A number for a name, the same in every process."""
    return sum(ord(char) * 131**place for place, char in enumerate(name[::-1]))


class Ours:
    """This book's bookkeeping."""

    def __init__(self, num_blocks: int) -> None:
        self.manager = BlockManager(num_blocks, BLOCK_SIZE, RUNNING, MAX_LEN)
        self.cache = PrefixCache(self.manager.pool, BLOCK_SIZE)
        self.tokens = np.zeros((RUNNING, MAX_LEN), np.int32)
        self.published = np.zeros(RUNNING, np.int64)
        self.roots = [b""] * RUNNING
        self.hits = 0

    def run(self, wave: Wave, outputs: list[list[int]], lap: Callable[[str], None]) -> None:
        """Serve one wave; `outputs` [decoded][wave] are the tokens it samples."""
        manager, cache = self.manager, self.cache
        rows = []
        for _, prompt in wave:
            tokens = token_array(prompt)
            lap("key")
            row, found = admit_cached(manager, cache, tokens)
            self.hits += found
            lap("allocate")
            self.tokens[row, : len(tokens)] = tokens
            self.published[row] = publish_full(manager, cache, row, tokens, found // BLOCK_SIZE)
            lap("publish")
            rows.append(row)
        batch = np.array(rows)
        for output in outputs:
            lens = manager.tables.seq_lens[batch]
            self.tokens[batch, lens] = output
            cache.forget(manager.append(batch))
            full = batch[(lens + 1) % BLOCK_SIZE == 0]
            if len(full):
                publish_filled(manager, cache, full, self.tokens, self.published, self.roots[: len(full)])
        lap("decode")
        for row in rows:
            give_back(manager, row)
        lap("release")


class Theirs:
    """vLLM's KVCacheManager, driven as its scheduler drives it."""

    def __init__(self, num_blocks: int) -> None:
        from vllm_bookkeeping import VllmBookkeeping

        self.book = VllmBookkeeping(num_blocks, BLOCK_SIZE, MAX_LEN, caching=True, hash_name="sha256")
        self.hits = 0

    def run(self, wave: Wave, outputs: list[list[int]], lap: Callable[[str], None]) -> None:
        """Serve one wave."""
        book, requests = self.book, []
        for name, prompt in wave:
            request = book.request(name, prompt)
            lap("key")
            found = book.admit(request)
            assert found is not None
            self.hits += found
            requests.append(request)
            lap("allocate")
        for output in outputs:
            for request, token in zip(requests, output, strict=True):
                assert book.decode(request, token)
        lap("decode")
        for request in requests:
            book.finish(request)
        lap("release")


def no_lap(name: str) -> None:
    """Takes no time: for runs that are timed as a whole."""


class Laps:
    """Time per component: what passed since the last lap goes to its name."""

    def __init__(self) -> None:
        self.total: dict[str, float] = {}
        self.last = time.thread_time()

    def __call__(self, name: str) -> None:
        """What passed since the last lap was `name`."""
        now = time.thread_time()
        self.total[name] = self.total.get(name, 0.0) + now - self.last
        self.last = time.thread_time()


def contest(waves: list[Wave], sides: dict[str, Any], decoded: int = DECODED) -> tuple[dict[str, float], float]:
    """Microseconds a request of each side, wave by wave in turns; and the median of the quotients."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for wave in waves:
        outputs = [[sampled(name, step) for name, _ in wave] for step in range(decoded)]
        for name, side in sides.items():
            start = time.thread_time()
            side.run(wave, outputs, no_lap)
            times[name].append((time.thread_time() - start) / len(wave) * 1e6)
    us = {name: statistics.median(each) for name, each in times.items()}
    pairs = zip(times["ours"], times.get("vllm", times["ours"]), strict=True)
    return us, statistics.median(theirs / ours for ours, theirs in pairs)


def components(waves: list[Wave], sides: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Microseconds a request and component: median over the waves."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in sides}
    for wave in waves:
        outputs = [[sampled(name, step) for name, _ in wave] for step in range(DECODED)]
        for name, side in sides.items():
            lap = Laps()
            side.run(wave, outputs, lap)
            for part, seconds in lap.total.items():
                found[name].setdefault(part, []).append(seconds / len(wave) * 1e6)
    return {name: {part: round(statistics.median(t), 1) for part, t in each.items()} for name, each in found.items()}


def chained(digest: Callable[[bytes], bytes]) -> Callable[[Any, dict[Any, int]], int]:
    """A walk over blocks keyed by a digest of (parent's digest, tokens), one dictionary look-up each."""

    def walk(tokens: Any, table: dict[Any, int]) -> int:
        data, key, found = token_array(tokens).tobytes(), b"", 0
        for start in range(0, len(data), 4 * BLOCK_SIZE):
            key = digest(key + data[start : start + 4 * BLOCK_SIZE])
            found += table.setdefault(key, 0) >= 0
        return found

    return walk


def checked_hash(digest: Callable[[bytes], int]) -> Callable[[Any, dict[Any, Any]], int]:
    """A walk keyed by a short hash; parent and tokens are stored beside it and compared on a hit."""

    def walk(tokens: Any, table: dict[Any, Any]) -> int:
        data, parent, found = token_array(tokens).tobytes(), -1, 0
        for start in range(0, len(data), 4 * BLOCK_SIZE):
            chunk = data[start : start + 4 * BLOCK_SIZE]
            key = digest(parent.to_bytes(8, "little", signed=True) + chunk)
            node, above, held = table.setdefault(key, (len(table), parent, chunk))
            assert (above, held) == (parent, chunk)
            parent, found = node, found + 1
        return found

    return walk


def interning(tokens: Any, table: dict[Any, int]) -> int:
    """A walk keyed by (parent's id, tokens) itself."""
    parent, found = -1, 0
    for chunk in split_chunks(token_array(tokens), BLOCK_SIZE):
        parent = table.setdefault((parent, chunk), len(table))
        found += 1
    return found


def tree_of_bytes(tokens: Any, table: dict[Any, Any]) -> int:
    """A walk of our KeyTree, which keeps the nodes of a parent with the parent."""
    tree = table.setdefault("tree", KeyTree())
    return len(list(tree.intern([b""], split_chunks(token_array(tokens), BLOCK_SIZE))))


def tuples(tokens: Any, table: dict[Any, int]) -> int:
    """A walk keyed by (parent's id, tuple of token ids): no conversion of a list."""
    tokens, parent, found = tokens if isinstance(tokens, list) else tokens.tolist(), -1, 0
    for start in range(0, len(tokens), BLOCK_SIZE):
        parent = table.setdefault((parent, tuple(tokens[start : start + BLOCK_SIZE])), len(table))
        found += 1
    return found


def candidates() -> tuple[dict[str, Callable[[Any, dict[Any, Any]], int]], dict[str, str]]:
    """The ways to name a block; and why one of them is missing here."""
    ways: dict[str, Callable[[Any, dict[Any, Any]], int]] = {
        "SHA-256": chained(lambda data: hashlib.sha256(data).digest()),
        "BLAKE2b": chained(lambda data: hashlib.blake2b(data, digest_size=32).digest()),
    }
    missing = {}
    try:
        import blake3

        ways["BLAKE3"] = chained(lambda data: blake3.blake3(data).digest())
    except ImportError:
        missing["BLAKE3"] = "the package blake3 is not installed"
    try:
        import xxhash

        ways["xxh3, tokens compared"] = checked_hash(xxhash.xxh3_64_intdigest)
    except ImportError:
        missing["xxh3, tokens compared"] = "the package xxhash is not installed"
    return ways | {
        "interning of tuples": tuples,
        "interning of bytes": interning,
        "a tree of bytes": tree_of_bytes,
    }, missing


def key_costs(peer: bool, rounds: int) -> list[dict[str, Any]]:
    """Microseconds a block to name and look up 128 known blocks, of lists and of int32 arrays; and to name new ones.

    Each round takes a prompt of its own: tokens that were just read would sit in the fastest cache.  New blocks are
    named beside all that were named before, from arrays.
    """
    draw = random.Random(3)
    prompts = [draw.choices(range(VOCAB), k=2048) for _ in range(64)]
    arrays = [np.array(prompt, np.int32) for prompt in prompts]
    ways, missing = candidates()
    if peer:
        from vllm_bookkeeping import VllmBookkeeping

        book = VllmBookkeeping(256, BLOCK_SIZE, MAX_LEN, caching=True, hash_name="sha256")
        requests = [book.request(str(at), prompt) for at, prompt in enumerate(prompts)]
    times: dict[tuple[str, str], list[float]] = {}
    tables: dict[str, dict[Any, Any]] = {name: {} for name in ways}
    for name, walk in ways.items():
        for prompt in prompts:
            walk(prompt, tables[name])

    def clock(name: str, form: str, action: Callable[[], Any]) -> None:
        start = time.thread_time()
        action()
        times.setdefault((name, form), []).append((time.thread_time() - start) / len(prompts) / 128 * 1e6)

    for _ in range(rounds):
        for name, walk in ways.items():
            for form, batch in (("lists", prompts), ("arrays", arrays)):
                table = tables[name]
                clock(name, form, lambda walk=walk, table=table, batch=batch: [walk(each, table) for each in batch])
        fresh = [np.array(draw.choices(range(VOCAB), k=2048), np.int32) for _ in prompts]
        for name, walk in ways.items():
            clock(name, "new", lambda walk=walk, table=tables[name], batch=fresh: [walk(each, table) for each in batch])
        if peer:
            for request in requests:
                request.block_hashes.clear()
            clock("vLLM 0.23, SHA-256", "lists", lambda: [request.update_block_hashes() for request in requests])
    rows: dict[str, dict[str, Any]] = {}
    for (name, form), each in times.items():
        rows.setdefault(name, {"key": name})[f"us_block_{form}"] = round(statistics.median(each), 3)
    return [*rows.values(), *({"key": name, "skipped": reason} for name, reason in missing.items())]


def sweep(kinds: dict[str, Any], share: int) -> list[dict[str, Any]]:
    """Both workloads once for each number of decoded tokens."""
    rows = []
    for decoded in SWEEP:
        shared, agent = shared_prompt(2000 // share), agent_sessions(500 // share, decoded=decoded)
        for name, waves in (("shared", list(shared)), ("agent", list(agent))):
            pool = POOL if name == "shared" or decoded <= DECODED else 2 * POOL  # long answers of all 64 would not fit
            us, quotient = contest(waves, {side: kind(pool) for side, kind in kinds.items()}, decoded)
            row: dict[str, Any] = {"workload": name, "decoded": decoded, "blocks": pool, "x_vllm": round(quotient, 2)}
            rows.append(row | {f"us_request_{side}": round(each, 1) for side, each in us.items()})
            print(rows[-1])
    return rows


def main() -> None:
    """Time keys, then both workloads, print tables, write the JSON if the peer was there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="folder with vllm_bookkeeping.py")
    parser.add_argument("--quick", action="store_true", help="a tenth of the requests, once; no result is written")
    asked = parser.parse_args()
    if asked.peer:
        sys.path.append(asked.peer)
    kinds = {"ours": Ours, **({"vllm": Theirs} if asked.peer else {})}
    share, repeats = (10, 1) if asked.quick else (1, 3)
    workloads = {"shared": list(shared_prompt(2000 // share)), "agent": list(agent_sessions(500 // share))}
    gc.collect()
    gc.disable()
    keys = key_costs(bool(asked.peer), 5 * repeats)
    for row in keys:
        print(row)
    rows, headline = [], {}
    for name, waves in workloads.items():
        queried = sum(len(prompt) for wave in waves for _, prompt in wave)
        rounds = []
        for _ in range(repeats):
            sides = {side: kind(POOL) for side, kind in kinds.items()}
            rounds.append((*contest(waves, sides), {side: each.hits / queried for side, each in sides.items()}))
        times, quotients, hit_rates = zip(*rounds, strict=True)
        parts = components(waves, {side: kind(POOL) for side, kind in kinds.items()})
        row: dict[str, Any] = {"workload": name, "requests": sum(map(len, waves)), "tokens": queried}
        for side in kinds:
            row[f"us_request_{side}"] = round(statistics.median(each[side] for each in times), 1)
            row[f"hit_rate_{side}"] = round(hit_rates[0][side], 6)
            row[f"parts_{side}"] = parts[side]
        row["x_vllm"] = round(statistics.median(quotients), 2)
        row["x_vllm_rounds"] = [round(each, 2) for each in quotients]
        rows.append(row)
        print(row)
        headline |= {f"x_vllm_{name}": row["x_vllm"], f"hit_rate_{name}": row["hit_rate_ours"]}
    by_decoded = sweep(kinds, share)
    if not asked.peer or asked.quick:
        return
    us = {row["key"]: row.get("us_block_lists") for row in keys}
    headline["x_vllm_hash_tokens"] = round(us["vLLM 0.23, SHA-256"] / us["a tree of bytes"], 1)
    path = write_result(
        "prefix_cache",
        modules=["block_pool", "block_tables", "block_manager", "prefix_keys", "block_names", "prefix_cache"],
        workload=f"{BLOCK_SIZE}-token blocks, {POOL} of them, {RUNNING} requests at once, {DECODED} tokens decoded. "
        "shared: 2,000 requests of 2,000 shared + 100 own tokens; agent: 500 sessions x 8 turns behind 3,000 tokens, "
        "40 to 200 new tokens a turn, 128 sessions under way. Tokens as lists. Sweep: other numbers of decoded tokens. "
        "Keys: 128 known blocks named and looked up, and new ones named; vLLM's row names known ones only",
        repeats=repeats,
        statistic="median over waves of requests, processor time of the thread, taking turns; x_vllm: median quotient",
        rows=rows,
        headline=headline,
        packages=("numpy", "vllm", "blake3", "xxhash"),
        keys=keys,
        sweep=by_decoded,
    )
    print(path)


if __name__ == "__main__":
    main()
