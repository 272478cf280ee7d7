# Exported from book/labs/L6_simulate.py by tools/export.py; edit the chapter, not this file.
"""What a run came to, in flat memory: quantiles, sums; intervals for means over seeds."""

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from paged_kv.sizing import at_least


class LogHistogram:
    """Numbers of at least 0 in buckets that widen by a fixed ratio: memory does not grow.

    State
        counts           int64 [num_buckets]: bucket i holds the numbers around low * ratio**i.
        total, maximum   sum and largest of the numbers.
    Invariant: a quantile is within `error`, relative, of the number that has its rank, if that
    lies between `low` and `high`; others are counted in the first or last bucket.
    Source: DDSketch (arXiv 1908.10693), here with a fixed range.
    """

    def __init__(self, error: float = 0.01, low: float = 1e-5, high: float = 1e6) -> None:
        if not (0 < error < 1 and 0 < low < high < math.inf):
            raise ValueError(f"error, low, high = {error}, {low}, {high}: out of order or range")
        self.low, self.log_ratio = low, 2 * math.log1p(error)
        self.counts = np.zeros(math.ceil(math.log(high / low) / self.log_ratio) + 1, np.int64)
        self.total = self.maximum = 0.0

    @property
    def count(self) -> int:
        """Numbers counted."""
        return int(self.counts.sum())

    @property
    def mean(self) -> float:
        """Their exact mean; NaN of none."""
        return self.total / self.count if self.count else math.nan

    def add(self, values: ArrayLike) -> None:
        """Count one number, or all of an array.  Raises: ValueError for NaN or below 0."""
        given = np.asarray(values, np.float64).reshape(-1)
        if not (given >= 0).all():
            raise ValueError(f"values: {given[~(given >= 0)][0]} is no number of at least 0")
        places = np.rint(np.log(np.maximum(given, self.low) / self.low) / self.log_ratio)
        places = np.minimum(places, len(self.counts) - 1).astype(np.int64)
        self.counts += np.bincount(places, minlength=len(self.counts))
        self.total += float(given.sum())
        self.maximum = max(self.maximum, float(given.max(initial=0)))

    def quantile(self, share: float) -> float:
        """The number that `share` (0 to 1) of them stay below; NaN of none."""
        if not 0 <= share <= 1:
            raise ValueError(f"share = {share}: 0 to 1 is needed")
        if not self.count:
            return math.nan
        rank = min(int(share * self.count), self.count - 1)
        place = int(np.searchsorted(np.cumsum(self.counts), rank, side="right"))
        return min(self.low * math.exp(place * self.log_ratio), self.maximum)


def bootstrap_interval(
    values: ArrayLike, level: float = 0.95, draws: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Where the mean of `values`, one a seed, lies with probability `level`.

    The values are drawn again, with repetition, `draws` times; the interval holds the middle
    `level` of the means.  Raises: ValueError for fewer than two values, or one that is not finite.
    """
    given = np.asarray(values, np.float64).reshape(-1)
    if len(given) < 2 or not np.isfinite(given).all() or not 0 < level < 1:
        raise ValueError(f"values, level = {values!r}, {level}: two finite values, 0 < level < 1")
    rng = np.random.default_rng(seed)
    means = rng.choice(given, (at_least(1, "draws", draws), len(given))).mean(1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


@dataclass(frozen=True)
class SLO:
    """What a user is promised: seconds to the first token, and a token on average after it."""

    first_token: float = 1.0
    per_token: float = 0.05


@dataclass
class Report:
    """Sums and histograms of a run, in simulated seconds and in tokens.

    first_token, per_token  one number a finished request: from its arrival to its first token;
                            mean time a token from there to its last.
    gaps                    one number a token: the time since the one before.
    submitted, refused      requests; those that could never fit are refused.
    reasons                 how samples ended.
    good, missed            requests that kept the SLO; that failed or ended past their deadline.
    output, computed, recomputed, hits  tokens: sampled; run; of those run again; found in cache.
    seconds, busy           from 0 to the last token; within steps.
    held, filled, rows      integrals over the busy time: share of the blocks that a row holds;
                            share of the slots in them that hold a token; rows in a step.
    """

    first_token: LogHistogram = field(default_factory=LogHistogram)
    per_token: LogHistogram = field(default_factory=LogHistogram)
    gaps: LogHistogram = field(default_factory=LogHistogram)
    reasons: Counter[str] = field(default_factory=Counter)
    submitted: int = 0
    refused: int = 0
    good: int = 0
    missed: int = 0
    output: int = 0
    computed: int = 0
    recomputed: int = 0
    hits: int = 0
    preemptions: int = 0
    steps: int = 0
    seconds: float = 0.0
    busy: float = 0.0
    held: float = 0.0
    filled: float = 0.0
    rows: float = 0.0

    def summary(self) -> dict[str, float]:
        """The figures that one compares; times in s, shares from 0 to 1."""
        seconds, busy = max(self.seconds, 1e-12), max(self.busy, 1e-12)
        times = {"first_token": self.first_token, "per_token": self.per_token, "gap": self.gaps}
        quantiles = {
            f"{name}_p{100 * share:g}": histogram.quantile(share)
            for name, histogram in times.items()
            for share in (0.5, 0.99, 0.999)
        }
        return quantiles | {
            "gap_max": self.gaps.maximum,
            "requests_per_s": self.first_token.count / seconds,
            "tokens_per_s": self.output / seconds,
            "goodput": self.good / seconds,
            "missed": self.missed / max(self.submitted, 1),
            "tax": self.recomputed / max(self.computed, 1),
            "hit_rate": self.hits / max(self.hits + self.computed, 1),
            "preemptions": self.preemptions,
            "blocks_held": self.held / busy,
            "slots_filled": self.filled / busy,
            "rows": self.rows / busy,
            "busy": self.busy / seconds,
        }
