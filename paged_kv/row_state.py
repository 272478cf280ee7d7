# Exported from book/09_scheduling.py by tools/export.py; edit the chapter, not this file.
"""What is known of the sequence in each row, in arrays that one operation reads for all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paged_kv.prefix_keys import chunk_type
from paged_kv.request import Group, Ints, Sample, Tokens

NONE = np.empty(0, np.int64)


class RowState:
    """Tokens, lengths and ends of the sequences that hold rows.

    State, one entry a row of the block table
        tokens     int32 [max_seqs, width]: prompt and output.
        chunks     the same memory, an item a block.   flat: the same, [max_seqs x width].
        known      int64: tokens committed.
        expected   int64: those and the samples in flight.
        limit      int64: tokens at which it ends.
        published  int64: leading blocks whose keys are published.
        serial     int64: number of the tenant, never used again; -1 without one.
        sample_at  int64: place of its newest sample in the plan that takes it.
        stop       int32 [width of the largest set, max_seqs]: stop tokens, padded with -1.
        group, sample  {row: whose it is}.
    Invariant: known <= expected <= known + 2 (two plans in flight) and expected <= limit.
    """

    def __init__(self, max_seqs: int, max_seq_len: int, block_size: int = 1) -> None:
        self.width = -(-(max_seq_len + 1) // block_size) * block_size
        self.tokens = np.zeros((max_seqs, self.width), np.int32)
        self.flat = self.tokens.reshape(-1)
        self.chunks = self.tokens.view(chunk_type(block_size))
        columns = np.zeros((5, max_seqs), np.int64)
        self.known, self.expected, self.limit, self.published, self.sample_at = columns
        self.serial, self.stop = np.full(max_seqs, -1), np.full((1, max_seqs), -1, np.int32)
        self.group, self.sample = dict[int, Group](), dict[int, Sample]()
        self._tenants = 0

    def bind(self, row: int, group: Group, sample: Sample, published: int) -> None:
        """Let `sample` of `group` move into `row`, where it has `published` blocks with keys."""
        known = len(sample.tokens)
        self.tokens[row, :known] = sample.tokens
        self.known[row] = self.expected[row] = known
        self.limit[row] = group.request.limit
        self.published[row] = published
        self.serial[row] = self._tenants
        self._tenants += 1
        self.group[row], self.sample[row] = group, sample
        sample.row = row
        stops = () if group.beams else group.request.stop_tokens
        if len(stops) > len(self.stop):
            more = np.full((len(stops) - len(self.stop), self.stop.shape[1]), -1, np.int32)
            self.stop = np.concatenate([self.stop, more])
        self.stop[:, row] = -1
        self.stop[: len(stops), row] = stops

    def unbind(self, row: int) -> None:
        """Let the sample in `row` move out, with its tokens."""
        sample = self.sample.pop(row)
        sample.tokens, sample.row = self.tokens[row, : self.known[row]].copy(), -1
        self.serial[row] = -1
        del self.group[row]

    def reach(self, rows: Ints) -> Ints:
        """How many tokens of K/V each row can have now; its very last token needs none."""
        return np.minimum(self.expected[rows], self.limit[rows] - 1)

    def record(
        self,
        rows: Ints,
        ends: Ints,
        tokens: Tokens,
        may_fill: bool = True,
        at_hand: tuple[Ints, Ints, Sequence[Tokens]] | None = None,
    ) -> tuple[Ints, Ints]:
        """Commit one token a row, behind the `ends` that are known.

        Args: `may_fill`, whether one of them could reach its limit with it; `at_hand`, if the
        caller has them, the places in `flat`, `ends + 1` and the stop tokens of these rows.
        Returns: the rows that end, at a stop token and at their limit.
        """
        if at_hand is None:
            at_hand = rows * self.width + ends, ends + 1, [stop[rows] for stop in self.stop]
        places, known, stops = at_hand
        self.flat[places] = tokens
        self.known[rows] = known
        stopped = stops[0] == tokens
        for others in stops[1:]:
            stopped |= others == tokens
        if may_fill:
            full = (known == self.limit[rows]) & ~stopped
            return rows[stopped], rows[full]
        return (rows[stopped], NONE) if np.count_nonzero(stopped) else (NONE, NONE)

    def check(self) -> None:
        """Assert the invariant.  O(max_seqs), for tests."""
        held = self.serial >= 0
        known, expected = self.known[held], self.expected[held]
        assert ((known <= expected) & (expected <= known + 2)).all(), "samples in flight"
        assert (expected <= self.limit[held]).all(), "a sample past the limit"
        assert len(set(self.serial[held].tolist())) == held.sum(), "two tenants of one number"
