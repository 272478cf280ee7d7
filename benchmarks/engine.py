"""Engines on one GPU: ours, transformers' static batches and `generate_batch`, and vLLM, on the same requests.

    python benchmarks/engine.py PART [PART ...] [--peer FOLDER]
        parts: ours ladder features preempt anatomy static batch vllm
    python benchmarks/engine.py join        all parts that are there -> engine.json

A Llama-3-8B shape with random weights in bf16.  Prompt and answer lengths are lognormal, sigma 1.0, means 161 and
338, clipped to 4 to 1,024, seed 0; end-of-text is ignored and a request stops at its drawn length.  Useful output
tokens a second, at most 256 running.

Each part writes engine/PART.json under $RESULTS_DIR; vLLM runs in FOLDER/vllm_engine.py, which draws the same lengths.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import ROOT, environment, module_hash, write_result
from engine_anatomy import anatomy
from engine_peers import part_batch, part_static, part_vllm
from transformers import LlamaConfig, LlamaForCausalLM

from paged_kv.engine import Engine
from paged_kv.graphs import GraphRunner
from paged_kv.preemption import Costs
from paged_kv.runner import EagerRunner
from paged_kv.step_plan import Host

MODULES = [
    "step_upload",
    "runner",
    "chooser",
    "delivery",
    "engine",
    "step_sizes",
    "fused_layers",
    "fast_moves",
    "graphs",
]
SIZES = (32, 256, 1024)
MAX_RUNNING = 256
PARTS = {"ours", "ladder", "features", "preempt", "anatomy", "static", "batch", "vllm"}
SHAPE: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
POOL = "64 GiB"
HOST_BLOCKS = 12_000  # 23.4 GiB of host memory
SMALL_POOL = 1_500  # blocks, under half of what 256 requests come to hold at once (3,250)
Rows = list[dict[str, Any]]


def workload(n: int) -> tuple[list[list[int]], list[int]]:
    """n prompts and their output lengths; the same numbers as the peer's."""
    rng = np.random.default_rng(0)
    prompt = np.clip(rng.lognormal(np.log(161) - 0.5, 1.0, n), 4, 1024).astype(int)
    output = np.clip(rng.lognormal(np.log(338) - 0.5, 1.0, n), 4, 1024).astype(int)
    ids = np.random.default_rng(1)
    return [ids.integers(0, SHAPE["vocab_size"], k).tolist() for k in prompt], output.tolist()


def make_model(layers: int) -> Any:
    """Random weights, made on the GPU."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(LlamaConfig(**SHAPE | {"num_hidden_layers": layers}))
    torch.set_default_dtype(torch.float32)
    return model.eval()


class Recorder:
    """A runner that also writes down what each step had to do: (tokens, context read, pairs, samples)."""

    def __init__(self, make: Callable[..., Any], log: list[tuple[int, int, int, int]], *given: Any) -> None:
        self.inner, self.log = make(*given), log

    @property
    def counts(self) -> Any:
        """Those of the runner inside."""
        return self.inner.counts

    def forward(self, plan: Any, sampled: Any) -> Any:
        """As the runner inside does."""
        ends, new = plan.seq_lens, plan.new_tokens
        pairs = (new * (ends - new) + new * (new + 1) // 2).sum()
        self.log.append((plan.num_tokens, int(ends.sum()), int(pairs), len(plan.sample_rows)))
        return self.inner.forward(plan, sampled)


def ceilings() -> tuple[float, float]:
    """Bytes a second that a plain sum over 4 GiB reads; FLOP/s of a large bf16 product."""
    from gpu_timing import read_step, time_steps

    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    times = time_steps({"read": read_step(4 << 30), "matmul": lambda: a @ a}, 10)
    return (4 << 30) / times["read"] * 1e6, 2 * 8192**3 / times["matmul"] * 1e6


def floor_seconds(log: Sequence[tuple[int, int, int, int]], model: Any, ceiling: tuple[float, float]) -> float:
    """The roofline: over all steps, the larger of the time of the bytes and the time of the arithmetic."""
    embedded = model.get_input_embeddings().weight
    weights = sum(p.numel() for p in model.parameters()) - embedded.numel()
    head, config = model.lm_head.weight.numel(), model.config
    per_token = 2 * 2 * config.num_key_value_heads * 128 * config.num_hidden_layers
    total = 0.0
    for tokens, context, pairs, samples in log:
        num_bytes = 2 * weights + per_token * (context + tokens)
        flops = (
            2 * (weights - head) * tokens
            + 2 * head * samples
            + 4 * pairs * config.hidden_size * config.num_hidden_layers
        )
        total += max(num_bytes / ceiling[0], flops / ceiling[1])
    return total


def timed(engine: Engine, prompts: Any, outputs: Any, n: int = 1, salts: bool = False) -> tuple[float, int]:
    """Seconds, and useful tokens, of one run; the prefix cache starts empty, and with `salts` stays so."""
    if engine.cache is not None:
        engine.cache.reset()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        engine.add_request(prompt, output, n=n, stop_tokens=(), salt=str(i) if salts else None)
    tokens = sum(len(text.token_ids) for piece in engine.run() if piece.answer for text in piece.answer.texts)
    seconds = time.perf_counter() - start
    assert tokens == sum(outputs) * n, "a request ended before its drawn length"
    return seconds, tokens


def kinds(engine: Engine, before: dict[str, int]) -> dict[str, int]:
    """Steps by kind since `before`."""
    return {kind: count - before.get(kind, 0) for kind, count in engine.stats.step_kinds.items()}


def measure(engine: Engine, name: str, n: int, repeats: int, **more: Any) -> dict[str, Any]:
    """Median of `repeats` runs over the workload of n requests."""
    prompts, outputs = workload(n)
    before = engine.stats.step_kinds
    runs = [timed(engine, prompts, outputs) for _ in range(repeats)]
    seconds = statistics.median(run[0] for run in runs)
    tokens = runs[0][1]
    row = {
        "engine": name,
        "requests": n,
        "output_tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_s": round(tokens / seconds),
    }
    row |= {"all_seconds": [round(run[0], 3) for run in runs], "step_kinds": kinds(engine, before), **more}
    print(json.dumps(row), flush=True)
    return row


class Bench:
    """The model, and one engine at full speed that all parts but the ladder share; made when first asked for."""

    def __init__(self, layers: int) -> None:
        self.model = make_model(layers)
        self.log: list[tuple[int, int, int, int]] = []

    @cached_property
    def engine(self) -> Engine:
        """The engine; its runner writes down what each step had to do."""
        runner = partial(Recorder, GraphRunner, self.log)
        start = time.perf_counter()
        engine = Engine(
            self.model, memory=POOL, max_seq_len=8192, max_running=MAX_RUNNING, host_blocks=HOST_BLOCKS, runner=runner
        )
        self.startup = round(time.perf_counter() - start, 1)
        return engine

    @cached_property
    def ceiling(self) -> tuple[float, float]:
        """Of this device."""
        return ceilings()


def part_ours(bench: Bench) -> Rows:
    """Our engine at full speed, and the floor under its steps."""
    rows, engine = [], bench.engine
    timed(engine, *workload(16))  # what is compiled at first use, the sampler, is compiled here
    for n, repeats in zip(SIZES, (2, 3, 2), strict=True):
        bench.log.clear()
        row = measure(engine, "paged_kv", n, repeats, startup_s=bench.startup)
        row["floor_s"] = round(floor_seconds(bench.log, bench.model, bench.ceiling) / repeats, 3)
        row["read_TB_s"], row["matmul_TFLOP_s"] = round(bench.ceiling[0] / 1e12, 3), round(bench.ceiling[1] / 1e12)
        rows.append(row)
    return rows


def part_ladder(bench: Bench) -> Rows:
    """What each measure brings, one after the other, at 256 requests; the last, fusing, is the part `ours`."""
    rows = []
    for name, runner in (("eager", EagerRunner), ("graphs", partial(GraphRunner, fuse=False))):
        engine = Engine(bench.model, memory="40 GiB", max_seq_len=4096, max_running=MAX_RUNNING, runner=runner)
        timed(engine, *workload(16))
        for depth, suffix in ((1, ""), (2, ", a step ahead")):
            engine.depth = depth
            rows.append(measure(engine, name + suffix, 256, 1, ahead=depth == 2))
        del engine
        torch.cuda.empty_cache()
    return rows


def part_features(bench: Bench) -> Rows:
    """A prompt of 2,000 tokens shared, or kept apart by salts; four samples forked, or four requests."""
    ids, vocab, rows, engine = np.random.default_rng(2), SHAPE["vocab_size"], [], bench.engine
    shared = ids.integers(0, vocab, 2000).tolist()
    prompts = [shared + ids.integers(0, vocab, 100).tolist() for _ in range(256)]
    few = [ids.integers(0, vocab, 500).tolist() for _ in range(64)]
    apart = [prompt for prompt in few for _ in range(4)]
    cases: list[tuple[str, Any, dict[str, Any]]] = [
        ("2,000 tokens shared", prompts, {}),
        ("2,000 tokens, a salt each", prompts, {"salts": True}),
        ("n = 4", few, {"n": 4}),
        ("four requests each", apart, {"salts": True}),
    ]
    for name, each, options in cases:
        run = engine.stats.tokens_run
        seconds, tokens = timed(engine, each, [128] * len(each), **options)
        row: dict[str, Any] = {"engine": name, "seconds": round(seconds, 3), "tokens_per_s": round(tokens / seconds)}
        rows.append(row | {"tokens_run": engine.stats.tokens_run - run})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def one_sequence(engine: Engine) -> Rows:
    """Seconds to replay a sequence, and to move its blocks out and back, by its length."""
    size = engine.guest.store.tensors[0][0].nbytes * len(engine.guest.store.tensors)
    ids, moves, rows = np.random.default_rng(3), engine.runner.inner.moves, []  # type: ignore[attr-defined]
    for length in (256, 512, 1024, 2048, 4096, 8000):
        prompt, times, swaps = ids.integers(0, SHAPE["vocab_size"], length).tolist(), [], []
        out = [(block, Host(block)) for block in range(-(-length // 16))]
        for _ in range(4):
            times.append(timed(engine, [prompt], [1])[0])
            start = time.perf_counter()
            moves(out)
            moves([(place, block) for block, place in out])
            torch.cuda.synchronize()
            swaps.append(time.perf_counter() - start)
        row = {"engine": "one sequence", "tokens": length, "blocks": len(out), "bytes_per_block": size}
        replay, swap = statistics.median(times[1:]), statistics.median(swaps[1:])
        rows.append(row | {"replay_s": round(replay, 5), "swap_s": round(swap, 5)})
    return rows


def part_preempt(bench: Bench) -> Rows:
    """Recompute and swap: what each costs by length, and what an overloaded pool makes of either.

    The pool is made small by taking blocks out of it, and the method chosen by figures that leave no doubt.
    """
    engine, rows = bench.engine, one_sequence(bench.engine)
    pool, size = engine.manager.pool, rows[0]["bytes_per_block"]
    costs = {"roomy": engine.relief.costs, "recompute": Costs(size, 1e3, 1e9), "swap": Costs(size, 1e15, 1.0)}
    for name, figures in costs.items():
        assert engine.cache is not None
        engine.cache.reset()
        engine.relief.costs = figures
        held = pool.take(pool.num_free - SMALL_POOL) if name != "roomy" else []
        before, run = dict(engine.stats.preemptions), engine.stats.tokens_run
        seconds, tokens = timed(engine, *workload(256), salts=True)
        row: dict[str, Any] = {"engine": f"pool: {name}", "blocks": pool.num_free, "seconds": round(seconds, 3)}
        row |= {"tokens_per_s": round(tokens / seconds), "tokens_run": engine.stats.tokens_run - run}
        pool.release(held)
        events = {kind: n - before.get(kind, 0) for kind, n in engine.stats.preemptions.items()}
        assert name == "roomy" or events[name] >= 10, f"{name}: {events}, so nothing was tried"
        rows.append(row | {"preemptions": events})
    engine.relief.costs = costs["roomy"]
    for row in rows:
        print(json.dumps(row), flush=True)
    return rows


def part_anatomy(bench: Bench) -> Rows:
    """Where one step's time goes: the host's parts by the clock, the device's by events, its kernels by kind."""
    return anatomy(bench.engine, SHAPE["vocab_size"])


def join(folder: Path) -> None:
    """One file of all parts that are there; each keeps its own device, commit, day and hash of the modules it measured.

    The hash of the whole is that of `ours`, not of the modules as they are when this is run.
    """
    parts = {path.stem: json.loads(path.read_text()) for path in sorted((folder / "engine").glob("*.json"))}
    rows = [{"part": name} | row for name, part in parts.items() for row in part["rows"]]
    rate = {(row["engine"], row.get("requests")): row.get("tokens_per_s") for row in rows}
    seconds = {(row["engine"], row.get("requests")): row.get("seconds") for row in rows}
    floors = {row["requests"]: row["floor_s"] for row in rows if "floor_s" in row}
    ours, vllm, headline = "paged_kv", "vLLM 0.23", dict[str, Any]()

    def compare(name: str, n: int, peer: str, requests: int, digits: int) -> None:
        if rate.get((peer, requests)) and rate.get((ours, n)):
            headline[name] = round(rate[ours, n] / rate[peer, requests], digits)

    headline |= {f"tokens_per_s_{n}": rate[ours, n] for n in SIZES if (ours, n) in rate}
    compare("x_hf_static_64", 256, "generate, static 64", 64, 1)
    compare("x_hf_generate_batch", 256, "generate_batch", 256, 2)
    for n in SIZES:
        compare(f"x_vllm_{n}", n, vllm, n, 3)
    for name, engine in (("roofline_share", ours), ("roofline_share_vllm", vllm)):
        if 256 in floors and seconds.get((engine, 256)):
            headline[name] = round(floors[256] / seconds[engine, 256], 3)
    cpu = folder / "engine_cpu.json"
    if cpu.exists():
        headline["x_hf_cpu_32"] = json.loads(cpu.read_text())["headline"]["x_hf_cpu_32"]
    measured = {
        name: {key: part[key] for key in ("device", "versions", "commit", "date", "module_hash")}
        for name, part in parts.items()
    }
    text = __doc__.split("\n\n")[2].replace("\n", " ") if __doc__ else ""
    path = write_result(
        "engine",
        modules=MODULES,
        workload=text,
        repeats=3,
        rows=rows,
        headline=headline,
        parts=measured,
        **measured["ours"],
    )
    print(path, json.dumps(headline, indent=1))


def run_part(part: str, bench: Callable[[], Bench], peer: Path | None) -> Rows:
    """The rows of one part."""
    if part == "vllm":
        if peer is None:
            raise ValueError("vllm: --peer FOLDER is needed")
        return part_vllm(peer)
    if part in ("static", "batch"):
        return {"static": part_static, "batch": part_batch}[part](bench().model, workload(256))
    own = {"ours": part_ours, "ladder": part_ladder, "features": part_features}
    own |= {"preempt": part_preempt, "anatomy": part_anatomy}
    return own[part](bench())


def main() -> None:
    """Run the parts that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=[*sorted(PARTS), "join"])
    parser.add_argument("--peer", type=Path)
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"], help="fewer, to try the script")
    given = parser.parse_args()
    folder = Path(os.environ.get("RESULTS_DIR", ROOT / "benchmarks" / "results"))
    (folder / "engine").mkdir(parents=True, exist_ok=True)
    bench = cache(partial(Bench, given.layers))
    for part in given.parts:
        if part == "join":
            join(folder)
            continue
        try:
            rows = run_part(part, bench, given.peer)
        except Exception:  # the other parts are worth having
            traceback.print_exc()
            continue
        result = environment(("torch", "triton", "transformers"))
        result |= {"module_hash": module_hash(MODULES), "rows": rows}
        (folder / "engine" / f"{part}.json").write_text(json.dumps(result, indent=1) + "\n")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
