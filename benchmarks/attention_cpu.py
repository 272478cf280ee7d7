"""Does grouping pay?  One call for the batch against one call a sequence, on a CPU.

    python benchmarks/attention_cpu.py [--rounds 15]

Three ways through the same blocks, one layer, SmolLM2-135M's heads in float32, random block tables, one thread:
`grouped` is paged_attention once; `loop` is paged_attention once a sequence; `sdpa` gathers each sequence into one
array and calls torch's scaled_dot_product_attention (which gives no lse).  The rounds of the three alternate.
Processor time, so that waiting for a busy machine does not count.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time

import torch
from common import write_result
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from paged_kv.attention import paged_attention
from paged_kv.kv_store import KVStore
from paged_kv.sizing import KVSpec

STATISTIC = "minimum of alternating rounds, processor time of one thread; medians beside it"
HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 9, 3, 64, 16
SEED = random.Random(0)
CASES = {  # (queries, tokens in the cache) of each sequence
    "8 decoding, 50 to 400": [(1, SEED.randint(50, 400)) for _ in range(8)],
    "64 decoding, 50 to 1,000": [(1, SEED.randint(50, 1000)) for _ in range(64)],
    "256 decoding, 20 to 200": [(1, SEED.randint(20, 200)) for _ in range(256)],
    "8 decoding, 1 of 8,192": [(1, 8192), *[(1, 100)] * 7],
    "8 prompts of 30 to 60": [(n, n) for n in (SEED.randint(30, 60) for _ in range(8))],
    "1 prompt of 2,000": [(2000, 2000)],
    "a chunk of 256 and 32 decoding": [(256, 1024), *[(1, SEED.randint(50, 1000)) for _ in range(32)]],
}
Batch = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def make(seqs: list[tuple[int, int]]) -> Batch:
    """query, keys, values, block_table, cu_seqlens and seq_lens of a case."""
    blocks = [-(-n // BLOCK_SIZE) for _, n in seqs]
    store = KVStore(KVSpec(1, KV_HEADS, HEAD_SIZE, "fp32"), sum(blocks), BLOCK_SIZE)
    store.tensors[0].normal_()
    ids = iter(torch.randperm(sum(blocks)).tolist())
    table = torch.full((len(seqs), max(blocks)), -1, dtype=torch.int32)
    for row, count in enumerate(blocks):
        table[row, :count] = torch.tensor(list(itertools.islice(ids, count)), dtype=torch.int32)
    cu = torch.tensor([0, *itertools.accumulate(q for q, _ in seqs)], dtype=torch.int32)
    query = torch.randn(int(cu[-1]), HEADS, HEAD_SIZE)
    return query, store.keys(0), store.values(0), table, cu, torch.tensor([n for _, n in seqs], dtype=torch.int32)


def grouped(*batch: Tensor) -> Tensor:
    """One call for the batch."""
    return paged_attention(*batch)[0]


def loop(query: Tensor, keys: Tensor, values: Tensor, table: Tensor, cu: Tensor, lens: Tensor) -> Tensor:
    """One call a sequence."""
    spans = itertools.pairwise(cu.tolist())
    return torch.cat(
        [
            paged_attention(query[a:b], keys, values, table[i : i + 1], torch.tensor([0, b - a]), lens[i : i + 1])[0]
            for i, (a, b) in enumerate(spans)
        ]
    )


def sdpa(query: Tensor, keys: Tensor, values: Tensor, table: Tensor, cu: Tensor, lens: Tensor) -> Tensor:
    """Gather each sequence, then torch's own attention."""
    parts = []
    for row, (a, b), n in zip(table.long(), itertools.pairwise(cu.tolist()), lens.tolist(), strict=True):
        blocks = row[: -(-n // BLOCK_SIZE)]
        k, v = (pool[blocks].flatten(0, 1)[None, :n].transpose(1, 2) for pool in (keys, values))
        mask = torch.ones(b - a, n, dtype=torch.bool).tril(n - (b - a)) if b - a > 1 else None
        q = query[None, a:b].transpose(1, 2)
        parts.append(scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(parts)


WAYS = {"grouped": grouped, "loop": loop, "sdpa": sdpa}


def measure(case: str, rounds: int) -> dict[str, object]:
    """One row: milliseconds of each way."""
    batch = make(CASES[case])
    outputs = {name: way(*batch) for name, way in WAYS.items()}  # also warms up
    error = max(float((out - outputs["grouped"]).abs().max()) for out in outputs.values())
    assert error < 1e-4, f"{case}: the ways differ by {error}"
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        for name, way in WAYS.items():
            start = time.process_time()
            way(*batch)
            seconds[name].append(time.process_time() - start)
    return {
        "case": case,
        **{f"{name}_ms": round(1e3 * min(times), 3) for name, times in seconds.items()},
        **{f"{name}_median_ms": round(1e3 * statistics.median(times), 3) for name, times in seconds.items()},
    }


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = [measure(case, rounds) for case in CASES]
    names = ("decode_8", "decode_64", "decode_256", "one_long", "prompts_8", "prompt_2000", "mixed")
    headline = {
        f"x_{other}_{name}": round(row[f"{other}_ms"] / row["grouped_ms"], 2)
        for name, row in zip(names, rows, strict=True)
        for other in ("loop", "sdpa")
    }
    path = write_result(
        "attention_cpu",
        modules=["kv_store", "attention"],
        workload=f"one layer, {HEADS}/{KV_HEADS} heads of {HEAD_SIZE}, float32, blocks of {BLOCK_SIZE}; 1 thread",
        repeats=rounds,
        statistic=STATISTIC,
        rows=rows,
        headline=headline,
    )
    print(path)
    for row in rows:
        print(*row.values())


if __name__ == "__main__":
    main()
