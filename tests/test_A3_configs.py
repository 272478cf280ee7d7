"""Appendix A3: the facts of public models, each value derived by hand, and cases A26 to A28."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from paged_kv.config_facts import CLASS_DEFAULTS, KNOWN
from paged_kv.configs import LayerGroup, ModelKV, from_config, layer_kinds
from paged_kv.sizing import GiB, KVSpec, MiB, capacity
from paged_kv.weights import count_parameters, weight_bytes

DATA = Path(__file__).parents[1] / "book" / "data" / "configs"
MODELS = sorted(path.stem for path in DATA.glob("*.json"))


def read(name: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text())
    return facts


# tensors x layers that keep K/V x KV heads x head size x bytes
BY_HAND = {
    "bloom-176b": 2 * 70 * 112 * (14336 // 112) * 2,
    "chatglm2-6b": 2 * 28 * 2 * 128 * 2,
    "deepseek-v2": 1 * 60 * 1 * (512 + 64) * 2,
    "deepseek-v3": 1 * 61 * 1 * (512 + 64) * 2,
    "falcon-40b": 2 * 60 * 8 * (8192 // 128) * 2,
    "falcon-7b": 2 * 32 * 1 * (4544 // 71) * 2,
    "gemma-2-9b": 2 * 42 * 8 * 256 * 2,
    "gemma-3-1b": 2 * 26 * 1 * 256 * 2,
    "gemma-3-27b": 2 * 62 * 16 * 128 * 2,
    "gemma-3n-e4b": 2 * (35 - 15) * 2 * 256 * 2,
    "gpt-j-6b": 2 * 28 * 16 * (4096 // 16) * 2,
    "gpt-oss-120b": 2 * 36 * 8 * 64 * 2,
    "gpt-oss-20b": 2 * 24 * 8 * 64 * 2,
    "gpt2": 2 * 12 * 12 * (768 // 12) * 2,
    "jamba-v0.1": 2 * (32 // 8) * 8 * (4096 // 32) * 2,
    "llama-3-70b": 2 * 80 * 8 * (8192 // 64) * 2,
    "llama-3-8b": 2 * 32 * 8 * (4096 // 32) * 2,
    "llama-4-scout": 2 * 48 * 8 * 128 * 2,
    "mistral-7b": 2 * 32 * 8 * (4096 // 32) * 2,
    "mistral-nemo-12b": 2 * 40 * 8 * 128 * 2,
    "mixtral-8x7b": 2 * 32 * 8 * (4096 // 32) * 2,
    "mpt-7b": 2 * 32 * 32 * (4096 // 32) * 2,
    "opt-13b": 2 * 40 * 40 * (5120 // 40) * 2,
    "qwen2.5-7b": 2 * 28 * 4 * (3584 // 28) * 2,
    "qwen3-4b": 2 * 36 * 8 * 128 * 2,
    "qwen3-next-80b": 2 * (48 // 4) * 2 * 256 * 2,
    "smollm2-135m": 2 * 30 * 3 * (576 // 9) * 2,
    "starcoder": 2 * 40 * 1 * (6144 // 48) * 2,
}


@pytest.mark.parametrize("name", MODELS)
def test_bytes_per_token_by_hand(name: str) -> None:
    assert from_config(DATA / f"{name}.json", kv_dtype="bf16").bytes_per_token == BY_HAND[name]


def test_every_model_is_derived_and_has_a_source() -> None:
    assert set(MODELS) == set(BY_HAND)
    assert len(MODELS) >= 15
    assert all(read(name)["source"].startswith("https://") for name in MODELS)
    assert all("(checked: " in read(name)["source"] for name in MODELS)


SIZES = ("num_hidden_layers", "n_layer", "num_attention_heads", "n_head", "num_key_value_heads", "hidden_size",
         "n_embd", "head_dim", "kv_lora_rank", "qk_rope_head_dim", "sliding_window", "attention_chunk_size",
         "num_kv_shared_layers", "attn_layer_period", "attn_layer_offset", "num_local_experts",
         "layer_types")  # fmt: skip


@pytest.mark.parametrize("name", [name for name in MODELS if "in transformers)" in read(name)["source"]])
def test_models_that_are_their_class_defaults(name: str) -> None:
    """An independent copy of the sizes: what the model's own class assumes of a silent file."""
    auto = pytest.importorskip("transformers").AutoConfig
    text = read(name).get("text_config", read(name))
    own = auto.for_model(text["model_type"])
    assert type(own).__name__ in read(name)["source"]
    compared = {size: value for size, value in text.items() if size in SIZES and hasattr(own, size)}
    assert len(compared) >= 3
    assert {size: getattr(own, size) for size in compared} == compared


@pytest.mark.parametrize(
    ("name", "value"),
    [("llama-3-8b", 131_072), ("llama-3-70b", 327_680), ("opt-13b", 819_200), ("smollm2-135m", 23_040),
     ("deepseek-v3", 70_272), ("deepseek-v2", 69_120)],
)  # fmt: skip
def test_the_table_of_chapter_01(name: str, value: int) -> None:
    assert from_config(read(name)).bytes_per_token == value


# ------------------------------------------------------------------------------------------ A26, A27, A28


def test_a26_declared_head_size_errs_neither_way() -> None:
    """A26: head_dim is taken as declared, not as hidden / heads."""
    facts = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    small = {**facts, "num_hidden_layers": 36, "hidden_size": 2560}
    large = {**facts, "num_hidden_layers": 40, "hidden_size": 5120}
    assert from_config(small, "bf16").bytes_per_token == 147_456 != 92_160
    assert from_config(large, "bf16").bytes_per_token == 163_840 != 204_800


@pytest.mark.parametrize("part", ["text_config", "language_config", "llm_config"])
def test_a26_the_text_part_of_a_multimodal_config(part: str) -> None:
    """A26: 40 text layers nested, 33 vision layers on top."""
    text = {"num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    kv = from_config({"num_hidden_layers": 33, "torch_dtype": "float16", "hidden_size": 1152, part: text})
    assert (kv.num_layers, kv.bytes_per_token) == (40, 163_840)
    assert kv.groups[0].spec.dtype == "fp16", "the element type is inherited from the top"


@pytest.mark.parametrize(
    ("without", "named"),
    [("num_hidden_layers", "num_hidden_layers"), ("num_attention_heads", "num_attention_heads"),
     ("hidden_size", "hidden_size")],
)  # fmt: skip
def test_a26_a_missing_field_is_named(without: str, named: str) -> None:
    """A26: no silent defaults."""
    facts = {name: value for name, value in read("llama-3-8b").items() if name != without}
    with pytest.raises(ValueError, match=f"{named}.*missing"):
        from_config(facts)


def test_a26_missing_kv_heads_mean_one_for_each_query_head() -> None:
    """A26: the documented fallback; null counts as missing."""
    facts = read("llama-3-8b") | {"num_key_value_heads": None}
    assert from_config(facts).bytes_per_token == 2 * 32 * 32 * 128 * 2


def test_a27_mla_is_not_sized_as_heads() -> None:
    """A27: one latent and its rope part a layer."""
    kv = from_config(read("deepseek-v3"))
    assert kv.bytes_per_token == 61 * (512 + 64) * 2 == 70_272
    assert kv.bytes_per_token not in (1_748_992, 124_928)
    facts = read("deepseek-v3")
    del facts["qk_rope_head_dim"]
    with pytest.raises(ValueError, match="qk_rope_head_dim"):
        from_config(facts)


def test_a28_sliding_layers_count_under_a_stated_policy() -> None:
    """A28: left out nowhere, and the result says which allocation it assumed."""
    for policy in ("full", "window"):
        assert from_config(read("gpt-oss-120b"), policy=policy).bytes_for(1) == 73_728  # type: ignore[arg-type]
    full, window = (from_config(read("gpt-oss-20b"), policy=p) for p in ("full", "window"))  # type: ignore[arg-type]
    assert 32 * full.bytes_for(8192) == 12 * GiB
    assert 32 * window.bytes_for(8192) == 6_543_114_240
    assert 32 * window.bytes_for(8192, 16) == 6_543_114_240, "8,192 and 128 fall on block boundaries"
    assert [group.policy for group in full.groups] == ["full", "full"]
    assert {(group.window, group.policy) for group in window.groups} == {(128, "window"), (None, "full")}


def test_a28_the_pool_agrees_with_the_window_policy() -> None:
    """A28: blocks that a row really holds when what left the window is dropped, token by token."""
    from paged_kv.block_manager import BlockManager

    manager = BlockManager(num_blocks=64, block_size=4, max_seqs=1, max_seq_len=200)
    group = LayerGroup(KVSpec(1, 1, 8), window=10, policy="window")
    row = manager.add(0)
    for num_tokens in range(1, 150):
        manager.append([row])
        manager.pool.release(manager.tables.drop_front(row, max(0, num_tokens - 10) // 4))
        assert len(manager.tables.ids(row)) == group.blocks_for(num_tokens, 4)


# ------------------------------------------------------------------------------------------ layers


@pytest.mark.parametrize(
    ("name", "full", "sliding", "chunked", "none"),
    [
        ("mistral-7b", 0, 32, 0, 0),
        ("qwen2.5-7b", 28, 0, 0, 0),
        ("gemma-2-9b", 21, 21, 0, 0),
        ("gemma-3-1b", 4, 22, 0, 0),
        ("gemma-3-27b", 10, 52, 0, 0),
        ("gemma-3n-e4b", 4, 16, 0, 15),
        ("llama-4-scout", 12, 0, 36, 0),
        ("jamba-v0.1", 4, 0, 0, 28),
        ("qwen3-next-80b", 12, 0, 0, 36),
    ],
)
def test_kinds_of_layers(name: str, full: int, sliding: int, chunked: int, none: int) -> None:
    from paged_kv.config_facts import text_part

    kinds = layer_kinds(text_part(read(name)))
    assert [kinds.count(kind) for kind in ("full", "sliding", "chunked", "none")] == [full, sliding, chunked, none]


BASE = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 8}


@pytest.mark.parametrize(
    ("more", "kinds"),
    [
        ({}, "FFFFFFFF"),
        ({"sliding_window": 4}, "SSSSSSSS"),
        ({"sliding_window": 4, "use_sliding_window": False}, "FFFFFFFF"),
        ({"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 6}, "FFFFFFSS"),
        ({"sliding_window": 4, "sliding_window_pattern": 4}, "SSSFSSSF"),
        ({"sliding_window": 4, "sliding_window_pattern": "LLG"}, "SSFSSFSS"),
        ({"sliding_window": 4, "model_type": "gemma2"}, "SFSFSFSF"),
        ({"attention_chunk_size": 4}, "CCCFCCCF"),
        ({"attention_chunk_size": 4, "no_rope_layers": [1, 0] * 4}, "CFCFCFCF"),
        ({"hybrid_override_pattern": "M-M*-M-M"}, "...F...."),
        ({"full_attn_idxs": [2, 5]}, "..F..F.."),
        ({"attn_layer_indices": [0]}, "F......."),
        ({"attn_type_list": [0, 0, 0, 1] * 2}, "...F...F"),
        ({"attn_layer_period": 4, "attn_layer_offset": 1}, ".F...F.."),
        ({"full_attention_interval": 4}, "...F...F"),
        ({"block_types": ["recurrent", "recurrent", "attention"], "attention_window_size": 4}, "..S..S.."),
        ({"use_cla": True, "cla_share_factor": 2}, "F.F.F.F."),
        ({"use_cla": False, "cla_share_factor": 2}, "FFFFFFFF"),
        ({"num_kv_shared_layers": 3}, "FFFFF..."),
        ({"layers_block_type": ["mamba", "attention"] * 4}, ".F.F.F.F"),
    ],
)
def test_rules_of_older_files(more: dict[str, Any], kinds: str) -> None:
    from paged_kv.config_facts import text_part

    letters = {"full": "F", "sliding": "S", "chunked": "C", "none": "."}
    found = layer_kinds(text_part({**BASE, **more}))
    assert "".join(letters[kind] for kind in found) == kinds


def test_layers_may_declare_heads_of_their_own() -> None:
    types = ["sliding_attention", "full_attention"] * 4
    listed = {str(index): {"head_dim": 16} for index in (1, 3, 5, 7)}
    facts = {**BASE, "layer_types": types, "sliding_window": 4}
    for more in ({"per_layer_config": listed}, {"global_head_dim": 16}):
        kv = from_config({**facts, **more}, "bf16")
        assert {(g.spec.num_layers, g.spec.head_size, g.window) for g in kv.groups} == {(4, 8, 4), (4, 16, None)}


def test_values_of_another_size_than_keys() -> None:
    kv = from_config({**BASE, "head_dim": 192, "v_head_dim": 128}, "bf16")
    assert kv.bytes_per_token == 8 * 2 * (192 + 128) * 2


# ------------------------------------------------------------------------------------------ ranks, types, sources


@pytest.mark.parametrize(("ranks", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1), (64, 1)])
def test_tensor_parallel_ranks_keep_at_least_one_head(ranks: int, heads: int) -> None:
    kv = from_config(read("llama-3-70b"), tensor_parallel=ranks)
    assert kv.bytes_per_token == 2 * 80 * heads * 128 * 2
    assert kv.tensor_parallel == ranks


def test_tensor_parallel_ranks_each_keep_the_whole_latent() -> None:
    assert from_config(read("deepseek-v3"), tensor_parallel=8).bytes_per_token == 70_272


@pytest.mark.parametrize("ranks", [0, -1, 3, 128])
def test_ranks_that_do_not_divide_are_refused(ranks: int) -> None:
    with pytest.raises(ValueError, match=f"tensor_parallel = {ranks}"):
        from_config(read("llama-3-70b"), tensor_parallel=ranks)


@pytest.mark.parametrize(("dtype", "times"), [("fp32", 2), ("fp16", 1), ("fp8", 0.5), ("int8", 0.5), ("int4", 0.25)])
def test_kv_dtypes(dtype: str, times: float) -> None:
    assert from_config(read("llama-3-8b"), kv_dtype=dtype).bytes_per_token == 131_072 * times


def test_an_undeclared_dtype_is_assumed_aloud() -> None:
    assert "16 bits assumed" in from_config(read("gpt2")).notes[0]
    assert from_config(read("gpt2"), kv_dtype="fp16").notes == ()
    assert from_config(read("gemma-2-9b")).groups[0].spec.dtype == "fp32"


def test_a_config_comes_as_dict_file_folder_or_text(tmp_path: Path) -> None:
    facts = read("llama-3-8b")
    (tmp_path / "config.json").write_text(json.dumps(facts))
    kinds = (facts, tmp_path, str(tmp_path), tmp_path / "config.json")
    assert len({from_config(kind) for kind in kinds}) == 1


def test_class_defaults_are_those_of_transformers() -> None:
    """Each fallback for a silent file stands in the model's own class."""
    auto = pytest.importorskip("transformers").AutoConfig
    for kind, defaults in CLASS_DEFAULTS.items():
        own = auto.for_model(kind).to_dict()
        layers = own["num_hidden_layers"]
        for name, value in defaults.items():
            if name == "sliding_window_pattern":
                types = ["sliding_attention" if (i + 1) % value else "full_attention" for i in range(layers)]
                assert own["layer_types"] == types, kind
            elif name == "full_attention_interval":
                assert [i % value == value - 1 for i in range(layers)] == [
                    kind == "full_attention" for kind in own["layer_types"]
                ]
            else:
                assert own[name] == value, (kind, name)


@pytest.mark.parametrize("name", ["llama-3-8b", "gpt2", "opt-13b", "qwen2.5-7b", "gemma-2-9b", "gpt-oss-20b",
                                  "mixtral-8x7b", "starcoder", "falcon-40b", "qwen3-next-80b", "gemma-3-27b",
                                  "gemma-3n-e4b", "bloom-176b", "deepseek-v3", "jamba-v0.1"])  # fmt: skip
def test_a_transformers_config_gives_the_same_answer(name: str) -> None:
    """A26: the facts as transformers expands them, every name and default of its own, size alike."""
    auto = pytest.importorskip("transformers").AutoConfig
    facts = {key: value for key, value in read(name).items() if key not in ("source", "quantization_config")}
    theirs = auto.for_model(**copy.deepcopy(facts))
    ours, expanded = from_config(facts, "bf16"), from_config(theirs, "bf16")
    assert ours.bytes_per_token == expanded.bytes_per_token
    assert {(g.window, g.spec) for g in ours.groups} == {(g.window, g.spec) for g in expanded.groups}


# ------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({**BASE, "layer_types": ["full_attention"] * 7}, "7 layer types for 8 layers"),
        ({**BASE, "layer_types": ["compressed_sparse_attention"] * 8}, "'compressed_sparse_attention' is unknown"),
        ({**BASE, "layer_types": ["mamba"] * 8}, "no layer keeps K/V"),
        ({**BASE, "layer_types": ["sliding_attention"] * 8}, "sliding_window.*missing"),
        ({**BASE, "num_hidden_layers": "8"}, "num_hidden_layers = '8'"),
        ({**BASE, "num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({**BASE, "num_hidden_layers": 10**9}, "1000000000 layers"),
        ({**BASE, "per_layer_config": {"0": 5}}, r"per_layer_config\[0\] = 5"),
        ({**BASE, "is_encoder_decoder": True}, "is_encoder_decoder"),
        ({**BASE, "torch_dtype": "float64"}, "dtype = 'float64'"),
        ({**BASE, "head_dim": None, "hidden_size": 33}, "no head_dim.*33"),
        ({}, "num_attention_heads|num_hidden_layers"),
    ],
)
def test_bad_facts_are_named(facts: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_config(facts)


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="kv_dtype = 'fp12'"):
        from_config(BASE, kv_dtype="fp12")
    with pytest.raises(ValueError, match="policy = 'some'"):
        from_config(BASE, policy="some")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no such file"):
        from_config(tmp_path / "nothing.json")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(ValueError, match="object"):
        from_config(tmp_path / "list.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ValueError, match="not a JSON file"):
        from_config(tmp_path / "broken.json")


@pytest.mark.parametrize("name", MODELS)
def test_no_damage_to_a_fact_ends_in_anything_but_a_value_error(name: str) -> None:
    facts = read(name)
    for key in facts:
        for value in ("x", "", -1, 0, 1.5, [], [None], {}, {"a": 1}, True, None):
            damaged = {**facts, key: value}
            try:
                assert from_config(damaged).bytes_for(100, 16) > 0
            except ValueError:
                pass


# ------------------------------------------------------------------------------------------ sums and weights


def test_sums_compose_as_those_of_a_spec() -> None:
    spec, kv = KVSpec(80, 8, 128, "fp16"), from_config(read("llama-3-70b"), kv_dtype="fp16")
    assert isinstance(kv, ModelKV)
    assert capacity(kv, 50 * GiB, 300, 4096) == capacity(spec, 50 * GiB, 300, 4096)
    assert kv.bytes_per_block(16) == spec.bytes_per_block(16) == 5 * MiB
    assert kv.blocks_in(50 * GiB, 16) == spec.blocks_in(50 * GiB, 16)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-3-8b", 8.03), ("llama-3-70b", 70.55), ("opt-13b", 12.85), ("mistral-7b", 7.242), ("mixtral-8x7b", 46.7),
     ("qwen2.5-7b", 7.616), ("qwen3-4b", 4.022), ("gemma-2-9b", 9.242), ("bloom-176b", 176.25), ("gpt2", 0.1237),
     ("smollm2-135m", 0.1345), ("gpt-j-6b", 6.05)],
)  # fmt: skip
def test_parameters_by_shape_against_the_published_count(name: str, billions: float) -> None:
    assert count_parameters(read(name)) / 1e9 == pytest.approx(billions, rel=0.01)


def test_weights_come_from_the_files_where_there_are_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(read("llama-3-8b")))
    assert weight_bytes(tmp_path) == weight_bytes(read("llama-3-8b")) == 2 * count_parameters(read("llama-3-8b"))
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"x" * 100)
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(b"x" * 23)
    (tmp_path / "consolidated.safetensors").write_bytes(b"x" * 123)
    assert weight_bytes(tmp_path) == 123
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 120}}')
    assert weight_bytes(tmp_path) == 120


@pytest.mark.parametrize("kind", [None, [], {}, "unheard-of"])
def test_weights_of_an_unknown_family_are_not_guessed(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"weights: no formula .*give their size"):
        weight_bytes(read("llama-3-8b") | {"model_type": kind})


@pytest.mark.parametrize("name", ["deepseek-v3", "gpt-oss-20b", "jamba-v0.1", "gemma-3n-e4b"])
def test_weights_are_not_guessed(name: str) -> None:
    with pytest.raises(ValueError, match=r"weights: .*give their size"):
        weight_bytes(read(name))


def test_known_models_equal_their_files() -> None:
    for name, facts in KNOWN.items():
        assert from_config(facts) == from_config(read(name))
        assert weight_bytes(facts) == weight_bytes(read(name))
