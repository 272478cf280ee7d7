# Exported from book/appendices/A2_command_line.py by tools/export.py; edit the chapter, not this file.
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
