"""Every picture says in words what it shows, and every list reads aloud as one.

A picture that a cell prints (matplotlib) takes its alternative text from the caption below
the cell, a paragraph `*Figure: what it shows.*`.  A picture without any words is a warning,
and a warning fails the build.

Two lists that Sphinx and docutils write are none to a screen reader; `mend_lists` turns them
into what they look like: the lines of a long signature into plain lines, the entries of a
bibliography into the items of a list.
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging

PREFIX = "Figure:"
SIGNATURE = re.compile(r"<dl>\s*((?:<dd><em class=\"sig-param\">.*?</dd>\s*)+)</dl>", re.DOTALL)
logger = logging.getLogger(__name__)


def caption_below(node: nodes.Node) -> nodes.paragraph | None:
    """The caption that follows the outermost cell around a node."""
    while node.parent is not None and node.get("nb_element") != "cell_code":  # type: ignore[attr-defined]
        node = node.parent
    if node.parent is None:
        return None
    below = node.next_node(descend=False, siblings=True, ascend=False)
    while isinstance(below, nodes.comment | nodes.target):
        below = below.next_node(descend=False, siblings=True, ascend=False)
    if not isinstance(below, nodes.paragraph) or not below.children:
        return None
    first = below.children[0]
    return below if isinstance(first, nodes.emphasis) and below.astext().startswith(PREFIX) else None


def give_alt(_app: Sphinx, doctree: nodes.document) -> None:
    """Fill in missing alternative texts, or warn."""
    for image in doctree.findall(nodes.image):
        if image.get("alt", "").strip():
            continue
        caption = caption_below(image)
        if caption is None:
            logger.warning("picture without words: put *%s ...* below its cell", PREFIX, location=image)
            continue
        image["alt"] = caption.astext().removeprefix(PREFIX).strip()
        if "figure-caption" not in caption["classes"]:
            caption["classes"].append("figure-caption")


def mend_lists(html: str) -> str:
    """The HTML of a page, with signatures and bibliographies that read aloud as what they are."""

    def lines(found: re.Match[str]) -> str:
        parameters = found[1].replace("<dd>", "<div>").replace("</dd>", "</div>")
        return f'<div class="sig-params">\n{parameters}</div>'

    return SIGNATURE.sub(lines, html).replace('role="doc-biblioentry"', 'role="listitem"')


def mend_page(_app: Sphinx, _page: str, _template: str, context: dict[str, Any], _doctree: Any) -> None:
    """Sphinx's hook: rewrite the body of a page."""
    if "body" in context:
        context["body"] = mend_lists(context["body"])


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("doctree-read", give_alt)
    app.connect("html-page-context", mend_page)
    # Another env_version makes Sphinx write every page anew.
    return {"version": "1", "env_version": 2, "parallel_read_safe": True, "parallel_write_safe": True}
