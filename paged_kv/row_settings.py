# Exported from book/appendices/A4_device_sampling.py by tools/export.py; edit the chapter, not this file.
"""What each row of a batch wants of its tokens, resident on the device."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged_kv.keyed_noise import row_key
from paged_kv.sampling_params import SamplingOptions

# The columns of a row's settings; its key takes the last four.
TEMPERATURE, TOP_K, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY, COUNTS, KEY = range(9)
WIDTH = KEY + 4
# What the host knows of a row: bits.
DRAWS, TRUNCATES, PENALISES, LOGPROBS = 1, 2, 4, 8
SHAPED = TRUNCATES | PENALISES


def flags_of(params: SamplingOptions) -> int:
    """What the host has to know of a row."""
    return (
        DRAWS * (not params.greedy)
        | TRUNCATES * params.truncates
        | PENALISES * params.penalises
        | LOGPROBS * params.wants_logprobs
    )


def row_settings(params: SamplingOptions, sample_index: int) -> list[float]:
    """A row's settings as numbers, column by column.  Raises: ValueError for a missing seed."""
    whole = isinstance(sample_index, Integral) and not isinstance(sample_index, bool)
    if not whole or not 0 <= sample_index < 2**63:
        raise ValueError(f"sample_index = {sample_index!r}: must be an integer of at least 0")
    if params.seed is None and not params.greedy:
        raise ValueError("seed = None: a row that draws needs one; draw it first")
    key = row_key(int(params.seed or 0), int(sample_index))
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    cuts = (params.top_k, params.top_p, params.min_p) if params.truncates else (0, 1, 0)
    return [float(x) for x in (params.temperature, *cuts, *penalties, params.penalises, *key)]


def uploaded(values: NDArray[np.int64], device: torch.device) -> Tensor:
    """An array on the device; the host does not wait for its arrival."""
    here = torch.from_numpy(values)
    if device.type != "cuda":
        return here.to(device)
    return here.pin_memory().to(device, non_blocking=True)


class RowSettings:
    """Settings of every row on the device, and what the host has to know of them.

    State
        settings  float64 [num_rows, WIDTH] on the device, changed by `open_rows` only.
        seen      int32 [num_rows, vocab] on the device, made when the first row penalises: twice
                  the times a token was generated, plus 1 if it stands in the prompt.
        flags     int8 [num_rows] on the host: what the row needs; -1 if it is closed.
    Invariant: an open row has the settings on the device that its flags on the host speak of.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device | str) -> None:
        """No row is open.  Takes 96 bytes a row on the device."""
        for name, value in (("num_rows", num_rows), ("vocab_size", vocab_size)):
            if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} = {value!r}: must be an integer of at least 1")
        self.num_rows, self.vocab_size = int(num_rows), int(vocab_size)
        self.device = torch.device(device)
        shape = (num_rows, WIDTH)
        self.settings = torch.zeros(shape, dtype=torch.float64, device=self.device)
        self.seen: Tensor | None = None
        self.flags = np.full(num_rows, -1, np.int8)
        self.top_k = np.zeros(num_rows, np.int64)
        self.num_logprobs = np.zeros(num_rows, np.int64)

    def __repr__(self) -> str:
        """A letter a row: - closed, g greedy, d draws; + where it truncates or penalises."""
        letters = (
            "-" if flag < 0 else ("d" if flag & DRAWS else "g") + "+" * bool(flag & SHAPED)
            for flag in self.flags.tolist()
        )
        return f"{type(self).__name__}({' '.join(letters)})"

    def open_rows(
        self,
        rows: Sequence[int],
        params: Sequence[SamplingOptions],
        sample_indices: Sequence[int],
        prompts: Sequence[Sequence[int]],
        generated: Sequence[Sequence[int]],
    ) -> None:
        """Give rows their settings, in one upload; a row that is open starts anew.

        Args, one a row: its number; its params, with a seed unless greedy; which sample of its
        request it is; the tokens of its prompt; those generated so far.  Tokens are looked at
        only where params penalise.
        Raises: ValueError, with nothing changed.
        """
        numbers = self._checked_rows(rows)
        lengths = [len(x) for x in (params, sample_indices, prompts, generated)]
        if lengths != [len(rows)] * 4:
            raise ValueError(f"rows: {len(rows)}, and {lengths} of what goes with them")
        together = zip(params, sample_indices, prompts, generated, strict=True)
        given = list(zip(numbers.tolist(), together, strict=True))
        settings = np.array([row_settings(one, i) for _, (one, i, _, _) in given], np.float64)
        counted = [(row, was, made) for row, (one, _, was, made) in given if one.penalises]
        was = [self._flat(row, tokens, "prompts") for row, tokens, _ in counted]
        made = [self._flat(row, tokens, "generated") for row, _, tokens in counted]
        anew = np.array([row for row, _, _ in counted], np.int64)
        parts = [numbers, settings.view(np.int64).reshape(-1), anew, *was, *made]
        sizes = [len(numbers), settings.size, len(anew), sum(map(len, was)), sum(map(len, made))]
        if given:
            arrived = uploaded(np.concatenate(parts), self.device)
            self._write(torch.split(arrived, sizes))
        for row, (one, *_) in given:
            self.flags[row] = flags_of(one)
            self.top_k[row] = min(one.top_k, self.vocab_size) if one.truncates else 0
            self.num_logprobs[row] = one.logprobs or 0

    def close_row(self, row: int) -> None:
        """Forget a row.  The device is not told: nobody asks for a closed row."""
        self.flags[self._checked_rows([row])] = -1

    def _checked_rows(self, rows: Sequence[int]) -> NDArray[np.int64]:
        for row in rows:
            whole = isinstance(row, Integral) and not isinstance(row, bool)
            if not whole or not 0 <= row < self.num_rows:
                raise ValueError(f"row = {row!r}: must be an integer from 0 to {self.num_rows - 1}")
        if len(set(rows)) != len(rows):
            raise ValueError(f"rows = {list(rows)}: one is named twice")
        return np.asarray(rows, np.int64).reshape(-1)

    def _flat(self, row: int, tokens: Sequence[int], name: str) -> NDArray[np.int64]:
        """Where these tokens of a row are counted, as places in the table laid out flat."""
        ids = np.asarray(tokens)
        if ids.size and ids.dtype.kind not in "iu":
            raise ValueError(f"{name}: token ids must be integers, not {ids.dtype}")
        ids = ids.astype(np.int64).reshape(-1)
        if ids.size and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            wrong = ids.min() if ids.min() < 0 else ids.max()
            raise ValueError(f"{name}: id {wrong} is not from 0 to {self.vocab_size - 1}")
        return row * self.vocab_size + ids

    def _write(self, parts: Sequence[Tensor]) -> None:
        """Put uploaded settings where they belong; count the tokens of rows that penalise."""
        rows, settings, anew, prompts, generated = parts
        self.settings.index_copy_(0, rows, settings.view(torch.float64).view(-1, WIDTH))
        if len(anew):
            if self.seen is None:
                shape = (self.num_rows, self.vocab_size)
                self.seen = torch.zeros(shape, dtype=torch.int32, device=self.device)
            self.seen.index_fill_(0, anew, 0)
            flat = self.seen.view(-1)
            flat.index_fill_(0, prompts, 1)
            flat.scatter_add_(0, generated, torch.full_like(generated, 2, dtype=torch.int32))


def penalised(
    x: Tensor, seen: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """Logits with what was said before made less likely (or likelier).

    Args: `x` float32 [n, V]; `seen` int32 [n, V] as RowSettings keeps it; the rest [n, 1].
    """
    times = (seen >> 1).float()
    x = torch.where(seen > 0, torch.where(x < 0, x * repetition, x / repetition), x)
    return x - frequency * times - presence * (times > 0)


def count_tokens(rows: Tensor, tokens: Tensor, settings: Tensor, seen: Tensor) -> None:
    """Add tokens just chosen, int64 [S], to `seen` where their row penalises; -1 counts nowhere."""
    rows = rows.clamp(min=0)
    counts = (settings.index_select(0, rows)[:, COUNTS] > 0) & (tokens >= 0)
    amount = torch.where(counts, 2, 0).to(torch.int32)
    seen.view(-1).scatter_add_(0, rows * seen.shape[1] + tokens.clamp(min=0), amount)
