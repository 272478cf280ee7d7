# Exported from book/appendices/A3_real_configs.py by tools/export.py; edit the chapter, not this file.
"""The KV cache of a real model, read from its config.json.

Layers are counted once each: full, windowed, or without K/V.  What is not understood is an error.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from paged_kv.config_facts import (
    Config,
    find_fact,
    listed_values,
    read_config,
    required_fact,
    text_part,
    whole_number,
)
from paged_kv.sizing import BITS, KVSpec, at_least, blocks_for

Policy = Literal["full", "window"]


def heads_per_rank(heads: int, kv_heads: int, ranks: int) -> int:
    """KV heads that one of `ranks` tensor-parallel ranks keeps: at least one."""
    if heads % ranks:
        raise ValueError(f"tensor_parallel = {ranks}: it does not divide {heads} query heads")
    if kv_heads % ranks and ranks % kv_heads:
        raise ValueError(f"tensor_parallel = {ranks}: {kv_heads} KV heads do not go round evenly")
    return max(1, kv_heads // ranks)


def layer_shape(text: Config, ranks: int) -> tuple[int, int, int]:
    """(KV heads a rank, head size, tensors) of one layer."""
    heads, latent = required_fact(text, "heads"), find_fact(text, "latent")
    if latent:
        heads_per_rank(heads, 1, ranks)
        return 1, latent + required_fact(text, "rope"), 1
    one_head = text.get("multi_query") and not text.get("new_decoder_architecture")
    kv_heads = 1 if one_head else find_fact(text, "kv_heads") or heads
    size = find_fact(text, "head_size")
    if size is None:
        hidden = required_fact(text, "hidden")
        if hidden % heads:
            raise ValueError(f"config: no head_dim, and {heads} heads do not divide {hidden}")
        size = hidden // heads
    kept, value_size = heads_per_rank(heads, kv_heads, ranks), find_fact(text, "value_size") or size
    return (kept, size, 2) if value_size == size else (kept, size + value_size, 1)


KINDS: dict[str, str] = {
    **dict.fromkeys(("full_attention", "attention", "hybrid", "*"), "full"),
    **dict.fromkeys(("sliding_attention", "local_attention"), "sliding"),
    "chunked_attention": "chunked",
    **dict.fromkeys(("linear_attention", "mamba", "mamba2", "conv", "recurrent"), "none"),
    **dict.fromkeys(("moe", "mlp", "M", "-", "E"), "none"),
}
MOST_LAYERS = 10_000  # each is looked at; a slip of the pen must not run for ever


def listed_kinds(text: Config, layers: int) -> list[str] | None:
    """The kind of each layer where the config lists them, or says which ones attend."""
    for name in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
        if names := listed_values(text, name):
            return [str(kind) for kind in names]
    if cycle := listed_values(text, "block_types"):  # RecurrentGemma: a short list, repeated
        kinds = ["sliding_attention" if kind == "attention" else str(kind) for kind in cycle]
        return [kinds[i % len(kinds)] for i in range(layers)]
    attends = listed_values(text, "full_attn_idxs") or listed_values(text, "attn_layer_indices")
    attends += [i for i, full in enumerate(listed_values(text, "attn_type_list")) if full]
    if step := whole_number(text, "attn_layer_period"):
        attends += range(whole_number(text, "attn_layer_offset"), layers, step)
    if step := whole_number(text, "full_attention_interval"):
        attends += range(step - 1, layers, step)
    kind = {True: "full_attention", False: "linear_attention"}
    return [kind[i in attends] for i in range(layers)] if attends else None


def patterned_kinds(text: Config, layers: int) -> list[str]:
    """The kind of each layer from a window or chunk size and the family's rule; else all full."""
    if find_fact(text, "chunk"):
        chunked = listed_values(text, "no_rope_layers") or [(i + 1) % 4 for i in range(layers)]
        return ["chunked_attention" if flag else "full_attention" for flag in chunked]
    if not find_fact(text, "window") or text.get("use_sliding_window") is False:
        return ["full_attention"] * layers
    pattern = text.get("sliding_window_pattern")
    if pattern and isinstance(pattern, str):  # "LLLG": local, local, local, global
        slides = [pattern[i % len(pattern)] == "L" for i in range(layers)]
    elif step := whole_number(text, "sliding_window_pattern"):
        slides = [bool((i + 1) % step) for i in range(layers)]
    else:
        first = whole_number(text, "max_window_layers") if text.get("use_sliding_window") else 0
        slides = [i >= first for i in range(layers)]
    return ["sliding_attention" if slide else "full_attention" for slide in slides]


def layer_kinds(text: Config) -> list[str]:
    """For each layer "full", "sliding", "chunked" or "none"; ValueError for an unknown kind."""
    blocks = listed_values(text, "layers_block_type")
    blocks = blocks or listed_values(text, "hybrid_override_pattern")
    layers = find_fact(text, "layers") or len(blocks) or required_fact(text, "layers")
    if layers > MOST_LAYERS:
        raise ValueError(f"config: {layers} layers; at most {MOST_LAYERS} are believed")
    names = listed_kinds(text, layers) or patterned_kinds(text, layers)
    if len(names) != layers:
        raise ValueError(f"config: {len(names)} layer types for {layers} layers")
    unknown = sorted(set(names) - set(KINDS))
    if unknown:
        raise ValueError(f"config: layer type {unknown[0]!r} is unknown; known: {', '.join(KINDS)}")
    kinds = [KINDS[name] for name in names]
    last = layers - whole_number(text, "num_kv_shared_layers")
    factor = whole_number(text, "cla_share_factor") if text.get("use_cla") else 1
    return [kind if i < last and i % (factor or 1) == 0 else "none" for i, kind in enumerate(kinds)]


@dataclass(frozen=True)
class LayerGroup:
    """Identical layers: what a token leaves in them, and how long it is kept.

    Fields: `spec`; `window`, tokens a layer looks back, None for all; `policy`, "full" if every
    token is kept, "window" if blocks that left the window are given back.
    """

    spec: KVSpec
    window: int | None = None
    policy: Policy = "full"

    def blocks_for(self, num_tokens: int, block_size: int) -> int:
        """Blocks kept for a sequence of `num_tokens`: those that overlap what may be read."""
        blocks = blocks_for(num_tokens, block_size)
        if self.window is None or self.policy == "full":
            return blocks
        return blocks - max(0, num_tokens - self.window) // block_size

    def bytes_for(self, num_tokens: int, block_size: int = 1) -> int:
        """Bytes kept for a sequence of `num_tokens`, in blocks of `block_size`."""
        return self.blocks_for(num_tokens, block_size) * self.spec.bytes_per_block(block_size)


@dataclass(frozen=True)
class ModelKV:
    """The KV cache of a model, on one tensor-parallel rank.

    Fields: `groups` of identical layers; `num_layers`, those without K/V included; `max_tokens`,
    the context the config declares, None if it does not; `tensor_parallel`, ranks; `notes`,
    what was assumed.
    """

    groups: tuple[LayerGroup, ...]
    num_layers: int
    max_tokens: int | None = None
    tensor_parallel: int = 1
    notes: tuple[str, ...] = ()

    @property
    def bytes_per_token(self) -> int:
        """Bytes that a new token adds, over all layers."""
        return sum(group.spec.bytes_per_token for group in self.groups)

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes of a block of `block_size` tokens, over all layers."""
        return self.bytes_per_token * at_least(1, "block_size", block_size)

    def bytes_for(self, num_tokens: int, block_size: int = 1) -> int:
        """Bytes of one sequence in blocks of `block_size`, each group by its policy."""
        return sum(group.bytes_for(num_tokens, block_size) for group in self.groups)

    def blocks_in(self, memory_bytes: int, block_size: int) -> int:
        """Whole blocks, over all layers, that fit into `memory_bytes`."""
        return at_least(0, "memory_bytes", memory_bytes) // self.bytes_per_block(block_size)


DTYPES = {
    "float32": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    **dict(zip(BITS, BITS, strict=True)),
}


def element_type(text: Config, kv_dtype: str | None) -> tuple[str, tuple[str, ...]]:
    """(key of `BITS`, notes) from the caller's wish, else from the config."""
    given = kv_dtype or text.get("dtype") or text.get("torch_dtype")
    if given is None:
        return "bf16", ("the config declares no dtype: 16 bits assumed",)
    name = str(given).removeprefix("torch.")
    if name not in DTYPES:
        which = "kv_dtype" if kv_dtype else "config: dtype"
        raise ValueError(f"{which} = {name!r}: one of {', '.join(BITS)} is needed")
    return DTYPES[name], ()


def window_of(text: Config, kind: str) -> int | None:
    """Tokens that a layer of this kind looks back; None for all of them."""
    if kind == "full":
        return None
    return required_fact(text, "chunk" if kind == "chunked" else "window")


def layer_overrides(text: Config, index: int, kind: str) -> dict[str, Any]:
    """Facts that one layer declares for itself (Gemma 4: wider heads in its full layers)."""
    listed = text.get("per_layer_config")
    if isinstance(listed, Mapping):
        own = {str(key).lstrip("0") or "0": facts for key, facts in listed.items()}
        facts = own.get(str(index), {})
        if not isinstance(facts, Mapping):
            raise ValueError(f"config: per_layer_config[{index}] = {facts!r}: an object is needed")
        return dict(facts)
    if kind != "full" or not text.get("global_head_dim"):
        return {}
    heads = text.get("num_global_key_value_heads") if text.get("attention_k_eq_v") else None
    own_heads = {"num_key_value_heads": heads} if heads else {}
    return {"head_dim": text["global_head_dim"], **own_heads}


def from_config(
    config: Any,
    kv_dtype: str | None = None,
    tensor_parallel: int = 1,
    policy: Policy = "full",
) -> ModelKV:
    """Read a model's KV cache from its config.

    Args: `config`, a dict, a JSON file, a model's folder or a transformers config; `kv_dtype`, a
    key of `BITS`, None for the weights' own; `tensor_parallel`, ranks; `policy`, what windowed
    layers keep: "full" or "window".
    Raises: ValueError naming what is missing, unknown or does not divide.
    """
    at_least(1, "tensor_parallel", tensor_parallel)
    if policy not in ("full", "window"):
        raise ValueError(f'policy = {policy!r}: "full" or "window" is needed')
    text = text_part(read_config(config))
    dtype, notes = element_type(text, kv_dtype)
    kinds, shapes = layer_kinds(text), Counter[tuple[int, int, int, int | None]]()
    for index, kind in enumerate(kinds):
        if kind != "none":
            facts = {**text, **layer_overrides(text, index, kind)}
            shapes[(*layer_shape(facts, tensor_parallel), window_of(text, kind))] += 1
    if not shapes:
        raise ValueError("config: no layer keeps K/V")
    groups = tuple(
        LayerGroup(KVSpec(count, heads, size, dtype, tensors), window, policy if window else "full")
        for (heads, size, tensors, window), count in shapes.items()
    )
    return ModelKV(groups, len(kinds), find_fact(text, "context"), tensor_parallel, notes)
