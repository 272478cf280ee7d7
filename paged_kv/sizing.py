# Exported from book/01_kv_sizing.py by tools/export.py; edit the chapter, not this file.
"""How many bytes a KV cache takes: per token, per block, per sequence.

Arithmetic only.  KiB, MiB and GiB are powers of 1,024; kB, MB and GB powers of 1,000.
"""

import operator
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

KiB, MiB, GiB, TiB = (1024**power for power in (1, 2, 3, 4))
kB, MB, GB, TB = (1000**power for power in (1, 2, 3, 4))
BINARY_UNITS = {"B": 1, "KiB": KiB, "MiB": MiB, "GiB": GiB, "TiB": TiB}
DECIMAL_UNITS = {"B": 1, "kB": kB, "MB": MB, "GB": GB, "TB": TB}


def format_bytes(num_bytes: float, digits: int = 2, decimal: bool = False) -> str:
    """Write a number of bytes in the largest unit that keeps it at 1 or more.

    Args: `digits`, decimals at most (trailing zeros go); `decimal`, GB and not GiB.
    Returns: such as "93.75 MiB".  The label and the divisor come out of one table.
    """
    units = DECIMAL_UNITS if decimal else BINARY_UNITS
    fits = [unit for unit, size in units.items() if abs(num_bytes) >= size] or ["B"]
    text = f"{num_bytes / units[fits[-1]]:,.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} {fits[-1]}"


def parse_bytes(text: str) -> int:
    """Read "80GB", "1.5 GiB" or "4096" as whole bytes, rounded down.

    Raises: ValueError for anything else, a bare "80G" too: nobody knows which G it is.
    """
    units = {name.lower(): size for name, size in (BINARY_UNITS | DECIMAL_UNITS).items()}
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", text)
    unit = (found[2].lower() or "b") if found else ""
    if not found or unit not in units:
        allowed = ", ".join([*BINARY_UNITS, *list(DECIMAL_UNITS)[1:]])
        raise ValueError(f"size = {text!r}: write a number and one of {allowed}")
    return int(Fraction(found[1]) * units[unit])


BITS = {"fp32": 32, "fp16": 16, "bf16": 16, "fp8": 8, "int8": 8, "int4": 4}


def at_least(minimum: int, name: str, value: int) -> int:
    """Return `value` as an int; ValueError, naming it, if it is no integer >= `minimum`."""
    try:
        number = operator.index(value)
    except TypeError:
        number = minimum - 1
    if number < minimum or isinstance(value, bool):
        raise ValueError(f"{name} = {value!r}: an integer of at least {minimum} is needed")
    return number


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks of `block_size` tokens that hold `num_tokens`: the last one may be partly full."""
    return -(-at_least(0, "num_tokens", num_tokens) // at_least(1, "block_size", block_size))


@dataclass(frozen=True)
class KVSpec:
    """What one token leaves behind in a stack of identical attention layers.

    Fields
        num_layers         layers that keep K/V.
        num_kv_heads       KV heads a layer (the query heads do not matter here).
        head_size          elements a head.
        dtype              element type, a key of `BITS`.
        tensors_per_layer  2 for K and V; 1 for a latent that stands for both (MLA), with
                           one head of kv_lora_rank + qk_rope_head_dim elements.
    Scales of quantised types are not counted.
    """

    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: str = "bf16"
    tensors_per_layer: int = 2

    def __post_init__(self) -> None:
        """Refuse what no cache can be."""
        for name in ("num_layers", "num_kv_heads", "head_size", "tensors_per_layer"):
            object.__setattr__(self, name, at_least(1, name, getattr(self, name)))
        if self.dtype not in BITS:
            raise ValueError(f"dtype = {self.dtype!r}: one of {', '.join(BITS)} is needed")
        if self.tensors_per_layer > 2:
            raise ValueError(f"tensors_per_layer = {self.tensors_per_layer!r}: 2 (K and V) or 1")
        if self.num_kv_heads * self.head_size * BITS[self.dtype] % 8:
            raise ValueError(f"head_size = {self.head_size}: {self.dtype} rows end inside a byte")

    @property
    def elements_per_token(self) -> int:
        """Numbers that a token adds to the cache, over all layers."""
        return self.tensors_per_layer * self.num_layers * self.num_kv_heads * self.head_size

    @property
    def bytes_per_token(self) -> int:
        """Bytes that a token adds to the cache, over all layers."""
        return self.elements_per_token * BITS[self.dtype] // 8

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes of a block of `block_size` tokens, over all layers."""
        return self.bytes_per_token * at_least(1, "block_size", block_size)

    def bytes_for(self, num_tokens: int, block_size: int = 1) -> int:
        """Bytes of one sequence; with a block size, of the whole blocks that hold it."""
        return self.blocks_for(num_tokens, block_size) * self.bytes_per_block(block_size)

    def blocks_for(self, num_tokens: int, block_size: int) -> int:
        """Blocks that one sequence of `num_tokens` tokens takes."""
        return blocks_for(num_tokens, block_size)

    def blocks_in(self, memory_bytes: int, block_size: int) -> int:
        """Whole blocks that fit into `memory_bytes`."""
        return at_least(0, "memory_bytes", memory_bytes) // self.bytes_per_block(block_size)


class SizedKV(Protocol):
    """Anything that can say how many bytes a sequence takes."""

    def bytes_for(self, num_tokens: int, block_size: int = 1) -> int:
        """Bytes of one sequence, in whole blocks of `block_size` tokens."""
        ...


@dataclass(frozen=True)
class Capacity:
    """Sequences that a memory admits, reserving against paging.

    Fields
        reserved      sequences, each taking room for the longest one allowed.
        paged         sequences, each taking the blocks that hold it.
        reserved_waste, paged_waste  share of a sequence's memory that holds no token, 0 to 1.
    """

    reserved: int
    paged: int
    reserved_waste: float
    paged_waste: float


def capacity(
    kv: SizedKV, memory_bytes: int, num_tokens: int, max_tokens: int, block_size: int = 16
) -> Capacity:
    """Count the sequences of `num_tokens` tokens that `memory_bytes` admits both ways.

    Args: `max_tokens`, what a reservation is made for; at least `num_tokens`.
    """
    num_tokens = at_least(1, "num_tokens", num_tokens)
    max_tokens = at_least(num_tokens, "max_tokens", max_tokens)
    memory_bytes = at_least(0, "memory_bytes", memory_bytes)
    held = kv.bytes_for(num_tokens)
    reserved, paged = kv.bytes_for(max_tokens), kv.bytes_for(num_tokens, block_size)
    return Capacity(
        reserved=memory_bytes // reserved,
        paged=memory_bytes // paged,
        reserved_waste=1 - held / reserved,
        paged_waste=1 - held / paged,
    )


def tail_waste(num_tokens: int, block_size: int) -> int:
    """Slots left empty in the last block of a sequence of `num_tokens` tokens."""
    return blocks_for(num_tokens, block_size) * block_size - num_tokens


def expected_tail_waste(block_size: int) -> float:
    """Mean of `tail_waste` over sequences that end anywhere in a block: (B - 1) / 2."""
    return (at_least(1, "block_size", block_size) - 1) / 2
