# Exported from book/appendices/A5_check_your_own.py by tools/export.py; edit the chapter, not this file.
"""Random programs, and the shortest part of one that still fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, TypeAlias

from paged_kv.check_rules import Broken
from paged_kv.check_subjects import Op, Subject, number_of

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
