"""What the time to the first token tells about other people's prompts, with and without a salt.

    python benchmarks/timing_channel.py

A victim sends a form; an attacker knows the form and not how it was filled in, and asks for one block after
the other with each possible answer.  SmolLM2-135M-Instruct on one CPU thread.  The clock is the processor
time of that thread, from the admission of a prompt to its first token, so that other programs on the machine
do not count.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import write_result
from paged_kv.block_manager import BlockManager
from paged_kv.prefix_cache import PrefixCache, admit_cached, give_back, publish_full

BLOCK_SIZE, NUM_BLOCKS, TRIALS, RESAMPLES = 16, 256, 12, 2000
OPENING = "You are a careful assistant of a clinic. Answer questions about the form below, and about nothing else."
FIELDS = (
    ("Patient: ", ("Ada", "Blaise", "Carl", "Dorothy", "Emmy", "Felix", "Grace", "Henri")),
    ("Seen by the department of ", (
        "cardiology", "dermatology", "neurology", "oncology", "urology", "surgery", "radiology", "psychiatry",
    )),
    ("Prescribed: ", ("aspirin", "insulin", "statins", "lithium", "codeine", "nothing", "iron", "antibiotics")),
    ("Next appointment: ", ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "never", "open")),
)  # fmt: skip


# ------------------------------------------------------------------------------------------ the form


@dataclass(frozen=True)
class Form:
    """Token ids: an opening of whole blocks, and for each field one block an option."""

    opening: list[int]
    options: list[list[list[int]]]
    end: int  # one token more, so that the last full block can be found

    def filled(self, answers: Sequence[int]) -> list[int]:
        """The opening and the first len(answers) fields, filled in so."""
        blocks = [self.options[field][answer] for field, answer in enumerate(answers)]
        return self.opening + [token for block in blocks for token in block]


def make_form(tokenizer: Any, block_size: int = BLOCK_SIZE) -> Form:
    """The form in tokens, every part padded with dots to whole blocks."""
    dot = tokenizer.encode(" .")[0]

    def blocks(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text)
        return ids + [dot] * (-len(ids) % block_size)

    options = [[blocks(f"{label}{option}.") for option in each] for label, each in FIELDS]
    assert all(len(block) == block_size for field in options for block in field)
    return Form(blocks(OPENING), options, tokenizer.encode(" Yes")[0])


# ------------------------------------------------------------------------------------------ the service


@dataclass(frozen=True)
class Answer:
    """What it took to answer: prompt tokens computed, and processor time, 0 without a model."""

    computed: int
    seconds: float


class Service:
    """One pool and one prefix cache for all users; with `guest` it also runs the model.

    `salted`: every user's keys begin with the user's own salt.
    """

    def __init__(self, salted: bool, guest: Any = None) -> None:
        self.salted, self.guest = salted, guest
        self.manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE, 4, 1024)
        self.cache = PrefixCache(self.manager.pool, BLOCK_SIZE)

    def ask(self, user: str, tokens: list[int]) -> Answer:
        """Compute the first token for a prompt; the prompt's full blocks stay findable."""
        root = self.cache.root((("salt", user),)) if self.salted else b""
        start = time.thread_time()
        row, found = admit_cached(self.manager, self.cache, tokens, root)
        if self.guest is not None:
            self._first_token(row, tokens[found:])
        seconds = time.thread_time() - start
        publish_full(self.manager, self.cache, row, tokens, 0, root)
        give_back(self.manager, row)
        return Answer(len(tokens) - found, seconds if self.guest is not None else 0.0)

    def _first_token(self, row: int, tokens: list[int]) -> int:
        from paged_kv.packed_batch import pack

        batch = pack(self.manager.tables, [row], [tokens], self.guest.model.device)
        return int(self.guest.forward(batch).argmax(-1))


def probe(service: Service, form: Form, known: Sequence[int], order: Sequence[int]) -> dict[int, Answer]:
    """Ask for every option of the next field behind the answers `known`, in this order."""
    field, prefix = len(known), form.filled(known)
    service.ask("attacker", [*prefix, form.end])  # what is known is computed once, whoever's it is
    return {
        option: service.ask("attacker", [*prefix, *form.options[field][option], form.end])
        for option in order
    }  # fmt: skip


# ------------------------------------------------------------------------------------------ statistics


def auc(low: Sequence[float], high: Sequence[float]) -> float:
    """Chance that a value of `low` is below one of `high`, ties half: Mann and Whitney's U over n x m."""
    ordered = sorted([(value, 0) for value in low] + [(value, 1) for value in high])
    total, below, index = 0.0, 0, 0
    while index < len(ordered):
        end = index
        while end < len(ordered) and ordered[end][0] == ordered[index][0]:
            end += 1
        lows = sum(1 - side for _, side in ordered[index:end])
        total += (end - index - lows) * (below + lows / 2)
        below += lows
        index = end
    return total / (len(low) * len(high))


def auc_interval(groups: Sequence[tuple[Sequence[float], Sequence[float]]], seed: int = 0) -> tuple[float, float]:
    """95 % bootstrap interval of the AUC; `groups`, one a trial, are drawn as wholes."""
    rng = random.Random(seed)
    found = []
    for _ in range(RESAMPLES):
        drawn = rng.choices(groups, k=len(groups))
        found.append(auc([v for low, _ in drawn for v in low], [v for _, high in drawn for v in high]))
    found.sort()
    return found[round(0.025 * RESAMPLES)], found[round(0.975 * RESAMPLES) - 1]


def share_interval(successes: int, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    z, p = 1.96, successes / n
    middle, half = p + z * z / (2 * n), z * (p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5
    return (middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)


# ------------------------------------------------------------------------------------------ main


def trial(guest: Any, form: Form, salted: bool, rng: random.Random) -> dict[str, Any]:
    """A fresh service, a victim, and a probe of every field behind the true answers before it."""
    service = Service(salted, guest)
    secret = [rng.randrange(len(options)) for options in form.options]
    service.ask("victim", [*form.filled(secret), form.end])
    right, wrong, recovered, computed = [], [], 0, set()
    for field, answer in enumerate(secret):
        order = rng.sample(range(len(form.options[field])), len(form.options[field]))
        answers = probe(service, form, secret[:field], order)
        times = {option: 1000 * reply.seconds for option, reply in answers.items()}
        right.append(times[answer])
        wrong += [ms for option, ms in times.items() if option != answer]
        recovered += min(times, key=times.__getitem__) == answer
        computed |= {(option == answer, reply.computed) for option, reply in answers.items()}
    return {"right": right, "wrong": wrong, "recovered": recovered, "computed": sorted(computed)}


def summary(salted: bool, trials: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of the result."""
    right = [ms for each in trials for ms in each["right"]]
    wrong = [ms for each in trials for ms in each["wrong"]]
    recovered, fields = sum(each["recovered"] for each in trials), len(right)
    low, high = auc_interval([(each["right"], each["wrong"]) for each in trials])
    share = share_interval(recovered, fields)
    return {
        "salted": salted,
        "right_ms": [round(ms, 2) for ms in right],
        "wrong_ms": [round(ms, 2) for ms in wrong],
        "median_right_ms": round(statistics.median(right), 1),
        "median_wrong_ms": round(statistics.median(wrong), 1),
        "auc": round(auc(right, wrong), 3),
        "auc_95": [round(low, 3), round(high, 3)],
        "recovered": recovered,
        "fields": fields,
        "recovered_share_95": [round(100 * bound, 1) for bound in share],
        "computed_right": sorted({n for each in trials for is_right, n in each["computed"] if is_right}),
        "computed_wrong": sorted({n for each in trials for is_right, n in each["computed"] if not is_right}),
    }


def main() -> None:
    """Run both services in turns, print and write the result."""
    import torch

    from paged_kv.hf_adapter import host, load_guest

    torch.set_num_threads(1)
    model, tokenizer = load_guest()
    guest, form, rng = host(model, NUM_BLOCKS, BLOCK_SIZE), make_form(tokenizer), random.Random(0)
    trials: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for number in range(TRIALS + 1):
        for salted, done in trials.items():
            done.append(trial(guest, form, salted, rng))
        print(f"trial {number}", {salted: done[-1]["recovered"] for salted, done in trials.items()}, flush=True)
    rows = [summary(salted, done[1:]) for salted, done in trials.items()]  # the first warms up
    for row in rows:
        print({name: value for name, value in row.items() if name not in ("right_ms", "wrong_ms")})
    path = write_result(
        "timing_channel",
        modules=["block_pool", "block_manager", "prefix_keys", "prefix_cache"],
        workload=f"SmolLM2-135M-Instruct, float32, one thread; {len(FIELDS)} fields of one {BLOCK_SIZE}-token block "
        f"with 8 options each behind an opening of {len(form.opening)} tokens; one probe an option and trial",
        repeats=TRIALS,
        statistic="processor time of the thread to the first token, ms; AUC of right against wrong guesses "
        "(Mann-Whitney) with a bootstrap interval over trials; share of fields recovered with Wilson's interval",
        rows=rows,
        headline={
            "auc_unsalted": rows[0]["auc"],
            "auc_salted": rows[1]["auc"],
            "recovered_unsalted": rows[0]["recovered"],
            "recovered_salted": rows[1]["recovered"],
            "fields": rows[0]["fields"],
        },
        packages=("numpy", "torch", "transformers"),
    )
    print(path)


if __name__ == "__main__":
    main()
