"""The student edition: the chapters as notebooks in which the bodies of what they export are left for the reader.

    python tools/student.py --out _build/student [--force] [NN ...]
    python tools/student.py --collect _build/student/03_block_manager.ipynb [--to mine] [--force]

The first writes one notebook a chapter: signatures and docstrings stay, bodies become `raise NotImplementedError`, and
what a cell should print is folded under it.  A notebook that the reader has changed is kept.  The second makes
mine/block_pool.py and the like out of such a notebook, for `python -m paged_kv.check --module mine.block_pool`.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from chapters import (
    KERNEL,
    PACKAGE,
    ROOT,
    BookError,
    Chapter,
    as_cells,
    exported,
    find_chapters,
    main,
    modules_of,
    read_ipynb,
    read_py,
    write_if_changed,
    write_ipynb,
)
from export import draft, finish
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from sync import merge

from paged_kv.check_suites import CHAPTERS as CHECKED

YOURS = "yours: "
MARK = "# Collected from"
HINT_LINES = 16
Function = ast.FunctionDef | ast.AsyncFunctionDef

INTRO = """\
# Student edition: {title}

The chapter as it is in the book, except that the bodies of what it exports are yours to write. Wherever you find
`raise NotImplementedError("{yours}...")`, signature and docstring say what belongs there. Cells go in order; what a
cell should print is folded under it.

1. Write the bodies here, run the cells, save the notebook.
2. In a terminal at the root of the project, make modules of them:

       .venv/bin/python tools/student.py --collect {notebook}

   This writes {files}. You may as well write such a file by hand, with the names of the chapter.
{checks}
The book's own solution is in {solutions}. Everything that other chapters export comes from `paged_kv`, unless there is
a module of that name in `mine`. A notebook that you have changed is kept when the edition is made again;
`make clean` removes `_build`, so copy the folder to where you want to work."""

CHECKS = """\
3. Let the rules of the book run over them; what is wrong is said in words:

{commands}
"""

SETUP = """\
# The chapter's own files are found from its folder in the book; `mine` from the root of the project.
import os
import pathlib
import sys

here = pathlib.Path.cwd()
for root in [here, *here.parents]:
    if (root / "book" / "jupytext.toml").exists():
        sys.path.insert(0, str(root))
        os.chdir(root / "{folder}")
        break"""


# ------------------------------------------------------------------------------------------ blanking


def functions(tree: ast.Module) -> Iterator[tuple[str, Function]]:
    """Functions and methods with their names, those within functions left out."""
    for node in tree.body:
        if isinstance(node, Function):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{part.name}", part) for part in node.body if isinstance(part, Function))


def own_body(node: Function) -> list[ast.stmt]:
    """The statements of a function behind its docstring."""
    return node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body


def is_open(node: Function) -> bool:
    """Whether nothing stands there yet: a docstring, `...`, `pass`, or our own exception."""
    body = own_body(node)
    if not body:
        return True
    text = ast.unparse(body[0])
    return len(body) == 1 and (text in {"...", "pass"} or text.startswith(f"raise NotImplementedError('{YOURS}"))


def blank(source: str) -> str:
    """`source` with the body of each function replaced by an exception that names it."""
    lines = source.splitlines()
    for name, node in reversed(list(functions(ast.parse(source)))):
        if is_open(node):
            continue
        body = own_body(node)
        raising = f'raise NotImplementedError("{YOURS}{name}")'
        end = node.end_lineno or node.lineno
        if body[0].lineno == node.lineno:  # all on one line
            lines[node.lineno - 1 : end] = [lines[node.lineno - 1][: body[0].col_offset] + raising]
            continue
        first = min(node.lineno for node in [body[0], *getattr(body[0], "decorator_list", [])]) - 1
        while lines[first - 1].strip().startswith("#") or not lines[first - 1].strip():
            first -= 1  # a comment would give it away
        lines[first:end] = [" " * node.body[0].col_offset + raising]
    return "\n".join(lines)


def still_open(source: str) -> list[str]:
    """The functions whose bodies are still to be written."""
    return [name for name, node in functions(ast.parse(source)) if is_open(node) and YOURS in ast.unparse(node)]


# ------------------------------------------------------------------------------------------ cells for plain Jupyter

OPENING = re.compile(r"(:{3,})\{([\w-]+)\}\s*(.*)")


def plain_markdown(text: str) -> str:
    """MyST's directives in what any Jupyter shows: folded parts, quotations, bold headings."""
    out: list[str] = []
    lines = iter(text.splitlines())
    for line in lines:
        opening = OPENING.fullmatch(line.strip())
        if not opening:
            out.append(line)
            continue
        inside: list[str] = []
        for inner in lines:
            if inner.strip() == opening[1]:
                break
            inside.append(inner)
        out += _directive(opening[2], opening[3], inside)
    return re.sub(r"\{[\w:.-]+\}(`[^`]*`)", r"\1", "\n".join(out))


def _directive(kind: str, title: str, inside: list[str]) -> list[str]:
    options = {}
    while inside and (option := re.fullmatch(r":([\w-]+):\s*(.*)", inside[0].strip())):
        options[option[1]] = option[2]
        inside = inside[1:]
    if kind in {"dropdown", "solution"}:
        title = "Answer" if kind == "solution" else title
        return ["<details>", f"<summary>{title}</summary>", "", *inside, "", "</details>"]
    if kind == "exercise":
        return [f"**Exercise {options.get('label', title)}.**", "", *inside]
    if kind == "admonition":
        return [f"> **{title}.**", ">", *[f"> {line}".rstrip() for line in inside]]
    return [f"**{title}**", "", *inside]


def hint(cell: NotebookNode) -> NotebookNode | None:
    """What a cell prints in the book, folded; None where that is no text or was measured."""
    texts = [
        text
        for output in cell.get("outputs", ())
        for text in (output.get("text"), output.get("data", {}).get("text/plain"))
        if text and "image/png" not in output.get("data", {})
    ]
    text = "\n".join("".join(text).rstrip("\n") for text in texts)
    if not text or "measured:" in text or "gpu" in cell.metadata.get("tags", ()):
        return None
    lines = text.splitlines()
    shown = [*lines[:HINT_LINES], *(["..."] if len(lines) > HINT_LINES else [])]
    opening = ["<details>", "<summary>What the book prints</summary>", "", "```text"]
    return new_markdown_cell("\n".join([*opening, *shown, "```", "</details>"]))


def edition(chapter: Chapter, notebook_name: str) -> NotebookNode:
    """The notebook for the reader."""
    old = read_ipynb(chapter.ipynb) if chapter.ipynb.exists() else None
    source = merge(read_py(chapter.py), old, chapter.stem) if chapter.py.exists() else old
    assert source is not None
    folder = chapter.name.rpartition("/")[0]
    cells = [new_markdown_cell(intro(chapter, notebook_name)), new_code_cell(SETUP.format(folder=folder))]
    for cell in source.cells:
        if cell.cell_type == "markdown":
            cells.append(new_markdown_cell(plain_markdown(cell.source)))
            continue
        tags = list(cell.metadata.get("tags", ()))
        ours = any(tag.startswith("export") for tag in tags)
        new = new_code_cell(blank(cell.source) if ours else cell.source, metadata={"tags": tags} if tags else {})
        if "hide-input" in tags:
            new.metadata["jupyter"] = {"source_hidden": True}
        cells += [new, *filter(None, [None if ours else hint(cell)])]
    for index, cell in enumerate(cells):
        cell.id = f"cell-{index}"
    made = new_notebook(cells=cells, metadata={"kernelspec": dict(KERNEL)}, nbformat_minor=5)
    made.metadata["student_edition"] = fingerprint(made)
    return made


def fingerprint(notebook: NotebookNode) -> str:
    """Of the cells as they are, outputs left out: tells whether a reader has written into them."""
    cells = [[cell.cell_type, cell.source.strip()] for cell in notebook.cells if cell.source.strip()]
    return hashlib.sha256(json.dumps(cells).encode()).hexdigest()


def intro(chapter: Chapter, notebook_name: str) -> str:
    """The first cell: how to work."""
    modules = modules_of(chapter.cells())
    heading = re.search(r"(?m)^# (.*)$", next(c.source for c in chapter.cells() if c.kind == "markdown"))
    lines = [f"       .venv/bin/python -m paged_kv.check --module mine.{m}" for m in modules if m in CHECKED]
    return INTRO.format(
        title=f"{chapter.stem[:2]} {heading[1] if heading else chapter.stem}",
        yours=YOURS,
        notebook=notebook_name,
        files=" and ".join(f"`mine/{module}.py`" for module in modules),
        solutions=" and ".join(f"`{PACKAGE}/{module}.py`" for module in modules),
        checks=CHECKS.format(commands="\n".join(lines)) if lines else "",
    )


def write_edition(out: Path, wanted: Sequence[str] = (), force: bool = False) -> list[str]:
    """Write the notebooks; return what was done.  Without `wanted`: the numbered chapters that export something."""
    chosen = [c for c in find_chapters(ROOT, wanted) if modules_of(c.cells()) and (wanted or c.number is not None)]
    said = []
    for chapter in chosen:
        path = out / f"{chapter.stem}.ipynb"
        shown = path.resolve().relative_to(ROOT) if path.resolve().is_relative_to(ROOT) else path
        if path.exists() and not force:
            old = read_ipynb(path)
            if old.metadata.get("student_edition") != fingerprint(old):
                said.append(f"kept: {shown}, since you have changed it (--force writes it anew)")
                continue
        if write_ipynb(path, edition(chapter, shown.as_posix())):
            said.append(f"written: {shown}")
    return said


# ------------------------------------------------------------------------------------------ collecting


def collect_modules(notebook: Path) -> dict[str, str]:
    """The modules that a reader's notebook makes up, name -> text, still with the book's imports.

    Raises BookError for a cell that cannot be a part of a module: it says which one, and why.
    """
    chapter = Chapter(notebook.parent, notebook.stem)
    cells = as_cells(read_ipynb(notebook))
    if not list(exported(cells)):
        raise BookError(f"{notebook}: no cell is tagged export:MODULE")
    drafts, modules = draft(chapter)
    return {
        name: f"{MARK} {notebook.name} by tools/student.py.\n" + text.partition("\n")[2]
        for name, text in finish(drafts, modules).items()
    }


def write_modules(notebook: Path, to: Path, force: bool = False) -> list[str]:
    """Write a reader's modules into the package `to`; return what was done."""
    if not notebook.exists():
        raise BookError(f"{notebook}: no such notebook; python tools/student.py --out _build/student makes them")
    texts = collect_modules(notebook)
    for name in texts:
        path = to / f"{name}.py"
        if path.exists() and not force and not path.read_text(encoding="utf-8").startswith(MARK):
            raise BookError(f"{path} was written by hand: move it away, or --force overwrites it")
    there = {path.stem for path in to.glob("*.py")} | set(texts)
    write_if_changed(to / "__init__.py", "")
    said = []
    for name, text in texts.items():
        own = re.sub(
            rf"(?m)^from {PACKAGE}\.(\w+) import",
            lambda m: f"from {to.name if m[1] in there else PACKAGE}.{m[1]} import",
            text,
        )
        write_if_changed(to / f"{name}.py", own)
        left = still_open(own)
        said.append(f"written: {to.name}/{name}.py" + (f"; still to write: {', '.join(left)}" if left else ""))
    checked = [name for name in texts if name in CHECKED]
    return said + [f"check it: python -m paged_kv.check --module {to.name}.{name}" for name in checked]


def _run() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=ROOT / "_build" / "student", help="folder for the notebooks")
    parser.add_argument("--collect", type=Path, metavar="NOTEBOOK", help="make modules of a reader's notebook")
    parser.add_argument("--to", type=Path, default=Path("mine"), help="the package that --collect writes to")
    parser.add_argument("--force", action="store_true", help="overwrite what a reader has written")
    parser.add_argument("chapters", nargs="*", metavar="NN")
    options = parser.parse_args()
    if options.collect:
        lines = write_modules(options.collect, options.to, options.force)
    else:
        lines = write_edition(options.out, options.chapters, options.force)
    print("\n".join(lines) or "the student edition is up to date")
    return 0


if __name__ == "__main__":
    main(_run)
