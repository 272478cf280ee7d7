"""Chapter 13 on a CPU: attention by whole blocks, and products from packed weights."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from paged_kv.block_manager import BlockManager
from paged_kv.cpu_attention import CpuAttention, like_lengths, plan_decodes
from paged_kv.engine import Engine
from paged_kv.guest_attention import write_and_attend
from paged_kv.kv_store import KVStore
from paged_kv.packed_batch import PackedBatch, pack
from paged_kv.packed_products import PackedProduct, PackedProducts
from paged_kv.runner import EagerRunner
from paged_kv.sizing import KVSpec

OPTIONS = {"scale": None, "window": None, "softcap": None, "sinks": None}


def case(
    lengths: list[int], news: list[int], block_size: int, dtype: str = "fp32"
) -> tuple[list[KVStore], PackedBatch]:
    """Two stores that hold the same tokens, NaN everywhere else, and a batch of `news` tokens behind them."""
    stores = [KVStore(KVSpec(1, 2, 8, dtype), 96, block_size) for _ in "ab"]
    manager = BlockManager(96, block_size, 16, 200)
    rows = [manager.add(n) for n in lengths]
    held = [row for row, n in zip(rows, lengths, strict=True) if n]
    if held:
        before = pack(manager.tables, held, [[0] * n for n in lengths if n])
        kv = torch.randn(sum(lengths), 2, 8, generator=torch.Generator().manual_seed(1))
        for store in stores:
            store.write(0, kv, kv + 1, before.slot_mapping)
    manager.append(rows, np.array(news))
    return stores, pack(manager.tables, rows, [[0] * n for n in news])


def both(
    stores: list[KVStore], batch: PackedBatch, heads: int = 6, **options: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the quick attention and the plain one return, and the same slots written."""
    rng, tokens = torch.Generator().manual_seed(2), len(batch.positions)
    q, k, v = (torch.randn(tokens, n, 8, generator=rng).to(stores[0].dtype) for n in (heads, 2, 2))
    given_ = {**OPTIONS, **options}
    found = [
        attention(store, 0, q, k, v, batch, **given_)
        for attention, store in zip((CpuAttention(), write_and_attend), stores, strict=True)
    ]
    written = [store.tensors[0].nan_to_num() for store in stores]
    assert torch.equal(*written)
    return found[0], found[1]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=9),
    st.lists(st.integers(1, 9), max_size=3),
    st.sampled_from([1, 4, 16]),
    st.sampled_from([None, 1, 5, 33]),
)
def test_equals_the_plain_attention(decodes: list[int], chunks: list[int], block_size: int, window: int | None) -> None:
    lengths, news = decodes + [7] * len(chunks), [1] * len(decodes) + chunks
    if sum(-(-(n + new) // block_size) for n, new in zip(lengths, news, strict=True)) > 96:
        return
    one, two = both(*case(lengths, news, block_size), window=window)
    torch.testing.assert_close(one, two, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("options", [{"softcap": 3.0}, {"sinks": torch.arange(6.0)}, {"scale": 0.3}, {"window": 4}])
def test_options(options: dict[str, object]) -> None:
    one, two = both(*case([5, 40, 0, 17], [1, 1, 1, 6], 4), **options)
    torch.testing.assert_close(one, two, atol=2e-6, rtol=1e-5)


def test_sixteen_bits() -> None:
    one, two = both(*case([5, 40, 17], [1, 1, 6], 4, "bf16"))
    assert one.dtype == torch.bfloat16
    torch.testing.assert_close(one, two, atol=2e-2, rtol=2e-2)


def test_blocks_that_left_the_window_are_not_read() -> None:
    stores, batch = case([40, 21], [1, 1], 4)
    batch.block_table[int(batch.rows[0]), :7] = -1  # 28 of 41 tokens; the window begins at 31
    one, two = both(stores, batch, window=10)
    torch.testing.assert_close(one, two, atol=2e-6, rtol=1e-5)
    with pytest.raises(ValueError, match="block_table: -1"):
        plan_decodes(batch, 2, 4, None)


@pytest.mark.parametrize(
    ("field", "value"), [("rows", -1), ("rows", 99), ("seq_lens", 10_000), ("slot_mapping", 10_000)]
)
def test_a_batch_that_points_nowhere_is_refused(field: str, value: int) -> None:
    stores, batch = case([5, 9], [1, 1], 4)
    getattr(batch, field)[1] = value
    before = stores[0].tensors[0].clone()
    q, k = torch.randn(2, 6, 8), torch.randn(2, 2, 8)
    with pytest.raises(ValueError, match=field):
        CpuAttention()(stores[0], 0, q, k, k, batch, **OPTIONS)
    assert torch.equal(stores[0].tensors[0].nan_to_num(), before.nan_to_num())


def test_a_window_below_one_is_refused() -> None:
    stores, batch = case([5, 9], [1, 1], 4)
    with pytest.raises(ValueError, match="window = 0"):
        both(stores, batch, window=0)


def test_a_skipped_token_is_not_written() -> None:
    stores, batch = case([5, 9], [1, 1], 4)
    batch.slot_mapping[1] = -1
    batch.seq_lens[1] = 0
    one, two = both(stores, batch)
    torch.testing.assert_close(one, two, atol=2e-6, rtol=1e-5)
    assert not one[1].any(), "a sequence that holds nothing is given zeros"


@given(st.lists(st.integers(1, 1000), max_size=40))
def test_like_lengths(counts: list[int]) -> None:
    groups = like_lengths(np.array(counts, np.int64))
    assert sorted(np.concatenate([np.empty(0, np.int64), *groups]).tolist()) == list(range(len(counts)))
    for group in groups:
        found = [counts[i] for i in group]
        assert found[0] == max(found)
        assert 2 * min(found) >= max(found)


def small(hidden: int = 512) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, vocab_size=600, max_position_embeddings=256, initializer_range=0.1,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_packed_products_are_the_products_and_notice_new_weights() -> None:
    layer, x = torch.nn.Linear(512, 640), torch.randn(2, 3, 512)
    packed = PackedProduct(layer)
    other = torch.nn.Linear(512, 640)
    for change in (
        lambda: None,
        lambda: layer.weight.mul_(2),
        lambda: layer.bias.add_(1),
        lambda: layer.weight.data.mul_(2),
        lambda: setattr(layer.weight, "data", torch.randn(640, 512)),
        lambda: setattr(layer, "weight", torch.nn.Parameter(torch.randn(640, 512))),
        lambda: layer.load_state_dict(other.state_dict()),
    ):
        with torch.no_grad():
            change()
            packed.renew()
            torch.testing.assert_close(packed(x), layer(x), atol=1e-4, rtol=1e-5)
    copy = packed.copy
    packed.renew()
    assert packed.copy is copy, "nothing changed, so nothing is copied"


def test_packed_products_survive_what_is_done_to_a_model() -> None:
    model = small()
    products, layer, x = PackedProducts(model), model.model.layers[0], torch.randn(2, 512)

    def right(part: torch.nn.Linear) -> None:
        plain = part.weight @ x[0] + (0 if part.bias is None else part.bias)
        with torch.inference_mode(), products.on(), products.on():
            torch.testing.assert_close(part(x)[0], plain, atol=1e-3, rtol=1e-4)
        assert "forward" not in vars(part)

    own = layer.self_attn
    own.o_proj.weight.data = own.o_proj.weight.data.t().contiguous()
    right(own.o_proj)
    own.o_proj.weight.data = own.o_proj.weight.data.t()  # the same memory, read otherwise
    right(own.o_proj)
    own.q_proj.bias = torch.nn.Parameter(torch.ones(own.q_proj.out_features))
    right(own.q_proj)
    own.q_proj.bias = None
    right(own.q_proj)
    model.model.layers[1].self_attn.k_proj = own.k_proj  # one layer in two places
    right(own.k_proj)
    model.bfloat16()
    with products.on():
        assert products.packed == []


def test_two_engines_in_two_threads_over_one_model() -> None:
    model = small()
    engines = [Engine(model, num_blocks=32) for _ in "ab"]
    want = [answer.texts[0].token_ids for answer in engines[0].generate([[3, 4, 5]] * 3, 12)]
    with ThreadPoolExecutor(2) as pool:
        for runs in pool.map(lambda engine: [engine.generate([[3, 4, 5]] * 3, 12) for _ in range(4)], engines):
            assert all([answer.texts[0].token_ids for answer in answers] == want for answers in runs)


@pytest.mark.parametrize("bias", [True, False])
def test_layers_of_one_input_are_one_product(bias: bool) -> None:
    layers = [torch.nn.Linear(512, size, bias=bias) for size in (512, 256, 640)]
    product, x, y = PackedProduct(*layers), torch.randn(2, 5, 512), torch.randn(3, 512)
    with torch.inference_mode():
        for _ in range(2):
            for layer, forward in zip(layers, product.forwards, strict=True):
                torch.testing.assert_close(forward(x), layer(x), atol=1e-4, rtol=1e-5)
            torch.testing.assert_close(product.forwards[1](y), layers[1](y), atol=1e-4, rtol=1e-5)
            for layer in layers:
                layer.weight.data.mul_(1.5)
            product.renew()


def test_what_is_packed_and_the_model_stays_its_own() -> None:
    model = small()
    products = PackedProducts(model)
    groups = {product.layers for product in products.packed}
    layer = model.model.layers[0]
    assert (layer.mlp.gate_proj, layer.mlp.up_proj) in groups
    own = layer.self_attn
    assert (own.q_proj, own.k_proj, own.v_proj) in groups
    assert all((part,) in groups for part in (own.o_proj, layer.mlp.down_proj, model.lm_head))
    assert PackedProducts(small(64)).packed == [], "too small to pay"
    stopped = False
    try:
        with products.on():
            assert "forward" in vars(model.lm_head)
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        stopped = True
    assert stopped
    assert not any("forward" in vars(part) for part in model.modules())
    assert not PackedProducts(small().bfloat16()).packed
    with torch.inference_mode():
        assert not PackedProducts(small()).packed, "such weights do not tell when they change"


def test_packed_or_not_the_same_answers_also_after_new_weights() -> None:
    model, prompts = small(), [[5, 6, 7], [9] * 20, [1]]
    one = Engine(model, num_blocks=64)
    two = Engine(model, num_blocks=64, runner=partial(EagerRunner, packed=False))
    for _ in range(2):
        said = [[answer.texts[0].token_ids for answer in engine.generate(prompts, 12)] for engine in (one, two)]
        assert said[0] == said[1]
        with torch.no_grad():
            for weight in model.parameters():
                weight.data.mul_(1.5)
        for engine in (one, two):
            assert engine.cache is not None
            engine.cache.reset()
