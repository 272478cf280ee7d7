"""Write what the capacity planner of the book knows about models, from the package and book/data/configs.

    python tools/planner_data.py [--check]

The planner's arithmetic is written by hand in book/_static/capacity-planner.js; its tables (names of facts, defaults
of model classes, kinds of layers, units, the tested configs) are these, so that they stand in one place.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "book/_static/planner-models.js"


def render() -> str:
    """The script, one line a table and one a model."""
    from paged_kv import config_facts, configs, sizing, weights

    tables = {
        "NAMES": config_facts.NAMES,
        "CLASS_DEFAULTS": config_facts.CLASS_DEFAULTS,
        "TEXT_PARTS": config_facts.TEXT_PARTS,
        "KINDS": configs.KINDS,
        "DTYPES": configs.DTYPES,
        "BITS": sizing.BITS,
        "BINARY_UNITS": sizing.BINARY_UNITS,
        "DECIMAL_UNITS": sizing.DECIMAL_UNITS,
        "FAMILIES": weights.FAMILIES,
    }
    lines = [f"  {name}: {json.dumps(table)}," for name, table in tables.items()]
    models = []
    for path in sorted((ROOT / "book/data/configs").glob("*.json")):
        config = json.loads(path.read_text("utf-8"))
        config.pop("source", None)
        models.append(f"    {json.dumps(path.stem)}: {json.dumps(config)},")
    return "\n".join(
        [
            "// Written by tools/planner_data.py from paged_kv and book/data/configs; change those, not this file.",
            "window.PLANNER_DATA = {",
            *lines,
            "  MODELS: {",
            *models,
            "  },",
            "};",
            "",
        ]
    )


def main() -> int:
    """Write the script, or with --check say whether it is current."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail if the script is not current")
    arguments = parser.parse_args()
    text = render()
    if arguments.check:
        if TARGET.read_text("utf-8") != text:
            print(f"{TARGET.relative_to(ROOT)} is not current: run python tools/planner_data.py", file=sys.stderr)
            return 1
        return 0
    TARGET.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
