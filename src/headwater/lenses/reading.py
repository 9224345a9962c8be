"""How a layer's residual stream is read as a prediction: through which lens, and at which layers.

    logit lens       the residual stream h as it is (nostalgebraist 2020)
    tuned lens       h + A h + b, with the (A, b) of that layer (Belrose et al. 2023); from a folder, or given by layer
    any function     of h and the layer

What a lens gives goes through the model's final norm and its unembedding.

Tuned lenses as the tuned-lens package keeps them (Belrose et al. 2023): a folder with config.json and params.pt.

The file holds a translator (`0.weight`, `0.bias`, `1.weight`, ...) for each of the model's blocks, and translator i
reads what goes *into* block i: h + A_i h + b_i. So translator i + 1 is that of the residual stream after block i, where
headwater reads layer i; translator 0 reads the embedding, which is not a layer here, and the last layer needs none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from headwater.calls import checked_call
from headwater.data.strict_json import parse_json
from headwater.errors import InputError
from headwater.models.memory import failures_named
from headwater.models.weights.checkpoint import first_line
from headwater.options import checked_path, resolve_indices, shown
from headwater.runs.identity import digest

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


Lens: TypeAlias = str | Path | Callable[[Tensor, int], Tensor] | Mapping[int, tuple[Tensor, Tensor]]
"""The logit lens ("logit"); a folder that the tuned-lens package wrote; a function of the residual stream `token
d_model` (float32) and the layer, which gives what the final norm is to read; or each layer's (A, b) of a tuned lens,
which adds A h + b to the residual stream h."""
Layers: TypeAlias = str | int | Sequence[int]
"""The final layer, all of them ("all"), one or several."""


def chosen_layers(layers: Layers, n_layers: int) -> tuple[int, ...]:
    """Return the layers requested, in order."""
    if isinstance(layers, str):
        if layers not in ("final", "all"):
            raise InputError(f"layers={layers!r} is neither 'final' nor 'all', nor a layer, nor several.")
        return (n_layers - 1,) if layers == "final" else tuple(range(n_layers))
    return resolve_indices(layers, n_layers, "layer")


def opened_lens(lens: Lens, n_layers: int) -> Lens:
    """Return a lens, read from its folder where it is given as one."""
    if not isinstance(lens, Path) and (not isinstance(lens, str) or lens == "logit"):
        return lens
    found = load_tuned_lens(lens)
    if len(found) != n_layers - 1:
        raise InputError(
            f"The tuned lens in {lens} is of a model of {len(found) + 1} layers; this one has {n_layers} layers."
        )
    return found


def reader(lens: Lens, layers: Sequence[int], n_layers: int) -> Callable[[Tensor, int], Tensor]:
    """Return what takes a layer's residual stream, in the model's dtype, to what the final norm reads."""
    if isinstance(lens, Mapping):
        _check_translators(lens)
        missing = [layer for layer in layers if layer not in lens and layer != n_layers - 1]
        if missing:
            raise InputError(f"The tuned lens has no translator for layer {missing[0]}; it has {sorted(lens)}.")

        def translate(residual: Float[Tensor, "token d_model"], layer: int) -> Tensor:
            # The last layer, which needs no translator; any other is refused before.
            if layer not in lens:
                return residual
            wide = residual.float()
            A, b = (part.to(wide) for part in lens[layer])
            if A.shape != (residual.shape[1],) * 2 or b.shape != A.shape[:1]:
                raise InputError(
                    f"The tuned lens of layer {layer} has shapes {tuple(A.shape)} and {tuple(b.shape)}; the model "
                    f"needs ({residual.shape[1]}, {residual.shape[1]}) and ({residual.shape[1]},)."
                )
            return wide + wide @ A.T + b

        return translate
    if callable(lens):
        return partial(_called, lens)
    if not isinstance(lens, str) or lens != "logit":
        raise InputError(
            f"lens={shown(lens)} is neither 'logit', nor the folder of a tuned lens, nor a function, nor a mapping of "
            "layers to (A, b)."
        )
    return lambda residual, layer: residual


def _check_translators(lens: Mapping[Any, Any]) -> None:
    """Refuse a mapping that is not a tuned lens."""
    for layer, given in lens.items():
        if isinstance(layer, bool) or not isinstance(layer, Integral):
            raise InputError(f"A tuned lens has a translator for each layer, a whole number; found {shown(layer)}.")
        if not (isinstance(given, list | tuple) and [isinstance(part, Tensor) for part in given] == [True, True]):
            raise InputError(f"The translator of layer {layer} must be a pair of tensors (A, b), found {shown(given)}.")


def _called(lens: Callable[[Tensor, int], Tensor], residual: Tensor, layer: int) -> Tensor:
    with failures_named("The lens"):
        found = lens(residual.float(), layer)
    if not isinstance(found, Tensor) or found.shape != residual.shape:
        what = tuple(found.shape) if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise InputError(
            f"The lens must give a tensor of shape {tuple(residual.shape)} at layer {layer}, found {what}."
        )
    return found


def lens_named(lens: Lens) -> Any:
    """Return what represents a lens in the record of a run: a mapping is named by the hash of its numbers."""
    if not isinstance(lens, Mapping):
        return lens
    _check_translators(lens)
    return f"tuned lens {digest([(layer, [part.double() for part in lens[layer]]) for layer in sorted(lens)])}"
