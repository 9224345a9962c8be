"""The model of a recipe as a checkpoint folder: built, saved in float16 with its manifest, and found again."""

import dataclasses
import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from tools.world.initial import set_initial
from tools.world.recipe import Recipe, recipe_of_values
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from headwater.errors import ModelError, RunFolderError
from headwater.models.packaged import MANIFEST
from headwater.planted.circuits import BOS_ID, PAD_ID
from headwater.runs.storage import read_json, write_json


def build_model(recipe: Recipe, d_vocab: int) -> LlamaForCausalLM:
    """Make the untrained model."""
    torch.manual_seed(recipe.seed)
    config = LlamaConfig(
        vocab_size=d_vocab,
        hidden_size=recipe.width,
        intermediate_size=recipe.d_mlp,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.d_head,
        max_position_embeddings=recipe.context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=recipe.tied,
        initializer_range=0.05,
        bos_token_id=BOS_ID,
        eos_token_id=BOS_ID,
        pad_token_id=PAD_ID,
    )
    model = LlamaForCausalLM(config)
    set_initial(model, recipe)
    return model


def keep(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, recipe: Recipe, out: Path) -> None:
    """Write the checkpoint folder of a step whole, or not at all, in place of one that is there.

    Raises:
        RunFolderError: it cannot be written, for example because the disk is full.
    """
    beside = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        save(model, tokenizer, recipe, beside)
        shutil.rmtree(out, ignore_errors=True)
        beside.replace(out)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, recipe: Recipe, out: Path) -> None:
    """Write the checkpoint folder, weights in float16, and the manifest that says whether it is whole.

    Raises:
        RunFolderError: it cannot be written, for example because the disk is full.
    """
    try:
        _write_folder(model, tokenizer, recipe, out)
    except (OSError, SafetensorError) as error:
        raise RunFolderError(
            f"{out} cannot be written: {error}. Make room, and run the same command again; what is finished is kept."
        ) from error


def _write_folder(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, recipe: Recipe, out: Path) -> None:
    halves = {name: weight.detach().half() for name, weight in model.state_dict().items()}
    if recipe.tied:
        del halves["lm_head.weight"]  # it is the embedding
    model.save_pretrained(out, state_dict=halves)
    config = read_json(out / "config.json")
    write_json(out / "config.json", config | {"dtype": "float32"})
    tokenizer.save_pretrained(out)
    weights = out / "model.safetensors"
    about = {"bytes": weights.stat().st_size, "sha256": hashlib.sha256(weights.read_bytes()).hexdigest()}
    write_json(out / MANIFEST, {"recipe": dataclasses.asdict(recipe), **about})


def opened(folder: Path) -> tuple[Any, PreTrainedTokenizerBase]:
    """Return the model of a trained checkpoint folder, in float32, and its tokenizer.

    Raises:
        ModelError: no training wrote this folder.
    """
    recipe_of(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def recipe_of(folder: Path) -> Recipe:
    """Return the recipe that a trained checkpoint folder was made by.

    Raises:
        ModelError: no training wrote this folder.
    """
    try:
        values = read_json(folder / MANIFEST)["recipe"]
    except (KeyError, TypeError, RunFolderError):
        raise ModelError(f"{folder} has no {MANIFEST} with a recipe: give a folder that a training wrote.") from None
    return recipe_of_values(values, f"{folder / MANIFEST}")


def kept_checkpoints(folder: Path) -> Iterator[tuple[int, Path]]:
    """Return the models kept along a training (`checkpoints=`), with their steps, earliest first."""
    for path in sorted((folder / "steps").glob("[0-9]*")):
        yield int(path.name), path
