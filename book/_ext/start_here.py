"""A line under the title of every chapter: the notebook to keep, and the same in JupyterLab.

The first link is the notebook as it lies beside the page, so it works offline; the second leads to a Lab that
`make lab` has started, at its usual address.
"""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

LAB = "http://localhost:8888/lab/tree"


def start_line(docname: str) -> str:
    """The line, as HTML, for the page of a notebook."""
    up = "../" * docname.count("/")
    name = docname.rpartition("/")[2]
    return (
        '<p class="start-here">'
        f'<a href="{up}_sources/{docname}.ipynb" download="{name}.ipynb">Download this notebook</a>, or run '
        f'<code>make lab</code> and <a href="{LAB}/{docname}.ipynb">open it there</a>.</p>'
    )


def add_line(app: Sphinx, doctree: nodes.document) -> None:
    """Put the line behind the title of a notebook."""
    docname = app.env.docname
    if not app.env.doc2path(docname).endswith(".ipynb"):
        return
    title = next(iter(doctree.findall(nodes.title)), None)
    if title is not None:
        line = nodes.raw("", start_line(docname), format="html")
        title.parent.insert(title.parent.index(title) + 1, line)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("doctree-read", add_line)
    return {"version": "1", "env_version": 1, "parallel_read_safe": True, "parallel_write_safe": True}
