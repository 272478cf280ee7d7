"""The built book, opened from file:// in Chromium as a reader would.

No page asks the network for anything, complains on the console, or leads nowhere; formulas,
search and the dark are there; nothing overflows a phone; axe-core finds nothing serious, in light on one page and
in dark on the next.  Two workers of pytest-xdist share the pages, each with one browser.  Needs a
Chromium or Chrome on the machine and a built book (`make book`); PAGED_KV_HTML names another
build to look at.
"""

import os
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

import pytest
from widgets_page import axe_findings_in_theme

ROOT = Path(__file__).resolve().parents[1]
HTML = Path(os.environ.get("PAGED_KV_HTML", ROOT / "_build/html")).resolve()
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

pytestmark = [
    pytest.mark.xdist_group("browser"),
    pytest.mark.skipif(not (HTML / "index.html").exists(), reason=f"no built book in {HTML}: run make book"),
]

PAGES = sorted(path.relative_to(HTML).with_suffix("").as_posix() for path in HTML.rglob("*.html"))
PAGES = [page for page in PAGES if not page.startswith("_static/")]


# ---- what needs no browser: links, anchors, pictures


class Page(HTMLParser):
    """The anchors of one page, and what it links to or loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = {"", "top"}
        self.targets: list[str] = []
        self.loads: list[str] = []
        self.wordless: list[str] = []
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {key: value or "" for key, value in attrs}
        self.anchors |= {found[key] for key in ("id", "name") if key in found}
        if tag == "a" and "href" in found:
            self.targets.append(found["href"])
        elif tag == "link" and found.get("rel") not in {"canonical", "prev", "next"} and "href" in found:
            self.loads.append(found["href"])
        elif "src" in found:
            self.loads.append(found["src"])
        if tag == "img" and not found.get("alt", "").strip():
            self.wordless.append(found.get("src", "?"))
        if tag == "svg" and found.get("aria-hidden") != "true" and not found.get("aria-label", "").strip():
            self.wordless.append("svg")


@pytest.fixture(scope="module")
def parsed() -> dict[str, Page]:
    return {page: Page(HTML / f"{page}.html") for page in PAGES}


def is_outside(url: str) -> bool:
    return bool(urlsplit(url).scheme or urlsplit(url).netloc) and not url.startswith("data:")


def test_the_book_has_its_pages() -> None:
    assert {"index", "notation", "api", "references", "search"} <= set(PAGES)


def test_nothing_is_loaded_from_elsewhere(parsed: dict[str, Page]) -> None:
    assert {name: bad for name, page in parsed.items() if (bad := [url for url in page.loads if is_outside(url)])} == {}


def test_stylesheets_load_nothing_from_elsewhere() -> None:
    for path in HTML.rglob("*.css"):
        text = path.read_text("utf-8", errors="replace")
        assert re.findall(r"(?:url\(\s*['\"]?|@import\s+['\"])https?:[^)'\"]*", text) == [], path


def test_every_internal_link_leads_somewhere(parsed: dict[str, Page]) -> None:
    dead = []
    for name, page in parsed.items():
        for url in [*page.targets, *page.loads]:
            if is_outside(url) or url.startswith(("data:", "javascript:")):
                continue
            parts = urlsplit(urljoin(f"{name}.html", url))
            path = unquote(parts.path) or f"{name}.html"
            target = path.removesuffix(".html")
            if not (HTML / path).exists():
                dead.append(f"{name}: {url}")
            elif parts.fragment and target in parsed and unquote(parts.fragment) not in parsed[target].anchors:
                dead.append(f"{name}: {url} (no such anchor)")
    assert dead == []


def test_every_picture_has_words(parsed: dict[str, Page]) -> None:
    assert {name: page.wordless for name, page in parsed.items() if page.wordless} == {}


def test_labels_of_exported_cells_lead_to_the_line(parsed: dict[str, Page]) -> None:
    pattern = re.compile(r'href="([^"]*source/(\w+)\.html)#L-(\d+)">(?:<[^>]*>)*(\w+), line (\d+)')
    seen = 0
    for name in parsed:
        for _, module, anchor, word, line in pattern.findall((HTML / f"{name}.html").read_text("utf-8")):
            assert anchor == line
            shown = (HTML / f"source/{module}.html").read_text("utf-8")
            start = shown.index(f'id="L-{line}"')
            text = re.sub(r"<[^>]+>", "", shown[start : shown.find('<span class="line"', start)].partition(">")[2])
            source = (ROOT / f"paged_kv/{module}.py").read_text("utf-8").splitlines()[int(line) - 1]
            assert source.split()[0] in text
            assert word in source or source.lstrip().startswith(("def ", "@", "class "))
            seen += 1
    if any(page[:2].isdigit() and page[:2] != "00" for page in parsed):
        assert seen > 0


# ---- in the browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"no browser found: looked for {', '.join(BROWSERS)}")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield started
        started.close()


class Visit:
    """One page opened in a window of its own, with what it asked for and complained about."""

    def __init__(self, browser: Any, name: str, width: int = 1280, scheme: str = "light") -> None:
        self.name, self.scheme = name, scheme
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.outside: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", self._request)
        self.page.on("requestfailed", lambda request: self.complaints.append(f"failed: {request.url}"))
        self.page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        self.page.on("console", self._console)
        path, _, rest = name.partition("?")
        self.page.goto((HTML / f"{path}.html").as_uri() + (f"?{rest}" if rest else ""), wait_until="load")

    def _request(self, request: Any) -> None:
        if not request.url.startswith(("file:", "data:", "blob:")):
            self.outside.append(request.url)

    def _console(self, message: Any) -> None:
        if message.type in {"error", "warning"}:
            self.complaints.append(f"{message.type}: {message.text}")

    def __enter__(self) -> "Visit":
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    def overflow(self) -> int:
        """CSS pixels by which the page is wider than its window, once it has settled."""
        wider = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        for _ in range(20):
            if self.page.evaluate(wider) <= 0:
                break
            self.page.wait_for_timeout(100)
        return int(self.page.evaluate(wider))


CLIPPED = """[...document.querySelectorAll('div.cell_input pre, div.cell_output pre')]
    .filter(pre => pre.offsetParent && pre.scrollWidth > pre.clientWidth + 1)
    .filter(pre => pre.textContent.split('\\n').every(line => line.length <= 100))
    .map(pre => pre.textContent.slice(0, 60))"""


# What all pages have in common is judged on the front page, in both themes.
COMMON = [".bd-sidebar-primary", ".bd-header", ".bd-footer", ".bd-footer-content"]


def shares() -> Iterator[Any]:
    """The pages with a theme each, dealt out to two workers so that both see both themes."""
    for index, page in enumerate(PAGES):
        theme = ("light", "dark")[index % 2]
        mark = pytest.mark.xdist_group(f"browser-{index // 2 % 2}")
        yield pytest.param((page, theme), id=f"{page}-{theme}", marks=mark)


@pytest.fixture(scope="module", params=list(shares()))
def visit(browser: Any, request: pytest.FixtureRequest) -> Iterator[Visit]:
    """Each page in turn, opened once for all tests of a page."""
    page, theme = request.param
    with Visit(browser, page, scheme=theme) as visit:
        yield visit


def test_a_page_reads_offline_without_complaint(visit: Visit) -> None:
    if 'class="math' in (HTML / f"{visit.name}.html").read_text("utf-8"):
        visit.page.wait_for_selector("mjx-container", state="attached", timeout=20_000)  # maybe in a closed box
        assert visit.page.locator("mjx-merror").count() == 0
    assert visit.overflow() <= 0
    assert visit.page.evaluate(CLIPPED) == [], "code of at most 100 columns is clipped"
    visit.page.set_viewport_size({"width": 390, "height": 844})
    assert visit.overflow() <= 0, "wider than a phone"
    assert visit.outside == []
    assert visit.complaints == []


@pytest.fixture(scope="module")
def looks() -> Iterator[set[str]]:
    """The looks of text that axe-core has judged, each once for all pages of a worker."""
    known: set[str] = set()
    yield known
    assert len(known) > 20


def test_a_page_is_readable(visit: Visit, looks: set[str]) -> None:
    """The last test of a page, which it leaves without most of its code."""
    visit.page.set_viewport_size({"width": 1280, "height": 900})
    assert axe_findings_in_theme(visit.page, visit.scheme, looks, COMMON) == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_what_all_pages_have_in_common_is_readable(browser: Any, theme: str) -> None:
    with Visit(browser, "index", scheme=theme) as visit:
        assert axe_findings_in_theme(visit.page, theme, set(), []) == []


def brightness(page: Any) -> float:
    rgb = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(map(float, re.findall(r"[\d.]+", rgb)[:3])) / 3


def test_the_page_follows_the_reader_into_the_dark(browser: Any) -> None:
    seen = {}
    for scheme in ("light", "dark"):
        with Visit(browser, "index", scheme=scheme) as visit:
            assert visit.page.evaluate("document.documentElement.dataset.theme") == scheme
            ink = visit.page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--pk-fg')").strip()
            seen[scheme] = (brightness(visit.page), ink)
    assert seen["light"][0] > 200
    assert seen["dark"][0] < 60
    assert seen["light"][1] != seen["dark"][1]


def test_formulas_are_drawn(browser: Any) -> None:
    with Visit(browser, "notation") as visit:
        visit.page.wait_for_selector("mjx-container", timeout=20_000)
        box = visit.page.locator("mjx-container").first.bounding_box()
        assert box["width"] > 3
        assert box["height"] > 3
        assert visit.page.evaluate("document.fonts.ready.then(() => document.fonts.check('16px MJXTEX-I'))")


def test_search_finds_a_word(browser: Any) -> None:
    with Visit(browser, "search?q=vermillion") as visit:
        visit.page.wait_for_selector("ul.search li a", timeout=20_000)
        assert "Notation" in visit.page.locator("ul.search").inner_text()
        assert visit.complaints == []
        assert visit.outside == []
