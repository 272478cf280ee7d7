"""What it costs to fork sequences and to reorder beams: block tables beside transformers' DynamicCache.

    python benchmarks/copy_on_write.py

Two cases, the cache's part of a step only, no model.  Fork: 1,000 sequences from one, and the first
token of each.  Beam step: 256 searches of 4 beams, parents drawn at random, and one token each.
Ours: rows forked or rewired, tails made writable, blocks copied, the tokens' K/V stored.  Theirs:
`batch_repeat_interleave` or `reorder_cache`, then `update`.  Both move real bytes of one shape and
take turns.  Without a GPU of 100 GiB only the small shape is run, on the CPU, and no result is written;
with one, the shape of SmolLM2-135M too, prompts of 2,010 tokens.  Last, how long one fork takes.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import DynamicCache

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import write_result
from paged_kv.block_manager import BlockManager
from paged_kv.block_tables import slot_mapping
from paged_kv.copy_on_write import blocks_held, fork, fork_many, make_writable, rewire
from paged_kv.kv_store import KVStore
from paged_kv.sizing import KVSpec, MiB

BLOCK_SIZE, FORKS, SEARCHES, BEAMS, ROUNDS = 16, 1000, 256, 4, 5


class Tables:
    """Our side: a manager and a store, and how many blocks were copied."""

    def __init__(self, spec: KVSpec, prompt: int, searches: int, rows: int, device: str) -> None:
        blocks = searches * -(-prompt // BLOCK_SIZE) + 4 * rows
        self.spec, self.device = spec, device
        self.manager = BlockManager(blocks, BLOCK_SIZE, rows, prompt + 64 * BLOCK_SIZE)
        self.store = KVStore(spec, blocks, BLOCK_SIZE, device, fill=0.0)
        self.copied = 0
        self.ids_ms = 0.0

    def grow(self, rows: list[int] | np.ndarray, token: torch.Tensor, start: float) -> None:
        """One token more for each of `rows`; the step's bookkeeping began at `start`."""
        manager = self.manager
        pairs = make_writable(manager, rows)
        manager.append(rows)
        self.ids_ms = (time.perf_counter() - start) * 1e3
        self.store.copy_blocks(pairs)
        self.copied += len(pairs)
        at = manager.tables.seq_lens[rows] - 1
        slots = torch.from_numpy(slot_mapping(manager.tables.table, rows, at, BLOCK_SIZE)).to(self.device)
        for layer in range(self.spec.num_layers):
            self.store.write(layer, token, token, slots)

    def bytes_moved(self) -> int:
        """Bytes written by copies since the last call."""
        copied, self.copied = self.copied, 0
        return copied * BLOCK_SIZE * self.spec.bytes_per_token

    def bytes_held(self) -> int:
        """Bytes of the blocks that open rows hold."""
        rows = np.flatnonzero(self.manager.tables.seq_lens >= 0)
        return len(blocks_held(self.manager, rows)) * BLOCK_SIZE * self.spec.bytes_per_token


def whole_caches(spec: KVSpec, prompt: int, sequences: int, device: str, dtype: torch.dtype) -> DynamicCache:
    """A DynamicCache of `sequences` prompts, filled."""
    cache = DynamicCache()
    shape = (sequences, spec.num_kv_heads, prompt, spec.head_size)
    for layer in range(spec.num_layers):
        keys, values = (torch.zeros(shape, dtype=dtype, device=device) for _ in "KV")
        cache.update(keys, values, layer)
    return cache


def add_token(cache: DynamicCache, token: torch.Tensor, layers: int) -> None:
    """One token more for each sequence of the batch."""
    for layer in range(layers):
        cache.update(token[:, :, None], token[:, :, None], layer)


def stay_in_place(parents: np.ndarray) -> np.ndarray:
    """Permute each search's parents so that a beam's first child keeps the beam's own row."""
    placed = np.full_like(parents, -1)
    for search, chosen in enumerate(parents.tolist()):
        kept = set(chosen)
        rest = list(chosen)
        for beam in kept:
            placed[search, beam] = beam
            rest.remove(beam)
        placed[search, placed[search] < 0] = rest
    return placed


def timed(device: str, action: Callable[..., None], *arguments: object) -> float:
    """Milliseconds of one call, the device's work included."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    action(*arguments)
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def fork_tables(ours: Tables, parent: int, token: torch.Tensor) -> None:
    """Fork `parent` FORKS times and store one token each."""
    start = time.perf_counter()
    children = fork_many(ours.manager, [parent] * FORKS)
    ours.grow(children, token, start)


def fork_caches(cache: DynamicCache, token: torch.Tensor, layers: int) -> None:
    """Repeat the one cache FORKS times and store one token each."""
    cache.batch_repeat_interleave(FORKS)
    add_token(cache, token, layers)


def rewire_tables(ours: Tables, rows: np.ndarray, parents: np.ndarray, token: torch.Tensor) -> None:
    """One beam step over tables."""
    start = time.perf_counter()
    rewire(ours.manager, rows, parents)
    ours.grow(rows, token, start)


def reorder_caches(cache: DynamicCache, order: torch.Tensor, token: torch.Tensor, layers: int) -> None:
    """One beam step over whole caches."""
    cache.reorder_cache(order)
    add_token(cache, token, layers)


def fork_case(spec: KVSpec, prompt: int, device: str, dtype: torch.dtype) -> dict[str, object]:
    """1,000 sequences from one, and the first token of each."""
    ours = Tables(spec, prompt, 1, FORKS + 1, device)
    parent = ours.manager.add(prompt)
    token = torch.ones(FORKS, spec.num_kv_heads, spec.head_size, dtype=dtype, device=device)
    times: dict[str, list[float]] = {"ours": [], "theirs": [], "bookkeeping": []}
    moved = held = 0
    for _ in range(ROUNDS + 1):
        times["ours"].append(timed(device, fork_tables, ours, parent, token))
        times["bookkeeping"].append(ours.ids_ms)
        moved, held = ours.bytes_moved(), ours.bytes_held()
        for row in np.flatnonzero(ours.manager.tables.seq_lens >= 0).tolist():
            if row != parent:
                ours.manager.finish(row)
        cache = whole_caches(spec, prompt, 1, device, dtype)
        times["theirs"].append(timed(device, fork_caches, cache, token, spec.num_layers))
        cache = None
        gc.collect()
    their_bytes = FORKS * prompt * spec.bytes_per_token
    return summary(f"fork {FORKS:,}, first token", device, times, moved, their_bytes, held)


def beam_case(spec: KVSpec, prompt: int, device: str, dtype: torch.dtype) -> dict[str, object]:
    """256 searches of 4 beams: parents at random, one token each."""
    ours = Tables(spec, prompt, SEARCHES, SEARCHES * BEAMS, device)
    roots = [ours.manager.add(prompt) for _ in range(SEARCHES)]
    rows = np.array([[root, *fork_many(ours.manager, [root] * (BEAMS - 1))] for root in roots])
    token = torch.ones(SEARCHES * BEAMS, spec.num_kv_heads, spec.head_size, dtype=dtype, device=device)
    cache = whole_caches(spec, prompt, SEARCHES * BEAMS, device, dtype)
    rng = np.random.default_rng(0)
    times: dict[str, list[float]] = {"ours": [], "theirs": [], "bookkeeping": []}
    moved = []
    ours.grow(rows.reshape(-1), token, 0.0)
    ours.bytes_moved()
    for step in range(4 * ROUNDS):  # ours takes more steps than a block has slots
        chosen = rng.integers(0, BEAMS, (SEARCHES, BEAMS))
        parents = np.take_along_axis(rows, stay_in_place(chosen), 1).reshape(-1)
        times["ours"].append(timed(device, rewire_tables, ours, rows.reshape(-1), parents, token))
        times["bookkeeping"].append(ours.ids_ms)
        moved.append(ours.bytes_moved())
        if step <= ROUNDS:
            order = torch.from_numpy((chosen + np.arange(SEARCHES)[:, None] * BEAMS).reshape(-1)).to(device)
            times["theirs"].append(timed(device, reorder_caches, cache, order, token, spec.num_layers))
    ours.manager.check()
    their_bytes = SEARCHES * BEAMS * prompt * spec.bytes_per_token
    case = f"beam step of {SEARCHES} x {BEAMS}"
    return summary(case, device, times, int(statistics.mean(moved)), their_bytes, ours.bytes_held())


def summary(
    case: str, device: str, times: dict[str, list[float]], moved: int, their_bytes: int, held: int
) -> dict[str, object]:
    """One row of the result: medians, the first round left out; whole caches move and hold the same bytes."""
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}
    row = {
        "case": case,
        "device": device,
        "ours_ms": round(medians["ours"], 3),
        "theirs_ms": round(medians["theirs"], 3),
        "bookkeeping_ms": round(medians["bookkeeping"], 3),
        "ours_mib": round(moved / MiB, 2),
        "theirs_mib": round(their_bytes / MiB, 2),
        "ours_held_mib": round(held / MiB, 2),
        "x_time": round(medians["theirs"] / medians["ours"], 1),
        "x_bytes": round(their_bytes / moved, 1),
    }
    print(row)
    return row


def one_fork(prompt: int, repeats: int = 5000) -> dict[str, float]:
    """Microseconds to fork one row of `prompt` tokens while 1,000 others are open."""
    manager = BlockManager(20 * FORKS, BLOCK_SIZE, FORKS + 2, 4096)
    parent = manager.add(prompt)
    for _ in range(FORKS):
        manager.add(20)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        row = fork(manager, parent)
        times.append((time.perf_counter() - start) * 1e6)
        manager.finish(row)
    shown = zip(("fork_p50_us", "fork_p99_us", "fork_max_us"), (50, 99, 100), strict=True)
    found = {name: round(float(np.percentile(times, share)), 1) for name, share in shown}
    print(found)
    return found


def main() -> None:
    """Time all cases, print, and write the JSON where a large GPU was there."""
    torch.set_num_threads(min(8, torch.get_num_threads()))
    small, full = KVSpec(2, 4, 64, "bf16"), KVSpec(30, 3, 64, "bf16")
    shapes = [(small, 506, "cpu")]
    if torch.cuda.is_available() and torch.cuda.mem_get_info()[1] > 100 * 2**30:
        shapes.append((full, 2010, "cuda"))
    rows = [case(*shape, torch.bfloat16) for shape in shapes for case in (fork_case, beam_case)]
    latency = one_fork(2010)
    if len(shapes) < 2:
        return
    headline = {
        f"{what}_{case}_{row['device']}": row[what]
        for what in ("x_time", "x_bytes")
        for case, row in zip(("fork", "beam") * 2, rows, strict=True)
    }
    path = write_result(
        "copy_on_write",
        modules=["block_manager", "copy_on_write", "kv_store"],
        workload=f"{BLOCK_SIZE}-token blocks, bf16, no model; cpu: prompts of 506 tokens, 2 layers of 4 KV heads of "
        "64; cuda: 2,010 tokens, 30 layers of 3 KV heads of 64",
        repeats=ROUNDS,
        statistic="median, contestants taking turns, the first round not counted; bytes are those that copies write",
        rows=rows,
        headline=headline | latency,
        packages=("numpy", "torch", "transformers"),
    )
    print(path)


if __name__ == "__main__":
    main()
