# Exported from book/appendices/A4_device_sampling.py by tools/export.py; edit the chapter, not this file.
"""What a request asks of the choice of its tokens, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real

RANGES: dict[str, tuple[type, float, float, str]] = {
    "temperature": (Real, 1e-6, 1e6, "0 (greedy), or 1e-6 to 1e6"),
    "top_k": (Integral, 0, 2**31 - 1, "an integer, 0 (off) to 2147483647"),
    "top_p": (Real, 1e-9, 1, "a number from 1e-9 to 1 (off)"),
    "min_p": (Real, 0, 1, "a number from 0 (off) to 1"),
    "repetition_penalty": (Real, 0.01, 100, "a number from 0.01 to 100 (1 is off)"),
    "presence_penalty": (Real, -2, 2, "a number from -2 to 2 (0 is off)"),
    "frequency_penalty": (Real, -2, 2, "a number from -2 to 2 (0 is off)"),
    "seed": (Integral, 0, 2**64 - 1, "None, or an integer from 0 to 2**64 - 1"),
    "logprobs": (Integral, 0, 20, "None, or an integer from 0 to 20"),
}


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How the tokens of one request are chosen.

    Fields
        temperature         what the noise is scaled by: 0 (greedy), or 1e-6 to 1e6.
        top_k               keep the k likeliest tokens and what ties with the last; 0 keeps all.
        top_p               keep the likeliest tokens that together reach it; above 0, up to 1.
        min_p               keep tokens at least this share as likely as the likeliest; 0 to 1.
        repetition_penalty  divides (multiplies, if negative) logits of tokens seen; 0.01 to 100.
        presence_penalty    subtracted once from the logit of a generated token; -2 to 2.
        frequency_penalty   subtracted for each time it was generated; -2 to 2.
        seed                of the request, 0 to 2**64 - 1; None: somebody has yet to draw one.
        logprobs            None: none; 0: of the chosen token; k up to 20: of the k likeliest too.
    Raises: ValueError naming the field, its value and what is allowed.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, (kind, low, high, said) in RANGES.items():
            value = getattr(self, name)
            if value is None and name in ("seed", "logprobs"):
                continue
            number = isinstance(value, kind) and not isinstance(value, bool)
            if not number or not (low <= value <= high or (name == "temperature" and value == 0)):
                raise ValueError(f"{name} = {value!r}: must be {said}")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, without a draw."""
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        """Whether unlikely tokens are cut off first; greedy rows never need it."""
        return not self.greedy and bool(self.top_k or self.top_p < 1 or self.min_p)

    @property
    def penalises(self) -> bool:
        """Whether the choice depends on the tokens so far."""
        added = self.presence_penalty or self.frequency_penalty
        return bool(added) or self.repetition_penalty != 1

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities are asked for."""
        return self.logprobs is not None


SamplingParams = SamplingOptions  # the field's name; paged_kv itself lists chapter 07's under it
