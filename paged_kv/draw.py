# Exported from book/appendices/A1_drawing.py by tools/export.py; edit the chapter, not this file.
"""Pictures of a pool of blocks, of a contiguous pool and of one block table.

Takes plain snapshots, and needs the standard library only (`book_style` needs matplotlib).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paged_kv.draw_canvas import Canvas, Picture
from paged_kv.draw_paint import (
    _lines_text,
    _paint_heading,
    _paint_lines,
    _paint_note,
    _paint_pool,
    _paint_run,
    _paint_slots,
    _pool_text,
    _slots_text,
)
from paged_kv.draw_state import (
    _bad,
    _Cell,
    _cells_of,
    _count_of,
    _letters_of,
    _Line,
    _lines_of,
    _mark_cells,
    _Pool,
    _read_pool,
    _require_ids,
    _require_names,
    _reserved,
    _slot_lines,
)

_WIDE, _NARROW = 620, 330  # widths of a drawing on a desk and on a phone


def _list(ids: Iterable[int]) -> str:
    return ", ".join("none" if block < 0 else str(block) for block in ids)


def _pool_alt(pool: _Pool, cells: list[_Cell], lines: Sequence[_Line]) -> str:
    out = [f"Pool of {_count_of(pool.num_blocks, 'block')} of {_count_of(pool.block_size, 'slot')}"]
    for line in lines:
        if line.letter:
            where = "block" if len(line.ids) == 1 else "blocks"
            ids = f", in {where} {_list(line.ids)}" if line.ids else ""
            out.append(f"{line.name}: {line.note}{ids}")
        else:
            out.append(f"Free, front first: {_list(line.ids) or 'none'}")
    for cell in cells:
        if len(cell.owners) > 1 and cell.state == "held":
            out.append(f"Block {cell.block} is shared by {', '.join(o for o, _ in cell.owners)}")
    for what, some in (
        ("In no table shown and not free", [c.block for c in cells if c.state == "other"]),
        ("Changed", [c.block for c in cells if c.mark == "*"]),
        ("Pointed at", [c.block for c in cells if c.mark == ">"]),
    ):
        out += [f"{what}: {_list(some)}"] if some else []
    return ". ".join(out) + "."


def _summary(pool: _Pool, cells: list[_Cell]) -> str:
    wasted = sum(
        pool.block_size - max(used for _, used in c.owners) for c in cells if c.state == "held"
    )
    held = sum(c.state == "held" for c in cells)
    other = sum(c.state == "other" for c in cells)
    note = f"{held} of {_count_of(pool.num_blocks, 'block')} held, "
    note += f"{_count_of(wasted, 'slot')} wasted"
    return note + (f", {_count_of(other, 'block')} in no table shown" if other else "")


def draw_pool(
    snapshot: Mapping[str, Any],
    *,
    title: str = "",
    before: Mapping[str, Any] | None = None,
    highlight: Iterable[int] = (),
) -> Picture:
    """The pool and its tables after one step.

    `snapshot`: "block_size" (slots), "num_blocks", "free" (ids, front of the queue first),
    "tables" (name -> ids, -1 for a block given back), "seq_lens" (name -> tokens); optional
    "ref_counts" (one a block), "tokens" (name -> words), "highlight" (ids).
    `before`: an earlier snapshot of the same pool; blocks that differ are marked `*`, and a
    block freed since shows its old owner in small letters. `highlight`: ids marked `>`.
    Raises ValueError, naming the key, for a snapshot that cannot be true. Changes nothing.
    """
    pool = _read_pool(snapshot, "snapshot")
    old = None if before is None else _read_pool(before, "before")
    marks = pool.highlight | set(highlight)
    _require_ids(marks, "highlight", pool.num_blocks)
    if old and (old.block_size, old.num_blocks) != (pool.block_size, pool.num_blocks):
        raise _bad("before", (old.num_blocks, old.block_size), "not a snapshot of the same pool")
    letters = _letters_of([*(old.tables if old else ()), *pool.tables])
    cells = _cells_of(pool, letters)
    cells = _mark_cells(cells, _cells_of(old, letters) if old else cells, marks)
    lines = _lines_of(pool, old, letters)
    return _pool_picture(pool, cells, lines, title)


def _pool_picture(pool: _Pool, cells: list[_Cell], lines: list[_Line], title: str) -> Picture:
    """The three forms of a pool, from its cells and lines."""
    alt, note = _pool_alt(pool, cells, lines), _summary(pool, cells)
    alt = f"{title}. {alt}" if title else alt
    text = [title] if title else []
    text += [*_pool_text(pool, cells), *_lines_text(lines), note]
    svgs = []
    for width in (_WIDE, _NARROW):
        canvas = Canvas(width)
        _paint_heading(canvas, title)
        _paint_pool(canvas, pool, cells)
        canvas.y += 4
        _paint_lines(canvas, lines)
        _paint_note(canvas, note)
        svgs.append(canvas.svg(title or f"Pool of {_count_of(pool.num_blocks, 'block')}", alt))
    return Picture("\n".join(text), alt, (svgs[0], svgs[1]))


def draw_slots(snapshot: Mapping[str, Any], *, title: str = "") -> Picture:
    """A contiguous pool: slots in a row, each chat's reservation, what it uses of it.

    `snapshot`: "num_slots", "reservations" (name -> (first slot, slots reserved, slots used)).
    Raises ValueError, naming the key, if reservations overlap, leave the pool, or use more
    than they reserve. Changes nothing.
    """
    num_slots, rows = _reserved(snapshot)
    letters = _letters_of(snapshot["reservations"])
    lines = _slot_lines(num_slots, rows, letters)
    text = [title] if title else []
    text += [*_slots_text(num_slots, rows, letters), *_lines_text(lines)]
    facts = [title] if title else []
    facts += [f"Pool of {_count_of(num_slots, 'slot')} in a row"]
    alt = ". ".join([*facts, *(f"{line.name}: {line.note}" for line in lines)]) + "."
    svgs = []
    for width in (_WIDE, _NARROW):
        canvas = Canvas(width)
        _paint_heading(canvas, title)
        _paint_slots(canvas, num_slots, rows, letters)
        _paint_lines(canvas, lines)
        svgs.append(canvas.svg(title or "Contiguous pool", alt))
    return Picture("\n".join(text), alt, (svgs[0], svgs[1]))


@dataclass(frozen=True)
class _Entry:
    """One entry of a block table."""

    what: str  # the tokens it covers, in words
    block: int
    used: int


def _entries(table: Sequence[int], seq_len: int, block_size: int) -> list[_Entry]:
    entries = []
    for logical, block in enumerate(table):
        first, last = logical * block_size, min((logical + 1) * block_size, seq_len) - 1
        what = f"tokens {first} to {last}" if last > first else f"token {first}"
        what = what if last >= first else "no token"
        entries.append(_Entry(what, block, max(0, last - first + 1)))
    return entries


def _paint_column(
    canvas: Canvas, x: float, used: Mapping[int, int], count: int, letter: str, block_size: int
) -> None:
    """`count` blocks from top to bottom; `used` says how many slots of each are the chat's."""
    slot = 64 / block_size
    for i in range(count):
        y = canvas.y + 30 * i
        if i in used:
            _paint_run(canvas, x, y, 22, slot, block_size, letter, used[i], False)
        canvas.rect(x, y, 64, 22, "pk-box" if i in used else "pk-free")


def _table_svg(
    entries: Sequence[_Entry], letter: str, block_size: int, num_blocks: int, heading: str, alt: str
) -> str:
    canvas = Canvas(_NARROW)
    _paint_heading(canvas, heading)
    for x, words in ((4, "tokens"), (100, "logical"), (250, "physical")):
        canvas.words(x, canvas.y + 14, words, "pk-note")
    canvas.y += 22
    logical = {i: entry.used for i, entry in enumerate(entries) if entry.block >= 0}
    physical = {entry.block: entry.used for entry in entries}
    _paint_column(canvas, 100, logical, len(entries), letter, block_size)
    _paint_column(canvas, 250, physical, num_blocks, letter, block_size)
    for block in range(num_blocks):
        canvas.words(234, canvas.y + 30 * block + 15.5, str(block), "pk-mid")
    for i, entry in enumerate(entries):
        y, to = canvas.y + 30 * i + 11, canvas.y + 30 * entry.block + 11
        canvas.words(4, y + 4.5, entry.what.removeprefix("tokens ").removeprefix("token "))
        if entry.block >= 0:
            canvas.line(f"M166 {y:g}C196 {y:g} 186 {to:g} 218 {to:g}m-6 -4l6 4l-6 4", "pk-arrow")
    canvas.y += 30 * max(num_blocks, len(entries))
    return canvas.svg(heading, alt)


def draw_table(
    name: str,
    blocks: Sequence[int],
    seq_len: int,
    block_size: int,
    num_blocks: int,
    *,
    title: str = "",
) -> Picture:
    """The block table of one chat as arrows from logical to physical blocks.

    `blocks`: physical ids in logical order, -1 for a block given back; `seq_len`: tokens;
    `block_size`: slots; `num_blocks`: size of the pool. Raises ValueError as `draw_pool`
    does. Changes nothing.
    """
    _require_names([name], "name")
    for argument, value in (("block_size", block_size), ("num_blocks", num_blocks)):
        if value < 1:
            raise _bad(argument, value, "at least 1")
    _require_ids(blocks, "blocks", num_blocks, -1)
    if not 0 <= seq_len <= len(blocks) * block_size:
        raise _bad("seq_len", seq_len, f"the table holds 0 to {len(blocks) * block_size} tokens")
    entries = _entries(blocks, seq_len, block_size)
    heading = title or f"{name}: {_count_of(seq_len, 'token')} in blocks of {block_size}"
    wide = max((len(entry.what) for entry in entries), default=0)
    places = [f"block {e.block}" if e.block >= 0 else "given back" for e in entries]
    text = [
        f"logical {i}  {e.what:<{wide}}  ->  {place}"
        for i, (e, place) in enumerate(zip(entries, places, strict=True))
    ]
    facts = [
        f"Logical block {i}, {e.what}: {place}"
        for i, (e, place) in enumerate(zip(entries, places, strict=True))
    ]
    alt = ". ".join([heading, *facts]) + "."
    letter = _letters_of([name])[name]
    svg = _table_svg(entries, letter, block_size, num_blocks, heading, alt)
    return Picture("\n".join([heading, *text]), alt, (svg, svg))


_PLOTS: dict[str, Any] = {
    "figure.figsize": (6.4, 3.4),
    "figure.dpi": 144,
    "figure.constrained_layout.use": True,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "savefig.dpi": "figure",
    "font.size": 12,
    "axes.titlesize": 13,
    "legend.fontsize": 11,
    "legend.frameon": False,
    "lines.linewidth": 2.2,
    "lines.markersize": 6,
    "hatch.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.8,
    "grid.linestyle": "-",
    "svg.hashsalt": "paged_kv",
    "svg.fonttype": "none",
}


def book_style() -> None:
    """Set matplotlib's defaults for figures of this book; call it once, before plotting.

    Needs matplotlib. Colours after Okabe and Ito; the same input gives the same SVG ids.
    """
    import matplotlib
    from cycler import cycler

    colours = ["#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7", "#882255"]
    dashes = ["-", "--", "-.", ":", "-", "--", "-."]
    settings: Any = _PLOTS | {"axes.prop_cycle": cycler(color=colours) + cycler(linestyle=dashes)}
    matplotlib.rcParams.update(settings)
