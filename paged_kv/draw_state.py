# Exported from book/appendices/A1_drawing.py by tools/export.py; edit the chapter, not this file.
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


_REQUIRED = ("block_size", "num_blocks", "free", "tables", "seq_lens")
_OPTIONAL = ("ref_counts", "tokens", "highlight")


def _bad(argument: str, value: object, allowed: str) -> ValueError:
    return ValueError(f"{argument} = {value!r}: {allowed}")


def _require_keys(
    given: Mapping[str, Any], argument: str, required: Sequence[str], optional: Sequence[str] = ()
) -> None:
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


def _require_names(names: Iterable[str], argument: str) -> None:
    for name in names:
        if not isinstance(name, str) or not name.strip():
            raise _bad(argument, name, "names are strings with a letter in them")


def _require_tables(pool: _Pool, argument: str) -> None:
    if len(set(pool.free)) < len(pool.free):
        raise _bad(f"{argument}['free']", list(pool.free), "no block may be free twice")
    if len(pool.ref_counts) != pool.num_blocks:
        raise _bad(
            f"{argument}['ref_counts']",
            list(pool.ref_counts),
            f"one count a block, so {pool.num_blocks}",
        )
    for name, table in pool.tables.items():
        where = f"{argument}['tables'][{name!r}]"
        _require_ids(table, where, pool.num_blocks, -1)
        both = sorted(set(table) & set(pool.free))
        if both:
            raise _bad(where, list(table), f"blocks {both} are also in the free queue")
        most = len(table) * pool.block_size
        if not 0 <= pool.seq_lens[name] <= most:
            raise _bad(
                f"{argument}['seq_lens'][{name!r}]",
                pool.seq_lens[name],
                f"its table of {len(table)} blocks holds 0 to {most} tokens",
            )


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
    pool = _Pool(
        int(snapshot["block_size"]),
        num_blocks,
        free,
        tables,
        seq_lens,
        tuple(map(int, counts)),
        {},
        marked,
    )
    _require_tables(pool, argument)
    pool.words.update(_words(snapshot, argument))
    return pool


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
        empty -= sum(
            min(max(pool.seq_lens[name] - i * pool.block_size, 0), pool.block_size)
            for i, block in enumerate(table)
            if block >= 0
        )
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


def _slot_lines(
    num_slots: int, rows: Mapping[str, tuple[int, int, int]], letters: Mapping[str, str]
) -> list[_Line]:
    lines = []
    for name, (start, reserved, used) in rows.items():
        note = f"slots {start} to {start + reserved - 1}: {used} used, {reserved - used} empty"
        lines.append(_Line(name, letters[name], (), note if reserved else "no slot"))
    runs = [length for _, length in _holes(num_slots, rows)]
    note = f"{_count_of(sum(runs), 'slot')} in {_count_of(len(runs), 'run')}"
    note += f", the longest {max(runs)}" if len(runs) > 1 else ""
    return [*lines, _Line("free", "", (), note)]
