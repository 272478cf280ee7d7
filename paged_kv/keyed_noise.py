# Exported from book/appendices/A4_device_sampling.py by tools/export.py; edit the chapter, not this file.
"""Random numbers that are looked up, not drawn: by seed, sample, position and token."""

from __future__ import annotations

import struct
from hashlib import blake2b

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
CHUNK = 1 << 14  # tokens of the vocabulary that are looked at together


def mix32(x: Tensor) -> Tensor:
    """Scramble 32-bit words held in int64; a bijection, the same bits on every device.

    No product overflows: a word is below 2**32 and both factors are below 2**31.
    """
    x = x ^ (x >> 16)
    x = (x * 0x21F0AAAD) & MASK
    x = x ^ (x >> 15)
    x = (x * 0x735A2D97) & MASK
    return x ^ (x >> 15)


def row_key(seed: int, sample_index: int) -> tuple[int, int, int, int]:
    """Four 32-bit words that stand for one sample of one request, made on the host."""
    digest = blake2b(struct.pack("<QQ", seed, sample_index), digest_size=16).digest()
    first, second, third, fourth = struct.unpack("<4I", digest)
    return first, second, third, fourth


def position_keys(keys: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """A summand and an odd factor, each [S, 1], for each row's place in its text.

    Args: `keys` int64 [S, 4], each row a `row_key`; `positions` int64 [S].
    """
    place = (positions & MASK)[:, None]
    pair = mix32(mix32(place ^ keys[:, 0:2]) ^ keys[:, 2:4])
    return pair[:, :1], pair[:, 1:] >> 1 | 1


def noise_words(summand: Tensor, factor: Tensor, ids: Tensor) -> Tensor:
    """Uniform 32-bit words [S, n] in int64 for tokens `ids` [n]; summand, factor [S, 1]."""
    return mix32((mix32(ids) * factor + summand) & MASK)


def gumbel(words: Tensor) -> Tensor:
    """Gumbel noise, float32, of uniform words: minus the log of an exponential waiting time.

    The uniform number is (word + 1/2) / 2**32, finest near 0, where short waits come from.
    """
    uniform = ((words.float() + 0.5) * 2**-32).clamp(max=1 - 2**-24)
    return -torch.log(-torch.log1p(-uniform))


def draw_tokens(logits: Tensor, temperature: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    """Choose a token a row: the largest of logit + temperature x noise.

    Args: `logits` [S, V], any float; `temperature` float32 [S], 0 is greedy; `keys` int64 [S, 4];
    `positions` int64 [S].  Returns: int64 [S]; -1 where a row has NaN or nothing finite.
    """
    summand, factor = position_keys(keys, positions)
    best = torch.full((len(logits),), -torch.inf, device=logits.device)
    tokens = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    for start in range(0, logits.shape[1], CHUNK):
        part = logits[:, start : start + CHUNK].float()
        ids = torch.arange(start, start + part.shape[1], device=logits.device)
        noise = gumbel(noise_words(summand, factor, ids))
        score, at = (part + temperature[:, None] * noise).max(-1)
        better = (score > best) | score.isnan()
        best = torch.where(better, score, best)
        tokens = torch.where(better, at + start, tokens)
    return tokens.masked_fill(~best.isfinite(), -1)
