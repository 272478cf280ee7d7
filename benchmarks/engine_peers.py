"""The engines that ours is compared with: transformers' static batches and its continuous batching, and vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

Rows = list[dict[str, Any]]
Requests = tuple[list[list[int]], list[int]]
LONGEST_RUN = 150.0  # seconds after which a static batch is stopped, and counted as far as it came


def static_batch(model: Any, prompts: list[list[int]], outputs: list[int]) -> tuple[float, int]:
    """Seconds, and steps made, of `generate` on one left-padded batch, to the longest of its answers."""
    width, most = max(map(len, prompts)), max(outputs)
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device="cuda")
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device="cuda")
    config = GenerationConfig(
        max_new_tokens=most, do_sample=False, pad_token_id=0, eos_token_id=None, max_time=LONGEST_RUN
    )
    torch.cuda.synchronize()
    start = time.perf_counter()
    made = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
    torch.cuda.synchronize()
    return time.perf_counter() - start, made.shape[1] - width


def part_static(model: Any, requests: Requests) -> Rows:
    """transformers' generate: the first batch of the workload, of 16, 64 and 256 requests."""
    rows: Rows = []
    prompts, outputs = requests
    model.set_attn_implementation("sdpa")
    static_batch(model, prompts[:4], [8] * 4)
    for batch in (16, 64, 256):
        row: dict[str, Any] = {
            "engine": f"generate, static {batch}",
            "requests": batch,
            "steps_wanted": max(outputs[:batch]),
        }
        try:
            seconds, steps = static_batch(model, prompts[:batch], outputs[:batch])
        except torch.OutOfMemoryError as error:
            rows.append(row | {"failed": str(error).split(". ")[0]})
        else:
            useful = sum(min(output, steps) for output in outputs[:batch])
            row |= {"output_tokens": useful, "steps": steps, "seconds": round(seconds, 2)}
            rows.append(row | {"tokens_per_s": round(useful / seconds, 1)})
        torch.cuda.empty_cache()
        print(json.dumps(rows[-1]), flush=True)
    return rows


def serve(manager: Any, prompts: list[list[int]], outputs: list[int]) -> int:
    """Tokens made for `prompts`, each answer to its own length."""
    for prompt, output in zip(prompts, outputs, strict=True):
        manager.add_request(prompt, max_new_tokens=output)
    done = made = 0
    while done < len(prompts):
        result = manager.get_result(timeout=300)
        if result is None:
            raise RuntimeError(f"{done} of {len(prompts)} answers came")
        if result.is_finished():
            done += 1
            made += len(result.generated_tokens)
    return made


def part_batch(model: Any, requests: Requests) -> Rows:
    """transformers' continuous batching, the engine behind `generate_batch`, each request to its own length."""
    prompts, outputs = requests
    config = GenerationConfig(
        max_new_tokens=1024, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cuda_graph=True
    )
    model.set_attn_implementation("paged|sdpa")
    manager = model.init_continuous_batching(generation_config=config)
    manager.start()
    try:
        serve(manager, prompts, [8] * len(prompts))  # compiles, captures and finds its memory
        start = time.perf_counter()
        made = serve(manager, prompts, outputs)
        seconds = time.perf_counter() - start
    finally:
        manager.stop(block=True)
    row = {
        "engine": "generate_batch",
        "requests": 256,
        "output_tokens": made,
        "expected_tokens": sum(outputs),
        "seconds": round(seconds, 2),
    }
    row["tokens_per_s"] = round(made / seconds)
    print(json.dumps(row), flush=True)
    return [row]


def part_vllm(peer: Path) -> Rows:
    """vLLM in a process of its own."""
    run = subprocess.run(
        [sys.executable, str(peer / "vllm_engine.py")], stdout=subprocess.PIPE, text=True, check=True, cwd="/tmp"
    )
    rows = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    print(run.stdout, flush=True)
    return rows
