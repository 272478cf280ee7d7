"""Where the time of a decode step goes: the host's parts by the clock, the device's by events, its kernels by kind."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from paged_kv.engine import Engine

KINDS = {
    "matrix products": ("nvjet", "gemm", "cutlass", "splitK"),
    "attention": ("decode_kernel", "prefill_kernel", "plan_kernel", "tile_kernel", "merge_kernel"),
    "K/V writes": ("write_kernel",),
    "norms, rotation, activation": (
        "triton_",
        "elementwise",
        "CatArray",
        "reduce_kernel<512, 1, at::native::ReduceOp<float",
    ),
}


class Watch:
    """Notes when each part of a step begins and ends, on the host and on the device."""

    def __init__(self, engine: Engine) -> None:
        self.spans: list[tuple[str, float, float]] = []
        self.events: list[tuple[Any, Any]] = []
        chooser, scheduler = engine.desk.chooser, engine.scheduler
        runner: Any = getattr(engine.runner, "inner", engine.runner)
        self.wrap(scheduler, "schedule", "schedule")
        self.wrap(runner.upload, "load", "upload")
        self.wrap(runner, "forward", "launch")
        self.wrap(chooser, "choose", "choose")
        self.wrap(scheduler, "commit", "commit")
        torch.cuda.synchronize()
        self.base = torch.cuda.Event(enable_timing=True)
        self.base.record()
        torch.cuda.synchronize()
        self.zero = time.perf_counter()

    def wrap(self, owner: Any, method: str, name: str) -> None:
        """Time every call of `owner.method`."""
        inner = getattr(owner, method)

        def timed(*given: Any, **options: Any) -> Any:
            if name == "launch":
                self.events.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
                self.events[-1][0].record()
            start = time.perf_counter()
            found = inner(*given, **options)
            self.spans.append((name, start, time.perf_counter()))
            if name == "choose":
                self.events[-1][1].record()
            return found

        setattr(owner, method, timed)

    def device(self) -> list[tuple[float, float]]:
        """Milliseconds, since the base, at which the device began and ended each step."""
        torch.cuda.synchronize()
        return [(self.base.elapsed_time(a), self.base.elapsed_time(b)) for a, b in self.events]


def steady(engine: Engine, batch: int, vocab: int) -> None:
    """Bring `batch` sequences of 300 tokens to where all of them decode."""
    ids = np.random.default_rng(3)
    for _ in range(batch):
        engine.add_request(ids.integers(0, vocab, 300).tolist(), 400, stop_tokens=())
    while engine.scheduler.last is None or engine.scheduler.last.plan.num_tokens != batch:
        engine.step()
    for _ in range(10):
        engine.step()


def by_kind(engine: Engine, steps: int = 5) -> dict[str, float]:
    """Milliseconds of device time a step, by kind of kernel."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    total: dict[str, float] = defaultdict(float)
    for entry in seen.key_averages():
        kind = next(
            (kind for kind, marks in KINDS.items() if any(mark in entry.key for mark in marks)), "sampling and copies"
        )
        total[kind] += entry.self_device_time_total / 1e3 / steps
    return {kind: round(ms, 4) for kind, ms in total.items()}


def anatomy(engine: Engine, vocab: int, batch: int = 256, steps: int = 40) -> list[dict[str, Any]]:
    """One row for each of: planned behind the device, planned a step ahead."""
    rows = []
    steady(engine, batch, vocab)
    kinds = by_kind(engine)
    watch = Watch(engine)
    for depth in (1, 2):
        while len(engine.pending) >= depth:  # what is in flight comes in first
            engine.depth = 0
            engine.step()
        engine.depth = depth
        for _ in range(5):
            engine.step()
        watch.spans.clear()
        watch.events.clear()
        start = time.perf_counter()
        for _ in range(steps):
            engine.step()
        period = (time.perf_counter() - start) / steps * 1e3
        rows.append(row_of(watch, depth == 2, batch, period) | {"kernels_ms": kinds})
    for name in list(engine.desk.jobs):
        engine.abort(name)
    while not engine.idle:
        engine.step()
    return rows


def row_of(watch: Watch, ahead: bool, batch: int, period: float) -> dict[str, Any]:
    """Medians of the parts, and five steps drawn out; all in milliseconds."""
    device = watch.device()
    times: dict[str, list[float]] = defaultdict(list)
    for name, begin, end in watch.spans:
        times[name].append((end - begin) * 1e3)
    first = device[5][0] - period
    spans = [(n, round((a - watch.zero) * 1e3, 4), round((b - watch.zero) * 1e3, 4)) for n, a, b in watch.spans]
    return {
        "engine": "anatomy",
        "ahead": ahead,
        "batch": batch,
        "step_ms": round(period, 3),
        "device_ms": round(statistics.median(b - a for a, b in device), 3),
        "host_ms": {name: round(statistics.median(each), 4) for name, each in times.items()},
        "host_spans": [span for span in spans if first <= span[1] <= first + 5 * period],
        "device_spans": [(round(a, 4), round(b, 4)) for a, b in device[4:10]],
    }
