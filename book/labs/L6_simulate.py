# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Lab: a server without a GPU
#
# A sum says what a server can do: rows in a step, seconds a step, tokens an answer. Here it runs at
# two loads, a little below that sum and a little above. Tokens a second are nearly the same; what users feel is
# not.

# %%
import json
from pathlib import Path

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "benchmarks").is_dir())
result = json.loads((ROOT / "benchmarks/results/simulate.json").read_text())
load = {row["rate"]: row for row in result["rows"] if row["experiment"] == "load"}
for rate in result["opening"]:
    row = load[rate]
    print(f"{rate:4} requests/s: {row['tokens_per_s']:6,.0f} tokens/s; first token after",
          f"{row['first_token_p50']:5.2f} s (median), {row['first_token_p99']:6.2f} s (99 %)")

# %% [markdown]
# **The question.** What will a user feel, at a load and with a setting that nobody has tried yet?
#
# :::{card} This lab
# - **You need** chapters [08](../08_prefix_hashing), [09](../09_scheduling) and
#   [10](../10_preemption), and the traces of the [lab on eviction](L4_eviction_and_radix).
# - **Exports** `cost_model`, `metrics`, `simulate`.
# - **Device** CPU; the GPU is a formula.
# - **Run time** under a minute; `benchmarks/simulate.py` takes longer.
# - **You are here** 08 prefix hashing · 09 scheduling · 10 preemption · **lab** · 11 Triton
#   decode · 12 Triton prefill · 13 engine
# :::
#
# Stop tokens aside, the scheduler looks at no number that the model computes, so we can leave the
# model out. Scheduler, managers, prefix cache and preemption run here *as they are*. Only the device
# is replaced, by a formula for its time.

# %% [markdown]
# ## The clock
#
# A step reads all weights and all K/V of its rows once, and it multiplies. It takes the longer of the two
# times, plus a fixed one for launches, sampling and the host.

# %% tags=["export:cost_model"]
"""What a step takes on an accelerator: bytes over bandwidth, or FLOPs over rate, if longer."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import ArrayLike


# %% tags=["export:cost_model"]
@dataclass(frozen=True)
class CostModel:
    """Constants of one model on one device, and the time of a step that follows from them.

    weight_bytes      bytes of weights that every step reads once.
    token_flops       FLOPs of a token outside attention: 2 a parameter.
    pair_flops        FLOPs of a pair of query token and key token, over all layers.
    kv_bytes          bytes of K/V a token, over all layers.
    read_bandwidth    B/s at which a step reads.
    matmul_rate       FLOP/s at which it multiplies.
    host_bandwidth    B/s between device and host memory, one direction at a time.
    overhead          s a step that neither bytes nor FLOPs explain.
    measured          for each constant that was measured, where; the others are assumed.
    """

    weight_bytes: float
    token_flops: float
    pair_flops: float
    kv_bytes: float
    read_bandwidth: float
    matmul_rate: float
    host_bandwidth: float
    overhead: float
    measured: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self._names():
            value, rate = getattr(self, name), name.endswith(("bandwidth", "rate"))
            if not (math.isfinite(value) and value >= 0 and (value or not rate)):
                allowed = "a finite number " + ("above 0" if rate else "of at least 0")
                raise ValueError(f"{name} = {value!r}: {allowed} is needed")
        if unknown := set(self.measured) - set(self._names()):
            raise ValueError(f"measured = {unknown}: no such constants")

    def _names(self) -> list[str]:
        return [each.name for each in fields(self) if each.name != "measured"]


# %% tags=["export:cost_model"]
class CostModel(CostModel):  # type: ignore
    def read_seconds(self, new_tokens: ArrayLike, seq_lens: ArrayLike) -> float:
        """Time to read the weights and the K/V of the rows once, and to write the new K/V."""
        kv = self.kv_bytes * float(np.asarray(seq_lens).sum() + np.asarray(new_tokens).sum())
        return (self.weight_bytes + kv) / self.read_bandwidth

    def multiply_seconds(self, new_tokens: ArrayLike, seq_lens: ArrayLike) -> float:
        """Time to multiply new tokens with the weights, and with all keys up to their own."""
        new, ends = np.asarray(new_tokens, np.float64), np.asarray(seq_lens, np.float64)
        tokens = float(new.sum())
        pairs = float(new @ ends) - (float(new @ new) - tokens) / 2
        return (self.token_flops * tokens + self.pair_flops * pairs) / self.matmul_rate

    def step_seconds(self, new_tokens: ArrayLike, seq_lens: ArrayLike) -> float:
        """Time of one step.  Args: int [n], one a row; seq_lens as they are after the step."""
        reading = self.read_seconds(new_tokens, seq_lens)
        return max(reading, self.multiply_seconds(new_tokens, seq_lens)) + self.overhead

    def move_seconds(self, within_device: int, with_host: int, block_size: int) -> float:
        """Time to move so many blocks; nothing of it is hidden behind a step."""
        block = self.kv_bytes * block_size
        copied = 2 * within_device * block / self.read_bandwidth  # read, then written
        return copied + with_host * block / self.host_bandwidth

    def describe(self) -> str:
        """A line for each constant: its value, and "assumed" or where it was measured."""
        return "\n".join(
            f"{name:15} {getattr(self, name):8.3g}  {self.measured.get(name, 'assumed')}"
            for name in self._names()
        )


# %% tags=["export:cost_model"]
# Llama 3 8B in bf16 on one H200: shapes from its config, 83 % of the card's 4.8 TB/s, 60 %
# of its 989 TFLOP/s, PCIe 5.0 x16 at 50 GB/s.  Rates and overhead are assumed until measured.
LLAMA_3_8B_ON_H200 = CostModel(
    weight_bytes=16.06e9,
    token_flops=16.06e9,
    pair_flops=4 * 32 * 32 * 128,
    kv_bytes=131_072,
    read_bandwidth=4.0e12,
    matmul_rate=593e12,
    host_bandwidth=50e9,
    overhead=1e-3,
)

# %% [markdown]
# Each constant is `assumed` until somebody measures it and says so in `measured`. (Chapter 14 measures most of them on such a device.)
#
# :::{admonition} Predict
# :class: tip
# 256 rows of 600 tokens decode. How many prompt tokens can the same step run before it takes any
# longer?
# :::
#
# :::{dropdown} Reasoning
# The weights are 16 GB and the K/V of 153,600 tokens 20.1 GB, together 9.1 ms of reading. In that time
# the device multiplies some 330 tokens, of which 256 are the decodes: 73 are left, half of what is
# free beside *one* row.
# :::

# %%
cost = LLAMA_3_8B_ON_H200
print(cost.describe())
for rows in (1, 32, 256):
    decode, lens = np.ones(rows), np.full(rows, 600)
    reading = cost.read_seconds(decode, lens)
    spare = (reading - cost.multiply_seconds(decode, lens)) * cost.matmul_rate / cost.token_flops
    print(f"{rows:3} rows of 600 tokens: {cost.weight_bytes / 1e9:.0f} GB of weights,",
          f"{cost.kv_bytes * 600 * rows / 1e9:4.1f} GB of K/V, reading {1e3 * reading:.1f} ms,",
          f"{spare:3.0f} tokens more are free")

# %% [markdown]
# **Turn the knob.** Set `matmul_rate=2 * cost.matmul_rate` with `dataclasses.replace`; expect the free
# tokens to more than double, and reading to take as long as before.

# %% [markdown]
# ## A million numbers in a few counters
#
# A mean hides what hurts; we want the wait that 99.0 % of the users stay below. A million
# requests make a third of a billion gaps between tokens, too many to sort; we count them in buckets.
# These widen by a fixed ratio, which keeps every *relative* error below one bound.

# %% tags=["export:metrics"]
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


# %% tags=["export:metrics"]
class LogHistogram(LogHistogram):  # type: ignore
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


# %%
rng = np.random.default_rng(0)
waits = rng.lognormal(-2, 2, 1_000_000)
histogram = LogHistogram(error=0.01)
histogram.add(waits)
print(f"{histogram.count:,} waits in {len(histogram.counts):,} counters")
for share in (0.5, 0.99, 0.999):
    exact = np.sort(waits)[int(share * len(waits))]
    print(f"{100 * share:4.1f} %: {histogram.quantile(share):7.3f} s, exactly {exact:7.3f} s")
    assert abs(histogram.quantile(share) / exact - 1) <= 0.01

# %% [markdown]
# `bootstrap_interval` is for the [next lab](L7_victim_economics): how far a mean over a few seeds can
# be trusted.

# %% [markdown]
# ## The loop
#
# A trace gives lengths and says which prompts begin alike. We invent tokens that are equal where it
# says so, and the prefix cache finds what it would have found.

# %% tags=["export:simulate"]
"""A server without a GPU: scheduler and managers as they are, under a simulated clock."""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from paged_kv.request import NeverFits, Output, Request
from paged_kv.scheduler import Scheduler
from paged_kv.step_plan import Host, StepPlan
from paged_kv.traces import BLOCK_TOKENS, TraceRequest

VOCABULARY = 128_256


class Clock:
    """Simulated seconds: `simulate` sets `now`, the scheduler reads it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """The time, in s."""
        return self.now


# %% tags=["export:simulate"]
def prompt_tokens(entry: TraceRequest, own: int) -> NDArray[np.int32]:
    """Tokens [input_length] that are equal where the trace says that prompts are.

    Args: `own`, a number that no other request of the trace has; it stands for prefix_ids
    where the trace has none.
    """
    blocks = -(-entry.input_length // BLOCK_TOKENS)
    ids = entry.prefix_ids or [(1 << 40) + (own << 12) + block for block in range(blocks)]
    starts = np.array(ids, np.uint64)[:, None] ^ np.uint64(0x9E3779B97F4A7C15)
    offsets = np.arange(BLOCK_TOKENS).astype(np.uint64) * np.uint64(0xD1B54A32D192ED03)
    mixed = (starts ^ (starts >> np.uint64(31))) * np.uint64(0x94D049BB133111EB) + offsets
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    tokens: NDArray[np.int32]
    tokens = ((mixed >> np.uint64(33)) % np.uint64(VOCABULARY)).astype(np.int32)
    return tokens.reshape(-1)[: entry.input_length]


def requests_of(trace: Iterable[TraceRequest], deadline: float | None = None) -> Iterator[Request]:
    """The requests of a trace, one by one; entries that generated nothing are left out.

    Args: `deadline`, seconds after its arrival, for each of them.
    """
    for own, entry in enumerate(trace):
        if entry.output_length:
            due = None if deadline is None else entry.arrival_s + deadline
            tokens = prompt_tokens(entry, own)
            yield Request(tokens, entry.output_length, arrival=entry.arrival_s, deadline=due)


# %% [markdown]
# A `Report` is what a run comes to: three histograms and a score of sums.

# %% tags=["export:metrics"]
@dataclass(frozen=True)
class SLO:
    """What a user is promised: seconds to the first token, and a token on average after it."""

    first_token: float = 1.0
    per_token: float = 0.05


# %% tags=["export:metrics"]
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


# %% tags=["export:metrics"]
class Report(Report):  # type: ignore
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


# %% [markdown]
# The `Meter` fills it from plans and outputs. Two numbers follow each row: when its last token came,
# and how far its K/V was ever computed. What a plan computes below that mark is the *tax* of preemption.

# %% tags=["export:simulate"]
class Meter:
    """Fills a Report; remembers a few numbers for each row and each request that lives.

    State
        last_at   float64 [max_seqs]: when the row's last token came, NaN before the first.
        reached   int64 [max_seqs]: tokens of its sample whose K/V was ever computed.
        tenant    for each row (request id, sample index), or None.
        paused    both numbers, for samples that lost their row and will have another.
        due       the deadlines of the requests that live.
        waits     gaps that are not counted yet, in a buffer; they are counted many at a time.
    """

    def __init__(self, scheduler: Scheduler, slo: SLO) -> None:
        max_seqs = len(scheduler.manager.tables.table)
        self.scheduler, self.slo, self.report = scheduler, slo, Report()
        self.last_at = np.full(max_seqs, np.nan)
        self.reached = np.zeros(max_seqs, np.int64)
        self.tenant: list[tuple[Hashable, int] | None] = [None] * max_seqs
        self.paused: dict[tuple[Hashable, int], tuple[float, int]] = {}
        self.due: dict[Hashable, float] = {}
        self.waits, self.num_waits = np.empty(16 * max_seqs + 1024), 0

    def submit(self, request: Request) -> None:
        """Hand a request over; count one that can never fit as refused."""
        self.report.submitted += 1
        try:
            request_id = self.scheduler.submit(request)
        except NeverFits:
            self.report.refused += 1
            self.report.missed += request.deadline is not None
            return
        if request.deadline is not None:
            self.due[request_id] = request.deadline


# %% tags=["export:simulate"]
class Meter(Meter):  # type: ignore
    def planned(self, plan: StepPlan) -> None:
        """Follow the rows to their tenants; count tokens that are run, and run again."""
        for row in plan.news.closed:
            tenant, self.tenant[row] = self.tenant[row], None
            if tenant is not None and tenant[0] in self.scheduler.ledger.groups:
                self.paused[tenant] = (float(self.last_at[row]), int(self.reached[row]))
        for row, request_id, index in plan.news.opened:
            self.tenant[row] = (request_id, index)
            before = self.paused.pop((request_id, index), (math.nan, 0))
            self.last_at[row], self.reached[row] = before
        rows, ends = plan.rows, plan.seq_lens
        reached, starts = self.reached[rows], ends - plan.new_tokens
        if (reached > starts).any():
            again = np.minimum(reached, ends) - starts
            self.report.recomputed += int(again[again > 0].sum())
            ends = np.maximum(reached, ends)
        self.reached[rows] = ends
        self.report.computed += plan.num_tokens

    def ran(self, plan: StepPlan, seconds: float) -> None:
        """Add up what was held while the step took `seconds`."""
        manager, report = self.scheduler.manager, self.report
        slots = int(manager.tables.num_blocks[plan.rows].sum()) * manager.block_size
        pool = manager.pool
        report.steps += 1
        report.busy += seconds
        report.rows += seconds * len(plan.rows)
        report.held += seconds * (1 - pool.num_free / pool.num_blocks)
        report.filled += seconds * int(plan.seq_lens.sum()) / max(slots, 1)


# %% tags=["export:simulate"]
class Meter(Meter):  # type: ignore
    def answered(self, now: float, outputs: Iterable[Output]) -> None:
        """Count the tokens that came, and the requests that ended with them."""
        rows = self.scheduler.accepted[0]
        start, self.num_waits = self.num_waits, self.num_waits + len(rows)
        self.waits[start : self.num_waits] = now - self.last_at[rows]
        self.last_at[rows] = now
        if self.num_waits > len(self.waits) - len(self.last_at):
            self.count_waits()
        self.report.output += len(rows)
        self.report.seconds = now
        self.ended(outputs)

    def count_waits(self) -> None:
        """Empty the buffer into the histogram."""
        waits, self.num_waits = self.waits[: self.num_waits], 0
        self.report.gaps.add(waits[waits >= 0])  # NaN, of a first token, is left out

    def ended(self, outputs: Iterable[Output]) -> None:
        """Count the requests that ended, well or not."""
        for output in outputs:
            report, key = self.report, output.request_id
            for completion in output.completions:
                report.reasons[str(completion.finish_reason)] += 1
                self.paused.pop((key, completion.index), None)
            kept = all(each.finish_reason in ("length", "stop") for each in output.completions)
            due = self.due.pop(key, math.inf)
            report.missed += output.finished_at > due or (due < math.inf and not kept)
            report.hits += output.hit_tokens
            report.preemptions += output.preemptions
            if kept and output.first_token_at is not None:
                self._finished(output, output.first_token_at)

    def _finished(self, output: Output, first: float) -> None:
        tokens = max(len(each.token_ids) for each in output.completions)
        waited, each = first - output.arrival, (output.finished_at - first) / max(tokens - 1, 1)
        self.report.first_token.add(waited)
        self.report.per_token.add(each)
        self.report.good += waited <= self.slo.first_token and each <= self.slo.per_token


# %% [markdown]
# What remains is a server's loop: submit what has arrived, schedule, let time pass, commit.

# %% tags=["export:simulate"]
def plan_seconds(cost: CostModel, plan: StepPlan, block_size: int) -> float:
    """Time of a plan: its moves, then its step, if it has any tokens."""
    host = sum(isinstance(end, Host) for move in plan.moves for end in move)
    moving = cost.move_seconds(len(plan.moves) - host, host, block_size)
    return moving + (cost.step_seconds(plan.new_tokens, plan.seq_lens) if plan.num_tokens else 0)


# %% tags=["export:simulate"]
def simulate(
    scheduler: Scheduler,
    clock: Clock,
    arrivals: Iterable[Request],
    cost: CostModel,
    *,
    slo: SLO = SLO(),
    seed: int = 0,
    on_step: Callable[[StepPlan], None] | None = None,
) -> Report:
    """Serve `arrivals`, in order of arrival, to the last token; sampled tokens are random.

    Args: `scheduler`, built with `clock`; `on_step`, called with each plan before it is run.
    Raises: ValueError for a request without a time of arrival, out of order, or with beams;
    RuntimeError if the scheduler stops before all have ended.
    Invariant: submitted = refused + ended, and at the end no row holds a block.
    """
    meter, rng = Meter(scheduler, slo), np.random.default_rng(seed)
    coming = in_order(arrivals)
    head = next(coming, None)
    while True:
        while head is not None and head[0] <= clock.now:
            meter.submit(head[1])
            head = next(coming, None)
        plan = scheduler.schedule()
        if plan is not None:
            if on_step:
                on_step(plan)
            run_plan(plan, meter, clock, cost, rng)
        elif outputs := scheduler.take_outputs():
            meter.ended(outputs)
        elif head is not None:
            clock.now = head[0]
        else:
            return settled(meter)


# %% tags=["export:simulate"]
def in_order(arrivals: Iterable[Request]) -> Iterator[tuple[float, Request]]:
    """Times and requests; ValueError at the first that cannot be simulated."""
    before = 0.0
    for request in arrivals:
        if request.beam_width:
            raise ValueError(f"{request.request_id}: beams choose by what a model computes")
        if request.arrival is None or not before <= request.arrival < math.inf:
            raise ValueError(f"arrival = {request.arrival}: a time of at least {before} is needed")
        before = request.arrival
        yield before, request


def run_plan(
    plan: StepPlan, meter: Meter, clock: Clock, cost: CostModel, rng: np.random.Generator
) -> None:
    """Let the time of `plan` pass, then commit random tokens."""
    scheduler = meter.scheduler
    meter.planned(plan)
    seconds = plan_seconds(cost, plan, scheduler.manager.block_size)
    meter.ran(plan, seconds)
    clock.now += seconds
    sampled = rng.integers(0, VOCABULARY, len(plan.sample_rows), np.int32)
    meter.answered(clock.now, scheduler.commit(plan, sampled, now=clock.now))


# %% tags=["export:simulate"]
def settled(meter: Meter) -> Report:
    """The report, once it is sure that nothing was lost."""
    counts, pool = meter.scheduler.counts, meter.scheduler.manager.pool
    if counts["waiting"] or counts["running"] or counts["swapped"]:
        raise RuntimeError(f"the scheduler has nothing to do, but {counts}")
    meter.count_waits()
    ended = counts["finished"] + meter.report.refused
    assert ended == meter.report.submitted, f"{ended} ended of {meter.report.submitted}"
    assert pool.num_free == pool.num_blocks, f"{pool.num_blocks - pool.num_free} blocks leaked"
    return meter.report


# %% [markdown]
# Sampled tokens are random, so beams are refused.

# %% [markdown]
# ## Three chats by hand
#
# Let every step take one second. Chats A and B arrive at 0, chat C at 1.5.
#
# :::{admonition} Predict
# :class: tip
# B = 4, 8 blocks; prompts of 6, 5 and 9 tokens, answers of 4, 3 and 2. When does each chat get
# its first token, and when its last?
# :::
#
# :::{dropdown} Reasoning
# A and B run their prompts in the first step: first tokens at 1. C comes in the middle of the
# second step, joins the third, and answers at 3, 1.5 s after it came. B ends at 3, A and C at 4. The
# blocks are 2 + 2 + 3 at most: nobody waits.
# :::

# %%
from paged_kv.block_manager import BlockManager
from paged_kv.draw import draw_pool

a_second = CostModel(
    weight_bytes=1, token_flops=0, pair_flops=0, kv_bytes=0, read_bandwidth=1, matmul_rate=1,
    host_bandwidth=1, overhead=0,
)
chats = [
    Request(range(100, 106), 4, request_id="A", arrival=0.0),
    Request(range(200, 205), 3, request_id="B", arrival=0.0),
    Request(range(300, 309), 2, request_id="C", arrival=1.5),
]
clock = Clock()
manager = BlockManager(num_blocks=8, block_size=4, max_seqs=3, max_seq_len=16)
scheduler = Scheduler(manager, clock=clock, token_budget=16)
pictures = []


def watch(plan):
    """Print what the step runs."""
    state = scheduler.home.rows
    names = {state.group[row].id: row for row in plan.rows.tolist()}
    ran = zip(names, plan.new_tokens.tolist(), plan.seq_lens.tolist())
    told = "; ".join(f"{name} {new} of {end} tokens" for name, new, end in ran)
    print(f"{clock.now:.0f} s: {told}")
    pictures.append(draw_pool(manager.snapshot(names)))


report = simulate(scheduler, clock, chats, a_second, on_step=watch)
pictures[2]

# %%
print(f"ended at {report.seconds:.0f} s after {report.steps} steps; {dict(report.reasons)}")
print(f"first token: {report.first_token.total:.1f} s in all,",
      f"at most {report.first_token.maximum} s")
assert report.first_token.total == 1 + 1 + 1.5 and report.output == 4 + 3 + 2
assert report.computed == (6 + 3) + (5 + 2) + (9 + 1), "the last token of an answer needs no K/V"
assert (report.seconds, report.recomputed) == (4.0, 0)

# %% [markdown]
# ## Load
#
# Now a server of 27,648 blocks, 256 rows and the constants above. First the sum. At a
# random moment a row holds more than the mean request, since the long ones stay (as in
# [the paper's Figure 2](L1_paper_figure_2)).

# %%
import sys

sys.path.insert(0, str(ROOT))
from benchmarks import simulate as lab

entries = [(e.input_length, e.output_length) for e in lab.generate(lab.CHAT, 20_000)]
prompt, output = np.array(entries).T
seen = np.average(prompt + output / 2, weights=output)
new = 256 * (1 + prompt.mean() / output.mean())
lens = np.full(256, seen)
step = cost.step_seconds(np.full(256, new / 256), lens)
print(f"a row holds {seen:.0f} tokens; a step runs {new:.0f},",
      f"prompts included, in {1e3 * step:.1f} ms")
print(f"the sum: {256 / step:,.0f} tokens/s, {256 / step / output.mean():.0f} requests/s")

# %% [markdown]
# :::{admonition} Predict
# :class: tip
# Arrivals rise from 20 to 100 requests/s. What happens to tokens a second beyond the sum, and
# what to *goodput*, the requests a second that were served as promised? We promise the first token
# within a second, and the others twenty a second.
# :::
#
# :::{dropdown} Reasoning
# Tokens a second stay: the rows are full. The queue grows as long as requests come, and soon everybody waits longer than promised. The server works as
# hard as ever and keeps its promise to few.
# :::

# %% tags=["hide-input"]
import matplotlib.pyplot as plt

from paged_kv.draw import book_style

for rate, row in load.items():
    print(f"{rate:3} requests/s: {row['tokens_per_s']:6,.0f} tokens/s,",
          f"as promised {row['goodput']:4.1f} a second, first token {row['first_token_p50']:5.2f}",
          f"and {row['first_token_p99']:5.2f} s (99 %),",
          f"{1e3 * row['per_token_p50']:4.1f} ms a token, {row['rows']:3.0f} rows")
book_style()
fig, (left, right) = plt.subplots(1, 2, figsize=(7.6, 3.2))
rates = list(load)
left.plot(rates, [row["requests_per_s"] for row in load.values()], "o-", label="served")
left.plot(rates, [row["goodput"] for row in load.values()], "s--", label="served as promised")
left.set(xlabel="arrivals, requests/s", ylabel="requests/s", ylim=(0, None))
left.legend()
for share, marker in (("p50", "o-"), ("p99", "s--")):
    right.plot(rates, [row[f"first_token_{share}"] for row in load.values()], marker, label=share)
right.axhline(1, color="#666666", linewidth=1)
right.set(xlabel="arrivals, requests/s", ylabel="time to first token, s", yscale="log")
right.legend()
plt.show()

# %% [markdown]
# *Figure: left, requests served a second and those served as promised, against arrivals; the two
# part at 75 requests/s. Right, time to first token, logarithmic: median and 99th percentile jump by
# more than an order of magnitude between 65 and 75 requests/s.*

# %% [markdown]
# The sum was right about where it breaks, and said nothing of how. At 65 requests/s the
# device is busy all the time and everybody is served at once. At 80 requests/s it sends out 10 %
# more tokens, and three users in four wait longer than promised. Nothing is full but the 256 rows:
# less than a quarter of the blocks is held.

# %% tags=["hide-input"]
for rate in (65, 80):
    row = load[rate]
    late = 1 - row["goodput"] / row["requests_per_s"]
    print(f"{rate} requests/s: busy {100 * row['busy']:.0f} %, blocks held",
          f"{100 * row['blocks_held']:.0f} %, served late {100 * late:.0f} %")
more = load[80]["tokens_per_s"] / load[65]["tokens_per_s"] - 1
print(f"from 65 to 80 requests/s: {100 * more:.0f} % more tokens; the sum said",
      f"{256 / step / output.mean():.0f}")

# %% [markdown]
# **Turn the knob.** Call `lab.run(lab.chat(80, 20), max_running=128)`; expect shorter steps, a longer
# queue and fewer tokens a second.

# %% [markdown]
# ## Traces
#
# A trace has what Poisson chats have not: prompts of ten thousand tokens, and conversations that come
# back with all that was said. The shapes are [fitted to published inputs](L4_eviction_and_radix); of
# the two real traces we take the first 1,200 and 3,000 requests that fit a row.
#
# :::{admonition} Predict
# :class: tip
# The Mooncake conversations {cite}`qin2025mooncake` bring 12,000 tokens a prompt at about 3 requests/s. The
# device runs 37,000 tokens/s. The cache has the blocks that the running rows leave. How much does it
# find, and does it matter?
# :::
#
# :::{dropdown} Reasoning
# 3 x 12,000 are 36,000 tokens/s for the prompts alone: the edge. There rows stay long, forty of them hold
# nearly the whole pool, and what is idle is soon overwritten: a few percent are found. But where arrivals
# and capacity are nearly equal, the queue is their *difference*, and a few percent of the load are a large
# part of that.
# :::

# %%
rate = cost.matmul_rate / cost.token_flops
print(f"the device runs {round(rate, -3):,.0f} tokens/s; 3 requests/s of 12,000 ask for",
      f"{3 * 12_000:,} tokens/s")
for row in result["rows"]:
    if row["experiment"] == "trace":
        name = f"{row['trace']}, {'cache' if row['caching'] else 'no cache'}"
        print(f"{name:24} {row['submitted']:5,} requests: first token",
              f"{row['first_token_p50']:6.2f} {row['first_token_p99']:6.2f} s,",
              f"hits {100 * row['hit_rate']:4.1f} %, blocks held",
              f"{100 * row['blocks_held']:4.1f} %, tax {100 * row['tax']:.1f} %")

# %% [markdown]
# Seven percent fewer tokens halve the median wait on the real trace. The made-up conversations wait
# less from the start, since their first turns come in slowly: a shape is a stand-in, not the trace.
# Azure's trace does not tell what is shared, so there is nothing to find.

# %% [markdown]
# ## A million requests
#
# What the simulator itself took, in time of one processor, and the memory of its process at the end:

# %%
print("measured: on", result["device"])
speeds = [row for row in result["rows"] if row["experiment"] == "speed"]
for row in speeds:
    print(f"measured: {row['requests']:9,} requests, {row['steps']:9,} steps",
          f"in {row['processor_s']:6,.0f} s: {row['simulated_requests_per_s']:,} a second;",
          f"process {row['peak_mib']} MiB")
most = speeds[-1]
print(f"measured: a million would take {1e6 / most['simulated_requests_per_s'] / 60:.0f} minutes")

# %% [markdown]
# Memory stays: whoever has ended is a count in a histogram. A test holds that. The time is the price of simulating the *same* code: a model of the scheduler would be
# quicker, and wrong in its own ways.

# %% [markdown]
# ## What a simulation does not show
#
# It shows queues, blocks and waits under a clock that we made up. The clock knows no kernel: a step over
# blocks of 1 costs no more than one over blocks of 128. A transfer to the host delays the step, where an
# engine may copy beside it, and of the scheduler's own time the clock knows only `overhead`. No answer
# ends early by its own will.

# %% [markdown]
# ## State card
#
# | | |
# |---|---|
# | `CostModel` | `weight_bytes`, `token_flops`, `pair_flops`, `kv_bytes`, rates, `overhead`; `measured` says which are |
# | `LogHistogram` | `counts` [num_buckets]; a quantile within `error` of the exact one |
# | `Report` | three histograms, sums; flat in the number of requests |
# | `Meter` | `last_at`, `reached` a row; `paused`, `due` a live request |
# | `simulate` | at its end submitted = refused + ended, and no block is held |
# | What breaks next | blocks run out, and somebody has to go: [victim economics](L7_victim_economics) |
#
# ## Real world
#
# vLLM and SGLang come with load generators that measure a real server (`vllm/benchmarks/serve.py`,
# `python/sglang/bench_serving.py`); vLLM's option `--goodput` counts as we do. Vidur
# {cite}`agrawal2024vidur` simulates a cluster with kernel times that were profiled and learned, and its
# own model of the scheduler; here the scheduler is real and the times are crude. TensorRT-LLM's
# `trtllm-bench` reports time to first token and between tokens
# (`tensorrt_llm/bench/dataclasses/reporting.py`).
#
# ## Exercises
#
# :::{exercise}
# :label: ex-L6-compute
# *Compute.* How many rows of 600 tokens does it take until reading K/V takes as long as reading the
# weights?
# :::
#
# :::{solution} ex-L6-compute
# :class: dropdown
# 16.06e9 / (600 x 131,072) = 204 rows.
# :::

# %% tags=["hide-input"]
rows = cost.weight_bytes / (600 * cost.kv_bytes)
print(f"{rows:.0f} rows")
assert round(rows) == 204

# %% [markdown]
# :::{exercise}
# :label: ex-L6-trace
# *Trace.* The three chats again, in a pool of 6 blocks. Who gets a token when, and what is
# computed twice?
# :::
#
# :::{solution} ex-L6-trace
# :class: dropdown
# In the third step C needs 3 blocks and finds 2 free, so it waits; with that step B ends.
# C's first token comes with the fourth step, its last at 5 s. Nothing is computed twice.
# :::

# %% tags=["hide-input"]
def serve_small(num_blocks):
    """The three chats in so many blocks, one second a step."""
    clock = Clock()
    manager = BlockManager(num_blocks, 4, max_seqs=3, max_seq_len=16)
    scheduler = Scheduler(manager, clock=clock, token_budget=16)
    return simulate(scheduler, clock, chats, a_second)


small = serve_small(6)
print(f"first tokens {small.first_token.total} s after arrival in all,",
      f"end at {small.seconds:.0f} s")
assert (small.first_token.total, small.seconds, small.recomputed) == (1 + 1 + 2.5, 5.0, 0)

# %% [markdown]
# :::{exercise}
# :label: ex-L6-break
# *Break.* A mean is no promise: make up the waits of two servers with the same mean, of which one keeps a promise of a second to 90 % of its users and the other to none.
# :::
#
# :::{solution} ex-L6-break
# :class: dropdown
# Nine waits of 0.1 s and one of 14.1 s have mean 1.5 s; so have ten of 1.5 s.
# :::

# %% tags=["hide-input"]
kept = []
for given in ([0.1] * 9 + [14.1], [1.5] * 10):
    counted = LogHistogram()
    counted.add(given)
    within = np.mean(np.array(given) <= 1)
    kept.append((round(counted.mean, 9), within))
    print(f"mean {counted.mean:.1f} s, median {counted.quantile(0.5):.1f} s, longest",
          f"{counted.maximum} s, kept to {100 * within:.0f} %")
assert kept == [(1.5, 0.9), (1.5, 0.0)]

# %% [markdown]
# :::{exercise}
# :label: ex-L6-implement
# *Implement.* Write `merged`, which makes one histogram of those of two servers.
# :::
#
# :::{solution} ex-L6-implement
# :class: dropdown
# Counts and totals add; the larger maximum stays. Quantiles could not be merged.
# :::

# %% tags=["hide-input"]
def merged(one, other):
    """One histogram of the numbers in both."""
    both = LogHistogram()
    both.counts = one.counts + other.counts
    both.total, both.maximum = one.total + other.total, max(one.maximum, other.maximum)
    return both


halves = LogHistogram(), LogHistogram()
halves[0].add(waits[:1000])
halves[1].add(waits[1000:])
assert merged(*halves).quantile(0.99) == histogram.quantile(0.99)
print(f"{merged(*halves).count:,} waits, 99 % below {histogram.quantile(0.99):.2f} s")

# %% [markdown]
# :::{exercise}
# :label: ex-L6-slo
# *Implement.* By bisection between rates of 40 and 80 a second, over ten seconds of arrivals, find to within
# ten the largest at which 99 % of the first tokens come within 0.1 s.
# :::
#
# :::{solution} ex-L6-slo
# :class: dropdown
# 70 a second. Ten seconds are short: in the minute of the section on load, 70 a second do not keep that
# promise.
# :::

# %% tags=["hide-input"]
low, high = 40, 80
while high - low > 10:
    middle = (low + high) // 2
    waited = lab.run(lab.chat(middle, 10)).first_token.quantile(0.99)
    low, high = (middle, high) if waited <= 0.1 else (low, middle)
    print(f"{middle} a second: 99 % within {waited:.2f} s; wanted 0.1 s")
assert (low, high) == (70, 80) and load[70]["first_token_p99"] > 0.1

# %% [markdown]
# ## Further reading
#
# - Little's law and queues at the edge: Harchol-Balter, *Performance Modeling and Design of Computer
#   Systems*, parts I and II.
# - DDSketch {cite}`masson2019ddsketch`: quantiles with relative error, and how to merge them.
# - DistServe {cite}`zhong2024distserve`, which made goodput the goal; Sarathi-Serve
#   {cite}`agrawal2024sarathi`, on chunks and the tail of the gaps.
