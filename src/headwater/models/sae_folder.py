"""Folders of sae-lens: a sparse autoencoder's `cfg.json` and `sae_weights.safetensors`, read without that package.

With x the activation (standardized where the folder says so), W_enc `d feature` and W_dec `feature d`:

    x̄          = x - b_dec                                 or x, without apply_b_dec_to_input
    standard   f = σ(x̄ W_enc + b_enc)                      Cunningham et al. 2023, Bricken et al. 2023
    gated      f = [x̄ W_enc + b_gate > 0] · σ(x̄ W_enc e^r_mag + b_mag)              Rajamanoharan et al. 2024a
    jumprelu   f = σ(p) · [p > threshold],  p = x̄ W_enc + b_enc                     Rajamanoharan et al. 2024b
    topk       f = the k largest of p, σ of them, others 0                           Gao et al. 2024
    abstopk    f = the k of p that are largest in size, with their signs, others 0   Zhu et al. 2025
    decode     f W_dec + b_dec

σ is the ReLU, or tanh of it, or the k largest, as the folder says. Standardized are `layer_norm` (less the mean, over
the standard deviation + 1e-5; decoded, times the standard deviation) and `constant_norm_rescale` (to the norm √d);
`expected_average_only_in` is a factor that sae-lens folds into the weights when it saves, or keeps beside them in
`activation_scaler.json`. With `rescale_acts_by_decoder_norm`, which only topk and abstopk obey, p is multiplied by the
norms of the rows of W_dec, and f divided by them before it is decoded. A `scaling_factor` of features that is not 1
needs the config's `finetuning_scaling_factor`.

Keys of cfg.json differ by version: `hook_point` and `hook_point_layer` (versions 1 and 2), `hook_name` and `hook_layer`
(3 to 5), `metadata.hook_name` (6). Other architectures (transcoders among them, which write elsewhere than they read)
are refused.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from headwater.calls import checked_call
from headwater.data.rows import check_readable
from headwater.data.strict_json import parse_json
from headwater.errors import InputError, did_you_mean
from headwater.models.dictionaries import Features, Origin, features
from headwater.models.sites import SITES, Site, place_named
from headwater.options import checked_flag, checked_path, shown, whole_numbers
from headwater.runs.identity import digest

CONFIG, WEIGHTS, SCALER = "cfg.json", "sae_weights.safetensors", "activation_scaler.json"
ARCHITECTURES = {
    "standard": ("b_enc",),
    "gated": ("b_gate", "r_mag", "b_mag"),
    "jumprelu": ("b_enc", "threshold"),
    "topk": ("b_enc",),
    "abstopk": ("b_enc",),
}
"""By name: the parameters of one number per feature."""
LARGEST = ("topk", "abstopk")
"""The architectures, and activation functions, that keep a number of features."""
OTHER_NAMES = (
    (r"blocks\.(\d{1,9})\.hook_in", "resid_pre"),
    (r"blocks\.(\d{1,9})\.attn\.hook_out", "attn_out"),
    (r"blocks\.(\d{1,9})\.mlp\.hook_out", "mlp_out"),
    (r"blocks\.(\d{1,9})\.hook_out", "resid_post"),
    (r"(?:model\.layers|model\.decoder\.layers|transformer\.h|gpt_neox\.layers)\.(\d{1,9})", "resid_post"),
)
"""Other names of sites: a bridge's for the same place, and transformers' modules of whole blocks."""
NORMS = ("none", "layer_norm", "constant_norm_rescale", "expected_average_only_in")
EPSILON = 1e-5
"""Added to the standard deviation, as in sae-lens."""


@dataclass(frozen=True, eq=False, repr=False)
class Autoencoder:
    """The weights of a sparse autoencoder, and what is computed with them."""

    architecture: str
    weights: Mapping[str, Tensor]
    activation: str = "relu"
    """`relu`, `tanh-relu`, `topk` or `abstopk`."""
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
        fields = {spec.name: getattr(self, spec.name) for spec in dataclasses.fields(self) if spec.name != "moved"}
        return digest({**fields, "weights": dict(self.weights)})

    def on(self, rows: Tensor) -> Autoencoder:
        """Return it where rows are, in their precision; itself if it is there."""
        encoder, key = self.weights["W_enc"], (rows.device, rows.dtype)
        if (encoder.device, encoder.dtype) == key:
            return self
        if key not in self.moved:
            self.moved[key] = dataclasses.replace(self, weights={name: w.to(rows) for name, w in self.weights.items()})
        return self.moved[key]

    def encode(self, rows: Float[Tensor, "row d"]) -> Float[Tensor, "row feature"]:
        """Return the features of activations."""
        here = self.on(rows)
        w = here.weights
        read = rows - w["b_dec"] if self.centre else rows
        if self.architecture == "gated":
            magnitude = here._activated(read @ (w["W_enc"] * w["r_mag"].exp()) + w["b_mag"])
            return magnitude * (read @ w["W_enc"] + w["b_gate"] > 0)
        before = read @ w["W_enc"] + w["b_enc"]
        before = before * w["W_dec"].norm(dim=-1) if self.rescaled else before
        features = here._activated(before)
        return features * (before > w["threshold"]) if self.architecture == "jumprelu" else features

    def decode(self, features: Float[Tensor, "row feature"]) -> Float[Tensor, "row d"]:
        """Return the activations of features."""
        w = self.on(features).weights
        features = features * w["scaling_factor"] if "scaling_factor" in w else features
        features = features / w["W_dec"].norm(dim=-1) if self.rescaled else features
        return features @ w["W_dec"] + w["b_dec"]

    def standardize(self, rows: Float[Tensor, "row d"]) -> tuple[Tensor, Tensor, Tensor]:
        """Return what is encoded of each row, and the shift and the scale of what is decoded."""
        if self.norm == "layer_norm":
            # Over n - 1, torch's default, as in sae-lens.
            mean, std = rows.mean(-1, keepdim=True), rows.std(-1, keepdim=True)
            return (rows - mean) / (std + EPSILON), mean, std
        scale = rows.norm(dim=-1, keepdim=True) / rows.shape[-1] ** 0.5
        return rows / scale, rows.new_zeros(()), scale

    def _activated(self, before: Tensor) -> Tensor:
        if self.activation not in LARGEST:
            return before.relu().tanh() if self.activation == "tanh-relu" else before.relu()
        size, kept = (before.abs(), before) if self.activation == "abstopk" else (before, before.relu())
        indices = size.topk(self.k or 1, dim=-1).indices
        return torch.zeros_like(before).scatter(-1, indices, kept.gather(-1, indices))


@checked_call
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
    hook, site, layer = _place(config, path)
    coder = _autoencoder(config, _weights(path), path)
    standardize: Callable[..., Any] | None = None if coder.norm == "none" else coder.standardize
    origin = _origin(config, hook, site, path / CONFIG)
    found = features(coder.encode, coder.decode, at=site.name, layer=layer, keep_error=keep_error, name=name)
    return dataclasses.replace(found, standardize=standardize, origin=origin, count=coder.weights["W_enc"].shape[1])


def _config(path: Path) -> dict[str, object]:
    """Return the config, with what version 6 keeps under `metadata` beside the rest."""
    for file in (CONFIG, WEIGHTS):
        if not (path / file).is_file():
            raise InputError(f"{path} holds no {file}: a folder of sae-lens has {CONFIG} and {WEIGHTS}.")
    config = _object(path / CONFIG)
    metadata = config.get("metadata")
    # Entries at the top win: older versions have them there alone.
    config = (metadata if isinstance(metadata, dict) else {}) | config
    if config.get("norm_scaling_factor") is None and (path / SCALER).is_file():
        config["norm_scaling_factor"] = _object(path / SCALER).get("scaling_factor")
    return config


def _object(file: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object."""
    check_readable(file, "the config of an autoencoder")
    try:
        content = parse_json(file.read_bytes())
    except (ValueError, MemoryError) as error:
        raise InputError(f"{file} is not JSON: {error or 'it is larger than the memory'}.") from None
    if not isinstance(content, dict):
        raise InputError(f"{file} must hold an object of names and values; found {shown(content)}.")
    return content


def _flag(config: Mapping[str, object], key: str, default: bool, where: Path) -> bool:
    """Return what is true or false in a config."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise InputError(f"{where} has {key} {shown(value)}; it must be true or false.")
    return default if value is None else value


def _origin(config: Mapping[str, Any], hook: str, site: Site, where: Path) -> Origin:
    """What the config says of the runs that were learned from."""
    options, without = config.get("model_from_pretrained_kwargs") or {}, config.get("exclude_special_tokens")
    span, context = config.get("seqpos_slice") or (None,), config.get("context_size")
    try:
        without = without if isinstance(without, bool | None) else tuple(whole_numbers(without))
        span = tuple(None if end is None else whole_numbers(end)[0] for end in span)
        slice(*span).indices(1)
        if any(end is not None and end < 0 for end in span) and not isinstance(context, int):
            raise ValueError
    except (TypeError, ValueError):
        raise InputError(
            f"{where}: exclude_special_tokens {shown(without)} must be true, false or token ids, and seqpos_slice "
            f"{shown(span)} the numbers of a slice, with context_size where one counts from the end."
        ) from None
    return Origin(
        config["model_name"] if isinstance(config.get("model_name"), str) else None,
        hook,
        None if config.get("prepend_bos") is None else _flag(config, "prepend_bos", True, where),
        isinstance(options, dict) and options.get("center_writing_weights") is True and site.axes[-1] == "d_model",
        without or False,
        span,
        context if isinstance(context, int) else 0,
    )


def _weights(path: Path) -> dict[str, Tensor]:
    try:
        weights = load_file(path / WEIGHTS)
        weights = {
            name: tensor.float() if tensor.dtype != torch.float64 else tensor for name, tensor in weights.items()
        }
    except (SafetensorError, OSError, RuntimeError, MemoryError) as error:
        raise InputError(f"{path / WEIGHTS} cannot be read: {error}.") from None
    if "log_threshold" in weights and "threshold" not in weights:
        weights["threshold"] = weights["log_threshold"].exp()
    return weights


def _place(config: Mapping[str, object], path: Path) -> tuple[str, Site, int]:
    """The hook, and the site and layer, whose activation was learned from."""
    hook = config.get("hook_name", config.get("hook_point"))
    if not isinstance(hook, str):
        raise InputError(f"{path / CONFIG} names no hook_name: what the autoencoder reads is not known.")
    if config.get("hook_head_index", config.get("hook_point_head_index")) is not None:
        raise InputError(f"{path / CONFIG} is of a single head of {hook}; only whole activations can be read.")
    place_found = place_named(hook)
    for pattern, site in OTHER_NAMES:
        place_found = (SITES[site], int(other[1])) if (other := re.fullmatch(pattern, hook)) else place_found
    if place_found is None or place_found[0].axes[0] != "position":
        known = ", ".join(site.hook for site in SITES.values() if site.axes[0] == "position")
        raise InputError(f"{path / CONFIG} reads {hook!r}, which is not a site here; these are: {known}.")
    return hook, *place_found


def _autoencoder(config: Mapping[str, object], tensors: Mapping[str, Tensor], path: Path) -> Autoencoder:
    architecture, where = config.get("architecture", "standard"), path / CONFIG
    if "transcoder" in str(architecture) or config.get("hook_name_out") not in (None, config.get("hook_name")):
        raise InputError(
            f"{where} is of a transcoder, which writes elsewhere than it reads; only autoencoders are read."
        )
    if "batchtopk" in str(architecture):
        raise InputError(
            f"{where} has architecture {shown(architecture)}, which is that of training: the threshold that it learned "
            "is not in the weights. Save it with sae-lens for inference, which makes a jumprelu autoencoder of it."
        )
    if architecture not in ARCHITECTURES:
        raise InputError(
            f"{where} has architecture {shown(architecture)}; known are {', '.join(ARCHITECTURES)}."
            f"{did_you_mean(architecture, ARCHITECTURES)}"
        )
    norm = config.get("normalize_activations") or "none"
    norm = {True: NORMS[3], False: "none"}.get(norm, norm) if isinstance(norm, bool) else norm
    if norm not in NORMS:
        raise InputError(f"{where} has normalize_activations {shown(norm)}; known are {', '.join(NORMS)}.")
    activation, k = _activation(config, architecture, where)
    weights = _checked(config, architecture, tensors, path)
    if norm == "expected_average_only_in":
        weights, norm = _folded(config, weights, where), "none"
    if k is not None and k > weights["W_enc"].shape[1]:
        raise InputError(f"{where} asks for the {k} largest of {weights['W_enc'].shape[1]} features.")
    centre = _flag(config, "apply_b_dec_to_input", True, where)
    rescaled = activation in LARGEST and _flag(config, "rescale_acts_by_decoder_norm", False, where)
    return Autoencoder(architecture, weights, activation, k, centre, rescaled, norm)


def _activation(config: Mapping[str, object], architecture: str, where: Path) -> tuple[str, int | None]:
    """The activation function, and of how many features the largest are kept."""
    named = config.get("activation_fn_str", config.get("activation_fn"))
    activation = architecture if architecture in LARGEST else named or "relu"
    if activation not in ("relu", "tanh-relu", *LARGEST):
        raise InputError(f"{where} has activation_fn_str {shown(activation)}; known are relu, tanh-relu, topk.")
    if activation not in LARGEST:
        return activation, None
    options = config.get("activation_fn_kwargs") or {}
    k = config.get("k", options.get("k") if isinstance(options, dict) else None)
    if not isinstance(k, int) or isinstance(k, bool) or k < 1:
        raise InputError(f"{where} does not say how many features are kept: no k in {shown(options)}.")
    return activation, k


def _checked(
    config: Mapping[str, Any], architecture: str, tensors: Mapping[str, Tensor], path: Path
) -> dict[str, Tensor]:
    """Return the weights that an architecture has, each of its size."""
    encoder = tensors.get("W_enc")
    if encoder is None or encoder.ndim != 2:
        raise InputError(f"{path / WEIGHTS} has no matrix W_enc; it holds {', '.join(sorted(tensors)) or 'nothing'}.")
    d, n = encoder.shape
    sizes: dict[str, tuple[int, ...]] = {"W_enc": (d, n), "W_dec": (n, d), "b_dec": (d,)}
    sizes |= dict.fromkeys(ARCHITECTURES[architecture], (n,))
    scales = tensors.get("scaling_factor")
    if scales is not None and not torch.allclose(scales, torch.ones_like(scales)):
        if not _flag(config, "finetuning_scaling_factor", False, path / CONFIG):
            raise InputError(
                f"{path / WEIGHTS} has a scaling_factor that is not 1, and {CONFIG} does not say "
                "finetuning_scaling_factor: whether to multiply by it is not known. Write true there, or leave it out."
            )
        sizes["scaling_factor"] = (n,)
    for name, size in sizes.items():
        if name not in tensors:
            raise InputError(f"{path / WEIGHTS} has no {name}, which a {architecture} autoencoder needs.")
        if tuple(tensors[name].shape) != size:
            raise InputError(f"{path / WEIGHTS}: {name} is {tuple(tensors[name].shape)}, where W_enc makes it {size}.")
        if not bool(tensors[name].isfinite().all()):
            raise InputError(f"{path / WEIGHTS}: {name} holds NaN or infinity.")
    for key, size_found in (("d_in", d), ("d_sae", n)):
        if config.get(key, size_found) != size_found:
            raise InputError(f"{path / CONFIG} says {key}={shown(config[key])}, but W_enc is {d} by {n}.")
    return {name: tensors[name] for name in sizes}


def _folded(config: Mapping[str, object], weights: Mapping[str, Tensor], where: Path) -> dict[str, Tensor]:
    """Fold the factor that activations are multiplied with before they are read into the weights."""
    factor = config.get("norm_scaling_factor")
    if not isinstance(factor, int | float) or isinstance(factor, bool) or not factor > 0:
        raise InputError(
            f"{where} has normalize_activations 'expected_average_only_in' and no norm_scaling_factor, and there is no "
            f"{SCALER} with a scaling_factor: what to multiply activations with is not known. Write it in one of them, "
            "or fold it with sae-lens and save again."
        )
    # x · factor is what W_enc reads, and what is decoded is divided by it; b_enc comes after the product and stays.
    folded = {
        "W_enc": weights["W_enc"] * factor,
        "W_dec": weights["W_dec"] / factor,
        "b_dec": weights["b_dec"] / factor,
    }
    return dict(weights) | folded
