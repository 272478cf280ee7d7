"""The register of the book's numbers: book/numbers.md, written from the notebooks and the results.

    python tools/number_register.py [--check]

Every number with a unit, % or "times" in prose: what vouches for it, where it stands, and how old it
is.  --check writes nothing and exits 1 where the page says something else.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from chapters import ROOT, Chapter, find_chapters, main, parse_cell, read_ipynb, write_if_changed
from check_prose import CITATION, CODE, FENCE, ROLE, STRUCK, printed, quantities, sentences
from nbformat import NotebookNode

PAGE = "book/numbers.md"
RESULT = re.compile(r"benchmarks/results/(\w+)\.json")
KINDS = ("computed", "measured", "cited", "struck", "loose")


@dataclass(frozen=True)
class Number:
    """A number with a unit in prose, and what vouches for it."""

    quantity: str  # as check_prose spells it: `1152 B`
    kind: str  # one of KINDS; loose: nothing vouches for it
    section: str
    source: str
    date: str  # of the results file it was read from, or ""


@dataclass(frozen=True)
class Printed:
    """What one cell printed: all quantities, those on `measured:` lines, and the results it was read from."""

    cell: int
    section: str
    every: frozenset[str]
    measured: frozenset[str]
    files: tuple[str, ...]


def names_in(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    """The names that a statement reads or binds."""
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, context)}


def files_read(source: str, known: dict[str, frozenset[str]]) -> tuple[str, ...]:
    """The results that a cell's values come from; `known` maps each name to its files and is carried on."""
    found: set[str] = set()
    try:
        body = parse_cell(source).body
    except SyntaxError:
        return ()
    for statement in body:
        here = set(RESULT.findall(ast.get_source_segment(source, statement) or ""))
        for name in names_in(statement, ast.Load):
            here |= known.get(name, frozenset())
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            known[statement.name] = frozenset(here)
            continue
        found |= here
        for name in names_in(statement, ast.Store):
            known[name] = frozenset(here)
    return tuple(sorted(found))


def outputs(notebook: NotebookNode) -> list[Printed]:
    """What each code cell printed, with the section it stands in."""
    found, heading = [], "the opening"
    known: dict[str, frozenset[str]] = {}
    for index, cell in enumerate(notebook.cells, 1):
        if cell.cell_type == "markdown":
            heads = re.findall(r"(?m)^## (.*)$", FENCE.sub("", cell.source))
            heading = heads[-1].strip() if heads else heading
        elif cell.cell_type == "code":
            text = "\n".join(part for output in cell.outputs for part in printed(output))
            lines = "\n".join(line for line in text.splitlines() if line.lstrip().startswith("measured:"))
            files = files_read(cell.source, known)
            every, measured = frozenset(quantities(text)), frozenset(quantities(lines))
            found.append(Printed(index, heading, every, measured, files))
    return found


def prose(notebook: NotebookNode) -> Iterator[tuple[str, str]]:
    """Each sentence of the notebook with its section."""
    heading = "the opening"
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for part in re.split(r"(?m)^(?=## )", FENCE.sub("", cell.source)):
                if part.startswith("## "):
                    heading = part.splitlines()[0].removeprefix("## ").strip()
                # A struck mistake may hold the end of a sentence.
                kept = STRUCK.sub(lambda found: found[0].replace(". ", " "), part)
                yield from ((heading, sentence) for sentence in sentences(kept))


def numbers_of(notebook: NotebookNode, dates: dict[str, str]) -> list[Number]:
    """The numbers of a chapter in reading order, each once a section and kind."""
    cells = outputs(notebook)
    found: list[Number] = []
    for section, sentence in prose(notebook):
        here = [cell for cell in cells if cell.section == section]
        for struck in STRUCK.findall(sentence):
            found += [Number(q, "struck", section, "a mistake", "") for q in quantities(struck.strip("~"))]
        cited = ",".join(dict.fromkeys(role[0].split("`")[1] for role in CITATION.finditer(sentence)))
        for quantity in quantities(CODE.sub(" ", ROLE.sub(" ", STRUCK.sub(" ", sentence)))):
            found.append(vouched(quantity, section, here, cited, dates))
    return list(dict.fromkeys(found))


def vouched(quantity: str, section: str, here: list[Printed], cited: str, dates: dict[str, str]) -> Number:
    """A number of the prose with what vouches for it: an output, or a citation."""
    for kind in ("measured", "computed"):
        for cell in here:
            if quantity in (cell.measured if kind == "measured" else cell.every):
                files = ", ".join(f"`{name}.json`" for name in cell.files)
                source = f"cell {cell.cell}" + (f", from {files}" if files else "")
                date = max((dates.get(name, "") for name in cell.files), default="")
                return Number(quantity, kind, section, source, date)
    if cited:
        return Number(quantity, "cited", section, f"{{cite}}`{cited}`", "")
    return Number(quantity, "loose", section, "nothing", "")


# ------------------------------------------------------------------------------------------ pages by hand

BY_HAND = ("building", "cheat_sheet", "glossary")
KEPT = {"{glossary}", "{bibliography}", "{admonition}"}


def without_code(markdown: str) -> str:
    """Markdown without fenced code and raw HTML; what stands in a directive for prose stays."""
    kept: list[str] = []
    open_fence, hidden = "", False
    for line in markdown.splitlines():
        fence = re.match(r"\s*(`{3,}|~{3,})[ \t]*(\S*)", line)
        if fence and open_fence and fence[1].startswith(open_fence) and not fence[2]:
            open_fence, hidden = "", False
        elif fence and not open_fence:
            open_fence, hidden = fence[1], fence[2] not in KEPT
        elif not hidden:
            kept.append(line)
    return "\n".join(kept) + "\n"


def numbers_of_page(root: Path, name: str, dates: dict[str, str]) -> list[Number]:
    """The numbers of a page by hand: printed by a chapter that the same section links to, or by any; or cited."""
    path = root / "book" / f"{name}.md"
    found: list[Number] = []
    for section in re.split(r"(?m)^(?=## )", without_code(path.read_text("utf-8")) if path.exists() else ""):
        heading = section.splitlines()[0].removeprefix("## ") if section.startswith("## ") else "the opening"
        links = {Path(link).stem for link in re.findall(r"\]\(([^)#\s]+\.ipynb)", section)}
        chapters = [chapter for chapter in find_chapters(root) if not links or chapter.stem in links]
        for sentence in sentences(STRUCK.sub(" ", section)):
            # A citation vouches for what stands before it; what follows it is the book's own.
            keys = [role[0].split("`")[1] for role in CITATION.finditer(sentence)]
            for cited, part in zip([*keys, ""], CITATION.split(sentence), strict=True):
                for quantity in quantities(CODE.sub(" ", ROLE.sub(" ", part))):
                    found.append(elsewhere(quantity, heading, chapters, cited, dates))
    return list(dict.fromkeys(found))


def elsewhere(quantity: str, section: str, chapters: list[Chapter], cited: str, dates: dict[str, str]) -> Number:
    """A number of a page: cited, or with the first of these chapters that prints it."""
    for chapter in () if cited else chapters:
        cells = printed_by(chapter) if chapter.ipynb.exists() else []
        number = vouched(quantity, section, cells, "", dates)
        if number.kind != "loose":
            page = chapter.ipynb.relative_to(chapter.root / "book").as_posix()
            return replace(number, source=f"[{chapter.stem.partition('_')[0]}]({page}), {number.source}")
    return vouched(quantity, section, [], cited, dates)


@functools.lru_cache(maxsize=64)
def printed_by(chapter: Chapter) -> list[Printed]:
    """What the cells of a chapter printed."""
    return outputs(read_ipynb(chapter.ipynb))


# ------------------------------------------------------------------------------------------ the page

INTRO = """\
# The numbers of this book

Each number with a unit, a % or "times" in the prose of this book, and what vouches for it. A *computed* number
stands, same digits and same unit, in an output of its section, which the tests compare with a fresh run; a
*measured* one stands on a line of output that begins with `measured:`; a *cited* one is somebody else's; a
*struck* one is a mistake in circulation ([](mistakes.md)). Where the cell that prints a number reads a file of
`benchmarks/results`, the file is named, with the day on which it was measured. This page is written by
`tools/number_register.py`, and a test says when it is out of date.
"""


def slug(heading: str) -> str:
    """The anchor of a heading, as MyST makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower().replace("\n", " ")).replace(" ", "-")


def title(notebook: NotebookNode, chapter: Chapter) -> str:
    """A chapter's number and title."""
    number = chapter.stem.partition("_")[0]
    found = re.search(r"(?m)^# (.*)$", notebook.cells[0].source)
    name = found[1] if found else chapter.stem
    return name if name.startswith(number) else f"{number} {name}"


def pretty(quantity: str) -> str:
    """1000000 B as 1,000,000 B."""
    number, _, unit = quantity.partition(" ")
    whole, dot, rest = number.partition(".")
    return f"{int(whole):,}{dot}{rest} {unit}"


def table(heading: str, page: str, found: list[Number]) -> str:
    """The Markdown of one page's numbers."""
    if not found:
        return ""
    lines = [f"\n## {heading}\n"]
    lines += ["| number | kind | section | source | date |", "|---|---|---|---|---|"]
    for number in found:
        target = page if number.section == "the opening" else f"{page}#{slug(number.section)}"
        said = f"~~{pretty(number.quantity)}~~" if number.kind == "struck" else pretty(number.quantity)
        link = f"[{number.section.replace('`', '')}]({target})"
        lines.append(f"| {said} | {number.kind} | {link} | {number.source} | {number.date} |")
    return "\n".join(lines) + "\n"


def read_results(root: Path) -> dict[str, dict[str, Any]]:
    """Every results file by its name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted((root / "benchmarks/results").glob("*.json"))}


def headlines(results: dict[str, dict[str, Any]], shown: dict[str, list[str]]) -> str:
    """The table of what each results file measured, and of its headline figures."""
    lines = ["\n## What was measured\n"]
    lines += ["Each file holds its workload, the versions, the repeats, every row, and these headline figures.\n"]
    for name, result in results.items():
        device, date, commit = (str(result.get(key, "")) for key in ("device", "date", "commit"))
        where = ", ".join(shown.get(name, [])) or "the README only"
        taken = f"{device}; {date}, at commit `{commit}`; {result['statistic']}."
        lines += [f"\n### `{name}.json`\n", f"{taken} Shown in: {where}.\n", "| headline | figure |", "|---|---|"]
        lines += [f"| `{key}` | {figure(value)} |" for key, value in result["headline"].items()]
    return "\n".join(lines) + "\n"


def figure(value: Any) -> str:
    """A headline figure as it stands in its file, long numbers cut to six digits."""
    return f"{value:.6g}" if isinstance(value, float) else str(value).replace("|", "\\|")


def page(root: Path = ROOT) -> str:
    """The whole page."""
    results = read_results(root)
    dates = {name: str(result.get("date", "")) for name, result in results.items()}
    parts, every, shown = [], [], {}
    for chapter in find_chapters(root):
        if not chapter.ipynb.exists():
            continue  # check_cells says so
        notebook = read_ipynb(chapter.ipynb)
        file = chapter.ipynb.relative_to(root / "book").as_posix()
        found = numbers_of(notebook, dates)
        parts.append(table(title(notebook, chapter), file, found))
        every += found
        link = f"[{chapter.stem.partition('_')[0]}]({chapter.ipynb.relative_to(root / 'book').as_posix()})"
        code = "\n".join(cell.source for cell in chapter.cells() if cell.kind == "code")
        for name in sorted(set(RESULT.findall(code))):
            shown.setdefault(name, []).append(link)
    for name in BY_HAND:
        found = numbers_of_page(root, name, dates)
        parts.append(table(name.replace("_", " ").capitalize(), f"{name}.md", found))
        every += found
    counts = [f"{sum(number.kind == kind for number in every)} {kind}" for kind in KINDS[:4]]
    total = f"\n{len(every)} numbers: {', '.join(counts)}.\n"
    return INTRO + total + "".join(parts) + headlines(results, shown)


def _run() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="write nothing, only compare")
    path = ROOT / PAGE
    text = page()
    if parser.parse_args().check:
        if not path.exists() or path.read_text("utf-8") != text:
            print(f"{PAGE} is out of date: run `python tools/number_register.py`")
            return 1
    elif write_if_changed(path, text):
        print(f"written: {PAGE}")
    return 0


if __name__ == "__main__":
    main(_run)
