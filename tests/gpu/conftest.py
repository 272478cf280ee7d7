"""Tests that need a CUDA device, skipped elsewhere: python -m pytest --confcutdir=tests/gpu tests/gpu."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]


def _why_not() -> str:
    try:
        import torch
        import triton  # noqa: F401
    except ImportError as error:
        return f"{error.name} is not installed"
    return "" if torch.cuda.is_available() else "no CUDA device"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip everything in this folder where there is no GPU."""
    if why := _why_not():
        for item in items:
            if Path(item.fspath).is_relative_to(TESTS / "gpu"):
                item.add_marker(pytest.mark.skip(reason=why))
