# Exported from book/04_paged_attention.py by tools/export.py; edit the chapter, not this file.
"""The bytes of a paged KV cache: one tensor a layer, written by slot, copied by block."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from paged_kv.sizing import KVSpec, at_least, blocks_for

BlockT = TypeVar("BlockT", bound=Hashable)
TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class KVStore:
    """The keys and values of every block, and no idea whose they are.

    Args: `spec`, one token's shape; `dtype`, if not the one of `spec`; `fill`, what fresh
    memory holds: NaN, so that a stale read shows; None leaves it as it comes.
    State
        tensors  one a layer, [num_blocks, 2, block_size, num_kv_heads, head_size], keys at
                 index 0 and values at 1.  To copy, swap or send blocks, walk this list.
    A token lives in a slot: slot = block * block_size + offset.
    Source of the layout: vllm/v1/attention/backends/flashinfer.py.
    """

    def __init__(
        self,
        spec: KVSpec,
        num_blocks: int,
        block_size: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        fill: float | None = float("nan"),
    ) -> None:
        if spec.tensors_per_layer != 2 or (dtype is None and spec.dtype not in TORCH_DTYPES):
            raise ValueError(f"spec = {spec}: K and V of {', '.join(TORCH_DTYPES)} are needed")
        self.num_blocks = at_least(1, "num_blocks", num_blocks)
        self.block_size = at_least(1, "block_size", block_size)
        self.dtype = dtype or TORCH_DTYPES[spec.dtype]
        shape = (num_blocks, 2, block_size, spec.num_kv_heads, spec.head_size)
        empty = partial(torch.empty, shape, dtype=self.dtype, device=device)
        self.tensors = [empty() for _ in range(spec.num_layers)]
        if fill is not None:
            for tensor in self.tensors:
                tensor.fill_(fill)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def keys(self, layer: int) -> Tensor:
        """A view [num_blocks, block_size, num_kv_heads, head_size]; the blocks lie apart."""
        return self.tensors[layer][:, 0]

    def values(self, layer: int) -> Tensor:
        """A view [num_blocks, block_size, num_kv_heads, head_size]; the blocks lie apart."""
        return self.tensors[layer][:, 1]

    def write(self, layer: int, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        """Store one key and one value a token.

        Args: k, v [num_tokens, num_kv_heads, head_size]; slot_mapping int64 [num_tokens], -1
        where a token is to be skipped, the others all different.
        Changes the named slots of `layer` and nothing else; never waits for a GPU.
        """
        if not len(slot_mapping):
            return
        check_range("slot_mapping", slot_mapping, -1, self.num_blocks * self.block_size)
        rows = self.tensors[layer].view(-1, *k.shape[1:])
        key_row = slot_mapping + slot_mapping // self.block_size * self.block_size
        for data, row in ((k, key_row), (v, key_row + self.block_size)):
            index, new = _without_skipped(rows, row, data.to(self.dtype), slot_mapping >= 0)
            rows.index_copy_(0, index, new)

    def gather(self, layer: int, block_table_row: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
        """One sequence in one piece: contiguous k and v, [seq_len, num_kv_heads, head_size].

        Args: block_table_row int32 [max_blocks]; seq_len, its tokens.  Changes nothing.
        """
        blocks = block_table_row[: blocks_for(seq_len, self.block_size)].long()
        check_range("block_table_row", blocks, 0, self.num_blocks)
        if len(blocks) * self.block_size < seq_len:
            raise ValueError(f"seq_len = {seq_len}: the row has {len(blocks)} blocks only")
        k, v = (pool[blocks].flatten(0, 1)[:seq_len] for pool in self.tensors[layer].unbind(1))
        return k, v

    def copy_blocks(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination) ids, in every tensor of the list.

        The result is that of one copy after the other, though all run at once.
        Raises: ValueError for an id that does not exist, before anything changes.
        """
        copies = torch.tensor(resolve_copies(pairs), dtype=torch.int64).view(-1, 2)
        check_range("pairs", copies.flatten(), 0, self.num_blocks)
        source, destination = copies.to(self.tensors[0].device).unbind(1)
        for tensor in self.tensors:
            flat = tensor.flatten(1)
            flat.index_copy_(0, destination, flat.index_select(0, source))


def check_range(name: str, ids: Tensor, low: int, high: int) -> None:
    """ValueError unless low <= ids < high; silent on a GPU, where looking means waiting."""
    if ids.device.type == "cpu" and len(ids):
        for value in (int(ids.min()), int(ids.max())):
            if not low <= value < high:
                raise ValueError(f"{name}: {value} found, {low} to {high - 1} allowed")


def _without_skipped(
    rows: Tensor, index: Tensor, data: Tensor, real: Tensor
) -> tuple[Tensor, Tensor]:
    """Make each skipped write repeat the first real one; the shapes stay as they are.

    Where none is real, row 0 is given its own bytes back.
    """
    first = real.int().argmax(0, keepdim=True)  # [1]: to index with a scalar, the host would wait
    any_real = real[first]
    target = torch.where(any_real, index[first], 0)
    same = torch.where(any_real[:, None, None], data[first], rows[:1])
    return torch.where(real, index, target), torch.where(real[:, None, None], data, same)


def resolve_copies(pairs: Iterable[tuple[BlockT, BlockT]]) -> list[tuple[BlockT, BlockT]]:
    """Copies that run at once, with the result of `pairs` run one by one in the order given.

    Args: (source, destination) pairs; anything hashable may name a block.
    Returns: pairs whose sources mean the bytes at the start and whose destinations differ.
    A block may be both: read all sources before writing any destination.
    """
    origin: dict[BlockT, BlockT] = {}
    for source, destination in pairs:
        origin[destination] = origin.get(source, source)
    return [(source, block) for block, source in origin.items() if source != block]
