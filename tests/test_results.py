"""What benchmarks/results holds: whole, true to the README, and of the modules as they are now."""

import sys
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import results  # noqa: E402

RESULTS = results.results()


def test_there_are_results():
    assert "bookkeeping" in RESULTS


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_says_what_where_and_how(name):
    result = RESULTS[name]
    for key in ("device", "versions", "commit", "module_hash", "workload", "repeats", "statistic", "rows", "headline"):
        assert result[key] not in (None, "", []), key
    assert isinstance(result["headline"], dict)


@pytest.mark.parametrize("name", RESULTS)
def test_a_stale_result_is_reported(name):
    """Listed, not failed: measuring again takes the machine it was measured on."""
    if results.stale(RESULTS[name]):
        warnings.warn(f"stale: {name}.json was measured with other sources of {RESULTS[name]['modules']}", stacklevel=1)


def test_a_changed_module_makes_a_result_stale():
    result = dict(RESULTS["bookkeeping"])
    result["module_hash"] = results.module_hash(result["modules"])
    assert not results.stale(result)
    result["module_hash"] = "0" * 16
    assert results.stale(result)


def test_the_readme_says_what_was_measured():
    readme = (ROOT / "README.md").read_text()
    assert results.filled(readme) == readme, "run `python tools/results.py`"
    figure = str(RESULTS["bookkeeping"]["headline"]["x_vllm_64"])
    assert figure in readme
    assert results.filled(readme.replace(f"| {figure} |", "| 999 |")) != readme.replace(f"| {figure} |", "| 999 |")


@pytest.mark.parametrize("figure", ["x_vllm_64", "x_vllm_256", "x_vllm_1024"])
def test_headlines_follow_from_their_rows(figure):
    result = RESULTS["bookkeeping"]
    row = next(row for row in result["rows"] if row["running"] == int(figure.rsplit("_", 1)[1]))
    assert row["vllm_us"] / row["ours_us"] == pytest.approx(result["headline"][figure], rel=0.01)
