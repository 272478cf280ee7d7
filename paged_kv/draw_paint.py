# Exported from book/appendices/A1_drawing.py by tools/export.py; edit the chapter, not this file.
"""A pool's cells and lines as text, and as shapes on a canvas."""

from collections.abc import Mapping, Sequence
from textwrap import wrap

from paged_kv.draw_canvas import Canvas
from paged_kv.draw_state import _Cell, _colour_of, _holes, _label_of, _Line, _Pool

_COLUMNS = 76  # characters in a line of text


def _box(cell: _Cell, depth: int, block_size: int) -> str:
    """Line `depth` of a block in text: one owner's slots, `[AA..]`."""
    size = min(block_size, 16)
    if cell.state == "other":
        return "[" + "?" * size + "]" if depth == 0 else ""
    if depth >= max(1, len(cell.owners)):
        return ""
    letter, used = cell.owners[depth] if cell.owners else ("", 0)
    shown = -(-used * size // block_size)
    if cell.state == "held":
        line = (letter * shown).ljust(size, ".")
        return f"[{line}]" if depth == 0 else line
    return (letter.lower() * shown).ljust(size, "-")


def _pool_text(pool: _Pool, cells: list[_Cell]) -> list[str]:
    width = max(min(pool.block_size, 16) + 2, len(str(pool.num_blocks - 1)) + 1)
    per_row = _blocks_per_row(pool.num_blocks, (_COLUMNS + 1) // (width + 1))
    lines = []
    for first in range(0, pool.num_blocks, per_row):
        row = cells[first : first + per_row]
        stack = [[f"{c.mark}{c.block}" for c in row]]
        for depth in range(max(1, *(len(c.owners) for c in row))):
            stack.append([_box(c, depth, pool.block_size) for c in row])
        if any(c.count > 1 for c in row):
            stack.append([f"x{c.count}" if c.count > 1 else "" for c in row])
        lines += [" ".join(part.center(width) for part in parts).rstrip() for parts in stack]
    return lines


def _blocks_per_row(count: int, fit: int) -> int:
    """Blocks in one row: all if they fit, else a power of two, at most 16."""
    if count <= min(fit, 16):
        return count
    return next(n for n in (16, 8, 4, 2, 1) if n <= max(fit, 1))


def _lines_text(lines: Sequence[_Line]) -> list[str]:
    pad = " " if any(line.mark for line in lines) else ""
    labels = [(line.mark or pad) + _label_of(line) for line in lines]
    tables = [
        wrap(" ".join("-" if i < 0 else str(i) for i in line.ids), 44) or [""] for line in lines
    ]
    left, middle = max(map(len, labels)), max(len(part[0]) for part in tables)
    out = []
    for line, label, parts in zip(lines, labels, tables, strict=True):
        first = f"{label:<{left}}  {parts[0]:<{middle}}  " if middle else f"{label:<{left}}  "
        out.append((first + line.note).rstrip())
        out += [" " * (left + 2) + part for part in parts[1:]]
    return out


def _slot_width(block_size: int, words: bool) -> float:
    """Units a slot is wide: room for a word, for a letter, or a share of 128 for a long block."""
    if words:
        return 36
    if block_size > 16:
        return 128 / block_size
    return {1: 26, 2: 20}.get(block_size, max(9, min(16, 64 // block_size)))


def _paint_run(
    canvas: Canvas,
    x: float,
    y: float,
    height: float,
    slot: float,
    size: int,
    letter: str,
    used: int,
    stale: bool,
) -> None:
    """One owner's `used` slots of a run of `size`, and what is left empty."""
    css = f"pk-{_colour_of(letter)}"
    base = y + height / 2 + 4.5
    if used and not stale:
        canvas.rect(x, y, used * slot, height, css)
    if not stale and used < size:
        canvas.hatch(x + used * slot, y, (size - used) * slot, height)
    if slot >= 8:
        xs = [x + (i + 0.5) * slot for i in range(used)]
        cuts = "".join(f"M{x + i * slot:g} {y:g}v{height:g}" for i in range(1, used))
        canvas.line("" if stale else cuts, "pk-cut")
    else:
        xs = [x + used * slot / 2]
    if used:
        kind = "pk-mid pk-stale" if stale else f"pk-on-{_colour_of(letter)}"
        small = " pk-small" if slot < 12 else ""
        canvas.letters(xs, base, letter.lower() if stale else letter, kind + small)


def _paint_words(canvas: Canvas, pool: _Pool, block: int, x: float, y: float) -> None:
    """The words of a block below its slots, cut to what fits."""
    for slot in range(pool.block_size):
        word = " ".join(pool.words.get((block, slot), "").split())
        if word:
            word = word if len(word) < 7 else word[:5] + "…"
            canvas.words(
                x + (slot + 0.5) * _slot_width(pool.block_size, True), y, word, "pk-mid pk-small"
            )


def _paint_block(canvas: Canvas, pool: _Pool, cell: _Cell, x: float, height: float) -> None:
    """One block at (x, canvas.y): its id, its owners' slots as bands, its outline."""
    slot = _slot_width(pool.block_size, bool(pool.words))
    width, top = slot * pool.block_size, canvas.y + 17
    label = f"{cell.mark}{cell.block}" + (f" ×{cell.count}" if cell.count > 1 else "")
    canvas.words(x + width / 2, top - 5, label, "pk-bold" if cell.mark else "pk-id")
    band = height / max(1, len(cell.owners))
    for i, (letter, used) in enumerate(cell.owners):
        _paint_run(
            canvas,
            x,
            top + i * band,
            band,
            slot,
            pool.block_size,
            letter,
            used,
            cell.state == "stale",
        )
    if cell.state == "other":
        canvas.rect(x, top, width, height, "pk-other")
        canvas.words(x + width / 2, top + height / 2 + 4.5, "?", "pk-mid")
    _paint_words(canvas, pool, cell.block, x, top + height + 12)
    outline = "pk-free" if cell.state in ("free", "stale") else "pk-box"
    canvas.rect(x, top, width, height, outline + (" pk-new" if cell.mark else ""))


def _paint_pool(canvas: Canvas, pool: _Pool, cells: list[_Cell]) -> None:
    width = _slot_width(pool.block_size, bool(pool.words)) * pool.block_size
    per_row = _blocks_per_row(pool.num_blocks, int(canvas.width // (width + 8)))
    worded = {block for block, _ in pool.words}
    for first in range(0, pool.num_blocks, per_row):
        row = cells[first : first + per_row]
        heights = [max(24, 16 * len(c.owners)) for c in row]
        for i, (cell, height) in enumerate(zip(row, heights, strict=True)):
            _paint_block(canvas, pool, cell, 4 + i * (width + 8), height)
        canvas.y += max(heights) + (38 if worded & {c.block for c in row} else 24)


def _paint_ids(canvas: Canvas, line: _Line, indent: float) -> float:
    """The block ids of a line as boxes, wrapped; returns the x where they end."""
    x = float(indent)
    for block in line.ids:
        if x + 27 > canvas.width - 4:
            x, canvas.y = indent, canvas.y + 24
        canvas.rect(x, canvas.y, 27, 20, "pk-box" if line.letter else "pk-free")
        canvas.words(x + 13.5, canvas.y + 14.5, "-" if block < 0 else str(block), "pk-mid")
        x += 27 if line.letter else 31
    return x


def _paint_lines(canvas: Canvas, lines: Sequence[_Line]) -> None:
    """The rows below the blocks: a chip with the chat's letter, its table, a note."""
    left = 16 if any(line.mark for line in lines) else 4
    names = ["" if line.name == line.letter else line.name for line in lines]
    indent = (
        left
        + 10
        + max(8 * len(n) + (24 if ln.letter else 0) for n, ln in zip(names, lines, strict=True))
    )
    for line, name in zip(lines, names, strict=True):
        canvas.words(left - 7, canvas.y + 16, line.mark, "pk-bold")
        x = float(left)
        if line.letter:
            colour = _colour_of(line.letter)
            canvas.rect(x, canvas.y, 20, 20, f"pk-{colour}")
            canvas.letters([x + 10], canvas.y + 14.5, line.letter, f"pk-on-{colour}")
            x += 24
        canvas.words(x, canvas.y + 14.5, name)
        x = _paint_ids(canvas, line, indent) + (8 if line.ids else 0)
        if x + 7.6 * len(line.note) > canvas.width:
            x, canvas.y = indent, canvas.y + 22
        canvas.words(x, canvas.y + 14.5, line.note, "pk-note")
        canvas.y += 26


def _paint_heading(canvas: Canvas, title: str) -> None:
    """The title, broken into lines that fit the canvas."""
    for part in wrap(title, int(canvas.width / 9.6)):
        canvas.words(4, canvas.y + 15, part, "pk-title")
        canvas.y += 22


def _paint_note(canvas: Canvas, note: str) -> None:
    """The last line, broken likewise."""
    for part in wrap(note, int(canvas.width / 7.8)):
        canvas.words(4, canvas.y + 13, part, "pk-note")
        canvas.y += 19


def _paint_slots(
    canvas: Canvas,
    num_slots: int,
    rows: Mapping[str, tuple[int, int, int]],
    letters: Mapping[str, str],
) -> None:
    """The slots, `per_row` to a line; a stretch that crosses a line end is cut there."""
    slot, per_row = 18, 32 if canvas.width > 400 else 16
    for low in range(0, num_slots, per_row):
        high = min(low + per_row, num_slots)
        for mark in range(low, high, 8):
            canvas.words(4 + (mark - low) * slot, canvas.y + 11, str(mark), "pk-small")
        top = canvas.y + 16
        for name, (start, reserved, used) in rows.items():
            a, b = max(start, low), min(start + reserved, high)
            if a < b:
                x, filled = 4 + (a - low) * slot, min(max(start + used - a, 0), b - a)
                _paint_run(canvas, x, top, 24, slot, b - a, letters[name], filled, False)
                canvas.rect(x, top, (b - a) * slot, 24, "pk-box")
        for start, length in _holes(num_slots, rows):
            a, b = max(start, low), min(start + length, high)
            if a < b:
                canvas.rect(4 + (a - low) * slot, top, (b - a) * slot, 24, "pk-free")
        canvas.y += 48


def _slots_text(
    num_slots: int, rows: Mapping[str, tuple[int, int, int]], letters: Mapping[str, str]
) -> list[str]:
    row = ["-"] * num_slots
    for name, (start, reserved, used) in rows.items():
        row[start : start + reserved] = letters[name] * used + "." * (reserved - used)
    text = []
    for low in range(0, num_slots, 64):
        part = row[low : low + 64]
        text.append("".join(f"{low + i:<8}" for i in range(0, len(part), 8)).rstrip())
        text.append("".join(part))
    return text
