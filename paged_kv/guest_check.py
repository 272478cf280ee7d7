# Exported from book/05_guest_model.py by tools/export.py; edit the chapter, not this file.
"""Whether a model can be served right: decided at load, by trying it.

The config is read for what a short run cannot show.  The rest is measured: a packed batch,
prefill in chunks and decode mixed, against the model's own eager forward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface

from paged_kv.block_manager import BlockManager
from paged_kv.guest_attention import (
    HOST_NAME,
    HostCall,
    LayerAttention,
    attention_set,
    configs_of,
    host_attention,
    run_hosted,
    write_and_attend,
)
from paged_kv.kv_store import TORCH_DTYPES, KVStore
from paged_kv.packed_batch import PackedBatch, pack
from paged_kv.sizing import KVSpec, blocks_for

SERVED_LAYERS = {"full_attention", "sliding_attention"}
SERVED_ROPE = {"default", "linear", "llama3", "yarn", "proportional"}
LONGEST_WINDOW = 1024  # wider windows are compared with the config, but not outgrown
TAIL = 13  # tokens by which the longest sequence outgrows the window


class GuestRefused(ValueError):
    """The model would be served wrong, or not at all; the message says why."""


def check_config(config: Any) -> None:
    """GuestRefused for what no short batch would show: kinds of layers, kinds of rotation."""
    layers = set(getattr(config, "layer_types", None) or ()) - SERVED_LAYERS
    if layers:
        raise GuestRefused(f"layer types {sorted(layers)}: only {sorted(SERVED_LAYERS)} are served")
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    parts = [part for part in rope.values() if isinstance(part, dict)] or [rope]
    kinds = {part.get("rope_type") or part.get("type") or "default" for part in parts}
    if kinds - SERVED_ROPE:
        raise GuestRefused(
            f"rope type {sorted(kinds - SERVED_ROPE)}: its angles may depend on the longest"
            f" sequence of the batch; served are {sorted(SERVED_ROPE)}"
        )


def guest_spec(model: Any) -> KVSpec:
    """The `KVSpec` of `model`: layers, KV heads and head size of its config, its own dtype."""
    config = model.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    names = {dtype: name for name, dtype in TORCH_DTYPES.items()}
    if model.dtype not in names:
        raise GuestRefused(f"dtype {model.dtype}: one of {sorted(TORCH_DTYPES)} is needed")
    return KVSpec(
        num_layers=config.num_hidden_layers,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
        dtype=names[model.dtype],
    )


def windows_of(config: Any) -> list[int | None]:
    """The sliding window that each layer should have by its config, None for all tokens."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in types]


def probe_prompts(config: Any, device: Any) -> list[Tensor]:
    """Three random sequences, the first longer than any window up to LONGEST_WINDOW."""
    windows = [w for w in windows_of(config) if w is not None and w <= LONGEST_WINDOW]
    longest = max(windows, default=0) + TAIL
    longest = min(longest, getattr(config, "max_position_embeddings", None) or longest)
    random, vocab = torch.Generator().manual_seed(0), min(config.vocab_size, 1000)
    return [torch.randint(vocab, (n,), generator=random).to(device) for n in (longest, 3, 7)]


def probe_steps(prompts: list[Tensor]) -> list[list[int]]:
    """New tokens of each sequence, step by step: a prompt in chunks, an arrival, decodes."""
    a, b, c = map(len, prompts)
    return [[a - 4, b - 2, 0], [3, 1, c - 1], [1, 1, 1]]


class Probe:
    """One trial of a model as guest, with a store, tables and prompts of its own.

    State: `calls`, (layer, window) of each attention call since the last check.
    """

    def __init__(self, model: Any, attention: LayerAttention) -> None:
        config = model.config.get_text_config(decoder=True)
        check_config(config)
        self.model, self.attention, self.configs = model, attention, configs_of(model)
        self.spec, self.windows = guest_spec(model), windows_of(config)
        self.prompts = probe_prompts(config, model.device)
        block_size, longest = 4, max(map(len, self.prompts))
        num_blocks = sum(blocks_for(len(ids), block_size) for ids in self.prompts)
        self.store = KVStore(self.spec, num_blocks, block_size, model.device)
        self.manager = BlockManager(num_blocks, block_size, len(self.prompts), longest)
        self.calls: list[tuple[int, int | None]] = []

    def __call__(
        self,
        store: KVStore,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch: PackedBatch,
        **options: Any,
    ) -> Tensor:
        """Note who called and how, then pass the call on."""
        promised = (self.spec.num_kv_heads, self.spec.head_size)
        for name, tensor in (("keys", key), ("values", value)):
            if tensor.shape[1:] != promised:
                found = tuple(tensor.shape[1:])
                raise GuestRefused(f"layer {layer}: {name} of {found}, by the config {promised}")
        self.calls.append((layer, options["window"]))
        return self.attention(store, layer, query, key, value, batch, **options)

    def own(self, ids: Tensor) -> Tensor:
        """What the model itself says of one sequence, float32 [num_tokens, vocab_size]."""
        with attention_set(self.configs, "eager"):
            logits: Tensor = self.model(input_ids=ids[None], use_cache=False).logits
        return logits[0].float()

    def hosted(self) -> list[Tensor]:
        """What it says of each prompt as our guest, float32 [num_tokens, vocab_size]."""
        rows, done = [self.manager.add(0) for _ in self.prompts], [0] * len(self.prompts)
        parts: list[list[Tensor]] = [[] for _ in self.prompts]
        for counts in probe_steps(self.prompts):
            chosen = [i for i, count in enumerate(counts) if count]
            taken = [counts[i] for i in chosen]
            self.manager.append([rows[i] for i in chosen], np.array(taken))
            new = [self.prompts[i][done[i] : done[i] + counts[i]].tolist() for i in chosen]
            logits = self.step([rows[i] for i in chosen], new)
            for i, part in zip(chosen, logits.split_with_sizes(taken), strict=True):
                parts[i].append(part)
                done[i] += counts[i]
        return [torch.cat(part) for part in parts]

    def step(self, rows: list[int], new_ids: list[list[int]]) -> Tensor:
        """Run one packed batch, all logits; GuestRefused unless each layer called as it should."""
        batch = pack(self.manager.tables, rows, new_ids, self.model.device)
        every = torch.arange(len(batch.input_ids), device=self.model.device)
        call = HostCall(self.store, replace(batch, logits_at=every), self)
        logits = run_hosted(self.model, self.configs, call)
        layers = sorted(layer for layer, _ in self.calls)
        if layers != list(range(len(self.windows))):
            raise GuestRefused(f"of {len(self.windows)} layers these called us: {layers}")
        for layer, window in self.calls:
            if window != self.windows[layer]:
                asked = f"window {window}, by the config {self.windows[layer]}"
                raise GuestRefused(f"layer {layer}: {asked}")
        self.calls.clear()
        return logits.float()


@dataclass(frozen=True)
class CheckReport:
    """What the check at load found.

    Fields
        num_tokens  tokens compared, over all sequences of the packed batches.
        longest     tokens of the longest sequence.
        error       largest difference of a logit from the model's own eager forward; see
                    `largest` for 16-bit models.
        noise       the same between two eager forwards of the model itself, of which one stops
                    a few tokens earlier.
        tolerance   what was allowed: ten times the noise, at least 16 roundings of the
                    largest logit.
    """

    num_tokens: int
    longest: int
    error: float
    noise: float
    tolerance: float


def largest(differences: list[Tensor], dtype: torch.dtype) -> float:
    """The largest entry of [num_tokens, vocab_size] differences, one tensor a sequence.

    In 16 bits a router may pick another expert on a near tie, and a few tokens are far off
    with nothing wrong: the last TAIL tokens of each sequence count, less the worst quarter.
    """
    tokens = [difference.abs().amax(-1) for difference in differences]
    if dtype == torch.float32:
        return float(torch.cat(tokens).max())
    return float(torch.cat([token[-TAIL:] for token in tokens]).quantile(0.75))


@torch.inference_mode()
def check_guest(model: Any, attention: LayerAttention = write_and_attend) -> CheckReport:
    """Compare `model` as guest with its own eager forward; GuestRefused, with the reason."""
    AttentionInterface.register(HOST_NAME, host_attention)
    probe = Probe(model, attention)
    try:
        own = [probe.own(ids) for ids in probe.prompts]
        hosted = probe.hosted()
    except GuestRefused:
        raise
    except Exception as fault:
        raise GuestRefused(f"it does not run with our attention: {fault!r}") from fault
    error = largest([h - o for h, o in zip(hosted, own, strict=True)], model.dtype)
    noise = largest([probe.own(probe.prompts[0][:-4]) - own[0][:-4]], model.dtype)
    rounding = torch.finfo(model.dtype).eps * max(float(o.abs().max()) for o in own)
    tolerance = max(10 * noise, 16 * rounding)
    if not error <= tolerance:
        raise GuestRefused(f"its logits differ by {error:.1e}, allowed are {tolerance:.1e}")
    lengths = [len(ids) for ids in probe.prompts]
    return CheckReport(sum(lengths), max(lengths), error, noise, tolerance)
