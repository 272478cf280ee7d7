"""Write book/skills.md: what a reader can do at the end, where it was practised, and a self-test.

    python tools/skills.py [--check]

Skills are tied to exercises by their labels; the answers of the self-test are computed here, with the package.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from chapters import ROOT, main, write_if_changed

from paged_kv.block_manager import BlockManager
from paged_kv.contiguous import ContiguousPool
from paged_kv.copy_on_write import fork, make_writable
from paged_kv.sizing import KVSpec, blocks_for, format_bytes

PAGE = ROOT / "book" / "skills.md"


@dataclass(frozen=True)
class Skill:
    """Something that a reader can do, the exercises that practise it, and what shows it."""

    can: str
    exercises: tuple[str, ...]
    shown: str


SKILLS = (
    Skill(
        "size a cache from a config",
        ("ex-01-quiz", "ex-01-fit", "ex-A3-gemma", "ex-A3-straddle"),
        "bytes a token, a block and a full sequence of a model that you have not seen before, by hand",
    ),
    Skill(
        "explain both kinds of fragmentation",
        ("ex-02-trace", "ex-02-implement", "ex-03-compute"),
        "a pool with enough free slots that refuses a request, and one with reserved slots that nobody fills",
    ),
    Skill(
        "write an allocator, and test that no block is lost",
        ("ex-03-implement", "ex-03-break", "ex-A5-break", "ex-A5-implement"),
        "your own `mine/block_manager.py`, and `python -m paged_kv.check` saying that all checks pass",
    ),
    Skill(
        "say when a copy happens, and how many",
        ("ex-06-compute", "ex-06-trace", "ex-07-trace"),
        "min(k, r - 1), with a reason why a full block is never among them",
    ),
    Skill(
        "check a fast path against a plain one",
        ("ex-04-online", "ex-04-merge", "ex-11-break", "ex-12-merge"),
        "a kernel of your own that equals `paged_attention_numpy`, on shapes that do not fit its tiles too",
    ),
    Skill(
        "say what a prefix cache may find, and who may see it",
        ("ex-08-trace", "ex-08-salt", "ex-L5-own"),
        "a look-up by hand after an eviction, and why a salt belongs in the root and not at the end",
    ),
    Skill(
        "decide what runs in a step, and who waits",
        ("ex-09-compute", "ex-09-refuse", "ex-13-ahead"),
        "the steps until a long prompt's first token, alone and beside others",
    ),
    Skill(
        "put a price on a victim",
        ("ex-10-choose", "ex-10-implement", "ex-L7-compute"),
        "a policy of your own, and the load under which it is the worse one",
    ),
    Skill(
        "say what bounds a kernel, and divide its work",
        ("ex-11-floor", "ex-11-shares"),
        "the floor of a decode step from bytes and bandwidth, before you measure",
    ),
)
PORTFOLIO = ("ex-02-own", "ex-L1-own")

HEAD = """\
# Skills and self-test

What you should be able to do after this book, where you practised it, and four questions to see whether it has stayed.

## Skills

| you can | practised in | you can show |
|---|---|---|
"""
AFTER = """
**A piece for a portfolio.** Take a distribution of lengths of your own, state it, and count how many requests a fixed
memory admits with block sizes 1 to 16 and with contiguous reservations. Label it as what it is: an effect of memory,
not a measurement of throughput. {portfolio} lead there.

## Self-test

Answer first, with a pencil. The answers are computed by `tools/skills.py`, with the package of this book.
"""


def quiz_model() -> tuple[str, str]:
    """Bytes of a model from its four numbers."""
    spec = KVSpec(num_layers=24, num_kv_heads=4, head_size=64, dtype="fp16")
    total = spec.bytes_per_token * 2000
    return (
        "A model has 24 layers, 4 KV heads of size 64, and keeps K and V in fp16. How many bytes does a token "
        "take, and how many do 2,000 tokens?",
        f"2 × 24 × 4 × 64 × 2 B = {spec.bytes_per_token:,} B a token, or {format_bytes(spec.bytes_per_token, 0)}. "
        f"2,000 tokens take {total:,} B, which is {format_bytes(total, 3)}; in whole blocks of 16, "
        f"{blocks_for(2000, 16)} of them, the same.",
    )


def request_d() -> tuple[str, str]:
    """The end of the run by hand."""
    manager = BlockManager(num_blocks=8, block_size=4, max_seqs=4, max_seq_len=32)
    a, b, c = manager.add(6), manager.add(3), manager.add(5)
    manager.append(a, 3)
    manager.append(b, 2)
    manager.finish(b)
    manager.append(c, 4)
    queue = manager.pool.free_ids()
    d = manager.add(5)
    ids = manager.tables.ids(d)
    empty = len(ids) * 4 - 5
    return (
        "Eight blocks of four. A arrives with 6 tokens, B with 3, C with 5; A grows by 3, B by 2; B finishes; C "
        "grows by 4. D arrives with 5. Which blocks does it get, how many of its slots stay empty, and where is "
        "its token at position 4?",
        f"Before D the queue is {listed(queue)}. D's table is {listed(ids)} and the queue is then "
        f"{listed(manager.pool.free_ids())}; {empty} of its slots are empty. Position 4 is in logical block "
        f"{4 // 4}, which is block {ids[1]}, at offset {4 % 4}.",
    )


def which_block_is_copied() -> tuple[str, str]:
    """Copy-on-write on the smallest case."""
    manager = BlockManager(num_blocks=6, block_size=4, max_seqs=4, max_seq_len=24)
    first = manager.add(6)
    second = fork(manager, first)
    pairs = make_writable(manager, [first])
    manager.append([first])
    tables = [manager.tables.ids(row) for row in (first, second)]
    (source, destination), counts = pairs[0], manager.pool.ref_count[:3].tolist()
    again = make_writable(manager, [second])
    manager.append([second])
    return (
        "A prompt of 6 tokens lies in blocks 0 and 1, and a second row is forked from it. Both write a token. "
        "Which block is copied, how often, and why is block 0 never copied however long they write?",
        f"The first writer copies block {source} into block {destination}: the tables are then "
        f"{listed(tables[0])} and {listed(tables[1])}, the counts of blocks 0, 1 and 2 are {listed(counts)}. The "
        f"second writer is the last holder of block 1 and writes in place: {len(again)} copies. Block 0 is full "
        "for both. A sequence is written behind its last token only, so a full block is read and never written.",
    )


def why_it_runs_out() -> tuple[str, str]:
    """Reservation, and holes."""
    pool = ContiguousPool(32)
    for name, slots in (("R1", 12), ("R2", 8), ("R3", 8)):
        pool.reserve(name, slots)
    pool.finish("R2")
    spec = KVSpec(num_layers=80, num_kv_heads=8, head_size=128, dtype="fp16")
    memory, block = 50 * 2**30, 16 * spec.bytes_per_token
    whole = memory // (4096 * spec.bytes_per_token)
    paged = memory // (blocks_for(300, 16) * block)
    held = whole * 300 * spec.bytes_per_token
    return (
        "A server has 50 GiB for K and V, at 320 KiB a token, and reserves 4,096 tokens a sequence; each "
        "sequence really holds 300. Why does it run out of memory while most of it is empty? And why does a pool "
        "of 32 slots, of which 12 are free, refuse a request for 12?",
        f"{whole} reservations fill the memory and hold {format_bytes(held)}: {100 * (1 - 300 / 4096):.2f} % of each "
        f"is reserved and empty (internal fragmentation). In blocks of 16, {paged} such sequences fit. The "
        f"{pool.free_slots} free slots are no neighbours: the longest run of them has {pool.largest_free_run} "
        "(external fragmentation).",
    )


QUESTIONS = (quiz_model, request_d, which_block_is_copied, why_it_runs_out)


def listed(numbers: list[int]) -> str:
    """`2, 6`, or `empty`."""
    return ", ".join(map(str, numbers)) or "empty"


def references(labels: tuple[str, ...]) -> str:
    """Links to exercises, each with its chapter: their numbers say nothing by themselves."""
    return ", ".join(f"{{ref}}`{label[3:].replace('-', ' ')} <{label}>`" for label in labels)


def page() -> str:
    """The text of book/skills.md."""
    rows = "".join(f"| {skill.can} | {references(skill.exercises)} | {skill.shown} |\n" for skill in SKILLS)
    parts = [HEAD + rows + AFTER.format(portfolio=references(PORTFOLIO).replace(", ", " and "))]
    for number, ask in enumerate(QUESTIONS, 1):
        question, answer = ask()
        parts.append(f"**{number}.** {question}\n\n:::{{dropdown}} Answer\n{answer}\n:::\n")
    return "\n".join(parts)


def _run() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 where the page differs")
    if parser.parse_args().check:
        same = PAGE.exists() and PAGE.read_text(encoding="utf-8") == page()
        print("book/skills.md is as computed" if same else "book/skills.md differs: python tools/skills.py writes it")
        return int(not same)
    print("written: book/skills.md" if write_if_changed(PAGE, page()) else "book/skills.md is as computed")
    return 0


if __name__ == "__main__":
    main(_run)
