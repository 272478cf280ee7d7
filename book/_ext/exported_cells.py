"""Label each exported cell with the module it goes to, and link it to its line of source.

A cell tagged `export:MODULE` gets the label "in paged_kv/MODULE.py" with one link for each
thing it defines.  The links lead to source pages that this extension writes itself, one for
each module, with an anchor at every line (`#L-57`) and links back to the cells.
"""

from __future__ import annotations

import ast
import html
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

PACKAGE = "paged_kv"
ROOT = Path(__file__).resolve().parents[2]
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """One name that a cell defines, and the line of the module where it stands."""

    name: str
    line: int


def module_of(tags: list[str]) -> str | None:
    """The module named by a cell's `export:MODULE` tag."""
    return next((tag.partition(":")[2] for tag in tags if tag.startswith("export:")), None)


def first_line(node: ast.stmt) -> int:
    """The line a definition starts on, its decorators included."""
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def defined_names(node: ast.stmt) -> list[str]:
    """The names that one top-level statement gives the module."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def reopens(node: ast.stmt) -> bool:
    """Whether this is `class X(X):`, which adds methods to a class of an earlier cell."""
    return isinstance(node, ast.ClassDef) and any(
        isinstance(base, ast.Name) and base.id == node.name for base in node.bases
    )


def places(cell: str, module: str) -> tuple[list[Place], list[str]]:
    """Where the definitions of a cell stand in the text of its module, and those not found."""
    module_tree = ast.parse(module)
    at_top = {name: node for node in module_tree.body for name in defined_names(node)}
    found, missing = [], []
    for node in ast.parse(cell).body:
        for name in defined_names(node):
            target: ast.stmt | None = at_top.get(name)
            if reopens(node) and isinstance(target, ast.ClassDef):
                target = _first_method(node, target)  # type: ignore[arg-type]
            if target is None:
                missing.append(name)
            else:
                found.append(Place(name, first_line(target)))
    if not found and not missing:
        found.append(Place("", 1))
    return found, missing


def _first_method(cell: ast.ClassDef, module: ast.ClassDef) -> ast.stmt | None:
    """The statement of the module's class that is the first method of the cell's."""
    wanted = next((node for node in cell.body if hasattr(node, "name")), None)
    if wanted is None:
        return module
    named = [node for node in module.body if getattr(node, "name", None) == wanted.name]
    same = [node for node in named if ast.dump(node) == ast.dump(wanted)]
    return (same or named or [None])[0]


def module_path(module: str) -> Path:
    """The file of a module of the package."""
    return ROOT / PACKAGE / f"{module}.py"


def source_page(module: str) -> str:
    """The page name of a module's source."""
    return f"source/{module}"


def label_cells(app: Sphinx, doctree: nodes.document) -> None:
    """On every page: find the exported cells and put the label above their code."""
    env, docname = app.env, app.env.docname
    for cell in doctree.findall(nodes.container):
        if cell.get("nb_element") != "cell_code":
            continue
        module = module_of(cell.get("cell_metadata", {}).get("tags", []))
        if module is None:
            continue
        code = next((node for node in cell.children if "cell_input" in node.get("classes", [])), None)
        if code is None or not (path := module_path(module)).exists():
            logger.warning("exported cell without source or without %s", path.name, location=cell)
            continue
        env.note_dependency(str(path))
        found, missing = places(code.astext(), path.read_text("utf-8"))
        if missing:
            logger.warning("%s: not in %s, run make chapter", ", ".join(missing), path.name, location=cell)
        if found:
            anchor = f"cell-{cell['cell_index']}-{module}"
            cell["ids"].append(anchor)
            for place in found:
                exports(env).setdefault(docname, []).append((module, place.name, place.line, anchor))
            code.insert(0, _label(app, docname, module, found))


def _label(app: Sphinx, docname: str, module: str, found: list[Place]) -> nodes.container:
    target = posixpath.relpath(source_page(module), posixpath.dirname(docname) or ".") + ".html"
    text = nodes.paragraph(classes=["exported-label"])
    text += nodes.reference(
        "", f"in {PACKAGE}/{module}.py", refuri=f"{target}#L-{found[0].line}", internal=True, classes=["module"]
    )
    for place in found:
        if place.name:
            uri = f"{target}#L-{place.line}"
            text += nodes.Text(" ")
            text += nodes.reference("", f"{place.name}, line {place.line}", refuri=uri, internal=True)
    box = nodes.container(classes=["exported-box"])
    box += text
    return box


def exports(env: BuildEnvironment) -> dict[str, list[tuple[str, str, int, str]]]:
    """All exported names of the book: page -> (module, name, line, anchor of the cell)."""
    if not hasattr(env, "exported_cells"):
        env.exported_cells = {}  # type: ignore[attr-defined]
    return env.exported_cells  # type: ignore[attr-defined, no-any-return]


def purge(_app: Sphinx, env: BuildEnvironment, docname: str) -> None:
    """Forget a page that is read again."""
    exports(env).pop(docname, None)


def merge(_app: Sphinx, env: BuildEnvironment, _docnames: list[str], other: BuildEnvironment) -> None:
    """Take over what a parallel reader found."""
    exports(env).update(exports(other))


def source_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """One page for each module: its source, an anchor at each line, links to the cells."""
    backlinks: dict[str, dict[int, tuple[str, str]]] = {}
    for docname, entries in exports(app.env).items():
        for module, _name, line, anchor in entries:
            title = app.env.titles[docname].astext()
            uri = app.builder.get_relative_uri(source_page(module), docname) + f"#{anchor}"
            backlinks.setdefault(module, {}).setdefault(line, (uri, title))
    for path in sorted((ROOT / PACKAGE).glob("[!_]*.py")):
        name = f"{PACKAGE}/{path.name}"
        body = f"<h1>{name}</h1>\n" + _listing(app, path.read_text("utf-8"), backlinks.get(path.stem, {}))
        yield source_page(path.stem), {"parents": [], "title": name, "body": body}, "page.html"


def _listing(app: Sphinx, code: str, backlinks: dict[int, tuple[str, str]]) -> str:
    block = app.builder.highlighter.highlight_block(code, "python")  # type: ignore[attr-defined]
    before, _, rest = block.partition("<pre>")
    inner, _, after = rest.rpartition("</pre>")
    lines = []
    for number, line in enumerate(inner.removeprefix("<span></span>").rstrip("\n").split("\n"), start=1):
        back = ""
        if number in backlinks:
            uri, title = backlinks[number]
            back = f'<a class="to-cell" href="{uri}">{html.escape(title)}</a>'
        here = f'<a class="lineno" href="#L-{number}">{number:4}</a>'
        lines.append(f'<span class="line" id="L-{number}">{here} {line}{back}</span>')
    return f'<div class="source-listing">{before}<pre>' + "".join(lines) + f"</pre>{after}</div>"


def linkcode_resolve(domain: str, info: dict[str, str]) -> str | None:
    """The line of an object of the API page, for its [source] link."""
    module = info.get("module", "").removeprefix(f"{PACKAGE}.")
    if domain != "py" or not module_path(module).exists():
        return None
    node: Any = ast.parse(module_path(module).read_text("utf-8"))
    for name in filter(None, info.get("fullname", "").split(".")):
        node = next((child for child in node.body if name in defined_names(child)), None)
        if node is None:
            return None
    return f"{source_page(module)}.html#L-{first_line(node) if hasattr(node, 'lineno') else 1}"


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.config.linkcode_resolve = linkcode_resolve
    app.connect("doctree-read", label_cells)
    app.connect("env-purge-doc", purge)
    app.connect("env-merge-info", merge)
    app.connect("html-collect-pages", source_pages)
    return {"version": "1", "env_version": 1, "parallel_read_safe": True, "parallel_write_safe": True}
