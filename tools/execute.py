"""Run chapters in a fresh kernel each, and keep their outputs.

    python tools/execute.py [--check] [NN ...]

An output is written only where it differs from the stored one after sanitising (book/nbval_sanitize.cfg; pictures by
their pixels), so running an unchanged chapter leaves its notebook as it was.  Lines `measured: ...` of a chapter that
runs no timer come from files and are compared as they are.

Cells tagged `gpu` run where CUDA is.  Elsewhere their outputs are kept while book/gpu_outputs.json says that nothing
they rest on has changed, kept under a banner where only something before them has, and cleared where they have.
"""

from __future__ import annotations

import argparse
import ast
import base64
import functools
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from chapters import (
    KERNEL,
    ROOT,
    BookError,
    Cell,
    Chapter,
    as_cells,
    code_imports,
    find_chapters,
    main,
    name_homes,
    package_trees,
    parse_cell,
    read_ipynb,
    with_all_they_import,
    write_if_changed,
    write_ipynb,
)
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from nbformat.v4 import new_output
from PIL import Image

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "TOKENIZERS_PARALLELISM": "false"}
TIMEOUT = 600  # seconds for one cell
TIMER = re.compile(r"perf_counter|process_time|monotonic|timeit|time\.time\(")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
BANNERS = {
    "stale": "Stale: recorded on {device} before the code above this cell changed.",
    "awaiting": "Awaiting a GPU: this cell has changed since it last ran on one.",
}


# ------------------------------------------------------------------------------------------ running


class ThisPython(KernelSpecManager):
    """Every kernel is this interpreter, whatever kernels the machine has registered."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        """The specification of a kernel in this interpreter."""
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}", "--log-level=ERROR"]
        return KernelSpec(argv=command, display_name=kernel_name, language="python")


def run_notebook(chapter: Chapter, notebook: NotebookNode, skip_gpu: bool) -> NotebookNode:
    """A copy of the notebook after a run in a fresh kernel; BookError names the cell that fails."""
    fresh = deepcopy(notebook)
    for cell in fresh.cells:
        if cell.cell_type == "code" and not (skip_gpu and is_gpu(cell)):
            cell.outputs, cell.execution_count = [], None
    path = os.pathsep.join(filter(None, [str(chapter.root), os.environ.get("PYTHONPATH", "")]))
    client = NotebookClient(
        fresh,
        timeout=TIMEOUT,
        record_timing=False,
        km=AsyncKernelManager(kernel_name="python3", kernel_spec_manager=ThisPython()),
        resources={"metadata": {"path": str(chapter.ipynb.parent)}},
        skip_cells_with_tag="gpu" if skip_gpu else "skip-execution",
    )
    reached: list[int] = []
    client.on_cell_execute = lambda cell, cell_index: reached.append(cell_index)
    try:
        client.execute(env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path})
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        at = chapter.where(reached[-1], as_cells(fresh)[reached[-1]]) if reached else chapter.stem
        raise BookError(f"{at}\n{_short(error)}") from None
    return fresh


def _short(error: Exception) -> str:
    lines = COLOUR.sub("", str(error)).strip().splitlines()
    return "\n".join(f"    {line}" for line in lines[-12:])


def is_gpu(cell: NotebookNode) -> bool:
    """Whether a cell's output depends on the device."""
    return "gpu" in cell.metadata.get("tags", ())


# ------------------------------------------------------------------------------------------ comparing


def read_sanitizers(root: Path) -> list[tuple[str, str]]:
    """The (regex, replacement) pairs of book/nbval_sanitize.cfg, read as nbval reads them."""
    path = root / "book" / "nbval_sanitize.cfg"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return re.findall(r"^regex: (.*)$\n^replace: (.*)$", text, flags=re.MULTILINE)


def canonical(outputs: Sequence[NotebookNode], sanitizers: Sequence[tuple[str, str]]) -> list[Any]:
    """What two runs must have in common: text sanitised, pictures as pixels."""
    return [
        [
            output.output_type,
            output.get("name", ""),
            _sanitise(output.get("text", ""), sanitizers),
            [output.get("ename", ""), _sanitise(output.get("evalue", ""), sanitizers)],
            {kind: _datum(kind, value, sanitizers) for kind, value in output.get("data", {}).items()},
            output.get("metadata", {}),
        ]
        for output in outputs
    ]


def _sanitise(text: str, sanitizers: Sequence[tuple[str, str]]) -> str:
    for regex, replacement in sanitizers:
        text = re.sub(regex, replacement, text)
    return text


def _datum(kind: str, value: Any, sanitizers: Sequence[tuple[str, str]]) -> Any:
    if kind in {"image/png", "image/jpeg"}:
        with Image.open(io.BytesIO(base64.b64decode(value))) as image:
            return hashlib.sha256(repr(image.size).encode() + image.convert("RGBA").tobytes()).hexdigest()
    return _sanitise(value, sanitizers) if isinstance(value, str) else value


def normalise(outputs: Sequence[NotebookNode], count: int | None) -> list[NotebookNode]:
    """Outputs as they are stored: streams joined, errors in one line, counts by position."""
    stored: list[NotebookNode] = []
    for output in deepcopy(list(outputs)):
        output.pop("transient", None)
        if output.output_type == "execute_result":
            output.execution_count = count
        if output.output_type == "error":
            output.traceback = [f"{output.ename}: {output.evalue}"]
        earlier = _open_stream(stored, output.name) if output.output_type == "stream" else None
        if earlier is None:
            stored.append(output)
        else:
            earlier.text += output.text
    return stored


def _open_stream(stored: Sequence[NotebookNode], name: str) -> NotebookNode | None:
    """The stream that text under this name goes on with: how two streams interleave is a matter of luck."""
    for output in reversed(stored):
        if output.output_type != "stream":
            return None
        if output.name == name:
            return output
    return None


# ------------------------------------------------------------------------------------------ GPU cells


def fingerprints(chapter: Chapter, cells: Sequence[Cell]) -> dict[int, dict[str, str]]:
    """For each GPU cell two hashes: its own code, and all that it rests on.

    It rests on the code cells before it and on the package's modules that they or it import.
    """
    trees = package_trees(chapter.root)
    homes = name_homes(trees)
    found = {}
    before: list[Cell] = []
    for index, cell in enumerate(cells):
        if cell.kind != "code":
            continue
        if "gpu" in cell.tags:
            modules = with_all_they_import(code_imports([*before, cell], homes), trees)
            rests_on = [_code(c.source) for c in before] + [ast.dump(trees[m]) for m in sorted(modules)]
            found[index] = {"own": _hash([_code(cell.source)]), "before": _hash(rests_on)}
        before.append(cell)
    return found


def _code(source: str) -> str:
    """Code without comments and layout."""
    try:
        return ast.dump(parse_cell(source))
    except SyntaxError:
        return source


def _hash(parts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def gpu_state(record: Mapping[str, Any], cell_id: str, prints: Mapping[str, str]) -> str:
    """What the record says about a GPU cell: "current", "stale" or "awaiting"."""
    known = record.get("cells", {}).get(cell_id)
    if not known or known["own"] != prints["own"]:
        return "awaiting"
    return "current" if known["before"] == prints["before"] else "stale"


def banner(state: str, device: str) -> NotebookNode:
    """The output that stands first in a GPU cell whose result is missing or old."""
    text = BANNERS[state].format(device=device)
    html = f'<div class="admonition warning gpu-{state}"><p class="admonition-title">{text}</p></div>'
    return new_output("display_data", {"text/plain": text, "text/html": html}, metadata={"gpu": state})


def settle_gpu_cells(chapter: Chapter, notebook: NotebookNode, records: Mapping[str, Any]) -> list[str]:
    """Put banners on, take them off, or clear outputs, as the record demands; list what is pending."""
    cells = as_cells(notebook)
    record = records.get(chapter.stem, {})
    pending = []
    for index, prints in fingerprints(chapter, cells).items():
        cell = notebook.cells[index]
        cell.outputs = [output for output in cell.outputs if "gpu" not in output.get("metadata", {})]
        # A cell that was cleared has no count; it waits even when its code is again what was recorded.
        state = gpu_state(record, cell.id, prints) if cell.execution_count is not None else "awaiting"
        if state == "awaiting":
            cell.outputs, cell.execution_count = [], None
        if state != "current":
            cell.outputs.insert(0, banner(state, record.get("device", "a GPU")))
            pending.append(f"{chapter.where(index, cells[index])}: {state}")
    return pending


def read_records(root: Path) -> dict[str, Any]:
    """book/gpu_outputs.json: for each chapter where and on what code its GPU cells ran."""
    path = root / "book" / "gpu_outputs.json"
    records: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return records


def record_gpu_run(chapter: Chapter, notebook: NotebookNode, device: Mapping[str, Any]) -> None:
    """Note in book/gpu_outputs.json that the GPU cells' outputs are from this machine and this code."""
    records = read_records(chapter.root)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=chapter.root, capture_output=True, text=True, check=False)
    prints = fingerprints(chapter, as_cells(notebook))
    records[chapter.stem] = {
        **device,
        "commit": commit.stdout.strip() if commit.returncode == 0 else None,
        "cells": {notebook.cells[index].id: both for index, both in prints.items()},
    }
    text = json.dumps(records, indent=1, sort_keys=True) + "\n"
    write_if_changed(chapter.root / "book" / "gpu_outputs.json", text)


@functools.cache
def cuda() -> dict[str, Any] | None:
    """The CUDA device of this machine and the versions that matter; None where there is none."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    versions = {"python": sys.version.split()[0], "torch": torch.__version__, "cuda": torch.version.cuda}
    try:
        import triton

        versions["triton"] = triton.__version__
    except ImportError:
        pass
    return {"device": torch.cuda.get_device_name(), "versions": versions}


# ------------------------------------------------------------------------------------------ one chapter


def execute(chapter: Chapter, check: bool = False) -> tuple[list[str], list[str]]:
    """Run one chapter and store its outputs (or with `check` only compare).

    Returns the cells whose output differs from the stored one, and the GPU cells that are pending.
    """
    if not chapter.ipynb.exists():
        raise BookError(f"{chapter.stem}: no notebook yet; run tools/sync.py first")
    stored = read_ipynb(chapter.ipynb)
    before = as_cells(stored)
    has_gpu = any(cell.cell_type == "code" and is_gpu(cell) for cell in stored.cells)
    device = cuda() if has_gpu else None
    fresh = run_notebook(chapter, stored, skip_gpu=has_gpu and device is None)
    if as_cells(read_ipynb(chapter.ipynb)) != before:
        raise BookError(f"{chapter.stem}: its cells were edited while it ran; nothing is written, run it again")
    if device and not check:
        record_gpu_run(chapter, fresh, device)
    pending = [] if device or not has_gpu else settle_gpu_cells(chapter, fresh, read_records(chapter.root))
    result = tidy(chapter, fresh)
    changed = keep_equal(chapter, stored, result)
    if not check:
        write_ipynb(chapter.ipynb, result)
    return changed, pending


def tidy(chapter: Chapter, fresh: NotebookNode) -> NotebookNode:
    """The notebook as it is stored: no metadata but tags, counts by position, no path of this machine."""
    fresh.metadata = NotebookNode(kernelspec=fresh.metadata.get("kernelspec", KERNEL))
    cells = as_cells(fresh)
    position = 0
    for index, cell in enumerate(fresh.cells):
        cell.metadata = NotebookNode({k: v for k, v in cell.metadata.items() if k == "tags"})
        if cell.cell_type != "code":
            continue
        position += 1
        awaiting = any(output.get("metadata", {}).get("gpu") == "awaiting" for output in cell.outputs)
        cell.execution_count = None if awaiting else position
        cell.outputs = normalise(cell.outputs, cell.execution_count)
        if str(chapter.root) in json.dumps(cell.outputs):
            raise BookError(f"{chapter.where(index, cells[index])}: its output holds a path of this machine")
    return fresh


def keep_equal(chapter: Chapter, stored: NotebookNode, result: NotebookNode) -> list[str]:
    """Take the stored outputs wherever the new ones are equal to them; name the cells where not."""
    sanitizers = read_sanitizers(chapter.root)
    cells = as_cells(result)
    if not any(TIMER.search(cell.source) for cell in cells if cell.kind == "code"):
        sanitizers = [pair for pair in sanitizers if "measured:" not in pair[0]]
    changed = []
    for index, (old, new) in enumerate(zip(stored.cells, result.cells, strict=True)):
        if new.cell_type != "code":
            continue
        if canonical(normalise(old.outputs, new.execution_count), sanitizers) == canonical(new.outputs, sanitizers):
            new.outputs = normalise(old.outputs, new.execution_count)
        elif not ("nbval-ignore-output" in cells[index].tags and "gpu" not in cells[index].tags and old.outputs):
            changed.append(chapter.where(index, cells[index]))
    return changed


def complaints(notebook: NotebookNode) -> list[str]:
    """Things in the outputs that a reader should not see: warnings on stderr."""
    return [
        output.text.strip().splitlines()[0]
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.output_type == "stream" and output.name == "stderr" and output.text.strip()
    ]


def run_and_report(chapter: Chapter, check: bool = False) -> bool:
    """Execute one chapter and print its time, its changed outputs and what is pending; say whether all is well."""
    start = time.perf_counter()
    changed, pending = execute(chapter, check)
    verb = "differ" if check else "new"
    print(f"{chapter.stem:28} {time.perf_counter() - start:6.1f} s   {len(changed)} outputs {verb}", flush=True)
    lines = [f"output differs: {line}" for line in changed] if check else []
    lines += [f"pending: {line}" for line in pending]
    lines += [f"on stderr: {line}" for line in complaints(read_ipynb(chapter.ipynb))]
    print("".join(f"    {line}\n" for line in lines), end="", flush=True)
    return not (check and changed)


def _run() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="run and compare only; exit 1 where an output differs")
    parser.add_argument("chapters", nargs="*", metavar="NN")
    options = parser.parse_args()
    failed = False
    for chapter in find_chapters(ROOT, options.chapters):
        try:
            failed |= not run_and_report(chapter, options.check)
        except BookError as error:
            failed = True
            print(f"{chapter.stem:28} failed\n{error}", flush=True)
    return int(failed)


if __name__ == "__main__":
    main(_run)
