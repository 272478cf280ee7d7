# Exported from book/14_at_full_speed.py by tools/export.py; edit the chapter, not this file.
"""Block moves between device and pinned host memory, one launch a direction, nobody waits."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from collections.abc import Iterable, Sequence

import torch

from paged_kv.host_pool import run_moves
from paged_kv.kernels_cache import tensor_addresses
from paged_kv.kv_store import KVStore, resolve_copies
from paged_kv.step_plan import Host, Move
from paged_kv.triton_device import jit, next_pow2, tl, triton


@jit(do_not_specialize=["words"])
def move_kernel(sources, targets, pairs, words, SLICE: tl.constexpr):
    """One slice of one block of one tensor: from one list of tensors to another."""
    at = tl.program_id(0) * SLICE + tl.arange(0, SLICE)
    pair = pairs + 2 * tl.program_id(2)
    source = tl.load(sources + tl.program_id(1)).to(tl.pointer_type(tl.int64))
    target = tl.load(targets + tl.program_id(1)).to(tl.pointer_type(tl.int64))
    source, target = tl.multiple_of(source, 16), tl.multiple_of(target, 16)
    data = tl.load(source + tl.load(pair).to(tl.int64) * words + at, mask=at < words)
    tl.store(target + tl.load(pair + 1).to(tl.int64) * words + at, data, mask=at < words)


class FastMoves:
    """Runs the moves of plans between two stores of one shape.

    Host memory is pinned, so that the device reads and writes it itself.
    State: `stores` and the addresses of their tensors, device first.  On a CPU, or where a block
    is no multiple of 8 bytes: `run_moves`.
    """

    def __init__(self, device: KVStore, host: KVStore) -> None:
        self.stores = device, host
        words = device.tensors[0][:1].nbytes % 8 == 0
        self.on_gpu = words and device.tensors[0].device.type == "cuda"
        if self.on_gpu:
            host.tensors[:] = [tensor.pin_memory() for tensor in host.tensors]
            where = device.tensors[0].device
            self.addresses = [tensor_addresses(s.tensors).to(where) for s in self.stores]

    def __call__(self, moves: Sequence[Move]) -> None:
        """Run `moves`; the result is that of one after the other."""
        pairs = resolve_copies(moves)
        ends = {end for pair in pairs for end in pair}
        if not self.on_gpu or len(ends) < len({source for source, _ in pairs}) + len(pairs):
            run_moves(moves, *self.stores)  # some block is both read and written
            return
        kinds: dict[tuple[bool, bool], list[tuple[int, int]]] = {}
        for pair in pairs:
            kind = isinstance(pair[0], Host), isinstance(pair[1], Host)
            ids = [end.index if isinstance(end, Host) else end for end in pair]
            kinds.setdefault(kind, []).append((ids[0], ids[1]))
        for (source, target), ids_of in kinds.items():
            self.launch(self.addresses[source], self.addresses[target], ids_of)

    def launch(
        self, sources: torch.Tensor, targets: torch.Tensor, pairs: Iterable[tuple[int, int]]
    ) -> None:
        """All pairs of one direction."""
        tensors = self.stores[0].tensors
        where = torch.tensor(list(pairs), dtype=torch.int64).to(tensors[0].device)
        words = tensors[0][0].nbytes // 8
        piece = min(1024, next_pow2(words))
        grid = (triton.cdiv(words, piece), len(tensors), len(where))
        move_kernel[grid](sources, targets, where, words, SLICE=piece)
