"""tools/execute.py: fresh kernels, outputs written only where they differ, GPU cells by their record."""

from __future__ import annotations

import base64
import io
import json
import re
from typing import Any

import execute as tool
import pytest
from chapters import BookError, Chapter
from conftest import ROOT, TinyBook
from execute import canonical, execute, keep_equal, normalise, read_sanitizers, settle_gpu_cells
from nbformat.v4 import new_output
from PIL import Image
from sync import sync

MODULE = '[export:pool]\n"""Ids."""\n\ndef first() -> int:\n    """The first id."""\n    return 0\n'
CELLS = (
    "md # Title",
    "import os, sys\nprint('one')\nprint('aside', file=sys.stderr)\nprint('two')",
    "object()",
    "import paged_kv.pool\nprint(paged_kv.pool.first(), os.path.basename(os.getcwd()), os.environ['OMP_NUM_THREADS'],"
    " hash('a') == hash('a'), os.environ['PYTHONHASHSEED'])",
    "[raises-exception]\nraise ValueError('meant')",
    "[gpu, nbval-ignore-output]\nraise SystemError('no GPU here')",
    "print('last')",
)


def png(level: int, colour: str = "red") -> str:
    buffer = io.BytesIO()
    Image.new("RGB", (20, 10), colour).save(buffer, "png", compress_level=level)
    return base64.b64encode(buffer.getvalue()).decode()


def prepared(book: TinyBook, *cells: str) -> Chapter:
    chapter = book.write("03_pool", *cells)
    sync(chapter)
    return chapter


def test_a_chapter_runs_in_a_fresh_kernel_and_again_changes_nothing(
    book: TinyBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "cuda", lambda: None)
    (book.root / "paged_kv/__init__.py").write_text("")
    (book.root / "paged_kv/pool.py").write_text("def first() -> int:\n    return 7\n")
    chapter = prepared(book, *CELLS)
    changed, pending = execute(chapter)
    cells = book.notebook("03_pool").cells
    assert len(changed) == 6
    assert pending == ["03_pool, cell 6 (raise SystemError('no GPU here')): awaiting"]
    assert [cell.get("execution_count") for cell in cells] == [None, 1, 2, 3, 4, None, 6]
    assert {output.name: output.text for output in cells[1].outputs} == {"stdout": "one\ntwo\n", "stderr": "aside\n"}
    assert cells[2].outputs[0].execution_count == 2
    assert cells[3].outputs[0].text == "7 book 1 True 0\n"
    assert cells[4].outputs[0].traceback == ["ValueError: meant"]
    assert "Awaiting a GPU" in cells[5].outputs[0].data["text/plain"]
    assert all(cell.metadata.keys() <= {"tags"} for cell in cells)
    assert book.notebook("03_pool").metadata.keys() == {"kernelspec"}
    book.commit()
    assert execute(chapter) == ([], pending), "the address in <object ...> is another, the output counts as equal"
    assert book.git("status", "--porcelain") == ""


def test_a_failing_cell_is_named_and_nothing_is_written(book: TinyBook) -> None:
    chapter = prepared(book, "md # Title", "x = 1", "# why\nx / 0")
    before = chapter.ipynb.read_bytes()
    with pytest.raises(BookError) as error:
        execute(chapter)
    assert str(error.value).startswith("03_pool, cell 3 (# why)\n")
    assert "ZeroDivisionError: division by zero" in str(error.value)
    assert chapter.ipynb.read_bytes() == before


def test_check_compares_and_writes_nothing(book: TinyBook) -> None:
    chapter = prepared(book, "print('stored')", "print('same')")
    book.pretend_executed("03_pool", "stored before\n", "same\n")
    before = chapter.ipynb.read_bytes()
    assert execute(chapter, check=True)[0] == ["03_pool, cell 1 (print('stored'))"]
    assert chapter.ipynb.read_bytes() == before


def test_an_edit_made_during_the_run_is_not_lost(book: TinyBook, monkeypatch: pytest.MonkeyPatch) -> None:
    chapter = prepared(book, "x = 1")

    def run_and_edit(chapter: Chapter, notebook: Any, skip_gpu: bool) -> Any:
        book.write("03_pool", "x = 2")
        sync(chapter)
        return notebook

    monkeypatch.setattr(tool, "run_notebook", run_and_edit)
    with pytest.raises(BookError, match="edited while it ran"):
        execute(chapter)
    assert book.notebook("03_pool").cells[0].source == "x = 2"


def test_a_chapter_without_a_notebook(book: TinyBook) -> None:
    with pytest.raises(BookError, match="03_pool: no notebook yet"):
        execute(book.write("03_pool", "x = 1"))


def kept(book: TinyBook, source: str, old: list[Any], new: list[Any], tag: str = "") -> bool:
    """Whether `keep_equal` takes the stored outputs of a one-cell chapter."""
    prepared(book, f"[{tag}]\n{source}" if tag else source)
    stored, fresh = book.notebook("03_pool"), book.notebook("03_pool")
    stored.cells[0].outputs, fresh.cells[0].outputs = old, new
    changed = keep_equal(book.chapter("03"), stored, fresh)
    same = fresh.cells[0].outputs == normalise(old, None)
    assert changed == ([] if same or tag else ["03_pool, cell 1 (" + source + ")"])
    return same


def text(line: str) -> list[Any]:
    return [new_output("stream", name="stdout", text=line)]


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("<object object at 0x7f1234567890>", "<object object at 0x7fabcdef1234>", True),
        ("in /tmp/abc/x.py", "in /tmp/tmpq_1/y", True),
        ("/tmp/ipykernel_12/345.py:3: Warning", "/tmp/ipykernel_9/1.py:7: Warning", True),
        ("took 5.0 ms", "took 5.1 ms", False),
        ("0x1f blocks", "0x2f blocks", False),
        ("3 blocks", "4 blocks", False),
    ],
)
def test_what_counts_as_the_same_text(book: TinyBook, old: str, new: str, same: bool) -> None:
    assert kept(book, "f()", text(old), text(new)) is same


def test_measured_lines_differ_freely_only_where_the_chapter_itself_runs_a_timer(book: TinyBook) -> None:
    old, new = text("measured: 5.0 ms\nblocks 3"), text("measured: 5.1 ms\nblocks 3")
    assert kept(book, "t = time.perf_counter()", old, new)
    assert not kept(book, "print(result['ms'])", old, new), "numbers from a file are compared"
    assert not kept(book, "t = time.perf_counter()", old, text("measured: 5.1 ms\nblocks 4"))


def test_pictures_are_compared_by_their_pixels(book: TinyBook) -> None:
    red, same, blue = ([new_output("display_data", {"image/png": data})] for data in (png(0), png(9), png(0, "blue")))
    assert red != same
    assert kept(book, "plot()", red, same)
    assert not kept(book, "plot()", red, blue)


def test_an_output_that_nbval_ignores_may_differ(book: TinyBook) -> None:
    assert not kept(book, "print(torch.__version__)", text("2.13"), text("2.11"), tag="nbval-ignore-output")


def test_streams_that_arrive_in_pieces_are_one() -> None:
    aside = new_output("stream", name="stderr", text="aside\n")
    assert [output.text for output in normalise([*text("a\n"), aside, *text("b\n")], 1)] == ["a\nb\n", "aside\n"]
    pieces = [*text("a\n"), *text("b\n"), *text("c\n")]
    assert [output.text for output in normalise(pieces, 1)] == ["a\nb\nc\n"]
    assert pieces[0].text == "a\n", "the argument is left as it was"
    assert canonical(normalise(pieces, 1), []) == canonical(text("a\nb\nc\n"), [])


def test_a_path_of_this_machine_is_refused(book: TinyBook) -> None:
    chapter = prepared(book, "print(1)")
    notebook = book.notebook("03_pool")
    notebook.cells[0].outputs = text(f"read {book.root}/x.json")
    with pytest.raises(BookError, match=re.escape("03_pool, cell 1 (print(1))")):
        tool.tidy(chapter, notebook)


def test_nbval_reads_the_same_sanitisers() -> None:
    plugin = pytest.importorskip("nbval.plugin")
    assert plugin.get_sanitize_patterns((ROOT / "book/nbval_sanitize.cfg").read_text()) == read_sanitizers(ROOT)
    assert len(read_sanitizers(ROOT)) >= 4


# ------------------------------------------------------------------------------------------ GPU cells

GPU_CELLS = (
    "from paged_kv.tables import width\nn = width()",
    "[gpu, nbval-ignore-output]\nprint('first on', n)",
    "m = n + 1  # between",
    "[gpu, nbval-ignore-output]\nprint('second on', m)",
    "after = 0",
)


@pytest.fixture
def recorded(book: TinyBook) -> TinyBook:
    """A chapter whose two GPU cells ran on some GPU."""
    (book.root / "paged_kv/__init__.py").write_text("")
    (book.root / "paged_kv/pool.py").write_text("SIZE = 3\n")
    (book.root / "paged_kv/other.py").write_text("x = 1\n")
    (book.root / "paged_kv/tables.py").write_text(
        "from paged_kv.pool import SIZE\n\n\ndef width() -> int:\n    return SIZE\n"
    )
    chapter = prepared(book, *GPU_CELLS)
    book.pretend_executed("03_pool", "", "first on 3\n", "", "second on 4\n")
    device = {"device": "NVIDIA H200", "versions": {"torch": "2.11"}}
    tool.record_gpu_run(chapter, book.notebook("03_pool"), device)
    return book


def states(book: TinyBook) -> list[str]:
    """After settling: for each GPU cell its state, and whether its recorded output is still there."""
    chapter = book.chapter("03")
    notebook = book.notebook("03_pool")
    pending = settle_gpu_cells(chapter, notebook, tool.read_records(book.root))
    book.save("03_pool", notebook)
    found = []
    for cell in notebook.cells:
        if "gpu" in cell.metadata.get("tags", ()):
            marks = [output.metadata["gpu"] for output in cell.outputs if "metadata" in output]
            held = any(output.output_type == "stream" for output in cell.outputs)
            found.append(f"{(marks or ['current'])[0]} {'kept' if held else 'cleared'}")
            assert len(marks) <= 1
    assert len(pending) == sum(not state.startswith("current") for state in found)
    return found


def test_the_record_names_device_versions_and_commit(recorded: TinyBook) -> None:
    recorded.commit()
    chapter = recorded.chapter("03")
    tool.record_gpu_run(chapter, recorded.notebook("03_pool"), {"device": "NVIDIA H200", "versions": {}})
    record = json.loads((recorded.root / "book/gpu_outputs.json").read_text())["03_pool"]
    assert record["device"] == "NVIDIA H200"
    assert record["commit"] == recorded.git("rev-parse", "HEAD").strip()
    assert len(record["cells"]) == 2


def test_nothing_changed_nothing_marked(recorded: TinyBook) -> None:
    assert states(recorded) == ["current kept", "current kept"]


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        ({2: "m = n + 2"}, ["current kept", "stale kept"]),
        ({2: "m = n + 1  # another comment"}, ["current kept", "current kept"]),
        ({4: "after = 1"}, ["current kept", "current kept"]),
        ({0: "from paged_kv.tables import width\nn = width() + 1"}, ["stale kept", "stale kept"]),
        ({3: "[gpu, nbval-ignore-output]\nprint('second, on', m)"}, ["current kept", "awaiting cleared"]),
        ({1: "[gpu, nbval-ignore-output]\nprint('first, on', n)"}, ["awaiting cleared", "stale kept"]),
    ],
)
def test_an_edit_marks_the_cells_that_rest_on_it(recorded: TinyBook, edit: dict[int, str], expected: list[str]) -> None:
    recorded.write("03_pool", *[edit.get(i, cell) for i, cell in enumerate(GPU_CELLS)])
    sync(recorded.chapter("03"))
    assert states(recorded) == expected
    assert states(recorded) == expected, "settling twice is settling once"
    recorded.write("03_pool", *GPU_CELLS)
    sync(recorded.chapter("03"))
    cured = [state.replace("stale", "current") for state in expected]
    assert states(recorded) == cured, "taking the edit back takes the banner off; what was cleared must run again"


@pytest.mark.parametrize(("module", "state"), [("tables", "stale"), ("pool", "stale"), ("other", "current")])
def test_a_module_it_imports_directly_or_not(recorded: TinyBook, module: str, state: str) -> None:
    path = recorded.root / f"paged_kv/{module}.py"
    path.write_text(f'"""Doc."""\n{path.read_text()}')
    assert states(recorded) == [f"{state} kept"] * 2


def test_with_cuda_the_cells_run_and_are_recorded(recorded: TinyBook, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded.write("03_pool", *[cell.replace("first", "FIRST") for cell in GPU_CELLS])
    sync(recorded.chapter("03"))
    monkeypatch.setattr(tool, "cuda", lambda: {"device": "A GPU", "versions": {"torch": "9"}})
    assert execute(recorded.chapter("03"))[1] == []
    assert recorded.notebook("03_pool").cells[1].outputs[0].text == "FIRST on 3\n"
    assert states(recorded) == ["current kept", "current kept"]
    assert json.loads((recorded.root / "book/gpu_outputs.json").read_text())["03_pool"]["device"] == "A GPU"
