# Exported from book/13_engine.py by tools/export.py; edit the chapter, not this file.
"""The engine: requests in, text out, everything above at work."""

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
import transformers

from paged_kv.answers import Answer, Delta
from paged_kv.attend import KernelAttention
from paged_kv.chooser import Chooser, Pending
from paged_kv.cpu_attention import CpuAttention
from paged_kv.delivery import Desk, close_all, deliver
from paged_kv.engine_setup import (
    EngineStats,
    Settings,
    check_given,
    longest_sequence,
    make_scheduler,
    make_store,
    new_store,
    take_stats,
)
from paged_kv.guest_check import guest_spec
from paged_kv.hf_adapter import PagedModel
from paged_kv.request_options import Prompt, RequestOptions, encode, eos_ids, make_job, make_request
from paged_kv.runner import EagerRunner, MakeRunner, Room
from paged_kv.step_plan import StepPlan


class Engine:
    """Serves a causal language model of transformers: continuous batching over a paged cache.

    Args: `model`, `tokenizer` of transformers, without a tokenizer prompts are token ids;
    `runner`, which makes the `Runner`: `EagerRunner`, or chapter 14's; options, see `Settings`.
    State: `scheduler` over `manager` and `cache`; `runner` over `guest`; `desk`, who is being
    served; `pending`, launched steps, at most `depth`; `mail`, {request id: pieces} where
    somebody waits for them, `backlog`, all others.
    Raises: GuestRefused for a model that would be served wrong; ValueError.
    """

    def __init__(
        self, model: Any, tokenizer: Any = None, *, runner: MakeRunner = EagerRunner, **options: Any
    ) -> None:
        check_given(model, tokenizer)
        self.settings = settings = Settings(**options)
        self.model, self.tokenizer, self.device = model, tokenizer, model.device
        spec, on_gpu = guest_spec(model), self.device.type == "cuda"
        config = model.config.get_text_config(decoder=True)
        store = make_store(spec, settings, self.device)
        spare, host = max(1, settings.host_blocks), torch.device("cpu")
        self.host = new_store("host_blocks", spec, spare, store.block_size, host)
        longest = longest_sequence(config, settings.max_seq_len, store)
        self.scheduler, self.relief = make_scheduler(settings, store, longest)
        self.manager, self.cache = self.scheduler.manager, self.scheduler.cache
        attention = KernelAttention(settings.batch_invariant) if on_gpu else CpuAttention()
        self.guest = PagedModel(model, store, attention)
        shape = self.manager.tables.table.shape
        self.runner = runner(self.guest, self.host, Room(settings.token_budget, shape[0], shape))
        self.vocab_size = config.vocab_size
        self.desk = Desk(self.scheduler, Chooser(self.vocab_size, shape[0], self.device), tokenizer)
        self.depth = 1 + (on_gpu if settings.ahead is None else settings.ahead)
        self.pending, self.mail = deque[Pending](), dict[Hashable, deque[Delta]]()
        self.backlog, self.steps, self.tokens_run = list[Delta](), 0, 0

    def __repr__(self) -> str:
        now = self.stats
        requests = f"{now.waiting} waiting, {now.running} running, {now.swapped} swapped"
        return f"Engine: {requests}, {now.blocks_used} of {now.blocks} blocks used"

    def add_request(self, prompt: Prompt, max_new_tokens: int = 128, **options: Any) -> Hashable:
        """Queue a request; returns its id.  Options: see `RequestOptions`.

        Raises, with nothing changed: ValueError, naming the argument.
        """
        asked = RequestOptions(**options)
        if asked.stop and self.tokenizer is None:
            raise ValueError(f"stop = {asked.stop!r}: a tokenizer is needed")
        ids = encode(prompt, self.tokenizer, self.vocab_size)
        request = make_request(ids, max_new_tokens, asked, eos_ids(self.model))
        number = self.scheduler.ledger.submitted
        name = self.scheduler.submit(request)
        self.desk.jobs[name] = make_job(name, request, asked, self.settings.seed + number)
        return name

    def step(self) -> list[Delta]:
        """Launch what can be launched, then take in the oldest step.

        Returns: what came of it, the last piece of a request with its Answer; without pieces
        that a `stream` or `generate` waits for.
        A step that fails is undone, its requests wait again, and the error goes on.
        """
        turn_over(self)
        pieces, self.backlog = self.backlog, []
        return pieces

    def abort(self, request_id: Hashable) -> Answer | None:
        """End a request in any state with what it has; None if it is unknown or has ended."""
        output = self.scheduler.abort(request_id)
        if output is None:
            return None
        pieces = close_all(self.desk, [output], {})
        post(self, [piece for piece in pieces if request_id in self.mail])
        return pieces[-1].answer

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do."""
        return not (self.desk.jobs or self.pending or self.backlog)

    def run(self) -> Iterator[Delta]:
        """Step until nothing is left, and give out all pieces; a break loses none."""
        yield from all_pieces(self)

    def stream(self, prompt: Prompt, *given: Any, **options: Any) -> Iterator[Delta]:
        """Add a request when its first piece is asked for, and give out its pieces.

        Arguments as for `add_request`.  Others are served besides.  Leaving it aborts it.
        """
        yield from pieces_of(self, self.add_request(prompt, *given, **options))

    def generate(
        self, prompts: Sequence[Prompt], max_new_tokens: int | Sequence[int] = 128,
        *, progress: bool = False, **options: Any,
    ) -> list[Answer]:  # fmt: skip
        """Answer all `prompts`, in their order; options as for `add_request`.

        If one of them cannot be, ValueError names it and none is begun.
        """
        return answers_to(self, prompts, max_new_tokens, progress, options)

    @property
    def stats(self) -> EngineStats:
        """The figures of this moment."""
        return take_stats(self.desk, self.relief, self.runner.counts, self.steps, self.tokens_run)

    def check(self) -> None:
        """Assert all invariants.  For tests."""
        self.scheduler.check()
        self.relief.host.check()
        assert set(self.desk.jobs) == set(self.scheduler.ledger.groups), "a job without its group"


def turn_over(engine: Engine) -> None:
    """Launch what can be launched, take in the oldest step, give its pieces to who waits."""
    desk, pending = engine.desk, engine.pending
    try:
        while len(pending) < engine.depth and (plan := engine.scheduler.schedule()):
            launch(engine, plan)
        if pending:
            post(engine, deliver(desk, pending.popleft()))
        while pending and not desk.jobs:
            deliver(desk, pending.popleft())  # nobody waits for it any more
    except BaseException:
        undo(engine)
        raise
    finally:
        post(engine, close_all(desk, engine.scheduler.take_outputs(), {}))


def launch(engine: Engine, plan: StepPlan) -> None:
    """Send one plan to the device."""
    chooser = engine.desk.chooser
    chooser.open(plan, engine.desk.jobs, engine.scheduler.ledger.rows)
    with torch.inference_mode():
        logits, step = engine.runner.forward(plan, chooser.sampled)
        engine.pending.append(chooser.choose(plan, logits, step))
    engine.steps += 1
    engine.tokens_run += plan.num_tokens


def undo(engine: Engine) -> None:
    """Void all steps in flight: every request waits again, and the device is told anew."""
    flights, ledger = engine.scheduler.flights, engine.scheduler.ledger
    if flights:
        engine.scheduler.fail(flights[0].plan)
    for group in ledger.running_groups():
        ledger.release(group)
    engine.pending.clear()
    engine.desk.chooser.clear()


def post(engine: Engine, pieces: Sequence[Delta]) -> None:
    """Put pieces where they are waited for; forget all rows once nobody is left."""
    for piece in pieces:
        engine.mail.get(piece.request_id, engine.backlog).append(piece)
    if not (engine.desk.jobs or engine.pending):
        engine.desk.chooser.clear()


def all_pieces(engine: Engine) -> Iterator[Delta]:
    """Step until nothing is left; what was not taken goes back, to be given out first."""
    while not engine.idle:
        pieces = deque(engine.step())
        try:
            while pieces:
                yield pieces.popleft()
        finally:
            engine.backlog[:0] = pieces


def pieces_of(engine: Engine, name: Hashable) -> Iterator[Delta]:
    """The pieces of one request until it has ended; aborts it if it has not."""
    box = engine.mail[name] = deque()
    try:
        while name in engine.desk.jobs or box:
            if not box:
                turn_over(engine)
            while box:
                yield box.popleft()
    finally:
        engine.abort(name)
        del engine.mail[name]


def answers_to(
    engine: Engine, prompts: Any, most: Any, progress: bool, options: dict[str, Any]
) -> list[Answer]:
    """Add all `prompts` and step until they have their answers; aborts them if it cannot."""
    if isinstance(prompts, (str, bytes, Mapping, Set)) or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts = {prompts!r}: a list of prompts is needed")
    given, each = list(prompts), isinstance(most, (Sequence, np.ndarray))
    counts = list(most) if each and not isinstance(most, str) else [most] * len(given)
    if len(counts) != len(given):
        raise ValueError(f"max_new_tokens: {len(counts)} numbers for {len(given)} prompts")
    names: list[Hashable] = []
    try:
        for place, prompt in enumerate(given):
            try:
                names.append(engine.add_request(prompt, counts[place], **options))
            except ValueError as error:
                error.args = (f"prompts[{place}]: {error}",)
                raise
        return collect(engine, names, progress)
    except BaseException:
        for name in names:
            engine.abort(name)
        raise


def collect(engine: Engine, names: Sequence[Hashable], progress: bool) -> list[Answer]:
    """Step until all of `names` have their answers; what belongs to others waits for `step`."""
    answers: dict[Hashable, Answer] = {}
    box: deque[Delta] = deque()
    bar: Any = transformers.utils.logging.tqdm(total=len(names)) if progress else None
    engine.mail |= dict.fromkeys(names, box)
    try:
        while len(answers) < len(names):
            turn_over(engine)
            new = [piece.answer for piece in box if piece.answer is not None]
            box.clear()
            answers |= {answer.request_id: answer for answer in new}
            if bar is not None:
                bar.update(len(new))
    finally:
        for name in names:
            del engine.mail[name]
        if bar is not None:
            bar.close()
    return [answers[name] for name in names]
