# Exported from book/05_guest_model.py by tools/export.py; edit the chapter, not this file.
"""How a model of transformers asks us for attention: one function, registered by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from paged_kv.attention import paged_attention
from paged_kv.kv_store import KVStore
from paged_kv.packed_batch import PackedBatch

HOST_NAME = "paged_kv"


class LayerAttention(Protocol):
    """One layer's part of a step: store the new K/V, then attend through the table."""

    def __call__(
        self,
        store: KVStore,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch: PackedBatch,
        *,
        scale: float | None,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Return [num_tokens, num_q_heads, head_size]; query, key and value are shaped alike."""
        ...


def write_and_attend(
    store: KVStore,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: PackedBatch,
    **options: Any,
) -> Tensor:
    """The plain `LayerAttention`: `KVStore.write`, then `paged_attention`."""
    store.write(layer, key, value, batch.slot_mapping)
    keys, values = store.keys(layer), store.values(layer)
    cu, lens = batch.cu_seqlens, batch.seq_lens
    table, rows = batch.block_table, batch.rows
    return paged_attention(query, keys, values, table, cu, lens, rows=rows, **options)[0]


@dataclass(frozen=True)
class HostCall:
    """What travels through a model's keyword arguments to each of its attention layers."""

    store: KVStore
    batch: PackedBatch
    attention: LayerAttention


def host_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    host_call: HostCall | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls in place of its attention, once a layer.

    Args: `module`, the guest's layer, with a `layer_idx`; query [1, num_q_heads, num_tokens,
    head_size], key and value [1, num_kv_heads, num_tokens, head_size].
    Returns [1, num_tokens, num_q_heads, head_size], and no weights.
    Source: transformers/integrations/sdpa_attention.py, for the signature.
    """
    if host_call is None or attention_mask is not None:
        raise ValueError("host_call: needed, with a PackedBatch and without a mask")
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    output = host_call.attention(
        host_call.store,
        module.layer_idx,
        q,
        k,
        v,
        host_call.batch,
        scale=scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return output[None], None


def configs_of(model: Any) -> list[Any]:
    """The configs that the parts of `model` look at, each once."""
    found = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}
    return list(found.values())


@contextmanager
def attention_set(configs: Sequence[Any], name: str) -> Iterator[None]:
    """Within this context the owners of `configs` use the attention registered as `name`."""
    before = [config._attn_implementation for config in configs]
    for config in configs:
        config._attn_implementation = name
    try:
        yield
    finally:
        for config, old in zip(configs, before, strict=True):
            config._attn_implementation = old


def run_hosted(model: Any, configs: Sequence[Any], call: HostCall) -> Tensor:
    """One forward pass of `model` under `host_attention`; logits [len(logits_at), vocab_size]."""
    batch = call.batch
    with attention_set(configs, HOST_NAME):
        logits: Tensor = model(
            input_ids=batch.input_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=batch.logits_at,
            host_call=call,
        ).logits
    return logits[0]
