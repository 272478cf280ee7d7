"""SmolLM2 on two CPU cores: this engine against transformers' `generate` in one static batch.

    python benchmarks/engine_cpu.py [--repeats 3] [--threads 2] [--model smollm2] [--profile]

float32, greedy, EOS ignored: each prompt gets the number of tokens that was drawn for it.  The static batch pads on
the left and runs to the longest answer, since nobody may leave earlier; tokens beyond a prompt's own number are not
counted, for either side.  Prompts and answers have lognormal lengths, sigma 1.0, means of 60, clipped to 4 to 256,
seed 0.  The case `32_shared`, run once, puts one system prompt of 300 tokens before each of the 32 prompts.

The repeats of both sides alternate.  Wall time of a quiet machine is the figure; the processor time of the process
stands beside it: it counts threads that spin, and not the time that others have taken.  What was expected, from counts
alone, is `expected` in each row: the tokens that the static batch runs through the model, over those that we run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import numpy as np
import torch
from common import write_result
from torch import Tensor

from paged_kv.engine import Engine
from paged_kv.model_source import load_model

SIGMA, MEAN, LOW, HIGH, SYSTEM = 1.0, 60, 4, 256, 300
MODULES = ["engine", "delivery", "chooser", "runner", "step_upload", "scheduler", "cpu_attention"]
MODULES += ["packed_products"]
Case = tuple[list[list[int]], list[int]]


def lengths(rng: np.random.Generator, count: int) -> list[int]:
    """Lognormal lengths of mean `MEAN`, clipped."""
    drawn = rng.lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, count)
    return np.clip(np.rint(drawn), LOW, HIGH).astype(int).tolist()


def make_case(count: int, vocab: int, shared: int) -> Case:
    """Prompts of random tokens, and the number of tokens that each answer gets."""
    rng = np.random.default_rng(0)
    prompts, answers = lengths(rng, count), lengths(rng, count)
    system = rng.integers(100, vocab, shared).tolist()
    return [system + rng.integers(100, vocab, n).tolist() for n in prompts], answers


def static(model: Any, case: Case) -> list[list[int]]:
    """One batch, padded on the left, run to the longest answer; returns each prompt's own tokens."""
    prompts, answers = case
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :], mask[row, width - len(prompt) :] = torch.tensor(prompt), 1
    most = max(answers)
    output: Tensor = model.generate(
        input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=most, eos_token_id=None, pad_token_id=0
    )
    assert output.shape[1] == width + most, "a prompt ended early"
    return [row[width : width + n].tolist() for row, n in zip(output, answers, strict=True)]


def ours(engine: Engine, case: Case) -> list[list[int]]:
    """The same through the engine; the prefix cache begins empty."""
    assert engine.cache is not None
    engine.cache.reset()
    answers = engine.generate(case[0], case[1], stop_tokens=())
    return [answer.texts[0].token_ids for answer in answers]


def clocks() -> tuple[float, float]:
    """Wall time, and processor time of all threads of this process."""
    return time.perf_counter(), time.process_time()


def measure(name: str, model: Any, engine: Engine, case: Case, repeats: int) -> dict[str, Any]:
    """One row: medians of interleaved repeats."""
    ways = {"hf": lambda: static(model, case), "ours": lambda: ours(engine, case)}
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    tokens: dict[str, list[list[int]]] = {}
    counts = engine.steps, engine.tokens_run
    for _ in range(repeats):
        for way, run in ways.items():
            start = clocks()
            tokens[way] = run()
            seconds[way].append((clocks()[0] - start[0], clocks()[1] - start[1]))
        print(name, {way: [round(s, 1) for s in times[-1]] for way, times in seconds.items()}, flush=True)
    useful, longest = sum(case[1]), max(case[1])
    wall, cpu = ({way: statistics.median(s[i] for s in times) for way, times in seconds.items()} for i in (0, 1))
    run_by_static = len(case[0]) * (max(map(len, case[0])) + longest - 1)
    run_by_ours = (engine.tokens_run - counts[1]) // repeats
    return {
        "case": name, "repeats": repeats, "prompts": len(case[0]),
        "prompt_tokens": sum(map(len, case[0])), "useful_tokens": useful, "longest_answer": longest,
        "hf_tokens_run": run_by_static, "ours_tokens_run": run_by_ours,
        "ours_steps": (engine.steps - counts[0]) // repeats, "expected": round(run_by_static / run_by_ours, 2),
        "hf_useful_share": round(useful / (len(case[0]) * longest), 3),
        "equal_answers": sum(a == b for a, b in zip(tokens["hf"], tokens["ours"], strict=True)),
        **{f"{way}_s": round(s, 2) for way, s in wall.items()},
        **{f"{way}_cpu_s": round(s, 2) for way, s in cpu.items()},
        **{f"{way}_tokens_per_s": round(useful / s, 1) for way, s in wall.items()},
        "times": round(wall["hf"] / wall["ours"], 2), "times_cpu": round(cpu["hf"] / cpu["ours"], 2),
        "load_average": round(os.getloadavg()[0], 1),
    }  # fmt: skip


def profile(engine: Engine, case: Case) -> None:
    """Where our time goes: functions by their own time, then operators of torch."""
    import cProfile
    import pstats

    with cProfile.Profile() as found:
        ours(engine, case)
    pstats.Stats(found).sort_stats("tottime").print_stats(25)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as traced:
        ours(engine, (case[0], [min(n, 24) for n in case[1]]))
    print(traced.key_averages().table(sort_by="self_cpu_time_total", row_limit=20, max_name_column_width=40))


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", default="smollm2", help="random:smollm2-135m where the weights are missing")
    parser.add_argument("--profile", action="store_true", help="only show where our time goes")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, _ = load_model(options.model, device="cpu")
    engine = Engine(model, num_blocks=2048)
    cases = {name: make_case(n, engine.vocab_size, shared) for name, n, shared in CASES}
    if options.profile:
        return profile(engine, cases["32"])
    ours(engine, (cases["8"][0], [2] * 8))
    static(model, (cases["8"][0], [2] * 8))
    repeats = {name: 1 if shared else options.repeats for name, _, shared in CASES}
    rows = [measure(name, model, engine, case, repeats[name]) for name, case in cases.items()]
    headline = {f"x_hf_cpu_{row['case']}": row["times"] for row in rows}
    path = write_result(
        "engine_cpu",
        modules=MODULES,
        workload=f"SmolLM2-135M ({options.model}) float32, {options.threads} threads; lognormal lengths, "
        f"sigma {SIGMA}, means {MEAN}, clipped to {LOW}-{HIGH}, seed 0; EOS ignored, useful tokens counted; "
        "static: one batch, left padding",
        repeats=options.repeats,
        statistic="median of interleaved repeats, wall time; processor time beside it",
        packages=("numpy", "torch", "transformers"),
        rows=rows,
        headline=headline,
    )
    print(path)
    for row in rows:
        print(row)


CASES = (("8", 8, 0), ("32", 32, 0), ("32_shared", 32, SYSTEM))

if __name__ == "__main__":
    main()
