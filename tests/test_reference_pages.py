"""The pages to look things up in: numbers, mistakes, glossary, cheat sheet, notation, building, changes, API."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import audit
import number_register
import pytest
import yaml
from conftest import ROOT, TinyBook
from docutils import nodes, utils
from sphinx import addnodes
from sync import sync

sys.path.insert(0, str(ROOT / "book/_ext"))

import chapter_links
import collected_mistakes
import lean_build

BOOK = ROOT / "book"
PAGES = ("cheat_sheet", "glossary", "notation", "mistakes", "building", "numbers", "api", "changes", "references")
EXTENSIONS = ("collected_mistakes", "chapter_links", "lean_build")


def text_of(name: str) -> str:
    return (BOOK / f"{name}.md").read_text("utf-8")


def test_the_pages_are_in_the_contents() -> None:
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text("utf-8"))
    listed = {chapter["file"] for part in toc["parts"] for chapter in part["chapters"]}
    assert set(PAGES) <= listed


def test_the_extensions_are_registered() -> None:
    sphinx = yaml.safe_load((ROOT / "_config.yml").read_text("utf-8"))["sphinx"]
    assert set(EXTENSIONS) <= set(sphinx["local_extensions"])
    assert set(EXTENSIONS) <= set(sphinx["config"]["extensions"])
    assert sphinx["config"]["myst_heading_anchors"] >= 2


# ------------------------------------------------------------------------------------------ numbers


def test_the_register_is_up_to_date() -> None:
    assert audit.register(ROOT) == []


def test_the_register_says_what_vouches_for_a_number(book: TinyBook) -> None:
    (book.root / "benchmarks/results").mkdir(parents=True)
    result = '{"device": "a CPU", "date": "2026-11-30", "commit": "abc", "statistic": "median", "headline": {"x": 2.5}}'
    (book.root / "benchmarks/results/speed.json").write_text(result)
    prose = "md # Pool\n\n5 MiB, and 2.5 times. Theirs was 7 GiB {cite}`kwon`. Not ~~6 MiB~~. Twice: 5 MiB."
    load = 'import json\nresult = json.load(open("../benchmarks/results/speed.json"))'
    sync(book.write("03_pool", prose, "print(5)", load, 'row = result["headline"]\nprint(row)', "md ## Later\n\n8 s."))
    book.pretend_executed("03_pool", "5 MiB\n", "", "measured: 2.5 times\n")
    found = number_register.numbers_of(book.notebook("03_pool"), {"speed": "2026-11-30"})
    assert [(n.quantity, n.kind, n.section, n.source, n.date) for n in found] == [
        ("5 MiB", "computed", "the opening", "cell 2", ""),
        ("2.5 times", "measured", "the opening", "cell 4, from `speed.json`", "2026-11-30"),
        ("7 GiB", "cited", "the opening", "{cite}`kwon`", ""),
        ("6 MiB", "struck", "the opening", "a mistake", ""),
        ("8 s", "loose", "Later", "nothing", ""),
    ]
    page = number_register.page(book.root)
    assert "| 5 MiB | computed | [the opening](03_pool.ipynb) | cell 2 |  |" in page
    assert "| 8 s | loose | [Later](03_pool.ipynb#later) | nothing |  |" in page
    assert "### `speed.json`" in page
    assert "Shown in: [03](03_pool.ipynb)." in page
    assert number_register.page(book.root) == page


def test_the_register_knows_the_pages_by_hand(book: TinyBook) -> None:
    sync(book.write("03_pool", "md # Pool", "print(5)"))
    book.pretend_executed("03_pool", "5 MiB\n")
    text = "# B\n\n## One\n\n5 MiB: [there](03_pool.ipynb#x). 7 s {cite}`k`, not 5 MiB. 8 s.\n"
    (book.root / "book/building.md").write_text(text)
    found = number_register.numbers_of_page(book.root, "building", {})
    assert [(number.quantity, number.kind, number.section, number.source) for number in found] == [
        ("5 MiB", "computed", "One", "[03](03_pool.ipynb), cell 2"),
        ("7 s", "cited", "One", "{cite}`k`"),
        ("8 s", "loose", "One", "nothing"),
    ]


def test_no_number_of_the_book_is_loose() -> None:
    rows = re.findall(r"(?m)^\| .* \| (\w+) \| \[.*\]\(", text_of("numbers"))
    assert len(rows) > 250
    assert set(rows) == {"computed", "measured", "cited", "struck"}


@pytest.mark.parametrize(
    ("source", "files"),
    [
        ('x = json.load(open("../benchmarks/results/a.json"))', ("a",)),
        ("print(y)", ("b",)),
        ("z = y['rows']\nfor w in z:\n    print(w)", ("b",)),
        ("print(free)", ()),
        ("def f():\n    return y", ()),
        ("this is no Python", ()),
    ],
)
def test_a_value_is_followed_to_its_file(source: str, files: tuple[str, ...]) -> None:
    assert number_register.files_read(source, {"y": frozenset({"b"})}) == files


# ------------------------------------------------------------------------------------------ mistakes

# What circulates, and what the computation must print where it is settled (struck in the same box).
CIRCULATING = [
    ("92 MiB", "93.75 MiB, 92.68 %"),
    ("2,700", "538"),
    ("320 GiB", "305.2 GiB"),
    ("4 times the table entries", "2.0 times"),
    ("625 GiB", "610.35 GiB"),
    ("3.9 times", "4.0 times"),
    ("1.15 KiB", "1.125 KiB"),
    ("come to share the blocks", "written apart: [2, 3]"),
    ("8 blocks of together 640 MiB", "8 blocks 40 MiB"),
    ("8 blocks", "125 blocks"),
    ("copy that block", "0 copies"),
    ("one 5 MiB slab", "64 KiB, 80 times"),
    ("no isolation of tenants", ""),
    ("swap to 4 GiB", "13,107 tokens"),
    ("16 GiB", "OPT-13B 100 GiB"),
    ("a block size of 16 slow", "blocks of   16"),
]


@pytest.mark.parametrize(("said", "computed"), CIRCULATING)
def test_a_mistake_in_circulation_is_struck_and_settled(said: str, computed: str) -> None:
    boxes = [
        box
        for box in collected_mistakes.all_mistakes()
        if any(said in " ".join(struck.split()) for struck in re.findall(r"(?s)~~(.*?)~~", box.said))
    ]
    assert any(computed in box.printed for box in boxes)


def test_every_box_is_settled_by_a_computation() -> None:
    found = collected_mistakes.all_mistakes()
    assert len(found) >= 15
    assert [box.page for box in found if not box.printed or not box.code or "~~" not in box.said] == []
    for _part, page in collected_mistakes.contents():
        if (BOOK / f"{page}.py").exists():
            boxes = (BOOK / f"{page}.py").read_text("utf-8").count("{admonition} Check it yourself")
            assert sum(box.page == page for box in found) == boxes, page


def test_boxes_are_read_from_a_notebook() -> None:
    def cell(kind: str, source: str, *outputs: dict[str, Any], tags: tuple[str, ...] = ()) -> dict[str, Any]:
        return {"cell_type": kind, "source": source, "metadata": {"tags": list(tags)}, "outputs": list(outputs)}

    box = ":::{admonition} Check it yourself\n:class: warning\n- It is ~~3~~ 4, see [it](../x).\n- Two ~~a~~ b.\n:::"
    notebook = {
        "cells": [
            cell("markdown", "# The pool\n\nAn opening."),
            cell("markdown", f"## First\n\nText.\n\n## `Second`: it\n\n{box}\n\nMore."),
            cell("code", "print(4)", {"output_type": "stream", "text": ["4\n"]}),
            cell("code", "plot()", {"data": {"image/png": "x", "text/plain": "<Figure>"}}, tags=("hide-input",)),
            cell("code", "5", {"data": {"text/plain": "5"}}),
            cell("markdown", "Other prose."),
            cell("code", "print(6)", {"output_type": "stream", "text": "6\n"}),
        ]
    }
    (found,) = collected_mistakes.mistakes_of("labs/L1_x", notebook)
    assert (found.title, found.section) == ("The pool", "`Second`: it")
    assert found.said.startswith("- It is ~~3~~ 4")
    assert len(collected_mistakes.claims(found)) == 2
    assert (found.code, found.printed) == ("print(4)\n\n5", "4\n5")
    text = collected_mistakes.markdown([found])
    assert "## L1 The pool" in text
    assert "[Second: it](labs/L1_x.ipynb#second-it)" in text
    assert "see [it](x)." in text


def test_the_page_of_mistakes_has_its_marks() -> None:
    assert "<!-- mistakes -->" in text_of("mistakes")
    assert "<!-- mistakes-count -->" in text_of("mistakes")


# ------------------------------------------------------------------------------------------ glossary and notation


def test_the_glossary_has_each_word_once_and_leads_to_chapters() -> None:
    terms = audit.glossary_terms(text_of("glossary"))
    assert len(terms) == len(set(terms)) > 80
    entries = re.split(r"\n\n(?=\S)", "\n\n".join(re.findall(r"(?s)```\{glossary\}\n(.*?)```", text_of("glossary"))))
    assert [entry.splitlines()[0] for entry in entries if ".ipynb)" not in entry] == []
    assert chapter_links.ORDINARY & set(terms)


def test_the_first_use_of_a_word_leads_to_the_glossary() -> None:
    def paragraph(text: str) -> nodes.paragraph:
        return nodes.paragraph("", "", nodes.Text(text))

    page = utils.new_document("page")
    card = nodes.container("", paragraph("block table, knee"), design_component="card")
    code = nodes.paragraph("", "", nodes.literal("", "epoch"), nodes.Text(" of Block tables, block\ntables; swapped."))
    page += [nodes.title("", "The epoch"), card, code, paragraph("An epoch. A hit rate's end. Subepoch.")]
    linked = chapter_links.link_words(page, "03_pool", ("block table", "hit rate", "epoch", "swap", "knee"))
    assert linked == ["block table", "hit rate", "epoch"]
    found = [(node["reftarget"], node.astext()) for node in page.findall(addnodes.pending_xref)]
    assert found == [("block table", "Block tables"), ("epoch", "epoch"), ("hit rate", "hit rate")]
    assert "block\ntables" in page.astext(), "the second use stays as it is"


def test_ordinary_words_are_left_alone() -> None:
    assert not chapter_links.ORDINARY & set(chapter_links.glossary_terms())
    assert "reference count" in chapter_links.glossary_terms()


def test_the_notation_is_that_of_the_code() -> None:
    text = text_of("notation")
    package = "\n".join(path.read_text("utf-8") for path in (ROOT / "paged_kv").glob("*.py"))
    names = re.findall(r"(?m)^\| \$.*?\$ \| `(\w+)` \|", text)
    assert "num_q_heads" in names
    assert [name for name in names if not re.search(rf"\b{name}\b", package)] == []
    for spelling in ("num_heads", "num_query_heads", "n_heads", "head_dim"):
        assert spelling not in names


# ------------------------------------------------------------------------------------------ cheat sheet


def test_the_cheat_sheet_runs() -> None:
    code = re.search(r"(?s)```python\n(.*?)```", text_of("cheat_sheet"))
    assert code is not None
    space: dict[str, Any] = {}
    exec(code[1], space)
    assert f"{space['num_blocks']:,}" == "27,648"
    assert "27,648" in code[1]
    assert len(space["pairs"]) == 1
    assert space["found"] == 8
    assert "found: 8" in code[1]
    assert [output.completions[0].token_ids for output in space["done"]] == [[7, 7]]


def test_the_sums_of_the_cheat_sheet() -> None:
    from paged_kv import KVSpec, blocks_for, tail_waste
    from paged_kv.sizing import format_bytes

    rows = re.findall(r"(?m)^\| ([\w .-]+) \| (\d+) \| (\d+) \| (\d+) \| (.+?) \| (.+?) \|$", text_of("cheat_sheet"))
    assert len(rows) == 3
    for _, layers, heads, size, token, block in rows:
        spec = KVSpec(int(layers), int(heads), int(size), "fp16")
        assert format_bytes(spec.bytes_per_token) == token
        assert format_bytes(spec.bytes_per_block(16)) == block
    for n in range(1, 50):
        for size in (1, 4, 16):
            assert blocks_for(n, size) == -(-n // size)
            assert tail_waste(n, size) == -(-n // size) * size - n <= size - 1
            assert (n - 1) // size * size <= n - 1


def test_the_cheat_sheet_has_the_invariants_of_the_notation() -> None:
    numbers = re.findall(r"(?m)^\| (I\d+) \|", text_of("notation"))
    assert numbers == re.findall(r"(?m)^- \*\*(I\d+)\*\*", text_of("cheat_sheet"))
    assert numbers == [f"I{n}" for n in range(1, len(numbers) + 1)]


def test_the_cheat_sheet_names_what_there_is() -> None:
    import paged_kv

    text = text_of("cheat_sheet")
    for name in re.findall(r"(?m)^from paged_kv import (.*)$", text):
        assert set(name.split(", ")) <= set(paged_kv.__all__)
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert [target for target in re.findall(r"(?m)^make (\w+)", text) if f"\n{target}:" not in makefile] == []


def test_the_cheat_sheet_prints_on_one_page(tmp_path: Path) -> None:
    html = Path(os.environ.get("PAGED_KV_HTML", ROOT / "_build/html")).resolve() / "cheat_sheet.html"
    if not html.exists():
        pytest.skip("no built book: run make book")
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no browser found")
    pdf = tmp_path / "sheet.pdf"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
    flags += ["--disable-background-networking", "--disable-component-update", "--virtual-time-budget=8000"]
    flags += ["--no-pdf-header-footer", f"--print-to-pdf={pdf}", html.as_uri()]
    subprocess.run([browser, *flags], check=True, capture_output=True, timeout=120)
    assert len(re.findall(rb"/Type\s*/Page\b(?!s)", pdf.read_bytes())) == 1
    box = re.search(rb"/MediaBox\s*\[\s*0\s+0\s+([\d.]+)\s+([\d.]+)", pdf.read_bytes())
    assert box is not None
    assert [round(float(side)) for side in box.groups()] == [595, 842]


# ------------------------------------------------------------------------------------------ building and changes


def test_every_statement_of_the_building_page_leads_to_a_chapter() -> None:
    sections = re.split(r"(?m)^## ", text_of("building"))[1:]
    assert len(sections) >= 8
    assert [part.splitlines()[0] for part in sections if not re.search(r"\.ipynb#[\w-]+\)|\{ref\}`ex-", part)] == []


def test_every_chapter_has_its_changes() -> None:
    pages = {path.stem for path in BOOK.glob("[01][0-9]_*.ipynb")}
    assert [page for page in sorted(pages) if f"({page}.ipynb)" not in text_of("changes")] == []


# ------------------------------------------------------------------------------------------ API


def test_exports_lead_to_the_api() -> None:
    homes = chapter_links.homes()
    assert homes["block_pool"] == homes["paged_kv/block_pool.py"] == "module-paged_kv.block_pool"
    assert homes["BlockPool"] == "paged_kv.block_pool.BlockPool"
    page = utils.new_document("page")
    names = ("block_pool", "BlockPool", "nothing", "copy_on_write", "blocks_needed")
    literals = [nodes.literal("", name) for name in names]
    page += nodes.paragraph("", "", nodes.Text(""), nodes.strong("", "Exports"), nodes.Text(": "), *literals)
    page += nodes.paragraph("", "", nodes.strong("", "Device"), nodes.literal("", "BlockPool"))
    chapter_links.link_exports(None, "labs/L1_x", page)  # type: ignore[arg-type]
    assert [node["refuri"] for node in page.findall(nodes.reference)] == [
        "../api.html#module-paged_kv.block_pool",
        "../api.html#paged_kv.block_pool.BlockPool",
        "../api.html#module-paged_kv.copy_on_write",
        "../api.html#paged_kv.copy_on_write.blocks_needed",
    ]


def test_every_module_of_a_card_is_known() -> None:
    known = chapter_links.homes()
    for path in BOOK.rglob("[0-9AL]*.py"):
        tags = set(re.findall(r'"export:(\w+)"', path.read_text("utf-8")))
        assert tags <= set(known), path.stem


def test_exported_cells_lead_to_the_api() -> None:
    page = utils.new_document("page")
    label = nodes.paragraph("", "in paged_kv/block_pool.py", classes=["exported-label"])
    cell = nodes.container("", label, nb_element="cell_code", cell_metadata={"tags": ["export:block_pool"]})
    page += cell
    chapter_links.link_labels(None, "03_block_manager", page)  # type: ignore[arg-type]
    (reference,) = page.findall(nodes.reference)
    assert reference["refuri"] == "api.html#module-paged_kv.block_pool"


# ------------------------------------------------------------------------------------------ weight


@pytest.mark.parametrize(
    ("name", "gone"),
    [
        ("_static/mathjax/tex-chtml.js", False),
        ("_static/mathjax/output/chtml/fonts/woff-v2/MathJax_Main-Regular.woff", False),
        ("_static/mathjax/input/tex/extensions/cancel.js", False),
        ("_static/mathjax/sre/mathmaps/en.json", False),
        ("_static/mathjax/tex-svg-full.js", True),
        ("_static/mathjax/output/svg/fonts/tex.js", True),
        ("_static/mathjax/sre/mathmaps/hi.json", True),
        ("_static/scripts/fontawesome.js", False),
        ("_static/scripts/fontawesome.js.map", True),
        ("_static/locales/de/LC_MESSAGES/booktheme.mo", True),
        ("index.html", False),
        ("_sources/03_block_manager.ipynb", False),
    ],
)
def test_what_no_page_loads_is_left_out(name: str, gone: bool, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("12345")
    assert lean_build.prune(tmp_path) == 5 * gone
    assert path.exists() is not gone
    assert gone is not any(tmp_path.iterdir()), "empty folders go too"
