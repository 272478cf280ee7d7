"""Every audit over the real book, and each of them on a planted fault in a book of its own."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import audit
import audit_html
import pytest
from conftest import ROOT, TinyBook
from nbformat.v4 import new_output
from sync import sync

PNG = {"image/png": "aGk=", "text/plain": "<Figure>"}


@pytest.mark.parametrize("name", list(audit.QUICK))
def test_the_book(name: str) -> None:
    if name == "spelling":
        pytest.importorskip("spellchecker")
    if found := audit.QUICK[name](ROOT):
        pytest.fail("\n".join(found), pytrace=False)


# ------------------------------------------------------------------------------------------ a book with faults


def planted(book: TinyBook, *cells: str, printed: tuple[str, ...] = ()) -> TinyBook:
    """A book of one chapter, notation and bibliography, in order but for what the cells say."""
    sync(book.write("03_pool", *cells))
    book.pretend_executed("03_pool", *printed)
    page(book, "notation", "# Notation\n\n| I1 | free iff 0 |\n")
    page(book, "references", "# References\n\n{cite}`kwon`\n")
    entry = "title = {T},\n  author = {A},\n  year = {2023},\n  url = {https://arxiv.org/abs/2309.06180}\n"
    (book.root / "book/references.bib").write_text(f"@misc{{kwon,\n  {entry}}}\n")
    return book


def page(book: TinyBook, name: str, text: str) -> None:
    """Write a page beside the chapters."""
    (book.root / f"book/{name}.md").write_text(text)


def with_output(book: TinyBook, index: int, data: dict[str, str]) -> None:
    """Give a cell an output that is shown."""
    notebook = book.notebook("03_pool")
    notebook.cells[index].outputs = [new_output("display_data", data)]
    book.save("03_pool", notebook)


SOUND = ("md # Pool\n\nIt takes 5 MiB, see [below](#a-section).", "print(5)", "md ## A section\n\nDone.")


@pytest.mark.parametrize("name", [name for name in audit.QUICK if name not in {"register", "spelling"}])
def test_a_sound_book_passes(book: TinyBook, name: str) -> None:
    planted(book, *SOUND, printed=("5 MiB\n",))
    assert audit.QUICK[name](book.root) == []


def test_planted_a_wrong_number_in_a_chapter(book: TinyBook) -> None:
    planted(book, "md # Pool\n\nIt takes 6 MiB.", "print(5)", printed=("5 MiB\n",))
    (said,) = audit.numbers(book.root)
    assert "'6 MiB'" in said


def test_planted_a_wrong_number_in_a_real_chapter(tmp_path: Path) -> None:
    (tmp_path / "book").mkdir()
    for path in (ROOT / "book").glob("01_kv_sizing.*"):
        shutil.copy(path, tmp_path / "book")
    assert audit.numbers(tmp_path) == []
    notebook = tmp_path / "book/01_kv_sizing.ipynb"
    text = notebook.read_text("utf-8")
    assert text.count("So do this sum first") == 1
    notebook.write_text(text.replace("So do this sum first", "Ten chats hold 11 GiB. So do this sum first"), "utf-8")
    (said,) = audit.numbers(tmp_path)
    assert "'11 GiB'" in said
    assert "01_kv_sizing" in said


@pytest.mark.parametrize(
    ("text", "loose"),
    [
        ("# Page\n\nIt takes 5 MiB.", []),
        ("# Page\n\nIt takes 6 MiB.", ["6 MiB"]),
        ("## One\n\nIt takes 5 MiB: [there](03_pool.ipynb#a-section).", []),
        ("## One\n\nIt takes 6 MiB {cite}`kwon`.", []),
        ("## One\n\nIt takes ~~6 MiB~~ 5 MiB.", []),
        ("## One\n\n```{glossary}\nword\n  Of 6 MiB.\n```\n\n## Two\n\n```text\n7 MiB\n```\n", ["6 MiB"]),
    ],
)
def test_planted_a_wrong_number_on_a_page(book: TinyBook, text: str, loose: list[str]) -> None:
    planted(book, *SOUND, printed=("5 MiB\n",))
    page(book, "building", text)
    assert [line.split("'")[-2] for line in audit.numbers(book.root)] == loose


def test_a_page_may_say_only_what_the_linked_chapter_prints(book: TinyBook) -> None:
    planted(book, *SOUND, printed=("5 MiB\n",))
    sync(book.write("04_other", "md # Other\n\nSome.", "print(1)"))
    book.pretend_executed("04_other", "9 MiB\n")
    page(book, "building", "## One\n\nIt takes 9 MiB: [there](03_pool.ipynb).")
    (said,) = audit.numbers(book.root)
    assert "printed by none of ['03_pool']" in said


def test_planted_a_register_out_of_date(book: TinyBook) -> None:
    planted(book, *SOUND, printed=("5 MiB\n",))
    assert len(audit.register(book.root)) == 1
    page(book, "numbers", audit.register_page(book.root))
    assert audit.register(book.root) == []
    planted(book, "md # Pool\n\nIt takes 4 MiB.", "print(4)", printed=("4 MiB\n",))
    assert len(audit.register(book.root)) == 1


def test_planted_a_name_that_is_not(book: TinyBook) -> None:
    planted(book, *SOUND, printed=("5 MiB\n",))
    page(book, "notation", "# Notation\n\n`print` and `no_such_name`\n")
    audit.known_names.cache_clear()
    assert audit.names(book.root) == ["book/notation.md: 'no_such_name' exists nowhere"]


@pytest.mark.parametrize(
    ("prose", "said"),
    [
        ("[x](03_pool.ipynb)", ""),
        ("[x](03_pool)", ""),
        ("[x](/03_pool)", ""),
        ("[x](notation.md#notation)", ""),
        ("[x](03_pool.ipynb#a-section)", ""),
        ("[x](#a-section)", ""),
        ("{term}`words <word>`", ""),
        ("{ref}`ex-03-a`", ""),
        ("`[x](nowhere.md)` is code", ""),
        ("[x](04_pool.ipynb)", "04_pool.ipynb does not exist"),
        ("[x](03_pool.ipynb#no-section)", "no such heading"),
        ("[x](#nothing)", "no heading of this page"),
        ("![a picture](_static/none.svg)", "does not exist"),
        ("{term}`wird`", "leads nowhere"),
        ("{ref}`ex-03-b`", "leads nowhere"),
        ("{doc}`/04_pool`", "leads nowhere"),
        (":::{solution} ex-03-b\n:::", "which is no exercise"),
    ],
)
def test_planted_a_dead_link(book: TinyBook, prose: str, said: str) -> None:
    section = f"md ## A section\n\n:::{{exercise}}\n:label: ex-03-a\n:::\n\n{prose}"
    planted(book, "md # Pool", section)
    page(book, "glossary", "# Glossary\n\n```{glossary}\nword\n  A meaning.\n```\n\nMore.\n")
    found = audit.links(book.root)
    assert len(found) == bool(said)
    assert all(said in line for line in found)


WHOLE = "title = {T},\n  author = {A},\n  year = {2023},\n  url = {https://a.org/x}\n"
TWO = "note = {arXiv:2309.06180},\n  url = {https://arxiv.org/abs/2309.06181}"


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (WHOLE, []),
        (WHOLE.replace("  year = {2023},\n", ""), ["has no year"]),
        (WHOLE.replace("url = {https://a.org/x}", TWO), ["names two papers"]),
        (WHOLE.replace("https://a.org/x", "https://arxiv.org/abs/1709.06180"), ["is of 2023, arXiv:1709.06180 is not"]),
        (WHOLE.replace("https://a.org/x", "https://arxiv.org/pdf/x"), ["has no address of the form"]),
    ],
)
def test_planted_faults_of_the_bibliography(book: TinyBook, entry: str, said: list[str]) -> None:
    planted(book, *SOUND)
    assert audit.bibliography(book.root) == []
    (book.root / "book/references.bib").write_text(f"@misc{{other,\n  {entry}}}\n")
    found = audit.bibliography(book.root)
    expected = ["kwon is not in references.bib", "other is never cited", *said]
    assert len(found) == len(expected)
    assert all(part in line for part, line in zip(expected, found, strict=True))


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("https://arxiv.org/abs/2309.06180", ""),
        ("http://example.org/a", "is not https"),
        ("https://localhost/a", "is no public host"),
        ("https://10.0.0.1/a", "is no public host"),
        ("https://example.org:8000/a", "is no public host"),
        ("https://example.org/a.", "ends in punctuation"),
        ("https://example.org/a?utm_source=b", "tracks its reader"),
        ("https://arxiv.org/pdf/2309.06180", "is not of the form"),
    ],
)
def test_planted_addresses(book: TinyBook, url: str, said: str) -> None:
    planted(book, f"md # Pool\n\n<{url}>")
    found = audit.external(book.root)
    assert len(found) == bool(said)
    assert all(said in line for line in found)


@pytest.mark.parametrize(
    ("data", "below", "said"),
    [
        (PNG, "*Figure: blocks over time.*", ""),
        (PNG, "Some prose.", "has no *Figure: ...* below"),
        ({"image/svg+xml": "<svg></svg>"}, "Some prose.", "has no *Figure: ...* below"),
        ({"text/html": '<svg aria-label="A pool"><title>Pool</title></svg>'}, "Some prose.", ""),
        ({"text/html": '<svg role="img"><title>Pool</title></svg>'}, "Some prose.", "without aria-label or desc"),
        ({"text/html": '<svg aria-label="A pool"></svg>'}, "Some prose.", "without title"),
        ({"text/html": '<img src="a.png">'}, "Some prose.", "an image without alternative text"),
    ],
)
def test_planted_a_picture_without_words(book: TinyBook, data: dict[str, str], below: str, said: str) -> None:
    planted(book, "md # Pool", "f()", f"md {below}")
    with_output(book, 1, data)
    found = audit.pictures(book.root)
    assert len(found) == bool(said)
    assert all(said in line for line in found)


def test_planted_pictures_on_pages(book: TinyBook) -> None:
    planted(book, *SOUND)
    (book.root / "book/_static").mkdir()
    (book.root / "book/_static/x.svg").write_text("<svg><title>x</title></svg>")
    page(book, "building", "![](_static/x.svg)")
    alt, mute = audit.pictures(book.root)
    assert "no alternative text" in alt
    assert "without aria-label or desc" in mute


@pytest.mark.parametrize(
    ("prose", "wrong"),
    [
        ("A block of a table. Its colour; the neighbour's.", []),
        ("A blokc of a tabel.", ["'blokc'", "'tabel'"]),
        ("`blokc`, https://example.org/blokc, $blokc$, {cite}`blokc`", []),
        ("```\nblokc\n```\n", []),
    ],
)
def test_planted_spelling(book: TinyBook, prose: str, wrong: list[str]) -> None:
    pytest.importorskip("spellchecker")
    planted(book, f"md # A block\n\n{prose}")
    shutil.copy(ROOT / "book/words.txt", book.root / "book")
    found = audit.spelling(book.root)
    assert len(found) == len(wrong)
    assert all(word in line for word, line in zip(wrong, found, strict=True))


@pytest.mark.parametrize(
    ("prose", "count"),
    [
        ("The colour of the neighbour, optimised.", 0),
        ("The color of the neighbor, optimized.", 3),
        ("It is organized, and the behavior is gray.", 3),
        ("`color`, *Color Universal Design*, [Color](https://example.org/), its size and its prize", 0),
    ],
)
def test_planted_american_spelling(book: TinyBook, prose: str, count: int) -> None:
    planted(book, f"md # Pool\n\n{prose}")
    assert len(audit.british(book.root)) == count


@pytest.mark.parametrize(
    ("prose", "said"),
    [
        ("A block a row.", ""),
        ("It is blazing fast.", "'blazing'"),
        ("Let us dive\ninto blocks.", "'dive into'"),
        ("TODO say more.", "is left over"),
        ("One — two — three.", "a chain of dashes"),
        ("Look at `/opt/book/x.py`.", "a path of one machine"),
        ("The path `/home/you/paged_kv` and a/opt/b are none.", ""),
    ],
)
def test_planted_words(book: TinyBook, prose: str, said: str) -> None:
    planted(book, f"md # Pool\n\n{prose}")
    found = audit.words(book.root)
    wanted = 2 if "/opt/book" in prose else bool(said)  # in the source, and in the notebook
    assert len(found) == wanted
    assert all(said in line for line in found)


def test_planted_wide_code(book: TinyBook) -> None:
    planted(book, f"x = '{'a' * 96}'", f"y = '{'a' * 94}'", printed=("b" * 101 + "\n", ""))
    (code,) = audit.columns(book.root)
    assert "code of 102 columns" in code


def test_planted_an_invariant_defined_twice(book: TinyBook) -> None:
    planted(book, "md # Pool\n\n> **I1.** A block is free iff its count is 0.\n\n> **I2.** A count counts rows.")
    assert audit.invariants(book.root) == ["book/notation.md: I2 of 03_pool is missing"]
    book.write("04_other", "md # Other\n\n> **I1.** Something else.")
    assert "I1 is defined in 03_pool already" in audit.invariants(book.root)[0]


def test_planted_a_stale_output(book: TinyBook) -> None:
    planted(book, "x = 2\nprint(x + 1)", printed=("3\n",))
    assert audit.outputs(book.root) == []
    notebook = book.notebook("03_pool")
    notebook.cells[0].source = "x = 2\nprint(x + 2)"  # edited in a browser, saved, not run
    book.save("03_pool", notebook)
    (said,) = audit.outputs(book.root)
    assert said == "03_pool, cell 1 (x = 2): its output is stale"
    assert book.notebook("03_pool").cells[0].outputs[0].text == "3\n", "an audit writes nothing"


# ------------------------------------------------------------------------------------------ the built book

PAGE = """<html><head><link rel="stylesheet" href="_static/a.css"></head><body id="top">
<h1 id="one">One</h1><a href="#one">x</a><a href="b.html#two">x</a><img src="a.png" alt="A block"></body></html>"""


@pytest.fixture
def html(tmp_path: Path) -> Path:
    (tmp_path / "_static").mkdir()
    (tmp_path / "_static/a.css").write_text("p {}")
    (tmp_path / "a.png").write_bytes(b"x" * 100)
    (tmp_path / "a.html").write_text(PAGE)
    (tmp_path / "b.html").write_text('<html><body><h2 id="two">Two</h2></body></html>')
    return tmp_path


def test_a_sound_built_book_passes(html: Path) -> None:
    assert audit_html.built(html) == []
    assert audit_html.weight(html) == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("b.html#two", "c.html", "leads nowhere"),
        ("b.html#two", "b.html#three", "no such anchor"),
        ('href="#one"', 'href="#none"', "no such anchor"),
        ("_static/a.css", "_static/b.css", "leads nowhere"),
        ("_static/a.css", "https://example.org/a.css", "loads https://example.org/a.css"),
        (' alt="A block"', "", "a.png has no words"),
        ("<h1", "<svg></svg><h1", "svg has no words"),
    ],
)
def test_planted_faults_in_the_built_book(html: Path, old: str, new: str, said: str) -> None:
    assert old in PAGE
    (html / "a.html").write_text(PAGE.replace(old, new))
    (found,) = audit_html.built(html)
    assert found.startswith("a.html: ")
    assert said in found


def test_planted_a_heavy_page(html: Path) -> None:
    (html / "a.png").write_bytes(b"x" * 6_000_000)
    (found,) = audit_html.weight(html)
    assert found == "a.html: 6.0 MB with what it loads"
    for name in range(6):
        (html / f"_static/{name}.bin").write_bytes(b"x" * 6_000_000)
    assert "the book weighs 42.0 MB" in audit_html.weight(html)


def test_no_built_book_is_said(tmp_path: Path) -> None:
    assert "run `make book`" in audit_html.built(tmp_path)[0]


def test_every_audit_says_what_it_finds() -> None:
    for function in (*audit.QUICK.values(), *audit.SLOW.values()):
        assert len(audit.first_line(function)) > 20


def test_the_word_list_has_no_word_of_the_dictionary() -> None:
    if importlib.util.find_spec("spellchecker") is None:
        pytest.skip("pyspellchecker is not installed")
    from spellchecker import SpellChecker

    assert sorted(SpellChecker().known(audit.words_of(ROOT))) == []
