"""Small random models and requests for the engine's tests, on any device."""

from __future__ import annotations

import random
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def small_llama(device: str = "cpu", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Two layers, four query and two KV heads, 300 tokens; answers that vary."""
    options: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 300,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
    }
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**options | changes)).to(device=device, dtype=dtype).eval()


def random_prompts(count: int, longest: int = 60, vocab: int = 300, seed: int = 0) -> list[list[int]]:
    """Prompts of 1 to `longest` tokens."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def tokens_of(answers: list[Any]) -> list[list[int]]:
    """The token ids of each answer's first sample."""
    return [answer.texts[0].token_ids for answer in answers]
