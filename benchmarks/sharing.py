"""How many blocks parallel samples and beams share, on the real model, step by step.

    python benchmarks/sharing.py

Saved: blocks that tables name less blocks held, over blocks that tables name, both summed over all steps;
the paper's definition.  16 short instructions without a chat template, so that prompts are about as long
as Alpaca's; every answer has the length of Alpaca's mean output.  Counts only: nothing here is timed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import write_result
from paged_kv.beams import BeamSearch, run_beams
from paged_kv.block_manager import BlockManager
from paged_kv.copy_on_write import blocks_held, fork_many, make_writable
from paged_kv.hf_adapter import PagedModel, host, load_guest

BLOCK_SIZE, NEW_TOKENS, NUM_BLOCKS, WIDTHS = 16, 58, 900, (2, 4, 6)
INSTRUCTIONS = (
    "Give three tips for staying healthy.",
    "What are the three primary colours?",
    "Describe the structure of an atom, and say what holds its parts together.",
    "How can we reduce air pollution in a large city?",
    "Write a short story about a person who has to make a difficult decision about their job.",
    "Name two ways to save money on a long train journey.",
    "Explain why the seasons change over the year, in words that a child would understand.",
    "Make a list of five ingredients for a vegetable soup.",
    "Rewrite this sentence so that it is easier to read: the report, which nobody had asked for, was late.",
    "What is the difference between a lake and a pond?",
    "Suggest a title for a book about a sailor who is afraid of water.",
    "Summarise in one sentence what a librarian does all day.",
    "Give an example of a question that has no right answer, and say why it has none.",
    "Write a polite letter to a neighbour whose dog barks at night while everyone tries to sleep.",
    "Which animals sleep during the winter?",
    "Put these words in alphabetical order: pear, apple, plum, cherry, grape, fig.",
)


class Count:
    """Blocks named and blocks held, summed over steps."""

    def __init__(self, manager: BlockManager) -> None:
        self.manager, self.named, self.held = manager, 0, 0

    def add(self, groups: list[list[int]]) -> None:
        """One step more: `groups`, the rows that share."""
        for rows in groups:
            self.named += sum(len(self.manager.tables.ids(row)) for row in rows)
            self.held += len(blocks_held(self.manager, rows))

    def saved(self) -> float:
        """Percent of the named blocks that need not be held."""
        return round(100 * (1 - self.held / self.named), 2)


def sampled(prompts: list[list[int]], width: int) -> float:
    """Parallel sampling, `width` samples a prompt.  Only lengths matter, so the model stays out of it."""
    manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE, 16 * max(WIDTHS), 256)
    count = Count(manager)
    roots = [manager.add(len(prompt)) for prompt in prompts]
    groups = [[root, *fork_many(manager, [root] * (width - 1))] for root in roots]
    for step in range(NEW_TOKENS):
        if step:  # the first token comes from the prompt's own logits
            rows = [row for group in groups for row in group]
            make_writable(manager, rows)
            manager.append(rows)
        count.add(groups)
    return count.saved()


def searched(guest: PagedModel, prompts: list[list[int]], width: int) -> float:
    """Beam search of `width` beams, all prompts in one batch."""
    manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE, 16 * max(WIDTHS), 256)
    count = Count(manager)
    searches = [BeamSearch(width, NEW_TOKENS) for _ in prompts]
    for groups in run_beams(guest, manager, prompts, searches):
        count.add(list(groups.values()))
    return count.saved()


def main() -> None:
    """Count for all widths, print, and write the JSON."""
    torch.set_num_threads(1)
    model, tokenizer = load_guest()
    guest = host(model, NUM_BLOCKS, BLOCK_SIZE)
    prompts = [tokenizer(text)["input_ids"] for text in INSTRUCTIONS]
    rows = []
    for width in WIDTHS:
        row = {"width": width, "samples": sampled(prompts, width), "beams": searched(guest, prompts, width)}
        rows.append(row)
        print(row, flush=True)
    lengths = [len(prompt) for prompt in prompts]
    path = write_result(
        "sharing",
        modules=["copy_on_write", "sampling", "beams"],
        workload=f"SmolLM2-135M-Instruct, float32; {len(prompts)} instructions of {min(lengths)} to {max(lengths)} "
        f"tokens, mean {sum(lengths) / len(lengths):.1f}; {NEW_TOKENS} new tokens each, no stop; "
        f"{BLOCK_SIZE}-token blocks",
        repeats=1,
        statistic="percent of blocks saved by sharing, summed over all steps",
        rows=rows,
        headline={f"{kind}_{row['width']}": row[kind] for kind in ("samples", "beams") for row in rows},
        packages=("numpy", "torch", "transformers"),
        prompt_tokens=lengths,
        new_tokens=NEW_TOKENS,
        block_size=BLOCK_SIZE,
    )
    print(path)


if __name__ == "__main__":
    main()
