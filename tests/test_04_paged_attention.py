"""Chapter 04: the store and attention through the table.  Names or docstrings give the case (A18 ...) of each test."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from paged_kv import attention
from paged_kv.attention import paged_attention, paged_attention_numpy
from paged_kv.kv_store import KVStore, resolve_copies
from paged_kv.sizing import KVSpec


def one_layer(num_blocks: int, block_size: int, heads: int = 1, size: int = 8, **more: Any) -> KVStore:
    return KVStore(KVSpec(1, heads, size, more.pop("dtype", "fp32")), num_blocks, block_size, **more)


def slots_of(row: Tensor, positions: Tensor, block_size: int) -> Tensor:
    return row.long()[positions // block_size] * block_size + positions % block_size


class Batch:
    """Sequences in randomly taken blocks of one layer; everything not written is NaN."""

    def __init__(
        self,
        seqs: Sequence[tuple[int, int]],
        block_size: int = 4,
        heads: int = 4,
        kv_heads: int = 2,
        size: int = 8,
        dtype: str = "fp32",
        seed: int = 0,
    ) -> None:
        gen = torch.Generator().manual_seed(seed)
        blocks = [-(-n // block_size) for _, n in seqs]
        self.store = one_layer(sum(blocks) + 2, block_size, kv_heads, size, dtype=dtype)
        ids = torch.randperm(sum(blocks) + 2, generator=gen).int()
        self.table = torch.full((len(seqs) + 1, max(blocks, default=0) + 1), -1, dtype=torch.int32)
        self.rows = torch.randperm(len(seqs) + 1, generator=gen)[: len(seqs)]
        self.kv = []
        for row, count, (_, n) in zip(self.rows, blocks, seqs, strict=True):
            self.table[row, :count], ids = ids[:count], ids[count:]
            k, v = torch.randn(2, n, kv_heads, size, generator=gen)
            self.store.write(0, k, v, slots_of(self.table[row], torch.arange(n), block_size))
            self.kv.append((k, v))
        self.cu = torch.tensor([0, *itertools.accumulate(q for q, _ in seqs)], dtype=torch.int32)
        self.lens = torch.tensor([n for _, n in seqs], dtype=torch.int32)
        self.query = torch.randn(int(self.cu[-1]), heads, size, generator=gen).to(self.store.dtype)

    def run(self, **options: Any) -> tuple[Tensor, Tensor]:
        keys, values = options.pop("pools", (self.store.keys(0), self.store.values(0)))
        return paged_attention(self.query, keys, values, self.table, self.cu, self.lens, rows=self.rows, **options)

    def oracle(self, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        options = {k: v.numpy() if isinstance(v, Tensor) else v for k, v in options.items()}
        keys, values = (pool.float().numpy() for pool in (self.store.keys(0), self.store.values(0)))
        parts = [
            paged_attention_numpy(
                self.query[a:b].float().numpy(), keys, values, self.table[row].numpy(), int(n), **options
            )
            for (a, b), row, n in zip(itertools.pairwise(self.cu.tolist()), self.rows, self.lens, strict=True)
        ]
        return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])

    def check(self, tolerance: float = 2e-6, **options: Any) -> None:
        output, lse = self.run(**options)
        right, right_lse = self.oracle(**options)
        np.testing.assert_allclose(output.float().numpy(), right, atol=tolerance, rtol=tolerance)
        np.testing.assert_allclose(lse.numpy(), right_lse, atol=1e-5, rtol=1e-5)


# ------------------------------------------------------------------------------------------ the store


def test_layout_and_bytes() -> None:
    spec = KVSpec(3, 2, 40, "bf16")
    store = KVStore(spec, num_blocks=5, block_size=16)
    assert [tuple(t.shape) for t in store.tensors] == [(5, 2, 16, 2, 40)] * 3
    assert store.nbytes == 5 * spec.bytes_per_block(16)
    assert store.keys(1).shape == store.values(1).shape == (5, 16, 2, 40)
    assert store.keys(1).data_ptr() == store.tensors[1].data_ptr()
    assert store.dtype == torch.bfloat16
    assert all(t.isnan().all() for t in store.tensors)
    assert not KVStore(spec, 1, 1, fill=0.0).tensors[0].any()
    assert KVStore(spec, 1, 1, dtype=torch.float64).tensors[2].dtype == torch.float64


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((KVSpec(1, 1, 8), 0, 4), "num_blocks"),
        ((KVSpec(1, 1, 8), 4, 0), "block_size"),
        ((KVSpec(1, 1, 8, "int8"), 4, 4), "spec"),
        ((KVSpec(1, 1, 8, tensors_per_layer=1), 4, 4), "spec"),
    ],
)
def test_bad_stores_are_refused(arguments: tuple[Any, ...], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        KVStore(*arguments)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_write_changes_the_named_slots_and_nothing_else(data: st.DataObject) -> None:
    block_size, num_blocks = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    total = block_size * num_blocks
    real = data.draw(st.lists(st.integers(0, total - 1), unique=True))
    slots = data.draw(st.permutations([*real, *[-1] * data.draw(st.integers(0, 4))]))
    store = KVStore(KVSpec(2, 2, 8, "fp32"), num_blocks, block_size)
    for tensor in store.tensors:
        tensor.normal_()
    before = [t.clone() for t in store.tensors]
    k, v = torch.randn(2, len(slots), 2, 8)
    with torch.inference_mode():
        store.write(1, k, v, torch.tensor(slots, dtype=torch.int64))
    for i, slot in enumerate(slots):
        if slot >= 0:
            before[1][slot // block_size, 0, slot % block_size] = k[i]
            before[1][slot // block_size, 1, slot % block_size] = v[i]
    assert all(torch.equal(a, b) for a, b in zip(store.tensors, before, strict=True))


def test_a20_slot_minus_one_is_never_written_through() -> None:
    store = one_layer(5, 16, fill=0.0)
    store.tensors[0][4, :, 15] = 7.0
    k = torch.ones(128, 1, 8)
    slots = torch.cat([torch.arange(64), torch.full((64,), -1)])
    store.write(0, k, 2 * k, slots)
    assert (store.tensors[0][4, :, 15] == 7).all()
    assert (store.keys(0)[:4] == 1).all()
    assert (store.values(0)[:4] == 2).all()
    assert not store.tensors[0][4, :, :15].any()


def test_a20_a_step_of_padding_only_changes_nothing() -> None:
    store = one_layer(2, 4)
    store.tensors[0][0, 0, 0] = 3.0
    before = store.tensors[0].clone()
    store.write(0, torch.ones(6, 1, 8), torch.ones(6, 1, 8), torch.full((6,), -1))
    store.write(0, torch.ones(0, 1, 8), torch.ones(0, 1, 8), torch.zeros(0, dtype=torch.int64))
    assert torch.equal(before.nan_to_num(9), store.tensors[0].nan_to_num(9))


def test_write_and_copy_never_look_at_the_data() -> None:
    """On the meta device a look raises; on a GPU it would make the host wait, and no graph could be captured."""
    store = one_layer(5, 16, device="meta")
    k = torch.empty(7, 1, 8, device="meta")
    with pytest.raises(RuntimeError):
        k[0].any().item()
    store.write(0, k, k, torch.empty(7, dtype=torch.int64, device="meta"))
    store.copy_blocks([(0, 1), (1, 2)])


@pytest.mark.parametrize("slot", [8, -2])
def test_slots_that_do_not_exist_are_refused(slot: int) -> None:
    store = one_layer(2, 4, fill=0.0)
    with pytest.raises(ValueError, match="slot_mapping"):
        store.write(0, torch.ones(2, 1, 8), torch.ones(2, 1, 8), torch.tensor([0, slot]))
    assert not store.tensors[0].any()


def test_gather_gives_contiguous_arrays_and_refuses_short_rows() -> None:
    batch = Batch([(1, 13), (1, 7), (1, 0)])
    for row, n, (k, v) in zip(batch.rows, batch.lens.tolist(), batch.kv, strict=True):
        got = batch.store.gather(0, batch.table[row], n)
        assert torch.equal(got[0], k)
        assert torch.equal(got[1], v)
        assert all(x.is_contiguous() for x in got)
    with pytest.raises(ValueError, match="block_table_row"):
        batch.store.gather(0, batch.table[batch.rows[1]], 9)
    with pytest.raises(ValueError, match="seq_len"):
        batch.store.gather(0, torch.tensor([0]), 5)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=8))
def test_a11_copies_equal_one_by_one_in_order(pairs: list[tuple[int, int]]) -> None:
    store = KVStore(KVSpec(2, 1, 8, "fp32"), 6, 4)
    for tensor in store.tensors:
        tensor.normal_()
    right = [t.clone() for t in store.tensors]
    for source, destination in pairs:
        for tensor in right:
            tensor[destination] = tensor[source].clone()
    copies = resolve_copies(pairs)
    assert len({d for _, d in copies}) == len(copies)
    store.copy_blocks(pairs)
    assert all(torch.equal(a, b) for a, b in zip(store.tensors, right, strict=True))


def test_a11_copies_may_cross_tiers() -> None:
    """The list of case A11: out, reuse of the block, copy on write, in, out again."""
    pairs = [(("gpu", 5), ("host", 2)), (("host", 7), ("gpu", 5)), (("gpu", 5), ("gpu", 9))]
    pairs += [(("host", 2), ("gpu", 4)), (("gpu", 6), ("host", 2))]
    held = {block: block for pair in pairs for block in pair}
    one_by_one = dict(held)
    for source, destination in pairs:
        one_by_one[destination] = one_by_one[source]
    at_once = held | {destination: held[source] for source, destination in resolve_copies(pairs)}
    assert at_once == one_by_one


def test_a_copy_of_a_foreign_block_changes_nothing() -> None:
    store = one_layer(3, 2, fill=0.0)
    store.tensors[0][0] = 1.0
    for pairs in ([(0, 1), (0, 3)], [(0, 1), (-1, 2)]):
        with pytest.raises(ValueError, match="pairs"):
            store.copy_blocks(pairs)
    assert not store.tensors[0][1:].any()


# ------------------------------------------------------------------------------------------ the oracle


@pytest.mark.parametrize("size", [8, 40, 80])
@pytest.mark.parametrize("block_size", [1, 4, 16, 128])
def test_the_oracle_equals_a_flat_array(block_size: int, size: int) -> None:
    for n in sorted({0, 1, block_size - 1, block_size, block_size + 1}):
        batch = Batch([(n, n)], block_size, size=size)
        q, k, v = (x.double().transpose(0, 1) for x in (batch.query, *batch.kv[0]))
        flat = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1)
        np.testing.assert_allclose(batch.oracle()[0], flat.numpy(), atol=1e-12)
        batch.check()


def test_sequences_grown_in_turn_with_interleaved_blocks() -> None:
    """facts: 13 and 7 tokens, a token each in turn, for block sizes 1, 4 and 16."""
    for block_size in (1, 4, 16):
        store, free = one_layer(20, block_size, heads=2), iter(range(20))
        rows: list[list[int]] = [[], []]
        kv = [torch.randn(2, n, 2, 8) for n in (13, 7)]
        for position in range(13):
            for row, (k, v) in zip(rows, kv, strict=True):
                if position < len(k):
                    if position % block_size == 0:
                        row.append(next(free))
                    slot = slots_of(torch.tensor(row), torch.tensor([position]), block_size)
                    store.write(0, k[position, None], v[position, None], slot)
        for row, (k, v) in zip(rows, kv, strict=True):
            query = torch.randn(len(k), 4, 8)
            ours, _ = paged_attention_numpy(
                query.numpy(), store.keys(0).numpy(), store.values(0).numpy(), np.array(row), len(k)
            )
            q, k, v = (x.double().transpose(0, 1) for x in (query, k, v))
            flat = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1)
            np.testing.assert_allclose(ours, flat.numpy(), atol=1e-12)


# ------------------------------------------------------------------------------------------ torch against the oracle

LENGTHS = st.integers(0, 24).flatmap(lambda n: st.tuples(st.integers(0, n) if n else st.integers(0, 3), st.just(n)))


@settings(deadline=None, max_examples=40)
@given(
    seqs=st.lists(LENGTHS, min_size=1, max_size=5),
    block_size=st.sampled_from([1, 2, 4, 7, 16]),
    heads=st.sampled_from([(1, 1), (4, 2), (9, 3), (7, 1)]),
    size=st.sampled_from([8, 40, 80]),
    scale=st.sampled_from([None, 0.3]),
    window=st.sampled_from([None, 1, 3, 16, 100]),
    softcap=st.sampled_from([None, 1.5]),
    sinks=st.booleans(),
    tile=st.sampled_from([3, 256]),
    most=st.sampled_from([64, 1 << 19]),
)
def test_torch_equals_the_oracle(
    seqs: list[tuple[int, int]],
    block_size: int,
    heads: tuple[int, int],
    size: int,
    sinks: bool,
    tile: int,
    most: int,
    **options: Any,
) -> None:
    batch = Batch(seqs, block_size, *heads, size)
    if sinks:
        options["sinks"] = torch.linspace(-2, 2, heads[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "QUERY_TILE", tile)
        patch.setattr(attention, "MAX_ELEMENTS", most)
        batch.check(**options)


def test_a_prompt_in_chunks_equals_the_prompt_at_once() -> None:
    batch = Batch([(300, 300)], block_size=16)
    batch.check()
    whole, lse = batch.run()
    pools = batch.store.keys(0), batch.store.values(0)
    for begin, end in ((0, 1), (1, 280), (280, 300)):
        lens = torch.tensor([end])
        part = paged_attention(
            batch.query[begin:end], *pools, batch.table, torch.tensor([0, end - begin]), lens, rows=batch.rows
        )
        torch.testing.assert_close(part[0], whole[begin:end], atol=2e-6, rtol=0)
        torch.testing.assert_close(part[1], lse[begin:end], atol=2e-6, rtol=1e-6)


def test_blocks_moved_with_their_table_give_the_same_bits_and_without_do_not() -> None:
    batch = Batch([(1, 13), (3, 7), (5, 5)])
    output, _ = batch.run()
    to = torch.randperm(batch.store.num_blocks)
    moved = torch.empty_like(batch.store.tensors[0])
    moved[to] = batch.store.tensors[0]
    pools = moved[:, 0], moved[:, 1]
    assert not torch.equal(batch.run(pools=pools)[0], output)
    batch.table = torch.where(batch.table >= 0, to[batch.table.long()], -1).int()
    assert torch.equal(batch.run(pools=pools)[0], output)


def test_any_strides() -> None:
    """A slab across layers, heads before slots, and heads with guard values behind each (A22)."""
    batch = Batch([(1, 13), (3, 7), (5, 5)], size=40)
    right, _ = batch.run()
    plain = batch.store.tensors[0]
    slab = torch.full((len(plain), 3, *plain.shape[1:]), torch.nan)
    slab[:, 1] = plain
    swapped = plain.transpose(2, 3).contiguous()
    guarded = torch.full((*plain.shape[:-1], 43), torch.nan)
    guarded[..., :40] = plain
    for pools in (
        slab[:, 1].unbind(1),
        [half.transpose(1, 2) for half in swapped.unbind(1)],
        guarded[..., :40].unbind(1),
    ):
        assert torch.equal(batch.run(pools=pools)[0], right)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("size", [64, 80, 96, 112, 128, 160, 192, 256])
def test_a22_head_sizes(size: int, dtype: str) -> None:
    Batch([(1, 33), (20, 20), (3, 17)], 16, size=size, dtype=dtype).check(tolerance=1e-2)


@pytest.mark.parametrize("heads", [(9, 3), (28, 4), (71, 1), (32, 32)])
def test_ratios_of_query_to_kv_heads(heads: tuple[int, int]) -> None:
    Batch([(1, 9), (4, 6)], 4, *heads).check()


# ------------------------------------------------------------------------------------------ what is not there


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("halves", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("seqs", [[(1, 1), (1, 3)], [(1, 1), (3, 3)], [(1, 4090)]])
def test_a19_unwritten_slots_poison_nothing(seqs: list[tuple[int, int]], halves: tuple[int, ...], junk: float) -> None:
    batch = Batch(seqs, 16)
    pool = batch.store.tensors[0]
    unwritten = pool.isnan()
    pool[unwritten] = 0.0
    clean, clean_lse = batch.run()
    for half in halves:
        pool[:, half][unwritten[:, half]] = junk
    output, lse = batch.run()
    assert output.isfinite().all()
    assert torch.equal(output, clean)
    assert torch.equal(lse, clean_lse)
    batch.check()


def test_a20_padding_rows_with_stale_tables_change_nothing() -> None:
    """A captured batch is padded: length 0, and the row still names blocks of a live sequence."""
    batch = Batch([(1, 13), (1, 7)])
    output, _ = batch.run()
    live = batch.rows.clone()
    batch.rows = torch.cat([live, live[:1], live[1:]])
    batch.cu, batch.lens = torch.arange(5), torch.cat([batch.lens, torch.tensor([0, 0])])
    batch.query = torch.cat([batch.query, torch.full_like(batch.query, math.nan)])
    padded, lse = batch.run()
    torch.testing.assert_close(padded[:2], output, atol=1e-6, rtol=0)
    assert not padded[2:].any()
    assert (lse[2:] == -math.inf).all()


def test_a20_entries_behind_the_sequence_are_never_read() -> None:
    """-1, or ids that do not exist, behind the last block."""
    batch = Batch([(1, 13), (2, 5)])
    output, _ = batch.run()
    batch.table[batch.table < 0] = 10**6
    assert torch.equal(batch.run()[0], output)


@pytest.mark.parametrize("queries", [1, 2])
def test_a21_empty_sequences(queries: int) -> None:
    lens = [0, 1, 16, 17, 0]
    batch = Batch([(min(queries, n) if n else queries, n) for n in lens], 16)
    for row in batch.rows[[0, 4]]:
        batch.table[row] = torch.tensor([9999, -7, 3])[: batch.table.shape[1]]
    output, lse = batch.run(sinks=torch.ones(4))
    empty = torch.zeros(len(output), dtype=torch.bool)
    empty[:queries] = empty[-queries:] = True
    assert not output[empty].any()
    assert (lse[empty] == -math.inf).all()
    assert output[~empty].isfinite().all()
    batch.check()


def test_an_empty_batch() -> None:
    store = one_layer(1, 4)
    nothing = torch.zeros(0, dtype=torch.int32)
    table = torch.full((1, 1), -1, dtype=torch.int32)
    output, lse = paged_attention(
        torch.zeros(0, 2, 8), store.keys(0), store.values(0), table, torch.zeros(1, dtype=torch.int32), nothing
    )
    assert output.shape == (0, 2, 8)
    assert lse.shape == (0, 2)


def test_blocks_behind_a_window_may_be_given_back() -> None:
    batch = Batch([(1, 13), (2, 9)])
    output, _ = batch.run(window=4)
    for row, gone in ((batch.rows[0], 2), (batch.rows[1], 1)):
        batch.store.tensors[0][batch.table[row, :gone].long()] = math.nan
        batch.table[row, :gone] = -1
    assert torch.equal(batch.run(window=4)[0], output)
    batch.check(window=4)
    with pytest.raises(ValueError, match="block_table"):
        batch.run(window=9)


# ------------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize("score", [-3e38, -6e4, 6e4])
def test_a23_a_lone_key_gives_its_value_whatever_its_score(score: float) -> None:
    """One valid key, the other sequence's three make the batch padded: all else is masked."""
    batch = Batch([(1, 1), (1, 3)], 16, heads=2, kv_heads=2)
    k, v = torch.zeros(1, 2, 8), batch.kv[0][1]
    k[..., 0], batch.query[0] = score, 0.0
    batch.query[0, :, 0] = 1.0
    batch.store.write(0, k, v, slots_of(batch.table[batch.rows[0]], torch.tensor([0]), 16))
    output, lse = batch.run(scale=1.0)
    assert torch.equal(output[0], v[0])
    torch.testing.assert_close(lse[0], torch.full((2,), score))


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a23_32768_equal_scores(dtype: str) -> None:
    n = 32_768
    store = one_layer(n // 16, 16, dtype=dtype, fill=1.0)
    table = torch.randperm(n // 16).int()[None]
    query = torch.ones(1, 1, 8, dtype=store.dtype)
    output, lse = paged_attention(query, store.keys(0), store.values(0), table, torch.tensor([0, 1]), torch.tensor([n]))
    assert (output == 1).all()
    assert lse.item() == pytest.approx(8**0.5 + math.log(n), rel=1e-5)


def test_a18_offsets_beyond_32_bits() -> None:
    """Blocks of 32,768 numbers: from id 65,536 on a 32-bit offset wraps.  Untouched memory costs nothing here."""
    block_size, heads, size = 16, 8, 128
    try:
        store = KVStore(KVSpec(1, heads, size, "bf16"), 65_538, block_size, fill=None)
    except RuntimeError:
        pytest.skip("no 4 GiB of addresses")
    k, v = torch.randn(2, 40, heads, size).bfloat16()
    query = torch.randn(3, 16, size).bfloat16()
    cu, lens = torch.tensor([0, 3]), torch.tensor([40])
    results = []
    for row in ([0, 1, 2], [65_535, 65_536, 65_537]):
        table = torch.tensor([row], dtype=torch.int32)
        slots = slots_of(table[0], torch.arange(40), block_size)
        assert int(slots.max()) * 2 * heads * size > 2**31 or row[0] == 0
        store.write(0, k, v, slots)
        assert torch.equal(store.gather(0, table[0], 40)[1], v)
        results.append(paged_attention(query, store.keys(0), store.values(0), table, cu, lens)[0])
        store.tensors[0][row] = 0.0
    assert torch.equal(*results)
    assert results[0].isfinite().all()


# ------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"query": torch.zeros(4, 3, 8)}, "query"),
        ({"query": torch.zeros(4, 4, 16)}, "query, keys, values"),
        ({"query": torch.zeros(5, 4, 8)}, "cu_seqlens"),
        ({"cu_seqlens": torch.tensor([0, 4])}, "cu_seqlens"),
        ({"seq_lens": torch.tensor([13, 2])}, "seq_lens"),
        ({"seq_lens": torch.tensor([21, 7])}, "seq_lens"),
        ({"seq_lens": torch.tensor([13, 12])}, "block_table"),
        ({"rows": torch.tensor([0])}, "rows"),
        ({"rows": torch.tensor([0, 9])}, "rows"),
        ({"window": 0}, "window"),
        ({"sinks": torch.zeros(3)}, "sinks"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], name: str) -> None:
    batch = Batch([(1, 13), (3, 7)])
    arguments: dict[str, Any] = {
        "query": batch.query,
        "keys": batch.store.keys(0),
        "values": batch.store.values(0),
        "block_table": batch.table,
        "cu_seqlens": batch.cu,
        "seq_lens": batch.lens,
        "rows": batch.rows,
    }
    with pytest.raises(ValueError, match=name):
        paged_attention(**(arguments | change))
