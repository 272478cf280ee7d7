# Exported from book/13_engine.py by tools/export.py; edit the chapter, not this file.
"""What an engine needs before it can start: room for K/V, limits; and its figures."""

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from paged_kv.block_manager import BlockManager
from paged_kv.delivery import Desk
from paged_kv.kv_store import KVStore
from paged_kv.preemption import POLICIES, Costs, Preemption
from paged_kv.prefix_cache import PrefixCache
from paged_kv.scheduler import Scheduler
from paged_kv.sizing import KVSpec, at_least, format_bytes, parse_bytes


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How an engine serves.

    Fields
        memory            for K/V: bytes, or text such as "4 GiB"; or num_blocks, of block_size.
                          By default 85 % of what is free on a GPU, 1 GiB on a CPU.
        max_seq_len       of prompt and answer; the model's own limit if None.
        max_running       sequences at once; 256, or the token budget if that is less, if None.
        token_budget      tokens a step at most.
        chunked           whether a prompt may take several steps.
        prefix_caching    whether equal beginnings are computed once.
        host_blocks       room for swapped K/V; 0: victims are always recomputed.
        costs, policy     of preemption: see `Costs` and `POLICIES`.
        batch_invariant   on a GPU: decode attention has the same bits in any batch.
        ahead             whether the CPU plans a step while the last one runs; on a GPU if None.
        seed              of requests that give none: they get seed + their number.
    """

    memory: int | str | None = None
    num_blocks: int | None = None
    block_size: int = 16
    max_seq_len: int | None = None
    max_running: int | None = None
    token_budget: int = 2048
    chunked: bool = True
    prefix_caching: bool = True
    host_blocks: int = 0
    costs: Costs | None = None
    policy: str = "cheapest"
    batch_invariant: bool = False
    ahead: bool | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_settings(self)


def check_settings(given: Settings) -> None:
    """ValueError, naming the field, for a value that is not of its kind."""
    for name in ("chunked", "prefix_caching", "batch_invariant", "ahead"):
        value = getattr(given, name)
        if not (isinstance(value, bool) or (name == "ahead" and value is None)):
            raise ValueError(f"{name} = {value!r}: True or False is needed")
    at_least(0, "host_blocks", given.host_blocks)
    at_least(0, "seed", given.seed)
    if given.policy not in list(POLICIES):
        raise ValueError(f"policy = {given.policy!r}: one of {sorted(POLICIES)} is needed")
    if not isinstance(given.costs, Costs | None):
        raise ValueError(f"costs = {given.costs!r}: Costs are needed, or None")


def free_memory(device: torch.device) -> int:
    """Bytes that nobody has taken: of the GPU; 1 GiB on a CPU, whatever there is."""
    if device.type != "cuda":
        return 2**30
    free, _ = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + held


def make_store(spec: KVSpec, settings: Settings, device: torch.device) -> KVStore:
    """A store of `num_blocks` blocks, or of as many as `memory` holds.

    Raises: ValueError, with advice, where that is not one block, or more than the device has.
    """
    if settings.memory is not None and settings.num_blocks is not None:
        raise ValueError("memory, num_blocks: one of them, not both")
    block_size = at_least(1, "block_size", settings.block_size)
    size, num_blocks = spec.bytes_per_block(block_size), settings.num_blocks
    if num_blocks is None:
        asked = bytes_asked(settings.memory, device)
        num_blocks = asked // size
        if not num_blocks:
            raise ValueError(f"memory: {format_bytes(asked)}, one block takes {format_bytes(size)}")
    return new_store("memory", spec, num_blocks, block_size, device)


def bytes_asked(memory: int | str | None, device: torch.device) -> int:
    """The setting `memory` in bytes; where it is None, what may be taken of the device."""
    if memory is None:
        free = free_memory(device)
        return int(0.85 * free) if device.type == "cuda" else free
    if not isinstance(memory, str):
        return at_least(0, "memory", memory)
    try:
        return parse_bytes(memory)
    except ValueError as error:
        raise ValueError(f"memory: {error}") from None


def new_store(
    name: str, spec: KVSpec, num_blocks: int, block_size: int, device: torch.device
) -> KVStore:
    """A store; ValueError, beginning with `name`, with advice, where there is no room for it."""
    try:
        return KVStore(spec, num_blocks, block_size, device)
    except (RuntimeError, TypeError) as error:  # TypeError: a size of more than 64 bits
        want = format_bytes(num_blocks * spec.bytes_per_block(block_size))
        advice = "give a smaller memory= or num_blocks=, or a smaller model"
        if name != "memory":
            advice = f"give a smaller {name}="
        free = "" if name != "memory" else f", and {format_bytes(free_memory(device))} are free"
        raise ValueError(
            f"{name}: {num_blocks} blocks are {want}{free} on {device}; {advice}"
        ) from error


def check_given(model: Any, tokenizer: Any) -> None:
    """ValueError, naming it, for what is no model or no tokenizer of transformers."""
    if not (hasattr(model, "config") and hasattr(model, "device")):
        raise ValueError(f"model = {model!r}: a loaded model of transformers is needed")
    if tokenizer is not None and not hasattr(tokenizer, "backend_tokenizer"):
        raise ValueError(f"tokenizer: {type(tokenizer).__name__} is not a fast one")


def longest_sequence(config: Any, asked: int | None, store: KVStore) -> int:
    """Tokens that a row may hold: as asked, or the model's limit, or else all of the store's."""
    limit: int | None = getattr(config, "max_position_embeddings", None)
    if asked is None:
        return limit or store.num_blocks * store.block_size
    if at_least(1, "max_seq_len", asked) > (limit or asked):
        raise ValueError(f"max_seq_len = {asked}: the model was made for {limit}")
    return asked


def assumed_costs(bytes_per_block: int, on_gpu: bool) -> Costs:
    """Figures to weigh recompute against swap where nobody has measured the machine."""
    bandwidth, prefill = (25e9, 20_000.0) if on_gpu else (5e9, 200.0)
    return Costs(bytes_per_block, bandwidth, prefill, source="assumed")


def make_scheduler(
    settings: Settings, store: KVStore, longest: int
) -> tuple[Scheduler, Preemption]:
    """A scheduler over the blocks of `store`, and what it does when they run out.

    Raises: ValueError, naming the setting.
    """
    budget, most = settings.token_budget, settings.max_running
    most = min(256, at_least(1, "token_budget", budget)) if most is None else most
    manager = BlockManager(
        store.num_blocks, store.block_size, at_least(1, "max_running", most), longest
    )
    cache = PrefixCache(manager.pool, store.block_size) if settings.prefix_caching else None
    on_gpu = store.tensors[0].device.type == "cuda"
    costs = settings.costs or assumed_costs(store.nbytes // store.num_blocks, on_gpu)
    relief = Preemption(manager, settings.host_blocks, costs, POLICIES[settings.policy])
    scheduler = Scheduler(
        manager, cache, token_budget=budget, max_running=most, chunked=settings.chunked,
        relief=relief, clock=time.perf_counter,
    )  # fmt: skip
    return scheduler, relief


@dataclass(frozen=True)
class EngineStats:
    """The figures of one moment.

    Fields
        steps              launched so far;  step_kinds: how they ran, such as {"graph": 90}.
        tokens_run         through the model;  tokens_made: sampled and kept.
        waiting, running, swapped, finished   requests.
        blocks, blocks_used                   of the pool; used by running sequences.
        slots_filled       of the used blocks' slots, the share that holds a token; 1 if none.
        hit_tokens, queried_tokens            of admitted prompts, by the prefix cache.
        preemptions        how often each happened: "recompute", "swap", "restore", "drop".
    """

    steps: int
    step_kinds: dict[str, int]
    tokens_run: int
    tokens_made: int
    waiting: int
    running: int
    swapped: int
    finished: int
    blocks: int
    blocks_used: int
    slots_filled: float
    hit_tokens: int
    queried_tokens: int
    preemptions: dict[str, int]

    @property
    def hit_rate(self) -> float:
        """Hit tokens to queried tokens."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0


def take_stats(
    desk: Desk, relief: Preemption, kinds: Counter[str], steps: int, tokens_run: int
) -> EngineStats:
    """The figures of this moment; `kinds`, `steps`, `tokens_run` as the engine counted them."""
    scheduler = desk.scheduler
    pool, tables, cache = scheduler.manager.pool, scheduler.manager.tables, scheduler.cache
    held = int(np.maximum(tables.seq_lens, 0).sum())
    slots = int(tables.num_blocks.sum()) * tables.block_size
    counts = scheduler.counts
    hits = (0, 0) if cache is None else (cache.stats.hit, cache.stats.queried)
    return EngineStats(
        steps, dict(kinds), tokens_run, desk.tokens_made,
        counts["waiting"], counts["running"], counts["swapped"], counts["finished"],
        pool.num_blocks, pool.num_blocks - pool.num_free, held / slots if slots else 1.0,
        *hits, {kind: relief.events[kind] for kind in ("recompute", "swap", "restore", "drop")},
    )  # fmt: skip
