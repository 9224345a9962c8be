"""Features as a site: an activation encoded by a dictionary (such as a sparse autoencoder), edited, and decoded again.

For the activation a of a token at some site of one layer, with its heads (if any) concatenated:

    features   f = encode(a)
    error      e = a - decode(f)               the part of a that the dictionary does not explain
    written    a' = decode(f') + e             features f' in place of f, the error kept (Marks et al. 2024)
               a' = decode(f')                 with keep_error=False: the error is lost too

An edit of some features at some tokens changes only these features there. The other features are those of the edited
run, after the edits of earlier layers. Where no feature is edited, the activation stays bitwise unchanged.

A dictionary may standardize its input (a norm, a mean): the encoder reads the standardized n, the decoder returns n',
and `decode` returns shift + scale · n'. `Origin` holds what a folder says about the training runs of its dictionary.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from safetensors.torch import load_file
from torch import Tensor

from headwater.calls import checked_call
from headwater.data.strict_json import parse_json
from headwater.errors import InputError, did_you_mean, one_line
from headwater.kernels.devices import failures_named
from headwater.models.bridge_check import is_finite
from headwater.models.checkpoint import hub_name
from headwater.models.sites import SITES, Site, place_named
from headwater.options import checked_count, checked_layer, checked_path, shown, whole_numbers
from headwater.runs.identity import digest

if TYPE_CHECKING:
    from headwater.models.families import ModelShape
    from headwater.models.model import Model


Coder = Callable[[Tensor], Tensor]
"""Maps rows to rows: activations `row d` and features `row feature`."""
ALIKE = 1e-3
"""Allowed relative difference between the result for a row alone and for the same row next to another."""
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id")
"""The special tokens of a tokenizer that sae-lens leaves out of training."""


@dataclass(frozen=True)
class Origin:
    """What is known about the runs on which a dictionary was trained."""

    model: str | None = None
    hook: str | None = None
    """The activation that was read, under the folder's name for it."""
    begins: bool | None = None
    """Whether texts began with a BOS token."""
    centred: bool = False
    """Whether activations had mean 0, as in a HookedTransformer with centred writing weights."""
    without: bool | tuple[int, ...] = False
    """Whether special tokens were left out; or the tokens that were."""
    span: tuple[int | None, ...] = (None,)
    """The positions that were kept, as arguments of a slice."""
    context: int = 0
    """The length of the texts; negative numbers in `span` count from its end."""

    def differences(self, model: Model) -> list[str]:
        """Return sentences on how a model differs from the training runs, and on tokens and positions left out."""
        ids = (model.name, *filter(None, (getattr(model.config, "_name_or_path", None),)))
        differences = []
        if self.model and _bare(self.model) not in map(_bare, ids):
            differences.append(f"it was trained on {self.model!r}, but this model is {model.name!r}")
        if self.begins is not None and self.begins != bool(model.bos):
            began, here = ("began", "do not") if self.begins else ("did not begin", "do")
            differences.append(f"its texts {began} with a BOS token, but here they {here}")
        if self.without:
            which = f"the tokens {list(self.without)}" if isinstance(self.without, tuple) else "special tokens"
            differences.append(f"it was not trained on {which}, which are left out here")
        if self.span != (None,):
            differences.append(f"it was trained on positions {shown(list(self.span))} only; others are left out here")
        return differences


@dataclass(frozen=True, eq=False, repr=False)
class Features(Site):
    """A dictionary at a site of one layer, which is itself a site; returned by `hw.features` and `hw.load_sae`."""

    encoder: Coder = lambda rows: rows
    decoder: Coder = lambda rows: rows
    standardize: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]] | None = None
    """Maps activations `row d` to the encoder's input, and to the shift and scale of the decoder's output."""
    origin: Origin = Origin()
    special: frozenset[int] = frozenset()
    """The tokens that are left out; known once fitted to a model."""
    at: str = "resid_post"
    """The site whose activation is encoded and edited."""
    layer: int = 0
    keep_error: bool = True
    chosen: tuple[int, ...] | None = None
    """The features over which sweeps run; None: all of them."""
    count: int = 0
    """Number of features; known once fitted to a model."""

    def __repr__(self) -> str:
        among = "" if self.chosen is None else f", {len(self.chosen):,} chosen"
        many = f"{self.count:,} " if self.count else ""
        return f"Features({many}features of {self.at}, layer {self.layer}{among})"

    def only(self, features: Iterable[int] | int) -> Features:
        """Return the same dictionary, with sweeps and ablations restricted to these features."""
        try:
            chosen = whole_numbers(features)
        except TypeError:
            raise InputError(f"only({shown(features)}): give numbers of features, as [3, 17].") from None
        if not chosen or len(set(chosen)) < len(chosen) or min(chosen) < 0:
            raise InputError(f"only({shown(features)}) must name at least one feature, each once, from 0 up.")
        self._refuse_beyond(chosen)
        return dataclasses.replace(self, chosen=tuple(chosen))

    def size(self, shape: ModelShape, length: int) -> tuple[int, ...]:
        """Return the size of one example's features."""
        return length, self.count

    def width(self, shape: ModelShape, length: int) -> int:
        """Return the number of features."""
        return self.count

    def layers(self, shape: ModelShape) -> Sequence[int]:
        """Return the one layer of the dictionary."""
        return (self.layer,)

    @property
    def described(self) -> Any:
        """Its entry in the record of a run: its place and the dictionary, by digest."""
        chosen = None if self.chosen is None else list(self.chosen)
        return {"name": self.name, "at": self.at, "layer": self.layer, "features": chosen, "dictionary": self}

    @property
    def units(self) -> tuple[int, ...]:
        """The features over which a sweep runs."""
        return tuple(range(self.count)) if self.chosen is None else self.chosen

    def digest(self) -> str:
        """Return a digest of everything the dictionary computes with: weights, functions, place."""
        parts = [self.name, self.at, self.layer, self.keep_error, self.chosen, self.encoder, self.decoder]
        return digest([*parts, self.standardize, dataclasses.astuple(self.origin), sorted(self.special)])

    def encode(self, activation: Tensor) -> Tensor:
        """Return the features, `... feature`, of activations `... (head) width`."""
        rows, lead = self._rows(activation)
        return self._coded("encode", self._standardized(rows)[0]).view(*lead, -1)

    def decode(self, features: Tensor, activation: Tensor | None = None) -> Tensor:
        """Return the activations, `... (head) width`, of features, `... feature`.

        Args:
            features: features of this dictionary.
            activation: the activations they came from; required if the dictionary standardizes its input.
        """
        if activation is None and (self.standardize is not None or self.origin.centred):
            raise InputError(
                f"{self.name} belongs to a dictionary that standardizes each activation: pass decode the activations "
                "too, as in decode(features, activation)."
            )
        if activation is None:
            return self.decoder(features.flatten(0, -2)).unflatten(0, features.shape[:-1])
        rows, _ = self._rows(activation)
        _, shift, scale = self._standardized(rows)
        return (shift + scale * self.decoder(features.flatten(0, -2))).view_as(activation)

    def read(self, activation: Tensor) -> Tensor:
        """Return the features, which edits change: see `encode`."""
        return self.encode(activation)

    @property
    def leaves_out(self) -> bool:
        """Whether the dictionary was trained without some tokens or positions."""
        return bool(self.special) or self.origin.span != (None,)

    def left_out(self, ids: Sequence[int]) -> frozenset[int]:
        """Return the positions of a text at which the dictionary is not used, because training left them out."""
        span = self.origin.span
        from_end = any(end is not None and end < 0 for end in span)
        seen = range(self.origin.context if from_end else len(ids))[slice(*span)]
        return frozenset(i for i, token in enumerate(ids) if token in self.special or i not in seen)

    def written(
        self, activation: Float[Tensor, "*row width"], change: Callable[[Float[Tensor, "row feature"]], Tensor]
    ) -> Float[Tensor, "*row width"]:
        """Return activations after applying `change` to their features."""
        rows, _ = self._rows(activation)
        standard, shift, scale = self._standardized(rows)
        features = self._coded("encode", standard)
        # `change` works in place: without a copy the error would be that of the edited features, and undo the edit.
        before = features.clone()
        after = shift + scale * self.decoder(change(features))
        if self.keep_error:
            after = after + (rows - (shift + scale * self.decoder(before)))
        return after.to(activation.dtype).view_as(activation)

    @property
    def is_lossless(self) -> bool:
        """Whether the error is added back, so that unchanged features leave the activation unchanged."""
        return self.keep_error

    @property
    def inner(self) -> Site:
        """A site whose activation is the features themselves."""
        return Site(self.name, self.hook, self.axes, self.stage)

    def first_order(self, activation: Tensor, gradient: Tensor, value: Tensor) -> Tensor:
        """Return (value - feature) · gradient at each feature, through `decode`.

        A last entry after the features is the effect of losing the error: 0 if the error is kept.
        """
        rows, lead = self._rows(activation.detach())
        standard, shift, scale = self._standardized(rows)
        slope = self._rows(gradient.detach())[0]
        with torch.enable_grad():
            features = self._coded("encode", standard).detach().requires_grad_(True)
            rebuilt = shift + scale * self.decoder(features)
            (at_features,) = torch.autograd.grad(rebuilt, features, slope)
        product = (value.reshape(features.shape) - features.detach()).double() * at_features.double()
        lost = ((rebuilt.detach() - rows).double() * slope.double()).sum(-1, keepdim=True)
        lost = torch.zeros_like(lost) if self.keep_error else lost
        return torch.cat([product, lost], 1).unflatten(0, lead)

    def lacks(self, model: Model, layer: int, edited: bool = False) -> str | None:
        """Return why its activation is missing from the model, or cannot be `edited`; None if it is usable."""
        return SITES[self.at].lacks(model, layer, edited)

    def fitted(self, model: Model) -> Features:
        """Return it as a site of a model, after checking that its place exists and has the dictionary's width."""
        layer = checked_layer(f"layer of {self.name}", self.layer, model.shape.n_layers)
        row = SITES[self.at]
        if reason := row.absent(model.shape) or row.lacks(model, layer):
            raise InputError(f"{self.name} reads {self.at}, but {reason}")
        known = model.raw.hook_dict
        # By identity: aliases of a hook are the same object in hook_dict.
        if (hook := self.origin.hook) in known and known[hook] is not known[self.hook_name(layer)]:
            raise InputError(f"{self.name} was trained on {hook!r}, which is not the {self.at} of {model.name}.")
        if differences := self.origin.differences(model):
            warnings.warn(f"The folder of {self.name} says: {'; '.join(differences)}.", stacklevel=2)
        width = row.width(model.shape, 1)
        # A separate generator: the caller's results may depend on the global one.
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(2, width, generator=generator).to(
            model.device, torch.promote_types(model.dtype, torch.float32)
        )
        without = self.origin.without
        tokens = [getattr(model.tokenizer, name, None) for name in SPECIAL] if without is True else without or ()
        # TransformerLens centres writing weights only of models with LayerNorms; an RMSNorm would see the mean.
        centred = self.origin.centred and str(model.raw.cfg.normalization_type).startswith("LN")
        fitting = dataclasses.replace(
            self,
            layer=layer,
            origin=dataclasses.replace(self.origin, centred=centred),
            special=frozenset(token for token in tokens if token is not None),
        )
        try:
            standard, *_ = fitting._standardized(rows)
            features = fitting._coded("encode", standard)
        except InputError as error:
            what = f"{self.at} of {model.shape.architecture}, {width} wide,"
            raise InputError(f"The dictionary {self.name} does not accept {what} as rows: {error}") from None
        rebuilt = fitting._coded("decode", features, width)
        for coder, whole, of in ((self.encoder, features, standard), (self.decoder, rebuilt, features)):
            if not torch.allclose(coder(of[:1]), whole[:1], rtol=ALIKE, atol=ALIKE * float(whole.detach().abs().max())):
                raise InputError(
                    f"{self.name} returns another result for a row among others than alone: it mixes rows."
                )
        fitting = dataclasses.replace(fitting, count=features.shape[1])
        fitting._refuse_beyond(self.chosen or ())
        return fitting

    def _rows(self, activation: Tensor) -> tuple[Float[Tensor, "row d"], tuple[int, ...]]:
        """Return activations as rows, heads concatenated, in float32 or wider; and the shape of the leading axes."""
        heads = len(SITES[self.at].axes) - 2
        lead = activation.shape[: activation.ndim - 1 - heads]
        return activation.reshape(lead.numel(), -1).to(torch.promote_types(activation.dtype, torch.float32)), lead

    def _standardized(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the encoder's input, and the shift and scale of the decoder's output."""
        mean = rows.mean(-1, keepdim=True) if self.origin.centred else rows.new_zeros(())
        if self.standardize is None:
            return rows - mean, mean, rows.new_ones(())
        standard, shift, scale = self.standardize(rows - mean)
        return standard, mean + shift, scale

    def _coded(self, what: str, rows: Tensor, width: int | None = None) -> Float[Tensor, "row _"]:
        """Return what `encode` or `decode` makes of rows, after checking that it is a row of numbers for each."""
        with failures_named(f"{what} of {self.name}, given rows {tuple(rows.shape)}, failed"):
            found = (self.encoder if what == "encode" else self.decoder)(rows)
        if not isinstance(found, Tensor) or found.shape[:-1] != rows.shape[:1] or not found.is_floating_point():
            kind = f"{tuple(found.shape)} in {found.dtype}" if isinstance(found, Tensor) else type(found).__name__
            raise InputError(
                f"{what} of {self.name} returns {kind} for rows {tuple(rows.shape)}; it must return one row of real "
                "numbers for each."
            )
        if width not in (None, found.shape[1]):
            raise InputError(f"{what} of {self.name} returns {found.shape[1]} numbers for an activation of {width}.")
        if not is_finite(found):
            raise InputError(f"{what} of {self.name} returns NaN or infinity for finite numbers: check its weights.")
        return found

    def _refuse_beyond(self, features: Sequence[int]) -> None:
        if self.count and (beyond := [feature for feature in features if feature >= self.count]):
            raise InputError(f"There is no feature {beyond[0]} in {self.name}; they are 0 to {self.count - 1}.")


def _bare(name: str) -> str:
    """Return a model's name without its owner or folder, with TransformerLens's aliases resolved."""
    return hub_name(name).rstrip("/").rsplit("/", 1)[-1].casefold()


@checked_call
def features(
    encode: Coder,
    decode: Coder,
    *,
    at: str = "resid_post",
    layer: int,
    keep_error: bool = True,
    name: str | None = None,
) -> Features:
    """Make a site of the features of a dictionary.

    Args:
        encode: maps activations `row d` in float32 (with heads concatenated, at a site with heads) to features
            `row feature`, each row independently.
        decode: maps features to activations.
        at: the site whose activation is encoded: a site of the residual stream, attn_out, mlp_out, mlp_post, z, q, k
            or v.
        layer: its layer, from 0.
        keep_error: whether an edit of features adds back the error a - decode(encode(a)) of each activation a.
        name: value of the column `site` in tables; default: the place.

    Returns:
        A site for `hw.patch(sites=...)` and `hw.ablate(features=...)`; `.only([3, 17])` selects features.

    Raises:
        InputError: an argument is invalid. A mismatch with a model raises when the site is used with that model.
    """
    known = [site for site, row in SITES.items() if row.axes[0] == "position"]
    if not isinstance(at, str) or at not in known:
        raise InputError(f"at={shown(at)} has no vector per token to read.{did_you_mean(at, known)}")
    if name is not None and (not isinstance(name, str) or not name.strip()):
        raise InputError(f"name={shown(name)} must be a text.")
    row = SITES[at]
    return Features(
        name=name or f"{at} {layer} features",
        hook=row.hook,
        axes=("position", "feature"),
        stage=row.stage,
        carrier=row.carrier,
        encoder=encode,
        decoder=decode,
        at=at,
        layer=checked_count("layer", layer, least=0),
        keep_error=keep_error,
    )


# Folders of sae-lens: a sparse autoencoder's `cfg.json` and `sae_weights.safetensors`, read without that package.
#
# With x the activation (standardized if the folder says so), W_enc `d feature` and W_dec `feature d`:
#
#     x̄          = x - b_dec                                 or x, without apply_b_dec_to_input
#     standard   f = σ(x̄ W_enc + b_enc)                      Cunningham et al. 2023, Bricken et al. 2023
#     gated      f = [x̄ W_enc + b_gate > 0] · σ(x̄ W_enc e^r_mag + b_mag)              Rajamanoharan et al. 2024a
#     jumprelu   f = σ(p) · [p > threshold],  p = x̄ W_enc + b_enc                     Rajamanoharan et al. 2024b
#     topk       f = the k largest of p, σ of them, others 0                           Gao et al. 2024
#     abstopk    f = the k of p that are largest in size, with their signs, others 0   Zhu et al. 2025
#     decode     f W_dec + b_dec
#
# The folder specifies σ: the ReLU, tanh of the ReLU, or the k largest. Two options standardize: `layer_norm` and
# `constant_norm_rescale` (to the norm √d). `expected_average_only_in` is a factor that sae-lens folds into the weights
# when it saves, or stores in `activation_scaler.json`. With `rescale_acts_by_decoder_norm`, which only topk and abstopk
# use, p is multiplied by the norms of the rows of W_dec, and f divided by them before decoding.
#
# Keys of cfg.json differ by version: `hook_point` (versions 1 and 2), `hook_name` (3 to 5), `metadata.hook_name` (6).
# Other architectures are refused, among them transcoders, which read and write different activations.


CONFIG, WEIGHTS, SCALER = "cfg.json", "sae_weights.safetensors", "activation_scaler.json"
ARCHITECTURES = {
    "standard": ("b_enc",),
    "gated": ("b_gate", "r_mag", "b_mag"),
    "jumprelu": ("b_enc", "threshold"),
    "topk": ("b_enc",),
    "abstopk": ("b_enc",),
}
"""By architecture: its parameters with one number per feature."""
TOP_K = ("topk", "abstopk")
"""Architectures, and activation functions, that keep only the k largest features."""
OTHER_NAMES = (
    (r"blocks\.(\d{1,9})\.hook_in", "resid_pre"),
    (r"blocks\.(\d{1,9})\.attn\.hook_out", "attn_out"),
    (r"blocks\.(\d{1,9})\.mlp\.hook_out", "mlp_out"),
    (r"blocks\.(\d{1,9})\.hook_out", "resid_post"),
    (r"(?:model\.layers|model\.decoder\.layers|transformer\.h|gpt_neox\.layers)\.(\d{1,9})", "resid_post"),
)
"""Other names of sites: a bridge's names for the same place, and transformers' modules of whole blocks."""
NORMS = ("none", "layer_norm", "constant_norm_rescale", "expected_average_only_in")
FLAGS = (True, False)
CENTRED = "center_writing_weights"
EPSILON = 1e-5
"""Added to the standard deviation, as in sae-lens."""


@dataclass(frozen=True, eq=False, repr=False)
class Autoencoder:
    """The weights of a sparse autoencoder, and how to compute with them."""

    architecture: str
    weights: Mapping[str, Tensor]
    activation: str = "relu"
    """`relu`, `tanh-relu`, `topk` or `abstopk`."""
    k: int | None = None
    centre: bool = True
    """Whether to subtract `b_dec` from the encoder's input."""
    rescaled: bool = False
    """Whether to scale features by the norms of their decoder directions."""
    norm: str = "none"

    @cached_property
    def _copies(self) -> dict[tuple[torch.device, torch.dtype], dict[str, Tensor]]:
        """The weights by device and dtype; as a cached property it is no part of the identity."""
        return {}

    def _weights_for(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the weights on the device and in the precision of `rows`."""
        key = rows.device, rows.dtype
        if key not in self._copies:
            self._copies[key] = {name: weight.to(rows) for name, weight in self.weights.items()}
        return self._copies[key]

    def encode(self, rows: Float[Tensor, "row d"]) -> Float[Tensor, "row feature"]:
        """Return the features of activations."""
        w = self._weights_for(rows)
        read = rows - w["b_dec"] if self.centre else rows
        if self.architecture == "gated":
            magnitude = self._activated(read @ (w["W_enc"] * w["r_mag"].exp()) + w["b_mag"])
            return magnitude * (read @ w["W_enc"] + w["b_gate"] > 0)
        before = read @ w["W_enc"] + w["b_enc"]
        before = before * w["W_dec"].norm(dim=-1) if self.rescaled else before
        features = self._activated(before)
        return features * (before > w["threshold"]) if self.architecture == "jumprelu" else features

    def decode(self, features: Float[Tensor, "row feature"]) -> Float[Tensor, "row d"]:
        """Return the activations of features."""
        w = self._weights_for(features)
        features = features * w["scaling_factor"] if "scaling_factor" in w else features
        features = features / w["W_dec"].norm(dim=-1) if self.rescaled else features
        return features @ w["W_dec"] + w["b_dec"]

    def standardize(self, rows: Float[Tensor, "row d"]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the encoder's input for each row, and the shift and scale of the decoder's output."""
        if self.norm == "layer_norm":
            # Divided by n - 1, torch's default, as in sae-lens.
            mean, std = rows.mean(-1, keepdim=True), rows.std(-1, keepdim=True)
            return (rows - mean) / (std + EPSILON), mean, std
        scale = rows.norm(dim=-1, keepdim=True) / rows.shape[-1] ** 0.5
        return rows / scale, rows.new_zeros(()), scale

    def _activated(self, before: Tensor) -> Tensor:
        if self.activation not in TOP_K:
            return before.relu().tanh() if self.activation == "tanh-relu" else before.relu()
        size, kept = (before.abs(), before) if self.activation == "abstopk" else (before, before.relu())
        indices = size.topk(self.k or 1, dim=-1).indices
        return torch.zeros_like(before).scatter(-1, indices, kept.gather(-1, indices))


@checked_call
def load_sae(folder: str | Path, *, keep_error: bool = True, name: str | None = None) -> Features:
    """Load a sparse autoencoder from a folder of sae-lens, as a site.

    Args:
        folder: a folder with `cfg.json` and `sae_weights.safetensors`.
        keep_error: see `hw.features`.
        name: see `hw.features`.

    Returns:
        Its features as a site, see `hw.features`.
    """
    path = checked_path("folder", folder)
    try:
        config = parse_json((path / CONFIG).read_bytes())
        # Version 6 stores entries under `metadata`; top-level entries win, since older versions have only these.
        config = (config.get("metadata") or {}) | config
        if config.get("norm_scaling_factor") is None and (path / SCALER).is_file():
            config["norm_scaling_factor"] = parse_json((path / SCALER).read_bytes()).get("scaling_factor")
        hook, site, layer = _place(config)
        coder = _autoencoder(config, load_file(path / WEIGHTS))
        origin = _origin(config, hook, site)
    except Exception as error:  # files may contain anything
        raise InputError(
            f"{path} is not a folder of sae-lens that can be read, with {CONFIG} and {WEIGHTS}: {one_line(error)}."
        ) from None
    found = features(coder.encode, coder.decode, at=site.name, layer=layer, keep_error=keep_error, name=name)
    standardize = None if coder.norm == "none" else coder.standardize
    return dataclasses.replace(found, standardize=standardize, origin=origin, count=coder.weights["W_enc"].shape[1])


def _option(config: Mapping[str, Any], key: str, default: Any, valid: Sequence[object]) -> Any:
    """Return an entry of the config, which must be one of the valid values; the default if there is none."""
    value = config.get(key)
    if value is not None and value not in valid:
        raise ValueError(f"{key} is {shown(value)}; supported are {', '.join(map(str, valid))}")
    return default if value is None else value


def _place(config: Mapping[str, Any]) -> tuple[str, Site, int]:
    """Return the hook, site and layer whose activation the autoencoder was trained on."""
    hook = str(config.get("hook_name", config.get("hook_point")))
    if config.get("hook_head_index", config.get("hook_point_head_index")) is not None:
        raise ValueError(f"it reads one head of {hook}; only whole activations can be read")
    place_found = place_named(hook)
    for pattern, site in OTHER_NAMES:
        place_found = (SITES[site], int(other[1])) if (other := re.fullmatch(pattern, hook)) else place_found
    if place_found is None or place_found[0].axes[0] != "position":
        known = ", ".join(site.hook for site in SITES.values() if site.axes[0] == "position")
        raise ValueError(f"its hook_name {shown(hook)} is not a site here; sites are: {known}")
    return hook, *place_found


def _origin(config: Mapping[str, Any], hook: str, site: Site) -> Origin:
    """Return what the config says about the training runs."""
    options, without = config.get("model_from_pretrained_kwargs"), config.get("exclude_special_tokens")
    span, context = config.get("seqpos_slice") or (None,), config.get("context_size")
    span = tuple(None if end is None else whole_numbers(end)[0] for end in span)
    slice(*span).indices(1)  # an error if these are not the numbers of a slice
    if any(end is not None and end < 0 for end in span) and not isinstance(context, int):
        raise ValueError(f"seqpos_slice {shown(list(span))} counts from the end, and there is no context_size")
    if not isinstance(without, bool | list | None):
        raise ValueError(f"exclude_special_tokens is {shown(without)}; supported are true, false or token ids")
    if isinstance(without, list):
        without = tuple(whole_numbers(without))
    return Origin(
        model=config["model_name"] if isinstance(config.get("model_name"), str) else None,
        hook=hook,
        begins=_option(config, "prepend_bos", None, FLAGS),
        centred=site.axes[-1] == "d_model" and isinstance(options, dict) and options.get(CENTRED) is True,
        without=without or False,
        span=span,
        context=context if isinstance(context, int) else 0,
    )


def _autoencoder(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Autoencoder:
    """Return the autoencoder, after checking that the config can be computed with and fits the weights."""
    architecture, written = config.get("architecture", "standard"), config.get("hook_name_out")
    if architecture not in ARCHITECTURES or written not in (None, config.get("hook_name")):
        raise ValueError(
            f"its architecture is {shown(architecture)}{f' and it writes {shown(written)}' if written else ''}; "
            f"supported are {', '.join(ARCHITECTURES)}, which write what they read (no transcoders). sae-lens converts "
            "batchtopk to jumprelu when it saves for inference"
        )
    weights = {name: weight if weight.dtype == torch.float64 else weight.float() for name, weight in tensors.items()}
    if "log_threshold" in weights:
        weights.setdefault("threshold", weights["log_threshold"].exp())
    if "W_enc" not in weights or weights["W_enc"].ndim != 2:
        raise ValueError(f"there is no matrix W_enc among {', '.join(sorted(weights)) or 'no weights'}")
    d, n = weights["W_enc"].shape
    for key, size in (("d_in", d), ("d_sae", n)):  # otherwise the config, and so the place, is of other weights
        if config.get(key) not in (None, size):
            raise ValueError(f"{CONFIG} says {key}={shown(config[key])}, but W_enc is {d} by {n}")
    sizes: dict[str, tuple[int, ...]] = {"W_enc": (d, n), "W_dec": (n, d), "b_dec": (d,)}
    sizes |= dict.fromkeys(ARCHITECTURES[architecture], (n,))
    scales = weights.get("scaling_factor")
    if scales is not None and not torch.allclose(scales, torch.ones_like(scales)):
        if not _option(config, "finetuning_scaling_factor", False, FLAGS):
            raise ValueError("scaling_factor is not 1, and finetuning_scaling_factor does not say to multiply by it")
        sizes["scaling_factor"] = (n,)
    for name, expected in sizes.items():
        if name not in weights or tuple(weights[name].shape) != expected or not is_finite(weights[name]):
            found = f"is {tuple(weights[name].shape)} or holds NaN or infinity" if name in weights else "is missing"
            raise ValueError(f"{name} {found}; a {architecture} autoencoder needs finite numbers, {expected}")
    weights = {name: weights[name] for name in sizes}
    norm = _option(config, "normalize_activations", "none", (*NORMS, *FLAGS))
    norm = {True: NORMS[3], False: "none"}.get(norm, norm)
    if norm == "expected_average_only_in":
        # W_enc reads x · factor, the decoder's output is divided by it; b_enc follows the product and stays.
        factor, norm = config.get("norm_scaling_factor"), "none"
        if not isinstance(factor, int | float) or isinstance(factor, bool) or not factor > 0:
            raise ValueError(f"normalize_activations needs a norm_scaling_factor, or {SCALER} with a scaling_factor")
        weights["W_enc"] = weights["W_enc"] * factor
        weights |= {name: weights[name] / factor for name in ("W_dec", "b_dec")}
    key = "activation_fn_str" if "activation_fn_str" in config else "activation_fn"
    activation, k, options = architecture, None, config.get("activation_fn_kwargs")
    if architecture not in TOP_K:
        activation = _option(config, key, "relu", ("relu", "tanh-relu", *TOP_K))
    if activation in TOP_K:
        k = config.get("k", options.get("k") if isinstance(options, dict) else None)
        if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= n:
            raise ValueError(f"k, how many of {n} features are kept, is {shown(k)}")
    centre = _option(config, "apply_b_dec_to_input", True, FLAGS)
    rescaled = k is not None and _option(config, "rescale_acts_by_decoder_norm", False, FLAGS)
    return Autoencoder(architecture, weights, activation, k, centre, rescaled, norm)
