"""Is a sequence's output the same bits alone and in any batch, and what does the mode that makes it so cost?

    python benchmarks/batch_invariance.py [--repeats 20]

Decode attention with even shares and with `batch_invariant=True` on the same tensors: time of a step as CUDA-graph
replays, and how many sequences (of at most 16 tried) come out in other bits than alone.  Prefill attention alone, in a
batch and in chunks.  A matrix product of torch, whose row 0 is compared between numbers of rows.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.common import write_result
from benchmarks.gpu_timing import Batch, graph_of, paged_batch, show, time_steps
from paged_kv.decode_plan import DecodePlan
from paged_kv.kernels import decode_attention
from paged_kv.kernels_prefill import prefill_attention

MODULES = ["triton_device", "decode_shares", "decode_plan", "decode_tiles", "decode_parts", "decode_kernels", "kernels",
           "prefill_plan", "prefill_tiles", "kernels_prefill"]  # fmt: skip
HEADS, KV_HEADS, SIZE, BLOCK = 32, 8, 128, 16
CASES = {
    "64 x 4,096": [4096] * 64,
    "256 x 1,024": [1024] * 256,
    "8 x 32,768": [32768] * 8,
    "1 x 131,072": [131072],
    "122 of 100 to 2,000": random.Random(0).choices(range(100, 2001), k=122),
    "16 x 512": [512] * 16,
    "1 x 4,096": [4096],
}
MATRIX_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def plan_of(batch: int, mode: bool) -> DecodePlan:
    """A decode plan of this many sequences."""
    return DecodePlan(batch, HEADS, KV_HEADS, SIZE, "cuda", batch_invariant=mode)


def decode_once(batch: Batch, mode: bool, chosen: int | None = None) -> Tensor:
    """The output of a step, for the whole batch or for one of its sequences alone."""
    part = slice(None) if chosen is None else slice(chosen, chosen + 1)
    rows = torch.arange(len(batch.lens), device="cuda")[part]
    plan = plan_of(len(rows), mode)
    plan.update(batch.lens[part].contiguous(), rows)
    query, lens = batch.query[part].contiguous(), batch.lens[part].contiguous()
    return decode_attention(query, batch.keys, batch.values, batch.table, lens, rows=rows, plan=plan)[0]


def decode_row(name: str, repeats: int) -> dict[str, Any]:
    """Time and bits of one case in both modes."""
    batch = paged_batch(CASES[name], HEADS, KV_HEADS, SIZE, BLOCK)
    tried = sorted(random.Random(1).sample(range(len(batch.lens)), min(16, len(batch.lens))))
    row: dict[str, Any] = {"case": name, "tried": len(tried), "changed": {}, "largest": {}}
    graphs, keep = {}, []
    for label, mode in (("default", False), ("batch_invariant", True)):
        together = decode_once(batch, mode)
        alone = {s: decode_once(batch, mode, s)[0] for s in tried}
        row["changed"][label] = sum(not torch.equal(together[s], alone[s]) for s in tried)
        row["largest"][label] = max(float((together[s].float() - alone[s].float()).abs().max()) for s in tried)
        plan, output = plan_of(len(batch.lens), mode), torch.empty_like(batch.query)
        lse = torch.empty(output.shape[:2], device="cuda")
        plan.update(batch.lens)
        keep.append((plan, output, lse))
        where = {"plan": plan, "output": output, "lse": lse}
        graphs[label] = graph_of(lambda where=where: decode_attention(*batch.parts, **where))
    us = time_steps(graphs, repeats)
    row["us"] = {k: round(t, 1) for k, t in us.items()}
    row["price"] = round(us["batch_invariant"] / us["default"] - 1, 4)
    show(row)
    return row


def prefill_row() -> dict[str, Any]:
    """Bits of prefill attention: a sequence in a batch and alone, whole and in chunks."""
    seqs = [(1000, 1500), (37, 2000), (3000, 3000)]
    batch = paged_batch([n for _, n in seqs], HEADS, KV_HEADS, SIZE, BLOCK, queries=sum(new for new, _ in seqs))
    cu = torch.tensor([0, *(new for new, _ in seqs)], device="cuda").cumsum(0).int()
    parts = (batch.keys, batch.values, batch.table)
    together = prefill_attention(batch.query, *parts, cu, batch.lens)[0]

    def piece(s: int, begin: int, end: int) -> Tensor:
        """Tokens begin .. end - 1 of sequence s, in a step of their own."""
        (new, n), first = seqs[s], int(cu[s])
        lens = torch.tensor([n - new + end], dtype=torch.int32, device="cuda")
        own = torch.tensor([0, end - begin], dtype=torch.int32, device="cuda")
        query, rows = batch.query[first + begin : first + end], torch.tensor([s], device="cuda")
        return prefill_attention(query, *parts, own, lens, rows=rows)[0]

    row = {"case": "prefill", "changed_alone": 0, "changed_in_chunks": {}}
    for s, (new, _) in enumerate(seqs):
        mine = together[int(cu[s]) : int(cu[s + 1])]
        row["changed_alone"] += int((piece(s, 0, new) != mine).any(-1).any(-1).sum())
        for size in (1, 7, 64, 500):
            begins = range(0, min(new, 40 * size), size)
            found = torch.cat([piece(s, b, min(b + size, new)) for b in begins])
            changed = int((found != mine[: len(found)]).any(-1).any(-1).sum())
            row["changed_in_chunks"][str(size)] = row["changed_in_chunks"].get(str(size), 0) + changed
    show(row)
    return row


def matrix_row(dtype: torch.dtype) -> dict[str, Any]:
    """Row 0 of a product, for several numbers of rows: how many of its 4,096 numbers differ from those of one row."""
    torch.manual_seed(0)
    x, w = (torch.randn(n, 4096, device="cuda").to(dtype) for n in (max(MATRIX_ROWS), 4096))
    first = torch.nn.functional.linear(x[:1], w)[0]
    changed = {str(m): int((torch.nn.functional.linear(x[:m], w)[0] != first).sum()) for m in MATRIX_ROWS}
    row = {"case": f"linear, {str(dtype).removeprefix('torch.')}", "changed": changed}
    show(row)
    return row


def main() -> None:
    """Measure everything, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    rows = []
    for name in CASES:
        rows.append(decode_row(name, options.repeats))
        torch.cuda.empty_cache()
    prices = [row["price"] for row in rows]
    headline = {"largest_price": max(prices), "changed_sequences": sum(r["changed"]["batch_invariant"] for r in rows)}
    rows += [prefill_row(), matrix_row(torch.bfloat16), matrix_row(torch.float32)]
    path = write_result(
        "batch_invariance",
        modules=MODULES,
        workload="bf16, 32 query and 8 KV heads of 128, blocks of 16 in random order, one new token a sequence; "
        "CUDA-graph replays between events, L2 flushed, both modes in turns",
        repeats=options.repeats,
        rows=rows,
        headline=headline,
        packages=("torch", "triton"),
    )
    show({"written": str(path), **headline})


if __name__ == "__main__":
    main()
