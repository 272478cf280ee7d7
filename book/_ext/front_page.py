"""What the front page says about the chapters comes from the chapters.

Three marks in `index.md` are filled in as the page is read:

    <!-- pool-picture -->   the pool of chapter 03 after six events
    <!-- chapter-map -->    one row for each chapter of `_toc.yml`: question, module, minutes, device
    {chapter}`03`           a link to a chapter, by the number its file name starts with
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from exported_cells import ROOT, module_of
from sphinx.application import Sphinx

WORDS_A_MINUTE = 180
SECONDS_A_LINE_OF_CODE = 3

# The hand-worked run of chapter 03 once A, B and C have arrived and grown.
SNAPSHOT: dict[str, Any] = {
    "block_size": 4,
    "num_blocks": 8,
    "free": [7],
    "tables": {"A": [0, 1, 5], "B": [2, 6], "C": [3, 4]},
    "seq_lens": {"A": 9, "B": 5, "C": 5},
    "ref_counts": [1, 1, 1, 1, 1, 1, 1, 0],
}


@dataclass(frozen=True)
class Chapter:
    """What the map says about one chapter."""

    docname: str
    title: str
    question: str
    modules: tuple[str, ...]
    device: str
    minutes: int


def contents() -> Iterator[tuple[str, str]]:
    """The parts and pages of `_toc.yml`, in reading order."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text("utf-8"))
    for part in toc.get("parts", []):
        for page in part["chapters"]:
            yield part.get("caption", ""), page["file"]


def first(pattern: str, text: str, default: str = "") -> str:
    """The first match of a pattern's group, on one line."""
    match = re.search(pattern, text, re.MULTILINE | re.DOTALL)
    return " ".join(match.group(1).split()) if match else default


def read_chapter(docname: str, path: Path) -> Chapter:
    """Read a notebook for its title, question, device, modules and reading time."""
    cells = json.loads(path.read_text("utf-8"))["cells"]
    prose = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    shown = [cell for cell in code if not {"hide-input", "remove-input"} & set(cell["metadata"].get("tags", []))]
    lines = sum("".join(cell["source"]).count("\n") + 1 for cell in shown)
    modules = (module_of(cell["metadata"].get("tags", [])) for cell in code)
    minutes = len(prose.split()) / WORDS_A_MINUTE + lines * SECONDS_A_LINE_OF_CODE / 60
    return Chapter(
        docname=docname,
        title=first(r"^# (.*?)$", prose, docname),
        question=first(r"\*\*The question\.\*\*\s*(.*?)(?:\n\n|\Z)", prose),
        modules=tuple(dict.fromkeys(module for module in modules if module)),
        device=first(r"\*\*Device\.?\*\*:?\s*(.*?)$", prose),
        minutes=max(5, 5 * round(minutes / 5)),
    )


def all_chapters() -> list[tuple[str, Chapter]]:
    """Every notebook of the book with the part it stands in."""
    found = []
    for part, page in contents():
        path = ROOT / "book" / f"{page}.ipynb"
        if path.exists():
            found.append((part, read_chapter(page, path)))
    return found


def label(chapter: Chapter) -> str:
    """A chapter's number, from its file name, and its title."""
    number = chapter.docname.rpartition("/")[2].partition("_")[0]
    return chapter.title if chapter.title.startswith(number) else f"{number} {chapter.title}"


def chapter_map() -> str:
    """The table of all chapters, in Markdown."""
    rows = ["| chapter | its question | exports | read | device |", "|---|---|---|---|---|"]
    for part, chapter in all_chapters():
        modules = " ".join(f"`{module}`" for module in chapter.modules) or "-"
        cells = [f"[{label(chapter)}](/{chapter.docname})", chapter.question or part, modules]
        cells += [f"{chapter.minutes} min", chapter.device.rstrip(".") or "any CPU"]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def pool_picture() -> str:
    """The picture of the pool, as HTML."""
    from paged_kv.draw import draw_pool

    return str(draw_pool(SNAPSHOT)._repr_html_())


def chapter_link(number: str) -> str:
    """A link to the chapter whose file name starts with a number, or its bare name."""
    for _part, page in contents():
        stem = page.rpartition("/")[2]
        if stem.startswith(f"{number}_"):
            return f"[chapter {number}](/{page})"
    return f"chapter {number}"


def fill(app: Sphinx, docname: str, source: list[str]) -> None:
    """Replace the marks of the front page."""
    if docname != "index":
        return
    app.env.note_dependency(str(ROOT / "_toc.yml"))
    for _part, page in contents():
        app.env.note_dependency(str(ROOT / "book" / f"{page}.ipynb"))
    text = source[0].replace("<!-- chapter-map -->", chapter_map())
    if "<!-- pool-picture -->" in text:
        text = text.replace("<!-- pool-picture -->", pool_picture())
    source[0] = re.sub(r"\{chapter\}`(\w+)`", lambda match: chapter_link(match.group(1)), text)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("source-read", fill)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


def main() -> None:
    """Write the README's picture and what its example prints: `python book/_ext/front_page.py`."""
    from paged_kv.draw import draw_pool

    (ROOT / "book/_static/pool.svg").write_text(draw_pool(SNAPSHOT).svg + "\n", "utf-8")
    readme = (ROOT / "README.md").read_text("utf-8")
    code = readme.partition("```python\n")[2].partition("```")[0]
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    head, _, rest = readme.partition("```text\n")
    tail = rest.partition("```")[2]
    lines = "\n".join(line.rstrip() for line in printed.splitlines())
    (ROOT / "README.md").write_text(f"{head}```text\n{lines}\n```{tail}", "utf-8")


if __name__ == "__main__":
    main()
