"""Keep the two files of every chapter in step: NN_topic.py and NN_topic.ipynb.

    python tools/sync.py [--check] [--take py|ipynb] [NN ...]

A pair has a last common state: the one this tool left, or else the one in git's HEAD.  The side that has moved
away from it wins.  Both moved, and differently: an error that shows the cells.  Modification times play no part.
A cell whose code is unchanged keeps its outputs, an edited one loses them.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
from collections.abc import Iterable, Sequence
from copy import deepcopy
from pathlib import Path

from chapters import (
    KERNEL,
    ROOT,
    BookError,
    Cell,
    Chapter,
    as_cells,
    find_chapters,
    from_head,
    main,
    parse_ipynb,
    percent_cells,
    read_ipynb,
    read_py,
    to_percent,
    write_if_changed,
    write_ipynb,
)
from nbformat import NotebookNode
from nbformat.v4 import new_notebook


def digest(cells: Sequence[Cell] | None) -> str:
    """A fingerprint of a list of cells; empty for none."""
    if cells is None:
        return ""
    return hashlib.sha256(json.dumps([[c.kind, c.source, c.tags] for c in cells]).encode()).hexdigest()


def head_cells(chapter: Chapter) -> tuple[list[Cell] | None, list[Cell] | None]:
    """The cells of both files in git's HEAD, None where HEAD lacks the file."""
    py = from_head(chapter.root, f"{chapter.name}.py")
    ipynb = from_head(chapter.root, f"{chapter.name}.ipynb")
    return (
        None if py is None else list(percent_cells(py)),
        None if ipynb is None else as_cells(parse_ipynb(ipynb)),
    )


def _memory(chapter: Chapter) -> Path:
    return chapter.root / ".cache" / "sync" / f"{chapter.stem}.json"


def remember(chapter: Chapter, cells: Sequence[Cell]) -> None:
    """Note the state in which the two files agree, and the HEAD it was seen under."""
    note = {"head": [digest(side) for side in head_cells(chapter)], "cells": digest(cells)}
    write_if_changed(_memory(chapter), json.dumps(note) + "\n")


def _remembered(chapter: Chapter, head: tuple[list[Cell] | None, list[Cell] | None]) -> str:
    """The fingerprint that `remember` noted; empty once HEAD has moved the pair since."""
    try:
        note = json.loads(_memory(chapter).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return ""
    return str(note["cells"]) if note["head"] == [digest(side) for side in head] else ""


def winner(chapter: Chapter) -> str:
    """Which side to copy from: "py", "ipynb", or "" where the two agree.

    Raises BookError where both have changed, or nothing says which one has.
    """
    if not chapter.ipynb.exists():
        return "py"
    if not chapter.py.exists():
        return "ipynb"
    py, ipynb = chapter.cells(), as_cells(read_ipynb(chapter.ipynb))
    if py == ipynb:
        return ""
    head = head_cells(chapter)
    last = _remembered(chapter, head)
    for base_py, base_ipynb in ((last, last), (digest(head[0]), digest(head[1]))):
        py_same, ipynb_same = digest(py) == base_py, digest(ipynb) == base_ipynb
        if py_same != ipynb_same:
            return "ipynb" if py_same else "py"
    raise BookError(
        f"{chapter.stem}: the .py and the .ipynb differ, and each differs from their last common state.\n"
        f"{show_difference(py, ipynb)}\n"
        f"Make them agree, or choose: python tools/sync.py --take py {chapter.stem}   (or --take ipynb)"
    )


def show_difference(py: Sequence[Cell], ipynb: Sequence[Cell]) -> str:
    """The cells in which two sides differ, as a diff with their numbers."""
    lines = []
    matcher = difflib.SequenceMatcher(None, py, ipynb, autojunk=False)
    for kind, a, b, c, d in matcher.get_opcodes():
        if kind != "equal":
            lines += [*_span(".py", a, py[a:b]), *_span(".ipynb", c, ipynb[c:d])]
            lines += list(difflib.unified_diff(_text(py[a:b]), _text(ipynb[c:d]), lineterm="", n=1))[2:]
    return "\n".join(f"    {line}" for line in lines)


def _span(side: str, start: int, cells: Sequence[Cell]) -> list[str]:
    return [f"{side} cell {start + i + 1}: {cell.first_line}" for i, cell in enumerate(cells)]


def _text(cells: Iterable[Cell]) -> list[str]:
    return [line for c in cells for line in [f"%% {c.kind} {list(c.tags)}", *c.source.splitlines()]]


def match(old: Sequence[Cell], new: Sequence[Cell]) -> list[tuple[int | None, bool]]:
    """For each new cell, the old cell it continues, and whether its text is still the same.

    Tags do not count: they change how an output is shown, not what it is.
    """
    found: list[tuple[int | None, bool]] = [(None, False)] * len(new)
    old_keys, new_keys = ([(cell.kind, cell.source) for cell in cells] for cells in (old, new))
    matcher = difflib.SequenceMatcher(None, old_keys, new_keys, autojunk=False)
    for kind, a, b, c, d in matcher.get_opcodes():
        if kind in {"equal", "replace"}:
            for i, j in zip(range(a, b), range(c, d), strict=False):
                if old[i].kind == new[j].kind:
                    found[j] = (i, kind == "equal")
    return found


def merge(cells: NotebookNode, old: NotebookNode | None, stem: str) -> NotebookNode:
    """The notebook with these cells, and from `old` the ids and the outputs that still belong."""
    sources = as_cells(cells)
    olds = as_cells(old) if old else []
    kernel = (old and old.metadata.get("kernelspec")) or cells.metadata.get("kernelspec") or KERNEL
    merged = new_notebook(metadata={"kernelspec": dict(kernel)}, nbformat_minor=5)
    taken: set[str] = set()
    for source, (index, same) in zip(sources, match(olds, sources), strict=True):
        before = old.cells[index] if old and index is not None else None
        cell = NotebookNode(cell_type=source.kind, source=source.source, metadata=NotebookNode())
        cell.id = _fresh_id(stem, source, before, taken)
        if source.tags:
            cell.metadata.tags = list(source.tags)
        if source.kind == "code":
            kept = before if same else None
            cell.outputs = deepcopy(kept.outputs) if kept else []
            cell.execution_count = kept.execution_count if kept else None
        merged.cells.append(cell)
    return merged


def _fresh_id(stem: str, cell: Cell, before: NotebookNode | None, taken: set[str]) -> str:
    """The id the cell had, else one that follows from its text: the same on every machine."""
    name = before.get("id", "") if before is not None else ""
    salt = 0
    while not name or name in taken:
        name = hashlib.sha256(f"{stem}\0{cell.kind}\0{cell.source}\0{salt}".encode()).hexdigest()[:8]
        salt += 1
    taken.add(name)
    return name


def as_percent(notebook: NotebookNode, old: NotebookNode | None, root: Path) -> str:
    """The .py text of a notebook; cells that `old` has alike keep their blank lines."""
    sources = as_cells(notebook)
    olds = as_cells(old) if old else []
    kernel = (old and old.metadata.get("kernelspec")) or notebook.metadata.get("kernelspec") or KERNEL
    plain = new_notebook(metadata={"kernelspec": dict(kernel)})
    for source, (index, same) in zip(sources, match(olds, sources), strict=True):
        cell = NotebookNode(cell_type=source.kind, source=source.source, metadata=NotebookNode())
        if old and index is not None:  # jupytext notes the blank lines behind a cell in its metadata
            cell.metadata.update(deepcopy(old.cells[index].metadata))
            cell.source = old.cells[index].source if same else source.source
        cell.metadata.pop("tags", None)
        if source.tags:
            cell.metadata.tags = list(source.tags)
        if source.kind == "code":
            cell.outputs, cell.execution_count = [], None
        plain.cells.append(cell)
    text = to_percent(plain, root)
    if list(percent_cells(text)) != sources:
        shown = show_difference(percent_cells(text), sources)
        raise BookError(f"the percent format cannot hold these cells of the notebook:\n{shown}")
    return text


def sync(chapter: Chapter, take: str = "", check: bool = False) -> str:
    """Bring one pair in step.  Return what was done, empty for nothing; with `check` only look."""
    side = winner(chapter) if not take or not (chapter.py.exists() and chapter.ipynb.exists()) else take
    if check:
        return f"{chapter.stem}: out of step, the .{side} is newer" if side else ""
    if side == "py":
        old = read_ipynb(chapter.ipynb) if chapter.ipynb.exists() else None
        write_ipynb(chapter.ipynb, merge(read_py(chapter.py), old, chapter.stem))
    elif side == "ipynb":
        _take_notebook(chapter)
    remember(chapter, chapter.cells())
    return f"{chapter.stem}: taken from the .{side}" if side else ""


def _take_notebook(chapter: Chapter) -> None:
    notebook = read_ipynb(chapter.ipynb)
    old = read_py(chapter.py) if chapter.py.exists() else None
    if old:  # Outputs in the notebook belong to the code it had when it last agreed with the .py.
        for cell, (_, same) in zip(notebook.cells, match(as_cells(old), as_cells(notebook)), strict=True):
            if cell.cell_type == "code" and not same:
                cell.outputs, cell.execution_count = [], None
    write_if_changed(chapter.py, as_percent(notebook, old, chapter.root))
    write_ipynb(chapter.ipynb, merge(notebook, notebook, chapter.stem))


def _run() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="report only; exit 1 where a pair is out of step")
    parser.add_argument("--take", choices=["py", "ipynb"], default="", help="which side wins, whatever has changed")
    parser.add_argument("chapters", nargs="*", metavar="NN")
    options = parser.parse_args()
    problems = []
    said = []
    for chapter in find_chapters(ROOT, options.chapters):
        try:
            said += [line for line in [sync(chapter, options.take, options.check)] if line]
        except BookError as error:
            problems.append(str(error))
    print("\n".join([*said, *problems]) or "every pair is in step")
    return int(bool(problems or (options.check and said)))


if __name__ == "__main__":
    main(_run)
