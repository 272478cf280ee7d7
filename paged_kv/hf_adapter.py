# Exported from book/05_guest_model.py by tools/export.py; edit the chapter, not this file.
"""A causal language model of transformers as guest: its layers, our K/V.

`host` checks a model and gives it a store; `PagedModel.forward` runs packed batches;
`load_guest` reads a local folder; `continuous_decode` is a small serving loop.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from paged_kv.block_manager import BlockManager
from paged_kv.guest_attention import (
    HostCall,
    LayerAttention,
    configs_of,
    run_hosted,
    write_and_attend,
)
from paged_kv.guest_check import check_guest, guest_spec
from paged_kv.kv_store import KVStore
from paged_kv.packed_batch import PackedBatch, pack
from paged_kv.sizing import blocks_for


class PagedModel:
    """A guest, and the store that holds its K/V.

    State: `model`, which stays usable by itself between our calls; `store`; `report`, what the
    check at load found.  `attention` does each layer's work, and is what the check tries.
    Raises: GuestRefused, with the reason; ValueError where `store` does not fit.
    """

    def __init__(
        self, model: Any, store: KVStore, attention: LayerAttention = write_and_attend
    ) -> None:
        spec = guest_spec(model)
        needed = (spec.num_layers, spec.num_kv_heads, spec.head_size)
        found = (len(store.tensors), *store.tensors[0].shape[3:])
        if found != needed:
            raise ValueError(f"store: layers, KV heads, head size {found}, but {needed} are needed")
        self.model, self.store, self.attention = model.eval(), store, attention
        self.report = check_guest(model, attention)
        self._configs = configs_of(model)

    @torch.inference_mode()
    def forward(self, batch: PackedBatch) -> Tensor:
        """Run one step: write the batch's K/V into the store, return the wanted logits.

        Returns [len(batch.logits_at), vocab_size].  Changes the slots of `slot_mapping`.
        """
        call = HostCall(self.store, batch, self.attention)
        return run_hosted(self.model, self._configs, call)


def host(model: Any, num_blocks: int, block_size: int = 16) -> PagedModel:
    """Check `model` and give it a store of `num_blocks` blocks, on its own device."""
    return PagedModel(model, KVStore(guest_spec(model), num_blocks, block_size, model.device))


def model_folder(name: str = "smollm2-135m") -> Path:
    """Where a converted model lies: $PAGED_KV_MODELS, else .cache/models here or further up.

    Raises FileNotFoundError, naming the command that makes it.
    """
    here, given = Path.cwd(), os.environ.get("PAGED_KV_MODELS")
    places = [Path(given)] if given else [up / ".cache/models" for up in (here, *here.parents)]
    for place in places:
        if (place / name / "config.json").is_file():
            return place / name
    raise FileNotFoundError(f"no model {name!r} in {places[0]}: run `make model` in the repository")


def load_guest(
    path: str | Path | None = None, dtype: torch.dtype = torch.float32
) -> tuple[Any, Any]:
    """The model and the tokenizer of a local transformers folder; `model_folder()` if None."""
    library: Any = transformers
    bars = library.utils.logging
    shown = bars.is_progress_bar_enabled()
    folder = model_folder() if path is None else path
    bars.disable_progress_bar()
    try:
        tokenizer = library.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = library.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True
        )
    finally:
        if shown:
            bars.enable_progress_bar()
    return model.eval(), tokenizer


@dataclass
class Progress:
    """Where `continuous_decode` stands: prompts waiting, running (index -> row), and outputs."""

    waiting: deque[int]
    running: dict[int, int]
    output: list[list[int]]


def admit(
    manager: BlockManager, prompts: Sequence[Sequence[int]], new: int, state: Progress
) -> list[list[int]]:
    """Let prompts start, in order, while the pool could carry all that run to their ends.

    Returns the token ids of those admitted; each gets a row with its blocks.
    """
    admitted = []
    while state.waiting:
        ends = [len(prompts[i]) + new - 1 for i in (*state.running, state.waiting[0])]
        needed = sum(blocks_for(end, manager.block_size) for end in ends)
        if needed > manager.pool.num_blocks or len(ends) > len(manager.tables.table):
            break
        i = state.waiting.popleft()
        state.running[i] = manager.add(len(prompts[i]))
        admitted.append(list(prompts[i]))
    return admitted


def check_prompts(manager: BlockManager, prompts: Sequence[Sequence[int]], new: int) -> None:
    """ValueError unless each prompt, with `new` tokens more, would fit an empty pool."""
    for i, prompt in enumerate(prompts):
        if not prompt or new < 1:
            raise ValueError(f"prompts: {i} has {len(prompt)} tokens, {new} more are wanted")
        end, most = len(prompt) + new - 1, manager.tables.max_seq_len
        needed, exist = blocks_for(end, manager.block_size), manager.pool.num_blocks
        if needed > exist or end > most:
            asked = f"{needed} blocks of {exist}, {end} tokens of {most}"
            raise ValueError(f"prompts: {i} needs {asked}")


def continuous_decode(
    guest: PagedModel,
    manager: BlockManager,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
) -> Iterator[Progress]:
    """Answer all prompts greedily, each from the step on at which the pool can carry it.

    Yields the same Progress after every step, before those that have finished leave.
    Raises ValueError for a prompt that can never fit, before the first step.
    """
    check_prompts(manager, prompts, max_new_tokens)
    state = Progress(deque(range(len(prompts))), {}, [[] for _ in prompts])
    while state.waiting or state.running:
        new_ids = [state.output[i][-1:] for i in state.running]
        if state.running:
            manager.append(list(state.running.values()))
        new_ids += admit(manager, prompts, max_new_tokens, state)
        batch = pack(manager.tables, list(state.running.values()), new_ids, guest.model.device)
        tokens = guest.forward(batch).argmax(-1).tolist()
        for i, token in zip(state.running, tokens, strict=True):
            state.output[i].append(token)
        yield state
        for i in list(state.running):
            if len(state.output[i]) == max_new_tokens or state.output[i][-1] in stop_ids:
                manager.finish(state.running.pop(i))
