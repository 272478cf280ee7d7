# Exported from book/13_engine.py by tools/export.py; edit the chapter, not this file.
"""What a request may ask for beside its prompt, checked when it is made."""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paged_kv.answers import Job
from paged_kv.beams import BeamSearch
from paged_kv.request import Request, own_tokens
from paged_kv.sampling_params import SamplingOptions

Prompt: TypeAlias = str | Sequence[int] | NDArray[np.integer[Any]]


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """What a request asks for.  Raises: ValueError, naming the field.

    Fields
        sampling        how tokens are chosen; greedy if None.
        n, beam_width   samples of the prompt, or beams in their place.
        length_penalty, early_stopping   of beams, see `BeamSearch`; the former -10 to 10.
        stop            strings that end a sample and are not part of it.
        stop_tokens     that end a sample, and are part of it; the model's own if None.
        priority        lower goes first.
        deadline        on the clock of `time.perf_counter`, for the policy that chooses victims.
        salt            K/V are shared only among requests with the same one.
        request_id      anything hashable; a number if None.
    """

    sampling: SamplingOptions | None = None
    n: int = 1
    beam_width: int = 0
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    stop: str | Sequence[str] = ()
    stop_tokens: Sequence[int] | None = None
    priority: int = 0
    deadline: float | None = None
    salt: str | None = None
    request_id: Hashable = None

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def stop_words(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def check_options(asked: RequestOptions) -> None:
    """ValueError, naming the field, for what cannot be, or not together."""
    check_kinds(asked)
    words, sampling = asked.stop_words, asked.sampling or SamplingOptions()
    if not all(isinstance(word, str) and word for word in words):
        raise ValueError(f"stop = {asked.stop!r}: texts are needed that are not empty")
    if asked.early_stopping not in (True, False, "never"):
        raise ValueError(f"early_stopping = {asked.early_stopping!r}: True, False or 'never'")
    if not -10 <= asked.length_penalty <= 10:
        raise ValueError(f"length_penalty = {asked.length_penalty!r}: -10 to 10 are possible")
    if asked.beam_width and sampling != SamplingOptions(seed=sampling.seed):
        raise ValueError("sampling: beams are ranked by the model's own log-probabilities")
    if asked.beam_width and words:
        raise ValueError(f"stop = {asked.stop!r}: beams end with stop_tokens alone")


def check_kinds(asked: RequestOptions) -> None:
    """ValueError, naming the field, for a value that is not of its kind."""
    for name, kind, said in (
        ("sampling", SamplingOptions, "SamplingOptions are needed, or None"),
        ("length_penalty", Real, "a number is needed"),
        ("stop", Collection, "a text is needed, or a list of texts"),
        ("stop_tokens", Collection, "a list of token ids is needed, or None"),
        ("deadline", Real, "a time is needed, or None"),
        ("salt", str, "a text is needed, or None"),
    ):
        value = getattr(asked, name)
        free = value is None and name not in ("length_penalty", "stop")
        if not free and (isinstance(value, bool) or not isinstance(value, kind)):
            raise ValueError(f"{name} = {value!r}: {said}")
    try:
        hash(asked.request_id)
    except TypeError:
        raise ValueError(f"request_id = {asked.request_id!r}: it must be hashable") from None


def eos_ids(model: Any) -> list[int]:
    """The tokens that end a text by the model's own generation config."""
    config: Any = getattr(model, "generation_config", None)
    found: Any = getattr(config, "eos_token_id", None)
    return list(found) if isinstance(found, (list, tuple)) else [found] * (found is not None)


def encode(prompt: Prompt, tokenizer: Any, vocab_size: int) -> Any:
    """Token ids of `prompt`; ValueError for an empty one, or an id that the model has not."""
    given: Any = prompt
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("prompt: token ids are needed, there is no tokenizer")
        given = tokenizer(prompt)["input_ids"]
    kinds: Any = Sequence, np.ndarray, Tensor
    if not isinstance(given, kinds):
        raise ValueError(f"prompt = {given!r}: a text is needed, or a list of token ids")
    ids = own_tokens("prompt", given)
    if not len(ids):
        raise ValueError("prompt: it is empty")
    if not 0 <= ids.min() <= ids.max() < vocab_size:
        raise ValueError(f"prompt: ids {ids.min()} to {ids.max()}, 0 to {vocab_size - 1} exist")
    return ids


def make_request(ids: Any, max_new_tokens: int, asked: RequestOptions, stops: list[int]) -> Request:
    """The request as the scheduler takes it; `stops`, the model's own stop tokens."""
    own = stops if asked.stop_tokens is None else asked.stop_tokens
    return Request(
        ids,
        max_new_tokens,
        request_id=asked.request_id,
        priority=asked.priority,
        deadline=asked.deadline,
        stop_tokens=tuple(own),
        extra=() if asked.salt is None else (("salt", asked.salt),),
        n=asked.n,
        beam_width=asked.beam_width,
    )


def make_job(name: Hashable, request: Request, asked: RequestOptions, seed: int) -> Job:
    """What the engine remembers of `request`; `seed`, if it gives none of its own."""
    sampling = asked.sampling or SamplingOptions()
    if sampling.seed is None:
        sampling = replace(sampling, seed=seed % 2**64)
    prompt = request.tokens.tolist()
    job = Job(name, prompt, sampling, asked.stop_words, asked.n > 1)
    if asked.beam_width > 1:
        rules = asked.length_penalty, asked.early_stopping
        width, most = asked.beam_width, request.max_new_tokens
        job.search = BeamSearch(width, most, request.stop_tokens, *rules)
    return job
