"""Hold the cells of a chapter against the rules: executed, no errors left, no import of a later chapter, not too long.

    python tools/check_cells.py [NN ...]
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from chapters import (
    ROOT,
    BookError,
    Chapter,
    as_cells,
    code_imports,
    exported,
    find_chapters,
    main,
    modules_of,
    name_homes,
    package_trees,
    read_ipynb,
)
from sync import sync

MAX_EXPORTED_LINES = 40
MAX_COLUMNS = 100


def out_of_step(chapter: Chapter) -> list[str]:
    """The two files of the pair do not say the same."""
    try:
        return [line for line in [sync(chapter, check=True)] if line]
    except BookError as error:
        return [str(error)]


def never_executed(chapter: Chapter) -> list[str]:
    """Code cells without an execution count; GPU cells that wait for a GPU are `pending`, not here."""
    return [
        f"{chapter.where(index, cell)}: never executed"
        for index, cell, node in _code(chapter)
        if node.execution_count is None and cell.source.strip() and gpu_state(node) != "awaiting"
    ]


def pending(chapter: Chapter) -> list[str]:
    """GPU cells whose output is missing or old."""
    return [
        f"{chapter.where(index, cell)}: {state}"
        for index, cell, node in _code(chapter)
        if (state := gpu_state(node))
    ]


def gpu_state(node) -> str:  # type: ignore[no-untyped-def]
    """Which banner a GPU cell bears: "stale", "awaiting", or none."""
    marks = [output.get("metadata", {}).get("gpu") for output in node.outputs]
    return next((mark for mark in marks if mark), "") if "gpu" in node.metadata.get("tags", ()) else ""


def stored_errors(chapter: Chapter) -> list[str]:
    """Errors that no tag announces, and tracebacks."""
    problems = []
    for index, cell, node in _code(chapter):
        for output in node.outputs:
            text = output.get("text", "") + "\n".join(output.get("traceback", []))
            if output.output_type == "error" and "raises-exception" not in cell.tags:
                problems.append(f"{chapter.where(index, cell)}: ends in {output.ename}, not tagged raises-exception")
            elif "Traceback (most recent call last)" in text or len(output.get("traceback", [])) > 1:
                problems.append(f"{chapter.where(index, cell)}: a traceback is stored")
    return problems


def later_imports(chapter: Chapter) -> list[str]:
    """Imports of modules that a later chapter exports; the tour, labs and appendices may."""
    if chapter.number is None:
        return []
    homes = name_homes(package_trees(chapter.root))
    owner = module_owners(chapter.root)
    problems = []
    for index, cell in enumerate(chapter.cells()):
        for module in sorted(code_imports([cell], homes)):
            number = owner[module].number if module in owner else None
            if number is not None and number > chapter.number:
                said = f"imports paged_kv.{module}, which {owner[module].stem} exports later"
                problems.append(f"{chapter.where(index, cell)}: {said}")
    return problems


def module_owners(root: Path) -> dict[str, Chapter]:
    """The chapter that exports each module."""
    return {module: chapter for chapter in find_chapters(root) for module in modules_of(chapter.cells())}


def too_long(chapter: Chapter) -> list[str]:
    """Exported cells of more than 40 lines, and code that a page would clip."""
    cells = chapter.cells()
    problems = [
        f"{chapter.where(index, cell)}: {lines} lines exported, at most {MAX_EXPORTED_LINES}"
        for index, cell, _ in exported(cells)
        if (lines := len(cell.source.splitlines())) > MAX_EXPORTED_LINES
    ]
    for index, cell in enumerate(cells):
        if cell.kind == "code" and (wide := re.search(rf"(?m)^.{{{MAX_COLUMNS + 1},}}$", cell.source)):
            problems.append(f"{chapter.where(index, cell)}: {len(wide[0])} columns: {wide[0].strip()[:50]}...")
    return problems


def _code(chapter: Chapter):  # type: ignore[no-untyped-def]
    notebook = read_ipynb(chapter.ipynb)
    triples = enumerate(zip(as_cells(notebook), notebook.cells, strict=True))
    return [(index, cell, node) for index, (cell, node) in triples if cell.kind == "code"]


GUARDS: tuple[Callable[[Chapter], list[str]], ...] = (
    out_of_step,
    never_executed,
    stored_errors,
    later_imports,
    too_long,
)


def check_cells(chapter: Chapter) -> list[str]:
    """Everything that is wrong with a chapter's cells."""
    if not chapter.ipynb.exists():
        return [f"{chapter.stem}: no notebook yet"]
    return [line for guard in GUARDS for line in guard(chapter)]


def _run() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("chapters", nargs="*", metavar="NN")
    chapters = find_chapters(ROOT, parser.parse_args().chapters)
    lines = [line for chapter in chapters for line in check_cells(chapter)]
    print("\n".join(lines) or "every cell is as it should be")
    return int(bool(lines))


if __name__ == "__main__":
    main(_run)
