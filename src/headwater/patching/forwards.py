"""Ordinary forwards of whole prompts: with hooks that make a variant's edits, or that keep what is wanted."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from headwater.errors import InterventionError
from headwater.models.checks import edges_are_cut, finite_output
from headwater.models.edits import Hook, looks, makes
from headwater.models.hooked import HookedModel
from headwater.models.sites import SITES, Stage, hook_name, main_site
from headwater.models.tokens import Batch
from headwater.patching.rows import Stretch, Values, write_patterns, write_tokens
from headwater.patching.variants import (
    LOGITS,
    Cut,
    Edit,
    Reading,
    Replace,
    Variant,
)


def run_variant(
    model: HookedModel, prompt: Batch, variant: Variant, example: int, values: Values, before: Sequence[Hook] = ()
) -> dict[Reading, Tensor]:
    """Run one prompt with hooks and a variant's edits; return each reading at the kept positions, `kept width`.

    `example` is which of the group the prompt is.
    """
    n_layers = model.shape.n_layers
    deepest = max(layer + (site != LOGITS) for site, layer in variant.readings)
    read: dict[Reading, Tensor] = {}

    def take(activation: Tensor, hook: object, reading: Reading) -> None:
        read[reading] = activation[0, list(variant.kept)].clone()

    hooks = [*before, *_edits(variant, example, values, deepest)]
    for site, layer in variant.readings:
        if site != LOGITS:
            hooks.append((SITES[site].hook_name(layer), looks(partial(take, reading=(site, layer)))))
    wants_logits = (LOGITS, n_layers) in variant.readings
    stop_at = None if wants_logits or deepest == n_layers else deepest
    out = model.run(prompt, hooks, keep=list(variant.kept) if stop_at is None else None, stop_at=stop_at)
    if wants_logits:
        read[LOGITS, n_layers] = out[0]
    return read


def run_edited(
    model: HookedModel, prompt: Batch, variant: Variant, example: int, values: Values, before: Sequence[Hook] = ()
) -> None:
    """Run one prompt with a variant's edits after other hooks, for what the model's own checks say of it."""
    n_layers = model.shape.n_layers
    model.run(prompt, [*before, *_edits(variant, example, values, n_layers)], stop_at=n_layers)


def capture(
    model: HookedModel,
    batch: Batch,
    names: Sequence[str],
    keep: Int[Tensor, " kept"] | None = None,
    before: Sequence[Hook] = (),
) -> tuple[dict[str, Tensor], Tensor]:
    """Run prompts; return the named activations and the logits at the kept columns (without any, the last residual).

    `before` are hooks that act before anything is kept.

    Raises:
        NumericsError: the model computes NaN or infinity anywhere, kept or not.
    """
    held: dict[str, Tensor] = {}

    def hold(activation: Tensor, hook: object, name: str) -> None:
        held[name] = activation.clone()

    n_layers = model.shape.n_layers
    last = main_site(Stage.BLOCK_OUTPUT).hook_name(n_layers - 1)
    hooks = [(name, looks(partial(hold, name=name))) for name in dict.fromkeys([*names, last])]
    with model.lock:
        out = model.run(batch, [*before, *hooks], keep=keep, stop_at=n_layers if keep is None else None)
        finite_output(model, held[last], batch, None)
    return held, out


def visible_keys(model: HookedModel, prompt: Batch, layers: Collection[int]) -> dict[int, Bool[Tensor, "query key"]]:
    """Return which keys each query sees at these layers, read off the masked scores of one run."""
    visible: dict[int, Tensor] = {}

    def look(scores: Tensor, hook: object, layer: int) -> None:
        visible[layer] = scores[0, 0] > torch.finfo(scores.dtype).min / 2

    hooks = [(hook_name("attn_scores", layer), looks(partial(look, layer=layer))) for layer in layers]
    model.run(prompt, hooks, stop_at=max(layers) + 1)
    return visible


def _edits(variant: Variant, example: int, values: Values, deepest: int) -> list[Hook]:
    """Return the hooks that make a variant's edits in the layers before one."""
    layers = [(edit, layer) for edit in variant.edits for layer in edit.layers if layer < deepest]
    return [hook for edit, layer in layers for hook in _hooks(edit, layer, example, values)]


def _hooks(edit: Edit, layer: int, example: int, values: Values) -> list[Hook]:
    if isinstance(edit, Replace):
        written = partial(written_into, edits=[(edit, example)], values=values, layer=layer)
        return [(edit.site.hook_name(layer), makes(written))]
    pattern = main_site(Stage.PATTERN).hook_name(layer)
    if edit.zero:
        return [(pattern, makes(partial(_zero, cut=edit)))]
    masked = makes(partial(_mask, cut=edit, where=f"layer {layer}"))
    return [(hook_name("attn_scores", layer), masked), (pattern, looks(partial(_see_cut, cut=edit, where=pattern)))]


def written_into(
    activation: Tensor, hook: object, edits: Sequence[tuple[Replace, int]], values: Values, layer: int
) -> Tensor:
    """Return an activation of whole prompts, `batch position ...`, with the edit of each row and its example written.

    Raises:
        InterventionError: a change returns what cannot stand there.
    """
    edited = activation.clone(memory_format=torch.contiguous_format)
    site, length = edits[0][0].site, edited.shape[2 if edits[0][0].site.has_keys else 1]
    lengths = [values.lengths[example] if values.lengths else length for _, example in edits]
    apart = 1 if site.has_keys else length
    stretches = [
        Stretch(edit, np.array([example]), 0, held, np.array([i * apart]))
        for i, ((edit, example), held) in enumerate(zip(edits, lengths, strict=True))
    ]
    if not site.has_keys:
        write_tokens(edited.flatten(0, 1), stretches, values, site, layer)
        return edited
    keys = np.arange(edited.shape[-1])
    columns = torch.from_numpy(np.where(keys < np.array(lengths)[:, None], keys, -1)).to(edited.device)
    write_patterns(edited, stretches, columns, values, site, layer)
    return edited


def _zero(pattern: Tensor, hook: object, cut: Cut) -> Tensor:
    return torch.where(_severed(pattern, cut), 0.0, pattern)


def _mask(scores: Tensor, hook: object, cut: Cut, where: str) -> Tensor:
    least = torch.finfo(scores.dtype).min
    visible = scores > least / 2
    left = visible & ~_severed(scores, cut)
    if bool((visible.any(-1) & ~left.any(-1)).any()):
        token = int((visible.any(-1) & ~left.any(-1)).nonzero()[0][-1])
        raise InterventionError(
            f"Knocking out these edges leaves token {token} no key to attend to in {where}. Leave it at least one key, "
            "or use variant='zero'."
        )
    return scores.masked_fill(_severed(scores, cut), least)


def _see_cut(pattern: Tensor, hook: object, cut: Cut, where: str) -> None:
    edges_are_cut(pattern, _severed(pattern, cut), where)


def _severed(scores: Tensor, cut: Cut) -> Tensor:
    severed = torch.zeros_like(scores, dtype=torch.bool)
    heads: Any = slice(None) if cut.heads is None else list(cut.heads)
    length = scores.shape[-2]
    severed[:, heads] = cut.edges[:length, :length].to(scores.device)
    return severed
