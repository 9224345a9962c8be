"""Folders of sae-lens: a sparse autoencoder's `cfg.json` and `sae_weights.safetensors`, read without that package.

With x the activation (standardized where the folder says so), W_enc `d feature` and W_dec `feature d`:

    x̄          = x - b_dec                                 or x, without apply_b_dec_to_input
    standard   f = σ(x̄ W_enc + b_enc)                      Cunningham et al. 2023, Bricken et al. 2023
    gated      f = [x̄ W_enc + b_gate > 0] · σ(x̄ W_enc e^r_mag + b_mag)              Rajamanoharan et al. 2024a
    jumprelu   f = σ(p) · [p > threshold],  p = x̄ W_enc + b_enc                     Rajamanoharan et al. 2024b
    topk       f = the k largest of p, σ of them, others 0                           Gao et al. 2024
    decode     f W_dec + b_dec

σ is the ReLU, or tanh of it, or the k largest, as the folder says. Standardized are `layer_norm` (less the mean, over
the standard deviation) and `constant_norm_rescale` (to the norm √d); `expected_average_only_in` is a factor that
sae-lens folds into the weights when it saves.

Keys of cfg.json differ by version: `hook_point` and `hook_point_layer` (versions 1 and 2), `hook_name` and `hook_layer`
(3 to 5), `metadata.hook_name` (6). Other architectures (transcoders among them, which write elsewhere than they read)
are refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from headwater.data.rows import check_readable
from headwater.data.strict_json import parse_json
from headwater.errors import InputError, did_you_mean
from headwater.models.dictionaries.features import Features, place
from headwater.models.sites import SITES, place_named
from headwater.options import checked_flag, checked_path, shown
from headwater.runs.identity import digest

CONFIG, WEIGHTS = "cfg.json", "sae_weights.safetensors"
ARCHITECTURES = {
    "standard": ("b_enc",),
    "gated": ("b_gate", "r_mag", "b_mag"),
    "jumprelu": ("b_enc", "threshold"),
    "topk": ("b_enc",),
}
"""By name: the parameters of one number per feature."""
NORMS = ("none", "layer_norm", "constant_norm_rescale", "expected_average_only_in")
EPSILON = 1e-5
"""Added to the standard deviation, as in sae-lens."""


@dataclass(frozen=True, eq=False, repr=False)
class Autoencoder:
    """The weights of a sparse autoencoder, and what is computed with them."""

    architecture: str
    weights: Mapping[str, Tensor]
    activation: str = "relu"
    """`relu`, `tanh-relu` or `topk`."""
    k: int | None = None
    centre: bool = True
    """Whether `b_dec` is taken from what is read."""
    rescaled: bool = False
    """Whether features are scaled by the norms of their directions."""
    norm: str = "none"
    moved: dict[tuple[torch.device, torch.dtype], Autoencoder] = field(default_factory=dict)
    """The same elsewhere, or in another precision."""

    def digest(self) -> str:
        """Name it by its weights and what is done with them."""
        held = {spec.name: getattr(self, spec.name) for spec in dataclasses.fields(self) if spec.name != "moved"}
        return digest({**held, "weights": dict(self.weights)})

    def on(self, rows: Tensor) -> Autoencoder:
        """Return it where rows are, in their precision; itself if it is there."""
        one, key = self.weights["W_enc"], (rows.device, rows.dtype)
        if (one.device, one.dtype) == key:
            return self
        if key not in self.moved:
            self.moved[key] = dataclasses.replace(self, weights={name: w.to(rows) for name, w in self.weights.items()})
        return self.moved[key]

    def encode(self, rows: Float[Tensor, "row d"]) -> Float[Tensor, "row feature"]:
        """Return the features of activations."""
        own = self.on(rows)
        w = own.weights
        read = rows - w["b_dec"] if self.centre else rows
        if self.architecture == "gated":
            magnitude = own._activated(read @ (w["W_enc"] * w["r_mag"].exp()) + w["b_mag"])
            return magnitude * (read @ w["W_enc"] + w["b_gate"] > 0)
        before = read @ w["W_enc"] + w["b_enc"]
        before = before * w["W_dec"].norm(dim=-1) if self.rescaled else before
        found = own._activated(before)
        return found * (before > w["threshold"]) if self.architecture == "jumprelu" else found

    def decode(self, features: Float[Tensor, "row feature"]) -> Float[Tensor, "row d"]:
        """Return the activations of features."""
        w = self.on(features).weights
        features = features * w["scaling_factor"] if "scaling_factor" in w else features
        features = features / w["W_dec"].norm(dim=-1) if self.rescaled else features
        return features @ w["W_dec"] + w["b_dec"]

    def standardize(self, rows: Float[Tensor, "row d"]) -> tuple[Tensor, Tensor]:
        """Return the shift and the scale of each row."""
        if self.norm == "layer_norm":
            return rows.mean(-1, keepdim=True), rows.std(-1, keepdim=True) + EPSILON
        return rows.new_zeros(()), rows.norm(dim=-1, keepdim=True) / rows.shape[-1] ** 0.5

    def _activated(self, before: Tensor) -> Tensor:
        if self.activation != "topk":
            return before.relu().tanh() if self.activation == "tanh-relu" else before.relu()
        largest = before.topk(self.k or 1, dim=-1)
        return torch.zeros_like(before).scatter(-1, largest.indices, largest.values.relu())


def load_sae(folder: str | Path, *, keep_error: bool = True, name: str | None = None) -> Features:
    """Read a sparse autoencoder from a folder of sae-lens, as a site.

    Args:
        folder: holds `cfg.json` and `sae_weights.safetensors`.
        keep_error: see `hw.features`.
        name: see `hw.features`.

    Returns:
        Its features as a site, see `hw.features`.

    Raises:
        InputError: a file is missing or damaged, the architecture or its place is not known, or weights do not fit.
    """
    path, keep_error = checked_path("folder", folder), checked_flag("keep_error", keep_error)
    config = _config(path)
    site, layer = _place(config, path)
    coder = _autoencoder(config, _weights(path), path)
    standardize: Callable[..., Any] | None = None if coder.norm == "none" else coder.standardize
    found = place(coder.encode, coder.decode, site, layer, keep_error, name, standardize=standardize)
    return dataclasses.replace(found, count=coder.weights["W_enc"].shape[1])


def _config(path: Path) -> dict[str, object]:
    """Return the config, with what version 6 keeps under `metadata` beside the rest."""
    for file in (CONFIG, WEIGHTS):
        if not (path / file).is_file():
            raise InputError(f"{path} holds no {file}: a folder of sae-lens has {CONFIG} and {WEIGHTS}.")
    check_readable(path / CONFIG, "the config of an autoencoder")
    try:
        config = parse_json((path / CONFIG).read_bytes())
    except ValueError as error:
        raise InputError(f"{path / CONFIG} is no JSON: {error}.") from None
    if not isinstance(config, dict):
        raise InputError(f"{path / CONFIG} must hold an object of names and values; found {shown(config)}.")
    metadata = config.get("metadata")
    return (metadata if isinstance(metadata, dict) else {}) | config


def _weights(path: Path) -> dict[str, Tensor]:
    try:
        held = load_file(path / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path / WEIGHTS} cannot be read: {error}.") from None
    held = {name: tensor.float() if tensor.dtype != torch.float64 else tensor for name, tensor in held.items()}
    if "log_threshold" in held and "threshold" not in held:
        held["threshold"] = held["log_threshold"].exp()
    return held


def _place(config: Mapping[str, object], path: Path) -> tuple[str, int]:
    """The site and layer whose activation was learnt on."""
    hook = config.get("hook_name", config.get("hook_point"))
    if not isinstance(hook, str):
        raise InputError(f"{path / CONFIG} names no hook_name: what the autoencoder reads is not known.")
    if config.get("hook_head_index", config.get("hook_point_head_index")) is not None:
        raise InputError(f"{path / CONFIG} is of a single head of {hook}; only whole activations can be read.")
    found = place_named(hook)
    if found is None or found[0].axes[0] != "position":
        known = ", ".join(site.hook for site in SITES.values() if site.axes[0] == "position")
        raise InputError(f"{path / CONFIG} reads {hook!r}, which is no site here; these are: {known}.")
    return found[0].name, found[1]


def _autoencoder(config: Mapping[str, object], held: Mapping[str, Tensor], path: Path) -> Autoencoder:
    architecture, where = config.get("architecture", "standard"), path / CONFIG
    if architecture not in ARCHITECTURES:
        raise InputError(
            f"{where} has architecture {shown(architecture)}; known are {', '.join(ARCHITECTURES)}."
            f"{did_you_mean(str(architecture), ARCHITECTURES)}"
        )
    norm = config.get("normalize_activations") or "none"
    norm = {True: NORMS[3], False: "none"}.get(norm, norm) if isinstance(norm, bool) else norm
    if norm not in NORMS:
        raise InputError(f"{where} has normalize_activations {shown(norm)}; known are {', '.join(NORMS)}.")
    activation, k = _activation(config, architecture, where)
    weights = _checked(config, architecture, held, path)
    if norm == "expected_average_only_in":
        weights, norm = _folded(config, weights, where), "none"
    if k is not None and k > weights["W_enc"].shape[1]:
        raise InputError(f"{where} asks for the {k} largest of {weights['W_enc'].shape[1]} features.")
    centre, rescaled = config.get("apply_b_dec_to_input", True), config.get("rescale_acts_by_decoder_norm", False)
    return Autoencoder(architecture, weights, activation, k, bool(centre), bool(rescaled), norm)


def _activation(config: Mapping[str, object], architecture: str, where: Path) -> tuple[str, int | None]:
    """The activation function, and of how many features the largest are kept."""
    given = config.get("activation_fn_str", config.get("activation_fn"))
    activation = "topk" if architecture == "topk" else given or "relu"
    if activation not in ("relu", "tanh-relu", "topk"):
        raise InputError(f"{where} has activation_fn_str {shown(activation)}; known are relu, tanh-relu, topk.")
    if activation != "topk":
        return activation, None
    options = config.get("activation_fn_kwargs") or {}
    k = config.get("k", options.get("k") if isinstance(options, dict) else None)
    if not isinstance(k, int) or isinstance(k, bool) or k < 1:
        raise InputError(f"{where} does not say how many features are kept: no k in {shown(options)}.")
    return activation, k


def _checked(config: Mapping[str, Any], architecture: str, held: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Return the weights that an architecture has, each of its size."""
    encoder = held.get("W_enc")
    if encoder is None or encoder.ndim != 2:
        raise InputError(f"{path / WEIGHTS} has no matrix W_enc; it holds {', '.join(sorted(held)) or 'nothing'}.")
    d, n = encoder.shape
    sizes: dict[str, tuple[int, ...]] = {"W_enc": (d, n), "W_dec": (n, d), "b_dec": (d,)}
    sizes |= dict.fromkeys(ARCHITECTURES[architecture], (n,))
    if config.get("finetuning_scaling_factor") or (config.get("noise_scaling") and "scaling_factor" in held):
        sizes["scaling_factor"] = (n,)
    for name, size in sizes.items():
        if name not in held:
            raise InputError(f"{path / WEIGHTS} has no {name}, which a {architecture} autoencoder needs.")
        if tuple(held[name].shape) != size:
            raise InputError(f"{path / WEIGHTS}: {name} is {tuple(held[name].shape)}, where W_enc makes it {size}.")
        if not bool(held[name].isfinite().all()):
            raise InputError(f"{path / WEIGHTS}: {name} holds NaN or infinity.")
    for key, found in (("d_in", d), ("d_sae", n)):
        if config.get(key, found) != found:
            raise InputError(f"{path / CONFIG} says {key}={shown(config[key])}, but W_enc is {d} by {n}.")
    return {name: held[name] for name in sizes}


def _folded(config: Mapping[str, object], weights: Mapping[str, Tensor], where: Path) -> dict[str, Tensor]:
    """Fold the factor that activations are multiplied with before they are read into the weights."""
    factor = config.get("norm_scaling_factor")
    if not isinstance(factor, int | float) or isinstance(factor, bool) or not factor > 0:
        raise InputError(
            f"{where} has normalize_activations 'expected_average_only_in' and no norm_scaling_factor: what to "
            "multiply activations with is not known. Write it there, or fold it with sae-lens and save again."
        )
    folded = {
        "W_enc": weights["W_enc"] * factor,
        "W_dec": weights["W_dec"] / factor,
        "b_dec": weights["b_dec"] / factor,
    }
    return dict(weights) | folded
