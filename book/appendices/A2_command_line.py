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
# - **You need**: chapter 01 and appendix A3; for the commands that serve, chapter 13.
# - **Exports**: `command`, the start; `cli`, the application; `capacity_report`, the sums behind `paged-kv size`;
#   `cli_output`, `serve_options`, `serve_cli` and `bench_cli` for the other commands.
# - **Device**: any CPU; nothing heavier than typer and rich is imported, until a model runs.
# - **Run time**: about 15 s.
# - **You are here** chapters 00 to 14 · labs · appendices: A1 drawing · **A2 command line** · A3
#   real configs · A4 sampling · A5 check your own · A6 serving, measured
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

# %% tags=["export:cli_output"]
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


# %% [markdown]
# Printing is the last and least part. Rows of label and value; both units where a vendor would use
# the other one.

# %% tags=["export:cli_output"]
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


# %% tags=["export:cli_output"]
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


# %% [markdown]
# ## Commands that serve
#
# Four commands run a model: `generate`, `chat`, `bench`, and `watch`, which is `bench` with a view.
# Appendix A6 explains what they measure and shows them at work. Here is only what stands between
# the words that a user types and the functions that do the work: options with their help, an
# engine made from them, a report printed.
#
# The options that all of them share are types, so that each is described once. What a command
# needs beyond typer it imports when it runs.

# %% tags=["export:serve_options"]
"""Options that the serving commands share, and the engine that they ask for.

Imports nothing heavier than typer; the rest when a command runs.
"""

import importlib
import os
import signal
from types import FrameType, TracebackType
from typing import Annotated, Any

import typer

ModelName = Annotated[str, typer.Option("--model", help="smollm2, folder, .gguf, hub, random:X.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1; a GPU if there is one.")]
DType = Annotated[str | None, typer.Option(help="float32, bfloat16, float16.")]
Memory = Annotated[str | None, typer.Option(help="For K/V: 2GiB. 1 GiB on a CPU if not said.")]
Blocks = Annotated[int | None, typer.Option(help="Instead of --memory: so many blocks.")]
BlockSize = Annotated[int, typer.Option(help="Tokens in a block.")]
MaxSeqLen = Annotated[int | None, typer.Option(help="Longest sequence; the model's if not said.")]
Download = Annotated[bool, typer.Option("--download", help="May fetch the model from the hub.")]
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token.")]
TopK = Annotated[int, typer.Option(help="Choose among so many; 0: all.")]
TopP = Annotated[float, typer.Option(help="Choose among the likeliest that reach it.")]
Seed = Annotated[int | None, typer.Option(help="The same seed draws the same tokens.")]
NewTokens = Annotated[int, typer.Option("--max-new-tokens", help="Longest answer, in tokens.")]


# %% tags=["export:serve_options"]
def open_engine(asked: dict[str, Any], **more: Any) -> Any:
    """An engine over the model that a command's options ask for; `more` are the engine's own."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not asked["download"]:
        os.environ.setdefault("TQDM_DISABLE", "1")  # bars only where somebody waits for a network
    from paged_kv.engine import Engine
    from paged_kv.model_source import load_model

    names = ("model_name", "dtype", "device", "download")
    model, tokenizer = load_model(*(asked[name] for name in names))
    runner = graph_runner() if model.device.type == "cuda" else None
    more |= {"runner": runner} if runner is not None else {}
    return Engine(
        model, tokenizer, memory=asked["memory"], num_blocks=asked["blocks"],
        block_size=asked["block_size"], max_seq_len=asked["max_seq_len"], **more,
    )  # fmt: skip


def graph_runner() -> Any:
    """Chapter 14's runner, or None where it is missing."""
    try:
        return importlib.import_module("paged_kv.graphs").GraphRunner
    except (ImportError, AttributeError):
        return None


def sampling_of(asked: dict[str, Any]) -> Any:
    """SamplingOptions from a command's options."""
    from paged_kv.sampling_params import SamplingOptions

    names = ("temperature", "top_k", "top_p", "seed")
    return SamplingOptions(**{name: asked[name] for name in names})


# %% tags=["export:serve_options"]
class StopKey:
    """While it is open, the first Ctrl-C only sets `asked`; a second one interrupts.

    A step of the engine that is broken off in its middle would leave a plan that nobody commits.
    """

    def __init__(self) -> None:
        self.asked = False
        self.before: Any = None

    def __enter__(self) -> "StopKey":
        try:
            self.before = signal.signal(signal.SIGINT, self.note)
        except ValueError:  # not the main thread: no key reaches us
            self.before = None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.before is not None:
            signal.signal(signal.SIGINT, self.before)

    def note(self, number: int, frame: FrameType | None) -> None:
        """What the key does."""
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

# %% [markdown]
# `generate` answers prompts, `chat` keeps a dialogue. A request that cannot be is refused by the
# engine itself, whose ValueError names the argument; `refusing` makes it one line.

# %% tags=["export:serve_cli"]
"""`paged-kv generate` and `paged-kv chat`."""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from paged_kv.sizing import at_least, blocks_for

# %% tags=["export:serve_cli"]
def generate_command(
    prompts: Annotated[list[str] | None, typer.Argument(help="One or several texts.")] = None,
    file: Annotated[Path | None, typer.Option(help="More of them, one a line.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put each into the chat template.")] = False,
    n: Annotated[int, typer.Option("--n", help="Samples of each.")] = 1,
    beams: Annotated[int, typer.Option(help="Beams in place of samples.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text.")] = None,
    max_new_tokens: NewTokens = 64,
    temperature: Temperature = 0.0, top_k: TopK = 0, top_p: TopP = 1.0, seed: Seed = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answers as JSON.")] = False,
    model_name: ModelName = "smollm2", device: Device = None, dtype: DType = None,
    download: Download = False, memory: Memory = None, blocks: Blocks = None,
    block_size: BlockSize = 16, max_seq_len: MaxSeqLen = None,
) -> None:  # fmt: skip
    """Answer prompts; the text of a single one appears as it is made."""
    asked = dict(locals())
    with refusing():
        texts = read_prompts(prompts or [], file)
        at_least(1, "n", n)
        sampling = sampling_of(asked)
        engine = open_engine(asked)
        options = {"sampling": sampling, "n": n, "beam_width": beams, "stop": stop or []}
        names = add_prompts(engine, texts, asked, options)
        streamed = len(names) == n == 1 and not beams and not as_json
        start = time.perf_counter()
        answers, peak = answer_all(engine, streamed)
        found = [answers[name] for name in names]
        report = answers_report(texts, found, time.perf_counter() - start, peak, block_size)
        print_answers(report, as_json, streamed)

# %% tags=["export:serve_cli"]
def read_prompts(given: list[str], file: Path | None) -> list[str]:
    """The prompts on the command line, then those of a file."""
    if file is not None:
        try:
            given = given + file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"file = {str(file)!r}: {error}") from None
    texts = [text for text in given if text.strip()]
    if not texts:
        raise ValueError("prompts: none given, neither as arguments nor by --file")
    return texts


def add_prompts(
    engine: Any, texts: list[str], asked: dict[str, Any], options: dict[str, Any]
) -> list[Any]:
    """Queue all prompts; returns the ids of their requests."""
    from paged_kv.bench_load import encode_chat

    if asked["chat"] and getattr(engine.tokenizer, "chat_template", None) is None:
        raise ValueError("chat: the model's tokenizer has no chat template")
    prompts: list[Any] = texts
    if asked["chat"]:
        prompts = [encode_chat(engine.tokenizer, [("user", text)]).tolist() for text in texts]
    return [engine.add_request(each, asked["max_new_tokens"], **options) for each in prompts]


def answer_all(engine: Any, streamed: bool) -> tuple[dict[Any, Any], int]:
    """Step until all is answered: {id: Answer}, and the most blocks used between steps."""
    answers, peak = {}, 0
    while not engine.idle:
        for piece in engine.step():
            if streamed:
                typer.echo(piece.text, nl=False)
                sys.stdout.flush()
            if piece.answer is not None:
                answers[piece.request_id] = piece.answer
        peak = max(peak, engine.stats.blocks_used)
    return answers, peak


# %% tags=["export:serve_cli"]
def answers_report(
    texts: list[str], answers: list[Any], seconds: float, peak: int, block_size: int
) -> dict[str, Any]:
    """What `generate` prints, as one dictionary."""
    for answer in answers:  # a request of a single step holds its blocks within that step only
        longest = max(len(text.token_ids) for text in answer.texts)
        held = len(answer.prompt_token_ids) + max(longest, 1) - 1
        peak = max(peak, blocks_for(held, block_size))
    tokens = sum(len(text.token_ids) for answer in answers for text in answer.texts)
    return {
        "answers": [
            {
                "prompt": prompt,
                "prompt_tokens": len(answer.prompt_token_ids),
                "hit_tokens": answer.hit_tokens,
                "texts": [
                    {
                        "text": text.text, "finish_reason": text.finish_reason,
                        "tokens": len(text.token_ids), "score": text.score,
                    }
                    for text in answer.texts
                ],
            }
            for prompt, answer in zip(texts, answers, strict=True)
        ],
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_s": round(tokens / max(seconds, 1e-9), 2),
        "prompt_tokens": sum(len(answer.prompt_token_ids) for answer in answers),
        "hit_tokens": sum(answer.hit_tokens for answer in answers),
        "blocks_used": peak,
    }  # fmt: skip

# %% tags=["export:serve_cli"]
def print_answers(report: dict[str, Any], as_json: bool, streamed: bool) -> None:
    """The report as JSON; or the texts, unless they have been streamed, and the counts."""
    if as_json:
        typer.echo(json.dumps(report, indent=2))
        return
    for answer in report["answers"]:
        several = len(answer["texts"]) > 1 or len(report["answers"]) > 1
        if several:
            typer.echo(f"--- {answer['prompt']}")
        for number, text in enumerate(answer["texts"], 1):
            mark = f"{number}. " if len(answer["texts"]) > 1 else ""
            typer.echo("" if streamed else mark + text["text"])
            if text["finish_reason"] not in ("length", "stop"):
                typer.echo(f"({text['finish_reason']})", err=True)
    typer.echo(counts_line(report), err=True)


def counts_line(report: dict[str, Any]) -> str:
    """Tokens, rate, blocks and hits in one line."""
    return (
        f"{report['tokens']} tokens in {report['seconds']:.2f} s,"
        f" {report['tokens_per_s']:.1f} tokens/s; at most {report['blocks_used']} blocks;"
        f" {report['hit_tokens']} of {report['prompt_tokens']} prompt tokens found in the cache"
    )

# %% tags=["export:serve_cli"]
def chat_command(
    system: Annotated[str, typer.Option(help="What the model is told before all else.")] = "",
    max_new_tokens: NewTokens = 256,
    temperature: Temperature = 0.0, top_k: TopK = 0, top_p: TopP = 1.0, seed: Seed = None,
    model_name: ModelName = "smollm2", device: Device = None, dtype: DType = None,
    download: Download = False, memory: Memory = None, blocks: Blocks = None,
    block_size: BlockSize = 16, max_seq_len: MaxSeqLen = None,
) -> None:  # fmt: skip
    """Talk with a model; each turn says how many of its tokens had to be computed."""
    asked = dict(locals())
    with refusing():
        sampling = sampling_of(asked)
        engine = open_engine(asked)
        from paged_kv.chat_session import ChatSession

        session = ChatSession(engine, sampling, max_new_tokens)
        session.turns += [("system", system)] if system else []
        opening = list(session.turns)
    typer.echo("/reset forgets, /stats counts, /quit leaves; Ctrl-C ends an answer", err=True)
    for line in lines_said():
        if line in ("/quit", "/exit"):
            break
        if line == "/reset":
            session.reset()
            session.turns += opening
            typer.echo("(forgotten)")
        elif line == "/stats":
            typer.echo(stats_line(engine.stats))
        elif line:
            speak(session, line)


def lines_said() -> Iterator[str]:
    """What the user types, line by line, to the end of the input or Ctrl-C."""
    asking = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            yield input(asking).strip()
        except (EOFError, KeyboardInterrupt):
            return


# %% tags=["export:serve_cli"]
def speak(session: Any, line: str) -> None:
    """One turn: the answer as it comes, and what it took; a refusal is one line."""
    start, said = time.perf_counter(), session.ask(line)
    try:
        with StopKey() as key:
            for text in said:
                typer.echo(text, nl=False)
                sys.stdout.flush()
                if key.asked:
                    said.close()
                    typer.echo(" [stopped]", nl=False)
    except ValueError as error:
        typer.echo(f"paged-kv: {error}; /reset begins anew", err=True)
        return
    answer, seconds = session.answer, time.perf_counter() - start
    made = 0 if answer is None else len(answer.texts[0].token_ids)
    typer.echo("")
    typer.echo(
        f"({session.computed_tokens} of {session.prompt_tokens} prompt tokens computed,"
        f" {made} made, {made / max(seconds, 1e-9):.1f} tokens/s)",
        err=True,
    )


def stats_line(stats: Any) -> str:
    """The engine's figures in one line."""
    return (
        f"{stats.tokens_made} tokens made, {stats.tokens_run} run in {stats.steps} steps;"
        f" {stats.hit_tokens} of {stats.queried_tokens} prompt tokens found;"
        f" {stats.blocks_used} of {stats.blocks} blocks used"
    )


# %% [markdown]
# `bench` describes a load in options. Its report is one dictionary too: rows for people, JSON for
# scripts, with device, versions and workload beside the figures.

# %% tags=["export:bench_cli"]
"""`paged-kv bench`, and `paged-kv watch`: the same run, with or without a view of it."""

import json
import math
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from paged_kv.sizing import at_least

Requests = Annotated[int, typer.Option(help="How many requests.")]
Rate = Annotated[float | None, typer.Option(help="Open load: requests/s at random.")]
AtOnce = Annotated[int | None, typer.Option(help="Closed load: users at once; all if not said.")]
TraceFile = Annotated[str | None, typer.Option("--trace", help="Mooncake .jsonl or Azure .csv.")]
Mean = Annotated[float, typer.Option(help="Mean length, in tokens.")]

# %% tags=["export:bench_cli"]
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

# %% tags=["export:bench_cli"]
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


# %% tags=["export:bench_cli"]
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


# %% tags=["export:bench_cli"]
def in_seconds(times: dict[str, float | None], scale: float = 1.0, unit: str = "s") -> str:
    """Such as "0.12 s, 0.50 s, 0.61 s": p50, p90, p99."""
    found = [times[name] for name in ("p50", "p90", "p99")]
    return ", ".join("-" if t is None else f"{scale * t:.3g} {unit}" for t in found)


def bench_rows(report: dict[str, Any]) -> Any:
    """The report as rows of label and value."""
    from paged_kv.live_view import counted

    yield "requests", f"{report['finished']} finished of {report['submitted']}, " + (
        f"{report['requests_per_s']:.2f} requests/s"
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

# %% tags=["export:bench_cli"]
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

# %% [markdown]
# :::{admonition} Predict
# :class: tip
# `paged-kv generate hello --model random:tiny --blocks 2 --max-new-tokens 40`: five tokens of
# prompt, forty of answer, two blocks of 16. Is it refused, cut short, or answered?
# :::
#
# :::{dropdown} Reasoning
# The prompt fits, and an answer may end early, so it is begun. 32 slots hold the 5 and 27 more; the
# 28th token is made from the last of these and never run. Then the pool is full, nobody else can
# give way, and the request ends with what it has, for the reason `out_of_blocks`.
# :::

# %% [markdown]
# The application holds them all. `bench` and `watch` are one function, which looks at the name
# that it was called by.

# %% tags=["export:cli"]
"""The command line, `paged-kv`: each command asks the package one question and prints the answer.

Nothing heavier than typer is imported until a command runs.
"""

import json
import sys
from typing import Annotated, Any

import typer

from paged_kv.configs import from_config
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

# %% tags=["export:cli"]
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
        if type(error).__name__ != "NoArgsIsHelpError":  # its message is the help, as it is
            typer.echo(f"paged-kv: {' '.join(message().split())}", err=True)
        elif text := message():
            typer.echo(text)
        sys.exit(2)
    sys.exit(code or 0)


# %% [markdown]
# The package installs with NumPy alone, so typer itself may be missing. The program therefore starts in a module that
# needs nothing, and says which extra brings what it lacks.

# %% tags=["export:command"]
"""Where `paged-kv` starts: whatever package is missing, one line says how to install it."""

import sys
from importlib import import_module

EXTRAS = {"typer": "cli", "rich": "cli", "torch": "model", "triton": "gpu"} | dict.fromkeys(
    ("transformers", "tokenizers", "accelerate", "gguf", "safetensors"), "model"
)


def start(arguments: list[str] | None = None) -> None:
    """Run `paged_kv.cli.main`; a package that is missing is one line and exit code 2."""
    try:
        import_module("paged_kv.cli").main(arguments)
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in EXTRAS:
            raise
        hint = f"in the repository: pip install -e '.[{EXTRAS[name]}]'"
        print(f"paged-kv: {name} is not installed; {hint}", file=sys.stderr)
        sys.exit(2)


# %% [markdown]
# Which modules did all of that import? Nothing that takes time:

# %%
import subprocess

heavy = "import sys; import paged_kv.cli; print({'numpy', 'torch', 'rich'} & set(sys.modules))"
print(subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True).stdout.strip())

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
# A command that serves, with a model of random weights whose tokens are bytes, in two blocks and in
# three:

# %%
import warnings

warnings.filterwarnings("ignore", message="IProgress not found")  # we show no progress bars
line = "generate hello --model random:tiny --device cpu --max-new-tokens 40 --json --blocks"
for blocks in (2, 3):
    report = json.loads(CliRunner().invoke(app, [*line.split(), str(blocks)]).stdout)
    print(blocks, "blocks:", report["tokens"], report["answers"][0]["texts"][0]["finish_reason"])

# %% [markdown]
# And `size` forwards, from a card to its users:

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
# | `generate`, `chat`, `bench`, `watch` | options in; an engine, a load, a report: appendix A6 |
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
# - *How to Scale Your Model*, its chapter on inference: the same sums for other hardware
#   {cite}`austin2025scaling`.
# - Chapter 01 for the sums, appendix A3 for where the facts come from, chapter 02 for what
#   reserving wastes over time.
