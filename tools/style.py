"""Where each chapter stands against the limits of the book's style: one row a chapter.

    python tools/style.py [NN ...] [--faults]

Words; cells that show their source, and the lines of those that are not exported; exercises and their kinds;
predictions; the headings that every chapter has.  What is out of its limits stands behind `!`.  With --faults only the
chapters that have some, and exit code 1 if there are any.
"""

from __future__ import annotations

import argparse
import re
import statistics
from dataclasses import dataclass

from chapters import ROOT, Chapter, find_chapters, main

WORDS, LAB_WORDS, CELLS = (2000, 3500), (700, 1500), (20, 30)
MEDIAN_LINES, EXPORTED_LINES, PROSE_A_LINE = 8, 40, (8, 15)
EXERCISES, KINDS, PREDICTIONS = 5, 4, 3
HEADINGS = ("State card", "Real world", "Exercises", "Further reading")
KIND = re.compile(r"(?i)\b(compute|trace|break|implement)\b")


@dataclass(frozen=True)
class Figures:
    """What is counted in a chapter."""

    words: int
    cells: int
    median_lines: float
    longest_exported: int
    prose_a_line: float
    exercises: int
    kinds: int
    answers: int
    predictions: int
    missing: tuple[str, ...]


def count_words(markdown: str) -> int:
    """Words of prose: without code, addresses, and the marks of directives, figures and tables."""
    text = re.sub(r"(?s)```.*?```|\$\$.*?\$\$|`[^`]*`|\$[^$]*\$", " x ", markdown)
    lines = [line for line in text.splitlines() if not re.match(r"\s*(:{3,}|:\w+:|\|[-\s|:]+\|)", line)]
    return len(re.findall(r"[^\W\d_][\w'’-]*", re.sub(r"\]\([^)]*\)|\{\w+\}", " ", "\n".join(lines))))


def figures(chapter: Chapter) -> Figures:
    """Count."""
    cells = chapter.cells()
    prose = "\n\n".join(cell.source for cell in cells if cell.kind == "markdown")
    code = [cell for cell in cells if cell.kind == "code"]
    shown = [cell for cell in code if not {"hide-input", "remove-input"} & set(cell.tags)]
    lengths = [len(cell.source.splitlines()) for cell in shown]
    is_exported = [any(tag.startswith("export") for tag in cell.tags) for cell in shown]
    exported = [lines for lines, kept in zip(lengths, is_exported, strict=True) if kept]
    small = [lines for lines, kept in zip(lengths, is_exported, strict=True) if not kept]
    words, exercises = count_words(prose), re.findall(r"(?ms)^:{3,}\{exercise\}(.*?)^:{3,}\s*$", prose)
    has = {
        "question": "**The question.**" in " ".join(prose.split()),
        "card": bool(re.search(r":{3,}\{card\} This (chapter|lab|appendix)", prose)),
        "you are here": "ou are here" in prose,
        "mistakes": "Check it yourself" in prose,
        "knob": "Turn the knob" in " ".join(prose.split()),
        "cite": "{cite" in prose,
    } | {name: bool(re.search(rf"(?m)^## {name}", prose)) for name in HEADINGS}
    return Figures(
        words=words,
        cells=len(shown),
        median_lines=statistics.median(small or [0]),
        longest_exported=max(exported, default=0),
        prose_a_line=words / max(1, sum(lengths)),
        exercises=len(exercises),
        kinds=len({kind.lower() for text in exercises for kind in KIND.findall(text.split("\n\n")[0])}),
        answers=len(re.findall(r"(?m)^:{3,}\{solution\}", prose)),
        predictions=len(re.findall(r":{3,}\{admonition\} Predict", prose)),
        missing=tuple(name for name, there in has.items() if not there),
    )


def faults(chapter: Chapter, found: Figures) -> dict[str, bool]:
    """Which figures are out of their limits.  Labs and appendices have limits of their own."""
    stem = chapter.stem
    lab, numbered = stem.startswith("L"), stem[:2].isdigit() and stem[:2] != "00"
    low, high = LAB_WORDS if lab else WORDS
    return {
        "words": found.words > high or (numbered and found.words < low),
        "cells": numbered and not CELLS[0] <= found.cells <= CELLS[1],
        "median_lines": found.median_lines > MEDIAN_LINES,
        "longest_exported": found.longest_exported > EXPORTED_LINES,
        "prose_a_line": numbered and not PROSE_A_LINE[0] <= found.prose_a_line <= PROSE_A_LINE[1],
        "exercises": numbered and found.exercises < EXERCISES,
        "kinds": numbered and found.kinds < KINDS,
        "answers": found.answers < found.exercises,
        "predictions": numbered and found.predictions < PREDICTIONS,
        "missing": numbered and bool(found.missing),
    }


def row(chapter: Chapter) -> tuple[str, bool]:
    """A chapter's row, and whether something in it is out of its limits."""
    found = figures(chapter)
    out = faults(chapter, found)
    shown = []
    for name in out:
        value = getattr(found, name)
        text = f"{value:.1f}" if isinstance(value, float) else ", ".join(value) if name == "missing" else str(value)
        shown.append(f"{'!' if out[name] else ''}{text or '-'}")
    return f"| {chapter.stem.partition('_')[0]} | " + " | ".join(shown) + " |", any(out.values())


def _run() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("chapters", nargs="*", metavar="NN")
    parser.add_argument("--faults", action="store_true", help="only chapters out of the limits; exit 1 if any")
    options = parser.parse_args()
    rows = [row(chapter) for chapter in find_chapters(ROOT, options.chapters)]
    print("| chapter | words | cells | median lines | longest export | words a line | exercises | kinds | answers "
          "| predictions | missing |\n|" + "---|" * 11)  # fmt: skip
    print("\n".join(text for text, bad in rows if bad or not options.faults))
    return int(options.faults and any(bad for _, bad in rows))


if __name__ == "__main__":
    main(_run)
