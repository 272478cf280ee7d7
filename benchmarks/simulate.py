"""The server of lab L6 under load: what users feel, what blocks do, and how fast the simulator is.

    python benchmarks/simulate.py [--requests N] [--mooncake FILE] [--azure FILE] [--only EXPERIMENT ...]

Time is simulated, except where a row says `processor_s`: thread time of the simulator itself.  The
two files are public traces (Mooncake's conversation_trace.jsonl, FAST25-release; Azure's
AzureLLMInferenceTrace_conv.csv, 2023); without them the rows of real traces are left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import RESULTS, module_hash, write_result
from paged_kv.block_manager import BlockManager
from paged_kv.cost_model import LLAMA_3_8B_ON_H200
from paged_kv.prefix_cache import PrefixCache
from paged_kv.scheduler import Scheduler
from paged_kv.simulate import SLO, Clock, Report, requests_of, simulate
from paged_kv.trace_shapes import AZURE_CONVERSATION, KIMI_CONVERSATION, Lognormal, TraceShape, generate
from paged_kv.traces import TraceRequest, read_azure, read_mooncake

MODULES = ["simulate", "cost_model", "metrics", "scheduler", "ledger", "residents", "prefix_cache"]
COST = LLAMA_3_8B_ON_H200
BLOCK_SIZE, NUM_BLOCKS, MAX_RUNNING, BUDGET = 16, 27_648, 256, 2048  # 54 GiB of K/V

# The lengths of ShareGPT as the PagedAttention paper gives their means; Poisson arrivals.
NOTHING = Lognormal(1, 0.0)
CHAT = TraceShape(
    requests_per_s=40.0,
    first=Lognormal(161, 1.0),
    added=NOTHING,
    output=Lognormal(338, 1.0),
    pause=NOTHING,
    continues=0.0,
    num_openings=1,
    zipf=0.0,
    opening=NOTHING,
    max_input=1024,
    max_output=1024,
)
RATES = (20, 40, 60, 65, 70, 75, 80, 90, 100)
PROMISE = SLO()
OPENING = (70, 80)  # requests/s: a little below and a little above what the sum says


EXPERIMENTS = ("load", "trace", "speed")


def chat(rate: float, seconds: float, seed: int = 0) -> Iterator[TraceRequest]:
    """Chats that arrive within `seconds`."""
    trace = generate(replace(CHAT, requests_per_s=float(rate)), 10**9, seed)
    return itertools.takewhile(lambda entry: entry.arrival_s < seconds, trace)


def server(
    num_blocks: int = NUM_BLOCKS, max_len: int = 2048, caching: bool = False, **options: Any
) -> tuple[Scheduler, Clock]:
    """A scheduler over an empty pool, and its clock."""
    clock = Clock()
    manager = BlockManager(num_blocks, BLOCK_SIZE, MAX_RUNNING, max_len)
    cache = PrefixCache(manager.pool, BLOCK_SIZE) if caching else None
    settings = {"token_budget": BUDGET, "max_running": MAX_RUNNING, **options}
    return Scheduler(manager, cache, clock=clock, **settings), clock


def run(trace: Iterable[TraceRequest], slo: SLO = PROMISE, **options: Any) -> Report:
    """Serve a trace to its end."""
    scheduler, clock = server(**options)
    return simulate(scheduler, clock, requests_of(trace), COST, slo=slo)


def row(experiment: str, report: Report, **settings: Any) -> dict[str, Any]:
    """A row of the result, rounded to what matters."""
    figures = {name: float(f"{value:.5g}") for name, value in report.summary().items()}
    print(experiment, settings, figures, file=sys.stderr)
    return {"experiment": experiment, **settings, "submitted": report.submitted, **figures}


def kept_rows(name: str, again: Sequence[str], modules: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of the stored result whose experiment is not run `again`; none of other modules' making."""
    path = RESULTS / f"{name}.json"
    stored = json.loads(path.read_text()) if path.exists() else {"rows": [], "module_hash": ""}
    kept = [row for row in stored["rows"] if row["experiment"] not in again]
    if kept and stored["module_hash"] != module_hash(modules):
        raise SystemExit(f"{path.name}: its modules have changed since; run all experiments")
    return kept


def load_rows() -> Iterator[dict[str, Any]]:
    """The same chats at rising rates."""
    for rate in RATES:
        yield row("load", run(chat(rate, 60)), rate=rate)


def trace_rows(mooncake: str | None, azure: str | None) -> Iterator[dict[str, Any]]:
    """Traces, made up and real, with and without the prefix cache."""
    shapes = {"azure shape": (AZURE_CONVERSATION, 3000, 16_384), "kimi shape": (KIMI_CONVERSATION, 1200, 32_768)}
    traces: dict[str, tuple[list[TraceRequest], int]] = {
        name: (list(generate(replace(shape, max_input=longest - 2048), count)), longest)
        for name, (shape, count, longest) in shapes.items()
    }
    if azure:
        traces["azure trace"] = (list(itertools.islice(read_azure(azure), 3000)), 16_384)
    if mooncake:
        fits = (entry for entry in read_mooncake(mooncake) if entry.input_length + entry.output_length <= 32_768)
        traces["mooncake trace"] = (list(itertools.islice(fits, 1200)), 32_768)
    for (name, (trace, longest)), caching in itertools.product(traces.items(), (False, True)):
        if not caching or (any(entry.prefix_ids for entry in trace) and "azure" not in name):
            report = run(trace, SLO(first_token=5.0), max_len=longest, caching=caching)
            yield row("trace", report, trace=name, caching=caching)


def speed_row(count: int) -> dict[str, Any]:
    """`count` chats at a rate that the server sustains: processor time, and memory at the end."""
    scheduler, clock = server()
    trace = generate(replace(CHAT, requests_per_s=50.0), count)
    start, began = time.thread_time(), time.perf_counter()
    report = simulate(scheduler, clock, requests_of(trace), COST)
    seconds = time.thread_time() - start
    more = {
        "requests": count,
        "steps": report.steps,
        "processor_s": round(seconds, 2),
        "wall_s": round(time.perf_counter() - began, 2),
        "simulated_requests_per_s": round(count / seconds),
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }
    return row("speed", report, **more)


def main() -> None:
    """All experiments, the longest run last; or some, with the rows of the others kept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=100_000, help="of the longest run")
    parser.add_argument("--mooncake", metavar="FILE")
    parser.add_argument("--azure", metavar="FILE")
    parser.add_argument("--only", nargs="*", default=list(EXPERIMENTS), choices=EXPERIMENTS)
    options = parser.parse_args()
    rows = kept_rows("simulate", options.only, MODULES)
    if "load" in options.only:
        rows += load_rows()
    if "trace" in options.only:
        rows += trace_rows(options.mooncake, options.azure)
    if "speed" in options.only:
        rows += [speed_row(count) for count in sorted({options.requests // 10, options.requests})]
    rows.sort(key=lambda row: EXPERIMENTS.index(row["experiment"]))
    write_result(
        "simulate",
        modules=MODULES,
        workload="simulated time; chats with lognormal lengths (means 161 in, 338 out, at most 1,024 each), Poisson, "
        f"{NUM_BLOCKS} blocks of {BLOCK_SIZE}, {MAX_RUNNING} running, budget {BUDGET}; Llama 3 8B on an H200, assumed",
        repeats=1,
        statistic="one run, seed 0",
        packages=("numpy",),
        rows=rows,
        opening=list(OPENING),
        slo=asdict(PROMISE),
        cost={name: value for name, value in asdict(COST).items() if name != "measured"},
        headline={"simulated_requests_per_s": rows[-1]["simulated_requests_per_s"], "requests": rows[-1]["requests"]},
    )


if __name__ == "__main__":
    main()
