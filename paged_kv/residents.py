# Exported from book/09_scheduling.py by tools/export.py; edit the chapter, not this file.
"""The groups that hold rows: how they move in, grow, branch, and move out."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_kv.block_manager import BlockManager
from paged_kv.block_tables import BlockTables
from paged_kv.copy_on_write import fork, guarded_tails, make_writable, rewind, rewire
from paged_kv.prefix_cache import PrefixCache, admit_cached, give_back
from paged_kv.prefix_keys import Node
from paged_kv.request import Group, Ints, Sample
from paged_kv.row_state import NONE, RowState

NEVER = 2**40  # so many blocks count as published that no more will be


@dataclass(frozen=True)
class Saved:
    """What one sample of a suspended group had in the cache and can come back with.

    `ids` are the blocks of its first `num_tokens` tokens, first to last.
    """

    index: int
    num_tokens: int
    ids: list[int]


@dataclass(frozen=True)
class News:
    """What the device has to be told: changed entries of tables, new tenants, closed rows."""

    table_updates: tuple[Ints, Ints, NDArray[np.int32]]
    opened: tuple[tuple[int, Hashable, int], ...]
    closed: tuple[int, ...]


class Residents:
    """Rows of the block table and their tenants, kept in step.

    State
        rows      RowState, one entry a row.
        running   int64 [n]: the rows with a tenant, in the order in which they moved in.
        above     {row: the node of its last published block, or its root}.
        branching {serial: group}: those with samples that have no row yet.
        reserved  rows that the running groups have or will need.
        opened, closed, whole, cells   what the next plan has to tell the device; and `grown`,
                  whether rows that run one token have taken blocks, which it sees for itself.
        departures  how many tenants have left so far.
        flat_table, flat_chunks  the block table and `rows.chunks`, the same memory in a row.
        ramp, ones, none  int64, longer than any batch, constant: 0, 1, 2, ...; all 1; all -1.
    Invariant: a row of the table is open iff it has a tenant.
    """

    def __init__(self, manager: BlockManager, cache: PrefixCache | None) -> None:
        self.manager, self.cache = manager, cache
        max_seqs = len(manager.tables.table)
        self.rows = RowState(max_seqs, manager.tables.max_seq_len, manager.block_size)
        self.running = NONE
        self.above: dict[int, Node | bytes] = {}
        self.generation = 0 if cache is None else cache.generation
        self.branching: dict[int, Group] = {}
        self.reserved = self.departures = 0
        self.opened: dict[int, None] = {}
        self.closed: dict[int, None] = {}
        self.whole: dict[int, None] = {}
        self.cells: list[tuple[Ints, Ints]] = []
        self.grown = False
        self.flat_table = manager.tables.table.reshape(-1)
        self.flat_chunks = self.rows.chunks.reshape(-1)
        self.ramp = np.arange(max(max_seqs, manager.block_size) + 1)
        self.ones, self.none = np.ones_like(self.ramp), np.full_like(self.ramp, -1)
        for constant in (self.ramp, self.ones, self.none):
            constant.flags.writeable = False

    def seat(self, row: int, group: Group, sample: Sample, published: int = 0) -> None:
        """Give the open `row` its tenant; its first `published` blocks are known by their keys."""
        self.above[row] = group.root
        if self.cache is not None and group.generation != self.cache.generation:
            published = NEVER
        elif published and self.cache is not None:
            node = self.cache.names.named[self.manager.tables.table.item(row, published - 1)]
            self.above[row] = group.root if node is None else node
            published = NEVER if node is None else published
        self.rows.bind(row, group, sample, published)
        self.running = np.append(self.running, row)
        self.opened[row] = self.whole[row] = None

    def vacate(self, samples: Sequence[Sample]) -> None:
        """Close the rows of `samples`, which keep their tokens; blocks go back tails first."""
        for sample in samples:
            if (row := sample.row) >= 0:
                self.rows.unbind(row)
                give_back(self.manager, row)
                del self.above[row]
                self.departures += 1
                if row in self.opened:
                    del self.opened[row]
                else:
                    self.closed[row] = None
                self.whole.pop(row, None)
        self.running = self.running[self.rows.serial[self.running] >= 0]
        self.reserved -= len(samples)

    def check(self) -> None:
        """Assert that open rows and tenants agree, and the invariants of both.  For tests."""
        self.manager.check()
        self.rows.check()
        open_rows = (self.manager.tables.seq_lens >= 0).nonzero()[0].tolist()
        assert sorted(self.running.tolist()) == open_rows, "an open row without a tenant"
        assert (self.rows.serial[self.running] >= 0).all(), "a tenant without a number"
        assert sorted(self.above) == open_rows, "a row whose next block has nothing to stand behind"
        lens = self.manager.tables.seq_lens[self.running]
        assert (lens <= self.rows.reach(self.running)).all(), "K/V of a token not known of"

    def move_in(self, group: Group, num_tokens: int) -> int:
        """Open a row for the first live sample, with hits and `num_tokens` tokens beyond them.

        Returns: the row.  Raises OutOfBlocks, with nothing changed.
        """
        manager, (sample, *others) = self.manager, group.live()
        keep_up(self)
        group.generation = self.generation
        if self.cache is None:
            row, hit = manager.add(num_tokens), 0
        else:
            row, hit = admit_cached(manager, self.cache, sample.tokens, group.root, num_tokens)
        group.hit_tokens += hit
        if others:
            self.branching[group.serial] = group
        self.reserved += 1 + len(others)
        self.seat(row, group, sample, hit // manager.block_size)
        publish(self, np.array([row]), manager.tables.seq_lens[[row]])
        return row

    def reserve(self, rows: Ints, counts: Ints | int) -> list[tuple[int, int]]:
        """Room for `counts` tokens more in each of `rows`.  Returns the copies to make first.

        Raises OutOfBlocks, with nothing changed.  Keeps the cache informed.
        """
        tables, copies, fresh = self.manager.tables, list[tuple[int, int]](), list[int]()
        if tables.guarded:
            writers, index, _ = guarded_tails(self.manager, rows, counts)
            copies = make_writable(self.manager, rows, counts)
            self.cells.append((writers, index))
            fresh = tables.table[writers, index].tolist()
        taken = self.manager.append(rows, counts)
        self.grown |= bool(taken) and isinstance(counts, int)
        if taken and not isinstance(counts, int):
            self.cells.append(new_cells(tables, rows, counts))
        if self.cache is not None and (taken or fresh):
            self.cache.forget(taken + fresh)
        return copies


def new_cells(tables: BlockTables, rows: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """Row and column of each block that `rows` took to hold their last `counts` tokens."""
    ends, size = tables.seq_lens[rows].astype(np.int64), tables.block_size
    first = -(-(ends - counts) // size)
    more = -(-ends // size) - first
    place = np.arange(more.sum()) - np.repeat(more.cumsum() - more, more)
    return np.repeat(rows, more), np.repeat(first, more) + place


def keep_up(home: Residents) -> None:
    """After a reset of the cache: what the rows hold from before is never to be found."""
    if home.cache is not None and home.cache.generation != home.generation:
        home.rows.published[home.running] = NEVER
        home.generation = home.cache.generation


def publish(home: Residents, rows: Ints, ends: NDArray[np.integer[Any]]) -> None:
    """Make the full blocks of the first `ends` tokens findable, where `rows` have new ones."""
    cache, state, size = home.cache, home.rows, home.manager.block_size
    if cache is None:
        return
    keep_up(home)
    full = ends // size
    due = (full > state.published[rows]).nonzero()[0]
    if not len(due):
        return
    rows, full = rows[due], full[due]
    place, named = full - 1, rows.tolist()
    blocks = home.manager.tables.table[rows, place]
    if len(set(blocks.tolist())) < len(named) or (state.published[rows] != place).any():
        for row, end in zip(named, full.tolist(), strict=True):
            publish_row(home, cache, row, end)
        return
    publish_one_each(home, cache, named, state.chunks[rows, place].tolist(), blocks)
    state.published[rows] = full


def publish_one_each(
    home: Residents,
    cache: PrefixCache,
    named: list[int],
    chunks: list[bytes],
    blocks: NDArray[np.int32],
) -> None:
    """Name `blocks`, each the next one of its row, by their tokens."""
    nodes = cache.names.add(map(home.above.__getitem__, named), chunks, blocks)
    home.above.update(zip(named, nodes, strict=True))


def publish_row(home: Residents, cache: PrefixCache, row: int, end: int) -> None:
    """Publish the blocks of `row` from the first that is not up to the `end`th."""
    state, size, before = home.rows, home.manager.block_size, home.rows.published.item(row)
    ids = home.manager.tables.table[row, before:end]
    tokens = state.tokens[row, before * size : end * size]
    home.above[row] = cache.publish_behind(home.above[row], tokens, ids)
    state.published[row] = end


def branch(home: Residents) -> list[tuple[int, int]]:
    """Fork the samples whose parent has come as far as their common text.

    Returns: (row of the parent, row of the child) where the child needs a sample drawn
    from the parent's logits; the others have tokens of their own to run.
    """
    tables, first = home.manager.tables, list[tuple[int, int]]()
    for group in list(home.branching.values()):
        for sample in group.live():
            row = group.samples[sample.parent].row
            if sample.row >= 0 or row < 0 or tables.seq_lens[row] < sample.at:
                continue
            child = fork(home.manager, row)
            rewind(home.manager, child, int(tables.seq_lens[row]) - sample.at)
            if sample.at == len(sample.tokens):
                first.append((row, child))
            shared = sample.at // home.manager.block_size
            home.seat(child, group, sample, min(shared, home.rows.published.item(row)))
        if all(sample.row >= 0 for sample in group.live()):
            del home.branching[group.serial]
    return first


def rewire_beams(home: Residents, rows: Ints, parents: Ints) -> None:
    """Let the beam in each of `rows` become what that in `parents` was, text and blocks."""
    rewire(home.manager, rows, parents)
    state = home.rows
    state.tokens[rows] = state.tokens[parents]
    state.published[rows] = state.published[parents]
    above = [home.above[row] for row in parents.tolist()]
    home.above.update(zip(rows.tolist(), above, strict=True))
    home.whole.update(dict.fromkeys(rows[rows != parents].tolist()))


def take_news(home: Residents) -> News:
    """What the device does not know yet, for the next plan; from now on it does."""
    table, counts = home.manager.tables.table, home.manager.tables.num_blocks
    if len(home.cells) == 1 and not (home.whole or home.opened or home.closed):
        (rows, columns), home.cells, home.grown = home.cells[0], [], False
        return News((rows, columns.astype(np.int64, copy=False), table[rows, columns]), (), ())
    cells = home.cells + [(np.full(counts[r], r), np.arange(counts[r])) for r in home.whole]
    if len(cells) == 1:
        rows, columns = cells[0]
    else:
        rows = np.concatenate([NONE, *(cell[0] for cell in cells)])
        columns = np.concatenate([NONE, *(cell[1] for cell in cells)])
    tenants = [(row, home.rows.group[row], home.rows.sample[row]) for row in home.opened]
    opened = tuple((row, group.id, sample.index) for row, group, sample in tenants)
    news = News((rows, columns, table[rows, columns]), opened, tuple(home.closed))
    home.cells, home.grown, home.whole, home.opened, home.closed = [], False, {}, {}, {}
    return news
