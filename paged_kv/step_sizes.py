# Exported from book/14_at_full_speed.py by tools/export.py; edit the chapter, not this file.
"""Which sizes of steps are captured, and which of them holds a given step."""

from collections.abc import Iterator
from dataclasses import dataclass

from paged_kv.runner import Room
from paged_kv.sizing import at_least
from paged_kv.step_upload import StepShape


@dataclass(frozen=True)
class StepSizes:
    """The shapes that graphs are captured for.

    Fields
        decodes  sizes of steps that decode and nothing else, rising.
        beside   decodes that may stand beside chunks of prompts, rising.
        tokens   of those chunks together, rising;  chunks: sequences among them, one of which
                 is padding.
    """

    decodes: tuple[int, ...]
    beside: tuple[int, ...]
    tokens: tuple[int, ...]
    chunks: int

    def fit(self, shape: StepShape) -> StepShape | None:
        """The smallest captured shape that holds `shape`; None where none does."""
        if not shape.chunks:
            decodes = ceiling(self.decodes, shape.decodes)
            return None if decodes is None else StepShape(decodes, 0, 0)
        decodes, tokens = ceiling(self.beside, shape.decodes), ceiling(self.tokens, shape.tokens)
        if decodes is None or tokens is None or shape.chunks >= self.chunks:
            return None
        return StepShape(decodes, self.chunks, tokens)

    def __iter__(self) -> Iterator[StepShape]:
        """Every shape, the largest first: the first one captured sizes the memory of all."""
        for decodes in reversed(self.beside):
            for tokens in reversed(self.tokens):
                yield StepShape(decodes, self.chunks, tokens)
        for decodes in reversed(self.decodes):
            yield StepShape(decodes, 0, 0)


def ceiling(sizes: tuple[int, ...], least: int) -> int | None:
    """The smallest of `sizes` that is no less than `least`."""
    return next((size for size in sizes if size >= least), None)


def usual_sizes(room: Room, chunks: int = 24) -> StepSizes:
    """Sizes for steps of up to `room.max_tokens` tokens and `room.max_seqs` sequences.

    Padding is under 8 or 16 decodes alone and under 32 beside chunks.  The tokens of chunks are
    padded to under twice as many where they are few, so that the weights set the pace, and by
    under half where they are many.
    Args: `chunks`, how many may be in a captured step, padding included.
    """
    most = at_least(1, "max_seqs", room.max_seqs)
    small = (1, 2, 4, *range(8, 64, 8), *range(64, 512, 16), *range(512, most, 64))
    decodes = (*[n for n in small if n < most], most)
    beside = (*[n for n in (0, 16, *range(32, 4096, 32)) if n < most], most)
    more = (2 ** (i // 2 + 8) + i % 2 * 2 ** (i // 2 + 7) for i in range(40))  # 256, 384, 512 ...
    tokens = [n for n in (32, 64, 128, *more) if n < room.max_tokens]
    return StepSizes(decodes, beside, (*tokens, room.max_tokens), chunks)
