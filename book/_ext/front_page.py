"""What the front page says about the chapters comes from the chapters.

Four marks in `index.md` are filled in as the page is read:

    <!-- pool-picture -->   the pool of chapter 03 after six events
    <!-- tour-output -->    what the tour printed when it was last run
    <!-- chapter-map -->    one row for each chapter of `_toc.yml`: question, modules, minutes, device, status
    {chapter}`03`           a link to a chapter, by the number its file name starts with

Run as a program it writes the README's picture, what the tour printed, and what the README's examples print.
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

TOUR = "00_tour"
# The README and the front page show these outputs of the tour, each found by the words it starts with.
TOUR_SAYS = ("eight reservations", "steps:", "A: ", "equal ")
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
    cells: int
    pending: int


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
        question=first(r"\*\*The\s+question\.\*\*\s*(.*?)(?:\n\n|\Z)", prose),
        modules=tuple(dict.fromkeys(module for module in modules if module)),
        device=first(r"\*\*Device\.?\*\*:?\s*(.*?)$", prose),
        minutes=max(5, 5 * round(minutes / 5)),
        cells=len(code),
        pending=sum(cell.get("execution_count") is None for cell in code),
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


def brief_modules(modules: tuple[str, ...], most: int = 3) -> str:
    """The modules of a chapter; of many, the last, which stands on the others."""
    names = [f"`{module}`" for module in (modules if len(modules) <= most else modules[-1:])]
    if len(modules) > most:
        names.append(f"and {len(modules) - 1} more")
    return " ".join(names) or "-"


def brief_device(device: str) -> str:
    """What a chapter needs, in two words; its header card says more."""
    return "GPU or CPU" if "CUDA GPU" in device else "CPU"


def status(chapter: Chapter) -> str:
    """How many cells were run, or are still to be run."""
    if chapter.pending:
        return f"{chapter.pending} of {chapter.cells} cells pending"
    return f"{chapter.cells} cells run"


def chapter_map() -> str:
    """The table of all chapters, in Markdown."""
    rows = ["| chapter | its question | exports | read | device | status |", "|---|---|---|---|---|---|"]
    for part, chapter in all_chapters():
        cells = [f"[{label(chapter)}](/{chapter.docname})", chapter.question or part, brief_modules(chapter.modules)]
        cells += [f"{chapter.minutes} min", brief_device(chapter.device), status(chapter)]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def tour_output(path: Path = ROOT / "book" / f"{TOUR}.ipynb", columns: int = 100) -> str:
    """What the tour printed, as the front page and the README show it; raises ValueError if it prints something else."""
    cells = json.loads(path.read_text("utf-8"))["cells"]
    texts = [
        "".join(output["text"]).rstrip()
        for cell in cells
        for output in cell.get("outputs", [])
        if output["output_type"] == "stream"
    ]
    shown = [next((text for text in texts if text.startswith(start)), "") for start in TOUR_SAYS]
    if "" in shown:
        raise ValueError(f"{path.name}: no output starts with {TOUR_SAYS[shown.index('')]!r}")
    lines = [line.rstrip()[:columns] for text in shown for line in text.splitlines() if line.strip()]
    return "\n".join(lines)


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
    if "<!-- tour-output -->" in text:
        text = text.replace("<!-- tour-output -->", f"```text\n{tour_output()}\n```")
    if "<!-- pool-picture -->" in text:
        text = text.replace("<!-- pool-picture -->", pool_picture())
    source[0] = re.sub(r"\{chapter\}`(\w+)`", lambda match: chapter_link(match.group(1)), text)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("source-read", fill)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


EXAMPLE = re.compile(r"(```python\n(.*?)```\n+```text\n)(.*?)(```)", re.DOTALL)
TOUR_MARKS = re.compile(r"(<!-- tour: begin -->\n```text\n)(.*?)(\n```\n<!-- tour: end -->)", re.DOTALL)


def printed_by(code: str) -> str:
    """What an example prints, without spaces at the ends of lines."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())


def filled_readme(readme: str) -> str:
    """The README with the tour's output and its examples' as they are now."""
    readme = TOUR_MARKS.sub(lambda found: found[1] + tour_output() + found[3], readme)
    return EXAMPLE.sub(lambda found: found[1] + printed_by(found[2]) + found[4], readme)


def main() -> None:
    """Write the README's picture and outputs: `python book/_ext/front_page.py`."""
    from paged_kv.draw import draw_pool

    (ROOT / "book/_static/pool.svg").write_text(draw_pool(SNAPSHOT).svg + "\n", "utf-8")
    path = ROOT / "README.md"
    path.write_text(filled_readme(path.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
