"""What the tests of the widgets share: a page that shows them, and the same stories told by the package."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

from paged_kv.block_manager import BlockManager
from paged_kv.block_pool import OutOfBlocks
from paged_kv.contiguous import ContiguousPool, OutOfSlots, ReservationFull
from paged_kv.copy_on_write import fork, make_writable

ROOT = Path(__file__).resolve().parents[1]
STATIC = ROOT / "book/_static"
SCRIPTS = ("capacity-planner.js", "paged-pool.js", "planner-models.js")

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Widgets</title>{links}
<style>body {{ margin: 12px; font: 16px sans-serif; background: var(--pk-bg); }}</style>
{scripts}</head>
<body><main>{body}</main></body></html>
"""


def write_page(folder: Path, body: str) -> Path:
    """A page in `folder` with the shipped scripts and styles, and nothing of the book's theme."""
    page = folder / "page.html"
    links = "".join(
        f'<link rel="stylesheet" href="{(STATIC / name).as_uri()}">' for name in ("book.css", "widgets.css")
    )
    scripts = "".join(f'<script src="{(STATIC / name).as_uri()}"></script>' for name in SCRIPTS)
    page.write_text(PAGE.format(links=links, scripts=scripts, body=body), "utf-8")
    return page


@contextmanager
def opened(browser: Any, url: str, width: int = 1000, scheme: str = "light") -> Iterator[Any]:
    """The page in a window of its own; leaving it fails on anything it complained about or asked the network for."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    bad: list[str] = []
    page.on("pageerror", lambda error: bad.append(f"error: {error}"))
    page.on("console", lambda message: bad.append(message.text) if message.type in {"error", "warning"} else None)
    page.on("request", lambda request: bad.append(request.url) if request.url.startswith("http") else None)
    page.goto(url, wait_until="load")
    page.set_default_timeout(5_000)
    try:
        yield page
        assert not bad, bad
    finally:
        context.close()


AXE = """([within, without, rules]) => axe.run(
    without?.length ? {exclude: without.map((one) => [one])} : within || document,
    {...rules, preload: false, resultTypes: ['violations'], performanceTimer: false})"""

# All of WCAG 2.1 A and AA, and what else axe-core may call serious; its other rules of good practice are moderate.
SERIOUS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]
MORE = ("accesskeys", "aria-dialog-name", "aria-text", "aria-treeitem-name", "label-title-only", "tabindex")


def axe_findings(
    page: Any, within: str | None = None, rules: dict[str, Any] | None = None, without: list[str] | None = None
) -> list[str]:
    """What axe-core finds serious or critical on the page, within a CSS selector, or without some."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(files("axe_playwright_python").joinpath("axe.min.js").read_text("utf-8"))
    found = page.evaluate(AXE, [within, without, rules or {}])
    return [
        f"{one['id']}: {one['help']}: {node['html'][:120]}"
        for one in found["violations"]
        if one["impact"] in {"serious", "critical"}
        for node in one["nodes"]
    ]


# Nine tenths of a page are coloured words of code.  Two words of one class in the same kind of box
# look alike, so that one of them stays for axe-core to judge and the others leave the page; so do
# the strokes of pictures, which have a text for those who cannot see them.
THIN_OUT = """() => {
    const paths = new Map(), seen = new Set();
    const path = (one) => {
        if (!one.parentElement) return '';
        if (!paths.has(one)) {
            const look = [one.localName, one.className, one.getAttribute('style')].join('.');
            paths.set(one, `${path(one.parentElement)} ${look}`);
        }
        return paths.get(one);
    };
    for (const word of document.querySelectorAll('pre span:not([id]), dt span:not([id])')) {
        if (!word.isConnected || word.closest('a') || word.querySelector('a, [id]')) continue;
        if (seen.has(path(word))) word.remove();
        else seen.add(path(word));
    }
    document.querySelectorAll('svg :is(path, rect, line, polyline), mjx-container > mjx-math > *')
        .forEach((one) => one.remove());
}"""

# Contrast depends on the colour, the ground, the size and the weight: the book has some dozens of
# those, and a page has thousands of words.  axe-core judges two words of each that is new to it;
# it does not judge single characters.
MARK_LOOKS = """(known) => {
    const seen = new Map(known.map((look) => [look, 2])), grounds = new Map();
    const ground = (one) => {
        if (!one) return '';
        if (!grounds.has(one)) {
            const {backgroundColor, backgroundImage, opacity, filter} = getComputedStyle(one);
            const own = [backgroundColor, backgroundImage, opacity, filter].join();
            const plain = own === 'rgba(0, 0, 0, 0),none,1,none';
            grounds.set(one, ground(one.parentElement) + (plain ? '' : `/${own}`));
        }
        return grounds.get(one);
    };
    for (const one of document.body.querySelectorAll('*')) {
        delete one.dataset.look;
        const speaks = [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim()[1]);
        if (!(speaks || one.matches('input, select, textarea')) || !one.checkVisibility()) continue;
        const {color, fontSize, fontWeight, textShadow} = getComputedStyle(one);
        const look = [color, fontSize, fontWeight, textShadow, ground(one)].join();
        seen.set(look, (seen.get(look) || 0) + 1);
        if (seen.get(look) <= 2) one.dataset.look = '';
    }
    return [...seen.keys()];
}"""


def axe_findings_in_theme(page: Any, theme: str, known: set[str], without: list[str]) -> list[str]:
    """Serious findings of axe-core on a page of the book, which loses most of its code by it.

    `known`: the looks of text whose contrast was judged before; those of this page are added.  `without`: parts that
    all pages have in common.
    """
    page.evaluate(THIN_OUT)
    chosen = {name: {"enabled": True} for name in MORE} | {"color-contrast": {"enabled": False}}
    found = axe_findings(page, rules={"runOnly": SERIOUS, "rules": chosen}, without=without)
    page.evaluate("axe.configure({rules: [{id: 'color-contrast', selector: '[data-look]'}]})")
    page.evaluate("theme => { document.documentElement.dataset.theme = theme; }", theme)
    page.wait_for_function("document.getAnimations().every((one) => one.playState !== 'running')")
    looks = set(page.evaluate(MARK_LOOKS, sorted(known)))
    if looks - known:
        found += [f"{theme}: {one}" for one in axe_findings(page, rules={"runOnly": ["color-contrast"]})]
    known |= looks
    return found


# ---- the package plays the same events


class Queue:
    """Chats before a pool, in order of arrival; `admit` and the other moves are the pool's."""

    refusals: tuple[type[Exception], ...]

    def __init__(self) -> None:
        self.waiting: list[list[Any]] = []

    def has(self, chat: str) -> bool:
        raise NotImplementedError

    def fits_ever(self, tokens: int) -> bool:
        raise NotImplementedError

    def play(self, event: dict[str, Any]) -> None:
        chat, waits = event["chat"], [one[0] for one in self.waiting]
        if event["op"] == "arrive" and not self.has(chat) and chat not in waits:
            self.arrive(chat, event["tokens"])
        elif event["op"] == "write" and self.has(chat):
            self.attempt(self.write, chat, event["tokens"])
        elif event["op"] == "finish":
            self.waiting = [one for one in self.waiting if one[0] != chat]
            if self.has(chat):
                self.finish(chat)
            self.admit_waiting()
        elif event["op"] == "fork" and not self.has(event["child"]) and event["child"] not in waits:
            if chat in waits:
                self.arrive(event["child"], self.waiting[waits.index(chat)][1])
            elif self.has(chat):
                why = self.attempt(self.fork, chat, event["child"])
                if why:
                    self.waiting.append([event["child"], self.length(chat), why])

    def attempt(self, move: Any, *arguments: Any) -> str:
        try:
            move(*arguments)
        except self.refusals as refusal:
            return str(refusal)
        return ""

    def arrive(self, chat: str, tokens: int) -> None:
        self.waiting.append([chat, tokens, "others wait before it"])
        self.admit_waiting()

    def admit_waiting(self) -> None:
        while self.waiting:
            chat, tokens, _ = self.waiting[0]
            if self.fits_ever(tokens):
                why = self.attempt(self.admit, chat, tokens)
                if why:
                    self.waiting[0][2] = why
                    return
            self.waiting.pop(0)


class Runs(Queue):
    """The contiguous pool of chapter 02, one reservation for all."""

    refusals = (OutOfSlots, ReservationFull)

    def __init__(self, slots: int, reservation: int) -> None:
        super().__init__()
        self.pool, self.reservation = ContiguousPool(slots), reservation

    def has(self, chat: str) -> bool:
        return chat in self.pool.snapshot()["reservations"]

    def fits_ever(self, tokens: int) -> bool:
        return tokens <= self.reservation <= self.pool.num_slots

    def length(self, chat: str) -> int:
        return int(self.pool.snapshot()["reservations"][chat][2])

    def admit(self, chat: str, tokens: int) -> None:
        self.pool.reserve(chat, self.reservation)
        self.pool.grow(chat, tokens)

    def write(self, chat: str, tokens: int) -> None:
        self.pool.grow(chat, tokens)

    def finish(self, chat: str) -> None:
        self.pool.finish(chat)

    def fork(self, parent: str, child: str) -> None:
        self.admit(child, self.length(parent))

    def frame(self) -> dict[str, Any]:
        self.pool.check()
        state = self.pool.snapshot()
        runs = {chat: list(run) for chat, run in state["reservations"].items()}
        used, held = (sum(run[i] for run in runs.values()) for i in (2, 1))
        assert max([length for _, length in self.pool._free.items()], default=0) == self.pool.largest_free_run
        return {
            "num_slots": state["num_slots"],
            "reservations": runs,
            "pieces": sorted(map(list, self.pool._free.items())),
            "counts": {"used": used, "held": held, "wasted": held - used, "free": self.pool.free_slots},
            "waiting": self.waiting,
        }


class Blocks(Queue):
    """The block manager of chapter 03 with the copies of chapter 06."""

    refusals = (OutOfBlocks,)

    def __init__(self, slots: int, block_size: int) -> None:
        super().__init__()
        self.manager = BlockManager(slots // block_size, block_size, max_seqs=8, max_seq_len=8 * slots)
        self.rows: dict[str, int] = {}

    def has(self, chat: str) -> bool:
        return chat in self.rows

    def fits_ever(self, tokens: int) -> bool:
        return -(-tokens // self.manager.block_size) <= self.manager.pool.num_blocks

    def length(self, chat: str) -> int:
        return int(self.manager.tables.seq_lens[self.rows[chat]])

    def admit(self, chat: str, tokens: int) -> None:
        self.rows[chat] = self.manager.add(tokens)

    def write(self, chat: str, tokens: int) -> None:
        make_writable(self.manager, [self.rows[chat]], tokens)
        self.manager.append([self.rows[chat]], tokens)

    def finish(self, chat: str) -> None:
        self.manager.finish(self.rows.pop(chat))

    def fork(self, parent: str, child: str) -> None:
        self.rows[child] = fork(self.manager, self.rows[parent])

    def frame(self) -> dict[str, Any]:
        self.manager.check()
        state = self.manager.snapshot(self.rows)
        size = state["block_size"]
        slots = {
            (state["tables"][chat][position // size], position % size)
            for chat, length in state["seq_lens"].items()
            for position in range(length)
        }
        held = size * len({block for ids in state["tables"].values() for block in ids})
        counts = {"used": len(slots), "held": held, "wasted": held - len(slots), "free": size * len(state["free"])}
        return {**state, "counts": counts, "waiting": self.waiting}


def random_story(rng: random.Random, length: int = 30) -> dict[str, Any]:
    """Settings and events at random; many of them make no sense, which is the point."""
    events: list[dict[str, Any]] = []
    for op in rng.choices(["arrive", "write", "finish", "fork"], [25, 50, 11, 14], k=length):
        event: dict[str, Any] = {"op": op, "chat": rng.choice("ABCDEF")}
        if op == "arrive":
            event["tokens"] = rng.choice([0, 1, rng.randint(1, 12), rng.randint(1, 40)])
        elif op == "write":
            event["tokens"] = rng.choice([0, 1, 1, 4, rng.randint(1, 9)])
        elif op == "fork":
            event["child"] = rng.choice("ABCDEF")
        events.append(event)
    settings = {
        "slots": rng.randint(16, 96),
        "blockSize": rng.choice([1, 2, 3, 4, 8, 16]),
        "reservation": rng.randint(1, 40),
    }
    return {"settings": settings, "events": events}


def told_by_the_package(story: dict[str, Any]) -> list[dict[str, Any]]:
    """The state of both pools after each event of a story."""
    settings = story["settings"]
    pools = {
        "contiguous": Runs(settings["slots"], settings["reservation"]),
        "paged": Blocks(settings["slots"], settings["blockSize"]),
    }
    frames = []
    for event in story["events"]:
        for pool in pools.values():
            pool.play(event)
        frames.append(
            {name: pool.frame() | {"waiting": [list(w) for w in pool.waiting]} for name, pool in pools.items()}
        )
    return frames
