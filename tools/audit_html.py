"""Audits of the built book: links and pictures of the pages as they are, and what they weigh."""

from __future__ import annotations

from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

MAX_BOOK = 40e6  # bytes of all files
MAX_PAGE = 5e6  # bytes of one page with the scripts, styles and pictures that it loads


class Page(HTMLParser):
    """The anchors of one page, what it links to, what it loads, and its pictures without words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = {"", "top"}
        self.targets: list[str] = []
        self.loads: list[str] = []
        self.wordless: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note one element."""
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


def pages(html: Path) -> dict[str, Page]:
    """Every page of the built book by its path."""
    files = sorted(path for path in html.rglob("*.html") if "_static" not in path.parts)
    return {path.relative_to(html).as_posix(): Page(path.read_text("utf-8")) for path in files}


def outside(url: str) -> bool:
    """Whether an address leads out of the book."""
    return bool(urlsplit(url).scheme or urlsplit(url).netloc) and not url.startswith("data:")


def dead(html: Path, parsed: dict[str, Page], name: str, url: str) -> str:
    """What is wrong with an internal address on a page, or nothing."""
    parts = urlsplit(urljoin(name, url))
    path = unquote(parts.path) or name
    if not (html / path).exists():
        return f"{name}: {url} leads nowhere"
    if parts.fragment and path in parsed and unquote(parts.fragment) not in parsed[path].anchors:
        return f"{name}: {url}, no such anchor"
    return ""


def built(html: Path) -> list[str]:
    """A dead link, a picture without words or a request to elsewhere, on a page of the built book."""
    parsed = pages(html)
    if not parsed:
        return [f"{html}: no built book, run `make book`"]
    found = []
    for name, page in parsed.items():
        inner = [url for url in [*page.targets, *page.loads] if not outside(url) and not url.startswith("data:")]
        found += [said for url in inner if (said := dead(html, parsed, name, url))]
        found += [f"{name}: loads {url}" for url in page.loads if outside(url)]
        found += [f"{name}: {picture} has no words" for picture in page.wordless]
    return found


def weighed(html: Path) -> Counter[str]:
    """Bytes of the built book by folder, files at its root by their ending."""
    found: Counter[str] = Counter()
    for path in html.rglob("*"):
        if path.is_file():
            parts = path.relative_to(html).parts
            found["/".join(parts[: min(2, len(parts) - 1)]) or f"*{path.suffix}"] += path.stat().st_size
    return found


def loaded(html: Path, name: str, page: Page) -> int:
    """Bytes of a page and of all that it loads, fonts of formulas left out."""
    files = {name} | {unquote(urlsplit(urljoin(name, url)).path) for url in page.loads if not outside(url)}
    return sum((html / file).stat().st_size for file in files if (html / file).is_file())


def weight(html: Path) -> list[str]:
    """A built book of more than 40 MB, or a page that loads more than 5 MB."""
    parsed, total = pages(html), weighed(html)
    for key, size in total.most_common(12):
        print(f"    {size / 1e6:6.2f} MB  {key}")
    heavy = sorted(((loaded(html, name, page), name) for name, page in parsed.items()), reverse=True)
    print("".join(f"    {size / 1e6:6.2f} MB  {name} with what it loads\n" for size, name in heavy[:3]), end="")
    found = [f"{name}: {size / 1e6:.1f} MB with what it loads" for size, name in heavy if size > MAX_PAGE]
    if total.total() > MAX_BOOK:
        found.append(f"the book weighs {total.total() / 1e6:.1f} MB")
    return found
