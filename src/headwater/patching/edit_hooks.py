"""An edit outside sweeps: a hook that writes values at a site of a layer, at some positions and heads of each prompt.

It uses the same code as the edits of sweeps: the same kinds of values, the same rows, the same carrier
(`headwater.models.edits`), so that `model.run(prompts, hooks=[hw.edit(...)])` is what a cell of `hw.patch` runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headwater.calls import checked_call
from headwater.errors import InputError
from headwater.models.edits import Hook, PromptHook, read_hook, replace_hook
from headwater.models.part_names import Heads, layers_and_heads
from headwater.models.positions import Prompt, Where, is_all, positions_of
from headwater.models.sites import SITES, Site, SiteName, kv_site_of
from headwater.models.tokens import Batch
from headwater.options import checked_count, checked_layer, resolve_indices, shown, whole_number
from headwater.patching.activation_patching import materialize
from headwater.patching.edits import Edit, ReplacementSpec
from headwater.patching.prompts import PromptPair, read_prompts, seen_positions
from headwater.patching.replacements import (
    VALUES,
    TensorLike,
    ValueName,
    ValueRequest,
    build_replacement,
    compute_values,
    replacement_spec,
)
from headwater.patching.runners import written_into
from headwater.runs.identity import digest

if TYPE_CHECKING:
    from headwater.models.hooked import HookedModel


@dataclass(frozen=True, eq=False)
class EditHook(PromptHook):
    """The result of `hw.edit`: a hook for `model.run`, `model.hooks` and everything else that takes hooks."""

    site: Site
    layer: int
    spec: ReplacementSpec
    positions: Where
    heads: Heads
    keys: Where

    def __repr__(self) -> str:
        where = f"positions={shown(self.positions)}"
        where += "" if self.heads is None else f", heads={self.heads}"
        where += "" if is_all(self.keys) else f", keys={shown(self.keys)}"
        return f"hw.edit({self.site.name!r}, {self.layer}, {self.spec.kind}, {where})"

    @property
    def identity(self) -> str:
        """Identifies the edit in the record of a run."""
        described = [self.site.described, self.layer, self.spec.kind, dict(self.spec.arguments), self.positions]
        described += [self.heads] if is_all(self.keys) else [self.heads, self.keys]
        return f"{self.site.name} {self.layer} {digest(described)}"

    def hook_for(self, model: HookedModel, batch: Batch | None, continues: bool = False) -> Hook:
        """Return the hook for these prompts; without prompts, for any input of the model.

        If `continues`, for new tokens in generation: an edit of all positions changes each; other edits do nothing.
        """
        site = self.site.fitted(model)
        (layer,) = site.among([checked_layer("layer", self.layer, model.shape.n_layers)], model, edited=True)
        everywhere = is_all(self.positions) and is_all(self.keys)
        if continues and not everywhere:
            return site.hook_name(layer), read_hook(lambda activation, hook: None)
        if batch is not None:
            rows = zip(batch.tokens.tolist(), batch.lengths.tolist(), strict=True)
            # For new tokens no positions are resolved: they need no strings.
            new = (Prompt(tuple(ids[:length]), ()) for ids, length in rows)
            prompts = tuple(new) if continues else read_prompts(model, batch)
            return site.hook_name(layer), replace_hook(_Writes(self, self._writer(model, site, layer, prompts)))
        if not everywhere or VALUES[self.spec.kind].of_prompts or site.leaves_out:
            raise InputError(
                f"{self!r} needs the prompts; give it to model.run(prompts, hooks=[...]) in place of model.hooks."
            )

        def write(activation: Tensor) -> Tensor:
            batch_axis, length = activation.shape[0], activation.shape[2 if site.has_keys else 1]
            return self._writer(model, site, layer, (Prompt((0,) * length, ()),) * batch_axis)(activation)

        # Made once and discarded: a head or value that does not fit is refused here, not during the run.
        self._writer(model, site, layer, (Prompt((0,), ()),))
        return site.hook_name(layer), replace_hook(_Writes(self, write))

    def _writer(
        self, model: HookedModel, site: Site, layer: int, prompts: tuple[Prompt, ...]
    ) -> Callable[[Tensor], Tensor]:
        """Return the function that applies the edit to an activation of these prompts."""
        _, numbers = layers_and_heads(layer, self.heads, model.shape, kv_site_of([site]))
        heads = None if numbers is None else resolve_indices(numbers, site.n_heads(model.shape), "head")
        units = None if site.units is None or len(site.units) == site.width(model.shape, 1) else tuple(site.units)
        edits = []
        for example, prompt in enumerate(prompts):
            at = positions_of(self.positions, prompt, example, len(prompts))
            at = seen_positions(site, prompt, at) if prompt.strings else at
            of = None if is_all(self.keys) else positions_of(self.keys, prompt, example, len(prompts))
            # None, not a list of all positions: in generation the edit also covers the tokens that follow.
            named = None if len(at) == len(prompt) else at
            edits.append((Edit(site, range(layer, layer + 1), named, heads, of, units), example))
        replacement = build_replacement(model, self.spec, None, PromptPair(prompts), (site,), positions=self.positions)
        lengths = [len(prompt) for prompt in prompts]
        wanted = ValueRequest(model, range(len(prompts)), max(lengths), ((site.name, layer),), {}, {site.name: site})
        # A tensor made in inference mode could not be part of a graph that the caller is building.
        with torch.inference_mode(not torch.is_grad_enabled()):
            values = compute_values(replacement, wanted, lengths)
        return lambda activation: written_into(activation, None, edits, values, layer)


@dataclass(frozen=True, eq=False)
class _Writes:
    """A hook function that is identified by its edit."""

    hook: EditHook
    write: Callable[[Tensor], Tensor]

    @property
    def identity(self) -> str:
        """Identifies the edit in the record of a run."""
        return self.hook.identity

    def __call__(self, activation: Tensor, hook: object) -> Tensor:
        return self.write(activation)


@checked_call
def edit(
    site: SiteName | Site,
    layer: int | None,
    values: ValueName | ReplacementSpec | TensorLike | Callable[..., Any],
    *,
    positions: Where = "all",
    heads: Heads = None,
    keys: Where = "all",
) -> EditHook:
    """Make a hook that writes values into an activation: `model.run(prompts, hooks=[hw.edit(...)])`.

    Args:
        site: the site, as for `hw.patch`, such as "z"; or features of a dictionary, as `hw.features` and `hw.load_sae`
            return them, from which `.only([...])` selects some.
        layer: the layer of the site, -1 for the last; None for features, which have a layer of their own.
        values: the values to write: a function `(activation, other, place)` (without another run: `other` is None), a
            tensor (such as an activation from another prompt's cache), `hw.add(...)`, `hw.scale(...)`,
            `hw.noise(..., samples=1)`, `hw.mean(prompts)`, `hw.resample(prompts)` or `"zero"`; see `hw.patch`.
        positions: the tokens of each prompt to edit, also by role (all roles together); query positions for `pattern`.
            In generation these are tokens of the prompts; "all" also covers the generated tokens.
        heads: the heads, by number (key-value heads for `k` and `v`) or by names of heads of this layer, as "9.2".
        keys: the key positions of `pattern` to edit, specified like `positions`.

    Raises:
        InputError: the site or kind of values is unknown. Layer, heads, positions and keys are checked when the hook
            is used.
    """
    if not isinstance(site, str | Site):
        raise InputError(f"site={shown(site)} is neither the name of a site nor features of a dictionary.")
    row = site if isinstance(site, Site) else SITES[site]
    if row.has_heads is False and heads is not None:
        raise InputError(f"heads={shown(heads)} was given, but {row.name} has no heads.")
    if not (row.has_keys or is_all(keys)):
        raise InputError(f"keys={shown(keys)} was given, but {row.name} has no keys.")
    spec = replacement_spec(values)
    if spec.kind == "other run":
        raise InputError("hw.edit has no other run; give its cached activation as a tensor.")
    if spec.arguments.get("samples", 1) != 1:
        raise InputError("hw.edit is one edit: give hw.noise(..., samples=1), and other seeds for other draws.")
    # Only a dictionary's site has a layer of its own.
    edited_layer = getattr(row, "layer", None)
    if edited_layer is None:
        if isinstance(layer, list | tuple | range):
            raise InputError(
                f"layer={shown(layer)} is more than one layer: give one hw.edit for each, all in the list of hooks."
            )
        try:
            edited_layer = whole_number(layer)
        except TypeError:
            raise InputError(f"layer={shown(layer)} must be a whole number, -1 for the last layer.") from None
    elif layer is not None and checked_count("layer", layer, least=0) != edited_layer:
        raise InputError(
            f"layer={layer} was given, but {row.name} is a dictionary of layer {edited_layer}: give layer=None."
        )
    return EditHook(row, int(edited_layer), spec, positions, materialize(heads), keys)
