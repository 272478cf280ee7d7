"""The README's table of measured results, written from benchmarks/results/*.json.

    python tools/results.py [--check]

Each JSON says what it measured, where and with which modules; a result whose modules have changed since is
marked in the table.  --check writes nothing and exits 1 where the README says something else.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.common import RESULTS, module_hash  # noqa: E402

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"

# What the README says of a headline figure; figures not listed stay in the JSON and in their chapter.
SAYS = {
    "engine": {
        "tokens_per_s_256": "Llama 3 8B's shape, bf16, 256 requests: useful output tokens/s",
        "tokens_per_s_1024": "the same, 1,024 requests, 256 running at most",
        "x_hf_static_64": "256 requests: times transformers' `generate` in static batches of 64",
        "x_hf_generate_batch": "the same: times transformers' `generate_batch`",
        "x_vllm_32": "32 requests: times vLLM 0.23",
        "x_vllm_256": "256 requests: times vLLM 0.23",
        "x_vllm_1024": "1,024 requests: times vLLM 0.23",
        "roofline_share": "256 requests: share of the roofline, prefill included",
        "roofline_share_vllm": "the same, vLLM 0.23",
    },
    "engine_cpu": {
        "x_hf_cpu_8": "SmolLM2-135M in float32, 8 prompts: times transformers' `generate`",
        "x_hf_cpu_32": "the same, 32 prompts",
        "x_hf_cpu_32_shared": "the same, 32 prompts behind one common beginning",
    },
    "device_sampling": {
        "x_multinomial": "drawing one token at a temperature, 256 rows: times faster than `torch.multinomial`",
        "x_sort_top_p": "top-p without a sort, 256 rows: times faster than sorting",
        "draw_read_share": "drawing at a temperature: share of a plain read of the logits",
    },
    "bookkeeping": {
        "x_vllm_64": "bookkeeping of a decode step, 64 running: times faster than vLLM 0.23's KVCacheManager",
        "x_vllm_256": "the same, 256 running",
        "x_vllm_1024": "the same, 1,024 running",
        "us_1": "the same, one running: microseconds",
    },
    "prefix_cache": {
        "x_vllm_shared": "2,000 requests, 2,000 tokens shared and 64 decoded each, all bookkeeping: times vLLM 0.23",
        "x_vllm_agent": "500 agent sessions of 8 turns, the same",
        "hit_rate_shared": "tokens found in the cache, shared prompt",
        "hit_rate_agent": "tokens found in the cache, agent sessions",
    },
    "scheduler": {
        "x_vllm_churn": "block accounting of 20,000 requests: times faster than vLLM 0.23",
        "step_us_64": "`schedule` and `commit`, 64 running: microseconds a step",
        "step_us_256": "the same, 256 running",
        "step_us_1024": "the same, 1,024 running",
    },
    "simulate": {
        "simulated_requests_per_s": "requests simulated a second, by the scheduler that serves",
    },
    "decode_attention": {
        "min_x_best_peer": "paged decode, speed over the best of FlashAttention-3, FlashInfer, vLLM Triton: worst case",
        "geomean_x_best_peer": "the same, geometric mean",
        "min_read_share_large": "share of a plain read of the same bytes, worst even case above 1 GB",
        "min_read_share_ragged": "the same, worst ragged case",
    },
    "prefill_attention": {
        "prefill_x_fa3": "paged prefill of 4 x 8,192 tokens: times the speed of FlashAttention-3",
        "prefill_x_vllm_triton": "the same: times the speed of vLLM's Triton kernel",
    },
}


def results() -> dict[str, dict[str, Any]]:
    """Every result by its name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}


def stale(result: dict[str, Any]) -> bool:
    """Whether a module has changed since it was measured."""
    return bool(module_hash(result["modules"]) != result["module_hash"])


def table() -> str:
    """The Markdown table for the README."""
    lines = ["| measured | figure | device | by |", "|---|---|---|---|"]
    found = results()
    for name in [name for name in SAYS if name in found]:
        result = found[name]
        note = ", modules changed since" if stale(result) else ""
        for figure, words in SAYS[name].items():
            if figure in result["headline"]:  # parts of `engine` are measured one by one
                value, device = result["headline"][figure], result["device"]
                shown = f"{value:,}" if isinstance(value, int) else value
                lines.append(f"| {words} | {shown} | {device}{note} | `benchmarks/{name}.py` |")
    return "\n".join(lines)


def filled(readme: str) -> str:
    """The README's text with the table in its place."""
    before, rest = readme.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


def main() -> int:
    """Write the table into README.md, or with --check only compare."""
    path = ROOT / "README.md"
    old = path.read_text()
    new = filled(old)
    if "--check" in sys.argv[1:]:
        if new != old:
            print("README.md: its results are not those of benchmarks/results; run `python tools/results.py`")
        return int(new != old)
    path.write_text(new)
    print(f"README.md: {new.count('modules changed since')} figures were measured with other modules")
    return 0


if __name__ == "__main__":
    sys.exit(main())
