# Exported from book/appendices/A2_command_line.py by tools/export.py; edit the chapter, not this file.
"""The sums behind `paged-kv size`: what a memory holds, and which GPUs hold what is needed."""

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from paged_kv.config_facts import KNOWN
from paged_kv.configs import ModelKV, from_config
from paged_kv.sizing import GB, at_least


def find_config(name: str) -> Any:
    """What `from_config` reads: a path that exists, else the facts of a known model."""
    if Path(name).exists():
        return name
    if name.lower() not in KNOWN:
        known = ", ".join(KNOWN)
        raise ValueError(f"config = {name!r}: no such file or folder, and none of {known}")
    return KNOWN[name.lower()]


def read_lengths(text: str) -> list[int]:
    """Lengths in tokens: every one of a range ("100-2000"), or those of a file, one a line."""
    low, dash, high = text.partition("-")
    if dash and low.isdecimal() and high.isdecimal():
        if int(high) >= 10**7:
            raise ValueError(f"lengths = {text!r}: a range that ends below 10,000,000 is needed")
        lengths = list(range(int(low), int(high) + 1))
    elif Path(text).is_file():
        words = Path(text).read_text(encoding="utf-8", errors="replace").split()
        if not all(word.isdecimal() for word in words):
            raise ValueError(f"lengths = {text!r}: the file must hold whole numbers only")
        lengths = [int(word) for word in words]
    else:
        raise ValueError(f"lengths = {text!r}: a file, or a range such as 100-2000, is needed")
    if not lengths or min(lengths) < 1:
        raise ValueError(f"lengths = {text!r}: at least one length of 1 or more is needed")
    return lengths


def mean_bytes(kv: ModelKV, lengths: Sequence[int], block_size: int) -> Fraction:
    """Bytes that a sequence takes on average, in whole blocks."""
    return Fraction(sum(kv.bytes_for(n, block_size) for n in lengths), len(lengths))


def model_report(kv: ModelKV, context: int, block_size: int) -> dict[str, Any]:
    """What one token, one block and one full sequence take on one GPU."""
    return {
        "bytes_per_token": kv.bytes_per_token,
        "block_size": block_size,
        "bytes_per_block": kv.bytes_per_block(block_size),
        "context": context,
        "bytes_per_sequence": kv.bytes_for(context, block_size),
        "layers": kv.num_layers,
        "layers_with_kv": sum(group.spec.num_layers for group in kv.groups),
        "kv_dtype": kv.groups[0].spec.dtype,
        "tensor_parallel": kv.tensor_parallel,
        "policy": "window" if any(g.policy == "window" for g in kv.groups) else "full",
        "windows": sorted({group.window for group in kv.groups if group.window}),
        "notes": list(kv.notes),
    }


def memory_report(
    kv: ModelKV, memory: int, weights: int, overhead: int, context: int, block_size: int
) -> dict[str, Any]:
    """What one GPU of `memory` bytes holds beside its share of `weights` and an overhead."""
    share = -(-weights // kv.tensor_parallel)
    for_kv = memory - share - overhead
    if for_kv < kv.bytes_per_block(block_size):
        raise ValueError(
            f"memory = {memory:,} B: {share:,} B of weights and {overhead:,} B of overhead "
            "leave no room for one block"
        )
    blocks = kv.blocks_in(for_kv, block_size)
    return {
        "memory_bytes": memory,
        "weight_bytes": share,
        "overhead_bytes": overhead,
        "kv_memory_bytes": for_kv,
        "blocks": blocks,
        "tokens": blocks * block_size,
        "sequences_at_context": for_kv // kv.bytes_for(context, block_size),
        "sequences_reserved": for_kv // kv.bytes_for(context),
    }


def length_report(
    kv: ModelKV, for_kv: int, lengths: Sequence[int], context: int, block_size: int
) -> dict[str, Any]:
    """Sequences of the stated lengths, and what reserving the context for each would waste."""
    held, paged = mean_bytes(kv, lengths, 1), mean_bytes(kv, lengths, block_size)
    return {
        "mean_tokens": sum(lengths) / len(lengths),
        "sequences_paged": int(for_kv // paged),
        "waste_reserved": float(1 - held / kv.bytes_for(context)),
        "waste_paged": float(1 - held / paged),
    }


CARDS = {
    16: "T4, V100",
    24: "L4, A10, RTX 4090",
    32: "RTX 5090, V100",
    40: "A100",
    48: "L40S, RTX A6000",
    80: "A100, H100",
    141: "H200",
    192: "B200, MI300X",
}
SPARE = Fraction(1, 10)


def users_report(
    config: Any,
    users: int,
    lengths: Sequence[int],
    weights: int,
    block_size: int,
    kv_dtype: str | None = None,
    policy: Any = "full",
) -> dict[str, Any]:
    """The memory that `users` sequences of such `lengths` need, and the cards that hold it."""
    one = from_config(config, kv_dtype, 1, policy)
    cache = int(at_least(1, "users", users) * mean_bytes(one, lengths, block_size))
    cards: list[dict[str, Any]] = []
    for count in (1, 2, 4, 8):
        try:
            kv = from_config(config, kv_dtype, count, policy)
        except ValueError:  # the heads cannot be dealt out to so many
            continue
        need = -(-weights // count) + users * mean_bytes(kv, lengths, block_size)
        cards += [
            {"gb": gb, "cards": count, "names": CARDS[gb], "share": float(need / (gb * GB))}
            for gb in CARDS
            if need <= (1 - SPARE) * gb * GB and gb not in [card["gb"] for card in cards]
        ]
    return {
        "users": users,
        "tokens_each": sum(lengths) / len(lengths),
        "kv_bytes": cache,
        "weight_bytes": weights,
        "total_bytes": cache + weights,
        "cards": sorted(cards, key=lambda card: int(card["gb"])),
    }
