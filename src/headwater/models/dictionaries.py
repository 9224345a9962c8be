"""Features as a site: an activation read through a dictionary (a sparse autoencoder, say), and written back through it.

Of the activation a of a token at some site of one layer, with its heads laid side by side where it has some:

    features   f = encode(a)
    error      e = a - decode(f)               what the dictionary does not say of a
    written    a' = decode(f') + e             features f' in place of f, the error kept (Marks et al. 2024)
               a' = decode(f')                 with keep_error=False: what the dictionary misses is lost too

An edit of some features at some tokens changes these features there; the others are those of the run that is edited,
after the edits of earlier layers. Where no feature is edited the activation stays as it is, to the last digit.

A dictionary may standardize what it reads (a norm, a mean): its encoder reads n, its decoder gives n', and
`decode` returns shift + scale · n'. What a folder says of the runs that it was trained on is its `Origin`.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from headwater.calls import checked_call
from headwater.errors import InputError, did_you_mean
from headwater.models.checkpoint import hub_name
from headwater.models.memory import failures_named
from headwater.models.sites import SITES, Site
from headwater.options import checked_count, checked_flag, checked_layer, shown, whole_numbers
from headwater.runs.identity import digest

if TYPE_CHECKING:
    from headwater.models.families import ModelShape
    from headwater.models.model import Model


Coder = Callable[[Tensor], Tensor]
"""Takes rows and gives rows: `row d` of activations and `row feature`."""
ALIKE = 1e-3
"""How far what is computed of a row alone may lie from what is computed of it beside another, as a share."""


SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id")
"""The special tokens of a tokenizer that sae-lens leaves out of training."""


@dataclass(frozen=True)
class Origin:
    """What is known of the runs that a dictionary was trained on."""

    model: str | None = None
    hook: str | None = None
    """What was read, by the name that the folder gives it."""
    begins: bool | None = None
    """Whether their texts began with a BOS token."""
    centred: bool = False
    """Whether activations had mean 0, as in a HookedTransformer with centred writing weights."""
    without: bool | tuple[int, ...] = False
    """Whether special tokens were left out; or which tokens were."""
    span: tuple[int | None, ...] = (None,)
    """The positions that were kept: the arguments of a slice."""
    context: int = 0
    """The length of the texts, from whose end `span` counts."""

    def differences(self, model: Model) -> list[str]:
        """Say what is otherwise in a model, and what is left out."""
        ids = (model.name, *filter(None, (getattr(model.config, "_name_or_path", None),)))
        differences = []
        if self.model and _bare(self.model) not in map(_bare, ids):
            differences.append(f"it was trained on {self.model!r}, and this model is {model.name!r}")
        if self.begins is not None and self.begins != bool(model.bos):
            here = "begin" if model.bos else "do not begin"
            differences.append(
                f"its texts {'began' if self.begins else 'did not begin'} with a BOS token, and here they {here}"
            )
        if self.without:
            which = f"the tokens {list(self.without)}" if isinstance(self.without, tuple) else "special tokens"
            differences.append(f"it never saw {which}, which are left out here")
        if self.span != (None,):
            differences.append(f"it saw the positions {shown(list(self.span))} only, and others are left out here")
        return differences

    def left_out(self, ids: Sequence[int], special: Iterable[int]) -> frozenset[int]:
        """Return the positions of a text that the dictionary never saw the like of."""
        from_end = any(end is not None and end < 0 for end in self.span)
        seen = range(self.context if from_end else len(ids))[slice(*self.span)]
        return frozenset(i for i, token in enumerate(ids) if token in special or i not in seen)


@dataclass(frozen=True, eq=False, repr=False)
class Features(Site):
    """A dictionary at a site of one layer, itself a site: what `hw.features` and `hw.load_sae` return."""

    encoder: Coder = lambda rows: rows
    decoder: Coder = lambda rows: rows
    standardize: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]] | None = None
    """Gives, of activations `row d`, what the encoder reads; and the shift and scale of what the decoder gives."""
    origin: Origin = Origin()
    special: frozenset[int] = frozenset()
    """The tokens that are left out; known once it has met a model."""
    at: str = "resid_post"
    """The site whose activation is read and written."""
    layer: int = 0
    keep_error: bool = True
    chosen: tuple[int, ...] | None = None
    """The features that sweeps run over; None: all of them."""
    count: int = 0
    """How many features there are; known once it has met a model."""

    def __repr__(self) -> str:
        among = "" if self.chosen is None else f", {len(self.chosen):,} chosen"
        many = f"{self.count:,} " if self.count else ""
        return f"Features({many}features of {self.at}, layer {self.layer}{among})"

    def only(self, features: Iterable[int] | int) -> Features:
        """Return the same dictionary, of which sweeps and ablations take these features.

        Raises:
            InputError: they are not whole numbers, none at all, or one is named twice.
        """
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
        """How many features there are."""
        return self.count

    def layers(self, shape: ModelShape) -> Sequence[int]:
        """The one layer that it belongs to."""
        return (self.layer,)

    @property
    def described(self) -> Any:
        """What the record of a run says of it: its place and the digest of the dictionary."""
        chosen = None if self.chosen is None else list(self.chosen)
        return {"name": self.name, "at": self.at, "layer": self.layer, "features": chosen, "dictionary": self}

    @property
    def units(self) -> tuple[int, ...]:
        """The features that a sweep runs over."""
        return tuple(range(self.count)) if self.chosen is None else self.chosen

    def digest(self) -> str:
        """Name the dictionary by what it computes with: weights, functions, place."""
        parts = [self.name, self.at, self.layer, self.keep_error, self.chosen, self.encoder, self.decoder]
        return digest([*parts, self.standardize, dataclasses.astuple(self.origin), sorted(self.special)])

    def encode(self, activation: Tensor) -> Tensor:
        """Return the features, `... feature`, of activations `... (head) width`.

        Raises:
            InputError: the dictionary fails, or gives NaN or infinity.
        """
        rows, lead = self._rows(activation)
        return self._encoded(self._standardized(rows)[0]).view(*lead, -1)

    def decode(self, features: Tensor, activation: Tensor | None = None) -> Tensor:
        """Return activations, `... (head) width`, of features, `... feature`.

        Args:
            features: of a dictionary.
            activation: what they are features of; needed where the dictionary standardizes what it reads.

        Raises:
            InputError: it is needed and was not given.
        """
        if activation is None and (self.standardize is not None or self.origin.centred):
            raise InputError(
                f"{self.name} is of a dictionary that standardizes each activation: give decode the activations too, "
                "as in decode(features, activation)."
            )
        if activation is None:
            return self.decoder(features.flatten(0, -2)).unflatten(0, features.shape[:-1])
        rows, _ = self._rows(activation)
        _, shift, scale = self._standardized(rows)
        return (shift + scale * self.decoder(features.flatten(0, -2))).view_as(activation)

    def read(self, activation: Tensor) -> Tensor:
        """Return what edits are written in: see `encode`."""
        return self.encode(activation)

    @property
    def leaves_out(self) -> bool:
        """Whether it was trained without some tokens or positions."""
        return bool(self.special) or self.origin.span != (None,)

    def left_out(self, ids: Sequence[int]) -> frozenset[int]:
        """Return the positions of a text at which the dictionary is not used: it never saw the like of them."""
        return self.origin.left_out(ids, self.special) if self.leaves_out else frozenset()

    def written(
        self, activation: Float[Tensor, "*row width"], change: Callable[[Float[Tensor, "row feature"]], Tensor]
    ) -> Float[Tensor, "*row width"]:
        """Return activations with `change` made to their features.

        Raises:
            InputError: see `read`.
        """
        rows, _ = self._rows(activation)
        standard, shift, scale = self._standardized(rows)
        features = self._encoded(standard)
        # `change` writes in place: without a copy the error would be that of the edited features, and undo the edit.
        before = features.clone()
        after = shift + scale * self.decoder(change(features))
        if self.keep_error:
            after = after + (rows - (shift + scale * self.decoder(before)))
        return after.to(activation.dtype).view_as(activation)

    @property
    def inner(self) -> Site:
        """The site whose activation is the features themselves."""
        return Site(self.name, self.hook, self.axes, self.stage, self.within)

    def first_order(self, activation: Tensor, gradient: Tensor, value: Tensor) -> Tensor:
        """Return (value - feature) · gradient at each feature, through `decode`.

        After the features comes what losing the error adds: 0 where it is kept.
        """
        rows, lead = self._rows(activation.detach())
        standard, shift, scale = self._standardized(rows)
        slope = self._rows(gradient.detach())[0]
        with torch.enable_grad():
            features = self._encoded(standard).detach().requires_grad_(True)
            rebuilt = shift + scale * self.decoder(features)
            (at_features,) = torch.autograd.grad(rebuilt, features, slope)
        product = (value.reshape(features.shape) - features.detach()).double() * at_features.double()
        lost = ((rebuilt.detach() - rows).double() * slope.double()).sum(-1, keepdim=True)
        lost = torch.zeros_like(lost) if self.keep_error else lost
        return torch.cat([product, lost], 1).unflatten(0, lead)

    def lacks(self, model: Model, layer: int, edited: bool = False) -> str | None:
        """Why the activation that it is read from is not there, or cannot be `edited`; None where it can."""
        return SITES[self.at].lacks(model, layer, edited)

    def fitted(self, model: Model) -> Features:
        """Return it as a site of a model: its place is there, and the dictionary is as wide as it.

        Raises:
            InputError: one of these is not so, or it fails on numbers, mixes rows, or gives NaN.
        """
        layer = checked_layer(f"layer of {self.name}", self.layer, model.shape.n_layers)
        row = SITES[self.at]
        if reason := row.absent(model.shape) or row.lacks(model, layer):
            raise InputError(f"{self.name} is of {self.at}, but {reason}")
        known = model.raw.hook_dict
        # By identity: in hook_dict the aliases of a hook are one object.
        if (hook := self.origin.hook) in known and known[hook] is not known[self.hook_name(layer)]:
            raise InputError(f"{self.name} was trained on {hook!r}, which in {model.name} is not its {self.at}.")
        if differences := self.origin.differences(model):
            warnings.warn(f"The folder of {self.name} says: {'; '.join(differences)}.", stacklevel=2)
        width = row.width(model.shape, 1)
        # A generator of its own: the global one may be what the caller's results follow from.
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(2, width, generator=generator).to(
            model.device, torch.promote_types(model.dtype, torch.float32)
        )
        without = self.origin.without
        tokens = [getattr(model.tokenizer, name, None) for name in SPECIAL] if without is True else without or ()
        # TransformerLens centres writing weights of models with LayerNorms alone; an RMSNorm would see the mean.
        centred = self.origin.centred and str(model.raw.cfg.normalization_type).startswith("LN")
        fitting = dataclasses.replace(
            self,
            layer=layer,
            origin=dataclasses.replace(self.origin, centred=centred),
            special=frozenset(token for token in tokens if token is not None),
        )
        return fitting._of_rows(rows, f"{self.at} of {model.shape.architecture}, {width} wide,")

    def _of_rows(self, rows: Tensor, what: str) -> Features:
        """Return it with the number of its features, as it is seen on these rows."""
        standard, *_ = self._standardized(rows)
        try:
            features = self._encoded(standard)
        except InputError as error:
            raise InputError(f"The dictionary {self.name} does not take {what} as rows: {error}") from None
        with failures_named(f"decode of {self.name}, given features {tuple(features.shape)},"):
            rebuilt = self.decoder(features)
        if not isinstance(rebuilt, Tensor) or rebuilt.shape != rows.shape:
            found = tuple(rebuilt.shape) if isinstance(rebuilt, Tensor) else f"a {type(rebuilt).__name__}"
            raise InputError(
                f"decode of {self.name} gives {found} of features {tuple(features.shape)}, where {what} needs "
                f"{tuple(rows.shape)}."
            )
        self._refuse_not_finite(rebuilt, "decode")
        for coder, whole, of in ((self.encoder, features, standard), (self.decoder, rebuilt, features)):
            if not torch.allclose(coder(of[:1]), whole[:1], rtol=ALIKE, atol=ALIKE * float(whole.abs().max())):
                raise InputError(f"{self.name} gives a row something else beside other rows than alone: it mixes rows.")
        fitting = dataclasses.replace(self, count=features.shape[1])
        fitting._refuse_beyond(self.chosen or ())
        return fitting

    def _rows(self, activation: Tensor) -> tuple[Float[Tensor, "row d"], tuple[int, ...]]:
        """Lay activations out as rows, heads side by side, in float32 or wider; and what lay before the width."""
        heads = len(SITES[self.at].axes) - 2
        lead = activation.shape[: activation.ndim - 1 - heads]
        return activation.reshape(lead.numel(), -1).to(torch.promote_types(activation.dtype, torch.float32)), lead

    def _standardized(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the encoder reads, and the shift and scale of what the decoder gives."""
        mean = rows.mean(-1, keepdim=True) if self.origin.centred else rows.new_zeros(())
        if self.standardize is None:
            return rows - mean, mean, rows.new_ones(())
        standard, shift, scale = self.standardize(rows - mean)
        return standard, mean + shift, scale

    def _encoded(self, rows: Tensor) -> Float[Tensor, "row feature"]:
        with failures_named(f"encode of {self.name}, given rows {tuple(rows.shape)},"):
            features = self.encoder(rows)
        if not isinstance(features, Tensor) or features.ndim != 2 or len(features) != len(rows):
            found = tuple(features.shape) if isinstance(features, Tensor) else f"a {type(features).__name__}"
            raise InputError(
                f"encode of {self.name} gives {found} of rows {tuple(rows.shape)}; it must give a row each."
            )
        if not features.is_floating_point():
            raise InputError(f"encode of {self.name} gives {features.dtype}; features must be real numbers.")
        self._refuse_not_finite(features, "encode")
        return features

    def _refuse_not_finite(self, found: Tensor, what: str) -> None:
        # In float64 the sum of finite float32 numbers does not overflow, so the second pass runs for errors alone.
        if not bool(found.sum(dtype=torch.float64).isfinite()) and not bool(found.isfinite().all()):
            raise InputError(f"{what} of {self.name} gives NaN or infinity of finite numbers: look at its weights.")

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
        encode: takes activations `row d` in float32 (of a site with heads these side by side) and gives features
            `row feature`; each row by itself.
        decode: gives activations of features.
        at: the site whose activation is read: of the residual stream, attn_out, mlp_out, mlp_post, z, q, k or v.
        layer: its layer, from 0.
        keep_error: whether what `decode(encode(a))` misses of an activation a is added again when features are edited.
        name: what the table's column `site` says; default: the place.

    Returns:
        What `hw.patch(sites=...)` and `hw.ablate(features=...)` take; `.only([3, 17])` chooses features.

    Raises:
        InputError: an argument cannot be used. What does not fit a model is said when it meets it.
    """
    for what, function in (("encode", encode), ("decode", decode)):
        if not callable(function) or isinstance(function, type):
            raise InputError(f"{what}={shown(function)} must be a function of rows.")
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
        within=row.within,
        carrier=row.carrier,
        encoder=encode,
        decoder=decode,
        at=at,
        layer=checked_count("layer", layer, least=0),
        keep_error=checked_flag("keep_error", keep_error),
    )
