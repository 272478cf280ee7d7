"""Appendix A6: models from anywhere, loads, the bench on a clock of ours, the view, the dialogue."""

from __future__ import annotations

import json
import math
import signal
from collections import Counter
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")
import torch

from paged_kv import model_source
from paged_kv.bench_load import (
    QUESTIONS,
    BenchLoad,
    LoadLengths,
    TimedPrompt,
    drawn_load,
    due_times,
    encode_chat,
    question_load,
    trace_load,
)
from paged_kv.bench_run import Bench, bench_report, quantiles, tokens_per_s
from paged_kv.chat_session import ChatSession
from paged_kv.engine import Engine
from paged_kv.live_view import (
    CACHED,
    FREE,
    SHARED,
    bar,
    block_letters,
    cached_blocks,
    fold_blocks,
    live_frame,
    plain_line,
    style_of,
    view_lines,
    watch_bench,
)
from paged_kv.metrics import SLO, LogHistogram
from paged_kv.model_source import load_model
from paged_kv.sampling_params import SamplingOptions
from paged_kv.serve_options import StopKey
from paged_kv.trace_shapes import Lognormal


class Ticks:
    """A clock that moves by 10 ms whenever somebody looks, and as far as somebody sleeps."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        self.time += 0.01
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


@pytest.fixture(scope="module")
def tiny() -> tuple[Any, Any]:
    return load_model("random:tiny", device="cpu")


def bench_of(
    tiny: tuple[Any, Any], load: BenchLoad, slo: SLO = SLO(), seconds: float = math.inf, **options: Any
) -> Bench:
    ticks = Ticks()
    engine = Engine(*tiny, **{"num_blocks": 128} | options)
    return Bench(engine, load, slo, seconds, clock=ticks, sleep=ticks.sleep)


def finish(bench: Bench) -> dict[str, Any]:
    while not bench.done:
        bench.step()
    bench.engine.check()
    return bench_report(bench)


# ------------------------------------------------------------------------------------------ models


def test_random_weights_are_the_same_each_time_and_leave_torch_alone(tiny: tuple[Any, Any]) -> None:
    before = torch.random.get_rng_state()
    again, _ = load_model("random:tiny", device="cpu")
    assert torch.equal(before, torch.random.get_rng_state())
    for a, b in zip(tiny[0].parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    assert again.dtype == torch.float32
    assert not again.training


def test_a_folder_and_a_config_and_a_dtype(tiny: tuple[Any, Any], tmp_path: Path) -> None:
    tiny[0].save_pretrained(tmp_path)
    tiny[1].save_pretrained(tmp_path)
    model, tokenizer = load_model(str(tmp_path), dtype="bfloat16", device="cpu")
    assert model.dtype == torch.bfloat16
    ids = tokenizer("block")["input_ids"]
    assert ids == tiny[1]("block")["input_ids"]
    assert tokenizer.decode(ids) == "block"
    shaped, _ = load_model(f"random:{tmp_path}", device="cpu")
    assert shaped.config.hidden_size == 128


def test_bytes_are_tokens_and_come_back(tiny: tuple[Any, Any]) -> None:
    text = "a block, ein Block – und ☃"
    ids = tiny[1](text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert max(ids) < 256
    assert tiny[1].decode(ids) == text


BAD_SOURCES = [
    ("random:huge", {}, "random:huge.*tiny, llama-3-8b"),
    ("missing.gguf", {}, "missing.gguf.*no such file"),
    ("no/such-model", {}, "no/such-model.*--download"),
    ("random:tiny", {"dtype": "int3"}, "dtype = 'int3'.*bfloat16"),
    ("random:llama-3-70b", {"device": "cpu"}, "GiB of weights.*of memory"),
]


@pytest.mark.parametrize(("source", "options", "message"), BAD_SOURCES)
def test_a_bad_source_is_one_clear_error(
    source: str, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_source.os, "sysconf", lambda name: 2**17)  # 2**34 bytes of memory
    with pytest.raises(ValueError, match=message):
        load_model(source, **options)


def test_an_empty_folder_and_a_broken_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        load_model(str(tmp_path))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF but not really")
    with pytest.raises(ValueError, match=r"broken\.gguf"):
        load_model(str(broken))


# ------------------------------------------------------------------------------------------ loads


def test_lengths_are_clipped_and_have_their_mean() -> None:
    rng = np.random.default_rng(0)
    lengths = LoadLengths(low=4, high=256)
    drawn = lengths.draw(rng, Lognormal(60, 1.0), 4000)
    assert min(drawn) >= 4
    assert max(drawn) == 256
    free = LoadLengths(low=1, high=10**6).draw(rng, Lognormal(60, 1.0), 20000)
    assert np.mean(free) == pytest.approx(60, rel=0.05)


def test_poisson_times_have_their_rate_and_random_gaps() -> None:
    times = np.array(due_times(np.random.default_rng(0), 5000, 4.0))
    gaps = np.diff(times)
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(0.25, rel=0.05)
    assert gaps.std() == pytest.approx(0.25, rel=0.05)
    for rate in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="rate"):
            due_times(np.random.default_rng(0), 3, rate)


def test_a_drawn_load_shares_its_beginning_and_repeats_by_seed() -> None:
    load = drawn_load(10, 100, rate=5.0, shared=20, seed=3)
    first = load.requests[0].prompt[:20]
    assert all((one.prompt[:20] == first).all() for one in load.requests)
    assert all(len(one.prompt) >= 24 and one.prompt.max() < 100 for one in load.requests)
    again = drawn_load(10, 100, rate=5.0, shared=20, seed=3)
    assert all(
        (a.prompt == b.prompt).all() and a.due == b.due for a, b in zip(load.requests, again.requests, strict=True)
    )
    assert load.at_once is None
    assert drawn_load(10, 100).at_once == 10
    for wrong in ({"count": 0}, {"shared": -1}, {"at_once": -1}):
        with pytest.raises(ValueError, match=r"requests|shared|at_once"):
            drawn_load(**{"count": 3, "vocab_size": 100} | wrong)
    with pytest.raises(ValueError, match="at least one"):
        BenchLoad("none", ())


def test_traces_keep_what_they_share(tmp_path: Path) -> None:
    rows = [(0, 1500, 8, [1, 2, 3]), (500, 1200, 4, [1, 2, 9]), (1500, 100, 0, [7])]
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    load = trace_load(str(file), 1000, scale=0.125, speed=2.0)
    a, b, _c = load.requests
    assert [len(r.prompt) for r in load.requests] == [188, 150, 12]
    assert [r.due for r in load.requests] == [0.0, 0.25, 0.75]
    assert [r.new_tokens for r in load.requests] == [1, 1, 1]
    assert (a.prompt[:128] == b.prompt[:128]).all()
    assert (a.prompt[128:150] != b.prompt[128:]).any()
    assert len(trace_load(str(file), 1000, 2).requests) == 2
    azure = tmp_path / "trace.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,40,5\n2023-11-16 18:15:48.68,40,5\n"
    )
    one, two = trace_load(str(azure), 1000).requests
    assert (len(one.prompt), one.new_tokens, two.due) == (40, 5, 2.0)
    assert (one.prompt != two.prompt).any()
    for path, options in ((str(tmp_path / "no.jsonl"), {}), (str(file), {"scale": 0.0}), (__file__, {})):
        with pytest.raises(ValueError, match=r"trace|scale"):
            trace_load(path, 1000, **options)


def test_questions_stand_behind_one_system_prompt(tiny: tuple[Any, Any]) -> None:
    load = question_load(tiny[1], 20, rate=2.0)
    texts = [tiny[1].decode(one.prompt) for one in load.requests]
    assert all(text.startswith("system: You are a patient guide") for text in texts)
    assert Counter(q for text in texts for q in QUESTIONS if q in text).total() == 20
    assert load.ends
    with pytest.raises(ValueError, match="chat template"):
        question_load(None, 3)


# ------------------------------------------------------------------------------------------ the bench


def plain(*requests: tuple[float, int, int], at_once: int | None = None) -> BenchLoad:
    rng = np.random.default_rng(1)
    asked = [TimedPrompt(due, rng.integers(0, 256, n, np.int32), new) for due, n, new in requests]
    return BenchLoad("plain", tuple(asked), at_once)


def test_times_count_from_when_a_request_was_due(tiny: tuple[Any, Any]) -> None:
    """Reads of the clock: start 0.01; step 1 looks at 0.02 and 0.03, and so on: two a step."""
    report = finish(bench_of(tiny, plain((0.0, 9, 3), (0.015, 9, 3))))
    # the first: tokens at 0.03, 0.05, 0.07; the second is due at 0.025, taken in at 0.04
    assert report["ttft_s"]["max"] == pytest.approx(0.025)
    assert report["gap_s"]["max"] == pytest.approx(0.02)
    assert report["tpot_s"]["mean"] == pytest.approx(0.02)
    assert (report["finished"], report["output_tokens"], report["steps"]) == (2, 6, 4)


def test_a_closed_load_never_has_more_under_way(tiny: tuple[Any, Any]) -> None:
    bench = bench_of(tiny, drawn_load(12, 256, LoadLengths(high=20), at_once=3))
    most = 0
    while not bench.done:
        bench.step()
        most = max(most, len(bench.watches))
        asked, ended = bench.next, sum(bench.totals.reasons.values())
        assert asked == ended + len(bench.watches) + bench.totals.refused
    assert most == 3
    assert bench_report(bench)["finished"] == 12


def test_counts_of_a_run_are_those_of_its_load(tiny: tuple[Any, Any]) -> None:
    load = drawn_load(16, 256, rate=20.0, shared=32)
    report = finish(bench_of(tiny, load, num_blocks=256))
    assert report["output_tokens"] == sum(one.new_tokens for one in load.requests)
    assert report["prompt_tokens"] == sum(len(one.prompt) for one in load.requests)
    assert report["reasons"] == {"length": 16}
    assert 0.2 < report["hit_rate"] < 0.8
    assert 0 < report["blocks_held"] < 1
    assert 0 < report["slots_filled"] <= 1
    assert sum(report["step_kinds"].values()) == report["steps"]
    assert json.loads(json.dumps(report)) == report
    without = finish(bench_of(tiny, load, num_blocks=256, prefix_caching=False))
    assert without["hit_rate"] == 0
    assert without["tokens_run"] > report["tokens_run"]


def test_a_small_pool_preempts_and_loses_nothing(tiny: tuple[Any, Any]) -> None:
    load = drawn_load(12, 256, LoadLengths(low=40, high=80), at_once=12)
    report = finish(bench_of(tiny, load, num_blocks=16))
    assert report["finished"] == 12
    assert sum(report["preemptions"].values()) > 0
    assert report["output_tokens"] == sum(one.new_tokens for one in load.requests)


def test_goodput_counts_those_that_kept_both_promises(tiny: tuple[Any, Any]) -> None:
    load = plain((0.0, 9, 3), (0.0, 9, 3))
    good = finish(bench_of(tiny, load, SLO(0.05, 0.021)))
    assert good["goodput_per_s"] == pytest.approx(good["requests_per_s"])
    for slo in (SLO(0.001, 1.0), SLO(1.0, 0.019)):
        assert finish(bench_of(tiny, load, slo))["goodput_per_s"] == 0


def test_what_can_never_fit_is_refused_and_the_others_go_on(tiny: tuple[Any, Any]) -> None:
    bench = bench_of(tiny, plain((0.0, 9, 3), (0.0, 9000, 3), (0.0, 9, 3)), num_blocks=8)
    report = finish(bench)
    assert (report["refused"], report["finished"]) == (1, 2)
    assert "prompt" in bench.first_refusal


def test_time_runs_out(tiny: tuple[Any, Any]) -> None:
    bench = bench_of(tiny, plain((0.0, 9, 500), (99.0, 9, 3)), seconds=0.2)
    while not bench.done:
        bench.step()
    bench.stop()
    bench.engine.check()
    report = bench_report(bench)
    assert report["reasons"] == {"aborted": 1}
    assert report["finished"] == 0
    assert bench.engine.idle
    assert bench.engine.stats.blocks_used == 0
    assert report["ttft_s"]["p50"] is not None
    assert report["tpot_s"]["p50"] is None


def test_nothing_measured_is_none_and_not_nan() -> None:
    assert set(quantiles(LogHistogram()).values()) == {None}


# ------------------------------------------------------------------------------------------ the view


def test_letters_say_who_holds_a_block(tiny: tuple[Any, Any]) -> None:
    bench = bench_of(tiny, drawn_load(6, 256, LoadLengths(low=20, high=40), shared=32, at_once=3))
    for _ in range(12):
        bench.step()
    letters = {name: watch.letter for name, watch in bench.watches.items()}
    found = block_letters(bench.engine, letters)
    counts = Counter(found.tolist())
    pool = bench.engine.manager.pool
    assert counts[SHARED] == int((pool.ref_count > 1).sum()) == 2
    assert counts[FREE] + counts[CACHED] == pool.num_free
    assert counts[CACHED] == cached_blocks(bench.engine)
    for name, letter in letters.items():
        group = bench.engine.scheduler.ledger.groups[name]
        rows = bench.engine.scheduler.ledger.rows_of(group)
        own = [b for row in rows for b in bench.engine.manager.tables.ids(row) if pool.ref_count[b] == 1]
        assert all(found[b] == letter for b in own)
        assert counts[letter] == len(own)


def test_cells_fold_and_the_frame_fits_80_columns(tiny: tuple[Any, Any]) -> None:
    from rich.console import Console

    assert fold_blocks(np.array(list("A.o.")), width=2) == ["A.", "o."]
    assert fold_blocks(np.array(list("A.o...+o")), width=2, rows=2) == ["Ao", ".+"]
    bench = bench_of(tiny, drawn_load(40, 256, rate=30.0), num_blocks=600)
    for _ in range(30):
        bench.step()
    console = Console(width=80, record=True, force_terminal=True, file=open("/dev/null", "w"))
    console.print(live_frame(bench))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    assert any("running" in line for line in lines)
    assert all(len(line) <= 76 for line in view_lines(bench)), view_lines(bench)
    assert len(plain_line(bench)) <= 120
    assert "\n" not in plain_line(bench)
    assert tokens_per_s(bench) > 0


def test_letters_are_told_apart_without_colour_and_with_the_books() -> None:
    assert [style_of(letter).rsplit(" ")[-1] for letter in "ABCD"] == ["#0072B2", "#E69F00", "#009E73", "#D55E00"]
    assert len({FREE, CACHED, SHARED}) == 3
    assert (bar(0.0), bar(0.5, 4), bar(1.5, 4)) == ("[" + "." * 20 + "]", "[##..]", "[####]")


def test_a_plain_watch_prints_lines(tiny: tuple[Any, Any], capsys: pytest.CaptureFixture[str]) -> None:
    bench = bench_of(tiny, drawn_load(6, 256, LoadLengths(high=60), rate=2.0))
    watch_bench(bench, True, lambda: False)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 2
    assert all("tokens/s" in line for line in lines)
    assert bench.done
    stopped = bench_of(tiny, drawn_load(6, 256, rate=2.0))
    watch_bench(stopped, True, lambda: True)
    assert stopped.next == 0


def test_a_second_run_on_an_engine_counts_its_own_steps_only(tiny: tuple[Any, Any]) -> None:
    engine, reports = Engine(*tiny, num_blocks=64), []
    for _ in range(2):
        bench = Bench(engine, drawn_load(3, 260, LoadLengths(high=8)))
        while not bench.done:
            bench.step()
        reports.append(bench_report(bench))
    for report in reports:
        assert sum(report["step_kinds"].values()) == report["steps"] > 0
        assert report["preemptions"] == dict.fromkeys(("recompute", "swap", "restore", "drop"), 0)
    assert engine.steps == reports[0]["steps"] + reports[1]["steps"]


def test_no_user_and_no_device_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="at_once = 0"):
        drawn_load(3, 260, at_once=0)
    for odd in ("gpu", 1.5):
        with pytest.raises(ValueError, match=f"device = {odd!r}: such as cpu"):
            load_model("random:tiny", device=odd)


# ------------------------------------------------------------------------------------------ the dialogue


def test_each_turn_computes_only_what_the_cache_does_not_hold(tiny: tuple[Any, Any]) -> None:
    session = ChatSession(Engine(*tiny, num_blocks=64), SamplingOptions(), 8)
    first = "".join(session.ask("one and two and three and four"))
    assert session.answer is not None
    assert session.answer.text == first
    assert session.computed_tokens == session.prompt_tokens
    before = session.prompt_tokens
    list(session.ask("and?"))
    assert session.prompt_tokens > before
    # all full blocks of the first prompt at the least are found
    assert session.computed_tokens <= session.prompt_tokens - before // 16 * 16
    assert [role for role, _ in session.turns] == ["user", "assistant"] * 2
    session.reset()
    list(session.ask("one and two and three and four"))
    assert session.computed_tokens == before - (before - 1) // 16 * 16


def test_an_answer_that_is_stopped_stays_in_the_history(tiny: tuple[Any, Any]) -> None:
    engine = Engine(*tiny, num_blocks=64)
    session = ChatSession(engine, SamplingOptions(), 50)
    said = session.ask("hello")
    pieces = [next(said), next(said), next(said)]
    said.close()
    assert session.turns[-1] == ("assistant", "".join(pieces))
    assert engine.idle
    assert engine.stats.blocks_used == 0
    engine.check()
    assert list(session.ask("again"))


def test_two_dialogues_and_a_request_share_one_engine(tiny: tuple[Any, Any]) -> None:
    """Each hears its own answer, word by word, whoever steps the engine."""
    questions = ("one and two", "three or four")
    alone = ["".join(ChatSession(Engine(*tiny, num_blocks=64), SamplingOptions(), 8).ask(text)) for text in questions]
    engine = Engine(*tiny, num_blocks=64)
    engine.add_request("five and six", 20, request_id="other")
    sessions = [ChatSession(engine, SamplingOptions(), 8) for _ in questions]
    asked = [session.ask(text) for session, text in zip(sessions, questions, strict=True)]
    said = ["", ""]
    for pieces in zip_longest(*asked, fillvalue=""):
        said = [before + piece for before, piece in zip(said, pieces, strict=True)]
    assert said == alone
    assert [session.answer.text for session in sessions if session.answer] == alone
    others = list(engine.run())
    assert {piece.request_id for piece in others} == {"other"}
    assert sum(len(piece.token_ids) for piece in others) == 20
    assert not engine.mail
    engine.check()


def test_a_refused_turn_leaves_the_history_alone(tiny: tuple[Any, Any]) -> None:
    session = ChatSession(Engine(*tiny, num_blocks=4), SamplingOptions(), 8)
    list(session.ask("hi"))
    turns = list(session.turns)
    with pytest.raises(ValueError, match=r"prompt|max_new_tokens"):
        list(session.ask("x" * 200))
    assert session.turns == turns
    with pytest.raises(ValueError, match="chat template"):
        ChatSession(Engine(tiny[0], num_blocks=4), SamplingOptions())


def test_the_template_is_the_models_own(tiny: tuple[Any, Any]) -> None:
    ids = encode_chat(tiny[1], [("user", "hi")])
    assert tiny[1].decode(ids) == "user: hi\nassistant: "


def test_the_stop_key_notes_the_first_press_and_interrupts_at_the_second() -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopKey() as key:
        assert not key.asked
        signal.raise_signal(signal.SIGINT)
        assert key.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_real_model_talks(request: pytest.FixtureRequest) -> None:
    """A few tokens of SmolLM2, if it is there: the second turn finds what the first computed."""
    try:
        model, tokenizer = load_model("smollm2", device="cpu")
    except ValueError as error:
        pytest.skip(str(error))
    session = ChatSession(Engine(model, tokenizer, num_blocks=64), SamplingOptions(), 6)
    assert "Paris" in "".join(session.ask("Name the capital of France, in one word."))
    first = session.prompt_tokens
    list(session.ask("And of Italy?"))
    assert session.computed_tokens <= session.prompt_tokens - first // 16 * 16
