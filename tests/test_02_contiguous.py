"""The literals of chapter 02, and random programs against a pool kept slot by slot."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paged_kv.contiguous import (
    ContiguousPool,
    OutOfSlots,
    ReservationFull,
    Run,
    SlotSplit,
    reserve_max,
    reserve_oracle,
    reserve_pow2,
)
from paged_kv.sizing import GiB, KVSpec

BIG = KVSpec(num_layers=80, num_kv_heads=8, head_size=128, dtype="fp16")
LLAMA = KVSpec(num_layers=32, num_kv_heads=8, head_size=128, dtype="bf16")
FITS = ("first", "best", "buddy")


def filled(num_slots, requests, fit="first"):
    """A pool in which each of `requests`, name -> (slots asked, tokens), stands in turn."""
    pool = ContiguousPool(num_slots, fit)
    for name, (asked, tokens) in requests.items():
        pool.reserve(name, asked)
        pool.grow(name, tokens)
    return pool


def with_holes(fit, *holes):
    """A pool whose free pieces have the given lengths, a wall of one slot behind each."""
    pool = ContiguousPool(sum(holes) + len(holes), fit)
    for i, hole in enumerate(holes):
        pool.reserve(f"hole {i}", hole)
        pool.reserve(f"wall {i}", 1)
    for i in range(len(holes)):
        pool.finish(f"hole {i}")
    return pool


def served(pool, sizes):
    for count, slots in enumerate(sizes):
        try:
            pool.reserve(f"request {count}", slots)
        except OutOfSlots:
            return count
    return len(sizes)


def state(pool):
    return dict(pool._free), dict(pool._runs), dict(pool._used)


def test_32_slots_twelve_free_and_a_request_for_twelve_refused():
    pool = filled(32, {"R1": (12, 5), "R2": (8, 3), "R3": (8, 6)})
    assert sum(pool.run(name).asked for name in ("R1", "R2", "R3")) - (5 + 3 + 6) == 14
    pool.finish("R2")
    assert pool._free == {12: 8, 28: 4}
    before = state(pool)
    with pytest.raises(OutOfSlots, match="12 slots in a row needed; 12 free, longest run 8") as error:
        pool.reserve("R4", 12)
    assert (error.value.needed, error.value.free, error.value.longest) == (12, 12, 8)
    assert state(pool) == before
    assert pool.reserve("R4", 8) == 12


def test_20_slots_the_third_chat_waits_beside_eight_empty_slots():
    pool = filled(20, {"A": (8, 3), "B": (8, 5)})
    split = pool.split({"A": 8, "B": 8})
    assert split == SlotSplit(used=8, later=8, never=0, rounding=0, free=4)
    with pytest.raises(OutOfSlots):
        pool.reserve("C", 8)
    assert pool.split({"A": 3, "B": 5}) == SlotSplit(used=8, later=0, never=8, rounding=0, free=4)


@pytest.mark.parametrize(("reservation", "fit_in"), [(16, 3), (32, 2)])
def test_64_slots_three_chats(reservation, fit_in):
    assert served(ContiguousPool(64), [reservation] * 3) == fit_in


def test_opening_picture():
    lengths = {"A": 300, "B": 1200, "C": 2004, "D": 1296}
    pool = filled(4 * 4096, {name: (4096, tokens) for name, tokens in lengths.items()})
    assert BIG.bytes_for(pool.num_slots) == 5 * GiB
    assert pool.split(lengths) == SlotSplit(used=4800, later=0, never=11584, rounding=0, free=0)
    assert round(BIG.bytes_for(11584) / GiB, 2) == 3.54
    blocks = [BIG.blocks_for(tokens, 16) for tokens in lengths.values()]
    assert blocks == [19, 75, 126, 81]
    assert sum(blocks) == 301
    assert round(301 * BIG.bytes_per_block(16) / GiB, 2) == 1.47
    assert 301 * 16 - 4800 == 16


def test_waste_against_window():
    empty = [round(100 * (1 - 300 / (4096 << i)), 1) for i in range(6)]
    assert empty == [92.7, 96.3, 98.2, 99.1, 99.5, 99.8]


def test_ten_free_gib_in_holes_refuse_two_and_a_half():
    pool = ContiguousPool(16 * 4096)
    for i in range(16):
        pool.reserve(str(i), 4096)
    for i in range(0, 16, 2):
        pool.finish(str(i))
    assert BIG.bytes_for(pool.free_slots) == 10 * GiB
    assert BIG.bytes_for(pool.largest_free_run) == 1.25 * GiB
    assert BIG.bytes_for(8192) == 2.5 * GiB
    with pytest.raises(OutOfSlots):
        pool.reserve("long", 8192)


def test_capacity_table():
    num_slots = LLAMA.blocks_in(16 * GiB, 1)
    assert num_slots == 131_072
    lengths = np.random.default_rng(0).integers(100, 2001, 500)
    assert served(ContiguousPool(num_slots), [8192] * 500) == 16
    assert round(100 * lengths[:16].sum() / num_slots, 1) == 12.9
    admitted = {}
    for size in (1, 2, 4, 8, 16, 32, 64, 128):
        slots = np.cumsum([LLAMA.blocks_for(int(n), size) for n in lengths]) * size
        count = int((slots <= num_slots).sum())
        admitted[size] = (count, int(slots[count - 1]), int(slots[count - 1] - lengths[:count].sum()))
    assert [admitted[size][0] for size in admitted] == [122, 122, 122, 122, 122, 121, 118, 115]
    assert admitted[16] == (122, 130_800, 913)
    assert round(122 / 16, 1) == 7.6
    assert round(100 * 913 / 130_800, 1) == 0.7


def test_no_fit_is_better_than_the_other():
    assert served(with_holes("first", 8, 4), [4, 8]) == 1
    assert served(with_holes("best", 8, 4), [4, 8]) == 2
    assert served(with_holes("first", 8, 7), [5, 4, 3, 3]) == 4
    assert served(with_holes("best", 8, 7), [5, 4, 3, 3]) == 3


def test_buddy_rounds_up_and_merges_buddies_only():
    pool = filled(32, {"A": (11, 11), "B": (5, 5), "C": (5, 5)}, "buddy")
    assert pool.split({"A": 11, "B": 5, "C": 5}).rounding == 11
    assert [pool.run(name).start for name in "ABC"] == [0, 16, 24]
    pool.finish("B")
    assert pool.largest_free_run == 8
    pool.finish("C")
    assert pool._free == {16: 16}
    pool.finish("A")
    assert pool._free == {0: 32}


def test_buddy_pool_of_any_size_starts_as_powers_of_two():
    pool = ContiguousPool(15_728, "buddy")
    assert list(pool._free.values()) == [8192, 4096, 2048, 1024, 256, 64, 32, 16]
    pool.check()
    assert served(pool, [2048] * 20) == 7
    assert served(ContiguousPool(15_728), [2048] * 20) == 7


def test_policies():
    assert reserve_max(6, 15, 32) == 32
    assert reserve_pow2(6, 15, 32) == 6 + 16
    assert reserve_pow2(6, 14, 32) == 6 + 8  # a power of two stays as it is
    assert reserve_pow2(6, 7, 32) == 6 + 1
    assert reserve_pow2(6, 6, 32) == 6
    assert reserve_pow2(20, 31, 32) == 32  # never more than the window
    assert reserve_oracle(6, 15, 32) == 15


@pytest.mark.parametrize("policy", [reserve_max, reserve_pow2, reserve_oracle])
@pytest.mark.parametrize(("lengths", "argument"), [((0, 5, 8), "prompt"), ((6, 5, 8), "final"), ((6, 9, 8), "max_len")])
def test_policies_refuse_impossible_lengths(policy, lengths, argument):
    with pytest.raises(ValueError, match=argument):
        policy(*lengths)


def test_a_view_of_moved_slots_reads_somebody_else():
    pool, keys = ContiguousPool(16), np.zeros((16, 4), np.float32)
    for base, name, tokens in ((100, "A", 5), (200, "B", 4), (300, "C", 5)):
        pool.reserve(name, tokens)
        keys[pool.grow(name, tokens)] = base + np.arange(tokens)[:, None]
    pool.finish("B")
    start = pool.run("C").start
    assert start == 9
    reader = keys[start : start + 5]
    keys[5:10] = keys[9:14].copy()
    keys[10:16] = 400 + np.arange(6)[:, None]
    assert reader[:, 0].tolist() == [304, 400, 401, 402, 403]


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda pool: ContiguousPool(0), "num_slots"),
        (lambda pool: ContiguousPool(8, "worst"), "fit"),
        (lambda pool: pool.reserve("A", 1), "name"),
        (lambda pool: pool.reserve("B", 0), "slots"),
        (lambda pool: pool.reserve("B", 1.5), "slots"),
        (lambda pool: pool.grow("A", -1), "tokens"),
        (lambda pool: pool.grow("B"), "name"),
        (lambda pool: pool.finish("B"), "name"),
        (lambda pool: pool.run("B"), "name"),
        (lambda pool: pool.split({}), "final_lens"),
        (lambda pool: pool.split({"A": 2}), "final_lens"),
        (lambda pool: pool.split({"A": 9}), "final_lens"),
    ],
)
def test_bad_input_names_the_argument_and_changes_nothing(call, argument):
    pool = filled(16, {"A": (8, 3)})
    before = state(pool)
    with pytest.raises(ValueError, match=argument):
        call(pool)
    assert state(pool) == before


def test_growing_past_the_reservation():
    pool = filled(16, {"A": (8, 7)})
    assert pool.grow("A") == range(7, 8)
    with pytest.raises(ReservationFull, match="'A' needs 9 slots, its reservation has 8"):
        pool.grow("A")
    assert pool.run("A") == Run(0, 8, 8)
    assert pool.split({"A": 8}).used == 8


def test_a_run_finished_twice_is_refused():
    pool = filled(16, {"A": (8, 3)})
    pool.finish("A")
    with pytest.raises(ValueError, match="name = 'A'"):
        pool.finish("A")


@pytest.mark.parametrize(
    ("damage", "invariant_"),
    [
        (lambda pool: pool._free.update({0: 5}), "P1"),
        (lambda pool: pool._free.pop(0), "P1"),
        (lambda pool: pool._free.update({99: 1}), "P1"),
        (lambda pool: pool._used.update({"wall 0": 2}), "P2"),
        (lambda pool: pool._free.update({0: 2, 2: 2}), "P3"),
    ],
)
def test_check_notices(damage, invariant_):
    pool = with_holes("first", 4, 4)
    pool.check()
    damage(pool)
    with pytest.raises(AssertionError, match=invariant_):
        pool.check()


def test_check_notices_buddies_left_apart():
    pool = ContiguousPool(8, "buddy")
    pool._free = {0: 4, 4: 4}
    with pytest.raises(AssertionError, match="P3"):
        pool.check()


def test_pictures():
    pool = filled(12, {"A": (5, 3), "B": (3, 1)}, "buddy")
    assert repr(pool).splitlines() == ["buddy fit, 12 slots, 0 free, longest run 0", "AAA--+++B--+"]
    assert repr(ContiguousPool(15_728)) == "first fit, 15,728 slots, 15,728 free, longest run 15,728"
    assert pool.snapshot() == {"num_slots": 12, "reservations": {"A": (0, 8, 3), "B": (8, 4, 1)}}


class AgainstSlots(RuleBasedStateMachine):
    """The pool against a list with the owner of each slot."""

    @initialize(num_slots=st.integers(1, 70), fit=st.sampled_from(FITS))
    def start(self, num_slots, fit):
        self.pool = ContiguousPool(num_slots, fit)
        self.owner = [None] * num_slots
        self.final = {}
        self.asked = {}
        self.used = {}
        self.count = 0

    def longest(self):
        longest = run = 0
        for owner in self.owner:
            run = 0 if owner is not None else run + 1
            longest = max(longest, run)
        return longest

    @rule(slots=st.integers(1, 40), data=st.data())
    def reserve(self, slots, data):
        name, before = f"{self.count}", state(self.pool)
        try:
            start = self.pool.reserve(name, slots)
        except OutOfSlots as error:
            assert state(self.pool) == before
            assert error.needed > self.pool.largest_free_run  # noqa: PT017
            if self.pool.fit != "buddy":
                assert slots > self.longest()  # it refuses only what nobody could grant
            return
        given = self.pool.run(name).given
        assert slots <= given < 2 * slots
        assert self.owner[start : start + given] == [None] * given
        self.owner[start : start + given] = [name] * given
        self.count += 1
        self.asked[name], self.used[name] = slots, 0
        self.final[name] = data.draw(st.integers(0, slots))

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def grow(self, data):
        name = data.draw(st.sampled_from(sorted(self.asked)))
        tokens = data.draw(st.integers(0, 5))
        if self.used[name] + tokens > self.asked[name]:
            with pytest.raises(ReservationFull):
                self.pool.grow(name, tokens)
            return
        slots = self.pool.grow(name, tokens)
        assert len(slots) == tokens
        assert all(self.owner[slot] == name for slot in slots)
        self.used[name] += tokens
        self.final[name] = max(self.final[name], self.used[name])

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def finish(self, data):
        name = data.draw(st.sampled_from(sorted(self.asked)))
        self.pool.finish(name)
        del self.asked[name], self.used[name], self.final[name]
        self.owner = [None if owner == name else owner for owner in self.owner]

    @invariant()
    def agrees(self):
        self.pool.check()
        assert self.pool.free_slots == self.owner.count(None)
        if self.pool.fit == "buddy":
            for start, length in self.pool._free.items():
                assert length & (length - 1) == 0 == start % length
        else:
            assert self.pool.largest_free_run == self.longest()
        split = self.pool.split(self.final)
        assert split.used == sum(self.used.values())
        assert split.used + split.later == sum(self.final.values())
        assert split.used + split.later + split.never == sum(self.asked.values())
        total = split.used + split.later + split.never + split.rounding + split.free
        assert total == self.pool.num_slots

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        fresh = ContiguousPool(self.pool.num_slots, self.pool.fit)
        for name in list(self.asked):
            self.pool.finish(name)
        assert self.pool._free == fresh._free  # whatever happened, it all merges again


TestAgainstSlots = AgainstSlots.TestCase
TestAgainstSlots.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
