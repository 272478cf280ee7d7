# Exported from book/11_triton_decode.py by tools/export.py; edit the chapter, not this file.
"""Where Triton kernels run: on a CUDA device, or in Triton's interpreter on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

try:
    import triton as found
    import triton.language as found_language
except ImportError:  # the package works without it, on the CPU
    found = found_language = None
triton: Any = found
tl: Any = found_language
LOG2E: Any = tl and tl.constexpr(1.4426950408889634)


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`triton.jit`, which compiles at the first launch; the plain function without Triton."""
    if function is None:
        return lambda inner: jit(inner, **options)
    return function if triton is None else triton.jit(function, **options)


@jit
def probe_kernel() -> None:
    """Does nothing: what `jit` made of it says whether kernels are compiled or interpreted."""


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter: TRITON_INTERPRET was 1 as they were made."""
    return triton is not None and not isinstance(probe_kernel, triton.JITFunction)


def runs_kernels(device: torch.device) -> bool:
    """Whether tensors on this device can be given to the kernels."""
    return triton is not None and (device.type == "cuda" or interpreted())


@dataclass(frozen=True)
class Limits:
    """What a device offers: its multiprocessors, and bytes of shared memory for one program."""

    processors: int
    shared_memory: int


def limits_of(device: torch.device) -> Limits:
    """The limits of a CUDA device; small ones for the interpreter, where each program costs."""
    if device.type != "cuda":
        return Limits(processors=2, shared_memory=65536)
    card = torch.cuda.get_device_properties(device)
    shared = card.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return Limits(card.multi_processor_count, shared)


def next_pow2(n: int) -> int:
    """The smallest power of two that is n or more: the sizes that a tile can have."""
    return 1 << max(0, n - 1).bit_length()
