# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Check your own
#
# Somebody has written a block manager of their own. Only `append` differs from ours: for a batch it does
# one row after the other. A test grows two chats, looks at their tables, lets them finish, and counts.

# %%
import numpy as np

from paged_kv.block_manager import BlockManager
from paged_kv.block_pool import OutOfBlocks


class NaiveManager(BlockManager):
    def append(self, rows, new_tokens=1):
        for row in np.atleast_1d(rows).tolist():
            super().append(row, new_tokens)


def naive_test(manager):
    a, b = manager.add(6), manager.add(3)
    manager.append([a, b], 2)
    assert manager.tables.ids(a) == [0, 1] and manager.tables.ids(b) == [2, 3]
    manager.finish(a)
    manager.finish(b)
    assert manager.pool.num_free == 8
    return "passes"


print("the test", naive_test(NaiveManager(8, 4, 4, 32)))

# %% [markdown]
# One evening the pool is full. A has room in its last block, B needs a new one. The step is refused, the
# server waits and tries again.

# %%
late = NaiveManager(num_blocks=3, block_size=4, max_seqs=4, max_seq_len=32)
a, b = late.add(6), late.add(4)
for attempt in (1, 2):
    try:
        late.append([a, b])
    except OutOfBlocks as error:
        print(f"attempt {attempt}: {error}; A now has {late.tables.seq_lens[a]} tokens")
late.check()
print("check() finds nothing")

# %% [markdown]
# A has eight tokens, of which two were never computed. From now on its attention reads two slots that
# nobody has written. No exception says so, and `check`, which knows I1, I2 and I3, is content. **The
# question.** How does one test a manager that somebody else has written, so that a fault is found before its
# evening comes, and is called by its name?
#
# :::{card} This appendix
# - **You need**: chapter 3; chapters 4, 6 and 8 for the modules that come with them.
# - **Exports**: `check_rules`, `check_reader`, `check_paper`, `check_subjects`, `check_managers`,
#   `check_copies`, `check_prefix`, `check_bytes`, `check_programs`, `check_suites`: together the command
#   `python -m paged_kv.check`.
# - **Device**: any CPU.
# - **Run time**: a few seconds.
# - **You are here** chapters 00 to 14 · labs · appendices: A1 drawing · A2 command line · A3 real
#   configs · **A5 check your own**
# :::
#
# The command reads a module that you have written, under the names of the chapter, and says what is wrong
# with it. This appendix builds it from four ideas: rules that are told in words; a second state, kept
# by pencil; random programs; and the shortest program that still fails.
#
# ## Rules, told in words
#
# A test that says `assert False` has found something and tells nothing. Each rule of the book gets a
# name, a sentence, the section that explains it, and a hint at what usually breaks it. First the
# invariants with numbers, and the order of the queue.

# %% tags=["export:check_rules"]
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

# %% tags=["export:check_rules"]
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

# %% [markdown]
# Then what chapter 3 demands besides: what the rows look like, and what a refusal is.

# %% tags=["export:check_rules"]
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

# %% [markdown]
# Sharing, names and bytes have rules of their own, and so has the reader's code as code.

# %% tags=["export:check_rules"]
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

# %% tags=["export:check_rules"]
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

# %% tags=["export:check_rules"]
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

# %% [markdown]
# A rule that does not hold is an exception that knows what was expected, what was found and the steps that led
# there.

# %% tags=["export:check_rules"]
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

# %%
told = Broken("WHOLE", "refused with OutOfBlocks, and all as before", "lens 7, before 6")
print("\n".join(told.lines("03")))

# %% [markdown]
# ## Somebody else's module
#
# Code that one has not written may lack a name, take other arguments, raise anything, or never come
# back. Each of these has to end as a sentence. The names first; of the arguments we ask only whether they
# could be passed.

# %% tags=["export:check_reader"]
"""Somebody else's module: import it, see what it lacks, run it without being taken down."""

from __future__ import annotations

import importlib
import inspect
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

# %% tags=["export:check_reader"]
NEEDED = {  # of each module: what is called, and with which arguments
    "block_pool": {
        "OutOfBlocks": "needed free", "BlockPool": "num_blocks", "BlockPool.take": "count",
        "BlockPool.claim": "ids", "BlockPool.release": "ids", "BlockPool.free_ids": "",
        "BlockPool.check": "",
    },
    "block_manager": {
        "BlockManager": "num_blocks block_size max_seqs max_seq_len",
        "BlockManager.add": "num_tokens", "BlockManager.append": "rows new_tokens",
        "BlockManager.finish": "row", "BlockManager.check": "",
    },
    "copy_on_write": {
        "fork": "manager row", "make_writable": "manager rows new_tokens",
        "rewire": "manager rows parents", "rewind": "manager rows count",
    },
    "prefix_cache": {
        "PrefixCache": "pool block_size", "PrefixCache.root": "parts",
        "admit_cached": "manager cache tokens root", "give_back": "manager row",
        "publish_full": "manager cache row tokens published root",
    },
    "kv_store": {
        "KVStore": "spec num_blocks block_size", "KVStore.copy_blocks": "pairs",
        "KVStore.write": "layer k v slot_mapping",
        "KVStore.gather": "layer block_table_row seq_len",
    },
    "attention": {
        "paged_attention_numpy": "query keys values block_table_row seq_len",
    },
}  # fmt: skip


def find_path(module: object, path: str) -> Any:
    """`BlockPool.take` of a module, None where it does not exist."""
    for name in path.split("."):
        module = getattr(module, name, None)
    return module

# %% tags=["export:check_reader"]
def missing_names(module: ModuleType, kind: str) -> list[str]:
    """In words, which names of NEEDED the module lacks or cannot be called as the book does."""
    said = []
    for path, text in NEEDED[kind].items():
        found, args = find_path(module, path), text.split()
        called = f"{path}({', '.join(args)})"
        if found is None:
            said.append(f"{called} is missing")
            continue
        owner = find_path(module, path.rpartition(".")[0]) if "." in path else None
        static = owner is None or isinstance(
            inspect.getattr_static(owner, path.rpartition(".")[2]), staticmethod
        )
        try:
            inspect.signature(found).bind(*([] if static else ["self"]), *args)
        except TypeError as error:
            said.append(f"{called} cannot be called so: {error}")
        except ValueError:
            continue  # a built-in without a signature: calling it will tell
    return said

# %% tags=["export:check_reader"]
def name_of(module: ModuleType, name: str) -> Any:
    """A name of the reader's module or of its neighbour `block_tables`, or else the book's own."""
    found, package = getattr(module, name, None), getattr(module, "__package__", None)
    if found is None and package:
        try:
            found = getattr(importlib.import_module(f"{package}.block_tables"), name, None)
        except ImportError:
            pass
    return getattr(importlib.import_module("paged_kv"), name) if found is None else found


def place_of(error: BaseException) -> str:
    """File, line and function where an exception arose, the reader's own code preferred."""
    here = Path(importlib.import_module("paged_kv").__path__[0])
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if Path(frame.filename).parent != here]
    theirs = [f for f in outside if f.filename[0] != "<" and f.name != "ring"]
    frame = [*frames, *theirs][-1]
    return f"{Path(frame.filename).name}, line {frame.lineno}, in {frame.name}"

# %% [markdown]
# `call_theirs` is the only door through which the reader's code is run. `OutOfBlocks` is known by its name, since
# a reader may have a class of their own; every other exception breaks a rule. Against endless loops there
# is an alarm.

# %% tags=["export:check_reader"]
def call_theirs(function: Callable[..., Any], *args: Any) -> tuple[str, Any]:
    """Run the reader's code.  Returns ("", result), or (name of the refusal, the exception).

    Raises: Broken for every other exception.
    """
    try:
        return "", function(*args)
    except Broken:
        raise
    except NotImplementedError as error:
        raise Broken("UNWRITTEN", "a result", error) from error
    except (Exception, SystemExit) as error:
        name = type(error).__name__
        if isinstance(error, ValueError) or name == "OutOfBlocks":
            return ("OutOfBlocks" if name == "OutOfBlocks" else "ValueError"), error
        raise Broken("CRASH", "a result", f"{name}: {error} ({place_of(error)})") from error


def field_of(owner: object, name: str) -> Any:
    """A field that the book's classes have; Broken where the reader's has not."""
    outcome, value = call_theirs(getattr, owner, name, None)
    if outcome or value is None:
        raise Broken("NAMES", f"{type(owner).__name__} has the field {name}", "it has none")
    return value


class TooLong(BaseException):
    """The time is up.  Not an Exception, so that the reader's own code does not catch it."""

# %% tags=["export:check_reader"]
def ring(*_: object) -> None:
    """The alarm."""
    raise TooLong


def give_up() -> None:
    """End the process: somebody's code catches everything, the alarm too."""
    print("TIME: Every operation ends.  Yours does not, and a bare `except:` caught the alarm.")
    sys.stdout.flush()
    os._exit(1)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TooLong in the code inside; end the process 5 s later if that is of no use.

    Where there is no alarm signal, as on Windows, only the second is done.
    """
    last = threading.Timer(seconds + 5, give_up)
    last.daemon = True
    last.start()
    alarm = threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer")
    before = signal.signal(signal.SIGALRM, ring) if alarm else None
    try:
        if alarm:
            signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
        yield
    finally:
        if alarm:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        last.cancel()

# %% tags=["export:check_reader"]
def load_theirs(name: str) -> ModuleType:
    """Import the reader's module, the current folder first.

    Raises: ValueError if there is no such file; Broken if importing it fails.
    """
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    importlib.invalidate_caches()
    try:
        with time_limit(60):
            return importlib.import_module(name)
    except TooLong:
        raise Broken("TIME", "a module that can be imported", "importing it never ends") from None
    except (Exception, SystemExit) as error:
        lost = error.name if isinstance(error, ModuleNotFoundError) else None
        if lost and f"{name}.".startswith(f"{lost}."):
            file = f"{name.replace('.', '/')}.py"
            raise ValueError(f"--module {name}: there is no {file} in {Path.cwd()}") from None
        where = "" if isinstance(error, SyntaxError) else f" ({place_of(error)})"
        said = f"{type(error).__name__}: {error}{where}"
        raise Broken("CRASH", "a module that can be imported", said) from error

# %% [markdown]
# :::{admonition} Predict
# :class: tip
# Somebody's `take` runs for ever inside `try: ... except Exception: pass`. Does the alarm, which raises
# an exception in just that place, get through?
# :::
#
# :::{dropdown} Reasoning
# `TooLong` is a `BaseException` but not an `Exception`, so that handler lets it pass. A bare `except:` would catch it, each
# time it rings. For such code there is a second clock, in a thread of its own: five seconds later `give_up` ends the
# whole process with one sentence.
# :::

# %%
def take(count):
    while True:
        try:
            count += 1
        except Exception:
            pass


try:
    with time_limit(0.2):
        call_theirs(take, 1)
except TooLong as error:
    print("still running, in", place_of(error).rpartition(" in ")[2])

# %% [markdown]
# ## A second state, by pencil
#
# To know what is right after an operation, one needs a second implementation. It must be so simple that one
# believes it: lists, no arrays, no counts kept up to date. A count on paper is counted when it is asked for.

# %% tags=["export:check_paper"]
"""The state as a pencil keeps it, what is seen of the reader's, and the invariants over that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# %% tags=["export:check_paper"]
class Paper:
    """Queue and tables as plain lists; a count is never stored, but counted.

    State
        queue   the free ids, next to be taken first.
        tables  {chat: ids}; None where a fresh block goes whose id is not settled.
        lens    {chat: tokens}.
    """

    def __init__(self, num_blocks: int, block_size: int = 1, max_seq_len: int = 1) -> None:
        self.block_size, self.max_seq_len = block_size, max_seq_len
        self.queue = list(range(num_blocks))
        self.tables: dict[str, list[int | None]] = {}
        self.lens: dict[str, int] = {}

    def count(self, block: int | None) -> int:
        """Rows that hold `block`."""
        return sum(ids.count(block) for ids in self.tables.values())

    def take(self, count: int) -> list[int]:
        """The first `count` of the queue."""
        taken, self.queue = self.queue[:count], self.queue[count:]
        return taken

    def let_go(self, ids: Sequence[int | None]) -> None:
        """Queue up those of `ids` that no row holds any more; call it after changing the rows."""
        idle = [block for block in ids if block is not None and not self.count(block)]
        self.queue += [*dict.fromkeys(idle[::-1])][::-1]  # where the last holder let go

    def missing(self, chat: str, more: int) -> int:
        """Blocks that `chat` needs for `more` tokens beyond those it has."""
        return max(0, -(-(self.lens[chat] + more) // self.block_size) - len(self.tables[chat]))

    def tail_is_shared(self, chat: str) -> bool:
        """Whether the next token of `chat` goes into a block that others hold too."""
        index, offset = divmod(self.lens[chat], self.block_size)
        return offset > 0 and self.count(self.tables[chat][index]) > 1

# %% [markdown]
# The other side is what the reader's manager shows through its fields. We do not rely on its `check`: it
# might have the same fault as the rest.

# %% tags=["export:check_paper"]
@dataclass(frozen=True)
class Seen:
    """What a manager shows: the queue, all counts, and for each chat its blocks and tokens.

    behind: what stands in each row behind its last block; closed: the rows that no chat has, the
    length and then the ids.
    """

    free: list[int]
    counts: list[int]
    tables: dict[str, list[int]]
    lens: dict[str, int]
    behind: dict[str, list[int]]
    closed: list[list[int]]

    def differs_from(self, other: Seen) -> str:
        """The first difference in words, empty for none."""
        for name in ("free", "counts", "tables", "lens", "behind", "closed"):
            if getattr(self, name) != getattr(other, name):
                what = {"free": "queue", "closed": "rows of nobody"}.get(name, name)
                return f"{what} {getattr(other, name)}, before {getattr(self, name)}"
        return ""


def look_at_pool(pool: Any) -> tuple[list[int], list[int]]:
    """Queue and counts of a pool."""
    outcome, free = call_theirs(field_of(pool, "free_ids"))
    if outcome:
        raise Broken("CRASH", "free_ids() returns the queue", free)
    return [int(block) for block in free], np.asarray(field_of(pool, "ref_count")).tolist()

# %% tags=["export:check_paper"]
def look_at_manager(manager: Any, rows: Mapping[str, int]) -> Seen:
    """Everything that an operation could change."""
    free, counts = look_at_pool(field_of(manager, "pool"))
    tables = field_of(manager, "tables")
    table = np.asarray(field_of(tables, "table")).tolist()
    used = np.asarray(field_of(tables, "num_blocks")).tolist()
    lens = np.asarray(field_of(tables, "seq_lens")).tolist()
    return Seen(
        free,
        counts,
        {chat: table[row][: used[row]] for chat, row in rows.items()},
        {chat: lens[row] for chat, row in rows.items()},
        {chat: table[row][used[row] :] for chat, row in rows.items()},
        [[lens[row], *ids] for row, ids in enumerate(table) if row not in rows.values()],
    )


def check_i1(free: list[int], counts: list[int], num_free: int) -> None:
    """I1, from the outside: no negative count, nothing lost, nothing queued twice or early."""
    for block, count in enumerate(counts):
        if count < 0:
            raise Broken("I1", "no count below 0", f"block {block} has count {count}")
    idle = [block for block, count in enumerate(counts) if count == 0]
    if sorted(free) != idle:
        raise Broken("I1", f"in the queue, in some order, {idle}", f"{free}, counts {counts}")
    if num_free != len(free):
        raise Broken("I1", f"num_free = {len(free)}, the length of the queue", num_free)


def check_rows(seen: Seen) -> None:
    """The form of every row: ids of the pool, none twice, -1 behind them, closed rows empty."""
    for chat, ids in seen.tables.items():
        if len(set(ids)) != len(ids) or not all(0 <= i < len(seen.counts) for i in ids):
            raise Broken("ROW", "different blocks of the pool", f"{chat} has {ids}")
        if set(seen.behind[chat]) - {-1}:
            raise Broken("ROW", f"-1 behind {ids} of {chat}", seen.behind[chat])
    for ids in seen.closed:
        if set(ids) - {-1}:
            said = f"length {ids[0]}, ids {ids[1:]}"
            raise Broken("ROW", "-1 all along in a row that no chat has, for its length too", said)

# %% tags=["export:check_paper"]
def check_i2(seen: Seen) -> None:
    """I2: each count against the rows."""
    for block, count in enumerate(seen.counts):
        holders = [chat for chat, ids in seen.tables.items() if block in ids]
        if count != len(holders):
            held = f"held by {' and '.join(holders)}" if holders else "held by no row"
            raise Broken("I2", f"block {block} has count {len(holders)}: {held}", f"count {count}")

# %% [markdown]
# :::{admonition} Predict
# :class: tip
# The manager of the opening has refused a step and kept half of it. Which of I1, the form of the rows and I2 is
# broken?
# :::
#
# :::{dropdown} Reasoning
# None. A's row holds two blocks, eight tokens fit into them, both counts are 1 and the queue is empty. The
# state is a possible one; it is merely not the one that the caller was promised. An invariant says which states
# are possible. Only a comparison, with the state before or with the paper, says which one is right.
# :::

# %%
seen = look_at_manager(late, {"A": a, "B": b})
check_i1(seen.free, seen.counts, late.pool.num_free)
check_rows(seen)
check_i2(seen)
print("all three hold:", seen.tables, seen.lens)

# %% [markdown]
# ## One operation at a time
#
# A *subject* has the reader's object on one side and the paper on the other. `do_take`, `do_release` and so on do one
# operation on both. `attempt` decides what a refusal means: whether it was due, whether it has the right name, and
# whether it left everything as it was. That last comparison is the one that the opening lacked.

# %% tags=["export:check_subjects"]
"""The reader's classes on one side, the paper on the other, one operation at a time.

An operation is a tuple such as ("append", "AB", 2).  One that makes no sense as things stand,
such as a token for a chat that has gone, is passed over: so any part of a program is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

Op: TypeAlias = tuple[Any, ...]

# %% tags=["export:check_subjects"]
class Subject:
    """What the subjects share.  State: `log`, in words, what was done so far."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def step(self, op: Op) -> bool:
        """Do one operation on both sides and compare; False if it was passed over."""
        done = len(self.log)
        getattr(self, f"do_{op[0]}")(*op[1:])
        return len(self.log) > done

    def state(self) -> Any:
        """What a refusal must leave as it was."""
        raise NotImplementedError

    def queue_invariant(self) -> None:
        """What holds even after an operation that should have been refused: I1."""

    def attempt(
        self, allowed: set[str], function: Callable[..., Any], *args: Any, rule: str = "REFUSE"
    ) -> Any:
        """The reader's result, None where it was refused and rightly so, with nothing changed.

        `allowed` holds "" for success and the names of exceptions; `rule` is broken by any other.
        """
        before = self.state()
        outcome, value = call_theirs(function, *args)
        if outcome in allowed:
            if outcome and (difference := before.differs_from(self.state())):
                raise Broken("WHOLE", f"refused with {outcome}, and all as before", difference)
            return None if outcome else value
        if not outcome:
            self.queue_invariant()
        short = "OutOfBlocks" in {outcome, *allowed} and outcome != "ValueError"
        wanted = " or ".join(sorted(allowed - {""})) or "no refusal"
        found = f"{outcome}: {value}" if outcome else "no refusal"
        raise Broken("SHORT" if short else rule, wanted, found)

# %% tags=["export:check_subjects"]
class PoolSubject(Subject):
    """A BlockPool on its own; the rows are lists of ids that the chats keep themselves."""

    def __init__(self, module: ModuleType, num_blocks: int, *_: int) -> None:
        super().__init__()
        self.pool = self.attempt_new(module, num_blocks)
        self.paper = Paper(num_blocks)
        self.compare()

    def attempt_new(self, module: ModuleType, num_blocks: int) -> Any:
        """Make the pool; a refusal of this is a fault."""
        outcome, pool = call_theirs(module.BlockPool, num_blocks)
        if outcome:
            raise Broken("REFUSE", f"BlockPool({num_blocks}) is made", f"{outcome}: {pool}")
        return pool

    def state(self) -> Seen:
        """Queue and counts; the pool has no rows."""
        return Seen(*look_at_pool(self.pool), {}, {}, {}, [])

    def queue_invariant(self) -> None:
        """I1."""
        seen = self.state()
        check_i1(seen.free, seen.counts, int(field_of(self.pool, "num_free")))

    def compare(self) -> None:
        """I1, I2 against the lists that the chats keep, and the order of the queue."""
        self.queue_invariant()
        rows = self.paper.tables.items()
        tables = {chat: [b for b in ids if b is not None] for chat, ids in rows}
        check_i2(Seen([], self.state().counts, tables, {}, {}, []))
        if (free := self.state().free) != self.paper.queue:
            raise Broken("FIFO", f"the queue {self.paper.queue}", free)

# %% [markdown]
# The pool's subject lets five chats take, claim and give back, and now and then somebody asks for nonsense: a
# double free, a foreign block, a block named twice.

# %% tags=["export:check_subjects"]
class PoolSubject(PoolSubject):  # type: ignore
    def do_take(self, chat: str, count: int) -> None:
        """`chat`, which has none, takes blocks."""
        if chat in self.paper.tables:
            return
        self.log.append(f"{chat} takes {number_of(count, 'block')}")
        before = np.array(field_of(self.pool, "epoch"))
        allowed = "OutOfBlocks" if count > len(self.paper.queue) else ""
        ids = self.attempt({allowed}, self.pool.take, count)
        if allowed:
            return
        self.paper.tables[chat] = list(taken := self.paper.take(count))
        if not ids_equal(ids, taken):
            raise Broken("FIFO", f"blocks {taken}, the front of the queue", ids)
        self.compare()
        self.check_epochs(before, taken)

    def check_epochs(self, before: Any, taken: list[int]) -> None:
        """The epochs of the blocks taken, and no others, have been raised."""
        raised = np.flatnonzero(np.asarray(self.pool.epoch) != before).tolist()
        if raised != sorted(taken):
            raise Broken("EPOCH", f"raised for {sorted(taken)}", f"raised for {raised}")

    def do_release(self, chat: str, backwards: bool) -> None:
        """`chat` gives back what it holds, first to last or last to first."""
        if not self.paper.tables.get(chat):
            return
        ids = self.paper.tables.pop(chat)[:: -1 if backwards else 1]
        self.log.append(f"{chat} releases {ids}")
        self.attempt({""}, self.pool.release, list(ids))
        self.paper.let_go(ids)
        self.compare()

# %% tags=["export:check_subjects"]
class PoolSubject(PoolSubject):  # type: ignore
    def do_claim(self, chat: str, first: int, count: int) -> None:
        """`chat`, which has none, claims blocks by name, whether idle or held."""
        size = len(self.state().counts)
        if chat in self.paper.tables or count < 1:
            return
        ids = [(first + 2 * i) % size for i in range(min(count, (size + 1) // 2))]
        self.log.append(f"{chat} claims {ids}")
        before = np.array(field_of(self.pool, "epoch"))
        self.attempt({""}, self.pool.claim, list(ids))
        self.paper.tables[chat] = list(ids)
        self.paper.queue = [block for block in self.paper.queue if block not in ids]
        self.compare()
        self.check_epochs(before, [])

    def do_nonsense(self, which: int) -> None:
        """A call that must be refused."""
        size, queue = len(self.state().counts), self.paper.queue
        calls: list[tuple[str, list[Any]]] = [
            *[("release", [block]) for block in queue[:1]],
            *[("release", [held, queue[0]]) for held in self.held()[:1] if queue],
            ("release", [size]),
            ("release", [-1]),
            ("claim", [0, 0]),
            ("claim", [size]),
        ]
        name, ids = calls[which % len(calls)]
        self.log.append(f"somebody calls {name}({ids}), which is nonsense")
        self.attempt({"ValueError"}, getattr(self.pool, name), ids)
        self.compare()

    def held(self) -> list[int]:
        """Blocks that somebody holds."""
        return [b for ids in self.paper.tables.values() for b in ids if b is not None]

# %% tags=["export:check_subjects"]
def number_of(count: int, thing: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{count} {thing}{'s' * (count != 1)}"


def ids_equal(found: Any, expected: Sequence[int]) -> bool:
    """Whether somebody's answer is this list of ids."""
    return isinstance(found, list | tuple | np.ndarray) and list(map(int, found)) == list(expected)

# %%
import paged_kv.block_pool as ours

subject = PoolSubject(ours, 6)
for op in [("take", "A", 4), ("release", "A", 0), ("claim", "B", 1, 2), ("nonsense", 0)]:
    subject.step(op)
print(*subject.log, "", subject.pool, sep="\n")

# %% [markdown]
# Managers need one thing more. I3 speaks of bytes, and counts alone cannot show that somebody has overwritten
# somebody else's. So every token is a number of its own, written into a dictionary of slots *through the reader's
# tables*, and after each operation every chat reads back what it wrote.

# %% tags=["export:check_managers"]
"""Managers and the functions over them, against the paper; tokens are numbers in slots."""

from __future__ import annotations

from itertools import count
from types import ModuleType
from typing import Any

import numpy as np

# %% tags=["export:check_managers"]
class RowSubject(Subject):
    """A BlockManager, the bytes behind it, and what each chat ought to read.

    State
        rows   {chat: row};  texts  {chat: its tokens}, no token twice in all.
        slots  {slot: token}: the memory, written through the reader's own tables.
    """

    def __init__(self, module: ModuleType, num_blocks: int, block_size: int, max_len: int) -> None:
        super().__init__()
        self.module, self.paper = module, Paper(num_blocks, block_size, max_len)
        made = call_theirs(name_of(module, "BlockManager"), num_blocks, block_size, 6, max_len)
        if made[0]:
            raise Broken("REFUSE", "a BlockManager is made", f"{made[0]}: {made[1]}")
        self.manager: Any = made[1]
        self.rows: dict[str, int] = {}
        self.texts: dict[str, list[int]] = {}
        self.slots: dict[int, int] = {}
        self.tokens = count()

    def state(self) -> Seen:
        """All that the manager shows."""
        return look_at_manager(self.manager, self.rows)

    def queue_invariant(self) -> None:
        """I1."""
        pool = self.manager.pool
        check_i1(*look_at_pool(pool), int(field_of(pool, "num_free")))

    def invariants(self) -> None:
        """I1, the form of the rows, I2."""
        self.queue_invariant()
        seen = self.state()
        check_rows(seen)
        check_i2(seen)

# %% tags=["export:check_managers"]
class RowSubject(RowSubject):  # type: ignore
    def put(self, chat: str, tokens: int) -> None:
        """The last `tokens` of `chat` are written where its table says."""
        size, ids = self.paper.block_size, self.state().tables[chat]
        for _ in range(tokens):
            index, offset = divmod(len(self.texts[chat]), size)
            if index >= len(ids):
                at = len(self.texts[chat])
                raise Broken("ROOM", f"{chat} has a block for position {at}", f"its row is {ids}")
            self.slots[ids[index] * size + offset] = token = next(self.tokens)
            self.texts[chat].append(token)

    def read_back(self, rule: str) -> None:
        """Every chat reads, through its table, what it wrote; else `rule` is broken."""
        size, tables = self.paper.block_size, self.state().tables
        for chat, text in self.texts.items():
            for at, token in enumerate(text[: len(tables[chat]) * size]):
                block = tables[chat][at // size]
                if (found := self.slots.get(block * size + at % size)) != token:
                    whose = [who for who in sorted(self.texts) if found in self.texts[who]]
                    said = f"a token of {whose[0]}" if whose else "nothing"
                    raise Broken(
                        rule,
                        f"{chat} reads its own token at position {at}",
                        f"in block {block} stands {said}",
                    )

# %% tags=["export:check_managers"]
class RowSubject(RowSubject):  # type: ignore
    def compare(self, taken: list[int], rule: str = "I3") -> None:
        """Everything, the most telling first.  `taken`: the blocks for the places not settled."""
        self.invariants()
        self.read_back(rule)
        seen, paper = self.state(), self.paper
        if seen.lens != paper.lens:
            raise Broken("ROOM", f"seq_lens {paper.lens}", seen.lens)
        for chat, ids in paper.tables.items():
            if len(seen.tables[chat]) != len(ids):
                raise Broken("ROOM", f"{len(ids)} blocks for {chat}", seen.tables[chat])
        if seen.free != paper.queue:
            raise Broken("FIFO", f"the queue {paper.queue}", seen.free)
        fresh = []
        for chat, ids in paper.tables.items():
            for index, (block, found) in enumerate(zip(ids, seen.tables[chat], strict=True)):
                if block is None:
                    fresh.append(found)
                elif block != found:
                    said = f"block {block} stays at logical block {index} of {chat}"
                    raise Broken("ROOM", said, found)
            paper.tables[chat] = list(seen.tables[chat])
        if sorted(fresh) != sorted(taken):
            raise Broken("FIFO", f"fresh blocks {taken}, the front of the queue", fresh)

    def leave(self, chat: str) -> None:
        """Strike a chat off the lists, its table apart."""
        for of_chats in (self.rows, self.texts, self.paper.lens):
            del of_chats[chat]

# %% tags=["export:check_managers"]
class ManagerSubject(RowSubject):
    """The operations of chapter 03 over a BlockManager."""

    def do_add(self, chat: str, tokens: int) -> None:
        """A chat arrives."""
        paper = self.paper
        if chat in self.rows:
            return
        self.log.append(f"{chat} arrives with {number_of(tokens, 'token')}")
        blocks = -(-tokens // paper.block_size)
        allowed = {"OutOfBlocks"} if blocks > len(paper.queue) else set()
        allowed |= {"ValueError"} if tokens > paper.max_seq_len else set()
        row = self.attempt(allowed or {""}, self.manager.add, tokens)
        if allowed:
            return
        if not isinstance(row, int | np.integer) or row in self.rows.values():
            raise Broken("ROW", f"a row that no other chat has ({self.rows})", repr(row))
        self.rows[chat], self.texts[chat] = int(row), []
        paper.tables[chat], paper.lens[chat] = [None] * blocks, tokens
        self.put(chat, tokens)
        self.compare(paper.take(blocks))

    def do_finish(self, chat: str) -> None:
        """A chat ends."""
        if chat not in self.rows:
            return
        self.log.append(f"{chat} finishes")
        self.attempt({""}, self.manager.finish, self.rows[chat])
        self.leave(chat)
        ids = self.paper.tables.pop(chat)
        self.paper.let_go(ids)
        self.compare([])

# %% tags=["export:check_managers"]
class ManagerSubject(ManagerSubject):  # type: ignore
    def do_append(self, chats: str, tokens: int) -> None:
        """Each of `chats` grows; a shared tail must be refused."""
        batch, paper = [chat for chat in chats if chat in self.rows], self.paper
        if not batch:
            return
        self.log.append(f"append {number_of(tokens, 'token')}: {', '.join(batch)}")
        allowed = self.refusals(batch, tokens, 0)
        if tokens and any(map(paper.tail_is_shared, batch)):
            allowed.add("ValueError")
        rows = [self.rows[chat] for chat in batch]
        rule = "REFUSE" if "ValueError" not in allowed else "I3"
        self.attempt(allowed or {""}, self.manager.append, rows, tokens, rule=rule)
        if not allowed:
            self.grow(batch, tokens, 0)

    def refusals(self, batch: list[str], tokens: int, copies: int) -> set[str]:
        """The exceptions that are right if `batch` is to grow."""
        paper = self.paper
        needed = copies + sum(paper.missing(chat, tokens) for chat in batch)
        too_long = any(paper.lens[chat] + tokens > paper.max_seq_len for chat in batch)
        short = {"OutOfBlocks"} if needed > len(paper.queue) else set()
        return short | ({"ValueError"} if too_long else set())

    def grow(self, batch: list[str], tokens: int, copies: int) -> None:
        """The paper follows, the tokens are written, and the two are compared."""
        paper = self.paper
        for chat in batch:
            copies += paper.missing(chat, tokens)
            paper.tables[chat] += [None] * paper.missing(chat, tokens)
            paper.lens[chat] += tokens
            self.put(chat, tokens)
        self.compare(paper.take(copies))

# %% tags=["export:check_managers"]
class ManagerSubject(ManagerSubject):  # type: ignore
    def do_nonsense(self, which: int) -> None:
        """A call that must be refused."""
        manager, rows = self.manager, sorted(self.rows.values())
        closed = next(row for row in range(6) if row not in rows)
        calls: list[tuple[str, Any, tuple[Any, ...]]] = [
            ("append to a closed row", manager.append, ([closed], 1)),
            ("finish a row that does not exist", manager.finish, (99,)),
            ("finish a closed row", manager.finish, (closed,)),
            ("add -1 tokens", manager.add, (-1,)),
        ]
        if rows:
            calls += [
                ("append to a row named twice", manager.append, ([rows[0], rows[0]], 1)),
                ("append -1 tokens", manager.append, ([rows[0]], -1)),
                ("append to an open and a closed row", manager.append, ([rows[0], closed], 1)),
            ]
        said, function, args = calls[which % len(calls)]
        self.log.append(f"{said}, which is nonsense")
        self.attempt({"ValueError"}, function, *args)
        self.compare([])

# %% [markdown]
# **Turn the knob.** Make all tokens the same, `self.tokens = repeat(0)` in place of `count()`; expect `read_back` to find
# slots that were never written, and nobody who writes over somebody else's.
#
# ## Sharing, names and bytes
#
# Forks, copies and beams come as further operations of the same kind. How many copies are due is worked out on paper,
# in the order in which the rows are named, just as in chapter 6.

# %% tags=["export:check_copies"]
"""The functions over a manager that share blocks, against the paper."""

from __future__ import annotations

from typing import Any

import numpy as np

# %% tags=["export:check_copies"]
class CopySubject(ManagerSubject):
    """The functions of chapter 06 over a BlockManager."""

    def do_fork(self, chat: str, child: str) -> None:
        """`child` arrives as a copy of `chat`."""
        if chat not in self.rows or child in self.rows:
            return
        self.log.append(f"{child} is forked from {chat}")
        row = self.attempt({""}, self.module.fork, self.manager, self.rows[chat])
        if not isinstance(row, int | np.integer) or row in self.rows.values():
            raise Broken("ROW", f"a row that no other chat has ({self.rows})", repr(row))
        self.rows[child], self.texts[child] = int(row), list(self.texts[chat])
        self.paper.tables[child] = list(self.paper.tables[chat])
        self.paper.lens[child] = self.paper.lens[chat]
        self.compare([])

    def do_rewind(self, chat: str, tokens: int) -> None:
        """`chat` takes tokens back."""
        if chat not in self.rows:
            return
        self.log.append(f"{chat} is rewound by {number_of(tokens, 'token')}")
        paper, keep = self.paper, self.paper.lens[chat] - tokens
        allowed = "ValueError" if keep < 0 else ""
        self.attempt({allowed}, self.module.rewind, self.manager, [self.rows[chat]], tokens)
        if allowed:
            return
        blocks = -(-keep // paper.block_size)
        cut, paper.tables[chat] = paper.tables[chat][blocks:], paper.tables[chat][:blocks]
        paper.let_go(cut[::-1])
        paper.lens[chat], self.texts[chat] = keep, self.texts[chat][:keep]
        self.compare([])

    def do_nonsense(self, which: int) -> None:
        """A row that is not open."""
        closed = next(row for row in range(6) if row not in self.rows.values())
        name, rows = (("fork", closed), ("rewind", [closed]))[which % 2]
        self.log.append(f"{name} a closed row, which is nonsense")
        self.attempt({"ValueError"}, getattr(self.module, name), self.manager, rows)
        self.compare([])


# %% tags=["export:check_copies"]
class CopySubject(CopySubject):  # type: ignore
    def do_write(self, chats: str, tokens: int) -> None:
        """make_writable, the copies, append, and the new tokens, for all of `chats` at once."""
        batch, paper = [chat for chat in chats if chat in self.rows], self.paper
        if not batch or not tokens:
            return
        self.log.append(f"write {number_of(tokens, 'token')}: {', '.join(batch)}")
        rows = [self.rows[chat] for chat in batch]
        before = {chat: list(ids) for chat, ids in paper.tables.items()}
        copies = sum(map(self.copy_tail, batch))
        allowed = self.refusals(batch, tokens, copies)

        def both() -> Any:
            pairs = self.module.make_writable(self.manager, rows, tokens)
            self.manager.append(rows, tokens)
            return pairs

        rule = "I3" if copies else "REFUSE"
        pairs = self.attempt(allowed or {""}, both, rule=rule)
        if allowed:
            paper.tables = before
            return
        self.slots.update(copied_slots(self.slots, pairs, paper.block_size))
        self.count_copies(pairs, copies)
        self.grow(batch, tokens, copies)

    def copy_tail(self, chat: str) -> int:
        """On paper: 1 and a fresh place if the tail of `chat` is copied, else 0."""
        if not self.paper.tail_is_shared(chat):
            return 0
        self.paper.tables[chat][self.paper.lens[chat] // self.paper.block_size] = None
        return 1

# %% tags=["export:check_copies"]
class CopySubject(CopySubject):  # type: ignore
    def count_copies(self, pairs: Any, copies: int) -> None:
        """As many copies as needed.  Too few break I3, since somebody writes what others read."""
        if len(pairs) > copies:
            self.invariants()
            raise Broken("COPY", f"{copies} copies", f"{len(pairs)}: {list(pairs)}")
        if len(pairs) < copies:
            raise Broken(
                "I3",
                f"{copies} copies, so that each writer has a tail of its own",
                f"{len(pairs)}: {list(pairs)}",
            )

    def do_rewire(self, chats: str, parents: str) -> None:
        """Each of `chats` becomes what its parent is, all at once."""
        if not set(chats + parents) <= set(self.rows):
            return
        self.log.append(f"{' and '.join(chats)} become {' and '.join(parents)}")
        paper, rows = self.paper, self.rows
        self.attempt(
            {""},
            self.module.rewire,
            self.manager,
            [rows[chat] for chat in chats],
            [rows[chat] for chat in parents],
        )
        lost = [paper.tables[chat][::-1] for chat in chats]
        for of_chats in (paper.tables, self.texts):
            copies: list[Any] = [list(of_chats[parent]) for parent in parents]
            of_chats.update(zip(chats, copies, strict=True))
        paper.lens.update({chat: len(self.texts[chat]) for chat in chats})
        paper.let_go([block for ids in lost for block in ids])
        self.invariants()
        if (found := self.state().tables) != paper.tables:
            raise Broken("BEAM", f"tables {paper.tables}", found)
        self.compare([], "BEAM")

# %% tags=["export:check_copies"]
def copied_slots(slots: dict[int, int], pairs: Any, size: int) -> dict[int, int]:
    """What stands where after whole blocks have been copied, all at once."""
    after = {}
    for source, destination in pairs:
        for offset in range(size):
            if (slot := source * size + offset) in slots:
                after[destination * size + offset] = slots[slot]
    return after

# %% [markdown]
# A prefix cache is compared with the plainest one there is: for each block, all the letters up to its end, and the
# tenant. Prompts are made of two letters, so that equal blocks with different histories are frequent. A hit on a
# block whose history differs breaks I4, whatever the key was made of.

# %% tags=["export:check_prefix"]
"""A prefix cache against a list of what each block holds."""

from __future__ import annotations

from types import ModuleType
from typing import Any

# %% tags=["export:check_prefix"]
class PrefixSubject(RowSubject):
    """PrefixCache and admit_cached.  State: `holds`, {block: (salt, all tokens up to its end)}."""

    def __init__(self, module: ModuleType, num_blocks: int, block_size: int, max_len: int) -> None:
        super().__init__(module, num_blocks, block_size, max_len)
        made = call_theirs(module.PrefixCache, self.manager.pool, block_size)
        if made[0]:
            raise Broken("REFUSE", "a PrefixCache is made", f"{made[0]}: {made[1]}")
        self.cache: Any = made[1]
        self.holds: dict[int, tuple[int, str]] = {}

    def root(self, salt: int) -> Any:
        """The root of a tenant; 0 is nobody's."""
        return self.cache.root([("salt", f"tenant {salt}")]) if salt else b""

    def known(self, salt: int, text: str) -> list[list[int]]:
        """For each block of `text`, those that hold it, up to the first that none does."""
        found, size = [], self.paper.block_size
        for end in range(size, len(text) + 1, size):
            blocks = [b for b, held in self.holds.items() if held == (salt, text[:end])]
            if not blocks:
                break
            found.append(blocks)
        return found[: max(0, len(text) - 1) // size]

    def publish(self, chat: str, text: str, salt: int, found: int) -> None:
        """The blocks that the chat has computed become findable."""
        size, args = self.paper.block_size, (self.manager, self.cache, self.rows[chat])
        tokens, root = [ord(letter) for letter in text], self.root(salt)
        self.attempt({""}, self.module.publish_full, *args, tokens, found // size, root)
        for index in range(found // size, len(text) // size):
            block = self.paper.tables[chat][index]
            self.holds[block or 0] = (salt, text[: (index + 1) * size])

# %% tags=["export:check_prefix"]
class PrefixSubject(PrefixSubject):  # type: ignore
    def do_admit(self, chat: str, text: str, salt: int) -> None:
        """A chat arrives with letters for tokens, and its full blocks are published."""
        paper, free = self.paper, self.paper.queue
        if chat in self.rows:
            return
        self.log.append(f'{chat} of tenant {salt} arrives with "{text}"')
        known = self.known(salt, text)
        fresh = -(-len(text) // paper.block_size) - len(known)
        idle = sum(all(b in free for b in blocks) for blocks in known)
        allowed = {"OutOfBlocks"} if fresh + idle > len(free) else set()
        allowed |= {"ValueError"} if len(text) > paper.max_seq_len else set()
        tokens, root = [ord(letter) for letter in text], self.root(salt)
        answer = self.attempt(
            allowed | {""}, self.module.admit_cached, self.manager, self.cache, tokens, root
        )
        if answer is None and allowed:
            return
        self.rows[chat], found = (int(part) for part in answer)
        self.check_hits(chat, text, salt, found)
        if allowed:
            raise Broken("SHORT", " or ".join(allowed), "no refusal")
        self.arrived(chat, text, salt, found)
        self.publish(chat, text, salt, found)

    def do_done(self, chat: str) -> None:
        """A chat ends; its blocks stay findable until they are taken."""
        if chat not in self.rows:
            return
        self.log.append(f"{chat} is done")
        self.attempt({""}, self.module.give_back, self.manager, self.rows[chat])
        self.leave(chat)
        ids = self.paper.tables.pop(chat)
        self.paper.let_go(ids[::-1])
        free = self.state().free
        if sorted(free) == sorted(self.paper.queue) and free != self.paper.queue:
            raise Broken("TAIL", f"the queue {self.paper.queue}", free)
        self.compare([])

# %% tags=["export:check_prefix"]
class PrefixSubject(PrefixSubject):  # type: ignore
    def check_hits(self, chat: str, text: str, salt: int, found: int) -> None:
        """Look at what was found: not too much, nothing foreign, nothing overlooked."""
        size = self.paper.block_size
        most = max(0, len(text) - 1) // size * size
        if found > most:
            raise Broken("LAST", f"at most {most} of {len(text)} tokens are found", found)
        for index, block in enumerate(self.state().tables[chat][: found // size]):
            want, has = (salt, text[: (index + 1) * size]), self.holds.get(block)
            if has != want:
                said = f'its own is "{has[1]}" of tenant {has[0]}' if has else "it has none now"
                raise Broken(
                    "I4",
                    f'a block whose history is "{want[1]}" of tenant {salt}',
                    f"block {block}, and {said}",
                )
        if found < (expected := len(self.known(salt, text)) * size):
            raise Broken("FIND", f"{expected} tokens are found", found)

    def arrived(self, chat: str, text: str, salt: int, found: int) -> None:
        """The paper follows, and the two are compared."""
        paper, size = self.paper, self.paper.block_size
        hits = self.state().tables[chat][: found // size]
        paper.queue = [block for block in paper.queue if block not in hits]
        blocks = -(-len(text) // size)
        paper.tables[chat] = [*hits, *[None] * (blocks - len(hits))]
        paper.lens[chat], self.texts[chat] = len(text), []
        taken = paper.take(blocks - len(hits))
        for block in taken:
            self.holds.pop(block, None)
        self.compare(taken)

# %% tags=["export:check_prefix"]
def check_roots(module: ModuleType) -> None:
    """Extra parts that differ give roots that differ."""
    parts: list[list[tuple[str, Any]]] = [
        [], [("adapter", "S")], [("salt", "S")], [("salt", "1")], [("salt", 1)],
        [("ab", "c")], [("a", "bc")], [("a", "b"), ("c", "d")], [("a", "bcd")],
    ]  # fmt: skip
    seen: dict[Any, Any] = {}
    for part in parts:
        outcome, root = call_theirs(module.PrefixCache.root, part)
        if outcome:
            raise Broken("REFUSE", f"a root for {part}", f"{outcome}: {root}")
        if root in seen:
            raise Broken("KEYS", f"{seen[root]} and {part} have two roots", "they have one")
        seen[root] = part

# %% [markdown]
# For the store and for attention the paper is a NumPy array and a loop over all earlier tokens.

# %% tags=["export:check_bytes"]
"""The store and attention through a table, against NumPy's own indexing; needs torch."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from paged_kv.sizing import KVSpec

# %% tags=["export:check_bytes"]
class StoreSubject(Subject):
    """A KVStore of two layers against plain arrays; every token is a number of its own."""

    def __init__(self, module: ModuleType, num_blocks: int, block_size: int, *_: int) -> None:
        super().__init__()
        import torch

        self.torch, self.size, self.blocks = torch, block_size, num_blocks
        spec = KVSpec(num_layers=2, num_kv_heads=1, head_size=2, dtype="fp32")
        outcome, self.store = call_theirs(module.KVStore, spec, num_blocks, block_size)
        if outcome:
            raise Broken("REFUSE", "a KVStore is made", f"{outcome}: {self.store}")
        self.expected = np.full((2, 2, num_blocks * block_size), np.nan, np.float32)
        self.next = 1.0

    def state(self) -> Any:
        """The store is only ever asked for what it must do."""
        return None

    def compare(self) -> None:
        """Gather the whole pool, in each layer, and compare: keys, then values."""
        table = self.torch.arange(self.blocks, dtype=self.torch.int32)
        for layer in range(2):
            found = self.attempt({""}, self.store.gather, layer, table, self.blocks * self.size)
            for which, name in enumerate(("keys", "values")):
                want, have = self.expected[layer, which], np.asarray(found[which])[:, 0, 0]
                same = (want == have) | (np.isnan(want) & np.isnan(have))
                if not same.all():
                    slot = int(np.argmin(same))
                    where = f"layer {layer}, {name}, slot {slot}"
                    raise Broken(self.rule, f"{where}: {want[slot]}", have[slot])

    rule = "BYTES"

# %% tags=["export:check_bytes"]
class StoreSubject(StoreSubject):  # type: ignore
    def do_write(self, slots: list[int]) -> None:
        """One token to each slot, in both layers; -1 is skipped."""
        slots = [slot for slot in slots if slot < self.blocks * self.size]
        self.log.append(f"write to slots {slots}")
        numbers = np.arange(self.next, self.next + len(slots), dtype=np.float32)
        self.next += len(slots)
        k = self.torch.from_numpy(numbers).view(-1, 1, 1).expand(-1, 1, 2).contiguous()
        at = self.torch.tensor(slots, dtype=self.torch.int64)
        for layer in range(2):
            self.attempt({""}, self.store.write, layer, k + 1000 * layer, -k, at)
        for slot, number in zip(slots, numbers, strict=True):
            if slot >= 0:
                self.expected[:, 0, slot] = [number, number + 1000]
                self.expected[:, 1, slot] = -number
        self.rule = "BYTES"
        self.compare()

    def do_copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copies of one step, given in the order in which they were issued."""
        pairs = [(a, b) for a, b in pairs if max(a, b) < self.blocks]
        self.log.append(f"copy blocks {pairs}")
        self.attempt({""}, self.store.copy_blocks, list(pairs))
        blocks = self.expected.reshape(2, 2, self.blocks, self.size)
        for source, destination in pairs:
            blocks[:, :, destination] = blocks[:, :, source]
        self.rule = "COPIES"
        self.compare()

# %% tags=["export:check_bytes"]
def flat_attention(q: Any, k: Any, v: Any, window: int | None = None) -> Any:
    """The last len(q) tokens attend to all before them, written out; float64."""
    output, group = np.zeros(q.shape), q.shape[1] // k.shape[1]
    for i in range(len(q)):
        stop = len(k) - len(q) + i + 1
        start = 0 if window is None else max(0, stop - window)
        for head in range(q.shape[1]):
            scores = k[start:stop, head // group] @ q[i, head] / q.shape[2] ** 0.5
            weights = np.exp(scores - scores.max())
            output[i, head] = weights @ v[start:stop, head // group] / weights.sum()
    return output


def check_attention_run(module: ModuleType) -> None:
    """Two sequences grown in turn, 13 and 7 tokens, so that their blocks interleave."""
    rng = np.random.default_rng(0)
    for block_size in (1, 4, 16):
        keys, values = np.full((2, 24, block_size, 2, 8), np.nan)
        table, taken = np.full((2, 16), -1), 0
        k, v = rng.standard_normal((2, 2, 13, 2, 8))
        for at in range(13):
            for row, length in enumerate((13, 7)):
                if at < length:
                    if at % block_size == 0:
                        table[row, at // block_size], taken = taken, taken + 1
                    block = table[row, at // block_size]
                    keys[block, at % block_size] = k[row, at]
                    values[block, at % block_size] = v[row, at]
        for row, length in enumerate((13, 7)):
            args = (keys, values, table[row], length)
            compare_attention(module, rng, args, k[row, :length], v[row, :length])

# %% tags=["export:check_bytes"]
def compare_attention(module: ModuleType, rng: Any, args: Any, k: Any, v: Any) -> None:
    """One query and several, with and without a window, and an empty row."""
    length, size = args[3], args[0].shape[1]
    function = module.paged_attention_numpy
    for tokens, window in ((1, None), (5, None), (3, 4)):
        q = rng.standard_normal((tokens, 4, 8))
        outcome, answer = call_theirs(
            lambda *a, w=window: function(*a, window=w) if w else function(*a), q, *args
        )
        where = f"block size {size}, {length} tokens, {tokens} queries, window {window}"
        if outcome:
            raise Broken("REFUSE", f"an output ({where})", f"{outcome}: {answer}")
        output, want = np.asarray(answer[0]), flat_attention(q, k, v, window)
        if np.isnan(output).any():
            raise Broken("STALE", f"no NaN in the output ({where})", "NaN")
        if output.shape != want.shape or (error := abs(output - want).max()) > 1e-6:
            found = output.shape if output.shape != want.shape else f"off by up to {error:.2g}"
            raise Broken("DENSE", f"the flat result ({where})", found)
    output, lse = call_theirs(function, q, args[0], args[1], np.full(16, -1), 0)[1]
    if np.any(output) or not np.all(np.isneginf(lse)):
        raise Broken("DENSE", "an empty row gives output 0 and lse -inf", f"{np.max(output)}")

# %% [markdown]
# ## Random programs, and the shortest
#
# Nobody thinks of all orders in which five chats may come, grow, fork and leave. Dice do. An operation
# names its chats and is passed over where it makes no sense, so any part of a program is a program again. That is what
# makes shrinking simple: leave out stretches, half of the program first and single steps last, lower the numbers, make
# the pool smaller, and keep whatever still breaks the same rule.

# %% tags=["export:check_programs"]
"""Random programs, and the shortest part of one that still fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, TypeAlias

Shape: TypeAlias = tuple[int, int, int]  # blocks, tokens a block, longest sequence
MakeSubject: TypeAlias = Callable[..., Subject]  # called with a shape
SHAPES: list[Shape] = [(8, 4, 24), (4, 2, 12), (6, 3, 16), (5, 1, 8)]
CHATS, STEPS = "ABCDE", 24  # of a program


def run_program(make: MakeSubject, shape: Shape, ops: Sequence[Op]) -> Broken | None:
    """Run `ops` on a fresh subject; the fault, with the steps that led to it, or None."""
    log: list[str] = []
    try:
        subject = make(*shape)
        log = subject.log
        for op in ops:
            subject.step(op)
    except Broken as broken:
        broken.steps = list(log)
        return broken
    return None

# %% tags=["export:check_programs"]
class Shrinker:
    """Looks for a short program on a small pool that breaks the same rule.

    State: `shape` and `ops`, the best so far, and `broken`, its fault; `budget`, runs left.
    """

    def __init__(self, make: MakeSubject, shape: Shape, ops: list[Op], broken: Broken) -> None:
        self.make, self.shape, self.ops, self.broken = make, shape, ops, broken
        self.budget = 1000

    def fails(self, shape: Shape, ops: list[Op]) -> bool:
        """Whether this one breaks the rule too; if so, it is the best so far."""
        self.budget -= 1
        found = run_program(self.make, shape, ops) if self.budget > 0 else None
        if found is None or found.rule != self.broken.rule:
            return False
        self.shape, self.ops, self.broken = shape, ops, found
        return True

    def shrink(self) -> Broken:
        """A smaller pool, fewer steps, lower numbers, as long as any of them helps."""
        before = None
        while before != (self.shape, self.ops):
            before = (self.shape, self.ops)
            any(self.fails((n, *self.shape[1:]), self.ops) for n in range(1, self.shape[0]))
            size = len(self.ops)
            while size:
                start = 0
                while start < len(self.ops):
                    if not self.fails(self.shape, self.ops[:start] + self.ops[start + size :]):
                        start += size
                size //= 2
            for at in range(len(self.ops)):
                while any(
                    self.fails(self.shape, [*self.ops[:at], op, *self.ops[at + 1 :]])
                    for op in smaller_ops(self.ops[at])
                ):
                    pass
        return self.broken

# %% tags=["export:check_programs"]
def smaller_ops(op: Op) -> list[Op]:
    """The operations that differ from `op` in one smaller number or one letter less."""
    found: list[Op] = []
    for i, part in enumerate(op[1:], 1):
        less: list[Any] = []
        if isinstance(part, int) and part > 0:
            less = [*dict.fromkeys([0, 1, part // 2, part - 1])]
        elif isinstance(part, str) and len(part) > 1 and op[0] != "rewire":
            less = [part[:-1], part[1:]]
        found += [(*op[:i], new, *op[i + 1 :]) for new in less if new != part]
    return found


def some_chats(rng: Random, most: int = 3) -> str:
    """One chat or several, in any order."""
    return "".join(rng.sample(CHATS, rng.randint(1, most)))


def draw_pool_op(rng: Random) -> Op:
    """An operation for PoolSubject."""
    chat = rng.choice(CHATS)
    return rng.choice([
        ("take", chat, rng.randint(0, 4)), ("take", chat, rng.randint(0, 4)),
        ("release", chat, rng.randint(0, 1)), ("release", chat, rng.randint(0, 1)),
        ("claim", chat, rng.randint(0, 7), rng.randint(1, 3)), ("nonsense", rng.randint(0, 5)),
    ])  # fmt: skip


def draw_manager_op(rng: Random) -> Op:
    """An operation for ManagerSubject."""
    chat = rng.choice(CHATS)
    return rng.choice([
        ("add", chat, rng.randint(0, 13)), ("append", some_chats(rng), rng.randint(0, 5)),
        ("append", some_chats(rng), 1), ("finish", chat), ("nonsense", rng.randint(0, 6)),
    ])  # fmt: skip

# %% tags=["export:check_programs"]
def draw_copy_op(rng: Random) -> Op:
    """An operation for CopySubject."""
    one, two = rng.sample(CHATS, 2)
    three = rng.sample(CHATS, 3)
    return rng.choice([
        *[("add", chat, rng.randint(0, 9)) for chat in three],
        *[("fork", one, chat) for chat in three if chat != one],
        *[("write", some_chats(rng), rng.choice([1, 1, 2, 5])) for _ in three],
        ("rewire", one, two), ("rewire", two, one), ("rewire", one + two, two + one),
        ("rewind", one, rng.randint(0, 5)), ("rewind", two, rng.randint(0, 3)),
        ("append", one, 1), ("finish", one), ("nonsense", rng.randint(0, 1)),
    ])  # fmt: skip


def draw_prefix_op(rng: Random) -> Op:
    """An operation for PrefixSubject; two letters, so that prompts have much in common."""
    chat = rng.choice(CHATS)
    text = rng.choice(["aaaaaaaa", "aabaabaa", "baabaaba"])[: rng.randint(0, 8)] + rng.choice("ab")
    return rng.choice([("admit", chat, text, rng.randint(0, 1)), ("admit", chat, text, 0),
                       ("done", chat)])  # fmt: skip

# %% tags=["export:check_programs"]
def draw_store_op(rng: Random) -> Op:
    """An operation for StoreSubject."""
    slots = rng.sample(range(20), rng.randint(0, 6))
    pairs = [(rng.randrange(6), rng.randrange(6)) for _ in range(rng.randint(0, 3))]
    slots.insert(rng.randint(0, len(slots)), -1)
    return rng.choice([("write", slots), ("copy", pairs)])


def random_programs(
    make: MakeSubject, draw: Callable[[Random], Op], programs: int, seed: int
) -> None:
    """Run so many programs, on pools of several shapes; raises the first fault, shrunk."""
    rng = Random(seed)
    for program in range(programs):
        shape, ops = SHAPES[program % len(SHAPES)], [draw(rng) for _ in range(STEPS)]
        if broken := run_program(make, shape, ops):
            shrinker = Shrinker(make, shape, ops, broken)
            broken = shrinker.shrink()
            sizes = f"{number_of(shrinker.shape[0], 'block')}, B = {shrinker.shape[1]}"
            broken.steps[:0] = [f"a pool of {sizes}"]
            raise broken

# %% [markdown]
# :::{admonition} Predict
# :class: tip
# The naive manager goes through random programs of 24 operations. How many will the shortest failing one have, and
# on how large a pool?
# :::
#
# :::{dropdown} Reasoning
# Two arrivals and one append, one would say: the first chat named can grow and the second cannot, for want of a
# block. The dice know a shorter way. A batch is also refused if one of its rows is not open. So one chat is enough, and
# the smallest pool that it fits in.
# :::

# %%
from functools import partial
from types import SimpleNamespace

theirs = SimpleNamespace(BlockManager=NaiveManager)
try:
    random_programs(partial(ManagerSubject, theirs), draw_manager_op, programs=200, seed=0)
except Broken as broken:
    fault = broken
print(*fault.lines("03"), sep="\n")
assert fault.rule == "WHOLE"

# %% [markdown]
# The dice found what the test of the opening missed, and the shrinker brought it to the few steps that one can follow with
# a pencil. The numbers it prints need not be the least possible: it goes downhill until no single change helps.
#
# ## What each test sees
#
# What remains is the list of checks for each module, with the runs by hand of chapters 3, 6 and 8 among them, and
# the report.

# %% tags=["export:check_suites"]
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

# %% tags=["export:check_suites"]
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

# %% tags=["export:check_suites"]
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

# %% tags=["export:check_suites"]
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

# %% tags=["export:check_suites"]
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

# %% tags=["export:check_suites"]
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

# %% tags=["export:check_suites"]
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

# %% tags=["export:check_suites"]
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

# %% [markdown]
# Which test sees which fault? Seven variants of the manager, one fault each, against the naive test, the run by hand and
# the random programs.
#
# :::{admonition} Predict
# :class: tip
# The run by hand compares every table and the whole queue after each of ten steps. Is there a fault in the list that it
# misses?
# :::
#
# :::{dropdown} Reasoning
# Two: those that need what the run never does. It finishes no row twice; and the one batch that it has refused is refused
# at its first row. A run by hand shows that its author has understood the idea. It does not look for trouble.
# :::

# %% tags=["hide-input"]
from paged_kv.block_pool import BlockPool


class Stack(BlockPool):
    def take(self, count):
        self._free = type(self._free)((block, None) for block in [*self._free][::-1])
        taken = super().take(count)
        self._free = type(self._free)((block, None) for block in [*self._free][::-1])
        return taken


class Trusting(BlockPool):
    def release(self, ids):
        super().release([block for block in ids if self.ref_count[block]])


def variant(**methods):
    return SimpleNamespace(BlockManager=type("Variant", (BlockManager,), methods))


def with_pool(pool):
    def made(self, num_blocks, *sizes):
        BlockManager.__init__(self, num_blocks, *sizes)
        self.pool = pool(num_blocks)
    return variant(__init__=made)


def leaves_padding(self, row):
    BlockManager.finish(self, row)
    self.tables.table[row] = 0

# %%
faults = {
    "append row by row": SimpleNamespace(BlockManager=NaiveManager),
    "the queue as a stack": with_pool(Stack),
    "finish in reverse": variant(finish=lambda self, row: self.pool.release(
        self.tables.detach(row)[::-1])),
    "finish releases nothing": variant(finish=lambda self, row: self.tables.detach(row)),
    "padding with 0": variant(finish=leaves_padding),
    "one block too many": variant(add=lambda self, n: BlockManager.add(self, n + 4)),
    "closed rows accepted": variant(finish=lambda self, row: self.tables.seq_lens[row] < 0
                                    or BlockManager.finish(self, row)),
}


def verdict(action, *args):
    try:
        action(*args)
    except Broken as broken:
        return broken.rule
    except Exception as error:
        return type(error).__name__
    return "-"


print(f"{'':26}{'naive test':18}{'run by hand':14}random programs")
for name, module in faults.items():
    make = partial(ManagerSubject, module)
    found = [verdict(naive_test, module.BlockManager(8, 4, 4, 32)),
             verdict(run_by_hand, partial(make, 8, 4, 32), RUN_3),
             verdict(random_programs, make, draw_manager_op, 200, 0)]
    print(f"{name:26}{found[0]:18}{found[1]:14}{found[2]}")
    assert found[2] != "-"
pool = partial(PoolSubject, SimpleNamespace(BlockPool=Trusting))
print("a pool that lets a double free go by:", verdict(random_programs, pool, draw_pool_op, 200, 0))

# %% [markdown]
# A dash means that the test passed, though the fault is there. Only the last column has none. The last line is a pool that
# passes over a double free without a word. No manager ever asks it for one, so that fault shows in the pool alone:
# `--module mine.block_pool`.
#
# On the command line it looks like this; here the package's own module, and then the manager of the opening.

# %%
import sys
from types import ModuleType

mine = ModuleType("mine")
mine.__dict__.update(vars(importlib.import_module("paged_kv.block_manager")))
mine.BlockManager = NaiveManager
sys.modules["mine"] = mine
for module in ("paged_kv.block_manager", "mine"):
    print("$ python -m paged_kv.check --module", module, "--as block_manager")
    print("exit code", check_main(["--module", module, "--as", "block_manager"]), end="\n\n")

# %% [markdown]
# ## State card
#
# | part | what it holds | what it cannot see |
# |---|---|---|
# | `RULES`, `Broken` | sentences, sections, hints | a rule that nobody wrote down |
# | `Paper` | queue, tables, lengths; counts are counted | the fault that it shares with you |
# | `RowSubject` | the reader's manager, the paper, the tokens | time and memory |
# | `Shrinker` | the best program so far | faults that need more than 24 steps or 8 blocks |
# | invariant | a refused operation leaves `state()` as it was | |
# | what breaks next | two threads at once: a program is then no longer a list | |
#
# ## Real world
#
# - vLLM tests its cache manager by scenes, each with its literals, many of them from a bug report:
#   tests/v1/core/test_prefix_caching.py in its repository.
# - SGLang compares, when the server is idle, the free blocks, the cached and the protected ones with the size of the
#   pool, and calls a difference a leak: `python/sglang/srt/managers/scheduler_runtime_checker_mixin.py`. That is I1 and I2 in production.
# - TensorRT-LLM has unit tests of the manager in C++, `cpp/tests/unit_tests/batch_manager/kvCacheManagerTest.cpp`.
# - Random programs against a model, with shrinking, are what Hypothesis calls stateful testing; our own tests use
#   it. The command does without, so that it needs NumPy only.
#
# ## Exercises
#
# :::{exercise}
# :label: ex-A5-compute
# **Compute.** One random program in fifty meets a certain fault. How likely is it that 200 programs all miss it? How many are
# needed for one miss in a million?
# :::
#
# :::{solution} ex-A5-compute
# :class: dropdown
# $0.98^{200}$ is 1.8 %. For one in a million it takes $\lceil \ln 10^{-6} / \ln 0.98 \rceil = 684$ programs.
# :::

# %% tags=["hide-input"]
import math

missed = 0.98**200
needed = math.ceil(math.log(1e-6) / math.log(0.98))
print(f"missed by 200: {100 * missed:.1f} %, needed: {needed}")
assert (round(100 * missed, 1), needed) == (1.8, 684)

# %% [markdown]
# :::{exercise}
# :label: ex-A5-trace
# **Trace.** The queue is used as a stack. At which step of the run by hand of chapter 3 does it show first, and what is A's
# table then?
# :::
#
# :::{solution} ex-A5-trace
# :class: dropdown
# At the first: A gets blocks 7 and 6 in place of 0 and 1. The rule named is FIFO.
# :::

# %% tags=["hide-input"]
try:
    run_by_hand(partial(ManagerSubject, with_pool(Stack), 8, 4, 32), RUN_3)
except Broken as broken:
    fault = broken
print(fault.steps, fault)
assert (fault.rule, len(fault.steps)) == ("FIFO", 1)
stack = with_pool(Stack).BlockManager(8, 4, 4, 32)
assert stack.tables.ids(stack.add(6)) == [7, 6]

# %% [markdown]
# :::{exercise}
# :label: ex-A5-rule
# **Trace.** A pool of three blocks; chat A holds 0 and 1. Which rule is named for each of these states: queue 2 and counts 1, 1, 1;
# queue 2 and counts 1, 2, 0; queue 2, 2 and counts 1, 1, 0?
# :::
#
# :::{solution} ex-A5-rule
# :class: dropdown
# I1 (block 2 is in the queue with a count of 1), I2 (block 1 has one holder), I1 (block 2 stands in the queue twice).
# :::

# %% tags=["hide-input"]
rules = []
for free, counts in (([2], [1, 1, 1]), ([2], [1, 2, 0]), ([2, 2], [1, 1, 0])):
    state = Seen(free, counts, {"A": [0, 1]}, {"A": 6}, {"A": [-1]}, [])
    rules.append(verdict(check_i1, free, counts, len(free)).replace("-", verdict(check_i2, state)))
print(rules)
assert rules == ["I1", "I2", "I1"]

# %% [markdown]
# :::{exercise}
# :label: ex-A5-break
# **Break.** Write a manager that is wrong and passes all random programs. What would it take to find it?
# :::
#
# :::{solution} ex-A5-break
# :class: dropdown
# Let the fault need more than the programs have, here a pool of more than eight blocks. Larger shapes would find it, and the next
# fault would hide behind those. Passing means that no fault was found *on programs of this kind*.
# :::

# %% tags=["hide-input"]
def forgets_at_scale(self, row):
    ids = self.tables.detach(row)
    self.pool.release(ids[: 8 if self.pool.num_blocks > 8 else None])


hidden = variant(finish=forgets_at_scale)
assert verdict(random_programs, partial(ManagerSubject, hidden), draw_manager_op, 300, 1) == "-"
large = ManagerSubject(hidden, 16, 1, 16)
large.step(("add", "A", 9))
assert verdict(large.step, ("finish", "A")) == "I2"

# %% [markdown]
# :::{exercise}
# :label: ex-A5-implement
# **Implement.** `shortest(items, fails)`: leave out single items of a list as long as `fails` stays true of what is left. Is the result
# the shortest list that fails?
# :::
#
# :::{solution} ex-A5-implement
# :class: dropdown
# No further item can be left out, but a shorter list may exist: of 5, 5, 10 with "the sum is at least 10", leaving out from the
# end gives 5, 5, though 10 alone fails too.
# :::

# %% tags=["hide-input"]
def shortest(items, fails):
    for at in reversed(range(len(items))):
        left = items[:at] + items[at + 1 :]
        if fails(left):
            return shortest(left, fails)
    return items


assert shortest([5, 5, 10], lambda numbers: sum(numbers) >= 10) == [5, 5]
assert shortest([3, 8, 1, 8, 4], lambda numbers: numbers.count(8) > 1) == [8, 8]

# %% [markdown]
# ## Further reading
#
# - Gentle: [The Fuzzing Book](https://www.fuzzingbook.org), its chapters on reducing failing inputs above all.
# - [QuickCheck](https://doi.org/10.1145/351240.351266) (Claessen and Hughes, 2000), where properties and random programs
#   come from, and [Hypothesis](https://doi.org/10.21105/joss.01891) (MacIver and others, 2019), their form in Python.
# - Deep: [Simplifying and isolating failure-inducing input](https://doi.org/10.1109/32.988498) (Zeller and Hildebrandt,
#   2002), on what shrinking guarantees.
