"""Chapter 11 on a CUDA device, with the tiles that the heuristic picks there, against the float64 oracle.

Public reports of faults in other kernels, by number: A18 (offsets beyond 32 bits), A19 (NaN tails), A20 (slot -1, stale
ids), A21 (empty sequences), A22 (head sizes), A23 (extreme scores, long sums), A24 (splits).
"""

from __future__ import annotations

import random

import pytest
import torch
from decode_cases import Case, assert_right, make_case, plan_for, run

from paged_kv.decode_plan import DecodePlan
from paged_kv.kernels import decode_attention
from paged_kv.kernels_cache import copy_kv_blocks, tensor_addresses, write_kv

RAGGED = [5, 933, 160, 77, 2000, 1, 64, 63, 65, 300]


def gpu_case(*arguments, **options) -> Case:
    return make_case(*arguments, device="cuda", **options)


SHAPES = {
    "ragged": lambda: gpu_case(RAGGED, (32, 8), 128, 16),
    "64 / 8": lambda: gpu_case([5, 933, 0, 77, 2000, 1], (64, 8), 128, 16),
    "9 / 3, fp32": lambda: gpu_case([5, 300, 1], (9, 3), 64, 16, torch.float32),
    "28 / 4, fp16": lambda: gpu_case([400, 3], (28, 4), 128, 16, torch.float16),
    "71 / 1": lambda: gpu_case([200, 1, 9], (71, 1), 64, 8),
    "block 1": lambda: gpu_case([70, 300], (32, 8), 128, 1),
    "block 24, window": lambda: gpu_case([70, 300, 500], (32, 8), 128, 24, window=77),
    "block 256": lambda: gpu_case([70, 300, 500], (32, 8), 128, 256),
    "cap, sinks, rows": lambda: gpu_case([70, 0, 500], (32, 8), 128, 16, rows=[3, 0, 5], softcap=2.0, sinks=True),
    "A19 tail of 4,090": lambda: gpu_case([4090, 1, 3], (8, 2), 128, 16),
    "A21 empty": lambda: gpu_case([0, 1, 16, 17, 0], (8, 2), 128, 16),
    "all empty": lambda: gpu_case([0] * 7, (8, 2), 128, 16),
    "more sequences than programs": lambda: gpu_case([40] * 700, (8, 2), 64, 16),
    "shared blocks": lambda: gpu_case([300, 301, 200], (8, 2), 128, 16, shared=4),
}


@pytest.mark.parametrize("name", SHAPES)
def test_against_the_oracle(name: str) -> None:
    case = SHAPES[name]()
    assert_right(case)
    for changes in ({"fused": True}, {"fused": False}, {"even": False, "programs": 20}):
        assert_right(case, plan_for(case, **changes), again=True)
    assert_right(case, plan_for(case, batch_invariant=True), again=True)


@pytest.mark.parametrize("size", [32, 40, 64, 80, 96, 112, 128, 160, 192, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a22_head_sizes(size: int, dtype: torch.dtype) -> None:
    case = gpu_case([70, 300], (8, 2), size, 16, dtype)
    assert_right(case, plan_for(case))


@pytest.mark.parametrize("programs", [1, 2, 3, 7, 60])
def test_a24_splits_agree(programs: int) -> None:
    case = gpu_case([4090, 1024, 1024, 0], (32, 8), 128, 16)
    for fused in (True, False):
        assert_right(case, plan_for(case, programs=programs, fused=fused))
    case = gpu_case([1000, 1000], (4, 4), 64, 256, torch.float32)
    assert_right(case, plan_for(case, programs=programs))


def random_case(seed: int) -> Case:
    rng = random.Random(seed)
    kv_heads, group = rng.choice([1, 2, 3, 4, 8]), rng.choice([1, 3, 4, 7, 8, 16])
    lens = [rng.choice([0, 1, rng.randint(1, 80), rng.randint(1, 3000)]) for _ in range(rng.randint(1, 40))]
    rows = rng.sample(range(len(lens) + 5), len(lens)) if rng.random() < 0.5 else None
    return gpu_case(
        lens, (kv_heads * group, kv_heads), rng.choice([64, 96, 128]), rng.choice([1, 8, 16, 24, 64, 256]),
        rng.choice([torch.float16, torch.bfloat16]), rows=rows, shared=rng.choice([0, 0, 2]), seed=seed,
        window=rng.choice([None, 1, 33, 700]), softcap=rng.choice([None, 30.0]), sinks=rng.random() < 0.3,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(16))
def test_random_batches(seed: int) -> None:
    case = random_case(seed)
    rng = random.Random(-seed)
    changes = {"programs": rng.choice([1, 7, 66]), "fused": rng.random() < 0.5, "even": rng.random() < 0.5}
    assert_right(case, plan_for(case, **changes))
    assert_right(case, plan_for(case))


def test_a18_pool_above_2_to_the_31() -> None:
    """Block ids on both sides of 2^31 elements give what the same bytes at low ids give."""
    pool = torch.empty(66000, 2, 16, 8, 128, dtype=torch.bfloat16, device="cuda")
    high = torch.tensor([[65535, 65536, 65537, 65999], [65992, 65534, 65533, -1]], dtype=torch.int32, device="cuda")
    low = torch.tensor([[0, 1, 2, 3], [4, 5, 6, -1]], dtype=torch.int32, device="cuda")
    tokens = torch.arange(64, device="cuda")
    for up, down in zip(high, low, strict=True):
        slots = (down.clamp_min(0)[tokens // 16] * 16 + tokens % 16).long()
        far = (up.clamp_min(0)[tokens // 16] * 16 + tokens % 16).long()
        k, v = (torch.randn(64, 8, 128, device="cuda").bfloat16() for _ in range(2))
        real = down[tokens // 16] >= 0
        for at in (slots, far):
            write_kv(k, v, torch.where(real, at, -1), pool[:, 0], pool[:, 1])
    copy_kv_blocks([pool], torch.tensor([[65999, 65998], [65998, 7]], device="cuda"), ordered=True)
    assert torch.equal(pool[7], pool[3])
    lens = torch.tensor([64, 40], dtype=torch.int32, device="cuda")
    query = torch.randn(2, 32, 128, device="cuda").bfloat16()
    found = [decode_attention(query, pool[:, 0], pool[:, 1], table, lens) for table in (high, low)]
    assert torch.isfinite(found[0][0]).all()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a23_extreme_scores_and_long_sums() -> None:
    pool = torch.zeros(2049, 2, 16, 1, 64, dtype=torch.bfloat16, device="cuda")
    pool[:, 1] = 1.0
    table = torch.arange(2049, dtype=torch.int32, device="cuda")[None]
    query = torch.ones(1, 1, 64, device="cuda", dtype=torch.bfloat16)
    lens = torch.tensor([32768], dtype=torch.int32, device="cuda")
    output, lse = decode_attention(query, pool[:, 0], pool[:, 1], table, lens)
    assert torch.equal(output, torch.ones_like(output))
    assert float(lse[0, 0]) == pytest.approx(torch.tensor(32768.0).log().item(), abs=1e-4)
    pool[0, 0, 0] = -1000.0  # a raw score of -64,000
    output, lse = decode_attention(query, pool[:, 0], pool[:, 1], table, lens.clamp_max(1), scale=1.0)
    assert torch.equal(output, torch.ones_like(output))
    assert float(lse[0, 0]) == pytest.approx(-64000.0, rel=1e-6)


def test_graph_replays_with_other_lengths_and_rows() -> None:
    """Captured once with padding rows; later steps change lengths, rows and table in place."""
    case = gpu_case([300, 0, 44, 0, 1000, 7], (32, 8), 128, 16, rows=[4, 0, 2, 0, 1, 3])
    plan, output = plan_for(case), torch.empty_like(case.query)
    lse = torch.empty(case.query.shape[:2], device="cuda")

    def step() -> None:
        plan.update(case.lens, case.rows)
        decode_attention(case.query, case.keys, case.values, case.table, case.lens, rows=case.rows, plan=plan,
                         output=output, lse=lse)  # fmt: skip

    step()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    step()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lens, rows in (([300, 0, 44, 0, 1000, 7], [4, 0, 2, 0, 1, 3]), ([7, 900, 0, 300, 44, 1], [3, 1, 0, 4, 2, 3])):
        case.lens.copy_(torch.tensor(lens))
        case.rows.copy_(torch.tensor(rows))
        output.fill_(float("nan"))
        graph.replay()
        right, right_lse = run(case)
        assert torch.allclose(output.float(), right.float(), atol=2e-2)
        assert torch.equal(torch.isfinite(lse), torch.isfinite(right_lse))


def test_a_step_never_waits_for_the_device() -> None:
    case = gpu_case(RAGGED, (32, 8), 128, 16)
    plan = plan_for(case)
    run(case, plan)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(case, plan)
        pool, slots = case.pool, torch.arange(4, device="cuda")
        k = torch.zeros(4, 8, 128, device="cuda", dtype=pool.dtype)
        write_kv(k, k, slots, pool[:, 0], pool[:, 1])
        copy_kv_blocks([pool], slots.view(2, 2), ordered=False, addresses=addresses_of(pool))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def addresses_of(pool: torch.Tensor) -> torch.Tensor:
    torch.cuda.set_sync_debug_mode("default")
    made = tensor_addresses([pool])
    torch.cuda.set_sync_debug_mode("error")
    return made


def test_batch_invariant_plans_keep_every_bit() -> None:
    """A sequence's output is the same bits alone, and in any batch at any place."""
    case = gpu_case([20000, 300, 4096, 1, 700, 0, 9000], (32, 8), 128, 16)
    whole, sums = run(case, plan_for(case, batch_invariant=True))
    for s in range(len(case.lens)):
        for picked in ([s], [s, 0, 2], [3, 3, 1, s]):
            at = torch.tensor(picked, device="cuda")
            part = Case(case.query[at], case.pool, case.table, case.lens[at], at.int(), {})
            output, lse = run(part, plan_for(part, batch_invariant=True))
            where = picked.index(s) if picked[0] == s else len(picked) - 1
            assert torch.equal(output[where], whole[s])
            assert torch.equal(lse[where], sums[s])


def test_a20_write_skips_and_stays_in_its_slots() -> None:
    pool = torch.full((5, 2, 16, 3, 40), 7.0, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(128, 3, 40, device="cuda") for _ in range(2))
    slots = torch.cat([torch.randperm(79)[:64], torch.full((64,), -1)]).cuda()
    right = pool.clone()
    for i, slot in enumerate(slots[:64].tolist()):
        right[slot // 16, 0, slot % 16], right[slot // 16, 1, slot % 16] = k[i].bfloat16(), v[i].bfloat16()
    write_kv(k, v, slots, pool[:, 0], pool[:, 1])
    assert torch.equal(pool, right)
    assert bool((pool[4, :, 15] == 7).all())


@pytest.mark.parametrize("layers", [1, 5])
def test_copies_in_order_and_at_once(layers: int) -> None:
    tensors = [torch.randn(40, 2, 4, 2, 24, device="cuda") for _ in range(layers)]
    right = [t.clone() for t in tensors]
    pairs = [(0, 1), (1, 2), (3, 0), (0, 3), (5, 5), (2, 4), (-1, -1), (7, -1)]
    for t in right:
        for source, target in pairs:
            if source >= 0 and target >= 0:
                t[target] = t[source].clone()
    copy_kv_blocks(tensors, torch.tensor(pairs, device="cuda"), ordered=True)
    assert all(torch.equal(a, b) for a, b in zip(tensors, right, strict=True))
    ids = torch.randperm(40, device="cuda")
    pairs_at_once = torch.stack([ids[:20], ids[20:]], 1)
    copy_kv_blocks(tensors, pairs_at_once, ordered=False, addresses=tensor_addresses(tensors))
    assert all(torch.equal(t[ids[20:]], t[ids[:20]]) for t in tensors)


def test_a_plan_is_for_one_shape() -> None:
    case = gpu_case([5, 6], (8, 2), 128, 16)
    with pytest.raises(ValueError, match="made for"):
        decode_attention(case.query, case.keys, case.values, case.table, case.lens,
                         plan=DecodePlan(3, 8, 2, 128, "cuda"))  # fmt: skip
