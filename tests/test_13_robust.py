"""Chapter 13: bad requests, failing steps and crowds; the others finish with their right tokens."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from engine_cases import (  # noqa: E402
    Scripted,
    at_rest,
    byte_tokenizer,
    drain,
    reference,
    say,
    some_prompts,
    tiny_model,
)

from paged_kv import chooser  # noqa: E402
from paged_kv.engine import Engine  # noqa: E402
from paged_kv.engine_setup import Settings, make_store  # noqa: E402
from paged_kv.guest_check import GuestRefused, guest_spec  # noqa: E402
from paged_kv.preemption import Costs  # noqa: E402
from paged_kv.request import NeverFits  # noqa: E402
from paged_kv.runner import EagerRunner  # noqa: E402
from paged_kv.sampling import SamplingParams  # noqa: E402
from paged_kv.sampling_params import SamplingOptions  # noqa: E402

SWAP = Costs(1, 1e12, 1e-3)
CROWD = int(os.environ.get("PAGED_KV_CROWD", "1000"))  # requests of the mixed crowd; 10,000 take one or two minutes


@pytest.fixture(scope="module")
def tiny() -> Any:
    return tiny_model()


@pytest.fixture(scope="module")
def few(tiny: Any) -> tuple[list[list[int]], list[list[int]]]:
    prompts = some_prompts(12, longest=24)
    return prompts, [reference(tiny, prompt, 12).ids for prompt in prompts]


# ------------------------------------------------------------------------------------------ bad requests

BAD: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "empty": (([], 4), {}, "prompt: it is empty"),
    "text": (("hello", 4), {}, "prompt: token ids are needed"),
    "id too large": (([1, 101], 4), {}, "prompt: ids 1 to 101, 0 to 100 exist"),
    "id below 0": (([-1], 4), {}, "prompt: "),
    "no int": (([1.5], 4), {}, "prompt: "),
    "bool": (([True, 5], 4), {}, "prompt: "),
    "nothing": ((None, 4), {}, "prompt = None: a text is needed, or a list of token ids"),
    "one number": ((5, 4), {}, "prompt = 5: a text"),
    "dict": (({1: 2}, 4), {}, "prompt = {1: 2}: a text"),
    "iterator": ((iter([1, 2]), 4), {}, "prompt = <list_iterator"),
    "too long": (([1] * 100, 99), {}, "prompt: it grows to 198 tokens, a row has 128"),
    "no tokens asked for": (([1], 0), {}, "max_new_tokens = 0"),
    "never fits": (([1] * 100, 4), {}, "prompt: 25 blocks needed, 20 exist"),
    "too many samples": (([1], 4), {"n": 300}, "n, beam_width: 300 rows, max_running 256"),
    "no sample": (([1], 4), {"n": 0}, "n = 0"),
    "more beams than fit in memory": (([1], 4), {"beam_width": 10**15}, "n, beam_width: 1000000000000000 rows"),
    "penalty of beams": (([1], 4), {"beam_width": 2, "length_penalty": "x"}, "length_penalty = 'x': a number"),
    "penalty too large": (([1], 4), {"beam_width": 2, "length_penalty": 1e9}, "length_penalty = 1000000000.0: "),
    "penalty nan": (([1], 4), {"length_penalty": float("nan")}, "length_penalty = nan: "),
    "sampling": (([1], 4), {"sampling": {"temperature": 1}}, "sampling = {'temperature': 1}: SamplingOptions"),
    "other sampling": (([1], 4), {"sampling": SamplingParams(temperature=1)}, "sampling = SamplingParams"),
    "beams and samples": (([1], 4), {"n": 2, "beam_width": 2}, "n = 2: samples or beams"),
    "warm beams": (([1], 4), {"beam_width": 2, "sampling": SamplingOptions(temperature=1)}, "sampling: beams"),
    "penalised beams": (([1], 4), {"beam_width": 2, "sampling": SamplingOptions(presence_penalty=1)}, "sampling: b"),
    "stop without tokenizer": (([1], 4), {"stop": "x"}, "stop = 'x': a tokenizer"),
    "empty stop": (([1], 4), {"stop": [""]}, "stop = "),
    "no stop": (([1], 4), {"stop": None}, "stop = None: a text is needed, or a list of texts"),
    "stops once": (([1], 4), {"stop": (word for word in "ab")}, "stop = <generator"),
    "one stop token": (([1], 4), {"stop_tokens": 5}, "stop_tokens = 5: a list of token ids"),
    "stop token": (([1], 4), {"stop_tokens": [-4]}, "stop_tokens: "),
    "salt": (([1], 4), {"salt": 5}, "salt = 5"),
    "deadline": (([1], 4), {"deadline": float("nan")}, "deadline = nan"),
    "deadline in words": (([1], 4), {"deadline": "soon"}, "deadline = 'soon': a time is needed"),
    "priority": (([1], 4), {"priority": 0.5}, "priority = 0.5"),
    "id": (([1], 4), {"request_id": [1]}, "request_id = "),
    "id with a list in it": (([1], 4), {"request_id": (1, [2])}, r"request_id = \(1, \[2\]\): it must be hashable"),
    "early stopping": (([1], 4), {"beam_width": 2, "early_stopping": "soon"}, "early_stopping = 'soon'"),
    "twice": (([1], 4), {"request_id": "lives"}, "request_id = 'lives': still in use"),
}


def test_each_bad_request_gets_its_own_error_and_changes_nothing(tiny: Any, few: Any) -> None:
    prompts, references = few
    engine = Engine(tiny, num_blocks=20, block_size=4)
    engine.add_request(prompts[0], 12, request_id="lives", stop_tokens=())
    engine.step()
    for name, (given, options, said) in BAD.items():
        with pytest.raises(ValueError, match="^" + said):
            engine.add_request(*given, **options)
        assert list(engine.desk.jobs) == ["lives"], name
        assert engine.scheduler.ledger.submitted == 1, name
        engine.check()
    with pytest.raises(NeverFits):
        engine.add_request([1] * 100, 4)
    with pytest.raises(TypeError, match="temprature"):
        engine.add_request([1], 4, temprature=1)
    assert drain(engine)["lives"].texts[0].token_ids == references[0]
    at_rest(engine)


def test_generate_begins_none_if_one_cannot_be(tiny: Any) -> None:
    engine = Engine(tiny, num_blocks=20, block_size=4)
    for bad in ([[1], []], [[1], [500]]):
        with pytest.raises(ValueError, match="prompt"):
            engine.generate(bad, 4)
        assert engine.steps == 0
        at_rest(engine)
    with pytest.raises(ValueError, match="max_new_tokens: 3 numbers for 2 prompts"):
        engine.generate([[1], [2]], [1, 2, 3])
    with pytest.raises(NeverFits, match=r"^prompts\[1\]: prompt: 25 blocks needed, 20 exist"):
        engine.generate([[1], [1] * 100], 4)
    with pytest.raises(ValueError, match=r"^prompts\[0\]: max_new_tokens = None"):
        engine.generate([[1]], None)
    for odd in ("hello", b"hello", {"a": [1]}, {1}, None, 5):
        with pytest.raises(ValueError, match=r"^prompts = .*: a list of prompts is needed"):
            engine.generate(odd, 4)
    with pytest.raises(ValueError, match=r"^prompts\[0\]: prompt = 1: a text"):
        engine.generate([1, 2], 4)
    with pytest.raises(ValueError, match="stop"):
        next(engine.stream([1], stop="x"))
    at_rest(engine)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"memory": "1 GiB", "num_blocks": 5}, "memory, num_blocks: one of them"),
        ({"memory": "10 B"}, "memory: 10 B, one block takes"),
        ({"memory": -1}, "memory = -1"),
        ({"num_blocks": 0}, "num_blocks = 0"),
        ({"num_blocks": 5, "block_size": 0}, "block_size = 0"),
        ({"num_blocks": 5, "policy": "worst"}, "policy = 'worst': one of"),
        ({"num_blocks": 5, "max_seq_len": 4096}, "max_seq_len = 4096: the model was made for 128"),
        ({"num_blocks": 5, "token_budget": 0}, "token_budget = 0"),
        ({"num_blocks": 5, "max_running": 0}, "max_running = 0"),
        ({"num_blocks": 5, "max_running": 9, "token_budget": 8}, "max_running = 9: at most 8"),
        ({"num_blocks": 5, "host_blocks": -1}, "host_blocks = -1"),
        ({"num_blocks": 5, "host_blocks": 10**12}, "host_blocks: 1000000000000 blocks .* give a smaller"),
        ({"num_blocks": 2**63}, "memory: 9223372036854775808 blocks are"),
        ({"memory": "3 bananas"}, "memory: size = '3 bananas'"),
        ({"num_blocks": 5, "policy": ["cheapest"]}, "policy = "),
        ({"num_blocks": 5, "costs": 5}, "costs = 5"),
        ({"num_blocks": 5, "seed": None}, "seed = None"),
        ({"num_blocks": 5, "seed": -1}, "seed = -1"),
        ({"num_blocks": 5, "ahead": 2}, "ahead = 2: True or False is needed"),
        ({"num_blocks": 5, "chunked": "no"}, "chunked = 'no': True or False"),
        ({"num_blocks": 5, "prefix_caching": None}, "prefix_caching = None: True or False"),
        ({"num_blocks": 5, "batch_invariant": 1}, "batch_invariant = 1: True or False"),
        ({"num_blocks": 5, "tokenizer": "gpt2"}, "tokenizer: str is not a fast one"),
    ],
)
def test_bad_settings_are_named(tiny: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match="^" + said):
        Engine(tiny, **options)


@pytest.mark.parametrize("model", [None, "gpt2"])
def test_what_is_no_model_is_named(model: Any) -> None:
    with pytest.raises(ValueError, match=f"^model = {model!r}: a loaded model of transformers is needed"):
        Engine(model, num_blocks=5)


def test_a_number_in_use_is_not_given_to_somebody_else(tiny: Any) -> None:
    """Who gives no id gets a free one, also where a user has chosen numbers."""
    engine = Engine(tiny, num_blocks=20, block_size=4)
    engine.add_request([1], 2, request_id=1)
    names = [engine.add_request([2], 2) for _ in range(3)]
    assert names == [2, 3, 4]
    assert set(drain(engine)) == {1, 2, 3, 4}
    at_rest(engine)


def test_a_break_out_of_run_loses_no_piece(tiny: Any, few: Any) -> None:
    prompts, references = few
    engine = Engine(tiny, num_blocks=40, block_size=4)
    for name in range(4):
        engine.add_request(prompts[name], 5, request_id=name, stop_tokens=())
    said: dict[Any, list[int]] = {name: [] for name in range(4)}
    while not engine.idle:
        for piece in engine.run():
            said[piece.request_id] += piece.token_ids
            break
    assert list(said.values()) == [ids[:5] for ids in references[:4]]
    at_rest(engine)


def test_generate_takes_prompts_from_an_iterator_and_numbers_of_numpy(tiny: Any, few: Any) -> None:
    prompts, references = few
    answers = Engine(tiny, num_blocks=40, block_size=4).generate(iter(prompts[:2]), np.int64(4), stop_tokens=())
    assert [answer.texts[0].token_ids for answer in answers] == [ids[:4] for ids in references[:2]]


def test_out_of_memory_at_start_gives_advice(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB")

    monkeypatch.setattr(torch, "empty", full)
    spec, advice = guest_spec(tiny), r"memory: 4000 blocks are .* are free on cpu; give a smaller memory="
    with pytest.raises(ValueError, match=advice):
        make_store(spec, Settings(num_blocks=4000), torch.device("cpu"))


def test_memory_in_words(tiny: Any) -> None:
    assert Engine(tiny, memory="64 KiB", block_size=4).manager.pool.num_blocks == 64 * 1024 // (2 * 2 * 2 * 8 * 4 * 4)


# ------------------------------------------------------------------------------------------ NaN


@pytest.mark.parametrize("ahead", [False, True])
def test_logits_that_are_no_numbers_end_their_request_alone(ahead: bool) -> None:
    model, tokenizer = tiny_model(vocab_size=258), byte_tokenizer()
    engine = Engine(model, tokenizer, num_blocks=60, block_size=4, ahead=ahead, runner=Scripted)
    prompt = "a common beginning of some length, "
    a, b = tokenizer("ab")["input_ids"]
    say(engine, "first", [-1])
    say(engine, "later", [a, b, -1])
    say(engine, "one of three", [a, b, a, a], [b, b, -1, a], [a] * 4)
    say(engine, "well", "fine")
    for name, n in (("first", 1), ("later", 1), ("one of three", 3), ("well", 1)):
        engine.add_request(prompt + name, 4, request_id=name, n=n, stop_tokens=())
    answers = drain(engine)
    bad = "error: the model's logits are not numbers"
    assert answers["first"].texts[0].finish_reason == bad
    assert answers["first"].texts[0].token_ids == []
    assert (answers["later"].text, answers["later"].texts[0].finish_reason) == ("ab", bad)
    assert [text.text for text in answers["one of three"].texts] == ["ab", "bb", "aa"]
    assert {text.finish_reason for text in answers["one of three"].texts} == {bad}
    assert (answers["well"].text, answers["well"].texts[0].finish_reason) == ("fine", "length")
    at_rest(engine)
    say(engine, "again", "ok")  # what those wrote is not found again
    hits = engine.stats.hit_tokens
    engine.add_request(prompt + "first", 2, request_id="again", stop_tokens=())
    assert drain(engine)["again"].text == "ok"
    assert engine.stats.hit_tokens == hits + 32  # what "well" has written, no more
    at_rest(engine)


def test_beams_of_nan_end_with_an_error(tiny: Any) -> None:
    engine = Engine(tiny, num_blocks=60, runner=Scripted, ahead=True)
    say(engine, "beams", *[[5, -1, 5, 5]] * 3)
    engine.add_request([1, 2, 3], 4, beam_width=3, request_id="beams", stop_tokens=())
    texts = drain(engine)["beams"].texts
    assert {text.finish_reason for text in texts} == {"error: the model's logits are not numbers"}
    at_rest(engine)


# ------------------------------------------------------------------------------------------ failing steps


class Flaky(EagerRunner):
    """Raises in the steps whose numbers are in `bad`, before or after the model has run."""

    bad: tuple[int, ...] = ()
    late = False
    error: type[BaseException] = RuntimeError
    number = 0

    def forward(self, plan: Any, sampled: Any) -> Any:
        self.number += 1
        if self.number in self.bad and not self.late:
            raise self.error("device")
        result = super().forward(plan, sampled)
        if self.number in self.bad:
            raise self.error("device")
        return result


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("swap", [False, True])
def test_a_failing_step_is_undone_and_the_next_goes_on(
    tiny: Any, few: Any, late: bool, ahead: bool, swap: bool
) -> None:
    prompts, references = few
    more: dict[str, Any] = {"host_blocks": 60, "costs": SWAP} if swap else {}
    engine = Engine(tiny, num_blocks=22, block_size=4, ahead=ahead, runner=Flaky, token_budget=40, **more)
    runner: Any = engine.runner
    runner.bad, runner.late, runner.error = (1, 2, 5, 9, 14, 15, 22, 30), late, (RuntimeError, KeyboardInterrupt)[swap]
    for i, prompt in enumerate(prompts[:6]):
        engine.add_request(prompt, 12, request_id=i, stop_tokens=())
    engine.add_request(prompts[6], 6, request_id="beams", beam_width=3, stop_tokens=())
    engine.add_request(prompts[6], 6, request_id="warm", n=3, sampling=SamplingOptions(temperature=1, seed=5))
    failures, answers, streamed = 0, {}, dict[Any, list[int]]()
    while not engine.idle:
        try:
            pieces = engine.step()
        except (RuntimeError, KeyboardInterrupt):
            failures += 1
            engine.check()
            assert not engine.pending
            continue
        for piece in pieces:
            if piece.index == 0:
                streamed.setdefault(piece.request_id, []).extend(piece.token_ids)
            if piece.answer is not None:
                answers[piece.request_id] = piece.answer
        engine.check()
    assert failures == 8
    for i in range(6):
        assert answers[i].texts[0].token_ids == references[i] == streamed[i]
    quiet = Engine(tiny, num_blocks=60)
    beams = quiet.generate([prompts[6]], 6, beam_width=3, stop_tokens=())[0]
    assert [text.token_ids for text in answers["beams"].texts] == [text.token_ids for text in beams.texts]
    warm = quiet.generate([prompts[6]], 6, n=3, sampling=SamplingOptions(temperature=1, seed=5))[0]
    assert [text.token_ids for text in answers["warm"].texts] == [text.token_ids for text in warm.texts]
    at_rest(engine)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_delivery_that_fails_is_undone_as_well(
    tiny: Any, few: Any, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, references = few
    engine, calls, real = Engine(tiny, num_blocks=22, block_size=4, ahead=ahead), iter(range(999)), chooser.Pending.read

    def read(pending: Any) -> Any:
        if next(calls) in (2, 3, 9):
            raise RuntimeError("no token came")
        return real(pending)

    monkeypatch.setattr(chooser.Pending, "read", read)
    for i, prompt in enumerate(prompts[:4]):
        engine.add_request(prompt, 12, request_id=i, stop_tokens=())
    answers, failures = {}, 0
    while not engine.idle:
        try:
            pieces = engine.step()
        except RuntimeError:
            failures += 1
            engine.check()
            continue
        answers |= {piece.request_id: piece.answer.texts[0].token_ids for piece in pieces if piece.answer}
    assert failures == 3
    assert answers == dict(enumerate(references[:4]))
    at_rest(engine)


def test_generate_gives_up_its_requests_when_the_model_fails(tiny: Any, few: Any) -> None:
    prompts, references = few
    engine = Engine(tiny, num_blocks=40, runner=Flaky)
    engine.add_request(prompts[0], 12, request_id="other", stop_tokens=())
    runner: Any = engine.runner
    runner.bad = (4,)
    with pytest.raises(RuntimeError, match="device"):
        engine.generate(prompts[1:4], 12, stop_tokens=())
    assert list(engine.desk.jobs) == ["other"]
    ids = [token for piece in engine.run() for token in piece.token_ids]
    assert ids == references[0]
    at_rest(engine)


def test_a_failing_tokenizer_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from paged_kv.answers import TextStream

    engine = Engine(tiny_model(vocab_size=258), byte_tokenizer(), num_blocks=60, runner=Scripted, ahead=True)
    say(engine, "bad", "abXd")
    say(engine, "good", "abcd")
    push = TextStream.push

    def fails(stream: Any, token: int) -> str:
        if stream.text == "ab" and token == engine.tokenizer("X")["input_ids"][0]:
            raise RuntimeError("no such piece")
        return push(stream, token)

    monkeypatch.setattr(TextStream, "push", fails)
    for name in ("bad", "good"):
        engine.add_request("x", 4, request_id=name, stop_tokens=())
    answers = drain(engine)
    assert answers["bad"].texts[0].finish_reason == "error: the tokenizer failed: no such piece"
    assert (answers["bad"].text, answers["good"].text) == ("ab", "abcd")
    at_rest(engine)


# ------------------------------------------------------------------------------------------ a crowd


class Poisoned(EagerRunner):
    """Logits are NaN where the newest token of the prompt or text is 2."""

    def forward(self, plan: Any, sampled: Any) -> Any:
        logits, step = super().forward(plan, sampled)
        last = step.batch.cu_seqlens[1:].long()[step.sample_at] - 1
        bad = (step.batch.input_ids[last] == 2) & (step.source[last] < 0)
        return logits.masked_fill(bad[:, None], torch.nan), step


def spoiled(dice: random.Random, number: int, lives: Any) -> tuple[list[Any], dict[str, Any], str]:
    """A request that is refused, and what the error says."""
    return dice.choice(
        [
            ([], {}, "prompt: it is empty"),
            ([5, 101 + number], {}, "prompt: ids"),
            ([5] * 126, {}, "prompt: "),
            ([5] * 90, {"n": 2}, "prompt: 24 blocks needed, 16 exist"),
            ([5], {"request_id": lives}, f"request_id = {lives!r}: still in use"),
            ([5], {"n": 99}, "n, beam_width"),
            ([5], {"stop": "x"}, "stop"),
        ]
    )


@pytest.mark.parametrize("seed", [0])
def test_a_crowd_with_aborts_a_tiny_pool_and_bad_input(seed: int) -> None:
    model = tiny_model(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    dice, texts = random.Random(seed), some_prompts(60, longest=20, seed=seed)
    references = {i: reference(model, text, 4).ids for i, text in enumerate(texts)}
    usual = [i for i, ids in references.items() if 2 not in ids]  # a 2 at the end, and a replay would be poisoned
    engine = Engine(
        model, num_blocks=16, block_size=4, max_running=12, token_budget=64, ahead=True, runner=Poisoned,
        host_blocks=6, costs=SWAP,
    )  # fmt: skip
    asked: dict[Any, tuple[int, int, str]] = {}
    reasons: dict[str, int] = {}
    refused = answered = made = most = 0
    while made < CROWD or not engine.idle:
        for _ in range(dice.randrange(3 if len(engine.desk.jobs) < 40 else 1)):
            if made >= CROWD:
                break
            made += 1
            if dice.random() < 0.1 and engine.desk.jobs:
                prompt, options, said = spoiled(dice, made, next(iter(engine.desk.jobs)))
                with pytest.raises(ValueError, match=f"^{said}"):
                    engine.add_request(prompt, 4, **options)
                refused += 1
                continue
            which, new, kind = (
                dice.choice(usual),
                dice.randint(1, 4),
                dice.choice(["plain"] * 5 + ["n", "beams", "nan"]),
            )
            options = {"n": {"n": 3}, "beams": {"beam_width": 3}}.get(kind, {})
            prompt = texts[which] + [2] * (kind == "nan")
            name = engine.add_request(prompt, new, priority=dice.randrange(3), stop_tokens=(), **options)
            asked[name] = (which, new, kind)
        if dice.random() < 0.1 and engine.desk.jobs:
            name = dice.choice(list(engine.desk.jobs))
            assert engine.abort(name) is not None
            del asked[name]
            reasons["aborted"] = reasons.get("aborted", 0) + 1
        for piece in engine.step():
            if piece.answer is None:
                continue
            answered += 1
            which, new, kind = asked.pop(piece.request_id)
            text = piece.answer.texts[0]
            reasons[text.finish_reason] = reasons.get(text.finish_reason, 0) + 1
            if kind == "nan":
                assert text.finish_reason.startswith("error")
            elif kind != "beams":
                assert text.finish_reason in ("length", "out_of_blocks"), (kind, new, references[which], piece.answer)
                assert text.token_ids == references[which][: len(text.token_ids)]
                assert len(text.token_ids) == new or text.finish_reason == "out_of_blocks"
        most = max(most, len(engine.desk.jobs))
        if made % 100 == 0:
            engine.check()
    print(f"{made} made, {refused} refused, {answered} answered, {reasons}, {engine.stats}")
    assert not asked
    assert min(reasons[kind] for kind in ("aborted", "length", "error: the model's logits are not numbers")) > 10
    assert refused > 0
    assert most < 60
    assert min(engine.stats.preemptions[kind] for kind in ("recompute", "swap")) > 2
    at_rest(engine)


def test_the_engine_needs_no_gpu() -> None:
    assert not torch.cuda.is_initialized()
    assert issubclass(GuestRefused, ValueError)
