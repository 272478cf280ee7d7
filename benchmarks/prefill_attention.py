"""Prefill attention on one GPU: ours and the peers on prompts, prefixes, chunks and mixed batches.

    python benchmarks/prefill_attention.py [--peers FOLDER] [--repeats 10]

FOLDER holds `attention_peers.py`: FlashAttention-3 and vLLM's Triton kernel out of vLLM 0.23, planned outside the timed
call as a server does once a step; so is ours.  Llama 3 8B's heads, blocks of 16 in random order, causal.  Operations
counted are those of the two products for the pairs of query and key that the causal rule leaves.  Each output is
compared with float64 at a few tokens, on the tensors that are timed.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.common import write_result
from benchmarks.gpu_timing import Batch, Step, graph_of, paged_batch, show, time_steps
from paged_kv.attend import AttendPlan, plan_attend
from paged_kv.kernels import decode_attention
from paged_kv.kernels_prefill import prefill_attention
from paged_kv.prefill_plan import PrefillPlan, PrefillTiles

MODULES = ["triton_device", "decode_tiles", "decode_kernels", "kernels", "prefill_plan", "prefill_tiles",
           "kernels_prefill", "attend"]  # fmt: skip
HEADS, KV_HEADS, SIZE, BLOCK = 32, 8, 128, 16
Seqs = Sequence[tuple[int, int]]  # new tokens and tokens in the cache, the new ones included
CASES: dict[str, Seqs] = {
    "4 x 8,192": [(8192, 8192)] * 4,
    "4 x 8,192 on 8,192": [(8192, 16384)] * 4,
    "16 x 512": [(512, 512)] * 16,
    "a chunk of 2,048 on 30,720": [(2048, 32768)],
    "a chunk of 512 and 64 decodes at 4,096": [*[(1, 4096)] * 64, (512, 4608)],
    "a chunk of 512 and 4 decodes at 32,768": [*[(1, 32768)] * 4, (512, 4608)],
}
CHUNKS = (64, 128, 256, 512, 1024, 2048, 8192)
PROMPT = 8192


class Prompts:
    """A batch of prompts or chunks in GPU memory, and where its sequences begin."""

    def __init__(self, seqs: Seqs) -> None:
        self.seqs = list(seqs)
        tokens = sum(new for new, _ in seqs)
        self.batch: Batch = paged_batch([n for _, n in seqs], HEADS, KV_HEADS, SIZE, BLOCK, queries=tokens)
        cu = torch.tensor([0, *(new for new, _ in seqs)], device="cuda")
        self.cu = cu.cumsum(0).int()
        self.rows = torch.arange(len(seqs), device="cuda")
        self.output = torch.full_like(self.batch.query, torch.nan)
        self.lse = torch.empty(self.batch.query.shape[:2], device="cuda")

    @property
    def operations(self) -> int:
        """Multiplications and additions of both products."""
        pairs = sum(new * (n - new) + new * (new + 1) // 2 for new, n in self.seqs)
        return 4 * HEADS * SIZE * pairs

    def exact(self) -> dict[int, Tensor]:
        """Float64 attention of the first and last tokens of a few sequences."""
        found, batch = {}, self.batch
        for s in sorted({0, len(self.seqs) - 1}):
            new, n = self.seqs[s]
            for i in sorted({0, min(37, new - 1), new - 1}):
                seen = n - new + i + 1
                ids = batch.table[s, : -(-seen // BLOCK)].long()
                k, v = (batch.pool[ids, j].reshape(-1, KV_HEADS, SIZE)[:seen].double() for j in (0, 1))
                token = int(self.cu[s]) + i
                q = batch.query[token].double().view(KV_HEADS, -1, SIZE)
                weights = (torch.einsum("hgd,thd->hgt", q, k) * SIZE**-0.5).softmax(-1)
                found[token] = torch.einsum("hgt,thd->hgd", weights, v).reshape(-1, SIZE)
        return found

    def plan(self, num_decodes: int) -> AttendPlan:
        """Ours: the first sequences by the decode kernel, the others by the prefill kernel."""
        where = (self.rows, self.cu, self.batch.lens)
        return plan_attend(self.batch.query, self.batch.keys, *where, num_decodes)

    def ours(self, plan: AttendPlan) -> Tensor:
        """What `attend` does, without its allocations."""
        query, keys, values, table, lens = self.batch.parts
        n = plan.num_decodes
        if plan.decode is not None:
            decode_attention(query[:n], keys, values, table, lens[:n], rows=self.rows[:n], plan=plan.decode,
                             output=self.output[:n], lse=self.lse[:n])  # fmt: skip
        if plan.prefill is not None:
            prefill_attention(query, keys, values, table, self.cu[n:], lens[n:], rows=self.rows[n:],
                              plan=plan.prefill, output=self.output, lse=self.lse)  # fmt: skip
        return self.output

    def with_tiles(self, tiles: PrefillTiles) -> Step:
        """The prefill kernel with these tiles."""
        query, keys, values, table, lens = self.batch.parts
        plan = PrefillPlan(len(lens), len(query), HEADS, KV_HEADS, SIZE, "cuda", tiles=tiles)
        plan.update(self.cu, lens, self.rows)
        where = {"rows": self.rows, "plan": plan, "output": self.output, "lse": self.lse}
        return lambda: prefill_attention(query, keys, values, table, self.cu, lens, **where)[0]


# ------------------------------------------------------------------------------------------ peers


def flash_attention_3(peers: Any, prompts: Prompts) -> Step:
    """FlashAttention-3 as vLLM calls it for a packed batch over a paged cache."""
    query, keys, values, table, lens = prompts.batch.parts
    peers.flash_attention_3(query[: len(lens)], prompts.batch.pool, table, lens)  # loads the library
    ops = torch.ops._vllm_fa3_C
    out, most, longest = torch.empty_like(query), max(new for new, _ in prompts.seqs), int(lens.max())
    plan = ops.get_scheduler_metadata(
        len(lens), most, longest, HEADS, KV_HEADS, SIZE, SIZE, query.dtype, lens, prompts.cu, None, None, None, None,
        BLOCK, 0, True, -1, -1, False, 0, None, 0)  # fmt: skip

    def step() -> Tensor:
        ops.fwd(query, keys, values, None, None, None, out, prompts.cu, None, None, None, lens, most, longest, table,
                *(None,) * 8, SIZE**-0.5, True, -1, -1, 0.0, True, plan, 0, None, 0, None, 1, 0, None)  # fmt: skip
        return out

    return step


def vllm_triton(peers: Any, prompts: Prompts) -> Step:
    """vLLM's Triton kernel for prefill and decode alike."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    query, keys, values, table, lens = prompts.batch.parts
    out, most, longest = torch.empty_like(query), max(new for new, _ in prompts.seqs), int(lens.max())

    def step() -> Tensor:
        unified_attention(query, keys, values, out, prompts.cu, most, lens, longest, SIZE**-0.5, True, (-1, -1), table,
                          0.0, None, None, None, 0, 16, None, None, None)  # fmt: skip
        return out

    return step


PEERS: dict[str, Callable[[Any, Prompts], Step]] = {
    "FlashAttention-3": flash_attention_3,
    "vLLM Triton": vllm_triton,
}


# ------------------------------------------------------------------------------------------ measuring


def replays(steps: dict[str, Step], exact: dict[int, Tensor]) -> tuple[dict[str, Step], dict[str, float]]:
    """A graph of each contestant, and its largest relative error; one that fails is told and left out."""
    graphs, errors = {}, {}
    for name, step in steps.items():
        try:
            step()
            graph = graph_of(step)
            graph()
            torch.cuda.synchronize()
            found = step()
            errors[name] = max(float((found[t].double() - right).norm() / right.norm()) for t, right in exact.items())
            graphs[name] = graph
        except Exception as fault:
            show({"failed": name, "why": f"{type(fault).__name__}: {fault}"[:300]})
    return graphs, errors


def measure(name: str, peers: Any, repeats: int) -> dict[str, Any]:
    """All contestants of one case."""
    prompts = Prompts(CASES[name])
    decodes = sum(new == 1 for new, _ in prompts.seqs)
    steps: dict[str, Step] = {"ours": partial(prompts.ours, prompts.plan(decodes))}
    if decodes:
        steps["ours, one kernel"] = partial(prompts.ours, prompts.plan(0))
    if name == "4 x 8,192":
        for pack, keys, stages in ((1, 64, 3), (4, 128, 3), (4, 64, 2)):
            rows, warps = (128, 8) if keys == 128 else (64, 4)
            tiles = PrefillTiles(rows, keys, pack, warps, stages)
            steps[f"{rows} rows of {pack} heads, {keys} keys, {stages} stages"] = prompts.with_tiles(tiles)
    if peers is not None:
        for peer, make in PEERS.items():
            try:
                steps[peer] = make(peers, prompts)
            except Exception as fault:
                show({"failed": peer, "why": f"{type(fault).__name__}: {fault}"[:300]})
    graphs, errors = replays(steps, prompts.exact())
    us = time_steps(graphs, repeats)
    tflops = {way: round(prompts.operations / t / 1e6, 1) for way, t in us.items()}
    row = {"case": name, "operations": prompts.operations, "us": {k: round(t, 1) for k, t in us.items()},
           "tflops": tflops, "max_rel_err": errors, "blocks": len(prompts.batch.pool)}  # fmt: skip
    show(row)
    return row


def measure_chunks(repeats: int) -> dict[str, Any]:
    """One prompt in chunks of several sizes: the attention of all its steps, one after the other."""
    whole = Prompts([(PROMPT, PROMPT)])
    query, keys, values, table, _ = whole.batch.parts
    steps: dict[str, Step] = {}
    outputs = {}
    for size in CHUNKS:
        parts, output = [], torch.full_like(query, torch.nan)
        for begin in range(0, PROMPT, size):
            lens = torch.tensor([begin + size], dtype=torch.int32, device="cuda")
            cu = torch.tensor([0, size], dtype=torch.int32, device="cuda")
            plan = PrefillPlan(1, size, HEADS, KV_HEADS, SIZE, "cuda")
            plan.update(cu, lens, whole.rows)
            part = slice(begin, begin + size)
            parts.append((query[part], keys, values, table, cu, lens, plan, output[part], whole.lse[part]))
        steps[str(size)] = partial(run_parts, parts)
        outputs[size] = output
    graphs = {name: graph_of(step) for name, step in steps.items()}
    us = time_steps(graphs, repeats)
    bits = {str(size): torch.equal(output, outputs[PROMPT]) for size, output in outputs.items()}
    row = {"case": "8,192 in chunks", "us": {k: round(t, 1) for k, t in us.items()}, "same_bits": bits}
    show(row)
    return row


def run_parts(parts: Sequence[tuple[Any, ...]]) -> None:
    """The chunks of one prompt, one launch each."""
    for query, keys, values, table, cu, lens, plan, output, lse in parts:
        prefill_attention(query, keys, values, table, cu, lens, plan=plan, output=output, lse=lse)


def ceilings(repeats: int) -> dict[str, float]:
    """A large matrix product in bf16, and a device copy."""
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    c, source = torch.empty_like(a), torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    us = time_steps({"matmul": lambda: torch.mm(a, b, out=c), "copy": lambda: target.copy_(source)}, repeats)
    return {"matmul_tflops": round(2 * 8192**3 / us["matmul"] / 1e6, 1),
            "copy_tb_s": round(2 * source.nbytes / us["copy"] / 1e6, 3)}  # fmt: skip


def main() -> None:
    """Measure everything, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    peers = None
    if options.peers is not None:
        sys.path.insert(0, str(options.peers))
        peers = importlib.import_module("attention_peers")
    rows = []
    for name in CASES:
        rows.append(measure(name, peers, options.repeats))
        torch.cuda.empty_cache()
    rows.append(measure_chunks(options.repeats))
    us = rows[0]["us"]
    headline = {
        key: round(us[peer] / us["ours"], 3)
        for key, peer in (("prefill_x_fa3", "FlashAttention-3"), ("prefill_x_vllm_triton", "vLLM Triton"))
        if peer in us
    }
    path = write_result(
        "prefill_attention",
        modules=MODULES,
        workload="bf16, 32 query and 8 KV heads of 128, blocks of 16 in random order, causal; CUDA-graph replays "
        "between events, L2 flushed, contestants in turns",
        repeats=options.repeats,
        rows=rows,
        headline=headline,
        packages=("torch", "triton"),
        ceilings=ceilings(options.repeats),
    )
    show({"written": str(path), **headline})


if __name__ == "__main__":
    main()
