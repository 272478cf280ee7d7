# Exported from book/appendices/A6_serving_commands.py by tools/export.py; edit the chapter, not this file.
"""A bench while it runs, for a terminal: blocks, queues, rates; or one line for a log.

Chats A, B, C ... have letters as well as the book's colours, so that nothing hangs on colour.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_kv.bench_run import Bench, tokens_per_s
from paged_kv.engine import Engine

FREE, CACHED, SHARED, UNKNOWN = ".", "o", "+", "?"
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00")  # A, B, C, D; then again
WIDTH, MOST_ROWS = 64, 8
LEGEND = "A-Z a chat's own   + shared   o cached, nobody's now   . free"


def block_letters(engine: Engine, letters: dict[Any, str]) -> NDArray[np.str_]:
    """One letter a block, [num_blocks]: who holds it, or why nobody does.

    Args: `letters`, of requests by id.
    """
    pool, tables, rows = engine.manager.pool, engine.manager.tables, engine.scheduler.ledger.rows
    found = np.full(pool.num_blocks, FREE)
    if engine.cache is not None:
        named = engine.cache.names.named
        found[[block for block, node in enumerate(named) if node is not None]] = CACHED
    for row in engine.scheduler.home.running.tolist():
        group = rows.group[row]
        found[tables.ids(row)] = UNKNOWN if group is None else letters.get(group.id, UNKNOWN)
    found[pool.ref_count > 1] = SHARED
    return found


def fold_blocks(found: NDArray[np.str_], width: int = WIDTH, rows: int = MOST_ROWS) -> list[str]:
    """The letters in at most `rows` lines; where one stands for several blocks, a held one's."""
    each = -(-len(found) // (width * rows))
    cells = []
    for start in range(0, len(found), each):
        part = found[start : start + each]
        held = part[(part != FREE) & (part != CACHED)]
        cells.append(str(held[0] if len(held) else CACHED if CACHED in part else FREE))
    text = "".join(cells)
    return [text[start : start + width] for start in range(0, len(text), width)]


def style_of(letter: str) -> str:
    """The style of one letter: chats on the book's colours, what is free dim."""
    if letter.isupper():
        back = COLOURS[(ord(letter) - 65) % len(COLOURS)]
        return f"bold {'black' if back == COLOURS[1] else 'white'} on {back}"
    return {CACHED: "cyan", SHARED: "bold black on white", FREE: "dim"}.get(letter, "")


def bar(share: float, width: int = 20) -> str:
    """Such as "[#####.....]"."""
    full = round(min(max(share, 0.0), 1.0) * width)
    return f"[{'#' * full}{'.' * (width - full)}]"


def counted(counts: dict[str, int]) -> str:
    """Such as "eager 12, graph 3"; "none" of none."""
    return ", ".join(f"{name} {count}" for name, count in counts.items() if count) or "none"


def view_lines(bench: Bench) -> list[str]:
    """The figures of this moment, one or two a line, within 78 columns."""
    stats, totals, engine = bench.stats, bench.totals, bench.engine
    asked, cached = len(bench.load.requests), cached_blocks(engine)
    used, queued, filled = stats.blocks_used, stats.waiting, stats.slots_filled
    ended, since = sum(totals.reasons.values()), bench.now - bench.started
    first = totals.first_token.quantile(0.5) if totals.first_token.count else float("nan")
    each = totals.gaps.quantile(0.5) if totals.gaps.count else float("nan")
    free = stats.blocks - used - cached
    return [
        f"{since:6.1f} s   {bench.next} of {asked} requests came, {ended} ended",
        f"blocks   {bar(used / stats.blocks)} {used} used, {cached} cached, {free} free",
        f"slots    {bar(filled)} {100 * filled:.0f} % of the used are filled",
        f"hits     {bar(stats.hit_rate)} {100 * stats.hit_rate:.0f} % of prompt tokens were found",
        f"queues   running {stats.running}   waiting {queued}   swapped {stats.swapped}"
        f"   preempted: {counted(stats.preemptions)}",
        f"tokens   {tokens_per_s(bench):.1f} tokens/s now, {stats.tokens_made} so far;"
        f" steps: {counted(stats.step_kinds)}",
        f"p50      first token {first:.2f} s, then one in {1000 * each:.0f} ms",
    ]


def cached_blocks(engine: Engine) -> int:
    """Blocks that nobody holds and that a prompt could still find."""
    if engine.cache is None:
        return 0
    named, idle = engine.cache.names.named, engine.manager.pool.ref_count == 0
    return int(sum(idle[block] for block, node in enumerate(named) if node is not None))


def live_frame(bench: Bench) -> Any:
    """All of it, for rich: the pool, the figures, the newest answer."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    letters = {name: watch.letter for name, watch in bench.watches.items()}
    pool = []
    for line in fold_blocks(block_letters(bench.engine, letters)):
        text = Text("  ")
        for letter in line:
            text.append(letter, style_of(letter))
        pool.append(text)
    parts = [*pool, Text(f"  {LEGEND}", style="dim"), Text("")]
    parts += [Text(line, no_wrap=True, overflow="ellipsis") for line in view_lines(bench)]
    if bench.newest is not None and bench.newest.text:
        said = "".join(c for c in " ".join(bench.newest.text.split()) if c.isprintable())
        newest = Text(f"newest   {said}", no_wrap=True, overflow="ellipsis", style="italic")
        parts += [Text(""), newest]
    return Panel(Group(*parts), title="paged-kv watch", width=80)


def plain_line(bench: Bench) -> str:
    """All of it in one line, for logs and for terminals that are none."""
    stats, ended = bench.stats, sum(bench.totals.reasons.values())
    return (
        f"{bench.now - bench.started:6.1f} s  came {bench.next:3}  ended {ended:3}"
        f"  running {stats.running:3}  waiting {stats.waiting:3}"
        f"  blocks {stats.blocks_used:4}/{stats.blocks}  hits {100 * stats.hit_rate:3.0f} %"
        f"  {tokens_per_s(bench):6.1f} tokens/s"
    )


def watch_bench(bench: Bench, plain: bool, stopped: Callable[[], bool]) -> None:
    """Run a bench to its end and show it: redrawn in place, or one line a second."""
    if plain:
        shown = -1.0
        while not (bench.done or stopped()):
            bench.step()
            if bench.now - bench.started >= shown + 1:
                print(plain_line(bench), flush=True)
                shown = bench.now - bench.started
        return
    from rich.live import Live

    drawn = 0.0
    with Live(live_frame(bench), auto_refresh=False, transient=False) as live:
        while not (bench.done or stopped()):
            bench.step()
            if bench.now - drawn > 0.1:
                drawn = bench.now
                live.update(live_frame(bench), refresh=True)
        live.update(live_frame(bench), refresh=True)
