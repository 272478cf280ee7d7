# Exported from book/appendices/A5_check_your_own.py by tools/export.py; edit the chapter, not this file.
"""Which checks a module has to pass, and the report in words."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from paged_kv.check_bytes import StoreSubject, check_attention_run
from paged_kv.check_copies import CopySubject
from paged_kv.check_managers import ManagerSubject
from paged_kv.check_prefix import PrefixSubject, check_roots
from paged_kv.check_programs import (
    Shape,
    draw_copy_op,
    draw_manager_op,
    draw_pool_op,
    draw_prefix_op,
    draw_store_op,
    random_programs,
)
from paged_kv.check_reader import (
    NEEDED,
    TooLong,
    call_theirs,
    load_theirs,
    missing_names,
    name_of,
    place_of,
    time_limit,
)
from paged_kv.check_rules import Broken
from paged_kv.check_subjects import PoolSubject

Check: TypeAlias = tuple[str, Callable[[], None]]
RUN_3 = [  # chapter 03: an operation, and the tables, queue and wasted slots behind it
    (("add", "A", 6), "A 0 1", "2 3 4 5 6 7", 2),
    (("add", "B", 3), "A 0 1 | B 2", "3 4 5 6 7", 3),
    (("add", "C", 5), "A 0 1 | B 2 | C 3 4", "5 6 7", 6),
    (("append", "A", 2), "A 0 1 | B 2 | C 3 4", "5 6 7", 4),
    (("append", "A", 1), "A 0 1 5 | B 2 | C 3 4", "6 7", 7),
    (("append", "B", 2), "A 0 1 5 | B 2 6 | C 3 4", "7", 9),
    (("finish", "B"), "A 0 1 5 | C 3 4", "7 2 6", 6),
    (("append", "C", 4), "A 0 1 5 | C 3 4 7", "2 6", 6),
    (("add", "D", 5), "A 0 1 5 | C 3 4 7 | D 2 6", "", 9),
    (("append", "DA", 4), "A 0 1 5 | C 3 4 7 | D 2 6", "", 9),  # refused as a whole
]
RUN_6 = [  # chapter 06
    (("add", "A", 6), "A 0 1", "2 3 4 5", 2),
    (("fork", "A", "B"), "A 0 1 | B 0 1", "2 3 4 5", 4),
    (("write", "A", 1), "A 0 2 | B 0 1", "3 4 5", 3),
    (("write", "B", 1), "A 0 2 | B 0 1", "3 4 5", 2),
    (("finish", "A"), "B 0 1", "3 4 5 2", 1),
]


RUN_8 = [  # chapter 08
    (("admit", "A", "you are kin", 0), "A 0 1 2", "3 4 5 6 7", 1),
    (("admit", "B", "you are rude", 0), "A 0 1 2 | B 0 1 3", "4 5 6 7", 1),
    (("done", "A"), "B 0 1 3", "4 5 6 7 2", 0),
    (("done", "B"), "", "4 5 6 7 2 3 1 0", 0),
    (("admit", "C", "you are rude", 0), "C 0 1 4", "5 6 7 2 3", 0),
    (("admit", "D", "you are rude", 1), "C 0 1 4 | D 5 6 7", "2 3", 0),
]


def run_by_hand(make: Callable[[], Any], rows: list[Any]) -> None:
    """Follow a table worked out on paper; `wasted` counts the empty slots of all tables."""
    subject = make()
    try:
        for op, tables, queue, wasted in rows:
            subject.step(op)
            seen = subject.state()
            ids = " | ".join(" ".join(map(str, (c, *t))) for c, t in sorted(seen.tables.items()))
            size = subject.paper.block_size
            empty = sum(len(t) * size - seen.lens[c] for c, t in seen.tables.items())
            found = (ids, " ".join(map(str, seen.free)), empty)
            if found != (tables, queue, wasted):
                said = "tables [{}], queue [{}], {} slots wasted"
                raise Broken("RUN", said.format(tables, queue, wasted), said.format(*found))
    except Broken as broken:
        broken.steps = list(subject.log)
        raise


def check_slots(module: ModuleType) -> None:
    """Slots of the run by hand, of padding, and beyond 32 bits."""
    table = np.array([[0, 1, 5, -1], [2**28, -1, -1, -1]], np.int32)
    calls = [(0, 3, 4, 3), (0, 4, 4, 4), (0, 8, 4, 20), (0, 12, 4, -1), (0, -1, 4, -1),
             (1, 3, 16, 2**32 + 3)]  # fmt: skip
    for row, position, block_size, want in calls:
        mapping = name_of(module, "slot_mapping")
        outcome, slots = call_theirs(mapping, table, [row], [position], block_size)
        if outcome or np.asarray(slots).tolist() != [want]:
            row_text = f"row {table[row].tolist()}, B = {block_size}"
            found = slots if outcome else np.asarray(slots).tolist()
            raise Broken("SLOT", f"slot {want} for position {position} ({row_text})", found)


def check_alarm(make: Callable[[], Any], owner: str) -> None:
    """The reader's own check() must object to a count that is wrong: I1 in a pool, else I2."""
    subject = make()
    subject.step(("take", "A", 2) if owner == "pool" else ("add", "A", 6))
    thing = getattr(subject, owner)
    pool = thing if owner == "pool" else thing.pool
    call_theirs(thing.check)
    for block, count in ((7, 1), (0, 0)) if owner == "pool" else ((0, 2),):
        before, pool.ref_count[block] = pool.ref_count[block], count
        try:
            thing.check()
        except AssertionError:
            pool.ref_count[block] = before
            continue
        said = f"somebody set the count of block {block}, which is {before}, to {count}"
        raise Broken("CHECK", f"AssertionError from check() after {said}", "silence")


SUBJECTS: dict[str, tuple[Any, Any]] = {  # what is run, and where its operations come from
    "block_pool": (PoolSubject, draw_pool_op),
    "block_manager": (ManagerSubject, draw_manager_op),
    "copy_on_write": (CopySubject, draw_copy_op),
    "prefix_cache": (PrefixSubject, draw_prefix_op),
    "kv_store": (StoreSubject, draw_store_op),
}
BY_HAND: dict[str, tuple[Shape, list[Any]]] = {
    "block_manager": ((8, 4, 32), RUN_3),
    "copy_on_write": ((6, 4, 24), RUN_6),
    "prefix_cache": ((8, 4, 32), RUN_8),
}
ALARMS = {"block_pool": "pool", "block_manager": "manager"}


def checks_of(module: ModuleType, kind: str, programs: int, seed: int) -> list[Check]:
    """The checks of one kind of module, in the order in which to mend."""
    if kind == "attention":
        return [("13 and 7 tokens, interleaved", partial(check_attention_run, module))]
    subject, draw = SUBJECTS[kind]
    make = partial(subject, module)
    checks: list[Check] = []
    if kind == "prefix_cache":
        checks.append(("roots", partial(check_roots, module)))
    if kind in BY_HAND:
        shape, rows = BY_HAND[kind]
        checks.append(("the run by hand", partial(run_by_hand, partial(make, *shape), rows)))
    if kind == "block_manager":
        checks.append(("slot_mapping", partial(check_slots, module)))
    programs //= 4 if kind == "kv_store" else 1  # torch takes its time
    run = partial(random_programs, make, draw, programs, seed)
    checks.append((f"{programs} random programs", run))
    if kind in ALARMS:
        alarm = partial(check_alarm, partial(make, 8, 4, 32), ALARMS[kind])
        checks.append(("check() fires", alarm))
    return checks


CHAPTERS = {"block_pool": "03", "block_manager": "03", "copy_on_write": "06",
            "prefix_cache": "08", "kv_store": "04", "attention": "04"}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What one check said: its title, and the fault, None if there was none."""

    title: str
    fault: Broken | None


def run_check(title: str, check: Callable[[], None], seconds: float) -> Outcome:
    """Run one check, with a time limit."""
    try:
        with time_limit(seconds):
            check()
    except TooLong as error:
        found = f"still running, in {place_of(error)}"
        return Outcome(title, Broken("TIME", f"an end within {seconds:g} s", found))
    except Broken as broken:
        return Outcome(title, broken)
    except Exception as error:  # the reader's answer was not what it should be, in form
        fault = Broken(
            "CRASH",
            "an answer of the form that the docstring states",
            f"one that leads to {type(error).__name__}: {error}",
        )
        fault.__cause__ = error
        return Outcome(title, fault)
    return Outcome(title, None)


def check_module(
    name: str, kind: str = "", programs: int = 200, seed: int = 0, seconds: float = 10
) -> list[Outcome]:
    """Check somebody's module.  `kind` is the chapter's name for it, if not the last of `name`.

    Raises: ValueError for a module that does not exist or a kind that has no checks.
    """
    kind = kind or name.rpartition(".")[2]
    if kind not in NEEDED:
        raise ValueError(f"--as {kind}: there are checks for {', '.join(NEEDED)}")
    if kind in ("kv_store", "attention") and importlib.util.find_spec("torch"):
        importlib.import_module("torch")  # takes long, and is no fault of the reader's
    try:
        module = load_theirs(name)
    except Broken as broken:
        return [Outcome("import", broken)]
    lacking = missing_names(module, kind)
    fault = Broken("NAMES", "all names of the chapter", "; ".join(lacking)) if lacking else None
    outcomes = [Outcome("names and arguments", fault)]
    if fault is None:
        checks = checks_of(module, kind, programs, seed)
        outcomes += [run_check(title, check, seconds) for title, check in checks]
    return outcomes


def print_report(name: str, kind: str, outcomes: list[Outcome], verbose: bool) -> None:
    """The report, in words; with `verbose` the exceptions of the reader's code as well."""
    print(f"{name}, as {kind} of chapter {CHAPTERS[kind]}")
    for outcome in outcomes:
        print(
            f"  {outcome.title} {'.' * (34 - len(outcome.title))} "
            f"{'FAILS' if outcome.fault else 'passes'}"
        )
        if outcome.fault:
            for line in outcome.fault.lines(CHAPTERS[kind]):
                print(f"      {line}")
            if verbose and outcome.fault.__cause__:
                traceback.print_exception(outcome.fault.__cause__, file=sys.stdout)
    failed = sum(outcome.fault is not None for outcome in outcomes)
    print(f"{failed} of {len(outcomes)} checks fail" if failed else "all checks pass")


def check_main(arguments: list[str] | None = None) -> int:
    """`python -m paged_kv.check`.  Returns 0, 1 if a check failed, 2 for a wrong option."""
    parser = argparse.ArgumentParser("python -m paged_kv.check", description=__doc__)
    parser.add_argument("--module", metavar="NAME", help="such as mine.block_manager")
    parser.add_argument("--as", dest="kind", default="", help="if its name is not the book's")
    parser.add_argument("--list", action="store_true", help="the modules that can be checked")
    parser.add_argument("--programs", type=int, default=200, help="how many random programs")
    parser.add_argument("--seed", type=int, default=0, help="of the random programs")
    parser.add_argument("--seconds", type=float, default=10, help="time limit of a check")
    parser.add_argument("--verbose", action="store_true", help="show tracebacks")
    asked = parser.parse_args(arguments)
    if asked.list:
        for kind, chapter in CHAPTERS.items():
            print(f"{kind:15} chapter {chapter}  {', '.join(NEEDED[kind])}")
        return 0
    kind = asked.kind or (asked.module or "").rpartition(".")[2]
    try:
        if not asked.module:
            raise ValueError("--module NAME is needed, such as mine.block_manager; or --list")
        found = check_module(asked.module, kind, asked.programs, asked.seed, asked.seconds)
    except ValueError as error:
        print(f"paged_kv.check: {error}", file=sys.stderr)
        return 2
    print_report(asked.module, kind, found, asked.verbose)
    return int(any(outcome.fault for outcome in found))
