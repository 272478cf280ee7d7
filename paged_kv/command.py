# Exported from book/appendices/A2_command_line.py by tools/export.py; edit the chapter, not this file.
"""Where `paged-kv` starts: whatever package is missing, one line says how to install it."""

import sys
from importlib import import_module

EXTRAS = {"typer": "cli", "rich": "cli", "torch": "model", "triton": "gpu"} | dict.fromkeys(
    ("transformers", "tokenizers", "accelerate", "gguf", "safetensors"), "model"
)


def start(arguments: list[str] | None = None) -> None:
    """Run `paged_kv.cli.main`; a package that is missing is one line and exit code 2."""
    try:
        import_module("paged_kv.cli").main(arguments)
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in EXTRAS:
            raise
        hint = f"in the repository: pip install -e '.[{EXTRAS[name]}]'"
        print(f"paged-kv: {name} is not installed; {hint}", file=sys.stderr)
        sys.exit(2)
