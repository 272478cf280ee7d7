# Exported from book/13_engine.py by tools/export.py; edit the chapter, not this file.
"""A step on its way to the device: one buffer, one copy, and tables that stay there."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged_kv.packed_batch import PackedBatch
from paged_kv.step_plan import StepPlan


@dataclass(frozen=True)
class StepShape:
    """Room for a step: `decodes` sequences of one token, then `chunks` sequences of `tokens`."""

    decodes: int
    chunks: int
    tokens: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole step."""
        return self.decodes + self.tokens

    @property
    def num_seqs(self) -> int:
        """Sequences of the whole step."""
        return self.decodes + self.chunks


def shape_of(plan: StepPlan) -> StepShape:
    """The exact shape of a plan; a sequence of one token behind a longer one counts as a chunk."""
    longer = plan.new_tokens > 1
    decodes = int(longer.argmax()) if longer.any() else len(longer)
    return StepShape(decodes, len(plan.rows) - decodes, plan.num_tokens - decodes)


@dataclass(frozen=True)
class DeviceStep:
    """A step as it lies on the device, valid until the next but one is loaded.

    Fields
        shape        of it; where it is larger than the plan, the rest is padding.
        batch        PackedBatch, with token 0 where the previous plan samples it.
        source       int64 [num_tokens]: which sample of the previous plan that is, or -1.
        sample_at    int64 [S]: the sequence of the batch that each sample is drawn from.
        sample_rows  int64 [S];  positions int64 [S]: a sample's row, its place in the sequence.
    """

    shape: StepShape
    batch: PackedBatch
    source: Tensor
    sample_at: Tensor
    sample_rows: Tensor
    positions: Tensor


def with_late_tokens(step: DeviceStep, sampled: Tensor) -> PackedBatch:
    """The batch, with the tokens that the previous plan sampled; the host never sees them.

    Args: `sampled`, int64: the samples of the previous plan, in its order.
    """
    late = sampled[step.source.clamp(min=0)]
    ids = torch.where(step.source >= 0, late, step.batch.input_ids)
    return replace(step.batch, input_ids=ids)


class StepUpload:
    """Brings plans to the device, each by one copy, and keeps the block tables there.

    Args: `max_tokens`, `max_seqs` of a step, padding included; `table_shape`, of the tables.
    State
        table  int32 [max_seqs, max_blocks] on the device, changed in place by each plan's news.
        hosts  two buffers, int64, pinned for a GPU: one is filled while the other travels.
        data   int64, where they arrive.  The fields of a shape always lie at the same places.
    """

    def __init__(
        self, max_tokens: int, max_seqs: int, table_shape: tuple[int, int], device: Any
    ) -> None:
        self.device = torch.empty(0, device=device).device
        self.on_gpu = self.device.type == "cuda"
        words = 6 * max_tokens + 16 * max(max_seqs, table_shape[0])
        self.hosts = [torch.zeros(words, dtype=torch.int64, pin_memory=self.on_gpu) for _ in "ab"]
        self.data = self.hosts[0].to(self.device)
        self.table = torch.full(table_shape, -1, dtype=torch.int32, device=self.device)
        self.turn = 0

    def load(self, plan: StepPlan, shape: StepShape | None = None) -> DeviceStep:
        """Take in the news of `plan` and bring what it runs, in a shape at least as large.

        Never waits for the device, unless the news are longer than a buffer.
        """
        shape, self.turn = shape or shape_of(plan), self.turn ^ 1
        host, places = self.hosts[self.turn], field_places(shape, len(plan.sample_rows))
        fill({name: host[at].numpy() for name, at in places.items()}, plan, shape)
        rows, columns, ids = plan.news.table_updates
        news = np.concatenate([rows * self.table.shape[1] + columns, ids])
        start = places["positions_of_samples"].stop
        fits = start + len(news) <= len(host)
        end = start + len(news) * fits
        if fits:
            host[start:end].numpy()[:] = news
        if self.on_gpu:
            self.data[:end].copy_(host[:end], non_blocking=True)
        else:
            self.data = host
        if len(news):
            arrived = self.data[start:end] if fits else torch.from_numpy(news).to(self.device)
            cells, blocks = arrived.view(2, -1)
            self.table.view(-1).index_copy_(0, cells, blocks.int())
        return self.view(shape, places)

    def view(self, shape: StepShape, places: dict[str, slice]) -> DeviceStep:
        """The fields of a step, as they lie on the device."""
        part = {name: self.data[at] for name, at in places.items()}
        cu = part["cu_seqlens"].view(torch.int32)[: shape.num_seqs + 1]
        lens = part["seq_lens"].view(torch.int32)[: shape.num_seqs]
        batch = PackedBatch(
            part["token_ids"], part["positions"], part["slots"], self.table,
            part["rows"], cu, lens, part["logits_at"],
        )  # fmt: skip
        samples = part["sample_at"], part["sample_rows"], part["positions_of_samples"]
        return DeviceStep(shape, batch, part["source"], *samples)


def field_places(shape: StepShape, num_samples: int) -> dict[str, slice]:
    """Where in the buffer each field lies, in words; those of samples come last, for they vary."""
    tokens, seqs = shape.num_tokens, shape.num_seqs
    sizes = dict.fromkeys(("token_ids", "positions", "slots", "source"), tokens)
    sizes |= {"rows": seqs, "logits_at": seqs, "cu_seqlens": seqs // 2 + 1}
    sizes |= {"seq_lens": (seqs + 1) // 2}
    sizes |= dict.fromkeys(("sample_at", "sample_rows", "positions_of_samples"), num_samples)
    ends = np.cumsum(list(sizes.values())).tolist()
    return {name: slice(end - n, end) for (name, n), end in zip(sizes.items(), ends, strict=True)}


def lay_out(values: NDArray[Any], real: int, room: int, out: NDArray[Any], pad: int) -> None:
    """Write `values` to `out`: the first `real` in front, the rest from `room` on, else `pad`."""
    end = room + len(values) - real
    out[:real], out[real:room] = values[:real], pad
    out[room:end], out[end:] = values[real:], pad


def fill(out: dict[str, NDArray[Any]], plan: StepPlan, shape: StepShape) -> None:
    """Write the fields of `plan`.

    Padding is tokens without a slot in sequences that hold nothing: a padded decode owns one,
    the first padded chunk all that lie behind the last real one.
    """
    real, room, last = shape_of(plan).decodes, shape.decodes, plan.cu_seqlens[1:] - 1
    source = np.full(plan.num_tokens, -1)
    source[last] = plan.token_source
    for name, values, pad in (
        ("token_ids", np.maximum(plan.token_ids, 0), 0), ("positions", plan.positions, 0),
        ("slots", plan.slot_mapping, -1), ("source", source, -1), ("rows", plan.rows, 0),
        ("logits_at", last, 0),
    ):  # fmt: skip
        lay_out(values, real, room, out[name], pad)
    out["logits_at"][room : room + len(plan.rows) - real] += room - real
    lay_out(plan.seq_lens, real, room, out["seq_lens"].view(np.int32)[: shape.num_seqs], 0)
    cu = out["cu_seqlens"].view(np.int32)[: shape.num_seqs + 1]
    cu[: room + 1] = np.arange(room + 1)
    lay_out(plan.cu_seqlens[real + 1 :] + room - real, 0, 0, cu[room + 1 :], 0)
    cu[room + 1 + len(plan.rows) - real :] = shape.num_tokens
    out["sample_at"][:] = plan.sample_logits + (plan.sample_logits >= real) * (room - real)
    out["sample_rows"][:] = plan.sample_rows
    out["positions_of_samples"][:] = plan.seq_lens[plan.sample_logits]
