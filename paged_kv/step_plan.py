# Exported from book/09_scheduling.py by tools/export.py; edit the chapter, not this file.
"""What the device is to do in one step: everything it needs, and nothing else."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from paged_kv.request import Group, Ints, Tokens
from paged_kv.residents import News, Residents, take_news
from paged_kv.turns import Turn


@dataclass(frozen=True)
class Host:
    """A block of host memory, by its index there."""

    index: int


Move: TypeAlias = tuple[int | Host, int | Host]


@dataclass(frozen=True, eq=False)
class StepPlan:
    """One step, decided.  n sequences run T tokens; S tokens are sampled.  All Ints are int64.

    First the news are taken in, then the moves are made one by one, then K/V are written.
    Fields
        step           number of the plan.
        rows           [n];  new_tokens [n], tokens that each runs.
        seq_lens       [n]: tokens in the cache once this step has written its own.
        cu_seqlens     [n + 1]: sequence i owns tokens cu[i] to cu[i + 1] - 1.
        token_ids      int32 [T]: -1 where the previous plan samples it; see `token_source`.
        token_source   [n]: which sample of the previous plan is the last token, else -1.
        positions      [T];  slot_mapping [T]: where the K/V go.
        sample_rows    [S]: the row that each sample belongs to.
        sample_logits  [S]: the sequence, 0 to n - 1, whose logits it is drawn from.
        sample_serials [S]: the tenants of these rows; who moved out gets no token.
        beams          for each beam group its id, and its samples in the order of its beams.
        moves          (source, destination) blocks.
        news           `closed` rows; `opened`, (row, request id, sample index) of new tenants;
                       `table_updates`, (rows, columns, ids): in this order.
    """

    step: int
    rows: Ints
    new_tokens: Ints
    seq_lens: Ints
    cu_seqlens: Ints
    token_ids: NDArray[np.int32]
    token_source: Ints
    positions: Ints
    slot_mapping: Ints
    sample_rows: Ints
    sample_logits: Ints
    sample_serials: Ints
    beams: tuple[tuple[Hashable, Ints], ...]
    moves: tuple[Move, ...]
    news: News

    @property
    def num_tokens(self) -> int:
        """Tokens that the step runs."""
        return len(self.token_ids)

    @property
    def samples(self) -> Ints:
        """int64 [n]: tokens sampled behind each sequence's last one, 0 in mid-prefill."""
        return np.bincount(self.sample_logits, minlength=len(self.rows))


def pack_rows(
    home: Residents, rows: Ints, counts: Ints | int, ends: Ints
) -> tuple[Ints, Ints, Ints, Ints]:
    """The tokens that `rows` run, `counts` each, up to `ends`.

    Returns: new_tokens and cu_seqlens, one a row; row and position, one a token.
    """
    if isinstance(counts, int):
        assert counts == 1
        return home.ones[: len(rows)], home.ramp[: len(rows) + 1], rows, ends - 1
    cu = np.zeros(len(rows) + 1, np.int64)
    counts.cumsum(out=cu[1:])
    positions = np.arange(cu[-1]) + np.repeat(ends - cu[1:], counts)
    return counts, cu, np.repeat(rows, counts), positions


def slots_of(home: Residents, owner: Ints, positions: Ints) -> Ints:
    """As `slot_mapping`, for tokens that all have a row and a block.

    Where rows that run one token have grown, it tells `home` which cells of the table that are.
    """
    table, size = home.manager.tables.table, home.manager.block_size
    index = positions // size
    if home.grown:
        at = (index * size == positions).nonzero()[0]
        home.cells.append((owner[at], index[at]))
    blocks: Ints = table.reshape(-1)[owner * table.shape[1] + index].astype(np.int64)
    return (blocks - index) * size + positions


def draw_samples(
    rows: Ints, sampling: NDArray[np.bool_], children: Sequence[tuple[int, int]]
) -> tuple[Ints, Ints]:
    """The row that each sample goes to, and the sequence whose logits it is drawn from.

    Args: `children`, (parent row, row) of those that draw from their parent's logits.
    """
    logits = sampling.nonzero()[0]
    if not children:
        return rows[logits], logits
    of: dict[int, list[int]] = {}
    for parent, child in children:
        of.setdefault(parent, []).append(child)
    drawn = [(to, i) for i in logits.tolist() for to in (int(rows[i]), *of.get(int(rows[i]), ()))]
    both = np.array(drawn, np.int64)
    return both[:, 0], both[:, 1]


def beam_places(beams: Mapping[int, Group], sample_rows: Ints) -> tuple[tuple[Hashable, Ints], ...]:
    """For each beam group that samples in this step: its id, and where its samples stand."""
    place = {row: i for i, row in enumerate(sample_rows.tolist())} if beams else {}
    found = []
    for group in beams.values():
        places = [place.get(sample.row, -1) for sample in group.live()]
        if places[0] >= 0:
            assert min(places) >= 0, f"{group}: some beams are sampled, some are not"
            found.append((group.id, np.array(places)))
    return tuple(found)


def build_plan(
    home: Residents,
    batch: tuple[Ints, Ints | int],
    children: list[tuple[int, int]],
    beams: Mapping[int, Group],
    step: int,
    moves: Sequence[Move],
    lagging: bool,
) -> StepPlan:
    """The plan of a `batch` of rows and tokens each, which have their blocks already.

    Args: `children`, see `draw_samples`; `beams`, the running beam groups; `lagging`, whether
    a plan is in flight.  Changes `expected` and `sample_at`, and empties the journal of `home`.
    """
    state, (rows, counts) = home.rows, batch
    ends, source = home.manager.tables.seq_lens[rows].astype(np.int64), home.none[: len(rows)]
    new_tokens, cu, owner, positions = pack_rows(home, rows, counts, ends)
    token_ids = state.flat[owner * state.width + positions]
    if lagging:
        awaited = state.expected[rows] > state.known[rows]
        source = np.where(awaited, state.sample_at[rows], -1)
        token_ids[cu[1:][awaited] - 1] = -1
    sample_rows, logits = rows, home.ramp[: len(rows)]
    if beams or children or not isinstance(counts, int):
        sample_rows, logits = draw_samples(rows, ends == state.expected[rows], children)
    state.expected[sample_rows] = ends[logits] + 1
    state.sample_at[sample_rows] = home.ramp[: len(sample_rows)]
    slots, places = slots_of(home, owner, positions), beam_places(beams, sample_rows)
    sampling = (sample_rows, logits, state.serial[sample_rows], places)
    tokens = (token_ids, source, positions, slots)
    return StepPlan(
        step, rows, new_tokens, ends, cu, *tokens, *sampling, tuple(moves), take_news(home)
    )


class Cadence:
    """What comes round every block_size steps while the same rows run one token each.

    State
        step    number of the plan that it was made from.
        turns   block_size Turns: the rows in whose last block so many tokens stood then, a full
                block counting as none.
        starts  [n]: where each row begins in `RowState.flat`.
        stops   their stop tokens, [n] each.
    """

    def __init__(self, home: Residents, plan: StepPlan) -> None:
        self.step, size, state = plan.step, home.manager.block_size, home.rows
        offset = plan.seq_lens % size
        order = offset.argsort(kind="stable")
        edges = np.searchsorted(offset[order], home.ramp[: size + 1]).tolist()
        rows = plan.rows[order]
        cells, chunks = (rows * m.shape[1] for m in (home.manager.tables.table, state.chunks))
        named, spans = rows.tolist(), [slice(at, end) for at, end in pairwise(edges)]
        self.turns = [Turn(order[s], rows[s], named[s], cells[s], chunks[s]) for s in spans]
        self.starts = plan.rows * state.width
        self.stops = [stop[plan.rows] for stop in state.stop]

    def full(self, step: int) -> Turn:
        """Those whose last block is full after the plan of this number."""
        return self.turns[(self.step - step) % len(self.turns)]


def next_plan(
    home: Residents,
    last: StepPlan,
    ends: Ints,
    begin: Ints,
    moves: Sequence[Move],
    tokens: Tokens | None,
) -> StepPlan:
    """The plan behind `last` where nobody came or went: every row runs one token more.

    It equals `build_plan` in a fraction of the time, since most fields are those of `last`.
    Args: `ends`, the lengths then; `begin`, the places in the batch of those that begin a
    block; `tokens`, what `last` has sampled, or None while it is in flight.
    """
    count, news = len(ends), take_news(home)
    slots, source = last.slot_mapping + home.ones[:count], home.none[:count]
    if len(begin):
        slots[begin] = news.table_updates[2] * np.int64(home.manager.block_size)
    if tokens is None:
        tokens, source = source.astype(np.int32), home.ramp[:count]
    plan = object.__new__(StepPlan)
    vars(plan).update(  # plans are frozen, so they can share fields
        vars(last), step=last.step + 1, seq_lens=ends, token_ids=tokens, token_source=source,
        positions=last.seq_lens, slot_mapping=slots, moves=tuple(moves), news=news,
    )  # fmt: skip
    return plan
