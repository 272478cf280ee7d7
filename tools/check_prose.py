"""Hold the prose of a chapter against its code and its outputs.

    python tools/check_prose.py [NN ...]

Numbers: one with a unit, % or "times" must stand, same digits and unit, in a text output of its own `##` section,
or its sentence has a citation, or it is ~~struck~~.  Names: what stands in backticks and looks like code must exist in
the project's code, among its files, in a well-known library, or in book/names.txt with a reason.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import functools
import importlib
import io
import itertools
import keyword
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from chapters import (
    ROOT,
    Chapter,
    find_chapters,
    main,
    package_trees,
    read_ipynb,
)
from nbformat import NotebookNode

# ------------------------------------------------------------------------------------------ prose

CITATION = re.compile(r"\{cite(?::\w+)?\}`[^`]*`")
FENCE = re.compile(r"(?ms)^[ \t]*(```+|~~~+)(?!\{).*?^[ \t]*\1[ \t]*$")
STRUCK = re.compile(r"(?s)~~.*?~~")
ROLE = re.compile(r"\{[\w:.+-]+\}`[^`]*`")
CODE = re.compile(r"(?s)(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)")
ITEM = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*+]|\d+\.)\s)|\n(?=\s*\|)|\n(?=\s*:{3,})|(?<=[.!?])[)\"*]*\s+(?=[^\sa-z])")


def sentences(markdown: str) -> Iterator[str]:
    """The sentences, list items and table rows of a Markdown cell; headings and fenced code left out."""
    text = FENCE.sub("", markdown)
    text = re.sub(r"(?m)^[ \t]*#{1,6}[ \t].*$", "", text)
    text = re.sub(r"(?m)^[-*\s]*\*\*Run time\*\*.*$", "", text)
    for part in ITEM.split(text):
        if part and part.strip():
            yield part.strip()


# ------------------------------------------------------------------------------------------ numbers

# Longer units first.  B and s need a blank before them: 8B is a model, 1980s a decade.
UNITS = r"""
    (?:[KMGT]i?B|kB|B)/(?:s|token|ms)|[KMGT]iB|[kKMGT]B
    |(?:tokens|requests|steps|blocks|sequences|copies|lookups)/s|T?GFLOPS?(?:/s)?|TFLOPS?(?:/s)?|FLOPS?/B
    |[GMk]Hz|ns|us|µs|μs|ms|%|times\b
"""
QUANTITY = re.compile(rf"(?x)(?<![\w.,^])(\d(?:[\d,]*\d)?(?:\.\d+)?)(?:\s*({UNITS})|\s+(B|s))(?![\w/'’]|\s*=)")
TEX = [
    (re.compile(r"\\(?:text|mathrm|textrm)\{\s*([^{}]*)\}"), r" \1"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\([%$])"), r"\1"),
    (re.compile(r"\\[,;: ]|~(?!~)|\u00a0|\u202f"), " "),
    (re.compile(r"[*$]"), ""),
]


def quantities(text: str) -> list[str]:
    """Every number with a unit, in one spelling: `1,152 B` as 1152 B."""
    for pattern, replacement in TEX:
        text = pattern.sub(replacement, text)
    found = []
    for number, unit, spaced in QUANTITY.findall(text):
        name = (unit or spaced).replace("µ", "u").replace("μ", "u")
        found.append(f"{number.replace(',', '')} {name}")
    return found


@dataclass
class Section:
    """A `##` section: its Markdown with cell numbers, and what its cells printed."""

    heading: str
    prose: list[tuple[int, str]] = field(default_factory=list)
    printed: list[str] = field(default_factory=list)


def sections(notebook: NotebookNode) -> list[Section]:
    """The notebook cut at its `##` headings; what stands before the first is a section too."""
    found = [Section("the opening")]
    for number, cell in enumerate(notebook.cells, 1):
        if cell.cell_type == "code":
            found[-1].printed += [text for output in cell.outputs for text in printed(output)]
        elif cell.cell_type == "markdown":
            for part in re.split(r"(?m)^(?=## )", FENCE.sub("", cell.source)):
                if part.startswith("## "):
                    found.append(Section(part.splitlines()[0].removeprefix("## ").strip()))
                found[-1].prose.append((number, part))
    return found


def printed(output: NotebookNode) -> list[str]:
    """The text of an output, pictures and HTML left out."""
    data = output.get("data", {})
    kinds = (data.get("text/plain"), data.get("text/markdown"), output.get("text"), output.get("evalue"))
    return [text for text in kinds if text]


def loose_numbers(chapter: Chapter, notebook: NotebookNode) -> list[str]:
    """The numbers with a unit that nothing vouches for."""
    problems = []
    for section in sections(notebook):
        vouched = set(quantities("\n".join(section.printed)))
        for number, markdown in section.prose:
            for sentence in sentences(STRUCK.sub(" ", markdown)):
                if CITATION.search(sentence):
                    continue
                for quantity in quantities(CODE.sub(" ", ROLE.sub(" ", sentence))):
                    if quantity not in vouched:
                        said = f"no output of section {section.heading!r} has {quantity!r}"
                        problems.append(f"{chapter.stem}, cell {number} ({_clip(sentence)}): {said}")
    return problems


def _clip(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 60 else text[:57] + "..."


# ------------------------------------------------------------------------------------------ names

LIBRARIES = {
    "np": "numpy", "numpy": "numpy", "torch": "torch", "transformers": "transformers", "plt": "matplotlib.pyplot",
    "triton": "triton", "tl": "triton.language", "F": "torch.nn.functional", "matplotlib": "matplotlib",
}  # fmt: skip
LOOKS_LIKE_CODE = re.compile(r"[_.()\[\]=]|[a-z][A-Z]|[A-Z]{2,}[a-z]{2}|(?:^|\s)--|/")
FILE = re.compile(r"[\w./*-]+\.(?:py|ipynb|json|md|toml|cfg|txt|yml|yaml|css|js|cpp|cu|cuh|h|gguf|safetensors)")
SOURCES = ("tools", "tests", "benchmarks")
PLAIN_FILES = ("Makefile", "pyproject.toml", "_config.yml", ".ci/run")


@dataclass(frozen=True)
class Known:
    """Every name that the project's code knows."""

    words: frozenset[str]
    members: dict[str, frozenset[str]]  # of each exported class
    files: frozenset[str]
    text: str  # Makefile and the like, and all code: options are looked up here
    allowed: tuple[str, ...]


@functools.cache
def known_names(root: Path) -> Known:
    """Read the code cells of the whole book, the package, tools, tests and benchmarks."""
    scripts = [path for folder in SOURCES for path in sorted((root / folder).rglob("*.py"))]
    scripts = [path for path in scripts if path.name != "test_guards.py"]
    code = [path.read_text(encoding="utf-8") for path in [*scripts, *sorted((root / "paged_kv").glob("*.py"))]]
    code += [cell.source for chapter in find_chapters(root) for cell in chapter.cells() if cell.kind == "code"]
    plain = [path.read_text(encoding="utf-8") for name in PLAIN_FILES if (path := root / name).exists()]
    words = {word for text in code for word in words_in(text)} | set(re.findall(r"\w+", "\n".join(plain)))
    words |= set(dir(builtins)) | set(keyword.kwlist) | set(sys.stdlib_module_names) | {"self", "paged_kv"}
    return Known(
        frozenset(words | {path.stem for path in scripts} | set(package_trees(root)) | _words_of_stdlib()),
        class_members(root),
        frozenset(project_files(root)),
        "\n".join([*plain, *code]),
        tuple(read_allowed(root)),
    )


def words_in(code: str) -> set[str]:
    """The names in a piece of code and the words in its strings; of docstrings only shapes such as [num_blocks]."""
    words: set[str] = set()
    try:
        for token in tokenize.generate_tokens(io.StringIO(code).readline):
            if token.type == tokenize.NAME:
                words.add(token.string)
            elif tokenize.tok_name[token.type] in {"STRING", "FSTRING_MIDDLE"}:
                shapes = " ".join(re.findall(r"\[[\w, ]+\]", token.string))
                words |= set(re.findall(r"\w+", shapes if _triple(token.string) else token.string))
    except (tokenize.TokenError, SyntaxError, IndentationError):
        words |= set(re.findall(r"\w+", code))
    return words


def _triple(text: str) -> bool:
    return text.lstrip("rRbBfFuU").startswith(('"""', "'''"))


@functools.cache
def _words_of_stdlib() -> frozenset[str]:
    names = ("collections", "functools", "itertools", "math", "os", "sys", "pathlib", "time", "typing", "dataclasses")
    return frozenset(name for module in names for name in dir(importlib.import_module(module)))


def class_members(root: Path) -> dict[str, frozenset[str]]:
    """The methods, fields and attributes of each class of the package that has no base of its own."""
    found: dict[str, frozenset[str]] = {}
    for tree in package_trees(root).values():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.bases:
                parts = [part for member in node.body for part in ast.walk(member)]
                names = {part.name for part in parts if isinstance(part, ast.FunctionDef)}
                names |= {part.id for part in parts if isinstance(part, ast.Name)}
                names |= {part.attr for part in parts if isinstance(part, ast.Attribute)}
                found[node.name] = frozenset(names)
    return found


def project_files(root: Path) -> Iterator[str]:
    """Every file of the project, by each tail of its path, and every folder."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=root, capture_output=True, text=True, check=False
    )
    for name in listed.stdout.splitlines():
        parts = name.split("/")
        yield from ("/".join(parts[i:]) for i in range(len(parts)))
        yield from ("/".join(parts[: i + 1]) for i in range(len(parts) - 1))


def read_allowed(root: Path) -> list[str]:
    """The patterns of book/names.txt: names that live elsewhere, each line with a reason after #."""
    path = root / "book" / "names.txt"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [word for line in lines for word in line.partition("#")[0].split()]


def code_spans(markdown: str) -> Iterator[str]:
    """What stands in backticks, roles and citations left out, struck mistakes too."""
    text = STRUCK.sub(" ", FENCE.sub("", markdown))
    for _, span in CODE.findall(ROLE.sub(" ", text)):
        yield " ".join(span.split())


def unknown_names(span: str, known: Known) -> list[str]:
    """The parts of a backticked span that look like code and exist nowhere."""
    if any(fnmatchcase(span, pattern) for pattern in known.allowed):
        return []
    if made := re.fullmatch(r"make ([a-z-]+)(?: .*)?", span):
        return [] if re.search(rf"(?m)^{made[1]}:", known.text) else [span]
    if not LOOKS_LIKE_CODE.search(span):
        return []
    if FILE.fullmatch(span) or re.fullmatch(r"\.?[\w.*-]+(?:/[\w.*-]*)+", span):
        return [] if _is_file(span, known) else [span]
    words = re.sub(r"\"[^\"]*\"|'[^']*'", " ", span)
    options = re.findall(r"(?<!\S)--[a-z][\w-]+", words)
    # An option may be written out, or stand for an argument of the same name.
    unknown = [
        option for option in options if option not in known.text and option[2:].replace("-", "_") not in known.words
    ]
    for dotted in re.findall(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", re.sub(r"(?<!\S)--[a-z][\w-]+", " ", words)):
        unknown += _unknown_parts(dotted, known)
    return unknown


def _is_file(span: str, known: Known) -> bool:
    name = span.removeprefix("./").rstrip("/")
    if name in known.files or any(fnmatchcase(file, name) for file in known.files if "*" in name):
        return True
    # `heads/ranks` is a division, not a path.
    return not FILE.fullmatch(span) and all(word in known.words for word in re.findall(r"[A-Za-z_]\w*", span))


def _unknown_parts(dotted: str, known: Known) -> list[str]:
    parts = dotted.split(".")
    if any(fnmatchcase(dotted, pattern) for pattern in known.allowed):
        return []
    if parts[0] in LIBRARIES and len(parts) > 1:
        return [] if importable(LIBRARIES[parts[0]], tuple(parts[1:])) else [dotted]
    for owner, member in itertools.pairwise(parts):
        if owner in known.members and member not in known.members[owner] | {"__init__"}:
            return [dotted]
    bad = [part for part in parts if len(part) > 2 and part not in known.words and not part.startswith("__")]
    return [part for part in bad if not any(fnmatchcase(part, pattern) for pattern in known.allowed)]


@functools.cache
def importable(module: str, names: tuple[str, ...]) -> bool:
    """Whether a library that is installed has this attribute; one that is not installed is believed."""
    try:
        value = importlib.import_module(module)
    except ImportError:
        return True
    for name in names:
        try:
            value = getattr(value, name)
        except AttributeError:
            return False
    return True


def dead_names(chapter: Chapter, notebook: NotebookNode) -> list[str]:
    """The backticked names of a chapter that exist nowhere."""
    known = known_names(chapter.root)
    problems = []
    for number, cell in enumerate(notebook.cells, 1):
        if cell.cell_type == "markdown":
            for span in dict.fromkeys(code_spans(cell.source)):
                for name in dict.fromkeys(unknown_names(span, known)):
                    problems.append(f"{chapter.stem}, cell {number} (`{_clip(span)}`): {name!r} exists nowhere")
    return problems


def check_prose(chapter: Chapter) -> list[str]:
    """Everything that a chapter's prose says and its code does not."""
    if not chapter.ipynb.exists():
        return []  # check_cells says so
    notebook = read_ipynb(chapter.ipynb)
    return [*loose_numbers(chapter, notebook), *dead_names(chapter, notebook)]


def report(chapters: Sequence[Chapter]) -> Iterable[str]:
    """The problems of several chapters."""
    return [line for chapter in chapters for line in check_prose(chapter)]


def _run() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("chapters", nargs="*", metavar="NN")
    lines = report(find_chapters(ROOT, parser.parse_args().chapters))
    print("\n".join(lines) or "prose and code agree")
    return int(bool(lines))


if __name__ == "__main__":
    main(_run)
