# Exported from book/labs/L6_simulate.py by tools/export.py; edit the chapter, not this file.
"""What a step takes on an accelerator: bytes over bandwidth, or FLOPs over rate, if longer."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True)
class CostModel:
    """Constants of one model on one device, and the time of a step that follows from them.

    weight_bytes      bytes of weights that every step reads once.
    token_flops       FLOPs of a token outside attention: 2 a parameter.
    pair_flops        FLOPs of a pair of query token and key token, over all layers.
    kv_bytes          bytes of K/V a token, over all layers.
    read_bandwidth    B/s at which a step reads.
    matmul_rate       FLOP/s at which it multiplies.
    host_bandwidth    B/s between device and host memory, one direction at a time.
    overhead          s a step that neither bytes nor FLOPs explain.
    measured          for each constant that was measured, where; the others are assumed.
    """

    weight_bytes: float
    token_flops: float
    pair_flops: float
    kv_bytes: float
    read_bandwidth: float
    matmul_rate: float
    host_bandwidth: float
    overhead: float
    measured: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self._names():
            value, rate = getattr(self, name), name.endswith(("bandwidth", "rate"))
            if not (math.isfinite(value) and value >= 0 and (value or not rate)):
                allowed = "a finite number " + ("above 0" if rate else "of at least 0")
                raise ValueError(f"{name} = {value!r}: {allowed} is needed")
        if unknown := set(self.measured) - set(self._names()):
            raise ValueError(f"measured = {unknown}: no such constants")

    def _names(self) -> list[str]:
        return [each.name for each in fields(self) if each.name != "measured"]

    def read_seconds(self, new_tokens: ArrayLike, seq_lens: ArrayLike) -> float:
        """Time to read the weights and the K/V of the rows once, and to write the new K/V."""
        kv = self.kv_bytes * float(np.asarray(seq_lens).sum() + np.asarray(new_tokens).sum())
        return (self.weight_bytes + kv) / self.read_bandwidth

    def multiply_seconds(self, new_tokens: ArrayLike, seq_lens: ArrayLike) -> float:
        """Time to multiply new tokens with the weights, and with all keys up to their own."""
        new, ends = np.asarray(new_tokens, np.float64), np.asarray(seq_lens, np.float64)
        tokens = float(new.sum())
        pairs = float(new @ ends) - (float(new @ new) - tokens) / 2
        return (self.token_flops * tokens + self.pair_flops * pairs) / self.matmul_rate

    def step_seconds(self, new_tokens: ArrayLike, seq_lens: ArrayLike) -> float:
        """Time of one step.  Args: int [n], one a row; seq_lens as they are after the step."""
        reading = self.read_seconds(new_tokens, seq_lens)
        return max(reading, self.multiply_seconds(new_tokens, seq_lens)) + self.overhead

    def move_seconds(self, within_device: int, with_host: int, block_size: int) -> float:
        """Time to move so many blocks; nothing of it is hidden behind a step."""
        block = self.kv_bytes * block_size
        copied = 2 * within_device * block / self.read_bandwidth  # read, then written
        return copied + with_host * block / self.host_bandwidth

    def describe(self) -> str:
        """A line for each constant: its value, and "assumed" or where it was measured."""
        return "\n".join(
            f"{name:15} {getattr(self, name):8.3g}  {self.measured.get(name, 'assumed')}"
            for name in self._names()
        )


# Llama 3 8B in bf16 on one H200: shapes from its config, 83 % of the card's 4.8 TB/s, 60 %
# of its 989 TFLOP/s, PCIe 5.0 x16 at 50 GB/s.  Rates and overhead are assumed until measured.
LLAMA_3_8B_ON_H200 = CostModel(
    weight_bytes=16.06e9,
    token_flops=16.06e9,
    pair_flops=4 * 32 * 32 * 128,
    kv_bytes=131_072,
    read_bandwidth=4.0e12,
    matmul_rate=593e12,
    host_bandwidth=50e9,
    overhead=1e-3,
)
