"""What the tools share: the chapters of the book, their cells, and who imports whom."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# jsonschema tries this module for a check of URIs that notebooks never need; importing it costs three seconds.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]

import jupytext  # noqa: E402
import nbformat  # noqa: E402
from jupytext.config import load_jupytext_configuration_file  # noqa: E402
from nbformat import NotebookNode  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "paged_kv"
# Modules of the package that no chapter exports.
BY_HAND = frozenset({"__init__", "__main__", "check"})
FOLDERS = ("book", "book/appendices", "book/labs")
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}


class BookError(Exception):
    """Something is wrong with the book; the message says what, and where."""


@dataclass(frozen=True)
class Cell:
    """One cell as both files of a pair know it: outputs, ids and counts left out."""

    kind: str
    source: str
    tags: tuple[str, ...] = ()

    @property
    def first_line(self) -> str:
        """The first line that is not blank, cut to 60 characters."""
        line = next((line.strip() for line in self.source.splitlines() if line.strip()), "")
        return line if len(line) <= 60 else line[:57] + "..."


@dataclass(frozen=True)
class Chapter:
    """A pair of files under book/: NN_topic.py and NN_topic.ipynb, or a lab, or an appendix."""

    root: Path
    name: str  # relative to root, without suffix

    @property
    def py(self) -> Path:
        """The percent-format source."""
        return self.root / f"{self.name}.py"

    @property
    def ipynb(self) -> Path:
        """The notebook."""
        return self.root / f"{self.name}.ipynb"

    @property
    def stem(self) -> str:
        """The file name without suffix, such as 03_block_manager."""
        return self.name.rpartition("/")[2]

    @property
    def number(self) -> int | None:
        """The chapter's number; None for the tour, labs and appendices, which may import anything."""
        numbered = re.match(r"book/(\d\d)_", self.name)
        return int(numbered[1]) or None if numbered else None

    def cells(self) -> list[Cell]:
        """The cells of the .py, or of the notebook where there is no .py."""
        if self.py.exists():
            return list(percent_cells(self.py.read_text(encoding="utf-8")))
        return as_cells(read_ipynb(self.ipynb))

    def where(self, index: int, cell: Cell) -> str:
        """How an error names a cell: chapter, number from 1, first line."""
        return f"{self.stem}, cell {index + 1} ({cell.first_line})"


def find_chapters(root: Path = ROOT, wanted: Iterable[str] = ()) -> list[Chapter]:
    """Every chapter, appendix and lab in reading order, or those that `wanted` names.

    A name is a number ("3", "03"), a prefix ("A1"), a stem ("eviction") or a path.
    """
    names: list[str] = []
    for folder in FOLDERS:
        pattern = r"\d\d_.+" if folder == "book" else r"[^_.].*"
        files = (path for path in (root / folder).glob("*") if path.suffix in {".py", ".ipynb"})
        names += sorted({f"{folder}/{path.stem}" for path in files if re.fullmatch(pattern, path.stem)})
    chapters = [Chapter(root, name) for name in names]
    wanted = list(wanted)
    if not wanted:
        return chapters
    chosen = {chapter.name for word in wanted for chapter in _named(chapters, word)}
    return [chapter for chapter in chapters if chapter.name in chosen]


def _named(chapters: list[Chapter], word: str) -> list[Chapter]:
    key = re.sub(r"\.(py|ipynb)$", "", word.rpartition("/")[2])
    key = key.zfill(2) if key.isdigit() else key
    found = [chapter for chapter in chapters if chapter.stem == key]
    found = found or [chapter for chapter in chapters if chapter.stem.startswith(f"{key}_")]
    if len(found) != 1:
        said = "no chapter" if not found else "more than one chapter"
        raise BookError(f"{word!r} names {said}; there are: {', '.join(c.stem for c in found or chapters)}")
    return found


def parse_py(text: str) -> NotebookNode:
    """A notebook without outputs from percent-format text."""
    return _without_empty_cells(jupytext.reads(text, fmt="py:percent"))


@functools.lru_cache(maxsize=128)
def percent_cells(text: str) -> tuple[Cell, ...]:
    """The cells in percent-format text; jupytext takes a third of a second for a chapter, so they are kept."""
    return tuple(as_cells(parse_py(text)))


def to_percent(notebook: NotebookNode, root: Path) -> str:
    """Percent-format text of a notebook, written as book/jupytext.toml says."""
    config = load_jupytext_configuration_file(str(root / "book" / "jupytext.toml"))
    return str(jupytext.writes(notebook, fmt="py:percent", config=config))


def parse_ipynb(text: str) -> NotebookNode:
    """A notebook from the text of an .ipynb."""
    return _without_empty_cells(nbformat.reads(text, as_version=4))


def _without_empty_cells(notebook: NotebookNode) -> NotebookNode:
    """Jupyter leaves an empty cell at the end, jupytext one behind two blank lines: neither means anything."""
    notebook.cells = [cell for cell in notebook.cells if cell.source.strip()]
    return notebook


def read_py(path: Path) -> NotebookNode:
    """The .py of a pair as a notebook without outputs."""
    return parse_py(path.read_text(encoding="utf-8"))


def read_ipynb(path: Path) -> NotebookNode:
    """The .ipynb of a pair."""
    return parse_ipynb(path.read_text(encoding="utf-8"))


def write_if_changed(path: Path, text: str) -> bool:
    """Write `text` whole or not at all, and only where it differs; say whether it did."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.new")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
    return True


def write_ipynb(path: Path, notebook: NotebookNode) -> bool:
    """Write a notebook in its one canonical form; say whether the file changed."""
    nbformat.validate(notebook)
    return write_if_changed(path, nbformat.writes(notebook).rstrip("\n") + "\n")


def as_cells(notebook: NotebookNode) -> list[Cell]:
    """The part of a notebook that the two files of a pair share."""
    return [
        Cell(cell.cell_type, cell.source.rstrip("\n"), tuple(cell.metadata.get("tags", ())))
        for cell in notebook.cells
    ]


def from_head(root: Path, name: str) -> str | None:
    """The text of a file in git's HEAD; None without a commit, or where HEAD lacks it."""
    try:
        shown = subprocess.run(["git", "show", f"HEAD:./{name}"], cwd=root, capture_output=True, check=False)
    except FileNotFoundError:
        return None
    return shown.stdout.decode() if shown.returncode == 0 else None


def parse_cell(source: str) -> ast.Module:
    """The syntax tree of a code cell, IPython's magic lines blanked out."""
    return ast.parse(re.sub(r"(?m)^[ \t]*[%!].*$", "", source))


def exported(cells: Sequence[Cell]) -> Iterator[tuple[int, Cell, str]]:
    """Each exported cell: index, cell, module."""
    for index, cell in enumerate(cells):
        for tag in cell.tags:
            if tag == "export" or tag.startswith("export:"):
                yield index, cell, tag.partition(":")[2]


def modules_of(cells: Sequence[Cell]) -> list[str]:
    """The modules that these cells export, in order of appearance."""
    return list(dict.fromkeys(module for _, _, module in exported(cells)))


def package_imports(tree: ast.AST, homes: Mapping[str, str]) -> set[str]:
    """The modules of the package that the code imports.

    homes: module of each name that the package itself offers (`from paged_kv import BlockPool`).
    """
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            if node.module == PACKAGE:
                found |= {homes.get(alias.name, alias.name) for alias in node.names}
            elif node.module.startswith(f"{PACKAGE}."):
                found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            parts = [alias.name.split(".") for alias in node.names]
            found |= {part[1] for part in parts if part[0] == PACKAGE and len(part) > 1}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == PACKAGE:
            found.add(homes.get(node.attr, node.attr))
    return found


def public_names(tree: ast.Module) -> list[str]:
    """The classes and functions that a module offers."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]


def package_trees(root: Path) -> dict[str, ast.Module]:
    """The package's modules as they stand on disk, parsed; __init__ left out."""
    files = sorted((root / PACKAGE).glob("*.py"))
    return {path.stem: ast.parse(path.read_text(encoding="utf-8")) for path in files if path.stem != "__init__"}


def name_homes(trees: Mapping[str, ast.Module]) -> dict[str, str]:
    """The module of every public name.  A name that is also a module's means the module."""
    homes = {name: module for module, tree in trees.items() for name in public_names(tree)}
    return {name: module for name, module in homes.items() if name not in trees}


def with_all_they_import(modules: Iterable[str], trees: Mapping[str, ast.Module]) -> set[str]:
    """These modules and all that they import, directly or not, within the package."""
    homes = name_homes(trees)
    found: set[str] = set()
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        if module in trees and module not in found:
            found.add(module)
            waiting += package_imports(trees[module], homes)
    return found


def code_imports(cells: Iterable[Cell], homes: Mapping[str, str]) -> set[str]:
    """The modules of the package that code cells import; cells that do not parse are passed over."""
    found: set[str] = set()
    for cell in cells:
        if cell.kind == "code":
            try:
                found |= package_imports(parse_cell(cell.source), homes)
            except SyntaxError:
                continue
    return found


def dependents(chapter: Chapter) -> list[Chapter]:
    """The chapters that import what this one exports, directly or through other modules."""
    trees = package_trees(chapter.root)
    homes = name_homes(trees)
    own = set(modules_of(chapter.cells()))
    others = [other for other in find_chapters(chapter.root) if other != chapter]
    return [
        other for other in others if own & with_all_they_import(code_imports(other.cells(), homes), trees)
    ]


def main(work: Callable[[], int]) -> None:
    """Run a tool: its exit code, or 1 and the message of a `BookError`."""
    try:
        sys.exit(work())
    except BookError as error:
        print(error, file=sys.stderr)
        sys.exit(1)
