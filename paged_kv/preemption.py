# Exported from book/10_preemption.py by tools/export.py; edit the chapter, not this file.
"""When blocks run out: whom to put aside, and whether its K/V are dropped or kept.

`Preemption` is a Relief, as the scheduler asks for one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np

from paged_kv.block_manager import BlockManager
from paged_kv.copy_on_write import blocks_held
from paged_kv.host_pool import HostPool, blocks_to_return, unpack
from paged_kv.ledger import Ledger
from paged_kv.request import Group
from paged_kv.sizing import at_least
from paged_kv.step_plan import Move


@dataclass(frozen=True)
class Costs:
    """What a machine takes for the two ways out.

    Fields
        bytes_per_block       of all layers.
        bandwidth             B/s between device and host, one way at a time.
        prefill_tokens_per_s  tokens of a replay.
        transfer_latency      s, once for each way.
        seconds_per_pair      s, attention of one query to one key; 0 leaves replay linear.
        seconds_per_token     s, a decoding step: to know whether a deadline can be kept.
        source                "assumed", or where the numbers were measured.
    Raises: ValueError naming the field.
    """

    bytes_per_block: int
    bandwidth: float
    prefill_tokens_per_s: float
    transfer_latency: float = 0.0
    seconds_per_pair: float = 0.0
    seconds_per_token: float = 0.0
    source: str = "assumed"

    def __post_init__(self) -> None:
        at_least(1, "bytes_per_block", self.bytes_per_block)
        for name in ("bandwidth", "prefill_tokens_per_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} = {getattr(self, name)}: more than 0 is needed")
        for name in ("transfer_latency", "seconds_per_pair", "seconds_per_token"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} = {getattr(self, name)}: 0 or more is needed")

    def replay_seconds(self, tokens: int, context: int = 0) -> float:
        """To run `tokens` again behind `context` tokens that are there."""
        pairs = tokens * context + tokens * (tokens + 1) / 2
        return tokens / self.prefill_tokens_per_s + pairs * self.seconds_per_pair

    def swap_seconds(self, blocks: int) -> float:
        """To move `blocks` blocks out, and back."""
        return 2 * (self.transfer_latency + blocks * self.bytes_per_block / self.bandwidth)


class Candidate:
    """A running group as a policy sees it; a figure is looked up when it is first asked for.

    State: `order`, (priority, arrival number), lower first; `host_free`, free host blocks.
    """

    def __init__(self, ledger: Ledger, group: Group, costs: Costs, host_free: int) -> None:
        self.ledger, self.group, self.costs = ledger, group, costs
        self.order, self.host_free = group.order, host_free
        self.rows = ledger.rows_of(group)

    @cached_property
    def frees(self) -> int:
        """Device blocks that nobody else holds: what putting it aside gains."""
        return self.ledger.blocks_freed_by(self.group)

    @cached_property
    def moves(self) -> int:
        """Distinct blocks that a swap moves out, and later back."""
        tables, known = self.ledger.manager.tables, self.ledger.rows.known
        kept = np.minimum(tables.seq_lens[self.rows], known[self.rows] - 1)
        starts = np.arange(tables.table.shape[1]) * tables.block_size
        return len(np.unique(tables.table[self.rows][starts < kept[:, None]]))

    @cached_property
    def replay(self) -> int:
        """Tokens that a recompute runs again if the blocks of others stay."""
        own = self.frees * self.ledger.manager.block_size
        return max(1, min(own, self.ledger.tokens_to_replay(self.group, after_hits=False)))

    @cached_property
    def method(self) -> str:
        """The quicker of "swap", where the host pool has room, and "recompute"."""
        possible = 0 < self.moves <= self.host_free
        quicker = self.costs.swap_seconds(self.moves) < self.costs.replay_seconds(self.replay)
        return "swap" if possible and quicker else "recompute"

    @cached_property
    def seconds(self) -> float:
        """What `method` takes, there and back."""
        if self.method == "swap":
            return self.costs.swap_seconds(self.moves)
        return self.costs.replay_seconds(self.replay)

    @cached_property
    def left(self) -> int:
        """Tokens that its longest sample may still make."""
        state = self.ledger.rows
        return max(1, int((state.limit[self.rows] - state.known[self.rows]).max(initial=1)))

    @cached_property
    def slack(self) -> float:
        """Seconds to its deadline once the work left is done; inf without one, or too late."""
        deadline = self.group.request.deadline
        if deadline is None:
            return math.inf
        work = self.left * self.costs.seconds_per_token + self.seconds
        slack = deadline - self.ledger.now() - work
        return slack if slack >= 0 else math.inf


Policy: TypeAlias = Callable[[Candidate], tuple[float, ...]]


def last_arrived(one: Candidate) -> tuple[float, ...]:
    """Whoever came last, whatever its priority."""
    return (-one.group.serial,)


def lowest_priority(one: Candidate) -> tuple[float, ...]:
    """The least important; among equals, the last that came."""
    return tuple(-part for part in one.order)


def cheapest(one: Candidate) -> tuple[float, ...]:
    """Least seconds for each block gained and step that it is gained for."""
    gain = one.frees * one.left
    return (one.seconds / gain if gain else math.inf, *lowest_priority(one))


def most_slack(one: Candidate) -> tuple[float, ...]:
    """Whoever can wait longest; those without a deadline first."""
    return (-one.slack, *lowest_priority(one))


def cost_x_slack(one: Candidate) -> tuple[float, ...]:
    """Cheap and patient: the price of `cheapest` times the urgency 1 / (1 + slack)."""
    price = cheapest(one)
    urgency = 1 / (1 + one.slack)
    return (price[0] * urgency if urgency else 0.0, *price)


POLICIES: dict[str, Policy] = {
    policy.__name__: policy
    for policy in (last_arrived, lowest_priority, cheapest, most_slack, cost_x_slack)
}


class Preemption:
    """A Relief that chooses a victim by a policy, and recompute or swap by cost.

    Args: `manager`, the scheduler's; `host_blocks`, the limit of the host pool; `costs`;
    `policy`, such as `cheapest`.
    State
        host    HostPool, with a parcel for each group that is swapped.
        events  how often each happened: "recompute", "swap", "restore", "drop".
    Invariants: the first candidate in order is never the victim; a group has a parcel iff it
    is swapped.
    """

    def __init__(
        self, manager: BlockManager, host_blocks: int, costs: Costs, policy: Policy = cheapest
    ) -> None:
        self.manager, self.costs, self.policy = manager, costs, policy
        self.host = HostPool(host_blocks)
        self.events: Counter[str] = Counter()

    def price(self, ledger: Ledger, group: Group) -> Candidate:
        """What a policy may know of `group`, as things stand now."""
        return Candidate(ledger, group, self.costs, self.host.num_free)

    def victim(self, ledger: Ledger, candidates: Sequence[Group]) -> Group:
        """Of `candidates`, in order, the one to put aside; never the first of them."""
        priced = [self.price(ledger, group) for group in candidates[1:]]
        return min(priced, key=self.policy).group

    def evict(self, ledger: Ledger, group: Group) -> list[Move]:
        """Put `group` aside by the quicker method; return the moves device -> host."""
        method = self.price(ledger, group).method
        self.events[method] += 1
        if method == "recompute":
            ledger.release(group)
            return []
        return self.host.put(group.id, ledger.suspend(group))

    def restore(self, ledger: Ledger, group: Group) -> list[Move] | None:
        """Bring a swapped group back if its blocks *and* those of its next tokens are there.

        Returns: the moves host -> device, or None with nothing changed.
        """
        saved = self.host.parcels[group.id]
        known = [len(group.samples[one.index].tokens) for one in saved]
        needed = blocks_to_return(saved, known, self.manager.block_size)
        if needed > self.manager.pool.num_free:
            return None
        rows, moves = unpack(self.manager, saved)
        if ledger.cache is not None:
            ledger.cache.forget(blocks_held(self.manager, rows))
        self.host.discard(group.id)
        ledger.resume(group, {one.index: row for one, row in zip(saved, rows, strict=True)})
        self.events["restore"] += 1
        return moves

    def drop(self, ledger: Ledger, group: Group) -> None:
        """Forget the parcel of a swapped group that will not come back this way."""
        self.host.discard(group.id)
        self.events["drop"] += 1
