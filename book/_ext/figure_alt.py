"""Every picture says in words what it shows.

A picture that a cell prints (matplotlib) takes its alternative text from the caption below
the cell, a paragraph `*Figure: what it shows.*`.  A picture without any words is a warning,
and a warning fails the build.
"""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging

PREFIX = "Figure:"
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


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("doctree-read", give_alt)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
