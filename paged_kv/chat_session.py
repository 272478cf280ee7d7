# Exported from book/appendices/A6_serving_commands.py by tools/export.py; edit the chapter, not this file.
"""A dialogue over one engine: each turn computes only what the cache does not hold."""

from collections.abc import Iterator
from typing import cast

from paged_kv.answers import Answer
from paged_kv.bench_load import encode_chat
from paged_kv.engine import Engine, pieces_of
from paged_kv.sampling_params import SamplingOptions


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

    def reset(self) -> None:
        """Forget the history; the cache may keep its blocks."""
        self.turns, self.answer = [], None
