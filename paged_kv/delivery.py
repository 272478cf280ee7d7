# Exported from book/13_engine.py by tools/export.py; edit the chapter, not this file.
"""When a step's tokens are there: commit them, spell them, end what has come to its end."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_kv.answers import Answer, Delta, Job, Text, TextStream
from paged_kv.beams import BeamSearch
from paged_kv.chooser import Chooser, Pending, choose_beams
from paged_kv.request import Ints, Output
from paged_kv.scheduler import Scheduler
from paged_kv.step_plan import StepPlan


@dataclass
class Desk:
    """Who is being served, and by whom.

    State: `scheduler`, `chooser`, `tokenizer`; `jobs`, what is known of each living request
    beside the scheduler; `tokens_made`, sampled and kept since the start.
    """

    scheduler: Scheduler
    chooser: Chooser
    tokenizer: Any
    jobs: dict[Hashable, Job] = field(default_factory=dict)
    tokens_made: int = 0

    def alive(self, plan: StepPlan) -> NDArray[np.bool_]:
        """Which samples of `plan` have a row with the tenant that they were drawn for."""
        serials = self.scheduler.home.rows.serial[plan.sample_rows]
        return np.asarray(serials == plan.sample_serials)

    def end(self, job: Job, reason: str) -> None:
        """End the request of `job` with what it has; its Output waits to be taken."""
        output = self.scheduler.finish(job.id, reason)
        if output is not None:
            self.scheduler.ledger.outputs.append(output)


def deliver(desk: Desk, pending: Pending) -> list[Delta]:
    """Take in the tokens of the oldest step: commit them, spell them, end what has ended."""
    plan, tokens = pending.plan, pending.read()
    refuse_nan(desk, pending, tokens)
    parents = choose_beams(pending, tokens, desk.alive(plan)) if plan.beams else None
    outputs = desk.scheduler.commit(plan, np.maximum(tokens, 0), parents)
    rows, kept = desk.scheduler.accepted
    desk.tokens_made += len(rows)
    places = list(range(len(rows)))
    if len(rows) < len(pending.owners):
        places = np.isin(plan.sample_rows, rows).nonzero()[0].tolist()
    note_logprobs(pending, places)
    owners = [pending.owners[place] for place in places]
    pieces = spell(desk, rows.tolist(), owners, kept.tolist())
    for name, _ in plan.beams:
        job = desk.jobs.get(name)
        if job is not None and job.search is not None and job.search.done:
            desk.end(job, "stop")
    return close_all(desk, outputs + desk.scheduler.take_outputs(), pieces)


def refuse_nan(desk: Desk, pending: Pending, tokens: Ints) -> None:
    """End requests whose logits are no numbers, and see that nobody finds their K/V.

    A block that others hold stays findable: it is as good or bad as they will turn out to be.
    """
    bad = ((tokens < 0) & desk.alive(pending.plan)).nonzero()[0].tolist()
    scheduler = desk.scheduler
    for job in dict.fromkeys(pending.owners[place][0] for place in bad):
        if scheduler.cache is not None:
            rows = scheduler.ledger.rows_of(scheduler.ledger.groups[job.id])
            table = scheduler.manager.tables.table[rows]
            ids, times = np.unique(table[table >= 0], return_counts=True)
            scheduler.cache.forget(ids[scheduler.manager.pool.ref_count[ids] == times])
        desk.end(job, "error: the model's logits are not numbers")


def note_logprobs(pending: Pending, places: Sequence[int]) -> None:
    """Keep the log-probabilities of the tokens that were taken, for those who asked."""
    drawn = pending.drawn
    if drawn.logprobs is None:
        return
    own, tops, ids = drawn.logprobs.tolist(), None, None
    if drawn.top_logprobs is not None and drawn.top_ids is not None:
        tops, ids = drawn.top_logprobs.tolist(), drawn.top_ids.tolist()
    for place in places:
        job, index = pending.owners[place]
        if (k := job.sampling.logprobs) is None:
            continue
        job.logprobs.setdefault(index, []).append(own[place])
        if k and tops is not None and ids is not None:
            pairs = zip(ids[place][:k], tops[place][:k], strict=True)
            job.tops.setdefault(index, []).append(dict(pairs))


def spell(
    desk: Desk, rows: list[int], owners: list[tuple[Job, int]], tokens: list[int]
) -> dict[Hashable, list[Delta]]:
    """The pieces of a step, by request; samples that have said a stop string end here."""
    pieces: dict[Hashable, list[Delta]] = {}
    stopped, several, ledger = list[int](), dict[Job, None](), desk.scheduler.ledger
    for row, (job, index), token in zip(rows, owners, tokens, strict=True):
        if job.search is not None:
            continue
        text = "" if desk.tokenizer is None else push_token(desk, job, index, token)
        if text is None or (job.stop and job.streams[index].stopped):
            stopped.append(row)
        pieces.setdefault(job.id, []).append(Delta(job.id, index, (token,), text or ""))
        if job.several:
            several[job] = None
    stopped = [row for row in stopped if row in ledger.rows.group]
    if stopped:
        ledger.end_rows(np.array(stopped), "stop", desk.scheduler.now())
    for job in several:
        tell_ends(desk, job, pieces[job.id])
    return pieces


def push_token(desk: Desk, job: Job, index: int, token: int) -> str | None:
    """The text that a token makes certain; None where the tokenizer fails, which ends the job."""
    if index not in job.streams:
        job.streams[index] = TextStream(desk.tokenizer.backend_tokenizer, job.stop)
    try:
        return job.streams[index].push(token)
    except Exception as error:  # a tokenizer of somebody else's, on tokens that it never made
        desk.end(job, f"error: the tokenizer failed: {error}")
        return None


def tell_ends(desk: Desk, job: Job, pieces: list[Delta]) -> None:
    """Give the last piece of each sample that has ended before its request its reason."""
    group = desk.scheduler.ledger.groups.get(job.id)
    for place, piece in enumerate(pieces if group is not None else ()):
        assert group is not None
        reason = group.samples[piece.index].finish_reason
        if reason is not None:
            stream = job.streams.get(piece.index)
            rest = "" if stream is None else stream.flush()
            pieces[place] = replace(piece, text=piece.text + rest, finish_reason=reason)
            job.told.add(piece.index)


def close_all(
    desk: Desk, outputs: Sequence[Output], pieces: dict[Hashable, list[Delta]]
) -> list[Delta]:
    """All pieces of a step; those of requests that have ended with their reasons and answers."""
    for output in outputs:
        job = desk.jobs.pop(output.request_id)
        answer = make_answer(output, job, desk.tokenizer)
        mine = {piece.index: piece for piece in pieces.get(output.request_id, ())}
        for text in answer.texts:
            if text.index in job.told:
                continue
            stream = job.streams.get(text.index)
            rest = "" if stream is None else stream.flush()
            piece = mine.get(text.index, Delta(output.request_id, text.index, (), ""))
            if job.search is not None:
                piece, rest = replace(piece, token_ids=tuple(text.token_ids)), text.text
            mine[text.index] = replace(
                piece, text=piece.text + rest, finish_reason=text.finish_reason
            )
        *others, last = mine.values()
        pieces[output.request_id] = [*others, replace(last, answer=answer)]
    return [piece for each in pieces.values() for piece in each]


def make_answer(output: Output, job: Job, tokenizer: Any) -> Answer:
    """What the scheduler, the search and the spelling know of a request, together."""
    texts = sample_texts(output, job)
    if job.search is not None:
        texts = beam_texts(output, job.search, tokenizer)
    times = output.arrival, output.first_token_at, output.finished_at
    counts = output.hit_tokens, output.preemptions
    return Answer(output.request_id, job.prompt, tuple(texts), *times, *counts)


def sample_texts(output: Output, job: Job) -> list[Text]:
    """The samples, with the text that their streams gave out or still hold back."""
    texts = []
    for one in output.completions:
        text, reason, stream = "", one.finish_reason, job.streams.get(one.index)
        if stream is not None:
            text = stream.text + stream.held
            reason = "stop" if stream.stopped else reason
        logprobs, tops = job.logprobs.get(one.index), job.tops.get(one.index)
        texts.append(Text(one.index, one.token_ids, text, reason, logprobs, tops))
    return texts


def beam_texts(output: Output, search: BeamSearch, tokenizer: Any) -> list[Text]:
    """The best texts of a beam search; of one that was cut short, those that it had begun."""
    reasons = [output.completions[0].finish_reason] * search.num_beams
    found = [(one.ids, one.score) for one in search.finished]
    if search.done:
        stopped = [ids[-1] in search.stop_ids for ids, _ in found]
        reasons = ["stop" if stop else "length" for stop in stopped]
    elif not found:
        begun = zip(search.texts, search.scores.tolist(), strict=True)
        penalty = search.length_penalty
        found = [(ids, score / max(1, len(ids)) ** penalty) for ids, score in begun]
    texts = []
    for rank, ((ids, score), reason) in enumerate(zip(found, reasons, strict=False)):
        text = "" if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=True)
        texts.append(Text(rank, ids, text, reason, score=score))
    return texts
