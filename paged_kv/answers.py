# Exported from book/13_engine.py by tools/export.py; edit the chapter, not this file.
"""What users get: pieces of text as they come, and answers when they are complete."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paged_kv.beams import BeamSearch
from paged_kv.sampling_params import SamplingOptions


@dataclass(frozen=True)
class Text:
    """One completed sample or beam.

    Fields
        index          of the sample; beams stand best first.
        token_ids      generated, a stop token included.
        text           without special tokens, cut before a stop string; "" without tokenizer.
        finish_reason  "length", "stop", "aborted", "out_of_blocks" or "error: ...".
        logprobs       of each token, where they were asked for;  top_logprobs, {id: logprob}.
        score          of a beam: its log-probability over length ** length_penalty.
    """

    index: int
    token_ids: list[int]
    text: str
    finish_reason: str
    logprobs: list[float] | None = None
    top_logprobs: list[dict[int, float]] | None = None
    score: float | None = None


@dataclass(frozen=True)
class Answer:
    """All that became of one request; times are those of the engine's clock."""

    request_id: Hashable
    prompt_token_ids: list[int]
    texts: tuple[Text, ...]
    arrival: float
    first_token_at: float | None
    finished_at: float
    hit_tokens: int
    preemptions: int

    @property
    def text(self) -> str:
        """The text of the first sample, or of the best beam."""
        return self.texts[0].text


@dataclass(frozen=True)
class Delta:
    """What one step brought to one sample.

    `finish_reason` comes with a sample's last piece, `answer` with the last one of its request.
    `text` may lag behind the tokens: bytes of an unfinished character, or what could be the
    beginning of a stop string, are held back.  Beams come whole, when the search has ended.
    """

    request_id: Hashable
    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None = None
    answer: Answer | None = None


class TextStream:
    """Token ids in, text out, until one of the stop strings appears.

    Bytes at the end that are no whole character never come out.
    State: `text`, what was given out; `held`, what may yet become a stop string; `stopped`.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        from tokenizers.decoders import DecodeStream

        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.decoder = DecodeStream(skip_special_tokens=True)
        self.text, self.held, self.stopped = "", "", False

    def push(self, token: int) -> str:
        """Take in one token; return the text that is certain now."""
        if self.stopped:
            return ""
        self.held += self.decoder.step(self.tokenizer, token) or ""
        found = [at for word in self.stop if (at := self.held.find(word)) >= 0]
        if found:
            self.held, self.stopped = self.held[: min(found)], True
            return self.flush()
        certain = len(self.held) - max((overlap(self.held, word) for word in self.stop), default=0)
        return self._give_out(certain)

    def flush(self) -> str:
        """Give out what was held back: nothing more will come."""
        return self._give_out(len(self.held))

    def _give_out(self, count: int) -> str:
        new, self.held = self.held[:count], self.held[count:]
        self.text += new
        return new


def overlap(text: str, word: str) -> int:
    """Characters at the end of `text` with which `word` begins, `word` itself left out."""
    longest = min(len(word) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if word.startswith(text[-n:])), 0)


@dataclass(eq=False)
class Job:
    """What the engine remembers of a request beside the scheduler: how to choose, how to spell.

    State: `several`, whether it has more than one sample; `streams`, `logprobs`, `tops` by
    sample index; `search`, of a beam group; `told`, the samples whose end was reported.
    """

    id: Hashable
    prompt: list[int]
    sampling: SamplingOptions
    stop: tuple[str, ...] = ()
    several: bool = False
    search: BeamSearch | None = None
    streams: dict[int, TextStream] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    tops: dict[int, list[dict[int, float]]] = field(default_factory=dict)
    told: set[int] = field(default_factory=set)
