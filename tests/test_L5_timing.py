"""Lab L5: what computed-token counts tell an attacker, with and without salts; the statistics; the result."""

import itertools
import json
import random
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import timing_channel as lab  # noqa: E402

BLOCK = lab.BLOCK_SIZE


@pytest.fixture(scope="module")
def form():
    """A form of plain numbers, so that no tokenizer is needed: 2 opening blocks, 4 fields, 8 options."""
    fresh = itertools.count(100)
    options = [[[next(fresh)] * BLOCK for _ in range(8)] for _ in range(4)]
    return lab.Form([1] * (2 * BLOCK), options, 2)


def counts(service, form, known):
    return [reply.computed for reply in lab.probe(service, form, known, range(8)).values()]


@pytest.mark.parametrize("seed", range(5))
def test_unsalted_counts_give_the_whole_form(form, seed):
    rng = random.Random(seed)
    secret = [rng.randrange(8) for _ in range(4)]
    service, known = lab.Service(salted=False), []
    service.ask("victim", [*form.filled(secret), form.end])
    for _ in range(4):
        found = counts(service, form, known)
        assert sorted(found) == [1, *[BLOCK + 1] * 7]
        known.append(found.index(1))
    assert known == secret
    service.manager.check()
    service.cache.check()


def test_salted_counts_do_not_depend_on_the_victim(form):
    seen = set()
    for secret in (None, [0, 0, 0, 0], [7, 6, 5, 4], [3]):
        service = lab.Service(salted=True)
        if secret is not None:
            service.ask("victim", [*form.filled(secret), form.end])
            assert service.ask("victim", [*form.filled(secret), form.end]).computed == 1, "one's own is found"
        seen.add(tuple(tuple(counts(service, form, known)) for known in ([], [0], [7, 6])))
        service.cache.check()
    assert seen == {((BLOCK + 1,) * 8,) * 3}


def test_a_guess_can_be_asked_once(form):
    service = lab.Service(salted=False)
    assert counts(service, form, []) == [BLOCK + 1] * 8
    assert counts(service, form, []) == [1] * 8


def test_a_salt_is_not_an_adapter_and_users_are_not_confused():
    """("ab", "c") and ("a", "bc") differ, and so do kinds with equal values: chapter 08's contract, as used here."""
    roots = [
        lab.PrefixCache.root((("salt", "S"),)),
        lab.PrefixCache.root((("adapter", "S"),)),
        lab.PrefixCache.root((("salt", b"S"),)),
        lab.PrefixCache.root((("salt", "a"), ("salt", "bc"))),
        lab.PrefixCache.root((("salt", "ab"), ("salt", "c"))),
        b"",
    ]
    assert len(set(roots)) == len(roots)


def test_the_form_fills_whole_blocks_and_options_differ():
    pytest.importorskip("transformers")
    from transformers import AutoTokenizer

    from paged_kv.hf_adapter import model_folder

    try:
        folder = model_folder()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    form = lab.make_form(AutoTokenizer.from_pretrained(folder))
    assert len(form.opening) % BLOCK == 0
    blocks = [tuple(block) for field in form.options for block in field]
    assert {len(block) for block in blocks} == {BLOCK}
    assert len(set(blocks)) == len(blocks) == 32


# ------------------------------------------------------------------------------------------ statistics


def test_auc_by_counting_pairs():
    rng = random.Random(0)
    for _ in range(30):
        low = [rng.randrange(6) for _ in range(rng.randrange(1, 9))]
        high = [rng.randrange(6) for _ in range(rng.randrange(1, 9))]
        pairs = [(a < b) + (a == b) / 2 for a in low for b in high]
        assert lab.auc(low, high) == pytest.approx(sum(pairs) / len(pairs))
    assert (lab.auc([1, 2], [3]), lab.auc([3], [1, 2]), lab.auc([1], [1])) == (1.0, 0.0, 0.5)


def test_intervals_cover_what_they_should():
    rng = random.Random(1)
    same = [([rng.gauss(0, 1) for _ in range(4)], [rng.gauss(0, 1) for _ in range(28)]) for _ in range(12)]
    low, high = lab.auc_interval(same)
    assert low < 0.5 < high
    assert high - low < 0.5
    apart = [([rng.gauss(0, 1) for _ in range(4)], [rng.gauss(9, 1) for _ in range(28)]) for _ in range(12)]
    assert lab.auc_interval(apart)[0] > 0.99
    low, high = lab.share_interval(6, 48)
    assert 0.05 < low < 6 / 48 < high < 0.25
    assert lab.share_interval(48, 48)[1] == pytest.approx(1)


# ------------------------------------------------------------------------------------------ stored result


@pytest.fixture(scope="module")
def result():
    return json.loads((ROOT / "benchmarks/results/timing_channel.json").read_text())


def test_stored_result(result):
    plain, salted = result["rows"]
    assert (plain["salted"], salted["salted"]) == (False, True)
    for row in result["rows"]:
        assert row["fields"] == len(row["right_ms"]) == 4 * result["repeats"]
        assert len(row["wrong_ms"]) == 7 * row["fields"]
        assert row["auc"] == pytest.approx(lab.auc(row["right_ms"], row["wrong_ms"]), abs=0.002)
        assert row["auc_95"][0] <= row["auc"] <= row["auc_95"][1]


def test_unsalted_told_apart_salted_not(result):
    plain, salted = result["rows"]
    assert plain["auc_95"][0] > 0.95
    assert plain["recovered"] == plain["fields"]
    assert salted["auc_95"][0] < 0.5 < salted["auc_95"][1]
    low, high = salted["recovered_share_95"]
    assert low < 100 / 8 < high
    assert (plain["computed_right"], plain["computed_wrong"]) == ([1], [BLOCK + 1])
    assert salted["computed_right"] == salted["computed_wrong"] == [BLOCK + 1]
