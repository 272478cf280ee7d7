# Exported from book/appendices/A6_serving_commands.py by tools/export.py; edit the chapter, not this file.
"""A load on an engine, in real time, and what it came to."""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from paged_kv.answers import Answer, Delta
from paged_kv.bench_load import BenchLoad
from paged_kv.engine import Engine
from paged_kv.metrics import SLO, LogHistogram

NAP = 0.02  # s; longer naps would make a live view stutter


@dataclass
class Stopwatch:
    """The times of one request on the bench's clock: when it was due, first and last token."""

    due: float
    letter: str
    first: float = math.nan
    last: float = math.nan
    tokens: int = 0


@dataclass
class BenchTotals:
    """Histograms in s; integrals over time of blocks held, slots filled and requests running."""

    first_token: LogHistogram = field(default_factory=LogHistogram)
    per_token: LogHistogram = field(default_factory=LogHistogram)
    gaps: LogHistogram = field(default_factory=LogHistogram)
    reasons: Counter[str] = field(default_factory=Counter)
    good: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    held: float = 0.0
    filled: float = 0.0
    running: float = 0.0
    stepping: float = 0.0


class Bench:
    """Drives an engine with a load, one step after another.

    Args: `slo`, what counts as good; `seconds`, when to stop whatever is left; `clock`, `sleep`.
    State
        next      index of the first request that was not submitted.
        watches   {request id: Stopwatch}, of those under way.
        totals    BenchTotals;  stats: the engine's, after the last step.
        recent    (time, tokens made) of the last seconds;  newest: the last answer.
        first_refusal   why a request was refused, the first time.
    """

    def __init__(
        self,
        engine: Engine,
        load: BenchLoad,
        slo: SLO = SLO(),
        seconds: float = math.inf,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.engine, self.load, self.slo, self.seconds = engine, load, slo, seconds
        self.clock, self.sleep = clock, sleep
        self.next, self.watches, self.totals = 0, dict[Hashable, Stopwatch](), BenchTotals()
        self.stats = engine.stats
        self.before = self.stats
        self.recent: deque[tuple[float, int]] = deque()
        self.newest: Answer | None = None
        self.first_refusal = ""
        self.started = self.now = clock()

    @property
    def done(self) -> bool:
        """Whether every request has ended, or the time is up."""
        over = self.now - self.started >= self.seconds
        return over or (self.next == len(self.load.requests) and not self.watches)

    def submit_due(self) -> None:
        """Hand over the requests whose time has come, or for whom a user is free."""
        requests, at_once = self.load.requests, self.load.at_once
        while self.next < len(requests) and (at_once is None or len(self.watches) < at_once):
            asked = requests[self.next]
            due = self.started + asked.due if at_once is None else self.now
            if due > self.now:
                break
            self.next += 1
            stops = None if self.load.ends else ()
            try:
                ids = asked.prompt.tolist()
                name = self.engine.add_request(ids, asked.new_tokens, stop_tokens=stops)
            except ValueError as error:
                self.totals.refused += 1
                self.first_refusal = self.first_refusal or str(error)
                continue
            self.totals.prompt_tokens += len(asked.prompt)
            self.watches[name] = Stopwatch(due, chr(65 + (self.next - 1) % 26))

    def step(self) -> list[Delta]:
        """Submit what is due, then one step of the engine; a nap where there is nothing to do."""
        self.now = self.clock()
        self.submit_due()
        if self.engine.idle:
            if self.next < len(self.load.requests):
                due = self.started + self.load.requests[self.next].due
                self.sleep(min(NAP, max(0.0, due - self.now)))
            self.now = self.clock()
            return []
        pieces = self.engine.step()
        before, self.now = self.now, self.clock()
        note_step(self, self.now - before)
        for piece in pieces:
            if piece.request_id in self.watches:
                note_piece(self, self.watches[piece.request_id], piece)
        return pieces

    def stop(self) -> None:
        """End what is under way, with what it has."""
        for name in list(self.watches):
            self.engine.abort(name)
            self.totals.reasons["aborted"] += 1
        self.watches.clear()
        while not self.engine.idle:
            self.engine.step()


def note_step(bench: Bench, seconds: float) -> None:
    """Take in a step that took so long."""
    totals, stats = bench.totals, bench.engine.stats
    bench.stats = stats
    totals.held += seconds * stats.blocks_used / stats.blocks
    totals.filled += seconds * stats.slots_filled
    totals.running += seconds * stats.running
    totals.stepping += seconds
    bench.recent.append((bench.now, stats.tokens_made))
    while bench.now - bench.recent[0][0] > 3 and len(bench.recent) > 2:
        bench.recent.popleft()


def note_piece(bench: Bench, watch: Stopwatch, piece: Delta) -> None:
    """Take in what a step brought to one request."""
    totals, now = bench.totals, bench.now
    if piece.token_ids:
        if watch.tokens:
            totals.gaps.add(now - watch.last)
        else:
            watch.first = now
            totals.first_token.add(now - watch.due)
        watch.last, watch.tokens = now, watch.tokens + len(piece.token_ids)
    if piece.answer is None:
        return
    del bench.watches[piece.request_id]
    bench.newest = piece.answer
    reason = piece.answer.texts[0].finish_reason
    totals.reasons[reason] += 1
    if reason in ("length", "stop"):
        each = (watch.last - watch.first) / max(1, watch.tokens - 1)
        if watch.tokens > 1:
            totals.per_token.add(each)
        quick = watch.first - watch.due <= bench.slo.first_token
        totals.good += quick and each <= bench.slo.per_token


def tokens_per_s(bench: Bench) -> float:
    """Tokens a second over the last seconds."""
    if len(bench.recent) < 2:
        return 0.0
    (start, before), (end, after) = bench.recent[0], bench.recent[-1]
    return (after - before) / max(end - start, 1e-9)


def quantiles(times: LogHistogram) -> dict[str, float | None]:
    """Mean, p50, p90, p99 and maximum in s; None where nothing was counted."""
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    found = {"mean": times.mean} | {name: times.quantile(s) for name, s in shares.items()}
    found["max"] = times.maximum
    return {name: round(t, 6) if times.count else None for name, t in found.items()}


def bench_report(bench: Bench) -> dict[str, Any]:
    """What a run came to: counts, tokens, times in s, shares from 0 to 1."""
    totals, stats, before = bench.totals, bench.stats, bench.before
    seconds = max(bench.now - bench.started, 1e-9)
    made, ended = stats.tokens_made - before.tokens_made, totals.reasons
    finished, stepping = ended["length"] + ended["stop"], max(totals.stepping, 1e-9)
    queried = stats.queried_tokens - before.queried_tokens
    return {
        "submitted": bench.next, "finished": finished, "refused": totals.refused,
        "reasons": dict(ended), "seconds": round(seconds, 3),
        "prompt_tokens": totals.prompt_tokens, "output_tokens": made,
        "tokens_run": stats.tokens_run - before.tokens_run,
        "tokens_per_s": round(made / seconds, 2), "requests_per_s": round(finished / seconds, 3),
        "goodput_per_s": round(totals.good / seconds, 3),
        "slo": {"ttft_s": bench.slo.first_token, "tpot_s": bench.slo.per_token},
        "ttft_s": quantiles(totals.first_token), "tpot_s": quantiles(totals.per_token),
        "gap_s": quantiles(totals.gaps),
        "hit_rate": round((stats.hit_tokens - before.hit_tokens) / max(queried, 1), 4),
        "blocks": stats.blocks, "blocks_held": round(totals.held / stepping, 4),
        "slots_filled": round(totals.filled / stepping, 4),
        "mean_running": round(totals.running / stepping, 2),
        "preemptions": counts_since(before.preemptions, stats.preemptions),
        "steps": stats.steps - before.steps,
        "step_kinds": counts_since(before.step_kinds, stats.step_kinds),
    }  # fmt: skip


def counts_since(before: dict[str, int], now: dict[str, int]) -> dict[str, int]:
    """How often each happened from then to now."""
    return {kind: count - before.get(kind, 0) for kind, count in now.items()}
