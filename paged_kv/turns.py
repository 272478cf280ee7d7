# Exported from book/09_scheduling.py by tools/export.py; edit the chapter, not this file.
"""Rows that decode together, and reach the end of a block together."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paged_kv.block_tables import extend_by_one
from paged_kv.request import Ints
from paged_kv.residents import Residents, publish, publish_one_each


class Turn(NamedTuple):
    """Rows of a batch that are at the same place in their block.

    Fields: their `places` in the batch; `rows`, and `named`, the same as a list; `cells` and
    `chunks`, where these rows begin in the flat views of the table and of `RowState.chunks`.
    """

    places: Ints
    rows: Ints
    named: list[int]
    cells: Ints
    chunks: Ints


def advance(home: Residents, rows: Ints, ends: Ints, turn: Turn) -> None:
    """`Residents.reserve` of one token for each of `rows`, of which nothing has to be found out.

    Args: `ends`, their lengths then; `turn`, those of them that begin a block.
    Raises OutOfBlocks, with nothing changed.
    """
    tables, begin = home.manager.tables, turn.rows
    if len(begin):
        taken = home.manager.pool.take(len(begin))
        held = tables.num_blocks[begin]
        home.cells.append((begin, held.astype(np.int64)))
        extend_by_one(tables, begin, held, np.array(taken, np.int32))
        if home.cache is not None:
            home.cache.names.take_away(taken)
    tables.seq_lens[rows] = ends.astype(np.int32)


def publish_turn(home: Residents, turn: Turn, ends: Ints) -> None:
    """`publish` where it is known whose last block is full: `turn`, of a batch with `ends`."""
    cache, state, size = home.cache, home.rows, home.manager.block_size
    if cache is None or not turn.named:
        return
    rows, last, place = turn.rows, ends[turn.places], state.published[turn.rows]
    one_each = [(done + 1) * size for done in place.tolist()] == last.tolist()
    if not one_each or cache.generation != home.generation:
        publish(home, rows, last)
        return
    blocks = home.flat_table[turn.cells + place]  # all different, since each row wrote its own (I3)
    chunks = home.flat_chunks[turn.chunks + place].tolist()
    publish_one_each(home, cache, turn.named, chunks, blocks)
    state.published[rows] = place + home.ones[: len(chunks)]
