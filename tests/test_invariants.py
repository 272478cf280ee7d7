"""Random programs over sequences that share blocks: no block lost, none booked twice, every token read back.

2,000 steps as they stand; PAGED_KV_STEPS=200000 runs more.  Broken variants of the operations must be caught.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from paged_kv import copy_on_write
from paged_kv.block_manager import BlockManager
from paged_kv.block_pool import OutOfBlocks
from paged_kv.block_tables import slot_mapping
from paged_kv.kv_store import resolve_copies

STEPS = int(os.environ.get("PAGED_KV_STEPS", "2000"))
STEPS_A_PROGRAM = 40
MAX_SEQS, MAX_LEN = 6, 30
picks = st.integers(0, 10**6)


class Sequences(RuleBasedStateMachine):
    """A manager, its bytes (one number a slot), and what each sequence ought to read."""

    ops: Any = copy_on_write
    finish_row = staticmethod(BlockManager.finish)

    @initialize(block_size=st.sampled_from([1, 2, 4, 4, 7]), num_blocks=st.integers(3, 26))
    def start(self, block_size: int, num_blocks: int) -> None:
        self.manager = BlockManager(num_blocks, block_size, MAX_SEQS, MAX_LEN)
        self.slots = np.full((num_blocks, block_size), -1, np.int64)
        self.texts: dict[int, list[int]] = {}
        self.notes: list[tuple[int, int, list[int]]] = []  # full blocks noted down: id, epoch, tokens
        self.next_token = 0

    # ---- what a server would do

    def rows(self) -> list[int]:
        return sorted(self.texts)

    def some(self, pick: int) -> list[int]:
        """A batch of the open rows, at least one, in an order that `pick` decides."""
        order = np.random.default_rng(pick).permutation(self.rows()).tolist()
        return order[: 1 + pick % len(order)]

    def state(self) -> object:
        tables, pool = self.manager.tables, self.manager.pool
        arrays = (tables.table, tables.num_blocks, tables.seq_lens, tables.writable_until, pool.ref_count, pool.epoch)
        return [a.tolist() for a in arrays], pool.free_ids(), sorted(tables.guarded)

    @contextlib.contextmanager
    def whole(self):
        """What is refused must leave no trace."""
        before = self.state()
        try:
            yield
        except (OutOfBlocks, ValueError):
            assert self.state() == before

    def put(self, row: int, count: int) -> None:
        """Store `count` new tokens at the end of `row`, through the table."""
        new = list(range(self.next_token, self.next_token + count))
        self.next_token += count
        end = int(self.manager.tables.seq_lens[row])
        at = slot_mapping(self.manager.tables.table, [row] * count, range(end - count, end), self.manager.block_size)
        assert (at >= 0).all()
        self.slots.reshape(-1)[at] = new
        self.texts.setdefault(row, []).extend(new)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """All at once, from what the blocks hold at the start."""
        at_start = self.slots.copy()
        for source, destination in resolve_copies(pairs):
            self.slots[destination] = at_start[source]

    def room(self, rows: list[int], counts: np.ndarray) -> list[tuple[int, int]]:
        """make_writable and append, checked against what they said they need."""
        free = self.manager.pool.num_free
        needed = self.ops.blocks_needed(self.manager, rows, counts)
        pairs = self.ops.make_writable(self.manager, rows, counts)
        self.manager.append(rows, counts)
        assert free - self.manager.pool.num_free == needed
        return pairs

    # ---- rules

    @rule(tokens=st.integers(0, MAX_LEN + 2))
    def add(self, tokens: int) -> None:
        with self.whole():
            row = self.manager.add(tokens)
            self.texts[row] = []
            self.put(row, tokens)

    @precondition(lambda self: self.texts)
    @rule(pick=picks, most=st.integers(0, 9))
    def append(self, pick: int, most: int) -> None:
        rows = self.some(pick)
        counts = np.random.default_rng(pick).integers(0, most + 1, len(rows))
        with self.whole():
            self.copy(self.room(rows, counts))
            for row, count in zip(rows, counts.tolist(), strict=True):
                self.put(row, count)

    @precondition(lambda self: self.texts)
    @rule(pick=picks, children=st.integers(1, 4))
    def fork(self, pick: int, children: int) -> None:
        parents = np.random.default_rng(pick).choice(self.rows(), children).tolist()
        with self.whole():
            for parent, row in zip(parents, self.ops.fork_many(self.manager, parents), strict=True):
                self.texts[row] = list(self.texts[parent])

    @precondition(lambda self: self.texts)
    @rule(pick=picks)
    def beam_step(self, pick: int) -> None:
        rows = self.some(pick)
        parents = np.random.default_rng(pick + 1).choice(self.rows(), len(rows)).tolist()
        self.ops.rewire(self.manager, rows, parents)
        self.texts |= {row: list(self.texts[parent]) for row, parent in zip(rows, parents, strict=True)}
        if max(len(self.texts[row]) for row in rows) < MAX_LEN:
            with self.whole():
                self.copy(self.room(rows, np.ones(len(rows), np.int64)))
                for row in rows:
                    self.put(row, 1)

    @precondition(lambda self: self.texts)
    @rule(pick=picks, most=st.integers(0, 9))
    def rewind(self, pick: int, most: int) -> None:
        rows = self.some(pick)
        drop = np.random.default_rng(pick).integers(0, most + 1, len(rows))
        with self.whole():
            self.ops.rewind(self.manager, rows, drop)
            for row, count in zip(rows, drop.tolist(), strict=True):
                self.texts[row] = self.texts[row][: len(self.texts[row]) - count]

    @precondition(lambda self: self.texts)
    @rule(pick=picks)
    def finish(self, pick: int) -> None:
        row = self.rows()[pick % len(self.texts)]
        self.finish_row(self.manager, row)
        del self.texts[row]

    @precondition(lambda self: len(self.texts) > 2)
    @rule(pick=picks)
    def one_step_of_many_calls(self, pick: int) -> None:
        """Room for some, one finishes, room for others, who may get its blocks; then one launch of copies."""
        first, leaver, *others = np.random.default_rng(pick).permutation(self.rows()).tolist()
        grown: list[int] = []
        pairs: list[tuple[int, int]] = []
        for batch in ([first], others):
            with self.whole():
                pairs += self.room(batch, np.ones(len(batch), np.int64))
                grown += batch
            if leaver in self.texts:
                self.finish_row(self.manager, leaver)
                del self.texts[leaver]
        self.copy(pairs)
        for row in grown:
            self.put(row, 1)

    @precondition(lambda self: self.texts)
    @rule(pick=picks)
    def note(self, pick: int) -> None:
        """Remember what a full block holds, as a prefix cache will."""
        row = self.rows()[pick % len(self.texts)]
        size, text = self.manager.block_size, self.texts[row]
        for index, block in enumerate(self.manager.tables.ids(row)[: len(text) // size]):
            self.notes.append((block, int(self.manager.pool.epoch[block]), text[index * size : (index + 1) * size]))

    # ---- after each step

    @invariant()
    def no_block_is_lost_or_booked_twice(self) -> None:
        if hasattr(self, "manager"):
            self.manager.check()
            held = self.ops.blocks_held(self.manager, self.rows())
            assert sorted([*held, *self.manager.pool.free_ids()]) == list(range(self.manager.pool.num_blocks))

    @invariant()
    def every_sequence_reads_back_what_it_wrote(self) -> None:
        for row, text in getattr(self, "texts", {}).items():
            assert self.manager.tables.seq_lens[row] == len(text)
            at = slot_mapping(self.manager.tables.table, [row] * len(text), range(len(text)), self.manager.block_size)
            assert self.slots.reshape(-1)[at].tolist() == text

    @invariant()
    def a_note_of_the_present_epoch_is_true(self) -> None:
        for block, epoch, tokens in getattr(self, "notes", ()):
            if self.manager.pool.epoch[block] == epoch:
                assert self.slots[block].tolist() == tokens

    def teardown(self) -> None:
        for row in list(getattr(self, "texts", ())):
            self.finish_row(self.manager, row)
        if hasattr(self, "manager"):
            self.manager.check()
            assert self.manager.pool.num_free == self.manager.pool.num_blocks


QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


def run(machine: type[Sequences], steps: int, **options: Any) -> None:
    programs = max(1, steps // STEPS_A_PROGRAM)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=programs,
            stateful_step_count=STEPS_A_PROGRAM,
            deadline=None,
            database=None,
            suppress_health_check=QUIET,
            **options,
        ),
    )


def test_random_programs():
    run(Sequences, STEPS)


# ---------------------------------------------------------------------------- broken on purpose


class Broken:
    """The operations, with one replaced."""

    def __init__(self, **replaced: Any) -> None:
        self.__dict__.update({name: getattr(copy_on_write, name) for name in dir(copy_on_write)}, **replaced)


def forgets_the_copy(manager, rows, new_tokens=1):
    copy_on_write.make_writable(manager, rows, new_tokens)
    return []


def copies_for_every_writer(manager, rows, new_tokens=1):
    """Looks at the counts once for the whole batch: the last holder copies too."""
    _, _, blocks = copy_on_write.guarded_tails(manager, rows, new_tokens)
    before = manager.pool.ref_count[blocks].copy()
    pairs = copy_on_write.make_writable(manager, rows, new_tokens)
    if len(blocks) > 1 and len(set(blocks.tolist())) == 1 and before[0] == len(blocks):
        tail = int(blocks[0])
        row = next(row for row in rows if tail in manager.tables.ids(row))
        fresh = manager.pool.take(1)[0]
        manager.tables.replace(row, manager.tables.ids(row).index(tail), fresh)
        pairs.append((tail, fresh))  # nobody lets go of the old one
    return pairs


def ignores_the_guard(manager, rows, new_tokens=1):
    for row in rows:
        tables = manager.tables
        tables.guarded.discard(row)
        tables.writable_until[row] = min(tables.num_blocks[row] * manager.block_size, tables.max_seq_len)
    return []


def rewires_in_turn(manager, rows, parents):
    for row, parent in zip(rows, parents, strict=True):
        copy_on_write.rewire(manager, [row], [parent])


def forks_without_counting(manager, parents):
    children = copy_on_write.fork_many(manager, parents)
    for child in children:
        np.subtract.at(manager.pool.ref_count, manager.tables.ids(child), 1)
    return children


def rewinds_without_epoch(manager, rows, count=1):
    before = manager.pool.epoch.copy()
    copy_on_write.rewind(manager, rows, count)
    manager.pool.epoch[:] = before


def writes_without_epoch(manager, rows, new_tokens=1):
    before = manager.pool.epoch.copy()
    pairs = copy_on_write.make_writable(manager, rows, new_tokens)
    fresh = [destination for _, destination in pairs]
    before[fresh] = manager.pool.epoch[fresh]
    manager.pool.epoch[:] = before
    return pairs


def releases_twice(manager, row):
    ids = manager.tables.ids(row)
    manager.finish(row)
    manager.pool.release([block for block in ids if manager.pool.ref_count[block]])


class NoReleaseTwice(Sequences):
    finish_row = staticmethod(releases_twice)


@pytest.mark.parametrize(
    "replaced",
    [
        {"make_writable": forgets_the_copy},
        {"make_writable": copies_for_every_writer},
        {"make_writable": ignores_the_guard},
        {"rewire": rewires_in_turn},
        {"fork_many": forks_without_counting},
        {"rewind": rewinds_without_epoch, "make_writable": writes_without_epoch},
        {"finish": releases_twice},
    ],
    ids=lambda replaced: "-".join(function.__name__ for function in replaced.values()),
)
def test_broken_variants_are_caught(replaced):
    if "finish" in replaced:
        machine = NoReleaseTwice
    else:
        machine = type("BrokenSequences", (Sequences,), {"ops": Broken(**replaced)})
    with pytest.raises((AssertionError, ValueError)):
        run(machine, 400 * STEPS_A_PROGRAM, phases=[Phase.generate], derandomize=True)
