"""What reading K/V through a block table costs on one CPU thread, for blocks of 1 to 128 tokens.

Decode attention of a small batch, one query a sequence, four ways: over one run of memory each;
paged, copying token by token; paged, copying block by block; paged, walking the blocks in place.

    python benchmarks/indirection_cpu.py            # writes results/indirection_cpu.json
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import write_result

from paged_kv.attention import dense_attention, paged_attention
from paged_kv.kv_store import KVStore
from paged_kv.sizing import KVSpec, blocks_for

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
NUM_SEQS, SEQ_LEN, NUM_Q_HEADS = 4, 1000, 32
SPEC = KVSpec(num_layers=1, num_kv_heads=8, head_size=128, dtype="fp32")
REPEATS = 15


class Case:
    """The same sequences in one run each, and in blocks that lie in random order."""

    def __init__(self, block_size: int, num_seqs: int = NUM_SEQS, seq_len: int = SEQ_LEN) -> None:
        torch.manual_seed(0)
        shape = (num_seqs, seq_len, SPEC.num_kv_heads, SPEC.head_size)
        k, v = torch.randn(shape), torch.randn(shape)
        self.query = torch.randn(num_seqs, NUM_Q_HEADS, SPEC.head_size)
        self.runs = k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
        self.seq_len = seq_len

        blocks = blocks_for(seq_len, block_size)
        self.store = KVStore(SPEC, num_seqs * blocks, block_size)
        self.table = torch.randperm(num_seqs * blocks).view(num_seqs, blocks).int()
        position = torch.arange(seq_len)
        slots = self.table[:, position // block_size].long() * block_size + position % block_size
        self.store.write(0, k.flatten(0, 1), v.flatten(0, 1), slots.flatten())
        self.cu_seqlens = torch.arange(num_seqs + 1, dtype=torch.int32)
        self.seq_lens = torch.full((num_seqs,), seq_len, dtype=torch.int32)

    def contiguous(self) -> Tensor:
        """Over one run of memory a sequence: no table, no copy."""
        visible = torch.ones(len(self.query), 1, self.seq_len, dtype=torch.bool)
        scale = SPEC.head_size**-0.5
        return dense_attention(self.query[:, None], *self.runs, visible, scale, None, None)[0][:, 0]

    def copy_tokens(self) -> Tensor:
        """Chapter 04's attention: finds each token through the table and copies it."""
        keys, values = self.store.keys(0), self.store.values(0)
        return paged_attention(self.query, keys, values, self.table, self.cu_seqlens, self.seq_lens)[0]

    def copy_blocks(self) -> Tensor:
        """Copies whole blocks into one run, then attends to the run."""
        out = []
        visible = torch.ones(1, 1, self.seq_len, dtype=torch.bool)
        for query, row in zip(self.query, self.table, strict=True):
            k, v = (x.transpose(0, 1)[None] for x in self.store.gather(0, row, self.seq_len))
            scale = SPEC.head_size**-0.5
            out.append(dense_attention(query[None, None], k, v, visible, scale, None, None)[0][0, 0])
        return torch.stack(out)

    def walk(self) -> Tensor:
        """Visits block after block where it lies, with a running softmax; copies nothing."""
        pool = self.store.tensors[0]
        query = self.query.view(len(self.query), SPEC.num_kv_heads, -1, SPEC.head_size)
        return torch.stack([walk_blocks(q, pool, row, self.seq_len) for q, row in zip(query, self.table, strict=True)])


def walk_blocks(query: Tensor, pool: Tensor, row: Tensor, seq_len: int) -> Tensor:
    """One sequence; query [num_kv_heads, group, head_size] -> [num_q_heads, head_size]."""
    block_size = pool.shape[2]
    query = query * query.shape[-1] ** -0.5
    peak = torch.full(query.shape[:2], -torch.inf)
    total, output = torch.zeros_like(peak), torch.zeros_like(query)
    for logical, block in enumerate(row.tolist()):
        k, v = pool[block, :, : seq_len - logical * block_size]
        scores = query @ k.permute(1, 2, 0)
        new_peak = torch.maximum(peak, scores.amax(-1))
        weights = (scores - new_peak[..., None]).exp()
        shrink = (peak - new_peak).exp()
        total = total * shrink + weights.sum(-1)
        output = output * shrink[..., None] + weights @ v.transpose(0, 1)
        peak = new_peak
    return (output / total[..., None]).flatten(0, 1)


WAYS: dict[str, Callable[[Case], Tensor]] = {
    "contiguous": Case.contiguous,
    "copy tokens": Case.copy_tokens,
    "copy blocks": Case.copy_blocks,
    "walk": Case.walk,
}


def measure(block_size: int) -> dict[str, float]:
    """Median milliseconds of this thread for each way; the ways take turns."""
    case = Case(block_size)
    expected = case.contiguous()
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for repeat in range(REPEATS + 1):
        for way, attend in WAYS.items():
            start = time.thread_time()
            output = attend(case)
            if repeat:  # the first round warms up
                times[way].append(1000 * (time.thread_time() - start))
            assert torch.allclose(output, expected, atol=1e-5), way
    return {way: statistics.median(values) for way, values in times.items()}


def main() -> None:
    """Measure every block size."""
    torch.set_num_threads(1)
    rows = []
    for block_size in BLOCK_SIZES:
        ms = measure(block_size)
        ratios = {way: ms[way] / ms["contiguous"] for way in WAYS}
        blocks = NUM_SEQS * blocks_for(SEQ_LEN, block_size)
        rows.append({"block_size": block_size, "blocks": blocks, "ms": ms, "ratio": ratios})
        print(rows[-1], file=sys.stderr)
    write_result(
        "indirection_cpu",
        modules=["sizing", "kv_store", "attention"],
        workload=f"decode attention, {NUM_SEQS} sequences of {SEQ_LEN} tokens, {NUM_Q_HEADS} query and "
        f"{SPEC.num_kv_heads} KV heads of {SPEC.head_size}, fp32; CPU time of one thread",
        repeats=REPEATS,
        rows=rows,
        headline={
            f"{way}, blocks of {row['block_size']}": round(row["ratio"][way], 2)
            for row in rows
            for way in list(WAYS)[1:]
            if row["block_size"] in (1, 16, 128)
        },
    )


if __name__ == "__main__":
    main()
