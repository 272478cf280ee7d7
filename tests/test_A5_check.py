"""Appendix A5: our own modules pass, so do plain ones written otherwise, and each single fault is named."""

import importlib
import os
import re
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from random import Random

import pytest

import paged_kv.block_manager
from paged_kv.check_managers import ManagerSubject
from paged_kv.check_programs import SHAPES, STEPS
from paged_kv.check_rules import RULES, Broken
from paged_kv.check_suites import CHAPTERS, SUBJECTS, check_main, check_module, run_by_hand

ROOT = Path(__file__).resolve().parents[1]

# A reader's own modules, with nothing of the book's inside: lists in place of arrays and linked queues.
PLAIN = {
    "block_pool": '''
import numpy as np


class OutOfBlocks(Exception):
    def __init__(self, needed, free):
        super().__init__(f"need {needed}, have {free}")


class BlockPool:
    def __init__(self, num_blocks):
        self.ref_count = [0] * num_blocks
        self.epoch = [0] * num_blocks
        self.queue = list(range(num_blocks))

    @property
    def num_free(self):
        return len(self.queue)

    def free_ids(self):
        return self.queue[:]

    def take(self, count):
        if count < 0:
            raise ValueError("count")
        if count > len(self.queue):
            raise OutOfBlocks(count, len(self.queue))
        ids = [self.queue.pop(0) for _ in range(count)]
        for i in ids:
            self.ref_count[i] = 1
            self.epoch[i] += 1
        return ids

    def look(self, ids):
        if len(set(ids)) < len(ids) or any(i not in range(len(self.ref_count)) for i in ids):
            raise ValueError("ids")

    def claim(self, ids):
        self.look(ids)
        for i in ids:
            if i in self.queue:
                self.queue.remove(i)
            self.ref_count[i] += 1

    def release(self, ids):
        self.look(ids)
        if any(self.ref_count[i] < 1 for i in ids):
            raise ValueError("free already")
        for i in ids:
            self.ref_count[i] -= 1
            if self.ref_count[i] == 0:
                self.queue.append(i)

    def check(self):
        assert sorted(self.queue) == [i for i, n in enumerate(self.ref_count) if n == 0]
''',
    "block_manager": '''
import numpy as np

from mine.block_pool import BlockPool, OutOfBlocks


class BlockTables:
    def __init__(self, max_seqs, width):
        self.table = np.full((max_seqs, width), -1)
        self.num_blocks = [0] * max_seqs
        self.seq_lens = [-1] * max_seqs

    def ids(self, row):
        return self.table[row, : self.num_blocks[row]].tolist()


def slot_mapping(table, rows, positions, block_size):
    slots = []
    for row, p in zip(rows, positions):
        block = table[row][p // block_size] if p >= 0 else -1
        slots.append(int(block) * block_size + p % block_size if block >= 0 else -1)
    return slots


class BlockManager:
    def __init__(self, num_blocks, block_size, max_seqs, max_seq_len):
        self.pool = BlockPool(num_blocks)
        self.tables = BlockTables(max_seqs, -(-max_seq_len // block_size))
        self.block_size, self.max_seq_len = block_size, max_seq_len

    def add(self, num_tokens):
        if not 0 <= num_tokens <= self.max_seq_len:
            raise ValueError("num_tokens")
        ids = self.pool.take(-(-num_tokens // self.block_size))
        row = self.tables.seq_lens.index(-1)
        self.tables.seq_lens[row] = 0
        self.extend(row, ids, num_tokens)
        return row

    def extend(self, row, ids, length):
        t = self.tables
        for block in ids:
            t.table[row, t.num_blocks[row]] = block
            t.num_blocks[row] += 1
        t.seq_lens[row] = length

    def lens_passed(self, row, new_tokens):
        return self.tables.seq_lens[row] + new_tokens > self.max_seq_len

    def partial_tail(self, row):
        index, offset = divmod(self.tables.seq_lens[row], self.block_size)
        return index if offset else None

    def missing(self, row, new_tokens):
        end = self.tables.seq_lens[row] + new_tokens
        return -(-end // self.block_size) - self.tables.num_blocks[row]

    def append(self, rows, new_tokens=1):
        rows, t = list(np.atleast_1d(rows)), self.tables
        if len(set(rows)) < len(rows) or new_tokens < 0:
            raise ValueError("rows or new_tokens")
        if any(t.seq_lens[r] < 0 or self.lens_passed(r, new_tokens) for r in rows):
            raise ValueError("a row is closed, or full")
        tails = [(r, self.partial_tail(r)) for r in rows if new_tokens]
        if any(at is not None and self.pool.ref_count[t.ids(r)[at]] > 1 for r, at in tails):
            raise ValueError("others hold the tail")
        need = [self.missing(r, new_tokens) for r in rows]
        ids = self.pool.take(sum(need))
        for r, n in zip(rows, need):
            self.extend(r, [ids.pop(0) for _ in range(n)], t.seq_lens[r] + new_tokens)

    def finish(self, row):
        t = self.tables
        if row not in range(len(t.seq_lens)) or t.seq_lens[row] < 0:
            raise ValueError("row")
        self.pool.release(t.ids(row))
        t.table[row, :] = -1
        t.num_blocks[row], t.seq_lens[row] = 0, -1

    def check(self):
        self.pool.check()
        held = [b for row in range(len(self.tables.seq_lens)) for b in self.tables.ids(row)]
        assert [held.count(b) for b in range(len(self.pool.ref_count))] == self.pool.ref_count
''',
    "copy_on_write": '''
from mine.block_manager import BlockManager
from mine.block_pool import OutOfBlocks


def fork(manager, row):
    t, child = manager.tables, manager.tables.seq_lens.index(-1)
    if t.seq_lens[row] < 0:
        raise ValueError("row")
    ids = t.ids(row)
    manager.extend(child, ids, t.seq_lens[row])
    manager.pool.claim(ids)
    return child


def make_writable(manager, rows, new_tokens=1):
    t, pool, counts, copied = manager.tables, manager.pool, {}, []
    for row in rows:
        if manager.lens_passed(row, new_tokens):
            raise ValueError("too long")
        index = manager.partial_tail(row)
        if index is not None:
            tail = t.ids(row)[index]
            counts.setdefault(tail, pool.ref_count[tail])
            if counts[tail] > 1:
                counts[tail] -= 1
                copied.append((row, index, tail))
    needed = len(copied) + sum(manager.missing(row, new_tokens) for row in rows)
    if needed > pool.num_free:
        raise OutOfBlocks(needed, pool.num_free)
    pairs = []
    for row, index, tail in copied:
        fresh = pool.take(1)[0]
        t.table[row, index] = fresh
        pool.release([tail])
        pairs.append((tail, fresh))
    return pairs


def rewire(manager, rows, parents):
    t = manager.tables
    new = [(t.ids(parent), t.seq_lens[parent]) for parent in parents]
    old = [t.ids(row) for row in rows]
    for ids, _ in new:
        manager.pool.claim(ids)
    for row, (ids, length) in zip(rows, new):
        t.table[row, :] = -1
        t.num_blocks[row] = 0
        manager.extend(row, ids, length)
    for ids in old:
        manager.pool.release(ids[::-1])


def rewind(manager, rows, count=1):
    t = manager.tables
    if any(not 0 <= count <= t.seq_lens[row] for row in rows):
        raise ValueError("count")
    for row in rows:
        t.seq_lens[row] -= count
        keep = -(-t.seq_lens[row] // manager.block_size)
        cut = t.ids(row)[keep:]
        t.table[row, keep:] = -1
        t.num_blocks[row] = keep
        manager.pool.release(cut[::-1])
''',
    "kv_store": '''
import torch


class KVStore:
    def __init__(self, spec, num_blocks, block_size):
        shape = (num_blocks, 2, block_size, spec.num_kv_heads, spec.head_size)
        self.tensors = [torch.full(shape, float("nan")) for _ in range(spec.num_layers)]
        self.block_size = block_size

    def write(self, layer, k, v, slot_mapping):
        for i, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                block, offset = divmod(slot, self.block_size)
                self.tensors[layer][block, 0, offset] = k[i]
                self.tensors[layer][block, 1, offset] = v[i]

    def gather(self, layer, block_table_row, seq_len):
        blocks = block_table_row[: -(-seq_len // self.block_size)].long()
        k, v = self.tensors[layer][blocks].unbind(1)
        return k.flatten(0, 1)[:seq_len], v.flatten(0, 1)[:seq_len]

    def copy_blocks(self, pairs):
        for tensor in self.tensors:
            for source, destination in pairs:
                tensor[destination] = tensor[source].clone()
''',
    "attention": '''
import numpy as np


def paged_attention_numpy(query, keys, values, block_table_row, seq_len, *, window=None):
    output, lse = np.zeros(query.shape), np.full(query.shape[:2], -np.inf)
    size, group = keys.shape[1], query.shape[1] // keys.shape[2]
    for i in range(len(query) if seq_len else 0):
        stop = seq_len - len(query) + i + 1
        seen = range(max(0, stop - window) if window else 0, stop)
        for head in range(query.shape[1]):
            at = [(block_table_row[p // size], p % size, head // group) for p in seen]
            k = np.array([keys[place] for place in at])
            v = np.array([values[place] for place in at])
            scores = k @ query[i, head] / np.sqrt(query.shape[2])
            lse[i, head] = np.log(np.exp(scores).sum())
            output[i, head] = np.exp(scores - lse[i, head]) @ v
    return output, lse
''',
    "prefix_cache": '''
import json

from paged_kv.block_manager import BlockManager
from paged_kv.block_pool import OutOfBlocks


class PrefixCache:
    def __init__(self, pool, block_size):
        self.pool, self.block_size, self.names = pool, block_size, {}

    @staticmethod
    def root(parts=()):
        return json.dumps([[kind, type(value).__name__, str(value)] for kind, value in parts])

    def key(self, parent, chunk):
        return (parent, tuple(chunk))

    def match(self, root, tokens):
        size, found, parent = self.block_size, [], root
        for start in range(0, (len(tokens) - 1) // size * size, size):
            parent = self.key(parent, tokens[start : start + size])
            blocks = [b for b, name in self.names.items() if name == parent]
            if not blocks:
                break
            found.append(max(blocks, key=lambda b: self.pool.ref_count[b]))
        return found

    def forget(self, ids):
        for b in ids:
            self.names.pop(b, None)


def admit_cached(manager, cache, tokens, root=b""):
    pool, tables, size = manager.pool, manager.tables, manager.block_size
    if len(tokens) > tables.max_seq_len:
        raise ValueError("tokens")
    hits = cache.match(root, tokens)
    fresh = -(-len(tokens) // size) - len(hits)
    needed = fresh + sum(pool.ref_count[b] == 0 for b in hits)
    if needed > pool.num_free:
        raise OutOfBlocks(needed, pool.num_free)
    row = tables.open()
    pool.claim(hits)
    taken = pool.take(fresh)
    cache.forget(taken)
    tables.extend(row, hits + taken)
    tables.seq_lens[row] = len(tokens)
    return row, len(hits) * size


def publish_full(manager, cache, row, tokens, published, root=b""):
    size, parent, ids = manager.block_size, root, manager.tables.ids(row)
    for index in range(len(tokens) // size):
        parent = cache.key(parent, tokens[index * size : (index + 1) * size])
        if index >= published:
            cache.names[ids[index]] = parent
    return max(published, len(tokens) // size)


def give_back(manager, row):
    manager.pool.release(manager.tables.detach(row)[::-1])
''',
}  # fmt: skip


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A folder with a reader's package; returns a function that checks one of its modules."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
        del sys.modules[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/__init__.py").touch()

    def write(sources: dict[str, str]) -> None:
        for name, text in sources.items():
            (tmp_path / f"mine/{name}.py").write_text(text, encoding="utf-8")

    yield write
    for name in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
        del sys.modules[name]


def faults(name: str, **options) -> list[Broken]:
    return [outcome.fault for outcome in check_module(name, **options) if outcome.fault]


# ---------------------------------------------------------------------------- what must pass


@pytest.mark.parametrize("name", CHAPTERS)
def test_the_books_own_modules_pass(name):
    assert faults(f"paged_kv.{name}", programs=20 if name == "kv_store" else 100) == []


@pytest.mark.parametrize("name", PLAIN)
def test_plain_modules_written_otherwise_pass(mine, name):
    mine(PLAIN)
    assert faults(f"mine.{name}") == []


# ---------------------------------------------------------------------------- one fault each

# module, what stands there, what stands there instead, the rules of which one must be named
MUTANTS = {
    "double free accepted": ("block_pool", 'raise ValueError("free already")', "pass", "I1"),
    "double free passed over": ("block_pool", 'raise ValueError("free already")', "return", "REFUSE"),
    "queue used as a stack": ("block_pool", "self.queue.pop(0)", "self.queue.pop()", "FIFO"),
    "given back in reverse": (
        "block_pool",
        "        for i in ids:\n            self.ref_count[i] -= 1",
        "        for i in ids[::-1]:\n            self.ref_count[i] -= 1",
        "FIFO",
    ),
    "takes what there is, then refuses": (
        "block_pool",
        "        if count > len(self.queue):",
        "        if count > len(self.queue):\n            self.queue.clear()",
        "WHOLE",
    ),
    "half a release before the refusal": (
        "block_pool",
        "        if any(self.ref_count[i] < 1 for i in ids):\n"
        '            raise ValueError("free already")\n        for i in ids:\n',
        "        for i in ids:\n            if self.ref_count[i] < 1:\n                raise ValueError\n",
        "WHOLE",
    ),
    "claim leaves the block in the queue": ("block_pool", "self.queue.remove(i)", "pass", "I1"),
    "freed while somebody holds it": ("block_pool", "if self.ref_count[i] == 0:", "if True:", "I1"),
    "never freed": ("block_pool", "self.queue.append(i)", "pass", "I1"),
    "claim does not count": (
        "block_pool",
        "            self.ref_count[i] += 1\n\n    def release",
        "\n    def release",
        "I1 I2",
    ),
    "epoch not raised": ("block_pool", "self.epoch[i] += 1", "pass", "EPOCH"),
    "epoch raised by a claim": (
        "block_pool",
        "                self.queue.remove(i)\n",
        "                self.queue.remove(i)\n            self.epoch[i] += 1\n",
        "EPOCH",
    ),
    "ids twice in one call": ("block_pool", "len(set(ids)) < len(ids) or ", "", "I2 REFUSE"),
    "foreign ids": ("block_pool", "any(i not in range(len(self.ref_count)) for i in ids)", "False", "CRASH I1 I2"),
    "num_free counts wrong": ("block_pool", "return len(self.queue)", "return len(self.ref_count)", "I1"),
    "take never ends": ("block_pool", "self.ref_count[i] = 1", "while True: pass", "TIME"),
    "take divides by zero": ("block_pool", "self.ref_count[i] = 1", "1 / 0", "CRASH"),
    "take not written": (
        "block_pool",
        "self.ref_count[i] = 1",
        "raise NotImplementedError('yours: BlockPool.take')",
        "UNWRITTEN",
    ),
    "take returns nothing": ("block_pool", "        return ids\n", "", "FIFO"),
    "no claim": ("block_pool", "def claim(", "def claim_all(", "NAMES"),
    "take without its argument": ("block_pool", "def take(self, count)", "def take(self)", "NAMES"),
    "no ref_count": ("block_pool", "ref_count", "refs", "NAMES"),
    "not Python": ("block_pool", "def take(self, count):", "def take(self, count)", "CRASH"),
    "check is silent": ("block_pool", "assert sorted", "sorted", "CHECK"),
    "append takes row by row": (
        "block_manager",
        "        ids = self.pool.take(sum(need))\n        for r, n in zip(rows, need):\n"
        "            self.extend(r, [ids.pop(0) for _ in range(n)], ",
        "        for r, n in zip(rows, need):\n            self.extend(r, self.pool.take(n), ",
        "WHOLE",
    ),
    "a row is opened before the refusal": (
        "block_manager",
        "        ids = self.pool.take(-(-num_tokens // self.block_size))\n"
        "        row = self.tables.seq_lens.index(-1)\n"
        "        self.tables.seq_lens[row] = 0\n",
        "        row = self.tables.seq_lens.index(-1)\n        self.tables.seq_lens[row] = 0\n"
        "        ids = self.pool.take(-(-num_tokens // self.block_size))\n",
        "WHOLE",
    ),
    "padding 0": ("block_manager", "np.full((max_seqs, width), -1)", "np.zeros((max_seqs, width), int)", "ROW"),
    "closed row keeps its ids": ("block_manager", "        t.table[row, :] = -1\n", "", "ROW"),
    "finish releases nothing": ("block_manager", "self.pool.release(t.ids(row))", "pass", "I2"),
    "finish backwards": ("block_manager", "release(t.ids(row))", "release(t.ids(row)[::-1])", "FIFO"),
    "rounded down": (
        "block_manager",
        "take(-(-num_tokens // self.block_size))",
        "take(num_tokens // self.block_size)",
        "ROOM SHORT",
    ),
    "a block too many": (
        "block_manager",
        "take(-(-num_tokens // self.block_size))",
        "take(num_tokens // self.block_size + 1)",
        "ROOM SHORT",
    ),
    "a block too late": ("block_manager", "return -(-end // self", "return -(-(end - 1) // self", "ROOM SHORT"),
    "all chats in one row": ("block_manager", "row = self.tables.seq_lens.index(-1)", "row = 0", "ROW I2"),
    "one block for two rows": (
        "block_manager",
        "self.extend(r, [ids.pop(0) for _ in range(n)]",
        "self.extend(r, ids[:n]",
        "I2",
    ),
    "lengths not kept": (
        "block_manager",
        "        t.seq_lens[row] = length\n",
        "        t.seq_lens[row] = max(t.seq_lens[row], 0)\n",
        "ROOM",
    ),
    "a row named twice": ("block_manager", "len(set(rows)) < len(rows) or ", "", "REFUSE I2 ROOM CRASH"),
    "slots of padding": ("block_manager", "if block >= 0 else -1)", ")", "SLOT"),
    "slots in 32 bits": (
        "block_manager",
        "slots.append(int(block) * block_size",
        "slots.append(np.int32(block) * np.int32(block_size)",
        "SLOT",
    ),
    "check looks at no count": ("block_manager", "        assert [held", "        [held", "CHECK"),
    "fork does not count": ("copy_on_write", "    manager.pool.claim(ids)\n    return child", "    return child", "I2"),
    "no copy before the write": ("copy_on_write", "if counts[tail] > 1:", "if False:", "I3"),
    "no copy, and append does not mind": ("block_manager", 'raise ValueError("others hold the tail")', "pass", "I3"),
    "the copies are kept secret": ("copy_on_write", "pairs.append((tail, fresh))", "pass", "I3"),
    "the pairs are turned round": ("copy_on_write", "(tail, fresh))", "(fresh, tail))", "I3"),
    "the old tail is not let go": ("copy_on_write", "        pool.release([tail])\n", "", "I2"),
    "the last holder copies too": (
        "copy_on_write",
        "            if counts[tail] > 1:",
        "            if pool.ref_count[tail] > 1:",
        "COPY",
    ),
    "full blocks are copied": (
        "block_manager",
        "return index if offset else None",
        "return index if offset else max(0, index - 1)",
        "COPY REFUSE CRASH",
    ),
    "counts the copies only": (
        "copy_on_write",
        "needed = len(copied) + sum(manager.missing(row, new_tokens) for row in rows)",
        "needed = len(copied)",
        "WHOLE",
    ),
    "rewound head first": ("copy_on_write", "release(cut[::-1])", "release(cut)", "FIFO"),
    "rewinds without releasing": ("copy_on_write", "manager.pool.release(cut[::-1])", "pass", "I2"),
    "rewires in turn": (
        "copy_on_write",
        "    t = manager.tables\n    new =",
        "    if len(rows) > 1:\n        for row, parent in zip(rows, parents):\n"
        "            rewire(manager, [row], [parent])\n        return\n    t = manager.tables\n    new =",
        "BEAM",
    ),
    "whole prompt found": ("prefix_cache", "(len(tokens) - 1) // size * size", "len(tokens) // size * size", "LAST"),
    "nothing is forgotten": ("prefix_cache", "    cache.forget(taken)\n", "", "I4"),
    "key without parent": ("prefix_cache", "return (parent, tuple(chunk))", "return tuple(chunk)", "I4"),
    "key without tenant": (
        "prefix_cache",
        "size, parent, ids = manager.block_size, root,",
        "size, parent, ids = manager.block_size, b'',",
        "I4 FIND",
    ),
    "parts run into each other": (
        "prefix_cache",
        "json.dumps([[kind, type(value).__name__, str(value)] for kind, value in parts])",
        '"".join(kind + str(value) for kind, value in parts)',
        "KEYS",
    ),
    "taken before claimed": (
        "prefix_cache",
        "    pool.claim(hits)\n    taken = pool.take(fresh)\n",
        "    taken = pool.take(fresh)\n    pool.claim(hits)\n",
        "ROW REFUSE I1 I2 FIFO",
    ),
    "idle hits cost nothing": (
        "prefix_cache",
        "needed = fresh + sum(pool.ref_count[b] == 0 for b in hits)",
        "needed = fresh",
        "WHOLE",
    ),
    "released head first": ("prefix_cache", "detach(row)[::-1])", "detach(row))", "TAIL"),
    "forgotten when given back": (
        "prefix_cache",
        "    cache.names[ids[index]] = parent",
        "    cache.names = {ids[index]: parent}",
        "FIND",
    ),
    "keys and values change places": ("kv_store", "[block, 0, offset] = k[i]", "[block, 0, offset] = v[i]", "BYTES"),
    "padding written": ("kv_store", "if slot >= 0:", "if True:", "BYTES"),
    "copies read the start": (
        "kv_store",
        "            for source, destination in pairs:\n                tensor[destination] = tensor[source].clone()",
        "            start = tensor.clone()\n            for source, destination in pairs:\n"
        "                tensor[destination] = start[source]",
        "COPIES",
    ),
    "copies in the first layer only": (
        "kv_store",
        "for tensor in self.tensors:",
        "for tensor in self.tensors[:1]:",
        "COPIES",
    ),
    "reads the rest of the block": (
        "attention",
        "at = [(",
        "seen = range(seen.start, -(-seen.stop // size) * size)\n            at = [(",
        "STALE",
    ),
    "a query sees the next token": (
        "attention",
        "stop = seq_len - len(query) + i + 1",
        "stop = min(seq_len, seq_len - len(query) + i + 2)",
        "DENSE",
    ),
    "heads grouped the wrong way": ("attention", "head // group)", "head % keys.shape[2])", "DENSE"),
    "window too wide": ("attention", "stop - window)", "stop - window - 1)", "DENSE"),
    "empty row is not 0": ("attention", "np.zeros(query.shape)", "np.ones(query.shape)", "DENSE"),
}
CHECKED_AS = {"no copy, and append does not mind": "copy_on_write", "full blocks are copied": "copy_on_write"}
ALSO = {  # where a fault has two places
    "no copy, and append does not mind": ("copy_on_write", "if counts[tail] > 1:", "if False:"),
}


@pytest.mark.parametrize("key", MUTANTS)
def test_a_single_fault_is_named(mine, key):
    module, old, new, rules = MUTANTS[key]
    sources = dict(PLAIN)
    for place, there, instead in [(module, old, new), *([ALSO[key]] if key in ALSO else [])]:
        assert there in sources[place], "the variant does not fit the module"
        sources[place] = sources[place].replace(there, instead)
    mine(sources)
    kind = CHECKED_AS.get(key, module)
    found = faults(f"mine.{kind}", programs=80, seconds=0.5 if "never" in key else 10)
    assert found, "not caught"
    assert found[0].rule in rules.split(), "\n".join(found[0].lines(CHAPTERS[kind]))
    said = "\n".join(found[0].lines(CHAPTERS[kind]))
    assert f"rule      {found[0].rule}: {RULES[found[0].rule].sentence}" in said
    assert re.search(r"expected  \S", said)
    assert re.search(r"found     \S", said)
    assert re.search(r"read      chapter \d\d", said)
    assert re.search(r"hint      \S", said)


def test_there_are_enough_variants():
    assert len(MUTANTS) >= 12


def test_every_rule_is_broken_by_a_variant():
    named = {rule for *_, rules in MUTANTS.values() for rule in rules.split()}
    # RUN is named only where a table differs and no sharper rule does.
    assert set(RULES) - named == {"RUN"}


def test_the_run_by_hand_names_what_no_other_rule_does():
    tables = [(("add", "A", 6), "A 1 0", "2 3 4 5 6 7", 2)]
    with pytest.raises(Broken, match=r"tables \[A 1 0\], queue \[2 3 4 5 6 7\]"):
        run_by_hand(partial(ManagerSubject, paged_kv.block_manager, 8, 4, 32), tables)


# ---------------------------------------------------------------------------- the random programs


@pytest.mark.parametrize("kind", SUBJECTS)
def test_the_programs_do_something_and_are_refused_something(kind, monkeypatch):
    """Each operation is carried out often, and refusals of each kind occur: a check that never fires proves nothing."""
    make, draw = SUBJECTS[kind]
    module, done, refused = importlib.import_module(f"paged_kv.{kind}"), Counter(), Counter()
    attempt = make.attempt

    def counted(self, allowed, *args, **options):
        refused.update(name for name in allowed if name)
        return attempt(self, allowed, *args, **options)

    monkeypatch.setattr(make, "attempt", counted)
    rng = Random(0)
    for program in range(24 if kind == "kv_store" else 100):
        subject = make(module, *SHAPES[program % len(SHAPES)])
        for _ in range(STEPS):
            op = draw(rng)
            done[op[0]] += subject.step(op)
    assert set(done) == {name.removeprefix("do_") for name in dir(make) if name.startswith("do_")}
    assert min(done.values()) >= 20, done
    if kind != "kv_store":
        assert refused["OutOfBlocks"] >= 20, refused
        assert refused["ValueError"] >= (0 if kind == "prefix_cache" else 20), refused


def test_a_fault_is_shrunk(mine):
    """Never longer than needed by far: a double release in a program of 24 steps comes down to one or two."""
    pool = PLAIN["block_pool"].replace("self.queue.append(i)", "self.queue += [i] if i != 2 else [i, i]")
    mine({"block_pool": pool})
    (fault,) = faults("mine.block_pool")
    assert fault.rule == "I1"
    assert [step.split()[1] for step in fault.steps[1:]] in (["takes", "releases"], ["claims", "releases"])


def test_another_seed_gives_other_programs(mine):
    mine(PLAIN)
    assert faults("mine.block_manager", seed=7, programs=300) == []


# ---------------------------------------------------------------------------- the command


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    run = [sys.executable, "-c", BLOCKED + "import runpy\nsys.argv = ['check', *sys.argv[1:]]\n"
           "runpy.run_module('paged_kv.check', run_name='__main__')", *arguments]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(run, cwd=folder, env=env, capture_output=True, text=True, check=False)


BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "typer", "rich", "hypothesis", "transformers", "triton"}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocked())
"""


def test_the_command_needs_numpy_only_and_its_exit_codes(mine, tmp_path):
    mine({**PLAIN, "wrong": PLAIN["block_pool"].replace("self.queue.pop(0)", "self.queue.pop()")})
    good = command(tmp_path, "--module", "mine.block_manager", "--programs", "20")
    assert (good.returncode, good.stderr) == (0, "")
    assert good.stdout.endswith("all checks pass\n")
    bad = command(tmp_path, "--module", "mine.wrong", "--as", "block_pool", "--programs", "20")
    assert (bad.returncode, bad.stderr) == (1, "")
    assert "rule      FIFO: " in bad.stdout
    assert "Traceback" not in bad.stdout
    for arguments, said in [
        (["--module", "mine.nothing", "--as", "block_pool"], "there is no mine/nothing.py"),
        (["--module", "mine.wrong"], "--as wrong: there are checks for block_pool"),
        ([], "--module NAME is needed"),
        (["--nonsense"], "unrecognized arguments"),
    ]:
        done = command(tmp_path, *arguments)
        assert done.returncode == 2, arguments
        assert said in done.stderr
        assert "Traceback" not in done.stderr


def test_code_that_catches_everything_is_stopped_from_outside(mine, tmp_path):
    loop = "while True:\n                try: sum(range(1000))\n                except: pass"
    mine({"block_pool": PLAIN["block_pool"].replace("self.ref_count[i] = 1", loop)})
    done = command(tmp_path, "--module", "mine.block_pool", "--seconds", "0.2")
    assert done.returncode == 1
    assert done.stdout.startswith("TIME: Every operation ends.")


@pytest.mark.parametrize("said", ["raise SystemExit(0)", "exit()", "raise KeyError('x')"])
def test_code_that_leaves_is_a_fault_not_the_end(mine, said):
    mine({"block_pool": PLAIN["block_pool"].replace("self.ref_count[i] = 1", said), "early": said})
    assert faults("mine.block_pool")[0].rule == "CRASH"
    assert faults("mine.early", kind="block_pool")[0].rule == "CRASH"


def test_the_list(capsys):
    assert check_main(["--list"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown] == list(CHAPTERS)


def test_verbose_shows_the_traceback_and_nothing_else_does(mine, capsys):
    mine({"block_pool": PLAIN["block_pool"].replace("self.ref_count[i] = 1", "1 / 0")})
    assert check_main(["--module", "mine.block_pool"]) == 1
    assert "Traceback" not in (plain := capsys.readouterr().out)
    assert re.search(r"ZeroDivisionError: .*\(block_pool.py, line \d+, in take\)", plain)
    assert check_main(["--module", "mine.block_pool", "--verbose"]) == 1
    assert "Traceback" in capsys.readouterr().out


# ---------------------------------------------------------------------------- the words


@pytest.mark.parametrize("name", RULES)
def test_a_rule_points_to_a_section_that_exists(name):
    rule = RULES[name]
    assert rule.sentence.endswith(".")
    assert rule.hint.endswith(".")
    if rule.section:
        (chapter,) = (ROOT / "book").glob(f"{rule.chapter}_*.py")
        assert f"# ## {rule.section}\n" in chapter.read_text("utf-8")


@pytest.mark.parametrize(("name", "chapter"), [("I1", "03"), ("I2", "03"), ("I3", "06"), ("I4", "08")])
def test_an_invariant_reads_as_in_its_chapter(name, chapter):
    (path,) = (ROOT / "book").glob(f"{chapter}_*.py")
    stated = re.search(rf"> \*\*{name}\.\*\* ([^.:]*)", path.read_text("utf-8"))[1]
    assert RULES[name].sentence.rstrip(".") == " ".join(stated.split())
