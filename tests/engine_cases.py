"""Small models, references and comparisons for the tests of the engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from paged_kv.engine import Engine
from paged_kv.runner import EagerRunner

TINY: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def tiny_model(**changes: Any) -> Any:
    """A random Llama of two layers; weights large enough for every token to matter."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**TINY, "initializer_range": 0.2, **changes})
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def some_prompts(count: int, vocab: int = 101, longest: int = 40, seed: int = 0) -> list[list[int]]:
    """Random prompts of mixed lengths, every third one with a common beginning."""
    random = np.random.default_rng(seed)
    shared = random.integers(3, vocab, 20).tolist()
    lengths = random.integers(1, longest, count)
    texts = [random.integers(3, vocab, length).tolist() for length in lengths]
    return [shared + text if i % 3 == 0 else text for i, text in enumerate(texts)]


@dataclass(frozen=True)
class Reference:
    """What transformers says of one prompt: its tokens, and the gap between the two best logits of each."""

    ids: list[int]
    gaps: list[float]


def by_itself(model: Any, prompt: Sequence[int], new: int, stop: int | None = None, **options: Any) -> Any:
    """The output of transformers' own `generate` for one prompt."""
    ids = torch.tensor([list(prompt)])
    settings: dict[str, Any] = {"do_sample": False, "eos_token_id": stop, "pad_token_id": 0, "max_new_tokens": new}
    with torch.inference_mode():
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            return_dict_in_generate=True,
            output_logits=True,
            **{**settings, **options},
        )


def reference(model: Any, prompt: Sequence[int], new: int, stop: int | None = None) -> Reference:
    result = by_itself(model, prompt, new, stop)
    best = torch.cat(result.logits).float().topk(2).values
    return Reference(result.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist())


@dataclass
class Verdicts:
    """Answers against references: a first difference is excused only where the reference's gap is within the noise.

    Args: `noise`, by how much two ways of computing the reference's own logits differ.
    State: `counts`; `different`, what nothing excuses.
    """

    noise: float
    counts: Counter[str] = field(default_factory=Counter)
    different: list[Any] = field(default_factory=list)

    def add(self, ours: Sequence[int], theirs: Reference) -> str:
        """One word for one answer."""
        verdict = "equal"
        if list(ours) != theirs.ids:
            pairs = zip(ours, theirs.ids, strict=False)
            first = next((i for i, (left, right) in enumerate(pairs) if left != right), None)
            excused = first is not None and theirs.gaps[first] < 4 * self.noise
            verdict = "excused" if excused else "different"
        if verdict == "different":
            self.different.append((list(ours), theirs))
        self.counts[verdict] += 1
        return verdict

    def settle(self, name: str, excuses: int = 0) -> None:
        """Print the counts and assert that nothing is different, and no more is excused than may be."""
        print(f"{name}: {dict(self.counts)}, noise {self.noise:.1e}")
        assert not self.different, self.different[0]
        assert self.counts["excused"] <= excuses, self.counts


class Scripted(EagerRunner):
    """A Runner whose logits say what a test wants, whatever the model thinks.

    State: `scripts`, {request id: {sample: token ids}}, -1 for logits that are NaN; `state`, the engine's rows.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.scripts: dict[Any, dict[int, list[int]]] = {}
        self.state: Any = None

    def forward(self, plan: Any, sampled: Any) -> Any:
        logits, step = super().forward(plan, sampled)
        logits = logits.clone()
        for i, (row, at) in enumerate(zip(plan.sample_rows.tolist(), step.positions.tolist(), strict=True)):
            group, sample = self.state.group[row], self.state.sample[row]
            script = self.scripts.get(group.id, {}).get(sample.index)
            if script is not None:
                token = script[min(at - len(group.request.tokens), len(script) - 1)]  # one may be drawn too late
                logits[i] = torch.nan if token < 0 else -9.0
                if token >= 0:
                    logits[i, token] = 9.0
        return logits, step


def say(engine: Engine, name: Any, *texts: str | list[int]) -> None:
    """Let the samples of a request say `texts`; the engine's runner has to be `Scripted`."""
    runner: Any = engine.runner
    runner.state = engine.scheduler.ledger.rows
    ids = [engine.tokenizer(text)["input_ids"] if isinstance(text, str) else text for text in texts]
    runner.scripts[name] = dict(enumerate(ids))


def byte_tokenizer() -> Any:
    """A tokenizer whose tokens 0 to 255 are bytes; 256 is special and ends a text, 257 is special too."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    vocab = {char: i for i, char in enumerate(sorted(alphabet))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>", "<odd>"])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


def at_rest(engine: Engine) -> None:
    """Assert that nothing is left of what was served."""
    assert engine.idle
    engine.check()
    assert engine.manager.pool.num_free == engine.manager.pool.num_blocks, "a block leaked"
    assert not engine.desk.jobs
    assert not engine.desk.chooser.tenant
    assert not engine.scheduler.ledger.groups
    assert not engine.scheduler.flights
    assert not engine.mail
    assert not engine.relief.host.parcels


def drain(engine: Engine, checked: bool = True) -> dict[Any, Any]:
    """Step until nothing is left; {request id: answer}."""
    answers: dict[Any, Any] = {}
    while not engine.idle:
        for piece in engine.step():
            if piece.answer is not None:
                assert piece.request_id not in answers
                answers[piece.request_id] = piece.answer
        if checked:
            engine.check()
    return answers
