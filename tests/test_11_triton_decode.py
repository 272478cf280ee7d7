"""Chapter 11: writing, copying, planning and decode attention, in Triton's interpreter, against chapter 04.

On a machine with a CUDA device the kernels are compiled: tests/gpu has these cases there, and larger ones.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed")

from decode_cases import assert_right, make_case, oracle, plan_for, run, small

from paged_kv.decode_plan import DecodePlan, Tiles, every_pick, pick_tiles
from paged_kv.kernels import decode_attention
from paged_kv.kernels_cache import copy_kv_blocks, tensor_addresses, write_kv
from paged_kv.triton_device import Limits, interpreted, jit, limits_of, next_pow2, runs_kernels

ROOT = Path(__file__).resolve().parents[1]
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
kernels_here = pytest.mark.skipif(not interpreted(), reason="kernels are compiled here, not interpreted: see tests/gpu")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ---- attention against the oracle

SHAPES = {
    "9 / 3, fp32": lambda: make_case([5, 30, 1], (9, 3), 64, 16, FP32),
    "28 / 4": lambda: make_case([40, 3], (28, 4), 32, 16),
    "71 / 1, fp16": lambda: make_case([20, 1, 9], (71, 1), 64, 8, FP16),
    "A21 empty": lambda: make_case([0, 1, 16, 17, 0], (4, 2), 32, 16),
    "all empty": lambda: make_case([0, 0], (4, 2), 32, 16),
    "negative length": lambda: make_case([-3, 5], (4, 2), 32, 16),
    "rows": lambda: make_case([7, 0, 21], (4, 2), 32, 4, rows=[3, 0, 5]),
    "block 1": lambda: make_case([7, 30], (4, 2), 32, 1),
    "block 3, window": lambda: make_case([7, 50, 21], (4, 2), 32, 3, window=9),
    "block 256": lambda: make_case([7, 260], (2, 1), 32, 256),
    "window of 1": lambda: make_case([7, 1], (4, 2), 32, 4, window=1),
    "cap, sinks": lambda: make_case([7, 0, 50], (4, 2), 32, 4, softcap=2.0, sinks=True),
    "A22 head 40": lambda: make_case([7, 18], (4, 2), 40, 8),
    "A22 head 80": lambda: make_case([7, 18], (4, 2), 80, 8, FP16),
    "A22 head 192": lambda: make_case([7, 18], (2, 1), 192, 8),
    "shared blocks": lambda: make_case([20, 21, 9], (4, 2), 32, 4, shared=2),
    "scale": lambda: make_case([20, 3], (4, 2), 32, 4, FP32, scale=0.5),
}


@kernels_here
@pytest.mark.parametrize("name", SHAPES)
def test_decode_is_the_oracle(name: str) -> None:
    case = SHAPES[name]()
    assert_right(case, plan_for(case, **small()))


@kernels_here
@pytest.mark.parametrize("changes", [{"fused": False}, {"heads": 1, "even": False}, {"rows": 32, "heads": 4}])
def test_other_tiles_are_right_too(changes: dict) -> None:
    case = make_case([25, 0, 9], (8, 4), 32, 4, sinks=True, rows=[2, 1, 0])
    assert_right(case, plan_for(case, **small(**changes)), again=True)


@kernels_here
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a19_tails_hold_anything(poison: float) -> None:
    case = make_case([1, 3, 26], (4, 2), 32, 16, FP32, poison=poison)
    output, _ = assert_right(case, plan_for(case, **small()))
    clean = replace(case, pool=case.pool.nan_to_num(0.0, 0.0, 0.0))
    zeros, _ = run(clean, plan_for(clean, **small()))
    assert torch.equal(output, zeros)


@kernels_here
@pytest.mark.parametrize("fused", [True, False])
def test_a24_splits_agree(fused: bool) -> None:
    """1, 2, 3 and 7 programs, batch 2, every row written; agreement to rounding in fp32."""
    case = make_case([32, 30], (2, 1), 32, 16, FP32)
    found = []
    for programs in (1, 2, 3, 7):
        plan = plan_for(case, **small(programs=programs, fused=fused, even=False))
        found.append(assert_right(case, plan)[0])
    assert all(torch.allclose(found[0], other, atol=1e-6) for other in found)


@kernels_here
def test_a23_a_lone_low_score_and_a_long_sum() -> None:
    pool = torch.zeros(9, 2, 64, 1, 32)
    pool[:, 1] = 1.0
    pool[0, 0, 0] = -2000.0
    query, table = torch.ones(1, 1, 32), torch.arange(9, dtype=torch.int32)[None]
    one = torch.tensor([1], dtype=torch.int32)
    output, lse = decode_attention(query, pool[:, 0], pool[:, 1], table, one, scale=1.0)
    assert torch.equal(output, torch.ones_like(output))
    assert lse.item() == pytest.approx(-64000.0)
    pool = pool.bfloat16()
    pool[0, 0, 0] = 0
    query, lens = query.bfloat16(), torch.tensor([512], dtype=torch.int32)
    output, lse = decode_attention(query, pool[:, 0], pool[:, 1], table, lens)
    assert torch.equal(output, torch.ones_like(output))  # a bf16 sum of ones stops at 256


@kernels_here
@settings(max_examples=4, deadline=None)
@given(st.data())
def test_random_batches(data: st.DataObject) -> None:
    lens = data.draw(st.lists(st.integers(0, 24), min_size=1, max_size=4))
    kv_heads, group = data.draw(st.sampled_from([(1, 1), (2, 3), (4, 2)]))
    case = make_case(
        lens, (kv_heads * group, kv_heads), 32, data.draw(st.sampled_from([1, 3, 4, 16])),
        data.draw(st.sampled_from([FP32, BF16])), window=data.draw(st.sampled_from([None, 1, 7])),
        softcap=data.draw(st.sampled_from([None, 2.0])), sinks=data.draw(st.booleans()),
        seed=data.draw(st.integers(0, 99)),
    )  # fmt: skip
    changes = {"programs": data.draw(st.integers(1, 9)), "fused": data.draw(st.booleans())}
    assert_right(case, plan_for(case, **small(even=data.draw(st.booleans()), **changes)))


# ---- the plan


@kernels_here
@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 70), min_size=1, max_size=7), st.integers(1, 12), st.booleans())
def test_every_tile_has_one_program(lens: list[int], programs: int, even: bool) -> None:
    plan = DecodePlan(len(lens), 4, 2, 32, "cpu", tiles=Tiles(16, 2, 4, 2, programs, even=even))
    plan.update(torch.tensor(lens, dtype=torch.int32))
    tiles = [-(-n // 8) for n in lens]
    upto = [sum(tiles[: i + 1]) for i in range(len(tiles))]
    assert plan.cum.tolist()[: len(lens) + 1] == [0, *upto]
    assert plan.cum[-1] == lens.count(0)
    read = [tile for begin, end, *_ in plan.record.tolist() for tile in range(begin, end)]
    assert read == list(range(upto[-1]))
    sizes = [end - begin for begin, end, *_ in plan.record.tolist() if end > begin]
    assert not sizes or max(sizes) - min(sizes) <= 1
    for begin, end, seq, first, behind, length, row, next_row in plan.record.tolist():
        if end > begin:
            assert first == upto[seq] - tiles[seq] <= begin < behind == upto[seq]
            assert (length, row, next_row) == (lens[seq], seq, min(seq + 1, len(lens) - 1))


@kernels_here
def test_equal_lengths_are_cut_at_whole_sequences() -> None:
    def working(count: int, programs: int) -> int:
        plan = DecodePlan(count, 4, 2, 32, "cpu", tiles=Tiles(16, 2, 4, 2, programs))
        plan.update(torch.full((count,), 80, dtype=torch.int32))
        return int(plan.cum[count + 1])

    assert [working(*pair) for pair in ((100, 66), (64, 66), (3, 8), (7, 5), (8, 4))] == [50, 64, 6, 5, 4]


@kernels_here
def test_batch_invariant_cuts_do_not_depend_on_the_batch() -> None:
    case = make_case([40, 3, 20, 0], (4, 2), 32, 4, FP32)

    def bits(*picked: int, programs: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
        at = torch.tensor(picked)
        part = replace(case, query=case.query[at], lens=case.lens[at], rows=at.int())
        plan = plan_for(part, batch_invariant=True, **small(programs=programs, even=False, fused=True))
        plan.least = 1
        output, lse = run(part, plan)
        return output[0], lse[0]

    right, _ = oracle(case)
    for s in (0, 2):
        alone = bits(s)
        assert torch.allclose(alone[0].double(), right[s], atol=1e-5)
        for others in (bits(s, 1, 2), bits(s, 3, 0, programs=7)):
            assert all(torch.equal(a, b) for a, b in zip(alone, others, strict=True))


# ---- writing and copying


@kernels_here
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a20_write_skips_minus_one(dtype: torch.dtype) -> None:
    pool = torch.full((5, 2, 16, 3, 40), 7.0, dtype=dtype)
    k, v = torch.randn(2, 128, 3, 40).to(dtype)  # the interpreter cuts bf16 off where hardware rounds
    slots = torch.cat([torch.randperm(79)[:64], torch.full((64,), -1)])
    right = pool.clone()
    at = slots[:64]
    right[at // 16, 0, at % 16], right[at // 16, 1, at % 16] = k[:64], v[:64]
    write_kv(k, v, slots, pool[:, 0], pool[:, 1])
    assert torch.equal(pool, right)
    assert bool((pool[4, :, 15] == 7).all())
    write_kv(k[:0], v[:0], slots[:0], pool[:, 0], pool[:, 1])
    assert torch.equal(pool, right)


@kernels_here
@settings(max_examples=10, deadline=None)
@given(st.lists(st.tuples(st.integers(-1, 5), st.integers(-1, 5)), max_size=8))
def test_copies_in_order_are_one_by_one(pairs: list[tuple[int, int]]) -> None:
    tensors = [torch.randn(6, 2, 4, 1, 8) for _ in range(2)]
    right = [t.clone() for t in tensors]
    for t in right:
        for source, target in pairs:
            if source >= 0 and target >= 0:
                t[target] = t[source].clone()
    given_pairs = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
    copy_kv_blocks(tensors, given_pairs, ordered=True, addresses=tensor_addresses(tensors))
    assert all(torch.equal(a, b) for a, b in zip(tensors, right, strict=True))


@kernels_here
def test_copies_at_once() -> None:
    tensors = [torch.randn(12, 2, 4, 2, 40) for _ in range(3)]
    right = [t.clone() for t in tensors]
    ids = torch.randperm(12)
    for t in right:
        t[ids[6:]] = t[ids[:6]]
    copy_kv_blocks(tensors, torch.stack([ids[:6], ids[6:]], 1), ordered=False)
    assert all(torch.equal(a, b) for a, b in zip(tensors, right, strict=True))


# ---- what is refused


def test_bad_arguments_are_named() -> None:
    case = make_case([5, 6], (4, 2), 32, 4)
    good = [case.query, case.keys, case.values, case.table, case.lens]

    def refused(what: str, *arguments, **options) -> None:
        with pytest.raises(ValueError, match=what):
            decode_attention(*arguments, **options)

    refused("query, keys, values", case.query[:, :3], *good[1:])
    refused("query, keys, values", case.query[..., :24], *good[1:])
    refused("the cache holds", case.query.float(), *good[1:])
    refused("seq_lens", *good[:4], case.lens.long())
    refused("seq_lens", *good[:4], case.lens[:1])
    refused("window = 0", *good, window=0)
    refused("made for", *good, plan=DecodePlan(3, 4, 2, 32, "cpu"))
    refused("made for", *good, plan=DecodePlan(2, 4, 2, 32, "cpu"), window=4)
    refused("head size 12", case.query[..., :12], case.keys[..., :12], case.values[..., :12], *good[3:])
    with pytest.raises(ValueError, match="seq_lens"):
        DecodePlan(2, 4, 2, 32, "cpu").update(case.lens.long())
    wide = torch.zeros(2, 4, 64)[..., ::2].to(case.query.dtype)
    refused("numbers of a head", torch.empty_strided(wide.shape, (256, 64, 2), dtype=wide.dtype), *good[1:])
    refused("block_table", *good[:3], case.table.long(), case.lens)
    refused("rows", *good, rows=torch.zeros(3, dtype=torch.int32))
    refused("contiguous", *good, rows=torch.zeros(4, dtype=torch.int32)[::2])
    refused("contiguous", *good[:4], torch.ones(4, dtype=torch.int32)[::2])
    refused("contiguous", *good, rows=torch.zeros(2))
    refused("1 rows for 2", *good[:3], case.table[:1], case.lens)
    refused("softcap = 0", *good, softcap=0.0)
    refused("sinks", *good, sinks=torch.zeros(2))
    refused("output", *good, output=torch.empty(2, 2, 32))
    refused("lse", *good, lse=torch.empty(2, 2))
    refused("lse", *good, lse=torch.empty(4, 2).T)
    k = torch.zeros(3, 2, 32)
    with pytest.raises(ValueError, match="slot_mapping"):
        write_kv(k, k, torch.zeros(2, dtype=torch.int64), case.keys, case.values)
    with pytest.raises(ValueError, match="numbers of a head"):
        write_kv(torch.zeros(3, 2, 64)[..., ::2], k, torch.zeros(3, dtype=torch.int64), case.keys, case.values)
    slots = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="do not fit"):
        write_kv(k, k, slots, case.keys, case.values[:1])
    for bad in (torch.zeros(6, dtype=torch.int64)[::2], slots.float()):
        with pytest.raises(ValueError, match="slot_mapping"):
            write_kv(k, k, bad, case.keys, case.values)
    with pytest.raises(ValueError, match="seq_lens, rows"):
        DecodePlan(2, 4, 2, 32, "cpu").update(case.lens, torch.zeros(1, dtype=torch.int32))
    none = torch.zeros(0, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="one shape and type"):
        copy_kv_blocks([torch.zeros(4, 8), torch.zeros(4, 8).bfloat16()], none, ordered=True)
    with pytest.raises(ValueError, match="addresses"):
        copy_kv_blocks([torch.zeros(4, 8)], none, ordered=True, addresses=tensor_addresses([k, k]))
    for blocks in (torch.zeros(4, 1, 3, dtype=torch.float16), torch.zeros(5, 4, dtype=torch.float16)[1:]):
        with pytest.raises(ValueError, match="8-byte words"):
            copy_kv_blocks([blocks], none, ordered=True)
    with pytest.raises(ValueError, match="pairs"):
        copy_kv_blocks([case.pool], torch.tensor([0, 1]), ordered=True)
    with pytest.raises(ValueError, match="contiguous"):
        copy_kv_blocks([case.pool, case.pool[:-1]], torch.zeros(1, 2, dtype=torch.int64), ordered=True)


def test_an_empty_batch_is_no_work() -> None:
    case = make_case([5], (4, 2), 32, 4)
    output, lse = decode_attention(case.query[:0], case.keys, case.values, case.table, case.lens[:0])
    assert (tuple(output.shape), tuple(lse.shape)) == ((0, 4, 32), (0, 4))


# ---- the heuristic


@pytest.mark.parametrize("limits", [Limits(108, 166912), Limits(84, 101376), Limits(132, 232448)])
def test_picks_fit_and_divide(limits: Limits) -> None:
    for batch in (1, 16, 4096):
        for heads, kv_heads in ((9, 3), (28, 4), (71, 1), (32, 8), (64, 8), (16, 16)):
            for size in range(32, 257, 8):
                for itemsize in (2, 4):
                    for invariant in (False, True):
                        tiles = pick_tiles(batch, heads, kv_heads, size, itemsize, limits, invariant)
                        assert kv_heads % tiles.heads == 0
                        assert tiles.rows % tiles.heads == 0
                        assert tiles.programs >= 1
                        in_flight = 2 * tiles.stages * tiles.rows * next_pow2(size) * itemsize
                        assert in_flight < limits.shared_memory
    assert len(list(every_pick(limits))) > 10


def test_batch_invariant_tiles_do_not_depend_on_the_batch() -> None:
    limits = Limits(132, 232448)
    picks = {pick_tiles(batch, 32, 8, 128, 2, limits, True) for batch in (1, 4, 64, 1000)}
    assert len(picks) == 1


# ---- where no kernels run

FALLBACK = """
import torch
from decode_cases import make_case, oracle
from paged_kv.decode_plan import DecodePlan
from paged_kv.kernels import decode_attention
from paged_kv.kernels_cache import copy_kv_blocks, write_kv
from paged_kv.triton_device import runs_kernels

assert not runs_kernels(torch.device("cpu"))
case = make_case([7, 0, 21], (4, 2), 32, 4, torch.float32, rows=[3, 0, 5], window=6, sinks=True)
plan, output = DecodePlan(3, 4, 2, 32, "cpu", dtype=torch.float32, window=6), torch.empty_like(case.query)
plan.update(case.lens, case.rows)
found = decode_attention(case.query, case.keys, case.values, case.table, case.lens, rows=case.rows, plan=plan,
                         output=output, **case.options)
assert found[0] is output
assert all(torch.allclose(a.double(), b, atol=1e-5) for a, b in zip(found, oracle(case)))
pool = torch.full((5, 2, 16, 3, 40), 7.0)
k, v = torch.randn(2, 3, 3, 40)
write_kv(k, v, torch.tensor([2, -1, 70]), pool[:, 0], pool[:, 1])
assert torch.equal(pool[4, 1, 6], v[2]) and bool((pool[4, :, 15] == 7).all())
copy_kv_blocks([pool], torch.tensor([[0, 1], [1, 2], [-1, 3]]), ordered=True)
assert torch.equal(pool[2], pool[0]) and bool((pool[3] == 7).all())
print("right")
"""
NO_TRITON = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"blocked: {name}", name=name)
sys.meta_path.insert(0, Blocked())
"""


@pytest.mark.parametrize("before", ["", NO_TRITON], ids=["compiled kernels, no GPU", "no Triton"])
def test_the_torch_fallback_has_the_same_meaning(before: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, so kernels run")
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    env = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", before + FALLBACK], capture_output=True, text=True, env=env)
    assert done.stdout.strip() == "right", done.stderr[-2000:]


def test_small_helpers() -> None:
    assert [next_pow2(n) for n in (1, 2, 3, 16, 17, 255)] == [1, 2, 4, 16, 32, 256]
    assert limits_of(torch.device("cpu")).processors >= 1
    assert runs_kernels(torch.device("cpu")) == interpreted()
    assert jit(lambda: None, do_not_specialize=[]) is not None


def test_the_benchmark_runs_the_chapter_s_own_rungs() -> None:
    """Its cells tagged `ladder`, put together as the benchmark does, agree with the oracle."""
    if not interpreted():
        pytest.skip("kernels are compiled here, not interpreted: see tests/gpu")
    sys.path.insert(0, str(ROOT))
    from benchmarks.decode_attention import ladder

    cells, case = ladder(), make_case([13, 7, 5], (4, 2), 32, 4, FP32)
    right, _ = oracle(case)
    parts = (case.query, case.keys, case.values, case.table, case.lens)
    found = [cells.run_one_head(*parts), cells.run_group(*parts), cells.run_group(*parts, stages=3, splits=2)]
    assert all(torch.allclose(output.double(), right, atol=1e-5) for output in found)
