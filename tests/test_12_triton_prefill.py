"""Chapter 12: prefill and mixed batches, in Triton's interpreter, against chapter 04.

On a machine with a CUDA device these are skipped: tests/gpu has them there, with larger sizes.
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():  # before the kernels are made
    os.environ.setdefault("TRITON_INTERPRET", "1")

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefill_cases import Case, agree, error, expected, make
from transformers import LlamaConfig, LlamaForCausalLM

from paged_kv.attend import AttendPlan, KernelAttention, attend, count_decodes, plan_attend
from paged_kv.attention import paged_attention
from paged_kv.block_manager import BlockManager
from paged_kv.hf_adapter import PagedModel, continuous_decode, host
from paged_kv.kernels import decode_attention
from paged_kv.kernels_prefill import prefill_attention
from paged_kv.kv_store import KVStore
from paged_kv.prefill_plan import PrefillPlan, PrefillTiles, pick_prefill_tiles
from paged_kv.sizing import KVSpec
from paged_kv.triton_device import Limits, interpreted

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.skipif(not interpreted(), reason="the kernels are compiled here: see tests/gpu")
SMALL = PrefillTiles(rows=16, keys=16, pack=2, stages=2)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(case: Case, tiles: PrefillTiles | None = SMALL, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The prefill kernel with these tiles, over outputs that hold NaN."""
    (tokens, heads, size), (_, kv_heads) = case.query.shape, case.store.keys(0).shape[1:3]
    dtype, num_seqs = case.query.dtype, len(case.seq_lens)
    plan = PrefillPlan(num_seqs, tokens + 3, heads, kv_heads, size, "cpu", dtype=dtype, tiles=tiles)
    plan.update(case.cu_seqlens, case.seq_lens, case.rows)
    output, lse = torch.full_like(case.query, torch.nan), torch.full((tokens, heads), torch.nan)
    return prefill_attention(*case.step, rows=case.rows, plan=plan, output=output, lse=lse, **options)


def both(case: Case, **options: Any) -> None:
    agree(case, run(case, **options), **{k: v for k, v in options.items() if k != "tiles"})


# ------------------------------------------------------------------------------------------ the kernel


def test_whole_prompts_and_chunks_over_a_cached_prefix() -> None:
    both(make([5, 9], [5, 9]))
    both(make([3, 1, 20], [20, 7, 33]))


@pytest.mark.parametrize("block_size", [1, 3, 16, 256])
def test_block_sizes(block_size: int) -> None:
    both(make([9, 4], [30, 4], block_size=block_size))


@pytest.mark.parametrize(("heads", "pack"), [((9, 3), 3), ((28, 4), 7), ((71, 1), 1), ((4, 4), 1)])
def test_ratios_of_query_to_kv_heads(heads: tuple[int, int], pack: int) -> None:
    assert pick_prefill_tiles(*heads, 32, 2, Limits(1, 65536)).pack == pack
    both(make([3], [7], heads=heads), tiles=PrefillTiles(16, 16, pack, stages=2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_size", [40, 64, 80, 96, 112, 128, 160, 192, 256])
def test_head_sizes_a22(head_size: int, dtype: torch.dtype) -> None:
    """A22: sizes that are no power of two; the store's neighbours are NaN, so reading past a head shows."""
    if dtype != torch.bfloat16 and head_size not in (80, 128):
        pytest.skip("one size of each kind in the other types")
    both(make([5], [12], heads=(2, 1), head_size=head_size, dtype=dtype))


def test_window_softcap_sinks_and_scale() -> None:
    random = torch.Generator().manual_seed(5)
    sinks = torch.randn(4, generator=random)
    case = make([9, 30, 1], [40, 30, 8], block_size=4)
    both(case, window=6)
    both(case, softcap=2.0, sinks=sinks, scale=0.3)
    both(case, window=1, sinks=sinks)


def test_blocks_that_left_the_window_are_gone() -> None:
    for block_size in (3, 16):
        gone = [(40 - 9 + 1 - 6) // block_size, 0]
        both(make([9, 30], [40, 30], block_size=block_size, gone=gone), window=6)


def test_tails_of_nan_and_inf_a19() -> None:
    """A19: lengths 1, 3 and 4,090 modulo the block; what unwritten slots hold has no effect."""
    counts, lens = [1, 3, 6], [1, 3, 90]
    outputs = []
    for fill in (torch.nan, torch.inf, -torch.inf, 0.0):
        case = make(counts, lens, block_size=16, fill=fill)
        outputs.append(run(case)[0])
        assert torch.equal(outputs[0], outputs[-1])
    agree(case, run(case))


def test_empty_rows_are_alike_in_both_kernels_a21() -> None:
    """A21: lengths 0, 1, 16, 17, 0; garbage in the rows of the empty ones."""
    case = make([1, 1, 1, 1, 1], [0, 1, 16, 17, 0], block_size=16)
    case.block_table[case.rows[0]] = 10**6
    case.block_table[case.rows[4]] = -7
    sinks = torch.zeros(4)
    for options in ({}, {"sinks": sinks}):
        output, lse = run(case, **options)
        decoded = decode_attention(*case.step[:4], case.seq_lens, rows=case.rows, **options)
        for found in ((output, lse), decoded):
            assert not found[0][[0, 4]].any()
            assert torch.equal(found[1] == -torch.inf, (case.seq_lens == 0)[:, None].expand(-1, 4))
        live = [1, 2, 3]
        assert error(output[live], decoded[0][live]) < 1e-2
    case.seq_lens[0] = -1
    assert not run(case)[0][0].any(), "a negative length is an empty row"


def test_stale_ids_of_a_live_sequence_are_not_read_a20() -> None:
    """A20: past its end a row holds ids of another sequence's blocks, or none at all."""
    case = make([4, 7], [12, 20], block_size=8)
    right = run(case)
    case.block_table[case.rows[0], 2:] = case.block_table[case.rows[1], 0]
    case.block_table[case.rows[1], 3:] = 10**6
    assert all(torch.equal(a, b) for a, b in zip(run(case), right, strict=True))


def test_very_low_scores_and_masked_rows_a23() -> None:
    """A23: a single key with score -6e4; equal scores over a long context add up to 1."""
    case = make([1, 2], [1, 2], heads=(2, 1), head_size=32, dtype=torch.float32)
    case.query[:] = 1e3
    for sequence in (0, 1):
        case.store.keys(0)[case.block_table[case.rows[sequence], 0], 0] = -60.0 / 32
    output, lse = run(case, scale=1.0)
    agree(case, (output, lse), scale=1.0)
    assert lse[0, 0] == pytest.approx(-6e4)
    long = make([2], [4096], heads=(2, 1), block_size=64)
    long.store.keys(0)[:], long.store.values(0)[:] = 0.0, 1.0
    output, lse = run(long, tiles=PrefillTiles(16, 256, 2, stages=2))
    assert torch.equal(output, torch.ones_like(output))
    assert torch.allclose(lse, torch.log(torch.tensor([4095.0, 4096.0]))[:, None].expand(-1, 2))


def test_every_row_of_a_batch_is_written_a24() -> None:
    """A24: batch 2, blocks of 256, 4 heads of 64, outputs full of NaN."""
    case = make([2, 2], [1000, 770], heads=(4, 4), head_size=64, block_size=256)
    both(case, tiles=PrefillTiles(16, 128, 1, stages=2))


def test_tokens_of_nobody_stay_as_they_are() -> None:
    case = make([3, 2], [9, 2])
    case.query = torch.cat([case.query, torch.full((2, 4, 32), torch.nan, dtype=case.query.dtype)])
    output, lse = run(case)
    assert output[5:].isnan().all()
    assert lse[5:].isnan().all()
    assert output[:5].isfinite().all()


def test_strided_queries_and_stores() -> None:
    case = make([5, 2], [9, 2])
    right = run(case)
    turned = dataclasses.replace(case, query=case.query.transpose(0, 1).contiguous().transpose(0, 1))
    assert not turned.query.is_contiguous()
    output, lse = torch.empty(4, 7, 32, dtype=case.query.dtype).transpose(0, 1), torch.empty(7, 4)
    prefill_attention(*turned.step, rows=case.rows, output=output, lse=lse)
    assert error(output, right[0]) < 1e-2


SHAPES = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 30)), min_size=1, max_size=4)


@settings(max_examples=6, deadline=None)
@given(
    shapes=SHAPES.filter(lambda s: any(new for new, _ in s)),
    block_size=st.sampled_from([1, 2, 5, 16]),
    window=st.sampled_from([None, 1, 7]),
    seed=st.integers(0, 99),
)
def test_random_batches(shapes: list[tuple[int, int]], block_size: int, window: int | None, seed: int) -> None:
    counts = [new for new, _ in shapes]
    case = make(counts, [new + cached for new, cached in shapes], block_size=block_size, seed=seed)
    both(case, window=window)
    agree(case, attend_case(case, window=window), window=window)


# ------------------------------------------------------------------------------------------ bits


def test_the_same_bits_alone_in_a_batch_and_in_chunks() -> None:
    """Tiles do not depend on the batch, and masked and clear tiles compute alike.

    Cuts are at whole tiles of 8 queries here: the interpreter's products are NumPy's, which treats rows by their place.
    """
    case = make([40, 7, 1], [50, 7, 20], block_size=4, dtype=torch.float32)
    whole = run(case)[0]
    for s, (begin, end) in enumerate([(0, 40), (40, 47), (47, 48)]):
        cu, rows, lens = torch.tensor([0, end - begin]).int(), case.rows[s : s + 1], case.seq_lens[s : s + 1]
        alone = dataclasses.replace(case, query=case.query[begin:end], cu_seqlens=cu, rows=rows, seq_lens=lens)
        assert torch.equal(run(alone)[0], whole[begin:end])
    for cut in (8, 24):  # the first sequence in two steps; the second one's keys are all in the store already
        for begin, end in ((0, cut), (cut, 40)):
            cu, lens = torch.tensor([0, end - begin]).int(), torch.tensor([10 + end]).int()
            part = dataclasses.replace(
                case, query=case.query[begin:end], cu_seqlens=cu, rows=case.rows[:1], seq_lens=lens
            )
            assert torch.equal(run(part)[0], whole[begin:end]), (cut, begin)


# ------------------------------------------------------------------------------------------ arguments


def test_bad_arguments_are_named() -> None:
    case = make([3], [3])
    for wrong, change in {
        "head size": {"query": torch.zeros(3, 4, 36)},
        "query: torch.float32": {"query": case.query.float()},
        "window = 0": {"options": {"window": 0}},
        "scale = -1": {"options": {"scale": -1.0}},
        "plan": {"options": {"plan": PrefillPlan(1, 2, 4, 2, 32, "cpu", dtype=torch.bfloat16)}},
        "do not fit": {"query": torch.zeros(3, 3, 32)},
        "output": {"options": {"output": torch.zeros(3, 2, 32)}},
        "lse": {"options": {"lse": torch.zeros(3, 2)}},
        "sinks": {"options": {"sinks": torch.zeros(3)}},
        "softcap = 0": {"options": {"softcap": 0.0}},
        "contiguous integers": {"options": {"rows": torch.zeros(len(case.rows))}},
    }.items():
        step = (change.get("query", case.query), *case.step[1:])
        if wrong == "head size":
            step = (step[0], *(torch.zeros(2, 8, 2, 36) for _ in range(2)), *step[3:])
        with pytest.raises(ValueError, match=wrong):
            prefill_attention(*step, **{"rows": case.rows} | change.get("options", {}))
    plan = PrefillPlan(2, 3, 4, 2, 32, "cpu")
    with pytest.raises(ValueError, match="cu_seqlens, seq_lens, rows"):
        plan.update(case.cu_seqlens, case.seq_lens, case.rows)
    with pytest.raises(ValueError, match="contiguous"):
        plan.update(torch.tensor([0, 1, 2]).int(), torch.ones(4, dtype=torch.int32)[::2])


def test_tiles_fit_the_device() -> None:
    for shared in (101376, 166912, 232448):
        for head_size in range(32, 257, 8):
            for itemsize in (2, 4):
                tiles = pick_prefill_tiles(32, 8, head_size, itemsize, Limits(132, shared))
                size = 1 << (head_size - 1).bit_length()
                used = (tiles.rows + 2 * tiles.stages * tiles.keys) * size * itemsize
                assert used + 1024 <= shared, (shared, head_size, itemsize, tiles)


# ------------------------------------------------------------------------------------------ mixed batches


def attend_case(case: Case, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return attend(case.query, case.store, 0, case.rows, case.block_table, case.cu_seqlens, case.seq_lens, **options)


def test_decodes_in_front_are_counted() -> None:
    assert count_decodes(torch.tensor([0, 1, 2, 5, 6])) == 2
    assert count_decodes(torch.tensor([0, 1, 2])) == 2
    assert count_decodes(torch.tensor([0, 0, 1])) == 0
    assert count_decodes(torch.tensor([0])) == 0


@pytest.mark.parametrize("num_decodes", [0, 1, 2, None])
def test_a_mixed_batch_however_divided(num_decodes: int | None) -> None:
    case = make([1, 1, 9, 1], [20, 1, 25, 3])
    sinks = torch.arange(4.0)
    agree(case, attend_case(case, num_decodes=num_decodes, sinks=sinks), sinks=sinks)
    agree(case, attend_case(case, num_decodes=num_decodes, window=5), window=5)


def test_only_decodes_and_only_chunks() -> None:
    for counts, kinds in (([1, 1], (True, False)), ([4, 2], (False, True)), ([1, 2], (True, True))):
        case = make(counts, [9, 17])
        plan = plan_attend(
            case.query, case.store.keys(0), case.rows, case.cu_seqlens, case.seq_lens, count_decodes(case.cu_seqlens)
        )
        assert (plan.decode is not None, plan.prefill is not None) == kinds
        agree(case, attend_case(case, plan=plan))
    with pytest.raises(ValueError, match="num_decodes = 3"):
        attend_case(case, num_decodes=3)


def test_a_query_of_another_type_than_the_store() -> None:
    case = make([1, 5], [9, 17])
    half = case.query.clone()
    case.query = case.query.float()
    output, _ = attend_case(case)
    assert output.dtype == torch.float32
    assert error(output, expected(dataclasses.replace(case, query=half.float()))[0]) < 1e-2


def test_without_kernels_torch_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make([1, 5], [9, 17])
    monkeypatch.setattr("paged_kv.attend.runs_kernels", lambda device: False)
    right = paged_attention(*case.step, rows=case.rows, window=4)
    assert all(torch.equal(a, b) for a, b in zip(attend_case(case, window=4), right, strict=True))
    plan = plan_attend(case.query, case.store.keys(0), case.rows, case.cu_seqlens, case.seq_lens, 1)
    assert plan == AttendPlan(1, None, None)


# ------------------------------------------------------------------------------------------ a model on top


def tiny(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=97, num_hidden_layers=2, max_position_embeddings=64, **(shape | changes))
    return LlamaForCausalLM(config).eval()


def test_a_model_runs_through_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check at load passes with a plan a step, and a mixed run gives the tokens of chapter 05's attention."""
    made = []
    real = plan_attend
    monkeypatch.setattr("paged_kv.attend.plan_attend", lambda *a: made.append(a) or real(*a))
    model = tiny()
    guest = PagedModel(model, KVStore(KVSpec(2, 2, 16, "fp32"), 8, 4), attention=KernelAttention(batch_invariant=True))
    assert len(made) == 3, "three steps of the check, two layers each"
    assert all(a[-1] for a in made), "the mode is passed on"
    prompts = [[1, 2, 3, 4, 5], [6, 7]]
    runs = [
        [list(p.output) for p in continuous_decode(g, BlockManager(8, 4, 2, 32), prompts, 2)][-1]
        for g in (guest, host(model, 8, 4))
    ]
    assert runs[0] == runs[1]
    assert len(made) == 5, "and two steps more"
