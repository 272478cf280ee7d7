# Exported from book/11_triton_decode.py by tools/export.py; edit the chapter, not this file.
"""Writing tokens into their slots and copying blocks, one launch for a whole batch."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paged_kv.triton_device import jit, next_pow2, runs_kernels, tl, triton


@jit(do_not_specialize=["num_tokens"])
def write_kernel(
    k,
    v,
    slots,
    keys,
    values,
    num_tokens,
    k_row,
    k_row_head,
    v_row,
    v_row_head,
    k_block,
    k_token,
    k_head,
    v_block,
    v_token,
    v_head,
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """TOKENS tokens a program, PIECE numbers of each; a negative slot writes nothing."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    number = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    slot = tl.load(slots + token, mask=token < num_tokens, other=-1).to(tl.int64)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    head, d = number // HEAD_SIZE, number % HEAD_SIZE
    ok = (slot >= 0)[:, None] & (number < WIDTH)[None, :]
    row = token.to(tl.int64)
    key = tl.load(k + (row * k_row)[:, None] + (head * k_row_head + d)[None, :], mask=ok)
    value = tl.load(v + (row * v_row)[:, None] + (head * v_row_head + d)[None, :], mask=ok)
    to_key = (block * k_block + offset * k_token)[:, None] + (head * k_head + d)[None, :]
    to_value = (block * v_block + offset * v_token)[:, None] + (head * v_head + d)[None, :]
    tl.store(keys + to_key, key.to(keys.dtype.element_ty), mask=ok)
    tl.store(values + to_value, value.to(values.dtype.element_ty), mask=ok)


def is_index(*tensors: Tensor | None) -> bool:
    """Whether all are contiguous integers, as kernels read them; None is left out."""
    given = [t for t in tensors if t is not None]
    return all(t.dtype in (torch.int32, torch.int64) and t.is_contiguous() for t in given)


def write_kv(k: Tensor, v: Tensor, slot_mapping: Tensor, keys: Tensor, values: Tensor) -> None:
    """Store one key and one value a token, in one launch.

    Args: k, v [num_tokens, num_kv_heads, head_size], the last dimension contiguous;
    slot_mapping int64 [num_tokens], -1 where a token is to be skipped, the others all
    different; keys, values [num_blocks, block_size, num_kv_heads, head_size], other strides free.
    Changes the named slots and nothing else.  On a GPU it neither waits nor allocates.
    Raises: ValueError where the shapes or strides do not fit.
    """
    same = k.shape == v.shape and keys.shape == values.shape and k.shape[1:] == keys.shape[2:]
    if not same or slot_mapping.shape != k.shape[:1]:
        shapes = [tuple(t.shape) for t in (k, v, slot_mapping, keys, values)]
        raise ValueError(f"k, v, slot_mapping, keys, values: {shapes} do not fit each other")
    if not is_index(slot_mapping):
        raise ValueError("slot_mapping: contiguous integers are needed")
    if any(t.stride(-1) != 1 for t in (k, v, keys, values)):
        raise ValueError("k, v, keys, values: the numbers of a head are not contiguous")
    block_size, (heads, size) = keys.shape[1], k.shape[1:]
    if not runs_kernels(keys.device):
        real = slot_mapping >= 0
        at = slot_mapping[real]
        for data, pool in ((k, keys), (v, values)):
            pool[at // block_size, at % block_size] = data[real].to(pool.dtype)
    elif len(k):
        width, tokens = heads * size, 2
        piece = min(next_pow2(width), 2048)
        write_kernel[(triton.cdiv(len(k), tokens), triton.cdiv(width, piece))](
            k,
            v,
            slot_mapping,
            keys,
            values,
            len(k),
            *k.stride()[:2],
            *v.stride()[:2],
            *keys.stride()[:3],
            *values.stride()[:3],
            HEAD_SIZE=size,
            WIDTH=width,
            PIECE=piece,
            TOKENS=tokens,
            BLOCK_SIZE=block_size,
        )


@jit(do_not_specialize=["num_pairs", "lanes"])
def copy_kernel(addresses, pairs, num_pairs, lanes, words, SLICE: tl.constexpr):
    """One slice of every block of one tensor, the pairs of one lane in the order given."""
    at = tl.program_id(0) * SLICE + tl.arange(0, SLICE)
    ok = at < words
    base = tl.load(addresses + tl.program_id(1)).to(tl.pointer_type(tl.int64))
    base = tl.multiple_of(base, 16)
    for i in tl.range(tl.program_id(2), num_pairs, lanes, num_stages=1):
        source = tl.load(pairs + 2 * i).to(tl.int64)
        target = tl.load(pairs + 2 * i + 1).to(tl.int64)
        if (source >= 0) & (target >= 0):
            data = tl.load(base + source * words + at, mask=ok)
            tl.store(base + target * words + at, data, mask=ok)


def tensor_addresses(tensors: Sequence[Tensor]) -> Tensor:
    """Where each tensor begins: int64 on their device, made once for a store."""
    return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64).to(tensors[0].device)


def copy_kv_blocks(
    tensors: Sequence[Tensor], pairs: Tensor, *, ordered: bool, addresses: Tensor | None = None
) -> None:
    """Copy whole blocks, (source, destination), in every tensor, all in one launch.

    Args: tensors, the list of a KVStore: blocks first, alike and contiguous; pairs, integers
    [n, 2] on their device, -1 to skip; ordered: the result is that of one copy after another;
    otherwise no block may be in two pairs, unless as source only; addresses, of
    `tensor_addresses`: given, nothing is allocated.  Changes the destinations only.
    Raises: ValueError where the tensors are not alike, or a block is no multiple of 8 bytes.
    """
    alike = {(t.shape, t.dtype) for t in tensors}
    if len(alike) != 1 or not all(t.is_contiguous() for t in tensors):
        raise ValueError("tensors: contiguous ones of one shape and type are needed")
    if addresses is not None and (len(addresses), addresses.dtype) != (len(tensors), torch.int64):
        raise ValueError("addresses: those of other tensors")
    if tensors[0][:1].nbytes % 8 or any(t.data_ptr() % 16 for t in tensors):
        raise ValueError("tensors: aligned ones, with blocks of whole 8-byte words, are needed")
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        raise ValueError(f"pairs: {tuple(pairs.shape)}, not (source, destination) in each row")
    if not runs_kernels(tensors[0].device):
        for source, target in pairs[(pairs >= 0).all(1)].tolist():
            for tensor in tensors:
                tensor[target] = tensor[source]
    elif len(pairs):
        addresses = tensor_addresses(tensors) if addresses is None else addresses
        words = tensors[0][0].nbytes // 8
        piece = min(512, next_pow2(words))
        lanes = 1 if ordered else min(len(pairs), 65535)
        copy_kernel[(triton.cdiv(words, piece), len(tensors), lanes)](
            addresses, pairs.contiguous(), len(pairs), lanes, words, SLICE=piece
        )
