# Exported from book/appendices/A2_command_line.py by tools/export.py; edit the chapter, not this file.
"""`paged-kv generate` and `paged-kv chat`."""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from paged_kv.cli_output import refusing
from paged_kv.serve_options import (
    Blocks,
    BlockSize,
    Device,
    Download,
    DType,
    MaxSeqLen,
    Memory,
    ModelName,
    NewTokens,
    Seed,
    StopKey,
    Temperature,
    TopK,
    TopP,
    open_engine,
    sampling_of,
)
from paged_kv.sizing import at_least, blocks_for


def generate_command(
    prompts: Annotated[list[str] | None, typer.Argument(help="One or several texts.")] = None,
    file: Annotated[Path | None, typer.Option(help="More of them, one a line.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put each into the chat template.")] = False,
    n: Annotated[int, typer.Option("--n", help="Samples of each.")] = 1,
    beams: Annotated[int, typer.Option(help="Beams in place of samples.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text.")] = None,
    max_new_tokens: NewTokens = 64,
    temperature: Temperature = 0.0, top_k: TopK = 0, top_p: TopP = 1.0, seed: Seed = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answers as JSON.")] = False,
    model_name: ModelName = "smollm2", device: Device = None, dtype: DType = None,
    download: Download = False, memory: Memory = None, blocks: Blocks = None,
    block_size: BlockSize = 16, max_seq_len: MaxSeqLen = None,
) -> None:  # fmt: skip
    """Answer prompts; the text of a single one appears as it is made."""
    asked = dict(locals())
    with refusing():
        texts = read_prompts(prompts or [], file)
        at_least(1, "n", n)
        sampling = sampling_of(asked)
        engine = open_engine(asked)
        options = {"sampling": sampling, "n": n, "beam_width": beams, "stop": stop or []}
        names = add_prompts(engine, texts, asked, options)
        streamed = len(names) == n == 1 and not beams and not as_json
        start = time.perf_counter()
        answers, peak = answer_all(engine, streamed)
        found = [answers[name] for name in names]
        report = answers_report(texts, found, time.perf_counter() - start, peak, block_size)
        print_answers(report, as_json, streamed)


def read_prompts(given: list[str], file: Path | None) -> list[str]:
    """The prompts on the command line, then those of a file."""
    if file is not None:
        try:
            given = given + file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"file = {str(file)!r}: {error}") from None
    texts = [text for text in given if text.strip()]
    if not texts:
        raise ValueError("prompts: none given, neither as arguments nor by --file")
    return texts


def add_prompts(
    engine: Any, texts: list[str], asked: dict[str, Any], options: dict[str, Any]
) -> list[Any]:
    """Queue all prompts; returns the ids of their requests."""
    from paged_kv.bench_load import encode_chat

    if asked["chat"] and getattr(engine.tokenizer, "chat_template", None) is None:
        raise ValueError("chat: the model's tokenizer has no chat template")
    prompts: list[Any] = texts
    if asked["chat"]:
        prompts = [encode_chat(engine.tokenizer, [("user", text)]).tolist() for text in texts]
    return [engine.add_request(each, asked["max_new_tokens"], **options) for each in prompts]


def answer_all(engine: Any, streamed: bool) -> tuple[dict[Any, Any], int]:
    """Step until all is answered: {id: Answer}, and the most blocks used between steps."""
    answers, peak = {}, 0
    while not engine.idle:
        for piece in engine.step():
            if streamed:
                typer.echo(piece.text, nl=False)
                sys.stdout.flush()
            if piece.answer is not None:
                answers[piece.request_id] = piece.answer
        peak = max(peak, engine.stats.blocks_used)
    return answers, peak


def answers_report(
    texts: list[str], answers: list[Any], seconds: float, peak: int, block_size: int
) -> dict[str, Any]:
    """What `generate` prints, as one dictionary."""
    for answer in answers:  # a request of a single step holds its blocks within that step only
        longest = max(len(text.token_ids) for text in answer.texts)
        held = len(answer.prompt_token_ids) + max(longest, 1) - 1
        peak = max(peak, blocks_for(held, block_size))
    tokens = sum(len(text.token_ids) for answer in answers for text in answer.texts)
    return {
        "answers": [
            {
                "prompt": prompt,
                "prompt_tokens": len(answer.prompt_token_ids),
                "hit_tokens": answer.hit_tokens,
                "texts": [
                    {
                        "text": text.text, "finish_reason": text.finish_reason,
                        "tokens": len(text.token_ids), "score": text.score,
                    }
                    for text in answer.texts
                ],
            }
            for prompt, answer in zip(texts, answers, strict=True)
        ],
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_s": round(tokens / max(seconds, 1e-9), 2),
        "prompt_tokens": sum(len(answer.prompt_token_ids) for answer in answers),
        "hit_tokens": sum(answer.hit_tokens for answer in answers),
        "blocks_used": peak,
    }  # fmt: skip


def print_answers(report: dict[str, Any], as_json: bool, streamed: bool) -> None:
    """The report as JSON; or the texts, unless they have been streamed, and the counts."""
    if as_json:
        typer.echo(json.dumps(report, indent=2))
        return
    for answer in report["answers"]:
        several = len(answer["texts"]) > 1 or len(report["answers"]) > 1
        if several:
            typer.echo(f"--- {answer['prompt']}")
        for number, text in enumerate(answer["texts"], 1):
            mark = f"{number}. " if len(answer["texts"]) > 1 else ""
            typer.echo("" if streamed else mark + text["text"])
            if text["finish_reason"] not in ("length", "stop"):
                typer.echo(f"({text['finish_reason']})", err=True)
    typer.echo(counts_line(report), err=True)


def counts_line(report: dict[str, Any]) -> str:
    """Tokens, rate, blocks and hits in one line."""
    return (
        f"{report['tokens']} tokens in {report['seconds']:.2f} s,"
        f" {report['tokens_per_s']:.1f} tokens/s; at most {report['blocks_used']} blocks;"
        f" {report['hit_tokens']} of {report['prompt_tokens']} prompt tokens found in the cache"
    )


def chat_command(
    system: Annotated[str, typer.Option(help="What the model is told before all else.")] = "",
    max_new_tokens: NewTokens = 256,
    temperature: Temperature = 0.0, top_k: TopK = 0, top_p: TopP = 1.0, seed: Seed = None,
    model_name: ModelName = "smollm2", device: Device = None, dtype: DType = None,
    download: Download = False, memory: Memory = None, blocks: Blocks = None,
    block_size: BlockSize = 16, max_seq_len: MaxSeqLen = None,
) -> None:  # fmt: skip
    """Talk with a model; each turn says how many of its tokens had to be computed."""
    asked = dict(locals())
    with refusing():
        sampling = sampling_of(asked)
        engine = open_engine(asked)
        from paged_kv.chat_session import ChatSession

        session = ChatSession(engine, sampling, max_new_tokens)
        session.turns += [("system", system)] if system else []
        opening = list(session.turns)
    typer.echo("/reset forgets, /stats counts, /quit leaves; Ctrl-C ends an answer", err=True)
    for line in lines_said():
        if line in ("/quit", "/exit"):
            break
        if line == "/reset":
            session.reset()
            session.turns += opening
            typer.echo("(forgotten)")
        elif line == "/stats":
            typer.echo(stats_line(engine.stats))
        elif line:
            speak(session, line)


def lines_said() -> Iterator[str]:
    """What the user types, line by line, to the end of the input or Ctrl-C."""
    asking = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            yield input(asking).strip()
        except (EOFError, KeyboardInterrupt):
            return


def speak(session: Any, line: str) -> None:
    """One turn: the answer as it comes, and what it took; a refusal is one line."""
    start, said = time.perf_counter(), session.ask(line)
    try:
        with StopKey() as key:
            for text in said:
                typer.echo(text, nl=False)
                sys.stdout.flush()
                if key.asked:
                    said.close()
                    typer.echo(" [stopped]", nl=False)
    except ValueError as error:
        typer.echo(f"paged-kv: {error}; /reset begins anew", err=True)
        return
    answer, seconds = session.answer, time.perf_counter() - start
    made = 0 if answer is None else len(answer.texts[0].token_ids)
    typer.echo("")
    typer.echo(
        f"({session.computed_tokens} of {session.prompt_tokens} prompt tokens computed,"
        f" {made} made, {made / max(seconds, 1e-9):.1f} tokens/s)",
        err=True,
    )


def stats_line(stats: Any) -> str:
    """The engine's figures in one line."""
    return (
        f"{stats.tokens_made} tokens made, {stats.tokens_run} run in {stats.steps} steps;"
        f" {stats.hit_tokens} of {stats.queried_tokens} prompt tokens found;"
        f" {stats.blocks_used} of {stats.blocks} blocks used"
    )
