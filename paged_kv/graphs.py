# Exported from book/14_at_full_speed.py by tools/export.py; edit the chapter, not this file.
"""Steps as CUDA graphs: recorded once for each size, then launched by one call."""

from collections import Counter
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from paged_kv.attend import KernelAttention
from paged_kv.fast_moves import FastMoves
from paged_kv.fused_layers import FusedLayers
from paged_kv.hf_adapter import PagedModel
from paged_kv.kv_store import KVStore
from paged_kv.runner import Room, logits_of_samples
from paged_kv.step_plan import StepPlan
from paged_kv.step_sizes import StepSizes, usual_sizes
from paged_kv.step_upload import (
    DeviceStep,
    StepShape,
    StepUpload,
    field_places,
    shape_of,
    with_late_tokens,
)


def programs_compiled() -> int:
    """How many programs torch.compile has made in this process."""
    return int(counters["stats"]["unique_graphs"])


class GraphRunner:
    """A Runner that replays a captured graph wherever the step fits one.

    Args: `sizes`, `usual_sizes` if None; `fuse`: whether `FusedLayers` are tried, on a GPU if
    None; `lazy`: capture at first use, not now.
    State
        graphs   {shape: (graph, logits)}.   failed: why capture is not possible, or None.
        sampled  int64, where a recording finds the tokens of the step before.
        counts   steps by how they ran: "graph"; "eager"; "recompiled", eager and with a pause
                 for torch.compile; "padded", on a CPU.
    """

    def __init__(
        self, guest: PagedModel, host: KVStore, room: Room, *,
        sizes: StepSizes | None = None, fuse: bool | None = None, lazy: bool = False,
    ) -> None:  # fmt: skip
        self.guest, self.moves = guest, FastMoves(guest.store, host)
        self.attention, self.sizes = guest.attention, sizes or usual_sizes(room)
        device = guest.model.device
        self.on_gpu = device.type == "cuda"
        tokens = max([room.max_tokens, *(shape.num_tokens for shape in self.sizes)])
        seqs = max([room.max_seqs, *(shape.num_seqs for shape in self.sizes)])
        self.upload = StepUpload(tokens, seqs, room.table_shape, device)
        self.sampled = torch.zeros(seqs, dtype=torch.int64, device=device)
        self.counts: Counter[str] = Counter()
        self.graphs: dict[StepShape, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.failed: str | None = None
        self.pool: Any = torch.cuda.graph_pool_handle() if self.on_gpu else None
        fuse = self.on_gpu if fuse is None else fuse
        self.fused = FusedLayers(guest) if fuse else None
        if self.on_gpu and not lazy:
            self.capture_all(room)

    def forward(self, plan: StepPlan, sampled: Tensor) -> tuple[Tensor, DeviceStep]:
        """As `Runner` says."""
        shape = None if self.failed else self.sizes.fit(shape_of(plan))
        step = self.upload.load(plan, shape)
        if plan.moves:
            self.moves(plan.moves)
        self.sampled[: len(sampled)].copy_(sampled)
        if shape is None or not self.on_gpu or not self.has_graph(step):
            before = programs_compiled()
            logits = self.run(step, self.sampled)
            kind = "eager" if shape is None or self.on_gpu else "padded"
            self.counts["recompiled" if programs_compiled() > before else kind] += 1
        else:
            graph, logits = self.graphs[shape]
            graph.replay()
            self.counts["graph"] += 1
        return logits_of_samples(logits, step, plan), step

    def has_graph(self, step: DeviceStep) -> bool:
        """Whether the shape of `step` is captured, if need be now."""
        return step.shape in self.graphs or self.capture(step)

    def run(self, step: DeviceStep, sampled: Tensor) -> Tensor:
        """One forward pass, launch by launch; logits, a row for each sequence of the shape."""
        batch = with_late_tokens(step, sampled)
        if isinstance(self.attention, KernelAttention):
            self.attention.begin(batch, step.shape.decodes)
        with nullcontext() if self.fused is None else self.fused.on():
            return self.guest.forward(batch)

    def capture_all(self, room: Room) -> None:
        """Run eager steps of some sizes, so that kernels are compiled; then capture every size.

        All of these steps are padding and nothing else.
        """
        counts = [2**i for i in range(min(room.max_seqs, room.max_tokens, 64).bit_length())]
        with torch.inference_mode():
            for chunks in counts:
                shape = StepShape(min(1, room.max_tokens - chunks), chunks, room.max_tokens - 1)
                self.run(idle_step(self.upload, shape), self.sampled)
        for shape in self.sizes:
            if self.failed is None:
                self.capture(idle_step(self.upload, shape))

    def capture(self, step: DeviceStep) -> bool:
        """Record one size; False, with the reason in `failed`, where the model cannot be recorded.

        The step runs once before, so that kernels are compiled: it may, its slots get the same
        bytes again.
        """
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.inference_mode():
                with torch.cuda.stream(stream):
                    self.run(step, self.sampled)
                torch.cuda.current_stream().wait_stream(stream)
                with torch.cuda.graph(graph, pool=self.pool):
                    logits = self.run(step, self.sampled)
        except RuntimeError as error:
            self.failed = f"{type(error).__name__}: {error}".splitlines()[0]
            return False
        self.graphs[step.shape] = graph, logits
        return True


def idle_step(upload: StepUpload, shape: StepShape) -> DeviceStep:
    """A step of nothing but padding, written to where the fields of `shape` lie."""
    step = upload.view(shape, field_places(shape, 0))
    batch = step.batch
    for field in (batch.input_ids, batch.positions, batch.rows, batch.logits_at, batch.seq_lens):
        field.zero_()
    batch.slot_mapping.fill_(-1)
    step.source.fill_(-1)
    batch.cu_seqlens.copy_(torch.arange(shape.num_seqs + 1, device=upload.device))
    batch.cu_seqlens[shape.decodes + 1 :] = shape.num_tokens
    return step
