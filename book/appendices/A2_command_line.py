# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The command line
#
# Fifty people are to chat with Llama 3 8B, with up to 4,096 tokens each. Which GPU do you rent?
# With chapter 01 at hand the sum is a line, and the answer looks safe.

# %%
from paged_kv.configs import from_config
from paged_kv.config_facts import KNOWN
from paged_kv.sizing import GB, format_bytes

needed = 50 * from_config(KNOWN["llama-3-8b"]).bytes_for(4096)
print(f"cache for 50 users: {format_bytes(needed)}; a 40 GB card has {format_bytes(40 * GB)}")
print("fits" if needed <= 40 * GB else "does not fit")

# %% [markdown]
# It is not. The weights come first, then the cache, then what the runtime and the activations take;
# and on two cards both weights and KV heads are split, which changes each term. The sum is easy,
# and easy to do half.
#
# **The question.** How does the whole sum become one command that a person can trust at a glance
# and a script can read?
#
# :::{card} This appendix
# - **You need**: chapter 01 and appendix A3.
# - **Exports**: `cli` (`paged-kv size`), and the sums behind it, `capacity_report`.
# - **Device**: any CPU; nothing heavier than typer and rich is imported.
# - **Run time**: about 2 s.
# - **You are here** chapters 00 to 14 · labs · appendices: A1 drawing · **A2 command line** · A3
#   real configs
# :::

# %% [markdown]
# ## The sums, before any printing
#
# A report is a plain dictionary. What is printed, as a table or as JSON, is that dictionary and
# nothing else, so the two can never disagree. The sums come from chapter 01 and appendix A3; here
# they are only put in order:
#
# 1. a GPU's memory, less its share of the weights, less an overhead you may state, is what the
#   cache gets;
# 2. the cache divided by a block is the number of blocks;
# 3. blocks, or reservations, make sequences.
#
# The lengths of real chats differ, so a distribution may stand in for one length: a file of
# numbers, or a range such as `100-2000`. A sequence then takes the *mean number of blocks*, which
# is not the number of blocks of the mean.

# %% tags=["export:capacity_report"]
"""The sums behind `paged-kv size`: what a memory holds, and which GPUs hold what is needed."""

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from paged_kv.config_facts import KNOWN
from paged_kv.configs import ModelKV, from_config
from paged_kv.sizing import GB, at_least
from paged_kv.weights import weight_bytes


def find_config(name: str) -> Any:
    """What `from_config` reads: a path that exists, else the facts of a known model."""
    if Path(name).exists():
        return name
    if name.lower() not in KNOWN:
        known = ", ".join(KNOWN)
        raise ValueError(f"config = {name!r}: no such file or folder, and none of {known}")
    return KNOWN[name.lower()]


# %% tags=["export:capacity_report"]
def read_lengths(text: str) -> list[int]:
    """Lengths in tokens: every one of a range ("100-2000"), or those of a file, one a line."""
    low, dash, high = text.partition("-")
    if dash and low.isdecimal() and high.isdecimal():
        if int(high) >= 10**7:
            raise ValueError(f"lengths = {text!r}: a range that ends below 10,000,000 is needed")
        lengths = list(range(int(low), int(high) + 1))
    elif Path(text).is_file():
        words = Path(text).read_text(encoding="utf-8", errors="replace").split()
        if not all(word.isdecimal() for word in words):
            raise ValueError(f"lengths = {text!r}: the file must hold whole numbers only")
        lengths = [int(word) for word in words]
    else:
        raise ValueError(f"lengths = {text!r}: a file, or a range such as 100-2000, is needed")
    if not lengths or min(lengths) < 1:
        raise ValueError(f"lengths = {text!r}: at least one length of 1 or more is needed")
    return lengths


def mean_bytes(kv: ModelKV, lengths: Sequence[int], block_size: int) -> Fraction:
    """Bytes that a sequence takes on average, in whole blocks."""
    return Fraction(sum(kv.bytes_for(n, block_size) for n in lengths), len(lengths))


# %% tags=["export:capacity_report"]
def model_report(kv: ModelKV, context: int, block_size: int) -> dict[str, Any]:
    """What one token, one block and one full sequence take on one GPU."""
    return {
        "bytes_per_token": kv.bytes_per_token,
        "block_size": block_size,
        "bytes_per_block": kv.bytes_per_block(block_size),
        "context": context,
        "bytes_per_sequence": kv.bytes_for(context, block_size),
        "layers": kv.num_layers,
        "layers_with_kv": sum(group.spec.num_layers for group in kv.groups),
        "kv_dtype": kv.groups[0].spec.dtype,
        "tensor_parallel": kv.tensor_parallel,
        "policy": "window" if any(g.policy == "window" for g in kv.groups) else "full",
        "windows": sorted({group.window for group in kv.groups if group.window}),
        "notes": list(kv.notes),
    }


def memory_report(
    kv: ModelKV, memory: int, weights: int, overhead: int, context: int, block_size: int
) -> dict[str, Any]:
    """What one GPU of `memory` bytes holds beside its share of `weights` and an overhead."""
    share = -(-weights // kv.tensor_parallel)
    for_kv = memory - share - overhead
    if for_kv < kv.bytes_per_block(block_size):
        raise ValueError(
            f"memory = {memory:,} B: {share:,} B of weights and {overhead:,} B of overhead "
            "leave no room for one block"
        )
    blocks = kv.blocks_in(for_kv, block_size)
    return {
        "memory_bytes": memory,
        "weight_bytes": share,
        "overhead_bytes": overhead,
        "kv_memory_bytes": for_kv,
        "blocks": blocks,
        "tokens": blocks * block_size,
        "sequences_at_context": for_kv // kv.bytes_for(context, block_size),
        "sequences_reserved": for_kv // kv.bytes_for(context),
    }


# %% tags=["export:capacity_report"]
def length_report(
    kv: ModelKV, for_kv: int, lengths: Sequence[int], context: int, block_size: int
) -> dict[str, Any]:
    """Sequences of the stated lengths, and what reserving the context for each would waste."""
    held, paged = mean_bytes(kv, lengths, 1), mean_bytes(kv, lengths, block_size)
    return {
        "mean_tokens": sum(lengths) / len(lengths),
        "sequences_paged": int(for_kv // paged),
        "waste_reserved": float(1 - held / kv.bytes_for(context)),
        "waste_paged": float(1 - held / paged),
    }


# %%
kv = from_config(KNOWN["llama-3-8b"])
held = memory_report(kv, 80 * GB, weight_bytes(KNOWN["llama-3-8b"]), 0, 8192, 16)
print(f"{format_bytes(held['kv_memory_bytes'])} for KV: {held['blocks']:,} blocks,",
      f"{held['tokens']:,} tokens, {held['sequences_at_context']} sequences of 8,192")
assert held["blocks"] == kv.blocks_in(held["kv_memory_bytes"], 16)

# %% [markdown]
# :::{admonition} Predict
# :class: tip
# Half of all chats have 1 token, half have 31. With blocks of 16: how many blocks does one take on
# average, and how many would the mean length take?
# :::
#
# :::{dropdown} Reasoning
# 1 token takes one block and 31 take two, so 1.5 on average; the mean length of 16 takes 1.
# Rounding up is not linear, and it always errs to the same side: the mean length promises more
# sequences than fit.
# :::

# %%
two = [1, 31]
print("mean of the blocks:", float(mean_bytes(kv, two, 16) / kv.bytes_per_block(16)),
      " blocks of the mean:", kv.bytes_for(16, 16) // kv.bytes_per_block(16))

# %% [markdown]
# ## Which GPU
#
# The other question runs backwards: users and their context are given, the card is wanted. For each
# common size the report finds the smallest number of cards that holds the weights, the cache of all
# users at once, and has a tenth of its memory to spare for activations and runtime. Numbers of
# cards are powers of two up to eight, and only such as the heads can be dealt out to.
#
# The sizes are sold in GB. What a driver shows may differ a little; where it matters, pass what
# *yours* shows to `--memory`, in MiB.

# %% tags=["export:capacity_report"]
CARDS = {
    16: "T4, V100", 24: "L4, A10, RTX 4090", 32: "RTX 5090, V100", 40: "A100",
    48: "L40S, RTX A6000", 80: "A100, H100", 141: "H200", 192: "B200, MI300X",
}
SPARE = Fraction(1, 10)


def users_report(
    config: Any,
    users: int,
    lengths: Sequence[int],
    weights: int,
    block_size: int,
    kv_dtype: str | None = None,
    policy: Any = "full",
) -> dict[str, Any]:
    """The memory that `users` sequences of such `lengths` need, and the cards that hold it."""
    one = from_config(config, kv_dtype, 1, policy)
    cache = int(at_least(1, "users", users) * mean_bytes(one, lengths, block_size))
    cards: list[dict[str, Any]] = []
    for count in (1, 2, 4, 8):
        try:
            kv = from_config(config, kv_dtype, count, policy)
        except ValueError:  # the heads cannot be dealt out to so many
            continue
        need = -(-weights // count) + users * mean_bytes(kv, lengths, block_size)
        cards += [
            {"gb": gb, "cards": count, "names": CARDS[gb], "share": float(need / (gb * GB))}
            for gb in CARDS
            if need <= (1 - SPARE) * gb * GB and gb not in [card["gb"] for card in cards]
        ]
    return {
        "users": users,
        "tokens_each": sum(lengths) / len(lengths),
        "kv_bytes": cache,
        "weight_bytes": weights,
        "total_bytes": cache + weights,
        "cards": sorted(cards, key=lambda card: int(card["gb"])),
    }


# %%
weights = weight_bytes(KNOWN["llama-3-8b"])
fifty = users_report(KNOWN["llama-3-8b"], 50, [4096], weights, 16)
print(f"{format_bytes(fifty['kv_bytes'])} of KV and {format_bytes(weights)} of weights:",
      format_bytes(fifty["total_bytes"]), "or", format_bytes(fifty["total_bytes"], decimal=True))
for card in fifty["cards"]:
    print(f"{card['cards']} x {card['gb']:3} GB, {100 * card['share']:.0f} % full,", card["names"])

# %% [markdown]
# The 40 GB card of the opening is out, alone: 39.96 GiB are 42.9 GB. One card of 48 GB fills to 89
# % and is just inside the tenth to spare. Two of 24 GB hold it as well, at the same 89 %.
#
# :::{admonition} Predict
# :class: tip
# The users' chats turn out to be 1,000 tokens long, not 4,096. Is the smallest single card still
# the one of 48 GB?
# :::
#
# :::{dropdown} Reasoning
# 50 chats of 63 blocks of 2 MiB are 6.15 GiB; with 14.96 GiB of weights 21.11 GiB or 22.67 GB. That
# would fill a 24 GB card to 94 %, so it takes 32 GB. Weights do not shrink with use.
# :::

# %%
short = users_report(KNOWN["llama-3-8b"], 50, [1000], weights, 16)
print(f"{format_bytes(short['kv_bytes'])} of KV and {format_bytes(weights)} of weights,",
      format_bytes(short["total_bytes"]), "or",
      f"{format_bytes(short['total_bytes'], decimal=True)};",
      f"a block is {format_bytes(kv.bytes_per_block(16))};")
single = [card["gb"] for card in short["cards"] if card["cards"] == 1]
print(f"a 24 GB card would be {100 * short['total_bytes'] / (24 * GB):.0f} % full;",
      f"smallest single card: {min(single)} GB")

# %% [markdown]
# ## The command
#
# Commands live in one typer application. Its rules:
#
# - *Imports are lazy.* Asking for help imports typer and our own arithmetic, which needs the
#   standard library only. Whatever is heavier (rich, torch, a model) a command imports when it
#   runs.
# - *Bad input is one line* on the error stream and exit code 2, whoever noticed it: the option
#   parser, a size without a clear unit, a config with a missing field. The line names the argument,
#   its value and what is allowed.
# - *`--json` prints the report itself*, for scripts.

# %% tags=["export:cli"]
"""The command line, `paged-kv`: each command asks the package one question and prints the answer.

Nothing heavier than typer is imported until a command runs.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from paged_kv.configs import from_config
from paged_kv.sizing import at_least, format_bytes, parse_bytes
from paged_kv.weights import weight_bytes

app = typer.Typer(
    help="A paged KV cache for LLM serving: size one, run one.",
    no_args_is_help=True, add_completion=False,
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


# %% tags=["export:cli"]
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


# %% [markdown]
# Printing is the last and least part. Rows of label and value; both units where a vendor would use
# the other one.

# %% tags=["export:cli"]
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


# %% tags=["export:cli"]
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


# %% tags=["export:cli"]
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


# %% tags=["export:cli"]
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


# %% tags=["export:cli"]
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


# %% tags=["export:cli"]
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


# %% [markdown]
# Now the opening's question, as anyone would type it: `paged-kv size llama-3-8b --users 50
# --context 4096`. The cells below run the application in the notebook; in a terminal it is the
# same.

# %%
from typer.testing import CliRunner


def run(line):
    done = CliRunner().invoke(app, line.split())
    print(done.output.rstrip())
    return done.exit_code


assert run("size llama-3-8b --users 50 --context 4096") == 0

# %% [markdown]
# And forwards, from a card to its users:

# %%
assert run("size llama-3-8b --memory 80GB --mean-tokens 1500") == 0

# %% [markdown]
# **Turn the knob.** Set `--kv-dtype fp8`; expect twice the blocks. Set `--tp 2`; expect half the
# weights and half the bytes a token on each GPU, so *more* than twice the sequences.

# %%
for line in ("", " --kv-dtype fp8", " --tp 2"):
    done = CliRunner().invoke(app, f"size llama-3-8b --memory 80GB --json{line}".split())
    report = json.loads(done.stdout)
    print(f"{line or ' as it is':16} {report['blocks']:7,} blocks,",
          f"{report['sequences_at_context']:4} sequences of {report['context']:,}")

# %% [markdown]
# ## Bad input
#
# :::{admonition} Predict
# :class: tip
# `--memory 80G`: does the command take GB, take GiB, or refuse?
# :::
#
# :::{dropdown} Reasoning
# It refuses. Between the readings lie 7.4 %, which is more than the whole overhead people leave,
# and only the user knows.
# :::

# %%
print(f"between 1 GiB and 1 GB: {100 * (2**30 / 10**9 - 1):.1f} %")
for line in ("size llama-3-8b --memory 80G", "size nobody/nothing", "size llama-3-8b --tp 3",
             "size llama-3-8b --memory 8GB", "size llama-3-8b --kv-dtype fp12"):
    code = run(line)
    assert code == 2

# %% [markdown]
# ## Mistakes in circulation
#
# :::{admonition} Check it yourself
# :class: warning
# - ~~A 40 GB card holds 50 users of 4,096 tokens, since their cache is 25 GiB~~: with the weights
#   it is 39.96 GiB, which is 42.9 GB.
# - ~~Two cards hold twice the sequences of one~~: 2.7 times, since each holds half of the weights.
# - ~~Sequences = blocks / blocks of the mean length~~: the mean of the blocks counts.
# :::

# %%
counts = []
for line in ("--tp 1", "--tp 2"):
    done = CliRunner().invoke(app, f"size llama-3-8b --memory 40GB --json {line}".split())
    counts.append(json.loads(done.stdout)["sequences_at_context"])
print(f"{counts[0]} sequences on one 40 GB card, {counts[1]} on two:",
      f"{counts[1] / counts[0]:.1f} times")
total = fifty["total_bytes"]
print(f"{format_bytes(total)}, which is {format_bytes(total, decimal=True)}")

# %% [markdown]
# ## State card
#
# | | |
# |---|---|
# | `paged-kv size` | config in; bytes, blocks, sequences, waste; `--users` for cards; `--json` |
# | `capacity_report` | the sums: `model_report`, `memory_report`, `length_report`, `users_report` |
# | `app` | the typer application; a new command is a function with `@app.command()` that imports inside |
# | invariant | table and JSON show one dictionary; bad input is one line and exit code 2 |
# | what breaks next | a server that shares the card with others: state what they take as overhead |
#
# ## Real world
#
# - **vLLM** measures instead: it runs the model once at its largest batch and gives the cache what
#   is left (`vllm/v1/worker/gpu_worker.py`), then logs the number of tokens and the concurrency at
#   full context. Compare that line with this command's.
# - **SGLang** takes a static fraction of the memory as an option.
# - **TensorRT-LLM** takes a fraction of what is free after loading.

# %% [markdown]
# ## Exercises
#
# :::{exercise}
# :label: ex-A2-compute
# *Compute.* How many chats of 8,192 tokens does a 24 GB card hold beside the weights of Llama 3 8B?
# Do it by hand, then by command.
# :::
#
# :::{solution} ex-A2-compute
# :class: dropdown
# 24 GB less 16.06 GB leave 7.94 GB or 7.39 GiB, and a chat takes 1 GiB: 7.
# :::

# %% tags=["hide-input"]
done = CliRunner().invoke(app, "size llama-3-8b --memory 24GB --json".split())
report = json.loads(done.stdout)
card, weights, left = (report[f"{part}_bytes"] for part in ("memory", "weight", "kv_memory"))
print(f"{format_bytes(card, decimal=True)} less {format_bytes(weights, decimal=True)} leave",
      f"{format_bytes(left, decimal=True)} or {format_bytes(left)};",
      f"a chat takes {format_bytes(report['bytes_per_sequence'])}: {left // 2**30}")
assert report["sequences_at_context"] == 7

# %% [markdown]
# :::{exercise}
# :label: ex-A2-trace
# *Trace.* Which function raises the error of `paged-kv size llama-3-8b --tp 3`, and through which
# does it pass on its way to the one line?
# :::
#
# :::{solution} ex-A2-trace
# :class: dropdown
# `heads_per_rank` raises it; `layer_shape`, `from_config`, `size_report` and `size` let it pass;
# `refusing` prints it.
# :::

# %% tags=["hide-input"]
import traceback

try:
    from_config(KNOWN["llama-3-8b"], tensor_parallel=3)
except ValueError as error:
    path = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
print(path[1:])
assert path[-1] == "heads_per_rank"

# %% [markdown]
# :::{exercise}
# :label: ex-A2-break
# *Break.* The mean length of `1-31` is 16. Compare `--lengths 1-31` with `--mean-tokens 16`. By
# which factor do the sequences differ?
# :::
#
# :::{solution} ex-A2-break
# :class: dropdown
# 16 lengths take one block, 15 take two: 46/31 = 1.48 blocks on average, so the mean length
# promises 1.48 times too many.
# :::

# %% tags=["hide-input"]
found = []
for line in ("--lengths 1-31", "--mean-tokens 16"):
    done = CliRunner().invoke(app, f"size llama-3-8b --memory 80GB --json {line}".split())
    found.append(json.loads(done.stdout)["sequences_paged"])
print(f"{found[0]:,} against {found[1]:,}: {found[1] / found[0]:.2f} times")
assert round(found[1] / found[0], 2) == 1.48

# %% [markdown]
# :::{exercise}
# :label: ex-A2-implement
# *Implement.* Add a command `tail LENGTH` that prints the slots left empty for block sizes 8 to
# 128, to an application of your own.
# :::
#
# :::{solution} ex-A2-implement
# :class: dropdown
# The cell shows one. It imports inside, and leaves the refusal of a negative length to
# `tail_waste`.
# :::

# %% tags=["hide-input"]
mine = typer.Typer()


@mine.command()
def tail(length: int) -> None:
    from paged_kv.sizing import tail_waste

    with refusing():
        typer.echo(" ".join(f"{b}:{tail_waste(length, b)}" for b in (8, 16, 32, 64, 128)))


done = CliRunner().invoke(mine, ["300"])
print(done.output.strip())
assert done.output.split() == ["8:4", "16:4", "32:20", "64:20", "128:84"]

# %% [markdown]
# :::{exercise}
# :label: ex-A2-cards
# *Compute.* Which single cards hold 10 users of Llama 3 70B at 8,192 tokens? Which numbers of 80 GB
# cards?
# :::
#
# :::{solution} ex-A2-cards
# :class: dropdown
# 141.1 GB of weights and 26.84 GB of cache are 167.95 GB: one card of 192 GB (87 % full); of 80 GB
# it takes 4.
# :::

# %% tags=["hide-input"]
weights = weight_bytes(KNOWN["llama-3-70b"])
ten = users_report(KNOWN["llama-3-70b"], 10, [8192], weights, 16)
parts = ("weight_bytes", "kv_bytes", "total_bytes")
print(*(format_bytes(ten[part], decimal=True) for part in parts), sep=", ")
for card in ten["cards"]:
    print(f"{card['cards']} x {card['gb']} GB: {100 * card['share']:.0f} % full")
assert [card["cards"] for card in ten["cards"] if card["gb"] in (80, 192)] == [4, 1]

# %% [markdown]
# ## Further reading
#
# - The documentation of typer and of rich, for commands and for tables.
# - Chapter 01 for the sums, appendix A3 for where the facts come from, chapter 02 for what
#   reserving wastes over time.
