"""Lab L4: the radix tree, the readers and the generator of traces, the policies; cases.md A7."""

import dataclasses
import itertools
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import eviction as lab  # noqa: E402

from paged_kv.block_manager import BlockManager  # noqa: E402
from paged_kv.prefix_cache import PrefixCache, admit_cached, give_back, publish_full  # noqa: E402
from paged_kv.radix_tree import RadixTree  # noqa: E402
from paged_kv.trace_shapes import (  # noqa: E402
    AZURE_CONVERSATION,
    KIMI_CONVERSATION,
    KIMI_PAPER,
    Lognormal,
    TraceShape,
    generate,
)
from paged_kv.traces import AZURE_HEADER, TraceRequest, read_azure, read_mooncake, trace_stats  # noqa: E402

prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=25)


@pytest.fixture(scope="module")
def result():
    return json.loads((ROOT / "benchmarks/results/eviction.json").read_text())


def nothing_next(block):
    return lab.NEVER


# ------------------------------------------------------------------------------------------ radix tree


@settings(max_examples=150, deadline=None)
@given(prompts, st.sampled_from([1, 2, 3, 4]))
def test_radix_matches_the_longest_common_beginning(texts, size):
    tree, before = RadixTree(size), []
    for text in texts:
        longest = max((common(text, old[: len(old) // size * size]) for old in before), default=0)
        assert tree.match(text) == longest // size * size
        stored = tree.num_tokens
        assert tree.insert(text) == len(text) // size * size - longest // size * size == tree.num_tokens - stored
        before.append(text)
        tree.check()


def common(left, right):
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


@settings(max_examples=100, deadline=None)
@given(prompts, st.sampled_from([1, 2, 4]))
def test_radix_and_the_prefix_cache_hit_the_same_at_block_granularity(texts, size):
    tree, ones = RadixTree(size), RadixTree(1)
    manager = BlockManager(500, size, 2, 16)
    cache = PrefixCache(manager.pool, size)
    for text in texts:
        row, hit = admit_cached(manager, cache, text)
        publish_full(manager, cache, row, text, 0)
        give_back(manager, row)
        assert tree.match(text[:-1]) == hit == ones.match(text[:-1]) // size * size
        tree.insert(text)
        ones.insert(text)


@settings(max_examples=200, deadline=None)
@given(prompts, st.sampled_from([1, 2]), st.integers(1, 12))
def test_radix_and_tail_first_lru_hit_the_same_under_eviction(texts, size, capacity):
    """Page by page, request by request."""
    tree, cache = RadixTree(size), lab.HeapCache(capacity, "LRU, tail first")
    names = {}
    for text in texts:
        run = text[: min(capacity, len(text) // size) * size]
        chain = tuple(names.setdefault(tuple(run[:end]), len(names)) for end in range(size, len(run) + 1, size))
        found = tree.match(run)
        too_many = tree.num_tokens + len(run) - found - capacity * size
        assert tree.evict(max(0, too_many)) == max(0, too_many)
        tree.insert(run)
        tree.check()
        assert found == size * cache.serve(chain, nothing_next)
        assert tree.num_tokens == size * len(cache.entries) <= capacity * size


def test_radix_evicts_from_the_end_of_the_oldest_leaf():
    tree = RadixTree(2)
    tree.insert([1, 1, 2, 2, 3, 3, 4])
    tree.insert([1, 1, 5, 5])
    assert (tree.num_tokens, len(list(tree.nodes()))) == (8, 3)
    assert tree.evict(1) == 2, "whole pages"
    assert (tree.match([1, 1, 2, 2, 3, 3]), tree.match([1, 1, 5, 5])) == (4, 4)
    assert tree.evict(100) == 2, "what the last walk passed stays"
    assert tree.match([1, 1, 5, 5]) == 4
    tree.match([])
    assert tree.evict(100) == 4
    assert tree.num_tokens == 0
    assert not list(tree.nodes())


def test_radix_refuses_an_empty_page():
    with pytest.raises(ValueError, match="page_size"):
        RadixTree(0)


# ------------------------------------------------------------------------------------------ policies


@pytest.mark.parametrize("policy", ["LRU, tail first", "LFU", "length-aware", "cost-aware", "Belady's bound"])
def test_a7_the_deepest_block_goes_first(policy):
    """A7 (a): N = 3, blocks 1, 2, 3 of one request; one block more is needed; the prompt returns: 2 hits."""
    cache = lab.HeapCache(3, policy)
    cache.serve((1, 2, 3), nothing_next)
    cache.serve((9,), nothing_next)
    assert set(cache.entries) == {1, 2, 9}
    assert cache.serve((1, 2, 3), nothing_next) == 2


def test_a7_with_a_pool_and_the_prefix_cache():
    """A7 (a) on the classes in use; (b): with the first block gone, those behind it are no hits."""
    manager = BlockManager(3, 2, 4, 8)
    cache = PrefixCache(manager.pool, 2)
    prompt = [1, 1, 2, 2, 3, 3]
    row, _ = admit_cached(manager, cache, prompt)
    ids = manager.tables.ids(row)
    publish_full(manager, cache, row, prompt, 0)
    give_back(manager, row)
    row, _ = admit_cached(manager, cache, [7, 7])
    give_back(manager, row)
    assert cache.match(b"", [*prompt, 0]) == ids[:2]
    cache.forget(ids[:1])
    assert cache.match(b"", [*prompt, 0]) == []


def test_a7_hits_stop_at_the_first_miss():
    """A7 (b) for every policy's cache: block 1 gone, 2 and 3 present: 0 hits."""
    assert lab.leading((1, 2, 3), {2: None, 3: None}) == 0
    cache = lab.HeapCache(3, "LRU, head first")
    cache.serve((1, 2, 3), nothing_next)
    cache.serve((9,), nothing_next)
    assert set(cache.entries) == {2, 3, 9}
    assert cache.serve((1, 2, 3), nothing_next) == 0
    arc = lab.ArcCache(3)
    arc.serve((1, 2, 3), nothing_next)
    del arc.once[1]
    assert arc.serve((1, 2, 3), nothing_next) == 0


chains = st.lists(
    st.lists(st.integers(0, 1), min_size=1, max_size=3).map(
        lambda bits: tuple(int("1" + "".join(map(str, bits[:end])), 2) for end in range(1, len(bits) + 1))
    ),
    min_size=1,
    max_size=7,
)  # a block's id is the path to it, so that equal ids have equal histories


def best_possible(stream, capacity):
    """Most hits that any choice of victims can get: every set of blocks kept is tried."""
    states = {frozenset(): 0}
    for chain in stream:
        chain = chain[:capacity]
        after = {}
        for kept, hits in states.items():
            now = hits + lab.leading(chain, kept)
            others, room = kept - set(chain), capacity - len(chain)
            for size in range(min(room, len(others)) + 1):
                for some in itertools.combinations(sorted(others), size):
                    state = frozenset(some) | frozenset(chain)
                    after[state] = max(after.get(state, 0), now)
        states = after
    return max(states.values())


@settings(max_examples=120, deadline=None)
@given(chains, st.integers(1, 4))
def test_the_bound_is_the_best_possible(stream, capacity):
    assert sum(lab.replay(stream, "Belady's bound", capacity)) == best_possible(stream, capacity)


@settings(max_examples=60, deadline=None)
@given(chains, st.integers(1, 5), st.sampled_from(lab.POLICIES))
def test_every_policy_keeps_within_the_pool_and_the_bound(stream, capacity, policy):
    cache = lab.make_cache(policy, capacity)
    for chain in stream:
        cache.serve(chain, nothing_next)
        held = cache.entries if policy != "ARC" else {**cache.once, **cache.often}
        assert set(chain[:capacity]) <= set(held)
        assert len(held) <= capacity
        if policy == "ARC":
            assert len(cache.once) + len(cache.often) == len(held), "no block on both sides"
    assert sum(lab.replay(stream, policy, capacity)) <= best_possible(stream, capacity)


@settings(max_examples=60, deadline=None)
@given(chains, st.integers(1, 5), st.sampled_from(["LRU, tail first", "LFU", "length-aware", "cost-aware"]))
def test_these_policies_never_strand_a_block(stream, capacity, policy):
    cache = lab.HeapCache(capacity, policy)
    for chain in stream:
        cache.serve(chain, nothing_next)
        assert all(block == 2 or block == 3 or block >> 1 in cache.entries for block in cache.entries)


def test_policies_differ_where_they_should():
    scan = [(1, 2), (1, 2), *((100 + i,) for i in range(6)), (1, 2)]
    assert [lab.replay(scan, p, 4)[-1] for p in ("LRU, tail first", "FIFO", "LFU", "ARC")] == [0, 0, 2, 2]
    stale = [(1, 2)] * 5 + [(3, 4), (5, 6)] * 4
    assert sum(lab.replay(stale, "LFU", 4)[5:]) < sum(lab.replay(stale, "LRU, tail first", 4)[5:])


def test_agents_and_tenants_are_what_they_are_said_to_be():
    agents = lab.agent_loop(0, sessions=6, turns=8, at_once=3)
    assert len(agents) == 48
    assert len({chain[:46] for chain in agents}) == 1
    assert sorted({len(chain) for chain in agents})[:2] == [50, 57]
    mix = lab.shared_mix(0, requests=200)
    assert sum(len(chain) == 125 for chain in mix) > 20
    for stream in (agents, mix):
        parents = {}
        for chain in stream:
            for parent, block in itertools.pairwise((-1, *chain)):
                assert parents.setdefault(block, parent) == parent


# ------------------------------------------------------------------------------------------ traces


def line(**changed):
    fields = {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]} | changed
    return json.dumps({name: value for name, value in fields.items() if value != "gone"})


def test_read_mooncake(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(line() + "\n" + line(timestamp=1500, hash_ids=[0, 2], output_length=0, more=1) + "\n")
    assert list(read_mooncake(path)) == [
        TraceRequest(0.0, 700, 5, (0, 1)),
        TraceRequest(1.5, 700, 0, (0, 2)),
    ]


BAD = {
    "not json": ("{", "(whole line)"),
    "a list": ("[]", "(whole line)"),
    "empty": ("", "(whole line)"),
    "not utf-8": (b"\xff", "(whole line)"),
    "deep": ("[" * 100_000, "(whole line)"),
    "no time": (line(timestamp="gone"), "timestamp"),
    "time as text": (line(timestamp="0"), "timestamp"),
    "time NaN": (line(timestamp=float("nan")), "timestamp"),
    "time infinite": (line(timestamp=float("inf")), "timestamp"),
    "time negative": (line(timestamp=-1), "timestamp"),
    "time true": (line(timestamp=True), "timestamp"),
    "no input": (line(input_length="gone"), "input_length"),
    "input 0": (line(input_length=0, hash_ids=[]), "input_length"),
    "input float": (line(input_length=700.0), "input_length"),
    "input true": (line(input_length=True, hash_ids=[0]), "input_length"),
    "input huge": (line(input_length=2**31), "input_length"),
    "output negative": (line(output_length=-1), "output_length"),
    "output null": (line(output_length=None), "output_length"),
    "no ids": (line(hash_ids="gone"), "hash_ids"),
    "ids a number": (line(hash_ids=3), "hash_ids"),
    "id text": (line(hash_ids=[0, "1"]), "hash_ids"),
    "id negative": (line(hash_ids=[0, -1]), "hash_ids"),
    "id huge": (line(hash_ids=[0, 2**63]), "hash_ids"),
    "too few ids": (line(hash_ids=[0]), "hash_ids"),
    "too many ids": (line(hash_ids=[0, 1, 2]), "hash_ids"),
    "id twice": (line(hash_ids=[0, 0]), "hash_ids"),
    "another parent": (line(hash_ids=[5, 1]), "hash_ids"),
    "a head inside": (line(hash_ids=[1, 0]), "hash_ids"),
}


@pytest.mark.parametrize("name", BAD)
def test_read_mooncake_names_line_and_field(name, tmp_path):
    text, field = BAD[name]
    path = tmp_path / "trace.jsonl"
    path.write_bytes(line().encode() + b"\n" + (text if isinstance(text, bytes) else text.encode()) + b"\n")
    requests = read_mooncake(path)
    assert next(requests).input_length == 700
    with pytest.raises(ValueError, match="line 2, ") as refused:
        next(requests)
    assert str(refused.value).startswith(f"line 2, {field}: ")
    assert len(str(refused.value)) < 200


def test_read_mooncake_wants_the_order_of_arrival(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(line(timestamp=2000) + "\n" + line(timestamp=1000) + "\n")
    with pytest.raises(ValueError, match=r"line 2, timestamp: 1\.0 s, but the line before has 2\.0 s"):
        list(read_mooncake(path))


def azure(tmp_path, *lines, header=AZURE_HEADER):
    path = tmp_path / "trace.csv"
    path.write_bytes("\r\n".join([header, *lines, ""]).encode())
    return list(read_azure(path))


def test_read_azure(tmp_path):
    found = azure(tmp_path, "2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:50.9951690,396,0")
    assert [(r.input_length, r.output_length, r.prefix_ids) for r in found] == [(374, 44, ()), (396, 0, ())]
    assert found[0].arrival_s == 0
    assert found[1].arrival_s == pytest.approx(4.314579, abs=2e-6)
    zoned = azure(tmp_path, "2024-05-10 00:00:00.009930+00:00,2162,5", "2024-05-10 00:00:01.009930+00:00,2,5")
    assert zoned[1].arrival_s == 1


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ("2023-11-16 18:15:47,374", "(whole line)"),
        ("2023-11-16 18:15:47,374,44,1", "(whole line)"),
        ("", "(whole line)"),
        ("yesterday,374,44", "TIMESTAMP"),
        ("2023-11-16 18:15:45,374,44", "TIMESTAMP"),
        ("2023-11-16 18:15:47+00:00,374,44", "TIMESTAMP"),
        ("2023-11-16 18:15:47,0,44", "ContextTokens"),
        ("2023-11-16 18:15:47,-3,44", "ContextTokens"),
        ("2023-11-16 18:15:47,3.5,44", "ContextTokens"),
        ("2023-11-16 18:15:47,9999999999,44", "ContextTokens"),
        ("2023-11-16 18:15:47,1_0,44", "ContextTokens"),
        ("2023-11-16 18:15:47,374,", "GeneratedTokens"),
        ("2023-11-16 18:15:47,374,²", "GeneratedTokens"),
    ],
)
def test_read_azure_names_line_and_field(bad, field, tmp_path):
    with pytest.raises(ValueError, match="line 3, ") as refused:
        azure(tmp_path, "2023-11-16 18:15:46,1,1", bad)
    assert str(refused.value).startswith(f"line 3, {field}: ")


def test_read_azure_wants_its_header(tmp_path):
    with pytest.raises(ValueError, match=r"line 1, \(header\)"):
        azure(tmp_path, "2023-11-16 18:15:46,1,1", header="time,in,out")


@pytest.mark.parametrize("shape", [KIMI_PAPER, KIMI_CONVERSATION, AZURE_CONVERSATION])
def test_generated_traces_are_well_formed(shape, tmp_path):
    trace = list(generate(shape, 400, seed=3))
    assert trace == list(generate(shape, 400, seed=3)) != list(generate(shape, 400, seed=4))
    path = tmp_path / "trace.jsonl"
    path.write_text(
        "".join(
            line(
                timestamp=1000 * request.arrival_s,
                input_length=request.input_length,
                output_length=request.output_length,
                hash_ids=list(request.prefix_ids),
            )
            + "\n"
            for request in trace
        )
    )
    back = list(read_mooncake(path))
    assert [r.prefix_ids for r in back] == [r.prefix_ids for r in trace]
    assert max(r.input_length for r in trace) <= shape.max_input
    assert all(1 <= r.output_length <= shape.max_output for r in trace)


def test_a_session_keeps_the_whole_blocks_of_its_last_prompt():
    shape = dataclasses.replace(KIMI_CONVERSATION, continues=0.9, first=Lognormal(2000, 0.1), added=Lognormal(50, 0.1))
    trace = list(generate(shape, 200))
    returned = 0
    for number, new in enumerate(trace):
        last = max(trace[:number], key=lambda old: common(new.prefix_ids, old.prefix_ids), default=None)
        if last and common(new.prefix_ids, last.prefix_ids) > 1:
            returned += 1
            assert any(
                common(new.prefix_ids, old.prefix_ids) == old.input_length // 512
                and old.input_length + old.output_length < new.input_length
                for old in trace[:number]
            )
    assert returned > 60
    assert all(request.prefix_ids[0] == 0 for request in trace)


def test_the_shape_has_the_published_statistics():
    """arXiv 2407.00079: 7,590 tokens in, 182 out, 51 % again, over half used once, tens of thousands of uses."""
    stats = trace_stats(generate(KIMI_PAPER, 23_608))
    assert stats.mean_input == pytest.approx(7590, rel=0.03)
    assert stats.mean_output == pytest.approx(182, rel=0.06)
    assert stats.reusable == pytest.approx(0.51, abs=0.015)
    assert stats.used_once > 0.5
    assert stats.top_uses > 10_000


def test_trace_stats_by_hand():
    trace = [TraceRequest(0.0, 600, 2, (0, 1)), TraceRequest(2.0, 500, 0, (0,)), TraceRequest(4.0, 400, 4, (2,))]
    stats = trace_stats(trace)
    assert (stats.requests, stats.requests_per_s, stats.mean_input, stats.mean_output) == (3, 0.75, 500, 2)
    assert (stats.blocks, stats.distinct, stats.reusable, stats.top_uses) == (4, 3, 0.25, 2)
    assert stats.used_once == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="empty"):
        trace_stats([])


@pytest.mark.parametrize(
    "change",
    [
        {"requests_per_s": 0.0},
        {"continues": 1.0},
        {"num_openings": 0},
        {"max_input": 0},
        {"requests_per_s": float("nan")},
    ],
)
def test_a_shape_that_cannot_be_is_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        dataclasses.replace(KIMI_PAPER, **change)
    assert isinstance(KIMI_PAPER, TraceShape)


@pytest.mark.parametrize(("mean", "sigma"), [(0, 1), (-1, 1), (1, -1), (float("inf"), 1), (float("nan"), 1)])
def test_a_lognormal_that_cannot_be_is_refused(mean, sigma):
    with pytest.raises(ValueError, match="mean"):
        Lognormal(mean, sigma)


# ------------------------------------------------------------------------------------------ stored result


def test_stored_result(result):
    rate = {(row["workload"], row["policy"], row["blocks"]): row["hit_rate"] for row in result["rows"]}
    sizes = {(workload, blocks) for workload, _, blocks in rate}
    assert len(rate) == len(sizes) * len(lab.POLICIES)
    for workload, blocks in sizes:
        each = {policy: rate[workload, policy, blocks] for policy in lab.POLICIES}
        assert max(each, key=each.get) == "Belady's bound"
        assert each["LRU, tail first"] >= each["LRU, head first"]
        assert max(each.values()) <= result["unlimited"][workload] + 0.01
    assert result["headline"]["lead_of_default_points"] == lab.gaps(result["rows"])


def test_the_stored_fit_is_the_shape(result):
    fit, shape = result["fit"], KIMI_CONVERSATION
    assert fit["continues"] == pytest.approx(shape.continues, abs=0.001)
    assert fit["first_mean"] == pytest.approx(shape.first.mean, rel=0.001)
    assert fit["first_sigma"] == pytest.approx(shape.first.sigma, abs=0.01)
    assert fit["added_mean"] == pytest.approx(shape.added.mean, rel=0.001)
    assert fit["added_sigma"] == pytest.approx(shape.added.sigma, abs=0.01)
    assert fit["pause_mean_s"] == pytest.approx(shape.pause.mean, rel=0.01)
    assert fit["pause_sigma"] == pytest.approx(shape.pause.sigma, abs=0.01)


def test_a_stored_rate_comes_out_again(result):
    rate = {(row["workload"], row["policy"], row["blocks"]): row for row in result["rows"]}
    chains_0 = lab.shared_mix(0)
    for policy in ("ARC", "LFU"):
        row = rate["shared-prefix mix", policy, 500]
        assert row["from"] - 0.01 <= 100 * lab.hit_rate(chains_0, policy, 500) <= row["to"] + 0.01
