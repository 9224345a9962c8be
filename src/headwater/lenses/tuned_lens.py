"""Tuned lenses as the tuned-lens package keeps them (Belrose et al. 2023): a folder with config.json and params.pt.

The file holds a translator (`0.weight`, `0.bias`, `1.weight`, ...) for each of the model's blocks, and translator i
reads what goes *into* block i: h + A_i h + b_i. So translator i + 1 is that of the residual stream behind block i,
where headwater reads layer i; translator 0 reads the embedding, which is no layer here, and the last layer needs none.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from headwater.calls import checked_call
from headwater.data.strict_json import parse_json
from headwater.errors import InputError
from headwater.models.weights.checkpoint import first_line
from headwater.options import checked_path

CONFIG, PARAMETERS = "config.json", "params.pt"
ENTRY = re.compile(r"(?:layer_translators\.)?(\d+)\.(weight|bias)")


@checked_call
def load_tuned_lens(folder: str | Path) -> dict[int, tuple[Tensor, Tensor]]:
    """Read a tuned lens from its folder.

    Args:
        folder: what `TunedLens.save` wrote, or the folder of a published lens. Tensors are read, never code.

    Returns:
        By layer (A, b) in float32: what `lens=` takes. A lens of L blocks has those of layers 0 to L - 2.

    Raises:
        InputError: the folder holds no tuned lens, or a damaged one.
    """
    path = checked_path("lens", folder)
    if not (path / PARAMETERS).is_file():
        raise InputError(
            f"lens={str(folder)!r} is neither 'logit' nor the folder of a tuned lens, which holds {CONFIG} and "
            f"{PARAMETERS}."
        )
    try:
        config = parse_json((path / CONFIG).read_bytes())
        d_model, n_layers = int(config["d_model"]), int(config["num_hidden_layers"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise InputError(
            f"The tuned lens in {path} has no {CONFIG} that gives its d_model and num_hidden_layers."
        ) from None
    found = _parameters(path / PARAMETERS)
    lens = {}
    for layer in range(n_layers - 1):
        A = found.get((layer + 1, "weight"), torch.empty(0))
        b = found.get((layer + 1, "bias"), torch.zeros(d_model))
        if A.shape != (d_model, d_model) or b.shape != (d_model,):
            raise InputError(
                f"The tuned lens in {path} is damaged: translator {layer + 1} of {n_layers} is missing or not of width "
                f"{d_model}."
            )
        lens[layer] = (A.float(), b.float())
    return lens


def _parameters(file: Path) -> dict[tuple[int, str], Tensor]:
    """Return the tensors of the translators, by number and name."""
    try:
        state = torch.load(file, "cpu", weights_only=True)
    except Exception as error:  # a damaged pickle leads torch to errors of every kind
        raise InputError(
            f"The tuned lens file {file} is damaged or holds more than tensors ({first_line(error)[:120]})."
        ) from None
    entries = state.items() if isinstance(state, dict) else ()
    matched = [(ENTRY.fullmatch(str(name)), tensor) for name, tensor in entries if isinstance(tensor, Tensor)]
    return {(int(match[1]), match[2]): tensor for match, tensor in matched if match}
