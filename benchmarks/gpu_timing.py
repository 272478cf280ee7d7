"""What the benchmarks of kernels share: random paged batches, graphs, timing with a flushed cache, a ceiling.

A time is the median over CUDA-graph replays between two events, all contestants of a case taking turns in random order,
the L2 cache overwritten before each.  The ceiling is a plain sum over the same number of bytes in the same harness.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paged_kv.triton_device import jit, tl, triton

Step = Callable[[], Any]


@jit
def read_kernel(data, out, n, SIZE: tl.constexpr, STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum n integers: the ceiling of everything that reads so many bytes once."""
    at = tl.program_id(0).to(tl.int64) * (SIZE * STEPS) + tl.arange(0, SIZE)
    acc = tl.zeros([SIZE], tl.int32)
    for i in tl.static_range(STEPS):
        acc += tl.load(data + at + i * SIZE, mask=at + i * SIZE < n, other=0)
    tl.store(out + tl.program_id(0), tl.sum(acc, 0))


def read_step(size: int) -> Step:
    """A function that reads `size` bytes."""
    n, steps = size // 4, 2 if size > 200e6 else 1
    data = torch.ones(n, dtype=torch.int32, device="cuda")
    out = torch.empty(triton.cdiv(n, 8192) + 1, dtype=torch.int32, device="cuda")
    grid = (triton.cdiv(n, 8192 * steps),)
    return lambda: read_kernel[grid](data, out, n, SIZE=8192, STEPS=steps, num_warps=8)


@dataclass(frozen=True)
class Batch:
    """A paged batch in GPU memory, its block table a random permutation (or in order)."""

    query: Tensor
    pool: Tensor
    table: Tensor
    lens: Tensor

    @property
    def keys(self) -> Tensor:
        """[num_blocks, block_size, num_kv_heads, head_size]."""
        return self.pool[:, 0]

    @property
    def values(self) -> Tensor:
        """[num_blocks, block_size, num_kv_heads, head_size]."""
        return self.pool[:, 1]

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Query, keys, values, table and lengths."""
        return self.query, self.keys, self.values, self.table, self.lens


def paged_batch(
    lens: Sequence[int], heads: int, kv_heads: int, size: int, block: int, in_order: bool = False, queries: int = 0
) -> Batch:
    """Random bf16 keys and values; `queries` packed query tokens, one a sequence if 0."""
    gen = torch.Generator("cuda").manual_seed(0)
    need = [-(-n // block) for n in lens]
    total = sum(need)
    pool = torch.empty(total, 2, block, kv_heads, size, dtype=torch.bfloat16, device="cuda").normal_(generator=gen)
    ids = torch.arange(total, device="cuda") if in_order else torch.randperm(total, generator=gen, device="cuda")
    width = -(-max(need) // 16) * 16
    table = torch.full((len(lens), width), -1, dtype=torch.int32, device="cuda")
    table[torch.arange(width, device="cuda")[None] < torch.tensor(need, device="cuda")[:, None]] = ids.int()
    query = torch.randn(queries or len(lens), heads, size, generator=gen, device="cuda").bfloat16()
    return Batch(query, pool, table, torch.tensor(lens, dtype=torch.int32, device="cuda"))


def exact_decode(batch: Batch) -> dict[int, Tensor]:
    """Float64 attention of a few of the sequences."""
    count, block, kv_heads, size = len(batch.lens), *batch.pool.shape[2:]
    found = {}
    for s in sorted({0, min(1, count - 1), count // 2, count - 1}):
        n = int(batch.lens[s])
        ids = batch.table[s, : -(-n // block)].long()
        k, v = (batch.pool[ids, i].reshape(-1, kv_heads, size)[:n].double() for i in (0, 1))
        q = batch.query[s].double().view(kv_heads, -1, size)
        weights = (torch.einsum("hgd,thd->hgt", q, k) * size**-0.5).softmax(-1)
        found[s] = torch.einsum("hgt,thd->hgd", weights, v).reshape(-1, size)
    return found


def relative_error(output: Tensor, exact: dict[int, Tensor]) -> float:
    """The largest over the sequences; NaN where an element of the output was not written."""
    if not torch.isfinite(output).all():
        return float("nan")
    return max(float((output[s].double() - right).norm() / right.norm()) for s, right in exact.items())


@dataclass(frozen=True)
class Replay:
    """A captured call; it keeps the step, whose tensors the graph uses but does not own."""

    graph: torch.cuda.CUDAGraph
    step: Step
    output: Any

    def __call__(self) -> None:
        """Replay it."""
        self.graph.replay()


def graph_of(step: Step) -> Replay:
    """Capture one call, after two on a side stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step()
    return Replay(graph, step, output)


def time_steps(steps: dict[str, Step], repeats: int) -> dict[str, float]:
    """Median microseconds of each, in turns, the order shuffled each round, the L2 flushed before each."""
    flush, rng = read_step(512 << 20), random.Random(1)
    names = list(steps)
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in names}
    for round_ in range(repeats + 2):
        rng.shuffle(names)
        for name in names:
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush()
            start.record()
            steps[name]()
            stop.record()
            if round_ >= 2:
                events[name].append((start, stop))
        if round_ % 8 == 7:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    return {n: 1e3 * statistics.median(a.elapsed_time(b) for a, b in pairs) for n, pairs in events.items()}


def warm_in_parallel(arguments: Sequence[str], processes: int) -> None:
    """Let several processes compile each a share of the kernels: `--warm I/N` is added to the arguments."""
    shares = [[sys.executable, *arguments, "--warm", f"{i}/{processes}"] for i in range(processes)]
    running = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for command in shares]
    for process in running:
        process.wait()


def show(row: dict[str, Any]) -> None:
    """One line of JSON, at once."""
    print(json.dumps(row), flush=True)


def processes() -> int:
    """How many compilers to run at once."""
    return max(1, min(12, (os.cpu_count() or 2) - 2))
