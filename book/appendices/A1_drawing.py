# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A1 Drawing memory
#
# Every chapter ends a step by printing what the pool holds. The plain Python value is exact, and
# almost useless to the eye. Here is a pool of 8 blocks in the middle of a run, twice, one step
# apart. Which block is lost?

# %%
earlier = {
    "block_size": 4, "num_blocks": 8, "free": [7],
    "tables": {"A": [0, 1, 5], "B": [2, 6], "C": [3, 4]},
    "seq_lens": {"A": 9, "B": 5, "C": 5}, "ref_counts": [1, 1, 1, 1, 1, 1, 1, 0],
}
later = {
    "block_size": 4, "num_blocks": 8, "free": [7, 2],
    "tables": {"A": [0, 1, 5], "C": [3, 4]},
    "seq_lens": {"A": 9, "C": 5}, "ref_counts": [1, 1, 0, 1, 1, 1, 1, 0],
}
for state in (earlier, later):
    print(state["tables"], "free", state["free"], state["seq_lens"])

# %% [markdown]
# The numbers say it (chat B left, and of its blocks 2 and 6 only 2 came back), but nobody sees it.
#
# **The question.** What must a picture of memory show so that a wrong step looks wrong?
#
# :::{card} This chapter
# - **You need**: only the words *block*, *table* and *chat*. Read it at any time.
# - **Exports**: `draw` (`draw_pool`, `draw_slots`, `draw_table`, `book_style`), and what it stands
#   on: `draw_canvas` (`Picture`, `Canvas`), `draw_state`, `draw_paint`.
# - **Device**: CPU, standard library only.
# - **Run time**: a few seconds.
# - **You are here**: chapters 00 to 14 · labs · appendices: **A1 drawing** · A2 command line ·
#   A3 real configs
# :::

# %% [markdown]
# ## What a picture must show
#
# Five things. Leave one out, and some wrong step looks right:
#
# 1. **Who** owns a slot: a letter, and a colour that repeats it. About one man in twelve cannot
#    use the colour alone {cite}`okabe2008`, and neither can a printer without colours.
# 2. **How much** of a block is used. An owned slot that holds nothing is waste; a free slot is
#    not.
# 3. **How many** tables name a block, when it is more than one.
# 4. **In which order** free blocks will be taken. A list of free blocks is a queue, not a set.
# 5. **What changed** in this step, so that the eye need not compare two pictures.
#
# A picture is also read where nothing can be drawn: in a terminal, in a diff, by a screen reader,
# by a test. So each picture has three forms made from the same facts: text, drawing, and a
# sentence.

# %% tags=["export:draw_canvas"]
"""Pictures in three forms (text, SVG, words) and the canvas that the SVG is painted on."""

from dataclasses import dataclass
from html import escape


@dataclass(frozen=True, repr=False)
class Picture:
    """A finished picture: text in a terminal, SVG in a notebook, words for a screen reader.

    `text` and `alt` are strings; `svgs` holds the same drawing for a wide and for a narrow
    column, each an `<svg>` element. Equal input gives equal pictures, byte for byte.
    """

    text: str
    alt: str
    svgs: tuple[str, str]

    @property
    def svg(self) -> str:
        """The wide drawing with its style, fit to be a file of its own."""
        return self.svgs[0].replace("</title>", f"</title><style>{_STYLE}</style>", 1)

    def __repr__(self) -> str:
        """The text form."""
        return self.text

    def _repr_html_(self) -> str:
        wide, narrow = self.svgs
        body = f'<div class="pk-wide">{wide}</div><div class="pk-narrow">{narrow}</div>'
        body = wide if wide == narrow else body
        return f'<div class="pk-picture"><style>{_STYLE}</style>{body}</div>'


# %% [markdown]
# The text form is what `repr` returns, so a terminal, a failing test and a diff of this book all
# show it. Tests compare it literally.
#
# ## A canvas
#
# The drawing is SVG, which is text too. Inline in a page it follows the colours around it, light
# or dark, stays sharp at any zoom, and its words can be searched. The canvas below needs no
# library. It has a width; the caller moves `y` down as it paints.

# %% tags=["export:draw_canvas"]
class Canvas:
    """SVG shapes on a sheet `width` units wide; one unit is one CSS pixel at full size.

    `y` (units, from the top) is the caller's pen: it only moves down, and ends as the height.
    """

    def __init__(self, width: float) -> None:
        """An empty sheet."""
        self.width = width
        self.y = 4.0
        self.shapes: list[str] = []

    def rect(self, x: float, y: float, width: float, height: float, css: str) -> None:
        """Paint a box whose top left corner is (x, y), in the class `css`."""
        size = f'width="{width:g}" height="{height:g}"'
        self.shapes.append(f'<rect class="{css}" x="{x:g}" y="{y:g}" {size} rx="2"/>')

    def line(self, d: str, css: str) -> None:
        """Paint the SVG path `d`."""
        if d:
            self.shapes.append(f'<path class="{css}" d="{d}"/>')

    def words(self, x: float, y: float, words: str, css: str = "") -> None:
        """Write `words` on the base line y, from x (or around x, with the class pk-mid)."""
        kind = f' class="{css}"' if css else ""
        self.shapes.append(f'<text{kind} x="{x:g}" y="{y:g}">{escape(words)}</text>')

    def letters(self, xs: list[float], y: float, letter: str, css: str) -> None:
        """Write one letter around each x in `xs`."""
        at = " ".join(f"{x:g}" for x in xs)
        word = escape(letter) * len(xs)
        self.shapes.append(f'<text class="{css}" x="{at}" y="{y:g}">{word}</text>')


# %% [markdown]
# Waste is hatched, as in an architect's plan. SVG has patterns for that, but a pattern is found by
# its id, a page has one set of ids, and it holds many pictures: one that is hidden would blank the
# rest. So the lines are drawn one by one.

# %% tags=["export:draw_canvas"]
class Canvas(Canvas):  # type: ignore
    def hatch(self, x: float, y: float, width: float, height: float) -> None:
        """Fill a box with slanted lines: reserved, and holding nothing."""
        lines = []
        for c in range(4, int(width + height), 6):
            lines.append(f"M{x + max(0, c - height):g} {y + min(c, height):g}")
            lines.append(f"L{x + min(c, width):g} {y + max(0, c - width):g}")
        self.line("".join(lines), "pk-hatch")

    def svg(self, title: str, alt: str) -> str:
        """The finished `<svg>` element, named by `title`, described by `alt`."""
        size = f'viewBox="0 0 {self.width:g} {self.y:g}" width="{self.width:g}" height="{self.y:g}"'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="pk" {size} role="img" '
            f'aria-label="{escape(alt)}"><title>{escape(title)}</title>{"".join(self.shapes)}</svg>'
        )


# %% [markdown]
# ## Colours that survive
#
# Chat A is blue, B orange, C green, D vermillion: the set of Okabe and Ito, chosen so that
# the common kinds of colour blindness keep them apart. Lines and words take the colour of the
# surrounding page (`currentColor`), so nothing is black on black. A page may set the CSS variables
# --pk-fg, --pk-bg, --pk-muted and --pk-a to --pk-h to change any of it.

# %% tags=["export:draw_canvas", "hide-input"]
_COLOURS = {
    "a": ("#0072b2", "#fff"),
    "b": ("#e69f00", "#000"),
    "c": ("#009e73", "#000"),
    "d": ("#d55e00", "#000"),
    "e": ("#56b4e9", "#000"),
    "f": ("#cc79a7", "#000"),
    "g": ("#f0e442", "#000"),
    "h": ("#882255", "#fff"),
}

_STYLE = (
    "svg.pk{max-width:100%;height:auto;color:var(--pk-fg,inherit);background:var(--pk-bg,none);"
    "font:13px system-ui,'Segoe UI',Helvetica,Arial,sans-serif}"
    "svg.pk:root{color:#1b1b1b;background:#fff}"
    "@media(prefers-color-scheme:dark){svg.pk:root{color:#e6e6e6;background:#16181c}}"
    ".pk-picture{container-type:inline-size;width:100%}.pk-narrow{display:none}"
    "@container(max-width:520px){.pk-wide{display:none}.pk-narrow{display:block}}"
    "html[data-theme=dark] .text_html:has(.pk-picture)"
    "{background:none!important;padding:0!important}"
    ".pk text{fill:currentColor}.pk .pk-mid{text-anchor:middle}"
    ".pk .pk-id{text-anchor:middle;font-size:12px;opacity:.8}"
    ".pk .pk-bold{text-anchor:middle;font-weight:700}"
    ".pk .pk-title{font-size:15px;font-weight:600}"
    ".pk .pk-note{fill:var(--pk-muted,currentColor)}"
    ".pk .pk-small{font-size:10.5px}"
    ".pk .pk-box{fill:none;stroke:currentColor;stroke-width:1.2}"
    ".pk .pk-free{fill:none;stroke:currentColor;stroke-width:1;stroke-dasharray:4 3;opacity:.7}"
    ".pk .pk-new{stroke-width:3;opacity:1}"
    ".pk .pk-other{fill:currentColor;opacity:.18}.pk .pk-stale{opacity:.6}"
    ".pk .pk-cut{stroke:var(--pk-bg,#fff);stroke-width:1;opacity:.45}"
    ".pk .pk-hatch{stroke:currentColor;stroke-width:1;opacity:.4;fill:none}"
    ".pk .pk-arrow{fill:none;stroke:currentColor;stroke-width:1.5}"
    + "".join(
        f".pk .pk-{key}{{fill:var(--pk-{key},{fill})}}"
        f".pk .pk-on-{key}{{fill:var(--pk-on-{key},{ink});text-anchor:middle;font-weight:700}}"
        for key, (fill, ink) in _COLOURS.items()
    )
)

# %% [markdown]
# A small trial: three used slots of chat A and one wasted.

# %%
canvas = Canvas(80)
canvas.rect(4, 4, 54, 22, "pk-a")
canvas.hatch(58, 4, 18, 22)
canvas.rect(4, 4, 72, 22, "pk-box")
canvas.letters([13, 31, 49], 20, "A", "pk-on-a")
canvas.y = 30
one = canvas.svg("one block", "Block 0: chat A uses 3 of 4 slots.")
Picture("[AAA.]", "Block 0: chat A uses 3 of 4 slots.", (one, one))

# %% [markdown]
# ## Refuse what cannot be true
#
# A picture of an impossible state misleads more than none. So a snapshot is first turned into a
# checked value, and a block that is both free and in a table, an id out of range, or a length
# beyond its table is an error here and not a strange drawing. A block that nobody holds and that
# is not free, or a count that disagrees with the tables, is what a faulty program produces: it is
# drawn.

# %% tags=["export:draw_state"]
"""What a picture of a pool shows: a snapshot, checked, then taken apart into cells and lines.

Takes plain dicts of numbers and lists, and knows no other module's classes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class _Pool:
    """A snapshot that has been checked: what `draw_pool` may rely on."""

    block_size: int
    num_blocks: int
    free: tuple[int, ...]
    tables: dict[str, tuple[int, ...]]
    seq_lens: dict[str, int]
    ref_counts: tuple[int, ...]
    words: dict[tuple[int, int], str]
    highlight: frozenset[int]


# %% tags=["export:draw_state", "hide-input"]
_REQUIRED = ("block_size", "num_blocks", "free", "tables", "seq_lens")
_OPTIONAL = ("ref_counts", "tokens", "highlight")


def _bad(argument: str, value: object, allowed: str) -> ValueError:
    return ValueError(f"{argument} = {value!r}: {allowed}")


def _require_keys(given: Mapping[str, Any], argument: str, required: Sequence[str],
                  optional: Sequence[str] = ()) -> None:
    for key in given:
        if key not in required and key not in optional:
            known = ", ".join([*required, *optional])
            raise ValueError(f"{argument} has the unknown key {key!r}; known keys: {known}")
    for key in required:
        if key not in given:
            raise ValueError(f"{argument} lacks the key {key!r}")


def _require_positive(given: Mapping[str, Any], argument: str, keys: Sequence[str]) -> None:
    for key in keys:
        if given[key] < 1:
            raise _bad(f"{argument}[{key!r}]", given[key], "at least 1")


def _require_ids(ids: Iterable[int], argument: str, num_blocks: int, lowest: int = 0) -> None:
    for block in ids:
        if not lowest <= block < num_blocks:
            raise _bad(argument, block, f"block ids run from {lowest} to {num_blocks - 1}")


# %% tags=["export:draw_state", "hide-input"]
def _require_names(names: Iterable[str], argument: str) -> None:
    for name in names:
        if not isinstance(name, str) or not name.strip():
            raise _bad(argument, name, "names are strings with a letter in them")


def _require_tables(pool: _Pool, argument: str) -> None:
    if len(set(pool.free)) < len(pool.free):
        raise _bad(f"{argument}['free']", list(pool.free), "no block may be free twice")
    if len(pool.ref_counts) != pool.num_blocks:
        raise _bad(f"{argument}['ref_counts']", list(pool.ref_counts),
                   f"one count a block, so {pool.num_blocks}")
    for name, table in pool.tables.items():
        where = f"{argument}['tables'][{name!r}]"
        _require_ids(table, where, pool.num_blocks, -1)
        both = sorted(set(table) & set(pool.free))
        if both:
            raise _bad(where, list(table), f"blocks {both} are also in the free queue")
        most = len(table) * pool.block_size
        if not 0 <= pool.seq_lens[name] <= most:
            raise _bad(f"{argument}['seq_lens'][{name!r}]", pool.seq_lens[name],
                       f"its table of {len(table)} blocks holds 0 to {most} tokens")


# %% tags=["export:draw_state", "hide-input"]
def _words(pool: Mapping[str, Any], argument: str) -> dict[tuple[int, int], str]:
    """The word in each (block, slot), from the lists under "tokens"."""
    words = {}
    for name, tokens in pool.get("tokens", {}).items():
        where = f"{argument}['tokens'][{name!r}]"
        if name not in pool["tables"]:
            raise _bad(where, list(tokens), f"the tables are {list(pool['tables'])}")
        if len(tokens) > pool["seq_lens"][name]:
            raise _bad(where, list(tokens), f"at most {pool['seq_lens'][name]} tokens")
        for position, token in enumerate(tokens):
            logical, slot = divmod(position, pool["block_size"])
            words[(int(pool["tables"][name][logical]), slot)] = str(token)
    return words


def _read_pool(snapshot: Mapping[str, Any], argument: str) -> _Pool:
    """The snapshot as a `_Pool`; raises ValueError where it cannot be true."""
    _require_keys(snapshot, argument, _REQUIRED, _OPTIONAL)
    _require_positive(snapshot, argument, ("block_size", "num_blocks"))
    num_blocks = int(snapshot["num_blocks"])
    tables = {name: tuple(map(int, ids)) for name, ids in snapshot["tables"].items()}
    _require_names(tables, f"{argument}['tables']")
    _require_keys(snapshot["seq_lens"], f"{argument}['seq_lens']", list(tables))
    rows = [block for ids in tables.values() for block in ids]
    counts = snapshot.get("ref_counts", [rows.count(b) for b in range(num_blocks)])
    free = tuple(map(int, snapshot["free"]))
    marked = frozenset(map(int, snapshot.get("highlight", ())))
    _require_ids(free, f"{argument}['free']", num_blocks)
    _require_ids(marked, f"{argument}['highlight']", num_blocks)
    seq_lens = {name: int(snapshot["seq_lens"][name]) for name in tables}
    pool = _Pool(int(snapshot["block_size"]), num_blocks, free, tables, seq_lens,
                 tuple(map(int, counts)), {}, marked)
    _require_tables(pool, argument)
    pool.words.update(_words(snapshot, argument))
    return pool


# %%
impossible = later | {"free": [7, 5]}
try:
    _read_pool(impossible, "snapshot")
except ValueError as error:
    print(error)

# %% [markdown]
# ## From state to cells
#
# Text, drawing and sentence must never disagree, so none of them looks at the snapshot again. They
# read *cells*: for each block, who uses how many of its slots, in which state it is, and whether
# this step changed it.
#
# | state | means | text | drawing |
# |---|---|---|---|
# | held | some table shown here names it | `[AA..]` | solid outline, waste hatched |
# | free | in the free queue | `----` | dashed outline, no fill |
# | stale | free now, held before; its bytes are still there | `aa--` | dashed, faint letters |
# | other | neither free nor in a table shown | `[????]` | grey |

# %% tags=["export:draw_state"]
@dataclass(frozen=True)
class _Cell:
    """One block as every form of the picture shows it."""

    block: int
    owners: tuple[tuple[str, int], ...]  # (letter, used slots), one a table that names the block
    state: str  # "held", "free", "stale" or "other"
    count: int
    mark: str = ""  # "*" changed in this step, ">" pointed at


def _cells_of(pool: _Pool, letters: Mapping[str, str]) -> list[_Cell]:
    owners: list[list[tuple[str, int]]] = [[] for _ in range(pool.num_blocks)]
    for name, table in pool.tables.items():
        for logical, block in enumerate(table):
            used = pool.seq_lens[name] - logical * pool.block_size
            if block >= 0:
                owners[block].append((letters[name], min(max(used, 0), pool.block_size)))
    cells = []
    for block, held in enumerate(owners):
        state = "held" if held else "free" if block in pool.free else "other"
        cells.append(_Cell(block, tuple(held), state, pool.ref_counts[block]))
    return cells


# %% [markdown]
# An entry of -1 is a block that fell out of a sliding window: it stays in the row and names
# nothing. The marks come from comparing the cells of two snapshots.

# %% tags=["export:draw_state"]
def _mark_cells(cells: list[_Cell], before: list[_Cell], highlight: Iterable[int]) -> list[_Cell]:
    """The cells, with what changed since `before` marked and stale bytes shown."""
    marked = []
    for cell, old in zip(cells, before, strict=True):
        owners, state = cell.owners, cell.state
        if state == "free" and old.owners:
            owners, state = old.owners, "stale"
        mark = ">" if cell.block in highlight else "*" if cell != old else ""
        marked.append(_Cell(cell.block, owners, state, cell.count, mark))
    return marked


def _letters_of(names: Iterable[str]) -> dict[str, str]:
    """A letter for each name: A for "A", 1 for "S1", else by place in the alphabet."""
    names = list(dict.fromkeys(names))
    letters = [n[-1:] if n[-1:].isdigit() or n[-2:-1] == " " else n[:1] for n in names]
    if "" in letters or len(set(letters)) < len(names):
        letters = [chr(ord("A") + i % 26) for i in range(len(names))]
    return dict(zip(names, letters, strict=True))


def _colour_of(letter: str) -> str:
    """The colour class of a letter: it depends on the letter alone, so it stays for a whole run."""
    return "abcdefgh"[(int(letter) - 1 if letter in "0123456789" else ord(letter.upper()) - 65) % 8]


# %%
names = _letters_of(["A", "B", "C"])
now = _cells_of(_read_pool(later, "later"), names)
then = _cells_of(_read_pool(earlier, "earlier"), names)
print(*_mark_cells(now, then, [6])[5:], sep="\n")

# %% [markdown]
# ## Text
#
# A block is a box of one character a slot. A block that several tables name gets one line an
# owner, since the owners may use different numbers of its slots. A block of more than 16 slots is
# drawn 16 characters wide, each standing for several slots.

# %% tags=["export:draw_paint"]
"""A pool's cells and lines as text, and as shapes on a canvas."""

from textwrap import wrap

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


# %% tags=["export:draw_paint"]
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


# %% [markdown]
# Below the blocks stand the free queue and the tables, one a line. The drawing paints the same
# lines, so they are values too.

# %% tags=["export:draw_state"]
@dataclass(frozen=True)
class _Line:
    """One row below the blocks: the free queue, or a chat and its block table."""

    name: str
    letter: str  # "" for the free queue
    ids: tuple[int, ...]
    note: str
    mark: str = ""


def _lines_of(pool: _Pool, before: _Pool | None, letters: Mapping[str, str]) -> list[_Line]:
    free_note = "front first" if len(pool.free) > 1 else "" if pool.free else "none"
    lines = [_Line("free", "", pool.free, free_note)]
    for name, table in pool.tables.items():
        empty = sum(block >= 0 for block in table) * pool.block_size
        empty -= sum(min(max(pool.seq_lens[name] - i * pool.block_size, 0), pool.block_size)
                     for i, block in enumerate(table) if block >= 0)
        note = f"{_count_of(pool.seq_lens[name], 'token')}, {empty} empty"
        was = before and (before.tables.get(name), before.seq_lens.get(name))
        mark = "*" if was and was != (table, pool.seq_lens[name]) else ""
        lines.append(_Line(name, letters[name], table, note, mark))
    for name in before.tables if before else ():
        if name not in pool.tables:
            lines.append(_Line(name, letters[name], (), "has left", "*"))
    return lines


def _count_of(number: int, thing: str) -> str:
    return f"{number} {thing}" + ("" if number == 1 else "s")


def _label_of(line: _Line) -> str:
    """The name, and its letter where the name does not show it."""
    plain = not line.letter or line.letter in (line.name[:1], line.name[-1:])
    return line.name if plain else f"{line.name} ({line.letter})"


# %% tags=["export:draw_paint"]
def _lines_text(lines: Sequence[_Line]) -> list[str]:
    pad = " " if any(line.mark for line in lines) else ""
    labels = [(line.mark or pad) + _label_of(line) for line in lines]
    tables = [wrap(" ".join("-" if i < 0 else str(i) for i in line.ids), 44) or [""]
              for line in lines]
    left, middle = max(map(len, labels)), max(len(part[0]) for part in tables)
    out = []
    for line, label, parts in zip(lines, labels, tables, strict=True):
        first = f"{label:<{left}}  {parts[0]:<{middle}}  " if middle else f"{label:<{left}}  "
        out.append((first + line.note).rstrip())
        out += [" " * (left + 2) + part for part in parts[1:]]
    return out


# %%
print("\n".join(_lines_text(_lines_of(_read_pool(later, ""), _read_pool(earlier, ""), names))))

# %% [markdown]
# ## Drawing
#
# The drawing paints the same cells and lines. Where a desk shows eight small blocks side by side,
# a phone has room for four, so everything is painted twice and the page shows what fits its
# column.

# %% tags=["export:draw_paint", "hide-input"]
def _slot_width(block_size: int, words: bool) -> float:
    """Units a slot is wide: room for a word, for a letter, or a share of 128 for a long block."""
    if words:
        return 36
    if block_size > 16:
        return 128 / block_size
    return {1: 26, 2: 20}.get(block_size, max(9, min(16, 64 // block_size)))


def _paint_run(canvas: Canvas, x: float, y: float, height: float, slot: float, size: int,
               letter: str, used: int, stale: bool) -> None:
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


# %% tags=["export:draw_paint", "hide-input"]
def _paint_words(canvas: Canvas, pool: _Pool, block: int, x: float, y: float) -> None:
    """The words of a block below its slots, cut to what fits."""
    for slot in range(pool.block_size):
        word = " ".join(pool.words.get((block, slot), "").split())
        if word:
            word = word if len(word) < 7 else word[:5] + "…"
            canvas.words(x + (slot + 0.5) * _slot_width(pool.block_size, True), y, word,
                         "pk-mid pk-small")


def _paint_block(canvas: Canvas, pool: _Pool, cell: _Cell, x: float, height: float) -> None:
    """One block at (x, canvas.y): its id, its owners' slots as bands, its outline."""
    slot = _slot_width(pool.block_size, bool(pool.words))
    width, top = slot * pool.block_size, canvas.y + 17
    label = f"{cell.mark}{cell.block}" + (f" ×{cell.count}" if cell.count > 1 else "")
    canvas.words(x + width / 2, top - 5, label, "pk-bold" if cell.mark else "pk-id")
    band = height / max(1, len(cell.owners))
    for i, (letter, used) in enumerate(cell.owners):
        _paint_run(canvas, x, top + i * band, band, slot, pool.block_size, letter, used,
                   cell.state == "stale")
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


# %% tags=["export:draw_paint", "hide-input"]
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


# %% tags=["export:draw_paint", "hide-input"]
def _paint_lines(canvas: Canvas, lines: Sequence[_Line]) -> None:
    """The rows below the blocks: a chip with the chat's letter, its table, a note."""
    left = 16 if any(line.mark for line in lines) else 4
    names = ["" if line.name == line.letter else line.name for line in lines]
    indent = left + 10 + max(8 * len(n) + (24 if ln.letter else 0)
                             for n, ln in zip(names, lines, strict=True))
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


# %% [markdown]
# ## Words
#
# A screen reader gets one sentence for each fact, made from the same lines and cells.

# %% tags=["export:draw"]
"""Pictures of a pool of blocks, of a contiguous pool and of one block table.

Takes plain snapshots, and needs the standard library only (`book_style` needs matplotlib).
"""

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


# %% [markdown]
# ## The picture of a pool

# %% tags=["export:draw"]
def _summary(pool: _Pool, cells: list[_Cell]) -> str:
    wasted = sum(pool.block_size - max(used for _, used in c.owners)
                 for c in cells if c.state == "held")
    held = sum(c.state == "held" for c in cells)
    other = sum(c.state == "other" for c in cells)
    note = f"{held} of {_count_of(pool.num_blocks, 'block')} held, "
    note += f"{_count_of(wasted, 'slot')} wasted"
    return note + (f", {_count_of(other, 'block')} in no table shown" if other else "")


def draw_pool(snapshot: Mapping[str, Any], *, title: str = "",
              before: Mapping[str, Any] | None = None,
              highlight: Iterable[int] = ()) -> Picture:
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


# %% tags=["export:draw", "hide-input"]
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


# %% [markdown]
# Now the opening step, drawn. Block 6 is neither free nor in a table: it is lost, and it looks
# lost.

# %%
draw_pool(later, before=earlier, title="B finishes, and one block does not come back")

# %% [markdown]
# In a notebook the drawing stands above; what a terminal and a test see is this.

# %%
print(draw_pool(later, before=earlier))

# %% [markdown]
# :::{admonition} Predict
# :class: tip
# Chat A holds 6 tokens in blocks 0 and 1 of size 4, and B is a fork of A: it names the same two
# blocks. A third chat C holds block 2, full. How many blocks are held, and how many slots are
# wasted: 2 or 4?
# :::
#
# :::{dropdown} Reasoning
# Three blocks are held: a shared block is one block. A's table has 2 empty slots, and so has B's,
# but they are the same two slots of block 1. The pool wastes 2.
# :::

# %%
shared = {
    "block_size": 4, "num_blocks": 6, "free": [3, 4, 5],
    "tables": {"A": [0, 1], "B": [0, 1], "C": [2]},
    "seq_lens": {"A": 6, "B": 6, "C": 4}, "ref_counts": [2, 2, 1, 0, 0, 0],
}
picture = draw_pool(shared, title="B is a fork of A")
print(picture)
picture

# %% [markdown]
# **Turn the knob.** Set `"block_size"` to 32 and the lengths to 40, 40 and 32; expect boxes of 16
# characters, each for two slots, a drawing without lines between the slots, and 24 slots wasted.
#
# :::{admonition} Check it yourself
# :class: warning
# The waste of a pool is the sum of the empty slots of its tables: ~~4~~ here. The sum counts a
# shared tail once for every owner.
# :::

# %%
by_table = sum(4 * len(t) - shared["seq_lens"][n] for n, t in shared["tables"].items())
print("summed over tables:", by_table, "  in the pool:", str(picture).split(", ")[-1])

# %% [markdown]
# With the key `"tokens"` the words themselves stand below the slots, and `highlight` points at a
# block.

# %%
draw_pool(shared | {"tokens": {"A": ["the", "cat", "sat", "on", "the", "mat"]}}, highlight=[1])

# %% [markdown]
# What a screen reader says:

# %%
print(picture.alt)

# %% [markdown]
# :::{admonition} Predict
# :class: tip
# Between two pictures chat B finishes, and a new chat, called B as well, arrives with as many
# tokens and is given the same blocks. Which blocks does `before` mark?
# :::
#
# :::{dropdown} Reasoning
# None. The marks compare two *states*, and these are equal; a picture knows nothing of the events
# between them. The bytes have changed all the same, which is why chapter 08 counts how often a
# block was taken.
# :::

# %%
again = earlier | {"tables": dict(earlier["tables"])}
print("*" in str(draw_pool(again, before=earlier)))

# %% [markdown]
# ## A contiguous pool
#
# Chapter 02 gives each chat one stretch of slots. Two kinds of waste must show: slots reserved and
# empty (hatched), and free slots that are of no use because no run of them is long enough.

# %% tags=["export:draw_state"]
def _reserved(snapshot: Mapping[str, Any]) -> tuple[int, dict[str, tuple[int, int, int]]]:
    """The checked number of slots and reservations, in order of their start."""
    _require_keys(snapshot, "snapshot", ("num_slots", "reservations"))
    _require_positive(snapshot, "snapshot", ("num_slots",))
    num_slots, end = int(snapshot["num_slots"]), 0
    rows = {n: (int(r[0]), int(r[1]), int(r[2])) for n, r in snapshot["reservations"].items()}
    _require_names(rows, "snapshot['reservations']")
    rows = dict(sorted(rows.items(), key=lambda item: item[1]))
    for name, (start, reserved, used) in rows.items():
        where = f"snapshot['reservations'][{name!r}]"
        if not 0 <= used <= reserved:
            raise _bad(where, (start, reserved, used), "used is 0 to reserved")
        if start < end or start + reserved > num_slots:
            raise _bad(where, (start, reserved, used), f"slots {end} to {num_slots - 1} are left")
        end = start + reserved
    return num_slots, rows


def _holes(num_slots: int, rows: Mapping[str, tuple[int, int, int]]) -> list[tuple[int, int]]:
    """The free runs as (start, length)."""
    edges = [0, *(edge for s, n, _ in rows.values() for edge in (s, s + n)), num_slots]
    return [(a, b - a) for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a]


def _slot_lines(num_slots: int, rows: Mapping[str, tuple[int, int, int]],
                letters: Mapping[str, str]) -> list[_Line]:
    lines = []
    for name, (start, reserved, used) in rows.items():
        note = f"slots {start} to {start + reserved - 1}: {used} used, {reserved - used} empty"
        lines.append(_Line(name, letters[name], (), note if reserved else "no slot"))
    runs = [length for _, length in _holes(num_slots, rows)]
    note = f"{_count_of(sum(runs), 'slot')} in {_count_of(len(runs), 'run')}"
    note += f", the longest {max(runs)}" if len(runs) > 1 else ""
    return [*lines, _Line("free", "", (), note)]


# %% tags=["export:draw_paint", "hide-input"]
def _paint_slots(canvas: Canvas, num_slots: int, rows: Mapping[str, tuple[int, int, int]],
                 letters: Mapping[str, str]) -> None:
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


# %% tags=["export:draw_paint", "hide-input"]
def _slots_text(num_slots: int, rows: Mapping[str, tuple[int, int, int]],
                letters: Mapping[str, str]) -> list[str]:
    row = ["-"] * num_slots
    for name, (start, reserved, used) in rows.items():
        row[start : start + reserved] = letters[name] * used + "." * (reserved - used)
    text = []
    for low in range(0, num_slots, 64):
        part = row[low : low + 64]
        text.append("".join(f"{low + i:<8}" for i in range(0, len(part), 8)).rstrip())
        text.append("".join(part))
    return text


# %% tags=["export:draw"]
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


# %% [markdown]
# The state that chapter 02 fears: R2 has left, 12 slots are free, and a chat that needs 12 in a
# row is refused.

# %%
holes = {"num_slots": 32, "reservations": {"R1": (0, 12, 5), "R3": (20, 8, 6)}}
picture = draw_slots(holes, title="R2 has finished")
print(picture)
picture

# %% [markdown]
# ## One table
#
# The third picture is the smallest: the table of one chat as arrows, from the order of its tokens
# to the places where they lie.

# %% tags=["export:draw", "hide-input"]
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


def _paint_column(canvas: Canvas, x: float, used: Mapping[int, int], count: int,
                  letter: str, block_size: int) -> None:
    """`count` blocks from top to bottom; `used` says how many slots of each are the chat's."""
    slot = 64 / block_size
    for i in range(count):
        y = canvas.y + 30 * i
        if i in used:
            _paint_run(canvas, x, y, 22, slot, block_size, letter, used[i], False)
        canvas.rect(x, y, 64, 22, "pk-box" if i in used else "pk-free")


# %% tags=["export:draw", "hide-input"]
def _table_svg(entries: Sequence[_Entry], letter: str, block_size: int, num_blocks: int,
               heading: str, alt: str) -> str:
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


# %% tags=["export:draw"]
def draw_table(name: str, blocks: Sequence[int], seq_len: int, block_size: int,
               num_blocks: int, *, title: str = "") -> Picture:
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
    text = [f"logical {i}  {e.what:<{wide}}  ->  {place}"
            for i, (e, place) in enumerate(zip(entries, places, strict=True))]
    facts = [f"Logical block {i}, {e.what}: {place}"
             for i, (e, place) in enumerate(zip(entries, places, strict=True))]
    alt = ". ".join([heading, *facts]) + "."
    letter = _letters_of([name])[name]
    svg = _table_svg(entries, letter, block_size, num_blocks, heading, alt)
    return Picture("\n".join([heading, *text]), alt, (svg, svg))


# %%
picture = draw_table("A", [0, 1, 5], seq_len=9, block_size=4, num_blocks=8)
print(picture)
picture

# %% [markdown]
# :::{admonition} Predict
# :class: tip
# The table is [5, 1, 0] instead, with the same length. Which physical block has empty slots?
# :::
#
# :::{dropdown} Reasoning
# Empty slots belong to the *last logical* block, wherever it lies. That is physical block 0 now.
# :::

# %%
print(draw_table("A", [5, 1, 0], seq_len=9, block_size=4, num_blocks=8))

# %% [markdown]
# ## Plots
#
# Curves and bars are matplotlib's. One function sets the same colours, sizes legible at the width
# of a page, and a white card that stays readable when the page is dark.

# %% tags=["export:draw"]
_PLOTS: dict[str, Any] = {
    "figure.figsize": (6.4, 3.4), "figure.dpi": 144, "figure.constrained_layout.use": True,
    "figure.facecolor": "white", "savefig.facecolor": "white", "savefig.dpi": "figure",
    "font.size": 12, "axes.titlesize": 13, "legend.fontsize": 11, "legend.frameon": False,
    "lines.linewidth": 2.2, "lines.markersize": 6, "hatch.linewidth": 0.8,
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
    "axes.grid": True, "grid.color": "#dddddd", "grid.linewidth": 0.8, "grid.linestyle": "-",
    "svg.hashsalt": "paged_kv", "svg.fonttype": "none",
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


# %% tags=["hide-input"]
import matplotlib.pyplot as plt

book_style()
lengths = range(1, 33)
for block_size in (1, 4, 16):
    plt.step(lengths, [-n % block_size for n in lengths], where="mid", label=f"B = {block_size}")
plt.xlabel("tokens of the chat")
plt.ylabel("empty slots in its last block")
plt.legend()
plt.show()

# %% [markdown]
# *Figure: empty slots in the last block against the length of a chat, for blocks of 1, 4 and 16
# slots; a saw-tooth that falls to 0 at each multiple of the block size.*
#
# Line style repeats what colour says, for the same reader as above.
#
# ## State card
#
# | name | holds | invariant |
# |---|---|---|
# | `Picture` | `text`, `alt`, `svgs` (wide, narrow) | equal snapshots, equal pictures, byte for byte |
# | `Canvas` | `width`, `y`, `shapes` | `y` only moves down |
# | `draw_pool` | nothing | draws only states that can be; refuses the others by name |
# | `draw_slots` | nothing | reservations do not overlap |
# | `draw_table` | nothing | one arrow an entry that is not -1 |
#
# What breaks next: a pool of thousands of blocks. One picture no longer helps there, and the later
# chapters plot counts over time.
#
# ## Real world
#
# Serving systems mostly report numbers. vLLM gives the share of blocks in use (`usage` in
# `vllm/v1/core/kv_cache_manager.py`); TensorRT-LLM counts free, used and reused blocks
# (`KvCacheStats` in `cpp/include/tensorrt_llm/batch_manager/kvCacheManager.h`); SGLang can print
# its tree of prefixes (`pretty_print` in `python/sglang/srt/mem_cache/radix_cache.py`). A share of
# 75 in 100 blocks in use looks equally healthy whether a block is lost or not; the lost block
# shows only to those who know every owner.
#
# ## Exercises
#
# :::{exercise}
# :label: ex-A1-lines
# *Compute.* A pool has 64 blocks of 4 slots, none shared. How many lines does the text of its
# blocks have?
# :::
#
# :::{solution} ex-A1-lines
# :class: dropdown
# A box is 6 characters and a space, so 11 would fit in 76 columns; the row is cut to a power of
# two, 8. That makes 8 rows of two lines, ids and boxes: 16.
# :::

# %% tags=["hide-input"]
big = {"block_size": 4, "num_blocks": 64, "free": list(range(64)), "tables": {}, "seq_lens": {}}
lines = str(draw_pool(big)).splitlines()
answer = next(i for i, line in enumerate(lines) if line.startswith("free"))
assert answer == 16
print(answer)

# %% [markdown]
# :::{exercise}
# :label: ex-A1-trace
# *Trace.* The boxes read `[AAAA] [BB..] [A...]`, from block 0 on. A's table is [0, 2]. How many
# tokens has each chat, and in which block is A's token 4?
# :::
#
# :::{solution} ex-A1-trace
# :class: dropdown
# A has 5 tokens, B has 2. Token 4 is the first of A's logical block 1, which is physical block 2.
# :::

# %% tags=["hide-input"]
traced = draw_pool({"block_size": 4, "num_blocks": 3, "free": [], "tables": {"A": [0, 2], "B": [1]},
                    "seq_lens": {"A": 5, "B": 2}})
assert str(traced).splitlines()[1] == "[AAAA] [BB..] [A...]"
print(traced)

# %% [markdown]
# :::{exercise}
# :label: ex-A1-break
# *Break.* Change one number of `earlier` so that `draw_pool` refuses it. Change one so that it is
# wrong and still drawn. How does the second look?
# :::
#
# :::{solution} ex-A1-break
# :class: dropdown
# A length of 13 for A is more than its three blocks hold, and is refused. A table [2, 0] for B
# shares block 0 with A while its count stays 1: two letters in one block and no x2 below it. And
# block 6, now in no table, turns grey.
# :::

# %% tags=["hide-input"]
try:
    draw_pool(earlier | {"seq_lens": {"A": 13, "B": 5, "C": 5}})
except ValueError as error:
    print(error)
wrong = draw_pool(earlier | {"tables": earlier["tables"] | {"B": [2, 0]}})
assert "[????]" in str(wrong)
assert "x2" not in str(wrong)
print(wrong)

# %% [markdown]
# :::{exercise}
# :label: ex-A1-refused
# *Compute.* What is the smallest request in a row that the pool `holes` refuses, though it has 12
# free slots?
# :::
#
# :::{solution} ex-A1-refused
# :class: dropdown
# 9: the longest run has 8 slots.
# :::

# %% tags=["hide-input"]
smallest = max(length for _, length in _holes(32, holes["reservations"])) + 1
assert smallest == 9
print(smallest)

# %% [markdown]
# :::{exercise}
# :label: ex-A1-implement
# *Implement.* Write `boxes(snapshot)` that returns the line of boxes for a pool whose blocks are
# held by at most one chat with a one-letter name. Six lines are enough.
# :::
#
# :::{solution} ex-A1-implement
# :class: dropdown
# The cell below fills a list of free boxes, then overwrites those that a table names.
# :::

# %% tags=["hide-input"]
def boxes(snapshot):
    """The line of boxes of a pool without sharing."""
    size = snapshot["block_size"]
    out = [" " + "-" * size + " "] * snapshot["num_blocks"]
    for name, table in snapshot["tables"].items():
        for i, block in enumerate(table):
            used = min(size, snapshot["seq_lens"][name] - i * size)
            out[block] = "[" + (name * used).ljust(size, ".") + "]"
    return " ".join(out).rstrip()


assert boxes(earlier) == str(draw_pool(earlier)).splitlines()[1]
print(boxes(earlier))

# %% [markdown]
# ## Further reading
#
# - Okabe and Ito, on colours for all readers: the eight colours and why these {cite}`okabe2008`.
# - Peter Norvig, [Solving Every Sudoku Puzzle](https://norvig.com/sudoku.html): a program that
#   keeps one function to show its state, and uses it at each step.
# - Edward Tufte, *The Visual Display of Quantitative Information*, second edition, Graphics Press,
#   2001.
