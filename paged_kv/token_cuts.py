# Exported from book/appendices/A4_device_sampling.py by tools/export.py; edit the chapter, not this file.
"""Which tokens may be chosen at all: top-k, top-p, min-p by thresholds, without sorting."""

from __future__ import annotations

import torch
from torch import Tensor

SCALE = 2.0**40  # weights are counted in units of 2**-40 of the likeliest token's
SMALL_K = 1024  # up to here a partial selection is quicker than a search


def ordered_bits(x: Tensor) -> Tensor:
    """Integers, int32, in the same order as the float32 numbers `x`."""
    bits = (x + 0.0).view(torch.int32)  # adding zero makes one of the two zeros
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def boundary(order: Tensor, weights: Tensor, limit: Tensor) -> Tensor:
    """The smallest integer at or below which a row's tokens weigh more than `limit`.

    Args: `order` int32 [n, V]; `weights` int64 [n, V], not negative; `limit` int64 [n, 1], less
    than the sum of all.  Returns: int64 [n, 1].  Sums of integers: any order of summing is right.
    """
    low = torch.full_like(limit, -(2**31))
    high = torch.full_like(limit, 2**31 - 1)
    for _ in range(32):
        middle = (low + high) >> 1
        weight = torch.where(order <= middle, weights, 0).sum(-1, keepdim=True)
        high = torch.where(weight > limit, middle, high)
        low = torch.where(weight > limit, low, middle + 1)
    return high


def within_top_k(x: Tensor, k: Tensor, largest_k: int) -> Tensor:
    """Which tokens are no smaller than their row's k-th largest, bool [n, V].

    Args: `x` float32 [n, V]; `k` int64 [n, 1], 0 for all; `largest_k`, the largest of them.
    """
    if largest_k <= SMALL_K:
        top = x.topk(min(largest_k, x.shape[1])).values
        last = top.gather(-1, (k - 1).clamp(0, top.shape[1] - 1))
        return (x >= last) | (k == 0)
    order = ordered_bits(x)
    limit = torch.where(k > 0, x.shape[1] - k, -1).clamp(min=-1)
    return order >= boundary(order, torch.ones_like(order, dtype=torch.int64), limit)


def within_top_p(x: Tensor, weights: Tensor, p: Tensor) -> Tensor:
    """Which tokens are among the likeliest that together reach p, bool [n, V].

    Args: `x` float32 [n, V]; `weights` int64 [n, V], 0 for a token cut off before; `p` float64
    [n, 1].  Of tokens that tie at the end only as many stay as are needed, those of lowest id.
    """
    total = weights.sum(-1, keepdim=True)
    limit = ((1 - p) * total).long().minimum(total - 1)
    limit = torch.where(p < 1, limit, -1)
    order = ordered_bits(x)
    last = boundary(order, weights, limit)
    ties = order == last
    below = torch.where(order < last, weights, 0).sum(-1, keepdim=True)
    each = torch.where(ties, weights, 0).amax(-1, keepdim=True).clamp(min=1)
    dropped = ((limit - below) // each).clamp(min=0)
    rank = ties.cumsum(-1)
    return (order > last) | (ties & (rank <= rank[:, -1:] - dropped))


def cut_tokens(x: Tensor, temperature: Tensor, knobs: Tensor, largest_k: int) -> Tensor:
    """The logits, -inf where top-k, then top-p, then min-p cut a token off.

    Args: `x` float32 [n, V]; `temperature` float32 [n, 1], not 0; `knobs` float64 [n, 3]: k, p,
    min-p of each row; `largest_k`, 0 if no row has one.
    """
    k, p, min_p = knobs.unbind(-1)
    kept = torch.ones_like(x, dtype=torch.bool)
    if largest_k:
        kept = within_top_k(x, k.long()[:, None], largest_k)
    share = ((x - x.amax(-1, keepdim=True)) / temperature).exp()
    weights = torch.where(kept, (share * SCALE).long(), 0)
    kept &= within_top_p(x, weights, p[:, None])
    kept &= share >= min_p.float()[:, None]
    return torch.where(kept, x, -torch.inf)
