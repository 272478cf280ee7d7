"""Appendix A4 on a CUDA device: the kernels against torch, no wait, and a captured graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from paged_kv.device_sampling import DeviceSampler, shaped_logits
from paged_kv.draw_kernel import launch_draw
from paged_kv.row_settings import KEY, MIN_P, TEMPERATURE, TOP_K
from paged_kv.sampling_params import SamplingParams
from paged_kv.token_cuts import cut_tokens

V = 128256
KNOBS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 5000, "top_p": 0.9},
    {"top_p": 0.01},
    {"top_p": 0.5, "min_p": 0.01},
    {"top_p": 0.999},
    {"min_p": 0.1},
    {"top_k": V, "top_p": 1e-9},
]


def filled(count: int, vocab: int = V, device: str = "cuda", **more: Any) -> DeviceSampler:
    sampler = DeviceSampler(count, vocab, device)
    knobs = [{**more, **KNOBS[i % len(KNOBS)]} for i in range(count)]
    params = [SamplingParams(temperature=(0.3, 1.0, 2.0)[i % 3], seed=i, **knob) for i, knob in enumerate(knobs)]
    sampler.open_rows(range(count), params, [0] * count, [[1, 2, 3]] * count, [[4, 4]] * count)
    return sampler


def some_logits(count: int, vocab: int = V, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    gen = torch.Generator("cuda").manual_seed(0)
    return (torch.randn(count, vocab, device="cuda", generator=gen) * 3).to(dtype)


@pytest.mark.parametrize("count", [1, 7, 64])
@pytest.mark.parametrize("vocab", [1000, 50257, V])
def test_the_device_draws_what_the_host_draws(count: int, vocab: int) -> None:
    logits = some_logits(count, vocab)
    here, there = filled(count, vocab), filled(count, vocab, "cpu")
    rows, positions = torch.arange(count), torch.arange(count) * 77
    got = launch_draw(logits, here.settings, KEY, rows.cuda(), positions.cuda()).cpu()
    want = there.sample_plain(logits.cpu(), rows, positions)
    assert torch.equal(got, want)


def test_broken_rows_and_strides() -> None:
    logits = some_logits(6, 3000)[:, :2000]
    logits[1, 1999] = torch.nan
    logits[2] = -torch.inf
    logits[3, 0] = torch.inf
    rows = torch.tensor([0, 1, 2, 3, 4, -1], device="cuda")
    sampler = filled(6, 2000)
    tokens = sampler.sample_plain(logits, rows, rows).tolist()
    assert [token < 0 for token in tokens] == [False, True, True, True, False, True]
    mixed = sampler.sample(logits, rows, rows, [0, 1, 2, 3, 4, -1]).tokens.tolist()
    assert [token < 0 for token in mixed] == [False, True, True, True, False, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernel_cuts_as_torch_does(dtype: torch.dtype) -> None:
    count = 27
    sampler, logits = filled(count), some_logits(count, dtype=dtype)
    rows = torch.arange(count, device="cuda")
    got = shaped_logits(sampler, logits, rows, np.arange(count)).isfinite()
    mine = sampler.settings
    temperature = mine[:, TEMPERATURE, None].float()
    want = cut_tokens(logits.float(), temperature, mine[:, TOP_K : MIN_P + 1], V).isfinite()
    differ = (got != want).sum(1).tolist()
    print(got.sum(1).tolist(), differ)
    # exp of the two differs in the last digits: at most a token at the very edge.
    assert max(differ) <= 2
    assert got.any(1).all()


def test_alone_or_together() -> None:
    count = 40
    logits, rows = some_logits(count), torch.arange(count, device="cuda")
    together = filled(count, presence_penalty=0.5)
    tokens = together.sample(logits, rows, rows + 9, np.arange(count)).tokens
    alone = filled(count, presence_penalty=0.5)
    for i in range(count):
        one = alone.sample(logits[i : i + 1], rows[i : i + 1], rows[i : i + 1] + 9, [i]).tokens
        assert int(one) == int(tokens[i])
    assert together.seen is not None
    assert alone.seen is not None
    assert torch.equal(together.seen, alone.seen)


def test_the_host_never_waits() -> None:
    count = 20
    sampler, logits = filled(count, logprobs=3, frequency_penalty=0.1), some_logits(count)
    rows = torch.arange(count, device="cuda")
    sampler.sample(logits, rows, rows, np.arange(count))  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sampler.open_row(3, SamplingParams(temperature=1, seed=1, repetition_penalty=2), 0, [5, 6], [7])
        sampled = sampler.sample(logits, rows, rows, np.arange(count))
        some = sampler.sample(logits[2:6], rows[2:6], rows[2:6], [2, 3, 4, 5])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sampled.top_ids is not None
    assert sampled.top_ids.shape == (count, 3)
    assert (some.tokens >= 0).all()


def test_a_graph_holds_the_plain_path() -> None:
    sampler, logits = filled(8), some_logits(8)
    rows, positions = torch.arange(8, device="cuda"), torch.arange(8, device="cuda")
    sampler.sample_plain(logits, rows, positions)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sampler.sample_plain(logits, rows, positions)
    for step in range(3):
        positions.fill_(step)
        sampler.open_row(0, SamplingParams(temperature=1, seed=100 + step))
        graph.replay()
        assert torch.equal(tokens, sampler.sample_plain(logits, rows, positions))


def test_counts_past_31_bits() -> None:
    sampler = DeviceSampler(17000, V, "cuda")  # 2.2e9 counts
    sampler.open_row(16999, SamplingParams(presence_penalty=2), 0, [V - 1], [V - 2])
    logits = torch.zeros(1, V, device="cuda")
    logits[0, V - 3 :] = torch.tensor([3.0, 5.0, 4.0], device="cuda")
    row = torch.tensor([16999], device="cuda")
    chosen = [int(sampler.sample(logits, row, row, [16999]).tokens) for _ in range(3)]
    assert chosen == [V - 1, V - 3, V - 2]
    assert sampler.seen is not None
    assert int(sampler.seen[16999].sum()) == 1 + 2 + 3 * 2
    assert int(sampler.seen[0].sum()) == 0
