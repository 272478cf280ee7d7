"""Chapter 13: whatever the engine does with requests, their tokens are those of transformers alone."""

from __future__ import annotations

import gc
import os
import time
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import numpy as np  # noqa: E402
from engine_cases import (  # noqa: E402
    Reference,
    Scripted,
    Verdicts,
    at_rest,
    by_itself,
    byte_tokenizer,
    drain,
    reference,
    say,
    some_prompts,
    tiny_model,
)
from test_05_guest_model import ACCEPTED, REFUSED, build  # noqa: E402

from paged_kv.answers import TextStream, overlap  # noqa: E402
from paged_kv.engine import Engine  # noqa: E402
from paged_kv.guest_check import GuestRefused  # noqa: E402
from paged_kv.hf_adapter import load_guest, model_folder  # noqa: E402
from paged_kv.preemption import Costs  # noqa: E402
from paged_kv.sampling_params import SamplingOptions  # noqa: E402

SWAP = Costs(1, 1e12, 1e-3)  # moving is free, replaying is not: victims are swapped
SLOW = os.environ.get("PAGED_KV_SLOW")


# ------------------------------------------------------------------------------------------ families


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_family_is_served_as_it_would_answer_alone(name: str) -> None:
    model = build(*ACCEPTED[name])
    prompts = some_prompts(5, vocab=97, longest=30)
    engine = Engine(model, num_blocks=20, block_size=4, ahead=True, token_budget=24, max_seq_len=128)
    answers = engine.generate(prompts, 10, stop_tokens=())
    verdicts = Verdicts(engine.guest.report.noise)
    for prompt, answer in zip(prompts, answers, strict=True):
        verdicts.add(answer.texts[0].token_ids, reference(model, prompt, 10))
    verdicts.settle(name)
    assert engine.stats.preemptions["recompute"] > 0
    at_rest(engine)


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_is_refused_at_load_with_the_reason(name: str) -> None:
    kind, options, reason = REFUSED[name]
    with pytest.raises(GuestRefused, match=reason):
        Engine(build(kind, options), num_blocks=8)


# ------------------------------------------------------------------------------------------ equality

WAYS: dict[str, dict[str, Any]] = {
    "roomy": {"num_blocks": 200},
    "no cache": {"num_blocks": 200, "prefix_caching": False},
    "ahead": {"num_blocks": 200, "ahead": True},
    "chunked": {"num_blocks": 200, "token_budget": 12, "max_running": 6},
    "chunked ahead": {"num_blocks": 200, "token_budget": 7, "max_running": 7, "ahead": True},
    "whole prompts": {"num_blocks": 200, "token_budget": 64, "chunked": False, "max_running": 5},
    "recompute": {"num_blocks": 20, "block_size": 4},
    "recompute ahead": {"num_blocks": 20, "block_size": 4, "ahead": True, "prefix_caching": False},
    "swap": {"num_blocks": 20, "block_size": 4, "host_blocks": 90, "costs": SWAP},
    "swap ahead": {"num_blocks": 20, "block_size": 4, "host_blocks": 90, "costs": SWAP, "ahead": True},
    "everything": {
        **{"num_blocks": 20, "block_size": 4, "host_blocks": 12, "costs": SWAP, "ahead": True},
        **{"token_budget": 9, "max_running": 9, "policy": "last_arrived"},
    },
}


@pytest.fixture(scope="module")
def tiny() -> Any:
    return tiny_model()


@pytest.fixture(scope="module")
def expected(tiny: Any) -> tuple[list[list[int]], list[Any]]:
    prompts = some_prompts(18)
    return prompts, [reference(tiny, prompt, 20) for prompt in prompts]


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_serving_gives_the_same_tokens(tiny: Any, expected: Any, way: str) -> None:
    prompts, references = expected
    engine = Engine(tiny, **WAYS[way])
    answers = engine.generate(prompts, 20, stop_tokens=())
    verdicts = Verdicts(engine.guest.report.noise)
    for answer, theirs in zip(answers, references, strict=True):
        verdicts.add(answer.texts[0].token_ids, theirs)
    verdicts.settle(way)
    stats = engine.stats
    if "recompute" in way or "swap" in way:
        assert stats.preemptions[way.split()[0]] >= 10
    if way == "everything":
        assert stats.preemptions["swap"] > 0
        assert stats.preemptions["recompute"] > 0
    assert sum(answer.preemptions for answer in answers) == sum(
        count for kind, count in stats.preemptions.items() if kind in ("recompute", "swap")
    )
    assert (stats.hit_tokens > 0) == engine.settings.prefix_caching
    at_rest(engine)


@pytest.fixture(scope="module")
def real() -> Any:
    try:
        model_folder()
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    return load_guest()


SUBJECTS = ["tides", "bread", "bees", "rust", "glass", "owls", "salt", "maps", "rain", "clocks"]
FORMS = ["Why {}?", "What should a child know about {}?", "A poem on {}, please."]


def questions(count: int) -> list[str]:
    """Questions of mixed lengths, a third of them behind one common text."""
    rules = "You keep a small museum and answer visitors briefly, in plain words. "
    texts = [FORMS[i % 3].format(SUBJECTS[i // 3 % 10]) + " Please." * (i // 30) for i in range(count)]
    return [rules + text if i % 3 == 1 else text for i, text in enumerate(texts)]


REAL_WAYS: dict[str, dict[str, Any]] = {
    "roomy": {"num_blocks": 400, "block_size": 8, "ahead": True},
    "recompute": {"num_blocks": 70, "block_size": 1, "prefix_caching": False, "token_budget": 40},
    "swap": {"num_blocks": 70, "block_size": 1, "host_blocks": 400, "costs": SWAP},
}


def compare_real(real: Any, count: int, new: int, ways: dict[str, dict[str, Any]]) -> None:
    model, tokenizer = real
    prompts = [tokenizer(text)["input_ids"] for text in questions(count)]
    references = [reference(model, prompt, new) for prompt in prompts]
    for way, options in ways.items():
        engine = Engine(model, tokenizer, max_seq_len=512, **options)
        start = time.perf_counter()
        answers = engine.generate(prompts, new, stop_tokens=())
        verdicts = Verdicts(engine.guest.report.noise)
        for answer, theirs in zip(answers, references, strict=True):
            verdicts.add(answer.texts[0].token_ids, theirs)
        seconds = time.perf_counter() - start
        verdicts.settle(f"{way}, {count} prompts, {seconds:.0f} s, {engine.stats.preemptions}", count // 20)
        for kind in ("recompute", "swap"):
            assert way != kind or engine.stats.preemptions[kind] >= 10
        assert (engine.stats.hit_tokens > 0) == engine.settings.prefix_caching
        at_rest(engine)


@pytest.mark.xdist_group("smollm2")
def test_a_real_model_answers_20_prompts_as_it_would_alone(real: Any) -> None:
    compare_real(real, 20, 8, REAL_WAYS)


@pytest.mark.skipif(not SLOW, reason="half an hour: set PAGED_KV_SLOW=1")
@pytest.mark.xdist_group("smollm2")
def test_a_real_model_answers_200_prompts_as_it_would_alone(real: Any) -> None:
    pool = {"num_blocks": 120, "block_size": 8}
    ways = {
        "roomy": {"num_blocks": 4000},
        "chunked, no cache, ahead": {"token_budget": 64, "prefix_caching": False, "ahead": True, "num_blocks": 4000},
        "recompute": {**pool, "ahead": True},
        "swap": {**pool, "host_blocks": 2000, "costs": SWAP, "ahead": True},
    }
    compare_real(real, 200, 48, ways)


def test_a_first_difference_is_excused_within_the_noise_only() -> None:
    theirs, verdicts = Reference([5, 6, 7], [1.0, 3e-6, 1.0]), Verdicts(1e-6)
    assert verdicts.add([5, 6, 7], theirs) == "equal"
    assert verdicts.add([5, 9, 1], theirs) == "excused"
    verdicts.settle("so far", excuses=1)
    assert verdicts.add([4, 6, 7], theirs) == "different"
    assert verdicts.add([5, 6], theirs) == "different"
    with pytest.raises(AssertionError):
        verdicts.settle("in all", excuses=9)


# ------------------------------------------------------------------------------------------ sampling

WARM = SamplingOptions(temperature=0.9, top_p=0.95, seed=7)
COMPANY: dict[str, dict[str, Any]] = {
    "company": {"num_blocks": 200},
    "chunks": {"num_blocks": 200, "token_budget": 8, "max_running": 8, "ahead": True},
    "recompute": {"num_blocks": 20, "block_size": 4, "policy": "last_arrived"},
    "swap": {"num_blocks": 20, "block_size": 4, "host_blocks": 60, "costs": SWAP, "ahead": True},
}


@pytest.mark.parametrize(("way", "penalty"), [*((way, 1.0) for way in COMPANY), ("recompute", 1.3)])
def test_a_seed_gives_the_same_text_alone_and_in_any_company(tiny: Any, way: str, penalty: float) -> None:
    sampling, prompt = replace(WARM, repetition_penalty=penalty), list(range(20, 31))
    asked: dict[str, Any] = {"sampling": sampling, "n": 3, "stop_tokens": ()}
    alone = Engine(tiny, num_blocks=50).generate([prompt], 16, **asked)[0]
    engine = Engine(tiny, **COMPANY[way])
    for other in some_prompts(8, seed=1):
        engine.add_request(other, 14, sampling=SamplingOptions(temperature=1.3), stop_tokens=())
    engine.add_request(prompt, 16, request_id="mine", **asked)
    mine = drain(engine)["mine"]
    assert [text.token_ids for text in mine.texts] == [text.token_ids for text in alone.texts]
    assert len({tuple(text.token_ids) for text in mine.texts}) == 3
    if way in ("recompute", "swap"):
        assert mine.preemptions > 0
    at_rest(engine)


def test_samples_share_a_prompt_that_is_computed_once(tiny: Any) -> None:
    engine = Engine(tiny, num_blocks=60, prefix_caching=False)
    prompt = list(range(3, 43))
    answer = engine.generate([prompt], 5, n=4, sampling=WARM, stop_tokens=())[0]
    assert len(answer.texts) == 4
    assert engine.tokens_run == 40 + 4 * 4  # the first token of each comes with the prompt, the last is not run
    at_rest(engine)


TIGHT = {"num_blocks": 24, "block_size": 4, "policy": "last_arrived", "costs": SWAP}


@pytest.mark.parametrize(
    "options",
    [{"num_blocks": 100}, TIGHT, {**TIGHT, "ahead": True}, {**TIGHT, "ahead": True, "host_blocks": 80}],
)
def test_beams_equal_generate(tiny: Any, options: dict[str, Any]) -> None:
    prompts = some_prompts(5, longest=16, seed=3)
    engine = Engine(tiny, **options)
    for i, prompt in enumerate(prompts):  # beams and samples by turns
        engine.add_request(prompt, 10, beam_width=4, stop_tokens=[50], request_id=i)
        engine.add_request(prompt, 10, stop_tokens=(), request_id=-i - 1)
    answers = drain(engine)
    for i, prompt in enumerate(prompts):
        result = by_itself(tiny, prompt, 10, 50, num_beams=4, num_return_sequences=4, output_scores=True)
        theirs = [ids[len(prompt) :].tolist() for ids in result.sequences]
        ours = [text.token_ids + [0] * (len(theirs[0]) - len(text.token_ids)) for text in answers[i].texts]
        assert ours == theirs
        assert [text.score for text in answers[i].texts] == pytest.approx(result.sequences_scores.tolist(), abs=1e-4)
        assert all((text.finish_reason == "stop") == (text.token_ids[-1] == 50) for text in answers[i].texts)
        assert answers[-i - 1].texts[0].token_ids == reference(tiny, prompt, 10).ids
    if "block_size" in options:
        assert sum(answer.preemptions for answer in answers.values()) > 0
        assert sum(answers[i].preemptions for i in range(len(prompts))) > 0
    at_rest(engine)


def test_one_beam_is_the_greedy_text(tiny: Any) -> None:
    engine = Engine(tiny, num_blocks=20)
    text = engine.generate([[5, 6, 7]], 6, beam_width=1, stop_tokens=())[0].texts[0]
    assert text.token_ids == reference(tiny, [5, 6, 7], 6).ids
    assert text.finish_reason == "length"
    at_rest(engine)


def test_more_beams_than_tokens_in_the_vocabulary() -> None:
    model = tiny_model(vocab_size=5)
    engine = Engine(model, num_blocks=60, block_size=4)
    answer = engine.generate([[1, 2, 3]], 6, beam_width=7, stop_tokens=[4])[0]
    result = by_itself(model, [1, 2, 3], 6, 4, num_beams=7, num_return_sequences=1)
    ids = answer.texts[0].token_ids
    assert ids == result.sequences[0, 3 : 3 + len(ids)].tolist()
    assert len(answer.texts) == 7
    every = engine.generate([[1, 2, 3]], 6, beam_width=3, stop_tokens=[0, 1, 2, 3, 4])[0]  # no beam can go on
    assert {len(text.token_ids) for text in every.texts} == {1}
    at_rest(engine)


def test_logprobs_are_those_of_the_reference(tiny: Any) -> None:
    prompts = some_prompts(5, seed=5)
    engine = Engine(tiny, num_blocks=24, block_size=4, ahead=True)
    ids: list[Any] = []
    for i, prompt in enumerate(prompts):
        sampling = SamplingOptions(logprobs=(None, 0, 3)[i % 3])
        ids.append(engine.add_request(prompt, 8, sampling=sampling, stop_tokens=()))
    answers = drain(engine)
    for i, prompt in enumerate(prompts):
        text = answers[ids[i]].texts[0]
        with torch.inference_mode():
            logits = tiny(torch.tensor([prompt + text.token_ids]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        theirs = logits.log_softmax(-1)
        if i % 3 == 0:
            assert text.logprobs is None
            continue
        own = theirs.gather(1, torch.tensor(text.token_ids)[:, None])[:, 0]
        assert text.logprobs == pytest.approx(own.tolist(), abs=1e-4)
        assert (text.top_logprobs is None) == (i % 3 == 1)
        for place, top in enumerate(text.top_logprobs or ()):
            assert list(top.values()) == pytest.approx(theirs[place].topk(3).values.tolist(), abs=1e-4)
            assert text.token_ids[place] in top


def test_stop_tokens_end_a_sample_and_are_part_of_it(tiny: Any) -> None:
    prompt = some_prompts(1)[0]
    plain = reference(tiny, prompt, 20).ids
    stop = plain[6]
    first = plain.index(stop)
    for ahead in (False, True):
        engine = Engine(tiny, num_blocks=20, ahead=ahead)
        text = engine.generate([prompt], 20, stop_tokens=[stop, 7])[0].texts[0]
        assert text.token_ids == plain[: first + 1]
        assert text.finish_reason == "stop"
        at_rest(engine)
    tiny.generation_config.eos_token_id = stop
    try:
        assert Engine(tiny, num_blocks=20).generate([prompt], 20)[0].texts[0].token_ids == plain[: first + 1]
        tiny.generation_config.eos_token_id = [stop, 7]
        assert Engine(tiny, num_blocks=20).generate([prompt], 20)[0].texts[0].token_ids == plain[: first + 1]
    finally:
        tiny.generation_config.eos_token_id = None


def test_a_sample_that_ends_early_says_so_with_its_last_piece(tiny: Any) -> None:
    engine = Engine(tiny, num_blocks=60, ahead=True)
    asked: dict[str, Any] = {"n": 4, "sampling": SamplingOptions(temperature=1.5, seed=1)}
    free = engine.generate([[5, 6, 7]], 12, stop_tokens=(), **asked)[0]
    stop = free.texts[1].token_ids[2]
    engine.add_request([5, 6, 7], 12, stop_tokens=[stop], **asked)
    pieces = list(engine.run())
    for index in range(4):
        mine = [piece for piece in pieces if piece.index == index]
        reasons = [piece.finish_reason for piece in mine]
        assert reasons[:-1] == [None] * (len(mine) - 1)
        ids = [token for piece in mine for token in piece.token_ids]
        whole = free.texts[index].token_ids
        cut = whole[: whole.index(stop) + 1] if stop in whole else whole
        assert ids == cut
        assert reasons[-1] == ("stop" if stop in whole else "length")
    assert [piece.answer is not None for piece in pieces].count(True) == 1
    assert pieces[-1].answer is not None
    assert len(pieces[-1].answer.texts[1].token_ids) == 3
    at_rest(engine)


# ------------------------------------------------------------------------------------------ text


@pytest.fixture(scope="module")
def spelled() -> Any:
    """A tiny model of 258 tokens, and a tokenizer whose tokens are bytes."""
    return tiny_model(vocab_size=258), byte_tokenizer()


def test_a_stream_holds_back_half_characters_and_what_may_become_a_stop_string(spelled: Any) -> None:
    _, tokenizer = spelled
    text = "naïve 漢字 🙂 END and more"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    stream = TextStream(tokenizer.backend_tokenizer)
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)
    stream = TextStream(tokenizer.backend_tokenizer, ["END", "字 🙂 EXIT", "zz"])
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) == stream.text == "naïve 漢字 🙂 "
    assert stream.stopped
    assert stream.flush() == ""
    stream = TextStream(tokenizer.backend_tokenizer, ["more!"])
    shown = "".join(stream.push(token) for token in ids)
    assert shown == text.removesuffix("more")
    assert stream.flush() == "more"
    broken = TextStream(tokenizer.backend_tokenizer)
    assert "".join(broken.push(token) for token in ids[:7] + ids[7:8]) + broken.flush() == "naïve "


def test_overlap() -> None:
    assert overlap("the EN", "END") == 2
    assert overlap("the END", "END") == 0
    assert overlap("aab", "aabaab") == 3
    assert overlap("", "x") == 0


@pytest.mark.parametrize("ahead", [False, True])
def test_stop_strings_across_tokens_end_one_sample_only(spelled: Any, ahead: bool) -> None:
    model, tokenizer = spelled
    engine = Engine(model, tokenizer, num_blocks=40, runner=Scripted, ahead=ahead)
    say(engine, "q", "one two three four", "one twelve", "no such thing")
    engine.add_request("count", 12, request_id="q", n=3, stop=["two", "elv", "hing"], stop_tokens=())
    pieces = list(engine.run())
    answer = pieces[-1].answer
    assert answer is not None
    assert [text.text for text in answer.texts] == ["one ", "one tw", "no such thin"]
    assert [text.finish_reason for text in answer.texts] == ["stop", "stop", "length"]
    assert [len(text.token_ids) for text in answer.texts] == [7, 9, 12]
    for index, text in enumerate(answer.texts):
        mine = [piece for piece in pieces if piece.index == index]
        assert "".join(piece.text for piece in mine) == text.text
        assert [token for piece in mine for token in piece.token_ids] == text.token_ids
        assert mine[-1].finish_reason == text.finish_reason
    at_rest(engine)


def test_a_stop_string_in_the_last_token_and_special_tokens(spelled: Any) -> None:
    model, tokenizer = spelled
    engine = Engine(model, tokenizer, num_blocks=40, runner=Scripted)
    say(engine, "q", "abcdef")
    engine.add_request("x", 4, request_id="q", stop="cd")
    say(engine, "r", [*tokenizer("hi")["input_ids"], 256, 9])
    engine.add_request("x", 9, request_id="r", stop_tokens=[256])
    answers = drain(engine)
    assert (answers["q"].text, answers["q"].texts[0].finish_reason) == ("ab", "stop")
    assert (answers["r"].text, answers["r"].texts[0].finish_reason) == ("hi", "stop")
    assert answers["r"].texts[0].token_ids[-1] == 256


def test_multibyte_characters_come_whole_over_a_stream(spelled: Any) -> None:
    model, tokenizer = spelled
    engine = Engine(model, tokenizer, num_blocks=40, runner=Scripted, ahead=True)
    text = "日本語 🙂!"
    say(engine, "q", text)
    pieces = list(engine.stream("?", len(text.encode()), request_id="q"))
    assert "".join(piece.text for piece in pieces) == text == pieces[-1].answer.texts[0].text
    assert [piece.text for piece in pieces if piece.text] == list(text)
    say(engine, "r", text)
    cut = engine.generate(["?"], 4, request_id="r")[0]
    assert cut.text == "日"  # the fourth byte begins a character that never comes
    at_rest(engine)


# ------------------------------------------------------------------------------------------ the loop


def test_streams_generate_and_step_leave_each_other_their_pieces(tiny: Any, expected: Any) -> None:
    prompts, references = expected
    engine = Engine(tiny, num_blocks=200, ahead=True)
    for i in range(3):
        engine.add_request(prompts[i], 20, request_id=i, stop_tokens=())
    one = engine.stream(prompts[3], 20, request_id=3, stop_tokens=())
    two = engine.stream(prompts[4], 20, request_id=4, stop_tokens=())
    got: dict[int, list[int]] = {3: [], 4: []}
    for _ in range(5):
        for stream in (one, two):
            piece = next(stream)
            got[piece.request_id] += piece.token_ids
    answers = engine.generate(prompts[5:8], 20, stop_tokens=())
    for answer, theirs in zip(answers, references[5:8], strict=True):
        assert answer.texts[0].token_ids == theirs.ids
    for stream in (one, two):
        for piece in stream:
            got[piece.request_id] += piece.token_ids
    assert got == {3: references[3].ids, 4: references[4].ids}
    rest: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for piece in engine.run():
        rest[piece.request_id] += piece.token_ids
    assert rest == {i: references[i].ids for i in range(3)}
    at_rest(engine)


def test_leaving_a_stream_aborts_its_request_and_no_other(tiny: Any, expected: Any) -> None:
    prompts, references = expected
    engine = Engine(tiny, num_blocks=200, ahead=True)
    engine.add_request(prompts[0], 20, request_id="stays", stop_tokens=())
    for piece in engine.stream(prompts[1], 20, request_id="leaves", stop_tokens=()):
        if piece.token_ids:
            break
    gc.collect()
    assert "leaves" not in engine.desk.jobs
    assert not engine.mail
    answers = drain(engine)
    assert list(answers) == ["stays"]
    assert answers["stays"].texts[0].token_ids == references[0].ids
    at_rest(engine)


def test_a_stream_whose_request_somebody_aborts_ends_with_its_answer(tiny: Any) -> None:
    engine = Engine(tiny, num_blocks=50, ahead=True)
    stream = engine.stream([1, 2, 3], 20, request_id="x", stop_tokens=())
    first = next(stream)
    answer = engine.abort("x")
    last = list(stream)[-1]
    assert answer is not None
    assert last.answer == answer
    assert last.finish_reason == "aborted"
    assert answer.texts[0].token_ids[:1] == list(first.token_ids)
    assert list(engine.run()) == []  # its last step was in flight
    at_rest(engine)


@pytest.fixture(scope="module")
def short(tiny: Any) -> tuple[list[list[int]], list[list[int]]]:
    prompts = [[10 * i + k for k in range(8)] for i in range(1, 6)]
    return prompts, [reference(tiny, prompt, 16).ids for prompt in prompts]


@pytest.mark.parametrize("beams", [0, 3])
def test_abort_in_every_state(tiny: Any, short: Any, beams: int) -> None:
    prompts, references = short
    shape: dict[str, Any] = {"beam_width": beams} if beams else {"n": 3, "sampling": WARM}
    tight: dict[str, Any] = {"num_blocks": 20, "block_size": 4, "host_blocks": 90, "costs": SWAP, "ahead": True}
    engine = Engine(tiny, policy="last_arrived", **tight)
    states = set()
    for patience in (0, 1, 6, 14, 24, 36):
        ids = [engine.add_request(prompts[i], 16, stop_tokens=()) for i in range(3)]
        engine.add_request(prompts[3], 16, request_id="goes", stop_tokens=(), **shape)
        pieces = [piece for _ in range(patience) for piece in engine.step()]
        group = engine.scheduler.ledger.groups.get("goes")
        state = "ended" if group is None else group.state
        states.add(state)
        answer = engine.abort("goes")
        engine.check()
        assert (answer is None) == (state == "ended")
        if answer is not None:
            assert {text.finish_reason for text in answer.texts} == {"aborted"}
            assert len(answer.texts) == 3
        assert engine.abort("goes") is None
        assert engine.abort("never seen") is None
        again = patience % 12 and state != "ended"
        if again:  # the name is free again, though its last step may be in flight
            engine.add_request(prompts[4], 5, request_id="goes", stop_tokens=())
        answers = drain(engine, checked=False) | {piece.request_id: piece.answer for piece in pieces if piece.answer}
        assert [answers[name].texts[0].token_ids for name in ids] == references[:3]
        if again:
            assert answers["goes"].texts[0].token_ids == references[4][:5]
        at_rest(engine)
    assert states == {"waiting", "running", "swapped", "ended"}


def test_a_lower_priority_waits_and_the_higher_is_not_put_aside(tiny: Any) -> None:
    engine = Engine(tiny, num_blocks=9, block_size=4, policy="lowest_priority")
    for i, priority in enumerate((5, 5, 0)):
        engine.add_request([i + 3] * 8, 16, request_id=i, priority=priority, stop_tokens=())
    answers = drain(engine)
    assert answers[2].preemptions == 0
    assert answers[2].finished_at == min(answer.finished_at for answer in answers.values())
    at_rest(engine)


def test_deadlines_choose_the_victim(tiny: Any) -> None:
    for patient in (1, 2):
        engine = Engine(tiny, num_blocks=12, block_size=4, policy="most_slack")
        for i in range(3):
            soon = time.perf_counter() + (1e5 if i == patient else 1e3)
            engine.add_request([i + 3] * 8, 16, request_id=i, deadline=soon, stop_tokens=())
        answers = drain(engine)
        assert answers[patient].preemptions > 0
        assert answers[3 - patient].preemptions == 0
        at_rest(engine)


def test_a_salt_keeps_prefixes_apart(tiny: Any) -> None:
    engine = Engine(tiny, num_blocks=60, block_size=4)
    prompt = list(range(3, 24))
    expected = reference(tiny, prompt, 4).ids
    hits = []
    for salt in (None, None, "a", "b", "a", None):
        answer = engine.generate([prompt], 4, salt=salt, stop_tokens=())[0]
        assert answer.texts[0].token_ids == expected
        hits.append(answer.hit_tokens)
    assert hits == [0, 20, 0, 0, 20, 20]
    assert engine.stats.hit_tokens == 60
    assert engine.stats.hit_rate == pytest.approx(60 / engine.stats.queried_tokens)


def test_a_request_that_outgrows_the_pool_ends_with_what_it_has(tiny: Any) -> None:
    for ahead in (False, True):
        engine = Engine(tiny, num_blocks=6, block_size=4, ahead=ahead)
        answer = engine.generate([list(range(3, 13))], 60, stop_tokens=())[0]
        assert answer.texts[0].finish_reason == "out_of_blocks"
        ids = answer.texts[0].token_ids
        assert 14 <= len(ids) <= 15
        assert ids == reference(tiny, list(range(3, 13)), 60).ids[: len(ids)]
        at_rest(engine)


def test_several_engines_in_one_process(tiny: Any, expected: Any) -> None:
    prompts, references = expected
    other = tiny_model(num_hidden_layers=3)
    theirs = reference(other, prompts[0], 20).ids
    engines = [Engine(tiny, num_blocks=30), Engine(tiny, num_blocks=30, ahead=True), Engine(other, num_blocks=30)]
    for engine in engines:
        engine.add_request(prompts[0], 20, request_id="x", stop_tokens=())
    ids: list[list[int]] = [[], [], []]
    while not all(engine.idle for engine in engines):
        for engine, made in zip(engines, ids, strict=True):
            for piece in engine.step():
                made += piece.token_ids
    assert ids == [references[0].ids, references[0].ids, theirs]
    assert by_itself(tiny, prompts[0], 20).sequences[0, len(prompts[0]) :].tolist() == references[0].ids


def test_stats(tiny: Any) -> None:
    engine = Engine(tiny, num_blocks=10, block_size=4)
    engine.add_request([5] * 10, 3, stop_tokens=())
    assert (engine.stats.waiting, engine.stats.running, engine.stats.slots_filled) == (1, 0, 1.0)
    engine.step()
    stats = engine.stats
    assert (stats.waiting, stats.running, stats.finished, stats.steps) == (0, 1, 0, 1)
    assert (stats.blocks, stats.blocks_used, stats.slots_filled) == (10, 3, 10 / 12)
    assert (stats.tokens_run, stats.tokens_made, stats.step_kinds) == (10, 1, {"eager": 1})
    assert "1 running" in repr(engine)
    assert "3 of 10 blocks" in repr(engine)
    list(engine.run())
    assert (engine.stats.finished, engine.stats.tokens_made, engine.stats.blocks_used) == (1, 3, 0)


def test_progress_is_shown_when_asked_for(tiny: Any, capsys: pytest.CaptureFixture[str]) -> None:
    engine = Engine(tiny, num_blocks=20)
    assert len(engine.generate([[1], [2]], 2, progress=True, stop_tokens=())) == 2
    assert "2/2" in capsys.readouterr().err
    assert engine.generate([], 2) == []
    answers = engine.generate([[1], [2]], [2, 3], stop_tokens=())
    assert [len(answer.texts[0].token_ids) for answer in answers] == [2, 3]


def test_text_without_tokenizer_is_empty_and_numpy_prompts_are_taken(tiny: Any) -> None:
    engine = Engine(tiny, num_blocks=20)
    answer = engine.generate([np.array([5, 6, 7])], 2, stop_tokens=())[0]
    assert answer.text == ""
    assert answer.prompt_token_ids == [5, 6, 7]
    assert answer.arrival <= answer.first_token_at <= answer.finished_at
