# Exported from book/appendices/A3_real_configs.py by tools/export.py; edit the chapter, not this file.
"""The facts of a model's config.json, under whichever names the file gives them.

Nothing is guessed: a fact that is missing and has no documented fallback is an error.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paged_kv.sizing import at_least

Config = Mapping[str, Any]
NAMES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "hidden": ("hidden_size", "n_embd", "d_model", "n_embed"),
    "head_size": ("head_dim", "attention_head_dim", "kv_channels"),
    "latent": ("kv_lora_rank",),
    "rope": ("qk_rope_head_dim",),
    "value_size": ("v_head_dim",),
    "window": ("sliding_window", "attention_window_size", "sliding_window_size"),
    "chunk": ("attention_chunk_size",),
    "context": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
    "vocabulary": ("vocab_size", "padded_vocab_size"),
    "mlp": ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
}


# What the model's own class supplies where its file is silent (transformers, configuration_*.py).
CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256, "sliding_window_pattern": 2},
    "gemma3_text": {
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    "gemma3n_text": {"head_dim": 256, "sliding_window": 512, "sliding_window_pattern": 5},
    "cohere2": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "gpt_oss": {"head_dim": 64, "sliding_window": 128, "sliding_window_pattern": 2},
    "qwen3": {"head_dim": 128},
    "qwen3_next": {"head_dim": 256, "full_attention_interval": 4},
}


def whole_number(text: Config, name: str) -> int:
    """The whole number under exactly this name; 0 if it is not declared."""
    return 0 if text.get(name) is None else at_least(0, f"config: {name}", text[name])


def listed_values(text: Config, name: str) -> list[Any]:
    """The list (or the letters) under exactly this name; empty if it is not declared."""
    value = () if text.get(name) is None else text[name]
    if not isinstance(value, list | tuple | str):
        raise ValueError(f"config: {name} = {value!r}: a list is needed")
    return list(value)


def find_fact(text: Config, what: str) -> int | None:
    """The fact `what` (a key of `NAMES`) under whichever name declares it; None if none does."""
    declared = (name for name in NAMES[what] if text.get(name) is not None)
    return next((whole_number(text, name) for name in declared), None)


def required_fact(text: Config, what: str) -> int:
    """The same, 1 or more; ValueError that lists the names if it is not declared."""
    value = find_fact(text, what)
    if value is None:
        raise ValueError(f"config: {' or '.join(NAMES[what])} is missing and has no fallback")
    return at_least(1, f"config: {NAMES[what][0]}", value)


TEXT_PARTS = ("text_config", "language_config", "llm_config", "thinker_config")


def read_config(config: Any) -> dict[str, Any]:
    """A config as a plain dict: from a dict, a JSON file, a model's folder or transformers."""
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    if isinstance(config, Mapping):
        return dict(config)
    path = Path(config)
    path = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"config = {str(config)!r}: no such file, nor a folder with one") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"config = {str(path)!r}: not a JSON file ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"config = {str(path)!r}: a JSON object is needed, not a list or value")
    return found


def text_part(config: Config) -> dict[str, Any]:
    """The part that describes the language model, with its class's own defaults filled in."""
    for name in TEXT_PARTS:
        if isinstance(config.get(name), Mapping):
            dtype = config.get("dtype") or config.get("torch_dtype")
            return text_part({"dtype": dtype} | dict(config[name]))
    if config.get("is_encoder_decoder"):
        raise ValueError("config: is_encoder_decoder is true; only decoders are sized")
    attention = config.get("attn_config")
    nested = {"num_kv_heads": attention.get("kv_n_heads")} if isinstance(attention, Mapping) else {}
    given = {name: value for name, value in config.items() if value is not None}
    return {**CLASS_DEFAULTS.get(str(config.get("model_type")), {}), **nested, **given}


def _llama_like(
    kind: str,
    layers: int,
    heads: int,
    kv: int,
    hidden: int,
    mlp: int,
    vocab: int,
    context: int,
    **more: Any,
) -> dict[str, Any]:
    return {
        "model_type": kind, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv, "hidden_size": hidden, "intermediate_size": mlp,
        "vocab_size": vocab, "max_position_embeddings": context, "torch_dtype": "bfloat16",
    } | more  # fmt: skip


KNOWN: dict[str, dict[str, Any]] = {
    "llama-3-8b": _llama_like("llama", 32, 32, 8, 4096, 14336, 128256, 8192),
    "llama-3-70b": _llama_like("llama", 80, 64, 8, 8192, 28672, 128256, 8192),
    "mistral-7b": _llama_like("mistral", 32, 32, 8, 4096, 14336, 32000, 32768, sliding_window=4096),
    "mixtral-8x7b": _llama_like(
        "mixtral", 32, 32, 8, 4096, 14336, 32000, 32768, num_local_experts=8
    ),
    "qwen2.5-7b": _llama_like("qwen2", 28, 28, 4, 3584, 18944, 152064, 131072),
    "qwen3-4b": _llama_like(
        "qwen3", 36, 32, 8, 2560, 9728, 151936, 40960, head_dim=128, tie_word_embeddings=True
    ),
    "smollm2-135m": _llama_like(
        "llama", 30, 9, 3, 576, 1536, 49152, 8192, tie_word_embeddings=True
    ),
}
