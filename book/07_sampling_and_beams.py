# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Sampling and beams
#
# Someone wants four answers to one question, to pick the best. The plain way is to ask four times. The
# question here has 100 tokens, and the pool has 24 blocks of 16.

# %%
import warnings

warnings.filterwarnings("ignore", message="IProgress not found")  # we show no progress bars
from paged_kv.block_manager import BlockManager
from paged_kv.block_pool import OutOfBlocks

naive = BlockManager(num_blocks=24, block_size=16, max_seqs=4, max_seq_len=256)
try:
    for answer in range(4):
        naive.add(100)
except OutOfBlocks as error:
    print(f"{answer} answers begun, then {error}")
print("prompt tokens computed so far:", int(naive.tables.seq_lens[:3].sum()))

# %% [markdown]
# Three copies of one question fill the pool, the fourth answer has to wait, and 300 tokens were computed
# of which 200 were computed already. **The question.** What do several answers to one question
# have to store and compute apart, and can they still be what each would have been alone?
#
# :::{card} This chapter
# - **You need**: chapters 5 and 6. To run it: `make model` once.
# - **Exports**: `sampling` (`SamplingParams`, `sample`, `prefill`, `decode`, `parallel_sample`),
#   `beams` (`BeamSearch`, `place_children`, `run_beams`).
# - **Device**: CPU, one thread, float32.
# - **Run time**: about a minute, half of it for the reference that we compare with.
# - **You are here**: 00 tour · 01 sizing · 02 contiguous pool · 03 block manager · 04 paged
#   attention · 05 guest model · 06 copy-on-write · **07 sampling** · 08 prefix cache · 09
#   scheduling · 10 preemption · 11 decode kernel · 12 prefill kernel · 13 engine · 14 full speed
# :::
#
# There are two ways to want several texts. *Parallel sampling* draws each token at random, several times
# over, and the texts go their own ways from the first token on. *Beam search* looks for the likeliest
# text: it keeps the best $k$ beginnings, extends each, and keeps the best $k$ of all that result. Both fork;
# they differ in what happens afterwards.
#
# ## Choosing a token
#
# The model gives one number a token of the vocabulary, the *logits*. To draw from them is to turn them into
# probabilities and throw a die. Three knobs are common. The *temperature* divides the logits: below 1
# it favours the likely. *Top-k* keeps only the $k$ likeliest tokens, *top-p* only as many of the likeliest as
# together reach probability $p$.

# %% tags=["export:sampling"]
"""Choosing tokens at random, reproducibly, and several answers to one prompt that share it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from numbers import Real

import numpy as np
import torch
from torch import Tensor

from paged_kv.block_manager import BlockManager
from paged_kv.copy_on_write import fork_many, make_writable
from paged_kv.hf_adapter import PagedModel
from paged_kv.packed_batch import pack
from paged_kv.sizing import at_least


# %% tags=["export:sampling"]
@dataclass(frozen=True)
class SamplingParams:
    """How to choose a token from logits.

    Fields
        temperature  divides the logits: 1e-6 to 1e6, or 0 for the likeliest token.
        top_k        only the k likeliest tokens, 0 means all.
        top_p        only the likeliest tokens that together reach this probability, 1e-6 to 1.
        seed         of this sample alone.
    Raises: ValueError naming the field.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("top_k", "seed"):
            at_least(0, name, getattr(self, name))
        for name, least, most in (("temperature", 1e-6, 1e6), ("top_p", 1e-6, 1.0)):
            value = getattr(self, name)
            number = isinstance(value, Real) and not isinstance(value, bool)
            if not number or not (least <= value <= most or (name == "temperature" and value == 0)):
                zero = "0 or " if name == "temperature" else ""
                raise ValueError(f"{name} = {value!r}: {zero}{least:g} to {most:g} is needed")

# %% [markdown]
# For a batch, each row with knobs of its own, sorting does it all at once: with the likeliest token
# first, top-k cuts by place and top-p by the sum of what stands before.
#
# The die matters more than it seems. One random generator for the whole batch makes a text depend on who
# happens to be in the batch with it: when a neighbour finishes, all others draw different numbers.
# A generator for each text is better, but it is state, which has to be kept, moved and wound back
# together with the text. Here a draw is a *function*: of the seed and of how many tokens the text has
# chosen so far. Nothing is kept. A text that is interrupted and computed again (chapter 10) draws the same.

# %% tags=["export:sampling"]
def distribution(logits: Tensor, params: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
    """What each row may choose from: probabilities [n, vocab], likeliest first, and their ids.

    Args: `logits` [n, vocab]; `params`, one a row.  Tokens that are cut off have probability 0.
    """

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=logits.device)[:, None]

    temperature = column([one.temperature or 1.0 for one in params])
    size = logits.shape[1]
    most = column([min(one.top_k or size, size) if one.temperature else 1 for one in params])
    scores, ids = (logits.float() / temperature).sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    probs = scores.masked_fill(rank >= most, -torch.inf).softmax(-1)
    before = probs.cumsum(-1) - probs
    reach = column([one.top_p if one.top_p < 1 else torch.inf for one in params])
    probs = probs.masked_fill(before >= reach, 0)
    return probs / probs.sum(-1, keepdim=True), ids


def sample(logits: Tensor, params: Sequence[SamplingParams], steps: Sequence[int]) -> list[int]:
    """Choose one token a row; the draw depends on the row's seed and step, on nothing else.

    Args: `logits` [n, vocab]; `params`; `steps`, how many tokens each row has chosen before.
    """
    probs, ids = distribution(logits, params)
    seeds = zip(params, steps, strict=True)
    draws = [np.random.default_rng((one.seed, step)).random() for one, step in seeds]
    upto = probs.double().cumsum(-1)
    at = torch.tensor(draws, dtype=torch.float64, device=logits.device)[:, None] * upto[:, -1:]
    place = torch.searchsorted(upto, at, right=True)
    return ids.gather(1, place)[:, 0].tolist()

# %%
import torch

logits = torch.tensor([[2.0, 1.0, 0.5, 0.0]]).log_softmax(-1)
for one in (SamplingParams(), SamplingParams(temperature=0.5), SamplingParams(top_k=2),
            SamplingParams(top_p=0.8), SamplingParams(temperature=0)):
    probs, ids = distribution(logits, [one])
    draws = sample(logits.expand(1000, -1), [one] * 1000, range(1000))
    counts = [draws.count(token) for token in range(4)]
    shown = [round(p, 2) for p in probs[0].tolist()]
    print(f"T = {one.temperature}, k = {one.top_k}, p = {one.top_p}: {shown}, drawn {counts}")

# %% [markdown]
# In the last row the temperature is 0, which is taken to mean "always the likeliest". The same draw comes
# out whatever the company:

# %%
generator = torch.Generator().manual_seed(0)
many = torch.randn(5, 50, generator=generator)
params = [SamplingParams(temperature=0.8, seed=seed) for seed in range(5)]
together = sample(many, params, [7] * 5)
alone = [sample(many[i : i + 1], [params[i]], [7])[0] for i in range(5)]
backwards = sample(many.flip(0), params[::-1], [7] * 5)[::-1]
print(together == alone == backwards, together)

# %% [markdown]
# ## One prompt, many samples
#
# Two functions stand between the tables and the model. `prefill` runs prompts, `decode` puts one token behind each
# of some rows. The second is where chapter 6 comes in: make the tails writable, append, copy the
# blocks, and only then let the model write.

# %% tags=["export:sampling"]
def prefill(
    guest: PagedModel, manager: BlockManager, prompts: Sequence[Sequence[int]]
) -> tuple[list[int], Tensor]:
    """Run some prompts as one packed batch.

    Returns: a new row for each; the logits behind its last token, [n, vocab].
    Raises, with nothing changed: OutOfBlocks; ValueError for a prompt or a row that cannot be.
    """
    if not all(len(prompt) for prompt in prompts):
        raise ValueError("prompts: one is empty")
    rows: list[int] = []
    try:
        for prompt in prompts:
            rows.append(manager.add(len(prompt)))
        return rows, guest.forward(pack(manager.tables, rows, prompts, guest.model.device))
    except Exception:
        for row in rows:
            manager.finish(row)
        raise


def decode(
    guest: PagedModel, manager: BlockManager, rows: Sequence[int], tokens: Sequence[int]
) -> Tensor:
    """Put one token behind each of `rows`, which may share blocks, and run them.

    Returns: logits [n, vocab].  Raises: OutOfBlocks, with nothing changed.
    """
    copies = make_writable(manager, rows)
    manager.append(rows)
    guest.store.copy_blocks(copies)
    batch = pack(manager.tables, rows, [[token] for token in tokens], guest.model.device)
    return guest.forward(batch)

# %% [markdown]
# The sampling loop then has little to do. The prompt is run once, by one row. The others fork from it,
# and *all* of them draw their first token from the same logits. From then on they are ordinary rows of a
# batch; the first writes make copies of the prompt's last block, if it is partly filled. Whoever
# finishes gives back what nobody else holds.

# %% tags=["export:sampling"]
@dataclass
class Samples:
    """Where `parallel_sample` stands: running samples (index -> row), and all outputs."""

    running: dict[int, int]
    output: list[list[int]]


# %% tags=["export:sampling"]
def parallel_sample(
    guest: PagedModel,
    manager: BlockManager,
    prompt: Sequence[int],
    params: Sequence[SamplingParams],
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
) -> Iterator[Samples]:
    """Several answers to one prompt, which is computed once and stored once.

    Yields the same Samples after every step, before those that have finished leave.
    Raises: OutOfBlocks; all rows are given back, however it ends.
    """
    if not params:
        raise ValueError("params: one a sample is needed")
    (root,), logits = prefill(guest, manager, [prompt])
    state = Samples({0: root}, [[] for _ in params])
    try:
        state.running.update(enumerate(fork_many(manager, [root] * (len(params) - 1)), 1))
        logits = logits.expand(len(params), -1)
        while state.running:
            chosen = [params[i] for i in state.running]
            tokens = sample(logits, chosen, [len(state.output[i]) for i in state.running])
            for i, token in zip(state.running, tokens, strict=True):
                state.output[i].append(token)
            yield state
            for i, token in zip(list(state.running), tokens, strict=True):
                if len(state.output[i]) == max_new_tokens or token in stop_ids:
                    manager.finish(state.running.pop(i))
            if state.running:
                last = [state.output[i][-1] for i in state.running]
                logits = decode(guest, manager, list(state.running.values()), last)
    finally:
        for row in state.running.values():
            manager.finish(row)

# %% tags=["hide-input"]
from paged_kv.hf_adapter import host, load_guest

model, tokenizer = load_guest()
guest = host(model, num_blocks=120, block_size=16)


def chat(question):
    """The token ids of a chat that begins with `question`."""
    messages = [{"role": "user", "content": question}]
    form = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return form["input_ids"]


# %%
prompt = chat(
    "A friend of mine is going to open a small bakery in the old harbour, next to the fish market, "
    "and wants to sell bread, cakes and coffee from six in the morning. Suggest a name for it."
)
print(len(prompt), "tokens in the prompt,", len(prompt) % 16, "of them in the last block")

# %% [markdown]
# :::{admonition} Predict
# :class: tip
# Four samples of 16 tokens each from a prompt of that length. How many blocks does the prompt take? How many copies
# are made, and when? How many tokens does the model compute in all, and how many if each sample ran alone?
# :::
#
# :::{dropdown} Reasoning
# The prompt is stored once. The first step that writes finds its last block partly filled with four holders, of
# whom all write: three copies, then none any more. A sample of 16 tokens feeds back 15 of them, so the model computes the prompt
# and 15 tokens for each, 133 in all, against four prompts and the same 60, 352.
# :::

# %% tags=["hide-input"]
from collections import Counter
from contextlib import contextmanager

from paged_kv.copy_on_write import blocks_held
from paged_kv.sizing import blocks_for


@contextmanager
def counting(store):
    """Within it, a Counter of the blocks that `store` copies."""
    work, plain_copy = Counter(), store.copy_blocks
    store.copy_blocks = lambda pairs: (work.update(copies=len(pairs)), plain_copy(pairs))
    try:
        yield work
    finally:
        store.copy_blocks = plain_copy


# %%
manager = BlockManager(num_blocks=120, block_size=16, max_seqs=32, max_seq_len=256)
params = [SamplingParams(temperature=0.9, top_p=0.95, seed=seed) for seed in range(4)]
stop_ids, held, apart = {tokenizer.eos_token_id}, [], []
with counting(guest.store) as work:
    for state in parallel_sample(guest, manager, prompt, params, 16, stop_ids):
        rows = list(state.running.values())
        held.append(len(blocks_held(manager, rows)))
        apart.append(sum(blocks_for(int(n), 16) for n in manager.tables.seq_lens[rows]))
manager.check()

# %%
print("blocks held:", held[0], "after the prompt,", max(held), "at most; apart:", max(apart))
print("copies:", work["copies"], " all free again:", manager.pool.num_free == 120)
fed = sum(len(ids) - 1 for ids in state.output)
print(f"tokens computed: {len(prompt) + fed}; apart: {4 * len(prompt) + fed}")
for ids in state.output:
    print("-", " ".join(tokenizer.decode(ids).split()))

# %% [markdown]
# **Turn the knob.** Draw eight samples, `range(8)`; expect seven copies, the same five blocks after the
# prompt, and the first four texts as they were. One of the new ones is short, and its blocks come back
# before the others are done.
#
# Is each what it would have been alone? The reference shares nothing with ours but the die: it runs each
# sample by itself, with the cache of transformers.

# %% tags=["hide-input"]
import transformers

warnings.filterwarnings("ignore", message=".past_key_values. is deprecated")
transformers.utils.logging.set_verbosity_error()  # its releases disagree on that name


@torch.inference_mode()
def sample_alone(model, prompt, one, count):
    """One sample by transformers' own cache."""
    output, ids, cache = [], torch.tensor([prompt]), None
    while len(output) < count and not (output and output[-1] in stop_ids):
        result = model(ids, past_key_values=cache, use_cache=True)
        output += sample(result.logits[:, -1], [one], [len(output)])
        ids, cache = torch.tensor([output[-1:]]), result.past_key_values
    return output


# %%
alone = [sample_alone(model, prompt, one, 16) for one in params]
print("equal to four independent runs:", state.output == alone)
print("tokens compared:", sum(len(ids) for ids in alone))

# %% [markdown]
# Equal, token by token. This is not a law: the model's logits for a row differ in their last bits with the batch
# around it, and a die that falls on the very edge between two tokens may go the other way. The chance of it
# is about the size of that noise: small a token, not zero over many.
#
# Memory over the steps, ours and apart:

# %% tags=["hide-input"]
import matplotlib.pyplot as plt

from paged_kv.draw import book_style

book_style()
fig, ax = plt.subplots(figsize=(6.4, 3.2))
ax.step(range(1, len(held) + 1), apart, where="mid", label="apart")
ax.step(range(1, len(held) + 1), held, where="mid", label="forked")
ax.set(xlabel="step", ylabel="blocks held", ylim=(0, None))
ax.legend()
plt.show()
print("apart ", *apart)
print("forked", *held)

# %% [markdown]
# *Figure: blocks held by four samples of one prompt against the step. Apart they begin with four prompts;
# forked they begin with one, and grow by the same blocks.*
#
# A fork itself is bookkeeping of some tens of microseconds, and its cost hides no long tail: it takes no
# lock and no block. The numbers are from the benchmark of chapter 6.

# %% tags=["hide-input"]
import json

result = json.load(open("../benchmarks/results/copy_on_write.json"))
latency = {name: value for name, value in result["headline"].items() if name.startswith("fork_")}
print("measured:", result["device"])
print("measured: one fork of a 2,010-token row, us:", latency)

# %% [markdown]
# ## Keeping the best
#
# Beam search wants the likeliest text. To take the likeliest token at each step, *greedy* decoding, is not it:
# a good beginning may lead nowhere. In the small language below, "the" can be followed by "cat" or by "dog". The
# cat is likelier, but nobody knows what cats do.

# %%
words = ["cat", "dog", "sat", "ran", "slept", "barked", "."]
follows = {
    "": {"cat": 0.6, "dog": 0.4},
    "cat": {"sat": 0.35, "ran": 0.3, "slept": 0.25, ".": 0.1},
    "dog": {"barked": 0.9, ".": 0.1},
}
print(f"greedy: the cat sat, {0.6 * 0.35:.2f}; but the dog barked: {0.4 * 0.9:.2f}")


# %% tags=["hide-input"]
def next_log_probs(texts):
    """The language's verdict on the next word of each text, as a model would give it."""
    table = torch.full((len(texts), len(words)), 1e-6)
    for row, text in enumerate(texts):
        last = words[text[-1]] if text else ""
        for word, p in follows.get(last, {".": 1.0}).items():
            table[row, words.index(word)] = p
    return table.log()


# %% [markdown]
# With $k$ beams, both beginnings live on and the second step decides. The rules are few:
#
# 1. The score of a text is its log-probability, the sum over its tokens. Candidates are all one-token
#    extensions of all $k$ beams, best first.
# 2. The first $k$ candidates that go on are the next beams.
# 3. A candidate that ends (with a stop token, or because it is long enough) is *finished*, if it is among
#    the first $k$. Its score is divided by length to the power of the *length penalty*, since a sum of
#    logarithms only falls as a text gets longer. The best $k$ finished texts are kept.
# 4. The search is over when $k$ texts have finished and no running one can do better. What "can" means is the
#    matter of `early_stopping`.
#
# The class knows nothing of blocks. Its answer to each step is a list of parents.

# %% tags=["export:beams"]
"""Beam search: which texts to keep, and the block tables that follow them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from paged_kv.block_manager import BlockManager
from paged_kv.copy_on_write import fork_many, rewire
from paged_kv.hf_adapter import PagedModel
from paged_kv.sizing import at_least


@dataclass(frozen=True)
class Hypothesis:
    """A finished text: its generated ids, and its log-probability over length ** penalty."""

    ids: list[int]
    score: float

# %% tags=["export:beams"]
class BeamSearch:
    """Ranks the continuations of one prompt: tokens and scores, no blocks.

    Args: `early_stopping`, when to stop once `num_beams` texts have finished: True at once;
    False when the best running beam, ending now, would be no better than the worst of them;
    "never" when it would not at full length.
    State
        texts     the ids of each running beam, best first.
        scores    float32 [num_beams]: their log-probabilities.
        finished  at most num_beams hypotheses, best first.
        done      whether the search has ended.
    Source of the rules: transformers/generation/utils.py, whose results it reproduces.
    """

    def __init__(
        self,
        num_beams: int,
        max_new_tokens: int,
        stop_ids: Collection[int] = (),
        length_penalty: float = 1.0,
        early_stopping: bool | Literal["never"] = False,
    ) -> None:
        self.num_beams = at_least(1, "num_beams", num_beams)
        self.max_new_tokens = at_least(1, "max_new_tokens", max_new_tokens)
        self.stop_ids = frozenset(stop_ids)
        self.length_penalty, self.early_stopping = length_penalty, early_stopping
        self.texts: list[list[int]] = [[] for _ in range(num_beams)]
        self.scores = torch.full((num_beams,), -torch.inf)
        self.scores[0] = 0.0  # all beams are one text at first: let it count once
        self.finished: list[Hypothesis] = []
        self.done = False

# %% tags=["export:beams"]
class BeamSearch(BeamSearch):  # type: ignore
    def advance(self, log_probs: Tensor) -> list[int]:
        """Extend each running beam by its likeliest tokens and keep the best texts.

        Args: `log_probs` [num_beams, vocab], those of the next token behind each of `texts`.
        Returns: for each beam that runs now, the beam that it comes from.
        """
        length, vocab = len(self.texts[0]) + 1, log_probs.shape[1]
        total = (log_probs.float() + self.scores.to(log_probs.device)[:, None]).flatten()
        enough = max(2, 1 + len(self.stop_ids)) * self.num_beams
        best, places = total.topk(min(enough, len(total)))
        running: list[tuple[float, int, list[int]]] = []
        ended: list[Hypothesis] = []
        candidates = zip(best.tolist(), places.tolist(), strict=True)
        for rank, (score, place) in enumerate(candidates):
            parent, token = divmod(place, vocab)
            text = [*self.texts[parent], token]
            if token not in self.stop_ids and length < self.max_new_tokens:
                running.append((score, parent, text))
            elif rank < self.num_beams:
                ended.append(Hypothesis(text, score / length**self.length_penalty))
        self._keep(ended)
        running = running[: self.num_beams]
        self.texts = [text for _, _, text in running]
        self.scores = torch.tensor([score for score, _, _ in running])
        self.done = not running or self._settled(length)
        return [parent for _, parent, _ in running]


# %% tags=["export:beams"]
class BeamSearch(BeamSearch):  # type: ignore
    def _keep(self, ended: list[Hypothesis]) -> None:
        """Take `ended` among the finished; the best num_beams of them stay."""
        if not (self.early_stopping is True and len(self.finished) == self.num_beams):
            ranked = sorted([*self.finished, *ended], key=lambda one: -one.score)
            self.finished = ranked[: self.num_beams]

    def _settled(self, length: int) -> bool:
        """Whether running beams, `length` tokens long, are taken to have no chance any more."""
        if len(self.finished) < self.num_beams:
            return False
        if self.early_stopping == "never" and self.length_penalty > 0:
            length = self.max_new_tokens
        hope = float(self.scores[0]) / length**self.length_penalty
        return self.early_stopping is True or hope <= self.finished[-1].score

# %%
search = BeamSearch(num_beams=2, max_new_tokens=4, stop_ids=[words.index(".")])
while not search.done:
    parents = search.advance(next_log_probs(search.texts))
    beams = [" ".join(words[token] for token in text) for text in search.texts]
    print("parents", parents, "beams", beams, "finished", len(search.finished))
for one in search.finished:
    print(f"{one.score:7.3f}", " ".join(words[token] for token in one.ids))

# %% [markdown]
# The second step's parents begin with beam 1: "dog", second at first, has overtaken. In the third, both good
# texts end, and what runs on is what is left, with odds of one in a million. Why are the first step's
# parents 0 and 0? All beams are the same text at the start, and if each counted, the best word would come out $k$ times. So
# all but one begin with a score of minus infinity.
#
# :::{admonition} Predict
# :class: tip
# Without a length penalty (0, the plain sum) would "dog ." have a better place among the finished?
# :::
#
# :::{dropdown} Reasoning
# "dog ." has the log-probability of 0.4 x 0.1 and two tokens, "dog barked ." that of 0.4 x 0.9 and
# three. Division by length only makes long texts better, and the long one is the likelier anyway. But a
# candidate must be among the first $k$ of its step to finish at all, and "dog ." is not: two better
# extensions go on. It never finishes, under any penalty.
# :::

# %%
for penalty in (0.0, 1.0, 2.0):
    search = BeamSearch(2, 4, [words.index(".")], length_penalty=penalty)
    while not search.done:
        search.advance(next_log_probs(search.texts))
    found = {" ".join(words[token] for token in one.ids): round(one.score, 3)
             for one in search.finished}
    print(f"penalty {penalty}: {found}")

# %% [markdown]
# **Turn the knob.** Search with one beam, `BeamSearch(1, 4, ...)`; expect greedy's text, "cat sat .", and no
# other. With four, the two likeliest stay in front, and "cat ran ." and "cat slept ." come behind them.
#
# ## Tables that follow the beams
#
# Each step yields parents, and the rows must follow. A beam with children hands its row to the first of them,
# which costs nothing at all. Other children need rows; there are exactly as many beams without children,
# and their rows are free for the taking.

# %% tags=["export:beams"]
def place_children(rows: Sequence[int], parents: Sequence[int]) -> list[int]:
    """A row for each child: a beam's first child keeps its row, others get rows of the childless.

    Args: `rows`, those of the beams; `parents`, for each child the beam that it comes from.
    """
    spare = [row for beam, row in enumerate(rows) if beam not in parents]
    first = {parent: child for child, parent in reversed(list(enumerate(parents)))}
    return [
        rows[parent] if first[parent] == child else spare.pop(0)
        for child, parent in enumerate(parents)
    ]

# %%
rows = [10, 11, 12, 13]
for parents in ([0, 1, 2, 3], [1, 0, 1, 1], [3, 3, 3, 3], [2, 1, 0, 3]):
    print("parents", parents, "-> rows", place_children(rows, parents))

# %% [markdown]
# In the last line beams merely change rank; each keeps its row, and nothing moves. `rewire` of chapter 6
# does the rest. Several searches run as one batch, one rewiring and one forward pass for all.

# %% tags=["export:beams"]
def run_beams(
    guest: PagedModel,
    manager: BlockManager,
    prompts: Sequence[Sequence[int]],
    searches: Sequence[BeamSearch],
) -> Iterator[dict[int, list[int]]]:
    """Run one search a prompt, all in one batch, until each is done.

    Yields, after every step, the rows of each search that runs on, best beam first; the same
    dict each time.  What was found stands in `searches`.
    Raises: OutOfBlocks; all rows are given back, however it ends.
    """
    if len(prompts) != len(searches):
        raise ValueError(f"searches: {len(searches)} for {len(prompts)} prompts")
    roots, logits = prefill(guest, manager, prompts)
    groups = {i: [root] for i, root in enumerate(roots)}
    try:
        for i, search in enumerate(searches):
            groups[i] += fork_many(manager, [roots[i]] * (search.num_beams - 1))
        logits = logits[[i for i, group in groups.items() for _ in group]]
        while True:
            step_beams(manager, groups, searches, logits.log_softmax(-1))
            yield groups
            if not groups:
                return
            rows = [row for group in groups.values() for row in group]
            tokens = [text[-1] for i in groups for text in searches[i].texts]
            logits = decode(guest, manager, rows, tokens)
    finally:
        for row in [row for group in groups.values() for row in group]:
            manager.finish(row)


# %% tags=["export:beams"]
def step_beams(
    manager: BlockManager,
    groups: dict[int, list[int]],
    searches: Sequence[BeamSearch],
    log_probs: Tensor,
) -> None:
    """Let each search choose, then rewire all tables at once.

    Changes `groups`: searches that are done leave it, and their blocks go back.
    """
    rows, sources, start = [], [], 0
    for i, group in list(groups.items()):
        parents = searches[i].advance(log_probs[start : start + len(group)])
        start += len(group)
        if searches[i].done:
            for row in groups.pop(i):
                manager.finish(row)
            continue
        groups[i] = place_children(group, parents)
        rows += groups[i]
        sources += [group[parent] for parent in parents]
    rewire(manager, rows, sources)

# %% [markdown]
# Before the first choice all rows of a search are forked from the prompt, though only one counts. It costs
# nothing, and from then on there are always $k$ rows and no special first step.
#
# Here is a tiny guest, so that the tables can be seen: two layers, random weights, blocks of four tokens and three beams
# for chat A.

# %% tags=["hide-input"]
from transformers import LlamaConfig, LlamaForCausalLM

from paged_kv.draw import draw_pool

torch.manual_seed(3)
tiny_config = LlamaConfig(
    vocab_size=61, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    initializer_range=0.3, bos_token_id=None, eos_token_id=None, pad_token_id=0,
)
tiny_model = LlamaForCausalLM(tiny_config).eval()
tiny = host(tiny_model, num_blocks=12, block_size=4)


def small_again():
    return BlockManager(num_blocks=12, block_size=4, max_seqs=4, max_seq_len=32)


# %%
small = small_again()
search = BeamSearch(num_beams=3, max_new_tokens=6)
shots = []
for groups in run_beams(tiny, small, [[5, 17, 60, 8, 33, 2]], [search]):
    if groups:
        shots.append(small.snapshot({f"beam {i}": row for i, row in enumerate(groups[0])}))
for number, shot in enumerate(shots, 1):
    print(f"step {number}:", *shot["tables"].values(), "counts", shot["ref_counts"])
draw_pool(shots[3], title="three beams over a prompt of six tokens, after step 4")

# %% [markdown]
# The prompt's first block has a count of 3 all the time and is never copied. After step 4, beams 0 and 2 share
# block 5 as well: they have a common ancestor that beam 1 does not have. The tables hold the family tree. In
# step 5 the former beam 1 takes the lead with two children, the former beam 2 has died out and its own block 8
# is free, and not a byte has moved.
#
# Now the real model, with five questions, four beams each, up to ten tokens, and the same from
# `generate` of transformers {cite}`wolf2020transformers`, question by question.

# %%
questions = [
    "What is the capital of France?",
    "Is fire hot? Answer yes or no.",
    "Name a colour.",
    "Say hello.",
    "What is 2 + 3? Answer with a number.",
]
prompts = [chat(question) for question in questions]

# %%
searches = [BeamSearch(4, 10, stop_ids) for _ in prompts]
groups_seen = [sum(len(g) for g in groups.values())
               for groups in run_beams(guest, manager, prompts, searches)]
manager.check()
print("beams after each step:", groups_seen, " all free again:", manager.pool.num_free == 120)
for question, search in zip(questions, searches):
    best = search.finished[0]
    print(f"{best.score:7.3f} {question} -> {tokenizer.decode(best.ids)}")


# %% tags=["hide-input"]
def by_transformers(model, prompt, num_beams, new_tokens, stop_ids, **options):
    """(ids, score) of each text that transformers' own beam search returns."""
    ids = torch.tensor([prompt])
    result = model.generate(
        ids, attention_mask=torch.ones_like(ids), num_beams=num_beams, do_sample=False,
        max_new_tokens=new_tokens, num_return_sequences=num_beams, eos_token_id=list(stop_ids),
        return_dict_in_generate=True, output_scores=True, **options,
    )
    texts = [text[len(prompt):] for text in result.sequences.tolist()]
    ends = [[text.index(token) + 1 for token in stop_ids if token in text] for text in texts]
    texts = [text[: min(end, default=None)] for text, end in zip(texts, ends)]
    return list(zip(texts, result.sequences_scores.tolist()))


# %%
equal, worst, early = 0, 0.0, 0
for prompt_ids, search in zip(prompts, searches):
    reference = by_transformers(model, prompt_ids, 4, 10, stop_ids)
    equal += [one.ids for one in search.finished] == [text for text, _ in reference]
    gaps = [abs(one.score - score) for one, (_, score) in zip(search.finished, reference)]
    worst = max(worst, *gaps)
    early += any(len(text) < 10 for text, _ in reference)
print(f"{equal} of {len(prompts)} searches equal in all four texts;",
      f"scores within 0.0001: {worst < 1e-4}; searches with a text that ended early: {early}")

# %% [markdown]
# All texts agree, and the scores to the fourth decimal. Two of the five searches finished a text before the
# last step, and still had to run on, since finished texts compete with running ones. The tests do the same
# for widths 2, 4 and 6.
#
# ## A spy on the store
#
# transformers keeps one cache entry for each beam and, in each step, reorders all of them. Ours claims to move
# nothing but partly filled tails. A claim about bytes can be checked: put a spy between the model and the
# store, which notes for each copy how full its source is, and for each write which slots.

# %% tags=["hide-input"]
import copy

from paged_kv.hf_adapter import guest_spec

spec = guest_spec(model)


class Spy:
    """Passes everything on to the store, and notes what moves."""

    def __init__(self, store, manager):
        self.store, self.manager, self.notes = store, manager, Counter()

    def __getattr__(self, name):
        return getattr(self.store, name)

    def write(self, layer, k, v, slot_mapping):
        self.notes["slots written"] += int((slot_mapping >= 0).sum())
        self.store.write(layer, k, v, slot_mapping)

    def copy_blocks(self, pairs):
        before = [tensor.clone() for tensor in self.store.tensors]
        lens, tables = self.manager.tables.seq_lens, self.manager.tables
        for _, destination in pairs:  # the writers of this step have their new token already
            row = np.flatnonzero((tables.table == destination).any(1))[0]
            filled = int(lens[row] - 1) % 16
            self.notes["copies of full blocks"] += filled == 0
            self.notes["copies of partly filled blocks"] += filled > 0
        self.store.copy_blocks(pairs)
        targets = [destination for _, destination in pairs]
        for old, new in zip(before, self.store.tensors):
            changed = (old != new) & ~(old.isnan() & new.isnan())
            touched = set(changed.flatten(1).any(1).nonzero().flatten().tolist())
            self.notes["other blocks touched"] += len(touched - set(targets))


# %% tags=["hide-input"]
def spied(num_beams, new_tokens):
    """The five searches under the spy: what moved, and the bytes."""
    spy = Spy(guest.store, manager)
    spy_guest = host_with(spy)
    searches = [BeamSearch(num_beams, new_tokens) for _ in prompts]
    computed = reorder = 0
    for groups in run_beams(spy_guest, manager, prompts, searches):
        lens = [int(manager.tables.seq_lens[row]) for rows in groups.values() for row in rows]
        computed, reorder = computed + len(lens), reorder + sum(lens)
    computed += sum(len(prompt) for prompt in prompts)
    return spy.notes, computed, reorder


def host_with(store):
    """The same guest over another store; the check at load is not run again."""
    other = copy.copy(guest)
    other.store = store
    return other


# %%
notes, computed, reorder = spied(4, 10)
copied = notes["copies of partly filled blocks"]
print(dict(notes))
print("writes are the new tokens only:", notes["slots written"] == computed * spec.num_layers)
print(f"copied: {copied} blocks, {copied * 16 * spec.bytes_per_token / 2**20:.1f} MiB")
print(f"reordering whole caches: {reorder * spec.bytes_per_token / 2**20:.1f} MiB")

# %% [markdown]
# No full block was copied, no block was touched that was not the destination of a copy, and what was written is
# exactly the new tokens, once a layer. The last line is what a cache that follows the beams by moving K/V
# would have moved in the same steps.
#
# ## When to stop
#
# `early_stopping` decides what the search may still hope for, and with the length penalty it can change the
# result. `True` stops when $k$ texts have finished, without asking whether a running one is better. `False`, the
# default, compares with the best running beam as if it ended now. `"never"` allows it its full length. The tiny
# guest, with every sixth token of its vocabulary a stop token, ends texts all the time.

# %%
settings = [(False, 1.0), (True, 1.0), ("never", 1.0), (True, 0.0), (True, 2.0), (False, 2.0)]
stops = range(2, 61, 6)
agree = 0
for stopping, penalty in settings:
    search = BeamSearch(4, 12, stops, length_penalty=penalty, early_stopping=stopping)
    steps = sum(1 for _ in run_beams(tiny, small_again(), [[5, 9, 33, 2]], [search]))
    options = {"early_stopping": stopping, "length_penalty": penalty}
    reference = by_transformers(tiny_model, [5, 9, 33, 2], 4, 12, stops, **options)
    agree += [one.ids for one in search.finished] == [text for text, _ in reference]
    lengths = [len(one.ids) for one in search.finished]
    print(f"{stopping!s:6} penalty {penalty}: {steps:2} steps, lengths {lengths}")
print(f"as transformers: {agree} of {len(settings)}")

# %% [markdown]
# A penalty of 0 keeps short texts, one of 2 long ones, if the search lasts until they have come: with `True` it does
# not. There is no right setting. What matters here is that ours means what the reference means.
#
# ## What beams share
#
# The paper measured how much memory sharing saves on the Alpaca data: blocks saved over blocks that would be held
# without sharing. For parallel sampling with 2, 4 and 6 outputs it found 6.09 %, 8.53 % and 9.79 %, for
# beam widths 2, 4 and 6 it found 37.56 %, 53.13 % and 55.16 % {cite}`kwon2023paged`.
#
# If a share $s$ of a sequence's blocks is common to all $n$, then of $n$ blocks there $n - 1$ are saved: the saving is
# $s (n - 1) / n$. From each published number follows an $s$.

# %% tags=["hide-input"]
published = {"samples": (6.09, 8.53, 9.79), "beams": (37.56, 53.13, 55.16)}
for kind, savings in published.items():
    shares = [saving * n / (n - 1) for saving, n in zip(savings, (2, 4, 6))]
    print(kind, "common to all:", ", ".join(f"{share:.1f} %" for share in shares))

# %% [markdown]
# The three for sampling agree, 12.2 %, 11.4 % and 11.7 %: what is common is the prompt, whatever $n$ is. Those for beams
# fall from 75.1 % to 66.2 %: the more beams, the further back lies their last common ancestor.
#
# :::{admonition} Predict
# :class: tip
# Our own count: 16 instructions with a mean of 14.1 tokens, answers of 58 tokens, blocks of 16, SmolLM2. Alpaca's prompts
# have a mean of 19.31. Will sampling save a quarter less than in the paper?
# :::
#
# :::{dropdown} Reasoning
# That does not follow. What samples share for good is whole blocks, so a prompt of 15 tokens shares nothing once its
# samples have written, and one of 16 shares a block. What counts is how many prompts fill a block, not their mean
# length. The cell below computes the saving from the lengths alone.
# :::

# %% tags=["hide-input"]
result = json.load(open("../benchmarks/results/sharing.json"))
print("measured:", result["workload"])
for row, samples, beams in zip(result["rows"], *published.values()):
    print(f"measured: width {row['width']}: samples save {row['samples']:.1f} % "
          f"(paper {samples} %), beams {row['beams']:.1f} % (paper {beams} %)")
lengths = result["prompt_tokens"]
print(f"prompts of 16 tokens or more: {sum(n >= 16 for n in lengths)} of {len(lengths)}")
common = sum(n // 16 for n in lengths) * 58
named = sum(blocks_for(n + step, 16) for n in lengths for step in range(58))
for row in result["rows"]:
    n = row["width"]
    print(f"from lengths alone, width {n}: {100 * common / named * (n - 1) / n:.1f} %")

# %% [markdown]
# For samples the lengths alone give 6.0 %, 9.0 % and 10.0 %; what is missing to the count is the tail, shared until the first write. Six of
# our 16 prompts fill a block, and that happens to come close to Alpaca's mixture. For beams the count depends on the
# model: how often its beams agree on a common past. Ours is far smaller than the paper's OPT-13B, and the texts are others,
# so that the numbers come close is no proof of anything; that they rise with the width, and flatten, is.
#
# What this does not show: the paper averages over a server under load, ours over the steps of searches that all run to
# the same length. And saved blocks are not saved time.
#
# ## Mistakes in circulation
#
# :::{admonition} Check it yourself
# :class: warning
# - Beam search is said to need ~~$k$ caches~~. It needs the blocks of a tree with $k$ leaves.
# - A seed is said to make a sample ~~reproducible~~. It does if the draw depends on the seed alone; with one
#   generator for the batch, a neighbour that finishes changes everybody's text.
# :::

# %% tags=["hide-input"]
shot = shots[-1]
named = sum(len(ids) for ids in shot["tables"].values())
print(f"three beams name {named} blocks and hold {shot['num_blocks'] - len(shot['free'])}")
generator = torch.Generator().manual_seed(0)
first = torch.multinomial(many.softmax(-1), 1, generator=generator).flatten().tolist()
generator = torch.Generator().manual_seed(0)
without = torch.multinomial(many[1:].softmax(-1), 1, generator=generator).flatten().tolist()
print("one generator for all, with and without the first row:", first[1:] == without)
five = [SamplingParams(temperature=0.8, seed=seed) for seed in range(5)]
print("one draw a seed and step:", sample(many[1:], five[1:], [7] * 4) == together[1:])

# %% [markdown]
# ## State card
#
# | name | state | invariants | what breaks next |
# |---|---|---|---|
# | `SamplingParams` | frozen | a draw is a function of seed and step | one draw a row on the host (chapter 14) |
# | `parallel_sample` | `Samples` | the prompt is computed once, stored once | two users with one prompt (chapter 8) |
# | `BeamSearch` | `texts`, `scores`, `finished` | texts and rows keep one order | - |
# | `run_beams` | rows of each search | $k$ rows a search, all given back | out of blocks ends the whole batch (chapter 10) |
#
# Both loops run until their own batch is done, and nobody else may join. Chapter 9 takes the loop away from them.
#
# ## Real world
#
# - vLLM runs parallel samples as requests of their own (`vllm/v1/engine/parallel_sampling.py`) that meet in
#   the prefix cache. Beam search has left its engine: it is a loop above it (the state in `vllm/beam_search.py`) which submits
#   each beam anew as a request of one token.
# - SGLang does the same for samples with its tree of prefixes (`python/sglang/srt/mem_cache/radix_cache.py`).
# - TensorRT-LLM has beam search on the GPU: context blocks are shared, and generated tokens are found through a
#   table of ancestors, so that not even tails are copied (`cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp`).
# - transformers reorders the whole cache in each step: `reorder_cache` in `cache_utils.py`.
#
# ## Exercises
#
# :::{exercise}
# :label: ex-07-compute
# **Compute.** Six samples of a prompt of 40 tokens with blocks of 16. How many blocks are held right after the fork, and
# how many after each has written one token? And for a prompt of 48 tokens?
# :::
#
# :::{solution} ex-07-compute
# :class: dropdown
# 40 tokens: 3 blocks, then 3 + 5, since five of six copy the tail. 48 tokens: 3 blocks, then 3 + 6 fresh ones, and no copy.
# :::

# %% tags=["hide-input"]
from paged_kv.copy_on_write import fork_many, make_writable

for length, after, copies in ((40, 8, 5), (48, 9, 0)):
    six = BlockManager(12, 16, 6, 128)
    rows = [six.add(length)]
    rows += fork_many(six, rows * 5)
    assert 12 - six.pool.num_free == 3
    assert len(make_writable(six, rows)) == copies
    six.append(rows)
    assert 12 - six.pool.num_free == after

# %% [markdown]
# :::{exercise}
# :label: ex-07-trace
# **Trace.** Rows 10, 11, 12 and 13 hold beams 0 to 3. The parents of the next beams are 2, 2, 0, 2. Which row does each
# new beam get, and which rows does `rewire` change?
# :::
#
# :::{solution} ex-07-trace
# :class: dropdown
# The first child of beam 2 keeps row 12, that of beam 0 keeps row 10. Beams 1 and 3 have no children; their rows 11 and 13 go to
# the other two. Rows 11 and 13 change.
# :::

# %% tags=["hide-input"]
placed = place_children([10, 11, 12, 13], [2, 2, 0, 2])
assert placed == [12, 11, 10, 13]
assert [row for row, parent in zip(placed, [2, 2, 0, 2]) if row != 10 + parent] == [11, 13]

# %% [markdown]
# :::{exercise}
# :label: ex-07-break
# **Break.** In the search over cats and dogs let all beams start with score 0. What comes out?
# :::
#
# :::{solution} ex-07-break
# :class: dropdown
# Both beams say "cat", from parents 0 and 1: the two copies of the best word fill the beam and "dog" never gets a chance. Beam
# search has become greedy, at twice the price.
# :::

# %% tags=["hide-input"]
broken = BeamSearch(2, 4, [words.index(".")])
broken.scores[:] = 0
broken.advance(next_log_probs(broken.texts))
assert [words[text[0]] for text in broken.texts] == ["cat", "cat"]

# %% [markdown]
# :::{exercise}
# :label: ex-07-implement
# **Implement.** *Best of n*: draw $n$ samples and return the one with the greatest mean log-probability under the unchanged
# model. What do you need besides `parallel_sample`?
# :::
#
# :::{solution} ex-07-implement
# :class: dropdown
# The log-probabilities of what was drawn. One packed batch over prompt and sample gives them all: run each text
# through `prefill` again with the logits of every token, or, as here, ask the model directly.
# :::

# %% tags=["hide-input"]
@torch.inference_mode()
def mean_log_prob(model, prompt, output):
    logits = model(torch.tensor([prompt + output]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(output)[:, None]).mean().item()


def best_of(guest, manager, prompt, params, count):
    *_, state = parallel_sample(guest, manager, prompt, params, count)
    return max(state.output, key=lambda ids: mean_log_prob(guest.model, prompt, ids))


four = [SamplingParams(seed=seed) for seed in range(4)]
best = best_of(tiny, small, [1, 2, 3, 4, 5], four, 6)
alone = [best_of(tiny, small, [1, 2, 3, 4, 5], [one], 6) for one in four]
scores = [mean_log_prob(tiny_model, [1, 2, 3, 4, 5], ids) for ids in alone]
assert best == alone[scores.index(max(scores))]

# %% [markdown]
# :::{exercise}
# :label: ex-07-seed
# **Trace.** Of four samples the second finishes after three tokens. Which numbers does the third draw from then on, and which
# would it have drawn from a generator that all four share?
# :::
#
# :::{solution} ex-07-seed
# :class: dropdown
# With a draw for each seed and step: those of its own seed at steps 3, 4, 5, as before. From a shared generator, which
# gives one number a running sample and step: up to then its third of each four, afterwards its second of each three.
# :::

# %% tags=["hide-input"]
shared = np.random.default_rng(0).random(100).tolist()
with_all = [shared[4 * step + 2] for step in range(6)]
one_left = [shared[4 * step + 2] for step in range(3)]
one_left += [shared[12 + 3 * step + 1] for step in range(3)]
assert with_all[:3] == one_left[:3] and with_all[3:] != one_left[3:]

# %% [markdown]
# ## Further reading
#
# - Gentle: the [blog post on ways to generate text](https://huggingface.co/blog/how-to-generate) by the
#   makers of transformers.
# - The source: sections 4.4 and 6.3 of the PagedAttention paper {cite}`kwon2023paged`.
# - Deep: nucleus sampling {cite}`holtzman2020curious`, on why the likeliest text is often a dull one, and
#   what top-p is for.
