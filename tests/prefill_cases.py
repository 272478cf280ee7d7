"""Packed batches over scattered blocks, and the oracle's answer: for chapter 12, on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paged_kv.attention import paged_attention
from paged_kv.kv_store import KVStore
from paged_kv.sizing import KVSpec

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}  # relative, root mean square


@dataclass
class Case:
    """A step: new tokens by sequence, over a store with one layer."""

    store: KVStore
    query: Tensor
    block_table: Tensor
    rows: Tensor
    cu_seqlens: Tensor
    seq_lens: Tensor

    @property
    def step(self) -> tuple[Tensor, ...]:
        """The tensors in the order of paged_attention's arguments."""
        return self.query, self.store.keys(0), self.store.values(0), self.block_table, self.cu_seqlens, self.seq_lens


def make(
    counts: Sequence[int],
    lens: Sequence[int],
    heads: tuple[int, int] = (4, 2),
    head_size: int = 32,
    block_size: int = 8,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    seed: int = 0,
    gone: Sequence[int] | None = None,
    fill: float = float("nan"),
) -> Case:
    """Sequences of `lens` tokens, the last `counts` of them new, in random blocks; unwritten slots hold `fill`.

    Rows of the table are shuffled, entries past a sequence are -1, and so are the first `gone` of each sequence.
    """
    random = torch.Generator().manual_seed(seed)
    blocks = [-(-max(n, 0) // block_size) for n in lens]
    ids = torch.randperm(sum(blocks) + 3, generator=random)
    store = KVStore(KVSpec(1, heads[1], head_size, "fp32"), len(ids), block_size, dtype=dtype, fill=fill)
    table = torch.full((len(lens) + 2, max(blocks) + 2), -1, dtype=torch.int32)
    rows = torch.randperm(len(lens) + 2, generator=random)[: len(lens)]
    for s, (row, count) in enumerate(zip(rows.tolist(), blocks, strict=True)):
        mine = ids[sum(blocks[:s]) : sum(blocks[: s + 1])]
        table[row, :count] = mine.int()
        slots = (mine[:, None] * block_size + torch.arange(block_size)).flatten()[: max(lens[s], 0)]
        store.write(0, *torch.randn(2, len(slots), heads[1], head_size, generator=random), slots)
        table[row, : gone[s] if gone else 0] = -1
    cu = torch.tensor([0, *counts]).cumsum(0).int()
    query = torch.randn(sum(counts), heads[0], head_size, generator=random).to(dtype)
    store.tensors = [tensor.to(device) for tensor in store.tensors]
    step = (query, table, rows, cu, torch.tensor(lens, dtype=torch.int32))
    return Case(store, *(tensor.to(device) for tensor in step))


def expected(case: Case, **options: Any) -> tuple[Tensor, Tensor]:
    """What chapter 04 says, in float32 on the CPU."""
    query, keys, values, *rest = (tensor.cpu() for tensor in case.step)
    options = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in options.items()}
    return paged_attention(query.float(), keys.float(), values.float(), *rest, rows=case.rows.cpu(), **options)


def error(output: Tensor, right: Tensor) -> float:
    """Root mean square of the difference over that of `right`; inf where a number is not finite."""
    output, right = output.double().cpu(), right.double().cpu()
    if not output.isfinite().all():
        return float("inf")
    return float((output - right).norm() / right.norm().clamp_min(1e-30))


def agree(case: Case, found: tuple[Tensor, Tensor], **options: Any) -> None:
    """Assert that output and lse are the oracle's."""
    (output, lse), (right, right_lse) = found, expected(case, **options)
    assert error(output, right) < TOLERANCE[output.dtype]
    empty = right_lse == -torch.inf
    assert torch.equal(lse.cpu() == -torch.inf, empty)
    assert not output.cpu()[empty].any(), "an empty row must give 0"
    assert torch.allclose(lse.cpu()[~empty], right_lse[~empty], atol=2e-3, rtol=1e-3)
