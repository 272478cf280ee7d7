"""The page of mistakes in circulation, written from the chapters' own boxes as it is read.

A box is an admonition `Check it yourself`; the cells below it, up to the next text, settle it.  `mistakes.md` has
two marks: `<!-- mistakes -->` takes all boxes with their computations, chapter by chapter, `<!-- mistakes-count -->`
how many claims there are.  Nothing is copied by hand, so nothing can drift: what the page shows is what the tests
compare with a fresh run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exported_cells import ROOT
from front_page import contents
from sphinx.application import Sphinx

PAGE = "mistakes"
HEADING_OR_BOX = re.compile(r"(?ms)^## ([^\n]*)$|^(:{3,})\{admonition\} Check it yourself\n(.*?)^\2[ \t]*$")
FENCE = re.compile(r"(?ms)^[ \t]*(```+|~~~+).*?^[ \t]*\1[ \t]*$")


@dataclass(frozen=True)
class Mistake:
    """One box of a chapter: what is said in it, and the computation that settles it."""

    page: str  # docname
    title: str  # of the chapter
    section: str  # the heading it stands under
    said: str  # Markdown
    code: str
    printed: str


def slug(heading: str) -> str:
    """The anchor of a heading, as MyST makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def source_of(cell: dict[str, Any]) -> str:
    """A cell's text."""
    return "".join(cell["source"])


def printed_by(cell: dict[str, Any]) -> str:
    """What a cell printed, and the value it ends with, as text."""
    parts = []
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        if not any(kind.startswith("image/") for kind in data):
            parts.append("".join(output.get("text", data.get("text/plain", ""))).rstrip("\n"))
    return "\n".join(part for part in parts if part)


def settled(cells: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The code cells that follow a box, across a prediction and its reasoning, up to the next heading or claim."""
    seen = False
    for cell in cells:
        if cell["cell_type"] == "code":
            if "hide-input" not in cell["metadata"].get("tags", []) or not seen:
                yield cell
            seen = True
        elif seen or re.search(r"(?m)^#+ ", source_of(cell)):
            return


def mistakes_of(page: str, notebook: dict[str, Any]) -> Iterator[Mistake]:
    """The boxes of one chapter."""
    cells = notebook["cells"]
    title = section = ""
    for index, cell in enumerate(cells):
        if cell["cell_type"] != "markdown":
            continue
        text = FENCE.sub("", source_of(cell))
        title = title or next(iter(re.findall(r"(?m)^# (.*)$", text)), "")
        for found in HEADING_OR_BOX.finditer(text):
            if found[1]:
                section = found[1].strip()
                continue
            said = re.sub(r"\A(?::[\w-]+:.*\n)+", "", found[3]).strip()
            code = list(settled(cells[index + 1 :]))
            source = "\n\n".join(source_of(part).strip() for part in code)
            printed = "\n".join(filter(None, map(printed_by, code)))
            yield Mistake(page, title or page, section, said, source, printed)


def all_mistakes(root: Path = ROOT) -> list[Mistake]:
    """Every box of the book, in reading order."""
    found = []
    for _part, page in contents():
        path = root / "book" / f"{page}.ipynb"
        if path.exists():
            found += mistakes_of(page, json.loads(path.read_text("utf-8")))
    return found


def claims(mistake: Mistake) -> list[str]:
    """What a box holds against what is said: its list items, or the whole of it."""
    items = re.split(r"(?m)^- ", mistake.said)[1:]
    return items or [mistake.said]


def markdown(mistakes: list[Mistake]) -> str:
    """All boxes, chapter by chapter: the claims, a link to where they stand, the computation and what it prints."""
    parts = []
    for mistake in mistakes:
        number = mistake.page.rpartition("/")[2].partition("_")[0]
        name = mistake.title if mistake.title.startswith(number) else f"{number} {mistake.title}"
        link = f"[{mistake.section.replace('`', '')}]({mistake.page}.ipynb#{slug(mistake.section)})"
        said = mistake.said.replace("](../", "](")
        parts.append(f"## {name}\n\n{said}\n\nSettled in {link} by:\n")
        parts.append(f"````python\n{mistake.code}\n````\n\n````text\n{mistake.printed}\n````\n")
    return "\n".join(parts)


def fill(app: Sphinx, docname: str, source: list[str]) -> None:
    """Replace the marks of the page as it is read."""
    if docname != PAGE:
        return
    for _part, page in contents():
        app.env.note_dependency(str(ROOT / "book" / f"{page}.ipynb"))
    found = all_mistakes()
    count = str(sum(len(claims(mistake)) for mistake in found))
    source[0] = source[0].replace("<!-- mistakes -->", markdown(found)).replace("<!-- mistakes-count -->", count)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("source-read", fill)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
