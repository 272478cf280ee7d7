# Exported from book/05_guest_model.py by tools/export.py; edit the chapter, not this file.
"""The new tokens of one step, packed without padding, and where their K/V live."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paged_kv.block_tables import BlockTables, slot_mapping


@dataclass(frozen=True)
class PackedBatch:
    """The new tokens of one step, sequence after sequence; all fields on the model's device.

    Fields
        input_ids     int64 [num_tokens].
        positions     int64 [num_tokens]: place in the sequence, from 0.
        slot_mapping  int64 [num_tokens]: where each token's K/V go, -1 to skip.
        block_table   int32 [max_seqs, max_blocks], all rows.
        rows          int64 [num_seqs]: each sequence's row of the table.
        cu_seqlens    int32 [num_seqs + 1]: sequence s owns tokens cu[s] to cu[s + 1] - 1.
        seq_lens      int32 [num_seqs]: tokens in the cache once this step has written its own.
        logits_at     int64 [n]: the tokens whose logits are wanted.
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_table: Tensor
    rows: Tensor
    cu_seqlens: Tensor
    seq_lens: Tensor
    logits_at: Tensor


def pack(
    tables: BlockTables,
    rows: Sequence[int],
    new_ids: Sequence[Sequence[int]],
    device: torch.device | str = "cpu",
) -> PackedBatch:
    """Pack the newest tokens of some rows; the logits of each one's last token are wanted.

    Args: `tables`, whose `seq_lens` count the new tokens already; `rows`, one a sequence;
    `new_ids`, for each row the ids that it now ends with, at least one.
    On a CPU `block_table` is the matrix itself, not a copy: run the batch before it changes.
    """
    counts, lens = np.array([len(ids) for ids in new_ids]), tables.seq_lens[list(rows)]
    if len(counts) != len(lens) or (counts < 1).any() or (counts > lens).any():
        raise ValueError(f"new_ids: {counts} tokens for rows that hold {lens}")
    cu = np.concatenate([[0], counts.cumsum()])
    positions = np.arange(cu[-1]) + np.repeat(lens - cu[1:], counts)
    slots = slot_mapping(tables.table, np.repeat(rows, counts), positions, tables.block_size)

    def tensor(data: Any, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.as_tensor(data, dtype=dtype, device=device)

    return PackedBatch(
        input_ids=tensor([token for ids in new_ids for token in ids]),
        positions=tensor(positions),
        slot_mapping=tensor(slots),
        block_table=tensor(tables.table, torch.int32),
        rows=tensor(list(rows)),
        cu_seqlens=tensor(cu, torch.int32),
        seq_lens=tensor(lens, torch.int32),
        logits_at=tensor(cu[1:] - 1),
    )
