# Exported from book/appendices/A2_command_line.py by tools/export.py; edit the chapter, not this file.
"""`paged-kv bench`, and `paged-kv watch`: the same run, with or without a view of it."""

import json
import math
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from paged_kv.cli_output import print_rows, refusing
from paged_kv.serve_options import (
    Blocks,
    BlockSize,
    Device,
    Download,
    DType,
    MaxSeqLen,
    Memory,
    ModelName,
    StopKey,
    open_engine,
)
from paged_kv.sizing import at_least

Requests = Annotated[int, typer.Option(help="How many requests.")]
Rate = Annotated[float | None, typer.Option(help="Open load: requests/s at random.")]
AtOnce = Annotated[int | None, typer.Option(help="Closed load: users at once; all if not said.")]
TraceFile = Annotated[str | None, typer.Option("--trace", help="Mooncake .jsonl or Azure .csv.")]
Mean = Annotated[float, typer.Option(help="Mean length, in tokens.")]


def bench_command(
    context: typer.Context,
    requests: Requests = 32, rate: Rate = None, at_once: AtOnce = None, trace: TraceFile = None,
    scale: Annotated[float, typer.Option(help="Multiplies lengths of a trace.")] = 1.0,
    speed: Annotated[float, typer.Option(help="A trace runs so many times as fast.")] = 1.0,
    questions: Annotated[bool, typer.Option("--questions", help="Real questions.")] = False,
    prompt_mean: Mean = 60.0, output_mean: Mean = 60.0,
    sigma: Annotated[float, typer.Option(help="Of the logarithm of lengths.")] = 1.0,
    shortest: Annotated[int, typer.Option(help="Lengths are clipped.")] = 4,
    longest: Annotated[int, typer.Option(help="Lengths are clipped.")] = 256,
    shared: Annotated[int, typer.Option(help="Tokens with which all prompts begin.")] = 0,
    load_seed: Annotated[int, typer.Option("--seed", help="Of times, lengths, tokens.")] = 0,
    seconds: Annotated[float, typer.Option(help="Stop after so long.")] = math.inf,
    slo_ttft: Annotated[float, typer.Option(help="Good: first token within, in s.")] = 1.0,
    slo_tpot: Annotated[float, typer.Option(help="Good: s a token after it.")] = 0.1,
    plain: Annotated[bool, typer.Option("--plain", help="One line a second.")] = False,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write the report here.")] = None,
    token_budget: Annotated[int, typer.Option(help="Tokens in a step at most.")] = 2048,
    max_running: Annotated[int, typer.Option(help="Sequences at once at most.")] = 256,
    host_blocks: Annotated[int, typer.Option(help="Room for swapped blocks.")] = 0,
    cache: Annotated[bool, typer.Option("--cache/--no-cache", help="Prefix cache.")] = True,
    model_name: ModelName = "smollm2", device: Device = None, dtype: DType = None,
    download: Download = False, memory: Memory = None, blocks: Blocks = None,
    block_size: BlockSize = 16, max_seq_len: MaxSeqLen = None,
) -> None:  # fmt: skip
    """Put an engine under load: throughput, times to the first token and between tokens."""
    asked = {name: value for name, value in locals().items() if name != "context"}
    with refusing():
        run_bench(asked, context.info_name == "watch")


def run_through(bench: Any, key: StopKey) -> None:
    """Step until the load is served or somebody stops it, by q or an interrupt."""
    with suppress(KeyboardInterrupt):
        while not (bench.done or key.asked):
            bench.step()
    bench.stop()


def run_bench(asked: dict[str, Any], watched: bool) -> None:
    """Make engine and load, run one on the other, print the report or write it."""
    if not asked["seconds"] > 0:
        raise ValueError(f"seconds = {asked['seconds']}: more than 0 are needed")
    file = asked["as_json"]
    if file is not None and not file.parent.is_dir():
        raise ValueError(f"json = {str(file)!r}: no such folder")
    names = ("token_budget", "max_running", "host_blocks")
    options = {name: asked[name] for name in names} | {"prefix_caching": asked["cache"]}
    engine = open_engine(asked, **options)
    load = make_load(asked, engine)
    from paged_kv.bench_run import Bench, bench_report
    from paged_kv.live_view import watch_bench
    from paged_kv.metrics import SLO

    bench = Bench(engine, load, SLO(asked["slo_ttft"], asked["slo_tpot"]), asked["seconds"])
    with StopKey() as key:
        if watched or asked["plain"]:
            plain = asked["plain"] or not sys.stdout.isatty()
            watch_bench(bench, plain, lambda: key.asked)
        else:
            said = f"serving {len(load.requests)} requests; --plain shows a line a second"
            typer.echo(said, err=True)
        run_through(bench, key)
    report = bench_report(bench)
    print_rows(f"{asked['model_name']}: {load.name}", bench_rows(report))
    if bench.first_refusal:
        typer.echo(f"note: {report['refused']} refused, such as: {bench.first_refusal}")
    if file is not None:
        file.write_text(json.dumps(whole_report(asked, engine, load, report), indent=1) + "\n")


def make_load(asked: dict[str, Any], engine: Any) -> Any:
    """The load that a command's options describe."""
    from paged_kv.bench_load import LoadLengths, drawn_load, question_load, trace_load
    from paged_kv.trace_shapes import Lognormal

    if sum(map(bool, (asked["rate"], asked["trace"], asked["at_once"]))) > 1:
        raise ValueError("rate, trace, at-once: one of them, not several")
    if asked["trace"]:
        count = at_least(1, "requests", asked["requests"])
        sizes = asked["scale"], asked["speed"]
        return trace_load(asked["trace"], engine.vocab_size, count, *sizes)
    low = at_least(1, "shortest", asked["shortest"])
    lengths = LoadLengths(
        Lognormal(asked["prompt_mean"], asked["sigma"]),
        Lognormal(asked["output_mean"], asked["sigma"]),
        low, at_least(low, "longest", asked["longest"]),
    )  # fmt: skip
    common = {name: asked[name] for name in ("rate", "at_once")} | {"seed": asked["load_seed"]}
    if asked["questions"]:
        return question_load(engine.tokenizer, asked["requests"], lengths, **common)
    vocab, shared = engine.vocab_size, asked["shared"]
    return drawn_load(asked["requests"], vocab, lengths, shared=shared, **common)


def in_seconds(times: dict[str, float | None], scale: float = 1.0, unit: str = "s") -> str:
    """Such as "0.12 s, 0.50 s, 0.61 s": p50, p90, p99."""
    found = [times[name] for name in ("p50", "p90", "p99")]
    return ", ".join("-" if t is None else f"{scale * t:.3g} {unit}" for t in found)


def bench_rows(report: dict[str, Any]) -> Any:
    """The report as rows of label and value."""
    from paged_kv.live_view import counted

    yield (
        "requests",
        f"{report['finished']} finished of {report['submitted']}, "
        + (f"{report['requests_per_s']:.2f} requests/s"),
    )
    yield "tokens", f"{report['output_tokens']:,} made, {report['tokens_per_s']:.1f} tokens/s"
    yield "first token, p50 p90 p99", in_seconds(report["ttft_s"])
    yield "each token after, p50 p90 p99", in_seconds(report["tpot_s"], 1000, "ms")
    good, slo = f"{report['goodput_per_s']:.2f} requests/s", report["slo"]
    yield "goodput", f"{good} within {slo['ttft_s']:g} s and {slo['tpot_s']:g} s"
    held, filled = 100 * report["blocks_held"], 100 * report["slots_filled"]
    yield "blocks", f"{held:.0f} % of {report['blocks']} held, {filled:.0f} % of their slots filled"
    yield "found in the cache", f"{100 * report['hit_rate']:.0f} % of prompt tokens"
    yield "running, on average", f"{report['mean_running']:.1f}"
    yield "preempted", counted(report["preemptions"])
    yield "steps", counted(report["step_kinds"])


def whole_report(asked: dict[str, Any], engine: Any, load: Any, report: Any) -> dict[str, Any]:
    """The report with what a number needs beside it: device, versions, workload, day."""
    import datetime
    import importlib.metadata as metadata
    import os
    import platform

    import torch

    packages = ("paged-kv", "torch", "transformers", "triton", "numpy")
    installed = {dist.metadata["Name"].lower() for dist in metadata.distributions()}
    gpu = torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else ""
    cores = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    return {
        "device": gpu or f"{cores}, {torch.get_num_threads()} threads",
        "versions": {"python": platform.python_version()}
        | {name: metadata.version(name) for name in packages if name in installed},
        "date": datetime.date.today().isoformat(),
        "workload": load.name,
        "options": {name: str(value) for name, value in asked.items()},
        **report,
    }
