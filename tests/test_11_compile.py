"""Chapters 11 and 12: all that the heuristics can pick compiles ahead of time for four architectures, and fits.

No GPU is needed; each architecture is a process of its own (see ahead_of_time.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
HERE = Path(__file__).resolve().parent


@pytest.mark.parametrize("arch", [80, 86, 89, 90])
def test_every_pick_compiles_and_fits(arch: int) -> None:
    command = [sys.executable, str(HERE / "ahead_of_time.py"), str(arch)]
    env = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) > 5
    assert [row["pick"] for row in rows if row["shared"] > row["limit"]] == []
