# Exported from book/07_sampling_and_beams.py by tools/export.py; edit the chapter, not this file.
"""Choosing tokens at random, reproducibly, and several answers to one prompt that share it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from numbers import Real

import numpy as np
import torch
from torch import Tensor

from paged_kv.block_manager import BlockManager
from paged_kv.copy_on_write import fork_many, make_writable
from paged_kv.hf_adapter import PagedModel
from paged_kv.packed_batch import pack
from paged_kv.sizing import at_least


@dataclass(frozen=True)
class SamplingParams:
    """How to choose a token from logits.

    Fields
        temperature  divides the logits: 1e-6 to 1e6, or 0 for the likeliest token.
        top_k        only the k likeliest tokens, 0 means all.
        top_p        only the likeliest tokens that together reach this probability, 1e-6 to 1.
        seed         of this sample alone.
    Raises: ValueError naming the field.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("top_k", "seed"):
            at_least(0, name, getattr(self, name))
        for name, least, most in (("temperature", 1e-6, 1e6), ("top_p", 1e-6, 1.0)):
            value = getattr(self, name)
            number = isinstance(value, Real) and not isinstance(value, bool)
            if not number or not (least <= value <= most or (name == "temperature" and value == 0)):
                zero = "0 or " if name == "temperature" else ""
                raise ValueError(f"{name} = {value!r}: {zero}{least:g} to {most:g} is needed")


def distribution(logits: Tensor, params: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
    """What each row may choose from: probabilities [n, vocab], likeliest first, and their ids.

    Args: `logits` [n, vocab]; `params`, one a row.  Tokens that are cut off have probability 0.
    """

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=logits.device)[:, None]

    temperature = column([one.temperature or 1.0 for one in params])
    size = logits.shape[1]
    most = column([min(one.top_k or size, size) if one.temperature else 1 for one in params])
    scores, ids = (logits.float() / temperature).sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    probs = scores.masked_fill(rank >= most, -torch.inf).softmax(-1)
    before = probs.cumsum(-1) - probs
    reach = column([one.top_p if one.top_p < 1 else torch.inf for one in params])
    probs = probs.masked_fill(before >= reach, 0)
    return probs / probs.sum(-1, keepdim=True), ids


def sample(logits: Tensor, params: Sequence[SamplingParams], steps: Sequence[int]) -> list[int]:
    """Choose one token a row; the draw depends on the row's seed and step, on nothing else.

    Args: `logits` [n, vocab]; `params`; `steps`, how many tokens each row has chosen before.
    """
    probs, ids = distribution(logits, params)
    seeds = zip(params, steps, strict=True)
    draws = [np.random.default_rng((one.seed, step)).random() for one, step in seeds]
    upto = probs.double().cumsum(-1)
    at = torch.tensor(draws, dtype=torch.float64, device=logits.device)[:, None] * upto[:, -1:]
    place = torch.searchsorted(upto, at, right=True)
    return ids.gather(1, place)[:, 0].tolist()


def prefill(
    guest: PagedModel, manager: BlockManager, prompts: Sequence[Sequence[int]]
) -> tuple[list[int], Tensor]:
    """Run some prompts as one packed batch.

    Returns: a new row for each; the logits behind its last token, [n, vocab].
    Raises, with nothing changed: OutOfBlocks; ValueError for a prompt or a row that cannot be.
    """
    if not all(len(prompt) for prompt in prompts):
        raise ValueError("prompts: one is empty")
    rows: list[int] = []
    try:
        for prompt in prompts:
            rows.append(manager.add(len(prompt)))
        return rows, guest.forward(pack(manager.tables, rows, prompts, guest.model.device))
    except Exception:
        for row in rows:
            manager.finish(row)
        raise


def decode(
    guest: PagedModel, manager: BlockManager, rows: Sequence[int], tokens: Sequence[int]
) -> Tensor:
    """Put one token behind each of `rows`, which may share blocks, and run them.

    Returns: logits [n, vocab].  Raises: OutOfBlocks, with nothing changed.
    """
    copies = make_writable(manager, rows)
    manager.append(rows)
    guest.store.copy_blocks(copies)
    batch = pack(manager.tables, rows, [[token] for token in tokens], guest.model.device)
    return guest.forward(batch)


@dataclass
class Samples:
    """Where `parallel_sample` stands: running samples (index -> row), and all outputs."""

    running: dict[int, int]
    output: list[list[int]]


def parallel_sample(
    guest: PagedModel,
    manager: BlockManager,
    prompt: Sequence[int],
    params: Sequence[SamplingParams],
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
) -> Iterator[Samples]:
    """Several answers to one prompt, which is computed once and stored once.

    Yields the same Samples after every step, before those that have finished leave.
    Raises: OutOfBlocks; all rows are given back, however it ends.
    """
    if not params:
        raise ValueError("params: one a sample is needed")
    (root,), logits = prefill(guest, manager, [prompt])
    state = Samples({0: root}, [[] for _ in params])
    try:
        state.running.update(enumerate(fork_many(manager, [root] * (len(params) - 1)), 1))
        logits = logits.expand(len(params), -1)
        while state.running:
            chosen = [params[i] for i in state.running]
            tokens = sample(logits, chosen, [len(state.output[i]) for i in state.running])
            for i, token in zip(state.running, tokens, strict=True):
                state.output[i].append(token)
            yield state
            for i, token in zip(list(state.running), tokens, strict=True):
                if len(state.output[i]) == max_new_tokens or token in stop_ids:
                    manager.finish(state.running.pop(i))
            if state.running:
                last = [state.output[i][-1] for i in state.running]
                logits = decode(guest, manager, list(state.running.values()), last)
    finally:
        for row in state.running.values():
            manager.finish(row)
