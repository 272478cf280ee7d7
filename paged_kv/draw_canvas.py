# Exported from book/appendices/A1_drawing.py by tools/export.py; edit the chapter, not this file.
"""Pictures in three forms (text, SVG, words) and the canvas that the SVG is painted on."""

from dataclasses import dataclass
from html import escape


@dataclass(frozen=True, repr=False)
class Picture:
    """A finished picture: text in a terminal, SVG in a notebook, words for a screen reader.

    `text` and `alt` are strings; `svgs` holds the same drawing for a wide and for a narrow
    column, each an `<svg>` element. Equal input gives equal pictures, byte for byte.
    """

    text: str
    alt: str
    svgs: tuple[str, str]

    @property
    def svg(self) -> str:
        """The wide drawing with its style, fit to be a file of its own."""
        return self.svgs[0].replace("</title>", f"</title><style>{_STYLE}</style>", 1)

    def __repr__(self) -> str:
        """The text form."""
        return self.text

    def _repr_html_(self) -> str:
        wide, narrow = self.svgs
        body = f'<div class="pk-wide">{wide}</div><div class="pk-narrow">{narrow}</div>'
        body = wide if wide == narrow else body
        return f'<div class="pk-picture"><style>{_STYLE}</style>{body}</div>'


class Canvas:
    """SVG shapes on a sheet `width` units wide; one unit is one CSS pixel at full size.

    `y` (units, from the top) is the caller's pen: it only moves down, and ends as the height.
    """

    def __init__(self, width: float) -> None:
        """An empty sheet."""
        self.width = width
        self.y = 4.0
        self.shapes: list[str] = []

    def rect(self, x: float, y: float, width: float, height: float, css: str) -> None:
        """Paint a box whose top left corner is (x, y), in the class `css`."""
        size = f'width="{width:g}" height="{height:g}"'
        self.shapes.append(f'<rect class="{css}" x="{x:g}" y="{y:g}" {size} rx="2"/>')

    def line(self, d: str, css: str) -> None:
        """Paint the SVG path `d`."""
        if d:
            self.shapes.append(f'<path class="{css}" d="{d}"/>')

    def words(self, x: float, y: float, words: str, css: str = "") -> None:
        """Write `words` on the base line y, from x (or around x, with the class pk-mid)."""
        kind = f' class="{css}"' if css else ""
        self.shapes.append(f'<text{kind} x="{x:g}" y="{y:g}">{escape(words)}</text>')

    def letters(self, xs: list[float], y: float, letter: str, css: str) -> None:
        """Write one letter around each x in `xs`."""
        at = " ".join(f"{x:g}" for x in xs)
        word = escape(letter) * len(xs)
        self.shapes.append(f'<text class="{css}" x="{at}" y="{y:g}">{word}</text>')

    def hatch(self, x: float, y: float, width: float, height: float) -> None:
        """Fill a box with slanted lines: reserved, and holding nothing."""
        lines = []
        for c in range(4, int(width + height), 6):
            lines.append(f"M{x + max(0, c - height):g} {y + min(c, height):g}")
            lines.append(f"L{x + min(c, width):g} {y + max(0, c - width):g}")
        self.line("".join(lines), "pk-hatch")

    def svg(self, title: str, alt: str) -> str:
        """The finished `<svg>` element, named by `title`, described by `alt`."""
        size = f'viewBox="0 0 {self.width:g} {self.y:g}" width="{self.width:g}" height="{self.y:g}"'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="pk" {size} role="img" '
            f'aria-label="{escape(alt)}"><title>{escape(title)}</title>{"".join(self.shapes)}</svg>'
        )


_COLOURS = {
    "a": ("#0072b2", "#fff"),
    "b": ("#e69f00", "#000"),
    "c": ("#009e73", "#000"),
    "d": ("#d55e00", "#000"),
    "e": ("#56b4e9", "#000"),
    "f": ("#cc79a7", "#000"),
    "g": ("#f0e442", "#000"),
    "h": ("#882255", "#fff"),
}
_STYLE = (
    "svg.pk{max-width:100%;height:auto;color:var(--pk-fg,inherit);background:var(--pk-bg,none);"
    "font:13px system-ui,'Segoe UI',Helvetica,Arial,sans-serif}"
    "svg.pk:root{color:#1b1b1b;background:#fff}"
    "@media(prefers-color-scheme:dark){svg.pk:root{color:#e6e6e6;background:#16181c}}"
    ".pk-picture{container-type:inline-size;width:100%}.pk-narrow{display:none}"
    "@container(max-width:520px){.pk-wide{display:none}.pk-narrow{display:block}}"
    "html[data-theme=dark] .text_html:has(.pk-picture)"
    "{background:none!important;padding:0!important}"
    ".pk text{fill:currentColor}.pk .pk-mid{text-anchor:middle}"
    ".pk .pk-id{text-anchor:middle;font-size:12px;opacity:.8}"
    ".pk .pk-bold{text-anchor:middle;font-weight:700}"
    ".pk .pk-title{font-size:15px;font-weight:600}"
    ".pk .pk-note{fill:var(--pk-muted,currentColor)}"
    ".pk .pk-small{font-size:10.5px}"
    ".pk .pk-box{fill:none;stroke:currentColor;stroke-width:1.2}"
    ".pk .pk-free{fill:none;stroke:currentColor;stroke-width:1;stroke-dasharray:4 3;opacity:.7}"
    ".pk .pk-new{stroke-width:3;opacity:1}"
    ".pk .pk-other{fill:currentColor;opacity:.18}.pk .pk-stale{opacity:.6}"
    ".pk .pk-cut{stroke:var(--pk-bg,#fff);stroke-width:1;opacity:.45}"
    ".pk .pk-hatch{stroke:currentColor;stroke-width:1;opacity:.4;fill:none}"
    ".pk .pk-arrow{fill:none;stroke:currentColor;stroke-width:1.5}"
    + "".join(
        f".pk .pk-{key}{{fill:var(--pk-{key},{fill})}}"
        f".pk .pk-on-{key}{{fill:var(--pk-on-{key},{ink});text-anchor:middle;font-weight:700}}"
        for key, (fill, ink) in _COLOURS.items()
    )
)
