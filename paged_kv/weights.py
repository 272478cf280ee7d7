# Exported from book/appendices/A3_real_configs.py by tools/export.py; edit the chapter, not this file.
"""What a model's weights take, from its files or, for plain decoders, from its shapes."""

import json
from pathlib import Path
from typing import Any

from paged_kv.config_facts import find_fact, read_config, required_fact, text_part, whole_number
from paged_kv.configs import element_type, layer_shape
from paged_kv.sizing import BITS

# model type -> (matrices of one MLP, output embedding shared with the input's by default)
FAMILIES: dict[str, tuple[int, bool]] = {
    **dict.fromkeys(("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"), (3, False)),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), (3, True)),
    **dict.fromkeys(("gpt2", "opt", "bloom", "mpt", "falcon", "gpt_bigcode"), (2, True)),
    "gptj": (2, False),
    "phi3": (3, False),
}


def count_parameters(config: Any) -> int:
    """Parameters of a plain decoder, from its shapes, norms and biases left out.

    Raises: ValueError where the family's formula is not known.
    """
    text = text_part(read_config(config))
    kind = text.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(f"weights: no formula for model_type {kind!r}; give their size")
    matrices, tied = FAMILIES[kind]
    hidden, layers, heads = (required_fact(text, what) for what in ("hidden", "layers", "heads"))
    kv_heads, head_size, _ = layer_shape(text, 1)
    experts = find_fact(text, "experts") or 1
    wide = whole_number(text, "moe_intermediate_size") if experts > 1 else 0
    inner = wide or find_fact(text, "mlp") or 4 * hidden
    attention = 2 * hidden * head_size * (heads + kv_heads)
    mlp = matrices * hidden * inner * experts + (hidden * experts if experts > 1 else 0)
    embeddings = 1 if text.get("tie_word_embeddings", tied) else 2
    return layers * (attention + mlp) + embeddings * required_fact(text, "vocabulary") * hidden


def weight_bytes(config: Any) -> int:
    """Bytes of a model's weights: from its files where they are there, else from its shapes."""
    if isinstance(config, str | Path) and Path(config).is_dir():
        index = Path(config) / "model.safetensors.index.json"
        if index.exists():
            return int(json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"])
        files = list(Path(config).glob("model*.safetensors"))
        if files:
            return sum(file.stat().st_size for file in files)
    facts = read_config(config)
    if facts.get("quantization_config"):
        raise ValueError("weights: the config says they are quantised; give their size")
    dtype, _ = element_type(text_part(facts), None)
    return count_parameters(facts) * BITS[dtype] // 8
