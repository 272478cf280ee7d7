"""Chapter 07: draws, parallel samples, beam search beside transformers' own, and what the store sees."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from paged_kv.beams import BeamSearch, place_children, run_beams  # noqa: E402
from paged_kv.block_manager import BlockManager  # noqa: E402
from paged_kv.block_pool import OutOfBlocks  # noqa: E402
from paged_kv.copy_on_write import blocks_held  # noqa: E402
from paged_kv.hf_adapter import PagedModel, host, load_guest, model_folder  # noqa: E402
from paged_kv.sampling import (  # noqa: E402
    SamplingParams,
    decode,
    distribution,
    parallel_sample,
    prefill,
    sample,
)
from paged_kv.sizing import blocks_for  # noqa: E402

BLOCKS, STOP = 120, tuple(range(2, 61, 6))
# 5.24 would like another name for it, which 5.17 does not know
pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
QUESTIONS = (
    "What is the capital of France?",
    "Is fire hot? Answer yes or no.",
    "Name a colour.",
    "Say hello.",
    "What is 2 + 3? Answer with a number.",
)


@pytest.fixture(scope="module")
def tiny() -> Any:
    """Two layers of random weights, spread widely so that scores are seldom close."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return host(transformers.LlamaForCausalLM(config).eval(), BLOCKS, 4)


@pytest.fixture(scope="module")
def real() -> Any:
    try:
        model_folder()
    except FileNotFoundError:
        pytest.skip("the converted model is missing: make model")
    model, tokenizer = load_guest()
    return host(model, BLOCKS, 16), tokenizer


def chat(tokenizer: Any, text: str) -> list[int]:
    """A chat without the system prompt that the model's own template puts in front: it is three times as long."""
    form = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    return tokenizer(form, add_special_tokens=False)["input_ids"]


def manager_for(guest: PagedModel, max_seqs: int = 32) -> BlockManager:
    return BlockManager(guest.store.num_blocks, guest.store.block_size, max_seqs, 128)


def by_transformers(model: Any, prompt: list[int], width: int, new: int, stop: Any, **options: Any) -> Any:
    """(ids, score) of the texts of transformers' own beam search, cut behind the stop token."""
    ids = torch.tensor([prompt])
    result = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=width,
        do_sample=False,
        max_new_tokens=new,
        num_return_sequences=width,
        eos_token_id=list(stop) or None,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    found = []
    for text, score in zip(result.sequences.tolist(), result.sequences_scores.tolist(), strict=True):
        text = text[len(prompt) :]
        ends = [text.index(token) for token in stop if token in text]
        found.append((text[: min(ends) + 1] if ends else text, score))
    return found


def agree(search: BeamSearch, reference: Any) -> None:
    assert [one.ids for one in search.finished] == [text for text, _ in reference]
    assert [one.score for one in search.finished] == pytest.approx([score for _, score in reference], abs=1e-4)


class TestSampling:
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("temperature", -0.1),
            ("top_k", -1),
            ("top_p", 0.0),
            ("top_p", 1.1),
            ("seed", -1),
            ("top_k", 2.5),
            ("seed", 1.5),
            ("temperature", True),
            ("top_p", True),
            ("temperature", float("nan")),
            ("temperature", 1e-39),
            ("top_p", 1e-46),
        ],
    )
    def test_bad_parameters_are_named(self, name, value):
        with pytest.raises(ValueError, match=f"{name} = {value}"):
            SamplingParams(**{name: value})

    @pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
    @pytest.mark.parametrize("top_k", [0, 1, 5, 1000])
    @pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 1.0])
    def test_distribution_is_that_of_transformers(self, temperature, top_k, top_p):
        from transformers.generation import logits_process as theirs

        logits = torch.randn(6, 200, generator=torch.Generator().manual_seed(1)) * 3
        scores = theirs.TemperatureLogitsWarper(temperature)(None, logits)
        scores = theirs.TopKLogitsWarper(top_k)(None, scores) if top_k else scores
        scores = theirs.TopPLogitsWarper(top_p)(None, scores) if top_p < 1 else scores
        probs, ids = distribution(logits, [SamplingParams(temperature, top_k, top_p)] * 6)
        found = torch.zeros_like(probs).scatter(1, ids, probs)
        assert torch.equal(found > 0, scores.softmax(-1) > 0)
        torch.testing.assert_close(found, scores.softmax(-1))

    def test_rows_with_different_parameters_do_not_mix(self):
        logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(2))
        params = [
            SamplingParams(0.5, seed=1),
            SamplingParams(top_k=3, seed=2),
            SamplingParams(top_p=0.3, seed=3),
            SamplingParams(0),
        ]
        together = sample(logits, params, [0, 5, 2, 9])
        for i, one in enumerate(params):
            assert sample(logits[i : i + 1], [one], [[0, 5, 2, 9][i]]) == [together[i]]
        assert together[3] == int(logits[3].argmax())

    def test_frequencies(self):
        logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()[None]
        draws = sample(logits.expand(20000, -1), [SamplingParams(seed=4)] * 20000, range(20000))
        assert np.bincount(draws) / 20000 == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.012)

    def test_a_token_without_probability_is_never_drawn(self):
        logits = torch.tensor([[0.0, -torch.inf, 0.0, -torch.inf]])
        draws = sample(logits.expand(500, -1), [SamplingParams()] * 500, range(500))
        assert set(draws) == {0, 2}


def sampled_alone(model: Any, prompt: list[int], one: SamplingParams, new: int, stop: Any) -> list[int]:
    """One sample by transformers' own cache."""
    output: list[int] = []
    ids, cache = torch.tensor([prompt]), None
    with torch.inference_mode():
        while len(output) < new and not (output and output[-1] in stop):
            result = model(ids, past_key_values=cache, use_cache=True)
            output += sample(result.logits[:, -1], [one], [len(output)])
            ids, cache = torch.tensor([output[-1:]]), result.past_key_values
    return output


class TestParallelSampling:
    @pytest.mark.parametrize("length", [6, 8, 9])
    def test_equals_independent_runs_and_stores_the_prompt_once(self, tiny, length):
        prompt = list(range(5, 5 + length))
        params = [SamplingParams(1.5, seed=seed) for seed in range(4)]
        manager = manager_for(tiny)
        held = []
        for state in parallel_sample(tiny, manager, prompt, params, 14, STOP):
            manager.check()
            held.append(len(blocks_held(manager, list(state.running.values()))))
            if len(state.running) == 4:
                own = sum(blocks_for(len(prompt) + len(ids) - 1, 4) - length // 4 for ids in state.output)
                assert held[-1] <= length // 4 + own
        assert held[0] == blocks_for(length, 4)
        assert manager.pool.num_free == BLOCKS
        assert state.output == [sampled_alone(tiny.model, prompt, one, 14, STOP) for one in params]
        assert len({len(ids) for ids in state.output}) > 1  # some finish early

    def test_the_real_model(self, real):
        guest, tokenizer = real
        prompt = tokenizer("My favourite place in the whole city is a small bakery, because")["input_ids"]
        params = [SamplingParams(0.9, top_p=0.95, seed=seed) for seed in range(4)]
        *_, state = parallel_sample(guest, manager_for(guest), prompt, params, 6)
        assert state.output == [sampled_alone(guest.model, prompt, one, 6, ()) for one in params]

    def test_out_of_blocks_gives_everything_back(self, tiny):
        manager = BlockManager(4, 4, 8, 64)
        with pytest.raises(OutOfBlocks):
            list(parallel_sample(tiny, manager, [1, 2, 3, 4, 5], [SamplingParams(seed=i) for i in range(4)], 20))
        assert manager.pool.num_free == 4
        manager.check()

    def test_leaving_the_loop_gives_everything_back(self, tiny):
        manager = manager_for(tiny)
        steps = parallel_sample(tiny, manager, [1, 2, 3], [SamplingParams()] * 3, 20)
        next(steps)
        next(steps)
        steps.close()
        assert manager.pool.num_free == BLOCKS

    def test_bad_input(self, tiny):
        manager = BlockManager(8, 4, 2, 64)
        with pytest.raises(ValueError, match="prompts: one is empty"):
            prefill(tiny, manager, [[1], []])
        with pytest.raises(ValueError, match="max_seqs"):
            prefill(tiny, manager, [[1], [2], [3]])
        with pytest.raises(OutOfBlocks):
            prefill(tiny, manager, [[1] * 20, [2] * 20])
        with pytest.raises(ValueError, match="params"):
            list(parallel_sample(tiny, manager, [1], [], 5))
        with pytest.raises(ValueError, match="rows are needed"):
            list(parallel_sample(tiny, manager, [1], [SamplingParams()] * 3, 5))
        with pytest.raises(ValueError, match="searches: 1 for 2"):
            next(run_beams(tiny, manager, [[1], [2]], [BeamSearch(2, 4)]))
        assert manager.pool.num_free == 8
        manager.check()

    def test_decode_changes_nothing_when_blocks_are_short(self, tiny):
        manager = BlockManager(2, 4, 2, 64)
        rows, _ = prefill(tiny, manager, [[1, 2, 3, 4, 5, 6, 7, 8]])
        before = [tensor.clone() for tensor in tiny.store.tensors]
        with pytest.raises(OutOfBlocks):
            decode(tiny, manager, rows, [9])
        assert manager.tables.seq_lens[rows].tolist() == [8]
        for old, new in zip(before, tiny.store.tensors, strict=True):
            torch.testing.assert_close(old, new, equal_nan=True, rtol=0, atol=0)


class TestBeamSearch:
    def test_first_step_counts_the_one_text_once(self):
        search = BeamSearch(3, 5)
        logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log().expand(3, -1)
        assert search.advance(logits) == [0, 0, 0]
        assert search.texts == [[0], [1], [2]]

    @pytest.mark.parametrize("argument", ["num_beams", "max_new_tokens"])
    def test_bad_input(self, argument):
        with pytest.raises(ValueError, match=argument):
            BeamSearch(**{"num_beams": 2, "max_new_tokens": 2, argument: 0})

    def test_place_children(self):
        assert place_children([10, 11, 12], [0, 1, 2]) == [10, 11, 12]
        assert place_children([10, 11, 12], [2, 1, 0]) == [12, 11, 10]
        assert place_children([10, 11, 12], [1, 1, 1]) == [11, 10, 12]
        assert place_children([10, 11, 12, 13], [2, 2, 0, 2]) == [12, 11, 10, 13]

    @pytest.mark.parametrize("width", [1, 2, 4, 6])
    @pytest.mark.parametrize("stopping", [False, True, "never"])
    @pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 2.0])
    def test_equals_transformers_on_a_small_model(self, tiny, width, stopping, penalty):
        if width == 1:
            stopping, penalty = False, 1.0  # transformers takes width 1 for greedy decoding
        prompts = [[5, 9, 33, 2], [40, 41, 42, 43, 44, 45, 46], [1, 2, 3, 4, 5]]
        options = {"length_penalty": penalty, "early_stopping": stopping}
        searches = [BeamSearch(width, 12, STOP, **options) for _ in prompts]
        manager = manager_for(tiny)
        for groups in run_beams(tiny, manager, prompts, searches):
            manager.check()
            for i, rows in groups.items():
                assert len(set(rows)) == width
                lens = manager.tables.seq_lens[rows].tolist()
                assert lens == [len(prompts[i]) + len(searches[i].texts[0]) - 1] * width
        assert manager.pool.num_free == BLOCKS
        for prompt, search in zip(prompts, searches, strict=True):
            if width == 1:
                greedy = tiny.model.generate(
                    torch.tensor([prompt]),
                    attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                    max_new_tokens=12,
                    do_sample=False,
                    eos_token_id=list(STOP),
                )
                assert search.finished[0].ids == greedy[0, len(prompt) :].tolist()
            else:
                agree(search, by_transformers(tiny.model, prompt, width, 12, STOP, **options))

    def test_small_models_do_finish_early(self, tiny):
        early = Counter()
        for stopping in (False, True):
            search = BeamSearch(4, 12, STOP, early_stopping=stopping)
            steps = len(list(run_beams(tiny, manager_for(tiny), [[5, 9, 33, 2]], [search])))
            early[stopping] = steps
            assert any(len(one.ids) < 12 for one in search.finished)
        assert early[True] <= early[False]

    @pytest.mark.parametrize(("width", "new"), [(2, 9), (4, 9), (6, 9)])
    def test_equals_transformers_on_the_real_model(self, real, width, new):
        guest, tokenizer = real
        stop = (tokenizer.eos_token_id,)
        prompts = [chat(tokenizer, text) for text in QUESTIONS]
        searches = [BeamSearch(width, new, stop) for _ in prompts]
        manager = manager_for(guest)
        list(run_beams(guest, manager, prompts, searches))
        assert manager.pool.num_free == BLOCKS
        for prompt, search in zip(prompts, searches, strict=True):
            agree(search, by_transformers(guest.model, prompt, width, new, stop))
        early = [search for search in searches if any(len(one.ids) < new for one in search.finished)]
        assert len(early) >= 2

    @pytest.mark.parametrize(("stopping", "penalty"), [(True, 1.0), ("never", -1.0)])
    def test_stopping_and_penalty_on_the_real_model(self, real, stopping, penalty):
        guest, tokenizer = real
        stop = (tokenizer.eos_token_id,)
        prompt = chat(tokenizer, QUESTIONS[4])
        search = BeamSearch(2, 10, stop, length_penalty=penalty, early_stopping=stopping)
        list(run_beams(guest, manager_for(guest), [prompt], [search]))
        options = {"length_penalty": penalty, "early_stopping": stopping}
        agree(search, by_transformers(guest.model, prompt, 2, 10, stop, **options))

    def test_out_of_blocks_gives_everything_back(self, tiny):
        manager = BlockManager(8, 4, 8, 64)
        searches = [BeamSearch(3, 20), BeamSearch(3, 20)]
        with pytest.raises(OutOfBlocks):
            list(run_beams(tiny, manager, [[1, 2, 3, 4, 5], [7, 8, 9]], searches))
        assert manager.pool.num_free == 8
        manager.check()


class TestWhatTheStoreSees:
    """By bytes: no full block is copied, no K/V is moved but into copies, only new tokens are written."""

    @pytest.mark.parametrize("length", [6, 8])
    @pytest.mark.parametrize("width", [2, 4, 6])
    def test_bytes_that_change(self, tiny, width, length):
        manager = manager_for(tiny)
        store, size = tiny.store, 4
        notes: Counter[str] = Counter()

        def copy_blocks(pairs):
            before = [tensor.clone() for tensor in store.tensors]
            type(store).copy_blocks(store, pairs)
            targets = [destination for _, destination in pairs]
            for old, new in zip(before, store.tensors, strict=True):
                same = (old == new) | (old.isnan() & new.isnan())
                touched = (~same).flatten(1).any(1).nonzero().flatten().tolist()
                assert set(touched) <= set(targets)
            for _, destination in pairs:
                holders = np.flatnonzero((manager.tables.table == destination).any(1))
                assert len(holders) == 1
                filled = int(manager.tables.seq_lens[holders[0]] - 1) % size
                assert filled, "a full block was copied"
                notes["copied"] += 1

        def write(layer, k, v, slots):
            notes["written"] += len(slots)
            assert (slots >= 0).all()
            assert len(set(slots.tolist())) == len(slots)
            held = manager.pool.ref_count[(slots // size).tolist()]
            assert (held == 1).all(), "a shared block was written"
            type(store).write(store, layer, k, v, slots)

        store.copy_blocks, store.write = copy_blocks, write
        try:
            computed, prompt = length, list(range(20, 20 + length))
            for groups in run_beams(tiny, manager, [prompt], [BeamSearch(width, 14)]):
                computed += sum(len(rows) for rows in groups.values())
        finally:
            del store.copy_blocks, store.write
        assert notes["written"] == 2 * computed  # two layers
        assert 0 < notes["copied"] < computed
