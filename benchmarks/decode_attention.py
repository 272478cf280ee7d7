"""Decode attention on one GPU: ours, the chapter's rungs, the peers, and a plain read of the same bytes.

    python benchmarks/decode_attention.py [--peers FOLDER] [--counters FILE] [--repeats 30] [--cases a,b]
    ncu --csv ... python benchmarks/decode_attention.py --profile > FILE

FOLDER holds `attention_peers.py`: FlashAttention-3 and vLLM's Triton kernel out of vLLM 0.23, FlashInfer 0.6.12, each
as its documentation advises for decoding, planned outside the timed call as a server does once a step.  The rungs are
run from the chapter's own cells.  Correctness is checked on the tensors that are timed.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import math
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.common import RESULTS, ROOT, write_result
from benchmarks.gpu_timing import (
    Batch,
    Step,
    exact_decode,
    graph_of,
    paged_batch,
    processes,
    read_step,
    relative_error,
    show,
    time_steps,
    warm_in_parallel,
)
from paged_kv.attention import paged_attention
from paged_kv.decode_plan import DecodePlan, Tiles, pick_tiles
from paged_kv.kernels import decode_attention
from paged_kv.kernels_cache import copy_kv_blocks, tensor_addresses, write_kv
from paged_kv.triton_device import limits_of

MODULES = ["triton_device", "kernels_cache", "decode_shares", "decode_plan", "decode_tiles", "decode_parts",
           "decode_kernels", "kernels"]  # fmt: skip
RNG = random.Random(0)
SHORT = [RNG.randint(100, 2000) for _ in range(122)]
LONG = [min(32768, int(RNG.lognormvariate(6.5, 1.2)) + 1) for _ in range(256)]
CASES: dict[str, tuple[list[int], int, int, int, int]] = {  # lengths, query heads, KV heads, head size, block size
    "64x4096": ([4096] * 64, 32, 8, 128, 16),
    "256x1024": ([1024] * 256, 32, 8, 128, 16),
    "32x8192 64/8": ([8192] * 32, 64, 8, 128, 16),
    "8x32768": ([32768] * 8, 32, 8, 128, 16),
    "1x131072": ([131072], 32, 8, 128, 16),
    "122 ragged": (SHORT, 32, 8, 128, 16),
    "256 ragged": (LONG, 32, 8, 128, 16),
    "16x512": ([512] * 16, 32, 8, 128, 16),
    "1x4096": ([4096], 32, 8, 128, 16),
    "64x4096 B64": ([4096] * 64, 32, 8, 128, 64),
    "64x4096 h64": ([4096] * 64, 32, 8, 64, 16),
    "64x4096 h256": ([4096] * 64, 32, 8, 256, 16),
    "64x4096 64/8": ([4096] * 64, 64, 8, 128, 16),
    "64x4096 B1": ([4096] * 64, 32, 8, 128, 1),
    "64x4096 B32": ([4096] * 64, 32, 8, 128, 32),
    "64x4096 B128": ([4096] * 64, 32, 8, 128, 128),
}
RAGGED = ("122 ragged", "256 ragged")
LADDER = [name for name, case in CASES.items() if case[1:] == (32, 8, 128, 16)]
GRID = [(b, n) for b in (1, 4, 16, 64, 256) for n in (512, 2048, 8192, 32768) if b * n <= 1 << 20]
BLOCKS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def ladder() -> ModuleType:
    """The chapter's cells tagged `ladder`, as a module."""
    text = (ROOT / "book" / "11_triton_decode.py").read_text()
    cells = re.findall(r'(?ms)^# %% tags=\["ladder"\]\n(.*?)(?=^# %%)', text + "\n# %%")
    head = "import torch\nfrom paged_kv.triton_device import LOG2E, interpreted, jit, tl, triton\n\n\n"
    with tempfile.NamedTemporaryFile("w", suffix="_ladder.py", delete=False) as file:
        file.write(head + "\n\n".join(cells))
    spec = importlib.util.spec_from_file_location("ladder_cells", file.name)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ------------------------------------------------------------------------------------------ contestants


def our_step(batch: Batch, tiles: Tiles | None = None, batch_invariant: bool = False) -> tuple[Step, DecodePlan]:
    """Ours with a plan made beforehand, and the plan."""
    (count, heads, size), kv_heads = batch.query.shape, batch.pool.shape[3]
    plan = DecodePlan(count, heads, kv_heads, size, "cuda", tiles=tiles, batch_invariant=batch_invariant)
    plan.update(batch.lens)
    output, lse = torch.empty_like(batch.query), torch.empty(count, heads, device="cuda")
    return lambda: decode_attention(*batch.parts, plan=plan, output=output, lse=lse)[0], plan


def picked(batch: Batch, **changes: Any) -> Tiles:
    """The heuristic's tiles for a batch, some fields changed; programs follow the heads."""
    count, heads, size = batch.query.shape
    kv_heads, limits = batch.pool.shape[3], limits_of(batch.query.device)
    tiles = pick_tiles(count, heads, kv_heads, size, 2, limits)
    if "heads" in changes:
        changes.setdefault("programs", tiles.programs * changes["heads"] // tiles.heads)
    return replace(tiles, **changes)


def our_rungs(batch: Batch) -> dict[str, Tiles]:
    """Rungs 6 to 9, all of them the exported kernel."""
    return {
        "6 even shares": picked(batch, heads=1, even=False, fused=False),
        "7 two heads": picked(batch, heads=2, even=False, fused=False),
        "8 whole sequences": picked(batch, heads=2, fused=False),
        "9 fused join": picked(batch, heads=2, fused=True),
    }


def naive_rungs(batch: Batch, cells: ModuleType) -> Iterator[tuple[str, Step]]:
    """Rungs 1 to 5, from the chapter."""
    count, longest = len(batch.lens), int(batch.lens.max())
    if longest <= 8192:
        yield "1 one head", lambda: cells.run_one_head(*batch.parts)
    yield "2 group", lambda: cells.run_group(*batch.parts)
    yield "3 wide gather", lambda: cells.run_group(*batch.parts, tile=64)
    yield "4 pipelined", lambda: cells.run_group(*batch.parts, tile=64, stages=3)
    for splits in (4, 16, 64):
        if count * splits <= 4096:
            yield f"5 split in {splits}", lambda splits=splits: cells.run_group(
                *batch.parts, tile=64, stages=3, splits=splits)  # fmt: skip


class Contest:
    """The contestants of one case, checked as they enter."""

    def __init__(self, name: str, batch: Batch) -> None:
        self.name, self.batch, self.exact = name, batch, exact_decode(batch)
        self.graphs: dict[str, Step] = {}
        self.errors: dict[str, float] = {}

    def enter(self, label: str, step: Step) -> None:
        """Capture a step that returns its output; one that fails is reported and left out."""
        try:
            graph = graph_of(step)
            graph.output.fill_(float("nan"))
            graph()
            torch.cuda.synchronize()
            self.errors[label] = relative_error(graph.output, self.exact)
            self.graphs[label] = graph
        except Exception as error:  # a peer that cannot do a case is a row without a number
            show({"case": self.name, "failed": label, "why": f"{type(error).__name__}: {str(error)[:200]}"})


# ------------------------------------------------------------------------------------------ measuring


def measure(name: str, options: argparse.Namespace, cells: ModuleType) -> dict[str, Any]:
    """One row: every contestant on one case."""
    lens, heads, kv_heads, size, block = CASES[name]
    batch = paged_batch(lens, heads, kv_heads, size, block)
    total = 2 * sum(lens) * kv_heads * size * 2 + 2 * 2 * len(lens) * heads * size
    contest = Contest(name, batch)
    for label, make in peers(options).items():
        try:
            contest.enter(label, make(batch.query, batch.pool, batch.table, batch.lens))
        except Exception as error:
            show({"case": name, "failed": label, "why": f"{type(error).__name__}: {str(error)[:200]}"})
    step, plan = our_step(batch)
    contest.enter("ours", step)
    contest.enter("batch invariant", our_step(batch, batch_invariant=True)[0])
    if name in LADDER:
        for label, rung in naive_rungs(batch, cells):
            contest.enter(label, rung)
        for label, tiles in our_rungs(batch).items():
            contest.enter(label, our_step(batch, tiles)[0])
    for label, changes in VARIANTS.items() if name == "64x4096" else ():
        contest.enter(label, our_step(batch, picked(batch, **changes))[0])
    steps = {"read": graph_of(read_step(total)), "ours eager": step, **contest.graphs}
    steps |= {f"{label} again": contest.graphs[label] for label in options.labels if label in contest.graphs}
    plan_graph = graph_of(lambda: plan.update(batch.lens))
    times = time_steps(steps | {"plan": plan_graph}, options.repeats * (1 if total > 200e6 else 2))
    return as_row(name, total, times, contest.errors, options)


VARIANTS: dict[str, dict[str, Any]] = {
    "v 4 heads": {"heads": 4},
    "v 8 heads": {"heads": 8},
    "v 2 stages": {"stages": 2},
}


def as_row(
    name: str, total: int, times: dict[str, float], errors: dict[str, float], options: argparse.Namespace
) -> dict[str, Any]:
    """The row of one case, as the JSON keeps it."""
    lens, heads, kv_heads, size, block = CASES[name]
    speed = {label: round(total / us / 1e6, 3) for label, us in times.items()}
    rivals = {label: speed[label] for label in options.labels if label in speed}
    row: dict[str, Any] = {
        "case": name, "batch": len(lens), "context": max(lens), "q_heads": heads, "kv_heads": kv_heads,
        "head_size": size, "block_size": block, "bytes": total, "read_tb_s": speed["read"],
        "ours_tb_s": speed["ours eager"], "ours_graph_tb_s": speed["ours"], "peers_tb_s": rivals,
        "plan_us": round(times["plan"], 1), "ours_us": round(times["ours"], 1), "read_us": round(times["read"], 1),
        "batch_invariant_us": round(times["batch invariant"], 1),
        "x_best_peer": round(speed["ours"] / max(rivals.values()), 3) if rivals else None,
        "read_share": round(times["read"] / times["ours"], 3), "max_rel_err": errors["ours"],
        "rungs_us": {label: round(us, 1) for label, us in times.items() if re.match(r"\d ", label)},
        "variants_us": {label[2:]: round(us, 1) for label, us in times.items() if label.startswith("v ")},
        "noise": {n: round(abs(times[f"{n} again"] / times[n] - 1), 4) for n in rivals if f"{n} again" in times},
    }  # fmt: skip
    for label, error in errors.items():
        if not error < 1e-2:
            show({"case": name, "wrong": label, "error": error})
    show(row)
    return row


def torch_rung(options: argparse.Namespace) -> dict[str, float]:
    """Chapter 04's attention on the same card, called as it is, waits included."""
    found = {}
    for name in ("64x4096", "16x512"):
        batch = paged_batch(*CASES[name])
        cu = torch.arange(len(batch.lens) + 1, dtype=torch.int32, device="cuda")
        query, keys, values, table, lens = batch.parts
        times = []
        for _ in range(4):
            torch.cuda.synchronize()
            start = time.perf_counter()
            paged_attention(query, keys, values, table, cu, lens)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - start) * 1e6)
        found[name] = round(statistics.median(times[1:]), 1)
    return found


def sweeps(options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Ours over batch and context, over block sizes, and with the blocks in order."""
    found: dict[str, list[dict[str, Any]]] = {"grid": [], "blocks": []}
    for count, context in GRID:
        batch = paged_batch([context] * count, 32, 8, 128, 16)
        total = 2 * count * context * 8 * 128 * 2 + 4 * count * 32 * 128
        steps = {"ours": graph_of(our_step(batch)[0]), "read": graph_of(read_step(total))}
        us = time_steps(steps, 10)
        found["grid"].append({"batch": count, "context": context, "bytes": total}
                             | {f"{k}_us": round(v, 1) for k, v in us.items()})  # fmt: skip
    steps = {}
    for block in (*BLOCKS, 4096):
        for in_order in (False, True):
            batch = paged_batch([4096] * 64, 32, 8, 128, block, in_order)
            steps[f"{block} {'in order' if in_order else 'scattered'}"] = graph_of(our_step(batch)[0])
    us = time_steps(steps, options.repeats)
    for label, value in us.items():
        block, _, order = label.partition(" ")
        found["blocks"].append({"block_size": int(block), "order": order, "us": round(value, 1)})
    for rows in found.values():
        show({"sweep": rows})
    return found


def moves(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Writing tokens and copying blocks, beside a device copy of the same bytes."""
    rows = []
    for tokens in (1, 64, 256, 8192, 131072):
        pool = torch.empty(max(64, tokens // 8), 2, 16, 8, 128, dtype=torch.bfloat16, device="cuda")
        k, v = (torch.randn(tokens, 8, 128, device="cuda").bfloat16() for _ in range(2))
        slots = torch.randperm(len(pool) * 16, device="cuda")[:tokens]
        rows.append(move_row(f"write {tokens} tokens", 4 * k.nbytes, {
            "ours": lambda k=k, v=v, s=slots, p=pool: write_kv(k, v, s, p[:, 0], p[:, 1])}, options))  # fmt: skip
    tensors = [torch.empty(1024, 2, 16, 8, 128, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(32)]
    addresses = tensor_addresses(tensors)
    for count in (1, 4, 32, 256):
        pairs = torch.randperm(1024, device="cuda")[: 2 * count].view(2, count).T.contiguous()

        def a_layer(pairs: torch.Tensor = pairs) -> None:
            for tensor in tensors:
                tensor.index_copy_(0, pairs[:, 1], tensor.index_select(0, pairs[:, 0]))

        def ours(ordered: bool, pairs: torch.Tensor = pairs) -> None:
            copy_kv_blocks(tensors, pairs, ordered=ordered, addresses=addresses)

        steps = {"ours": partial(ours, False), "ordered": partial(ours, True), "torch, a layer at a time": a_layer}
        size = 2 * count * 32 * tensors[0][0].nbytes
        rows.append(move_row(f"copy {count} blocks x 32 layers", size, steps, options))
    return rows


def move_row(case: str, size: int, steps: dict[str, Step], options: argparse.Namespace) -> dict[str, Any]:
    """One row of `moves`; size counts bytes read and written."""
    source = torch.empty(size // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    graphs = {label: graph_of(step) for label, step in steps.items()}
    graphs["device copy"] = graph_of(lambda: target.copy_(source))
    us = time_steps(dict(graphs), 20)
    row = {"case": case, "bytes": size, "us": {label: round(value, 1) for label, value in us.items()}}
    show(row)
    return row


# ------------------------------------------------------------------------------------------ profiler


METRICS = {
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram_percent_of_peak",
    "dram__bytes_read.sum": "dram_bytes_read",
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": "stalled_on_memory_per_issue",
    "sm__inst_executed_pipe_tensor.sum": "tensor_instructions",
    "sm__inst_executed.sum": "instructions",
    "gpu__time_duration.sum": "us",
}


def profile(cells: ModuleType) -> None:
    """Rungs 2, 3, 4 and the last, once each after a first time, for Nsight Compute."""
    batch = paged_batch(*CASES["64x4096"])
    step, _ = our_step(batch)
    for _ in range(2):
        cells.run_group(*batch.parts)
        cells.run_group(*batch.parts, tile=64)
        cells.run_group(*batch.parts, tile=64, stages=3)
        step()
    torch.cuda.synchronize()


def read_counters(path: str | None) -> dict[str, dict[str, float]]:
    """Nsight Compute's CSV: the second launch of each of the four."""
    if not path or not Path(path).exists():
        return {}
    lines = [line for line in Path(path).read_text().splitlines() if line.startswith('"')]
    launches: dict[int, dict[str, float]] = {}
    for row in csv.DictReader(lines):
        value = float(row["Metric Value"].replace(",", "")) if row["Metric Value"] not in ("", "n/a") else math.nan
        value *= {"Gbyte": 1e9, "Mbyte": 1e6, "ms": 1e3, "ns": 1e-3, "nsecond": 1e-3}.get(row["Metric Unit"], 1)
        launches.setdefault(int(row["ID"]), {})[METRICS.get(row["Metric Name"], row["Metric Name"])] = value
    last = [launches[i] for i in sorted(launches)][-4:]
    return dict(zip(("2 group", "3 wide gather", "4 pipelined", "ours"), last, strict=False))


# ------------------------------------------------------------------------------------------ the whole


def peers(options: argparse.Namespace) -> dict[str, Any]:
    """The peers by name; none without their folder."""
    if not options.peers:
        return {}
    sys.path.append(options.peers)
    import attention_peers

    return dict(attention_peers.PEERS)


def headline(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of the README, of all cases that have peers."""
    ratios = [row["x_best_peer"] for row in rows if row["x_best_peer"]]
    even = [row["read_share"] for row in rows if row["bytes"] > 1e9 and row["case"] not in RAGGED]
    ragged = [row["read_share"] for row in rows if row["case"] in RAGGED]
    found: dict[str, Any] = {
        "min_x_best_peer": min(ratios, default=None),
        "geomean_x_best_peer": round(math.exp(statistics.mean(map(math.log, ratios))), 3) if ratios else None,
        "min_read_share_large": min(even, default=None),
        "min_read_share_ragged": min(ragged, default=None),
    }
    prefill = RESULTS / "prefill_attention.json"
    if prefill.exists():
        found |= {k: v for k, v in json.loads(prefill.read_text())["headline"].items() if k.startswith("prefill_x_")}
    return found


def warm(share: str, cells: ModuleType) -> None:
    """Compile a share of everything, on tiny batches of the same kinds."""
    index, count = map(int, share.split("/"))
    jobs: list[Step] = []
    for name, (lens, heads, kv_heads, size, block) in CASES.items():
        def job(name=name, lens=lens, rest=(heads, kv_heads, size, block)):  # type: ignore[no-untyped-def]
            batch = paged_batch([512] * len(lens), *rest)
            our_step(batch)[0]()
            our_step(batch, batch_invariant=True)[0]()
            if name in LADDER:
                for tiles in our_rungs(batch).values():
                    our_step(batch, tiles)[0]()
            if name == "64x4096":
                for changes in VARIANTS.values():
                    our_step(batch, picked(batch, **changes))[0]()

        jobs.append(job)
    tiny = paged_batch([512] * 4, 32, 8, 128, 16)
    jobs += [step for _, step in naive_rungs(tiny, cells)]
    for block in (*BLOCKS, 4096):
        jobs.append(lambda block=block: our_step(paged_batch([4096] * 64, 32, 8, 128, block))[0]())
    for batch_size in sorted({b for b, _ in GRID}):
        jobs.append(lambda b=batch_size: our_step(paged_batch([512] * b, 32, 8, 128, 16))[0]())
    for step in jobs[index::count]:
        try:
            step()
        except Exception as error:
            print(error, file=sys.stderr)
    torch.cuda.synchronize()


def main() -> None:
    """Measure, print a line a case, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", help="folder with attention_peers.py")
    parser.add_argument("--counters", help="CSV of Nsight Compute, made with --profile")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--cases", default="", help="some cases only, separated by commas; then nothing is written")
    parser.add_argument("--profile", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    options = parser.parse_args()
    cells = ladder()
    if options.warm or options.profile:
        warm(options.warm, cells) if options.warm else profile(cells)
        return
    warm_in_parallel([__file__], processes())
    options.labels = list(peers(options))
    rows = []
    for name in options.cases.split(",") if options.cases else CASES:
        rows.append(measure(name, options, cells))
        torch.cuda.empty_cache()
    show(headline(rows))
    if not options.cases:
        path = write_result(
            "decode_attention",
            modules=MODULES,
            workload="one layer, one new token a sequence, bf16, block tables random permutations, KV as [num_blocks, "
            "2, block_size, num_kv_heads, head_size]; bytes are keys, values, query and output; CUDA-graph replays, L2 "
            "flushed, all in one process; peers planned outside the timed call, FlashInfer with tensor cores",
            repeats=options.repeats,
            statistic="median",
            rows=rows,
            headline=headline(rows),
            packages=("torch", "triton", "flashinfer-python"),
            torch_us=torch_rung(options),
            sweeps=sweeps(options),
            moves=moves(options),
            counters=read_counters(options.counters),
        )
        print(path)


if __name__ == "__main__":
    main()
