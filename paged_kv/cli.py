# Exported from book/appendices/A2_command_line.py by tools/export.py; edit the chapter, not this file.
"""The command line, `paged-kv`: each command asks the package one question and prints the answer.

Nothing heavier than typer is imported until a command runs.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from paged_kv.capacity_report import (
    find_config,
    length_report,
    memory_report,
    model_report,
    read_lengths,
    users_report,
)
from paged_kv.configs import from_config
from paged_kv.sizing import at_least, format_bytes, parse_bytes
from paged_kv.weights import weight_bytes

app = typer.Typer(
    help="A paged KV cache for LLM serving: size one, run one.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"paged-kv {version('paged-kv')}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    """Options that stand before any command."""


@contextmanager
def refusing() -> Iterator[None]:
    """Turn a ValueError into one line on stderr and exit code 2."""
    try:
        yield
    except ValueError as error:
        typer.echo(f"paged-kv: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from None


def read_size(option: str, text: str) -> int:
    """`parse_bytes`, with the option's name in the error."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


def both_units(num_bytes: int) -> str:
    """Such as "74.51 GiB (80 GB)"."""
    return f"{format_bytes(num_bytes)} ({format_bytes(num_bytes, decimal=True)})"


def model_rows(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What one token, block and sequence take, as rows of label and value."""
    gpus, windows = report["tensor_parallel"], report["windows"]
    per_gpu = f", on each of {gpus} GPUs" if gpus > 1 else ""
    layers = f"{report['layers_with_kv']} of {report['layers']}, {report['kv_dtype']}{per_gpu}"
    token = report["bytes_per_token"]
    yield "layers with K/V", layers
    if windows:
        longest = ", ".join(f"{window:,}" for window in windows)
        yield "windows", f"{longest} tokens; policy {report['policy']}"
    yield "a token", f"{token:,} B = {format_bytes(token)}"
    yield f"a block of {report['block_size']}", format_bytes(report["bytes_per_block"])
    yield f"a sequence of {report['context']:,}", format_bytes(report["bytes_per_sequence"])


def memory_rows(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What a GPU holds, as rows of label and value."""
    yield "memory of a GPU", both_units(report["memory_bytes"])
    yield "  weights", both_units(report["weight_bytes"])
    if report["overhead_bytes"]:
        yield "  overhead", both_units(report["overhead_bytes"])
    yield "  left for KV", both_units(report["kv_memory_bytes"])
    yield "blocks", f"{report['blocks']:,}, for {report['tokens']:,} tokens"
    yield f"sequences of {report['context']:,}", f"{report['sequences_at_context']:,}"
    if "mean_tokens" in report:
        reserved, paged = (100 * report[f"waste_{way}"] for way in ("reserved", "paged"))
        yield f"sequences of {report['mean_tokens']:,g}", f"{report['sequences_paged']:,} in blocks"
        yield "  if each reserves", f"{report['sequences_reserved']:,}"
        yield "  holding nothing", f"{paged:.2f} % in blocks, {reserved:.2f} % reserved"


def users_rows(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The answer to --users as rows of label and value."""
    users, tokens = report["users"], report["tokens_each"]
    yield f"{users:,} users of {tokens:,g}", both_units(report["kv_bytes"])
    yield "weights", both_units(report["weight_bytes"])
    yield "together", both_units(report["total_bytes"])
    single = next((card for card in report["cards"] if card["cards"] == 1), None)
    yield "smallest GPU", f"{single['gb']} GB ({single['names']})" if single else "more than one"
    for card in report["cards"]:
        full = f"{100 * card['share']:.0f} % full ({card['names']})"
        yield f"{card['cards']} x {card['gb']} GB", full
    if not report["cards"]:
        yield "cards", "none of up to 8 GPUs holds it"


def print_rows(title: str, rows: Iterator[tuple[str, str]]) -> None:
    """Print a title and aligned rows."""
    from rich.console import Console
    from rich.text import Text

    console, lines = Console(file=sys.stdout, force_jupyter=False), list(rows)
    width = max(len(label) for label, _ in lines)
    console.print(Text(title, style="bold"))
    for label, value in lines:
        console.print(Text(f"{label:{width}}   ") + Text(value, style="bold"), soft_wrap=True)


def size_report(config: str, asked: dict[str, Any]) -> dict[str, Any]:
    """The report of `paged-kv size`: its options by name in, one dictionary out."""
    source, block_size = find_config(config), at_least(1, "block-size", asked["block_size"])
    kv = from_config(source, asked["kv_dtype"], asked["tp"], asked["policy"])
    context = kv.max_tokens if asked["context"] is None else asked["context"]
    if context is None:
        raise ValueError("context: the config declares none; give --context")
    report = model_report(kv, at_least(1, "context", context), block_size)
    lengths = stated_lengths(asked, context)
    if asked["memory"]:
        memory, overhead = (read_size(f"--{name}", asked[name]) for name in ("memory", "overhead"))
        weights = read_weights(asked["weights"], source)
        report |= memory_report(kv, memory, weights, overhead, context, block_size)
        if lengths:
            report |= length_report(kv, report["kv_memory_bytes"], lengths, context, block_size)
    if asked["users"] is not None:
        weights = read_weights(asked["weights"], source)
        each, more = lengths or [context], (asked["kv_dtype"], asked["policy"])
        report["users"] = users_report(source, asked["users"], each, weights, block_size, *more)
    return report


def stated_lengths(asked: dict[str, Any], context: int) -> list[int]:
    """The lengths that --mean-tokens or --lengths state; empty if neither does."""
    if asked["mean_tokens"] is None and not asked["lengths"]:
        return []
    if asked["memory"] == "" and asked["users"] is None:
        raise ValueError("mean-tokens or lengths: they need --memory or --users")
    if asked["mean_tokens"] is not None and asked["lengths"]:
        raise ValueError("mean-tokens and lengths: one of the two, not both")
    mean = asked["mean_tokens"]
    lengths = read_lengths(asked["lengths"]) if mean is None else [at_least(1, "mean-tokens", mean)]
    if max(lengths) > context:
        found = max(lengths)
        raise ValueError(f"mean-tokens or lengths = {found}: more than the context of {context}")
    return lengths


def read_weights(text: str, source: Any) -> int:
    """Bytes of the weights: stated, or "auto" for what files or shapes say."""
    if text != "auto":
        return read_size("--weights", text)
    try:
        return weight_bytes(source)
    except ValueError as error:
        raise ValueError(f"--weights auto: {error}") from None


@app.command()
def size(
    config: Annotated[str, typer.Argument(help="config.json, a model's folder, or a known name.")],
    memory: Annotated[str, typer.Option(help="Memory of one GPU: 80GB, 24GiB.")] = "",
    weights: Annotated[str, typer.Option(help="auto, or the size of all weights.")] = "auto",
    overhead: Annotated[str, typer.Option(help="Kept from the cache on each GPU.")] = "0B",
    context: Annotated[int | None, typer.Option(help="Longest sequence, in tokens.")] = None,
    mean_tokens: Annotated[int | None, typer.Option(help="What a sequence really holds.")] = None,
    lengths: Annotated[str, typer.Option(help="A file of lengths, or a range: 100-2000.")] = "",
    users: Annotated[int | None, typer.Option(help="Which GPUs hold so many sequences?")] = None,
    block_size: Annotated[int, typer.Option(help="Tokens in a block.")] = 16,
    tp: Annotated[int, typer.Option(help="Tensor-parallel GPUs.")] = 1,
    kv_dtype: Annotated[str | None, typer.Option(help="fp32 ... int4; else the weights'.")] = None,
    policy: Annotated[str, typer.Option(help="What windowed layers keep: full, window.")] = "full",
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """How big a model's KV cache is, what a GPU holds, and which GPU holds it."""
    asked = dict(locals())
    with refusing():
        report = size_report(config, asked)
        if as_json:
            typer.echo(json.dumps({"config": config} | report, indent=2))
            return
        print_rows(config, model_rows(report))
        if "memory_bytes" in report:
            print_rows("", memory_rows(report))
        if "users" in report:
            print_rows("", users_rows(report["users"]))
        for note in report["notes"]:
            typer.echo(f"note: {note}")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit; a misused option is one line and exit code 2, too."""
    try:
        code = app(arguments, prog_name="paged-kv", standalone_mode=False)
    except Exception as error:
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        typer.echo(f"paged-kv: {' '.join(message().split())}", err=True)
        sys.exit(2)
    sys.exit(code or 0)
