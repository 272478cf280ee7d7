# Exported from book/appendices/A2_command_line.py by tools/export.py; edit the chapter, not this file.
"""The command line, `paged-kv`: each command asks the package one question and prints the answer.

Nothing heavier than typer is imported until a command runs.
"""

import json
import sys
from typing import Annotated, Any

import typer

from paged_kv.bench_cli import bench_command
from paged_kv.capacity_report import (
    find_config,
    length_report,
    memory_report,
    model_report,
    read_lengths,
    users_report,
)
from paged_kv.cli_output import memory_rows, model_rows, print_rows, read_size, refusing, users_rows
from paged_kv.configs import from_config
from paged_kv.serve_cli import chat_command, generate_command
from paged_kv.sizing import at_least
from paged_kv.weights import weight_bytes


def with_serving(application: typer.Typer) -> typer.Typer:
    """`application` with the commands that run a model."""
    application.command("generate")(generate_command)
    application.command("chat")(chat_command)
    application.command("bench")(bench_command)
    application.command("watch", help="`bench`, with a live view of the pool.")(bench_command)
    return application


app = with_serving(
    typer.Typer(
        help="A paged KV cache for LLM serving: size one, run one.",
        no_args_is_help=True, add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
)  # fmt: skip


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
        if type(error).__name__ != "NoArgsIsHelpError":  # its message is the help, as it is
            typer.echo(f"paged-kv: {' '.join(message().split())}", err=True)
        elif text := message():
            typer.echo(text)
        sys.exit(2)
    sys.exit(code or 0)
