"""Chapter 14 without a GPU: sizes, harmless padding, merged products, moves; nothing changes an answer."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from engine_models import random_prompts, small_llama, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paged_kv.attend import KernelAttention
from paged_kv.engine import Engine
from paged_kv.fast_moves import FastMoves
from paged_kv.fused_layers import FusedLayers, decoder_layers, merge_siblings
from paged_kv.graphs import GraphRunner, idle_step
from paged_kv.hf_adapter import host
from paged_kv.host_pool import run_moves
from paged_kv.kv_store import KVStore
from paged_kv.runner import EagerRunner, Room
from paged_kv.sizing import KVSpec
from paged_kv.step_plan import Host
from paged_kv.step_sizes import StepSizes, ceiling, usual_sizes
from paged_kv.step_upload import StepShape, StepUpload


@pytest.fixture(scope="module")
def model() -> Any:
    return small_llama()


# ------------------------------------------------------------------------------------------------- sizes


@given(decodes=st.integers(0, 300), chunks=st.integers(0, 12), tokens=st.integers(0, 600), most=st.integers(1, 300))
def test_the_shape_chosen_holds_the_step_and_is_the_smallest(decodes: int, chunks: int, tokens: int, most: int) -> None:
    shape = StepShape(decodes, chunks, tokens if chunks else 0)
    sizes = usual_sizes(Room(2048, most, (most, 8)))
    found = sizes.fit(shape)
    holding = [
        s
        for s in sizes
        if bool(s.chunks) == bool(chunks)
        and s.decodes >= decodes
        and (s.tokens >= shape.tokens and s.chunks > chunks if chunks else True)
    ]
    if found is None:
        assert not holding
    else:
        assert found in holding
        assert found.num_tokens == min(s.num_tokens for s in holding)


def test_every_number_of_decodes_up_to_the_most_has_a_size_and_pads_little() -> None:
    sizes = usual_sizes(Room(2048, 256, (256, 8)))
    for decodes in range(1, 257):
        found = sizes.fit(StepShape(decodes, 0, 0))
        assert found is not None
        assert found.decodes - decodes < max(1, 8 if decodes <= 64 else 16)
    assert sizes.fit(StepShape(257, 0, 0)) is None
    assert sizes.fit(StepShape(3, 24, 100)) is None, "one sequence has to be left for padding"
    for tokens in range(1, 2049):
        found = sizes.fit(StepShape(3, 1, tokens))
        assert found is not None
        assert tokens <= 32 or found.tokens < tokens * (2 if tokens <= 256 else 1.5)


def test_ceiling_by_hand() -> None:
    assert [ceiling((1, 2, 4, 8), n) for n in (0, 1, 3, 8, 9)] == [1, 1, 4, 8, None]


def test_shapes_come_largest_first_and_once() -> None:
    shapes = list(usual_sizes(Room(2048, 100, (100, 8))))
    assert len(shapes) == len(set(shapes))
    assert shapes[0].num_tokens == max(shape.num_tokens for shape in shapes)


# ------------------------------------------------------------------------------------------------- padding

OPTIONS: dict[str, dict[str, Any]] = {
    "roomy": {"num_blocks": 200},
    "tiny pool": {"num_blocks": 30, "block_size": 4},
    "swap, ahead": {"num_blocks": 30, "block_size": 4, "host_blocks": 60, "ahead": True, "prefix_caching": False},
    "small budget, ahead": {"num_blocks": 200, "ahead": True, "token_budget": 16, "max_running": 8},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_padded_steps_give_the_same_tokens(name: str, model: Any) -> None:
    prompts = random_prompts(12)
    plain = Engine(model, **OPTIONS[name]).generate(prompts, 16, stop_tokens=())
    engine = Engine(model, runner=GraphRunner, **OPTIONS[name])
    assert tokens_of(engine.generate(prompts, 16, stop_tokens=())) == tokens_of(plain)
    kinds = engine.stats.step_kinds
    assert kinds["padded"] > 0, kinds
    engine.check()


class Spy:
    """Runs each plan in its exact and in its padded shape, over two stores, and compares."""

    def __init__(self, guest: Any, store: KVStore, room: Room) -> None:
        self.exact = EagerRunner(guest, store, room)
        self.padded = GraphRunner(host(guest.model, guest.store.num_blocks, guest.store.block_size), store, room)
        self.counts: Counter[str] = Counter()
        self.compared = 0

    def forward(self, plan: Any, sampled: Tensor) -> Any:
        logits, step = self.exact.forward(plan, sampled)
        other, _ = self.padded.forward(plan, sampled)
        torch.testing.assert_close(other, logits, rtol=1e-4, atol=1e-4)
        for mine, theirs in zip(self.exact.guest.store.tensors, self.padded.guest.store.tensors, strict=True):
            torch.testing.assert_close(theirs, mine, rtol=1e-4, atol=1e-4, equal_nan=True)
        self.compared += 1
        return logits, step


def test_padding_touches_no_slot_and_no_logit(model: Any) -> None:
    """Every byte of the store and every logit, step by step; unwritten slots stay NaN."""
    engine = Engine(model, num_blocks=60, block_size=4, runner=Spy)
    engine.generate(random_prompts(10, seed=1), 12, stop_tokens=())
    assert engine.runner.compared > 10  # type: ignore[attr-defined]


def test_a_padded_token_with_a_slot_would_be_seen(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail: give padding a slot, and it does."""
    from paged_kv import step_upload

    inner = step_upload.lay_out

    def careless(values: Any, real: int, room: int, out: Any, pad: int) -> None:
        inner(values, real, room, out, max(pad, 0))

    monkeypatch.setattr(step_upload, "lay_out", careless)
    engine = Engine(model, num_blocks=60, block_size=4, runner=Spy)
    with pytest.raises(AssertionError):
        engine.generate(random_prompts(10, seed=1), 12, stop_tokens=())


@pytest.mark.parametrize("shape", [StepShape(3, 0, 0), StepShape(2, 3, 10), StepShape(0, 2, 5)])
def test_an_idle_step_runs_and_writes_nothing(shape: StepShape, model: Any) -> None:
    guest = host(model, 8, 4)
    room = Room(32, 8, (8, 4))
    upload = StepUpload(room.max_tokens, room.max_seqs, room.table_shape, "cpu")
    runner = GraphRunner(guest, KVStore(KVSpec(2, 2, 32, "fp32"), 1, 4), room)
    with torch.inference_mode():
        logits = runner.run(idle_step(upload, shape), torch.zeros(8, dtype=torch.int64))
    assert logits.shape[0] == shape.num_seqs
    assert torch.isfinite(logits).all()
    assert all(tensor.isnan().all() for tensor in guest.store.tensors)


def test_the_kernels_see_padding_as_nothing(model: Any) -> None:
    """A padded mixed step through the Triton kernels, in the interpreter."""
    pytest.importorskip("triton")
    engine = Engine(model, num_blocks=40, block_size=4, max_running=4, token_budget=8, max_seq_len=48)
    prompts = random_prompts(3, longest=9, seed=2)
    plain = tokens_of(engine.generate(prompts, 3, stop_tokens=()))
    sizes = StepSizes((2, 4), (2, 4), (8,), 3)
    padded = Engine(
        model, num_blocks=40, block_size=4, max_running=4, token_budget=8, max_seq_len=48,
        runner=partial(with_kernels, sizes),
    )  # fmt: skip
    assert tokens_of(padded.generate(prompts, 3, stop_tokens=())) == plain
    assert padded.stats.step_kinds["padded"]


def with_kernels(sizes: StepSizes, guest: Any, store: KVStore, room: Room) -> GraphRunner:
    guest.attention = KernelAttention()
    return GraphRunner(guest, store, room, sizes=sizes)


# ------------------------------------------------------------------------------------------------- fused layers


def test_merged_products_are_the_same_and_the_model_stays_usable() -> None:
    model = small_llama(attention_bias=True)
    torch.manual_seed(1)
    for part in model.modules():
        if isinstance(part, torch.nn.Linear) and part.bias is not None:
            torch.nn.init.normal_(part.bias)
    ids = torch.tensor([random_prompts(1, seed=3)[0]])
    with torch.inference_mode():
        before = model(ids).logits
        merged = merge_siblings(model)
        assert len(merged) == 2 * 2
        torch.testing.assert_close(model(ids).logits, before, rtol=1e-4, atol=1e-5)
        layer, x = model.model.layers[0], torch.randn(1, 3, 128)
        alone = torch.nn.functional.linear(x, layer.mlp.up_proj.weight)
        torch.testing.assert_close(layer.mlp.up_proj(x), alone)  # its sibling was not asked before
        assert merge_siblings(model) == [], "merging twice changes nothing"
        for one in merged:
            one.part_again()
        torch.testing.assert_close(model(ids).logits, before, rtol=1e-4, atol=1e-5)


def test_merging_takes_no_more_memory_and_keeps_the_names() -> None:
    model = small_llama()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    (attention, mlp, *_) = merge_siblings(model)
    assert attention.parts[1].weight.data_ptr() == attention.weight[128:].data_ptr()
    assert [len(attention.parts), len(mlp.parts)] == [3, 2]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_layers_that_would_answer_otherwise_are_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that miscompiles is found by the check, and all is undone."""
    model = small_llama()
    guest = host(model, 8, 4)

    def wrong(layer: Any) -> Any:
        return lambda *given, **options: layer.forward(*given, **options) * 1.5

    monkeypatch.setattr("paged_kv.fused_layers.compiled_call", wrong)
    fused = FusedLayers(guest)
    assert fused.moved is None
    assert not fused.calls
    assert all("forward" not in vars(part) for part in model.modules())
    monkeypatch.setattr("paged_kv.fused_layers.compiled_call", lambda layer: layer.forward)
    assert FusedLayers(guest).moved is not None


def test_layers_that_do_not_compile_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_llama()
    guest = host(model, 8, 4)

    def broken(layer: Any) -> Any:
        def call(*given: Any, **options: Any) -> Any:
            raise TypeError("no such thing")

        return call

    monkeypatch.setattr("paged_kv.fused_layers.compiled_call", broken)
    assert FusedLayers(guest).moved is None
    ids = torch.tensor([[1, 2, 3]])
    assert torch.isfinite(model(ids).logits).all()


def test_decoder_layers_are_found() -> None:
    assert len(decoder_layers(small_llama())) == 2


# ------------------------------------------------------------------------------------------------- moves


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_fast_moves_equal_moves_one_by_one(data: st.DataObject) -> None:
    ends = st.one_of(st.integers(0, 5), st.integers(0, 5).map(Host))
    moves = data.draw(st.lists(st.tuples(ends, ends), max_size=6))
    spec = KVSpec(2, 1, 8, "fp32")
    stores = [(KVStore(spec, 6, 2, fill=None), KVStore(spec, 6, 2, fill=None)) for _ in "ab"]
    for a, b in zip(*stores, strict=True):
        for mine, theirs in zip(a.tensors, b.tensors, strict=True):
            theirs.copy_(mine.normal_())
    FastMoves(*stores[0])(moves)
    run_moves(moves, *stores[1])
    for a, b in zip(*stores, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a.tensors, b.tensors, strict=True))
