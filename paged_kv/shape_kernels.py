# Exported from book/appendices/A4_device_sampling.py by tools/export.py; edit the chapter, not this file.
"""Penalties and cuts as kernels: what is drawn from, made in a few readings of the logits."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import torch
from torch import Tensor

from paged_kv.triton_device import jit, tl


@jit
def order_of(x):
    """`ordered_bits` in a kernel."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def weight_of(x, top, rate, COUNT: tl.constexpr):
    """One, or the probability in units of 2**-40 of the likeliest token's."""
    if COUNT:
        return tl.full(x.shape, 1, tl.int64)
    return (tl.exp((x - top) * rate) * 1099511627776.0).to(tl.int64)


@jit
def survey_pivots(x, vocab, pivots, top, rate, COUNT: tl.constexpr, TILE: tl.constexpr):
    """What weighs the part of a row that is no smaller than a pivot, for eight pivots."""
    lanes = tl.arange(0, TILE)
    sums = tl.zeros((8, TILE), tl.int64)
    for start in range(0, vocab, TILE):
        value = tl.load(x + start + lanes, mask=start + lanes < vocab, other=float("-inf"))
        weight = tl.where(start + lanes < vocab, weight_of(value, top, rate, COUNT), 0)
        sums += tl.where(value[None, :] >= pivots[:, None], weight[None, :], 0)
    return tl.sum(sums, 1)


@jit
def enclose(x, vocab, need, p, top, scale, rate, COUNT: tl.constexpr, TILE: tl.constexpr):
    """Logits between which the boundary lies, and what is needed below the upper one."""
    which = tl.arange(0, 8)
    pivots = top - scale * tl.exp2(which.to(tl.float32) - 2)
    pivots = tl.where(which < 7, pivots, float("-inf"))
    sums = survey_pivots(x, vocab, pivots, top, rate, COUNT, TILE)
    if not COUNT:
        total = tl.max(sums, 0)
        need = total - tl.minimum(((1 - p) * total).to(tl.int64), total - 1)
    low = tl.max(tl.where(sums >= need, pivots, float("-inf")), 0)
    high = tl.min(tl.where(sums >= need, float("inf"), pivots), 0)
    above = tl.max(tl.where(sums >= need, 0, sums), 0)
    if low > float("-inf"):
        start = tl.minimum(high, top)
        pivots = start - (start - low) * ((which + 1).to(tl.float32) * 0.125)
        pivots = tl.where(which < 7, pivots, low)
        sums = survey_pivots(x, vocab, pivots, top, rate, COUNT, TILE)
        low = tl.max(tl.where(sums >= need, pivots, low), 0)
        high = tl.min(tl.where(sums >= need, high, pivots), 0)
        above = tl.max(tl.where(sums >= need, above, sums), 0)
    return low, high, need - above


@jit
def gather_between(x, kept, vocab, low, high, TILE: tl.constexpr):
    """Copy what is at least `low` and less than `high` to the front of `kept`; how many."""
    lanes = tl.arange(0, TILE)
    count = tl.zeros((), tl.int32)
    for start in range(0, vocab, TILE):
        value = tl.load(x + start + lanes, mask=start + lanes < vocab, other=float("nan"))
        mine = (value >= low) & (value < high)
        tl.store(kept + count + tl.cumsum(mine.to(tl.int32), 0) - 1, value, mask=mine)
        count += tl.sum(mine.to(tl.int32), 0)
    tl.debug_barrier()  # what was stored is read by other threads of the program
    return count


@jit
def weigh(x, count, bound, floor, top, rate, COUNT: tl.constexpr, TILE: tl.constexpr):
    """What the logits weigh whose order is at least `bound` and `floor`, and the orders next to it.

    Returns: the weight; the smallest order that is not below the bound; the largest that is.
    """
    lanes = tl.arange(0, TILE)
    bound = tl.maximum(bound, floor).to(tl.int32)
    total = tl.zeros((TILE,), tl.int64)
    up = tl.full((TILE,), 2147483647, tl.int32)
    down = tl.full((TILE,), -2147483648, tl.int32)
    for start in range(0, count, TILE):
        within = start + lanes < count
        value = tl.load(x + start + lanes, mask=within, other=float("-inf"))
        order = order_of(value)
        above = within & (order >= bound)
        total += tl.where(above, weight_of(value, top, rate, COUNT), 0)
        up = tl.minimum(up, tl.where(above, order, 2147483647))
        down = tl.maximum(down, tl.where(within & (order < bound), order, -2147483648))
    return tl.sum(total, 0), tl.min(up, 0).to(tl.int64), tl.max(down, 0).to(tl.int64)


@jit
def search_order(x, count, need, low, top, rate, COUNT: tl.constexpr, TILE: tl.constexpr):
    """The largest order such that what lies no lower weighs at least `need`."""
    floor, high = low, order_of(top).to(tl.int64)
    while low < high:
        middle = low + ((high - low + 1) >> 1)
        weight, up, down = weigh(x, count, middle, floor, top, rate, COUNT, TILE)
        low = tl.where(weight >= need, tl.maximum(up, low), low)
        high = tl.where(weight >= need, high, tl.maximum(down, low))
    return low


@jit
def top_and_mean(x, vocab, TILE: tl.constexpr):
    """The largest logit of a row, and the mean of the finite ones."""
    lanes = tl.arange(0, TILE)
    best = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    finite = tl.zeros((TILE,), tl.float32)
    for start in range(0, vocab, TILE):
        value = tl.load(x + start + lanes, mask=start + lanes < vocab, other=float("-inf"))
        best = tl.maximum(best, value)
        real = value > float("-inf")
        total += tl.where(real, value, 0.0)
        finite += tl.where(real, 1.0, 0.0)
    return tl.max(best, 0), tl.sum(total, 0) / tl.maximum(tl.sum(finite, 0), 1.0)


@jit(do_not_specialize=["vocab"])
def cut_kernel(
    x,
    kept,
    vocab,
    settings,
    rows,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write one row with -inf where top-k, then top-p, then min-p cut a token off."""
    line = tl.program_id(0).to(tl.int64)
    x, kept = x + line * vocab, kept + line * vocab
    mine = settings + tl.maximum(tl.load(rows + line), 0) * WIDTH
    temperature = tl.load(mine).to(tl.float32)
    temperature = tl.where(temperature > 0, temperature, 1.0)
    k, p = tl.load(mine + TOP_K).to(tl.int64), tl.load(mine + TOP_K + 1)
    min_p = tl.load(mine + TOP_K + 2).to(tl.float32)
    top, mean = top_and_mean(x, vocab, TILE)
    rate, need = 1.0 / temperature, k
    low, high = tl.full((), float("-inf"), tl.float32), tl.full((), float("inf"), tl.float32)
    if k > 0:  # top-p then looks at all that top-k leaves, so nothing is left out above
        low, _, _ = enclose(x, vocab, k, p, top, (top - mean) * 0.125, 1.0, True, TILE)
    elif p < 1:
        low, high, need = enclose(x, vocab, k, p, top, temperature, rate, False, TILE)
    last = order_of(low).to(tl.int64)
    stay = tl.full((), 2147483647, tl.int64)  # of the tokens that tie at the end
    if (k > 0) | (p < 1):
        count = gather_between(x, kept, vocab, low, high, TILE)
        if k > 0:
            last = search_order(kept, count, k, last, top, 1.0, True, TILE)
        if p < 1:
            if k > 0:
                total, _, _ = weigh(kept, count, last, last, top, rate, False, TILE)
                need = total - tl.minimum(((1 - p) * total).to(tl.int64), total - 1)
            last = search_order(kept, count, need, last, top, rate, False, TILE)
            stay = ties_that_stay(kept, count, need, last, top, rate, TILE)
    tl.debug_barrier()
    keep_row(x, kept, vocab, last, stay, min_p, top, rate, TILE)


@jit
def ties_that_stay(x, count, need, last, top, rate, TILE: tl.constexpr):
    """Of the tokens at the boundary, how many are needed."""
    many, _, _ = weigh(x, count, last, last, top, rate, True, TILE)
    more, _, _ = weigh(x, count, last + 1, last, top, rate, True, TILE)
    weight, _, _ = weigh(x, count, last, last, top, rate, False, TILE)
    above, _, _ = weigh(x, count, last + 1, last, top, rate, False, TILE)
    ties = many - more
    each = tl.maximum((weight - above) // tl.maximum(ties, 1), 1)
    return ties - (weight - need) // each


@jit
def keep_row(x, kept, vocab, last, stay, min_p, top, rate, TILE: tl.constexpr):
    """Copy what lies above `last`, and the first `stay` of what equals it."""
    lanes = tl.arange(0, TILE)
    seen = tl.zeros((), tl.int64)
    for start in range(0, vocab, TILE):
        inside = start + lanes < vocab
        value = tl.load(x + start + lanes, mask=inside, other=float("-inf"))
        order = order_of(value)
        ties = inside & (order == last)
        rank = seen + tl.cumsum(ties.to(tl.int32), 0)
        stays = (order > last) | (ties & (rank <= stay))
        stays = stays & (tl.exp((value - top) * rate) >= min_p)
        tl.store(kept + start + lanes, tl.where(stays, value, float("-inf")), mask=inside)
        seen += tl.sum(ties.to(tl.int32), 0)


def launch_cut(x: Tensor, settings: Tensor, top_k: int, rows: Tensor, tile: int = 2048) -> Tensor:
    """`cut_tokens` of float32 logits [n, V]; k, p, min-p stand from column `top_k`."""
    x = x.contiguous()
    kept = torch.empty_like(x)
    if len(x):
        cut_kernel[(len(x),)](
            x, kept, x.shape[1], settings, rows,
            WIDTH=settings.shape[1], TOP_K=top_k, TILE=tile, num_warps=16,
        )  # fmt: skip
    return kept


@jit(do_not_specialize=["vocab"])
def penalise_kernel(
    logits,
    stride,
    x,
    vocab,
    seen,
    settings,
    rows,
    WIDTH: tl.constexpr,
    REPETITION: tl.constexpr,
    TILE: tl.constexpr,
):
    """`penalised` for a tile of one row, straight from its counts; float32 comes out."""
    line = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    row = tl.maximum(tl.load(rows + line), 0)
    mine = settings + row * WIDTH + REPETITION
    repetition = tl.load(mine).to(tl.float32)
    presence, frequency = tl.load(mine + 1).to(tl.float32), tl.load(mine + 2).to(tl.float32)
    inside = token < vocab
    value = tl.load(logits + line * stride + token, mask=inside).to(tl.float32)
    was = tl.load(seen + row * vocab + token, mask=inside, other=0)
    less = tl.where(value < 0, value * repetition, tl.div_rn(value, repetition))
    value = tl.where(was > 0, less, value)
    value -= frequency * (was >> 1).to(tl.float32)
    value -= tl.where(was > 1, presence, 0.0)
    tl.store(x + line * vocab + token, value, mask=inside)


def launch_penalise(
    logits: Tensor, seen: Tensor, settings: Tensor, repetition: int, rows: Tensor
) -> Tensor:
    """`penalised` logits, float32 [n, V]; the three penalties stand from column `repetition`."""
    lines, vocab = logits.shape
    x = torch.empty(lines, vocab, device=logits.device)
    if lines:
        penalise_kernel[(lines, -(-vocab // 2048))](
            logits, logits.stride(0), x, vocab, seen, settings, rows,
            WIDTH=settings.shape[1], REPETITION=repetition, TILE=2048,
        )  # fmt: skip
    return x
