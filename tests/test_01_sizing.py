"""Chapter 01: the literals of the sizing chapter, against the exported module."""

import dataclasses
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_kv import sizing
from paged_kv.sizing import (
    GB,
    GiB,
    KiB,
    KVSpec,
    MiB,
    blocks_for,
    capacity,
    expected_tail_waste,
    format_bytes,
    parse_bytes,
    tail_waste,
)

BIG = KVSpec(80, 8, 128, "fp16")
LLAMA = KVSpec(32, 8, 128, "bf16")
OPT = KVSpec(40, 40, 128, "fp16")
QUIZ = KVSpec(24, 4, 64, "fp16")


@pytest.mark.parametrize(
    ("spec", "token", "block"),
    [
        (BIG, 327_680, 5 * MiB),
        (LLAMA, 131_072, 2 * MiB),
        (OPT, 819_200, 12.5 * MiB),
        (QUIZ, 24_576, 384 * KiB),
        (KVSpec(30, 3, 64, "fp16"), 23_040, 360 * KiB),
        (KVSpec(61, 1, 576, "bf16", tensors_per_layer=1), 70_272, 1_124_352),
        (KVSpec(60, 1, 576, "bf16", tensors_per_layer=1), 69_120, 1_105_920),
    ],
)
def test_bytes_per_token_and_block(spec: KVSpec, token: int, block: int) -> None:
    assert spec.bytes_per_token == token
    assert spec.bytes_per_block(16) == block


@pytest.mark.parametrize(
    ("spec", "tokens", "size"),
    [
        (LLAMA, 1000, 125 * MiB),
        (LLAMA, 8192, GiB),
        (LLAMA, 81920, 10 * GiB),
        (LLAMA, 131_072, 16 * GiB),
        (OPT, 2048, 1.5625 * GiB),
        (OPT, 131_072, 100 * GiB),
        (QUIZ, 2000, 49_152_000),
        (BIG, 4096, 1.25 * GiB),
        (BIG, 300, 93.75 * MiB),
        (BIG, 0, 0),
    ],
)
def test_bytes_of_a_sequence(spec: KVSpec, tokens: int, size: int) -> None:
    assert spec.bytes_for(tokens) == size


@pytest.mark.parametrize(
    ("dtype", "size"), [("fp32", 4096), ("fp16", 2048), ("bf16", 2048), ("fp8", 1024), ("int8", 1024), ("int4", 512)]
)
def test_element_types(dtype: str, size: int) -> None:
    assert KVSpec(1, 4, 128, dtype).bytes_per_token == size


def test_mla_against_gqa() -> None:
    gqa, mla = KVSpec(1, 8, 128), KVSpec(1, 1, 576, tensors_per_layer=1)
    assert (gqa.elements_per_token, mla.elements_per_token) == (2048, 576)
    assert round(gqa.bytes_per_token / mla.bytes_per_token, 2) == 3.56
    assert format_bytes(mla.bytes_per_token, 3) == "1.125 KiB"


def test_reserving_against_paging() -> None:
    both = capacity(BIG, 50 * GiB, num_tokens=300, max_tokens=4096)
    assert (both.reserved, both.paged) == (40, 538)
    assert round(100 * both.reserved_waste, 2) == 92.68
    assert BIG.blocks_for(300, 16) == 19
    assert BIG.bytes_for(300, 16) == 95 * MiB
    assert format_bytes(40 * BIG.bytes_for(300)) == "3.66 GiB"
    assert both.paged == BIG.blocks_in(50 * GiB, 16) // 19


def test_paging_gains_nothing_where_the_limit_is_used() -> None:
    both = capacity(BIG, 50 * GiB, num_tokens=4096, max_tokens=4096)
    assert both.reserved == both.paged == 40
    assert both.reserved_waste == both.paged_waste == 0


def test_blocks_of_a_card() -> None:
    blocks = LLAMA.blocks_in(54 * GiB, 16)
    assert (blocks, 16 * blocks) == (27_648, 442_368)
    assert LLAMA.blocks_in(LLAMA.bytes_per_block(16) - 1, 16) == 0


@pytest.mark.parametrize(
    ("block_size", "expected", "share", "entries", "actual"),
    [(8, 3.5, 1.17, 38, 4), (16, 7.5, 2.5, 19, 4), (32, 15.5, 5.17, 10, 20), (64, 31.5, 10.5, 5, 20),
     (128, 63.5, 21.17, 3, 84)],
)  # fmt: skip
def test_tail_of_300_tokens(block_size: int, expected: float, share: float, entries: int, actual: int) -> None:
    assert expected_tail_waste(block_size) == expected
    assert round(100 * expected / 300, 2) == share
    assert blocks_for(300, block_size) == entries
    assert tail_waste(300, block_size) == actual


@pytest.mark.parametrize(
    ("tokens", "entries", "guarded"),
    [(4096, 256, 1.25 * GiB), (131_072, 8192, 40 * GiB), (2**20, 65_536, 320 * GiB), (10**6, 62_500, 327_680 * 10**6)],
)
def test_table_against_what_it_guards(tokens: int, entries: int, guarded: int) -> None:
    assert BIG.blocks_for(tokens, 16) == entries
    assert BIG.bytes_for(tokens) == guarded


@given(st.integers(0, 10**7), st.integers(1, 1024))
def test_blocks_hold_the_tokens_and_only_a_tail_is_empty(num_tokens: int, block_size: int) -> None:
    blocks = blocks_for(num_tokens, block_size)
    assert (blocks - 1) * block_size < num_tokens <= blocks * block_size or blocks == num_tokens == 0
    assert 0 <= tail_waste(num_tokens, block_size) < block_size


@given(st.integers(1, 512))
def test_expectation_is_the_mean_over_a_whole_block(block_size: int) -> None:
    wastes = [tail_waste(n, block_size) for n in range(1, 2 * block_size + 1)]
    assert sum(wastes) / len(wastes) == expected_tail_waste(block_size)


def test_units_agree_with_their_labels() -> None:
    """Case A26 (c): a budget used as GiB and printed as GB."""
    assert parse_bytes("8 GiB") == 8_589_934_592
    assert format_bytes(8 * GiB, decimal=True) == "8.59 GB"
    assert format_bytes(80 * GB, 1) == "74.5 GiB"
    assert parse_bytes("80GB") == 80 * 10**9


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1,023 B"), (1024, "1 KiB"), (98_304_000, "93.75 MiB"), (100 * GiB, "100 GiB"),
     (2**50, "1,024 TiB"), (1.5, "1.5 B")],
)  # fmt: skip
def test_format_bytes(size: float, text: str) -> None:
    assert format_bytes(size) == text


@given(st.integers(0, 10**15))
def test_formatted_sizes_are_read_back(size: int) -> None:
    for decimal in (False, True):
        text = format_bytes(size, digits=3, decimal=decimal).replace(",", "")
        assert abs(parse_bytes(text) - size) <= 0.0006 * size + 1


@pytest.mark.parametrize("text", ["80G", "", "GB", "-1GB", "1e9", "1,000 B", "80 GBs", "nan"])
def test_a_size_without_a_clear_unit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="size = "):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers = 0"),
        ({"num_kv_heads": -8}, "num_kv_heads = -8"),
        ({"head_size": 128.0}, r"head_size = 128\.0"),
        ({"head_size": True}, "head_size = True"),
        ({"num_layers": "32"}, "num_layers = '32'"),
        ({"dtype": "float16"}, "dtype = 'float16'.*bf16"),
        ({"tensors_per_layer": 3}, "tensors_per_layer = 3"),
        ({"num_kv_heads": 1, "head_size": 65, "dtype": "int4"}, "head_size = 65"),
    ],
)
def test_a_bad_spec_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"num_layers": 32, "num_kv_heads": 8, "head_size": 128}
    with pytest.raises(ValueError, match=message):
        KVSpec(**(good | change))


def test_numpys_integers_do_not_overflow() -> None:
    narrow = KVSpec(*(np.int16(value) for value in (32, 8, 128)), dtype="fp16")
    assert narrow == KVSpec(32, 8, 128, "fp16")
    assert type(narrow.bytes_per_token) is int
    assert BIG.bytes_for(np.int32(20_000)) == 20_000 * 327_680
    assert blocks_for(np.uint8(100), 16) == 7
    assert capacity(BIG, 50 * GiB, np.int32(300), np.int32(4096)) == capacity(BIG, 50 * GiB, 300, 4096)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: LLAMA.bytes_per_block(0), "block_size = 0"),
        (lambda: LLAMA.bytes_for(-1), "num_tokens = -1"),
        (lambda: LLAMA.blocks_in(-1, 16), "memory_bytes = -1"),
        (lambda: capacity(LLAMA, GiB, 0, 10), "num_tokens = 0"),
        (lambda: capacity(LLAMA, GiB, 300, 299), "max_tokens = 299.*300"),
    ],
)
def test_bad_arguments_are_refused_by_name(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_a_spec_is_frozen_and_hashable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        LLAMA.num_layers = 1  # type: ignore[misc]
    assert {LLAMA, KVSpec(32, 8, 128)} == {LLAMA}


def test_the_module_needs_the_standard_library_only() -> None:
    for name, value in vars(sizing).items():
        module = getattr(value, "__module__", None)
        if module and module != "paged_kv.sizing":
            assert module.split(".")[0] in sys.stdlib_module_names, name
