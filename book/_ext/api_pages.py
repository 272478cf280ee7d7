"""The API page: one section for each module of the package, written from its docstrings.

The package's docstrings are plain text: paragraphs, indented lists of `name  meaning` lines
and `code` in single backticks.  `plain_to_rst` turns them into reStructuredText that cannot
fail to parse, so that no author has to think of markup.
"""

from __future__ import annotations

import ast
import re
from typing import Any

from exported_cells import PACKAGE, ROOT, exports
from sphinx.application import Sphinx

PAGE = "api"
SPECIAL = re.compile(r"([\\*|]|_(?!\w)|(?<!\w)_)")


def escape(text: str) -> str:
    """Escape markup in a line of plain text, and set its `code` as a literal."""
    parts = re.split(r"``([^`]+)``|`([^`]+)`", text)
    out = ""
    for plain, double, single in zip(parts[::3], [*parts[1::3], None], [*parts[2::3], None], strict=True):
        out += SPECIAL.sub(r"\\\1", plain).replace("`", r"\`")
        if code := double or single:
            out += f"\\ ``{code.strip()}``\\ "
    return out


def plain_to_rst(lines: list[str]) -> list[str]:
    """Paragraphs stay, indented lines become line blocks below the line that leads them."""
    out: list[str] = []
    was_indented = False
    for line in lines:
        text = line.lstrip()
        if not text:
            out.append("")
            continue
        indented = len(line) > len(text)
        if indented != was_indented and out and out[-1]:
            out.append("")
        if indented:
            out.append("   | " + " " * (len(line) - len(text) - 4) + escape(text))
        else:
            out.append(escape(text))
        was_indented = indented
    return [*out, ""]


def process_docstring(_app: Sphinx, what: str, _name: str, _obj: Any, _options: Any, lines: list[str]) -> None:
    """autodoc's hook: rewrite a docstring in place."""
    lines[:] = plain_to_rst(lines)


def public_names(module: str) -> list[str]:
    """The public classes and functions of a module, in the order of its source."""
    tree = ast.parse((ROOT / PACKAGE / f"{module}.py").read_text("utf-8"))
    kinds = (ast.ClassDef, ast.FunctionDef)
    names = [node.name for node in tree.body if isinstance(node, kinds)]
    return list(dict.fromkeys(name for name in names if not name.startswith("_")))


def api_text(app: Sphinx) -> str:
    """The Markdown of all modules, in the order of the book."""
    chapter: dict[str, str] = {}
    for docname, entries in sorted(exports(app.env).items()):
        for entry in entries:
            chapter.setdefault(entry[0], docname)
    modules = [path.stem for path in (ROOT / PACKAGE).glob("[!_]*.py")]
    parts = []
    for module in sorted(modules, key=lambda name: (chapter.get(name, "~"), name)):
        full = f"{PACKAGE}.{module}"
        names = "\n".join(f"   {name}" for name in public_names(module))
        origin = f"Exported from {{doc}}`/{chapter[module]}`. " if module in chapter else ""
        parts.append(
            f"\n## `{full}`\n\n{origin}<a href='source/{module}.html'>Source</a>\n\n```{{eval-rst}}\n"
            f".. currentmodule:: {full}\n\n.. autosummary::\n   :nosignatures:\n\n{names}\n\n"
            f".. automodule:: {full}\n   :members:\n   :show-inheritance:\n```\n"
        )
    return "".join(parts)


def write_api(app: Sphinx, docname: str, source: list[str]) -> None:
    """Append the modules to the API page as it is read."""
    if docname == PAGE:
        for path in (ROOT / PACKAGE).glob("*.py"):
            app.env.note_dependency(str(path))
        source[0] += api_text(app)


def read_last(_app: Sphinx, _env: Any, docnames: list[str]) -> None:
    """Read the API page after all others: it says which chapter exports what."""
    docnames.sort(key=lambda name: name == PAGE)


def always_read(_app: Sphinx, _env: Any, _added: Any, _changed: Any, _removed: Any) -> list[str]:
    """Read the API page at every build: a new module may have come."""
    return [PAGE]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("autodoc-process-docstring", process_docstring, priority=900)
    app.connect("env-before-read-docs", read_last)
    app.connect("env-get-outdated", always_read)
    app.connect("source-read", write_api)
    return {"version": "1", "parallel_read_safe": False, "parallel_write_safe": True}
