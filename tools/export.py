"""Chapters -> package: the cells tagged `export:MODULE` become paged_kv/MODULE.py.

    python tools/export.py [--check] [NN ...]

The result reads as if written by hand: docstring, imports sorted on top, a class that its chapter re-opens
(`class X(X):`) folded into one.  A module that uses a name of another module of its chapter imports it from there;
names that the chapter had imported elsewhere are imported too.  paged_kv/__init__.py is written from all of them.

A trap that no tool can spring for you: in a notebook, an object made before its class is re-opened keeps the old class.
Make it anew after the re-opening.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import difflib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from chapters import (
    BY_HAND,
    PACKAGE,
    ROOT,
    BookError,
    Cell,
    Chapter,
    exported,
    find_chapters,
    main,
    modules_of,
    name_homes,
    package_imports,
    parse_cell,
    public_names,
    write_if_changed,
)

MAX_REOPENINGS = 2
BUILTINS = frozenset(dir(builtins)) | {"__name__", "__file__", "__doc__"}
RUFF = ["--isolated", "--line-length=100", "--target-version=py311", "--quiet"]
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
Import = ast.Import | ast.ImportFrom


@dataclass
class Piece:
    """One top-level statement with the comments before it; a class also with its later bodies."""

    node: ast.stmt
    text: str
    where: str
    bodies: list[ast.ClassDef] = field(default_factory=list)


@dataclass
class Module:
    """What a chapter exports under one name."""

    name: str
    chapter: Chapter
    docstring: str = ""
    imports: list[str] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)

    def defined(self) -> dict[str, int]:
        """The names bound at top level, imports left out, with the position of their statement."""
        return {name: i for i, piece in enumerate(self.pieces) for name in bound_names(piece.node)}


# ------------------------------------------------------------------------------------------ reading cells


def collect(chapter: Chapter) -> dict[str, Module]:
    """The modules of one chapter, statement by statement, classes folded."""
    modules: dict[str, Module] = {}
    cells = chapter.cells()
    own = set(modules_of(cells))
    for index, cell, name in exported(cells):
        where = chapter.where(index, cell)
        if not re.fullmatch(r"[a-z_][a-z0-9_]*", name) or name in BY_HAND:
            raise BookError(f"{where}: the tag must read export:MODULE, not export:{name}")
        if cell.kind != "code":
            raise BookError(f"{where}: only code cells can be exported")
        module = modules.setdefault(name, Module(name, chapter))
        for piece in split(cell.source, where):
            _refuse_own_imports(piece, own)
            place(module, piece)
    for module in modules.values():
        if not module.docstring:
            raise BookError(f"{chapter.stem}: the first exported cell of {module.name} must begin with its docstring")
    return modules


def split(source: str, where: str) -> list[Piece]:
    """Cut the text of a cell into its top-level statements, comments kept with what follows them."""
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise BookError(f"{where}: line {error.lineno}: {error.msg} (an exported cell must be plain Python)") from None
    lines = source.splitlines()
    pieces = []
    end = 0
    for node in tree.body:
        if node.lineno <= end:
            raise BookError(f"{where}: line {node.lineno} holds two statements")
        stop = node.end_lineno or node.lineno
        pieces.append(Piece(node, "\n".join(lines[end:stop]).strip("\n"), where))
        end = stop
    rest = "\n".join(lines[end:]).strip("\n")
    if rest and not pieces:
        raise BookError(f"{where}: an exported cell with comments only")
    if rest:
        pieces[-1].text += f"\n\n{rest}"
    return pieces


def _refuse_own_imports(piece: Piece, own: set[str]) -> None:
    if imported := package_imports(piece.node, {}) & own:
        raise BookError(f"{piece.where}: a chapter does not import its own module {PACKAGE}.{min(imported)}")


def place(module: Module, piece: Piece) -> None:
    """Put one statement where it belongs in the module."""
    node = piece.node
    if isinstance(node, Import):
        module.imports.append(piece.text)
    elif isinstance(node, ast.Expr):
        if not isinstance(node.value, ast.Constant) or module.docstring or module.pieces or module.imports:
            raise BookError(f"{piece.where}: {ast.unparse(node)[:60]!r} would run at import")
        module.docstring = piece.text
    elif isinstance(node, ast.For | ast.While | ast.With | ast.Delete | ast.Assert | ast.Raise):
        raise BookError(f"{piece.where}: {ast.unparse(node).splitlines()[0][:60]!r} would run at import")
    elif isinstance(node, ast.ClassDef) and node.name in {ast.unparse(base) for base in node.bases}:
        fold(module, node, piece)
    else:
        known = module.defined()
        for name in bound_names(node):
            if name in known and isinstance(node, Definition):
                earlier = module.pieces[known[name]].where
                raise BookError(f"{piece.where}: {name} is defined already in {earlier}")
        module.pieces.append(piece)


def bound_names(node: ast.stmt) -> list[str]:
    """The names that a top-level statement binds."""
    if isinstance(node, Definition):
        return [node.name]
    return [
        part.id if isinstance(part, ast.Name) else part.name
        for part in ast.walk(node)
        if (isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)) or isinstance(part, Definition)
    ]


# ------------------------------------------------------------------------------------------ folding classes


def fold(module: Module, node: ast.ClassDef, piece: Piece) -> None:
    """Append the body of a re-opened class to its first body, where that changes no meaning."""
    target = module.defined().get(node.name)
    first = module.pieces[target] if target is not None else None
    if first is None or not isinstance(first.node, ast.ClassDef):
        raise BookError(f"{piece.where}: {node.name} is re-opened, but no cell of {module.name} before it opens it")
    if len(node.bases) > 1 or node.keywords or node.decorator_list:
        raise BookError(f"{piece.where}: a re-opening is `class {node.name}({node.name}):`, nothing more")
    first.bodies.append(node)
    if len(first.bodies) > MAX_REOPENINGS:
        raise BookError(f"{piece.where}: {node.name} is re-opened more than {MAX_REOPENINGS} times")
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    earlier = [first.node, *first.bodies[:-1]]
    for part in body:
        _check_later_member(part, node.name, earlier, piece.where)
    _check_order(body, module, target or 0, piece.where)
    if body:
        first.text += "\n\n" + _body_text(node, body, piece.text)


def _body_text(node: ast.ClassDef, body: Sequence[ast.stmt], text: str) -> str:
    """The text of a later body, its comments included; those above the class line are indented into it."""
    lines = text.splitlines()
    # The statement ends with the text, save for comments behind it, which stay inside too.
    top = next(i for i, line in enumerate(lines) if line.startswith("class "))
    skip = node.body[0].end_lineno if node.body[0] is not body[0] else _header_end(node)
    first = top + (skip or node.lineno) - node.lineno + 1
    above = [f"    {line}".rstrip() for line in lines[:top] if line.strip()]
    last = top + (node.end_lineno or node.lineno) - node.lineno + 1
    behind = [f"    {line}".rstrip() for line in lines[last:]]
    return "\n".join([*above, *lines[first:last], *behind]).strip("\n")


def _header_end(node: ast.ClassDef) -> int:
    return node.bases[-1].end_lineno or node.lineno


def _check_later_member(part: ast.stmt, owner: str, earlier: Sequence[ast.ClassDef], where: str) -> None:
    if not isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
        shown = ast.unparse(part).splitlines()[0][:60]
        raise BookError(f"{where}: a later body of {owner} only adds methods, not {shown!r}")
    name = f"{owner}.{part.name}"
    if part.name in {"__init__", "__new__", "__post_init__"}:
        raise BookError(f"{where}: {name} belongs in the first body, with all the state")
    if any(isinstance(inner, ast.Name) and inner.id in {"super", "__class__"} for inner in ast.walk(part)):
        raise BookError(f"{where}: {name} uses super(), which means another class once the bodies are one")
    if any(part.name in bound_names(member) for body in earlier for member in body.body):
        said = "a property and its setter stand in one body" if part.decorator_list else "give it once"
        raise BookError(f"{where}: {name} is in an earlier body already; {said}")
    known = {name for body in earlier for name in _state(body)} | {
        name for body in earlier for member in body.body for name in bound_names(member)
    }
    if new := sorted(_assigned_attributes(part) - known):
        raise BookError(f"{where}: {name} sets self.{new[0]}, which the first body does not have; state stands there")


def _state(body: ast.ClassDef) -> set[str]:
    methods = (part for part in body.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef))
    slots = (n.value for n in ast.walk(body) if isinstance(n, ast.Constant) and isinstance(n.value, str))
    return {name for method in methods for name in _assigned_attributes(method)} | set(slots)


def _assigned_attributes(method: ast.AST) -> set[str]:
    return {
        part.attr
        for part in ast.walk(method)
        if isinstance(part, ast.Attribute)
        and isinstance(part.ctx, ast.Store)
        and isinstance(part.value, ast.Name)
        and part.value.id == "self"
    }


def _check_order(body: Sequence[ast.stmt], module: Module, target: int, where: str) -> None:
    """Decorators and defaults run where the first body stands: what they use must come before it."""
    known = module.defined()
    for part in body:
        assert isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)
        early = [*part.decorator_list, *part.args.defaults, *(d for d in part.args.kw_defaults if d)]
        used = {name.id for node in early for name in ast.walk(node) if isinstance(name, ast.Name)}
        if late := sorted(name for name in used if known.get(name, -1) > target):
            raise BookError(f"{where}: {part.name} uses {late[0]} as the class is made, but {late[0]} comes later")


# ------------------------------------------------------------------------------------------ assembling


def used_names(tree: ast.AST) -> set[str]:
    """Every plain name in the code, those in quoted annotations included."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for node in ast.walk(tree):
        for quoted in _annotations(node):
            if isinstance(quoted, ast.Constant) and isinstance(quoted.value, str):
                try:
                    names |= used_names(ast.parse(quoted.value, mode="eval"))
                except SyntaxError:
                    continue
    return names


def _annotations(node: ast.AST) -> list[ast.AST]:
    found = [getattr(node, "annotation", None), getattr(node, "returns", None)]
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("cast"):
        found += node.args[:1]
    return [part for whole in found if whole is not None for part in ast.walk(whole)]


def sibling_imports(module: Module, modules: Mapping[str, Module]) -> dict[str, str]:
    """The names of other modules of the chapter that this one uses: name -> module."""
    local = set(module.defined()) | _imported_names(module.imports)
    homes = {name: other.name for other in modules.values() if other is not module for name in other.defined()}
    used = {name for piece in module.pieces for name in used_names(ast.parse(piece.text))}
    return {name: homes[name] for name in sorted(used - local) if name in homes}


def _imported_names(imports: Iterable[str]) -> set[str]:
    nodes = (node for text in imports for node in ast.parse(text).body if isinstance(node, Import))
    return {(alias.asname or alias.name).split(".")[0] for node in nodes for alias in node.names}


def chapter_imports(cells: Sequence[Cell]) -> dict[str, str]:
    """What any cell of the chapter imports at top level: name -> the statement that brings it."""
    found: dict[str, str] = {}
    for cell in cells:
        if cell.kind != "code":
            continue
        try:
            nodes = parse_cell(cell.source).body
        except SyntaxError:
            continue
        for node in (node for node in nodes if isinstance(node, Import)):
            for alias in node.names:
                plain = isinstance(node, ast.Import)
                single = ast.Import([alias]) if plain else ast.ImportFrom(node.module, [alias], 0)
                found.setdefault((alias.asname or alias.name).split(".")[0], ast.unparse(single))
    return found


def assemble(module: Module, modules: Mapping[str, Module], borrowed: Mapping[str, str]) -> str:
    """The module's text before ruff sorts, prunes and formats it."""
    imports = list(module.imports)
    siblings = sibling_imports(module, modules)
    imports += [f"from {PACKAGE}.{home} import {name}" for name, home in siblings.items()]
    used = {name for piece in module.pieces for name in used_names(ast.parse(piece.text))}
    missing = used - set(module.defined()) - _imported_names(imports) - BUILTINS
    imports += [borrowed[name] for name in sorted(missing) if name in borrowed]
    if "annotations" in borrowed and not any("__future__" in text for text in imports):
        imports.append("from __future__ import annotations")
    imports.sort(key=lambda text: "__future__" not in text)
    body = _join(module.pieces)
    source = f"book/{module.chapter.name.removeprefix('book/')}.py"
    head = f"# Exported from {source} by tools/export.py; edit the chapter, not this file."
    return "\n".join([head, module.docstring, "", *imports, "", "", body, ""])


def _stays_close(piece: Piece) -> bool:
    return not isinstance(piece.node, Definition)


def _join(pieces: Sequence[Piece]) -> str:
    """Definitions two blank lines apart; constants of one cell close together."""
    text = ""
    for before, piece in zip([None, *pieces], pieces, strict=False):
        if before is not None:
            close = _stays_close(before) and _stays_close(piece) and before.where == piece.where
            text += "\n" if close else "\n\n\n"
        text += piece.text
    return text


def refuse_cycles(links: Mapping[str, set[str]], chapter: Chapter) -> None:
    """Modules of one chapter may not import each other in a ring."""
    for start in links:
        seen: set[str] = set()
        waiting = list(links[start])
        while waiting:
            name = waiting.pop()
            if name == start:
                raise BookError(f"{chapter.stem}: the modules {start} and {', '.join(sorted(seen))} import each other")
            if name not in seen:
                seen.add(name)
                waiting += links.get(name, set())


def draft(chapter: Chapter) -> tuple[dict[str, str], dict[str, Module]]:
    """The text of every module of a chapter as `finish` takes it, and the modules."""
    modules = collect(chapter)
    refuse_cycles({name: set(sibling_imports(m, modules).values()) for name, m in modules.items()}, chapter)
    borrowed = chapter_imports(chapter.cells()) if modules else {}
    return {name: assemble(m, modules, borrowed) for name, m in modules.items()}, modules


def tangle(chapter: Chapter) -> dict[str, str]:
    """The text of every module of a chapter, finished."""
    return finish(*draft(chapter))


def finish(drafts: Mapping[str, str], modules: Mapping[str, Module]) -> dict[str, str]:
    """Let ruff sort and prune the imports and format; refuse names that nothing defines."""
    if not drafts:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / PACKAGE
        package.mkdir()
        for name, text in drafts.items():
            (package / f"{name}.py").write_text(text, encoding="utf-8")
        own = f'lint.isort.known-first-party = ["{PACKAGE}"]'
        _ruff("check", "--select=I,F401", "--fix", "--exit-zero", "--config", own, folder)
        _ruff("format", folder)
        found = json.loads(_ruff("check", "--select=F821,F822,F811", "--exit-zero", "--output-format=json", folder))
        for problem in found:
            raise BookError(_explain(problem, modules[Path(problem["filename"]).stem]))
        return {name: (package / f"{name}.py").read_text(encoding="utf-8") for name in drafts}


def _ruff(*arguments: str) -> str:
    command = [sys.executable, "-m", "ruff", arguments[0], *RUFF, "--no-cache", *arguments[1:]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BookError(f"ruff: {done.stderr or done.stdout}")
    return done.stdout


def _explain(problem: Mapping[str, str], module: Module) -> str:
    quoted = re.search(r"`(\w+)`", problem["message"])
    name = quoted[1] if quoted else ""
    places = (piece.where for piece in module.pieces if name in used_names(ast.parse(piece.text)))
    return f"{next(places, module.chapter.stem)}: in {module.name}: {problem['message']}"


# ------------------------------------------------------------------------------------------ the package

INIT = '''\
# Written by tools/export.py from what the chapters export; edit those, not this file.
"""{summary}

{listing}

Names come from their modules at first use: importing the package itself needs nothing but NumPy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
{imports}

__all__ = {names}

_HOME = {homes}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _HOME:
            value = getattr(import_module(f"{{__name__}}.{{_HOME[name]}}"), name)
        elif name == "__version__":
            value = _version()
        else:
            raise AttributeError(f"module {{__name__!r}} has no attribute {{name!r}}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({{*globals(), *__all__, "__version__"}})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("paged-kv")
    except PackageNotFoundError:
        return "0+unknown"
'''


def package_init(texts: Mapping[str, str], chapter_of: Mapping[str, str]) -> str:
    """The text of paged_kv/__init__.py for these modules."""
    trees = {name: ast.parse(text) for name, text in texts.items()}
    seen: dict[str, str] = {}
    for module, tree in trees.items():
        for name in public_names(tree):
            if name in seen:
                raise BookError(f"{name} is exported twice: by {chapter_of[seen[name]]} and by {chapter_of[module]}")
            seen[name] = module
    homes = name_homes(trees)
    width = max(map(len, trees), default=0)
    docs = {module: (ast.get_docstring(tree) or "").partition("\n")[0] for module, tree in trees.items()}
    by_module = {module: sorted(n for n, home in homes.items() if home == module) for module in sorted(trees)}
    imports = [
        f"    from {PACKAGE}.{module} import {', '.join(names)}"
        for module, names in by_module.items()
        if names
    ]
    text = INIT.format(
        summary="A paged KV cache for LLM serving, built chapter by chapter.",
        listing="\n".join(f"    {module:{width}}  {doc}" for module, doc in docs.items()),
        imports="\n".join(imports),
        names=sorted(homes),
        homes={name: homes[name] for name in sorted(homes)},
    )
    return finish({"__init__": text}, {})["__init__"]


def expected(root: Path, chosen: Sequence[Chapter]) -> dict[str, str]:
    """What the package should hold, file stem -> text: the chosen chapters' modules and __init__.

    Chapters that are not chosen speak for __init__ with what they last exported.
    """
    texts: dict[str, str] = {}
    modules: dict[str, Module] = {}
    chapter_of: dict[str, str] = {}
    for chapter in find_chapters(root):
        own, fresh = draft(chapter) if chapter in chosen else (_as_on_disk(chapter), {})
        for name, text in own.items():
            if name in texts:
                raise BookError(f"{chapter.stem}: module {name} is exported by {chapter_of[name]} already")
            texts[name], chapter_of[name] = text, chapter.stem
        modules |= fresh
    wanted = finish({name: texts[name] for name in modules}, modules)
    return {**wanted, "__init__": package_init(texts | wanted, chapter_of)}


def _as_on_disk(chapter: Chapter) -> dict[str, str]:
    files = {name: chapter.root / PACKAGE / f"{name}.py" for name in modules_of(chapter.cells()) if name}
    return {name: path.read_text(encoding="utf-8") for name, path in files.items() if path.exists()}


def strays(root: Path) -> list[str]:
    """Modules in the package that no chapter exports."""
    known = {name for chapter in find_chapters(root) for name in modules_of(chapter.cells())} | BY_HAND
    return sorted(path.stem for path in (root / PACKAGE).glob("*.py") if path.stem not in known)


def difference(path: Path, text: str, root: Path) -> str:
    """A short diff of a file against the text it should hold; empty where equal."""
    now = path.read_text(encoding="utf-8") if path.exists() else ""
    if now == text:
        return ""
    name = path.relative_to(root).as_posix()
    lines = list(difflib.unified_diff(now.splitlines(), text.splitlines(), name, "what the chapters export", "", "", 1))
    return "\n".join(line.rstrip() for line in [*lines[:24], *(["..."] if len(lines) > 24 else [])])


def export(root: Path, wanted: Iterable[str] = (), check: bool = False) -> list[str]:
    """Write (or with `check` only compare) the package; return what was written, or what is wrong."""
    wanted = list(wanted)
    texts = expected(root, find_chapters(root, wanted))
    files = {root / PACKAGE / f"{name}.py": text for name, text in texts.items()}
    if not check:
        return [path.relative_to(root).as_posix() for path, text in files.items() if write_if_changed(path, text)]
    problems = [diff for path, text in files.items() if (diff := difference(path, text, root))]
    if not wanted:
        problems += [f"{PACKAGE}/{name}.py: no chapter exports this module" for name in strays(root)]
    return problems


def _run() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 where the package differs")
    parser.add_argument("chapters", nargs="*", metavar="NN")
    options = parser.parse_args()
    lines = export(ROOT, options.chapters, options.check)
    said = [line if options.check else f"written: {line}" for line in lines]
    if not options.check:
        said += [f"note: no chapter exports {PACKAGE}/{name}.py" for name in strays(ROOT)]
    print("\n".join(said) or "the package is what the chapters export")
    return int(options.check and bool(lines))


if __name__ == "__main__":
    main(_run)
