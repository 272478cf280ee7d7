"""Random paged batches for the decode kernels, poisoned wherever nobody may look, and the float64 oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paged_kv.attention import paged_attention_numpy
from paged_kv.decode_plan import DecodePlan, Tiles
from paged_kv.kernels import decode_attention

TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


@dataclass(frozen=True)
class Case:
    """A batch of one new token a sequence, and the options of attention."""

    query: Tensor
    pool: Tensor  # [num_blocks, 2, block_size, num_kv_heads, head_size]
    table: Tensor
    lens: Tensor
    rows: Tensor | None
    options: dict[str, Any]

    @property
    def keys(self) -> Tensor:
        return self.pool[:, 0]

    @property
    def values(self) -> Tensor:
        return self.pool[:, 1]


def make_case(
    lens: Sequence[int],
    heads: tuple[int, int],
    size: int,
    block: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    rows: Sequence[int] | None = None,
    shared: int = 0,
    sinks: bool = False,
    device: str = "cpu",
    seed: int = 0,
    poison: float = float("nan"),
    **options: Any,
) -> Case:
    """Scattered blocks, the first `shared` of them in every row.

    Unwritten slots hold `poison`; entries behind the end of a row name live blocks (stale ids, never to be read
    through), those that left the window are -1.
    """
    gen = torch.Generator().manual_seed(seed)
    need = [-(-max(n, 0) // block) for n in lens]
    total = sum(need) + 3
    ids = torch.randperm(total, generator=gen)
    pool = torch.randn(total, 2, block, heads[1], size, generator=gen).to(dtype)
    table = torch.randint(0, total, (max(rows or [len(lens) - 1]) + 2, max(need) + 2), generator=gen).int()
    used = torch.zeros(total, block, dtype=torch.bool)
    start = 0
    for s, n in enumerate(lens):
        row = s if rows is None else rows[s]
        own = ids[start : start + need[s]]
        own = torch.cat([ids[: min(shared, need[s])], own[min(shared, need[s]) :]])
        table[row, : need[s]] = own.int()
        for b, block_id in enumerate(own.tolist()):
            used[block_id, : min(block, n - b * block)] = True
        if options.get("window") is not None:
            table[row, : max(0, n - options["window"]) // block] = -1
        start += need[s]
    pool.permute(0, 2, 1, 3, 4)[~used] = poison
    query = torch.randn(len(lens), heads[0], size, generator=gen).to(dtype)
    options |= {"sinks": torch.randn(heads[0], generator=gen).to(device)} if sinks else {}
    on = torch.device(device)
    return Case(
        query.to(on),
        pool.to(on),
        table.to(on),
        torch.tensor(lens, dtype=torch.int32, device=on),
        None if rows is None else torch.tensor(rows, dtype=torch.int32, device=on),
        options,
    )


def oracle(case: Case) -> tuple[Tensor, Tensor]:
    """Chapter 04's float64 attention, sequence by sequence."""
    pool, table = case.pool.double().cpu().numpy(), case.table.cpu().numpy()
    sinks = case.options.get("sinks")
    options = case.options | {"sinks": None if sinks is None else sinks.double().cpu().numpy()}
    found = []
    for s, n in enumerate(case.lens.tolist()):
        row = table[s if case.rows is None else int(case.rows[s])]
        query = case.query[s : s + 1].double().cpu().numpy()
        found.append(paged_attention_numpy(query, pool[:, 0], pool[:, 1], row, n, **options))
    outputs, sums = zip(*found, strict=True)
    return torch.from_numpy(np.concatenate(outputs)), torch.from_numpy(np.concatenate(sums))


def plan_for(case: Case, batch_invariant: bool = False, **changes: Any) -> DecodePlan:
    """A plan of the heuristic's tiles, some fields changed; parts start as NaN, to show any that is not written."""
    (batch, heads, size), kv_heads = case.query.shape, case.pool.shape[3]
    options = {"dtype": case.query.dtype, "window": case.options.get("window"), "batch_invariant": batch_invariant}
    plan = DecodePlan(batch, heads, kv_heads, size, case.query.device, **options)
    if changes:
        plan = DecodePlan(
            batch, heads, kv_heads, size, case.query.device, tiles=replace(plan.tiles, **changes), **options
        )
    plan.part.fill_(float("nan"))
    plan.part_lse.fill_(float("nan"))
    return plan


def run(case: Case, plan: DecodePlan | None = None) -> tuple[Tensor, Tensor]:
    """One decode step into outputs that hold NaN."""
    output = torch.full_like(case.query, float("nan"))
    lse = torch.full(case.query.shape[:2], float("nan"), device=case.query.device)
    if plan is not None:
        plan.update(case.lens, case.rows)
    return decode_attention(
        case.query, case.keys, case.values, case.table, case.lens, rows=case.rows, plan=plan, output=output, lse=lse,
        **case.options,
    )  # fmt: skip


def assert_right(case: Case, plan: DecodePlan | None = None, again: bool = False) -> tuple[Tensor, Tensor]:
    """Run a case and hold it against the oracle; `again` with the same plan, as the next layer does: the same bits."""
    output, lse = run(case, plan)
    right, right_lse = oracle(case)
    got = output.double().cpu()
    assert torch.isfinite(got).all()
    error = float((got - right).norm() / right.norm().clamp_min(1e-30))
    assert error < TOLERANCE[case.query.dtype], f"relative error {error:.1e}"
    real = torch.isfinite(right_lse)
    assert torch.equal(torch.isfinite(lse.cpu()), real)
    assert bool((lse.cpu()[~real] == -torch.inf).all())
    allowed = 2e-5 if case.query.dtype == torch.float32 else 1e-3
    assert float((lse.cpu().double() - right_lse)[real].abs().max() if real.any() else 0) < allowed
    assert not again or torch.equal(output, run(case, plan)[0])
    return output, lse


def small(**changes: Any) -> dict[str, Any]:
    """Tiles that the interpreter can afford."""
    return {"rows": 16, "stages": 2, "programs": 3} | changes


__all__ = ["Case", "Tiles", "assert_right", "make_case", "oracle", "plan_for", "run", "small"]
