"""A deterministic model whose whole memory is a paged store, driven through step plans alone.

The K/V of a token is one number that depends on the token and on everything before it.  The next token depends on all
numbers that are read back through the device's table.  So one wrong block, one stale entry, one write out of order
changes the output, and `reference` says what it should have been, with no pool at all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_kv.request import Output, Request
from paged_kv.scheduler import Scheduler
from paged_kv.step_plan import Host, StepPlan

U = NDArray[np.uint64]
MULTIPLY, ADD = np.uint64(6364136223846793005), np.uint64(1442695040888963407)


def mix(values: U) -> U:
    """Scramble each 64-bit number (the finaliser of MurmurHash3)."""
    values = values ^ (values >> np.uint64(33))
    values = values * np.uint64(0xFF51AFD7ED558CCD)
    values = values ^ (values >> np.uint64(33))
    values = values * np.uint64(0xC4CEB9FE1A85EC53)
    return values ^ (values >> np.uint64(33))


def chain(before: U, tokens: NDArray[np.integer[Any]]) -> U:
    """The K/V of tokens, from the K/V of the token before each."""
    return mix(before * MULTIPLY + tokens.astype(np.uint64) * ADD + np.uint64(1))


def beginning(request: Request) -> U:
    """What stands before the first token: the tenant's salt and the like shape the K/V."""
    text = repr(request.extra).encode()
    return mix(np.array([sum(byte * 257**i for i, byte in enumerate(text)) % 2**64], np.uint64))


def attend(kv: U) -> np.uint64:
    """One number from all K/V of a sequence, each by its place."""
    return mix((kv * (np.arange(len(kv), dtype=np.uint64) * np.uint64(2) + np.uint64(1))).sum(keepdims=True))[0]


def choose(
    states: Sequence[np.uint64], request: Request, indices: Sequence[int], vocab: int
) -> tuple[list[int], list[int]]:
    """Token and parent of each sample or beam; samples of one prompt differ by their index."""
    if request.beam_width < 2:
        seeds = np.array(states, np.uint64) + np.array(indices, np.uint64) * ADD
        return (mix(seeds) % np.uint64(vocab)).tolist(), list(range(len(indices)))
    total = np.array(states, np.uint64).sum() + np.arange(len(states), dtype=np.uint64) * ADD
    parents = (mix(total) % np.uint64(len(states))).tolist()
    own = np.array([states[p] for p in parents], np.uint64) + np.array(indices, np.uint64) * MULTIPLY
    return (mix(own) % np.uint64(vocab)).tolist(), parents


class ToyModel:
    """Store, host memory, table and last samples of a device that knows nothing but its plans."""

    def __init__(self, scheduler: Scheduler, requests: Mapping[Hashable, Request], vocab: int = 50) -> None:
        tables = scheduler.manager.tables
        self.size, self.vocab, self.requests = tables.block_size, vocab, requests
        self.rng = np.random.default_rng(0)
        self.store = self.junk(scheduler.manager.pool.num_blocks * self.size)
        self.host: dict[int, U] = {}
        self.table = np.full(tables.table.shape, -1, np.int64)
        self.tenant: dict[int, tuple[Hashable, int]] = {}
        self.last = np.empty(0, np.int64)
        self.tokens_run = self.moved = 0

    def junk(self, count: int) -> U:
        """Fresh memory."""
        return self.rng.integers(0, 2**63, count, dtype=np.int64).astype(np.uint64)

    def listen(self, plan: StepPlan) -> None:
        """Take in what changed in the tables."""
        for row in plan.news.closed:
            self.tenant.pop(row, None)
        for row, request_id, index in plan.news.opened:
            self.tenant[row] = request_id, index
            self.table[row] = -1
        rows, columns, ids = plan.news.table_updates
        self.table[rows, columns] = ids

    def move(self, plan: StepPlan) -> None:
        """Run the moves one by one."""
        for source, destination in plan.moves:
            data = self.host[source.index] if isinstance(source, Host) else self.block(source).copy()
            if isinstance(destination, Host):
                self.host[destination.index] = data.copy()
            else:
                self.block(destination)[:] = data
            self.moved += 1

    def block(self, index: int) -> U:
        """The numbers of one block, a view."""
        return self.store[index * self.size : (index + 1) * self.size]

    def slots(self, row: int, count: int) -> NDArray[np.int64]:
        """Where the first `count` tokens of a row lie, by the device's table."""
        at = np.arange(count)
        blocks = self.table[row, at // self.size]
        assert (blocks >= 0).all(), f"row {row}: no block for one of {count} tokens"
        return blocks * self.size + at % self.size

    def step(self, plan: StepPlan) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Run a plan: what was sampled, and the parents of beams."""
        self.listen(plan)
        self.move(plan)
        self.inspect(plan)
        tokens = plan.token_ids.astype(np.int64)
        late = plan.token_source >= 0
        tokens[plan.cu_seqlens[1:][late] - 1] = self.last[plan.token_source[late]]
        assert (tokens >= 0).all(), "a token that nobody has sampled"
        self.tokens_run += len(tokens)
        for i, row in enumerate(plan.rows.tolist()):  # in order: a row may read what one before it wrote in this step
            own = range(plan.cu_seqlens[i], plan.cu_seqlens[i + 1])
            state = self.state_at(row, int(plan.seq_lens[i] - plan.new_tokens[i]))
            for token, slot in zip(tokens[own].tolist(), plan.slot_mapping[own].tolist(), strict=True):
                state = chain(state, np.array([token]))
                self.store[slot] = state[0]
        seen = [
            attend(self.store[self.slots(row, n)])
            for row, n in zip(plan.rows.tolist(), plan.seq_lens.tolist(), strict=True)
        ]
        return self.sample(plan, seen)

    def state_at(self, row: int, start: int) -> U:
        """The K/V of the token before `start`, read through the table."""
        if start == 0:
            return beginning(self.requests[self.tenant[row][0]])
        return self.store[self.slots(row, start)[-1:]]

    def inspect(self, plan: StepPlan) -> None:
        """What every plan must satisfy."""
        assert len(set(plan.rows.tolist())) == len(plan.rows)
        assert (plan.new_tokens > 0).all()
        assert plan.cu_seqlens[-1] == plan.num_tokens == len(plan.positions) == len(plan.slot_mapping)
        assert (plan.cu_seqlens[1:] - plan.cu_seqlens[:-1] == plan.new_tokens).all()
        assert len(set(plan.slot_mapping.tolist())) == plan.num_tokens
        assert (plan.slot_mapping >= 0).all()
        assert plan.samples.sum() == len(plan.sample_rows) == len(plan.sample_logits)
        for i, row in enumerate(plan.rows.tolist()):
            own = slice(plan.cu_seqlens[i], plan.cu_seqlens[i + 1])
            slots = self.slots(row, int(plan.seq_lens[i]))[-int(plan.new_tokens[i]) :]
            assert (plan.slot_mapping[own] == slots).all(), "the table and the slots disagree"
            assert plan.positions[own].tolist() == list(range(plan.seq_lens[i] - plan.new_tokens[i], plan.seq_lens[i]))

    def sample(self, plan: StepPlan, seen: list[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """One token for each sample of the plan."""
        tokens, parents = np.full(len(plan.sample_rows), -1), np.zeros(len(plan.sample_rows), np.int64)
        in_beams = {place: (name, places) for name, places in plan.beams for place in places.tolist()}
        for i, row in enumerate(plan.sample_rows.tolist()):
            if tokens[i] >= 0:
                continue
            name, index = self.tenant[row]
            places = in_beams[i][1].tolist() if i in in_beams else [i]
            states = [seen[plan.sample_logits[place]] for place in places]
            indices = list(range(len(places))) if i in in_beams else [index]
            tokens[places], parents[places] = choose(states, self.requests[name], indices, self.vocab)
        self.last = tokens
        return tokens, parents

    def crash(self, plan: StepPlan) -> None:
        """A plan that fails half-way: nobody knows what its slots and copies hold now."""
        self.listen(plan)
        self.store[plan.slot_mapping] = self.junk(len(plan.slot_mapping))
        for _, destination in plan.moves:
            if isinstance(destination, Host):
                self.host.pop(destination.index, None)
            else:
                self.block(destination)[:] = self.junk(self.size)


def reference(request: Request, vocab: int = 50) -> list[list[int]]:
    """What the model answers with unlimited memory, for each sample or beam."""
    width, prompt = request.width, request.tokens.tolist()
    state = beginning(request)
    kv: list[U] = []
    for token in prompt:
        state = chain(state, np.array([token]))
        kv.append(state)
    texts = [(list(kv), list[int](), "") for _ in range(width)]
    for _ in range(request.max_new_tokens):
        states = [attend(np.concatenate(seen)) for seen, _, _ in texts]
        chosen, parents = choose(states, request, range(width), vocab)
        grown = []
        for i, (token, parent) in enumerate(zip(chosen, parents, strict=True)):
            seen, output, ended = texts[parent if request.beam_width > 1 else i]
            if not ended:
                ended = "stop" if token in request.stop_tokens and request.beam_width < 2 else ""
                output = [*output, token]
                seen = [*seen, chain(seen[-1], np.array([token]))]
            grown.append((seen, output, ended))
        texts = grown
    return [output for _, output, _ in texts]


def run(
    scheduler: Scheduler,
    requests: Iterable[Request | tuple[int, Request]],
    lag: int = 0,
    aborts: Mapping[int, Collection[Hashable]] | None = None,
    crashes: Collection[int] = (),
    vocab: int = 50,
    check: bool = True,
    watch: Callable[[StepPlan], None] | None = None,
    most_steps: int = 20_000,
) -> dict[Hashable, Output]:
    """Drive `scheduler` until every request has ended.

    Args: `requests`, each with a request_id and the step before which it arrives, 0 if not given; `lag`, how many steps
    the plans run ahead of the commits; `aborts` {step: ids}; `crashes`, numbers of plans that fail.
    """
    arrivals = sorted(((0, one) if isinstance(one, Request) else one for one in requests), key=lambda pair: pair[0])
    model = ToyModel(scheduler, {request.request_id: request for _, request in arrivals}, vocab)
    outputs: list[Output] = []
    flying: list[tuple[StepPlan, Any, Any]] = []
    for step in range(most_steps):
        while arrivals and arrivals[0][0] <= step:
            scheduler.submit(arrivals.pop(0)[1])
        outputs += [out for name in (aborts or {}).get(step, ()) if (out := scheduler.abort(name))]
        plan = scheduler.schedule()
        if plan is not None and plan.step in crashes:
            for held in [*(entry[0] for entry in flying), plan]:
                model.crash(held)
            scheduler.fail(flying[0][0] if flying else plan)
            flying.clear()
        elif plan is not None:
            if watch:
                watch(plan)
            flying.append((plan, *model.step(plan)))
        if flying and (len(flying) > lag or plan is None):
            outputs += scheduler.commit(*flying.pop(0))
        outputs += scheduler.take_outputs()
        if check:
            scheduler.check()
        if not (flying or arrivals or scheduler.ledger.groups):
            break
    else:
        raise AssertionError(f"not at an end after {most_steps} steps: {scheduler.counts}")
    pool = scheduler.manager.pool
    assert pool.num_free == pool.num_blocks, "blocks were lost"
    assert scheduler.counts["finished"] == len(outputs) == scheduler.ledger.submitted
    return {output.request_id: output for output in outputs}
