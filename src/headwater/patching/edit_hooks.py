"""An edit outside sweeps: a hook that writes values at a site of a layer, at some positions and heads of each prompt.

It uses the same code as the edits of sweeps: the same kinds of values, the same rows, the same carrier
(`headwater.models.edits`), so that `model.run(prompts, hooks=[hw.edit(...)])` is what a cell of `hw.patch` runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from headwater.calls import checked_call
from headwater.errors import InputError
from headwater.models.edits import Hook, PromptHook, read_hook, replace_hook
from headwater.models.forward import Reading, now_reading
from headwater.models.part_names import Heads, layers_and_heads
from headwater.models.positions import Prompt, Where, is_all, positions_of
from headwater.models.sites import SITES, Site, SiteName, kv_site_of
from headwater.models.tokens import Batch
from headwater.options import checked_layer, is_index, resolve_indices, shown
from headwater.patching.activation_patching import materialize
from headwater.patching.edits import Edit, ReplacementSpec
from headwater.patching.prompts import PromptPair, read_prompts, seen_positions
from headwater.patching.replacements import (
    VALUES,
    Replacement,
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
    """The result of `hw.edit`: a hook for `hooks=` of `model.run`, `model.generate`, `hw.answer`, and `model.hooks`."""

    site: Site
    layer: int
    spec: ReplacementSpec
    positions: Where
    heads: Heads
    keys: Where
    replacement: Replacement | None = None
    """The values, once all prompts of the call are known."""
    numbers: Mapping[int | str, int] = field(default_factory=dict)
    """By name of a row: the number of its prompt among all of the call."""

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

    def over(self, model: HookedModel, prompts: Batch) -> EditHook:
        """Return the hook for all prompts of a call, whose rows have the numbers of these."""
        if self.replacement is not None:
            return self
        numbers = {prompts.name(row): row for row in range(len(prompts))}
        return self._over(model, read_prompts(model, prompts), numbers)

    def _over(self, model: HookedModel, prompts: tuple[Prompt, ...], numbers: Mapping[int | str, int]) -> EditHook:
        sites, pair = (self.site.fitted(model),), PromptPair(prompts)
        replacement = build_replacement(model, self.spec, None, pair, sites, positions=self.positions)
        return replace(self, replacement=replacement, numbers=numbers)

    def _over_lengths(self, model: HookedModel, names: Sequence[int | str], lengths: Sequence[int]) -> EditHook:
        """Return the hook for prompts of these lengths, whose tokens and whose total number are unknown."""
        # A number is that of the prompt among all of the call, whose batches may have them in another order.
        are_numbers = all(isinstance(name, int) for name in names)
        numbers = {name: int(name) if are_numbers else row for row, name in enumerate(names)}
        prompts = [Prompt((0,), ())] * (1 + max(numbers.values()))
        for name, length in zip(names, lengths, strict=True):
            prompts[numbers[name]] = Prompt((0,) * length, ())
        return self._over(model, tuple(prompts), numbers)

    def hook_for(self, model: HookedModel, batch: Batch | None, new: Reading | None = None) -> Hook:
        """Return the hook for these prompts; without prompts, for any input of the model.

        For `new` tokens, which follow the prompts: an edit of all positions changes each; other edits do nothing.
        """
        site = self.site.fitted(model)
        (layer,) = site.among([checked_layer("layer", self.layer, model.shape.n_layers)], model, edited=True)
        everywhere = is_all(self.positions) and is_all(self.keys)
        if new is not None:
            if not everywhere:
                return site.hook_name(layer), read_hook(lambda activation, hook: None)
            starts = new.positions[:, 0].tolist()
            bound = self._over_lengths(model, new.rows, starts) if self.replacement is None else self
            lengths = [start + int((row >= 0).sum()) for start, row in zip(starts, new.positions, strict=True)]
            write_new = bound._writer(model, site, layer, new.rows, lengths, starts)
            return site.hook_name(layer), replace_hook(_Writes(self, write_new))
        if batch is not None:
            bound, names = self.over(model, batch), [batch.name(row) for row in range(len(batch))]
            return site.hook_name(layer), replace_hook(_Writes(self, bound._writer(model, site, layer, names)))
        if not everywhere or VALUES[self.spec.kind].of_prompts or site.leaves_out:
            raise InputError(
                f"{self!r} needs the prompts; give it to model.run(prompts, hooks=[...]) in place of model.hooks."
            )

        def write(activation: Tensor) -> Tensor:
            if (reading := now_reading()) is not None and bool((reading.positions[:, 0] > 0).any()):
                # Generated tokens: they have positions and keys that the activation does not show.
                return cast("Tensor", self.hook_for(model, batch, reading)[1](activation, hook=None))
            rows = tuple(range(len(activation))) if reading is None else reading.rows
            lengths = [activation.shape[2 if site.has_keys else 1]] * len(rows)
            return self._over_lengths(model, rows, lengths)._writer(model, site, layer, rows)(activation)

        # Made once and discarded: a head or value that does not fit is refused here, not during the run.
        self._over_lengths(model, (0,), [1])._writer(model, site, layer, [0])
        return site.hook_name(layer), replace_hook(_Writes(self, write))

    def _writer(
        self,
        model: HookedModel,
        site: Site,
        layer: int,
        names: Sequence[int | str],
        lengths: Sequence[int] | None = None,
        starts: Sequence[int] | None = None,
    ) -> Callable[[Tensor], Tensor]:
        """Return the function that applies the edit to an activation of these prompts, or of their last tokens."""
        assert self.replacement is not None
        if starts is not None and not self.replacement.covers_new_tokens:
            raise InputError(
                f"{self.replacement.label or self.spec.kind}: the other prompts have values for the tokens of a "
                "prompt, none for generated ones. Give positions= within the prompt, such as range(4)."
            )
        try:
            _, numbers = layers_and_heads(layer, self.heads, model.shape, kv_site_of([site]), advice="")
        except InputError as error:
            raise InputError(f"{self!r}: {error}") from None
        heads = None if numbers is None else resolve_indices(numbers, site.n_heads(model.shape), "head")
        units = None if site.units is None or len(site.units) == site.width(model.shape, 1) else tuple(site.units)
        prompts, examples = self.replacement.inputs.pair.base, [self.numbers[name] for name in names]
        edits = []
        for row, example in enumerate(examples):
            prompt, named, of = prompts[example], None, None
            if starts is None:
                at = positions_of(self.positions, prompt, example, len(prompts))
                at = seen_positions(site, prompt, at) if prompt.strings else at
                of = None if is_all(self.keys) else positions_of(self.keys, prompt, example, len(prompts))
                named = None if len(at) == len(prompt) else at
            edits.append((Edit(site, range(layer, layer + 1), named, heads, of, units), row))
        lengths = [len(prompts[example]) for example in examples] if lengths is None else lengths
        wanted = ValueRequest(model, examples, lengths, ((site.name, layer),), {}, {site.name: site})
        # A tensor made in inference mode could not be part of a graph that the caller is building.
        with torch.inference_mode(not torch.is_grad_enabled()):
            values = compute_values(self.replacement, wanted)
        return lambda activation: written_into(activation, None, edits, values, layer, starts=starts)


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
            In generation these are tokens of the prompts; "all" also covers the generated tokens, whose positions
            follow the prompt's: a tensor of positions needs a row for each, a function gets them in `place.position`.
        heads: the heads, by number (key-value heads for `k` and `v`) or by names of heads of this layer, as "9.2".
        keys: the key positions of `pattern` to edit, specified like `positions`.

    Raises:
        InputError: the site or kind of values is unknown. Layer, heads, positions and keys are checked when the hook
            is used.
    """
    if not isinstance(site, str | Site):
        raise InputError(f"site={shown(site)} is neither the name of a site nor features of a dictionary.")
    row = site if isinstance(site, Site) else SITES[site]
    chosen_keys = None if is_all(keys) else keys
    for option, chosen, has in (("heads", heads, row.has_heads), ("keys", chosen_keys, row.has_keys)):
        if chosen is not None and not has:
            raise InputError(f"{option}={shown(chosen)}: {row.name} has no {option}.")
    spec = replacement_spec(values)
    if spec.kind == "other run":
        raise InputError("hw.edit has no other run; give its cached activation as a tensor.")
    if spec.arguments.get("samples", 1) != 1:
        raise InputError("hw.edit is one edit: give hw.noise(..., samples=1), and other seeds for other draws.")
    # Only a dictionary's site has a layer of its own.
    own_layer = getattr(row, "layer", None)
    edited_layer: Any = own_layer if layer is None else layer
    if (
        not is_index(edited_layer)
        or isinstance(layer, bool)
        or (own_layer is not None and int(edited_layer) != own_layer)
    ):
        wanted = "None, the dictionary has its own" if own_layer is not None else "one whole number, -1 for the last"
        raise InputError(f"layer={shown(layer)} must be {wanted}; several layers are several hooks.")
    return EditHook(row, int(edited_layer), spec, positions, materialize(heads), keys)
