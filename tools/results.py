"""The README's table of measured results, written from benchmarks/results/*.json.

    python tools/results.py [--check]

Each JSON says what it measured, where and with which modules; a result whose modules have changed since is
marked in the table.  --check writes nothing and exits 1 where the README says something else.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.common import RESULTS, module_hash  # noqa: E402

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"

# What the README says of a headline figure; figures not listed stay in the JSON and in their chapter.
SAYS = {
    "bookkeeping": {
        "x_vllm_64": "bookkeeping of a decode step, 64 running: times faster than vLLM 0.23's KVCacheManager",
        "x_vllm_256": "the same, 256 running",
        "x_vllm_1024": "the same, 1,024 running",
        "us_1": "the same, one running: microseconds",
    },
}


def results() -> dict[str, dict[str, Any]]:
    """Every result by its name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}


def stale(result: dict[str, Any]) -> bool:
    """Whether a module has changed since it was measured."""
    return bool(module_hash(result["modules"]) != result["module_hash"])


def table() -> str:
    """The Markdown table for the README."""
    lines = ["| measured | figure | device | by |", "|---|---|---|---|"]
    for name, result in results().items():
        note = ", modules changed since" if stale(result) else ""
        for figure, words in SAYS.get(name, {}).items():
            device, script = result["device"], f"`benchmarks/{name}.py`"
            lines.append(f"| {words} | {result['headline'][figure]} | {device}{note} | {script} |")
    return "\n".join(lines)


def filled(readme: str) -> str:
    """The README's text with the table in its place."""
    before, rest = readme.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


def main() -> int:
    """Write the table into README.md, or with --check only compare."""
    path = ROOT / "README.md"
    old = path.read_text()
    new = filled(old)
    if "--check" in sys.argv[1:]:
        if new != old:
            print("README.md: its results are not those of benchmarks/results; run `python tools/results.py`")
        return int(new != old)
    path.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
