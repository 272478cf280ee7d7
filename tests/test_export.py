"""tools/export.py: the package reads as if written by hand, and means what the notebook means."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from chapters import BookError
from conftest import ROOT, TinyBook
from export import export, tangle

POOL = (
    '''[export:pool]
"""Block ids."""

from __future__ import annotations

import numpy as np
from collections import deque
''',
    '''[export:pool]
class Pool:
    """Hands out ids."""

    def __init__(self, size: int) -> None:
        self.free = deque(range(size))
''',
)


def module(book: TinyBook, *cells: str, name: str = "pool") -> str:
    """The text of one exported module of a chapter 03."""
    return tangle(book.write("03_pool", *cells))[name]


def refused(book: TinyBook, *cells: str) -> str:
    """The error that a chapter 03 with these cells gets."""
    with pytest.raises(BookError) as error:
        tangle(book.write("03_pool", *cells))
    return str(error.value)


def reopened(body: str, above: str = "") -> str:
    lines = "\n".join(f"    {line}".rstrip() for line in body.splitlines())
    return f"[export:pool]\n{above}class Pool(Pool):  # type: ignore\n{lines}\n"


def test_a_module_as_if_written_by_hand(book: TinyBook) -> None:
    text = module(
        book,
        "md # A pool\nIts first cell exports.",
        *POOL,
        "pool = Pool(3)\nprint(pool.free)",
        reopened('"""Goes on."""\n\ndef take(self) -> int:\n    """Take one."""\n    return self.free.popleft()'),
        "[export:pool]\nimport math\n\nLIMIT = 3\n\ndef half(x: int) -> int:\n    # Rounded up.\n"
        "    return math.ceil(x/2)  # not down\n",
        reopened("@property\ndef num_free(self) -> int:\n    return half(len(self.free))", "# Counts.\n"),
    )
    assert text == '''\
# Exported from book/03_pool.py by tools/export.py; edit the chapter, not this file.
"""Block ids."""

from __future__ import annotations

import math
from collections import deque


class Pool:
    """Hands out ids."""

    def __init__(self, size: int) -> None:
        self.free = deque(range(size))

    def take(self) -> int:
        """Take one."""
        return self.free.popleft()

    # Counts.
    @property
    def num_free(self) -> int:
        return half(len(self.free))


LIMIT = 3


def half(x: int) -> int:
    # Rounded up.
    return math.ceil(x / 2)  # not down
'''


def test_comments_and_strings_of_a_later_body_stay_as_they_are(book: TinyBook) -> None:
    body = "# First.\ndef page(self) -> str:\n    return TEXT  # as it is"
    cell = reopened(body, "# Above.\n").replace("TEXT", '"""a\n# b\n"""')
    text = module(book, *POOL, cell + "# Behind.")
    assert '    # Above.\n    # First.\n    def page(self) -> str:\n        return """a\n# b\n"""  # as it is' in text
    assert text.rstrip().endswith("    # Behind.")


def test_a_second_module_imports_what_it_uses_of_the_first(book: TinyBook) -> None:
    text = module(
        book,
        *POOL,
        "[export:pool]\nclass Unused:\n    pass",
        '[export:tables]\n"""Tables."""',
        '[export:tables]\ndef row(pool: "Pool") -> int:\n    Unused = 0\n    return len(pool.free) + Unused',
        name="tables",
    )
    assert "from paged_kv.pool import Pool\n" in text
    assert "from __future__ import annotations\n" in text, "the notebook's cells run under it"


def test_imports_that_only_another_cell_made(book: TinyBook) -> None:
    text = module(
        book, *POOL, "import time as clock\nimport os.path\nfrom json import loads",
        "[export:pool]\ndef now() -> float:\n    return clock.time() + loads('1') + len(os.path.sep) + np.pi",
    )  # fmt: skip
    assert [line for line in text.splitlines() if line.startswith(("import", "from"))] == [
        "from __future__ import annotations",
        "import os.path",
        "import time as clock",
        "from collections import deque",
        "from json import loads",
        "import numpy as np",
    ]


def test_modules_of_one_chapter_may_not_import_each_other(book: TinyBook) -> None:
    cells = ['[export:a]\n"""A."""\ndef one() -> int:\n    return two()']
    cells += ['[export:b]\n"""B."""\ndef two() -> int:\n    return one()']
    assert "import each other" in refused(book, *cells)


def test_two_cells_one_import(book: TinyBook) -> None:
    text = module(
        book, *POOL, "[export:pool]\nfrom collections import Counter, deque\n\ndef count() -> Counter[int]:\n    ..."
    )
    assert text.count("from collections import Counter, deque\n") == 1
    assert text.count("import") == 2, "the other is the one from the future"


def test_a_property_and_its_setter_in_one_body(book: TinyBook) -> None:
    both = "@property\ndef size(self) -> int:\n    return 1\n\n@size.setter\ndef size(self, n: int) -> None:\n    ..."
    text = module(book, *POOL, reopened(both))
    assert text.index("@property") < text.index("@size.setter")
    namespace: dict[str, object] = {}
    exec(text, namespace)
    assert namespace["Pool"](2).size == 1  # type: ignore[operator]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("@free.setter\ndef num_free(self, n: int) -> None:\n    ...", "in an earlier body already"),
        ("def take(self) -> int:\n    return 0", "Pool.take is in an earlier body"),
        ("def __init__(self) -> None:\n    ...", "belongs in the first body"),
        ("def more(self) -> int:\n    return super().take()", "super()"),
        ("kind = 'paged'", "only adds methods, not \"kind = 'paged'\""),
        ("count: int = 0", "only adds methods"),
        ("def more(self) -> None:\n    self.extra = 1", "sets self.extra"),
        ("def more(self, k: int = LATE) -> None:\n    ...", "LATE comes later"),
    ],
)
def test_a_later_body_that_would_mean_something_else(book: TinyBook, body: str, said: str) -> None:
    first = reopened("@property\ndef num_free(self) -> int:\n    return 0\n\ndef take(self) -> int:\n    return 1")
    message = refused(book, *POOL, first, "[export:pool]\nLATE = 3", reopened(body))
    assert said in message
    assert message.startswith("03_pool, cell 5 (class Pool(Pool):")


def test_the_notebook_agrees_that_super_would_change_meaning(book: TinyBook) -> None:
    """Why super() is refused: in the notebook it finds the earlier body, in one class it does not."""
    apart: dict[str, type] = {}
    exec("class P:\n    def f(self): return 1\nclass P(P):\n    def g(self): return super().f()", apart)
    folded: dict[str, type] = {}
    exec("class P:\n    def f(self): return 1\n    def g(self): return super().f()", folded)
    assert apart["P"]().g() == 1
    with pytest.raises(AttributeError):
        folded["P"]().g()


def test_objects_made_before_a_reopening_lack_the_new_methods(book: TinyBook) -> None:
    """The notebook's own trap: the export is fine, the old object is not.  The tool's help says so."""
    cells: dict[str, object] = {}
    exec("class P:\n    pass\nold = P()\nclass P(P):\n    def g(self): return 1\nnew = P()", cells)
    assert cells["new"].g() == 1  # type: ignore[attr-defined]
    assert not hasattr(cells["old"], "g")
    import export as tool

    assert "made before" in (tool.__doc__ or "")


def test_at_most_two_reopenings(book: TinyBook) -> None:
    bodies = [reopened(f"def step_{i}(self) -> None:\n    ...") for i in range(3)]
    module(book, *POOL, *bodies[:2])
    assert "more than 2 times" in refused(book, *POOL, *bodies)


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("class Pool(Pool, dict):\n    ...", "nothing more"),
        ("@final\nclass Pool(Pool):\n    ...", "nothing more"),
        ("class Other(Other):\n    ...", "no cell of pool before it opens it"),
        ("class Pool:\n    ...", "Pool is defined already in 03_pool, cell 2"),
        ("print(Pool(3))", "would run at import"),
        ("for i in range(3):\n    pass", "would run at import"),
        ("from paged_kv.pool import Pool", "its own module paged_kv.pool"),
        ("def f() -> int:\n    return missing", "Undefined name `missing`"),
        ("def f(:\n    pass", "line 1"),
        ("%timeit 3", "plain Python"),
    ],
)
def test_cells_that_cannot_be_exported(book: TinyBook, cell: str, said: str) -> None:
    message = refused(book, *POOL, f"[export:pool]\n{cell}")
    assert said in message
    assert message.startswith("03_pool, cell 3 (")


def test_tags_and_docstrings(book: TinyBook) -> None:
    assert "export:MODULE" in refused(book, "[export]\nx = 1")
    assert "docstring" in refused(book, "[export:pool]\nx = 1")
    assert "export:MODULE" in refused(book, '[export:__init__]\n"""Doc."""')


def two_chapters(book: TinyBook) -> None:
    book.write("03_pool", *POOL)
    cells = ['[export:tables]\n"""Tables."""\n\nimport torch\nfrom paged_kv.pool import Pool']
    cells += ["[export:tables]\nclass Tables:\n    pool: Pool\n    at: torch.device\n\ndef _own() -> None:\n    ..."]
    cells += ["[export:tables]\ndef tables() -> None:\n    ..."]
    book.write("04_tables", *cells)


def test_the_package_imports_nothing_until_asked(book: TinyBook) -> None:
    two_chapters(book)
    assert export(book.root) == ["paged_kv/pool.py", "paged_kv/tables.py", "paged_kv/__init__.py"]
    code = (
        "import sys, paged_kv\n"
        "assert not {'numpy', 'torch', 'paged_kv.pool'} & set(sys.modules)\n"
        "assert paged_kv.__all__ == ['Pool', 'Tables'], paged_kv.__all__\n"
        "assert {'Pool', '__version__'} <= set(dir(paged_kv))\n"
        "from paged_kv import Pool\n"
        "assert paged_kv.Pool is Pool is sys.modules['paged_kv.pool'].Pool\n"
        "assert 'torch' not in sys.modules and isinstance(paged_kv.__version__, str)\n"
        "try: paged_kv.Poole\n"
        "except AttributeError as error: assert 'Poole' in str(error)\n"
        "else: raise SystemExit('no error')\n"
    )
    subprocess.run([sys.executable, "-S", "-c", code], cwd=book.root, check=True)


def test_a_function_named_as_its_module_stays_in_the_module(book: TinyBook) -> None:
    two_chapters(book)
    export(book.root)
    text = (book.root / "paged_kv/__init__.py").read_text()
    assert '"tables": ' not in text
    assert "from paged_kv.tables import Tables\n" in text


def test_check_finds_what_is_not_the_export(book: TinyBook) -> None:
    two_chapters(book)
    export(book.root)
    assert export(book.root, check=True) == []
    pool = book.root / "paged_kv/pool.py"
    pool.write_text(pool.read_text().replace("deque(range(size))", "deque([])"))
    (problem,) = export(book.root, check=True)
    assert "-        self.free = deque([])" in problem
    assert "+        self.free = deque(range(size))" in problem
    assert len(problem.splitlines()) < 12
    assert export(book.root, ["04"], check=True) == [], "chapter 04 is not concerned"
    export(book.root)
    (book.root / "paged_kv/stray.py").write_text("x = 1\n")
    (book.root / "paged_kv/check.py").write_text("x = 1\n")
    assert export(book.root, check=True) == ["paged_kv/stray.py: no chapter exports this module"]


def test_one_chapter_can_be_exported_while_another_is_broken(book: TinyBook) -> None:
    two_chapters(book)
    export(book.root)
    before = (book.root / "paged_kv/__init__.py").read_text()
    book.write("04_tables", '[export:tables]\n"""Tables."""\n\ndef broken(:')
    assert export(book.root, ["03"]) == []
    assert (book.root / "paged_kv/__init__.py").read_text() == before
    with pytest.raises(BookError, match="04_tables, cell 1"):
        export(book.root)


def test_a_name_or_a_module_exported_twice(book: TinyBook) -> None:
    book.write("03_pool", *POOL)
    book.write("04_pool_again", *[cell.replace("export:pool", "export:pool2") for cell in POOL])
    with pytest.raises(BookError, match="Pool is exported twice: by 03_pool and by 04_pool_again"):
        export(book.root)
    book.write("04_pool_again", *POOL)
    with pytest.raises(BookError, match="module pool is exported by 03_pool already"):
        export(book.root)


def test_mypy_sees_the_lazy_names(book: TinyBook, tmp_path: Path) -> None:
    book.write("03_pool", *POOL)
    export(book.root)
    (book.root / "use.py").write_text("from paged_kv import Pool\nimport paged_kv\nPool('three')\npaged_kv.Poole\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), "use.py"]
    said = subprocess.run(command, cwd=book.root, capture_output=True, text=True, check=False).stdout
    assert 'Argument 1 to "Pool" has incompatible type "str"' in said
    assert '"Poole"' in said
    assert "Found 2 errors" in said


def test_the_repository_is_found_from_the_tools() -> None:
    from chapters import ROOT as found

    assert found == ROOT
