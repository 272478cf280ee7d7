"""What every benchmark shares: who measured what, and where the result goes."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def module_hash(modules: Sequence[str]) -> str:
    """SHA-256 over the sources of `modules` of paged_kv, in the order given; first 16 digits."""
    digest = hashlib.sha256()
    for name in modules:
        digest.update((ROOT / "paged_kv" / f"{name}.py").read_bytes())
    return digest.hexdigest()[:16]


def commit() -> str:
    """The commit that HEAD names, with + where the work tree differs; "unknown" outside git."""
    run = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run([*run, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*run, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def device() -> str:
    """The processor, its cores, and the GPU where there is one."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    text = f"{name}, {os.cpu_count()} cores"
    try:
        import torch

        if torch.cuda.is_available():
            text += f"; {torch.cuda.get_device_name()}"
    except ImportError:
        pass
    return text


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Python's version and that of each of `packages` which is installed."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def environment(packages: Sequence[str] = ("numpy", "torch")) -> dict[str, Any]:
    """Device, versions, commit and day: what a number needs beside it."""
    return {
        "device": device(),
        "versions": versions(packages),
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }


def write_result(
    name: str,
    *,
    modules: Sequence[str],
    workload: str,
    repeats: int,
    rows: list[dict[str, Any]],
    headline: dict[str, Any],
    statistic: str = "median",
    packages: Sequence[str] = ("numpy", "torch"),
    **more: Any,
) -> Path:
    """Write benchmarks/results/NAME.json, or under $RESULTS_DIR; return its path."""
    folder = Path(os.environ.get("RESULTS_DIR", RESULTS))
    folder.mkdir(parents=True, exist_ok=True)
    result = {
        **environment(packages),
        "modules": list(modules),
        "module_hash": module_hash(modules),
        "workload": workload,
        "repeats": repeats,
        "statistic": statistic,
        **more,
        "rows": rows,
        "headline": headline,
    }
    path = folder / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def median_time(action: Callable[[], Any], repeats: int, clock: Callable[[], float]) -> float:
    """Median seconds of `repeats` calls after one that is not counted."""
    action()
    times = []
    for _ in range(repeats):
        start = clock()
        action()
        times.append(clock() - start)
    return statistics.median(times)
