# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Reading real configs
#
# Every published model comes with a `config.json`, and chapter 01 needs three numbers from it. The
# obvious reading is one line: divide the hidden size by the number of heads, multiply. Here it is,
# on five models that people serve.

# %%
import json
from pathlib import Path

here = Path.cwd()
DATA = next(p for p in (f / "book/data/configs" for f in (here, *here.parents)) if p.is_dir())


def read(name):
    return json.loads((DATA / f"{name}.json").read_text())


def naive_bytes_per_token(config):
    heads = config["num_attention_heads"]
    head_size = config["hidden_size"] // heads
    return 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_size * 2


for name in ("llama-3-8b", "qwen3-4b", "mistral-nemo-12b", "deepseek-v3", "gemma-3-27b"):
    try:
        print(f"{name:17} {naive_bytes_per_token(read(name)):9,} B a token")
    except KeyError as error:
        print(f"{name:17} KeyError: {error}")

# %% [markdown]
# The first is right. The second is 1.6 times too small, the third 1.2 times too large, the fourth
# 24.9 times too large, and the fifth does not read at all. None of the wrong ones looks wrong.
#
# **The question.** What has to be read from a config, and in which order, so that the sum is right
# or refuses to be made?
#
# :::{card} This appendix
# - **You need**: chapter 01.
# - **Exports**: `config_facts` (`KNOWN`), `configs` (`from_config`, `ModelKV`, `LayerGroup`),
#   `weights` (`weight_bytes`).
# - **Device**: any CPU; no model is loaded.
# - **Run time**: about 2 s.
# - **You are here** chapters 00 to 14 · labs · appendices: A1 drawing · A2 command line · **A3 real
#   configs**, to be read after 01
# :::

# %% tags=["hide-input"]
right = {"qwen3-4b": 147_456, "mistral-nemo-12b": 163_840, "deepseek-v3": 70_272}
for name, value in right.items():
    wrong = naive_bytes_per_token(read(name))
    print(f"{name}: {max(wrong / value, value / wrong):.1f} times off")

# %% [markdown]
# ## One name for each fact
#
# The same fact has several names: `num_hidden_layers` is `n_layer` in GPT-2 and `num_layers` in
# ChatGLM. So the module has one table of names, and two ways to ask: `find_fact` returns `None`
# where nothing is declared, `required_fact` raises an error that lists the names it looked for.
# JSON's `null` means *not declared*.
#
# Some files say less than their model needs, since the class that reads them fills the rest in. A
# Gemma 3 file may omit its head size, and 256 is meant, not hidden size / heads. Such fallbacks are
# *documented* ones: they stand in the model's own class, and `CLASS_DEFAULTS` repeats the few that
# matter (a test compares them with the classes). Whatever is missing beyond that is an error.

# %% tags=["export:config_facts"]
"""The facts of a model's config.json, under whichever names the file gives them.

Nothing is guessed: a fact that is missing and has no documented fallback is an error.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paged_kv.sizing import at_least

Config = Mapping[str, Any]

NAMES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "hidden": ("hidden_size", "n_embd", "d_model", "n_embed"),
    "head_size": ("head_dim", "attention_head_dim", "kv_channels"),
    "latent": ("kv_lora_rank",),
    "rope": ("qk_rope_head_dim",),
    "value_size": ("v_head_dim",),
    "window": ("sliding_window", "attention_window_size", "sliding_window_size"),
    "chunk": ("attention_chunk_size",),
    "context": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
    "vocabulary": ("vocab_size", "padded_vocab_size"),
    "mlp": ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
}

# %% [markdown]
# Then the fallbacks, by model type.

# %% tags=["export:config_facts"]
# What the model's own class supplies where its file is silent (transformers, configuration_*.py).
CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256, "sliding_window_pattern": 2},
    "gemma3_text": {
        "head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
        "sliding_window": 4096, "sliding_window_pattern": 6,
    },
    "gemma3n_text": {"head_dim": 256, "sliding_window": 512, "sliding_window_pattern": 5},
    "cohere2": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "gpt_oss": {"head_dim": 64, "sliding_window": 128, "sliding_window_pattern": 2},
    "qwen3": {"head_dim": 128},
    "qwen3_next": {"head_dim": 256, "full_attention_interval": 4},
}


# %% tags=["export:config_facts"]
def whole_number(text: Config, name: str) -> int:
    """The whole number under exactly this name; 0 if it is not declared."""
    return 0 if text.get(name) is None else at_least(0, f"config: {name}", text[name])


def listed_values(text: Config, name: str) -> list[Any]:
    """The list (or the letters) under exactly this name; empty if it is not declared."""
    value = () if text.get(name) is None else text[name]
    if not isinstance(value, list | tuple | str):
        raise ValueError(f"config: {name} = {value!r}: a list is needed")
    return list(value)


def find_fact(text: Config, what: str) -> int | None:
    """The fact `what` (a key of `NAMES`) under whichever name declares it; None if none does."""
    declared = (name for name in NAMES[what] if text.get(name) is not None)
    return next((whole_number(text, name) for name in declared), None)


def required_fact(text: Config, what: str) -> int:
    """The same, 1 or more; ValueError that lists the names if it is not declared."""
    value = find_fact(text, what)
    if value is None:
        raise ValueError(f"config: {' or '.join(NAMES[what])} is missing and has no fallback")
    return at_least(1, f"config: {NAMES[what][0]}", value)


# %% [markdown]
# ## Finding the text model
#
# A multimodal config nests one config per part. The text part is the one with the KV cache; at the
# top level there may be counts of *vision* layers, or none. Nested wins, always. The element type
# is the one fact that parts inherit from the top.

# %% tags=["export:config_facts"]
TEXT_PARTS = ("text_config", "language_config", "llm_config", "thinker_config")


def read_config(config: Any) -> dict[str, Any]:
    """A config as a plain dict: from a dict, a JSON file, a model's folder or transformers."""
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    if isinstance(config, Mapping):
        return dict(config)
    path = Path(config)
    path = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"config = {str(config)!r}: no such file, nor a folder with one") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"config = {str(path)!r}: not a JSON file ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"config = {str(path)!r}: a JSON object is needed, not a list or value")
    return found


def text_part(config: Config) -> dict[str, Any]:
    """The part that describes the language model, with its class's own defaults filled in."""
    for name in TEXT_PARTS:
        if isinstance(config.get(name), Mapping):
            dtype = config.get("dtype") or config.get("torch_dtype")
            return text_part({"dtype": dtype} | dict(config[name]))
    if config.get("is_encoder_decoder"):
        raise ValueError("config: is_encoder_decoder is true; only decoders are sized")
    attention = config.get("attn_config")
    nested = {"num_kv_heads": attention.get("kv_n_heads")} if isinstance(attention, Mapping) else {}
    given = {name: value for name, value in config.items() if value is not None}
    return {**CLASS_DEFAULTS.get(str(config.get("model_type")), {}), **nested, **given}


# %%
scout = read("llama-4-scout")
print("vision layers:", scout["vision_config"]["num_hidden_layers"])
print("text layers:  ", required_fact(text_part(scout), "layers"))
try:
    required_fact(text_part({"hidden_size": 4096}), "layers")
except ValueError as error:
    print("ValueError:", error)

# %% [markdown]
# ## Heads, and their size
#
# Three rules, in this order, each with a model that needs it.
#
# 1. **MLA** (`kv_lora_rank` is declared): one latent of `kv_lora_rank` + `qk_rope_head_dim`
#   elements a layer, whatever the head counts say. DeepSeek-V3 declares 128 KV heads, and keeps
#   none of them.
# 2. The **KV heads**: `num_key_value_heads`; else one, where `multi_query` is set (Falcon-7B,
#   StarCoder); else as many as query heads (OPT, GPT-2). Falcon-40B sets `multi_query` *and*
#   `new_decoder_architecture`, which brings the KV heads back.
# 3. The **head size**: `head_dim` where declared, else hidden size / heads, which must divide.
#   Where values have another size than keys (`v_head_dim`), one tensor of both lengths takes the
#   same bytes.
#
# Under **tensor parallelism** the heads are dealt out to the ranks. With fewer heads than ranks
# each keeps one, a copy of its neighbour's. A latent has no heads to deal out, so every rank keeps
# all of it.

# %% tags=["export:configs"]
"""The KV cache of a real model, read from its config.json.

Layers are counted once each: full, windowed, or without K/V.  What is not understood is an error.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from paged_kv.sizing import BITS, KVSpec, blocks_for

Policy = Literal["full", "window"]


def heads_per_rank(heads: int, kv_heads: int, ranks: int) -> int:
    """KV heads that one of `ranks` tensor-parallel ranks keeps: at least one."""
    if heads % ranks:
        raise ValueError(f"tensor_parallel = {ranks}: it does not divide {heads} query heads")
    if kv_heads % ranks and ranks % kv_heads:
        raise ValueError(f"tensor_parallel = {ranks}: {kv_heads} KV heads do not go round evenly")
    return max(1, kv_heads // ranks)


def layer_shape(text: Config, ranks: int) -> tuple[int, int, int]:
    """(KV heads a rank, head size, tensors) of one layer."""
    heads, latent = required_fact(text, "heads"), find_fact(text, "latent")
    if latent:
        heads_per_rank(heads, 1, ranks)
        return 1, latent + required_fact(text, "rope"), 1
    one_head = text.get("multi_query") and not text.get("new_decoder_architecture")
    kv_heads = 1 if one_head else find_fact(text, "kv_heads") or heads
    size = find_fact(text, "head_size")
    if size is None:
        hidden = required_fact(text, "hidden")
        if hidden % heads:
            raise ValueError(f"config: no head_dim, and {heads} heads do not divide {hidden}")
        size = hidden // heads
    kept, value_size = heads_per_rank(heads, kv_heads, ranks), find_fact(text, "value_size") or size
    return (kept, size, 2) if value_size == size else (kept, size + value_size, 1)


# %%
for name in ("deepseek-v3", "falcon-7b", "falcon-40b", "opt-13b", "qwen3-4b", "chatglm2-6b"):
    print(f"{name:12} (KV heads, head size, tensors) = {layer_shape(text_part(read(name)), 1)}")

# %% [markdown]
# ## Layers that differ
#
# Not every layer keeps every token.
#
# | kind | keeps | declared by |
# |---|---|---|
# | full | all tokens | the default |
# | sliding | may forget all but the last $W$ | `layer_types`, or a window and a pattern |
# | chunked | may forget chunks before the current one | `layer_types`, `attention_chunk_size` |
# | none | no K/V: a recurrent state, or another layer's K/V | hybrids; `num_kv_shared_layers`, `cla_share_factor` |
#
# Where a file lists `layer_types`, that list decides. Older files give a rule, and each family has
# its own; `layer_kinds` knows those rules and turns each into such a list. A kind it has never
# heard of is an error: new kinds of attention appear every year, and a default would size them
# silently.
#
# :::{admonition} Predict
# :class: tip
# Gemma 3n has 35 layers, of which the last 15 share K/V that earlier layers computed. Jamba has 32,
# attention in every eighth. How many layers of each keep K/V?
# :::
#
# :::{dropdown} Reasoning
# 35 - 15 = 20 and 32 / 8 = 4. The rest attend to borrowed K/V, or carry a state whose size does not
# depend on the number of tokens.
# :::

# %% tags=["export:configs"]
KINDS: dict[str, str] = {
    **dict.fromkeys(("full_attention", "attention", "hybrid", "*"), "full"),
    **dict.fromkeys(("sliding_attention", "local_attention"), "sliding"),
    "chunked_attention": "chunked",
    **dict.fromkeys(("linear_attention", "mamba", "mamba2", "conv", "recurrent"), "none"),
    **dict.fromkeys(("moe", "mlp", "M", "-", "E"), "none"),
}


MOST_LAYERS = 10_000  # each is looked at; a slip of the pen must not run for ever


# %% tags=["export:configs"]
def listed_kinds(text: Config, layers: int) -> list[str] | None:
    """The kind of each layer where the config lists them, or says which ones attend."""
    for name in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
        if names := listed_values(text, name):
            return [str(kind) for kind in names]
    if cycle := listed_values(text, "block_types"):  # RecurrentGemma: a short list, repeated
        kinds = ["sliding_attention" if kind == "attention" else str(kind) for kind in cycle]
        return [kinds[i % len(kinds)] for i in range(layers)]
    attends = listed_values(text, "full_attn_idxs") or listed_values(text, "attn_layer_indices")
    attends += [i for i, full in enumerate(listed_values(text, "attn_type_list")) if full]
    if step := whole_number(text, "attn_layer_period"):
        attends += range(whole_number(text, "attn_layer_offset"), layers, step)
    if step := whole_number(text, "full_attention_interval"):
        attends += range(step - 1, layers, step)
    kind = {True: "full_attention", False: "linear_attention"}
    return [kind[i in attends] for i in range(layers)] if attends else None


# %% tags=["export:configs"]
def patterned_kinds(text: Config, layers: int) -> list[str]:
    """The kind of each layer from a window or chunk size and the family's rule; else all full."""
    if find_fact(text, "chunk"):
        chunked = listed_values(text, "no_rope_layers") or [(i + 1) % 4 for i in range(layers)]
        return ["chunked_attention" if flag else "full_attention" for flag in chunked]
    if not find_fact(text, "window") or text.get("use_sliding_window") is False:
        return ["full_attention"] * layers
    pattern = text.get("sliding_window_pattern")
    if pattern and isinstance(pattern, str):  # "LLLG": local, local, local, global
        slides = [pattern[i % len(pattern)] == "L" for i in range(layers)]
    elif step := whole_number(text, "sliding_window_pattern"):
        slides = [bool((i + 1) % step) for i in range(layers)]
    else:
        first = whole_number(text, "max_window_layers") if text.get("use_sliding_window") else 0
        slides = [i >= first for i in range(layers)]
    return ["sliding_attention" if slide else "full_attention" for slide in slides]


# %% [markdown]
# Sharing comes on top: a layer that reads another's K/V keeps none, whatever its kind.

# %% tags=["export:configs"]
def layer_kinds(text: Config) -> list[str]:
    """For each layer "full", "sliding", "chunked" or "none"; ValueError for an unknown kind."""
    blocks = listed_values(text, "layers_block_type")
    blocks = blocks or listed_values(text, "hybrid_override_pattern")
    layers = find_fact(text, "layers") or len(blocks) or required_fact(text, "layers")
    if layers > MOST_LAYERS:
        raise ValueError(f"config: {layers} layers; at most {MOST_LAYERS} are believed")
    names = listed_kinds(text, layers) or patterned_kinds(text, layers)
    if len(names) != layers:
        raise ValueError(f"config: {len(names)} layer types for {layers} layers")
    unknown = sorted(set(names) - set(KINDS))
    if unknown:
        raise ValueError(f"config: layer type {unknown[0]!r} is unknown; known: {', '.join(KINDS)}")
    kinds = [KINDS[name] for name in names]
    last = layers - whole_number(text, "num_kv_shared_layers")
    factor = whole_number(text, "cla_share_factor") if text.get("use_cla") else 1
    return [kind if i < last and i % (factor or 1) == 0 else "none" for i, kind in enumerate(kinds)]


# %%
for name in ("mistral-7b", "qwen2.5-7b", "gemma-2-9b", "gemma-3-27b", "gemma-3n-e4b",
             "llama-4-scout", "jamba-v0.1", "qwen3-next-80b"):
    kinds = layer_kinds(text_part(read(name)))
    counts = {kind: kinds.count(kind) for kind in ("full", "sliding", "chunked", "none")}
    print(f"{name:15}", {kind: count for kind, count in counts.items() if count})
assert layer_kinds(text_part(read("gemma-3n-e4b"))).count("none") == 15
assert layer_kinds(text_part(read("jamba-v0.1"))).count("full") == 4

# %% [markdown]
# Qwen2.5 declares a window of 131,072 and `use_sliding_window: false`: no layer slides.

# %% [markdown]
# ## Two right answers: the allocation policy
#
# A sliding layer *reads* only its window. What it *keeps* is up to the allocator. One block table
# for all layers is simple, and then every layer keeps every token (policy **full**). Or each kind
# of layer gets a table and a pool of its own and drops blocks that fell out of the window (policy
# **window**). Both are in use, so a sum must say which it assumed. A `LayerGroup` carries it.
#
# With windows and blocks of $B$ tokens, a sequence of $n$ tokens keeps the blocks that overlap its
# last $W$ tokens: $\lceil n/B \rceil - \lfloor \max(0, n - W)/B \rfloor$. That may be one more than
# $\lceil W/B \rceil$, when the window straddles.

# %% tags=["export:configs"]
@dataclass(frozen=True)
class LayerGroup:
    """Identical layers: what a token leaves in them, and how long it is kept.

    Fields: `spec`; `window`, tokens a layer looks back, None for all; `policy`, "full" if every
    token is kept, "window" if blocks that left the window are given back.
    """

    spec: KVSpec
    window: int | None = None
    policy: Policy = "full"

    def blocks_for(self, num_tokens: int, block_size: int) -> int:
        """Blocks kept for a sequence of `num_tokens`: those that overlap what may be read."""
        blocks = blocks_for(num_tokens, block_size)
        if self.window is None or self.policy == "full":
            return blocks
        return blocks - max(0, num_tokens - self.window) // block_size

    def bytes_for(self, num_tokens: int, block_size: int = 1) -> int:
        """Bytes kept for a sequence of `num_tokens`, in blocks of `block_size`."""
        return self.blocks_for(num_tokens, block_size) * self.spec.bytes_per_block(block_size)


# %% tags=["export:configs"]
@dataclass(frozen=True)
class ModelKV:
    """The KV cache of a model, on one tensor-parallel rank.

    Fields: `groups` of identical layers; `num_layers`, those without K/V included; `max_tokens`,
    the context the config declares, None if it does not; `tensor_parallel`, ranks; `notes`,
    what was assumed.
    """

    groups: tuple[LayerGroup, ...]
    num_layers: int
    max_tokens: int | None = None
    tensor_parallel: int = 1
    notes: tuple[str, ...] = ()

    @property
    def bytes_per_token(self) -> int:
        """Bytes that a new token adds, over all layers."""
        return sum(group.spec.bytes_per_token for group in self.groups)

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes of a block of `block_size` tokens, over all layers."""
        return self.bytes_per_token * at_least(1, "block_size", block_size)

    def bytes_for(self, num_tokens: int, block_size: int = 1) -> int:
        """Bytes of one sequence in blocks of `block_size`, each group by its policy."""
        return sum(group.bytes_for(num_tokens, block_size) for group in self.groups)

    def blocks_in(self, memory_bytes: int, block_size: int) -> int:
        """Whole blocks, over all layers, that fit into `memory_bytes`."""
        return at_least(0, "memory_bytes", memory_bytes) // self.bytes_per_block(block_size)


# %% [markdown]
# ## `from_config`
#
# The last fact is the element type: `kv_dtype` if you give one, else the type of the weights. Where
# a file is silent (GPT-2's is) 16 bits are assumed, which is what servers do, and the result says
# so in its `notes`.

# %% tags=["export:configs"]
DTYPES = {
    "float32": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16",
    "float8_e4m3fn": "fp8", "float8_e5m2": "fp8", **dict(zip(BITS, BITS, strict=True)),
}


def element_type(text: Config, kv_dtype: str | None) -> tuple[str, tuple[str, ...]]:
    """(key of `BITS`, notes) from the caller's wish, else from the config."""
    given = kv_dtype or text.get("dtype") or text.get("torch_dtype")
    if given is None:
        return "bf16", ("the config declares no dtype: 16 bits assumed",)
    name = str(given).removeprefix("torch.")
    if name not in DTYPES:
        which = "kv_dtype" if kv_dtype else "config: dtype"
        raise ValueError(f"{which} = {name!r}: one of {', '.join(BITS)} is needed")
    return DTYPES[name], ()


def window_of(text: Config, kind: str) -> int | None:
    """Tokens that a layer of this kind looks back; None for all of them."""
    if kind == "full":
        return None
    return required_fact(text, "chunk" if kind == "chunked" else "window")


def layer_overrides(text: Config, index: int, kind: str) -> dict[str, Any]:
    """Facts that one layer declares for itself (Gemma 4: wider heads in its full layers)."""
    listed = text.get("per_layer_config")
    if isinstance(listed, Mapping):
        own = {str(key).lstrip("0") or "0": facts for key, facts in listed.items()}
        facts = own.get(str(index), {})
        if not isinstance(facts, Mapping):
            raise ValueError(f"config: per_layer_config[{index}] = {facts!r}: an object is needed")
        return dict(facts)
    if kind != "full" or not text.get("global_head_dim"):
        return {}
    heads = text.get("num_global_key_value_heads") if text.get("attention_k_eq_v") else None
    own_heads = {"num_key_value_heads": heads} if heads else {}
    return {"head_dim": text["global_head_dim"], **own_heads}


# %% tags=["export:configs"]
def from_config(
    config: Any,
    kv_dtype: str | None = None,
    tensor_parallel: int = 1,
    policy: Policy = "full",
) -> ModelKV:
    """Read a model's KV cache from its config.

    Args: `config`, a dict, a JSON file, a model's folder or a transformers config; `kv_dtype`, a
    key of `BITS`, None for the weights' own; `tensor_parallel`, ranks; `policy`, what windowed
    layers keep: "full" or "window".
    Raises: ValueError naming what is missing, unknown or does not divide.
    """
    at_least(1, "tensor_parallel", tensor_parallel)
    if policy not in ("full", "window"):
        raise ValueError(f'policy = {policy!r}: "full" or "window" is needed')
    text = text_part(read_config(config))
    dtype, notes = element_type(text, kv_dtype)
    kinds, shapes = layer_kinds(text), Counter[tuple[int, int, int, int | None]]()
    for index, kind in enumerate(kinds):
        if kind != "none":
            facts = {**text, **layer_overrides(text, index, kind)}
            shapes[(*layer_shape(facts, tensor_parallel), window_of(text, kind))] += 1
    if not shapes:
        raise ValueError("config: no layer keeps K/V")
    groups = tuple(
        LayerGroup(KVSpec(count, heads, size, dtype, tensors), window, policy if window else "full")
        for (heads, size, tensors, window), count in shapes.items()
    )
    return ModelKV(groups, len(kinds), find_fact(text, "context"), tensor_parallel, notes)


# %%
for policy in ("full", "window"):
    kv = from_config(read("gpt-oss-20b"), policy=policy)
    print(f"policy {policy}: one token {kv.bytes_per_token:,} B,",
          f"32 chats of 8,192 tokens {32 * kv.bytes_for(8192, 16) / 2**30:.2f} GiB")
    for group in kv.groups:
        print("   ", group.spec, "window", group.window, "keeps", group.policy)
print("notes:", kv.notes)
print(f"{32 * kv.bytes_for(8192, 16):,} B")

# %% [markdown]
# 12.00 GiB or 6.09 GiB for the same chats, both right for their allocator. This book's pool has one
# table for all layers: policy *full*, the default here. One new token adds the same bytes under
# both.
#
# **Turn the knob.** Set the window of the config to 8,192; expect both policies to agree.

# %%
wide = read("gpt-oss-20b") | {"sliding_window": 8192}
same = {from_config(wide, policy=policy).bytes_for(8192, 16) for policy in ("full", "window")}
print("distinct answers with a window of 8,192:", len(same))
assert len(same) == 1

# %% [markdown]
# ## Twenty-eight models
#
# :::{admonition} Predict
# :class: tip
# BLOOM has 176 billion parameters, DeepSeek-V3 671 billion. Which takes more cache a token, and by
# about how much?
# :::
#
# :::{dropdown} Reasoning
# BLOOM (2022): 70 layers × 112 heads × 128 × 2 tensors. DeepSeek-V3 (2024): 61 layers × 576 × 1.
# That is 2,007,040 elements against 35,136: BLOOM, 57 times.
# :::

# %%
from paged_kv.sizing import format_bytes

for path in sorted(DATA.glob("*.json")):
    kv = from_config(path, kv_dtype="bf16")
    keeping = sum(group.spec.num_layers for group in kv.groups)
    print(f"{path.stem:17} {keeping:3} of {kv.num_layers:2} layers keep K/V",
          f"{kv.bytes_per_token:10,} B a token; 8,192 tokens {format_bytes(kv.bytes_for(8192))}")
bloom, v3 = (from_config(DATA / f"{n}.json", "bf16") for n in ("bloom-176b", "deepseek-v3"))
print(f"BLOOM against DeepSeek-V3: {bloom.bytes_per_token / v3.bytes_per_token:.0f} times")

# %% [markdown]
# The files stand in `book/data/configs`: only the fields that matter, and in `source` where they come
# from and how they were checked. Eleven of the models are the defaults of their own class in
# transformers, and a test compares them; the others were compared with copies of their files. The 57
# times between BLOOM and DeepSeek-V3 are the distance that cache design went in two years.

# %% [markdown]
# ## One card, several cards
#
# :::{admonition} Predict
# :class: tip
# Llama 3 70B is served by 16 cards. It has 8 KV heads. What does one card keep of a token, compared
# with 8 cards?
# :::
#
# :::{dropdown} Reasoning
# The same. With 8 ranks each keeps one head; with 16 there are not enough, so two ranks keep copies
# of one head. The cache of all ranks together doubles.
# :::

# %%
for ranks in (1, 2, 8, 16):
    kv = from_config(read("llama-3-70b"), tensor_parallel=ranks)
    print(f"{ranks:2} ranks: {format_bytes(kv.bytes_per_token):8} a token on each,",
          f"{format_bytes(ranks * kv.bytes_per_token)} together")
    mla = from_config(read("deepseek-v3"), tensor_parallel=ranks)
    assert mla.bytes_per_token == 70_272
try:
    from_config(read("llama-3-70b"), tensor_parallel=3)
except ValueError as error:
    print("ValueError:", error)

# %% [markdown]
# ## What the weights take
#
# Sizing a card needs the weights too. A folder with safetensors files says it exactly. Without
# them, the shapes give the number of parameters of the plain families: embeddings, four attention
# matrices and two or three MLP matrices a layer. Norms and biases are left out; they are a fraction
# of a percent. For anything else (MLA, hybrids, quantised weights) the estimate is refused, and you
# give the size yourself.

# %% tags=["export:weights"]
"""What a model's weights take, from its files or, for plain decoders, from its shapes."""

# model type -> (matrices of one MLP, output embedding shared with the input's by default)
FAMILIES: dict[str, tuple[int, bool]] = {
    **dict.fromkeys(("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"), (3, False)),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), (3, True)),
    **dict.fromkeys(("gpt2", "opt", "bloom", "mpt", "falcon", "gpt_bigcode"), (2, True)),
    "gptj": (2, False), "phi3": (3, False),
}


def count_parameters(config: Any) -> int:
    """Parameters of a plain decoder, from its shapes, norms and biases left out.

    Raises: ValueError where the family's formula is not known.
    """
    text = text_part(read_config(config))
    kind = text.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(f"weights: no formula for model_type {kind!r}; give their size")
    matrices, tied = FAMILIES[kind]
    hidden, layers, heads = (required_fact(text, what) for what in ("hidden", "layers", "heads"))
    kv_heads, head_size, _ = layer_shape(text, 1)
    experts = find_fact(text, "experts") or 1
    wide = whole_number(text, "moe_intermediate_size") if experts > 1 else 0
    inner = wide or find_fact(text, "mlp") or 4 * hidden
    attention = 2 * hidden * head_size * (heads + kv_heads)
    mlp = matrices * hidden * inner * experts + (hidden * experts if experts > 1 else 0)
    embeddings = 1 if text.get("tie_word_embeddings", tied) else 2
    return layers * (attention + mlp) + embeddings * required_fact(text, "vocabulary") * hidden


# %% tags=["export:weights"]
def weight_bytes(config: Any) -> int:
    """Bytes of a model's weights: from its files where they are there, else from its shapes."""
    if isinstance(config, str | Path) and Path(config).is_dir():
        index = Path(config) / "model.safetensors.index.json"
        if index.exists():
            return int(json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"])
        files = list(Path(config).glob("model*.safetensors"))
        if files:
            return sum(file.stat().st_size for file in files)
    facts = read_config(config)
    if facts.get("quantization_config"):
        raise ValueError("weights: the config says they are quantised; give their size")
    dtype, _ = element_type(text_part(facts), None)
    return count_parameters(facts) * BITS[dtype] // 8


# %%
published = {  # billions of parameters, from the model cards
    "llama-3-8b": 8.03, "llama-3-70b": 70.6, "opt-13b": 12.9, "mistral-7b": 7.24,
    "mixtral-8x7b": 46.7, "qwen2.5-7b": 7.62, "qwen3-4b": 4.02, "gemma-2-9b": 9.24,
    "bloom-176b": 176.2,
}
for name, billions in published.items():
    ours = count_parameters(read(name)) / 1e9
    print(f"{name:13} {ours:7.2f} billion by shapes, {billions} published")
    assert abs(ours / billions - 1) < 0.01

# %% [markdown]
# ## Names you need no file for
#
# A few models come with the package, so that the command line of appendix A2 answers by name.

# %% tags=["export:config_facts"]
def _llama_like(kind: str, layers: int, heads: int, kv: int, hidden: int, mlp: int,
                vocab: int, context: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": kind, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv, "hidden_size": hidden, "intermediate_size": mlp,
        "vocab_size": vocab, "max_position_embeddings": context, "torch_dtype": "bfloat16",
    } | more  # fmt: skip


KNOWN: dict[str, dict[str, Any]] = {
    "llama-3-8b": _llama_like("llama", 32, 32, 8, 4096, 14336, 128256, 8192),
    "llama-3-70b": _llama_like("llama", 80, 64, 8, 8192, 28672, 128256, 8192),
    "mistral-7b": _llama_like(
        "mistral", 32, 32, 8, 4096, 14336, 32000, 32768, sliding_window=4096
    ),
    "mixtral-8x7b": _llama_like(
        "mixtral", 32, 32, 8, 4096, 14336, 32000, 32768, num_local_experts=8
    ),
    "qwen2.5-7b": _llama_like("qwen2", 28, 28, 4, 3584, 18944, 152064, 131072),
    "qwen3-4b": _llama_like(
        "qwen3", 36, 32, 8, 2560, 9728, 151936, 40960, head_dim=128, tie_word_embeddings=True
    ),
    "smollm2-135m": _llama_like(
        "llama", 30, 9, 3, 576, 1536, 49152, 8192, tie_word_embeddings=True
    ),
}

# %%
for name, facts in KNOWN.items():
    assert from_config(facts).groups == from_config(read(name)).groups
    assert weight_bytes(facts) == weight_bytes(read(name))
print("same as their files:", ", ".join(KNOWN))

# %% [markdown]
# ## Mistakes in circulation
#
# :::{admonition} Check it yourself
# :class: warning
# - 36 layers, 8 KV heads, hidden 2,560, 32 heads, `head_dim` 128: ~~92,160 B~~ 147,456 B a token.
# - 40 layers, 8 KV heads, hidden 5,120, 32 heads, `head_dim` 128: ~~204,800 B~~ 163,840 B a token.
# - DeepSeek-V3: ~~1,748,992 B~~ (the formula for heads) and ~~124,928 B~~ (K and V of rank 512, no
#   rope part); 70,272 B.
# - One token of gpt-oss-120b: ~~36,864 B~~ (sliding layers left out) 73,728 B.
# :::

# %%
for name in ("qwen3-4b", "mistral-nemo-12b", "deepseek-v3", "gpt-oss-120b"):
    print(f"{name:17} {from_config(read(name)).bytes_per_token:,} B")

# %% [markdown]
# ## State card
#
# | | |
# |---|---|
# | `from_config` | dict, file, folder or transformers config -> `ModelKV` |
# | `ModelKV` | frozen: `groups`, `num_layers`, `max_tokens`, `tensor_parallel`, `notes`; sums as `KVSpec` has them |
# | `LayerGroup` | frozen: `spec`, `window`, `policy` |
# | invariant | every layer is counted once, as full, windowed or without K/V; what is not understood is an error |
# | what breaks next | a new attention kind: `layer_kinds` refuses it by name |
#
# ## Real world
#
# - **vLLM** asks the model object itself, layer by layer (`get_kv_cache_spec` in
#   `vllm/v1/worker/gpu_model_runner.py`), groups layers of one kind, and gives every group its own
#   tables over one pool (`vllm/v1/core/kv_cache_utils.py`), the *window* policy.
# - **transformers** builds its caches from `layer_types` (`cache_utils.py`). For MLA it stores full
#   heads, not the latent: its memory is the MHA sum, which is a property of that cache, not of the
#   model.
# - **SGLang** has one pool class for each kind, MLA and sliding-window hybrids among them
#   (`python/sglang/srt/mem_cache/memory_pool.py` and `python/sglang/srt/mem_cache/swa_memory_pool.py`).

# %% [markdown]
# ## Exercises
#
# :::{exercise}
# :label: ex-A3-gemma
# *Compute.* Gemma 3 1B: 26 layers, 1 KV head of size 256, a window of 512 in five layers of every
# six. How many bytes do 32,768 tokens take under each policy, in bf16?
# :::
#
# :::{solution} ex-A3-gemma
# :class: dropdown
# 1,024 B a layer and token. Full: 26 layers × 32,768 tokens = 832 MiB. Window: 4 full layers keep
# 128 MiB, 22 sliding ones 11 MiB, together 139 MiB.
# :::

# %% tags=["hide-input"]
kvs = [from_config(read("gemma-3-1b"), policy=policy) for policy in ("full", "window")]
sizes = [kv.bytes_for(32_768) for kv in kvs]
print(f"full {format_bytes(sizes[0])}; window {format_bytes(sizes[1])}, namely",
      " and ".join(format_bytes(group.bytes_for(32_768)) for group in kvs[1].groups))
print(f"{kvs[0].bytes_per_token // 26:,} B a layer and token")
assert sizes == [832 * 2**20, 139 * 2**20]

# %% [markdown]
# :::{exercise}
# :label: ex-A3-trace
# *Trace.* A sliding layer has $W = 6$, blocks of 4. How many blocks does it keep at 4, 6, 8, 9, 10
# and 14 tokens?
# :::
#
# :::{solution} ex-A3-trace
# :class: dropdown
# 1, 2, 2, 3, 2, 2. At 9 tokens the window is positions 3 to 8 and straddles three blocks; at 10 it
# is 4 to 9, two blocks.
# :::

# %% tags=["hide-input"]
layer = LayerGroup(KVSpec(1, 1, 8), window=6, policy="window")
kept = [layer.blocks_for(n, 4) for n in (4, 6, 8, 9, 10, 14)]
print(kept)
assert kept == [1, 2, 2, 3, 2, 2]

# %% [markdown]
# :::{exercise}
# :label: ex-A3-break
# *Break.* Remove `head_dim` from the facts of Qwen3 4B, then `model_type` as well. What does
# `from_config` say each time, and why?
# :::
#
# :::{solution} ex-A3-break
# :class: dropdown
# Without `head_dim` the class default of Qwen3 holds, 128, and the sum stays. Without the model
# type nobody knows the class, so hidden size / heads = 80 is the documented fallback, and the sum
# is that of a different model.
# :::

# %% tags=["hide-input"]
facts = read("qwen3-4b")
del facts["head_dim"]
first = from_config(facts).groups[0].spec.head_size
del facts["model_type"]
print(first, from_config(facts).groups[0].spec.head_size)
assert (first, from_config(facts).groups[0].spec.head_size) == (128, 80)

# %% [markdown]
# :::{exercise}
# :label: ex-A3-straddle
# *Implement.* A server must not run out while a sequence grows, so it plans for the largest number
# of blocks that a windowed layer ever keeps. Find it for any $W$ and $B$.
# :::
#
# :::{solution} ex-A3-straddle
# :class: dropdown
# $W$ tokens in a row touch at most $\lceil (W - 1)/B \rceil + 1$ blocks: the first may lie at the
# end of a block.
# :::

# %% tags=["hide-input"]
for window in range(1, 40):
    for block_size in (1, 2, 4, 16):
        group = LayerGroup(KVSpec(1, 1, 8), window, "window")
        most = max(group.blocks_for(n, block_size) for n in range(1, 200))
        assert most == -(-(window - 1) // block_size) + 1
print("holds for W = 1..39 and B = 1, 2, 4, 16")

# %% [markdown]
# :::{exercise}
# :label: ex-A3-shared
# *Compute.* What would Gemma 3n E4B take a token if its last 15 layers did not share? How many
# times more is that?
# :::
#
# :::{solution} ex-A3-shared
# :class: dropdown
# 35 layers in place of 20: 1.75 times, 71,680 B in place of 40,960 B.
# :::

# %% tags=["hide-input"]
facts = read("gemma-3n-e4b")
sharing = from_config(facts).bytes_per_token
facts["text_config"]["num_kv_shared_layers"] = 0
alone = from_config(facts).bytes_per_token
print(f"{alone:,} B in place of {sharing:,} B: {alone / sharing:.2f} times")
assert (alone, sharing) == (71_680, 40_960)

# %% [markdown]
# ## Further reading
#
# - The configuration classes of transformers, one file a model {cite}`wolf2020transformers`.
# - GQA {cite}`ainslie2023gqa`, then MLA {cite}`deepseek2024v2`.
