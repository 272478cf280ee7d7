# Exported from book/appendices/A4_device_sampling.py by tools/export.py; edit the chapter, not this file.
"""Tokens chosen for a whole batch on the device, without the host looking at any number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from paged_kv.draw_kernel import launch_draw
from paged_kv.keyed_noise import draw_tokens
from paged_kv.row_settings import (
    DRAWS,
    FREQUENCY,
    KEY,
    LOGPROBS,
    MIN_P,
    PENALISES,
    REPETITION,
    SHAPED,
    TEMPERATURE,
    TOP_K,
    TRUNCATES,
    RowSettings,
    count_tokens,
    penalised,
    uploaded,
)
from paged_kv.sampling_params import SamplingOptions
from paged_kv.shape_kernels import launch_cut, launch_penalise
from paged_kv.token_cuts import cut_tokens
from paged_kv.triton_device import triton


def shaped_logits(
    mine: RowSettings, logits: Tensor, rows: Tensor, host: NDArray[np.int64]
) -> Tensor:
    """Penalties, then cuts: float32 [n, V], not yet divided by the temperature."""
    flags = np.where(host < 0, 0, mine.flags[host])
    kernels = logits.is_cuda and triton is not None and logits.stride(1) == 1
    rows = rows.clamp(min=0)
    settings = mine.settings.index_select(0, rows)
    x = logits.float()
    if (flags & PENALISES).any():
        assert mine.seen is not None
        if kernels:
            x = launch_penalise(logits, mine.seen, mine.settings, REPETITION, rows)
        else:
            penalties = settings[:, REPETITION : FREQUENCY + 1].float()
            x = penalised(x, mine.seen.index_select(0, rows), *penalties[:, :, None].unbind(1))
    if not (flags & TRUNCATES).any():
        return x
    if kernels:
        return launch_cut(x, mine.settings, TOP_K, rows)
    temperature = settings[:, TEMPERATURE, None].float()
    temperature = torch.where(temperature > 0, temperature, 1)
    largest_k = int(mine.top_k[host[host >= 0]].max(initial=0))
    return cut_tokens(x, temperature, settings[:, TOP_K : MIN_P + 1], largest_k)


@dataclass(frozen=True)
class Sampled:
    """What one step chose, all on the device.

    Fields
        tokens        int64 [S]; -1 for padding, or where logits have NaN or nothing finite.
        logprobs      float32 [S], of the chosen tokens; NaN where none was asked for.  Or None.
        top_logprobs  float32 [S, k], of the k likeliest, k the most that a row asked for.  Or None.
        top_ids       int64 [S, k], which they are; -1 where none was asked for.  Or None.
    """

    tokens: Tensor
    logprobs: Tensor | None = None
    top_logprobs: Tensor | None = None
    top_ids: Tensor | None = None


def checked_batch(
    mine: RowSettings, logits: Tensor, rows: Tensor, positions: Tensor, host_rows: ArrayLike
) -> tuple[NDArray[np.int8], NDArray[np.int64]]:
    """The flags of a batch's rows, 0 for padding, and those rows; by shapes and the host's copy."""
    host = np.asarray(host_rows, np.int64).reshape(-1)
    shape = (len(host), mine.vocab_size)
    if tuple(logits.shape) != shape or not logits.is_floating_point():
        raise ValueError(f"logits: {logits.dtype} {list(logits.shape)}, not floats {list(shape)}")
    for name, value in (("rows", rows), ("positions", positions)):
        if tuple(value.shape) != shape[:1] or value.dtype != torch.int64:
            said = f"{value.dtype} {list(value.shape)}, not int64 {list(shape[:1])}"
            raise ValueError(f"{name}: {said}")
    if len(host) and not -1 <= host.min() <= host.max() < mine.num_rows:
        raise ValueError(f"host_rows: not all from -1 to {mine.num_rows - 1}")
    flags = np.where(host < 0, np.int8(0), mine.flags[host])
    if (flags < 0).any():
        raise ValueError(f"host_rows: row {host[flags < 0][0]} is closed")
    return flags, host


def raw_logprobs(
    logits: Tensor, tokens: Tensor, most: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Log-probabilities of the tokens and of the `most` likeliest, before anything was changed.

    Args: `logits` [n, V]; `tokens` int64 [n], -1 has none.  Returns: [n], [n, most], ids
    [n, most]; None for both where `most` is 0.
    """
    x = logits.float()
    total = x.logsumexp(-1, keepdim=True)
    of_token = x.gather(-1, tokens.clamp(min=0)[:, None]) - total
    of_token = of_token[:, 0].masked_fill(tokens < 0, torch.nan)
    if not most:
        return of_token, None, None
    top = x.topk(min(most, x.shape[1]))
    return of_token, top.values - total, top.indices


def spread_rows(part: Tensor | None, at: Tensor, size: int) -> Tensor | None:
    """`part` [n, ...] at the places `at` of `size`; elsewhere NaN, or -1 for ids."""
    if part is None:
        return None
    empty = torch.nan if part.is_floating_point() else -1
    return part.new_full((size, *part.shape[1:]), empty).index_copy(0, at, part)


class DeviceSampler(RowSettings):
    """The settings of every row, and the choice of one token for any of them.

    Invariant: what `sample` launches follows from the host's flags and the shapes alone.
    """

    def sample(
        self, logits: Tensor, rows: Tensor, positions: Tensor, host_rows: ArrayLike
    ) -> Sampled:
        """Choose a token for each row of a batch, and count it where the row penalises.

        Args: `logits` [S, vocab], any float; `rows` int64 [S], which row each belongs to, -1 for
        padding; `positions` int64 [S], the place in its sequence that the new token will take;
        these three on the device; `host_rows` [S], the same rows on the host.
        Raises: ValueError, with nothing changed.  The host waits for nothing.
        """
        flags, host = checked_batch(self, logits, rows, positions, host_rows)
        shaped = np.flatnonzero(flags & SHAPED)
        if len(shaped) == len(flags) > 0:
            tokens = self._sample_shaped(logits, rows, positions, host)
        else:
            plain = flags[(flags & SHAPED) == 0]
            tokens = self.sample_plain(logits, rows, positions, bool((plain & DRAWS).any()))
            if len(shaped):
                at = uploaded(shaped, self.device)
                some = [part.index_select(0, at) for part in (logits, rows, positions)]
                chosen = self._sample_shaped(some[0], some[1], some[2], host[shaped])
                tokens = tokens.index_copy(0, at, chosen)
        if (flags & PENALISES).any():
            assert self.seen is not None
            count_tokens(rows, tokens, self.settings, self.seen)
        return self._with_logprobs(logits, tokens, flags, host)

    def sample_plain(
        self, logits: Tensor, rows: Tensor, positions: Tensor, draws: bool = True
    ) -> Tensor:
        """Choose tokens of rows that neither truncate nor penalise: int64 [S].

        Arguments as `sample`.  `draws` False: all are greedy.  Launches the same kernels for the
        same shapes, uploads nothing and changes nothing, so that a CUDA graph can hold it.
        """
        if logits.is_cuda and triton is not None and logits.stride(1) == 1:
            return launch_draw(logits, self.settings, KEY, rows, positions)
        if not draws:
            best, tokens = logits.max(-1)
            tokens = tokens.masked_fill(~best.isfinite(), -1)
        else:
            mine = self.settings.index_select(0, rows.clamp(min=0))
            temperature, keys = mine[:, TEMPERATURE].float(), mine[:, KEY:].long()
            tokens = draw_tokens(logits, temperature, keys, positions)
        return tokens.masked_fill(rows < 0, -1)

    def _sample_shaped(
        self, logits: Tensor, rows: Tensor, positions: Tensor, host: NDArray[np.int64]
    ) -> Tensor:
        tokens = self.sample_plain(shaped_logits(self, logits, rows, host), rows, positions)
        return tokens.masked_fill(~logits.amax(-1).isfinite(), -1)

    def apply(self, logits: Tensor, rows: Tensor, host_rows: ArrayLike) -> Tensor:
        """What the tokens are drawn from: logits after penalties, temperature and cuts.

        Returns: float32 [S, vocab], -inf where cut off; greedy rows keep a temperature of 1.
        """
        _, host = checked_batch(self, logits, rows, rows, host_rows)
        temperature = self.settings.index_select(0, rows.clamp(min=0))[:, TEMPERATURE, None].float()
        x = shaped_logits(self, logits, rows, host)
        return x / torch.where(temperature > 0, temperature, 1)

    def open_row(
        self,
        row: int,
        params: SamplingOptions,
        sample_index: int = 0,
        prompt_tokens: Sequence[int] = (),
        generated_tokens: Sequence[int] = (),
    ) -> None:
        """Give one row its settings; as `open_rows` with one."""
        self.open_rows([row], [params], [sample_index], [prompt_tokens], [generated_tokens])

    def _with_logprobs(
        self, logits: Tensor, tokens: Tensor, flags: NDArray[np.int8], host: NDArray[np.int64]
    ) -> Sampled:
        """The tokens, with log-probabilities where the host knows that they are wanted."""
        wanted = np.flatnonzero(flags & LOGPROBS)
        if not len(wanted):
            return Sampled(tokens)
        most = int(self.num_logprobs[host[wanted]].max())
        if len(wanted) == len(flags):
            return Sampled(tokens, *raw_logprobs(logits, tokens, most))
        at = uploaded(wanted, self.device)
        some = raw_logprobs(logits.index_select(0, at), tokens.index_select(0, at), most)
        return Sampled(tokens, *(spread_rows(part, at, len(tokens)) for part in some))
