"""The model that a suite runs: GPT-2's 124M shape with random weights, or the pretrained one that `--model` names."""

from pathlib import Path

import torch
import transformers
from torch import Tensor

import headwater as hw
from headwater.models.hooked import HookedModel

RANDOM = "GPT-2 124M shape"
Chosen = HookedModel | str | None
"""A model, what `--model` names, or None: random weights."""


def random_gpt2(device: str, **sizes: int) -> HookedModel:
    """Return a model of GPT-2's shape (124M parameters unless sizes say otherwise) with random weights."""
    config = transformers.GPT2Config(**sizes)
    torch.manual_seed(0)
    return hw.load(transformers.AutoModelForCausalLM.from_config(config).eval(), device=device)


def chosen_model(chosen: Chosen, device: str) -> HookedModel:
    """Return the model itself, in float32 where it is named; its weights may take part in gradients."""
    if isinstance(chosen, HookedModel):
        return chosen
    with torch.inference_mode(False):
        return random_gpt2(device) if chosen is None else hw.load(chosen, device=device, dtype="float32")


def titled(chosen: Chosen) -> str:
    """Return what a row calls the model."""
    return Path(chosen).stem if isinstance(chosen, str) else RANDOM


def weights_note(chosen: Chosen) -> str:
    """Return what a row says of the weights."""
    return "pretrained weights, random tokens" if isinstance(chosen, str) else "random weights"


def are_equal(chosen: Chosen, found: Tensor, expected: Tensor) -> bool:
    """Whether activations are equal to 1e-4; of a pretrained model, where some reach 25,000, to 2e-4 of the largest.

    There float32 itself, with other padding, is up to 8e-5 of the largest away from float64 (NOTES.md).
    """
    return bool((found - expected).abs().max() < (2e-4 * expected.abs().max() if isinstance(chosen, str) else 1e-4))


def block_weights(model: HookedModel) -> int:
    """Return how many weights the matrices of all blocks have, biases and norms left out."""
    shape = model.shape
    attention = shape.d_model * shape.d_head * 2 * (shape.n_heads + shape.n_kv_heads)
    gated = 3 if getattr(model.raw.cfg, "gated_mlp", False) else 2
    return shape.n_layers * (attention + gated * shape.d_model * shape.d_mlp)
