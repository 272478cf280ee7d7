"""How long it takes to choose the tokens of a batch on a GPU, against a plain read of the logits and against sorting.

    python benchmarks/device_sampling.py

The vocabulary is that of Llama 3, 128,256 tokens, logits in bf16.  Every contestant is a captured graph; see
gpu_timing.py for how time is taken.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import write_result
from benchmarks.gpu_timing import graph_of, read_step, show, time_steps
from paged_kv.device_sampling import DeviceSampler
from paged_kv.keyed_noise import draw_tokens
from paged_kv.row_settings import KEY, MIN_P, TEMPERATURE, TOP_K
from paged_kv.sampling_params import SamplingParams
from paged_kv.token_cuts import cut_tokens

VOCAB, REPEATS = 128256, 20
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "top_k and top_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.1, "presence_penalty": 0.5},
    "log-probabilities": {"temperature": 0.8, "logprobs": 5},
}


def by_sorting(logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """What a batch with knobs of its own does in most engines' plain torch path: sort, sum up, cut, draw."""
    scores, ids = (logits.float() / temperature).sort(-1)
    if top_k:
        scores = scores.masked_fill(scores < scores[:, -top_k, None], -torch.inf)
    if top_p < 1:
        gone = scores.softmax(-1).cumsum(-1) <= 1 - top_p
        gone[:, -1] = False
        scores = scores.masked_fill(gone, -torch.inf)
    return ids.gather(-1, scores.softmax(-1).multinomial(1))[:, 0]


def contestants(logits: Tensor, options: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Ours, its torch path, and sorting or torch.multinomial, for one set of parameters."""
    count = len(logits)
    rows, host = torch.arange(count, device="cuda"), np.arange(count)
    sampler = DeviceSampler(count, VOCAB, "cuda")
    params = [SamplingParams(**options, seed=i) for i in range(count)]
    sampler.open_rows(range(count), params, [0] * count, [[1, 2, 3]] * count, [[4, 5]] * count)
    mine = sampler.settings
    temperature, keys = mine[:, TEMPERATURE].float(), mine[:, KEY:].long()

    def in_torch() -> Tensor:
        x = logits
        if params[0].truncates:
            x = cut_tokens(x.float(), temperature[:, None], mine[:, TOP_K : MIN_P + 1], params[0].top_k)
        return draw_tokens(x, temperature, keys, rows)

    found: dict[str, Callable[[], Any]] = {"ours": lambda: sampler.sample(logits, rows, rows, host).tokens}
    known = {name: value for name, value in options.items() if name in ("temperature", "top_k", "top_p")}
    if params[0].truncates:
        found["sort"] = lambda: by_sorting(logits, **known)
        found["torch"] = in_torch
    elif options.keys() == {"temperature"}:
        found["multinomial"] = lambda: (logits.float() / 0.8).softmax(-1).multinomial(1)
        found["torch"] = in_torch
    return found


def main() -> None:
    """Measure, print, write the JSON."""
    rows = []
    gen = torch.Generator("cuda").manual_seed(0)
    for count in (1, 32, 256):
        logits = (torch.randn(count, VOCAB, device="cuda", generator=gen) * 3).bfloat16()
        for case, options in CASES.items():
            steps: dict[str, Callable[[], Any]] = {"read": read_step(logits.nbytes)}
            steps |= {name: graph_of(step) for name, step in contestants(logits, options).items()}
            times = {name: round(us, 1) for name, us in time_steps(steps, REPEATS).items()}
            rows.append({"case": case, "batch": count, "us": times})
            show(rows[-1])
    at = {row["case"]: row["us"] for row in rows if row["batch"] == 256}
    write_result(
        "device_sampling",
        modules=["keyed_noise", "draw_kernel", "token_cuts", "shape_kernels", "row_settings", "device_sampling"],
        workload=f"one token for each of 1, 32, 256 rows of bf16 logits, vocabulary {VOCAB:,}, normal times 3",
        repeats=REPEATS,
        rows=rows,
        headline={
            "draw_read_share": round(at["temperature"]["read"] / at["temperature"]["ours"], 3),
            "x_multinomial": round(at["temperature"]["multinomial"] / at["temperature"]["ours"], 1),
            "x_sort_top_p": round(at["top_p"]["sort"] / at["top_p"]["ours"], 1),
        },
        packages=("torch", "triton"),
    )


if __name__ == "__main__":
    main()
