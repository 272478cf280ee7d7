# Exported from book/appendices/A2_command_line.py by tools/export.py; edit the chapter, not this file.
"""How commands refuse and print: bad input in one line, reports as rows of label and value."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

from paged_kv.sizing import format_bytes, parse_bytes


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
