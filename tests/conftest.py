"""A tiny book in a folder of its own, for the tests of the tools."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# Without a GPU, Triton's kernels run in its interpreter.  It looks when Triton is first imported, so this comes before
# any test module, some of which import it by way of transformers.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from chapters import Chapter, find_chapters, read_ipynb, write_ipynb  # noqa: E402
from nbformat import NotebookNode  # noqa: E402
from nbformat.v4 import new_output  # noqa: E402

HEADER = """\
# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---
"""


def percent(*cells: str) -> str:
    """Percent-format text.  A cell is Markdown if it begins with `md `, tagged if with `[tag, tag]` on a line."""
    parts = [HEADER.rstrip()]
    for cell in cells:
        if cell.startswith("md "):
            parts.append("# %% [markdown]\n" + "\n".join(f"# {line}".rstrip() for line in cell[3:].splitlines()))
        elif cell.startswith("["):
            tags, _, source = cell.partition("\n")
            quoted = ", ".join(f'"{tag.strip()}"' for tag in tags[1:-1].split(","))
            parts.append(f"# %% tags=[{quoted}]\n{source.rstrip()}")
        else:
            parts.append(f"# %%\n{cell.rstrip()}")
    return "\n\n".join(parts) + "\n"


class TinyBook:
    """A repository with a book of a few cells."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "book").mkdir(parents=True)
        (root / "paged_kv").mkdir()
        for name in ("jupytext.toml", "nbval_sanitize.cfg"):
            shutil.copy(ROOT / "book" / name, root / "book" / name)
        (root / ".gitignore").write_text(".cache/\n")
        self.git("init", "-q")

    def git(self, *arguments: str) -> str:
        """Run git in the repository."""
        who = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
        done = subprocess.run(["git", *who, *arguments], cwd=self.root, capture_output=True, text=True, check=True)
        return done.stdout

    def commit(self) -> None:
        """Commit everything."""
        self.git("add", "-A")
        self.git("commit", "-qm", "state")

    def write(self, name: str, *cells: str) -> Chapter:
        """Write the .py of a chapter, such as "03_pool" or "appendices/A1_draw"."""
        path = self.root / "book" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(percent(*cells))
        return self.chapter(name)

    def chapter(self, name: str) -> Chapter:
        """The chapter of that name."""
        return find_chapters(self.root, [name])[0]

    def notebook(self, name: str) -> NotebookNode:
        """The notebook of a chapter."""
        return read_ipynb(self.root / "book" / f"{name}.ipynb")

    def save(self, name: str, notebook: NotebookNode) -> None:
        """Write the notebook of a chapter."""
        write_ipynb(self.root / "book" / f"{name}.ipynb", notebook)

    def pretend_executed(self, name: str, *texts: str) -> NotebookNode:
        """Give the code cells counts, and these texts as printed output, in order."""
        notebook = self.notebook(name)
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        for count, cell in enumerate(code, 1):
            cell.execution_count = count
            text = texts[count - 1] if count <= len(texts) else ""
            cell.outputs = [new_output("stream", name="stdout", text=text)] if text else []
        self.save(name, notebook)
        return notebook


@pytest.fixture
def book(tmp_path: Path) -> TinyBook:
    return TinyBook(tmp_path / "repo")
