"""Chapter 08: names of blocks, match, publish, forget, eviction order, events; reported failures of other systems."""

import copy
import json
import random
import subprocess
import sys
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_kv.block_manager import BlockManager
from paged_kv.block_names import EventLog, Removed, Stored
from paged_kv.block_pool import OutOfBlocks
from paged_kv.copy_on_write import fork, make_writable, rewind
from paged_kv.prefix_cache import PrefixCache, admit_cached, give_back, publish_filled, publish_full
from paged_kv.prefix_keys import encode_parts, prompt_digests, token_array


def setup(num_blocks=8, block_size=4, max_seqs=8, max_seq_len=64, events=False):
    manager = BlockManager(num_blocks, block_size, max_seqs, max_seq_len)
    return manager, PrefixCache(manager.pool, block_size, events=events)


def state(manager, cache):
    """Everything that an operation could change, findable blocks by digest."""
    tables, pool, names = manager.tables, manager.pool, cache.names
    arrays = (tables.table, tables.num_blocks, tables.seq_lens, tables.writable_until, pool.ref_count, pool.epoch)
    keys = [None if node is None else names.digest(node) for node in names.named]
    nodes = {
        names.digest(node): (node.block, node.twins, list(map(names.digest, node.followers())))
        for node in names.tree.nodes()
    }
    return (
        [a.tolist() for a in arrays],
        pool.free_ids(),
        list(tables._closed),
        keys,
        nodes,
        cache.stats,
        cache.generation,
    )


def refused(manager, cache, error, match, action, *args, **named):
    before = copy.deepcopy(state(manager, cache))
    with pytest.raises(error, match=match):
        action(*args, **named)
    assert state(manager, cache) == before
    cache.check()
    manager.check()


def run(manager, cache, tokens, root=b"", chunks=None):
    """Admit, prefill in `chunks`, publish; return (row, tokens found)."""
    chunks = list(chunks or [len(tokens)])
    row, found = admit_cached(manager, cache, tokens, root, chunks[0])
    published = publish_full(
        manager, cache, row, tokens[: manager.tables.seq_lens[row]], found // manager.block_size, root
    )
    for chunk in chunks[1:]:
        more = min(chunk, len(tokens) - int(manager.tables.seq_lens[row]))
        cache.forget(manager.append([row], more))
        done = tokens[: manager.tables.seq_lens[row]]
        published = publish_full(manager, cache, row, done, published, root)
    manager.check()
    cache.check()
    return row, found


def serve(manager, cache, tokens, root=b""):
    """Run to the end; return the tokens found."""
    row, found = run(manager, cache, tokens, root)
    give_back(manager, row)
    return found


PROMPT = list(range(1, 17))


class TestTokens:
    @pytest.mark.parametrize(
        "bad",
        [[-1], [2**31], [2**32 + 5], [1.0], ["a"], b"abcd", "abc", [None], [[1]], None, 5,
         np.array([2**32 + 5]), np.array([1.5]), np.array([2**31], np.uint32), np.array([-1], np.int8),
         np.array([[1, 2]]), np.array([True]), [True], [7, False, 9], (32_000, True)],
    )  # fmt: skip
    def test_what_is_no_token_is_refused(self, bad):
        with pytest.raises(ValueError, match="tokens"):
            token_array(bad)

    @pytest.mark.parametrize("kind", [list, tuple, np.int16, np.int32, np.int64, np.uint32])
    def test_lists_and_arrays_have_one_name(self, kind):
        tokens = [0, 1, 32_000, 7]
        same = kind(tokens) if kind in (list, tuple) else np.array(tokens, kind)
        assert token_array(same).dtype == np.int32
        manager, cache = setup()
        row, _ = run(manager, cache, [*tokens, 5])
        assert cache.match(b"", [*same, 5]) == manager.tables.ids(row)[:1]

    def test_strided_and_empty(self):
        assert token_array(np.arange(10)[::3]).tolist() == [0, 3, 6, 9]
        assert len(token_array([])) == len(token_array(np.array([], np.int64))) == 0
        assert token_array([2**31 - 1, 0]).tolist() == [2**31 - 1, 0]

    def test_the_array_of_a_caller_may_change_afterwards(self):
        manager, cache = setup(16)
        tokens = np.arange(20, dtype=np.int32)
        row, _ = run(manager, cache, tokens)
        for _ in range(3):
            assert len(cache.match(b"", tokens)) == 4
        tokens[8:12] = 77  # a trail that shared the caller's memory would lead on here
        assert len(cache.match(b"", tokens)) == 2
        tokens[:] = 99
        assert cache.match(b"", tokens) == []
        assert len(cache.match(b"", np.arange(20))) == 4
        give_back(manager, row)


class TestRoots:
    def test_no_parts_no_bytes(self):
        assert PrefixCache.root() == PrefixCache.root(()) == encode_parts([]) == b""

    def test_all_different(self):
        """A2(a) and its kind: kinds, types, borders and order are all part of the key."""
        roots = [
            (), [("salt", "S")], [("adapter", "S")], [("salt", b"S")], [("salt", "1")], [("salt", 1)], [("salt", b"1")],
            [("salt", "")], [("", "salt")], [("s", "alt")], [("ab", "c")], [("a", "bc")], [("a", "b"), ("c", "d")],
            [("c", "d"), ("a", "b")], [("a", "b"), ("a", "b")], [("salt", -1)], [("salt", -2)], [("salt", 0)],
            [("adapter", "a"), ("id", 1)], [("adapter", "a"), ("id", 2)], [("adapter", "a")], [("salt", "é")],
            [("salt", "e\u0301")], [("salt", "\ud800")], [("xstr", "y")], [("x", "stry")], [("a", "bcstrd")],
        ]  # fmt: skip
        assert len({encode_parts(parts) for parts in roots}) == len(roots)

    @pytest.mark.parametrize("value", [None, 1.0, True, (1,)])
    def test_other_values_are_refused(self, value):
        with pytest.raises(ValueError, match="salt"):
            PrefixCache.root([("salt", value)])

    @given(st.lists(st.tuples(st.text(), st.one_of(st.text(), st.binary(), st.integers())), max_size=3),
           st.lists(st.tuples(st.text(), st.one_of(st.text(), st.binary(), st.integers())), max_size=3))  # fmt: skip
    def test_one_encoding_one_meaning(self, first, second):
        typed = [[(kind, type(value), value) for kind, value in parts] for parts in (first, second)]
        assert (encode_parts(first) == encode_parts(second)) == (typed[0] == typed[1])


def test_a1_no_stub_can_make_two_contents_one():
    """A1: nothing is hashed to find a block; the first block's parent, the root, equals no node's key."""
    manager, cache = setup(8)
    first, _ = run(manager, cache, PROMPT[:8])
    give_back(manager, first)
    assert cache.match(b"", [9, 10, 11, 12, 13, 14, 15, 16]) == []
    node = cache.key_of(manager.pool.free_ids()[-1])
    stand_ins = [b"", b"\0", str(node).encode(), int(node).to_bytes(8, "little"), b"None"]
    for root in stand_ins[1:]:
        assert cache.match(root, PROMPT[:8]) == []
    assert cache.match(node, [*PROMPT[4:8], 0]) != []  # behind the first block stands the second,
    assert cache.match(b"", [*PROMPT[4:8], 0]) == []  # which is no first block
    assert cache.match(-1, PROMPT[:8]) == []
    for nothing in (None, 0.0, False, "", (b"",)):
        with pytest.raises(ValueError, match="root"):
            cache.match(nothing, PROMPT[:8])
    refused(manager, cache, ValueError, "key = None", cache.publish, None, PROMPT[:4], [0])


def test_a1_equal_hashes_in_python_are_no_equal_keys():
    """A1, care: hash(-1) == hash(-2); keys of a dictionary are compared, not only hashed."""
    assert hash((-1, b"x")) == hash((-2, b"x"))
    assert PrefixCache.root([("salt", -1)]) != PrefixCache.root([("salt", -2)])


def test_a2_adapters_of_one_name():
    """A2(a): BS = 16, 32 tokens, three requests; none hits another's, a second run of the first hits."""
    manager, cache = setup(16, 16)
    prompt = list(range(32))
    roots = [
        PrefixCache.root([("adapter", "a"), ("adapter id", 1)]),
        PrefixCache.root([("adapter", "a"), ("adapter id", 2)]),
        b"",
    ]
    assert [serve(manager, cache, prompt, root) for root in roots] == [0, 0, 0]
    assert serve(manager, cache, prompt, roots[0]) == 16


def test_a2_parts_of_an_earlier_block_reach_the_later_ones():
    """A2(b): BS = 3, block 0 carries h1 or h3, block 1 carries h2 in both: all keys differ."""
    manager, cache = setup(8, 3)
    tokens, rows, digests = [0, 1, 2, 3, 4, 5], [], []
    for image in ("h1", "h3"):
        parts = {0: [("media", image)], 1: [("media", "h2")]}
        row = manager.add(6)
        key = cache.publish(b"", tokens, manager.tables.ids(row), parts)
        assert cache.match(b"", [*tokens, 9], parts=parts) == manager.tables.ids(row)
        digests += [cache.digest(cache.key_of(block)) for block in manager.tables.ids(row)]
        assert cache.key_of(manager.tables.ids(row)[1]) == key
        rows.append(row)
    assert len(set(digests)) == 4
    assert cache.match(b"", [*tokens, 9]) == []
    cache.check()


@pytest.mark.parametrize("chunks", [[8, 8], [16], [6, 6, 4], [1] * 16, [4, 4, 4, 4], [3, 13]])
def test_a3_chunks_leave_no_trace_in_the_keys(chunks):
    """A3: BS = 4, 16 tokens; the keys are those of the prompt, a half filled block is not published."""
    manager, cache = setup(16)
    row, _ = run(manager, cache, PROMPT, chunks=chunks)
    digests = [cache.digest(cache.key_of(block)).hex() for block in manager.tables.ids(row)]
    assert digests == prompt_digests(b"", PROMPT, 4)
    give_back(manager, row)
    row, found = run(manager, cache, PROMPT, chunks=chunks)
    assert found == 12
    manager, cache = setup(16)
    row, _ = run(manager, cache, PROMPT, chunks=[6])
    assert cache.stats.published == 1


def test_a4_a_block_that_was_taken_is_not_found():
    """A4: N = 2, BS = 4: X runs, Y takes one of its blocks and returns it without a name; X hits one block."""
    manager, cache = setup(2)
    x = PROMPT[:8]
    serve(manager, cache, x)
    assert cache.match(b"", [*x, 0]) == [0, 1]
    serve(manager, cache, [90, 91, 92])
    assert cache.match(b"", [*x, 0]) == [0]
    assert manager.pool.free_ids() == [0, 1]
    assert cache.key_of(1) is None
    assert serve(manager, cache, x) == 4


@pytest.mark.parametrize(("length", "reused"), [(32, 16), (31, 16), (33, 32), (16, 0), (1, 0), (17, 16)])
def test_a5_a_token_is_always_left_to_compute(length, reused):
    """A5: floor((len - 1) / BS) x BS tokens of a prompt that is cached whole."""
    manager, cache = setup(8, 16)
    serve(manager, cache, list(range(48)))
    assert len(cache.match(b"", list(range(length)))) * 16 == reused
    row, found = run(manager, cache, list(range(length)))
    assert found == reused < length
    assert manager.tables.seq_lens[row] == length


def test_a6_twins_outlive_one_another():
    """A6: two requests with one prompt in one step; A's blocks go, B's are still found."""
    manager, cache = setup(4)
    prompt = PROMPT[:8]
    a, b = (admit_cached(manager, cache, prompt)[0] for _ in "AB")
    assert [publish_full(manager, cache, row, prompt, 0) for row in (a, b)] == [2, 2]
    assert cache.stats.findable == 4
    assert len(list(cache.names.tree.nodes())) == 2
    of_a, of_b = manager.tables.ids(a), manager.tables.ids(b)
    assert cache.match(b"", [*prompt, 0]) == of_a  # the first
    give_back(manager, a)
    assert cache.match(b"", [*prompt, 0]) == of_b  # one in use costs no free block
    taken = manager.pool.take(2)
    assert sorted(taken) == of_a
    cache.forget(taken)
    cache.check()
    assert cache.match(b"", [*prompt, 0]) == of_b
    give_back(manager, b)
    manager.pool.release(taken)
    assert cache.match(b"", [*prompt, 0]) == of_b
    cache.forget(manager.pool.take(4))
    assert cache.match(b"", [*prompt, 0]) == []
    assert (cache.stats.findable, cache.names.tree.roots, cache.names.tree.by_id) == (0, {}, {})
    cache.check()


def test_a7_the_tail_goes_first():
    """A7(a): N = 3, a request over three blocks; one is taken: the deepest; the prompt hits two."""
    manager, cache = setup(3)
    serve(manager, cache, PROMPT[:12])
    cache.forget(manager.pool.take(1))
    assert cache.match(b"", [*PROMPT[:12], 0]) == [0, 1]


def test_a7_counting_ends_at_the_first_miss():
    """A7(b): block 1 gone, 2 and 3 present: no hit; computed again, the others are found again."""
    manager, cache = setup(8)
    row, _ = run(manager, cache, PROMPT[:12])
    ids = manager.tables.ids(row)
    cache.forget(ids[:1])
    assert cache.match(b"", [*PROMPT[:12], 0]) == []
    cache.check()
    other, _ = run(manager, cache, PROMPT[:5])
    assert cache.match(b"", [*PROMPT[:12], 0]) == [manager.tables.ids(other)[0], *ids[1:]]


class TestA8RefusedAdmissions:
    def setup_method(self):
        self.manager, self.cache = setup(8, 16, 8, 256)

    def test_a_hundred_times(self):
        """A8(a): N = 8, R0 holds 5; three idle, two of them R1's hits; R1 needs five in all."""
        manager, cache = self.manager, self.cache
        prompt = list(range(80))
        serve(manager, cache, prompt[:32])
        r0, _ = run(manager, cache, list(range(1000, 1080)))
        assert manager.pool.num_free == 3
        assert len(cache.match(b"", prompt)) == 2
        for _ in range(100):
            refused(manager, cache, OutOfBlocks, "5 blocks needed, 3 free", admit_cached, manager, cache, prompt)
        give_back(manager, r0)
        _, found = run(manager, cache, prompt)
        assert found == 32

    def test_idle_hits_cost_free_blocks(self):
        """A8(b): five idle blocks, two of them hits, four new ones needed: 5 - 2 < 4, refused up front."""
        manager, cache = self.manager, self.cache
        serve(manager, cache, list(range(32)))
        run(manager, cache, list(range(1000, 1048)))
        assert manager.pool.num_free == 5
        refused(manager, cache, OutOfBlocks, "6 blocks needed, 5 free", admit_cached, manager, cache, list(range(96)))
        _, found = admit_cached(manager, cache, list(range(80)))
        assert (found, manager.pool.num_free) == (32, 0)

    def test_a_failed_append_keeps_the_row(self):
        """A8(c): R1 holds four full blocks, nothing is idle, one more is refused; R1 keeps its four."""
        manager, cache = setup(4, 16, 8, 256)
        row, _ = run(manager, cache, list(range(64)))
        refused(manager, cache, OutOfBlocks, "1 blocks needed, 0 free", manager.append, [row])
        assert manager.tables.ids(row) == [0, 1, 2, 3]

    def test_a_cache_of_another_pool(self):
        manager, _ = setup(8, 4)
        for other in (setup(8, 4)[1], PrefixCache(manager.pool, 8)):
            refused(manager, other, ValueError, "cache", admit_cached, manager, other, PROMPT)

    def test_other_refusals(self):
        manager, cache = setup(8, 4, 1, 16)
        refused(manager, cache, ValueError, "tokens: 17", admit_cached, manager, cache, list(range(17)))
        refused(manager, cache, ValueError, "new_tokens", admit_cached, manager, cache, PROMPT, b"", -1)
        refused(manager, cache, ValueError, "tokens", admit_cached, manager, cache, [1.5])
        run(manager, cache, PROMPT)
        refused(manager, cache, ValueError, "max_seqs", admit_cached, manager, cache, PROMPT)


class TestPublish:
    def test_what_cannot_be_published_is_refused(self):
        manager, cache = setup(8)
        row, _ = run(manager, cache, PROMPT[:8])
        other = manager.add(8)
        ids, free = manager.tables.ids(other), manager.pool.free_ids()
        key = cache.key_of(manager.tables.ids(row)[0])
        for error, args in {
            "tokens: 3": (b"", [1, 2, 3], ids[:1]),
            "tokens: 4 for 2": (b"", [1, 2, 3, 4], ids),
            "idle": (b"", PROMPT[:8], [ids[0], free[0]]),
            "foreign": (b"", PROMPT[:4], [8]),
            "block -1": (b"", PROMPT[:4], [-1]),
            "twice": (b"", PROMPT[:8], [ids[0], ids[0]]),
            "not block ids": (b"", PROMPT[:4], [1.0]),
            "another name": (b"", PROMPT[4:8], manager.tables.ids(row)[:1]),
            "key = 77": (77, PROMPT[:4], ids[:1]),
            "key = True": (True, PROMPT[:4], ids[:1]),
        }.items():
            refused(manager, cache, ValueError, error, cache.publish, *args)
        refused(manager, cache, ValueError, "another name", cache.publish, key, PROMPT[:4], manager.tables.ids(row)[1:])
        refused(manager, cache, ValueError, "block -1", cache.forget, [0, -1])
        refused(manager, cache, ValueError, "foreign", cache.forget, [8])

    def test_again_under_the_same_name_changes_nothing(self):
        manager, cache = setup(8)
        row, _ = run(manager, cache, PROMPT[:8])
        before = copy.deepcopy(state(manager, cache))
        assert cache.publish(b"", PROMPT[:8], manager.tables.ids(row)) == cache.key_of(manager.tables.ids(row)[1])
        assert state(manager, cache) == before
        assert cache.publish(b"", [], []) == b""

    def test_each_equals_one_by_one(self):
        manager, cache = setup(16, 4, 4)
        tokens = np.arange(16, dtype=np.int32).reshape(4, 4)
        tokens[3] = tokens[0]  # a twin born in the same call
        rows = [manager.add(8) for _ in range(4)]
        keys = cache.publish_each([b""] * 4, tokens, [manager.tables.ids(row)[0] for row in rows])
        assert keys == [0, 1, 2, 0]
        more = cache.publish_each(keys, tokens + 50, np.array([manager.tables.ids(row)[1] for row in rows]))
        cache.check()
        digests = [cache.digest(key).hex() for key in more]
        assert digests == [prompt_digests(b"", [*row, *(row + 50)], 4)[1] for row in tokens]
        refused(manager, cache, ValueError, "parents: 3", cache.publish_each, [b""] * 3, tokens, [0, 2, 4, 6])

    def test_unchecked_chunks_equal_each(self):
        """What a caller that vouches for its blocks may leave out is the checks, and nothing else."""
        tokens = np.arange(16, dtype=np.int32).reshape(4, 4)
        tokens[3] = tokens[0]
        states = []
        for events in (False, True):
            for checked in (True, False):
                manager, cache = setup(16, 4, 4, events=events)
                ids = np.array([manager.tables.ids(manager.add(8))[0] for _ in range(4)])
                chunks = [row.tobytes() for row in tokens]
                if checked:
                    cache.publish_each([b""] * 4, tokens, ids)
                else:
                    cache.names.add([b""] * 4, chunks, ids)
                cache.check()
                states.append(state(manager, cache))
        assert states[0] == states[1]
        assert states[2] == states[3]

    def test_filled_tails(self):
        manager, cache = setup(16, 4, 4, 16)
        text = np.zeros((4, 16), np.int32)
        published = np.zeros(4, np.int64)
        rows = np.array([manager.add(n) for n in (3, 7, 2)])
        text[rows] = np.arange(48).reshape(3, 16)
        published[rows[1]] = publish_full(manager, cache, int(rows[1]), text[rows[1]], 0, b"r1")
        for _ in range(6):
            cache.forget(manager.append(rows))
            full = rows[manager.tables.seq_lens[rows] % 4 == 0]
            publish_filled(manager, cache, full, text, published, [b"r%d" % row for row in full])
            manager.check()
            cache.check()
        for row, blocks in zip(rows.tolist(), (2, 3, 2), strict=True):
            assert published[row] == blocks
            keys = [cache.key_of(block) for block in manager.tables.ids(row)[:blocks]]
            assert [cache.digest(key).hex() for key in keys] == prompt_digests(b"r%d" % row, text[row, : 4 * blocks], 4)
        cache.reset()
        cache.forget(manager.append(rows, np.array([3, 0, 0])))
        publish_filled(manager, cache, rows[:1], text, published, [b"r0"])
        assert (published[rows[0]], cache.stats.findable) == (2, 0)
        publish_filled(manager, cache, rows[:0], text, published, [])
        published[:] = 0  # a row is published from its start; one that is too short is left alone
        give_back(manager, int(rows[2]))
        rows[2] = manager.add(3)
        publish_filled(manager, cache, rows, text, published, [b"r%d" % row for row in rows])
        assert published[rows].tolist() == [1, 1, 0]

    def test_a_step_that_failed_is_withdrawn(self):
        manager, cache = setup(8)
        row, _ = run(manager, cache, PROMPT[:9])
        cache.forget(manager.tables.ids(row)[:2])
        assert cache.match(b"", PROMPT[:9]) == []
        assert (cache.stats.published, cache.stats.evicted, cache.stats.findable) == (2, 2, 0)
        assert publish_full(manager, cache, row, PROMPT[:9], 0) == 2
        assert len(cache.match(b"", PROMPT[:9])) == 2


class TestForget:
    def test_check_finds_whoever_does_not_tell(self):
        manager, cache = setup(2)
        serve(manager, cache, PROMPT[:8])
        manager.pool.take(1)
        with pytest.raises(AssertionError, match="I4: block 1 retaken"):
            cache.check()

    def test_rewinding_into_a_published_block(self):
        manager, cache = setup(8)
        row, _ = run(manager, cache, PROMPT[:8])
        tail = manager.tables.ids(row)[1:]
        rewind(manager, [row], 2)
        with pytest.raises(AssertionError, match="I4"):
            cache.check()
        cache.forget(tail)
        cache.check()
        assert cache.match(b"", PROMPT) == [0]

    def test_a_copy_has_no_name_and_the_original_keeps_it(self):
        manager, cache = setup(8)
        row, _ = run(manager, cache, PROMPT[:6])
        child = fork(manager, row)
        pairs = make_writable(manager, [row, child])
        cache.forget([new for _, new in pairs])
        cache.check()
        assert cache.match(b"", PROMPT) == [0]

    def test_nodes_live_while_needed_and_ids_are_never_used_again(self):
        manager, cache = setup(4)
        seen = set()
        for start in range(0, 4000, 10):
            row, _ = run(manager, cache, list(range(start, start + 9)))
            keys = {cache.key_of(block) for block in manager.tables.ids(row)[:2]}
            assert not keys & seen
            seen |= keys
            give_back(manager, row)
            assert len(list(cache.names.tree.nodes())) == len(cache.names.tree.by_id) <= 4

    def test_a_trail_keeps_no_dead_node_alive(self):
        manager, cache = setup(8)
        serve(manager, cache, PROMPT)
        assert len(cache.match(b"", PROMPT)) == 3
        first = cache.names.named[0]
        assert first.trail is not None
        cache.forget([1, 2])
        assert cache.match(b"", PROMPT) == [0]
        assert first.trail is not None
        assert first.trail[1] == [first], "cut where the walk now ends"
        cache.forget(range(8))
        assert first.trail is None

    def test_nothing_is_named_behind_a_node_that_is_gone(self):
        manager, cache = setup(8)
        serve(manager, cache, PROMPT)
        node = cache.names.named[0]
        cache.forget(range(8))
        row = manager.add(4)
        refused(manager, cache, ValueError, "above", cache.publish_behind, node, PROMPT[:4], manager.tables.ids(row))

    def test_reset(self):
        manager, cache = setup(8, events=True)
        row, _ = run(manager, cache, PROMPT[:9])
        old = cache.key_of(0)
        cache.reset()
        cache.check()
        assert (cache.generation, cache.stats.findable, cache.match(b"", PROMPT[:9])) == (1, 0, [])
        refused(manager, cache, ValueError, "key", cache.publish, old, PROMPT[4:8], manager.tables.ids(row)[1:2])
        assert publish_full(manager, cache, row, PROMPT[:9], 1) == 1
        give_back(manager, row)
        assert serve(manager, cache, PROMPT[:9]) == 0
        assert serve(manager, cache, PROMPT[:9]) == 8


def test_match_changes_nothing_and_respects_limits():
    manager, cache = setup(16)
    serve(manager, cache, PROMPT)
    before = copy.deepcopy(state(manager, cache))
    for limit in range(6):
        assert len(cache.match(b"", [*PROMPT, 0], limit)) == min(limit, 4)
    assert cache.match(b"", []) == cache.match(b"", [1]) == []
    assert state(manager, cache) == before
    with pytest.raises(ValueError, match="limit"):
        cache.match(b"", PROMPT, -1)


def test_a_shared_suffix_behind_different_openings_shares_nothing():
    manager, cache = setup(64)
    suffix = list(range(100, 140))
    assert serve(manager, cache, [1, 2, 3, 4, *suffix]) == 0
    assert serve(manager, cache, [5, 6, 7, 8, *suffix]) == 0
    assert serve(manager, cache, [1, 2, 3, 9, *suffix]) == 0


def test_salts_make_the_count_of_computed_tokens_tell_nothing():
    secret = [7, 3, 3, 9, 1, 4, 4, 2]
    for salted in (False, True):
        manager, cache = setup(64)
        victim, prober = (PrefixCache.root([("salt", who)]) if salted else b"" for who in ("victim", "prober"))
        serve(manager, cache, [*secret, 5], victim)
        computed = {}
        for guess in ([7, 3, 3, 9, 0], [7, 3, 3, 8, 0], [1, 1, 1, 1, 0]):
            computed[tuple(guess)] = len(guess) - serve(manager, cache, guess, prober)
        assert (len(set(computed.values())) == 1) is salted
        assert computed[7, 3, 3, 9, 0] == (5 if salted else 1)


def test_2050_shared_tokens_are_128_blocks_and_2_tokens():
    manager, cache = setup(600, 16, 8, 4096)
    shared = list(range(2050))
    first, _ = run(manager, cache, [*shared, 9001])
    row, found = run(manager, cache, [*shared, 9002])
    assert (found // 16, found, 2050 - found) == (128, 2048, 2)
    assert manager.tables.ids(first)[:128] == manager.tables.ids(row)[:128]


def replay(keys, events):
    """A router: it follows a cache by the JSON of its events."""
    for event in map(json.loads, [json.dumps(asdict(event)) for event in events]):
        if event["kind"] == "stored":
            assert event["key"] not in keys
            keys.add(event["key"])
        else:
            keys.remove(event["key"])
    return keys


def findable(cache):
    return {cache.names.digest(node).hex() for node in cache.names.tree.nodes() if node.block >= 0}


def test_events_cancel_out_and_stay_bounded():
    log = EventLog()
    log.note(Stored("k", "p"))
    log.note(Removed("k"))
    assert log.drain() == []
    log.note(Removed("k"))
    log.note(Stored("k", "p"))
    log.note(Removed("k"))
    assert log.drain() == [Removed("k")]
    assert log.drain() == []
    manager, cache = setup(4, events=True)
    for start in range(0, 4000, 10):
        serve(manager, cache, list(range(start, start + 9)))
    assert len(cache.drain_events()) <= 8
    assert setup()[1].drain_events() == []


def test_a_router_finds_prompts_by_digests_alone():
    manager, cache = setup(8, events=True)
    root = PrefixCache.root([("salt", "tenant")])
    run(manager, cache, PROMPT[:13], root)
    keys = replay(set(), cache.drain_events())
    assert keys == set(prompt_digests(root, PROMPT[:13], 4)) == findable(cache)
    assert not keys & set(prompt_digests(b"", PROMPT[:13], 4))
    assert not keys & set(prompt_digests(root, PROMPT[:13], 2))


def test_digests_are_the_same_in_another_process():
    call = "prompt_digests(encode_parts([('salt', 'x'), ('n', 5)]), [1, 2, 3, 4], 2)[-1]"
    code = f"from paged_kv.prefix_keys import encode_parts, prompt_digests; print({call})"
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"}
    )
    assert other.stdout.strip() == prompt_digests(encode_parts([("salt", "x"), ("n", 5)]), [1, 2, 3, 4], 2)[-1]


# ---------------------------------------------------------------- random programs against a model


class Model:
    """What should be findable: block -> (root, tokens from the start), nothing clever."""

    def __init__(self, size):
        self.size, self.content, self.order = size, {}, {}

    def longest(self, root, tokens):
        best = 0
        for count in range(1, (len(tokens) - 1) // self.size + 1):
            if (root, tuple(tokens[: count * self.size])) not in self.content.values():
                break
            best = count
        return best


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 4]), st.integers(4, 14))
def test_random_programs(seed, size, num_blocks):
    """Hits, tables, eviction order and events against a model that compares whole prefixes."""
    draw = random.Random(seed)
    manager, cache = setup(num_blocks, size, 4, 40, events=True)
    model, rows, router = Model(size), {}, set()

    def took(ids):
        cache.forget(ids)
        for block in ids:
            model.content.pop(block, None)

    def published(row, before):
        tokens, root, _ = rows[row]
        count = publish_full(manager, cache, row, tokens[: manager.tables.seq_lens[row]], before, root)
        for at in range(before, count):
            model.content[manager.tables.ids(row)[at]] = (root, tuple(tokens[: (at + 1) * size]))
        rows[row][2] = count

    for _ in range(40):
        act = draw.choice(["admit", "admit", "grow", "finish", "withdraw", "reset"])
        if act == "admit":
            tokens = [draw.randrange(2) for _ in range(draw.randrange(1, 5 * size))]
            root = draw.choice([b"", b"x"])
            chunk = draw.choice([None, draw.randrange(0, 8)])
            expected = model.longest(root, tokens)
            match = cache.match(root, tokens)
            assert len(match) == expected
            assert [model.content[block] for block in match] == [
                (root, tuple(tokens[: (at + 1) * size])) for at in range(expected)
            ]
            epochs = manager.pool.epoch.copy()
            try:
                row, found = admit_cached(manager, cache, tokens, root, chunk)
            except (OutOfBlocks, ValueError):
                continue
            assert found == expected * size
            assert manager.tables.ids(row)[:expected] == match
            for block in np.flatnonzero(manager.pool.epoch != epochs).tolist():
                model.content.pop(block, None)
            rows[row] = [tokens, root, expected]
            published(row, expected)
        elif act == "grow" and rows:
            row = draw.choice(list(rows))
            if manager.tables.seq_lens[row] < min(40, num_blocks * size):
                if len(rows[row][0]) <= manager.tables.seq_lens[row]:
                    rows[row][0].append(draw.randrange(2))
                try:
                    took(manager.append([row]))
                except OutOfBlocks:
                    continue
                published(row, rows[row][2])
        elif act == "finish" and rows:
            row = draw.choice(list(rows))
            give_back(manager, row)
            del rows[row]
        elif act == "withdraw" and rows:
            row = draw.choice(list(rows))
            keep = draw.randrange(rows[row][2] + 1)
            shared = manager.pool.ref_count[manager.tables.ids(row)] > 1
            if not shared[keep:].any():
                took(manager.tables.ids(row)[keep:])
                rows[row][2] = keep
        elif act == "reset" and draw.random() < 0.2:
            for row in list(rows):
                give_back(manager, row)
            rows.clear()
            cache.reset()
            model.content.clear()
        manager.check()
        cache.check()
        assert {b for b in range(num_blocks) if cache.key_of(b) is not None} == set(model.content)
        router = replay(router, cache.drain_events())
        assert router == findable(cache)
        order = {block: at for at, block in enumerate(manager.pool.free_ids())}
        for block, (root, tokens) in model.content.items():
            if block in order and len(tokens) > size and not draw.randrange(4):
                parents = [b for b, held in model.content.items() if held == (root, tokens[:-size])]
                if parents and act != "withdraw":
                    assert max(order.get(parent, 10**9) for parent in parents) > order[block]


def test_eviction_is_least_recently_used_and_tail_before_head():
    manager, cache = setup(8)
    for start in (100, 200, 300):
        serve(manager, cache, list(range(start, start + 8)))
    serve(manager, cache, [*range(100, 108), 0])  # a hit makes the oldest the newest
    lost = []
    for _ in range(8):
        before = {b for b in range(8) if cache.key_of(b) is not None}
        cache.forget(manager.pool.take(1))
        lost += [b for b in before if cache.key_of(b) is None]
    names = {0: "100 head", 1: "100 tail", 2: "200 head", 3: "200 tail", 4: "300 head", 5: "300 tail"}
    assert [names[b] for b in lost] == ["200 tail", "200 head", "300 tail", "300 head", "100 tail", "100 head"]
