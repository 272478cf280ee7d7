"""Links that no author has to write: from a chapter to the API, and from its prose to the glossary.

In the header card, each module and name after "Exports" leads to its entry on the API page; so does a last link
"API" in the label of every exported cell.  (The API page leads back to the chapter of each module.)

The first time that a page uses a word of the glossary, in a paragraph of its own prose, the word becomes a link to
its entry.  Words that are also ordinary English, listed in `ORDINARY`, are left alone: a chapter that means the entry
writes {term}`row`.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from api_pages import PAGE as API
from api_pages import public_names
from collected_mistakes import PAGE as MISTAKES
from docutils import nodes
from exported_cells import PACKAGE, ROOT, module_of
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

GLOSSARY = "glossary"
# Pages whose words are not linked: they list the words themselves, or quote other pages.
SILENT = {GLOSSARY, API, MISTAKES, "references", "numbers", "cheat_sheet", "changes", "index"}
ORDINARY = {
    "accept", "block", "budget", "chat", "gap", "group", "head", "in flight", "job", "key", "plan", "price", "root",
    "row", "slot", "step", "tail", "token", "tree", "victim", "window",
}  # fmt: skip
NOT_IN = (
    nodes.reference, nodes.literal, nodes.title, nodes.literal_block, nodes.term, nodes.math, nodes.caption,
    nodes.table, nodes.strong, addnodes.pending_xref,
)  # fmt: skip


# ------------------------------------------------------------------------------------------ the API


@functools.cache
def homes() -> dict[str, str]:
    """The anchor on the API page of every module, as `sizing` and `paged_kv/sizing.py`, and of every public name."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / PACKAGE).glob("[!_]*.py")):
        full = f"{PACKAGE}.{path.stem}"
        for name in public_names(path.stem):
            found.setdefault(name, f"{full}.{name}")
        for spelling in (path.stem, full, f"{PACKAGE}/{path.name}"):
            found[spelling] = f"module-{full}"
    return found


@functools.cache
def entries() -> frozenset[str]:
    """Every public name of the package with its module: `paged_kv.sizing.KVSpec`."""
    paths = (ROOT / PACKAGE).glob("[!_]*.py")
    return frozenset(f"{PACKAGE}.{path.stem}.{name}" for path in paths for name in public_names(path.stem))


def to_api(app: Sphinx, docname: str, anchor: str, *children: nodes.Node) -> nodes.reference:
    """A link from a page to an entry of the API page."""
    up = "../" * docname.count("/")
    return nodes.reference("", "", *children, refuri=f"{up}{API}.html#{anchor}", internal=True)


def link_exports(app: Sphinx, docname: str, doctree: nodes.document) -> None:
    """Link what the header card says the chapter exports."""
    for paragraph in doctree.findall(nodes.paragraph):
        first = next((child for child in paragraph.children if child.astext()), None)
        if not isinstance(first, nodes.strong) or not first.astext().startswith("Exports"):
            continue
        module = ""  # the one named last: two modules may have a function of one name
        for literal in list(paragraph.findall(nodes.literal)):
            name = literal.astext()
            anchor = f"{module}.{name}" if f"{module}.{name}" in entries() else homes().get(name, "")
            if anchor.startswith("module-"):
                module = anchor.removeprefix("module-")
            if anchor and literal.parent is paragraph:
                paragraph.replace(literal, to_api(app, docname, anchor, literal.deepcopy()))


def link_labels(app: Sphinx, docname: str, doctree: nodes.document) -> None:
    """Add a link to the API to the label of each exported cell."""
    for cell in doctree.findall(nodes.container):
        module = module_of(cell.get("cell_metadata", {}).get("tags", []))
        if module is None or module not in homes():
            continue
        for label in cell.findall(lambda node: "exported-label" in getattr(node, "attributes", {}).get("classes", [])):
            label += nodes.Text(" ")
            label += to_api(app, docname, homes()[module], nodes.Text("API"))


# ------------------------------------------------------------------------------------------ the glossary


@functools.cache
def glossary_terms() -> tuple[str, ...]:
    """The words of the glossary that may be linked, longest first."""
    path = ROOT / "book" / f"{GLOSSARY}.md"
    text = path.read_text("utf-8") if path.exists() else ""
    terms = [word.strip() for block in re.findall(r"(?s)```\{glossary\}.*?\n(.*?)```", text)
             for word in re.findall(r"(?m)^(\S.*)$", block) if not word.startswith(":")]  # fmt: skip
    return tuple(sorted((term for term in terms if term not in ORDINARY), key=lambda term: (-len(term), term)))


@functools.cache
def pattern(term: str) -> re.Pattern[str]:
    """A term in running text, in the plural too, the first letter of either case."""
    words = r"[\s-]+".join(re.escape(word) for word in re.split(r"[ -]", term))
    first = f"[{term[0].upper()}{term[0].lower()}]" if term[0].isalpha() and not term[:2].isupper() else ""
    return re.compile(rf"(?<![\w-]){first}{words[1:] if first else words}(?:e?s)?(?![\w-])")


def in_prose(text: nodes.Text) -> bool:
    """Whether a piece of text stands in a paragraph or list item, outside of links, code, headings, tables and cards."""
    node: Any = text.parent
    while node is not None and not isinstance(node, nodes.document):
        if isinstance(node, NOT_IN) or node.get("nb_element") == "cell_code" or node.get("design_component") == "card":
            return False
        node = node.parent
    return isinstance(text.parent, nodes.paragraph | nodes.emphasis)


def link_words(doctree: nodes.document, docname: str, terms: tuple[str, ...]) -> list[str]:
    """Turn the first use of each term into a reference to the glossary; return the terms that were linked."""
    linked = []
    waiting = list(terms)
    for text in list(doctree.findall(nodes.Text)):
        if not in_prose(text):
            continue
        pieces: list[nodes.Node] = [text]
        for term in list(waiting):
            for index, piece in enumerate(pieces):
                found = pattern(term).search(piece) if isinstance(piece, nodes.Text) else None
                if found:
                    pieces[index : index + 1] = _cut(piece, found, term, docname)
                    waiting.remove(term)
                    linked.append(term)
                    break
        if len(pieces) > 1:
            text.parent.replace(text, [piece for piece in pieces if piece.astext()])
    return linked


def _cut(text: nodes.Node, found: re.Match[str], term: str, docname: str) -> list[nodes.Node]:
    """The text before, a reference, and the text behind."""
    whole = text.astext()
    reference = addnodes.pending_xref(
        "", nodes.inline("", found[0], classes=["xref", "std", "std-term"]), refdomain="std", reftype="term",
        reftarget=term, refexplicit=True, refwarn=True, refdoc=docname,
    )  # fmt: skip
    return [nodes.Text(whole[: found.start()]), reference, nodes.Text(whole[found.end() :])]


# ------------------------------------------------------------------------------------------ Sphinx


def add_links(app: Sphinx, doctree: nodes.document) -> None:
    """Sphinx's hook: all of the above for a page that was read."""
    docname = app.env.docname
    notebook = app.env.doc2path(docname).endswith(".ipynb")
    if notebook:
        link_exports(app, docname, doctree)
        link_labels(app, docname, doctree)
    if docname not in SILENT:
        app.env.note_dependency(str(ROOT / "book" / f"{GLOSSARY}.md"))
        link_words(doctree, docname, glossary_terms())


def forget(_app: Sphinx, _env: BuildEnvironment, _docnames: list[str]) -> None:
    """Read package and glossary anew for each build of one process."""
    homes.cache_clear()
    entries.cache_clear()
    glossary_terms.cache_clear()


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("env-before-read-docs", forget)
    app.connect("doctree-read", add_links, priority=600)  # after the labels of exported_cells
    return {"version": "1", "env_version": 1, "parallel_read_safe": True, "parallel_write_safe": True}
