# Exported from book/labs/L4_eviction_and_radix.py by tools/export.py; edit the chapter, not this file.
"""Traces that are made up: lognormal lengths, Zipf-popular openings, sessions that return.

A shape is fitted to the inputs of a trace: lengths, rate, what comes again.  It is never fitted
to a hit rate that a cache of limited size had.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from paged_kv.sizing import at_least
from paged_kv.traces import BLOCK_TOKENS, TraceRequest


@dataclass(frozen=True)
class Lognormal:
    """A lognormal length by its mean and the standard deviation of its logarithm."""

    mean: float
    sigma: float

    def __post_init__(self) -> None:
        if not (0 < self.mean < math.inf and 0 <= self.sigma < math.inf):
            raise ValueError(f"{self}: the mean must be above 0, sigma at least 0")

    def draw(self, rng: np.random.Generator) -> float:
        """One value."""
        mu = math.log(self.mean) - self.sigma**2 / 2
        return float(rng.lognormal(mu, self.sigma))


@dataclass(frozen=True)
class TraceShape:
    """The inputs that a generated trace is fitted on; lengths in tokens, times in seconds.

    A session opens with one of `num_openings` shared openings, the k-th in popularity drawn with
    weight k^-zipf, of length `opening`, and `first` tokens of its own.  With probability
    `continues` it returns after `pause`; that prompt is the last one, its answer, and
    `added` tokens.  Prompts end at `max_input`: a session that would pass it does not return.
    Sessions begin at random (Poisson), so that `requests_per_s` come in the long run.
    """

    requests_per_s: float
    first: Lognormal
    added: Lognormal
    output: Lognormal
    pause: Lognormal
    continues: float
    num_openings: int
    zipf: float
    opening: Lognormal
    max_input: int = 131_072
    max_output: int = 2_000

    def __post_init__(self) -> None:
        if not (0 < self.requests_per_s < math.inf and 0 <= self.continues < 1):
            raise ValueError(f"{self}: requests_per_s above 0 and continues in [0, 1) are needed")
        for name in ("num_openings", "max_input", "max_output"):
            at_least(1, name, getattr(self, name))


def generate(shape: TraceShape, count: int, seed: int = 0) -> Iterator[TraceRequest]:
    """The first `count` requests of a trace of this shape, in order of arrival.

    The same shape and seed give the same requests.  It begins with no session open, so that
    requests come more slowly for the first few pauses.
    Raises: ValueError for a negative count.
    """
    at_least(0, "count", count)
    rng, ids = np.random.default_rng(seed), itertools.count()
    openings = [_take(ids, int(shape.opening.draw(rng))) for _ in range(shape.num_openings)]
    popular = np.cumsum(np.arange(1.0, shape.num_openings + 1) ** -shape.zipf)
    between = 1 / (shape.requests_per_s * (1 - shape.continues))
    fresh_at = rng.exponential(between)
    due: list[tuple[float, int, TraceRequest]] = []  # sessions that will return
    for number in range(count):
        if due and due[0][0] <= fresh_at:
            now, _, last = heapq.heappop(due)
            request = _next_turn(shape, rng, ids, now, last)
        else:
            opening = openings[int(np.searchsorted(popular, rng.random() * popular[-1]))]
            request = _first_turn(shape, rng, ids, fresh_at, opening)
            fresh_at += rng.exponential(between)
        yield request
        if rng.random() < shape.continues and request.input_length < shape.max_input:
            heapq.heappush(due, (request.arrival_s + shape.pause.draw(rng), number, request))


def _take(ids: Iterator[int], tokens: int) -> tuple[int, ...]:
    """Ids for the whole blocks of so many tokens."""
    return tuple(itertools.islice(ids, tokens // BLOCK_TOKENS))


def _first_turn(
    shape: TraceShape,
    rng: np.random.Generator,
    ids: Iterator[int],
    now: float,
    opening: tuple[int, ...],
) -> TraceRequest:
    own = max(1, int(shape.first.draw(rng)))
    return _request(shape, rng, ids, now, opening, len(opening) * BLOCK_TOKENS + own)


def _next_turn(
    shape: TraceShape, rng: np.random.Generator, ids: Iterator[int], now: float, last: TraceRequest
) -> TraceRequest:
    kept = last.prefix_ids[: last.input_length // BLOCK_TOKENS]
    length = last.input_length + last.output_length + max(1, int(shape.added.draw(rng)))
    return _request(shape, rng, ids, now, kept, length)


def _request(
    shape: TraceShape,
    rng: np.random.Generator,
    ids: Iterator[int],
    now: float,
    kept: tuple[int, ...],
    length: int,
) -> TraceRequest:
    """A prompt that begins with the blocks `kept`; every other block is new."""
    length = min(length, shape.max_input)
    kept = kept[: -(-length // BLOCK_TOKENS)]
    missing = -(-length // BLOCK_TOKENS) - len(kept)
    own = tuple(itertools.islice(ids, missing))
    output = min(max(1, int(shape.output.draw(rng))), shape.max_output)
    return TraceRequest(now, length, output, kept + own)


# Fitted to the trace described in arXiv 2407.00079, section 4: its inputs, not its hit rates.
KIMI_PAPER = TraceShape(
    requests_per_s=6.56,  # published: 23,608 requests in an hour
    first=Lognormal(4600, 1.2),  # mean solved for: 7,590 tokens a prompt
    added=Lognormal(900, 2.0),  # mean and spread of the released conversation trace, rounded
    output=Lognormal(182, 1.3),  # mean published, spread of the released trace
    pause=Lognormal(215, 1.0),  # of the released trace
    continues=0.3,  # assumed
    num_openings=20,  # assumed
    zipf=1.5,  # solved for: one block is used more than 10,000 times
    opening=Lognormal(3250, 0.5),  # mean solved for: 51 % of the blocks come again
)
# Fitted to the released conversation trace (FAST 25); benchmarks/eviction.py does the fit.
KIMI_CONVERSATION = TraceShape(
    requests_per_s=3.4,
    first=Lognormal(10250, 1.54),
    added=Lognormal(1605, 2.49),  # of the turns that add something
    output=Lognormal(343, 1.36),
    pause=Lognormal(215, 0.98),
    continues=0.387,
    num_openings=1,  # every prompt begins with the same block
    zipf=0.0,
    opening=Lognormal(BLOCK_TOKENS + 0.5, 0.0),
)
# Fitted to Azure's 2023 conversation trace: lengths and rate only.
AZURE_CONVERSATION = TraceShape(
    requests_per_s=5.5,
    first=Lognormal(1155, 0.99),
    added=Lognormal(1, 0.0),
    output=Lognormal(211, 0.86),
    pause=Lognormal(1, 0.0),
    continues=0.0,  # the trace does not tell what is shared
    num_openings=1,
    zipf=0.0,
    opening=Lognormal(1, 0.0),
    max_input=16_384,
)
