"""Chapter 12 on a CUDA device, with the tiles that the heuristic picks there, against chapter 04 in float32."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from prefill_cases import Case, agree, error, expected, make
from transformers import LlamaConfig, LlamaForCausalLM

from paged_kv.attend import KernelAttention, attend
from paged_kv.block_manager import BlockManager
from paged_kv.hf_adapter import PagedModel
from paged_kv.kernels_prefill import prefill_attention
from paged_kv.kv_store import KVStore
from paged_kv.packed_batch import PackedBatch, pack
from paged_kv.prefill_plan import PrefillPlan
from paged_kv.sizing import KVSpec


def case_of(counts: list[int], lens: list[int], *arguments: object, **options: object) -> Case:
    return make(counts, lens, *arguments, device="cuda", **options)  # type: ignore[arg-type]


def run(case: Case, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Over outputs that hold NaN, with more room in the plan than is needed."""
    (tokens, heads, size), (_, kv_heads) = case.query.shape, case.store.keys(0).shape[1:3]
    plan = PrefillPlan(len(case.seq_lens), tokens + 77, heads, kv_heads, size, "cuda", dtype=case.query.dtype)
    plan.update(case.cu_seqlens, case.seq_lens, case.rows)
    output, lse = torch.full_like(case.query, torch.nan), torch.full((tokens, heads), torch.nan, device="cuda")
    return prefill_attention(*case.step, rows=case.rows, plan=plan, output=output, lse=lse, **options)  # type: ignore[arg-type]


SHAPES = {
    "prompts": (([50, 190], [50, 190], (32, 8), 128, 16), {}),
    "prefix, 28 / 4": (([3, 1, 200], [200, 70, 333], (28, 4), 128, 16), {}),
    "empty, sinks": (([2, 2, 3, 1], [0, 2, 0, 170], (8, 2), 64, 8), {"sinks": True}),
    "window, blocks of 3": (([90, 30], [400, 30], (32, 8), 128, 3), {"window": 66}),
    "window, blocks of 256": (([90, 30], [400, 30], (8, 2), 128, 256), {"window": 66}),
    "soft cap, sinks, blocks of 1": (([90, 30], [200, 30], (32, 8), 80, 1), {"softcap": 2.0, "sinks": True}),
    "71 / 1, fp16": (([20, 1], [50, 100], (71, 1), 64, 16, torch.float16), {}),
    "9 / 3, fp32": (([40, 1], [50, 100], (9, 3), 64, 16, torch.float32), {}),
    "blocks of 64": (([200, 3], [500, 3], (8, 2), 128, 64), {}),
    "A19 tail of 4,090": (([10, 1, 3], [4090, 1, 3], (8, 2), 128, 16), {}),
}
SHAPES |= {
    f"head size {size}, {str(dtype)[6:]}": (([70, 3], [300, 3], (8, 2), size, 16, dtype), {})
    for size in (32, 64, 80, 96, 112, 160, 192, 256)
    for dtype in (torch.bfloat16, torch.float32)
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str) -> None:
    arguments, options = SHAPES[name]
    case = case_of(*arguments)
    if options.get("sinks"):
        options = options | {"sinks": torch.randn(case.query.shape[1], device="cuda")}
    agree(case, run(case, **options), **options)


def test_random_shapes_in_mixed_batches() -> None:
    rng = random.Random(0)
    for seed in range(12):
        kv_heads, group = rng.choice([1, 2, 8]), rng.choice([1, 4, 7])
        counts = [rng.choice([1, 1, rng.randint(0, 400)]) for _ in range(rng.randint(1, 20))]
        lens = [n + rng.choice([0, rng.randint(0, 1000)]) for n in counts]
        if not sum(counts):
            continue
        case = case_of(counts, lens, (kv_heads * group, kv_heads), 128, rng.choice([1, 16, 24]), seed=seed)
        window = rng.choice([None, 100])
        where = (case.rows, case.block_table, case.cu_seqlens, case.seq_lens)
        agree(case, attend(case.query, case.store, 0, *where, window=window), window=window)


def test_a_pool_beyond_32_bits_a18() -> None:
    """A18: block ids around 65,536 in a pool of more than 2^31 numbers give what low ids give."""
    pool = torch.empty(66000, 2, 16, 8, 128, dtype=torch.bfloat16, device="cuda")
    high = torch.tensor([[65535, 65536, 65537, 65999], [65992, 65534, 65533, -1]], dtype=torch.int32, device="cuda")
    low = torch.tensor([[0, 1, 2, 3], [4, 5, 6, -1]], dtype=torch.int32, device="cuda")
    for a, b in zip(high.flatten().tolist(), low.flatten().tolist(), strict=True):
        if a >= 0:
            pool[b] = pool[a].normal_()
    assert pool.numel() > 2**31
    query = torch.randn(40, 32, 128, device="cuda").bfloat16()
    cu, lens = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, 30, 40], [64, 40]))
    outputs = [prefill_attention(query, pool[:, 0], pool[:, 1], table, cu, lens) for table in (high, low)]
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))


def test_the_same_bits_alone_in_a_batch_and_in_chunks() -> None:
    case = case_of([300, 77], [400, 777], (32, 8), 128, 16)
    whole = run(case)[0]
    for cut in (1, 64, 123, 300):
        for begin, end in ((0, cut), (cut, 300)):
            if begin < end:
                cu, lens = (torch.tensor(x, device="cuda").int() for x in ([0, end - begin], [100 + end]))
                part = {"query": case.query[begin:end], "cu_seqlens": cu, "rows": case.rows[:1], "seq_lens": lens}
                assert torch.equal(run(dataclasses.replace(case, **part))[0], whole[begin:end]), (cut, begin)


def test_a_captured_step_follows_its_tensors_and_never_waits() -> None:
    """A graph of attend, replayed after lengths, rows and table changed in place; padding sequences are empty."""
    first = case_of([1, 1, 1, 40, 9], [100, 33, 0, 140, 9], (8, 2), 64, 16, seed=1)
    second = case_of([1, 1, 1, 20, 29], [61, 150, 0, 77, 120], (8, 2), 64, 16, seed=2)
    width, blocks = 16, 64
    pool = torch.full((blocks, *first.store.tensors[0].shape[1:]), torch.nan, dtype=torch.bfloat16, device="cuda")
    store = KVStore(KVSpec(1, 2, 64, "bf16"), 1, 16, "cuda")
    store.tensors, store.num_blocks = [pool], blocks
    table = torch.full((7, width), -1, dtype=torch.int32, device="cuda")
    static = Case(
        store, first.query.clone(), table, first.rows.clone(), first.cu_seqlens.clone(), first.seq_lens.clone()
    )

    def load(case: Case) -> None:
        store.tensors[0][: len(case.store.tensors[0])] = case.store.tensors[0]
        table.fill_(-1)
        table[:, : case.block_table.shape[1]] = case.block_table
        for name in ("query", "rows", "cu_seqlens", "seq_lens"):
            getattr(static, name).copy_(getattr(case, name))

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        where = (static.rows, static.block_table, static.cu_seqlens, static.seq_lens)
        return attend(static.query, store, 0, *where, num_decodes=3)

    load(first)
    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for case in (first, second, first):
        load(case)
        graph.replay()
        torch.cuda.synchronize()
        agree(case, (found[0].clone(), found[1].clone()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_runs_through_the_kernels(dtype: torch.dtype) -> None:
    """A packed batch of prompts, then a mixed step, against the model's own forward."""
    torch.manual_seed(0)
    shape = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=97, num_hidden_layers=2, max_position_embeddings=256, **shape)
    model = LlamaForCausalLM(config).to("cuda", dtype).eval()
    name = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    guest = PagedModel(model, KVStore(KVSpec(2, 2, 32, name), 64, 16, "cuda"), attention=KernelAttention())
    manager = BlockManager(64, 16, 4, 256)
    ids = [torch.randint(97, (n,)).tolist() for n in (100, 37, 5)]
    rows = [manager.add(len(ids[0]) - 1), manager.add(len(ids[1]) - 10)]
    guest.forward(pack(manager.tables, rows, [ids[0][:-1], ids[1][:-10]], "cuda"))
    manager.append([rows[0]])
    manager.append([rows[1]], [10])
    rows.append(manager.add(5))
    batch: PackedBatch = pack(manager.tables, rows, [ids[0][-1:], ids[1][-10:], ids[2]], "cuda")
    logits = guest.forward(batch)
    with torch.inference_mode():
        own = torch.stack([model(input_ids=torch.tensor([x], device="cuda")).logits[0, -1] for x in ids])
    assert error(logits, own) < {torch.float32: 1e-4, torch.bfloat16: 2e-2}[dtype]


def test_the_oracle_can_fail() -> None:
    case = case_of([9], [40])
    output, lse = run(case)
    assert error(output, expected(case)[0] * 1.05) > 0.02
    with pytest.raises(AssertionError):
        agree(case, (output, lse + 0.1))
