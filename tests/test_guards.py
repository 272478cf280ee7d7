"""Guards over the real book, and each of them on a planted fault."""

from __future__ import annotations

import check_cells
import check_prose
import pytest
from chapters import Chapter, find_chapters
from check_cells import later_imports, never_executed, out_of_step, pending, stored_errors, too_long
from check_prose import code_spans, dead_names, known_names, loose_numbers, quantities, sentences, unknown_names
from conftest import ROOT, TinyBook
from execute import banner
from export import export
from nbformat.v4 import new_output
from sync import sync

CHAPTERS = find_chapters()
each_chapter = pytest.mark.parametrize("chapter", CHAPTERS, ids=[chapter.stem for chapter in CHAPTERS])


# ------------------------------------------------------------------------------------------ the book


def nothing(problems: list[str]) -> None:
    """Fail with the problems, one a line."""
    if problems:
        pytest.fail("\n".join(problems), pytrace=False)


@each_chapter
def test_cells(chapter: Chapter) -> None:
    nothing(check_cells.check_cells(chapter))


@each_chapter
def test_prose(chapter: Chapter) -> None:
    nothing(check_prose.check_prose(chapter))


def test_the_package_is_the_export() -> None:
    nothing(export(ROOT, check=True))


def test_gpu_cells_that_are_pending() -> None:
    """They are listed, not failed."""
    waiting = [line for chapter in CHAPTERS if chapter.ipynb.exists() for line in pending(chapter)]
    if waiting:
        pytest.skip("pending: " + "; ".join(waiting))


# ------------------------------------------------------------------------------------------ planted faults: cells


def planted(book: TinyBook, *cells: str, printed: tuple[str, ...] = ()) -> Chapter:
    chapter = book.write("03_pool", *cells)
    sync(chapter)
    book.pretend_executed("03_pool", *printed)
    return chapter


def test_a_sound_chapter_passes(book: TinyBook) -> None:
    cells = ("md # Title\nIt has 3 blocks.", "print(3)", "[raises-exception]\nraise ValueError")
    chapter = planted(book, *cells, printed=("3\n",))
    notebook = book.notebook("03_pool")
    notebook.cells[2].outputs = [new_output("error", ename="ValueError", evalue="", traceback=["ValueError: "])]
    book.save("03_pool", notebook)
    assert check_cells.check_cells(chapter) == []
    assert check_prose.check_prose(chapter) == []


def test_planted_a_pair_out_of_step(book: TinyBook) -> None:
    chapter = planted(book, "x = 1")
    assert out_of_step(chapter) == []
    book.write("03_pool", "x = 2")
    assert len(out_of_step(chapter)) == 1


def test_planted_a_package_that_is_not_the_export(book: TinyBook) -> None:
    planted(book, '[export:pool]\n"""Doc."""\n\nx = 1')
    export(book.root)
    assert export(book.root, check=True) == []
    path = book.root / "paged_kv/pool.py"
    path.write_text(path.read_text() + "y = 2\n")
    assert len(export(book.root, check=True)) == 1


def test_planted_a_cell_never_executed(book: TinyBook) -> None:
    chapter = planted(book, "x = 1", "y = 2", "[gpu]\nz = 3")
    assert never_executed(chapter) == []
    notebook = book.notebook("03_pool")
    notebook.cells[1].execution_count = notebook.cells[2].execution_count = None
    notebook.cells[2].outputs = [banner("awaiting", "")]
    book.save("03_pool", notebook)
    assert never_executed(chapter) == ["03_pool, cell 2 (y = 2): never executed"]
    assert pending(chapter) == ["03_pool, cell 3 (z = 3): awaiting"]
    notebook.cells[2].outputs = []
    book.save("03_pool", notebook)
    assert len(never_executed(chapter)) == 2, "without its banner a GPU cell has no excuse"


LATE = ["from paged_kv.late import f", "import paged_kv.late", "from paged_kv import f, late"]


@pytest.mark.parametrize("line", LATE)
def test_planted_an_import_of_a_later_chapter(book: TinyBook, line: str) -> None:
    book.write("04_late", '[export:late]\n"""Doc."""\n\ndef f() -> None:\n    ...\n\n\ndef late() -> None:\n    ...')
    book.write("appendices/A1_draw", '[export:draw]\n"""Doc."""\n\nx = 1')
    export(book.root)
    for name in ("00_tour", "05_after", "labs/eviction", "appendices/A2_more"):
        assert later_imports(book.write(name, f"import numpy\n{line}")) == []
    assert later_imports(book.write("02_before", "from paged_kv.draw import x")) == []
    (said,) = later_imports(book.write("03_pool", "x = 1", f"if x:\n    {line}"))
    assert said == "03_pool, cell 2 (if x:): imports paged_kv.late, which 04_late exports later"


def test_planted_an_exported_cell_too_long(book: TinyBook) -> None:
    lines = "\n".join(f"x{i} = {i}" for i in range(40))
    assert too_long(book.write("03_pool", f"[export:pool]\n{lines}", f"{lines}\n{lines}")) == []
    assert "41 lines exported" in too_long(book.write("03_pool", f"[export:pool]\n{lines}\ny = 1"))[0]
    assert "101 columns" in too_long(book.write("03_pool", f"x = '{'a' * 95}'"))[0]


def test_planted_errors_in_outputs(book: TinyBook) -> None:
    chapter = planted(book, "f()", "[raises-exception]\ng()")
    long = ["Traceback (most recent call last)", "ValueError: no"]

    def with_outputs(*outputs: object) -> list[str]:
        notebook = book.notebook("03_pool")
        for cell, output in zip(notebook.cells, outputs, strict=False):
            cell.outputs = [output]
        book.save("03_pool", notebook)
        return stored_errors(chapter)

    error = new_output("error", ename="ValueError", evalue="no", traceback=["ValueError: no"])
    fine = new_output("stream", name="stdout", text="ValueError: no")
    assert with_outputs(fine, error) == []
    assert with_outputs(error, error) == ["03_pool, cell 1 (f()): ends in ValueError, not tagged raises-exception"]
    assert with_outputs(fine, new_output("error", ename="ValueError", evalue="no", traceback=long)) == [
        "03_pool, cell 2 (g()): a traceback is stored"
    ]
    assert with_outputs(new_output("stream", name="stderr", text="\n".join(long)), error) == [
        "03_pool, cell 1 (f()): a traceback is stored"
    ]


# ------------------------------------------------------------------------------------------ planted faults: numbers


def numbers(book: TinyBook, prose: str, *printed: str) -> list[str]:
    """The loose numbers of a chapter: an opening, a section with this prose whose cell prints, a later one."""
    cells = ("md # Title", "print(1)", f"md ## Section\n\n{prose}", "print(2)", "md ## Later", "print(3)")
    chapter = planted(book, *cells, printed=("7 MiB\n", *printed, "8 MiB\n"))
    found = loose_numbers(chapter, book.notebook("03_pool"))
    assert all(line.startswith("03_pool, cell 3 (") for line in found)
    return [line.rpartition("'")[0].rpartition("'")[2] for line in found]


@pytest.mark.parametrize(
    "prose",
    [
        "A block takes 5 MiB.",
        "A block takes **5 MiB**, which is $5 \\text{ MiB}$, or\n5\nMiB.",
        "It wastes 92.7 % and holds 1,152 B, 7.6 times as much.",
        "At 4.15 TB/s and 12 tokens/s.",
        "Others measured 99 GiB {cite}`kwon2023paged`.",
        "It is said to be ~~99 GiB~~ 5 MiB.",
        "- one item ~~99 GiB,\n  on two lines~~\n- 5 MiB",
        "Llama 3 8B has 32 layers, 16 slots, 3 chats; chapter 5 says more. In the 1980s, B = 4.",
        "Blocks 2 and 6, B's old ones; then 6 B's; with 16 B = 4.",
        "`take(5 GiB)` is code, and so is ``9 MiB``.",
        "```\n99 GiB\n```",
        "### A heading of 99 GiB",
        "- **Run time**: about 10 s.",
        "$10^9$ B is 5 MiB",
        "| size | 5 MiB |\n|---|---|\n| share | 92.7% |",
    ],
)
def test_numbers_that_are_vouched_for(book: TinyBook, prose: str) -> None:
    assert numbers(book, prose, "5 MiB, 92.7 %, 1152 B\n7.6 times at 4.15 TB/s, 12 tokens/s\n") == []


@pytest.mark.parametrize(
    ("prose", "loose"),
    [
        ("A block takes 6 MiB.", ["6 MiB"]),
        ("A block takes 5 GiB, 5.0 MiB.", ["5 GiB", "5.0 MiB"]),
        ("The opening has 7 MiB, the next section 8 MiB.", ["7 MiB", "8 MiB"]),
        ("It wastes\n92.8\n% and 1,153 B.", ["92.8 %", "1153 B"]),
        ("Paged {cite}`kwon2023paged`. It is 9 times faster.", ["9 times"]),
        ("~~5 MiB~~ 6 MiB", ["6 MiB"]),
        ("It takes 3 us, 3 µs, 4 ms, 5 s and 6 ns.", ["3 us", "3 us", "4 ms", "5 s", "6 ns"]),
        ("| size | 6 MiB |", ["6 MiB"]),
        ("So $6 \\times 10^3$ is $6\\,\\text{GiB}$ or $12\\%$.", ["6 GiB", "12 %"]),
        (":::{dropdown} Reasoning\nIt is 6 MiB.\n:::", ["6 MiB"]),
    ],
)
def test_planted_numbers_that_nothing_prints(book: TinyBook, prose: str, loose: list[str]) -> None:
    assert numbers(book, prose, "5 MiB, 92.7 %, 1152 B\n") == loose


def test_pictures_and_html_vouch_for_nothing(book: TinyBook) -> None:
    chapter = planted(book, "md It takes 5 MiB.", "f()")
    notebook = book.notebook("03_pool")
    notebook.cells[1].outputs = [new_output("display_data", {"text/html": "5 MiB", "image/svg+xml": "5 MiB"})]
    assert len(loose_numbers(chapter, notebook)) == 1
    notebook.cells[1].outputs = [new_output("display_data", {"text/html": "", "text/plain": "5 MiB"})]
    assert loose_numbers(chapter, notebook) == []


def test_sentences_and_quantities() -> None:
    text = "One 5 MiB. Two (see 3.5 s).\n- three\n- four {cite}`x`\n\nFive i.e. one"
    assert [" ".join(part.split()) for part in sentences(text)] == [
        "One 5 MiB.", "Two (see 3.5 s).", "- three", "- four {cite}`x`", "Five i.e. one",
    ]  # fmt: skip
    assert quantities("1,000,000 tokens at 0.5 GB/s, 25 GB, 1.5x, 8B and 3 s") == ["0.5 GB/s", "25 GB", "3 s"]


# ------------------------------------------------------------------------------------------ planted faults: names


def names(book: TinyBook, prose: str) -> list[str]:
    """The dead names in this prose, in a book with one small class."""
    (book.root / "book/names.txt").write_text("vllm/*  # their files\nKVCacheManager free_*  # their names\n")
    (book.root / "Makefile").write_text("test:\n\tpytest --nbval\n")
    pool = '[export:pool]\n"""Doc of gone_name."""\n\n\nclass Pool:\n    """Of [num_blocks]."""\n\n'
    pool += "    def take_one(self):\n        self._free = 1"
    chapter = planted(book, pool, f"md {prose}", "seq_lens = {'max_len': 3}  # old_name")
    export(book.root)
    found = dead_names(chapter, book.notebook("03_pool"))
    assert all(line.startswith("03_pool, cell 2 (`") for line in found)
    return [line.rpartition("'")[0].rpartition("'")[2] for line in found]


@pytest.mark.parametrize(
    "prose",
    [
        "`seq_lens`, `Pool`, `Pool.take_one`, `pool.take_one()`, `Pool._free`, `[num_blocks]`, `max_len`",
        "`seq_lens[0] += 1` and `len(seq_lens)`",
        "`paged_kv/pool.py`, `03_pool.py`, `book/03_pool.py`, `paged_kv.pool`, `Makefile`",
        "`vllm/v1/core/block_pool.py`, `KVCacheManager`, `free_block_queue`",
        "`np.add.at`, `numpy.random.default_rng`, `collections.OrderedDict`, `ValueError`, `__init__`",
        "`make test`, `pytest --nbval`",
        "plain words in backticks: `row`, `free`, `p // B`, `-1`, `true`",
        "```\nnot_a_name\n```",
        "{cite}`not_a_name` and {doc}`not_a_page` and ~~`struck_name`~~",
    ],
)
def test_names_that_exist(book: TinyBook, prose: str) -> None:
    assert names(book, prose) == []


@pytest.mark.parametrize(
    ("prose", "dead"),
    [
        ("`seq_lengths`", ["seq_lengths"]),
        ("`gone_name` stands in a docstring only, `old_name` in a comment", ["gone_name", "old_name"]),
        ("`Pool.take_two`", ["Pool.take_two"]),
        ("`pool.grab()`", ["grab"]),
        ("`BlockPoool`", ["BlockPoool"]),
        ("`seq_lens[rows_gone]`", ["rows_gone"]),
        ("`paged_kv/pond.py`, `pond.py`", ["paged_kv/pond.py", "pond.py"]),
        ("`np.add.att`", ["np.add.att"]),
        ("`make tests`", ["make tests"]),
        ("`pytest --nbvall`", ["--nbvall"]),
        ("`dead_name` on two\nlines: `another_dead\n(seq_lens)`", ["dead_name", "another_dead"]),
    ],
)
def test_planted_names_that_exist_nowhere(book: TinyBook, prose: str, dead: list[str]) -> None:
    assert names(book, prose) == dead


def test_a_span_in_double_backticks() -> None:
    assert list(code_spans("a ``x ` y`` b `z`")) == ["x ` y", "z"]


def test_the_allow_list_has_reasons_and_no_name_of_ours() -> None:
    lines = (ROOT / "book/names.txt").read_text().splitlines()
    entries = [line for line in lines if line.strip() and not line.startswith("#")]
    assert all(line.partition("#")[2].strip() for line in entries)
    assert unknown_names("no_such_name_here", known_names(ROOT)) == ["no_such_name_here"]
