# Exported from book/appendices/A4_device_sampling.py by tools/export.py; edit the chapter, not this file.
"""Noise, temperature and the largest sum in one reading of the logits: a kernel."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from paged_kv.triton_device import jit, limits_of, tl

TILE_TOKENS = 1024  # tokens that a program looks at together
PROGRAMS = 8  # for each multiprocessor
MOST_PARTS = 128  # shares of a row, each a program


@jit
def mixed32(x):
    """`mix32` of 32-bit words that are really 32 bits wide."""
    x = x ^ (x >> 16)
    x = x * 0x21F0AAAD
    x = x ^ (x >> 15)
    x = x * 0x735A2D97
    return x ^ (x >> 15)


@jit
def gumbel_of(words):
    """`gumbel`, with a series where 1 - uniform would lose the digits that decide."""
    u = tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    tail = 1 / 4 + u * (1 / 5 + u * (1 / 6 + u * (1 / 7)))
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * tail)))
    return -tl.log(tl.where(u < 0.0625, series, -tl.log(1 - u)))


@jit
def key_word(settings, row, WIDTH: tl.constexpr, at: tl.constexpr):
    """One word of a row's key, which stands among its settings as a float64."""
    return tl.load(settings + row * WIDTH + at).to(tl.int64).to(tl.uint32)


@jit(do_not_specialize=["vocab", "share"])
def draw_kernel(
    logits,
    stride,
    vocab,
    settings,
    rows,
    positions,
    values,
    ids,
    share,
    WIDTH: tl.constexpr,
    KEY: tl.constexpr,
    TILE: tl.constexpr,
):
    """The best of `share` tokens of one row: its sum (NaN if any is), and its id."""
    line, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.maximum(tl.load(rows + line), 0)
    place = tl.load(positions + line).to(tl.uint32)
    temperature = tl.load(settings + row * WIDTH).to(tl.float32)
    summand = mixed32(place ^ key_word(settings, row, WIDTH, KEY))
    summand = mixed32(summand ^ key_word(settings, row, WIDTH, KEY + 2))
    factor = mixed32(place ^ key_word(settings, row, WIDTH, KEY + 1))
    factor = (mixed32(factor ^ key_word(settings, row, WIDTH, KEY + 3)) >> 1) | 1
    lanes = tl.arange(0, TILE)
    best = tl.full((TILE,), float("-inf"), tl.float32)
    at = tl.zeros((TILE,), tl.int32)
    for start in range(part * share, tl.minimum((part + 1) * share, vocab), TILE):
        token = start + lanes
        x = tl.load(logits + line * stride + token, mask=token < vocab, other=float("-inf"))
        score = x.to(tl.float32)
        if temperature > 0:
            words = mixed32(mixed32(token.to(tl.uint32)) * factor + summand)
            score += temperature * gumbel_of(words)
        better = (score > best) | (score != score)
        best, at = tl.where(better, score, best), tl.where(better, token, at)
    broken = tl.max((best != best).to(tl.int32), 0)
    top = tl.max(tl.where(best == best, best, float("-inf")), 0)
    first = tl.min(tl.where(best == top, at, vocab), 0)
    out = line * tl.num_programs(1) + part
    tl.store(values + out, tl.where(broken > 0, float("nan"), top))
    tl.store(ids + out, first)


@jit(do_not_specialize=["parts"])
def join_kernel(values, ids, rows, tokens, parts, PARTS: tl.constexpr):
    """The best share of one row; -1 for padding, and where the best is not finite."""
    line = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    inside = part < parts
    value = tl.load(values + line * parts + part, mask=inside, other=float("-inf"))
    token = tl.load(ids + line * parts + part, mask=inside, other=2147483647)
    broken = tl.max((value != value).to(tl.int32), 0)
    best = tl.max(tl.where(value == value, value, float("-inf")), 0)
    first = tl.min(tl.where(value == best, token, 2147483647), 0).to(tl.int64)
    sound = (broken == 0) & (best > float("-inf")) & (best < float("inf"))
    sound = sound & (tl.load(rows + line) >= 0)
    tl.store(tokens + line, tl.where(sound, first, -1))


@lru_cache
def processors_of(device: torch.device) -> int:
    """How many multiprocessors; asked in every step, so the answer is kept."""
    return limits_of(device).processors


def launch_draw(
    logits: Tensor, settings: Tensor, key: int, rows: Tensor, positions: Tensor
) -> Tensor:
    """`draw_tokens` in one reading of the logits; a row's words of key begin at column `key`.

    Args: `logits` [S, V], its rows contiguous; `settings` float64 [num_rows, n], column 0 the
    temperature; `rows`, `positions` int64 [S].  Returns: int64 [S], -1 also for a row of -1.
    """
    lines, vocab = logits.shape
    tiles = -(-vocab // TILE_TOKENS)
    wanted = -(-PROGRAMS * processors_of(logits.device) // max(1, lines))
    share = -(-tiles // min(tiles, wanted, MOST_PARTS)) * TILE_TOKENS
    parts = -(-vocab // share)
    values = torch.empty(lines, parts, device=logits.device)
    ids = torch.empty(lines, parts, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(lines, dtype=torch.int64, device=logits.device)
    if lines:
        draw_kernel[(lines, parts)](
            logits, logits.stride(0), vocab, settings, rows, positions, values, ids, share,
            WIDTH=settings.shape[1], KEY=key, TILE=TILE_TOKENS, num_warps=4,
        )  # fmt: skip
        join_kernel[(lines,)](values, ids, rows, tokens, parts, PARTS=MOST_PARTS, num_warps=1)
    return tokens
