# Exported from book/07_sampling_and_beams.py by tools/export.py; edit the chapter, not this file.
"""Beam search: which texts to keep, and the block tables that follow them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from paged_kv.block_manager import BlockManager
from paged_kv.copy_on_write import fork_many, rewire
from paged_kv.hf_adapter import PagedModel
from paged_kv.sampling import decode, prefill
from paged_kv.sizing import at_least


@dataclass(frozen=True)
class Hypothesis:
    """A finished text: its generated ids, and its log-probability over length ** penalty."""

    ids: list[int]
    score: float


class BeamSearch:
    """Ranks the continuations of one prompt: tokens and scores, no blocks.

    Args: `early_stopping`, when to stop once `num_beams` texts have finished: True at once;
    False when the best running beam, ending now, would be no better than the worst of them;
    "never" when it would not at full length.
    State
        texts     the ids of each running beam, best first.
        scores    float32 [num_beams]: their log-probabilities.
        finished  at most num_beams hypotheses, best first.
        done      whether the search has ended.
    Source of the rules: transformers/generation/utils.py, whose results it reproduces.
    """

    def __init__(
        self,
        num_beams: int,
        max_new_tokens: int,
        stop_ids: Collection[int] = (),
        length_penalty: float = 1.0,
        early_stopping: bool | Literal["never"] = False,
    ) -> None:
        self.num_beams = at_least(1, "num_beams", num_beams)
        self.max_new_tokens = at_least(1, "max_new_tokens", max_new_tokens)
        self.stop_ids = frozenset(stop_ids)
        self.length_penalty, self.early_stopping = length_penalty, early_stopping
        self.texts: list[list[int]] = [[] for _ in range(num_beams)]
        self.scores = torch.full((num_beams,), -torch.inf)
        self.scores[0] = 0.0  # all beams are one text at first: let it count once
        self.finished: list[Hypothesis] = []
        self.done = False

    def advance(self, log_probs: Tensor) -> list[int]:
        """Extend each running beam by its likeliest tokens and keep the best texts.

        Args: `log_probs` [num_beams, vocab], those of the next token behind each of `texts`.
        Returns: for each beam that runs now, the beam that it comes from.
        """
        length, vocab = len(self.texts[0]) + 1, log_probs.shape[1]
        total = (log_probs.float() + self.scores.to(log_probs.device)[:, None]).flatten()
        enough = max(2, 1 + len(self.stop_ids)) * self.num_beams
        best, places = total.topk(min(enough, len(total)))
        running: list[tuple[float, int, list[int]]] = []
        ended: list[Hypothesis] = []
        candidates = zip(best.tolist(), places.tolist(), strict=True)
        for rank, (score, place) in enumerate(candidates):
            parent, token = divmod(place, vocab)
            text = [*self.texts[parent], token]
            if token not in self.stop_ids and length < self.max_new_tokens:
                running.append((score, parent, text))
            elif rank < self.num_beams:
                ended.append(Hypothesis(text, score / length**self.length_penalty))
        self._keep(ended)
        running = running[: self.num_beams]
        self.texts = [text for _, _, text in running]
        self.scores = torch.tensor([score for score, _, _ in running])
        self.done = not running or self._settled(length)
        return [parent for _, parent, _ in running]

    def _keep(self, ended: list[Hypothesis]) -> None:
        """Take `ended` among the finished; the best num_beams of them stay."""
        if not (self.early_stopping is True and len(self.finished) == self.num_beams):
            ranked = sorted([*self.finished, *ended], key=lambda one: -one.score)
            self.finished = ranked[: self.num_beams]

    def _settled(self, length: int) -> bool:
        """Whether running beams, `length` tokens long, are taken to have no chance any more."""
        if len(self.finished) < self.num_beams:
            return False
        if self.early_stopping == "never" and self.length_penalty > 0:
            length = self.max_new_tokens
        hope = float(self.scores[0]) / length**self.length_penalty
        return self.early_stopping is True or hope <= self.finished[-1].score


def place_children(rows: Sequence[int], parents: Sequence[int]) -> list[int]:
    """A row for each child: a beam's first child keeps its row, others get rows of the childless.

    Args: `rows`, those of the beams; `parents`, for each child the beam that it comes from.
    """
    spare = [row for beam, row in enumerate(rows) if beam not in parents]
    first = {parent: child for child, parent in reversed(list(enumerate(parents)))}
    return [
        rows[parent] if first[parent] == child else spare.pop(0)
        for child, parent in enumerate(parents)
    ]


def run_beams(
    guest: PagedModel,
    manager: BlockManager,
    prompts: Sequence[Sequence[int]],
    searches: Sequence[BeamSearch],
) -> Iterator[dict[int, list[int]]]:
    """Run one search a prompt, all in one batch, until each is done.

    Yields, after every step, the rows of each search that runs on, best beam first; the same
    dict each time.  What was found stands in `searches`.
    Raises: OutOfBlocks; all rows are given back, however it ends.
    """
    if len(prompts) != len(searches):
        raise ValueError(f"searches: {len(searches)} for {len(prompts)} prompts")
    roots, logits = prefill(guest, manager, prompts)
    groups = {i: [root] for i, root in enumerate(roots)}
    try:
        for i, search in enumerate(searches):
            groups[i] += fork_many(manager, [roots[i]] * (search.num_beams - 1))
        logits = logits[[i for i, group in groups.items() for _ in group]]
        while True:
            step_beams(manager, groups, searches, logits.log_softmax(-1))
            yield groups
            if not groups:
                return
            rows = [row for group in groups.values() for row in group]
            tokens = [text[-1] for i in groups for text in searches[i].texts]
            logits = decode(guest, manager, rows, tokens)
    finally:
        for row in [row for group in groups.values() for row in group]:
            manager.finish(row)


def step_beams(
    manager: BlockManager,
    groups: dict[int, list[int]],
    searches: Sequence[BeamSearch],
    log_probs: Tensor,
) -> None:
    """Let each search choose, then rewire all tables at once.

    Changes `groups`: searches that are done leave it, and their blocks go back.
    """
    rows, sources, start = [], [], 0
    for i, group in list(groups.items()):
        parents = searches[i].advance(log_probs[start : start + len(group)])
        start += len(group)
        if searches[i].done:
            for row in groups.pop(i):
                manager.finish(row)
            continue
        groups[i] = place_children(group, parents)
        rows += groups[i]
        sources += [group[parent] for parent in parents]
    rewire(manager, rows, sources)
