"""Bring one chapter up to date: sync its pair, export its modules, run it, check it.

    python tools/chapter.py NN

Then it writes the register of the book's numbers anew.  It names the chapters that import its modules: they may have
to be run again.
"""

from __future__ import annotations

import argparse

from chapters import ROOT, Chapter, dependents, find_chapters, main, write_if_changed
from check_cells import check_cells
from check_prose import check_prose
from execute import run_and_report
from export import export
from number_register import PAGE, page
from sync import sync


def bring_up_to_date(chapter: Chapter) -> list[str]:
    """Sync, export and run a chapter, name those that import what changed; return what is still wrong with it."""
    print(sync(chapter) or f"{chapter.stem}: the pair is in step")
    written = export(chapter.root, [chapter.name])
    for line in written:
        print(f"written: {line}")
    run_and_report(chapter)
    if written and (others := dependents(chapter)):
        print(f"depend on it: {' '.join(other.stem for other in others)}")
    return [*check_cells(chapter), *check_prose(chapter)]


def _run() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("chapters", nargs="+", metavar="NN", help="a number, an appendix (A1) or the stem of a lab")
    options = parser.parse_args()
    found: list[str] = []
    for chapter in find_chapters(ROOT, options.chapters):
        found += bring_up_to_date(chapter)
    if write_if_changed(ROOT / PAGE, page()):
        print(f"written: {PAGE}")
    print("\n".join(found) or "checked: nothing to mend")
    return int(bool(found))


if __name__ == "__main__":
    main(_run)
