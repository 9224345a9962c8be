"""Ordinary forwards of whole prompts: with hooks that make the edits of each row, or that keep what is wanted."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from headwater.errors import InterventionError
from headwater.kernels.devices import sent
from headwater.models.checks import edges_are_cut, finite_output
from headwater.models.edits import Hook, looks, makes
from headwater.models.hooked import HookedModel
from headwater.models.sites import SITES, Stage, hook_name, main_site
from headwater.models.tokens import Batch
from headwater.patching.rows import Stretch, Values, write_patterns, write_tokens
from headwater.patching.variants import (
    LOGITS,
    Cut,
    Place,
    Reading,
    Replace,
    Variant,
)


def run_variants(
    model: HookedModel,
    prompts: Batch,
    variants: Sequence[Variant],
    examples: Sequence[int],
    values: Values,
    before: Sequence[Hook] = (),
) -> dict[Reading, dict[int, Tensor]]:
    """Run prompts with hooks, each row with the edits of its variant; return by reading and row, `kept width`.

    `examples` is which of the group each row is, `before` are hooks that act before the edits.
    """
    n_layers = model.shape.n_layers
    stop = max(deepest(variant) for variant in variants)
    rows = {reading: [i for i, v in enumerate(variants) if reading in v.readings] for reading in _readings(variants)}
    read: dict[Reading, dict[int, Tensor]] = {reading: {} for reading in rows}

    def take(activation: Tensor, hook: object, reading: Reading) -> None:
        read[reading] = {row: activation[row, list(variants[row].kept)].clone() for row in rows[reading]}

    hooks = [*before, *_edits(variants, examples, values, stop)]
    for site, layer in rows:
        if site != LOGITS:
            hooks.append((SITES[site].hook_name(layer), looks(partial(take, reading=(site, layer)))))
    columns = sorted({position for variant in variants for position in variant.kept})
    wants_logits = (LOGITS, n_layers) in rows
    stop_at = None if wants_logits or stop == n_layers else stop
    out = model.run(prompts, hooks, keep=columns if stop_at is None else None, stop_at=stop_at)
    if wants_logits:
        at = {position: column for column, position in enumerate(columns)}
        for row in rows[LOGITS, n_layers]:
            read[LOGITS, n_layers][row] = out[row, [at[position] for position in variants[row].kept]]
    return read


def deepest(variant: Variant) -> int:
    """Return how many layers of the model what is read of a variant needs."""
    return max(layer + (site != LOGITS) for site, layer in variant.readings)


def run_edited(
    model: HookedModel, prompt: Batch, variant: Variant, example: int, values: Values, before: Sequence[Hook] = ()
) -> None:
    """Run one prompt with a variant's edits after other hooks, for what the model's own checks say of it."""
    n_layers = model.shape.n_layers
    model.run(prompt, [*before, *_edits([variant], [example], values, n_layers)], stop_at=n_layers)


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


def _readings(variants: Sequence[Variant]) -> list[Reading]:
    return sorted({reading for variant in variants for reading in variant.readings})


def _edits(variants: Sequence[Variant], examples: Sequence[int], values: Values, stop: int) -> list[Hook]:
    """Return the hooks that make the edits of each row's variant in the layers before one."""
    written: dict[Place, list[tuple[int, Replace]]] = {}
    severed: dict[tuple[int, bool], list[tuple[int, Cut]]] = {}
    for row, variant in enumerate(variants):
        for edit in variant.edits:
            for layer in range(edit.layers.start, min(edit.layers.stop, stop)):
                if isinstance(edit, Replace):
                    written.setdefault((edit.site.name, layer), []).append((row, edit))
                else:
                    severed.setdefault((layer, edit.zero), []).append((row, edit))
    hooks: list[Hook] = []
    for (layer, zero), cuts in severed.items():
        hooks += _cutting(cuts, layer, zero)
    for (_, layer), own in written.items():
        edits = [(edit, examples[row]) for row, edit in own]
        act = partial(written_into, edits=edits, values=values, layer=layer, rows=[row for row, _ in own])
        hooks.append((own[0][1].site.hook_name(layer), makes(act)))
    return hooks


def _cutting(cuts: Sequence[tuple[int, Cut]], layer: int, zero: bool) -> list[Hook]:
    """Return the hooks that sever the edges of some rows in a layer, after the softmax or before it."""
    pattern = main_site(Stage.PATTERN).hook_name(layer)
    if zero:
        return [(pattern, makes(partial(_zero, cuts=cuts)))]
    masked = makes(partial(_mask, cuts=cuts, where=f"layer {layer}"))
    return [(hook_name("attn_scores", layer), masked), (pattern, looks(partial(_see_cut, cuts=cuts, where=pattern)))]


def written_into(
    activation: Tensor,
    hook: object,
    edits: Sequence[tuple[Replace, int]],
    values: Values,
    layer: int,
    rows: Sequence[int] | None = None,
) -> Tensor:
    """Return an activation of whole prompts, `batch position ...`, with edits of these rows written.

    With each edit comes the example whose values it writes. Without `rows`, the edits are those of every row in turn.

    Raises:
        InterventionError: a change returns what cannot stand there.
    """
    edited = activation.clone(memory_format=torch.contiguous_format)
    site, length = edits[0][0].site, edited.shape[2 if edits[0][0].site.has_keys else 1]
    lengths = [values.lengths[example] if values.lengths else length for _, example in edits]
    rows, apart = range(len(edits)) if rows is None else rows, 1 if site.has_keys else length
    stretches = [
        Stretch(edit, np.array([example]), 0, held, np.array([row * apart]))
        for (edit, example), held, row in zip(edits, lengths, rows, strict=True)
    ]
    if not site.has_keys:
        write_tokens(edited.flatten(0, 1), stretches, values, site, layer)
        return edited
    of_row, keys = np.zeros(len(edited), dtype=np.int64), np.arange(edited.shape[-1])
    of_row[list(rows)] = lengths
    columns = sent(np.where(keys < of_row[:, None], keys, -1), edited.device)
    write_patterns(edited, stretches, columns, values, site, layer)
    return edited


def _zero(pattern: Tensor, hook: object, cuts: Sequence[tuple[int, Cut]]) -> Tensor:
    return pattern.masked_fill(_severed(pattern, cuts), 0.0)


def _mask(scores: Tensor, hook: object, cuts: Sequence[tuple[int, Cut]], where: str) -> Tensor:
    least, severed = torch.finfo(scores.dtype).min, _severed(scores, cuts)
    visible = scores > least / 2
    blind = visible.any(-1) & ~(visible & ~severed).any(-1)
    if bool(blind.any()):
        token = int(blind.nonzero()[0][-1])
        raise InterventionError(
            f"Knocking out these edges leaves token {token} no key to attend to in {where}. Leave it at least one key, "
            "or use variant='zero'."
        )
    return scores.masked_fill(severed, least)


def _see_cut(pattern: Tensor, hook: object, cuts: Sequence[tuple[int, Cut]], where: str) -> None:
    edges_are_cut(pattern, _severed(pattern, cuts), where)


def _severed(scores: Tensor, cuts: Sequence[tuple[int, Cut]]) -> Bool[Tensor, "row head query key"]:
    """Say which edges are severed, of attention scores or weights of whole prompts."""
    severed = torch.zeros_like(scores, dtype=torch.bool)
    for row, cut in cuts:
        edges = cut.edges[: scores.shape[-2], : scores.shape[-1]].to(scores.device)
        heads: Any = slice(None) if cut.heads is None else list(cut.heads)
        severed[row, heads, : len(edges), : edges.shape[1]] |= edges
    return severed
