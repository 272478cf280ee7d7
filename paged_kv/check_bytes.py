# Exported from book/appendices/A5_check_your_own.py by tools/export.py; edit the chapter, not this file.
"""The store and attention through a table, against NumPy's own indexing; needs torch."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from paged_kv.check_reader import call_theirs
from paged_kv.check_rules import Broken
from paged_kv.check_subjects import Subject
from paged_kv.sizing import KVSpec


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
