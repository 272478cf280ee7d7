# Exported from book/appendices/A6_serving_commands.py by tools/export.py; edit the chapter, not this file.
"""What is asked of a server, and when: drawn lengths, recorded traces, real questions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_kv.sizing import at_least
from paged_kv.trace_shapes import Lognormal
from paged_kv.traces import BLOCK_TOKENS, TraceRequest, read_azure, read_mooncake


@dataclass(frozen=True)
class TimedPrompt:
    """One request: when it is due, in s from the start; its tokens; how many answer it."""

    due: float
    prompt: NDArray[np.int32]
    new_tokens: int


@dataclass(frozen=True)
class BenchLoad:
    """Requests in order of their due times.

    at_once: None for an open load, whose requests come when they are due, whatever the server
    does; else a closed one: so many users, who send their next when the last is answered.
    ends: whether answers may end by themselves, or run to the number of tokens drawn for them.
    """

    name: str
    requests: tuple[TimedPrompt, ...]
    at_once: int | None = None
    ends: bool = False

    def __post_init__(self) -> None:
        if not self.requests:
            raise ValueError("requests: a load needs at least one")
        if self.at_once is not None:
            at_least(1, "at_once", self.at_once)


SIXTY = Lognormal(60, 1.0)


@dataclass(frozen=True)
class LoadLengths:
    """Lengths in tokens: lognormal by mean and sigma, clipped to `low` and `high`."""

    prompt: Lognormal = SIXTY
    answer: Lognormal = SIXTY
    low: int = 4
    high: int = 256

    def draw(self, rng: np.random.Generator, shape: Lognormal, count: int) -> list[int]:
        """So many lengths, whole numbers."""
        drawn = [shape.draw(rng) for _ in range(at_least(1, "requests", count))]
        return [int(n) for n in np.clip(np.rint(drawn), self.low, self.high)]


USUAL = LoadLengths()


def due_times(rng: np.random.Generator, count: int, rate: float | None) -> list[float]:
    """When requests come: at random (Poisson) at `rate` a second; all at once if it is None."""
    if rate is None:
        return [0.0] * count
    if not 0 < rate < float("inf"):
        raise ValueError(f"rate = {rate}: more than 0 requests/s are needed")
    return [float(t) for t in rng.exponential(1 / rate, count).cumsum()]


def drawn_load(
    count: int,
    vocab_size: int,
    lengths: LoadLengths = USUAL,
    rate: float | None = None,
    at_once: int | None = None,
    shared: int = 0,
    seed: int = 0,
) -> BenchLoad:
    """Random prompts of random lengths, each behind the same `shared` tokens."""
    rng = np.random.default_rng(seed)
    sizes = lengths.draw(rng, lengths.prompt, count), lengths.draw(rng, lengths.answer, count)
    begin = rng.integers(0, vocab_size, at_least(0, "shared", shared), np.int32)
    requests = [
        TimedPrompt(due, np.append(begin, rng.integers(0, vocab_size, n, np.int32)), new)
        for due, n, new in zip(due_times(rng, count, rate), *sizes, strict=True)
    ]
    users = None if rate else count if at_once is None else at_once
    how = f"Poisson, {rate:g} requests/s" if rate else f"closed, {users} at once"
    name = f"{count} requests, {how}, lognormal lengths, seed {seed}"
    return BenchLoad(name, tuple(requests), users)


def trace_load(
    path: str, vocab_size: int, count: int | None = None, scale: float = 1.0, speed: float = 1.0
) -> BenchLoad:
    """The first `count` requests of a recorded trace, Mooncake's JSONL or Azure's CSV.

    `scale` multiplies lengths, `speed` divides times.  Prompts that share blocks in the trace
    share tokens here.   Raises: ValueError for a broken line, or a file of neither kind.
    """
    if not (0 < scale < float("inf") and 0 < speed < float("inf")):
        raise ValueError(f"scale, speed = {scale}, {speed}: more than 0 is needed")
    kinds = {".jsonl": read_mooncake, ".csv": read_azure}
    if Path(path).suffix not in kinds or not Path(path).is_file():
        raise ValueError(f"trace = {path!r}: a file that ends in .jsonl or .csv is needed")
    found = islice(kinds[Path(path).suffix](path), count)
    requests = []
    for number, request in enumerate(found):
        new = max(1, round(request.output_length * scale))
        tokens = trace_tokens(request, number, vocab_size, scale)
        requests.append(TimedPrompt(request.arrival_s / speed, tokens, new))
    return BenchLoad(f"{Path(path).name}, scale {scale:g}, speed {speed:g}", tuple(requests))


def trace_tokens(
    request: TraceRequest, number: int, vocab_size: int, scale: float
) -> NDArray[np.int32]:
    """Tokens of a traced prompt: those of a block follow from its id, others from `number`."""
    length, size = max(1, round(request.input_length * scale)), max(1, round(BLOCK_TOKENS * scale))
    ids: Sequence[tuple[int, int]] = [(0, block) for block in request.prefix_ids] or [(1, number)]
    size = size if request.prefix_ids else length
    parts = [np.random.default_rng(key).integers(0, vocab_size, size, np.int32) for key in ids]
    return np.resize(np.concatenate(parts), length)


SYSTEM = (
    "You are a patient guide in a small museum of computing. Visitors of every age ask you "
    "about machines, numbers and the people who made them. Answer in plain words and in at most "
    "three sentences. If you do not know, say so, and name somebody who might."
)
QUESTIONS = (
    "Who was Ada Lovelace?", "What is a transistor?", "Why do computers count in twos?",
    "What did an abacus do?", "How does a hard disk remember?", "What is an algorithm?",
    "Who broke the Enigma?", "What was the first bug?", "Why do chips get hot?",
    "What does a compiler do?", "How big was the ENIAC?", "What is a punched card?",
    "Who was Grace Hopper?", "What is virtual memory?", "Can a machine think?",
    "What came before the mouse?",
)  # fmt: skip


def question_load(
    tokenizer: Any,
    count: int,
    lengths: LoadLengths = USUAL,
    rate: float | None = None,
    at_once: int | None = None,
    seed: int = 0,
) -> BenchLoad:
    """Questions to a chat model, all behind one system prompt; answers may end by themselves."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError("questions: a tokenizer with a chat template is needed")
    rng = np.random.default_rng(seed)
    news = lengths.draw(rng, lengths.answer, count)
    times = due_times(rng, count, rate)
    asked = list(islice(endless(rng, QUESTIONS), count))
    prompts = [
        encode_chat(tokenizer, [("system", SYSTEM), ("user", question)]) for question in asked
    ]
    requests = map(TimedPrompt, times, prompts, news)
    users = None if rate else count if at_once is None else at_once
    how = f"Poisson, {rate:g} requests/s" if rate else f"closed, {users} at once"
    name = f"{count} questions behind one system prompt, {how}, seed {seed}"
    return BenchLoad(name, tuple(requests), users, ends=True)


def endless(rng: np.random.Generator, items: Sequence[str]) -> Iterator[str]:
    """All items in random order, over and over."""
    while True:
        yield from (items[i] for i in rng.permutation(len(items)))


def encode_chat(tokenizer: Any, turns: Sequence[tuple[str, str]]) -> NDArray[np.int32]:
    """The token ids of (role, text) turns, by the model's own template, ready for an answer."""
    messages = [{"role": role, "content": text} for role, text in turns]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
