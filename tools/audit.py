"""Audits of the book: what its tests hold against it, each as a command that says page and sentence.

    python tools/audit.py [AUDIT ...] [--chapter NN] [--html FOLDER]

Without names, all that take seconds.  `outputs` runs the chapters afresh (all, or those of --chapter) and compares;
`built` and `weight` look at the built book in --html.  Exits 1 where something is wrong.  --list names them all.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import audit_html
from chapters import ROOT, BookError, Cell, Chapter, find_chapters, main, read_ipynb
from check_prose import (
    CITATION,
    CODE,
    ROLE,
    STRUCK,
    code_spans,
    known_names,
    loose_numbers,
    printed,
    quantities,
    sentences,
    unknown_names,
)
from nbformat import NotebookNode
from number_register import PAGE as REGISTER
from number_register import page as register_page
from number_register import slug, without_code

MAX_COLUMNS = 100
# Pages that a tool writes: their numbers are those of the chapters.
WRITTEN = {"numbers"}


@dataclass(frozen=True)
class Text:
    """A piece of Markdown, and where it stands."""

    where: str
    page: str  # below book/, without suffix; "" for a file at the root
    markdown: str


def texts(root: Path) -> Iterator[Text]:
    """All prose: the Markdown cells of the chapters, the pages beside them, and the files at the root."""
    for chapter in find_chapters(root):
        page = chapter.name.removeprefix("book/")
        for index, cell in enumerate(chapter.cells()):
            if cell.kind == "markdown":
                yield Text(chapter.where(index, cell), page, cell.source)
    for path in sorted((root / "book").glob("*.md")):
        yield Text(f"book/{path.name}", path.stem, path.read_text("utf-8"))
    for path in sorted(root.glob("*.md")):
        yield Text(path.name, "", path.read_text("utf-8"))


def plain(markdown: str) -> str:
    """Prose without code, roles, directives' options, addresses, HTML and formulas."""
    text = CODE.sub(" ", ROLE.sub(" ", without_code(markdown)))
    text = re.sub(r"<[^>]*>", " ", text)
    text = re.sub(r"https?://\S+|\]\([^)]*\)", " ", text)
    text = re.sub(r"(?m)^:[\w-]+:.*$|^\s*:{3,}.*$", " ", text)
    return re.sub(r"(?s)\$\$.*?\$\$|\$[^$]*\$", " ", text)


def clip(text: str) -> str:
    """The first 60 characters of a text, on one line."""
    text = " ".join(text.split())
    return text if len(text) <= 60 else text[:57] + "..."


# ------------------------------------------------------------------------------------------ numbers


def numbers(root: Path) -> list[str]:
    """A number with a unit that no output vouches for, in a chapter or on a page."""
    found = [
        line
        for chapter in find_chapters(root)
        if chapter.ipynb.exists()
        for line in loose_numbers(chapter, read_ipynb(chapter.ipynb))
    ]
    for text in texts(root):
        if (root / "book" / f"{text.page}.md").exists() and text.page not in WRITTEN:
            found += [f"{text.where}: {line}" for line in loose_on_page(root, text.page, text.markdown)]
    return found


def loose_on_page(root: Path, page: str, markdown: str) -> Iterator[str]:
    """The numbers of a page by hand that no chapter prints to which the same section links; no link, any chapter."""
    for section in re.split(r"(?m)^(?=## )", without_code(markdown)):
        links = {Path(link).stem for link in re.findall(r"\]\(([^)#\s]+\.ipynb)", section)}
        for sentence in sentences(STRUCK.sub(" ", section)):
            if CITATION.search(sentence):
                continue
            for quantity in quantities(CODE.sub(" ", ROLE.sub(" ", sentence))):
                if quantity not in printed_in_book(root, frozenset(links)) and quantity not in definitions(page):
                    said = f"printed by none of {sorted(links)}" if links else "printed by no chapter"
                    yield f"({clip(sentence)}): {quantity!r} is {said}"


def definitions(page: str) -> set[str]:
    """The quantities that the notation page defines."""
    return {"64 B", "1024 B", "1024 KiB", "1024 MiB"} if page == "notation" else set()


@functools.cache
def printed_in_book(root: Path, stems: frozenset[str]) -> frozenset[str]:
    """Every quantity that these chapters print, or all if none is named."""
    found: set[str] = set()
    for chapter in find_chapters(root):
        if chapter.ipynb.exists() and (not stems or chapter.stem in stems):
            for cell in read_ipynb(chapter.ipynb).cells:
                if cell.cell_type == "code":
                    found |= set(quantities("\n".join(part for output in cell.outputs for part in printed(output))))
    return frozenset(found)


def register(root: Path) -> list[str]:
    """The register of numbers is not what the chapters and results give."""
    path = root / REGISTER
    if path.exists() and path.read_text("utf-8") == register_page(root):
        return []
    return [f"{REGISTER} is out of date: run `python tools/number_register.py`"]


def names(root: Path) -> list[str]:
    """A name in backticks on a page by hand that exists nowhere; chapters have a test of their own."""
    known = known_names(root)
    found = []
    for text in texts(root):
        if (root / "book" / f"{text.page}.md").exists() and text.page not in WRITTEN:
            spans = dict.fromkeys(code_spans(without_code(text.markdown)))
            found += [f"{text.where}: {name!r} exists nowhere" for span in spans for name in unknown_names(span, known)]
    return found


# ------------------------------------------------------------------------------------------ links


def links(root: Path) -> list[str]:
    """A link, reference or term that leads nowhere."""
    every = list(texts(root))
    heads = headings(every)
    labels = {label for text in every for label in re.findall(r"(?m)^:label: (\S+)|^\(([\w-]+)\)=", text.markdown)
              for label in label if label}  # fmt: skip
    terms = {term.lower() for text in every for term in glossary_terms(text.markdown)}
    found = []
    for text in every:
        prose = CODE.sub(" ", without_code(ROLE.sub(lambda role: role[0].replace("`", "\x00"), text.markdown)))
        for target in re.findall(r"\]\(([^)\s]*)\)", prose):
            if not re.match(r"[a-z]+:", target) and (said := dead_link(root, text, target, heads, labels)):
                found.append(f"{text.where}: {said}")
        for role, content in re.findall(r"\{(term|ref|numref|doc|solution-start)\}\x00([^\x00]*)\x00", prose):
            target = re.sub(r".*<(.*)>", r"\1", " ".join(content.split()))
            known = {"term": terms, "doc": {f"/{page}" for page in heads}}.get(role, labels)
            if (target.lower() if role == "term" else target) not in known:
                found.append(f"{text.where}: {{{role}}}`{target}` leads nowhere")
        for label in re.findall(r"(?m)^:{3,}\{solution\} (\S+)", text.markdown):
            if label not in labels:
                found.append(f"{text.where}: a solution to {label}, which is no exercise")
    return found


def headings(every: Sequence[Text]) -> dict[str, set[str]]:
    """The anchors of each page."""
    found: dict[str, set[str]] = {}
    for text in every:
        anchors = found.setdefault(text.page, set())
        anchors |= {slug(head) for head in re.findall(r"(?m)^#{1,3} (.*)$", without_code(text.markdown))}
    return found


def glossary_terms(markdown: str) -> list[str]:
    """The words that a glossary explains."""
    blocks = re.findall(r"(?s)```\{glossary\}.*?\n(.*?)```", markdown)
    return [word.strip() for block in blocks for word in re.findall(r"(?m)^(\S.*)$", block)]


def dead_link(root: Path, text: Text, target: str, heads: dict[str, set[str]], labels: set[str]) -> str:
    """What is wrong with a link to a file of the project, or nothing."""
    path, _, anchor = target.partition("#")
    if not path:
        found = anchor in heads.get(text.page, set()) | labels
        return "" if found else f"#{anchor} is no heading of this page"
    folder = root / "book" / Path(text.page).parent if text.page else root
    file = root / "book" / path[1:] if path.startswith("/") else folder / path
    options = [file, *(file.with_name(file.name + suffix) for suffix in (".md", ".ipynb", ".py"))]
    if not any(option.is_file() for option in options):
        return f"{target} does not exist"
    page = file.resolve().relative_to(root.resolve()).as_posix().removeprefix("book/")
    page = re.sub(r"\.(md|ipynb|py)$", "", page)
    if anchor and page in heads and anchor not in heads[page]:
        return f"{target}: no such heading"
    return ""


def bibliography(root: Path) -> list[str]:
    """A citation without an entry, an entry never cited, an entry that is not whole."""
    source = (root / "book/references.bib").read_text("utf-8")
    entries = dict(re.findall(r"(?ms)^@\w+\{([\w:-]+),\n(.*?)^\}", source))
    cited: dict[str, str] = {}
    for text in texts(root):
        if text.page:
            for role in CITATION.finditer(without_code(text.markdown)):
                cited |= {key.strip(): text.where for key in role[0].split("`")[1].split(",")}
    found = [f"{where}: {key} is not in references.bib" for key, where in cited.items() if key not in entries]
    found += [f"references.bib: {key} is never cited" for key in entries if key not in cited]
    for key, body in entries.items():
        found += [f"references.bib: {key} {said}" for said in entry_faults(body)]
    return found


def entry_faults(body: str) -> Iterator[str]:
    """What is missing from an entry of the bibliography, or contradicts itself."""
    fields = dict(re.findall(r"(?m)^\s*(\w+)\s*=\s*\{(.*)\},?$", body))
    yield from (f"has no {name}" for name in ("title", "author", "year", "url") if not fields.get(name))
    numbers = set(re.findall(r"(?:arXiv:|arxiv\.org/abs/)(\d{4}\.\d{4,5})", body))
    if len(numbers) > 1:
        yield f"names two papers: {sorted(numbers)}"
    if "arxiv.org/" in body and not numbers:
        yield "has no address of the form arxiv.org/abs/NUMBER"
    for number in numbers:
        if not 0 <= int(fields.get("year") or 0) - 2000 - int(number[:2]) <= 2:
            yield f"is of {fields.get('year')}, arXiv:{number} is not"


def external(root: Path) -> list[str]:
    """An address outside that is not written as it should be."""
    found = []
    bib = Text("references.bib", "references", (root / "book/references.bib").read_text("utf-8"))
    for text in [*texts(root), bib]:
        for url in re.findall(r"https?://[^\s)\]}>\"'`]+", text.markdown):
            if said := address_fault(url):
                found.append(f"{text.where}: {url} {said}")
    return found


def address_fault(url: str) -> str:
    """What is wrong with the form of an address, or nothing."""
    host = url.split("/")[2]
    if not url.startswith("https://"):
        return "is not https"
    if "@" in host or ":" in host or "." not in host or re.fullmatch(r"[\d.]+", host):
        return "is no public host"
    if url[-1] in ".,;:!?":
        return "ends in punctuation"
    if re.search(r"[?&](utm_|ref=|fbclid)", url):
        return "tracks its reader"
    return "is not of the form arxiv.org/abs/..." if "arxiv.org/pdf" in url else ""


# ------------------------------------------------------------------------------------------ pictures


def pictures(root: Path) -> list[str]:
    """A picture that says nothing to who cannot see it."""
    found = []
    for chapter in find_chapters(root):
        if chapter.ipynb.exists():
            found += wordless(chapter, read_ipynb(chapter.ipynb))
    for text in texts(root):
        for alt, target in re.findall(r"!\[([^\]]*)\]\(([^)]*)\)", CODE.sub(" ", without_code(text.markdown))):
            if not alt.strip():
                found.append(f"{text.where}: the picture {target} has no alternative text")
    for path in sorted((root / "book/_static").glob("*.svg")):
        if said := mute_svg(path.read_text("utf-8")):
            found.append(f"book/_static/{path.name}: {said}")
    return found


def wordless(chapter: Chapter, notebook: NotebookNode) -> Iterator[str]:
    """The pictures among a notebook's outputs that have no words."""
    cells = notebook.cells
    for index, cell in enumerate(cells):
        if cell.cell_type != "code":
            continue
        where = chapter.where(index, Cell("code", cell.source))
        below = cells[index + 1] if index + 1 < len(cells) else None
        caption = below is not None and below.cell_type == "markdown" and below.source.startswith("*Figure:")
        for output in cell.outputs:
            data = output.get("data", {})
            if any(kind.startswith("image/") for kind in data) and not caption:
                yield f"{where}: its picture has no *Figure: ...* below"
            html = "".join(data.get("text/html", ""))
            yield from (f"{where}: {said}" for svg in re.findall(r"(?s)<svg.*?</svg>", html) if (said := mute_svg(svg)))
            for image in re.findall(r"<img[^>]*>", html):
                if not re.search(r'alt="[^"]+', image):
                    yield f"{where}: an image without alternative text"


def mute_svg(svg: str) -> str:
    """What a drawing lacks for a screen reader, or nothing."""
    head = svg[: svg.index(">") + 1] if ">" in svg else svg
    if 'aria-hidden="true"' in head:
        return ""
    described = re.search(r'aria-label="[^"]+"', head) or re.search(r"<desc>[^<]+</desc>", svg)
    if not described:
        return "a drawing without aria-label or desc"
    return "" if re.search(r"<title>[^<]+</title>", svg) else "a drawing without title"


# ------------------------------------------------------------------------------------------ words


def words_of(root: Path) -> set[str]:
    """The book's own words: book/words.txt, and whatever stands in backticks is not looked at anyway."""
    path = root / "book/words.txt"
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return {word.lower() for line in lines for word in line.partition("#")[0].split()}


def spelling(root: Path) -> list[str]:
    """A word that is neither in the dictionary nor in book/words.txt."""
    try:
        from spellchecker import SpellChecker
    except ImportError:
        return ["pyspellchecker is not installed: pip install pyspellchecker"]
    own, checker, where = words_of(root), SpellChecker(), {}
    for text in texts(root):
        for word in re.findall(r"[A-Za-z]+(?:['’][a-z]+)?", plain(text.markdown)):
            base = re.sub(r"['’]s?$", "", word.replace("’", "'").lower())
            if len(base) > 2 and base not in own:
                where.setdefault(base, text.where)
    return [f"{where[word]}: {word!r} is in no word list" for word in sorted(checker.unknown(where))]


AMERICAN = re.compile(
    r"\b(?:colors?|colored|coloring|behaviors?|favors?|favorite|neighbors?|neighboring|honors?|labor|centers?|centered|"
    r"fibers?|theater|analyz\w+|catalogs?|modeling|modeled|labeled|labeling|canceled|canceling|traveled|gray|defense|"
    r"offense|(?:optim|normal|recogn|organ|quant|general|summar|minim|maxim|serial|initial|synchron|token|special|util|"
    r"memor|material|vector|parallel|final|prior|real|emphas|visual|standard|character)iz(?:e[sdr]?|ers|ing|ations?))\b",
    re.IGNORECASE,
)
THEIRS = {"tokenizer", "tokenizers"}  # the name of a thing in transformers


def british(root: Path) -> list[str]:
    """An American spelling in prose; titles and names of others are exempt where cited or linked."""
    found = []
    for text in texts(root):
        # What stands in italics with a capital is a title, and the text of a link outwards may be one.
        prose = re.sub(r"\[[^\]]*\]\(http[^)]*\)|\*[A-Z][^*]*\*|\*max utilization\*", " ", text.markdown)
        words_there = (match[0] for match in AMERICAN.finditer(plain(prose)))
        found += [f"{text.where}: {word!r} is spelt the American way" for word in words_there if word not in THEIRS]
    return found


LOUD = (
    "blazing", "game-changing", "game changer", "cutting-edge", "cutting edge", "revolutionary", "seamless",
    "seamlessly", "delve", "dive into", "let's dive", "deep dive", "unlock", "unleash", "supercharge", "effortless",
    "effortlessly", "world-class", "next-generation", "magic", "magical", "super fast", "lightning", "needless to say",
    "as we all know", "it is important to note", "in today's", "leverage", "leverages", "leveraging", "synergy",
)  # fmt: skip
MACHINE = re.compile(r"(?<![\w.~}/>:-])/(?:work|opt|root|mnt|home(?!/you)|Users|srv)/\w[\w./-]*")
LEFT_OVER = re.compile(r"\b(?:TODO|FIXME|XXX|TBD)\b(?! in )|lorem ipsum", re.IGNORECASE)


def words(root: Path) -> list[str]:
    """A loud word, a left-over, a path of somebody's machine, dashes in chains."""
    found = []
    for text in texts(root):
        prose = plain(text.markdown)
        lowered = " ".join(prose.lower().split())
        found += [f"{text.where}: {word!r}" for word in LOUD if re.search(rf"\b{re.escape(word)}\b", lowered)]
        found += [f"{text.where}: {left!r} is left over" for left in LEFT_OVER.findall(prose)]
        chains = (part for part in sentences(prose) if part.count("—") > 1)
        found += [f"{text.where}: {clip(part)!r} is a chain of dashes" for part in chains]
        found += [f"{text.where}: {path} is a path of one machine" for path in MACHINE.findall(text.markdown)]
    for path in machine_files(root):
        for where in MACHINE.findall(path.read_text("utf-8")):
            found.append(f"{path.relative_to(root).as_posix()}: {where} is a path of one machine")
    return found


def machine_files(root: Path) -> list[Path]:
    """The files in which a path of the machine may have been stored: package, tools, results, outputs."""
    patterns = ("paged_kv/*.py", "tools/*.py", "benchmarks/*.py", "benchmarks/results/*.json", "book/**/*.ipynb")
    return sorted(path for pattern in patterns for path in root.glob(pattern) if path.name != "audit.py")


def columns(root: Path) -> list[str]:
    """Code of more than 100 columns, which a page clips; the longer lines of an output go on below."""
    found = []
    for chapter in find_chapters(root):
        notebook = read_ipynb(chapter.ipynb) if chapter.ipynb.exists() else None
        for index, cell in enumerate(notebook.cells if notebook else []):
            if cell.cell_type != "code" or "remove-input" in cell.metadata.get("tags", ()):
                continue
            if (wide := max(map(len, cell.source.splitlines()), default=0)) > MAX_COLUMNS:
                found.append(f"{chapter.where(index, Cell('code', cell.source))}: code of {wide} columns")
    return found


def invariants(root: Path) -> list[str]:
    """A number of an invariant that two chapters define, or that the notation page lacks."""
    owner: dict[str, str] = {}
    found = []
    for text in texts(root):
        for number in re.findall(r"(?m)^> \*\*(I\d+)\.\*\*", text.markdown):
            if owner.setdefault(number, text.page) != text.page:
                found.append(f"{text.where}: {number} is defined in {owner[number]} already")
    notation = root / "book/notation.md"
    listed = set(re.findall(r"(?m)^\| (I\d+) \|", notation.read_text("utf-8"))) if notation.exists() else set()
    missing = [number for number in owner if number not in listed]
    return found + [f"book/notation.md: {number} of {owner[number]} is missing" for number in missing]


# ------------------------------------------------------------------------------------------ outputs


def outputs(root: Path, wanted: Sequence[str] = ()) -> list[str]:
    """Stored outputs that a fresh run does not give: the source changed and nobody ran it."""
    from execute import execute

    found = []
    for chapter in find_chapters(root, wanted):
        start = time.perf_counter()
        changed, _ = execute(chapter, check=True)
        print(f"    {chapter.stem}: {time.perf_counter() - start:.0f} s", flush=True)
        found += [f"{line}: its output is stale" for line in changed]
    return found


# ------------------------------------------------------------------------------------------ all of them

QUICK: dict[str, Callable[[Path], list[str]]] = {
    "numbers": numbers, "register": register, "names": names, "links": links, "bibliography": bibliography,
    "external": external, "pictures": pictures, "spelling": spelling, "british": british, "words": words,
    "columns": columns, "invariants": invariants,
}  # fmt: skip
SLOW = {"outputs": outputs, "built": audit_html.built, "weight": audit_html.weight}


def first_line(function: Callable[..., list[str]]) -> str:
    """What an audit finds, in one line."""
    return (ast.literal_eval(repr(function.__doc__)) or "").splitlines()[0]


def _run() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("audits", nargs="*", metavar="AUDIT")
    parser.add_argument("--chapter", action="append", default=[], metavar="NN", help="for `outputs`: run this one")
    parser.add_argument("--html", type=Path, default=ROOT / "_build/html", help="the built book")
    parser.add_argument("--list", action="store_true", help="name the audits")
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{name:13} {first_line(function)}" for name, function in {**QUICK, **SLOW}.items()))
        return 0
    failed = False
    for name in options.audits or QUICK:
        if name not in QUICK and name not in SLOW:
            raise BookError(f"{name!r}: no such audit; there are {', '.join([*QUICK, *SLOW])}")
        if name == "outputs":
            found = outputs(ROOT, options.chapter)
        else:
            found = QUICK[name](ROOT) if name in QUICK else SLOW[name](options.html)
        print(f"{name}: {len(found) or 'nothing'}" + "".join(f"\n    {line}" for line in found), flush=True)
        failed |= bool(found)
    return int(failed)


if __name__ == "__main__":
    main(_run)
