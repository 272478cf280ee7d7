"""Leave out of the built book what no page of it loads.

MathJax comes as 24 MB of ready-made combinations; a page loads one script and, as it needs them, fonts and
extensions.  Source maps and the theme's translations serve whoever develops the theme.  What is left out is listed in
`DROP`, from which `KEEP` is exempt; speech for readers of formulas (`a11y`, `sre` in English) stays.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.util import logging

DROP = (
    "_static/mathjax/*",
    "_static/scripts/*.map",
    "_static/styles/*.map",
    "_static/locales/*",
)
KEEP = (
    "_static/mathjax/tex-chtml.js",
    "_static/mathjax/output/chtml/fonts/*",
    "_static/mathjax/input/tex/extensions/*",
    "_static/mathjax/a11y/*",
    "_static/mathjax/sre/mathmaps/base.json",
    "_static/mathjax/sre/mathmaps/en.json",
    "_static/mathjax/ui/*",
)
logger = logging.getLogger(__name__)


def dropped(name: str) -> bool:
    """Whether a file of the built book, by its path from the root, is left out."""
    return any(fnmatchcase(name, pattern) for pattern in DROP) and not any(
        fnmatchcase(name, pattern) for pattern in KEEP
    )


def prune(html: Path) -> int:
    """Remove what no page loads; return the bytes saved."""
    saved = 0
    for path in sorted(html.rglob("*"), reverse=True):
        if path.is_dir():
            if not any(path.iterdir()):
                path.rmdir()
        elif dropped(path.relative_to(html).as_posix()):
            saved += path.stat().st_size
            path.unlink()
    return saved


def finish(app: Sphinx, error: Exception | None) -> None:
    """Sphinx's hook: prune a finished HTML build and say what it weighs."""
    if error is None and app.builder.format == "html":
        logger.info("left out %.1f MB that no page loads", prune(Path(app.outdir)) / 1e6)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("build-finished", finish)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
