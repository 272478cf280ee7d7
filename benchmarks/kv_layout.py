"""Where should keys and values lie?  Four layouts of one pool, four things done with it.

    python benchmarks/kv_layout.py [--rounds 15]

Every layout offers the same strided views [num_blocks, block_size, num_kv_heads, head_size] a layer and a list of
tensors whose first dimension is the block, so that all of them run the same code and only the addresses differ.  The
rounds of the layouts alternate: a disturbance from outside hits all of them.  One thread, and its processor time, so
that waiting for a busy machine does not count.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from common import write_result
from torch import Tensor

from paged_kv.attention import paged_attention
from paged_kv.kv_store import TORCH_DTYPES
from paged_kv.sizing import KVSpec

BLOCK_SIZE, NUM_BLOCKS, NUM_SEQS, SEQ_LEN, COPIES = 16, 512, 8, 512, 16
MODELS = {
    "SmolLM2-135M": (KVSpec(30, 3, 64, "fp32"), 9),
    "Llama 3 8B": (KVSpec(32, 8, 128, "bf16"), 32),
}


class Layout:
    """One pool: per-layer views of keys and values, and the tensors that whole blocks are copied in."""

    def __init__(self, name: str, spec: KVSpec) -> None:
        self.name = name
        heads, size, layers = spec.num_kv_heads, spec.head_size, spec.num_layers

        def new(*shape: int) -> Tensor:
            return torch.randn(NUM_BLOCKS, *shape, BLOCK_SIZE, heads, size).to(TORCH_DTYPES[spec.dtype])

        if name == "K and V together":
            self.tensors = [new(2) for _ in range(layers)]
            self.keys, self.values = ([t[:, i] for t in self.tensors] for i in range(2))
        elif name == "K and V apart":
            self.tensors = [new() for _ in range(2 * layers)]
            self.keys, self.values = self.tensors[::2], self.tensors[1::2]
        elif name == "one slab":
            self.tensors = [new(layers, 2)]
            self.keys, self.values = ([self.tensors[0][:, n, i] for n in range(layers)] for i in range(2))
        else:
            swapped = [new(2).transpose(2, 3).contiguous() for _ in range(layers)]
            self.tensors = swapped
            self.keys, self.values = ([t[:, i].transpose(1, 2) for t in swapped] for i in range(2))


STATISTIC = "minimum of alternating rounds, processor time of one thread; medians beside it"
ACTIONS = ("write", "gather", "attention", "copy")
LAYOUTS = ("K and V together", "K and V apart", "one slab", "heads before slots")


def actions(layout: Layout, spec: KVSpec, num_q_heads: int) -> dict[str, Callable[[], object]]:
    """What is timed, each over all layers; the same inputs for every layout."""
    gen = torch.Generator().manual_seed(0)
    table = torch.randperm(NUM_BLOCKS, generator=gen).int().view(-1, SEQ_LEN // BLOCK_SIZE)[:NUM_SEQS]
    block, offset = table[:, -1].long(), torch.full((NUM_SEQS,), BLOCK_SIZE - 1)  # each one's last token
    dtype = TORCH_DTYPES[spec.dtype]
    k = torch.randn(NUM_SEQS, spec.num_kv_heads, spec.head_size, generator=gen).to(dtype)
    query = torch.randn(NUM_SEQS, num_q_heads, spec.head_size, generator=gen).to(dtype)
    cu, lens = torch.arange(NUM_SEQS + 1), torch.full((NUM_SEQS,), SEQ_LEN)
    source, target = torch.randperm(NUM_BLOCKS, generator=gen)[: 2 * COPIES].view(2, -1)
    views = list(zip(layout.keys, layout.values, strict=True))

    def write() -> None:
        for pair in views:
            for pool in pair:
                pool[block, offset] = k

    def gather() -> None:
        for pair in views:
            for pool in pair:
                pool[table[0].long()].flatten(0, 1)

    def attention() -> None:
        for keys, values in views:
            paged_attention(query, keys, values, table, cu, lens)

    def copy() -> None:
        for tensor in layout.tensors:
            flat = tensor.flatten(1)
            flat.index_copy_(0, target, flat.index_select(0, source))

    return {"write": write, "gather": gather, "attention": attention, "copy": copy}


def measure(model: str, rounds: int) -> list[dict[str, object]]:
    """One row a layout."""
    spec, num_q_heads = MODELS[model]
    layouts = [Layout(name, spec) for name in LAYOUTS]
    work = {layout.name: actions(layout, spec, num_q_heads) for layout in layouts}
    seconds: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds + 1):
        for name, acts in work.items():
            for action, run in acts.items():
                start = time.process_time()
                run()
                if number:  # the first round warms up
                    seconds.setdefault((name, action), []).append(time.process_time() - start)
    block_bytes = spec.bytes_per_block(BLOCK_SIZE)
    return [
        {
            "model": model,
            "layout": layout.name,
            "pieces_per_block": len(layout.tensors),
            "piece_bytes": block_bytes // len(layout.tensors),
            **{f"{a}_ms": round(1e3 * min(seconds[layout.name, a]), 3) for a in ACTIONS},
            **{f"{a}_median_ms": round(1e3 * statistics.median(seconds[layout.name, a]), 3) for a in ACTIONS},
        }
        for layout in layouts
    ]


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = [row for model in MODELS for row in measure(model, rounds)]
    first = {row["model"]: row for row in rows if row["layout"] == LAYOUTS[0]}
    headline = {
        f"{action}_x_{row['layout'].replace(' ', '_')}_{row['model'].split('-')[0].replace(' ', '_')}": round(
            row[f"{action}_ms"] / first[row["model"]][f"{action}_ms"], 2
        )
        for row in rows
        for action in ACTIONS
        if row["layout"] != LAYOUTS[0]
    }
    path = write_result(
        "kv_layout",
        modules=["kv_store", "attention"],
        workload=f"pool of {NUM_BLOCKS} blocks of {BLOCK_SIZE}, random tables; all layers: write {NUM_SEQS} tokens, "
        f"gather {SEQ_LEN}, attend {NUM_SEQS} x {SEQ_LEN}, copy {COPIES} blocks; 1 thread",
        repeats=rounds,
        statistic=STATISTIC,
        rows=rows,
        headline=headline,
    )
    print(path)
    for row in rows:
        print(*row.values())


if __name__ == "__main__":
    main()
