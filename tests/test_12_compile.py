"""Chapter 12: every pick compiles ahead of time for four architectures, and fits.  As test_11_compile.py."""

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
    command = [sys.executable, str(HERE / "ahead_of_time.py"), str(arch), "prefill"]
    env = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 8, "four head sizes, two sizes of numbers"
    assert [row["pick"] for row in rows if row["shared"] > row["limit"]] == []
    # Bytes a thread: sm_80 spills 160 at head size 256.
    spilled = [row["pick"] for row in rows if row.get("stack", 0) > 256]
    assert spilled == [], "sums that do not fit the registers"
