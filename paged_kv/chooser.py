# Exported from book/13_engine.py by tools/export.py; edit the chapter, not this file.
"""From logits to tokens: chosen on the device, read by the host when it needs them."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged_kv.answers import Job
from paged_kv.device_sampling import DeviceSampler, Sampled
from paged_kv.request import Ints
from paged_kv.row_state import RowState
from paged_kv.step_plan import StepPlan
from paged_kv.step_upload import DeviceStep


@dataclass
class Pending:
    """A launched step whose tokens the host has not read.

    State: `plan`; `owners`, (job, sample index) of each sample; `host`, the tokens on their way
    to pinned memory; `ready`, None on a CPU; `drawn`, all that was chosen; `beams`, {request id:
    log-probabilities of its beams}.
    """

    plan: StepPlan
    owners: list[tuple[Job, int]]
    host: Tensor
    ready: Any
    drawn: Sampled
    beams: dict[Hashable, Tensor]

    def read(self) -> Ints:
        """The tokens, int64 [S], -1 for logits that are no numbers; waits for the step."""
        if self.ready is not None:
            self.ready.synchronize()
        return self.host.numpy()[: len(self.plan.sample_rows)].copy()


def choose_beams(pending: Pending, tokens: Ints, alive: NDArray[np.bool_]) -> Ints:
    """Let each beam search of a step choose: writes its tokens, returns the parents, int64 [S].

    Args: `alive`, bool [S]: samples whose rows still have the tenant that they were drawn for.
    A search that was put aside or has ended does not choose.
    """
    parents = np.zeros(len(tokens), np.int64)
    for name, places in pending.plan.beams:
        search = pending.owners[places[0]][0].search
        if search is None or search.done or not alive[places].all():
            continue
        came = search.advance(pending.beams[name][: len(search.texts)])
        parents[places[: len(came)]] = came
        tokens[places] = 0
        tokens[places[: len(came)]] = [text[-1] for text in search.texts]
    return parents


class Chooser:
    """Draws the tokens of each step and keeps them on the device for the next one.

    Args: `vocab_size`; `num_rows`, of the tables.
    State
        sampler  DeviceSampler, which knows how each row chooses.
        sampled  int64 [num_rows] on the device: the tokens of the newest step.
        hosts    two pinned buffers that they travel to, in turns.
        tenant   {row: (job, sample index)}.
    """

    def __init__(self, vocab_size: int, num_rows: int, device: Any) -> None:
        self.device = torch.empty(0, device=device).device
        self.on_gpu = self.device.type == "cuda"
        self.sampler = DeviceSampler(num_rows, vocab_size, self.device)
        self.sampled = torch.zeros(num_rows, dtype=torch.int64, device=self.device)
        self.hosts = [
            torch.zeros(num_rows, dtype=torch.int64, pin_memory=self.on_gpu) for _ in "ab"
        ]
        self.tenant: dict[int, tuple[Job, int]] = {}
        self.turn = 0

    def clear(self) -> None:
        """Forget all tenants; the next plan must open every row anew."""
        for row in self.tenant:
            self.sampler.close_row(row)
        self.tenant.clear()

    def open(self, plan: StepPlan, jobs: Mapping[Hashable, Job], state: RowState) -> None:
        """Learn who left and who came, and how the latter choose."""
        for row in plan.news.closed:
            self.tenant.pop(row, None)
            self.sampler.close_row(row)
        if not plan.news.opened:
            return
        rows, names, indices = zip(*plan.news.opened, strict=True)
        came = [jobs[name] for name in names]
        self.tenant.update(zip(rows, zip(came, indices, strict=True), strict=True))
        said = [
            state.tokens[row, len(job.prompt) : state.known[row]].tolist()
            for row, job in zip(rows, came, strict=True)
        ]
        prompts = [job.prompt for job in came]
        self.sampler.open_rows(rows, [job.sampling for job in came], indices, prompts, said)

    def choose(self, plan: StepPlan, logits: Tensor, step: DeviceStep) -> Pending:
        """Draw one token a sample; returns at once, the tokens follow."""
        count, self.turn, ready = len(plan.sample_rows), self.turn ^ 1, None
        drawn = self.sampler.sample(logits, step.sample_rows, step.positions, plan.sample_rows)
        torch.clamp(drawn.tokens, min=0, out=self.sampled[:count])  # the next step reads them
        host = self.hosts[self.turn]
        host[:count].copy_(drawn.tokens, non_blocking=True)
        beams = {
            name: logits[torch.from_numpy(places).to(self.device)].float().log_softmax(-1)
            for name, places in plan.beams
        }
        if self.on_gpu:
            event: Any = torch.cuda.Event
            ready = event()
            ready.record()
        owners = [self.tenant[row] for row in plan.sample_rows.tolist()]
        return Pending(plan, owners, host, ready, drawn, beams)
