"""Appendix A4: sampling on the device, against transformers' processors, NumPy and statistics."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from paged_kv.device_sampling import DeviceSampler, Sampled, shaped_logits
from paged_kv.keyed_noise import gumbel, mix32, noise_words, position_keys, row_key
from paged_kv.sampling_params import SamplingParams
from paged_kv.token_cuts import boundary, ordered_bits, within_top_k

FEW = settings(max_examples=40, deadline=None)
nan, inf = math.nan, math.inf


def opened(params: list[SamplingParams], vocab: int, prompt: Any = (), made: Any = ()) -> DeviceSampler:
    """A sampler with one open row for each of `params`; prompt and generated are the same for all."""
    sampler = DeviceSampler(len(params) + 2, vocab, "cpu")
    rows = range(len(params))
    sampler.open_rows(list(rows), params, [0 for _ in rows], [prompt for _ in rows], [made for _ in rows])
    return sampler


def run(sampler: DeviceSampler, logits: torch.Tensor, rows: list[int], positions: list[int]) -> Sampled:
    return sampler.sample(logits, torch.tensor(rows), torch.tensor(positions), rows)


# ------------------------------------------------------------------------------------------ parameters

BAD = {
    "temperature": [-1, 1e-9, 1e7, nan, inf, True, "1", None],
    "top_k": [-1, 1.0, True, 2**31, None],
    "top_p": [0, -0.1, 1.1, nan, False, None],
    "min_p": [-0.1, 1.1, nan, inf, True],
    "repetition_penalty": [0, -1, 101, nan, inf, True],
    "presence_penalty": [-2.1, 2.1, nan, inf, True],
    "frequency_penalty": [-2.1, 2.1, nan, -inf, False],
    "seed": [-1, 2**64, 0.5, True],
    "logprobs": [-1, 21, 1.0, True],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in BAD for value in BAD[name]])
def test_bad_parameters_are_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} = .*: must be "):
        SamplingParams(**{name: value})


def test_properties() -> None:
    assert SamplingParams().greedy
    assert not SamplingParams(temperature=1).greedy
    assert not SamplingParams(top_k=3).truncates, "greedy rows need no cut"
    for cut in ({"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.1}):
        assert SamplingParams(temperature=1, **cut).truncates
    for penalty in ({"repetition_penalty": 1.1}, {"presence_penalty": -1}, {"frequency_penalty": 0.1}):
        assert SamplingParams(**penalty).penalises
    assert not SamplingParams(temperature=1).penalises
    assert SamplingParams(logprobs=0).wants_logprobs
    assert not SamplingParams().wants_logprobs


# ------------------------------------------------------------------------------------------ against transformers

number = st.floats(-30, 30, width=16)
peculiar = st.sampled_from([0.0, -0.0, 1.0, 2.5, -inf])  # ties and holes


@st.composite
def rows_of_logits(draw_: Any) -> torch.Tensor:
    vocab = draw_(st.integers(2, 40))
    count = draw_(st.integers(1, 4))
    kind = draw_(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    entry = draw_(st.sampled_from([number, peculiar, st.one_of(number, peculiar)]))
    values = draw_(st.lists(entry, min_size=count * vocab, max_size=count * vocab))
    logits = torch.tensor(values, dtype=torch.float64).view(count, vocab)
    logits[:, 0] = logits[:, 0].clamp(min=-50)  # something finite in each row
    return logits.to(kind)


@st.composite
def parameters(draw_: Any) -> SamplingParams:
    def mostly(off: Any, on: Any) -> Any:
        return draw_(st.one_of(st.just(off), on))

    return SamplingParams(
        temperature=draw_(st.one_of(st.floats(0.1, 3), st.sampled_from([1.0, 1e-6, 1e-3, 50.0, 1e6]))),
        top_k=mostly(0, st.integers(1, 50)),
        top_p=mostly(1.0, st.floats(0.01, 1)),
        min_p=mostly(0.0, st.floats(1e-6, 1)),
        repetition_penalty=mostly(1.0, st.floats(0.5, 3)),
        seed=0,
    )


def by_transformers(logits: torch.Tensor, params: SamplingParams, ids: list[int]) -> torch.Tensor:
    """One row of logits [V] as transformers' processors leave it, in their order; the cuts in float64."""
    scores = logits.float()[None]
    if params.repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(torch.tensor([ids]), scores)
    steps: list[Any] = [TemperatureLogitsWarper(float(params.temperature))]
    if params.top_k:
        steps.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        steps.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        steps.append(MinPLogitsWarper(params.min_p))
    scores = scores.double()
    for step in steps:
        scores = step(torch.tensor([ids]), scores)
    return scores[0]


def on_the_edge(logits: torch.Tensor, params: SamplingParams, ids: list[int]) -> bool:
    """Whether the last digits of a sum decide how many tokens stay."""
    nudged = [
        replace(params, top_p=min(1, params.top_p * (1 + by)), min_p=min(1, params.min_p * (1 + by)))
        for by in (-1e-5, 1e-5)
        if params.top_p < 1 or params.min_p
    ]
    kept = {int(by_transformers(logits, one, ids).isfinite().sum()) for one in [params, *nudged]}
    return len(kept) > 1


@FEW
@given(rows_of_logits(), st.data())
def test_processed_logits_equal_those_of_transformers(logits: torch.Tensor, data: Any) -> None:
    count, vocab = logits.shape
    params = [data.draw(parameters()) for _ in range(count)]
    ids = data.draw(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=8))
    sampler = opened(params, vocab, ids[:3], ids[3:])
    ours = sampler.apply(logits, torch.arange(count), range(count))
    for row, one in enumerate(params):
        theirs = by_transformers(logits[row], one, ids)
        if on_the_edge(logits[row], one, ids):
            continue
        # Which of several equal tokens stay is up to an unstable sort in transformers; how many is not.
        mine = ours[row].double().sort().values
        torch.testing.assert_close(mine, theirs.sort().values, rtol=1e-5, atol=1e-5)
        differ = ours[row].isfinite() != theirs.isfinite()
        if differ.any():
            assert one.top_p < 1
            untied = opened([replace(one, top_p=1.0)], vocab, ids[:3], ids[3:])
            values = untied.apply(logits[row : row + 1], torch.zeros(1, dtype=torch.int64), [0])[0]
            assert (values[differ] == ours[row][ours[row].isfinite()].min()).all()


def test_of_equal_tokens_the_first_stay() -> None:
    sampler = opened([SamplingParams(temperature=1, top_p=0.5, seed=0)], 64)
    kept = sampler.apply(torch.zeros(1, 64), torch.zeros(1, dtype=torch.int64), [0]).isfinite()[0]
    assert kept.tolist() == [True] * 32 + [False] * 32


# ------------------------------------------------------------------------------------------ penalties


def by_numpy(logits: np.ndarray, params: SamplingParams, prompt: list[int], made: list[int]) -> np.ndarray:
    """Repetition over prompt and generated tokens, presence and frequency over generated ones (OpenAI's definition)."""
    out = logits.astype(np.float64).copy()
    for token in {*prompt, *made}:
        r = params.repetition_penalty
        out[token] = out[token] * r if out[token] < 0 else out[token] / r
    for token in set(made):
        out[token] -= params.presence_penalty + params.frequency_penalty * made.count(token)
    return out


tokens_below_9 = st.lists(st.integers(0, 8), max_size=12)


@FEW
@given(
    tokens_below_9,
    tokens_below_9,
    st.floats(0.1, 5),
    st.floats(-2, 2),
    st.floats(-2, 2),
    st.integers(0, 2**32),
)
def test_penalties(prompt: Any, made: Any, repetition: float, presence: float, frequency: float, seed: int) -> None:
    params = SamplingParams(
        repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency, seed=0
    )
    logits = torch.randn(1, 9, generator=torch.Generator().manual_seed(seed)) * 4
    sampler = opened([params], 9, prompt, made)
    made = list(made)
    for position in range(4):  # what is sampled counts from the next step on
        ours = sampler.apply(logits, torch.tensor([0]), [0])[0]
        want = by_numpy(logits[0].numpy(), params, prompt, made)
        np.testing.assert_allclose(ours.numpy(), want, rtol=1e-5, atol=1e-5)
        made.append(int(run(sampler, logits, [0], [position]).tokens))
        assert made[-1] == int(ours.argmax())
    if params.penalises:
        assert sampler.seen is not None
        assert (sampler.seen[0] >> 1).tolist() == [made.count(token) for token in range(9)]
        assert (sampler.seen[0] & 1).tolist() == [int(token in prompt) for token in range(9)]


def test_tables_of_counts_are_made_at_the_first_use() -> None:
    sampler = opened([SamplingParams(temperature=1, top_k=3, seed=0)], 50)
    run(sampler, torch.randn(1, 50), [0], [0])
    assert sampler.seen is None
    sampler.open_row(1, SamplingParams(presence_penalty=1), 0, [4, 4], [5, 5, 5])
    assert sampler.seen is not None
    assert sampler.seen[1].nonzero().flatten().tolist() == [4, 5]
    assert sampler.seen[1, 4:6].tolist() == [1, 6]


def test_a_row_that_is_opened_again_has_forgotten_its_counts() -> None:
    sampler = opened([SamplingParams(presence_penalty=2)] * 2, 50, [1], [2, 2])
    sampler.close_row(0)
    sampler.open_row(0, SamplingParams(presence_penalty=2), 0, [7], [])
    assert sampler.seen is not None
    assert sampler.seen[:2].sum(1).tolist() == [1, 1 + 4]


def test_rows_without_penalties_are_not_counted() -> None:
    sampler = opened([SamplingParams(presence_penalty=2), SamplingParams()], 5)
    logits = torch.eye(5)[:2]
    assert run(sampler, logits, [1, 0], [0, 0]).tokens.tolist() == [0, 1]
    assert sampler.seen is not None
    assert sampler.seen.nonzero().tolist() == [[0, 1]]


# ------------------------------------------------------------------------------------------ choosing


def test_greedy_takes_the_first_of_the_largest() -> None:
    logits = torch.tensor([[1.0, 3, 3, 0], [-inf, -inf, -5, -5]])
    for kind in (torch.float32, torch.bfloat16, torch.float16):
        sampler = opened([SamplingParams()] * 2, 4)
        assert run(sampler, logits.to(kind), [0, 1], [5, 6]).tokens.tolist() == [1, 2]
        mixed = opened([SamplingParams(), SamplingParams(), SamplingParams(temperature=1, seed=1)], 4)
        tokens = run(mixed, torch.cat([logits, logits[:1]]).to(kind), [0, 1, 2], [5, 6, 7]).tokens
        assert tokens[:2].tolist() == [1, 2], "beside a row that draws"


MIXED = [
    SamplingParams(),
    SamplingParams(temperature=0.7, seed=1),
    SamplingParams(temperature=1.3, top_p=0.8, seed=2),
    SamplingParams(temperature=1, top_k=20, seed=3),
    SamplingParams(temperature=1, min_p=0.05, seed=4, logprobs=0),
    SamplingParams(temperature=1, top_k=2000, top_p=0.9, repetition_penalty=1.2, seed=5, logprobs=3),
    SamplingParams(presence_penalty=1.5, logprobs=2),
    SamplingParams(temperature=2, frequency_penalty=-0.5, top_k=1200, seed=2**64 - 1),
]


def fresh_mixed() -> DeviceSampler:
    sampler = DeviceSampler(12, 1500, "cpu")
    for row, one in enumerate(MIXED):
        sampler.open_row(row, one, row % 3, [1, 2, 3], [4, 4])
    return sampler


@pytest.fixture(scope="module")
def alone() -> tuple[torch.Tensor, list[int], Sampled]:
    """Logits of eight rows, and the tokens that each gets in a batch of its own."""
    logits = (torch.randn(8, 1500, generator=torch.Generator().manual_seed(0)) * 2).bfloat16()
    each = [run(fresh_mixed(), logits[i : i + 1], [i], [100 + i]) for i in range(8)]
    return logits, [int(one.tokens) for one in each], each[5]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_company_order_and_padding_change_nothing(alone: Any, data: Any) -> None:
    logits, want, _ = alone
    rows = data.draw(st.lists(st.sampled_from(range(8)), unique=True, min_size=1))
    rows = data.draw(st.permutations([*rows, *[-1] * data.draw(st.integers(0, 2))]))
    sampled = run(fresh_mixed(), logits[rows], list(rows), [100 + row for row in rows])
    assert sampled.tokens.tolist() == [want[row] if row >= 0 else -1 for row in rows]


def test_company_changes_no_digit_of_what_is_drawn_from(alone: Any) -> None:
    logits = alone[0]
    together = fresh_mixed().apply(logits, torch.arange(8), range(8))
    for i in range(8):
        one = fresh_mixed().apply(logits[i : i + 1], torch.tensor([i]), [i])
        assert torch.equal(one[0], together[i])


def test_the_row_is_only_a_place(alone: Any) -> None:
    logits, want, _ = alone
    sampler = DeviceSampler(3, 1500, "cpu")
    sampler.open_row(2, MIXED[3], 0, [1, 2, 3], [4, 4])
    assert run(sampler, logits[3:4], [2], [103]).tokens.tolist() == [want[3]]


def test_every_part_of_the_key_matters() -> None:
    logits = torch.zeros(200, 1000)
    base = SamplingParams(temperature=1, seed=1)

    def chosen(seed: int = 1, sample: int = 0, first: int = 0) -> torch.Tensor:
        sampler = DeviceSampler(1, 1000, "cpu")
        sampler.open_row(0, replace(base, seed=seed), sample)
        return run(sampler, logits, [0] * 200, list(range(first, first + 200))).tokens

    usual = chosen()
    assert torch.equal(usual, chosen())
    assert torch.equal(usual[50:], chosen(first=50)[:150]), "the position counts, not the step"
    for other in (chosen(seed=2), chosen(sample=1), chosen(first=1), chosen(seed=1 + 2**32)):
        assert (usual == other).sum() < 5
    assert len(usual.unique()) > 150


def chi_square(seen: torch.Tensor, expected: torch.Tensor) -> float:
    """How many standard deviations the chi-square statistic lies above its mean."""
    n = len(seen) - 1
    return float((((seen - expected) ** 2 / expected).sum() - n) / math.sqrt(2 * n))


@pytest.mark.parametrize(("temperature", "cuts"), [(1.0, {}), (0.5, {}), (3.0, {"top_k": 7}), (1.0, {"top_p": 0.9})])
def test_tokens_come_as_often_as_they_should(temperature: float, cuts: Any) -> None:
    logits = torch.linspace(-2, 2, 12)[torch.randperm(12, generator=torch.Generator().manual_seed(1))]
    sampler = opened([SamplingParams(temperature=temperature, seed=11, **cuts)], 12)
    n = 40000
    tokens = run(sampler, logits.expand(n, -1), [0] * n, list(range(n))).tokens
    probs = sampler.apply(logits[None], torch.tensor([0]), [0]).softmax(-1)[0]
    seen = tokens.bincount(minlength=12).float()
    assert (seen[probs == 0] == 0).all()
    assert abs(chi_square(seen[probs > 0], n * probs[probs > 0])) < 4


def test_rare_tokens_come_too() -> None:
    """One token against 2,000 of 1e-5 each: 2 percent of the draws."""
    logits = torch.full((2001,), math.log(1e-5))
    logits[0] = math.log(1 - 2000e-5)
    sampler = opened([SamplingParams(temperature=1, seed=5)], 2001)
    tokens = torch.cat([run(sampler, logits.expand(2000, -1), [0] * 2000, list(range(i, i + 2000))).tokens
                        for i in range(0, 8000, 2000)])  # fmt: skip
    rare = int((tokens > 0).sum())
    assert abs(rare - 160) < 4 * math.sqrt(160)
    assert len(tokens.unique()) > 100


# ------------------------------------------------------------------------------------------ randomness


def words(seed: int, sample: int, positions: range, vocab: int) -> torch.Tensor:
    keys = torch.tensor([row_key(seed, sample)]).expand(len(positions), -1)
    return noise_words(*position_keys(keys, torch.tensor(positions)), torch.arange(vocab))


def test_mixing_is_a_bijection_that_spreads_one_bit_over_all() -> None:
    x = torch.arange(1 << 16) * 65521 & 0xFFFFFFFF
    y = mix32(x)
    assert len(y.unique()) == len(x)
    assert ((y >= 0) & (y < 2**32)).all()
    for bit in range(32):
        flips = (mix32(x ^ (1 << bit)) ^ y)[:, None] >> torch.arange(32) & 1
        assert (flips.float().mean(0) - 0.5).abs().max() < 0.02


def test_no_product_leaves_64_bits() -> None:
    """The largest words and factors there are, in Python's integers and in torch's."""

    def exact(x: int) -> int:
        x ^= x >> 16
        x = x * 0x21F0AAAD & 0xFFFFFFFF
        x ^= x >> 15
        assert x * 0x735A2D97 < 2**63
        x = x * 0x735A2D97 & 0xFFFFFFFF
        return x ^ x >> 15

    extremes = [0, 1, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1, *range(7, 2**32, 77777777)]
    assert mix32(torch.tensor(extremes)).tolist() == [exact(x) for x in extremes]
    summand, factor = torch.tensor([[2**32 - 1]]), torch.tensor([[2**31 - 1]])
    got = noise_words(summand, factor, torch.tensor(extremes))[0].tolist()
    assert got == [exact((exact(x) * (2**31 - 1) + 2**32 - 1) & 0xFFFFFFFF) for x in extremes]
    assert (2**32 - 1) * (2**31 - 1) + 2**32 - 1 < 2**63


@pytest.mark.parametrize("axis", ["tokens", "positions", "samples", "seeds"])
def test_words_are_uniform_and_independent_along(axis: str) -> None:
    if axis == "tokens":
        drawn = words(7, 0, range(1), 1 << 18)[0]
    elif axis == "positions":
        drawn = words(7, 0, range(1 << 16), 4).T.reshape(-1)
    elif axis == "samples":
        drawn = torch.cat([words(7, sample, range(5, 6), 64)[0] for sample in range(2048)]).view(-1, 64).T.reshape(-1)
    else:
        drawn = torch.cat([words(seed, 0, range(5, 6), 64)[0] for seed in range(2048)]).view(-1, 64).T.reshape(-1)
    n = len(drawn)
    for shift in (24, 12, 0):  # high, middle, low bits
        bins = (drawn >> shift & 0xFF).bincount(minlength=256).float()
        assert abs(chi_square(bins, torch.full((256,), n / 256))) < 4
    pairs = (drawn[:-1] >> 28) * 16 + (drawn[1:] >> 28)
    assert abs(chi_square(pairs.bincount(minlength=256).float(), torch.full((256,), (n - 1) / 256))) < 4
    unit = drawn.double() / 2**32 - 0.5
    for lag in (1, 2, 64):
        assert abs(float((unit[:-lag] * unit[lag:]).mean() * 12)) < 4 / math.sqrt(n)


def test_neighbours_share_no_noise() -> None:
    """Rows that differ by one in seed, sample or position: correlation over the vocabulary."""
    base = words(1, 0, range(3, 4), 1 << 16)[0].double()
    others = [words(2, 0, range(3, 4), 1 << 16), words(1, 1, range(3, 4), 1 << 16), words(1, 0, range(4, 5), 1 << 16)]
    for other in others:
        assert abs(float(torch.corrcoef(torch.stack([base, other[0].double()]))[0, 1])) < 4 / 256


def test_gumbel_is_finite_and_has_its_moments() -> None:
    ends = gumbel(torch.tensor([0, 1, 2**31, 2**32 - 2, 2**32 - 1]))
    assert ends.isfinite().all()
    assert ends[0] == pytest.approx(33 * math.log(2), rel=1e-5), "the longest odds: 2**-33"
    noise = gumbel(words(3, 0, range(1), 1 << 18)[0]).double()
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.01)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.03)


# ------------------------------------------------------------------------------------------ thresholds


@FEW
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=50))
def test_ordered_bits_keep_the_order(values: list[float]) -> None:
    x = torch.tensor(values)
    order = ordered_bits(x)
    assert torch.equal(x[:, None] < x, order[:, None] < order)
    assert torch.equal(x[:, None] == x, order[:, None] == order)


@FEW
@given(st.data())
def test_boundary_is_that_of_a_sorted_list(data: Any) -> None:
    n = data.draw(st.integers(1, 30))
    ends = st.sampled_from([-(2**31), -1, 0, 2**31 - 1])
    order = data.draw(st.lists(st.integers(-5, 5) | ends, min_size=n, max_size=n))
    weights = data.draw(st.lists(st.integers(0, 2**40), min_size=n, max_size=n).filter(sum))
    limit = data.draw(st.integers(0, sum(weights) - 1))
    got = boundary(torch.tensor([order], dtype=torch.int32), torch.tensor([weights]), torch.tensor([[limit]]))
    total = 0
    for key, weight in sorted(zip(order, weights, strict=True)):
        total += weight
        if total > limit:
            assert got.tolist() == [[key]]
            break


@FEW
@given(rows_of_logits(), st.integers(1, 60))
def test_top_k_by_search_equals_top_k_by_selection(logits: torch.Tensor, k: int) -> None:
    x = logits.float()
    ks = torch.full((len(x), 1), k)
    assert torch.equal(within_top_k(x, ks, k), within_top_k(x, ks, 2000))


# ------------------------------------------------------------------------------------------ log-probabilities, faults


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(3)) * 3
    params = [
        SamplingParams(temperature=5, top_k=2, repetition_penalty=3, seed=1, logprobs=4),
        SamplingParams(),
        SamplingParams(logprobs=0),
    ]
    got = run(opened(params, 40, [1, 2], [3]), logits, [0, 1, 2], [9, 9, 9])
    want = logits.log_softmax(-1)
    assert got.logprobs is not None
    assert got.top_logprobs is not None
    assert got.top_ids is not None
    for row in (0, 2):
        torch.testing.assert_close(got.logprobs[row], want[row, got.tokens[row]])
    assert got.logprobs[1].isnan()
    assert (got.top_ids[1] == -1).all()
    torch.testing.assert_close(got.top_logprobs[0], want[0].topk(4).values)
    assert torch.equal(got.top_ids[0], want[0].topk(4).indices)
    assert run(opened(params, 40), logits[1:2], [1], [0]).logprobs is None
    only = run(opened(params, 40), logits[2:], [2], [0])
    assert only.logprobs is not None
    assert only.top_ids is None
    whole = run(opened([SamplingParams(logprobs=20)], 5), torch.zeros(1, 5), [0], [0])
    assert whole.top_ids is not None
    assert whole.top_ids.shape == (1, 5), "a vocabulary smaller than what is asked for"


@pytest.mark.parametrize("bad", [nan, "all -inf", inf])
@pytest.mark.parametrize("params", MIXED, ids=range(8))
def test_a_broken_row_yields_minus_one_and_hurts_no_other(bad: Any, params: SamplingParams) -> None:
    logits = torch.randn(3, 30, generator=torch.Generator().manual_seed(0))
    if isinstance(bad, str):
        logits[1] = -inf
    else:
        logits[1, 17] = bad
    want = [int(run(opened([params] * 3, 30), logits[i : i + 1], [i], [4]).tokens) for i in (0, 2)]
    sampler = opened([params] * 3, 30)
    got = run(sampler, logits, [0, 1, 2], [4, 4, 4])
    assert got.tokens.tolist() == [want[0], -1, want[1]]
    if params.wants_logprobs:
        assert got.logprobs is not None
        assert got.logprobs.isnan().tolist() == [False, True, False]
    if params.penalises:
        assert sampler.seen is not None
        assert (sampler.seen[:3] >> 1).sum(1).tolist() == [1, 0, 1]


def state(sampler: DeviceSampler) -> list[Any]:
    seen = None if sampler.seen is None else sampler.seen.tolist()
    hosts = [values.tolist() for values in (sampler.flags, sampler.top_k, sampler.num_logprobs)]
    return [sampler.settings.tolist(), seen, hosts]


WRONG_OPENINGS: dict[str, tuple[Any, ...]] = {
    "row = 9": ([9], [SamplingParams()], [0], [()], [()]),
    "row = -1": ([-1], [SamplingParams()], [0], [()], [()]),
    "row = True": ([True], [SamplingParams()], [0], [()], [()]),
    "row = 1.0": ([1.0], [SamplingParams()], [0], [()], [()]),
    "named twice": ([1, 1], [SamplingParams()] * 2, [0, 0], [()] * 2, [()] * 2),
    "rows: 2": ([1, 2], [SamplingParams()], [0], [()], [()]),
    "seed = None": ([0, 1], [SamplingParams(), SamplingParams(temperature=1)], [0, 0], [()] * 2, [()] * 2),
    "sample_index = -1": ([1], [SamplingParams()], [-1], [()], [()]),
    "prompts: id 20": ([1], [SamplingParams(presence_penalty=1)], [0], [[3, 20]], [()]),
    "generated: id -1": ([1], [SamplingParams(presence_penalty=1)], [0], [()], [[-1, 3]]),
    "prompts: token ids": ([1], [SamplingParams(presence_penalty=1)], [0], [[0.5]], [()]),
}


@pytest.mark.parametrize("said", WRONG_OPENINGS)
def test_a_refused_opening_changes_nothing(said: str) -> None:
    sampler = opened([SamplingParams(presence_penalty=1)], 20, [1], [2])
    before = state(sampler)
    with pytest.raises(ValueError, match=said):
        sampler.open_rows(*WRONG_OPENINGS[said])
    assert state(sampler) == before


def test_a_refused_batch_changes_nothing() -> None:
    sampler = opened([SamplingParams(presence_penalty=1)] * 2, 20, [1], [2])
    sampler.close_row(1)
    before = state(sampler)
    logits, rows = torch.zeros(1, 20), torch.zeros(1, dtype=torch.int64)
    wrong: dict[str, tuple[Any, ...]] = {
        "row 1 is closed": (logits, rows + 1, rows, [1]),
        "host_rows: not all": (logits, rows, rows, [4]),
        "host_rows: not": (logits, rows, rows, [-2]),
        "logits": (logits[:, :19], rows, rows, [0]),
        "logits: torch.int64": (logits.long(), rows, rows, [0]),
        "rows": (logits, rows.int(), rows, [0]),
        "positions": (logits, rows, torch.zeros(2, dtype=torch.int64), [0]),
    }
    for said, arguments in wrong.items():
        with pytest.raises(ValueError, match=said):
            sampler.sample(*arguments)
    assert state(sampler) == before
    for bad in (0, -1, True, 2.0):
        with pytest.raises(ValueError, match="num_rows"):
            DeviceSampler(bad, 20, "cpu")  # type: ignore[arg-type]


def test_an_empty_batch() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    got = opened(MIXED[:3], 20).sample(torch.zeros(0, 20), none, none, [])
    assert got.tokens.tolist() == []


# ------------------------------------------------------------------------------------------ nothing waits


class NoWaiting(torch.utils._python_dispatch.TorchDispatchMode):
    """Refuses what makes the host wait for the device, or a size depend on numbers there."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "bincount", "is_nonzero")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        assert not name.startswith(self.WAITS), f"{name} waits for the device"
        if name.startswith("index"):
            index = [t for t in args if isinstance(t, list)]
            assert not any(t is not None and t.dtype == torch.bool for ts in index for t in ts), "a mask as index"
        return func(*args, **(kwargs or {}))


def test_the_host_waits_for_nothing(alone: Any) -> None:
    logits, want, _ = alone
    sampler = fresh_mixed()
    rows, positions = torch.arange(8), torch.arange(100, 108)
    with NoWaiting():
        sampler.open_row(9, MIXED[6], 0, [1, 2], [3])
        tokens = sampler.sample(logits, rows, positions, np.arange(8)).tokens
        sampler.close_row(9)
    assert tokens.tolist() == want
    with pytest.raises(AssertionError, match="waits"), NoWaiting():
        rows.nonzero()
    with pytest.raises(AssertionError, match="waits"), NoWaiting():
        rows.sum().item()
    with pytest.raises(AssertionError, match="mask"), NoWaiting():
        rows[rows > 2] = 0


# ------------------------------------------------------------------------------------------ kernels, interpreted


def interpreted() -> bool:
    from paged_kv.triton_device import interpreted as asked

    return asked()


needs_interpreter = pytest.mark.skipif(not interpreted(), reason="Triton's interpreter is off, or missing")


@needs_interpreter
def test_the_kernel_that_draws_equals_torch(alone: Any) -> None:
    from paged_kv.draw_kernel import launch_draw
    from paged_kv.row_settings import KEY

    sampler = opened([replace(one, top_k=0, top_p=1.0, min_p=0.0) for one in MIXED], 1500)
    logits = alone[0].clone()
    logits[5, 1499] = nan
    logits[6] = -inf
    rows = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 2, 3, -1])
    positions = torch.tensor([0, 1, 5, 2**31, 2**40 + 7, 9, 9, 2**32 - 1, 6, 4, 4])
    want = sampler.sample_plain(logits[rows], rows, positions)
    got = launch_draw(logits[rows], sampler.settings, KEY, rows, positions)
    assert torch.equal(got.masked_fill(rows < 0, -1), want)
    assert len(want.unique()) > 6


@needs_interpreter
def test_the_kernel_that_cuts_equals_torch() -> None:
    from paged_kv.row_settings import TOP_K
    from paged_kv.shape_kernels import launch_cut

    knobs: list[dict[str, Any]] = [
        {"top_k": 5},
        {"top_p": 0.5},
        {"top_k": 100, "top_p": 0.9, "min_p": 0.1},
        {"top_k": 1000, "top_p": 1e-9},
    ]
    sampler = opened(
        [SamplingParams(temperature=t, seed=1, **k) for t, k in zip((1, 2, 0.5, 1), knobs, strict=True)], 100
    )
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(2)).bfloat16().float()  # with ties
    logits[1, :60] = logits[1].max()
    rows = torch.arange(4)
    got = launch_cut(logits, sampler.settings, TOP_K, rows, tile=64)
    assert torch.equal(got, shaped_logits(sampler, logits, rows, np.arange(4)))
    assert got.isfinite().sum(1).tolist()[3] == 1


@needs_interpreter
def test_the_kernel_that_penalises_equals_torch() -> None:
    from paged_kv.row_settings import REPETITION
    from paged_kv.shape_kernels import launch_penalise

    knobs: list[dict[str, Any]] = [{"repetition_penalty": 1.7}, {"presence_penalty": -1}, {"frequency_penalty": 0.3}]
    sampler = opened([SamplingParams(**k) for k in knobs], 2100, range(900), [5, 5, 2099])
    logits = torch.randn(3, 2100, generator=torch.Generator().manual_seed(2)).bfloat16()
    rows = torch.tensor([2, 0, 1])
    assert sampler.seen is not None
    got = launch_penalise(logits, sampler.seen, sampler.settings, REPETITION, rows)
    torch.testing.assert_close(got, shaped_logits(sampler, logits, rows, rows.numpy()))
