# Exported from book/appendices/A5_check_your_own.py by tools/export.py; edit the chapter, not this file.
"""The rules that a paged cache keeps: each with its sentence, its place in the book, a hint.

A rule that does not hold is raised as `Broken`, which says so in words.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """One rule: its sentence, the chapter and section that explain it, what tends to break it."""

    sentence: str
    chapter: str
    section: str
    hint: str


RULES = {
    "I1": Rule(
        "A block is in the free queue if and only if its count is 0.",
        "03", "A pool of ids",
        "Whatever moves a count to or from 0 moves the block out of or into the queue, once.",
    ),
    "I2": Rule(
        "The count of a block is the number of rows that hold it.",
        "03", "All or nothing",
        "One more for each row that gets the block, one less for each that lets go of it.",
    ),
    "I3": Rule(
        "Nobody writes a block that another row reads.",
        "06", "Who may write where",
        "Before a write into a partly filled block look at its count; above 1, copy it first.",
    ),
    "I4": Rule(
        "A findable block holds the K/V of its name.",
        "08", "A name covers all that came before",
        "A name covers all tokens before it, and the root; whoever takes a block forgets its name.",
    ),
    "FIFO": Rule(
        "Blocks are taken from the front of the queue and given back at its end, in order.",
        "03", "A pool of ids",
        "A list whose end is used for both is a stack: the bytes given back last go first.",
    ),
}  # fmt: skip


RULES |= {
    "ROW": Rule(
        "A row names no block twice, and behind its last block stands -1.",
        "03", "Rows of block ids",
        "Padding is -1, since 0 is a block; a closed row is all -1; a row belongs to one chat.",
    ),
    "ROOM": Rule(
        "A row of n tokens holds ceil(n / B) blocks, keeps them, and its seq_lens is n.",
        "03", "All or nothing",
        "Divide rounding up; a new block is due when the length passes a multiple of B.",
    ),
    "WHOLE": Rule(
        "An operation that is refused changes nothing.",
        "03", "All or nothing",
        "Count for the whole batch first, refuse, and only then begin to change things.",
    ),
    "SHORT": Rule(
        "OutOfBlocks is raised if, and only if, fewer blocks are free than are needed.",
        "03", "All or nothing",
        "Compare the blocks of the whole call, copies and idle hits included, with num_free.",
    ),
    "REFUSE": Rule(
        "Nonsense is refused with ValueError, and nothing else is.",
        "03", "Break it",
        "Look at the arguments first: ids in range, none twice, rows open, whole numbers.",
    ),
    "EPOCH": Rule(
        "The epoch of a block is raised each time it is taken to be overwritten.",
        "03", "A pool of ids",
        "`take` raises it, `claim` does not: a claimed block keeps its bytes.",
    ),
    "SLOT": Rule(
        "slot = block id x B + offset, in 64 bits; -1 where the row names no block.",
        "03", "Rows of block ids",
        "NumPy reads index -1 as the last one: padding needs a case of its own.",
    ),
}  # fmt: skip


RULES |= {
    "COPY": Rule(
        "Only a shared, partly filled tail is copied; the last of its holders to write is not.",
        "06", "Who may write where",
        "A full block is never written, so never copied; k writers of r holders: min(k, r - 1).",
    ),
    "BEAM": Rule(
        "A row becomes what its parent was when the call began.",
        "06", "Beams change places",
        "Read all parents before you change the first row; two rows may change places.",
    ),
    "LAST": Rule(
        "At least one token is computed: at most floor((n - 1) / B) blocks are reused.",
        "08", "Match, publish, forget",
        "Without a token to compute there are no logits to sample from.",
    ),
    "FIND": Rule(
        "A published block is found as long as nobody has taken it to be overwritten.",
        "08", "Match, publish, forget",
        "Giving a block back forgets nothing; losing one of two twins must not hide the other.",
    ),
    "TAIL": Rule(
        "Chained blocks go back tail first, so that a parent outlasts its children.",
        "08", "What is forgotten first",
        "A child without its parent can never be found; release the row's ids reversed.",
    ),
    "KEYS": Rule(
        "Different extra parts give different roots.",
        "08", "Bytes that mean one thing",
        "Put kind, type and length before each value: joined strings run into each other.",
    ),
}  # fmt: skip


RULES |= {
    "BYTES": Rule(
        "A write changes the slots that it names and nothing else; -1 is skipped.",
        "04", "A slot for every token",
        "Index -1 is the last slot to Python; keys are at index 0, values at index 1.",
    ),
    "COPIES": Rule(
        "The copies of one step give the result of one copy after the other.",
        "04", "Whole blocks",
        "1 to 5, then 5 to 6, puts block 1 into both; copy whole blocks, in every layer.",
    ),
    "DENSE": Rule(
        "Attention through the table equals attention over one flat array.",
        "04", "Reading through the table",
        "Position p is in block p // B at p % B; query i of t stands at position n - t + i.",
    ),
    "STALE": Rule(
        "No slot past the end of a sequence is read: NaN there poisons nothing.",
        "04", "What lies in an empty slot",
        "A weight of 0 times NaN is NaN: cut the block off at the length, do not mask it.",
    ),
}  # fmt: skip


RULES |= {
    "CHECK": Rule(
        "`check` objects to a state that is broken.",
        "03", "A pool of ids",
        "A check that never fails proves nothing: break the state and watch it.",
    ),
    "RUN": Rule(
        "The run by hand comes out as on paper.",
        "03", "The run to do by hand",
        "Follow it with a pencil, step by step, and compare.",
    ),
    "NAMES": Rule(
        "The module has the names of the chapter, to be called as there.",
        "", "",
        "The docstrings of the chapter list arguments and fields.",
    ),
    "UNWRITTEN": Rule(
        "Every body that is used has been written.",
        "", "",
        "This one still raises NotImplementedError.",
    ),
    "CRASH": Rule(
        "An operation ends with a result, with OutOfBlocks or with ValueError.",
        "", "",
        "--verbose shows where the exception came from.",
    ),
    "TIME": Rule(
        "Every operation ends.",
        "", "",
        "Look for a loop whose condition does not change.",
    ),
}  # fmt: skip


class Broken(Exception):
    """A rule does not hold.  State: its name, what was expected, what was found, and where."""

    def __init__(self, rule: str, expected: object, found: object) -> None:
        super().__init__(f"{rule}: expected {expected}; found {found}")
        self.rule, self.expected, self.found = rule, str(expected), str(found)
        self.steps: list[str] = []

    def lines(self, home: str) -> list[str]:
        """What a reader is told, line by line; `home` is the chapter that exports the module."""
        rule = RULES[self.rule]
        last = len(self.steps)
        steps = [
            f"  {n}. {said}{'   <- here' if n == last else ''}"
            for n, said in enumerate(self.steps, 1)
        ]
        return [
            *(["steps", *steps] if steps else []),
            f"rule      {self.rule}: {rule.sentence}",
            f"expected  {self.expected}",
            f"found     {self.found}",
            f"read      chapter {rule.chapter or home}" + f", {rule.section}" * bool(rule.section),
            f"hint      {rule.hint}",
        ]
