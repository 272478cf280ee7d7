"""Chapter 03: the pool, the tables, the manager, and the run by hand."""

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_kv.block_manager import BlockManager
from paged_kv.block_pool import BlockPool, OutOfBlocks
from paged_kv.block_tables import BlockTables, slot_mapping


def state(manager):
    """Everything that an operation could change."""
    tables, pool = manager.tables, manager.pool
    arrays = (tables.table, tables.num_blocks, tables.seq_lens, tables.writable_until, pool.ref_count, pool.epoch)
    return [a.tolist() for a in arrays], pool.free_ids(), sorted(tables.guarded), list(tables._closed)


def refused(manager, error, match, action, *args):
    """`action` raises `error` naming the argument, and leaves the state as it was."""
    before = copy.deepcopy(state(manager))
    with pytest.raises(error, match=match):
        action(*args)
    assert state(manager) == before
    manager.check()


RUN = [
    # event, tables after, free queue after, wasted slots after
    (("add", "A", 6), {"A": [0, 1]}, [2, 3, 4, 5, 6, 7], 2),
    (("add", "B", 3), {"A": [0, 1], "B": [2]}, [3, 4, 5, 6, 7], 3),
    (("add", "C", 5), {"A": [0, 1], "B": [2], "C": [3, 4]}, [5, 6, 7], 6),
    (("append", "A", 2), {"A": [0, 1], "B": [2], "C": [3, 4]}, [5, 6, 7], 4),
    (("append", "A", 1), {"A": [0, 1, 5], "B": [2], "C": [3, 4]}, [6, 7], 7),
    (("append", "B", 2), {"A": [0, 1, 5], "B": [2, 6], "C": [3, 4]}, [7], 9),
    (("finish", "B", 0), {"A": [0, 1, 5], "C": [3, 4]}, [7, 2, 6], 6),
    (("append", "C", 4), {"A": [0, 1, 5], "C": [3, 4, 7]}, [2, 6], 6),
    (("add", "D", 5), {"A": [0, 1, 5], "C": [3, 4, 7], "D": [2, 6]}, [], 9),
]


def test_run_by_hand():
    manager, rows = BlockManager(8, 4, 4, 32), {}
    for (action, name, tokens), tables, free, wasted in RUN:
        if action == "add":
            rows[name] = manager.add(tokens)
        elif action == "append":
            manager.append(rows[name], tokens)
        else:
            manager.finish(rows.pop(name))
        manager.check()
        now = manager.snapshot(rows)
        assert now["tables"] == tables
        assert now["free"] == free
        assert sum(len(ids) * 4 - now["seq_lens"][who] for who, ids in tables.items()) == wasted
    assert slot_mapping(manager.tables.table, rows["A"], 8, 4) == 5 * 4 + 0  # token 8 in block 5
    assert slot_mapping(manager.tables.table, rows["D"], 4, 4) == 6 * 4 + 0  # position 4 in block 6, slot 0
    refused(manager, OutOfBlocks, "1 blocks needed, 0 free", manager.append, [rows["D"], rows["A"]], np.array([3, 4]))


class TestPool:
    def test_queue_is_first_in_first_out(self):
        pool = BlockPool(4)
        assert pool.take(3) == [0, 1, 2]
        pool.release([2, 0])
        assert pool.free_ids() == [3, 2, 0]
        assert pool.take(2) == [3, 2]
        pool.check()

    def test_claim_takes_idle_blocks_out_of_the_middle_and_keeps_their_epoch(self):
        pool = BlockPool(4)
        epoch = pool.epoch.copy()
        pool.claim([2])
        pool.claim([2, 0])
        assert pool.ref_count.tolist() == [1, 0, 2, 0]
        assert pool.free_ids() == [1, 3]
        assert (pool.epoch == epoch).all()
        pool.release([2])
        assert pool.free_ids() == [1, 3]
        pool.release([2])
        assert pool.free_ids() == [1, 3, 2]
        pool.check()

    def test_many_ids_as_an_array(self):
        pool = BlockPool(40)
        ids = np.array(pool.take(30))
        pool.claim(ids[:20])
        pool.release(ids[::-1])
        assert pool.free_ids() == [*range(30, 40), *range(29, 19, -1)]
        pool.check()
        pool.release(ids[:20])
        assert pool.free_ids()[-20:] == list(range(20))

    def test_taking_raises_the_epoch(self):
        pool = BlockPool(2)
        pool.release(pool.take(2))
        pool.take(1)
        assert pool.epoch.tolist() == [2, 1]

    @pytest.mark.parametrize(
        ("method", "argument", "match"),
        [
            ("release", [0], "block 0 is free already"),
            ("release", [1, 2], "block 2 is free already"),
            ("release", [4], "block 4 is foreign"),
            ("release", [-1], "block -1 is foreign"),
            ("release", [1, 1], "names a block twice"),
            ("claim", [7], "block 7 is foreign"),
            ("claim", [3, 3], "names a block twice"),
            ("claim", [3.0], "not block ids"),
            ("claim", [2**40], "is foreign"),
            ("claim", [10**30], "is foreign"),
            ("release", [1, -5], "block -5 is foreign"),
            ("release", np.array([0.5]), "not block ids"),
            ("release", np.arange(99, 120), "block 99 is foreign"),
            ("take", -1, "count = -1"),
        ],
    )
    def test_bad_input_is_named_and_changes_nothing(self, method, argument, match):
        pool = BlockPool(4)
        pool.claim([1])
        before = pool.ref_count.tolist(), pool.free_ids(), pool.epoch.tolist()
        with pytest.raises(ValueError, match=match):
            getattr(pool, method)(argument)
        assert (pool.ref_count.tolist(), pool.free_ids(), pool.epoch.tolist()) == before
        pool.check()

    def test_out_of_blocks_says_how_many(self):
        pool = BlockPool(3)
        with pytest.raises(OutOfBlocks) as caught:
            pool.take(4)
        assert (caught.value.needed, caught.value.free) == (4, 3)
        assert pool.num_free == 3

    def test_check_sees_a_broken_state(self):
        pool = BlockPool(3)
        pool.ref_count[1] = 1
        with pytest.raises(AssertionError, match="I1"):
            pool.check()
        pool.ref_count[1] = -1
        with pytest.raises(AssertionError, match="negative"):
            pool.check()

    @pytest.mark.parametrize("size", [0, -3, 1.5])
    def test_size(self, size):
        with pytest.raises(ValueError, match="num_blocks"):
            BlockPool(size)


class TestTables:
    def make(self):
        tables = BlockTables(max_seqs=2, max_seq_len=18, block_size=4)
        row = tables.open()
        tables.extend(row, [4, 2, 7])
        tables.seq_lens[row] = 10
        return tables, row

    def test_a_row_has_room_for_the_last_partial_block(self):
        assert self.make()[0].table.shape == (2, 5)

    def test_shrink_gives_up_whole_blocks_only(self):
        tables, row = self.make()
        assert tables.shrink(row, 9) == []
        assert tables.shrink(row, 8) == [7]
        assert tables.shrink(row, 3) == [2]
        assert tables.ids(row) == [4]
        assert tables.table[row].tolist() == [4, -1, -1, -1, -1]
        assert tables.shrink(row, 0) == [4]

    def test_drop_front_leaves_minus_one(self):
        tables, row = self.make()
        assert tables.drop_front(row, 1) == [4]
        assert tables.drop_front(row, 2) == [2]
        assert tables.table[row].tolist() == [-1, -1, 7, -1, -1]
        assert tables.ids(row) == [7]
        assert slot_mapping(tables.table, row, [0, 9], 4).tolist() == [-1, 29]
        assert tables.detach(row) == [7]

    def test_a_padded_position_has_no_slot(self):
        tables, row = self.make()
        tables.extend(row, [9, 3])  # the row is full: its last entry is a block
        assert slot_mapping(tables.table, [row, row], [-1, 17], 4).tolist() == [-1, 13]

    def test_replace(self):
        tables, row = self.make()
        assert tables.replace(row, 1, 5) == 2
        assert tables.ids(row) == [4, 5, 7]

    def test_rows_are_reused_and_exhausted(self):
        tables, row = self.make()
        tables.open()
        with pytest.raises(ValueError, match="max_seqs = 2"):
            tables.open()
        tables.detach(row)
        assert tables.open() == row

    @pytest.mark.parametrize(
        ("method", "arguments", "match"),
        [
            ("ids", (1,), "row = 1"),
            ("ids", (-1,), "row = -1"),
            ("ids", (2,), "row = 2"),
            ("detach", (1,), "row = 1"),
            ("extend", (0, [1, 3, 5]), "6 blocks"),
            ("extend", (0, [1, 1]), "twice"),
            ("extend", (0, [-1]), "block -1 is foreign"),
            ("extend", (0, [2**31]), "is foreign"),
            ("extend", (0, [7.5]), "whole numbers"),
            ("ids", (0.5,), "row = 0.5"),
            ("detach", (True,), "row = True"),
            ("replace", (0, 3, 1), "index = 3"),
            ("replace", (0, -1, 1), "index = -1"),
            ("shrink", (0, 11), "num_tokens = 11"),
            ("shrink", (0, -1), "num_tokens = -1"),
            ("drop_front", (0, 3), "count = 3"),
            ("guard", (1,), "row = 1"),
        ],
    )
    def test_bad_input(self, method, arguments, match):
        tables, _ = self.make()
        before = tables.table.tolist(), tables.seq_lens.tolist()
        with pytest.raises(ValueError, match=match):
            getattr(tables, method)(*arguments)
        assert (tables.table.tolist(), tables.seq_lens.tolist()) == before

    @pytest.mark.parametrize("argument", ["max_seqs", "max_seq_len", "block_size"])
    def test_sizes(self, argument):
        with pytest.raises(ValueError, match=argument):
            BlockTables(**{"max_seqs": 1, "max_seq_len": 1, "block_size": 1, argument: 0})


class TestManager:
    def test_bad_input_is_named_and_changes_nothing(self):
        manager = BlockManager(4, 4, 2, 12)
        a = manager.add(6)
        refused(manager, ValueError, "num_tokens = 13", manager.add, 13)
        refused(manager, ValueError, "num_tokens = -1", manager.add, -1)
        refused(manager, OutOfBlocks, "3 blocks needed, 2 free", manager.add, 12)
        refused(manager, ValueError, "13, a row holds 12", manager.append, a, 7)
        refused(manager, ValueError, "new_tokens = -1", manager.append, a, -1)
        refused(manager, ValueError, "new_tokens", manager.append, [a], np.array([-1]))
        for bad in (1.5, True, None, "x", 2**31 - 6, 2**31, 10**30, np.array([1, 2]), np.array([1.0]), [[1]]):
            refused(manager, ValueError, "new_tokens = ", manager.append, a, bad)
            refused(manager, ValueError, "new_tokens = ", manager.blocks_needed, a, bad)
        refused(manager, ValueError, "new_tokens = -1", manager.blocks_needed, a, -1)
        refused(manager, ValueError, "new_tokens", manager.append, a, np.array([2**31 - 6], np.int32))
        for bad in ([0.7], "a", None, [[a]], [True]):
            refused(manager, ValueError, "rows = ", manager.append, bad)
        refused(manager, ValueError, "twice", manager.append, [a, a])
        refused(manager, ValueError, "row = 1", manager.append, [a, 1])
        refused(manager, ValueError, "row = -1", manager.append, [-1])
        refused(manager, ValueError, "row = 9", manager.append, [9])
        refused(manager, ValueError, "row = 1", manager.finish, 1)
        manager.add(0)
        refused(manager, ValueError, "max_seqs", manager.add, 1)

    def test_a_batch_is_all_or_nothing(self):
        manager = BlockManager(5, 4, 4, 32)
        rows = [manager.add(4) for _ in range(4)]
        refused(manager, OutOfBlocks, "4 blocks needed, 1 free", manager.append, rows)
        assert manager.blocks_needed(rows) == 4
        manager.append(rows[:1])

    def test_closing_a_row_ends_the_trust_in_a_known_batch(self):
        manager = BlockManager(8, 4, 4, 32)
        rows = [manager.add(1), manager.add(1)]
        manager.append(rows)
        manager.finish(rows[1])
        refused(manager, ValueError, "row = 1", manager.append, rows)

    @pytest.mark.parametrize("length", [3, 4, 5, 6, 7, 8])
    def test_new_blocks_at_the_boundary_a17(self, length):
        """A17: from the KV length, 3 to 8 tokens need 0, 1, 0, 0, 0, 1 new blocks."""
        manager = BlockManager(4, 4, 1, 32)
        row = manager.add(length)
        assert manager.blocks_needed(row) == [0, 1, 0, 0, 0, 1][length - 3]

    def test_no_idle_block_at_the_boundary_is_refused_in_this_step_a17(self):
        """A17: with no idle block, KV length 4 needs one now and 3 does not."""
        manager = BlockManager(2, 4, 2, 32)
        full, open_tail = manager.add(4), manager.add(3)
        assert manager.pool.num_free == 0
        refused(manager, OutOfBlocks, "1 blocks needed, 0 free", manager.append, full)
        manager.append(open_tail)
        manager.check()

    def test_blocks_in_hand_are_not_counted_against_another_row(self):
        manager = BlockManager(8, 4, 2, 32)
        a, b = manager.add(6), manager.add(3)
        manager.tables.extend(a, manager.pool.take(2))  # two more than six tokens need
        assert manager.blocks_needed([a, b], [1, 5]) == 1
        manager.tables.guard(a)
        manager.append([a, b], np.array([1, 9]))
        assert [len(manager.tables.ids(row)) for row in (a, b)] == [4, 3]
        manager.check()

    def test_a_known_batch_is_known_as_int64_only(self):
        """The bytes of int32 rows 1, 0 are those of the int64 row 1."""
        manager = BlockManager(4, 4, 2, 16)
        manager.add(1)
        manager.append([manager.add(1)])
        manager.finish(0)
        manager.append([1])
        refused(manager, ValueError, "row = 0", manager.append, np.array([1, 0], np.int32))

    @pytest.mark.parametrize("many", [8, 9, 40])
    def test_a_bad_row_of_a_large_batch_is_named(self, many):
        """More than eight rows are checked as a whole; the message is that of the single row all the same."""
        manager = BlockManager(2 * many + 4, 4, many + 2, 16)
        rows = np.array([manager.add(3) for _ in range(many)])
        for bad, match in ((-1, "row = -1"), (many, f"row = {many}"), (10**15, "row = 1000000000000000")):
            refused(manager, ValueError, match, manager.append, np.append(rows[1:], bad))
        refused(manager, ValueError, "twice", manager.append, np.append(rows[1:], rows[1]))
        manager.append(rows[::-1])
        assert set(manager.tables.seq_lens[rows].tolist()) == {4}
        manager.finish(rows[2])
        refused(manager, ValueError, "row = 2", manager.append, rows)
        manager.check()

    def test_shared_tail_is_refused_until_its_other_holder_leaves(self):
        manager = BlockManager(4, 4, 2, 16)
        a = manager.add(6)
        b = manager.tables.open()  # a second row over the same blocks, as chapter 06 will make it
        manager.pool.claim(manager.tables.ids(a))
        manager.tables.extend(b, manager.tables.ids(a))
        manager.tables.seq_lens[b] = 6
        with pytest.raises(AssertionError, match="I3"):
            manager.check()
        manager.tables.guard(a)
        manager.tables.guard(b)
        refused(manager, ValueError, "row 0 would write block 1", manager.append, a)
        refused(manager, ValueError, "row 1 would write block 1", manager.append, [b])
        manager.finish(b)
        manager.append(a)
        assert manager.tables.ids(a) == [0, 1]
        assert manager.pool.num_free == 2
        manager.check()

    def test_a_full_shared_tail_does_not_hinder(self):
        manager = BlockManager(4, 4, 2, 16)
        a = manager.add(4)
        b = manager.tables.open()
        manager.pool.claim([0])
        manager.tables.extend(b, [0])
        manager.tables.seq_lens[b] = 4
        assert manager.append([a, b]) == [1, 2]
        assert manager.append([a, b]) == []
        assert (manager.tables.ids(a), manager.tables.ids(b)) == ([0, 1], [0, 2])
        manager.check()

    def test_check_sees_a_wrong_count(self):
        manager = BlockManager(4, 4, 1, 16)
        manager.add(4)
        manager.pool.claim([0])
        with pytest.raises(AssertionError, match="I2"):
            manager.check()

    @pytest.mark.parametrize("many", [1, 16, 17, 40])
    def test_large_batches_grow_as_small_ones(self, many):
        together, apart = (BlockManager(400, 4, many, 64) for _ in range(2))
        rows = np.array([together.add(index % 9) for index in range(many)])
        for index in range(many):
            apart.add(index % 9)
        for _ in range(30):
            together.append(rows)
            for row in rows.tolist():
                apart.append(row)
        together.check()
        assert together.tables.seq_lens.tolist() == apart.tables.seq_lens.tolist()
        assert together.tables.num_blocks.tolist() == apart.tables.num_blocks.tolist()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_programs(data):
    """Add, append, shrink, finish in any order: the invariants hold, refusals change nothing."""
    block_size = data.draw(st.sampled_from([1, 2, 4, 16]))
    manager = BlockManager(data.draw(st.integers(1, 24)), block_size, 5, 40)
    model: dict[int, int] = {}
    for _ in range(data.draw(st.integers(1, 40))):
        before = copy.deepcopy(state(manager))
        action = data.draw(st.sampled_from(["add", "append", "batch", "shrink", "finish"]))
        tokens = data.draw(st.integers(0, 45))
        rows = sorted(model)
        try:
            if action == "add":
                model[manager.add(tokens)] = tokens
            elif rows and action == "append":
                row = data.draw(st.sampled_from(rows))
                manager.append(row, tokens)
                model[row] += tokens
            elif rows and action == "batch":
                manager.append(rows)
                model = {row: length + 1 for row, length in model.items()}
            elif rows and action == "shrink":
                row = data.draw(st.sampled_from(rows))
                manager.pool.release(manager.tables.shrink(row, min(tokens, model[row])))
                model[row] = min(tokens, model[row])
            elif rows and action == "finish":
                manager.finish(row := data.draw(st.sampled_from(rows)))
                del model[row]
        except (OutOfBlocks, ValueError):
            assert state(manager) == before
        manager.check()
        assert {row: int(manager.tables.seq_lens[row]) for row in model} == model
        held = sum(-(-length // block_size) for length in model.values())
        assert manager.pool.num_free == manager.pool.num_blocks - held
