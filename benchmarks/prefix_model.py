"""What the prefix cache is worth to a real model: 12 questions behind one 2,000-token system prompt.

    python benchmarks/prefix_model.py

SmolLM2-135M in float32 on the CPU.  Four runs: with and without the cache, requests one after the other and all
admitted in one step.  A request's time to first token counts from its admission to its first sampled token, in
processor time of the one thread at work, so that other programs on the machine do not count; prefill work is counted in
tokens that the model computes.  The answers of all four runs must be the same, token for token.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import write_result
from paged_kv.block_manager import BlockManager
from paged_kv.hf_adapter import PagedModel, host, load_guest
from paged_kv.packed_batch import pack
from paged_kv.prefix_cache import PrefixCache, admit_cached, give_back, publish_full

SYSTEM_TOKENS, NEW_TOKENS, BLOCK_SIZE, MAX_LEN = 2000, 8, 16, 2176
QUESTIONS = [
    "What is the capital of France?",
    "Name three colours of the rainbow.",
    "How many legs has a spider?",
    "Who wrote Hamlet?",
    "Translate 'good morning' into Spanish.",
    "What is seven times eight?",
    "Is the sun a star?",
    "Give me a word that rhymes with light.",
    "What do bees make?",
    "Which ocean is the largest?",
    "What is frozen water called?",
    "Name a primary colour.",
]


def system_prompt() -> str:
    """A long description of tools, such as an agent carries in front of every question."""
    lines = ["You are a helpful assistant. Answer briefly. These are the tools that you could call."]
    subjects = "weather calendar mail files maps music notes money news tickets photos games".split()
    for number in range(200):
        subject = subjects[number % len(subjects)]
        lines.append(
            f"Tool {number}: look up {subject}. It takes a text and a limit of {number * 7 % 31 + 1} results, "
            f"and returns a list of entries about {subject}, each with a title and a date."
        )
    return "\n".join(lines)


def prompts(tokenizer: Any) -> list[list[int]]:
    """The token ids of the 12 requests: SYSTEM_TOKENS shared ones, then the question in the model's own template."""
    shared = tokenizer(f"<|im_start|>system\n{system_prompt()}")["input_ids"][:SYSTEM_TOKENS]
    ends = [f"<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in QUESTIONS]
    return [shared + tokenizer(end)["input_ids"] for end in ends]


def serve(guest: PagedModel, batches: list[list[list[int]]], cached: bool) -> dict[str, Any]:
    """Answer each batch of requests greedily, the next one when it is done."""
    manager = BlockManager(len(guest.store.tensors[0]), BLOCK_SIZE, 16, MAX_LEN)
    cache = PrefixCache(manager.pool, BLOCK_SIZE)
    answers, first, computed, gaps, peak = [], [], 0, [], 0
    for batch in batches:
        start = time.thread_time()
        rows, new_ids, published = [], [], []
        for prompt in batch:
            row, found = admit_cached(manager, cache, prompt)
            published.append(publish_full(manager, cache, row, prompt, found // BLOCK_SIZE) if cached else 0)
            rows.append(row)
            new_ids.append(prompt[found:])
        computed += sum(map(len, new_ids))
        peak = max(peak, manager.pool.num_blocks - manager.pool.num_free)
        texts: list[list[int]] = [[] for _ in batch]
        for step in range(NEW_TOKENS):
            best = guest.forward(pack(manager.tables, rows, new_ids)).topk(2)
            gaps += (best.values[:, 0] - best.values[:, 1]).tolist()
            new_ids = best.indices[:, :1].tolist()
            if step == 0:
                first += [time.thread_time() - start] * len(batch)
            for text, token in zip(texts, new_ids, strict=True):
                text += token
            if step + 1 < NEW_TOKENS:
                cache.forget(manager.append(rows))
        answers += texts
        print(len(answers), "answered", flush=True)
        for row in rows:
            give_back(manager, row)
    return {"answers": answers, "first": first, "computed": computed, "gap": min(gaps), "peak": peak}


def main() -> None:
    """Run all four, compare the answers, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load_guest()
    requests = prompts(tokenizer)
    own = [len(prompt) - SYSTEM_TOKENS for prompt in requests]
    blocks = sum(-(-(len(prompt) + NEW_TOKENS) // BLOCK_SIZE) for prompt in requests)
    guest = host(model, blocks, BLOCK_SIZE)
    rows, answers = [], []
    for arrival, batches in (("one by one", [[prompt] for prompt in requests]), ("together", [requests])):
        for cached in (True, False):
            start = time.thread_time()
            run = serve(guest, batches, cached)
            answers.append(run["answers"])
            rows.append(
                {
                    "arrival": arrival,
                    "cache": cached,
                    "tokens_computed": run["computed"],
                    "first_ttft_s": round(run["first"][0], 2),
                    "median_ttft_s": round(statistics.median(run["first"]), 2),
                    "total_s": round(time.thread_time() - start, 1),
                    "peak_blocks": run["peak"],
                    "smallest_gap": round(run["gap"], 5),
                }
            )
            print(rows[-1], flush=True)
    assert all(each == answers[0] for each in answers), "the cache changed an answer"
    by_run = {(row["arrival"], row["cache"]): row for row in rows}
    cold, warm = by_run["one by one", False], by_run["one by one", True]
    path = write_result(
        "prefix_model",
        modules=["prefix_keys", "block_names", "prefix_cache", "hf_adapter", "packed_batch", "attention"],
        workload=f"SmolLM2-135M, float32, CPU, one thread: {len(requests)} requests of {SYSTEM_TOKENS} shared "
        f"and {min(own)} to {max(own)} own tokens, {NEW_TOKENS} sampled greedily",
        repeats=1,
        statistic="one run each; time to first token from admission, processor time of the thread",
        rows=rows,
        headline={
            "x_prefill_tokens": round(cold["tokens_computed"] / warm["tokens_computed"], 2),
            "x_median_ttft": round(cold["median_ttft_s"] / warm["median_ttft_s"], 1),
            "answers_identical": len(answers[0]),
        },
        packages=("torch", "transformers"),
        answers=[tokenizer.decode(each) for each in answers[0]],
    )
    print(path)


if __name__ == "__main__":
    main()
