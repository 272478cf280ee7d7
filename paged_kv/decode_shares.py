# Exported from book/11_triton_decode.py by tools/export.py; edit the chapter, not this file.
"""Who reads what: the tiles of a batch divided among the programs of a decode launch.

A tile is some tokens of one sequence.  All tiles of a batch, sequence after sequence, have
numbers; a program reads a run of them, which may begin and end inside a sequence.
"""

# mypy: ignore-errors
from __future__ import annotations

from paged_kv.triton_device import jit, tl


@jit
def split_tiles(tiles, SPLITS: tl.constexpr, LEAST: tl.constexpr):
    """Tiles in one part of a sequence that is cut by its own length alone."""
    return tl.maximum((tiles + SPLITS - 1) // SPLITS, LEAST)


@jit
def locate(upto, item, batch):
    """Which sequence each item is in, as an index and as a mask [items, sequences]."""
    s = tl.arange(0, upto.shape[0])[None, :]
    before = (upto[None, :] <= item[:, None]) & (s < batch)
    seq = tl.minimum(tl.sum(before.to(tl.int32), 1), batch - 1)
    return seq, s == seq[:, None]


@jit
def chosen(here, values):
    """The value of the chosen sequence, for each item."""
    return tl.sum(tl.where(here, values[None, :], 0), 1)


@jit
def active_programs(tiles, total, programs, EVEN: tl.constexpr):
    """How many programs get a share: fewer, where sequences of one length then stay whole."""
    active = programs
    if EVEN:
        some = tl.maximum(tl.sum((tiles > 0).to(tl.int32), 0), 1)
        longest = tl.maximum(tl.max(tiles, 0), 1)
        alike = total == some * longest
        each = (some + programs - 1) // programs
        if alike & (some <= programs):  # some whole number of programs a sequence
            active = tl.minimum(programs // some, longest) * some
        elif alike & (some % each == 0):  # some whole number of sequences a program
            active = some // each
    return tl.maximum(tl.minimum(active, total), 1)


@jit
def first_tile(item, upto, tiles_upto, tiles, items, per, batch):
    """The number of the tile at which an item begins; the total, behind the last."""
    _, here = locate(upto, item, batch)
    inside = (item - chosen(here, upto - items)) * chosen(here, per)
    return chosen(here, tiles_upto - tiles) + tl.minimum(inside, chosen(here, tiles))


@jit(do_not_specialize=["batch", "window", "programs"])
def plan_kernel(
    seq_lens,
    rows,
    cum,
    record,
    batch,
    window,
    programs,
    TOKENS: tl.constexpr,
    BATCH: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    EVEN: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
):
    """Divide all tiles evenly among the programs; every instance writes CHUNK records."""
    s = tl.arange(0, BATCH)
    length = tl.maximum(tl.load(seq_lens + s, mask=s < batch, other=0), 0)
    tiles = (length + TOKENS - 1) // TOKENS
    if WINDOW:
        tiles -= tl.maximum(length - window, 0) // TOKENS
    per = tl.full([BATCH], 1, tl.int32)
    if SPLITS:  # parts are handed out, not tiles
        per = split_tiles(tiles, SPLITS, LEAST)
    items = (tiles + per - 1) // per
    upto, tiles_upto, total = tl.cumsum(items, 0), tl.cumsum(tiles, 0), tl.sum(items, 0)
    active = active_programs(tiles, total, programs, EVEN)
    if tl.program_id(0) == 0:
        tl.store(cum, 0)
        tl.store(cum + 1 + s, tiles_upto, mask=s < batch)
        tl.store(cum + batch + 1, active)
        tl.store(cum + batch + 2, tl.sum(((length == 0) & (s < batch)).to(tl.int32), 0))
    p = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    live, ok, to = p < active, p < programs, record + p * 8
    begin_item = tl.where(live, p.to(tl.int64) * total // active, 0).to(tl.int32)
    end_item = tl.where(live, (p + 1).to(tl.int64) * total // active, 0).to(tl.int32)
    begin, end = begin_item, end_item
    seq, here = locate(upto, begin_item, batch)
    if SPLITS:
        begin = first_tile(begin_item, upto, tiles_upto, tiles, items, per, batch)
        end = first_tile(end_item, upto, tiles_upto, tiles, items, per, batch)
    write_record(
        to,
        ok,
        begin,
        tl.where(live, end, begin),
        seq,
        chosen(here, tiles_upto - tiles),
        chosen(here, tiles_upto),
        chosen(here, length),
        rows,
        batch,
        HAS_ROWS,
    )


@jit
def write_record(
    to, ok, begin, end, seq, seq_begin, seq_end, length, rows, batch, HAS_ROWS: tl.constexpr
):
    """The eight integers of each program."""
    row, next_row = seq, tl.minimum(seq + 1, batch - 1)
    if HAS_ROWS:
        row = tl.load(rows + row, mask=ok, other=0).to(tl.int32)
        next_row = tl.load(rows + next_row, mask=ok, other=0).to(tl.int32)
    tl.store(to, begin, mask=ok)
    tl.store(to + 1, end, mask=ok)
    tl.store(to + 2, seq, mask=ok)
    tl.store(to + 3, seq_begin, mask=ok)
    tl.store(to + 4, seq_end, mask=ok)
    tl.store(to + 5, length, mask=ok)
    tl.store(to + 6, row, mask=ok)
    tl.store(to + 7, next_row, mask=ok)
