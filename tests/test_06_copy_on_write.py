"""Chapter 06: fork, make writable, rewire, rewind; the run by hand; reported failures of other systems."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_kv.block_manager import BlockManager
from paged_kv.block_pool import OutOfBlocks
from paged_kv.copy_on_write import (
    blocks_held,
    blocks_needed,
    copies_needed,
    fork,
    fork_many,
    make_writable,
    must_copy,
    rewind,
    rewire,
)
from paged_kv.kv_store import KVStore, resolve_copies
from paged_kv.sizing import KVSpec


def state(manager):
    """Everything that an operation could change."""
    tables, pool = manager.tables, manager.pool
    arrays = (tables.table, tables.num_blocks, tables.seq_lens, tables.writable_until, pool.ref_count, pool.epoch)
    return [a.tolist() for a in arrays], pool.free_ids(), sorted(tables.guarded), list(tables._closed)


def refused(manager, error, match, action, *args):
    """`action` raises `error` naming the argument, and leaves the state as it was."""
    before = copy.deepcopy(state(manager))
    with pytest.raises(error, match=match):
        action(manager, *args)
    assert state(manager) == before
    manager.check()


def grow(manager, rows, new_tokens=1):
    pairs = make_writable(manager, rows, new_tokens)
    manager.append(rows, new_tokens)
    manager.check()
    return pairs


def test_run_by_hand():
    manager = BlockManager(6, 4, 4, 24)
    a = manager.add(6)
    b = fork(manager, a)
    tables = manager.tables
    assert (tables.ids(a), tables.ids(b), manager.pool.free_ids()) == ([0, 1], [0, 1], [2, 3, 4, 5])
    assert manager.pool.ref_count[:3].tolist() == [2, 2, 0]
    assert grow(manager, a) == [(1, 2)]
    assert (tables.ids(a), tables.ids(b), manager.pool.free_ids()) == ([0, 2], [0, 1], [3, 4, 5])
    assert manager.pool.ref_count[:3].tolist() == [2, 1, 1]
    assert grow(manager, b) == []
    assert (tables.ids(a), tables.ids(b), manager.pool.free_ids()) == ([0, 2], [0, 1], [3, 4, 5])
    assert manager.pool.ref_count[:3].tolist() == [2, 1, 1]
    assert tables.seq_lens[[a, b]].tolist() == [7, 7]
    manager.finish(a)
    manager.finish(b)
    assert manager.pool.num_free == 6


def test_four_samples_of_a_long_prompt():
    spec = KVSpec(80, 8, 128, "fp16")
    assert spec.bytes_per_token == 320 * 1024
    manager = BlockManager(125, 16, 4, 4096)
    row = manager.add(2000)
    fork_many(manager, [row] * 3)
    held = blocks_held(manager, range(4))
    assert len(held) == 125
    assert len(held) * 16 * spec.bytes_per_token == 625 * 2**20
    assert round(4 * 2000 * spec.bytes_per_token / 2**30, 2) == 2.44


class TestCopies:
    @pytest.mark.parametrize("holders", [2, 3, 6])
    def test_k_writers_of_r_holders_need_min_k_r_minus_1(self, holders):
        for writers in range(1, holders + 1):
            manager = BlockManager(32, 4, 8, 24)
            row = manager.add(6)
            rows = [row, *fork_many(manager, [row] * (holders - 1))]
            free = manager.pool.num_free
            expected = min(writers, holders - 1)
            assert copies_needed(manager, rows[:writers]) == expected
            assert blocks_needed(manager, rows[:writers]) == expected
            pairs = grow(manager, rows[:writers])
            assert [source for source, _ in pairs] == [1] * expected
            assert free - manager.pool.num_free == expected
            tails = [manager.tables.ids(row)[1] for row in rows]
            assert len(set(tails[:writers])) == writers
            assert not set(tails[:writers]) & set(tails[writers:])

    def test_last_holder_in_the_order_of_the_batch_stays(self):
        manager = BlockManager(8, 4, 4, 24)
        a = manager.add(6)
        b, c = fork_many(manager, [a, a])
        assert make_writable(manager, [c, a, b]) == [(1, 2), (1, 3)]
        assert [manager.tables.ids(row)[1] for row in (a, b, c)] == [3, 1, 2]

    def test_batch_equals_one_by_one(self):
        together, apart = BlockManager(60, 4, 16, 24), BlockManager(60, 4, 16, 24)
        for manager in (together, apart):
            roots = [manager.add(length) for length in (6, 4, 7, 1)]
            fork_many(manager, [roots[0]] * 3 + [roots[1]] + [roots[2]] * 2 + [roots[3]])
        rows = [9, 0, 5, 4, 2, 6, 7, 10]
        pairs = make_writable(together, rows)
        single = []
        for row in rows:
            single += make_writable(apart, row)
            apart.tables.seq_lens[row] += 0  # no append between: blocks are taken for copies only
        assert pairs == single
        assert (together.tables.table == apart.tables.table).all()
        assert (together.pool.ref_count == apart.pool.ref_count).all()

    def test_blocks_full_for_the_writer_are_never_copied(self):
        for length in (4, 8):
            manager = BlockManager(8, 4, 4, 24)
            a = manager.add(length)
            b = fork(manager, a)
            assert copies_needed(manager, [a, b]) == 0
            assert blocks_needed(manager, [a, b]) == 2
            assert grow(manager, [a, b]) == []

    def test_a_row_that_writes_nothing_needs_nothing(self):
        manager = BlockManager(8, 4, 4, 24)
        a = manager.add(6)
        b = fork(manager, a)
        assert make_writable(manager, [a, b], np.array([0, 0])) == []
        assert make_writable(manager, [a, b], np.array([0, 3])) == [(1, 2)]
        assert manager.tables.ids(a) == [0, 1]

    def test_several_tokens_copy_one_tail_and_take_fresh_blocks(self):
        manager = BlockManager(8, 4, 4, 24)
        a = manager.add(6)
        b = fork(manager, a)
        assert blocks_needed(manager, a, 7) == 3
        assert grow(manager, a, 7) == [(1, 2)]
        assert manager.tables.ids(a) == [0, 2, 3, 4]
        assert manager.tables.ids(b) == [0, 1]

    def test_append_by_itself_is_refused(self):
        manager = BlockManager(8, 4, 4, 24)
        a = manager.add(6)
        fork(manager, a)
        refused(manager, ValueError, "would write block 1", BlockManager.append, a)

    def test_epoch_of_a_copy_and_of_a_tail_written_in_place(self):
        manager = BlockManager(8, 4, 4, 24)
        a = manager.add(6)
        b = fork(manager, a)
        before = manager.pool.epoch.copy()
        grow(manager, a)
        assert (manager.pool.epoch - before)[:3].tolist() == [0, 0, 1]
        grow(manager, b)
        assert (manager.pool.epoch - before)[:3].tolist() == [0, 1, 1]
        grow(manager, b)
        assert (manager.pool.epoch - before)[:3].tolist() == [0, 1, 1]  # no longer guarded

    def test_must_copy(self):
        counts = np.array([1, 4, 2], np.int32)
        assert must_copy(counts, np.array([1, 2, 1, 0, 2, 1])).tolist() == [True, True, True, False, False, True]
        assert must_copy(counts, np.array([], np.int32)).tolist() == []


class TestAllOrNothing:
    def test_copies_and_full_tails_are_counted_together(self):
        manager = BlockManager(4, 4, 4, 24)
        a = manager.add(6)
        b = fork(manager, a)
        c = manager.add(4)
        assert (copies_needed(manager, [a, c]), blocks_needed(manager, [a, c])) == (1, 2)
        refused(manager, OutOfBlocks, "2 blocks needed, 1 free", make_writable, [a, c])
        refused(manager, OutOfBlocks, "2 blocks needed, 1 free", make_writable, [a, b], np.array([1, 4]))
        assert grow(manager, [a, b]) == [(1, 3)]

    def test_a_refused_step_leaves_the_epochs(self):
        manager = BlockManager(2, 4, 4, 24)
        a = manager.add(6)
        manager.finish(fork(manager, a))
        refused(manager, OutOfBlocks, "1 blocks needed, 0 free", make_writable, a, 3)

    def test_bad_input(self):
        manager = BlockManager(8, 4, 3, 10)
        a = manager.add(6)
        b = fork(manager, a)
        refused(manager, ValueError, "row = 2", fork, 2)
        refused(manager, ValueError, "row = -1", fork, -1)
        refused(manager, ValueError, "2 rows are needed, 1 are left", fork_many, [a, b])
        refused(manager, ValueError, "row = 2", make_writable, [a, 2])
        refused(manager, ValueError, "twice", make_writable, [a, a])
        refused(manager, ValueError, "new_tokens = 5", make_writable, a, 5)
        refused(manager, ValueError, "new_tokens = -1", make_writable, a, -1)
        refused(manager, ValueError, "new_tokens", blocks_needed, a, 5)
        refused(manager, ValueError, "row = 2", rewire, [a, 2], [a, a])
        refused(manager, ValueError, "row = 2", rewire, [a, b], [a, 2])
        refused(manager, ValueError, "twice", rewire, [a, a], [a, b])
        refused(manager, ValueError, "parents: 1 for 2", rewire, [a, b], [a])
        refused(manager, ValueError, "count = 7", rewind, a, 7)
        refused(manager, ValueError, "count = 1.5", rewind, a, 1.5)
        refused(manager, ValueError, "count = True", rewind, a, True)
        refused(manager, ValueError, "count = None", rewind, a, None)
        refused(manager, ValueError, "new_tokens = True", make_writable, a, True)
        refused(manager, ValueError, "new_tokens = 1.0", make_writable, a, 1.0)
        refused(manager, ValueError, "0.5", fork, 0.5)
        refused(manager, ValueError, "True", fork, True)
        refused(manager, ValueError, "rows", rewire, [a, b], [0.5, 0.2])
        refused(manager, ValueError, "count = -1", rewind, [a, b], -1)
        refused(manager, ValueError, "count", rewind, [a, b], np.array([1, 9]))
        refused(manager, ValueError, "row = 2", rewind, 2)
        refused(manager, ValueError, "row = 2", blocks_held, [2])

    def test_empty_batches(self):
        manager = BlockManager(8, 4, 3, 10)
        before = copy.deepcopy(state(manager))
        assert fork_many(manager, []) == []
        assert make_writable(manager, []) == []
        rewire(manager, [], [])
        rewind(manager, [])
        assert blocks_held(manager, []) == []
        assert state(manager) == before

    def test_forking_an_empty_row(self):
        manager = BlockManager(8, 4, 3, 10)
        a = manager.add(0)
        b = fork(manager, a)
        assert grow(manager, [a, b]) == []
        assert (manager.tables.ids(a), manager.tables.ids(b)) == ([0], [1])


class TestRewire:
    def three(self):
        manager = BlockManager(12, 4, 4, 24)
        a = manager.add(6)
        rows = [a, *fork_many(manager, [a, a])]
        for _ in range(3):
            grow(manager, rows)
        return manager, rows

    def test_losers_are_released_and_winners_shared(self):
        manager, rows = self.three()
        assert [manager.tables.ids(row) for row in rows] == [[0, 2, 4], [0, 3, 5], [0, 1, 6]]
        rewire(manager, rows, [rows[0], rows[1], rows[0]])
        manager.check()
        assert [manager.tables.ids(row) for row in rows] == [[0, 2, 4], [0, 3, 5], [0, 2, 4]]
        assert manager.pool.free_ids()[-2:] == [6, 1]  # tail first
        assert manager.pool.ref_count[[0, 2, 4, 3, 5]].tolist() == [3, 2, 2, 1, 1]
        assert grow(manager, rows) == [(4, 7)]

    def test_swap_and_rotation(self):
        manager, rows = self.three()
        before = [manager.tables.ids(row) for row in rows]
        epoch = manager.pool.epoch.copy()
        rewire(manager, rows, rows[1:] + rows[:1])
        manager.check()
        assert [manager.tables.ids(row) for row in rows] == before[1:] + before[:1]
        assert (manager.pool.epoch == epoch).all()

    def test_nothing_moves_when_all_go_on(self):
        manager, rows = self.three()
        before = copy.deepcopy(state(manager))
        rewire(manager, rows, rows)
        assert state(manager) == before

    def test_a_parent_outside_the_batch(self):
        manager, rows = self.three()
        lone = manager.add(3)
        rewire(manager, rows[:1], [lone])
        manager.check()
        assert manager.tables.ids(rows[0]) == manager.tables.ids(lone)
        assert manager.tables.seq_lens[rows[0]] == 3

    def test_many_at_once(self):
        manager = BlockManager(6000, 16, 1024, 256)
        rows = []
        for _ in range(256):
            root = manager.add(100)
            rows += [root, *fork_many(manager, [root] * 3)]
        rng = np.random.default_rng(0)
        rows = np.array(rows)
        for _ in range(20):
            parents = np.take_along_axis(rows.reshape(-1, 4), rng.integers(0, 4, (256, 4)), 1)
            rewire(manager, rows, parents.reshape(-1))
            make_writable(manager, rows)
            manager.append(rows)
        manager.check()
        for row in rows.tolist():
            manager.finish(row)
        assert manager.pool.num_free == 6000


class TestRewind:
    def test_blocks_go_back_tail_first(self):
        manager = BlockManager(8, 4, 2, 32)
        a = manager.add(15)
        rewind(manager, a, 12)
        assert manager.tables.ids(a) == [0]
        assert manager.pool.free_ids() == [4, 5, 6, 7, 3, 2, 1]
        manager.check()

    def test_a_full_shared_block_becomes_a_partial_one(self):
        manager = BlockManager(6, 4, 2, 24)
        a = manager.add(8)
        b = fork(manager, a)
        assert copies_needed(manager, [a, b]) == 0
        epoch = manager.pool.epoch.copy()
        rewind(manager, a)
        assert (manager.pool.epoch == epoch).all()
        assert grow(manager, [a, b]) == [(1, 2)]
        assert (manager.tables.ids(a), manager.tables.ids(b)) == ([0, 2], [0, 1, 3])

    def test_a_note_of_a_block_owned_alone_is_made_stale(self):
        manager = BlockManager(6, 4, 2, 24)
        a = manager.add(8)
        rewind(manager, a, 4)  # the block is given up whole: its bytes stay, so does its note
        assert manager.pool.epoch.tolist() == [1, 1, 0, 0, 0, 0]
        rewind(manager, a, 1)
        assert manager.pool.epoch.tolist() == [2, 1, 0, 0, 0, 0]

    def test_a_note_is_made_stale_when_the_other_holder_left_before_the_write(self):
        manager = BlockManager(6, 4, 2, 24)
        a = manager.add(4)
        b = fork(manager, a)
        rewind(manager, a)
        manager.finish(b)
        assert manager.pool.epoch[0] == 1
        assert grow(manager, a) == []
        assert manager.pool.epoch[0] == 2

    def test_different_counts_and_none(self):
        manager = BlockManager(8, 4, 3, 24)
        rows = [manager.add(6), manager.add(6), manager.add(6)]
        rewind(manager, rows, np.array([0, 2, 6]))
        manager.check()
        assert manager.tables.seq_lens[rows].tolist() == [6, 4, 0]
        assert manager.tables.guarded == {rows[1], rows[2]}

    def test_blocks_that_slid_out_of_a_window_are_not_reached(self):
        manager = BlockManager(8, 4, 1, 24)
        a = manager.add(10)
        manager.pool.release(manager.tables.drop_front(a, 2))
        refused(manager, ValueError, "dropped", rewind, a, 2)
        refused(manager, ValueError, "dropped", rewind, a, 5)
        rewind(manager, a, 1)
        manager.check()


def test_a9_forks_that_slide_past_a_window():
    """A9: one reference a distinct block; both orders of finishing give back everything."""
    for order in ((0, 1), (1, 0)):
        manager = BlockManager(12, 4, 2, 64)
        a = manager.add(10)
        rows = [a, fork(manager, a)]
        assert manager.pool.ref_count[:3].tolist() == [2, 2, 2]
        for _ in range(3):
            pairs = grow(manager, rows)
            for source, destination in pairs:
                assert source not in manager.tables.ids(rows[0])  # the copied block left that row
                assert destination in manager.tables.ids(rows[0])
            for row in rows:
                out = (int(manager.tables.seq_lens[row]) + 1 - 8) // 4  # whole blocks the next query cannot see
                gone = int((manager.tables.table[row, :out] < 0).sum())
                if out > gone:
                    manager.pool.release(manager.tables.drop_front(row, out))
                manager.check()
        assert manager.tables.table[rows, 0].tolist() == [-1, -1]
        assert manager.pool.ref_count[0] == 0
        for index in order:
            manager.finish(rows[index])
            manager.check()
        assert manager.pool.num_free == 12


def test_a10_a_group_gives_back_physical_blocks():
    """A10: 7 blocks, not 16; five from the tail are the four own ones, then the third shared one."""
    manager = BlockManager(8, 4, 4, 24)
    row = manager.add(12)
    rows = [row, *fork_many(manager, [row] * 3)]
    grow(manager, rows)
    assert len(blocks_held(manager, rows)) == 7
    assert sum(len(manager.tables.ids(row)) for row in rows) == 16
    rewind(manager, rows, 5)
    manager.check()
    assert manager.pool.free_ids() == [7, 3, 4, 5, 6, 2]
    assert [manager.tables.ids(row) for row in rows] == [[0, 1]] * 4
    assert manager.pool.ref_count[:2].tolist() == [4, 4]


def test_a11_copies_of_one_step():
    """A11: the list of one step, two tiers in it, equals the copies made in turn."""
    program = [("g5", "h2"), ("h7", "g5"), ("g5", "g9"), ("h2", "g4"), ("g6", "h2")]
    start = {name: name for pair in program for name in pair}
    in_turn, at_once = dict(start), dict(start)
    for source, destination in program:
        in_turn[destination] = in_turn[source]
    for source, destination in resolve_copies(program):
        at_once[destination] = start[source]
    assert at_once == in_turn
    assert in_turn["g4"] == "g5"
    assert in_turn["g9"] == "h7"


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_a11_many_calls_one_launch(data):
    """Forks, writers and finishes of one step: all their copies in one launch, with reads at step start."""
    manager, store = BlockManager(12, 4, 6, 24), KVStore(KVSpec(2, 1, 2, "fp32"), 12, 4)
    for tensor in store.tensors:
        tensor.copy_(torch.arange(12.0).view(-1, 1, 1, 1, 1).expand_as(tensor))
    in_turn = list(range(12))
    manager.add(6)
    pairs = []
    for _ in range(data.draw(st.integers(1, 12))):
        rows = np.flatnonzero(manager.tables.seq_lens >= 0).tolist()
        action = data.draw(st.sampled_from(["fork", "write", "finish"]))
        chosen = data.draw(st.sampled_from(rows))
        if action == "fork" and len(rows) < 6:
            fork(manager, chosen)
        elif action == "finish" and len(rows) > 1:
            manager.finish(chosen)
        elif action == "write":
            batch = rows[: data.draw(st.integers(1, len(rows)))]
            new = make_writable(manager, batch)
            for source, destination in new:
                in_turn[destination] = in_turn[source]
            pairs += new
        manager.check()
    store.copy_blocks(pairs)
    for tensor in store.tensors:
        assert tensor[:, 0, 0, 0, 0].tolist() == in_turn


def test_copies_reach_every_tensor_and_no_other_block():
    manager, store = BlockManager(6, 4, 3, 24), KVStore(KVSpec(3, 2, 8, "bf16"), 6, 4, fill=None)
    for tensor in store.tensors:
        tensor.copy_(torch.randn(tensor.shape))
    before = [tensor.clone() for tensor in store.tensors]
    a = manager.add(6)
    b, c = fork_many(manager, [a, a])
    pairs = grow(manager, [a, b, c])
    store.copy_blocks(pairs)
    for old, new in zip(before, store.tensors, strict=True):
        assert torch.equal(new[[0, 1, 4, 5]], old[[0, 1, 4, 5]])
        assert torch.equal(new[2], old[1])
        assert torch.equal(new[3], old[1])
