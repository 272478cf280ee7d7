"""tools/sync.py: the side that changed wins, an edited cell loses its output, nothing is erased unseen."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from chapters import BookError, as_cells, read_py
from conftest import ROOT, TinyBook
from sync import sync

CELLS = ("md # Title", "a = 1\nprint(a)", "b = 2\nprint(b)")


@pytest.fixture
def pair(book: TinyBook) -> TinyBook:
    """A committed pair in step, with outputs."""
    sync(book.write("03_pool", *CELLS))
    book.pretend_executed("03_pool", "1\n", "2\n")
    book.commit()
    return book


def sources(book: TinyBook) -> list[str]:
    return [cell.source for cell in book.notebook("03_pool").cells]


def outputs(book: TinyBook) -> list[str | None]:
    code = [cell for cell in book.notebook("03_pool").cells if cell.cell_type == "code"]
    return [cell.outputs[0].text if cell.outputs else None for cell in code]


def edit_notebook(book: TinyBook, index: int, source: str) -> None:
    notebook = book.notebook("03_pool")
    notebook.cells[index].source = source
    book.save("03_pool", notebook)


def test_a_missing_notebook_is_made_the_same_everywhere(book: TinyBook, tmp_path: Path) -> None:
    other = TinyBook(tmp_path / "other")
    for each in (book, other):
        assert sync(each.write("03_pool", *CELLS, *CELLS)) == "03_pool: taken from the .py"
    first, second = (each.root / "book/03_pool.ipynb" for each in (book, other))
    assert first.read_bytes() == second.read_bytes()
    assert len({cell.id for cell in book.notebook("03_pool").cells}) == 6
    assert book.notebook("03_pool").metadata.keys() == {"kernelspec"}


def test_a_missing_py_is_made_from_the_notebook(pair: TinyBook) -> None:
    before = (pair.root / "book/03_pool.py").read_text()
    (pair.root / "book/03_pool.py").unlink()
    sync(pair.chapter("03"))
    assert (pair.root / "book/03_pool.py").read_text() == before


def test_a_pair_in_step_is_left_alone(pair: TinyBook) -> None:
    assert sync(pair.chapter("03")) == ""
    assert pair.git("status", "--porcelain") == ""


def test_an_edit_in_the_py_only(pair: TinyBook) -> None:
    pair.write("03_pool", CELLS[0], "a = 10\nprint(a)", CELLS[2])
    ids = [cell.id for cell in pair.notebook("03_pool").cells]
    sync(pair.chapter("03"))
    assert sources(pair)[1] == "a = 10\nprint(a)"
    assert outputs(pair) == [None, "2\n"], "the edited cell loses its output, the other keeps it"
    assert pair.notebook("03_pool").cells[1].execution_count is None
    assert [cell.id for cell in pair.notebook("03_pool").cells] == ids


def test_an_edit_in_the_notebook_only_is_not_erased(pair: TinyBook) -> None:
    edit_notebook(pair, 2, "b = 20\nprint(b)")
    assert sync(pair.chapter("03")) == "03_pool: taken from the .ipynb"
    assert "b = 20" in (pair.root / "book/03_pool.py").read_text()
    assert outputs(pair) == ["1\n", None]


def test_an_edit_in_the_notebook_leaves_the_rest_of_the_py_as_it_was(pair: TinyBook) -> None:
    path = pair.root / "book/03_pool.py"
    path.write_text(path.read_text().replace("print(a)\n", "print(a)\n\n\n"))
    pair.commit()
    edit_notebook(pair, 2, "b = 20\nprint(b)")
    sync(pair.chapter("03"))
    changed = [line for line in pair.git("diff", "-U0", "book/03_pool.py").splitlines() if line[0] in "+-"]
    assert changed[2:] == ["-b = 2", "+b = 20"]


def test_different_edits_in_both_are_an_error_that_shows_them(pair: TinyBook) -> None:
    pair.write("03_pool", CELLS[0], CELLS[1], "b = 3\nprint(b)")
    edit_notebook(pair, 2, "b = 4\nprint(b)")
    before = pair.git("diff")
    with pytest.raises(BookError) as error:
        sync(pair.chapter("03"))
    for said in ("03_pool", "cell 3", "b = 3", "b = 4", "--take"):
        assert said in str(error.value)
    assert "a = 1" not in str(error.value), "cells that agree are not shown"
    assert pair.git("diff") == before, "nothing is written"


def test_edits_in_both_to_different_cells_are_an_error_too(pair: TinyBook) -> None:
    pair.write("03_pool", CELLS[0], "a = 10", CELLS[2])
    edit_notebook(pair, 2, "b = 20")
    with pytest.raises(BookError, match="cell 2"):
        sync(pair.chapter("03"))


def test_the_same_edit_in_both_is_no_conflict(pair: TinyBook) -> None:
    pair.write("03_pool", CELLS[0], CELLS[1], "b = 3")
    edit_notebook(pair, 2, "b = 3")
    assert sync(pair.chapter("03")) == ""


def test_a_side_can_be_chosen(pair: TinyBook) -> None:
    pair.write("03_pool", CELLS[0], CELLS[1], "b = 3")
    edit_notebook(pair, 2, "b = 4")
    sync(pair.chapter("03"), take="ipynb")
    assert as_cells(read_py(pair.root / "book/03_pool.py"))[2].source == "b = 4"


def test_a_second_edit_before_any_commit(pair: TinyBook) -> None:
    for value in (3, 4):
        pair.write("03_pool", CELLS[0], CELLS[1], f"b = {value}")
        assert sync(pair.chapter("03")) == "03_pool: taken from the .py"
    edit_notebook(pair, 2, "b = 5")
    assert sync(pair.chapter("03")) == "03_pool: taken from the .ipynb"
    pair.write("03_pool", *CELLS)
    assert sync(pair.chapter("03")) == "03_pool: taken from the .py", "back to HEAD is an edit like any other"


def test_a_repository_without_a_commit(book: TinyBook) -> None:
    sync(book.write("03_pool", *CELLS))
    assert sync(book.chapter("03")) == "", "both exist and agree"
    book.write("03_pool", CELLS[0], "a = 10", CELLS[2])
    assert sync(book.chapter("03")) == "03_pool: taken from the .py"
    book.write("03_pool", CELLS[0], "a = 11", CELLS[2])
    (book.root / ".cache/sync/03_pool.json").unlink()
    with pytest.raises(BookError, match="a = 11"):
        sync(book.chapter("03"))


def test_what_was_noted_under_another_head_does_not_count(pair: TinyBook) -> None:
    """The pair agreed on X; git moves both files to Y; somebody's edit happens to lead back to X."""
    sync(pair.chapter("03"))
    pair.git("checkout", "-qb", "other")
    pair.write("03_pool", CELLS[0], CELLS[1], "b = 3")
    notebook = pair.notebook("03_pool")
    notebook.cells[2].source = "b = 3"
    pair.save("03_pool", notebook)
    pair.commit()
    edit_notebook(pair, 2, CELLS[2])
    assert sync(pair.chapter("03")) == "03_pool: taken from the .ipynb"


@pytest.mark.parametrize("newer", ["py", "ipynb"])
def test_modification_times_play_no_part(pair: TinyBook, newer: str) -> None:
    edit_notebook(pair, 2, "b = 20")
    for suffix in ("py", "ipynb"):
        os.utime(pair.root / f"book/03_pool.{suffix}", (2e9, 2e9) if suffix == newer else (1e9, 1e9))
    sync(pair.chapter("03"))
    assert "b = 20" in (pair.root / "book/03_pool.py").read_text()


def test_tags_are_part_of_a_cell_but_do_not_cost_its_output(pair: TinyBook) -> None:
    pair.write("03_pool", CELLS[0], f"[hide-input]\n{CELLS[1]}", CELLS[2])
    assert sync(pair.chapter("03"), check=True)
    sync(pair.chapter("03"))
    assert pair.notebook("03_pool").cells[1].metadata.tags == ["hide-input"]
    assert outputs(pair) == ["1\n", "2\n"]


def test_cells_added_and_removed_leave_the_others_alone(pair: TinyBook) -> None:
    ids = [cell.id for cell in pair.notebook("03_pool").cells]
    pair.write("03_pool", CELLS[0], "new = 0", CELLS[1], "md more", CELLS[2])
    sync(pair.chapter("03"))
    assert outputs(pair) == [None, "1\n", "2\n"]
    kept = pair.notebook("03_pool").cells
    assert [kept[0].id, kept[2].id, kept[4].id] == ids
    pair.write("03_pool", CELLS[0], CELLS[2])
    sync(pair.chapter("03"))
    assert outputs(pair) == ["2\n"]


def test_check_reports_and_writes_nothing(pair: TinyBook) -> None:
    pair.write("03_pool", CELLS[0], "a = 10", CELLS[2])
    before = pair.git("diff")
    assert "out of step" in sync(pair.chapter("03"), check=True)
    assert pair.git("diff") == before
    assert not (pair.root / ".cache/sync/03_pool.json").read_text().count("a = 10")


def test_the_command(pair: TinyBook) -> None:
    """The exit code: 0 in step, 1 with --check out of step, 0 after syncing."""

    def run(*arguments: str) -> int:
        code = f"import sys; sys.path.insert(0, {str(ROOT / 'tools')!r}); import chapters, pathlib, sync\n"
        code += f"sync.ROOT = pathlib.Path({str(pair.root)!r}); sys.argv[0] = 'sync'; chapters.main(sync._run)"
        return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, check=False).returncode

    assert run("--check") == 0
    pair.write("03_pool", CELLS[0], "a = 10", CELLS[2])
    assert run("--check", "3") == 1
    assert run() == 0
    assert run("--check") == 0
    assert run("--check", "77") == 1, "no such chapter"
