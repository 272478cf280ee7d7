# Exported from book/13_engine.py by tools/export.py; edit the chapter, not this file.
"""Who runs a plan on the device: the plain way, one launch after another."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from paged_kv.attend import KernelAttention
from paged_kv.hf_adapter import PagedModel
from paged_kv.host_pool import run_moves
from paged_kv.kv_store import KVStore
from paged_kv.packed_products import PackedProducts
from paged_kv.step_plan import StepPlan
from paged_kv.step_upload import DeviceStep, StepUpload, with_late_tokens


class Runner(Protocol):
    """Runs plans on a device.  `counts`: steps by how they ran, such as "eager" or "graph"."""

    counts: Counter[str]

    def forward(self, plan: StepPlan, sampled: Tensor) -> tuple[Tensor, DeviceStep]:
        """Take in the news, run moves and tokens; `sampled`: those of the previous plan.

        Returns: logits [S, vocab_size], one a sample; and the step as it was loaded.
        """
        ...


@dataclass(frozen=True)
class Room:
    """How large steps may become: tokens, sequences; and the shape of the block tables."""

    max_tokens: int
    max_seqs: int
    table_shape: tuple[int, int]


MakeRunner = Callable[[PagedModel, KVStore, Room], Runner]


def logits_of_samples(logits: Tensor, step: DeviceStep, plan: StepPlan) -> Tensor:
    """One row a sample, from one row a sequence of the batch."""
    if plan.sample_rows is plan.rows:
        return logits[: len(plan.rows)]
    return logits.index_select(0, step.sample_at)


class EagerRunner:
    """The plain Runner: any step, at the pace at which the CPU can launch it.

    Args: `packed`, whether a model on a CPU runs from packed copies of its weights.
    State: `guest`; `host`, the store that swapped blocks go to; `upload`; `products`.
    """

    def __init__(
        self, guest: PagedModel, host: KVStore, room: Room, *, packed: bool = True
    ) -> None:
        self.guest, self.host = guest, host
        self.products = PackedProducts(guest.model) if packed else None
        device = guest.model.device
        self.upload = StepUpload(room.max_tokens, room.max_seqs, room.table_shape, device)
        self.counts: Counter[str] = Counter()

    def forward(self, plan: StepPlan, sampled: Tensor) -> tuple[Tensor, DeviceStep]:
        """As `Runner` says."""
        step = self.upload.load(plan)
        if plan.moves:
            run_moves(plan.moves, self.guest.store, self.host)
        attention = self.guest.attention
        batch = with_late_tokens(step, sampled)
        if isinstance(attention, KernelAttention):
            attention.begin(batch, step.shape.decodes)
        self.counts["eager"] += 1
        with nullcontext() if self.products is None else self.products.on():
            logits = self.guest.forward(batch)
        return logits_of_samples(logits, step, plan), step
